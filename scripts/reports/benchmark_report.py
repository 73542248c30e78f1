"""Write RUN/benchmark.md and benchmark.png: a run as veRL's benchmark reports show one, in veRL's names and ours.

    python scripts/reports/benchmark_report.py RUN [--out DIRECTORY]

Four tables (convergence, performance, efficiency, lengths), each of the 62 metrics that veRL's summary has over the
steps, or the reason why it has no value, and a sentence of definition for each.
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

from scripts.reports.compare_runs import Run, table

# veRL's name -> (ours, what the value is, why it may be missing). SOURCE stands for the data evaluated on.
SCORE = "score of a sampled rollout, over --verification_reward"
LATER = "the advantage, since GRPO has no returns of its own"
METRICS = {
    # convergence
    "actor/lr": ("lr", "Learning rate of AdamW, mean over the step's optimizer steps.", ""),
    "actor/pg_loss": (
        "loss/policy_avg",
        "Policy-gradient part of the loss, mean over the step's optimizer steps.",
        "no optimizer step",
    ),
    "actor/pg_clipfrac": ("policy/clipfrac_avg", "Share of trained tokens at which the clip acted.", ""),
    "actor/pg_clipfrac_lower": (
        "policy/clipfrac_lower_avg",
        "Share of trained tokens with a negative advantage and a ratio above --clip_dual, which bounds their loss.",
        "--clip_dual is off",
    ),
    "actor/ppo_kl": (
        "policy/ppo_kl_avg",
        "Old less new logprob, in nats, mean over trained tokens: how far a step's later updates have moved.",
        "",
    ),
    "actor/entropy": (
        "policy/entropy_avg",
        "Entropy of the next-token distribution at --temperature, in nats, mean over trained tokens.",
        "",
    ),
    "actor/kl_loss": (
        "objective/kl2_avg",
        "KL to the reference policy in nats a token, k3 estimate, without its coefficient.",
        "no reference policy",
    ),
    "actor/kl_coef": ("--beta", "Coefficient of the KL in the loss, constant.", ""),
    "actor/grad_norm": ("optim/grad_norm", "Norm of the gradient before clipping, mean over optimizer steps.", ""),
    # performance
    "val-core/SOURCE/reward/mean@1": (
        "eval/objective/verifiable_correct_rate",
        "Share of evaluation responses with a verifiable score above 0.",
        "no evaluation",
    ),
    "critic/score/mean": ("objective/scores", f"Mean {SCORE}.", ""),
    "critic/score/max": ("objective/scores_max", f"Largest {SCORE}.", ""),
    "critic/score/min": ("objective/scores_min", f"Smallest {SCORE}.", ""),
    "critic/rewards/mean": (
        "objective/scores",
        "Mean score of a sampled rollout, with --kl_in_reward less the mean KL of those trained on, over "
        "--verification_reward.",
        "",
    ),
    "critic/rewards/max": ("objective/scores_max", f"Largest {SCORE}, without KL in it.", "--kl_in_reward changes it"),
    "critic/rewards/min": ("objective/scores_min", f"Smallest {SCORE}, without KL in it.", "--kl_in_reward changes it"),
    "critic/advantages/mean": ("val/advantages", "Mean advantage of a rollout of the batch (veRL: of a token).", ""),
    "critic/advantages/max": ("val/advantages_max", "Largest advantage of a rollout of the batch.", ""),
    "critic/advantages/min": ("val/advantages_min", "Smallest advantage of a rollout of the batch.", ""),
    "critic/returns/mean": ("val/advantages", f"Mean of {LATER}.", ""),
    "critic/returns/max": ("val/advantages_max", f"Largest of {LATER}.", ""),
    "critic/returns/min": ("val/advantages_min", f"Smallest of {LATER}.", ""),
    # efficiency
    "perf/mfu/actor": (
        "learner_mfu",
        "Operations of the update per second of training, against the matrix product measured at the start.",
        "",
    ),
    "perf/throughput": (
        "val/num_sampled_tokens, time/total",
        "Prompt and response tokens of all rollouts per second of the step and process that holds a model.",
        "",
    ),
    "perf/time_per_step": ("time/total", "Seconds of a step without evaluation and saving.", ""),
    "perf/total_num_tokens": ("val/num_sampled_tokens", "Prompt and response tokens of all sampled rollouts.", ""),
    "perf/max_memory_allocated_gb": (
        "memory/gpu_allocated_gib",
        "Most GiB that torch's tensors took on a GPU since the start, over ranks (veRL's unit, though it says gb).",
        "no GPU",
    ),
    "perf/max_memory_reserved_gb": (
        "memory/gpu_reserved_gib",
        "Most GiB that torch's allocator held on a GPU since the start, over ranks.",
        "no GPU",
    ),
    "perf/cpu_memory_used_gb": (
        "memory/host_used_gib",
        "GiB of a machine's memory in use by anybody when the step ended, the most over ranks' machines.",
        "only Linux tells",
    ),
    "timing_s/gen": (
        "time/generation; time/trainer_waiting_for_data",
        "Seconds for which the step waited for responses: grpo.py samples, grpo_fast.py's learner waits for data.",
        "nothing was sampled",
    ),
    "timing_s/generate_sequences": (
        "time/generation",
        "Seconds in which an engine decoded: rank 0's, in grpo_fast.py the mean of all, beside the training.",
        "nothing was sampled",
    ),
    "timing_s/reward": ("time/reward", "Seconds for which scores were waited for after the sampling.", ""),
    "timing_s/old_log_prob": (
        "time/old_logprobs",
        "Seconds of the forward that gives the old policy's logprobs, mean over ranks.",
        "with one optimizer step a step the update's own forward gives them",
    ),
    "timing_s/ref": (
        "time/ref_logprobs",
        "Seconds of the reference policy's forward, mean over ranks.",
        "no reference policy",
    ),
    "timing_s/update_actor": (
        "time/training",
        "Seconds of packing, forward, backward and optimizer steps: training without the two before.",
        "",
    ),
    "timing_s/reshard": (
        "time/weight_sync",
        "Seconds that new weights took into the engine; in grpo_fast.py beside the next update.",
        "",
    ),
    "timing_s/step": ("time/total", "Seconds of a step without evaluation and saving.", ""),
    "timing_s/testing": ("time/eval", "Seconds of an evaluation.", "no evaluation"),
    "timing_s/save_checkpoint": (
        "time/saving",
        "Seconds that a Hugging Face model took to save.",
        "--save_freq saved none; resumable checkpoints are written beside the training and not timed",
    ),
    "timing_s/adv": ("", "Seconds that advantages took.", "not timed: a mean and a deviation a group, on the CPU"),
    "timing_s/start_profile": ("", "Seconds that a profiler took to start.", "the loop has no profiler"),
    "timing_s/stop_profile": ("", "Seconds that a profiler took to stop.", "the loop has no profiler"),
    "timing_per_token_ms/gen": (
        "timing_s/gen, val/sequence_lengths",
        "Milliseconds of timing_s/gen per response token of all rollouts.",
        "nothing was sampled",
    ),
    "timing_per_token_ms/ref": (
        "time/ref_logprobs, val/num_sampled_tokens",
        "Milliseconds of timing_s/ref per prompt and response token of all rollouts.",
        "no reference policy",
    ),
    "timing_per_token_ms/update_actor": (
        "timing_s/update_actor, val/num_sampled_tokens",
        "Milliseconds of timing_s/update_actor per prompt and response token of all rollouts.",
        "",
    ),
    "timing_per_token_ms/adv": ("", "Milliseconds of timing_s/adv per token.", "timing_s/adv is not timed"),
    # lengths
    "prompt_length/mean": ("val/prompt_lengths", "Mean prompt tokens of a sampled rollout.", ""),
    "prompt_length/min": ("val/prompt_lengths_min", "Fewest prompt tokens of a sampled rollout.", ""),
    "prompt_length/max": ("val/prompt_lengths_max", "Most prompt tokens of a sampled rollout.", ""),
    "prompt_length/clip_ratio": (
        "",
        "Share of prompts of the largest length allowed.",
        "no prompt is cut: longer ones than --max_prompt_token_length are dropped before the start, and counted there",
    ),
    "response_length/mean": ("val/sequence_lengths", "Mean response tokens of a sampled rollout.", ""),
    "response_length/min": ("val/sequence_lengths_min", "Fewest response tokens of a sampled rollout.", ""),
    "response_length/max": ("val/sequence_lengths_max", "Most response tokens of a sampled rollout.", ""),
    "response_length/clip_ratio": (
        "1 - val/stop_rate",
        "Share of sampled responses that did not end by themselves (veRL: those of the largest length).",
        "",
    ),
    "global_seqlen/mean": (
        "val/learner_tokens",
        "Mean over ranks of the tokens in a rank's packs, a prompt once for the responses that share it.",
        "",
    ),
    "global_seqlen/min": (
        "val/learner_tokens_min",
        "Fewest tokens in a rank's packs, of the prompts that it sampled itself.",
        "grpo_fast.py never has packs that are not balanced",
    ),
    "global_seqlen/max": (
        "val/learner_tokens_max",
        "Most tokens in a rank's packs, of the prompts that it sampled itself.",
        "grpo_fast.py never has packs that are not balanced",
    ),
    "global_seqlen/minmax_diff": (
        "val/learner_tokens_max, _min",
        "Most less fewest tokens in a rank's packs, of the prompts that it sampled itself.",
        "grpo_fast.py never has packs that are not balanced",
    ),
    "global_seqlen/balanced_min": (
        "val/learner_tokens_min",
        "Fewest tokens in a learner's packs, which are dealt out evenly.",
        "grpo.py balances nothing: a rank trains on the prompts that it sampled",
    ),
    "global_seqlen/balanced_max": (
        "val/learner_tokens_max",
        "Most tokens in a learner's packs, which are dealt out evenly.",
        "grpo.py balances nothing: a rank trains on the prompts that it sampled",
    ),
    "training/epoch": ("epoch", "Passes over the prompts so far, with fractions.", ""),
    "training/global_step": ("training_step", "The step.", ""),
}
CONVERGENCE = "actor/lr actor/pg_loss actor/pg_clipfrac actor/entropy actor/kl_loss actor/grad_norm".split()
PERFORMANCE = "val-core/SOURCE/reward/mean@1 critic/rewards/mean critic/advantages/mean critic/returns/mean".split()
EFFICIENCY = """perf/mfu/actor perf/throughput perf/time_per_step perf/max_memory_allocated_gb perf/cpu_memory_used_gb
    timing_s/gen timing_s/generate_sequences timing_s/old_log_prob timing_s/ref timing_s/update_actor timing_s/reshard
    timing_s/reward timing_s/testing timing_s/save_checkpoint""".split()
LENGTHS = """prompt_length/mean response_length/mean response_length/min response_length/max
    response_length/clip_ratio""".split()
REMARKS = {
    "actor/pg_loss": "its size is no sign of convergence",
    "critic/advantages/mean": "near 0 by construction, no sign of convergence",
    "critic/returns/mean": "equal to the advantages",
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
    if not is_fast(run):
        return run.environment.get("world_size") or 1
    engines = run.args.get("vllm_num_engines", 1) * run.args.get("vllm_tensor_parallel_size", 1)
    return sum(run.args.get("num_learners_per_node", [1])) + engines


def is_fast(run: Run) -> bool:
    """Whether grpo_fast.py made it."""
    return run.last("time/trainer_waiting_for_data") is not None


def throughput(run: Run) -> dict[str, float]:
    """Prompt and response tokens per second and process, after step 1: of steps, and with validation and saving in."""
    rows = [r for step, r in sorted(run.rows.items()) if step > 1 and r.get("time/total")]
    tokens, steps = sum(tokens_of(r) or 0.0 for r in rows), sum(r["time/total"] for r in rows)
    extra = sum((r.get("time/eval") or 0.0) + (r.get("time/saving") or 0.0) for r in rows)
    n = devices(run)
    return {"steps": tokens / steps / n, "all": tokens / (steps + extra) / n, "extra": extra} if rows else {}


def tokens_of(row: dict[str, float]) -> float | None:
    """Prompt and response tokens of all rollouts of a step; val/num_step_tokens was that in runs of older versions."""
    return row.get("val/num_sampled_tokens", row.get("val/num_step_tokens"))


def value(run: Run, name: str, row: dict[str, Any]) -> float | None:
    """A step's value by veRL's name and in its unit, or None."""
    kind, _, last = name.partition("/")
    if name == "actor/kl_coef":
        return run.args.get("beta")
    if name == "perf/total_num_tokens":
        return tokens_of(row)
    if name == "perf/throughput":
        tokens, seconds = tokens_of(row), row.get("time/total")
        return tokens / seconds / devices(run) if tokens is not None and seconds else None
    if name == "timing_s/gen":
        return row.get("time/trainer_waiting_for_data" if is_fast(run) else "time/generation")
    if name == "timing_s/update_actor":
        parts = [row.get(f"time/{part}") for part in ("training", "ref_logprobs", "old_logprobs")]
        return None if parts[0] is None else parts[0] - sum(p or 0.0 for p in parts[1:])
    if kind == "timing_per_token_ms" and METRICS[name][0]:
        seconds = value(run, f"timing_s/{last}", row)
        tokens = responses_of(run, row) if last == "gen" else tokens_of(row)
        return 1000 * seconds / tokens if seconds is not None and tokens else None
    if kind == "global_seqlen" and last != "mean" and is_fast(run) != last.startswith("balanced"):
        return None
    if name == "global_seqlen/minmax_diff":
        most, fewest = (row.get(f"val/learner_tokens_{end}") for end in ("max", "min"))
        return None if most is None or fewest is None else most - fewest
    if name == "response_length/clip_ratio":
        return None if row.get("val/stop_rate") is None else 1 - row["val/stop_rate"]
    found = row.get(METRICS[name][0])
    if found is None or kind != "critic" or "advantages" in METRICS[name][0]:
        return found
    if last.startswith("rewards") and run.args.get("kl_in_reward"):
        if last != "rewards/mean":
            return None
        found -= row.get("objective/kl_in_reward") or 0.0
    return found / (run.args.get("verification_reward") or 1.0)


def responses_of(run: Run, row: dict[str, Any]) -> float | None:
    """Response tokens of all rollouts of a step."""
    groups, mean = row.get("batch/total_prompts"), row.get("val/sequence_lengths")
    if groups is None or mean is None:
        return None
    return mean * groups * (run.args.get("num_samples_per_prompt_rollout") or 1)


def values(run: Run, name: str) -> tuple[list[float], list[float]]:
    """(all steps, steps after the first) of a metric by veRL's name and in veRL's unit."""
    found = [(step, value(run, name, row)) for step, row in sorted(run.rows.items())]
    return [v for _, v in found if v is not None], [v for step, v in found if v is not None and step > 1]


def shown(run: Run, name: str) -> str:
    """veRL's name with the data set that was evaluated on, and responses a prompt, in their places."""
    sources = run.args.get("dataset_mixer_eval_list") or ["SOURCE"]
    source = "+".join(str(s).removesuffix(".jsonl").partition(":")[0].strip("./") for s in sources[::2])
    return name.replace("SOURCE", source).replace("mean@1", f"mean@{run.args.get('eval_pass_at_k', 1)}")


def wilson(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share of n, by the formula above; unlike share +- 2 errors it has a width at 0 and 1."""
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - half) / scale, (middle + half) / scale


def eval_responses(run: Run) -> int:
    """Responses judged in the last evaluation that has them; several verifiers may judge the same one."""
    for row in reversed(run.rows.values()):
        names = [k for k in row if re.fullmatch(r"eval/reward/.+_(ok|no_answer)", k)]
        if names:
            rate, judged = row.get("eval/stop_rate"), int(sum(row[k] for k in names))
            return min(judged, round(row["eval/num_stop_token_ids"] / rate)) if rate else judged
    return 0


def remark(run: Run, name: str) -> str:
    """What the value means in this run."""
    all_steps, _ = values(run, name)
    if not all_steps:
        return METRICS[name][2] or "not recorded in this run"
    first, last = all_steps[0], all_steps[-1]
    if name == "actor/lr":
        kind = run.args.get("lr_scheduler_type", "?")
        moved = "constant" if first == last else f"from {first:.3e}" + (" to 0: training ended" if last == 0 else "")
        return f"schedule {kind}: {moved}"
    if name in ("actor/entropy", "actor/pg_clipfrac", "actor/grad_norm"):
        return f"first step that has it {number(first)}"
    if name == "val-core/SOURCE/reward/mean@1":
        n = eval_responses(run)
        error = "; 95 % interval {:.4f} to {:.4f}".format(*wilson(last, n)) if n else ""
        return f"share correct of {n} responses{error}; best {max(all_steps):.4f} of {len(all_steps)} evaluations"
    if name == "critic/rewards/mean":
        return f"first step {number(first)}"
    if name == "perf/throughput" and (rate := throughput(run)):
        seconds = f"{rate['extra']:.1f} s of validation and saving"
        return f"per process, over all steps {number(rate['steps'])}; with {seconds} inside {number(rate['all'])}"
    if name == "perf/mfu/actor":
        what = "of the matrix product measured at start; old and reference logprobs count in both its parts"
        return what + ", embedding lookups in none"
    if name == "timing_s/generate_sequences" and is_fast(run):
        return "beside the training; the learner waited " + number(run.mean("time/trainer_waiting_for_data"))
    return REMARKS.get(name, "")


def metrics_table(run: Run, names: list[str]) -> str:
    rows = []
    for name in names:
        all_steps, later = values(run, name)
        last, mean = (all_steps or [None])[-1], statistics.fmean(later) if later else None
        rows.append([f"`{shown(run, name)}`", f"`{METRICS[name][0]}`", number(last), number(mean), remark(run, name)])
    return table(["veRL's name", "ours", "last", "mean after step 1", "remark"], rows, text=(0, 1, 4))


def history(run: Run) -> str:
    """Every metric over the steps, as wandb's summary shows it, and those without a value with the reason."""
    found = {name: values(run, name)[0] for name in METRICS}
    rows = [[f"`{shown(run, n)}`", sparkline(v), number(v[0]), number(v[-1])] for n, v in sorted(found.items()) if v]
    missing = [f"- `{shown(run, n)}`: {remark(run, n)}" for n, v in sorted(found.items()) if not v]
    lines = [table(["veRL's name", "steps", "first", "last"], rows, text=(0, 1))]
    lines.append(f"{len(rows)} of the {len(METRICS)} metrics that veRL's summary has. Without a value in this run:")
    return "\n\n".join([*lines, "\n".join(missing)] if missing else lines[:1])


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
        ]
    if len(run.rows) < 20:
        out.append(f"{len(run.rows)} steps are too few to speak of convergence.")
    if (n := eval_responses(run)) < 200:
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
    """A sentence for each of veRL's names, and ours."""
    return "\n".join(
        f"- **`{shown(run, name)}`**" + (f" (ours: `{ours}`)" if ours else "") + f": {what}"
        for name, (ours, what, _) in sorted(METRICS.items())
    )


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
    parts += ["## 5. Run history", history(run)]
    parts += ["## What these figures cannot say", "\n".join(f"- {line}" for line in limits(run))]
    return "\n\n".join([*parts, "## Metric definitions", definitions(run)]) + "\n"


def plot(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = """critic/rewards/mean val-core/SOURCE/reward/mean@1 actor/entropy actor/kl_loss actor/lr
        response_length/mean perf/throughput perf/time_per_step actor/grad_norm""".split()
    figure, axes = plt.subplots(3, 3, figsize=(14, 10), constrained_layout=True)
    for axis, name in zip(axes.flat, names, strict=True):
        found = [(r["training_step"], value(run, name, r)) for r in run.all_rows]  # with an evaluation before step 1
        points = sorted((step, v) for step, v in found if v is not None)
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3)
        else:
            axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes)
        axis.set_title(f"{shown(run, name)}\n{METRICS[name][0]}", fontsize=9)
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
