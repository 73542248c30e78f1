"""What torch.compile makes of a pack's attention and of the head."""

import torch
from torch.nn.attention.flex_attention import flex_attention

import utils
from grpo import HeadLogprobs


def test_packs_of_any_length_are_a_few_graphs(monkeypatch):
    """Beyond torch's limit of recompilations flex attention is computed without a kernel: a mask of all pairs."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(flex_attention, backend=count, **utils.prepare_compiler())
    monkeypatch.setattr(utils, "_flex_attention", lambda: compiled)
    torch._dynamo.reset()
    for tokens in (300, 301, 384, 512, 640, 700):
        shared = tokens // 2
        layout = utils.Layout([(shared, [shared // 2, tokens - shared - shared // 2])], torch.device("cpu"))
        q, k = torch.ones(1, 4, tokens, 16), torch.ones(1, 2, tokens, 16)
        utils.pack_attention(torch.nn.Module(), q, k, k, None, layout=layout, flex=True)
    assert 1 <= len(graphs) <= 3


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
