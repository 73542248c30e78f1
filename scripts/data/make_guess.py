"""Write the rows of the guessing game of scripts/train/debug/guess.py: a number from 1 to 12 is to be found.

    python scripts/data/make_guess.py    # to data/guess

Before the question stands a whole game, as a model of 135M parameters needs it to play at all.
train.jsonl has 512 rows. eval.jsonl has four for each number: a game has nothing to hold out, but rollouts differ.
"""

import argparse
import random
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data.make_addition import ROOT, write_splits

TRAIN_ROWS = 512
EVAL_ROWS = 4  # of a number
HIGH = 12
SHOWN = ("6", "Higher: 7 to 12.", "10", "Lower: 7 to 9.", "8")


def make_row(number: int) -> dict:
    """The row of a number, after a whole game."""
    question = f"I think of a number from 1 to {HIGH}. What is your guess? Answer with one number only."
    texts = [question, *SHOWN, f"Right. {question}"]
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "env_config": {"number": number, "high": HIGH}}


def make_guess(out: Path, seed: int = 1) -> Path:
    rng = random.Random(seed)
    train = [make_row(rng.randint(1, HIGH)) for _ in range(TRAIN_ROWS)]
    evaluation = [make_row(number) for number in EVAL_ROWS * list(range(1, HIGH + 1))]
    return write_splits(out, {"train": train, "eval": evaluation})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    make_guess(ROOT / "data" / "guess")
