"""scripts/proof/bench.py through its command line: what it prints, never how fast anything is."""

import json
import math

import pytest
import torch

from scripts.proof.benchmarks import common, packing
from tests import programs


def run(name, model, *flags, **more):
    """The JSON a benchmark prints, which is all that stands on stdout, and its stderr. It is forked, with `more` in its
    environment."""
    done = programs.run(
        ["scripts/proof/bench.py", name, "--model", str(model), "--json", *" ".join(flags).split()], **more
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["bench"] == name
    assert {"cores", "torch", "threads", "peak_gflops", "OMP_NUM_THREADS", "LD_PRELOAD"} <= set(result["machine"])
    assert result["machine"]["peak_gflops"] > 0
    for found in result["ratios"].values():
        assert set(found) == {"value", "min", "max", "target", "met"}
        assert all(math.isfinite(found[k]) and found[k] > 0 for k in ("value", "min", "max"))
        assert found["met"] == (None if found["target"] is None else found["value"] >= found["target"])
    for side in result["sides"].values():
        assert 0 < side["min"] <= side["milliseconds" if name == "host" else "seconds"] <= side["max"]
        assert all(math.isfinite(value) for value in side.values())
    return result, done.stderr


def test_packing(tiny_models):
    flags = "--sequences 256 --learners 1 3 16 --pack_length 512 --repeat 1"
    result, _ = run("packing", tiny_models(), flags)
    assert result["settings"]["sequences"] == 256
    assert set(result["sides"]) == {f"{how}, {n}" for how in ("shared", "plain", "next-fit") for n in (1, 3, 16)}
    for name, side in result["sides"].items():
        assert side["packs"] >= side["fewest_packs"] > 0 and side["token_imbalance"] >= 1 <= side["cost_imbalance"]
        assert name.startswith("next-fit") or side["response_tokens_lost"] == 0
    kept = [found["value"] for name, found in result["ratios"].items() if name.endswith("tokens kept")]
    assert kept == [1.0] * 6


def test_lengths_of_a_file(tiny_models, tmp_path, monkeypatch):
    """Four groups of two, the file's three rows again and again: 7 + 8, 9 + 7, 8 + 9, 7 + 8 response tokens."""
    rows = [{"prompt_tokens": 5, "response_tokens": n} for n in (7, 8, 9)]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--sequences 8 --samples 2 --learners 2 --repeat 1 --lengths {tmp_path / 'lengths.jsonl'}"
    for name in common.THREAD_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    result, stderr = run("packing", tiny_models(), flags)
    if not torch.cuda.is_available():  # a run without the settings of scripts/setup.sh says so
        assert "WARNING: OMP_NUM_THREADS, KMP_BLOCKTIME, LD_PRELOAD not set" in stderr
    assert result["settings"]["response_tokens"] == 63
    # a prompt without its last token for each response, or once for both
    assert result["sides"]["plain, 2"]["tokens"] == 63 + 8 * 4
    assert result["sides"]["shared, 2"]["tokens"] == 63 + 4 * 4


def test_drawn_lengths_are_those_of_gsm8k():
    """Medians of the fit: exp(4.04) = 56.8 tokens of question and 30 of template, exp(4.45) = 85.6 of answer."""
    lengths = common.draw_lengths(100, common.BenchFlags("learner"))
    prompts, responses = sorted(n for n, _ in lengths), sorted(m for _, own in lengths for m in own)
    assert len(prompts) == 100 and len(responses) == 800
    assert prompts[50] == pytest.approx(87, abs=2) and responses[400] == pytest.approx(86, abs=2)
    assert responses[760] == pytest.approx(math.exp(4.45 + 1.645 * 0.434), rel=0.03)


def test_next_fit_by_hand():
    """[60] [50 40] [70 30]: two learners get one pack each, the third is dropped."""
    assert packing.next_fit([60, 50, 40, 70, 30], 100, 2) == ([[[0]], [[1, 2]]], [[3, 4]])
    # fewer packs than learners (the limit is 10300 // 4): everything is dropped
    assert packing.next_fit([100, 100, 100, 10000], 20480, 4) == ([[], [], [], []], [[0, 1, 2], [3]])


def test_ratio_by_hand():
    """Medians 2 and 3; the rounds' ratios are 3/1, 2/2, 6/3."""
    found = common.ratio([1.0, 2.0, 3.0], [3.0, 2.0, 6.0], target=1.6)
    assert found == {"value": 1.5, "min": 1.0, "max": 3.0, "target": 1.6, "met": False}


def test_learner_sides_compute_the_same_gradient(tiny_models):
    """Packs, one by one, padded rows, a dense mask, ours and bare: one gradient norm, to float32."""
    result, _ = run("learner", tiny_models(), "--dtype float32 --prompts 3 --samples 4 --rows 5 --repeat 1")
    sides = "packs_shared bare_packs packs_plain one_by_one padded bare_dense".split()
    assert [*sides, "matrix_product"] == list(result["sides"])
    norms = [result["sides"][name]["grad_norm"] for name in sides]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-4) and norms[0] > 0.1
    settings = result["settings"]
    assert settings["tokens_in_packs"] < settings["real_tokens"] < settings["tokens_in_padded_rows"]
    assert all(0 < result["sides"][name]["peak_share"] for name in ("packs_shared", "bare_packs"))
    assert [found["target"] for found in result["ratios"].values()] == [0.9, 2.0, 1.0, 1.0, None, None]


def test_compiled_layers_have_the_plain_ones_gradient(tiny_models):
    result, _ = run("compiled", tiny_models(), "--dtype float32 --prompts 2 --samples 2 --repeat 1")
    plain, compiled = (result["sides"][name] for name in ("plain", "compiled"))
    assert plain["grad_norm"] == pytest.approx(compiled["grad_norm"], rel=1e-5) and plain["grad_norm"] > 0.1
    assert result["settings"]["graphs"] == 4 + 2  # the parts of a layer around its attention; the head's two passes


def test_host(tiny_models):
    """Its model is its own: 24 narrow layers, which are recomputed as a whole."""
    result, _ = run("host", tiny_models(), "--repeat 1")
    whose = [f"{who}_{how}" for how in ("plain", "recomputed") for who in ("ours", "transformers")]
    assert list(result["sides"]) == [*whose, "ours_logprobs"]
    assert result["settings"] == {"layers": 24, "tokens": 3, "ranks": 8}
    assert [round(found["target"], 2) for found in result["ratios"].values()] == [0.67, 1.0]


def test_rollout_sides_make_the_same_responses(tiny_models):
    result, _ = run("rollout", tiny_models(), "--repeat 1 --num_samples_per_prompt_rollout 4")
    assert result["settings"]["requests"] == 8 * 4
    assert result["settings"]["share_of_same_responses"] == 1.0
    assert all(side["tokens_per_second"] > 0 for side in result["sides"].values())


def test_tokens(tiny_models):
    flags = "--groups 8 --samples 4 --response_tokens 64 --repeat 1 --dtype float32"
    result, _ = run("tokens", tiny_models(), flags)
    parts = ["request to packs", "scatter", "batch", "staleness", "metrics", "garbage", "all"]
    assert list(result["sides"]) == [*parts, "submit, 100 outstanding", "submit, 100,000 outstanding"]
    assert all(result["sides"][name]["pause"] > 0 for name in parts)
    assert result["settings"] == {"groups": 8, "samples": 4, "response_tokens": 64}


def test_tools(tiny_models):
    """An engine's process, rollouts that are answered, one of four later than the others."""
    flags = "--calls 4 --turns 2 --tool_seconds 0.2 --repeat 1 --dtype float32 --rollout_backend transformers"
    result, _ = run("tools", tiny_models(), flags)
    assert list(result["sides"]) == ["all fast", "one slow"] and result["ratios"]["one slow"]["target"] == 0.75


def test_loop(tiny_models):
    result, _ = run("loop", tiny_models(), "--running 8 --response_tokens 32 --repeat 2 --dtype float32")
    sides = result["sides"]
    assert list(sides) == ["vLLM's output", "our loop", "reply", "all"]
    assert sides["all"]["min"] >= sum(sides[name]["min"] for name in list(sides)[:3]) * 0.999


def test_sync(tiny_models):
    result, _ = run("sync", tiny_models(), "--repeat 2 --dtype float32")
    assert list(result["sides"]) == ["engine.load_weights", "memory copy", "vLLM's reload", "full_weights alone"]
    assert result["settings"]["bytes"] > 4 * 512 * 128  # the embedding alone


def test_rewards(tiny_models, tmp_path):
    """A line for each family as it is done; the table has the whole afterwards."""
    flags = "--repeat 1 --records 400 --calls 4 --calls_in_turn 2 --solver_tokens 8"
    python = programs.python_that_forks(tmp_path / "python", programs.SERVERS)
    result, stderr = run("rewards", tiny_models(), flags, PYTHON_OF_FORKS=python)
    sides = result["sides"]
    assert list(sides) == ["gsm8k", "math", "code_stdio", "solver, all at once", "solver, one by one"]
    assert [side["missing"] for side in sides.values()] == [0] * 5
    assert sides["gsm8k"]["mean score"] == pytest.approx(2 / 3, abs=0.01) and sides["code_stdio"]["mean score"] == 1.0
    assert sides["math"]["mean score"] == 5 / 8  # of eight answers to a label three are spelled as it, two otherwise
    assert 4 <= sides["solver, all at once"]["tokens"] <= 4 * 8 and 2 <= sides["solver, one by one"]["tokens"] <= 2 * 8
    told = [line.split(" scores in ")[0] for line in stderr.splitlines() if " scores in " in line]
    counts = ["gsm8k: 400", "math: 80", "code_stdio: 20", "solver, all at once: 4", "solver, one by one: 2"]
    assert [line for line in told if not line.startswith("warm-up")] == counts and len(told) == 9
    assert [found["target"] for found in result["ratios"].values()] == [1.0, 1.0, 1.0, 8.0]


def test_startup(tiny_models, tmp_path):
    """Whole processes, forked, the last of a run until its first step is in metrics.jsonl."""
    python = programs.python_that_forks(tmp_path / "python", "-c")
    flags = "--repeat 1 --sides torch llama help model, --against ."
    result, _ = run("startup", tiny_models(), flags, PYTHON_OF_FORKS=python)
    assert set(result["sides"]) == {
        "import torch, tyro",
        "import torch, tyro, without exit",
        "import llama",
        "--help",
        "--help, against",
        "tiny model, against",
    }
    assert set(result["ratios"]) == {
        *(f"import torch, tyro over {name}" for name in ("--help", "--help, against")),
        "import torch, tyro, without exit over tiny model, against",
        "--help against the other",
    }
    assert all(side["seconds"] > 0 for side in result["sides"].values())
