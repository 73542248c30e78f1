"""A teacher: another model as the reference policy, whose KL is what is learned (on-policy distillation)."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import grpo
import utils
from scripts.parts import plan
from tests.test_learner import make_args, make_rollouts, plain_logprobs

TEACH = ("--load_ref_policy", "--beta", 1, "--kl_estimator", "kl2", "--no_filter_zero_std_samples")


@pytest.fixture(scope="module")
def teacher(tiny_models, tmp_path_factory):
    """A model of the tiny models' vocabulary with other weights and more of them."""
    from scripts.data.make_tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", arch="qwen3", tied=False, seed=5)


def learn(args, world, rollouts):
    """The metrics of an update, and its batches of `rollouts`, whose advantages are zero."""
    learner = grpo.load_learner(args, world)
    for r in rollouts:
        r.advantage = 0.0
    batches = [grpo.micro_batches(grpo.pack_rollouts(rollouts, "shared", 128)[0], "shared", args, world.device)]
    metrics = utils.Metrics()
    grpo.update(learner, batches, args, world, metrics)
    return metrics.reduce(world) | {"batches": batches[0]}


@pytest.mark.parametrize("adapters", [(), ("--lora_rank", 4)])
def test_reference_logprobs_are_the_teachers(tiny_models, teacher, world, adapters):
    """Also of a policy with adapters, which a teacher has not: at the start they change nothing."""
    args = make_args(tiny_models(), *TEACH, "--ref_model_name_or_path", teacher, *adapters)
    rollouts = make_rollouts()
    found = learn(args, world, rollouts)
    assert found["loss/policy_avg"] == 0
    models = [utils.load_causal_lm(a).float() for a in (args.of_reference(), args)]
    for batch in found["batches"]:
        for i, r in enumerate(batch.rollouts, start=1):
            with torch.no_grad():
                (want, _), (ours, _) = (plain_logprobs(model, r, args.temperature) for model in models)
            got = batch.ref_logprobs[batch.seq_ids == i]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(batch.new_logprobs[batch.seq_ids == i], ours, rtol=1e-5, atol=1e-5)
    same = learn(replace(args, ref_model_name_or_path=str(tiny_models())), world, rollouts)
    assert same["objective/kl1_avg"] == 0.0


@pytest.mark.parametrize("estimator, teaches", [("kl2", True), ("kl3", True), ("kl4", True), ("kl1", False)])
def test_without_any_reward_the_policy_moves_to_the_teacher(tiny_models, teacher, world, estimator, teaches):
    """The expected gradient, exactly: all 512 next tokens of a prompt, each as often as the policy says. k2 and k4
    have the gradient of the KL, k3 that of the KL the other way round, k1 none."""
    args = make_args(tiny_models(), *TEACH, "--ref_model_name_or_path", teacher)
    policy = grpo.load_policy(args, world)
    ref = grpo.load_policy(args.of_reference(), world, frozen=True)
    prompt = utils.Prompt(0, (5, 6, 7), "", ("1",), ("gsm8k",))
    rows = [[[grpo.Rollout(prompt, 0, i, [i], [0.0], [True], [0], "stop")]] for i in range(512)]
    batch = grpo.make_batch(rows, world.device)
    with torch.no_grad():
        batch.ref_logprobs = ref(batch, args.temperature)[0]
    new, _ = policy(batch, args.temperature)
    old = new.detach()
    theirs = batch.ref_logprobs
    kls = grpo.kl_estimates(new, theirs, (new - old).exp())
    (weight,) = (p for n, p in policy.named_parameters() if n.endswith("layers.1.mlp.down_proj.weight"))
    (got,) = torch.autograd.grad((old.exp() * kls[grpo.KL_ESTIMATORS[estimator]]).sum(), weight, retain_graph=True)
    forward = -(theirs.exp() * new).sum()
    reverse = (new.exp() * (new - theirs)).sum()
    (want,) = torch.autograd.grad(forward if estimator == "kl3" else reverse, weight, retain_graph=True)
    got = utils.shard_of(got)
    want = utils.shard_of(want)
    assert (got - want * teaches).norm() < 2e-5 * want.norm()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_reference_lies_in_compute_dtype_and_computes_the_same(tiny_models, world, stage):
    """bfloat16: rounded at the start or at each gather, the logprobs are the same bits."""
    flags = ("--load_ref_policy", "--beta", 0.1, "--model_dtype", "bfloat16", "--deepspeed_stage", stage)
    args = make_args(tiny_models(), *flags)
    ref = grpo.load_learner(args, world).ref_policy
    assert {p.dtype for p in ref.parameters()} == {torch.bfloat16}
    refreshed = grpo.load_learner(replace(args, ref_policy_update_freq=3), world).ref_policy
    assert {p.dtype for p in refreshed.parameters()} == {torch.float32}
    assert all(b.dtype == torch.float32 for b in ref.buffers() if b.is_floating_point())
    batch = grpo.make_batch([[[r]] for r in make_rollouts()], world.device)
    with torch.no_grad():
        assert torch.equal(ref(batch, 1.0)[0], refreshed(batch, 1.0)[0])


def test_the_same_vocabulary_token_by_token(tiny_models, teacher, tmp_path):
    args = make_args(tiny_models(), *TEACH, "--ref_model_name_or_path", teacher)
    plan.check_models(args, [])
    shutil.copytree(teacher, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    text = json.loads(path.read_text())
    vocabulary = text["model"]["vocab"]
    words = {i: word for word, i in vocabulary.items()}
    assert len(words) > 300
    vocabulary[words[300]] = 299
    vocabulary[words[299]] = 300
    path.write_text(json.dumps(text))
    other = replace(args, ref_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(utils.UserError, match="^--ref_model_name_or_path .*/other: token 299 "):
        plan.check_models(other, [])
    config = json.loads((teacher / "config.json").read_text())
    shutil.copytree(teacher, tmp_path / "small")
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    with pytest.raises(utils.UserError, match="token 511 "):
        plan.check_models(replace(args, ref_model_name_or_path=str(tmp_path / "small")), [])
