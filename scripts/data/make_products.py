"""Write the data of the demo with a tool: "What is 964 * 494?", for a policy that may write <calc>964 * 494</calc>.

2000 train and 64 eval products of two numbers of three digits, no product twice, and no b * a where there is a * b. A
prompt begins with two examples: a sum without a call and a product with one, which a model of 135M parameters follows
now and then.

    python scripts/data/make_products.py    # to data/products
"""

import argparse
import random
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data.make_addition import ROOT, make_row, write_splits

TRAIN_ROWS = 2000
EVAL_ROWS = 64
EXAMPLES = [
    ("user", "What is 2 + 3?"),
    ("assistant", "5"),
    ("user", "What is 12 * 34?"),
    ("assistant", "<calc>12 * 34</calc>"),
    ("tool", "408"),
    ("assistant", "408"),
]


def make_products(out: Path, seed: int = 1) -> Path:
    rng = random.Random(seed)
    drawn: dict[tuple[int, int], dict] = {}
    while len(drawn) < TRAIN_ROWS + EVAL_ROWS:
        a = rng.randint(100, 999)
        b = rng.randint(100, 999)
        if (b, a) not in drawn:
            drawn[a, b] = make_row([*EXAMPLES, ("user", f"What is {a} * {b}?")], a * b)
    rows = list(drawn.values())
    return write_splits(out, {"eval": rows[:EVAL_ROWS], "train": rows[EVAL_ROWS:]})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    make_products(ROOT / "data" / "products")
