"""Lines that could be changed without a test that failed: each test here holds one (tests/README.md, Mutations)."""

import math
import random
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import grpo
import grpo_fast
import rewards
import utils
from scripts.parts import adapters, checkpoints, environments, turns
from tests.test_learner import make_args, make_rollouts, run_update
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


# ---------------------------------------------------------------------------------------------------------------------
# Metrics
# ---------------------------------------------------------------------------------------------------------------------


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
    metrics.add("loss/policy_avg", 0.0, 1.0)
    metrics.add("loss/kl_avg", 0.0, 1.0)
    metrics.add("loss/entropy_avg", 0.0, 1.0)
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
    gap, d = utils.Gap(), torch.tensor([1.0, 1.2, 0.8, 9.0]).log()
    gap.add(d[None], torch.zeros(1, 4), torch.arange(3))
    found = gap.check(args_of("--max_logprob_gap 0"), ONE, "now")
    absolute = d[:3].abs()
    assert found["val/rho"] == pytest.approx(1.0)
    assert found["val/rho_se"] == pytest.approx(math.sqrt(0.08 / 3 / 3))
    assert found["debug/vllm_vs_local_logprob_diff_mean"] == pytest.approx(float(absolute.mean()))
    assert found["debug/vllm_vs_local_logprob_diff_max"] == pytest.approx(-math.log(0.8))
    assert found["debug/vllm_local_reverse_kl"] == pytest.approx(-float(d[:3].sum()) / 3, rel=1e-5)


def test_a_half_right_response_does_not_pass():
    """Two verifiers, of which one says yes: a verdict of 1 of 2."""
    prompt, metrics = utils.Prompt(0, (5,), "", ("7", "8"), ("gsm8k", "gsm8k")), utils.Metrics()
    verdicts = [1.0, 2.0, 0.0, 1.0]
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
    policy, args = SimpleNamespace(flops=lambda tokens, pairs, responses: tokens + 100 * responses), args_of(flags)
    learner: Any = SimpleNamespace(policy=policy, ref_policy=policy if "--load_ref_policy" in flags else None)
    step = grpo.Step(1, packs=[[[[rollout(tokens=3), rollout(tokens=4)]]]])
    grpo.note_update(learner, step, args)
    found = step.metrics.reduce(ONE)
    assert found["learner_flops"] == forwards * (1 + 7 + 700)  # a token of the prompt is shared
    assert (found["trained"], found["val/learner_tokens"], found["other/packed_ratio"]) == (2, 8, 0.5)


@pytest.mark.parametrize("format_score, stopped, want", [
    (1.0, True, 10.0), (0.0, True, 0.0), (1.0, False, -3.0), (0.0, False, -3.0),
])  # fmt: skip
def test_a_response_that_was_cut_has_its_penalty_whatever_its_format(format_score, stopped, want):
    line = "--apply_r1_style_format_reward --non_stop_penalty --non_stop_penalty_value -3"
    assert rewards.combine_rewards(args_of(line), 1.0, format_score, stopped) == (want, want)


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups, parts, sizes", [(5, 3, [1, 2, 2]), (2, 4, [0, 1, 0, 1]), (7, 2, [3, 4]), (4, 1, [4])])
def test_every_group_is_in_a_mini_batch(groups, parts, sizes):
    given = [[rollout(i, outcome=0.0), rollout(i, outcome=1.0)] for i in range(groups)]
    found = grpo.split_groups(given, args_of(f"--num_mini_batches {parts}"))
    assert [len(rollouts) / 2 for rollouts in found] == sizes
    assert [r.position for rollouts in found for r in rollouts] == [i for i in range(groups) for _ in range(2)]


def test_packs_stay_within_their_budget_when_they_are_evened_out():
    """Those that only the first, uneven packing fits stay as they are."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randint(1, 9) for _ in range(rng.randint(2, 12))]
        bins = utils.pack_bins(tokens, tokens, 10)
        assert sorted(i for items in bins for i in items) == list(range(len(tokens)))
        assert max(sum(tokens[i] for i in items) for items in bins) <= 10


# ---------------------------------------------------------------------------------------------------------------------
# Resume
# ---------------------------------------------------------------------------------------------------------------------


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
    assert grpo.load_state(None, learner, args, ONE) == {"step": 3}
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.4, 1.4])
    assert scheduler.get_last_lr() == pytest.approx([1.4, 1.4]) and scheduler.base_lrs == [2.0, 2.0]
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.2, 1.2])


def test_a_checkpoint_has_the_random_state_and_leaves_rates_and_decays_as_they_are(world, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    writer = checkpoints.Writer(tmp_path, 3, world)
    writer.save(1, {"policy": model}, optimizer, {"step": 1})

    def draw():
        return random.random(), float(np.random.random()), float(torch.rand(()))

    want = draw()
    writer.wait()
    other = torch.nn.Linear(2, 2)
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=3.0, weight_decay=0.25)
    path = tmp_path / "checkpoints" / "step_1"
    assert checkpoints.load(path, {"policy": other}, its_optimizer, world) == {"step": 1}
    assert draw() == want
    assert torch.equal(model.weight, other.weight)
    (group,) = its_optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (3.0, 0.25)
    moments = [o.state[m.weight]["exp_avg"] for o, m in ((optimizer, model), (its_optimizer, other))]
    assert torch.equal(*moments) and moments[0].abs().sum() > 0


# ---------------------------------------------------------------------------------------------------------------------
# Sequence parallelism
# ---------------------------------------------------------------------------------------------------------------------


def test_one_rank_of_those_that_share_packs_reports_and_counts(monkeypatch):
    """Four ranks, of which each two have the same packs. What the other three say is as much as this rank says."""
    args, batch = (
        args_of("--sequence_parallel_size 2 --max_logprob_gap 0"),
        SimpleNamespace(places=[1] * 6, responses=2),
    )
    worlds = [utils.World(rank, rank, 4, torch.device("cpu")) for rank in range(4)]
    assert [utils.leads(args, world) for world in worlds] == [True, False, True, False]
    monkeypatch.setattr(utils, "all_reduce", lambda values, *_: [4.0 * v for v in values])
    totals = grpo.count_totals([batch, batch], args, worlds[1])
    assert totals == grpo.Totals(4 * 12 / 2, 4 * 4 / 2)
    monkeypatch.setattr(utils, "all_reduce", lambda values, *_: values)
    gap = utils.Gap()
    gap.add(torch.ones(1, 3), torch.zeros(1, 3), torch.arange(3))
    assert gap.reduce(worlds[0], True)[0][:2] == [3.0, 3.0]
    assert gap.check(args, worlds[1], "now") == {} and gap.check(args, worlds[2], "now")["val/rho"] > 2


@pytest.mark.parametrize("leads", [True, False])
def test_a_rank_that_does_not_lead_has_no_metrics_of_its_update(tiny_models, world, monkeypatch, leads):
    monkeypatch.setattr(utils, "leads", lambda *_: leads)
    _, found = run_update(make_args(tiny_models()), world, [make_rollouts(groups=1)])
    assert found.pop("bad") == 0 and bool(found) == leads


# ---------------------------------------------------------------------------------------------------------------------
# Adapters and teachers
# ---------------------------------------------------------------------------------------------------------------------


def test_no_two_adapters_start_alike(tiny_models, world):
    """Those of one shape too: of a query and an output matrix, of each layer."""
    policy = grpo.load_policy(make_args(tiny_models(), "--lora_rank", 4), world)
    halves = [tensor for name, tensor in adapters.adapter_weights(policy.model) if ".lora_A." in name]
    assert len(halves) == 14
    assert len({tuple(half.flatten()[:8].tolist()) for half in halves}) == 14


def test_a_teacher_has_no_adapters_and_is_asked_how_it_packs(monkeypatch):
    args = args_of("--lora_rank 4 --ref_model_name_or_path t --model_revision v2")
    of_teacher = args.of_reference()
    assert (of_teacher.lora_rank, of_teacher.model_name_or_path, of_teacher.model_revision) == (0, "t", None)
    ways, asked = {"policy": "shared", "teacher": "rows"}, []
    monkeypatch.setattr(grpo, "choose_packing", lambda who, _, args, __: asked.append((who, args)) or ways[who])
    learner: Any = SimpleNamespace(policy="policy", ref_policy="teacher")
    assert grpo.choose_common_packing(learner, None, args, ONE) == "rows"
    assert asked == [("policy", args), ("teacher", of_teacher)]
    ways |= {"policy": "plain", "teacher": "shared"}
    assert grpo.choose_common_packing(learner, None, args, ONE) == "plain"
    assert grpo.choose_common_packing(learner, None, replace(args, ref_model_name_or_path=""), ONE) == "plain"
    assert len(asked) == 5


# ---------------------------------------------------------------------------------------------------------------------
# Turns
# ---------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("text, room, reason", [("heard", 30, "stop"), ("heard", 8, "length")])
def test_a_rollout_that_ends_for_want_of_room_was_cut(monkeypatch, text, room, reason):
    """The turn before ended with a stop; --mask_truncated_completions and --non_stop_penalty look at the rollout."""
    answer = {
        "status": "ok",
        "texts": [text],
        "reward": 0.5,
        "done": False,
        "metrics": {},
        "state": None,
        "seconds": 0.0,
    }
    monkeypatch.setattr(environments, "ask", lambda *_: dict(answer))
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
def test_verifiers_see_what_the_policy_said_last(monkeypatch, contents):
    seen = []
    monkeypatch.setattr(rewards, "submit", lambda record: seen.append(record.response) or Future())
    r = played(contents=contents)
    grpo.start_scoring(r, ENGINE, args_of())
    assert seen == ["2"] and not any("state" in turn for turn in r.turns)


# ---------------------------------------------------------------------------------------------------------------------
# grpo_fast.py
# ---------------------------------------------------------------------------------------------------------------------


def test_staleness_is_that_of_the_policys_own_tokens():
    """Step 4 trains weights of update 3. Tokens of versions 2 and 3 are one and no updates old, an answer's none."""
    r = rollout(tokens=2, versions=[2, 3])
    r.append_answer([8, 8])
    metrics = utils.Metrics()
    grpo_fast.note_staleness([[[[r]]]], 4, args_of("--async_steps 1"), metrics)
    found = metrics.reduce(ONE)
    assert found["val/num_steps_off_policy"] == 0.5
    assert (found["val/model_step_min"], found["val/model_step"], found["val/model_step_max"]) == (2, 2.5, 3)


def test_groups_are_trained_or_filtered_and_a_lost_start_counts_them_again():
    collector = make_collector("7", "1", flags="--async_steps 1")
    collector.engines_have(0)
    data = collector._collect()
    first, second = data.sampled
    data.shares = [[[[first]]]]
    out = collector.account(data)
    assert out == {
        "batch/groups_started": 4, "batch/groups_trained": 1, "batch/groups_filtered": 1, "batch/groups_in_flight": 2,
    }  # fmt: skip
    saved = collector.checkpoint(data.cursor)
    assert saved["counts"] == {"started": 2, "trained": 1, "filtered": 1}
    state = grpo.start_state() | {"step": 1, "cursor": data.cursor} | saved
    again = make_collector("7", "1", flags="--async_steps 1", state=state)
    again.engines_have(data.cursor)
    assert again.account(again._collect())["batch/groups_started"] == 6
    data.sampled = []
    collector.counts["started"] += 1
    with pytest.raises(RuntimeError, match="groups got lost: .*'started': 5"):
        collector.account(data)


def learn(monkeypatch, flags):
    """What run_learner does in two steps, in order, with doubles in place of all that computes."""
    done = []
    engines = SimpleNamespace(watchdog=SimpleNamespace(beat=lambda: None), spent=lambda: [])
    engines.wait_loaded = lambda version: done.append(f"wait {version}")
    line = "--num_unique_prompts_rollout 1 --num_samples_per_prompt_rollout 2 --total_episodes 4 --local_eval_every 2"
    args = args_of(f"{line} --model_dtype float32 --max_logprob_gap 0.25 {flags}")
    collector = SimpleNamespace(engines=engines, next=grpo_fast.StepData, account=lambda _: {}, checkpoint=dict)
    sender = SimpleNamespace(engines=engines, metrics={})
    run = SimpleNamespace(args=args, state=grpo.start_state(), learner=SimpleNamespace(policy=None), world=ONE)
    doubles = {
        "join": lambda *_: ONE,
        "plan_weights": lambda *_: [],
        "start_sender": lambda *_: sender,
        "make_collector": lambda *_: collector,
        "collect_garbage_by_hand": lambda: None,
        "scatter": lambda *_: grpo_fast.LearnerData([], [], 0, frozenset()),
        "send_weights": lambda *all_of: done.append(f"send {all_of[4]}"),
        "check_engines": lambda _, version, *__: done.append(f"check {version}") or {},
        "engine_metrics": lambda *_: {},
        "shows_engines": lambda *_: False,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(grpo_fast, name, double)
    doubles = {
        "set_up": lambda *_: run,
        "starts": lambda *_: [(0, "at the start", None)],
        "start_log": lambda *_: None,
        "train": lambda run, step, probe, args: done.append(f"train {step.number}, gap {args.max_logprob_gap}"),
        "step_metrics": lambda *_: {},
        "end_step": lambda run, step, *_: done.append(f"end {step.number}"),
        "save_state": lambda *_: "",
        "finish": lambda run: run,
    }
    for name, double in doubles.items():
        monkeypatch.setattr(grpo, name, double)
    roles: Any = SimpleNamespace(index=0, learners=1, engines=1)
    grpo_fast.run_learner(args, roles, SimpleNamespace(store=None))
    return done


def test_an_evaluation_waits_for_the_weights_of_its_step_and_a_gap_ends_a_run(monkeypatch):
    """With --async_steps the gap of older rollouts says nothing, and that of fresh ones is measured."""
    assert learn(monkeypatch, "--async_steps 0") == [
        "send 0", "check 0",
        "train 1, gap 0.25", "send 1", "end 1",
        "train 2, gap 0.25", "send 2", "wait 2", "end 2",
    ]  # fmt: skip
    assert learn(monkeypatch, "--async_steps 1") == [
        "send 0", "check 0",
        "train 1, gap 0.0", "send 1", "check 1", "end 1",
        "train 2, gap 0.0", "send 2", "check 2", "end 2",
    ]  # fmt: skip
