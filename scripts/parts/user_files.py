"""Python files of the user: `load_file` loads one in a worker process, and --reward_file is one.

A file runs in workers only, so its exceptions, deaths and timeouts are statuses, not zeros and not the end of the run.
Workers have no GPU, importing the file is not part of the deadline, and what the file prints is in PRINTS. The files of
environments are in environments.py.
"""

import asyncio
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import rewards
from rewards import Job, RewardRecord, Verdict, need
from scripts.parts import rows, worker

FILE_MEMORY_BYTES = 16 * 2**30  # address space, of which `import torch` alone takes several GiB
MAX_PRINTS_BYTES = 2**26  # of a run
CONSOLE_LINES = 5  # of a step
CONSOLE_WIDTH = 400


class Prints:
    """What the user's files print. All lines go to `path`, the first of a step to the console, each after its name."""

    def __init__(self) -> None:
        self.path: Path | None = None  # no run, no file
        self.console_lines = CONSOLE_LINES  # still to be shown
        self.lock = threading.Lock()  # several threads wait for workers

    def begin_step(self, lines: int = CONSOLE_LINES) -> None:
        """The next lines are those of a new step, of which the console shows that many."""
        self.console_lines = lines

    def add(self, name: str, printed: str) -> None:
        """Takes what a function has printed in one call."""
        lines = [f"{name} | {rewards.printable(line)}" for line in printed.splitlines()]
        if not lines:
            return
        with self.lock:
            shown = [f"{line:.{CONSOLE_WIDTH}}\n" for line in lines[: self.console_lines]]
            self.console_lines -= len(shown)
            if shown and self.console_lines == 0 and self.path is not None:
                shown.append(f"(further prints of this step: {self.path})\n")
            sys.stderr.write("".join(shown))
            sys.stderr.flush()
            if self.path is not None:
                self.append("\n".join(lines) + "\n")

    def append(self, text: str) -> None:
        """Appends to the file in one write, because other ranks write there too, while it is not too long."""
        from scripts.parts import run_files

        size = self.path.stat().st_size if self.path.exists() else 0
        if size < MAX_PRINTS_BYTES:
            run_files.append_lines(self.path, text)


PRINTS = Prints()


def load_file(path: str, name: str) -> Any:
    """In a worker: a user's file as the module `name`."""
    worker.set_limit(resource.RLIMIT_AS, FILE_MEMORY_BYTES)
    sys.path.append(os.path.dirname(path))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    need(spec is not None, f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# --- --reward_file: the forms of its functions ------------------------------------------------------------------------

# The parameter by which a form is known
OWN = "response"
GROUP = "responses"
TRL = "completions"
VERL = "solution_str"
GIVEN = {  # what a form's parameters are; every other one is a column of the row
    OWN: ("response", "ground_truth"),
    GROUP: ("responses", "ground_truths"),
    TRL: ("prompts", "completions"),
    VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
FORMS = (
    "(response, ground_truth) and names of columns, or (responses, ground_truths) of a group and names of columns, or "
    "TRL's (prompts, completions, **kwargs), or verl's (data_source, solution_str, ground_truth, extra_info); all but "
    "the first of each may be left out"
)


@dataclass(frozen=True)
class Function:
    """How a function of a reward file is called. `parameters` are those it names, `columns` those of the row that it
    takes, "*" for **kwargs; of those in `required` each row must have one."""

    form: str
    parameters: list[str]
    columns: list[str]
    required: list[str]
    needs_label: bool


def form_of(call: Callable) -> Function | None:
    """The form of a function by its parameters, or None. Raises TypeError if one cannot be given by name."""
    parameters = inspect.signature(call).parameters
    form = next((form for form in GIVEN if form in parameters), None)
    if form is None:
        return None
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise TypeError(f"parameters are given by name, drop the / of (response, ...): {parameters}")
    columns = []
    required = []
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            columns.append(rows.ALL_COLUMNS)
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if name in GIVEN[form]:
            columns += {"prompts": ["prompt"], "data_source": [name], "extra_info": [name]}.get(name, [])
            continue
        columns.append(name)
        is_label = name == "ground_truth" and form != GROUP
        if parameter.default is inspect.Parameter.empty and not is_label:
            required.append(name)
    if form == TRL:
        columns.append("prompt")  # which tells whether it is a conversation
    label = parameters.get("ground_truth")
    needs_label = label is not None and label.default is inspect.Parameter.empty
    return Function(form, list(parameters), columns, required, needs_label)


def arguments_of(function: Function, response: Any, label: Any, dataset: str, columns: dict[str, Any]) -> dict:
    """The arguments of a call, by name: those that the function names. TRL's are lists, here of one sample. For GROUP
    `response` and `label` are lists of a group's."""
    if function.form == OWN:
        arguments = columns | {"response": response, "ground_truth": label}
    elif function.form == GROUP:
        arguments = columns | {"responses": response, "ground_truths": label}
    elif function.form == VERL:
        arguments = {"data_source": dataset, "extra_info": {}} | columns
        arguments |= {"solution_str": response, "ground_truth": label}
    else:
        sample = {"ground_truth": label} | columns
        prompt = sample.pop("prompt")
        is_conversation = isinstance(prompt, list)
        completion: Any = [{"role": "assistant", "content": response}] if is_conversation else response
        sample |= {"prompts": prompt, "completions": completion}
        arguments = {name: [value] for name, value in sample.items()}
    if rows.ALL_COLUMNS in function.columns:
        return arguments
    return {name: value for name, value in arguments.items() if name in function.parameters}


# --- --reward_file, in the trainer ------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Function] = {}  # of the reward file, by their names as verifiers


def load_reward_file(path: str) -> None:
    """Makes each reward function of a Python file a verifier of its name.

    A function whose parameters have one of the FORMS is one, unless its name begins with "_". Raises UserError if the
    file cannot be loaded, has no such function, or has one with the name of a built-in verifier.
    """
    path = os.path.abspath(path)
    need(os.path.isfile(path), f"--reward_file {path}: no such file")
    job = Job("user_files.work_reward_file", {"path": path, "call": None}, prints=os.path.basename(path))
    loaded = rewards.run_in_worker(job, worker.START_TIMEOUT_S)
    problem = loaded.details.get("problem", "the process died")
    need(loaded.status == "ok", f"--reward_file {path}: cannot be loaded: {problem}")

    defined: Any = loaded.score
    found = {name: Function(**form) for name, form in defined.items() if isinstance(form, dict)}
    others = ", ".join(f"{name}{parameters}" for name, parameters in defined.items())
    need(found != {}, f"--reward_file {path}: no function in it takes {FORMS}. It has {others or 'none'}")
    FUNCTIONS.clear()
    for name, function in found.items():
        built_in = name.lower() in rewards.BUILT_IN
        need(not built_in, f"--reward_file {path}: {name} is a verifier already; rename the function")
        FUNCTIONS[name.lower()] = function
        check = partial(check_columns, required=function.required, needs_label=function.needs_label)
        rewards.VERIFIERS[name.lower()] = rewards.Verifier(partial(verify_by_file, path=path, name=name), check)


def check_columns(record: RewardRecord, required: Sequence[str], needs_label: bool) -> None:
    """Raises ValueError if the row of the record lacks a column, or the label, that a function takes."""
    columns = record.columns or {}
    missing = [column for column in required if columns.get(column) is None]
    if needs_label and record.ground_truth is None:
        missing.append("ground_truth")
    words = ", ".join(missing)
    need(not missing, f"it takes {words}, which the row does not have: drop the parameter, or give it a default")


def verify_by_file(record: RewardRecord, path: str, name: str) -> Verdict:
    """The number that a function of the file gives to the whole response, thinking included.

    A function of a group has no number for a response alone: it is missing, until judge_groups puts the group's in its
    place. The response is kept as what was found.
    """
    function = FUNCTIONS[name.lower()]
    columns = {"prompt": record.prompt} | (record.columns or {})
    arguments = arguments_of(function, record.response, record.ground_truth, record.dataset, columns)
    job = job_of(path, name, arguments)
    if function.form == GROUP:
        return Verdict(record.response, math.nan)
    return Verdict(None, job)


def job_of(path: str, name: str, arguments: dict[str, Any]) -> Job:
    """The call of a function of the file in a worker. Raises TypeError for a label that a job cannot carry."""
    call = json.dumps([name, arguments])
    return Job("user_files.work_reward_file", {"path": path, "call": call}, prints=name)


def judge_groups(rollouts: Sequence[Any], timeout_s: float = 10.0) -> None:
    """Call the functions of the file that judge a group, once for each group of a prompt, and put their results where
    its rollouts wait for them. timeout_s is the deadline of a call, in seconds; a call that fails leaves the scores of
    all rollouts of its group missing."""
    groups: dict[tuple[int, bool], list[Any]] = {}
    for r in rollouts:
        if r.scoring:
            groups.setdefault((r.position, r.evaluation), []).append(r)

    calls = []
    for group in groups.values():
        for place, verifier in enumerate(group[0].prompt.verifiers):
            name = rewards.check_verifier(verifier)
            function = FUNCTIONS.get(name)
            if function is not None and function.form == GROUP:
                job = job_of_group(group, place, name, function)
                call = partial(rewards.run_in_worker, job, timeout_s)
                future = rewards.JOB_THREADS.submit(partial(rewards.finish, name, None, call))
                calls.append((group, place, future))

    for group, place, future in calls:
        result = future.result()
        scored: Any = result.score
        if not isinstance(scored, list):  # the call failed
            scored = [{}] * len(group)
        for r, fields in zip(group, scored, strict=True):
            r.scoring[place] = Future()
            r.scoring[place].set_result(dataclasses.replace(result, **fields))


def job_of_group(group: Sequence[Any], place: int, name: str, function: Function) -> Job:
    """The call of a function of a group with the responses of its rollouts, in the order of their samples. Its score is
    a list of the fields of Scored."""
    prompt = group[0].prompt
    responses = [r.scoring[place].result().extracted for r in group]
    labels = [prompt.ground_truths[place]] * len(group)
    columns = {"prompt": prompt.conversation} | prompt.reward_columns
    arguments = arguments_of(function, responses, labels, prompt.verifiers[place], columns)
    known: Any = rewards.VERIFIERS[name].verify  # verify_by_file with path and name
    return job_of(arguments=arguments, **known.keywords)


# --- --reward_file, in a worker ---------------------------------------------------------------------------------------


@functools.cache
def reward_functions(path: str) -> dict[str, Callable]:
    """The functions that a reward file defines, by name, without those whose name begins with "_"."""
    module = load_file(path, "reward_file")
    functions = {}
    for value in vars(module).values():
        if inspect.isfunction(value) and value.__module__ == "reward_file":  # defined there, not imported
            if not value.__name__.startswith("_"):
                functions[value.__name__] = value
    return functions


def describe(path: str) -> dict[str, Any]:
    """Of each function of the file, by name: the fields of its Function, or without a form its parameters as text."""
    described: dict[str, Any] = {}
    for name, call in reward_functions(path).items():
        function = form_of(call)
        described[name] = str(inspect.signature(call)) if function is None else asdict(function)
    return described


def told(error: BaseException, path: str) -> str:
    """An exception in words, with the last line of the file at `path` that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f" ({os.path.basename(path)}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


def call_of_file(path: str, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """call(*args, **kwargs). An exception becomes a RuntimeError that names the line of the file at `path`."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise RuntimeError(told(error, path)) from error


def work_reward_file(path: str, call: str | None) -> Callable[[], Any]:
    """Loads the file. `call` is JSON, [function, arguments by name], whose result is the score; with None the result
    describes the functions of the file."""
    call_of_file(path, reward_functions, path)
    if call is None:
        return partial(describe, path)
    name, arguments = json.loads(call)
    return partial(reward, path, name, arguments)


def reward(path: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of rewards.Scored that the function's value means: see score_of. For a function of a group `score` is
    the list of those of its responses. Raises RuntimeError if the function raises."""
    value = call_of_file(path, reward_functions(path)[name], **arguments)
    if inspect.iscoroutine(value):
        value = call_of_file(path, asyncio.run, value)
    responses = arguments.get(GROUP, arguments.get(TRL))
    if responses is None:
        return score_of(name, value)

    has_all = hasattr(value, "__len__") and len(value) == len(responses)
    if not has_all:
        word = GROUP if GROUP in arguments else TRL
        raise TypeError(f"{name} returned {value!r:.80}, not a list with a number for each of the {word}")
    scored = [score_of(name, of_one) for of_one in value]
    return {"score": scored} if GROUP in arguments else scored[0]


def score_of(name: str, value: Any) -> dict[str, Any]:
    """The score that a function's value means: a number; None, "does not apply", which adds nothing to the score; or
    verl's dict, whose "score" is the score and whose other numbers become metrics. Raises TypeError, ValueError."""
    details: dict[str, float] = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise TypeError(f"{name} returned a dict without the key 'score': {sorted(map(str, value))}")
        for key, number in value.items():
            is_array_of_one = getattr(number, "ndim", None) == 0  # numpy's, torch's
            has_number = isinstance(number, (bool, int, float)) or is_array_of_one
            if key != "score" and has_number:
                details[str(key)] = float(number)
        value = value["score"]
    if value is None:
        return {"score": 0.0, "status": "no_answer", "details": details}
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"{name} returned {score}")
    return {"score": score, "details": details}
