"""scripts/eval.py: a run's evaluation without the run; its table by hand."""

import json
import math

import pytest

import grpo
from scripts import eval as program
from tests import programs

LETTERS = """--rollout_backend transformers --model_dtype float32 --reward_file scripts/train/debug/letters.py
    --remap_verifier reasoning_gym=letters --dataset_mixer_eval_list reasoning_gym:chain_sum 3 --eval_pass_at_k 2
    --response_length 8 --temperature 1.0"""
TRAINING = """--dataset_mixer_list reasoning_gym:chain_sum 4 --num_unique_prompts_rollout 2 --learning_rate 1e-3
    --beta 0 --num_samples_per_prompt_rollout 2 --total_episodes 8 --exp_name run"""


@pytest.mark.runs
def test_a_run_is_evaluated_as_it_evaluated_itself(tmp_path, tiny_models):
    """With the flags that the run has: the same responses, scores and pass@k."""
    where = f"--output_dir {tmp_path}"
    line = f"grpo.py --model_name_or_path {tiny_models()} {LETTERS} {TRAINING} {where}"
    done = programs.run(line.split())
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "run"
    done = programs.run(f"scripts/eval.py {run} {where}".split())
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tmp_path / "eval").iterdir()
    found = [json.loads(row) for row in path.read_text().splitlines()]
    evaluation = [json.loads(row) for row in (run / "samples.jsonl").read_text().splitlines()][-1]
    assert evaluation["evaluation"] and len(found) == 6
    assert [(r["text"], r["score"]) for r in found] == [(r["text"], r["score"]) for r in evaluation["rollouts"]]
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    of_file = program.read_evaluation(path)
    for name, metric in (
        ("accuracy", "eval/pass_at_1"),
        ("pass@2", "eval/pass_at_2_unbiased"),
        ("score", "eval/scores"),
    ):
        values = map(program.measures([of_file])[name], of_file.values())
        assert math.isclose(sum(values) / 3, logged[metric], rel_tol=1e-6), name
    assert f"| {run} | 3 | 6 |" in done.stdout and "score" in done.stdout


def write(path, verdicts, label="1"):
    """An evaluation with these verdicts of each prompt."""
    rows = []
    for position, group in enumerate(verdicts):
        for verdict in group:
            scored = {"verifiable": verdict, "score": None if verdict is None else 10 * verdict}
            asked = {"position": position, "verifiers": ["gsm8k"], "ground_truths": [label]}
            rows.append(asked | scored | {"token_ids": [1, 2], "finish_reason": "stop"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_table_by_hand(tmp_path, capsys):
    """Accuracies of prompts 0, 1/2, 1 and 1, 1, 1: means 1/2 and 1, errors 1/sqrt(12) and 0; differences 1, 1/2, 0."""
    first = write(tmp_path / "first.jsonl", [[0, 0], [0, 1], [1, 1]])
    other = write(tmp_path / "other.jsonl", [[1, 1], [1, 1, None], [1, 1]])
    program.main([str(first), str(other)])
    lines = capsys.readouterr().out.splitlines()
    (of_first,) = [line for line in lines if line.startswith("| first |")]
    cells = [cell.strip() for cell in of_first.strip("|").split("|")]
    assert cells[1:3] == ["3", "6"] and cells[-2:] == ["2.0", "1.00"]
    assert cells[3].startswith("0.500 ± 0.289 [") and cells[4].startswith("0.667 ± 0.333 [")
    assert cells[5] == "5.000 ± 2.887 [-7.421, 17.421]"
    low, high = map(float, cells[3].partition("[")[2].strip("]").split(","))
    assert 0 < low < high < 1, "a share stays one"
    (of_other,) = [line for line in lines if line.startswith("| other | 3 | 6 |")]
    assert "| 1.000 ± 0.000 [0.4" in of_other, "no error is no certainty"
    (difference,) = [line for line in lines if line.startswith("| other | accuracy |")]
    assert difference == "| other | accuracy | 0.500 ± 0.289 [-0.742, 1.742] | 2 of 3 (few) | 0.500 |"


def test_flags_are_the_runs_unless_given(tmp_path):
    then = {"temperature": 0.3, "response_length": 77, "dataset_mixer_eval_list": ["x.jsonl", "1.0"], "beta": 0.7}
    then |= {"learning_rate": 0.5, "seed": 9, "shuffle": True, "exp_name": "run", "lora_rank": 4}
    (tmp_path / "model").mkdir()
    (tmp_path / "args.json").write_text(json.dumps(then))
    args = program.flags_of(["--temperature", "0.9", "--no_shuffle"], ["models/x", str(tmp_path / "model")])
    assert (args.temperature, args.response_length, args.seed, args.shuffle) == (0.9, 77, 9, False)
    assert (args.beta, args.lora_rank, args.exp_name) == (grpo.Args.beta, 0, "eval"), "of training"
    assert program.run_of("models/x") is None and program.weights_of(str(tmp_path)) == str(tmp_path / "model")
