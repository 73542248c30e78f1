"""Models whose layers attend within a window: packs and rows have the numbers of one sequence at a time."""

import json
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import grpo
import utils
from scripts.data.make_tiny_model import make_tiny_model
from scripts.parts import attention, packing
from tests.test_learner import long_rollouts, make_args, make_rollouts, run_update, start_weights

ARCHS = {  # layers of both kinds, or all alike
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
}
LENGTHS = {"short": make_rollouts, "long": long_rollouts}


def windowed(directory, arch, window):
    """A tiny model whose layers, or some of them, have that window."""
    if not (directory / "config.json").exists():
        make_tiny_model(directory, arch=arch)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | ARCHS[arch] | {"sliding_window": window}))
    return directory


def longest(rollouts):
    """Tokens of the longest sequence that a model sees: the last one of a response is predicted only."""
    return max(len(r.prompt.token_ids) + len(r.token_ids) - 1 for r in rollouts)


def logprobs_of(policy, rollouts, way, args, world):
    """Of all responses, in their order."""
    found = {}
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for batch in grpo.micro_batches(grpo.pack_rollouts(rollouts, way, 1000)[0], way, args, world.device):
            logprobs = policy(batch, 1.0)[0]
            for i, r in enumerate(batch.rollouts, 1):
                found[r.position, r.sample] = logprobs[batch.response_mask & (batch.seq_ids == i)]
    return torch.cat([found[r.position, r.sample] for r in rollouts])


def one_at_a_time(model, world, rollouts):
    """Logprobs of the responses, the weights after an update and its metrics, by the model's own attention."""
    args = make_args(model, "--per_device_train_batch_size", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "takes_our_attention", lambda *_: False)
        policy = grpo.load_policy(args, world)
        assert policy.model.config._attn_implementation == "sdpa"
        logprobs = logprobs_of(policy, rollouts, "rows", args, world)
        return logprobs, *run_update(args, world, [rollouts], packing="rows")


def differences(model, world, rollouts, ways, *flags):
    """Relative ones of each way of packing from one sequence at a time: largest of a logprob (absolute below 1), loss,
    update."""
    args = make_args(model, "--pack_length", "1000", *flags)
    want, weights, metrics = one_at_a_time(model, world, rollouts)
    policy = grpo.load_policy(args, world)
    start = start_weights(args, world)
    assert policy.model.config._attn_implementation == utils.PACK_ATTENTION
    out = {}
    for way in ways:
        logprobs = ((logprobs_of(policy, rollouts, way, args, world) - want) / want.abs().clamp(1)).abs().max()
        after, own = run_update(args, world, [rollouts], packing=way)
        assert all((after[name] - start[name]).norm() > 0 for name in after)
        off = math.sqrt(sum((after[name] - weights[name]).norm() ** 2 for name in after))
        moved = math.sqrt(sum((after[name] - start[name]).norm() ** 2 for name in after))
        loss = own["loss/policy_avg"] / metrics["loss/policy_avg"] - 1
        out[way] = float(logprobs), abs(loss), off / moved
    assert grpo.choose_packing(policy, rollouts[0].prompt, args, world) == "shared"
    return out


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("arch", ARCHS)
def test_packs_and_rows_are_one_sequence_at_a_time(tmp_path, world, arch, lengths):
    """Logprobs, loss and gradient, for windows below, one below, at and above the longest sequence."""
    rollouts = LENGTHS[lengths]()
    most = longest(rollouts)
    at = (most - 1, most, most + 1) if arch == "olmo3" else (most,)
    for window in (4, *at) if lengths == "short" else (60,):
        found = differences(windowed(tmp_path / "model", arch, window), world, rollouts, packing.WAYS)
        for way, numbers in found.items():
            assert max(numbers) < 1e-6, (window, way, numbers)


@pytest.mark.parametrize("window", [1, 3, 60, 110])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
def test_flex_attention_has_the_same_window(share, window):
    """What GPUs run, here in its uncompiled form, which has no backward on a CPU. A token sees itself and the window
    - 1 tokens before it in its own sequence, however far away the one copy of its prompt is."""
    rollouts = long_rollouts()
    pack = grpo.make_pieces(rollouts, 1000 if share else 0)
    batch = grpo.make_batch([pack], torch.device("cpu"))
    layout = batch.layout
    tokens = batch.input_ids.shape[1]
    inputs = [torch.randn(1, heads, tokens, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    options = {"scaling": 0.25, "layout": layout, "sliding_window": window}
    by_piece, flex = (
        utils.pack_attention(torch.nn.Module(), *inputs, None, flex=f, **options)[0] for f in (False, True)
    )
    torch.testing.assert_close(by_piece, flex, rtol=1e-4, atol=1e-5)
    near = attention.narrow(layout, window, inputs[0])
    assert (near is layout) == (window > longest(rollouts))
    if near is not layout:
        places = torch.arange(tokens)
        position = batch.position_ids[0]
        full, seen = (x.attends()(0, 0, places[:, None], places) for x in (layout, near))
        assert torch.equal(seen, full & (position[:, None] - position < window))
        assert near.block_mask is not layout.block_mask
