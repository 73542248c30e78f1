"""Start the ranks of grpo_fast.py on this machine, and say last why they ended.

torchrun kills all others half a minute after a rank has died. Here the learners of an engine that died have GRACE_S to
write a checkpoint, once the first step has begun. SIGTERM and Ctrl-C are passed on to the ranks, which end their step
first. The exit status is 0, or 1 after a death, or 128 + N after signal N.

The ranks meet in a store: see Meeting. None outlives the run: it ends when the launcher is gone, and when nothing moves
any more: see Watchdog.
"""

import contextlib
import ctypes
import faulthandler
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import utils

GRACE_S = 600.0  # for learners that have something to save, after the death of an engine
LAST_S = 3.0  # for all others, after the death of a learner
POLL_S = 0.05


def launch(names: list[str], line: list[str]) -> None:
    """Start a rank for each name, learners first. `line` is the script and its flags, the same for all. Returns when
    all have ended well, else raises SystemExit."""
    asked: list[int] = []  # signals that ended the run
    ranks: list[Any] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: asked.append(number))
    signal.set_wakeup_fd(-1)  # from here on the ranks answer to signals
    last_words = file_of_ours("words")
    begun = file_of_ours("begun")
    common = {"GRPO_MEETING": file_of_ours("meeting"), "GRPO_LAST_WORDS": last_words, "GRPO_BEGUN": begun}
    for rank in range(len(names)):
        ranks.append(start(line, environment_of(rank, len(names)) | common))
    passed_on = 0
    deadline = float("inf")
    died: list[int] = []  # ranks, in the order of their deaths
    while any(process.poll() is None for process in ranks):
        for number in asked[passed_on:]:
            passed_on += 1
            for process in ranks:
                send(process, number)
        for rank, process in enumerate(ranks):
            if process.poll() and rank not in died:
                died.append(rank)
                can_save = not names[rank].startswith("learner") and Path(begun).read_text() != ""
                patience = GRACE_S if can_save else LAST_S
                deadline = min(deadline, time.monotonic() + patience)
        if time.monotonic() > deadline:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        time.sleep(POLL_S)
    died += [rank for rank, process in enumerate(ranks) if process.poll() and rank not in died]
    learners = [process for name, process in zip(names, ranks, strict=True) if name.startswith("learner")]
    if any(process.poll() for process in learners):  # an engine that outlives them, or dies at the end, costs nothing
        told = words(died[0], names, last_words)
        print(f"{Path(line[0]).name}: {how_it_died(died[0], names, ranks)}{told}", file=sys.stderr, flush=True)
        raise SystemExit(128 + asked[-1] if asked else 1)


def start(line: list[str], environment: dict[str, str]) -> Any:
    """A rank. In a session of its own: Ctrl-C in the terminal comes from here, once."""
    return subprocess.Popen([sys.executable, *line], env=environment, start_new_session=True)


def environment_of(rank: int, ranks: int) -> dict[str, str]:
    """What a rank has in its environment, by torchrun's names. The ranks meet in a file and listen on loopback only."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    more = {"TORCHELASTIC_RUN_ID": "grpo_fast.py", "PYTHONUNBUFFERED": 1}
    environment = dict(os.environ) | {name: str(value) for name, value in (own | more).items()}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def how_it_died(rank: int, names: list[str], ranks: list[Any]) -> str:
    code = ranks[rank].poll()
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{names[rank]} died with {how}"


def words(first: int, names: list[str], last_words: str) -> str:
    """Why: what the rank that died first has written, else what the first of all that wrote has. Not from the file
    where they meet: torch reads it for ever where a rank was killed as it wrote."""
    lines = Path(last_words).read_text().splitlines()
    lines.sort(key=lambda line: not line.startswith(f"{first} "))
    if not lines:
        return ""
    rank, told = lines[0].split(" ", 1)
    who = "" if int(rank) == first else f"{names[int(rank)]}: "
    return f": {who}{told}"


def file_of_ours(name: str) -> str:
    """The path of a new file that only this user's processes can open, in place of torch's store, which listens on all
    interfaces, without a password, and holds a pickle. On Linux the file is gone with this process, however it ends."""
    if sys.platform == "linux":
        return f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}"
    return tempfile.mkstemp(prefix=name)[1]


def send(process: Any, number: int) -> None:
    """Send a signal to a rank that lives. Ctrl-C reaches it as SIGTERM, which no library that is being imported
    swallows as it may a KeyboardInterrupt."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)


# --- Where the ranks meet


class Meeting:
    """The store in which all ranks meet. Where grpo_fast.py started the ranks, it is a file of this user. With torchrun
    rank 0 hosts it, on a port that the system chooses, and on one node on the loopback device only. Its address is kept
    in the store of torchrun's agents, which outlives restarts of the ranks."""

    def __init__(self, timeout: timedelta):
        self.timeout = timeout
        self.rank = os.environ["RANK"]
        self.file = os.environ.get("GRPO_MEETING", "")
        if self.file:
            self.store = self.connect()
            self.restarted = False
            return
        self.host = os.environ["MASTER_ADDR"]
        self.one_node = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        agents = dist.TCPStore(self.host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=self.timeout)
        if self.one_node:
            self.host = "127.0.0.1"
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if os.environ["RANK"] == "0":
            self._open(agents)
        self.store = self._find(agents)
        self.store.set_timeout(self.timeout)
        self.restarted = int(self.store.get("starts")) > 1

    def _open(self, agents: dist.TCPStore) -> None:
        """Host the store, and write its address into that of the agents."""
        key = uuid.uuid4().hex
        # torch's own socket listens on all interfaces
        self.listener = socket.create_server(("127.0.0.1", 0)) if self.one_node else None
        descriptor = self.listener.fileno() if self.listener else None
        port = self.listener.getsockname()[1] if self.listener else 0
        self.server = dist.TCPStore(
            self.host, port, is_master=True, wait_for_workers=False, timeout=self.timeout, master_listen_fd=descriptor
        )
        self.server.set("key", key)
        self.server.set("starts", str(agents.add("grpo/starts", 1)))
        agents.set("grpo/meeting", f"{self.server.port} {key}")

    def _find(self, agents: dist.TCPStore) -> dist.TCPStore:
        """Connect to the store. The address may still be that of a rank 0 before a restart: then look again."""
        while True:
            port, key = agents.get("grpo/meeting").decode().split()
            self.port = int(port)
            try:
                store = self.connect(timedelta(seconds=5))
                if store.get("key").decode() == key:
                    return store
            except dist.DistError:
                time.sleep(0.5)

    def begin(self) -> None:
        """Tell the launcher that from now on learners have something to save."""
        if self.file:
            Path(os.environ["GRPO_BEGUN"]).write_text("yes")

    def keep_last_words(self, words: str) -> bool:
        """Keep why this rank failed for the launcher, which says so last. Returns whether there is one that does."""
        if self.file:
            with open(os.environ["GRPO_LAST_WORDS"], "a") as file:
                file.write(f"{self.rank} {words}\n")
        return bool(self.file)

    def connect(self, timeout: timedelta | None = None) -> Any:
        """Another connection, for a thread: a client that waits blocks all who use it."""
        timeout = timeout or self.timeout
        if not self.file:
            return dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout)
        store = dist.FileStore(self.file)
        store.set_timeout(timeout)
        return store


# --- A rank ends


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
        from scripts.parts import environments

        longest = environments.TRIES * args.env_timeout
    if args.llm_judge_model:
        from scripts.parts import judges

        longest += judges.JUDGE_TRIES * args.llm_judge_timeout
    return args.stall_timeout_s and args.stall_timeout_s + longest


class Watchdog:
    """Threads that end this process, with all its stacks, when nothing moves for --stall_timeout_s.

    Learner 0 sees what moves: it calls `beat` whenever a message arrives or a step ends. It counts from the first
    message of an engine on, and not while it waits for a disk (utils.UNHURRIED). On a stall it tells the other
    ranks through the store."""

    def __init__(self, meeting: Any, name: str, timeout_s: float):
        self.meeting = meeting
        self.name = name
        self.leads = name == "learner 0"
        self.timeout_s = timeout_s
        self.poll_s = min(1.0, timeout_s / 10)
        self.outstanding: Callable[[], str] = lambda: "no request"
        self.last = math.inf  # engines and learners are still loading
        if timeout_s > 0:
            self.store = meeting.connect()
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        self.last = time.monotonic()

    def seconds(self) -> float:
        """Since the last beat."""
        return time.monotonic() - self.last

    def _is_stalled(self) -> bool:
        """What learner 0 sees, or has told. A store that is gone with learner 0 may let this thread wait for ever."""
        if not self.leads:
            return self.store.check(["stalled"])
        if utils.UNHURRIED:
            self.beat()
        return self.seconds() > self.timeout_s

    def _watch(self) -> None:
        while not self._is_stalled():
            time.sleep(self.poll_s)
        message = f"grpo_fast.py: {self.name} (pid {os.getpid()}): stalled"
        if self.leads:
            outstanding = self.outstanding()
            self.meeting.keep_last_words(f"stalled, waiting for {waited_for(outstanding)}")
            self.store.set("stalled", "yes")
            message += f": nothing moved for {self.seconds():.0f} s. Outstanding: {outstanding}"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        if self.leads:
            time.sleep(3.0)  # the others dump too before the launcher ends them
        os._exit(1)
