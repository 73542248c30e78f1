"""Checks, on a real GPU, of what was only compiled or simulated, and a page of their results and figures.

    bash scripts/proof/gpu_hour.sh [--out DIR] [--tiny] [--only NAME ...]

The checks run one after the other. One that passed is not made again; one that failed is. DIR gets README.md (the
page), a result and a log for each check, and the runs. Each check is a program in processes of its own, which end when
this one is stopped. The models have random weights in the shapes of public ones (proof/memory.py) and as many layers as
fit, so responses have full length and nothing is learned.
"""

import argparse
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
from collections.abc import Callable
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
CHECK_S = 1200.0  # a check that takes longer has failed
TINY = (64, 128, 2, 1, 1, True)  # as memory.SHAPES: hidden, MLP, layers, heads, key-value heads, tied head
SHOWN = """learner_mfu time/total time/training time/weight_sync time/weight_sync_wire time/weight_sync_load
    time/weight_sync_pause val/weight_sync_gb_per_second val/learner_idle_share val/engine_idle_share
    val/engine_tokens_per_second debug/vllm_vs_local_logprob_diff_mean debug/vllm_vs_local_logprob_diff_max
    memory/gpu_allocated_gib""".split()


@dataclass
class Hour:
    """The session: where results go, and what was asked for."""

    out: Path
    tiny: bool
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
        """What a check came to, if it was made."""
        file = self.out / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else None


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
            print(json.dumps({"messages": messages, "ground_truth": "7", "dataset": "gsm8k"}), file=file)
    return path


def flags_of(hour: Hour, name: str, path: Path) -> list[str]:
    """Flags of a short run of grpo.py or grpo_fast.py."""
    sizes = (4, 4, 96, 16, 128) if hour.tiny else (32, 8, 256, 512, 8192)
    prompts, samples, prompt, response, pack = sizes
    text = f"""--model_name_or_path {path} --dataset_mixer_list {rows(hour)} 1.0 --output_dir {hour.out / "runs"}
        --exp_name {name} --overwrite --num_unique_prompts_rollout {prompts} --num_samples_per_prompt_rollout {samples}
        --max_prompt_token_length {prompt} --response_length {response} --pack_length {pack} --temperature 1.0
        --learning_rate 1e-6 --beta 0 --no_load_ref_policy --no_filter_zero_std_samples --gradient_checkpointing
        --total_episodes {prompts * samples * STEPS} --save_freq -1 --local_eval_every -1 --num_mini_batches 1"""
    if hour.tiny:
        text += " --rollout_backend transformers"
    return text.split()


def learner_bytes(setup: memory.Setup, config: Any) -> float:
    """scripts/proof/memory.py's estimate of a learner's most bytes."""
    estimate = memory.memory_estimate(setup, config)
    return sum(size for name, size in estimate.items() if not name.startswith("engine"))


def layers_that_fit(shape: str) -> int:
    """Layers of a shape whose update takes at most half of a GPU (80 GiB where there is none), at most all."""
    setup = memory.Setup(gradient_checkpointing=True, load_ref_policy=False, pack_length=8192)
    room = torch.cuda.get_device_properties(0).total_memory if GPUS else 80 * memory.GIB
    config = memory.qwen(*memory.SHAPES[shape])
    for layers in range(config.num_hidden_layers, 1, -1):
        config.update({"num_hidden_layers": layers, "layer_types": None})
        if learner_bytes(setup, type(config).from_dict(config.to_dict())) < 0.5 * room:
            return layers
    return 1


def train(hour: Hour, name: str, script: str, path: Path, *flags: str) -> Found:
    """A short run: it ends well, every gradient is finite, learner and engine agree, no rollout is too old."""
    command = [sys.executable, script, *flags_of(hour, name, path), *flags]
    status, output = hour.run(name, command)
    file = hour.out / "runs" / name / "metrics.jsonl"
    steps = []
    if file.exists():
        steps = [json.loads(line) for line in file.read_text().splitlines()]
    if status or len(steps) < STEPS:
        last = [line for line in output.splitlines() if line.strip()][-1:]
        return Found(False, f"exit status {status} after {len(steps)} of {STEPS} steps: {''.join(last)[:300]}")

    late = steps[2:]  # the first have compilation in them
    figures = {}
    for key in SHOWN:
        if all(key in step for step in late):
            figures[key] = mean(step[key] for step in late)
    ready = re.search(r"ready after (\S+) s", output)
    if ready:
        figures["ready after, s"] = float(ready[1])
    gap = most(steps, "debug/vllm_vs_local_logprob_diff_mean")
    faults = faults_of(steps, gap)
    return Found(not faults, "; ".join(faults) or f"{STEPS} steps, gap at most {gap:.2g}", figures)


def most(steps: list[dict[str, Any]], name: str) -> float:
    """The largest value of a metric, 0 if no step has it."""
    return max(step.get(name, 0.0) for step in steps)


def faults_of(steps: list[dict[str, Any]], gap: float) -> list[str]:
    """What is wrong in a run's metrics, in words."""
    faults = []
    norms = [step.get("optim/grad_norm") or 0.0 for step in steps]
    if any(step.get("optim/nonfinite_updates") for step in steps) or not all(map(math.isfinite, norms)):
        faults.append("a gradient was not finite")
    if gap > 0.05:
        faults.append(f"the logprob gap is {gap:.3f}, more than 0.05")
    if most(steps, "val/num_steps_off_policy") > 1:
        faults.append("a rollout is older than async_steps")
    return faults


def train_fast(hour: Hour, name: str, path: Path, *flags: str) -> Found:
    """A short run of grpo_fast.py with a learner and an engine, on GPUs of their own where there are two."""
    roles = ["--async_steps", "1", "--inflight_updates"]
    if GPUS < 2:
        roles += ["--single_gpu_mode", "--vllm_gpu_memory_utilization", "0.35"]
    return train(hour, name, "grpo_fast.py", path, *flags, *roles)


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def check_machine(hour: Hour) -> Found:
    """scripts/doctor.py finds nothing that does not work; with --tiny it is asked for versions alone."""
    command = [sys.executable, "scripts/doctor.py"]
    if hour.tiny:
        command += ["pins", "requirements-cpu.txt"]
    status, output = hour.run("machine", command)
    failed = [line for line in output.splitlines() if "FAIL" in line]
    speed = machine.device_speed(torch.device(DEVICE), torch.bfloat16 if GPUS else torch.float32)
    figures = {"product, TFLOP/s": speed["flops_per_second"] / 1e12}
    figures["copy, GB/s"] = speed["bytes_per_second"] / 1e9
    return Found(not status, "; ".join(failed)[:300] or "doctor.py finds nothing wrong", figures)


def check_kernels(hour: Hour) -> Found:
    """Packs of shared prompts give the logprobs and gradients of one response a row, at each head size and dtype."""
    return compare(hour, "kernels")


def check_head(hour: Hour) -> Found:
    """The compiled head gives the plain one's logprobs, entropies and gradients, and how much faster it is."""
    return compare(hour, "head")


def compare(hour: Hour, name: str) -> Found:
    """A comparison of COMPARISONS in a process of its own, which prints a line for each case."""
    command = [sys.executable, "scripts/proof/gpu_hour.py", "--compare", name, "--out", str(hour.out)]
    status, output = hour.run(name, command)
    lines = [line for line in output.splitlines() if line.startswith("head ")]
    wrong = "; ".join(line for line in lines if not line.endswith("ok"))
    if status or not lines or wrong:
        return Found(False, wrong[:300] or output.strip()[-300:])
    figures = dict(line.split(": ", 1) for line in lines)
    return Found(True, f"{len(lines)} cases", figures)


def check_cold_start(hour: Hour) -> Found:
    """grpo_fast.py, engine compiled, weights in flight, on a cache that is empty for this model."""
    return train_fast(hour, "cold_start", model(hour, "Qwen2.5-0.5B", 24))


def check_warm_start(hour: Hour) -> Found:
    """The same again: the compile cache is warm now, which is where engines of other devices once crashed."""
    return train_fast(hour, "warm_start", model(hour, "Qwen2.5-0.5B", 24))


def check_synchronous(hour: Hour) -> Found:
    """grpo.py: learner and engine on one GPU by turns."""
    path = model(hour, "Qwen2.5-0.5B", 24)
    return train(hour, "synchronous", "grpo.py", path, "--vllm_gpu_memory_utilization", "0.35")


def check_sleep(hour: Hour) -> Found:
    """grpo.py with an engine that gives its cache back while the learner works: 0.8 of the GPU."""
    if not GPUS:
        return Found(None, "no GPU")
    path = model(hour, "Qwen2.5-0.5B", 24)
    return train(hour, "sleep", "grpo.py", path, "--vllm_sleep", "on", "--vllm_gpu_memory_utilization", "0.8")


def check_mfu_7b(hour: Hour) -> Found:
    """An update at Qwen2.5-7B's shape, as many layers as fit: MFU at least 0.7 of what roofline.py says."""
    layers = layers_of_7b(hour)
    found = train_fast(hour, "mfu_7b", model(hour, "Qwen2.5-7B", layers))
    found.figures["layers"] = layers
    return against_paper(found, "Qwen2.5-7B")


def check_compiled_7b(hour: Hour) -> Found:
    """The same with --compile_layers, the MLPs alone recomputed: learner and engine agree, and an update is faster."""
    path = model(hour, "Qwen2.5-7B", layers_of_7b(hour))
    flags = ["--compile_layers", "--gradient_checkpointing_part", "mlp"]
    found = train_fast(hour, "compiled_7b", path, *flags)
    plain = hour.result("mfu_7b") or {"figures": {}}
    before = plain["figures"].get("learner_mfu")
    now = found.figures.get("learner_mfu")
    if before and now is not None:
        found.figures["faster than mfu_7b"] = now / before
        if GPUS and found.passed and now < before:
            found.passed = False
            found.said = "slower than without the flags"
    return against_paper(found, "Qwen2.5-7B", compiled=True, recompute="mlp")


def layers_of_7b(hour: Hour) -> int:
    return TINY[2] if hour.tiny else layers_that_fit("Qwen2.5-7B")


def check_mfu_05b(hour: Hour) -> Found:
    """The warm run's update at Qwen2.5-0.5B's shape: MFU at least 0.7 of what roofline.py says."""
    before = hour.result("warm_start")
    if before is None:
        return Found(False, "warm_start has no result")
    figures = {name: value for name, value in before["figures"].items() if name == "learner_mfu"}
    return against_paper(Found(before["passed"], "as warm_start measured it", figures), "Qwen2.5-0.5B")


def against_paper(found: Found, shape: str, **options: Any) -> Found:
    """Measured learner_mfu, which is of this GPU's own matrix product, beside the paper's share of such a product."""
    device = torch.cuda.get_device_name().lower() if GPUS else ""
    kinds = [kind for kind in roofline.GPUS if kind in device]
    measured = found.figures.get("learner_mfu")
    if not found.passed or not kinds or measured is None:
        return found
    way = roofline.Way(compiled_head=True, stage=0, **options)
    share, _ = roofline.mfu(roofline.shape_of(shape), roofline.GPUS[kinds[0]], way, 1, 8192, 90, 512, 8)
    paper = share / roofline.EFFICIENCY["products"]
    found.figures["learner_mfu on paper"] = paper
    if measured < 0.7 * paper:
        found.passed = False
        found.said = f"MFU {measured:.2f}, on paper {paper:.2f}"
    return found


def check_memory(hour: Hour) -> Found:
    """The learner's most bytes in both shapes are 0.8 to 1.25 of scripts/proof/memory.py's estimate."""
    figures = {}
    wrong = []
    for name in ("warm_start", "mfu_7b"):
        result = hour.result(name)
        args = hour.out / "runs" / name / "args.json"
        if result is None or not args.exists():
            return Found(False, f"{name} has no result")
        estimate = estimated_gib(json.loads(args.read_text()))
        figures[f"{name}: estimate, GiB"] = estimate
        measured = result["figures"].get("memory/gpu_allocated_gib")
        if measured is not None:
            figures[f"{name}: measured, GiB"] = measured
            if not 0.8 < measured / estimate < 1.25:
                wrong.append(f"{name}: {measured:.1f} GiB, estimated {estimate:.1f}")
    if not GPUS:
        return Found(None, "no GPU: the estimate alone", figures)
    return Found(not wrong, "; ".join(wrong) or "as estimated", figures)


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
    "sleep": check_sleep,
    "mfu_05b": check_mfu_05b,
    "mfu_7b": check_mfu_7b,
    "compiled_7b": check_compiled_7b,
    "memory": check_memory,
}


def compare_kernels() -> None:
    """Print a line for each case of check_kernels."""
    from transformers import AttentionInterface

    world = utils.init_distributed()
    AttentionInterface.register(utils.PACK_ATTENTION, utils.pack_attention)
    for head_dim in (64, 128, 256) if GPUS else (64,):
        for dtype in (torch.bfloat16, torch.float32) if GPUS else (torch.float32,):
            for tokens in (300, 4000) if GPUS else (40,):
                torch.manual_seed(0)
                policy = grpo.Policy(small_llama(head_dim, dtype).to(world.device))
                rollouts = rollouts_of_a_prompt(tokens)
                alone = first_response(policy, [[[r] for r in rollouts[:1]]], tokens, world)
                packed = first_response(policy, [grpo.make_pieces(rollouts, 2**62)], tokens, world)
                off = float((alone[0] - packed[0]).abs().mean() / alone[0].abs().mean())
                turn = relative(alone[1], packed[1])
                most_off, most_turn = (0.03, 0.1) if dtype == torch.bfloat16 else (1e-4, 1e-3)
                case = f"head {head_dim} {str(dtype)[6:]} {4 * tokens + 39} tokens"
                fine = "ok" if off < most_off and turn < most_turn else "DIFFERENT"
                print(f"{case}: logprobs {off:.1e}, gradient {turn:.1e} {fine}", flush=True)


def small_llama(head_dim: int, dtype: torch.dtype) -> Any:
    """A model of two layers with our attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
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


def first_response(
    policy: grpo.Policy, packs: Any, tokens: int, world: utils.World
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, gradient of their sum) of the first response in some packs."""
    batch = grpo.make_batch(packs, world.device)
    logprobs, _ = policy(batch, 1.0)
    logprobs = logprobs[batch.response_mask][:tokens]
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

    def work(self, compiled: bool) -> list[torch.Tensor]:
        """Logprobs, entropy and the gradients by x and weight."""
        chunk = grpo.LOGPROB_CHUNK
        if compiled:
            chunk *= 3
        logprobs, entropy = HeadLogprobs.apply(self.x, self.weight, self.targets, 0.9, chunk, compiled)
        total = self.by_logprobs * logprobs + self.by_entropy * entropy
        by_x, by_weight = torch.autograd.grad(total.sum(), (self.x, self.weight))
        return [values.detach().float() for values in (logprobs, entropy, by_x, by_weight)]


def compare_head() -> None:
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
        compiled = head.work(True)
        compiled_s = machine.best_seconds(partial(head.work, True))
        off = max(map(relative, plain, compiled))
        faster = compiled_s < plain_s or not GPUS
        fine = "ok" if off < limit and faster else "WRONG"
        times = f"{plain_s * 1e3:.3g} ms plain, {compiled_s * 1e3:.3g} compiled"
        print(f"head {str(dtype)[6:]} {tokens} tokens: off by {off:.1e}, {times} {fine}", flush=True)


COMPARISONS = {"kernels": compare_kernels, "head": compare_head}


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


WORDS = {True: "pass", False: "FAIL", None: "skipped"}


def write_page(hour: Hour) -> Path:
    """DIR/README.md from what results there are."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    device = f"{GPUS} x {torch.cuda.get_device_name()}" if GPUS else f"no GPU; {platform.processor() or 'a CPU'}"
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
    replace(hour.out / f"{name}.json", json.dumps(vars(found) | {"seconds": time.monotonic() - start}))
    print(f"    {WORDS[found.passed]}: {found.said}", flush=True)
    write_page(hour)


def stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_hour", help="directory (runs/gpu_hour)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, transformers' sampling: to try this program")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), help="these checks, also when they passed before")
    parser.add_argument("--compare", choices=list(COMPARISONS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compare:
        COMPARISONS[options.compare]()
        return 0
    if not GPUS and not options.tiny:
        raise SystemExit("gpu_hour.py: no GPU is visible to torch; --tiny tries the program itself on a CPU")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    hour = Hour(out, options.tiny)
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
