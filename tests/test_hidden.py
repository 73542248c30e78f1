"""Secrets of a command line are in no file of the run, and of two starts at once one gets the directory."""

import json
import math
import stat

import pytest

from scripts.parts import hidden, run_files
from scripts.tools import calls
from tests import programs

TOOL = """
SCHEMA = {"type": "function", "function": {"name": "own", "parameters": {"type": "object", "properties": {}}}}
def call(config):
    return config["api_key"]
"""
CONFIG = {
    "url": "http://me:pa55@host/search?api_key=s3cret&k",
    "api_key": "s3cret",
    "headers": {"Authorization": "Bearer s3cret", "Accept": "text"},
    "env": {"SEARCH_TOKEN": "s3cret"},
    "command": ["serve", "--api-key", "s3cret", "--token=s3cret", "--top", "3", "x"],
    "api_token": "$NAME_OF_IT",
    "timeout": 3,
}


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://user:pa@55@host/v1", "https://***@host/v1"),
        ("http://a/v1?key=s3cret,http://me@b/v1", "http://a/v1?***,http://***@b/v1"),
        ("http://a/v1?s3cret", "http://a/v1?***"),
        ("data/a@b.jsonl", "data/a@b.jsonl"),
        ("{not JSON http://u:s3cret@h", "{not JSON http://***@h"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_what_is_shown_of_a_value(text, shown):
    assert hidden.in_text(text) == shown


@pytest.mark.parametrize(
    "config, shown",
    [
        ({"command": ["docker", "run", "-e", "API_KEY=s3cret"]}, {"command": ["docker", "run", "-e", "API_KEY=***"]}),
        ({"command": ["curl", "-H", "X-Api-Key: s3cret"]}, {"command": ["curl", "-H", "X-Api-Key: ***"]}),
        ({"command": ["sh", "-c", "serve 'Authorization: Bearer s3cret' --top 3"]},
            {"command": ["sh", "-c", "serve 'Authorization: ***' --top 3"]}),
        ({"settings": '{"password": "s3cret", "top": 3}'}, {"settings": '{"password": "***", "top": 3}'}),
        ({"headers": {"Authorization": "Bearer $NAME"}}, {"headers": {"Authorization": "Bearer $NAME"}}),
        ({"corpus": "data/keys.jsonl", "note": "a = b"}, {"corpus": "data/keys.jsonl", "note": "a = b"}),
    ],
)  # fmt: skip
def test_ways_to_write_a_key(config, shown):
    assert hidden.in_settings(config) == shown


def test_a_key_behind_a_word_comes_from_the_environment(monkeypatch):
    """It was sent as the text `Bearer $NAME`."""
    monkeypatch.setenv("KEY_OF_TOOL", "s3cret")
    config = {"headers": {"Authorization": "Bearer $KEY_OF_TOOL"}, "price": "5 $", "shell": "echo $KEY_OF_TOOL twice"}
    assert hidden.from_environment(config) == config | {"headers": {"Authorization": "Bearer s3cret"}}


def start(directory, **flags):
    args = dict.fromkeys(("resume", "resume_anyway", "overwrite"), False)
    args |= {"model_name_or_path": str(directory), "model_revision": None, "tool_configs": []} | flags
    config = json.dumps(CONFIG)
    url = "http://me:s3cret@judge/v1"
    args |= {"llm_judge_base_url": url}
    words = ["python", "grpo.py", "--tool_configs", config, f"--llm_judge_base_url={url}"]
    run_files.claim(directory / "grpo", args, {"data_hash": "0", "command": words}, 0.3)


def test_no_file_of_a_run_has_a_secret(tmp_path):
    start(tmp_path, tool_configs=[json.dumps(CONFIG)])
    files = [path for path in (tmp_path / "grpo").iterdir() if path.is_file()]
    assert len(files) == 2
    for path in files:
        text = path.read_text()
        assert "s3cret" not in text and "pa55" not in text and "$NAME_OF_IT" in text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_run_goes_on_with_another_key(tmp_path):
    start(tmp_path, tool_configs=[json.dumps(CONFIG)])
    start(tmp_path, tool_configs=[json.dumps(CONFIG | {"api_key": "another"})], resume=True)
    with pytest.raises(ValueError, match="tool_configs"):
        start(tmp_path, tool_configs=[json.dumps(CONFIG | {"timeout": 4})], resume=True)


def test_a_key_comes_from_the_environment(tmp_path, monkeypatch):
    tool = tmp_path / "own.py"
    tool.write_text(TOOL)
    config = {"tools": [str(tool)], "tool_configs": [{"api_key": "$KEY_OF_TOOL"}], "tool_parser_type": "legacy"}
    monkeypatch.delenv("KEY_OF_TOOL", raising=False)
    with pytest.raises(ValueError, match=r"\$KEY_OF_TOOL in --tool_configs is not set: export KEY_OF_TOOL"):
        calls.check(config)
    monkeypatch.setenv("KEY_OF_TOOL", "s3cret")
    tools = calls.load_tools(config["tools"], None, config["tool_configs"])
    assert calls.run(calls.Call("own", {}), tools, math.inf) == ("s3cret", False)


START = """
import pathlib, sys, time
from scripts.parts import run_files
from tests.test_hidden import start
directory = pathlib.Path(sys.argv[1])
(directory / f"ready_{sys.argv[2]}").touch()
while len(list(directory.glob("ready_*"))) < 3:
    time.sleep(0.01)
claimed = run_files.provenance
run_files.provenance = lambda: time.sleep(0.5) or claimed()  # all have looked before the first one writes
start(directory, overwrite=sys.argv[3] == "overwrite")
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
