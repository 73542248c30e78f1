"""Every recipe of scripts/train: its flags through the real parser, GPUs and batches against a table, its plan without
a GPU or a network, smoke runs. What the reference documents name: tests/documents.tsv.
"""

import csv
import inspect
import json
import os
import re
import socket
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import grpo
import grpo_fast
import rewards
import utils
from scripts.data import prepare as data
from scripts.parts import checks
from scripts.reports import benchmark_report, metrics
from scripts.train.debug import smoke
from tests import programs
from tests.conftest import REPO

TRAIN = REPO / "scripts/train"
SHARED = (TRAIN / "differences.md").read_text().split("\n## What recipes share")[1]
# GPUs, learners, engines, GPUs of each, prompts, samples, mini-batches, steps, response and pack length: the documents'
TABLE = {
    "tulu3/grpo_fast_8b_single_node": (8, 6, 2, 1, 64, 16, 2, 1953, 2048, 4096),
    "tulu3/grpo_8b": (16, 12, 4, 1, 48, 16, 2, 2604, 2048, 4096),
    "olmo2/grpo_7b": (16, 12, 1, 4, 48, 16, 2, 2604, 2048, 4096),
    "qwen/grpo_7b": (16, 12, 4, 1, 48, 16, 2, 13020, 4096, 6144),
    "qwen/grpo_fast_3b_single_node": (8, 4, 4, 1, 48, 16, 1, 1302, 4096, 6144),
    "qwen/grpo_fast_7b": (16, 4, 12, 1, 48, 16, 1, 6510, 4096, 6144),
    "olmo2/grpo_fast_7b_zero": (16, 4, 12, 1, 48, 16, 1, 1302, 2048, 4096),
    "olmo2/grpo_fast_13b_zero": (16, 8, 8, 1, 48, 16, 1, 1302, 2048, 4096),
    "olmo3/7b_instruct_rl": (64, 8, 56, 1, 64, 8, 4, 2000, 8192, 11264),
    "olmo3/7b_think_rl": (32, 16, 16, 1, 64, 8, 1, 19531, 32768, 35840),
    "olmo3/32b_instruct_rl": (96, 32, 16, 4, 64, 8, 1, 19531, 16384, 19456),
    "olmo3/32b_think_rl": (144, 96, 6, 8, 64, 8, 1, 19531, 32768, 35840),  # 28 nodes reserved, 18 used
    "olmo3/7b_rlzero_math": (72, 16, 56, 1, 32, 8, 1, 3000, 16384, 18432),
    "olmo3/7b_rlzero_code": (40, 8, 32, 1, 32, 8, 1, 39062, 16384, 18432),
    "olmo3/7b_rlzero_instruction_following": (40, 8, 32, 1, 32, 8, 1, 39062, 16384, 18432),
    "olmo3/7b_rlzero_general": (40, 8, 32, 1, 32, 8, 1, 39062, 16384, 18432),
    "olmo3/7b_rlzero_mix": (40, 8, 32, 1, 32, 8, 1, 39062, 16384, 18432),  # 32 in the source
    "hybrid/large_test_hybrid": (16, 8, 4, 2, 32, 16, 1, 19, 4096, 20480),
    "hybrid/large_test_non_hybrid": (16, 8, 4, 2, 32, 16, 1, 19, 4096, 20480),
    "hybrid/7b_instruct_hybrid_rl": (16, 8, 8, 1, 64, 8, 4, 2000, 8192, 11264),
    "gsm8k/qwen2.5_7b_verl": (8, 8, 8, 1, 1024, 5, 4, 105, 1024, 16384),  # the same 8 GPUs take turns
    "solver/planner_3b_300steps": (4, 2, 1, 1, 30, 4, 1, 300, 3072, 12288),  # and one for the solver
    "debug/tools/olmo_3_parser_multigpu": (16, 8, 8, 1, 32, 8, 1, 5, 8192, 16384),
    "tools/retool_qwen2.5_7b": (8, 4, 4, 1, 64, 16, 4, 250, 16384, 18432),
    "distill/qwen3_8b_deepmath": (8, 8, 8, 1, 1024, 4, 1, 100, 4096, 16384),  # the same 8 GPUs take turns
    "debug/grpo_fast": (1, 1, 1, 1, 8, 4, 1, 4, 64, 1024),
    "debug/grpo_fast_3_gpu": (3, 2, 1, 1, 8, 4, 1, 6, 64, 1024),
    "debug/single_gpu_grpo": (1, 1, 1, 1, 8, 4, 1, 6, 64, 1024),
    "debug/grpo_integration_test": (1, 1, 1, 1, 8, 4, 1, 6, 64, 1024),
    "debug/letters": (1, 1, 1, 1, 8, 8, 1, 20, 16, 512),
    "debug/hack": (1, 1, 1, 1, 8, 8, 1, 30, 14, 512),
    "debug/distill": (1, 1, 1, 1, 16, 16, 4, 20, 16, 1024),
    "debug/multi_node_grpo": (16, 8, 4, 2, 32, 16, 1, 19, 4096, 20480),
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A directory with what recipes expect at the root of the repository; afterwards no judge and no solver is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:9/v1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # else this machine's GPUs are too few
    (tmp_path / "scripts").symlink_to(REPO / "scripts")
    yield tmp_path
    rewards.configure(rewards.RewardFlags(), connect=False)


def read_flags(recipe):
    """(command, script, Args) of a recipe, by the real parser."""
    (command,) = smoke.captures(TRAIN / f"{recipe}.sh")
    script, flags = smoke.training_flags(command)
    return command, script, utils.parse_args(grpo.Args, flags)


def check(command, script, args, nodes):
    """What the scripts' own main functions check before they start; the number of ranks."""
    for name in [*args.dataset_mixer_list, *args.dataset_mixer_eval_list]:
        if name.endswith(".jsonl"):  # made by the recipe before it starts
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).touch()
    ranks = int(command[command.index("--nproc_per_node") + 1]) * nodes if command[0] == "torchrun" else 1
    if script == "grpo.py":
        args.check(ranks)
        return ranks
    checks.check_fast(args, None if command[0] == "python" else ranks, 8)
    args.check(1, fast=True)
    if command[0] == "python" and not args.single_gpu_mode:
        return sum(args.num_learners_per_node) + args.vllm_num_engines * args.vllm_tensor_parallel_size
    return ranks


def nodes_of(text):
    """The nodes that a recipe asks SLURM for; 1 without SLURM."""
    found = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 1


def test_the_tables_have_every_recipe_each_folder_and_what_recipes_share():
    paths = [path for path in TRAIN.glob("*/**/*.sh") if path.name != "smoke.sh"]
    assert {str(path.relative_to(TRAIN).with_suffix("")) for path in paths} == set(TABLE)
    headers = [path.read_text().partition("set -euo")[0] for path in paths]
    rows = re.findall(r"^\| `(\w+)` \|", SHARED, re.MULTILINE)
    assert rows and all(sum(f"`{row}`" in header for header in headers) > 1 for row in rows)


@pytest.mark.parametrize("recipe", TABLE)
def test_recipe(recipe, elsewhere):
    """Hardware, batch and lengths of the flags, as the real parser and the checks of the scripts take them."""
    nodes = nodes_of((TRAIN / f"{recipe}.sh").read_text())
    command, script, args = read_flags(recipe)
    gpus = check(command, script, args, nodes) + (args.solver_num_engines if args.solver_model_name_or_path else 0)
    learners = gpus if script == "grpo.py" else sum(args.num_learners_per_node)
    engines = learners if script == "grpo.py" else args.vllm_num_engines
    steps = grpo.num_training_steps(args)
    found = (gpus, learners, engines, args.vllm_tensor_parallel_size, args.num_unique_prompts_rollout)
    found += (args.num_samples_per_prompt_rollout, args.num_mini_batches, steps, args.response_length, args.pack_length)
    assert found == TABLE[recipe]
    if nodes > 1:
        assert gpus == 8 * nodes
        assert len(args.num_learners_per_node) <= nodes and max(args.num_learners_per_node) <= 8


KEPT_BY_PYTHON = """#!/usr/bin/env bash
printf '%s\\0' "${WORLD_SIZE:-1}" "${LOCAL_WORLD_SIZE:-1}" "$@" >>"$CAPTURED"
"""


def without_slurm(directory, monkeypatch):
    """A machine without SLURM, torchrun, a judge and a network, whose python only writes down what it was given."""
    python = directory / "python"
    python.write_text(KEPT_BY_PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setenv("CAPTURED", str(directory / "captured"))
    monkeypatch.setenv("BASH_FUNC_source%%", smoke.STUBS["source"])
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OPENAI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("recipe", TABLE)
def test_a_recipe_prints_its_plan_on_a_laptop(recipe, tmp_path, monkeypatch, capsys):
    """Its shell starts one process, for all ranks; that process asks no network and names what it cannot see."""
    without_slurm(tmp_path, monkeypatch)
    path = TRAIN / f"{recipe}.sh"
    command = ["bash", str(path), "--dry_run"]
    told = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    world_size, on_node, script, *flags = (tmp_path / "captured").read_bytes().decode().split("\0")[:-1]
    text = path.read_text()
    made = re.findall(r"^first    python (scripts/data/\S+)(.*): left out", told, re.MULTILINE)
    assert len(made) == text.count("python scripts/data/")
    for maker, flags_of_data in made:
        source = (REPO / maker).read_text() + inspect.getsource(data.parser)
        assert all(f'"{flag}"' in source for flag in re.findall(r"--\w+", flags_of_data)), flags_of_data

    ranks = 8 * nodes_of(text) if "on_all_nodes" in text or "nproc_per_node 8" in text else 1
    assert (int(world_size), int(on_node)) == (ranks, min(ranks, 8))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a dry run asks the network"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of the laptop
    if ranks > 1:
        ours = {"TORCHELASTIC_RUN_ID": "plan", "RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": on_node}
        for name, value in ours.items():
            monkeypatch.setenv(name, str(value))
    args = utils.parse_args(grpo.Args, flags)
    {"grpo.py": grpo.main, "grpo_fast.py": grpo_fast.main}[script](args)
    assert args.model_name_or_path in capsys.readouterr().out
    rewards.configure(rewards.RewardFlags(), connect=False)


EXPERIMENTS = "fixed_input_and_state fixed_state_own_rollouts independent_plain independent_regularized".split()


@pytest.mark.parametrize("experiment", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["tiny", "full"])
def test_align(experiment, mode, elsewhere, monkeypatch):
    """Our side of the four experiments; tests/test_align.py runs the first against TRL, where that is installed."""
    names = {"MODE": mode, "OUT": elsewhere / "out", "TRL_PYTHON": "true"}
    names |= {"OURS": "torchrun --nproc_per_node 6 grpo.py"} if mode == "full" else {}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    commands = smoke.captures(REPO / f"scripts/align/{EXPERIMENTS[experiment - 1]}.sh")
    assert len(commands) == (1 if experiment < 3 else 4)
    (elsewhere / "out/start").mkdir(parents=True, exist_ok=True)  # the tiny model
    for seed, command in enumerate(commands, 1):
        args = utils.parse_args(grpo.Args, smoke.training_flags(command)[1])
        args = replace(args, dataset_mixer_list=["rows.jsonl", "1.0"])
        found = (check(command, "grpo.py", args, 1), grpo.num_training_steps(args), args.num_unique_prompts_rollout)
        found += (args.num_samples_per_prompt_rollout, args.num_mini_batches, args.response_length)
        assert found == ((6, 77, 96, 8, 1, 2048) if mode == "full" else (1, 24, 4, 8, 1, 24))
        regularization = (0.001, 0.003) if experiment in (2, 4) else (0, 0)
        assert (args.seed, args.shuffle, args.beta, args.entropy_coef) == (seed, False, *regularization)


SMOKED = {  # one of each folder -> verifiers whose rewards are seen
    "debug/grpo_integration_test": "math ifeval",  # one device, active sampling, checkpoints, dumps
    "debug/tools/olmo_3_parser_multigpu": "ifeval math",  # vLLM's parser, a sandbox, a retriever that nobody asks
    "olmo2/grpo_fast_7b_zero": "math ifeval",  # srun and torchrun
    "gsm8k/qwen2.5_7b_verl": "gsm8k_verl ifeval",  # grpo.py behind torchrun
    "solver/planner_3b_300steps": "solver",  # with a server for the solver
    "hybrid/large_test_hybrid": "code code_stdio ifeval",  # a model whose layers leak
    "distill/qwen3_8b_deepmath": "math ifeval",  # adapters, a teacher, no reward
}


@pytest.mark.parametrize("recipe", SMOKED)
@pytest.mark.runs
def test_smoke(recipe, tmp_path, monkeypatch):
    python = programs.python_that_forks(tmp_path / "python", f"{programs.SERVERS} | */scripts/parts/worker.py")
    monkeypatch.setenv("PYTHON_OF_FORKS", str(python))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert smoke.run(TRAIN / f"{recipe}.sh", ["--output_dir", str(tmp_path)]) == 0
    run_dir = tmp_path / f"smoke_{Path(recipe).name}"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["training_step"] > 0]
    assert [step["training_step"] for step in steps] == [1, 2]
    assert max(step.get("optim/grad_norm", 0) for step in steps) > 0, "nothing was trained"
    seen = {f"objective/{verifier}_reward" for verifier in SMOKED[recipe].split()}
    assert seen <= set().union(*steps), "a verifier did not occur"
    ours = json.loads((run_dir / "args.json").read_text())
    model = json.loads((run_dir / ("model_merged" if ours["lora_merge"] else "model") / "config.json").read_text())
    assert model["model_type"] == ("olmo_hybrid" if recipe == "hybrid/large_test_hybrid" else "llama")
    theirs = vars(read_flags(recipe)[2])
    for name in "learning_rate beta deepspeed_stage gradient_checkpointing chat_template_name num_mini_batches".split():
        assert ours[name] == theirs[name], name


DOCUMENTS = list(csv.reader((REPO / "tests/documents.tsv").open(encoding="utf-8"), delimiter="\t"))[1:]


def is_here(kind, name):
    """Whether this project has the script, flag or metric; a metric of veRL's has ours, which has a definition."""
    match kind:
        case "script":
            path = REPO / name
            if path.suffix == ".py":
                return path.exists() and compile(path.read_text(), name, "exec") is not None
            return subprocess.run(["bash", "-n", path]).returncode == 0
        case "flag":
            return name in {flag.name for flag in fields(grpo.Args)}
        case "metric":
            return metrics.define(name) is not None
        case "verl metric":
            return name in benchmark_report.METRICS and benchmark_report.METRICS[name].ours != ""
    raise ValueError(kind)


@pytest.mark.parametrize("document", sorted({row[0] for row in DOCUMENTS}))
def test_what_a_document_names_is_here(document):
    rows = [row[1:] for row in DOCUMENTS if row[0] == document]
    assert [row for row in rows if not is_here(row[1], row[2])] == []
