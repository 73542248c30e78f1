"""What is read off a run of a study, fixed before its runs: the first row of a record has this table and its hash.

A curve is a run's values by step. `held_out` is the share of held-out questions answered right, greedily, by the true
verifier, at the steps of `evaluated`; the other lists have a value for each training step. A task may have metrics of
its own in these places, as a game has its score and the share of games won: see tasks.Task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ENDPOINTS = {
    "area": "primary: mean height of the curve of held-out accuracy (of a game: of its score), by trapezoids, over all "
    "steps; no run ends early",
    "steps": "first evaluated step whose held-out accuracy (score) is at least the target; the horizon without one",
    "tokens": "prompt and response tokens of the rollouts sampled until then",
    "seconds": "seconds of training steps until then, without start and evaluations",
    "final": "held-out accuracy (score) after the last step",
    "sampled": "share right (won) of the training rollouts of the last 3 steps, by the reward that trained",
    "kl": "KL to the start model at the last step, per response (k3)",
    "length": "tokens a response at the last step",
    "turns": "turns of the policy a rollout at the last step; 1 without an environment",
    "collapsed": "1 if the final held-out accuracy is more than 0.2 below the run's best",
}
HIGHER_IS_BETTER = ("area", "final", "sampled")
PRIMARY = "area"
MAY_LACK = ("kl", "entropy", "turns", "gap")  # values of a curve that a step may not have
COLLAPSE = 0.2
LAST_STEPS = 3


@dataclass
class Curve:
    """A run's values by step."""

    evaluated: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    informative: list[float] = field(default_factory=list)  # share of groups with a gradient


# Curve's field -> the metric of a run
METRICS = {
    "held_out": "eval/objective/verifiable_correct_rate",
    "sampled": "objective/verifiable_correct_rate",
    "tokens": "val/num_sampled_tokens",
    "seconds": "time/total",
    "kl": "objective/kl3",
    "entropy": "policy/entropy_avg",
    "length": "val/sequence_lengths",
    "turns": "val/turns",
    "gap": "debug/vllm_vs_local_logprob_diff_mean",
}


def curve_of(rows: Sequence[dict[str, Any]], measured: Mapping[str, str]) -> Curve:
    """The curve of a run from the rows of its metrics.jsonl. A metric that a step does not have is None. `measured`:
    the task's own metrics, by field."""
    curve = Curve()
    metrics = {**METRICS, **measured}
    held_out = metrics.pop("held_out")
    for row in rows:
        step = row["training_step"]
        if held_out in row:
            curve.evaluated.append(step)
            curve.held_out.append(row[held_out])
        if step == 0:
            continue
        for name, metric in metrics.items():
            getattr(curve, name).append(row.get(metric))
        groups = row["batch/total_prompts"]
        curve.informative.append(1 - row["batch/filtered_prompts"] / groups)
    return curve


def lacking_in(curve: Curve, measured: Mapping[str, str]) -> list[str]:
    """The metrics that a run had to have and has not, at a step or at all. `measured`: see curve_of."""
    names = {**METRICS, **measured}
    lacking = []
    for name, metric in names.items():
        values = getattr(curve, name)
        if name not in MAY_LACK and (not values or None in values):
            lacking.append(metric)
    return lacking


def area(curve: Curve) -> float:
    """Mean height of the held-out curve."""
    steps = np.array(curve.evaluated)
    return float(np.trapezoid(curve.held_out, steps) / (steps[-1] - steps[0]))


def first_step_at(curve: Curve, target: float) -> int | None:
    """The first evaluated step with at least this held-out accuracy. None: it was never reached. 0: the start model
    has reached it already."""
    for step, accuracy in zip(curve.evaluated, curve.held_out, strict=True):
        if accuracy >= target:
            return step
    return None


def endpoints(curve: Curve, target: float) -> dict[str, float | None]:
    """The endpoints of a run. One that never reaches the target counts its whole horizon, one that is there before its
    first step counts 0. Without a reference policy there is no KL: None."""
    reached = first_step_at(curve, target)
    if reached is None:
        reached = curve.evaluated[-1]
    steps = int(reached)  # a float in a curve of a record
    final = curve.held_out[-1]
    fall = max(curve.held_out) - final
    last_sampled = curve.sampled[-LAST_STEPS:]
    turns = curve.turns or [None]  # rows of before have none

    values: dict[str, float | None] = {}
    values["area"] = area(curve)
    values["steps"] = float(steps)
    values["tokens"] = float(sum(curve.tokens[:steps]))
    values["seconds"] = float(sum(curve.seconds[:steps]))
    values["final"] = final
    values["sampled"] = float(np.mean(last_sampled))
    values["kl"] = curve.kl[-1]
    values["length"] = curve.length[-1]
    values["turns"] = turns[-1] or 1.0
    values["collapsed"] = float(fall > COLLAPSE)
    return values
