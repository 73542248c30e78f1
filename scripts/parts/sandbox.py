"""Runs Python programs that may be hostile: no network, no files of others, no other programs, and limited resources.

    python scripts/parts/sandbox.py  # prints what this machine allows, layer by layer

`Sandbox` starts this file as a fork server, a small Python process of its own. Every run is a fork of the server, which
locks itself down (rlimits, Landlock, seccomp, no_new_privs) before it reads the program. The server itself is in
namespaces of its own where the machine allows them. It never reads the content of a run: programs, inputs, tests and
results travel in memory files (memfd) that it passes on unopened, so no later run finds them in its memory. The trainer
gets the files back with an exit status and a time, and judges outputs itself. Expected outputs are never sent.

Tests that call a program's functions run in a second such process. Only plain data passes between the two, so the
program has no part in a comparison: see Program.

Three layers protect the trainer. Each alone stops most attacks:

    seccomp     A list of allowed system calls. It lacks sockets, new processes, exec, signals and changes to files.
    Landlock    A run may read beneath the Python installation and the system's libraries only.
    namespaces  The file system contains these directories only, and is read-only. There is no network device. The
                process sees no other processes. When the server ends, the kernel ends every process inside.

`do_probe` tries the forbidden actions from inside at every start. An action that succeeds is a leak, and the caller has
to refuse leaks. Out of scope: kernel bugs, and side channels such as timing. Standard library only. Linux on x86_64 and
aarch64. Sources: kernel.org, userspace-api/landlock and seccomp_filter; man7.org, namespaces(7), pid_namespaces(7).
"""

import _thread
import ast
import atexit
import builtins
import ctypes
import errno
import functools
import gc
import io
import itertools
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
import traceback
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, timedelta
from datetime import time as datetime_time
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

MEMORY_BYTES = 2**30  # address space of a run, beyond the server's own
OUTPUT_BYTES = 4 * 2**20  # each, for standard output and standard error
FRAME_BYTES = 16 * 2**20  # for one message between a test and the program
STACK_BYTES = 64 * 2**20
MAX_THREADS = 512  # threads and processes of all runs of a server, where the user's other threads are not counted
MAX_TIME_LIMITS = 3  # Later tests of the program are not run: 100 tests of an endless loop would take 100 time limits
START_TIMEOUT_S = 120.0
GRACE_S = 20.0  # for a reply, on a machine that is busy with other work
LOOK_S = 0.05  # between two looks at a run that seems late
PATIENCE = 20  # A run may take this many times its limit while others have the processors; then the machine has failed
NOBODY = 65534
FIRST_USER = 2_000_000_000  # If we are root, each server's runs have a user of their own, numbered from here
MAKERS_OF_ROWS = ("reasoning_gym",)  # packages: see hidden_paths
# The server imports these modules once, besides those above. It does not import random and threading, or modules that
# import them: they hook into every fork, and most programs do not need them. Neither does this file: the trainer's side
# imports subprocess and others where it needs them.
PRELOAD = "array bisect cmath contextlib copy dataclasses enum heapq numbers operator re string typing".split()

# ----------------------------------------------------------------------------------------------------------------------
# Layers. Each function changes the calling process for good, or raises OSError.

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


class Rule(NamedTuple):
    """Allows a system call if its argument with index `argument` is one of `values`. Otherwise the call gives `error`.

    bits: only these bits of the argument count; 0: all of them. pointer: the upper half has to be 0 as well.
    """

    argument: int
    bits: int
    values: list[int]
    error: int = errno.EPERM
    pointer: bool = False


OPEN_FOR_CHANGE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x10000
RULES = {
    "open 2 -": Rule(1, OPEN_FOR_CHANGE, [0], errno.EACCES),
    "openat 257 56": Rule(2, OPEN_FOR_CHANGE, [0], errno.EACCES),
    "clone 56 220": Rule(0, CLONE_THREAD, [CLONE_THREAD]),  # threads, but no processes
    "prlimit64 302 261": Rule(2, 0, [0], pointer=True),  # to new limits
    "sendto 44 206": Rule(4, 0, [0], pointer=True),  # to an address
    "socketpair 53 199": Rule(0, 0, [socket.AF_UNIX]),  # asyncio needs one
    "getsockopt 55 209": Rule(2, 0, [3, 4, 38, 39]),  # the socket's type and error; no pidfd of the peer
    "ioctl 16 29": Rule(1, 0, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]),  # isatty, sizes, close-on-exec
    "fcntl 72 25": Rule(1, 0, [0, 1, 2, 3, 4, 1030]),  # dup and flags; no signals by F_SETOWN
    "prctl 157 167": Rule(0, 0, [PR_SET_NAME]),
}
UNKNOWN = "clone3 435 435, openat2 437 437"  # get ENOSYS: then the C library makes a call whose arguments are visible
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column above, AUDIT_ARCH
# Instructions of classic BPF: (code, how many to skip if true, how many if false, constant)
LOAD = 0x20
EQUAL = 0x15
AND = 0x54
ANSWER = 0x06
# What a filter may answer
KILL = 0x80000000
ALLOW = 0x7FFF0000
ERROR = 0x00050000


def number(call: str) -> int | None:
    """The number on this machine of a system call that is given as "name x86_64 aarch64"."""
    column, _ = MACHINES[platform.machine()]
    text = call.split()[1 + column]
    return None if text == "-" else int(text)


def answer(action: int) -> tuple:
    return ANSWER, 0, 0, action


def check_argument(rule: Rule) -> list[tuple]:
    """The part of the filter that answers a system call that has a rule."""
    low_half = 16 + 8 * rule.argument
    refused = answer(ERROR | rule.error)
    block = [(LOAD, 0, 0, low_half)]
    if rule.bits:
        block.append((AND, 0, 0, rule.bits))
    for index, value in enumerate(rule.values):
        block.append((EQUAL, len(rule.values) - index, 0, value))
    block.append(refused)
    if rule.pointer:
        block += [(LOAD, 0, 0, low_half + 4), (EQUAL, 1, 0, 0), refused]
    return [*block, answer(ALLOW)]


def seccomp_program() -> bytes:
    """The filter as classic BPF over struct seccomp_data (nr at 0, arch at 4, arguments at 16, low half first)."""
    _, audit_arch = MACHINES[platform.machine()]
    blocks = {call: [answer(ERROR | errno.ENOSYS)] for call in UNKNOWN.split(",")}
    blocks |= {call: check_argument(rule) for call, rule in RULES.items()}
    blocks |= {call: [answer(ALLOW)] for call in ALLOWED.split(",")}
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit_arch), answer(KILL), (LOAD, 0, 0, 0)]
    for call, block in blocks.items():
        nr = number(call)
        if nr is not None:
            program += [(EQUAL, 0, len(block), nr), *block]
    program.append(answer(ERROR | errno.EPERM))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


# These numbers are the same on every machine
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
READ_FILE = 1 << 2
READ_DIR = 1 << 3


def landlock_ruleset(readable: list[str], hidden: list[str]) -> tuple[int, int]:
    """(descriptor of a ruleset that allows only to read beneath these paths, ABI version of the kernel).

    A directory of a hidden one may be listed, and the others in it be read."""
    abi = libc("syscall", LANDLOCK_CREATE_RULESET, 0, 0, 1)
    file_rights = (1 << 13) - 1
    for bit, first_abi in ((13, 2), (14, 3), (15, 5)):
        if abi >= first_abi:
            file_rights |= 1 << bit
    size = 8
    if abi >= 4:
        size = 16
    if abi >= 6:
        size = 24
    attributes = struct.pack("QQQ", file_rights, 3, 3)[:size]  # files, TCP, IPC
    ruleset = libc("syscall", LANDLOCK_CREATE_RULESET, attributes, size, 0)
    parents = {os.path.dirname(path) for path in hidden}
    for parent in parents:
        inside = {os.path.join(parent, name) for name in os.listdir(parent)}
        readable = [*readable, *(inside - set(hidden))]
    for path in readable:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = 0 if path in parents else READ_FILE
        if os.path.isdir(path):
            rights |= READ_DIR
        libc("syscall", LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    return ruleset, abi


CLONE_NEWNS = 0x20000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
NO_DEVICES = os.ST_NOSUID | os.ST_NODEV  # The flags of statvfs are those of mount, except for relatime
KEPT_FLAGS = NO_DEVICES | os.ST_RDONLY | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
READ_ONLY = MS_REMOUNT | MS_BIND | os.ST_RDONLY
MNT_DETACH = 2


def enter_namespaces(readable: list[str], hidden: list[str]) -> tuple[str, int]:
    """Continues in a child process that is pid 1 of new namespaces, with a root directory of `readable` alone, in which
    `hidden` are empty.

    The parent waits for the child. Returns the name of this layer and own_proc().
    """
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid = os.getuid()
    gid = os.getgid()
    user = ""
    try:
        libc("unshare", flags)
    except OSError:  # We are not privileged: only with a user namespace
        libc("unshare", flags | CLONE_NEWUSER)
        user = "user+"
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()
    if child:
        os.closerange(3, 4096)  # The server's end of the socket has to close when the child ends
        _, status = os.waitpid(child, 0)
        os._exit(min(status, 1))
    proc = own_proc()
    build_root(readable, hidden)
    return f"{user}pid+net+mount+ipc namespaces", proc


# These numbers are the same on every machine
FSOPEN = 430
FSCONFIG = 431
FSMOUNT = 432


def own_proc() -> int:
    """A descriptor of the namespace's /proc, which is not mounted anywhere, so that no run finds it.

    -1 if the kernel refuses, for instance in a container that hides parts of /proc.
    """
    try:
        context = libc("syscall", FSOPEN, b"proc", 1)
        libc("syscall", FSCONFIG, context, 6, None, None, 0)  # creates the file system
        proc = libc("syscall", FSMOUNT, context, 1, os.ST_RDONLY | NO_DEVICES | os.ST_NOEXEC)
        os.close(context)
        return proc
    except OSError:
        return -1


def mount_read_only(fd: int, target: str) -> None:
    """Mounts the file or directory of this descriptor at the path, and closes the descriptor."""
    source = f"/proc/self/fd/{fd}"
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(target):
        os.close(os.open(target, os.O_CREAT))
    libc("mount", source.encode(), target.encode(), None, MS_BIND | MS_REC, None)
    source_flags = os.statvfs(target).f_flag
    flags = source_flags & KEPT_FLAGS  # A user namespace may not drop them
    if source_flags & os.ST_RELATIME:
        flags |= MS_RELATIME
    libc("mount", None, target.encode(), None, READ_ONLY | flags, None)
    os.close(fd)


def build_root(readable: list[str], hidden: list[str]) -> None:
    """Makes a read-only file system that contains only `readable` the root directory. `hidden` are empty in it."""
    root = "/tmp"  # exists on every machine, and nothing is written to it: the new root is mounted here
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in readable]  # A path may be beneath `root`
    links = {path: os.readlink(path) for path in ("/lib", "/lib32", "/lib64") if os.path.islink(path)}
    libc("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    libc("mount", b"tmpfs", root.encode(), b"tmpfs", NO_DEVICES, b"size=1m,mode=755")
    for path, fd in sources:
        mount_read_only(fd, root + path)
    for path in hidden:
        libc("mount", b"tmpfs", (root + path).encode(), b"tmpfs", os.ST_RDONLY | NO_DEVICES, b"size=4k,mode=755")
    for path, link in links.items():
        os.symlink(link, root + path)
    os.chdir(root)
    libc("pivot_root", b".", b".")
    libc("umount2", b".", MNT_DETACH)
    os.chdir("/")
    libc("mount", None, b"/", None, READ_ONLY | NO_DEVICES, None)


def drop_privileges(readable: list[str], own_user: int) -> str:
    """As root: becomes `own_user`, else nobody, else root without any capability. Returns the name of this layer.

    A user is taken only if it can read the installation. The kernel counts threads by user: if all servers had the same
    user, one run could use up the threads of all.
    """
    os.setgroups([])
    for user in (own_user, NOBODY, 0):
        try:
            os.setresgid(user, user, 0)
            os.setresuid(user, user, 0)  # The saved user allows us to return
        except OSError:  # The container does not know this user
            continue
        if user == 0 or all(os.access(path, os.R_OK) for path in readable):
            break
        os.setresuid(0, 0, 0)
    os.setresuid(user, user, user)
    os.setresgid(user, user, user)
    if user == 0:
        drop_capabilities()
    return {own_user: "a user of its own", NOBODY: "user nobody", 0: "root without capabilities"}[user]


def drop_capabilities() -> None:
    libc("capset", struct.pack("II", 0x20080522, 0), bytes(24))


# ----------------------------------------------------------------------------------------------------------------------
# The fork server


NULL = -1  # in place of a descriptor


class Clock:
    """The own time of processes: without the seconds in which they waited for a processor that others had."""

    def __init__(self) -> None:
        self.files: list[int] = []
        self.seconds = 0.0
        self.start()

    def start(self) -> None:
        self.seconds = 0.0
        self.past = 0.0  # the own time, with a wait that has not ended
        self.current_wait = 0.0
        self.last = time.monotonic()
        self.counts = self.read_counts()

    def read_counts(self) -> list[int]:
        """[how long the processes ran, how long they waited for a processor] in ns; zeros if the kernel counts none."""
        texts = [os.pread(file, 100, 0) for file in self.files[::2]]
        counts = [[*map(int, text.split()), 0, 0][:2] for text in texts]
        return [sum(column) for column in zip(*counts, strict=True)] or [0, 0]

    def is_ready(self) -> bool:
        """Whether a process runs or is ready to run."""
        texts = [os.pread(file, 100, 0) for file in self.files[1::2]]
        return any(text.rpartition(b")")[2].split()[:1] == [b"R"] for text in texts)

    def look(self) -> None:
        """Sets `seconds`. The kernel counts a wait when it ends: of a process that is ready, the time since the last
        look in which it did not run may be such a wait."""
        now = time.monotonic()
        is_ready = self.is_ready()
        counts = self.read_counts()
        ran, waited = ((new - old) / 1e9 for new, old in zip(counts, self.counts, strict=True))
        self.past += now - self.last - waited
        idle = max(now - self.last - ran - waited, 0.0)
        if not is_ready or not counts[0]:
            self.current_wait = 0.0
        elif ran or waited:
            self.current_wait = idle
        else:
            self.current_wait += idle
        self.seconds = max(self.past - self.current_wait, 0.0)
        self.last = now
        self.counts = counts


class Server:
    """The fork server process: locks itself down, then answers requests one by one.

    Its own descriptors 0 and 1 are /dev/null. The runs use Python's streams on 0, 1 and 2, which the server never used.
    """

    def __init__(self, options: dict) -> None:
        while os.dup(0) < 16:  # Low numbers stay free for the runs' descriptors
            pass
        self.control = socket.socket(fileno=os.dup(options["control"]))
        os.close(options["control"])
        sys.path[:] = [os.path.realpath(path) for path in sys.path + options["site"] if os.path.exists(path)]
        self.trainer_pid = os.getppid()
        self.own_user = FIRST_USER + os.getpid()
        # Becomes readable when the whole trainer ends. PR_SET_PDEATHSIG fires when the thread that started us ends.
        self.trainer = os.pidfd_open(self.trainer_pid)
        for module in [*PRELOAD, *options["preload"]]:
            __import__(module)
        self.layers = []
        try:
            self.lock_down(options["without"], hidden_paths(options["preload"]))
        except OSError as error:
            self.control.send(json.dumps({"failed": str(error)}).encode())
            raise
        self.control.send(json.dumps({"layers": self.layers}).encode())

    def lock_down(self, without: list[str], hidden: list[str]) -> None:
        """Sets up all layers that apply to the server too, and prepares those of the runs. hidden: see hidden_paths."""
        with open("/proc/self/statm") as file:
            num_pages = int(file.read().split()[0])
        memory = num_pages * resource.getpagesize()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # If the machine runs out of memory, a run has to end rather than the trainer
        readable = readable_paths()
        in_user_namespace = False
        os.chdir("/")
        if "namespaces" in without:
            self.proc = os.open("/proc", os.O_PATH)
        else:
            layer, self.proc = enter_namespaces(readable, hidden)
            self.layers.append(layer)
            in_user_namespace = layer.startswith("user")

        self.ruleset = -1
        if "Landlock" not in without:
            try:
                self.ruleset, abi = landlock_ruleset(readable, hidden)
                self.layers.append(f"Landlock ABI {abi}")
            except OSError:
                pass  # The kernel lacks Landlock or has it off: `do_probe` finds what is open then

        if os.getuid() == 0:
            self.layers.append(drop_privileges(readable, self.own_user))
        elif in_user_namespace:
            drop_capabilities()
        libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace and no /proc/PID/mem among runs of one user
        if os.getpid() == 1:
            libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        self.filter = None
        if "seccomp" not in without and platform.machine() in MACHINES:
            program = seccomp_program()
            self.instructions = ctypes.create_string_buffer(program)
            self.filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(self.instructions))
            self.layers.append("seccomp")
        # Whether the kernel counts the runs' threads apart from the user's other threads
        version = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
        self.limits_threads = os.getuid() in (self.own_user, NOBODY) or in_user_namespace and version >= (5, 14)
        limit(resource.RLIMIT_AS, memory + MEMORY_BYTES)
        limit(resource.RLIMIT_FSIZE, OUTPUT_BYTES)
        limit(resource.RLIMIT_STACK, STACK_BYTES)
        limit(resource.RLIMIT_NOFILE, 64)
        limit(resource.RLIMIT_CORE, 0)
        self.layers.append("rlimits")
        self.pid = os.getpid()
        gc.collect()
        gc.freeze()

    def fork(self, role: str, fds: list[int], seconds: float) -> int:
        """Starts a locked-down child that has `fds` as descriptors 0, 1, ... and does ROLES[role]. Returns its pid."""
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
            for target, fd in enumerate([*fds, NULL]):
                os.dup2(null if fd == NULL else fd, target)
            limit(resource.RLIMIT_CPU, math.ceil(seconds) + 1)
            if self.limits_threads:
                limit(resource.RLIMIT_NPROC, MAX_THREADS)
            if self.ruleset >= 0:
                libc("syscall", LANDLOCK_RESTRICT_SELF, self.ruleset, 0)
            self.null = len(fds)
            os.closerange(self.null + 1, 1 << 16)
            if self.filter:
                libc("prctl", PR_SET_SECCOMP, 2, self.filter, 0, 0)
        except BaseException:
            os.kill(os.getpid(), signal.SIGUSR2)  # not the program's fault: the program has not been read yet
        try:
            os._exit(ROLES[role](self))
        finally:
            os._exit(1)

    def watch(self, clock: Clock, process: int) -> None:
        """Lets the clock look at this process too, if it can."""
        names = [f"{process}/schedstat", f"{process}/stat"]
        try:
            clock.files += [os.open(name, os.O_RDONLY, dir_fd=self.proc) for name in names]
        except OSError:
            pass  # The clock is one of wall time

    def run(self, role: str, fds: list[int], seconds: float, steps: int, patience: float) -> dict:
        """Does one run, each of whose steps has `seconds` of own time, and `patience` times as much wall time.

        The loading and each test is a step, after which the tests write a byte to a pipe; other roles have one step.
        Returns {"exit": status or -signal, or None if the run was killed at the deadline; "seconds": own time of each
        step; "waited": how long the last one waited for a processor; "starved": whether it was killed because of that}.
        """
        step_start = time.monotonic()
        children = []
        done = []
        clock = Clock()
        steps_end, tests_steps = os.pipe()
        if role == "tests":
            program, tests, results = fds
            calls_end, tests_end = socket.socketpair()
            with calls_end, tests_end:
                children.append(self.fork("calls", [NULL, NULL, NULL, program, calls_end.fileno()], seconds * steps))
                test_fds = [NULL, NULL, NULL, tests, tests_end.fileno(), results, tests_steps]
                children.append(self.fork("tests", test_fds, seconds * steps))
        else:
            children.append(self.fork(role, fds, seconds))
        main_end = os.pidfd_open(children[-1])
        for child in children:
            self.watch(clock, child)
        clock.start()

        ready = []
        elapsed = 0.0
        while main_end not in ready and clock.seconds < seconds and elapsed < patience * seconds:
            wanted = [main_end, steps_end, self.trainer, self.control]
            ready, _, _ = select.select(wanted, [], [], min(LOOK_S, seconds - clock.seconds))
            if self.trainer in ready or self.control in ready:
                os._exit(0)  # The trainer has ended or closed the socket: PDEATHSIG ends the runs
            clock.look()
            if steps_end in ready:
                os.read(steps_end, 1)
                done.append(round(clock.seconds, 5))
                clock.start()
                step_start = time.monotonic()
            elapsed = time.monotonic() - step_start

        for fd in {main_end, steps_end, tests_steps, *fds, *clock.files}:
            os.close(fd)
        for child in reversed(children):  # The tests first: they must not see the program end
            os.kill(child, signal.SIGKILL)
        exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if -signal.SIGUSR2 in exits:
            raise OSError("a run could not be locked down")
        in_time = clock.seconds < seconds
        has_ended = main_end in ready
        exit_ = exits[-1] if has_ended and in_time else None
        own = [*done, round(clock.seconds, 5)]
        waited = round(elapsed - clock.seconds, 5)
        return {"exit": exit_, "seconds": own, "starved": in_time and not has_ended, "waited": waited}

    def serve(self) -> None:
        """Answers requests, [role, seconds, steps, patience] with descriptors, until the trainer closes the socket or
        ends."""
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


SYSTEM_PATHS = (
    "/lib /lib32 /lib64 /usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo /etc/ld.so.cache /etc/localtime "
    "/dev/null /dev/urandom"
).split()


def readable_paths() -> list[str]:
    """The Python installation and the system's libraries, which a run may read. No path is beneath another one."""
    wanted = [os.path.join(sys.base_prefix, "lib"), *sys.path, *SYSTEM_PATHS]
    paths = []
    for path in sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)}):
        if not any(path.startswith(above + "/") for above in paths):
            paths.append(path)
    return paths


def hidden_paths(preload: list[str]) -> list[str]:
    """The directories of packages that make a run's rows, with the labels: no program reads them, except in a server
    that has loaded them itself, in order to score."""
    wanted = [os.path.join(path, name) for path in sys.path for name in MAKERS_OF_ROWS if name not in preload]
    return [os.path.realpath(path) for path in wanted if os.path.isdir(path)]


# ----------------------------------------------------------------------------------------------------------------------
# What a run does, in a process that is already locked down. Each do_ROLE returns the exit status.


def open_device(original: Any, null: int, path: Any, *args: Any, **keywords: Any) -> Any:
    """open() or os.open(), except for standard input and /dev/null, which no run may open as files: duplicates them."""
    if path not in (os.devnull, "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"):
        return original(path, *args, **keywords)
    descriptor = os.dup(null if path == os.devnull else 0)
    if original.__module__ == "posix":
        return descriptor
    return original(descriptor, *args, **keywords)


def execute(source: bytes, name: str, null: int) -> types.ModuleType:
    """Runs the program as module `name`. null: a descriptor of /dev/null."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__file__ = "program.py"
    sys.argv = ["program.py"]
    refused = resource.setrlimit  # Programs ask for a larger stack: for them that succeeds and does nothing
    resource.setrlimit = lambda kind, limits: None if kind == resource.RLIMIT_STACK else refused(kind, limits)
    builtins.open = io.open = functools.partial(open_device, io.open, null)
    os.open = functools.partial(open_device, os.open, null)
    exec(compile(source, "program.py", "exec"), vars(module))
    return module


def do_program(server: Server) -> int:
    """Runs the program as a main program, whose end runs threads, atexit functions and flushes.

    Descriptors: 0 to 2 standard input, output and error, 3 program.
    """
    stdout = sys.stdout
    status = 0
    try:
        execute(open(3, "rb").read(), "__main__", server.null)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
        traceback.print_exc(limit=-3)
    threading = sys.modules.get("threading")
    if threading:
        threading._shutdown()
    atexit._run_exitfuncs()
    stdout_now = sys.stdout
    stdout.flush()
    if stdout_now is not stdout:
        stdout_now.flush()
    return status & 0xFF


# ----------------------------------------------------------------------------------------------------------------------
# Plain data, the only thing that passes between the tests and the program


def alternating(value: dict) -> list:
    return [*value.keys(), *value.values()]


def paired(items: list) -> dict:
    half = len(items) // 2
    return dict(zip(items[:half], items[half:], strict=True))


# Types that JSON lacks: name -> (type, its values as a list of plain data, and back)
KINDS = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "dict": (dict, alternating, paired),
    "Counter": (Counter, alternating, lambda items: Counter(paired(items))),
    "OrderedDict": (OrderedDict, alternating, lambda items: OrderedDict(paired(items))),
    "defaultdict": (
        defaultdict,
        lambda value: [value.default_factory, *alternating(value)],
        lambda items: defaultdict(items[0], paired(items[1:])),
    ),
    "keys": (type({}.keys()), list, lambda items: dict.fromkeys(items).keys()),
    "values": (type({}.values()), list, lambda items: dict(enumerate(items)).values()),
    "items": (type({}.items()), list, lambda items: dict(items).items()),
    "deque": (deque, lambda value: [value.maxlen, *value], lambda items: deque(items[1:], items[0])),
    "bytes": (bytes, list, bytes),
    "bytearray": (bytearray, list, bytearray),
    "complex": (complex, lambda value: [value.real, value.imag], lambda items: complex(*items)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda items: range(*items)),
    "Decimal": (Decimal, lambda value: [str(value)], lambda items: Decimal(*items)),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator], lambda items: Fraction(*items)),
    "date": (date, lambda value: [value.isoformat()], lambda items: date.fromisoformat(*items)),
    "datetime": (datetime, lambda value: [value.isoformat()], lambda items: datetime.fromisoformat(*items)),
    "time": (datetime_time, lambda value: [value.isoformat()], lambda items: datetime_time.fromisoformat(*items)),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda items: timedelta(*items),
    ),
}
NAME_OF_KIND = {kind: name for name, (kind, _, _) in KINDS.items()}
SCALARS = {str, int, float, bool, types.NoneType}  # in JSON as they are
MUTABLE = (list, dict, set, deque, bytearray, Counter, OrderedDict, defaultdict)
EXTENDABLE = (str, int, float, list, dict, tuple, set, frozenset)
MAX_ITEMS = 100_000  # of a test's iterator, which is sent as what it yields
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def is_array(value: Any) -> bool:
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy"


def is_mutable(value: Any) -> bool:
    return type(value) in MUTABLE or is_array(value)


class Wire:
    """One end of the channel: values as JSON, and containers that both ends have.

    shared: by number, the containers among the arguments of a call, and for the length of a test those among the
    globals and attributes that it has asked for. What one end changes in them is sent with the next message.
    """

    def __init__(self, fd: int) -> None:
        self.stream = socket.socket(fileno=fd).makefile("rwb")
        self.shared: list[Any] = []
        self.texts: list[str] = []  # the content of `shared` that the other end knows
        self.numbers: dict[int, int] = {}
        self.num_lasting = 0
        self.is_noting = False

    def refer(self, value: Any) -> dict:
        """The data of a value that is not plain."""
        raise NotImplementedError

    def resolve(self, name: str, body: Any) -> Any:
        """The value of such data."""
        raise NotImplementedError

    def number(self, item: Any, dtype: str) -> Any:
        """A number of numpy."""
        return __import__("numpy").array(item, dtype)[()]

    def send(self, message: dict) -> None:
        self.stream.write(json.dumps(message).encode() + b"\n")
        self.stream.flush()

    def receive(self) -> dict:
        """Raises ConnectionError if the other side has ended."""
        line = self.stream.readline(FRAME_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("too long a reply" if line else "the program ended")
        return json.loads(line)

    def share(self, value: Any) -> None:
        self.numbers[id(value)] = len(self.shared)
        self.shared.append(value)

    def keep_shared(self, start: int, end: int) -> None:
        """Ends the sharing of all but the lasting containers and those from `start` to `end`, which become lasting."""
        self.shared = self.shared[: self.num_lasting] + self.shared[start:end]
        self.numbers = {id(value): number for number, value in enumerate(self.shared)}
        self.num_lasting = len(self.shared)
        self.note_content()

    def share_nothing(self) -> None:
        self.num_lasting = 0
        self.keep_shared(0, 0)

    def content_now(self) -> list[str]:
        self.is_noting = True
        try:
            return [json.dumps(self.content(value, False)) for value in self.shared]
        finally:
            self.is_noting = False

    def note_content(self) -> None:
        self.texts = self.content_now()

    def changes(self) -> list:
        """[number, content] of each shared container that has changed since note_content."""
        pairs = zip(self.content_now(), self.texts, strict=False)
        changed = [number for number, (now, text) in enumerate(pairs) if now != text]
        return [[number, self.content(self.shared[number], False)] for number in changed]

    def apply(self, changes: list) -> None:
        for number, content in changes:
            old = self.shared[number]
            new = self.decode(content, False)
            if type(new) is not type(old):
                raise ConnectionError("a container changed its type")
            if isinstance(old, (list, bytearray)):
                old[:] = new
            elif is_array(old):
                old[...] = new
            else:
                old.clear()
                (old.extend if isinstance(old, deque) else old.update)(new)

    def encode(self, value: Any, shares: bool) -> Any:
        """The value as JSON data. shares: its containers are shared from now on."""
        if type(value) in SCALARS:
            return value
        if id(value) in self.numbers:
            return {"shared": self.numbers[id(value)]}
        data = self.content(value, shares)
        if shares and is_mutable(value):
            self.share(value)
        return data

    def items(self, values: list, shares: bool) -> list:
        if SCALARS.issuperset(map(type, values)):
            return values
        return [self.encode(value, shares) for value in values]

    def content(self, value: Any, shares: bool) -> Any:
        kind = type(value)
        if kind is list:
            return self.items(value, shares)
        if kind in NAME_OF_KIND and not (kind is defaultdict and type(value.default_factory) is not type):
            name = NAME_OF_KIND[kind]
            _, to_items, _ = KINDS[name]
            return {name: self.items(to_items(value), shares)}
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            items = self.encode(value.tolist(), False)
            if is_array(value):
                return {"array": [value.dtype.str, list(value.shape), items]}
            return {"number": [value.dtype.str, items]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"namedtuple": [kind.__name__, list(kind._fields), self.items(list(value), shares)]}
        if kind is type and vars(builtins).get(value.__name__) is value:
            return {"type": value.__name__}
        return self.refer(value)

    def decode(self, data: Any, shares: bool) -> Any:
        """The value of what `encode` gave. Raises an Exception for other data."""
        if isinstance(data, list):
            value = self.values(data, shares)
        elif isinstance(data, dict):
            ((name, body),) = data.items()
            value = self.decode_kind(name, body, shares)
        else:
            return data
        if shares and is_mutable(value) and id(value) not in self.numbers:
            self.share(value)
        return value

    def values(self, data: list, shares: bool) -> list:
        if SCALARS.issuperset(map(type, data)):
            return data
        return [self.decode(item, shares) for item in data]

    def decode_kind(self, name: str, body: Any, shares: bool) -> Any:
        if name == "shared":
            return self.shared[body]
        if name in KINDS:
            _, _, from_items = KINDS[name]
            return from_items(self.values(body, shares))
        if name == "namedtuple":
            title, fields, items = body
            return named_tuple(title, *fields)(*self.values(items, shares))
        if name == "array":
            dtype, shape, items = body
            return __import__("numpy").array(self.decode(items, False), dtype).reshape(shape)
        if name == "number":
            dtype, item = body
            return self.number(self.decode(item, False), dtype)
        if name == "type" and isinstance(vars(builtins).get(body), type):
            return vars(builtins)[body]
        return self.resolve(name, body)


@functools.cache
def named_tuple(title: str, *fields: str) -> type:
    return namedtuple(title, fields)


class Calls(Wire):
    """The program's end: does what the tests ask. The tests know a value that is not plain data by a number."""

    def __init__(self, fd: int, null: int) -> None:
        super().__init__(fd)
        self.null = null
        self.names: dict[str, Any] = {}
        self.kept: dict[int, Any] = {}
        self.wanted: list[str] = []
        self.globals: dict[str, Any] = {}  # what the test has of the program's globals

    def refer(self, value: Any) -> dict:
        for base in EXTENDABLE:
            if isinstance(value, base) and type(value) is not base:
                return {"narrowed": self.encode(base(value), False)}
        return self.keep(value)

    def keep(self, value: Any) -> dict:
        self.kept[id(value)] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [id(value), bases_of(value)]}
        if isinstance(value, Iterator) and type(value).__module__ != "program":
            return {"iterator": id(value)}
        return {"function" if isinstance(value, FUNCTIONS) else "object": id(value)}

    def resolve(self, name: str, body: Any) -> Any:
        return iter(self.decode(body, False)) if name == "items of" else self.kept[body]

    def answer(self, request: dict) -> dict:
        """{"ok": result}, or {"error": its classes, arguments, attributes and text}; and the changes of containers."""
        if request["do"] == "begin":
            self.share_nothing()
        start = lasting = self.num_lasting
        try:
            self.apply(request["changes"])
            args = self.decode(request["args"], True)
            keywords = self.decode(request["keywords"], True)
            start = len(self.shared)
            self.note_content()
            result = getattr(self, request["do"])(*args, **keywords)
            for name in self.wanted:
                if name in self.names:
                    self.globals[name] = self.names[name]
            changes = self.changes()
            is_made = request["do"] == "make" and type(result).__module__ == "program"
            data = self.keep(result) if is_made else self.encode(result, True)
            is_lasting = request["do"] == "getattr" or request["do"] == "begin" and self.may_change()
            lasting = len(self.shared) if is_lasting else start
            return {"ok": data, "changes": changes, "lasting": is_lasting}
        except BaseException as error:
            details = [self.encode(list(error.args), False), self.encode(vars(error), False), str(error)]
            return {"error": [bases_of(type(error)), *details], "changes": self.changes()}
        finally:
            self.keep_shared(start, lasting)

    def load(self) -> list[str]:
        """Runs the program. Returns the names of what it defines, rather than imports."""
        self.names = vars(execute(open(3, "rb").read(), "program", self.null))
        return [name for name, value in self.names.items() if getattr(value, "__module__", "") == "program"]

    def may_change(self) -> bool:
        """Whether one of the globals that the test follows is no function, or not there yet."""
        return any(not callable(self.names.get(name)) for name in self.wanted)

    def begin(self, names: list[str], follows: list[str]) -> dict[str, Any]:
        """Begins a test. Returns the program's values of those of these global names that it has."""
        self.wanted = follows
        self.globals = {name: self.names[name] for name in names if name in self.names}
        return self.globals

    def take(self, iterator: Any, count: int) -> list:
        return list(itertools.islice(iterator, count))

    def call(self, function: Any, /, *args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    make = call
    getattr = staticmethod(getattr)
    setattr = staticmethod(setattr)


def bases_of(kind: type) -> list[list[str]]:
    return [[base.__module__, base.__name__] for base in kind.__mro__]


def do_calls(server: Server) -> int:
    """Does what the tests ask, first of all to load the program. Descriptors: 3 program, 4 stream."""
    calls = Calls(4, server.null)
    sys.set_int_max_str_digits(0)
    while True:
        calls.send(calls.answer(calls.receive()))


class Unsupported(BaseException):
    """A test has come upon what is no plain data."""


class Program(Wire):
    """The tests' end: they call the program's functions with plain data and get plain data, which they compare.

    What is no plain data is unsupported and fails the test. It is the test's fault, and no program can pass, if the
    test sends it, or needs more than methods and attributes of an object that it has made by a capitalized name.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.lock = _thread.RLock()
        self.remotes: dict[int, Remote] = {}
        self.exceptions: dict[str, type] = {}  # classes of the program
        self.exception_numbers: dict[Any, int] = {}
        self.narrowed: dict[type, type] = {}
        self.keeps_objects = True
        self.scope: dict[str, Any] = {}  # of the test
        self.globals: dict[str, Any] = {}  # those of the program that the tests mention
        self.follows: set[str] = set()  # those that this test does not set
        self.raised: BaseException | None = None
        self.broken = False  # The program has ended or broken the protocol: it fails all later tests
        self.unsupported = ""
        self.is_tests_fault = False

    def refuse(self, what: str, is_tests_fault: bool = False) -> NoReturn:
        """Ends a test, even one that catches every exception: see do_tests."""
        if not self.unsupported:
            self.unsupported = f"unsupported: {what}"
            self.is_tests_fault = is_tests_fault
        raise Unsupported(self.unsupported)

    def refuse_narrowed(self, name: str) -> NoReturn:
        if str(name).startswith("__"):
            raise AttributeError(name)
        self.refuse(f"{name} of a result whose class is the program's")

    def refer(self, value: Any) -> dict:
        if type(value) is Remote:
            return {"object": vars(value)["_remote_number"]}
        if self.is_noting:
            return {"object": id(value)}
        if isinstance(value, type) and value in self.exception_numbers:
            return {"object": self.exception_numbers[value]}
        if isinstance(value, Iterator):
            return {"items of": self.encode(list(itertools.islice(value, MAX_ITEMS)), False)}
        self.refuse(f"a {type(value).__name__} of the test is no plain data", type(value) not in self.narrowed.values())

    def resolve(self, name: str, body: Any) -> Any:
        if name == "exception":
            number, bases = body
            kind = self.exception_class(bases)
            self.exception_numbers[kind] = number
            return kind
        if name == "narrowed":
            return self.narrow(self.decode(body, False))
        if name not in ("object", "function", "iterator"):
            raise ValueError(f"{name} is not a value")
        remote = self.remotes.setdefault(body, Remote(self, body))
        if name == "iterator":
            return self.iterate(remote)
        if name == "object" and not self.keeps_objects:
            self.refuse("a result is no plain data")
        return remote

    def number(self, item: Any, dtype: str) -> Any:
        """Most tests need no numpy, which takes long to import."""
        return super().number(item, dtype) if "numpy" in sys.modules else self.narrow(item)

    def narrow(self, value: Any) -> Any:
        """A value whose class is a subclass of the program's: as its base, with nothing else that it may have."""
        kind = type(value)
        if kind not in EXTENDABLE:
            return value
        if kind not in self.narrowed:
            names = {"__getattr__": self.refuse_narrowed, "__missing__": self.refuse_narrowed}
            self.narrowed[kind] = type(kind.__name__, (kind,), names)
        return self.narrowed[kind](value)

    def iterate(self, remote: "Remote") -> Iterator:
        """What an iterator of the program yields, in growing batches: it may have no end."""
        count = 1
        batch = [None]
        while batch:
            batch = self.ask("take", [remote, count], {})
            for item in batch:
                if (yield item) is not None:
                    self.refuse("a value that the test sends into a generator", is_tests_fault=True)
            count = min(2 * count, 1024)

    def ask(self, action: str, args: list, keywords: dict[str, Any], keeps_objects: bool = False) -> Any:
        """Asks the program. Makes its changes of shared containers here too, and raises its exceptions here."""
        with self.lock:
            if action == "begin":
                self.share_nothing()
            changes = self.changes()
            start = lasting = self.num_lasting
            self.keeps_objects = True
            try:
                message = {"do": action, "args": self.encode(args, True), "keywords": self.encode(keywords, True)}
                start = len(self.shared)
                self.send(message | {"changes": changes})
                reply = self.receive()
                self.apply(reply["changes"])
                if "error" not in reply:
                    self.keeps_objects = keeps_objects
                    result = self.decode(reply["ok"], True)
                    lasting = len(self.shared) if reply["lasting"] else start
                    self.keeps_objects = True
                    return result
                error = self.exception(*reply["error"])
            except Unsupported:
                raise
            except BaseException as failure:
                self.broken = True
                raise ConnectionError(describe(failure)) from None
            finally:
                self.keep_shared(start, lasting)
                self.scope.update({name: self.globals[name] for name in self.globals.keys() & self.follows})
        self.raised = error
        raise error

    def exception(self, bases: list, args: Any, attributes: Any, text: str) -> BaseException:
        kind: Any = self.exception_class(bases)
        args = self.decode(args, False)
        try:
            error = kind(*args)
        except Exception:  # Its class wants other arguments
            error = kind.__new__(kind, *args)
        vars(error).update(self.decode(attributes, False), _text=text)
        return error

    def exception_class(self, bases: list[list[str]]) -> type[Exception]:
        """The exception of this name, of Python or of the program. bases: modules and names of the class and its
        bases."""
        (module, name), *above = bases
        kind = vars(builtins).get(name, self.exceptions.get(name))
        if kind is None and module.partition(".")[0] in sys.stdlib_module_names and module in sys.modules:
            kind = getattr(sys.modules[module], name, None)
        if kind is None:
            names = {"__str__": lambda error: vars(error).get("_text") or Exception.__str__(error)}
            names["__getattr__"] = self.refuse_narrowed
            kind = self.exceptions[name] = type(name, (self.exception_class(above),), names)
        # StopIteration would silently end all(map(..)), and what is no Exception could end this process
        if not issubclass(kind, Exception) or issubclass(kind, StopIteration):
            return RuntimeError
        return kind

    def begin(self, names: set[str], follows: set[str]) -> dict[str, Any]:
        """Begins a test. Returns the program's values of those of these global names that it has."""
        self.scope = {}
        self.globals = {}
        self.follows = follows
        self.globals = found = self.ask("begin", [sorted(names), sorted(follows)], {}, keeps_objects=True)
        for name, value in found.items():
            if name not in names:
                raise ConnectionError("the program sent names that nobody asked for")
            if type(value) is Remote and name[:1].isupper():
                vars(value).update(_remote_is_class=True, _remote_is_made=True)
        return dict(found)


class Remote:
    """A function of the program, an object that a test has made by a capitalized name, or an attribute of one."""

    _remote_program: Program
    _remote_number: int
    _remote_is_class: bool
    _remote_is_made: bool

    def __init__(self, program: Program, number: int) -> None:
        state = {"program": program, "number": number, "is_class": False, "is_made": False}
        vars(self).update({f"_remote_{name}": value for name, value in state.items()})

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        is_class = self._remote_is_class
        action = "make" if is_class else "call"  # What a class makes stays an object, also if it is a dict
        result = self._remote_program.ask(action, [self, *args], keywords, keeps_objects=is_class)
        if type(result) is Remote and is_class:
            vars(result)["_remote_is_made"] = True
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_remote_")):
            raise AttributeError(name)
        return self._remote_program.ask("getattr", [self, name], {}, keeps_objects=True)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_program.ask("setattr", [self, name, value], {})

    def _remote_refuse(self, operator: str, *_: Any) -> None:
        what = f"what the test needs {operator} of is no plain data"
        self._remote_program.refuse(what, self._remote_is_made)


OPERATORS = (
    "eq ne lt le gt ge bool hash str repr format int float complex index round abs neg pos invert len iter next "
    "reversed contains getitem setitem delitem delattr enter exit await copy deepcopy instancecheck subclasscheck "
    "mro_entries add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul and rand or "
    "ror xor rxor"
).split()
for _operator in OPERATORS:
    setattr(Remote, f"__{_operator}__", functools.partialmethod(Remote._remote_refuse, _operator))


class Identity(ast.NodeTransformer):
    """Replaces `type(x)` and `a is b` in a test by calls of type_of and is_same."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1:
            node.func = ast.copy_location(ast.Name("type of", ast.Load()), node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Is):
            return node
        function = ast.Name("is same", ast.Load())
        return ast.fix_missing_locations(
            ast.copy_location(ast.Call(function, [node.left, *node.comparators], []), node)
        )


def type_of(program: Program, value: Any) -> type:
    kind = type(value)
    if kind is Remote or kind in program.narrowed.values():
        program.refuse("the class of a result is the program's")
    return kind


def is_same(program: Program, a: Any, b: Any) -> bool:
    """Whether a is b. Unknown for two containers that are not: one may be a copy of the other from the program."""
    if a is b:
        return True
    if type(a) is not type(b) or type(a) in (bool, Remote) or isinstance(a, type):
        return False
    if type(a) in SCALARS:
        return a == b
    program.refuse("whether two values are the same object", is_tests_fault=True)


def describe(error: BaseException) -> str:
    name = type(error).__name__
    text = f"{name}: {error}" if str(error) else name
    return text[:200]


# What tests use without importing it, relying on the program's imports
STANDARD = """
import collections, copy, datetime, decimal, fractions, functools, heapq, itertools, json, math, operator, re, string
import sys, time, typing
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from math import inf, isclose, pi, sqrt
from typing import Any, Dict, List, Optional, Set, Tuple, Union
"""
SLOW_STANDARD = {"np": "numpy", "numpy": "numpy", "random": "random", "statistics": "statistics"}
JUDGES = set("abs all any callable isclose isinstance iter len next print repr round sorted".split())
# What a test has in its own process alone: the program's streams, seeds, tasks and settings are others
APART = set(
    "SystemExit StopIteration KeyboardInterrupt argv asyncio builtins dir() environ gc getcontext id() inspect "
    "localcontext logging mock patch redirect_stdout seed setcontext setrecursionlimit stderr stdin stdout tempfile "
    "unittest unittest.mock vars() warnings weakref".split()
)


DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
HELPERS = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)


class Words:
    """The names that a test mentions (variables, attributes, modules), those that it sets, and those of APART."""

    def __init__(self, test: str) -> None:
        self.all: set[str] = set()
        self.read: set[str] = set()
        self.set: set[str] = set()
        self.apart: set[str] = set()
        self.needs_identity = " is " in test or "type(" in test
        self.patched: set[str] = set()  # modules and objects whose attributes it sets
        for node in ast.walk(ast.parse(test)):
            found = {getattr(node, field, None) for field in ("id", "attr", "module", "name", "asname")} - {None}
            self.all |= found
            if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(node, (*DEFINITION, ast.alias)):
                self.set |= found
                self.patched.add(getattr(getattr(node, "value", None), "id", ""))
            if isinstance(node, ast.Name):
                self.read.add(node.id)
            if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
                self.apart.add(node.attr)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self.apart |= APART & {f"{node.func.id}()"}
        self.apart |= self.all & APART


def builtin_of_program(names: list[set[str]], standard: dict[str, Any]) -> list[str]:
    """The builtin that the program had to define, where the tests mention no other name that it defines: the one
    function that is in all tests and not there to judge results. Empty if there is not one such name."""
    functions = [
        name for name in set.intersection(*names) - JUDGES if isinstance(standard.get(name), types.BuiltinFunctionType)
    ]
    return functions if len(functions) == 1 else []


class Tests:
    """The tests of a label, run one after the other. Each has the names of its own definitions, those of the tests
    before it, and the program's. Names of builtins and of the standard library are those of this process, because a
    program's own `sum` or `isclose` must not judge its results: see builtin_of_program for the exception."""

    def __init__(self, tests: list[str]) -> None:
        self.words = [Words(test) for test in tests]
        self.mentioned = set().union(*(words.all for words in self.words))
        self.standard = dict(vars(builtins))
        exec(STANDARD, self.standard)
        for name, module in SLOW_STANDARD.items():
            if name in self.mentioned:
                self.standard[name] = __import__(module)
        self.helpers: dict[str, Any] = {"__name__": "test"}  # what the tests so far have defined
        self.lost: set[str] = set()  # what skipped tests have set
        self.program = program = Program(4)
        self.standard["type of"] = functools.partial(type_of, program)
        self.standard["is same"] = functools.partial(is_same, program)
        self.own_standard: set[str] = set()
        self.of_program: dict[str, Any] = {}

    def load(self) -> None:
        self.own_standard = set(self.program.ask("load", [], {})) & self.standard.keys()

    def run(self, test: str, words: Words, is_skipped: bool) -> None:
        tree = ast.parse(test)
        if words.needs_identity:
            tree = ast.fix_missing_locations(Identity().visit(tree))
        if is_skipped:
            tree.body = [node for node in tree.body if isinstance(node, DEFINITION)]
            self.lost |= words.set
        program = self.program
        self.of_program = program.begin(
            self.mentioned - self.standard.keys(),
            words.read - words.set - self.standard.keys() - self.helpers.keys(),
        )
        if not self.of_program:
            builtin = builtin_of_program([words.all for words in self.words], self.standard)
            self.of_program = program.begin(set(builtin), set())
            self.own_standard -= set(builtin)
        scope = self.standard | self.of_program | self.helpers
        before = dict(scope)
        program.scope = scope
        exec(compile(tree, "test", "exec"), scope)
        for name, value in scope.items():
            is_new = value is not before.get(name) and name != "__builtins__"
            if is_new and (isinstance(value, HELPERS) or name not in self.of_program.keys() | self.standard.keys()):
                self.helpers[name] = value

    def judge(self, words: Words, problem: str | None) -> str | None:
        """The problem of a test, or why it is not known whether the program is right."""
        program = self.program
        if problem is None and not self.of_program:
            program.is_tests_fault = self.mentioned <= self.standard.keys()
            return "unsupported: the tests use no name that the program defines"
        if problem is None or program.unsupported:
            return program.unsupported or problem
        constants = {name for name, value in self.of_program.items() if not callable(value)}
        own = words.all & self.own_standard
        shared = words.set & constants
        lost = words.all & self.lost
        patched = {name for name in words.patched if isinstance(program.scope.get(name), types.ModuleType)}
        apart = words.apart | patched
        if apart:
            program.is_tests_fault = True
            return f"unsupported: {min(apart)} of the test is not the program's"
        if own or shared or lost:
            program.unsupported = f"unsupported: {min(own | shared | lost)} of the program or of an earlier test"
        return program.unsupported or problem


def do_tests(server: Server) -> int:
    """Runs the tests. Descriptors: 3 {"tests", "skip"}, 4 stream, 5 results, 6 steps.

    Writes a line of results, [problem or null, whether a result is no plain data, whether no program can pass], for the
    loading of the program and for each test, except the first `skip` tests. Of these it only runs the definitions and
    imports, which later tests may use. It tells the server when each has ended: see Server.run.
    """
    job = json.loads(open(3, "rb").read())
    sys.set_int_max_str_digits(0)
    tests = Tests(job["tests"])
    program = tests.program
    for number, test in enumerate(["", *job["tests"]]):
        is_skipped = 0 < number <= job["skip"]
        program.unsupported = ""
        program.is_tests_fault = False
        problem = None
        try:
            if number == 0:
                tests.load()
            else:
                tests.run(test, tests.words[number - 1], is_skipped)
        except BaseException as error:
            problem = "the assertion failed" if isinstance(error, AssertionError) else describe(error)
            if isinstance(error, ImportError) and error is not program.raised:
                program.is_tests_fault = True
        if program.broken and problem is None:
            problem = "the program broke the protocol"
        if number > 0 and not is_skipped:
            problem = tests.judge(tests.words[number - 1], problem)
        if not is_skipped:
            line = [problem, bool(program.unsupported), program.is_tests_fault]
            os.write(5, json.dumps(line).encode() + b"\n")
        os.write(6, b".")
        if program.broken or problem and number == 0:
            break
    return 0


def fork_and_end() -> None:
    if os.fork() == 0:
        os._exit(0)


def write_and_remove(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)


def run_other_program(leaks: list[str]) -> None:
    """Writes the result first, because the other program takes the place of this one."""
    os.pwrite(1, json.dumps([*leaks, "running other programs"]).encode(), 0)
    os.execv("/proc/self/exe" if os.path.exists("/proc/self/exe") else sys.executable, [sys.executable, "-c", ""])


def do_probe(server: Server) -> int:
    """Tries what has to be impossible. The result is the list of what succeeded. Descriptors: 1 result, 2 error."""
    leaks = []
    script = os.path.abspath(__file__)
    trainer = server.trainer_pid
    file = f"sandbox-probe-{os.getpid()}"
    udp = functools.partial(socket.socket, type=socket.SOCK_DGRAM)
    attempts = [
        ("the network", lambda: udp().connect(("127.0.0.1", 9))),
        ("new processes", fork_and_end),
        ("changing files", write_and_remove, f"/{file}"),
        ("changing files", write_and_remove, f"/tmp/{file}"),
        ("changing files", write_and_remove, f"/dev/shm/{file}"),
        ("changing files", write_and_remove, os.path.join(os.path.dirname(script), file)),
        ("signals to other processes", os.kill, os.getppid(), 0),
        ("signals to other processes", os.kill, trainer, 0),
        ("reading files", open, script),
        ("reading files", open, "/etc/passwd"),
        ("reading the trainer's environment", open, f"/proc/{trainer}/environ"),
        ("tracing other processes", libc, "ptrace", 0x4206, trainer, 0, 0),  # PTRACE_SEIZE
        ("running other programs", run_other_program, leaks),
    ]
    for leak, attempt, *args in attempts:
        try:
            attempt(*args)
            leaks.append(leak)
        except OSError:
            pass  # as it has to be
    os.pwrite(1, json.dumps(leaks).encode().ljust(512), 0)
    return 0


ROLES = {"program": do_program, "calls": do_calls, "tests": do_tests, "probe": do_probe}


# ----------------------------------------------------------------------------------------------------------------------
# The trainer's side


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


class Run(NamedTuple):
    """How a program or a test ended. problem: None if it ran to its end or passed. late: it reached its time limit.

    exit: status, or -signal. output, error: what it wrote to its first and second memory file. not_plain: the test got
    what is no plain data. is_tests_fault: no program can pass this test. steps: seconds of each step.
    """

    problem: str | None
    seconds: float
    late: bool = False
    exit: int | None = None
    output: str = ""
    error: str = ""
    not_plain: bool = False
    is_tests_fault: bool = False
    steps: Sequence[float] = ()


class Sandbox:
    """A fork server, which starts when it is needed, and again after it has died. One thread may use it at a time.

    preload: modules that the server imports before it locks itself down. without: for tests, "namespaces", "Landlock"
    or "seccomp" are left out. layers and leaks (see do_probe) are known once the server has started.
    """

    def __init__(self, preload: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> None:
        self.preload = preload
        self.without = without
        self.process = None
        self.layers = []
        self.leaks = []

    def start(self) -> None:
        """Raises SandboxError if the server cannot start."""
        if sys.platform != "linux":
            raise SandboxError("the code sandbox needs Linux")
        try:
            hello = self.launch()
            if "failed" in hello:  # With AppArmor a process may enter namespaces, but not set them up
                self.stop()
                self.without = (*self.without, "namespaces")
                hello = self.launch()
            if "failed" in hello:
                raise SandboxError(hello["failed"])
            self.layers = hello["layers"]
            probe = self.exchange("probe", ["", None, None], 10.0, 1)
            self.leaks = sorted(set(json.loads(probe.output)))
        except (OSError, ValueError, SandboxError) as error:
            raise SandboxError(f"the code sandbox cannot start: {error} {self.stop()}".strip()) from None
        except BaseException:
            self.stop()
            raise

    def launch(self) -> dict:
        """Starts the server and returns its first message."""
        import subprocess
        import tempfile

        # None of the trainer's own variables. PYTHONHASHSEED: sets have the same order every time
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        site = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        self.socket, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stderr = tempfile.TemporaryFile()
        options = {"control": control.fileno(), "site": site, "preload": self.preload, "without": self.without}
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
        return self.receive(START_TIMEOUT_S)

    def receive(self, seconds: float) -> dict:
        self.socket.settimeout(seconds)
        packet = self.socket.recv(1 << 20)
        if not packet:
            raise SandboxError("the fork server ended")
        return json.loads(packet)

    def exchange(self, role: str, files: list[str | None], seconds: float, steps: int) -> Run:
        """One run in a server that has started: see run."""
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
        if reply["starved"]:
            others = f"others had the processors for {reply['waited']:.3g} s"
            raise SandboxError(f"{others}, which left {reply['seconds'][-1]:.3g} s of a limit of {seconds:g}")
        status = reply["exit"]
        problem = None
        if status is None:
            problem = f"time limit ({seconds:g} s)"
        elif status < 0:
            problem = f"killed by {signal.Signals(-status).name}"
        texts = [data.decode(errors="replace") for data in written]
        return Run(problem, reply["seconds"][-1], status is None, status, *texts, steps=reply["seconds"])

    def run(self, role: str, files: list[str | None], seconds: float, steps: int = 1) -> Run:
        """Does ROLES[role] in a process that has memory files as its descriptors 0, 1, ...

        files: their contents, None for a file that the process writes. seconds: limit of a step's wall time without the
        time in which the process waited for a processor that others had, if the kernel counts it. Raises SandboxError.
        The next run then starts the server again. So it does if a caller's own deadline interrupts this run: the late
        reply to this program must not become the answer to the next one.
        """
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        try:
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
        self.idle: dict[tuple, list[Sandbox]] = defaultdict(list)  # (preload, without) -> fork servers

    def run(self, call: Callable[[Sandbox], Any], preload: tuple[str, ...], without: tuple[str, ...]) -> Any:
        """Waits for a free slot. Returns the result of call(a sandbox) and the seconds that it waited.

        If the sandbox itself fails, the call is repeated once with a new fork server. Raises SandboxError.
        """
        start = time.monotonic()
        with self.slots:
            waited = time.monotonic() - start
            idle = self.idle[preload, without]
            try:
                box = idle.pop()
            except IndexError:
                box = Sandbox(preload, without)
            try:
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


def num_late(runs: list[Run]) -> int:
    return sum(run.late for run in runs)


def with_not_run(runs: list[Run], num_tests: int) -> list[Run]:
    """The results of all tests: those after the last time limit have failed."""
    missing = Run(f"not run: {num_late(runs)} tests exceeded the time limit", 0.0)
    return runs + [missing] * (num_tests - len(runs))


def run_tests(sandbox: Sandbox, program: str, tests: list[str], seconds: float) -> list[Run]:
    """Runs each test (Python statements that use the program's names) for at most `seconds`; see Sandbox.run.

    The program runs in a process of its own and only answers calls: see Program. If a test does not run to its end,
    both processes end, and the next test gets new ones. Raises SandboxError.
    """
    runs = []
    while len(runs) < len(tests) and num_late(runs) < MAX_TIME_LIMITS:
        num_left = len(tests) - len(runs)
        job = json.dumps({"tests": tests, "skip": len(runs)})
        run = sandbox.run("tests", [program, job, None], seconds, steps=len(tests) + 1)
        reason = f"time limit ({seconds:g} s)" if run.late else run.problem or "the tests' process ended"
        lines = [json.loads(line) for line in run.output.splitlines()]
        loading = lines[0][0] if lines else reason
        if loading is not None:
            return runs + [Run(f"loading the program: {loading}", 0.0)] * num_left
        done = lines[1:]
        times = [*run.steps[len(runs) + 1 :], *[0.0] * len(done)]  # A process may end before all steps are seen
        for (problem, not_plain, is_tests_fault), elapsed in zip(done, times, strict=False):
            runs.append(Run(problem, elapsed, not_plain=not_plain, is_tests_fault=is_tests_fault))
        # A last test that broke the channel has a result of its own
        has_result = run.exit == 0 and done
        if len(done) < num_left and not has_result:
            runs.append(Run(reason, run.seconds if run.late else 0.0, run.late))
    return with_not_run(runs, len(tests))


def same_line(line: str, expected: str) -> bool:
    """Whether two lines are equal as text, or word by word as numbers."""
    if line.rstrip() == expected.rstrip():
        return True
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in expected.split()]
    except ArithmeticError:
        return False  # not numbers


def same_output(output: str, expected: str) -> bool:
    """Whether all lines are equal as text or as numbers, without blanks at their ends (LiveCodeBench)."""
    lines = output.strip().split("\n")
    expected_lines = expected.strip().split("\n")
    return len(lines) == len(expected_lines) and all(map(same_line, lines, expected_lines))


def run_stdio(sandbox: Sandbox, program: str, tests: list[tuple[str, str]], seconds: float) -> list[Run]:
    """Runs the program once for each (input, expected output), for at most `seconds`; see Sandbox.run."""
    runs = []
    for stdin, expected in tests:
        if num_late(runs) == MAX_TIME_LIMITS:
            break
        run = sandbox.run("program", [stdin, None, None, program], seconds)
        if run.problem is None and not same_output(run.output, expected):
            error_lines = run.error.strip().splitlines() or ["wrong output"]
            run = run._replace(problem=error_lines[-1][:200])
        runs.append(run._replace(output="", error=""))
    return with_not_run(runs, len(tests))


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
