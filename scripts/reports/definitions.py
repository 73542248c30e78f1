"""The definition of each metric, from the table of scripts/reports/README.md."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).with_name("README.md")


class Row(NamedTuple):
    """A name of the table."""

    name: str  # as written
    meanings: set[str]  # metrics that a short form may stand for
    definition: str
    healthy: str


def share_out(text: str, mark: str, count: int, divides: bool) -> list[str]:
    """A text for each of `count` names: the text's parts if it divides into as many, else the whole text for each."""
    text = text.replace("`", "")
    parts = text.split(mark)
    if not divides or len(parts) != count:
        parts = [text] * count
    return [part.strip() for part in parts]


def meanings_of(names: list[str]) -> list[set[str]]:
    """The metrics that each name may stand for: after `val/x_min`, `_max` is val/x_min_max, val/x_max or val_max, and
    `y` is val/y."""
    meanings = []
    with_folder = ""  # the last name with a slash
    last = ""
    for name in names:
        if name.startswith("_"):
            bases = [base[: end.start()] for base in (with_folder, last) for end in re.finditer("_|$", base)]
            meanings.append({base + name for base in bases})
            continue
        folder = with_folder.rpartition("/")[0]
        meanings.append({f"{folder}/{name}"})
        last = name
        if "/" in name:
            with_folder = name
    return meanings


@functools.cache
def metric_table() -> list[Row]:
    """The table of metrics, a row for each name.

    A definition without commas that has as many parts (;) as there are names gives each name its own part. So do the
    healthy numbers (,).
    """
    text = README.read_text().split("| metric | definition")[1].split("\n\n")[0]
    table = []
    for line in text.splitlines()[2:]:
        column, definition, healthy = line.split("|")[1:4]
        if "eval/..." in column:
            column += definition  # where the names of this row are explained
        names = re.findall(r"`([^`]+)`", column)
        definitions = share_out(definition, ";", len(names), divides="," not in definition)
        ranges = share_out(healthy, ",", len(names), divides=not re.search("[a-z]", healthy))
        table += map(Row, names, meanings_of(names), definitions, ranges)
    return table


def is_of_a_verifier(name: str, metric: str) -> bool:
    """Whether `name` has NAME where `metric` has the name of a verifier, a tool or the like."""
    return "NAME" in name and re.fullmatch(re.escape(name).replace("NAME", r"[\w-]+"), metric) is not None


def define(metric: str) -> tuple[str, str] | None:
    """(definition, healthy range) of a metric, or None if the table lacks it."""
    own_row = any(row.name == metric for row in metric_table())
    if metric.startswith("eval/") and not own_row and not metric.startswith("eval/pass"):
        return define_eval(metric.removeprefix("eval/"))
    plain = metric.replace("objective_kept/", "objective/")
    plain = re.sub(r"(?<=kl)[1-3](?=_avg)", "0", plain)
    plain = re.sub(r"pass_at_\d+_unbiased", "pass_at_K_unbiased", plain)

    table = metric_table()
    found = [row for row in table if row.name in (metric, plain)]
    found += [row for row in table if plain in row.meanings]
    found += [row for row in table if any(is_of_a_verifier(name, plain) for name in (row.name, *row.meanings))]
    return (found[0].definition, found[0].healthy) if found else None


def define_eval(metric: str) -> tuple[str, str] | None:
    """The same of a metric of the evaluation, without its eval/."""
    for folder in ("", "val/", "objective/"):
        found = define(folder + metric)
        if found:
            return f"evaluation prompts: {found[0]}", found[1]
    return None
