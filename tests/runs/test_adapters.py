"""Whole runs that train adapters or learn from a teacher, with real engines."""

import json

import pytest
import torch
from safetensors.torch import load_file

from scripts.data.make_tiny_model import make_tiny_model
from tests import programs
from tests.runs.test_run import ENV, TRANSFORMERS, VLLM, check, command, data, read, run, untimed, weights  # noqa: F401

LORA = "--lora_rank 8 --lora_alpha 16 --learning_rate 2e-2"


@pytest.fixture(scope="module")
def adapted(tiny_models, data, tmp_path_factory):  # noqa: F811
    """A run of 8 steps with vLLM."""
    out = tmp_path_factory.mktemp("runs")
    flags = f"--exp_name lora --total_episodes 512 {LORA} {VLLM} --lora_merge --dump_steps all --beta 0.01"
    stdout = run(tiny_models(), data, out, f"{flags} --checkpoint_state_freq 4 --load_ref_policy")
    return stdout, out / "lora"


def test_adapters_learn_and_the_engine_follows(adapted):
    """Prefix caching, tied embeddings, float32: what the engine holds is what the learner computes, in every step."""
    rows = read(adapted[1] / "metrics.jsonl")
    rates = [r["objective/verifiable_correct_rate"] for r in rows]
    assert len(rows) == 8 and rates[0] < 0.1 and sum(rates[-3:]) / 3 > 0.5
    assert max(r["debug/vllm_vs_local_logprob_diff_max"] for r in rows) < 1e-4
    kl = [r["objective/kl1_avg"] for r in rows if "objective/kl1_avg" in r]  # not of steps that all answer rightly
    assert kl[0] == 0.0 and min(kl[1:]) > 1e-3


def test_a_run_with_adapters_is_replayed(adapted):
    """From a checkpoint, which holds adapters alone: the same bits."""
    done = programs.run(["scripts/replay.py", adapted[1], "--step", "6"], OMP_NUM_THREADS=1)
    assert "replayed weights and metrics are the run's" in check(done)


def test_a_checkpoint_of_adapters_becomes_what_the_run_saves(adapted, tmp_path):
    done = programs.run(["scripts/to_hf.py", adapted[1], "--step", "8", "--out", tmp_path / "model"])
    assert done.returncode == 0, done.stderr
    for name, file in (("model", "adapter_model"), ("model_merged", "model")):
        ours, want = (load_file(path / name / f"{file}.safetensors") for path in (tmp_path, adapted[1]))
        assert ours.keys() == want.keys() and all(torch.equal(ours[key], want[key]) for key in ours)


SAME = f"{LORA} --lora_merge --save_freq 1 --checkpoint_state_freq 2 --seed 3 {TRANSFORMERS}"


@pytest.fixture(scope="module")
def whole(tiny_models, data, tmp_path_factory):  # noqa: F811
    """A run of four steps, which others are compared with."""
    out = tmp_path_factory.mktemp("whole")
    check(programs.run(command(tiny_models(), data, out, f"--exp_name whole --total_episodes 256 {SAME}"), **ENV))
    return out / "whole"


def test_adapters_in_processes_of_their_own(whole, tiny_models, data, tmp_path):  # noqa: F811
    """grpo_fast.py, strictly on-policy: the weights of grpo.py."""
    line = f"--exp_name fast --total_episodes 192 {SAME} --num_learners_per_node 1 --vllm_num_engines 1 --async_steps 0"
    run(tiny_models(), data, tmp_path, line, script="grpo_fast.py")
    a, b = (weights(path / "step_3_merged") for path in (tmp_path / "fast", whole))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_teacher_without_a_reward(tiny_models, data, tmp_path):  # noqa: F811
    """All groups train; the KL per token falls; a replay has its bits."""
    teacher = make_tiny_model(tmp_path / "teacher", arch="qwen3", tied=False, seed=5)
    flags = f"--exp_name x --total_episodes 512 {TRANSFORMERS} --beta 1 --kl_estimator kl2 --verification_reward 0"
    flags += f" --no_filter_zero_std_samples --ref_model_name_or_path {teacher} --dump_steps all"
    run(tiny_models(), data, tmp_path, flags)
    rows = read(tmp_path / "x" / "metrics.jsonl")
    kl = [r["objective/kl1_avg"] for r in rows]
    assert kl[-1] < 0.75 * kl[0] and all(r["other/real_batch_size_ratio"] == 1 for r in rows)
    assert all(r["loss/policy_avg"] == 0 for r in rows)
    assert len(json.loads((tmp_path / "x" / "environment.json").read_text())["model_hash"].split()) == 2
    done = programs.run(["scripts/replay.py", tmp_path / "x", "--step", "2", "--from_start"], OMP_NUM_THREADS=1)
    assert "replayed weights and metrics are the run's" in check(done)
