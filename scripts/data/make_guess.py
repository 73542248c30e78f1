"""Write the rows of the guessing game of scripts/train/debug/guess.py: a number from 1 to 12 is to be found.

    python scripts/data/make_guess.py [--high 12] [--plain] [--out data/guess] [--seed 1]

Before the question stands a whole game, as a model of 135M parameters needs it to play at all; --plain leaves it out.
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


def make_row(number: int, high: int, plain: bool) -> dict:
    """The row of a number. The game that it shows is of 1 to 12, whatever `high` is."""
    question = "I think of a number from 1 to {}. What is your guess? Answer with one number only."
    texts = [question.format(high)]
    if not plain:
        texts = [question.format(HIGH), *SHOWN, f"Right. {texts[0]}"]
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "env_config": {"number": number, "high": high}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--high", type=int, default=HIGH)
    parser.add_argument("--plain", action="store_true", help="show no game before the question")
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "guess")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    numbers = {
        "train": [rng.randint(1, args.high) for _ in range(TRAIN_ROWS)],
        "eval": EVAL_ROWS * list(range(1, args.high + 1)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for split, drawn in numbers.items():
        lines = [json.dumps(make_row(number, args.high, args.plain)) + "\n" for number in drawn]
        (args.out / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
