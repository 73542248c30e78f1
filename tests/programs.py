"""The project's programs in processes of their own, forked from one that has imported torch and vLLM once: most of a
short run is these imports. What is killed, timed out or waited for is a real process with its own environment, working
directory, standard output and exit status. A test whose point is a start from nothing uses subprocess."""

import atexit
import contextlib
import fcntl
import functools
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")


@functools.cache
def serve():
    """The address of the process that is forked, a Python that imports tests/imported.py. All processes that share out
    the tests have one, which the first starts and which lives as long as any of them."""
    server, place = multiprocessing.forkserver._forkserver, Path(os.environ["TESTS_SHARE"])  # of tests/conftest.py
    with (place / "server").open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        if said := known.read():
            address, pipe = said.split("\n")
            with contextlib.suppress(OSError):  # nobody who has it lives
                server._forkserver_alive_fd = os.open(pipe, os.O_WRONLY)  # ty: ignore[missing-attribute]
                connect(address)
                return address
        address = start_server()
        if not multiprocessing.util.is_abstract_socket_namespace(address):
            (place / "socket").unlink(missing_ok=True)
            os.link(address, place / "socket")  # whoever started it may end before the others, and its directory too
            address = str(place / "socket")
        known.truncate(0)
        known.write(f"{address}\n/proc/{os.getpid()}/fd/{server._forkserver_alive_fd}")  # ty: ignore[missing-attribute]
        return address


def start_server():
    """Start that process: its address."""
    FORKS.set_forkserver_preload(["tests.imported"])
    # OpenMP reads it at the import; a program that asks for more threads is given them in play
    more = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    }
    before = dict(os.environ)
    os.environ.update(more)
    try:
        with contextlib.chdir(REPO):
            multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return multiprocessing.forkserver._forkserver._forkserver_address  # ty: ignore[missing-attribute]


def fork_ranks(address, children):
    """Have torchrun, or grpo_fast.py's launcher, in this process fork its ranks as well: where it was forked, or as its
    `children`, which end with it and hear its signals."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from scripts.parts import launch

    connect(address)
    out, err = (f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2))
    how = {"address": address, "context": multiprocessing.get_context("fork")} if children else {"address": address}
    SubprocessHandler._popen = lambda self, args, env: Program(
        [word for word in args[1:] if word != "-u"], out, err, **how, **env
    )
    launch.start = lambda line, environment: Program(line, out, err, **how, **environment)
    SubprocessHandler.close = lambda self, death_sig=None: self.proc.send_signal(death_sig or signal.SIGTERM)


def connect(address):
    """Have this process fork its programs from the one at this address."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address, server.ensure_running = address, lambda: None  # ty: ignore[missing-attribute]
    if server._forkserver_alive_fd is None:  # ty: ignore[missing-attribute]
        # a forked process is given one, and this one is no child of the process that forks
        server._forkserver_alive_fd = os.dup(1)  # ty: ignore[missing-attribute]


FORKED = "grpo.py | grpo_fast.py"
SERVERS = "-m"  # vLLM's


def python_that_forks(path, more="none"):
    """Write a program that runs `python LINE` in a process forked from ours, for shell scripts that find it on PATH and
    for PYTHON_OF_FORKS. Lines that begin with another program than FORKED and `more` get a Python of their own."""
    fork = f'"{sys.executable}" -m tests.programs "{serve()}"'
    lines = f'case "$1" in {FORKED} | {more}) cd "{REPO}" && exec {fork} "$@" ;; esac\nexec "{sys.executable}" "$@"\n'
    path.write_text(f"#!/bin/sh\n{lines}")
    path.chmod(0o755)
    return path


def run_program(fresh, name, *arguments, seconds=None, address=None):
    """As utils.run_program, which is `fresh`. States, which import torch, are forked. Reports, half a second each, are
    not drawn: runs that start from nothing have theirs."""
    if name == "reports/curves.py":
        return ""
    if name != "align/states.py":  # a Python of its own reads more of the environment
        return fresh(name, *arguments, seconds=seconds)
    done = run([f"scripts/{name}", *arguments], seconds or 120, address)
    return done.stderr.strip() if done.returncode else ""


def end_with(pid):
    """Kill this process when that one is gone, as the kernel does with ranks that are its children."""
    gone = os.pidfd_open(pid)

    def watch():
        select.select([gone], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def fork_engines(children):
    """Have vLLM's server in this process fork its engine, which ends with it, where it would start a Python. One of the
    `children` is ended with its group, and so is its engine."""
    from vllm.v1.engine import utils as engine

    engine.get_mp_context = lambda: multiprocessing.get_context("fork")
    if not children:
        os.register_at_fork(after_in_child=functools.partial(end_with, os.getpid()))


def read_hub_variables():
    """Have huggingface_hub read the variables of this process: it has read those of the process that forks."""
    from huggingface_hub import constants, hf_api

    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT


def play(line, env, out, err, address, children, launcher, stdin):
    """`python *line` in this forked process."""
    import torch

    import utils
    from tests import imported

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a program of a terminal
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a launcher's handlers are not its children's
        signal.signal(number, signal.SIG_DFL)
    multiprocessing.current_process().name = "MainProcess"
    tempfile.tempdir = None  # TMPDIR may be another one
    defaults = {name: value for name, value in os.environ.items() if name not in imported.ENVIRONMENT}  # utils' own
    os.environ.clear()
    os.environ.update(defaults | env)
    os.chdir(REPO)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for path, number, flags in ((f"/proc/{launcher}/fd/0", 0, os.O_RDONLY), (out, 1, write), (err, 2, write)):
        if stdin and not number:
            os.dup2(stdin.fileno(), number)
        elif number or launcher:
            descriptor = os.open(path, flags)
            os.dup2(descriptor, number)
            os.close(descriptor)
    if address:
        fork_ranks(address, children)
        utils.run_program = functools.partial(run_program, utils.run_program, address=address)
    if launcher:
        end_with(launcher)
    if "PIDS" in env:
        Path(env["PIDS"], str(os.getpid())).write_text("".join(f"{name}={value}\0" for name, value in env.items()))
    if "HF_ENDPOINT" in env:
        read_hub_variables()
    sys.executable = env.get("PYTHON_OF_FORKS", sys.executable)  # with which it starts other programs
    hooks = Path(env.get("PYTHONPATH", "").split(os.pathsep)[0] or os.devnull, "sitecustomize.py")
    if hooks.exists():  # which a Python of its own would have imported
        exec(compile(hooks.read_text(), str(hooks), "exec"), {"__name__": "sitecustomize"})
    how, *sys.argv = line if line[0] in ("-c", "-m") else ("", *line)
    try:
        if how == "-c":
            source, sys.argv[0] = sys.argv[0], "-c"
            exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
        elif how == "-m":
            if "vllm" in sys.argv[0]:
                fork_engines(children)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str((REPO / line[0]).parent))
            runpy.run_path(line[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing would not
        if "TORCHELASTIC_RUN_ID" in env:  # an interpreter takes as long, in which the launcher sees who died first
            time.sleep(0.5)


class Program:
    """As a subprocess.Popen of [sys.executable, *line] in the root of the repository, its output in files. With the
    `address` of the process that is forked, ranks that it starts are forked too: from there, or as its `children`. With
    a `launcher` it ends with that process, and has its standard input, which is given here if it is a socket."""

    def __init__(
        self, line, out, err=None, address=None, children=False, launcher=None, stdin=None, context=FORKS, **env
    ):
        if not address:
            serve()
        self.line = list(map(str, line))
        environment = dict(os.environ) | {name: str(value) for name, value in env.items()}
        arguments = self.line, environment, str(out), str(err or out), address, children, launcher, stdin
        self.process = context.Process(target=play, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        """Its exit status, -N after signal N, or None."""
        return None if self.process.is_alive() else self.process.exitcode

    def wait(self, timeout=600):
        """Its exit status. Where that does not come: subprocess.TimeoutExpired, after killing it."""
        self.process.join(timeout)
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            raise subprocess.TimeoutExpired(self.line, timeout)
        return self.process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def living(directory):
    """pid -> environment of each process forked with PIDS=directory that lives."""
    found = {}
    for path in Path(directory).iterdir():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(path.name)] = path.read_text()
    return found


def torchrun(ranks):
    """The beginning of a line that starts several ranks; nothing for none."""
    line = ["-m", "torch.distributed.run", "--log-dir", os.devnull, "--standalone", f"--nproc_per_node={ranks}"]
    return line if ranks else []


def run(line, timeout=600, address=None, **env):
    """As subprocess.run of [sys.executable, *line] with captured text; ranks are forked too."""
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        status = Program(line, out, err, address or serve(), **env).wait(timeout)
        return subprocess.CompletedProcess(line, status, *(path.read_text(errors="replace") for path in (out, err)))


if __name__ == "__main__":
    from tests import programs  # the forked process imports it by this name

    programs.connect(sys.argv[1])
    out, err = (f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2))
    given = socket.socket(fileno=0) if stat.S_ISSOCK(os.fstat(0).st_mode) else None  # a socket cannot be opened
    program = programs.Program(sys.argv[2:], out, err, sys.argv[1], launcher=os.getpid(), stdin=given)
    signal.signal(signal.SIGTERM, lambda number, _: program.send_signal(number))
    sys.exit(program.wait())


def is_alive(pid):
    """Whether a process has not ended."""
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
