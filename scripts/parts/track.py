"""Trackers: Weights & Biases and TensorBoard, each in a process of its own beside the run.

A tracker process reads metrics.jsonl and samples.jsonl: a tracker that hangs cannot hold up the training, and no row is
lost, since all rows are on the disk. --with_tracking and --with_tensorboard start one process each, with --follow. When
the run is gone, for whatever reason, the process sends the rows that are left and ends, after --wait_s at the latest.
RUN/wandb_id.txt keeps the id of the wandb run: a resumed run, and scripts/track.py by hand, go on in the same one.
wandb drops the steps that it has already. Where its server is out of reach or there is no key, wandb writes to the disk
alone, as with WANDB_MODE=offline.

`start` and `end` are called in the run's process, which has imported utils. All else is the tracker's process, which
starts without it.
"""

import argparse
import json
import os
import select
import signal
import stat
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

START_S = 120.0  # after this time a run no longer waits for a tracker to be ready
WAIT_S = 30.0  # at the end of a run, for rows that are not sent yet
INIT_S = 30.0  # for wandb's server to answer; then wandb is offline
POLL_S = 0.5
FLAGS = {"wandb": "with_tracking", "tensorboard": "with_tensorboard"}
Row = dict[str, Any]


# --- In the run's process ---------------------------------------------------------------------------------------------


def start(args: Any, run_dir: Path, start_step: int) -> dict[str, subprocess.Popen]:
    """Start the trackers of the flags, name -> process; they send the rows after `start_step`. Raises UserError if one
    cannot begin."""
    return {name: start_one(name, run_dir, start_step) for name, flag in FLAGS.items() if getattr(args, flag)}


def start_one(name: str, run_dir: Path, start_step: int) -> subprocess.Popen:
    import utils

    log = run_dir / f"{name}.log"
    after = start_step or -1  # -1: also the evaluation before the first step
    process: Any = utils.start_program(log, "track.py", run_dir, f"--{name}", "--follow", "--after", after)
    if select.select([process.stdout], [], [], START_S)[0]:
        answer = process.stdout.readline()
        words = answer.strip() or log.read_text()[-3000:].strip()
        utils.need(answer.startswith("tracked by "), f"--{FLAGS[name]}: {words}")
        print(answer, end="", flush=True)
    return process


def end(name: str, process: subprocess.Popen) -> str:
    """Tell a tracker that the run has ended, and wait for it, WAIT_S at most; returns what went wrong, or ""."""
    try:
        output, _ = process.communicate("end", WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"WARNING: {name} has not ended within {WAIT_S:.0f} s and may lack rows"
    if process.returncode == 0:
        return ""
    return output.strip() or f"WARNING: {name} ended with status {process.returncode}"


# --- In the tracker's process -----------------------------------------------------------------------------------------


def table_name(row: Row) -> str:
    """The name of the table that a row of samples.jsonl is for."""
    return "eval_rollouts" if row.get("evaluation") else "rollouts"


class Wandb:
    """Metrics over training_step, and samples as tables `rollouts` and `eval_rollouts`, in one run of wandb across
    resumes."""

    def __init__(self, options: argparse.Namespace, args: Row):
        import wandb

        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # wandb must not ask a person for a key
        id_file = options.run / "wandb_id.txt"
        known_id = id_file.read_text() if id_file.exists() else None
        settings: Row = {"console": "off", "init_timeout": INIT_S}  # this program's output is not the run's
        if options.follow:
            settings["x_stats_pid"] = os.getppid()  # the process whose memory and processor are shown
        flags: Row = {
            "project": options.wandb_project or args["wandb_project"],
            "entity": options.wandb_entity or args["wandb_entity"],
            "name": args["exp_name"],
            "dir": str(options.run),
            "config": args,
            "id": known_id,
            "resume": "allow",
            "settings": wandb.Settings(**settings),
        }
        try:
            self.run = wandb.init(**flags)
            self.place = f"wandb: {self.run.dir if self.run.offline else self.run.url}"
        except Exception as error:  # no key, or no answer
            self.run = wandb.init(**flags, mode="offline")
            self.place = f"wandb: {self.run.dir}, offline: {error!r:.200}"
        id_file.write_text(self.run.id)
        for name in ("training_step", "episode"):
            self.run.define_metric(name)
        self.run.define_metric("*", step_metric="training_step")
        self.run.define_metric("eval/*", step_metric="training_step", summary="last,max")

    def send(self, row: Row) -> None:
        import wandb

        if row.get("rollouts"):
            columns = list(row["rollouts"][0])
            values = [list(rollout.values()) for rollout in row["rollouts"]]
            row = {"training_step": row["training_step"], table_name(row): wandb.Table(columns, values)}
        self.run.log(row, step=row["training_step"])

    def end(self, status: int) -> None:
        import wandb

        self.run.finish(exit_code=status)  # waits for wandb's service process, for ever if that hangs
        wandb.teardown()  # of that process: os._exit would leave it behind


class TensorBoard:
    """The same metrics and samples as event files in RUN/tensorboard, by torch's writer."""

    def __init__(self, options: argparse.Namespace, args: Row):
        from torch.utils.tensorboard import SummaryWriter

        directory = str(options.run / "tensorboard")
        self.place = f"TensorBoard: {directory}"
        self.writer = SummaryWriter(directory, purge_step=options.after + 1)  # a resumed run repeats these steps
        flags = "\n".join(f"    --{name} {value}" for name, value in args.items())
        self.writer.add_text("flags", flags, max(options.after, 0))

    def send(self, row: Row) -> None:
        step = row["training_step"]
        texts = []
        for rollout in row.pop("rollouts", []):
            lines = [f"{name}: {value}" for name, value in rollout.items()]
            texts.append(textwrap.indent("\n".join(lines), "    "))
        if texts:
            self.writer.add_text(table_name(row), "\n\n".join(texts), step)
            return
        for name, value in row.items():
            if value is not None:
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, status: int) -> None:
        self.writer.close()


def new_rows(bytes_read: dict[Path, int]) -> list[Row]:
    """The rows of files since the last call, in the order of their steps. bytes_read: file -> bytes read so far, which
    this call updates. A line that is being written is left for the next call."""
    rows: list[Row] = []
    for path, start in bytes_read.items():
        if path.exists():
            with path.open("rb") as file:
                file.seek(start)
                lines, end_of_line, _ = file.read().rpartition(b"\n")
            bytes_read[path] += len(lines) + len(end_of_line)
            rows += [json.loads(line) for line in lines.splitlines()]
    return sorted(rows, key=lambda row: row["training_step"])


class RunEnd(threading.Event):
    """Is set when no more rows will come; `status` is then 0, or 1 if the run ended without saying so."""

    def __init__(self, follow: bool, wait_s: float):
        super().__init__()
        self.status = 0
        started_by_a_run = follow and stat.S_ISFIFO(os.fstat(0).st_mode)
        for number in (signal.SIGINT, signal.SIGTERM):
            # Job queues signal all processes, and the run may still have a step to end: then its end counts
            signal.signal(number, signal.SIG_IGN if started_by_a_run else lambda *_: self.set())
        if started_by_a_run:
            threading.Thread(target=self.listen, args=(os.dup(0), wait_s), daemon=True).start()
        elif not follow:
            self.set()

    def listen(self, pipe: int, wait_s: float) -> None:
        """Read the run's last message until the pipe closes, which the kernel does when the run is gone."""
        message = b""
        while part := os.read(pipe, 64):
            message += part
        self.status = 0 if b"end" in message else 1
        self.set()
        timer = threading.Timer(wait_s, os._exit, (1,))  # a tracker may hang, and nobody is left to kill it
        timer.daemon = True
        timer.start()


def follow(trackers: Sequence[Wandb | TensorBoard], options: argparse.Namespace, run_end: RunEnd) -> Iterator[str]:
    """Send rows until the run's end. Yields a warning for each tracker that did not take all of them."""
    # metrics first: a step's samples are written after its metrics, and are sent after them
    bytes_read = {options.run / "metrics.jsonl": 0, options.run / "samples.jsonl": 0}
    dropped: dict[int, list[str]] = {i: [] for i in range(len(trackers))}
    ended = False
    while not ended:
        ended = run_end.wait(POLL_S)
        later = [row for row in new_rows(bytes_read) if row["training_step"] > options.after]
        for i, tracker in enumerate(trackers):
            for row in later:
                try:
                    tracker.send(dict(row))
                except Exception as error:  # of whatever class: the next row may arrive
                    dropped[i].append(repr(error))
    for i, tracker in enumerate(trackers):
        tracker.end(run_end.status)
        if dropped[i]:
            yield f"WARNING: {tracker.place}: {len(dropped[i])} rows dropped ({dropped[i][-1]})"


def sweep_own_files() -> subprocess.Popen:
    """Have wandb keep its temporary files and sockets in a directory that goes when this process is gone, even when it
    is killed. Returns the process that removes it, once its stdin closes."""
    directory = tempfile.mkdtemp(prefix="track_")
    tempfile.tempdir = directory
    os.environ["TMPDIR"] = directory
    command = ["sh", "-c", 'read -r _; rm -rf -- "$0"', directory]
    pipes: Row = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **pipes)


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir/exp_name")
    parser.add_argument("--wandb", action="store_true", help="to Weights & Biases")
    parser.add_argument("--tensorboard", action="store_true", help="to event files in RUN/tensorboard")
    parser.add_argument("--wandb_project", help="default: the run's --wandb_project")
    parser.add_argument("--wandb_entity", help="default: the run's --wandb_entity")
    parser.add_argument("--follow", action="store_true", help="go on with the rows that the run still writes")
    parser.add_argument("--after", type=int, default=-1, metavar="STEP", help="only later steps; default: all")
    parser.add_argument(
        "--wait_s", type=float, default=WAIT_S, help="seconds to send what is left when the run is gone"
    )
    options = parser.parse_args()
    if not (options.wandb or options.tensorboard):
        parser.error("where to? --wandb, --tensorboard or both")
    if not (options.run / "args.json").exists():
        parser.error(f"{options.run} is no run: it has no args.json. Give output_dir/exp_name of one that has begun")
    return options


def main(description: str | None) -> int:
    options = parse_options(description)
    sweeper = sweep_own_files()
    # stdout is what the run reads. wandb and torch write to file descriptor 1 too: that becomes stderr
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run_end = RunEnd(options.follow, options.wait_s)
    args = json.loads((options.run / "args.json").read_text())
    classes = [Wandb] * options.wandb + [TensorBoard] * options.tensorboard
    try:
        trackers = [tracker(options, args) for tracker in classes]
    except Exception as error:  # no package
        print(f"track.py: {type(error).__name__}: {error}", file=answer)
        return 1
    print(f"tracked by {' and '.join(tracker.place for tracker in trackers)}", file=answer, flush=True)
    warnings = list(follow(trackers, options, run_end))
    print("\n".join(warnings), file=answer, flush=True)
    sweeper.communicate()
    return 1 if warnings else 0
