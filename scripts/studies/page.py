"""Draws the tables of pages from the rows of records. A table stands between two comments, which a page does not show:

    <!-- study.py page: arms scripts/studies/records/fly.jsonl -->
    <!-- end -->

The first one holds a kind, records (paths from the root of the repository) and flags: --tasks and --base are those of
`study.py table`.

arms      a row for each arm: difference of the area, verdict. --beside TASKS adds the difference on other tasks,
          --ends TASKS held-out accuracy at start and end, --endpoints NAMES means over tasks and seeds
beat      numbers to beat: what the base, and each arm that is better, took to the target of each task. --columns
          chooses, --seconds_of adds the base's seconds in records of other machines
picture   mean curves, in a file beside the first record

All numbers are the rows'. What stands outside the comments is left as it is.
"""

import argparse
import functools
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from scripts.studies import record, report, statistics, tasks
from scripts.studies.arms import ROOT
from scripts.studies.endpoints import ENDPOINTS, PRIMARY
from scripts.studies.record import Record, RecordError
from scripts.studies.statistics import Comparison, Interval

PAGES = ("README.md", "scripts/studies/records.md")
BEGIN = "<!-- study.py "
END = "<!-- end -->"
TABLE = re.compile(f"{BEGIN}(?P<words>.*?)-->(?P<body>.*?){END}", re.DOTALL)
COLUMNS = {  # of the numbers to beat -> their heads
    "arm": "arm",
    "start": "start",
    "end": "end: mean (least to most)",
    "target": "target",
    "reached": "reached",
    "steps": "steps",
    "tokens": "tokens",
    "seconds": "seconds",
    "processor": "processor",
}


class MarkParser(argparse.ArgumentParser):
    """A parser that raises RecordError where others end the process."""

    def error(self, message: str) -> NoReturn:
        raise RecordError(message)


def parser() -> MarkParser:
    """What the first comment of a table may hold."""
    parser = MarkParser(prog="study.py", add_help=False, allow_abbrev=False)
    parser.add_argument("command", choices=["page:"])
    parser.add_argument("kind", choices=BLOCKS)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--base")
    parser.add_argument("--beside", nargs="+", action="append", default=[])
    parser.add_argument("--ends", nargs="+", default=[])
    parser.add_argument("--endpoints", nargs="+", choices=ENDPOINTS, default=[])
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--seconds_of", type=Path, nargs="+", default=[])
    return parser


def draw_pages(pages: Sequence[Path], check: bool) -> list[str]:
    """Draw the tables and pictures of pages, or with `check` leave them as they are. Returns those that were not what
    their rows say. Raises RecordError for a page that cannot be drawn; then no page is written."""
    read.cache_clear()  # files may have changed since
    changed: list[str] = []
    texts = {}
    pictures = {}
    for page in pages:
        if not page.is_file():
            raise RecordError(f"there is no page {page}")
        before = page.read_bytes().decode()
        texts[page], lines = redraw(page, before)
        changed += lines
        for options in marks_of(page, before):
            if options.kind == "picture":
                pictures[picture_of(options)] = options
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        for picture, options in pictures.items():
            drawn = Path(folder) / picture.name
            report.draw(rows_of(options), drawn, options.base)
            if has_pixels_of(picture, drawn):
                continue
            changed.append(f"{name_of(picture)}, the picture")
            if not check:
                picture.write_bytes(drawn.read_bytes())
    if not check:
        for page, text in texts.items():
            page.write_bytes(text.encode())
    return changed


def has_pixels_of(picture: Path, drawn: Path) -> bool:
    """Whether two pictures are the same, pixel by pixel. The bytes of a file may differ where the picture does not."""
    import matplotlib.image

    try:
        before = matplotlib.image.imread(picture)
    except (OSError, SyntaxError):  # it is not there, or no picture
        return False
    return np.array_equal(before, matplotlib.image.imread(drawn))


def redraw(page: Path, text: str) -> tuple[str, list[str]]:
    """The text of a page with its tables drawn anew, and a line for each table that was another one."""
    parts = []
    changed = []
    end = 0
    for table, options in zip(TABLE.finditer(text), marks_of(page, text), strict=True):
        body = f"\n\n{block(page, options)}\n\n"
        if body != table["body"]:
            changed.append(f"{name_of(page)}, {words_of(table)}")
        parts += [text[end : table.start("body")], body]
        end = table.end("body")
    return "".join([*parts, text[end:]]), changed


def name_of(path: Path) -> str:
    """A file's name from the root of the repository, or the whole of it for one that is elsewhere."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole)


def words_of(table: re.Match[str]) -> str:
    """What the first comment of a table holds, in one line."""
    return " ".join(table["words"].split()).removeprefix("page: ")


def marks_of(page: Path, text: str) -> list[argparse.Namespace]:
    """What the first comments of a page's tables hold. Raises RecordError for words that mean nothing."""
    tables = list(TABLE.finditer(text))
    if not text.count(BEGIN) == text.count(END) == len(tables):
        raise RecordError(f"{name_of(page)}: each {BEGIN}page: ... --> needs an {END} after it, before the next one")
    found = []
    for table in tables:
        try:
            found.append(parser().parse_args(table["words"].split()))
        except RecordError as error:
            raise RecordError(f"{name_of(page)}, {words_of(table)}: {error}") from None
    return found


def block(page: Path, options: argparse.Namespace) -> str:
    """What stands between the comments. Raises RecordError, with the page and the table in its words."""
    try:
        return BLOCKS[options.kind](page, options)
    except RecordError as error:
        names = " ".join(map(str, options.records))
        raise RecordError(f"{name_of(page)}, {options.kind} {names}: {error}") from None


@functools.cache
def read(paths: tuple[Path, ...]) -> Record:
    """The record in some files, whose paths start at the root of the repository."""
    return record.read([ROOT / path for path in paths])


def rows_of(options: argparse.Namespace) -> Record:
    """The rows that a table is of. Raises RecordError for an arm that is not there."""
    rows = read(tuple(options.records))
    if options.base not in (None, *rows.arms):
        raise RecordError(f"no arm {options.base}: there are {', '.join(rows.arms)}")
    return rows.of_tasks(options.tasks) if options.tasks else rows


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table. A bar in a cell, as flags may have one, does not end it."""
    rows = []
    for cells in (head, *lines):
        escaped = [cell.replace("|", r"\|") for cell in cells]
        rows.append("| " + " | ".join(escaped) + " |")
    rule = ["---"] * len(head)
    rows.insert(1, "|" + "|".join(rule) + "|")
    return "\n".join(rows)


def listed(names: Sequence[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


# --- The arms ---------------------------------------------------------------------------------------------------------


def arms_block(page: Path, options: argparse.Namespace) -> str:
    """A row for each arm: the base, the ideas from the largest difference to the smallest, and where the base is the
    record's first arm the controls and the noise floor. An arm without a seed on all tasks of a column has no row."""
    everything = read(tuple(options.records))
    rows = rows_of(options)
    first = next(iter(rows.arms))
    base = options.base or first
    comparisons = report.comparisons_of(rows, report.ideas_of(rows, base), base)
    names = sorted(comparisons, key=lambda arm: -comparisons[arm].difference.value)
    if base == first:
        names += [arm for arm in rows.arms if arm in tasks.CONTROL_NAMES and arm != base]
    if report.has_noise_floor(rows, base):
        names.append(tasks.AGAIN)

    columns = [rows, *(everything.of_tasks(names_of) for names_of in options.beside)]
    lines = []
    for arm in [base, *names]:
        differences = [difference(column, arm, base) for column in columns]
        if not any(differences):
            continue
        verdict = verdict_of(rows, arm, base, comparisons)
        ends = [ends_of(rows, arm, task) for task in options.ends]
        means = [mean_of(rows, arm, name) for name in options.endpoints]
        own = differences[0] or "no seed on all tasks"
        lines.append([arm_words(rows, arm, base), own, verdict, *differences[1:], *ends, *means])
    return markdown(heads_of_arms(rows, options, len(comparisons)), lines)


def heads_of_arms(rows: Record, options: argparse.Namespace, count: int) -> list[str]:
    """The heads of the columns; `count`: the arms that Holm is applied to."""
    head = ["arm", f"difference of the area on {listed(list(rows.study['tasks']))}, 95 % interval"]
    head.append(f"verdict (Holm over {count} arms)")
    head += [f"on {listed(names_of)}" for names_of in options.beside]
    head += [f"`{task}`: start to end (least to most)" for task in options.ends]
    head += [f"`{name}`" for name in options.endpoints]
    return head


def arm_words(rows: Record, name: str, base: str) -> str:
    """An arm's name, and what it has in another way than the code of its study."""
    arm = rows.arms[name]
    if name == tasks.AGAIN:
        return f"noise floor: `{name}`, `{base}` with other seeds"
    script = "" if arm["script"] == "grpo.py" else arm["script"]
    flags = " ".join([script, *arm["flags"]]).strip()
    words = f"`{name}`"
    if arm["diff"]:
        words += ", a diff"
    if flags:
        words += f": `{flags}`"
    is_control = name in tasks.CONTROL_NAMES and name != base
    return f"control {words}" if is_control else words


def differences_of(rows: Record, arm: str, base: str) -> list[float]:
    """The difference of each seed that both arms have on all tasks: the mean over tasks."""
    seeds = report.paired_seeds(rows, arm, base)
    ours = report.endpoint_table(rows, arm, seeds, PRIMARY)
    table = ours - report.endpoint_table(rows, base, seeds, PRIMARY)
    return statistics.without_rounding(table.mean(0)).tolist()


def difference(rows: Record, arm: str, base: str) -> str:
    """An arm's difference with its interval, and its seeds where the base has more. Of the base its area. Empty where
    they have no seed in common."""
    seeds = report.paired_seeds(rows, arm, base)
    if not seeds:
        return ""
    if arm == base:
        area = report.endpoint_table(rows, arm, seeds, PRIMARY).mean()
        return f"area {area:.3f}"
    words = report.show(statistics.t_interval(differences_of(rows, arm, base)))
    if len(seeds) < len(report.paired_seeds(rows, base, base)):
        words += f" ({seeds_of(len(seeds))})"
    return words


def seeds_of(count: int) -> str:
    """A number of seeds."""
    return "1 seed" if count == 1 else f"{count} seeds"


def verdict_of(rows: Record, arm: str, base: str, comparisons: dict[str, Comparison]) -> str:
    """What the seeds say of an arm, in words."""
    if arm == base:
        return seeds_of(len(report.paired_seeds(rows, arm, base)))
    if arm in comparisons:
        same = report.same_weights(rows, arm, base)
        return f"the same: its {same} runs end with the base's weights" if same else idea_words(comparisons[arm])
    values = differences_of(rows, arm, base) if report.paired_seeds(rows, arm, base) else []
    if not values:
        return ""
    interval = statistics.t_interval(values)
    return noise_words(interval) if arm == tasks.AGAIN else control_words(interval)


def idea_words(result: Comparison) -> str:
    """The verdict on an arm, and the difference that its seeds could have seen where there is none."""
    if result.seeds == 1:
        return "cannot tell: one seed"
    side = "above" if result.difference.value >= 0 else "below"
    count = getattr(result.signs, side)
    words = f"{result.verdict} (p {result.adjusted_p:.2g}); {side} in {count} of {result.seeds} seeds"
    if result.verdict == "cannot tell":
        words += f"; {result.seeds} seeds would have seen {result.smallest:.3f}"
    return words


def control_words(interval: Interval) -> str:
    """Whether a control is worse than the base."""
    return "worse, as it must be" if interval.high < 0 else "NOT shown to be worse"


def noise_words(interval: Interval) -> str:
    """Whether the base is the base, and how far two arms without a common seed may be apart."""
    holds = interval.low <= 0 <= interval.high
    word = "holds 0" if holds else "does NOT hold 0"
    reach = (interval.high - interval.low) / 2
    return f"{word}; so arms with no seed in common have intervals of ± {reach:.3f}"


def ends_of(rows: Record, arm: str, task: str) -> str:
    """Held-out accuracy of an arm on a task, at its start and its end: mean to mean (least to most at the end)."""
    if task not in rows.study["tasks"]:
        raise RecordError(f"no task {task}: there are {', '.join(rows.study['tasks'])}")
    seeds = report.paired_seeds(rows, arm, arm)
    if not seeds:
        return ""
    held_out = [rows.runs[task, arm, seed]["curve"]["held_out"] for seed in seeds]
    return f"{start_words(held_out)} to {end_words(held_out)}"


def start_words(held_out: Sequence[Sequence[float]]) -> str:
    """The mean of curves at their start."""
    return f"{np.mean([values[0] for values in held_out]):.2f}"


def end_words(held_out: Sequence[Sequence[float]]) -> str:
    """Mean of curves at their end, and the least and the most of them."""
    ends = [values[-1] for values in held_out]
    return f"{np.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})"


def mean_of(rows: Record, arm: str, name: str) -> str:
    """The mean of an endpoint over tasks and seeds."""
    seeds = report.paired_seeds(rows, arm, arm)
    return report.mean_or_dash(report.endpoint_table(rows, arm, seeds, name)) if seeds else ""


# --- Numbers to beat --------------------------------------------------------------------------------------------------


def beat_block(page: Path, options: argparse.Namespace) -> str:
    """A row for each task and arm: the base, and the arms whose verdict is better."""
    rows = rows_of(options)
    base = options.base or next(iter(rows.arms))
    comparisons = report.comparisons_of(rows, report.ideas_of(rows, base), base)
    arms = [base, *(arm for arm, result in comparisons.items() if result.verdict == "better")]
    columns = [name for name in options.columns if name != "arm" or len(arms) > 1]
    head = ["task", *(COLUMNS[name] for name in columns)]
    lines = []
    for task in rows.study["tasks"]:
        for arm in arms:
            seeds = report.paired_seeds(rows, arm, arm)
            if seeds:
                facts = beat_facts(rows, task, arm, seeds)
                lines.append([f"`{task}`", *(facts[name] for name in columns)])
    others = [read((path,)) for path in options.seconds_of]
    for path, other in zip(options.seconds_of, others, strict=True):
        head.append(f"seconds in `{path.name}` ({', '.join(processors_of(other, other.study['tasks']))})")
    for cells in lines:
        cells += [seconds_elsewhere(other, cells[0].strip("`"), base) for other in others]
    return markdown(head, lines)


def beat_facts(rows: Record, task: str, arm: str, seeds: list[int]) -> dict[str, str]:
    """What an arm took to the target of a task, by column."""
    held_out = [rows.runs[task, arm, seed]["curve"]["held_out"] for seed in seeds]
    target = rows.study["targets"][task]
    spent = report.spent_until(rows, task, arm, seeds)
    facts = {"arm": f"`{arm}`", "start": start_words(held_out), "end": end_words(held_out), "target": f"{target:g}"}
    facts["reached"] = f"{spent.reached} of {len(seeds)}"
    if spent.at_start:
        facts["reached"] += f" ({spent.at_start} at the start)"
    for name in ("steps", "tokens", "seconds"):
        facts[name] = amount(statistics.t_interval(spent.ends[name]), name)
    facts["processor"] = ", ".join(processors_of(rows, [task]))
    return facts


def processors_of(rows: Record, names: Sequence[str]) -> list[str]:
    """The processors of the runs of some tasks, as far as their names and models go."""
    found = {" ".join(row["processor"].split(" avx")[0].split()) for row in rows.runs.values() if row["task"] in names}
    return sorted(found)


def amount(interval: Interval, name: str) -> str:
    """A number of steps, tokens or seconds with its interval, as exact as its seeds make it."""
    places = 0
    if name == "steps" or (name == "seconds" and interval.value < 10):
        places = 1
    if name == "tokens" and interval.value >= 10_000:
        places = -3
    numbers = [rounded(max(0.0, value), places) for value in interval if math.isfinite(value)]  # counts
    if len(numbers) == 1:
        return numbers[0]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def rounded(value: float, places: int) -> str:
    """A number with so many places after the point, and commas. With -3 places it is in thousands."""
    return f"{round(value, places):,.{max(places, 0)}f}"


def seconds_elsewhere(other: Record, task: str, base: str) -> str:
    """The base's seconds to the target of a task in another record. Empty where that has none."""
    if task not in other.study["tasks"]:
        return ""
    rows = other.of_tasks([task])
    seeds = report.paired_seeds(rows, base, base)
    return beat_facts(rows, task, base, seeds)["seconds"] if seeds else ""


# --- Pictures ---------------------------------------------------------------------------------------------------------


def picture_block(page: Path, options: argparse.Namespace) -> str:
    """A link to the picture."""
    rows_of(options)
    link = os.path.relpath(picture_of(options), page.resolve().parent)
    return f"![mean held-out accuracy of each arm, by step]({link})"


def picture_of(options: argparse.Namespace) -> Path:
    """The file of a picture: beside its first record."""
    return ROOT / options.records[0].with_suffix(".png")


BLOCKS = {"arms": arms_block, "beat": beat_block, "picture": picture_block}
