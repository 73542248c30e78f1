"""The maths of grpo.py: numbers worked out by hand from the papers' formulas, and verl's own (verl_cases.json)."""

import itertools
import json
import math
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import grpo
import utils
from grpo import HeadLogprobs

CASES = json.loads((Path(__file__).parent / "verl_cases.json").read_text())["cases"]
ROUNDING = dict(rtol=1e-4, atol=1e-5)  # of float32, in which verl computes; its results in float64 end in 64
NAN = math.nan
INF = math.inf
LOSS_FNS = typing.get_args(grpo.Args.__dataclass_fields__["loss_fn"].type)  # a fork's too


def log(*values):
    """(1, T) tensor of log probabilities, given as probabilities"""
    return torch.tensor([values], dtype=torch.float64).log()


def verl(fn):
    """verl's cases of a function, but for those where it has NaN: tests of padding are below."""
    return [pytest.param(c, id=c["id"]) for c in CASES if c["fn"] == fn and "degenerate" not in c["tags"]]


def rows(mask):
    """seq_ids of padded rows: one response in each row"""
    return torch.arange(len(mask))[:, None].expand(mask.shape)


def inputs_of(mask, seq_ids=None, **tensors):
    """LossInputs of these tensors, zeros in place of the others"""
    zeros = torch.zeros(mask.shape)
    given = dict.fromkeys(("new_logprobs", "old_logprobs", "vllm_logprobs", "advantages", "entropy"), zeros) | tensors
    seq_ids = rows(mask) if seq_ids is None else seq_ids
    return grpo.LossInputs(**given, ref_logprobs=None, mask=mask, seq_ids=seq_ids, tokens=1.0, responses=1.0)


def aggregate(values, mask, seq_ids, kind, tokens, responses):
    return grpo.aggregate(values, inputs_of(mask, seq_ids), grpo.Totals(tokens, responses), kind)


def loss_of(new, old, advantage, loss_fn="dapo", lower=0.2, higher=0.2, dual=0.0, mask=None, seq_ids=None):
    """policy_loss on (1, T) rows with one advantage; returns (loss, ratio, clipped, gradient of the summed loss)"""
    new = new.clone().requires_grad_()
    mask = torch.ones_like(new, dtype=torch.bool) if mask is None else mask
    advantages = torch.as_tensor(advantage, dtype=new.dtype).expand(new.shape)
    inputs = inputs_of(mask, seq_ids, new_logprobs=new, old_logprobs=old, advantages=advantages)
    flags = grpo.GRPOFlags(loss_fn=loss_fn, clip_lower=lower, clip_higher=higher, clip_dual=dual)
    out = grpo.policy_loss(inputs, flags)
    grad = torch.autograd.grad(out.per_token.sum(), new)[0]
    return out.per_token.detach(), out.ratio, out.clipped, grad


def per_token(*values):
    return torch.tensor([values], dtype=torch.float64)


# --- Advantages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, want",
    [
        ("none", [1.0, 2.0, 3.0, 6.0]),
        ("centered", [-2.0, -1.0, 0.0, 3.0]),  # mean 3
        ("standard", [x / math.sqrt(14 / 4) for x in (-2.0, -1.0, 0.0, 3.0)]),  # squares 4 + 1 + 0 + 9
        ("standard_unbiased", [x / (math.sqrt(14 / 3) + 1e-6) for x in (-2.0, -1.0, 0.0, 3.0)]),
    ],
)
def test_advantages_by_hand(kind, want):
    """Of a group, and of the same behind another group."""
    scores = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert_close(grpo.compute_advantages(scores, 4, kind), torch.tensor(want), rtol=1e-6, atol=0)
    two = grpo.compute_advantages(torch.cat([torch.tensor([0.0, 0.0, 0.0, 9.0]), scores]), 4, kind)
    assert_close(two[4:], torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["standard", "standard_unbiased", "centered"])
def test_equal_scores_give_exact_zeros(kind):
    """0.1, 1.3 and 2.7 are no binary fractions: their float32 mean is not themselves, and a tiny std blows that up."""
    for value, size, dtype in itertools.product(
        (0.1, 1.3, 2.7, 1e6 + 0.1), (3, 5, 11, 17), (torch.float32, torch.float64)
    ):
        scores = torch.full((2 * size,), value, dtype=dtype)
        assert grpo.compute_advantages(scores, size, kind).tolist() == [0.0] * 2 * size


@pytest.mark.parametrize(
    "kind, want",
    [
        ("none", [4.0, 0.0, 8.0, 0.0]),
        ("centered", [-2.0, 0.0, 2.0, 0.0]),  # mean of 4 and 8
        ("standard", [-1.0, 0.0, 1.0, 0.0]),
        ("standard_unbiased", [-2 / (math.sqrt(8) + 1e-6), 0.0, 2 / (math.sqrt(8) + 1e-6), 0.0]),  # (4 + 4) / (2 - 1)
    ],
)
def test_missing_scores_do_not_count(kind, want):
    scores = torch.tensor([4.0, NAN, 8.0, NAN])
    assert_close(grpo.compute_advantages(scores, 4, kind), torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", verl("grpo_advantages"))
def test_verl_advantages(case):
    """norm_std is our standard_unbiased, without it centered; groups of unequal sizes are computed one by one. Where a
    group has equal rewards or one response, ours are exactly 0; verl has a rounding error over 1e-6, or the reward."""
    kind = "standard_unbiased" if case["params"]["norm_std"] else "centered"
    scores, want = (torch.tensor(case[k], dtype=torch.float32) for k in ("rewards", "adv64"))
    members: dict = {}
    for i, group in enumerate(case["group_ids"]):
        members.setdefault(group, []).append(i)
    for index in members.values():
        got = grpo.compute_advantages(scores[index], len(index), kind)
        if len(set(scores[index].tolist())) == 1:
            assert got.tolist() == [0.0] * len(index)
        else:
            assert_close(got, want[index], **ROUNDING)


# --- Policy loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, want, gradient",
    [  # the loss is the larger of -A r and -A clip(r, 0.9, 1.3); d r / d logp = r
        (1.2, 1.0, -1.2, -1.2),  # inside
        (1.5, 1.0, -1.3, 0.0),  # above, good: clipped
        (1.5, -1.0, 1.5, 1.5),  # above, bad: pushed down with all its weight
        (0.5, 1.0, -0.5, -0.5),  # below, good: pulled up
        (0.5, -1.0, 0.9, 0.0),  # below, bad: clipped
        (0.5, -2.0, 1.8, 0.0),
    ],
)
def test_dapo_clips_each_side_by_sign(ratio, advantage, want, gradient):
    loss, got, clipped, grad = loss_of(log(ratio / 4), log(1 / 4), advantage, lower=0.1, higher=0.3)
    assert_close(loss, per_token(want))
    assert_close(got, per_token(ratio))
    assert_close(grad, per_token(gradient))
    assert clipped.item() == (gradient == 0)


def test_dual_clip_bounds_bad_tokens_only():  # ratio 5, c = 3
    new = log(0.5, 0.5)
    old = log(0.1, 0.1)
    advantages = per_token(-2.0, 2.0)
    loss, _, _, grad = loss_of(new, old, advantages, dual=3.0)
    assert_close(loss, per_token(6.0, -2.4))  # min(2 x 5, 2 x 3), and -2 x 1.2 as without
    assert_close(grad, per_token(0.0, 0.0))
    assert_close(loss_of(new, old, advantages, dual=0.0)[0], per_token(10.0, -2.4))
    assert_close(loss_of(new, old, advantages, dual=6.0)[0], per_token(10.0, -2.4))  # 5 < 6


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_cispo_keeps_the_gradient_of_clipped_tokens(advantage):
    new = log(0.5, 0.2, 0.1)
    old = log(0.1, 0.2, 0.5)  # ratios 5, 1, 0.2, clipped above at 1.3
    loss, _, clipped, grad = loss_of(new, old, advantage, "cispo", lower=INF, higher=0.3)
    weights = per_token(1.3, 1.0, 0.2)
    assert_close(grad, -advantage * weights)  # d log p = 1
    assert_close(loss, -advantage * weights * new)
    assert clipped.tolist() == [[True, False, False]]


def test_gspo_ratio_is_the_geometric_mean_of_the_response():
    new = log(0.4, 0.1, 0.8)
    old = log(0.2, 0.2, 0.1)  # ratios 2, 1/2, 8: product 8, cube root 2
    loss, ratio, _, grad = loss_of(new, old, 1.0, "gspo", higher=3.0)
    assert_close(ratio, per_token(2.0, 2.0, 2.0))
    assert_close(loss, per_token(-2.0, -2.0, -2.0))
    # mean loss is -s with s = exp(mean_t log ratio_t): d s / d logp_t = s / 3 for every token, summed over 3 tokens
    assert_close(grad, per_token(-2.0, -2.0, -2.0))


@pytest.mark.parametrize("loss_fn", LOSS_FNS)
def test_on_policy_every_loss_has_the_policy_gradient(loss_fn):  # -A grad log p, the REINFORCE estimator
    new = log(0.3, 0.6, 0.1)
    advantages = per_token(2.0, 2.0, 2.0)
    _, ratio, clipped, grad = loss_of(new, new, advantages, loss_fn)
    assert_close(ratio, torch.ones_like(new), rtol=0, atol=0)
    assert_close(grad, -advantages)
    assert not clipped.any()


@pytest.mark.parametrize("loss_fn", LOSS_FNS)
def test_off_policy_no_loss_mixes_the_responses_of_a_row(loss_fn):
    """tests/test_learner.py's splits are on policy, where a mean over the row is one over the response: ratio 1."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 4, 2, 5)
    new, old = -3 * torch.rand(2, 1, sum(sizes), generator=generator, dtype=torch.float64)
    advantages = per_token(*(a for a, n in zip((2.0, -1.0, 0.5, -3.0), sizes, strict=True) for _ in range(n)))
    seq_ids = torch.arange(1, 5).repeat_interleave(torch.tensor(sizes))[None]
    mask = torch.rand(seq_ids.shape, generator=generator) < 0.8
    together = loss_of(new, old, advantages, loss_fn, mask=mask, seq_ids=seq_ids)
    parts = [x.split(sizes, 1) for x in (new, old, advantages, mask)]
    alone = [loss_of(n, o, a, loss_fn, mask=m) for n, o, a, m in zip(*parts, strict=True)]
    for got, want in zip(together, zip(*alone, strict=True), strict=True):
        assert_close(got, torch.cat(want, 1))


@pytest.mark.parametrize("loss_fn", LOSS_FNS)
@pytest.mark.parametrize("gap", [500.0, -500.0, INF, -INF])
def test_huge_log_ratios_stay_finite(loss_fn, gap):
    old = torch.tensor([[-1.0, -1.0]])
    loss, ratio, _, grad = loss_of(old + torch.tensor([[gap, 0.0]]).clamp(-1e6, 1e6), old, -1.0, loss_fn)
    assert loss.isfinite().all() and ratio.isfinite().all() and grad.isfinite().all()


VERL_LOSSES = {"vanilla": ("dapo", 3.0), "gspo": ("gspo", 0.0), "cispo": ("cispo", 0.0)}


def aggregate_as_verl(values, mask, case):
    """aggregate() called to mean verl's mode. verl's dp_size is our global counts and the trainer's x world size."""
    params = case["params"]
    responses = int(mask.any(1).sum())
    tokens = params.get("batch_num_tokens", int(mask.sum()))
    sequences = params.get("global_batch_size", responses)
    kind = {
        "token-mean": "token",
        "seq-mean-token-mean": "sequence",
        "seq-mean-token-sum": str(sequences),
        "seq-mean-token-sum-norm": str(sequences * mask.shape[1]),  # verl 0.9.1: by the mask's width and by sequences
    }[params["agg"]]
    return aggregate(values, mask, rows(mask), kind, tokens, sequences) * params.get("dp_size", 1)


@pytest.mark.parametrize("case", verl("policy_loss"))
def test_verl_policy_loss(case):
    """Loss and gradient in float64; verl's inputs are float32."""
    mask = torch.tensor(case["mask"]).bool()
    new, old, advantages = (torch.tensor(case[k]).double() for k in ("logp_new", "logp_old", "adv"))
    new.requires_grad_()
    params = case["params"]
    loss_fn, dual = VERL_LOSSES[case["kind"]]
    inputs = inputs_of(mask, new_logprobs=new, old_logprobs=old, advantages=advantages)
    flags = grpo.GRPOFlags(
        loss_fn=loss_fn, clip_lower=params["clip_low"], clip_higher=params["clip_high"], clip_dual=dual
    )
    loss = aggregate_as_verl(grpo.policy_loss(inputs, flags).per_token, mask, case)
    # verl divides by the length + 1e-8
    tolerance = dict(rtol=1e-8 if params["agg"] == "seq-mean-token-mean" else 1e-9, atol=1e-9)
    assert_close(loss, torch.tensor(case["loss64"], dtype=torch.float64), **tolerance)
    (grad,) = torch.autograd.grad(loss, new)
    assert_close(grad, torch.tensor(case["grad64"], dtype=torch.float64), **tolerance)


# --- KL ---------------------------------------------------------------------------------------------------------------


def test_kl_estimates_by_hand():  # p = 0.5, ref = 0.25: d = ln 2, exp(-d) = 1/2; ratio 3
    d = math.log(2)
    got = [e.item() for e in grpo.kl_estimates(log(0.5), log(0.25), per_token(3.0))]
    assert got == pytest.approx([d, d * d / 2, 0.5 - 1 + d, 3 * d])
    far = grpo.kl_estimates(torch.tensor([-500.0, 500.0]), torch.zeros(2), torch.ones(2))
    assert far[0].tolist() == [-40.0, 40.0] and torch.stack(far).isfinite().all()


# --- Importance weights: learner over engine --------------------------------------------------------------------------


def weights_of(old, engine, mask=None, seq_ids=None, upper=0.0, **options):
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    flags = {f"rho_{name}": value for name, value in options.items()}
    inputs = inputs_of(mask, seq_ids, old_logprobs=old, vllm_logprobs=engine)
    return grpo.importance_weights(inputs, grpo.GRPOFlags(rho_clamp_upper_bound=upper, **flags))


OLD = log(0.8, 0.2, 0.3, 0.1)
ENGINE = log(0.2, 0.2, 0.6, 0.4)  # rho 4, 1, 1/2, 1/4


@pytest.mark.parametrize(
    "bounds, want",
    [
        (dict(), [4.0, 1.0, 0.5, 0.25]),
        (dict(upper=2.0), [2.0, 1.0, 0.5, 0.25]),
        (dict(upper=2.0, clamp_lower_bound=0.4), [2.0, 1.0, 0.5, 0.4]),
        (dict(clamp_lower_bound=0.4, mask_lower_bound=0.3), [4.0, 1.0, 0.5, 0.0]),  # what is dropped is not raised
        (dict(mask_lower_bound=0.4, mask_upper_bound=3.0), [0.0, 1.0, 0.5, 0.0]),
        (dict(mask_lower_bound=1.0, mask_upper_bound=1.0), [0.0, 1.0, 0.0, 0.0]),  # what is on a bound is kept
        (dict(upper=2.0, mask_upper_bound=3.0), [0.0, 1.0, 0.5, 0.25]),  # before truncation
    ],
)
def test_weights_are_truncated_and_masked(bounds, want):
    assert_close(weights_of(OLD, ENGINE, **bounds), per_token(*want))
    assert weights_of(torch.tensor([[500.0, -500.0]]), torch.zeros(1, 2), **bounds).isfinite().all()


@pytest.mark.parametrize(
    "advantage, bound, want",
    [  # mean |rho - 1| of the first two tokens is 1.5, of the last two 0.625
        (1.0, 1.6, [4.0, 1.0, 0.5, 0.25]),
        (1.0, 1.4, [0.0, 1.0, 0.5, 0.25]),  # rho 4 with A > 0 goes further from the engine, rho 1 is where it was
        (-1.0, 1.4, [4.0, 1.0, 0.5, 0.25]),
        (-1.0, 0.6, [4.0, 1.0, 0.0, 0.0]),  # rho below 1 with A < 0 goes further too
        (0.0, 0.6, [4.0, 1.0, 0.5, 0.25]),
    ],
)
def test_weights_mask_responses_by_their_total_variation(advantage, bound, want):
    tensors = dict(old_logprobs=OLD, vllm_logprobs=ENGINE, advantages=torch.full_like(OLD, advantage))
    inputs = inputs_of(torch.ones_like(OLD, dtype=torch.bool), torch.tensor([[1, 1, 2, 2]]), **tensors)
    flags = dict(rho_clamp_upper_bound=0.0, rho_mask_upper_bound=bound, rho_mask_tv_divergence=True)
    assert_close(grpo.importance_weights(inputs, grpo.GRPOFlags(**flags)), per_token(*want))


@pytest.mark.parametrize(
    "bounds, want",
    [  # geometric means: sqrt(4 x 1) = 2 and sqrt(1/2 x 1/4) = 0.354
        (dict(mask_upper_bound=1.9), [0.0, 0.0, 0.5, 0.25]),
        (dict(mask_upper_bound=2.1), [4.0, 1.0, 0.5, 0.25]),
        (dict(mask_lower_bound=0.3), [4.0, 1.0, 0.5, 0.25]),
        (dict(mask_lower_bound=0.4), [4.0, 1.0, 0.0, 0.0]),
        (dict(mask_lower_bound=0.4, upper=2.0), [2.0, 1.0, 0.0, 0.0]),
    ],
)
def test_sequence_level_masking_drops_whole_responses(bounds, want):
    in_one_row = weights_of(OLD, ENGINE, seq_ids=torch.tensor([[0, 0, 1, 1]]), mask_sequence_level=True, **bounds)
    assert_close(in_one_row, per_token(*want))
    in_two = weights_of(OLD.view(2, 2), ENGINE.view(2, 2), mask_sequence_level=True, **bounds)
    assert_close(in_two, per_token(*want).view(2, 2))


def test_weights_are_zero_and_silent_outside_the_mask():
    mask = torch.tensor([[True, False, False, True]])
    old = OLD.clone().requires_grad_()
    engine = ENGINE.clone()
    engine[0, 1:3] = torch.tensor([NAN, -INF])
    got = weights_of(
        old, engine, mask=mask, mask_upper_bound=1.5, mask_sequence_level=True
    )  # geometric mean of 4 and 1/4 is 1
    assert_close(got, per_token(4.0, 0.0, 0.0, 0.25))
    assert not got.requires_grad


# --- Aggregation ------------------------------------------------------------------------------------------------------

VALUES = torch.tensor([[1.0, 2.0, 3.0, 99.0], [10.0, 99.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()  # the third response has no tokens


@pytest.mark.parametrize("kind, want", [("token", 16 / 4), ("sequence", (2 + 10) / 2), ("8", 16 / 8), ("0.5", 32.0)])
def test_aggregate_by_hand(kind, want):
    for n in (2, 3):  # without and with the response that has no tokens
        assert aggregate(VALUES[:n], MASK[:n], rows(MASK)[:n], kind, 4, 2).item() == pytest.approx(want)


# --- Logprobs and entropy ---------------------------------------------------------------------------------------------


def head(seed=0, n=7, width=5, vocab=11):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(k, width, generator=generator).requires_grad_() for k in (n, vocab))
    return hidden, weight, torch.randint(vocab, (n,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_against_torch(temperature, chunk):
    """Values and gradients of both outputs at once, with a different weight for each token."""
    hidden, weight, targets = head()
    logprobs, entropy = HeadLogprobs.apply(hidden, weight, targets, temperature, chunk)
    logits = hidden @ weight.T / temperature
    want = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    want_entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(logprobs, want, rtol=1e-5, atol=1e-5)
    assert_close(entropy, want_entropy, rtol=1e-5, atol=1e-5)
    a = torch.linspace(-1, 2, 7)
    b = torch.linspace(3, -2, 7)
    for g, h in ((a, b), (a, 0 * b), (0 * a, b)):
        got = torch.autograd.grad((g * logprobs + h * entropy).sum(), (hidden, weight), retain_graph=True)
        wanted = torch.autograd.grad((g * want + h * want_entropy).sum(), (hidden, weight), retain_graph=True)
        assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# --- pass@k and the whole loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, correct, k", [(n, c, k) for n in (1, 2, 4, 6) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_by_enumeration(n, correct, k):
    draws = list(itertools.combinations([i < correct for i in range(n)], k))
    assert grpo.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def two_rows(padding=0.0):
    """A batch of two responses of 2 and 3 tokens after a prompt; `padding` fills floats outside the mask."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]]).bool()

    def fill(*values):
        return torch.full(mask.shape, padding).masked_scatter(mask, torch.tensor(values))

    ids = torch.zeros(mask.shape, dtype=torch.long)
    return grpo.Batch(
        input_ids=ids,
        targets=ids,
        response_mask=mask,
        seq_ids=rows(mask),
        advantages=fill(1.0, 1.0, -0.5, -0.5, -0.5),
        vllm_logprobs=fill(-0.2, -1.1, -0.6, -0.3, -2.0),
        old_logprobs=fill(-0.3, -1.0, -0.5, -0.4, -2.1),
        ref_logprobs=fill(-0.6, -1.2, -0.1, -0.9, -1.8),
    ), fill(-0.25, -1.3, -0.4, -0.4, -1.9)


BASE = grpo.Args(model_name_or_path="x", beta=0.1, entropy_coef=0.01)
TOTALS = grpo.Totals(tokens=5.0, responses=2.0)


def whole_loss(batch, new, entropy, args):
    """Loss, its gradients by new logprobs and entropy, and metrics."""
    new = new.clone().requires_grad_()
    entropy = entropy.clone().requires_grad_()
    metrics = utils.Metrics()
    loss = grpo.grpo_loss(batch.loss_inputs(new, entropy), TOTALS, args, metrics)
    sums = {name: (float(total), float(count)) for name, (total, count) in metrics.sums.items()}
    return loss.detach(), *torch.autograd.grad(loss, (new, entropy), allow_unused=True), sums


@pytest.mark.parametrize("padding", [NAN, INF, -INF])
@pytest.mark.parametrize("denominator", ["token", "sequence", "7"])
@pytest.mark.parametrize("loss_fn", LOSS_FNS)
@pytest.mark.parametrize("estimator", ["0", "1", "2", "3"])
def test_padding_reaches_neither_loss_nor_gradient_nor_metrics(padding, denominator, loss_fn, estimator):
    options = dict(loss_denominator=denominator, loss_fn=loss_fn, kl_estimator=estimator, rho_mask_upper_bound=1.2)
    for sequence_level in (False, True):
        args = replace(BASE, **options, rho_mask_sequence_level=sequence_level)
        (dirty, dirty_new) = two_rows(padding)
        (clean, clean_new) = two_rows(0.0)
        got = whole_loss(dirty, dirty_new, torch.where(dirty.response_mask, 0.7, padding), args)
        want = whole_loss(clean, clean_new, torch.where(clean.response_mask, 0.7, 0.0), args)
        assert got[0].isfinite() and want[1][clean.response_mask].all()
        for a, b in zip(got[:3], want[:3], strict=True):
            assert_close(a, b)
        assert len(got[3]) > 10 and got[3] == want[3]


def test_cispo_has_no_lower_bound():
    """A token's ratio is exp(-0.3)."""
    batch, new = two_rows()
    args = replace(BASE, loss_fn="cispo")
    losses = [whole_loss(batch, new, torch.zeros_like(new), replace(args, clip_lower=x))[0] for x in (1e-6, 1.0)]
    assert losses[0] == losses[1]


def test_whole_loss_by_hand():
    """One token: p 0.6, old 0.5, engine 0.4, reference 0.3, A = 2, H = 0.5; beta 0.1, entropy coefficient 0.01.

    ratio 1.2, rho 0.5 / 0.4 = 1.25; k3: exp(-ln 2) - 1 + ln 2. loss = -2 x 1.2 x 1.25 + 0.1 k3 - 0.01 x 0.5
    """
    ids = torch.zeros(1, 1, dtype=torch.long)
    mask = torch.ones(1, 1, dtype=torch.bool)
    old, engine, ref, new = (log(p).float() for p in (0.5, 0.4, 0.3, 0.6))
    batch = grpo.Batch(ids, ids, mask, ids, torch.tensor([[2.0]]), engine, old_logprobs=old, ref_logprobs=ref)

    def loss(tokens=1.0, **changes):
        return whole_loss(replace(batch), new, torch.tensor([[0.5]]), replace(BASE, **changes))[0].item() * tokens

    k3 = 0.5 - 1 + math.log(2)
    once = 1 / 5  # whole_loss counts 5 tokens in the step
    assert loss() == pytest.approx(once * (-3.0 + 0.1 * k3 - 0.005), rel=1e-5)
    assert loss(use_rho_correction=False) == pytest.approx(once * (-2.4 + 0.1 * k3 - 0.005), rel=1e-5)
    assert loss(rho_clamp_upper_bound=1.1) == pytest.approx(once * (-2.64 + 0.1 * k3 - 0.005), rel=1e-5)
    assert loss(clip_higher=0.1) == pytest.approx(once * (-2.75 + 0.1 * k3 - 0.005), rel=1e-5)
    assert loss(kl_estimator="3") == pytest.approx(once * (-3.0 + 0.1 * 1.2 * math.log(2) - 0.005), rel=1e-5)
    assert loss(loss_denominator="8") == pytest.approx((-3.0 + 0.1 * k3 - 0.005) / 8, rel=1e-5)
    assert loss(beta=0.0, entropy_coef=0.0) == pytest.approx(once * -3.0, rel=1e-5)
