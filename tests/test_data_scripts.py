"""The scripts of scripts/data that write the rows of others in one shape."""

import json
import sys

import datasets
import pytest

import grpo
import utils
from scripts.data import competition_math, gsm8k, rlvr
from scripts.parts import solver
from tests.conftest import REPO

GSM8K = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A house costs 1,000 times $1,200. How much is it?", "answer": "It is that.\n#### 1,200,000"},
]
SCRIPTS = {"gsm8k": gsm8k, "competition_math": competition_math, "rlvr": rlvr}


def run_data(script, *flags):
    """Run a script in this process: torch's import is most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        SCRIPTS[script].main()


def write_rows(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_gsm8k_rows(tmp_path, tiny_models):
    for split in ("train", "test"):
        write_rows(tmp_path / "source" / f"{split}.jsonl", GSM8K)
    run_data("gsm8k", "--source", tmp_path / "source", "--prompt", "verl", "--out", tmp_path / "out")
    train = read_rows(tmp_path / "out/train.jsonl")
    assert read_rows(tmp_path / "out/test.jsonl") == train
    assert [row["ground_truth"] for row in train] == ["7", "1200000"]
    text = 'Ann has 3 pens and buys 4. How many? Let\'s think step by step and output the final answer after "####".'
    assert train[0]["messages"] == train[0]["prompt"] == [{"role": "user", "content": text}]
    mixer = [str(tmp_path / "out/train.jsonl"), "1.0"]
    args = grpo.Args(model_name_or_path=str(tiny_models()), max_prompt_token_length=512, dataset_mixer_list=mixer)
    prompts = utils.load_prompts("dataset_mixer_list", args, utils.load_tokenizer(args))
    assert [(p.ground_truths, p.verifiers) for p in prompts][1] == (("1200000",), ("gsm8k",))


def test_competition_math(tmp_path):
    data = [
        {"problem": f"Find {i}.", "solution": f"So \\boxed{{1}} no, \\boxed{{\\frac{{{i}}}{{2}}}}."} for i in range(6)
    ]
    write_rows(tmp_path / "in/train.jsonl", [*data, {"problem": "Prove it.", "solution": "Done."}])
    write_rows(tmp_path / "in/test.jsonl", data[:2])
    run_data("competition_math", "--dataset", tmp_path / "in", "--out", tmp_path / "out")
    train = read_rows(tmp_path / "out/train.jsonl")
    assert [row["ground_truth"] for row in train] == [f"\\frac{{{i}}}{{2}}" for i in range(6)]
    assert {row["dataset"] for row in train} == {"math"} and len(read_rows(tmp_path / "out/test.jsonl")) == 2

    prompt = REPO / "scripts/train/solver/planner_prompt.txt"
    flags = ["--rows", 5, "--eval_rows", 2, "--verifier", "solver", "--prompt_file", prompt]
    run_data("competition_math", "--dataset", tmp_path / "in", "--out", tmp_path / "solver", *flags)
    train, held_out = (read_rows(tmp_path / "solver" / f"{split}.jsonl") for split in ("train", "eval"))
    labels = [json.loads(row["ground_truth"]) for row in train + held_out]
    assert (len(train), len(held_out), len({label["question"] for label in labels})) == (3, 2, 5)
    for row, label in zip(train + held_out, labels, strict=True):
        assert row["messages"][0]["content"].endswith(label["question"]) and row["dataset"] == "solver"
        assert solver.solver_label(row["ground_truth"], "user: ?") == (label["question"], label["answer"])
    with pytest.raises(SystemExit, match="6"):
        run_data("competition_math", "--dataset", tmp_path / "in", "--rows", 7, "--out", tmp_path / "x")


def test_rlvr_mix(tmp_path):
    user = [{"role": "user", "content": "Write 3 words."}]
    old = {"func_name": "validate_word_constraint", "N": 3, "quantifier": "around"}
    mixed = [
        {"messages": user, "ground_truth": json.dumps(old), "dataset": "ifeval"},
        {"messages": user, "ground_truth": json.dumps(old | {"quantifier": "at least"}), "dataset": "ifeval"},
        {"messages": [*user, {"role": "assistant", "content": "no"}], "ground_truth": "3", "dataset": "MATH"},
        {"messages": user, "ground_truth": ["3", "[]"], "dataset": ["gsm8k", "code"]},
        {"messages": [], "ground_truth": "3", "dataset": "math"},
    ]
    write_rows(tmp_path / "a.jsonl", mixed)
    write_rows(tmp_path / "b.jsonl", [{"messages": user, "ground_truth": str(i), "dataset": "math"} for i in range(8)])
    pairs = ["--dataset_mixer_list", tmp_path / "a.jsonl", "1.0", tmp_path / "b.jsonl", 4]
    run_data("rlvr", *pairs, "--out", tmp_path / "out")
    train = read_rows(tmp_path / "out/train.jsonl")
    assert sorted(row["dataset"] for row in train) == sorted([*[["math"]] * 5, ["ifeval"], ["gsm8k", "code"]])
    assert all(row["messages"] == user for row in train)
    path = str(tmp_path / "out/train.jsonl")
    loaded = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert [loaded.features[name].feature.dtype for name in ("ground_truth", "dataset")] == ["string"] * 2
    assert [row["ground_truth"] for row in loaded] == [row["ground_truth"] for row in train]
    with pytest.raises(SystemExit, match="8"):
        run_data("rlvr", "--dataset_mixer_list", tmp_path / "b.jsonl", 9, "--out", tmp_path / "x")
