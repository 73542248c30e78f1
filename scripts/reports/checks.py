"""What a practitioner would look at first in a run's metrics: checks with thresholds, and speed against its limits."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from scripts.reports import intervals
from scripts.reports.common import GAP

# schedules that rise, at most once, and fall; with another learning rate a resumed run may rise again
ONE_PEAK = ("linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt")
Rows = list[dict[str, Any]]  # of metrics.jsonl
REWARD = "objective/verifiable_reward"
AUDIT = "objective/audit_reward"
LEAST_STRETCH = 5  # steps of which a mean is taken, to tell whether reward and audit part
LEAST_GROWTH = 0.15  # of their difference, as a share of the highest reward


def series(rows: Rows, name: str) -> list[float]:
    """The finite values of a metric over the training steps."""
    return [row[name] for row in rows if row["training_step"] > 0 and row.get(name) is not None]


def fifths(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The values of a metric in the first and in the last fifth of the steps that have it."""
    values = np.array(series(rows, name), float)
    if not len(values):
        return None
    count = max(1, len(values) // 5)
    return values[:count], values[-count:]


def ends(rows: Rows, name: str) -> tuple[float, float] | None:
    """Means over the first and the last fifth of the steps that have the metric."""
    found = fifths(rows, name)
    return (float(found[0].mean()), float(found[1].mean())) if found else None


def near_best(rows: Rows, args: dict[str, Any], share: float = 0.8) -> bool:
    """Whether the last scores are at least this share of the maximum, which is that of right answers. From 0.8 on a low
    entropy, groups in which all are right, and steps without a gradient are what was asked for."""
    best = args.get("verification_reward")
    scores = fifths(rows, "objective/scores")
    return bool(best and scores and scores[1].mean() >= share * best)


def check_learning(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Whether the score has risen: over training, and on prompts that were held out."""
    scores = fifths(rows, "objective/scores")
    if scores and len(scores[0]) > 1:
        first, last = scores
        error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / len(first))
        rise = last.mean() - first.mean()
        fine = rise > 2 * error or near_best(rows, args, 0.9)
        numbers = f"{first.mean():.3g} -> {last.mean():.3g}, a rise of {rise:.2g} with a standard error of {error:.2g}"
        yield check("score", fine, numbers, "no rise of 2 standard errors, and not near the maximum")

    samples = args.get("eval_pass_at_k", 1)
    evaluations = [intervals.held_out(row, samples) for row in rows]
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


def rise(values: np.ndarray, start: int, width: int) -> tuple[float, float]:
    """The mean of the last `width` values less that of as many from `start` on, and its standard error."""
    first = values[start : start + width]
    last = values[-width:]
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / width)
    return float(last.mean() - first.mean()), error


def parted(rows: Rows, highest: float) -> str:
    """Where reward and audit part (--audit_verifier), in words; "" where they do not.

    The last fifth of the steps, five at least, is compared with each stretch of as many steps before it. They part if
    since one of these the mean reward has not fallen, the mean audit has not risen, and their difference has grown by
    more than 3 standard errors and more than 0.15 of `highest`, a right answer's reward. An audit that agrees with the
    reward never parts from it. In simulated runs of 40 steps of 64 rollouts, looked at after each step, an audit with
    Youden's J = 0.6, whose mistakes have nothing to do with the reward, gave a false alarm in 1 of 100 runs, one with
    J = 0.3 in 26; of the hacks 98 to 100 of 100 were seen.
    """
    both = [row for row in rows if row.get(REWARD) is not None and row.get(AUDIT) is not None]
    earned = np.array([row[REWARD] for row in both], float)
    audited = np.array([row[AUDIT] for row in both], float)
    width = max(LEAST_STRETCH, len(both) // 5)
    for start in range(0, len(both) - 2 * width + 1, width):
        reward_rise, _ = rise(earned, start, width)
        audit_rise, _ = rise(audited, start, width)
        growth, error = rise(earned - audited, start, width)
        if reward_rise >= 0 >= audit_rise and growth > max(3 * error, LEAST_GROWTH * highest):
            means = [values[start : start + width].mean() for values in (earned, audited)]
            means += [values[-width:].mean() for values in (earned, audited)]
            words = "reward {0:.3g} -> {2:.3g}, audit {1:.3g} -> {3:.3g}".format(*means)
            since = both[start]["training_step"]
            return f"{words} since step {since}"
    return ""


def check_audit(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Whether what the reward pays for is what a second verifier accepts."""
    earned = ends(rows, REWARD)
    audited = ends(rows, AUDIT)
    if not (earned and audited):
        return
    numbers = f"reward {earned[0]:.3g} -> {earned[1]:.3g}, audit {audited[0]:.3g} -> {audited[1]:.3g}"
    held_out = series(rows, f"eval/{AUDIT}")
    if held_out:
        numbers += f", held-out {held_out[0]:.3g} -> {held_out[-1]:.3g}"
    found = parted(rows, args.get("verification_reward", 0.0))
    threshold = "reward not down, audit not up, 3 errors and 0.15 of the maximum further apart"
    yield check("reward and audit", not found, found or numbers, threshold)


def check(name: str, fine: bool, numbers: str, threshold: str) -> dict[str, Any]:
    """A check: whether the run is fine, the numbers that say so, and when it would not be."""
    return {"name": name, "fine": bool(fine), "numbers": numbers, "threshold": threshold}


def check_policy(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    entropy = ends(rows, "policy/entropy_avg")
    if entropy:
        first, last = entropy
        fine = near_best(rows, args) or (last > 0.05 and last > first / 4)
        numbers = f"{first:.3g} -> {last:.3g} nats per token"
        yield check("entropy collapse", fine, numbers, "last < 0.05 or < first / 4, and the score not near its maximum")
    clipped = ends(rows, "policy/clipfrac_avg")
    if clipped:
        most = max(series(rows, "policy/clipfrac_avg"))
        fine = clipped[1] <= 0.1 and most <= 0.3
        yield check("clipped tokens", fine, f"last {clipped[1]:.2%}, most {most:.2%}", "last > 10 % or any > 30 %")


def check_lengths(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lengths = ends(rows, "val/sequence_lengths")
    if lengths:
        first, last = lengths
        fine = 0.5 <= last / max(first, 1e-9) <= 2
        numbers = f"{first:.1f} -> {last:.1f} tokens"
        yield check("length explosion", fine, numbers, "last > 2 x first, or < first / 2")
    stopped = ends(rows, "val/stop_rate")
    if stopped:
        limit = args.get("response_length", "?")
        numbers = f"last {1 - stopped[1]:.1%} (limit {limit} tokens)"
        yield check("truncated responses", stopped[1] >= 0.9, numbers, "last > 10 %")


def check_gap(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    gap = ends(rows, f"{GAP}_mean")
    if not gap:
        return
    first, last = gap
    dtype = args.get("model_dtype")
    most = 5e-5 if dtype == "float32" else 0.05
    age = max(series(rows, "val/num_steps_off_policy"), default=0)
    stale = f", tokens up to {age:.2g} updates old" if age else ""
    numbers = f"{first:.2g} -> {last:.2g} nats{stale}"
    yield check("logprob gap", last <= most, numbers, f"last > {most:g} ({dtype})")
    yield check("gap growth", last <= max(3 * first, 1e-5), numbers, "last > 3 x first and > 1e-5")


def missing_of(rows: Rows) -> list[float]:
    """Rollouts without a verdict, by step."""
    return series(rows, "batch/missing_rewards")


def check_groups(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    prompts = ends(rows, "batch/total_prompts")
    sampled = sum(series(rows, "batch/total_prompts")) * args.get("num_samples_per_prompt_rollout", 1)
    kinds = {"solved": ("solved groups", "right: too easy"), "zero": ("hopeless groups", "at 0: too hard")}
    for kind, (name, hint) in kinds.items():
        filtered = ends(rows, f"batch/filtered_prompts_{kind}")
        if prompts and sampled and filtered:
            share = filtered[1] / max(prompts[1], 1)
            fine = share <= 0.5 or (kind == "solved" and near_best(rows, args))
            yield check(name, fine, f"last {share:.1%} (all rollouts {hint})", "last > 50 %")
    kept = ends(rows, "other/real_batch_size_ratio")
    if kept:
        fine = kept[1] >= 0.3 or near_best(rows, args)
        yield check("rollouts with a gradient", fine, f"last {kept[1]:.1%}", "last < 30 %")
    left_out = series(rows, "batch/groups_filtered")
    others = args.get("active_sampling") or args.get("mask_truncated_completions") or any(missing_of(rows))
    if left_out and not others:
        constant = sum(series(rows, "batch/filtered_prompts"))
        numbers = f"{left_out[-1]:.0f} groups, {constant:.0f} of them constant"
        yield check("groups left out", left_out[-1] <= constant, numbers, "more than are constant")
    missing = missing_of(rows)
    if missing:
        numbers = f"{sum(missing):.0f} of {sampled:.0f} rollouts"
        yield check("missing rewards", sum(missing) == 0, numbers, "> 0")


def check_updates(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    bad = series(rows, "optim/nonfinite_updates")
    if bad:
        yield check("non-finite updates", sum(bad) == 0, f"{sum(bad):.0f} in {len(bad)} steps", "> 0")
    skipped = series(rows, "optim/skipped_steps")
    if skipped:
        fine = sum(skipped) / len(skipped) <= 0.1 or near_best(rows, args)
        yield check("steps without an update", fine, f"{sum(skipped):.0f} of {len(skipped)} steps", "> 10 %")
    kl = ends(rows, "objective/kl2_avg")
    if kl:
        fine = kl[1] <= 0.1 or not args.get("beta")
        yield check("KL to the reference", fine, f"last {kl[1]:.3g} nats per token", "last > 0.1, where beta > 0")
    norms = series(rows, "optim/grad_norm")
    if len(norms) > 2 and np.median(norms) > 0:
        ratio = max(norms) / np.median(norms)
        numbers = f"largest {max(norms):.3g} = {ratio:.1f} x median"
        yield check("gradient spikes", ratio <= 10, numbers, "> 10 x median")


def check_order(rows: Rows, args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Whether data and learning rate go on from step to step, also over a resume."""
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


def check_evaluations(rows: Rows) -> Iterator[dict[str, Any]]:
    accuracies = series(rows, "eval/objective/verifiable_correct_rate")
    if len(accuracies) > 1:
        fine = accuracies[-1] >= max(accuracies) - 0.05
        numbers = f"best {max(accuracies):.3f}, last {accuracies[-1]:.3f}"
        yield check("evaluation falls", fine, numbers, "last < best - 0.05")


def check_run(rows: Rows, args: dict[str, Any]) -> list[dict[str, Any]]:
    """All checks whose metrics were recorded: whether the run learned, then warnings, then the others. First and last
    are the first and the last fifth of the steps."""
    holes = sorted({name for row in rows for name, value in row.items() if value is None})
    checks = [
        *check_policy(rows, args),
        *check_lengths(rows, args),
        *check_gap(rows, args),
        *check_groups(rows, args),
        *check_updates(rows, args),
        *check_order(rows, args),
        *check_evaluations(rows),
        *check_audit(rows, args),
        check("NaN or infinite metrics", not holes, ", ".join(holes[:6]) or "none", "any"),
    ]
    return [*check_learning(rows, args), *sorted(checks, key=lambda check: check["fine"])]


class Speed:
    """A table of speeds against their limits. A row: what, mean over the steps after the first, limit, share of it."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.table: list[list[str]] = []

    def mean(self, name: str) -> float | None:
        values = series(self.rows, name)
        return float(np.mean(values[1:] or values)) if values else None

    def add(self, name: str, form: str, limit: str = "-", share: str = "-", over: float = 1.0) -> None:
        """A row, with its value over `over` in `share`. Without a value the row is left out."""
        value = self.mean(name)
        if value is not None:
            self.table.append([name, form.format(value), limit, share.format(value / over)])

    def add_always(self, name: str, limit: str) -> None:
        """A share of a limit. Without a value the row says so."""
        self.add(name, "{:.3f}", limit, "{:.1%}")
        if self.mean(name) is None:
            self.table.append([name, "not recorded", limit, "-"])


def floors(rows: Rows) -> list[list[str]]:
    """Mean speeds over the steps after the first, each with its floor or ceiling and the value against it."""
    speed = Speed(rows)
    copy = speed.mean("time/weight_sync_floor")
    if copy:
        speed.add("time/weight_sync", "{:.3g} s", f"{copy:.3g} s, a memory copy of the bytes", "{:.1f} x", copy)
    else:
        speed.add("time/weight_sync", "{:.3g} s", "not recorded")
    speed.add_always("val/engine_bandwidth_share", "1: memory bandwidth of a copy")
    speed.add_always("learner_mfu", "1: the matrix product measured at start")
    for name in ("val/learner_idle_share", "val/engine_idle_share"):
        speed.add(name, "{:.3f}", "0", "{:.1%} of the step")
    for name in ("learner_tokens_per_second_step", "val/actor_tokens_per_second", "val/response_tokens_per_second"):
        speed.add(name, "{:,.0f} tokens/s")

    engine = "val/engine_tokens_per_second"
    rate = speed.mean(engine)
    share = speed.mean("val/engine_bandwidth_share")
    if rate and share:
        most = rate / share
        speed.add(engine, "{:,.0f} tokens/s", f"{most:,.0f} tokens/s at the memory's bandwidth", "{:.1%}", most)
    else:
        speed.add(engine, "{:,.0f} tokens/s")
    return speed.table
