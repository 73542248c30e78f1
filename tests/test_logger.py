"""What a user sees of a run while it goes: console, terminal, wandb, TensorBoard."""

import json
import math
import os
import pty
import subprocess
import sys
import textwrap
import threading

import pytest

import grpo
import utils
from tests.conftest import REPO


def make_logger(tmp_path, world, *flags, num_steps=8, start=0):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", *flags])
    return utils.Logger(args, tmp_path, num_steps, start, world)


def make_rollouts(count):
    prompt = utils.Prompt(0, (1, 2), "What is 3 + 4?", ("7",), ("gsm8k",))
    return [grpo.Rollout(prompt, 0, i, text=f"answer {i}", score=float(i), finish_reason="stop") for i in range(count)]


def test_sparkline():
    assert utils.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert utils.sparkline([5.0, 5.0]) == "▁▁" and utils.sparkline([]) == ""
    assert utils.sparkline([9.0] * 30 + [0.0, 1.0], width=3) == "█▁▂"


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


def in_a_terminal(script, directory, typed=b""):
    """What a Python program writes to a terminal in which `typed` is typed when a debugger asks."""
    master, slave = pty.openpty()
    env = os.environ | {"COLUMNS": "180", "TERM": "xterm-256color"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(directory)]
    process = subprocess.Popen(command, cwd=REPO, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    timer = threading.Timer(60, process.kill)
    timer.start()
    out = b""
    while chunk := read(master):
        out += chunk
        if typed and b"(Pdb) " in out:
            os.write(master, typed)
            typed = b""
    timer.cancel()
    assert process.wait() == 0, out.decode()[-2000:]
    return out.decode()


TERMINAL = """
    import sys
    from pathlib import Path
    import grpo, utils

    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])
    logger = utils.Logger(args, Path(sys.argv[1]), 8, 0, utils.World(0, 0, 1, None))
    for step in range(1, 5):
        logger.log({"training_step": step, "objective/scores": step / 4})
"""


def test_a_terminal_has_a_bar_with_time_left_and_a_curve(tmp_path):
    out = in_a_terminal(TERMINAL + "    logger.close()", tmp_path)
    assert "score ▁▃▆█ 1" in out and "4/8" in out and "left" in out


def test_the_bar_leaves_the_prompt_of_a_debugger_alone(tmp_path):
    """A bar that repaints itself, or takes stdout, hides it: then nothing is typed here."""
    more = "        if step == 2: secret = 6; breakpoint()\n    logger.close()"
    out = in_a_terminal(TERMINAL + more, tmp_path, b"p secret * 7\nimport time; time.sleep(0.5)\nc\n")
    assert "\n42" in out.replace("\r", "") and "4/8" in out
    asked = out[out.index("(Pdb)") : out.rindex("(Pdb)")]
    assert "━" not in asked  # nothing was painted over


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
    first.show(1, make_rollouts(20))
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
    logger.show(1, make_rollouts(20))
    logger.close()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts*.table.json")
    table = json.loads(table.read_text())
    assert len(table["data"]) == utils.TABLE_ROLLOUTS
    row = dict(zip(table["columns"], table["data"][3], strict=True))
    assert row["prompt"] == "What is 3 + 4?" and row["text"] == "answer 3" and row["score"] == 3.0
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"training_step" in log.read_bytes() and b"eval/*" in log.read_bytes()


def test_a_tracker_that_hangs_or_fails_never_blocks_and_is_reported(monkeypatch):
    monkeypatch.setattr(utils, "TRACKER_WAIT_S", 0.1)
    stuck = threading.Event()
    feed = utils.Feed("T", lambda row: stuck.wait(), lambda: None)
    for _ in range(1000):
        feed.put({})
    assert feed.dropped >= 1000 - 257
    assert feed.close().startswith("WARNING: T has not ended within 0 s")
    stuck.set()

    got = []
    feed = utils.Feed("T", lambda row: got.append(1 / row["x"]), lambda: got.append("end"))
    for x in (1, 0, 2):
        feed.put({"x": x})
    assert "T: 1 rows dropped (ZeroDivisionError" in feed.close() and got == [1.0, 0.5, "end"]
    assert utils.Feed("T", got.append, lambda: None).close() == ""


def test_tensorboard_without_its_package_is_refused_at_start(monkeypatch):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x", "--with_tensorboard"])
    args.check()
    find = utils.importlib.util.find_spec
    monkeypatch.setattr(utils.importlib.util, "find_spec", lambda name: name != "tensorboard" and find(name) or None)
    with pytest.raises(utils.UserError, match="--with_tensorboard .* pip install tensorboard"):
        args.check()
