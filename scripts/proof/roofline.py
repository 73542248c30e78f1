"""What an update costs on GPUs, on paper: operations and bytes counted, by class of kernel, over data-sheet speeds.

    python scripts/proof/roofline.py                                        Qwen2.5-7B on 4 H100: MFU, part by part
    python scripts/proof/roofline.py --model Qwen2.5-0.5B --gpu a100 --learners 8
    python scripts/proof/roofline.py --model DIR --pack_length 16384        any model with a config.json

The bytes of what is not a matrix product are those of the operations that a real decoder layer and the real head
dispatch, forward and backward, on the meta device. "Compiled" fuses all of them that stand between two matrix products
into one kernel, which reads its inputs and writes its outputs once: a bound, not a measurement. How near to the data
sheet kernels come is believed, not measured: EFFICIENCY. Nothing here has been held against a GPU yet; against a CPU
`bench.py learner` measures.
"""

import contextlib
import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.proof import memory


@dataclass(frozen=True)
class GPU:
    """Of the data sheets: dense bfloat16 operations, bytes of memory and of links to others, each a second; GiB."""

    flops: float
    bandwidth: float
    link: float  # NVLink, one direction, or PCIe
    network: float  # a GPU's share of the node's network: one port of 400 or 200 Gb/s
    memory: float


GPUS = {
    "h100": GPU(989e12, 3.35e12, 450e9, 50e9, 80),
    "h200": GPU(989e12, 4.8e12, 450e9, 50e9, 141),
    "h20": GPU(148e12, 4.0e12, 450e9, 50e9, 96),
    "a100": GPU(312e12, 2.04e12, 300e9, 25e9, 80),
    "4090": GPU(165e12, 1.01e12, 25e9, 12e9, 24),
}
# Share of the data sheet. All believed: matrix products of these shapes under power limits reach 0.6 to 0.75 in public
# tables of cuBLAS; flex attention at head size 128 lies below FlashAttention-3's 0.6 to 0.75 (arXiv:2407.08608).
EFFICIENCY = {"products": 0.68, "attention": 0.4, "bytes": 0.85, "link": 0.75, "decode products": 0.55}
LAUNCH_S = 5e-6  # of the host for a kernel, believed; PyTorch's eager dispatch
READ_S = 30e-6  # of a device-to-host read, in which the queue of launches runs dry; believed
READS = 3  # of an update, whatever its micro-batches: tests/gpu_contract/test_reads.py
EXPOSED = 0.1  # share of the collectives that FSDP's prefetch does not hide, believed
FSDP_COPIES = 4.0  # bytes a weight to copy out of an all-gather in bfloat16; a reduce-scatter in float32 copies in 6
COMPILED_LOGIT_BYTES = (6.0, 4.0)  # forward, backward: tests/gpu_contract/test_kernels.py counts the kernels
TOKENS = 256  # of the layers that are counted


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs of a model."""

    matrices: int  # weights every token is multiplied with
    head: int
    weights: int  # all
    width: int  # layers x heads x head dimension
    layers: int
    vocabulary: int
    token_bytes: int  # of the engine's cache
    forward: "Count"  # of one layer, a token
    backward: "Count"
    logit_bytes: float  # of the head's elementwise work, not compiled, a logit, forward and backward
    hidden: int
    mlp_in: int  # weights of the MLPs' first products, gate and up
    mlp_out: int  # and of their last


@dataclass(frozen=True)
class Count:
    """Work of a decoder layer that is neither a matrix product nor attention."""

    bytes: float  # a token
    fused_bytes: float  # a token, if all between two matrix products were one kernel
    kernels: float  # launches, products and attention included
    fused_kernels: float


def count_layers(config: Any, layers: int) -> tuple[Count, Count]:
    """Forward and backward of `layers` decoder layers in bfloat16, on the meta device."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import AttentionInterface, AutoModelForCausalLM

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            ctx.shapes = query, key, value
            return torch.ops.aten.new_empty(query, query.shape)

        @staticmethod
        def backward(ctx, grad):
            return tuple(torch.ops.aten.new_empty(x, x.shape) for x in ctx.shapes)

    class Trace(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.kept: list[Any] = []  # so that no storage's address is used twice
            self.rows: list[tuple[str, list, list]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.kept += [*read, *made]
            name = func.overloadpacket.__name__
            mine = {x.untyped_storage()._cdata for x in read}
            view = all(x.untyped_storage()._cdata in mine for x in made) and not name.endswith("_")
            # copy_ of a weight's gradient: autograd would not make it if this trace did not hold what it copies
            if made and not view and not name.startswith(("empty", "arange", "detach", "new_empty_strided", "copy_")):
                self.rows.append((name, read, made))
            return out

    AttentionInterface.register(
        "counted", lambda _, q, k, v, *more, **other: (Attention.apply(q, k, v).transpose(1, 2), None)
    )
    config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="counted").base_model
    ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
    traces = Trace(), Trace()
    with traces[0]:
        hidden = model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    with traces[1]:
        hidden.backward(torch.empty_like(hidden))
    wanted = {x.untyped_storage()._cdata for _, read, _ in traces[1].rows for x in read}
    return summed(traces[0].rows, wanted), summed(traces[1].rows, set())


def summed(rows: list[tuple[str, list, list]], wanted: set[int]) -> Count:
    """The Count of dispatched operations; `wanted` are storages that are read after them."""

    def size(x: Any) -> int:
        return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())

    def key(x: Any) -> int:
        return x.untyped_storage()._cdata

    segments: list[list[tuple[list, list]]] = [[]]
    unfused, products = 0, 0
    for name, read, made in rows:
        if name in ("mm", "addmm", "bmm", "new_empty", "_unsafe_view"):
            segments.append([])
            products += name != "_unsafe_view"
            continue
        segments[-1].append((read, made))
        unfused += sum(map(size, read)) + sum(map(size, made))
    last = {key(x): i for i, (_, read, _) in enumerate(rows) for x in read}  # the last operation that reads it
    place = {id(made): i for i, (_, _, made) in enumerate(rows)}
    fused, clusters = 0, 0
    for segment in segments:
        if not segment:
            continue
        clusters += 1
        own = {key(x) for _, made in segment for x in made}
        inside = {key(x) for read, _ in segment for x in read}
        end = place[id(segment[-1][1])]
        reads = {key(x): size(x) for read, _ in segment for x in read if key(x) not in own}
        later = {key(x): size(x) for _, made in segment for x in made}
        writes = [n for k, n in later.items() if last.get(k, -1) > end or k in wanted or k not in inside]
        fused += sum(reads.values()) + sum(writes)
    kernels = sum(len(s) for s in segments) + products
    return Count(unfused / TOKENS, fused / TOKENS, kernels, clusters + products)


def head_bytes() -> float:
    """Bytes of the elementwise work of the head a logit, both ways, counted as a CPU runs it; adding up
    the gradient of its weight is apart."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import grpo

    moved = [0.0]

    class Bytes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            made = {id(x): x for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
            name, mine = func.overloadpacket.__name__, {x.untyped_storage()._cdata for x in read.values()}
            view = all(x.untyped_storage()._cdata in mine for x in made.values()) and not name.endswith("_")
            of_weight = any(x.numel() == vocabulary * hidden for x in made.values())
            if name not in ("mm", "addmm", "empty", "empty_like") and not view and not of_weight:
                moved[0] += sum(x.numel() * x.element_size() for x in [*read.values(), *made.values()])
            return out

    tokens, vocabulary, hidden = 64, 4096, 16
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    with Bytes():
        logprobs, _ = grpo.HeadLogprobs.apply(x, weight, torch.zeros(tokens, dtype=torch.long), 1.0, tokens)
        logprobs.sum().backward()
    return moved[0] / (tokens * vocabulary)


def load_config(name: str) -> Any:
    """The configuration of a model that proof/memory.py lists, by any name that holds its own, or of a directory."""
    known = next((shape for key, shape in memory.SHAPES.items() if key in name), None)
    return memory.qwen(*known) if known and not Path(name).is_dir() else memory.load_config(name, None)


@functools.cache
def shape_of(name: str) -> Shape:
    """Everything counted of the model `name`."""
    import torch
    from transformers import AutoModelForCausalLM

    import utils

    config = load_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    matrices, head = utils.matmul_parameters(model)
    mlps = [m for name, m in model.named_modules() if name.endswith(".mlp")]
    mlp_in, mlp_out = (
        sum(p.numel() for m in mlps for p in m.parameters() if p.ndim == 2 and (len(p) == config.hidden_size) == last)
        for last in (False, True)
    )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    one, two = count_layers(config, 1), count_layers(config, 2)
    forward, backward = (
        Count(*(getattr(b, f) - getattr(a, f) for f in Count.__dataclass_fields__))
        for a, b in zip(one, two, strict=True)
    )
    return Shape(
        matrices,
        head,
        sum(p.numel() for p in model.parameters()),
        utils.attention_width(config),
        config.num_hidden_layers,
        config.vocab_size,
        2 * config.num_hidden_layers * heads * head_dim * 2,
        forward,
        backward,
        head_bytes(),
        config.hidden_size,
        mlp_in,
        mlp_out,
    )


@dataclass(frozen=True)
class Way:
    """How the learner computes."""

    compiled: bool = False  # --compile_layers
    compiled_head: bool = False  # what a GPU does
    recompute: Literal["layer", "mlp", "none"] = "layer"  # --gradient_checkpointing, _part
    stage: int = 3
    reads: float = 0.0  # of the host, a micro-batch


def seconds(
    shape: Shape, gpu: GPU, way: Way, learners: int, tokens: float, pairs: float, responses: float, update: bool
) -> dict[str, float]:
    """Seconds of a micro-batch on one of `learners` GPUs, by class of kernel: of an update (forward, backward and what
    is recomputed) or of a forward for logprobs.

    tokens of the pack, (query, key) pairs that attend, response tokens that meet the head. A layer that is recomputed
    ends before its last product, whose output nobody asks for, but not in a compiled graph.
    """
    again = update and way.recompute == "layer"
    part = update and way.recompute == "mlp"
    count = [
        (1 + again) * a + update * b for a, b in zip(per(shape.forward, way), per(shape.backward, way), strict=True)
    ]
    recomputed = again * (shape.matrices - (0 if way.compiled else shape.mlp_out)) + part * shape.mlp_in
    count[0] += part * 3 * shape.mlp_in / shape.layers / shape.hidden  # gate and up read, their product written
    products = 2 * tokens * (shape.matrices * (1 + 2 * update) + recomputed)
    head = 2 * shape.head * responses * (4 if update else 1)  # the backward makes the logits again
    attention = 4 * shape.width * pairs * (1 + again + 2.5 * update)
    forward, backward = (
        COMPILED_LOGIT_BYTES if way.compiled_head else (0.4 * shape.logit_bytes, 0.6 * shape.logit_bytes)
    )
    chunk = 3 * 1024 if way.compiled_head else 1024
    logit = forward + update * (backward + 12 * shape.hidden / chunk)  # the weight's gradient, added up once a chunk
    bandwidth, link = gpu.bandwidth * EFFICIENCY["bytes"], EFFICIENCY["link"]
    link *= gpu.link if learners <= 8 else gpu.network * 2  # across nodes NCCL's ring uses all ports of a node
    parts = {
        "products": products / gpu.flops / EFFICIENCY["products"],
        "head": head / gpu.flops / EFFICIENCY["products"],
        "attention": attention / gpu.flops / EFFICIENCY["attention"],
        "elementwise": count[0] * shape.layers * tokens / bandwidth,
        "logits": logit * shape.vocabulary * responses / bandwidth,
    }
    busy = sum(parts.values())
    moved = (learners - 1) / learners * shape.weights * ((4 if way.stage == 3 else 0) + 4 if update else 2)
    wire = moved / link if way.stage else 0.0
    copies = shape.weights * FSDP_COPIES * (3.5 if update and way.stage == 3 else 1) / bandwidth if way.stage else 0.0
    parts["collectives"] = max(wire - busy, EXPOSED * wire) + copies
    parts["launches"] = max(0.0, count[1] * shape.layers * LAUNCH_S - busy)
    parts["reads"] = way.reads * READ_S if update else 0.0
    return parts


def per(count: Count, way: Way) -> tuple[float, float]:
    """Bytes a token and kernels of a layer."""
    return (count.fused_bytes, count.fused_kernels) if way.compiled else (count.bytes, count.kernels)


def optimizer_seconds(shape: Shape, gpu: GPU, learners: int) -> float:
    """AdamW in float32 on a shard, the norm of the gradient and the cast for the next forward: 38 bytes a weight."""
    return 38 * shape.weights / learners / gpu.bandwidth / EFFICIENCY["bytes"]


def mfu(shape: Shape, gpu: GPU, way: Way, learners: int, pack_length: int, prompt: float, response: float, group: int):
    """(MFU, seconds by class) of an update of full packs: useful operations (no recomputation) over time and peak."""
    piece = prompt - 1 + group * response  # tokens of a group that shares its prompt
    pieces = pack_length / piece
    pairs = pieces * (prompt**2 / 2 + group * response * (prompt + response / 2))
    tokens, responses = pack_length, pieces * group * response
    parts = seconds(shape, gpu, way, learners, tokens, pairs, responses, update=True)
    useful = 3 * (2 * shape.matrices * tokens + 4 * shape.width * pairs + 2 * shape.head * responses)
    return useful / sum(parts.values()) / gpu.flops, parts


@dataclass(frozen=True)
class Options:
    """An update on paper."""

    model: str = "Qwen2.5-7B"
    """A model of scripts/proof/memory.py, or a directory with a config.json."""
    gpu: Literal["h100", "h200", "h20", "a100", "4090"] = "h100"
    """Data sheet."""
    learners: int = 4
    """GPUs that learn."""
    pack_length: int = 6144
    """Tokens of a micro-batch to begin with."""
    long_pack_length: int = 16384
    """Tokens of the longer packs."""
    prompt_tokens: float = 105
    """Mean; GSM8K's."""
    response_tokens: float = 232
    """Mean; Qwen2.5-7B's on GSM8K."""
    samples: int = 5
    """Responses that share a prompt."""


def gibibytes(options: Options, way: Way, length: int) -> float:
    """Memory of a learner by scripts/proof/memory.py's estimate, which knows no compiler: that keeps less."""
    part: Any = "mlp" if way.recompute == "mlp" else "layer"
    setup = memory.Setup(
        deepspeed_stage=3, learners=options.learners, pack_length=length, load_ref_policy=False, shared_gpu=False,
        gradient_checkpointing=way.recompute != "none", gradient_checkpointing_part=part,
    )  # fmt: skip
    parts = memory.memory_estimate(setup, load_config(options.model))
    return sum(size for name, size in parts.items() if not name.startswith("engine")) / memory.GIB


def main() -> None:
    options = tyro.cli(Options, description=__doc__, use_underscores=True)
    shape, gpu = shape_of(options.model), GPUS[options.gpu]
    print(
        f"{options.model}: {shape.matrices / 1e9:.2f} G weights in products + {shape.head / 1e9:.2f} G in the head, "
        f"{shape.layers} layers\ncounted, a layer and token:"
    )
    for name, count in (("forward", shape.forward), ("backward", shape.backward)):
        print(
            f"    {name}: {count.bytes / 1024:.0f} KiB in {count.kernels:.0f} kernels; fused at best "
            f"{count.fused_bytes / 1024:.0f} KiB in {count.fused_kernels:.0f}"
        )
    fused, add = sum(COMPILED_LOGIT_BYTES), 12 * shape.hidden / 1024
    print(
        f"    head: {shape.logit_bytes:.0f} bytes a logit, forward and backward, compiled {fused:.0f}; "
        f"to add up its gradient {add:.0f}, compiled {add / 3:.0f}"
    )
    print("believed, share of the data sheet: " + ", ".join(f"{k} {v:g}" for k, v in EFFICIENCY.items()))
    ways: list[tuple[str, Way, int]] = [("plain layers, 21 reads that wait", Way(reads=21), options.pack_length)]
    for name, change in (
        ("+ none that waits", {"reads": 0.0}),
        ("+ head compiled", {"compiled_head": True}),
        (f"+ packs of {options.long_pack_length:,}", {}),
        ("+ --compile_layers", {"compiled": True}),
        ("+ --gradient_checkpointing_part mlp", {"recompute": "mlp"}),
        ("+ no checkpointing", {"recompute": "none"}),
    ):
        length = options.long_pack_length if "packs" in name else ways[-1][2]
        ways.append((name, replace(ways[-1][1], **change), length))
    rows = []
    for name, way, length in ways:
        rows.append(
            (
                name,
                length,
                *mfu(
                    shape,
                    gpu,
                    way,
                    options.learners,
                    length,
                    options.prompt_tokens,
                    options.response_tokens,
                    options.samples,
                ),
            )
        )
    classes = list(rows[0][3])
    print(f"\n| update on {options.learners} {options.gpu}, us a token | MFU | GiB | " + " | ".join(classes) + " |")
    print("|---" * (len(classes) + 3) + "|")
    for (name, way, length), (_, _, share, parts) in zip(ways, rows, strict=True):
        cells = [f"{s / length * 1e6:.1f}" for s in parts.values()]
        print(f"| {name} | {share:.0%} | {gibibytes(options, way, length):.0f} | {' | '.join(cells)} |")
    for name, _, _, parts in (rows[0], rows[-2]):
        rest = {k: v for k, v in parts.items() if k != "products"}
        worst = max(rest, key=lambda k: rest[k])
        print(f"{name}: beside the products themselves {worst} take most, {rest[worst] / sum(parts.values()):.0%}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
