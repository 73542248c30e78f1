"""Write the tasks of the fly: short questions about the digits of a number, as train.jsonl and eval.jsonl.

    python scripts/data/make_tasks.py    # to data/tasks

Each task has 320 rows to train on and 64 others to evaluate on. No number comes twice, so that no question of
eval.jsonl has its answer in train.jsonl. The rows to train on name the verifier `learned`, which a run points at a
verifier of its own (--remap_verifier learned=gsm8k). The rows to evaluate on name the true verifier, so that a reward
that never sees a label is still judged by the labels.
"""

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data.make_addition import ROOT, make_row, write_splits

TRAIN_ROWS = 320
EVAL_ROWS = 64


class Question(NamedTuple):
    """A question about the digits of a number, and its answer."""

    text: str
    answer: str
    number: int


def last(rng: random.Random) -> Question:
    number = rng.randint(1000, 9999)
    return Question(f"What is the last digit of {number}? Give only the digit.", str(number)[-1], number)


def largest_digit(rng: random.Random) -> Question:
    number = "".join(rng.sample("0123456789", 4))
    text = f"Which is the largest digit of {number}? Give only the digit."
    return Question(text, max(number), int(number))


TASKS: dict[str, Callable[[random.Random], Question]] = {"last": last, "largest_digit": largest_digit}


def make_task(name: str, out: Path) -> Path:
    """Write the rows of a task to out/name."""
    rng = random.Random(f"1 {name}")
    drawn: dict[int, Question] = {}
    while len(drawn) < TRAIN_ROWS + EVAL_ROWS:
        question = TASKS[name](rng)
        drawn.setdefault(question.number, question)
    rows: dict[str, list[dict]] = {"eval": [], "train": []}
    for i, question in enumerate(drawn.values()):
        split = "eval" if i < EVAL_ROWS else "train"
        verifier = "gsm8k" if split == "eval" else "learned"
        rows[split].append(make_row([("user", question.text)], question.answer, verifier))
    return write_splits(out / name, rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for task in TASKS:
        make_task(task, ROOT / "data" / "tasks")
