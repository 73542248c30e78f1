"""Put two runs side by side, step by step: where, if anywhere, do they part?

    python scripts/align/align.py A B                            one run a side: differences against a tolerance
    python scripts/align/align.py A1,A2,A3 B1,B2,B3              several seeds a side: bands and a test of overlap
    python scripts/align/align.py import BATCH.pkl OUT           a pickled veRL batch as a step for --load_batches OUT

A and B are each a run's directory, what import wrote, a metrics.jsonl, veRL's file log or console log, TRL's
trainer_state.json or list of logs, or a directory of weights in Hugging Face's format. NAMES says which metric of veRL,
Trinity-RFT and TRL is which of ours. What both sides have is compared:

metrics   relative difference |a - b| / max(|a|, |b|) at each step. A step diverges when it is above --tolerance and
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
are more) that give a T at least as large. It needs no second seed, and decides alone.

Exit status: 0 within tolerance (or overlapping), 1 not, 2 nothing to compare or not readable.
"""

import argparse
import hashlib
import itertools
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.parts import dumps

NAMES = (  # ours, veRL, Trinity-RFT (whose trainer is veRL's), TRL. TRL averages over micro-batches: equal for one
    ("objective/scores", "critic/score/mean", "critic/score/mean", "reward"),
    ("loss/total_avg", None, "actor/final_loss", "loss"),
    ("optim/grad_norm", "actor/grad_norm", "actor/grad_norm", "grad_norm"),
    ("loss/policy_avg", "actor/pg_loss", "actor/pg_loss", "pg_loss"),
    ("objective/kl2_avg", "actor/kl_loss", "actor/kl_loss", "kl"),  # k3, per token, without its coefficient
    ("policy/entropy_avg", "actor/entropy", "actor/entropy_loss", "entropy"),
    ("policy/ppo_kl_avg", "actor/ppo_kl", "actor/ppo_kl", "ppo_kl"),  # the last as scripts/peers/trl_side.py logs it
    ("policy/clipfrac_avg", "actor/pg_clipfrac", "actor/pg_clipfrac", "clip_ratio/region_mean"),
    ("lr", "actor/lr", "actor/lr", "learning_rate"),
    ("val/sequence_lengths", "response_length/mean", "response_length/mean", "completions/mean_length"),
    ("val/sequence_lengths_min", "response_length/min", "response_length/min", "completions/min_length"),
    ("val/sequence_lengths_max", "response_length/max", "response_length/max", "completions/max_length"),
)
OURS = {alias: names[0] for names in NAMES for alias in names[1:] if alias}
MACHINE = re.compile(
    r"time|timing|perf/|per_second|mfu|seconds|idle|bandwidth|bytes|memory|runtime|flos|^epoch$|latency"
    r"|groups_started|groups_in_flight|weight_sync|cached_share"  # by when engines had the weights
)
EXACT = "prompt_ids token_ids mask position sample versions".split()
CLOSE = "score outcome advantage logprobs old_logprobs new_logprobs ref_logprobs".split()


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a path holds. metrics: name -> step -> value; weights: "model" or "step_N" -> its directory."""

    path: Path
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    dumps: list[int] = field(default_factory=list)  # steps
    weights: dict[str, Path] = field(default_factory=dict)
    checksums: dict[str, dict] = field(default_factory=dict)  # "step_N" -> parameter -> sha256, norm


def read_run(path: Path) -> Run:
    """Whatever can be compared at `path`. Raises ValueError when there is nothing."""
    run = Run(path)
    if path.is_dir():
        run.dumps = sorted(int(p.stem[5:]) for p in (path / "dumps").glob("step_*.json"))
        folders = {p.name: p for p in path.iterdir() if p.name == "model" or re.fullmatch(r"step_\d+", p.name)}
        folders = folders or {"model": path}
        run.weights = {name: p for name, p in sorted(folders.items()) if p.is_dir() and weight_files(p)}
        if (path / "weights.jsonl").exists():
            rows = [json.loads(line) for line in (path / "weights.jsonl").read_text().splitlines()]
            run.checksums = {f"step_{row['step']}": row["parameters"] for row in rows}
        states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name.split("-")[1]))
        logs = [p for p in (path / "metrics.jsonl", path / "trainer_state.json", *states[-1:]) if p.exists()][:1]
    else:
        logs = [path]
    rows = [row for p in logs for row in read_rows(p)]
    for row in rows:
        step = next((row[k] for k in ("training_step", "step", "training/global_step") if k in row), None)
        for name, value in row.items() if step is not None else ():
            if (value is None or isinstance(value, (int, float))) and not isinstance(value, bool):
                steps = run.metrics.setdefault(OURS.get(name, name), {})
                steps[int(step)] = math.nan if value is None else float(value)
    for name in ("training_step", "step", "training/global_step"):
        run.metrics.pop(name, None)
    if not (run.metrics or run.dumps or run.weights):
        raise ValueError(f"{path}: no metrics, no dumps and no weights")
    return run


def read_rows(path: Path) -> list[dict]:
    """The rows of a log: JSON lines, veRL's {"step", "data"} lines, its console's `step:1 - name:value - ...`, or TRL's
    trainer_state.json and log_history."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".json":
        found = json.loads(text)
        return found["log_history"] if isinstance(found, dict) else found
    rows, whole = [], text if text.endswith(("}", "\n")) else text.rpartition("\n")[0]  # a last line may be half
    for line in whole.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows.append({"step": row["step"]} | row["data"] if isinstance(row.get("data"), dict) else row)
        elif found := re.search(r"\bstep:(\d+) - (.*)", line):
            pairs = [part.rpartition(":") for part in found[2].split(" - ")]
            values = {name: re.sub(r"np\.\w+\((.*)\)", r"\1", value) for name, _, value in pairs}
            rows.append({"step": int(found[1])} | {name: float(value) for name, value in values.items()})
    return rows


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory, or its adapter's; safetensors first, as transformers does."""
    for pattern in ("model*.safetensors", "pytorch_model*.bin", "adapter_model.safetensors"):
        if files := sorted(directory.glob(pattern)):
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
    embeddings = [
        name for name in state if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
    ]
    if config.exists() and json.loads(config.read_text()).get("tie_word_embeddings") and len(embeddings) == 1:
        state.setdefault("lm_head.weight", state[embeddings[0]])
    return state


# ---------------------------------------------------------------------------------------------------------------------
# One run a side
# ---------------------------------------------------------------------------------------------------------------------


def shared_metrics(sides: list[list[Run]], wanted: list[str] | None) -> dict[str, list[int]]:
    """Metric -> the steps at which every run has it. Raises ValueError when a wanted one is nowhere shared."""
    runs = [run for side in sides for run in side]
    names = [n for n in runs[0].metrics if all(n in run.metrics for run in runs)]
    known = [row[0] for row in NAMES]
    names.sort(key=lambda n: known.index(n) if n in known else len(known))
    chosen = [OURS.get(n, n) for n in wanted] if wanted else [n for n in names if not MACHINE.search(n)]
    shared = {n: sorted(set.intersection(*(set(run.metrics.get(n, ())) for run in runs))) for n in chosen}
    missing = [n for n in wanted or () if not shared[OURS.get(n, n)]]
    if missing:
        raise ValueError(f"not on both sides at any step: {', '.join(missing)}")
    return {n: steps for n, steps in shared.items() if steps}


def relative(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|a - b|, and the same over max(|a|, |b|); 0 where both are equal or both NaN, infinite where one is NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        difference = np.where(np.isnan(difference), np.inf, difference)
        scaled = np.where(difference == 0, 0.0, difference / np.maximum(np.abs(a), np.abs(b)))
    return difference, np.where(np.isnan(scaled), np.inf, scaled)


def compare_metrics(a: Run, b: Run, shared: dict[str, list[int]], tolerance: float, atol: float) -> list[dict]:
    """A row a metric: steps compared, max_abs, max_rel, and the first step that diverges or None."""
    rows = []
    for name, steps in shared.items():
        difference, scaled = relative([a.metrics[name][s] for s in steps], [b.metrics[name][s] for s in steps])
        apart = (scaled > tolerance) & (difference > atol)
        first = steps[int(apart.argmax())] if apart.any() else None
        row = {"name": name, "steps": len(steps), "max_abs": difference.max(), "max_rel": scaled.max()}
        rows.append(row | {"first": first})
    return rows


def array_difference(a: Any, b: Any) -> tuple[float, float]:
    """max |a - b|, and that over max |b|; infinite for different shapes or one-sided NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        return math.inf, math.inf
    most = relative(a, b)[0].max(initial=0.0)
    finite = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return float(most), float(most / finite) if finite else (math.inf if most else 0.0)


def checksum(tensor: torch.Tensor) -> dict[str, Any]:
    """sha256 of a weight's bytes and its Euclidean norm."""
    data = tensor.detach().contiguous().flatten()
    digest = hashlib.sha256(data.view(torch.uint8).numpy()).hexdigest() if data.numel() else ""
    return {"sha256": digest, "norm": data.double().norm().item()}


def compare_weights(a: Run, b: Run, tolerance: float) -> list[dict]:
    """A row a step whose weights both have, with the parameters whose bytes differ, worst first."""
    rows = []
    names = (a.weights.keys() | a.checksums.keys()) & (b.weights.keys() | b.checksums.keys())
    for name in sorted(names, key=lambda n: (n == "model", int("0" + n[5:]))):
        whole = name in a.weights and name in b.weights
        x, y = (load_hf_state(r.weights[name]) if name in r.weights else r.checksums[name] for r in (a, b))
        lonely = x.keys() ^ y.keys() if whole else ()
        differing = [{"parameter": n, "max_abs": math.inf, "norm": math.inf} for n in sorted(lonely)]
        for parameter in sorted(x.keys() & y.keys()):
            u, v = x[parameter], y[parameter]
            sums = [checksum(t) if isinstance(t, torch.Tensor) else t for t in (u, v)]
            if sums[0]["sha256"] == sums[1]["sha256"]:
                continue
            if not whole:  # the norms are what is left to compare
                most, apart = None, abs(sums[0]["norm"] - sums[1]["norm"])
            elif u.shape != v.shape:
                most, apart = math.inf, math.inf
            else:
                difference = u.double() - v.double()
                most, apart = difference.abs().max().item(), difference.norm().item()
            apart = apart / sums[1]["norm"] if sums[1]["norm"] else math.inf
            hashes = [c["sha256"] for c in sums]
            differing.append({"parameter": parameter, "max_abs": most, "norm": apart, "sha256": hashes})
        differing.sort(key=lambda d: -d["norm"])
        row = {"name": name, "parameters": len(x.keys() & y.keys()), "differing": differing, "whole": whole}
        worst = max((d["norm"] for d in differing), default=0.0)  # NaN is apart too
        rows.append(row | {"norm": worst, "apart": not worst <= tolerance})
    return rows


def compare_dumps(a: Run, b: Run, tolerance: float) -> list[dict]:
    """A row a field: in how many steps it was compared, its largest difference, and the first step that diverges."""
    rows: dict[str, dict] = {}

    def note(name: str, step: int, most: float, apart: bool) -> None:
        row = rows.setdefault(name, {"name": name, "steps": 0, "max_rel": 0.0, "first": None})
        row["steps"], row["max_rel"] = row["steps"] + 1, max(row["max_rel"], most)
        if apart and row["first"] is None:
            row["first"] = step

    for step in sorted({*a.dumps} & {*b.dumps}):
        (x, of_a), (y, of_b) = dumps.read_dump(a.path, step), dumps.read_dump(b.path, step)
        for name in EXACT:
            same = [row[name] for row in x] == [row[name] for row in y]
            note(name, step, 0.0 if same else math.inf, not same)
        for name in CLOSE:  # learner's logprobs: of the rollouts that were trained on
            mine, theirs = ([v for row in rows if name in row for v in np.atleast_1d(row[name])] for rows in (x, y))
            if mine and theirs:
                most = array_difference(mine, theirs)[1]
                note(name, step, most, most > tolerance)
        if of_a["weights"] and of_b["weights"]:  # equal only bit for bit: told, and no part of the verdict
            row = rows.setdefault("weights", {"name": "weights", "steps": 0, "equal": 0, "first": None})
            row["steps"], row["equal"] = row["steps"] + 1, row["equal"] + (of_a["weights"] == of_b["weights"])
    return list(rows.values())


# ---------------------------------------------------------------------------------------------------------------------
# Several seeds a side
# ---------------------------------------------------------------------------------------------------------------------


def permutation_test(a: list[float], b: list[float], most: int = 20_000) -> tuple[float, float]:
    """p-value of |mean a - mean b| when sides are dealt at random, and the smallest p these sizes can have."""
    values, n = np.array([*a, *b]), len(a)
    ways = math.comb(len(values), n)

    def distance(chosen: np.ndarray) -> np.ndarray:  # (ways, n) indices of side A
        total = values[chosen].sum(1)
        return np.abs(total / n - (values.sum() - total) / len(b))

    observed = distance(np.arange(n)[None])[0]
    slack = 1e-12 * np.abs(values).max()  # equal splits must not differ by rounding
    if ways <= most:
        found = distance(np.array(list(itertools.combinations(range(len(values)), n))))
        return float((found >= observed - slack).mean()), (2 if n == len(b) else 1) / ways
    rng = np.random.default_rng(0)
    found = distance(np.array([rng.permutation(len(values))[:n] for _ in range(most - 1)]))
    return float(((found >= observed - slack).sum() + 1) / most), 1 / most


def sign_test(differences: np.ndarray, most: int = 20_000) -> tuple[float, float]:
    """p-value of |mean difference| when every sign is random, and the smallest p that many differences can have."""
    n = len(differences)
    if 2**n <= most:
        signs = np.array(list(itertools.product((1, -1), repeat=n)))
    else:
        signs = np.random.default_rng(0).choice((1, -1), (most, n))
        signs[0] = 1  # the observed way
    found, slack = np.abs(signs @ differences), 1e-12 * np.abs(differences).sum()
    return float((found >= abs(differences.sum()) - slack).mean()), (2 if 2**n <= most else 1) / len(signs)


def band(runs: list[Run], name: str, steps: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (seeds, steps), their mean and standard deviation over seeds; one seed has a band of no width."""
    values = np.array([[run.metrics[name][s] for s in steps] for run in runs])
    return values, values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))


def compare_bands(sides: list[list[Run]], shared: dict[str, list[int]], options: argparse.Namespace) -> list[dict]:
    """A row a metric: share of steps at which the bands overlap, final means, p of the permutation test."""
    rows = []
    for name, steps in shared.items():
        (a, mean_a, std_a), (b, mean_b, std_b) = (band(side, name, steps) for side in sides)
        overlap = float((np.abs(mean_a - mean_b) <= std_a + std_b).mean())  # NaN does not overlap
        last = -max(1, round(options.window * len(steps)))
        if options.paired:
            overlap, (p, smallest) = None, sign_test(mean_a - mean_b)
        else:
            p, smallest = permutation_test(a[:, last:].mean(1).tolist(), b[:, last:].mean(1).tolist())
        row = {"name": name, "steps": len(steps), "overlap": overlap, "p": p, "smallest_p": smallest}
        row |= {"final": [float(mean_a[last:].mean()), float(mean_b[last:].mean())]}
        rows.append(row | {"apart": not ((overlap is None or overlap >= options.min_overlap) and p > options.alpha)})
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Telling
# ---------------------------------------------------------------------------------------------------------------------


def plot(sides: list[list[Run]], shared: dict[str, list[int]], weights: list[dict], path: Path) -> None:
    """For each metric both sides (several seeds: bands), and beside it their difference; 12 metrics at most, and
    none that is equal throughout where others are not. Below, the largest difference of a parameter after each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    a, b = sides[0][0].metrics, sides[1][0].metrics
    names = [n for n, steps in shared.items() if any(a[n][s] != b[n][s] for s in steps)] or list(shared)
    names, weights = names[:12], [row for row in weights if row["name"] != "model"]
    rows = len(names) + bool(weights)
    figure, axes = plt.subplots(rows, 2, figsize=(12, 2.6 * rows), squeeze=False, constrained_layout=True)
    for (left, right), name in zip(axes, names, strict=False):
        steps, means = shared[name], []
        for side, label, style in zip(sides, "AB", ("-", "--"), strict=True):
            _, mean, std = band(side, name, steps)
            means.append(mean)
            (line,) = left.plot(steps, mean, style, label=f"{label}: {', '.join(r.path.name for r in side)}")
            if len(side) > 1:
                left.fill_between(steps, mean - std, mean + std, alpha=0.2, color=line.get_color())
        left.set(title=name)
        left.legend(fontsize=7)
        difference, scaled = relative(*means)
        if scaled.any():
            right.semilogy(steps, np.where(scaled > 0, scaled, np.nan), ".-", label="relative")
            right.semilogy(steps, np.where(difference > 0, difference, np.nan), ".-", label="absolute")
            right.legend(fontsize=7)
        else:
            right.text(0.5, 0.5, "equal", ha="center", transform=right.transAxes)
        right.set(title=f"|A - B| of {name}")
    if weights:
        steps, apart = [int(row["name"][5:]) for row in weights], np.array([row["norm"] for row in weights])
        axes[-1, 1].semilogy(steps, np.where(apart > 0, apart, np.nan), ".-")
        axes[-1, 1].set(title="largest |A - B| / |B| of a parameter")
        axes[-1, 0].plot(steps, [len(row["differing"]) for row in weights])
        axes[-1, 0].set(title=f"parameters whose bytes differ, of {weights[0]['parameters']}")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(rows: list[dict], columns: dict[str, str]) -> None:
    """Print rows; columns: key -> format."""
    if not rows:
        return
    cells = [list(columns)] + [["-" if r.get(k) is None else f.format(r[k]) for k, f in columns.items()] for r in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        parts = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(parts).rstrip())
    print()


def align(sides: list[list[Run]], options: argparse.Namespace) -> dict[str, Any]:
    """Compare, print tables and a verdict and, with --plot, draw; returns the tables and `aligned`."""
    shared = shared_metrics(sides, options.metrics)
    found: dict[str, Any] = {"metrics": [], "weights": [], "dumps": []}
    if options.paired or max(map(len, sides)) > 1:
        apart = tell_bands(found, sides, shared, options)
        wanted = f"p > {options.alpha}" + ("" if options.paired else f" and overlap >= {options.min_overlap:.0%}")
        verdict = f"PARTED, wanted {wanted}" if apart else f"OVERLAP, {wanted}"
    else:
        apart = tell_differences(found, sides[0][0], sides[1][0], shared, options)
        wanted = f"{options.tolerance:g} relative (metrics: or {options.atol:g} absolute)"
        verdict = f"PARTED beyond {wanted}" if apart else f"ALIGNED within {wanted}"
    if not any(found.values()):
        raise ValueError("the two sides have nothing in common: no metric at the same step, no weights, no dumped step")
    if options.plot and shared:
        plot(sides, shared, found["weights"], options.plot)
        print(f"plot {options.plot}")
    steps = {name: max((r["steps"] for r in found[name]), default=0) for name in ("metrics", "dumps")}
    counts = f"{len(shared)} metrics over {steps['metrics']} steps, {len(found['weights'])} saved weights"
    counts += f", {steps['dumps']} dumped steps"
    print(f"{verdict}: {'; '.join(apart) or counts}")
    return found | {"aligned": not apart}


def tell_bands(found: dict, sides: list[list[Run]], shared: dict[str, list[int]], options: argparse.Namespace) -> list:
    """Fill and print the table of several seeds a side; returns what parted, in words."""
    found["metrics"] = compare_bands(sides, shared, options)
    columns = {"name": "{}", "steps": "{}", "overlap": "{:.2f}", "p": "{:.3g}", "smallest_p": "{:.3g}"}
    rows = [row | dict(zip(("mean_a", "mean_b"), row["final"], strict=True)) for row in found["metrics"]]
    table(rows, columns | {"mean_a": "{:.5g}", "mean_b": "{:.5g}"})
    smallest = max((row["smallest_p"] for row in rows), default=0)
    if smallest > options.alpha:
        print(f"p cannot go below {smallest:.3g} with so few: the test cannot reject, only the bands can.")
    return [f"{r['name']} (p {r['p']:.3g}, overlap {r['overlap'] or 0:.2f})" for r in rows if r["apart"]]


def tell_differences(found: dict, a: Run, b: Run, shared: dict[str, list[int]], options: argparse.Namespace) -> list:
    """Fill and print the tables of one run a side; returns what parted, in words."""
    found["metrics"] = compare_metrics(a, b, shared, options.tolerance, options.atol)
    if not options.metrics:
        found["weights"] = compare_weights(a, b, options.tolerance)
        found["dumps"] = compare_dumps(a, b, options.tolerance)
    first = {"max_rel": "{:.2e}", "first": "step {}"}
    table(found["metrics"], {"name": "{}", "steps": "{}", "max_abs": "{:.2e}"} | first)
    rows = [r | {"differing": len(r["differing"]), "of": "values" if r["whole"] else "norms"} for r in found["weights"]]
    table(rows, {"name": "{}", "parameters": "{}", "differing": "{}", "norm": "{:.2e}", "of": "{}"})
    if found["weights"] and (differing := found["weights"][-1]["differing"]):
        print(f"the parameters of {found['weights'][-1]['name']} whose bytes differ, worst first:")
        rows = [d | {"hashes": " ".join(h[:12] for h in d.get("sha256", ()))} for d in differing[:10]]
        table(rows, {"parameter": "{}", "max_abs": "{:.2e}", "norm": "{:.2e}", "hashes": "{}"})
    table(found["dumps"], {"name": "{}", "steps": "{}", "equal": "{}"} | first)
    apart = [f"{r['name']} at step {r['first']}" for r in found["metrics"] + found["dumps"] if r["first"] is not None]
    return apart + [f"weights of {r['name']}" for r in found["weights"] if r["apart"]][:1]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="A B", help="or: import BATCH.pkl OUT")
    parser.add_argument("--a", action="append", default=[], type=Path, help="a further run of side A, e.g. a seed")
    parser.add_argument("--b", action="append", default=[], type=Path, help="a further run of side B")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative")
    parser.add_argument("--atol", type=float, default=1e-9, help="absolute, of metrics: smaller differences are noise")
    parser.add_argument(
        "--metrics", nargs="+", help="only these, by our names or the other system's; no weights, no dumps"
    )
    parser.add_argument("--paired", action="store_true", help="the same state at each step: test of signs over steps")
    parser.add_argument("--window", type=float, default=0.25, help="seeds: share of the steps whose means are tested")
    parser.add_argument("--min_overlap", type=float, default=0.8, help="seeds: share of steps at which bands overlap")
    parser.add_argument("--alpha", type=float, default=0.05, help="seeds: p of the permutation test has to be above")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="the tables in full")
    parser.add_argument("--step", type=int, help="import: number of the step")
    options = parser.parse_args(argv)
    if options.runs[:1] == ["import"]:
        if len(options.runs) != 3:
            parser.error("import takes BATCH.pkl and a directory")
        return options
    if len(options.runs) not in (0, 2) or not (options.runs or options.a and options.b):
        parser.error("two sides are needed: A B, or --a and --b")
    for side, text in zip((options.a, options.b), options.runs, strict=False):
        side[:0] = map(Path, text.split(","))
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    try:
        if options.runs[:1] == ["import"]:
            from scripts.align.dataproto import import_batch

            print(import_batch(Path(options.runs[1]), Path(options.runs[2]), options.step))
            return 0
        found = align([[read_run(path) for path in side] for side in (options.a, options.b)], options)
    except (ValueError, KeyError, OSError) as error:
        print(f"align.py: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, default=float) + "\n")
    return 0 if found["aligned"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
