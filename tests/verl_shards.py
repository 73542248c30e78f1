"""A model after two steps of AdamW under torch's FSDP, saved file by file as veRL 0.9.1's FSDPCheckpointManager did in
a run of its own (two CPU ranks, gloo), and beside them truth.pt: weights and moments of those steps without FSDP.

    python tests/verl_shards.py MODEL OUT RANKS        # OUT/KIND/global_step_1/actor, KIND one of KINDS
"""

import contextlib
import functools
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM

KINDS = ("fsdp", "fsdp_orig_params", "fsdp2")


def train(model):
    """Two steps on fixed tokens, the same on every rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for i in range(2):
        ids = (torch.arange(12).view(2, 6) * 7 + i) % 100
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def save(kind, directory, out, rank, world):
    model, mesh = load(directory), init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    blocks = {type(m) for m in model.modules() if type(m).__name__ in set(model._no_split_modules)}
    state = contextlib.nullcontext()
    if kind == "fsdp2":
        for block in [m for m in model.modules() if type(m) in blocks]:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)
        original = {"use_orig_params": kind == "fsdp_orig_params"}
        original["mixed_precision"] = MixedPrecision(*[torch.float32] * 3)
        wrapped = FSDP(model, auto_wrap_policy=wrap, device_mesh=mesh, device_id=torch.device("cpu"), **original)
        configs = (ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False))
        state = FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, *configs)
    optimizer = train(wrapped)
    actor = out / kind / "global_step_1" / "actor"
    actor.mkdir(parents=True, exist_ok=True)
    with state:
        torch.save(wrapped.state_dict(), actor / f"model_world_size_{world}_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), actor / f"optim_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        model.config.save_pretrained(actor / "huggingface")


def work(rank, directory, out, world, store):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for kind in KINDS:
        save(kind, directory, out, rank, world)
    if rank == 0:
        model = load(directory)
        optimizer = train(model)
        names = [name for name, _ in model.named_parameters()]
        moments = {name: optimizer.state[p] for name, p in zip(names, model.parameters(), strict=True)}
        torch.save({"weights": dict(model.state_dict()), "moments": moments}, out / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    model, out, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        arguments = model, out, world, f"{folder}/store"
        torch.multiprocessing.start_processes(work, arguments, nprocs=world, start_method="fork")
