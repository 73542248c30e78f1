"""--audit_verifier: a second verifier is logged and trains nothing."""

import json

import numpy as np
import pytest

import grpo
import rewards
import utils
from scripts.parts import audit, rows, user_files
from tests import programs

FILE = """
def paid(response, ground_truth):
    return 1.0
def second(response, ground_truth, extra=None):
    return 0.0
def shy(response, ground_truth):
    return 1 / len(response)
def all_of_them(responses, ground_truths):
    return [0.0 for _ in responses]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def configured(monkeypatch):
    """Function flags -> grpo.Args, the settings of all verifiers until the test ends."""
    monkeypatch.setattr(rewards, "VERIFIERS", dict(rewards.VERIFIERS))

    def configure(flags):
        args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *flags.split()])
        rewards.configure(args, connect=False)
        return args

    yield configure
    rewards.configure(rewards.RewardFlags(), connect=False)
    user_files.FUNCTIONS.clear()


def rollout(text, labels=("7",), verifiable=1.0, turns=()):
    prompt = utils.Prompt(0, (1,), "", tuple(labels), ("gsm8k",) * len(labels))
    results = [rewards.RewardResult(verifiable, "ok", text, 0.0)] * len(labels)
    values = {"text": text, "results": results, "verifiable": verifiable, "turns": turns}
    return utils.Rollout(prompt, 0, 0, [1, 2], [0, 0], [1, 1], **values)


def noted(rollouts, args):
    metrics = utils.Metrics()
    audit.note(rollouts, args, metrics)
    return metrics.reduce(utils.World(0, 0, 1, None))


def test_the_numbers_by_hand(configured, file):
    """Two labels count twice, the last turn is the answer, and what a dump has read has no score. The rows' verifier
    has another name for itself: --remap_verifier does not change the audit."""
    args = configured(f"--audit_verifier GSM8K --reward_file {file} --remap_verifier gsm8k=paid")
    said = {"role": "assistant", "content": "it is 7"}
    rollouts = [
        rollout("7"),
        rollout("7 or 8"),
        rollout("3", verifiable=0.0),
        rollout("7", ["7", "8"], verifiable=2.0),
        rollout("7 asked 5", turns=[said, {"role": "tool", "content": "5"}]),
        utils.Rollout(utils.Prompt(0, (1,), "", (), ()), 0, 0),
    ]
    found = noted(rollouts, args)
    assert [r.audit for r in rollouts] == pytest.approx([1, 0, 0, 1, 1, np.nan], nan_ok=True)
    assert found["objective/audit_reward"] == pytest.approx(6) and found["objective/audit_correct_rate"] == 0.6
    assert found["objective/audit_solve_rate"] == pytest.approx(0.4)  # of two labels one is not full
    assert found["objective/audit_refused_rate"] == 0.25  # "7 or 8", of the four that were paid
    assert found["reward/audit_ok"] == 6 and found["reward/audit_crash"] == 0


def test_a_missing_audit_counts_in_nothing_but_its_status(configured, file):
    args = configured(f"--audit_verifier shy --reward_file {file}")
    found = noted([rollout("7"), rollout("")], args)
    assert found["objective/audit_reward"] == 10 and found["reward/audit_crash"] == 1 == found["reward/audit_ok"]


def test_rows_that_name_no_verifier_are_not_trained_on_by_the_audit(configured, file):
    args = configured(f"--audit_verifier Second --reward_file {file}")
    words = rows.options(args)
    assert words[: words.index("--aliases")] == ["--functions", "paid", "shy", "all_of_them"]
    assert words[-2:] == ["--columns", "extra"]  # the audit reads it


# unknown; without a judge; of whole groups
@pytest.mark.parametrize("verifier", ["gsm9k", "general-quality", "all_of_them"])
def test_what_cannot_audit_is_refused(configured, file, verifier):
    with pytest.raises(rewards.UserError, match=f"--audit_verifier {verifier}"):
        configured(f"--audit_verifier {verifier} --reward_file {file}")


def test_a_label_that_it_cannot_score_is_refused(configured):
    configured("--audit_verifier gsm8k")
    assert rewards.check_ground_truth("puzzle", "7") is None
    assert rewards.check_ground_truth("puzzle", "a river")
    with pytest.raises(ValueError):  # the audit's metrics have this name
        audit.check_label(rewards.RewardRecord("", "7", "Audit"))


@pytest.mark.house  # 20 seconds
@pytest.mark.runs
def test_an_audit_changes_no_bit_of_both_scripts(tiny_models, tmp_path):
    """Weights are those of a run without an audit, and an audit by the rule of the reward has the reward's numbers."""
    flags = f"""--model_name_or_path {tiny_models()} --reward_file scripts/train/debug/letters.py
        --dataset_mixer_list reasoning_gym:chain_sum 100 --remap_verifier reasoning_gym=letters --model_dtype float32
        --rollout_backend transformers --response_length 16 --num_unique_prompts_rollout 4 --temperature 1 --beta 0
        --num_samples_per_prompt_rollout 4 --learning_rate 3e-3 --lr_scheduler_type constant --save_freq -1
        --total_episodes 64 --output_dir {tmp_path}""".split()
    runs = {
        "plain": ["grpo.py", *flags],
        "other": ["grpo_fast.py", *flags, "--audit_verifier", "reasoning_gym", "--async_steps", "0"],
        "same": ["grpo.py", *flags, "--audit_verifier", "letters", "--save_traces"],
    }
    weights = set()
    for name, line in runs.items():
        done = programs.run([*line, "--exp_name", name], OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        weights.add((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert len(weights) == 1

    logged = [json.loads(line) for line in (tmp_path / "same" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["objective/audit_reward"] == row["objective/letters_reward"] for row in logged)
    traced = (tmp_path / "same" / "rollouts.jsonl").read_text().splitlines()
    assert all(row["audit"] == row["verifiable"] for row in map(json.loads, traced))
