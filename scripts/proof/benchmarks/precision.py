"""Benchmark of what the policy's weights are rounded to: bench.py precision, which takes an hour."""

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import grpo
import utils
from scripts.parts import dither
from scripts.parts.head import HeadLogprobs
from scripts.proof.benchmarks.common import BenchFlags, Result, Session, ratio, start_engine


@dataclass(frozen=True)
class Arm:
    """What the policy computes with, in the learner's forward and backward and in the engine."""

    products: str = "float32"  # dtype of the matrix products: --model_dtype
    rounded: str = ""  # dtype to which the master weights are rounded, products in float32: only rounding differs
    dithered: bool = False  # the master weights start as --dither_master_weights has it
    float32_head: bool = False  # products of learner's and engine's head (arXiv:2506.13585, 2510.13786)
    weight_decay: float | None = None
    slow: bool = False  # a learning rate of 1e-6 for SLOW_STEPS steps, one seed

    @property
    def served(self) -> torch.dtype:
        """The dtype of the weights that the policy computes with."""
        return getattr(torch, self.rounded or self.products)


ARMS = {
    "float32": Arm(),
    "weights in bfloat16": Arm(rounded="bfloat16"),
    "weights in bfloat16, dithered": Arm(rounded="bfloat16", dithered=True),
    "weights in float16": Arm(rounded="float16"),
    "weight decay: float32": Arm(weight_decay=0.1),
    "weight decay: weights in bfloat16, dithered": Arm(rounded="bfloat16", dithered=True, weight_decay=0.1),
    "bfloat16 products": Arm(products="bfloat16"),
    "bfloat16 products, dithered": Arm(products="bfloat16", dithered=True),
    "bfloat16 products, dithered, float32 head": Arm(products="bfloat16", dithered=True, float32_head=True),
    "1e-6: float32": Arm(slow=True),
    "1e-6: weights in bfloat16": Arm(rounded="bfloat16", slow=True),
    "1e-6: weights in bfloat16, dithered": Arm(rounded="bfloat16", dithered=True, slow=True),
}
SEEDS = (1, 2, 3)
LEARNED = 0.9  # share of correct answers
MOST_STEPS = 40  # of a run that does not learn
SLOW_STEPS = 50
SHARES_AT = (1, 5, 20, 50)  # steps at which the changed weights are counted


def learned_at(correct: Sequence[float]) -> int | None:
    """The first step whose share of correct answers, mean of it and the two before, reaches LEARNED."""
    for step in range(3, len(correct) + 1):
        if statistics.mean(correct[step - 3 : step]) >= LEARNED:
            return step
    return None


# --- A run ------------------------------------------------------------------------------------------------------------


class RoundedWeights:
    """Float32 masters of weights: the optimizer steps on the masters, and the policy computes with rounded weights."""

    def __init__(self, weights: Sequence[torch.Tensor], dtype: torch.dtype, optimizer: Any):
        self.weights = weights
        self.dtype = dtype
        self.masters = [weight.clone() for weight in weights]
        self.round()
        optimizer.register_step_pre_hook(self.restore)
        optimizer.register_step_post_hook(self.round)

    @torch.no_grad()
    def restore(self, *_: Any) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    @torch.no_grad()
    def round(self, *_: Any) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.copy_(weight)
            weight.copy_(master.to(self.dtype))


@contextlib.contextmanager
def float32_head(engine: Any, policy: grpo.Policy) -> Generator[None]:
    """Products of the head in float32 in learner and engine, from the same weights and hidden states."""
    model = engine.worker.model_runner.model
    learner_logits = HeadLogprobs.logits
    engine_logits = model.compute_logits

    def exact(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
        return (hidden.float() @ weight.float().T).div_(temperature)

    def exact_in_engine(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        weight = utils.shard_of(policy.model.get_input_embeddings().weight).to(hidden.dtype)
        return hidden.float() @ weight.float().T

    HeadLogprobs.logits = staticmethod(exact)
    model.compute_logits = exact_in_engine
    try:
        yield
    finally:
        HeadLogprobs.logits = staticmethod(learner_logits)
        model.compute_logits = engine_logits


def changed_share(weights: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> float:
    """Share of the weights that are not as before."""
    changed = 0
    for weight, old in zip(weights, before, strict=True):
        changed += int((weight.to(old.dtype) != old).sum())
    return changed / sum(old.numel() for old in before)


@dataclass
class Trial:
    """What all runs have: an engine, a policy and the weights it starts each run with."""

    session: Session
    policy: grpo.Policy
    prompts: list[utils.Prompt]
    start: list[torch.Tensor]

    @classmethod
    def load(cls, options: BenchFlags) -> "Trial":
        session = start_engine(options)
        args = dataclasses.replace(session.args, dither_master_weights=False)
        policy = grpo.load_policy(args, session.world)
        start = [utils.shard_of(parameter).detach().clone() for parameter in policy.model.parameters()]
        prompts = utils.load_prompts("dataset_mixer_list", session.args, session.tokenizer)
        return cls(session, policy, prompts, start)

    @torch.no_grad()
    def reset_weights(self, dither_seed: int | None) -> list[torch.Tensor]:
        """The policy's weights as they were at the start, dithered where there is a seed."""
        weights = []
        for (name, parameter), value in zip(self.policy.model.named_parameters(), self.start, strict=True):
            weight = utils.shard_of(parameter).detach()
            weight.copy_(value)
            if dither_seed is not None:
                dither.dither(weight, utils.derive_seed(dither_seed, name))
            weights.append(weight)
        return weights

    def step(self, learner: grpo.Learner, state: dict, args: grpo.Args, step: int) -> tuple[float, float | None]:
        """A training step. Returns the share of correct answers and the logprob gap."""
        engine = self.session.engine
        world = self.session.world
        dtype = utils.DTYPES[args.model_dtype]
        engine.load_weights(utils.full_weights(self.policy, dtype), version=step)
        run: Any = SimpleNamespace(engine=engine, train_prompts=self.prompts, state=state, args=args, world=world)
        groups, sampled = grpo.sample_groups(run, utils.Timer())
        rollouts = grpo.trainable(groups, args)
        packs = grpo.pack_rollouts(rollouts, "shared", args.pack_length, 1, self.policy.pair_cost)[0]
        batches = grpo.micro_batches(packs, "shared", args, world.device)
        gap, _ = grpo.update(learner, [batches], args, world, utils.Metrics())
        right = [rollout.verifiable > 0 for group in sampled for rollout in group]
        return statistics.mean(right), gap.get("debug/vllm_vs_local_logprob_diff_mean")

    def run(self, name: str, seed: int) -> dict[str, Any]:
        """A training run of an arm: per step the share of correct answers, seconds, the logprob gap and, at SHARES_AT,
        the share of the weights that the policy computes with which are not those of the start."""
        arm = ARMS[name]
        args = dataclasses.replace(self.session.args, seed=seed, learning_rate=1e-6 if arm.slow else 1e-5)
        if arm.weight_decay is not None:
            args = dataclasses.replace(args, weight_decay=arm.weight_decay)
        weights = self.reset_weights(seed if arm.dithered else None)
        optimizer, scheduler = grpo.make_optimizer(self.policy, args)
        learner = grpo.Learner(self.policy, None, optimizer, scheduler)
        if arm.rounded:
            RoundedWeights(weights, arm.served, optimizer)
        before = [weight.to(arm.served, copy=True) for weight in weights]
        state = grpo.start_state()
        row: dict[str, Any] = {"arm": name, "seed": seed, "correct": [], "seconds": [], "gap": [], "changed": {}}
        with float32_head(self.session.engine, self.policy) if arm.float32_head else contextlib.nullcontext():
            for step in range(1, 1 + (SLOW_STEPS if arm.slow else MOST_STEPS)):
                start = time.perf_counter()
                correct, gap = self.step(learner, state, args, step)
                row["correct"].append(correct)
                row["seconds"].append(time.perf_counter() - start)
                row["gap"].append(gap)
                utils.shard_again(self.policy)
                if step in SHARES_AT:
                    row["changed"][str(step)] = changed_share(weights, before)
                counted = seed != SEEDS[0] or step >= 20  # shares of changed weights are taken from the first seed
                if learned_at(row["correct"]) and counted and not arm.slow:
                    break
        return row


# --- All runs ---------------------------------------------------------------------------------------------------------


def missing_runs(rows: Sequence[dict[str, Any]], dtype: str) -> list[tuple[str, int]]:
    """Arm and seed of the runs with products in `dtype` that are not yet among the rows."""
    done = {(row["arm"], row["seed"]) for row in rows}
    missing = []
    for seed in SEEDS:
        for name, arm in ARMS.items():
            wanted = arm.products == dtype and not (arm.slow and seed != SEEDS[0])
            if wanted and (name, seed) not in done:
                missing.append((name, seed))
    return missing


def describe_arm(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of an arm's runs."""
    ends = [learned_at(run["correct"]) for run in runs]
    steps = [end for end in ends if end]
    figures: dict[str, float] = {"runs": len(runs), "not learned": len(runs) - len(steps)}
    if steps:
        figures["steps"] = statistics.mean(steps)
        figures["least"] = min(steps)
        figures["most"] = max(steps)
        seconds = [sum(run["seconds"][:end]) for run, end in zip(runs, ends, strict=True) if end]
        figures["seconds"] = statistics.mean(seconds)
    figures["at the end"] = statistics.mean(share for run in runs for share in run["correct"][-3:])
    figures["gap"] = statistics.mean(gap for run in runs for gap in run["gap"] if gap)
    for step in SHARES_AT:
        changed = [run["changed"][str(step)] for run in runs if str(step) in run["changed"]]
        if changed:
            figures[f"changed {step}"] = statistics.mean(changed)
    return figures


def bench_precision(options: BenchFlags) -> Result:
    """Sums of two digits from one start model: steps and seconds until 0.9 of the sampled answers are right (mean of
    three steps), by arm (see ARMS) and seed.

    A finished run is a row of --results and is not done again, so the benchmark can be stopped and started again. Arms
    whose products have another dtype than --dtype are left to another call. Table and figure have all rows.
    """
    results = Path(options.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    missing = missing_runs(rows, options.dtype)
    trial = Trial.load(options) if missing else None
    for name, seed in missing:
        row = trial.run(name, seed)
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shares = " ".join(f"{share:.2f}" for share in row["correct"])
        print(f"{name}, seed {seed}: {shares}", file=sys.stderr)

    runs = {name: [row for row in rows if row["arm"] == name] for name in ARMS}
    runs = {name: of_arm for name, of_arm in runs.items() if of_arm}
    table: dict[str, dict[str, float]] = {}
    for name, of_arm in runs.items():
        for figure, value in describe_arm(of_arm).items():
            table.setdefault(figure, {})[name] = value
    ratios = {}
    ends = {name: [learned_at(run["correct"]) for run in of_arm] for name, of_arm in runs.items()}
    float32 = ends.get("float32", [])
    for name, steps in ends.items():
        comparable = len(steps) == len(float32) and None not in steps + float32
        if name != "float32" and comparable and not ARMS[name].slow:
            ratios[f"steps of float32 over those of: {name}"] = ratio(steps, float32, 1 / 1.2)
    return Result({"figure": str(draw_precision(runs, results))}, table, ratios)


def draw_precision(runs: dict[str, list[dict[str, Any]]], results: Path) -> Path:
    """Share of correct answers by step, the mean of the seeds and their range, of the arms that tell the story."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in runs if not ARMS[name].slow and not name.startswith("weight decay")]
    float32_products = [name for name in names if ARMS[name].products == "float32"]
    bfloat16_products = [name for name in names if ARMS[name].products == "bfloat16"]
    if "float32" in runs:
        bfloat16_products.insert(0, "float32")
    panels = {
        "weights alone are rounded, products in float32": float32_products,
        "bfloat16 products": bfloat16_products,
    }
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), constrained_layout=True, sharey=True)
    for axis, (title, shown) in zip(axes, panels.items(), strict=True):
        for name in shown:
            draw_curve(axis, name, [run["correct"] for run in runs[name]])
        axis.axhline(LEARNED, color="black", linewidth=0.5)
        axis.set(title=title, xlabel="step", ylabel="share of correct answers")
        axis.legend(fontsize=8, loc="lower right")
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def draw_curve(axis: Any, name: str, curves: Sequence[Sequence[float]]) -> None:
    """Mean and range of the runs that have reached a step."""
    steps = range(1, 1 + max(map(len, curves)))
    means = []
    lowest = []
    highest = []
    for step in steps:
        shares = [curve[step - 1] for curve in curves if len(curve) >= step]
        means.append(statistics.mean(shares))
        lowest.append(min(shares))
        highest.append(max(shares))
    (line,) = axis.plot(steps, means, label=name)
    axis.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.2, linewidth=0)
