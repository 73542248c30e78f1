"""Write the rows of the guessing game of scripts/train/debug/guess.py: a number from 1 to 12 is to be found.

    python scripts/data/make_guess.py [--out data/guess] [--seed 1]

Before the question stands a whole game, as a model of 135M parameters needs it to play at all.
train.jsonl has 512 rows. eval.jsonl has four for each number: a game has nothing to hold out, but rollouts differ.
"""

import argparse
import json
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "guess")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    numbers = {
        "train": [rng.randint(1, HIGH) for _ in range(TRAIN_ROWS)],
        "eval": EVAL_ROWS * list(range(1, HIGH + 1)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for split, drawn in numbers.items():
        lines = [json.dumps(make_row(number)) + "\n" for number in drawn]
        (args.out / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
