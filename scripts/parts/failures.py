"""A reward or an environment that crashes on every call ends the run, and so does a reward file that scores nothing.

Such a crash is a defect of a file, and never of a response: a run that went on would save the model that it started
with. Where a share of the calls fails, their samples are missing and the run goes on. A function that returns None on
every call has perhaps lost its `return`: that is an error if nothing else scores, and a warning otherwise.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import rewards

LEAST_CALLS = 8  # that must have crashed: fewer may be rows with a label that nothing can score
WORKED: set[str] = set()  # verifiers and environments with a call that did not crash, since this process started
CRASHES: Counter[str] = Counter()  # of verifiers
NONES: Counter[str] = Counter()  # of functions of --reward_file: how often one returned None, "does not apply"


def check(metrics: dict[str, float]) -> None:
    """Look at a step's metrics over all ranks. Raises UserError for a verifier or environment that has only crashed."""
    for metric, value in metrics.items():
        folder, _, rest = metric.partition("/")
        if folder == "reward":
            note_verifier(rest, value)
        if folder == "env" and rest.endswith("/crash_rate"):
            name = rest.removesuffix("/crash_rate")
            if value < 1:
                WORKED.add(name)
            if name not in WORKED:
                refuse(f"environment {name}", name)
    for name, number in CRASHES.items():
        if number >= LEAST_CALLS and name not in WORKED:
            refuse(f"verifier {name}", name)
    for name, number in NONES.items():
        if number >= LEAST_CALLS and name not in WORKED:
            problem = f'returned None, which means "does not apply", for all of {number} responses'
            rewards.need(WORKED != set(), f"--reward_file: {name} {problem}: nothing can be learned")
            rewards.warn_once(name, "None", problem)


def note_verifier(count: str, value: float) -> None:
    """Take in a metric reward/NAME_STATUS, the number of verifications with a status."""
    name, _, status = count.rpartition("_")
    if status == "answer":  # no_answer is a verdict, too
        name = name.removesuffix("_no")
    own = name in rewards.VERIFIERS and name not in rewards.BUILT_IN
    if status == "crash":
        CRASHES[name] += int(value)
    elif status == "answer" and own:
        NONES[name] += int(value)
    elif status in ("ok", "answer", "timeout") and value > 0:
        WORKED.add(name)


def refuse(what: str, name: str) -> None:
    """Raise UserError with the words of the first crash. Those of a reward file have its line."""
    problem = "rank 0 has the words of the first crash"
    for (who, status), words in rewards.WARNED.items():
        if status == "crash" and Path(who).stem == name:
            problem = words
    raise rewards.UserError(f"{what} crashed on every call, nothing can be learned: {problem}")


def dump_batches(mini_batches: Sequence[Sequence[Any]], path: Path) -> None:
    """Save the grpo.Batches of a step whose gradient was not finite, as dicts of their fields, for torch.load."""
    dumped = []
    for mini_batch in mini_batches:
        for batch in mini_batch:
            pieces = None if batch.layout is None else batch.layout.pieces
            dumped.append(vars(batch) | {"layout": pieces, "rollouts": None})
    torch.save(dumped, path)
