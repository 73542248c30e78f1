"""Trackers: Weights & Biases, TensorBoard and trackio, each in a thread of the run.

A tracker that hangs or fails holds up neither a step nor, after WAIT_S, the end: one warning tells of it. A resumed run
goes on in the wandb run of RUN/wandb_id.txt. Where wandb's server is out of reach or there is no key, wandb writes to
the disk alone, as with WANDB_MODE=offline; `wandb sync` sends that later.
"""

import importlib
import json
import os
import queue
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import utils

INIT_S = 30.0  # for wandb's server to answer; then wandb is offline
START_S = 60.0  # after this time a run no longer waits for a tracker to be ready
WAIT_S = 30.0  # at the end of a run, for rows that are not sent yet
Row = dict[str, Any]


class Tracker(threading.Thread):
    """Sends the rows that are put into `rows`, until None. start_step: of a resumed run, the step that it goes on
    after."""

    open: Any  # methods of the subclasses
    send: Any
    finish: Any

    def __init__(self, run_dir: Path, start_step: int):
        super().__init__(name=type(self).__name__.lower(), daemon=True)
        self.run_dir = run_dir
        self.args: Row = json.loads((run_dir / "args.json").read_text())
        self.start_step = start_step
        self.rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self.opened = threading.Event()
        self.status = 0  # of the run
        self.has_warned = False
        self.start()
        self.opened.wait(START_S)

    def run(self) -> None:
        self.attempt(self.open)
        self.opened.set()
        for row in iter(self.rows.get, None):
            self.attempt(self.send, row)
        self.attempt(self.finish)

    def attempt(self, function: Any, *arguments: Any) -> None:
        """Call it. An error, of whatever class, is a warning: the next row may arrive."""
        try:
            function(*arguments)
        except (Exception, SystemExit) as error:
            self.warn(f"{error!r:.300}")

    def warn(self, problem: str) -> None:
        """Tell the first problem."""
        if not self.has_warned:
            print(f"WARNING: {self.name}: {problem}: metrics.jsonl has all\n", end="", flush=True)
        self.has_warned = True

    def end(self, status: int) -> None:
        """Send what is left, and with which status the run ends. Waits WAIT_S at most."""
        self.status = status
        self.rows.put(None)
        self.join(WAIT_S)
        if self.is_alive():
            self.warn(f"has not ended within {WAIT_S:.0f} s")


def name_of_samples(row: Row) -> str:
    """What a tracker calls the rollouts of a row of samples.jsonl."""
    return "eval_rollouts" if row.get("evaluation") else "rollouts"


def as_table(row: Row, table: Any) -> Row:
    """A row for a tracker, with the rollouts of one of samples.jsonl in a table, a line each."""
    if not row.get("rollouts"):
        return row
    rollouts = row["rollouts"]
    columns = list(rollouts[0])
    values = [list(rollout.values()) for rollout in rollouts]
    step = row["training_step"]
    name = name_of_samples(row)
    return {"training_step": step, name: table(columns, values)}


class Wandb(Tracker):
    """Metrics over training_step, and samples as tables."""

    def run(self) -> None:
        """wandb's files and sockets go into a directory that is removed however this process ends."""
        self.own = tempfile.mkdtemp(prefix="track_")
        utils.sweep(self.own)
        super().run()

    def attempt(self, function: Any, *arguments: Any) -> None:
        before = tempfile.gettempdir()
        os.environ["TMPDIR"] = tempfile.tempdir = self.own
        super().attempt(function, *arguments)
        os.environ["TMPDIR"] = tempfile.tempdir = before

    def open(self) -> None:
        self.wandb: Any = importlib.import_module("wandb")
        id_file = self.run_dir / "wandb_id.txt"
        settings = self.wandb.Settings(console="off", silent=True, init_timeout=INIT_S)
        self.wandb.setup(settings)  # silent: it asks no person for a key
        flags: Row = {
            "project": self.args["wandb_project"],
            "entity": self.args["wandb_entity"],
            "name": self.args["exp_name"],
            "dir": str(self.run_dir),
            "config": self.args,
            "id": id_file.read_text() if id_file.exists() else None,
            "resume": "allow",
            "settings": settings,
        }
        try:
            self.tracked = self.wandb.init(**flags)
        except Exception as error:  # no key, or no answer
            print(f"wandb is offline: {error!r:.200}\n", end="", flush=True)
            self.tracked = self.wandb.init(**flags, mode="offline")
        id_file.write_text(self.tracked.id)
        print(f"tracked by wandb: {self.tracked.url or self.tracked.dir}\n", end="", flush=True)
        self.tracked.define_metric("eval/*", step_metric="training_step", summary="last,max")

    def send(self, row: Row) -> None:
        step = row["training_step"]
        row = as_table(row, self.wandb.Table)
        self.tracked.log(row, step=step)

    def finish(self) -> None:
        self.tracked.finish(exit_code=self.status)
        self.wandb.teardown()  # of its process


class TensorBoard(Tracker):
    """The same as event files in RUN/tensorboard, by torch's writer."""

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first_step = self.start_step + 1 if self.start_step else 0  # 0: the evaluation before the first step
        self.writer = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=first_step)

    def send(self, row: Row) -> None:
        step = row.pop("training_step")
        samples = row.pop("rollouts", None)
        if samples is not None:
            texts = ["\n".join(f"{name}: {value}" for name, value in sample.items()) for sample in samples]
            self.writer.add_text(name_of_samples(row), textwrap.indent("\n\n".join(texts), "    "), step)
            return
        for name, value in row.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Trackio(Tracker):
    """The same in trackio's own files on this machine, which `trackio show` serves."""

    def open(self) -> None:
        self.trackio: Any = importlib.import_module("trackio")
        self.tracked = self.trackio.init(
            project=self.args["wandb_project"],
            name=self.args["exp_name"],
            config=self.args,
            resume="allow" if self.start_step else "never",
        )

    def send(self, row: Row) -> None:
        step = row["training_step"]
        row = as_table(row, self.trackio.Table)
        self.tracked.log(row, step=step)

    def finish(self) -> None:
        self.tracked.finish()


def start(args: Any, run_dir: Path, start_step: int) -> list[Tracker]:
    """The trackers of the flags."""
    trackers: list[Tracker] = []
    if args.with_tracking:
        trackers.append(Wandb(run_dir, start_step))
    if args.with_tensorboard:
        trackers.append(TensorBoard(run_dir, start_step))
    if args.with_trackio:
        trackers.append(Trackio(run_dir, start_step))
    return trackers
