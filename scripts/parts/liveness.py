"""No rank of grpo_fast.py outlives the run: it ends when the launcher is gone, and when nothing moves any more."""

import ctypes
import faulthandler
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import utils
from scripts.parts import environments


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher is gone: kill -9 of the launcher must leave no orphans."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() == 1:  # adopted by init, unless the launcher is the first process of a container
        first_process = Path("/proc/1/cmdline").read_text()
        if "grpo_fast.py" not in first_process:
            raise SystemExit("grpo_fast.py: the launcher is gone")


def waited_for(outstanding: str) -> str:
    """Who has not answered: the engines that the text on outstanding requests names, or the learners."""
    engines = sorted(set(re.findall(r"\((engine \d+)\)", outstanding)))
    return ", ".join(engines) or "the learners"


def limit_s(args: Any) -> float:
    """--stall_timeout_s, and what an environment or a judge may take by its own flags; 0 is off."""
    longest = 0.0
    if args.has_turns:
        longest = environments.TRIES * args.env_timeout
    if args.llm_judge_model:
        from scripts.parts import judges

        longest += judges.JUDGE_TRIES * args.llm_judge_timeout
    return args.stall_timeout_s and args.stall_timeout_s + longest


SIGNS = 3  # limits without a sign of life after which the others take learner 0 for dead


class Watchdog:
    """Threads that end this process, with all its stacks, when nothing moves for --stall_timeout_s.

    Learner 0 sees what moves: it calls `beat` whenever a message arrives or a step ends. It counts from the first
    message of an engine on, and not while it waits for a disk (utils.UNHURRIED). On a stall it tells the other
    ranks through the store. Its thread also counts there, as a sign of life: when the count stands still for SIGNS
    times the limit, learner 0 itself has been stopped, and the others end."""

    def __init__(self, meeting: Any, name: str, timeout_s: float):
        self.meeting = meeting
        self.name = name
        self.leads = name == "learner 0"
        self.timeout_s = timeout_s
        self.poll_s = min(1.0, timeout_s / 10)
        self.outstanding: Callable[[], str] = lambda: "no request"
        self.told = False  # learner 0 has seen a stall
        self.last = math.inf  # engines and learners are still loading
        if timeout_s > 0:
            self.store = meeting.connect()
            threading.Thread(target=self._watch, daemon=True).start()
            look = self._give_signs if self.leads else self._look_for_signs
            threading.Thread(target=look, args=(timeout_s / 4,), daemon=True).start()

    def beat(self) -> None:
        self.last = time.monotonic()

    def seconds(self) -> float:
        """Since the last beat."""
        return time.monotonic() - self.last

    def _give_signs(self, every_s: float) -> None:
        for count in itertools.count():
            self.store.set("alive", str(count))
            time.sleep(every_s)

    def _look_for_signs(self, every_s: float) -> None:
        """Beat when learner 0 has counted on. A store that is gone with learner 0 may let this thread wait for ever."""
        seen = b""
        while True:
            self.told = self.store.check(["stalled"])
            if self.store.check(["alive"]):
                count = self.store.get("alive")
                if count != seen:
                    self.beat()
                seen = count
            time.sleep(min(self.poll_s, every_s))

    def _watch(self) -> None:
        limits = 1 if self.leads else SIGNS
        while not self.told and self.seconds() <= limits * self.timeout_s:
            if utils.UNHURRIED:
                self.beat()
            time.sleep(self.poll_s)
        message = f"grpo_fast.py: {self.name} (pid {os.getpid()}): stalled"
        if self.leads:
            outstanding = self.outstanding()
            self.meeting.keep_last_words(f"stalled, waiting for {waited_for(outstanding)}")
            self.store.set("stalled", "yes")
            message += f": nothing moved for {self.seconds():.0f} s. Outstanding: {outstanding}"
        elif not self.told:
            message += f": learner 0 has given no sign of life for {self.seconds():.0f} s"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        if self.leads:
            time.sleep(3.0)  # the others dump too before the launcher ends them
        os._exit(1)
