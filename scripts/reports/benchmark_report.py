"""Write RUN/benchmark.md and benchmark.png: a run as veRL's benchmark reports show one, in veRL's names and ours.

    python scripts/reports/benchmark_report.py RUN [--out DIRECTORY]

Four tables (convergence, performance, efficiency, lengths), every metric over the steps, and the definitions.
Differences from such reports, where they mislead:

learning rate   in full, first and last, with the schedule. Rounded to 5 decimals 1e-6 reads 0.0
throughput      over the step alone; with validation and saving inside it is told beside it, as veRL counted
advantages      their mean is 0 by construction, whatever was learned; so is that of the returns, which are the same
accuracy        with Wilson's 95 % interval over the n evaluation responses: (a + z^2/2n +- z sqrt(a (1 - a) / n +
                z^2/4n^2)) / (1 + z^2/n), z = 1.96
mfu             its operations and its seconds are of other work than veRL's; said in the remark

Values are those of the last step that has them, and the mean over the steps after the first.
"""

import argparse
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.align.align import NAMES
from scripts.reports.compare_runs import Run, table
from scripts.reports.report import define

OURS = {verl: ours for ours, verl, _, _ in NAMES if verl}
OURS |= {  # what align.py does not compare
    "val-core/reward/mean@1": "eval/objective/verifiable_correct_rate",
    "critic/rewards/mean": "objective/scores",
    "critic/advantages/mean": "val/advantages",
    "critic/returns/mean": "val/advantages",
    "perf/mfu/actor": "learner_mfu",
    "perf/throughput": "learner_tokens_per_second_step",
    "perf/time_per_step": "time/total",
    "timing_s/generate_sequences": "time/generation",
    "timing_s/update_actor": "time/training",
    "timing_s/reshard": "time/weight_sync",
    "timing_s/reward": "time/reward",
    "timing_s/testing": "time/eval",
    "timing_s/save_checkpoint": "time/saving",
    "response_length/clip_ratio": "val/stop_rate",
}
HISTORY = {  # what veRL logs too and none of the four tables has: its name -> ours
    "critic/score/mean": "objective/scores",
    "critic/advantages/max": "val/advantages_max",
    "critic/advantages/min": "val/advantages_min",
    "perf/total_num_tokens": "val/num_step_tokens",
    "timing_s/step": "time/total",
    "training/epoch": "epoch",
    "training/global_step": "training_step",
}
ELSEWHERE = (  # what veRL logs and we do not, and where it is instead
    "`actor/kl_coef`: `--beta`, constant, in the table at the top",
    "`actor/ppo_kl`: `policy/approxkl_avg` is the mean of (new - old)^2 / 2, veRL's of old - new",
    "`actor/pg_clipfrac_lower`: not counted (`--clip_dual`)",
    "`critic/rewards/max`, `/min`, `prompt_length/max`, `/min`, `/clip_ratio`: in rollouts.jsonl",
    "`critic/returns/max`, `/min`: those of the advantages",
    "`timing_s/old_log_prob`, `/ref`: in `time/training`; `timing_s/adv`: not timed",
    "`perf/max_memory_*`, `perf/cpu_memory_used_gb`, `global_seqlen/*`: not recorded",
)
CONVERGENCE = "actor/lr actor/pg_loss actor/pg_clipfrac actor/entropy actor/kl_loss actor/grad_norm".split()
PERFORMANCE = "val-core/reward/mean@1 critic/rewards/mean critic/advantages/mean critic/returns/mean".split()
EFFICIENCY = """perf/mfu/actor perf/throughput perf/time_per_step timing_s/generate_sequences timing_s/update_actor
    timing_s/reshard timing_s/reward timing_s/testing timing_s/save_checkpoint""".split()
LENGTHS = """prompt_length/mean response_length/mean response_length/min response_length/max
    response_length/clip_ratio""".split()
REMARKS = {
    "actor/pg_loss": "mean over optimizer steps; its size is no sign of convergence",
    "actor/kl_loss": "k3 per token, without its coefficient",
    "critic/advantages/mean": "over rollouts, veRL's over tokens: near 0 by construction, no sign of convergence",
    "critic/returns/mean": "GRPO has no returns of its own: equal to the advantages",
    "timing_s/update_actor": "ours has packing and the old and reference logprobs in it",
    "timing_s/reshard": "new weights into the engine",
}


def sparkline(points: list[float], width: int = 40) -> str:
    """Eight heights from the least to the most; more points than `width` are averaged in equal parts."""
    n = min(len(points), width)
    parts = [points[i * len(points) // n : (i + 1) * len(points) // n] for i in range(n)]
    means = [statistics.fmean(part) for part in parts]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[min(int(8 * (m - low) / (high - low)), 7) if high > low else 0] for m in means)


def number(value: float | None) -> str:
    """Five digits, scientific where a rounded one would read 0."""
    if value is None or math.isnan(value):
        return "—"
    return f"{value:.3e}" if value and abs(value) < 1e-3 else f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"


def devices(run: Run) -> int:
    """Processes that hold a model each: ranks of grpo.py, or learners and engines of grpo_fast.py."""
    if run.last("time/trainer_waiting_for_data") is None:
        return run.environment.get("world_size") or 1
    engines = run.args.get("vllm_num_engines", 1) * run.args.get("vllm_tensor_parallel_size", 1)
    return sum(run.args.get("num_learners_per_node", [1])) + engines


def prompt_lengths(run: Run) -> list[float]:
    """Mean prompt tokens of a rollout at each step: those of the step less the responses', over its rollouts."""
    out, before = [], 0.0
    for row in run.rows.values():
        sampled, before = row["episode"] - before, row["episode"]
        if sampled > 0 and row.get("val/sequence_lengths") is not None:
            out.append(row["val/num_step_tokens"] / sampled - row["val/sequence_lengths"])
    return out


def throughput(run: Run) -> dict[str, float]:
    """Prompt and response tokens per second and process, after step 1: of steps, and with validation and saving in."""
    rows = [r for step, r in sorted(run.rows.items()) if step > 1 and r.get("time/total")]
    tokens, steps = sum(r["val/num_step_tokens"] for r in rows), sum(r["time/total"] for r in rows)
    extra = sum((r.get("time/eval") or 0.0) + (r.get("time/saving") or 0.0) for r in rows)
    n = devices(run)
    return {"steps": tokens / steps / n, "all": tokens / (steps + extra) / n, "extra": extra} if rows else {}


def values(run: Run, name: str) -> tuple[list[float], list[float]]:
    """(all steps, steps after the first) of a metric by veRL's name and in veRL's unit."""
    if name == "prompt_length/mean":
        found = prompt_lengths(run)
        return found, found[1:]
    parts = [[scale(run, name, v) for v in run.values((OURS | HISTORY)[name], after)] for after in (0, 1)]
    return parts[0], parts[1]


def scale(run: Run, name: str, value: float) -> float:
    """Our value in veRL's unit: rewards of at most 1, throughput of a process, the truncated and not the ended."""
    if name in ("critic/rewards/mean", "critic/score/mean"):
        return value / (run.args.get("verification_reward") or 1.0)
    if name == "perf/throughput":
        return value / devices(run)
    return 1 - value if name == "response_length/clip_ratio" else value


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share of n, by the formula above; unlike share +- 2 errors it has a width at 0 and 1."""
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - half) / scale, (middle + half) / scale


def eval_prompts(run: Run) -> int:
    """Responses judged in the last evaluation that has them."""
    for row in reversed(run.rows.values()):
        names = [k for k in row if re.fullmatch(r"eval/reward/.+_(ok|no_answer)", k)]
        if names:
            return int(sum(row[k] for k in names))
    return 0


def remark(run: Run, name: str) -> str:
    """What the value means in this run."""
    all_steps, _ = values(run, name)
    if not all_steps:
        return "not recorded in this run"
    first, last = all_steps[0], all_steps[-1]
    if name == "actor/lr":
        kind = run.args.get("lr_scheduler_type", "?")
        moved = "constant" if first == last else f"from {first:.3e}" + (" to 0: training ended" if last == 0 else "")
        return f"schedule {kind}: {moved}"
    if name in ("actor/entropy", "actor/pg_clipfrac", "actor/grad_norm"):
        return f"first step that has it {number(first)}"
    if name == "val-core/reward/mean@1":
        n = eval_prompts(run)
        error = "; 95 % interval {:.4f} to {:.4f}".format(*wilson(last, n)) if n else ""
        return f"share correct of {n} prompts{error}; best {max(all_steps):.4f} of {len(all_steps)} evaluations"
    if name == "critic/rewards/mean":
        return f"score / verification_reward; first step {number(first)}"
    if name == "perf/throughput" and (rate := throughput(run)):
        seconds = f"{rate['extra']:.1f} s of validation and saving"
        return f"per process, over all steps {number(rate['steps'])}; with {seconds} inside {number(rate['all'])}"
    if name == "perf/mfu/actor":
        what = "of the matrix product measured at start; old and reference logprobs count in both its parts"
        return what + ", embedding lookups in none"
    if name == "timing_s/generate_sequences" and run.last("time/trainer_waiting_for_data") is not None:
        return "decoding, beside the training; the learner waited " + number(run.mean("time/trainer_waiting_for_data"))
    if name == "response_length/clip_ratio":
        return "did not end by themselves; veRL counts those of the largest length"
    return REMARKS.get(name, "")


def metrics_table(run: Run, names: list[str]) -> str:
    rows = []
    for name in names:
        all_steps, later = values(run, name)
        last, mean = (all_steps or [None])[-1], statistics.fmean(later) if later else None
        ours = f"`{OURS[name]}`" if name in OURS else "`val/num_step_tokens` less responses"
        rows.append([f"`{name}`", ours, number(last), number(mean), remark(run, name)])
    return table(["veRL's name", "ours", "last", "mean after step 1", "remark"], rows, text=(0, 1, 4))


def history(run: Run) -> str:
    """Every metric over the steps, as wandb's summary shows it; last milliseconds per token, of responses for gen."""
    names = [*CONVERGENCE, *PERFORMANCE, *EFFICIENCY, *LENGTHS, *HISTORY]
    rows = [[f"`{n}`", sparkline(v), number(v[0]), number(v[-1])] for n in names if (v := values(run, n)[0])]
    for name, ours, responses in (("gen", "time/generation", True), ("update_actor", "time/training", False)):
        points, before = [], 0.0
        for row in run.rows.values():
            sampled, before = row["episode"] - before, row["episode"]
            tokens = row.get("val/sequence_lengths", 0) * sampled if responses else row.get("val/num_step_tokens")
            if tokens and row.get(ours) is not None:
                points.append(1000 * row[ours] / tokens)
        if points:
            rows.append([f"`timing_per_token_ms/{name}`", sparkline(points), number(points[0]), number(points[-1])])
    return table(["veRL's name", "steps", "first", "last"], rows, text=(0, 1))


def conclusions(run: Run) -> dict[str, str]:
    """A sentence for each table, from its numbers."""
    lr, entropy = ([number(v) for v in values(run, f"actor/{k}")[0]] or ["—"] for k in ("lr", "entropy"))
    scores = values(run, "critic/rewards/mean")[0]
    n = max(1, len(scores) // 5)
    parts = (scores[:n], scores[-2 * n : -n], scores[-n:])
    early, before, late = (statistics.fmean(part) if part else math.nan for part in parts)
    state = "still rises" if late - before > 0.01 else "does not rise any more"
    end = (
        "too few steps to speak of convergence" if len(scores) < 20 else f"the reward {state} over the last two fifths"
    )
    seconds = [sum(run.values(f"time/{part}")) for part in ("generation", "training")]
    total = sum(run.values("time/total")) or math.nan
    skipped = sum(run.values("optim/skipped_steps", 0))
    waited = sum(run.values("time/trainer_waiting_for_data"))
    beside = f", waiting for data {waited / total:.0%}; generation runs beside them" if waited else ""
    return {
        "convergence": f"{end.capitalize()} ({number(before)} to {number(late)}); entropy {entropy[0]} to "
        f"{entropy[-1]} nats per token; learning rate {lr[-1]} at the last step; {skipped:.0f} of {len(run.rows)} "
        "steps had no group with a gradient. A small policy loss is no sign of convergence: group-relative advantages "
        "have mean 0.",
        "performance": f"Reward {number(early)} (mean of the first fifth of the steps) to {number(late)} (last fifth).",
        "efficiency": f"Of the seconds of a step generation takes {seconds[0] / total:.0%} and training "
        f"{seconds[1] / total:.0%}{beside}.",
        "length": "",
    }


def limits(run: Run) -> list[str]:
    """What this run's figures cannot say."""
    out = ["One run: differences between seeds are not in any of these figures."]
    if run.environment.get("device") == "cpu":
        out += [
            "It ran on a CPU. Seconds, tokens per second and shares of phases are of this machine and of what else ran "
            "on it; they say nothing of a GPU. `learner_mfu` is against this CPU's own matrix product.",
            "Memory of a device was not measured.",
        ]
    if len(run.rows) < 20:
        out.append(f"{len(run.rows)} steps are too few to speak of convergence.")
    if (n := eval_prompts(run)) < 200:
        out.append(
            f"{n} evaluation responses: the standard error of an accuracy near 0.5 is {0.5 / math.sqrt(n or 1):.3f}."
        )
    return out


def configuration(run: Run) -> str:
    """The table at the top."""
    environment, args = run.environment, run.args
    packages = environment.get("packages", {})
    versions = ", ".join(
        f"{k} {v}" for k, v in packages.items() if k in ("torch", "transformers") or k.startswith("vllm")
    )
    wall, steps = run.minutes(), sum(run.values("time/total", 0)) / 60
    shape = [args.get(f"num_{k}_rollout", "?") for k in ("unique_prompts", "samples_per_prompt")]
    commit = str(environment.get("git_commit", "?"))[:12] + (" and changes" if environment.get("git_dirty") else "")
    rows = [
        ["Environment", f"{environment.get('device', '?')}, {devices(run)} process(es) with a model"],
        ["Framework", f"this repository at {commit}; {versions}"],
        ["Algorithm", f"GRPO, loss {args.get('loss_fn')}, beta {args.get('beta')}, clip {args.get('clip_lower')} / "
         f"{args.get('clip_higher')}, {args.get('num_mini_batches')} mini-batch(es)"],
        ["Model", f"{args.get('model_name_or_path')} ({args.get('model_dtype')})"],
        ["Task", " ".join(map(str, args.get("dataset_mixer_list", [])))],
        ["Training steps", f"{len(run.rows)}, of {shape[0]} prompts x {shape[1]} samples"],
        ["Training time", f"{steps:.2f} min in steps, eval and saving apart; {wall or math.nan:.2f} since the start"],
    ]  # fmt: skip
    rows += [["Wandb", run.wandb]] if run.wandb != "—" else []
    return "| Item | Configuration |\n|---|---|\n" + "\n".join(f"| **{a}** | {b} |" for a, b in rows)


def definitions(run: Run) -> str:
    """veRL's name, ours, and the table's definition of ours."""
    lines = []
    for name in [*CONVERGENCE, *PERFORMANCE, *EFFICIENCY, *LENGTHS, *HISTORY]:
        if ours := (OURS | HISTORY).get(name):
            definition, healthy = define(ours) or ("not in the table of metrics", "")
            complement = name.endswith("clip_ratio")  # 1 - ours
            healthy = "" if complement else f" (healthy: {healthy})" if healthy else ""
            lines.append(f"- **`{name}`**, {'1 less' if complement else 'ours'} `{ours}`: {definition}{healthy}")
    return "\n".join(lines)


def write_markdown(run: Run) -> str:
    text = conclusions(run)
    parts = [f"# Benchmark report: {run.label}", configuration(run), "![curves](benchmark.png)"]
    tables = (
        ("Convergence", CONVERGENCE),
        ("Performance", PERFORMANCE),
        ("Efficiency", EFFICIENCY),
        ("Length", LENGTHS),
    )
    for i, (title, names) in enumerate(tables, start=1):
        parts += [f"## {i}. {title} metrics", metrics_table(run, names)]
        parts += [f"**In words**: {text[title.lower()]}"] if text[title.lower()] else []
    parts += ["## 5. Run history", history(run), "Not here under veRL's name:", "\n".join(f"- {x}" for x in ELSEWHERE)]
    parts += ["## What these figures cannot say", "\n".join(f"- {line}" for line in limits(run))]
    return "\n\n".join([*parts, "## Metric definitions", definitions(run)]) + "\n"


def plot(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = (
        "critic/rewards/mean val-core/reward/mean@1 actor/entropy actor/kl_loss actor/lr response_length/mean".split()
    )
    names += "perf/throughput perf/time_per_step actor/grad_norm".split()
    figure, axes = plt.subplots(3, 3, figsize=(14, 10), constrained_layout=True)
    for axis, name in zip(axes.flat, names, strict=True):
        rows = [r for r in run.all_rows if r.get(OURS[name]) is not None]  # with an evaluation before step 1
        points = sorted((r["training_step"], scale(run, name, r[OURS[name]])) for r in rows)
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3)
        else:
            axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes)
        axis.set_title(f"{name}\n{OURS[name]}", fontsize=9)
        axis.set_xlabel("step")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, help="directory of benchmark.md and benchmark.png, instead of RUN")
    options = parser.parse_args(argv)
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
    print(text + f"\n{out / 'benchmark.md'}, {out / 'benchmark.png'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
