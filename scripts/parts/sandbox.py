"""Runs Python programs that may be hostile: no network, no files of others, no other programs, and limited resources.

    python scripts/parts/sandbox.py  # prints what this machine allows, layer by layer

`Sandbox` starts this file as a fork server. Every run is a fork of it, which locks itself down before it reads the
program: what it does then is in scripts/parts/programs.py. Programs, tests and results are in memory files (memfd) that
the server passes on unopened, so no later run finds them in its memory. The trainer compares outputs itself.

Two layers protect the trainer, and neither needs a privilege:

    seccomp   A list of allowed system calls. It lacks sockets, new processes, exec, signals and changes to files.
    Landlock  A run may read beneath the Python installation and the system's libraries only. From Linux 5.13 on.

`Sandbox.start` tries forbidden actions from inside. The caller has to refuse what succeeds, a leak. When the server
ends, the kernel ends every run. Out of scope: kernel bugs, side channels such as timing, and whether a file exists.
Standard library only. Linux on x86_64 and aarch64.
"""

import ctypes
import errno
import gc
import json
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

MEMORY_BYTES = 2**30  # address space of a run, beyond the server's own
OUTPUT_BYTES = 4 * 2**20  # each, for standard output and standard error
STACK_BYTES = 64 * 2**20
MAX_THREADS = 512  # of a run. More than a few have room only if the run makes their stacks small
MAX_TIME_LIMITS = 3  # Later tests of the program are not run: 100 tests of an endless loop would take 100 time limits
START_TIMEOUT_S = 120.0
GRACE_S = 20.0  # for a reply, on a machine that is busy with other work
LOOK_S = 0.05  # between two looks at how much processor time a run has used
PATIENCE = 5  # A step may take this many times its processor time: it may sleep, or wait for a busy machine
WITHOUT_LAYERS: tuple[str, ...] = ()  # for tests: "Landlock" or "seccomp" is left out
# The server imports these modules once, besides those above. Not random and threading, nor what imports them: they hook
# into every fork. So the trainer's side imports subprocess and others where it needs them.
PRELOAD = "array bisect cmath contextlib copy dataclasses enum heapq numbers operator re string typing".split()

# --- Layers. Each function changes the calling process for good, or raises OSError. -----------------------------------

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38


def libc(function: str, *args: int | bytes | ctypes.Array | None) -> int:
    """Calls the C function with integers as whole registers. Raises OSError if it returns -1."""
    c_args = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    result = getattr(LIBC, function)(*c_args)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result


# Allowed system calls, each with its number on x86_64 and on aarch64 (- for none). From linux: arch/x86/entry/
# syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. All other calls are refused, also those of the future.
ALLOWED = """
read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102,
alarm 37 -, setitimer 38 103, getpid 39 172, recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205,
exit 60 93, wait4 61 260, uname 63 160, fsync 74 82, getdents 78 -, getcwd 79 17,
chdir 80 49, readlink 89 -, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
getresuid 118 148, getresgid 120 150, getpgid 121 155, getsid 124 156, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, statfs 137 43, fstatfs 138 44, sched_getparam 143 121,
sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126, gettid 186 178, time 201 -,
futex 202 98, sched_getaffinity 204 123, epoll_create 213 -, getdents64 217 61, set_tid_address 218 96,
restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
epoll_wait 232 -, epoll_ctl 233 21, newfstatat 262 79, readlinkat 267 78, faccessat 269 48, pselect6 270 72,
ppoll 271 73, set_robust_list 273 99, epoll_pwait 281 22, eventfd2 290 19, epoll_create1 291 20, dup3 292 24,
pipe2 293 59, getcpu 309 168, getrandom 318 278, membarrier 324 283, statx 332 291, rseq 334 293, close_range 436 436,
faccessat2 439 439
"""


OPEN_FOR_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x10000
INT = 0xFFFFFFFF  # the kernel reads the lower half of the register only
POINTER = 0xFFFFFFFFFFFFFFFF
# Allowed if these bits of the argument with this index have one of these values
RULES = {
    "open 2 -": (1, OPEN_FOR_CHANGE, [0]),
    "openat 257 56": (2, OPEN_FOR_CHANGE, [0]),
    "clone 56 220": (0, CLONE_THREAD, [CLONE_THREAD]),  # threads, but no processes
    "prlimit64 302 261": (2, POINTER, [0]),  # to new limits
    "sendto 44 206": (4, POINTER, [0]),  # to an address
    "socketpair 53 199": (0, INT, [socket.AF_UNIX]),  # asyncio needs one
    "getsockopt 55 209": (2, INT, [3, 4, 38, 39]),  # the socket's type and error; no pidfd of the peer
    "ioctl 16 29": (1, INT, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]),  # isatty, sizes, close-on-exec
    "fcntl 72 25": (1, INT, [0, 1, 2, 3, 4, 1030]),  # dup and flags; no signals by F_SETOWN
    "prctl 157 167": (0, INT, [PR_SET_NAME]),
}
UNKNOWN = "clone3 435 435, openat2 437 437"  # get ENOSYS: then the C library makes a call whose arguments are visible
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # the column above, AUDIT_ARCH
# Instructions of classic BPF: (code, how many to skip if true, how many if false, constant)
LOAD = 0x20
EQUAL = 0x15
AND = 0x54
ANSWER = 0x06
# What a filter may answer
KILL = 0x80000000
ALLOW = 0x7FFF0000
ERROR = 0x00050000


def check_argument(argument: int, bits: int, values: list[int]) -> list[tuple]:
    """The part of the filter that answers a system call that has a rule."""
    low_half = 16 + 8 * argument
    refused = (ANSWER, 0, 0, ERROR | errno.EPERM)
    block = [(LOAD, 0, 0, low_half), (AND, 0, 0, bits & INT)]
    for index, value in enumerate(values):
        block.append((EQUAL, len(values) - index, 0, value))
    block.append(refused)
    if bits == POINTER:
        block += [(LOAD, 0, 0, low_half + 4), (EQUAL, 1, 0, 0), refused]
    return [*block, (ANSWER, 0, 0, ALLOW)]


def seccomp_program() -> bytes:
    """The filter as classic BPF over struct seccomp_data (nr at 0, arch at 4, arguments at 16, low half first)."""
    column, audit_arch = MACHINES[platform.machine()]
    blocks = {call: [(ANSWER, 0, 0, ERROR | errno.ENOSYS)] for call in UNKNOWN.split(",")}
    blocks |= {call: check_argument(*rule) for call, rule in RULES.items()}
    blocks |= {call: [(ANSWER, 0, 0, ALLOW)] for call in ALLOWED.split(",")}
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit_arch), (ANSWER, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for call, block in blocks.items():
        number = call.split()[column]
        if number != "-":
            program += [(EQUAL, 0, len(block), int(number)), *block]
    program.append((ANSWER, 0, 0, ERROR | errno.EPERM))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


LANDLOCK_CREATE_RULESET = 444  # These numbers are the same on every machine
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3


def allow_to_read(paths: list[str]) -> int:
    """Takes from this process all rights to files but to read beneath these paths. Returns the kernel's ABI version."""
    abi = libc("syscall", LANDLOCK_CREATE_RULESET, 0, 0, 1)
    rights_of_abi = ((1 << 13) - 1, 1 << 13, 1 << 14, 0, 1 << 15)  # each newer version knows more
    attributes = struct.pack("Q", sum(rights_of_abi[:abi]))
    ruleset = libc("syscall", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    for path in paths:
        fd = os.open(path, os.O_PATH)
        rights = READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        if path == os.devnull:
            rights |= WRITE_FILE
        libc("syscall", LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    libc("syscall", LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return abi


# --- The fork server --------------------------------------------------------------------------------------------------


def num_threads(process: int) -> int:
    """Of a process. 0 if /proc hides it: then only its memory limits the threads of a run."""
    try:
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    except OSError:
        return 0


class Server:
    """The fork server process: locks itself down, then answers requests one by one. The runs use Python's streams on 0,
    1 and 2, which the server never used."""

    def __init__(self, options: dict) -> None:
        while os.dup(0) < 16:  # Low numbers stay free for the runs' descriptors
            pass
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from scripts.parts import programs

        sys.path.pop(0)  # no run reads this repository
        self.programs = programs
        self.control = socket.socket(fileno=os.dup(options["control"]))
        sys.path[:] = [os.path.realpath(path) for path in sys.path + options["site"] if os.path.exists(path)]
        # Becomes readable when the trainer ends. The socket may not: a fork of the trainer has it as well.
        self.trainer = os.pidfd_open(os.getppid())
        for module in [*PRELOAD, *options["preload"]]:
            __import__(module)
        self.layers = ["no capabilities", "rlimits"]
        self.lock_down(options["without"])
        self.control.send(json.dumps({"layers": self.layers}).encode())

    def lock_down(self, without: list[str]) -> None:
        """Sets up all layers that apply to the server too, and prepares those of the runs."""
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[0])
        memory = num_pages * resource.getpagesize()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # If the machine runs out of memory, a run has to end rather than the trainer
        libc("capset", struct.pack("II", 0x20080522, 0), bytes(24))
        libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace and no /proc/PID/mem among runs of one user
        if "Landlock" not in without:
            try:
                self.layers.append(f"Landlock ABI {allow_to_read(readable_paths())}")
            except OSError:
                pass  # The kernel lacks Landlock or has it off: Sandbox.start finds what is open then
        self.filter = None
        if "seccomp" not in without and platform.machine() in MACHINES:
            program = seccomp_program()
            self.instructions = ctypes.create_string_buffer(program)
            self.filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(self.instructions))
            self.layers.append("seccomp")
        limit(resource.RLIMIT_AS, memory + MEMORY_BYTES)
        limit(resource.RLIMIT_FSIZE, OUTPUT_BYTES)
        limit(resource.RLIMIT_STACK, STACK_BYTES)
        limit(resource.RLIMIT_NOFILE, 64)
        limit(resource.RLIMIT_CORE, 0)
        self.pid = os.getpid()
        gc.collect()
        gc.freeze()

    def fork(self, role: str, fds: list[int | None], seconds: float) -> int:
        """Starts a locked-down child that has `fds` as descriptors 0, 1, ..., and /dev/null as programs.NULL and where
        they are None. Returns its pid."""
        child = os.fork()
        if child:
            return child
        try:
            os.setsid()
            libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self.pid:  # The server ended before the line above
                os._exit(1)
            # Opened again: flags that a run sets, such as O_NONBLOCK, apply to all who share the open file
            null = os.open(os.devnull, os.O_RDWR)
            fds += [None] * (self.programs.NULL + 1 - len(fds))
            for target, fd in enumerate(fds):
                os.dup2(null if fd is None else fd, target)
            limit(resource.RLIMIT_CPU, math.ceil(seconds) + 1)
            os.closerange(len(fds), 1 << 16)
            if self.filter:
                libc("prctl", PR_SET_SECCOMP, 2, self.filter, 0, 0)
        except BaseException:
            os.kill(os.getpid(), signal.SIGUSR2)  # not the program's fault: the program has not been read yet
        try:
            os._exit(getattr(self.programs, f"do_{role}")())
        finally:
            os._exit(1)

    def run(self, role: str, fds: list[int], seconds: float, steps: int, patience: float) -> dict:
        """Does one run, each of whose steps has `seconds` of processor time, and `patience` times as much of any time.
        The loading and each test is a step, after which the tests write a byte to a pipe; other roles have one step.
        Returns {"exit": status, -signal, or None for a run killed at a limit; "seconds": processor time of each step}.
        """
        children = []
        steps_end, tests_steps = os.pipe()
        if role == "tests":
            program, tests, results = fds
            calls_end, tests_end = socket.socketpair()
            with calls_end, tests_end:
                children.append(self.fork("calls", [None, None, None, program, calls_end.fileno()], seconds * steps))
                test_fds = [None, None, None, tests, tests_end.fileno(), results, tests_steps]
                children.append(self.fork("tests", test_fds, seconds * steps))
        else:
            children.append(self.fork(role, fds, seconds))
        main_end = os.pidfd_open(children[-1])

        ready = []
        done = []
        used = 0.0
        start = time.monotonic()
        while main_end not in ready and used < seconds and time.monotonic() - start < patience * seconds:
            ready, _, _ = select.select([main_end, steps_end, self.trainer, self.control], [], [], LOOK_S)
            if self.trainer in ready or self.control in ready:
                os._exit(0)  # The trainer has ended or closed the socket: PDEATHSIG ends the runs
            # Processor time, as clock_getcpuclockid(3) has the clocks of other processes
            used = sum(time.clock_gettime(~child << 3 | 2) for child in children) - sum(done)
            for child in children:
                if num_threads(child) > MAX_THREADS:
                    os.kill(child, signal.SIGKILL)
            if steps_end in ready:
                os.read(steps_end, 1)
                done.append(used)
                used = 0.0
                start = time.monotonic()

        for fd in {main_end, steps_end, tests_steps, *fds}:
            os.close(fd)
        for child in reversed(children):  # The tests first: they must not see the program end
            os.kill(child, signal.SIGKILL)
        exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if -signal.SIGUSR2 in exits:
            raise OSError("a run could not be locked down")
        has_ended = main_end in ready and used < seconds
        return {"exit": exits[-1] if has_ended else None, "seconds": [round(value, 5) for value in [*done, used]]}

    def serve(self) -> None:
        """Answers requests, [role, seconds, steps, patience] with descriptors, until the trainer closes the socket."""
        while self.trainer not in select.select([self.control, self.trainer], [], [])[0]:
            packet, fds, _, _ = socket.recv_fds(self.control, 4096, 8)
            if not packet:
                return
            role, *limits = json.loads(packet)
            reply = self.run(role, fds, *limits)
            self.control.send(json.dumps(reply).encode())


def limit(kind: int, amount: int) -> None:
    """Sets a resource limit for good, but never raises it."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        amount = min(amount, hard)
    resource.setrlimit(kind, (amount, amount))


# Prints what succeeds, of all that has to be impossible
PROBE = """
import os, socket
def attempt(leak, action, *args):
    try:
        action(*args)
        print(leak)
    except OSError:
        pass
attempt("the network", lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("127.0.0.1", 9)))
attempt("new processes", lambda: os.fork() or os._exit(0))
attempt("changing files", os.open, "/dev/null", os.O_WRONLY)
attempt("reading files", open, "/etc/passwd")
"""
SYSTEM_PATHS = (
    "/lib /lib32 /lib64 /usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo /etc/ld.so.cache /etc/localtime "
    "/dev/null /dev/urandom"
).split()


def readable_paths() -> list[str]:
    """The Python installation and the system's libraries, which a run may read."""
    wanted = [os.path.join(sys.base_prefix, "lib"), *sys.path, *SYSTEM_PATHS]
    return [path for path in wanted if os.path.exists(path)]


# --- The trainer's side -----------------------------------------------------------------------------------------------


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


class Run(NamedTuple):
    """How a program or a test ended. problem: None if it ran to its end or passed. exit: status, or -signal. output,
    error: what it wrote to its first and second memory file. not_plain: the test got what is no plain data.
    is_tests_fault: no program can pass this test. steps: seconds of each step."""

    problem: str | None
    seconds: float
    late: bool = False  # it reached its time limit
    exit: int | None = None
    output: str = ""
    error: str = ""
    not_plain: bool = False
    is_tests_fault: bool = False
    steps: Sequence[float] = ()


NOT_RUN = Run(f"not run: {MAX_TIME_LIMITS} tests exceeded the time limit", 0.0)


class Sandbox:
    """A fork server, which starts when it is needed, and again after it has died. One thread may use it at a time.
    preload: modules that it imports before it locks itself down. layers is known once it has started, leaks
    after `start`."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        self.preload = preload
        self.process = None
        self.layers = []
        self.leaks = []

    def start(self) -> None:
        """Finds the leaks. Raises SandboxError."""
        probe = self.run("program", ["", None, None, PROBE], 10.0)
        if probe.exit != 0:
            raise SandboxError(f"the code sandbox cannot be probed: {probe.problem or probe.error}")
        self.leaks = probe.output.splitlines()

    def launch(self) -> None:
        if sys.platform != "linux":
            raise SandboxError("it needs Linux")
        import subprocess
        import tempfile

        # None of the trainer's own variables. PYTHONHASHSEED: sets have the same order every time
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        site = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        self.socket, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stderr = tempfile.TemporaryFile()
        options = {"control": control.fileno(), "site": site, "preload": self.preload, "without": WITHOUT_LAYERS}
        # -S, -s, -P: no code of the trainer's environment (.pth files, working directory) runs before the layers
        command = [sys.executable, "-S", "-s", "-P", "-X", "utf8", os.path.abspath(__file__)]
        with control:
            self.process = subprocess.Popen(
                [*command, "--serve", json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.stderr,
                pass_fds=[control.fileno()],
                env=env,
                cwd="/",
                start_new_session=True,
            )
        self.layers = self.receive(START_TIMEOUT_S)["layers"]

    def receive(self, seconds: float) -> dict:
        self.socket.settimeout(seconds)
        packet = self.socket.recv(1 << 20)
        if not packet:
            raise SandboxError("the fork server ended")
        return json.loads(packet)

    def exchange(self, role: str, files: list[str | None], seconds: float, steps: int) -> Run:
        """One run in a server that has been launched: see run."""
        fds = []
        try:
            for text in files:
                fd = os.memfd_create("sandbox")
                fds.append(fd)
                os.pwrite(fd, (text or "").encode(errors="replace"), 0)
            request = json.dumps([role, seconds, steps, PATIENCE])
            socket.send_fds(self.socket, [request.encode()], fds)
            reply = self.receive(PATIENCE * seconds * steps + GRACE_S)
            written = [os.pread(fd, OUTPUT_BYTES, 0) for fd, text in zip(fds, files, strict=True) if text is None]
        finally:
            for fd in fds:
                os.close(fd)
        status = reply["exit"]
        used = reply["seconds"][-1]
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        # On a machine with so much to do, a run that did not sleep has got about its share of the processors
        if status is None and load > PATIENCE and PATIENCE * seconds / load / 4 < used < seconds:
            raise SandboxError(f"{load:.3g} programs want each processor: the run got {used:.3g} of {seconds:g} s")
        problem = None
        if status is None:
            problem = f"time limit ({seconds:g} s)"
        elif status < 0:
            problem = f"killed by {signal.Signals(-status).name}"
        texts = [data.decode(errors="replace") for data in written]
        return Run(problem, used, status is None, status, *texts, steps=reply["seconds"])

    def run(self, role: str, files: list[str | None], seconds: float, steps: int = 1) -> Run:
        """Does this role in a process that has memory files as its descriptors 0, 1, ... with these contents, None for
        a file that the process writes. seconds: see Server.run, with PATIENCE. Raises SandboxError; the next run then
        starts the server again. So it does if a caller's own deadline interrupts this run, whose late reply must not
        become the answer to the next one."""
        try:
            if self.process is None or self.process.poll() is not None:
                self.stop()
                self.launch()
            return self.exchange(role, files, seconds, steps)
        except (OSError, ValueError, SandboxError) as error:
            raise SandboxError(f"the code sandbox failed: {error} {self.stop()}".strip()) from None
        except BaseException:
            self.stop()
            raise

    def stop(self) -> str:
        """Ends the server and everything in it. Returns the end of what it wrote to standard error."""
        if self.process is None:
            return ""
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.process = None
        with self.stderr:
            self.stderr.seek(0)
            return self.stderr.read()[-1000:].decode(errors="replace").strip()


class Pool:
    """Sandboxes for many threads. At most `size` run at once, whatever they have preloaded."""

    def __init__(self, size: int) -> None:
        import threading

        self.slots = threading.BoundedSemaphore(size)
        self.idle: dict[tuple[str, ...], list[Sandbox]] = defaultdict(list)  # preload -> fork servers

    def run(self, call: Callable[[Sandbox], Any], preload: tuple[str, ...]) -> Any:
        """The result of call(a sandbox), and the seconds until a slot was free. If the sandbox itself fails, the call
        is repeated once with a new fork server. Raises SandboxError."""
        start = time.monotonic()
        with self.slots:
            waited = time.monotonic() - start
            idle = self.idle[preload]
            try:
                box = idle.pop()
            except IndexError:
                box = Sandbox(preload)
            try:
                return call(box), waited
            except SandboxError:
                return call(box), waited
            finally:
                idle.append(box)

    def stop(self) -> None:
        """Ends the idle fork servers. The next run starts new ones."""
        for boxes in self.idle.values():
            while boxes:
                boxes.pop().stop()


def run_tests(sandbox: Sandbox, program: str, tests: list[str], seconds: float) -> list[Run]:
    """Runs each test (Python statements that use the program's names) for at most `seconds`. If one does not run to its
    end, the processes of program and tests end, and the next test gets new ones. Raises SandboxError."""
    runs = []
    num_late = 0
    while len(runs) < len(tests) and num_late < MAX_TIME_LIMITS:
        left = tests[len(runs) :]
        run = sandbox.run("tests", [program, json.dumps(left), None], seconds, steps=len(left) + 1)
        reason = run.problem or "the tests' process ended"
        lines = [json.loads(line) for line in run.output.splitlines()]
        loading = lines[0][0] if lines else reason
        if loading is not None:
            return runs + [Run(f"loading the program: {loading}", 0.0)] * len(left)
        done = lines[1:]
        times = [*run.steps[1:], *[0.0] * len(done)]  # A process may end before all steps are seen
        for (problem, not_plain, is_tests_fault), elapsed in zip(done, times, strict=False):
            runs.append(Run(problem, elapsed, not_plain=not_plain, is_tests_fault=is_tests_fault))
        # A last test that broke the channel has a result of its own
        has_result = run.exit == 0 and done
        if len(done) < len(left) and not has_result:
            runs.append(Run(reason, run.seconds if run.late else 0.0, run.late))
            num_late += run.late
    return runs + [NOT_RUN] * (len(tests) - len(runs))


def same_line(line: str, expected: str) -> bool:
    """Whether two lines are equal as text, or word by word as numbers."""
    if line.rstrip() == expected.rstrip():
        return True
    try:
        numbers = [[Decimal(word) for word in text.split()] for text in (line, expected)]
        return "_" not in line + expected and numbers[0] == numbers[1]  # not 5_4
    except ArithmeticError:  # a word that is no number, or cannot be compared
        return False


def same_output(output: str, expected: str) -> bool:
    """Whether all lines are equal as text or as numbers, without blanks at their ends (LiveCodeBench)."""
    lines = output.strip().split("\n")
    expected_lines = expected.strip().split("\n")
    return len(lines) == len(expected_lines) and all(map(same_line, lines, expected_lines))


def run_stdio(sandbox: Sandbox, program: str, tests: list[tuple[str, str]], seconds: float) -> list[Run]:
    """Runs the program once for each (input, expected output), for at most `seconds`; see Sandbox.run."""
    runs = []
    num_late = 0
    for stdin, expected in tests:
        if num_late == MAX_TIME_LIMITS:
            runs.append(NOT_RUN)
            continue
        run = sandbox.run("program", [stdin, None, None, program], seconds)
        num_late += run.late
        if run.problem is None and not same_output(run.output, expected):
            error_lines = run.error.strip().splitlines() or ["wrong output"]
            run = run._replace(problem=error_lines[-1][:200])
        runs.append(run._replace(output="", error=""))
    return runs


def main() -> None:
    sandbox = Sandbox()
    try:
        sandbox.start()
    except SandboxError as error:
        sys.exit(str(error))
    print("in force: " + "\n          ".join(sandbox.layers))
    print("open:     " + ("\n          ".join(sandbox.leaks) or "nothing that was tried"))
    sandbox.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        Server(json.loads(sys.argv[2])).serve()
    else:
        main()
