"""Benchmark of the verifiers and of a solver model: bench.py rewards."""

import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

import rewards
from scripts.parts import chat, serve, solver
from scripts.proof.benchmarks.common import BenchFlags, Measured, Result, ratio, side_by_side, spread, stopwatch

TARGETS = {"gsm8k": 10_000, "math": 1_000, "code_stdio": 300}  # scores a second
TOGETHER = "solver, all at once"
IN_TURN = "solver, one by one"

# label, and a right answer of another form
MATH_FORMS = (
    (r"\frac{%d}{%d}", r"%d/%d"),
    (r"%d\sqrt{2}+%d", r"\sqrt{2}\cdot %d+%d"),
    (r"x^2+%dx+%d", r"x(x+%d)+%d"),
    (r"(%d,%d)", r"\left(%d, %d\right)"),
    (r"[%d,%d)", r"\left[ %d, %d \right)"),
    (r"%d+%d\pi", r"%d+\pi\cdot %d"),
)
INTEGER_FORM = ("%d%d", "%d%d.0")


def gsm8k_records(rng: np.random.Generator, count: int) -> list[rewards.RewardRecord]:
    """Solutions of some 300 characters, two of three right."""
    records = []
    for i in range(count):
        a, b = rng.integers(0, 100, 2).tolist()
        error = 1 if i % 3 == 0 else 0
        text = f"Anna has {a} apples and buys {b} more of them at the market.\n" * 4
        text += f"So she has {a} + {b} = {a + b} apples.\n#### {a + b + error}"
        records.append(rewards.RewardRecord(text, str(a + b), "gsm8k"))
    return records


def math_records(rng: np.random.Generator, count: int, samples: int) -> list[rewards.RewardRecord]:
    """`samples` solutions of some 800 characters for each label, as in training. 3 of 5 labels are integers and the
    others of MATH_FORMS. Of 8 answers 3 are spelled as the label, 2 are right in another form, 3 are wrong."""
    records = []
    for i in range(count):
        group, j = divmod(i, samples)
        if j == 0:
            a, b = sorted(rng.integers(2, 500, 2).tolist())
        form, other = INTEGER_FORM if group % 5 <= 2 else MATH_FORMS[group % len(MATH_FORMS)]
        label = form % (a, b)
        if j % 8 < 3:
            answer = label
        elif j % 8 < 5:
            answer = other % (a, b)
        else:
            answer = form % (a, b + j)
        text = "We put both conditions together and solve for what is asked. " * 12 + f"So it is $\\boxed{{{answer}}}$."
        records.append(rewards.RewardRecord(text, label, "math"))
    return records


def code_records(rng: np.random.Generator, count: int) -> list[rewards.RewardRecord]:
    """Programs that add two numbers, one test each."""
    program = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    records = []
    for a, b in rng.integers(0, 100, (count, 2)).tolist():
        test = {"input": f"{a} {b}\n", "output": f"{a + b}\n"}
        records.append(rewards.RewardRecord(program, [test], "code_stdio"))
    return records


def solver_records(rng: np.random.Generator, count: int) -> list[rewards.RewardRecord]:
    """The same guideline to different questions."""
    records = []
    for a, b in enumerate(rng.integers(10, 100, count).tolist(), start=10):
        question = {"question": f"What is {a}+{b}?", "answer": a + b}
        records.append(rewards.RewardRecord("Add the tens, then the ones.", question, "solver"))
    return records


Batches = Sequence[Sequence[rewards.RewardRecord]]


def score_batches(name: str, batches: Batches) -> list[rewards.RewardResult]:
    """Score one batch after the other, and report on stderr."""
    seconds, results = stopwatch(lambda: [result for batch in batches for result in rewards.score(batch)])
    rate = len(results) / seconds
    decimals = 0 if rate > 10 else 1
    report = f"{name}: {len(results):,} scores in {seconds:.1f} s, {rate:,.{decimals}f} a second"
    print(report, file=sys.stderr, flush=True)
    return results


def solve(name: str, batches: Batches, flags: rewards.RewardFlags) -> list[rewards.RewardResult]:
    """Score with a new client of the solver, which has nothing cached of the round before."""
    rewards.configure(flags, connect=True)
    for batch in batches:
        skip_baselines(batch)
    return score_batches(name, batches)


def skip_baselines(records: Sequence[rewards.RewardRecord]) -> None:
    """Note empty solutions without a guideline for all questions, so that the solver is asked with guidelines only."""
    client: Any = rewards.SOLVER
    for record in records:
        question, _ = solver.solver_label(record.ground_truth, record.prompt)
        empty: Future[chat.Replies] = Future()
        empty.set_result(chat.Replies([], 0, 1.0))
        client.replies[question, None] = empty


def score_next(name: str, batches: Iterator[list[rewards.RewardRecord]]) -> list[rewards.RewardResult]:
    return score_batches(name, [next(batches)])


def measure_verifiers(options: BenchFlags, rng: np.random.Generator) -> Measured:
    """Seconds and results of each verifier. Each round has records of its own: workers keep
    what they parsed before, and training sees nothing twice."""
    makers = {
        "gsm8k": lambda: gsm8k_records(rng, options.records),
        "math": lambda: math_records(rng, options.records // 5, options.samples),
        "code_stdio": lambda: code_records(rng, options.records // 20),
    }
    sides = {}
    for name, make in makers.items():
        rounds = [make() for _ in range(options.repeat)]
        sides[name] = functools.partial(score_next, name, iter(rounds))
    for name, make in makers.items():
        score_batches(f"warm-up, {name}", [make()[:40]])  # workers and sandboxes start
    return side_by_side(sides, options.repeat, warm_up=False)


def measure_solver(options: BenchFlags, rng: np.random.Generator) -> Measured:
    """Seconds and results of the solver, asked all at once and one by one."""
    guidelines = solver_records(rng, options.calls)
    first = guidelines[: options.calls_in_turn]
    one_by_one = [[record] for record in first]
    print("starting the solver", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        servers = serve.start_servers(options.model, Path(directory), max_model_len=1024, model_dtype=options.dtype)
        os.environ["SOLVER_API_KEY"] = servers.api_key
        flags = rewards.RewardFlags(
            solver_model_name_or_path=options.model,
            solver_base_url=servers.base_urls[0],
            solver_response_length=options.solver_tokens,
        )
        solve("warm-up, solver", [first], flags)
        sides = {
            TOGETHER: lambda: solve(TOGETHER, [guidelines], flags),
            IN_TURN: lambda: solve(IN_TURN, one_by_one, flags),
        }
        measured = side_by_side(sides, options.repeat, warm_up=False)
        servers.stop()
    return measured


def bench_rewards(options: BenchFlags) -> Result:
    """Scores per second of the verifiers through rewards.score, and a solver's calls all at once or one by one.

    The solver is --model in a vLLM server, greedy, with at most --solver_tokens for each of --calls guidelines to
    different questions. Only the first --calls_in_turn of these are asked one by one, and the ratio is of seconds a
    token. Neither side has anything cached, and no record is scored twice. The servers and the workers run before the
    clock does. Each side is reported on stderr when it is done.
    """
    rng = np.random.default_rng(options.seed)
    seconds, results = measure_verifiers(options, rng)
    solver_seconds, solver_results = measure_solver(options, rng)
    seconds |= solver_seconds
    results |= solver_results
    table = {}
    for name, scored in results.items():
        scores = [result.score for result in scored if result.status not in rewards.MISSING]
        table[name] = spread(seconds[name], scores=len(scored))
        table[name] |= {"missing": len(scored) - len(scores), "mean score": statistics.mean(scores)}
    ratios = {}
    for name, target in TARGETS.items():
        seconds_a_score = [passed / len(results[name]) for passed in seconds[name]]
        goal = [1 / target] * options.repeat
        ratios[f"{name}: scores/s over {target}"] = ratio(seconds_a_score, goal, 1.0)
    seconds_a_token = {}
    for name, scored in solver_results.items():
        tokens = sum(result.details.get("tokens", 0) for result in scored)
        table[name] |= {"tokens": tokens, "tokens_per_second": tokens / table[name]["seconds"]}
        seconds_a_token[name] = [passed / tokens for passed in seconds[name]]
    name = f"solver, {options.calls} calls: all at once over one by one"
    ratios[name] = ratio(seconds_a_token[TOGETHER], seconds_a_token[IN_TURN], 8.0)
    return Result({"workers": rewards.NUM_WORKERS}, table, ratios)
