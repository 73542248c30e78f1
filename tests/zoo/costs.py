"""What the bugs of tests/zoo cost: the arms of a study of the fruit fly, and what its record says.

An animal is compared with the clean code of the same flags and the same seeds. --max_logprob_gap 0, with which a run
goes on that the gap would end, changes nothing of a clean run, and no clean run has it.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from scripts.reports.intervals import holm
from scripts.studies import record, report, statistics, tasks
from scripts.studies.endpoints import Curve, area
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


def base_of(animal: Any) -> str:
    """The name of the clean arm that an animal is compared with."""
    return clean_name(animal.against or animal.study)


def arm_text(name: str, line: list[str]) -> str:
    """An arm as study.py reads it."""
    words = " ".join(line).removeprefix("grpo.py").strip()
    return f"{name}: {words}".removesuffix(": ")


def arms(animals: dict[str, Any], scale: str = "fly") -> list[str]:
    """The arms of the animals that can be studied, as study.py reads them: those of the clean code first."""
    clean = {}
    bugs = []
    for animal in animals.values():
        if animal.study:
            base = base_of(animal)
            clean[base] = arm_text(base, clean_line(animal.against or animal.study))
            diff = "" if animal.against else f"@tests/zoo/{animal.path.name}"
            bugs.append(arm_text(f"{animal.name}{diff}", animal.study))
    texts = [*clean.values(), *bugs]
    if "--no_load_ref_policy" in tasks.SCALES[scale].flags:  # a KL needs the reference policy
        texts = [text.replace("--beta", "--load_ref_policy --beta") for text in texts]
    return texts


def keep(records: list[record.Record], path: Path) -> None:
    """Add what the costs need of some records to those of `path`: small enough for the repository. Where they have
    several numbers of steps, the first steps that all have count: with a constant learning rate these are those of a
    shorter run. Raises ValueError where that is less than what was kept of earlier ones."""
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept_steps = [line["kept_steps"] for line in earlier if line["kind"] == "study"]
    steps = min(kept_steps or (rows.study["steps"] for rows in records))
    for rows in records:
        if rows.study["steps"] < steps:
            raise ValueError(f"{path.name} has the first {steps} steps of its runs, and a record of these has fewer")

    lines = {key_of(line): line for line in earlier}
    for rows in records:
        facts = [rows.study | {"kept_steps": steps}]
        facts += [{key: arm[key] for key in ("kind", "name", "script", "flags")} for arm in rows.arms.values()]
        facts += [kept_run(run, steps) for run in rows.runs.values()]
        lines |= {key_of(line): line for line in facts}
    path.write_text("".join(json.dumps(lines[key]) + "\n" for key in sorted(lines)))


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row of a kept file from the others: a file has one row of each."""
    names = {"study": ("hash",), "arm": ("name",), "run": ("arm", "seed")}
    return (line["kind"], *(line[name] for name in names[line["kind"]]))


def kept_run(run: dict[str, Any], steps: int) -> dict[str, Any]:
    """A run's row, with area and final accuracy of its first steps."""
    curve = run["curve"]
    evaluated = [step for step in curve["evaluated"] if step <= steps]
    held_out = curve["held_out"][: len(evaluated)]
    kept = {name: run[name] for name in ("kind", "task", "arm", "seed", "weights")}
    kept["area"] = area(Curve(evaluated=evaluated, held_out=held_out))
    kept["final"] = held_out[-1]
    return kept


def read(path: Path, animals: dict[str, Any]) -> dict[str, Cost]:
    """What each animal of a kept record costs. Those with fewer than two seeds are left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    runs = {(line["arm"], line["seed"]): line for line in lines if line["kind"] == "run"}
    arms = [line["name"] for line in lines if line["kind"] == "arm"]
    names = [name for name in arms if name in animals and animals[name].study]
    differences = {}
    for name in names:
        base = base_of(animals[name])
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
