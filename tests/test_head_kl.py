"""scripts/parts/head_kl.py: both KLs over the whole vocabulary, their gradients, and what is kept between passes."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.parts.head_kl import HeadKL

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


@pytest.mark.parametrize("more_rows", [0, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_against_autograd(chunk, temperature, more_rows):
    """Values and gradients of each KL and of both, each token with a weight of its own, in float64."""
    inputs = heads(more_rows)
    got = HeadKL.apply(*inputs, temperature, chunk)
    want = by_torch(*inputs, temperature)
    assert_close(got, want, rtol=1e-12, atol=1e-12)
    a, b = torch.linspace(-1, 2, TOKENS).double(), torch.linspace(3, -2, TOKENS).double()
    for g, h in ((a, None), (None, b), (a, b)):
        grads = []
        for reverse, forward in (got, want):
            terms = [w * kl for w, kl in ((g, reverse), (h, forward)) if w is not None]
            grads.append(torch.autograd.grad(sum(terms).sum(), inputs[:2], retain_graph=True))
        assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-12)
        assert all(grad.abs().max() > 0.01 for grad in grads[0])


def test_float32_and_a_head_that_does_not_train():
    hidden, weight, *teacher = (x.detach().float() for x in heads(seed=1))
    hidden.requires_grad_()
    got = HeadKL.apply(hidden, weight, *teacher, 1.0, 3)
    assert all(kl.dtype == torch.float32 for kl in got)
    want = by_torch(hidden, weight, *teacher, 1.0)
    assert_close(got, want, rtol=1e-5, atol=1e-6)
    for kl, wanted in zip(got, want, strict=True):
        (grad,), (wanted_grad,) = (torch.autograd.grad(x.sum(), hidden, retain_graph=True) for x in (kl, wanted))
        assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-6)


def test_the_teacher_itself_is_at_no_distance():
    hidden, weight, *_ = heads()
    for kl in HeadKL.apply(hidden, weight, hidden.detach(), weight.detach(), 0.7, 2):
        assert kl.abs().max() < 1e-14
        grads = torch.autograd.grad(kl.sum(), (hidden, weight), retain_graph=True)
        assert all(grad.abs().max() < 1e-14 for grad in grads)


def test_a_number_a_token_is_kept_and_no_logits():
    inputs = heads()
    kept = []

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        reverse, _ = HeadKL.apply(*inputs, 1.0, 2)
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


@pytest.mark.parametrize("chunk", [2, 3])
def test_logits_of_a_chunk_at_a_time(chunk):
    """In both passes. 5 hidden and 3 hidden rows are below the vocabulary's width, weights' transposes excepted."""
    hidden, weight, *teacher = heads()
    with Largest() as passes:
        reverse, forward = HeadKL.apply(hidden, weight, *teacher, 1.0, chunk)
        wide = passes.rows
        passes.rows = 0
        (reverse + forward).sum().backward()
    assert wide == passes.rows
    assert wide <= max(chunk, 5)


def test_a_teacher_of_fewer_tokens_is_refused():
    hidden, weight, teacher_hidden, teacher_weight = heads()
    with pytest.raises(ValueError, match="the teacher's head has 22 rows, the policy's 23"):
        HeadKL.apply(hidden, weight, teacher_hidden, teacher_weight[:22], 1.0, 2)
