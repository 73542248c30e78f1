"""Compare two or more runs: the table, what the numbers say, paired differences over the same prompts, and plots.

    python scripts/reports/compare_runs.py RUN RUN [RUN ...] [--labels eager compiled] [--out DIRECTORY]

prints the comparison and writes DIRECTORY/comparison.md, with a row for each step too, and comparison.png (default: the
first run's parent). The steps that all runs have are compared. Step 1 includes compilation and warm-up, so means are
over the steps after it; sums are over all steps. --with_first_step includes step 1 in the means, as open-instruct's
reports do.

Columns with the names of open-instruct's reports have their definitions. The tokens of a step are those of the groups
it keeps, each prompt once. learner_tok/s_overall is the tokens of all earlier steps over the wall time since the loop
began, evaluation and saving included. actor_tok/s is the same tokens over the seconds of the longest group.
training_time includes the waiting for data. Rewards and correct rates are of the groups kept. The heading of any other
column says what it covers.

Paired differences (--save_traces) are between the first run and each other run. A prompt counts if both runs sampled
its rollouts at the same place of the stream (in the batch of the same step). In each run, prompt i has the mean x_i
over its samples, and d_i = x_i(other) - x_i(first). Over n different prompts, with mean d and standard deviation s of
d_i (ddof 1), the interval is d +- t(0.975, n - 1) s / sqrt(n). p is that of align.py's test of signs: the share of
random signs of d_i whose mean is at least as far from 0. Both hold for other prompts with these same runs. They cannot
show how runs with other seeds would differ: that takes several seeds a side (scripts/align/align.py). Where fewer than
6 prompts differ p is above 0.05, and the interval is too narrow: where none differs it has no width.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports import intervals
from scripts.reports.common import GAP, TRAINING, Run, cell, parser, pyplot, read_lines, table

STEP_TOKENS = "val/num_step_tokens"
TOTAL = "time/total"
OVERALL = "learner_tokens_per_second_overall"
REWARD = "objective/verifiable_reward"
REWARD_KINDS = ("reward", "correct_rate")


class Column(NamedTuple):
    """A number of each step."""

    heading: str
    metric: str
    digits: int  # after the point


TIMING = "Timing (s)"
REWARDS = "Reward, accuracy and gap"
THROUGHPUT = "Throughput"
SECTIONS = {
    REWARDS: [],
    THROUGHPUT: [
        Column("learner_tok/s_step", "learner_tokens_per_second_step", 0),
        Column("actor_tok/s", "val/actor_tokens_per_second", 0),
        Column("response_tok/s, all rollouts", "val/response_tokens_per_second", 0),
        Column("step_tokens", STEP_TOKENS, 0),
        Column("sampled_tokens, all rollouts", "val/num_sampled_tokens", 0),
        Column("response_length", "val/sequence_lengths", 1),
    ],
    TIMING: [
        Column("total_time", TOTAL, 2),
        Column("training_time", TRAINING, 2),
        Column("weight_sync", "time/weight_sync", 2),
        Column("generation", "time/generation", 2),
        Column("reward_time", "time/reward", 2),
    ],
}
LOGPROB_GAP = Column("logprob_gap", f"{GAP}_mean", 5)
NEITHER_IS_BETTER = {STEP_TOKENS, "val/num_sampled_tokens", "val/sequence_lengths"}
ALWAYS_DIFFERENT = {
    "exp_name",
    "output_dir",
    "command",
    "launch",
    "process",
    "begun",
    "code",
}  # flags and facts not compared
PLOTS = {
    "share of correct responses": "objective/verifiable_correct_rate",
    "response length (tokens)": "val/sequence_lengths",
    "logprob gap (nats)": f"{GAP}_mean",
    "seconds per step": TOTAL,
    "learner tokens/s of a step": "learner_tokens_per_second_step",
}


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def load(paths: list[Path], labels: list[str] | None, after: int = 1) -> list[Run]:
    """The runs, cut to the steps that all have. Raises ValueError when there are fewer than 2 such steps."""
    names = labels or [path.resolve().name for path in paths]
    runs = []
    for path, name in zip(paths, names, strict=True):
        label = name if names.count(name) == 1 else f"{path.resolve().parent.name}/{name}"
        runs.append(Run(path, label, after))

    shared = set.intersection(*(set(run.rows) for run in runs))
    if len(shared) < 2:
        raise ValueError(f"the runs share {len(shared)} training steps; 2 are needed")
    for run in runs:
        run.rows = {step: row for step, row in run.rows.items() if step in shared}
    return runs


def reward_columns(metrics: set[str], prefix: str, note: str) -> list[Column]:
    """Reward and correct rate of all verifiers together and of each verifier, of the metrics `prefix`VERIFIER_KIND."""
    verifiers = set()
    for metric in metrics:
        for kind in REWARD_KINDS:
            if metric.startswith(prefix) and metric.endswith(f"_{kind}"):
                verifiers.add(metric.removeprefix(prefix).removesuffix(f"_{kind}"))

    columns = []
    for verifier in sorted(verifiers - {"non_score", "rlhf"}, key=lambda name: (name != "verifiable", name)):
        names = [f"{verifier}_{kind}" for kind in REWARD_KINDS]
        columns += [Column(name + note, prefix + name, 3) for name in names if prefix + name in metrics]
    return columns


def sections(runs: list[Run]) -> dict[str, list[Column]]:
    """The SECTIONS with the columns that any run has, and with its rewards: of the groups kept, then of all groups."""
    metrics = {metric for run in runs for row in run.rows.values() for metric in row}
    found = {}
    for section, columns in SECTIONS.items():
        found[section] = [column for column in columns if column.metric in metrics]
    found[REWARDS] += reward_columns(metrics, "objective_kept/", "")
    found[REWARDS] += reward_columns(metrics, "objective/", ", all rollouts")
    if LOGPROB_GAP.metric in metrics:
        found[REWARDS].append(LOGPROB_GAP)
    return found


def columns_of(runs: list[Run]) -> list[Column]:
    """All columns of all sections."""
    return [column for columns in sections(runs).values() for column in columns]


def best_in_bold(metric: str, values: list[float | None], digits: int) -> list[str]:
    """Cells with the best in bold: the least of seconds and gaps, the most of others. None if all cells are equal."""
    cells = [cell(value, digits) for value in values]
    known = [value for value in values if value is not None and not math.isnan(value)]
    all_alike = len(known) < 2 or len(set(cells)) == 1
    if metric in NEITHER_IS_BETTER or all_alike:
        return cells
    better = min if metric.startswith(("time/", "debug/")) else max
    best = cell(better(known), digits)
    return [f"**{text}**" if text == best else text for text in cells]


def summary(runs: list[Run]) -> str:
    """Means, sums over all steps, wall clock: what was learned first, then what it took."""
    minutes = [run.minutes() for run in runs]
    overall = [run.last(OVERALL) for run in runs]
    rows = []
    for section, columns in sections(runs).items():
        rows.append([f"**{section}**", *("" for _ in runs)])
        if section == THROUGHPUT:
            rows.append(["Wall clock (min)", *best_in_bold("time/", minutes, 2)])
            rows.append(["final learner_tok/s_overall", *best_in_bold(OVERALL, overall, 0)])
        for column in columns:
            means = [run.mean(column.metric) for run in runs]
            rows.append([f"avg {column.heading}", *best_in_bold(column.metric, means, column.digits)])
        if section == TIMING:
            rows.append(sum_row("total_time", TOTAL, runs))
            rows.append(sum_row("training_time", TRAINING, runs))
    return table(["Metric", *(run.label for run in runs)], rows)


def sum_row(heading: str, metric: str, runs: list[Run]) -> list[str]:
    """A row of the summary: seconds over all steps."""
    note = " (step 1 too)" if runs[0].after else ""
    sums: list[float | None] = [sum(run.values(metric, 0)) for run in runs]
    return [f"sum {heading}{note}", *best_in_bold(metric, sums, 1)]


def overview(runs: list[Run]) -> str:
    """A row a run: what it was, where it ran, and how to find it again."""
    rows = []
    for run in runs:
        programs = [Path(word).name for word in run.environment.get("command", []) if word.endswith(".py")]
        script = programs[0] if programs else "?"
        model = f"{run.args.get('model_name_or_path', '?')} ({run.args.get('model_dtype', '?')})"
        device = str(run.environment.get("device", "?"))
        rows.append([run.label, script, model, device, run.wandb, run.commit(" + changes"), f"`{run.path}`"])
    head = ["Run", "script", "model", "device", "W&B run", "git commit", "directory"]
    return table(head, rows, text=tuple(range(len(head))))


def first_step(runs: list[Run]) -> str:
    """Step 1, and the seconds before it."""
    number = min(runs[0].rows)
    steps = [run.rows[number] for run in runs]
    before = []
    for step in steps:
        end = step.get("time/from_scratch") or math.nan
        before.append(cell(end - (step.get(TOTAL) or 0), 1))

    rows = [["seconds before it", *before]]
    for column in columns_of(runs):
        cells = [cell(step.get(column.metric), column.digits) for step in steps]
        rows.append([column.heading, *cells])
    return table([f"Step {number}", *(run.label for run in runs)], rows)


def per_step(run: Run, columns: list[Column]) -> str:
    """A row a step."""
    head = ["Step", *(column.heading.replace("_correct_rate", "_correct") for column in columns)]
    rows = []
    for step, row in run.rows.items():
        rows.append([str(step), *(cell(row.get(column.metric), column.digits) for column in columns)])
    return table(head, rows)


# ---------------------------------------------------------------------------------------------------------------------
# The same prompts
# ---------------------------------------------------------------------------------------------------------------------

MEASURES = ("score", "correct (share)", "response length (tokens)", "ended by itself (share)")


class Samples(NamedTuple):
    """What a run sampled for a prompt at one place of the stream. values: measure -> a value a sample."""

    prompt: str
    values: dict[str, list[float]]


class Difference(NamedTuple):
    """A measure of two runs over the same prompts: their means, and mean, 95 % interval and p of other - first."""

    measure: str
    prompts: int
    different: int  # of the prompts: their d is not 0
    first: float
    other: float
    mean: float
    low: float
    high: float
    p: float


def measure(row: dict[str, Any]) -> dict[str, float | None]:
    """MEASURES of a rollout."""
    correct = None if row["verifiable"] is None else float(row["verifiable"] > 0)
    ended = float(row["finish_reason"] == "stop")
    return dict(zip(MEASURES, (row["score"], correct, float(len(row["token_ids"])), ended), strict=True))


def sampled(run: Run) -> dict[tuple[int, int], Samples]:
    """(step, position) -> what was sampled there. Missing scores are left out."""
    samples: dict[tuple[int, int], Samples] = {}
    for row in read_lines(run.path / "rollouts.jsonl"):
        if row["training_step"] not in run.rows:
            continue
        place = (row["training_step"], row["position"])
        if place not in samples:
            samples[place] = Samples(row["prompt"], {name: [] for name in MEASURES})
        for name, value in measure(row).items():
            if value is not None:
                samples[place].values[name].append(value)
    return samples


def paired(first: Run, other: Run) -> list[Difference]:
    """A difference a measure. [] without shared prompts."""
    samples = sampled(first)
    other_samples = sampled(other)
    places = sorted(samples.keys() & other_samples.keys())
    pairs = [(samples[place], other_samples[place]) for place in places]
    same_prompt = [(a, b) for a, b in pairs if a.prompt == b.prompt]

    differences = []
    for name in MEASURES:
        means_of: dict[str, list[tuple[float, float]]] = {}  # by prompt: one that came again is no new prompt
        for a, b in same_prompt:
            if a.values[name] and b.values[name]:
                means = (statistics.fmean(a.values[name]), statistics.fmean(b.values[name]))
                means_of.setdefault(a.prompt, []).append(means)
        if len(means_of) >= 2:
            differences.append(difference(name, np.array([np.mean(means, 0) for means in means_of.values()])))
    return differences


def difference(name: str, means: np.ndarray) -> Difference:
    """The difference of a measure. means: (prompts, 2), of the first run and of the other."""
    of_first, of_other = means.T
    first, other = means.mean(0)
    found = intervals.mean_difference(of_first.tolist(), of_other.tolist())
    d = of_other - of_first
    different = int(np.count_nonzero(d))
    p = 1.0
    if d.any():
        p, _ = intervals.sign_test(d)
    return Difference(
        measure=name,
        prompts=found.n,
        different=different,
        first=first,
        other=other,
        mean=found.mean,
        low=found.low,
        high=found.high,
        p=p,
    )


def is_few(difference: Difference) -> bool:
    """Whether so few prompts differ that the interval is too narrow, with a width of 0 where none does."""
    return difference.different < intervals.FEWEST_DIFFERENT


def paired_table(first: Run, other: Run, differences: list[Difference]) -> str:
    """A row a measure."""
    head = ["Measure", "prompts", "that differ", first.label, other.label, "difference", "95 % interval", "p"]
    rows = []
    for d in differences:
        interval = f"{d.low:+.4g} to {d.high:+.4g}"
        if is_few(d):
            interval += " (few differ)"
        means = [f"{d.first:.4g}", f"{d.other:.4g}", f"{d.mean:+.4g}"]
        rows.append([d.measure, str(d.prompts), str(d.different), *means, interval, f"{d.p:.3g}"])
    return table(head, rows)


# ---------------------------------------------------------------------------------------------------------------------
# What the numbers say
# ---------------------------------------------------------------------------------------------------------------------


def settings(runs: list[Run]) -> list[str]:
    """Flags, facts of environment.json, and files in code/ that are not the same in all runs."""
    lines = []
    for facts in ([run.args for run in runs], [run.environment for run in runs], code_of(runs)):
        for key in sorted(set().union(*facts) - ALWAYS_DIFFERENT):
            values = [fact.get(key) for fact in facts]
            if any(value != values[0] for value in values):
                texts = [f"{run.label} {value}" for run, value in zip(runs, values, strict=True)]
                lines.append(f"`{key}`: {', '.join(texts)}")
    return lines


def code_of(runs: list[Run]) -> list[dict[str, str]]:
    """What each run ran beside its commit: the beginning of the sha256 of each file in its code/. Empty where a run is
    older and kept none."""
    found = []
    for run in runs:
        kept = run.environment.get("code", {})
        found.append({f"code/{name}": digest[:8] for name, digest in kept.items() if name != "git_commit"})
    return found if all(found) else [{} for _ in runs]


def tell_throughput(first: Run, run: Run) -> Iterator[str]:
    """Tokens per second of two runs."""
    tokens = sum(run.values(STEP_TOKENS))
    seconds = sum(run.values(TOTAL))
    first_tokens = sum(first.values(STEP_TOKENS))
    first_seconds = sum(first.values(TOTAL))
    if not (tokens and seconds and first_tokens and first_seconds):
        return
    rate = tokens / seconds
    first_rate = first_tokens / first_seconds
    apart = ", step 1 apart" if run.after else ""
    yield (
        f"**Throughput**: {run.label} processes {rate:,.0f} tokens/s, {first.label} {first_rate:,.0f} "
        f"({rate / first_rate:.2f}x): {tokens / first_tokens:.2f}x the tokens in {seconds / first_seconds:.2f}x the "
        f"seconds{apart}."
    )


def tell_clock(first: Run, run: Run) -> Iterator[str]:
    """Minutes of two runs."""
    minutes = run.minutes()
    first_minutes = first.minutes()
    if not minutes or not first_minutes:
        return
    in_steps = sum(run.values(TOTAL, 0)) / 60
    first_in_steps = sum(first.values(TOTAL, 0)) / 60
    yield (
        f"**Wall clock**: {run.label} {minutes:.2f} min, {first.label} {first_minutes:.2f} min "
        f"({minutes / first_minutes - 1:+.0%}); in steps {in_steps:.2f} and {first_in_steps:.2f}, the rest is "
        "starting, evaluating, saving and dumping."
    )


def tell_phases(first: Run, run: Run) -> Iterator[str]:
    """Where a step of two runs spends its seconds, the largest difference first."""
    seconds = run.phases()
    first_seconds = first.phases()
    if not seconds or not first_seconds:
        return
    more = {phase: seconds.get(phase, 0.0) - first_seconds.get(phase, 0.0) for phase in first_seconds | seconds}
    ordered = sorted(more, key=lambda phase: -abs(more[phase]))
    text = ", ".join(f"{phase} {more[phase]:+.2f} s" for phase in ordered if abs(more[phase]) >= 0.005)
    same_script = seconds.keys() == first_seconds.keys()
    beside = "" if same_script else "; one generates beside its training, the other before it"
    yield f"**Where the seconds are**: a step of {run.label} against {first.label}: {text or 'alike'}{beside}."


def tell_scores(first: Run, run: Run, differences: list[Difference]) -> Iterator[str]:
    """Scores of two runs over the same prompts, else their mean rewards."""
    for d in differences:
        if d.measure in ("score", "correct (share)"):
            apart = not is_few(d) and (d.low > 0 or d.high < 0)
            verdict = "differs" if apart else "cannot be told apart"
            subject = f"**{d.measure.capitalize()}** of {first.label} and {run.label}"
            means = f"{d.first:.4g} and {d.other:.4g}"
            interval = f"{d.low:+.4g} to {d.high:+.4g}"
            if is_few(d):
                interval += f"; {d.different} prompts differ, too few for this interval; p {d.p:.2g}"
            what = f"{means}, difference {d.mean:+.4g} ({interval})"
            yield f"{subject} {verdict} over all rollouts of the same {d.prompts} prompts: {what}."
    first_reward = first.mean(REWARD)
    reward = run.mean(REWARD)
    if not differences and first_reward is not None and reward is not None:
        means = f"{first_reward:.3f} and {reward:.3f}, means over steps and over all rollouts"
        yield (
            f"**Reward** of {first.label} and {run.label}: {means}. "
            "There are no rollouts of the same prompts, so what of it is chance is not known."
        )


def tell_slowest(runs: list[Run]) -> Iterator[str]:
    """The run that has the fewest tokens per second and the most minutes, if that is one run."""
    if not all(run.last(OVERALL) and run.minutes() for run in runs):
        return
    slowest = min(runs, key=lambda run: run.last(OVERALL) or math.inf)
    if slowest is not max(runs, key=lambda run: run.minutes() or 0):
        return
    reward = slowest.mean(REWARD)
    others = [run.mean(REWARD) for run in runs if run is not slowest]
    note = ""
    if reward is not None and None not in others:
        highest = all(reward > other for other in others if other is not None)
        note = f"; its mean reward over all rollouts, {reward:.3f}, is {'' if highest else 'not '}the highest"
    yield (
        f"**{slowest.label}** is the slowest by both, {slowest.last(OVERALL):,.0f} tokens/s since the start and "
        f"{slowest.minutes():.2f} min{note}."
    )


def tell_first_step(run: Run) -> Iterator[str]:
    """Seconds of step 1 against those of the later steps."""
    seconds = run.rows[min(run.rows)].get(TOTAL)
    later = run.values(TOTAL, 1)
    if seconds and later:
        ratio = seconds / statistics.fmean(later)
        spread = f"{min(later):.2f} to {max(later):.2f} s"
        yield f"**Step 1** of {run.label} took {seconds:.2f} s, {ratio:.2f}x the mean of the later ({spread})."


def observe(runs: list[Run], differences: dict[str, list[Difference]]) -> str:
    """Sentences with the numbers they are made of: scores of the first against the others, speed of each two runs."""
    lines: list[str] = []
    for run in runs[1:]:
        lines += tell_scores(runs[0], run, differences[run.label])
    for first, run in itertools.combinations(runs, 2):
        lines += tell_throughput(first, run)
        lines += tell_clock(first, run)
        lines += tell_phases(first, run)
    lines += tell_slowest(runs)
    for run in runs:
        lines += tell_first_step(run)
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))


# ---------------------------------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------------------------------


def plot(runs: list[Run], path: Path) -> None:
    """Draw PLOTS and the mean seconds of each phase."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, (title, metric) in zip(axes.flat, PLOTS.items(), strict=False):
        for run in runs:
            steps = [step for step, row in run.rows.items() if row.get(metric) is not None]
            if steps:
                axis.plot(steps, run.values(metric, 0), marker="o", markersize=3, label=run.label)
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if axis.lines:
            axis.legend(fontsize=8)
    plot_phases(axes.flat[5], runs)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_phases(axis: Any, runs: list[Run]) -> None:
    """A bar for each run, its phases on top of each other."""
    labels = [run.label for run in runs]
    seconds = [run.phases() for run in runs]
    bottom = np.zeros(len(runs))
    for phase in dict.fromkeys(phase for phases in seconds for phase in phases):
        heights = np.array([phases.get(phase, 0.0) for phases in seconds])
        axis.bar(labels, heights, bottom=bottom, width=0.5, label=phase)
        bottom += heights
    apart = ", step 1 apart" if runs[0].after else ""
    axis.set(title=f"mean seconds per phase{apart}", ylim=(0, 1.3 * max(bottom.max(), 1e-9)))
    if axis.patches:
        axis.legend(loc="upper center", ncols=3, fontsize=8)


def compare(runs: list[Run]) -> str:
    """The comparison as markdown."""
    first = runs[0]
    steps = list(first.rows)
    parts = [
        f"# {' against '.join(run.label for run in runs)}",
        f"{len(steps)} shared steps, {steps[0]} to {steps[-1]}.",
        overview(runs),
    ]
    for run in runs:
        left_out = len({row["training_step"] for row in run.all_rows if row["training_step"] > 0}) - len(steps)
        if left_out:
            parts.append(f"{run.label} has {left_out} steps more, left out.")
    lines = "\n".join(f"- {line}" for line in settings(runs))
    parts.append(f"What is not the same:\n\n{lines}" if lines else "Same settings.")

    kind = f"{len(steps) - 1} steps, step 1 apart" if first.after else f"all {len(steps)} steps"
    parts += [f"## Summary (means over {kind})", summary(runs), first_step(runs)]
    differences = {run.label: paired(first, run) for run in runs[1:]}
    parts += ["## Key observations", observe(runs, differences), "## Paired differences over the same prompts"]
    for run in runs[1:]:
        if differences[run.label]:
            parts.append(paired_table(first, run, differences[run.label]))
        else:
            none = "no prompts at the same place (is there a rollouts.jsonl of both?)"
            parts.append(f"{first.label} and {run.label}: {none}")
    if any(differences.values()):
        parts.append(
            "d = mean over prompts of (other - first), each the mean of its samples; interval d +- t(0.975, n - 1) s / "
            "sqrt(n); p by random signs. This is about other prompts, not about other seeds. Where fewer than "
            f"{intervals.FEWEST_DIFFERENT} prompts differ, p is above 0.05 and the interval is too narrow."
        )
    return "\n\n".join(parts) + "\n"


def per_step_detail(runs: list[Run]) -> str:
    """A table a run as markdown, with a row a step."""
    parts = ["## Per-step detail"]
    for run in runs:
        parts += [f"### {run.label}", per_step(run, columns_of(runs))]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    flags.add_argument("--labels", nargs="+", help="names of the runs instead of their directories' names")
    flags.add_argument("--with_first_step", action="store_true", help="means over all steps, step 1 included")
    flags.add_argument("--out", type=Path, help="directory for comparison.md and comparison.png")
    options = flags.parse_args(argv)
    if len(options.runs) < 2 or options.labels and len(options.labels) != len(options.runs):
        flags.error("two runs or more, and as many labels")
    try:
        runs = load(options.runs, options.labels, after=0 if options.with_first_step else 1)
        text = compare(runs)
    except (ValueError, OSError) as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        return 2

    out = options.out or options.runs[0].resolve().parent
    out.mkdir(parents=True, exist_ok=True)
    plot(runs, out / "comparison.png")
    (out / "comparison.md").write_text(f"{text}\n{per_step_detail(runs)}\n![curves](comparison.png)\n")
    print(f"{text}\n{out / 'comparison.md'}, {out / 'comparison.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
