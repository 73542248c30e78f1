"""Environments, which answer the policy between its turns: both sides of the conversation with a worker process.

What an environment's file defines is in rewards.Episode and rewards.Answer. The trainer keeps the state of every
episode, as text, so a worker that dies loses nothing.
"""

import base64
import functools
import io
import math
import os
import pickle
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rewards
from rewards import Answer, Episode, Job, Scored, need, warn_once
from scripts.parts import worker
from scripts.parts.user_files import load_file

TRIES = 3  # of a step whose worker was killed by something else
MAX_ANSWER_BYTES = 2**16
MAX_ERROR_CHARACTERS = 1000
CUT_MARK = " [cut]"
# What a state may be made of, beside classes of the user's own files
PLAIN = """builtins.set builtins.frozenset builtins.bytearray builtins.complex builtins.range builtins.slice
    collections.deque collections.Counter collections.OrderedDict
    collections.defaultdict builtins.dict builtins.list builtins.int builtins.float builtins.str builtins.bool
    builtins.tuple builtins.bytes datetime.datetime datetime.date datetime.time datetime.timedelta datetime.timezone
    decimal.Decimal fractions.Fraction random.Random pathlib.PosixPath pathlib.Path uuid.UUID""".split()
NUMPY = {("numpy", "ndarray"), ("numpy", "dtype")}
NUMPY |= {(f"numpy.{core}.multiarray", name) for core in ("_core", "core") for name in ("_reconstruct", "scalar")}
NUMPY |= {("numpy._core.numeric", "_frombuffer")}
INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]

# --- In the trainer ---------------------------------------------------------------------------------------------------


def about(flag: str, path: str, config: dict[str, Any]) -> dict[str, Any]:
    """What about(config) of an environment's file returns. Raises UserError if the file cannot be loaded."""
    arguments = {"path": path, "config": config, "state": None, "episode": None}
    job = Job("environments.work_environment", arguments)
    loaded = rewards.run_in_worker(job, worker.START_TIMEOUT_S, of_environment=True)
    problem = loaded.details.get("problem", "the process died")
    need(loaded.status == "ok", f"{flag} {path}: cannot be loaded: {problem}")
    answer: Any = loaded.score
    return answer


def ask(path: str, state: str | None, episode: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run one step in a worker and wait for it: {status, seconds, texts, reward, done, metrics, state}.

    status is ok, crash, timeout or infra_error. After a crash or timeout the policy reads of it in a text, and the
    episode continues with the state before the step. An infra_error (OSError, ImportError, a worker killed three times
    by something else) ends the rollout and makes its score missing."""
    arguments = {"path": path, "config": {}, "state": state, "episode": episode}
    job = Job("environments.work_environment", arguments)
    start = time.monotonic()
    result = Scored(math.nan, "infra_error")
    for _ in range(TRIES):
        result = rewards.run_in_worker(job, timeout_s, of_environment=True)
        if result.status != "infra_error":
            break
    seconds = time.monotonic() - start - result.waited

    answer: Any = result.score
    if isinstance(answer, dict):
        return {"seconds": seconds} | answer
    problem = result.details.get("problem", "the process died")
    if result.status != "timeout":
        warn_once(path, result.status, problem)
    if result.status == "timeout":
        problem = f"no answer within {timeout_s:g} s"
    return {"seconds": seconds} | failed_answer(result.status, problem, path, seconds, state)


def failed_answer(status: str, problem: str, path: str, seconds: float, state: str | None) -> dict[str, Any]:
    """The answer in place of one that failed."""
    name = os.path.basename(path).removesuffix(".py")
    tool = f"tools/{name}"
    return {
        "status": status,
        "texts": [f"Error: {problem}"[:MAX_ERROR_CHARACTERS]],
        "reward": 0.0,
        "done": status == "infra_error",
        "metrics": {f"{tool}/calls": 1, f"{tool}/failures": 1, f"{tool}/seconds": seconds},
        "state": state,
    }


# --- In a worker ------------------------------------------------------------------------------------------------------


@functools.cache
def environment(path: str) -> Any:
    """The module of an environment's file."""
    module = load_file(path, f"environment_{Path(path).stem}")  # a name by which pickle finds its classes
    if not (hasattr(module, "Env") or hasattr(module, "step")):
        raise ValueError("it defines neither step(episode) nor a class Env")
    return module


class StateUnpickler(pickle.Unpickler):
    """Reads an environment's state, which may come from another's checkpoint: plain containers and numbers, and objects
    of classes in files that are loaded already, as the environment and its tools are."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in PLAIN or (module, name) in NUMPY:
            return super().find_class(module, name)
        loaded = sys.modules.get(module)
        found = getattr(loaded, name, None)
        file = Path(getattr(loaded, "__file__", None) or INSTALLED[0])
        installed = any(file.is_relative_to(place) for place in INSTALLED) or "dist-packages" in file.parts
        if installed or not isinstance(found, type) or found.__module__ != module:
            problem = f"it asks for {module}.{name}"
            raise pickle.UnpicklingError(f"the state of an environment has to be plain data: {problem}")
        return found


def work_environment(path: str, config: dict, state: str | None, episode: dict | None) -> Callable[[], dict]:
    """Prepare a step of the environment or, without an episode, a call of the file's about(config).

    state: the environment's state as base64 of a pickle; None makes a new Env from the episode's config. The file's
    prepare(config) runs here, so that the time limit of the answer does not include it."""
    module = environment(path)
    if episode is None:
        return partial(module.about, config) if hasattr(module, "about") else dict
    if hasattr(module, "prepare"):
        module.prepare(episode["config"])
    return partial(take_step, module, path, state, Episode(**episode))


def take_step(module: Any, path: str, state: str | None, episode: Episode) -> dict[str, Any]:
    """The answer to an episode, as plain data, with the new state."""
    env = module
    if hasattr(module, "Env"):
        env = load_state(state) if state else module.Env(episode.config)
    try:
        answer = env.step(episode)
    except (OSError, ImportError) as error:  # not the policy's fault, so the policy does not see it
        return failed_answer("infra_error", f"{type(error).__name__}: {error}", path, 0.0, state)

    if answer is None:
        answer = Answer(done=True)
    elif not isinstance(answer, Answer):
        answer = Answer(answer)
    result: dict[str, Any] = {"status": "ok"}
    result["texts"] = texts_of(answer)
    result["reward"] = float(answer.reward)
    result["done"] = bool(answer.done)
    result["metrics"] = metrics_of(answer)
    result["state"] = None if env is module else base64.b64encode(pickle.dumps(env)).decode()
    return result


def load_state(state: str) -> Any:
    """The Env of a state. Raises UnpicklingError for one that is no plain data."""
    return StateUnpickler(io.BytesIO(base64.b64decode(state))).load()


def texts_of(answer: Answer) -> list[str]:
    """The texts of an answer, together at most MAX_ANSWER_BYTES. Raises TypeError for a value that is not a text."""
    texts = answer.text
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"step returned {type(answer.text).__name__}, not a text")
    limit = MAX_ANSWER_BYTES // max(len(texts), 1)
    return [bounded(text, limit) for text in texts]


def metrics_of(answer: Answer) -> dict[str, float]:
    """The metrics of an answer. Raises ValueError if one of them, or the reward, is not finite."""
    metrics = {}
    for name, value in answer.metrics.items():
        metrics[str(name)] = float(value)
    numbers = [answer.reward, *metrics.values()]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"step returned the reward {answer.reward}, the metrics {metrics}")
    return metrics


def bounded(text: str, max_bytes: int) -> str:
    """A text that UTF-8 can encode, of at most max_bytes bytes."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 6].decode(errors="ignore") + " [cut]"
