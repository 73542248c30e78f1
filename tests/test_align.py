"""align.py and dataproto.py of scripts/align/: what is a difference, what is read, what is refused."""

import dataclasses
import functools
import hashlib
import importlib
import io
import json
import math
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import grpo
import utils
from scripts.align import align, dataproto, states
from scripts.parts import dumps
from tests import programs, verl_shards
from tests.conftest import REPO

METRICS = {
    "loss/total_avg": [0.5, -0.25, 0.125],
    "optim/grad_norm": [3.0, 2.0, 1.0],
    "objective/scores": [1.0, 2.0, 4.0],
}


def write_run(path, metrics, **more):
    """A run in our format, of metrics name -> values at steps 1, 2, ..."""
    path.mkdir(parents=True, exist_ok=True)
    steps = range(len(next(iter(metrics.values()))))
    rows = [{"training_step": i + 1, **{k: v[i] for k, v in metrics.items()}, **more} for i in steps]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compare(*argv, capsys=None):
    code = align.main([str(x) for x in argv])
    return (code, capsys.readouterr()) if capsys else code


# --- one run a side --------------------------------------------------------------------------------------------------


def test_differences_by_hand(tmp_path, capsys):
    """At step 2 |-0.25 + 0.2500001| = 1e-7, relative 4e-7; at step 3 |0.125 - 0.126| = 1e-3, relative 1/126."""
    a = write_run(tmp_path / "a", METRICS)
    b = write_run(tmp_path / "b", METRICS | {"loss/total_avg": [0.5, -0.2500001, 0.126]})
    runs = [align.read_run(a), align.read_run(b)]
    shared = align.shared_metrics([runs[:1], runs[1:]], None)
    assert list(shared) == ["objective/scores", "loss/total_avg", "optim/grad_norm"]  # in the order of ALIASES
    rows = {row["name"]: row for row in align.compare_metrics(*runs, shared, 1e-5, 1e-9)}
    loss = rows["loss/total_avg"]
    assert (loss["steps"], loss["first"]) == (3, 3)
    assert loss["max_abs"] == pytest.approx(1e-3) and loss["max_rel"] == pytest.approx(1 / 126)
    turned = align.compare_metrics(*runs[::-1], shared, 1e-5, 1e-9)
    assert turned[1]["max_rel"] == loss["max_rel"]  # of the larger one, whichever side it is on
    assert rows["optim/grad_norm"]["first"] is None and rows["optim/grad_norm"]["max_abs"] == 0
    code, out = compare(a, b, "--plot", tmp_path / "p.png", "--json", tmp_path / "r.json", capsys=capsys)
    assert code == 1 and "PARTED beyond 1e-05 relative" in out.out and "loss/total_avg at step 3" in out.out
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "r.json").read_text())["metrics"][1]["first"] == 3
    code, out = compare(a, b, "--tolerance", 0.01, capsys=capsys)
    assert code == 0 and "ALIGNED within 0.01 relative" in out.out and "3 metrics over 3 steps" in out.out
    assert compare(a, b, "--tolerance", 1e-7, "--atol", 1e-8, "--metrics", "loss", capsys=capsys)[0] == 1
    assert "loss/total_avg at step 2" in compare(a, b, "--tolerance", 1e-7, capsys=capsys)[1].out
    assert compare(a, b, "--atol", 0.01) == 0 and compare(a, b, "--metrics", "grad_norm") == 0


def test_steps_times_and_missing_values(tmp_path, capsys):
    """Shared steps only; seconds do not count; a NaN (null in JSON) equals a NaN and nothing else."""
    a, b = ({"time/total": [n] * 3, "batch/groups_in_flight": [n] * 3} for n in (1, 9))
    a = write_run(tmp_path / "a", METRICS | {"x": [1.0, None, 3.0]} | a)
    b = write_run(tmp_path / "b", {k: v[:2] for k, v in (METRICS | {"x": [1.0, None]} | b).items()})
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"training_step": 3, "obj')  # what a full disk or kill -9 leaves
    code, out = compare(a, b, capsys=capsys)
    assert code == 0 and "4 metrics over 2 steps" in out.out
    c = write_run(tmp_path / "c", METRICS | {"x": [1.0, 2.0, 3.0]})
    assert "x at step 2" in compare(a, c, capsys=capsys)[1].out
    write_run(tmp_path / "d", {"y": [1.0]})
    code, out = compare(a, tmp_path / "d", capsys=capsys)
    assert code == 2 and "nothing in common" in out.err
    code, out = compare(a, b, "--metrics", "no_such", capsys=capsys)
    assert code == 2 and "no_such" in out.err
    assert compare(a, tmp_path / "nowhere") == 2


def test_other_systems_names_and_formats(tmp_path):
    """The same three steps as veRL's file log, its console, TRL's state and its list: equal to ours under our names."""
    a = write_run(tmp_path / "a", METRICS)
    verl = [
        {"critic/score/mean": s, "actor/grad_norm": g, "actor/final_loss": x}
        for s, g, x in zip(
            METRICS["objective/scores"], METRICS["optim/grad_norm"], METRICS["loss/total_avg"], strict=True
        )
    ]
    lines = [json.dumps({"step": i + 1, "data": row}) for i, row in enumerate(verl)]
    (tmp_path / "verl.jsonl").write_text("\n".join(lines) + "\n")
    console = [
        f"(TaskRunner pid=7) step:{i + 1} - critic/score/mean:np.float64({row['critic/score/mean']}) - "
        f"actor/grad_norm:{row['actor/grad_norm']} - actor/final_loss:{row['actor/final_loss']}"
        for i, row in enumerate(verl)
    ]
    (tmp_path / "console.log").write_text("loading\n" + "\n".join(console) + "\ndone\n")
    history = [
        {
            "step": i + 1,
            "loss": row["actor/final_loss"],
            "grad_norm": row["actor/grad_norm"],
            "reward": row["critic/score/mean"],
        }
        for i, row in enumerate(verl)
    ]
    (tmp_path / "list.json").write_text(json.dumps(history))
    for n in (2, 10):  # the newest checkpoint counts
        folder = tmp_path / "trl" / f"checkpoint-{n}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history[: n // 3]}))
    for other in ("verl.jsonl", "console.log", "list.json", "trl"):
        run = align.read_run(tmp_path / other)
        assert set(run.metrics) == set(METRICS) and run.metrics["objective/scores"][3] == 4.0
        assert compare(a, tmp_path / other) == 0
    history[2]["loss"] = 0.1251
    (tmp_path / "list.json").write_text(json.dumps(history))
    assert compare(a, tmp_path / "list.json") == 1


def save_weights(path, state, config=None, how="safetensors"):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config or {"tie_word_embeddings": True}))
    if how == "bin":
        torch.save(state, path / "pytorch_model.bin")
    else:
        save_file(state, path / "model.safetensors")


def test_weights(tmp_path, capsys):
    """A tied head that one side left out is its embedding; of a changed parameter, |difference| / |b| = 0.5 / 5."""
    embedding, layer = torch.arange(6.0).view(2, 3), torch.tensor([3.0, 4.0])
    whole = {"model.embed_tokens.weight": embedding, "model.norm.weight": layer}
    save_weights(tmp_path / "a" / "step_2", whole)
    save_weights(tmp_path / "a" / "step_10", whole)
    head = {"lm_head.weight": embedding.clone()}
    save_weights(tmp_path / "b" / "step_2", whole | head, how="bin")
    save_weights(tmp_path / "b" / "step_10", whole | head | {"model.norm.weight": torch.tensor([3.3, 4.4])})
    runs = [align.read_run(tmp_path / x) for x in "ba"]
    rows = align.compare_weights(*runs, 1e-5)
    assert [(r["name"], r["parameters"], len(r["differing"]), r["apart"]) for r in rows] == [
        ("step_2", 3, 0, False),
        ("step_10", 3, 1, True),
    ]
    (found,) = rows[1]["differing"]
    assert found["parameter"] == "model.norm.weight" and found["norm"] == pytest.approx(0.5 / 5)
    assert found["max_abs"] == pytest.approx(0.4)
    assert (
        found["sha256"][1] == hashlib.sha256(np.array([3, 4], np.float32).tobytes()).hexdigest() != found["sha256"][0]
    )
    code, out = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 1 and "weights of step_10" in out.out and "model.norm.weight" in out.out
    assert compare(tmp_path / "a", tmp_path / "b", "--tolerance", 0.11) == 0
    # a parameter that only one side has; a head that is not tied stays away
    save_weights(tmp_path / "c", {"model.embed_tokens.weight": embedding}, {"tie_word_embeddings": False})
    assert set(align.load_hf_state(tmp_path / "c")) == {"model.embed_tokens.weight"}
    assert compare(tmp_path / "c", tmp_path / "a" / "step_2") == 1
    with pytest.raises(ValueError, match="no model"):
        align.load_hf_state(tmp_path)
    for name, value in (("d", 1.0), ("e", 2.0)):  # adapters alone
        save_weights(tmp_path / name / "model", {"lora_A.weight": torch.tensor([value])})
        (tmp_path / name / "model" / "model.safetensors").rename(tmp_path / name / "model/adapter_model.safetensors")
    code, out = compare(tmp_path / "d", tmp_path / "e", capsys=capsys)
    assert code == 1 and "weights of model" in out.out and "lora_A.weight" in out.out


def test_checksums_stand_in_for_weights(tmp_path):
    """A side with weights.jsonl only: equal bytes, or the difference of norms, sqrt(9 + 16) against sqrt(9 + 18.49)."""
    save_weights(tmp_path / "a" / "step_1", {"w": torch.tensor([3.0, 4.0])})
    (tmp_path / "b").mkdir()
    for values, want in (([3.0, 4.0], 0.0), ([3.0, 4.3], 1 - 5 / math.hypot(3, 4.3))):
        row = {"step": 1, "parameters": {"w": align.checksum(torch.tensor(values))}}
        (tmp_path / "b" / "weights.jsonl").write_text(json.dumps(row) + "\n")
        write_run(tmp_path / "b", {"x": [1.0]})
        (found,) = align.compare_weights(align.read_run(tmp_path / "a"), align.read_run(tmp_path / "b"), 1e-5)
        assert found["norm"] == pytest.approx(want, abs=1e-7) and found["apart"] == (want > 0)


def write_dump(run_dir, step, first=None, second=None, **changes):
    """Two rollouts of 2 and 1 tokens to prompts of 3 tokens, as --dump_steps writes them."""
    row = {"training_step": step, "prompt_ids": [5, 6, 7], "position": step, "outcome": 10.0, "score": 10.0}
    rows = [
        row | {"sample": 0, "token_ids": [8, 9], "logprobs": [-1.0, -2.0], "advantage": 1.0} | (first or {}),
        row | {"sample": 1, "token_ids": [10], "logprobs": [-0.5], "advantage": -1.0, "score": None} | (second or {}),
    ]
    rows = [{"mask": [True] * len(r["token_ids"]), "versions": [step - 1] * len(r["token_ids"])} | r for r in rows]
    run_dir.mkdir(parents=True, exist_ok=True)
    dump = {"training_step": step, "how": "shared", "weights": f"w{step}", "positions": [step], "packs": []}
    dumps.append_rows(run_dir, [json.dumps(row) + "\n" for row in rows], dump | changes)


def test_dumps(tmp_path, capsys):
    for side in "ab":
        for step in (1, 2, 3):
            write_dump(tmp_path / side, step)
    assert compare(tmp_path / "a", tmp_path / "b") == 0
    near = {"logprobs": [-1.0, -2.00001]}  # 1e-5 of 2: within 1e-5 relative
    write_dump(tmp_path / "b", 2, near, weights="other")
    code, out = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 0 and "weights" in out.out and "3 dumped steps" in out.out
    rows = align.compare_dumps(align.read_run(tmp_path / "a"), align.read_run(tmp_path / "b"), 1e-5)
    found = {r["name"]: r for r in rows}
    assert found["weights"]["equal"] == 2 and found["logprobs"]["max_rel"] == pytest.approx(5e-6, rel=1e-3)
    assert found["score"]["max_rel"] == 0 and "old_logprobs" not in found
    write_dump(tmp_path / "b", 3, second={"token_ids": [11]})
    code, out = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 1 and "PARTED" in out.out and out.out.rstrip().endswith("token_ids at step 3")
    assert compare(tmp_path / "a", tmp_path / "b", "--tolerance", 1) == 1  # tokens have no tolerance
    write_dump(tmp_path / "b", 1, {"token_ids": [8]}, {"token_ids": [9, 10]})
    assert "token_ids at step 1" in compare(tmp_path / "a", tmp_path / "b", capsys=capsys)[1].out
    write_dump(tmp_path / "b", 1)
    traces = tmp_path / "b" / "rollouts.jsonl"
    traces.write_text(traces.read_text()[:-2] + "]\n")
    code, out = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 2 and "sha256" in out.err
    write_dump(tmp_path / "b", 1, schema_version=99)
    code, out = compare(tmp_path / "a", tmp_path / "b", capsys=capsys)
    assert code == 2 and "schema 99" in out.err


# --- several seeds ---------------------------------------------------------------------------------------------------


def test_permutation_and_sign_tests_by_hand():
    """{1, 2} against {3, 4}: 2 of the 6 ways are as far apart; {1, 3} against {2, 4}: |2 - 3| = 1, so are 4 of 6.
    Differences 1, 1, 1: only all-plus and all-minus of 8 ways; 1, 1, -1: |1|, which all 8 reach."""
    assert align.permutation_test([1, 2], [3, 4]) == (pytest.approx(2 / 6), pytest.approx(2 / 6))
    assert align.permutation_test([1, 3], [2, 4])[0] == pytest.approx(4 / 6)
    assert align.permutation_test([5], [1, 2, 3]) == (pytest.approx(1 / 4), 1 / 4)
    assert align.sign_test(np.array([1.0, 1.0, 1.0])) == (2 / 8, 2 / 8)
    assert align.sign_test(np.array([1.0, 1.0, -1.0])) == (1.0, 2 / 8)
    rng = np.random.default_rng(1)
    many = rng.normal(size=(2, 12))  # 2.7 million ways: drawn at random
    p, smallest = align.permutation_test(list(many[0]), list(many[1] + 3))
    assert p == smallest == 1 / 20_000
    assert align.sign_test(rng.normal(size=40) + 2)[0] <= 2 / 20_000


def seeds(tmp_path, name, shift, n=4, steps=40):
    rng = np.random.default_rng(len(name) + int(10 * shift))
    curve = np.linspace(0, 1, steps)
    runs = [{"objective/scores": (curve + shift + 0.1 * rng.normal(size=steps)).tolist()} for _ in range(n)]
    return [write_run(tmp_path / f"{name}_{i}", run) for i, run in enumerate(runs)]


def test_bands(tmp_path, capsys):
    a, same, higher = seeds(tmp_path, "a", 0.0), seeds(tmp_path, "same", 0.0), seeds(tmp_path, "higher", 0.4)
    plot = tmp_path / "p.png"
    code, out = compare(",".join(map(str, a)), ",".join(map(str, same)), "--plot", plot, capsys=capsys)
    assert code == 0 and "OVERLAP" in out.out and plot.exists()
    flags = [x for side, runs in (("--a", a), ("--b", higher)) for run in runs for x in (side, run)]
    code, out = compare(*flags, capsys=capsys)
    assert code == 1 and "objective/scores (p 0.0286" in out.out  # 2 of the 70 ways
    assert "cannot go below 0.333" in compare(*flags[:4], *flags[8:12], capsys=capsys)[1].out


def test_overlap_share_by_hand(tmp_path):
    """Means 1 and 2 with deviations sqrt(2) * 0.4 a side: 1 <= 1.13 overlaps; with 0.3, 1 > 0.85 does not."""
    rows = {"a_1": [0.6, 0.7], "a_2": [1.4, 1.3], "b_1": [1.6, 1.7], "b_2": [2.4, 2.3]}
    runs = {name: align.read_run(write_run(tmp_path / name, {"x": values})) for name, values in rows.items()}
    sides = [[runs["a_1"], runs["a_2"]], [runs["b_1"], runs["b_2"]]]
    options = align.parse_args(["a", "b", "--window", "0.5"])
    (row,) = align.compare_bands(sides, {"x": [1, 2]}, options)
    assert row["overlap"] == 0.5 and row["final"] == [pytest.approx(1.0), pytest.approx(2.0)]
    assert row["p"] == pytest.approx(2 / 6) and row["apart"]
    options.min_overlap = 0.5
    assert not align.compare_bands(sides, {"x": [1, 2]}, options)[0]["apart"]


def test_paired(tmp_path):
    """A shift of 0.1 under noise of 0.14 in a step's difference: 40 steps tell."""
    (a,), (same,), (higher,) = (seeds(tmp_path, *x, n=1) for x in (("a", 0.0), ("bb", 0.0), ("ccc", 0.1)))
    assert compare(a, same, "--paired") == 0
    assert compare(a, higher, "--paired") == 1


# --- importing veRL's batches ----------------------------------------------------------------------------------------


@pytest.fixture
def verl(monkeypatch):
    """A function that pickles like veRL's DataProto with tensordict's TensorDict, whose names exist only meanwhile."""

    class DataProto:
        def __init__(self, batch, arrays, info):
            self.state = batch, arrays, info

        def __getstate__(self):
            return self.state

    class TensorDict:  # as tensordict 0.15.3 pickles it
        def __init__(self, tensors, consolidated):
            self.tensors, self.consolidated = tensors, consolidated

        def __reduce__(self):
            if not self.consolidated:
                state = {
                    "_tensordict": self.tensors,
                    "_device": None,
                    "_batch_size": torch.Size([4]),
                    "_td_dim_names": None,
                }
                return _make_td, (TensorDict, state)
            leaves, parts, at = {}, [], 0
            for name, tensor in self.tensors.items():
                part = tensor.contiguous().flatten().view(torch.uint8)
                pad = -len(part) % 8
                part = torch.cat([part, part.new_zeros(pad)])
                leaves[name] = (str(tensor.dtype), list(tensor.shape), at, at := at + len(part), pad // tensor.itemsize)
                parts.append(part)
            metadata = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": {"batch_size": [4]}}
            return _rebuild_tensordict_files_consolidated, (metadata, torch.cat(parts))

    def _make_td():
        raise AssertionError("the importer called back into tensordict")

    def _rebuild_tensordict_files_consolidated():
        raise AssertionError("the importer called back into tensordict")

    places = {
        "verl.protocol": [DataProto],
        "tensordict._td": [TensorDict],
        "tensordict._reductions": [_make_td, _rebuild_tensordict_files_consolidated],
        "verl": [],
        "tensordict": [],
    }

    def make(path, tensors, arrays, info, form, protocol=4):
        for module, things in places.items():
            fake = types.ModuleType(module)
            for thing in things:
                thing.__module__, thing.__qualname__ = module, thing.__name__
                setattr(fake, thing.__name__, thing)
            monkeypatch.setitem(sys.modules, module, fake)
        if form in ("plain", "consolidated"):
            buffer = io.BytesIO()
            torch.save(TensorDict(tensors, form == "consolidated"), buffer)
            batch = buffer.getvalue()
        elif form == "numpy":
            parts = {k: (str(v.dtype)[6:], v.shape, v.flatten().view(torch.uint8).numpy()) for k, v in tensors.items()}
            batch = ((4,), None, parts)
        else:
            batch = tensors
        path.write_bytes(pickle.dumps(DataProto(batch, arrays, info), protocol=protocol))
        for module in places:
            monkeypatch.delitem(sys.modules, module)
        return path

    return make


def verl_batch():
    """Two prompts of two rollouts, the rows balanced over ranks and so not in the prompts' order; width 3 + 3."""
    tensors = {
        "prompts": torch.tensor([[0, 5, 6], [7, 8, 9], [0, 5, 6], [7, 8, 9]]),
        "responses": torch.tensor([[11, 12, 0], [21, 0, 0], [13, 14, 15], [22, 23, 0]]),
        "attention_mask": torch.tensor(
            [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]
        ),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 1, 0]]),  # row 2 has a tool's token
        "token_level_scores": torch.tensor([[0.0, 1.0, 0], [0.0, 0, 0], [0, 0, 0], [0, 1.0, 0]]),
        "advantages": torch.tensor([[0.7, 0.7, 0], [-0.7, 0, 0], [-0.7, 0, -0.7], [0.7, 0.7, 0]]),
        "old_log_probs": -torch.arange(1.0, 13.0).view(4, 3),
        "ref_log_prob": -torch.arange(1.0, 13.0).view(4, 3) - 0.5,
        "half": torch.ones(4, 3, dtype=torch.bfloat16),
        "flag": torch.eye(4, 3, dtype=torch.bool),  # 12 bytes, which tensordict pads to 16
    }
    arrays = {
        "uid": np.array(["p", "q", "p", "q"], object),
        "reward_model": np.array([{"ground_truth": "1"}] * 4, object),
    }
    arrays |= {
        "index": np.arange(4),
        "source": np.array(["gsm8k"] * 4),
        "ragged": np.array([[1], [2, 3], [], [4]], object),
        "big": np.arange(4, dtype=">i4"),
        "columns": np.asfortranarray(np.arange(8.0).reshape(4, 2)),
    }
    return tensors, arrays, {"temperature": 1.0, "n": np.float32(2), "global_token_num": [4, 4, 5, 5]}


@pytest.mark.parametrize("form", ["plain", "consolidated", "numpy", "dict"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_dataproto_is_read_without_verl(verl, tmp_path, form, protocol):
    tensors, arrays, info = verl_batch()
    data = dataproto.load_dataproto(verl(tmp_path / "b.pkl", tensors, arrays, info, form, protocol))
    assert "verl.protocol" not in sys.modules and "tensordict" not in sys.modules
    assert data.batch.keys() == tensors.keys() and data.meta_info == info
    for name, tensor in tensors.items():
        assert data.batch[name].dtype == tensor.dtype and torch.equal(data.batch[name], tensor)
    for name, array in arrays.items():
        assert (
            data.non_tensor_batch[name].dtype == array.dtype and data.non_tensor_batch[name].tolist() == array.tolist()
        )


class Hostile:
    """Unpickling it runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


class FromBytes:
    """As a torch storage pickles: bytes that torch.storage would unpickle without restriction."""

    def __init__(self, data):
        self.data = data

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.data,)


class Dtype:
    """A numpy dtype of pointers, which would read memory of the pickle's choice."""

    def __reduce__(self):
        return np.dtype, ("V8",)


@pytest.mark.parametrize(
    "where", ["arrays", "batch", "storage", "whole", "numpy dtype", "not a batch", "cut", "dtype name"]
)
def test_hostile_pickles_are_refused(verl, tmp_path, where):
    mark = tmp_path / "ran"
    bomb, (tensors, arrays, info) = Hostile(f"touch {mark}"), verl_batch()
    inner = io.BytesIO()
    torch.save(bomb, inner)
    path, want = tmp_path / "b.pkl", r"system"
    if where == "arrays":
        verl(path, tensors, arrays | {"extra": np.array([bomb], object)}, info, "plain")
    elif where == "batch":  # inside the bytes that veRL itself torch.saves
        verl(path, inner.getvalue(), arrays, info, "as it is")
    elif where == "storage":
        verl(path, tensors, arrays, info | {"x": FromBytes(inner.getvalue())}, "plain")
    elif where == "whole":
        path.write_bytes(pickle.dumps(bomb))
    elif where == "numpy dtype":
        verl(path, tensors, arrays, info | {"x": Dtype()}, "plain")
        want = "numpy dtype"
    elif where == "not a batch":
        path.write_bytes(pickle.dumps({"a": 1}))
        want = "not a DataProto"
    elif where == "cut":
        verl(path, tensors, arrays, info, "numpy")
        path.write_bytes(path.read_bytes()[:-40])
        want = "not a batch"
    else:
        verl(path, ((4,), None, {"x": ("load", (1,), np.zeros(4, np.uint8))}), arrays, info, "as it is")
        want = "no dtype"
    with pytest.raises(ValueError, match=want):
        dataproto.load_dataproto(path)
    assert not mark.exists()
    assert compare("import", path, tmp_path / "out", "--step", 1) == 2
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_import_by_hand(verl, tmp_path, capsys):
    """Rows 0, 2 (prompt 5 6) then 1, 3 (prompt 7 8 9), without padding."""
    tensors, arrays, info = verl_batch()
    source = verl(tmp_path / "step_7.pkl", tensors, arrays, info, "consolidated")
    assert compare("import", source, tmp_path / "out") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "dumps" / "step_000007.json")
    made, dump = dumps.read_dump(tmp_path / "out", 7)
    rows = {name: [row[name] for row in made] for name in made[0]}
    assert rows["prompt_ids"] == [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
    assert rows["token_ids"] == [[11, 12], [13, 14, 15], [21], [22, 23]]
    assert rows["mask"] == [[1, 1], [1, 0, 1], [1], [1, 1]]
    assert rows["old_logprobs"] == rows["logprobs"] == [[-1, -2], [-7, -8, -9], [-4], [-10, -11]]
    assert rows["ref_logprobs"] == [[-1.5, -2.5], [-7.5, -8.5, -9.5], [-4.5], [-10.5, -11.5]]
    assert rows["versions"] == [[6, 6], [6, 6, 6], [6], [6, 6]]
    assert rows["score"] == [1, 0, 0, 1] and rows["advantage"] == pytest.approx([0.7, -0.7, -0.7, 0.7])
    assert rows["position"] == [12, 12, 13, 13] and rows["sample"] == [0, 1, 0, 1] and dump["positions"] == [12, 13]
    assert rows["finish_reason"] == ["stop", "length", "stop", "stop"] and rows["training_step"] == [7] * 4
    assert dump["source"].endswith("logprobs from old_log_probs") and dump["training_step"] == 7
    assert compare("import", source, tmp_path / "out") == 2  # it is there


@pytest.mark.parametrize(
    "change, want",
    [
        ({"advantages": None}, "lacks advantages"),
        ({"old_log_probs": None}, "neither rollout_log_probs nor old_log_probs"),
        ({"advantages": torch.arange(12.0).view(4, 3)}, "advantages differ within the response"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 0, 1, 1]] * 4)}, "is not padded on the right"),
    ],
)
def test_batches_that_do_not_fit_are_refused(verl, tmp_path, capsys, change, want):
    tensors, arrays, info = verl_batch()
    tensors = {k: v for k, v in (tensors | change).items() if v is not None}
    source = verl(tmp_path / "b.pkl", tensors, arrays, info, "plain")
    assert compare("import", source, tmp_path / "out", "--step", 3) == 2
    assert want in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert compare("import", source, tmp_path / "out") == 2  # no step in its name


@pytest.mark.runs
def test_an_imported_batch_trains(verl, tiny_models, tmp_path):
    """grpo.py --load_batches takes an import: two prompts of two rollouts, one step."""
    tensors, arrays, info = verl_batch()
    compare("import", verl(tmp_path / "step_1.pkl", tensors, arrays, info, "plain"), tmp_path / "batches")
    rows = [{"messages": [{"role": "user", "content": "1 + 1"}], "ground_truth": "2", "dataset": "gsm8k"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"""--model_name_or_path {tiny_models()} --model_dtype float32 --rollout_backend transformers
        --dataset_mixer_list {tmp_path / "rows.jsonl"} 1.0 --load_batches {tmp_path / "batches"}
        --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 2 --total_episodes 4 --response_length 8
        --max_logprob_gap 0 --no_use_rho_correction --verification_reward 1 --output_dir {tmp_path} --exp_name run"""
    done = programs.run(["grpo.py", *flags.split()])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["objective/scores"] == 0.5 and row["val/sequence_lengths"] == 2.0 and row["optim/grad_norm"] > 0
    # on-policy the loss is the mean advantage over trained tokens, with the sign turned: two, two, one and two of them
    assert row["loss/policy_avg"] == pytest.approx(-(2 * 0.7 - 2 * 0.7 - 0.7 + 2 * 0.7) / 7, abs=1e-6)


# --- states of another run -------------------------------------------------------------------------------------------


def learner(model, out, source, world):
    args = utils.parse_args(grpo.Args, f"--model_name_or_path {model} --model_dtype float32 --exp_name taken".split())
    args = dataclasses.replace(args, output_dir=str(out), load_states=str(source))
    policy = grpo.load_policy(args, world)
    return args, policy, grpo.make_optimizer(policy, args)[0]


class Loaded:
    """An engine that keeps what it is given."""

    def load_weights(self, named_tensors, version):
        self.weights, self.version = {name: t.clone() for name, t in named_tensors}, version


@pytest.mark.runs
def test_shards_of_verl_are_taken(tiny_models, tmp_path, world, monkeypatch):
    """Three ranks (a block's weights are not a multiple of 3) and both of FSDP's generations."""
    model = tiny_models()
    done = programs.run(["tests/verl_shards.py", model, tmp_path, "3"])
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(utils, "run_program", functools.partial(programs.run_program, utils.run_program))
    truth = torch.load(tmp_path / "truth.pt", weights_only=False)
    start = align.load_hf_state(model)
    for kind in verl_shards.KINDS:
        args, policy, optimizer = learner(model, tmp_path, tmp_path / kind, world)
        engine = Loaded()
        utils.take_state(args, 1, policy, optimizer, engine, world)
        assert engine.version == 1 and engine.weights.keys() == truth["weights"].keys()
        for name, want in truth["weights"].items():
            assert (want - start[name]).norm() > 1e-3 * want.norm()
            assert (engine.weights[name] - want).norm() <= 1e-6 * want.norm(), (kind, name)
        for name, parameter in policy.model.named_parameters():
            state, want = optimizer.state[parameter], truth["moments"][name]
            assert float(state["step"]) == 2.0 and want["exp_avg"].norm() > 0
            for moment in ("exp_avg", "exp_avg_sq"):
                difference = (utils.shard_of(state[moment]) - want[moment]).norm()
                assert difference <= 1e-5 * want[moment].norm(), (kind, name, moment)
        assert [group["lr"] for group in optimizer.param_groups] == [args.learning_rate] * 2  # ours, not the shards'
        assert not (args.run_dir / "state.tmp").exists()


def test_shards_that_cannot_be_right_are_refused(tmp_path):
    actor, reached = tmp_path / "global_step_1" / "actor", tmp_path / "reached"
    actor.mkdir(parents=True)

    def shards(kind, *contents):
        for rank, content in enumerate(contents):
            torch.save(content, actor / f"{kind}_world_size_2_rank_{rank}.pt")

    shards("model", {"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"lacks model_world_size_2_rank_1\.pt"):
        states.read_verl(actor, None)
    shards("model", {"w": torch.ones(2)}, {"w": Hostile(f"touch {reached}")})
    with pytest.raises(ValueError, match=r"rank_1\.pt is not a shard that can be read: refused: .*system"):
        states.read_verl(actor, None)
    assert not reached.exists()
    shards("model", {"w": torch.ones(2)}, {"w": torch.ones(2)})
    shards("optim", {"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match=r"lacks optim_world_size_2_rank_1\.pt"):
        states.read_verl(actor, None)
    model = torch.nn.Linear(3, 1)
    model._no_split_modules = []
    numbers = {"step": 1.0, "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    shard = {"state": {0: numbers}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match=r"exp_avg of weight, \.\.\.: 2 numbers for 4 weights"):
        states.moments_of([shard, shard], model)
    shard["param_groups"][0]["params"] = [0, 1, 2]
    with pytest.raises(ValueError, match=r"3 parameters, the model 2 in 1 units of .*use_orig_params=True"):
        states.moments_of([shard], model)
    for rank in range(2):
        lora = {"base_model.model.lm_head.lora_A.default.weight": torch.ones(2)}
        torch.save(lora, actor / f"model_world_size_2_rank_{rank}.pt")
        (actor / f"optim_world_size_2_rank_{rank}.pt").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has adapters .LoRA., base_model.model.lm_head.lora_A.*merge them"):
        states.read_verl(actor, model)
    with pytest.raises(ValueError, match="has no state of step 2: none of global_step_2/actor"):
        states.convert(tmp_path, 2, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


@pytest.mark.runs
def test_a_run_is_played_again_from_its_batches_and_states(tiny_models, tmp_path):
    """Put back on the other run's state before each step, a run with ten times its learning rate has its numbers at
    every step, to the bit: from checkpoints, and from weights alone, since these numbers are taken before AdamW. On two
    ranks that share out the weights too, to rounding."""
    turns = ({"messages": [{"role": "user", "content": f"{i}"}], "ground_truth": "1"} for i in range(6))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(t | {"dataset": "digits"}) + "\n" for t in turns))
    flags = f"""--model_name_or_path {tiny_models()} --output_dir {tmp_path} --rollout_backend transformers --no_shuffle
        --dataset_mixer_list {tmp_path}/rows.jsonl 1.0 --model_dtype float32 --max_logprob_gap 0 --temperature 1.0
        --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 4 --total_episodes 24 --response_length 8
        --max_prompt_token_length 64 --pack_length 128 --lr_scheduler_type constant --no_filter_zero_std_samples
        --exp_name"""
    other, weights, found = tmp_path / "other", tmp_path / "weights", {}

    def run(name, more, ranks=0):
        done = programs.run([*programs.torchrun(ranks), "grpo.py", *flags.split(), name, *more.split()])
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = [[row[k] for k in ("loss/total_avg", "optim/grad_norm", "objective/kl2_avg")] for row in rows]
        assert len(found[name]) == 3

    saved = "--save_freq 1 --checkpoint_state_freq 1 --keep_last_n_checkpoints -1 --dump_steps all"
    run("other", f"--learning_rate 1e-4 --reward_file scripts/align/digits.py {saved}")
    weights.mkdir()
    for step in (1, 2):
        (other / f"step_{step}").rename(weights / f"step_{step}")
    again = f"--learning_rate 1e-3 --save_freq -1 --load_batches {other}"
    run("alone", again)
    run("from_states", f"{again} --load_states {other} --dump_steps all")
    replayed = programs.run(["scripts/replay.py", tmp_path / "from_states", "--step", "3"])
    assert "equal: replayed weights and metrics are the run's" in replayed.stdout, replayed.stdout + replayed.stderr
    run("from_weights", f"{again} --load_states {weights}")
    assert found["from_states"] == found["from_weights"] == found["other"]
    assert found["alone"][0] == found["other"][0] and found["alone"][1] != found["other"][1]
    for source in (other, weights):
        run("two_ranks", f"{again} --load_states {source} --deepspeed_stage 3 --overwrite", ranks=2)
        for ours, theirs in zip(found["two_ranks"], found["other"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7) != found["alone"][1]
    for name in ("from_weights", "two_ranks"):
        assert not (tmp_path / name / "state.tmp").exists()


def trl_is_installed():
    """As scripts/peers/setup_trl.sh decides it: a test must not install anything."""
    stamp = REPO / ".venv-trl" / "setup.stamp"
    wanted = [REPO / "scripts/peers/requirements-trl.txt", REPO / "requirements-cpu.txt"]
    return stamp.exists() and stamp.read_text().strip() == "".join(path.read_text() for path in wanted).strip()


@pytest.fixture
def trl_trainer(monkeypatch):
    """scripts/peers/trl_trainer.py beside a stub of TRL, whose configuration keeps what it is given."""
    stub = types.ModuleType("trl")
    vars(stub).update(GRPOConfig=types.SimpleNamespace, GRPOTrainer=object)
    monkeypatch.setitem(sys.modules, "trl", stub)
    monkeypatch.delitem(sys.modules, "scripts.peers.trl_trainer", raising=False)
    yield importlib.import_module("scripts.peers.trl_trainer")
    del sys.modules["scripts.peers.trl_trainer"]


@pytest.mark.parametrize("flags, beta", [([], 0.0), (["--out", "o"], 1e-30), (["--out", "o", "--beta", "0.1"], 0.1)])
def test_trl_has_a_reference_policy_only_where_its_kl_is_compared(trl_trainer, monkeypatch, flags, beta):
    """With any beta but 0 it makes one more forward a step: beside a run of ours that has none it looked slow."""
    monkeypatch.setattr(sys, "argv", ["trl_side.py", "--mode", "stock", *flags])
    args = importlib.import_module("scripts.peers.trl_side").parse_args()
    assert trl_trainer.make_config(args, "scratch", 100).beta == beta


@pytest.mark.skipif(not trl_is_installed(), reason="no .venv-trl: bash scripts/peers/setup_trl.sh makes it")
@pytest.mark.runs
def test_our_update_is_that_of_trl(tmp_path):
    """Experiment 1 at tiny size: loss, gradient norm and weights of three steps, with KL and entropy bonus."""
    env = os.environ | {"MODE": "tiny", "STEPS": "3", "OUT": str(tmp_path), "BETA": "0.001", "ENTROPY_COEF": "0.003"}
    command = ["bash", "scripts/align/fixed_input_and_state.sh"]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ALIGNED within 1e-05 relative" in done.stdout and (tmp_path / "align.png").exists()
    runs = [align.read_run(tmp_path / side) for side in ("ours", "trl")]
    shared = align.shared_metrics([runs[:1], runs[1:]], ["loss/total_avg", "optim/grad_norm"])
    for row in align.compare_metrics(*runs, shared, 1e-5, 0.0):
        assert row["steps"] == 3 and row["first"] is None, row
    weights = align.compare_weights(*runs, 1e-5)
    assert [row["name"] for row in weights] == ["step_1", "step_2", "step_3", "model"]
    assert all(row["whole"] and row["parameters"] == 21 and not row["apart"] for row in weights)
    start = align.load_hf_state(tmp_path / "start")
    moved = align.load_hf_state(tmp_path / "trl" / "model")
    assert all((moved[name] - start[name]).norm() > 1e-5 * start[name].norm() for name in start)
