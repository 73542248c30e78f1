"""KL divergences to a teacher over the whole vocabulary, at the heads of two language models, without keeping logits.

On-policy distillation from sampled tokens alone sees one number of the teacher's distribution at each token: an
estimate, which is fragile (arXiv:2603.25562). Here the whole distributions are compared. With the logits u = x W^T
of the policy and u' = x' W'^T of the teacher, the temperature T, p = softmax(u / T) and q = softmax(u' / T), at each
token

    reverse   KL(p || q) = sum_v p_v (log p_v - log q_v)        what sampled tokens of the policy estimate
    forward   KL(q || p) = sum_v q_v (log q_v - log p_v)        what learning from the teacher's text has

The teacher does not learn. The derivatives by the policy's logits are

    d reverse / d u_v = p_v (log p_v - log q_v - KL(p || q)) / T
    d forward / d u_v = (Q p_v - q_v) / T,   Q = sum_v q_v

The teacher's head may have more rows than the policy's: then q is the teacher's own probability of the policy's V
tokens, and Q is less than 1.

Forward and backward make both models' logits for a chunk of tokens at a time and keep one number a token between them:
the reverse KL. Beside it they keep the hidden states of both models, and their heads. The teacher's most likely k
tokens would take as much memory for k of about H' / 3, and leave out the rest.

Shapes: n tokens, H hidden size of the policy, H' of the teacher, V and V' rows of their heads, V' >= V.
"""

import torch
from torch import Tensor


class HeadKL(torch.autograd.Function):
    """(KL(policy || teacher), KL(teacher || policy)) of each token, (n,) each, in float32 or, for float64, in float64.

    hidden (n, H) and weight (V, H) are the policy's and get gradients; teacher_hidden (n, H') and teacher_weight
    (V', H') get none. The logits of at most `chunk` tokens exist at once, those of both models. Raises ValueError if
    the teacher's head has fewer rows than the policy's.
    """

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, temperature: float, chunk: int):
        if len(teacher_weight) < len(weight):
            raise ValueError(f"the teacher's head has {len(teacher_weight)} rows, the policy's {len(weight)}")
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        reverse = hidden.new_empty(len(hidden), dtype=dtype)
        forward = torch.empty_like(reverse)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p = log_probabilities(hidden[part], weight, temperature)
            log_q = log_probabilities(teacher_hidden[part], teacher_weight, temperature)[:, : len(weight)]
            difference = log_p - log_q
            reverse[part] = torch.linalg.vecdot(log_p.exp_(), difference)
            forward[part] = -torch.linalg.vecdot(log_q.exp(), difference)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, reverse)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.chunk = chunk
        return reverse, forward

    @staticmethod
    def backward(ctx, g, h):
        hidden, weight, teacher_hidden, teacher_weight, reverse = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = torch.zeros_like(weight, dtype=reverse.dtype)  # chunks add up in float32
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = log_probabilities(hidden[part], weight, ctx.temperature)
            log_q = log_probabilities(teacher_hidden[part], teacher_weight, ctx.temperature)[:, : len(weight)]
            logits_grad = torch.zeros_like(log_p)
            if g is not None:
                logits_grad += reverse_gradient(log_p, log_q, reverse[part], g[part])
            if h is not None:
                logits_grad += forward_gradient(log_p, log_q, h[part])
            logits_grad = logits_grad.div_(ctx.temperature).to(weight.dtype)
            hidden_grad[part] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad += logits_grad.T @ hidden[part]
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight.dtype)
        return hidden_grad, weight_grad, None, None, None, None


def log_probabilities(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ weight.T / temperature) of a chunk, (chunk, V), in float32 at least."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits = logits / temperature
    return logits.sub_(logits.logsumexp(1, keepdim=True))


def reverse_gradient(log_p: Tensor, log_q: Tensor, kl: Tensor, g: Tensor) -> Tensor:
    """g p (log p - log q - KL(p || q)), (chunk, V): the gradient by u / T of g KL(p || q). kl and g are (chunk,)."""
    factor = (log_p - log_q).sub_(kl[:, None])
    return factor.mul_(log_p.exp()).mul_(g[:, None])


def forward_gradient(log_p: Tensor, log_q: Tensor, h: Tensor) -> Tensor:
    """h (Q p - q), (chunk, V): the gradient by u / T of h KL(q || p). h is (chunk,)."""
    q = log_q.exp()
    known = q.sum(1, keepdim=True)
    return log_p.exp().mul_(known).sub_(q).mul_(h[:, None])
