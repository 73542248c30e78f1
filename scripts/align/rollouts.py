"""What the rollouts of any system say about its advantages, groups, masks and logprobs: the two numbers to compare.

    python scripts/align/rollouts.py PATH [PATH ...]

PATH is a file or a directory of files, in one of the published formats:

    verl            trainer.rollout_data_dir: STEP.jsonl with input, output, gts, score, step (ray_trainer.py)
    verl            a pickled DataProto, NAME_STEP.pkl, read without veRL: see dataproto.py
    TRL             log_completions=True: completions/completions_STEP.parquet with step, prompt, completion, a column
                    for each reward function, advantage (grpo_trainer.py)
    open-instruct   --save_traces: NAME_rollouts_N.jsonl with step, prompt_idx, reward, advantage, ... (rl_utils.py)
    here            --save_traces, --dump_steps: rollouts.jsonl

Read from verl b178a3cd5, TRL f2cd57710, open-instruct e6c3044aa. A format without a number, such as verl's text files
without advantages, leaves out the checks that need it. Exit status: 0 if all are fine, 1 if one is not, 2 if nothing
can be read. tests/README.md says which bug each check would have shown.
"""

import itertools
import json
import math
import operator
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.align import dataproto

NOT_REWARDS = ("step", "prompt", "completion", "advantage", "image")  # columns of TRL
MOST_ERROR = 0.01  # of the largest advantage: TRL's epsilon under a standard deviation is 1e-4
MOST_GAP = 0.05  # nats, mean over tokens, in bfloat16
Numbers = Sequence[float] | None


@dataclass
class Sample:
    """One response of a dump. What its format does not have is None."""

    step: int
    group: Any  # of the step: responses with the same value are compared with each other
    prompt: str
    response: str
    score: float
    advantage: float | None = None
    mask: Sequence[bool] | None = None  # tokens that are trained on
    engine: Numbers = None  # logprobs of the engine
    learner: Numbers = None  # of the learner, before its update
    truncated: bool | None = None


class Check(NamedTuple):
    """A line of the table."""

    name: str
    fine: bool
    numbers: str
    healthy: str


# --- Reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Sample]:
    """The samples of a file, or of the files in a directory. Raises ValueError where there are none."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    samples: list[Sample] = []
    for file in files:
        samples += read_file(file)
    if not samples:
        raise ValueError(f"{path}: no rollouts in a format that is known here")
    return samples


def read_file(path: Path) -> Iterator[Sample]:
    """The samples of a file; none if it is something else."""
    if path.suffix == ".parquet":
        yield from of_trl(path)
    elif path.suffix == ".pkl":
        yield from of_dataproto(path)
    elif path.suffix == ".jsonl":
        for line in path.open():
            row = json.loads(line)
            if {"input", "output", "score"} <= row.keys():
                yield of_verl(row)
            elif {"prompt_tokens", "response_tokens", "reward"} <= row.keys():
                yield of_open_instruct(row)
            elif {"token_ids", "position", "score"} <= row.keys():
                yield of_ours(row)


def of_verl(row: dict[str, Any]) -> Sample:
    """A row of rollout_data_dir. It names no group, so the prompt's text does."""
    return Sample(int(row["step"]), row["input"], row["input"], row["output"], number(row["score"]))


def of_trl(path: Path) -> Iterator[Sample]:
    """The rows of a table of completions. The score is the sum of the reward functions, as with weights of 1."""
    import pandas

    table = pandas.read_parquet(path)
    if not {"step", "prompt", "completion", "advantage"} <= set(table.columns):
        return
    rewards = table.drop(columns=[name for name in NOT_REWARDS if name in table.columns]).select_dtypes("number")
    scores = rewards.sum(axis=1, min_count=1)
    for row, score in zip(table.to_dict("records"), scores, strict=True):
        prompt = str(row["prompt"])
        yield Sample(int(row["step"]), prompt, prompt, str(row["completion"]), float(score), float(row["advantage"]))


def of_open_instruct(row: dict[str, Any]) -> Sample:
    """A RolloutRecord. Its mask is not written."""
    return Sample(
        step=int(row["step"]),
        group=row["prompt_idx"],
        prompt=str(row["prompt_tokens"]),
        response=str(row["response_tokens"]),
        score=number(row["reward"]),
        advantage=row["advantage"],
        engine=row.get("logprobs"),
        truncated=row["finish_reason"] == "length",
    )


def of_ours(row: dict[str, Any]) -> Sample:
    """A row of rollouts.jsonl, or of what dataproto.py makes of a batch of verl."""
    advantage = row.get("advantage")
    return Sample(
        step=int(row["training_step"]),
        group=row["position"],
        prompt=str(row.get("prompt_ids", row.get("prompt"))),
        response=str(row["token_ids"]),
        score=number(row["score"]),
        advantage=advantage if isinstance(advantage, (int, float)) else None,
        mask=row.get("mask"),
        engine=row.get("logprobs"),
        learner=row.get("old_logprobs"),
        truncated=row.get("finish_reason") == "length",
    )


def of_dataproto(path: Path) -> Iterator[Sample]:
    """The rows of a pickled batch. Its step is the last number of the file's name."""
    numbers = re.findall(r"\d+", path.stem)
    rows, _ = dataproto.rows_of_dataproto(dataproto.load_dataproto(path), int(numbers[-1]) if numbers else 0)
    for row in rows:
        yield of_ours(row)


def number(value: Any) -> float:
    """A score; one that is missing is NaN."""
    return math.nan if value is None else float(value)


# --- Checking ---------------------------------------------------------------------------------------------------------


def groups_of(samples: Iterable[Sample]) -> dict[tuple[int, Any], list[Sample]]:
    """(step, group) -> its samples."""
    groups: dict[tuple[int, Any], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.step, sample.group].append(sample)
    return dict(groups)


def formulas(scores: np.ndarray) -> dict[str, np.ndarray]:
    """The advantages that known formulas give a group."""
    centered = scores - scores.mean()
    n = len(scores)
    found = {"score - mean": centered, "score": scores}
    found["(score - mean) / deviation"] = centered / (scores.std() + 1e-8)
    if n > 1:
        found["(score - mean) / unbiased deviation"] = centered / (scores.std(ddof=1) + 1e-4)
        found["score - mean of the others"] = centered * n / (n - 1)
    return found


def check_advantages(groups: dict[Any, list[Sample]]) -> Iterator[Check]:
    """Against the formula that fits best, recomputed from the scores of each group alone."""
    errors: dict[str, float] = defaultdict(float)
    largest = 0.0
    for members in groups.values():
        given = np.array([math.nan if s.advantage is None else s.advantage for s in members], float)
        scores = np.array([s.score for s in members], float)
        if np.isnan(given).any() or np.isnan(scores).any():
            continue
        largest = max(largest, float(np.abs(given).max()))
        for name, values in formulas(scores).items():
            errors[name] = max(errors[name], float(np.abs(given - values).max()))
    if errors and largest:
        name = min(errors, key=lambda name: errors[name])
        error = errors[name] / largest
        numbers = f"{name} fits best, with an error of {error:.2%}"
        yield Check("advantage, and recomputed from its group's scores", error <= MOST_ERROR, numbers, "< 1 %")


def check_groups(groups: dict[Any, list[Sample]]) -> Iterator[Check]:
    """Sizes, and equal responses."""
    sizes = Counter(len(members) for members in groups.values())
    yield Check("size of a group, and of the others", len(sizes) == 1, f"sizes {dict(sizes)}", "one size")

    several = [members for members in groups.values() if len(members) > 1]
    same = 0
    for members in several:
        responses = {s.response for s in members}
        same += len(responses) == 1
    numbers = f"{same} of {len(several)} groups have one response"
    yield Check("response, and the others of its group", same <= len(several) / 2, numbers, "most differ")


def prompts_of(groups: dict[Any, list[Sample]]) -> dict[int, set[str]]:
    """Step -> its prompts, by step."""
    prompts: dict[int, set[str]] = defaultdict(set)
    for (step, _), members in groups.items():
        prompts[step].add(members[0].prompt)
    return dict(sorted(prompts.items()))


def check_prompts(groups: dict[Any, list[Sample]]) -> Iterator[Check]:
    """Prompts that come again, within a step and from step to step."""
    prompts = list(prompts_of(groups).values())
    different = sum(map(len, prompts))
    twice = len(groups) - different
    yield Check("prompts of a step, and different ones", twice == 0, f"{twice} are there twice", "0")
    if len(prompts) > 1:
        again = sum(itertools.starmap(operator.eq, itertools.pairwise(prompts)))
        yield Check("prompts of a step, and of the step before", again == 0, f"{again} steps have the same", "0")


def check_scores(samples: Sequence[Sample]) -> Iterator[Check]:
    """Missing ones."""
    missing = sum(math.isnan(s.score) for s in samples)
    numbers = f"{missing} of {len(samples)} are missing"
    yield Check("scores, and responses", missing == 0, numbers, "0 missing")


def show_truncated(samples: Sequence[Sample]) -> Iterator[Check]:
    """The scores of truncated responses. It judges nothing: an answer that was cut off may well score 0."""
    cut = [s.score for s in samples if s.truncated]
    others = [s.score for s in samples if s.truncated is False]
    if cut and others:
        mean = np.nanmean(cut)
        mean_of_others = np.nanmean(others)
        numbers = f"means {mean:.3g} of {len(cut)} and {mean_of_others:.3g} of {len(others)}"
        yield Check("score of truncated responses, and of others", True, numbers, "0 only where no answer is in them")


def check_tokens(samples: Sequence[Sample]) -> Iterator[Check]:
    """Masks and logprobs."""
    masks = [s.mask for s in samples if s.mask is not None and len(s.mask)]
    if masks:
        first = sum(bool(mask[0]) for mask in masks)
        last = sum(bool(mask[-1]) for mask in masks)
        fine = first == len(masks) and last == len(masks)
        numbers = f"first token {first}, last token {last}, of {len(masks)} responses"
        yield Check("tokens trained on, and responses", fine, numbers, "all, but where a tool had the last word")

    gaps = []
    for s in samples:
        if s.engine is not None and s.learner is not None:
            mask = np.asarray(s.mask if s.mask is not None else np.ones(len(s.engine)), bool)
            gaps.append(np.abs(np.asarray(s.learner, float) - np.asarray(s.engine, float))[mask])
    if gaps:
        every = np.concatenate(gaps)
        numbers = f"mean {every.mean():.2g}, largest {every.max():.2g} nats"
        yield Check("logprob of the engine, and of the learner", every.mean() < MOST_GAP, numbers, f"mean < {MOST_GAP}")


def checks_of(samples: Sequence[Sample]) -> list[Check]:
    """All checks for which the samples have the numbers."""
    groups = groups_of(samples)
    of_groups = [*check_advantages(groups), *check_groups(groups), *check_prompts(groups)]
    return [*of_groups, *check_scores(samples), *show_truncated(samples), *check_tokens(samples)]


def main(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        print(__doc__)
        return 2
    samples = []
    try:
        for word in words:
            samples += read(Path(word))
    except (ValueError, OSError) as error:
        print(f"rollouts.py: {error}", file=sys.stderr)
        return 2
    checks = checks_of(samples)
    steps = len({s.step for s in samples})
    print(f"{len(samples)} responses of {len(groups_of(samples))} groups in {steps} steps")
    for check in checks:
        mark = "ok " if check.fine else "NOT"
        print(f"{mark}  {check.name}: {check.numbers} (healthy: {check.healthy})")
    return int(not all(check.fine for check in checks))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
