"""What the bugs of tests/zoo cost: the arms of a study of the fruit fly, and what its record says.

An animal is compared with the clean code of the same flags and the same seeds. --max_logprob_gap 0, with which a run
goes on that the gap would end, changes nothing of a clean run, and no clean run has it.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from scripts.reports.intervals import holm
from scripts.studies import record, report, statistics
from scripts.studies.statistics import Interval

CLEAN = "clean"
GOES_ON = ["--max_logprob_gap", "0"]
ENDPOINTS = ("area", "final")


class Cost(NamedTuple):
    """An animal less the clean code, over seeds. Below 0 is worse."""

    seeds: int
    differences: dict[str, Interval]  # of ENDPOINTS
    adjusted_p: float  # of the area's t test, Holm over all animals of the record


def clean_line(line: list[str]) -> list[str]:
    """The program and flags of the clean code that a line is compared with."""
    text = " ".join(line).replace(" ".join(GOES_ON), "")
    return text.split()


def clean_name(line: list[str]) -> str:
    """The name of the arm of these flags without an animal."""
    words = clean_line(line)
    named = [words[0].removesuffix(".py"), *words[1:]] if words[0] != "grpo.py" else words[1:]
    return re.sub(r"[^\w.]+", "_", " ".join([CLEAN, *named]).replace("--", ""))


def arms(animals: dict[str, Any]) -> list[str]:
    """The arms of the animals that can be studied, as study.py reads them: those of the clean code first."""
    clean = {CLEAN: CLEAN}
    bugs = []
    for animal in animals.values():
        if animal.study:
            words = " ".join(clean_line(animal.study)).removeprefix("grpo.py").strip()
            name = clean_name(animal.study)
            clean[name] = f"{name}: {words}".removesuffix(": ")
            flags = " ".join(animal.study).removeprefix("grpo.py").strip()
            bugs.append(f"{animal.name}@tests/zoo/{animal.path.name}: {flags}".removesuffix(": "))
    return [*clean.values(), *bugs]


def keep(records: list[Path], path: Path) -> None:
    """Write what the costs need of one record, or of several of the same study: small enough for the repository."""
    rows = record.read(records)
    lines: list[dict[str, Any]] = [rows.study]
    for arm in rows.arms.values():
        lines.append({name: arm[name] for name in ("kind", "name", "script", "flags")})
    for _, run in sorted(rows.runs.items()):
        kept = {name: run[name] for name in ("kind", "task", "arm", "seed", "weights")}
        lines.append(kept | {endpoint: run["endpoints"][endpoint] for endpoint in ENDPOINTS})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path, animals: dict[str, Any]) -> dict[str, Cost]:
    """What each animal of a kept record costs. Those with fewer than two seeds are left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    runs = {(line["arm"], line["seed"]): line for line in lines if line["kind"] == "run"}
    names = [line["name"] for line in lines if line["kind"] == "arm" and line["name"] in animals]
    differences = {}
    for name in names:
        base = clean_name(animals[name].study)
        seeds = sorted(seed for arm, seed in runs if arm == name and (base, seed) in runs)
        if len(seeds) > 1:
            differences[name] = {
                endpoint: [runs[name, seed][endpoint] - runs[base, seed][endpoint] for seed in seeds]
                for endpoint in ENDPOINTS
            }

    adjusted = holm([statistics.t_test(values["area"]) for values in differences.values()])
    costs = {}
    for (name, of_endpoints), p in zip(differences.items(), adjusted, strict=True):
        intervals = {endpoint: statistics.t_interval(values) for endpoint, values in of_endpoints.items()}
        costs[name] = Cost(len(of_endpoints["area"]), intervals, p)
    return costs


def worded(cost: Cost) -> str:
    """Both differences with their 95 % intervals, the verdict on the area, and the number of seeds."""
    area, final = (report.show(cost.differences[endpoint], 2) for endpoint in ENDPOINTS)
    verdict = "cannot tell"
    if cost.adjusted_p < 1 - statistics.LEVEL:
        verdict = "better" if cost.differences["area"].value > 0 else "worse"
    return f"{verdict}: area {area}, final {final}, {cost.seeds} seeds"
