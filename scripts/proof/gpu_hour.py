"""Checks, on a real GPU, of what was only compiled or simulated, and a page of their results and figures.

    bash scripts/proof/gpu_hour.sh [--out DIR] [--tiny] [--short] [--only NAME ...] [--model DIR]

The checks run one after the other. One that passed is not made again; one that failed is. DIR gets README.md (the
page), a result and a log for each check, and the runs. Each check is a program in processes of its own, which end when
this one is stopped. The models have random weights in the shapes of public ones (proof/memory.py) and as many layers as
fit; what does not fit is skipped. Responses have full length. Rewards are a coin's, and the learning rate is large: the
weights move at every step, so an engine that does not get them is found out (proof/broken.py shows it). Nothing is
learned but by --model. tests/test_hour_stubs.py has, for each check, a program that must fail it.
"""

import argparse
import bisect
import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import torch  # noqa: E402

import grpo  # noqa: E402
from scripts.data.make_tiny_model import make_tokenizer  # noqa: E402
from scripts.parts import machine  # noqa: E402
from scripts.parts.head import HeadLogprobs  # noqa: E402
from scripts.parts.plan import ESTIMATED_BY  # noqa: E402
from scripts.proof import memory, roofline  # noqa: E402

GPUS = torch.cuda.device_count()
DEVICE = "cuda" if GPUS else "cpu"
STEPS = 6  # of a short run
TIMED = ("sleep", "mfu_large", "compiled_large")  # runs whose figures are held against the paper: long responses
CHECK_S = 1200.0  # a check that takes longer has failed
GAP = 0.05  # mean |learner - engine| logprob that a healthy run stays below
CONTEXTS = 4 * memory.GIB  # of CUDA, its graphs and workspaces, believed
FEWEST_LAYERS = 4  # with fewer the head takes most of an update
HOST_MS = 96.0  # of a pack of 8,192 tokens at 0.5B on an H100, on paper: a host that takes longer leaves the GPU idle
TINY = (64, 128, 2, 1, 1, True)  # as memory.SHAPES: hidden, MLP, layers, heads, key-value heads, tied head
SHOWN = """learner_mfu time/total time/generation time/training time/weight_sync time/weight_sync_wire
    time/weight_sync_load time/weight_sync_pause val/weight_sync_gb_per_second val/learner_idle_share
    val/sequence_lengths val/engine_idle_share val/engine_tokens_per_second debug/vllm_vs_local_logprob_diff_mean
    debug/vllm_vs_local_logprob_diff_max memory/gpu_allocated_gib""".split()
NVIDIA_SMI = {  # name of the log -> arguments; the logs are on the page
    "topology": "topo -m",
    "clocks": "--query-gpu=name,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,power.max_limit,"
    "temperature.gpu,pcie.link.gen.current,pcie.link.width.current,ecc.mode.current --format=csv",
}
COIN = """import zlib


def coin(response, ground_truth):
    return float(zlib.crc32(response.encode()) % 2)
"""


@dataclass
class Hour:
    """The session: where results go, and what was asked for."""

    out: Path
    tiny: bool
    real_model: Path | None = None  # of --model
    short: bool = False
    child: Any = None  # the process of the check under way

    def run(self, name: str, command: list[str]) -> tuple[int, str]:
        """Exit status and output of a command, also in DIR/NAME.log."""
        log = self.out / f"{name}.log"
        with log.open("w") as file:
            print("+", *command, file=file, flush=True)
            self.child = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = self.child.wait(CHECK_S)
            except subprocess.TimeoutExpired:
                status = 124
            finally:
                self.stop()
        return status, log.read_text(errors="replace")

    def stop(self) -> None:
        """End the processes of the check under way."""
        if self.child is not None and self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGTERM)  # a run ends its step
            try:
                self.child.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()
        self.child = None

    def result(self, name: str) -> dict[str, Any] | None:
        """What a check came to, if it was made on this kind of GPU."""
        file = self.out / f"{name}.json"
        found = json.loads(file.read_text()) if file.exists() else {"device": None}
        return found if found.get("device") == device_name() else None


@dataclass
class Found:
    """What a check came to."""

    passed: bool | None  # None: there was nothing to check here
    said: str
    figures: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------------
# Models and runs
# ---------------------------------------------------------------------------------------------------------------------


def model(hour: Hour, shape: str, layers: int) -> Path:
    """A model of random weights, made once; its tokenizer knows 512 of its tokens. With --tiny it is a tiny one."""
    if hour.tiny:
        layers = TINY[2]
    out = hour.out / "models" / f"{shape}_{layers}_layers"
    if (out / "config.json").exists():
        return out
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = make_tokenizer(512)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = memory.qwen(*(TINY if hour.tiny else memory.SHAPES[shape]))
    vocabulary = 2048 if hour.tiny else config.vocab_size
    config.update(ids | {"num_hidden_layers": layers, "vocab_size": vocabulary, "layer_types": None})
    config = type(config).from_dict(config.to_dict())
    torch.manual_seed(0)
    with torch.device(DEVICE):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.generation_config = GenerationConfig(**ids)
    unfinished = out.with_name(f"{out.name}.part")
    made.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    del made
    torch.cuda.empty_cache()
    unfinished.rename(out)
    return out


def rows(hour: Hour) -> Path:
    """Prompts of the length of GSM8K's."""
    path = hour.out / "rows.jsonl"
    text = "how many apples are left if " * (2 if hour.tiny else 14)
    with path.open("w") as file:
        for i in range(64):
            messages = [{"role": "user", "content": f"{text}{i}?"}]
            print(json.dumps({"messages": messages, "ground_truth": "", "dataset": "coin"}), file=file)
    return path


def sizes_of(hour: Hour, name: str) -> tuple[int, int, int, int, int]:
    """Prompts, samples of each, and the most tokens of a prompt, a response and a pack."""
    if hour.tiny:
        return 4, 4, 96, 16, 128
    if not hour.short:
        return 32, 8, 256, 512, 8192
    return 16, 8, 256, 512 if name in TIMED else 128, 8192


def flags_of(hour: Hour, name: str, path: Path) -> list[str]:
    """Flags of a short run of grpo.py or grpo_fast.py. The gap ends it, after every step."""
    reward_file = hour.out / "coin.py"
    reward_file.write_text(COIN)
    prompts, samples, prompt, response, pack = sizes_of(hour, name)
    text = f"""--model_name_or_path {path} --dataset_mixer_list {rows(hour)} 1.0 --output_dir {hour.out / "runs"}
        --exp_name {name} --overwrite --num_unique_prompts_rollout {prompts} --num_samples_per_prompt_rollout {samples}
        --max_prompt_token_length {prompt} --response_length {response} --pack_length {pack} --temperature 1.0
        --learning_rate 1e-3 --lr_scheduler_type constant --reward_file {reward_file} --max_logprob_gap {GAP}
        --beta 0 --no_load_ref_policy --no_filter_zero_std_samples --gradient_checkpointing
        --total_episodes {prompts * samples * STEPS} --save_freq -1 --local_eval_every 1 --num_mini_batches 1"""
    if hour.tiny:
        text += " --rollout_backend transformers"
    return text.split()


def learner_bytes(setup: memory.Setup, config: Any) -> float:
    """scripts/proof/memory.py's estimate of a learner's most bytes."""
    return memory.learner_bytes(memory.memory_estimate(setup, config))


def gpu_bytes() -> float:
    """Memory of a GPU, 80 GiB where there is none."""
    return memory.gpu_bytes() or 80 * memory.GIB


@functools.cache
def parts_of(shape: str, layers: int) -> dict[str, float]:
    """memory.py's estimate for a learner and an engine of that many layers of a shape."""
    setup = memory.Setup(gradient_checkpointing=True, load_ref_policy=False, pack_length=8192)
    config = memory.qwen(*memory.SHAPES[shape])
    config.update({"num_hidden_layers": layers, "layer_types": None})
    return memory.memory_estimate(setup, type(config).from_dict(config.to_dict()))


def bytes_needed(shape: str, layers: int, engine_share: float, asleep: bool) -> float:
    """Bytes on one GPU of a learner with an engine, which is asleep while the learner works or is not."""
    parts = parts_of(shape, layers)
    learner = memory.learner_bytes(parts)
    engine = max(engine_share * gpu_bytes(), parts["engine_weights"])
    if asleep:
        return max(learner, parts["weights"] + parts["Adam"] + engine) + CONTEXTS
    return learner + engine + CONTEXTS


def without_room(hour: Hour, engine_share: float, asleep: bool = False, gpus: int = 1) -> Found | None:
    """That a run of Qwen2.5-0.5B's shape does not fit on this many GPUs; None where it does."""
    if hour.tiny:
        return None
    share = 0.0 if gpus > 1 else engine_share
    needed = bytes_needed("Qwen2.5-0.5B", 24, share, asleep)
    if needed <= gpu_bytes():
        return None
    return Found(None, f"needs {needed / memory.GIB:.0f} GiB, the GPU has {gpu_bytes() / memory.GIB:.0f}")


@dataclass(frozen=True)
class Large:
    """The model whose update is timed."""

    shape: str
    layers: int


def largest_model(hour: Hour) -> Large | None:
    """The largest of three shapes of which at least FEWEST_LAYERS layers fit beside a sleeping engine, with as many as
    fit; None if there is none."""
    if hour.tiny:
        return Large("Qwen2.5-7B", TINY[2])
    for shape in ("Qwen2.5-7B", "Qwen2.5-3B", "Qwen2.5-1.5B"):
        layers = layers_that_fit(shape)
        if layers:
            return Large(shape, layers)
    return None


def layers_that_fit(shape: str) -> int:
    """How many layers of a shape fit beside a sleeping engine; 0 for fewer than FEWEST_LAYERS."""

    def too_large(layers: int) -> bool:
        return bytes_needed(shape, layers, 0.35, asleep=True) > gpu_bytes()

    candidates = range(FEWEST_LAYERS, memory.SHAPES[shape][2] + 1)
    first_too_large = bisect.bisect_left(candidates, True, key=too_large)
    return candidates[first_too_large - 1] if first_too_large else 0


def training(hour: Hour, name: str, script: str, path: Path, *flags: str) -> list[str]:
    """The command of a short run."""
    return [sys.executable, script, *flags_of(hour, name, path), *flags]


def torchrun(ranks: int, command: list[str]) -> list[str]:
    """The same command on several ranks of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [command[0], *launcher, *command[1:]]


def lines_of(hour: Hour, name: str) -> list[str]:
    """The lines of a run's metrics."""
    file = hour.out / "runs" / name / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def steps_of(hour: Hour, name: str) -> list[dict[str, Any]]:
    """The metrics of a run's steps."""
    return [step for step in map(json.loads, lines_of(hour, name)) if step["training_step"] > 0]


def train(hour: Hour, name: str, command: list[str], off_policy: bool = False) -> Found:
    """A short run: it ends well, every gradient is finite and not zero, learner and engine agree, no rollout is too
    old. With off_policy the run itself compares fresh samples, and the gap of rollouts is not looked at."""
    status, output = hour.run(name, command)
    steps = steps_of(hour, name)
    if status or len(steps) < STEPS:
        return Found(False, f"exit status {status} after {len(steps)} of {STEPS} steps: {last_line(output)}")

    late = steps[2:]  # the first have compilation in them
    figures = {}
    for key in SHOWN:
        if all(key in step for step in late):
            figures[key] = mean(step[key] for step in late)
    ready = re.search(r"ready after (\S+) s", output)
    if ready:
        figures["ready after, s"] = float(ready[1])
    gap = 0.0 if off_policy else most(steps, "debug/vllm_vs_local_logprob_diff_mean")
    faults = faults_of(steps, gap)
    said = f"{STEPS} steps" if off_policy else f"{STEPS} steps, gap at most {gap:.2g}"
    return Found(not faults, "; ".join(faults) or said, figures)


def last_line(output: str) -> str:
    """The last line of a program's output that says something, shortened."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return "".join((errors or lines)[-1:])[:300]


def most(steps: list[dict[str, Any]], name: str) -> float:
    """The largest value of a metric, 0 if no step has it, not a number if one is not."""
    values = [step.get(name, 0.0) for step in steps]
    return math.nan if any(map(math.isnan, values)) else max(values)


def faults_of(steps: list[dict[str, Any]], gap: float) -> list[str]:
    """What is wrong in a run's metrics, in words."""
    faults = []
    norms = [step.get("optim/grad_norm") or 0.0 for step in steps]
    if any(step.get("optim/nonfinite_updates") for step in steps) or not all(map(math.isfinite, norms)):
        faults.append("a gradient was not finite")
    if 0.0 in norms:
        faults.append("a gradient was zero: the weights did not move, so the gap says nothing")
    if not gap <= GAP:
        faults.append(f"the logprob gap is {gap:.3f}, more than {GAP}")
    if most(steps, "val/num_steps_off_policy") > 1:
        faults.append("a rollout is older than async_steps")
    return faults


def roles() -> list[str]:
    """Flags for one learner and one engine, on GPUs of their own where there are two."""
    if GPUS >= 2:
        return []
    return ["--single_gpu_mode", "--vllm_gpu_memory_utilization", "0.35"]


def train_fast(hour: Hour, name: str, *flags: str) -> Found:
    """A short run of grpo_fast.py with a learner and an engine, at Qwen2.5-0.5B's shape."""
    no_room = without_room(hour, 0.35, gpus=GPUS)
    if no_room:
        return no_room
    path = model(hour, "Qwen2.5-0.5B", 24)
    command = training(hour, name, "grpo_fast.py", path, "--async_steps", "1", *roles(), *flags)
    return train(hour, name, command, off_policy=True)


def gpus_wanted(number: int) -> Found | None:
    """That there are fewer GPUs than that; None where there are enough."""
    if number <= GPUS:
        return None
    return Found(None, f"needs {number} GPUs, there are {GPUS}")


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def check_machine(hour: Hour) -> Found:
    """doctor.py finds nothing that does not work, nvidia-smi answers, a GPU reaches half of its data sheet."""
    command = [sys.executable, "scripts/doctor.py"]
    if hour.tiny:
        command += ["pins", "requirements-cpu.txt"]
    status, output = hour.run("machine", command)
    failed = [line for line in output.splitlines() if "FAIL" in line]
    if status and not failed:
        failed = [f"doctor.py: exit status {status}"]
    if GPUS:
        for name, words in NVIDIA_SMI.items():
            status, _ = hour.run(name, ["nvidia-smi", *words.split()])
            if status:
                failed.append(f"nvidia-smi {words}: exit status {status}")
    speed = machine.device_speed(torch.device(DEVICE), torch.bfloat16 if GPUS else torch.float32)
    teraflops = speed["flops_per_second"] / 1e12
    sheet = data_sheet()
    if sheet is not None and teraflops < 0.5 * sheet.flops / 1e12:
        failed.append(
            f"a matrix product reaches {teraflops:.0f} TFLOP/s of {sheet.flops / 1e12:.0f}: see clocks, power"
        )
    figures = {"product, TFLOP/s": teraflops, "copy, GB/s": speed["bytes_per_second"] / 1e9}
    return Found(not failed, "; ".join(failed)[:300] or "nothing wrong", figures)


def check_kernels(hour: Hour) -> Found:
    """Packs of shared prompts give the logprobs and gradients of one response a row, at each head size and dtype, and
    with a sliding window."""
    return compare(hour, "kernels")


def check_head(hour: Hour) -> Found:
    """The compiled head gives the plain one's logprobs, entropies and gradients, and how much faster it is."""
    return compare(hour, "head")


def compare(hour: Hour, name: str) -> Found:
    """A comparison of COMPARISONS in a process of its own, which prints a line for each case."""
    command = [sys.executable, "scripts/proof/gpu_hour.py", "--compare", name, "--out", str(hour.out)]
    status, output = hour.run(name, command)
    lines = [line for line in output.splitlines() if line.startswith(("head ", "host "))]
    wrong = "; ".join(line for line in lines if not line.endswith("ok"))
    if status or not lines or wrong:
        return Found(False, wrong[:300] or output.strip()[-300:])
    figures = dict(line.split(": ", 1) for line in lines)
    return Found(True, f"{len(lines)} cases", figures)


def check_cold_start(hour: Hour) -> Found:
    """grpo_fast.py, engine compiled, weights in flight, on a cache that is empty for this model."""
    return train_fast(hour, "cold_start", "--inflight_updates")


def check_warm_start(hour: Hour) -> Found:
    """The same again: the compile cache is warm now, which is where engines of other devices once crashed."""
    return train_fast(hour, "warm_start", "--inflight_updates")


def check_drain(hour: Hour) -> Found:
    """grpo_fast.py without --inflight_updates, on two GPUs: engines finish first, weights wait in the host's memory."""
    return gpus_wanted(2) or train_fast(hour, "drain")


def check_tensor_parallel(hour: Hour) -> Found:
    """grpo_fast.py with an engine over two GPUs."""
    return gpus_wanted(3) or train_fast(hour, "tensor_parallel", "--vllm_tensor_parallel_size", "2")


def check_synchronous(hour: Hour) -> Found:
    """grpo.py: learner and engine on one GPU by turns."""
    return train_alone(hour, "synchronous", "--vllm_sleep", "off", "--vllm_gpu_memory_utilization", "0.35")


def check_sleep(hour: Hour) -> Found:
    """grpo.py with an engine that gives its cache back while the learner works: 0.8 of the GPU."""
    if not GPUS:
        return Found(None, "no GPU")
    return train_alone(hour, "sleep", "--vllm_sleep", "on", "--vllm_gpu_memory_utilization", "0.8", asleep=True)


def train_alone(hour: Hour, name: str, *flags: str, asleep: bool = False) -> Found:
    """A short run of grpo.py at Qwen2.5-0.5B's shape."""
    no_room = without_room(hour, float(flags[-1]), asleep)
    if no_room:
        return no_room
    path = model(hour, "Qwen2.5-0.5B", 24)
    return train(hour, name, training(hour, name, "grpo.py", path, *flags))


def check_sharded(hour: Hour) -> Found:
    """torchrun grpo.py, --deepspeed_stage 3 over all GPUs, as many as divide the prompts."""
    too_few = gpus_wanted(2) or without_room(hour, 0.5, asleep=True)
    if too_few:
        return too_few
    ranks = 2 ** int(math.log2(min(GPUS, 4 if hour.tiny else 32)))
    flags = ["--deepspeed_stage", "3", "--vllm_gpu_memory_utilization", "0.5"]
    path = model(hour, "Qwen2.5-0.5B", 24)
    found = train(hour, "sharded", torchrun(ranks, training(hour, "sharded", "grpo.py", path, *flags)))
    found.figures["ranks"] = ranks
    return found


def check_stale(hour: Hour) -> Found:
    """grpo.py with an engine that keeps its first weights must be ended by the gap: else no check of weights counts."""
    no_room = without_room(hour, 0.35)
    if no_room:
        return no_room
    path = model(hour, "Qwen2.5-0.5B", 24)
    flags = ["--vllm_sleep", "off", "--vllm_gpu_memory_utilization", "0.35"]
    command = training(hour, "stale", "grpo.py", path, *flags)
    return noticed(hour, "stale", [command[0], "scripts/proof/broken.py", "stale", *command[1:]])


def check_stale_fast(hour: Hour) -> Found:
    """The same with grpo_fast.py, whose weights travel between processes."""
    if not GPUS:
        return Found(None, "no GPU")
    no_room = without_room(hour, 0.35, gpus=GPUS)
    if no_room:
        return no_room
    path = model(hour, "Qwen2.5-0.5B", 24)
    command = training(hour, "stale_fast", "grpo_fast.py", path, "--async_steps", "1", *roles())
    return noticed(hour, "stale_fast", torchrun(2, [command[0], "scripts/proof/broken.py", "stale", *command[1:]]))


def noticed(hour: Hour, name: str, command: list[str]) -> Found:
    """A run with a stale engine: it must end with GapError, and not before a step is done."""
    status, output = hour.run(name, command)
    steps = len(steps_of(hour, name))
    errors = [line for line in output.splitlines() if "GapError" in line]
    if not status:
        return Found(False, f"{steps} steps with a stale engine, and nothing was noticed")
    if not errors or not steps:
        return Found(False, f"ended for another reason after {steps} steps: {last_line(output)}")
    gap = re.search(r"logprob (\S+) \(max", errors[-1])
    figures = {"gap of the stale engine": float(gap[1])} if gap else {}
    return Found(True, f"noticed after {steps} steps", figures)


def check_resume(hour: Hour) -> Found:
    """grpo.py, on two GPUs if there are two, killed and resumed: steps before stay, the others follow."""
    no_room = without_room(hour, 0.35)
    if no_room:
        return no_room
    path = model(hour, "Qwen2.5-0.5B", 24)
    flags = ["--vllm_sleep", "off", "--vllm_gpu_memory_utilization", "0.35", "--checkpoint_state_freq", "1"]
    if GPUS >= 2:
        flags += ["--deepspeed_stage", "3"]
    command = training(hour, "resume", "grpo.py", path, *flags)
    killed = [command[0], "scripts/proof/broken.py", "killed", *command[1:]]
    resumed = [word for word in command if word != "--overwrite"] + ["--resume"]
    if GPUS >= 2:
        killed = torchrun(2, killed)
        resumed = torchrun(2, resumed)

    status, output = hour.run("resume_killed", killed)
    before = lines_of(hour, "resume")
    if not status or not before or len(before) >= STEPS:
        return Found(False, f"was to be killed; exit status {status} after {len(before)} steps: {last_line(output)}")
    found = train(hour, "resume", resumed)
    after = lines_of(hour, "resume")
    numbers = [json.loads(line)["training_step"] for line in after]
    kept = [line for line in before if line in after]
    if found.passed and (numbers != list(range(1, STEPS + 1)) or len(kept) < len(before) - 1):
        found.passed = False
        found.said = f"killed after step {len(before)}, {len(kept)} steps of it kept; the steps are now {numbers}"
    return found


def check_synchronous_fast(hour: Hour) -> Found:
    """grpo_fast.py --async_steps 0 in float32 makes the first step of grpo.py: scores, tokens, gradient."""
    no_room = without_room(hour, 0.35)
    if no_room:
        return no_room
    path = model(hour, "Qwen2.5-0.5B", 24)
    flags = ["--model_dtype", "float32", "--pack_length", "2048"]
    alone = ["--vllm_sleep", "off", "--vllm_gpu_memory_utilization", "0.35"]
    found = train(hour, "float32", training(hour, "float32", "grpo.py", path, *flags, *alone))
    if not found.passed:
        return found
    name = "float32_fast"
    found = train(hour, name, training(hour, name, "grpo_fast.py", path, *flags, "--async_steps", "0", *roles()))
    expected = steps_of(hour, "float32")[0]
    made = steps_of(hour, name)[:1]
    for key in ("objective/scores", "val/num_learner_tokens", "optim/grad_norm"):
        if not found.passed:
            break
        a = expected[key]
        b = made[0][key]
        found.figures[key] = f"{a:.6g}, {b:.6g}"
        if abs(a - b) > 0.02 * abs(a):
            found.passed = False
            found.said = f"{key} of step 1: {a:.6g} in grpo.py, {b:.6g} in grpo_fast.py"
    return found


def check_real_model(hour: Hour) -> Found:
    """A model that can speak (--model, else models/SmolLM2-135M-Instruct) learns sums: its score rises."""
    path = hour.real_model or ROOT / "models" / "SmolLM2-135M-Instruct"
    sums = ROOT / "data" / "addition" / "train.jsonl"
    if hour.tiny or not (path / "config.json").exists() or not sums.exists():
        return Found(None, "no model: scripts/data/get_smollm2.py and make_addition.py make it, or --model DIR")
    text = f"""grpo.py --model_name_or_path {path} --dataset_mixer_list {sums} 1.0 --output_dir {hour.out / "runs"}
        --exp_name real_model --overwrite --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8
        --response_length 24 --temperature 1.0 --learning_rate 1e-5 --lr_scheduler_type constant --beta 0
        --total_episodes 1280 --save_freq -1 --local_eval_every -1 --vllm_gpu_memory_utilization 0.35"""
    status, output = hour.run("real_model", [sys.executable, *text.split()])
    scores = [step["objective/scores"] for step in steps_of(hour, "real_model")]
    if status or len(scores) < 20:
        return Found(False, f"exit status {status} after {len(scores)} of 20 steps: {last_line(output)}")
    first = mean(scores[:5])
    last = mean(scores[-5:])
    figures = {"score, steps 1 to 5": first, "score, steps 16 to 20": last}
    # 320 samples of a share between 0 and 1, times 10: the standard error of a difference is at most 0.4
    risen = last > first + 0.8 or min(first, last) > 9.5
    said = "the score has risen" if risen else f"the score was {first:.2f} and is {last:.2f}"
    return Found(risen, said, figures)


def check_host(hour: Hour) -> Found:
    """Python's milliseconds for a micro-batch of Qwen2.5-0.5B: less than a GPU's for a pack of 8,192 tokens."""
    model(hour, "Qwen2.5-0.5B", 24)
    return compare(hour, "host")


def check_load(hour: Hour) -> Found:
    """load_weights alone, beside a memory copy and vLLM's own reload; at most twice three copies and the reload."""
    no_room = without_room(hour, 0.35)
    if no_room or not GPUS:
        return no_room or Found(None, "no GPU")
    path = str(model(hour, "Qwen2.5-0.5B", 24))
    flags = ["--json", "--model", path, "--vllm_gpu_memory_utilization", "0.35", "--vllm_sleep", "off"]
    status, output = hour.run("load", [sys.executable, "scripts/proof/bench.py", "sync", *flags])
    found = [line for line in output.splitlines() if line.startswith("{")]
    if status or not found:
        return Found(False, f"exit status {status}: {last_line(output)}")
    result = json.loads(found[-1])
    figures = {}
    for side, columns in result["sides"].items():
        for column, value in columns.items():
            figures[f"{side}: {column}"] = value
    (speed,) = result["ratios"].values()
    share = speed["value"]
    return Found(share > 0.5, f"{share:.2f} of the speed of three copies and vLLM's reload", figures)


def check_mfu_large(hour: Hour) -> Found:
    """An update at Qwen2.5-7B's shape, as many layers as fit, else a smaller one: MFU at least roofline.py's slow."""
    large = largest_model(hour)
    if large is None:
        return Found(None, f"no {FEWEST_LAYERS} layers of a large shape fit")
    return against_paper(time_large(hour, "mfu_large", large), large)


def time_large(hour: Hour, name: str, large: Large, *flags: str) -> Found:
    """A run of grpo.py whose engine sleeps while the learner, which is timed, has the GPU."""
    path = model(hour, large.shape, large.layers)
    engine = ["--vllm_sleep", "on", "--vllm_gpu_memory_utilization", "0.35"] if GPUS else []
    found = train(hour, name, training(hour, name, "grpo.py", path, *engine, *flags))
    found.figures |= {"model": large.shape, "layers": large.layers}
    return found


def check_compiled_large(hour: Hour) -> Found:
    """The same with --compile_layers: learner and engine agree, and an update is faster."""
    large = largest_model(hour)
    if large is None:
        return Found(None, f"no {FEWEST_LAYERS} layers of a large shape fit")
    found = time_large(hour, "compiled_large", large, "--compile_layers")
    plain = hour.result("mfu_large") or {"figures": {}}
    before = plain["figures"].get("time/training")
    now = found.figures.get("time/training")
    if before and now is not None:
        found.figures["faster than mfu_large"] = before / now
        if GPUS and found.passed and now > before:
            found.passed = False
            found.said = "slower than without the flag"
    return against_paper(found, large, compiled=True)


def check_mfu_small(hour: Hour) -> Found:
    """The update of `sleep` at Qwen2.5-0.5B's shape: MFU at least the paper's slow one."""
    if not GPUS:
        return Found(None, "no GPU")
    before = hour.result("sleep")
    if before is None:
        return Found(False, "sleep has no result")
    figures = {name: value for name, value in before["figures"].items() if name == "learner_mfu"}
    return against_paper(Found(before["passed"], "as sleep measured it", figures), Large("Qwen2.5-0.5B", 24))


def device_name() -> str:
    return torch.cuda.get_device_name() if GPUS else ""


def data_sheet() -> roofline.GPU | None:
    """Of this GPU, if it is known."""
    kinds = [kind for kind in roofline.GPUS if kind in device_name().lower()]
    return roofline.GPUS[kinds[0]] if kinds else None


def against_paper(found: Found, large: Large, **options: Any) -> Found:
    """Measured learner_mfu, which is of this GPU's own matrix product, beside the paper's share of such a product."""
    sheet = data_sheet()
    measured = found.figures.get("learner_mfu")
    if not found.passed or sheet is None or measured is None:
        return found
    way = roofline.Way(compiled_head=True, stage=0, speeds=roofline.SLOW, **options)
    share, _ = roofline.mfu(roofline.shape_of(large.shape), sheet, way, 1, 8192, 90, 512, 8)
    paper = share / roofline.FAST.products
    found.figures["learner_mfu on paper, slow end"] = paper
    if measured < paper:
        found.passed = False
        found.said = f"MFU {measured:.2f}, on paper at least {paper:.2f}"
    return found


def has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


def check_trl(hour: Hour) -> Found:
    """A step of TRL's GRPOTrainer with vLLM in its process (pip install trl==1.9.2), on what `sleep` had: slower."""
    if not GPUS or not has_trl():
        return Found(None, "TRL is not installed: pip install trl==1.9.2" if GPUS else "no GPU")
    before = hour.result("sleep")
    if before is None or not before["passed"]:
        return Found(False, "sleep did not pass")
    prompts, samples, _, response, _ = sizes_of(hour, "sleep")
    path = model(hour, "Qwen2.5-0.5B", 24)
    text = f"""scripts/peers/trl_side.py --mode vllm --model {path} --data {rows(hour)}
        --reward_file {hour.out / "coin.py"}:coin --prompts {prompts} --samples {samples} --max_new_tokens {response}
        --steps {STEPS} --lr 1e-3 --gradient_checkpointing --json {hour.out / "trl_steps.json"}"""
    ours = before["figures"]
    ours_ms = 1e3 * ours["time/total"] / (prompts * samples * ours["val/sequence_lengths"])
    figures = {"ours, s a step": ours["time/total"], "ours, ms a response token": ours_ms}
    slower = True
    for dtype in ("float32", "bfloat16"):
        status, output = hour.run(f"trl_{dtype}", [sys.executable, *text.split(), "--dtype", dtype])
        if status:
            return Found(False, f"{dtype}: exit status {status}: {last_line(output)}", figures)
        steps = json.loads((hour.out / "trl_steps.json").read_text())["steps"][2:]
        theirs = mean(step["total_s"] for step in steps)
        theirs_ms = 1e3 * theirs / mean(step["completion_tokens"] for step in steps)
        name = f"TRL, {dtype} weights"
        figures[f"{name}, s a step"] = theirs
        figures[f"{name}, s of it generation"] = mean(step["generation_s"] for step in steps)
        figures[f"{name}, ms a response token"] = theirs_ms
        figures[f"{name}, over ours"] = theirs_ms / ours_ms
        slower &= theirs_ms > ours_ms
    return Found(slower, "ours is faster" if slower else "TRL is faster", figures)


def check_memory(hour: Hour) -> Found:
    """The most bytes of warm_start's learner, which has a process of its own: 0.8 to 1.25 of memory.py's estimate."""
    result = hour.result("warm_start")
    if result is not None and result["passed"] is None:
        return Found(None, "warm_start did not fit")
    args = hour.out / "runs" / "warm_start" / "args.json"
    if result is None or not args.exists():
        return Found(False, "warm_start has no result")
    estimate = estimated_gib(json.loads(args.read_text()))
    figures = {"estimate, GiB": estimate}
    if not GPUS:
        return Found(None, "no GPU: the estimate alone", figures)
    measured = result["figures"].get("memory/gpu_allocated_gib")
    if measured is None:
        return Found(False, "warm_start has no memory/gpu_allocated_gib", figures)
    figures["measured, GiB"] = measured
    as_estimated = 0.8 < measured / estimate < 1.25
    said = "as estimated" if as_estimated else f"{measured:.1f} GiB, estimated {estimate:.1f}"
    return Found(as_estimated, said, figures)


def estimated_gib(flags: dict[str, Any]) -> float:
    """The estimate for a learner of a run with these flags."""
    values = {name: flags[name] for name in ESTIMATED_BY if name != "model_revision"}
    setup = memory.Setup(**values, logprob_chunk=grpo.LOGPROB_CHUNK)
    return learner_bytes(setup, memory.load_config(flags["model_name_or_path"], None)) / memory.GIB


CHECKS: dict[str, Callable[[Hour], Found]] = {
    "machine": check_machine,
    "kernels": check_kernels,
    "head": check_head,
    "cold_start": check_cold_start,
    "warm_start": check_warm_start,
    "synchronous": check_synchronous,
    "stale": check_stale,
    "sleep": check_sleep,
    "resume": check_resume,
    "synchronous_fast": check_synchronous_fast,
    "stale_fast": check_stale_fast,
    "drain": check_drain,
    "sharded": check_sharded,
    "tensor_parallel": check_tensor_parallel,
    "host": check_host,
    "load": check_load,
    "mfu_small": check_mfu_small,
    "mfu_large": check_mfu_large,
    "compiled_large": check_compiled_large,
    "memory": check_memory,
    "trl": check_trl,
    "real_model": check_real_model,
}


def compare_kernels(out: Path) -> None:
    """Print a line for each case of check_kernels."""
    from transformers import AttentionInterface

    world = utils.init_distributed()
    AttentionInterface.register(utils.PACK_ATTENTION, utils.pack_attention)
    for head_dim, dtype, tokens, window in kernel_cases():
        torch.manual_seed(0)
        policy = grpo.Policy(small_model(head_dim, dtype, window).to(world.device))
        rollouts = rollouts_of_a_prompt(tokens)
        alone = one_response(policy, [[rollouts[1:2]]], slice(tokens), world)
        packed = one_response(policy, [grpo.make_pieces(rollouts, 2**62)], slice(tokens, 2 * tokens), world)
        off = float((alone[0] - packed[0]).abs().mean() / alone[0].abs().mean())
        turn = relative(alone[1], packed[1])
        most_off, most_turn = (0.03, 0.1) if dtype == torch.bfloat16 else (1e-4, 1e-3)
        case = f"head {head_dim} {str(dtype)[6:]} {4 * tokens + 39} tokens"
        if window:
            case += f" window {window}"
        fine = "ok" if off < most_off and turn < most_turn else "DIFFERENT"
        print(f"{case}: logprobs {off:.1e}, gradient {turn:.1e} {fine}", flush=True)


def kernel_cases() -> Iterator[tuple[int, torch.dtype, int, int | None]]:
    """Head sizes, dtypes, tokens of a response and, at one head size, sliding windows."""
    sizes = [64]
    dtypes = [torch.float32]
    lengths = [40]
    if GPUS:
        sizes = [128, 64, 256]
        dtypes = [torch.bfloat16, torch.float32]
        lengths = [300, 4000]
    for head_dim, dtype, tokens in itertools.product(sizes, dtypes, lengths):
        yield head_dim, dtype, tokens, None
        if head_dim == sizes[0]:
            yield head_dim, dtype, tokens, tokens // 2


def small_model(head_dim: int, dtype: torch.dtype, window: int | None) -> Any:
    """A model of two layers with our attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mistral", vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, sliding_window=window,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=utils.PACK_ATTENTION)


def rollouts_of_a_prompt(tokens: int) -> list[grpo.Rollout]:
    """Two groups of two responses of `tokens` random tokens to one prompt."""
    prompt = utils.Prompt(0, tuple(range(50, 90)), "", ("7",), ("gsm8k",))
    ids = torch.randint(0, 1024, (4, tokens)).tolist()
    rollouts = []
    for sample in range(4):
        r = grpo.Rollout(prompt, sample // 2, sample)
        r.append(utils.Generation(ids[sample], [0.0] * tokens, "stop", [0] * tokens))
        rollouts.append(r)
    return rollouts


def one_response(
    policy: grpo.Policy, packs: Any, tokens: slice, world: utils.World
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, gradient of their sum) of some response tokens in packs."""
    batch = grpo.make_batch(packs, world.device)
    logprobs, _ = policy(batch, 1.0)
    logprobs = logprobs[batch.response_mask][tokens]
    policy.zero_grad()
    logprobs.sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    gradient = torch.cat([values.flatten().float() for values in gradients])
    return logprobs.detach().float(), gradient


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of b from a, of a's norm."""
    return float((a - b).norm() / a.norm())


@dataclass
class Head:
    """Random inputs of the model's head."""

    x: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    by_logprobs: torch.Tensor  # a gradient
    by_entropy: torch.Tensor

    def work(self, compiled: bool, chunks: int = 1) -> list[torch.Tensor]:
        """Logprobs, entropy and the gradients by x and weight, `chunks` of the plain head's chunks at a time."""
        chunk = chunks * grpo.LOGPROB_CHUNK
        logprobs, entropy = HeadLogprobs.apply(self.x, self.weight, self.targets, 0.9, chunk, compiled)
        by_logprobs = self.by_logprobs * logprobs
        by_entropy = self.by_entropy * entropy
        total = by_logprobs + by_entropy
        gradients = torch.autograd.grad(total.sum(), (self.x, self.weight))
        results = [logprobs, entropy, *gradients]
        return [values.detach().float() for values in results]


def compare_head(out: Path) -> None:
    """Print a line for each dtype of check_head."""
    limits = {torch.bfloat16: 1e-2, torch.float32: 1e-5} if GPUS else {torch.float32: 1e-6}
    vocabulary, hidden, tokens = (152064, 3584, 6144) if GPUS else (2048, 64, 300)
    for dtype, limit in limits.items():
        torch.manual_seed(0)
        x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        weight = torch.randn(vocabulary, hidden, device=DEVICE) / hidden**0.5
        weight = weight.to(dtype)
        targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
        by_logprobs, by_entropy = torch.randn(2, tokens, device=DEVICE)
        head = Head(x.requires_grad_(), weight.requires_grad_(), targets, by_logprobs, by_entropy)

        plain = head.work(False)
        plain_s = machine.best_seconds(partial(head.work, False))
        larger_s = machine.best_seconds(partial(head.work, False, 3))
        compiled = head.work(True, 3)  # as grpo.Policy has it
        compiled_s = machine.best_seconds(partial(head.work, True, 3))
        off = max(map(relative, plain, compiled))
        faster = compiled_s < min(plain_s, larger_s) or not GPUS
        fine = "ok" if off < limit and faster else "WRONG"
        times = (
            f"{plain_s * 1e3:.3g} ms plain, {larger_s * 1e3:.3g} in chunks as large, {compiled_s * 1e3:.3g} compiled"
        )
        print(f"head {str(dtype)[6:]} {tokens} tokens: off by {off:.1e}, {times} {fine}", flush=True)


def compare_host(out: Path) -> None:
    """Print a line for each case of check_host, a forward and backward of three tokens: a GPU has nothing to do."""
    world = utils.init_distributed()
    (path,) = (out / "models").glob("Qwen2.5-0.5B_*")
    dtype = "bfloat16" if GPUS else "float32"
    for part in ("none", "layer"):
        flags = ["--model_name_or_path", str(path), "--model_dtype", dtype]
        if part == "layer":
            flags.append("--gradient_checkpointing")
        policy = grpo.load_policy(utils.parse_args(grpo.Args, flags), world)
        prompt = utils.Prompt(0, (5,), "", ("7",), ("gsm8k",))
        r = grpo.Rollout(prompt, 0, 0)
        r.append(utils.Generation([6, 7], [0.0, 0.0], "stop", [0, 0]))
        batch = grpo.make_batch([[[r]]], world.device)
        seconds = math.inf
        for _ in range(5):
            start = time.process_time()
            policy(batch, 1.0)[0].sum().backward()
            seconds = min(seconds, time.process_time() - start)
            policy.zero_grad()
        fine = "ok" if seconds * 1e3 < HOST_MS else "SLOW"
        print(f"host ms a micro-batch, recomputed {part}: {seconds * 1e3:.1f} {fine}", flush=True)


COMPARISONS = {"kernels": compare_kernels, "head": compare_head, "host": compare_host}


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


WORDS = {True: "pass", False: "FAIL", None: "skipped"}


def write_page(hour: Hour) -> Path:
    """DIR/README.md from what results there are."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    device = f"{GPUS} x {device_name()}" if GPUS else f"no GPU; {platform.processor() or 'a CPU'}"
    lines = [
        f"# An hour on {device}{', tiny models' if hour.tiny else ''}",
        "",
        f"commit {commit.strip() or 'unknown'}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.platform()}",
        "",
        "| check | result | seconds | what |",
        "|---|---|---|---|",
    ]
    figures = []
    for name, check in CHECKS.items():
        found = hour.result(name)
        if found is None:
            lines.append(f"| {name} | not made yet | 0 | {check.__doc__} |")
            continue
        word = WORDS[found["passed"]].replace("FAIL", "**FAIL**")
        said = found["said"].replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {word} | {found['seconds']:.0f} | {said} |")
        for key, value in found["figures"].items():
            shown = value if isinstance(value, str) else f"{value:.4g}"
            figures.append(f"| {name} | {key} | {shown} |")
    lines += ["", "Means over the run's steps after the second; logs and runs are beside this page.", ""]
    lines += ["| check | figure | value |", "|---|---|---|", *figures]
    for name in NVIDIA_SMI:
        log = hour.out / f"{name}.log"
        if log.exists():
            lines += ["", "```", log.read_text(errors="replace").strip(), "```"]
    page = hour.out / "README.md"
    replace(page, "\n".join(lines) + "\n")
    return page


def replace(path: Path, text: str) -> None:
    """Write a file that is either whole or not there."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def make_check(hour: Hour, name: str, check: Callable[[Hour], Found]) -> None:
    """Make a check, keep its result and write the page."""
    print(f"{name}: {check.__doc__}", flush=True)
    start = time.monotonic()
    try:
        found = check(hour)
    except Exception as error:  # the next check may still work
        found = Found(False, f"{type(error).__name__}: {error}"[:300])
    replace(
        hour.out / f"{name}.json",
        json.dumps(vars(found) | {"seconds": time.monotonic() - start, "device": device_name()}),
    )
    print(f"    {WORDS[found.passed]}: {found.said}", flush=True)
    write_page(hour)


def stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_hour", help="directory (runs/gpu_hour)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, transformers' sampling: to try this program")
    parser.add_argument("--short", action="store_true", help="fewer and shorter responses, for a quarter of an hour")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), help="these checks, also when they passed before")
    parser.add_argument("--model", type=Path, help="a chat model whose score must rise (models/SmolLM2-135M-Instruct)")
    parser.add_argument("--compare", choices=list(COMPARISONS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compare:
        COMPARISONS[options.compare](options.out.resolve())
        return 0
    if not GPUS and not options.tiny:
        raise SystemExit("gpu_hour.py: no GPU is visible to torch; --tiny tries the program itself on a CPU")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    hour = Hour(out, options.tiny, options.model and options.model.resolve(), options.short)
    signal.signal(signal.SIGTERM, stop)
    try:
        for name, check in CHECKS.items():
            before = hour.result(name)
            passed = before is not None and before["passed"] is not False
            if name in options.only if options.only else not passed:
                make_check(hour, name, check)
        shutil.rmtree(out / "models", ignore_errors=True)  # gigabytes, made again in seconds
    except KeyboardInterrupt:
        hour.stop()
        print(f"\nstopped: the same command goes on. So far: {write_page(hour)}")
        return 130
    results = [result["passed"] for result in map(hour.result, CHECKS) if result is not None]
    counts = [results.count(kind) for kind in (True, False, None)]
    print("{} passed, {} failed, {} skipped: {}".format(*counts, write_page(hour)))
    return 1 if False in results else 0


if __name__ == "__main__":
    raise SystemExit(main())
