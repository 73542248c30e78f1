"""What the reports share: the files of a run, means over its steps, tables in markdown, pictures without a display."""

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORRECT = "objective/verifiable_correct_rate"
GAP = "debug/vllm_vs_local_logprob_diff"
WAITING = "time/trainer_waiting_for_data"  # only grpo_fast.py has it
TRAINING = "time/training, waiting for data included"
PHASES = ("generation", "reward", "training", "weight_sync", "eval", "saving")
PHASES_FAST = ("trainer_waiting_for_data", "training", "gather", "eval", "saving")  # generation runs beside them
NOTHING = "—"  # in a table, where a run has no value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file, none without the file. A last line that a kill cut short is left out."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. Raises ValueError when there are none."""
    rows = list(read_lines(run / "metrics.jsonl"))
    if not rows:
        raise ValueError(f"{run}: no metrics.jsonl with a row in it")
    return rows


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, {} without the file."""
    return json.loads(path.read_text()) if path.exists() else {}


def phases(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The parts of a step that follow one another."""
    return PHASES_FAST if any(WAITING in row for row in rows) else PHASES


class Run:
    """A run's directory. Means are over the steps after step `after`. Raises ValueError without metrics."""

    def __init__(self, path: Path, label: str, after: int = 1):
        self.path = path
        self.label = label
        self.after = after
        self.args = read_json(path / "args.json")
        self.environment = read_json(path / "environment.json")
        steps = {row["training_step"]: row for row in read_metrics(path)}
        self.start = steps.pop(0, {})  # an evaluation before the first step
        self.rows = dict(sorted(steps.items()))
        for row in self.rows.values():
            if row.get("time/training") is not None:
                row[TRAINING] = row["time/training"] + (row.get(WAITING) or 0.0)
        wandb_id = path / "wandb_id.txt"
        self.wandb = wandb_id.read_text().strip() if wandb_id.exists() else NOTHING

    def values(self, metric: str, after: int | None = None) -> list[float]:
        """The known values of the steps after step `after` (None: after self.after)."""
        skipped = self.after if after is None else after
        values = [row.get(metric) for step, row in self.rows.items() if step > skipped]
        return [value for value in values if value is not None]

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return statistics.fmean(values) if values else None

    def last(self, metric: str) -> float | None:
        values = self.values(metric, 0)
        return values[-1] if values else None

    def minutes(self) -> float | None:
        """From the start of the program to the end of its last compared step, summed over all --resume."""
        clock = self.values("time/from_scratch", 0)
        if not clock:
            return None
        ends = [now for now, following in zip(clock, clock[1:], strict=False) if following < now]
        return (sum(ends) + clock[-1]) / 60

    def commit(self) -> str:
        """The git commit in 12 characters, and whether there were uncommitted changes."""
        name = str(self.environment.get("git_commit", "?"))[:12]
        return f"{name} and changes" if self.environment.get("git_dirty") else name


def cell(value: float | None, digits: int) -> str:
    """A number for a table."""
    return NOTHING if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def table(head: list[str], rows: list[list[str]], text: tuple[int, ...] = (0,)) -> str:
    """A markdown table. The columns `text` are aligned to the left, the others to the right."""
    rule = ["---" if i in text else "---:" for i in range(len(head))]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, f"|{'|'.join(rule)}|")
    return "\n".join(lines)


def pyplot() -> Any:
    """matplotlib's pyplot, which needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows a program's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
