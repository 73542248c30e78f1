"""Put two runs side by side, step by step: where, if anywhere, do they part?

    python scripts/align/align.py A B                            one run a side: differences against a tolerance
    python scripts/align/align.py A1,A2,A3,A4 B1,B2,B3,B4        several seeds a side: bands and a permutation test
    python scripts/align/align.py A B --paired                   both sides start each step from the same state
    python scripts/align/align.py import step_7.pkl OUT          a pickled veRL batch as a step for --load_batches OUT

A and B are each a run's directory, a metrics.jsonl, veRL's file log or console log, or a directory of weights in
Hugging Face's format. ALIASES says which metric of veRL, Trinity-RFT and TRL is which of ours. Compared are:

metrics   at each step that both sides have: d = |a - b| / max(|a|, |b|). A step diverges where d is above --tolerance
          and |a - b| is above --atol. Times, rates and other facts of the machine are left out.
weights   of model/ and of each step_N/, without --metrics: |a - b| / |b| of each parameter in the Euclidean norm.

Several seeds: the band of a side at a step is mean +- standard deviation over its seeds (ddof 1), and bands overlap
where |mean_a - mean_b| <= std_a + std_b. A permutation test takes x_i, the mean of run i over the last quarter of the
steps, and T = |mean of side A's x - mean of side B's x|. p is the share of all ways to deal the values to sides of
these sizes that give a T at least as large. It is never below 1 over the number of ways, or 2 with sides of one size:
three seeds against three cannot go below 0.1. The sides overlap in a metric where the bands do in 80 % of the steps and
p > 0.05.

--paired: given the same state, d_t = mean_a - mean_b at step t is as likely as -d_t. T = |mean of d_t|, and p is the
share of all ways to choose the signs (20,000 random ways where there are more) that give a T at least as large. It
decides alone, and needs no second seed.

Exit status: 0 within tolerance (or overlapping), 1 not, 2 nothing to compare or not readable.
"""

import argparse
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports.common import parser, pyplot, table

ALIASES = {  # ours -> veRL's, Trinity-RFT's where it is another (its trainer is veRL's), TRL's
    "objective/scores": "critic/score/mean reward",
    "loss/total_avg": "actor/final_loss loss",
    "optim/grad_norm": "actor/grad_norm grad_norm",
    "loss/policy_avg": "actor/pg_loss pg_loss",
    "objective/kl2_avg": "actor/kl_loss kl",  # k3, per token, without its coefficient
    "policy/entropy_avg": "actor/entropy actor/entropy_loss entropy",
    "policy/ppo_kl_avg": "actor/ppo_kl ppo_kl",  # the last as scripts/peers/trl_side.py logs it
    "policy/clipfrac_avg": "actor/pg_clipfrac clip_ratio/region_mean",
    "lr": "actor/lr learning_rate",
    "val/sequence_lengths": "response_length/mean completions/mean_length",
    "val/sequence_lengths_min": "response_length/min completions/min_length",
    "val/sequence_lengths_max": "response_length/max completions/max_length",
}  # TRL averages over micro-batches: equal for one
OURS = {alias: ours for ours, aliases in ALIASES.items() for alias in aliases.split()}
MACHINE = re.compile(
    r"time|timing|perf/|per_second|mfu|seconds|idle|bandwidth|bytes|memory|runtime|flos|^epoch$|latency"
    r"|groups_started|groups_in_flight|weight_sync|cached_share"  # by when engines had the weights
)
STEP_NAMES = ("training_step", "step", "training/global_step")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")  # ends of their names
WINDOW = 0.25  # share of the steps, the last, whose mean is tested
MIN_OVERLAP = 0.8  # share of the steps at which bands overlap
ALPHA = 0.05
MAX_PLOTS = 12

Row = dict[str, Any]  # of a table


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What can be compared at a path."""

    path: Path
    metrics: dict[str, dict[int, float]]  # our name -> step -> value
    weights: dict[str, Path]  # "model" or "step_N" -> its directory


def read_run(path: Path) -> Run:
    """What can be compared at `path`. Raises ValueError when there is nothing."""
    log = path / "metrics.jsonl" if path.is_dir() else path
    is_weights = path.is_dir() and not log.exists()
    metrics = {} if is_weights else collect_metrics(read_rows(log))
    weights = find_weights(path) if path.is_dir() else {}
    if not (metrics or weights):
        raise ValueError(f"{path}: no metrics and no weights")
    return Run(path, metrics, weights)


def find_weights(path: Path) -> dict[str, Path]:
    """The directories of weights in a run, or the directory itself as "model"."""
    names = [folder.name for folder in sorted(path.iterdir())]
    folders = {name: path / name for name in names if name == "model" or re.fullmatch(r"step_\d+", name)}
    if not folders:
        folders = {"model": path}
    return {name: folder for name, folder in folders.items() if weight_files(folder)}


def collect_metrics(rows: list[Row]) -> dict[str, dict[int, float]]:
    """The numbers of a log's rows, under our names. null is NaN. A row without a step counts nothing."""
    metrics: dict[str, dict[int, float]] = {}
    for row in rows:
        steps = [row.pop(name) for name in STEP_NAMES if name in row]
        if not steps:
            continue
        for name, value in row.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
                continue
            values = metrics.setdefault(OURS.get(name, name), {})
            values[int(steps[0])] = math.nan if value is None else float(value)
    return metrics


def read_rows(path: Path) -> list[Row]:
    """The rows of a log: JSON lines, veRL's {"step", "data"} lines, or its console's
    `step:1 - name:value - name:np.float64(value) - ...`. A last line that a kill cut short is left out."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.endswith(("}", "\n")):
        text = text.rpartition("\n")[0]
    rows = []
    for line in text.splitlines():
        on_console = re.search(r"\bstep:(\d+) - (.*)", line)
        if line.startswith("{"):
            row = json.loads(line)
            if isinstance(row.get("data"), dict):
                row = {"step": row["step"], **row["data"]}
            rows.append(row)
        elif on_console:
            rows.append({"step": int(on_console[1])})
            for part in on_console[2].split(" - "):
                name, _, value = part.rpartition(":")
                rows[-1][name] = float(re.sub(r"np\.\w+\((.*)\)", r"\1", value))
    return rows


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory, or its adapter's. [] without any."""
    return sorted(directory.glob("model*.safetensors")) or sorted(directory.glob("adapter_model.safetensors"))


def load_hf_state(directory: Path) -> dict[str, torch.Tensor]:
    """Name -> weight of a model saved by Hugging Face, TRL or this project. A tied head that was left out is the
    embedding again, so that either way of saving gives the same names. Raises ValueError without weights."""
    files = weight_files(directory)
    if not files:
        raise ValueError(f"{directory}: no model*.safetensors")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= load_file(file)
    config = directory / "config.json"
    tied = config.exists() and json.loads(config.read_text()).get("tie_word_embeddings")
    embeddings = [name for name in state if name.endswith(EMBEDDINGS)]
    if tied and len(embeddings) == 1:
        state.setdefault("lm_head.weight", state[embeddings[0]])
    return state


def shared_metrics(runs: list[Run], wanted: list[str] | None) -> dict[str, list[int]]:
    """Metric -> the steps at which every run has it. Raises ValueError when a wanted one is nowhere shared."""
    names = [OURS.get(name, name) for name in wanted or ()]
    if not wanted:
        first = [name for name in ALIASES if name in runs[0].metrics]
        others = [name for name in runs[0].metrics if name not in ALIASES]
        names = [name for name in first + others if not MACHINE.search(name)]
    shared = {}
    for name in names:
        steps = set.intersection(*(set(run.metrics.get(name, ())) for run in runs))
        if steps:
            shared[name] = sorted(steps)
        elif wanted:
            raise ValueError(f"{name} is on both sides at no step")
    return shared


# --- One run a side ---------------------------------------------------------------------------------------------------


def relative(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """|a - b|, and the same over max(|a|, |b|); 0 where both are equal or both NaN, infinite where one is NaN."""
    a = np.asarray(a, np.float64)
    b = np.asarray(b, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.abs(a - b)
        scaled = difference / np.maximum(np.abs(a), np.abs(b))
    for values in (difference, scaled):
        values[np.isnan(values)] = np.inf
        values[same] = 0.0
    return difference, scaled


def compare_metrics(a: Run, b: Run, shared: dict[str, list[int]], tolerance: float, atol: float) -> list[Row]:
    """A row a metric: steps compared, max_abs, max_rel, and the first step that diverges or None."""
    rows = []
    for name, steps in shared.items():
        values = [[run.metrics[name][step] for step in steps] for run in (a, b)]
        difference, scaled = relative(*values)
        diverging = np.flatnonzero((scaled > tolerance) & (difference > atol))
        first = steps[diverging[0]] if len(diverging) else None
        row = {"name": name, "steps": len(steps), "max_abs": difference.max(), "max_rel": scaled.max()}
        rows.append(row | {"first": first})
    return rows


def distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """|a - b| / |b| in the Euclidean norm; infinite where shapes differ or a side lacks the parameter."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    norm = b.double().norm().item()
    return (a.double() - b.double()).norm().item() / norm if norm else math.inf


def compare_weights(a: Run, b: Run) -> list[Row]:
    """A row a step whose weights both have: how many parameters there are and differ, the largest distance, and the
    parameter that has it."""
    rows = []
    shared = a.weights.keys() & b.weights.keys()
    for name in sorted(shared, key=lambda name: (name == "model", int("0" + name[5:]))):
        x = load_hf_state(a.weights[name])
        y = load_hf_state(b.weights[name])
        distances = {parameter: distance(x.get(parameter), y.get(parameter)) for parameter in sorted(x | y)}
        differing = sum(value != 0 for value in distances.values())
        worst = max(distances, key=lambda parameter: (math.isnan(distances[parameter]), distances[parameter]))
        row: Row = {"name": name, "parameters": len(distances), "differing": differing}
        row["distance"] = distances[worst]
        row["worst"] = worst if differing else None
        rows.append(row)
    return rows


def show_differences(a: Run, b: Run, shared: dict[str, list[int]], options: argparse.Namespace) -> list[str]:
    """Print the tables of one run a side; returns what parted, in words. Raises ValueError without a row."""
    metrics = compare_metrics(a, b, shared, options.tolerance, options.atol)
    weights = [] if options.metrics else compare_weights(a, b)
    if not (metrics or weights):
        raise ValueError("the two sides have nothing in common: no metric at the same step and no weights")
    print_table(metrics, "name steps max_abs max_rel first")
    print_table(weights, "name parameters differing distance worst")
    if options.plot and shared:
        plot([[a], [b]], shared, options.plot)
    apart = [f"{row['name']} at step {row['first']}" for row in metrics if row["first"] is not None]
    apart_weights = [f"weights of {row['name']}" for row in weights if not row["distance"] <= options.tolerance]
    return apart + apart_weights[:1]  # once apart, they stay apart


# --- Several seeds a side ---------------------------------------------------------------------------------------------


def permutation_test(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """p-value of |mean a - mean b| when sides are dealt at random, and the smallest p that these sizes can have."""
    n = len(a)
    values = np.concatenate([a, b])
    chosen = np.array(list(itertools.combinations(range(len(values)), n)))  # the first one is the observed way
    totals = values[chosen].sum(1)
    others = values.sum() - totals
    distances = np.abs(totals / n - others / len(b))
    slack = 1e-12 * np.abs(values).max()  # equal splits must not differ by rounding
    are_as_far = distances >= distances[0] - slack
    smallest = (2 if n == len(b) else 1) / len(chosen)
    return float(are_as_far.mean()), smallest


def sign_test(differences: np.ndarray) -> tuple[float, float]:
    """p-value of |mean difference| when every sign is random, and the smallest p that so many differences can have."""
    from scripts.reports import intervals  # with scipy, which the environment of TRL lacks: it reads weights with this

    return intervals.sign_test(differences), max(2.0 ** (1 - len(differences)), 2 / (intervals.MOST_WAYS + 1))


def band(runs: list[Run], name: str, steps: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (seeds, steps), their mean and standard deviation over seeds; one seed has a band of no width."""
    values = np.array([[run.metrics[name][step] for step in steps] for run in runs])
    std = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    return values, values.mean(0), std


def compare_bands(sides: list[list[Run]], shared: dict[str, list[int]], paired: bool) -> list[Row]:
    """A row a metric: share of steps at which the bands overlap, means of the last steps, p. If paired there is no
    overlap, and means are of all steps."""
    rows = []
    for name, steps in shared.items():
        a, mean_a, std_a = band(sides[0], name, steps)
        b, mean_b, std_b = band(sides[1], name, steps)
        last = 0 if paired else -max(1, round(WINDOW * len(steps)))  # means and p are of the same steps
        row: Row = {"name": name, "steps": len(steps), "overlap": None}
        if paired:
            p, smallest = sign_test(mean_a - mean_b)
            overlaps = True
        else:
            p, smallest = permutation_test(a[:, last:].mean(1), b[:, last:].mean(1))
            row["overlap"] = float((np.abs(mean_a - mean_b) <= std_a + std_b).mean())  # NaN does not overlap
            overlaps = row["overlap"] >= MIN_OVERLAP
        row |= {"p": p, "smallest_p": smallest}
        row |= {"mean_a": float(mean_a[last:].mean()), "mean_b": float(mean_b[last:].mean())}
        row["apart"] = not (overlaps and p > ALPHA)
        rows.append(row)
    return rows


def show_bands(sides: list[list[Run]], shared: dict[str, list[int]], options: argparse.Namespace) -> list[str]:
    """Print the table of several seeds a side; returns what parted, in words. Raises ValueError without a row."""
    rows = compare_bands(sides, shared, options.paired)
    if not rows:
        raise ValueError("the two sides have no metric at the same step")
    print_table(rows, "name steps overlap p smallest_p mean_a mean_b")
    smallest = max(row["smallest_p"] for row in rows)
    if smallest > ALPHA:
        print(f"p cannot go below {smallest:.3g} with so few: the test cannot reject, only the bands can.")
    if options.plot:
        plot(sides, shared, options.plot)
    return [f"{row['name']} (p {row['p']:.3g}, overlap {row['overlap'] or 0:.2f})" for row in rows if row["apart"]]


# --- Plots and tables -------------------------------------------------------------------------------------------------


def plot(sides: list[list[Run]], shared: dict[str, list[int]], path: Path) -> None:
    """For each metric both sides; of several seeds the bands. At most MAX_PLOTS metrics."""
    plt = pyplot()
    names = list(shared)[:MAX_PLOTS]
    size = (8, 2.6 * len(names))
    figure, axes = plt.subplots(len(names), 1, figsize=size, squeeze=False, constrained_layout=True)
    for axis, name in zip(axes[:, 0], names, strict=True):
        for side, label, style in zip(sides, "AB", ("-", "--"), strict=True):
            _, mean, std = band(side, name, shared[name])
            (line,) = axis.plot(shared[name], mean, style, label=f"{label}: {', '.join(run.path.name for run in side)}")
            axis.fill_between(shared[name], mean - std, mean + std, alpha=0.2, color=line.get_color())
        axis.set(title=name, xlabel="step")
        axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def print_table(rows: list[Row], columns: str) -> None:
    """Print these columns of rows, if there are any."""
    if not rows:
        return
    names = columns.split()
    cells = []
    for row in rows:
        values = [row[name] for name in names]
        cells.append([f"{value:.3g}" if isinstance(value, float) else str(value) for value in values])
    print(f"{table(names, cells)}\n")


# --- The program ------------------------------------------------------------------------------------------------------


def align(sides: list[list[Run]], options: argparse.Namespace) -> bool:
    """Compare, print tables and a verdict and, with --plot, draw. True where nothing parted."""
    shared = shared_metrics(sides[0] + sides[1], options.metrics)
    if options.paired or max(map(len, sides)) > 1:
        apart = show_bands(sides, shared, options)
        wanted = f"p > {ALPHA}"
        if not options.paired:
            wanted += f" and overlap >= {MIN_OVERLAP:.0%}"
        verdict = f"PARTED, wanted {wanted}" if apart else f"OVERLAP, {wanted}"
    else:
        apart = show_differences(sides[0][0], sides[1][0], shared, options)
        wanted = f"{options.tolerance:g} relative (metrics: or {options.atol:g} absolute)"
        verdict = f"PARTED beyond {wanted}" if apart else f"ALIGNED within {wanted}"
    steps = max(map(len, shared.values()), default=0)
    told = "; ".join(apart) if apart else f"{len(shared)} metrics over {steps} steps"
    print(f"{verdict}: {told}")
    return not apart


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("a", metavar="A", help="or: import")
    flags.add_argument("b", metavar="B", help="or: BATCH.pkl")
    flags.add_argument("out", metavar="OUT", nargs="?", type=Path, help="import: the directory of dumps")
    flags.add_argument("--tolerance", type=float, default=1e-5, help="relative")
    flags.add_argument("--atol", type=float, default=1e-9, help="absolute, of metrics: smaller differences are noise")
    flags.add_argument("--metrics", nargs="+", help="only these, by our names or the other system's; no weights")
    flags.add_argument("--paired", action="store_true", help="the same state at each step: test of signs over steps")
    flags.add_argument("--plot", type=Path, metavar="OUT.png")
    options = flags.parse_args(argv)
    if (options.a == "import") != (options.out is not None):
        flags.error("two sides are needed, or: import BATCH.pkl OUT")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    try:
        if options.out:
            from scripts.align.dataproto import import_batch

            print(import_batch(Path(options.b), options.out))
            return 0
        sides = [[read_run(Path(path)) for path in side.split(",")] for side in (options.a, options.b)]
        return 0 if align(sides, options) else 1
    except (ValueError, KeyError, OSError) as error:
        print(f"align.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
