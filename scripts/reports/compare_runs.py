"""Compare two or more runs: tables and plots.

    python scripts/reports/compare_runs.py RUN RUN [RUN ...] [--labels eager compiled] [--out DIRECTORY]

prints the comparison and writes DIRECTORY/comparison.md, with a row for each step too, and comparison.png (default: the
first run's parent). The steps that all runs have are compared. Means are over the steps after step 1, which compiles
and warms up; --with_first_step includes it, as open-instruct's reports do. Columns with the names of these reports have
their definitions: tokens, rewards and correct rates are of the groups kept, and training_time has the waiting for data.

How runs with other seeds would differ takes several seeds a side: scripts/study.py, scripts/align/align.py. Two models
on the same questions: scripts/eval.py.
"""

import sys
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports.common import CORRECT, GAP, TRAINING, Run, cell, parser, pyplot, table

STEP_TOKENS = "val/num_step_tokens"
TOTAL = "time/total"
STEP_RATE = "learner_tokens_per_second_step"
OVERALL = "learner_tokens_per_second_overall"


class Column(NamedTuple):
    """A number of each step."""

    heading: str
    metric: str
    digits: int  # after the point


TIMING = "Timing (s)"
REWARDS = "Reward, accuracy and gap"
THROUGHPUT = "Throughput"
SECTIONS = {
    REWARDS: [Column("logprob_gap", f"{GAP}_mean", 5)],
    THROUGHPUT: [
        Column("learner_tok/s_step", STEP_RATE, 0),
        Column("actor_tok/s", "val/actor_tokens_per_second", 0),
        Column("response_tok/s, all rollouts", "val/response_tokens_per_second", 0),
        Column("step_tokens", STEP_TOKENS, 0),
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
NO_VERIFIERS = {"objective/non_score_reward", "objective/rlhf_reward"}
NOT_COMPARED = {"exp_name", "output_dir", "command", "launch", "process", "begun", "code"}  # flags and facts
PLOTS = (CORRECT, "val/sequence_lengths", f"{GAP}_mean", "policy/entropy_avg", TOTAL, STEP_RATE)


# --- Tables -----------------------------------------------------------------------------------------------------------


def load(paths: list[Path], labels: list[str] | None, after: int = 1) -> list[Run]:
    """The runs, cut to the steps that all have. Raises ValueError when there are fewer than 2 such steps."""
    names = labels or [path.resolve().name for path in paths]
    runs = [Run(path, name, after) for path, name in zip(paths, names, strict=True)]
    shared = set.intersection(*(set(run.rows) for run in runs))
    if len(shared) < 2:
        raise ValueError(f"the runs share {len(shared)} training steps; 2 are needed")
    for run in runs:
        run.rows = {step: row for step, row in run.rows.items() if step in shared}
    return runs


def reward_columns(metrics: set[str], prefix: str, note: str) -> list[Column]:
    """Reward and correct rate of all verifiers together, then of each verifier: the metrics `prefix`VERIFIER_KIND."""
    names = [metric.removeprefix(prefix) for metric in metrics - NO_VERIFIERS if metric.startswith(prefix)]
    names = [name for name in names if name.endswith(("_reward", "_correct_rate"))]
    names.sort(key=lambda name: (not name.startswith("verifiable_"), name))
    return [Column(name + note, prefix + name, 3) for name in names]


def sections(runs: list[Run]) -> dict[str, list[Column]]:
    """The SECTIONS with the columns that any run has, and with its rewards: of the groups kept, then of all groups."""
    metrics = {metric for run in runs for row in run.rows.values() for metric in row}
    rewards = reward_columns(metrics, "objective_kept/", "") + reward_columns(metrics, "objective/", ", all rollouts")
    found = {REWARDS: rewards}
    for section, columns in SECTIONS.items():
        found.setdefault(section, []).extend(column for column in columns if column.metric in metrics)
    return found


def summary(runs: list[Run]) -> str:
    """Means, sums over all steps, wall clock: what was learned first, then what it took."""
    rows = []

    def add(name: str, values: list[float | None], digits: int) -> None:
        rows.append([name, *(cell(value, digits) for value in values)])

    for section, columns in sections(runs).items():
        rows.append([f"**{section}**", *("" for _ in runs)])
        if section == THROUGHPUT:
            add("Wall clock (min)", [run.minutes() for run in runs], 2)
            add("final learner_tok/s_overall", [run.last(OVERALL) for run in runs], 0)
        for column in columns:
            add(f"avg {column.heading}", [run.mean(column.metric) for run in runs], column.digits)
    note = " (step 1 too)" if runs[0].after else ""
    for heading, metric in (("total_time", TOTAL), ("training_time", TRAINING)):
        add(f"sum {heading}{note}", [sum(run.values(metric, 0)) for run in runs], 1)
    return table(["Metric", *(run.label for run in runs)], rows)


def overview(runs: list[Run]) -> str:
    """A row a run: what it was, where it ran, and how to find it again."""
    rows = []
    for run in runs:
        programs = [Path(word).name for word in run.environment.get("command", []) if word.endswith(".py")]
        model = f"{run.args.get('model_name_or_path', '?')} ({run.args.get('model_dtype', '?')})"
        device = str(run.environment.get("device", "?"))
        rows.append([run.label, *(programs[:1] or "?"), model, device, run.wandb, run.commit(), f"`{run.path}`"])
    head = ["Run", "script", "model", "device", "W&B run", "git commit", "directory"]
    return table(head, rows, text=tuple(range(len(head))))


def per_step(run: Run, columns: list[Column]) -> str:
    """A row a step."""
    head = ["Step", *(column.heading.replace("_correct_rate", "_correct") for column in columns)]
    rows = []
    for step, row in run.rows.items():
        rows.append([str(step), *(cell(row.get(column.metric), column.digits) for column in columns)])
    return table(head, rows)


def settings(runs: list[Run]) -> list[str]:
    """Flags, facts of environment.json, and hashes of files in code/ that are not the same in all runs."""
    facts = [run.args | run.environment | run.environment.get("code", {}) for run in runs]
    lines = []
    for key in sorted(set().union(*facts) - NOT_COMPARED):
        values = [str(fact.get(key)) for fact in facts]
        if len(set(values)) > 1:
            texts = [f"{run.label} {value}" for run, value in zip(runs, values, strict=True)]
            lines.append(f"- `{key}`: {', '.join(texts)}")
    return lines


# --- The comparison ---------------------------------------------------------------------------------------------------


def plot(runs: list[Run], path: Path) -> None:
    """Draw PLOTS."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, metric in zip(axes.flat, PLOTS, strict=True):
        for run in runs:
            steps = [step for step, row in run.rows.items() if row.get(metric) is not None]
            axis.plot(steps, run.values(metric, 0), marker="o", markersize=3, label=run.label)
        axis.set(title=metric, xlabel="step")
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compare(runs: list[Run]) -> str:
    """The comparison as markdown."""
    first = runs[0]
    steps = list(first.rows)
    kind = f"{len(steps) - 1} steps, step 1 apart" if first.after else f"all {len(steps)} steps"
    parts = [
        f"# {' against '.join(run.label for run in runs)}",
        f"{len(steps)} shared steps, {steps[0]} to {steps[-1]}.",
        overview(runs),
        "What is not the same:",
        "\n".join(settings(runs)) or "- no setting",
        f"## Summary (means over {kind})",
        summary(runs),
    ]
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

    columns = [column for columns in sections(runs).values() for column in columns]
    steps = [f"### {run.label}\n\n{per_step(run, columns)}" for run in runs]
    out = options.out or options.runs[0].resolve().parent
    out.mkdir(parents=True, exist_ok=True)
    plot(runs, out / "comparison.png")
    parts = [text, "## Per-step detail", *steps, "![curves](comparison.png)"]
    (out / "comparison.md").write_text("\n\n".join(parts) + "\n")
    print(f"{text}\n{out / 'comparison.md'}, {out / 'comparison.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
