"""Large data sets: the Arrow file that ranks and starts share has the prompts of the rows, whole or not at all."""

import errno
import gzip
import json
import os
import signal
from pathlib import Path

import pytest

import grpo
import rewards
import utils
from scripts.parts import checks, plan, prepared, rows
from tests import test_data

FLAG = "dataset_mixer_list"
SAY = [{"role": "user", "content": "Say"}]
LABELS = ["1", "01", "2020-01-01", ["a", 1], ["1", ["2"]], 7, -0.0, 1e300, True, {"a": None, "b": [1, {}]}, "é\u2028"]


@pytest.fixture(scope="module")
def args(tiny_models):
    return grpo.Args(model_name_or_path=str(tiny_models()), max_prompt_token_length=60)


@pytest.fixture(scope="module")
def tokenizer(args):
    return utils.load_tokenizer(args)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The cache's directory; every data set is large, and is read in this process."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(directory))
    monkeypatch.setattr(checks, "LARGE", 0)
    monkeypatch.setattr(prepared, "CHUNK", 4)
    monkeypatch.setattr(utils, "read_rows", test_data.read_here)
    return directory / "grpo_prompts"


def load(args, tokenizer, *mixer, **changes):
    return utils.load_prompts(FLAG, utils.replace(args, **{FLAG: [str(word) for word in mixer]}, **changes), tokenizer)


def rows_of(number):
    return [{"prompt": f"Say {i}", "ground_truth": str(i), "dataset": "string_matcher"} for i in range(number)]


@pytest.fixture
def data(tmp_path):
    return test_data.write_jsonl(tmp_path / "a.jsonl", rows_of(11))


def test_prompts_labels_and_hash_are_those_of_a_list(args, tokenizer, tmp_path, monkeypatch, capsys):
    """Labels of all types in one column, keys that other rows lack, a row that is bad, one that is too long."""
    monkeypatch.setattr(rewards, "check_ground_truth", lambda *_: None)
    lines = [{"prompt": SAY, "ground_truth": label, "dataset": "gsm8k"} for label in LABELS * 10]
    lines[3] |= {"ground_truth": [1, "1", None], "dataset": ["gsm8k", "math", "gsm8k"]}
    lines[5] |= {"prompt": "long " * 60}
    lines[7] = {"prompt": SAY}
    path = test_data.write_jsonl(tmp_path / "a.jsonl", lines)

    def both(*mixer, **changes):
        with monkeypatch.context() as patch:
            patch.setattr(checks, "LARGE", 2**40)
            small = load(args, tokenizer, *mixer, **changes)
        told = capsys.readouterr().out
        for _ in range(2):
            large = load(args, tokenizer, *mixer, **changes)
            assert isinstance(large, prepared.Prompts) and capsys.readouterr().out == told
            assert repr(list(large)) == repr(small) and large[-1] == small[-1] and large[1::3] == small[1::3]
            assert utils.data_hash(large, small) == utils.data_hash(small, small)
        return small, told

    small, told = both(path, "1.0")
    assert len(small) == len(lines) - 2 and "1 of 109 prompts longer" in told and "a.jsonl row 8" in told
    assert [prompt.ground_truths[0] for prompt in small[:3]] == LABELS[:3]
    both(path, "0.3", path, "40", seed=5)


def test_columns_of_reward_functions_stay(args, tokenizer):
    row = utils.Row("", SAY, [None], ["passthrough"], reward_columns={"a": 1, "b": {"c": [None, "1"]}})
    prompt = utils.make_prompt(row, 0, tokenizer, None, None, str)
    batch = prepared.batch_of([prompt])
    assert json.loads(batch["rest"][0].as_py())["reward_columns"] == row.reward_columns


def test_a_later_start_reads_no_row(args, tokenizer, data, monkeypatch):
    first = list(load(args, tokenizer, data, "1.0"))
    monkeypatch.setattr(utils, "mixed_rows", None)
    assert list(load(args, tokenizer, data, "1.0", shuffle=False, learning_rate=1.0)) == first


def test_what_prompts_depend_on_names_the_file(args, tokenizer, data, tmp_path):
    (tmp_path / "system.txt").write_text("Be kind.")
    made = {utils.data_hash(load(args, tokenizer, data, "5"))}
    system = str(tmp_path / "system.txt")
    for change in ({"seed": 2}, {"max_prompt_token_length": 25}, {"system_prompt_override_file": system}):
        made.add(prepared.key_of(FLAG, utils.replace(args, **{FLAG: [data, "5"]}, **change), tokenizer, None))
    before = Path(data).stat()
    Path(data).write_text(Path(data).read_text().replace("Say 3", "Say 8"))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Path(data).stat().st_size == before.st_size
    made.add(prepared.key_of(FLAG, utils.replace(args, **{FLAG: [data, "5"]}), tokenizer, None))
    texts = [prompt.text for prompt in load(args, tokenizer, data, "1.0")]
    assert texts.count(texts[3]) == 2
    (tmp_path / "system.txt").write_text("Be rude.")
    changed = utils.replace(args, **{FLAG: [data, "5"]}, system_prompt_override_file=system)
    made.add(prepared.key_of(FLAG, changed, tokenizer, None))
    other = utils.load_tokenizer(utils.replace(args, chat_template_name="simple_chat"))
    made.add(prepared.key_of(FLAG, utils.replace(args, **{FLAG: [data, "5"]}), other, None))
    assert len(made) == 7


def test_a_run_that_is_killed_leaves_nothing_that_counts(args, tokenizer, data, cache):
    child = os.fork()
    if not child:
        prepared.made = lambda rows, make, longest: [kill() for row in rows]
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        load(args, tokenizer, data, "1.0")
    assert os.waitpid(child, 0)[1] == signal.SIGKILL and list(cache.glob("*.tmp"))
    assert len(load(args, tokenizer, data, "1.0")) == 11 and not list(cache.glob("*.tmp"))


def test_of_runs_that_start_together_one_makes_the_file(args, tokenizer, data, tmp_path, monkeypatch):
    written = tmp_path / "written"
    write = prepared.write

    def slow(*words):
        with written.open("a") as file:
            file.write("x")
        write(*words)

    monkeypatch.setattr(prepared, "write", slow)
    children = []
    for _ in range(3):
        children.append(os.fork())
        if not children[-1]:
            os._exit(0 if len(load(args, tokenizer, data, "1.0")) == 11 else 1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3 and written.read_text() == "x"


def test_a_full_disk_is_told_and_leaves_nothing(args, tokenizer, data, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepared, "made", full)
    with pytest.raises(utils.UserError, match="HF_DATASETS_CACHE"):
        load(args, tokenizer, data, "1.0")
    assert {path.suffix for path in cache.iterdir()} <= {".lock"}


def test_without_a_cache_that_can_be_written_prompts_are_in_memory(args, tokenizer, data, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", f"{data}/no_directory")
    assert len(load(args, tokenizer, data, "1.0")) == 11


# --- What is read -----------------------------------------------------------------------------------------------------


def labels(name, split="train"):
    return [row["ground_truth"] for _, row in rows.read_rows(str(name), split)]


def test_a_folder_is_read_as_datasets_reads_it(tmp_path):
    """Labels stay as they stand in its files."""
    for name, found in (("a", ["1", 2]), ("b", [[3], None])):
        test_data.write_jsonl(tmp_path / f"{name}.jsonl", [{"ground_truth": label} for label in found])
    (tmp_path / "a.jsonl.sha256").write_text("0")
    assert labels(tmp_path) == ["1", 2, [3], None]
    with pytest.raises(ValueError, match="'test'.*train"):
        labels(tmp_path, "test")


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv"])
def test_gzip(tmp_path, ending):
    text = "ground_truth\n007\n" if ending == ".csv" else '{"ground_truth": "007"}\n'
    if ending == ".json":
        text = f"[{text}]"
    path = tmp_path / f"train{ending}.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert labels(path) == labels(tmp_path) == ["007"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="gz"):
        labels(path)


def test_parts_of_text_are_text():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 8?", "image": None}]
    row = {"prompt": [{"role": "user", "content": parts}], "ground_truth": "11", "dataset": "gsm8k"}
    assert rows.parse_row(row)[0] == [test_data.USER]
    parts[1]["type"] = "image"
    with pytest.raises(ValueError, match="text content"):
        rows.parse_row(row)


REFUSED = {
    "null content": {"messages": [{"role": "user", "content": None}], "ground_truth": "1", "dataset": "gsm8k"},
    "no prompt": {"ground_truth": "1", "dataset": "gsm8k"},
    "a label without a number": {"prompt": "?", "ground_truth": "a few", "dataset": "gsm8k"},
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_a_dry_run_reads_rows_as_a_run_does(args, tokenizer, tmp_path, row):
    path = test_data.write_jsonl(tmp_path / "a.jsonl", [row])
    changed = utils.replace(args, **{FLAG: [path, "1.0"]})
    with pytest.raises(utils.UserError) as raised:
        load(args, tokenizer, path, "1.0")
    assert f"refused  {raised.value}" in plan.sources_text(changed, fast=False).splitlines()
    test_data.write_jsonl(tmp_path / "a.jsonl", rows_of(2))
    assert "refused" not in plan.sources_text(changed, fast=False)
