"""scripts/parts/head_kl.py: both KLs to a teacher, over the whole vocabulary and over its top k, their gradients, and
what is kept between passes."""

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.parts.head_kl import HeadKL, Teacher, top_of

TOKENS, VOCAB = 7, 23


def heads(more_rows=0, seed=0):
    """hidden (7, 5) and weight (23, 5) of a policy, hidden (7, 3) and weight (23 + more_rows, 3) of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS, 5), (VOCAB, 5), (TOKENS, 3), (VOCAB + more_rows, 3))
    hidden, weight, *teacher = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return hidden.requires_grad_(), weight.requires_grad_(), *teacher


def by_torch(hidden, weight, teacher_hidden, teacher_weight, temperature):
    log_p = torch.log_softmax(hidden @ weight.T / temperature, 1)
    log_q = torch.log_softmax(teacher_hidden @ teacher_weight.T / temperature, 1)[:, :VOCAB]
    return (log_p.exp() * (log_p - log_q)).sum(1), (log_q.exp() * (log_q - log_p)).sum(1)


def by_torch_of_classes(hidden, weight, teacher_hidden, teacher_weight, temperature, k):
    """The same of the teacher's k most likely tokens and one class of all others."""
    p = torch.softmax(hidden @ weight.T / temperature, 1)
    q = torch.softmax(teacher_hidden @ teacher_weight.T / temperature, 1)
    top = q[:, :VOCAB].topk(k).indices
    p, q = (torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(1, keepdim=True)], 1) for x in (p, q))
    return (p * (p / q).log()).sum(1), (q * (q / p).log()).sum(1)


def kls(hidden, weight, *teacher, temperature, chunk, k=None):
    """Both KLs to the teacher, or to its top k."""
    whole = Teacher(*teacher, temperature)
    chosen = whole if k is None else top_of(whole, k, VOCAB, chunk)
    return HeadKL.apply(hidden, weight, chosen, temperature, chunk)


@pytest.mark.parametrize("k", [None, 1, 6])
@pytest.mark.parametrize("more_rows", [0, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_against_autograd(chunk, temperature, more_rows, k):
    """Values and gradients of each KL and of both, each token with a weight of its own, in float64."""
    inputs = heads(more_rows)
    got = kls(*inputs, temperature=temperature, chunk=chunk, k=k)
    want = by_torch(*inputs, temperature) if k is None else by_torch_of_classes(*inputs, temperature, k)
    assert_close(got, want, rtol=1e-12, atol=1e-12)
    a, b = torch.linspace(-1, 2, TOKENS).double(), torch.linspace(3, -2, TOKENS).double()
    for g, h in ((a, None), (None, b), (a, b)):
        grads = []
        for reverse, forward in (got, want):
            terms = [w * kl for w, kl in ((g, reverse), (h, forward)) if w is not None]
            grads.append(torch.autograd.grad(sum(terms).sum(), inputs[:2], retain_graph=True))
        assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)
        assert all(grad.abs().max() > 0.01 for grad in grads[0])


def test_more_classes_see_more_and_all_of_them_see_all():
    """Data processing: k + 1 classes have no larger KL than more of them, and with k = V it is the vocabulary's."""
    inputs = heads(seed=3)
    seen = [kls(*inputs, temperature=0.8, chunk=4, k=k) for k in (1, 3, 9, VOCAB)]
    for few, more in zip(seen, seen[1:], strict=False):
        assert all((a <= b + 1e-12).all() and (a < b - 1e-6).any() for a, b in zip(few, more, strict=True))
    assert_close(seen[-1], kls(*inputs, temperature=0.8, chunk=4))


def test_a_policy_that_drifts_is_seen():
    """Of ten tokens the teacher likes 0 and 1, in equal shares; the policy too, but it gives 0.9 to the others.
    Normalized over the two, both are the same. The class of the others sees it, and its gradient takes them down."""
    teacher = torch.full((1, 10), 1e-3).double()
    teacher[0, :2] = 0.496
    policy = torch.full((1, 10), 0.9 / 8).double()
    policy[0, :2] = 0.05
    logits, eye = policy.log().requires_grad_(), torch.eye(10).double()
    reverse, forward = HeadKL.apply(logits, eye, top_of(Teacher(teacher.log(), eye, 1.0), 2, 10, 1), 1.0, 1)
    assert reverse.item() == pytest.approx(0.1 * math.log(0.1 / 0.992) + 0.9 * math.log(0.9 / 0.008))
    assert forward.item() == pytest.approx(0.992 * math.log(0.992 / 0.1) + 0.008 * math.log(0.008 / 0.9))
    for kl in (reverse, forward):
        (grad,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
        assert (grad[0, :2] < -0.1).all() and (grad[0, 2:] > 0.02).all()


def test_no_tokens_and_no_rest():
    """A rank of several may have no token; a teacher so sure that nothing is left for the others stays finite."""
    hidden, weight, teacher_hidden, teacher_weight = heads()
    for k in (None, 3):
        empty = kls(hidden[:0], weight, teacher_hidden[:0], teacher_weight, temperature=1.0, chunk=2, k=k)
        assert all(kl.shape == (0,) for kl in empty)
    sure = (400 * teacher_hidden).float()
    hidden = hidden.detach().float().requires_grad_()
    found = kls(hidden, weight.detach().float(), sure, teacher_weight.float(), temperature=1.0, chunk=2, k=2)
    (grad,) = torch.autograd.grad(sum(found).sum(), hidden)
    assert all(kl.isfinite().all() for kl in found) and grad.isfinite().all()


def test_float32_and_a_head_that_does_not_train():
    hidden, weight, *teacher = (x.detach().float() for x in heads(seed=1))
    hidden.requires_grad_()
    got = kls(hidden, weight, *teacher, temperature=1.0, chunk=3)
    assert all(kl.dtype == torch.float32 for kl in got)
    want = by_torch(hidden, weight, *teacher, 1.0)
    assert_close(got, want, rtol=1e-5, atol=1e-6)
    for kl, wanted in zip(got, want, strict=True):
        (grad,), (wanted_grad,) = (torch.autograd.grad(x.sum(), hidden, retain_graph=True) for x in (kl, wanted))
        assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-6)


def test_the_teacher_itself_is_at_no_distance():
    hidden, weight, *_ = heads()
    for kl in kls(hidden, weight, hidden.detach(), weight.detach(), temperature=0.7, chunk=2):
        assert kl.abs().max() < 1e-14
        grads = torch.autograd.grad(kl.sum(), (hidden, weight), retain_graph=True)
        assert all(grad.abs().max() < 1e-14 for grad in grads)


@pytest.mark.parametrize("k", [None, 3])
def test_a_number_a_token_is_kept_and_no_logits(k):
    inputs = heads()
    kept = []

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        reverse, _ = kls(*inputs, temperature=1.0, chunk=2, k=k)
    known = {x.data_ptr() for x in inputs}
    new = [x for x in kept if x.data_ptr() not in known]
    assert sum(x.numel() for x in new) == TOKENS and torch.equal(new[0], reverse)


class Largest(TorchDispatchMode):
    """Records how many rows the largest tensor as wide as the vocabulary had."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[1:] == (VOCAB,):
            self.rows = max(self.rows, out.shape[0])
        return out


@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("chunk", [2, 3])
def test_logits_of_a_chunk_at_a_time(chunk, k):
    """In both passes. 5 hidden and 3 hidden rows are below the vocabulary's width, weights' transposes excepted."""
    hidden, weight, *teacher = heads()
    with Largest() as passes:
        reverse, forward = kls(hidden, weight, *teacher, temperature=1.0, chunk=chunk, k=k)
        wide = passes.rows
        passes.rows = 0
        (reverse + forward).sum().backward()
    assert wide == passes.rows
    assert wide <= max(chunk, 5)


def test_a_teacher_of_fewer_tokens_is_refused():
    hidden, weight, teacher_hidden, teacher_weight = heads()
    with pytest.raises(ValueError, match="the teacher's head has 22 rows, the policy's 23"):
        kls(hidden, weight, teacher_hidden, teacher_weight[:22], temperature=1.0, chunk=2)
