"""scripts/forks/*.diff apply, are short, and are their papers' formulas, for every split into packs."""

import collections
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import types
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from scripts.parts import packing, probe
from tests import programs, test_credit, test_learner, test_math
from tests.conftest import REPO
from tests.test_teacher import plain

FORKS = {path.stem: path for path in sorted((REPO / "scripts" / "forks").glob("*.diff"))}
MOST_LINES = 20


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Function name -> directory with grpo.py, grpo_fast.py and utils.py as scripts/forks/name.diff makes them, and
    grpo.py as a module, which has utils.py's as grpo.utils."""
    made = {}

    def get(name):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            for file in ("grpo.py", "grpo_fast.py", "utils.py"):
                (directory / file).write_text((REPO / file).read_text())
            for name_of_link in ("scripts", "rewards.py"):  # for runs of the copy
                (directory / name_of_link).symlink_to(REPO / name_of_link)
            done = subprocess.run(["git", "apply", str(FORKS[name])], cwd=directory, capture_output=True, text=True)
            if done.returncode:
                fix = "make the diff again; on a branch of your own, whose lines these are now, this test may fail"
                pytest.fail(f"{FORKS[name].name} does not apply: {fix}\n{done.stderr}", pytrace=False)
            with pytest.MonkeyPatch.context() as patch:
                if "+++ b/utils.py" in FORKS[name].read_text():
                    patch.setitem(sys.modules, "utils", load(f"utils_{name}", directory / "utils.py"))
                made[name] = directory, load(f"grpo_{name}", directory / "grpo.py")
        return made[name]

    return get


def changed_lines(path):
    _, *files = re.split(r"^--- a/.*\n\+\+\+ b/.*\n", path.read_text(), flags=re.MULTILINE)
    return sum(line[0] in "+-" for body in files for line in body.splitlines())


def test_all_are_here():
    assert set(FORKS) == set(FLAGS)


@pytest.mark.parametrize("name", FORKS)
def test_it_applies_and_is_short(forked, name):
    """In at most 20 changed lines, with paper, formula and commands in its head, as formatted as grpo.py is."""
    directory, _ = forked(name)
    head = FORKS[name].read_text().partition("\n--- a/")[0]
    assert changed_lines(FORKS[name]) <= MOST_LINES
    assert re.search(r"arXiv:\d{4}\.\d{5}", head) and f"git apply scripts/forks/{name}.diff" in head
    tried = subprocess.run(["patch", "-p1", "--dry-run", "-R", "-i", str(FORKS[name])], cwd=directory)
    assert tried.returncode == 0
    for command in ("check --ignore I", "format --check"):  # without rewards.py beside it imports sort otherwise
        line = [sys.executable, "-m", "ruff", *command.split(), "--config", str(REPO / "pyproject.toml"), "."]
        done = subprocess.run(line, cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_has_every_diff_with_its_lines():
    """scripts/forks/README.md."""
    table = (REPO / "scripts" / "forks" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.diff` \|.*\| (\d+) \|", table, re.MULTILINE)
    assert {name: int(lines) for name, lines in rows} == {name: changed_lines(path) for name, path in FORKS.items()}


# What a fork is asked for in the command of its head
FLAGS = {
    "adaptive_kl": [],
    "competence": [],
    "dppo": ["--loss_fn", "dppo", "--num_mini_batches", "4"],
    "dr_grpo": [],
    "echo": [],
    "entropy_target": [],
    "gdpo": ["--no_filter_zero_std_samples"],
    "gmpo": "--loss_fn gmpo --loss_denominator sequence --clip_lower 0.33 --clip_higher 0.49".split(),
    "history": ["--no_filter_zero_std_samples"],
    "kl_twice": [],
    "learnability": [],
    "luffy": [],
    "maxrl": ["--advantage_normalization_type", "maxrl"],
    "p3o": ["--loss_fn", "p3o", "--no_use_rho_correction"],
    "pods": ["--pods_samples", "2"],
    "prompt_mean": ["--loss_denominator", "4"],
    "reinforce_pp_baseline": [],
    "repetition": ["--repetition_penalty", "0.3"],
    "rlep": [],
    "rloo": ["--advantage_normalization_type", "rloo"],
    "sapo": ["--loss_fn", "sapo", "--loss_denominator", "sequence"],
    "sdpo": [],
    "shrinkage": ["--no_filter_zero_std_samples"],
    "teacher_kl": [],
    "teacher_top_k": [],
    "top_entropy": [],
    "ttrl": [],
    "turn_index": ["--turn_credit"],
    "vespo": ["--loss_fn", "vespo"],
    "vineppo": [],
    "vip": [],
}


@pytest.mark.parametrize("name", FORKS)
def test_the_split_into_packs_is_no_part_of_it(forked, tiny_models, world, monkeypatch, name):
    """The test of grpo.py's losses, on the fork, with the advantages that the fork gives to scores of its own."""
    _, grpo = forked(name)
    make_rollouts = test_learner.make_rollouts

    def scored(**options):
        rollouts = make_rollouts(**options)
        args = test_learner.make_args("m", *FLAGS[name], "--num_samples_per_prompt_rollout", "3")
        for r, score in zip(rollouts, (10.0, 0.0, 0.0, 4.0, 10.0, 0.0, 0.0, 0.0, 7.0, 10.0, 10.0, 0.0), strict=True):
            r.score = r.outcome = score
            r.results = [types.SimpleNamespace(score=score), types.SimpleNamespace(score=float(r.sample))]
        for i in range(0, len(rollouts), 3):
            grpo.set_advantages([rollouts[i : i + 3]], args)
        return rollouts

    if name == "repetition":
        monkeypatch.setattr(grpo, "REPEATED", 1)
    monkeypatch.setattr(test_learner, "grpo", grpo)
    monkeypatch.setattr(test_learner, "make_rollouts", scored)
    args = test_learner.make_args(tiny_models(), *FLAGS[name])
    test_learner.assert_no_split_shows(args, world, monkeypatch, [("shared", 30), ("plain", 60)], [5])


def test_sapo_by_hand(forked, monkeypatch):
    """Ratios 3 and 1/3, tau 1 and 1.05: -2 x 4 sigmoid(2) and 3 x 4 / 1.05 sigmoid(-0.7), and their slopes."""
    monkeypatch.setattr(test_math, "grpo", forked("sapo")[1])
    new, old, advantages = test_math.log(0.6, 0.2), test_math.log(0.2, 0.6), test_math.per_token(2.0, -3.0)
    loss, ratio, clipped, grad = test_math.loss_of(new, old, advantages, "sapo")
    assert_close(loss, test_math.per_token(-8 * 0.8807970779778823, 12 / 1.05 * 0.3318122278318339))
    assert_close(ratio, test_math.per_token(3.0, 1 / 3))
    # -A ratio 4 w (1 - w), w (1 - w) = 0.10499358540350662 and 0.22171287329310904
    assert_close(grad, test_math.per_token(-2 * 3 * 4 * 0.10499358540350662, 3 / 3 * 4 * 0.22171287329310904))
    assert not clipped.any()
    assert_slopes(lambda x: test_math.loss_of(x, old, advantages, "sapo")[0], new, grad)
    test_math.test_on_policy_every_loss_has_the_policy_gradient("sapo")
    for gap in (500.0, -500.0, math.inf, -math.inf):
        test_math.test_huge_log_ratios_stay_finite("sapo", gap)


def test_dppo_by_hand(forked, monkeypatch):
    """0.01 -> 0.05 has ratio 5 and trains, 0.6 -> 0.9 has 1.5 and is dropped: it moved by 0.3, more than 0.2. Where
    A < 0 the same downwards; a move against the advantage is never dropped. A weight is 20 at most."""
    monkeypatch.setattr(test_math, "grpo", forked("dppo")[1])
    new = test_math.log(0.05, 0.9, 0.9, 0.1, 0.55, 0.9, 0.15)
    old = test_math.log(0.01, 0.6, 0.6, 0.6, 0.6, 0.6, 0.005)
    advantages = test_math.per_token(2.0, 2.0, -1.0, -1.0, -1.0, 0.0, 1.0)
    loss, ratio, clipped, grad = test_math.loss_of(new, old, advantages, "dppo")
    weights = [5.0, 0.0, 1.5, 0.0, 0.55 / 0.6, 1.5, 20.0]  # 0.15 / 0.005 is 30
    want = [-a * w for a, w in zip(advantages.flatten().tolist(), weights, strict=True)]
    assert grad.flatten().tolist() == pytest.approx(want) and loss.flatten().tolist() == pytest.approx(
        [w * x for w, x in zip(want, new.flatten().tolist(), strict=True)]
    )
    assert clipped.flatten().tolist() == [False, True, False, True, False, False, False]
    assert ratio.flatten().tolist() == pytest.approx((new - old).exp().flatten().tolist())
    test_math.test_on_policy_every_loss_has_the_policy_gradient("dppo")
    for gap in (500.0, -500.0, math.inf, -math.inf):
        test_math.test_huge_log_ratios_stay_finite("dppo", gap)


def test_gmpo_by_hand(forked, monkeypatch):
    """Ratios 2 and 0.5, bounds 0.8 and 1.2. Where A > 0 the first is clipped, sqrt(1.2 x 0.5), else the second,
    sqrt(2 x 0.8). A third token, with ratio 9, is masked."""
    monkeypatch.setattr(test_math, "grpo", forked("gmpo")[1])
    new, old = test_math.log(0.4, 0.2, 0.9), test_math.log(0.2, 0.4, 0.1)
    mask = torch.tensor([[True, True, False]])
    for advantage, mean, trained in ((2.0, math.sqrt(0.6), (0, 1)), (-3.0, math.sqrt(1.6), (1, 0))):
        loss, ratio, clipped, grad = test_math.loss_of(new, old, advantage, "gmpo", mask=mask)
        assert loss.tolist()[0] == pytest.approx([-advantage * mean] * 2 + [0.0])
        assert grad.tolist()[0] == pytest.approx([-advantage * mean * x for x in (*trained, 0)])
        assert clipped.tolist()[0] == [not trained[0], not trained[1], False]
        assert ratio.tolist()[0] == pytest.approx([2.0, 0.5, 1.0])
    ours_alone("gmpo")


def test_vespo_by_hand(forked, monkeypatch):
    """Ratios 2 and 0.75: W is 1.5. phi is 1.5^2 exp(-3/2) = 0.50204 where A > 0, else 1.5^3 exp(-1) = 1.24159."""
    monkeypatch.setattr(test_math, "grpo", forked("vespo")[1])
    new, old = test_math.log(0.4, 0.3, 0.9), test_math.log(0.2, 0.4, 0.1)
    mask = torch.tensor([[True, True, False]])
    for advantage, kernel in ((2.0, 0.5020428607), (-3.0, 1.2415930985)):
        loss, ratio, clipped, grad = test_math.loss_of(new, old, advantage, "vespo", mask=mask)
        assert grad.tolist()[0] == pytest.approx([-advantage * kernel] * 2 + [0.0])
        assert loss.tolist()[0] == pytest.approx([-advantage * kernel * x for x in (math.log(0.4), math.log(0.3), 0)])
        assert ratio.tolist()[0] == pytest.approx([2.0, 0.75, 1.0]) and not clipped.any()
    ours_alone("vespo")


def test_p3o_by_hand(forked, tiny_models, world, monkeypatch):
    """Ratios to the engine 0.5 and 3, e = 0.8: weights 0.5 and 0.8, and 0.2 times the KL 2 - 1 - log 2 and
    1/3 - 1 + log 3, with slopes 1 - 2 and 1 - 1/3. Of an update in which one token in three has the ratio 3 and the
    others 1, e is (5/3)^2 / (11/3) = 25/33, for every split."""
    _, grpo = forked("p3o")
    new = test_math.log(0.2, 0.6, 0.9).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    engine = test_math.log(0.4, 0.2, 0.1)
    monkeypatch.setattr(test_math, "grpo", grpo)
    advantages = test_math.per_token(2.0, -3.0, 5.0)
    inputs = test_math.inputs_of(
        mask, new_logprobs=new, old_logprobs=engine, vllm_logprobs=engine, advantages=advantages
    )
    out = grpo.policy_loss(inputs, grpo.GRPOFlags(loss_fn="p3o", ess=0.8))
    kls = (1 - math.log(2), math.log(3) - 2 / 3)
    want = [-2 * 0.5 * math.log(0.2) + 0.2 * kls[0], 3 * 0.8 * math.log(0.6) + 0.2 * kls[1], 0.0]
    assert out.per_token.tolist()[0] == pytest.approx(want)
    (grad,) = torch.autograd.grad(out.per_token.sum(), new)
    assert grad.tolist()[0] == pytest.approx([-1.0 - 0.2, 2.4 + 0.2 * 2 / 3, 0.0])
    assert out.clipped.tolist()[0] == [False, True, False]

    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args(tiny_models(), *FLAGS["p3o"])
    rollouts = [r for r in test_learner.make_rollouts() if len(r.token_ids) >= 3]
    model = grpo.utils.load_causal_lm(args).float()
    for i, r in enumerate(rollouts):
        n = len(r.token_ids) // 3 * 3
        ratios = torch.tensor([3.0, 1.0, 1.0] * (n // 3))
        r = replace(r, token_ids=r.token_ids[:n], mask=r.mask[:n], versions=r.versions[:n], logprobs=r.logprobs[:n])
        logprobs = with_gradient(model, r, args.temperature).detach() - ratios.log()
        rollouts[i] = replace(r, logprobs=logprobs.numpy())
    assert len(rollouts) > 5
    for pack_length in (30, 1000):
        _, metrics = sgd_update(grpo, args, world, rollouts, pack_length)
        assert metrics["policy/ess"] == pytest.approx(25 / 33, rel=1e-4)


def ours_alone(loss_fn):
    """What tests/test_math.py asks of every loss, of test_math's grpo."""
    test_math.test_on_policy_every_loss_has_the_policy_gradient(loss_fn)
    test_math.test_off_policy_no_loss_mixes_the_responses_of_a_row(loss_fn)
    for gap in (500.0, -500.0, math.inf, -math.inf):
        test_math.test_huge_log_ratios_stay_finite(loss_fn, gap)


def test_luspo_is_gspo_over_the_number_of_responses():
    """No fork: 1/2 sum_i T_i L_i for responses of 3 tokens and 1, with clipped ratios of the responses. Of the first
    it is (8 x 1 x 1)^(1/3) = 2, bound 1.2, A = 1; of the second 1 / 2, A = -1, bound 0.8."""
    new, old = test_math.log(0.8, 0.3, 0.3, 0.2), test_math.log(0.1, 0.3, 0.3, 0.4)
    advantages = test_math.per_token(1.0, 1.0, 1.0, -1.0)
    seq_ids = torch.tensor([[1, 1, 1, 2]])
    loss, *_ = test_math.loss_of(new, old, advantages, "gspo", seq_ids=seq_ids)
    got = test_math.aggregate(loss, torch.ones_like(seq_ids, dtype=torch.bool), seq_ids, "2", 4, 2)
    assert float(got) == pytest.approx((3 * -1.2 + 1 * 0.8) / 2)


@pytest.mark.parametrize(
    "scores, want",
    [
        # three of seven: 0 0 10 has variance 200/9, 0 9 10 has 182/9, 5 9 10 has 14/3; mean 10/3
        ([10.0, 0.0, 0.0, 4.0, 9.0, math.nan, 5.0, 5.0], {0: math.sqrt(2), 1: -math.sqrt(0.5), 2: -math.sqrt(0.5)}),
        # 0 9 10 has the mean 19/3 and the variance 182/9
        ([0.0, 9.0, 10.0, 5.0, math.nan, 8.0, 8.0, 8.0], {i: x / math.sqrt(182) for i, x in enumerate((-19, 8, 11))}),
        ([math.nan, 3.0, math.nan, 5.0] + [math.nan] * 4, {1: -1.0, 3: 1.0}),  # no more are there
        ([math.nan] * 8, {}),
    ],
)
def test_pods_by_hand(forked, monkeypatch, scores, want):
    """Which three rollouts are trained on, and their advantages, of which the others are no part."""
    _, grpo = forked("pods")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args("m", "--pods_samples", "3", "--num_samples_per_prompt_rollout", "8")
    group = grpo.new_group(grpo.utils.Prompt(0, (1, 2, 3), "", (), ()), 0, 8)
    for r, score in zip(group, scores, strict=True):
        r.append(grpo.utils.Generation([5], [-1.0], "stop", [0]))
        r.score = r.outcome = score
    grpo.set_advantages([group], args)
    kept = {r.sample: r.advantage for r in grpo.trainable([group], args)}
    assert kept == pytest.approx(want)


def test_prompt_mean_by_hand(forked, tiny_models, world, monkeypatch):
    """Ratio 1: the loss is -1/P sum_p (sum_i A_i n_i) / n_p, for four prompts of three responses each."""
    _, grpo = forked("prompt_mean")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    flags = ["--no_use_rho_correction", "--loss_denominator", "4", "--advantage_normalization_type", "centered"]
    args, rollouts = test_learner.make_args(tiny_models(), *flags), test_learner.make_rollouts()
    groups = [rollouts[i : i + 3] for i in range(0, 12, 3)]
    want = 0.0
    for group in groups:
        for r, score in zip(group, (5.0, 1.0, 0.0), strict=True):
            r.score = score
        sizes = [len(r.token_ids) for r in group]
        want -= sum(a * n for a, n in zip((3.0, -1.0, -2.0), sizes, strict=True)) / sum(sizes) / 4
        grpo.set_advantages([group], args)
    _, metrics = test_learner.run_update(args, world, [rollouts])
    assert metrics["loss/policy_avg"] == pytest.approx(want, rel=1e-5)


def test_gdpo_by_hand(forked):
    """Rewards (1, 0, 0, 0) and (2, 2, 4, 0): their normalized values are added; a missing one counts in neither."""
    _, grpo = forked("gdpo")
    args = test_learner.make_args("m")
    prompt = grpo.utils.Prompt(0, (1, 2, 3), "", (), ())
    group = [grpo.Rollout(prompt, 0, j) for j in range(4)]
    for r, scores in zip(group, ((1, 2), (0, 2), (0, 4), (0, 0)), strict=True):
        r.results = [types.SimpleNamespace(score=float(score)) for score in scores]
        r.score = float(sum(scores))
    grpo.set_advantages([group], args)
    first = math.sqrt(3 / 16)  # deviation of 1 0 0 0, mean 1/4; that of 2 2 4 0, mean 2, is sqrt(2)
    want = [0.75 / first, -0.25 / first, -0.25 / first + 2 / math.sqrt(2), -0.25 / first - 2 / math.sqrt(2)]
    assert [r.advantage for r in group] == pytest.approx(want, rel=1e-6)
    group[3].results = [types.SimpleNamespace(score=math.nan)] * 2
    group[3].score = math.nan
    grpo.set_advantages([group], args)
    deviations = [math.sqrt(2 / 9), math.sqrt(8 / 9)]  # of 1 0 0 and of 2 2 4
    want = [2 / 3 / deviations[0] - 2 / 3 / deviations[1], -1 / 3 / deviations[0] - 2 / 3 / deviations[1]]
    want.append(-1 / 3 / deviations[0] + 4 / 3 / deviations[1])
    assert [r.advantage for r in group] == pytest.approx([*want, 0.0], rel=1e-6)


def test_gdpos_advantages_are_no_mistake_to_a_run_that_asks(forked):
    """A run asks with made-up rollouts, which have what the fork looks at: each verifier's score."""
    _, grpo = forked("gdpo")
    args = grpo.utils.parse_args(grpo.Args, ["--model_name_or_path", "x", "--no_filter_zero_std_samples"])
    assert probe.differences(args) == []


def test_top_entropy_by_hand(forked, tiny_models, world, monkeypatch):
    """A fifth of all tokens keeps its advantage, that of the highest entropies, in whatever mini-batch they are."""
    _, grpo = forked("top_entropy")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args(tiny_models(), "--no_use_rho_correction", "--learning_rate", "0")
    original = grpo.Batch.loss_inputs
    seen = []

    def loss_inputs(batch, new_logprobs, entropy):
        pairs = zip(entropy[batch.response_mask].tolist(), batch.advantages[batch.response_mask].tolist(), strict=True)
        seen.extend(pairs)
        return original(batch, new_logprobs, entropy)

    monkeypatch.setattr(grpo.Batch, "loss_inputs", loss_inputs)
    for sizes in ((12,), (5, 7)):
        seen.clear()
        rollouts = test_learner.make_rollouts()
        for r in rollouts:
            r.advantage = 1.0
        parts = [rollouts[: sizes[0]], rollouts[sizes[0] :]][: len(sizes)]
        test_learner.run_update(args, world, parts, optimizer="adam")
        ordered = sorted(seen, reverse=True)
        kept = sum(len(r.token_ids) for r in rollouts) / 5
        advantages = [advantage for _, advantage in ordered]
        assert 0 < sum(advantages) <= kept + 1 and sum(advantages) >= kept - 1
        assert advantages == sorted(advantages, reverse=True)  # ones, then zeros


def top_classes(p, tokens):
    """The probabilities of some tokens, and of all others together."""
    top = p.gather(1, tokens)
    return torch.cat([top, 1 - top.sum(1, keepdim=True)], 1)


@pytest.mark.parametrize("estimator", ["kl2", "kl3"])
@pytest.mark.parametrize("name", ["teacher_kl", "teacher_top_k"])
def test_teacher_kl_by_torch(forked, tiny_models, world, monkeypatch, tmp_path, name, estimator):
    """The loss and the update of a policy without rewards are those of the KL to another model, by torch alone, for
    several packs: over the whole vocabulary, or over its 8 most likely tokens and the rest. (Of 100 the last would be
    another one where two logits are equal but for rounding.)"""
    from scripts.data.make_tiny_model import make_tiny_model

    _, grpo = forked(name)
    monkeypatch.setattr(test_learner, "grpo", grpo)
    monkeypatch.setattr(grpo, "TEACHER_TOP_K", 8, raising=False)
    teacher = make_tiny_model(tmp_path / "teacher", arch="qwen3", tied=False, seed=5)
    flags = f"--load_ref_policy --beta 0.5 --kl_estimator {estimator} --ref_model_name_or_path {teacher}"
    args = test_learner.make_args(tiny_models(), *flags.split(), "--no_filter_zero_std_samples")
    rollouts = test_learner.make_rollouts()
    for r in rollouts:
        r.advantage = 0.0

    ours, theirs = (grpo.utils.load_causal_lm(a).float() for a in (args, args.of_reference()))
    total, tokens = 0.0, 0
    for r in rollouts:
        ids = torch.tensor([[*r.prompt.token_ids, *r.token_ids]])
        p, q = (torch.softmax(m(ids).logits[0].double() / args.temperature, 1) for m in (ours, theirs))
        if name == "teacher_top_k":
            top = q.topk(8).indices
            p, q = (top_classes(x, top) for x in (p, q))
        kl = (p * (p / q).log() if estimator == "kl2" else q * (q / p).log()).sum(1)
        total, tokens = total + kl[len(r.prompt.token_ids) - 1 : -1].sum(), tokens + len(r.token_ids)
    loss = 0.5 * total / tokens
    loss.backward()

    for pack_length in (30, 1000):
        gradients, metrics = sgd_update(grpo, args, world, rollouts, pack_length)
        assert metrics["loss/kl_avg"] == pytest.approx(loss.item(), rel=3e-5)
        assert_gradients(gradients, ours)


def test_sdpo_by_hand(forked, tiny_models, world, monkeypatch):
    """ref_logprobs are those of the reference behind prompt, best response and prompt; of a best response, and where
    all are alike or the better one has no score, behind the prompt."""
    _, grpo = forked("sdpo")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args(tiny_models(), "--load_ref_policy", "--beta", "0.5", "--kl_estimator", "kl2")
    rollouts = test_learner.make_rollouts()
    groups = [rollouts[i : i + 3] for i in range(0, 12, 3)]
    for r in groups[1]:
        r.outcome = 3.0
    for r, outcome in zip(groups[2], (math.nan, 0.0, 2.0), strict=True):
        r.outcome = outcome
    grpo.set_advantages(groups, args)
    learner = grpo.load_learner(args, world)
    (packs,) = grpo.pack_rollouts(rollouts, "shared", 60)
    batches = grpo.micro_batches(packs, "shared", args, world.device)
    assert len(batches) > 1
    grpo.prepare(learner, [batches], [len(batches)], args, world, grpo.utils.Metrics())

    model = grpo.utils.load_causal_lm(args).float()
    best = {0: 0, 2: 2, 3: 0}
    for batch in batches:
        for i, r in enumerate(batch.rollouts, start=1):
            told = r.prompt.token_ids
            is_told = r.position in best and r.sample != best[r.position] and not math.isnan(r.outcome)
            if is_told:
                told = (*told, *groups[r.position][best[r.position]].token_ids.tolist(), *told)
            want, _ = plain(model, replace(r, prompt=replace(r.prompt, token_ids=told)), args.temperature)
            assert_close(batch.ref_logprobs[batch.seq_ids == i], want, rtol=1e-5, atol=1e-5)


def with_gradient(model, r, temperature):
    """The logprobs of a response's tokens, (T,), by torch alone."""
    ids = torch.tensor([[*r.prompt.token_ids, *r.token_ids]])
    logp = torch.log_softmax(model(ids).logits[0] / temperature, 1)[len(r.prompt.token_ids) - 1 : -1]
    return logp.gather(1, torch.tensor(r.token_ids.tolist())[:, None])[:, 0]


def test_echo_is_the_cross_entropy_of_answers(forked, tiny_models, world, monkeypatch):
    """A third of the tokens is an environment's. Without advantages the loss and its gradient are those of their
    cross-entropy, by torch alone, for several packs; the policy's tokens have no part in it."""
    _, grpo = forked("echo")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args(tiny_models())
    rollouts = test_learner.make_rollouts()
    model = grpo.utils.load_causal_lm(args).float()
    total, said, tokens = 0.0, 0, 0
    for r in rollouts:
        r.advantage = 0.0
        r.mask[1::3] = False
        chosen = with_gradient(model, r, args.temperature)
        total = total - chosen[torch.tensor(~r.mask)].sum()
        said, tokens = said + int((~r.mask).sum()), tokens + int(r.mask.sum())
    (0.1 * total / tokens).backward()
    for pack_length in (30, 1000):
        gradients, metrics = sgd_update(grpo, args, world, rollouts, pack_length)
        assert metrics["loss/echo"] == pytest.approx(total.item() / said, rel=1e-5)
        assert_gradients(gradients, model)


def test_luffy_by_hand(forked, tiny_models, world, monkeypatch):
    """The third rollout of a group is an expert's: its tokens have loss and gradient of -A p / (p + 0.1), where p is
    the policy's probability; those of the others have GRPO's at ratio 1. By torch alone, for several packs."""
    _, grpo = forked("luffy")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args(tiny_models(), "--no_use_rho_correction")
    rollouts = test_learner.make_rollouts()
    model = grpo.utils.load_causal_lm(args).float()
    total, tokens = 0.0, 0
    for r in rollouts:
        r.advantage = 1.5 - r.position - r.sample
        logprobs = with_gradient(model, r, args.temperature)
        weight = (logprobs - logprobs.detach()).exp()
        if r.sample == 2:
            r.versions[:] = -1
            weight = logprobs.exp() / (logprobs.exp() + 0.1)
        total = total - (r.advantage * weight).sum()
        tokens += len(r.token_ids)
    (total / tokens).backward()
    for pack_length in (30, 1000):
        gradients, metrics = sgd_update(grpo, args, world, rollouts, pack_length)
        assert metrics["loss/policy_avg"] == pytest.approx(total.item() / tokens, rel=1e-5)
        assert_gradients(gradients, model)


def test_luffy_takes_the_rows_own_expert(forked, tiny_models):
    """The last rollout of a group has the expert's tokens with an end token, as far as they fit, and is not sampled."""
    _, grpo = forked("luffy")
    args = test_learner.make_args(tiny_models(), "--response_length", "4", "--no_shuffle")
    tokenizer = grpo.utils.load_tokenizer(args)
    prompts = []
    for text in ("7", "a long response", None):
        columns = {} if text is None else {"expert": text}
        row = grpo.utils.Row("row", [{"role": "user", "content": "Say 7."}], ["7"], ["gsm8k"], reward_columns=columns)
        prompts.append(grpo.utils.make_prompt(row, len(prompts), tokenizer, None, None, str))
    short, long, none = (grpo.next_group(prompts, i, sampler_of(grpo), args) for i in range(3))
    expert = short[-1]
    assert expert.over and tokenizer.decode(expert.token_ids) == "7" + tokenizer.eos_token
    assert expert.logprobs.tolist() == [0.0, 0.0] and expert.versions.tolist() == [-1, -1] and expert.mask.all()
    assert tokenizer.encode("a long response", add_special_tokens=False)[:4] == long[-1].token_ids.tolist()
    assert not any(r.over or len(r.token_ids) for r in (*short[:-1], *long[:-1], *none))
    probe = packing.probe_rollouts(prompts[0])  # of the start, before anything is sampled
    assert not grpo.make_batch([grpo.make_pieces(probe, 100)], torch.device("cpu")).expert.any()


def test_vineppo_by_hand(forked, monkeypatch):
    """Six tokens in parts of four, two continuations each: values 2 and 24, the score 40. Continuations begin with the
    prompt and the tokens before, have seeds of their own and the length that is left. A missing score counts 0."""
    _, grpo = forked("vineppo")
    args = test_learner.make_args("m", "--response_length", "9")
    prompt = grpo.utils.Prompt(0, (1, 2, 3), "", (), ())
    group = grpo.new_group(prompt, 7, 2)
    for r, score in zip(group, (40.0, math.nan), strict=True):
        r.append(grpo.utils.Generation([5, 5, 5, 5, 6, 6], [-1.0] * 6, "stop", [3] * 6))
        r.score = score
    seen = []

    def generate(requests, finished):
        seen.extend(requests)
        for i, token in enumerate((1, 3, 2, 6, 1, 3, 2, 6)):
            finished(i, grpo.utils.Generation([token], [-2.0], "stop", [3]))

    def score(rollouts, args):
        for r in rollouts:
            assert r.mask.all() and r.logprobs.tolist() == [-1.0] * (len(r.token_ids) - 1) + [-2.0]
            r.score = float(r.token_ids.sum())

    monkeypatch.setattr(grpo, "start_scoring", lambda r, engine, args: None)
    monkeypatch.setattr(grpo, "score_rollouts", score)
    grpo.set_vine_advantages(types.SimpleNamespace(generate=generate), group, args, tokens=4, k=2)
    assert group[0].advantage.tolist() == [22.0] * 4 + [16.0] * 2
    assert group[1].advantage.tolist() == [22.0] * 4 + [0.0] * 2
    assert [request.prompt_ids for request in seen[:4]] == [(1, 2, 3)] * 2 + [(1, 2, 3, 5, 5, 5, 5)] * 2
    assert [request.max_tokens for request in seen[:4]] == [9, 9, 5, 5]
    fresh = [grpo.make_request(r, args).seed for r in grpo.new_group(prompt, 7, 2)]
    assert len({*fresh, *(request.seed for request in seen)}) == 10


WATCHED = """
import importlib.util
import json
import sys

spec = importlib.util.spec_from_file_location("forked", {script!r})
grpo = sys.modules["forked"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(grpo)
sample, update, branches, gaps = grpo.sample_rollouts, grpo.update, [], []


def sample_rollouts(engine, groups, args):
    begun = {{id(r): len(r.token_ids) for group in groups for r in group}}
    sample(engine, groups, args)
    for group in groups:
        branches.extend([r] for r in group if r.sample >= 10**6)
        for r in group:
            r.versions[: begun[id(r)]] = -1  # tokens of the response that was branched: not looked at


def watched(learner, mini_batches, args, world, metrics):
    gap = grpo.measure_gap(learner.policy, branches, "on branches", args, world)
    gaps.append([len(branches), sum((r.versions >= 0).sum().item() for (r,) in branches), gap])
    branches.clear()
    return update(learner, mini_batches, args, world, metrics)


grpo.sample_rollouts, grpo.update = sample_rollouts, watched
run_dir = grpo.main(grpo.utils.parse_args(grpo.Args))
(run_dir / "gaps.json").write_text(json.dumps(gaps))
"""


@pytest.mark.runs
def test_vllm_samples_the_branches_of_vineppo(forked, tiny_models, tmp_path):
    """vLLM may have a branch's prefix in its cache. After it, it samples with the learner's probabilities, in each of
    three steps (float32). The parts of a response have values, and advantages, of their own."""
    directory, _ = forked("vineppo")
    (tmp_path / "watched.py").write_text(WATCHED.format(script=str(directory / "grpo.py")))
    line = [tmp_path / "watched.py", "--model_name_or_path", tiny_models(), "--output_dir", tmp_path]
    line += """--dataset_mixer_list reasoning_gym:chain_sum 4 --model_dtype float32 --vllm_enforce_eager --save_traces
        --vllm_enable_prefix_caching --vllm_gpu_memory_utilization 0.3 --no_filter_zero_std_samples --save_freq -1
        --reward_file scripts/train/debug/letters.py --remap_verifier reasoning_gym=letters --temperature 1.0 --beta 0
        --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 4 --response_length 20 --total_episodes 24
        --learning_rate 3e-3 --max_logprob_gap 1e-4 --exp_name vine""".split()
    done = programs.run(line)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    gaps = json.loads((tmp_path / "vine" / "gaps.json").read_text())
    assert len(gaps) == 3
    for branches, tokens, gap in gaps:
        assert branches == 8 * 3 * 4 and tokens > 3 * branches
        assert gap["debug/vllm_vs_local_logprob_diff_max"] < 1e-4
    rows = [json.loads(line) for line in (tmp_path / "vine" / "rollouts.jsonl").read_text().splitlines()]
    assert any(len(set(row["advantage"])) == 3 for row in rows)


def sgd_update(grpo, args, world, rollouts, pack_length):
    """The gradient by each weight, as plain SGD shows it, and the metrics of an update."""
    learner = grpo.load_learner(args, world)
    start = {k: v.clone() for k, v in grpo.utils.full_weights(learner.policy, torch.float32)}
    learner.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=1024.0)
    (packs,) = grpo.pack_rollouts(rollouts, "shared", pack_length)
    metrics = grpo.utils.Metrics()
    grpo.update(learner, [grpo.micro_batches(packs, "shared", args, world.device)], args, world, metrics)
    moved = dict(grpo.utils.full_weights(learner.policy, torch.float32))
    return {name: (start[name] - moved[name]) / 1024 for name in start}, metrics.reduce(world)


def assert_gradients(gradients, model):
    """They are those that torch left at a model's parameters."""
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name


@pytest.mark.runs
def test_a_curve_that_is_ended_leaves_no_run_behind(tmp_path):
    """train.sh dies of the signal that `timeout` sends: grpo.py with it, and its copy of the repository is removed."""
    mark = f"left_{tmp_path.name}"
    command = ["bash", REPO / "scripts" / "forks" / "train.sh", "plain", "--exp_name", mark, "--output_dir", tmp_path]
    command += ["--total_episodes", "1000000"]  # it does not end by itself
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with open(tmp_path / "log", "w") as log:
        started = subprocess.Popen(list(map(str, command)), env=env, stdout=log, stderr=log)
        try:
            wait_for((tmp_path / mark / "metrics.jsonl").exists, 120)
            assert len(list(tmp_path.glob("tmp.*"))) == 1
        finally:
            started.terminate()
            code = started.wait(30)
    assert code == 143
    wait_for(lambda: not processes_with(mark), 30)
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.runs
@pytest.mark.parametrize(
    "name, told",
    [
        ("mine.diff", "4 mini-batches"),  # of one's own: with the flags of the command in its head
        ("luffy", "data/tasks/largest_digit/train.jsonl 1.0: local"),
        ("turn_index", "data/guess_plain/train.jsonl 1.0: local"),
        ("echo", "at most 20,480 tokens"),  # 64 times 256 of the prompt and 64 of three turns
    ],
)
def test_what_a_curve_needs_is_added(tmp_path, name, told):
    """train.sh --dry_run: the plan of a run that every check has passed."""
    (tmp_path / "mine.diff").write_text(FORKS["sapo"].read_text())
    line = ["bash", str(REPO / "scripts" / "forks" / "train.sh"), name, "--dry_run", "--output_dir", str(tmp_path)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert told in done.stdout, done.stdout


def wait_for(happened, seconds):
    """Return once it has; fail where it has not after so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.2)


def processes_with(word):
    """Command lines of processes that have a word in them."""
    done = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if word in line]


def assert_slopes(loss, at, grad, step=1e-5):
    """`grad` of the summed loss is its central difference in each token."""
    for i in range(at.numel()):
        shift = torch.zeros_like(at)
        shift.view(-1)[i] = step
        slope = (loss(at + shift) - loss(at - shift)).sum() / (2 * step)
        assert slope.item() == pytest.approx(grad.view(-1)[i].item(), rel=1e-6)


@pytest.mark.parametrize(
    "name, scores, want",
    [
        ("rloo", [1.0, 2.0, 3.0, 6.0], [1 - 11 / 3, 2 - 10 / 3, 3 - 9 / 3, 6 - 6 / 3]),  # means of the other three
        ("rloo", [4.0, math.nan, 8.0, math.nan], [-4.0, 0.0, 4.0, 0.0]),  # the other one
        ("rloo", [math.nan, 5.0, math.nan, math.nan], [0.0, 0.0, 0.0, 0.0]),
        ("rloo", [0.1] * 4, [0.0] * 4),
        ("maxrl", [10.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),  # mean 2.5
        ("maxrl", [1.0, 1.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        ("maxrl", [0.0] * 4, [0.0] * 4),
        ("maxrl", [10.0, math.nan, 0.0, math.nan], [1.0, 0.0, -1.0, 0.0]),
    ],
)
def test_advantages_by_hand(forked, name, scores, want):
    got = forked(name)[1].compute_advantages(torch.tensor(scores), 4, name)
    assert_close(got, torch.tensor(want), rtol=1e-6, atol=1e-12)


def test_dr_grpo_by_hand(forked, tiny_models, world, monkeypatch):
    """No division by the standard deviation; ratio 1: the loss is -sum A_i n_i / (12 responses x 256 tokens)."""
    _, grpo = forked("dr_grpo")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args, rollouts = test_learner.make_args(tiny_models(), "--no_use_rho_correction"), test_learner.make_rollouts()
    assert args.response_length == 256
    for r, advantage in zip(rollouts[:4], (7.0, -3.0, -3.0, -1.0), strict=True):
        r.score, r.advantage = {7.0: 10.0, -3.0: 0.0, -1.0: 2.0}[advantage], math.nan
    grpo.set_advantages([rollouts[:4]], args)
    assert [r.advantage for r in rollouts[:4]] == [7.0, -3.0, -3.0, -1.0]  # mean 3
    _, metrics = test_learner.run_update(args, world, [rollouts])
    total = sum(r.advantage * len(r.token_ids) for r in rollouts)
    assert metrics["loss/policy_avg"] == pytest.approx(-total / (12 * 256), rel=1e-5)


def advantages_of_the_loss(grpo, monkeypatch):
    """A dict that each update fills: (position, sample) of a rollout -> the one advantage of its tokens in the loss."""
    seen = {}
    original = grpo.Batch.loss_inputs

    def loss_inputs(batch, new_logprobs, entropy):
        for i, r in enumerate(batch.rollouts, start=1):
            (seen[r.position, r.sample],) = set(batch.advantages[batch.seq_ids == i].tolist())
        return original(batch, new_logprobs, entropy)

    monkeypatch.setattr(grpo.Batch, "loss_inputs", loss_inputs)
    return seen


def test_reinforce_pp_baseline_by_hand(forked, tiny_models, world, monkeypatch):
    """Scores 10 0 0, 4 4 1, 0 0 0, 10 10 0 less their means, over one standard deviation of all twelve, whatever
    mini-batch they are in; the mean is 0 but where a response is left out."""
    _, grpo = forked("reinforce_pp_baseline")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args(tiny_models(), "--no_use_rho_correction", "--num_samples_per_prompt_rollout", "3")
    rollouts = test_learner.make_rollouts()
    for r, score in zip(rollouts, (10.0, 0.0, 0.0, 4.0, 4.0, 1.0, 0.0, 0.0, 0.0, 10.0, 10.0, 0.0), strict=True):
        r.score = score
    for i in range(0, len(rollouts), 3):
        grpo.set_advantages([rollouts[i : i + 3]], args)
    # thirds: 20 -10 -10, 3 3 -6, 0 0 0, 10 10 -20; squares 600 + 54 + 600 = 1254; without the last sum 20, squares 854
    thirds = (20, -10, -10, 3, 3, -6, 0, 0, 0, 10, 10, -20)
    whole = [x / 3 / math.sqrt(1254 / 9 / 12) for x in thirds]
    cut = [(x / 3 - 20 / 33) / math.sqrt(854 / 9 / 11 - (20 / 33) ** 2) for x in thirds[:-1]]
    seen = advantages_of_the_loss(grpo, monkeypatch)
    for parts, want in (([rollouts], whole), ([rollouts[:5], rollouts[5:]], whole), ([rollouts[:-1]], cut)):
        seen.clear()
        test_learner.run_update(args, world, parts)
        assert [seen[r.position, r.sample] for part in parts for r in part] == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_shrinkage_by_hand(forked, tiny_models, world, monkeypatch):
    """Scores 1 1 0, 1 0 0, 1 1 1, 0 0 0. For the first group: means of the others 1/3, 1, 0, their mean 4/9 and
    variance 14/81; their noise 1/9, 0, 0, mean 1/27: w is 3/17. For the third and the fourth w is 1/2. Then with a
    lone response in the fourth group, which is no part of w, and has the mean of all others as its baseline."""
    _, grpo = forked("shrinkage")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args(tiny_models(), "--no_use_rho_correction", "--no_filter_zero_std_samples")
    rollouts = test_learner.make_rollouts()
    for r, score in zip(rollouts, (1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0), strict=True):
        r.score = float(score)
    whole = [26, 26, -46, 46, -26, -26, 17, 17, 17, -17, -17, -17]  # in parts of 51
    seen = advantages_of_the_loss(grpo, monkeypatch)
    for parts in ([rollouts], [rollouts[:5], rollouts[5:]]):
        seen.clear()
        test_learner.run_update(args, world, parts)
        got = [seen[r.position, r.sample] for part in parts for r in part]
        assert got == pytest.approx([x / 51 for x in whole], abs=3e-5)  # 1e-6 is added to a variance
    test_learner.run_update(args, world, [rollouts[:10]])
    # the others' means 1/3 and 1, noise 1/18, variance 1/9: w is 1/3, the baseline 2/3 1/2 + 1/3 2/3
    assert seen[0, 0] == pytest.approx(4 / 9, abs=3e-5) and seen[3, 0] == pytest.approx(-2 / 3)
    assert grpo.shrunk_baseline(4.0, [4.0, 1.0, 2.0], []) == 1.5


def test_history_by_hand(forked):
    """Outcomes 10 0 -5 and a missing one of 10: alpha 1.75, beta 2.75, p = 7/18. At the next visit four right ones:
    alpha 0.75 x 1.75 + 4 = 85/16, beta 33/16, and a gradient all the same. The state before is not changed."""
    _, grpo = forked("history")
    args = test_learner.make_args("m", "--num_samples_per_prompt_rollout", "4", "--no_shuffle")
    prompts = [grpo.utils.Prompt(i, (i,), "", ("1",), ("gsm8k",)) for i in range(2)]
    sampler = sampler_of(grpo)
    visits = (
        (0, [10.0, 0.0, -5.0, math.nan], [x / math.sqrt(77) for x in (11, -7, -7, 0)]),
        (2, [10.0] * 4, [33 / math.sqrt(85 * 33)] * 4),
        (1, [0.0] * 4, [-0.75 / math.sqrt(0.75 * 4.75)] * 4),  # another prompt: 0.75 and 4.75
    )
    for position, outcomes, want in visits:
        group = grpo.next_group(prompts, position, sampler, args)
        for r, outcome in zip(group, outcomes, strict=True):
            r.outcome = r.score = outcome
        grpo.set_advantages([group], args)
        assert [r.advantage for r in group] == pytest.approx(want)
        before = sampler
        sampler = grpo.next_sampler(sampler, grpo.what_was_seen([group], args), args)
        assert sampler["histories"] != before["histories"]
    assert sampler["histories"] == {0: (85 / 16, 33 / 16), 1: (0.75, 4.75)}
    assert sampler_of(grpo)["histories"] == {}


def test_kl_twice_by_hand(forked, tiny_models, world, monkeypatch):
    """Scores 1, 0, 0 less half of the KLs 1, 0, 0.2, whatever beta is; and the loss has its KL as without that."""
    monkeypatch.setattr(test_learner, "grpo", forked("kl_twice")[1])
    centered = ["--advantage_normalization_type", "centered"]
    half = [*centered, "--kl_in_reward_coef", "0.5"]
    got = test_learner.kl_rewarded([1.0, 0.0, 0.0], [1.0, 0.0, 0.2], *half, beta=7.0)
    assert got == pytest.approx([x - 0.4 / 3 for x in (0.5, 0.0, -0.1)])
    seen = []
    for more in ([], ["--kl_in_reward"]):
        flags = [*centered, "--load_ref_policy", "--beta", "0.3", *more]
        args, rollouts = test_learner.make_args(tiny_models(), *flags), test_learner.make_rollouts()
        seen.append(test_learner.run_update(args, world, [rollouts], ref=True, shift=0.02)[1])
    plain, both = seen
    assert both["loss/kl_avg"] == pytest.approx(plain["loss/kl_avg"], rel=1e-4) and plain["loss/kl_avg"] > 0
    assert both["objective/kl_in_reward"] == pytest.approx(0.001 * plain["objective/kl3"], rel=1e-4)


def test_repetition_by_hand(forked, monkeypatch):
    """Of 5 6 5 6 7 5 6 the bigram 5 6 is there again at tokens 2 and 5: 0.5 off tokens 2, 3, 5 and 6, also with the
    advantages anew that --kl_in_reward makes."""
    _, grpo = forked("repetition")
    monkeypatch.setattr(test_learner, "grpo", grpo)
    monkeypatch.setattr(grpo, "REPEATED", 2)
    flags = "--repetition_penalty 0.5 --kl_in_reward --beta 0.1 --advantage_normalization_type centered"
    args = test_learner.make_args("m", *flags.split(), "--load_ref_policy")
    prompt = grpo.utils.Prompt(0, (1, 2, 3), "", (), ())
    group = [grpo.Rollout(prompt, 0, j) for j in range(3)]
    for r, ids, score in zip(group, ([5, 6, 5, 6, 7, 5, 6], [9], [8, 8, 8]), (6.0, 3.0, 0.0), strict=True):
        r.append(grpo.utils.Generation(ids, [0.0] * len(ids), "stop", [0] * len(ids)))
        r.score = score
    grpo.set_advantages([group], args)
    want = [[3, 3, 2.5, 2.5, 3, 2.5, 2.5], [0], [-3, -3.5, -3.5]]
    assert [r.advantage.tolist() for r in group] == want
    world = grpo.utils.World(0, 0, 1, torch.device("cpu"))
    batch = grpo.make_batch([[group]], world.device)
    batch.old_logprobs = batch.ref_logprobs = torch.zeros_like(batch.advantages)
    grpo.put_kl_in_reward([batch], args, world, grpo.utils.Metrics())
    assert [batch.advantages[batch.seq_ids == i].tolist() for i in (1, 2, 3)] == want


@pytest.mark.parametrize(
    "answers, label, want",
    [
        (["21", "21", "93", None], "93", [10.0, 10.0, 0.0, 0.0]),  # the majority, which is wrong
        (["93", "21", "21", "93"], "93", [10.0, 0.0, 0.0, 10.0]),  # of two as frequent the first
        ([None, None, None, "5"], "93", [0.0, 0.0, 0.0, 10.0]),  # no answer is none to vote for
        ([None] * 4, "93", [0.0] * 4),
    ],
)
def test_ttrl_by_hand(forked, answers, label, want):
    """The score is for the majority's answer; what is counted as right still comes from the label."""
    _, grpo = forked("ttrl")
    args = test_learner.make_args("m")
    record = grpo.rewards.RewardRecord
    prompt = grpo.utils.Prompt(0, (1, 2, 3), "", (), ())
    group = [grpo.Rollout(prompt, 0, j) for j in range(4)]
    for r, answer in zip(group, answers, strict=True):
        r.results = grpo.rewards.score([record(f"It is {answer or 'so'}.", label, "gsm8k")])
    assert grpo.score_group(group, args)
    assert [r.score for r in group] == [r.outcome for r in group] == want
    assert [r.verifiable for r in group] == [float(answer == label) for answer in answers]


def test_turn_index_by_hand(forked):
    """Finals 1, 0, 0 and a missing one, answers' rewards (0.5, 0.2), (0.3), none and (0.9), in tens: the first turns'
    mean is 8 / 3, the later turns have but one rollout. In the game of four turns 34 % of the gradient are left."""
    _, grpo = forked("turn_index")
    group = test_credit.group_by_hand()
    grpo.set_advantages([group], test_credit.ARGS)
    want = [[9.0] * 5 + [20 / 3] * 7, [-3.0] * 2, [-6.0] * 2, [0.0] * 2]
    for r, values in zip(group, want, strict=True):
        assert r.advantage == pytest.approx(values)

    def advantages_of(games):
        rollouts = [test_credit.played(game) for game in games]
        grpo.set_advantages([rollouts], replace(test_credit.ARGS, verification_reward=1.0))
        return [r.advantage for r in rollouts]

    truth, _ = test_credit.moments(test_credit.by_turn_credit, 4)
    biased, _ = test_credit.moments(advantages_of, 4)
    assert biased / truth == pytest.approx(0.34, abs=0.001)


def test_competence_by_hand(forked):
    """Of 1000 prompts the easiest 100 at first, sqrt(0.01 + 0.99 / 4) = 0.5074 of them after 500 positions, all from
    2000 on; a position is all the state there is, and a seed draws others."""
    prompt_at = forked("competence")[1].utils.prompt_at
    prompts = range(1000)
    assert {prompt_at(prompts, 0, seed) for seed in range(3000)} == set(range(100))
    half = {prompt_at(prompts, 500, seed) for seed in range(9000)}
    assert max(half) == 507 and len(half) > 500  # 508 prompts
    assert {prompt_at(prompts, position, 1) > 900 for position in range(2000, 2100)} == {True, False}
    forward = [prompt_at(prompts, position, 1) for position in range(300)]
    assert [prompt_at(prompts, position, 1) for position in reversed(range(300))] == forward[::-1]
    assert forward != [prompt_at(prompts, position, 2) for position in range(300)]
    first = prompt_at(prompts, 7, 1)
    assert prompt_at(prompts, 7, 1, {first, first + 1}) == first + 2
    assert prompt_at(prompts, 7, 1, set(prompts)) == first
    assert [prompt_at(range(3), position, None) for position in range(4)] == [0, 1, 2, 0]


def test_adaptive_kl_by_hand(forked):
    adapt_beta = forked("adaptive_kl")[1].adapt_beta
    for kl, want in ((0.01, 0.5), (0.011, 0.505), (0.009, 0.495), (9.0, 0.51), (0.0, 0.49), (-9.0, 0.49)):
        assert adapt_beta(0.5, kl, 0.01) == pytest.approx(want)


def test_entropy_target_by_hand(forked, monkeypatch):
    """Steps of 0.5 / 50 up below the target of 4, and down from it on, between 0 and 0.5."""
    grpo = forked("entropy_target")[1]
    monkeypatch.setattr(test_learner, "grpo", grpo)
    args = test_learner.make_args("m", "--entropy_coef", "0.5", "--target_entropy", "4")
    for coef, entropy, want in ((0.1, 3.99, 0.11), (0.1, 4.0, 0.09), (0.495, 1.0, 0.5), (0.005, 9.0, 0.0)):
        assert grpo.adapt_entropy_coef(coef, entropy, args) == pytest.approx(want)
    state = grpo.start_state()
    assert state["entropy"] > args.target_entropy and state["entropy_coef"] == 0.0


def steered_runs(directory, model, out, flags):
    """The metrics of a run of four steps of a fork's grpo.py, then of the same run after its second half was lost."""
    with (out / "train.jsonl").open("w") as file:
        for i in range(32):
            turns = [{"role": "user", "content": f"Say {i}, then 7."}]
            file.write(json.dumps({"messages": turns, "ground_truth": "7", "dataset": "gsm8k"}) + "\n")
    command = [directory / "grpo.py", "--model_name_or_path", model, "--output_dir", out]
    command += ["--dataset_mixer_list", out / "train.jsonl", "1.0", "--rollout_backend", "transformers"]
    command += """--model_dtype float32 --response_length 6 --max_prompt_token_length 48 --temperature 1.0
        --learning_rate 3e-3 --total_episodes 256 --save_freq -1 --checkpoint_state_freq 2
        --no_filter_zero_std_samples""".split()
    for more in ([], ["--resume"]):
        done = programs.run([*command, *flags.split(), *more])
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        rows = [json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines()]
        assert len(rows) == 4
        yield rows
        for path in (out / "grpo" / "checkpoints").glob("step_4"):  # the end is lost: steps 3 and 4 again
            shutil.rmtree(path)


@pytest.mark.runs
def test_adaptive_kl_steers_a_run(forked, tiny_models, tmp_path):
    """beta of each step is the last one's, by the KL that the last step logged; --resume goes on with it."""
    directory, grpo = forked("adaptive_kl")
    for rows in steered_runs(directory, tiny_models(), tmp_path, "--beta 0.2 --target_kl 0.01"):
        assert rows[0]["objective/beta"] == 0.2
        for before, after in zip(rows, rows[1:], strict=False):
            want = grpo.adapt_beta(before["objective/beta"], before["objective/kl2_avg"], 0.01)
            assert after["objective/beta"] == want != before["objective/beta"]


@pytest.mark.runs
def test_entropy_target_steers_a_run(forked, tiny_models, tmp_path):
    """The entropy is about 6, below the target of 9: the coefficient rises by 0.01 a step from 0, also after --resume,
    and the loss has the bonus."""
    directory, _ = forked("entropy_target")
    for rows in steered_runs(directory, tiny_models(), tmp_path, "--beta 0 --entropy_coef 0.5 --target_entropy 9"):
        coefs = [row["objective/entropy_coef"] for row in rows]
        assert coefs == pytest.approx([0.0, 0.01, 0.02, 0.03])
        for coef, row in zip(coefs[1:], rows[1:], strict=True):
            assert row["loss/entropy_avg"] == pytest.approx(-coef * row["policy/entropy_avg"], rel=1e-4)


def seen(grpo, index, *outcomes):
    return grpo.Seen(0, index, list(outcomes), 10.0)


def sampler_of(grpo):
    return grpo.start_state()["sampler"]


def test_vip_by_hand(forked):
    """Spreads 5, 1, 0 of three prompts, mean 2, G = 4: 10 -> 8, 2, 0 -> 2 rollouts; as many as ever of a new prompt."""
    _, grpo = forked("vip")
    args = test_learner.make_args("m", "--num_samples_per_prompt_rollout", "4", "--no_shuffle")
    prompts = [grpo.utils.Prompt(i, (i,), "", (), ()) for i in range(4)]
    sampler = sampler_of(grpo)
    assert [len(grpo.next_group(prompts, i, sampler, args)) for i in range(4)] == [4] * 4
    groups = [seen(grpo, 0, 10.0, 0.0, math.nan), seen(grpo, 1, 3.0, 5.0), seen(grpo, 2, math.nan)]
    after = grpo.next_sampler(sampler, groups, args)
    assert after["spreads"] == {0: 5.0, 1: 1.0, 2: 0.0} and sampler["spreads"] == {}
    assert [len(grpo.next_group(prompts, i, after, args)) for i in range(4)] == [8, 2, 2, 4]
    again = grpo.next_sampler(after, [seen(grpo, 0, 1.0, 1.0), seen(grpo, 2, 2.0, 10.0)], args)
    assert again["spreads"] == {0: 0.0, 1: 1.0, 2: 4.0}
    assert [len(grpo.next_group(prompts, i, again, args)) for i in range(4)] == [2, 2, 8, 4]


def test_learnability_by_hand(forked):
    """Weights 0.26 (new), 0.01 (always right), 0.01 (never) and 0.25 x 0.75 + 0.01 of four prompts."""
    _, grpo = forked("learnability")
    args = test_learner.make_args("m")
    prompts = [grpo.utils.Prompt(i, (i,), "", (), ()) for i in range(4)]
    groups = [seen(grpo, 1, 10.0, 10.0), seen(grpo, 2, 0.0, -5.0), seen(grpo, 3, 5.0, 0.0), seen(grpo, 0, math.nan)]
    sampler = sampler_of(grpo)
    after = grpo.next_sampler(sampler, groups, args)
    assert after["rates"] == {1: 1.0, 2: 0.0, 3: 0.25} and sampler["rates"] == {}
    drawn = [grpo.next_group(prompts, position, after, args)[0].prompt.index for position in range(4000)]
    weights = [0.26, 0.01, 0.01, 0.1975]
    for i, weight in enumerate(weights):
        assert drawn.count(i) / 4000 == pytest.approx(weight / sum(weights), abs=0.03)
    assert drawn[:50] == [grpo.next_group(prompts, position, after, args)[0].prompt.index for position in range(50)]


def test_rlep_by_hand(forked):
    """The best response so far, here of two steps, is the last of the prompt's next group, and is not sampled again."""
    _, grpo = forked("rlep")
    args = test_learner.make_args("m", "--num_samples_per_prompt_rollout", "3", "--no_shuffle")
    prompts = [grpo.utils.Prompt(i, (i, 1), "", (), ()) for i in range(2)]
    sampler = sampler_of(grpo)
    asked = []

    def generate(requests, finished):
        asked.append(len(requests))
        for i in range(len(requests)):
            finished(i, grpo.utils.Generation([10 * len(asked) + i, 5], [-0.5, -i], "length", [0, 0]))

    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: str(ids.tolist()))
    engine = types.SimpleNamespace(generate=generate, tokenizer=tokenizer, eos_ids=[0])
    for outcomes, best in (((1.0, 4.0, math.nan), [11, 5]), ((2.0, 3.0, 4.0), [11, 5]), ((9.0, 0.0, 0.0), [30, 5])):
        group = grpo.next_group(prompts, 0, sampler, args)
        grpo.sample_rollouts(engine, [group], args)
        assert all(r.over and r.text == str(r.token_ids.tolist()) for r in group)
        for r, outcome in zip(group, outcomes, strict=True):
            r.outcome = outcome
        sampler = grpo.next_sampler(sampler, grpo.what_was_seen([group], args), args)
        *new, replayed = grpo.next_group(prompts, 0, sampler, args)
        assert not any(r.over for r in new) and replayed.over and replayed.finish_reason == "length"
        assert replayed.token_ids.tolist() == best and replayed.versions.tolist() == [-1, -1] and replayed.mask.all()
    assert asked == [3, 2, 2] and replayed.logprobs.tolist() == [-0.5, 0.0]
    assert not any(r.over for r in grpo.next_group(prompts, 1, sampler, args))


LETTERS = f"""--rollout_backend transformers --model_dtype float32 --reward_file {REPO}/scripts/train/debug/letters.py
    --remap_verifier gsm8k=letters --num_unique_prompts_rollout 4 --num_samples_per_prompt_rollout 4 --response_length 6
    --max_prompt_token_length 48 --temperature 1.0 --learning_rate 1e-3 --lr_scheduler_type constant --beta 0.02
    --total_episodes 96 --save_freq -1 --checkpoint_state_freq 3 --save_traces --deterministic"""


def letters_run(script, model, out, *flags):
    """Train a fork for six steps on eight prompts; returns the final weights."""
    data = out / "train.jsonl"
    with data.open("w") as file:
        for i in range(8):
            turns = [{"role": "user", "content": f"Say {i}."}]
            file.write(json.dumps({"messages": turns, "ground_truth": "7", "dataset": "gsm8k"}) + "\n")
    line = [script, "--model_name_or_path", model, "--output_dir", out, "--dataset_mixer_list", data, "1.0"]
    line += [*LETTERS.split(), *flags]
    if script.name == "grpo.py":
        done = programs.run(line)
    else:  # a process of programs.py has imported the grpo.py of the project
        env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *map(str, line)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    name = flags[flags.index("--exp_name") + 1]
    return load_file(out / name / "model" / "model.safetensors")


def sizes_of(run_dir):
    """How many rollouts each group of a run has."""
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    return collections.Counter(row["position"] for row in rows)


@pytest.mark.runs
def test_a_sampler_is_the_same_in_both_scripts_and_goes_on_after_a_resume(forked, tiny_models, tmp_path):
    """Groups of several sizes, which past scores decide: grpo_fast.py without asynchrony has the bits of grpo.py, and a
    run from its middle those of the whole, also where rollouts of older weights were under way."""
    directory, _ = forked("vip")
    runs = {
        "sync": ("grpo.py",),
        "fast": ("grpo_fast.py", "--async_steps", "0"),
        "ahead": ("grpo_fast.py", "--async_steps", "1"),
    }
    whole = {}
    for name, (script, *flags) in runs.items():
        whole[name] = letters_run(directory / script, tiny_models(), tmp_path, "--exp_name", name, *flags)
    assert len(set(sizes_of(tmp_path / "sync").values())) > 2, "the groups are alike: the test shows nothing"
    assert sizes_of(tmp_path / "sync") == sizes_of(tmp_path / "fast") != sizes_of(tmp_path / "ahead")
    assert all(torch.equal(whole["sync"][key], whole["fast"][key]) for key in whole["sync"])
    for name in ("sync", "ahead"):
        script, *flags = runs[name]
        sizes = sizes_of(tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_6")
        shutil.rmtree(tmp_path / name / "model")
        again = letters_run(directory / script, tiny_models(), tmp_path, "--exp_name", name, "--resume", *flags)
        assert sizes_of(tmp_path / name) == sizes
        assert all(torch.equal(again[key], whole[name][key]) for key in again)
