"""What a user sees of a run while it goes: console, terminal, wandb, TensorBoard."""

import json
import logging
import math
import os
import pty
import subprocess
import sys
import termios
import textwrap
import threading
import time
import types
from dataclasses import asdict

import pytest

import grpo
import utils
from scripts.parts import track
from tests.conftest import REPO


def make_logger(tmp_path, world, *flags, num_steps=8, start=0):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *flags])
    (tmp_path / "args.json").write_text(json.dumps(asdict(args)))
    return utils.Logger(args, tmp_path, num_steps, start, world)


def test_vllm_is_quiet_before_it_sets_its_own_level():
    """It warns of Triton as it is imported."""
    assert not logging.getLogger("vllm.triton_utils.importing").isEnabledFor(logging.WARNING)


def make_rollouts(count):
    prompt = utils.Prompt(0, (1, 2), "What is 3 + 4?", ("7",), ("gsm8k",))
    return [grpo.Rollout(prompt, 0, i, text=f"answer {i}", score=float(i), finish_reason="stop") for i in range(count)]


def test_time_left_is_the_pace_of_the_last_steps(tmp_path, world, monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(utils.time, "monotonic", lambda: now[0])
    logger = make_logger(tmp_path, world, num_steps=1000)
    for step, seconds in enumerate([500.0, 10.0, 20.0]):  # an evaluation before step 1 is no step
        now[0] += seconds
        logger.log({"training_step": step, "objective/scores": float(step)})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["2:46:30", "4:09:30"]  # 999 x 10 s, 998 x 15 s
    for step in range(3, 40):
        now[0] += 2.0
        logger.log({"training_step": step, "objective/scores": math.nan})
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "0:32:02"  # 961 x 2 s


def in_a_terminal(script, directory):
    """What a Python program writes to a terminal of 120 columns."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 120))
    env = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(directory)]
    process = subprocess.Popen(command, cwd=REPO, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    timer = threading.Timer(60, process.kill)
    timer.start()
    out = b""
    while chunk := read(master):
        out += chunk
    timer.cancel()
    assert process.wait() == 0, out.decode()[-2000:]
    return out.decode()


TERMINAL = """
    import sys
    from pathlib import Path
    import grpo, utils

    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])
    logger = utils.Logger(args, Path(sys.argv[1]), 4, 0, utils.World(0, 0, 1, None))
    for step in range(1, 5):
        logger.log({"training_step": step, "objective/scores": step / 4})
    logger.close()
"""


def test_a_terminal_has_a_line_for_each_step_and_nothing_is_painted_over(tmp_path):
    """A bar that repaints itself would hide what a debugger asks, and stay in what a terminal copies."""
    shown = in_a_terminal(TERMINAL, tmp_path)
    header, *lines = shown.replace("\r\n", "\n").splitlines()
    assert header.split()[:2] == ["step", "score"] and header.endswith("left")
    assert [line.split()[:2] for line in lines] == [[f"{i}/4", f"{i / 4:.3f}"] for i in range(1, 5)]
    assert "\r" not in shown.replace("\r\n", "") and "\x1b" not in shown


def test_a_step_is_one_line_of_120_columns_whatever_its_numbers_are(tmp_path, world, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(utils.time, "monotonic", lambda: now[0])
    logger = make_logger(tmp_path, world, num_steps=100_000)
    metrics = {name: -123456.789 for _, name, _ in utils.Logger.COLUMNS}
    logger.log(metrics | {"training_step": 1, "time/total": 987654.3})
    now[0] += 3600.0
    logger.log({name: math.nan for name in metrics} | {"training_step": 99_999, "optim/grad_norm": 0.5})
    header, large, missing = capsys.readouterr().out.splitlines()
    assert max(len(header), len(large), len(missing)) <= 120 and "-1e+05" in large and "1e+06" in large
    assert missing.split()[:2] == ["99999/100000", "0.50"]
    end = header.rindex(" grad ") + len(" grad")
    assert missing[:end].endswith("0.50")  # below its heading


def read(terminal):
    try:
        return os.read(terminal, 2**16)
    except OSError:  # Linux: the other end has closed
        return b""


def test_tensorboard_gets_metrics_and_samples_and_a_resume_replaces_what_it_does_again(tmp_path, world):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = make_logger(tmp_path, world, "--with_tensorboard")
    for step in (1, 2, 3):
        first.log({"training_step": step, "objective/scores": step / 2, "objective/kl": math.nan})
    first.show(1, [make_rollouts(20)])
    first.close()
    again = make_logger(tmp_path, world, "--with_tensorboard", start=2)
    again.log({"training_step": 3, "objective/scores": 9.0})
    again.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("objective/scores")] == [(1, 0.5), (2, 1.0), (3, 9.0)]
    assert "objective/kl" not in events.Tags()["scalars"]  # NaN
    text = events.Tensors("rollouts/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "What is 3 + 4?" in text and "answer 7" in text and "answer 8" not in text


def test_wandb_gets_axes_and_a_table(tmp_path, world, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make_logger(tmp_path, world, "--with_tracking")
    logger.log({"training_step": 1, "objective/scores": 0.5})
    logger.show(1, [make_rollouts(20)])
    run = types.SimpleNamespace(eval_world=world, run_dir=tmp_path, state={"step": 1}, logger=logger)
    grpo.keep_samples(run, make_rollouts(20))
    logger.close()
    (evaluated,) = tmp_path.glob("wandb/offline-run-*/files/media/table/eval_rollouts*.table.json")
    assert len(json.loads(evaluated.read_text())["data"]) == 20
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts*.table.json")
    table = json.loads(table.read_text())
    assert len(table["data"]) == utils.TABLE_ROLLOUTS
    row = dict(zip(table["columns"], table["data"][3], strict=True))
    assert row["prompt"] == "What is 3 + 4?" and row["text"] == "answer 3" and row["score"] == 3.0
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"training_step" in log.read_bytes() and b"eval/*" in log.read_bytes()


# A tracker's library in place of wandb: it writes what it gets to a file, and does what FAKE says.
WANDB = """
    import json, os, pathlib, signal, sys, time

    def do(when, *values):
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(json.dumps([when, *values]) + "\\n")
        if os.environ["FAKE"] == f"hang {when}":
            time.sleep(600)
        if os.environ["FAKE"] == f"fail {when}":
            raise RuntimeError("no network")
        if os.environ["FAKE"] == f"die {when}":
            os.kill(os.getpid(), signal.SIGKILL)

    class Run:
        id, url, offline = "id7", "https://x", False
        def define_metric(self, *args, **kwargs): pass
        def log(self, row, step): do(f"log {step}", row)
        def finish(self, exit_code): do("finish", exit_code)

    def init(**kwargs):
        do("init", kwargs["id"], kwargs["project"], kwargs["config"]["exp_name"])
        return Run()

    def Settings(**kwargs): return kwargs
    def Table(columns, rows): return len(rows)
    def teardown(): pass
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Function: what the stand-in of wandb does -> what it has got so far."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(textwrap.dedent(WANDB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "fake.log"))

    def get(what):
        monkeypatch.setenv("FAKE", what)
        log = tmp_path / "fake.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return get


def test_a_tracker_gets_all_rows_and_the_end(fake, tmp_path, world, capsys):
    """The samples of a step with its metrics, the steps in order; a resume goes on after its checkpoint's step."""
    fake("")
    logger = make_logger(tmp_path, world, "--with_tracking", "--wandb_project", "p")
    for step in range(300):  # more than any queue would hold
        logger.log({"training_step": step, "objective/scores": math.nan if step == 3 else 0.5})
        if step % 100 == 1:
            logger.show(step, [make_rollouts(3)])
        if step == 200:  # as job queues do, to all processes
            logger.trackers["wandb"].terminate()
    logger.close()
    got = fake("")
    assert got[0] == ["init", None, "p", "grpo"] and got[-1] == ["finish", 0]
    names = [name for step in range(300) for name in [f"log {step}"] * (1 + (step % 100 == 1))]
    assert [name for name, *_ in got[1:-1]] == names
    assert got[3][1] == {"training_step": 1, "rollouts": 3} and got[5][1]["objective/scores"] is None
    again = make_logger(tmp_path, world, "--with_tracking", start=200)
    again.log({"training_step": 201})
    again.close()
    assert fake("")[len(got) :] == [
        ["init", "id7", "grpo", "grpo"],
        ["log 201", {"training_step": 201}],
        ["finish", 0],
    ]
    out = capsys.readouterr().out
    assert "WARNING" not in out and out.count("tracked by wandb: https://x\n") == 2


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hang log 2", "WARNING: wandb has not ended within 1 s and may lack rows: metrics.jsonl has all"),
        ("hang finish", "WARNING: wandb has not ended within 1 s and may lack rows"),
        ("fail log 2", "WARNING: wandb: 1 rows dropped (RuntimeError('no network')): metrics.jsonl has all"),
        ("die log 2", "WARNING: wandb ended with status -9"),
        ("hang init", "WARNING: wandb has not ended within 1 s"),
    ],
)
@pytest.mark.runs
def test_a_tracker_that_hangs_or_fails_never_blocks_and_is_reported(
    fake, what, words, tmp_path, world, capsys, monkeypatch
):
    if "hang" in what:  # else nothing is waited for that long
        monkeypatch.setattr(track, "WAIT_S", 1.0)
    if what == "hang init":
        monkeypatch.setattr(track, "START_S", 1.0)
    fake(what)
    logger = make_logger(tmp_path, world, "--with_tracking")
    for step in range(1, 1000):
        logger.log({"training_step": step})
    if what != "hang init":
        until(lambda: len(fake(what)) > 2 + (what in ("fail log 2", "hang finish")))
    logger.close()
    told = " ".join(capsys.readouterr().out.split())
    assert words in told and f"scripts/track.py {tmp_path} --wandb sends it" in told
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 999
    until(lambda: logger.trackers["wandb"].poll() is not None)


def test_a_tracker_that_cannot_begin_is_refused_with_its_words(fake, tmp_path, world):
    fake("fail init")
    with pytest.raises(utils.UserError, match="--with_tracking: track.py: RuntimeError: no network$"):
        make_logger(tmp_path, world, "--with_tracking")
    assert (tmp_path / "wandb.log").read_text() == ""  # no traceback, no abort of a thread


KILLED = """
    import json, os, sys
    from dataclasses import asdict
    from pathlib import Path
    import grpo, utils

    program, run_dir = utils.program, Path(sys.argv[1])
    utils.program = lambda *arguments: [*program(*arguments), "--wait_s", "1"]
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", "--with_tracking"])
    (run_dir / "args.json").write_text(json.dumps(asdict(args)))
    logger = utils.Logger(args, run_dir, 8, 0, utils.World(0, 0, 1, None))
    for step in range(1, 5):
        logger.log({"training_step": step})
    print(logger.trackers["wandb"].pid, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("what", ["", "hang log 2"])
def test_a_tracker_ends_by_itself_when_its_run_is_killed(fake, what, tmp_path):
    """It sends what is left and tells wandb that the run has failed; one that hangs gives up after --wait_s."""
    fake(what)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE)
    assert done.returncode == -9
    pid = int(done.stdout.splitlines()[-1])
    until(lambda: not is_running(pid))
    names = ["init", "log 1", "log 2", *([] if what else ["log 3", "log 4", "finish"])]
    got = fake(what)
    assert [name for name, *_ in got] == names and (what or got[-1] == ["finish", 1])


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid):
    try:
        return "\nState:\tZ" not in open(f"/proc/{pid}/status").read()
    except OSError:
        return False


def test_an_old_run_is_sent_by_hand(fake, tmp_path, world):
    fake("")
    logger = make_logger(tmp_path, world)
    for step in (1, 2):
        logger.log({"training_step": step})
    logger.show(2, [make_rollouts(2)])
    logger.close()
    line = [sys.executable, REPO / "scripts" / "track.py", tmp_path]
    done = subprocess.run([*line, "--wandb", "--wandb_project", "q"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("tracked by wandb: https://x\n"), done.stderr
    want = [["log 1", {"training_step": 1}], ["log 2", {"training_step": 2}]]
    want = [["init", None, "q", "grpo"], *want, ["log 2", {"training_step": 2, "rollouts": 2}], ["finish", 0]]
    assert fake("") == want
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2 and "--wandb, --tensorboard or both" in done.stderr
    done = subprocess.run([*line[:2], tmp_path / "b", "--wandb"], capture_output=True, text=True)
    assert done.returncode == 2 and f"{tmp_path / 'b'} is no run: it has no args.json" in done.stderr


def test_tensorboard_without_its_package_is_refused_at_start(monkeypatch):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", "--with_tensorboard"])
    args.check()
    find = utils.importlib.util.find_spec
    monkeypatch.setattr(utils.importlib.util, "find_spec", lambda name: name != "tensorboard" and find(name) or None)
    with pytest.raises(utils.UserError, match="--with_tensorboard: .* pip install tensorboard"):
        args.check()


def test_a_tracker_without_a_key_is_refused_before_anything_loads(tmp_path, world, monkeypatch):
    for name, value in {"HOME": tmp_path, "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    args = grpo.Args(output_dir=str(tmp_path), with_tracking=True, model_name_or_path=str(tmp_path))
    with pytest.raises(utils.UserError, match="--with_tracking: no key: run `wandb login`, .*WANDB_MODE=offline"):
        utils.prepare_run_dir(args, "0", world)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert (utils.prepare_run_dir(args, "0", world) / "args.json").exists()
