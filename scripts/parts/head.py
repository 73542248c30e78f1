"""Logprobs and entropies at the head of a language model, without keeping any logits. grpo.Policy calls it.

The head's product with the hidden state of a token is u = x W^T, (V,). With temperature T and p = softmax(u / T),

    logprob of the target t   l = log p_t
    entropy                   H = -sum_v p_v log p_v

and their derivatives by a logit are

    d l / d u_v = ([v = t] - p_v) / T
    d H / d u_v = -p_v (log p_v + H) / T

so that, with g and h the gradients of the loss by l and H,

    d loss / d u_v = [v = t] g / T - p_v (g / T + h / T (log p_v + H))

Autograd would keep the logits of all tokens until the backward. Here forward and backward make the logits of a chunk
of tokens at a time, in float32, and keep two numbers a token between them: the normalizer logsumexp(u / T) and H.
Operations on (chunk, V) tensors are in place: they decide how much memory a chunk takes.

Shapes: n tokens, H hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class HeadLogprobs(torch.autograd.Function):
    """(logprobs of the targets, entropies) of softmax(hidden @ weight.T / temperature), float32 (n,) each.

    hidden (n, H), weight (V, H), targets (n,). The logits of at most `chunk` tokens exist at once. With `compiled` the
    passes over them are fused.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature: float, chunk: int, compiled: bool = False):
        logprobs, entropy, normalizers = torch.empty(3, len(targets), device=hidden.device)
        forward_chunk = chunk_function(HeadLogprobs.forward_chunk, compiled)
        for part in chunks(len(targets), chunk):
            outputs = forward_chunk(hidden[part], weight, targets[part], temperature)
            logprobs[part], entropy[part], normalizers[part] = outputs
        ctx.save_for_backward(hidden, weight, targets, entropy, normalizers)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.compiled = compiled
        return logprobs, entropy

    @staticmethod
    def backward(ctx, g, h):
        hidden, weight, targets, entropy, normalizers = ctx.saved_tensors
        g = torch.zeros_like(entropy) if g is None else g / ctx.temperature
        if h is not None:
            h = h / ctx.temperature
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad[1])
        backward_chunk = chunk_function(HeadLogprobs.backward_chunk, ctx.compiled)
        for part in chunks(len(targets), ctx.chunk):
            h_part = None if h is None else h[part]
            logits_grad = backward_chunk(
                hidden[part],
                weight,
                targets[part],
                normalizers[part],
                entropy[part],
                g[part],
                h_part,
                ctx.temperature,
            )
            gradients.add(part, logits_grad)
        return *gradients.total(), None, None, None, None

    @staticmethod
    def logits(hidden, weight, temperature: float):
        """The logits of a chunk, (chunk, V), float32 or, for float64, float64."""
        logits = hidden @ weight.T
        logits = logits.to(wide(logits.dtype))
        return logits if temperature == 1 else logits.div_(temperature)

    @staticmethod
    def forward_chunk(hidden, weight, targets, temperature: float):
        """Logprobs, entropies and normalizers of a chunk, (chunk,) each."""
        logits = HeadLogprobs.logits(hidden, weight, temperature)
        normalizers = logits.logsumexp(1)
        logp = logits.sub_(normalizers[:, None])
        logprobs = logp.gather(1, targets[:, None])[:, 0]
        entropy = -torch.linalg.vecdot(logp.exp(), logp)
        return logprobs, entropy, normalizers

    @staticmethod
    def backward_chunk(hidden, weight, targets, normalizers, entropy, g, h, temperature: float):
        """d loss / d u of a chunk, (chunk, V) in the weight's dtype. g and h are divided by the temperature already."""
        logits = HeadLogprobs.logits(hidden, weight, temperature)
        logp = logits.sub_(normalizers[:, None])
        columns = targets[:, None]
        target_logp = logp.gather(1, columns)  # a copy: logp is overwritten below
        target_grad = softmax_gradient(target_logp, entropy, g, h)
        target_grad += g[:, None]
        logits_grad = softmax_gradient(logp, entropy, g, h)
        logits_grad = logits_grad.to(weight.dtype)
        return logits_grad.scatter_(1, columns, target_grad.to(weight.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What logits and sums over chunks are computed in: float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def chunks(n: int, size: int) -> Iterator[slice]:
    """0 .. n - 1 in parts of at most `size`."""
    for start in range(0, n, size):
        yield slice(start, start + size)


class HeadGradients:
    """The gradients of a loss by hidden states and head, from those by the logits of one chunk after the other."""

    def __init__(self, hidden: Tensor, weight: Tensor, trains_weight: bool):
        self.inputs = hidden
        self.head = weight
        self.hidden = torch.empty_like(hidden)
        self.weight: Tensor | None = None
        if trains_weight:
            self.weight = torch.zeros_like(weight, dtype=wide(weight.dtype))  # chunks add up in it

    def add(self, part: slice, logits_grad: Tensor) -> None:
        """Add a chunk: logits_grad (chunk, V) is d loss / d u of the tokens `part`, in the head's dtype."""
        self.hidden[part] = logits_grad @ self.head
        if self.weight is not None:
            self.weight += logits_grad.T @ self.inputs[part]

    def total(self) -> tuple[Tensor, Tensor | None]:
        """By hidden states and by the head, None if that does not train, after the last chunk."""
        if self.weight is None:
            return self.hidden, None
        return self.hidden, self.weight.to(self.head.dtype)


def softmax_gradient(logp, entropy, g, h):
    """-p (g + h (log p + H)), the part of d loss / d u that every logit has. Overwrites `logp`.

    logp (chunk, V) or (chunk, 1), the others (chunk,). h is None where the loss has no entropy.
    """
    if h is None:
        p = logp.exp_()
        return p.mul_(-g[:, None])
    p = logp.exp()
    factor = logp.add_(entropy[:, None])
    factor.mul_(h[:, None])
    factor.add_(g[:, None])
    p.mul_(factor)
    return p.neg_()


@functools.cache
def chunk_function(function: Callable, compiled: bool, backend: str | Callable = "inductor") -> Callable:
    """forward_chunk or backward_chunk; if `compiled`, one that reads and writes the logits once a pass."""
    if not compiled:
        return function
    return functools.partial(run_fused, torch.compile(function, backend=backend))


def run_fused(fused: Callable, hidden: Tensor, weight: Tensor, *others: Any) -> Any:
    """Call a compiled function so that one graph does for every number of tokens.

    The first dimension of all tensors but the weight is marked as dynamic. They are copied: torch.compile would make
    another graph for a view that starts elsewhere in its storage.
    """
    arguments = []
    for x in (hidden, *others):
        if isinstance(x, Tensor):
            x = x.clone()
            torch._dynamo.maybe_mark_dynamic(x, 0)
        arguments.append(x)
    return fused(arguments[0], weight, *arguments[1:])
