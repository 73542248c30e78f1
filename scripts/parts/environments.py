"""Environments, which answer the policy between its turns: both sides of the conversation with a worker process.

What an environment's file defines is in rewards.Episode and rewards.Answer. The trainer keeps the state of every
episode, as text, so a worker that dies loses nothing. An Env that is no plain data stays in its worker, which nobody
else gets until the rollout is over: whatever becomes of it, no other rollout is touched.
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
from rewards import Answer, Episode, need, warn_once
from scripts.parts import worker
from scripts.parts.user_files import PRINTS, load_file, told

TRIES = 3  # of a step whose worker was killed by something else
MAX_ANSWER_BYTES = 2**16
MAX_ERROR_CHARACTERS = 1000
CUT_MARK = " [cut]"
LIVE = "live "  # begins the state of an Env that stays in its worker; the worker's mark follows
WORK = "environments.work_environment"
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
    with worker.OF_ENVIRONMENTS.one() as own:
        loaded = own.run(WORK, arguments, worker.START_TIMEOUT_S)
    PRINTS.add(Path(path).stem, loaded.printed)
    problem = loaded.problem or "the process died"
    need(loaded.status == "ok", f"{flag} {path}: cannot be loaded: {problem}")
    return loaded.value


def ask(path: str, state: str, episode: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run one step in a worker, or the reset before turn 1, and wait for it: {status, seconds, texts, reward, done,
    metrics, state}.

    status is ok, crash, timeout or infra_error. After a crash or timeout the policy reads of it in a text, and the
    episode continues with the state before the step. Where the process of a live Env has ended with it, the rollout is
    over and has the rewards so far. An infra_error (OSError, ImportError, a failed reset, a worker killed by something
    else, three times if no Env lived in it) ends the rollout and makes its score missing."""
    arguments = {"path": path, "config": {}, "state": state, "episode": episode}
    for _ in range(TRIES):
        with worker.OF_ENVIRONMENTS.one(state) as own:
            outcome = own.run(WORK, arguments, timeout_s)
            answer = answer_of(outcome, path, state)
            lives_here = own.process is not None and answer["state"] == LIVE + own.mark
            own.keeps = answer["state"] if lives_here else ""
        PRINTS.add(Path(path).stem, outcome.printed)
        if outcome.status != "infra_error":
            break

    is_lost = is_live(answer["state"]) and not lives_here
    if episode["turn"] == 0 and answer["status"] != "ok":
        answer["status"] = "infra_error"
    answer["done"] = answer["done"] or is_lost or answer["status"] == "infra_error"
    why_live = answer.pop("why_live", "")
    if why_live:
        name = f"a rollout of {Path(path).name}"
        problem = f"it keeps a process, and --resume samples unfinished ones again ({why_live})"
        warn_once(name, "live", problem)
    return {"seconds": outcome.seconds} | answer


def answer_of(outcome: worker.Outcome, path: str, state: str | None) -> dict[str, Any]:
    """The answer that a job came to. One that came to none has the state before it."""
    answer = outcome.value
    if outcome.status == "timeout":
        problem = f"no answer within {outcome.seconds:g} s"
        return failed_answer("timeout", problem, path, outcome.seconds, state)
    if outcome.status != "ok":
        problem = outcome.problem or "the process died"
        answer = failed_answer(outcome.status, problem, path, outcome.seconds, state)
    if outcome.status != "ok" or answer["status"] != "ok":
        warn_once(path, answer["status"], answer["texts"][0].removeprefix("Error: "))
    return answer


def is_live(state: str | None) -> bool:
    """Whether a state is that of an Env which stays in its worker."""
    return bool(state) and state.startswith(LIVE)


def release(state: str, timeout_s: float) -> None:
    """A rollout is over: have its Env closed where that is live, in a thread."""
    if state in worker.OF_ENVIRONMENTS.keeping:
        rewards.ENV_THREADS.submit(partial(close_live, state, timeout_s))


def close_live(state: str, timeout_s: float) -> None:
    """Have the worker of a live Env close it. If that fails, as without a close(), the worker ends with all that it has
    started."""
    with worker.OF_ENVIRONMENTS.one(state) as own:
        outcome = own.run("environments.work_close", {}, timeout_s)
        own.keeps = ""
        PRINTS.add("close", outcome.printed)
        if outcome.status != "ok":
            warn_once("an environment's close()", outcome.status, outcome.problem)
            own.kill()


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


KEPT: dict[str, Any] = {}  # the Env that stays in this process, by its state


@functools.cache
def environment(path: str) -> Any:
    """The module of an environment's file."""
    module = load_file(path, f"environment_{Path(path).stem}")  # a name by which pickle finds its classes
    if hasattr(module, "agent"):
        from scripts.parts import agent

        agent.give_env(module)
    if not (hasattr(module, "Env") or hasattr(module, "step")):
        raise ValueError("it defines neither step(episode), nor a class Env, nor agent(base_url, row)")
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
        about = module.about if hasattr(module, "about") else dict
        resets = hasattr(getattr(module, "Env", None), "reset")
        return lambda: {"resets": resets} | about(config)
    if hasattr(module, "prepare"):
        module.prepare(episode["config"])
    return partial(take_step, module, path, state, Episode(**episode))


def take_step(module: Any, path: str, state: str | None, episode: Episode) -> dict[str, Any]:
    """The answer to an episode, as plain data, with the new state."""
    start = time.monotonic()
    env = None if hasattr(module, "Env") else module
    if state:
        env = KEPT.get(state) if is_live(state) else load_state(state)
    try:
        if env is None and state:
            raise ConnectionError("the process in which it lived has ended")
        if env is None:
            env = module.Env(episode.config)
        result = result_of(reset_or_step(env, episode))
    except Exception as error:
        infra = isinstance(error, (OSError, ImportError))  # not the policy's fault, so the policy does not see it
        problem = told(error, path)
        seconds = time.monotonic() - start
        result = failed_answer("infra_error" if infra else "crash", problem, path, seconds, state)

    if env is None or env is module:
        return {"state": None} | result
    after = state_of(env)
    goes_on = result["status"] == "ok" or (not state and is_live(after["state"]))
    return result | after if goes_on else result


def reset_or_step(env: Any, episode: Episode) -> Answer:
    """What an environment answers to an episode, or shows before turn 1."""
    answer = env.step(episode) if episode.turn else env.reset(episode)
    if answer is None:
        return Answer(done=episode.turn > 0)
    return answer if isinstance(answer, Answer) else Answer(answer)


def result_of(answer: Answer) -> dict[str, Any]:
    """An answer as plain data. Raises TypeError, ValueError."""
    result: dict[str, Any] = {"status": "ok"}
    result["texts"] = texts_of(answer)
    result["reward"] = float(answer.reward)
    result["done"] = bool(answer.done)
    result["metrics"] = metrics_of(answer)
    return result


def state_of(env: Any) -> dict[str, str]:
    """The state of an Env: its pickle in base64, if that can be read again and there is nothing to close. Any other Env
    is kept here; `why_live` says why."""
    KEPT.clear()
    why = "it has a close()"
    if not hasattr(env, "close"):
        try:
            state = base64.b64encode(pickle.dumps(env)).decode()
            load_state(state)
            return {"state": state}
        except Exception as error:  # whatever the pickling of an object raises
            why = f"{type(error).__name__}: {error}"
    state = LIVE + os.environ.get(worker.MARK, "")
    KEPT[state] = env
    return {"state": state, "why_live": why}


def work_close() -> Callable[[], None]:
    """The close() of the Env that is kept, which is kept no more. Raises AttributeError, KeyError if there is none."""
    _, env = KEPT.popitem()
    return env.close


def load_state(state: str) -> Any:
    """The Env of a state. Raises UnpicklingError for one that is no plain data."""
    return StateUnpickler(io.BytesIO(base64.b64decode(state))).load()


def texts_of(answer: Answer) -> list[str]:
    """The texts of an answer, together at most MAX_ANSWER_BYTES. Raises TypeError for a value that is not a text."""
    texts = answer.text
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        found = type(answer.text).__name__
        raise TypeError(f"step returned a {found}: a text, rewards.Answer(text, reward=..., done=...) or None is meant")
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
