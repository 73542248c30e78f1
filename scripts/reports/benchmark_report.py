"""Write RUN/benchmark.md and benchmark.png: a run as veRL's benchmark reports show one, in veRL's names and ours.

    python scripts/reports/benchmark_report.py RUN [--out DIRECTORY]

Four tables (convergence, performance, efficiency, lengths), each of the 62 metrics of veRL's summary over the steps, or
the reason why it has no value, and a sentence of definition for each. benchmark_metrics.tsv lists the metrics.
The report differs from veRL's where theirs mislead:

learning rate   in full, first and last, with the schedule. Rounded to 5 decimals 1e-6 reads 0.0
throughput      over the step alone. Beside it, the throughput with validation and saving included, as veRL counts it
advantages      their mean is 0 by construction, whatever was learned. The returns are the same numbers
accuracy        with a 95 % interval over the evaluation prompts, since responses to one prompt are alike: Wilson's, for
                as many independent responses as have the same standard error (share_of_clusters in intervals.py)
mfu             counts other operations and other seconds than veRL's. The remark says which

Values are those of the last step that has them, and the mean over the steps after the first.
"""

import csv
import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.reports import intervals
from scripts.reports.common import NOTHING, WAITING, Run, parser, pyplot, table

ACCURACY = "val-core/SOURCE/reward/mean@1"
REWARD = "critic/rewards/mean"
HEIGHTS = "▁▂▃▄▅▆▇█"
MAX_HEIGHTS = 40  # of a sparkline
FEW_STEPS = 20  # fewer say nothing about convergence
FEW_PROMPTS = 200  # fewer make the standard error of an accuracy worth saying
PLOTS = f"""{REWARD} {ACCURACY} actor/entropy actor/kl_loss actor/lr response_length/mean perf/throughput
    perf/time_per_step actor/grad_norm""".split()


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


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


def is_fast(run: Run) -> bool:
    """Whether grpo_fast.py made it."""
    return run.last(WAITING) is not None


def devices(run: Run) -> int:
    """Processes that hold a model each: ranks of grpo.py, or learners and engines of grpo_fast.py."""
    if not is_fast(run):
        return run.environment.get("world_size") or 1
    engines = run.args.get("vllm_num_engines", 1) * run.args.get("vllm_tensor_parallel_size", 1)
    return sum(run.args.get("num_learners_per_node", [1])) + engines


def tokens_of(row: dict[str, float]) -> float | None:
    """Prompt and response tokens of all rollouts of a step; val/num_step_tokens was that in runs of older versions."""
    return row.get("val/num_sampled_tokens", row.get("val/num_step_tokens"))


def response_tokens_of(run: Run, row: dict[str, Any]) -> float | None:
    """Response tokens of all rollouts of a step."""
    prompts = row.get("batch/total_prompts")
    mean = row.get("val/sequence_lengths")
    if prompts is None or mean is None:
        return None
    return mean * prompts * (run.args.get("num_samples_per_prompt_rollout") or 1)


def value(run: Run, name: str, row: dict[str, Any]) -> float | None:
    """A step's value by veRL's name and in its unit, or None."""
    match name.split("/"):
        case ["actor", "kl_coef"]:
            return run.args.get("beta")
        case ["perf", "total_num_tokens"]:
            return tokens_of(row)
        case ["perf", "throughput"]:
            return ratio(tokens_of(row), row.get("time/total"), devices(run))
        case ["timing_s", "gen"]:
            return row.get(WAITING if is_fast(run) else "time/generation")
        case ["timing_s", "update_actor"]:
            return seconds_of_update(row)
        case ["timing_per_token_ms", part] if METRICS[name].ours:
            tokens = response_tokens_of(run, row) if part == "gen" else tokens_of(row)
            seconds = value(run, f"timing_s/{part}", row)
            return ratio(None if seconds is None else 1000 * seconds, tokens)
        case ["global_seqlen", part] if part != "mean":
            return tokens_of_packs(run, part, row)
        case ["response_length", "clip_ratio"]:
            stopped = row.get("val/stop_rate")
            return None if stopped is None else 1 - stopped
        case ["critic", "score" | "rewards", _]:
            return score(run, name, row)
    return row.get(METRICS[name].ours)


def ratio(numerator: float | None, denominator: float | None, divisor: int = 1) -> float | None:
    """numerator / denominator / divisor, None without both."""
    return numerator / denominator / divisor if numerator is not None and denominator else None


def seconds_of_update(row: dict[str, Any]) -> float | None:
    """Seconds of training without the forwards for the old and the reference policy's logprobs."""
    training = row.get("time/training")
    if training is None:
        return None
    return training - ((row.get("time/ref_logprobs") or 0.0) + (row.get("time/old_logprobs") or 0.0))


def tokens_of_packs(run: Run, name: str, row: dict[str, Any]) -> float | None:
    """Most or fewest tokens in a rank's packs, or their difference. grpo_fast.py's are balanced, grpo.py's are not."""
    if is_fast(run) != name.startswith("balanced"):
        return None
    most = row.get("val/learner_tokens_max")
    fewest = row.get("val/learner_tokens_min")
    if name == "minmax_diff":
        return None if most is None or fewest is None else most - fewest
    return most if name.endswith("max") else fewest


def score(run: Run, name: str, row: dict[str, Any]) -> float | None:
    """A score or reward, over --verification_reward."""
    found = row.get(METRICS[name].ours)
    if found is None:
        return None
    if name.startswith("critic/rewards") and run.args.get("kl_in_reward"):
        if name != REWARD:
            return None
        found -= row.get("objective/kl_in_reward") or 0.0
    return found / (run.args.get("verification_reward") or 1.0)


def values(run: Run, name: str, after: int = 0) -> list[float]:
    """The known values, after step `after`, of a metric by veRL's name and in veRL's unit."""
    found = [value(run, name, row) for step, row in run.rows.items() if step > after]
    return [number for number in found if number is not None]


def throughput(run: Run, included: tuple[str, ...] = ()) -> float:
    """Prompt and response tokens per second and process, after step 1; with the seconds of `included` in it."""
    tokens = seconds = 0.0
    for step, row in run.rows.items():
        if step > 1 and row.get("time/total"):
            tokens += tokens_of(row) or 0.0
            seconds += row["time/total"] + sum(row.get(name) or 0.0 for name in included)
    return tokens / seconds / devices(run) if seconds else math.nan


def eval_responses(row: dict[str, Any]) -> int:
    """Responses judged in the evaluation of a step, 0 without one. Several verifiers may judge the same response."""
    judged = [row[key] for key in row if re.fullmatch(r"eval/reward/.+_(ok|no_answer)", key)]
    rate = row.get("eval/stop_rate")
    responses = round(row["eval/num_stop_token_ids"] / rate) if rate else math.inf
    return int(min(sum(judged), responses))


def last_evaluation(run: Run) -> dict[str, Any]:
    """The metrics of the last step that was evaluated, {} without one."""
    for row in reversed(run.rows.values()):
        if eval_responses(row):
            return row
    return {}


def last_accuracy(run: Run) -> intervals.Estimate | None:
    """The share of right responses of the last evaluation, with its interval over prompts."""
    row = last_evaluation(run)
    return intervals.held_out(row, run.args.get("eval_pass_at_k", 1), eval_responses(row))


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def sparkline(points: list[float]) -> str:
    """Eight heights from the least to the most. More than MAX_HEIGHTS points are averaged in equal parts."""
    n = min(len(points), MAX_HEIGHTS)
    ends = [i * len(points) // n for i in range(n + 1)]
    means = [statistics.fmean(points[ends[i] : ends[i + 1]]) for i in range(n)]
    low = min(means)
    spread = max(means) - low
    if spread == 0:
        return HEIGHTS[0] * n
    return "".join(HEIGHTS[min(int(8 * (mean - low) / spread), 7)] for mean in means)


def number(value: float | None) -> str:
    """Five digits, scientific where a rounded one would read 0."""
    if value is None or math.isnan(value):
        return NOTHING
    if value and abs(value) < 1e-3:
        return f"{value:.3e}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


def name_of_source(name: str) -> str:
    """A data set by its name at the hub, as verl has it: also one that scripts/data/gsm8k.py wrote to a directory whose
    name begins with gsm8k."""
    path = Path(name.partition(":")[0])
    if path.suffix == ".jsonl" and path.parent.name.startswith("gsm8k"):
        return "openai/gsm8k"
    return str(path).removesuffix(".jsonl").strip("./")


def shown(run: Run, name: str) -> str:
    """veRL's name in code, with the data set that was evaluated on and the responses a prompt in their places."""
    names = run.args.get("dataset_mixer_eval_list") or ["SOURCE"]
    sources = [name_of_source(str(source)) for source in names[::2]]
    samples = run.args.get("eval_pass_at_k", 1)
    return f"`{name.replace('SOURCE', '+'.join(sources)).replace('mean@1', f'mean@{samples}')}`"


def remark(run: Run, name: str) -> str:
    """What the value means in this run."""
    known = values(run, name)
    if not known:
        return METRICS[name].missing or "not recorded in this run"
    match name:
        case "actor/lr":
            return f"schedule {run.args.get('lr_scheduler_type', '?')}: {change_of_rate(known)}"
        case "actor/entropy" | "actor/pg_clipfrac" | "actor/grad_norm":
            return f"first step that has it {number(known[0])}"
        case "critic/rewards/mean":
            return f"first step {number(known[0])}"
        case "val-core/SOURCE/reward/mean@1":
            return remark_on_accuracy(run, known)
        case "perf/throughput":
            return remark_on_throughput(run)
        case "timing_s/generate_sequences" if is_fast(run):
            return f"beside the training; the learner waited {number(run.mean(WAITING))}"
    return METRICS[name].remark


def change_of_rate(rates: list[float]) -> str:
    """How the learning rate went."""
    if rates[0] == rates[-1]:
        return "constant"
    end = " to 0: training ended" if rates[-1] == 0 else ""
    return f"from {rates[0]:.3e}{end}"


def remark_on_accuracy(run: Run, accuracies: list[float]) -> str:
    """The last accuracy's interval, and the best accuracy."""
    responses = eval_responses(last_evaluation(run))
    accuracy = last_accuracy(run)
    interval = ""
    if accuracy is not None:
        interval = f"; 95 % interval over {accuracy.n} prompts {accuracy.low:.4f} to {accuracy.high:.4f}"
    best = f"best {max(accuracies):.4f} of {len(accuracies)} evaluations"
    return f"share correct of {responses} responses{interval}; {best}"


def remark_on_throughput(run: Run) -> str:
    """Throughput over all steps, without and with evaluation and saving."""
    rate = throughput(run)
    if math.isnan(rate):
        return ""
    others = ("time/eval", "time/saving")
    seconds = sum(sum(run.values(name, 1)) for name in others)
    rate_with_others = throughput(run, others)
    inside = f"with {seconds:.1f} s of validation and saving inside {number(rate_with_others)}"
    return f"per process, over all steps {number(rate)}; {inside}"


def metrics_table(run: Run, name: str) -> str:
    """One of the four tables."""
    rows = []
    for metric in METRICS.values():
        if metric.table == name:
            known = values(run, metric.verl)
            later = values(run, metric.verl, after=1)
            last = number(known[-1] if known else None)
            mean = number(statistics.fmean(later) if later else None)
            rows.append([shown(run, metric.verl), f"`{metric.ours}`", last, mean, remark(run, metric.verl)])
    return table(["veRL's name", "ours", "last", "mean after step 1", "remark"], rows, text=(0, 1, 4))


def history(run: Run) -> Iterator[str]:
    """Every metric over the steps, as wandb's summary shows it, and those without a value with the reason."""
    rows = []
    missing = []
    for name in sorted(METRICS):
        known = values(run, name)
        if known:
            rows.append([shown(run, name), sparkline(known), number(known[0]), number(known[-1])])
        else:
            missing.append(f"- {shown(run, name)}: {remark(run, name)}")
    yield table(["veRL's name", "steps", "first", "last"], rows, text=(0, 1))
    if missing:
        yield f"{len(rows)} of the {len(METRICS)} metrics that veRL's summary has. Without a value in this run:"
        yield "\n".join(missing)


# ---------------------------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------------------------


def mean_of(numbers: list[float]) -> float:
    """Mean, NaN of nothing."""
    return statistics.fmean(numbers) if numbers else math.nan


def tell_convergence(run: Run) -> str:
    rewards = values(run, REWARD)
    fifth = max(1, len(rewards) // 5)
    late = mean_of(rewards[-fifth:])
    before = mean_of(rewards[-2 * fifth : -fifth])
    state = "still rises" if late - before > 0.01 else "does not rise any more"
    verdict = f"The reward {state} over the last two fifths"
    if len(rewards) < FEW_STEPS:
        verdict = "Too few steps to speak of convergence"

    entropies = values(run, "actor/entropy") or [math.nan]
    rates = values(run, "actor/lr") or [math.nan]
    skipped = sum(run.values("optim/skipped_steps", 0))
    return (
        f"{verdict} ({number(before)} to {number(late)}); entropy {number(entropies[0])} to {number(entropies[-1])} "
        f"nats per token; learning rate {number(rates[-1])} at the last step; {skipped:.0f} of {len(run.rows)} steps "
        "had no group with a gradient. A small policy loss is no sign of convergence: group-relative advantages have "
        "mean 0."
    )


def tell_performance(run: Run) -> str:
    rewards = values(run, REWARD)
    fifth = max(1, len(rewards) // 5)
    early = number(mean_of(rewards[:fifth]))
    late = number(mean_of(rewards[-fifth:]))
    return f"Reward {early} (mean of the first fifth of the steps) to {late} (last fifth)."


def tell_efficiency(run: Run) -> str:
    total = sum(run.values("time/total")) or math.nan
    generation = sum(run.values("time/generation")) / total
    training = sum(run.values("time/training")) / total
    waited = sum(run.values(WAITING))
    beside = f", waiting for data {waited / total:.0%}; generation runs beside them" if waited else ""
    return f"Of the seconds of a step generation takes {generation:.0%} and training {training:.0%}{beside}."


def limits(run: Run) -> Iterator[str]:
    """What this run's figures cannot say."""
    yield "One run: differences between seeds are not in any of these figures."
    if run.environment.get("device") == "cpu":
        yield (
            "It ran on a CPU. Seconds, tokens per second and shares of phases are of this machine and of what else ran "
            "on it; they say nothing of a GPU. `learner_mfu` is against this CPU's own matrix product."
        )
    if len(run.rows) < FEW_STEPS:
        yield f"{len(run.rows)} steps are too few to speak of convergence."
    accuracy = last_accuracy(run)
    prompts = 0 if accuracy is None else accuracy.n
    if prompts < FEW_PROMPTS:
        error = 0.5 / math.sqrt(prompts or 1)
        yield f"{prompts} evaluation prompts: the standard error of an accuracy near 0.5 can be {error:.3f}."


def configuration(run: Run) -> str:
    """The table at the top."""
    args = run.args
    rows = {
        "Environment": f"{run.environment.get('device', '?')}, {devices(run)} process(es) with a model",
        "Framework": f"this repository at {run.commit(' and changes')}; {versions(run)}",
        "Algorithm": algorithm(args),
        "Model": f"{args.get('model_name_or_path')} ({args.get('model_dtype')})",
    }
    rows["Task"] = " ".join(map(str, args.get("dataset_mixer_list", [])))
    prompts = args.get("num_unique_prompts_rollout", "?")
    samples = args.get("num_samples_per_prompt_rollout", "?")
    rows["Training steps"] = f"{len(run.rows)}, of {prompts} prompts x {samples} samples"
    in_steps = sum(run.values("time/total", 0)) / 60
    wall = run.minutes() or math.nan
    rows["Training time"] = f"{in_steps:.2f} min in steps, eval and saving apart; {wall:.2f} since the start"
    if run.wandb != NOTHING:
        rows["Wandb"] = run.wandb
    lines = [f"| **{name}** | {text} |" for name, text in rows.items()]
    return "\n".join(["| Item | Configuration |", "|---|---|", *lines])


def versions(run: Run) -> str:
    """Of the packages that matter for numbers."""
    packages = run.environment.get("packages", {})
    names = [name for name in packages if name in ("torch", "transformers") or name.startswith("vllm")]
    return ", ".join(f"{name} {packages[name]}" for name in names)


def algorithm(args: dict[str, Any]) -> str:
    """The flags of the loss."""
    clip = f"clip {args.get('clip_lower')} / {args.get('clip_higher')}"
    batches = f"{args.get('num_mini_batches')} mini-batch(es)"
    return f"GRPO, loss {args.get('loss_fn')}, beta {args.get('beta')}, {clip}, {batches}"


def definitions(run: Run) -> str:
    """A sentence for each of veRL's names, and ours."""
    lines = []
    for name in sorted(METRICS):
        ours = METRICS[name].ours
        note = f" (ours: `{ours}`)" if ours else ""
        lines.append(f"- **{shown(run, name)}**{note}: {METRICS[name].meaning}")
    return "\n".join(lines)


def write_markdown(run: Run) -> str:
    parts = [f"# Benchmark report: {run.label}", configuration(run), "![curves](benchmark.png)"]
    parts += ["## 1. Convergence metrics", metrics_table(run, "convergence"), f"**In words**: {tell_convergence(run)}"]
    parts += ["## 2. Performance metrics", metrics_table(run, "performance"), f"**In words**: {tell_performance(run)}"]
    parts += ["## 3. Efficiency metrics", metrics_table(run, "efficiency"), f"**In words**: {tell_efficiency(run)}"]
    parts += ["## 4. Length metrics", metrics_table(run, "length")]
    parts += ["## 5. Run history", *history(run)]
    parts += ["## What these figures cannot say", "\n".join(f"- {line}" for line in limits(run))]
    parts += ["## Metric definitions", definitions(run)]
    return "\n\n".join(parts) + "\n"


def plot(run: Run, path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(3, 3, figsize=(14, 10), constrained_layout=True)
    rows = sorted(run.all_rows, key=lambda row: row["training_step"])  # with an evaluation before step 1
    for axis, name in zip(axes.flat, PLOTS, strict=True):
        points = [(row["training_step"], value(run, name, row)) for row in rows]
        known = [point for point in points if point[1] is not None]
        if known:
            axis.plot(*zip(*known, strict=True), marker="o", markersize=3)
        else:
            axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes)
        axis.set_title(f"{shown(run, name).strip('`')}\n{METRICS[name].ours}", fontsize=9)
        axis.set_xlabel("step")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("run", type=Path, metavar="RUN")
    flags.add_argument("--out", type=Path, help="directory for benchmark.md and benchmark.png, instead of RUN")
    options = flags.parse_args(argv)
    try:
        run = Run(options.run, options.run.resolve().name)
        if not run.rows:
            raise ValueError(f"{options.run}: no training step in metrics.jsonl")
    except (ValueError, OSError) as error:
        print(f"benchmark_report.py: {error}", file=sys.stderr)
        return 2

    out = options.out or options.run
    out.mkdir(parents=True, exist_ok=True)
    plot(run, out / "benchmark.png")
    text = write_markdown(run)
    (out / "benchmark.md").write_text(text)
    print(f"{text}\n{out / 'benchmark.md'}, {out / 'benchmark.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
