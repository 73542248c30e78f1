"""What a user sees of a run while it goes: console, wandb, TensorBoard."""

import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
import textwrap
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


def test_trackio_gets_metrics_and_samples_and_goes_on(tmp_path, world, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed")
    for start in (0, 2):
        logger = make_logger(tmp_path, world, "--with_trackio", "--exp_name", "one", start=start)
        for step in (start + 1, start + 2):
            logger.log({"training_step": step, "objective/scores": step / 2, "objective/kl": math.nan})
        logger.show(start + 1, [make_rollouts(20)])
        logger.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio/grpo.db")) as database:
        runs, rows = zip(*database.execute("SELECT run_id, metrics FROM metrics ORDER BY id"), strict=True)
    rows = [json.loads(row) for row in rows]
    assert len(set(runs)) == 1
    assert [row["objective/scores"] for row in rows if "objective/scores" in row] == [0.5, 1.0, 1.5, 2.0]
    (table, _) = [row["rollouts"] for row in rows if "rollouts" in row]
    assert "answer 7" in json.dumps(table) and "answer 8" not in json.dumps(table)


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
    make_logger(tmp_path, world, "--with_tracking", start=1).close()
    runs = {path.name.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*")}
    assert runs == {(tmp_path / "wandb_id.txt").read_text()}  # a resume goes on in the run


class Odd(track.Tracker):
    """Fails or hangs where `act` says."""

    act = ""

    def do(self, when):
        if self.act == f"fail {when}":
            raise RuntimeError("no network")
        if self.act == f"hang {when}":
            time.sleep(60)

    def open(self):
        self.got = []
        self.do("open")

    def send(self, row):
        self.got.append(row["training_step"])
        self.do(f"row {len(self.got)}")

    def finish(self, status):
        self.do("finish")


@pytest.mark.parametrize("act", ["hang finish", "fail open", "fail row 2", "fail finish"])
def test_a_tracker_that_fails_or_never_ends_is_told_once(act, tmp_path, world, capsys, monkeypatch):
    monkeypatch.setattr(track, "WAIT_S", 0.5)
    monkeypatch.setattr(track, "TensorBoard", Odd)
    monkeypatch.setattr(Odd, "act", act)
    logger = make_logger(tmp_path, world, "--with_tensorboard")
    (tracker,) = utils.TRACKERS
    for step in range(1, 200):
        logger.log({"training_step": step})
    logger.close()
    assert capsys.readouterr().out.count("WARNING: ") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 199
    assert tracker.got == list(range(1, 200))  # the next row may arrive


FAILS = """
    import json, os, sys
    from dataclasses import asdict
    from pathlib import Path
    import grpo, utils
    from scripts.parts import track

    track.INIT_S = 2.0

    def main(args):
        run_dir = Path(sys.argv[1])
        (run_dir / "args.json").write_text(json.dumps(asdict(args)))
        logger = utils.Logger(args, run_dir, 8, 0, utils.World(0, 0, 1, None))
        for step in range(1, 5):
            logger.log({"training_step": step, f"row_{step}": 1.0})
        raise ValueError("a bug")

    flags = ["--model_name_or_path", "x", "--with_tracking"]
    utils.parse_args = lambda args_class, parse=utils.parse_args: parse(args_class, flags)
    utils.run_script(main, grpo.Args)
"""


@pytest.mark.house
@pytest.mark.parametrize("mode, key", [("offline", ""), ("online", "a" * 40)])
def test_a_run_that_fails_sends_its_rows_first(tmp_path, mode, key):
    """To the disk, where no server answers. wandb's process, which shares the pipes, does not outlive the run."""
    command = [sys.executable, "-c", textwrap.dedent(FAILS), tmp_path]
    env = {"WANDB_MODE": mode, "WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=REPO, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 1 and "a bug" in done.stderr and "WARNING" not in done.stdout
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert all(f"row_{step}".encode() in log.read_bytes() for step in range(1, 5))
