"""Score JSON lines {response, ground_truth, dataset} with the rewards of a run: one JSON result a line on stdout, and a
summary on stderr. A row may have num_tokens and prompt, for the verifiers that ask for them.

    python scripts/score.py CASES.jsonl
    python scripts/score.py CASES.jsonl --reward_file my_reward.py --timeout_s 30

Flags are those of the training scripts' rewards.
"""

import collections
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import rewards
from rewards import RewardFlags, UserError, need
from scripts.parts.rows import jsonl_rows


@dataclass(frozen=True, kw_only=True)
class CommandLine(RewardFlags):
    """Scores JSON lines {response, ground_truth, dataset}."""

    cases: tyro.conf.Positional[str]
    """The JSON lines file."""
    timeout_s: float = 10.0
    """Deadline of each row, seconds."""


def read_cases(path: str) -> list[rewards.RewardRecord]:
    """The records of a file. Raises ValueError naming the row."""
    need(Path(path).is_file(), f"{path}: no such file")
    rows = list(jsonl_rows(Path(path)))
    for i, row in rows:
        where, wanted = f"{path} row {i}", {"response", "ground_truth", "dataset"}
        missing = wanted - row.keys() if isinstance(row, dict) else wanted
        need(not missing, f"{where}: no {', '.join(sorted(missing))}")
        texts = isinstance(row["response"], str) and isinstance(row["dataset"], str)
        need(texts, f"{where}: response and dataset must be strings, one verifier a row")
        try:
            rewards.check_verifier(row["dataset"])
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
    columns = ("response", "ground_truth", "dataset", "num_tokens", "prompt")
    return [rewards.RewardRecord(**{c: row[c] for c in columns if c in row}) for _, row in rows]


def main() -> None:
    flags = tyro.cli(CommandLine, use_underscores=True)
    try:
        rewards.configure(flags, connect=True)
        records = read_cases(flags.cases)
    except ValueError as error:  # a UserError, or a row that is not JSON
        raise SystemExit(f"score.py: {error}") from None
    start = time.monotonic()
    results = rewards.score(records, flags.timeout_s)
    for result in results:
        value = None if math.isnan(result.score) else result.score  # JSON has no nan
        print(json.dumps({k: v for k, v in (vars(result) | {"score": value}).items() if k != "details" or v}))
    scores = [result.score for result in results if result.status not in rewards.MISSING]
    counts = ", ".join(f"{status} {n}" for status, n in collections.Counter(r.status for r in results).items())
    mean = sum(scores) / len(scores) if scores else math.nan
    seconds = time.monotonic() - start
    print(f"{len(results)} rows ({counts}) | mean score {mean:.4f} | {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
