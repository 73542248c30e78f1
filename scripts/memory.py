"""Estimate GPU memory: of a learner at the peak of an update, part by part, and of an engine and its cache.

    python scripts/memory.py MODEL --pack_length 8192 --learners 8 --deepspeed_stage 3 --gradient_checkpointing
    python scripts/memory.py --table            GiB by model, pack length and learners: the table of scripts/README.md
    python scripts/memory.py DIR ... --table    the same of models with a config.json in DIR

Flags have the names, meanings and defaults of the training scripts, whose --dry_run starts it. It needs a model's
config.json on this machine and neither its weights nor a GPU. CUDA's and NCCL's own and fragmentation come on top.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

GIB = 2**30
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
    gradient_checkpointing: bool = False
    """Activations are computed again in backward."""
    load_ref_policy: bool = True
    """There is a reference policy."""
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
    shared_gpu: bool = True
    """Learner and engine are on one GPU, as in grpo.py."""


def meta_model(config: Any, dtype: Any) -> Any:
    """A model without memory, whose attention keeps what flash and flex attention keep for their backward."""
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            out = torch.empty_like(query)
            ctx.save_for_backward(query, key, value, out)
            return out

    AttentionInterface.register("kept", lambda _, q, k, v, *more, **other: (Kept.apply(q, k, v).transpose(1, 2), None))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="kept")


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


def memory_estimate(setup: Setup, config: Any) -> dict[str, float]:
    """Bytes on a learner's GPU at the peak of an update, by what they are for, without CUDA's and NCCL's own and
    fragmentation; and of an engine: engine_weights, and engine_token for each token in its cache.

    With N weights on S shards (the learners from deepspeed_stage 2 on, else 1): master weights, gradients and reference
    4 N / S each, Adam 8 N / S, gathered in compute dtype all of N, or with stage 3 two layers and what is in no layer.
    Activations of one pack of --pack_length tokens are counted by a forward on the meta device; the head makes the
    logits of logprob_chunk tokens at a time. They are gone when the last gradients, of the embeddings, are reduced.
    """
    import torch

    dtype = torch.float32 if setup.model_dtype == "float32" else torch.bfloat16
    model = meta_model(config, dtype)
    names, text = set(model._no_split_modules or ()), config.get_text_config()
    layers = [m for m in model.modules() if type(m).__name__ in names]
    whole = sum(p.numel() for p in model.parameters())
    root = whole - sum(p.numel() for layer in layers for p in layer.parameters())
    head = model.get_output_embeddings().weight.numel()
    item, shards = dtype.itemsize, setup.learners if setup.deepspeed_stage >= 2 else 1
    tokens, vocabulary = setup.pack_length, text.vocab_size
    activations = kept_for_backward(model, tokens)
    if setup.gradient_checkpointing:
        activations = activations / len(layers) + len(layers) * tokens * text.hidden_size * item
    in_head = head * (4 + item) + 12 * min(setup.logprob_chunk, tokens) * vocabulary
    gathered = root + 2 * (whole - root) / len(layers) if setup.deepspeed_stage == 3 else whole
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tp = setup.vllm_tensor_parallel_size
    return {
        "weights": 4 * whole / shards,
        "gradients": 4 * whole / shards,
        "Adam": 8 * whole / shards,
        "reference": 4 * whole / shards if setup.load_ref_policy else 0.0,
        "gathered": item * gathered,
        "activations and head": max(activations + in_head, root * (4 + item)),
        "engine_weights": item * whole / tp,
        "engine_token": 2 * text.num_hidden_layers * heads * head_dim * item / tp,
    }


def estimate_text(setup: Setup, config: Any) -> str:
    """The estimate in two lines and, where it is more than a GPU (80 GiB where none is visible), what helps."""
    import torch

    parts = memory_estimate(setup, config)
    weights, token = parts.pop("engine_weights"), parts.pop("engine_token")
    gpu = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * GIB
    share, longest = setup.vllm_gpu_memory_utilization, setup.max_prompt_token_length + setup.response_length
    learner, engine = sum(parts.values()), share * gpu
    fits = max(0, int((engine - weights) / (token * longest)))
    used = learner + engine if setup.shared_gpu else learner
    room = f"{fits:,} responses of {longest:,} tokens"
    sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    lines = [
        f"memory   learner, GiB a GPU: {sizes}: {learner / GIB:.1f}",
        f"         engine, {share:g} of {gpu / GIB:.0f} GiB: weights {weights / GIB:.1f} and {token / 1024:.0f} KiB a "
        f"token, {room} at once",
    ]
    if used > 0.95 * gpu or not fits:
        lines.append(
            f"         WARNING: that is {used / GIB:.0f} of {gpu / GIB:.0f} GiB. What helps: --gradient_checkpointing, "
            "--deepspeed_stage 3 on more GPUs,\n         a smaller --pack_length or --vllm_gpu_memory_utilization; "
            "for an engine --vllm_tensor_parallel_size"
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


def load_config(name: str, revision: str | None) -> Any:
    """The model's configuration. Raises ValueError where this machine does not have it."""
    import huggingface_hub

    if not Path(name).is_dir():  # before transformers is imported, which takes seconds
        cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise ValueError(f"no config.json of {name} on this machine (hf download {name} config.json)")
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)


def main() -> int:
    setup = tyro.cli(Setup, description=__doc__, use_underscores=True)
    try:
        if setup.table or not setup.models:
            print_table(setup)
        for name in () if setup.table else setup.models:
            print(estimate_text(setup, load_config(name, setup.model_revision)))
    except (OSError, ValueError) as error:
        print(f"memory   not estimated: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
