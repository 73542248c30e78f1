"""The verifier reasoning_gym: the scorers of the library reasoning_gym.

Most scorers run in a worker process. Those that evaluate text, of a response or of a label, run in a sandbox.
Source: github.com/open-thought/reasoning-gym 0.1.25.
"""

import ast
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rewards import NO_ANSWER, Job, RewardRecord, Scored, UserError, Verdict, answer_text
from scripts.parts import run_code, sandbox

# These scorers pass the answer or the label to sympy.parse_expr or eval, which run code: see verify_expression.
REASONING_GYM_UNSAFE = frozenset(
    "bitwise_arithmetic countdown intermediate_integration polynomial_multiplication simple_integration".split()
)
REASONING_GYM_REFUSED = {
    "coin_flip": "its scorer takes the first digits of the answer for all of it: 0 for 0.375",
    "game_of_life_halting": "its scorer takes every text for right",
}
OPPOSITES = ({"true", "false"}, {"yes", "no"}, {"0", "1"})
REASONING_GYM_TIMEOUT_S = 10.0  # in the sandbox
# A response reaches a scorer in the sandbox only if it is an arithmetic expression of at most 1000 characters.
MAX_EXPRESSION = 1000
EXPRESSION = re.compile(r"(?:[-+*/^()\s\dA-Za-z]|\.(?=\d))*", re.ASCII)
SYMBOL = re.compile(r"[A-Za-z]|pi|exp|log|ln|sqrt|a?(?:sin|cos|tan|sinh|cosh|tanh)|sec|csc|cot")
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
NOT_A_NUMBER = re.compile("nan|inf", re.IGNORECASE)  # equal to everything for complex_arithmetic and number_sorting
SPARE_SEED = 2_000_000  # of rows that take the place of others: item i uses Random(seed + i), see utils.HELD_OUT_SEED
SCORE_EXPRESSION = """
import json, sys, reasoning_gym
job = json.load(sys.stdin)
print(float(reasoning_gym.create_dataset(job["task"], size=1, seed=0).score_answer(job["answer"], job["entry"])))
"""


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
        raise ValueError(f"reasoning_gym's task {task} pays wrong answers: {REASONING_GYM_REFUSED[task]}")
    if lacks_solution(entry):
        raise ValueError("the entry's own answer is empty, or the integral itself, which no response can be")
    if task == "puzzle24":  # its own scorer accepts any four numbers, and 24.5 for 24
        return Label("countdown", entry | {"metadata": metadata | {"target": 24}})
    return Label(task, entry)


def is_entry(entry: Any) -> bool:
    """Whether this is an entry of a task: a dict {question, answer, metadata} whose metadata is a dict."""
    if not isinstance(entry, dict) or not {"question", "answer", "metadata"} <= entry.keys():
        return False
    return isinstance(entry["metadata"], dict)


def check(record: RewardRecord) -> None:
    """Raises ValueError for a label that cannot be scored, or whose scorer needs a sandbox that this machine lacks."""
    from reasoning_gym.factory import DATASETS

    task = reasoning_gym_label(record.ground_truth).task
    if task in REASONING_GYM_UNSAFE:
        run_code.require_sandbox()
    if task not in DATASETS:
        raise ValueError(f"unknown reasoning_gym task {task!r}")


def verify(record: RewardRecord) -> Verdict:
    """The library's own score in [0, 1] of the last <answer> block, or of the whole text if there is none.

    Many scorers give partial credit (0.01 for any wrong number, len(gold)/len(answer) for padding). puzzle24 is scored
    as countdown with the target 24, and game_of_life is right or wrong: the library pays a share of the cells, 0.97 for
    a dead board. "True False" is no answer. nan and inf are numbers only if the label has them. Raises ValueError for a
    label that reasoning_gym_label refuses.
    """
    label = reasoning_gym_label(record.ground_truth)
    answer = answer_text(record.response)
    if not answer:
        return NO_ANSWER
    gold = str(label.entry["answer"])
    if NOT_A_NUMBER.search(answer) and re.search(r"\d", gold) and not NOT_A_NUMBER.search(gold):
        return Verdict(answer, 0.0)

    if says_both(answer, gold) or is_other_number(answer, gold):
        return Verdict(answer, 0.0)

    arguments = {"task": label.task, "entry": label.entry, "answer": answer}
    blameless = {"answer": "[]" if label.entry["answer"] is None else label.entry["answer"]}
    if label.task in REASONING_GYM_UNSAFE:
        return verify_expression(arguments, blameless)
    return Verdict(answer, Job("gym.work_reasoning_gym", arguments, blameless))


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


# --- Scorers that evaluate text ---------------------------------------------------------------------------------------


def is_arithmetic(task: str, answer: str) -> bool:
    """Whether an answer is an arithmetic expression that a scorer may evaluate."""
    if task == "bitwise_arithmetic":  # its scorer takes numbers only
        return True
    if len(answer) > MAX_EXPRESSION or not EXPRESSION.fullmatch(answer):
        return False
    names = re.findall(r"[A-Za-z]+", answer)
    if task == "countdown":
        return not names
    return all(SYMBOL.fullmatch(name) for name in names)


def verify_expression(arguments: dict[str, Any], blameless: dict[str, Any]) -> Verdict:
    """The score of a scorer that evaluates text. An answer that is not arithmetic is wrong; any other is scored in the
    sandbox, and is wrong if it takes too long.

    Both are needed, because a scorer shares its process with the text that it evaluates: code in the text could write
    its own score. The library itself gives 0.01 to texts that its parser refuses."""
    run_code.require_sandbox()
    answer = arguments["answer"]
    if not is_arithmetic(arguments["task"], answer):
        return Verdict(answer, 0.0)
    call = partial(score_expression, arguments, blameless)
    preload = ("reasoning_gym", "sympy.physics.units")  # sympy's simplify imports the latter
    return Verdict(answer, partial(run_code.in_sandbox, call, *preload))


def score_expression(arguments: dict[str, Any], blameless: dict[str, Any], box: sandbox.Sandbox) -> Scored:
    """The score of a scorer in this sandbox. If it gives none, and then gives one for the harmless arguments, the
    answer is to blame, and it is wrong; otherwise the score is missing."""
    problem = ""
    for given in (arguments, arguments | blameless):
        files = [json.dumps(given), None, None, SCORE_EXPRESSION]
        run = box.run("program", files, REASONING_GYM_TIMEOUT_S)
        printed_score = run.problem is None and run.output
        if printed_score and problem:
            return Scored(0.0, "ok", {"problem": problem})
        if printed_score:
            return Scored(in_range(float(run.output.splitlines()[-1])), "ok")
        error_lines = run.error.strip().splitlines() or ["out of memory"]
        problem = run.problem or error_lines[-1]
    return Scored(math.nan, "timeout" if run.late else "crash", {"problem": problem})


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
    spare = iter(reasoning_gym.create_dataset(task, size=count, seed=seed + SPARE_SEED))
    num_drawn_anew = 0
    for i, item in enumerate(items, start=1):
        while item is not None and lacks_solution(item):
            num_drawn_anew += 1
            item = next(spare, None)
        if item is None:
            raise UserError(f"--{flag} {name}: too few rows of this task have a solution; take another task")
        question = {"role": "user", "content": item["question"]}
        label = json.dumps({"task": task, "entry": item}, default=str)
        yield {
            "where": f"{name} row {i}",
            "messages": [question],
            "ground_truths": [label],
            "verifiers": ["reasoning_gym"],
        }
    if num_drawn_anew:
        print(f"--{flag} {name}: {num_drawn_anew} rows without a solution were drawn anew", file=sys.stderr)


def lacks_solution(entry: dict[str, Any]) -> bool:
    """Whether an entry cannot be solved: its answer is empty, or the integral that was asked for."""
    answer = entry["answer"]
    return answer is not None and (not str(answer).strip() or "Integral(" in str(answer))
