"""--audit_verifier: a second verifier, whose scores are logged and never trained on.

A policy that finds a hole in its verifier looks like one that learns: the reward rises. A verifier without that hole
tells the two apart. It scores the text that the rows' verifiers scored, with the same labels, after the update, in
training and in evaluations. Metrics are named as those of a verifier of the name `audit`. A response to a row of
several labels gets the sum of its scores, as `verifiable` is one.

Where the reward rises and the audit does not, the run says so once: see scripts/reports/checks.py.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import rewards
from rewards import need
from scripts.parts import user_files
from utils import STATUSES, Metrics, Rollout

NAME = "audit"  # in metrics

# --- Before the first step --------------------------------------------------------------------------------------------


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
    name = rewards.FLAGS.audit_verifier
    need(record.dataset.lower() != NAME, f"--audit_verifier {name}: rename the verifier {NAME}: metrics have its name")
    try:
        rewards.VERIFIERS[name.lower()].check(record)
    except Exception as error:  # whatever a library makes of such a label
        reason = f"{error}: name a verifier that can score all labels, or drop the flag"
        raise ValueError(f"--audit_verifier {name}: {reason}") from error


# --- Scores -----------------------------------------------------------------------------------------------------------


def note(rollouts: Sequence[Rollout], args: Any, metrics: Metrics) -> None:
    """Score rollouts that their own verifiers have scored. Fill `audit` of each, and add the metrics."""
    scored = [r for r in rollouts if r.results]
    waiting = [start(r, args.audit_verifier.lower()) for r in scored]
    for r, futures in zip(scored, waiting, strict=True):
        results = [future.result() for future in futures]
        r.audit = sum(result.score for result in results)
        note_results(results, metrics)
        if math.isnan(r.audit):
            continue
        metrics.add("objective/audit_reward", args.verification_reward * r.audit)
        metrics.add("objective/audit_correct_rate", float(r.audit > 0))
        metrics.add("objective/audit_solve_rate", float(r.audit >= len(results) - 1e-8))
        if r.verifiable > 0:
            metrics.add("objective/audit_refused_rate", float(r.audit <= 0))


def start(r: Rollout, verifier: str) -> list[Future[rewards.RewardResult]]:
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


def note_results(results: Sequence[rewards.RewardResult], metrics: Metrics) -> None:
    """How the verifications ended, and their seconds."""
    for result in results:
        metrics.sample(f"time/reward_{NAME}", [result.seconds])
        for status in STATUSES:
            metrics.count(f"reward/{NAME}_{status}", float(result.status == status))


# --- Reward and audit side by side ------------------------------------------------------------------------------------


class Watch:
    """The steps of a run so far, those before a resume included. It warns once. On rank 0."""

    def __init__(self, run_dir: Path):
        from scripts.reports.common import read_lines

        self.rows = list(read_lines(run_dir / "metrics.jsonl"))
        self.warned = False

    def see(self, metrics: dict[str, Any]) -> None:
        """Take in a step, and warn where reward and audit part."""
        from scripts.reports import checks

        self.rows.append(metrics)
        found = checks.parted(self.rows, rewards.FLAGS.verification_reward)
        if found and not self.warned:
            self.warned = True
            step = metrics["training_step"]
            advice = "the policy may earn its reward without solving the task: read responses that score high"
            print(f"WARNING: step {step}: reward and audit part, {found}: {advice}", flush=True)


WATCHES: dict[Path, Watch] = {}  # of the runs of this process, by directory


def watch(run_dir: Path, metrics: dict[str, Any]) -> None:
    """Look at a step's metrics, which are not in metrics.jsonl yet."""
    step = metrics["training_step"]
    if step <= 1 or run_dir not in WATCHES:
        WATCHES[run_dir] = Watch(run_dir)
    WATCHES[run_dir].see(metrics)
