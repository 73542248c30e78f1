"""Runs Python programs that may be hostile: no network, no files of others, no other programs, and limited resources.

    python scripts/parts/sandbox.py  # prints what this machine allows, layer by layer

`Sandbox` starts this file as a fork server, a small Python process of its own. Every run is a fork of the server. The
fork locks itself down (rlimits, Landlock, seccomp, no_new_privs) before it reads the program. The server itself is in
namespaces of its own where the machine allows them. The server never reads the content of a run: programs, inputs,
tests and results travel in memory files (memfd) that the server passes on unopened, so no later run finds them in its
memory. The trainer gets the files back with an exit status and a time, and judges them itself. Expected outputs are
never sent to the server.

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
import array
import ast
import atexit
import builtins
import copy
import ctypes
import dataclasses
import dis
import errno
import functools
import gc
import io
import json
import math
import operator
import os
import pickle
import platform
import re
import resource
import select
import signal
import socket
import struct
import symtable
import sys
import time
import traceback
import types
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

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
# The server imports these modules once. It does not import random and threading, or modules that import them: they hook
# into every fork, and most programs do not need them. The trainer's side imports subprocess and others where it needs
# them.
PRELOAD = (
    "array bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools heapq io "
    "itertools json math numbers operator re string time typing"
).split()

# ----------------------------------------------------------------------------------------------------------------------
# Layers. Each function changes the calling process for good, or raises OSError.

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
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
AT_LEAST = 0x35
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


def load(offset: int) -> tuple:
    return LOAD, 0, 0, offset


def answer(action: int) -> tuple:
    return ANSWER, 0, 0, action


def refuse(code: int) -> tuple:
    return answer(ERROR | code)


def check_argument(rule: Rule) -> list[tuple]:
    """The part of the filter that answers a system call that has a rule."""
    low_half = 16 + 8 * rule.argument
    block = [load(low_half)]
    if rule.bits:
        block.append((AND, 0, 0, rule.bits))
    for index, value in enumerate(rule.values):
        block.append((EQUAL, len(rule.values) - index, 0, value))
    block.append(refuse(rule.error))
    if rule.pointer:
        block += [load(low_half + 4), (EQUAL, 1, 0, 0), refuse(rule.error)]
    block.append(answer(ALLOW))
    return block


def check_number() -> list[tuple]:
    """The part of the filter that answers all other system calls, by ranges of their numbers.

    To install a filter the kernel runs it for every number. One comparison for each number took 0.2 ms more.
    """
    allowed = {number(call) for call in ALLOWED.split(",")} - {None}
    ranges = []
    for nr in range(max(allowed) + 1):
        is_allowed = nr in allowed
        if is_allowed != (nr + 1 in allowed):
            ranges.append((AT_LEAST, 1, 0, nr + 1))
            ranges.append(answer(ALLOW) if is_allowed else refuse(errno.EPERM))
    return ranges


def seccomp_program() -> bytes:
    """The filter as classic BPF over struct seccomp_data (nr at 0, arch at 4, arguments at 16, low half first)."""
    _, audit_arch = MACHINES[platform.machine()]
    program = [load(4), (EQUAL, 1, 0, audit_arch), answer(KILL), load(0)]
    for call in UNKNOWN.split(","):
        program += [(EQUAL, 0, 1, number(call)), refuse(errno.ENOSYS)]
    for call, rule in RULES.items():
        nr = number(call)
        if nr is not None:
            block = check_argument(rule)
            program += [(EQUAL, 0, len(block), nr), *block]
    program += check_number()
    program.append(refuse(errno.EPERM))
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
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
ST_RELATIME = 4096
KEPT_FLAGS = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048
READ_ONLY = MS_REMOUNT | MS_BIND | MS_RDONLY
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
        proc = libc("syscall", FSMOUNT, context, 1, MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
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
    if source_flags & ST_RELATIME:
        flags |= MS_RELATIME
    libc("mount", None, target.encode(), None, READ_ONLY | flags, None)
    os.close(fd)


def build_root(readable: list[str], hidden: list[str]) -> None:
    """Makes a read-only file system that contains only `readable` the root directory. `hidden` are empty in it."""
    root = "/tmp"  # exists on every machine, and nothing is written to it: the new root is mounted here
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in readable]  # A path may be beneath `root`
    links = {path: os.readlink(path) for path in ("/lib", "/lib32", "/lib64") if os.path.islink(path)}
    libc("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    libc("mount", b"tmpfs", root.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    for path, fd in sources:
        mount_read_only(fd, root + path)
    for path in hidden:
        libc("mount", b"tmpfs", (root + path).encode(), b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, b"size=4k,mode=755")
    for path, link in links.items():
        os.symlink(link, root + path)
    os.chdir(root)
    libc("pivot_root", b".", b".")
    libc("umount2", b".", MNT_DETACH)
    os.chdir("/")
    libc("mount", None, b"/", None, READ_ONLY | MS_NOSUID | MS_NODEV, None)


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
        libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
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
        self.limits_threads = self.counts_threads(in_user_namespace)
        limit(resource.RLIMIT_AS, memory + MEMORY_BYTES)
        limit(resource.RLIMIT_FSIZE, OUTPUT_BYTES)
        limit(resource.RLIMIT_STACK, STACK_BYTES)
        limit(resource.RLIMIT_NOFILE, 64)
        limit(resource.RLIMIT_CORE, 0)
        self.layers.append("rlimits")
        self.pid = os.getpid()
        gc.collect()
        gc.freeze()

    def counts_threads(self, in_user_namespace: bool) -> bool:
        """Whether the kernel counts the runs' threads apart from the user's other threads."""
        user = os.getuid()
        release, *_ = platform.release().split("-")
        version = tuple(int(part) for part in release.split(".")[:2])
        counts_by_namespace = in_user_namespace and version >= (5, 14)
        return user != 0 and (counts_by_namespace or user in (self.own_user, NOBODY))

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
            if role == "tests":
                fds = [*fds, *self.clock("self")]
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

    def clock(self, process: int | str) -> list[int]:
        """The files of a process that `own_clock` reads; NULL if they cannot be opened."""
        try:
            return [os.open(f"{process}/{name}", os.O_RDONLY, dir_fd=self.proc) for name in ("schedstat", "stat")]
        except OSError:
            return [NULL, NULL]

    def run(self, role: str, fds: list[int], seconds: float, patience: float) -> dict:
        """Does one run of at most `seconds` of its own time, and at most `patience` times as much wall time.

        Returns {"exit": status or -signal, or None if the run was killed at the deadline; "seconds": its own time;
        "waited": how long it waited for a processor; "starved": whether it was killed because it waited too long}.
        """
        start = time.monotonic()
        children = []
        clocks = []
        if role == "tests":
            program, tests, results = fds
            calls_end, tests_end = socket.socketpair()
            with calls_end, tests_end:
                calls = self.fork("calls", [NULL, NULL, NULL, program, calls_end.fileno()], seconds)
                children.append(calls)
                clocks += self.clock(calls)
                test_fds = [NULL, NULL, NULL, tests, tests_end.fileno(), results, *clocks]
                main_child = self.fork("tests", test_fds, seconds)
        else:
            main_child = self.fork(role, fds, seconds)
        children.append(main_child)
        main_end = os.pidfd_open(main_child)
        clocks += self.clock(main_child)

        ready = []
        own = 0.0
        elapsed = 0.0
        while not ready and own < seconds and elapsed < patience * seconds:
            ready, _, _ = select.select([main_end, self.trainer, self.control], [], [], seconds - own)
            own = own_clock(clocks, start + seconds) - start
            elapsed = time.monotonic() - start
        if self.trainer in ready or self.control in ready:
            os._exit(0)  # The trainer has ended or closed the socket: PDEATHSIG ends the runs

        for fd in {main_end, *fds, *clocks} - {NULL}:
            os.close(fd)
        for child in children:
            os.kill(child, signal.SIGKILL)
        exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if -signal.SIGUSR2 in exits:
            raise OSError("a run could not be locked down")
        self.sweep()
        in_time = own < seconds
        exit_ = exits[-1] if ready and in_time else None
        own = round(max(own, 0.0), 5)
        return {"exit": exit_, "seconds": own, "starved": in_time and not ready, "waited": round(elapsed - own, 5)}

    def sweep(self) -> None:
        """Kills all processes that a run has left. With seccomp there are none: it could not fork."""
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                return
            if self.pid == 1:
                os.kill(-1, signal.SIGKILL)
            else:  # We are the subreaper: orphans become our children
                with open(f"/proc/self/task/{self.pid}/children") as file:
                    for child in file.read().split():
                        os.kill(int(child), signal.SIGKILL)
            time.sleep(0.001)

    def serve(self) -> None:
        """Answers requests, [number, role, seconds, patience] with descriptors, until the trainer closes the socket or
        ends. A reply has the number of its request."""
        while self.trainer not in select.select([self.control, self.trainer], [], [])[0]:
            packet, fds, _, _ = socket.recv_fds(self.control, 4096, 8)
            if not packet:
                return
            number, role, seconds, patience = json.loads(packet)
            reply = self.run(role, fds, seconds, patience)
            reply["number"] = number
            self.control.send(json.dumps(reply).encode())


def are_ready(clocks: list[int]) -> list[bool]:
    """Whether each process runs or is ready to run."""
    texts = [os.pread(stat, 100, 0) for stat in clocks[1::2] if stat != NULL]
    return [text.rpartition(b")")[2].split()[:1] == [b"R"] for text in texts]


def ran_and_waited(clocks: list[int]) -> list[list[int]]:
    """[how long it ran, how long it waited for a processor] for each process, in ns; 0 if the kernel does not count."""
    texts = [os.pread(schedstat, 100, 0) for schedstat in clocks[::2] if schedstat != NULL]
    return [[*map(int, text.split()), 0, 0][:2] for text in texts]


def own_clock(clocks: list[int], until: float = math.inf) -> float:
    """time.monotonic() without the seconds in which these processes waited for a processor that others had.

    A process waits while its main thread is ready to run and does not run. The kernel counts these waits as the second
    number of /proc/PID/schedstat, but adds each wait only when it ends. So if the result would exceed `until`, a second
    look finds how long a current wait may be: the time between the two looks in which the process did not run. This is
    subtracted. A process that neither ran nor ended a wait between the looks may have waited for much longer: then the
    result is less than `until`.
    """
    first = time.monotonic()
    before = ran_and_waited(clocks)
    own = first - sum(waited for _, waited in before) / 1e9
    if own < until:
        return own
    if any(are_ready(clocks)):
        time.sleep(LOOK_S)
    second = time.monotonic()
    ready = are_ready(clocks)  # before the counts: those of a process that sleeps contain all its waits
    after = ran_and_waited(clocks)
    own = second - sum(waited for _, waited in after) / 1e9
    for old, new, is_ready in zip(before, after, ready, strict=True):
        if is_ready and new[0]:  # otherwise the kernel does not count
            if old == new:
                return min(own, until - LOOK_S)
            ran_s = (new[0] - old[0]) / 1e9
            own -= max(second - first - ran_s, 0.0)
    return own


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


class ThreadSemaphore:
    """Replaces multiprocessing's semaphore, which is a file. It is for threads only: no run can start processes."""

    SEM_VALUE_MAX = 2**31 - 1

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> None:
        self.kind = kind
        self.maxvalue = maxvalue
        self.name = None
        self.handle = 0
        self.lock: Any = _thread.RLock() if kind == 0 else __import__("threading").Semaphore(value)
        self.acquire = self.lock.acquire
        self.release = self.lock.release

    def __enter__(self) -> Any:
        return self.acquire()

    def __exit__(self, *_: Any) -> None:
        self.release()


def execute(source: bytes, name: str, null: int) -> types.ModuleType:
    """Runs the program as module `name`. null: a descriptor of /dev/null."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__file__ = "program.py"
    sys.argv = ["program.py"]
    semaphores = types.ModuleType("_multiprocessing")
    vars(semaphores).update(SemLock=ThreadSemaphore, sem_unlink=lambda name: None)
    sys.modules["_multiprocessing"] = semaphores
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


def is_builtin(value: Any) -> bool:
    return isinstance(value, type) and getattr(builtins, value.__name__, None) is value


def encode_defaultdict(value: defaultdict) -> list:
    factory = value.default_factory
    return [factory if is_builtin(factory) else None, dict(value)]


def named_zone(offset: timedelta, name: str) -> timezone:
    zone = timezone(offset)
    return zone if zone.tzname(None) == name else timezone(offset, name)


def text_file(text: str, position: int) -> io.StringIO:
    file = io.StringIO(text)
    file.seek(position)
    return file


def in_list(function: Callable) -> Callable:
    """`function`, but with its result in a list."""
    return lambda value: [function(value)]


def spread(make: Callable) -> Callable:
    """`make`, but with all its arguments as one list."""
    return lambda items: make(*items)


RANGE = operator.attrgetter("start", "stop", "step")
# Plain data that JSON lacks: name -> (type, value to items, items to value). A subclass is sent as its base.
PLAIN = {
    "Counter": (Counter, dict.items, lambda items: Counter(dict(items))),
    "OrderedDict": (OrderedDict, OrderedDict.items, OrderedDict),
    "defaultdict": (defaultdict, encode_defaultdict, spread(defaultdict)),
    "dict": (dict, dict.items, dict),
    "tuple": (tuple, tuple.__iter__, tuple),
    "set": (set, set.__iter__, set),
    "frozenset": (frozenset, frozenset.__iter__, frozenset),
    "deque": (deque, lambda value: [list(deque.__iter__(value)), value.maxlen], spread(deque)),
    "bytes": (bytes, in_list(bytes.hex), spread(bytes.fromhex)),
    "bytearray": (bytearray, in_list(bytearray.hex), spread(bytearray.fromhex)),
    "int": (int, in_list(hex), lambda items: int(*items, 16)),  # a long one: JSON's digits are limited
    "complex": (complex, operator.attrgetter("real", "imag"), spread(complex)),
    "range": (range, RANGE, spread(range)),
    "Decimal": (Decimal, in_list(str), spread(Decimal)),
    "Fraction": (Fraction, operator.attrgetter("numerator", "denominator"), spread(Fraction)),
    "datetime": (datetime, in_list(datetime.isoformat), spread(datetime.fromisoformat)),
    "date": (date, in_list(date.isoformat), spread(date.fromisoformat)),
    "clock": (clock, in_list(clock.isoformat), spread(clock.fromisoformat)),
    "timedelta": (timedelta, operator.attrgetter("days", "seconds", "microseconds"), spread(timedelta)),
    "timezone": (timezone, lambda value: [value.utcoffset(None), value.tzname(None)], spread(named_zone)),
    "slice": (slice, RANGE, spread(slice)),
    "array": (
        array.array,
        lambda value: [value.typecode, value.tolist()],
        lambda items: array.array(str(items[0]), items[1]),
    ),
    "memoryview": (memoryview, lambda value: [bytes(value).hex()], lambda items: memoryview(bytes.fromhex(*items))),
    "mappingproxy": (types.MappingProxyType, lambda v: dict(v).items(), lambda v: types.MappingProxyType(dict(v))),
    "dict_keys": (type({}.keys()), list, lambda items: dict.fromkeys(items).keys()),
    "dict_values": (type({}.values()), list, lambda items: dict(enumerate(items)).values()),
    "dict_items": (type({}.items()), list, lambda items: dict(items).items()),
    "StringIO": (io.StringIO, lambda value: [io.StringIO.getvalue(value), value.tell()], spread(text_file)),
    "Pattern": (re.Pattern, operator.attrgetter("pattern", "flags"), spread(re.compile)),
    "ChainMap": (ChainMap, lambda value: value.maps, spread(ChainMap)),
    "namespace": (
        types.SimpleNamespace,
        lambda value: vars(value).items(),
        lambda items: types.SimpleNamespace(**dict(items)),
    ),
}
# Subclasses of these are no plain data. Neither is a value that contains itself, such as a tree with links to its root.
EXACTLY = (ChainMap, types.SimpleNamespace)
# Values that are sent as their text. Their modules are imported when such a value arrives.
TEXTUAL = set(
    "pathlib.PosixPath pathlib.PurePosixPath pathlib.WindowsPath pathlib.PureWindowsPath uuid.UUID "
    "ipaddress.IPv4Address ipaddress.IPv4Network ipaddress.IPv4Interface "
    "ipaddress.IPv6Address ipaddress.IPv6Network ipaddress.IPv6Interface".split()
)
NOT_GIVEN = object()
SINGLETONS = {"Ellipsis": ..., "NotImplemented": NotImplemented}
MUTABLE = (list, dict, set, deque, bytearray, array.array, io.StringIO)
SCALARS = {str, float, bool, types.NoneType}
# A container that both sides have stays shared if it is among the last ones and they are small: every message compares
# all shared containers with what the other side knows.
NUM_SHARED = 16
SHARED_ITEMS = 2000
DATACLASSES = "asdict astuple fields is_dataclass replace".split()
SEEDS = {"random": ("getstate", "setstate"), "numpy.random": ("get_state", "set_state")}


def is_mutable(value: Any) -> bool:
    return isinstance(value, MUTABLE) or type(value) in EXACTLY or type(value).__name__ == "ndarray"


class Unsupported(BaseException):
    """A test needs something that the link cannot do: the fault of neither the program nor the test."""


class Link:
    """One end of the socket between the tests and the program: requests and replies, as lines of JSON.

    Plain data (numbers, text, bytes, dates, and containers of these) is copied. If a container is an argument, a result
    or a global of the program, changes that one side makes to it are made on the other side later. Every other value
    stays where it is, and the other side gets a Ref. So == in a test is that of the test's own process, and the program
    cannot replace it.

    Values are encoded and decoded recursively. More Python frames for each level would lower the depth that succeeds.
    """

    def __init__(self, fd: int, names: dict[str, Any] | None = None, null: int = NULL) -> None:
        self.socket = socket.socket(fileno=fd)
        self.null = null
        self.lines = self.socket.makefile("rb")
        self.names = names  # the program's; None at the tests' end, which answers few requests: see allowed
        self.kept: dict[int, Any] = {}  # by id, the values to which the other side has references
        self.refs: dict[int, Ref] = {}
        self.made = {}  # exceptions and named tuples
        # Number -> a container, and its content as the other side knows it. The numbers of the tests are negative, and
        # the container that was used last is the last one.
        self.shared: dict[int, tuple[Any, Any]] = {}
        self.num_shared = 0
        self.depth = 0
        self.forgotten = []
        # The program's globals that the tests know. At the program's end, the values that they had. At the tests' end,
        # the test's own names as well.
        self.given: dict[str, Any] = {}
        self.scope: dict[str, Any] = {}
        self.seeded = {}  # module whose generator the test has seeded -> the state that was last sent
        self.path = []  # the values of EXACTLY's types that are being encoded, outermost first
        self.broken = False  # The other side has ended or broken the protocol: all later tests fail
        self.unsupported = ""  # what could not be passed to the program
        self.recursion = sys.getrecursionlimit()
        self.input = builtins.input
        self.printed = io.StringIO()
        self.lock = _thread.RLock()

    def send(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict:
        line = self.lines.readline(FRAME_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("too long a reply" if line else "the program ended")
        return json.loads(line)

    def encode(self, value: Any) -> Any:
        """The value as JSON data."""
        if value is None or isinstance(value, (bool, str, float)):
            return value
        if isinstance(value, int) and abs(value) < 2**63:
            return value
        kind = type(value)
        if isinstance(value, list):
            items = list(list.__iter__(value))
            return items if is_flat(items) else [self.encode(item) for item in items]
        if isinstance(value, tuple):
            fields = getattr(kind, "_fields", None)
            if isinstance(fields, tuple):
                return {"namedtuple": [kind.__name__, fields, [self.encode(item) for item in tuple.__iter__(value)]]}
        full_name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        if full_name in TEXTUAL:
            return {"text": [full_name, str(value)]}
        for name, (plain, to_items, _) in PLAIN.items():
            if isinstance(value, plain):
                if plain not in EXACTLY:
                    return {name: [self.encode(item) for item in to_items(value)]}
                if kind is plain:
                    items = self.held(value, to_items)
                    if items is not None:
                        return {name: items}
                break
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufcU":
            data = self.encode(value.tolist())
            return {"ndarray": [data, value.dtype.str, value.shape]} if kind.__name__ == "ndarray" else data
        if isinstance(value, Ref):
            return {"back": vars(value)["_number"]}
        if is_builtin(value):
            return {"type": value.__name__}
        if value is ... or value is NotImplemented:
            return {"singleton": repr(value)}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [base.__name__ for base in value.__mro__]}
        if isinstance(value, BaseException):
            attributes = {name: self.encode(item) for name, item in vars(value).items() if not name.startswith("_")}
            return {"raised": [[base.__name__ for base in kind.__mro__], self.encode(list(value.args)), attributes]}
        if self.names is None:
            return self.refer_to_test(value)
        return self.refer(value, "coroutine" if isinstance(value, types.CoroutineType) else "ref")

    def held(self, value: Any, to_items: Any) -> list | None:
        """The encoded items of a value of EXACTLY's types; None if the value contains itself."""
        if any(value is above for above in self.path):
            raise RecursionError
        encode = self.share if type(value) is ChainMap else self.encode  # Both sides have the dicts of a ChainMap
        self.path.append(value)
        try:
            return [encode(item) for item in to_items(value)]
        except RecursionError:
            if self.path[1:]:
                raise
            return None
        finally:
            self.path.pop()

    def refer(self, value: Any, kind: str = "ref") -> dict:
        """Encodes a value as a reference, and keeps the value."""
        self.kept[id(value)] = value
        return {kind: id(value)}

    def refer_to_test(self, value: Any) -> dict:
        """At the tests' end: encodes a value that is not plain data."""
        kind = type(value)
        if kind.__module__ == "test":
            return self.refer(value, "object")
        if callable(value):
            if isinstance(value, types.FunctionType):  # with the attributes that functools.wraps copies
                self.kept[id(value)] = value
                return {"function": [id(value), value.__name__, value.__doc__]}
            return self.refer(value)
        if hasattr(value, "__next__"):
            return self.refer(value, "iterator")
        try:  # Of the standard library. Only the program's end unpickles
            return {"pickle": pickle.dumps(value).hex()}
        except Exception:
            self.unsupported = f"a {kind.__name__} of the test cannot be passed to the program"
            raise Unsupported(self.unsupported) from None

    def decode(self, data: Any) -> Any:
        """The value of what `encode` or `share` of the other side gave."""
        if isinstance(data, list):
            is_nested = not {list, dict}.isdisjoint(map(type, data))
            return [self.decode(item) for item in data] if is_nested else list(data)
        if not isinstance(data, dict):
            return data
        ((name, body),) = data.items()
        if name in PLAIN:
            _, _, from_items = PLAIN[name]
            return from_items(self.decode(list(body)))
        if name == "shared":
            return self.common(*body)
        if name == "text" and body[0] in TEXTUAL:
            module, kind = body[0].split(".")
            return getattr(__import__(module), kind)(str(body[1]))
        if name == "singleton":
            return SINGLETONS[body]
        if name == "namedtuple":
            return self.named_tuple(str(body[0]), tuple(map(str, body[1])))(*self.decode(body[2]))
        if name == "ndarray":
            return __import__("numpy").array(self.decode(body[0]), body[1]).reshape(body[2])
        if name == "back":
            return self.kept[body]
        if name == "function" and self.names is not None:
            function = self.decode({"ref": body[0]})
            function.__name__ = function.__qualname__ = body[1]
            function.__doc__ = body[2]
            return function
        if name in ("ref", "object", "iterator", "coroutine") and isinstance(body, int):
            ref = self.refs.setdefault(body, Ref(self, body))
            if name == "coroutine":
                return wait_for(ref)
            if name == "iterator":
                return go_through(ref)
            if name == "ref" and self.names is not None:  # A function: it has to be true and hashable
                return lambda *args, **keywords: ref(*args, **keywords)
            return ref
        if name == "type":
            kind = getattr(builtins, body, None)
            if is_builtin(kind):
                return kind
        if name == "exception":
            return self.exception_class(body)
        if name == "raised":
            return self.exception(*body)
        if name == "pickle" and self.names is not None:
            return pickle.loads(bytes.fromhex(body))
        raise ConnectionError("not a value")

    def share(self, value: Any) -> Any:
        """Encodes an argument, a result or a global."""
        if not is_mutable(value):
            return self.encode(value)
        for number, (known, _) in self.shared.items():
            if known is value:
                return {"shared": [number]}  # see changes
        self.num_shared += 1
        number = self.num_shared if self.names is not None else -self.num_shared
        data = self.encode(value)
        self.shared[number] = (value, data)
        return {"shared": [number, data]}

    def common(self, number: int, *data: Any) -> Any:
        """Decodes what `share` has encoded. The container becomes the last one."""
        value, known = self.shared.pop(number, (None, None))
        if data and value is None:
            value = self.decode(*data)
        elif data:
            replace_content(value, self.decode(*data))
        elif value is None:
            raise ConnectionError("not a value")
        if data:
            known = self.encode(value)
        self.shared[number] = (value, known)
        return value

    def changes(self) -> list:
        """[number, content] of each shared container whose content the other side does not know."""
        changed = []
        for number, (value, known) in list(self.shared.items()):
            unsupported = self.unsupported
            try:
                data = self.encode(value)
            except (RecursionError, Unsupported):  # Now it contains itself or a value that cannot be passed
                self.unsupported = unsupported
                self.stop_sharing(number)
                continue
            if data != known:
                self.shared[number] = (value, data)
                changed.append([number, data])
        return changed

    def stop_sharing(self, number: int) -> None:
        del self.shared[number]
        self.forgotten.append(number)

    def follow(self, changed: list) -> None:
        """Makes the changes that the other side's `changes` returned."""
        for number, data in changed:
            if number in self.shared:
                self.common(number, data)

    def forget(self) -> None:
        """Between two requests of a test: stops sharing large containers, and all but the last few."""
        num_left = NUM_SHARED
        room = SHARED_ITEMS
        for number in reversed(list(self.shared)):
            _, data = self.shared[number]
            num_left -= 1
            room_after = room_left(data, room)
            if num_left >= 0 and room_after >= 0:
                room = room_after
            else:
                self.stop_sharing(number)

    def named_tuple(self, name: str, fields: tuple[str, ...]) -> type:
        """The program's class of this name if it has these fields, otherwise a class that is made here."""
        own = (self.names or {}).get(name)
        if isinstance(own, type) and getattr(own, "_fields", None) == fields:
            return own
        if (name, fields) not in self.made:
            self.made[name, fields] = namedtuple(name, fields)
        return self.made[name, fields]

    def exception_class(self, names: list[str]) -> type:
        """The builtin exception of this name, otherwise one that is made here. names: of the class and its bases."""
        kind = getattr(builtins, names[0], None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
        if names[0] not in self.made:
            self.made[names[0]] = type(names[0], (self.exception_class(names[1:]),), {})
        return self.made[names[0]]

    def exception(self, names: list[str], args: list, attributes: dict) -> BaseException:
        """Decodes an exception."""
        kind = self.exception_class(names)
        args = self.decode(args)
        try:
            error = kind(*args)
        except Exception:
            error = kind.__new__(kind)
        for name, value in attributes.items():
            if not name.startswith("_"):
                setattr(error, name, self.decode(value))
        return error

    def do(self, name: str, *args: Any, **keywords: Any) -> Any:
        """`ask`, for one thread at a time."""
        with self.lock:
            return self.ask(name, *args, **keywords)

    def ask(self, name: str, *args: Any, **keywords: Any) -> Any:
        """Asks the other side. Makes its changes of the arguments here too, and raises its exceptions here."""
        self.depth += 1
        try:
            changed = self.changes()
            values = [self.share(value) for value in [*args, *keywords.values()]]
            request = {"do": name, "args": values, "names": list(keywords), "shared": changed}
            if self.names is None:
                request |= self.state()
            return self.exchange(name, request)
        finally:
            self.depth -= 1
            if self.names is None and not self.depth:
                self.forget()

    def exchange(self, name: str, request: dict) -> Any:
        """Sends a request, answers the other side's requests until it replies, and returns the result."""
        try:
            self.send(request)
            reply = self.receive()
            while "do" in reply:
                self.send(self.answer(reply))
                reply = self.receive()
            self.follow(reply["shared"])
            if self.names is None:
                self.take_globals(reply["globals"])
                if isinstance(reply.get("printed"), str):
                    sys.stdout.write(reply["printed"])
            if "error" not in reply:
                return self.decode(reply["ok"])
            error = self.decode(reply["error"])
        except BaseException as error:
            self.broken = True
            raise error if isinstance(error, ConnectionError) else ConnectionError(describe(error)) from None
        if isinstance(error, StopIteration) and name != "__next__":
            error = RuntimeError("StopIteration")  # as in a generator: StopIteration would silently end all(map(..))
        raise error

    def state(self) -> dict:
        """The settings of a test that apply to both sides, as far as the program does not know them."""
        state: dict[str, Any] = {"forget": self.forgotten}
        self.forgotten = []
        if builtins.input is not self.input:  # The test has replaced it
            state["input"] = self.encode(builtins.input)
        if isinstance(sys.stdin, io.StringIO):
            state["stdin"] = self.encode(sys.stdin)
        recursion = sys.getrecursionlimit()
        if recursion != self.recursion:
            self.recursion = recursion
            state["recursion"] = recursion
        for module, known in self.seeded.items():
            get_state, _ = SEEDS[module]
            data = self.encode(getattr(sys.modules[module], get_state)())
            if data != known:
                self.seeded[module] = data
                state.setdefault("seeds", {})[module] = data
        return state

    def set_state(self, state: dict) -> None:
        """Takes over what the other side's `state` returned."""
        for number in state["forget"]:
            self.shared.pop(number, None)
        builtins.input = self.decode(state["input"]) if "input" in state else self.input
        sys.stdin = self.decode(state["stdin"]) if "stdin" in state else sys.__stdin__
        if "recursion" in state:
            sys.setrecursionlimit(state["recursion"])
        for module, data in state.get("seeds", {}).items():
            _, set_state = SEEDS[module]
            __import__(module)
            getattr(sys.modules[module], set_state)(self.decode(data))

    def follow_seeds(self, module: str) -> None:
        """At the tests' end: after the first seed, the program's generator has the state of the test's generator.

        What the program draws does not change the test's generator: otherwise the program would choose its draws.
        """

        def seed(*args: Any, **keywords: Any) -> None:
            original(*args, **keywords)
            self.seeded[module] = None

        __import__(module)
        generator: Any = sys.modules[module]
        original = generator.seed
        generator.seed = seed

    def take_globals(self, changed: dict[str, Any]) -> None:
        """Gives changed globals of the program to the test, except names to which the test has bound another value."""
        for name, data in changed.items():
            if name in self.given and self.scope.get(name) is self.given[name]:
                value = self.decode(data)
                if name[0].isupper() and type(value) is Ref:
                    value = Class(**vars(value))
                self.scope[name] = value
                self.given[name] = value

    def answer(self, request: dict) -> dict:
        """The reply to a request of the other side."""
        reply = {}
        of_tests = self.names is None
        try:
            name = request["do"]
            if of_tests and not self.allowed(name, request["args"]):
                raise PermissionError("the program may not ask that")
            self.follow(request["shared"])
            values = self.decode(request["args"])
            num_positional = len(values) - len(request["names"])
            keywords = dict(zip(request["names"], values[num_positional:], strict=True))
            if not of_tests:
                self.set_state(request)
            result = self.perform(name, *values[:num_positional], **keywords)
            stays = name == "make" and not of_tests and has_own_methods(type(result))
            reply["ok"] = self.refer(result) if stays else self.share(result)
        except BaseException as error:
            reply = {"error": self.encode(error)}
        if self.names is not None:
            names = self.names
            changed = {name: names[name] for name, old in self.given.items() if names.get(name, old) is not old}
            self.given |= changed
            reply["globals"] = {name: self.share(value) for name, value in changed.items()}
        reply["shared"] = self.changes()
        if not of_tests:
            printed = self.printed.getvalue()
            if printed:
                reply["printed"] = printed
                self.printed.seek(0)
                self.printed.truncate()
        return reply

    def allowed(self, name: str, args: list) -> bool:
        """Whether the program may ask this of the tests.

        The program may call what it was given, and use the objects of classes that the test itself defines, but not
        their private attributes: through those it could reach everything in this process.
        """
        target = args[0]
        if not isinstance(target, dict) or "back" not in target:
            return False
        value = self.kept[target["back"]]
        if name in ("call", "__next__"):
            return True
        if type(value).__module__ != "test":
            return False
        if name in ("getattr", "setattr"):
            attribute = args[1]
            return isinstance(attribute, str) and not attribute.startswith("_")
        return name in OPERATORS

    def perform(self, name: str, *args: Any, **keywords: Any) -> Any:
        """Does what the other side asks."""
        if name == "load":
            sys.stdout = self.printed
            self.names = vars(execute(open(3, "rb").read(), "program", self.null))
            return None
        if name == "names":  # The reply contains those that the program has, as globals that have changed
            self.given = dict.fromkeys(args, NOT_GIVEN)
            return None
        if name in ("call", "make"):
            return args[0](*args[1:], **keywords)
        if name == "await":
            return __import__("asyncio").run(*args)
        if name in ("__copy__", "__deepcopy__"):
            return getattr(copy, name.strip("_"))(*args)
        if name in ("__enter__", "__exit__"):
            return getattr(type(args[0]), name)(*args)
        if name in DATACLASSES:
            return getattr(dataclasses, name)(*args, **keywords)
        # operator has __getitem__; __len__ and getattr are builtins
        function = vars(operator).get(name) or getattr(builtins, name.strip("_"))
        return function(*args)


def room_left(data: Any, room: int) -> int:
    """`room` minus the number of items in this data. Stops counting when the result is negative."""
    if isinstance(data, dict):
        data = list(data.values())
    for item in data if isinstance(data, list) else ():
        room = room_left(item, room - 1)
        if room < 0:
            break
    return room


def is_flat(items: list) -> bool:
    """Whether JSON can represent these items unchanged. Fast, also for many items."""
    kinds = set(map(type, items))
    if int in kinds:
        integers = items if len(kinds) == 1 else [item for item in items if type(item) is int]
        try:
            array.array("q", integers)
        except OverflowError:
            return False
    return kinds <= SCALARS | {int}


def has_own_methods(kind: type) -> bool:
    """Whether the program has added methods to the class, for instance to a subclass of dict.

    The methods that namedtuple generates do not count.
    """
    if issubclass(kind, BaseException):
        return False
    generated = []
    if hasattr(kind, "_fields"):
        generated = "__new__ __repr__ __getnewargs__ __replace__ _replace _asdict _make".split()
    for base in kind.__mro__:
        if base.__module__ == "program":
            for name, value in vars(base).items():
                is_method = isinstance(value, (types.FunctionType, property, classmethod, staticmethod))
                if is_method and name not in generated:
                    return True
    return False


def of_either_side(name: str, here: Any, value: Any, *args: Any, **keywords: Any) -> Any:
    """dataclasses.`name`. For objects of the program, the program computes it."""
    if isinstance(value, Ref):
        return vars(value)["_link"].do(name, value, *args, **keywords)
    return here(value, *args, **keywords)


async def wait_for(ref: Any) -> Any:
    return vars(ref)["_link"].do("await", ref)


def go_through(ref: Any) -> Any:
    while True:
        try:
            item = vars(ref)["_link"].do("__next__", ref)
        except StopIteration:
            return
        yield item


def is_callable(value: Any) -> bool:
    """callable(value), which for an object of the program only the program knows."""
    return vars(value)["_link"].do("callable", value) if type(value) is Ref else callable(value)


def replace_content(old: Any, new: Any) -> None:
    """Gives a container the content of another one."""
    if isinstance(old, io.StringIO):
        old.seek(0)
        old.truncate()
        old.write(new.getvalue())
        old.seek(new.tell())
    elif isinstance(old, (list, bytearray, array.array)):
        old[:] = new
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, ChainMap) and isinstance(new, ChainMap):
        old.maps[:] = new.maps
    elif type(old) is type(new) is types.SimpleNamespace:
        vars(old).clear()
        vars(old).update(vars(new))
    elif type(old).__name__ == "ndarray":
        old[...] = new


def describe(error: BaseException) -> str:
    name = type(error).__name__
    text = f"{name}: {error}" if str(error) else name
    return text[:200]


class Ref:
    """An object of the other side, most often an object of the program in the process of the tests.

    The program answers what a test asks of it: attributes, calls, its truth, its length, == with another Ref. A Ref is
    never equal to plain data, and it cannot be ordered or computed with plain data. So a function fails every test that
    compares with a value if it returns an object that claims to equal everything, or whose difference to everything is
    0. Instance is the exception. The program has Refs of the test's own objects: see Link.allowed.
    """

    def __init__(self, _link: Link, _number: int) -> None:
        vars(self).update(_link=_link, _number=_number)

    def _ask(self, name: str, *args: Any) -> Any:
        return self._link.do(name, self, *args)

    def _ask_about_two(self, name: str, other: Any) -> Any:
        return self._link.do(name, self, other) if isinstance(other, Ref) else NotImplemented

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # numpy would follow pointers that the program gives it
            raise AttributeError(name)
        return self._link.do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.do("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._link.do("delattr", self, name)

    def __format__(self, spec: str) -> str:
        return self._ask("__format__", spec)

    def __subclasscheck__(self, kind: type) -> bool:
        return self._link.do("issubclass", kind, self) is True

    def __mro_entries__(self, bases: tuple) -> tuple:
        self._link.unsupported = "a base class of the test cannot be passed to the program and back"
        raise Unsupported(self._link.unsupported)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        makes = type(self) is Class
        result = self._link.do("make" if makes else "call", self, *args, **keywords)
        return as_instance(result) if makes else result

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self._ask("__exit__", kind, error, None)

    def __deepcopy__(self, memo: dict) -> Any:
        return self._ask("__deepcopy__")

    def __instancecheck__(self, value: object) -> bool:
        return self._link.do("isinstance", value, self) is True


class Class(Ref):
    """What a test calls by a capitalized name."""


class Instance(Ref):
    """The result of calling a Class. A test is about its operators, so they work with plain data too."""

    def _compute(self, name: str, other: Any) -> Any:
        return as_instance(self._link.do(name, self, other))

    def _compute_reflected(self, name: str, other: Any) -> Any:
        return as_instance(self._link.do(name, other, self))

    def __contains__(self, value: object) -> bool:
        return self._link.do("__contains__", self, value) is True


def as_instance(result: Any) -> Any:
    """A Ref as an Instance; any other result unchanged."""
    return Instance(**vars(result)) if type(result) is Ref else result


UNARY = "getitem setitem delitem len iter reversed next str repr bool int float index round hash neg pos abs enter copy"
UNARY = UNARY.split()
COMPARED = "eq ne lt le gt ge".split()
COMPUTED = "add sub mul truediv floordiv mod pow matmul and or xor divmod".split()  # all but the last one in place too
OPERATORS = {f"__{name}__" for name in [*UNARY, *COMPARED, *COMPUTED, "contains"]}


def delegate(kind: type, method: Any, names: list[str], prefix: str = "", asked_prefix: str = "") -> None:
    """Defines the operators of these names on the class by a method that asks the other side."""
    for name in names:
        setattr(kind, f"__{prefix}{name}__", functools.partialmethod(method, f"__{asked_prefix}{name}__"))


delegate(Ref, Ref._ask, UNARY)  # `in` uses __iter__
delegate(Ref, Ref._ask_about_two, COMPARED + COMPUTED)
delegate(Instance, Instance._compute, COMPARED + COMPUTED)
delegate(Instance, Instance._compute, COMPUTED[:-1], "i", "i")
delegate(Instance, Instance._compute_reflected, COMPUTED, "r")
Instance.__hash__ = Ref.__hash__
for _kind in (Ref, Class, Instance):  # Otherwise a function of the program would have the docstring of the class
    _kind.__doc__ = property(lambda self: self._link.do("getattr", self, "__doc__"))


def do_calls(server: Server) -> int:
    """Does what the tests ask. They first ask to load the program. Descriptors: 3 program, 4 link."""
    link = Link(4, {}, server.null)
    while True:
        request = link.receive()
        link.send(link.answer(request))


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
JUDGES = set(
    "abs all any bool callable dict enumerate filter float int isclose isinstance iter len list map next print range "
    "repr round set sorted str tuple type zip".split()
)


def used_below(table: symtable.SymbolTable) -> set[str]:
    """The global names that a function or class uses, and those that its inner ones use."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    for child in table.get_children():
        names |= used_below(child)
    return names


def bound_below(table: symtable.SymbolTable) -> set[str]:
    """The global names that a function binds by `global`, and those that its inner ones bind."""
    names = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_declared_global() and symbol.is_assigned()
    }
    for child in table.get_children():
        names |= bound_below(child)
    return names


def bound_in_globals(node: ast.AST) -> list[str]:
    """["x"] for globals()["x"] = ...; otherwise nothing."""
    is_store = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    if is_store and isinstance(node.slice, ast.Constant) and ast.unparse(node.value) == "globals()":
        return [str(node.slice.value)]
    return []


def used_first(test: str) -> set[str]:
    """The names that a test uses before it binds them, as in `f = f(1)`: they are the program's."""
    first: dict[str, str] = {}
    for instruction in dis.get_instructions(compile(test, "test", "exec")):
        if instruction.opname in ("LOAD_NAME", "STORE_NAME"):
            first.setdefault(instruction.argval, instruction.opname)
    return {name for name, opname in first.items() if opname == "LOAD_NAME"}


def names_in(test: str) -> set[str]:
    """The names that a test uses and does not bind itself.

    What it binds is its own, or else the program could replace a value that the test compares with."""
    top = symtable.symtable(test, "test", "exec")
    symbols = top.get_symbols()
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    bound -= used_first(test)
    for child in top.get_children():
        used |= used_below(child)
        bound |= bound_below(child)
    for node in ast.walk(ast.parse(test)):
        bound.update(bound_in_globals(node))
    return used - bound


# What a test can find out only in the program's own process: modules of which each side has its own state, and the
# type, the identity and the content of objects of the program's classes
OWN_STATE = set("inspect unittest.mock gc weakref logging tempfile".split())
OWN_NAMES = "environ getcontext setcontext localcontext".split()


def imported_modules(node: ast.AST) -> set[str | None]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {node.module} if isinstance(node, ast.ImportFrom) else set()


def asked_name(node: Any) -> str:
    """The name of an attribute, a variable or a definition, or of a function that is called with `record`."""
    if isinstance(node, ast.Call) and any(keyword.arg == "record" for keyword in node.keywords):
        return ast.unparse(node.func).removeprefix("warnings.")
    return getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))


def asks_identity(node: ast.AST) -> bool:
    """Whether this is a comparison by `is` without a constant, or asks for the type or the content of an object."""
    if isinstance(node, ast.Compare):
        values = [node.left, *node.comparators]
        by_identity = any(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)
        return by_identity and not any(isinstance(value, ast.Constant) for value in values)
    if isinstance(node, ast.Name):
        return node.id in ("type", "vars")
    return isinstance(node, ast.Attribute) and node.attr in ("__dict__", "__class__")


def beyond(tree: ast.Module, classes: set[str]) -> str:
    """What a test asks that the link cannot answer correctly, if anything. classes: names of the program's classes."""
    nodes = list(ast.walk(tree))
    own_state = OWN_STATE
    if any(isinstance(node, ast.Constant) and node.value == "builtins.input" for node in nodes):
        own_state = OWN_STATE - {"unittest.mock"}  # The link passes the test's input() on
    for node in nodes:
        modules = own_state & imported_modules(node)
        if modules:
            return f"{min(modules)} of the test cannot be passed to the program"
        name = asked_name(node)
        if name in OWN_NAMES or name == "catch_warnings" and isinstance(node, ast.Call):  # what the warnings record
            return f"{name} of the test cannot be passed to the program"
        if classes and asks_identity(node):
            return "the identity or content of an object of the test cannot be passed to the program"
    return ""


DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


class TimeLimit:
    """Ends this process if a test takes too long. Its signal handler is for the whole process.

    SIGALRM ends a test after `seconds` of own time: see own_clock. SIGPROF ends it after as many seconds of processor
    time, also when Python cannot run a handler.
    """

    def __init__(self, clocks: list[int], seconds: float) -> None:
        self.clocks = clocks
        self.seconds = seconds
        self.start = 0.0
        signal.signal(signal.SIGALRM, self.at_alarm)

    def restart(self) -> None:
        self.start = own_clock(self.clocks)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def elapsed(self) -> float:
        return round(max(own_clock(self.clocks) - self.start, 0.0), 5)

    def at_alarm(self, *_: Any) -> None:
        """Sets the alarm again for the own time that is left; without any, the next alarm ends the process."""
        end = self.start + self.seconds
        left = end - own_clock(self.clocks, end)
        if left <= 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))
        if left <= 0:
            signal.pause()


def standard_names(used: set[str]) -> dict[str, Any]:
    """The builtins and what tests use of the standard library. used: the names that the tests use."""
    standard = dict(vars(builtins))
    exec(STANDARD, standard)
    for name, module in SLOW_STANDARD.items():
        if name in used:
            standard[name] = __import__(module)
    return standard


def name_of_program(uses: list[set[str]], standard: dict[str, Any]) -> str | None:
    """The one name that the program had to define, where tests use standard names alone; None if that is not known.

    It is in all tests that use any, and the only such name that is not there to judge results; or it is the only one.
    """
    names_of_users = [names for names in uses if names]
    shared = set.intersection(*names_of_users) & standard.keys()
    candidates = {name for name in shared if not is_judge(name, standard[name])} or shared
    return candidates.pop() if len(candidates) == 1 else None


def is_judge(name: str, value: Any) -> bool:
    """Whether a name of the standard library is one with which tests judge results: no program is asked for it."""
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    return name in JUDGES or isinstance(value, types.ModuleType) or is_exception


def replace_modules(link: Link, used: set[str], text: str) -> None:
    """Lets the dataclasses module work for the program's objects too, and the program follow the tests' seeds."""
    if "seed" in text:
        if "random" in text:
            link.follow_seeds("random")
        if "numpy" in text or "np" in used:
            link.follow_seeds("numpy.random")
    for name in DATACLASSES:
        setattr(dataclasses, name, functools.partial(of_either_side, name, getattr(dataclasses, name)))


def do_tests(server: Server) -> int:
    """Runs the tests. Descriptors: 3 {"tests", "skip", "seconds"}, 4 link, 5 results, 6 to 9 clocks.

    Writes a line of results, [problem or null, seconds, whether the link is to blame], for the loading of the program
    and for each test, except the first `skip` tests. Of these it only runs the definitions and imports, because later
    tests may use them. See TimeLimit for a test that takes too long.

    The tests get the program's names. Names of builtins and of the standard library are those of this process, because
    a program's own `sum` or `isclose` must not judge its results. If the tests use no other names, the program had to
    define a builtin, for instance `sum`: then that name is the program's. If it could be one of several, the tests can
    score no program: with all of them its own, a program could pass any test.
    """
    job = json.loads(open(3, "rb").read())
    tests = ["", *job["tests"]]  # The first one loads the program
    uses = [names_in(test) for test in tests]
    used = set().union(*uses)
    standard = standard_names(used)
    trees = [ast.parse(test) for test in tests]
    standard["callable"] = is_callable
    own = set(standard)
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, DEFINITION[:3])}
    unknown = ""
    if used and not used - own - defined:
        asked_for = name_of_program(uses, standard)
        own.discard(asked_for)
        unknown = "" if asked_for else "which builtin the program defines cannot be told from the tests"
    asked_of_program = [names - own - defined for names in uses]
    helpers = {}  # what the tests so far have defined or imported
    link = Link(4)
    replace_modules(link, used, "\n".join(tests))
    time_limit = TimeLimit([6, 7, 8, 9], job["seconds"])
    for number, tree in enumerate(trees):
        loads = number == 0
        definitions = [node for node in tree.body if isinstance(node, DEFINITION)]
        is_skipped = 0 < number <= job["skip"]
        if is_skipped:
            tree.body = definitions
        problem = None
        time_limit.restart()
        try:
            if loads:
                link.do("load")
            else:
                names = uses[number] - helpers.keys()
                asked = sorted(asked_of_program[number] - helpers.keys())
                scope = {"__name__": "test"} | {name: standard[name] for name in names & set(standard)} | helpers
                link.scope = scope
                link.given = {name: scope.get(name) for name in asked}
                link.do("names", *asked)
                exec(compile(tree, "test", "exec"), scope)
                bound = {name for node in definitions for name in binds(node)}
                helpers |= {name: scope[name] for name in bound & scope.keys()}
        except BaseException as error:
            problem = "the assertion failed" if isinstance(error, AssertionError) else describe(error)
            if not loads and not link.unsupported:
                classes = {name for name in asked_of_program[number] if name[0].isupper()}
                link.unsupported = beyond(tree, classes)
        if link.broken and problem is None:
            problem = "the program broke the protocol"
        unsupported = link.unsupported or ("" if loads else unknown)
        link.unsupported = ""
        problem = unsupported or problem
        if not is_skipped:
            line = json.dumps([problem, time_limit.elapsed(), bool(unsupported)])
            os.write(5, line.encode() + b"\n")
        if link.broken or loads and problem:
            break
    return 0


def binds(node: Any) -> list[str]:
    """The names that a definition or an import binds."""
    if hasattr(node, "name"):
        return [node.name]
    return [(alias.asname or alias.name).split(".")[0] for alias in node.names]


def try_to_connect() -> None:
    socket.socket(type=socket.SOCK_DGRAM).connect(("127.0.0.1", 9))


def try_to_fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def try_to_write(directory: str) -> None:
    path = os.path.join(directory, f"sandbox-probe-{os.getpid()}")
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)


def try_to_exec(leaks: list[str]) -> None:
    """Writes the result first, because the other program takes the place of this one."""
    os.pwrite(1, json.dumps([*leaks, "running other programs"]).encode(), 0)
    program = "/proc/self/exe" if os.path.exists("/proc/self/exe") else sys.executable
    os.execv(program, [sys.executable, "-c", ""])


def do_probe(server: Server) -> int:
    """Tries what has to be impossible. The result is the list of what succeeded. Descriptors: 1 result, 2 error."""
    leaks = []
    script = os.path.abspath(__file__)
    trainer = server.trainer_pid
    directories = ("/", "/tmp", "/dev/shm", os.path.dirname(script))
    attempts = [
        ("the network", try_to_connect),
        ("new processes", try_to_fork),
        *[("changing files", try_to_write, directory) for directory in directories],
        ("signals to other processes", os.kill, os.getppid(), 0),
        ("signals to other processes", os.kill, trainer, 0),
        ("reading files", open, script),
        ("reading files", open, "/etc/passwd"),
        ("reading the trainer's environment", open, f"/proc/{trainer}/environ"),
        ("tracing other processes", libc, "ptrace", 0x4206, trainer, 0, 0),  # PTRACE_SEIZE
        ("running other programs", try_to_exec, leaks),
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

    exit: status, or -signal. output, error: what it wrote to its first and second memory file. unsupported: the test
    needs what the link cannot do, whatever the program is.
    """

    problem: str | None
    seconds: float
    late: bool = False
    exit: int | None = None
    output: str = ""
    error: str = ""
    unsupported: bool = False


class Sandbox:
    """A fork server, which starts when it is needed, and again after it has died. One thread may use it at a time.

    preload: modules that the server imports before it locks itself down. without: for tests, "namespaces", "Landlock"
    or "seccomp" are left out. layers and leaks (see do_probe) are known once the server has started.
    """

    def __init__(self, preload: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> None:
        self.preload = preload
        self.without = without
        self.process = None
        self.number = 0  # of the last request
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
            probe = self.exchange("probe", ["", None, None], 10.0)
            self.leaks = sorted(set(json.loads(probe.output)))
        except (OSError, ValueError, SandboxError) as error:
            raise SandboxError(f"the code sandbox cannot start: {error} {self.stop()}".strip()) from None

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

    def exchange(self, role: str, files: list[str | None], seconds: float) -> Run:
        """One run in a server that has started: see run."""
        fds = []
        try:
            for text in files:
                fd = os.memfd_create("sandbox")
                fds.append(fd)
                os.pwrite(fd, (text or "").encode(errors="replace"), 0)
            self.number += 1
            request = json.dumps([self.number, role, seconds, PATIENCE])
            socket.send_fds(self.socket, [request.encode()], fds)
            reply = self.receive(PATIENCE * seconds + GRACE_S)
            if reply["number"] != self.number:
                raise SandboxError(f"reply {reply['number']} came for request {self.number}")
            written = [os.pread(fd, OUTPUT_BYTES, 0) for fd, text in zip(fds, files, strict=True) if text is None]
        finally:
            for fd in fds:
                os.close(fd)
        if reply["starved"]:
            others = f"others had the processors for {reply['waited']:.3g} s"
            raise SandboxError(f"{others}, which left {reply['seconds']:.3g} s of a limit of {seconds:g}")
        status = reply["exit"]
        problem = None
        if status is None:
            problem = f"time limit ({seconds:g} s)"
        elif status < 0:
            problem = f"killed by {signal.Signals(-status).name}"
        texts = [data.decode(errors="replace") for data in written]
        return Run(problem, reply["seconds"], status is None, status, *texts)

    def run(self, role: str, files: list[str | None], seconds: float) -> Run:
        """Does ROLES[role] in a process that has memory files as its descriptors 0, 1, ...

        files: their contents, None for a file that the process writes. seconds: limit of the wall time without the time
        in which the process waited for a processor that others had, if the kernel counts it. Raises SandboxError. The
        next run then starts the server again. So it does if a caller's own deadline interrupts this run: the late reply
        to this program must not become the answer to the next one.
        """
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        try:
            return self.exchange(role, files, seconds)
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


def not_run(runs: list[Run], num_tests: int) -> list[Run]:
    """The results of the tests after those that have run."""
    missing = Run(f"not run: {num_late(runs)} tests exceeded the time limit", 0.0)
    return [missing] * (num_tests - len(runs))


def run_tests(sandbox: Sandbox, program: str, tests: list[str], seconds: float) -> list[Run]:
    """Runs each test (Python statements that use the program's names) for at most `seconds`; see Sandbox.run.

    The program runs in a process of its own and only answers calls: see Link and Ref. If a test does not run to its
    end, both processes end, and the next test gets new ones. Raises SandboxError.
    """
    runs = []
    while len(runs) < len(tests) and num_late(runs) < MAX_TIME_LIMITS:
        num_left = len(tests) - len(runs)
        job = json.dumps({"tests": tests, "skip": len(runs), "seconds": seconds})
        run = sandbox.run("tests", [program, job, None], seconds * (num_left + 1) + 1)
        late = run.exit in (None, -signal.SIGALRM, -signal.SIGPROF)
        reason = run.problem or "the tests' process ended"
        if late:
            reason = f"time limit ({seconds:g} s)"
        lines = [json.loads(line) for line in run.output.splitlines()]
        loading = lines[0][0] if lines else reason
        if loading is not None:
            return runs + [Run(f"loading the program: {loading}", 0.0)] * num_left
        done = lines[1:]
        for problem, elapsed, unsupported in done:
            runs.append(Run(problem, elapsed, unsupported=unsupported))
        # A last test that broke the link has a result of its own
        broke_link = run.exit == 0 and done
        if len(done) < num_left and not broke_link:
            runs.append(Run(reason, seconds if late else 0.0, late))
    return runs + not_run(runs, len(tests))


def same_line(line: str, expected: str) -> bool:
    """Whether two lines are equal as text, or word by word as numbers."""
    if line.rstrip() == expected.rstrip():
        return True
    words = line.split()
    expected_words = expected.split()
    try:  # Words that differ first: most often one of them settles it
        pairs = zip(words, expected_words, strict=True)
        if not all(Decimal(word) == Decimal(wanted) for word, wanted in pairs if word != wanted):
            return False
        return all(Decimal(word) == Decimal(word) for word in words)
    except (ArithmeticError, ValueError):
        return False  # not numbers, or not as many


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
    return runs + not_run(runs, len(tests))


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
