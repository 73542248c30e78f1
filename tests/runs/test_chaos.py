"""Some drills of scripts/proof/chaos.py, the checks it makes, and what the drills found in the product."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest

import grpo
import utils
from scripts.proof import chaos
from tests import programs
from tests.conftest import REPO


class Forked(chaos.Run):
    """Its processes are forked, and leave notes of their environments."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.notes = self.directory / "notes"
        self.notes.mkdir()

    def begin(self, line, env):
        self.log.touch()
        how = {"address": programs.serve(), "children": True}
        self.process = programs.Program(line, self.log, **how, **env | {"PIDS": self.notes})

    def processes(self):
        forked = {pid: env for pid, env in programs.living(self.notes).items() if f"CHAOS_RUN={self.name}\0" in env}
        return super().processes() | forked


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chaos") / "lab"
    made = programs.run(["scripts/data/make_tiny_model.py", "--out", directory / "model"])
    assert made.returncode == 0, made.stderr
    lab = chaos.Lab(directory, "transformers", seed=1, kills=2)
    chaos.prepare(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chaos, "Run", Forked)
        yield lab
    chaos.end_all(lab)
    for pid in [pid for notes in directory.glob("*/notes") for pid in programs.living(notes)]:
        os.kill(pid, signal.SIGKILL)


def unbroken(lab, setting):
    if setting not in lab.unbroken:
        run = chaos.Run(lab, "unbroken", setting)
        run.complete()
        lab.unbroken[setting] = run
    return lab.unbroken[setting]


def test_kill_9_and_resume(lab):
    """Two kills of grpo.py at moments of the seed: the weights and metrics of the unbroken run, all accounted for."""
    whole = unbroken(lab, chaos.SYNC)
    row = chaos.carry_out(lab, "kill_learner", partial(chaos.kill, "learner"), chaos.SYNC)
    assert row["kept"], row
    assert row["ended"] == "resumed x 2" and row["equal"] == "yes" and row["weights"] == whole.weights()[:12]
    assert row["accounting"] == "8 steps, 512 rollouts"


def test_corrupt_weights(lab):
    unbroken(lab, chaos.FAST0)
    row = chaos.carry_out(lab, "corrupt_weights", chaos.corrupt_weights, chaos.FAST0)
    assert row["kept"], row
    assert "on this step's rollouts: gap 0." in row["ended"] and row["equal"] == "yes"
    assert "64 groups = " in row["accounting"]


def test_the_hooks_act_in_a_python_of_its_own_too(lab, tmp_path):
    env = os.environ | {"PYTHONPATH": str(lab.directory / "hooks")}
    env |= {"CHAOS": "update:1", "CHAOS_MARKER": str(tmp_path / "marker")}
    line = [sys.executable, "-c", "import utils; print(utils.Gap.add.__name__)"]
    assert subprocess.run(line, cwd=REPO, env=env, capture_output=True, text=True).stdout == "wrapped\n"


@pytest.mark.parametrize(
    "tamper, message",
    [
        (lambda rows: rows[:4] + rows[3:], "steps logged: "),
        (lambda rows: rows[:-1], "steps logged: "),
        (lambda rows: [row | {"batch/groups_trained": 0.0} for row in rows], "groups lost at step"),
    ],
)
def test_accounts_that_do_not_add_up_are_noticed(lab, tmp_path, tamper, message):
    run = copy_of(unbroken(lab, chaos.FAST0), tmp_path)
    rows = tamper(run.metrics())
    assert run.account()
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(chaos.Broken, match=message):
        run.account()


def copy_of(run, directory):
    """A run's files under another path."""
    copy = object.__new__(chaos.Run)
    copy.__dict__ |= run.__dict__ | {"path": directory / "it"}
    subprocess.run(["cp", "-r", run.path, copy.path], check=True)
    return copy


def test_what_is_left_or_differs_is_noticed(lab, tmp_path):
    whole = unbroken(lab, chaos.FAST0)
    run = copy_of(whole, tmp_path)
    assert run.difference(whole) == ""
    rows = run.metrics()
    rows[4] |= {"objective/scores": rows[4]["objective/scores"] + 1e-9, "time/total": 1e9}
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.difference(whole).startswith("step 5: objective/scores ")
    with (run.path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert run.difference(whole).startswith("weights ")
    (run.path / "checkpoints" / "step_9.tmp").mkdir()
    with pytest.raises(chaos.Broken, match="left behind: .*step_9.tmp"):
        run.account()
    (run.path / "checkpoints" / "step_9.tmp").rmdir()
    lines = (run.path / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (run.path / "rollouts.jsonl").write_text("".join(lines[:-1] + lines[:1]))
    with pytest.raises(chaos.Broken, match="512 rollouts logged, 511 different ones"):
        run.account()


def test_a_process_that_outlives_its_run_is_noticed(lab, monkeypatch):
    """Also one in a session of its own."""
    run = chaos.Run(lab, "leak", chaos.SYNC)
    run.name = "leak"
    script = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    run.process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"CHAOS_RUN": "leak"})
    monkeypatch.setattr(chaos, "GONE_S", 0.5)
    with pytest.raises(chaos.Broken, match="left running: {.*sleep 60"):
        run.end()
    for pid in run.processes():
        os.kill(pid, 9)


def test_lines_cut_by_a_kill_are_dropped_on_resume(tmp_path, world):
    """kill -9 in the middle of a write leaves half a line. Dumps of steps that come again go too."""
    (tmp_path / "dumps").mkdir()
    for step in (2, 3):
        (tmp_path / "dumps" / f"step_{step:06d}.json").touch()
    for name in ("metrics", "rollouts"):
        rows = [json.dumps({"training_step": step, "x": "é"}) + "\n" for step in (1, 2, 3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows) + rows[0][:-5])
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])
    logger = utils.Logger(args, tmp_path, 8, 2, world)
    logger.log({"training_step": 3})
    steps = [json.loads(line)["training_step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 2
    assert [p.name for p in (tmp_path / "dumps").iterdir()] == ["step_000002.json"]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_wandb_that_hangs_does_not_hold_up_the_end(tmp_path):
    script = """
        import contextlib, json, os, shutil, signal, sys, threading, time
        from dataclasses import asdict
        from pathlib import Path
        import grpo, utils
        from scripts.parts import track

        track.WAIT_S = 2.0
        args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", "--with_tracking"])
        (Path(sys.argv[1]) / "args.json").write_text(json.dumps(asdict(args)))
        logger = utils.Logger(args, Path(sys.argv[1]), 8, 0, utils.World(0, 0, 1, None))
        tracker = str(logger.trackers["wandb"].pid).encode()

        def line(path):
            with contextlib.suppress(OSError):  # of a process that has ended meanwhile
                return path.read_bytes()
            return b""

        lines = {int(p.parent.name): line(p) for p in Path("/proc").glob("[0-9]*/cmdline")}
        (service,) = [n for n, words in lines.items() if b"wandb-core" in words.split(bytes(1))[0] and tracker in words]
        threading.Timer(60, lambda: (os.kill(service, signal.SIGKILL), os._exit(1))).start()
        os.kill(service, signal.SIGSTOP)
        logger.log({"training_step": 1})
        start = time.monotonic()
        logger.close()
        print("seconds", time.monotonic() - start)
        os.kill(service, signal.SIGKILL)
        for left in Path("/tmp").glob(f"wandb-*-{service}-*"):  # its socket, there where TMPDIR is too long for one
            shutil.rmtree(left)
        utils.exit_process()
    """
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TMPDIR": str(tmp_path)}  # it is killed there
    done = programs.run(["-c", textwrap.dedent(script), tmp_path], 120, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING: wandb has not ended within 2 s" in done.stdout and "seconds " in done.stdout
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"training_step": 1}
    until = time.monotonic() + 60
    while list(tmp_path.glob("track_*")) and time.monotonic() < until:  # wandb's own, of a killed tracker
        time.sleep(0.05)
    assert not list(tmp_path.glob("track_*")) and not list(tmp_path.glob("*wandb-*"))
