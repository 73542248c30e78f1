"""Checks on a real GPU of what was only compiled or simulated, one after the other, with a page of pass, fail, figures.

    bash scripts/proof/gpu_hour.sh [--out DIR] [--tiny] [--only NAME ...]

A check that passed is not made again; one that failed is. DIR has README.md (the page), a result and a log for each
check, and the runs. Every check but kernels is a program of this repository in processes of its own, which end when
this one is stopped. Models have random weights in the shapes of public ones (proof/memory.py), of as many layers as
fit, so responses have full length and nothing is learned.
"""

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import torch  # noqa: E402

import grpo  # noqa: E402
from scripts.data.make_tiny_model import make_tokenizer  # noqa: E402
from scripts.parts import machine  # noqa: E402
from scripts.parts.plan import ESTIMATED_BY  # noqa: E402
from scripts.proof import memory, roofline  # noqa: E402

GPUS = torch.cuda.device_count()
CHECK_S = 1200.0  # a check that takes longer has failed
TINY = (64, 128, 2, 1, 1, True)  # as memory.SHAPES: hidden, MLP, layers, heads, key-value heads, tied head
SHOWN = """learner_mfu time/total time/training time/weight_sync time/weight_sync_wire time/weight_sync_load
    time/weight_sync_pause val/weight_sync_gb_per_second val/learner_idle_share val/engine_idle_share
    val/engine_tokens_per_second debug/vllm_vs_local_logprob_diff_mean debug/vllm_vs_local_logprob_diff_max
    memory/gpu_allocated_gib""".split()


@dataclass
class Hour:
    """The session: where things go, and what was asked for."""

    out: Path
    tiny: bool
    child: Any = None  # the process of the check under way

    def run(self, name: str, command: list[str], **env: str) -> tuple[int, str]:
        """Exit status and output of a command, also in DIR/NAME.log."""
        log = self.out / f"{name}.log"
        with log.open("w") as file:
            print("+", *command, file=file, flush=True)
            self.child = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | env
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
    """A model of random weights, made once; its tokenizer knows 512 of its tokens."""
    out = hour.out / "models" / f"{shape}_{layers}_layers"
    if (out / "config.json").exists():
        return out
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = make_tokenizer(512)
    config = memory.qwen(*(TINY if hour.tiny else memory.SHAPES[shape]))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vocabulary = 2048 if hour.tiny else config.vocab_size
    config.update(ids | {"num_hidden_layers": layers, "vocab_size": vocabulary, "layer_types": None})
    config = type(config).from_dict(config.to_dict())
    torch.manual_seed(0)
    with torch.device("cuda" if GPUS else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.generation_config = GenerationConfig(**ids)
    partial = out.with_name(f"{out.name}.part")
    made.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    del made
    torch.cuda.empty_cache()
    partial.rename(out)
    return out


def rows(hour: Hour) -> Path:
    """Prompts of the length of GSM8K's."""
    path = hour.out / "rows.jsonl"
    words = "how many apples are left if " * (2 if hour.tiny else 14)
    made = [
        {"messages": [{"role": "user", "content": f"{words}{i}?"}], "ground_truth": "7", "dataset": "gsm8k"}
        for i in range(64)
    ]
    path.write_text("\n".join(map(json.dumps, made)) + "\n")
    return path


def flags_of(hour: Hour, name: str, path: Path) -> list[str]:
    """Flags of a short run of grpo.py or grpo_fast.py."""
    sizes = (4, 4, 96, 16, 128) if hour.tiny else (32, 8, 256, 512, 8192)
    prompts, samples, prompt, response, pack = sizes
    text = f"""--model_name_or_path {path} --dataset_mixer_list {rows(hour)} 1.0 --output_dir {hour.out / "runs"}
        --exp_name {name} --overwrite --num_unique_prompts_rollout {prompts} --num_samples_per_prompt_rollout {samples}
        --max_prompt_token_length {prompt} --response_length {response} --pack_length {pack} --temperature 1.0
        --learning_rate 1e-6 --beta 0 --no_load_ref_policy --no_filter_zero_std_samples --gradient_checkpointing
        --total_episodes {prompts * samples * 6} --save_freq -1 --local_eval_every -1 --num_mini_batches 1"""
    return text.split() + (["--rollout_backend", "transformers"] if hour.tiny else [])


def roles(hour: Hour) -> list[str]:
    """One learner and one engine, on GPUs of their own where there are two."""
    return ["--async_steps", "1", "--inflight_updates"] + (
        ["--single_gpu_mode", "--vllm_gpu_memory_utilization", "0.35"] if GPUS < 2 else []
    )


def layers_that_fit(shape: str) -> int:
    """Layers of a shape whose update takes at most half of a GPU (80 GiB where there is none), at most all."""
    setup = memory.Setup(gradient_checkpointing=True, load_ref_policy=False, pack_length=8192)
    room = torch.cuda.get_device_properties(0).total_memory if GPUS else 80 * memory.GIB
    config = memory.qwen(*memory.SHAPES[shape])
    for layers in range(config.num_hidden_layers, 1, -1):
        config.update({"num_hidden_layers": layers, "layer_types": None})
        parts = memory.memory_estimate(setup, type(config).from_dict(config.to_dict()))
        if sum(size for name, size in parts.items() if not name.startswith("engine")) < 0.5 * room:
            return layers
    return 1


def train(hour: Hour, name: str, script: str, path: Path, *more: str) -> Found:
    """A short run: it ends well, every gradient is finite, learner and engine agree, no rollout is too old."""
    flags = [*flags_of(hour, name, path), *more]
    status, output = hour.run(name, [sys.executable, script, *flags])
    file = hour.out / "runs" / name / "metrics.jsonl"
    steps = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if status or len(steps) < 6:
        last = [line for line in output.splitlines() if line.strip()][-1:]
        return Found(False, f"exit status {status} after {len(steps)} of 6 steps: {''.join(last)[:300]}")
    late = steps[2:]  # the first have compilation in them
    figures = {key: sum(s[key] for s in late) / len(late) for key in SHOWN if all(key in s for s in late)}
    ready = [line.split("ready after ")[1].split(" s")[0] for line in output.splitlines() if "ready after " in line]
    figures |= {"ready after, s": float(ready[0])} if ready else {}
    faults = []
    if any(s.get("optim/nonfinite_updates") or not math.isfinite(s.get("optim/grad_norm") or 0.0) for s in steps):
        faults.append("a gradient was not finite")
    gap = max(s.get("debug/vllm_vs_local_logprob_diff_mean", 0.0) for s in steps)
    if gap > 0.05:
        faults.append(f"the logprob gap is {gap:.3f}, more than 0.05")
    if max(s.get("val/num_steps_off_policy", 0.0) for s in steps) > 1:
        faults.append("a rollout is older than async_steps")
    return Found(not faults, "; ".join(faults) or f"6 steps, gap at most {gap:.2g}", figures)


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def check_machine(hour: Hour) -> Found:
    """scripts/doctor.py finds nothing that does not work; with --tiny it is asked for versions alone."""
    command = [sys.executable, "scripts/doctor.py", *(["pins", "requirements-cpu.txt"] if hour.tiny else [])]
    status, output = hour.run("machine", command)
    failed = [line for line in output.splitlines() if "FAIL" in line]
    device = torch.device("cuda" if GPUS else "cpu")
    speed = utils.device_speed(device, torch.bfloat16 if GPUS else torch.float32)
    figures = {"product, TFLOP/s": speed["flops_per_second"] / 1e12, "copy, GB/s": speed["bytes_per_second"] / 1e9}
    return Found(not status, "; ".join(failed)[:300] or "doctor.py finds nothing wrong", figures)


def check_kernels(hour: Hour) -> Found:
    """Packs of shared prompts give the logprobs and gradients of one response a row, at each head size and dtype."""
    status, output = hour.run(
        "kernels", [sys.executable, "scripts/proof/gpu_hour.py", "--kernels", "--out", str(hour.out)]
    )
    lines = [line for line in output.splitlines() if line.startswith("head ")]
    wrong = [line for line in lines if not line.endswith("ok")]
    if status or not lines or wrong:
        return Found(False, "; ".join(wrong)[:300] or output.strip()[-300:])
    return Found(True, f"{len(lines)} cases", {line.split(":")[0]: line.split(": ")[1] for line in lines})


def check_head(hour: Hour) -> Found:
    """The compiled head gives the plain one's logprobs, entropies and gradients, and how much faster it is."""
    status, output = hour.run("head", [sys.executable, "scripts/proof/gpu_hour.py", "--head", "--out", str(hour.out)])
    lines = [line for line in output.splitlines() if line.startswith("head ")]
    wrong = [line for line in lines if not line.endswith("ok")]
    if status or not lines or wrong:
        return Found(False, "; ".join(wrong)[:300] or output.strip()[-300:])
    return Found(True, f"{len(lines)} cases", {line.split(":")[0]: line.split(": ")[1] for line in lines})


def check_cold_start(hour: Hour) -> Found:
    """grpo_fast.py, engine compiled, weights in flight, on a cache that is empty for this model."""
    return train(
        hour, "cold_start", "grpo_fast.py", model(hour, "Qwen2.5-0.5B", TINY[2] if hour.tiny else 24), *roles(hour)
    )


def check_warm_start(hour: Hour) -> Found:
    """The same again: the compile cache is warm now, which is where engines of other devices once crashed."""
    return train(
        hour, "warm_start", "grpo_fast.py", model(hour, "Qwen2.5-0.5B", TINY[2] if hour.tiny else 24), *roles(hour)
    )


def check_synchronous(hour: Hour) -> Found:
    """grpo.py: learner and engine on one GPU by turns."""
    path = model(hour, "Qwen2.5-0.5B", TINY[2] if hour.tiny else 24)
    return train(hour, "synchronous", "grpo.py", path, "--vllm_gpu_memory_utilization", "0.35")


def check_sleep(hour: Hour) -> Found:
    """grpo.py with an engine that gives its cache back while the learner works: 0.8 of the GPU."""
    if "vllm_sleep" not in grpo.Args.__dataclass_fields__ or not GPUS:
        return Found(None, "no GPU" if not GPUS else "grpo.py has no --vllm_sleep")
    path = model(hour, "Qwen2.5-0.5B", 24)
    return train(hour, "sleep", "grpo.py", path, "--vllm_sleep", "on", "--vllm_gpu_memory_utilization", "0.8")


def check_mfu_7b(hour: Hour) -> Found:
    """An update at Qwen2.5-7B's shape, as many layers as fit: MFU at least 0.7 of what roofline.py says."""
    layers = TINY[2] if hour.tiny else layers_that_fit("Qwen2.5-7B")
    found = train(hour, "mfu_7b", "grpo_fast.py", model(hour, "Qwen2.5-7B", layers), *roles(hour))
    found.figures["layers"] = layers
    return against_paper(hour, found, "Qwen2.5-7B")


def check_compiled_7b(hour: Hour) -> Found:
    """The same with --compile_layers, the MLPs alone recomputed: learner and engine agree, and an update is faster."""
    layers = TINY[2] if hour.tiny else layers_that_fit("Qwen2.5-7B")
    flags = ["--compile_layers", "--gradient_checkpointing_part", "mlp", *roles(hour)]
    found = train(hour, "compiled_7b", "grpo_fast.py", model(hour, "Qwen2.5-7B", layers), *flags)
    file = hour.out / "mfu_7b.json"
    before = json.loads(file.read_text())["figures"].get("learner_mfu") if file.exists() else None
    if before and "learner_mfu" in found.figures:
        found.figures["faster than mfu_7b"] = found.figures["learner_mfu"] / before
        if GPUS and found.passed and found.figures["learner_mfu"] < before:
            found.passed, found.said = False, "slower than without the flags"
    return against_paper(hour, found, "Qwen2.5-7B", compiled=True, recompute="mlp")


def check_mfu_05b(hour: Hour) -> Found:
    """The warm run's update at Qwen2.5-0.5B's shape: MFU at least 0.7 of what roofline.py says."""
    file = hour.out / "warm_start.json"
    if not file.exists():
        return Found(False, "warm_start has no result")
    before = json.loads(file.read_text())
    figures = {name: value for name, value in before["figures"].items() if name == "learner_mfu"}
    return against_paper(hour, Found(before["passed"], "as warm_start measured it", figures), "Qwen2.5-0.5B")


def against_paper(hour: Hour, found: Found, shape: str, **way: Any) -> Found:
    """Measured learner_mfu, which is of this GPU's own matrix product, beside the paper's share of such a product."""
    kind = next((k for k in roofline.GPUS if GPUS and k in torch.cuda.get_device_name().lower()), None)
    if not found.passed or kind is None or "learner_mfu" not in found.figures:
        return found
    how = roofline.Way(compiled_head=True, stage=0, **way)
    share, _ = roofline.mfu(roofline.shape_of(shape), roofline.GPUS[kind], how, 1, 8192, 90, 512, 8)
    paper = share / roofline.EFFICIENCY["products"]
    found.figures["learner_mfu on paper"] = paper
    if found.figures["learner_mfu"] < 0.7 * paper:
        found.passed, found.said = False, f"MFU {found.figures['learner_mfu']:.2f}, on paper {paper:.2f}"
    return found


def check_memory(hour: Hour) -> Found:
    """The learner's most bytes in both shapes are 0.8 to 1.25 of scripts/proof/memory.py's estimate."""
    figures, wrong = {}, []
    for name in ("warm_start", "mfu_7b"):
        args = hour.out / "runs" / name / "args.json"
        result = hour.out / f"{name}.json"
        if not (args.exists() and result.exists()):
            return Found(False, f"{name} has no result")
        flags = json.loads(args.read_text())
        setup = memory.Setup(
            **{k: flags[k] for k in ESTIMATED_BY if k != "model_revision"}, logprob_chunk=grpo.LOGPROB_CHUNK
        )
        parts = memory.memory_estimate(setup, memory.load_config(flags["model_name_or_path"], None))
        estimate = sum(size for part, size in parts.items() if not part.startswith("engine")) / memory.GIB
        figures[f"{name}: estimate, GiB"] = estimate
        measured = json.loads(result.read_text())["figures"].get("memory/gpu_allocated_gib")
        if measured is not None:
            figures[f"{name}: measured, GiB"] = measured
            if not 0.8 < measured / estimate < 1.25:
                wrong.append(f"{name}: {measured:.1f} GiB, estimated {estimate:.1f}")
    if not GPUS:
        return Found(None, "no GPU: the estimate alone", figures)
    return Found(not wrong, "; ".join(wrong) or "as estimated", figures)


CHECKS: dict[str, Callable[[Hour], Found]] = {
    f.__name__[6:]: f
    for f in (
        check_machine,
        check_kernels,
        check_head,
        check_cold_start,
        check_warm_start,
        check_synchronous,
        check_sleep,
        check_mfu_05b,
        check_mfu_7b,
        check_compiled_7b,
        check_memory,
    )
}


def kernels(out: Path) -> None:
    """check_kernels' process: a line for each case."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    world = utils.init_distributed()
    AttentionInterface.register(utils.PACK_ATTENTION, utils.pack_attention)
    for head_dim in (64, 128, 256) if GPUS else (64,):
        for dtype in (torch.bfloat16, torch.float32) if GPUS else (torch.float32,):
            for tokens in (300, 4000) if GPUS else (40,):
                torch.manual_seed(0)
                config = AutoConfig.for_model(
                    "llama", vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim, tie_word_embeddings=False,
                )  # fmt: skip
                made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=utils.PACK_ATTENTION)
                policy = grpo.Policy(made.to(world.device))
                prompt = utils.Prompt(0, tuple(range(50, 90)), "", ("7",), ("gsm8k",))
                ids = torch.randint(0, 1024, (4, tokens)).tolist()
                rollouts = [
                    grpo.Rollout(prompt, i // 2, i, x, [0.0] * len(x), [True] * len(x), [0] * len(x), "stop")
                    for i, x in enumerate(ids)
                ]
                results = []
                for packs in ([[[r] for r in rollouts[:1]]], [grpo.make_pieces(rollouts, 2**62)]):
                    batch = grpo.make_batch(packs, world.device)
                    logprobs = policy(batch, 1.0)[0][batch.response_mask][:tokens]  # of the first response
                    policy.zero_grad()
                    logprobs.sum().backward()
                    grad = torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.grad is not None])
                    results.append((logprobs.detach().float(), grad))
                (a, ga), (b, gb) = results
                off = float((a - b).abs().mean() / a.abs().mean())
                turn = float((ga - gb).norm() / ga.norm())
                most = (0.03, 0.1) if dtype == torch.bfloat16 else (1e-4, 1e-3)
                fine = off < most[0] and turn < most[1]
                case = f"head {head_dim} {str(dtype)[6:]} {4 * tokens + 39} tokens"
                print(f"{case}: logprobs {off:.1e}, gradient {turn:.1e} {'ok' if fine else 'DIFFERENT'}", flush=True)


def head() -> None:
    """check_head's process: a line for each dtype."""
    device = torch.device("cuda" if GPUS else "cpu")
    vocabulary, hidden, tokens = (152064, 3584, 6144) if GPUS else (2048, 64, 300)
    for dtype, most in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)) if GPUS else ((torch.float32, 1e-6),):
        torch.manual_seed(0)
        x = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), device=device)
        g, h = torch.randn(2, tokens, device=device)
        results, seconds = [], []

        def work(compiled: bool) -> list[torch.Tensor]:
            chunk = grpo.LOGPROB_CHUNK * (3 if compiled else 1)
            logprobs, entropy = grpo.HeadLogprobs.apply(x, weight, targets, 0.9, chunk, compiled)  # noqa: B023
            gradients = torch.autograd.grad((g * logprobs + h * entropy).sum(), (x, weight))  # noqa: B023
            return [t.detach().float() for t in (logprobs, entropy, *gradients)]

        for compiled in (False, True):
            results.append(work(compiled))
            seconds.append(machine.best_seconds(lambda c=compiled: work(c)))  # noqa: B023
        off = max(float((b - a).norm() / a.norm()) for a, b in zip(*results, strict=True))
        fine = "ok" if off < most and (not GPUS or seconds[1] < seconds[0]) else "WRONG"
        times = f"{seconds[0] * 1e3:.3g} ms plain, {seconds[1] * 1e3:.3g} compiled"
        print(f"head {str(dtype)[6:]} {tokens} tokens: off by {off:.1e}, {times} {fine}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


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
        file = hour.out / f"{name}.json"
        found = json.loads(file.read_text()) if file.exists() else None
        word = "not made yet" if found is None else {True: "pass", False: "**FAIL**", None: "skipped"}[found["passed"]]
        said = found["said"].replace("|", "\\|").replace("\n", " ") if found else (check.__doc__ or "")
        lines.append(f"| {name} | {word} | {found['seconds'] if found else 0:.0f} | {said} |")
        for key, value in (found["figures"] if found else {}).items():
            figures.append(f"| {name} | {key} | {value if isinstance(value, str) else f'{value:.4g}'} |")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_hour", help="directory (runs/gpu_hour)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, transformers' sampling: to try this program")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), help="these checks, also when they passed before")
    parser.add_argument("--kernels", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--head", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    if options.kernels or options.head:
        kernels(out) if options.kernels else head()
        return 0
    if not GPUS and not options.tiny:
        raise SystemExit("gpu_hour.py: no GPU is visible to torch; --tiny tries the program itself on a CPU")
    out.mkdir(parents=True, exist_ok=True)
    hour = Hour(out, options.tiny)

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        for name, check in CHECKS.items():
            file = out / f"{name}.json"
            passed = file.exists() and json.loads(file.read_text())["passed"] is not False
            if name not in options.only if options.only else passed:
                continue
            print(f"{name}: {check.__doc__}", flush=True)
            start = time.monotonic()
            try:
                found = check(hour)
            except Exception as error:  # the next check may still work
                found = Found(False, f"{type(error).__name__}: {error}"[:300])
            replace(file, json.dumps(vars(found) | {"seconds": time.monotonic() - start}))
            word = {True: "pass", False: "FAIL", None: "skipped"}[found.passed]
            print(f"    {word}: {found.said}", flush=True)
            write_page(hour)
        shutil.rmtree(out / "models", ignore_errors=True)  # gigabytes, made again in seconds
    except KeyboardInterrupt:
        hour.stop()
        print(f"\nstopped: the same command goes on. So far: {write_page(hour)}")
        return 130
    results = [
        json.loads((out / f"{name}.json").read_text())["passed"] for name in CHECKS if (out / f"{name}.json").exists()
    ]
    counts = [results.count(kind) for kind in (True, False, None)]
    print("{} passed, {} failed, {} skipped: {}".format(*counts, write_page(hour)))
    return 1 if False in results else 0


if __name__ == "__main__":
    raise SystemExit(main())
