"""A worker process of rewards.py, in which libraries that may hang, crash or exhaust memory meet text of the model.

rewards.Worker starts this file with a socket as standard input. A job is a line of JSON on the socket: the name of a
function of another part, its arguments and a deadline. rewards.Worker kills this process at the deadline of the job.
"""

import contextlib
import functools
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import rewards

WORKER_MEMORY_BYTES = 2 * 2**30
REPLIES = {"ready", "unavailable", "score", "error"}

# ----------------------------------------------------------------------------------------------------------------------
# In the trainer


def kill(process: subprocess.Popen | None) -> None:
    """Kills a worker and what it has started, which is in its session, and waits for the worker. None is no worker."""
    if process is None:
        return

    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_reply(line: bytes, number: int) -> dict[str, Any]:
    """The reply to a job, see serve. Raises EOFError for one to another job, and for what is no reply: a tool's library
    may have written to the socket."""
    try:
        reply = json.loads(line)
        kinds = REPLIES & reply.keys()
        of_this_job = reply["number"] == number and len(kinds) == 1
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        of_this_job = False
    if not of_this_job:
        raise EOFError("the worker's replies are out of step")
    if "ready" in kinds:
        reply["error"] = "the worker gave no score"  # counts if a score is waited for
    return reply


# ----------------------------------------------------------------------------------------------------------------------
# In the worker


def end_with_trainer(protocol: socket.socket) -> None:
    """Ends this process when the trainer is gone, even while a job waits for something."""
    gone = select.poll()
    gone.register(protocol, 0)  # POLLHUP, which says that the other end is closed, is always reported
    gone.poll()
    os._exit(1)


def take_protocol() -> socket.socket:
    """The socket on fd 0. The standard streams become /dev/null: prints of libraries must neither get into the protocol
    nor fill a disk."""
    protocol = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    return protocol


def load_work(name: str) -> Callable[..., Callable[[], Any]]:
    """The function named "gym.work_reasoning_gym": work_reasoning_gym of scripts/parts/gym.py."""
    part, function = name.split(".")
    return getattr(importlib.import_module(f"scripts.parts.{part}"), function)


def send(protocol: socket.socket, reply: dict[str, Any]) -> None:
    """Sends a reply, a line of JSON."""
    protocol.sendall(json.dumps(reply).encode() + b"\n")


def limit_cpu_time(timeout_s: float) -> None:
    """Sets the kernel's limit for the next job. If the trainer is killed, nobody enforces the deadline; this limit then
    ends a job that lets no other thread run."""
    from scripts.parts import user_files

    seconds = time.process_time() + rewards.START_TIMEOUT_S + timeout_s
    user_files.set_limit(resource.RLIMIT_CPU, int(seconds))


def die_first() -> None:
    """Where memory runs short, the kernel ends this process before the trainer."""
    with contextlib.suppress(OSError):  # no Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


def serve() -> None:
    """Serves jobs, a line of JSON each, until the trainer closes the socket or is gone.

    The reply is {"ready": true} as soon as the function of the job has imported and built what it needs (the deadline
    starts there), then {"score": x} or {"error": text}. It is {"unavailable": text} alone if that fails. Each reply has
    the number of its job, so that no late reply is taken for the next one."""
    from scripts.parts import user_files

    protocol = take_protocol()
    threading.Thread(target=end_with_trainer, args=(protocol,), daemon=True).start()
    # A child that a tool forks must not keep the socket open, or nobody would hear that this process has died
    os.register_at_fork(after_in_child=functools.partial(os.close, protocol.fileno()))
    die_first()
    user_files.set_limit(resource.RLIMIT_AS, WORKER_MEMORY_BYTES)
    for line in protocol.makefile("r", encoding="utf-8", newline="\n"):
        job = json.loads(line)
        limit_cpu_time(job["timeout_s"])
        number = {"number": job["number"]}
        try:
            run = load_work(job["work"])(**job["arguments"])
        except Exception as error:
            reply = {"unavailable": f"{type(error).__name__}: {error}"}
        else:
            send(protocol, number | {"ready": True})
            try:
                reply = {"score": run()}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
        send(protocol, number | reply)


if __name__ == "__main__":
    if sys.argv[1:] != ["--serve"]:
        sys.exit(__doc__)
    serve()
