"""scripts/minimal.py is grpo.py's algorithm: its flags and, in a whole run, its bits."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

import grpo
import utils
from scripts import minimal
from tests import programs

SHARED = """--model_dtype float32 --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --response_length 6
    --max_prompt_token_length 18 --temperature 1.0 --learning_rate 3e-3 --total_episodes 192 --seed 3 --beta 0.05
    --num_mini_batches 2 --num_epochs 2 --vllm_enforce_eager --vllm_gpu_memory_utilization 0.3"""
# One response in each pack, so that sums have minimal.py's order: 24 tokens hold a prompt of 17 or 18 with one response
# of 6 tokens, never two.
PLAIN = """--pack_length 24 --lr_scheduler_type constant --save_traces --save_freq -1
    --max_logprob_gap 1e-4"""


def test_its_flags_are_those_of_grpo_py():
    """The same names and defaults, but for the three that say which script and which machine it is made for."""

    def default(flag):
        return flag.default if flag.default_factory is dataclasses.MISSING else flag.default_factory()

    theirs = {flag.name: default(flag) for flag in dataclasses.fields(grpo.Args)}
    ours = {flag.name: default(flag) for flag in dataclasses.fields(minimal.Args)}
    differ = [name for name, value in ours.items() if value not in (dataclasses.MISSING, theirs[name])]
    assert differ == ["exp_name", "model_dtype", "vllm_gpu_memory_utilization"]


@pytest.mark.runs
def test_three_steps_are_those_of_grpo_py_bit_for_bit(tiny_models, tmp_path):
    """The same rollouts and, after 3 steps of 2 epochs of 2 mini-batches with KL, the same weights."""
    with (tmp_path / "train.jsonl").open("w") as file:
        for i in range(32):
            turns = [{"role": "user", "content": f"Say {i}, then 7."}]
            file.write(json.dumps({"messages": turns, "ground_truth": "7", "dataset": "gsm8k"}) + "\n")
    flags = ["--model_name_or_path", str(tiny_models()), "--dataset_mixer_list", str(tmp_path / "train.jsonl"), "1.0"]
    flags += ["--output_dir", str(tmp_path), *SHARED.split()]
    for script, more in (("scripts/minimal.py", []), ("grpo.py", PLAIN.split())):
        done = programs.run([script, *flags, *more], OMP_NUM_THREADS=1)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / name / "rollouts.jsonl").read_text().splitlines()]
        for name in ("minimal", "grpo")
    )
    assert len(ours) == len(theirs) == 192
    for a, b in zip(ours, theirs, strict=True):
        assert (a["token_ids"], a["vllm_logprobs"]) == (b["token_ids"], b["logprobs"])
        assert all(a[name] == b[name] for name in ("training_step", "score", "advantage"))
    assert all(any(r["advantage"] for r in ours if r["training_step"] == step) for step in (1, 2, 3))
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("minimal", "grpo"))
    start = load_file(tiny_models() / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(torch.equal(ours[name], start[name]) for name in ours)


def test_help_takes_a_word_or_a_flag(capsys):
    said = []
    for word in ("beta", "--beta"):
        with pytest.raises(SystemExit) as ended:
            utils.parse_args(minimal.Args, ["--help", word])
        assert not ended.value.code
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "--beta" in said[0] and "--exp_name" not in said[0]
