"""Precision: which dtype a machine computes in, and master weights off the grid of bfloat16."""

import json
from dataclasses import replace

import pytest
import torch

import grpo
import utils
from scripts.parts import plan


@pytest.fixture(scope="module")
def half(tiny_models, tmp_path_factory):
    """A tiny model whose weights are bfloat16 numbers, some of them zeros, as nearly all published ones are."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("half")
    model = AutoModelForCausalLM.from_pretrained(tiny_models(), dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[:3] = torch.tensor([0.0, -0.0, 1e-30])[:, None]
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_models()).save_pretrained(directory)
    return directory


def weights(model, world, dtype, *flags):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", str(model), "--model_dtype", "bfloat16", *flags])
    return dict(utils.full_weights(grpo.load_policy(args, world), dtype))


def test_dithered_weights_round_to_the_start_models(half, world):
    """Step 1 is the undithered policy bit for bit, and the master weights are spread over the whole interval."""
    plain, dithered = (weights(half, world, torch.bfloat16, f"--{no}dither_master_weights") for no in ("no_", ""))
    for name, value in plain.items():
        assert torch.equal(value.view(torch.int16), dithered[name].view(torch.int16)), name
    full, spread = (weights(half, world, torch.float32, f"--{no}dither_master_weights") for no in ("no_", ""))
    offsets = []
    for name, value in full.items():
        assert torch.equal(value[value == 0], spread[name][value == 0]), name  # zeros, and their signs
        assert torch.equal(torch.signbit(value), torch.signbit(spread[name])), name
        moved = value != 0
        offsets.append((spread[name].view(torch.int32) - value.view(torch.int32))[moved].double())
    offset = torch.cat(offsets) / 32767
    assert offset.abs().max() <= 1 and (offset == 0).double().mean() < 1e-3
    assert abs(offset.mean()) < 0.01 and abs(offset.square().mean() - 1 / 3) < 0.01  # uniform over (-1, 1)


def test_dither_depends_on_seed_and_name_alone(half, world, monkeypatch):
    one, again, other = (weights(half, world, torch.float32, "--seed", seed) for seed in ("1", "1", "2"))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    names = [name for name in one if one[name].shape == one["model.layers.0.self_attn.q_proj.weight"].shape]
    plain = weights(half, world, torch.float32, "--no_dither_master_weights")
    bits = [(one[n].view(torch.int32) - plain[n].view(torch.int32)) for n in names]
    assert len(bits) > 1 and not torch.equal(bits[0], bits[1])  # no two parameters share their offsets
    for stage in ("2", "3"):
        sharded = weights(half, world, torch.float32, "--deepspeed_stage", stage)
        assert all(torch.equal(one[name], sharded[name]) for name in one)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is asked, not measured")
def test_auto_takes_what_the_processor_is_fast_in(monkeypatch, tmp_path, capsys):
    """And --resume keeps what the run began with, wherever it goes on."""
    args = grpo.Args(output_dir=str(tmp_path), exp_name="run")
    for half, full, want in ((3.0, 60.0, "float32"), (400.0, 90.0, "bfloat16")):
        monkeypatch.setattr(plan, "core_speeds", lambda dtypes, found=(half, full): found)
        dtype, why = plan.choose_dtype(args)
        assert dtype == want and f"{half:.0f} GFLOP/s in bfloat16, {full:.0f} in float32" in why
        (tmp_path / "run").mkdir(exist_ok=True)
        other = {"float32": "bfloat16", "bfloat16": "float32"}[want]
        (tmp_path / "run" / "args.json").write_text(json.dumps({"model_dtype": other}))
        assert plan.choose_dtype(replace(args, resume=True))[0] == other
        dtype, why = plan.choose_dtype(replace(args, model_dtype="bfloat16"))
        assert dtype == "bfloat16" and ("WARNING" in why) == (want == "float32")
        assert plan.choose_dtype(replace(args, model_dtype="float32")) == ("float32", "as --model_dtype says")
