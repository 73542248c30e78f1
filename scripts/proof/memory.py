"""Estimate GPU memory: of a learner at the peak of an update, part by part, and of an engine and its cache.

    python scripts/proof/memory.py MODEL --pack_length 8192 --learners 8 --deepspeed_stage 3 --gradient_checkpointing
    python scripts/proof/memory.py --table      GiB by model, pack length and learners: the table of proof/README.md
    python scripts/proof/memory.py DIR ... --table  the same of models with a config.json in DIR

Flags have the names, meanings and defaults of the training scripts, whose --dry_run starts it. It needs a model's
config.json on this machine and neither its weights nor a GPU. CUDA's and NCCL's own and fragmentation come on top. What
it prints is kept in ~/.cache/grpo: the same question is answered at once.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

GIB = 2**30
BUCKET = 2**28  # bytes of a weight broadcast, as in grpo_fast.py
LENGTHS, LEARNERS = (2048, 8192, 32768), (1, 2, 4, 8, 16)
SHAPES = {  # hidden, MLP, layers, heads, key-value heads, tied head (their config.json)
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, False),
}


@dataclass(frozen=True)
class Setup:
    """What of a run decides how much memory it takes."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Hub name or directory of the causal LM."""
    table: bool = False
    """Print a row for each model, with deepspeed_stage 3 and gradient_checkpointing; none named: public ones."""
    model_revision: str | None = None
    """Hub revision."""
    model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype. auto is bfloat16 here: any GPU that training is planned for has it."""
    learners: int = 1
    """Learner ranks, over which deepspeed_stage shards."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """0: replicated learner; 2: gradients and optimizer state sharded; 3: parameters too."""
    sequence_parallel_size: int = 1
    """Learners that share the tokens of a pack."""
    gradient_checkpointing: bool = False
    """Activations are computed again in backward."""
    gradient_checkpointing_part: Literal["layer", "mlp"] = "layer"
    """Those of a whole layer, or of its MLP alone."""
    lora_rank: int = 0
    """Rank of adapters at every matrix of the layers; 0: all weights train."""
    load_ref_policy: bool = True
    """There is a reference policy."""
    ref_model_name_or_path: str = ""
    """Hub name or directory of a teacher, which is the reference policy."""
    ref_model_revision: str | None = None
    """Its hub revision."""
    ref_model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the teacher; auto is the policy's."""
    ref_policy_update_freq: int | None = None
    """Steps between refreshes of the reference policy, which then takes 4 bytes a weight."""
    pack_length: int = 512
    """Tokens of a forward and backward."""
    logprob_chunk: int = 1024
    """Tokens whose logits exist at once."""
    max_prompt_token_length: int = 256
    """Tokens of a prompt; with response_length what a response takes of the engine's cache."""
    response_length: int = 256
    """Tokens of a response."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of its GPU that an engine takes."""
    vllm_tensor_parallel_size: int = 1
    """GPUs of an engine."""
    vllm_sleep: Literal["auto", "on", "off"] = "auto"
    """On a GPU it shares with the learner an engine gives its memory back during updates, but with off."""
    shared_gpu: bool = True
    """Learner and engine are on one GPU, as in grpo.py."""


def meta_model(config: Any, dtype: Any, repeats: int = 1, lora_rank: int = 0) -> Any:
    """A model without memory, whose attention keeps what flash and flex attention keep for their backward, the keys and
    values `repeats` times."""
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            out = torch.empty_like(query)
            ctx.save_for_backward(query, key, value, out)
            return out

    def kept(_module, query, key, value, *_more, **_others):
        both = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
        return Kept.apply(query, *both).transpose(1, 2), None

    AttentionInterface.register("kept", kept)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="kept")
    if lora_rank:
        from peft import LoraConfig, inject_adapter_in_model

        options = LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        inject_adapter_in_model(options, model, low_cpu_mem_usage=True)  # freezes the rest
        model.to(dtype)
    return model


def kept_for_backward(model: Any, tokens: int) -> int:
    """Bytes that a forward of `tokens` tokens keeps for its backward, weights apart. A model on the meta device runs,
    so it takes neither memory nor time."""
    import torch

    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, position_ids=ids, use_cache=False)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)


def size_of(model: Any, item: int, setup: Setup) -> tuple[int, int, list[Any], float]:
    """Of a model its weights, those in no layer, its layers, and the bytes of what a forward gathers."""
    names = set(model._no_split_modules or ())
    layers = [m for m in model.modules() if type(m).__name__ in names]
    whole = sum(p.numel() for p in model.parameters())
    root = whole - sum(p.numel() for layer in layers for p in layer.parameters())
    return (
        whole,
        root,
        layers,
        item * (root + 2 * (whole - root) / len(layers) if setup.deepspeed_stage == 3 else whole),
    )


def memory_estimate(setup: Setup, config: Any, ref_config: Any = None) -> dict[str, float]:
    """Bytes on a learner's GPU at the peak of an update, by what they are for, without CUDA's and NCCL's own and
    fragmentation; and of an engine: engine_weights, and engine_token for each token in its cache.

    With N weights on S shards (the learners from deepspeed_stage 2 on, else 1): master weights and gradients 4 N / S
    each, Adam 8 N / S, gathered in compute dtype all of N, or with stage 3 two layers and what is in no layer. The
    reference policy, or the teacher of `ref_config`, lies there in its compute dtype (in float32 if it is refreshed);
    what its forward gathers is gone before the update and counts if it is more than what that takes. With lora_rank
    only adapters have gradients, float32 and Adam: the model is frozen, in compute dtype, its own reference policy.
    Activations of one pack of --pack_length tokens, or of the part that sequence_parallel_size leaves a learner (its
    attention has all tokens of a part of the heads), are counted by a forward on the meta device; the head makes the
    logits of logprob_chunk tokens at a time. They are gone when the last gradients, of the embeddings, are reduced. To
    engines on GPUs of their own learner 0 sends the weights in buckets, four of which are alive at once.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    dtype = torch.float32 if setup.model_dtype == "float32" else torch.bfloat16
    text, size = config.get_text_config(), setup.sequence_parallel_size
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if text.num_attention_heads % size:
        words = f"--sequence_parallel_size {size} does not divide the model's {text.num_attention_heads}"
        raise ValueError(f"{words} attention heads")
    model = meta_model(config, dtype, size // math.gcd(heads, size), setup.lora_rank)
    whole, root, layers, gathered = size_of(model, dtype.itemsize, setup)
    head = model.get_output_embeddings().weight.numel()
    item, shards = dtype.itemsize, setup.learners if setup.deepspeed_stage >= 2 else 1
    tokens, vocabulary = -(-setup.pack_length // size), text.vocab_size
    whole_layers = setup.gradient_checkpointing and setup.gradient_checkpointing_part == "layer"
    for layer in layers if setup.gradient_checkpointing and not whole_layers else ():
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=False)
    activations = kept_for_backward(model, tokens)
    if whole_layers:
        activations = activations / len(layers) + len(layers) * tokens * text.hidden_size * item
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = whole - trained
    ends = 0 if setup.lora_rank else 4 + item  # bytes of the gradients of a weight of embeddings and head
    in_head = head * ends + 12 * min(setup.logprob_chunk, tokens) * vocabulary
    ref_whole, ref_item, ref_gathered, logits = whole, item, gathered, 12 * min(setup.logprob_chunk, tokens)
    if ref_config is not None:
        ref_item = item if setup.ref_model_dtype == "auto" else getattr(torch, setup.ref_model_dtype).itemsize
        ref_whole, *_, ref_gathered = size_of(meta_model(ref_config, dtype), ref_item, setup)
    update = 4 * trained / shards + gathered + max(activations + in_head, root * ends)
    beyond = max(0.0, ref_gathered + logits * (ref_config or config).get_text_config().vocab_size - update)
    reference = (ref_item if setup.ref_policy_update_freq is None else 4) * ref_whole / shards + beyond
    own = not setup.load_ref_policy or (setup.lora_rank > 0 and ref_config is None)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tp = setup.vllm_tensor_parallel_size
    return {
        "weights": (4 * trained + item * frozen) / shards,
        "gradients": 4 * trained / shards,
        "Adam": 8 * trained / shards,
        "reference": 0.0 if own else reference,
        "gathered": gathered,
        "activations and head": max(activations + in_head, root * ends),
        "engine_weights": item * (frozen or whole) / tp,
        "engine_token": 2 * text.num_hidden_layers * heads * head_dim * item / tp,
    } | ({} if setup.shared_gpu else {"buckets": min(item * whole, 4 * BUCKET + item * head)})


def estimate_text(setup: Setup, config: Any, ref_config: Any = None) -> str:
    """The estimate in two lines, the share of a teacher in an update's time, and, where it is more than a GPU (80 GiB
    where none is visible), what helps."""
    import torch

    parts = memory_estimate(setup, config, ref_config)
    weights, token = parts.pop("engine_weights"), parts.pop("engine_token")
    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * GIB
    share, longest = setup.vllm_gpu_memory_utilization, setup.max_prompt_token_length + setup.response_length
    learner, engine = sum(parts.values()), share * gpu
    fits = max(0, int((engine - weights) / (token * longest)))
    asleep = setup.shared_gpu and setup.vllm_sleep != "off"  # then either works: weights, Adam, reference stay
    between = sum(parts[name] for name in ("weights", "Adam", "reference"))
    used = max(learner, between + engine) if asleep else learner + engine if setup.shared_gpu else learner
    room = f"{fits:,} responses of {longest:,} tokens"
    sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    lines = [
        f"memory   learner, GiB a GPU: {sizes}: {learner / GIB:.1f}",
        f"         engine, {share:g} of {gpu / GIB:.0f} GiB: weights {weights / GIB:.1f} and {token / 1024:.0f} KiB a "
        f"token, {room} at once{', asleep during updates' * asleep}",
    ]
    if ref_config is not None:
        whole, theirs = (size_of(meta_model(c, torch.bfloat16), 2, setup)[0] for c in (config, ref_config))
        passes = 3 + setup.gradient_checkpointing
        lines.append(
            f"         teacher: {theirs / 1e9:.2f} billion weights to the policy's {whole / 1e9:.2f}, "
            f"{theirs / (theirs + passes * whole):.0%} of an update's operations"
        )
    if used > 0.95 * gpu or not fits:
        lines.append(
            f"         WARNING: that is {used / GIB:.0f} of {gpu / GIB:.0f} GiB. What helps: --gradient_checkpointing, "
            "--deepspeed_stage 3\n         and --sequence_parallel_size on more GPUs, a smaller --pack_length or "
            "--vllm_gpu_memory_utilization; for an engine --vllm_tensor_parallel_size"
        )
    return "\n".join(lines)


def qwen(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool) -> Any:
    """The configuration of a Qwen2.5 model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen2",
        vocab_size=151936 if hidden < 3584 else 152064,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )


def row(name: str, config: Any, setup: Setup) -> str:
    """A model's row of the Markdown table; * is above 75 GiB."""
    cells = []
    for learners in LEARNERS:
        sizes = []
        for length in LENGTHS:
            parts = memory_estimate(replace(setup, pack_length=length, learners=learners), config)
            weights, token = parts.pop("engine_weights") / GIB, parts.pop("engine_token") / 2**10
            used = sum(parts.values()) / GIB
            sizes.append(f"{used:.0f}{'*' * (used > 75)}")
        cells.append(" / ".join(sizes))
    return f"| {' | '.join([name, *cells, f'{weights:.1f} + {token:.0f} KiB a token'])} |"


def print_table(setup: Setup) -> None:
    """The table of the models named, or of the public ones."""
    setup = replace(setup, deepspeed_stage=3, gradient_checkpointing=True)
    heads = [f"packs of {' / '.join(f'{n:,}' for n in LENGTHS)} tokens", *(f"{n} GPU" for n in LEARNERS), "engine"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * (len(LEARNERS) + 2) + "|")
    for name in setup.models or SHAPES:
        config = load_config(name, setup.model_revision) if setup.models else qwen(*SHAPES[name])
        print(row(Path(name).name, config, setup))


def config_file(name: str, revision: str | None) -> Path:
    """The model's config.json. Raises ValueError where this machine does not have it."""
    if Path(name).is_dir():
        return Path(name) / "config.json"
    if name.startswith(("/", ".", "~")):
        raise ValueError(f"no directory {name}")
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise ValueError(f"no config.json of {name} on this machine (hf download {name} config.json)")
    return Path(cached)


def load_config(name: str, revision: str | None) -> Any:
    """The model's configuration. Raises ValueError where this machine does not have it."""
    config_file(name, revision)  # before transformers is imported, which takes seconds
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)


def remembered(setup: Setup) -> str:
    """estimate_text of the first model, which is kept for the next start: a file of $XDG_CACHE_HOME/grpo for each set
    of all that it depends on. Models' code from transformers takes longer to import than all else of a --dry_run.
    Raises OSError or ValueError where this machine has no config.json of a model."""
    import torch

    models = [(setup.models[0], setup.model_revision), (setup.ref_model_name_or_path, setup.ref_model_revision)]
    models = models if setup.ref_model_name_or_path else models[:1]
    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "peft")]
    depends = [setup, gpu, versions, Path(__file__).read_bytes()]
    depends += [config_file(*model).read_bytes() for model in models]
    key = hashlib.sha256(repr(depends).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kept = Path(cache, "grpo", f"memory_{key[:32]}")
    if kept.exists():
        return kept.read_text()
    text = estimate_text(setup, *(load_config(*model) for model in models))
    with contextlib.suppress(OSError):  # a home that cannot be written to: then the next start takes as long
        kept.parent.mkdir(parents=True, exist_ok=True)
        (unfinished := kept.with_suffix(f".{os.getpid()}")).write_text(text)
        unfinished.replace(kept)
    return text


def tell(setup: Setup) -> int:
    """Print what is asked for; the exit status."""
    try:
        if setup.table or not setup.models:
            print_table(setup)
        for name in () if setup.table else setup.models:
            print(remembered(replace(setup, models=(name,))))
    except (OSError, ValueError) as error:
        print(f"memory   not estimated: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(tell(tyro.cli(Setup, description=__doc__, use_underscores=True)))
