"""A record: a file of JSON lines that is only ever added to. Its first row is the study, fixed before any run.

study    task flags, steps, endpoints, commit, and a hash of all that
arm      an arm's name, script, flags, and the text of its diff
run      a task, arm and seed: curve, endpoints, hashes of code, data, model and final weights, packages, processor
failure  a run that failed, has too few steps, or whose row does not fit the others, with the end of its log
"""

import fcntl
import functools
import hashlib
import json
import math
import os
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scripts.studies import arms as arms_part
from scripts.studies.arms import LEARNED, SCRIPTS, ArmError, flags_of
from scripts.studies.endpoints import ENDPOINTS, MAY_LACK, PRIMARY, Curve, endpoints
from scripts.studies.tasks import AGAIN, AGAIN_SHIFT, CONTROLS

# what the runs of a study must share, beside the flags that an arm names
SAME = ("packages", "omp_num_threads")
SAME_IN_TASK = ("data_hash", "model_hash", "processor")  # differences are taken within a task
OF_THE_MACHINE = (*SAME, "processor")  # with these equal a run made again ends with the same bits
OF_A_RUN = {"study": str, "task": str, "arm": str, "seed": int}
FIELDS = {  # of the rows of a kind: those that are read
    "study": {
        "commit": str,
        "scale": str,
        "steps": int,
        "evaluate_every": int,
        "threads": int,
        "tasks": dict,
        "targets": dict,
        "hash": str,
    },
    "arm": {"name": str, "script": str, "flags": list, "diff": str},
    "run": OF_A_RUN
    | {"run_seed": int, "curve": dict, "endpoints": dict, "weights": str, "code": str, "processor": str}
    | {"data_hash": str, "model_hash": str, "packages": dict, "omp_num_threads": str},
    "failure": OF_A_RUN | {"code": int, "log": str},
}
KINDS = tuple(FIELDS)
START_MAY_DIFFER = 0.1  # held-out accuracy of a start model: bfloat16 moves it by 2 of 64 questions
START = b'{"kind": "study"'  # of a record
SHARES = ("held_out", "sampled", "informative")  # values of a curve from 0 to 1, but for a game's
COUNTS = ("tokens", "seconds", "length")
OF_TASKS = ("tasks", "targets", "measured")  # of a study's row: by task
OF_THE_ROW = ("kind", "hash", "begun")  # of a study's row: not in its hash


class RecordError(ValueError):
    """A record cannot be read or added to; the message says why and what to do."""


def from_json(text: str | bytes) -> Any:
    """JSON as a value. NaN, which rows of before and metrics may have, is None, as null is."""
    return json.loads(text, parse_constant=lambda word: None)


def hash_of(value: Any) -> str:
    """SHA-256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def key_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """The task, arm and seed of a run or a failure."""
    return row["task"], row["arm"], row["seed"]


@dataclass
class Record:
    """The rows of a record, by kind."""

    study: dict[str, Any] = field(default_factory=dict)  # of several studies the first, with the tasks of all
    commits: dict[str, str] = field(default_factory=dict)  # of the studies, by their hashes
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)  # (task, arm, seed)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def take(self, row: dict[str, Any]) -> None:
        """Add a row to the rows in memory. Raises RecordError for one that is not whole, or not of this study."""
        kind = row["kind"]
        check_fields(row)
        if kind == "study":
            content = {name: value for name, value in row.items() if name not in OF_THE_ROW}
            if hash_of(content) != row["hash"]:
                raise RecordError("the study's row was changed after it was written: its hash is another one")
            if self.study and self.study["hash"] != row["hash"]:
                raise RecordError("the file has rows of two studies")
            self.study = row
            self.commits[row["hash"]] = row["commit"]
        elif kind == "arm":
            known = self.arms.setdefault(row["name"], row)
            if known != row:
                name = row["name"]
                raise RecordError(
                    f"arm {name} was another one before: give this one another name, or write {name} alone to go on "
                    "with that one"
                )
        else:
            key = key_of(row)
            if kind == "failure":
                if row not in self.failures:
                    self.failures.append(row)
            elif self.runs.setdefault(key, row) != row:
                raise RecordError(f"run {key[0]} {key[1]} {key[2]} has two rows that differ")

    def join(self, other: "Record") -> None:
        """Add a record of the same study, or of a study with other tasks. Their commits may differ too: `check`
        compares the code of the runs of a task. Raises RecordError."""
        mine = self.study or other.study
        theirs = other.study or mine
        for name in (*mine, *theirs):
            if name not in (*OF_TASKS, *OF_THE_ROW, "commit") and mine.get(name) != theirs.get(name):
                raise RecordError(f"the studies differ in {name}: {mine.get(name)} and {theirs.get(name)}")
        joined = {}
        for name in OF_TASKS:
            joined[name] = mine.get(name, {}) | theirs.get(name, {})
            for task, value in mine.get(name, {}).items():
                other_value = joined[name][task]
                if other_value != value:
                    raise RecordError(f"the studies differ in {name} of {task}: {value} and {other_value}")
        if mine:
            self.study = mine | joined
        self.commits |= other.commits
        for row in (*other.arms.values(), *other.failures, *other.runs.values()):
            self.take(row)

    def of_tasks(self, names: Collection[str]) -> "Record":
        """The record of some of its tasks. Raises RecordError for a task that it lacks."""
        unknown = set(names) - set(self.study["tasks"])
        if unknown:
            there = ", ".join(self.study["tasks"])
            raise RecordError(f"no task {', '.join(sorted(unknown))}: there are {there}")
        chosen = Record(self.study, self.commits, self.arms)
        chosen.study = self.study | {"tasks": {name: self.study["tasks"][name] for name in names}}
        for row in (*self.failures, *self.runs.values()):
            if row["task"] in names:
                chosen.take(row)
        return chosen

    @property
    def failed(self) -> list[tuple[str, str, int]]:
        """The runs that failed and were not made since."""
        return [key for key in dict.fromkeys(map(key_of, self.failures)) if key not in self.runs]


def row_of(line: bytes) -> dict[str, Any] | None:
    """The row of a line. None for a line that is none, as one that a kill cut short."""
    try:
        row = from_json(line)
    except ValueError:
        return None
    if isinstance(row, dict) and row.get("kind") in KINDS:
        return row
    return None


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, without a last one that a kill cut short. Raises RecordError for other lines, and without
    the file."""
    if not path.is_file():
        raise RecordError(f"there is no file {path}")
    with path.open("rb") as file:
        for line in file:
            row = row_of(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                raise RecordError(f"{path} has a line that is no row of a record: {line[:60]!r}")


def read(paths: list[Path]) -> Record:
    """The record in one file or in several: see Record.join. Raises RecordError."""
    record = Record()
    names = ", ".join(map(str, paths))
    try:
        for path in paths:
            part = Record()
            for row in rows_in(path):
                part.take(row)
            record.join(part)
        if not record.study:
            raise RecordError(f"{names}: no row of a study")
        check(record)
    except RecordError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:  # of what study.py did not write
        raise RecordError(f"{names}: a row has a value that it cannot have: {error!r}") from error
    return record


def check_fields(row: dict[str, Any]) -> None:
    """Raises RecordError if a row lacks a field, or has one of another type."""
    kind = row["kind"]
    for name, type_of in FIELDS[kind].items():
        value = row.get(name)
        if isinstance(value, type_of) and not isinstance(value, bool):
            continue
        words = [str(row[word]) for word in ("name", "task", "arm", "seed") if word in row]
        where = " ".join([kind, *words])
        raise RecordError(f"row {where} has no {name} that is a {type_of.__name__}")


def check(record: Record) -> None:
    """Compare each run with the runs of its task before it. Raises RecordError at the first difference.

    All runs of a record have the same packages and threads. All runs of a task have the same data, start model and
    processor. Those of a task with the same diff have the same code. So a task may have another processor and other
    code than the next one: differences are taken within a task. Only an arm that trains on rows of another verifier
    than the base has data of its own.
    """
    check_study(record)
    check_copies(record)
    check_starts(record)
    shared: dict[tuple[str, ...], Any] = {}
    for row in (*record.runs.values(), *record.failures):
        check_place(record, row)
        if row["kind"] == "failure":
            continue
        check_run(record, row)
        for name, value in shared_by(record, row).items():
            first = shared.setdefault(name, value)
            if first != value:
                raise RecordError(
                    f"run {name_of(row)} has another {' of '.join(name)} than the runs before it, {value} and not "
                    f"{first}: differences would not be the arms'. Keep such rows in a file of their own"
                )


def name_of(row: dict[str, Any]) -> str:
    """The task, arm and seed of a run or a failure, for a person."""
    return " ".join(map(str, key_of(row)))


def shared_by(record: Record, row: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """What a run must share with others, by what it is and who shares it."""
    task = row["task"]
    arm = row["arm"]
    facts = {(name,): row[name] for name in SAME}
    facts |= {(name, task): row[name] for name in SAME_IN_TASK}
    if has_other_verifier(record, task, arm):
        facts["data_hash", task, arm] = facts.pop(("data_hash", task))
    facts["code", first_with_its_diff(record, arm), task] = row["code"]  # arms without a diff have the base's
    for name, digest in row.get("files", {}).items():  # rows of before have none
        facts[name, task, arm] = digest
    return facts


def first_with_its_diff(record: Record, name: str) -> str:
    """The first arm of the record that has this arm's diff."""
    diff = record.arms[name]["diff"]
    return next(other for other, arm in record.arms.items() if arm["diff"] == diff)


def check_place(record: Record, row: dict[str, Any]) -> None:
    """Raises RecordError if a run or a failure is of another study, or of a task or an arm that the record lacks."""
    if row["study"] not in record.commits:
        raise RecordError(f"run {name_of(row)} is of another study")
    if row["task"] not in record.study["tasks"] or row["arm"] not in record.arms:
        raise RecordError(f"run {name_of(row)} has a task or an arm that the record lacks")


def check_copies(record: Record) -> None:
    """Raises RecordError for two runs whose steps took the same seconds, each of them: no two runs do."""
    seen: dict[tuple[float, ...], str] = {}
    for row in record.runs.values():
        twin = seen.setdefault(tuple(row["curve"].get("seconds", ())), name_of(row))
        if twin != name_of(row):
            raise RecordError(f"run {name_of(row)} took the seconds of {twin}, step by step: it is a copy")


def check_starts(record: Record) -> None:
    """Raises RecordError for a run whose start model is right more or less often than that of the runs before it, by
    more than another dtype makes it: the model is the same, so what judges its answers is not."""
    first: dict[str, dict[str, Any]] = {}
    for row in record.runs.values():
        if row["task"] in games_of(record.study):  # measured by training rollouts, after a step
            continue
        before = first.setdefault(row["task"], row)
        start = row["curve"]["held_out"][0]
        expected = before["curve"]["held_out"][0]
        if abs(start - expected) > START_MAY_DIFFER:
            raise RecordError(
                f"run {name_of(row)} starts at a held-out accuracy of {start:.2f}, and {name_of(before)} at "
                f"{expected:.2f}, with the same model: the arm judges or asks held-out rows in another way. A new "
                f"reward is a verifier of its own, which the arm trains on with --remap_verifier {LEARNED}=NAME"
            )


def check_study(record: Record) -> None:
    """Raises RecordError for another primary endpoint than ours, and for arms that the command line would not make."""
    primary = record.study.get("primary", PRIMARY)
    if primary != PRIMARY:
        raise RecordError(f"the study's primary endpoint is {primary}, and not {PRIMARY}")
    games = games_of(record.study)
    found = []
    for row in record.arms.values():
        arm = arms_part.Arm(row["name"], row["diff"], row["script"], tuple(row["flags"]))
        found.append(arm)
        try:
            check_arm(arm, found[0], games)
        except ArmError as error:
            raise RecordError(str(error)) from None
    try:
        arms_part.check_twins([arm for arm in found if arm.name != AGAIN])
    except ArmError as error:
        raise RecordError(str(error)) from None


def games_of(study: dict[str, Any]) -> list[str]:
    """The tasks of a study that are games: they have metrics of their own. Studies of before have none."""
    return [name for name, measured in study.get("measured", {}).items() if measured]


def check_arm(arm: arms_part.Arm, base: arms_part.Arm, games: Sequence[str]) -> None:
    """Raises ArmError for an arm that the command line would not take, and for a control that is another one than
    --controls adds."""
    if arm.script not in SCRIPTS:
        there = ", ".join(SCRIPTS)
        raise ArmError(f"arm {arm.name} has the script {arm.script}: there are {there}")
    arms_part.check_arm(arm.name, arm.flags)
    arms_part.check_games(arm, games)
    if arm.name == AGAIN and arm != replace(base, name=AGAIN):
        raise ArmError(f"arm {AGAIN} is another one than {base.name}, whose noise floor it is for")
    for expected in map(control, CONTROLS):
        has_its_code = bool(arm.diff) == bool(expected.diff)
        is_it = has_its_code and arm.flags == expected.flags
        if arm.name == expected.name and not is_it:
            raise ArmError(f"arm {arm.name} is another control than --controls adds")


@functools.cache
def control(text: str) -> arms_part.Arm:
    """A control, but for the text of its diff: forks change."""
    head, _, flags = text.partition(":")
    name, _, source = head.partition("@")
    return arms_part.Arm(name, diff=source, flags=tuple(flags.split()))


def has_other_verifier(record: Record, task: str, arm: str) -> bool:
    """Whether an arm trains on rows that name another verifier than the base's rows of this task."""
    base = dict(flags_of(record.study["tasks"][task])).get("remap_verifier")
    own = dict(flags_of(record.arms[arm]["flags"])).get("remap_verifier", base)
    return own != base


def check_one_more(record: Record, row: dict[str, Any]) -> None:
    """Raises RecordError if a record with this row would not pass `check`. The record is left as it is: a row that does
    not fit takes no other with it."""
    longer = replace(record, runs=dict(record.runs), failures=list(record.failures))
    longer.take(row)
    check(longer)


def check_run(record: Record, row: dict[str, Any]) -> None:
    """Raises RecordError if a run is not whole, is of another seed, or its endpoints are not those of its curve."""
    name = f"run {name_of(row)}"
    check_curve(record, row, name)
    curve = Curve(**row["curve"])
    shift = AGAIN_SHIFT if row["arm"] == AGAIN else 0
    if row["run_seed"] != row["seed"] + shift:
        raise RecordError(f"{name} was made with --seed {row['run_seed']}")

    names = set(row["endpoints"])
    needed = {PRIMARY, *record.study.get("endpoints", ENDPOINTS)}
    if not needed <= names or not names <= set(ENDPOINTS):  # runs of later code may have more than the study
        raise RecordError(f"{name} has the endpoints {', '.join(sorted(names))}; the study {', '.join(sorted(needed))}")
    found = endpoints(curve, record.study["targets"][row["task"]])
    for endpoint, said in row["endpoints"].items():
        value = found[endpoint]
        is_same = said is value  # both None
        if said is not None and value is not None:
            is_same = np.isclose(said, value, rtol=1e-3, atol=1e-4)  # a curve's values have five digits
        if not is_same:
            raise RecordError(f"{name} has {endpoint} {said}, and its curve {value}")


def check_curve(record: Record, row: dict[str, Any], name: str) -> None:
    """Raises RecordError if a curve is not evaluated at the study's steps, lacks a step, or has a value that cannot
    be."""
    study = record.study
    horizon = study["steps"]
    is_game = row["task"] in games_of(study)
    steps = list(range(1, horizon + 1))
    evaluated = steps if is_game else [*range(0, horizon, study["evaluate_every"]), horizon]
    fields = Curve.__dataclass_fields__
    if not set(row["curve"]) <= set(fields):
        raise RecordError(f"{name} has a curve of {', '.join(row['curve'])}: there are {', '.join(fields)}")
    if row["curve"].get("evaluated") != evaluated:
        raise RecordError(f"{name} is evaluated at {row['curve'].get('evaluated')}, and the study at {evaluated}")
    for field_name in fields:
        values = row["curve"].get(field_name, [])
        expected = evaluated if field_name in ("evaluated", "held_out") else steps
        if len(values) != len(expected) and (values or field_name != "turns"):  # rows of before have no turns
            raise RecordError(f"{name} has {len(values)} steps of {field_name}, and the study {len(expected)}")
        for value in values:
            if not can_be(field_name, value, is_game):
                raise RecordError(f"{name} has {value} in its {field_name}")


def can_be(field_name: str, value: Any, is_game: bool) -> bool:
    """Whether a curve may have this value: a finite number, from 0 to 1 for a share and at least 0 for a count. Some
    fields may lack values. A game's held-out curve is its score, which may be any number."""
    if value is None:
        return field_name in MAY_LACK
    if not isinstance(value, int | float):
        return False
    if not math.isfinite(value):
        return field_name in MAY_LACK
    if field_name == "held_out" and is_game:
        return True
    if field_name in SHARES:
        return 0 <= value <= 1
    return value >= 0 or field_name not in COUNTS


@contextmanager
def appending(path: Path) -> Generator[Any]:
    """A function that adds a row to a file and to the disk. One process at a time; a cut last line is removed. Raises
    RecordError for a file that is no record."""
    if path.is_dir():
        raise RecordError(f"{path} is a folder: name a file, as {path / 'study.jsonl'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"{path}: another study.py is adding to it") from None
        file.seek(0)
        content = file.read()
        if not content.startswith(START) and not START.startswith(content):  # which a kill may have cut short
            raise RecordError(f"{path} is no record, whose first row is a study: name another --out")
        *_, last = content.rpartition(b"\n")
        if last and row_of(last):
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(last))

        def append(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

        try:
            yield append
        finally:
            if not path.stat().st_size:  # what was asked for was refused
                path.unlink()
