"""What the scripts that prepare data share: rows in, jsonl out.

A row is {"messages": [{role, content}, ...], "ground_truth": text, "dataset": verifier's name}, and "prompt", the same
list as messages. open-instruct reads the first three (`--dataset_mixer_list FILE.jsonl 1.0`). TRL's GRPOTrainer reads
prompt, and hands ground_truth and dataset to its reward functions by name: `load_dataset("json", data_files=FILE)`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.parts.rows import read_rows as read

Row = dict[str, Any]


def make_row(messages: list[dict[str, str]], ground_truth: Any, dataset: str | list[str]) -> Row:
    """One row in the shape above. A label that is no text is written as JSON; several verifiers stay lists of texts."""
    if isinstance(dataset, list) and len(dataset) == 1:
        dataset = dataset[0]
        if isinstance(ground_truth, list):
            ground_truth = ground_truth[0]
    if isinstance(dataset, list):
        label = [text_of(value) for value in ground_truth]
    else:
        label = text_of(ground_truth)
    return {"messages": messages, "ground_truth": label, "dataset": dataset, "prompt": messages}


def question_row(text: str, ground_truth: Any, dataset: str) -> Row:
    """The row of a prompt of one user turn."""
    return make_row([{"role": "user", "content": text}], ground_truth, dataset)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """(where, row) of a hub dataset (`org/name` or `org/name:config`), or of a local .jsonl, .parquet or directory."""
    try:
        yield from read(source, split)
    except ValueError as error:
        sys.exit(str(error))


def write(rows: list[Row], path: Path) -> None:
    """Write jsonl; a file that is there is whole.

    Where one row has several verifiers, each has lists: in a column of texts and lists `datasets` turns "3" into 3.
    """
    if not rows:
        sys.exit(f"{path}: no row is left to write")
    if any(isinstance(row["dataset"], list) for row in rows):
        rows = [with_lists(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
    print(f"{path}: {len(rows)} rows")


def with_lists(row: Row) -> Row:
    """The row with lists of labels and verifiers."""
    if isinstance(row["dataset"], list):
        return row
    return row | {"ground_truth": [row["ground_truth"]], "dataset": [row["dataset"]]}


def parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """With the flag that all these scripts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help=f"directory to write to (default: {out})")
    return parser
