"""align.py, dataproto.py and states.py of scripts/align/: what is a difference, what is read, what is refused."""

import dataclasses
import functools
import io
import json
import os
import pickle
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import grpo
import utils
from scripts.align import align, dataproto, states
from scripts.parts import checkpoints, dumps
from tests import programs, verl_shards
from tests.conftest import REPO

METRICS = {
    "loss/total_avg": [0.5, -0.25, 0.125],
    "optim/grad_norm": [3.0, 2.0, 1.0],
    "objective/scores": [1.0, 2.0, 4.0],
}


def write_run(path, metrics):
    """A run in our format, of metrics name -> values at steps 1, 2, ..."""
    path.mkdir(parents=True, exist_ok=True)
    steps = range(len(next(iter(metrics.values()))))
    rows = [{"training_step": i + 1, **{k: v[i] for k, v in metrics.items()}} for i in steps]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compare(*words):
    return align.main([str(word) for word in words])


# --- one run a side --------------------------------------------------------------------------------------------------


def test_differences_by_hand(tmp_path):
    """At step 2 |-0.25 + 0.2500001| = 1e-7, relative 4e-7; at step 3 |0.125 - 0.126| = 1e-3, relative 1/126."""
    a = write_run(tmp_path / "a", METRICS)
    b = write_run(tmp_path / "b", METRICS | {"loss/total_avg": [0.5, -0.2500001, 0.126]})
    runs = [align.read_run(a), align.read_run(b)]
    shared = align.shared_metrics(runs, None)
    for order in (runs, runs[::-1]):  # relative to the larger one, whichever side it is on
        rows = {row["name"]: row for row in align.compare_metrics(*order, shared, 1e-5, 1e-9)}
        loss = rows["loss/total_avg"]
        assert (loss["steps"], loss["first"]) == (3, 3)
        assert loss["max_abs"] == pytest.approx(1e-3) and loss["max_rel"] == pytest.approx(1 / 126)
        assert rows["optim/grad_norm"]["first"] is None and rows["optim/grad_norm"]["max_abs"] == 0
    assert align.compare_metrics(*runs, shared, 1e-7, 1e-8)[1]["first"] == 2
    assert compare(a, b, "--plot", tmp_path / "p.png") == 1 and (tmp_path / "p.png").stat().st_size > 0
    assert compare(a, b, "--tolerance", 0.01) == compare(a, b, "--atol", 0.01) == 0
    assert compare(a, b, "--metrics", "grad_norm") == 0 and compare(a, b, "--metrics", "loss") == 1


def test_other_systems_names_and_formats(tmp_path):
    """The same three steps as veRL's file log, its console and TRL's lines: equal to ours under our names."""
    a = write_run(tmp_path / "a", METRICS)
    verl = {"critic/score/mean": "objective/scores", "actor/grad_norm": "optim/grad_norm"}
    verl |= {"actor/final_loss": "loss/total_avg"}
    trl = {"reward": "objective/scores", "grad_norm": "optim/grad_norm", "loss": "loss/total_avg"}
    logs = {"verl.jsonl": [], "trl.jsonl": [], "console.log": ["loading"]}
    for i in range(3):
        row = {name: METRICS[ours][i] for name, ours in verl.items()}
        told = " - ".join(f"{name}:np.float64({value})" for name, value in row.items())
        logs["verl.jsonl"].append(json.dumps({"step": i + 1, "data": row}))
        logs["trl.jsonl"].append(json.dumps({"step": i + 1} | {name: METRICS[ours][i] for name, ours in trl.items()}))
        logs["console.log"].append(f"(TaskRunner pid=7) step:{i + 1} - {told} - lr:1e-05")
    for name, lines in logs.items():
        log = tmp_path / name
        log.write_text("\n".join(lines) + "\n")
        found = align.read_run(log).metrics
        assert {ours: list(found[ours].values()) for ours in METRICS} == METRICS
        assert compare(a, log) == 0
        log.write_text(log.read_text().replace("0.125", "0.1251"))
        assert compare(a, log) == 1


def save_weights(path, state):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    save_file(state, path / "model.safetensors")
    return path


def test_weights(tmp_path):
    """A tied head that one side left out is its embedding; of a changed parameter, |difference| / |b| = 0.5 / 5."""
    embedding = torch.arange(6.0).view(2, 3)
    whole = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.tensor([3.0, 4.0])}
    head = {"lm_head.weight": embedding.clone()}
    for step in (2, 10):
        save_weights(tmp_path / f"a/step_{step}", whole)
    save_weights(tmp_path / "b/step_2", whole | head)
    save_weights(tmp_path / "b/step_10", whole | head | {"model.norm.weight": torch.tensor([3.3, 4.4])})
    rows = align.compare_weights(*[align.read_run(tmp_path / side) for side in "ba"])
    assert [(row["name"], row["parameters"], row["differing"]) for row in rows] == [("step_2", 3, 0), ("step_10", 3, 1)]
    assert rows[1]["distance"] == pytest.approx(0.5 / 5) and rows[1]["worst"] == "model.norm.weight"
    assert [compare(tmp_path / "a", tmp_path / "b", "--tolerance", t) for t in (0.09, 0.11)] == [1, 0]
    # a NaN is apart from everything
    broken = save_weights(tmp_path / "d", whole | {"model.norm.weight": torch.tensor([3.0, np.nan])})
    assert compare(broken, tmp_path / "a/step_2") == 1


# --- several seeds ---------------------------------------------------------------------------------------------------


def test_permutation_and_sign_tests_by_hand():
    """{1, 2} against {3, 4}: 2 of the 6 ways are as far apart; {1, 3} against {2, 4}: |2 - 3| = 1, so are 4 of 6.
    Differences 1, 1, 1: only all-plus and all-minus of 8 ways; 1, 1, -1: |1|, which all 8 reach."""

    def test(a, b):
        return align.permutation_test(np.array(a, float), np.array(b, float))

    assert test([1, 2], [3, 4]) == (pytest.approx(2 / 6), pytest.approx(2 / 6))
    assert test([1, 3], [2, 4])[0] == pytest.approx(4 / 6)
    assert test([5], [1, 2, 3]) == (pytest.approx(1 / 4), 1 / 4)
    assert align.sign_test(np.array([1.0, 1.0, 1.0])) == (2 / 8, 2 / 8)
    assert align.sign_test(np.array([1.0, 1.0, -1.0])) == (1.0, 2 / 8)


def test_overlap_share_by_hand(tmp_path):
    """Means 1 and 2 with deviations sqrt(2) * 0.4 a side: 1 <= 1.13 overlaps; with 0.3, 1 > 0.85 does not."""
    rows = {"a_1": [0.6, 0.7], "a_2": [1.4, 1.3], "b_1": [1.6, 1.7], "b_2": [2.4, 2.3]}
    runs = {name: align.read_run(write_run(tmp_path / name, {"x": values})) for name, values in rows.items()}
    sides = [[runs["a_1"], runs["a_2"]], [runs["b_1"], runs["b_2"]]]
    (row,) = align.compare_bands(sides, {"x": [1, 2]}, paired=False)
    assert row["overlap"] == 0.5 and (row["mean_a"], row["mean_b"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert row["p"] == pytest.approx(2 / 6) and row["apart"]  # of 6 ways, for want of overlap alone
    (row,) = align.compare_bands(sides, {"x": [1]}, paired=False)
    assert row["overlap"] == 1.0 and not row["apart"]
    (row,) = align.compare_bands(sides, {"x": [1, 2]}, paired=True)  # of pairs: means and p are of all steps
    assert (row["mean_a"], row["p"]) == (pytest.approx(1.0), 2 / 2**2)


# --- importing veRL's batches ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class DataProto:
    """As veRL's: what torch.save wrote of its batch, arrays, meta_info."""

    state: tuple

    def __getstate__(self):
        return self.state


@dataclasses.dataclass
class TensorDict:
    """As tensordict 0.15.3 pickles it when it is consolidated, as veRL has it."""

    tensors: dict

    def __reduce__(self):
        leaves, parts, at = {}, [], 0
        for name, tensor in self.tensors.items():
            part = tensor.contiguous().flatten().view(torch.uint8)
            pad = -len(part) % 8
            parts.append(torch.cat([part, part.new_zeros(pad)]))
            end = at + len(parts[-1])
            leaves[name] = (str(tensor.dtype), list(tensor.shape), at, end, pad // tensor.itemsize)
            at = end
        metadata = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": {"batch_size": [4]}}
        return _rebuild_tensordict_files_consolidated, (metadata, torch.cat(parts))


def _rebuild_tensordict_files_consolidated():
    raise AssertionError("the importer called back into tensordict")


PLACES = {
    "verl": [],
    "verl.protocol": [DataProto],
    "tensordict": [],
    "tensordict._reductions": [_rebuild_tensordict_files_consolidated],
}


def pickle_batch(path, batch, arrays):
    """Write a batch as veRL pickles it; the names of its classes exist only meanwhile. `batch` may be bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module, things in PLACES.items():
            fake = types.ModuleType(module)
            for thing in things:
                patch.setattr(thing, "__module__", module)
                setattr(fake, thing.__name__, thing)
            patch.setitem(sys.modules, module, fake)
        if not isinstance(batch, bytes):
            buffer = io.BytesIO()
            torch.save(TensorDict(batch), buffer)
            batch = buffer.getvalue()
        info = {"temperature": 1.0, "n": np.float32(2), "global_token_num": [4, 4, 5, 5]}
        path.write_bytes(pickle.dumps(DataProto((batch, arrays, info))))
    return path


def verl_batch():
    """Two prompts of two rollouts, the rows balanced over ranks and so not in the prompts' order; width 3 + 3."""
    in_prompts = [[0, 1, 1], [1, 1, 1]] * 2
    in_responses = [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]
    tensors = {
        "prompts": torch.tensor([[0, 5, 6], [7, 8, 9], [0, 5, 6], [7, 8, 9]]),
        "responses": torch.tensor([[11, 12, 0], [21, 0, 0], [13, 14, 15], [22, 23, 0]]),
        "attention_mask": torch.cat([torch.tensor(in_prompts), torch.tensor(in_responses)], 1),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1], [1, 1, 0]]),  # row 2 has a tool's token
        "token_level_scores": torch.tensor([[0.0, 1.0, 0], [0.0, 0, 0], [0, 0, 0], [0, 1.0, 0]]),
        "advantages": torch.tensor([[0.7, 0.7, 0], [-0.7, 0, 0], [-0.7, 0, -0.7], [0.7, 0.7, 0]]),
        "old_log_probs": -torch.arange(1.0, 13.0).view(4, 3),
        "ref_log_prob": -torch.arange(1.0, 13.0).view(4, 3) - 0.5,
        "half": torch.ones(4, 3, dtype=torch.bfloat16),
        "flag": torch.eye(4, 3, dtype=torch.bool),  # 12 bytes, which tensordict pads to 16
    }
    arrays = {"uid": np.array(["p", "q", "p", "q"], object), "index": np.arange(4), "source": np.array(["gsm8k"] * 4)}
    arrays["reward_model"] = np.array([{"ground_truth": "1"}] * 4, object)
    return tensors, arrays


@dataclasses.dataclass
class Hostile:
    """Unpickling it runs a command."""

    command: str

    def __reduce__(self):
        return os.system, (self.command,)


def test_hostile_pickles_are_refused(tmp_path):
    """In the arrays, inside the bytes that veRL itself torch.saves, or in place of a batch; one that is cut short, and
    one with bytes in place of objects."""
    mark = tmp_path / "ran"
    bomb = Hostile(f"touch {mark}")
    tensors, arrays = verl_batch()
    inner = io.BytesIO()
    torch.save(bomb, inner)
    paths = [tmp_path / f"b_{i}.pkl" for i in range(5)]
    pickle_batch(paths[0], tensors, arrays | {"extra": np.array([bomb], object)})
    pickle_batch(paths[1], inner.getvalue(), arrays)
    paths[2].write_bytes(pickle.dumps(bomb))
    paths[3].write_bytes(pickle_batch(paths[3], tensors, arrays).read_bytes()[:-40])
    pickle_batch(paths[4], tensors, arrays | {"uid": np.arange(4)})
    for path, reason in zip(paths, ("system", "system", "system", "read", "uid"), strict=True):
        with pytest.raises(ValueError, match=reason):
            dataproto.load_dataproto(path)
        assert compare("import", path, tmp_path / "out") == 2
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_import_by_hand(tmp_path):
    """Rows 0, 2 (prompt 5 6) then 1, 3 (prompt 7 8 9), without padding. veRL and tensordict are not there."""
    source = pickle_batch(tmp_path / "step_7.pkl", *verl_batch())
    tensors, uids = dataproto.load_dataproto(source)
    for name, tensor in verl_batch()[0].items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
    assert uids == ["p", "q", "p", "q"] and not {"verl", "tensordict"} & sys.modules.keys()

    assert compare("import", source, tmp_path / "out") == 0
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
    assert dump["training_step"] == 7
    assert compare("import", source, tmp_path / "out") == 2  # it is there


def test_batches_that_do_not_fit_are_refused(tmp_path):
    differing = torch.arange(12.0).view(4, 3)  # advantages within a response
    on_the_left = torch.tensor([[0, 1, 1, 0, 1, 1]] * 4)  # padding of a response
    changes = {"advantages": None}, {"old_log_probs": None}, {"advantages": differing}, {"attention_mask": on_the_left}
    tensors, arrays = verl_batch()
    for change in changes:
        batch = {name: value for name, value in (tensors | change).items() if value is not None}
        assert compare("import", pickle_batch(tmp_path / "b_3.pkl", batch, arrays), tmp_path / "out") == 2
    assert compare("import", pickle_batch(tmp_path / "b.pkl", tensors, arrays), tmp_path / "out") == 2  # which step?
    assert not (tmp_path / "out").exists()


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


def as_of_gpus(path):
    """Give the tensors of a file that torch saved the device that they would have on a GPU."""
    with zipfile.ZipFile(path) as saved:
        files = {name: saved.read(name) for name in saved.namelist()}
    with zipfile.ZipFile(path, "w") as changed:
        for name, content in files.items():
            changed.writestr(name, content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0"))


@pytest.mark.house
@pytest.mark.runs
def test_shards_of_verl_are_taken(tiny_models, tmp_path, world, monkeypatch):
    """Three ranks (a block's weights are not a multiple of 3) and both of FSDP's generations, as if of GPUs."""
    model = tiny_models()
    done = programs.run(["tests/verl_shards.py", model, tmp_path, "3"])
    assert done.returncode == 0, done.stderr[-3000:]
    for path in tmp_path.rglob("*_rank_*.pt"):
        as_of_gpus(path)
    monkeypatch.setattr(utils, "run_program", functools.partial(programs.run_program, utils.run_program))
    truth = torch.load(tmp_path / "truth.pt", weights_only=False)
    start = align.load_hf_state(model)
    for kind in verl_shards.KINDS:
        args, policy, optimizer = learner(model, tmp_path, tmp_path / kind, world)
        engine = Loaded()
        checkpoints.take_state(args, 1, policy, optimizer, engine, world)
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
    actor, reached = tmp_path / "global_step_1/actor", tmp_path / "reached"
    actor.mkdir(parents=True)
    weight, bomb = {"w": torch.ones(2)}, {"w": Hostile(f"touch {reached}")}
    lora = {"base_model.model.lm_head.lora_A.default.weight": torch.ones(2)}
    for model, reason in (([weight], "lacks"), ([weight, bomb], "system"), ([lora, lora], "adapters")):
        for rank, shard in enumerate(model):
            torch.save(shard, actor / f"model_world_size_2_rank_{rank}.pt")
        with pytest.raises(ValueError, match=reason):
            states.read_verl(actor, None)
    assert not reached.exists()

    model = torch.nn.Linear(3, 1)
    model._no_split_modules = []
    numbers = {"step": 1.0, "exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    shard = {"state": {0: numbers}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match="2 numbers for 4 weights"):
        states.moments_of([shard, shard], model)
    with pytest.raises(ValueError, match="step 2"):
        states.convert(tmp_path, 2, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


@pytest.mark.house
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
    run("two_ranks", f"{again} --load_states {other} --deepspeed_stage 3", ranks=2)
    for ours, theirs in zip(found["two_ranks"], found["other"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7) != found["alone"][1]
    for name in ("from_weights", "two_ranks"):
        assert not (tmp_path / name / "state.tmp").exists()


def trl_is_installed():
    """As scripts/peers/setup_trl.sh decides it: a test must not install anything."""
    stamp = REPO / ".venv-trl" / "setup.stamp"
    wanted = [REPO / "scripts/peers/requirements-trl.txt", REPO / "requirements-cpu.txt"]
    return stamp.exists() and stamp.read_text().strip() == "".join(path.read_text() for path in wanted).strip()


@pytest.mark.skipif(not trl_is_installed(), reason="no .venv-trl: bash scripts/peers/setup_trl.sh makes it")
@pytest.mark.runs
def test_our_update_is_that_of_trl(tmp_path):
    """Experiment 1 at tiny size: loss, gradient norm and weights of three steps, with KL and entropy bonus."""
    env = os.environ | {"MODE": "tiny", "STEPS": "3", "OUT": str(tmp_path), "BETA": "0.001", "ENTROPY_COEF": "0.003"}
    command = ["bash", "scripts/align/fixed_input_and_state.sh"]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "align.png").exists()
    runs = [align.read_run(tmp_path / side) for side in ("ours", "trl")]
    shared = align.shared_metrics(runs, ["loss/total_avg", "optim/grad_norm"])
    for row in align.compare_metrics(*runs, shared, 1e-5, 0.0):
        assert row["steps"] == 3 and row["first"] is None, row
    weights = align.compare_weights(*runs)
    assert [row["name"] for row in weights] == ["step_1", "step_2", "step_3", "model"]
    assert all(row["parameters"] == 21 and row["distance"] <= 1e-5 for row in weights)
    start = align.load_hf_state(tmp_path / "start")
    moved = align.load_hf_state(tmp_path / "trl" / "model")
    assert all((moved[name] - start[name]).norm() > 1e-5 * start[name].norm() for name in start)
