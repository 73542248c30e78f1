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
    signal.set_wakeup_fd(-1)  # from here on the ranks answer to signals
    signal.signal(signal.SIGTERM, pass_on)  # torch would kill the ranks, which want to end their step
    signal.signal(signal.SIGINT, pass_on)
    script = os.path.abspath(command[0])
    try:
        with environment_of_ranks():
            elastic_launch(config, sys.executable)(script, *command[1:])
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        code = failure.exitcode
        cause = f"exit code {code}"
        if code < 0:
            cause = f"signal {signal.Signals(-code).name}"
        print(f"{Path(script).name}: {names[rank]} (pid {failure.pid}) died with {cause}", file=sys.stderr)
        status = 128 + PASSED_ON[-1] if PASSED_ON else 1
        raise SystemExit(status) from None


def file_of_ours(name: str) -> str:
    """The path of a new file that only this user's processes can open, in place of torch's store, which listens on all
    interfaces, without a password, and holds a pickle. On Linux the file is gone with this process, however it ends."""
    if sys.platform == "linux":
        return f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}"
    return tempfile.mkstemp(prefix=name)[1]


@contextlib.contextmanager
def environment_of_ranks() -> Generator[None]:
    """In which ranks are started that meet in a file and listen on loopback only. The next program that this process
    starts must not look for that file."""
    before = dict(os.environ)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["GRPO_MEETING"] = file_of_ours("meeting")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def pass_on(number: int, frame: object) -> None:
    """Send a signal to all child processes, which are the ranks. If no rank has started yet, end this process."""
    PASSED_ON.append(number)
    children = child_processes()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    if not children:
        os._exit(128 + number)


def child_processes() -> list[int]:
    """The process ids of all children."""
    if sys.platform == "linux":
        files = Path("/proc/self/task").glob("*/children")
        text = " ".join(file.read_text() for file in files)
    else:
        command = ["pgrep", "-P", str(os.getpid())]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    return [int(pid) for pid in text.split()]
