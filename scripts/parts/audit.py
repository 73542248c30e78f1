"""--audit_verifier: a second verifier, whose scores are logged and never trained on.

A policy that finds a hole in its verifier looks like one that learns: the reward rises. A verifier without that hole
tells the two apart: its curve does not rise. It scores the text that the rows' verifiers scored, with the same labels,
after the update.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import rewards
from rewards import need
from scripts.parts import user_files

if TYPE_CHECKING:
    from utils import Metrics, Rollout

NAME = "audit"  # in metrics


def check_name(flags: Any) -> None:
    """Raises UserError for a name that no verifier has, or whose verifier judges the responses of a group together. The
    functions of --reward_file must have been loaded."""
    flag = f"--audit_verifier {flags.audit_verifier}"
    try:
        key = rewards.check_verifier(flags.audit_verifier)
    except ValueError as error:
        raise rewards.UserError(f"{flag}: {error}") from None
    function = user_files.FUNCTIONS.get(key)
    need(function is None or function.form != user_files.GROUP, f"{flag}: name one that takes a single response")


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
