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


def test_a_teacher_of_other_tokens_is_refused(tiny_models, teacher, tmp_path):
    args = make_args(tiny_models(), *TEACH, "--ref_model_name_or_path", teacher)
    plan.check_models(args, [])
    other = shutil.copytree(teacher, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    args = replace(args, ref_model_name_or_path=str(other))
    with pytest.raises(utils.UserError, match="other tokens"):
        plan.check_models(args, [])
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    words = {i: word for word, i in vocabulary.items()}
    vocabulary |= {words[300]: 299, words[299]: 300}
    (other / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(utils.UserError, match="^--ref_model_name_or_path .*/other: other tokens"):
        plan.check_models(args, [])
