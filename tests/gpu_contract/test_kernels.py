"""What torch.compile makes of the head."""

import torch

from grpo import HeadLogprobs


def test_the_compiled_head_is_the_head():
    """Logprobs, entropies and gradients in float32, for numbers of tokens that never were before."""
    torch.manual_seed(0)
    weight = (0.3 * torch.randn(600, 48)).requires_grad_()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []
    for tokens in (130, 257, 64):
        hidden, targets = torch.randn(tokens, 48).requires_grad_(), torch.randint(600, (tokens,))
        g, h = torch.randn(2, tokens)
        results = []
        for compiled in (False, True):
            logprobs, entropy = HeadLogprobs.apply(hidden, weight, targets, 0.7, 100, compiled)
            gradients = torch.autograd.grad((g * logprobs + h * entropy).sum(), (hidden, weight))
            results.append((logprobs, entropy, *gradients))
        for plain, fused in zip(*results, strict=True):
            assert (fused - plain).norm() <= 1e-6 * plain.norm()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [2, 2, 2]  # forward, backward: what the first number of tokens compiled does for all
