"""--audit_verifier: a second verifier, whose scores are logged and never trained on.

A policy that finds a hole in its verifier looks like one that learns: the reward rises. A verifier without that hole
tells the two apart. It scores the text that the rows' verifiers scored, with the same labels, after the update. Where
the reward rises and the audit does not, the run says so once: see `parted`.
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import rewards
from rewards import need
from scripts.parts import user_files

if TYPE_CHECKING:
    from utils import Metrics, Rollout

NAME = "audit"  # in metrics
REWARD = "objective/verifiable_reward"
AUDIT = "objective/audit_reward"
LEAST_STRETCH = 5  # steps of which a mean is taken, to tell whether reward and audit part
LEAST_GROWTH = 0.15  # of their difference, as a share of the highest reward


def check_name(flags: Any) -> None:
    """Raises UserError for a name that no verifier has, or whose verifier cannot audit. The functions of --reward_file
    must have been loaded."""
    name = flags.audit_verifier
    flag = f"--audit_verifier {name}"
    try:
        key = rewards.check_verifier(name)
    except ValueError as error:
        reason = str(error).partition(" (")[0]  # then comes what would help a row
        raise rewards.UserError(f"{flag}: {reason}") from None
    function = user_files.FUNCTIONS.get(key)
    judges_groups = function is not None and function.form == user_files.GROUP
    need(not judges_groups, f"{flag}: it judges the responses of a group together; name one that takes a response")


def check_label(record: rewards.RewardRecord) -> None:
    """Raises ValueError if the audit can never score the label of a row's record."""
    name = rewards.SETTINGS.flags.audit_verifier
    need(record.dataset.lower() != NAME, f"--audit_verifier {name}: rename the verifier {NAME}: metrics have its name")
    try:
        rewards.VERIFIERS[name.lower()].check(record)
    except Exception as error:  # whatever a library makes of such a label
        reason = f"{error}: name a verifier that can score all labels, or drop the flag"
        raise ValueError(f"--audit_verifier {name}: {reason}") from error


def note(rollouts: "Sequence[Rollout]", args: Any, metrics: "Metrics") -> None:
    """Score rollouts that their own verifiers have scored. Fill `audit` of each, and add the metrics."""
    scored = [r for r in rollouts if r.results]
    waiting = [start(r, args.audit_verifier.lower()) for r in scored]
    for r, futures in zip(scored, waiting, strict=True):
        results = [future.result() for future in futures]
        r.audit = sum(result.score for result in results)
        for result in results:
            metrics.sample(f"time/reward_{NAME}", [result.seconds])
            for status in rewards.STATUSES:
                metrics.count(f"reward/{NAME}_{status}", float(result.status == status))
        if math.isnan(r.audit):
            continue
        metrics.add("objective/audit_reward", args.verification_reward * r.audit)
        metrics.add("objective/audit_correct_rate", float(r.audit > 0))
        metrics.add("objective/audit_solve_rate", float(r.audit >= len(results) - 1e-8))
        if r.verifiable > 0:
            metrics.add("objective/audit_refused_rate", float(r.audit <= 0))


def start(r: "Rollout", verifier: str) -> list[Future[rewards.RewardResult]]:
    """Start to score a rollout with each of its labels. Of several turns the last is scored."""
    own_turns = [turn["content"] for turn in r.turns if turn["role"] == "assistant"]
    text = [r.text, *own_turns][-1]
    length = int(r.mask.sum())
    futures = []
    for label in r.prompt.ground_truths:
        columns = r.prompt.reward_columns
        record = rewards.RewardRecord(text, label, verifier, length, r.prompt.conversation, columns)
        futures.append(rewards.submit(record, verifier=verifier))
    return futures


def rise(values: np.ndarray, start: int, width: int) -> tuple[float, float]:
    """The mean of the last `width` values less that of as many from `start` on, and its standard error."""
    first = values[start : start + width]
    last = values[-width:]
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / width)
    return float(last.mean() - first.mean()), error


def parted(rows: Sequence[dict[str, Any]], highest: float) -> str:
    """Where reward and audit part (--audit_verifier), in words; "" where they do not.

    The last fifth of the steps, five at least, is compared with each stretch of as many steps before it. They part if
    since one of these the mean reward has not fallen, the mean audit has not risen, and their difference has grown by
    more than 3 standard errors and more than 0.15 of `highest`, a right answer's reward. In simulated runs an audit
    with Youden's J = 0.6 gave a false alarm in 1 of 100, one with J = 0.3 in 26; 98 of 100 hacks were seen.
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


WARNED: set[Path] = set()  # directories of the runs that were told


def watch(run_dir: Path, metrics: dict[str, Any]) -> None:
    """Warn once where reward and audit part, with a step's metrics, which are not in metrics.jsonl yet."""
    if run_dir in WARNED:
        return
    log = run_dir / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [json.loads(line) for line in lines]
    found = parted([*rows, metrics], rewards.SETTINGS.flags.verification_reward)
    if found:
        WARNED.add(run_dir)
        advice = "the policy may earn its reward without solving the task: read responses that score high"
        print(f"WARNING: step {metrics['training_step']}: reward and audit part, {found}: {advice}", flush=True)
