"""Whole runs of grpo_fast.py: real engines in their own processes, real weight broadcasts, real kills."""

import dataclasses
import math
import os
import random
import re
import signal
import subprocess
import time

import pytest
import torch

import grpo
import grpo_fast
import utils
from scripts.parts import checks
from tests import programs
from tests.programs import is_alive
from tests.runs import test_run
from tests.runs.test_run import ENV, TRANSFORMERS, VLLM, check, data, read, untimed, weights  # noqa: F401 (data is a fixture)


def command(script, model, data, out, *flags):  # noqa: F811
    return test_run.command(model, data, out, *flags, script=script)


def run(*args):
    return check(programs.run(command(*args), **ENV))


def start(log, *args):
    """A process whose orphans or signals count: its ranks are its children."""
    log.with_name("pids").mkdir(exist_ok=True)
    env = ENV | {"PIDS": log.with_name("pids")}
    return programs.Program(args, log, address=programs.serve(), children=True, **env)


def test_async_steps_0_is_grpo_py_bit_for_bit(five_steps, tiny_models, data, tmp_path):  # noqa: F811
    flags = f"--exp_name fast --total_episodes 192 --async_steps 0 --save_freq 1 {VLLM}"
    run("grpo_fast.py", tiny_models(), data, tmp_path, flags)
    for step in (1, 2, 3):
        a = weights(five_steps() / f"step_{step}")
        b = weights(tmp_path / "fast" / f"step_{step}")
        assert all(torch.equal(a[name], b[name]) for name in a), f"step {step}"
    sync, fast = [read(d / "metrics.jsonl")[:3] for d in (five_steps(), tmp_path / "fast")]
    assert sum(row["optim/skipped_steps"] for row in sync) < 3, "nothing was trained: the test shows nothing"
    assert_same_metrics(sync, fast)


def assert_same_metrics(sync, fast):
    """grpo_fast.py has more of them."""
    for a, b in zip(map(untimed, sync), fast, strict=True):
        for name in a:
            assert "time/" in name or a[name] == b[name], name  # an evaluation's times too


def test_the_transformers_engine_too_gives_the_bits_of_grpo_py_though_it_is_killed(tiny_models, data, tmp_path):  # noqa: F811
    """Its bits depend on what is in a batch, so that must not depend on what arrives when: with evaluations at the same
    time, several rounds of sampling, exclusions and a kill -9."""
    flags = f"--total_episodes 320 --seed 3 --active_sampling --no_resampling_pass_rate 0.5 {TRANSFORMERS}"
    flags += f" --dataset_mixer_eval_list {data / 'test.jsonl'} 1.0 --local_eval_every 1 --num_mini_batches 2"
    run("grpo.py", tiny_models(), data, tmp_path, f"--exp_name sync {flags}")
    flags += " --exp_name fast --async_steps 0 --checkpoint_state_freq 1"
    log = tmp_path / "log"
    latest = tmp_path / "fast" / "checkpoints" / "latest"
    process = start(log, *command("grpo_fast.py", tiny_models(), data, tmp_path, flags))
    wait_until(latest.exists, process, log)
    process.kill()
    process.wait(timeout=600)
    run("grpo_fast.py", tiny_models(), data, tmp_path, f"{flags} --resume")
    a, b = (weights(tmp_path / name / "model") for name in ("sync", "fast"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    sync, fast = [read(tmp_path / name / "metrics.jsonl") for name in ("sync", "fast")]
    assert any(row["batch/total_prompts"] > 8 for row in sync), "one round was always enough: the test shows nothing"
    assert_same_metrics(sync, fast)


def test_two_learners_make_the_same_first_update(five_steps, tiny_models, data, tmp_path):  # noqa: F811
    flags = "--exp_name two --total_episodes 64 --save_freq 1 --async_steps 0 --num_learners_per_node 2"
    run("grpo_fast.py", tiny_models(), data, tmp_path, f"{flags} --deepspeed_stage 3 {VLLM}")
    assert not read(five_steps() / "metrics.jsonl")[0]["optim/skipped_steps"]
    a = weights(five_steps() / "step_1")
    b = weights(tmp_path / "two" / "step_1")
    for name in a:  # Adam's first step is the gradient's sign: rounding shows where a gradient is nearly zero
        assert (a[name] - b[name]).norm() <= 1e-4 * a[name].norm(), name


def test_staleness_is_bounded_and_nothing_is_lost(tiny_models, data, tmp_path):  # noqa: F811
    """Two engines, async_steps 2, weights taken between decoding steps: each token knows its version."""
    flags = "--exp_name x --total_episodes 1024 --async_steps 2 --inflight_updates --vllm_num_engines 2 --save_traces "
    flags += f"--response_length 12 --learning_rate 1e-3 --save_freq 5 {VLLM}"
    run("grpo_fast.py", tiny_models(), data, tmp_path, flags)
    rows = read(tmp_path / "x" / "rollouts.jsonl")
    metrics = read(tmp_path / "x" / "metrics.jsonl")
    names = [(r["position"], r["sample"]) for r in rows]
    assert sorted(names) == [(p, s) for p in range(128) for s in range(8)]
    for r in rows:
        lags = [r["training_step"] - 1 - v for v in r["versions"]]
        assert 0 <= min(lags) and max(lags) <= 2, "a rollout is older than async_steps updates"
        assert lags == sorted(lags, reverse=True) and len(lags) == len(r["token_ids"])
    assert {v for r in rows for v in r["versions"]} > {0, 1, 2}
    rates = [r["objective/verifiable_correct_rate"] for r in metrics]
    # it wanders, no run as another: the last five of 25 steps were 0.77 in one and 0.96 in another
    assert rates[0] < 0.3 and max(sum(rates[i : i + 5]) / 5 for i in range(12)) > 0.5, rates
    assert all(r["batch/groups_in_flight"] <= 8 * 3 for r in metrics)

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


@pytest.mark.parametrize("victim", ["learner", "launcher"])
def test_kill_9_leaves_no_process_behind(tiny_models, data, tmp_path, victim):  # noqa: F811
    flags = f"--exp_name x --total_episodes 6400000 --max_logprob_gap 0 {TRANSFORMERS}"
    log = tmp_path / "log"
    process = start(log, *command("grpo_fast.py", tiny_models(), data, tmp_path, flags))
    wait_until((tmp_path / "x" / "metrics.jsonl").exists, process, log)
    children = descendants(process.pid)
    learner, engine = ranks_of(log)
    assert {learner, engine} <= set(children)
    os.kill({"learner": learner, "launcher": process.pid}[victim], signal.SIGKILL)
    assert process.wait(timeout=600) != 0
    deadline = time.monotonic() + 60
    while alive := [pid for pid in children if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.05)
    if victim != "launcher":
        assert f"{victim} 0 died" in log.read_text()
        assert "signal SIGKILL" in log.read_text()


def wait_until(condition, process, log, every=0.05):
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()[-3000:]
        time.sleep(every)


def ranks_of(log, mark="TORCHELASTIC_RUN_ID="):
    """Pids of the ranks of what `start` has started, learners first."""
    return sorted(pid for pid, env in programs.living(log.with_name("pids")).items() if f"\0{mark}" in env)


@pytest.mark.house
def test_two_nodes_survive_a_kill(five_steps, tiny_models, data, tmp_path):  # noqa: F811
    """Two torchrun agents stand for two nodes; a learner killed with -9 is started again from the last checkpoint, and
    the run ends with the weights of a run that nobody killed."""
    flags = "--exp_name x --total_episodes 192 --async_steps 0 --save_freq 1 --checkpoint_state_freq 1"
    line = command("grpo_fast.py", tiny_models(), data, tmp_path, f"{flags} --num_learners_per_node 1 {VLLM}")
    port = random.randrange(20_000, 60_000)
    torchrun = f"-m torch.distributed.run --log-dir {os.devnull} --nnodes 2 --nproc_per_node 1 --max-restarts 2 "
    torchrun += f"--rdzv_backend c10d --rdzv_endpoint localhost:{port} --rdzv_id x"
    logs = [tmp_path / "log0", tmp_path / "log1"]
    agents = [start(log, *torchrun.split(), *line) for log in logs]
    try:
        latest = tmp_path / "x" / "checkpoints" / "latest"
        wait_until(latest.exists, agents[0], logs[0])
        (learner,) = ranks_of(logs[0], "RANK=0\0")
        os.kill(learner, signal.SIGKILL)
        assert [agent.wait(timeout=600) for agent in agents] == [0, 0], logs[0].read_text()[-3000:]
    finally:
        for agent in agents:
            agent.kill()
    a = weights(five_steps() / "step_3")
    b = weights(tmp_path / "x" / "step_3")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["training_step"] for row in read(tmp_path / "x" / "metrics.jsonl")] == [1, 2, 3]
    assert sum(log.read_text().count("ready after") for log in logs) == 2, "nobody was started again"
    assert sum(log.read_text().count("      1/3 ") for log in logs) == 1, "it did not go on from the checkpoint"


@pytest.mark.house
def test_an_engine_of_two_ranks_agrees_with_the_learner(tiny_models, data, tmp_path):  # noqa: F811
    """Tensor parallelism: the gap stays that of float32, after several broadcasts, with a tied head."""
    flags = f"--exp_name x --total_episodes 192 --seed 3 --async_steps 0 --vllm_tensor_parallel_size 2 {VLLM}"
    out = run("grpo_fast.py", tiny_models(), data, tmp_path, flags)
    assert "1 engines x 2 = 3 processes" in out
    rows = read(tmp_path / "x" / "metrics.jsonl")
    assert sum(r["optim/skipped_steps"] for r in rows) < 3
    assert all(r["debug/vllm_vs_local_logprob_diff_max"] < 1e-4 for r in rows)


def test_responses_are_as_long_as_in_a_synchronous_run(tiny_models, data, tmp_path):  # noqa: F811
    """With a learning rate of 0 asynchrony may change nothing: every rollout of the synchronous run is there, of the
    same length, at the same step. Finishing early is no advantage."""
    flags = "--total_episodes 320 --learning_rate 0 --stop_strings a e --response_length 16 --save_traces --seed 5 "
    found = []
    for script, more in (("grpo.py", ""), ("grpo_fast.py", "--async_steps 2 --inflight_updates --vllm_num_engines 2")):
        run(script, tiny_models(), data, tmp_path, f"--exp_name {script[:-3]} {flags} {more} {TRANSFORMERS}")
        rows = read(tmp_path / script[:-3] / "rollouts.jsonl")
        found.append({(r["position"], r["sample"]): (r["training_step"], len(r["token_ids"])) for r in rows})
    assert len(found[0]) == 320 and len({n for _, n in found[0].values()}) > 10, "all of one length show nothing"
    assert found[0].keys() == found[1].keys()
    same = sum(found[0][key] == found[1][key] for key in found[0])
    assert same >= 0.99 * 320  # float32 sums differ with the batch, and now and then a sample with them


@pytest.mark.house
def test_a_stall_ends_the_run_with_stacks_and_outstanding_requests(tiny_models, data, tmp_path):  # noqa: F811
    flags = f"--exp_name x --total_episodes 6400000 --max_logprob_gap 0 --stall_timeout_s 12 {TRANSFORMERS} "
    # the engine is at work nearly all the time: of equal scores nothing is learned
    flags += f"--async_steps 0 --response_length 64 --reward_file {tmp_path / 'zero.py'} --remap_verifier gsm8k=zero"
    (tmp_path / "zero.py").write_text("def zero(response, ground_truth):\n    return 0.0\n")
    log = tmp_path / "log"
    process = start(log, *command("grpo_fast.py", tiny_models(), data, tmp_path, flags))
    metrics = tmp_path / "x" / "metrics.jsonl"
    wait_until(metrics.exists, process, log)
    engine = ranks_of(log)[-1]
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: "stalled: nothing moved for" in log.read_text(), process, log)
        time.sleep(1)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert process.wait(timeout=600) != 0
    text = log.read_text()
    assert re.search(r"Outstanding: \d+ requests: \d+/\d \(engine 0\), ", text), text[-5000:]
    assert "in run_learner" in text and "in _collect" in text, "no stacks"
    assert text.splitlines()[-1].endswith("stalled, waiting for engine 0")


def test_learners_of_a_large_recipe_have_as_many_tokens():
    """Within 2 % of their mean, for 64 prompts x 8 samples of log-normal lengths and 96 learners."""
    rng = random.Random(0)
    rollouts = []
    for i in range(64):
        prompt = utils.Prompt(i, tuple(range(rng.randint(50, 300))), "", (), ())
        for j in range(8):
            length = int(rng.lognormvariate(math.log(13_000) - 0.32, 0.8))
            rollouts.append(grpo.Rollout(prompt, i, j, range(min(length, 35_540))))
    shares = grpo.pack_rollouts(rollouts, "shared", 35_840, 96, pair_cost=5e-5)
    loads = []
    for packs in shares:
        pieces = [piece for pack in packs for piece in pack]
        loads.append(sum(map(grpo.piece_length, pieces)))
    assert len(loads) == 96 and max(loads) <= 1.02 * sum(loads) / 96


def test_packs_hold_every_rollout_whatever_the_lengths():
    """Property: any rollouts, learners and way of packing; every rollout once, budgets kept, prompts shared."""
    rng = random.Random(0)
    for _ in range(100):
        learners = rng.randint(1, 5)
        packing = rng.choice(["shared", "plain", "rows"])
        pack_length = rng.choice([130, 400])
        rollouts = []
        for position in range(rng.randint(0, 12)):
            prompt = utils.Prompt(position, tuple(range(rng.randint(1, 30))), "", (), ())
            for j in range(rng.randint(1, 6)):
                rollouts.append(grpo.Rollout(prompt, position, j, [0] * rng.randint(1, 100)))
        shares = grpo.pack_rollouts(rollouts, packing, pack_length, learners, rng.choice([0.0, 1e-2]))
        assert len(shares) == learners
        packs = [pack for share in shares for pack in share]
        assert sorted(id(r) for pack in packs for piece in pack for r in piece) == sorted(map(id, rollouts))
        assert all(pack and sum(map(grpo.piece_length, pack)) <= pack_length for pack in packs)
        assert all(len({r.position for r in piece}) == 1 for pack in packs for piece in pack)
        if packing == "rows":
            assert all(sum(map(len, pack)) == 1 for pack in packs)


def test_roles():
    """Learners are the first ranks of each node; an engine of two ranks is two neighbours."""
    line = "--model_name_or_path x --num_learners_per_node 2 1 --vllm_num_engines 2 --vllm_tensor_parallel_size 2"
    args = utils.parse_args(grpo.Args, line.split())
    roles = [grpo_fast.roles_of(args, rank, 4) for rank in range(7)]
    assert [r.name for r in roles] == [
        "learner 0", "learner 1", "engine 0", "engine 0", "learner 2", "engine 1", "engine 1"
    ]  # fmt: skip
    assert [r.tp_rank for r in roles] == [0, 0, 0, 1, 0, 0, 1]
    with pytest.raises(utils.UserError, match="would span two nodes"):
        checks.check_fast(dataclasses.replace(args, num_learners_per_node=[3, 1]), 8, 4)


@pytest.mark.parametrize("flags, world, message", [
    ("--num_learners_per_node 2 --vllm_num_engines 1", 4, "3 processes, but 4 ranks run"),
    ("--vllm_num_engines 0", None, "a run needs a learner and an engine"),
    ("--num_learners_per_node 1 1", 3, "is for 2 nodes, but 1 run"),
    ("--vllm_tensor_parallel_size 2", 2, "x --vllm_tensor_parallel_size 2 = 3 processes, but 2 ranks run"),
])  # fmt: skip
def test_refusals(flags, world, message):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *flags.split()])
    with pytest.raises(utils.UserError, match=message):
        checks.check_fast(args, world, world or 1)


@pytest.mark.house
def test_without_vllm_and_without_a_call_that_pins(tiny_models, data, tmp_path, monkeypatch):  # noqa: F811
    """As on macOS: no build of vLLM, no os.sched_getaffinity, before the project is imported; what is forked imports it
    again. The missing engine is said before anything loads."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nfor name in [*sys.modules]:\n"
        "    if name.partition('.')[0] in ('vllm', 'grpo', 'grpo_fast', 'utils', 'rewards', 'scripts'):\n"
        "        del sys.modules[name]\n"
        "sys.modules['vllm'] = None\ndel os.sched_getaffinity, os.sched_setaffinity\n"
    )
    programs.serve()  # has vLLM
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = ("grpo_fast.py", tiny_models(), data, tmp_path, "--exp_name x --total_episodes 128 --async_steps 1")
    run(*args, TRANSFORMERS)
    assert [row["training_step"] for row in read(tmp_path / "x" / "metrics.jsonl")] == [1, 2]
    said = check(programs.run(command(*args, "--overwrite"), **ENV), ok=False)
    assert "--rollout_backend transformers" in said and "Traceback" not in said
