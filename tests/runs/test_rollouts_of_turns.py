"""Whole runs with turns: real engines, environments in worker processes, kills in the middle of an answer."""

import json
import os

import pytest
import torch

from tests import programs
from tests.runs import test_run
from tests.runs.test_fast import descendants, is_alive, start, wait_until
from tests.runs.test_run import TRANSFORMERS, VLLM, read, weights

TOY = """
import os, time
from pathlib import Path
from rewards import Answer

def hold(turns, turn):
    if turn == 2 and Path(os.environ.get("LATEST", "none")).exists():  # until it is killed
        Path(os.environ["HELD"]).touch()
        time.sleep(600)
    if "NOTES" in os.environ:
        notes = Path(os.environ["NOTES"])
        with notes.open("a") as file:
            file.write(f"{turn} ")
        before = notes.stat().st_size
        if turn == 2 and turns == 3:
            try:
                os.close(os.open(os.environ["HELD"], os.O_CREAT | os.O_EXCL))  # the first of them
            except FileExistsError:
                return
            while notes.read_text()[before:].count("3 ") < 4:
                time.sleep(0.05)

class Env:
    def __init__(self, config):
        self.config, self.sum = config, 0

    def step(self, episode):
        hold(self.config["turns"], episode.turn)
        if episode.turn > self.config["turns"]:
            return None
        self.sum += sum(map(ord, episode.text))
        return Answer(f"{self.sum % 97} <|im_end|> of {episode.turn}", self.sum % 7 / 7, metrics={"sum": self.sum % 97})
"""
LIVE = """
import subprocess, time
import toy

class Env(toy.Env):
    def __init__(self, config):
        super().__init__(config)
        self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def reset(self, row):
        return f"Round of {row.config['turns']}" if row.config["turns"] > 1 else None

    def step(self, episode):
        assert self.child.poll() is None
        time.sleep(sum(map(ord, episode.text)) % 5 / 50)
        return super().step(episode)

    def close(self):
        self.child.kill()
        self.child.wait()
"""
STEPS = """
from rewards import Answer

class Env:
    def __init__(self, config):
        self.turns, self.sum = config["turns"], 0

    def step(self, episode):
        self.sum += sum(map(ord, episode.text))
        if episode.turn > self.turns:
            return Answer(reward=self.sum % 7 / 7, done=True)
        return f"{self.sum % 97} <|im_end|> of {episode.turn}"
"""
AGENT = """
import openai

def agent(base_url, row):
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=None)
    messages, total = list(row.messages), 0
    for turn in range(1, row.config["turns"] + 2):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        total += sum(map(ord, said.content))
        messages += [said, {"role": "user", "content": f"{total % 97} <|im_end|> of {turn}"}]
    return total % 7 / 7
"""
FLAGS = "--num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 2 --response_length 120 --temperature 1.0"
FLAGS += " --max_prompt_token_length 60 --pack_length 400 --per_turn_max_tokens 10 --seed 3 --save_freq 1"
FLAGS += " --learning_rate 1e-3 --model_dtype float32 --dump_steps all"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Folder of an environment, toy.py, one that lives, and rows of which three in four ask for it."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.py").write_text(TOY)
    (folder / "live.py").write_text(LIVE)
    (folder / "steps.py").write_text(STEPS)
    (folder / "agent.py").write_text(AGENT)
    rows = []
    for i in range(40):
        row = {"messages": [{"role": "user", "content": f"Say {i}"}], "ground_truth": "7", "dataset": "string_matcher"}
        rows.append(row | ({"env_config": {"turns": i % 4}} if i % 4 else {}))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ENV = test_run.ENV | {"OMP_NUM_THREADS": str(os.cpu_count())}
SAME = ("position", "sample", "token_ids", "logprobs", "mask", "versions", "score", "advantage")


def assert_same(tmp_path, names, last):
    """Rollouts and last weights of two runs are equal, bit for bit."""
    first, second = ([{n: r[n] for n in SAME} for r in read(tmp_path / name / "rollouts.jsonl")] for name in names)
    assert first == second
    a, b = (weights(tmp_path / name / last) for name in names)
    assert all(torch.equal(a[name], b[name]) for name in a)
    return first


def line_of(script, model, toy, out, flags, name="toy"):
    line = [script, "--model_name_or_path", model, "--output_dir", out, "--env_file", toy / f"{name}.py"]
    return [*line, "--dataset_mixer_list", toy / "train.jsonl", "1.0", *FLAGS.split(), *flags.split()]


def run(script, model, toy, out, flags, name="toy", **env):
    return test_run.check(programs.run(line_of(script, model, toy, out, flags, name), **ENV | env))


def check(run_dir, late=False, name="toy"):
    """Dumped rollouts: turns that add up, and for each sampled token the logprob of the learner, in packs too; of
    older weights in the first step alone, where there were no others yet."""
    rows = read(run_dir / "rollouts.jsonl")
    assert sum(len(r["turns"]) > 2 for r in rows) > 8, "hardly any turns: the test shows nothing"
    for r in rows:
        sampled = [t["role"] == "assistant" for t in r["turns"] for _ in range(t["tokens"])] or [True] * len(r["mask"])
        assert r["mask"] == sampled and len(r["token_ids"]) == len(r["logprobs"]) == len(sampled) <= 120
        assert {v for v, m in zip(r["versions"], sampled, strict=True) if not m} <= {-1}
        assert min(v for v, m in zip(r["versions"], sampled, strict=True) if m) >= 0
    compared = 0
    for r in rows:
        if r["training_step"] == 1 and r.get("new_logprobs"):
            gaps = [abs(a - b) for a, b, m in zip(r["new_logprobs"], r["logprobs"], r["mask"], strict=True) if m]
            assert max(gaps) < 1e-4
            compared += len(gaps)
    assert compared > 50
    for row in read(run_dir / "metrics.jsonl"):
        assert row[f"env/{name}/crash_rate"] == row[f"env/{name}/timeout_rate"] == 0 and row["val/turns_max"] > 2
        assert late or row["debug/vllm_vs_local_logprob_diff_max"] < 1e-4
    return rows


RARE = pytest.param(VLLM, "toy", marks=pytest.mark.house)


@pytest.mark.parametrize("engine, name", [RARE, (TRANSFORMERS, "toy"), (VLLM, "live")])
def test_asynchrony_0_is_grpo_py_bit_for_bit(engine, name, tiny_models, toy, tmp_path):
    """And the learner's logprobs are the engine's, packs of several turns included."""
    for script in ("grpo.py", "grpo_fast.py"):
        flags = f"--exp_name {script[:-3]} --total_episodes 16 --deterministic --async_steps 0 {engine}"
        run(script, tiny_models(), toy, tmp_path, flags, name)
        check(tmp_path / script[:-3], name=name)
    assert_same(tmp_path, ("grpo", "grpo_fast"), "step_2")


@pytest.mark.parametrize("engine", [pytest.param(VLLM, marks=pytest.mark.house), TRANSFORMERS])
def test_an_agent_with_an_openai_client_is_an_environment_bit_for_bit(engine, tiny_models, toy, tmp_path):
    for name in ("steps", "agent"):
        flags = f"--exp_name {name} --total_episodes 16 --deterministic {engine}"
        run("grpo.py", tiny_models(), toy, tmp_path, flags, name)
        check(tmp_path / name, name=name)
    assert_same(tmp_path, ("steps", "agent"), "step_2")


@pytest.mark.house
@pytest.mark.parametrize("name", ["toy", "live"])
def test_a_kill_in_the_middle_of_an_answer_changes_no_bit(name, tiny_models, toy, tmp_path):
    """One update old, checkpoints every step; the run is killed with -9 while an environment is at work."""
    flags = f"--total_episodes 32 --deterministic --async_steps 1 --checkpoint_state_freq 1 --env_timeout 600 {VLLM}"
    run("grpo_fast.py", tiny_models(), toy, tmp_path, f"--exp_name whole {flags}", name)
    latest, held, log = tmp_path / "killed" / "checkpoints" / "latest", tmp_path / "held", tmp_path / "log"
    line = line_of("grpo_fast.py", tiny_models(), toy, tmp_path, f"--exp_name killed {flags}", name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATEST", str(latest))
        patch.setenv("HELD", str(held))
        process = start(log, *map(str, line))
    wait_until(held.exists, process, log)
    left = descendants(process.pid)
    process.kill()
    process.wait(timeout=600)
    programs.wait_until(lambda: not any(map(is_alive, left)))
    assert not (tmp_path / "killed" / "step_4").exists()
    test_run.check(programs.run([*line, "--resume"], **ENV))
    rows = assert_same(tmp_path, ("whole", "killed"), "step_4")
    assert len(rows) == 32 and {v for r in rows for v in r["versions"]} == {-1, 0, 1, 2}


def test_a_slow_answer_holds_up_no_engine(tiny_models, toy, tmp_path):
    """One answer comes only once other rollouts were decoded, answered, and decoded again meanwhile; else it would run
    into its limit. Nothing is lost."""
    flags = f"--exp_name x --total_episodes 32 --async_steps 2 --inflight_updates {VLLM}"
    held = tmp_path / "held"
    run("grpo_fast.py", tiny_models(), toy, tmp_path, flags, NOTES=str(tmp_path / "notes"), HELD=str(held))
    assert held.exists(), "no answer was slow: the test shows nothing"
    rows = check(tmp_path / "x", late=True)
    assert sorted((r["position"], r["sample"]) for r in rows) == [(p, s) for p in range(16) for s in range(2)]
    for r in rows:
        lags = [r["training_step"] - 1 - v for v, m in zip(r["versions"], r["mask"], strict=True) if m]
        assert 0 <= min(lags) and max(lags) <= 2
