"""How a model is spread over the learners (FSDP2), and what each of them computes again in the backward.

FSDP gathers the weights of a group of layers at once. Each group costs the host about 2 ms of a micro-batch, whatever
its size, so narrow layers share one: see GROUP_BYTES.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import utils
from utils import World, need

GROUP_BYTES = 2**28  # of weights in compute dtype that are gathered together, or one layer


def shard_model(module: torch.nn.Module, model: Any, args: utils.Flags, world: World) -> Any:
    """Shard `module`, whose forward is called, and the layers of the causal LM `model` in it over all ranks.

    Compute is in --model_dtype; master weights and gradient reduction are in float32; frozen weights are stored in
    --model_dtype. --deepspeed_stage 0 replicates (a mesh of shard size 1), 2 shards gradients and optimizer state, 3
    also frees parameters after the forward, but for those of no layer, with which the backward begins. Inputs are not
    cast: FSDP would copy all that a batch holds, and tokens need no cast.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicated = args.deepspeed_stage == 0
    shape = (world.size, 1) if replicated else (1, world.size)
    mesh = device_mesh(dist.group.WORLD, world.device.type, shape)
    compute_dtype = utils.DTYPES[args.model_dtype]
    options: dict[str, Any] = {
        "mesh": mesh if replicated else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False),
    }
    names = {id(p): name for name, p in model.named_parameters()}
    for group in layer_groups(utils.blocks_of(model), compute_dtype.itemsize):
        for layer in group:  # one at a time: the host never holds the whole model in float32
            cast_weights(layer, names, args)
        fully_shard(group, **options, reshard_after_forward=args.deepspeed_stage == 3)
    cast_weights(module, names, args)
    return fully_shard(module, **options, reshard_after_forward=False)


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


def checkpoint_layers(model: Any, part: str) -> None:
    """Recompute each decoder layer in the backward, or only its MLP, whose wide activations take most of the memory.

    Call it after utils.compile_layers and before shard_model, whose hooks then run once a layer. Random states are not
    kept: no layer has dropout (utils.load_causal_lm), and packing.first_that_agrees sees that none draws numbers.
    """
    from torch.utils.checkpoint import checkpoint

    recomputed: list[Any] = utils.blocks_of(model)
    if part == "mlp":
        recomputed = [getattr(layer, "mlp", None) for layer in recomputed]
    found = recomputed != [] and None not in recomputed
    fix = "take layer" if part == "mlp" else "leave the flag out"
    need(found, f"--gradient_checkpointing_part {part}: {type(model).__name__} has none: {fix}")
    for module in recomputed:
        options = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
        module.forward = functools.partial(checkpoint, module.forward, **options)
