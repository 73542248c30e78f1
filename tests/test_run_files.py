"""What a run leaves: whole models, the script that made it, and no secret."""

import gzip
import json
import math
import re
import stat
import sys

import pytest
import torch

import grpo
import utils
from scripts import replay
from scripts.parts import run_files
from scripts.tools import calls
from tests import programs


def test_the_last_model_goes_elsewhere_and_a_step_is_left_out(tmp_path, monkeypatch, capsys):
    """A full disk is a write that fails half way. Nothing of it stays, and the model that was there does."""
    run, other, full = tmp_path / "run", tmp_path / "other", tmp_path / "full"
    for path in (run / "step_1", other, full):
        path.mkdir(parents=True)
    (run / "step_1" / "old").touch()
    places = [run, full]
    monkeypatch.setattr(run_files, "PLACES", (full, other))

    def write_into(path):
        (path / "tokenizer_config.json").write_text("{}")
        if any(place in path.parents for place in places):
            raise OSError(28, "No space left on device")

    assert run_files.write_directory(run / "step_1", write_into) == run / "step_1"
    assert [path.name for path in run.rglob("*")] == ["step_1", "old"] and "The run goes on" in capsys.readouterr().out
    found = run_files.write_directory(run / "model", write_into)
    assert found.parent.parent == other and (found / "tokenizer_config.json").exists()
    out = capsys.readouterr().out
    assert re.search(r"model cannot be written \(\d+\.\d+ GB free in .*run\): .*No space left", out)
    assert f"the model is in {found}: move it to {run / 'model'}" in out
    assert not list(run.glob("*.tmp")) and not list(full.rglob("*.tmp"))
    places.append(tmp_path)
    with pytest.raises(utils.UserError, match="model cannot be written .*No space left"):
        run_files.write_directory(run / "model", write_into)


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
    run_files.keep_code(tmp_path / "run", {})
    assert (tmp_path / "run" / "code" / "my_grpo.py").read_text() == "x = 1\n"


def test_a_trace_has_what_its_step_did_and_nothing_else(tmp_path, world):
    args = grpo.Args(output_dir=str(tmp_path), exp_name="run", profile_step=2)
    args.run_dir.mkdir()
    for step in utils.profiled(range(1, 4), args, world):
        torch.ones(step).sum() if step == 2 else torch.ones(3).cos()
    (trace,) = args.run_dir.glob("profile/*")
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::sum" in names and "aten::cos" not in names


# --- Keys and passwords -----------------------------------------------------------------------------------------------

CONFIG = {
    "url": "http://me:pa55@host/search?api_key=s3cret&k",
    "headers": {"Authorization": "Bearer s3cret", "Accept": "text"},
    "env": [{"SEARCH_TOKEN": "s3cret"}],
    "api_key": "$NAME_OF_IT",
    "max_tokens": 3,
}
HEADERS = {"Authorization": "***", "Accept": "text"}
SHOWN = CONFIG | {"url": "http://***@host/search?***", "headers": HEADERS, "env": [{"SEARCH_TOKEN": "***"}]}


@pytest.mark.parametrize(
    "text, shown",
    [
        (f"--tool_configs={json.dumps(CONFIG)}", f"--tool_configs={json.dumps(SHOWN)}"),
        ("https://user:pa@55@host/v1", "https://***@host/v1"),
        ("http://a/v1?key=s3cret,http://me@b/v1", "http://a/v1?***,http://***@b/v1"),
        ("data/a@b.jsonl", "data/a@b.jsonl"),
        ('{"a": {"password": 1234, "max_tokens": 3}}', '{"a": {"password": "***", "max_tokens": 3}}'),
        ('{"run": ["x", "--api-key", "s3cret", "-n", "3"]}', '{"run": ["x", "--api-key", "***", "-n", "3"]}'),
        ('{"run": ["x", "--api-key=s3cret", "--top"]}', '{"run": ["x", "--api-key=***", "--top"]}'),
        ('{"env": {"HF_TOKEN": ["s3cret"]}}', '{"env": {"HF_TOKEN": ["***"]}}'),
        ('{"auth": {"pw": "s3cret"}}', '{"auth": {"pw": "***"}}'),
        ('{"header": "Authorization: Bearer s3cret"}', '{"header": "Authorization: ***"}'),
        ('{"run": "KEY=s3cret x"}', '{"run": "KEY=*** x"}'),
        ('[{"token": "s3cret"}]', '[{"token": "***"}]'),
        (["--max_prompt_token_length", "48"], ["--max_prompt_token_length", "48"]),
        ("{not JSON http://u:s3cret@h", "{not JSON http://***@h"),
        ('{"a":' * 100_000, '{"a":' * 100_000),
        ([None, ["Bearer $A_KEY"]], [None, ["Bearer $A_KEY"]]),
    ],
)
def test_what_files_show_of_a_value(text, shown):
    assert run_files.without_secrets(text) == shown


def claim(directory, config=CONFIG, **flags):
    args = dict.fromkeys(("resume", "resume_anyway", "overwrite"), False)
    args |= {"model_name_or_path": str(directory), "model_revision": None, "tool_configs": [json.dumps(config)]}
    words = [
        "python",
        "grpo.py",
        "--tool_configs",
        json.dumps(config),
        "--llm_judge_base_url=http://me:s3cret@judge/v1",
    ]
    run_files.claim(directory / "grpo", args | flags, {"data_hash": "0", "command": words}, 0.3)


def test_no_file_of_a_run_has_a_secret_and_it_goes_on_with_another_key(tmp_path):
    claim(tmp_path)
    for name in ("args.json", "environment.json"):
        path = tmp_path / "grpo" / name
        text = path.read_text()
        assert "s3cret" not in text and "pa55" not in text and "$NAME_OF_IT" in text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    claim(tmp_path, CONFIG | {"headers": {"Authorization": "another", "Accept": "text"}}, resume=True)
    with pytest.raises(ValueError, match="tool_configs"):
        claim(tmp_path, CONFIG | {"max_tokens": 4}, resume=True)


def test_a_key_comes_from_the_environment(tmp_path, monkeypatch):
    tool = tmp_path / "own.py"
    schema = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}
    body = 'return config["headers"]["Authorization"] + config["price"]'
    tool.write_text(f"SCHEMA = {schema}\ndef call(config):\n    {body}\n")
    settings = {"headers": {"Authorization": "Bearer $KEY_OF_TOOL"}, "price": ", 5 $"}
    config = {"tools": [str(tool)], "tool_configs": [settings], "tool_parser_type": "legacy"}
    monkeypatch.delenv("KEY_OF_TOOL", raising=False)
    with pytest.raises(ValueError, match=r"\$KEY_OF_TOOL in --tool_configs is not set: export KEY_OF_TOOL"):
        calls.check(config)
    monkeypatch.setenv("KEY_OF_TOOL", "s3cret")
    tools = calls.load_tools(config["tools"], None, config["tool_configs"])
    assert calls.run(calls.Call("own", {}), tools, math.inf) == ("Bearer s3cret, 5 $", False)


START = """
import pathlib, sys, time
from scripts.parts import run_files
from tests.test_run_files import claim
directory = pathlib.Path(sys.argv[1])
(directory / f"ready_{sys.argv[2]}").touch()
while len(list(directory.glob("ready_*"))) < 3:
    time.sleep(0.01)
claimed = run_files.provenance
run_files.provenance = lambda: time.sleep(0.5) or claimed()  # all have looked before the first one writes
claim(directory, overwrite=sys.argv[3] == "overwrite")
print("claimed", flush=True)
time.sleep(3)
"""


def test_of_starts_at_the_same_moment_one_has_the_directory(tmp_path):
    """A job array with one --exp_name: all looked, then all wrote."""
    runs = []
    for number in range(3):
        line = ["-c", START, str(tmp_path), str(number), "overwrite"]
        runs.append(programs.Program(line, tmp_path / f"out_{number}", address=programs.serve()))
    statuses = sorted(run.wait() for run in runs)
    outputs = [(tmp_path / f"out_{number}").read_text() for number in range(3)]
    assert statuses == [0, 1, 1], outputs
    assert sum("claimed\n" in text for text in outputs) == 1
    assert sum("is in use: " in text for text in outputs) == 2
