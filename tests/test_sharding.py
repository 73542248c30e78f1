"""How a model is spread over the learners: what the host does for it, and that the update does not depend on it."""

import functools

import pytest
import torch
import torch.utils.checkpoint

import grpo
import utils
from scripts.parts import checkpoints
from tests import programs
from tests.test_learner import make_args, make_rollouts, run_update, update


def learn(learner, flags, model, world, *seeds):
    for seed in seeds:
        update(learner, [make_rollouts(seed=seed)], make_args(model, *flags), world)


def master_weights(learner):
    utils.shard_again(learner.policy)
    return [utils.shard_of(p).detach().clone() for p in learner.policy.parameters()]


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
    learn(learner, flags, model, world, 0, 1, 2)
    reference = grpo.load_policy(make_args(model, "--model_dtype", "bfloat16"), world, frozen=True)
    batch = grpo.make_batch([[make_rollouts(1)]], world.device)
    with torch.no_grad():
        logprobs, _ = reference(batch, 1.0)
    return [*master_weights(learner), logprobs]


@pytest.mark.parametrize("stages", [(0, 3), (3, 0)])
def test_a_checkpoint_goes_from_a_plain_model_to_a_wrapped_one_and_back(tiny_models, world, tmp_path, stages):
    learners = [grpo.load_learner(make_args(tiny_models(), "--deepspeed_stage", stage), world) for stage in stages]
    learn(learners[0], (), tiny_models(), world, 0)
    writer = checkpoints.Writer(tmp_path, 1, world)
    writer.save(1, {"policy": learners[0].policy}, learners[0].optimizer, {})
    writer.wait()
    path = tmp_path / "checkpoints/step_1"
    checkpoints.load(path, {"policy": learners[1].policy}, learners[1].optimizer, world)
    for learner in learners:
        learn(learner, (), tiny_models(), world, 1)
    assert all(map(torch.equal, *map(master_weights, learners)))


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_narrow_and_wide_layers_are_recomputed_with_the_same_bits(tiny_models, world, monkeypatch, arch):
    """And with those of layers that are not. An update at stage 3, with old logprobs, which take no gradient."""
    flags = ("--deepspeed_stage", 3, "--num_mini_batches", 2)
    plain, _ = run_update(make_args(tiny_models(arch), *flags), world, [make_rollouts()])
    ways = []
    once = torch.utils.checkpoint.checkpoint

    def noted(*args, **how):
        ways.append(how["use_reentrant"] and torch.is_grad_enabled())
        return once(*args, **how)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", noted)
    for narrow in (utils.NARROW, 0):
        monkeypatch.setattr(utils, "NARROW", narrow)
        ways.clear()
        again, _ = run_update(
            make_args(tiny_models(arch), *flags, "--gradient_checkpointing"), world, [make_rollouts()]
        )
        assert any(ways) == (narrow > 0)
        assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_layer_that_draws_numbers_is_refused(tiny_models, world):
    """Old and new logprobs would differ by noise, and random states are not kept for recomputed layers."""
    args = make_args(tiny_models())
    policy = grpo.load_policy(args, world)
    choose = functools.partial(grpo.choose_packing, policy, make_rollouts()[0].prompt, args, world)
    assert choose() == "shared"
    mlp = policy.model.base_model.layers[0].mlp
    mlp.register_forward_hook(lambda _module, _inputs, out: out + 1e-3 * torch.rand(()))
    with pytest.raises(utils.UserError, match="differ"):
        choose()


OFFLOAD = "--beta 0.1 --load_ref_policy --offload reference".split()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_in_host_memory_changes_no_bit(tiny_models, world, stage):
    """Three updates by Adam, with the reference policy in host memory and without."""
    weights = []
    for flags in (OFFLOAD, OFFLOAD[:3]):
        learner = grpo.load_learner(make_args(tiny_models(), "--deepspeed_stage", stage, *flags), world)
        learn(learner, flags, tiny_models(), world, 0, 1, 2)
        weights.append(master_weights(learner))
    assert all(map(torch.equal, *weights))


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
