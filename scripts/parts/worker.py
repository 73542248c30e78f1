"""Worker processes, in which libraries that may hang, crash or exhaust memory meet text of the model.

A worker runs one job at a time and is killed at its deadline. `Worker` starts this file with a socket as standard
input. A job is a line of JSON on the socket: the name of a function of another part, its arguments and a deadline.
rewards.run_in_worker and environments.ask give jobs to the workers.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import queue
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

START_TIMEOUT_S = 120.0  # interpreter start and imports; not part of the deadline
MAX_REPLY_BYTES = 2**26
MAX_PRINTED_BYTES = 2**16  # of a job
JOBS_PER_WORKER = 2000  # sympy's caches grow; a fresh worker costs 0.5 s
WORKER_MEMORY_BYTES = 2 * 2**30
REPLIES = {"ready", "unavailable", "score", "error"}
MARK = "GRPO_WORKER"  # a variable that a worker hands down to all that it starts
CLOSE_S = 5.0  # for what an environment keeps to be closed, when the run stops or is gone

# --- In the trainer ---------------------------------------------------------------------------------------------------


def kill_marked(mark: str) -> None:
    """Kills all other processes of this user that have the mark of a worker: it, and what it has started, whatever
    sessions and parents these have. Linux only."""
    wanted = f"{MARK}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        pid = int(environment.parent.name)
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if pid != os.getpid() and wanted in environment.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


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


class Outcome(NamedTuple):
    """How a job ended. value is what the job returned, nan if it did not. seconds are the job's, without the worker's
    start. printed is what it wrote to its standard streams, its start included."""

    value: Any
    status: str
    seconds: float
    problem: str = ""
    printed: str = ""


class Worker:
    """A child process, started for its first job and again after each kill. Used by one thread at a time."""

    process: subprocess.Popen | None = None
    mark = ""
    keeps = ""  # the name of an environment's object that lives in the process; only jobs for that name get the worker
    start_s = 0.0  # the longest start so far, of any worker
    printed = b""  # by the last job

    def start(self) -> None:
        # A fresh interpreter: fork would copy the trainer's threads, locks and CUDA state, and
        # multiprocessing's spawn would import the trainer's __main__ with torch and vllm.
        command = [sys.executable, os.path.abspath(__file__), "--serve"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        env["PYTHONUNBUFFERED"] = "1"  # what is printed before a crash is not lost
        env.pop("LD_PRELOAD", None)
        self.mark = uuid.uuid4().hex
        env[MARK] = self.mark
        self.socket, child = socket.socketpair()
        self.prints, printed = os.pipe()
        os.set_blocking(self.prints, False)
        self.ready = select.poll()
        for readable in (self.socket.fileno(), self.prints):
            self.ready.register(readable, select.POLLIN)
        self.buffer = b""
        self.num_jobs = 0
        with child:
            # Its own session: Ctrl-C in the terminal must not turn running jobs into crashes.
            self.process = subprocess.Popen(
                command,
                stdin=child.fileno(),
                stdout=printed,
                stderr=printed,
                env=env,
                start_new_session=True,
            )
        os.close(printed)

    def kill(self) -> None:
        """Kills the process, if there is one, and what it has started, and waits for it. The worker's own thread may
        start another one meanwhile."""
        process = self.process
        mark = self.mark
        if process is None:
            return

        with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        kill_marked(mark)
        process.wait()

    def stop(self) -> None:
        """Kills the process and its children, and takes what they have printed last."""
        self.kill()
        self.take_prints()
        self.process = None
        self.socket.close()
        os.close(self.prints)

    def take_prints(self) -> None:
        """Moves what is in the pipe to `printed`, and drops what is too long. A flood is taken in turns."""
        with contextlib.suppress(BlockingIOError, KeyError):  # it is empty; or all closed it, which was seen before
            for _ in range(16):
                chunk = os.read(self.prints, 2**16)
                self.printed += chunk[: MAX_PRINTED_BYTES - len(self.printed)]
                if not chunk:
                    self.ready.unregister(self.prints)

    def receive(self, deadline: float) -> dict:
        """The next reply. Raises TimeoutError at the deadline (time.monotonic), EOFError if the process died or the
        reply is to another job, or none."""
        while b"\n" not in self.buffer:
            seconds = max(deadline - time.monotonic(), 1e-3)
            ready = [descriptor for descriptor, _ in self.ready.poll(1000 * seconds)]
            if not ready:
                raise TimeoutError
            if self.prints in ready:
                self.take_prints()
            if self.socket.fileno() not in ready:
                continue
            chunk = self.socket.recv(65536)
            if not chunk:
                raise EOFError("the worker died")
            self.buffer += chunk
            if len(self.buffer) > MAX_REPLY_BYTES:
                raise EOFError("the worker's reply has no end")
        line, _, self.buffer = self.buffer.partition(b"\n")
        return read_reply(line, self.num_jobs)

    def send(self, work: str, arguments: dict[str, Any], timeout_s: float) -> dict:
        """Sends the job, to a fresh process if needed; returns the first reply. Raises OSError, EOFError."""
        if self.process is None:
            self.start()
        self.num_jobs += 1
        start = time.monotonic()
        line = {"number": self.num_jobs, "work": work, "arguments": arguments, "timeout_s": timeout_s}
        self.socket.settimeout(START_TIMEOUT_S)
        self.socket.sendall(json.dumps(line).encode() + b"\n")
        reply = self.receive(start + START_TIMEOUT_S)
        Worker.start_s = max(Worker.start_s, time.monotonic() - start)
        return reply

    def run(self, work: str, arguments: dict[str, Any], timeout_s: float) -> Outcome:
        """Runs one job, see rewards.Job, whatever the job does to the process."""
        self.printed = b""
        outcome = self.finish(work, arguments, timeout_s)
        if self.process is not None:
            self.take_prints()
        return outcome._replace(printed=self.printed.decode(errors="replace"))

    def finish(self, work: str, arguments: dict[str, Any], timeout_s: float) -> Outcome:
        """The outcome of a job, but for what it printed."""
        is_old = self.process and self.num_jobs >= JOBS_PER_WORKER and not self.keeps
        if is_old or (self.process and self.process.poll() is not None):
            self.stop()
        try:
            reply = self.send(work, arguments, timeout_s)
        except (OSError, EOFError) as error:
            if self.process:
                self.stop()
            problem = self.printed[-1000:].decode(errors="replace").strip()
            return Outcome(math.nan, "infra_error", 0.0, problem or repr(error))
        if "unavailable" in reply:
            return Outcome(math.nan, "infra_error", 0.0, reply["unavailable"])

        start = time.monotonic()
        try:
            reply = self.receive(start + timeout_s)
        except TimeoutError:
            self.stop()
            return Outcome(math.nan, "timeout", timeout_s)
        except (OSError, EOFError):
            return self.after_death(time.monotonic() - start)
        seconds = time.monotonic() - start
        if "error" in reply:
            return Outcome(math.nan, "crash", seconds, reply["error"])
        return Outcome(reply["score"], "ok", seconds)

    def after_death(self, seconds: float) -> Outcome:
        """The outcome of a job whose process died `seconds` after the job began."""
        process = self.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)  # for the exit status of the process itself, before our kill
        self.stop()
        if process.returncode == -signal.SIGKILL:  # a job does not send this signal
            return Outcome(math.nan, "infra_error", seconds, "killed: the machine may be short of memory")
        return Outcome(math.nan, "crash", seconds)


class Workers:
    """Workers that several threads share: at most `most` of them work at a time, and they are started as they are
    needed."""

    def __init__(self, most: float, is_patient: bool) -> None:
        self.most = most
        self.is_patient = is_patient  # waits for an idle one for as long as a start takes, before one is added
        self.all: list[Worker] = []
        self.idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # last in, first out: starts no more than needed
        self.keeping: dict[str, Worker] = {}  # by Worker.keeps
        self.working = 0
        self.changed = threading.Condition()  # guards the number above

    def take(self) -> Worker:
        """An idle worker, or a new one. Quick jobs share a few workers, and slow ones soon have one each."""
        with contextlib.suppress(queue.Empty):
            return self.idle.get(timeout=Worker.start_s if self.is_patient else 0.0)
        worker = Worker()
        self.all.append(worker)
        return worker

    @contextlib.contextmanager
    def one(self, kept: str | None = None) -> Generator[Worker]:
        """One of them, for a block: the one that keeps `kept` if there is one."""
        with self.changed:
            self.changed.wait_for(lambda: self.working < self.most)
            self.working += 1
        worker = self.keeping.pop(kept or "", None) or self.take()
        try:
            yield worker
        finally:
            if worker.keeps:
                self.keeping[worker.keeps] = worker
            else:
                self.idle.put(worker)
            with self.changed:
                self.working -= 1
                self.changed.notify()


OF_VERIFIERS = Workers(math.inf, is_patient=False)  # as many as threads of rewards.JOB_THREADS ask for one
OF_ENVIRONMENTS = Workers(1, is_patient=True)  # vLLM's parsers of tool calls take 7 s and 0.5 GiB in each


def close() -> None:
    """Kills all workers, after those that keep an environment's object have closed it. Only the process: the thread
    that runs a worker owns its socket and files."""
    end = time.monotonic() + CLOSE_S
    keeping = [worker for worker in OF_ENVIRONMENTS.all if worker.keeps]
    for worker in keeping:
        with contextlib.suppress(OSError):  # it has ended
            worker.socket.shutdown(socket.SHUT_RDWR)
    for worker in keeping:
        process = worker.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process is not None:
                process.wait(max(end - time.monotonic(), 0.0))
    for worker in [*OF_VERIFIERS.all, *OF_ENVIRONMENTS.all]:
        worker.kill()


# --- In the worker ----------------------------------------------------------------------------------------------------

ENVIRONMENTS = "scripts.parts.environments"  # loaded where a job was an environment's


def end_with_trainer(protocol: socket.socket) -> None:
    """Ends this process when the trainer is gone, even while a job waits for something. The main thread has CLOSE_S to
    close what an environment keeps."""
    gone = select.poll()
    gone.register(protocol, 0)  # POLLHUP, which says that the other end is closed, is always reported
    gone.poll()
    if ENVIRONMENTS in sys.modules:
        time.sleep(CLOSE_S)
    kill_marked(os.environ[MARK])
    os._exit(1)


def load_work(name: str) -> Callable[..., Callable[[], Any]]:
    """The function named "gym.work_reasoning_gym": work_reasoning_gym of scripts/parts/gym.py."""
    part, function = name.split(".")
    return getattr(importlib.import_module(f"scripts.parts.{part}"), function)


def send(protocol: socket.socket, reply: dict[str, Any]) -> None:
    protocol.sendall(json.dumps(reply).encode() + b"\n")


def set_limit(kind: int, amount: int) -> None:
    """Sets a soft resource limit of this process. No limit on macOS, whose setrlimit refuses RLIMIT_AS."""
    if sys.platform == "darwin":
        return
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(kind, (amount, hard))


def serve() -> None:
    """Serves jobs, a line of JSON each, until the trainer closes the socket or is gone.

    The reply is {"ready": true} as soon as the function of the job has imported and built what it needs (the deadline
    starts there), then {"score": x} or {"error": text}. It is {"unavailable": text} alone if that fails. Each reply has
    the number of its job, so that no late reply is taken for the next one."""
    protocol = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # nothing but this process writes to the protocol
    threading.Thread(target=end_with_trainer, args=(protocol,), daemon=True).start()
    # A child that a tool forks must not keep the socket open, or nobody would hear that this process has died
    os.register_at_fork(after_in_child=functools.partial(os.close, protocol.fileno()))
    with contextlib.suppress(OSError):  # no Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs short, the trainer is not the first
    set_limit(resource.RLIMIT_AS, WORKER_MEMORY_BYTES)
    own = os.getpid()
    with contextlib.suppress(OSError, ValueError):  # the trainer has ended, or a reply is no JSON
        for line in protocol.makefile("r", encoding="utf-8", newline="\n"):
            job = json.loads(line)
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
    if os.getpid() != own:  # a fork that a job's code has let come here
        return
    with contextlib.suppress(Exception):  # there may be none, and nobody hears of one that fails
        sys.modules[ENVIRONMENTS].work_close()()
    kill_marked(os.environ[MARK])
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] != ["--serve"]:
        sys.exit(__doc__)
    serve()
