"""No rank of grpo_fast.py outlives the run: it ends when the launcher is gone, and when nothing moves any more."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher is gone: kill -9 of the launcher must leave no orphans."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() == 1:  # adopted by init, unless the launcher is the first process of a container
        first_process = Path("/proc/1/cmdline").read_text()
        if "grpo_fast.py" not in first_process:
            raise SystemExit("grpo_fast.py: the launcher is gone")


class Watchdog:
    """A thread that ends this process with all its stacks when learner 0 sees nothing move for --stall_timeout_s.
    Learner 0 calls `beat` whenever a message arrives or a step ends. On a stall it tells the other ranks through the
    store."""

    def __init__(self, meeting: Any, name: str, timeout_s: float):
        self.name = name
        self.leads = name == "learner 0"
        self.timeout_s = timeout_s
        self.outstanding: Callable[[], str] = lambda: "no request"
        self.beat()
        if timeout_s > 0:
            self.store = meeting.connect()
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        self.last = time.monotonic()

    def seconds(self) -> float:
        """Since the last beat."""
        return time.monotonic() - self.last

    def _watch(self) -> None:
        while not (self.seconds() > self.timeout_s if self.leads else self.store.check(["stalled"])):
            time.sleep(min(1.0, self.timeout_s / 10))
        message = f"grpo_fast.py: {self.name} (pid {os.getpid()}): stalled"
        if self.leads:
            self.store.set("stalled", "1")
            message += f": nothing moved for {self.seconds():.0f} s. Outstanding: {self.outstanding()}"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        if self.leads:
            time.sleep(3.0)  # the others dump too before the launcher ends them
        os._exit(1)
