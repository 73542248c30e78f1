"""From nothing to a rising curve: thirty lines of a user's own are rows, a reward, an environment and a tool."""

import subprocess
import sys

import pytest

from tests import programs
from tests.conftest import REPO
from tests.runs.test_run import check, read

ROWS = """
{"messages": [{"role": "user", "content": "Say something small."}], "env_config": {"most": 1}}
{"messages": [{"role": "user", "content": "Whisper a word."}], "env_config": {"most": 1}}
""".lstrip()

MINE = """
from rewards import Answer

SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts the small letters of a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


def call(config, text):
    return f"{sum(map(str.islower, text))} of {len(text)} small"


class Env:
    def __init__(self, config):
        self.most = config["most"]

    def step(self, episode):
        if episode.turn > self.most:
            return None
        return Answer(call({}, episode.text), metrics={"letters": len(episode.text)})


def small(response, ground_truth):
    return sum(map(str.islower, response)) / max(len(response), 1)
""".lstrip()

FLAGS = """--exp_name own --dataset_mixer_list rows.jsonl 1.0 --reward_file mine.py --env_file mine.py
    --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 16 --response_length 40 --per_turn_max_tokens 8
    --rollout_backend transformers --model_dtype float32 --temperature 1.0 --beta 0 --learning_rate 1e-3
    --lr_scheduler_type constant --total_episodes 320 --save_freq -1 --save_traces"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with nothing but the user's thirty lines."""
    assert (ROWS + MINE.replace("\n\n", "\n").replace("\n\n", "\n")).count("\n") <= 30
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_curve_rises(tiny_models, folder):
    flags = FLAGS.replace("rows.jsonl", f"{folder}/rows.jsonl").replace("mine.py", f"{folder}/mine.py")
    line = ["grpo.py", "--model_name_or_path", tiny_models(), "--output_dir", folder / "runs", *flags.split()]
    check(programs.run(line, OMP_NUM_THREADS="1"))
    steps = read(folder / "runs" / "own" / "metrics.jsonl")
    scores = [row["objective/scores"] for row in steps]
    assert len(scores) == 10 and sum(scores[-3:]) > sum(scores[:3]) + 2
    assert 0 < steps[-1]["env/mine/letters"]
    for rollout in read(folder / "runs" / "own" / "rollouts.jsonl"):
        first, answer, last = (turn["content"] for turn in rollout["turns"])
        assert f"{sum(map(str.islower, first))} of " in answer and rollout["text"].endswith(last)


def test_the_tool_answers_a_call(folder):
    command = [sys.executable, REPO / "scripts" / "tools" / "calls.py", "legacy", "mine.py", "<count>Hello</count>"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "4 of 5 small" in done.stdout, done.stdout + done.stderr
