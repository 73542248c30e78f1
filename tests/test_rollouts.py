"""scripts/align/rollouts.py: files in the formats that verl, TRL and open-instruct write, and what is found in them."""

import json
import math

import pandas
import pytest

from scripts.align import rollouts

SCORES = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
SIZE = 4


def standard(scores):
    mean = sum(scores) / len(scores)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
    return [(score - mean) / (deviation + 1e-8) for score in scores]


def open_instruct(step, advantage=standard, prompts=None):
    """Rows of RolloutRecord."""
    rows = []
    for group, scores in enumerate(SCORES):
        prompt = [5, 6, 10 * step + group if prompts is None else prompts[group]]
        for i, (score, value) in enumerate(zip(scores, advantage(scores), strict=True)):
            row = {"step": step, "sample_idx": len(rows), "prompt_idx": group, "prompt_tokens": prompt}
            row |= {"response_tokens": [7, i], "reward": score, "advantage": value, "finish_reason": "stop"}
            row |= {"dataset": "gsm8k", "ground_truth": [3], "request_info": None, "logprobs": [-1.0, -0.5]}
            rows.append(row)
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def verdicts(path):
    return {check.name.partition(",")[0]: check.fine for check in rollouts.checks_of(rollouts.read(path))}


def test_open_instructs_records(tmp_path, capsys):
    write(
        tmp_path / "run_metadata.jsonl", [{"run_name": "run", "git_commit": "0", "model_name": "m", "timestamp": "t"}]
    )
    write(tmp_path / "run_rollouts_000000.jsonl", open_instruct(1) + open_instruct(2))
    assert rollouts.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "16 responses of 4 groups in 2 steps" in said
    assert "(score - mean) / deviation fits best, with an error of 0.00%" in said


def test_verls_rollout_data_dir(tmp_path):
    """It has no advantages: groups are told apart by the prompt's text."""
    for step in (1, 2):
        rows = []
        for row in open_instruct(step):
            text = {"input": str(row["prompt_tokens"]), "output": str(row["response_tokens"]), "gts": "3"}
            rows.append(text | {"score": row["reward"], "step": step, "acc": row["reward"]})
        write(tmp_path / f"{step}.jsonl", rows)
    found = verdicts(tmp_path)
    assert all(found.values()) and "advantage" not in found and len(found) == 4


def test_trls_tables_of_completions(tmp_path):
    """Two reward functions, of which one has no value for some rows; advantages with TRL's epsilon."""
    table = []
    for row in open_instruct(5):
        both = {"accuracy": row["reward"], "format": None if row["sample_idx"] % 2 else 0.0}
        prompt = [{"role": "user", "content": str(row["prompt_tokens"])}]
        table.append({"step": 5, "prompt": prompt, "completion": str(row["response_tokens"])} | both)
    frame = pandas.DataFrame(table)
    grouped = frame.groupby(frame.index // SIZE).accuracy
    deviation = grouped.transform("std") + 1e-4
    frame["advantage"] = (frame.accuracy - grouped.transform("mean")) / deviation
    (tmp_path / "completions").mkdir()
    frame.to_parquet(tmp_path / "completions" / "completions_00005.parquet")
    (first, *_) = rollouts.checks_of(rollouts.read(tmp_path))
    assert first.fine and "unbiased" in first.numbers
    assert all(verdicts(tmp_path).values())


def ours(advantage=1.0, **change):
    row = {"training_step": 1, "position": 0, "sample": 0, "prompt_ids": [5], "token_ids": [7, 8, 9]}
    row |= {"score": 1.0, "advantage": advantage, "mask": [True] * 3, "finish_reason": "stop"}
    return row | {"logprobs": [-1.0] * 3, "old_logprobs": [-1.0] * 3} | change


OTHERS = [ours(-1.0, sample=1, token_ids=[7, 8, 1], score=0.0)]
OF_THE_BATCH = [0.0, 0.0, 0.0, 0.6]  # what a group gets from something else than its own scores


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (open_instruct(1, lambda scores: standard(scores)[1:] + standard(scores)[:1]), "advantage"),
        (open_instruct(1, lambda scores: OF_THE_BATCH), "advantage"),
        (open_instruct(1, lambda scores: [score - scores[0] for score in scores]), "advantage"),
        (open_instruct(1)[1:], "size of a group"),
        ([row | {"response_tokens": [7]} for row in open_instruct(1)], "response"),
        (open_instruct(1, prompts=[3, 3]), "prompts of a step"),
        (open_instruct(1, prompts=[3, 4]) + open_instruct(2, prompts=[3, 4]), "prompts of a step"),
        ([row | {"reward": math.nan} for row in open_instruct(1)], "scores"),
        ([ours(mask=[False, True, True]), *OTHERS], "tokens trained on"),
        ([ours(mask=[True, True, False]), *OTHERS], "tokens trained on"),
        ([ours(old_logprobs=[-1.0, -1.5, -1.0]), *OTHERS], "logprob of the engine"),
    ],
)
def test_what_a_bug_leaves_is_found(rows, name, tmp_path, capsys):
    path = write(tmp_path / "rollouts.jsonl", rows)
    found = [check for check in rollouts.checks_of(rollouts.read(path)) if not check.fine]
    assert any(check.name.startswith(name) for check in found)
    assert rollouts.main([str(path)]) == 1


def test_our_own_rows_are_fine(tmp_path):
    """Also truncated ones without a right answer, which are shown."""
    cut = ours(-1.0, sample=1, score=0.0, token_ids=[1], finish_reason="length", mask=[True])
    path = write(tmp_path / "rollouts.jsonl", [ours(), cut | {"logprobs": [-1.0], "old_logprobs": [-1.0]}])
    found = rollouts.checks_of(rollouts.read(path))
    assert all(check.fine for check in found)
    assert any(check.numbers == "means 0 of 1 and 1 of 1" for check in found)


def test_what_is_no_dump_is_said(tmp_path, capsys):
    write(tmp_path / "x.jsonl", [{"a": 1}])
    assert rollouts.main([str(tmp_path)]) == 2
    assert "no rollouts in a format" in capsys.readouterr().err
