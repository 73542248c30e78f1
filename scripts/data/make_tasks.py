"""Write the tasks of the studies: short questions whose answers are numbers, as train.jsonl and eval.jsonl.

    python scripts/data/make_tasks.py [--out data/tasks] [--tasks largest sort ...] [--seed 1]

Each task has 400 rows to train on and 64 others to evaluate on. No question comes twice, nor with its numbers in
another order, so that no question of eval.jsonl has its answer in train.jsonl. The rows to train on name the verifier
`learned`, which a study points at a verifier of its own (--remap_verifier learned=gsm8k). The rows to evaluate on name
the true verifier, so that a reward that never sees a label is still judged by the labels.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data.make_addition import ROOT, write_splits

TRAIN_ROWS = 400
EVAL_ROWS = 64
LEARNED = "learned"  # the verifier that rows to train on name


@dataclass(frozen=True)
class Question:
    """A question and its answer."""

    text: str
    answer: str
    numbers: tuple[int, ...]  # two questions with the same ones are the same question


def largest(rng: random.Random) -> Question:
    numbers = rng.sample(range(1, 100), 3)
    listed = ", ".join(map(str, numbers))
    text = f"Which is the largest of {listed}? Give only the number."
    return Question(text, str(max(numbers)), tuple(sorted(numbers)))


def sums(rng: random.Random) -> Question:
    a = rng.randint(1, 99)
    b = rng.randint(1, 99)
    return Question(f"What is {a} + {b}? Give only the number.", str(a + b), (min(a, b), max(a, b)))


def differences(rng: random.Random) -> Question:
    a = rng.randint(1, 40)
    b = rng.randint(0, a)
    return Question(f"What is {a} - {b}? Give only the number.", str(a - b), (a, b))


def products(rng: random.Random) -> Question:
    a = rng.randint(1, 30)
    b = rng.randint(1, 20)
    return Question(f"What is {a} * {b}? Give only the number.", str(a * b), (min(a, b), max(a, b)))


def remainders(rng: random.Random) -> Question:
    a = rng.randint(1, 99)
    b = rng.randint(2, 9)
    text = f"What is the remainder of {a} divided by {b}? Give only the number."
    return Question(text, str(a % b), (a, b))


def sort(rng: random.Random) -> Question:
    numbers = rng.sample(range(1, 100), 3)
    listed = ", ".join(map(str, numbers))
    answer = ", ".join(map(str, sorted(numbers)))
    return Question(f"Sort {listed} from small to large. Give only the numbers.", answer, tuple(sorted(numbers)))


@dataclass(frozen=True)
class Task:
    """How a question is drawn, and the verifier of its answer."""

    draw: Callable[[random.Random], Question]
    verifier: str = "gsm8k"


TASKS = {
    "largest": Task(largest),
    "sums": Task(sums),
    "differences": Task(differences),
    "products": Task(products),
    "remainders": Task(remainders),
    "sort": Task(sort, verifier="puzzle"),
}


def make_row(question: Question, verifier: str) -> dict:
    """The row of a question."""
    messages = [{"role": "user", "content": question.text}]
    return {"messages": messages, "ground_truth": question.answer, "dataset": verifier}


def make_task(name: str, out: Path, seed: int = 1) -> Path:
    """Write the rows of a task to out/name."""
    task = TASKS[name]
    rng = random.Random(f"{seed} {name}")
    drawn: dict[tuple[int, ...], Question] = {}
    while len(drawn) < TRAIN_ROWS + EVAL_ROWS:
        question = task.draw(rng)
        drawn.setdefault(question.numbers, question)
    questions = list(drawn.values())
    eval_rows = [make_row(question, task.verifier) for question in questions[:EVAL_ROWS]]
    train_rows = [make_row(question, LEARNED) for question in questions[EVAL_ROWS:]]
    return write_splits(out / name, {"eval": eval_rows, "train": train_rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "tasks")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name in args.tasks:
        path = make_task(name, args.out, args.seed)
        print(f"{path}: {TRAIN_ROWS} rows in train.jsonl, {EVAL_ROWS} in eval.jsonl")


if __name__ == "__main__":
    main()
