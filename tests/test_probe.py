"""scripts/parts/probe.py: nothing is said of the code as it is, and what each edit changes is told."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import grpo
import utils
from scripts.parts import plan, probe
from tests import test_forks
from tests.conftest import REPO

CLEAN = """
--beta 0
--advantage_normalization_type standard_unbiased --loss_denominator 896
--advantage_normalization_type none --loss_fn cispo
--loss_fn gspo --num_mini_batches 4 --num_epochs 2 --kl_estimator 1
--beta 0.5 --kl_in_reward --advantage_normalization_type centered
--clip_higher 0.28 --clip_dual 3.0 --no_use_rho_correction
--rho_mask_lower_bound 0.999 --rho_mask_upper_bound 1.001 --rho_mask_sequence_level
--rho_mask_upper_bound 0.5 --rho_mask_tv_divergence
--non_stop_penalty --overlong_buffer_length 8 --apply_r1_style_format_reward --additive_format_reward
"""


def flags(text, module=grpo):
    return utils.parse_args(module.Args, ["--model_name_or_path", "x", *text.split()])


@pytest.mark.parametrize("text", CLEAN.strip().splitlines())
def test_nothing_is_said_of_the_code_as_it_is(text):
    before = torch.random.get_rng_state()
    assert probe.differences(flags(text)) == []
    assert torch.equal(torch.random.get_rng_state(), before)


ZOO = """
advantages_as_mask advantages_of_others advantages_of_the_batch baseline_of_the_first clip_before_the_advantage
clip_ignored end_token_masked entropy_of_the_wrong_sign first_token_masked kl_of_the_wrong_sign
loss_averaged_over_ranks loss_divided_by_accumulation loss_per_micro_batch loss_per_rank no_policy_gradient
ratio_always_one rho_of_the_new_policy
"""
FLAGS = {"entropy_of_the_wrong_sign": "--entropy_coef 0.01", "kl_of_the_wrong_sign": "--beta 0.5"}


@pytest.mark.house
@pytest.mark.parametrize("name", ZOO.split())
def test_bugs_of_other_systems_are_told(name, tmp_path):
    """grpo.py with a diff of tests/zoo. With these flags nothing is said of the code as it is."""
    shutil.copy(REPO / "grpo.py", tmp_path)
    subprocess.run(["git", "apply", str(REPO / "tests" / "zoo" / f"{name}.diff")], cwd=tmp_path, check=True)
    module = test_forks.load(f"grpo_{name}", tmp_path / "grpo.py")
    try:
        found = probe.differences(flags(FLAGS.get(name, ""), module))
    finally:
        del sys.modules[module.__name__]
    assert found and "cannot be asked" not in " ".join(found)
    assert probe.differences(flags(FLAGS.get(name, ""))) == []


def test_advantages_that_look_at_the_responses(monkeypatch):
    """Some made-up responses of a group are equal and others are not: a weight by rarity is seen."""
    set_advantages = grpo.set_advantages

    def by_rarity(groups, args):
        set_advantages(groups, args)
        for group in groups:
            texts = [tuple(r.token_ids) for r in group]
            for r, text in zip(group, texts, strict=True):
                r.advantage = r.advantage * texts.count(text) ** -0.5

    monkeypatch.setattr(grpo, "set_advantages", by_rarity)
    assert "do not add up to 0" in " ".join(probe.differences(flags("")))


def test_a_mask_of_the_environments_tokens(monkeypatch):
    add = utils.Rollout._add
    monkeypatch.setattr(utils.Rollout, "_add", lambda self, **c: add(self, **c | {"mask": [1] * len(c["mask"])}))
    assert len(probe.differences(flags(""))) == 1


def test_a_function_that_wants_something_else_is_told_and_ends_no_run(monkeypatch):
    monkeypatch.setattr(grpo, "set_advantages", lambda groups: 0)
    (found,) = probe.differences(flags(""))
    assert found.startswith("advantages cannot be asked about: TypeError")


def test_a_first_token_that_all_prompts_have_twice(monkeypatch):
    monkeypatch.setattr(plan, "bos_of", lambda _: None)
    args = replace(flags(""), num_unique_prompts_rollout=2)

    def prompts(*starts):
        return [utils.Prompt(i, ids, "", ("7",), ("gsm8k",)) for i, ids in enumerate(starts)]

    (said,) = plan.warnings_of(args, prompts((1, 1, 5), (1, 1, 7)))
    assert "begins with token 1 twice" in said
    assert plan.warnings_of(args, prompts((1, 5, 1), (1, 5, 7))) == []
    assert plan.warnings_of(args, prompts((1, 1, 5), (2, 2, 7))) == []
