"""How a model is spread over the learners (FSDP2), and what each of them computes again in the backward.

FSDP gathers the weights of a group of layers at once. Each group costs the host about 2 ms of a micro-batch, whatever
its size, so narrow layers share one: see GROUP_BYTES.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import utils
from utils import World, need

GROUP_BYTES = 2**28  # of weights in compute dtype that are gathered together, or one layer
NARROW = 2**24  # weights of a layer that a GPU computes in less time than the host takes to tell it to


def shard_model(module: torch.nn.Module, model: Any, args: utils.Flags, world: World) -> Any:
    """Shard `module`, whose forward is called, and the layers of the causal LM `model` in it over all ranks.

    Compute is in --model_dtype; master weights and gradient reduction are in float32; frozen weights are stored in
    --model_dtype. --deepspeed_stage 0 replicates (a mesh of shard size 1), 2 shards gradients and optimizer state, 3
    also frees parameters after the forward, but for those with which the backward begins: of the last of several groups
    of layers, and those of no layer. With --fsdp_shard_size N each N neighbouring ranks have the whole model, and
    replicas add up their gradients. Inputs are not cast: FSDP would copy all that a batch holds, and tokens need no
    cast. --offload reference keeps the shards of a model that does not train in host memory. See needs_no_wrapper for
    when `module` stays the plain one that it is.
    """
    if world.is_main:
        warn_of_dropout(model)
    trains = any(p.requires_grad for p in model.parameters())
    if needs_no_wrapper(args, world.size, trains):
        return place_model(module, model, args, world)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    shards = args.fsdp_shard_size or world.size
    if args.deepspeed_stage == 0:
        shards = 1
    replicated = shards < world.size or args.deepspeed_stage == 0
    mesh = device_mesh(dist.group.WORLD, world.device.type, (world.size // shards, shards))
    compute_dtype = utils.DTYPES[args.model_dtype]
    options: dict[str, Any] = {
        "mesh": mesh if replicated else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False),
    }
    if "reference" in args.offload and not trains:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = layer_groups(blocks_of(model), compute_dtype.itemsize)
    stays = groups[-1] if len(groups) > 1 else None  # FSDP keeps the buffer of its gather too: room for two of several
    for group in groups:
        for layer in group:  # one at a time: the host never holds the whole model in float32
            cast_weights(layer, names, args)
        frees = args.deepspeed_stage == 3 and group is not stays
        fully_shard(group, **options, reshard_after_forward=frees)
    if trains and compute_dtype is torch.float16:
        from scripts.parts import loss_scale

        loss_scale.add(module)
    cast_weights(module, names, args)
    return fully_shard(module, **options, reshard_after_forward=False)


def warn_of_dropout(model: torch.nn.Module) -> None:
    """Print which layers still have dropout: with it the same weights give other logprobs from call to call."""
    names = []
    for name, module in model.named_modules():
        share = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if share:
            names.append(name)
    if names:
        print(f"WARNING: dropout is on in {len(names)} layers, such as {names[0]}; fine if you meant it", flush=True)


def needs_no_wrapper(args: Any, ranks: int, trains: bool) -> bool:
    """Whether one learner without --deepspeed_stage computes with the weights that it stores: those of float32 compute,
    and those of a model that does not train. FSDP would only keep a second copy of them and cost the host time. With
    bfloat16 or float16 that copy is what the forward computes with: FSDP makes it once an optimizer step, and adds the
    gradients up in float32. `args`: Flags, or the Setup of proof/memory.py."""
    if ranks > 1 or args.deepspeed_stage != 0:
        return False
    return args.model_dtype == "float32" if trains else "reference" not in args.offload


def place_model(module: torch.nn.Module, model: Any, args: utils.Flags, world: World) -> Any:
    """Cast a plain model and move it to the device, a layer at a time, as shard_model does."""
    names = {id(p): name for name, p in model.named_parameters()}
    for part in (*blocks_of(model), module):
        cast_weights(part, names, args)
        part.to(world.device)
    return module


def layer_groups(layers: Sequence[torch.nn.Module], itemsize: int) -> list[list[torch.nn.Module]]:
    """Neighbouring layers of one kind in groups of at most GROUP_BYTES, a larger layer alone."""
    groups: list[list[torch.nn.Module]] = []
    room = 0
    for layer in layers:
        size = itemsize * sum(p.numel() for p in layer.parameters())
        if size > room or type(layer) is not type(groups[-1][0]):
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(layer)
        room -= size
    return groups


@functools.cache
def device_mesh(_ranks: object, device_type: str, shape: tuple[int, int]) -> Any:
    """The mesh of all ranks (`_ranks`, their group). Policy and reference share the mesh, and so its communicators."""
    return dist.init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def cast_weights(part: Any, names: dict[int, str], args: utils.Flags) -> None:
    """Cast the parameters of `part` that are still in `names` (id -> name), and remove them from `names`. Parameters
    that train become float32, dithered with --dither_master_weights; others get --model_dtype. Buffers become
    float32."""
    dithered = args.dither_master_weights and args.model_dtype == "bfloat16"
    for p in part.parameters():
        name = names.pop(id(p), None)
        if name is None:
            continue
        p.data = p.data.to(torch.float32 if p.requires_grad else utils.DTYPES[args.model_dtype])
        if p.requires_grad and dithered:
            from scripts.parts import dither

            dither.dither(p.data, utils.derive_seed(args.seed, name))
    for buffer in part.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()


def compile_layers(model: Any) -> None:
    """Have torch.compile fuse the operations between the matrix products of each decoder layer. Call it before FSDP and
    checkpoint_layers: both stay outside the compiled code. One graph serves any number of tokens; attention
    over a pack is not compiled. Raises UserError if the model does not name its layers."""
    layers = blocks_of(model)
    need(bool(layers), f"--compile_layers: {type(model).__name__} does not name its layers: leave the flag out")
    options = utils.prepare_compiler()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, **options)


def blocks_of(model: Any) -> list[Any]:
    """The decoder layers."""
    names = set(model._no_split_modules or ())
    return [m for m in model.modules() if type(m).__name__ in names]


def checkpoint_layers(model: Any, part: str) -> None:
    """Recompute each decoder layer in the backward, or only its MLP, whose wide activations take most of the memory.

    Call it after compile_layers and before shard_model, whose hooks then run once a layer. Random states are not
    kept: no layer has dropout (utils.load_causal_lm), and packing.first_that_agrees sees that none draws numbers.
    """
    recomputed: list[Any] = blocks_of(model)
    if part == "mlp":
        recomputed = [getattr(layer, "mlp", None) for layer in recomputed]
    found = recomputed != [] and None not in recomputed
    fix = "take layer" if part == "mlp" else "leave the flag out"
    need(found, f"--gradient_checkpointing_part {part}: {type(model).__name__} has none: {fix}")
    for module in recomputed:
        is_narrow = sum(p.numel() for p in module.parameters()) <= NARROW
        module.forward = functools.partial(recompute, module.forward, is_narrow)


def recompute(forward: Callable[..., Any], is_narrow: bool, *args: Any, **kwargs: Any) -> Any:
    """forward(*args, **kwargs), computed again in the backward. The same bits in one of two ways.

    As a rule torch keeps track of each tensor that the backward needs, and stops before the last product, whose output
    it does not need. A narrow layer is computed again as a whole, by the re-entrant checkpoint, which costs the host a
    fifth less of a micro-batch (proof/README.md). That one gives a gradient to tensors among `args` alone.
    """
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if is_narrow and gradients_go_to_arguments(args, kwargs):
        whole = functools.partial(forward, **kwargs)
        return checkpoint(whole, *args, use_reentrant=True, preserve_rng_state=False)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    return checkpoint(forward, *args, **options, **kwargs)


def gradients_go_to_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among `args` takes a gradient, and none within another argument."""
    from torch.utils._pytree import tree_leaves

    found = False
    inner: list[Any] = [kwargs]
    for x in args:
        if isinstance(x, torch.Tensor):
            found |= x.requires_grad
        else:
            inner.append(x)
    for x in tree_leaves(inner):
        if getattr(x, "requires_grad", False):
            return False
    return found


def gradient_sync(module: Any, args: utils.Flags, last: bool) -> None:
    """Tell FSDP before a backward whether it is the `last` of its optimizer step. Replicated ranks add up locally and
    reduce once. Sharded ranks reduce in every micro-batch to save memory; replicas of their shards do it once."""
    is_plain = not hasattr(module, "set_requires_gradient_sync")
    if is_plain or getattr(module, "syncs", None) is last:  # FSDP would walk through all modules again
        return
    module.syncs = last
    if args.deepspeed_stage == 0:
        module.set_requires_gradient_sync(last)
    elif args.fsdp_shard_size:
        module.set_requires_all_reduce(last)
    if args.deepspeed_stage != 3:
        module.set_reshard_after_backward(last)


def clip_gradient(policy: torch.nn.Module, args: Any, world: World, metrics: utils.Metrics) -> float:
    """Scale the gradient down to the norm --max_grad_norm, 0 for none. Returns the norm that it had over all ranks,
    which may not be finite. In float16 the gradient is first freed of the loss's scale, which then adapts."""
    scaled = args.model_dtype == "float16"
    if scaled:
        from scripts.parts import loss_scale

        loss_scale.unscale(policy)
    free_for_moments(world.device)
    # on a CPU foreach would take 1 s of a start: it plans the DTensors of all parameters in one call
    options = {} if world.device.type == "cuda" else {"foreach": False}
    bound = args.max_grad_norm or math.inf
    norm: Any = torch.nn.utils.clip_grad_norm_(policy.parameters(), bound, **options)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    norm = float(norm)
    metrics.add("optim/grad_norm", norm)
    if scaled:
        loss_scale.adapt(policy, norm, args.sequence_parallel_size / world.size, metrics)
    return norm


@functools.cache
def free_for_moments(device: torch.device) -> None:
    """Once, before the first optimizer step: give a GPU what the backward has freed. Adam's moments would be made in
    it, and keep it from an engine that wakes up."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_sound(policy: Any, norm: float) -> bool:
    """Whether a gradient of this norm is finite, or beyond float16 for the loss's scale alone, which has fallen now."""
    return math.isfinite(norm) or float(getattr(policy, "loss_scale", 1.0)) > 1


def adamw(args: utils.Flags) -> type[torch.optim.AdamW]:
    """The optimizer's class."""
    if "optimizer" not in args.offload:
        return torch.optim.AdamW
    from scripts.parts import offload

    return offload.OffloadedAdamW


def gather_bucket(bucket: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> utils.NamedTensors:
    """Gather the weights of a bucket with one collective. FSDP shards rows: each of R ranks holds ceil(rows / R) of
    them, the last ranks fewer or none, so their shards are padded."""
    mesh: Any = getattr(bucket[0][1], "device_mesh", None)  # None: nothing is sharded
    ranks = 1 if mesh is None else mesh.size(-1)
    if ranks == 1:
        for name, weight in bucket:
            yield name, utils.shard_of(weight).to(dtype)
        return
    shards = [padded_shard(weight, ranks, dtype) for _, weight in bucket]
    sizes = [len(shard) for shard in shards]
    own = torch.cat(shards)
    gathered = torch.empty(ranks * len(own), dtype=dtype, device=own.device)
    dist.all_gather_single(gathered.view(torch.uint8), own.view(torch.uint8), mesh.get_group(-1))
    shards_by_weight = gathered.view(ranks, -1).split(sizes, 1)  # (ranks, size) each
    for (name, weight), all_shards in zip(bucket, shards_by_weight, strict=True):
        rows = all_shards.reshape(-1, *weight.shape[1:])
        yield name, rows[: len(weight)]


def padded_shard(weight: torch.Tensor, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's rows of a weight in `dtype`, flattened and padded to ceil(rows / ranks) rows."""
    shard = utils.shard_of(weight).to(dtype).flatten()
    rows = math.ceil(len(weight) / ranks)
    row_size = weight.numel() // len(weight)
    return torch.nn.functional.pad(shard, (0, rows * row_size - len(shard)))
