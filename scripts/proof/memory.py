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
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.proof.shapes import GIB, GPUS, SHAPES, config_file, load_config, qwen

BUCKET = 2**28  # bytes of a weight broadcast, as in grpo_fast.py
# GiB that a sleeping engine keeps: CUDA's context and workspaces, and graphs, for which vLLM's log names 1 to 3 GiB
# ("CUDA graphs can take additional 1~3 GiB memory per GPU"). A 1,000B model on 8 GPUs kept 7 (vLLM issue 47654)
ASLEEP = (1, 4)
LENGTHS = (2048, 8192, 32768)
LEARNERS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Setup:
    """What of a run decides how much memory it takes."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Hub name or directory of the causal LM."""
    table: bool = False
    """Print a row for each model, with deepspeed_stage 3 and gradient_checkpointing; none named: public ones."""
    model_revision: str | None = None
    """Hub revision."""
    model_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype. auto is bfloat16 here: any GPU that training is planned for has it."""
    learners: int = 1
    """Learner ranks, over which deepspeed_stage shards."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """0: replicated learner; 2: gradients and optimizer state sharded; 3: parameters too."""
    fsdp_shard_size: int = 0
    """Learners that share a copy of the model. 0: all."""
    offload: list[Literal["reference", "optimizer"]] = field(default_factory=list)
    """What is in host memory: the reference policy's shards, Adam's moments."""
    sequence_parallel_size: int = 1
    """Learners that share the tokens of a pack."""
    attn_implementation: str = "sdpa"
    """The learner's attention; sdpa is our own, which shares prompts."""
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
    gpu: str = ""
    """GPU to plan for: h100, h200, h20, a100 or 4090. Empty: the one of this machine; without one, a GPU of 80 GiB."""


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

    def kept(_module, query, key, value, *_, **__):
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        return Kept.apply(query, key, value).transpose(1, 2), None

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


class Weights:
    """Numbers of weights of a model."""

    def __init__(self, model: Any):
        classes = set(model._no_split_modules or ())
        self.layers = [module for module in model.modules() if type(module).__name__ in classes]
        self.sizes = [p.numel() for p in model.parameters()]
        self.all = sum(self.sizes)
        in_layers = sum(p.numel() for layer in self.layers for p in layer.parameters())
        self.outside = self.all - in_layers

    def groups(self, itemsize: int) -> list[int]:
        """Weights of each group of layers that FSDP gathers at once."""
        from scripts.parts import sharding

        groups = sharding.layer_groups(self.layers, itemsize)
        return [sum(p.numel() for layer in group for p in layer.parameters()) for group in groups]

    def largest_in_a_layer(self) -> int:
        """Weights of the largest matrix of a layer."""
        return max(p.numel() for layer in self.layers for p in layer.parameters())

    def gathered(self, itemsize: int, stage: int) -> float:
        """Bytes of what a forward gathers: with stage 3 the two largest groups of layers and what is in no layer."""
        if stage != 3:
            return itemsize * self.all
        return itemsize * (self.outside + sum(sorted(self.groups(itemsize))[-2:]))


def cache_bytes(config: Any, itemsize: int) -> int:
    """Bytes of keys and values of one token in an engine's cache."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * itemsize


def activation_bytes(model: Any, layers: list[Any], tokens: int, hidden: int, itemsize: int, setup: Setup) -> float:
    """Bytes of activations that an update of `tokens` tokens keeps. Wraps the MLPs that are computed again."""
    from torch.utils.checkpoint import checkpoint

    if not setup.gradient_checkpointing:
        return kept_for_backward(model, tokens)
    if setup.gradient_checkpointing_part == "layer":  # the input of each layer, and all of the one that is recomputed
        return kept_for_backward(model, tokens) / len(layers) + len(layers) * tokens * hidden * itemsize
    for layer in layers:
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=False)
    return kept_for_backward(model, tokens)


def pinned_bytes(sizes: list[int], itemsize: float) -> int:
    """Bytes of pinned host memory for blocks of so many weights. Torch takes the next power of two for each."""
    total = 0
    for size in sizes:
        total += 1 << (math.ceil(size * itemsize) - 1).bit_length()
    return total


def memory_estimate(setup: Setup, config: Any, ref_config: Any = None) -> dict[str, float]:
    """Bytes on a learner's GPU at the peak of an update, by what they are for, without CUDA's and NCCL's own and
    fragmentation; and of an engine: engine_weights, and engine_token for each token in its cache.

    With N weights on S shards (from deepspeed_stage 2 on the learners, or fsdp_shard_size; else 1): master weights and
    gradients 4 N / S each, Adam 8 N / S, gathered in compute dtype all of N, or with stage 3 two groups of layers
    (sharding.GROUP_BYTES) and what is in no layer. The reference policy, or the teacher of `ref_config`, has its
    compute dtype (float32 if it is refreshed). What its forward gathers is freed before the update and counts if it is
    more than what the update takes. One learner without deepspeed_stage gathers nothing in float32, nor for a reference
    policy that does not train, and adds the gradient of each weight up at once. With lora_rank only adapters have
    gradients, float32 and Adam: the model is frozen, in compute dtype, and is its own reference policy.
    Activations of one pack of --pack_length tokens, or of the part that sequence_parallel_size leaves a learner (its
    attention has all tokens of a part of the heads), are counted by a forward on the meta device. The head makes the
    logits of logprob_chunk tokens at a time. They are freed before the last gradients, of the embeddings, are reduced.
    To engines on GPUs of their own learner 0 sends the weights in buckets, four of which are alive at once.
    What `offload` names is in `host`, bytes of a rank in pinned host memory; of Adam the largest weight's is on the GPU
    at a time.
    """
    import torch

    from scripts.parts import sharding

    text = config.get_text_config()
    group = setup.sequence_parallel_size
    if text.num_attention_heads % group:
        words = f"--sequence_parallel_size {group} does not divide the model's {text.num_attention_heads}"
        raise ValueError(f"{words} attention heads")
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    repeats = group // math.gcd(kv_heads, group)
    dtype = torch.float32 if setup.model_dtype == "float32" else torch.bfloat16
    itemsize = dtype.itemsize
    model = meta_model(config, dtype, repeats, setup.lora_rank)
    weights = Weights(model)
    trained_sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    trained = sum(trained_sizes)
    frozen = weights.all - trained
    shards = (setup.fsdp_shard_size or setup.learners) if setup.deepspeed_stage >= 2 else 1

    tokens = -(-setup.pack_length // group)
    is_plain = sharding.needs_no_wrapper(setup, setup.learners, trains=True)
    gathered = 0.0 if is_plain else weights.gathered(itemsize, setup.deepspeed_stage)
    activations = activation_bytes(model, weights.layers, tokens, text.hidden_size, itemsize, setup)
    logit_rows = 12 * min(setup.logprob_chunk, tokens)  # bytes of the logits at once, over the vocabulary
    gradient_bytes = 4 if is_plain else 4 + itemsize  # of a weight
    if setup.lora_rank:
        gradient_bytes = 0
    layer_weights = weights.all - weights.outside
    head = model.get_output_embeddings().weight.numel() * gradient_bytes + logit_rows * text.vocab_size
    # the gradients of a group, whose activations are gone, wait for its last one
    groups = [weights.largest_in_a_layer()] if is_plain else weights.groups(itemsize)
    group_gradients = [g * gradient_bytes + activations * (1 - g / layer_weights) for g in groups]
    # a forward has a group as it was gathered beside its weights, which the next group would be otherwise
    copy = itemsize * groups[0] if setup.deepspeed_stage == 3 and len(groups) == 1 else 0
    moments = (activations + head, activations + copy, weights.outside * gradient_bytes, *group_gradients)
    activations_and_head = max(moments)

    ref_weights = weights
    if ref_config is not None:
        ref_weights = Weights(meta_model(ref_config, dtype))
    ref_vocabulary = (ref_config or config).get_text_config().vocab_size
    ref_is_plain = sharding.needs_no_wrapper(setup, setup.learners, setup.ref_policy_update_freq is not None)
    ref_gathered = 0.0 if ref_is_plain else ref_weights.gathered(itemsize, setup.deepspeed_stage)
    ref_forward = ref_gathered + logit_rows * ref_vocabulary
    update = 4 * trained / shards + gathered + activations_and_head
    kept_itemsize = itemsize if setup.ref_policy_update_freq is None else 4
    reference = kept_itemsize * ref_weights.all / shards + max(0.0, ref_forward - update)
    is_own_reference = setup.lora_rank > 0 and ref_config is None

    parts: dict[str, float] = {
        "weights": (4 * trained + itemsize * frozen) / shards,
        "gradients": 4 * trained / shards,
        "Adam": 8 * trained / shards,
        "reference": reference if setup.load_ref_policy and not is_own_reference else 0.0,
        "gathered": gathered,
        "activations and head": activations_and_head,
        "engine_weights": itemsize * (frozen or weights.all) / setup.vllm_tensor_parallel_size,
        "engine_token": cache_bytes(text, itemsize) / setup.vllm_tensor_parallel_size,
    }
    if "reference" in setup.offload and parts["reference"]:
        parts["reference"] -= kept_itemsize * ref_weights.all / shards
        parts["host"] = pinned_bytes(ref_weights.sizes, kept_itemsize / shards)
    if "optimizer" in setup.offload:
        parts["host"] = parts.get("host", 0.0) + 2 * pinned_bytes(trained_sizes, 4 / shards)
        parts["Adam"] = 0.0
    if not setup.shared_gpu:
        largest = itemsize * model.get_output_embeddings().weight.numel()
        parts["buckets"] = min(itemsize * weights.all, 4 * BUCKET + largest)
    return parts


def learner_bytes(parts: dict[str, float]) -> float:
    """Bytes of the learner in memory_estimate's parts."""
    return sum(size for name, size in parts.items() if not name.startswith(("engine", "host")))


def gpu_bytes() -> int:
    """Memory of a GPU, 0 where there is none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def planned_gpu(name: str) -> tuple[int, str]:
    """Memory of the GPU of this name or, without a name, of this machine's, and in words which one that is. Raises
    ValueError."""
    if name:
        if name not in GPUS:
            raise ValueError(f"no data sheet of a GPU {name}; there are {', '.join(GPUS)}")
        return int(GPUS[name].memory * GIB), name
    if gpu_bytes():
        return gpu_bytes(), "this machine's"
    return 80 * GIB, f"no GPU here, so one of 80 GiB; PLAN_GPU={'|'.join(GPUS)} plans for another"


def teacher_line(setup: Setup, config: Any, ref_config: Any) -> str:
    """The teacher's share in an update's time."""
    import torch

    policy, teacher = (Weights(meta_model(c, torch.bfloat16)).all for c in (config, ref_config))
    passes = 3 + setup.gradient_checkpointing
    return (
        f"         teacher: {teacher / 1e9:.2f} billion weights to the policy's {policy / 1e9:.2f}, "
        f"{teacher / (teacher + passes * policy):.0%} of an update's operations"
    )


def estimate_text(setup: Setup, config: Any, ref_config: Any = None) -> str:
    """How responses will be packed, the estimate in three lines, the share of a teacher in an update's time, and, where
    it is more than a GPU's, what helps."""
    parts = memory_estimate(setup, config, ref_config)
    learner = learner_bytes(parts)
    weights = parts.pop("engine_weights")
    token = parts.pop("engine_token")
    host = parts.pop("host", 0.0)
    gpu, which = planned_gpu(setup.gpu)
    engine = setup.vllm_gpu_memory_utilization * gpu
    longest = setup.max_prompt_token_length + setup.response_length
    responses = max(0, int((engine - weights) / (token * longest)))

    used = learner
    asleep = ""
    if setup.shared_gpu and setup.vllm_sleep == "off":
        used = learner + engine
    elif setup.shared_gpu:  # learner and engine take turns; weights, Adam and reference stay
        between = parts["weights"] + parts["Adam"] + parts["reference"] + engine
        used = max(learner + ASLEEP[1] * GIB, between)
        asleep = f", asleep during updates but for {ASLEEP[0]} to {ASLEEP[1]} GiB"
    sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    lines = [
        f"packing  {expected_packing(setup, config, ref_config)}",
        f"memory   of a GPU: {gpu / GIB:.0f} GiB ({which})",
        f"         learner, GiB a GPU: {sizes}: {learner / GIB:.1f}",
        f"         engine, {setup.vllm_gpu_memory_utilization:g} of {gpu / GIB:.0f} GiB: weights {weights / GIB:.1f} "
        f"and {token / 1024:.0f} KiB a token, {responses:,} responses of {longest:,} tokens at once{asleep}",
    ]
    if host:
        lines.append(f"         host memory, GiB a learner: {host / GIB:.1f}, of {', '.join(setup.offload)}")
    if ref_config is not None:
        lines.append(teacher_line(setup, config, ref_config))
    if used > 0.95 * gpu or not responses:
        lines.append(
            f"         WARNING: that is {used / GIB:.0f} of {gpu / GIB:.0f} GiB. What helps: --gradient_checkpointing, "
            "--deepspeed_stage 3\n         and --sequence_parallel_size on more GPUs, --offload, a smaller "
            "--pack_length or --vllm_gpu_memory_utilization; for an engine --vllm_tensor_parallel_size"
        )
    return "\n".join(lines)


def expected_packing(setup: Setup, config: Any, ref_config: Any = None) -> str:
    """How responses will be packed by the configs of policy and teacher, and whether a run is refused for it."""
    from scripts.parts import packing

    texts = [packing.expected(one, setup) for one in (config, ref_config) if one is not None]
    text = next((text for text in texts if text.startswith("WARNING")), texts[0])
    if text.startswith("WARNING") and setup.sequence_parallel_size > 1:
        text += f"; --sequence_parallel_size {setup.sequence_parallel_size} is refused"
    return text


def row(name: str, config: Any, setup: Setup) -> str:
    """A model's row of the Markdown table; * is above 75 GiB."""
    cells = [name]
    for learners in LEARNERS:
        sizes = []
        for length in LENGTHS:
            parts = memory_estimate(replace(setup, pack_length=length, learners=learners), config)
            used = learner_bytes(parts) / GIB
            sizes.append(f"{used:.0f}*" if used > 75 else f"{used:.0f}")
        cells.append(" / ".join(sizes))
    cells.append(f"{parts['engine_weights'] / GIB:.1f} + {parts['engine_token'] / 1024:.0f} KiB a token")
    return f"| {' | '.join(cells)} |"


def print_table(setup: Setup) -> None:
    """The table of the models named, or of the public ones."""
    setup = replace(setup, deepspeed_stage=3, gradient_checkpointing=True)
    lengths = " / ".join(f"{length:,}" for length in LENGTHS)
    learners = " | ".join(f"{count} GPU" for count in LEARNERS)
    print(f"| packs of {lengths} tokens | {learners} | engine |")
    print("|---" * (len(LEARNERS) + 2) + "|")
    for name in setup.models or SHAPES:
        config = load_config(name, setup.model_revision) if setup.models else qwen(*SHAPES[name])
        print(row(Path(name).name, config, setup))


# An estimate is made again when one of them changes
SOURCES = (
    "scripts/proof/memory.py",
    "scripts/proof/shapes.py",
    "scripts/parts/packing.py",
    "scripts/parts/sharding.py",
)


def remembered(setup: Setup) -> str:
    """estimate_text of the first model, which is kept for the next start: a file of $XDG_CACHE_HOME/grpo for each set
    of all that it depends on. Models' code from transformers takes longer to import than all else of a --dry_run.
    Raises OSError or ValueError where this machine has no config.json of a model."""
    models = [(setup.models[0], setup.model_revision)]
    if setup.ref_model_name_or_path:
        models.append((setup.ref_model_name_or_path, None))
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "peft")]
    configs = [config_file(*model).read_bytes() for model in models]
    root = Path(__file__).parents[2]
    programs = [(root / source).read_bytes() for source in SOURCES]
    depends = [setup, planned_gpu(setup.gpu), versions, programs, configs]
    key = hashlib.sha256(repr(depends).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kept = Path(cache, "grpo", f"memory_{key[:32]}")
    if kept.exists():
        return kept.read_text()
    text = estimate_text(setup, *(load_config(*model) for model in models))
    with contextlib.suppress(OSError):  # a home that cannot be written to: then the next start takes as long
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        unfinished.replace(kept)
    return text


def tell(setup: Setup) -> int:
    """Print what is asked for; the exit status."""
    try:
        if setup.table or not setup.models:
            print_table(setup)
            return 0
        for name in setup.models:
            print(remembered(replace(setup, models=(name,))))
    except (OSError, ValueError) as error:
        print(f"memory   not estimated: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(tell(tyro.cli(Setup, description=__doc__, use_underscores=True)))
