"""Whole runs of grpo_fast.py: real engines in their own processes, real weight broadcasts, real kills."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import grpo
import grpo_fast
import utils
from tests.conftest import REPO
from tests.test_readme import undocumented
from tests.test_run import SMALL, TRANSFORMERS, VLLM, data, read, weights  # noqa: F401 (data is a fixture)


def command(script, model, data, out, *flags):  # noqa: F811
    line = [sys.executable, script, "--model_name_or_path", str(model), "--output_dir", str(out)]
    return [*line, "--dataset_mixer_list", str(data / "train.jsonl"), "1.0", *SMALL.split(), *" ".join(flags).split()]


def run(*args, ok=True):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(*args), cwd=REPO, env=env, capture_output=True, text=True, timeout=400)
    assert (done.returncode == 0) == ok, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout if ok else done.stderr


@pytest.fixture(scope="module")
def synchronous(tiny_models, data, tmp_path_factory):  # noqa: F811
    """Three steps of grpo.py, which grpo_fast.py has to repeat."""
    out = tmp_path_factory.mktemp("sync")
    run("grpo.py", tiny_models(), data, out, f"--exp_name sync --total_episodes 192 --seed 3 --save_freq 1 {VLLM}")
    return out / "sync"


def test_async_steps_0_is_grpo_py_bit_for_bit(synchronous, tiny_models, data, tmp_path):  # noqa: F811
    flags = f"--exp_name fast --total_episodes 192 --seed 3 --async_steps 0 --save_freq 1 {VLLM}"
    run("grpo_fast.py", tiny_models(), data, tmp_path, flags)
    for step in (1, 2, 3):
        a, b = weights(synchronous / f"step_{step}"), weights(tmp_path / "fast" / f"step_{step}")
        assert all(torch.equal(a[name], b[name]) for name in a), f"step {step}"
    rows = [read(d / "metrics.jsonl") for d in (synchronous, tmp_path / "fast")]
    assert sum(r["optim/skipped_steps"] for r in rows[0]) < 3, "nothing was trained: the test shows nothing"
    for a, b in zip(*rows, strict=True):
        same = [k for k in a if not k.startswith(("time/", "learner_tokens", "val/actor"))]
        assert {k: a[k] for k in same} == {k: b[k] for k in same}


def test_two_learners_make_the_same_first_update(synchronous, tiny_models, data, tmp_path):  # noqa: F811
    flags = "--exp_name two --total_episodes 64 --seed 3 --async_steps 0 --save_freq 1 --per_device_train_batch_size 1 "
    run("grpo_fast.py", tiny_models(), data, tmp_path, flags + f"--num_learners_per_node 2 --deepspeed_stage 3 {VLLM}")
    a, b = weights(synchronous / "step_1"), weights(tmp_path / "two" / "step_1")
    for name in a:
        assert (a[name] - b[name]).norm() <= 1e-6 * a[name].norm(), name


def test_staleness_is_bounded_and_nothing_is_lost(tiny_models, data, tmp_path):  # noqa: F811
    """Two engines, async_steps 2, weights taken between decoding steps: each token knows its version."""
    flags = "--exp_name x --total_episodes 1600 --async_steps 2 --inflight_updates --vllm_num_engines 2 --save_traces "
    flags += f"--max_logprob_gap 0 --response_length 24 --learning_rate 1e-3 --save_freq 5 {VLLM}"
    run("grpo_fast.py", tiny_models(), data, tmp_path, flags)
    rows, metrics = read(tmp_path / "x" / "rollouts.jsonl"), read(tmp_path / "x" / "metrics.jsonl")
    names = [(r["position"], r["sample"]) for r in rows]
    assert sorted(names) == [(p, s) for p in range(200) for s in range(8)]
    for r in rows:
        lags = [r["training_step"] - 1 - v for v in r["versions"]]
        assert 0 <= min(lags) and max(lags) <= 2, "a rollout is older than async_steps updates"
        assert lags == sorted(lags, reverse=True) and len(lags) == len(r["token_ids"])
    assert {v for r in rows for v in r["versions"]} > {0, 1, 2}
    assert undocumented({key for row in metrics for key in row}) == []
    rates = [r["objective/verifiable_correct_rate"] for r in metrics]
    assert rates[0] < 0.3 and sum(rates[-5:]) / 5 > 0.6
    assert all(r["batch/prompts_in_flight"] <= 8 * 3 for r in metrics)

    # the tokens before the first update in flight have the logprobs of the learner of that version
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "x" / "step_5", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "x" / "step_5")
    checked = 0
    for r in [r for r in rows if r["versions"][0] == 5][:20]:
        prompt = tokenizer(r["prompt"], add_special_tokens=False)["input_ids"]
        n = r["versions"].count(5)
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([prompt + r["token_ids"]])).logits[0], -1)
        want = [logp[len(prompt) - 1 + i, token].item() for i, token in enumerate(r["token_ids"][:n])]
        assert r["logprobs"][:n] == pytest.approx(want, abs=1e-4)
        checked += n
    assert checked > 20


def descendants(pid):
    """Live processes below pid."""
    found = []
    for child in subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout.split():
        found += [int(child), *descendants(int(child))]
    return found


@pytest.mark.parametrize("victim", ["learner", "engine", "launcher"])
def test_kill_9_leaves_no_process_behind(tiny_models, data, tmp_path, victim):  # noqa: F811
    flags = f"--exp_name x --total_episodes 6400000 --max_logprob_gap 0 {TRANSFORMERS}"
    line = command("grpo_fast.py", tiny_models(), data, tmp_path, flags)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(line, cwd=REPO, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        metrics = tmp_path / "x" / "metrics.jsonl"
        while not metrics.exists():
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        children = sorted(descendants(process.pid))
        learner, engine = [pid for pid in children if os.path.exists(f"/proc/{pid}/environ") and is_rank(pid)][:2]
        os.kill({"learner": learner, "engine": engine, "launcher": process.pid}[victim], signal.SIGKILL)
        start = time.monotonic()
        assert process.wait(timeout=30) != 0
        while alive := [pid for pid in children if is_alive(pid)]:
            assert time.monotonic() - start < 5, f"still there after 5 s: {alive}"
            time.sleep(0.05)
    if victim != "launcher":
        assert f"{victim} 0 (pid" in (tmp_path / "log").read_text()
        assert "signal SIGKILL" in (tmp_path / "log").read_text()


def is_rank(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return b"TORCHELASTIC_RUN_ID" in file.read() and b"grpo_fast.py" in open(f"/proc/{pid}/cmdline", "rb").read()


def is_alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_shares_lose_nothing_and_are_even():
    """Property: any rollouts, any number of learners; every rollout once, in order, loads within the longest row."""
    rng = random.Random(0)
    for _ in range(200):
        learners, row_tokens = rng.randint(1, 5), rng.choice([0, 40, 200])
        rollouts = []
        for position in range(rng.randint(0, 12)):
            prompt = utils.Prompt(position, tuple(range(rng.randint(1, 30))), "", (), ())
            for j in range(rng.randint(1, 6)):
                rollouts.append(grpo.Rollout(prompt, position, j, [0] * rng.randint(1, 100)))
        shares = grpo_fast.share_rollouts(rollouts, row_tokens, learners)
        assert len(shares) == learners
        assert sorted(id(r) for share in shares for r in share) == sorted(map(id, rollouts))
        order = {id(r): i for i, r in enumerate(rollouts)}
        assert all([order[id(r)] for r in share] == sorted(order[id(r)] for r in share) for share in shares)
        if learners == 1:
            assert shares[0] == rollouts
        rows = grpo.fill_rows(rollouts, row_tokens)
        if rows and row_tokens == 0:
            loads = [sum(grpo.row_length([r]) for r in share) for share in shares]
            assert max(loads) - min(loads) <= max(map(grpo.row_length, rows))


@pytest.mark.parametrize("flags, world, message", [
    ("--num_learners_per_node 2 --vllm_num_engines 1", 4, "3 processes, but 4 ranks run"),
    ("--resume", None, "--resume and --checkpoint_state_freq work in grpo.py only"),
    ("--vllm_num_engines 0", None, "both must be positive"),
    ("--num_mini_batches 3", None, "--num_mini_batches 3 does not divide --num_unique_prompts_rollout 16"),
])  # fmt: skip
def test_refusals(flags, world, message):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *flags.split()])
    with pytest.raises(utils.UserError, match=message):
        grpo_fast.check_fast_args(args, world)
