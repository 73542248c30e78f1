"""Write RUN/report.html: one self-contained page that shows what a run did.

    python scripts/reports/report.py RUN [--out PAGE.html] [--max_rollouts 2000]

The page needs no network and no other file: data, drawing code and style are inside, and its content security policy
lets nothing else run, so that the text of a hostile response stays text. It has

checks      what a practitioner would look at first, each with its numbers and its threshold
curves      of metrics.jsonl, with the definition of the metric in scripts/reports/README.md under the pointer
histograms  response length and score over time (rollouts.jsonl, else means and extremes) and, of single tokens
            (--dump_steps), the policy ratio new/old with the clip bounds, and the learner/engine probability ratio
time        seconds per phase, and throughput against the floors that were measured
rollouts    (--save_traces or --dump_steps) by step, score and text; tokens coloured by |learner - engine| logprob where
            a row has the learner's, else by the engine's logprob

Size is bounded: --max_rollouts, 2,000 tokens of a response, 8,000 characters of a text, 2,000 steps and 24 MB of
rollouts; what was left out is said on the page. Groups are left out whole and evenly over the run.
"""

import argparse
import base64
import functools
import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

ROOT = Path(__file__).resolve().parents[2]
MAX_ROLLOUTS, MAX_ROLLOUT_BYTES, MAX_STEPS, MAX_TOKENS, MAX_CHARACTERS = 2000, 24_000_000, 2000, 2000, 8000
COLUMNS = 80  # of a histogram over time
GAP, OFF = "debug/vllm_vs_local_logprob_diff", "objective/"
PANELS = (  # title, unit, metrics
    ("Correct", "share of rollouts", (f"{OFF}verifiable_correct_rate", f"eval/{OFF}verifiable_correct_rate")),
    ("Score", "", (f"{OFF}scores", f"{OFF}reward_std", "eval/scores")),
    ("Response length", "tokens", ("val/sequence_lengths", "val/sequence_lengths_solved", "eval/sequence_lengths")),
    ("Ended by themselves", "share", ("val/stop_rate", "eval/stop_rate")),
    ("Groups", "groups a step", tuple(f"batch/filtered_prompts_{k}" for k in ("zero", "solved"))
     + ("val/total_reward_groups",)),
    ("Entropy", "nats per token", ("policy/entropy_avg",)),
    ("KL to the reference", "nats per token", ("objective/kl1_avg", "objective/kl2_avg")),
    ("Loss", "", ("loss/policy_avg", "loss/total_avg")),
    ("Gradient norm", "", ("optim/grad_norm",)),
    ("Learning rate", "", ("lr",)),
    ("Clipped tokens", "share", ("policy/clipfrac_avg", "val/rho_clipfrac")),
    ("Logprob gap, engine to learner", "nats", (f"{GAP}_mean", f"{GAP}_max")),
    ("Ratios", "learner/engine, new/old", ("val/rho", "val/ratio")),
    ("Seconds per step", "s", ("time/total", "time/training", "time/generation")),
    ("Turns", "of the policy, a rollout", ("val/turns", "eval/turns")),
    ("Tokens by who wrote them", "a rollout", ("val/policy_tokens", "val/environment_tokens")),
    ("Calls of tools", "a rollout", tuple(f"{part}tools/aggregate/avg_calls_per_rollout" for part in ("", "eval/"))),
    ("Calls that failed", "share", ("tools/aggregate/failure_rate", "eval/tools/aggregate/failure_rate")),
    ("Seconds per call", "s", ("tools/aggregate/avg_runtime",)),
    ("Tokens per second", "", ("learner_tokens_per_second_step", "val/response_tokens_per_second")),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that was cut short by a kill is left out."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. Raises ValueError when there are none."""
    rows = list(read_lines(run / "metrics.jsonl"))
    if not rows:
        raise ValueError(f"{run}: no metrics.jsonl with a row in it")
    return rows


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def phases(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """The parts of a step that follow one another; grpo_fast.py generates beside them."""
    if any("time/trainer_waiting_for_data" in r for r in rows):
        return ("trainer_waiting_for_data", "training", "gather", "eval", "saving")
    return ("generation", "reward", "training", "weight_sync", "eval", "saving")


def series(rows: list[dict[str, Any]], name: str) -> list[float]:
    """The finite values of a metric over the training steps."""
    return [r[name] for r in rows if r["training_step"] > 0 and r.get(name) is not None]


@functools.cache
def metric_table() -> list[tuple[set[str], set[str], str, str]]:
    """The metrics table of reports/README.md, a row each: as written, what short forms stand for, definition, healthy.

    `_max` after `val/x_min` stands for val/x_min_max, val/x_max and val_max; a bare `reward` for time/reward. Of a
    definition without commas and with as many parts (;) as there are names each takes its own; so of healthy numbers.
    """
    text = (ROOT / "scripts" / "reports" / "README.md").read_text().split("| metric | definition")[1].split("\n\n")[0]
    table = []
    for line in text.splitlines()[2:]:
        names, definition, healthy = line.split("|")[1:4]
        names += definition if "eval/..." in names else ""  # where the names of this row are explained
        full, last, found = "", "", re.findall(r"`([^`]+)`", names)  # full: the last name with a slash

        def own(text: str, mark: str, divides: bool, i: int, n: int = len(found)) -> str:
            parts = text.replace("`", "").split(mark)
            return (parts[i] if divides and len(parts) == n else mark.join(parts)).strip()

        for i, name in enumerate(found):
            exact, implied = set(), set()
            if name.startswith("_"):
                for base in (full, last):
                    implied |= {base[: m.start()] + name for m in re.finditer("_|$", base)}
            else:
                exact.add(name)
                implied.add(f"{full.rpartition('/')[0]}/{name}")
                full, last = name if "/" in name else full, name
            parts = (
                own(definition, ";", "," not in definition, i),
                own(healthy, ",", not re.search("[a-z]", healthy), i),
            )
            table.append((exact, implied, *parts))
    return table


def define(metric: str) -> tuple[str, str] | None:
    """(definition, healthy range) of a metric by that table, or None. NAME stands for any verifier."""
    if metric.startswith("eval/") and not metric.startswith("eval/pass"):
        found = next(filter(None, (define(prefix + metric[5:]) for prefix in ("", "val/", "objective/"))), None)
        return found and (f"evaluation prompts: {found[0]}", found[1])
    plain = re.sub(r"(?<=kl)[1-3](?=_avg)", "0", metric.replace("objective_kept/", "objective/"))
    plain = re.sub(r"pass_at_\d+_unbiased", "pass_at_K_unbiased", plain)
    tests: tuple[Callable[[set[str], set[str]], bool], ...] = (
        lambda exact, implied: metric in exact or plain in exact,
        lambda exact, implied: plain in implied,
        lambda exact, implied: any(
            "NAME" in n and re.fullmatch(re.escape(n).replace("NAME", r"[\w-]+"), plain) for n in exact | implied
        ),
    )
    for test in tests:
        for exact, implied, definition, healthy in metric_table():
            if test(exact, implied):
                return definition, healthy
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------


def check_run(rows: list[dict[str, Any]], args: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a check: name, whether it is fine, its numbers, its threshold. first and last are means over the first and
    the last fifth of the steps that have the metric; a check whose metric was not recorded is left out."""
    found: list[dict[str, Any]] = []

    def ends(name: str) -> tuple[float, float] | None:
        values = series(rows, name)
        n = max(1, len(values) // 5)
        return (float(np.mean(values[:n])), float(np.mean(values[-n:]))) if values else None

    def note(name: str, fine: bool, numbers: str, threshold: str) -> None:
        found.append({"name": name, "fine": bool(fine), "numbers": numbers, "threshold": threshold})

    if e := ends("policy/entropy_avg"):
        fine = e[1] > 0.05 and e[1] > e[0] / 4
        note("entropy collapse", fine, f"{e[0]:.3g} -> {e[1]:.3g} nats per token", "last < 0.05 or < first / 4")
    if e := ends("policy/clipfrac_avg"):
        most = max(series(rows, "policy/clipfrac_avg"))
        numbers = f"last {e[1]:.2%}, most {most:.2%}"
        note("clipped tokens", e[1] <= 0.1 and most <= 0.3, numbers, "last > 10 % or any > 30 %")
    if e := ends("val/sequence_lengths"):
        fine = 0.5 <= e[1] / max(e[0], 1e-9) <= 2
        note("length explosion", fine, f"{e[0]:.1f} -> {e[1]:.1f} tokens", "last > 2 x first, or < first / 2")
    if e := ends("val/stop_rate"):
        limit = args.get("response_length", "?")
        note("truncated responses", e[1] >= 0.9, f"last {1 - e[1]:.1%} (limit {limit} tokens)", "last > 10 %")
    if e := ends(f"{GAP}_mean"):
        most = 1e-5 if args.get("model_dtype") == "float32" else 0.05
        age = max(series(rows, "val/num_steps_off_policy"), default=0)
        stale = f", tokens up to {age:.2g} updates old" if age else ""
        numbers = f"{e[0]:.2g} -> {e[1]:.2g} nats{stale}"
        note("logprob gap", e[1] <= most, numbers, f"last > {most:g} ({args.get('model_dtype')})")
        note("gap growth", e[1] <= max(3 * e[0], 1e-5), numbers, "last > 3 x first and > 1e-5")
    totals, n = {}, sum(series(rows, "batch/total_prompts"))
    for kind in ("zero", "solved"):
        part = ends(f"batch/filtered_prompts_{kind}")
        totals[kind] = part[1] / max(ends("batch/total_prompts")[1], 1) if part and n else None
    for kind, name in (("solved", "solved groups"), ("zero", "hopeless groups")):
        if totals[kind] is not None:
            hint = "all rollouts right: too easy" if kind == "solved" else "all rollouts at 0: too hard"
            note(name, totals[kind] <= 0.5, f"last {totals[kind]:.1%} ({hint})", "last > 50 %")
    if e := ends("other/real_batch_size_ratio"):
        note("rollouts with a gradient", e[1] >= 0.3, f"last {e[1]:.1%}", "last < 30 %")
    if missing := series(rows, "batch/missing_rewards"):
        sampled = n * args.get("num_samples_per_prompt_rollout", 1)
        note("missing rewards", sum(missing) == 0, f"{sum(missing):.0f} of {sampled:.0f} rollouts", "> 0")
    if bad := series(rows, "optim/nonfinite_updates"):
        note("non-finite updates", sum(bad) == 0, f"{sum(bad):.0f} in {len(bad)} steps", "> 0")
    if skipped := series(rows, "optim/skipped_steps"):
        share = sum(skipped) / len(skipped)
        note("steps without an update", share <= 0.1, f"{sum(skipped):.0f} of {len(skipped)} steps", "> 10 %")
    if e := ends("objective/kl2_avg"):
        fine = e[1] <= 0.1 or not args.get("beta")
        note("KL to the reference", fine, f"last {e[1]:.3g} nats per token", "last > 0.1, where beta > 0")
    if len(norms := series(rows, "optim/grad_norm")) > 2 and np.median(norms) > 0:
        ratio = max(norms) / np.median(norms)
        note("gradient spikes", ratio <= 10, f"largest {max(norms):.3g} = {ratio:.1f} x median", "> 10 x median")
    if len(evals := series(rows, "eval/objective/verifiable_correct_rate")) > 1:
        numbers = f"best {max(evals):.3f}, last {evals[-1]:.3f}"
        note("evaluation falls", evals[-1] >= max(evals) - 0.05, numbers, "last < best - 0.05")
    holes = sorted({k for r in rows for k, v in r.items() if v is None})
    note("NaN or infinite metrics", not holes, ", ".join(holes[:6]) or "none", "any")
    return sorted(found, key=lambda c: c["fine"])


def floors(rows: list[dict[str, Any]]) -> list[list[str]]:
    """[what, mean over the steps after the first, its floor or ceiling, the value against it], as text."""

    def mean(name: str) -> float | None:
        values = series(rows, name)
        return float(np.mean(values[1:] or values)) if values else None

    def tell(name: str, form: str, limit: str = "-", against: str = "-", over: float = 1.0) -> None:
        if (value := mean(name)) is not None:
            table.append([name, form.format(value), limit, against.format(value / over)])
        elif name in ("val/engine_bandwidth_share", "learner_mfu"):
            table.append([name, "not recorded", limit, "-"])

    table: list[list[str]] = []
    wanted = ("time/weight_sync_floor", "val/engine_bandwidth_share", "val/engine_tokens_per_second")
    floor, share, rate = map(mean, wanted)
    copy = (f"{floor:.3g} s, a memory copy of the bytes", "{:.1f} x", floor) if floor else ("not recorded",)
    tell("time/weight_sync", "{:.3g} s", *copy)
    tell("val/engine_bandwidth_share", "{:.3f}", "1: memory bandwidth of a copy", "{:.1%}")
    tell("learner_mfu", "{:.3f}", "1: the matrix product measured at start", "{:.1%}")
    for name in ("val/learner_idle_share", "val/engine_idle_share"):
        tell(name, "{:.3f}", "0", "{:.1%} of the step")
    for name in ("learner_tokens_per_second_step", "val/actor_tokens_per_second", "val/response_tokens_per_second"):
        tell(name, "{:,.0f} tokens/s")
    most = rate / share if rate and share else 0.0
    known = (f"{most:,.0f} tokens/s at the memory's bandwidth", "{:.1%}", most) if most else ()
    tell("val/engine_tokens_per_second", "{:,.0f} tokens/s", *known)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts
# ---------------------------------------------------------------------------------------------------------------------


class Pieces:
    """Token ids as pieces of text. A token that is no whole character is joined with those after it."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]  # some tokenizers drop a leading space
        self.skip, self.known = len(self.decode(self.anchor)), {}

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def split(self, ids: list[int]) -> list[tuple[str, int, int]]:
        """(text, first token, one past the last) of each piece."""
        out, start = [], 0
        for end in range(1, len(ids) + 1):
            key = tuple(ids[start:end])
            if key not in self.known:
                self.known[key] = self.decode(self.anchor + list(key))[self.skip :]
            if not self.known[key].endswith("\ufffd") or end - start >= 6 or end == len(ids):
                out.append((self.known[key], start, end))
                start = end
        return out


def load_pieces(run: Path, args: dict[str, Any], notes: list[str]) -> Pieces | None:
    """The tokenizer of RUN/model, a step's model, or the start model if it is on this disk; else None and a note."""
    saved = sorted(run.glob("step_*/tokenizer.json"), key=lambda p: int(p.parent.name.split("_")[1]))
    names = [run / "model", *(p.parent for p in saved[-1:]), Path(args.get("model_name_or_path") or "")]
    for path in names:
        if (path / "tokenizer.json").exists() or (path / "tokenizer_config.json").exists():
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            from transformers import AutoTokenizer

            return Pieces(AutoTokenizer.from_pretrained(path))
    notes.append("No tokenizer in RUN/model: responses are shown as text, without colours.")
    return None


def rollout_rows(run: Path) -> Iterator[dict[str, Any]]:
    """The rows of rollouts.jsonl, if there is one."""
    if (run / "rollouts.jsonl").exists():
        yield from read_lines(run / "rollouts.jsonl")


def show_rollout(row: dict[str, Any], pieces: Pieces | None) -> dict[str, Any]:
    """A rollout as the page wants it; spans are [text, engine logprob, learner logprob or null, who wrote it: 0 the
    policy, 1 its environment], the worst of a piece's tokens; no piece has tokens of both."""
    cut = len(row["text"]) > MAX_CHARACTERS or len(row["token_ids"]) > MAX_TOKENS
    ids, engine = row["token_ids"][:MAX_TOKENS], row["logprobs"][:MAX_TOKENS]
    own = row.get("old_logprobs", [math.nan] * len(ids))[:MAX_TOKENS]
    mask, spans, first = row.get("mask") or [True] * len(ids), [], 0
    for wrote, run in itertools.groupby(mask[: len(ids)]) if pieces else ():
        last = first + len(list(run))
        for text, a, b in pieces.split(ids[first:last]):
            tokens = range(first + a, first + b)
            i = max(tokens, key=lambda j: (abs(own[j] - engine[j]) if own[j] == own[j] else -1, -engine[j]))
            known = wrote and own[i] == own[i]
            spans.append([text, round(engine[i], 5), round(own[i], 5) if known else None, int(not wrote)])
        first = last
    labels = json.dumps(row.get("ground_truths"), ensure_ascii=False)
    results = json.dumps(row.get("results"), ensure_ascii=False, indent=1)
    versions = sorted({int(v) for v in row["versions"] if v >= 0})  # -1 is the environment's
    return {
        "step": row["training_step"], "position": row["position"], "sample": row["sample"], "score": row["score"],
        "advantage": row["advantage"], "tokens": len(row["token_ids"]), "finish": row["finish_reason"],
        "versions": versions if len(versions) < 9 else [versions[0], versions[-1]],
        "verifiers": row.get("verifiers"), "statuses": sorted({r["status"] for r in row.get("results") or ()}),
        "prompt": row["prompt"][-MAX_CHARACTERS:], "text": row["text"][:MAX_CHARACTERS], "cut": cut,
        "turns": [[t["role"], t.get("status") or t.get("finish_reason"), t["tokens"]] for t in row.get("turns") or ()],
        "label": labels[:MAX_CHARACTERS], "results": results[:MAX_CHARACTERS], "spans": spans,
    }  # fmt: skip


def heat(title: str, unit: str, edges: Any, counts: dict[int, Any], **more: Any) -> dict[str, Any] | None:
    """A histogram a column of steps: counts[column][row], of which row j lies between edges[j] and edges[j + 1]."""
    steps = sorted(counts)
    width = max(1, math.ceil(len(steps) / COLUMNS))
    columns = [steps[i : i + width] for i in range(0, len(steps), width)]
    sums = [np.sum([counts[s] for s in part], 0).tolist() for part in columns]
    drawn = {"steps": [part[0] for part in columns], "last": steps[-1] if steps else 0, "counts": sums}
    drawn |= {"title": title, "unit": unit, "edges": [float(f"{e:.6g}") for e in edges]}
    return drawn | more if any(map(any, sums)) else None


def histogram(values: Any, edges: Any) -> np.ndarray:
    """Counts between `edges`; the first and last take what lies beyond. NaN and infinity are left out."""
    values = np.asarray(values, float)
    return np.histogram(np.clip(values[np.isfinite(values)], edges[0], edges[-1]), edges)[0]


def even_heat(title: str, unit: str, points: dict[int, list[float]], rows: int = 24) -> dict[str, Any] | None:
    """`heat` with even rows from the 0.1th to the 99.9th percentile."""
    values = np.array([v for part in points.values() for v in part if v is not None and math.isfinite(v)])
    low, high = np.percentile(values, (0.1, 99.9)) if len(values) else (0.0, 0.0)
    if (values == values.round()).all():  # a row holds as many whole numbers as any other, or it shows stripes
        each = math.ceil((high - low + 1) / rows)
        edges = np.arange(low - 0.5, high + each, each)
    else:
        edges = np.linspace(low, high if high > low else low + 1, rows + 1)
    return heat(title, unit, edges, {step: histogram(part, edges) for step, part in points.items()})


def ratio_heat(title: str, unit: str, logs: dict[int, np.ndarray], bounds: dict[str, float]) -> dict[str, Any] | None:
    """`heat` of exp(logs). Rows grow with the distance from 1, as distances of 1e-4 and of 0.3 both matter; `bounds`,
    name -> value, are edges too."""
    near = (1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3)
    edges = sorted({0.25, 0.5, *(1 - d for d in near), *(1 + d for d in near), 2.0, 4.0, *bounds.values()})
    counts = {step: histogram(np.exp(np.clip(values, -20, 20)), edges) for step, values in logs.items()}
    return heat(title, unit, edges, counts, bounds=bounds)


def ratio_heats(new: dict[int, Any], engine: dict[int, Any], args: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Histograms of new/old and of learner/engine, of their logs of tokens by step."""
    lower, higher = (args.get(f"clip_{side}") for side in ("lower", "higher"))
    bounds = {} if lower is None or args.get("loss_fn") == "cispo" else {"1 - clip_lower": 1 - lower}
    bounds |= {} if higher is None else {"1 + clip_higher": 1 + higher}
    names = [f"rho_{name}_bound" for name in ("clamp_upper", "mask_lower", "mask_upper")]
    limits = {n: args[n] for n in names if args.get("use_rho_correction") and args.get(n)}
    return [
        ratio_heat("Policy ratio", "new/old of a token, last pass", new, bounds),
        ratio_heat("Engine ratio", "learner/engine of a token", engine, limits),
    ]


def collect_rollouts(run: Path, args: dict, most: int, notes: list[str]) -> tuple[list[dict], list[dict]]:
    """Rollouts to browse, at most `most` in whole groups, and the histograms, which are of all of them."""
    lengths: dict[int, list[float]] = {}
    scores: dict[int, list[float]] = {}
    new: dict[int, list[float]] = {}  # logprobs of tokens trained on, new - old
    engine: dict[int, list[float]] = {}  # old - engine's
    for row in rollout_rows(run):
        lengths.setdefault(row["training_step"], []).append(len(row["token_ids"]))
        scores.setdefault(row["training_step"], []).append(row["score"])
        for logs, of, to in ((new, "new_logprobs", "old_logprobs"), (engine, "old_logprobs", "logprobs")):
            if of in row:
                found = (np.array(row[of]) - row[to])[np.array(row["mask"], bool)]
                logs.setdefault(row["training_step"], []).extend(found.tolist())
    policy_ratio, engine_ratio = ratio_heats(new, engine, args)
    found = [
        even_heat("Response length", "tokens", lengths),
        even_heat("Score", "", scores),
        policy_ratio,
        engine_ratio,
    ]
    total = sum(map(len, lengths.values()))
    stride, shown = max(1, math.ceil(total / most)), []
    pieces = load_pieces(run, args, notes) if total else None
    group, name = -1, None
    for row in rollout_rows(run):
        if (row["training_step"], row["position"]) != name:
            group, name = group + 1, (row["training_step"], row["position"])
        if group % stride or len(shown) >= most:
            continue
        shown.append(show_rollout(row, pieces))
    while len(json.dumps(shown)) > MAX_ROLLOUT_BYTES:
        groups = sorted({(r["step"], r["position"]) for r in shown})[::2]
        shown = [r for r in shown if (r["step"], r["position"]) in set(groups)]
    if len(shown) < total:
        notes.append(f"{len(shown):,} of {total:,} rollouts are on this page, in whole groups evenly over the run.")
    if not total:
        notes.append("No rollouts: the run had neither --save_traces nor --dump_steps.")
    elif not engine_ratio:
        notes.append(
            "No row has the learner's logprobs (add --dump_steps all): no histograms of ratios, and tokens are "
            "coloured by the engine's."
        )
    return shown, [h for h in found if h]


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def collect(run: Path, most: int = MAX_ROLLOUTS) -> dict[str, Any]:
    """All that the page shows."""
    rows, args, notes = read_metrics(run), read_json(run / "args.json"), []
    rollouts, histograms = collect_rollouts(run, args, most, notes)
    checks, parts, table = check_run(rows, args), phases(rows), floors(rows)
    if len(rows) > MAX_STEPS:
        stride = math.ceil(len(rows) / MAX_STEPS)
        notes.append(f"Curves have every {stride}th of {len(rows):,} steps; checks are of all steps.")
        rows = rows[::stride]
    names = sorted({k for r in rows for k, v in r.items() if isinstance(v, (int, float))} - {"training_step"})
    metrics = {n: [r.get(n) if r.get(n) is None else float(f"{r[n]:.6g}") for r in rows] for n in names}
    panels = [{"title": t, "unit": u, "names": [n for n in ns if n in metrics]} for t, u, ns in PANELS]
    return {
        "name": run.resolve().name, "steps": [r["training_step"] for r in rows], "metrics": metrics,
        "definitions": {n: d for n in names if (d := define(n))}, "panels": [p for p in panels if p["names"]],
        "phases": [f"time/{p}" for p in parts if f"time/{p}" in metrics], "checks": checks, "floors": table,
        "histograms": histograms, "rollouts": rollouts, "notes": notes, "args": args,
        "environment": read_json(run / "environment.json"),
    }  # fmt: skip


def write_page(run: Path, out: Path | None = None, most: int = MAX_ROLLOUTS) -> Path:
    """Write the page and return its path. Raises ValueError when the run has no metrics."""
    data = json.dumps(collect(run, most), allow_nan=False, default=str)
    for character in "<>&":  # no text of a response can end the script element it is in
        data = data.replace(character, f"\\u{ord(character):04x}")
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    page = PAGE.replace("@DIGEST@", digest).replace("@SCRIPT@", SCRIPT).replace("@DATA@", data)  # the data come last
    out = out or run / "report.html"
    out.write_text(page, encoding="utf-8")
    return out


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'sha256-@DIGEST@'; style-src 'unsafe-inline'">
<title>report</title><style>
:root { color-scheme: light dark; --fg: #1b1e23; --bg: #fff; --dim: #667; --line: #d8dbe0; --box: #f6f7f9;
  --c0: #2563c9; --c1: #d2600f; --c2: #1a8f5c; --c3: #a23bb0; --c4: #b08900; --c5: #777; --bad: #c4271c; --ok: #1a8f5c;
  --heat: 37,99,201; --gap: 214,60,30; --low: 37,99,201; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e6ea; --bg: #14161a; --dim: #9aa1ac; --line: #343941;
  --box: #1d2026; --c0: #6ea4ff; --c1: #ff9d57; --c2: #4fd09a; --c3: #dd8bea; --c4: #e2c04d; --c5: #aaa; --bad: #ff7a6e;
  --ok: #4fd09a; --heat: 110,164,255; --gap: 255,96,64; --low: 110,164,255; } }
* { box-sizing: border-box } body { margin: 0 auto; max-width: 1320px; padding: 1rem 1.2rem 4rem; color: var(--fg);
  background: var(--bg); font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .2rem 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: .95rem; margin: 0 0 .2rem; font-weight: 600 } h3 .dim { font-weight: 400; font-size: .85rem }
.dim { color: var(--dim) } .bad { color: var(--bad) }
.ok { color: var(--ok) } nav a { margin-right: 1rem; color: var(--c0) }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); gap: 1rem }
.card { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .7rem; min-width: 0 }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--dim); font-size: 11px }
.legend { font-size: 12px; display: flex; flex-wrap: wrap; gap: .1rem .9rem } .legend span { cursor: help }
.legend .dash { height: 0; background: none; border-top: 2px dashed var(--bad) }
.legend b { display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle }
table { border-collapse: collapse; font-size: 13.5px } td, th { text-align: left; padding: .2rem .9rem .2rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top } 
.rows { width: 100%; table-layout: fixed } .rows td { overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.rows td.detail { white-space: normal }
.rows tr[tabindex] { cursor: pointer } .rows tr[tabindex]:hover, .rows tr.open { background: var(--line) }
pre, .tokens { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace;
  margin: .2rem 0 .8rem; padding: .5rem .6rem; background: var(--bg); border: 1px solid var(--line);
  border-radius: 4px; max-height: 28rem; overflow: auto } .tokens span { border-radius: 2px }
.tokens .environment { color: var(--dim); background: var(--line) }
form { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; margin: .4rem 0; font-size: 14px }
input, select, button { font: inherit; color: inherit; background: var(--bg); border: 1px solid var(--line);
  border-radius: 4px; padding: .15rem .4rem; margin: 0 .15rem } input[type=number] { width: 6rem }
select { max-width: 100% } button:disabled { opacity: .4 }
#tip { position: fixed; z-index: 9; max-width: 26rem; padding: .4rem .6rem; font-size: 12.5px; border-radius: 4px;
  background: var(--fg); color: var(--bg); pointer-events: none; white-space: pre-line }
.key { display: inline-block; width: 9rem; height: .8rem; border: 1px solid var(--line); vertical-align: middle }
.scroll { overflow-x: auto } nav { display: flex; flex-wrap: wrap; gap: .2rem 0 }
.beside { display: grid; grid-template-columns: minmax(min(380px, 100%), 1fr) minmax(0, 2fr); gap: 1rem }
.pairs thead { display: none } .pairs, .pairs tbody { display: block } .pairs tbody { columns: 24rem; column-gap: 2rem }
.pairs tr { display: grid; grid-template-columns: 16.5rem minmax(0, 1fr); break-inside: avoid }
.pairs td { overflow-wrap: anywhere } :focus-visible { outline: 2px solid var(--c0); outline-offset: 1px }
@media (max-width: 760px) { .beside { grid-template-columns: minmax(0, 1fr) }
  .rows, .rows tbody { display: block } .rows thead, .rows td:nth-child(n + 4):nth-child(-n + 7) { display: none }
  .rows tr { display: grid; grid-template-columns: 2.5rem 4rem 3rem minmax(0, 1fr) } td.detail { grid-column: 1 / -1 }
  .pairs tr { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr) } }
</style></head><body><noscript>This page draws itself with JavaScript.</noscript>
<script id="data" type="application/json">@DATA@</script><script>@SCRIPT@</script></body></html>
"""

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const format = (v, digits = 4) => v === null || v === undefined ? "-" : v === 0 ? "0" :
  Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(digits));

// Elements are made with text nodes only: nothing of the data is ever parsed as HTML.
function add(parent, tag, attributes = {}, ...children) {
  const svg = "svg g path rect line text circle".split(" ").includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map(c => c instanceof Node ? c : String(c)));
  if (parent) parent.append(made);
  return made;
}
const tip = add(document.body, "div", {id: "tip", hidden: ""});
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, document.body.clientWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = Math.max(left, 4) + "px";
  tip.style.top = (below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10) + "px";
}
function hover(element, text, focusable = false) {
  const hide = () => { tip.hidden = true; };
  element.addEventListener("mousemove", event => showTip(event, text(event)));
  element.addEventListener("mouseleave", hide);
  if (!focusable) return;
  element.setAttribute("tabindex", 0);
  element.addEventListener("focus", () => {
    const box = element.getBoundingClientRect();
    showTip({clientX: box.left, clientY: box.bottom - 12}, text());
  });
  element.addEventListener("blur", hide);
}
addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });
function explain(name) {
  const [definition, healthy] = data.definitions[name] || ["not in the table of metrics", ""];
  return name + "\n" + definition + (healthy ? "\nhealthy: " + healthy : "");
}
function section(id, title) {
  add(nav, "a", {href: "#" + id}, title);
  add(document.body, "h2", {id}, title);
  return add(document.body, "div");
}
function table(parent, head, rows, className = "") {
  const made = add(add(parent, "div", {class: "scroll"}), "table", {class: className});
  const top = add(add(made, "thead"), "tr");
  head.forEach(h => add(top, "th", {}, h));
  const body = add(made, "tbody");
  for (const cells of rows) {
    const line = add(body, "tr");
    cells.forEach(c => add(line, "td", {}, c));
  }
  return made;
}

// charts
const SMOOTHED = 150, BARS = 160;  // with more points a mean of a fortieth of them is drawn too; more steps share bars
const W = 420, H = 190, TALL = 250, L = 52, R = 16, T = 8, B = 24;
function tickStep(low, high, n = 4) {
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(m => m * power).find(s => s >= raw * .999);
}
function ticks(low, high, n) {
  const step = tickStep(low, high, n), out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step)
    out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}
function frame(parent, steps, low, high, log = false, labels = null, H = 190) {
  const svg = add(parent, "svg", {viewBox: `0 0 ${W} ${H}`});
  const first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
  const x = s => L + (s - first) / (last - first) * (W - L - R);
  const f = log ? Math.log10 : v => v;
  const y = v => H - B - (f(v) - f(low)) / (f(high) - f(low)) * (H - B - T);
  const powers = [];
  if (log) for (let p = Math.ceil(f(low)); p <= f(high); p++) powers.push(10 ** p);
  const marks = powers.length > 1 ? powers : log ? [low, high] : ticks(low, high);
  const apart = marks.length > 1 && !log ? marks[1] - marks[0] : high - low;
  const digits = Math.min(Math.max(3, Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / apart)) + 2), 12);
  for (const [v, label] of labels || marks.map(v => [v, format(v, digits)])) {
    add(svg, "line", {x1: L, x2: W - R, y1: y(v), y2: y(v), stroke: "var(--line)"});
    add(svg, "text", {x: L - 5, y: y(v) + 4, "text-anchor": "end"}, label);
  }
  for (const s of ticks(first, last, 5).filter(Number.isInteger))
    add(svg, "text", {x: x(s), y: H - 7, "text-anchor": "middle"}, s);
  return {svg, x, y, first, last};
}
function chart(parent, panel) {
  const card = add(parent, "div", {class: "card"});
  add(card, "h3", {}, panel.title, add(null, "span", {class: "dim"}, panel.unit ? "  " + panel.unit : ""));
  const all = panel.names.flatMap(n => data.metrics[n]).filter(v => v !== null);
  if (!all.length) { add(card, "p", {class: "dim"}, "no finite value"); return; }
  let low = Math.min(...all), high = Math.max(...all);
  const log = low > 0 && high / low > 200;
  if (!log && low >= 0 && low < high / 2) low = 0;
  if (high - low <= Math.abs(high) * 1e-9) { low -= Math.abs(low) * .1 || .5; high += Math.abs(high) * .1 || .5; }
  if (!log) {
    const step = tickStep(low, high);
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
  }
  const {svg, x, y, first, last} = frame(card, data.steps, low, high, log);
  const legend = add(card, "div", {class: "legend"});
  panel.names.forEach((name, k) => {
    const points = data.steps.map((s, i) => [s, data.metrics[name][i]]).filter(p => p[1] !== null);
    const colour = `var(--c${k})`;
    const line = (drawn, opacity) => add(svg, "path", {fill: "none", stroke: colour, "stroke-width": 1.6, opacity,
      d: drawn.map(([s, v], i) => (i ? "L" : "M") + x(s).toFixed(1) + " " + y(v).toFixed(1)).join("")});
    const many = points.length > SMOOTHED, reach = Math.ceil(points.length / 80);
    line(points, many ? .25 : 1);
    if (many) line(points.map(([s], i) => {
      const near = points.slice(Math.max(i - reach, 0), i + reach + 1);
      return [s, near.reduce((sum, p) => sum + p[1], 0) / near.length];
    }), 1);
    if (points.length < 40) points.forEach(([s, v]) => add(svg, "circle", {cx: x(s), cy: y(v), r: 2, fill: colour}));
    hover(add(legend, "span", {"data-metric": name}, add(null, "b", {style: `background:${colour}`}), name),
      () => explain(name), true);
  });
  const cursor = add(svg, "line", {y1: T, y2: H - B, stroke: "var(--dim)", visibility: "hidden"});
  function read(i, height) {  // the values of a step, and the definition of the curve nearest to that height
    cursor.setAttribute("x1", x(data.steps[i]));
    cursor.setAttribute("x2", x(data.steps[i]));
    cursor.setAttribute("visibility", "visible");
    const value = n => data.metrics[n][i], shown = panel.names.filter(n => value(n) !== null);
    const far = n => Math.abs(y(value(n)) - height);
    const nearest = shown.reduce((best, n) => best === "" || far(n) < far(best) ? n : best, "") || panel.names[0];
    return `step ${data.steps[i]}\n` + panel.names.map(n => `${n} ${format(value(n))}`).join("\n") +
      "\n\n" + explain(nearest);
  }
  const inside = event => {
    const box = svg.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width * W, (event.clientY - box.top) / box.height * H];
  };
  hover(svg, event => {
    const [across, height] = inside(event), at = first + (across - L) / (W - L - R) * (last - first);
    const closer = (best, s, j) => Math.abs(s - at) < Math.abs(data.steps[best] - at) ? j : best;
    return read(data.steps.reduce(closer, 0), height);
  });
  let chosen = data.steps.length - 1;
  const keyed = () => {
    const box = svg.getBoundingClientRect(), text = read(chosen, T);
    showTip({clientX: box.left + x(data.steps[chosen]) / W * box.width, clientY: box.bottom - 12}, text);
  };
  const leave = () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; };
  svg.setAttribute("tabindex", 0);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${panel.title}: ${panel.names.join(", ")}; arrow keys move over the steps`);
  svg.addEventListener("keydown", event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    chosen = Math.min(Math.max(chosen + by, 0), data.steps.length - 1);
    keyed();
    event.preventDefault();
  });
  svg.addEventListener("mouseleave", leave);
  svg.addEventListener("blur", leave);
}
function heat(parent, h) {
  const card = add(parent, "div", {class: "card"});
  add(card, "h3", {}, h.title, add(null, "span", {class: "dim"}, h.unit ? "  " + h.unit : ""));
  const rows = h.edges.length - 1, marks = h.bounds && h.edges.map((edge, j) => [j, format(edge, 5)]);
  const {svg, x, y} = frame(card, [h.steps[0], h.last + 1], 
    ...(marks ? [0, rows, false, marks] : [h.edges[0], h.edges[rows], false, null]), TALL);
  const at = j => y(marks ? j : h.edges[j]);
  h.counts.forEach((column, i) => {
    const total = Math.max(column.reduce((a, b) => a + b, 0), 1), left = x(h.steps[i]);
    const width = Math.max(x(i + 1 < h.steps.length ? h.steps[i + 1] : h.last + 1) - left - .5, .5);
    column.forEach((n, j) => {
      if (!n) return;
      const share = n / total, beyond = j === 0 ? " or less" : j === rows - 1 ? " or more" : "";
      const box = add(svg, "rect", {x: left, width, y: at(j + 1), height: at(j) - at(j + 1),
        style: `fill:rgba(var(--heat),${.12 + .88 * Math.sqrt(share)})`});
      const range = `${format(h.edges[j], 5)} to ${format(h.edges[j + 1], 5)}${beyond}`;
      const text = `${range}: ${n} (${(100 * share).toFixed(1)} %)`;
      hover(box, () => `from step ${h.steps[i]}\n${text}`);
    });
  });
  const bounds = Object.entries(h.bounds || {});
  for (const [, v] of bounds) {
    const height = at(h.edges.findIndex(e => Math.abs(e - v) < 1e-5 * v));
    add(svg, "line", {x1: L, x2: W - R, y1: height, y2: height, stroke: "var(--bad)", "stroke-dasharray": "5 3"});
  }
  const named = bounds.map(([name, v]) => `${name} = ${format(v)}`).join(", ");
  if (bounds.length) add(card, "div", {class: "legend"}, add(null, "span", {}, add(null, "b", {class: "dash"}), named));
}
function stack(parent) {
  const card = add(parent, "div", {class: "card"});
  add(card, "h3", {}, "Seconds per phase", add(null, "span", {class: "dim"}, "  of each step"));
  const index = data.steps.map((s, i) => i).filter(i => data.steps[i] > 0), each = Math.ceil(index.length / BARS);
  if (!index.length) return;
  const bars = [];  // [first step, last step, mean seconds of each phase]
  for (let i = 0; i < index.length; i += each) {
    const part = index.slice(i, i + each), mean = p => part.reduce((sum, j) => sum + (data.metrics[p][j] || 0), 0);
    bars.push([data.steps[part[0]], data.steps[part[part.length - 1]], data.phases.map(p => mean(p) / part.length)]);
  }
  const sum = values => values.reduce((a, b) => a + b, 0), most = Math.max(...bars.map(b => sum(b[2])), 1e-9);
  const {svg, x, y} = frame(card, [bars[0][0], bars[bars.length - 1][1] + 1], 0, most);
  bars.forEach(([first, last, seconds]) => {
    let bottom = 0;
    seconds.forEach((v, j) => {
      const box = add(svg, "rect", {x: x(first), width: Math.max((x(last + 1) - x(first)) * .88, .5), y: y(bottom + v),
        height: y(bottom) - y(bottom + v), fill: `var(--c${j})`});
      const when = first === last ? `step ${first}` : `mean of steps ${first} to ${last}`;
      hover(box, () => `${when}\n${data.phases[j]} ${format(v)} s of ${format(sum(seconds))} s`);
      bottom += v;
    });
  });
  const legend = add(card, "div", {class: "legend"});
  data.phases.forEach((p, j) => hover(add(legend, "span", {"data-metric": p},
    add(null, "b", {style: `background:var(--c${j})`}), p), () => explain(p), true));
}

// rollouts: what is chosen stands in the address, so that a view can be linked
const gapOf = s => s[2] === null ? -1 : Math.abs(s[2] - s[1]);
const gaps = data.rollouts.flatMap(r => r.spans.map(gapOf)).filter(g => g >= 0).sort((a, b) => a - b);
const gapScale = Math.max(gaps.length ? gaps[Math.floor(.99 * (gaps.length - 1))] : 0, 1e-3);
function tokens(parent, r, colour) {
  const known = r.spans.some(s => s[2] !== null), by = colour === "gap" && !known ? "engine" : colour;
  const line = add(parent, "p", {class: "dim", id: "scale"});
  const name = by === "gap" ? "--gap" : "--low";
  const end = by === "gap" ? `${format(gapScale)} nats: |learner - engine| logprob` : "-5 nats: engine's logprob";
  if (by === "none" || !r.spans.length) line.append(r.spans.length ? "no colours" : "no tokens to colour");
  else line.append("colour from 0 ", add(null, "span", {class: "key",
    style: `background:linear-gradient(90deg,transparent,rgba(var(${name}),.85))`}), ` to ${end}`,
    by !== colour ? "; this response was not trained on at a dumped step" : "");
  const box = add(parent, "div", {class: "tokens", "data-by": by});
  if (!r.spans.length) box.append(r.text);
  for (const s of r.spans) {
    const share = by === "none" || s[3] ? 0 : by === "gap" ? gapOf(s) / gapScale : -s[1] / 5;
    const style = `background:rgba(var(${name}),${(.85 * Math.min(share, 1)).toFixed(3)})`;
    const span = add(box, "span", s[3] ? {class: "environment"} : share > .004 ? {style} : {}, s[0]);
    if (s[3]) { hover(span, () => `${JSON.stringify(s[0])}\nthe environment's: no logprob, no loss`); continue; }
    const learner = s[2] === null ? "" : `\nlearner ${format(s[2])}\ngap ${format(gapOf(s))}`;
    hover(span, () => `${JSON.stringify(s[0])}\nengine ${format(s[1])}${learner}`);
  }
}
function describe(card, r, colour) {
  add(card, "h3", {}, `Step ${r.step}, prompt ${r.position}, sample ${r.sample}: score ${format(r.score)}, advantage ` +
    `${format(r.advantage)}, ${r.tokens} tokens, ended by ${r.finish}, weights of version ${r.versions.join(", ")}`);
  card.firstChild.setAttribute("style", "margin-bottom:.7rem");
  if (r.cut) add(card, "p", {class: "bad"}, "Too long for this page: only its beginning is shown.");
  add(card, "h3", {}, "Prompt");
  add(card, "pre", {}, r.prompt);
  add(card, "h3", {}, "Response");
  if (r.turns.length) add(card, "p", {class: "dim turns"}, "turns: " +
    r.turns.map(([role, end, n]) => `${role}, ${n} tokens, ${end}`).join("; ") + "; grey is the environment's");
  tokens(card, r, colour);
  if (!r.verifiers) return;
  add(card, "h3", {}, `Label (${r.verifiers.join(", ")}), verdict ${r.statuses.join(", ")}`);
  add(card, "pre", {}, r.label);
  add(card, "h3", {}, "Results");
  add(card, "pre", {}, r.results);
}
const PER_PAGE = 50;
function browse(parent) {
  const form = add(parent, "form"), list = add(parent, "div");
  const fields = {};
  function field(name, label, control) { add(form, "label", {}, label + " ", control); fields[name] = control; }
  field("step", "step", add(null, "select"));
  add(fields.step, "option", {value: ""}, "all");
  for (const s of new Set(data.rollouts.map(r => r.step))) add(fields.step, "option", {value: s}, s);
  field("min", "score from", add(null, "input", {type: "number", step: "any"}));
  field("max", "to", add(null, "input", {type: "number", step: "any"}));
  field("find", "text", add(null, "input", {type: "search"}));
  field("sort", "order", add(null, "select"));
  for (const o of ["run", "worst gap", "longest", "highest score"]) add(fields.sort, "option", {value: o}, o);
  field("colour", "colour by", add(null, "select"));
  for (const o of ["gap", "engine", "none"]) add(fields.colour, "option", {value: o}, o);
  const worst = r => r.spans.reduce((m, s) => Math.max(m, gapOf(s)), -1);
  const orders = {"worst gap": (a, b) => worst(b) - worst(a), longest: (a, b) => b.tokens - a.tokens,
    "highest score": (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)};
  let page = 0;
  function draw() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const [name, control] of Object.entries(fields)) {
      const value = wanted.get(name) ?? (control.options ? control.options[0].value : "");
      if (control.value !== value) control.value = value;  // writing it again would move the caret
    }
    const [min, max] = [fields.min, fields.max].map(f => parseFloat(f.value)), find = fields.find.value.toLowerCase();
    const chosen = data.rollouts.filter(r => (fields.step.value === "" || String(r.step) === fields.step.value) &&
      !(r.score === null ? min === min || max === max : r.score < min || r.score > max) &&
      (!find || (r.text + "\n" + r.prompt).toLowerCase().includes(find)));
    if (orders[fields.sort.value]) chosen.sort(orders[fields.sort.value]);
    page = Math.min(page, Math.max(Math.ceil(chosen.length / PER_PAGE) - 1, 0));
    list.replaceChildren();
    const line = add(list, "p", {class: "dim", id: "count"}, `${chosen.length} rollouts `);
    const from = page * PER_PAGE;
    if (chosen.length > PER_PAGE) {
      for (const [label, by] of [["previous", -1], ["next", 1]]) {
        const button = add(line, "button", {type: "button"}, label);
        button.disabled = by < 0 ? page === 0 : from + PER_PAGE >= chosen.length;
        button.addEventListener("click", () => { page = Math.max(page + by, 0); draw(); });
      }
      line.append(` ${from + 1} to ${Math.min(from + PER_PAGE, chosen.length)}`);
    }
    const head = ["step", "prompt:sample", "score", "advantage", "tokens", "end", "worst gap", "response"];
    const made = table(list, head, [], "rows");
    [5, 10, 6, 8, 6, 7, 9].forEach((w, i) => made.rows[0].cells[i].setAttribute("style", `width:${w}%`));
    const named = wanted.get("open") ?? "", shown = chosen.slice(page * PER_PAGE, (page + 1) * PER_PAGE);
    const key = r => `${r.step}:${r.position}:${r.sample}`;
    const open = shown.some(r => key(r) === named) ? named : shown.length ? key(shown[0]) : "";
    let opened = null;
    for (const r of shown) {
      const id = key(r), gap = worst(r);
      const row = add(made.tBodies[0], "tr", {tabindex: 0, class: id === open ? "open" : ""});
      for (const c of [r.step, `${r.position}:${r.sample}`, format(r.score), format(r.advantage), r.tokens, r.finish,
        gap < 0 ? "-" : format(gap), r.text.slice(0, 200)]) add(row, "td", {}, c);
      const choose = () => { wanted.set("open", id); location.hash = wanted; };
      if (id === open) opened = row;
      row.addEventListener("click", choose);
      row.addEventListener("keydown", event => { if (event.key === "Enter") choose(); });
      if (id === open) {
        const cell = add(add(made.tBodies[0], "tr"), "td", {colspan: 8, class: "detail"});
        describe(add(cell, "div", {class: "card", id: "rollout"}), r, fields.colour.value);
      }
    }
    return opened;
  }
  form.addEventListener("input", () => {
    const values = Object.entries(fields).map(([n, c]) => [n, c.value]);
    const wanted = new URLSearchParams(values.filter(([, v]) => v !== ""));
    page = 0;
    history.replaceState(null, "", "#" + wanted);
    draw();
  });
  form.addEventListener("submit", event => event.preventDefault());
  addEventListener("hashchange", () => {
    if (!location.hash.includes("=")) return;
    const row = draw();  // rows above it may have closed, and the one that had the focus is gone
    if (row) { row.scrollIntoView({block: "nearest"}); row.focus({preventScroll: true}); }
  });
  draw();
}

document.title = data.name + ": report";
add(document.body, "h1", {}, data.name);
const where = data.environment;
const facts = [data.args.model_name_or_path, `${data.steps[data.steps.length - 1]} steps`];
if (data.metrics.episode) facts.push(`${Math.max(...data.metrics.episode)} episodes`);
const keys = ["device", "world_size", "git_commit"];
for (const k of keys) facts.push(`${k} ${String(where[k] ?? "unknown").slice(0, 12)}`);
if (where.git_dirty) facts.push("with uncommitted changes");
add(document.body, "p", {class: "dim"}, facts.join(", "));
const nav = add(document.body, "nav");
data.notes.forEach(n => add(document.body, "p", {class: "dim note"}, n));

const wrong = data.checks.filter(c => !c.fine).length;
const checks = section("checks", "Checks");
const verdict = `${wrong} of ${data.checks.length} ask for a look. `;
add(checks, "p", {}, add(null, "b", {class: wrong ? "bad" : "ok"}, verdict),
  add(null, "span", {class: "dim"}, "First and last are means over the first and the last fifth of the steps."));
table(checks, ["", "check", "measured", "warns when"], data.checks.map(c =>
  [add(null, "span", {class: c.fine ? "ok" : "bad"}, c.fine ? "fine" : "look"), c.name, c.numbers, c.threshold]));
const curves = add(section("curves", "Curves"), "div", {class: "grid"});
data.panels.forEach(p => chart(curves, p));
const other = add(curves, "div"), pick = add(other, "select", {"aria-label": "metric"}), place = add(other, "div");
Object.keys(data.metrics).forEach(n => add(pick, "option", {value: n}, n));
function drawOther() {
  place.replaceChildren();
  chart(place, {title: "Any metric", unit: "", names: [pick.value]});
  add(place, "p", {class: "dim", style: "white-space:pre-line;font-size:13px"}, explain(pick.value));
}
pick.addEventListener("change", drawOther);
drawOther();
const histograms = add(section("histograms", "Histograms over time"), "div", {class: "grid"});
data.histograms.forEach(h => heat(histograms, h));
const spread = [["Response length", "tokens", "val/sequence_lengths"], ["Advantage", "", "val/advantages"]];
for (const [title, unit, name] of spread) {
  const names = [name + "_min", name, name + "_max"].filter(n => data.metrics[n]);
  if (names.length) chart(histograms, {title: title + ": least, mean, most", unit, names});
}
const time = add(section("time", "Time and throughput"), "div", {class: "beside"});
stack(time);
table(time, ["mean after step 1", "value", "floor or ceiling", "against it"], data.floors);
const rollouts = section("rollouts", "Rollouts");
if (data.rollouts.length) browse(rollouts); else add(rollouts, "p", {class: "dim"}, "none recorded");
const text = v => typeof v === "string" ? v : JSON.stringify(v);
const flags = Object.entries(data.args).map(([k, v]) => [k, text(v)]);
table(section("configuration", "Configuration"), ["flag", "value"], flags, "pairs");
table(section("environment", "Environment"), ["", ""], Object.entries(where).map(([k, v]) =>
  [k, k === "command" ? v.join(" ") : text(v)]));
document.body.setAttribute("data-ready", "");
"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir/exp_name of a run, also one under way")
    parser.add_argument("--out", type=Path, metavar="PAGE.html", help="instead of RUN/report.html")
    parser.add_argument("--max_rollouts", type=int, default=MAX_ROLLOUTS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    try:
        path = write_page(options.run, options.out, options.max_rollouts)
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
