"""Every recipe of scripts/train/: its flags through the real parser, GPUs and batches against a table, smoke runs.

The data that recipes train on: scripts/data/.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import grpo
import grpo_fast
import rewards
import utils
from scripts.data import competition_math, gsm8k, rlvr, rows
from scripts.parts import ifeval, solver
from scripts.train.debug import smoke
from tests import programs
from tests.conftest import REPO
from tests.test_align import trl_is_installed

FOLDERS = "debug debug/tools tulu3 qwen olmo2 olmo3 gsm8k solver hybrid tools distill".split()
RECIPES = sorted(
    str(path.relative_to(REPO))
    for folder in FOLDERS
    for path in (REPO / "scripts/train" / folder).glob("*.sh")
    if path.name not in ("smoke.sh", "letters.sh")
)
ALL_RECIPES = [*RECIPES, "scripts/train/debug/letters.sh"]
# GPUs, learners, engines, GPUs of each, prompts, samples, mini-batches, steps, response and pack length: the documents'
TABLE = {
    "tulu3/grpo_fast_8b_single_node": (8, 6, 2, 1, 64, 16, 2, 1953, 2048, 4096),
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
    "debug/turn_credit": (1, 1, 1, 1, 8, 8, 1, 30, 128, 2048),
    "debug/hack": (1, 1, 1, 1, 8, 8, 1, 30, 14, 512),
    "debug/distill": (1, 1, 1, 1, 16, 16, 4, 20, 16, 1024),
    "debug/multi_node_grpo": (16, 8, 4, 2, 32, 16, 1, 19, 4096, 20480),
}
# chat template -> parts of the names of recipes that have it; the others have the tokenizer's own
TEMPLATES = {
    "tulu": "tulu3/",
    "tulu_thinker": "large_test multi_node",
    "r1_simple_chat_postpend_think": "grpo_fast_3b grpo_fast_7b olmo2/",
    "olmo_thinker": "think_rl rlzero_general",
    "olmo_thinker_rlzero": "rlzero_math rlzero_mix rlzero_instruction",
    "olmo_thinker_code_rlzero": "rlzero_code",
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
    (command,) = smoke.captures(REPO / recipe)
    script, flags = smoke.training_flags(command)
    return command, script, utils.parse_args(grpo.Args, flags)


def check(command, script, args, nodes):
    """What the scripts' own main functions check before they start."""
    for name in [*args.dataset_mixer_list, *args.dataset_mixer_eval_list]:
        if name.endswith(".jsonl"):  # made by the recipe before it starts
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).touch()
    if script == "grpo.py":
        ranks = int(command[command.index("--nproc_per_node") + 1]) if command[0] == "torchrun" else 1
        args.check(ranks)
        return ranks
    if command[0] == "python":
        grpo_fast.check_fast_args(args, None, 1)
        ranks = sum(args.num_learners_per_node) + args.vllm_num_engines * args.vllm_tensor_parallel_size
    else:
        ranks = 8 * nodes
        grpo_fast.check_fast_args(args, ranks, 8)
    args.check(1, fast=True)
    return 1 if args.single_gpu_mode else ranks


def test_every_recipe_is_in_the_table():
    assert [f"scripts/train/{name}.sh" for name in sorted(TABLE)] == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe(recipe, elsewhere):
    text = (REPO / recipe).read_text()
    subprocess.run(["bash", "-n", REPO / recipe], check=True)
    nodes = int(re.search(r"^#SBATCH --nodes=(\d+)$", text, re.M)[1]) if "#SBATCH" in text else 1
    command, script, args = read_flags(recipe)
    gpus = check(command, script, args, nodes) + (args.solver_num_engines if args.solver_model_name_or_path else 0)
    learners = gpus if script == "grpo.py" else sum(args.num_learners_per_node)
    engines = learners if script == "grpo.py" else args.vllm_num_engines
    steps = grpo.num_training_steps(args)
    found = (gpus, learners, engines, args.vllm_tensor_parallel_size, args.num_unique_prompts_rollout)
    found += (args.num_samples_per_prompt_rollout, args.num_mini_batches, steps, args.response_length, args.pack_length)
    assert found == TABLE[recipe.removeprefix("scripts/train/").removesuffix(".sh")]
    template = next((t for t, names in TEMPLATES.items() if any(name in recipe for name in names.split())), None)
    assert args.chat_template_name == template
    if nodes > 1:
        assert gpus == 8 * nodes
        assert len(args.num_learners_per_node) <= nodes and max(args.num_learners_per_node) <= 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_has_the_common_form(recipe):
    text = (REPO / recipe).read_text()
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "\nset -euo pipefail\ncd " in text
    assert '\nsource scripts/train/start.sh "$@"\n' in text
    assert all(part in text for part in ("# Hardware:", "# Expected:", "# Source:", "# Where this differs"))
    assert lines[-1] == '    "$@"' and max(map(len, lines)) <= 120
    start = next(i for i, line in enumerate(lines) if re.match(r"(python|torchrun|srun) .*\\$", line))
    for line in lines[start + 1 : -1]:
        assert re.fullmatch(r" {4,8}(--\w|\w).* \\", line) and line.count(" --") <= 1, line


@pytest.mark.parametrize(
    ("words", "task", "reward", "name"),
    [
        ((), "largest_digit", "forgiving", "hack_hole"),
        (("hole",), "largest_digit", "forgiving", "hack_hole"),
        (("length",), "largest_digit", "long_winded", "hack_length"),
        (("label",), "last", "anywhere", "hack_label"),
    ],
)
def test_hack_shows_the_hole_that_is_named(words, task, reward, name):
    """Its task, a reward that is in its file, and the flags that follow."""
    (command,) = smoke.captures(REPO / "scripts/train/debug/hack.sh", *words, "--seed", "2")
    args = utils.parse_args(grpo.Args, smoke.training_flags(command)[1])
    assert args.dataset_mixer_list == [f"data/tasks/{task}/train.jsonl", "1.0"]
    assert args.dataset_mixer_eval_list == [f"data/tasks/{task}/eval.jsonl", "1.0"]
    assert (args.remap_verifier, args.exp_name, args.seed) == (f"learned={reward}", name, 2)
    assert f"\ndef {reward}(" in (REPO / args.reward_file).read_text()


def test_the_last_value_of_a_flag_wins():
    """The smoke runs append their flags to the recipe's, lists and switches among them."""
    flags = "--seed 1 --single_gpu_mode --dataset_mixer_list a 1.0 b 2 --num_learners_per_node 8 8 --stop_strings x"
    flags += " --seed 2 --single_gpu_mode false --dataset_mixer_list c 3 --num_learners_per_node 1 --stop_strings"
    args = utils.parse_args(grpo.Args, flags.split())
    assert (args.seed, args.single_gpu_mode, args.dataset_mixer_list) == (2, False, ["c", "3"])
    assert (args.num_learners_per_node, args.stop_strings) == ([1], [])


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


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_recipe_prints_its_plan_on_a_laptop(recipe, tmp_path, monkeypatch, capsys):
    """Its shell starts one process, for all ranks; that process asks no network and names what it cannot see."""
    without_slurm(tmp_path, monkeypatch)
    command = ["bash", str(REPO / recipe), "--dry_run"]
    told = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    world_size, on_node, script, *flags = (tmp_path / "captured").read_bytes().decode().split("\0")[:-1]
    text = (REPO / recipe).read_text()
    assert told.count("first    python scripts/data/") == text.count("python scripts/data/")
    assert flags[-1] == "--dry_run"

    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.M)
    ranks = 8 * int(nodes[1]) if nodes else 8 if "nproc_per_node 8" in text else 1
    assert (int(world_size), int(on_node)) == (ranks, min(ranks, 8))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a dry run asks the network"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of the laptop
    if "torchrun" in text:
        ours = {"TORCHELASTIC_RUN_ID": "plan", "RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": on_node}
        for name, value in ours.items():
            monkeypatch.setenv(name, str(value))
    args = utils.parse_args(grpo.Args, flags)
    {"grpo.py": grpo.main, "grpo_fast.py": grpo_fast.main}[script](args)
    plan = capsys.readouterr().out
    assert "\nrun " in plan and f"\nmodel    {args.model_name_or_path}: " in plan and "\nmemory   " in plan
    if args.llm_judge_model:
        assert f"refused  --llm_judge_model {args.llm_judge_model}: needs $OPENAI_API_KEY" in plan
    rewards.configure(rewards.RewardFlags(), connect=False)


def test_recipes_of_verl_keep_its_rules(elsewhere):
    """Its rule for GSM8K, and updates on the policy's own rollouts without a correction."""
    gsm8k_args = read_flags("scripts/train/gsm8k/qwen2.5_7b_verl.sh")[2]
    assert gsm8k_args.remap_verifier == "gsm8k=gsm8k_verl" and gsm8k_args.vllm_gpu_memory_utilization == 0.6
    solver_args = read_flags("scripts/train/solver/planner_3b_300steps.sh")[2]
    assert solver_args.async_steps == 0
    assert not (gsm8k_args.use_rho_correction or solver_args.use_rho_correction)


def test_a_recipe_plans_in_a_shell_without_a_network(tmp_path):
    """As a person types it, from another directory; without --dry_run the recipe says who starts it."""
    offline = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    offline |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "http_proxy": "http://127.0.0.1:9"}
    command = ["bash", "../scripts/train/olmo2/grpo_fast_7b_zero.sh"]
    done = subprocess.run([*command, "--dry_run"], cwd=REPO / "tests", env=offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 learners + 12 engines x 1 = 16 processes" in done.stdout
    assert "refused  --dataset_mixer_list data/math_zs/train.jsonl: no such file" in done.stdout
    assert "memory   not estimated: no config.json of allenai/OLMo-2-1124-7B on this machine" in done.stdout
    done = subprocess.run(command, cwd=REPO / "tests", env=offline, capture_output=True, text=True)
    assert done.returncode == 1 and "is for 2 nodes: start it with sbatch" in done.stderr


def test_a_broken_recipe_is_refused(elsewhere):
    """One flag of each kind that made the sources fail."""
    recipe = "scripts/train/olmo3/7b_rlzero_mix.sh"
    command, script, args = read_flags(recipe)
    with pytest.raises(utils.UserError, match="40 processes, but 32 ranks run"):
        check(command, script, args, 4)
    with pytest.raises(SystemExit):  # an unknown flag
        utils.parse_args(grpo.Args, [*smoke.training_flags(command)[1], "--max_tokens", "2048"])
    with pytest.raises(utils.UserError, match="num_mini_batches 5"):
        check(command, script, replace(args, num_mini_batches=5), 5)


def test_the_solver_run_of_another_grader_is_refused(monkeypatch):
    monkeypatch.setenv("VERL_GUIDELINES_USE_MATH_VERIFY", "0")
    with pytest.raises(subprocess.CalledProcessError):
        smoke.captures(REPO / "scripts/train/solver/planner_3b_300steps.sh")
    monkeypatch.delenv("VERL_GUIDELINES_USE_MATH_VERIFY")
    args = read_flags("scripts/train/solver/planner_3b_300steps.sh")[2]
    assert args.solver_model_name_or_path == "Qwen/Qwen2.5-3B-Instruct"
    monkeypatch.setenv("VERL_GUIDELINES_SOLVER_MODEL", "me/my solver")
    assert read_flags("scripts/train/solver/planner_3b_300steps.sh")[2].solver_model_name_or_path == "me/my solver"
    run_dir = Path(args.output_dir) / args.exp_name
    assert str(run_dir) == "checkpoints/query-conditioned-guidelines/numinamath30k-3b-300steps-mathverify"


@pytest.mark.parametrize("experiment, runs, steps", [(0, 1, 24), (1, 1, 24), (2, 4, 24), (3, 4, 24)])
@pytest.mark.parametrize("mode", ["tiny", "full"])
def test_align(experiment, runs, steps, mode, elsewhere, monkeypatch):
    """The flags of our side; tests/test_align.py runs the first experiment against TRL, where that is installed."""
    names = "fixed_input_and_state fixed_state_own_rollouts independent_regularized independent_plain".split()
    monkeypatch.setenv("MODE", mode)
    monkeypatch.setenv("OUT", str(elsewhere / "out"))
    monkeypatch.setenv("TRL_PYTHON", "true")
    if mode == "full":
        monkeypatch.setenv("OURS", "torchrun --nproc_per_node 6 grpo.py")
    text = (REPO / f"scripts/align/{names[experiment]}.sh").read_text()
    assert all(part in text for part in ("\nset -euo pipefail\n", "# Hardware:", "# Expected:", ' "$@"'))
    commands = smoke.captures(REPO / f"scripts/align/{names[experiment]}.sh")
    assert len(commands) == runs
    (elsewhere / "out/start").mkdir(parents=True, exist_ok=True)  # the tiny model
    for seed, command in enumerate(commands, 1):
        script, flags = smoke.training_flags(command)
        args = replace(utils.parse_args(grpo.Args, flags), dataset_mixer_list=["rows.jsonl", "1.0"])
        found = (check(command, script, args, 1), grpo.num_training_steps(args), args.num_unique_prompts_rollout)
        found += (args.num_samples_per_prompt_rollout, args.num_mini_batches, args.response_length)
        assert found == ((6, 77, 96, 8, 1, 2048) if mode == "full" else (1, steps, 4, 8, 1, 24))
        regularization = (0.001, 0.003) if experiment in (1, 2) else (0, 0)  # the source's second and fourth
        assert (args.seed, args.shuffle, args.beta, args.entropy_coef) == (seed, False, *regularization)


@pytest.mark.parametrize("experiment", [1, 2, 3, 4])
def test_our_side_of_the_experiments_against_a_run_of_verl(experiment, elsewhere, monkeypatch):
    """1: veRL's states and batches. 2: its states, our rollouts. 3, 4: a run for each seed. TRL is not needed."""
    verl, out = elsewhere / "verl", elsewhere / "out"
    (verl / "global_step_1" / "actor").mkdir(parents=True)
    (out / "batches" / "dumps").mkdir(parents=True)
    for step in (1, 2):
        (out / "batches" / "dumps" / f"step_{step:06d}.json").touch()  # imported before
    names = {"MODE": "full", "EXPERIMENT": experiment, "OUT": out, "STEPS": 2, "VERL": verl, "BATCHES": verl}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TRL_PYTHON", raising=False)

    commands = smoke.captures(REPO / "scripts/align/of_verl.sh")

    shared = experiment in (1, 2)
    assert len(commands) == (1 if shared else 4)
    regularization = (0, 0) if experiment in (1, 3) else (0.001, 0.003)
    for seed, command in enumerate(commands, 1):
        args = utils.parse_args(grpo.Args, smoke.training_flags(command)[1])
        assert args.load_states == (str(verl) if shared else "")
        assert args.load_batches == (str(out / "batches") if experiment == 1 else "")
        assert (args.beta, args.entropy_coef) == regularization
        assert (args.seed, args.shuffle, grpo.num_training_steps(args)) == (seed, False, 2)
        check(command, "grpo.py", replace(args, dataset_mixer_list=["rows.jsonl", "1.0"]), 1)


SMOKED = {  # one of each folder -> verifiers whose rewards are seen
    "debug/grpo_integration_test": "math ifeval",  # one device, active sampling, checkpoints, dumps
    "debug/tools/olmo_3_parser_multigpu": "ifeval math",  # vLLM's parser, a sandbox, a retriever that nobody asks
    "tulu3/grpo_fast_8b_single_node": "math ifeval",  # two mini-batches
    "qwen/grpo_fast_3b_single_node": "math ifeval",  # the format
    "olmo2/grpo_fast_7b_zero": "math ifeval",  # srun and torchrun
    "olmo3/7b_rlzero_math": "math ifeval",  # active sampling, solved prompts are not drawn again
    "gsm8k/qwen2.5_7b_verl": "gsm8k_verl ifeval",  # grpo.py behind torchrun
    "solver/planner_3b_300steps": "solver",  # with a server for the solver
    "hybrid/large_test_hybrid": "code code_stdio ifeval",  # a model whose layers leak
    "tools/retool_qwen2.5_7b": "math ifeval",  # programs
    "distill/qwen3_8b_deepmath": "math ifeval",  # adapters, a teacher, no reward
}


def test_every_folder_is_smoked():
    assert {name.rpartition("/")[0] for name in SMOKED} == set(FOLDERS)


@pytest.mark.parametrize("recipe", SMOKED)
@pytest.mark.runs
def test_smoke(recipe, tmp_path, monkeypatch):
    python = programs.python_that_forks(tmp_path / "python", f"{programs.SERVERS} | */scripts/parts/worker.py")
    monkeypatch.setenv("PYTHON_OF_FORKS", str(python))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert smoke.run(REPO / f"scripts/train/{recipe}.sh", ["--output_dir", str(tmp_path)]) == 0
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
    theirs = vars(read_flags(f"scripts/train/{recipe}.sh")[2])
    for name in "learning_rate beta deepspeed_stage gradient_checkpointing chat_template_name num_mini_batches".split():
        assert ours[name] == theirs[name], name


# ---------------------------------------------------------------------------------------------------------------------
# scripts/data
# ---------------------------------------------------------------------------------------------------------------------

LONG = "A baker fills 12 trays with 9 rolls each, sells all but 14 rolls before noon, and wonders how many were sold."
GSM8K = {
    "train": [
        {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
        {"question": LONG, "answer": "12*9 = 108, 108-14 = 94\n#### 94"},
        {"question": "A house costs 1,000 times $1,200. How much is it?", "answer": "It is that.\n#### 1,200,000"},
    ],
    "test": [
        {"question": "ann has 3 pens, and buys 4: how many", "answer": "#### 7"},
        {"question": "It is Monday. " + LONG.replace("wonders", "asks"), "answer": "#### 94"},
    ],
}


SCRIPTS = {"gsm8k": gsm8k, "competition_math": competition_math, "rlvr": rlvr}


def run_data(script, *flags):
    """What a script prints, run in this process: torch's import is most of such a script's time."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        SCRIPTS[script].main()
    return out.getvalue()


def write_rows(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_rows_as_others_do(path, tmp_path):
    import datasets

    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    for split, data in GSM8K.items():
        write_rows(tmp_path / "source" / f"{split}.jsonl", data)
    return tmp_path / "source"


def test_gsm8k_rows_and_their_hash(source, tmp_path, tiny_models):
    flags = ["--source", str(source), "--prompt", "verl", "--out", str(tmp_path / "out")]
    command = [sys.executable, "scripts/data/gsm8k.py", *flags]
    said = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout
    train = read_rows(tmp_path / "out/train.jsonl")
    assert [row["ground_truth"] for row in train] == ["7", "94", "1200000"]
    text = 'Ann has 3 pens and buys 4. How many? Let\'s think step by step and output the final answer after "####".'
    assert train[0]["messages"] == train[0]["prompt"] == [{"role": "user", "content": text}]
    for name in ("train.jsonl", "test.jsonl"):
        digest = hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        assert (tmp_path / "out" / f"{name}.sha256").read_text() == f"{digest}  {name}\n"
        assert digest in said
    mixer = [str(tmp_path / "out/train.jsonl"), "1.0"]
    args = grpo.Args(model_name_or_path=str(tiny_models()), max_prompt_token_length=512, dataset_mixer_list=mixer)
    prompts = utils.load_prompts("dataset_mixer_list", args, utils.load_tokenizer(args))
    assert [(p.ground_truths, p.verifiers) for p in prompts][2] == (("1200000",), ("gsm8k",))


def test_rows_load_with_the_columns_that_open_instruct_and_trl_read(source, tmp_path):
    run_data("gsm8k", "--source", source, "--out", tmp_path / "out")
    loaded = load_rows_as_others_do(tmp_path / "out/train.jsonl", tmp_path)
    types = {name: str(loaded.features[name]) for name in ("ground_truth", "dataset")}
    assert types == dict.fromkeys(types, "Value('string')")
    assert set(loaded.column_names) == {"messages", "ground_truth", "dataset", "prompt"}
    assert loaded[0]["prompt"] == loaded[0]["messages"] == [{"role": "user", "content": GSM8K["train"][0]["question"]}]


TRL_STEP = """
import json, sys
import datasets
from trl import GRPOConfig, GRPOTrainer

data, model, out = sys.argv[1:]
seen = []

def reward(prompts, completions, ground_truth, dataset, **columns):
    seen.extend(zip([turns[-1]["content"] for turns in prompts], ground_truth, dataset))
    return [float(len(turns[0]["content"])) for turns in completions]

args = GRPOConfig(out, max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
    learning_rate=1e-3, report_to=[], use_cpu=True, bf16=False, save_strategy="no")
rows = datasets.load_dataset("json", data_files=data, split="train", cache_dir=out)
trainer = GRPOTrainer(model, reward, args=args, train_dataset=rows)
before = {name: value.clone() for name, value in trainer.model.named_parameters()}
trainer.train()
moved = max((value - before[name]).abs().max().item() for name, value in trainer.model.named_parameters())
print(json.dumps({"seen": seen, "moved": moved}))
"""


@pytest.mark.skipif(not trl_is_installed(), reason="no .venv-trl: bash scripts/peers/setup_trl.sh makes it")
@pytest.mark.runs
def test_trl_trains_on_the_rows(source, tmp_path, tiny_models):
    """One step of its GRPOTrainer, whose reward function gets each question with its own label and verifier."""
    run_data("gsm8k", "--source", source, "--out", tmp_path / "out")
    command = [REPO / ".venv-trl/bin/python", "-c", TRL_STEP, tmp_path / "out/train.jsonl", tiny_models(), tmp_path]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    rows = read_rows(tmp_path / "out/train.jsonl")
    known = [[row["prompt"][0]["content"], row["ground_truth"], "gsm8k"] for row in rows]
    assert len(result["seen"]) == 4 and all(row in known for row in result["seen"])
    assert result["moved"] > 1e-4


def test_decontamination_drops_equal_and_overlapping_questions(source, tmp_path):
    flags = ["--source", source, "--prompt", "verl", "--out", tmp_path / "out"]
    said = run_data("gsm8k", *flags, "--decontaminate", source / "test.jsonl")
    assert "1 equal, 1 share 13 words in a row; 1 of 3 rows kept" in said
    assert [row["ground_truth"] for row in read_rows(tmp_path / "out/train.jsonl")] == ["1200000"]
    said = run_data("gsm8k", *flags, "--decontaminate", source / "test.jsonl", "--ngram", "18")
    assert "1 equal, 0 share 18 words in a row; 2 of 3 rows kept" in said


@pytest.mark.parametrize("shared, found", [(12, None), (13, "n-gram"), (14, "n-gram")])
def test_thirteen_words_in_a_row_are_too_many(shared, found):
    words = [f"w{i}" for i in range(shared)]
    known = rows.Contamination([" ".join(["before", *words, "after"])])
    assert known.kind(" ".join(["other", *words, "end"])) == found
    assert known.kind(" ".join(["BEFORE,", *words, "after."])) == "exact"
    known = rows.Contamination([" ".join(["before", *words])])
    assert known.kind(" ".join(["other", *words])) == found


def test_what_all_evaluation_questions_share_is_not_contamination():
    order = "Think about it step by step and give the final answer on a line of its own."
    known = rows.Contamination([f"Question {i} about {i} apples. {order}" for i in range(20)])
    assert known.kind(f"Something else. {order}") is None
    assert rows.Contamination([f"One question. {order}"]).kind(f"Something else. {order}") == "n-gram"


def test_competition_math(tmp_path):
    data = [
        {"problem": f"Find {i}.", "solution": f"So \\boxed{{1}} no, \\boxed{{\\frac{{{i}}}{{2}}}}."} for i in range(6)
    ]
    write_rows(tmp_path / "in/train.jsonl", [*data, {"problem": "Prove it.", "solution": "Done."}])
    write_rows(tmp_path / "in/test.jsonl", data[:2])
    said = run_data("competition_math", "--dataset", tmp_path / "in", "--out", tmp_path / "out")
    assert "train: 1 rows without an answer dropped" in said
    train = read_rows(tmp_path / "out/train.jsonl")
    assert [row["ground_truth"] for row in train] == [f"\\frac{{{i}}}{{2}}" for i in range(6)]
    assert {row["dataset"] for row in train} == {"math"} and len(read_rows(tmp_path / "out/test.jsonl")) == 2

    prompt = REPO / "scripts/train/solver/planner_prompt.txt"
    flags = ["--rows", 5, "--eval_rows", 2, "--verifier", "solver", "--prompt_file", prompt]
    run_data("competition_math", "--dataset", tmp_path / "in", "--out", tmp_path / "solver", *flags)
    train, held_out = (read_rows(tmp_path / "solver" / f"{split}.jsonl") for split in ("train", "eval"))
    labels = [json.loads(row["ground_truth"]) for row in train + held_out]
    assert (len(train), len(held_out), len({label["question"] for label in labels})) == (3, 2, 5)
    for row, label in zip(train + held_out, labels, strict=True):
        assert row["messages"][0]["content"].endswith(label["question"]) and row["dataset"] == "solver"
        assert solver.solver_label(row["ground_truth"], "user: ?") == (label["question"], label["answer"])
    with pytest.raises(SystemExit, match="only 6 rows with an answer"):
        run_data("competition_math", "--dataset", tmp_path / "in", "--rows", 7, "--out", tmp_path / "x")


OLD_VALUES = {"keyword_list": ["sun"], "word": "sun", "N": 3, "quantifier": "at most", "forbidden_words": ["moon"]}
OLD_VALUES |= {"letter": "a", "language": "en", "i": 1, "first_word": "sun", "postscript_marker": "P.S."}
OLD_VALUES |= {"section_splitter": "Section", "original_prompt": "Do it.", "end_phrase": "The end."}


@pytest.mark.parametrize("function", rlvr.FUNCTIONS)
def test_older_instruction_labels_become_ifeval_s(function):
    label = rlvr.ifeval_label(json.dumps({"func_name": function, **OLD_VALUES}))
    assert rewards.check_ground_truth("ifeval", label) is None
    ((_, arguments),) = ifeval.ifeval_label(label)
    expected = ifeval.ifeval_constraints()[rlvr.FUNCTIONS[function][0]]("x").get_instruction_args_keys()
    assert set(arguments) == set(expected)


@pytest.mark.parametrize(
    "old, text, score",
    [
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most"}, "one two three", 1.0),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most"}, "one two three four", 0.0),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "at least"}, "one two", 0.0),
        ({"func_name": "verify_letter_frequency", "letter": "o", "N": 2, "quantifier": "less than"}, "oo", 0.0),
        ({"func_name": "validate_lowercase"}, "small letters of an english sentence", 1.0),
        ({"func_name": "validate_end", "end_phrase": "Bye."}, "So long. Bye.", 1.0),
        ({"func_name": "validate_paragraphs", "N": 2, "i": 2, "first_word": "two"}, "One.\n\nTwo.", 1.0),
    ],
)
def test_older_instruction_labels_mean_the_same(old, text, score):
    row = rlvr.rlvr_row(
        {"messages": [{"role": "user", "content": "?"}], "ground_truth": json.dumps(old), "dataset": "ifeval"}
    )
    (result,) = rewards.score([rewards.RewardRecord(text, row["ground_truth"], "ifeval")])
    assert result.score == score


def test_rlvr_mix(tmp_path):
    user = [{"role": "user", "content": "Write 3 words."}]
    old = {"func_name": "validate_word_constraint", "N": 3, "quantifier": "around"}
    mixed = [
        {"messages": user, "ground_truth": json.dumps(old), "dataset": "ifeval"},
        {"messages": user, "ground_truth": json.dumps(old | {"quantifier": "at least"}), "dataset": "ifeval"},
        {"messages": [*user, {"role": "assistant", "content": "no"}], "ground_truth": "3", "dataset": "MATH"},
        {"messages": user, "ground_truth": ["3", "[]"], "dataset": ["gsm8k", "code"]},
        {"messages": [], "ground_truth": "3", "dataset": "math"},
    ]
    write_rows(tmp_path / "a.jsonl", mixed)
    write_rows(tmp_path / "b.jsonl", [{"messages": user, "ground_truth": str(i), "dataset": "math"} for i in range(8)])
    pairs = ["--dataset_mixer_list", tmp_path / "a.jsonl", "1.0", tmp_path / "b.jsonl", 4]
    said = run_data("rlvr", *pairs, "--out", tmp_path / "out")
    assert "1 rows dropped: no relation of IFEval is 'around'" in said and "1 rows dropped: no prompt" in said
    train = read_rows(tmp_path / "out/train.jsonl")
    assert sorted(row["dataset"] for row in train) == sorted([*[["math"]] * 5, ["ifeval"], ["gsm8k", "code"]])
    assert all(row["messages"] == user for row in train)
    loaded = load_rows_as_others_do(tmp_path / "out/train.jsonl", tmp_path)
    assert [loaded.features[name].feature.dtype for name in ("ground_truth", "dataset")] == ["string"] * 2
    assert [row["ground_truth"] for row in loaded] == [row["ground_truth"] for row in train]
    first = (tmp_path / "out/train.jsonl").read_bytes()
    run_data("rlvr", *pairs, "--out", tmp_path / "out")
    assert (tmp_path / "out/train.jsonl").read_bytes() == first
    with pytest.raises(SystemExit, match="only 8 rows"):
        run_data("rlvr", "--dataset_mixer_list", tmp_path / "b.jsonl", 9, "--out", tmp_path / "x")


@pytest.mark.parametrize("amount, count", [(0.5, 4), (2.5, 20), (3, 3)])
def test_draw(amount, count):
    drawn = rlvr.draw(list(range(8)), amount, random.Random(0))
    assert len(drawn) == count and set(drawn) <= set(range(8))
    assert max(drawn.count(i) for i in range(8)) - min(drawn.count(i) for i in range(8)) <= 1


def test_all_of_gsm8k(tmp_path):
    source = REPO.parent / "shared/data/gsm8k"
    if not (source / "train.jsonl").exists():
        pytest.skip(f"no {source}")
    made = [gsm8k.gsm8k_row(row, "plain") for _, row in rows.read_rows(str(source), "train")]
    assert len(made) == 7473
    assert all(rewards.check_ground_truth("gsm8k", row["ground_truth"]) is None for row in made)
    for column in ("answer", "final_answer"):
        assert competition_math.math_row({"question": "?", column: "3"}, "math", "{question}")["ground_truth"] == "3"
