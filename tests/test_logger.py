"""What a user sees of a run while it goes: console, wandb, TensorBoard."""

import contextlib
import importlib.machinery
import json
import logging
import math
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
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


class FakeWandb(types.ModuleType):
    """In place of wandb. It keeps what it gets, and does what `act` says: "hang init", "fail log 2", ..."""

    id, url, dir, offline = "id7", "https://x", "here", False
    Settings = Table = staticmethod(lambda *args, **kwargs: len(args) and len(args[1]))
    setup = define_metric = teardown = staticmethod(lambda *args, **kwargs: None)

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.act = ""
        self.got = []
        self.over = threading.Event()

    def do(self, when, *values):
        self.got.append([when, *values])
        if self.act == f"hang {when}":
            self.over.wait(60)
        if self.act == f"fail {when}":
            raise RuntimeError("no network")

    def init(self, id, project, config, mode="online", **more):
        self.do("init" if mode == "online" else mode, id, project, config["exp_name"])
        return self

    def log(self, row, step):
        self.do(f"log {step}", row)

    def finish(self, exit_code):
        self.do("finish", exit_code)


@pytest.fixture
def fake(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    yield module
    module.over.set()
    utils.end_trackers()


def test_a_tracker_gets_all_rows_and_the_end(fake, tmp_path, world, capsys):
    """The samples of a step with its metrics, the steps in order; a resume goes on after its checkpoint's step."""
    logger = make_logger(tmp_path, world, "--with_tracking", "--wandb_project", "p")
    for step in range(300):
        logger.log({"training_step": step, "objective/scores": math.nan if step == 3 else 0.5})
        if step % 100 == 1:
            logger.show(step, [make_rollouts(3)])
    logger.close()
    got = list(fake.got)
    assert got[0] == ["init", None, "p", "grpo"] and got[-1] == ["finish", 0]
    names = [name for step in range(300) for name in [f"log {step}"] * (1 + (step % 100 == 1))]
    assert [name for name, *_ in got[1:-1]] == names
    assert got[3][1] == {"training_step": 1, "rollouts": 3} and got[5][1]["objective/scores"] is None
    again = make_logger(tmp_path, world, "--with_tracking", start=200)
    again.log({"training_step": 201})
    again.close()
    assert fake.got[len(got) :] == [
        ["init", "id7", "grpo", "grpo"],
        ["log 201", {"training_step": 201}],
        ["finish", 0],
    ]
    out = capsys.readouterr().out
    assert "WARNING" not in out and out.count("tracked by wandb: https://x\n") == 2


@pytest.mark.parametrize("act", ["hang init", "hang log 2", "fail offline", "fail log 2"])
def test_a_tracker_that_hangs_or_fails_never_blocks_and_is_told_once(fake, act, tmp_path, world, capsys, monkeypatch):
    monkeypatch.setattr(track, "START_S", 0.5)
    monkeypatch.setattr(track, "WAIT_S", 0.5 if "hang" in act else 30.0)
    fake.act = act
    if act == "fail offline":  # nor online
        fake.init = lambda **flags: fake.do("offline")
    logger = make_logger(tmp_path, world, "--with_tracking")
    for step in range(1, 200):
        logger.log({"training_step": step})
    logger.close()
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("WARNING: ") == 1 and "wandb" in told
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 199
    if act == "fail log 2":  # the next row may arrive
        assert [name for name, *_ in fake.got[-3:]] == ["log 198", "log 199", "finish"]


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
def test_a_run_that_fails_sends_its_rows_first(tmp_path):
    """To the disk, for no server answers. wandb's process, which shares the pipes, does not outlive the run."""
    command = [sys.executable, "-c", textwrap.dedent(FAILS), tmp_path]
    env = {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=REPO, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 1 and "a bug" in done.stderr and "WARNING" not in done.stdout
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert all(f"row_{step}".encode() in log.read_bytes() for step in range(1, 5))
