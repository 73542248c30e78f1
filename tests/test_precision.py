"""Precision: which dtype a machine computes in, and master weights off the grid of bfloat16."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import grpo
import utils
from scripts.parts import plan
from tests.conftest import REPO


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


def test_only_bfloat16_computing_is_dithered(half, world):
    for dtype, differs in (("float32", False), ("bfloat16", True)):
        a, b = (
            weights(half, world, torch.float32, "--model_dtype", dtype, f"--{no}dither_master_weights")
            for no in ("no_", "")
        )
        assert any(not torch.equal(a[name], b[name]) for name in a) == differs


def test_weights_between_two_bfloat16_numbers_stay():
    weight = torch.tensor([1.0, 1.0 + 2**-20, 0.1, 3.0, 0.0, torch.finfo(torch.bfloat16).max])
    before = weight.clone()
    utils.dither(weight, 5)
    assert [bool(x) for x in weight == before] == [False, True, True, False, True, False]
    assert torch.equal(weight.bfloat16()[[0, 3, 4, 5]], before.bfloat16()[[0, 3, 4, 5]])


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


CACHE = """import tempfile, utils
utils.prepare_compiler()
from torch._inductor import codecache
print(tempfile.gettempdir(), codecache._HEADER_DIR, codecache.cache_dir())
"""
CACHE_ALONE = """import tempfile, utils
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(tempfile.gettempdir(), cache_dir(), cache_dir())
"""  # without half the compiler


@pytest.mark.runs
@pytest.mark.house
def test_a_home_of_machines_of_several_kinds_shares_no_kernels(tmp_path):
    """Inductor's cache gave the code written for one processor's vectors to another's compiler: half the numbers were
    what memory held. ATEN_CPU_CAPABILITY makes the second of these processes a machine without AVX-512. The compiler's
    headers are in the cache too, though torch's import would have them in the temporary directory, which stays."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    caches = set()
    for kind, program in (({}, CACHE), ({"ATEN_CPU_CAPABILITY": "avx2"}, CACHE_ALONE)):
        line, how = [sys.executable, "-c", program], {"cwd": REPO, "env": environment | kind, "text": True}
        done = subprocess.run(line, capture_output=True, **how)
        temporary, headers, cache = done.stdout.split()[-3:]
        assert temporary == str(tmp_path) and headers.startswith(cache), done.stdout + done.stderr
        assert cache.startswith(f"{tmp_path}/.cache/torchinductor/")
        caches.add(cache)
    assert len(caches) == 1 + ("AVX512" in torch.backends.cpu.get_cpu_capability())


@pytest.mark.parametrize("number", [1, 5, utils.DITHER_SLICE, 2 * utils.DITHER_SLICE + 7])
def test_slices_give_the_offsets_of_one_piece(number):
    """The offset of a weight is a word of the seed's stream, whatever the slices are: runs of before can go on."""
    start = torch.randn(number, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    weight = start.clone().reshape(1, -1)
    utils.dither(weight, 7)
    words = np.random.PCG64(7).random_raw(number // 4 + 1).view(np.int16)[:number]
    offsets = torch.from_numpy(words).int().clamp(min=-32767)
    assert torch.equal(weight.view(torch.int32).flatten(), start.view(torch.int32) + offsets)
