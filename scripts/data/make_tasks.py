"""Write the tasks of the studies: short questions whose answers are numbers, as train.jsonl and eval.jsonl.

    python scripts/data/make_tasks.py [--out data/tasks] [--tasks largest sort ...] [--seed 1]

Each task has 320 rows to train on and 64 others to evaluate on. No question comes twice, nor with its numbers in
another order, so that no question of eval.jsonl has its answer in train.jsonl. The rows to train on name the verifier
`learned`, which a study points at a verifier of its own (--remap_verifier learned=gsm8k). The rows to evaluate on name
the true verifier, so that a reward that never sees a label is still judged by the labels.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data.make_addition import ROOT, write_splits
from scripts.data.make_products import EXAMPLES

TRAIN_ROWS = 320
EVAL_ROWS = 64
MOST_DRAWS = 100_000  # of questions, for the rows of a task
LEARNED = "learned"  # the verifier that rows to train on name


@dataclass(frozen=True)
class Question:
    """A question and its answer."""

    text: str
    answer: str
    numbers: tuple[int, ...]  # two questions with the same ones are the same question
    others: tuple[str, ...] = ()  # answers to other questions about the numbers: what may be mistaken for the answer


def one_of_three(rng: random.Random, text: str, place: int) -> Question:
    """A question that asks for one of three numbers: the one at this place of their ascending order."""
    numbers = rng.sample(range(1, 100), 3)
    listed = ", ".join(map(str, numbers))
    others = sorted(numbers)
    answer = others.pop(place)
    return Question(text.format(listed), str(answer), tuple(sorted(numbers)), tuple(map(str, others)))


def largest(rng: random.Random) -> Question:
    return one_of_three(rng, "Which is the largest of {}? Give only the number.", 2)


def smallest(rng: random.Random) -> Question:
    return one_of_three(rng, "Which is the smallest of {}? Give only the number.", 0)


def middle(rng: random.Random) -> Question:
    return one_of_three(rng, "Which of {} is between the other two? Give only the number.", 1)


def odd(rng: random.Random) -> Question:
    answer = rng.randrange(1, 50, 2)
    evens = rng.sample(range(2, 50, 2), 2)
    numbers = [answer, *evens]
    rng.shuffle(numbers)
    listed = ", ".join(map(str, numbers))
    text = f"Which of {listed} is odd? Give only the number."
    return Question(text, str(answer), tuple(sorted(numbers)), tuple(map(str, evens)))


def sums(rng: random.Random) -> Question:
    a = rng.randint(1, 30)
    b = rng.randint(1, 30)
    return Question(f"What is {a} + {b}? Give only the number.", str(a + b), (min(a, b), max(a, b)))


def differences(rng: random.Random) -> Question:
    a = rng.randint(1, 40)
    b = rng.randint(0, a)
    return Question(f"What is {a} - {b}? Give only the number.", str(a - b), (a, b))


def products(rng: random.Random) -> Question:
    a = rng.randint(2, 9)
    b = rng.randint(1, 99)
    return Question(f"What is {a} * {b}? Give only the number.", str(a * b), (min(a, b), max(a, b)))


def remainders(rng: random.Random) -> Question:
    a = rng.randint(1, 99)
    b = rng.randint(2, 6)
    text = f"What is the remainder of {a} divided by {b}? Give only the number."
    return Question(text, str(a % b), (a, b))


def sort(rng: random.Random) -> Question:
    numbers = rng.sample(range(1, 21), 3)
    listed = ", ".join(map(str, numbers))
    ordered = sorted(numbers)
    answer = ", ".join(map(str, ordered))
    falling = ", ".join(map(str, reversed(ordered)))
    text = f"Sort {listed} from small to large. Give only the numbers."
    return Question(text, answer, tuple(ordered), (falling, listed))


def last(rng: random.Random) -> Question:
    number = rng.randint(1000, 9999)
    *others, answer = str(number)
    return Question(f"What is the last digit of {number}? Give only the digit.", answer, (number,), tuple(others))


def second(rng: random.Random) -> Question:
    number = rng.randint(1000, 9999)
    first_digit, answer, *others = str(number)
    text = f"What is the second digit of {number}? Give only the digit."
    return Question(text, answer, (number,), (first_digit, *others))


def third(rng: random.Random) -> Question:
    number = rng.randint(1000, 9999)
    first_digit, second_digit, answer, last_digit = str(number)
    text = f"What is the third digit of {number}? Give only the digit."
    return Question(text, answer, (number,), (first_digit, second_digit, last_digit))


def repeated(rng: random.Random) -> Question:
    answer, *others = rng.sample(range(1, 21), 3)
    numbers = [answer, answer, *others]
    rng.shuffle(numbers)
    listed = ", ".join(map(str, numbers))
    text = f"Which number comes twice in {listed}? Give only the number."
    return Question(text, str(answer), tuple(sorted(numbers)), tuple(map(str, others)))


def largest_digit(rng: random.Random) -> Question:
    digits = rng.sample("0123456789", 4)
    number = "".join(digits)
    answer = max(digits)
    others = [digit for digit in digits if digit != answer]
    text = f"Which is the largest digit of {number}? Give only the digit."
    return Question(text, answer, (int(number),), tuple(others))


def reverse(rng: random.Random) -> Question:
    digits = rng.sample("123456789", 4)
    number = "".join(digits)
    answer = number[::-1]
    turned = number[1:] + number[0]
    return Question(f"Write {number} backwards. Give only the number.", answer, (int(number),), (number, turned))


def calculator(rng: random.Random) -> Question:
    a = rng.randint(13, 99)  # 12 * 34 is in the examples
    b = rng.randint(13, 99)
    return Question(f"What is {a} * {b}?", str(a * b), (min(a, b), max(a, b)))


@dataclass(frozen=True)
class Task:
    """How a question is drawn, the verifier of its answer, and the turns (role, text) before it. Without turns of its
    own a task that `shows_one` has a question with its answer there, as a model of 135M parameters needs it."""

    draw: Callable[[random.Random], Question]
    verifier: str = "gsm8k"
    turns: Sequence[tuple[str, str]] = ()
    shows_one: bool = True


TASKS = {
    "largest": Task(largest),
    "smallest": Task(smallest),
    "middle": Task(middle),
    "odd": Task(odd),
    "sums": Task(sums),
    "differences": Task(differences),
    "products": Task(products),
    "remainders": Task(remainders),
    "sort": Task(sort, verifier="puzzle"),
    "last": Task(last, shows_one=False),  # of the fruit fly
    "largest_digit": Task(largest_digit, shows_one=False),  # of the fruit fly
    "second": Task(second),
    "third": Task(third),
    "repeated": Task(repeated),
    "reverse": Task(reverse),
    "calculator": Task(calculator, turns=EXAMPLES),  # a call of the tool calculator answers it
}


def make_row(question: Question, verifier: str, turns: Sequence[tuple[str, str]] = ()) -> dict:
    """The row of a question, after turns (role, text) that show what is asked for."""
    messages = [{"role": role, "content": text} for role, text in (*turns, ("user", question.text))]
    return {"messages": messages, "ground_truth": question.answer, "dataset": verifier}


def make_task(name: str, out: Path, seed: int = 1) -> Path:
    """Write the rows of a task to out/name."""
    task = TASKS[name]
    rng = random.Random(f"{seed} {name}")
    turns = task.turns
    shown: tuple[int, ...] = ()
    if task.shows_one and not turns:
        example = task.draw(random.Random(name))
        turns = (("user", example.text), ("assistant", example.answer))
        shown = example.numbers

    drawn: dict[tuple[int, ...], Question] = {}
    for _ in range(MOST_DRAWS):
        question = task.draw(rng)
        if question.numbers == shown:
            continue
        drawn.setdefault(question.numbers, question)
        if len(drawn) == TRAIN_ROWS + EVAL_ROWS:
            break
    else:
        raise ValueError(f"{name}: {MOST_DRAWS} draws gave only {len(drawn)} different questions")
    questions = list(drawn.values())
    eval_rows = [make_row(question, task.verifier, turns) for question in questions[:EVAL_ROWS]]
    train_rows = [make_row(question, LEARNED, turns) for question in questions[EVAL_ROWS:]]
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
