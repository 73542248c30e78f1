"""Runs Python programs of unknown intent: no network, no files of others, no other programs, bounded in everything.

    python scripts/sandbox.py                        # what this machine allows, layer by layer
    python scripts/sandbox.py program.py < input     # runs a program in it

`Sandbox` starts this file as a fork server, a small Python process of its own. Every run is a fork of it which locks
itself down (rlimits, Landlock, seccomp; no_new_privs) and only then reads the program. The server itself sits in
namespaces of its own where the machine allows that. It never reads what a run is about: programs, inputs, tests and
results go through memory files (memfd) that it passes on unopened, so that no run finds them in its memory later. The
trainer gets back the files, an exit status and times, and judges for itself: expected outputs never come here.

Three layers do the work, and each is enough against most attacks:

    seccomp     a list of allowed system calls. Not on it: sockets, new processes, exec, signals, changes to files
    Landlock    reading beneath the Python installation and the system's libraries only
    namespaces  a file system with just these, read-only; no network device; the process sees no others, and when the
                server ends, the kernel ends whatever was started in there

`do_probe` tries the forbidden things from inside at every start; what succeeds is a leak, and leaks are for the caller
to refuse. Out of scope: kernel bugs, side channels such as timing. Standard library only; Linux, x86_64 and aarch64.
Sources: kernel.org, userspace-api/landlock and seccomp_filter; man7.org, namespaces(7), pid_namespaces(7).
"""

import argparse
import atexit
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
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from typing import NamedTuple

MEMORY_BYTES = 2**30  # address space of a run beyond the server's own
OUTPUT_BYTES = 4 * 2**20  # of each of standard output and error
FRAME_BYTES = 16 * 2**20  # of one message between a test and the program
STACK_BYTES = 64 * 2**20
MAX_THREADS = 512  # and processes, of all runs of a server, where that can be counted apart from the user's others
MAX_TIME_LIMITS = 3  # of a program's tests; further ones are not run, or 100 tests of an endless loop take 100 times T
START_TIMEOUT_S = 120.0
GRACE_S = 20.0  # for a reply, on a machine busy with other things
NOBODY = 65534
LAYERS = ("namespaces", "uid", "Landlock", "seccomp")  # what `without` may name; rlimits are always there
PRELOAD = (  # the server imports them once
    "array ast bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools heapq "
    "io itertools json math numbers operator random re statistics string time typing"
).split()

# ----------------------------------------------------------------------------------------------------------------------
# Layers. Each function changes the calling process for good, or raises OSError.

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 22, 36
PR_SET_NO_NEW_PRIVS = 38


def libc(function: str, *args: int | bytes | None) -> int:
    """Calls the C function with whole registers. Raises OSError where it returns -1."""
    result = getattr(LIBC, function)(*[ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args])
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")
    return result


# Allowed system calls, with their numbers on x86_64 and aarch64 (- where it has none). From linux: arch/x86/entry/
# syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. All others are refused, those of the future as well.
ALLOWED = """
read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102,
alarm 37 -, setitimer 38 103, getpid 39 172, recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205,
setsockopt 54 208, getsockopt 55 209, exit 60 93, wait4 61 260, uname 63 160, fsync 74 82, getdents 78 -, getcwd 79 17,
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
# Allowed with some arguments: number of the argument, which bits of it count (0: all), what they must be, the error
OPEN_FOR_CHANGE, CLONE_THREAD = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0x10000
RULES = {
    "open 2 -": (1, OPEN_FOR_CHANGE, [0], errno.EACCES),
    "openat 257 56": (2, OPEN_FOR_CHANGE, [0], errno.EACCES),
    "clone 56 220": (0, CLONE_THREAD, [CLONE_THREAD], errno.EPERM),  # threads, no processes
    "prlimit64 302 261": (2, 0, [0], errno.EPERM),  # a pointer to new limits
    "sendto 44 206": (4, 0, [0], errno.EPERM),  # a pointer to an address
    "socketpair 53 199": (0, 0, [socket.AF_UNIX], errno.EPERM),  # asyncio has one
    "ioctl 16 29": (
        1,
        0,
        [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451],
        errno.EPERM,
    ),  # isatty, sizes, close-on-exec
    "fcntl 72 25": (1, 0, [0, 1, 2, 3, 4, 1030], errno.EPERM),  # dup and flags; no signals by F_SETOWN
    "prctl 157 167": (0, 0, [PR_SET_NAME], errno.EPERM),
}
UNKNOWN = "clone3 435 435, openat2 437 437"  # ENOSYS: the C library then takes the call whose arguments can be seen
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
KILL, ALLOW, ERROR = 0x80000000, 0x7FFF0000, 0x00050000


def number(call: str) -> int | None:
    """The system call's number on this machine, of "name x86_64 aarch64"."""
    column = call.split()[1 + MACHINES[platform.machine()][0]]
    return None if column == "-" else int(column)


def seccomp_program() -> bytes:
    """The filter as classic BPF over struct seccomp_data (nr at 0, arch at 4, arguments at 16, low half first)."""
    if platform.machine() not in MACHINES:
        raise OSError(errno.ENOSYS, f"seccomp: no system call numbers for {platform.machine()}")
    load, equal, at_least, and_, answer = 0x20, 0x15, 0x35, 0x54, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, MACHINES[platform.machine()][1]), (answer, 0, 0, KILL), (load, 0, 0, 0)]
    for call in UNKNOWN.split(","):
        program += [(equal, 0, 1, number(call)), (answer, 0, 0, ERROR | errno.ENOSYS)]
    for call, (argument, bits, values, code) in RULES.items():
        if (nr := number(call)) is None:
            continue
        block = [(load, 0, 0, 16 + 8 * argument), *([(and_, 0, 0, bits)] if bits else [])]
        refuse = (answer, 0, 0, ERROR | code)
        block += [(equal, len(values) - i, 0, value) for i, value in enumerate(values)] + [refuse]
        if call.startswith(("prlimit64", "sendto")):  # pointers: the high half as well
            block += [(load, 0, 0, 20 + 8 * argument), (equal, 1, 0, 0), refuse]
        block.append((answer, 0, 0, ALLOW))
        program += [(equal, 0, len(block), nr), *block]
    allowed = {number(call) for call in ALLOWED.split(",")} - {None}
    # By ranges: to install a filter the kernel runs it for every number, and one by one took 0.2 ms more.
    for nr in range(max(allowed) + 1):
        if (nr in allowed) != (nr + 1 in allowed):
            program += [(at_least, 1, 0, nr + 1), (answer, 0, 0, ALLOW if nr in allowed else ERROR | errno.EPERM)]
    program.append((answer, 0, 0, ERROR | errno.EPERM))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def install_seccomp(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program)
    filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc("prctl", PR_SET_SECCOMP, 2, filter_, 0, 0)


LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # on every machine
READ_FILE, READ_DIR = 1 << 2, 1 << 3


def landlock_ruleset(readable: list[str]) -> tuple[int, int]:
    """(descriptor of a ruleset that allows nothing but reading beneath these paths, ABI version of the kernel)."""
    abi = libc("syscall", LANDLOCK_CREATE_RULESET, 0, 0, 1)
    files = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15
    attributes = struct.pack("QQQ", files, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]  # files, TCP, IPC
    ruleset = libc("syscall", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE, fd)
        libc("syscall", LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)
        os.close(fd)
    return ruleset, abi


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
ST_RELATIME, MS_RELATIME, KEPT_FLAGS = 4096, 1 << 21, 1 | 2 | 4 | 8 | 1024 | 2048


def enter_namespaces(readable: list[str]) -> str:
    """Unshares, builds a root of `readable` alone and goes on in a child, pid 1 in there. The parent waits for it."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid, user = os.getuid(), os.getgid(), ""
    try:
        libc("unshare", flags)
    except OSError:  # not privileged: only with a user namespace
        libc("unshare", flags | CLONE_NEWUSER)
        user = "user+"
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    build_root(readable)
    if child := os.fork():
        os.closerange(3, 4096)  # the server's end of the socket must close when the child ends
        os._exit(min(os.waitpid(child, 0)[1], 1))
    return f"{user}pid+net+mount+ipc namespaces"


def build_root(readable: list[str]) -> None:
    """Makes a read-only file system with only `readable` in it the root directory."""
    root = "/tmp"  # a directory to mount on that is everywhere; nothing is written to it
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in readable]  # some may lie beneath root
    links = {path: os.readlink(path) for path in ("/lib", "/lib32", "/lib64") if os.path.islink(path)}
    libc("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    libc("mount", b"tmpfs", root.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    for path, fd in sources:
        target = root + path
        os.makedirs(target if os.path.isdir(f"/proc/self/fd/{fd}") else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(target):
            os.close(os.open(target, os.O_CREAT))
        libc("mount", f"/proc/self/fd/{fd}".encode(), target.encode(), None, MS_BIND | MS_REC, None)
        flags = os.statvfs(target).f_flag  # those of the source must be kept: a user namespace may not drop them
        flags = flags & KEPT_FLAGS | (MS_RELATIME if flags & ST_RELATIME else 0)
        libc("mount", None, target.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags, None)
        os.close(fd)
    for path, link in links.items():
        os.symlink(link, root + path)
    os.chdir(root)
    libc("pivot_root", b".", b".")
    libc("umount2", b".", 2)
    os.chdir("/")
    libc("mount", None, b"/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_privileges(readable: list[str]) -> str:
    """As root: user nobody, if that user can read the installation; else root without any capability."""
    if (child := os.fork()) == 0:
        try:
            become_nobody()
            os._exit(0 if all(os.access(path, os.R_OK) for path in readable) else 1)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1] == 0:
        become_nobody()
        return "user nobody"
    drop_capabilities()
    return "root without capabilities"


def drop_capabilities() -> None:
    libc("capset", struct.pack("II", 0x20080522, 0), bytes(24))


# ----------------------------------------------------------------------------------------------------------------------
# The fork server


class Server:
    """State of the fork server process; see serve."""

    def __init__(self, control: socket.socket, options: dict) -> None:
        for path in options["site"]:
            sys.path.append(path)
        sys.path[:] = [os.path.realpath(path) for path in sys.path if os.path.exists(path)]
        self.script, self.trainer_pid = os.path.abspath(__file__), os.getppid()
        self.control = control
        # The end of the whole trainer. PR_SET_PDEATHSIG would fire at the end of the thread that started us.
        self.trainer = os.pidfd_open(self.trainer_pid)
        for module in [*PRELOAD, *options["preload"]]:
            __import__(module)
        if "reasoning_gym" in options["preload"]:
            prepare_reasoning_gym()
        self.layers: list[str] = []
        self.ruleset, self.filter = -1, b""
        self.lock_down(options["without"])
        self.poller = select.poll()
        for fd in (self.control.fileno(), self.trainer):
            self.poller.register(fd, select.POLLIN)

    def lock_down(self, without: list[str]) -> None:
        """All layers that hold for the server as well, and what the runs need for theirs."""
        with open("/proc/self/statm") as file:
            self.memory = int(file.read().split()[0]) * resource.getpagesize()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if the machine runs out of memory, rather a run than the trainer
        readable, in_user_namespace = readable_paths(), False
        os.chdir("/")
        libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if "namespaces" not in without:
            self.layers.append(enter_namespaces(readable))
            in_user_namespace = self.layers[0].startswith("user")
        if "Landlock" not in without:
            try:
                self.ruleset, abi = landlock_ruleset(readable)
                self.layers.append(f"Landlock ABI {abi}")
            except OSError:
                pass  # the kernel lacks it or has it off: `do_probe` finds what is open then
        if os.getuid() == 0 and "uid" not in without:
            self.layers.append(drop_privileges(readable))
        elif in_user_namespace:
            drop_capabilities()
        release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
        counted_apart = in_user_namespace and release >= (5, 14) or os.getuid() == NOBODY
        self.num_threads = MAX_THREADS if counted_apart and os.getuid() else None
        libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace and no /proc/PID/mem among runs of one user
        if os.getpid() == 1:
            libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if "seccomp" not in without and platform.machine() in MACHINES:
            self.filter = seccomp_program()
            self.layers.append("seccomp")
        self.layers.append("rlimits")
        self.pid = os.getpid()
        gc.collect()
        gc.freeze()

    def fork(self, role: str, fds: list[int], seconds: float) -> int:
        """The pid of a locked-down child which has `fds` as its descriptors 0, 1, ... and does ROLES[role]."""
        if child := os.fork():
            return child
        try:
            self.enter(fds, seconds)
        except BaseException:
            os.kill(os.getpid(), signal.SIGUSR2)  # not the program's fault: it has not been read yet
        try:
            os._exit(ROLES[role](self))
        finally:
            os._exit(1)

    def enter(self, fds: list[int], seconds: float) -> None:
        """Locks this process down."""
        os.setsid()
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.pid:  # it has ended before the line above
            os._exit(1)
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        for kind, amount in (
            (resource.RLIMIT_AS, self.memory + MEMORY_BYTES),
            (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
            (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
            (resource.RLIMIT_STACK, STACK_BYTES),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NPROC, self.num_threads),
        ):
            hard = resource.getrlimit(kind)[1]
            if amount is not None:
                amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
                resource.setrlimit(kind, (amount, amount))
        if self.ruleset >= 0:
            libc("syscall", LANDLOCK_RESTRICT_SELF, self.ruleset, 0)
        os.closerange(len(fds), 1 << 16)
        if self.filter:
            install_seccomp(self.filter)

    def run(self, request: dict, fds: list[int]) -> dict:
        """One run: {"exit": status or -signal, "late": whether it was killed at a deadline, "laps": seconds of each}.

        Every byte that the run writes to its progress pipe ends a lap and gives it `seconds` more.
        """
        seconds, num_laps = request["seconds"], request["laps"]
        progress, report = os.pipe()
        os.set_blocking(progress, False)
        null, children = 0, []
        start = time.monotonic()
        if request["role"] == "tests":
            source, tests, results = fds
            ours, theirs = socket.socketpair()
            with ours, theirs:
                children.append(self.fork("calls", [null, 1, 1, source, ours.fileno()], seconds * num_laps))
                own = [null, 1, 1, tests, theirs.fileno(), results, report]
                children.append(self.fork("tests", own, seconds * num_laps))
        else:
            children.append(self.fork(request["role"], fds, seconds))
        os.close(report)
        main = os.pidfd_open(children[-1])
        for fd in (main, progress):
            self.poller.register(fd, select.POLLIN)
        laps: list[float] = []
        exited = False
        while not exited and len(laps) <= num_laps:
            events = dict(self.poller.poll(max(0.0, start + seconds - time.monotonic()) * 1000 + 1))
            if self.trainer in events or self.control.fileno() in events:
                os._exit(0)  # the trainer is gone, or has closed us: PDEATHSIG ends the runs
            if not events and time.monotonic() >= start + seconds:
                break
            if progress in events and (ticks := read_some(progress)):
                now = time.monotonic()
                laps += [now - start] + [0.0] * (len(ticks) - 1)
                start = now
            elif progress in events:
                self.poller.unregister(progress)
            exited = main in events
        laps += [time.monotonic() - start]
        for child in children:
            os.kill(child, signal.SIGKILL)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if -signal.SIGUSR2 in ended:
            raise OSError("a run could not be locked down")
        self.sweep()
        for fd in (main, progress):
            try:
                self.poller.unregister(fd)
            except KeyError:
                pass  # closed by the run
            os.close(fd)
        laps = [round(lap, 5) for lap in laps[: num_laps + 1]]
        return {"exit": ended[-1] if exited else None, "late": not exited, "laps": laps}

    def sweep(self) -> None:
        """Kills whatever a run has left. With seccomp that is nothing: it could not fork."""
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                return
            if self.pid == 1:
                os.kill(-1, signal.SIGKILL)
            else:  # orphans come to us, the subreaper
                with open(f"/proc/self/task/{self.pid}/children") as file:
                    for child in file.read().split():
                        os.kill(int(child), signal.SIGKILL)
            time.sleep(0.001)

    def serve(self) -> None:
        """Answers requests (a JSON packet with descriptors) one by one until the trainer closes the socket or ends."""
        while self.trainer not in dict(self.poller.poll()):
            packet, fds, _, _ = socket.recv_fds(self.control, 4096, 8)
            if not packet:
                return
            reply = self.run(json.loads(packet), fds)
            for fd in fds:
                os.close(fd)
            self.control.send(json.dumps(reply).encode())


def readable_paths() -> list[str]:
    """The Python installation and the system's libraries: what a run may read. No path beneath another one."""
    wanted = [os.path.join(sys.base_prefix, "lib"), *sys.path, "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64"]
    wanted += [
        "/usr/local/lib",
        "/usr/share/zoneinfo",
        "/etc/ld.so.cache",
        "/etc/localtime",
        "/dev/null",
        "/dev/urandom",
    ]
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)}):
        if not any(path.startswith(above + "/") for above in found):
            found.append(path)
    return found


def read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


# ----------------------------------------------------------------------------------------------------------------------
# What a run does, in a process that is locked down already. Each returns the exit status.


def read_all(fd: int) -> bytes:
    """The whole content of a memory file, which is closed."""
    content = b""
    while chunk := os.pread(fd, 1 << 24, len(content)):
        content += chunk
    os.close(fd)
    return content


def execute(source: bytes, name: str) -> types.ModuleType:
    """Runs the program as module `name`."""
    module = sys.modules[name] = types.ModuleType(name)
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), vars(module))
    return module


def do_program(server: Server) -> int:
    """Descriptors: standard input, output, error; program. Ends like a main program does: threads, atexit, flush."""
    sys.stdin = open(0, encoding="utf-8")
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape")
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    stdout, status = sys.stdout, 0
    try:
        execute(read_all(3), "__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
        traceback.print_exc(limit=-3)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in {id(s): s for s in (stdout, sys.stdout)}.values():
        stream.flush()
    return status & 0xFF


class Gone(BaseException):
    """The other side of a link has ended, or does not keep to the protocol."""


class Link:
    """Messages between a test and the program: plain data, in frames of 4 bytes length and JSON.

    Whatever is not plain data (numbers, text, bytes, and containers of these) stays where it is and is named by a
    reference. So == in a test is that of the test's own process, whatever the program does to its own.
    """

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.kept: list[object] = []  # what the other side has references to
        self.numbers: dict[int, int] = {}  # id -> index in kept

    def send(self, message: dict) -> None:
        frame = json.dumps(message).encode()
        self.socket.sendall(struct.pack("<I", len(frame)) + frame)

    def receive(self) -> dict:
        frame, wanted = b"", 4
        while len(frame) < wanted:
            chunk = self.socket.recv(min(wanted - len(frame), 1 << 20))
            if not chunk:
                raise Gone("the program ended")
            frame += chunk
            if len(frame) == wanted == 4:
                wanted += struct.unpack("<I", frame)[0]
                if wanted > FRAME_BYTES:
                    raise Gone("too long a reply")
        message = json.loads(frame[4:])
        if not isinstance(message, dict):
            raise Gone("not a reply")
        return message

    def ask(self, message: dict) -> dict:
        """The reply to a request. Requests of the other side that come before it are answered."""
        self.send(message)
        while "ok" not in (reply := self.receive()) and "error" not in reply:
            self.send(self.answer(reply))
        return reply

    def keep(self, value: object) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def encode(self, value: object) -> object:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            value = int.__int__(value)
            return value if value.bit_length() < 64 else {"int": hex(value)}
        if isinstance(value, float):
            return float.__float__(value)
        if value is NotImplemented:
            return {"NotImplemented": 0}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]}
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.encode(item) for item in kind.__iter__(value)]}
        for kind in (bytes, bytearray):
            if isinstance(value, kind):
                return {kind.__name__: kind.hex(value)}
        kind = type(value)
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if kind.__module__ in ("decimal", "fractions") and kind.__name__ in ("Decimal", "Fraction"):
            return {kind.__name__: str(value)}
        if kind is sys.modules["collections"].deque:
            return {"deque": [self.encode(item) for item in value]}
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufcU":
            return (
                {"numpy": [value.dtype.str, value.tolist()]}
                if kind.__name__ == "ndarray"
                else self.encode(value.item())
            )
        if isinstance(value, type) and getattr(sys.modules["builtins"], value.__name__, None) is value:
            return {"type": value.__name__}
        return self.encode_other(value)

    def decode(self, data: object) -> object:
        if not isinstance(data, dict):
            if isinstance(data, list):
                raise Gone("not a value")
            return data
        ((tag, body),) = data.items()
        if tag == "dict":
            return {self.decode(key): self.decode(item) for key, item in body}
        if tag in ("list", "tuple", "set", "frozenset"):
            return getattr(sys.modules["builtins"], tag)([self.decode(item) for item in body])
        if tag in ("bytes", "bytearray"):
            return getattr(sys.modules["builtins"], tag).fromhex(body)
        if tag == "int":
            return int(body, 16)
        if tag in ("complex", "range"):
            return (complex if tag == "complex" else range)(*body)
        if tag in ("Decimal", "Fraction"):
            return getattr(sys.modules["decimal" if tag == "Decimal" else "fractions"], tag)(body)
        if tag == "deque":
            return sys.modules["collections"].deque([self.decode(item) for item in body])
        if tag == "numpy":
            import numpy

            return numpy.array(body[1], numpy.dtype(body[0]))
        if tag == "type" and isinstance(kind := getattr(sys.modules["builtins"], body, None), type):
            return kind
        if tag == "NotImplemented":
            return NotImplemented
        return self.decode_other(tag, body)


def describe(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)[:200]


def error_reply(link: Link, error: BaseException) -> dict:
    try:
        arguments = [link.encode(argument) for argument in error.args]
    except Exception:
        arguments = []
    return {"error": [kind.__name__ for kind in type(error).__mro__], "args": arguments}


# What a test may do with something of the program that is not plain data: unary, and between two such things. `in` goes
# through __iter__.
UNARY = "getitem setitem delitem index neg pos abs invert".split()
BINARY = "eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
BUILTINS = "len iter next str repr bool float int round hash reversed".split()


def special_functions() -> dict:
    """Special method -> the function that has its effect, such as __add__ -> operator.add."""
    import builtins
    import operator

    found = {f"__{name.strip('_')}__": getattr(operator, name) for name in UNARY + BINARY}
    return found | {f"__{name}__": getattr(builtins, name) for name in BUILTINS}


class Program(Link):
    """The program's side of a link."""

    def encode_other(self, value: object) -> object:
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [self.keep(value), [kind.__name__ for kind in value.__mro__]]}
        return {"ref": self.keep(value)}

    def decode_other(self, tag: str, body: object) -> object:
        if tag == "ref":
            return self.kept[body]

        def callback(*args: object) -> object:
            reply = self.ask({"callback": body, "args": [self.encode(argument) for argument in args]})
            if "error" in reply:
                raise RuntimeError(f"a function of the test raised {reply['error'][0]}")
            return self.decode(reply["ok"])

        return callback

    def answer(self, message: dict) -> dict:
        values: list[object] = []
        try:
            values = [self.decode(data) for data in message["args"]]
            num_positional = len(values) - len(message["names"])
            keywords = dict(zip(message["names"], values[num_positional:], strict=True))
            result = self.functions[message["do"]](*values[:num_positional], **keywords)
            same = [i for i, value in enumerate(values) if value is result and isinstance(value, (list, dict, set))]
            reply = {"ok": {"arg": same[0]} if same else self.encode(result)}
        except BaseException as error:
            reply = error_reply(self, error)
        after = [self.encode(value) for value in values]
        return reply | {"changed": [[i, data] for i, data in enumerate(after) if data != message["args"][i]]}


def do_calls(server: Server) -> int:
    """Descriptors: 3 program, 4 link. Runs the program, then does what the tests ask of it."""
    link = Program(4)
    try:
        module = execute(read_all(3), "program")
    except BaseException as error:
        link.send({"loaded": describe(error)})
        return 1
    link.functions = special_functions() | {
        "call": lambda function, *args, **keywords: function(*args, **keywords),
        "getattr": getattr,
        "setattr": setattr,
        "isinstance": isinstance,
        "names": lambda *names: {name: vars(module)[name] for name in names if name in vars(module)},
    }
    link.send({"loaded": None})
    while True:
        link.send(link.answer(link.receive()))


class Ref:
    """Something of the program, in the process of the tests.

    What a test asks of it (attributes, calls, its truth, its length, == with another one) the program answers. With
    plain data it is never equal, and neither ordered nor computed: a function which returns an object that claims to
    be equal to everything, or whose difference to everything is 0, passes no test that compares with a value.
    """

    def __init__(self, link: "Checker", number: int) -> None:
        vars(self).update(_link=link, _number=number)

    def __getattr__(self, name: str) -> object:
        return self._link.do("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._link.do("setattr", self, name, value)

    def __call__(self, *args: object, **keywords: object) -> object:
        return self._link.do("call", self, *args, **keywords)

    def __instancecheck__(self, value: object) -> bool:
        return self._link.do("isinstance", value, self) is True


def forward(name: str) -> None:
    """Gives Ref a special method."""
    is_binary = name in [f"__{operator.strip('_')}__" for operator in BINARY]

    def method(self: Ref, *args: object) -> object:
        if is_binary and not isinstance(args[0], Ref):
            return NotImplemented
        return self._link.do(name, self, *args)

    setattr(Ref, name, method)


class Checker(Link):
    """The tests' side of a link. `broken` once the program has ended or broken the protocol: no test passes then."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.broken = False
        self.refs: dict[int, Ref] = {}
        self.exceptions: dict[str, type] = {}

    def encode_other(self, value: object) -> object:
        if isinstance(value, Ref):
            return {"ref": value._number}
        if callable(value):
            return {"callback": self.keep(value)}
        raise TypeError(f"a {type(value).__name__} of the test cannot be passed to the program")

    def decode_other(self, tag: str, body: object) -> object:
        if tag == "exception":
            name, kinds = body[1][0], body[1]
            if name not in self.exceptions:
                self.exceptions[name] = type(name, (self.exception_class(kinds[1:]),), {})
            return self.exceptions[name]
        if tag != "ref" or not isinstance(body, int):
            raise Gone("not a value")
        return self.refs.setdefault(body, Ref(self, body))

    def exception_class(self, names: list[str]) -> type:
        for name in names:
            kind = self.exceptions.get(name) or getattr(sys.modules["builtins"], name, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind
        return Exception

    def answer(self, message: dict) -> dict:
        try:
            values = [self.decode(data) for data in message["args"]]
            return {"ok": self.encode(self.kept[message["callback"]](*values))}
        except Exception as error:
            return error_reply(self, error)

    def do(self, name: str, *args: object, **keywords: object) -> object:
        """Asks the program. Arguments that it changed are changed here as well; its exceptions are raised here."""
        values = [*args, *keywords.values()]
        message = {"do": name, "args": [self.encode(value) for value in values], "names": list(keywords)}
        try:
            reply = self.ask(message)
            for i, data in reply["changed"]:
                replace_content(values[i], self.decode(data))
            if "error" in reply:
                arguments, kind = [self.decode(data) for data in reply["args"]], self.exception_class(reply["error"])
            elif isinstance(reply["ok"], dict) and "arg" in reply["ok"]:
                result = values[reply["ok"]["arg"]]
            else:
                result = self.decode(reply["ok"])
        except BaseException as error:
            self.broken = True
            raise error if isinstance(error, Gone) else Gone(describe(error)) from None
        if "error" not in reply:
            return result
        try:
            error = kind(*arguments)
        except Exception:
            error = kind.__new__(kind)
        raise error


def replace_content(old: object, new: object) -> None:
    if isinstance(old, (list, bytearray)) and type(new) in (list, bytearray):
        old[:] = new
    elif isinstance(old, (dict, set)) and type(new) is (dict if isinstance(old, dict) else set):
        old.clear()
        old.update(new)
    elif type(old).__name__ == "deque":
        old.clear()
        old.extend(new)
    elif type(old).__name__ == "ndarray":
        old[...] = new


STANDARD = """
collections copy datetime decimal fractions functools heapq itertools json math operator random re statistics string sys
time typing numpy:np math.isclose math.sqrt math.pi math.inf collections.Counter collections.OrderedDict
collections.defaultdict collections.deque decimal.Decimal fractions.Fraction typing.Any typing.Dict typing.List
typing.Optional typing.Set typing.Tuple typing.Union
"""


def standard_names() -> dict[str, tuple[str, str]]:
    """Name -> (module, attribute): what tests use without importing it, relying on the program's imports."""
    found = {}
    for entry in STANDARD.split():
        entry, _, alias = entry.partition(":")
        module, _, attribute = entry.partition(".")
        for name in filter(None, (attribute or module, alias)):
            found[name] = (module, attribute)
    return found


def names_in(tree: object) -> tuple[set[str], set[str]]:
    """The names that a test uses, and those that it binds itself."""
    import ast

    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | {
        node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
    }
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {(n.asname or n.name).split(".")[0] for n in nodes if isinstance(n, ast.alias)}
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}, bound


def do_tests(server: Server) -> int:
    """Descriptors: 3 tests, 4 link, 5 results, 6 progress. One line of results for the loading and for each test.

    A line is null for success, else what went wrong. The tests get the program's names; those of builtins and of the
    standard library are this process's own, lest a program's `sum` or `isclose` judge its own results, unless the
    tests use no other name: then the program was to define, say, `sum`.
    """
    import ast

    for name in special_functions():
        forward(name)
    tests = [ast.parse(test) for test in json.loads(read_all(3))]
    names = [names_in(tree) for tree in tests]
    standard = standard_names()
    own = set(dir(sys.modules["builtins"])) | set(standard)
    if not any(used - bound - own for used, bound in names):
        own = set()
    link = Checker(4)

    def report(problem: str | None) -> None:
        os.write(5, json.dumps(problem).encode() + b"\n")
        os.write(6, b".")

    try:
        loaded = link.receive().get("loaded")
    except (Gone, OSError, ValueError, RecursionError, MemoryError) as error:
        loaded = describe(error)
    report(loaded if loaded is None else str(loaded)[:200])
    for tree, (used, bound) in zip(tests, names, strict=True):
        if loaded is not None or link.broken:
            break
        scope: dict[str, object] = {"__name__": "test"}
        problem = None
        try:
            for name in used & own & set(standard) - bound:
                module, attribute = standard[name]
                value = __import__(module)
                scope[name] = getattr(value, attribute) if attribute else value
            found = link.do("names", *sorted(used - own))
            scope |= {name: found[name] for name in used - own if name in found}  # and no other ones: not `abs`
            exec(compile(tree, "test", "exec"), scope)
        except BaseException as error:
            problem = "the assertion failed" if isinstance(error, AssertionError) else describe(error)
        report("the program broke the protocol" if link.broken and problem is None else problem)
    return 0


LITERAL_TASKS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")


def prepare_reasoning_gym() -> None:
    """The four scorers that call eval get ast.literal_eval: eval("oracle_answer") would find the right answer."""
    import ast

    from reasoning_gym.factory import DATASETS

    for task in LITERAL_TASKS:
        sys.modules[DATASETS[task][0].__module__].eval = ast.literal_eval


def do_reasoning_gym(server: Server) -> int:
    """Descriptors: job, result, error. Scores an answer; the result is {"score": number} or {"error": text}."""
    import reasoning_gym

    job = json.loads(read_all(0))
    dataset = reasoning_gym.create_dataset(job["task"], size=1, seed=0)
    try:
        reply = {"score": float(dataset.score_answer(answer=job["answer"], entry=job["entry"]))}
    except Exception as error:
        try:  # is the response to blame, or the entry?
            dataset.score_answer(answer=job["entry"]["answer"], entry=job["entry"])
            reply = {"score": 0.0}
        except Exception:
            reply = {"error": describe(error)}
    os.write(1, json.dumps(reply).encode())
    return 0


def do_probe(server: Server) -> int:
    """Descriptors: 0, result, error. Tries what must not be possible; the result is the list of what was."""

    def connect() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect(("127.0.0.1", 9))

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    def write(directory: str) -> None:
        path = os.path.join(directory, f"sandbox-probe-{os.getpid()}")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.unlink(path)

    def seize() -> None:
        libc("ptrace", 0x4206, server.trainer_pid, 0, 0)

    def proceed() -> None:
        os.pwrite(1, json.dumps([*leaks, "running other programs"]).encode(), 0)
        os.execv("/proc/self/exe" if os.path.exists("/proc/self/exe") else sys.executable, [sys.executable, "-c", ""])

    leaks = []
    for leak, attempt, *args in (
        ("the network", connect),
        ("new processes", fork),
        *[
            ("changing files", write, directory)
            for directory in ("/", "/tmp", "/dev/shm", os.path.dirname(server.script))
        ],
        ("signals to other processes", os.kill, os.getppid(), 0),
        ("signals to other processes", os.kill, server.trainer_pid, 0),
        ("reading files", open, server.script),
        ("reading files", open, "/etc/passwd"),
        ("reading the trainer's environment", open, f"/proc/{server.trainer_pid}/environ"),
        ("tracing other processes", seize),
        ("running other programs", proceed),
    ):
        try:
            attempt(*args)
            leaks.append(leak)
        except OSError:
            pass  # as it should be
    os.pwrite(1, json.dumps(leaks).encode().ljust(512), 0)
    return 0


ROLES = {
    "program": do_program,
    "calls": do_calls,
    "tests": do_tests,
    "reasoning_gym": do_reasoning_gym,
    "probe": do_probe,
}


def server_main(options: dict) -> None:
    """The process that Sandbox.start starts: socket on descriptor 0."""
    while (fd := os.open(os.devnull, os.O_RDONLY)) < 16:  # low numbers stay free for the runs' descriptors
        pass
    control = socket.socket(fileno=os.dup(0))
    os.dup2(fd, 0)
    os.close(fd)
    try:
        server = Server(control, options)
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        raise
    server.control.send(json.dumps({"layers": server.layers}).encode())
    server.serve()


# ----------------------------------------------------------------------------------------------------------------------
# The trainer's side


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it."""


class Sandbox:
    """A fork server, started when it is needed and again when it has died. Used by one thread at a time.

    preload: modules that the server imports before it locks itself down. without: layers of LAYERS to leave out, for
    tests. layers and leaks (see do_probe) are known once it has started.
    """

    def __init__(self, preload: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> None:
        self.preload, self.without = preload, without
        self.process: subprocess.Popen | None = None
        self.layers: list[str] = []
        self.leaks: list[str] = []

    def start(self) -> None:
        """Raises SandboxError if that fails."""
        if sys.platform != "linux":
            raise SandboxError("the code sandbox needs Linux")
        try:
            hello = self.launch(self.without)
            if "failed" in hello:  # namespaces that may be entered and then not be set up: AppArmor does that
                self.stop()
                self.without = (*self.without, "namespaces")
                hello = self.launch(self.without)
            if "failed" in hello:
                raise SandboxError(hello["failed"])
            self.layers = hello["layers"]
            fds = [memfd(), memfd(), memfd()]
            try:
                self.exchange({"role": "probe", "seconds": 10.0, "laps": 0}, fds)
                self.leaks = sorted(set(json.loads(content(fds[1]))))
            finally:
                close(fds)
        except (OSError, ValueError, SandboxError) as error:
            raise SandboxError(f"the code sandbox cannot start: {error} {self.stop()}".strip()) from None

    def launch(self, without: tuple[str, ...]) -> dict:
        options = {"site": site_directories(), "preload": self.preload, "without": without}
        # PYTHONHASHSEED: sets in the same order every time. None of the trainer's own variables.
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.socket, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stderr = tempfile.TemporaryFile()
        # -S, -s, -P: no code of the trainer's environment (.pth files, the working directory) on the way to the locks
        command = [
            sys.executable,
            "-S",
            "-s",
            "-P",
            "-X",
            "utf8",
            os.path.abspath(__file__),
            "--serve",
            json.dumps(options),
        ]
        with child:
            streams = {"stdin": child, "stdout": subprocess.DEVNULL, "stderr": self.stderr}
            self.process = subprocess.Popen(command, **streams, env=env, cwd="/", start_new_session=True)
        return self.receive(START_TIMEOUT_S)

    def receive(self, seconds: float) -> dict:
        self.socket.settimeout(seconds)
        packet = self.socket.recv(1 << 20)
        if not packet:
            raise SandboxError("the fork server ended")
        return json.loads(packet)

    def exchange(self, request: dict, fds: list[int]) -> dict:
        socket.send_fds(self.socket, [json.dumps(request).encode()], fds)
        return self.receive(request["seconds"] * (request["laps"] + 1) + GRACE_S)

    def run(self, role: str, fds: list[int], seconds: float, laps: int = 0) -> dict:
        """See Server.run. Raises SandboxError; the next run starts the server again."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        try:
            return self.exchange({"role": role, "seconds": seconds, "laps": laps}, fds)
        except (OSError, ValueError, SandboxError) as error:
            raise SandboxError(f"the code sandbox failed: {error} {self.stop()}".strip()) from None

    def stop(self) -> str:
        """Ends the server and all in it; returns the end of what it wrote to standard error."""
        if self.process is None:
            return ""
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.process = None
        with self.stderr:
            self.stderr.seek(0)
            return self.stderr.read()[-1000:].decode(errors="replace").strip()


def site_directories() -> list[str]:
    """Where installed packages lie: a program may import numpy."""
    return [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]


def memfd(data: bytes = b"") -> int:
    """A file in memory."""
    fd = os.memfd_create("sandbox")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def content(fd: int) -> str:
    return os.pread(fd, OUTPUT_BYTES, 0).decode(errors="replace")


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def ending(reply: dict, seconds: float) -> str | None:
    """Why a run that was killed or crashed ended; None for one that came to its end."""
    if reply["late"]:
        return f"time limit ({seconds:g} s)"
    return f"killed by {signal.Signals(-reply['exit']).name}" if reply["exit"] < 0 else None


class Run(NamedTuple):
    """How a program or a test ended: problem is None for one that came to its end, or passed. late: at a deadline."""

    problem: str | None
    seconds: float
    late: bool = False
    exit: int | None = None
    output: str = ""
    error: str = ""


def run_program(sandbox: Sandbox, program: str, stdin: str, seconds: float) -> Run:
    """Runs a program with this input for at most `seconds` of wall time. Raises SandboxError."""
    return run_files(sandbox, "program", [stdin, "", "", program], seconds)


def run_reasoning_gym(sandbox: Sandbox, job: str, seconds: float) -> Run:
    """Scores an answer, see do_reasoning_gym, in a sandbox that has preloaded reasoning_gym. Raises SandboxError."""
    run = run_files(sandbox, "reasoning_gym", [job, "", ""], seconds)
    return run._replace(problem=run.problem or (None if run.output else "out of memory"))


def run_files(sandbox: Sandbox, role: str, files: list[str], seconds: float) -> Run:
    """files: the contents that descriptors 0, 1, ... have at first; 1 is the output, 2 the error."""
    fds = [memfd(text.encode(errors="replace")) for text in files]
    try:
        reply = sandbox.run(role, fds, seconds)
        output, error = content(fds[1]), content(fds[2])
    finally:
        close(fds)
    return Run(ending(reply, seconds), reply["laps"][0], reply["late"], reply["exit"], output, error)


def not_run(runs: list[Run]) -> Run:
    return Run(f"not run: {sum(run.late for run in runs)} tests exceeded the time limit", 0.0)


def run_tests(sandbox: Sandbox, program: str, tests: list[str], seconds: float) -> list[Run]:
    """Runs each test (Python statements that use the program's names) for at most `seconds` of wall time.

    The program runs in a process of its own and only answers calls: see Link and Ref. A test that does not come to its
    end costs the two processes; the next one gets new ones. Raises SandboxError.
    """
    runs: list[Run] = []
    while (rest := tests[len(runs) :]) and sum(run.late for run in runs) < MAX_TIME_LIMITS:
        fds = [memfd(program.encode(errors="replace")), memfd(json.dumps(rest).encode()), memfd()]
        try:
            reply = sandbox.run("tests", fds, seconds, laps=len(rest) + 1)
            lines = content(fds[2]).splitlines()[: len(rest) + 1]
        finally:
            close(fds)
        why = ending(reply, seconds) or "the tests' process ended"
        loading = json.loads(lines[0]) if lines else why
        if loading is not None:
            return runs + [Run(f"loading the program: {loading}", 0.0)] * len(rest)
        done = [Run(json.loads(line), lap) for line, lap in zip(lines[1:], reply["laps"][1:], strict=False)]
        if len(done) < len(rest) and not (
            done and reply["exit"] == 0
        ):  # else the last one broke the link, and knows it
            done.append(Run(why, reply["laps"][-1], reply["late"]))
        runs += done
    return runs + [not_run(runs)] * len(rest)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a Python program in the sandbox, or says what the sandbox is.")
    parser.add_argument("program", nargs="?", help="the program; it reads this command's standard input")
    parser.add_argument("--seconds", type=float, default=10.0, help="its time limit, wall clock")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=LAYERS, help="layers to leave out, to see the others"
    )
    args = parser.parse_args()
    sandbox = Sandbox(without=tuple(args.without))
    try:
        if args.program is None:
            sandbox.start()
            print("in force: " + "\n          ".join(sandbox.layers))
            print("open:     " + ("\n          ".join(sandbox.leaks) or "nothing that was tried"))
            return
        with open(args.program, encoding="utf-8") as file:
            run = run_program(sandbox, file.read(), sys.stdin.read(), args.seconds)
    except SandboxError as error:
        sys.exit(str(error))
    finally:
        sandbox.stop()
    sys.stdout.write(run.output)
    sys.stderr.write(run.error + (f"sandbox: {run.problem}\n" if run.problem else ""))
    sys.exit(1 if run.problem else run.exit)


if __name__ == "__main__":
    server_main(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--serve"] else main()
