"""Put two runs side by side, step by step: where, if anywhere, do they part?

    python scripts/align/align.py A B                            one run a side: differences against a tolerance
    python scripts/align/align.py A1,A2,A3 B1,B2,B3              several seeds a side: bands and a test of overlap
    python scripts/align/align.py import BATCH.pkl OUT           a pickled veRL batch as a step for --load_batches OUT

A and B are each a run's directory, what import wrote, a metrics.jsonl, veRL's file log or console log, TRL's
trainer_state.json or list of logs, or a directory of weights in Hugging Face's format. ALIASES says which metric of
veRL, Trinity-RFT and TRL is which of ours. What both sides have is compared:

metrics   relative difference d = |a - b| / max(|a|, |b|) at each step. A step diverges when d is above --tolerance and
          |a - b| is above --atol. Times, rates and other facts of the machine are left out.
weights   of model/ and each step_N/: |a - b| / |b| of each parameter in the Euclidean norm, max |a - b|, and the sha256
          of its bytes. Where a side has only weights.jsonl (scripts/peers/trl_side.py): sha256, difference of norms.
dumps     of --dump_steps: tokens, masks, positions and versions exactly; scores, advantages and logprobs by
          max |a - b| / max |b|; the hashes of the weights.

Several seeds: at each step both have, the band of a side is mean +- standard deviation over its seeds (ddof 1). Bands
overlap at a step when |mean_a - mean_b| <= std_a + std_b. Then a permutation test: with x_i the mean of run i over the
last --window share of the steps, T = |mean of side A's x - mean of side B's x|, and p is the share of all ways to deal
the n_a + n_b values to sides of n_a and n_b that give a T at least as large (20,000 random ways where there are more,
the observed one counted in). Its smallest value is 1 over the number of ways, or 2 with sides of one size: three seeds
against three cannot go below 0.1. A metric overlaps when the bands do in --min_overlap of the steps and p > --alpha.

--paired is for steps that start from the same state on both sides: given the state, d_t = mean_a - mean_b at step t is
as likely as -d_t. T = |mean of d_t|, and p is the share of all ways to choose the signs (20,000 random ways where there
are more) that give a T at least as large. This test needs no second seed. It decides alone: bands do not count.

Exit status: 0 within tolerance (or overlapping), 1 not, 2 nothing to compare or not readable.
"""

import argparse
import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.parts import dumps
from scripts.reports.common import parser, pyplot
from scripts.reports.intervals import MOST_WAYS, sign_test

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
WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors")  # transformers' order
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")  # ends of their names
EXACT = "prompt_ids token_ids mask position sample versions".split()
CLOSE = "score outcome advantage logprobs old_logprobs new_logprobs ref_logprobs".split()
MAX_PLOTS = 12
FORMATS = {  # of the tables' columns, "{}" of others
    **dict.fromkeys(("max_abs", "max_rel", "norm"), "{:.2e}"),
    **dict.fromkeys(("p", "smallest_p"), "{:.3g}"),
    **dict.fromkeys(("mean_a", "mean_b"), "{:.5g}"),
    "overlap": "{:.2f}",
    "first": "step {}",
}

Row = dict[str, Any]  # of a table and of --json
Weights = dict[str, Any]  # parameter -> its tensor, or its checksum


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What can be compared at a path."""

    path: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)  # name -> step -> value
    dumps: list[int] = field(default_factory=list)  # steps
    weights: dict[str, Path] = field(default_factory=dict)  # "model" or "step_N" -> its directory
    checksums: dict[str, Weights] = field(default_factory=dict)  # "step_N" -> parameter -> sha256, norm

    def load_weights(self, name: str) -> Weights:
        """The tensors of "model" or "step_N", or checksums where only these are there."""
        return load_hf_state(self.weights[name]) if name in self.weights else self.checksums[name]


def read_run(path: Path) -> Run:
    """What can be compared at `path`. Raises ValueError when there is nothing."""
    run = Run(path)
    log: Path | None = path
    if path.is_dir():
        run.dumps = sorted(int(dump.stem[5:]) for dump in (path / "dumps").glob("step_*.json"))
        run.weights = find_weights(path)
        run.checksums = read_checksums(path / "weights.jsonl")
        log = find_log(path)
    if log is not None:
        for row in read_rows(log):
            add_metrics(run, row)
    if not (run.metrics or run.dumps or run.weights):
        raise ValueError(f"{path}: no metrics, no dumps and no weights")
    return run


def find_weights(path: Path) -> dict[str, Path]:
    """The directories of weights in a run, or the directory itself as "model"."""
    names = [folder.name for folder in sorted(path.iterdir())]
    folders = {name: path / name for name in names if name == "model" or re.fullmatch(r"step_\d+", name)}
    if not folders:
        folders = {"model": path}
    return {name: folder for name, folder in folders.items() if weight_files(folder)}


def read_checksums(path: Path) -> dict[str, Weights]:
    """The checksums of each step in weights.jsonl, if it is there."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {f"step_{row['step']}": row["parameters"] for row in rows}


def find_log(path: Path) -> Path | None:
    """The log of a run's directory: ours, or TRL's, also in its last checkpoint."""
    checkpoints = path.glob("checkpoint-*/trainer_state.json")
    states = sorted(checkpoints, key=lambda state: int(state.parent.name.split("-")[1]))
    for log in (path / "metrics.jsonl", path / "trainer_state.json", *states[-1:]):
        if log.exists():
            return log
    return None


def add_metrics(run: Run, row: Row) -> None:
    """Add the numbers of a log's row, under our names. null is NaN. A row without a step counts nothing."""
    steps = [row.pop(name) for name in STEP_NAMES if name in row]
    if not steps:
        return
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            continue
        values = run.metrics.setdefault(OURS.get(name, name), {})
        values[int(steps[0])] = math.nan if value is None else float(value)


def read_rows(path: Path) -> list[Row]:
    """The rows of a log: JSON lines, veRL's {"step", "data"} lines, its console's `step:1 - name:value - ...`, or TRL's
    trainer_state.json and log_history."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".json":
        content = json.loads(text)
        return content["log_history"] if isinstance(content, dict) else content
    if not text.endswith(("}", "\n")):
        text = text.rpartition("\n")[0]  # the last line is incomplete
    rows = []
    for line in text.splitlines():
        on_console = re.search(r"\bstep:(\d+) - (.*)", line)
        if line.startswith("{"):
            row = json.loads(line)
            if isinstance(row.get("data"), dict):
                row = {"step": row["step"], **row["data"]}
            rows.append(row)
        elif on_console:
            rows.append({"step": int(on_console[1]), **read_console(on_console[2])})
    return rows


def read_console(text: str) -> dict[str, float]:
    """The metrics in `name:value - name:np.float64(value) - ...`."""
    values = {}
    for part in text.split(" - "):
        name, _, value = part.rpartition(":")
        values[name] = float(re.sub(r"np\.\w+\((.*)\)", r"\1", value))
    return values


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory, or its adapter's. [] without any."""
    for pattern in WEIGHT_FILES:
        files = sorted(directory.glob(pattern))
        if files:
            return files
    return []


def load_hf_state(directory: Path) -> dict[str, torch.Tensor]:
    """Name -> weight of a model saved by Hugging Face, TRL or this project. A tied head that was left out is the
    embedding again, so that either way of saving gives the same names. Raises ValueError without weights."""
    files = weight_files(directory)
    if not files:
        raise ValueError(f"{directory}: no model*.safetensors and no pytorch_model*.bin")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    config = directory / "config.json"
    tied = config.exists() and json.loads(config.read_text()).get("tie_word_embeddings")
    embeddings = [name for name in state if name.endswith(EMBEDDINGS)]
    if tied and len(embeddings) == 1:
        state.setdefault("lm_head.weight", state[embeddings[0]])
    return state


# ---------------------------------------------------------------------------------------------------------------------
# One run a side
# ---------------------------------------------------------------------------------------------------------------------


def shared_metrics(sides: list[list[Run]], wanted: list[str] | None) -> dict[str, list[int]]:
    """Metric -> the steps at which every run has it. Raises ValueError when a wanted one is nowhere shared."""
    runs = [run for side in sides for run in side]
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
    missing = [name for name in wanted or () if OURS.get(name, name) not in shared]
    if missing:
        raise ValueError(f"not on both sides at any step: {', '.join(missing)}")
    return shared


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


def largest_difference(a: list, b: list) -> float:
    """max |a - b| / max |b|; infinite for different lengths or one-sided NaN."""
    x = np.asarray(a, np.float64)
    y = np.asarray(b, np.float64)
    if x.shape != y.shape:
        return math.inf
    largest = relative(x, y)[0].max(initial=0.0)
    scale = np.abs(y[np.isfinite(y)]).max(initial=0.0)
    if largest == 0:
        return 0.0
    return float(largest / scale) if scale else math.inf


def checksum(tensor: torch.Tensor) -> dict[str, Any]:
    """sha256 of a weight's bytes and its Euclidean norm."""
    data = tensor.detach().contiguous().flatten()
    digest = hashlib.sha256(data.view(torch.uint8).numpy()).hexdigest() if data.numel() else ""
    return {"sha256": digest, "norm": data.double().norm().item()}


def compare_parameter(name: str, a: Any, b: Any) -> Iterator[Row]:
    """max |a - b| and |a - b| / |b| of a parameter, if its bytes differ. a, b: tensor, or a checksum without one.

    A checksum leaves only the norms to compare."""
    sums = [value if isinstance(value, dict) else checksum(value) for value in (a, b)]
    hashes = [one["sha256"] for one in sums]
    if hashes[0] == hashes[1]:
        return
    norm = sums[1]["norm"]
    most = None
    if isinstance(a, dict) or isinstance(b, dict):
        distance = abs(sums[0]["norm"] - norm)
    elif a.shape != b.shape:
        most = distance = math.inf
    else:
        difference = a.double() - b.double()
        most = difference.abs().max().item()
        distance = difference.norm().item()
    scaled = distance / norm if norm else math.inf
    yield {"parameter": name, "max_abs": most, "norm": scaled, "sha256": hashes}


def compare_weights(a: Run, b: Run, tolerance: float) -> list[Row]:
    """A row a step whose weights both have, with the parameters whose bytes differ, worst first."""
    rows = []
    shared = (a.weights.keys() | a.checksums.keys()) & (b.weights.keys() | b.checksums.keys())
    for name in sorted(shared, key=lambda name: (name == "model", int("0" + name[5:]))):
        x = a.load_weights(name)
        y = b.load_weights(name)
        whole = name in a.weights and name in b.weights
        lonely = sorted(x.keys() ^ y.keys()) if whole else []
        differing: list[Row] = [{"parameter": only, "max_abs": math.inf, "norm": math.inf} for only in lonely]
        both = sorted(x.keys() & y.keys())
        for parameter in both:
            differing += compare_parameter(parameter, x[parameter], y[parameter])
        differing.sort(key=lambda row: -row["norm"])
        row: Row = {"name": name, "parameters": len(both), "differing": differing, "whole": whole}
        row["norm"] = max((row["norm"] for row in differing), default=0.0)
        row["apart"] = not row["norm"] <= tolerance  # NaN is apart too
        rows.append(row)
    return rows


def compare_dumps(a: Run, b: Run, tolerance: float) -> list[Row]:
    """A row a field: in how many steps it was compared, its largest difference, and the first step that diverges."""
    rows: dict[str, Row] = {}
    for step in sorted({*a.dumps} & {*b.dumps}):
        (x, of_a), (y, of_b) = dumps.read_dump(a.path, step), dumps.read_dump(b.path, step)
        for name in EXACT:
            same = [row[name] for row in x] == [row[name] for row in y]
            note_field(rows, name, step, 0.0 if same else math.inf, 0.0)
        for name in CLOSE:
            values = values_of(x, name)
            other_values = values_of(y, name)
            if values and other_values:
                note_field(rows, name, step, largest_difference(values, other_values), tolerance)
        if of_a["weights"] and of_b["weights"]:  # equal only bit for bit: shown, and no part of the verdict
            row = rows.setdefault("weights", {"name": "weights", "steps": 0, "equal": 0, "first": None})
            row["steps"] += 1
            row["equal"] += of_a["weights"] == of_b["weights"]
    return list(rows.values())


def values_of(rows: list[Row], name: str) -> list[float]:
    """The numbers of a field, of the rollouts that have it: only those trained on have the learner's logprobs."""
    return [value for row in rows if name in row for value in np.atleast_1d(row[name])]


def note_field(rows: dict[str, Row], name: str, step: int, difference: float, tolerance: float) -> None:
    """Count a step's difference in the row of a field."""
    row = rows.setdefault(name, {"name": name, "steps": 0, "max_rel": 0.0, "first": None})
    row["steps"] += 1
    row["max_rel"] = max(row["max_rel"], difference)
    if difference > tolerance and row["first"] is None:
        row["first"] = step


# ---------------------------------------------------------------------------------------------------------------------
# Several seeds a side
# ---------------------------------------------------------------------------------------------------------------------


def permutation_test(a: list[float], b: list[float], most: int = MOST_WAYS) -> tuple[float, float]:
    """p-value of |mean a - mean b| when sides are dealt at random, and the smallest p these sizes can have."""
    values = np.array([*a, *b])
    n = len(a)
    ways = math.comb(len(values), n)
    if ways <= most:
        chosen = np.array(list(itertools.combinations(range(len(values)), n)))  # the first one is the observed way
        smallest = (2 if n == len(b) else 1) / ways
    else:
        rng = np.random.default_rng(0)
        drawn = [rng.permutation(len(values))[:n] for _ in range(most - 1)]
        chosen = np.array([np.arange(n), *drawn])
        smallest = 1 / most
    totals = values[chosen].sum(1)
    distances = np.abs(totals / n - (values.sum() - totals) / len(b))
    slack = 1e-12 * np.abs(values).max()  # equal splits must not differ by rounding
    return float((distances >= distances[0] - slack).mean()), smallest


def band(runs: list[Run], name: str, steps: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (seeds, steps), their mean and standard deviation over seeds; one seed has a band of no width."""
    values = np.array([[run.metrics[name][step] for step in steps] for run in runs])
    std = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    return values, values.mean(0), std


def compare_bands(sides: list[list[Run]], shared: dict[str, list[int]], options: argparse.Namespace) -> list[Row]:
    """A row a metric: share of steps at which the bands overlap, final means, p of the permutation test."""
    rows = []
    for name, steps in shared.items():
        a, mean_a, std_a = band(sides[0], name, steps)
        b, mean_b, std_b = band(sides[1], name, steps)
        last = -max(1, round(options.window * len(steps)))
        row: Row = {"name": name, "steps": len(steps), "overlap": None}
        if options.paired:
            p, smallest = sign_test(mean_a - mean_b)
            overlaps = True
        else:
            p, smallest = permutation_test(a[:, last:].mean(1).tolist(), b[:, last:].mean(1).tolist())
            row["overlap"] = float((np.abs(mean_a - mean_b) <= std_a + std_b).mean())  # NaN does not overlap
            overlaps = row["overlap"] >= options.min_overlap
        row["p"] = p
        row["smallest_p"] = smallest
        row["final"] = [float(mean_a[last:].mean()), float(mean_b[last:].mean())]
        row["apart"] = not (overlaps and p > options.alpha)
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Plots
# ---------------------------------------------------------------------------------------------------------------------


def plot(sides: list[list[Run]], shared: dict[str, list[int]], weights: list[Row], path: Path) -> None:
    """For each metric both sides (several seeds: bands), and beside it their difference. At most MAX_PLOTS metrics, and
    none that is equal throughout where others are not. Below, the largest difference of a parameter after each step."""
    plt = pyplot()
    a = sides[0][0].metrics
    b = sides[1][0].metrics
    names = [name for name, steps in shared.items() if any(a[name][s] != b[name][s] for s in steps)]
    names = (names or list(shared))[:MAX_PLOTS]
    weights = [row for row in weights if row["name"] != "model"]
    rows = len(names) + bool(weights)
    figure, axes = plt.subplots(rows, 2, figsize=(12, 2.6 * rows), squeeze=False, constrained_layout=True)
    for (left, right), name in zip(axes, names, strict=False):
        plot_metric(left, right, sides, name, shared[name])
    if weights:
        plot_weights(*axes[-1], weights)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_metric(left: Any, right: Any, sides: list[list[Run]], name: str, steps: list[int]) -> None:
    """A metric of both sides, and |A - B|."""
    means = []
    for side, label, style in zip(sides, "AB", ("-", "--"), strict=True):
        _, mean, std = band(side, name, steps)
        means.append(mean)
        (line,) = left.plot(steps, mean, style, label=f"{label}: {', '.join(run.path.name for run in side)}")
        if len(side) > 1:
            left.fill_between(steps, mean - std, mean + std, alpha=0.2, color=line.get_color())
    left.set(title=name)
    left.legend(fontsize=7)

    difference, scaled = relative(*means)
    if scaled.any():
        plot_positive(right, steps, scaled, "relative")
        plot_positive(right, steps, difference, "absolute")
        right.legend(fontsize=7)
    else:
        right.text(0.5, 0.5, "equal", ha="center", transform=right.transAxes)
    right.set(title=f"|A - B| of {name}")


def plot_weights(left: Any, right: Any, weights: list[Row]) -> None:
    """How many parameters differ after each step, and the largest difference."""
    steps = [int(row["name"][5:]) for row in weights]
    counts = [len(row["differing"]) for row in weights]
    left.plot(steps, counts)
    left.set(title=f"parameters whose bytes differ, of {weights[0]['parameters']}")
    norms = np.array([row["norm"] for row in weights])
    plot_positive(right, steps, norms)
    right.set(title="largest |A - B| / |B| of a parameter")


def plot_positive(axis: Any, steps: list[int], values: np.ndarray, label: str | None = None) -> None:
    """On a logarithmic axis, without zeros."""
    axis.semilogy(steps, np.where(values > 0, values, np.nan), ".-", label=label)


# ---------------------------------------------------------------------------------------------------------------------
# Tables and verdict
# ---------------------------------------------------------------------------------------------------------------------


def print_table(rows: list[Row], columns: str) -> None:
    """Print these columns of rows. The first column is aligned to the left, the others to the right."""
    if not rows:
        return
    names = columns.split()
    lines = [names]
    for row in rows:
        values = [(name, row.get(name)) for name in names]
        lines.append(["-" if value is None else FORMATS.get(name, "{}").format(value) for name, value in values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    print()


def align(sides: list[list[Run]], options: argparse.Namespace) -> dict[str, Any]:
    """Compare, print tables and a verdict and, with --plot, draw; returns the tables and `aligned`."""
    shared = shared_metrics(sides, options.metrics)
    tables: dict[str, Any] = {"metrics": [], "weights": [], "dumps": []}
    if options.paired or max(map(len, sides)) > 1:
        tables["metrics"] = compare_bands(sides, shared, options)
        apart = show_bands(tables["metrics"], options.alpha)
        overlap = "" if options.paired else f" and overlap >= {options.min_overlap:.0%}"
        wanted = f"p > {options.alpha}{overlap}"
        verdict = f"PARTED, wanted {wanted}" if apart else f"OVERLAP, {wanted}"
    else:
        a = sides[0][0]
        b = sides[1][0]
        tables["metrics"] = compare_metrics(a, b, shared, options.tolerance, options.atol)
        if not options.metrics:
            tables["weights"] = compare_weights(a, b, options.tolerance)
            tables["dumps"] = compare_dumps(a, b, options.tolerance)
        apart = show_differences(tables)
        wanted = f"{options.tolerance:g} relative (metrics: or {options.atol:g} absolute)"
        verdict = f"PARTED beyond {wanted}" if apart else f"ALIGNED within {wanted}"

    if not any(tables.values()):
        raise ValueError("the two sides have nothing in common: no metric at the same step, no weights, no dumped step")
    if options.plot and shared:
        plot(sides, shared, tables["weights"], options.plot)
        print(f"plot {options.plot}")
    print(f"{verdict}: {'; '.join(apart) or counts_of(tables)}")
    return tables | {"aligned": not apart}


def counts_of(tables: dict[str, Any]) -> str:
    """What was compared."""
    steps = max((row["steps"] for row in tables["metrics"]), default=0)
    dumped = max((row["steps"] for row in tables["dumps"]), default=0)
    metrics = f"{len(tables['metrics'])} metrics over {steps} steps"
    return f"{metrics}, {len(tables['weights'])} saved weights, {dumped} dumped steps"


def show_bands(rows: list[Row], alpha: float) -> list[str]:
    """Print the table of several seeds a side; returns what parted, in words."""
    shown = []
    for row in rows:
        mean_a, mean_b = row["final"]
        shown.append(row | {"mean_a": mean_a, "mean_b": mean_b})
    print_table(shown, "name steps overlap p smallest_p mean_a mean_b")
    smallest = max((row["smallest_p"] for row in rows), default=0)
    if smallest > alpha:
        print(f"p cannot go below {smallest:.3g} with so few: the test cannot reject, only the bands can.")
    return [f"{row['name']} (p {row['p']:.3g}, overlap {row['overlap'] or 0:.2f})" for row in rows if row["apart"]]


def show_differences(tables: dict[str, Any]) -> list[str]:
    """Print the tables of one run a side; returns what parted, in words."""
    print_table(tables["metrics"], "name steps max_abs max_rel first")
    weights = []
    for row in tables["weights"]:
        compared = "values" if row["whole"] else "norms"
        weights.append(row | {"differing": len(row["differing"]), "of": compared})
    print_table(weights, "name parameters differing norm of")
    if weights and weights[-1]["differing"]:
        show_parameters(tables["weights"][-1])
    print_table(tables["dumps"], "name steps equal max_rel first")

    compared = tables["metrics"] + tables["dumps"]
    apart = [f"{row['name']} at step {row['first']}" for row in compared if row["first"] is not None]
    parted_weights = [f"weights of {row['name']}" for row in weights if row["apart"]]
    return apart + parted_weights[:1]


def show_parameters(row: Row) -> None:
    """Print the ten parameters that differ most after a step."""
    print(f"the parameters of {row['name']} whose bytes differ, worst first:")
    rows = []
    for differing in row["differing"][:10]:
        hashes = [digest[:12] for digest in differing.get("sha256", ())]
        rows.append(differing | {"hashes": " ".join(hashes)})
    print_table(rows, "parameter max_abs norm hashes")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("runs", nargs="*", metavar="A B", help="or: import BATCH.pkl OUT")
    flags.add_argument("--a", action="append", default=[], type=Path, help="a further run of side A, e.g. a seed")
    flags.add_argument("--b", action="append", default=[], type=Path, help="a further run of side B")
    flags.add_argument("--tolerance", type=float, default=1e-5, help="relative")
    flags.add_argument("--atol", type=float, default=1e-9, help="absolute, of metrics: smaller differences are noise")
    flags.add_argument(
        "--metrics", nargs="+", help="only these, by our names or the other system's; no weights, no dumps"
    )
    flags.add_argument("--paired", action="store_true", help="the same state at each step: test of signs over steps")
    flags.add_argument("--window", type=float, default=0.25, help="seeds: share of the steps whose means are tested")
    flags.add_argument("--min_overlap", type=float, default=0.8, help="seeds: share of steps at which bands overlap")
    flags.add_argument("--alpha", type=float, default=0.05, help="seeds: p of the permutation test has to be above")
    flags.add_argument("--plot", type=Path, metavar="OUT.png")
    flags.add_argument("--json", type=Path, metavar="OUT.json", help="the tables in full")
    flags.add_argument("--step", type=int, help="import: number of the step")
    options = flags.parse_args(argv)
    if options.runs[:1] == ["import"]:
        if len(options.runs) != 3:
            flags.error("import takes BATCH.pkl and a directory")
        return options
    if len(options.runs) not in (0, 2) or not (options.runs or options.a and options.b):
        flags.error("two sides are needed: A B, or --a and --b")
    if options.runs:
        options.a = [*map(Path, options.runs[0].split(",")), *options.a]
        options.b = [*map(Path, options.runs[1].split(",")), *options.b]
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    try:
        if options.runs[:1] == ["import"]:
            from scripts.align.dataproto import import_batch

            print(import_batch(Path(options.runs[1]), Path(options.runs[2]), options.step))
            return 0
        sides = [[read_run(path) for path in side] for side in (options.a, options.b)]
        found = align(sides, options)
    except (ValueError, KeyError, OSError) as error:
        print(f"align.py: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=float) + "\n")
    return 0 if found["aligned"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
