"""The last model of a run is not lost to a full disk."""

import re
import tempfile

import pytest

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
