"""scripts/forks/*.diff apply, are short, and are their papers' formulas, for every split into packs."""

import importlib.util
import math
import re
import shutil
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from torch.testing import assert_close

import utils
from scripts.parts import packing
from tests import test_learner, test_math
from tests.conftest import REPO

FORKS = {path.stem: path for path in sorted((REPO / "scripts" / "forks").glob("*.diff"))}
MOST_LINES = 26
MADE = {}  # name -> the module grpo with that diff


def load(name, path):
    """The file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def make(name, directory):
    """Put a copy of the code into the directory, apply the diff and return its grpo.py, with its own utils.py."""
    for file in ("grpo.py", "grpo_fast.py", "utils.py"):
        shutil.copy(REPO / file, directory)
    for unchanged in ("scripts", "rewards.py"):
        (directory / unchanged).symlink_to(REPO / unchanged)
    done = subprocess.run(["git", "apply", str(FORKS[name])], cwd=directory, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{FORKS[name].name} does not apply: make it again\n{done.stderr}", pytrace=False)
    with pytest.MonkeyPatch.context() as patch:
        if "+++ b/utils.py" in FORKS[name].read_text():
            patch.setitem(sys.modules, "utils", load(f"utils_{name}", directory / "utils.py"))
        return load(f"grpo_{name}", directory / "grpo.py")


@pytest.fixture
def fork(tmp_path_factory, monkeypatch):
    """Function name -> grpo with that diff, on which the helpers of test_learner.py and test_math.py then work."""

    def get(name):
        if name not in MADE:
            MADE[name] = make(name, tmp_path_factory.mktemp(name))
        monkeypatch.setattr(test_learner, "grpo", MADE[name])
        monkeypatch.setattr(test_math, "grpo", MADE[name])
        return MADE[name]

    return get


def group_of(grpo, *responses):
    """A group of one prompt, with these tokens as responses."""
    group = grpo.new_group(grpo.utils.Prompt(0, (1, 2, 3), "", (), ()), 7, len(responses))
    for r, ids in zip(group, responses, strict=True):
        r.append(grpo.utils.Generation(ids, [-1.0] * len(ids), "stop", [3] * len(ids)))
    return group


@pytest.mark.parametrize("name", FORKS)
def test_it_applies_and_is_short(fork, name):
    """In at most 26 changed lines, with paper, formula and commands in its head, and a row in the table."""
    fork(name)
    head, _, body = FORKS[name].read_text().partition("\n--- a/")
    changed = re.findall(r"^[+-](?!\+\+ b/|-- a/)", body, re.MULTILINE)
    assert len(changed) <= MOST_LINES
    assert re.search(r"arXiv:\d{4}\.\d{5}", head) and f"git apply scripts/forks/{name}.diff" in head
    assert f"\n| `{name}.diff` |" in (REPO / "scripts/forks/README.md").read_text()


FLAGS = {  # which have the fork do what it does
    "dppo": "--loss_fn dppo --num_mini_batches 4",
    "gmpo": "--loss_fn gmpo --loss_denominator sequence --clip_lower 0.33 --clip_higher 0.49",
    "maxrl": "--advantage_normalization_type maxrl",
    "muon": "--muon",
    "repetition": "--repetition_penalty 0.3",
    "rloo": "--advantage_normalization_type rloo",
    "sapo": "--loss_fn sapo --loss_denominator sequence",
}


@pytest.mark.parametrize("name", FORKS)
def test_the_split_into_packs_is_no_part_of_it(fork, tiny_models, world, monkeypatch, name):
    """The test of grpo.py's losses, on the fork, with the advantages that the fork gives to scores of its own."""
    grpo = fork(name)
    make_rollouts = test_learner.make_rollouts
    args = test_learner.make_args(tiny_models(), *FLAGS.get(name, "").split(), "--num_samples_per_prompt_rollout", "3")

    def scored(**options):
        rollouts = make_rollouts(**options)
        for r, score in zip(rollouts, (10.0, 0.0, 0.0, 4.0, 10.0, 0.0, 0.0, 0.0, 7.0, 10.0, 10.0, 0.0), strict=True):
            r.score = r.outcome = score
        for i in range(0, len(rollouts), 3):
            grpo.set_advantages([rollouts[i : i + 3]], args)
        return rollouts

    if name == "repetition":
        monkeypatch.setattr(grpo, "REPEATED", 1)
    monkeypatch.setattr(test_learner, "make_rollouts", scored)
    test_learner.assert_no_split_shows(args, world, monkeypatch, [("shared", 30), ("plain", 60)], [5])


def test_sapo_by_hand(fork):
    """Ratios 3 and 1/3, tau 1 and 1.05: -2 x 4 sigmoid(2) and 3 x 4 / 1.05 sigmoid(-0.7), and their slopes."""
    fork("sapo")
    new = test_math.log(0.6, 0.2)
    old = test_math.log(0.2, 0.6)
    advantages = test_math.per_token(2.0, -3.0)
    loss, ratio, clipped, grad = test_math.loss_of(new, old, advantages, "sapo")
    assert_close(loss, test_math.per_token(-8 * 0.8807970779778823, 12 / 1.05 * 0.3318122278318339))
    assert_close(ratio, test_math.per_token(3.0, 1 / 3))
    # -A ratio 4 w (1 - w), w (1 - w) = 0.10499358540350662 and 0.22171287329310904
    assert_close(grad, test_math.per_token(-2 * 3 * 4 * 0.10499358540350662, 3 / 3 * 4 * 0.22171287329310904))
    assert not clipped.any()
    ours_alone("sapo")


def test_dppo_by_hand(fork):
    """0.01 -> 0.05 has ratio 5 and trains, 0.6 -> 0.9 has 1.5 and is dropped: it moved by 0.3, more than 0.2. Where
    A < 0 the same downwards; a move against the advantage is never dropped. A weight is 20 at most."""
    fork("dppo")
    new = test_math.log(0.05, 0.9, 0.9, 0.1, 0.55, 0.9, 0.15)
    old = test_math.log(0.01, 0.6, 0.6, 0.6, 0.6, 0.6, 0.005)
    advantages = test_math.per_token(2.0, 2.0, -1.0, -1.0, -1.0, 0.0, 1.0)
    loss, ratio, clipped, grad = test_math.loss_of(new, old, advantages, "dppo")
    weights = [5.0, 0.0, 1.5, 0.0, 0.55 / 0.6, 1.5, 20.0]  # 0.15 / 0.005 is 30
    want = [-a * w for a, w in zip(advantages.flatten().tolist(), weights, strict=True)]
    assert_close(grad, test_math.per_token(*want))
    assert_close(loss, grad * new)
    assert clipped.flatten().tolist() == [False, True, False, True, False, False, False]
    assert_close(ratio, (new - old).exp())
    ours_alone("dppo")


def test_gmpo_by_hand(fork):
    """Ratios 2 and 0.5, bounds 0.8 and 1.2. Where A > 0 the first is clipped, sqrt(1.2 x 0.5), else the second,
    sqrt(2 x 0.8). A third token, with ratio 9, is masked."""
    fork("gmpo")
    new = test_math.log(0.4, 0.2, 0.9)
    old = test_math.log(0.2, 0.4, 0.1)
    mask = torch.tensor([[True, True, False]])
    for advantage, mean, trained in ((2.0, math.sqrt(0.6), (0, 1)), (-3.0, math.sqrt(1.6), (1, 0))):
        loss, ratio, clipped, grad = test_math.loss_of(new, old, advantage, "gmpo", mask=mask)
        assert loss.tolist()[0] == pytest.approx([-advantage * mean] * 2 + [0.0])
        assert grad.tolist()[0] == pytest.approx([-advantage * mean * x for x in (*trained, 0)])
        assert clipped.tolist()[0] == [not trained[0], not trained[1], False]
        assert ratio.tolist()[0] == pytest.approx([2.0, 0.5, 1.0])
    ours_alone("gmpo")


def ours_alone(loss_fn):
    """What tests/test_math.py asks of every loss, of test_math's grpo."""
    test_math.test_on_policy_every_loss_has_the_policy_gradient(loss_fn)
    test_math.test_off_policy_no_loss_mixes_the_responses_of_a_row(loss_fn)
    for gap in (500.0, -500.0, math.inf, -math.inf):
        test_math.test_huge_log_ratios_stay_finite(loss_fn, gap)


def test_sdpo_by_hand(fork, tiny_models, world):
    """ref_logprobs are those of the reference behind prompt, best response and prompt; of a best response, and where
    all are alike or the better one has no score, behind the prompt."""
    grpo = fork("sdpo")
    args = test_learner.make_args(
        tiny_models(), "--load_ref_policy", "--beta", "0.5", "--kl_estimator", "kl2", "--self_teacher"
    )
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
            behind = replace(r, prompt=replace(r.prompt, token_ids=told))
            want = test_learner.plain_logprobs(model, behind, args.temperature)[0].detach()
            assert_close(batch.ref_logprobs[batch.seq_ids == i], want, rtol=1e-5, atol=1e-5)


def assert_update(model, args, world, rollouts, metric, value):
    """The metric is that value, and the gradients are those that torch left at the model, for packs of two sizes."""
    start = test_learner.start_weights(args, world)
    for pack_length in (30, 1000):
        weights, metrics = test_learner.run_update(replace(args, pack_length=pack_length), world, [rollouts])
        assert metrics[metric] == pytest.approx(value, rel=1e-5)
        for name, parameter in model.named_parameters():
            gradient = (start[name] - weights[name]) / 1024  # SGD's rate
            assert (gradient - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name


def test_echo_is_the_cross_entropy_of_answers(fork, tiny_models, world):
    """A third of the tokens is an environment's. Without advantages the loss and its gradient are those of their
    cross-entropy, by torch alone, for several packs; the policy's tokens have no part in it."""
    grpo = fork("echo")
    args = test_learner.make_args(tiny_models(), "--echo_coef", "0.1")
    rollouts = test_learner.make_rollouts()
    model = grpo.utils.load_causal_lm(args).float()
    total = 0.0
    said = 0
    tokens = 0
    for r in rollouts:
        r.advantage = 0.0
        r.mask[1::3] = False
        chosen = test_learner.plain_logprobs(model, r, args.temperature)[0]
        total = total - chosen[torch.tensor(~r.mask)].sum()
        said += int((~r.mask).sum())
        tokens += int(r.mask.sum())
    (0.1 * total / tokens).backward()
    assert_update(model, args, world, rollouts, "loss/echo", total.item() / said)


def test_luffy_by_hand(fork, tiny_models, world):
    """The third rollout of a group is an expert's: its tokens have loss and gradient of -A p / (p + 0.1), where p is
    the policy's probability; those of the others have GRPO's at ratio 1. By torch alone, for several packs."""
    grpo = fork("luffy")
    args = test_learner.make_args(tiny_models(), "--no_use_rho_correction")
    rollouts = test_learner.make_rollouts()
    model = grpo.utils.load_causal_lm(args).float()
    total = 0.0
    tokens = 0
    for r in rollouts:
        r.advantage = 1.5 - r.position - r.sample
        logprobs = test_learner.plain_logprobs(model, r, args.temperature)[0]
        weight = (logprobs - logprobs.detach()).exp()
        if r.sample == 2:
            r.versions[:] = -1
            weight = logprobs.exp() / (logprobs.exp() + 0.1)
        total = total - (r.advantage * weight).sum()
        tokens += len(r.token_ids)
    (total / tokens).backward()
    assert_update(model, args, world, rollouts, "loss/policy_avg", total.item() / tokens)


def test_luffy_takes_the_rows_own_expert(fork, tiny_models):
    """The last rollout of a group has the expert's tokens with an end token, as far as they fit, and is not sampled."""
    grpo = fork("luffy")
    args = test_learner.make_args(tiny_models(), "--response_length", "4", "--no_shuffle")
    tokenizer = grpo.utils.load_tokenizer(args)
    prompts = []
    for text in ("7", "a long response", None):
        columns = {} if text is None else {"expert": text}
        row = grpo.utils.Row("row", [{"role": "user", "content": "Say 7."}], ["7"], ["gsm8k"], reward_columns=columns)
        prompts.append(grpo.utils.make_prompt(row, len(prompts), tokenizer, None, None, str))
    sampler = grpo.start_state()["sampler"]
    short, long, none = [grpo.next_group(prompts, i, sampler, args) for i in range(3)]
    expert = short[-1]
    assert expert.over and tokenizer.decode(expert.token_ids) == "7" + tokenizer.eos_token
    assert expert.logprobs.tolist() == [0.0, 0.0] and expert.versions.tolist() == [-1, -1] and expert.mask.all()
    assert tokenizer.encode("a long response", add_special_tokens=False)[:4] == long[-1].token_ids.tolist()
    assert not any(r.over or len(r.token_ids) for r in (*short[:-1], *long[:-1], *none))
    probe = packing.probe_rollouts(prompts[0])[0]  # of the start, before anything is sampled
    assert not grpo.make_batch([grpo.make_pieces(probe, 100)], torch.device("cpu")).expert.any()


def test_vineppo_by_hand(fork, monkeypatch):
    """Six tokens in parts of four, two continuations each: values 2 and 24, the score 40. Continuations begin with the
    prompt and the tokens before, have seeds of their own and the length that is left. A missing score counts 0."""
    grpo = fork("vineppo")
    args = test_learner.make_args("m", "--response_length", "9")
    group = group_of(grpo, [5, 5, 5, 5, 6, 6], [5, 5, 5, 5, 6, 6])
    group[0].score = 40.0
    group[1].score = math.nan
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
    fresh = [grpo.make_request(r, args).seed for r in grpo.new_group(group[0].prompt, 7, 2)]
    assert len({*fresh, *(request.seed for request in seen)}) == 10


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
def test_advantages_by_hand(fork, name, scores, want):
    got = fork(name).compute_advantages(torch.tensor(scores), 4, name)
    assert_close(got, torch.tensor(want), rtol=1e-6, atol=1e-12)


def test_dr_grpo_by_hand(fork, tiny_models, world):
    """No division by the standard deviation; ratio 1: the loss is -sum A_i n_i / (12 responses x 256 tokens)."""
    grpo = fork("dr_grpo")
    flags = "--no_use_rho_correction --dr_grpo --advantage_normalization_type centered"
    args = test_learner.make_args(tiny_models(), *flags.split())
    rollouts = test_learner.make_rollouts()
    assert args.response_length == 256
    for r, score in zip(rollouts[:4], (10.0, 0.0, 0.0, 2.0), strict=True):
        r.score = score
    grpo.set_advantages([rollouts[:4]], args)
    assert [r.advantage for r in rollouts[:4]] == [7.0, -3.0, -3.0, -1.0]  # mean 3
    _, metrics = test_learner.run_update(args, world, [rollouts])
    total = sum(r.advantage * len(r.token_ids) for r in rollouts)
    assert metrics["loss/policy_avg"] == pytest.approx(-total / (12 * 256), rel=1e-5)


def test_kl_twice_by_hand(fork, tiny_models, world):
    """Scores 1, 0, 0 less half of the KLs 1, 0, 0.2, whatever beta is; and the loss has its KL as without that."""
    grpo = fork("kl_twice")
    centered = ["--advantage_normalization_type", "centered"]
    half = [*centered, "--kl_in_reward", "--kl_in_reward_coef", "0.5"]
    group = group_of(grpo, [5], [6], [7])
    group[0].score = 1.0
    args = test_learner.make_args("m", *half, "--beta", "7", "--kl_estimator", "0")
    grpo.set_advantages([group], args)
    batch = grpo.make_batch([[[r]] for r in group], world.device)
    batch.ref_logprobs = torch.zeros_like(batch.advantages)
    batch.old_logprobs = batch.ref_logprobs.clone()
    batch.old_logprobs[batch.response_mask] = torch.tensor([1.0, 0.0, 0.2])
    grpo.put_kl_in_reward([batch], args, world, utils.Metrics())
    assert [r.advantage for r in group] == pytest.approx([x - 0.4 / 3 for x in (0.5, 0.0, -0.1)])
    seen = []
    for more in (centered, half):
        flags = ["--load_ref_policy", "--beta", "0.3", *more]
        args = test_learner.make_args(tiny_models(), *flags)
        rollouts = test_learner.make_rollouts()
        seen.append(test_learner.run_update(args, world, [rollouts], ref=True, shift=0.02)[1])
    alone, both = seen
    assert both["loss/kl_avg"] == pytest.approx(alone["loss/kl_avg"], rel=1e-4)
    assert alone["loss/kl_avg"] > 0
    assert both["objective/kl_in_reward"] == pytest.approx(0.5 * alone["objective/kl"], rel=1e-4)


def test_repetition_by_hand(fork, world, monkeypatch):
    """Of 5 6 5 6 7 5 6 the bigram 5 6 is there again at tokens 2 and 5: 0.5 off tokens 2, 3, 5 and 6, also with the
    advantages anew that --kl_in_reward makes."""
    grpo = fork("repetition")
    monkeypatch.setattr(grpo, "REPEATED", 2)
    flags = "--repetition_penalty 0.5 --kl_in_reward --beta 0.1 --advantage_normalization_type centered"
    args = test_learner.make_args("m", *flags.split(), "--load_ref_policy")
    group = group_of(grpo, [5, 6, 5, 6, 7, 5, 6], [9], [8, 8, 8])
    for r, score in zip(group, (6.0, 3.0, 0.0), strict=True):
        r.score = score
    grpo.set_advantages([group], args)
    want = [[3, 3, 2.5, 2.5, 3, 2.5, 2.5], [0], [-3, -3.5, -3.5]]
    assert [r.advantage.tolist() for r in group] == want
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
def test_ttrl_by_hand(fork, answers, label, want):
    """The score is for the majority's answer; what is counted as right still comes from the label."""
    grpo = fork("ttrl")
    args = test_learner.make_args("m", "--majority_vote")
    record = grpo.rewards.RewardRecord
    group = group_of(grpo, [5], [6], [7], [8])
    for r, answer in zip(group, answers, strict=True):
        r.results = grpo.rewards.score([record(f"It is {answer or 'so'}.", label, "gsm8k")])
    assert grpo.score_group(group, args)
    assert [r.score for r in group] == [r.outcome for r in group] == want
    assert [r.verifiable for r in group] == [float(answer == label) for answer in answers]


def test_vip_by_hand(fork):
    """Spreads 5, 1, 0 of three prompts, mean 2, G = 4: 10 -> 8, 2, 0 -> 2 rollouts; as many as ever of a new prompt."""
    grpo = fork("vip")
    args = test_learner.make_args("m", "--num_samples_per_prompt_rollout", "4", "--no_shuffle", "--share_by_spread")
    prompts = [grpo.utils.Prompt(i, (i,), "", (), ()) for i in range(4)]
    sampler = grpo.start_state()["sampler"]
    assert [len(grpo.next_group(prompts, i, sampler, args)) for i in range(4)] == [4] * 4
    seen = [
        grpo.Seen(0, 0, [10.0, 0.0, math.nan], 10.0),
        grpo.Seen(1, 1, [3.0, 5.0], 10.0),
        grpo.Seen(2, 2, [math.nan], 10.0),
    ]
    after = grpo.next_sampler(sampler, seen, args)
    assert after["spreads"] == {0: 5.0, 1: 1.0, 2: 0.0} and sampler["spreads"] == {}
    assert [len(grpo.next_group(prompts, i, after, args)) for i in range(4)] == [8, 2, 2, 4]
    again = grpo.next_sampler(after, [grpo.Seen(4, 0, [1.0, 1.0], 10.0), grpo.Seen(6, 2, [2.0, 10.0], 10.0)], args)
    assert again["spreads"] == {0: 0.0, 1: 1.0, 2: 4.0}
    assert [len(grpo.next_group(prompts, i, again, args)) for i in range(4)] == [2, 2, 8, 4]


def take_step(learner, seed):
    """An optimizer step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in learner.policy.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
        if hasattr(p, "placements"):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
    learner.optimizer.step()
    learner.scheduler.step()


MUON = "--muon --learning_rate 1e-2 --weight_decay 0.1 --lr_scheduler_type linear".split()


@pytest.mark.parametrize("stage", ["0", "3"])
def test_muon_goes_on_from_a_checkpoint(fork, tiny_models, world, tmp_path, stage):
    """A learner with the checkpoint of another one makes the same next steps."""
    grpo = fork("muon")
    args = test_learner.make_args(tiny_models(), *MUON, "--deepspeed_stage", stage)
    learner, fresh = [grpo.load_learner(args, world) for _ in range(2)]
    take_step(learner, 1)
    checkpoints = utils.Checkpoints(tmp_path, 3, world)
    extra = grpo.start_state() | {"scheduler": learner.scheduler.state_dict()}
    checkpoints.save(1, learner.modules(args), learner.optimizer, extra)
    checkpoints.wait()
    checkpoints.resume(tmp_path / "checkpoints" / "step_1", fresh, args)
    for seed in (2, 3):
        take_step(learner, seed)
        take_step(fresh, seed)
        for a, b in zip(learner.policy.parameters(), fresh.policy.parameters(), strict=True):
            assert torch.equal(utils.shard_of(a), utils.shard_of(b))


def test_muon_by_hand(fork, tiny_models, world):
    """A step on U S V^T moves a matrix of a layer by 0.2 sqrt(longest side) lr U S' V^T, S' in 0.5..1.5 whatever S is,
    and by lr wd W; the embedding as AdamW does, by lr and lr wd W; a norm by lr alone."""
    grpo = fork("muon")
    args = test_learner.make_args(tiny_models(), *MUON)
    learner = grpo.load_learner(args, world)
    before = {name: p.detach().clone() for name, p in learner.policy.named_parameters()}
    bases = {}
    for name, p in learner.policy.named_parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        if p.ndim == 2:
            u, _, v = bases[name] = torch.linalg.svd(p.grad, full_matrices=False)
            p.grad = u * torch.logspace(-1, 0, u.shape[1]) @ v
    learner.optimizer.step()
    in_layers = 0
    for name, p in learner.policy.named_parameters():
        decay = 1 - 1e-3 if p.ndim == 2 else 1.0
        update = (decay * before[name] - p.detach()) / 1e-2
        if ".layers." not in name or p.ndim == 1:
            assert_close(update, p.grad / (p.grad.abs() + 1e-8), rtol=2e-3, atol=1e-4)
            continue
        in_layers += 1
        u, _, v = bases[name]
        rotated = u.T @ update @ v.T / (0.2 * max(p.shape) ** 0.5)  # S' in the gradient's bases
        assert 0.5 < rotated.diag().min() and rotated.diag().max() < 1.5, name
        assert (rotated - rotated.diag().diag()).abs().max() < 0.05, name
    assert in_layers == 14
