"""How a model is spread over the learners: what the host does for it, and that the update does not depend on it."""

import copy
import dataclasses
import functools

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import grpo
import utils
from scripts.parts import checkpoints, optimizers
from tests import programs
from tests.test_learner import make_args, make_rollouts, run_update


def test_fsdp_does_not_look_through_the_rollouts(tiny_models, world):
    """A pack has some 64, each with its prompt's tokens: FSDP would visit, and copy, every number in each forward."""
    seen = []

    @dataclasses.dataclass(eq=False)
    class Watched(utils.Rollout):
        def __getattribute__(self, name):
            seen.append(name)
            return super().__getattribute__(name)

    args = make_args(tiny_models(), "--deepspeed_stage", 3)
    policy = grpo.load_policy(args, world)
    rollouts = [Watched(**vars(r)) for r in make_rollouts(1)]
    batch = grpo.make_batch([[rollouts]], world.device)
    assert list(batch.rollouts) == rollouts and seen
    seen.clear()
    logprobs, _ = policy(batch, 1.0)
    logprobs.sum().backward()
    assert not seen


@pytest.mark.parametrize("flags, trains, wraps", [
    ("--model_dtype float32", True, False),
    ("--model_dtype float32 --lora_rank 2", True, False),
    ("--model_dtype bfloat16", False, False),  # a reference policy
    ("--model_dtype bfloat16", True, True),  # its forward needs a copy of the weights
    ("--model_dtype float32 --deepspeed_stage 2", True, True),
    ("--model_dtype bfloat16 --offload reference", False, True),
])  # fmt: skip
def test_one_learner_has_a_wrapper_only_where_it_needs_one(tiny_models, world, flags, trains, wraps):
    policy = grpo.load_policy(make_args(tiny_models(), *flags.split()), world, frozen=not trains)
    assert isinstance(policy, FSDPModule) == wraps
    assert all(isinstance(p, DTensor) == wraps for p in policy.parameters())
    assert {p.dtype for p in policy.parameters()} == {torch.float32 if trains else torch.bfloat16}
    assert {b.dtype for b in policy.buffers()} == {torch.float32}
    assert all(
        p.requires_grad == (trains and ("lora" in name) == ("lora" in flags)) for name, p in policy.named_parameters()
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_has_the_bits_of_a_wrapped_one(tiny_models, world, monkeypatch, tied):
    """Three steps of Adam with a clipped gradient, which several micro-batches add up; a reference in bfloat16."""
    plain = three_steps(tiny_models("qwen2", tied), world)
    monkeypatch.setattr(utils, "needs_no_wrapper", lambda *_: False)
    wrapped = three_steps(tiny_models("qwen2", tied), world)
    assert all(map(torch.equal, plain, wrapped))


def three_steps(model, world):
    """The master weights, and the logprobs of another model that does not train."""
    flags = ("--pack_length", 30, "--max_grad_norm", 0.01)
    learner = grpo.load_learner(make_args(model, *flags), world)
    for seed in range(3):
        update(learner, flags, model, world, seed)
    reference = grpo.load_policy(make_args(model, "--model_dtype", "bfloat16"), world, frozen=True)
    batch = grpo.make_batch([[make_rollouts(1)]], world.device)
    with torch.no_grad():
        logprobs, _ = reference(batch, 1.0)
    return [*master_weights(learner), logprobs]


@pytest.mark.parametrize("stages", [(0, 3), (3, 0)])
def test_a_checkpoint_goes_from_a_plain_model_to_a_wrapped_one_and_back(tiny_models, world, tmp_path, stages):
    learners = []
    for stage in stages:
        learners.append(grpo.load_learner(make_args(tiny_models(), "--deepspeed_stage", stage), world))
    update(learners[0], (), tiny_models(), world, 0)
    writer = checkpoints.Writer(tmp_path, 1, world)
    writer.save(1, {"policy": learners[0].policy}, learners[0].optimizer, {})
    writer.wait()
    path = tmp_path / "checkpoints/step_1"
    checkpoints.load(path, {"policy": learners[1].policy}, learners[1].optimizer, world)
    for learner in learners:
        update(learner, (), tiny_models(), world, 1)
    assert all(map(torch.equal, *map(master_weights, learners)))


@pytest.mark.parametrize("flags", ["--deepspeed_stage 3 --gradient_checkpointing", "--deepspeed_stage 2"])
def test_the_update_does_not_depend_on_the_groups(tiny_models, world, monkeypatch, flags):
    args = make_args(tiny_models(), *flags.split())
    together, _ = run_update(args, world, [make_rollouts()])
    monkeypatch.setattr(utils, "GROUP_BYTES", 1)
    alone, _ = run_update(args, world, [make_rollouts()])
    assert all(torch.equal(together[name], alone[name]) for name in alone)


@pytest.mark.parametrize("arch, part", [("llama", "layer"), ("qwen2", "mlp"), ("gemma2", "layer"), ("gemma2", "mlp")])
def test_narrow_and_wide_layers_are_recomputed_with_the_same_bits(tiny_models, world, monkeypatch, arch, part):
    """And with those of layers that are not. An update at stage 3, with old logprobs, which take no gradient."""
    flags = ("--deepspeed_stage", 3, "--num_mini_batches", 2)
    plain, _ = run_update(make_args(tiny_models(arch), *flags), world, [make_rollouts()])
    ways = []
    once = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(
        torch.utils.checkpoint,
        "checkpoint",
        lambda *args, **how: ways.append(how["use_reentrant"]) or once(*args, **how),
    )
    args = make_args(tiny_models(arch), *flags, "--gradient_checkpointing", "--gradient_checkpointing_part", part)
    for narrow, whole in ((utils.NARROW, True), (0, False)):
        monkeypatch.setattr(utils, "NARROW", narrow)
        ways.clear()
        again, _ = run_update(args, world, [make_rollouts()])
        assert set(ways) == {whole}
        assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("hidden, inner", [(True, False), (False, False), (True, True)])
def test_every_tensor_of_a_narrow_layer_gets_its_gradient(hidden, inner):
    """Also one within another argument, which the re-entrant checkpoint would leave out or follow too far, and the
    weight where neither takes one."""
    weight = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor(5.0, requires_grad=hidden)
    pair = [torch.tensor(7.0, requires_grad=inner) * 2 for _ in range(2)]
    if inner:
        for value in pair:
            value.retain_grad()
    out = utils.recompute(lambda x, pair: weight * x * pair[0] * pair[1], True, x, pair=pair)
    (out + sum(pair)).backward()
    assert weight.grad == 5 * 14 * 14
    assert x.grad == (3 * 14 * 14 if hidden else None)
    assert [value.grad for value in pair] == ([3 * 5 * 14 + 1] * 2 if inner else [None] * 2)


def test_a_layer_that_draws_numbers_is_refused(tiny_models, world):
    """Old and new logprobs would differ by noise, and random states are not kept for recomputed layers."""
    args = make_args(tiny_models())
    policy = grpo.load_policy(args, world)
    prompt = utils.Prompt(0, (5, 6, 7, 8), "", (), ())
    choose = functools.partial(grpo.choose_packing, policy, prompt, args, world)
    assert choose() == "shared"
    handle = policy.model.base_model.layers[0].mlp.register_forward_hook(
        lambda _module, _inputs, out: out + 1e-3 * torch.rand(())
    )
    with pytest.raises(utils.UserError, match="differ"):
        choose()
    handle.remove()


OFFLOAD = "--beta 0.1 --load_ref_policy --offload reference optimizer".split()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_in_host_memory_changes_no_bit(tiny_models, world, stage):
    """Three updates by Adam, with moments and the reference policy in host memory and without."""
    weights = []
    for flags in (OFFLOAD, OFFLOAD[:3]):
        learner = grpo.load_learner(make_args(tiny_models(), "--deepspeed_stage", stage, *flags), world)
        for seed in range(3):
            update(learner, flags, tiny_models(), world, seed)
        weights.append(master_weights(learner))
    assert type(learner.optimizer) is torch.optim.AdamW and all(
        torch.equal(*pair) for pair in zip(*weights, strict=True)
    )


def update(learner, flags, model, world, seed):
    args = make_args(model, *flags)
    packs = grpo.pack_rollouts(make_rollouts(seed=seed), "shared", args.pack_length)[0]
    batches = grpo.micro_batches(packs, "shared", args, world.device)
    grpo.update(learner, [batches], args, world, utils.Metrics())


def master_weights(learner):
    utils.shard_again(learner.policy)
    return [utils.shard_of(p).detach().clone() for p in learner.policy.parameters()]


def test_moments_stay_in_host_memory(tiny_models, world, monkeypatch, tmp_path):
    """Before the first step, after it, and after a checkpoint was loaded: in the memory that was asked for."""
    asked = []
    made = optimizers.host_memory
    monkeypatch.setattr(optimizers, "host_memory", lambda like: asked.append(made(like)) or asked[-1])

    def in_host_memory(optimizer):
        hosts = {tensor.data_ptr() for tensor in asked}
        moments = [utils.shard_of(state[name]) for state in optimizer.state.values() for name in optimizers.MOMENTS]
        return moments != [] and all(moment.data_ptr() in hosts for moment in moments)

    args = make_args(tiny_models(), *OFFLOAD)
    learners = [grpo.load_learner(args, world) for _ in range(2)]
    for seed in range(2):
        update(learners[0], OFFLOAD, tiny_models(), world, seed)
        assert in_host_memory(learners[0].optimizer)
    writer = checkpoints.Writer(tmp_path, 1, world)
    writer.save(2, learners[0].modules(args), learners[0].optimizer, {})
    writer.wait()
    asked.clear()
    checkpoints.load(tmp_path / "checkpoints/step_2", learners[1].modules(args), learners[1].optimizer, world)
    assert in_host_memory(learners[1].optimizer)
    learners[1].optimizer.load_state_dict(copy.deepcopy(learners[1].optimizer.state_dict()))
    assert in_host_memory(learners[1].optimizer)
    for learner in learners:
        update(learner, OFFLOAD, tiny_models(), world, 2)
    assert all(map(torch.equal, *map(master_weights, learners)))


RANKS = """
import sys
import utils
import torch, torch.distributed as dist
from tests.test_learner import make_args, make_rollouts, run_update

world = utils.init_distributed()
found = []
for stage, size in ((3, 0), (3, 2), (2, 2)):
    args = make_args(sys.argv[1], "--pack_length", 30, "--deepspeed_stage", stage, "--fsdp_shard_size", size)
    weights, _ = run_update(args, world, [make_rollouts(seed=world.rank)])
    found.append({name: weight.clone() for name, weight in weights.items()})
if world.is_main:
    torch.save(found, sys.argv[2])
dist.barrier()
utils.exit_process()
"""


@pytest.mark.runs
def test_replicas_of_shards_learn_the_same(tiny_models, tmp_path):
    """Four ranks and some micro-batches: shards of two and two replicas, against one model over all four."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = programs.run([*programs.torchrun(4), script, tiny_models(), tmp_path / "found"], OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr[-3000:]
    plain, *others = torch.load(tmp_path / "found")
    for replicas in others:
        assert all((plain[name] - replicas[name]).norm() < 1e-6 * plain[name].norm() for name in plain)
