"""Write the data of the demo: "Which is the largest of 21, 58, 93?"

400 train and 64 eval questions about three different numbers of two digits. No three numbers are asked about twice, in
whatever order, so that no eval question has its answer among the train questions. A prompt begins with an example,
which shows the form of an answer: what is left to learn is which number it is. The largest stands first, second and
third in turn, so that no place is a better guess, not even in a batch that is taken in the order of the file.

    python scripts/data/make_largest.py    # to data/largest
"""

import argparse
import random
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data.make_addition import ROOT, make_row, write_splits

TRAIN_ROWS = 400
EVAL_ROWS = 64


def largest_row(numbers: list[int]) -> dict:
    turns = [
        ("system", "Answer with a number."),  # shorter than the chat template's own
        ("user", "Which is the largest of 71, 14, 38?"),
        ("assistant", "71"),
        ("user", f"Which is the largest of {', '.join(map(str, numbers))}?"),
    ]
    return make_row(turns, max(numbers))


def make_largest(out: Path, seed: int = 1) -> Path:
    rng = random.Random(seed)
    drawn: dict[frozenset[int], dict] = {}
    while len(drawn) < TRAIN_ROWS + EVAL_ROWS:
        numbers = rng.sample(range(10, 100), 3)
        if numbers.index(max(numbers)) == len(drawn) % 3:  # each place in turn
            drawn.setdefault(frozenset(numbers), largest_row(numbers))
    rows = list(drawn.values())
    return write_splits(out, {"eval": rows[:EVAL_ROWS], "train": rows[EVAL_ROWS:]})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    make_largest(ROOT / "data" / "largest")
