"""Process groups as on a node of GPUs, made without one."""

import json
import textwrap
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import grpo_fast
from tests import programs

RANK_0 = """
import json, sys
import utils
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import grpo

model, ranks, stage = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
world = utils.World(0, 0, ranks, torch.device("cpu"))
args = grpo.Args(model_name_or_path=model, model_dtype="bfloat16", deepspeed_stage=stage, max_logprob_gap=0.0)
"""


def rank_0(code: str, *argv: object) -> dict:
    """What `code` prints in a process that is rank 0 of a world whose other ranks are not there: collectives return."""
    done = programs.run(["-c", RANK_0 + textwrap.dedent(code), *map(str, argv)])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.runs
def test_policy_and_reference_share_their_communicators(tiny_models, stage):
    """Every group of ranks costs NCCL's buffers and its set-up on each GPU."""
    found = rank_0(
        """
        groups = []
        for _ in range(2):
            grpo.load_policy(args, world)
            groups.append(len(dist.distributed_c10d._pg_map))
        print(json.dumps(groups))
        """,
        *(tiny_models(), 8, stage),
    )
    assert found[0] > 1 and found[1] == found[0]


def test_the_group_of_the_weights_gets_options(monkeypatch):
    """ProcessGroupNCCL takes (store, rank, size, options), as its .pyi says; a CPU build of torch has no such class."""

    class NCCL:
        class Options:
            _timeout = timedelta(minutes=10)

        def __init__(self, store, rank, size, options):
            assert isinstance(options, NCCL.Options)
            self.made = rank, size, options._timeout

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    roles = grpo_fast.Roles(2, 3, 2, False, 1, 1)  # the second rank of the second of three engines
    group, device = grpo_fast.weights_group(dist.HashStore(), roles, types.SimpleNamespace(single_gpu_mode=False))
    assert device is None and group.made == (4, 7, grpo_fast.TIMEOUT)


@pytest.mark.parametrize("ranks, stage", [(8, 0), (8, 2), (64, 3)])
def test_collectives_of_a_sync_and_of_a_micro_batch(tiny_models, ranks, stage):
    """A sync moves each weight once, in compute dtype, in few collectives; a micro-batch what FSDP owes."""
    found = rank_0(
        """
        from torch.utils._python_dispatch import TorchDispatchMode
        class Collectives(TorchDispatchMode):
            def __init__(self):
                super().__init__()
                self.calls = []

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                space, _, name = func._schema.name.partition("::")
                if space in ("c10d", "_c10d_functional"):
                    tensors = [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a])]
                    sizes = [x.nbytes for x in tensors if isinstance(x, torch.Tensor)]
                    self.calls.append((name, max(sizes)))
                return func(*args, **(kwargs or {}))

        utils.GROUP_BYTES = 1  # each layer alone, as wide ones are
        learner = grpo.load_learner(args, world)
        prompt = utils.Prompt(0, (5, 6, 7), "", (), ())
        r = utils.Rollout(prompt, 0, 0, [11, 12, 13], [-2.0] * 3, [True] * 3, [0] * 3, "stop", advantage=1.0)
        calls = {}
        with Collectives() as seen:
            for micro_batches in (1, 3):
                batches = [[grpo.make_batch([[[r]]], world.device) for _ in range(micro_batches)]]
                seen.calls = []
                grpo.update(learner, batches, args, world, utils.Metrics())
                calls[micro_batches] = seen.calls
            model = sum(w.numel() for _, w in utils.named_weights(learner.policy.model))
            utils.GATHER_BYTES = model * 2 // 5
            seen.calls = []
            shapes = {name: tuple(weight.shape) for name, weight in utils.full_weights(learner.policy, torch.bfloat16)}
        assert shapes == {name: tuple(w.shape) for name, w in utils.named_weights(learner.policy.model)}
        blocks = len(learner.policy.model.base_model.layers) + 1
        print(json.dumps({"sync": seen.calls, "model": model, "updates": calls, "blocks": blocks}))
        """,
        *(tiny_models(), ranks, stage),
    )
    sync = [size for _, size in found["sync"]]
    if stage == 0:
        assert sync == []  # every rank has all of it
    else:
        assert 1 <= len(sync) <= 6 and sum(sync) <= 2 * found["model"] * 1.3, sync  # rows are filled up to even shards
    one, three = ([name for name, _ in found["updates"][n]] for n in ("1", "3"))
    gathers = [calls.count("_allgather_base_") for calls in (one, three)]
    scatters = [calls.count("_reduce_scatter_base_") for calls in (one, three)]
    blocks = found["blocks"]
    if stage == 0:  # gradients once a step, and the gap of each prompt
        assert one == three and set(one) == {"allreduce_", "allgather_"} and len(one) <= blocks + 6
    else:
        assert scatters == [blocks, 3 * blocks]
    if stage == 2:  # the policy's and the reference's weights once
        assert gathers == [2 * blocks] * 2
    if stage == 3:  # the policy's twice a micro-batch, the reference's once, but for what stays from a forward:
        stays = 2  # the last layer and what is in none, with which a backward begins
        policy = 2 * blocks - stays
        assert gathers == [policy + blocks, 3 * policy + 3 * blocks - 2 * stays]


@pytest.mark.runs
def test_only_gradients_travel_between_the_nodes_of_replicas(tiny_models):
    """Two nodes of eight: bytes of a rank's collectives over both, in updates of one and of two micro-batches."""
    found = rank_0(
        """
        from torch.utils._python_dispatch import TorchDispatchMode

        class BetweenNodes(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                groups = [dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and
                          x._type().name() == "ProcessGroup"]
                if groups and any(rank >= 8 for rank in dist.get_process_group_ranks(groups[0])):
                    tensors = [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a])]
                    sizes = [x.nbytes for x in tensors if isinstance(x, torch.Tensor)]
                    calls[-1][func._schema.name] = calls[-1].get(func._schema.name, 0) + max(sizes)
                return func(*args, **(kwargs or {}))

        prompt = utils.Prompt(0, (5, 6, 7), "", (), ())
        r = utils.Rollout(prompt, 0, 0, [11, 12, 13], [-2.0] * 3, [True] * 3, [0] * 3, "stop", advantage=1.0)
        calls = []
        import dataclasses
        for size in (0, 8):
            ours = dataclasses.replace(args, fsdp_shard_size=size, load_ref_policy=False, beta=0.0,
                                       model_dtype="float32")  # a CPU may emulate bfloat16
            learner = grpo.load_learner(ours, world)
            for micro_batches in (1, 2):
                calls.append({})
                batches = [[grpo.make_batch([[[r]]], world.device) for _ in range(micro_batches)]]
                with BetweenNodes():
                    grpo.update(learner, batches, ours, world, utils.Metrics())
        model = sum(w.numel() for w in learner.policy.parameters())
        print(json.dumps({"calls": calls, "model": model}))
        """,
        *(tiny_models(), 16, 3),
    )
    kinds = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_")
    plain, plain_2, replicas, replicas_2 = ([calls.get(kind, 0) for kind in kinds] for calls in found["calls"])
    assert plain_2[:2] == [2 * size for size in plain[:2]] and min(plain[:2]) >= 2 * found["model"]
    few = 256  # of sums and counts
    assert replicas == replicas_2 and replicas[:2] == [0, 0]
    assert 4 * found["model"] / 8 <= replicas[2] < 4 * found["model"] / 8 * 1.3 + few  # rows are filled up
