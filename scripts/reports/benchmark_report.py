"""Write RUN/benchmark.md: a run as veRL's benchmark reports show one, in veRL's names and ours.

    python scripts/reports/benchmark_report.py RUN [--out FILE.md]

Five tables (convergence, performance, efficiency, lengths, others) have the 62 metrics of veRL's summary over the
steps, or the reason why one has no value; then a sentence of definition for each. benchmark_metrics.tsv lists them.
Values are those of the first and the last step, and the mean over the steps after step 1. Where veRL's mislead:

throughput      over the step alone; veRL's step has validation and saving in it
advantages      their mean is 0, whatever was learned. The returns are the same numbers
accuracy        with a 95 % interval over the evaluation prompts, since responses to one prompt are alike
"""

import contextlib
import csv
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports import intervals
from scripts.reports.common import NOTHING, WAITING, Run, parser, table

ACCURACY = "val-core/SOURCE/reward/mean@1"
REWARD = "critic/rewards/mean"
HEIGHTS = "▁▂▃▄▅▆▇█"
MAX_HEIGHTS = 40  # of a sparkline
PACKAGES = ("torch", "transformers", "vllm")


class Metric(NamedTuple):
    """A row of benchmark_metrics.tsv. "" stands for `-` in the file."""

    verl: str  # its name, where SOURCE stands for the data evaluated on
    ours: str
    table: str  # the table that shows it
    meaning: str
    missing: str  # why it may have no value
    remark: str


def read_metrics_table() -> dict[str, Metric]:
    """veRL's name -> metric."""
    with Path(__file__).with_name("benchmark_metrics.tsv").open(encoding="utf-8") as file:
        _, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    metrics = [Metric(*("" if text == "-" else text for text in row)) for row in rows]
    return {metric.verl: metric for metric in metrics}


METRICS = read_metrics_table()


# --- Values -----------------------------------------------------------------------------------------------------------


def is_fast(run: Run) -> bool:
    """Whether grpo_fast.py made it."""
    return run.last(WAITING) is not None


def devices(run: Run) -> int:
    """Processes that hold a model each: ranks of grpo.py, or learners and engines of grpo_fast.py."""
    if not is_fast(run):
        return run.environment.get("world_size") or 1
    engines = run.args.get("vllm_num_engines", 1) * run.args.get("vllm_tensor_parallel_size", 1)
    return sum(run.args.get("num_learners_per_node", [1])) + engines


def computed(run: Run, name: str, row: dict[str, float]) -> float:
    """A step's value by veRL's name and in its unit, of a row without None. Raises KeyError where a metric that it is
    made of is not there."""
    tokens = "val/num_sampled_tokens"
    match name.split("/"):
        case ["actor", "kl_coef"]:
            return run.args["beta"]
        case ["perf", "throughput"]:
            return row[tokens] / row["time/total"] / devices(run)
        case ["timing_s", "gen"]:
            return row[WAITING if is_fast(run) else "time/generation"]
        case ["timing_s", "update_actor"]:
            return row["time/training"] - row.get("time/ref_logprobs", 0.0) - row.get("time/old_logprobs", 0.0)
        case ["timing_per_token_ms", "gen"]:
            responses = row["batch/total_prompts"] * run.args["num_samples_per_prompt_rollout"]
            return 1000 * computed(run, "timing_s/gen", row) / (row["val/sequence_lengths"] * responses)
        case ["timing_per_token_ms", "ref" | "update_actor" as part]:
            return 1000 * computed(run, f"timing_s/{part}", row) / row[tokens]
        case ["global_seqlen", part] if part != "mean":
            return tokens_of_packs(run, part, row)
        case ["response_length", "clip_ratio"]:
            return 1 - row["val/stop_rate"]
        case ["critic", "score" | "rewards", _]:
            return score(run, name, row)
    return row[METRICS[name].ours]


def tokens_of_packs(run: Run, name: str, row: dict[str, float]) -> float:
    """Most or fewest tokens in a rank's packs, or their difference. grpo_fast.py's are balanced, grpo.py's are not."""
    if is_fast(run) != name.startswith("balanced"):
        raise KeyError(name)
    if name == "minmax_diff":
        return row["val/learner_tokens_max"] - row["val/learner_tokens_min"]
    return row["val/learner_tokens_max" if name.endswith("max") else "val/learner_tokens_min"]


def score(run: Run, name: str, row: dict[str, float]) -> float:
    """A score or reward, over --verification_reward. Of rewards with the KL in them only the mean is known."""
    found = row[METRICS[name].ours]
    if name.startswith("critic/rewards") and run.args.get("kl_in_reward"):
        if name != REWARD:
            raise KeyError(name)
        found -= row["objective/kl_in_reward"]
    return found / run.args["verification_reward"]


def values(run: Run, name: str, after: int = 0) -> list[float]:
    """The known values, after step `after`, of a metric by veRL's name and in veRL's unit. Those of an evaluation begin
    with the one before the first step."""
    rows = [row for step, row in run.rows.items() if step > after]
    if after == 0 and name == ACCURACY:
        rows.insert(0, run.start)
    found = []
    for row in rows:
        known = {metric: number for metric, number in row.items() if number is not None}
        with contextlib.suppress(KeyError, ZeroDivisionError):  # a metric that it is made of is not there, or 0
            found.append(computed(run, name, known))
    return found


# --- Tables -----------------------------------------------------------------------------------------------------------


def sparkline(points: list[float]) -> str:
    """Eight heights from the least to the most, of every point or every nth."""
    shown = points[:: math.ceil(len(points) / MAX_HEIGHTS)]
    low = min(shown)
    spread = (max(shown) - low) or 1.0
    return "".join(HEIGHTS[min(int(8 * (point - low) / spread), 7)] for point in shown)


def number(value: float | None) -> str:
    """Five digits, scientific where a rounded one would read 0."""
    if value is None or math.isnan(value):
        return NOTHING
    if value and abs(value) < 1e-3:
        return f"{value:.3e}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


def shown(run: Run, name: str) -> str:
    """veRL's name in code, with the data set that was evaluated on and the responses a prompt in their places. GSM8K
    has its name at the hub, also where scripts/data/gsm8k.py wrote it to a file."""
    names = [str(source).partition(":")[0] for source in run.args.get("dataset_mixer_eval_list", ["SOURCE"])[::2]]
    sources = ["openai/gsm8k" if "gsm8k" in source else source.removesuffix(".jsonl") for source in names]
    samples = run.args.get("eval_pass_at_k", 1)
    return f"`{name.replace('SOURCE', '+'.join(sources)).replace('mean@1', f'mean@{samples}')}`"


def remark(run: Run, name: str, known: list[float]) -> str:
    """What the values mean in this run."""
    if not known:
        return METRICS[name].missing or "not recorded in this run"
    found = [intervals.held_out(row) for row in run.rows.values()] if name == ACCURACY else []
    accuracy = next((estimate for estimate in reversed(found) if estimate), None)
    if accuracy:
        interval = f"95 % interval over {accuracy.n} prompts {accuracy.low:.4f} to {accuracy.high:.4f}"
        return f"{interval}; best {max(known):.4f} of {len(known)} evaluations"
    return METRICS[name].remark


def metrics_table(run: Run, name: str) -> str:
    """One of the five tables; "" is the last."""
    rows = []
    for metric in METRICS.values():
        if metric.table == name:
            known = values(run, metric.verl)
            later = values(run, metric.verl, after=1)
            cells = [sparkline(known), *map(number, known[:1] + known[-1:])] if known else [""] + 2 * [NOTHING]
            cells.append(number(statistics.fmean(later) if later else None))
            rows.append([shown(run, metric.verl), f"`{metric.ours}`", *cells, remark(run, metric.verl, known)])
    head = ["veRL's name", "ours", "steps", "first", "last", "mean after step 1", "remark"]
    return table(head, rows, text=(0, 1, 2, 6))


# --- The report -------------------------------------------------------------------------------------------------------


def configuration(run: Run) -> str:
    """The table at the top."""
    args = run.args
    packages = run.environment.get("packages", {})
    versions = [f"{name} {packages[name]}" for name in packages if name.startswith(PACKAGES)]
    minutes = sum(run.values("time/total", 0)) / 60
    prompts = f"{args.get('num_unique_prompts_rollout')} prompts x {args.get('num_samples_per_prompt_rollout')} samples"
    clip = f"clip {args.get('clip_lower')} / {args.get('clip_higher')}"
    device = run.environment.get("device", "?")
    steps = len(run.rows)
    rows = {
        "Environment": f"{device}, {devices(run)} process(es) with a model",
        "Framework": ", ".join([f"this repository at {run.commit()}", *versions]),
        "Algorithm": f"GRPO, loss {args.get('loss_fn')}, beta {args.get('beta')}, {clip}",
        "Model": f"{args.get('model_name_or_path')} ({args.get('model_dtype')})",
        "Task": " ".join(map(str, args.get("dataset_mixer_list", []))),
        "Training steps": f"{steps}, of {prompts}",
        "Training time": f"{minutes:.2f} min in steps; {number(run.minutes())} min since the start",
        "Wandb": run.wandb,
    }
    cells = [[f"**{name}**", text] for name, text in rows.items()]
    return table(["Item", "Configuration"], cells, text=(0, 1))


def write_markdown(run: Run) -> str:
    """The report."""
    parts = [f"# Benchmark report: {run.label}", configuration(run)]
    for name in ("convergence", "performance", "efficiency", "length", ""):
        parts += [f"## {(name or 'other').capitalize()} metrics", metrics_table(run, name)]
    parts += ["One run: differences between seeds are in none of these figures.", "## Metric definitions"]
    meanings = [f"- **{shown(run, name)}**: {METRICS[name].meaning}" for name in sorted(METRICS)]
    return "\n\n".join([*parts, "\n".join(meanings)]) + "\n"


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("run", type=Path, metavar="RUN")
    flags.add_argument("--out", type=Path, metavar="FILE.md", help="instead of RUN/benchmark.md")
    options = flags.parse_args(argv)
    try:
        run = Run(options.run, options.run.resolve().name)
        if not run.rows:
            raise ValueError(f"{options.run}: no training step in metrics.jsonl")
    except (ValueError, OSError) as error:
        print(f"benchmark_report.py: {error}", file=sys.stderr)
        return 2

    out = options.out or options.run / "benchmark.md"
    text = write_markdown(run)
    out.write_text(text)
    print(f"{text}\n{out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
