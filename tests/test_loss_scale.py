"""float16 as compute dtype: the scale of its loss changes no gradient, follows what float16 holds, and is kept."""

import dataclasses
import math

import pytest
import torch

import grpo
import utils
from scripts.parts import checkpoints, loss_scale
from tests.test_learner import make_args, make_rollouts

HALF = "--model_dtype float16 --deepspeed_stage 3".split()


def load(model, world, *flags):
    """Flags, and a learner for them."""
    args = make_args(model, *flags)
    return args, grpo.load_learner(args, world)


def batches(args, world, factor=1.0):
    """A mini-batch whose advantages are multiplied by a factor."""
    rollouts = [dataclasses.replace(r, advantage=factor * r.advantage) for r in make_rollouts()]
    packs = grpo.pack_rollouts(rollouts, "shared", args.pack_length)[0]
    return grpo.micro_batches(packs, "shared", args, world.device)


def gradient(args, policy, world, factor):
    """Of all weights as they reach the optimizer, over the factor."""
    metrics = utils.Metrics()
    mini_batch = batches(args, world, factor)
    grpo.accumulate_gradient(policy, mini_batch, len(mini_batch), args, world, metrics)
    norm = grpo.clip_gradient(policy, args, world, metrics)
    assert math.isfinite(norm)
    grads = [utils.shard_of(p.grad).flatten() for p in policy.parameters()]
    policy.zero_grad()
    return torch.cat(grads) / factor


def update(args, learner, world, factor=1.0):
    """Metrics of an update, and how many steps of it were skipped without an excuse."""
    metrics = utils.Metrics()
    _, bad = grpo.update(learner, [batches(args, world, factor)], args, world, metrics)
    return metrics.reduce(world), bad


def scale_of(learner):
    return tuple(float(getattr(learner.policy, name)) for name in ("loss_scale", "good_steps"))


@pytest.mark.parametrize("factor", [1.0, 1e-5])
def test_the_gradient_is_that_of_float32(tiny_models, world, factor):
    """Within rounding to 11 bits (bfloat16's 8 give 2e-2), also where float16 alone would round all of it to 0."""
    args, learner = load(tiny_models(), world, "--entropy_coef", factor)
    half_args, half = load(tiny_models(), world, "--entropy_coef", factor, *HALF)
    expected = gradient(args, learner.policy, world, factor)
    assert (gradient(half_args, half.policy, world, factor) - expected).norm() < 5e-3 * expected.norm()
    assert not hasattr(learner.policy, "loss_scale")


def test_idle_batches_add_nothing_to_the_gradient(tiny_models, world):
    """A rank with one micro-batch of four, beside ranks that have four: with a weight of their own the three idle ones
    would move everything."""
    args, learner = load(tiny_models(), world, "--entropy_coef", 0.1)
    policy = learner.policy
    embedding = policy.model.get_input_embeddings().weight
    embedding.data[0] = embedding.data[1]  # idle batches have token 0, whose embedding is 0 in this model
    found = []
    for forwards in (1, 4):
        mini_batch = batches(args, world)[:1]
        grpo.accumulate_gradient(policy, mini_batch, forwards, args, world, utils.Metrics())
        found.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        policy.zero_grad()
    assert torch.equal(*found) and found[0].any()


def test_an_overflow_skips_the_step_and_halves_the_scale(tiny_models, world):
    args, learner = load(tiny_models(), world, *HALF)
    learner.policy.loss_scale.fill_(2.0**40)
    before = [utils.shard_of(p).clone() for p in learner.policy.parameters()]
    metrics, bad = update(args, learner, world)
    after = [utils.shard_of(p) for p in learner.policy.parameters()]
    assert all(map(torch.equal, before, after)) and not learner.optimizer.state
    assert (metrics["optim/loss_scale"], metrics["optim/overflowed_updates"], bad) == (2.0**40, 1, 0)
    assert scale_of(learner) == (2.0**39, 0)

    learner.policy.loss_scale.fill_(2.0**16)
    metrics, bad = update(args, learner, world)
    assert (metrics["optim/overflowed_updates"], bad) == (0, 0) and learner.optimizer.state


def test_at_scale_1_a_gradient_that_is_not_finite_has_another_reason(tiny_models, world):
    args, learner = load(tiny_models(), world, *HALF)
    skipped = []
    for scale in (4.0, 2.0, 1.0):
        learner.policy.loss_scale.fill_(scale)
        skipped.append(update(args, learner, world, math.inf)[1])
    assert skipped == [0, 1, 1] and scale_of(learner)[0] == 1


def test_good_steps_in_a_row_double_the_scale(tiny_models, world, monkeypatch):
    monkeypatch.setattr(loss_scale, "STEPS_TO_DOUBLE", 2)
    args, learner = load(tiny_models(), world, *HALF)
    seen = []
    for factor in (1.0, math.inf, 1.0, 1.0):
        update(args, learner, world, factor)
        seen.append(scale_of(learner))
    assert seen == [(2.0**16, 1), (2.0**15, 0), (2.0**15, 1), (2.0**16, 0)]

    learner.policy.loss_scale.fill_(loss_scale.LARGEST)
    loss_scale.adapt(learner.policy, 1.0, 1.0, utils.Metrics())
    loss_scale.adapt(learner.policy, 1.0, 1.0, utils.Metrics())
    assert scale_of(learner) == (loss_scale.LARGEST, 0)


@pytest.mark.parametrize("adapters", [[], ["--lora_rank", 4]])
def test_a_checkpoint_has_the_scale(tiny_models, world, tmp_path, adapters):
    args, learner = load(tiny_models(), world, *HALF, *adapters)
    update(args, learner, world, math.inf)
    update(args, learner, world)
    writer = checkpoints.Writer(tmp_path, 1, world)
    writer.save(1, learner.modules(args), learner.optimizer, {})
    writer.wait()
    path = tmp_path / "checkpoints/step_1"
    _, resumed = load(tiny_models(), world, *HALF, *adapters)
    checkpoints.load(path, resumed.modules(args), resumed.optimizer, world)
    assert scale_of(resumed) == scale_of(learner) == (2.0**15, 1)
    _, other = load(tiny_models(), world, "--deepspeed_stage", 3, *adapters)
    checkpoints.load(path, other.modules(args), other.optimizer, world)
