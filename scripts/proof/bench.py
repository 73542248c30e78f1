"""Benchmarks. Each measures its sides in one run and prints ratios of their median seconds, interleaved A B A B but
for trl, whose sides run once, one after the other.

    python scripts/proof/bench.py learner    forward and backward: packs, bare loop, padding, one by one, a dense mask
    python scripts/proof/bench.py compiled   forward and backward by plain layers, and with --compile_layers
    python scripts/proof/bench.py host       the host's milliseconds for a micro-batch, and plain transformers'
    python scripts/proof/bench.py rollout    our engine loop and LLM.generate on the same engine
    python scripts/proof/bench.py sync       learner's weights into the engine: us, a memory copy, vLLM's own reload
    python scripts/proof/bench.py pipeline   grpo.py and grpo_fast.py on sums, and the ideal of their phases
    python scripts/proof/bench.py packing    pack_rollouts on 100k sequences, and next-fit in arrival order
    python scripts/proof/bench.py rewards    scores per second; a solver model asked all at once and one by one
    python scripts/proof/bench.py precision  steps to learn sums of two digits, by the rounding of the weights; an hour
    python scripts/proof/bench.py startup    seconds to --help, --dry_run and first steps, and of the imports they need
    python scripts/proof/bench.py loop       an engine's Python per token outside vLLM's scheduler and model, no weights
    python scripts/proof/bench.py tokens     the path of a token at learner 0: CPU time and longest pause, stub devices
    python scripts/proof/bench.py tools      an engine's tokens per second with fast tools, and with a slow one
    python scripts/proof/bench.py trl        whole steps of TRL's GRPOTrainer (scripts/peers) and of grpo_fast.py

    --model DIR    scripts/data/make_tiny_model.py makes one in a second    --json    one line of JSON, no tables
    --repeat N     rounds of A B A B                                        --help    everything else

A ratio above 1 is good for us. It comes with the smallest and largest value of a round and, where there is one, the
target it should reach. On a CPU, `source scripts/setup.sh` first. Lengths of random prompts and responses are those of
GSM8K (scripts/proof/benchmarks/common.py).
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.proof.benchmarks import common  # isort: skip  # noqa: E402 (reads and pins thread counts, before torch)

import torch  # noqa: E402

import grpo  # noqa: E402
import utils  # noqa: E402
from scripts.parts.machine import choose_dtype  # noqa: E402
from scripts.proof.benchmarks import (  # noqa: E402
    engine,
    host,
    learner,
    packing,
    precision,
    processes,
    scores,
    whole_runs,
)

BENCHES = {
    "compiled": learner.bench_compiled,
    "host": host.bench_host,
    "learner": learner.bench_learner,
    "loop": processes.bench_loop,
    "rollout": engine.bench_rollout,
    "sync": engine.bench_sync,
    "pipeline": whole_runs.bench_pipeline,
    "packing": packing.bench_packing,
    "precision": precision.bench_precision,
    "rewards": scores.bench_rewards,
    "startup": whole_runs.bench_startup,
    "tokens": processes.bench_tokens,
    "tools": processes.bench_tools,
    "trl": whole_runs.bench_trl,
}


def parse_options() -> common.BenchFlags:
    """The flags, with the model's path and the dtype resolved. Raises utils.UserError."""
    options, others = tyro.cli(common.BenchFlags, description=__doc__, return_unknown_args=True, use_underscores=True)
    if others and options.bench in ("packing", "rewards", "tokens", "loop"):
        raise utils.UserError(f"unknown: {' '.join(others)}; {options.bench} gives no flags to grpo.py")
    if options.bench == "host":  # makes its own
        return dataclasses.replace(options, dtype="bfloat16", grpo_flags=tuple(others))
    model = Path(options.model).resolve()
    if not (model / "config.json").exists():
        makers = "python scripts/data/get_smollm2.py (make_tiny_model.py)"
        raise utils.UserError(f"no model in {options.model}: {makers} makes it")
    dtype, why = choose_dtype(grpo.Args(model_dtype=options.dtype))
    print(f"dtype {dtype}: {why}", file=sys.stderr)
    return dataclasses.replace(options, model=str(model), dtype=dtype, grpo_flags=tuple(others))


def machine(dtype: torch.dtype) -> dict[str, Any]:
    """What the numbers were measured on. Trust no ratio where the load is well above 0: other jobs are running."""
    device = "cpu"
    name = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        name = torch.cuda.get_device_name()
    facts: dict[str, Any] = {"device": name}
    facts |= {"cores": len(utils.ALL_CORES), "load": os.getloadavg()[0], "torch": torch.__version__}
    product, operations = common.matrix_product(dtype, device)
    fastest = min(common.stopwatch(product)[0] for _ in range(6))
    facts |= {"threads": torch.get_num_threads(), "peak_gflops": operations / fastest / 1e9}
    return facts | common.THREAD_SETTINGS


def show_number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def show(facts: dict[str, Any], result: common.Result) -> None:
    """The machine, a table with a column for each side, a table of ratios."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for line_facts in (facts, result.settings):
        line = ", ".join(f"{name} {value}" for name, value in line_facts.items())
        console.print(line, highlight=False, soft_wrap=True)
    measured = Table("", *result.sides)
    columns = list(result.sides.values())
    for figure in dict.fromkeys(name for column in columns for name in column):
        measured.add_row(figure, *(show_number(column.get(figure)) for column in columns))
    ratios = Table("ratio", "value", "min", "max", "target", "")
    for name, found in result.ratios.items():
        values = [f"{found[key]:.3f}" for key in ("value", "min", "max")]
        target = "" if found["target"] is None else f"{found['target']:.2f}"
        met = {None: "", True: "met", False: "MISSED"}[found["met"]]
        ratios.add_row(name, *values, target, met)
    console.print(measured, ratios)


def main() -> None:
    options = parse_options()
    unset = [name for name, value in common.THREAD_SETTINGS.items() if not value]
    if unset and not torch.cuda.is_available():
        hint = "a CPU is slower without: `source scripts/setup.sh` first"
        print(f"bench.py: WARNING: {', '.join(unset)} not set, {hint}", file=sys.stderr)
    facts = machine(utils.DTYPES[options.dtype])
    result = BENCHES[options.bench](options)
    if options.json:
        run = {"bench": options.bench, "model": options.model, "dtype": options.dtype, "repeat": options.repeat}
        print(json.dumps(run | {"machine": facts} | result._asdict()))
    else:
        show(facts, result)


if __name__ == "__main__":
    try:
        main()
    except utils.UserError as error:
        raise SystemExit(f"bench.py: {error}") from None
    utils.exit_process()
