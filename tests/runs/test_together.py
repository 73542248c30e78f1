"""What the table of parts/README.md, "Adapters and teachers", says works together, in whole runs of three steps."""

import json

import pytest
import torch
from safetensors.torch import load_file

from scripts.data.make_tiny_model import make_tiny_model
from tests import programs
from tests.runs.test_run import ENV, check, read, untimed

TOY = """
from rewards import Answer

def step(episode):
    number = sum(map(ord, episode.text))
    return Answer(str(number % 97), number % 7 / 7) if episode.turn < 3 else None
"""
FLAGS = """--model_dtype float32 --num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 4 --response_length 80
    --max_prompt_token_length 48 --per_turn_max_tokens 8 --pack_length 256 --temperature 1.0 --learning_rate 3e-3
    --lr_scheduler_type constant --per_device_train_batch_size 1 --max_logprob_gap 1e-4 --seed 3 --total_episodes 48
    --rollout_backend transformers --dump_steps all --save_freq 1"""
LORA = "--lora_rank 4 --lora_alpha 8 --learning_rate 2e-2"
TEACHER = "--beta 0.1 --kl_estimator kl2 --no_filter_zero_std_samples --ref_model_name_or_path TEACHER"
SP = "--sequence_parallel_size 2"
ASYNC = "--num_learners_per_node 2 --vllm_num_engines 1 --async_steps 1 --inflight_updates"


@pytest.fixture(scope="module")
def play(tiny_models, tmp_path_factory):
    """Function (name, flags, script, ranks) -> the directory of a whole run, and what it printed."""
    out = tmp_path_factory.mktemp("together")
    make_tiny_model(out / "teacher", arch="qwen3", tied=False, seed=5)
    rows = [[{"role": "user", "content": f"Say {i}"}] for i in range(16)]
    rows = [{"messages": row, "ground_truth": "7", "dataset": "string_matcher"} for row in rows]
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "toy.py").write_text(TOY)

    def run(name, *flags, script=("grpo.py",), ranks=0, ok=True):
        flags = " ".join(flags).replace("TEACHER", str(out / "teacher")).replace("TOY", str(out / "toy.py"))
        line = [*programs.torchrun(ranks), *script, "--model_name_or_path", tiny_models(), "--output_dir", out]
        line += ["--exp_name", name, "--dataset_mixer_list", out / "train.jsonl", "1.0", *FLAGS.split(), *flags.split()]
        return out / name, check(programs.run(line, **ENV), ok)

    return run


def assert_turns(rows):
    """All rollouts of all steps, most with answers, which are not trained on."""
    assert sorted((r["position"], r["sample"]) for r in rows) == [(p, s) for p in range(12) for s in range(4)]
    assert sum(len(r["turns"]) > 1 for r in rows) > 40
    for r in rows:
        sampled = [t["role"] == "assistant" for t in r["turns"] for _ in range(t["tokens"])]
        assert r["mask"] == sampled and len(r["token_ids"]) <= 80


def test_a_split_run_of_all_is_that_of_one_learner(play):
    """Adapters, a teacher and an environment: the same conversations, scores and metrics, adapters to Adam's noise."""
    one, _ = play("one", LORA, TEACHER, "--env_file TOY")
    two, _ = play("two", LORA, TEACHER, "--env_file TOY", SP, ranks=2)
    keys = ("training_step", "position", "sample", "token_ids", "mask", "score", "advantage")
    rows, others = (read(path / "rollouts.jsonl") for path in (one, two))
    assert [[r[key] for key in keys] for r in rows] == [[r[key] for key in keys] for r in others]
    assert_turns(rows)
    for step in (1, 2, 3):
        x, y = (load_file(path / f"step_{step}" / "adapter_model.safetensors") for path in (one, two))
        assert all((x[name] - y[name]).norm() <= 1e-4 * x[name].norm() for name in x) and len(x) == 28
    for x, y in zip(*(read(path / "metrics.jsonl") for path in (one, two)), strict=True):
        assert not x["optim/skipped_steps"] and x["loss/policy_avg"] and x["loss/kl_avg"] > 0
        for name in untimed(x):
            ranks = 2 if name.startswith("val/learner_tokens") else 1  # a number of each rank
            assert ranks * y[name] == pytest.approx(x[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("name, flags", [
    ("all", f"{LORA} {TEACHER}"),
    pytest.param("full", "--ref_policy_update_freq 1 --load_ref_policy --beta 0.1", marks=pytest.mark.house),
])  # fmt: skip
def test_asynchronous_and_split_with_turns(play, name, flags):
    """grpo_fast.py, updates in flight: rollouts one update old at most, and some are; updates replay bit for bit."""
    run_dir, _ = play(name, flags, SP, ASYNC, "--env_file TOY", script=["grpo_fast.py"])
    rows = read(run_dir / "rollouts.jsonl")
    assert_turns(rows)
    lags = [r["training_step"] - 1 - v for r in rows for v, m in zip(r["versions"], r["mask"], strict=True) if m]
    assert min(lags) >= 0 and max(lags) == 1
    metrics = read(run_dir / "metrics.jsonl")
    assert len(metrics) == 3 and all(m["optim/grad_norm"] > 0 and m["loss/kl_avg"] >= 0 for m in metrics)
    assert metrics[0]["debug/vllm_vs_local_logprob_diff_max"] < 1e-4
    replay = [*programs.torchrun(2), "scripts/replay.py", run_dir, "--step", "3", "--from_start"]
    assert "equal: replayed weights and metrics" in check(programs.run(replay, **ENV))


def test_states_of_another_run_with_a_teacher_and_split(play):
    """Each step starts from the other run's weights, so that its rollouts are sampled again, whatever was learned."""
    other, _ = play("other", "--beta 0 --checkpoint_state_freq 1")
    flags = f"{TEACHER} {SP} --load_states {other} --learning_rate 1e-2"
    run_dir, _ = play("states", flags, ranks=2)
    a, b = ([r["token_ids"] for r in read(path / "rollouts.jsonl")] for path in (other, run_dir))
    assert a == b and len(a) == 48
    x, y = (load_file(path / "step_1" / "model.safetensors") for path in (other, run_dir))
    assert any(not torch.equal(x[name], y[name]) for name in x)
