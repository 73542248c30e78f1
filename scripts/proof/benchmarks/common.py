"""What the benchmarks of scripts/proof/bench.py share: flags, clocks, ratios, random rollouts, the sums.

Lengths. Unless --lengths FILE.jsonl names rows of {prompt_tokens, response_tokens}, they are drawn from log-normals
fitted to the logs of the 7473 training rows of GSM8K in SmolLM2's tokens. The question has mean 4.04 and standard
deviation 0.345 (median 56), to which SmolLM2's chat template adds 30 tokens. The answer without its <<calculator>>
marks, with the end token, has mean 4.45 and standard deviation 0.434 (median 85). The quantiles of the fit are taken in
random order, so that a small batch has the spread of a large one. People wrote these answers. The responses of a policy
are often longer and spread wider, and padding then costs more than here.
"""

import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

THREAD_SETTINGS = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "KMP_BLOCKTIME", "LD_PRELOAD")}

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import numpy as np  # noqa: E402
import torch  # noqa: E402

import grpo  # noqa: E402
from scripts.data.make_addition import make_addition  # noqa: E402
from scripts.parts import machine  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
QUESTION = (4.04, 0.345)  # mean and standard deviation of the log of the tokens: see Lengths
ANSWER = (4.45, 0.434)
TEMPLATE_TOKENS = 30
WARMUP_STEPS = 2  # of a whole run, before those that count


@dataclass(frozen=True)
class BenchFlags:
    """Flags of bench.py. Any other flag is given to grpo.py and grpo_fast.py."""

    bench: tyro.conf.Positional[
        Literal[
            "compiled", "host", "learner", "loop", "rollout", "sync", "pipeline", "packing", "precision", "rewards",
            "startup", "tokens", "tools", "trl",
        ]
    ]  # fmt: skip
    """The benchmark. Any flag that is not listed here goes to grpo.py and grpo_fast.py."""
    model: str = str(ROOT / "models" / "SmolLM2-135M-Instruct")
    """Directory of the model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype. auto: the faster one on this machine."""
    repeat: int = 3
    """Rounds."""
    json: bool = False
    """Print one line of JSON and no tables."""
    samples: int = 8
    """learner, compiled, packing, rewards, tokens: responses per prompt."""
    lengths: str | None = None
    """learner, compiled, packing: .jsonl of {prompt_tokens, response_tokens}, the rows of a prompt adjacent."""
    pack_length: int = 2048
    """learner, compiled, packing: tokens of a pack."""
    seed: int = 1
    """learner, compiled, packing, rewards: seed of lengths, tokens and records."""
    groups: int = 64
    """tokens: groups in flight."""
    response_tokens: int = 2048
    """tokens, loop: length of each response."""
    running: int = 512
    """loop: requests that run at the same time."""
    prompts: int = 4
    """learner, compiled: prompts."""
    rows: int = 16
    """learner: rows of a padded micro-batch."""
    sequences: int = 100_000
    """packing: responses."""
    learners: tuple[int, ...] = (8, 64)
    """packing: counts of learners."""
    steps: int = 6
    """pipeline: measured steps of each of our runs; trl: of each run."""
    records: int = 10_000
    """rewards: gsm8k scores. math has a fifth as many, code a twentieth."""
    calls: int = 64
    """rewards: guidelines for the solver; tools: rollouts."""
    calls_in_turn: int = 4
    """rewards: how many of the guidelines are also asked one by one."""
    solver_tokens: int = 64
    """rewards: longest response of the solver."""
    results: str = str(ROOT / "runs" / "precision.jsonl")
    """precision: file of the finished runs."""
    against: str | None = None
    """startup: another checkout to measure in the same rounds."""
    sides: tuple[str, ...] = ()
    """startup: only the sides whose name contains one of these; trl: only these of its settings."""
    turns: int = 8
    """tools: turns of a rollout."""
    tool_seconds: float = 30.0
    """tools: seconds that the slow tool takes."""
    grpo_flags: tyro.conf.Suppress[tuple[str, ...]] = ()
    """All flags that are not listed here."""


class Result(NamedTuple):
    """What a benchmark found."""

    settings: dict[str, Any]
    sides: dict[str, dict[str, float]]  # a column of figures for each side
    ratios: dict[str, dict[str, Any]]  # see ratio


# --- Clocks and ratios ------------------------------------------------------------------------------------------------


Sides = Mapping[str, Callable[[], Any]]


def stopwatch(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def in_rounds(sides: Sides, repeat: int, warm_up: bool = True) -> dict[str, list[Any]]:
    """What each side returns in each of `repeat` rounds A B A B, after a round that does not count."""
    returned: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(repeat + warm_up):
        for name, work in sides.items():
            result = work()
            if number > 0 or not warm_up:
                returned[name].append(result)
    return returned


class Measured(NamedTuple):
    seconds: dict[str, list[float]]  # of each side in each round
    results: dict[str, Any]  # what the last call of each side returned


def side_by_side(sides: Sides, repeat: int, warm_up: bool = True) -> Measured:
    """Seconds of each side in each round, as in_rounds has them, and what its last call returned."""
    timed = {name: functools.partial(stopwatch, work) for name, work in sides.items()}
    seconds = {}
    results = {}
    for name, calls in in_rounds(timed, repeat, warm_up).items():
        seconds[name] = [passed for passed, _ in calls]
        results[name] = calls[-1][1]
    return Measured(seconds, results)


def ratio(ours: Sequence[float], other: Sequence[float], target: float | None = None) -> dict[str, Any]:
    """How many times faster (or smaller) `ours` is: ratio of the medians, and the range of the rounds' own ratios."""
    value = statistics.median(other) / statistics.median(ours)
    rounds = [b / a for a, b in zip(ours, other, strict=True)]
    met = None if target is None else value >= target
    return {"value": value, "min": min(rounds), "max": max(rounds), "target": target, "met": met}


def spread(seconds: Sequence[float], **amounts: float) -> dict[str, float]:
    """Median and range, and each amount per median second."""
    median = statistics.median(seconds)
    rates = {f"{name}_per_second": amount / median for name, amount in amounts.items()}
    return {"seconds": median, "min": min(seconds), "max": max(seconds)} | rates


def matrix_product(dtype: torch.dtype, device: Any) -> tuple[Callable[[], Any], float]:
    """A product of square matrices, whose speed stands for the machine's peak, and its floating-point operations."""
    size = 2048
    if torch.cuda.is_available():
        size = 8192
    elif dtype == torch.bfloat16 and machine.choose_dtype(grpo.Args())[0] == "float32":
        size = 256  # bfloat16 is emulated: a large product takes minutes
    left, right, out = torch.randn(3, size, size, device=device).to(dtype)
    return lambda: torch.mm(left, right, out=out), 2.0 * size**3


# --- Random rollouts --------------------------------------------------------------------------------------------------


class GroupLengths(NamedTuple):
    """Tokens of a prompt and of each of its responses."""

    prompt: int
    responses: list[int]


def fitted_lengths(rng: np.random.Generator, fit: tuple[float, float], count: int) -> np.ndarray:
    """Quantiles of a log-normal in random order, as numbers of tokens."""
    normal = statistics.NormalDist(*fit)
    logs = rng.permutation([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    return np.exp(logs).astype(int)


def draw_lengths(prompts: int, options: BenchFlags) -> list[GroupLengths]:
    """Lengths of `prompts` groups of --samples responses, from --lengths (again and again) or from the fit."""
    shape = (prompts, options.samples)
    if options.lengths:
        rows = [json.loads(line) for line in Path(options.lengths).read_text().splitlines()]
        asked = np.resize([row["prompt_tokens"] for row in rows], shape)[:, 0]
        answered = np.resize([row["response_tokens"] for row in rows], shape)
    else:
        rng = np.random.default_rng(options.seed)
        asked = TEMPLATE_TOKENS + fitted_lengths(rng, QUESTION, prompts)
        answered = fitted_lengths(rng, ANSWER, prompts * options.samples).reshape(shape)
    longest = options.pack_length // 2  # so that any response fits into a pack with its prompt
    asked = asked.clip(2, longest).tolist()
    answered = answered.clip(1, longest).tolist()
    return [GroupLengths(prompt, responses) for prompt, responses in zip(asked, answered, strict=True)]


def make_rollouts(lengths: Sequence[GroupLengths], vocab: int, seed: int) -> list[grpo.Rollout]:
    """Rollouts of random tokens. The engine's logprobs are -30, so rho, which is cut at 1, is exactly 1: the gradient
    is that of a bare policy gradient."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for i, group in enumerate(lengths):
        prompt_ids = tuple(rng.integers(0, vocab, group.prompt).tolist())
        prompt = utils.Prompt(i, prompt_ids, "", ("1",), ("gsm8k",))
        for j, length in enumerate(group.responses):
            ids = rng.integers(0, vocab, length).tolist()
            rollout = grpo.Rollout(prompt, i, j, ids, [-30.0] * length, [True] * length, [0] * length, "stop")
            rollout.advantage = 1.0 if j % 2 else -0.5
            rollouts.append(rollout)
    return rollouts


# --- Sums of two digits -----------------------------------------------------------------------------------------------

# "What is 8 + 2? Give only the number.": the task of all figures in scripts/proof/
SUMS = """--exp_name sums --output_dir runs --overwrite --seed 1
    --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --max_prompt_token_length 64
    --response_length 24 --pack_length 2048 --async_steps 0 --temperature 1.0 --learning_rate 1e-5
    --lr_scheduler_type constant --beta 0.0 --total_episodes 1280 --local_eval_every 10 --eval_on_step_0
    --save_freq -1 --vllm_enforce_eager --vllm_enable_prefix_caching --vllm_gpu_memory_utilization 0.4"""


def sums_flags(options: BenchFlags) -> list[str]:
    """The flags of a run on sums, then --model, --dtype and the flags of grpo.py that were given. Makes the data."""
    data = ROOT / "data" / "addition"
    if not (data / "train.jsonl").exists():
        make_addition(data)
    rows = ["--dataset_mixer_list", str(data / "train.jsonl"), "1.0"]
    rows += ["--dataset_mixer_eval_list", str(data / "eval.jsonl"), "1.0"]
    model = ["--model_name_or_path", options.model, "--model_dtype", options.dtype]
    return [*SUMS.split(), *rows, *model, *options.grpo_flags]


class Session(NamedTuple):
    """What a run on sums has in this process."""

    args: grpo.Args
    world: utils.World
    tokenizer: Any
    engine: Any


def start_engine(options: BenchFlags) -> Session:
    """A run on sums with vLLM in this process."""
    args = utils.parse_args(grpo.Args, sums_flags(options))
    world = utils.init_distributed()
    tokenizer = utils.load_tokenizer(args)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    return Session(args, world, tokenizer, utils.VLLMEngine(args, tokenizer, world, rollouts))


def run_or_exit(command: list[str], **how: Any) -> None:
    """Run a command at the root. Where it fails, exit with the end of its output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **how)
    if done.returncode:
        raise SystemExit(f"bench.py: {shlex.join(command)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}")


def mean_metrics(steps: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """The mean over steps of every metric that some step has; it is 0 in the others."""
    names = {name for step in steps for name, value in step.items() if value is not None}
    return {name: statistics.mean(step.get(name) or 0.0 for step in steps) for name in names}


def run_script(script: str, flags: Sequence[str], options: BenchFlags) -> dict[str, float]:
    """Mean metrics of the steps after the first WARMUP_STEPS of a whole run on sums."""
    sums = sums_flags(options)
    args = utils.parse_args(grpo.Args, sums)
    episodes = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout * (WARMUP_STEPS + options.steps)
    with tempfile.TemporaryDirectory() as directory:
        run = f"--exp_name bench --total_episodes {episodes} --local_eval_every -1 --no_eval_on_step_0".split()
        run_or_exit([sys.executable, script, *sums, "--output_dir", directory, *run, *flags])
        lines = (Path(directory) / "bench" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return mean_metrics([step for step in steps if step["training_step"] > WARMUP_STEPS])
