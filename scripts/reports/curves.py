"""Draw RUN/report.png: what a run learned, how far it moved, and seconds per phase, from metrics.jsonl.

    python scripts/reports/curves.py RUN [--out PICTURE.png]

A run starts it at its end. A run under way, or one that was killed, is drawn with the steps it has. The ending of --out
is the format (png, pdf, svg).
"""

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports import intervals
from scripts.reports.common import CORRECT, GAP, parser, phases, pyplot, read_lines

HELD_OUT = f"eval/{CORRECT}"
# title -> unit, then metric -> label
PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "correct": (
        "share of responses",
        {
            CORRECT: "training rollouts",
            HELD_OUT: "held-out prompts, 95 % interval",
            "objective/audit_correct_rate": "training, by --audit_verifier",
        },
    ),
    "score": (
        "mean score of a rollout",
        {"objective/scores": "training", "eval/scores": "eval", "objective/audit_reward": "by --audit_verifier"},
    ),
    "entropy of the next token": ("nats per token", {"policy/entropy_avg": "training"}),
    "response length": ("tokens", {"val/sequence_lengths": "training", "eval/sequence_lengths": "eval"}),
    "KL to the reference policy": ("nats per response", {"objective/kl": "k1", "objective/kl3": "k3"}),
    "gradient norm": ("before clipping", {"optim/grad_norm": "mean over optimizer steps"}),
    "engine / learner logprob gap": ("nats per token", {f"{GAP}_mean": "mean", f"{GAP}_max": "max"}),
}


def points(rows: list[dict[str, Any]], name: str) -> dict[int, float]:
    """Step -> value of a metric where it is a number."""
    return {row["training_step"]: row[name] for row in rows if isinstance(row.get(name), (int, float))}


def draw_curves(axis: Any, rows: list[dict[str, Any]], labels: dict[str, str]) -> None:
    """Metrics over training steps. labels: metric -> label."""
    for name, label in labels.items():
        values = points(rows, name)
        if values:
            axis.plot(list(values), list(values.values()), label=label, marker=".")
    if axis.lines:
        axis.legend()
    else:
        axis.text(0.5, 0.5, "not recorded in this run", ha="center", transform=axis.transAxes)


def draw(run_dir: Path, path: Path) -> None:
    """Write the picture."""
    plt = pyplot()
    rows = list(read_lines(run_dir / "metrics.jsonl"))
    figure, axes = plt.subplots(2, 4, figsize=(18, 8))
    # margins by hand: to have them found takes half of the time
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.07, top=0.9, wspace=0.3, hspace=0.28)
    title = run_dir.name
    if rows:
        title += f": {rows[-1]['training_step']} steps, {rows[-1]['episode']:.0f} episodes"
    figure.suptitle(title)

    seconds = {f"time/{phase}": phase for phase in phases(rows)}
    panels = PANELS | {"time per step": ("seconds", seconds)}
    for axis, (name, (unit, labels)) in zip(axes.flat, panels.items(), strict=True):
        axis.set(title=name, ylabel=unit, xlabel="training step")
        draw_curves(axis, rows, labels)
        axis.xaxis.set_major_locator(plt.MaxNLocator(6, integer=True))  # each tick takes time
    found = {row["training_step"]: intervals.held_out(row) for row in rows}
    known = {step: accuracy for step, accuracy in found.items() if accuracy is not None}
    low = [accuracy.low for accuracy in known.values()]
    high = [accuracy.high for accuracy in known.values()]
    axes.flat[0].fill_between(list(known), low, high, alpha=0.2, color="C1", linewidth=0)
    axes.flat[0].set_ylim(-0.02, 1.02)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("run", type=Path, metavar="RUN", help="directory with metrics.jsonl: output_dir/exp_name")
    flags.add_argument("--out", type=Path, help="file to write; default RUN/report.png")
    options = flags.parse_args()
    if not (options.run / "metrics.jsonl").exists():
        flags.error(f"{options.run} is no run: it has no metrics.jsonl. Give output_dir/exp_name of one that has begun")
    path = options.out or options.run / "report.png"
    draw(options.run, path)
    print(path)


if __name__ == "__main__":
    main()
