"""Compare two or more runs: the table, what the numbers say, paired differences over the same prompts, and plots.

    python scripts/reports/compare_runs.py RUN RUN [RUN ...] [--labels eager compiled] [--out DIRECTORY]

prints the comparison and writes DIRECTORY/comparison.md and comparison.png (default: the first run's parent). The steps
that all runs have are compared. Step 1 stands apart, since it has compilation and warm-up in it: means are over the
steps after it, sums over all. --with_first_step takes it in, as open-instruct's reports do.

Columns with the names of open-instruct's reports have their definitions: a step's tokens are those of the groups it
keeps, each prompt once; learner_tok/s_overall is those of all earlier steps over the wall time since the loop began,
evaluation and saving included; actor_tok/s is the same tokens over the longest group's seconds; training_time has the
waiting for data in it; rewards and correct rates are of the groups kept. The others say what they are of.

Paired differences (--save_traces) are between the first run and each other one. Prompt i, whose rollouts both runs
sampled at the same place of the stream (same step's batch), has in each run the mean x_i over its samples, and
d_i = x_i(other) - x_i(first). Over n different prompts, with mean d and standard deviation s of d_i (ddof 1), the
interval is d +- t(0.975, n - 1) s / sqrt(n). p is that of align.py's test of signs: the share of random signs of d_i
whose mean is at least as far from 0. Both are about other prompts for these very runs. How much runs of other seeds
would differ they cannot say: that takes several seeds a side (scripts/align/align.py).
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.align.align import sign_test
from scripts.reports.report import phases, read_json, read_lines, read_metrics

STEP_TOKENS, TOTAL, OVERALL = "val/num_step_tokens", "time/total", "learner_tokens_per_second_overall"
TRAINING = "time/training, waiting for data included"
COLUMNS = (  # heading, metric, digits after the point
    ("Throughput", None, 0),
    ("learner_tok/s_step", "learner_tokens_per_second_step", 0),
    ("actor_tok/s", "val/actor_tokens_per_second", 0),
    ("response_tok/s, all rollouts", "val/response_tokens_per_second", 0),
    ("step_tokens", STEP_TOKENS, 0),
    ("sampled_tokens, all rollouts", "val/num_sampled_tokens", 0),
    ("response_length", "val/sequence_lengths", 1),
    ("Timing (s)", None, 0),
    ("total_time", TOTAL, 2),
    ("training_time", TRAINING, 2),
    ("weight_sync", "time/weight_sync", 2),
    ("generation", "time/generation", 2),
    ("reward_time", "time/reward", 2),
    ("Gap, reward and accuracy", None, 0),
    ("logprob_gap", "debug/vllm_vs_local_logprob_diff_mean", 5),
)  # without a metric: the heading of those that follow
UNDIRECTED = frozenset(
    (STEP_TOKENS, "val/num_sampled_tokens", "val/sequence_lengths")
)  # neither more nor less is better
SAME = frozenset("exp_name output_dir".split())  # flags whose difference says nothing


def cell(value: float | None, digits: int) -> str:
    return "—" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def table(head: list[str], rows: list[list[str]], text: tuple[int, ...] = (0,)) -> str:
    """A markdown table; columns `text` to the left, numbers to the right."""
    rule = "|" + "|".join("---" if i in text else "---:" for i in range(len(head))) + "|"
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


class Run:
    """What a directory holds; means are over the steps > `after`. Raises ValueError without metrics."""

    def __init__(self, path: Path, label: str, after: int = 1):
        self.path, self.label, self.after = path, label, after
        self.args, self.environment = read_json(path / "args.json"), read_json(path / "environment.json")
        self.all_rows = read_metrics(path)
        self.rows = {r["training_step"]: r for r in self.all_rows if r["training_step"] > 0}
        for row in self.rows.values():
            if row.get("time/training") is not None:
                row[TRAINING] = row["time/training"] + (row.get("time/trainer_waiting_for_data") or 0.0)
        found = path / "wandb_id.txt"
        self.wandb = found.read_text().strip() if found.exists() else "—"

    def values(self, metric: str, after: int | None = None) -> list[float]:
        """Of the steps > `after`, None: self.after."""
        first = self.after if after is None else after
        found = [r.get(metric) for step, r in sorted(self.rows.items()) if step > first]
        return [v for v in found if v is not None]

    def mean(self, metric: str) -> float | None:
        values = self.values(metric)
        return statistics.fmean(values) if values else None

    def last(self, metric: str) -> float | None:
        return (self.values(metric, 0) or [None])[-1]

    def phases(self) -> dict[str, float]:
        """Mean seconds of each part of a step, evaluation and saving apart."""
        names = [p for p in phases(self.all_rows) if p not in ("eval", "saving")]
        return {p: seconds for p in names if (seconds := self.mean(f"time/{p}")) is not None}

    def minutes(self) -> float | None:
        """From the start of the program, of each after a --resume, to the end of its last compared step."""
        seconds = self.values("time/from_scratch", 0)
        ends = [last for last, following in zip(seconds, [*seconds[1:], 0.0], strict=True) if following < last]
        return sum(ends) / 60 if seconds else None


def load(paths: list[Path], labels: list[str] | None, after: int = 1) -> list[Run]:
    """The runs, cut to the steps that all have. Raises ValueError when there are fewer than 2 such steps."""
    names = labels or [p.resolve().name for p in paths]
    names = [n if names.count(n) == 1 else f"{p.resolve().parent.name}/{n}" for n, p in zip(names, paths, strict=True)]
    runs = [Run(p, n, after) for p, n in zip(paths, names, strict=True)]
    shared = set.intersection(*(set(run.rows) for run in runs))
    if len(shared) < 2:
        raise ValueError(f"the runs share {len(shared)} training steps; 2 are needed")
    for run in runs:
        run.rows = {step: row for step, row in run.rows.items() if step in shared}
    return runs


def columns(runs: list[Run]) -> list[tuple[str, str | None, int]]:
    """COLUMNS, then reward and correct rate of all verifiers and of each, over the groups kept and over all, as far as
    a run has them."""
    metrics = {k for run in runs for row in run.rows.values() for k in row}
    out: list[tuple[str, str | None, int]] = [c for c in COLUMNS if c[1] is None or c[1] in metrics]
    for prefix, told in (("objective_kept/", ""), ("objective/", ", all rollouts")):
        found = {k.removeprefix(prefix) for k in metrics if k.startswith(prefix)}
        owners = {n.removesuffix(f"_{kind}") for n in found for kind in KINDS if n.endswith(f"_{kind}")}
        owners = sorted(owners - {"non_score", "rlhf"}, key=lambda n: (n != "verifiable", n))
        names = [f"{owner}_{kind}" for owner in owners for kind in KINDS if f"{owner}_{kind}" in found]
        out += [(f"{name}{told}", f"{prefix}{name}", 3) for name in names]
    return out


KINDS = ("reward", "correct_rate")


def best_in_bold(metric: str, values: list[float | None], digits: int) -> list[str]:
    """Cells with the best in bold, the least of seconds and gaps, the most of the rest; none where all read alike."""
    cells = [cell(v, digits) for v in values]
    known = [v for v in values if v is not None and not math.isnan(v)]
    if metric in UNDIRECTED or len(known) < 2 or len(set(cells)) == 1:
        return cells
    best = cell((min if metric.startswith(("time/", "debug/")) else max)(known), digits)
    return [f"**{c}**" if c == best else c for c in cells]


def summary(runs: list[Run]) -> str:
    """Wall clock, means, sums over all steps."""
    rows = [["Wall clock (min)", *best_in_bold("time/", [r.minutes() for r in runs], 2)]]
    rows.append(["final learner_tok/s_overall", *best_in_bold(OVERALL, [r.last(OVERALL) for r in runs], 0)])
    first = " (step 1 too)" if runs[0].after else ""
    sums = [
        [f"sum {heading}{first}", *best_in_bold(metric, [sum(r.values(metric, 0)) for r in runs], 1)]
        for heading, metric in (("total_time", TOTAL), ("training_time", TRAINING))
    ]
    for heading, metric, digits in columns(runs):
        if metric is None:
            rows += sums if heading.startswith("Gap") else []  # they end the timing
            rows.append([f"**{heading}**", *("" for _ in runs)])
        else:
            rows.append([f"avg {heading}", *best_in_bold(metric, [r.mean(metric) for r in runs], digits)])
    return table(["Metric", *(r.label for r in runs)], rows)


def overview(runs: list[Run]) -> str:
    """A row a run: what it was, where it ran, and how to find it again."""
    rows = []
    for run in runs:
        environment = run.environment
        script = next((Path(a).name for a in environment.get("command", []) if a.endswith(".py")), "?")
        commit = str(environment.get("git_commit", "?"))[:12] + (" + changes" if environment.get("git_dirty") else "")
        model = f"{run.args.get('model_name_or_path', '?')} ({run.args.get('model_dtype', '?')})"
        rows.append([run.label, script, model, str(environment.get("device", "?")), run.wandb, commit, f"`{run.path}`"])
    head = ["Run", "script", "model", "device", "W&B run", "git commit", "directory"]
    return table(head, rows, tuple(range(len(head))))


def first_step(runs: list[Run]) -> str:
    """Step 1, and the seconds before it."""
    first = min(runs[0].rows)
    rows = []
    for heading, metric, digits in columns(runs):
        if metric is not None:
            rows.append([heading, *(cell(r.rows[first].get(metric), digits) for r in runs)])
    before = [(r.rows[first].get("time/from_scratch") or math.nan) - (r.rows[first].get(TOTAL) or 0) for r in runs]
    return table(
        [f"Step {first}", *(r.label for r in runs)], [["seconds before it", *(cell(b, 1) for b in before)], *rows]
    )


def per_step(run: Run, chosen: list[tuple[str, str, int]]) -> str:
    chosen = [c for c in chosen if c[1] is not None]
    rows = [[str(s), *(cell(r.get(metric), d) for _, metric, d in chosen)] for s, r in sorted(run.rows.items())]
    return table(["Step", *(heading.replace("_correct_rate", "_correct") for heading, _, _ in chosen)], rows)


# ---------------------------------------------------------------------------------------------------------------------
# The same prompts
# ---------------------------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "score": lambda r: r["score"],
    "correct (share)": lambda r: None if r["verifiable"] is None else float(r["verifiable"] > 0),
    "response length (tokens)": lambda r: float(len(r["token_ids"])),
    "ended by itself (share)": lambda r: float(r["finish_reason"] == "stop"),
}


def t_quantile(freedom: int) -> float:
    """0.975 quantile of Student's t, by its series in 1 / freedom around the normal one (1e-3 from 8 up)."""
    exact = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
    if freedom <= len(exact):
        return exact[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**i for i, term in enumerate(terms, start=1))


def prompt_values(run: Run) -> dict[tuple[int, int], tuple[str, dict[str, list[float]]]]:
    """(step, position) -> prompt and, for each measure, its samples' values; missing scores are left out."""
    out: dict[tuple[int, int], tuple[str, dict[str, list[float]]]] = {}
    for row in read_lines(run.path / "rollouts.jsonl"):
        if row["training_step"] in run.rows:
            place = (row["training_step"], row["position"])
            values = out.setdefault(place, (row["prompt"], {name: [] for name in MEASURES}))[1]
            for name, measure in MEASURES.items():
                if (value := measure(row)) is not None:
                    values[name].append(value)
    return out


def paired(first: Run, other: Run) -> list[dict[str, Any]]:
    """A row a measure: prompts, means of both over them, mean difference, interval, p; [] without shared prompts."""
    a, b = prompt_values(first), prompt_values(other)
    places = [p for p in sorted(a.keys() & b.keys()) if a[p][0] == b[p][0]]
    rows = []
    for name in MEASURES:
        prompts: dict[str, list[tuple[float, float]]] = {}  # a prompt that came again is no new prompt
        for p in places:
            if a[p][1][name] and b[p][1][name]:
                means = (statistics.fmean(a[p][1][name]), statistics.fmean(b[p][1][name]))
                prompts.setdefault(a[p][0], []).append(means)
        if len(prompts) < 2:
            continue
        means = np.array([np.mean(pairs, 0) for pairs in prompts.values()])
        d, n = means[:, 1] - means[:, 0], len(means)
        half = t_quantile(n - 1) * d.std(ddof=1) / math.sqrt(n)
        row = {"name": name, "prompts": n, "first": means[:, 0].mean(), "other": means[:, 1].mean()}
        row |= {"difference": d.mean(), "low": d.mean() - half, "high": d.mean() + half}
        rows.append(row | {"p": sign_test(d)[0] if d.any() else 1.0})
    return rows


def paired_table(first: Run, other: Run, rows: list[dict[str, Any]]) -> str:
    head = ["Measure", "prompts", first.label, other.label, "difference", "95 % interval", "p"]
    cells = []
    for r in rows:
        interval = f"{r['low']:+.4g} to {r['high']:+.4g}"
        numbers = [f"{r['first']:.4g}", f"{r['other']:.4g}", f"{r['difference']:+.4g}", interval, f"{r['p']:.3g}"]
        cells.append([r["name"], str(r["prompts"]), *numbers])
    return table(head, cells)


# ---------------------------------------------------------------------------------------------------------------------
# What the numbers say
# ---------------------------------------------------------------------------------------------------------------------


def settings(runs: list[Run]) -> list[str]:
    """Flags, and facts of environment.json, that are not the same in all runs."""
    lines = []
    for part in ("args", "environment"):
        dicts = [getattr(run, part) for run in runs]
        for key in sorted({k for d in dicts for k in d} - SAME - {"command", "launch", "process", "begun"}):
            values = [d.get(key) for d in dicts]
            if any(v != values[0] for v in values):
                lines.append(f"`{key}`: " + ", ".join(f"{r.label} {v}" for r, v in zip(runs, values, strict=True)))
    return lines


def observe(runs: list[Run], differences: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Sentences with the numbers they are made of: speed of each two runs, reward of the first against the others."""
    lines, apart = [], ", step 1 apart" if runs[0].after else ""
    for first, run in itertools.combinations(runs, 2):
        tokens, seconds = ([sum(r.values(name)) for r in (first, run)] for name in (STEP_TOKENS, TOTAL))
        if all(tokens) and all(seconds):
            a, b = (t / s for t, s in zip(tokens, seconds, strict=True))
            lines.append(
                f"**Throughput**: {run.label} processes {b:,.0f} tokens/s, {first.label} {a:,.0f} ({b / a:.2f}x): "
                f"{tokens[1] / tokens[0]:.2f}x the tokens in {seconds[1] / seconds[0]:.2f}x the seconds{apart}."
            )
        if (m := first.minutes()) and (n := run.minutes()):
            steps = [sum(r.values(TOTAL, 0)) / 60 for r in (first, run)]
            lines.append(
                f"**Wall clock**: {run.label} {n:.2f} min, {first.label} {m:.2f} min ({n / m - 1:+.0%}); in steps "
                f"{steps[1]:.2f} and {steps[0]:.2f}, the rest is starting, evaluating, saving and dumping."
            )
        a, b = first.phases(), run.phases()
        if a and b:
            parts = sorted(((b.get(p, 0.0) - a.get(p, 0.0), p) for p in a | b), key=lambda part: -abs(part[0]))
            text = ", ".join(f"{p} {d:+.2f} s" for d, p in parts if abs(d) >= 0.005) or "alike"
            beside = "; one generates beside its training, the other before it" if a.keys() != b.keys() else ""
            lines.append(f"**Where the seconds are**: a step of {run.label} against {first.label}: {text}{beside}.")
    for run in runs[1:]:
        for row in differences.get(run.label, []):
            if row["name"] in ("score", "correct (share)"):
                apart = row["low"] > 0 or row["high"] < 0
                verdict = "differs" if apart else "cannot be told apart"
                lines.append(
                    f"**{row['name'].capitalize()}** of {runs[0].label} and {run.label} {verdict} on the same "
                    f"{row['prompts']} prompts: {row['first']:.4g} and {row['other']:.4g}, difference "
                    f"{row['difference']:+.4g} ({row['low']:+.4g} to {row['high']:+.4g})."
                )
        pair = [r.mean("objective/verifiable_reward") for r in (runs[0], run)]
        if not differences.get(run.label) and None not in pair:
            lines.append(
                f"**Reward** of {runs[0].label} and {run.label}: {pair[0]:.3f} and {pair[1]:.3f}, means over steps. "
                "There are no rollouts of the same prompts, so what of it is chance is not known."
            )
    slow = {min(runs, key=lambda r: r.last(OVERALL) or math.inf).label, max(runs, key=lambda r: r.minutes() or 0).label}
    if len(slow) == 1 and all(r.last(OVERALL) and r.minutes() for r in runs):
        (run,) = [r for r in runs if r.label in slow]
        reward, others = (
            run.mean("objective/verifiable_reward"),
            [r.mean("objective/verifiable_reward") for r in runs if r is not run],
        )
        more = ""
        if reward is not None and None not in others:
            more = f"; its mean reward, {reward:.3f}, is " + (
                "the highest" if reward > max(others) else "not the highest"
            )
        lines.append(
            f"**{run.label}** is the slowest by both, {run.last(OVERALL):,.0f} tokens/s since the start and "
            f"{run.minutes():.2f} min{more}."
        )
    for run in runs:
        one, later = run.rows[min(run.rows)].get(TOTAL), run.values(TOTAL, 1)
        if one and later:
            ratio, spread = one / statistics.fmean(later), f"{min(later):.2f} to {max(later):.2f} s"
            lines.append(f"**Step 1** of {run.label} took {one:.2f} s, {ratio:.2f}x the mean of the later ({spread}).")
    return [f"{i}. {line}" for i, line in enumerate(lines, start=1)]


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        ("share of correct responses", "objective/verifiable_correct_rate"),
        ("response length (tokens)", "val/sequence_lengths"),
        ("logprob gap (nats)", "debug/vllm_vs_local_logprob_diff_mean"),
        ("seconds per step", TOTAL),
        ("learner tokens/s of a step", "learner_tokens_per_second_step"),
    ]
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), constrained_layout=True)
    for axis, (title, metric) in zip(axes.flat, panels, strict=False):
        for run in runs:
            points = [(s, r[metric]) for s, r in sorted(run.rows.items()) if r.get(metric) is not None]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=run.label) if points else None
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if axis.lines:
            axis.legend(fontsize=8)
    axis, bottom, parts = axes.flat[5], np.zeros(len(runs)), [run.phases() for run in runs]
    for phase in dict.fromkeys(p for part in parts for p in part):
        heights = np.array([part.get(phase, 0.0) for part in parts])
        axis.bar([r.label for r in runs], heights, bottom=bottom, width=0.5, label=phase)
        bottom += heights
    apart = ", step 1 apart" if runs[0].after else ""
    axis.set(title=f"mean seconds per phase{apart}", ylim=(0, 1.3 * max(bottom.max(), 1e-9)))
    if axis.patches:
        axis.legend(loc="upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compare(runs: list[Run]) -> str:
    """The comparison as markdown."""
    steps = sorted(runs[0].rows)
    skipped = {
        r.label: len({x["training_step"] for x in r.all_rows if x["training_step"] > 0}) - len(steps) for r in runs
    }
    parts = [f"# {' against '.join(r.label for r in runs)}", f"{len(steps)} shared steps, {steps[0]} to {steps[-1]}."]
    parts.append(overview(runs))
    parts += [f"{label} has {n} steps more, left out." for label, n in skipped.items() if n]
    lines = settings(runs)
    parts.append("What is not the same:\n\n" + "\n".join(f"- {line}" for line in lines) if lines else "Same settings.")
    differences = {run.label: paired(runs[0], run) for run in runs[1:]}
    kind = f"{len(steps) - 1} steps, step 1 apart" if runs[0].after else f"all {len(steps)} steps"
    parts += [f"## Summary (means over {kind})", summary(runs), first_step(runs)]
    parts += [
        "## Key observations",
        "\n".join(observe(runs, differences)),
        "## Paired differences over the same prompts",
    ]
    for run in runs[1:]:
        rows = differences[run.label]
        none = f"{runs[0].label} and {run.label}: no prompts at the same place (is there a rollouts.jsonl of both?)"
        parts.append(paired_table(runs[0], run, rows) if rows else none)
    if any(differences.values()):
        how = (
            "d = mean over prompts of (other - first), each the mean of its samples; interval d +- t(0.975, n - 1) s / "
        )
        parts.append(how + "sqrt(n); p by random signs. This is about other prompts, not about other seeds.")
    parts.append("## Per-step detail")
    for run in runs:
        parts += [f"### {run.label}", per_step(run, columns(runs))]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--labels", nargs="+", help="names instead of the directories'")
    parser.add_argument("--with_first_step", action="store_true", help="means over all steps, the first too")
    parser.add_argument("--out", type=Path, help="directory of comparison.md and comparison.png")
    options = parser.parse_args(argv)
    if len(options.runs) < 2 or options.labels and len(options.labels) != len(options.runs):
        parser.error("two runs or more, and as many labels")
    try:
        runs = load(options.runs, options.labels, 0 if options.with_first_step else 1)
        text = compare(runs)
    except (ValueError, OSError) as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        return 2
    out = options.out or options.runs[0].resolve().parent
    out.mkdir(parents=True, exist_ok=True)
    plot(runs, out / "comparison.png")
    (out / "comparison.md").write_text(text + "\n![curves](comparison.png)\n")
    print(text + f"\n{out / 'comparison.md'}, {out / 'comparison.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
