"""Code rewards and the sandbox. Root has no capability in it, and so takes the same path as any user."""

import errno
import importlib.util
import json
import math
import os
import platform
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import rewards
from rewards import RewardRecord, check_ground_truth, score
from scripts.parts import run_code, sandbox
from tests.programs import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox rests on Linux")

RIGHT = ("code_stdio", [{"input": "1 2 3\n", "output": "6\n"}], "print(sum(map(int, input().split())))")

# What a program must not reach. An attempt that raises nothing and does not return False has. None would do much harm
# if it did: signals are SIGCONT or 0, files to be changed are those of the test.
ATTEMPT = """
import ctypes, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
VICTIM, PORT, TRAINER, SECRET = {victim!r}, {port}, {trainer}, {secret!r}
def attempt(action, *args, **keywords):
    try:
        reached = action(*args, **keywords)
    except BaseException:
        return
    if reached is not False:
        print("REACHED", action, args, repr(reached)[:50])
"""


def rows(file, kind):
    """The rows of a kind. Hostile: `reaches` does what must be impossible, and prints REACHED if it was possible;
    `fails` and `hangs` give no output that is right; `steals` looks for the expected output everywhere in reach;
    `forges` defines add, or fails to, and passes none of ADD_TESTS. Right ones: `honest` has a score for RIGHT's label;
    `asserts` has tests, and what each of them gives."""
    lines = (ROOT / "tests" / file).read_text().splitlines()
    found = [row for row in map(json.loads, lines) if row["kind"] == kind]
    return [row for row in found if importlib.util.find_spec(row.get("needs", "json"))]


def programs(kind):
    return [row["program"] for row in rows("hostile_programs.jsonl", kind)]


ADD_TESTS = [
    "assert add(1, 2) == 3",
    "assert not add(1, 2) != 3",
    "r = add([1], [2])\nassert [1, 2] == r",
    "assert abs(add(1, 2) - 3) < 1e-9",
    "assert 4 in add([3], [4])",
]

DRIVER = """
import json, sys, threading
sys.path.insert(0, {copy!r})
import rewards
from scripts.parts import run_code, sandbox
run_code.SANDBOXES.slots = threading.BoundedSemaphore(1)  # all in one fork server, one after the other
rewards.configure(rewards.RewardFlags(**json.loads(sys.argv[1])), connect=False)
layers, leaks = run_code.sandbox_level()
records = [rewards.RewardRecord("```python\\n" + p + "\\n```", label, name) for name, label, p in json.load(sys.stdin)]
box = run_code.SANDBOXES.idle[()][0]
server, results = box.process.pid, []
for record in records:
    result, = rewards.score([record])
    results.append([result.score, result.status, result.details])
same = box.process.pid == server and box.process.poll() is None
json.dump({{"layers": layers, "leaks": leaks, "results": results, "same_server": same}}, sys.stdout)
"""  # fmt: skip


def processes_of(marker):
    """Processes whose command line has the marker: a fork server, whatever it forked, and the trainer."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
        except OSError:
            continue
    return found


@pytest.fixture
def copy():
    """A copy of the files; its path marks the processes of this test."""
    directory = Path(tempfile.mkdtemp(prefix="sandbox-test-"))
    parts = [f"scripts/parts/{name}.py" for name in ("checks", "programs", "rows", "run_code", "sandbox")]
    for name in ("rewards.py", *parts, "scripts/prompts/solver.txt"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    yield directory
    for pid in processes_of(str(directory)):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(directory)


def test_hostile_programs(copy):
    """One after the other in one fork server, each followed by an ordinary program."""
    secret = secrets.token_hex(8)
    stream, datagram = (socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM))
    with socket.create_server(("127.0.0.1", 0)) as listener, stream, datagram:
        stream.bind("\0" + secret)
        stream.listen()
        datagram.bind("\0d" + secret)
        for one in (listener, stream, datagram):
            one.settimeout(0)
        victim = copy / "victims" / "victim"
        victim.parent.mkdir()
        victim.write_text("precious")
        # The trainer of the attacks is this process; the driver's own number is not known yet.
        known = {"victim": str(victim), "port": listener.getsockname()[1], "trainer": os.getpid(), "secret": secret}
        attacks = [ATTEMPT.format(**known) + body + "\nprint('end')" for body in programs("reaches")]
        hostile = [("code_stdio", [{"input": "", "output": "end"}], program) for program in attacks]
        hostile += [("code_stdio", [{"input": "", "output": "6"}], p) for p in programs("fails") + programs("hangs")]
        hostile += [("code_stdio", [{"input": "1", "output": "8173645201"}], program) for program in programs("steals")]
        hostile += [("code", ADD_TESTS, program) for program in programs("forges")]
        right = ("code", ADD_TESTS, "def add(a, b): return a + b")
        interleaved = [row for attack in hostile for row in (attack, right if attack[0] == "code" else RIGHT)]
        environment = {**os.environ, "TOKEN": secret, "PYTHONDONTWRITEBYTECODE": "1"}
        settings = json.dumps({"code_max_execution_time": 1.0})  # ordinary ones take 0.01
        command = [sys.executable, "-c", DRIVER.format(copy=str(copy)), settings]
        run = subprocess.run(
            command,
            input=json.dumps(interleaved),
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert run.returncode == 0, run.stderr
        reply = json.loads(run.stdout)
        for receive in (listener.accept, stream.accept, lambda: datagram.recv(1)):
            with pytest.raises(BlockingIOError):
                receive()
    assert not reply["leaks"]
    results, ordinary = reply["results"][::2], reply["results"][1::2]
    wrong = [
        (row[2][-300:], *result) for row, result in zip(interleaved[1::2], ordinary, strict=True) if result[0] != 1
    ]
    assert not wrong, "an ordinary program after an attack"
    want = [float(row[1] == [{"input": "", "output": "end"}]) for row in hostile]
    wrong = [(row[2][-300:], *got) for row, got, score in zip(hostile, results, want, strict=True) if got[0] != score]
    assert not wrong
    assert {status for _, status, _ in results} <= {"ok", "no_answer"}
    assert reply["same_server"], "an attack ended the fork server"
    assert [path.name for path in victim.parent.iterdir()] == ["victim"] and victim.read_text() == "precious"
    wait_until(lambda: not processes_of(str(copy)))


@pytest.fixture
def configured(monkeypatch):
    """Function (flags, without=layers left out); the default settings come back afterwards."""

    def configure(without=(), **flags):
        if without:
            run_code.SANDBOXES.stop()
            run_code.sandbox_level.cache_clear()
        monkeypatch.setattr(sandbox, "WITHOUT_LAYERS", without)
        rewards.configure(rewards.RewardFlags(**flags), connect=False)

    yield configure
    if sandbox.WITHOUT_LAYERS:
        run_code.SANDBOXES.stop()
        run_code.sandbox_level.cache_clear()
    rewards.configure(rewards.RewardFlags(), connect=False)


def one(name, label, program):
    (result,) = score([RewardRecord(f"```python\n{program}\n```", label, name)])
    return result


@pytest.mark.parametrize("killed", ["trainer", "server"])
def test_nothing_survives_a_kill(killed, copy):
    program = "while True: pass"
    rows = json.dumps([("code_stdio", [{"input": "", "output": ""}], program)])
    settings = json.dumps({"code_max_execution_time": 1000})
    command = [sys.executable, "-c", DRIVER.format(copy=str(copy)), settings]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    trainer = subprocess.Popen(command, **pipes, text=True, cwd="/")
    trainer.stdin.write(rows)
    trainer.stdin.close()
    assert trainer.stderr.readline().startswith("code sandbox: ")
    wait_until(lambda: len(processes_of(str(copy))) == 3)
    server, program = sorted(set(processes_of(str(copy))) - {trainer.pid})
    os.kill({"trainer": trainer.pid, "server": server}[killed], signal.SIGKILL)
    wait_until(lambda: not is_alive(program))
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not processes_of(str(copy)))


def only_sandbox():
    """The idle fork server that the next program gets."""
    return run_code.SANDBOXES.idle[()][-1]


def test_failure_of_the_sandbox_is_tried_again_and_then_missing(configured, monkeypatch, capsys):
    configured(code_max_execution_time=5)
    rewards.WARNED.clear()
    assert one(*RIGHT).score == 1.0
    box = only_sandbox()
    threading.Timer(0.5, lambda: box.process.kill()).start()
    result = one("code_stdio", [{"input": "", "output": "6"}], "import time; time.sleep(1.5); print(6)")
    assert (result.score, result.status) == (1.0, "ok") and box.process.poll() is None
    monkeypatch.setattr(sys, "executable", "/bin/false")
    box.stop()
    result = one(*RIGHT)
    assert "the code sandbox failed" in capsys.readouterr().err
    assert math.isnan(result.score) and result.status == "infra_error" and "ended" in result.details["problem"]
    monkeypatch.undo()
    assert one(*RIGHT).score == 1.0


@pytest.mark.parametrize(
    "without, leak, lacks", [("seccomp", "new processes", "seccomp"), ("Landlock", "reading files", "Landlock")]
)
def test_level_is_found_by_trying(without, leak, lacks, configured, capsys):
    """The second as on a kernel that lacks Landlock."""
    configured(without=(without,))
    layers, leaks = run_code.sandbox_level()
    assert without not in " ".join(layers) and leak in leaks
    problem = check_ground_truth("code_stdio", RIGHT[1])
    assert capsys.readouterr().err.startswith("code sandbox: ")  # once
    assert leak in problem and f"lacks {lacks}." in problem and "--allow_unsafe_code" in problem
    rewards.WARNED.clear()
    assert one(*RIGHT).status == "infra_error"
    assert "allow_unsafe_code" in capsys.readouterr().err
    configured(without=(without,), allow_unsafe_code=True)
    assert check_ground_truth("code", ADD_TESTS) is None and one(*RIGHT).score == 1.0


def run_filter(program, nr, args, arch):
    """What the kernel would do with the BPF program: 8 bytes an instruction, as struct sock_filter."""
    data = struct.pack("<IIQ6Q", nr, arch, 0, *args)
    i = accumulator = 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("<HBBI", program, 8 * i)
        if code == 0x06:
            return k
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x54:
            accumulator &= k
        else:
            i += if_true if {0x15: accumulator == k, 0x35: accumulator >= k}[code] else if_false
        i += 1


@pytest.mark.parametrize("machine, arch", [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_seccomp_program(machine, arch, monkeypatch):
    """Numbers and arguments from the kernel's tables; also execve, socket, fork, kill, ptrace, connect, mount, bpf."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    program = sandbox.seccomp_program()
    calls = [json.loads(line) for line in (ROOT / "tests" / "seccomp_calls.jsonl").read_text().splitlines()]
    for call in calls:
        arguments = call["arguments"] + [0] * (6 - len(call["arguments"]))
        allowed = call["answer"] == "allowed"
        want = 0x7FFF0000 if allowed else 0x50000 | getattr(errno, call["answer"])
        if call["machine"] == machine:
            assert run_filter(program, call["number"], arguments, arch) == want, call
    (read,) = [call for call in calls if (call["machine"], call.get("call")) == (machine, "read")]
    assert run_filter(program, read["number"], [0] * 6, 0x40000003) == 0x80000000  # i386


def test_thief_finds_what_is_in_reach(configured):
    (thief,) = programs("steals")
    configured(code_max_execution_time=5)
    assert one("code_stdio", [{"input": "8173645201", "output": "8173645201"}], thief).score == 1.0


# ----------------------------------------------------------------------------------------------------------------------
# What an honest program may rely on


def test_honest_programs(configured):
    configured(code_max_execution_time=20)
    for row in rows("sandbox_programs.jsonl", "honest"):
        result = one("code_stdio", RIGHT[1], row["program"])
        assert (result.score, result.status) == (row["score"], "ok"), (row, result)


def outcome(run):
    if run.problem is None:
        return "passes"
    return "no program" if run.is_tests_fault else "counted" if run.not_plain else "fails"


def test_no_right_program_scores_zero_in_silence():
    """With asserts in the styles of MBPP, HumanEval and LeetCode. counted: fails as unsupported; no program: is missing
    for every program; fails: of a wrong program only."""
    box = sandbox.Sandbox()
    wrong = []
    for row in rows("sandbox_programs.jsonl", "asserts"):
        runs = sandbox.run_tests(box, row["program"], row["tests"], 20.0)
        judged = zip(runs, row["tests"], row["gives"], strict=True)
        wrong += [(run, test) for run, test, gives in judged if outcome(run) != gives]
    box.stop()
    assert not wrong


def test_rewards_count_what_is_unsupported(configured, capsys):
    """A result that is no plain data fails; what no program can pass is missing."""
    configured(code_max_execution_time=10)
    program = "class A: pass\ndef f(x): return A() if x else 1\n"
    result = one("code", ["assert f(0) == 1", "assert f(1) == 1", "assert f(0) == 2"], program)
    assert result.details["passed"] == [1, 0, 0] and result.details["unsupported"] == 1
    rewards.WARNED.clear()
    result = one("code", ["assert f(0) == 1", "assert f(lambda: 0) == 1"], program)
    assert "unsupported" in capsys.readouterr().err
    assert result.status == "infra_error" and math.isnan(result.score)


def test_a_bomb_of_threads_ends():
    """With stacks so small that they have room for thousands of threads."""
    bomb = """
import threading, time
threading.stack_size(1 << 15)
while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
"""
    box = sandbox.Sandbox()
    runs = [box.run("program", ["", None, None, bomb], 5.0)]
    runs += sandbox.run_tests(box, f"def f():\n    exec({bomb!r})", ["f()"], 5.0)
    box.stop()
    assert [run.late for run in runs] == [False, False] and runs[0].problem == "killed by SIGKILL" and runs[1].problem


def test_flags_of_a_run_s_streams_do_not_reach_the_next(configured):
    configured(code_max_execution_time=10)
    setter = (
        "import fcntl, os\ndef f():\n    return [fcntl.fcntl(n, fcntl.F_GETFL) & os.O_NONBLOCK for n in range(3)]\n"
    )
    change = "for n in range(3): fcntl.fcntl(n, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)"
    assert one("code", ["assert f() == [2048] * 3"], setter + change).score == 1.0
    assert one("code", ["assert f() == [0] * 3"], setter).score == 1.0


def test_asserts_that_hang_or_end_the_program_cost_only_themselves(configured):
    configured(code_max_execution_time=0.3)
    program = "import os, time\ndef f(x):\n    if x == 1: time.sleep(100)\n    if x == 2: os._exit(0)\n    return x"
    result = one("code", [f"assert f({i}) == {i}" for i in range(5)], program)
    assert result.details["passed"] == [1, 0, 0, 1, 1] and result.score == 0.6
    assert len(result.details["seconds"]) == 5
    result = one("code", ["assert f(1)"] * 9, "def f(x):\n    while True: pass")
    assert result.score == 0.0 and result.details["passed"] == [0] * 9
    assert sum(seconds > 0 for seconds in result.details["seconds"]) == sandbox.MAX_TIME_LIMITS
    assert one("code", ["assert f(1)"] + ["assert f(3) == 3"] * 99, program).score == 0.99
    assert one("code", ["try:\n    f(2)\nexcept:\n    pass"], program).score == 0.0  # caught, and yet no success
    result = one("code", ["assert f(1)"] * 9, "while True: pass")
    assert result.score == 0.0 and "loading" in result.details["problem"]


@pytest.fixture
def one_busy_processor():
    """This test's thread and the sandboxes that it starts share a processor with four programs that do not stop."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()
    os.sched_setaffinity(0, before)


BUSY = "import time\ndef f(x):\n    while time.process_time() < x: pass\n    return x\n"


def test_a_limit_is_of_the_program_s_own_time(one_busy_processor):
    """A program that others keep from the processor is not too slow; one that sleeps or never ends is."""
    box = sandbox.Sandbox()
    (run,) = sandbox.run_stdio(box, BUSY + "print(f(0.35))", [("", "0.35")], 1.0)
    assert run.problem is None and 0.3 < run.seconds < 1.0, run
    runs = sandbox.run_tests(box, BUSY, ["assert f(0.1)", "assert f(0.35)"], 1.0)
    assert [run.problem for run in runs] == [None] * 2, runs
    for wrong in ("while True: pass", "time.sleep(100)"):
        program = f"import time\ndef f():\n    {wrong}\n"
        assert sandbox.run_stdio(box, program + "f()", [("", "")], 0.2)[0].late
        assert [run.late for run in sandbox.run_tests(box, program, ["f()", "assert 1"], 0.2)] == [True, False]
    (run,) = sandbox.run_tests(box, "n = 10", ["n ** n ** n"], 0.2)  # no Python code of it could answer a signal
    assert run.late
    box.stop()


def test_what_the_machine_never_runs_is_missing(one_busy_processor, monkeypatch):
    monkeypatch.setattr(sandbox, "PATIENCE", 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    box = sandbox.Sandbox()
    with pytest.raises(sandbox.SandboxError):
        sandbox.run_stdio(box, BUSY + "f(9)", [("", "")], 0.5)
    box.stop()


def test_settings(configured):
    label = [{"input": f"{i}\n", "output": f"{i}\n"} for i in range(4)]
    three_of_four = "n = int(input())\nprint(n if n else 9)"
    assert one("code_stdio", label, three_of_four).score == 0.75
    configured(code_pass_rate_reward_threshold=0.75)
    assert one("code_stdio", label, three_of_four).score == 0.75
    configured(code_pass_rate_reward_threshold=0.8)
    assert one("code_stdio", label, three_of_four).score == 0.0
    for bad in ({"max_execution_time": 0}, {"max_execution_time": math.inf}, {"pass_rate_reward_threshold": 1.1}):
        with pytest.raises(rewards.UserError, match="--code_"):
            configured(**{f"code_{name}": value for name, value in bad.items()})


@pytest.mark.parametrize(
    "response, want",
    [
        ("```python\na\n```\n```\n6\n```", "a"), ("```\na\n```\n```text\nb\n```", "b"), ("```py\na", "a"),
        ("a\nb", "a\nb"),
        ("```python\na\n```\nor\n```Python\nb\n```\n", "b"), ("``` python3 title=x\n  a\n```", "  a"),
        ("<think>```python\na\n```</think>\n```python\nb\n```", "b"), ("<think>```python\na\n```", ""),
        ("```python\n```", ""), ("text ```python\na\n``` text", "a"), ("```python\ns = '```'\n```", "s = '```'"),
    ],
)  # fmt: skip
def test_program_text(response, want):
    assert run_code.program_text(response).strip("\n") == want


def test_response_without_a_program_is_no_answer():
    for response in ("", "<think>print(6)", "```python\n\n```"):
        (result,) = score([RewardRecord(response, RIGHT[1], "code_stdio")])
        assert (result.score, result.status) == (0.0, "no_answer")


@pytest.mark.parametrize(
    "output, expected, want",
    [
        ("1 2\n3", "1 2 \n3\n", True), ("1.0 2", "1 2.00", True), ("1e2", "100", True), ("1\n\n2", "1\n2", False),
        ("yes", "YES", False), ("0.3333", "0.33333", False), ("nan", "nan", True), ("sNaN 1", "1 1", False),
        ("", "", True),
        ("1 2", "12", False), ("inf", "Infinity", True), ("1", "", False), ("5_4", "54", False), ("5_4", "5_4", True),
        ("0.30000000000000004", "0.3", False), ("9007199254740993", "9007199254740992.0", False),
        ("9" * 50000, "9" * 50000 + ".0", True),
    ],
)  # fmt: skip
def test_same_output(output, expected, want):
    assert sandbox.same_output(output, expected) is want


def test_labels():
    right = [
        ("code", ADD_TESTS), ("code", json.dumps(ADD_TESTS)), ("code", {"assert_case": ADD_TESTS}),
        ("code_stdio", RIGHT[1]), ("code_stdio", json.dumps(RIGHT[1])),
        ("code_stdio", {"inputs": ["1"], "outputs": ["1"]}),
    ]  # fmt: skip
    wrong = [
        ("code_stdio", {"inputs": ["1"], "outputs": []}), ("code", []), ("code", None), ("code", "[]"),
        ("code", {"inputs": []}), ("code", ["assert f(1"]), ("code", [1]), ("code", [" "]),
        ("code", "eJyLVkosLk4tKlFSiAUAGXkEJg=="), ("code_stdio", [{"input": "1"}]),
        ("code_stdio", ["assert f(1)"]), ("code_stdio", [{"input": 1, "output": "1"}]),
        ("code", ["from solution import f\nassert f(1) == 1"]), ("code", ["assert sum(10, 15) == 6"]),
        ("code", ["c = Counter()\nc.add()\nassert c.get() == 1"]),
    ]  # fmt: skip
    assert not [label for label in right if check_ground_truth(*label) is not None]
    assert not [label for label in wrong if check_ground_truth(*label) is None]
