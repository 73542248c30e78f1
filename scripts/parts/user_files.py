"""Python files of the user: `load_file` loads one in a worker process, and --reward_file is one.

A file runs in workers only, so its exceptions, deaths and timeouts are statuses, not zeros and not the end of the run.
Workers have no GPU, importing the file is not part of the deadline, and what the file prints is dropped. The files of
environments are in environments.py.
"""

import functools
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import rewards
from rewards import Job, RewardRecord, Verdict, need

FILE_MEMORY_BYTES = 16 * 2**30  # address space, of which `import torch` alone takes several GiB


def set_limit(kind: int, amount: int) -> None:
    """Sets a soft resource limit of this process. No limit on macOS, whose setrlimit refuses RLIMIT_AS."""
    if sys.platform == "darwin":
        return
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(kind, (amount, hard))


def load_file(path: str, name: str) -> Any:
    """In a worker: a user's file as the module `name`."""
    set_limit(resource.RLIMIT_AS, FILE_MEMORY_BYTES)
    sys.path.append(os.path.dirname(path))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------------------
# --reward_file, in the trainer


def load_reward_file(path: str) -> None:
    """Makes each function (response, ground_truth) -> number of a Python file a verifier of its name.

    response is the whole text, ground_truth the row's label as JSON has it (a dict can carry the question as well); 1.0
    is the full score. Raises UserError if the file cannot be loaded, has no such function, or has one with the name of
    a built-in verifier.
    """
    path = os.path.abspath(path)
    job = Job("user_files.work_reward_file", {"path": path, "args": None})
    loaded = rewards.run_in_worker(job, rewards.START_TIMEOUT_S)
    problem = loaded.details.get("problem", "the process died")
    need(loaded.status == "ok", f"--reward_file {path}: cannot be loaded: {problem}")

    names: Any = loaded.score
    need(names != [], f"--reward_file {path}: defines no function whose parameters are (response, ground_truth)")
    for name in names:
        built_in = name.lower() in rewards.BUILT_IN
        need(not built_in, f"--reward_file {path}: {name} is a verifier already; rename the function")
    for name in names:
        rewards.VERIFIERS[name.lower()] = rewards.Verifier(partial(verify_by_file, path=path, function=name))


def verify_by_file(record: RewardRecord, path: str, function: str) -> Verdict:
    """The number that a function of the file gives to the whole response, thinking included."""
    label = json.dumps(record.ground_truth)  # raises TypeError here for a label that a job cannot carry
    return Verdict(None, Job("user_files.work_reward_file", {"path": path, "args": [function, record.response, label]}))


# ----------------------------------------------------------------------------------------------------------------------
# --reward_file, in a worker


@functools.cache
def reward_functions(path: str) -> dict[str, Callable]:
    """The functions (response, ground_truth) that a reward file defines, by name."""
    module = load_file(path, "reward_file")
    functions = {}
    for value in vars(module).values():
        if inspect.isfunction(value) and value.__module__ == "reward_file":  # defined there, not imported
            if list(inspect.signature(value).parameters) == ["response", "ground_truth"]:
                functions[value.__name__] = value
    return functions


def call_of_file(path: str, call: Callable, *args: Any) -> Any:
    """call(*args). An exception becomes a RuntimeError that names the line of the file at `path`."""
    try:
        return call(*args)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        where = f" ({os.path.basename(path)}, line {lines[-1]})" if lines else ""
        raise RuntimeError(f"{type(error).__name__}: {error}{where}") from error


def work_reward_file(path: str, args: list | None) -> Callable[[], Any]:
    """Loads the file. With args = [function, response, label] the result scores the response, with None it lists the
    names of the file's functions."""
    functions = call_of_file(path, reward_functions, path)
    if args is None:
        return partial(list, functions)
    return partial(reward, path, *args)


def reward(path: str, name: str, response: str, label: str) -> float:
    """The number that the function gives; label is JSON. Raises RuntimeError if the function raises, ValueError for nan
    and infinity."""
    function = reward_functions(path)[name]
    value = float(call_of_file(path, function, response, json.loads(label)))
    if not math.isfinite(value):
        raise ValueError(f"{name} returned {value}")
    return value
