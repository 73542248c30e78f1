"""Write the data of the demo with a tool: "What is 964 * 494?", for a policy that may write <calc>964 * 494</calc>.

2000 train and 64 eval products of two numbers of three digits, no product twice, a * b never on the other side of
b * a. A prompt begins with two examples: a sum without a call and a product with one, which a model of 135M parameters
follows now and then.

    python scripts/data/make_products.py [--out data/products] [--seed 1]
"""

import argparse
import json
import os
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN_ROWS, EVAL_ROWS = 2000, 64
EXAMPLES = [
    ("user", "What is 2 + 3?"),
    ("assistant", "5"),
    ("user", "What is 12 * 34?"),
    ("assistant", "<calc>12 * 34</calc>"),
    ("tool", "408"),
    ("assistant", "408"),
]


def make_row(a: int, b: int) -> dict:
    turns = [*EXAMPLES, ("user", f"What is {a} * {b}?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    # "gsm8k" picks the reward: it compares the last number of the last turn with the ground truth
    return {"messages": messages, "ground_truth": str(a * b), "dataset": "gsm8k"}


def make_products(out: Path, seed: int = 1) -> Path:
    out, rng = Path(out), random.Random(seed)
    drawn: dict[tuple[int, int], None] = {}
    while len(drawn) < TRAIN_ROWS + EVAL_ROWS:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if (b, a) not in drawn:
            drawn[a, b] = None
    pairs = list(drawn)
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in (("eval", pairs[:EVAL_ROWS]), ("train", pairs[EVAL_ROWS:])):
        tmp = out / f".{split}.jsonl.tmp"
        tmp.write_text("".join(json.dumps(make_row(a, b)) + "\n" for a, b in rows), encoding="utf-8")
        os.replace(tmp, out / f"{split}.jsonl")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "products")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    out = make_products(args.out, args.seed)
    print(f"{out}: {TRAIN_ROWS} rows in train.jsonl, {EVAL_ROWS} in eval.jsonl")


if __name__ == "__main__":
    main()
