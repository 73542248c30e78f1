"""Upload the model of a run as it ends, with scripts/push_to_hub.py."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import utils


def push_in_process(run_dir: Path) -> None:
    """Upload RUN/model in a process of its own, which SIGTERM ends. Called on rank 0, after everything else. A failure
    is reported with the command that tries again. It does not fail the run: torchrun would train once more."""
    command = [sys.executable, str(utils.REPO / "scripts" / "push_to_hub.py"), str(run_dir)]
    upload = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: upload.terminate())  # nothing is left to save
    status = upload.wait()
    if status:
        problem = f"the upload ended with status {status}; the model is complete in {run_dir / 'model'}"
        repeat = f"WARNING: to upload it: {shlex.join(command)}"
        print(f"WARNING: --push_to_hub: {problem}\n{repeat}", file=sys.stderr, flush=True)
