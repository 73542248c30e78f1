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
from collections.abc import Callable
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
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
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
        hidden_grad = torch.empty_like(hidden)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)  # chunks add up in float32
        backward_chunk = chunk_function(HeadLogprobs.backward_chunk, ctx.compiled)
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
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
            hidden_grad[part] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad += logits_grad.T @ hidden[part]
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None

    @staticmethod
    def logits(hidden, weight, temperature: float):
        """The logits of a chunk, float32 (chunk, V)."""
        logits = (hidden @ weight.T).float()
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
