"""A record: a file of JSON lines that is only ever added to. Its first row is the study, fixed before any run.

study    task flags, steps, endpoints, commit, and a hash of all that
arm      an arm's name, script, flags, and the text of its diff
run      a task, arm and seed: curve, endpoints, hashes of code, data, model and final weights, packages, processor
failure  a run that ended with another exit status than 0, with the end of its log
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# what the runs of a study must share, beside the flags that an arm names
SAME = ("packages", "processor", "omp_num_threads")
SAME_IN_TASK = ("data_hash", "model_hash")


class RecordError(ValueError):
    """A record cannot be read or added to; the message says why and what to do."""


def hash_of(value: Any) -> str:
    """SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass
class Record:
    """The rows of a record, by kind."""

    study: dict[str, Any] = field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)  # (task, arm, seed)
    failures: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)

    def take(self, row: dict[str, Any]) -> None:
        """Add a row to the rows in memory. Raises RecordError for one that does not belong to this study."""
        kind = row["kind"]
        if kind == "study":
            if self.study and self.study["hash"] != row["hash"]:
                raise RecordError("the file has rows of two studies")
            self.study = row
        elif kind == "arm":
            known = self.arms.setdefault(row["name"], row)
            if known != row:
                name = row["name"]
                raise RecordError(
                    f"arm {name} was another one before: give this one another name, or write {name} alone to go on "
                    "with that one"
                )
        else:
            key = (row["task"], row["arm"], row["seed"])
            table = self.runs if kind == "run" else self.failures
            table[key] = row
            if kind == "run":
                self.failures.pop(key, None)


def complete_lines(path: Path) -> Iterator[str]:
    """The lines of a file, without a last one that a kill cut short."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def read(paths: list[Path]) -> Record:
    """The record in one file or in several files of the same study. Raises RecordError."""
    record = Record()
    for path in paths:
        for line in complete_lines(path):
            record.take(json.loads(line))
    if not record.study:
        raise RecordError(f"{', '.join(map(str, paths))}: no row of a study")
    check(record)
    return record


def check(record: Record) -> None:
    """Raises RecordError if runs differ in more than their arms say, or are not of the study."""
    content = {name: value for name, value in record.study.items() if name not in ("kind", "hash", "begun")}
    if hash_of(content) != record.study["hash"]:
        raise RecordError("the study's row was changed after it was written: its hash is another one")

    shared: dict[tuple[str, ...], Any] = {}
    for (task, arm, seed), row in record.runs.items():
        if row["study"] != record.study["hash"]:
            raise RecordError(f"run {task} {arm} {seed} is of another study")
        facts = {(name,): row[name] for name in SAME}
        facts |= {(name, task): row[name] for name in SAME_IN_TASK}
        if "--remap_verifier" in record.arms[arm]["flags"]:  # says that its rows name another verifier
            facts["data_hash", task, arm] = facts.pop(("data_hash", task))
        facts["code", arm] = row["code"]
        for name, value in facts.items():
            first = shared.setdefault(name, value)
            if first != value:
                raise RecordError(
                    f"run {task} {arm} {seed} has another {' of '.join(name)} than the runs before it, {value} and not "
                    f"{first}: differences would not be the arms'. Keep such rows in a file of their own"
                )


@contextmanager
def appending(path: Path) -> Generator[Any]:
    """A function that adds a row to a file and to the disk. One process at a time; a cut last line is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{path}: another study.py is adding to it") from None
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)

        def append(row: dict[str, Any]) -> None:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        yield append
