"""Run the demo and its control, seed by seed: does the demo learn from its labels?

    python scripts/proof/control.py [--seeds 1 2] [--results scripts/reports/demo.jsonl] [flags of grpo_fast.py]

A reward for confidence alone raises scores, too, where the model knows the answer. So each seed runs twice:

labels    scripts/demo.sh as it is
majority  the same with scripts/forks/ttrl.diff: the reward is for the most frequent answer of the group; no label is
          looked at. The shares of right answers are counted with the labels, as ever

A finished run is a row of --results and is not done again. scripts/demo.sh draws the control out of that file beside
its own curve. A run takes as long as the demo; the runs themselves are in runs/demo_ARM_SEED.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # imports start at the root, from whatever directory it is run

from scripts.doctor import cpu_flags  # noqa: E402
from scripts.reports.common import CORRECT, read_json, read_lines, read_metrics  # noqa: E402

ARMS = ("labels", "majority")
LINKED = (".venv", "models", "data")
NOT_COPIED = (*LINKED, ".git", "runs", "output")  # of the root: there is a scripts/data


def not_copied(directory: str, names: list[str]) -> set[str]:
    """What shutil.copytree leaves out of a directory."""
    left_out = shutil.ignore_patterns("__pycache__", ".*_cache")(directory, names)
    return left_out.union(NOT_COPIED if Path(directory) == ROOT else ())


def fork(directory: Path) -> Path:
    """A copy of this code in the directory, with the votes of scripts/forks/ttrl.diff and the same environment."""
    copy = directory / "ttrl"
    shutil.copytree(ROOT, copy, ignore=not_copied)
    for name in ("models", "data"):  # nothing can be made through a link to what is not there
        (ROOT / name).mkdir(exist_ok=True)
    for name in LINKED:
        (copy / name).symlink_to(ROOT / name)
    subprocess.run(["git", "apply", "scripts/forks/ttrl.diff"], cwd=copy, check=True)
    return copy


def processor() -> str:
    """The processor's name, how many of its cores are here, and whether it multiplies bfloat16."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    fast = "avx512_bf16" in cpu_flags()
    return f"{names[0]}, {len(names)} cores, {'AVX512-BF16' if fast else 'no bfloat16 instructions'}"


def shares(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Step -> the metric, where a row has it."""
    found = {}
    for row in rows:
        if row.get(name) is not None:
            found[str(row["training_step"])] = round(row[name], 4)
    return found


def read_run(run: Path, arm: str, seed: int) -> dict[str, Any]:
    """The row of a run. correct: the share of right answers of those sampled in a step; held_out: of the greedy ones to
    held-out prompts."""
    rows = read_metrics(run)
    row: dict[str, Any] = {"arm": arm, "seed": seed}
    row["correct"] = shares(rows, CORRECT)
    row["held_out"] = shares(rows, f"eval/{CORRECT}")
    row["seconds"] = shares(rows, "time/total")
    row["model_dtype"] = read_json(run / "args.json")["model_dtype"]
    row["processor"] = processor()
    row["git_commit"] = read_json(run / "environment.json")["git_commit"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "reports" / "demo.jsonl")
    options, flags = parser.parse_known_args()
    done = {(row["arm"], row["seed"]) for row in read_lines(options.results)}

    with tempfile.TemporaryDirectory() as directory:
        trees = {"labels": ROOT, "majority": fork(Path(directory))}
        for seed in options.seeds:
            for arm in ARMS:
                if (arm, seed) in done:
                    continue
                name = f"demo_{arm}_{seed}"
                more = ["--seed", str(seed), "--exp_name", name, "--output_dir", str(ROOT / "runs"), *flags]
                subprocess.run(["bash", "scripts/demo.sh", *more], cwd=trees[arm], check=True)
                row = read_run(ROOT / "runs" / name, arm, seed)
                with options.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row))


if __name__ == "__main__":
    main()
