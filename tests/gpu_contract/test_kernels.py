"""What torch.compile makes for GPUs, down to their machine code and without one: see compiler.py beside this."""

from typing import Any

import pytest
import torch

import grpo
import utils
from grpo import HeadLogprobs
from tests.gpu_contract import compiler

pytestmark = pytest.mark.skipif(bool(compiler.missing()), reason=compiler.missing())


@pytest.mark.runs
@pytest.mark.parametrize("arch, head_dim, window, first", [(90, 128, 0, 0), (90, 128, 1024, 0), (89, 256, 1024, 1)])
def test_flex_attention_fits_a_gpus_shared_memory(arch, head_dim, window, first):
    """torch's own options on a data-centre GPU; on one with 99 KB a block they do not fit, and ours do. With a sliding
    window or without. All GPUs, head sizes and dtypes: python -m tests.gpu_contract.compiler"""
    found, tried = compiler.fitting_options(arch, head_dim, torch.bfloat16, window)
    assert found == first, [[(k.name, k.shared, k.problem) for k in made.kernels] for made in tried]
    assert len(tried[-1].kernels) >= 3  # forward, backward's sum, backward
    for made in tried[:-1]:
        assert max(k.shared for k in made.kernels) > compiler.SHARED[arch]  # or this would be the first that fits


@pytest.mark.runs
@pytest.mark.parametrize("arch, heads, kv_heads", [(90, 2, 1), (89, 32, 8)])
def test_a_short_pack_has_kernels(arch, heads, kv_heads):
    """Below 128 tokens torch takes its kernels for decoding, none of which fits our masks: on an H100 a run ended at
    the step whose pack had fewer."""
    found = compiler.Compiled()
    with compiler.flex_for(arch, found):
        compiler.attend(100, heads, kv_heads, 64, torch.bfloat16)
    assert len(found.kernels) >= 3
    for kernel in found.kernels:
        assert not kernel.problem and kernel.shared <= compiler.SHARED[arch]


@pytest.mark.runs
def test_packs_of_any_length_are_a_few_graphs():
    """Beyond torch's limit of recompilations flex attention is computed without a kernel: a mask of all pairs."""
    found = compiler.Compiled()
    with compiler.flex_for(0, found):  # no GPU: graphs are counted, which takes no kernels
        for tokens in (300, 301, 384, 512, 640, 1000, 1024, 1500, 2000, 2047, 2048, 3000):
            compiler.attend(tokens, 4, 2, 64, torch.bfloat16)
    assert 2 <= found.graphs <= 6


@pytest.mark.runs
def test_the_compiled_head_moves_few_bytes():
    """6 bytes a logit forward and 4 backward, and at most 40 whatever is counted, at the widest of public models."""
    for entropy in (False, True):
        parts = compiler.head_bytes(entropy=entropy, hidden=5120)
        assert (parts["forward"], parts["backward"]) == (6.0, 4.0)
        assert sum(parts.values()) <= 40, parts


@pytest.mark.runs
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


class OnGPU(torch.Tensor):
    """One that says so."""

    is_cuda = True


@pytest.mark.parametrize("flags, gpu", [("", False), ("--compile_layers", False), ("", True)])
def test_the_head_is_compiled_where_it_pays(tiny_models, world, monkeypatch, flags, gpu):
    """On a GPU, three times as many tokens at once; on a CPU with --compile_layers, without which its numbers are
    scripts/minimal.py's bit for bit."""
    seen = []
    apply = HeadLogprobs.apply
    plain: Any = lambda *a: (seen.append(a[4:6]), apply(*a[:5], False, *a[6:]))[1]  # noqa: E731
    monkeypatch.setattr(HeadLogprobs, "apply", plain)
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    args = utils.parse_args(
        grpo.Args, ["--model_name_or_path", str(tiny_models()), "--model_dtype", "float32", *flags.split()]
    )
    policy = grpo.load_policy(args, world)
    if gpu:

        def move(_module, _inputs, out):
            out.last_hidden_state = out.last_hidden_state.as_subclass(OnGPU)

        policy.model.base_model.register_forward_hook(move)
    grpo.choose_packing(policy, utils.Prompt(0, (5, 6, 7), "", (), ()), args, world)
    assert set(seen) == {(grpo.LOGPROB_CHUNK * (3 if gpu else 1), gpu or bool(flags))}
