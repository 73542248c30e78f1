"""KL divergences to a teacher's whole distribution at each token, at the heads of language models, without keeping
logits.

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

**Top k.** A TopTeacher has the k tokens S that the teacher finds most likely, and one more class: all other tokens
together, r = 1 - sum_{v in S}. Both KLs are then those of distributions over these k + 1 classes,

    reverse   sum_{v in S} p_v (log p_v - log q_v) + p_r (log p_r - log q_r)

and forward likewise. They are never more than the KLs over the whole vocabulary, and equal these for a policy that has
the teacher's shape outside S. So they are computed as these, with q_v = q_r p_v / p_r outside S: values and derivatives
are the same. SDPO (arXiv:2601.20802) has this class too. The other choice is S alone (arXiv:2603.25562), with p and q
normalized over it. Then the loss does not see how much probability the policy gives to tokens that the teacher finds
unlikely, as a policy that drifts does.

Forward and backward make the policy's logits, and those of a teacher with a head, for a chunk of tokens at a time. They
keep one number a token between them: the reverse KL. Beside it they keep the hidden states of the policy and its head,
and the teacher: hidden states and head, or 2 k + 1 numbers a token.

Shapes: n tokens, H hidden size of the policy, H' of the teacher, V and V' rows of their heads, V' >= V.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.parts.head import HeadGradients, HeadLogprobs, chunks, wide


@dataclass
class Teacher:
    """A teacher's distributions over the whole vocabulary: hidden (n, H') and head (V', H')."""

    hidden: Tensor
    weight: Tensor
    temperature: float

    def log_probabilities(self, part: slice, log_p: Tensor) -> Tensor:
        """log q of the tokens `part` and of the policy's vocabulary, (chunk, V). Raises ValueError if the teacher's
        vocabulary is smaller."""
        rows = log_p.shape[1]
        if len(self.weight) < rows:
            raise ValueError(f"the teacher's head has {len(self.weight)} rows, the policy's {rows}")
        return log_probabilities(self.hidden[part], self.weight, self.temperature)[:, :rows]


@dataclass
class TopTeacher:
    """The k most likely tokens of a teacher and their logprobs, (n, k) each, and the logprob of all others, (n, 1)."""

    tokens: Tensor
    logprobs: Tensor
    rest: Tensor

    def log_probabilities(self, part: slice, log_p: Tensor) -> Tensor:
        """log q of the tokens `part`, (chunk, V), where the teacher's other tokens have the policy's shape."""
        tokens = self.tokens[part]
        shape = self.rest[part] - log_rest(log_p, tokens)
        return (log_p + shape).scatter_(1, tokens, self.logprobs[part])


@torch.no_grad()
def top_of(teacher: Teacher, k: int, vocabulary: int, chunk: int) -> TopTeacher:
    """The teacher's k most likely tokens of the first `vocabulary`, with the logits of at most `chunk` tokens at a
    time. 0 < k < vocabulary."""
    hidden = teacher.hidden
    dtype = wide(hidden.dtype)
    tokens = hidden.new_empty((len(hidden), k), dtype=torch.long)
    logprobs = hidden.new_empty((len(hidden), k), dtype=dtype)
    rest = hidden.new_empty((len(hidden), 1), dtype=dtype)
    for part in chunks(len(hidden), chunk):
        log_q = log_probabilities(hidden[part], teacher.weight, teacher.temperature)
        known = log_q[:, :vocabulary]
        logprobs[part], tokens[part] = known.topk(k)
        rest[part] = log_rest(log_q, tokens[part])
    return TopTeacher(tokens, logprobs, rest)


def log_rest(log_p: Tensor, tokens: Tensor) -> Tensor:
    """The logprob of all tokens but `tokens` (chunk, k), (chunk, 1)."""
    return log_p.scatter(1, tokens, -torch.inf).logsumexp(1, keepdim=True)


class HeadKL(torch.autograd.Function):
    """(KL(policy || teacher), KL(teacher || policy)) of each token, (n,) each, in float32 or, for float64, in float64.

    hidden (n, H) and weight (V, H) are the policy's and get gradients. The teacher is a Teacher or a TopTeacher, whose
    temperature is the policy's. The logits of at most `chunk` tokens exist at once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, teacher: Teacher | TopTeacher, temperature: float, chunk: int):
        reverse, forward = hidden.new_empty((2, len(hidden)), dtype=wide(hidden.dtype))
        for part in chunks(len(hidden), chunk):
            log_p = log_probabilities(hidden[part], weight, temperature)
            log_q = teacher.log_probabilities(part, log_p)
            difference = log_p - log_q
            reverse[part] = torch.linalg.vecdot(log_p.exp_(), difference)
            forward[part] = -torch.linalg.vecdot(log_q.exp(), difference)
        ctx.save_for_backward(hidden, weight, reverse)
        ctx.set_materialize_grads(False)
        ctx.teacher = teacher
        ctx.temperature = temperature
        ctx.chunk = chunk
        return reverse, forward

    @staticmethod
    def backward(ctx, g, h):
        hidden, weight, reverse = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad[1])
        for part in chunks(len(hidden), ctx.chunk):
            log_p = log_probabilities(hidden[part], weight, ctx.temperature)
            log_q = ctx.teacher.log_probabilities(part, log_p)
            logits_grad = torch.zeros_like(log_p)
            if g is not None:
                logits_grad += reverse_gradient(log_p, log_q, reverse[part], g[part])
            if h is not None:
                logits_grad += forward_gradient(log_p, log_q, h[part])
            gradients.add(part, logits_grad.div_(ctx.temperature).to(weight.dtype))
        return *gradients.total(), None, None, None


def log_probabilities(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ weight.T / temperature) of a chunk, (chunk, V), in float32 at least."""
    logits = HeadLogprobs.logits(hidden, weight, temperature)
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
