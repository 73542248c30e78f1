"""Environments, which answer the policy between its turns: both sides of the conversation with a worker process.

What an environment's file defines is in rewards.Episode and rewards.Answer. The trainer keeps the state of every
episode, as text, so a worker that dies loses nothing.
"""

import base64
import functools
import math
import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rewards
from rewards import Answer, Episode, Job, Scored, need, warn_once
from scripts.parts.user_files import load_file

TRIES = 3  # of a step whose worker was killed by something else
MAX_ANSWER_BYTES = 2**16
MAX_ERROR_CHARACTERS = 1000

# ----------------------------------------------------------------------------------------------------------------------
# In the trainer


def about(flag: str, path: str, config: dict[str, Any]) -> dict[str, Any]:
    """What about(config) of an environment's file returns. Raises UserError if the file cannot be loaded."""
    arguments = {"path": path, "config": config, "state": None, "episode": None}
    job = Job("environments.work_environment", arguments)
    loaded = rewards.run_in_worker(job, rewards.START_TIMEOUT_S, rewards.ENV_WORKERS)
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
        result = rewards.run_in_worker(job, timeout_s, rewards.ENV_WORKERS)
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


# ----------------------------------------------------------------------------------------------------------------------
# In a worker


@functools.cache
def environment(path: str) -> Any:
    """The module of an environment's file."""
    module = load_file(path, f"environment_{Path(path).stem}")  # a name by which pickle finds its classes
    if not (hasattr(module, "Env") or hasattr(module, "step")):
        raise ValueError("it defines neither step(episode) nor a class Env")
    return module


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
        env = pickle.loads(base64.b64decode(state)) if state else module.Env(episode.config)
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
