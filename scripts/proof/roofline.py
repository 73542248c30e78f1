"""What an update costs on GPUs, on paper: operations and bytes counted, by class of kernel, over data-sheet speeds.

    python scripts/proof/roofline.py                                        Qwen2.5-7B on 4 H100: MFU, part by part
    python scripts/proof/roofline.py --model Qwen2.5-0.5B --gpu a100 --learners 8
    python scripts/proof/roofline.py --model DIR --pack_length 16384        any model with a config.json

The bytes of what is not a matrix product are those of the operations that a real decoder layer and the real head
dispatch, forward and backward, on the meta device. "Compiled" fuses all of them that stand between two matrix products
into one kernel, which reads its inputs and writes its outputs once: a bound, not a measurement. How near to the data
sheet kernels come is a range, not a number: its FAST end is what public tables of single kernels reach, its SLOW end is
calibrated on one published run. published.py holds both ends against other published runs. No run of this project on a
GPU has been held against them yet; against a CPU `bench.py learner` measures.
"""

import contextlib
import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.parts import sharding
from scripts.parts.head import HeadLogprobs
from scripts.proof import memory, shapes
from scripts.proof.shapes import GPU, GPUS

FSDP_COPIES = 4.0  # bytes a weight to copy out of an all-gather in bfloat16; a reduce-scatter in float32 copies in 6
COMPILED_LOGIT_BYTES = (6.0, 4.0)  # forward, backward: tests/gpu_contract/test_kernels.py counts the kernels
TOKENS = 256  # of the layers that are counted


@dataclass(frozen=True)
class Speeds:
    """How fast GPUs and their hosts are: shares of the data sheet, and seconds."""

    products: float  # matrix products of a learner
    attention: float
    bytes: float  # of the memory's bandwidth
    link: float
    decode_products: float  # of a decoding step
    exposed: float  # share of the collectives that FSDP's prefetch does not hide
    launch: float  # seconds of the host's Python for a kernel of the learner
    read: float  # seconds of a device-to-host read, in which the queue of launches runs dry
    engine_step: float  # seconds of an engine's host for a decoding step
    engine_token: float  # and for each of its tokens
    loaded_tensor: float  # seconds of an engine's Python for a weight that it takes


# Matrix products under power limits reach 0.6 to 0.75 in public tables of cuBLAS, FlashAttention-3 0.6 to 0.75
# (arXiv:2407.08608); flex attention lies below. `launch` is plain transformers' on a fast core (Zen 5): 22 ms
# for the 2,784 kernels of 24 layers. A load of 291 weights in 0.01 s is vLLM issue 5723's.
FAST = Speeds(
    products=0.75,
    attention=0.6,
    bytes=0.9,
    link=0.8,
    decode_products=0.6,
    exposed=0.05,
    launch=8e-6,
    read=20e-6,
    engine_step=2e-3,
    engine_token=15e-6,
    loaded_tensor=34e-6,
)
# The shares are 0.68, 0.4, 0.85, 0.75 and 0.55, once believed, over 1.45: then the slowest phase of the published run
# that published.py calibrates on comes out, and with `engine_step` its generation. `launch` is ours in `bench.py host`:
# 187 ms for the 3,720 kernels of 24 layers, on a core of an AMD EPYC (Zen 3) that other jobs shared. 0.3 s for 339
# weights bounds `bench.py sync` from above.
SLOW = Speeds(
    products=0.47,
    attention=0.28,
    bytes=0.59,
    link=0.52,
    decode_products=0.38,
    exposed=0.15,
    launch=50e-6,
    read=50e-6,
    engine_step=14.5e-3,
    engine_token=29e-6,
    loaded_tensor=0.9e-3,
)
ENDS = {"fast": FAST, "slow": SLOW}


@dataclass(frozen=True)
class Count:
    """Work of a decoder layer that is neither a matrix product nor attention."""

    bytes: float  # a token
    fused_bytes: float  # a token, if all between two matrix products were one kernel
    kernels: float  # launches, products and attention included
    fused_kernels: float

    def __sub__(self, other: "Count") -> "Count":
        return Count(
            self.bytes - other.bytes,
            self.fused_bytes - other.fused_bytes,
            self.kernels - other.kernels,
            self.fused_kernels - other.fused_kernels,
        )


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs of a model."""

    matrices: int  # weights every token is multiplied with
    head: int
    weights: int  # all
    tensors: int  # that they are in
    width: int  # layers x heads x head dimension
    layers: int
    vocabulary: int
    token_bytes: int  # of the engine's cache
    forward: Count  # of one layer, a token
    backward: Count
    logit_bytes: float  # of the head's elementwise work, not compiled, a logit, forward and backward
    hidden: int
    mlp_in: int  # weights of the MLPs' first products, gate and up
    mlp_out: int  # and of their last


# --- Counting what PyTorch dispatches ---------------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; an expanded one has those of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@dataclass
class Operation:
    name: str
    read: list[torch.Tensor]
    made: list[torch.Tensor]


class Trace(TorchDispatchMode):
    """Notes every dispatched operation that makes or changes a tensor, so no views."""

    def __init__(self):
        super().__init__()
        self.kept: list[torch.Tensor] = []  # so that no storage's address is used twice
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.kept += [*read, *made]
        name = func.overloadpacket.__name__
        storages_read = {storage_key(x) for x in read}
        is_view = all(storage_key(x) in storages_read for x in made) and not name.endswith("_")
        if made and not is_view:
            self.operations.append(Operation(name, read, made))
        return out


class NoAttention(torch.autograd.Function):
    """In place of attention: outputs and gradients of the right shape, by operations that do not count."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.shapes = query, key, value
        return torch.ops.aten.new_empty(query, query.shape)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.ops.aten.new_empty(x, x.shape) for x in ctx.shapes)


def no_attention(_module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    return NoAttention.apply(query, key, value).transpose(1, 2), None


def count_layers(config: Any, layers: int) -> tuple[Count, Count]:
    """Forward and backward of `layers` decoder layers in bfloat16, on the meta device."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("counted", no_attention)
    config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="counted").base_model
    ids = torch.zeros((1, TOKENS), dtype=torch.long, device="meta")
    forward = Trace()
    with forward:
        hidden = model(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    backward = Trace()
    with backward:
        hidden.backward(torch.empty_like(hidden))
    # copy_ of a weight's gradient: autograd would not make it if the trace did not hold what it copies
    uncounted = ("empty", "arange", "detach", "new_empty_strided", "copy_")
    forwards = [op for op in forward.operations if not op.name.startswith(uncounted)]
    backwards = [op for op in backward.operations if not op.name.startswith(uncounted)]
    read_later = {storage_key(x) for op in backwards for x in op.read}
    return count(forwards, read_later), count(backwards, set())


def fused_bytes(segment: list[Operation], outlives: set[int]) -> int:
    """Bytes that one kernel for all operations of a segment reads and writes. `outlives`: storages that are read after
    the segment."""
    inputs: dict[int, int] = {}
    outputs: dict[int, int] = {}
    for op in segment:
        inputs |= {storage_key(x): size(x) for x in op.read}
        outputs |= {storage_key(x): size(x) for x in op.made}
    moved = sum(n for key, n in inputs.items() if key not in outputs)
    for key, n in outputs.items():
        if key in outlives or key not in inputs:
            moved += n
    return moved


def count(operations: list[Operation], read_later: set[int]) -> Count:
    """The Count of dispatched operations; `read_later` are storages that are read after all of them."""
    segments: list[list[Operation]] = [[]]  # of operations between two matrix products
    products = 0
    for op in operations:
        if op.name in ("mm", "addmm", "bmm", "new_empty", "_unsafe_view"):
            segments.append([])
            products += op.name != "_unsafe_view"
        else:
            segments[-1].append(op)
    segments = [segment for segment in segments if segment]
    last_reader = {storage_key(x): i for i, op in enumerate(operations) for x in op.read}
    place = {id(op): i for i, op in enumerate(operations)}
    fused = 0
    unfused = 0
    for segment in segments:
        end = place[id(segment[-1])]
        fused += fused_bytes(segment, read_later | {key for key, i in last_reader.items() if i > end})
        unfused += sum(size(x) for op in segment for x in op.read + op.made)
    kernels = products + sum(map(len, segments))
    return Count(unfused / TOKENS, fused / TOKENS, kernels, products + len(segments))


def head_bytes() -> float:
    """Bytes a logit of the elementwise work of the head, both ways, counted as a CPU runs it. Adding up the gradient of
    its weight is apart."""

    tokens = 64
    vocabulary = 4096
    hidden = 16
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    trace = Trace()
    with trace:
        logprobs, _ = HeadLogprobs.apply(x, weight, torch.zeros(tokens, dtype=torch.long), 1.0, tokens)
        torch.autograd.grad(logprobs.sum(), (x, weight))
    moved = 0
    for op in trace.operations:
        of_weight = any(made.numel() == weight.numel() for made in op.made)
        if op.name not in ("mm", "addmm", "empty", "empty_like") and not of_weight:
            read = {id(tensor): tensor for tensor in op.read}.values()
            moved += sum(tensor.numel() * tensor.element_size() for tensor in [*read, *op.made])
    return moved / (tokens * vocabulary)


def load_config(name: str) -> Any:
    """The configuration of a model of shapes.py, by any name that contains its name there, or of a directory."""
    if not Path(name).is_dir():
        for key, shape in shapes.SHAPES.items():
            if key in name:
                return shapes.qwen(*shape)
    return shapes.load_config(name, None)


@functools.cache
def shape_of(name: str) -> Shape:
    """Everything counted of the model `name`."""
    return count_shape(load_config(name))


def count_shape(config: Any) -> Shape:
    """Everything counted of a model."""
    from transformers import AutoModelForCausalLM

    import utils

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    matrices, head = utils.matmul_parameters(model)
    mlp_in = 0
    mlp_out = 0
    for module_name, module in model.named_modules():
        if module_name.endswith(".mlp"):
            products = [p for p in module.parameters() if p.ndim == 2]
            mlp_out += sum(p.numel() for p in products if len(p) == config.hidden_size)
            mlp_in += sum(p.numel() for p in products if len(p) != config.hidden_size)
    forward_of_one, backward_of_one = count_layers(config, 1)
    forward_of_two, backward_of_two = count_layers(config, 2)
    return Shape(
        matrices=matrices,
        head=head,
        weights=sum(p.numel() for p in model.parameters()),
        tensors=len(list(model.parameters())),
        width=utils.attention_width(config),
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        token_bytes=memory.cache_bytes(config, 2),
        forward=forward_of_two - forward_of_one,
        backward=backward_of_two - backward_of_one,
        logit_bytes=head_bytes(),
        hidden=config.hidden_size,
        mlp_in=mlp_in,
        mlp_out=mlp_out,
    )


# --- Seconds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How the learner computes."""

    compiled: bool = False  # --compile_layers
    compiled_head: bool = False  # what a GPU does
    recompute: Literal["layer", "mlp", "none"] = "layer"  # --gradient_checkpointing, _part
    stage: int = 3
    reads: float = 0.0  # of the host, a micro-batch
    speeds: Speeds = SLOW


def seconds(
    shape: Shape, gpu: GPU, way: Way, learners: int, tokens: float, pairs: float, responses: float, update: bool
) -> dict[str, float]:
    """Seconds of a micro-batch on one of `learners` GPUs, by class of kernel: of an update (forward, backward and what
    is recomputed) or of a forward for logprobs.

    tokens of the pack, (query, key) pairs that attend, response tokens that meet the head. A layer that is recomputed
    ends before its last product, whose output nobody asks for, but not in a compiled graph or if it is narrow.
    """
    forwards = 1
    recomputed = 0  # weights of the products that are computed again
    mlp_bytes = 0.0  # a token of a layer, of the elementwise work that is computed again
    if update and way.recompute == "layer":
        forwards = 2
        as_a_whole = way.compiled or shape.matrices <= shape.layers * sharding.NARROW
        recomputed = shape.matrices if as_a_whole else shape.matrices - shape.mlp_out
    elif update and way.recompute == "mlp":
        recomputed = shape.mlp_in
        mlp_bytes = 3 * shape.mlp_in / shape.layers / shape.hidden  # gate and up read, their product written
    forward_bytes, forward_kernels = layer_work(shape.forward, way)
    backward_bytes, backward_kernels = layer_work(shape.backward, way)
    layer_bytes = forwards * forward_bytes + update * backward_bytes + mlp_bytes
    kernels = shape.layers * (forwards * forward_kernels + update * backward_kernels)

    speeds = way.speeds
    bandwidth = gpu.bandwidth * speeds.bytes
    products = 2 * tokens * (shape.matrices * (1 + 2 * update) + recomputed)
    head = 2 * shape.head * responses * (4 if update else 1)  # the backward makes the logits again
    attention = 4 * shape.width * pairs * (forwards + 2.5 * update)
    logits = logit_bytes(shape, way, update) * shape.vocabulary * responses
    parts = {
        "products": products / gpu.flops / speeds.products,
        "head": head / gpu.flops / speeds.products,
        "attention": attention / gpu.flops / speeds.attention,
        "elementwise": layer_bytes * shape.layers * tokens / bandwidth,
        "logits": logits / bandwidth,
    }
    busy = sum(parts.values())
    parts["collectives"] = collective_seconds(shape, gpu, way, learners, update, busy) if way.stage else 0.0
    parts["host"] = max(0.0, kernels * speeds.launch - busy)  # Python runs ahead of the GPU, which else waits for it
    parts["reads"] = way.reads * speeds.read if update else 0.0
    return parts


def layer_work(count: Count, way: Way) -> tuple[float, float]:
    """Bytes a token and kernels of a layer."""
    if way.compiled:
        return count.fused_bytes, count.fused_kernels
    return count.bytes, count.kernels


def logit_bytes(shape: Shape, way: Way, update: bool) -> float:
    """Bytes a logit of the head's elementwise work."""
    forward = 0.4 * shape.logit_bytes
    backward = 0.6 * shape.logit_bytes
    chunk = 1024
    if way.compiled_head:
        forward, backward = COMPILED_LOGIT_BYTES
        chunk = 3 * 1024
    if not update:
        return forward
    return forward + (backward + 12 * shape.hidden / chunk)  # the weight's gradient, added up once a chunk


def collective_seconds(shape: Shape, gpu: GPU, way: Way, learners: int, update: bool, busy: float) -> float:
    """Seconds of FSDP's collectives that `busy` seconds of computation do not hide, and of the copies for them."""
    bytes_a_weight = 2
    copies = 1.0
    if update:
        bytes_a_weight = 8 if way.stage == 3 else 4
        copies = 3.5 if way.stage == 3 else 1.0
    moved = (learners - 1) / learners * shape.weights * bytes_a_weight
    wire = moved / link_speed(gpu, way, learners)
    copied = shape.weights * FSDP_COPIES * copies / (gpu.bandwidth * way.speeds.bytes)
    return max(wire - busy, way.speeds.exposed * wire) + copied


def link_speed(gpu: GPU, way: Way, learners: int) -> float:
    """Bytes a second of a collective; across nodes NCCL's ring uses all ports of a node."""
    link = gpu.link if learners <= 8 else 2 * gpu.network
    return link * way.speeds.link


def optimizer_seconds(shape: Shape, gpu: GPU, way: Way, learners: int) -> float:
    """AdamW in float32 on a shard, the norm of the gradient and the cast for the next forward: 38 bytes a weight. With
    stage 0 each learner does all of it, after one all-reduce of the float32 gradients, which nothing hides."""
    bandwidth = gpu.bandwidth * way.speeds.bytes
    updating = 38 * shape.weights / bandwidth
    if way.stage:
        return updating / learners
    others = (learners - 1) / learners
    reduced = 2 * others * 4 * shape.weights
    reducing = reduced / link_speed(gpu, way, learners)
    return updating + reducing


def forward_operations(shape: Shape, tokens: float, pairs: float, responses: float) -> float:
    """Floating-point operations of the matrix products and the attention of a forward."""
    return 2 * shape.matrices * tokens + 4 * shape.width * pairs + 2 * shape.head * responses


def mfu(
    shape: Shape, gpu: GPU, way: Way, learners: int, pack_length: int, prompt: float, response: float, group: int
) -> tuple[float, dict[str, float]]:
    """(MFU, seconds by class) of an update of full packs: useful operations (no recomputation) over time and peak."""
    pieces = pack_length / (prompt - 1 + group * response)  # groups that share their prompt
    responses = pieces * group * response
    pairs_of_prompt = prompt**2 / 2
    pairs_of_responses = group * response * (prompt + response / 2)
    pairs = pieces * (pairs_of_prompt + pairs_of_responses)
    parts = seconds(shape, gpu, way, learners, pack_length, pairs, responses, update=True)
    useful = 3 * forward_operations(shape, pack_length, pairs, responses)
    return useful / sum(parts.values()) / gpu.flops, parts


# --- The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """An update on paper."""

    model: str = "Qwen2.5-7B"
    """A model of scripts/proof/shapes.py, or a directory with a config.json."""
    gpu: shapes.GPUName = "h100"
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


@dataclass(frozen=True)
class Row:
    """An update of the table."""

    name: str
    way: Way
    length: int  # of a pack


def rows_of(options: Options) -> list[Row]:
    """Each row keeps the changes of those above it."""
    row = Row("plain layers, 21 reads that wait", Way(reads=21), options.pack_length)
    rows = [row]
    for name, change in (
        ("+ none that waits", {"reads": 0.0}),
        ("+ head compiled", {"compiled_head": True}),
        (f"+ packs of {options.long_pack_length:,}", {}),
        ("+ --compile_layers", {"compiled": True}),
        ("+ --gradient_checkpointing_part mlp", {"recompute": "mlp"}),
        ("+ no checkpointing", {"recompute": "none"}),
    ):
        length = options.long_pack_length if "packs" in name else row.length
        row = Row(name, replace(row.way, **change), length)
        rows.append(row)
    return rows


def gibibytes(options: Options, row: Row) -> float:
    """Memory of a learner by memory.py's estimate. A compiler keeps less for the backward than the estimate says."""
    setup = memory.Setup(
        deepspeed_stage=3,
        learners=options.learners,
        pack_length=row.length,
        load_ref_policy=False,
        shared_gpu=False,
        gradient_checkpointing=row.way.recompute != "none",
        gradient_checkpointing_part="mlp" if row.way.recompute == "mlp" else "layer",
    )
    return memory.learner_bytes(memory.memory_estimate(setup, load_config(options.model))) / shapes.GIB


def count_text(count: Count) -> str:
    plain = f"{count.bytes / 1024:.0f} KiB in {count.kernels:.0f} kernels"
    return f"{plain}; fused at best {count.fused_bytes / 1024:.0f} KiB in {count.fused_kernels:.0f}"


def print_counts(name: str, shape: Shape) -> None:
    """What was counted of the model."""
    print(f"{name}: {shape.matrices / 1e9:.2f} G weights in products + {shape.head / 1e9:.2f} G in the head, ", end="")
    print(f"{shape.layers} layers\ncounted, a layer and token:")
    print(f"    forward: {count_text(shape.forward)}")
    print(f"    backward: {count_text(shape.backward)}")
    compiled = sum(COMPILED_LOGIT_BYTES)
    add = 12 * shape.hidden / 1024
    print(f"    head: {shape.logit_bytes:.0f} bytes a logit, forward and backward, compiled {compiled:.0f}; ", end="")
    print(f"to add up its gradient {add:.0f}, compiled {add / 3:.0f}")
    for name, speeds in ENDS.items():
        print(f"{name} end: " + ", ".join(f"{key} {value:g}" for key, value in vars(speeds).items()))


def print_worst(row: Row, parts: dict[str, float]) -> None:
    """The class of kernels, matrix products apart, that takes most time."""
    others = {name: passed for name, passed in parts.items() if name != "products"}
    worst = max(others, key=lambda name: others[name])
    share = others[worst] / sum(parts.values())
    print(f"{row.name}: beside the products themselves {worst} take most, {share:.0%}")


def main() -> None:
    options = tyro.cli(Options, description=__doc__, use_underscores=True)
    shape = shape_of(options.model)
    print_counts(options.model, shape)
    lengths = (options.prompt_tokens, options.response_tokens, options.samples)
    rows = rows_of(options)
    for end, speeds in ENDS.items():
        updates = []
        for row in rows:
            way = replace(row.way, speeds=speeds)
            updates.append(mfu(shape, GPUS[options.gpu], way, options.learners, row.length, *lengths))
        print(f"\n{end} end, an update on {options.learners} {options.gpu}, us a token:\n")
        print_table(options, rows, updates)


def print_table(options: Options, rows: list[Row], updates: list[tuple[float, dict[str, float]]]) -> None:
    """One end of the range: (MFU, seconds by class) of each row, and what takes most in two of them."""
    _, first = updates[0]
    names = " | ".join(first)
    print(f"| update | MFU | GiB | {names} |")
    columns = len(first) + 3
    print("|---" * columns + "|")
    for row, (share, parts) in zip(rows, updates, strict=True):
        cells = " | ".join(f"{passed / row.length * 1e6:.1f}" for passed in parts.values())
        memory_used = gibibytes(options, row)
        print(f"| {row.name} | {share:.0%} | {memory_used:.0f} | {cells} |")
    for i in (0, -2):
        _, parts = updates[i]
        print_worst(rows[i], parts)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
