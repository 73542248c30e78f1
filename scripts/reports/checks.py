"""What a practitioner would look at first in a run's metrics: checks with their numbers and thresholds."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.reports import intervals
from scripts.reports.common import CORRECT, GAP

Rows = list[dict[str, Any]]  # of metrics.jsonl
Check = dict[str, Any]
# schedules that rise, at most once, and fall; with another learning rate a resumed run may rise again
ONE_PEAK = ("linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt")


def check(name: str, fine: bool, numbers: str, threshold: str) -> Check:
    """Whether the run is fine, the numbers that say so, and when it would not be."""
    return {"name": name, "fine": bool(fine), "numbers": numbers, "threshold": threshold}


def series(rows: Rows, name: str) -> list[float]:
    """The finite values of a metric over the training steps."""
    return [row[name] for row in rows if row["training_step"] > 0 and row.get(name) is not None]


@dataclass
class Ends:
    """The values of a metric in the first and in the last fifth of the steps that have it, and their means."""

    early: np.ndarray
    late: np.ndarray

    @property
    def first(self) -> float:
        return float(self.early.mean())

    @property
    def last(self) -> float:
        return float(self.late.mean())


def ends(rows: Rows, name: str) -> Ends | None:
    """The first and the last fifth of a metric, None without a value."""
    values = np.array(series(rows, name), float)
    if not len(values):
        return None
    count = max(1, len(values) // 5)
    return Ends(values[:count], values[-count:])


def near_best(rows: Rows, args: dict[str, Any], share: float = 0.8) -> bool:
    """Whether the last scores are at least this share of the maximum, which is that of right answers. From 0.8 on a low
    entropy, groups in which all are right, and steps without a gradient are what was asked for."""
    best = args.get("verification_reward")
    scores = ends(rows, "objective/scores")
    return bool(best and scores and scores.last >= share * best)


def check_learning(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Whether the score has risen: over training, and on prompts that were held out."""
    scores = ends(rows, "objective/scores")
    if scores and len(scores.early) > 1:
        error = math.sqrt((scores.early.var(ddof=1) + scores.late.var(ddof=1)) / len(scores.early))
        rise = scores.last - scores.first
        fine = rise > 2 * error or near_best(rows, args, 0.9)
        numbers = f"{scores.first:.3g} -> {scores.last:.3g}, a rise of {rise:.2g} with a standard error of {error:.2g}"
        yield check("score", fine, numbers, "no rise of 2 standard errors, and not near the maximum")

    evaluations = [intervals.held_out(row, args.get("eval_pass_at_k", 1)) for row in rows]
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


def check_audit(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Whether what the reward pays for is what a second verifier accepts."""
    if not series(rows, "objective/audit_reward"):
        return
    from scripts.parts import audit  # and torch

    earned = ends(rows, audit.REWARD)
    audited = ends(rows, audit.AUDIT)
    if earned and audited:
        numbers = f"reward {earned.first:.3g} -> {earned.last:.3g}, audit {audited.first:.3g} -> {audited.last:.3g}"
        found = audit.parted(rows, args.get("verification_reward", 0.0))
        threshold = "reward not down, audit not up, 3 errors and 0.15 of the maximum further apart"
        yield check("reward and audit", not found, found or numbers, threshold)


def check_policy(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Entropy, clipping, KL and lengths: how far the policy has moved."""
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


def check_gap(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Learner against engine."""
    gap = ends(rows, f"{GAP}_mean")
    if not gap:
        return
    dtype = args.get("model_dtype")
    most = 5e-5 if dtype == "float32" else 0.05
    age = max(series(rows, "val/num_steps_off_policy"), default=0)
    stale = f", tokens up to {age:.2g} updates old" if age else ""
    numbers = f"{gap.first:.2g} -> {gap.last:.2g} nats{stale}"
    yield check("logprob gap", gap.last <= most, numbers, f"last > {most:g} ({dtype})")
    yield check("gap growth", gap.last <= max(3 * gap.first, 1e-5), numbers, "last > 3 x first and > 1e-5")


def check_groups(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Which groups have a gradient, and which rollouts were left out."""
    prompts = ends(rows, "batch/total_prompts")
    sampled = sum(series(rows, "batch/total_prompts")) * args.get("num_samples_per_prompt_rollout", 1)
    kinds = {"solved": ("solved groups", "right: too easy"), "zero": ("hopeless groups", "at 0: too hard")}
    for kind, (name, hint) in kinds.items():
        filtered = ends(rows, f"batch/filtered_prompts_{kind}")
        if prompts and sampled and filtered:
            share = filtered.last / max(prompts.last, 1)
            fine = share <= 0.5 or (kind == "solved" and near_best(rows, args))
            yield check(name, fine, f"last {share:.1%} (all rollouts {hint})", "last > 50 %")
    kept = ends(rows, "other/real_batch_size_ratio")
    if kept:
        fine = kept.last >= 0.3 or near_best(rows, args)
        yield check("rollouts with a gradient", fine, f"last {kept.last:.1%}", "last < 30 %")
    missing = series(rows, "batch/missing_rewards")
    if missing:
        yield check("missing rewards", sum(missing) == 0, f"{sum(missing):.0f} of {sampled:.0f} rollouts", "> 0")
    left_out = series(rows, "batch/groups_filtered")
    others = args.get("active_sampling") or args.get("mask_truncated_completions") or any(missing)
    if left_out and not others:
        constant = sum(series(rows, "batch/filtered_prompts"))
        numbers = f"{left_out[-1]:.0f} groups, {constant:.0f} of them constant"
        yield check("groups left out", left_out[-1] <= constant, numbers, "more than are constant")


def check_updates(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Optimizer steps and their gradients."""
    bad = series(rows, "optim/nonfinite_updates")
    if bad:
        yield check("non-finite updates", sum(bad) == 0, f"{sum(bad):.0f} in {len(bad)} steps", "> 0")
    skipped = series(rows, "optim/skipped_steps")
    if skipped:
        fine = sum(skipped) / len(skipped) <= 0.1 or near_best(rows, args)
        yield check("steps without an update", fine, f"{sum(skipped):.0f} of {len(skipped)} steps", "> 10 %")
    norms = series(rows, "optim/grad_norm")
    if len(norms) > 2 and np.median(norms) > 0:
        ratio = max(norms) / np.median(norms)
        numbers = f"largest {max(norms):.3g} = {ratio:.1f} x median"
        yield check("gradient spikes", ratio <= 10, numbers, "> 10 x median")


def check_order(rows: Rows, args: dict[str, Any]) -> Iterator[Check]:
    """Whether data and learning rate go on from step to step, also over a resume, and the evaluation does not fall."""
    epochs = series(rows, "epoch")
    if len(epochs) > 1:
        standing = sum(after <= before for before, after in itertools.pairwise(epochs))
        numbers = f"{epochs[0]:.3g} -> {epochs[-1]:.3g}"
        yield check("prompts go on", standing == 0, numbers, "epoch not above that of the step before")
    rates = series(rows, "lr")
    if rates and args.get("lr_scheduler_type") in ONE_PEAK:
        after_fall = False
        rises = 0
        for before, after in itertools.pairwise(rates):
            rises += after_fall and after > before * (1 + 1e-6)
            after_fall |= after < before * (1 - 1e-6)
        numbers = f"{rates[0]:.3g} -> {rates[-1]:.3g}"
        yield check("one peak of the learning rate", rises == 0, numbers, "lr rises again after it has fallen")
    accuracies = series(rows, f"eval/{CORRECT}")
    if len(accuracies) > 1:
        fine = accuracies[-1] >= max(accuracies) - 0.05
        numbers = f"best {max(accuracies):.3f}, last {accuracies[-1]:.3f}"
        yield check("evaluation falls", fine, numbers, "last < best - 0.05")


def check_run(rows: Rows, args: dict[str, Any]) -> list[Check]:
    """All checks whose metrics were recorded: whether the run learned, then warnings, then the others. First and last
    are the first and the last fifth of the steps."""
    holes = sorted({name for row in rows for name, value in row.items() if value is None})
    checks = [check("NaN or infinite metrics", not holes, ", ".join(holes[:6]) or "none", "any")]
    for ask in (check_policy, check_gap, check_groups, check_updates, check_order, check_audit):
        checks += ask(rows, args)
    return [*check_learning(rows, args), *sorted(checks, key=lambda check: check["fine"])]
