"""What a record says, in words, numbers and a picture. Nothing is computed that the rows do not hold."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.reports.intervals import wilson
from scripts.studies import statistics, tasks
from scripts.studies.endpoints import ENDPOINTS, PRIMARY
from scripts.studies.record import OF_THE_MACHINE, Record, RecordError, key_of
from scripts.studies.statistics import Comparison, Interval

CONTROLS = tasks.CONTROL_NAMES
OF_THE_RUN = ("code", "data_hash", "model_hash", "files")  # what a run is of, whatever the machine
NOISE = 2.8  # standard deviations of a run that the difference of two runs stays within, 19 times in 20
SHOWN = ("steps", "tokens", "final", "sampled", "kl", "length", "turns", "collapsed")  # those that a record has
WITH_INTERVAL = "sampled"  # shown with its own: a difference's is in the lines of the differences
FEW = 6  # arms whose bands can be told apart
ROWS_OF_LEGEND = 14
COLOURS = 10  # of matplotlib
LINES = ("-", "--", ":", "-.")


def paired_seeds(rows: Record, arm: str, base: str) -> list[int]:
    """The seeds of which both arms have a run on every task."""
    seeds = sorted({seed for _, _, seed in rows.runs})
    names = list(rows.study["tasks"])
    return [seed for seed in seeds if all((task, name, seed) in rows.runs for task in names for name in (arm, base))]


def endpoint_table(rows: Record, arm: str, seeds: list[int], name: str) -> np.ndarray:
    """An endpoint of an arm, (tasks, seeds). NaN: a run has none."""
    lines = []
    for task in rows.study["tasks"]:
        lines.append([rows.runs[task, arm, seed]["endpoints"][name] for seed in seeds])
    return np.array(lines, dtype=float)  # NaN for None


def show(interval: Interval, digits: int = 3) -> str:
    """An interval as value [low, high]."""
    if math.isinf(interval.low):
        return f"{interval.value:+.{digits}f}"
    return f"{interval.value:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def chance(interval: Interval) -> str:
    """A chance as value [low, high]; with few seeds the value alone."""
    if math.isinf(interval.low):
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def comparisons_of(rows: Record, arms: list[str], base: str) -> dict[str, Comparison]:
    """The arms against the base in the primary endpoint. Arms without a common seed are left out."""
    differences = {}
    for arm in arms:
        seeds = paired_seeds(rows, arm, base)
        if seeds:
            ours = endpoint_table(rows, arm, seeds, PRIMARY)
            differences[arm] = ours - endpoint_table(rows, base, seeds, PRIMARY)
    return statistics.compare(differences)


def ideas_of(rows: Record, base: str) -> list[str]:
    """The arms that are compared with the base: neither controls nor the noise floor."""
    return [arm for arm in rows.arms if arm not in (base, *CONTROLS, tasks.AGAIN)]


def text_of(rows: Record, base: str | None = None) -> tuple[str, bool]:
    """The record as text, and whether its tasks are fit: each control is worse than the record's first arm."""
    if not rows.runs:
        raise RecordError("\n".join(["the record has no run yet", *(failure_lines(rows) if rows.failures else [])]))
    first = next(iter(rows.arms))
    base = base or first
    if base not in rows.arms:
        raise RecordError(f"no arm {base}: there are {', '.join(rows.arms)}")
    others = [arm for arm in rows.arms if arm != base]
    controls = [arm for arm in rows.arms if arm in CONTROLS and arm != first]
    ideas = ideas_of(rows, base)

    lines = head_lines(rows)
    lines += ["", *level_lines(rows, [base, *others]), ""]
    comparisons = comparisons_of(rows, ideas, base)
    holm = f"Holm over {len(comparisons)} arms"
    lines.append(f"difference from {base}, paired by task and seed: 95 % t interval over seeds; {holm}")
    lines += comparison_lines(rows, comparisons, base)
    lines += idle_lines(rows, base)
    if len(ideas) <= FEW and len(rows.study["tasks"]) > 1:
        lines += lines_of_tasks(rows, ideas, base)
    better = [arm for arm, result in comparisons.items() if result.verdict == "better"]
    lines += ["", *beat_lines(rows, [base, *better])]
    fit = True
    if controls:
        text, fit = control_lines(controls, comparisons_of(rows, controls, first))
        lines += ["", *text, *lines_of_tasks(rows, controls, first)]
    else:
        lines += ["", "no controls (--controls): whether a curve here is of learning the task is not known"]
    if tasks.AGAIN in others:
        lines += ["", *noise_lines(rows, base)]
    lines += warning_lines(rows)
    if rows.failures:
        lines += ["", *failure_lines(rows)]
    return "\n".join(lines), fit


def head_lines(rows: Record) -> list[str]:
    """What was studied."""
    study = rows.study
    names = ", ".join(study["tasks"])
    hashes = ", ".join(text[:12] for text in rows.commits)
    commits = ", ".join(dict.fromkeys(text[:12] for text in rows.commits.values()))
    scale = study["scale"]
    steps = study["steps"]
    meaning = ENDPOINTS[PRIMARY].removeprefix("primary: ")
    lines = [f"study {hashes}: tasks {names}; scale {scale}; {steps} steps"]
    seeds = ranges(sorted({seed for _, _, seed in rows.runs}))
    lines.append(f"commit {commits}; {len(rows.runs)} runs, {len(rows.failed)} failed; seeds {seeds}")
    lines.append(f"endpoint: {PRIMARY}, {meaning}")
    starts = {task: row["curve"]["held_out"][0] for (task, _, _), row in reversed(rows.runs.items())}
    measured = study.get("measured", {})
    told = [f"{starts[task]:.2f} on {task}" for task in study["tasks"] if task in starts and not measured.get(task)]
    if told:
        lines.append(f"the start model: {', '.join(told)}")
    return lines


def ranges(numbers: list[int]) -> str:
    """Ascending numbers in words: 1, 2, 3, 7 as 1-3, 7."""
    words: list[str] = []
    known = set(numbers)
    first = 0
    for number in numbers:
        if number - 1 not in known:
            first = number
        if number + 1 in known:
            continue
        is_alone = number == first
        words.append(str(number) if is_alone else f"{first}-{number}")
    return ", ".join(words)


def level_lines(rows: Record, arms: list[str]) -> list[str]:
    """A row for each arm: its own endpoints, means over its tasks and seeds."""
    head = f"{'arm':24} seeds  {PRIMARY:>6}"
    shown = [name for name in SHOWN if name in rows.study.get("endpoints", SHOWN)]
    lines = [head + "".join(f" {name:>{width_of(name)}}" for name in shown)]
    for arm in arms:
        seeds = paired_seeds(rows, arm, arm)
        if not seeds:
            lines.append(f"{arm:24} no seed with all tasks yet")
            continue
        level = endpoint_table(rows, arm, seeds, PRIMARY)
        line = f"{arm:24} {len(seeds):5}  {level.mean():6.3f}"
        for name in shown:
            values = endpoint_table(rows, arm, seeds, name)
            text = reach_of(values) if name == WITH_INTERVAL else mean_or_dash(values)
            line += f" {text:>{width_of(name)}}"
        middle = statistics.iqm_interval(level)
        if middle is not None:
            line += f"   interquartile mean {middle.value:.3f} [{middle.low:.3f}, {middle.high:.3f}]"
        lines.append(line)
    return lines


def width_of(name: str) -> int:
    """The width of an endpoint's column."""
    return 14 if name == WITH_INTERVAL else 9


def reach_of(values: np.ndarray) -> str:
    """A mean over tasks and seeds, and how far its 95 % t interval over seeds reaches to both sides."""
    interval = statistics.t_interval(values.mean(axis=0))
    if math.isinf(interval.high):  # one seed
        return f"{interval.value:.3f}"
    return f"{interval.value:.3f} ± {interval.high - interval.value:.3f}"


def mean_or_dash(values: np.ndarray) -> str:
    """The mean of the values that there are; a dash for an endpoint that no run has, as the KL without a reference."""
    there = values[~np.isnan(values)]
    return f"{there.mean():.3g}" if there.size else "-"


def same_weights(rows: Record, arm: str, base: str) -> int:
    """The number of runs of an arm that the base has too, if all of them end with the base's weights and have its
    held-out curve. Else 0."""
    count = 0
    for (task, name, seed), row in rows.runs.items():
        twin = rows.runs.get((task, base, seed))
        if name != arm or twin is None:
            continue
        if twin["weights"] != row["weights"] or twin["curve"]["held_out"] != row["curve"]["held_out"]:
            return 0
        count += 1
    return count


def comparison_lines(rows: Record, comparisons: dict[str, Comparison], base: str) -> list[str]:
    """A line in words for each arm."""
    lines = []
    for arm, result in comparisons.items():
        same = same_weights(rows, arm, base)
        if same:
            lines.append(f"{arm:24} the same: its {same} runs end with the weights of {base}, to the bit")
            continue
        if result.seeds == 1:
            lines.append(f"{arm:24} {show(result.difference)}  cannot tell: one seed")
            continue
        if result.are_equal:
            why = f"the differences of its {result.seeds} seeds are equal, so they have no interval"
            p = f"p {result.adjusted_p:.3g} by the sign test"
            lines.append(f"{arm:24} {result.difference.value:+.3f}  {result.verdict}: {why}; {p}")
            continue
        signs = result.signs
        parts = [f"{arm:24} {show(result.difference)}  {result.verdict}", f"p {result.adjusted_p:.3g}"]
        parts.append(f"above in {signs.above} and below in {signs.below} of {result.seeds} seeds")
        parts.append(f"sign test p {signs.p:.2g}, {signs.smallest_p:.2g} at best")
        parts.append(f"above {base} with chance {chance(result.improvement)}")
        if result.verdict == "cannot tell":
            needed = result.needed or "more than 1000"
            seen = f"{result.seeds} seeds would see {result.smallest:.3f}"
            parts.append(f"before Holm: {seen}; this difference needs {needed} seeds")
        lines.append("; ".join(parts))
    return lines or ["no arm but the controls has a seed in common with the base yet"]


def idle_lines(rows: Record, base: str) -> list[str]:
    """A line for each task on which no group of the base ever had a gradient: nothing can be learned there."""
    lines = []
    for task in rows.study["tasks"]:
        curves = curves_of(rows, task, base)
        if curves and not any(any(curve["informative"]) for curve in curves):
            lines.append(
                f"{task}: no group of {base} had a gradient in {len(curves)} runs, so it learned nothing there. Does "
                "the task fit the model? study.py calibrate tells"
            )
    return lines


def beat_lines(rows: Record, arms: list[str]) -> list[str]:
    """The numbers to beat: for each task what the base, and each arm that is better than it, took to the target, as
    means over seeds with their t intervals. A run that does not reach the target counts its whole horizon, one that is
    there before its first step 0."""
    lines = ["to the target, by the base and the arms that are better: mean over seeds and its 95 % t interval"]
    lines.append(f"{'task':14} {'arm':14} target  reached  {'steps':20} {'tokens':26} seconds")
    for task in rows.study["tasks"]:
        for arm in arms:
            seeds = paired_seeds(rows, arm, arm)
            if seeds:
                lines.append(beat_line(rows, task, arm, seeds))
    machines: dict[str, set[str]] = {}  # -> tasks
    for row in rows.runs.values():
        machines.setdefault(f"{row['processor']}, threads: {row['omp_num_threads']}", set()).add(row["task"])
    for machine, its_tasks in sorted(machines.items()):
        of_tasks = f" ({', '.join(sorted(its_tasks))})" if len(machines) > 1 else ""
        lines.append(f"processor: {machine}{of_tasks}")
    return lines


@dataclass
class Spent:
    """What the runs of an arm took to the target of a task: how many reach it, and how many are there before their
    first step; of each run its steps, tokens and seconds."""

    reached: int
    at_start: int
    ends: dict[str, list[float]]


def spent_until(rows: Record, task: str, arm: str, seeds: list[int]) -> Spent:
    """What an arm took to the target of a task."""
    target = rows.study["targets"][task]
    reached = 0
    at_start = 0
    ends: dict[str, list[float]] = {"steps": [], "tokens": [], "seconds": []}
    for seed in seeds:
        row = rows.runs[task, arm, seed]
        reached += max(row["curve"]["held_out"]) >= target
        at_start += row["curve"]["held_out"][0] >= target
        for name, values in ends.items():
            values.append(row["endpoints"][name])
    return Spent(reached, at_start, ends)


def beat_line(rows: Record, task: str, arm: str, seeds: list[int]) -> str:
    """What an arm took to the target of a task, in a line."""
    target = rows.study["targets"][task]
    spent = spent_until(rows, task, arm, seeds)
    share = f"{spent.reached}/{len(seeds)}"
    steps = level(spent.ends["steps"])
    tokens = level(spent.ends["tokens"])
    seconds = level(spent.ends["seconds"])
    early = ""
    if spent.at_start:
        early = f"; {spent.at_start} of them before the first step"
    return f"{task:14} {arm:14} {target:6.2f}  {share:>7}  {steps:20} {tokens:26} {seconds}{early}"


def level(values: list[float]) -> str:
    """The mean of steps, tokens or seconds and its t interval as value [low, high]. None is below 0."""
    digits = 1 if np.mean(values) < 100 else 0
    interval = statistics.t_interval(values)
    if math.isinf(interval.low):
        return f"{interval.value:.{digits}f}"
    low = max(0.0, interval.low)
    return f"{interval.value:.{digits}f} [{low:.{digits}f}, {interval.high:.{digits}f}]"


def control_lines(controls: list[str], comparisons: dict[str, Comparison]) -> tuple[list[str], bool]:
    """The controls, and whether all of them lose."""
    lines = ["controls, which must be worse:"]
    fit = True
    for arm in controls:
        if arm not in comparisons:
            lines.append(f"{arm:24} no seed with all tasks yet")
            continue
        result = comparisons[arm]
        loses = result.difference.high < 0
        fit &= loses
        lines.append(f"{arm:24} {show(result.difference)}  {'worse' if loses else 'NOT WORSE'}")
    known = all(arm in comparisons for arm in controls)
    if not fit:
        lines.append("A control is not worse than the base: these tasks are unfit, or the seeds too few.")
    elif not known:
        lines.append("A control has no seed with all tasks: whether the tasks are fit is not known.")
    return lines, fit and known


def lines_of_tasks(rows: Record, arms: list[str], base: str) -> list[str]:
    """Arms task by task. The mean over tasks decides; it may hide a task on which a control does not lose, so that is
    said of controls."""
    lines = []
    for arm in arms:
        seeds = paired_seeds(rows, arm, base)
        if len(seeds) < 2:
            continue
        differences = endpoint_table(rows, arm, seeds, PRIMARY) - endpoint_table(rows, base, seeds, PRIMARY)
        for task, values in zip(rows.study["tasks"], differences, strict=True):
            interval = statistics.t_interval(values)
            word = ""
            if arm in CONTROLS:
                word = "worse " if interval.high < 0 else "cannot tell "
            lines.append(f"  {arm:22} {show(interval)}  {word}on {task} alone, {len(seeds)} seeds")
    return lines


def warning_lines(rows: Record) -> list[str]:
    """What runs said of code that does not do what its flags say: each sentence once for an arm."""
    lines: dict[str, None] = {}
    for row in rows.runs.values():
        for warning in row.get("warnings", ()):  # rows of before have none
            lines.setdefault(f"arm {row['arm']}: WARNING: {warning}")
    return ["", *lines] if lines else []


def has_noise_floor(rows: Record, base: str) -> bool:
    """Whether the record has the base with other seeds."""
    again = rows.arms.get(tasks.AGAIN)
    if again is None or base == tasks.AGAIN:
        return False
    return all(again[name] == rows.arms[base][name] for name in ("script", "flags", "diff"))


def noise_lines(rows: Record, base: str) -> list[str]:
    """The base against itself with other seeds."""
    if not has_noise_floor(rows, base):
        return [f"no noise floor: the arm {tasks.AGAIN} is another one than {base}"]
    (result,) = comparisons_of(rows, [tasks.AGAIN], base).values() or (None,)
    if result is None:
        return ["noise floor: no seeds yet"]
    interval = result.difference
    if result.are_equal:
        return [f"noise floor: {interval.value:+.3f} without an interval, of one seed or of equal differences"]
    holds = interval.low <= 0 <= interval.high
    words = "holds 0, as it must" if holds else "does NOT hold 0: one such interval in twenty does not"
    reach = (interval.high - interval.low) / 2
    return [
        f"noise floor, {base} against itself with other seeds: {show(interval)}; it {words}. "
        f"Two arms of {result.seeds} seeds each, none in common, would have an interval of ± {reach:.3f}"
    ]


def failure_lines(rows: Record) -> list[str]:
    """The runs that failed."""
    lines = ["failed runs, which are in no figure above:"]
    for row in rows.failures:
        key = key_of(row)
        task, arm, seed = key
        since = "; made again since, and that one is in the figures" if key in rows.runs else ""
        lines.append(f"{task} {arm} seed {seed}: {reason(row)}{since}")
    return lines


def reason(failure: dict[str, Any]) -> str:
    """The exit status of a failed run, unless it is 0, and the last line of its log."""
    lines = failure["log"].strip().splitlines() or ["without a word"]
    if failure["code"] == 0:
        return lines[-1]
    return f"exit status {failure['code']}: {lines[-1]}"


CALIBRATION = """fit: right in 0.05 to 0.6 of the samples, greedily in at most 0.6, and at least 0.4 of the groups are
informative, with right and wrong responses
task          sampled  greedy  informative        fit"""


def calibration(name: str, curve: dict[str, Any], groups: int) -> str:
    """The row of a task: see CALIBRATION. The share of groups has its 95 % interval (Wilson's), as a draw of `groups`
    groups."""
    sampled = curve["sampled"][0]
    greedy = curve["held_out"][0]
    informative = curve["informative"][0]
    tests = {"sampled": 0.05 <= sampled <= 0.6, "greedy": greedy <= 0.6, "informative": informative >= 0.4}
    failed = [test for test, passed in tests.items() if not passed]
    word = f"no: {', '.join(failed)}" if failed else "yes"
    low, high = wilson(informative, groups)
    share = f"{informative:.2f} [{low:.2f}, {high:.2f}]"
    return f"{name:12} {sampled:8.2f} {greedy:7.2f}  {share}  {word}"


def replayed(rows: Record, old: dict[str, Any], new: dict[str, Any]) -> tuple[str, bool]:
    """What a run that was made again says of its row, and whether it is the same.

    Code, data, start model and the files that flags name must be the row's. On the same kind of processor, with the
    same packages, the final weights must be the same to the bit. Elsewhere bits differ, and a run with them is like one
    of another seed: its area must be within the noise floor, 2.8 standard deviations of the row's arm over seeds on
    that task (a difference of two runs is as small 19 times in 20). Where seeds differ a lot that says little.
    """
    others = [name for name in OF_THE_RUN if name in old and new[name] != old[name]]
    if others:
        return f"{', '.join(others)} NOT the same: the row's run was another one", False
    before = old["endpoints"][PRIMARY]
    after = new["endpoints"][PRIMARY]
    lines = [f"{PRIMARY} {before:.4f} in the record, {after:.4f} here"]
    if new["weights"] == old["weights"]:
        lines.append(f"weights are the same to the bit: {new['weights'][:16]}")
        others = []
        for name, values in old["curve"].items():
            if name != "seconds" and values != new["curve"][name]:
                others.append(name)
        if others:
            lines.append(f"{', '.join(others)} of the curve NOT the same: the row's is wrong")
        return "\n".join(lines), not others

    lines.append(f"weights DIFFER: {old['weights'][:16]} in the record, {new['weights'][:16]} here")
    if all(new[name] == old[name] for name in OF_THE_MACHINE):
        return "\n".join(lines), False
    task = old["task"]
    arm = old["arm"]
    areas = [row["endpoints"][PRIMARY] for (t, a, _), row in rows.runs.items() if t == task and a == arm]
    if len(areas) < 2:
        lines.append("another machine, and one seed of this arm: no noise floor to compare with")
        return "\n".join(lines), False
    floor = NOISE * float(np.std(areas, ddof=1))
    holds = abs(after - before) <= floor
    where = "within" if holds else "NOT within"
    lines.append(f"another machine: {where} the noise floor of {len(areas)} seeds, {floor:.4f}")
    return "\n".join(lines), holds


def draw(rows: Record, path: Path, base: str | None = None) -> None:
    """Mean held-out curve of each arm, a panel for each task. With up to FEW arms a band of a standard error on both
    sides. The base is black: the record's first arm where none is named."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(rows.study["tasks"])
    is_score = any(rows.study.get("measured", {}).values())
    run = {arm for _, arm, _ in rows.runs}
    shown = [arm for arm in rows.arms if arm in run]
    shown.sort(key=lambda arm: arm != base)  # the base first, the others as they are
    has_bands = len(shown) <= FEW
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 4), squeeze=False, sharey=True)
    for axis, task in zip(axes[0], names, strict=True):
        for i, arm in enumerate(shown):
            curves = curves_of(rows, task, arm)
            if curves:
                draw_arm(axis, curves, i, f"{arm} ({len(curves)})", has_bands)
        axis.set(title=task, xlabel="step", ylim=(0, None if is_score else 1))
    axes[0][0].set_ylabel("score" if is_score else "held-out accuracy, greedy")
    columns = math.ceil(len(shown) / ROWS_OF_LEGEND)
    axes[0][-1].legend(fontsize=7, ncols=columns, loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def curves_of(rows: Record, task: str, arm: str) -> list[dict[str, Any]]:
    """The curves of an arm's runs on a task."""
    curves = []
    for key, row in rows.runs.items():
        if key[:2] == (task, arm):
            curves.append(row["curve"])
    return curves


def draw_arm(axis: Any, curves: list[dict[str, Any]], number: int, label: str, has_band: bool) -> None:
    """The mean of an arm's curves. The ten colours come again with another kind of line."""
    steps = curves[0]["evaluated"]
    heights = np.array([curve["held_out"] for curve in curves])
    mean = heights.mean(0)
    error = heights.std(0) / math.sqrt(max(len(curves) - 1, 1))
    colour = "black"
    kind = "-"
    width = 2.5
    if number > 0:  # not the base
        turn, place = divmod(number - 1, COLOURS)
        colour = f"C{place}"
        kind = LINES[turn % len(LINES)]
        width = 1.0
    axis.plot(steps, mean, kind, color=colour, linewidth=width, label=label)
    if has_band:
        axis.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
