"""Score JSON lines {response, ground_truth, dataset} with the rewards of a run.

Prints one JSON result per line on stdout and a summary on stderr. A row may also have num_tokens and prompt, for the
verifiers that need them.

    python scripts/score.py CASES.jsonl
    python scripts/score.py CASES.jsonl --reward_file my_reward.py --timeout_s 30
    python scripts/score.py CASES.jsonl --reward_file my_reward.py --in_process    # breakpoint() works in the file

The flags are the rewards' flags of the training scripts.
"""

import collections
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import rewards
from rewards import RewardFlags, RewardRecord, RewardResult, UserError, need
from scripts.parts import user_files, worker
from scripts.parts.rows import jsonl_rows


@dataclass(frozen=True, kw_only=True)
class CommandLine(RewardFlags):
    """Scores JSON lines {response, ground_truth, dataset}."""

    cases: tyro.conf.Positional[str]
    """The JSON lines file."""
    timeout_s: float = 10.0
    """Deadline of each row in seconds."""
    in_process: bool = False
    """Score the rows one after the other in this process, without a deadline: breakpoint() works, and an exception
    ends it with its traceback."""


COLUMNS = ("response", "ground_truth", "dataset", "num_tokens", "prompt")


def record_of(row: Any, where: str) -> RewardRecord:
    """The record of a row. Raises UserError with `where`."""
    need(isinstance(row, dict) and "response" in row, f"{where}: no response")
    own = list(user_files.FUNCTIONS)
    if "dataset" not in row and len(own) == 1:  # as a run takes such a row
        row = row | {"dataset": own[0]}
    need("dataset" in row, f'{where}: it names no reward, as "dataset": "NAME" does')
    row = {"ground_truth": None} | row
    texts = isinstance(row["response"], str) and isinstance(row["dataset"], str)
    need(texts, f"{where}: response and dataset must be strings, one verifier a row")
    try:
        rewards.check_verifier(row["dataset"])
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    columns = {name: row[name] for name in COLUMNS if name in row}
    return RewardRecord(**columns, columns=row)


def read_cases(path: str) -> list[RewardRecord]:
    """The records of a file. Raises ValueError that names the row."""
    need(Path(path).is_file(), f"{path}: no such file")
    return [record_of(row, f"{path} row {i}") for i, row in jsonl_rows(Path(path))]


def score_here(record: RewardRecord) -> RewardResult:
    """The result of a record, computed in this process. Raises whatever the verifier raises."""
    start = time.monotonic()
    extracted, found = rewards.VERIFIERS[rewards.check_verifier(record.dataset)].verify(record)
    scored: Any = found
    if isinstance(found, rewards.Job):
        scored = worker.load_work(found.work)(**found.arguments)()
    elif callable(found):
        scored = found()
    if isinstance(scored, dict):
        scored = rewards.Scored(**{"status": "ok"} | scored)
    if not isinstance(scored, rewards.Scored):
        scored = rewards.Scored(scored, "no_answer" if found is scored and extracted is None else "ok")
    return RewardResult(scored.score, scored.status, extracted, time.monotonic() - start, scored.details)


def as_json(result: RewardResult) -> str:
    """A result as a line of JSON, which has no nan: a missing score is null. Empty details are left out."""
    columns = dict(vars(result))
    if math.isnan(result.score):
        columns["score"] = None
    if not result.details:
        del columns["details"]
    return json.dumps(columns)


def summary(results: Sequence[RewardResult], seconds: float) -> str:
    """Rows by status, and the mean of the scores that are not missing."""
    scores = []
    rows = collections.Counter()
    for result in results:
        rows[result.status] += 1
        if result.status not in rewards.MISSING:
            scores.append(result.score)
    mean = sum(scores) / len(scores) if scores else math.nan
    statuses = ", ".join(f"{status} {count}" for status, count in rows.items())
    return f"{len(results)} rows ({statuses}) | mean score {mean:.4f} | {seconds:.1f} s"


def main() -> None:
    flags = tyro.cli(CommandLine, use_underscores=True)
    try:
        rewards.configure(flags, connect=True)
        records = read_cases(flags.cases)
    except ValueError as error:  # a UserError, or a row that is not JSON
        raise SystemExit(f"score.py: {rewards.printable(str(error))}") from None
    user_files.PRINTS.begin_step(sys.maxsize)
    start = time.monotonic()
    if flags.in_process:
        results = [score_here(record) for record in records]
    else:
        results = rewards.score(records, flags.timeout_s)
    for result in results:
        print(as_json(result))
    print(summary(results, time.monotonic() - start), file=sys.stderr)
    if results and all(result.status in rewards.MISSING for result in results):
        raise SystemExit("score.py: no row has a score")


if __name__ == "__main__":
    main()
