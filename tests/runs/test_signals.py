"""SIGTERM and Ctrl-C: what a run says, how it ends, and that none of its processes is left."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests import programs
from tests.runs.test_run import TRANSFORMERS, command, data, read  # noqa: F401

REPO = Path(__file__).resolve().parents[2]
TORCHRUN = programs.torchrun(2)
STARTS = {
    "python grpo.py": ["grpo.py"],
    "torchrun grpo.py": [*TORCHRUN, "grpo.py"],
    "grpo_fast.py": ["grpo_fast.py"],
    "torchrun grpo_fast.py": [*TORCHRUN, "grpo_fast.py"],
}


class Started:
    """A run and all processes that it started, however deep: they have inherited a variable of the environment, or were
    forked and have left a note."""

    def __init__(self, how, model, data, out, flags):  # noqa: F811
        self.mark, self.log, self.run_dir = uuid.uuid4().hex, out / "log", out / "x"
        line = command(model, data, out, f"--exp_name x {TRANSFORMERS} --max_logprob_gap 0 {flags}")
        line[:1] = STARTS[how]
        self.pids = out / "pids"
        self.pids.mkdir()
        env = {"OMP_NUM_THREADS": "1", "MARK": self.mark, "PIDS": self.pids}
        self.process = programs.Program(line, self.log, address=programs.serve(), children=True, **env)

    def text(self):
        return self.log.read_text()

    def processes(self):
        """pid -> environment of each that lives."""
        found = programs.living(self.pids)
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_text()
            except (OSError, UnicodeDecodeError):  # of another user, or ended meanwhile
                continue
            if f"MARK={self.mark}" in environment:
                found[int(path.parent.name)] = environment
        return found

    def ranks(self):
        return [pid for pid, env in self.processes().items() if "TORCHELASTIC_RUN_ID=" in env] or [self.process.pid]

    def wait_until(self, condition):
        deadline = time.monotonic() + 600
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.02)

    def in_step(self, step):
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and len(read(metrics)) >= step)

    def end(self):
        """The exit status; nothing is left."""
        status = self.process.wait(timeout=600)
        deadline = time.monotonic() + 60
        while left := self.processes():
            assert time.monotonic() < deadline, (list(left), self.text()[-3000:])
            time.sleep(0.05)
        return status


@pytest.fixture
def start(tiny_models, data, tmp_path):  # noqa: F811
    """A function (how, flags) -> Started, whose processes end with the test."""
    runs = []

    def begin(how, flags):
        runs.append(Started(how, tiny_models(), data, tmp_path, flags))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


@pytest.mark.parametrize("how, name", [
    ("python grpo.py", "SIGINT"),
    ("grpo_fast.py", "SIGTERM"),
    pytest.param("grpo_fast.py", "SIGINT", marks=pytest.mark.house),
    pytest.param("torchrun grpo.py", "SIGTERM", marks=pytest.mark.house),
    pytest.param("torchrun grpo_fast.py", "SIGINT", marks=pytest.mark.house),
])  # fmt: skip
def test_the_first_one_ends_the_step_and_writes_a_checkpoint(start, how, name):
    run = start(how, "--total_episodes 6400000")
    run.in_step(2)
    everyone = [run.process.pid]
    if name == "SIGTERM":  # as a job queue does, which tells all of a job's processes
        everyone = sorted({run.process.pid, *run.ranks()})
    for pid in everyone:
        os.kill(pid, getattr(signal, name))
    status, text = run.end(), run.text()
    name = "SIGTERM" if how == "grpo_fast.py" else name  # so its ranks get both
    step = int(re.search(rf"{name}: stopped after step (\d+); --resume goes on", text)[1])
    said = re.findall(r"^(\w+): finishing step (\d+), then a checkpoint; once more to stop now$", text, re.MULTILINE)
    assert said in ([(name, str(step))], [(name, str(step - 1))])  # the signal may come as a step ends
    assert "stopping now" not in text and len(read(run.run_dir / "metrics.jsonl")) == step
    assert (run.run_dir / "checkpoints" / "latest").read_text() == f"step_{step}"
    assert "torchrun" in how or (status == 0 and "Traceback" not in text), text[-3000:]


SLOW = """
def slow(response, ground_truth):
    import os, pathlib, time
    pathlib.Path({called!r} + os.environ.get("RANK", "0")).touch()
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", [
    pytest.param(how, marks=[] if how == "grpo_fast.py" else pytest.mark.house) for how in STARTS
])  # fmt: skip
def test_a_second_one_stops_at_once(start, how, tmp_path):
    """In the middle of a step that would take an hour, in which the verifiers' processes are at work."""
    called = tmp_path / "called"
    (tmp_path / "slow.py").write_text(SLOW.format(called=str(called)))
    run = start(how, f"--reward_file {tmp_path / 'slow.py'} --remap_verifier gsm8k=slow")
    run.wait_until(lambda: called.with_name("called0").exists())
    run.process.send_signal(signal.SIGINT)
    run.wait_until(lambda: ": finishing step 1, then a checkpoint; once more to stop now" in run.text())
    time.sleep(1.5)  # what comes within a second is taken for the same
    assert "stopping now" not in run.text()
    run.process.send_signal(signal.SIGTERM)
    status, text = run.end(), run.text()
    assert text.count("SIGTERM: stopping now") == 1
    assert "torchrun" in how or status == 128 + signal.SIGTERM, text[-3000:]


BEGUN = "open(os.environ['GRPO_BEGUN'], 'w').write('yes')"


@pytest.mark.parametrize("begun, grace, least", [("pass", 60, 0), (BEGUN, 3, 3)])
def test_an_engine_that_dies_before_the_first_step_is_not_waited_for(begun, grace, least):
    """A learner that waits for its engines has nothing to save: the run stood still for ten minutes."""
    rank = f"import os, time\nif os.environ['RANK'] == '1':\n    {begun}\n    os._exit(3)\ntime.sleep(60)"
    code = f"""
import time
from scripts.parts import launch
launch.GRACE_S, launch.LAST_S, start = {grace}, 1.0, time.monotonic()
try:
    launch.launch(["learner 0", "engine 0"], ["-c", {rank!r}])
finally:
    print({least} <= time.monotonic() - start < 50)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "True" and "engine 0 died with exit code 3" in done.stderr, done.stderr


@pytest.mark.parametrize("learner, engine", [(0, 1), (1, 0), (0, 0)])
def test_a_run_ends_as_its_learners_do(learner, engine):
    """An engine that finds learner 0 gone, once all is saved, made runs fail that had ended well."""
    rank = f"import os, time\nr = int(os.environ['RANK'])\ntime.sleep(0.3 * r)\nos._exit([{learner}, {engine}][r])"
    code = f"from scripts.parts import launch\nlaunch.launch(['learner 0', 'engine 0'], ['-c', {rank!r}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=100)
    assert (done.returncode, "died" in done.stderr) == (learner, bool(learner)), done.stderr


@pytest.mark.parametrize("how", ["python grpo.py", "grpo_fast.py"])
def test_before_the_first_step_one_is_enough(start, how):
    run = start(how, "--total_episodes 6400000")

    def listening(pid):  # to SIGTERM, which is listened to last
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
        return int(caught, 16) >> (signal.SIGTERM - 1) & 1

    ranks = 1 if how == "python grpo.py" else 2
    run.wait_until(lambda: len(run.ranks()) == ranks and all(map(listening, run.ranks())))
    run.process.send_signal(signal.SIGINT)
    status, text = run.end(), run.text()
    assert text.count(": stopping now") == 1 and "Traceback" not in text, text[-3000:]
    assert status == 128 + signal.SIGINT and not (run.run_dir / "metrics.jsonl").exists()


def gone(directory, pattern, seconds=60):
    """Wait until nothing in the directory has such a name."""
    until = time.monotonic() + seconds
    while found := list(Path(directory).glob(pattern)):
        assert time.monotonic() < until, found
        time.sleep(0.05)


def test_a_killed_process_leaves_no_temporary_directory(tmp_path):
    """As an engine's for its sockets: neither kill -9 nor os._exit runs a destructor."""
    for end in ("os.kill(os.getpid(), 9)", "os._exit(0)"):
        script = f"import os, utils; os.mkdir('{tmp_path}/swept_1'); utils.sweep('{tmp_path}/swept_1'); {end}"
        programs.run(["-c", script], timeout=60)
        gone(tmp_path, "swept_*")
