"""The scripts around the training: data; the directory of a run."""

import hashlib
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import grpo
import utils
from scripts.data.make_addition import make_addition
from scripts.data.make_largest import make_largest
from scripts.data.make_products import make_products
from scripts.parts import run_files
from tests import programs

REPO = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("make", "train", "held_out", "label"),
    [
        (make_addition, 80, 20, sum),
        (lambda out, seed: make_addition(out, seed, digits=2), 2000, 100, sum),
        (make_largest, 400, 64, max),
        (make_products, 2000, 64, math.prod),
    ],
    ids=["addition", "addition of two digits", "largest", "products"],
)
def test_rows_have_the_right_labels_and_splits_share_no_numbers(tmp_path, make, train, held_out, label):
    """Nor the same numbers in another order. The seed alone decides."""
    out = make(tmp_path / "a", 1)
    asked = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]
        numbers = [tuple(map(int, re.findall(r"\d+", row["messages"][-1]["content"]))) for row in rows]
        assert [row["ground_truth"] for row in rows] == [str(label(n)) for n in numbers]
        assert {row["dataset"] for row in rows} == {"gsm8k"}
        assert len(set(numbers)) == len(rows) == (train if split == "train" else held_out)
        asked[split] = {frozenset(n) for n in numbers}
    assert not asked["train"] & asked["eval"]
    again, other = (make(tmp_path / str(seed), seed) / "eval.jsonl" for seed in (1, 2))
    assert again.read_bytes() == (out / "eval.jsonl").read_bytes() != other.read_bytes()


RUN_AS_FILES = """
import os, runpy, sys
for path in sys.argv[2:]:
    sys.path[0] = os.path.dirname(path)  # as Python does for a file that it is given
    runpy.run_path(path, run_name="program")
    assert sys.path[0] == sys.argv[1], f"{path} would look for the four files in {sys.path[0]}"
    for name in [n for n in sys.modules if n.partition(".")[0] in ("scripts", "grpo", "utils", "rewards")]:
        del sys.modules[name]
"""


@pytest.mark.house
def test_programs_run_from_any_directory(tmp_path):
    """All that import ours at their top or later, but for those that stand alone or have their own environment."""
    outside = re.compile(r"^ *(import (grpo|utils|rewards)$|from (scripts|grpo|utils|rewards)[ .])", re.MULTILINE)
    own = {"smoke.py", "sandbox.py", "python.py", "trl_side.py", "addresses.py"}
    texts = {path: path.read_text() for path in REPO.glob("scripts/**/*.py") if path.name not in own}
    paths = [str(path) for path, text in sorted(texts.items()) if outside.search(text) and "__main__" in text]
    assert len(paths) > 8
    line = [sys.executable, "-c", RUN_AS_FILES, REPO, *paths]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# ---------------------------------------------------------------------------------------------------------------------
# The directory of a run
# ---------------------------------------------------------------------------------------------------------------------


def claim(directory: Path, **flags: object) -> None:
    args = dict.fromkeys(("resume", "resume_anyway", "overwrite"), False) | flags
    args |= {"model_name_or_path": str(directory), "model_revision": None}
    run_files.claim(directory / "grpo", args, {"data_hash": "0"}, 0.3)


def test_torchrun_replaces_no_run_but_its_own(tmp_path, monkeypatch):
    """A start that is refused is repeated by --max-restarts: not in the place of the run that refused it."""
    args = grpo.Args(output_dir=str(tmp_path))
    claim(tmp_path)  # by hand
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("MASTER_PORT", str(stores[0].port))
    assert utils.after_restart(args) == args
    with pytest.raises(ValueError, match="holds this run already: add --overwrite"):
        claim(tmp_path)
    claim(tmp_path, overwrite=True)
    assert utils.after_restart(replace(args, overwrite=True)) == replace(args, resume=True)
    monkeypatch.setenv("MASTER_PORT", str(stores[1].port))
    assert utils.after_restart(args) == args
    claim(tmp_path, resume=True)
    assert utils.after_restart(args) == replace(args, resume=True)


def test_one_command_line_begins_a_run_and_goes_on(tmp_path, capsys):
    """Without a checkpoint what an earlier start has left goes, but not a model, and not a run of other flags."""
    run_dir = tmp_path / "grpo"
    for left in (False, True):  # nothing; what a kill before the first checkpoint leaves
        claim(tmp_path, resume=True)
        assert str(run_dir) in capsys.readouterr().out
        assert not (run_dir / "metrics.jsonl").exists(), left
        (run_dir / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="--seed"):
        claim(tmp_path, resume=True, seed=2)
    (run_dir / "model").mkdir()
    with pytest.raises(ValueError, match="--overwrite"):
        claim(tmp_path, resume=True)
    (run_dir / "checkpoints" / "step_1").mkdir(parents=True)
    claim(tmp_path, resume=True)
    assert (run_dir / "metrics.jsonl").exists() and not capsys.readouterr().out


def test_a_run_keeps_what_it_ran_and_a_resume_says_what_changed(tmp_path, monkeypatch):
    """Before, a resumed run went on with another reward without a word."""
    reward, diff, code = tmp_path / "mine.py", [b"a change"], tmp_path / "grpo" / "code"
    monkeypatch.setattr(run_files, "uncommitted", lambda: diff[0])
    reward.write_text("def mine(response, ground_truth): return 1  # key")
    reward.chmod(0o600)
    own = {"reward_file": str(reward), "env_file": "", "tools": ["calculator"]}
    claim(tmp_path, **own)
    (tmp_path / "grpo" / "checkpoints" / "step_1").mkdir(parents=True)
    assert {str(p.relative_to(code)) for p in code.rglob("*.*")} == {"changes.diff", "reward_file/mine.py"}
    assert (code / "reward_file" / "mine.py").read_bytes() == reward.read_bytes()
    assert (code / "reward_file" / "mine.py").stat().st_mode & 0o777 == 0o600
    claim(tmp_path, resume=True, **own)

    diff[0] = b"another change"
    claim(tmp_path, resume=True, **own)
    assert (code / "changes.diff").read_bytes() == b"another change"

    reward.write_text("def mine(response, ground_truth): return 0")
    with pytest.raises(ValueError, match=r"holds a run that differs \(reward_file/mine.py: "):
        claim(tmp_path, resume=True, **own)
    claim(tmp_path, resume=True, resume_anyway=True, **own)
    claim(tmp_path, resume=True, **own)  # it is this run's now
    kept = json.loads((tmp_path / "grpo" / "environment.json").read_text())["code"]
    assert kept["reward_file/mine.py"] == hashlib.sha256(reward.read_bytes()).hexdigest()


def test_a_full_disk_at_a_resume_costs_no_run(tmp_path, monkeypatch):
    claim(tmp_path)
    (tmp_path / "grpo" / "checkpoints" / "step_1").mkdir(parents=True)
    before = {path.name: path.read_text() for path in (tmp_path / "grpo").glob("*.json")}
    write = Path.write_bytes

    def half(path, content):
        write(path, content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path, resume=True)
    assert {name: (tmp_path / "grpo" / name).read_text() for name in before} == before


# Programs that do their work without arguments
BARE = """data/competition_math data/get_smollm2 data/gsm8k data/make_addition data/make_largest
    data/make_products data/make_tasks doctor families parts/sandbox reports/metrics""".split()


def files_that_run():
    """The Python files of scripts/ that run by themselves, and the two of training."""
    files = [REPO / "grpo.py", REPO / "grpo_fast.py", *sorted((REPO / "scripts").rglob("*.py"))]
    return [path for path in files if '\nif __name__ == "__main__"' in path.read_text()]


@pytest.mark.house
@pytest.mark.parametrize("program", files_that_run(), ids=lambda path: path.stem)
def test_every_program_says_what_it_is(program):
    """With --help, and without arguments if it needs some. No traceback."""
    path = str(program.relative_to(REPO))
    takes_none = path.removeprefix("scripts/").removesuffix(".py") in BARE
    for arguments in [["--help"]] if takes_none else [["--help"], []]:
        done = programs.run([path, *arguments], 120)
        said = done.stdout + done.stderr
        assert "Traceback" not in said, said
        assert len(said.split()) > 5
        assert done.returncode or arguments, "it needs none: see BARE"
