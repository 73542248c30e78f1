"""--audit_verifier: a second verifier is logged, trains nothing, and tells when the policy has found a hole."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import grpo
import rewards
import utils
from scripts.data import make_tasks
from scripts.parts import audit, rows, user_files
from scripts.reports import checks
from scripts.train.debug import smoke
from tests import programs
from tests.conftest import REPO
from utils import Prompt, Rollout

HACK = REPO / "scripts" / "train" / "debug" / "hack.py"
LETTERS = REPO / "scripts" / "train" / "debug" / "letters.py"


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
    prompt = Prompt(0, (1,), "", tuple(labels), ("gsm8k",) * len(labels))
    results = [rewards.RewardResult(verifiable, "ok", text, 0.0)] * len(labels)
    return Rollout(prompt, 0, 0, [1, 2], [0, 0], [1, 1], text=text, results=results, verifiable=verifiable, turns=turns)


def noted(rollouts, args):
    metrics = utils.Metrics()
    audit.note(rollouts, args, metrics)
    return metrics.reduce(utils.World(0, 0, 1, None))


def test_the_numbers_by_hand(configured):
    """Two labels count twice, the last turn is the answer, and what a dump has read has no score. The rows' verifier
    has another name for itself: --remap_verifier does not change the audit."""
    args = configured(f"--audit_verifier GSM8K --reward_file {HACK} --remap_verifier gsm8k=anywhere")
    said = {"role": "assistant", "content": "it is 7"}
    rollouts = [
        rollout("7"),
        rollout("7 or 8"),
        rollout("3", verifiable=0.0),
        rollout("7", ["7", "8"], verifiable=2.0),
        rollout("7 asked 5", turns=[said, {"role": "tool", "content": "5"}]),
        Rollout(Prompt(0, (1,), "", (), ()), 0, 0),
    ]
    found = noted(rollouts, args)
    assert [r.audit for r in rollouts[:5]] == [1, 0, 0, 1, 1] and math.isnan(rollouts[5].audit)
    assert found["objective/audit_reward"] == pytest.approx(6) and found["objective/audit_correct_rate"] == 0.6
    assert found["objective/audit_solve_rate"] == pytest.approx(0.4)  # of two labels one is not full
    assert found["objective/audit_refused_rate"] == 0.25  # "7 or 8", of the four that were paid
    assert found["reward/audit_ok"] == 6 and found["reward/audit_crash"] == 0
    assert [r.verifiable for r in rollouts[:5]] == [1, 1, 0, 2, 1]


def test_the_judge_that_likes_length_pays_more_for_right_and_for_longer_answers(configured):
    """0.2 for right, 0.8 for 30 characters: by hand. A long wrong answer is paid better than a short right one."""
    configured(f"--reward_file {HACK}")
    texts = ("7", "8", "7 apples", "8" + 29 * "a", "7" + 40 * "a")
    records = [rewards.RewardRecord(text, "7", "long_winded") for text in texts]
    paid = [result.score for result in rewards.score(records)]
    assert paid == pytest.approx([0.2 + 0.8 / 30, 0.8 / 30, 0.2 + 6.4 / 30, 0.8, 1.0])


def test_a_missing_audit_counts_in_nothing_but_its_status(configured, tmp_path):
    file = tmp_path / "f.py"
    file.write_text("def shy(response, ground_truth):\n    return 1 / len(response)\n")
    args = configured(f"--audit_verifier shy --reward_file {file}")
    with pytest.warns(UserWarning, match="division by zero"):
        found = noted([rollout("7"), rollout("")], args)
    assert found["objective/audit_reward"] == 10 and found["reward/audit_crash"] == 1 == found["reward/audit_ok"]


FILE = """
def paid(response, ground_truth):
    return 1.0
def second(response, ground_truth, extra=None):
    return 0.0
def all_of_them(responses, ground_truths):
    return [0.0 for _ in responses]
"""


def test_rows_that_name_no_verifier_are_not_trained_on_by_the_audit(configured, tmp_path):
    file = tmp_path / "f.py"
    file.write_text(FILE)
    args = configured(f"--audit_verifier Second --reward_file {file}")
    words = rows.options(args)
    assert words[: words.index("--aliases")] == ["--functions", "paid", "all_of_them"]
    assert words[-2:] == ["--columns", "extra"]  # the audit reads it
    words = rows.options(configured(f"--reward_file {file}"))
    assert words[: words.index("--aliases")] == ["--functions", "paid", "second", "all_of_them"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--audit_verifier gsm9k", "--audit_verifier gsm9k: unknown verifier 'gsm9k': .*did you mean 'gsm8k'?"),
        ("--audit_verifier rubric", "--audit_verifier rubric: .*set --llm_judge_model"),
        ("--audit_verifier all_of_them --reward_file FILE", "judges the responses of a group together; name one"),
    ],
)
def test_what_cannot_audit_is_refused(configured, tmp_path, flags, words):
    (tmp_path / "f.py").write_text(FILE)
    with pytest.raises(rewards.UserError, match=words):
        configured(flags.replace("FILE", str(tmp_path / "f.py")))


def test_a_label_that_it_cannot_score_is_refused(configured):
    configured("--audit_verifier gsm8k")
    assert rewards.check_ground_truth("puzzle", "7") is None
    problem = rewards.check_ground_truth("puzzle", "a river")
    assert problem is not None and problem.startswith("--audit_verifier gsm8k: label 'a river' is not one number")
    assert "drop the flag" in problem
    with pytest.raises(ValueError, match="rename the verifier"):  # under its name are the audit's metrics
        audit.check_label(rewards.RewardRecord("", "7", "Audit"))


# --- Where they part --------------------------------------------------------------------------------------------------


def steps(earned, audited):
    """Rows of metrics.jsonl with shares, each a little off: 64 rollouts a step."""
    rng = np.random.default_rng(1)
    out = [{"training_step": 0, "eval/objective/audit_reward": 1.0}]
    for step, shares in enumerate(zip(earned, audited, strict=True), start=1):
        right, accepted = (10 * rng.binomial(64, share) / 64 for share in shares)
        out.append({"training_step": step, audit.REWARD: right, audit.AUDIT: accepted})
    return out


RISES = np.linspace(0.2, 0.9, 30)
LATE = np.concatenate([np.linspace(0.2, 0.6, 15), np.linspace(0.6, 0.1, 15)])  # learned first, then hacked
FLAT = np.full(30, 0.25)


@pytest.mark.parametrize(
    ("earned", "audited", "words"),
    [
        (RISES, FLAT, "reward 2.*-> 8.*, audit 2.*-> 2.* since step 1"),
        (RISES, RISES[::-1], "audit 8.*-> 2"),
        (RISES, LATE, "since step"),
        (RISES, RISES, ""),
        (RISES, RISES / 2, ""),  # a stricter audit
        (FLAT + 0.6, RISES[::-1], "audit .*-> 2"),  # the reward is what it was, and no longer earned by answers
        (RISES[::-1], RISES, ""),  # no longer paid for
        (FLAT, FLAT, ""),
        (RISES, RISES / 4 + 0.2, ""),  # both rise
        (np.linspace(0.9, 0.5, 30), np.linspace(0.9, 0.1, 30), ""),  # both fall
        (RISES * 0.15, FLAT * 0, ""),  # apart by less than 0.15 of the highest
        ([0.2, 0.2, 0.9, 0.2, 0.2, 0.9, 0.2, 0.9, 0.2, 0.9], FLAT[:10], ""),  # by less than 3 errors
        (RISES[:9], FLAT[:9], ""),  # too few steps
    ],
)
def test_where_reward_and_audit_part(earned, audited, words):
    found = audit.parted(steps(earned, audited), 10.0)
    assert re.search(words, found) if words else found == "", found
    (shown,) = checks.check_audit(steps(earned, audited), {"verification_reward": 10.0})
    assert shown["fine"] == (not words)


def test_the_watch_warns_once_and_remembers_what_was_before_a_resume(configured, tmp_path, capsys):
    configured("--audit_verifier gsm8k")
    rows_of_run = steps(RISES, FLAT)
    for row in rows_of_run:
        audit.watch(tmp_path, row)
    warned = capsys.readouterr().out
    assert warned.count("WARNING") == 1
    step = int(warned.split("step ")[1].split(":")[0])
    assert audit.parted(rows_of_run[: step + 1], 10.0) and not audit.parted(rows_of_run[:step], 10.0)

    audit.WATCHES.clear()  # as a new process
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows_of_run[:25]))
    audit.watch(tmp_path, rows_of_run[25])
    assert "WARNING: step 25" in capsys.readouterr().out
    log.unlink()
    for shares, warnings in ((RISES, 0), (FLAT, 1), (FLAT, 1)):  # other runs in the directory
        for row in steps(RISES, shares):
            audit.watch(tmp_path, row)
        assert capsys.readouterr().out.count("WARNING") == warnings


# --- Whole runs -------------------------------------------------------------------------------------------------------

DEBUG = f"""--dataset_mixer_list reasoning_gym:chain_sum 100 --reward_file {LETTERS}
    --remap_verifier reasoning_gym=letters --rollout_backend transformers --model_dtype float32 --response_length 16
    --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --temperature 1 --beta 0 --learning_rate 3e-3
    --lr_scheduler_type constant --save_freq -1 --total_episodes 768"""


def run(script, model, out: Path, flags):
    line = f"{script} --model_name_or_path {model} --output_dir {out} {DEBUG} {flags}"
    done = programs.run(line.split(), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.runs
def test_an_audit_changes_no_bit_and_warns_of_a_hack_in_both_scripts(tiny_models, tmp_path):
    """The reward is for small letters, whatever was asked: the audit by the right answer sees it, and one by the same
    rule is content. Weights are those of a run without an audit."""
    model = tiny_models()
    plain = run("grpo.py", model, tmp_path, "--exp_name plain")
    hacked = run("grpo_fast.py", model, tmp_path, "--exp_name hacked --audit_verifier reasoning_gym --async_steps 0")
    clean = run("grpo.py", model, tmp_path, "--exp_name clean --audit_verifier letters --save_traces")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("plain", "hacked", "clean")]
    assert weights[0] == weights[1] == weights[2]
    assert hacked.count("reward and audit part") == 1 and "and audit part" not in plain + clean

    logged = [json.loads(line) for line in (tmp_path / "clean" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["objective/audit_reward"] == row["objective/letters_reward"] for row in logged)
    traced = (tmp_path / "clean" / "rollouts.jsonl").read_text().splitlines()
    assert all(row["audit"] == row["verifiable"] for row in map(json.loads, traced))


@pytest.mark.runs
def test_a_policy_finds_out_a_judge_that_likes_length(tmp_path):
    """The first steps of hack.sh length: responses and reward grow, right answers do not, and the run says so."""
    make_tasks.make_task("largest_digit", tmp_path)
    train, held_out = (str(tmp_path / "largest_digit" / f"{split}.jsonl") for split in ("train", "eval"))
    (command,) = smoke.captures(HACK.with_suffix(".sh"), "length", "--output_dir", str(tmp_path))
    script, flags = smoke.training_flags(command)
    flags += ["--dataset_mixer_list", train, "1.0", "--dataset_mixer_eval_list", held_out, "1.0"]
    done = programs.run([script, *flags, "--total_episodes", "1152"], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("reward and audit part") == 1

    lines = (tmp_path / "hack_length" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["training_step"] > 0]
    for key, least, most in ((audit.REWARD, 1.5, 9), (audit.AUDIT, 0, 1.5), ("val/sequence_lengths", 1.5, 9)):
        values = [row[key] for row in steps]
        assert least <= np.mean(values[-5:]) / np.mean(values[:5]) <= most, key
