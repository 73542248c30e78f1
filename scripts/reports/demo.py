"""Draw demo.png: accuracy of the demo on held-out questions, trained with labels and without.

    python scripts/reports/demo.py [--out PICTURE.png]

The lines are means over the runs in demo.jsonl: three seeds in float32, three in bfloat16.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports.common import parser, pyplot, read_lines

FOLDER = Path(__file__).parent
# arm of demo.jsonl -> line, where its name stands
LINES = {"labels": ("-", "trained with labels", (8, 0.74)), "majority": (":", "without labels", (8, 0.40))}


def held_out(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Step -> share of right answers, the mean over the runs."""
    return {int(step): statistics.fmean(run["held_out"][step] for run in runs) for step in runs[0]["held_out"]}


def draw(path: Path) -> dict[str, dict[int, float]]:
    """Write the picture. Returns what it shows: arm -> step -> share."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(5.5, 2.5), constrained_layout=True)
    runs = list(read_lines(FOLDER / "demo.jsonl"))
    shown = {}
    for arm, (style, name, place) in LINES.items():
        shares = held_out([run for run in runs if run["arm"] == arm])
        axis.plot(list(shares), list(shares.values()), style, color="C0", linewidth=2)
        axis.text(*place, name, color="C0")
        shown[arm] = shares
    axis.set(xlabel="training step", ylabel="held-out answers right", ylim=(0, 1), xticks=range(0, 17, 4))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)
    plt.close(figure)
    return shown


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--out", type=Path, default=FOLDER / "demo.png", help="file to write; default %(default)s")
    path = flags.parse_args().out
    draw(path)
    print(path)


if __name__ == "__main__":
    main()
