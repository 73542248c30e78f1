"""Start the ranks of grpo_fast.py on this machine with torch's elastic launcher, which is torchrun's.

Three things are not as torchrun has them. SIGTERM and Ctrl-C are passed on to the ranks, which end their step first;
torchrun kills them. When a rank dies the others are ended, and stderr names the one that died. The exit status is 0, or
1 after a death, or 128 + N after signal N.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Generator
from pathlib import Path

PASSED_ON: list[int] = []  # numbers of the signals that were passed on to the ranks


def launch(names: list[str], command: list[str]) -> None:
    """Start a rank for each name. `command` is the script and its flags, the same for all."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(names),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=file_of_ours("agents"),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGHUP,SIGQUIT",
        shutdown_timeout=3,  # seconds after a signal; when a rank has died, the others have torch's 30
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the ranks write to our output; else torch makes a directory
    )
    signal.signal(signal.SIGTERM, pass_on)  # torch would kill the ranks, which want to end their step
    signal.signal(signal.SIGINT, pass_on)
    signal.set_wakeup_fd(-1)  # from here on the ranks answer to signals
    script = os.path.abspath(command[0])
    try:
        with environment_of_ranks() as meeting:
            elastic_launch(config, sys.executable)(script, *command[1:])
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        code = failure.exitcode
        cause = f"exit code {code}"
        if code < 0:
            cause = f"signal {signal.Signals(-code).name}"
        cause += told_in(meeting)
        print(f"{Path(script).name}: {names[rank]} (pid {failure.pid}) died with {cause}", file=sys.stderr)
        status = 128 + PASSED_ON[-1] if PASSED_ON else 1
        raise SystemExit(status) from None


def file_of_ours(name: str) -> str:
    """The path of a new file that only this user's processes can open, in place of torch's store, which listens on all
    interfaces, without a password, and holds a pickle. On Linux the file is gone with this process, however it ends."""
    if sys.platform == "linux":
        return f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}"
    return tempfile.mkstemp(prefix=name)[1]


def told_in(meeting: str) -> str:
    """What the ranks' watchdog has written into the file where they meet, behind a colon, or ""."""
    import torch.distributed as dist

    store = dist.FileStore(meeting)
    return f": {store.get('stalled').decode()}" if store.check(["stalled"]) else ""


@contextlib.contextmanager
def environment_of_ranks() -> Generator[str]:
    """In which ranks are started that meet in a file, whose path it yields, and listen on loopback only. The next
    program that this process starts must not look for that file."""
    before = dict(os.environ)
    meeting = file_of_ours("meeting")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["GRPO_MEETING"] = meeting
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield meeting
    finally:
        os.environ.clear()
        os.environ.update(before)


def pass_on(number: int, frame: object) -> None:
    """Send a signal to all child processes, which are the ranks. If there is none yet, end this process. The children
    of this moment may be others, as the verifiers' process is: ranks that start later get the signal too."""
    children = child_processes()
    if not children:
        os._exit(128 + number)
    is_first = not PASSED_ON
    PASSED_ON.append(number)
    for pid in children:
        send(pid, number)
    if is_first:
        threading.Thread(target=pass_on_to_later, args=(number, set(children)), daemon=True).start()


def pass_on_to_later(number: int, known: set[int]) -> None:
    """In a thread: send the signal to each child that is not among the `known`, until this process ends."""
    while True:
        for pid in set(child_processes()) - known:
            send(pid, number)
            known.add(pid)
        time.sleep(0.05)


def send(pid: int, number: int) -> None:
    """Send a signal to a rank. One that still imports its libraries, which may swallow a KeyboardInterrupt, gets
    SIGTERM in place of SIGINT and ends at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number if listens(pid) else signal.SIGTERM)


def listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, as ranks have once their libraries are imported. On Linux; elsewhere
    true."""
    if sys.platform != "linux":
        return True
    with contextlib.suppress(OSError):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


def child_processes() -> list[int]:
    """The process ids of all children."""
    if sys.platform == "linux":
        files = Path("/proc/self/task").glob("*/children")
        text = ""
        for file in files:
            with contextlib.suppress(OSError):  # of a thread that has ended
                text += f" {file.read_text()}"
    else:
        command = ["pgrep", "-P", str(os.getpid())]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    return [int(pid) for pid in text.split()]
