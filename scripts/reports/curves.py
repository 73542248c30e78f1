"""Draw RUN/report.png: reward, evaluation, response length, KL, logprob gap and seconds per phase, from metrics.jsonl.

    python scripts/reports/curves.py RUN [--out PICTURE.png]

A run starts it at its end; a run that goes on, or was killed, is drawn as far as it is. The ending of --out says the
format (png, pdf, svg).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot; needs no display

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

CORRECT, GAP = "objective/verifiable_correct_rate", "debug/vllm_vs_local_logprob_diff"
PANELS = (  # title, unit, metrics with their labels
    (
        "reward",
        "share of correct responses",
        ((CORRECT, "training rollouts"), (f"eval/{CORRECT}", "held-out prompts (eval)")),
    ),
    ("score", "mean score of a rollout", (("objective/scores", "training"), ("eval/scores", "eval"))),
    ("response length", "tokens", (("val/sequence_lengths", "training"), ("eval/sequence_lengths", "eval"))),
    ("KL to the reference policy", "nats per response", (("objective/kl", "k1"), ("objective/kl3", "k3"))),
    ("engine / learner logprob gap", "nats per token", ((f"{GAP}_mean", "mean"), (f"{GAP}_max", "max"))),
)
PHASES = ("generation", "reward", "training", "weight_sync", "eval", "saving")
PHASES_FAST = ("trainer_waiting_for_data", "training", "gather", "eval", "saving")  # generation runs beside the rest


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl; a line that is being written is left out."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]]


def series(rows: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric where it is a number."""
    points = [(r["training_step"], r[name]) for r in rows if isinstance(r.get(name), (int, float))]
    return [p[0] for p in points], [p[1] for p in points]


def draw_curves(axis: Any, rows: list[dict[str, Any]], title: str, unit: str, names: tuple) -> None:
    """One panel of metrics over training steps."""
    for name, label in names:
        x, y = series(rows, name)
        if x:
            axis.plot(x, y, label=label, marker="o" if name.startswith("eval/") else None, markersize=4)
    axis.set(title=title, ylabel=unit, xlabel="training step")
    if axis.lines:
        axis.legend()
    else:
        axis.text(0.5, 0.5, "not recorded in this run", ha="center", transform=axis.transAxes)


def draw_seconds(axis: Any, rows: list[dict[str, Any]]) -> None:
    """A bar for each step, its phases on top of each other."""
    phases = PHASES_FAST if any("time/trainer_waiting_for_data" in r for r in rows) else PHASES
    heights = {p: dict(zip(*series(rows, f"time/{p}"), strict=True)) for p in phases}
    steps = sorted({s for h in heights.values() for s in h if s > 0})
    bottom = np.zeros(len(steps))
    for phase in phases:
        values = np.array([heights[phase].get(s, 0.0) for s in steps])
        if values.any():
            axis.bar(steps, values, bottom=bottom, width=1.0, label=phase)
            bottom += values
    axis.set(title="time per step", ylabel="seconds", xlabel="training step")
    axis.set_ylim(0, 1.3 * max(bottom, default=1.0))  # room for the legend above the bars
    if steps:
        axis.legend(ncols=3, loc="upper center", handlelength=1, columnspacing=1)


def draw(run_dir: Path, path: Path) -> None:
    """Write the picture."""
    rows = read_rows(run_dir)
    figure, axes = plt.subplots(2, 3, figsize=(15, 8))
    # margins by hand: to have them found takes half of the time
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.07, top=0.9, wspace=0.24, hspace=0.28)
    told = f"{run_dir.name}: {rows[-1]['training_step']} steps, {rows[-1]['episode']:.0f} episodes" if rows else ""
    figure.suptitle(told or run_dir.name)
    for axis, panel in zip(axes.flat, PANELS, strict=False):
        draw_curves(axis, rows, *panel)
    if axes.flat[4].lines and all((line.get_ydata() > np.zeros(1)).all() for line in axes.flat[4].lines):
        axes.flat[4].set_yscale("log")
    axes.flat[0].set_ylim(-0.02, 1.02)
    draw_seconds(axes.flat[5], rows)
    for axis in axes.flat:  # each tick takes time, and there is no step 1.5
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory with metrics.jsonl: output_dir/exp_name")
    parser.add_argument("--out", type=Path, help="file to write; default RUN/report.png")
    args = parser.parse_args()
    if not (args.run / "metrics.jsonl").exists():
        parser.error(f"{args.run} is no run: it has no metrics.jsonl. Give output_dir/exp_name of one that has begun")
    path = args.out or args.run / "report.png"
    draw(args.run, path)
    print(path)


if __name__ == "__main__":
    main()
