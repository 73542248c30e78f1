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
NOT_COPIED = (".git", ".venv", "models", "data", "runs", "output", "__pycache__", ".*_cache")


def fork(directory: Path) -> Path:
    """A copy of this code in the directory, with the votes of scripts/forks/ttrl.diff and the same environment."""
    copy = directory / "ttrl"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for name in (".venv", "models", "data"):
        (copy / name).symlink_to(ROOT / name)
    subprocess.run(["git", "apply", "scripts/forks/ttrl.diff"], cwd=copy, check=True)
    return copy


def processor() -> str:
    """The processor's name, how many of its cores are here, and whether it multiplies bfloat16."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    fast = "avx512_bf16" in cpu_flags()
    return f"{names[0]}, {len(names)} cores, {'AVX512-BF16' if fast else 'no bfloat16 instructions'}"


def read_run(run: Path, arm: str, seed: int) -> dict[str, Any]:
    """The row of a run: the shares of right answers, sampled at each step and greedy on held-out prompts."""
    rows = read_metrics(run)
    steps = [row for row in rows if row["training_step"] > 0]
    held_out = {}
    for row in rows:
        if row.get(f"eval/{CORRECT}") is not None:
            held_out[str(row["training_step"])] = round(row[f"eval/{CORRECT}"], 4)

    return {
        "arm": arm,
        "seed": seed,
        "correct": [round(row[CORRECT], 4) for row in steps],
        "held_out": held_out,
        "seconds": [round(row["time/total"], 2) for row in steps],
        "model_dtype": read_json(run / "args.json")["model_dtype"],
        "processor": processor(),
        "git_commit": read_json(run / "environment.json")["git_commit"],
    }


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
