"""Lines that could be changed without a test that failed: each test here holds one (tests/README.md, Mutations)."""

import collections
import math
import random
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import grpo
import rewards
import utils
from scripts.parts import (
    checkpoints,
    environments,
    guards,
    transformers_engine,
    turns,
)
from tests.test_guards import gap_batch
from tests.test_wiring import make_collector

ONE = utils.World(0, 0, 1, torch.device("cpu"))


def args_of(flags=""):
    return utils.parse_args(grpo.Args, f"--model_name_or_path x {flags}".split())


def rollout(position=0, tokens=3, prompt=None, **fields):
    """A rollout of tokens that the policy sampled with weights 0."""
    prompt = prompt or utils.Prompt(position, (5, 6), "", ("7",), ("gsm8k",))
    columns = {
        "token_ids": [9] * tokens,
        "logprobs": [-1.0] * tokens,
        "mask": [True] * tokens,
        "versions": [0] * tokens,
    }
    return utils.Rollout(prompt, position, 0, **columns | fields)


# --- Metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_of_a_loss_by_hand():
    """Two responses of one and of three tokens. d = new - ref: 0.5; 0.1, 0.2, 0.3. new - old: 0.2; 0, -0.4, 0."""
    new = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    seq_ids = torch.tensor([[1, 2, 2, 2]])
    inputs = grpo.LossInputs(
        new_logprobs=new,
        old_logprobs=new - torch.tensor([[0.2, 0.0, -0.4, 0.0]]),
        vllm_logprobs=new,
        ref_logprobs=new - torch.tensor([[0.5, 0.1, 0.2, 0.3]]),
        advantages=torch.ones(1, 4),
        entropy=torch.tensor([[1.0, 2.0, 3.0, 6.0]]),
        mask=torch.ones(1, 4, dtype=torch.bool),
        seq_ids=seq_ids,
        tokens=4.0,
        responses=2.0,
    )
    metrics = utils.Metrics()
    grpo.grpo_loss(inputs, grpo.Totals(4.0, 2.0), args_of("--beta 0.1 --entropy_coef 0.5"), metrics)
    for part in ("policy", "kl", "entropy"):
        metrics.add(f"loss/{part}_avg", 0.0, 1.0)
    found = utils.finish_metrics(metrics.reduce(ONE), args_of())
    squares = 0.25 + 0.01 + 0.04 + 0.09
    k3 = sum(math.expm1(-d) + d for d in (0.5, 0.1, 0.2, 0.3))
    want = {
        "objective/entropy": 10 / 2,
        "policy/entropy_avg": 12 / 4,
        "policy/approxkl_avg": (0.04 + 0.16) / 2 / 4,
        "policy/ppo_kl_avg": 0.2 / 4,
        "objective/kl": 1.1 / 2,
        "objective/kl2": squares / 2 / 2,
        "objective/kl3": k3 / 2,
        "objective/kl0_avg": 1.1 / 4,
        "objective/kl1_avg": squares / 2 / 4,
        "objective/kl2_avg": k3 / 4,
        "loss/kl_avg": 0.1 * k3 / 4,
        "loss/entropy_avg": -0.5 * 12 / 4,
    }
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-5)
    total = found["loss/policy_avg"] + want["loss/kl_avg"] + want["loss/entropy_avg"]
    assert found["loss/total_avg"] == pytest.approx(total, rel=1e-5)


def test_the_gap_and_its_standard_error_by_hand():
    """rho of three tokens: 1, 1.2, 0.8; their variance is 0.08 / 3, and a mean of three has a third of it."""
    gap = guards.Gap()
    d = torch.tensor([1.0, 1.2, 0.8, 9.0]).log()
    gap.add(gap_batch(d, 3))
    found = gap.reduce(args_of(), ONE).metrics
    absolute = d[:3].abs()
    assert found["val/rho"] == pytest.approx(1.0)
    assert found["val/rho_se"] == pytest.approx(math.sqrt(0.08 / 3 / 3))
    assert found["debug/vllm_vs_local_logprob_diff_mean"] == pytest.approx(float(absolute.mean()))
    assert found["debug/vllm_vs_local_logprob_diff_max"] == pytest.approx(-math.log(0.8))
    assert found["debug/vllm_vs_local_logprob_diff_std"] == pytest.approx(float(absolute.std(correction=0)))
    assert found["debug/vllm_local_reverse_kl"] == pytest.approx(-float(d[:3].sum()) / 3, rel=1e-5)


def test_a_half_right_response_does_not_pass():
    """Two verifiers, of which one says yes: a verdict of 1 of 2."""
    prompt = utils.Prompt(0, (5,), "", ("7", "8"), ("gsm8k", "gsm8k"))
    metrics = utils.Metrics()
    verdicts = [1.0, math.nan, 2.0, 0.0, 1.0, math.nan]  # a missing one is no wrong answer
    grpo.note_pass_at_k([rollout(prompt=prompt, verifiable=v) for v in verdicts], metrics)
    assert metrics.reduce(ONE) == {"pass_at_1": 0.25, "pass_at_2_unbiased": 0.5, "pass_at_4_unbiased": 1.0}


@pytest.mark.parametrize("flags, forwards", [
    ("", 3),
    ("--lora_rank 4", 2),
    ("--num_epochs 2", 7),
    ("--num_epochs 2 --lora_rank 4", 5),
    ("--load_ref_policy --beta 0.1", 4),
])  # fmt: skip
def test_operations_of_an_update_are_counted_in_forwards(flags, forwards):
    """A backward is two; frozen weights have half of it. Old and reference logprobs are one each."""
    policy = SimpleNamespace(flops=lambda tokens, pairs, responses: tokens + 100 * responses)
    args = args_of(flags)
    learner: Any = SimpleNamespace(policy=policy, ref_policy=policy if "--load_ref_policy" in flags else None)
    step = grpo.Step(1, packs=[[[[rollout(tokens=3), rollout(tokens=4)]]]])
    grpo.note_update(learner, step, args)
    found = step.metrics.reduce(ONE)
    assert found["learner_flops"] == forwards * (1 + 7 + 700)  # a token of the prompt is shared
    assert (found["trained"], found["val/learner_tokens"], found["other/packed_ratio"]) == (2, 8, 0.5)


# --- Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups, parts, sizes", [(5, 3, [1, 2, 2]), (2, 4, [0, 1, 0, 1]), (7, 2, [3, 4]), (4, 1, [4])])
def test_every_group_is_in_a_mini_batch(groups, parts, sizes):
    given = [[rollout(i, outcome=0.0), rollout(i, outcome=1.0)] for i in range(groups)]
    found = grpo.split_groups(given, args_of(f"--num_mini_batches {parts}"))
    assert [len(rollouts) / 2 for rollouts in found] == sizes
    assert [r.position for rollouts in found for r in rollouts] == [i for i in range(groups) for _ in range(2)]


# --- Resume -----------------------------------------------------------------------------------------------------------


def test_the_learning_rate_goes_on_where_it_was_with_the_flags_of_this_start(monkeypatch):
    """Three of ten ticks are done, then --resume_anyway with twice the rate: 0.7 of it, and 0.6 at the next tick."""
    policy: Any = torch.nn.Linear(2, 2)
    before = grpo.make_optimizer(policy, args_of("--learning_rate 1 --total_episodes 640"))[1]
    for _ in range(3):
        before.step()
    state = {"step": 3, "scheduler": before.state_dict()}
    monkeypatch.setattr(checkpoints, "load", lambda *_: dict(state))
    args = args_of("--learning_rate 2 --total_episodes 640")
    optimizer, scheduler = grpo.make_optimizer(policy, args)
    learner = grpo.Learner(policy, None, optimizer, scheduler)
    assert checkpoints.resume(None, learner, args, ONE) == {"step": 3}
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.4, 1.4])
    assert scheduler.get_last_lr() == pytest.approx([1.4, 1.4]) and scheduler.base_lrs == [2.0, 2.0]
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.2, 1.2])


# --- Adapters and teachers --------------------------------------------------------------------------------------------


def test_a_teacher_has_no_adapters_and_is_asked_how_it_packs(monkeypatch):
    args = args_of("--lora_rank 4 --ref_model_name_or_path t --model_revision v2")
    of_teacher = args.of_reference()
    assert (of_teacher.lora_rank, of_teacher.model_name_or_path, of_teacher.model_revision) == (0, "t", None)
    ways = {"policy": "shared", "teacher": "rows"}
    asked = []
    monkeypatch.setattr(grpo, "choose_packing", lambda who, _, args, __: asked.append((who, args)) or ways[who])
    learner: Any = SimpleNamespace(policy="policy", ref_policy="teacher")
    assert grpo.choose_common_packing(learner, None, args, ONE) == "rows"
    assert asked == [("policy", args), ("teacher", of_teacher)]
    ways |= {"policy": "plain", "teacher": "shared"}
    assert grpo.choose_common_packing(learner, None, args, ONE) == "plain"
    assert grpo.choose_common_packing(learner, None, replace(args, ref_model_name_or_path=""), ONE) == "plain"
    assert len(asked) == 5


# --- Turns ------------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def get_added_vocab(self):
        return {}


ENGINE = SimpleNamespace(tokenizer=Words(), eos_ids=[0])
ANSWERS = turns.Environment("game.py", {}, "user", (), {}, first="\0<", between="|", last=">")
SAID = {"role": "assistant", "content": "", "tokens": 2, "cached": 0, "finish_reason": "stop"}
HEARD = {"status": "ok", "reward": 0.5, "done": False, "metrics": {}, "state": None, "seconds": 0.0}


def played(tokens=2, contents=("one",), **fields):
    """A rollout after the policy's last turn; `contents` are all turns so far."""
    prompt = utils.Prompt(0, (5, 6), "", ("7",), ("gsm8k",), "", ANSWERS, {"messages": []})
    own = [{"role": "user", "content": "", "tokens": 0, "status": "ok", "reward": 0.0, "state": None}, SAID]
    said = [own[i % 2 - 1] | {"content": content} for i, content in enumerate(contents)]
    return rollout(tokens=tokens, prompt=prompt, turns=said, finish_reason="stop", **fields)


@pytest.mark.parametrize("tokens, most, limit", [(2, 8, 8), (5, 8, 5), (5, None, 5), (9, 1, 1)])
def test_a_turn_has_no_more_tokens_than_are_left(tokens, most, limit):
    args = args_of(f"--response_length 10 {f'--per_turn_max_tokens {most}' if most else ''}")
    assert grpo.make_request(played(tokens), args).max_tokens == limit


@pytest.mark.parametrize("room, told", [(42, "0123456789abcdefgh"), (30, "01234 [cut]"), (12, " [cut]"), (1, " [cut]")])
def test_a_text_without_room_is_cut_to_its_mark_and_an_empty_one_stays(room, told):
    """The separators take 3 tokens of the room and texts half of the rest, with 8 for the mark: a token a letter."""
    assert ANSWERS.cut(["", "0123456789abcdefgh"], room, Words()) == ["", told]


@pytest.mark.parametrize("text, room, reason", [
    ("heard", 30, "stop"),
    ("heard", 8, "length"),
    ("much too long", 11, "length"),  # cut to its mark it takes all 9 tokens that are left
])  # fmt: skip
def test_a_rollout_that_ends_for_want_of_room_was_cut(monkeypatch, text, room, reason):
    """The turn before ended with a stop; --mask_truncated_completions and --non_stop_penalty look at the rollout."""
    monkeypatch.setattr(environments, "ask", lambda *_: HEARD | {"texts": [text]})
    monkeypatch.setattr(grpo, "start_scoring", lambda *_: None)
    args = args_of(f"--response_length {room} --max_steps 9 --mask_truncated_completions")
    r = played()
    request = grpo.take_answer(r, ENGINE, args)
    assert (r.over, r.finish_reason, request is None) == (reason == "length", reason, reason == "length")
    assert len(r.token_ids) == (2 if r.over else 2 + len("\0<heard>"))
    assert [turn["reward"] for turn in r.turns if "reward" in turn] == [0.5]
    group = [replace(r, outcome=0.0), replace(r, outcome=1.0)]
    assert len(grpo.trainable([group], args)) == (0 if r.over else 2)


@pytest.mark.parametrize("contents", [("1", "heard", "2"), ("1", "heard", "2", "bye"), ("2",)])
def test_verifiers_see_what_the_policy_said_last_and_count_its_own_tokens(monkeypatch, contents):
    seen = []
    monkeypatch.setattr(rewards, "submit", lambda record: seen.append(record) or Future())
    r = played(tokens=2, contents=contents)
    r.append_answer([8, 8, 8])
    grpo.start_scoring(r, ENGINE, args_of())
    (record,) = seen
    assert record.response == "2" and record.num_tokens == 2
    assert not any("state" in turn for turn in r.turns)


# --- grpo_fast.py -----------------------------------------------------------------------------------------------------


def test_groups_are_trained_or_filtered_and_a_lost_start_counts_them_again():
    collector = make_collector("7", "1", flags="--async_steps 1")
    collector.engines_have(0)
    data = collector._collect()
    first, second = data.sampled
    data.shares = [[[[first]]]]
    out = collector.account(data)
    assert out == {
        "batch/groups_started": 4, "batch/groups_trained": 1, "batch/groups_filtered": 1, "batch/groups_in_flight": 2,
        "batch/groups_expired": 0, "val/expired_tokens": 0,
    }  # fmt: skip
    saved = collector.checkpoint(data.cursor)
    assert saved["counts"] == {"started": 2, "trained": 1, "filtered": 1, "expired": 0}
    state = grpo.start_state() | {"step": 1, "cursor": data.cursor} | saved
    again = make_collector("7", "1", flags="--async_steps 1", state=state)
    again.engines_have(data.cursor)
    assert again.account(again._collect())["batch/groups_started"] == 6
    data.sampled = []
    collector.counts["started"] += 1
    collector.account(data)
    assert "groups got lost" in utils.STOP.because and "'started': 5" in utils.STOP.because


def test_a_rollout_without_room_is_over_and_its_environment_is_not_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(grpo, "ask", lambda *_: asked.append("asked"))
    monkeypatch.setattr(grpo, "start_scoring", lambda *_: None)
    for tokens, over in ((2, False), (3, True)):
        prompt = utils.Prompt(0, (5, 6), "", ("7",), ("gsm8k",), "", ANSWERS, {"messages": []})
        r = utils.Rollout(prompt, 0, 0)
        generation = utils.Generation([9] * tokens, [-1.0] * tokens, "stop", [0] * tokens)
        grpo.end_turn(r, generation, ENGINE, args_of("--response_length 3 --max_steps 9"))
        assert (r.over, r.finish_reason) == (over, "stop")
    assert asked == ["asked"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_environment_hears_whether_the_policy_stopped(reason):
    r = played()
    r.turns[-1] = r.turns[-1] | {"finish_reason": reason}
    facts = ANSWERS.episode_of(r, 5)
    assert (facts["stopped"], facts["turn"], facts["steps_left"]) == (reason == "stop", 1, 4)


@pytest.mark.parametrize("own, heard, want", [
    ("calls", "</think><answer>7</answer>", 0.0), ("</think><answer>7</answer>", "heard", 1.0),
])  # fmt: skip
def test_the_format_is_that_of_the_policys_own_turns(own, heard, want):
    """The text of the rollout holds what the tool said, too."""
    r = played(contents=("calls", heard, own), text=f"calls{heard}{own}")
    r.prompt = replace(r.prompt, environment=None)
    r.results = [rewards.RewardResult(1.0, "ok", "7", 0.0)]
    grpo.score_rollouts([r], args_of("--apply_r1_style_format_reward"))
    assert (r.format_score, r.outcome) == (want, 10.0 * want)


class Halves(Words):
    """A tokenizer with two tokens for a letter; a decoder shows half a letter as U+FFFD."""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [part for c in text for part in (ord(c), -ord(c))]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids[: len(ids) // 2 * 2 : 2])) + "\ufffd" * (len(ids) % 2)


def test_a_text_is_not_cut_within_a_character():
    """Separators take 6 tokens of 32, half of the rest are 13, and 5 of these are before the mark: two letters."""
    assert ANSWERS.cut(["0123456789"], 32, Halves()) == ["01 [cut]"]


def test_the_last_value_of_an_environments_number_counts(monkeypatch):
    monkeypatch.setattr(turns, "COUNTED", collections.defaultdict(set))
    r = played(contents=("a", "b", "c", "d", "e"))
    for turn, number in zip(r.turns[1::2], (3.0, 5.0), strict=True):
        turn["metrics"] = {"lives": number}
    metrics = utils.Metrics()
    turns.note_numbers([r], metrics)
    (found,) = metrics.reduce(ONE).values()
    assert found == 5.0


def test_sums_of_a_run_and_shares_of_a_step(monkeypatch):
    """Of 8 rollouts 6 are trained on. The tokens of earlier steps are told, and the sums go on."""
    monkeypatch.setattr(grpo, "note_update", lambda *_: None)
    monkeypatch.setattr(utils, "note_step", lambda *_: None)
    monkeypatch.setattr(grpo.time, "perf_counter", lambda: 7.0)
    args = args_of("--num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 2 --model_dtype float32")
    state = grpo.start_state() | {"tokens": 100.0, "seconds": 5.0, "clock": 0.0, "cursor": 4, "flops_per_second": 1.0}
    learner = SimpleNamespace(scheduler=SimpleNamespace(state_dict=dict))
    run: Any = SimpleNamespace(args=args, world=ONE, state=state, learner=learner, start_time=0.0)
    run.train_prompts = [0] * 8
    run.guards = guards.Guards(args, 1)
    step = grpo.Step(1, gap=guards.Gap(), start_time=-1.0, seconds={"time/training": 2.0, "time/generation": 2.0})
    sums = {"trained": 6, "sampled": 8, "response_tokens": 30, "learner_flops": 1}
    for name, value in (sums | {"val/num_step_tokens": 40, "val/learner_tokens": 25}).items():
        step.metrics.count(name, value)
    found = grpo.step_metrics(run, step)
    grpo.advance(run, step, found)
    want = {
        "other/real_batch_size_ratio": 0.75, "optim/skipped_steps": 0.0, "val/num_total_tokens": 100.0, "epoch": 0.5,
        "episode": 8, "training_step": 1, "val/num_learner_tokens": 25.0,
        "learner_tokens_per_second_overall": 100.0 / 12.0, "learner_tokens_per_second_step": 5.0,
        "val/actor_tokens_per_second": 20.0, "val/response_tokens_per_second": 15.0,
    }  # fmt: skip
    assert {name: found[name] for name in want} == want
    assert (state["tokens"], state["seconds"], state["step"], state["episode"]) == (140.0, 12.0, 1, 8)


def test_every_rank_has_its_own_random_state_again(world, tmp_path):
    """A rank that the checkpoint has no file of takes rank 0's."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    writer = checkpoints.Writer(tmp_path, 3, world)
    random.seed(0)
    writer.save(1, {"policy": model}, optimizer, {"step": 1})
    writer.wait()
    path = tmp_path / "checkpoints" / "step_1"
    random.seed(1)
    torch.save({"step": 7, "rng": utils.rng_state()}, path / "rank_1.pt")
    draws = []
    for rank in range(3):
        of_rank = utils.World(rank, rank, 3, ONE.device)
        assert checkpoints.load(path, {"policy": model}, optimizer, of_rank) == {"step": 1}
        draws.append(random.random())
    assert draws == [random.Random(0).random(), random.Random(1).random(), random.Random(0).random()]


def test_a_checkpoint_has_the_runs_own_state_and_is_due_at_the_end_too(monkeypatch):
    saved = []
    learner: Any = SimpleNamespace(scheduler=SimpleNamespace(state_dict=dict), optimizer=None, modules=lambda _: {})
    run: Any = SimpleNamespace(args=args_of("--checkpoint_state_freq 2"), learner=learner, world=ONE)
    run.state = grpo.start_state() | {"step": 4, "cursor": 32, "tokens": 7.0, "clock": 1.0}
    run.checkpoints = SimpleNamespace(save=lambda step, *_: saved.append((step, _[2])), is_time=lambda: False)
    grpo.save_state(run, lambda: {"more": 1})
    want = grpo.start_state() | {"step": 4, "cursor": 32, "tokens": 7.0, "scheduler": {}, "more": 1}
    assert saved == [(4, want)]
    found = [[step for step in range(1, 8) if grpo.due(every, step, 7)] for every in (3, 0, -1)]
    assert found == [[3, 6, 7], [], []]


def test_metrics_of_a_steps_rollouts_by_hand():
    """Two groups of two: scores 10 and 0, of which one stopped; and 2 and a missing one. The first is kept."""
    first = utils.Prompt(0, (5, 6), "", ("7",), ("gsm8k",))
    second = utils.Prompt(1, (5, 6, 7), "", ("7",), ("gsm8k",))
    rollouts = [
        rollout(tokens=1, prompt=first, score=10.0, outcome=10.0, verifiable=1.0, finish_reason="stop"),
        rollout(tokens=2, prompt=first, score=-0.5, outcome=0.0, verifiable=0.0, finish_reason="length"),
        rollout(tokens=3, prompt=second, score=2.0, outcome=2.0, verifiable=0.2, finish_reason="length"),
        rollout(tokens=4, prompt=second, score=math.nan, outcome=math.nan, verifiable=math.nan, finish_reason="length"),
    ]
    groups = [rollouts[:2], rollouts[2:]]
    for r in rollouts:
        status = "timeout" if math.isnan(r.score) else "ok"
        r.results = [rewards.RewardResult(r.verifiable, status, "7", 0.0)]
    metrics = utils.Metrics()
    args = args_of("--overlong_buffer_length 4")
    utils.note_step(groups, groups, args, metrics)
    found = utils.finish_metrics(metrics.reduce(ONE), args)
    mean = (10 - 0.5 + 2) / 3
    want = {
        "val/stop_rate": 0.25, "batch/missing_rewards": 1, "val/num_step_tokens": 1 + 2 + 2,
        "val/num_sampled_tokens": 10 + 2 * 2 + 2 * 3, "objective/scores": mean, "objective/overlong_penalty": 0.5 / 3,
        "objective/reward_std": math.sqrt((100 + 0.25 + 4) / 3 - mean**2),
        "batch/filtered_prompts_zero": 0, "batch/filtered_prompts_nonzero": 1, "batch/filtered_prompts_solved": 0,
        "objective_kept/gsm8k_reward": 5.0, "objective_kept/gsm8k_correct_rate": 0.5,
        "objective/gsm8k_reward": 4.0, "objective/gsm8k_correct_rate": 2 / 3, "objective/solve_rate": 1 / 3,
        "objective/scores_min": -0.5, "objective/scores_max": 10, "val/prompt_lengths": 2.5,
        "val/prompt_lengths_min": 2, "val/prompt_lengths_max": 3,
    }  # fmt: skip
    assert {name: found[name] for name in want} == pytest.approx(want)
    metrics = utils.Metrics()
    utils.note_step(groups, groups, replace(args, filter_zero_std_samples=False), metrics)
    assert metrics.reduce(ONE)["val/num_step_tokens"] == 1 + 2 + 2 + 3 + 4 + 3
    kinds = [[rollout(outcome=x), rollout(outcome=x)] for x in (0.0, 10.0, 3.0, math.nan)]
    assert [utils.kind_of(group, args) for group in kinds] == ["zero", "solved", "nonzero", "nonzero"]


def test_metrics_that_are_functions_of_others():
    found = utils.finish_metrics({"val/ratio": 1.5, "val/ratio_sq": 2.5}, args_of())
    assert found == {"val/ratio": 1.5, "val/ratio_var": 0.25}
    found = utils.finish_metrics({"objective/scores": 4.0, "objective/kl": 3.0}, args_of("--beta 0.5"))
    assert (found["objective/non_score_reward"], found["objective/rlhf_reward"]) == (1.5, 2.5)


def test_scores_are_compared_as_they_are():
    """10 and 10 + 4e-7 are one number in float32; their group is trained on, so it has advantages."""
    group = [rollout(score=10.0), rollout(score=10.0 + 4e-7)]
    grpo.set_advantages([group], args_of("--advantage_normalization_type standard"))
    assert [r.advantage for r in group] == pytest.approx([-1.0, 1.0], rel=0.06)  # 1e-8 is added to the deviation 2e-7


# --- What went wrong silently in other systems (tests/README.md, Bugs of others) --------------------------------------


def test_moments_that_were_not_restored_end_a_resume():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    zeros = {"w": {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}}
    saved = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
    checkpoints.need_moments(zeros, optimizer)
    with pytest.raises(RuntimeError, match="did not reach"):
        checkpoints.need_moments(saved, optimizer)
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}
    checkpoints.need_moments(saved, optimizer)


def test_the_tokens_trained_on_are_those_that_were_sampled():
    """Though their text is tokenized otherwise."""
    r = rollout(tokens=0)

    class Tokenizer:
        decode = staticmethod(lambda ids, **_: "ab")
        __call__ = staticmethod(lambda text: {"input_ids": [9]})

    tokenizer = Tokenizer()
    engine: Any = SimpleNamespace(tokenizer=tokenizer, eos_ids=[2])
    generation = utils.Generation([7, 8, 2], [-1.0] * 3, "stop", [0] * 3)
    args = args_of()
    assert grpo.end_turn(r, generation, engine, args) is None
    assert r.token_ids.tolist() == [7, 8, 2]


def test_the_tokenizer_adds_nothing_to_what_the_template_writes():
    class Tokenizer:
        apply_chat_template = staticmethod(lambda messages, **_: "<s>hi")
        __call__ = staticmethod(lambda text, add_special_tokens=True: {"input_ids": [1] * add_special_tokens + [1, 7]})

    row = utils.Row(where="", messages=[{"role": "user", "content": "hi"}], ground_truths=["7"], verifiers=["gsm8k"])
    tokenizer: Any = Tokenizer()
    assert utils.make_prompt(row, 0, tokenizer, None, None, time.strftime).token_ids == (1, 7)


def test_the_engines_logprobs_are_those_of_its_temperature():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    sampler = transformers_engine.SeededSampler([utils.Request((5,), 0, 0.5, 1)], torch.device("cpu"), lambda: None)
    chosen = sampler(torch.zeros(1, 1), logits).argmax()
    assert sampler.logprobs[0].item() == pytest.approx(torch.log_softmax(logits / 0.5, -1)[0, chosen].item())


@pytest.mark.runs  # imports vLLM
def test_a_request_finds_no_prefix_of_weights_loaded_before():
    salts = []
    engine: Any = utils.VLLMEngine.__new__(utils.VLLMEngine)
    engine.engine = SimpleNamespace(add_request=lambda name, prompt, params: salts.append(prompt["cache_salt"]))
    engine.stop_strings = []
    engine.eos_ids = [2]
    engine.asleep = 0
    for loads in (1, 1, 2):
        engine.loads = loads
        engine.add("a", utils.Request((5,), 0, 1.0, 1))
    assert salts[0] == salts[1] != salts[2]


def test_a_tied_head_is_sent_under_its_own_name():
    """vLLM's CPU backend keeps a copy of it."""
    embedding = torch.nn.Embedding(4, 2)
    model: Any = SimpleNamespace(
        named_parameters=lambda: [("model.embed_tokens.weight", embedding.weight)], named_buffers=list, state_dict=dict
    )
    model.get_output_embeddings = model.get_input_embeddings = lambda: embedding
    assert dict(utils.named_weights(model)).keys() == {"model.embed_tokens.weight", "lm_head.weight"}


def test_groups_that_outlasted_an_update_are_trained_on():
    """To drop them would drop long responses: staleness is bounded where prompts are admitted."""
    collector = make_collector("7", "1", flags="--async_steps 1")
    collector.engines_have(0)
    collector.engines_have(2)
    groups = collector._collect().groups
    assert collector.version == 1
    assert [r.versions.max() for group in groups for r in group] == [0] * 4


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_group_is_started_that_would_be_too_old(ahead):
    """A step has 2 groups: those of `ahead` steps more may be under way."""
    collector = make_collector("7", flags=f"--async_steps {ahead}")
    collector.engines_have(0)
    assert len(collector.in_flight) == 2 * (ahead + 1)
