"""Trackers: Weights & Biases and TensorBoard, each in a process of its own beside the run.

A tracker process reads metrics.jsonl and samples.jsonl: a tracker that hangs cannot hold up the training, and no row is
lost, since all rows are on the disk. --with_tracking and --with_tensorboard start one process each, with --follow. When
the run is gone, for whatever reason, the process sends the rows that are left and ends, after --wait_s at the latest.
RUN/wandb_id.txt keeps the id of the wandb run: a resumed run, and scripts/track.py by hand, go on in the same one.
wandb drops the steps that it has already.

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
import sys
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

START_S = 120.0  # after this time a run no longer waits for a tracker to be ready
WAIT_S = 30.0  # at the end of a run, for rows that are not sent yet
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
    process: Any = utils.start_program(log, "parts/track.py", run_dir, f"--{name}", "--follow", "--after", after)
    if select.select([process.stdout], [], [], START_S)[0]:
        answer = process.stdout.readline()
        if not answer.startswith("tracked by "):
            problem = (answer + process.stdout.read()).strip() or log.read_text()[-3000:].strip()
            raise utils.UserError(f"--{FLAGS[name]}: {problem}")
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
    lines = output.splitlines()
    return lines[-1] if lines else f"WARNING: {name} ended with status {process.returncode}"


# --- In the tracker's process -----------------------------------------------------------------------------------------


def table_name(row: Row) -> str:
    """The name of the table that a row of samples.jsonl is for."""
    return "eval_rollouts" if row.get("evaluation") else "rollouts"


class Wandb:
    """Metrics over training_step, and samples as tables `rollouts` and `eval_rollouts`, in one run of wandb across
    resumes."""

    name = "wandb"

    def __init__(self, run_dir: Path, args: Row, options: argparse.Namespace):
        import wandb

        id_file = run_dir / "wandb_id.txt"
        settings: Row = {"console": "off"}  # this program's output is not the run's
        if options.follow:
            settings["x_stats_pid"] = os.getppid()  # the process whose memory and processor are shown
        self.run = wandb.init(
            project=options.wandb_project or args["wandb_project"],
            entity=options.wandb_entity or args["wandb_entity"],
            name=args["exp_name"],
            dir=str(run_dir),
            config=args,
            id=id_file.read_text() if id_file.exists() else None,
            resume="allow",
            settings=wandb.Settings(**settings),
        )
        id_file.write_text(self.run.id)
        for name in ("training_step", "episode"):
            self.run.define_metric(name)
        self.run.define_metric("*", step_metric="training_step")
        self.run.define_metric("eval/*", step_metric="training_step", summary="last,max")
        self.place = self.run.dir if self.run.offline else self.run.url or ""

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

    name = "TensorBoard"

    def __init__(self, run_dir: Path, args: Row, options: argparse.Namespace):
        from torch.utils.tensorboard import SummaryWriter

        self.place = str(run_dir / "tensorboard")
        self.writer = SummaryWriter(self.place, purge_step=options.after + 1)  # a resumed run repeats these steps
        flags = "\n".join(f"    --{name} {value}" for name, value in args.items())
        self.writer.add_text("flags", flags, max(options.after, 0))

    def send(self, row: Row) -> None:
        step = row["training_step"]
        if "rollouts" in row:
            texts = []
            for rollout in row["rollouts"]:
                lines = [f"{name}: {value}" for name, value in rollout.items()]
                texts.append(textwrap.indent("\n".join(lines), "    "))
            self.writer.add_text(table_name(row), "\n\n".join(texts), step)
        else:
            for name, value in row.items():
                if value is not None:
                    self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, status: int) -> None:
        self.writer.close()


class Rows:
    """The rows of a run's two files as they are written, in the order of their steps."""

    def __init__(self, run_dir: Path, after: int):
        self.after = after
        # metrics first: a step's samples are written after its metrics, and are sent after them
        self.bytes_read = {run_dir / "metrics.jsonl": 0, run_dir / "samples.jsonl": 0}

    def new(self) -> list[Row]:
        """The rows since the last call. A line that is being written is left for the next call."""
        rows: list[Row] = []
        for path, start in self.bytes_read.items():
            if path.exists():
                with path.open("rb") as file:
                    file.seek(start)
                    lines, end_of_line, _ = file.read().rpartition(b"\n")
                self.bytes_read[path] += len(lines) + len(end_of_line)
                rows += [json.loads(line) for line in lines.splitlines()]
        later = [row for row in rows if row["training_step"] > self.after]
        return sorted(later, key=lambda row: row["training_step"])


class RunEnd:
    """`event` is set when no more rows will come; `status` is then 0, or 1 if the run ended without saying so."""

    def __init__(self, follow: bool, wait_s: float):
        self.event = threading.Event()
        self.status = 0
        self.wait_s = wait_s
        self.started_by_a_run = follow and stat.S_ISFIFO(os.fstat(0).st_mode)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        if not follow:
            self.event.set()
        elif self.started_by_a_run:
            threading.Thread(target=self._listen, daemon=True).start()

    def _on_signal(self, *_: object) -> None:
        """Job queues signal all processes, and the run may still have a step to end: then its end counts."""
        if not self.started_by_a_run:
            self.event.set()

    def _listen(self) -> None:
        """Read the run's last message until stdin closes, which the kernel does when the run is gone."""
        message = b""
        while part := os.read(0, 64):  # not sys.stdin, whose lock this thread would hold at the interpreter's end
            message += part
        self.status = 0 if b"end" in message else 1
        self.event.set()
        timer = threading.Timer(self.wait_s, os._exit, (1,))  # a tracker may hang, and nobody is left to kill it
        timer.daemon = True
        timer.start()


def follow(trackers: Sequence[Wandb | TensorBoard], rows: Rows, run_end: RunEnd) -> list[str]:
    """Send rows until the run's end; returns a warning for each tracker that did not take all of them."""
    errors: dict[str, list[str]] = {tracker.name: [] for tracker in trackers}
    ended = False
    while not ended:
        ended = run_end.event.wait(POLL_S)
        for row in rows.new():
            for tracker in trackers:
                try:
                    tracker.send(row)
                except Exception as error:  # of whatever class: the next row may arrive
                    errors[tracker.name].append(repr(error))
    for tracker in trackers:
        tracker.end(run_end.status)
    return [
        f"WARNING: {name}: {len(dropped)} rows dropped ({dropped[-1]})" for name, dropped in errors.items() if dropped
    ]


def check_login() -> str:
    """Why wandb.init would refuse at once here, or "". Asks no server: a slow one costs rows, not the run."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared", "run"):
        return ""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # wandb must not ask a person for a key
    try:
        import wandb

        offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
        if offline or wandb.login(prompt=False, verify=False):
            return ""
        return "no key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline, or drop the flag"
    except Exception as error:  # the package is missing, or the key has a wrong form
        return f"{type(error).__name__}: {error}"


def use_own_temporary_directory() -> subprocess.Popen:
    """Have wandb keep its temporary files and sockets in a directory that goes when this process is gone, even when it
    is killed. Returns the process that removes it, once its stdin closes."""
    directory = tempfile.mkdtemp(prefix="track_")
    tempfile.tempdir = directory
    os.environ["TMPDIR"] = directory
    return subprocess.Popen(
        ["sh", "-c", 'read -r _; rm -rf -- "$0"', directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir/exp_name")
    parser.add_argument("--wandb", action="store_true", help="to Weights & Biases")
    parser.add_argument("--tensorboard", action="store_true", help="to event files in RUN/tensorboard")
    parser.add_argument("--wandb_project", help="default: the run's --wandb_project")
    parser.add_argument("--wandb_entity", help="default: the run's --wandb_entity")
    parser.add_argument("--follow", action="store_true", help="go on with the rows that the run still writes")
    parser.add_argument("--after", type=int, default=-1, metavar="STEP", help="only later steps; default: all")
    parser.add_argument("--wait_s", type=float, default=30.0, help="seconds to send what is left when the run is gone")
    parser.add_argument("--check", action="store_true", help="only try whether wandb would begin; RUN need not exist")
    options = parser.parse_args()
    if options.check:
        return options
    if not (options.wandb or options.tensorboard):
        parser.error("where to? --wandb, --tensorboard or both")
    if not (options.run / "args.json").exists():
        parser.error(f"{options.run} is no run: it has no args.json. Give output_dir/exp_name of one that has begun")
    return options


def main(description: str | None = __doc__) -> int:
    options = parse_options(description)
    if options.check:
        raise SystemExit(check_login() or None)
    sweeper = use_own_temporary_directory()
    # stdout is what the run reads. wandb and torch write to file descriptor 1 too: that becomes stderr
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run_end = RunEnd(options.follow, options.wait_s)
    args = json.loads((options.run / "args.json").read_text())
    trackers: list[Wandb | TensorBoard] = []
    try:
        if options.wandb:
            trackers.append(Wandb(options.run, args, options))
        if options.tensorboard:
            trackers.append(TensorBoard(options.run, args, options))
    except Exception as error:  # no key, no package or no network
        print(f"track.py: {type(error).__name__}: {error}", file=answer)
        return 1
    places = [f"{tracker.name}: {tracker.place}" for tracker in trackers]
    print(f"tracked by {' and '.join(places)}", file=answer, flush=True)
    warnings = follow(trackers, Rows(options.run, options.after), run_end)
    print("\n".join(warnings), file=answer, flush=True)
    sweeper.communicate()
    return 1 if warnings else 0


if __name__ == "__main__":
    raise SystemExit(main())
