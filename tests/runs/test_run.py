"""Whole runs of grpo.py on a tiny random model: real engines, real processes, real files."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests import programs
from tests.conftest import REPO
from tests.test_readme import undocumented

SMALL = """--model_dtype float32 --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --response_length 6
    --max_prompt_token_length 48 --pack_length 128 --temperature 1.0 --learning_rate 3e-3 --lr_scheduler_type constant
    --beta 0 --per_device_train_batch_size 8 --max_logprob_gap 1e-4 --save_freq -1 --vllm_gpu_memory_utilization 0.3"""
VLLM = "--vllm_enforce_eager --vllm_enable_prefix_caching"
TRANSFORMERS = "--rollout_backend transformers"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def write_data(directory):
    """Prompts that all want a 7 as the last number: a random model says one now and then."""
    for name, numbers in (("train", range(32)), ("test", range(32, 40))):
        with (directory / f"{name}.jsonl").open("w") as file:
            for i in numbers:
                turns = [{"role": "user", "content": f"Say {i}, then 7."}]
                file.write(json.dumps({"messages": turns, "ground_truth": "7", "dataset": "gsm8k"}) + "\n")
    return directory


def command(model, data, out, *flags, ranks=0, script="grpo.py"):
    """What a user would type after `python`."""
    line = [*programs.torchrun(ranks), script, "--model_name_or_path", str(model), "--output_dir", str(out)]
    line += ["--dataset_mixer_list", str(data / "train.jsonl"), "1.0"]
    return [*line, *SMALL.split(), *" ".join(map(str, flags)).split()]


ENV = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def check(done, ok=True):
    assert (done.returncode == 0) == ok, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout if ok else done.stderr


def run(*args, ok=True, **kwargs):
    return check(programs.run(command(*args, **kwargs), **ENV), ok)


def read(path):
    """The whole rows of a file to which a run may be writing."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def untimed(row):
    """The metrics that do not depend on how long anything took."""
    machine = ("time/", "memory/", "learner_", "val/actor", "val/response_tokens")
    return {k: v for k, v in row.items() if not k.startswith(machine)}


def weights(path):
    return load_file(path / "model.safetensors")


PAGE_METRICS = """episode lr epoch objective/kl objective/scores objective/rlhf_reward objective/non_score_reward
    objective/entropy objective/loss objective/kl2 objective/kl3 objective/scores_mean objective/reward_std
    objective/verifiable_correct_rate loss/policy_avg policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg
    time/from_scratch time/training val/sequence_lengths val/num_stop_token_ids val/ratio val/ratio_var
    val/stop_token_rate other/real_batch_size_ratio other/packed_ratio""".split()


@pytest.fixture(scope="module")
def learned(tiny_models, data, tmp_path_factory):
    """One 12-step run with vLLM that several tests look at."""
    out = tmp_path_factory.mktemp("runs")
    flags = f"--exp_name learn --total_episodes 768 {VLLM} --with_tracking --with_tensorboard --save_traces"
    flags += f" --eval_on_step_0 --local_eval_every 6 --save_freq 5 --dataset_mixer_eval_list {data / 'test.jsonl'} 1.0"
    line = [sys.executable, *command(tiny_models(), data, out, flags)]  # a start from nothing, as a user's
    done = subprocess.run(line, cwd=REPO, env=os.environ | ENV, capture_output=True, text=True, timeout=600)
    return check(done), out / "learn"


def test_it_learns(learned):
    """Reward of a random model: below 0.1 at first, above 0.8 in the last five of 12 steps."""
    rows = [r for r in read(learned[1] / "metrics.jsonl") if r["training_step"] > 0]
    rates = [r["objective/verifiable_correct_rate"] for r in rows]
    assert len(rates) == 12
    assert rates[0] < 0.1
    assert sum(rates[-5:]) / 5 > 0.8


def test_engine_follows_the_learner(learned):
    """float32, tied embeddings, large steps: the mean gap stays below 1e-4 nats in every single step."""
    rows = read(learned[1] / "metrics.jsonl")
    gaps = [r["debug/vllm_vs_local_logprob_diff_max"] for r in rows]
    assert len(gaps) == 13 and max(gaps) < 1e-4
    assert all(abs(r["val/rho"] - 1) < 1e-4 for r in rows)


def test_metrics_of_the_page_are_there(learned):
    rows = read(learned[1] / "metrics.jsonl")
    trained = [r for r in rows if r.get("other/real_batch_size_ratio")]
    missing = [name for name in PAGE_METRICS if name not in trained[0]]
    assert not missing
    first = trained[0]
    assert first["episode"] == 64 and first["epoch"] == 8 / 32 and first["lr"] == 3e-3
    assert first["val/ratio"] == 1.0 and first["policy/clipfrac_avg"] == 0.0
    assert first["objective/scores"] == pytest.approx(10 * first["objective/verifiable_correct_rate"])
    assert first["batch/total_prompts"] == 8
    assert first["val/total_reward_groups"] + first["batch/filtered_prompts"] == 8


@pytest.mark.house
def test_every_metric_is_in_the_readme(learned):
    assert undocumented({key for row in read(learned[1] / "metrics.jsonl") for key in row}) == []


def test_evaluation_before_during_and_after(learned):
    rows = {r["training_step"]: r for r in read(learned[1] / "metrics.jsonl")}
    evaluated = [step for step, r in rows.items() if "eval/objective/verifiable_correct_rate" in r]
    assert evaluated == [0, 6, 12]
    assert rows[0]["eval/pass_at_1"] < 0.2 and rows[12]["eval/pass_at_1"] > 0.8
    assert rows[12]["eval/scores"] == pytest.approx(10 * rows[12]["eval/pass_at_1"])
    kept = [row for row in read(learned[1] / "samples.jsonl") if row.get("evaluation")]
    assert [row["training_step"] for row in kept] == evaluated
    last = [rollout["score"] for rollout in kept[-1]["rollouts"]]
    assert len(last) == rows[12]["eval/num_prompts"] and sum(last) / len(last) == rows[12]["eval/scores"]


def test_what_a_run_leaves(learned):
    stdout, run_dir = learned
    assert "8 prompts x 8 samples = 64 rollouts" in stdout and "12/12" in stdout
    assert (run_dir / "report.png").read_bytes()[:4] == b"\x89PNG"
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and len(environment["data_hash"]) == 16
    assert json.loads((run_dir / "args.json").read_text())["learning_rate"] == 3e-3
    assert list(run_dir.glob("wandb/offline-run-*/run-*.wandb")), "wandb wrote nothing"
    assert list(run_dir.glob("wandb/offline-run-*/files/media/table/rollouts_*")), "wandb got no samples"
    assert list(run_dir.glob("tensorboard/events.*")) and "dropped" not in stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (c.from_pretrained(run_dir / "model") for c in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say 35, then 7."}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    answer = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    assert "7" in tokenizer.decode(answer)
    assert not list(run_dir.glob("*.tmp")) and (run_dir / "step_10" / "model.safetensors").exists()


def test_traces_hold_every_rollout(learned):
    rows = read(learned[1] / "rollouts.jsonl")
    assert len(rows) == 768
    assert {(r["position"], r["sample"]) for r in rows} == {(p, s) for p in range(96) for s in range(8)}
    for r in rows[::97]:
        assert len(r["token_ids"]) == len(r["logprobs"]) == len(r["versions"]) <= 6
        assert set(r["versions"]) == {r["training_step"] - 1}, "a rollout older than the weights that train on it"
        assert max(r["logprobs"]) <= 0
    siblings = [tuple(r["token_ids"]) for r in rows if r["position"] == 0]
    assert len(set(siblings)) > 1


def test_another_process_samples_and_learns_the_same(learned, five_steps):
    """Five steps again, bit for bit: the first process was a Python of its own, which hashed strings otherwise."""
    rows = [row for row in read(learned[1] / "metrics.jsonl") if 0 < row["training_step"] <= 5]
    for a, b in zip(rows, read(five_steps() / "metrics.jsonl"), strict=True):
        assert untimed(a) == untimed(b)
    a, b = weights(learned[1] / "step_5"), weights(five_steps() / "model")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_is_never_overwritten_silently(learned, tiny_models, data):
    out = learned[1].parent
    before = (learned[1] / "metrics.jsonl").read_bytes()
    error = run(tiny_models(), data, out, "--exp_name learn --seed 7", ok=False)
    assert "--seed: 1 then, 7 now" in error and "--exp_name" in error and "Traceback" not in error
    assert (learned[1] / "metrics.jsonl").read_bytes() == before


def test_both_backends_sample_the_same_distribution(tiny_models, world):
    """2000 first tokens of one prompt: the frequency of each token is within 5 sigma of the other engine's."""
    script = f"""
import json, sys
import utils
args = utils.parse_args(__import__("grpo").Args, ["--model_name_or_path", {str(tiny_models())!r}, "--model_dtype",
    "float32", "--rollout_backend", sys.argv[1], "--vllm_enforce_eager", "--max_prompt_token_length", "16"])
world = utils.init_distributed()
engine = utils.make_engine(args, utils.load_tokenizer(args), world, 256)
requests = [utils.Request((5, 6, 7), i, 0.8, 2) for i in range(2000)] + [utils.Request((5, 6, 7), 0, 0.0, 4)]
made = engine.generate(requests)
print(json.dumps([[g.token_ids.tolist(), g.logprobs.tolist(), g.finish_reason] for g in made]))
engine.close()
"""
    sides = []
    for backend in ("vllm", "transformers"):
        sides.append(json.loads(check(programs.run(["-c", script, backend])).splitlines()[-1]))
    counts = [torch.bincount(torch.tensor([g[0][0] for g in side[:-1]]), minlength=512).double() for side in sides]
    sigma = (counts[0] + counts[1]).clamp(min=1).sqrt()
    assert ((counts[0] - counts[1]).abs() / sigma).max() < 5
    logprobs = [{g[0][0]: g[1][0] for g in side[:-1]} for side in sides]
    for token in set(logprobs[0]) & set(logprobs[1]):
        assert logprobs[0][token] == pytest.approx(logprobs[1][token], abs=1e-4)
    assert sides[0][-1][0] == sides[1][-1][0], "greedy tokens differ"


def test_two_ranks_make_the_first_update_of_one(five_steps, tiny_models, data, tmp_path):
    """torchrun with 2 ranks, sharded, each with its own engine: the same rollouts and, to 1e-6, the same weights."""
    flags = f"--exp_name two --total_episodes 64 --save_freq 1 --save_traces --deepspeed_stage 3 {VLLM}"
    run(tiny_models(), data, tmp_path, flags, ranks=2)
    one, two = five_steps(), tmp_path / "two"
    keys = ("position", "sample", "token_ids", "score", "advantage")
    first = [
        [{k: r[k] for k in keys} for r in read(p / "rollouts.jsonl") if r["training_step"] == 1] for p in (one, two)
    ]
    assert first[0] == first[1] and len(first[0]) == 64
    metrics = [read(p / "metrics.jsonl")[0] for p in (one, two)]
    assert metrics[0]["other/real_batch_size_ratio"] > 0, "the first step trained on nothing"
    for name in ("loss/policy_avg", "objective/scores", "val/sequence_lengths", "optim/grad_norm", "objective/kl"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-5, abs=1e-7), name
    a, b = weights(one / "step_1"), weights(two / "step_1")
    for name in a:
        assert (a[name] - b[name]).norm() <= 1e-6 * a[name].norm(), name
