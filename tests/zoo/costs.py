"""What the bugs of tests/zoo cost: the arms of a study of the fruit fly, and what its record says.

An animal is compared with the clean code of the same flags and the same seeds. --max_logprob_gap 0, with which a run
goes on that the gap would end, changes nothing of a clean run, and no clean run has it.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from scripts.reports.intervals import holm
from scripts.studies import record, statistics
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


def read(path: Path, animals: dict[str, Any]) -> dict[str, Cost]:
    """What each animal of a record costs. Those with fewer than two seeds are left out."""
    rows = record.read([path])
    (task,) = rows.study["tasks"]
    found = {}
    for name in rows.arms:
        if name not in animals:
            continue
        base = clean_name(animals[name].study)
        seeds = sorted(seed for _, arm, seed in rows.runs if arm == name and (task, base, seed) in rows.runs)
        differences = {}
        for endpoint in ENDPOINTS:
            pairs = [[rows.runs[task, arm, seed]["endpoints"][endpoint] for arm in (name, base)] for seed in seeds]
            differences[endpoint] = [ours - theirs for ours, theirs in pairs]
        if len(seeds) > 1:
            found[name] = (len(seeds), differences)

    p_values = [statistics.t_test(differences["area"]) for _, differences in found.values()]
    adjusted = holm(p_values)
    costs = {}
    for i, (name, (seeds, differences)) in enumerate(found.items()):
        intervals = {endpoint: statistics.t_interval(values) for endpoint, values in differences.items()}
        costs[name] = Cost(seeds, intervals, adjusted[i])
    return costs
