"""Write the rows of the guessing game of scripts/train/debug/guess.py: a number from 1 to 30 is to be found.

    python scripts/data/make_guess.py [--high 30] [--out data/guess] [--seed 1]

train.jsonl has 512 rows, eval.jsonl has one for each number.
"""

import argparse
import json
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN_ROWS = 512


def make_row(number: int, high: int) -> dict:
    rule = f"I think of a number from 1 to {high}. Find it. I say whether it is higher or lower."
    content = f"{rule} Answer with one number only. What is your guess?"
    return {"messages": [{"role": "user", "content": content}], "env_config": {"number": number, "high": high}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--high", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "guess")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    numbers = {
        "train": [rng.randint(1, args.high) for _ in range(TRAIN_ROWS)],
        "eval": list(range(1, args.high + 1)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for split, drawn in numbers.items():
        lines = [json.dumps(make_row(number, args.high)) + "\n" for number in drawn]
        (args.out / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
