"""What a practitioner would look at first in a run's metrics: checks with their numbers and thresholds."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from scripts.reports import intervals
from scripts.reports.common import CORRECT, GAP

Rows = list[dict[str, Any]]  # of metrics.jsonl
Check = dict[str, Any]
NONFINITE = "optim/nonfinite_updates"


def check(name: str, fine: bool, numbers: str, threshold: str) -> Check:
    """Whether the run is fine, the numbers that say so, and when it would not be."""
    return {"name": name, "fine": bool(fine), "numbers": numbers, "threshold": threshold}


def series(rows: Rows, name: str) -> list[float]:
    """The finite values of a metric over the training steps."""
    return [row[name] for row in rows if row["training_step"] > 0 and row.get(name) is not None]


class Ends(NamedTuple):
    """Means of a metric over the first and the last fifth of the steps that have it, and their difference's error."""

    first: float
    last: float
    error: float  # NaN where a fifth is one step


def ends(rows: Rows, name: str) -> Ends | None:
    """The first and the last fifth of a metric, None without a value."""
    values = np.array(series(rows, name), float)
    if not len(values):
        return None
    count = max(1, len(values) // 5)
    early = values[:count]
    late = values[-count:]
    error = math.sqrt((early.var(ddof=1) + late.var(ddof=1)) / count) if count > 1 else math.nan
    return Ends(float(early.mean()), float(late.mean()), error)


def near_best(rows: Rows, args: dict[str, Any], share: float = 0.8) -> bool:
    """Whether the last scores are at least this share of the maximum, which is that of right answers. From 0.8 on a low
    entropy, groups in which all are right, and steps without a gradient are what was asked for."""
    best = args.get("verification_reward")
    scores = ends(rows, "objective/scores")
    return bool(best and scores and scores.last >= share * best)


def check_learning(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Whether the score has risen, over training and on prompts that were held out, and whether that fell again."""
    scores = ends(rows, "objective/scores")
    if scores and not math.isnan(scores.error):
        rise = scores.last - scores.first
        fine = rise > 2 * scores.error or near_best(rows, args, 0.9)
        numbers = f"{scores.first:.3g} -> {scores.last:.3g}, a rise of {rise:.2g} with an error of {scores.error:.2g}"
        yield check("score", fine, numbers, "no rise of 2 standard errors, and not near the maximum")

    evaluations = [intervals.held_out(row) for row in rows]
    known = [evaluation for evaluation in evaluations if evaluation is not None]
    if len(known) > 1:
        first = known[0]
        last = known[-1]
        error = math.hypot(first.error, last.error)
        rise = last.mean - first.mean
        fine = rise > 2 * error or last.mean >= 0.9
        numbers = (
            f"{first.mean:.3f} -> {last.mean:.3f} right, a rise of {rise:.2g} with a standard error of {error:.2g}; "
            f"the last is {last.low:.3f} to {last.high:.3f} (95 %, over {last.n} prompts)"
        )
        yield check("held-out score", fine, numbers, "no rise of 2 standard errors, and not near 1")
    accuracies = series(rows, f"eval/{CORRECT}")
    if len(accuracies) > 1:
        fine = accuracies[-1] >= max(accuracies) - 0.05
        numbers = f"best {max(accuracies):.3f}, last {accuracies[-1]:.3f}"
        yield check("evaluation falls", fine, numbers, "last < best - 0.05")


def check_policy(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Entropy, clipping, KL and lengths: how far the policy has moved, and how far from its engine it is."""
    entropy = ends(rows, "policy/entropy_avg")
    if entropy:
        fine = near_best(rows, args) or (entropy.last > 0.05 and entropy.last > entropy.first / 4)
        numbers = f"{entropy.first:.3g} -> {entropy.last:.3g} nats per token"
        yield check("entropy collapse", fine, numbers, "last < 0.05 or < first / 4, and the score not near its maximum")
    clipped = ends(rows, "policy/clipfrac_avg")
    if clipped:
        most = max(series(rows, "policy/clipfrac_avg"))
        numbers = f"last {clipped.last:.2%}, most {most:.2%}"
        yield check("clipped tokens", clipped.last <= 0.1 and most <= 0.3, numbers, "last > 10 % or any > 30 %")
    kl = ends(rows, "objective/kl2_avg")
    if kl:
        fine = kl.last <= 0.1 or not args.get("beta")
        yield check("KL to the reference", fine, f"last {kl.last:.3g} nats per token", "last > 0.1, where beta > 0")
    lengths = ends(rows, "val/sequence_lengths")
    if lengths:
        fine = 0.5 <= lengths.last / max(lengths.first, 1e-9) <= 2
        numbers = f"{lengths.first:.1f} -> {lengths.last:.1f} tokens"
        yield check("length explosion", fine, numbers, "last > 2 x first, or < first / 2")
    stopped = ends(rows, "val/stop_rate")
    if stopped:
        numbers = f"last {1 - stopped.last:.1%} (limit {args.get('response_length', '?')} tokens)"
        yield check("truncated responses", stopped.last >= 0.9, numbers, "last > 10 %")
    gap = ends(rows, f"{GAP}_mean")
    if gap:
        dtype = args.get("model_dtype")
        most = 5e-5 if dtype == "float32" else 0.05
        numbers = f"{gap.first:.2g} -> {gap.last:.2g} nats"
        yield check("logprob gap", gap.last <= most, numbers, f"last > {most:g} ({dtype})")


def check_groups(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Whether the prompts are too easy or too hard to learn from."""
    kinds = ("val/total_reward_groups", "batch/filtered_prompts_solved", "batch/filtered_prompts_zero")
    groups = ends(rows, "batch/total_prompts")
    found = [ends(rows, kind) for kind in kinds]
    if groups and all(found):
        useful, solved, hopeless = (kind.last / max(groups.last, 1) for kind in found)
        numbers = f"last {useful:.1%}; all right {solved:.1%}, all at 0 {hopeless:.1%}"
        yield check("groups with a gradient", useful >= 0.3 or near_best(rows, args), numbers, "last < 30 %")


def check_faults(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Rollouts without a reward, and updates that did not come about or were wild."""
    for name, metric in (("missing rewards", "batch/missing_rewards"), ("non-finite updates", NONFINITE)):
        counts = series(rows, metric)
        if counts:
            yield check(name, sum(counts) == 0, f"{sum(counts):.0f} in {len(counts)} steps", "> 0")
    norms = series(rows, "optim/grad_norm")
    if len(norms) > 2 and np.median(norms) > 0:
        ratio = max(norms) / np.median(norms)
        numbers = f"largest {max(norms):.3g} = {ratio:.1f} x median"
        yield check("gradient spikes", ratio <= 10, numbers, "> 10 x median")


def check_run(rows: Rows, args: dict[str, Any]) -> list[Check]:
    """All checks whose metrics were recorded: whether the run learned, then warnings, then the others. First and last
    are the first and the last fifth of the steps."""
    holes = sorted({name for row in rows for name, value in row.items() if value is None})
    checks = [check("NaN or infinite metrics", not holes, ", ".join(holes[:6]) or "none", "any")]
    for ask in (check_policy, check_groups, check_faults):
        checks += ask(rows, args)
    return [*check_learning(rows, args), *sorted(checks, key=lambda check: check["fine"])]
