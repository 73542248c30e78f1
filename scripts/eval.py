"""Evaluate models without training: accuracy and pass@k with standard errors, and paired differences.

    python scripts/eval.py runs/demo --eval_pass_at_k 8 --overwrite
    python scripts/eval.py models/SmolLM2-135M-Instruct runs/demo runs/demo/step_10 --eval_pass_at_k 8
    python scripts/eval.py Qwen/Qwen2.5-0.5B-Instruct --dataset_mixer_eval_list openai/gsm8k:main 1.0
    python scripts/eval.py output/eval/A.jsonl output/eval/B.jsonl

Prompts, engine, sampling and verifiers are those of a training run's evaluation, and so are the flags. A RUN stands
for its RUN/model. Data, engine, turn and reward flags that the command line lacks are those of the first RUN, for all
models. Each model has a process of its own, on one device. All rollouts go to OUTPUT_DIR/EXP_NAME/MODEL.jsonl
(output/eval), in the format of rollouts.jsonl. Such a file may stand in place of a model: it is not sampled again.

The responses to a prompt are alike, so that standard errors are over prompts, and models are compared prompt by prompt.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import grpo
import rewards
import utils
from scripts.parts import checks, dumps, guards, plan, turns
from scripts.reports import intervals
from scripts.reports.common import cell, read_json, read_lines, table

OF_A_RUN = (rewards.RewardFlags, utils.TurnFlags, utils.EngineFlags, utils.DataFlags)  # what evaluations depend on
MORE_OF_A_RUN = ("seed", "model_dtype", "eval_pass_at_k", "deterministic")
Row = dict[str, Any]
Evaluation = dict[int, list[Row]]  # the rollouts of a model that have a verdict, by prompt


# --- Flags ------------------------------------------------------------------------------------------------------------


def run_of(model: str) -> Path | None:
    """The run that wrote a model: the directory itself or the one above; None for a model that no run wrote."""
    here = Path(model)
    return next((path for path in (here, here.parent) if (path / "args.json").is_file()), None)


def weights_of(model: str) -> str:
    """The directory or hub name to load. Raises UserError for a run without a model, and for adapters."""
    path = Path(model)
    if (path / "args.json").is_file():
        path = path / "model"
        utils.need(path.is_dir(), f"{model}: the run has no model/ yet; a step_N/ of it can be evaluated")
    if not (path / "adapter_config.json").is_file():
        return str(path) if path.is_dir() else model
    merged = path.with_name(f"{path.name}_merged")
    utils.need(merged.is_dir(), f"{path} holds adapters, not a model: train with --lora_merge, which saves {merged}")
    return str(merged)


def flags_of(tokens: Sequence[str], models: Sequence[str]) -> grpo.Args:
    """The flags of the command line, and of the first run among the models. Raises UserError."""
    utils.parse_args(grpo.Args, tokens)  # refuses what it does not know
    then = next((read_json(run / "args.json") for run in map(run_of, models) if run is not None), {})
    taken = {flag.name for flags in OF_A_RUN for flag in fields(flags)} | set(MORE_OF_A_RUN)
    defaults = grpo.Args(exp_name="eval", **{name: then[name] for name in taken & then.keys()})
    line = checks.translate(tokens, checks.names_of(grpo.Args)).line
    args = tyro.cli(grpo.Args, args=line, default=defaults, use_underscores=True)
    need_list = "--dataset_mixer_eval_list is empty: give NAME AMOUNT pairs, or a run that has them"
    utils.need(args.dataset_mixer_eval_list != [], need_list)
    longest = max(args.response_length, args.eval_response_length or 0)
    return replace(
        args,
        dataset_mixer_list=args.dataset_mixer_eval_list,  # nothing is trained on
        dataset_mixer_list_splits=args.dataset_mixer_eval_list_splits,
        pack_length=args.max_prompt_token_length + longest,
    )


def flags_for(model: str, args: grpo.Args) -> grpo.Args:
    """The flags with which one model is evaluated. Raises UserError for what cannot work."""
    own = replace(args, model_name_or_path=weights_of(model))
    if run_of(model) is not None:
        # its chat template has them
        own = replace(own, model_revision=None, add_bos=False, chat_template_kwargs="")
    own.check()
    return own


def file_of(model: str, args: grpo.Args) -> Path:
    """Where the rollouts of a model go; those of a file are there."""
    if model.endswith(".jsonl"):
        return Path(model)
    return args.run_dir / f"{model.strip('./').replace('/', '_')}.jsonl"


# --- Rollouts ---------------------------------------------------------------------------------------------------------


def evaluate(args: grpo.Args, path: Path) -> None:
    """Sample and score the evaluation prompts, and write all rollouts to `path`. In a process of its own: an engine
    keeps its device until that ends. Raises UserError."""
    world = utils.init_distributed()
    utils.make_deterministic(args)
    tokenizer = utils.load_tokenizer(args)
    environment = turns.load_environment(args, tokenizer) if args.has_turns else None
    prompts = utils.load_prompts("dataset_mixer_eval_list", args, tokenizer, environment)
    servers = grpo.start_reward_models(args, args.run_dir, world)
    engine = utils.make_engine(args, tokenizer, world, len(prompts) * args.eval_pass_at_k)

    own = grpo.evaluation_args(args)
    groups = [grpo.new_group(prompt, prompt.index, args.eval_pass_at_k, evaluation=True) for prompt in prompts]
    grpo.sample_rollouts(engine, groups, own)
    rollouts = grpo.all_rollouts(groups)
    grpo.score_rollouts(rollouts, own)
    metrics = utils.Metrics()
    utils.note_rollouts(rollouts, own, metrics)
    for who, calls in guards.silent_ones(metrics.reduce(world)).items():  # that is no accuracy of 0
        utils.need(calls < guards.LEAST_CALLS, f"{who} gave no score: {guards.words_of(who)}")

    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(dumps.rollout_row(r, 0), default=str) + "\n" for r in rollouts))
    os.replace(temporary, path)
    rewards.close()
    if servers is not None:
        servers.stop()
    engine.close()


# --- The table --------------------------------------------------------------------------------------------------------


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation in a file. Raises UserError without a verdict."""
    utils.need(path.is_file(), f"{path}: no such file")
    prompts: Evaluation = {}
    for row in read_lines(path):
        if row["verifiable"] is not None:
            prompts.setdefault(row["position"], []).append(row)
    utils.need(prompts != {}, f"{path}: no rollout has a verdict")
    return prompts


def score(rows: Sequence[Row]) -> float:
    return sum(row["score"] for row in rows) / len(rows)


def pass_at(k: int, rows: Sequence[Row]) -> float:
    """pass@k of a prompt's rows; in a right one all verifiers gave the full score."""
    right = sum(row["verifiable"] >= len(row["verifiers"]) - 1e-8 for row in rows)
    return grpo.pass_at_k(len(rows), right, k)


def measures(evaluations: Iterable[Evaluation]) -> dict[str, Callable[[list[Row]], float]]:
    """What is compared, each from a prompt's rows: accuracy, pass@k for k = 2, 4 and so on, and the score."""
    fewest = min(len(rows) for evaluation in evaluations for rows in evaluation.values())
    found: dict[str, Callable[[list[Row]], float]] = {"accuracy": partial(pass_at, 1)}
    k = 2
    while k <= fewest:
        found[f"pass@{k}"] = partial(pass_at, k)
        k *= 2
    return found | {"score": score}


def with_interval(values: Sequence[float], is_share: bool = False) -> str:
    """A mean over prompts as mean ± standard error [interval of 95 %], which of a share stays between 0 and 1."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    found = intervals.mean_of(values)
    interval = intervals.share_of(found.mean, found.n) if is_share else found
    return f"{found.mean:.3f} ± {found.error:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def report(evaluations: dict[str, Evaluation]) -> str:
    """The tables of some models, of which the first one is what the others are compared with."""
    found = measures(evaluations.values())
    rows = []
    for name, evaluation in evaluations.items():
        own = [row for group in evaluation.values() for row in group]
        cells = [with_interval([*map(value, evaluation.values())], what != "score") for what, value in found.items()]
        tokens = sum(len(row["token_ids"]) for row in own) / len(own)
        ended = sum(row["finish_reason"] == "stop" for row in own) / len(own)
        rows.append([name, str(len(evaluation)), str(len(own)), *cells, cell(tokens, 1), cell(ended, 2)])
    head = ["model", "prompts", "responses", *found, "tokens", "ended"]
    lines = ["mean ± standard error over prompts [95 % interval]", "", table(head, rows)]
    if len(evaluations) > 1:
        lines += ["", differences(evaluations, found)]
    return "\n".join(lines)


def differences(evaluations: dict[str, Evaluation], found: dict[str, Callable[[list[Row]], float]]) -> str:
    """A table of differences from the first model, prompt by prompt. Raises UserError unless two models were asked the
    same: at the same position stands the same label."""
    (first, base), *others = evaluations.items()
    rows = []
    for name, other in others:
        both = sorted(base.keys() & other.keys())
        same = [base[i][0]["ground_truths"] == other[i][0]["ground_truths"] for i in both]
        what = f"{first} and {name} were not asked the same prompts: they cannot be compared"
        utils.need(bool(same) and all(same), what)
        for measure, value in found.items():
            changes = [value(other[position]) - value(base[position]) for position in both]
            different = sum(change != 0 for change in changes)
            few = " (few)" if different < intervals.FEWEST_DIFFERENT else ""
            p = intervals.sign_test(changes)
            rows.append([name, measure, with_interval(changes), f"{different} of {len(both)}{few}", f"{p:.3f}"])
    head = ["model", "measure", f"difference from {first}", "prompts that differ", "p"]
    words = "paired by prompt; p: of the difference when every sign is random; few: the interval is too narrow"
    return f"{words}\n\n{table(head, rows, text=(0, 1))}"


# ----------------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> None:
    models = list(takewhile(lambda word: not word.startswith("-"), argv))
    tokens = list(argv[len(models) :])
    if tokens in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    sampled = [model for model in models if not model.endswith(".jsonl")]
    utils.need(models != [] or "--help" in tokens, "give models or runs first, then flags: see --help")
    utils.need(len(set(models)) == len(models), f"{models}: one is named twice")
    args = grpo.Args()
    if sampled or "--help" in tokens:
        args = flags_of(tokens, sampled)
        dtype, reason = plan.choose_dtype(args)
        print(f"dtype    {dtype}: {reason}")
        args = replace(args, model_dtype=dtype)
    files = [file_of(model, args) for model in models]
    for model in sampled:
        path = file_of(model, args)
        flags_for(model, args)
        fix = "give it in place of the model, or add --overwrite or another --exp_name"
        utils.need(args.overwrite or not path.exists(), f"{path} exists: {fix}")

    args.run_dir.mkdir(parents=True, exist_ok=True)
    for model in sampled:
        alone = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        with alone:
            alone.submit(evaluate, flags_for(model, args), file_of(model, args)).result()
        print(f"rollouts {file_of(model, args)}", flush=True)
    names = [Path(model).stem if model.endswith(".jsonl") else model for model in models]
    print(report({name: read_evaluation(path) for name, path in zip(names, files, strict=True)}))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except utils.UserError as error:
        raise SystemExit(f"eval.py: {error}") from None
