"""Start the ranks of a script on this machine with torch's elastic launcher, which is torchrun's.

    python scripts/parts/launch.py "learner 0,engine 0" grpo_fast.py --flags  a rank for each name

`python grpo_fast.py` starts it so. Other than torchrun it does not kill the ranks on SIGTERM and Ctrl-C, which it hands
on: they end their step first. When one dies the others are ended, and stderr says who it was. Exit status: 0, 1 after a
death, 128 + N after a signal N that was handed on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

PASSED_ON: list[int] = []  # signals


def launch(names: list[str], script: str, *flags: str) -> None:
    """Start a rank for each name; they are this script with these flags."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(names),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGHUP,SIGQUIT",
        shutdown_timeout=3,  # seconds that the other ranks have when one has died
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the ranks write to ours; torch would leave a directory
    )
    signal.set_wakeup_fd(-1)  # now it is the ranks that answer
    for number in (signal.SIGTERM, signal.SIGINT):  # torch would kill the ranks, which want to end their step
        signal.signal(number, pass_on)
    try:
        elastic_launch(config, sys.executable)(os.path.abspath(script), *flags)
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        name, code = names[rank], failure.exitcode
        why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(f"{Path(script).name}: {name} (pid {failure.pid}) died with {why}", file=sys.stderr)
        raise SystemExit(128 + PASSED_ON[-1] if PASSED_ON else 1) from None


def pass_on(number: int, frame: object) -> None:
    """Send a signal to all child processes, the ranks; end where there is none yet."""
    PASSED_ON.append(number)
    if sys.platform == "linux":
        children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children"))
    else:
        children = subprocess.run(["pgrep", "-P", str(os.getpid())], stdout=subprocess.PIPE, text=True).stdout
    for pid in children.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
    if not children.strip():
        os._exit(128 + number)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    launch(sys.argv[1].split(","), *sys.argv[2:])
