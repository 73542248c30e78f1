"""Write the addition data: "What is 8 + 2? Give only the number." for the 100 pairs of digits.

train.jsonl holds four fifths of the rows and eval.jsonl the rest. a + b and b + a are always on the same side, so that
no eval question has its answer among the train ones.

    python scripts/make_addition.py [--out data/addition] [--seed 1]
"""

import argparse
import json
import os
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVAL_ROWS = 20


def make_row(a: int, b: int) -> dict:
    question = f"What is {a} + {b}? Give only the number."
    # "gsm8k" picks the reward: it compares the last number of the answer with the ground truth
    return {"messages": [{"role": "user", "content": question}], "ground_truth": str(a + b), "dataset": "gsm8k"}


def make_addition(out: Path, seed: int = 1) -> Path:
    out = Path(out)
    rng = random.Random(seed)
    groups = [sorted({(a, b), (b, a)}) for a in range(10) for b in range(a, 10)]  # one row where a == b, else two
    rng.shuffle(groups)
    rows: dict[str, list[dict]] = {"eval": [], "train": []}
    for group in groups:
        split = "eval" if len(rows["eval"]) + len(group) <= EVAL_ROWS else "train"
        rows[split] += [make_row(a, b) for a, b in group]
    out.mkdir(parents=True, exist_ok=True)
    for split, split_rows in rows.items():
        rng.shuffle(split_rows)
        tmp = out / f".{split}.jsonl.tmp"
        tmp.write_text("".join(json.dumps(row) + "\n" for row in split_rows), encoding="utf-8")
        os.replace(tmp, out / f"{split}.jsonl")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "addition")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    out = make_addition(args.out, args.seed)
    for split in ("train", "eval"):
        n_rows = len((out / f"{split}.jsonl").read_text(encoding="utf-8").splitlines())
        print(f"{out / split}.jsonl: {n_rows} rows")


if __name__ == "__main__":
    main()
