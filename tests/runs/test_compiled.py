"""--compile_layers: the updates of the plain layers, for every split of the rollouts, in a few graphs."""

import dataclasses

import torch

from tests.test_learner import assert_same_update, make_args, make_rollouts, run_update, start_weights


def test_compiled_layers_make_the_same_update(tiny_models, world, monkeypatch):
    """Among each other to 1e-6 in float32, as any split; to the plain layers, whose sums have another order, 3e-6.

    Graphs: the two passes of the head, and four parts of a layer around its attention, which serve all layers. Two of
    these are compiled once more, because FSDP hands the first layer of each group a view of its input."""
    args, rollouts = make_args(tiny_models(), "--pack_length", 1000, "--deepspeed_stage", 3), make_rollouts()
    start = start_weights(args, world)
    plain, _ = run_update(args, world, [rollouts])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    args, asked, ask = dataclasses.replace(args, compile_layers=True), [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, **how: asked.append(work) or ask(work, **how))
    whole, _ = run_update(args, world, [rollouts])
    assert_same_update(plain, whole, start, 3e-6)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2 + 4 + 2 and len({work.__self__ for work in asked if hasattr(work, "__self__")}) == 2
    assert any((plain[name] != whole[name]).any() for name in plain)  # it was compiled
    other, _ = run_update(dataclasses.replace(args, pack_length=30), world, [rollouts], packing="plain")
    assert_same_update(whole, other, start)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # of packs of any length and layout
    recomputed = dataclasses.replace(args, gradient_checkpointing=True)
    assert_same_update(whole, run_update(recomputed, world, [rollouts])[0], start)
