"""What ends a run saves first, has the last line, and lets --resume go on: scripts/proof/guards.md."""

import json
import re
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from tests import programs
from tests.runs.test_run import data  # noqa: F401 (a fixture)

STALE = """
    import os, utils
    from scripts.parts.transformers_engine import TransformersEngine as Engine
    load, rank = Engine.load_weights, os.environ.get("RANK", "0")

    def load_weights(self, named_tensors, version):
        if version < 2 or rank != "LAST":
            return load(self, named_tensors, version)
        for _ in named_tensors:
            pass
        self.version = version

    Engine.load_weights = load_weights
"""
NOISE = """
    import torch, utils
    from scripts.parts.transformers_engine import TransformersEngine as Engine
    load, noise = Engine.load_weights, torch.Generator().manual_seed(0)

    def noisy(named_tensors):
        for number, (name, tensor) in enumerate(named_tensors):
            yield name, tensor + 0.1 * torch.randn(tensor.shape, generator=noise) if number == 1 else tensor

    def load_weights(self, named_tensors, version):
        load(self, noisy(named_tensors) if version == VERSION else named_tensors, version)

    Engine.load_weights = load_weights
"""
KILLED = """
    import os, utils
    from scripts.parts.transformers_engine import TransformersEngine as Engine
    step = Engine.step

    def die(self):
        if self.version == 2 and min(r.max_tokens for r in self.waiting.values()) > 1:
            os.kill(os.getpid(), 9)
        return step(self)

    Engine.step = die
"""
ERROR = """
    import utils
    add = utils.Rollout.append

    def append(self, generation):
        if generation.versions[0] == 2:
            raise ZeroDivisionError("a fork's own")
        add(self, generation)

    utils.Rollout.append = append
"""
NAN = """
    import math, utils
    add = utils.Rollout.append

    def append(self, generation):
        if len(generation.versions) and generation.versions[0] in VERSIONS and not self.evaluation:
            generation.logprobs[0] = math.nan
        add(self, generation)

    utils.Rollout.append = append
"""


@pytest.fixture
def run(tiny_models, data, tmp_path):  # noqa: F811
    def start(script, name, *flags, fault=""):
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(fault))
        line = f"""{script} --model_name_or_path {tiny_models()} --dataset_mixer_list {data / "train.jsonl"} 1.0
            --rollout_backend transformers --model_dtype float32 --num_unique_prompts_rollout 2 --response_length 8
            --num_samples_per_prompt_rollout 4 --total_episodes 40 --learning_rate 1e-3 --lr_scheduler_type constant
            --output_dir {tmp_path} --exp_name {name} --temperature 1.0 --reward_file {tmp_path / "mine.py"}
            --remap_verifier gsm8k=mine"""
        (tmp_path / "mine.py").write_text("def mine(response, ground_truth): return float(len(set(response)))\n")
        return programs.run([*line.split(), *map(str, flags)], OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))

    return start


def last_line(done):
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stderr.strip().splitlines()[-1]


def steps(run_dir):
    return [json.loads(line)["training_step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("script, rank, engine", [
    ("grpo.py", "0", 0),
    ("grpo_fast.py --vllm_num_engines 2 --async_steps 1", "2", 1),
])  # fmt: skip
def test_one_stale_engine_ends_the_run_after_its_update(run, script, rank, engine):
    told = last_line(run(script, "x", fault=STALE.replace("LAST", rank)))
    assert f"engine {engine} has not got the weights of step 2" in told and "--resume goes on after step_" in told


@pytest.mark.parametrize("ahead, version", [(0, "2"), (1, "1")])
def test_noise_in_a_broadcast_ends_the_run_by_its_gap(run, ahead, version):
    """With rollouts of older weights the gap is that of fresh ones, after the first step."""
    told = last_line(run(f"grpo_fast.py --async_steps {ahead}", "x", fault=NOISE.replace("VERSION", version)))
    assert "logprob" in told and "--resume goes on after step_" in told, told


def test_a_killed_engine_is_named_and_its_learner_saves(run, tmp_path):
    told = last_line(run("grpo_fast.py --async_steps 0", "x", fault=KILLED))
    assert re.search(r"engine 0 died with signal SIGKILL: .*--resume goes on after step_2", told), told
    done = run("grpo_fast.py --async_steps 0", "x", "--resume")
    assert done.returncode == 0 and steps(tmp_path / "x") == [1, 2, 3, 4, 5], done.stderr[-2000:]


@pytest.mark.house
def test_an_error_in_between_leaves_a_checkpoint_with_the_same_bits(run, tmp_path):
    done = run("grpo.py", "x", fault=ERROR)
    assert "a fork's own" in last_line(done) and (tmp_path / "x" / "checkpoints" / "step_2").exists()
    assert run("grpo.py", "x", "--resume").returncode == 0
    assert run("grpo.py", "y").returncode == 0
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "xy")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("versions, status", [((1, 2), 0), ((1, 2, 3), 1)])
def test_logprobs_that_are_no_numbers_are_forgiven_twice(run, tmp_path, versions, status):
    done = run("grpo.py", "x", fault=NAN.replace("VERSIONS", str(versions)))
    assert done.returncode == status, done.stderr[-2000:]
    if status:
        assert "non-finite gradients in 3 steps in a row" in last_line(done)
        assert (tmp_path / "x" / "checkpoints" / "step_4").exists()


REWARD = """def mine(response, ground_truth):
    return len(response) + ground_truth["missing"]
"""


def test_a_reward_that_never_works_is_told_at_each_step_and_ends_the_run(run, tmp_path):
    (tmp_path / "bad.py").write_text(REWARD)
    done = run("grpo_fast.py", "x", "--reward_file", tmp_path / "bad.py")
    assert "verifier mine gave no score in 3 steps" in last_line(done) and "bad.py, line 2" in last_line(done)
    assert [f"step {step}: verifier mine" in done.stdout for step in (1, 2, 3, 4)] == [True, True, True, False]
    assert (tmp_path / "x" / "checkpoints" / "step_3").exists()


def test_a_gap_ends_a_run_that_goes_on_without_the_guard(run, tmp_path):
    """A gap of rounding is beyond a tiny limit. With checkpoints by the minute the last step leaves one."""
    told = last_line(run("grpo.py", "x", "--max_logprob_gap", 1e-12))
    assert "before the first rollout" in told and "--max_logprob_gap" in told
    done = run("grpo.py", "y", "--max_logprob_gap", 0, "--checkpoint_minutes", 1e-6)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.name for path in (tmp_path / "y" / "checkpoints").glob("step_*")] == ["step_5"]


CAPPED = """
    import resource, torch, grpo, utils

    def main(args):
        utils.STOP.save = lambda: torch.empty(2**40, dtype=torch.uint8)
        resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
        torch.empty(2**36, dtype=torch.uint8)

    utils.run_script(main, grpo.Args)
"""


def test_an_error_is_the_last_line_although_nothing_can_be_saved():
    done = programs.run(["-c", textwrap.dedent(CAPPED), "--model_name_or_path", "x"], 120)
    assert done.returncode == 1 and str(2**36) in last_line(done)


@pytest.mark.house
def test_a_wandb_that_hangs_does_not_hold_up_the_end(tmp_path):
    script = """
        import contextlib, json, os, signal, subprocess, sys, threading, time
        from dataclasses import asdict
        from pathlib import Path
        import grpo, utils
        from scripts.parts import track

        track.WAIT_S = 2.0
        args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", "--with_tracking"])
        (Path(sys.argv[1]) / "args.json").write_text(json.dumps(asdict(args)))
        logger = utils.Logger(args, Path(sys.argv[1]), 8, 0, utils.World(0, 0, 1, None))
        of_this_process = ["pgrep", "-P", str(os.getpid()), "wandb-core"]
        found = ""
        while not found:
            found = subprocess.run(of_this_process, capture_output=True, text=True).stdout
            time.sleep(0.05)
        service = int(found)
        threading.Timer(60, lambda: (os.kill(service, signal.SIGKILL), os._exit(1))).start()
        os.kill(service, signal.SIGSTOP)
        for step in range(1, 200):
            logger.log({"training_step": step, "text": 0.0})
        logger.close()
        print("closed")
        with contextlib.suppress(ProcessLookupError):
            os.kill(service, signal.SIGKILL)  # it holds the pipe that the test reads
        utils.exit_process()
    """
    done = programs.run(["-c", textwrap.dedent(script), tmp_path], 120, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("WARNING") == 1 and "closed" in done.stdout
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 199
