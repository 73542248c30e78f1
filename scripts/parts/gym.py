"""The verifier reasoning_gym: the scorers of the library reasoning_gym, in a worker process.

Source: github.com/open-thought/reasoning-gym 0.1.25.
"""

import ast
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rewards import NO_ANSWER, Job, RewardRecord, UserError, Verdict, answer_text
from scripts.tools import calculator

RUNS_TEXT = "its scorer passes the answer or the label to eval or sympy's parser, which run code"
REASONING_GYM_REFUSED = {
    "coin_flip": "its scorer takes the first digits of the answer for all of it: 0 for 0.375",
    "game_of_life_halting": "its scorer takes every text for right",
    "bitwise_arithmetic": RUNS_TEXT,
    "intermediate_integration": RUNS_TEXT,
    "polynomial_multiplication": RUNS_TEXT,
    "simple_integration": RUNS_TEXT,
}
OPPOSITES = ({"true", "false"}, {"yes", "no"}, {"0", "1"})
EXPRESSION = re.compile(r"[-+*/()\s\d]+", re.ASCII)
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
NOT_A_NUMBER = re.compile("nan|inf", re.IGNORECASE)  # equal to everything for complex_arithmetic and number_sorting


@dataclass(frozen=True)
class Label:
    """A task of the library and one of its entries: question, answer (None for a few tasks), metadata."""

    task: str
    entry: dict[str, Any]


def reasoning_gym_label(ground_truth: Any) -> Label:
    """The label {"task": name, "entry": {question, answer, metadata}}, a dict or its JSON.

    Raises ValueError, or TypeError for values that are not JSON. Whether the task exists is not checked here: that
    would import reasoning_gym, which takes 1 s and 110 MB."""
    label = json.loads(ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth))
    if not isinstance(label, dict):
        label = {}
    task = label.get("task")
    entry = label.get("entry")
    if not isinstance(task, str) or not is_entry(entry):
        raise ValueError('a reasoning_gym label needs {"task": name, "entry": {question, answer, metadata}}')

    metadata = entry["metadata"]
    if task == "composite":  # its entries come from other tasks
        task = metadata.get("source_dataset", task)
    if task in REASONING_GYM_REFUSED:
        raise ValueError(f"reasoning_gym's task {task} is refused: {REASONING_GYM_REFUSED[task]}")
    if lacks_solution(entry):
        raise ValueError("the entry's own answer is empty")
    if task == "puzzle24":
        return Label("countdown", entry | {"metadata": metadata | {"target": 24}})
    return Label(task, entry)


def is_entry(entry: Any) -> bool:
    """Whether this is an entry of a task: a dict {question, answer, metadata} whose metadata is a dict."""
    if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
        return False
    return isinstance(entry["metadata"], dict)


def check(record: RewardRecord) -> None:
    """Raises ValueError for a label that cannot be scored."""
    from reasoning_gym.factory import DATASETS

    task = reasoning_gym_label(record.ground_truth).task
    if task not in DATASETS:
        raise ValueError(f"unknown reasoning_gym task {task!r}")


def verify(record: RewardRecord) -> Verdict:
    """The library's own score in [0, 1] of the last <answer> block, or of the whole text if there is none.

    Many scorers give partial credit (0.01 for any wrong number, len(gold)/len(answer) for padding). countdown, puzzle24
    and game_of_life are right or wrong: the library pays 0.05 for any number, and 0.97 for a dead board. "True False"
    is no answer. nan and inf are numbers only if the label has them. Raises ValueError for a label that
    reasoning_gym_label refuses.
    """
    label = reasoning_gym_label(record.ground_truth)
    answer = answer_text(record.response)
    if not answer:
        return NO_ANSWER
    if label.task == "countdown":
        return Verdict(answer, score_countdown(answer, label.entry["metadata"]))
    gold = str(label.entry["answer"])
    if NOT_A_NUMBER.search(answer) and re.search(r"\d", gold) and not NOT_A_NUMBER.search(gold):
        return Verdict(answer, 0.0)

    if says_both(answer, gold) or is_other_number(answer, gold):
        return Verdict(answer, 0.0)

    arguments = {"task": label.task, "entry": label.entry, "answer": answer}
    blameless = {"answer": "[]" if label.entry["answer"] is None else label.entry["answer"]}
    return Verdict(answer, Job("gym.work_reasoning_gym", arguments, blameless))


def score_countdown(answer: str, metadata: dict[str, Any]) -> float:
    """1.0 if the answer is arithmetic whose value is the target, of exactly the numbers that are given, else 0.0. The
    library's own scorer evaluates the answer with sympy, which runs code."""
    numbers = [int(digits) for digits in re.findall(r"\d{1,9}", answer)]
    numbers.sort()
    given = sorted(metadata["numbers"])
    if numbers != given or not EXPRESSION.fullmatch(answer):
        return 0.0
    try:
        value = calculator.call({}, answer)
    except ValueError:  # no arithmetic
        return 0.0
    target = str(metadata["target"])
    return float(value == target)


def says_both(answer: str, gold: str) -> bool:
    """Whether an answer has both words of a pair of OPPOSITES of which the label is one. The library pays the length of
    the label over that of the answer: nearly half for both."""
    words = set(re.findall(r"\w+", answer.lower()))
    return any(gold.strip().lower() in pair and pair <= words for pair in OPPOSITES)


def is_other_number(answer: str, gold: str) -> bool:
    """Whether an answer is not the number of the label, but may be to a scorer that reads both by int() or float(): 5_4
    for 54, and of integers with more digits than a float has, another one."""
    if not NUMBER.fullmatch(gold.strip()):
        return False
    both_whole = all(re.fullmatch(r"[-+]?\d{16,4000}", text.strip(), re.ASCII) for text in (answer, gold))
    return re.search(r"\d_\d", answer) is not None or (both_whole and int(answer) != int(gold))


def in_range(score: Any) -> float:
    """A scorer's score, or 0 for one beyond [0, 1]: only scorers that misjudge a wrong answer give those."""
    return float(score) if 0 <= score <= 1 else 0.0


@functools.lru_cache(maxsize=128)
def reasoning_gym_dataset(task: str) -> Any:
    """In a worker: the dataset object of a task, whose score_answer knows its entries. Raises ValueError if unknown.

    Scorers that call eval, of an answer or a label, get ast.literal_eval in its place: no text is run.
    """
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, size=1, seed=0)
    vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
    return dataset


def work_reasoning_gym(task: str, entry: dict, answer: str) -> Callable[[], float]:
    """In a worker: the function that scores the answer."""
    dataset = reasoning_gym_dataset(task)
    if task in ("arc_agi", "rearc"):  # JSON turned the tuples of the output into lists
        entry["metadata"]["output"] = tuple(map(tuple, entry["metadata"]["output"]))
    if task == "game_of_life":  # the scorer pays a share of the cells, of which most are dead
        return lambda: float(dataset.score_answer(answer=answer, entry=entry) == 1)
    return lambda: in_range(dataset.score_answer(answer=answer, entry=entry))


# --- Rows -------------------------------------------------------------------------------------------------------------


def generate_rows(flag: str, name: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The fields of the utils.Rows of reasoning_gym:TASK, made in the trainer, which needs the library to check the
    labels. Raises UserError."""
    import reasoning_gym

    task = name.partition(":")[2]
    try:
        items = reasoning_gym.create_dataset(task, size=count, seed=seed)
    except ValueError as error:
        raise UserError(f"--{flag} {name}: {error}") from None
    for i, item in enumerate(items, start=1):
        if lacks_solution(item):
            print(f"--{flag} {name} row {i} has no solution: left out", file=sys.stderr)
            continue
        question = {"role": "user", "content": item["question"]}
        label = json.dumps({"task": task, "entry": item}, default=str)
        yield {
            "where": f"{name} row {i}",
            "messages": [question],
            "ground_truths": [label],
            "verifiers": ["reasoning_gym"],
        }


def lacks_solution(entry: dict[str, Any]) -> bool:
    """Whether an entry cannot be solved: its answer is empty."""
    return entry["answer"] is not None and not str(entry["answer"]).strip()
