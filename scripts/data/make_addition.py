"""Write the addition data: "What is 8 + 2? Give only the number."

    python scripts/data/make_addition.py    # to data/addition

Of the 100 pairs of digits train.jsonl holds four fifths and eval.jsonl the rest. Of two digits (scripts/proof/bench.py)
2000 train and 100 eval pairs of numbers from 1 to 99 are drawn, no pair twice. a + b and b + a are in the same file, so
that no eval question has its answer among the train questions.
"""

import argparse
import json
import os
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVAL_ROWS = 20  # of the 100 pairs of digits
DRAWN_TRAIN_ROWS = 2000  # of the pairs from 1 to 99
DRAWN_EVAL_ROWS = 100


def make_row(turns: list[tuple[str, str]], answer: str | int, verifier: str = "gsm8k") -> dict:
    """A row of (role, text) turns; gsm8k compares the last number of a response with the answer."""
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages, "ground_truth": str(answer), "dataset": verifier}


def sum_row(a: int, b: int) -> dict:
    return make_row([("user", f"What is {a} + {b}? Give only the number.")], a + b)


def all_pairs(rng: random.Random) -> dict[str, list[dict]]:
    """Every pair of digits."""
    groups = []
    for a in range(10):
        for b in range(a, 10):
            groups.append(sorted({(a, b), (b, a)}))  # one pair where a == b, else two
    rng.shuffle(groups)
    rows: dict[str, list[dict]] = {"eval": [], "train": []}
    for group in groups:
        split = "eval" if len(rows["eval"]) + len(group) <= EVAL_ROWS else "train"
        rows[split] += [sum_row(a, b) for a, b in group]
    return rows


def drawn_pairs(rng: random.Random) -> dict[str, list[dict]]:
    """Pairs of numbers from 1 to 99, without replacement, those of eval first."""
    split_of: dict[tuple[int, int], str] = {}
    while len(split_of) < DRAWN_EVAL_ROWS + DRAWN_TRAIN_ROWS:
        a = rng.randint(1, 99)
        b = rng.randint(1, 99)
        split = "eval" if len(split_of) < DRAWN_EVAL_ROWS else "train"
        mirrored = split_of.get((b, a), split)
        if mirrored == split:
            split_of.setdefault((a, b), split)

    rows: dict[str, list[dict]] = {"eval": [], "train": []}
    for (a, b), split in split_of.items():
        rows[split].append(sum_row(a, b))
    return rows


def write_splits(out: Path, splits: dict[str, list[dict]]) -> Path:
    """Write a jsonl file for each split into the directory `out`. A file that is there is whole."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        temporary = out / f".{split}.jsonl.tmp"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, out / f"{split}.jsonl")
        print(f"{out / split}.jsonl: {len(rows)} rows")
    return out


def make_addition(out: Path, seed: int = 1, digits: int = 1) -> Path:
    rng = random.Random(seed)
    splits = all_pairs(rng) if digits == 1 else drawn_pairs(rng)
    for rows in splits.values():
        rng.shuffle(rows)
    return write_splits(out, splits)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    make_addition(ROOT / "data" / "addition")
