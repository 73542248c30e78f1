"""What ends a run, and what does not: scripts/parts/guards.py."""

import json
import math
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo
import rewards
import utils
from scripts.parts import guards, plan, run_files
from tests import programs

ONE = utils.World(0, 0, 1, torch.device("cpu"))
# Of each step of a demo in bfloat16: (sum of |learner - engine|, tokens) of each prompt that trained, with vLLM
HEALTHY = json.loads(Path(__file__).with_name("gaps_bf16.json").read_text())


def make_guards(*flags, engines=1):
    line = ["--model_name_or_path", "m", "--model_dtype", "bfloat16", *map(str, flags)]
    return guards.Guards(utils.parse_args(grpo.Args, line), engines)


def gap_batch(d, sampled, position=0):
    """A grpo.Batch of one rollout whose logprobs are d beside an engine's of 0; the first tokens are sampled."""
    ones = np.ones(sampled)
    rollout = types.SimpleNamespace(versions=0 * ones, mask=ones > 0, position=position)
    places, owners = torch.arange(sampled), torch.ones(1, len(d), dtype=torch.long)
    values = {"old_logprobs": d[None], "vllm_logprobs": torch.zeros(1, len(d))}
    return types.SimpleNamespace(places=places, seq_ids=owners, rollouts=[rollout], **values)


def seen(prompts):
    """A guards.Gap of prompts: position -> (sum |d|, tokens)."""
    return types.SimpleNamespace(prompts=prompts)


def test_the_gap_is_over_all_batches_and_by_prompt():
    gap = guards.Gap()
    gap.add(gap_batch(torch.full((6,), 0.25), 6, position=3))
    gap.add(gap_batch(torch.full((4,), -0.5), 2, position=5))
    gap.add(gap_batch(torch.full((1,), 1.0), 1, position=5))
    found = gap.reduce(make_guards().args, ONE)
    assert found.metrics["debug/vllm_vs_local_logprob_diff_mean"] == pytest.approx(3.5 / 9)
    assert found.metrics["debug/vllm_vs_local_logprob_diff_max"] == pytest.approx(1.0)
    assert found.prompts == {3: (1.5, 6.0), 5: (2.0, 3.0)}


def test_the_gap_of_one_prompt_ends_nothing():
    """The demo ended at its last step: 48 tokens of one prompt, all with the rounding error of one context."""
    guard = make_guards()
    for position in range(40):
        guard.judge_gap(seen({position: (9.98, 48)}), "now")
        assert bool(utils.STOP.because) == (position >= 15), position  # 16 of 32 prompts, the others without any gap
    assert "--max_logprob_gap 0.1" in utils.STOP.because


@pytest.mark.parametrize("flags, gap, ends", [
    ("--model_dtype float32", 0.02, True),
    ("--model_dtype float32", 0.005, False),
    ("--model_dtype float16", 0.02, False),
    ("--model_dtype float16", 0.05, True),
    ("--max_logprob_gap 0.01", 0.05, True),
    ("--max_logprob_gap 0", 3.0, False),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*rounding")
def test_the_limit_is_the_dtypes_or_the_flags(flags, gap, ends):
    guard = make_guards(*flags.split())
    guard.judge_gap(seen({position: (10 * gap, 10) for position in range(32)}), "now")
    assert bool(utils.STOP.because) == ends


def test_logprobs_that_are_no_numbers_have_another_guard():
    guard = make_guards()
    guard.judge_gap(seen({position: (math.nan, 10) for position in range(64)}), "now")
    assert not utils.STOP.because
    guard.judge_gap(seen({position: (5.0, 10) for position in range(20)}), "now")  # and they hide no other gap
    assert utils.STOP.because


def test_logprobs_that_are_no_numbers_end_a_run_at_its_start():
    guard = make_guards(engines=2)
    guard.judge_gap(seen({0: (0.1, 10), 1: (math.nan, 10)}), guards.BEFORE)
    assert "engine 1" in utils.STOP.because


@pytest.mark.parametrize("first", [0, 20])
def test_no_healthy_step_ends_a_run_and_a_fault_does(first):
    """100,000 steps drawn from those of a run, or from its last ten, in which the policy is sharpest. Sampling at
    temperature 0.7 in place of 1.0 makes a mean of 0.375."""
    rng = random.Random(1)
    steps = [step for step in HEALTHY[first:] if step]
    assert sum(total > 0.1 * tokens for step in steps for total, tokens in step) >= 1  # which may end a run
    guard = make_guards()
    position = 0
    for _ in range(100_000):
        step = rng.choice(steps)
        prompts = rng.sample(step, rng.randint(1, len(step)))
        guard.judge_gap(seen(dict(enumerate(prompts, position))), "now")
        position += len(prompts)
    assert not utils.STOP.because
    for more in range(12):
        guard.judge_gap(seen({position + more: (0.375 * 48, 48)}), "now")
    assert "exceeds --max_logprob_gap" in utils.STOP.because


# --- Rewards and gradients --------------------------------------------------------------------------------------------


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(rewards, "WARNED", {("mine", "crash"): "TypeError: x (mine.py, line 3)"})


def counts(name, **statuses):
    return {f"reward/{name}_{status}": float(statuses.get(status, 0)) for status in rewards.STATUSES}


@pytest.mark.parametrize("status", ["crash", "timeout", "infra_error"])
@pytest.mark.parametrize("worked_before", [False, True])
def test_a_verifier_without_a_score_is_told_and_ends_the_run_after_three_steps(words, capsys, status, worked_before):
    guard = make_guards()
    if worked_before:
        guard.judge_rewards(counts("mine", ok=64), 1)
    for step in (2, 3, 4):
        assert not utils.STOP.because
        guard.judge_rewards(counts("mine", **{status: 64}), step)
        assert f"step {step}" in capsys.readouterr().out
    assert "verifier mine" in utils.STOP.because and "line 3" in utils.STOP.because


@pytest.mark.parametrize("scored", ["ok", "no_answer"])
def test_one_score_among_crashes_is_enough(words, monkeypatch, scored):
    monkeypatch.setattr(rewards, "BUILT_IN", {*rewards.BUILT_IN, "mine"})
    guard = make_guards()
    for step in range(9):
        guard.judge_rewards(counts("mine", crash=64, **({scored: 1} if step % 3 == 2 else {})), step)
    assert not utils.STOP.because


def test_a_verifier_that_is_asked_now_and_then_may_meet_labels_that_nothing_can_score(words):
    guard = make_guards()
    for step in range(3):
        guard.judge_rewards(counts("mine", crash=2) | counts("gsm8k", ok=64), step)
    assert not utils.STOP.because


@pytest.mark.parametrize("groups, ends", [(0, True), (1, False)])
def test_an_environment_that_always_fails_ends_a_run_that_learns_nothing(monkeypatch, groups, ends):
    """Where a group has a gradient the policy reads of its malformed calls and learns from what else scores."""
    monkeypatch.setattr(rewards, "WARNED", {("/tmp/bad.py", "crash"): "KeyError: 'x' (bad.py, line 9)"})
    guard = make_guards()
    for step in range(3):
        metrics = {"env/bad/crash_rate": 0.75, "env/bad/timeout_rate": 0.25, "env/good/crash_rate": 0.5}
        guard.judge_rewards(metrics | {"val/total_reward_groups": float(groups)}, step)
    assert ("line 9" in utils.STOP.because) == ends


# --- Echo -------------------------------------------------------------------------------------------------------------


def answers(*logprobs):
    return [utils.Generation([7], [logprob], "length", [0]) for logprob in logprobs]


def send(said, version, moved):
    """Note weights that are `moved` of their size away from those of version 0."""
    weights = torch.full((guards.NUMBERS,), 1.0 + moved)
    ((name, same),) = said.watch([("w", weights)], version)
    assert name == "w" and same is weights


def test_an_engine_that_repeats_its_answers_has_not_got_the_weights():
    said = guards.Echo(make_guards().args)
    for version in (0, 1):
        send(said, version, 1e-3 * version)
        said.judge(0, version, answers(-1.5, -2.0 - version))  # one of them may stay
        said.judge(1, version, answers(-1.5, -2.0))
    assert "engine 1" in utils.STOP.because and "step 1" in utils.STOP.because


def test_an_engine_may_answer_later_than_the_others():
    said = guards.Echo(make_guards().args)
    for version in range(9):
        send(said, version, 1e-3 * version)
        said.judge(0, version, answers(-1.0 - version))
        if version >= 2:
            said.judge(1, version - 2, answers(-1.0 - version))
    said.judge(1, 7, answers(-1.0 - 8))
    assert "engine 1" in utils.STOP.because


def test_weights_that_stay_have_the_same_echo():
    said = guards.Echo(make_guards().args)
    for version in range(9):
        send(said, version, 0)
        said.judge(0, version, answers(-1.5))
    assert not utils.STOP.because


def test_small_updates_add_up():
    """An update may be too small for any logprob, though each number moves; eight of them are not."""
    said = guards.Echo(make_guards().args)
    for version in range(9):
        assert not utils.STOP.because
        send(said, version, 1.3e-7 * version)
        said.judge(0, version, answers(-1.5))
    assert "those of step 0" in utils.STOP.because
    assert len(said.sent) <= 2 + guards.KEPT_VERSIONS  # what nobody needs is forgotten


HASH = """
import sys, torch, grpo, utils
from scripts.parts import guards

path, dtype = sys.argv[1:]
flags = f"--model_name_or_path {path} --model_dtype {dtype} --max_prompt_token_length 32 --vllm_enforce_eager"
args = utils.parse_args(grpo.Args, [*flags.split(), "--response_length", "16"])
world = utils.init_distributed()
engine = utils.make_engine(args, utils.load_tokenizer(args), world, 8)
weights = dict(utils.full_weights(grpo.load_policy(args, world), utils.DTYPES[dtype]))
integers = torch.int16 if dtype == "bfloat16" else torch.int32


def ask(version):
    engine.load_weights(weights.items(), version)
    return [(int(g.token_ids[0]), float(g.logprobs[0])) for g in engine.generate(guards.echo_requests(engine))]


before = ask(0)
assert ask(1) == before
generator = torch.Generator().manual_seed(0)
for version in range(2, 8):
    for name, tensor in weights.items():
        moved = torch.rand(tensor.shape, generator=generator) < 1e-3
        weights[name] = (tensor.view(integers) + moved.to(integers)).view(tensor.dtype)
    after = ask(version)
    assert after != before
    before = after
del weights["model.layers.1.mlp.down_proj.weight"]
try:
    ask(9)
except utils.UserError as error:
    print(error)
utils.exit_process()
"""


@pytest.mark.runs
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vllm_takes_all_weights_and_its_answers_are_a_hash_of_them(tiny_models, dtype):
    """With a thousandth of the numbers moved by their last bit the answers differ; a tensor that is not sent is an
    error."""
    done = programs.run(["-c", HASH, str(tiny_models()), dtype], OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "layers.1.mlp.down_proj" in done.stdout, done.stdout + done.stderr


# --- Disks ------------------------------------------------------------------------------------------------------------


def test_a_disk_with_room_for_half_a_line_gets_none_of_it(tmp_path, capsys):
    """A file that may not grow beyond its limit takes a part."""
    import resource
    import signal

    path = tmp_path / "rollouts.jsonl"
    run_files.append_lines(path, "x" * 99 + "\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, before[1]))
        assert run_files.append_lines(path, "y" * 99 + "\n") is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == 100 and "WARNING" in capsys.readouterr().out
    run_files.append_waiting()
    assert [line[0] for line in path.read_text().splitlines()] == ["x", "y"] and not run_files.WAITING


@pytest.mark.parametrize("free, fits", [(25e6, True), (23e6, False)])
def test_checkpoints_go_by_the_clock_where_two_fit(monkeypatch, free, fits):
    """A million weights: 12 MB a checkpoint, and 2 MB for the model."""
    monkeypatch.setattr(plan, "free_bytes", lambda _: (Path("/"), free + 2e6))
    args = utils.parse_args(grpo.Args, "--model_name_or_path m --model_dtype bfloat16 --save_freq -1".split())
    found, text = plan.by_clock(args, [[1000, 1000]])
    assert found == fits and ("every 30 minutes" in text) == fits
