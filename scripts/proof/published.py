"""Holds the paper of roofline.py and simulate.py against runs that others have published.

    python scripts/proof/published.py    a table: what was measured, the paper's range, whether it covers the figure

One run calibrates the slow end of roofline.py's range, CALIBRATION; all others check it. Every run is of another
program than this one, on another host. What is not covered is listed with its reason: the table is no proof of the
speed of this project, but it says how far the paper may be off.
"""

import functools
import heapq
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils
from scripts.proof import roofline, simulate

VERL = "veRL, Qwen2.5-7B, 8 H100"  # report "veRL Benchmark Report: GRPO + Qwen2.5-7B on GSM8K"
PRIME_RL = "prime-rl, H100"  # its repository, benchmarks/baselines of 15 January 2026
OPEN_INSTRUCT = "open-instruct, Olmo 3 7B"  # report "GRPO Large Test Script: Hybrid vs Non-Hybrid Comparison"
CALIBRATION = VERL

# Of VERL: tokens a GPU, prompt and response, responses and engines, sequences of a micro-batch, optimizer steps
TOKENS = 208_012
PROMPT = 92.98
RESPONSE = 232.04
RESPONSES = 5120
SEQUENCES = 40
UPDATES = 4
LONGEST = 1024
SEED = 1


QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {  # their config.json; Olmo 3 without its windows, which its run does not fill
    "Qwen3-0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Olmo-3-7B": {"vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 32, "tie_word_embeddings": False},
}


@functools.cache
def shape_of(name: str) -> roofline.Shape:
    """What roofline.py counts of a model."""
    from transformers import AutoConfig

    if name not in MODELS:
        return roofline.shape_of(name)
    architecture = "olmo2" if "Olmo" in name else "qwen3"
    return roofline.count_shape(AutoConfig.for_model(architecture, **MODELS[name]))


@dataclass(frozen=True)
class Figure:
    """A published figure, in seconds."""

    source: str
    what: str
    measured: float
    fast: float  # the paper's
    slow: float
    reason: str = ""  # why it is not covered

    @property
    def covered(self) -> bool:
        return self.fast <= self.measured <= self.slow


# --- Seconds on paper -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A learner's share of a step: `micro_batches` of `tokens` in sequences of `length`, of which `answered` tokens
    meet the head."""

    model: str
    gpu: str
    learners: int
    micro_batches: float
    tokens: float
    length: float
    answered: float
    optimizer_steps: int = 1
    compiled: bool = False

    def seconds(self, end: str, update: bool = True) -> float:
        """Of the update, or of a forward for logprobs. The head is not compiled: others did without."""
        shape = shape_of(self.model)
        gpu = roofline.GPUS[self.gpu]
        way = roofline.Way(compiled=self.compiled, speeds=roofline.ENDS[end])
        pairs = self.tokens * self.length / 2
        parts = roofline.seconds(shape, gpu, way, self.learners, self.tokens, pairs, self.answered, update)
        total = self.micro_batches * sum(parts.values())
        if update:
            total += self.optimizer_steps * roofline.optimizer_seconds(shape, gpu, way, self.learners)
        return total

    def figure(self, source: str, what: str, measured: float, update: bool = True, reason: str = "") -> Figure:
        fast = self.seconds("fast", update)
        slow = self.seconds("slow", update)
        return Figure(source, what, measured, fast, slow, reason)


def draw_lengths(mean: float, count: int, longest: int, sigma: float = 0.5) -> np.ndarray:
    """Log-normal lengths (count,), cut at the longest, which one of them has."""
    rng = np.random.default_rng(SEED)
    middle = math.log(mean) - sigma**2 / 2
    logarithms = middle + sigma * rng.standard_normal(count)
    lengths = np.rint(np.exp(logarithms))
    lengths = np.clip(lengths, 1, longest).astype(int)
    lengths[0] = longest
    return lengths


def generation_seconds(clocks: simulate.Clocks, lengths: np.ndarray, prompt: float, seats: int = 1024) -> float:
    """An engine's seconds for responses of these lengths, which all wait at the start; `seats` run at once."""
    queued = lengths.tolist()
    running: list[tuple[int, int]] = []  # (step at which it ends, tokens in the cache then)
    steps = 0
    cached = 0.0
    passed = 0.0
    while queued or running:
        while queued and len(running) < seats:
            length = queued.pop()
            heapq.heappush(running, (steps + length, length))
            cached += prompt
            passed += clocks.prefill * prompt
        count = running[0][0] - steps
        passed += clocks.steps(len(running), cached, count)
        steps += count
        cached += count * len(running)
        while running and running[0][0] <= steps:
            _, length = heapq.heappop(running)
            cached -= prompt + length
    return passed


# --- What was published -----------------------------------------------------------------------------------------------


def figures_of_verl() -> Iterator[Figure]:
    """105 steps of 1,024 x 5; ours are the means of its last step. Engines of 2 GPUs each; longest response 1,024."""
    length = PROMPT + RESPONSE
    tokens = SEQUENCES * length
    job = Job("Qwen2.5-7B", "h100", 8, TOKENS / tokens, tokens, length, SEQUENCES * RESPONSE, UPDATES)
    yield job.figure(VERL, "update_actor", 29.14)
    yield job.figure(VERL, "old_log_prob", 8.25, update=False)
    yield job.figure(VERL, "ref", 8.74, update=False)
    lengths = draw_lengths(RESPONSE, RESPONSES // 4, LONGEST)
    spans = []
    for end in roofline.ENDS:
        flags = utils.parse_args(simulate.Simulation, ["--clocks", end, "--vllm_tensor_parallel_size", "2"])
        clocks = simulate.paper_clocks(flags)
        spans.append(generation_seconds(clocks, lengths, PROMPT))
    yield Figure(VERL, "generate_sequences", 26.73, *spans)


RL_REASON = "SFT takes 1.28 for as much; RL makes entropies and waits for copies"


PRIME_RL_STEPS = (  # model, GPUs, tokens of a sequence, what, step_time
    ("Qwen3-0.6B", 1, 16384, "RL", 1.99, RL_REASON),
    ("Qwen3-0.6B", 1, 65536, "RL", 12.18, ""),
    ("Qwen3-0.6B", 1, 8192, "SFT", 0.62, ""),
    ("Qwen3-0.6B", 1, 16384, "SFT", 1.28, ""),
    ("Qwen3-4B", 8, 16384, "RL", 4.69, ""),
    ("Qwen3-4B", 8, 65536, "RL", 30.29, ""),
    ("Qwen3-4B", 8, 16384, "SFT", 5.01, ""),
)


def figures_of_prime_rl() -> Iterator[Figure]:
    """step_time of a step of 2 micro-batches a GPU, each one sequence, layers compiled and recomputed. Its
    MFU, 11.1 % at 0.6B and 16,384 tokens, is over a time in which it also writes weights to a disk: 2.75 s, not 1.99.
    """
    for model, gpus, length, what, measured, reason in PRIME_RL_STEPS:
        job = Job(model, "h100", gpus, 2, length, length, length, compiled=True)
        yield job.figure(PRIME_RL, f"{model}, {what}, {gpus} x 2 x {length:,} tokens", measured, reason=reason)


def figures_of_open_instruct() -> Iterator[Figure]:
    """Tokens of a step are its learner_tok/s_step times total_time: 304,138 in the fastest, 325,000 on average. Lengths
    are not published; H100 is an assumption."""
    for what, tokens, measured, reason in (
        ("training_time, least of 19", 304_138, 10.5, "may hold what learners waited for rollouts"),
        (
            "total_time, mean of 19 (on paper: the update)",
            325_000,
            52.3,
            "15.3 s are its weight sync; how long it waited for rollouts is not published",
        ),
    ):
        job = Job("Olmo-3-7B", "h100", 8, tokens / 8 / 20480, 20480, 650, 20480 * 0.75)
        yield job.figure(OPEN_INSTRUCT, what, measured, reason=reason)


def figures() -> list[Figure]:
    found = list(figures_of_verl())
    found += figures_of_prime_rl()
    found += figures_of_open_instruct()
    return found


def row(figure: Figure) -> str:
    """A row of the Markdown table."""
    use = f"no: {figure.reason}"
    if figure.source == CALIBRATION:
        use = "calibrates"
    elif figure.covered:
        use = "yes"
    seconds = f"{figure.measured:g} | {figure.fast:.3g} to {figure.slow:.3g}"
    return f"| {figure.source} | {figure.what} | {seconds} | {use} |"


def main() -> None:
    print("| source | figure | measured, s | on paper, s | covered |\n|---|---|---|---|---|")
    for figure in figures():
        print(row(figure), flush=True)


if __name__ == "__main__":
    main()
