"""What a run leaves: its last model, though a disk is full; and the copy of a script that made it."""

import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch

import grpo
import utils
from scripts import replay
from scripts.parts import run_files


def test_the_last_model_goes_elsewhere_and_a_step_is_left_out(tmp_path, monkeypatch, capsys):
    """A full disk is a write that fails half way. Nothing of it stays, and the model that was there does."""
    run, other, full = tmp_path / "run", tmp_path / "other", tmp_path / "full"
    for path in (run / "step_1", other, full):
        path.mkdir(parents=True)
    (run / "step_1" / "old").touch()
    places = [run, full]

    def write_into(path):
        (path / "tokenizer_config.json").write_text("{}")
        if any(place in path.parents for place in places):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(full))
    monkeypatch.setattr(run_files.Path, "cwd", lambda: other)
    assert run_files.write_directory(run / "step_1", write_into) == run / "step_1"
    assert [path.name for path in run.rglob("*")] == ["step_1", "old"] and "The run goes on" in capsys.readouterr().out

    found = run_files.write_directory(run / "model", write_into)
    assert found.parent.parent == other and (found / "tokenizer_config.json").exists()
    out = capsys.readouterr().out
    assert re.search(r"model cannot be written \(\d+\.\d+ GB free in .*run\): .*No space left", out)
    assert f"the model is in {found}: move it to {run / 'model'}" in out
    assert not list(run.glob("*.tmp")) and not list(full.rglob("*.tmp"))

    places.append(tmp_path)
    monkeypatch.setattr(run_files.Path, "home", lambda: other)
    monkeypatch.setattr(run_files, "SHARED_MEMORY", str(full))
    with pytest.raises(OSError, match="No space left"):
        run_files.write_directory(run / "model", write_into)
    places.clear()
    assert run_files.write_directory(run / "model", write_into) == run / "model"


@pytest.mark.parametrize("command, module", [
    (["python", "/x/copied_maths.py", "--beta", "0"], "copied_maths"),
    (["python", "copied_loop.py"], "copied_maths"),  # which imports it as grpo
    (["python", "gone.py"], None),
    (["python", "-m", "pytest"], "grpo"),
])  # fmt: skip
def test_a_run_is_replayed_by_the_copy_that_made_it(tmp_path, monkeypatch, command, module):
    (tmp_path / "copied_maths.py").write_text("update = None\n")
    (tmp_path / "copied_loop.py").write_text("import copied_maths as grpo\n")
    (tmp_path / "grpo.py").touch()
    monkeypatch.setattr(utils, "REPO", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"command": command}))
    if module is None:
        with pytest.raises(utils.UserError, match=r"gone\.py"):
            replay.maths_of(tmp_path)
    else:
        assert replay.maths_of(tmp_path).__name__ == module


def test_a_run_keeps_the_copy_that_made_it(tmp_path, monkeypatch):
    (tmp_path / "my_grpo.py").write_text("x = 1\n")
    monkeypatch.setattr(utils, "REPO", tmp_path)
    monkeypatch.setattr(sys, "argv", ["my_grpo.py", "--beta", "0"])
    run_files.keep_code(tmp_path / "run", {}, b"")
    assert (tmp_path / "run" / "code" / "my_grpo.py").read_text() == "x = 1\n"


def test_a_trace_has_what_its_step_did_and_nothing_else(tmp_path, world):
    args = grpo.Args(output_dir=str(tmp_path), exp_name="run", profile_step=2)
    args.run_dir.mkdir()
    for step in utils.profiled(range(1, 4), args, world):
        torch.ones(step).sum() if step == 2 else torch.ones(3).cos()
    (trace,) = args.run_dir.glob("profile/*")
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::sum" in names and "aten::cos" not in names


def test_a_run_is_dirty_where_its_diff_has_something(tmp_path, monkeypatch):
    """A file that git does not know, such as rows of one's own, is in no diff."""
    command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    (tmp_path / "known.py").write_text("x = 1\n")
    for more in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*command, *more], check=True)
    monkeypatch.setattr(utils, "REPO", tmp_path)
    (tmp_path / "rows.jsonl").touch()
    assert run_files.provenance()["git_dirty"] is False
    (tmp_path / "known.py").write_text("x = 2\n")
    assert run_files.provenance()["git_dirty"] is True
    shutil.rmtree(tmp_path / ".git")
    assert run_files.provenance()["git_dirty"] is False
