"""Benchmarks of whole runs in processes of their own: bench.py pipeline, startup and trl."""

import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpo
import utils
from scripts.data.make_addition import make_addition
from scripts.data.make_tiny_model import make_tiny_model
from scripts.proof.benchmarks.common import (
    ROOT,
    THREAD_SETTINGS,
    WARMUP_STEPS,
    BenchFlags,
    Result,
    in_rounds,
    ratio,
    run_or_exit,
    run_script,
    spread,
    stopwatch,
    sums_flags,
)

# --- pipeline ---------------------------------------------------------------------------------------------------------

PIPELINE_METRICS = """time/training time/generation time/weight_sync time/trainer_waiting_for_data
    val/engine_pause_seconds val/engine_idle_share val/learner_idle_share""".split()


def bench_pipeline(options: BenchFlags) -> Result:
    """Seconds per step of whole runs, against max(generation, training): a step whose halves overlap entirely.

    Where learner and engines share the cores of one CPU, either half is slower when both run, and there is little to
    win.
    """
    sides = {
        "grpo.py": lambda: run_script("grpo.py", [], options),
        "async_steps 0": lambda: run_script("grpo_fast.py", ["--async_steps", "0"], options),
        "async_steps 1": lambda: run_script("grpo_fast.py", ["--async_steps", "1"], options),
    }
    seconds = {}
    ideal = {}
    table = {}
    for name, runs in in_rounds(sides, options.repeat, warm_up=False).items():
        seconds[name] = [run["time/total"] for run in runs]
        ideal[name] = [max(run["time/generation"], run["time/training"]) for run in runs]
        table[name] = spread(seconds[name])
        table[name]["ideal"] = statistics.median(ideal[name])
        for metric in PIPELINE_METRICS:
            values = [run[metric] for run in runs if metric in run]
            if len(values) == len(runs):
                table[name][metric] = statistics.median(values)
    ours = seconds["async_steps 1"]
    ratios = {
        "async_steps 1 over grpo.py": ratio(ours, seconds["grpo.py"]),
        "async_steps 1 over async_steps 0": ratio(ours, seconds["async_steps 0"]),
        "async_steps 1 against its ideal": ratio(ours, ideal["async_steps 1"]),
        "async_steps 1 against the ideal of grpo.py": ratio(ours, ideal["grpo.py"]),
    }
    return Result({"steps": options.steps, "warmup_steps": WARMUP_STEPS}, table, ratios)


# --- trl --------------------------------------------------------------------------------------------------------------

TRL_SETTINGS = {
    "stock": "--mode stock",  # float32 master weights, as its users can run it
    "vllm": "--mode vllm",  # the same with vLLM, patched by us
    "fastest": "--mode vllm --dtype bfloat16 --torch_compile",  # bare bfloat16 weights, compiled learner
}
TRL_IN_FLOAT32 = {"fastest": "--mode vllm --torch_compile"}
OURS = {"us": "", "us, all groups": "--no_filter_zero_std_samples"}
# task: response length, and how many times faster than each of TRL's settings a step should be
TASKS = {"addition2": (64, {"stock": 5.0, "vllm": 2.5, "fastest": 2.0}), "addition": (24, {"vllm": 1.8})}
ROLLOUTS = 64


def trl_settings(dtype: str) -> dict[str, str]:
    """Flags of TRL's side by the name of a setting. In float32 it has no autocast."""
    if dtype == "bfloat16":
        return TRL_SETTINGS
    return {name: f"{flags} --autocast none" for name, flags in (TRL_SETTINGS | TRL_IN_FLOAT32).items()}


def run_trl(flags: str, task: str, options: BenchFlags) -> list[dict[str, Any]]:
    """TRL's side in its own environment, with its own preloads: its steps after the first WARMUP_STEPS."""
    length, _ = TASKS[task]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trl.json"
        line = f"source scripts/peers/setup_trl.sh && exec python scripts/peers/trl_side.py {flags} --json {path}"
        line += f" --data data/{task}/train.jsonl --max_new_tokens {length} --steps {WARMUP_STEPS + options.steps}"
        line += f" --model {shlex.quote(options.model)}"
        env = {name: value for name, value in os.environ.items() if name not in THREAD_SETTINGS}
        run_or_exit(["bash", "-c", line], env=env)
        return json.loads(path.read_text())["steps"][WARMUP_STEPS:]


def column_of_ours(metrics: dict[str, float]) -> dict[str, float]:
    """The column of our run in the table of bench_trl."""
    column = {name: metrics[f"time/{name}"] for name in ("generation", "training")}
    column["rollouts trained on"] = metrics["other/real_batch_size_ratio"]
    column["response tokens"] = metrics["val/sequence_lengths"] * ROLLOUTS
    return {"seconds": metrics["time/total"]} | column


def column_of_trl(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The same of a run of TRL, and the CPUs that other processes kept busy."""
    names = {"seconds": "total_s", "generation": "generation_s", "training": "learner_s"}
    names |= {"response tokens": "completion_tokens", "other CPUs": "other_cpus"}
    column = {name: statistics.mean(step[key] for step in steps) for name, key in names.items()}
    return column | {"rollouts trained on": 1.0}


def bench_trl(options: BenchFlags) -> Result:
    """Seconds per step: grpo_fast.py and TRL, 8 prompts x 8 samples, the same model, data and settings.

    Both without a reference policy, both for the steps after the first two, in means. One round: --repeat is not read.
    Two-operand addition leaves most groups without a gradient. We skip them and TRL trains on them; "us, all groups"
    trains on them too. With single digits nearly all groups have a gradient. Raises UserError for --sides that are no
    settings of TRL.
    """
    unknown = set(options.sides) - set(TRL_SETTINGS)
    if unknown:
        raise utils.UserError(f"--sides {' '.join(sorted(unknown))}: trl has {', '.join(TRL_SETTINGS)}")
    table: dict[str, dict[str, float]] = {}
    ratios: dict[str, Any] = {}
    settings = trl_settings(options.dtype)
    for task, (length, targets) in TASKS.items():
        data = make_addition(ROOT / "data" / task, digits=2 if task == "addition2" else 1)
        flags = f"--async_steps 0 --no_load_ref_policy --response_length {length} --dataset_mixer_list".split()
        flags += [str(data / "train.jsonl"), "1.0"]
        for name, more in OURS.items():
            table[f"{task}: {name}"] = column_of_ours(run_script("grpo_fast.py", [*flags, *more.split()], options))
        for setting, target in targets.items():
            if options.sides and setting not in options.sides:
                continue
            column = column_of_trl(run_trl(settings[setting], task, options))
            table[f"{task}: TRL {setting}"] = column
            for name in OURS:
                goal = target if name == "us" else None
                seconds = table[f"{task}: {name}"]["seconds"]
                ratios[f"{task}: {name} over TRL {setting}"] = ratio([seconds], [column["seconds"]], goal)
    for column in table.values():
        column["ms a response token"] = 1e3 * column["seconds"] / column["response tokens"]
    used = {"steps": options.steps, "warmup_steps": WARMUP_STEPS}
    return Result(used | {f"TRL {name}": flags for name, flags in settings.items()}, table, ratios)


# --- startup ----------------------------------------------------------------------------------------------------------

# What a side is divided by, and how many times as long it may take
STARTUP_RATIOS = (
    ("--help", "import torch, tyro", 1.5),
    ("--dry_run", "import torch, tyro", 2),
    ("--dry_run", "import llama", None),
    ("tiny model", "import torch, tyro, without exit", 3),  # of a run neither its exit nor another's is counted
    ("sums", "from vllm import LLM, without exit", 2),
    ("sums", "LLM(), without exit", None),
)
WITHOUT_EXIT = "; import os; os._exit(0)"


def environment_with_bytecode() -> dict[str, str]:
    """The environment of a start whose bytecode is kept from the start before, as is usual."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def start_python(root: Path | str, *arguments: str) -> float:
    """Seconds of `python ARGUMENTS` in the checkout `root`."""
    command = [sys.executable, *arguments]
    options = {"cwd": root, "env": environment_with_bytecode(), "stdout": subprocess.DEVNULL}
    seconds, _ = stopwatch(lambda: subprocess.run(command, check=True, stderr=subprocess.DEVNULL, **options))
    return seconds


def start_run(root: Path | str, *arguments: str) -> float:
    """Seconds from the start of a run of one step to its line in metrics.jsonl."""
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "run" / "metrics.jsonl"
        log = Path(directory) / "log"
        flags = "--exp_name run --total_episodes 64 --local_eval_every -1 --save_freq -1".split()
        command = [sys.executable, *arguments, "--output_dir", directory, *flags]
        env = environment_with_bytecode()
        start = time.perf_counter()
        with log.open("w") as out, subprocess.Popen(command, cwd=root, env=env, stdout=out, stderr=out) as process:
            while not metrics.exists() or '"training_step": 1,' not in metrics.read_text():
                if process.poll() is not None:
                    raise SystemExit(f"bench.py: {shlex.join(command)}\n{log.read_text()[-3000:]}")
                time.sleep(0.01)
            return time.perf_counter() - start  # the end of the run is waited for, and not counted


def bare_vllm(sums: Sequence[str]) -> str:
    """A Python program that makes vLLM's engine as a run on sums has it."""
    args = utils.parse_args(grpo.Args, list(sums))
    tokens = args.max_prompt_token_length + args.response_length
    options = f"model={args.model_name_or_path!r}, dtype={args.model_dtype!r}, seed={args.seed}, max_num_seqs=64"
    options += f", max_model_len={tokens}, enforce_eager={args.vllm_enforce_eager}"
    options += f", gpu_memory_utilization={args.vllm_gpu_memory_utilization}"
    return f"from vllm import LLM; LLM({options})"


def startup_ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """STARTUP_RATIOS of the measured sides, and this checkout against the other."""
    ratios = {}
    for name, reference, times in STARTUP_RATIOS:
        other = f"{name}, against"
        for side in (name, other):
            if side in seconds and reference in seconds:
                target = 1 / times if times and side == name else None
                ratios[f"{reference} over {side}"] = ratio(seconds[side], seconds[reference], target)
        if name in seconds and other in seconds:
            ratios[f"{name} against the other"] = ratio(seconds[name], seconds[other])
    return ratios


Starts = dict[str, Callable[[Path | str], float]]  # of a checkout


def reference_starts(sums: Sequence[str]) -> Starts:
    """What any program like ours has to wait for."""
    llama = "import torch, tyro; from transformers.models.llama.modeling_llama import LlamaForCausalLM"
    return {
        "import torch, tyro": lambda root: start_python(root, "-c", "import torch, tyro"),
        "import llama": lambda root: start_python(root, "-c", llama),
        "import torch, tyro, without exit": lambda root: start_python(root, "-c", "import torch, tyro" + WITHOUT_EXIT),
        "from vllm import LLM, without exit": lambda root: start_python(
            root, "-c", "from vllm import LLM" + WITHOUT_EXIT
        ),
        "LLM(), without exit": lambda root: start_python(root, "-c", bare_vllm(sums) + WITHOUT_EXIT),
    }


def our_starts(sums: Sequence[str], tiny: Path) -> Starts:
    tiny_run = f"--model_name_or_path {tiny} --overwrite --rollout_backend transformers --beta 0 --response_length 24"
    data = ["--dataset_mixer_list", str(ROOT / "data" / "addition" / "train.jsonl"), "1.0"]
    return {
        "import grpo": lambda root: start_python(root, "-c", "import grpo"),
        "--help": lambda root: start_python(root, "grpo.py", "--help"),
        "--dry_run": lambda root: start_python(root, "grpo.py", *sums, "--dry_run"),
        "tiny model": lambda root: start_run(root, "grpo.py", *tiny_run.split(), *data),
        "sums": lambda root: start_run(root, "grpo_fast.py", *sums),
    }


def bench_startup(options: BenchFlags) -> Result:
    """Seconds until a command says or does its first thing, each in a process of its own; the first round, which fills
    the caches, does not count. With --against, the same of another checkout in the same rounds.

    LLM()          vLLM's engine as a run on sums has it, bare: what no run with vLLM can be faster than
    import llama   torch, tyro and a model's code from transformers, bare: the same of --dry_run with a memory estimate
    tiny model     a random model of two layers, --rollout_backend transformers, to the end of the first step
    sums           grpo_fast.py on sums, with the evaluation before training, to the end of the first step
    """
    with tempfile.TemporaryDirectory() as directory:
        tiny = make_tiny_model(Path(directory) / "tiny")
        sums = sums_flags(options)
        references = reference_starts(sums)
        ours = our_starts(sums, tiny)
        sides = {name: functools.partial(start, ROOT) for name, start in (references | ours).items()}
        if options.against:
            sides |= {f"{name}, against": functools.partial(start, options.against) for name, start in ours.items()}
        if options.sides:
            sides = {name: start for name, start in sides.items() if any(part in name for part in options.sides)}
        seconds = in_rounds(sides, options.repeat)
    table = {name: spread(values) for name, values in seconds.items()}
    return Result({}, table, startup_ratios(seconds))
