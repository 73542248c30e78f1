"""Send a run's metrics and sample rollouts to Weights & Biases and TensorBoard, while it goes or afterwards.

    python scripts/parts/track.py RUN --wandb        an old run; WANDB_MODE=offline works
    python scripts/parts/track.py RUN --tensorboard  event files in RUN/tensorboard; pip install tensorboard
    python scripts/parts/track.py RUN --wandb --follow  until Ctrl-C, or until stdin closes where that is a pipe

It reads metrics.jsonl and samples.jsonl. --with_tracking and --with_tensorboard start one of it each with --follow: a
tracker that hangs cannot reach the training, and loses nothing, since all rows are on the disk. When the run is gone,
however that came about, it sends what is left and ends, after --wait_s at the latest. The wandb run's id is kept in
RUN/wandb_id.txt: who resumes or sends again goes on in the same run, where wandb drops the steps that it has already.
"""

import argparse
import json
import os
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.5
Row = dict[str, Any]
Sender = tuple[str, str, Callable[[Row], None], Callable[[int], None]]  # name, where, send a row, end with this status


def wandb_sender(run_dir: Path, args: Row, options: argparse.Namespace) -> Sender:
    """Metrics over training_step and samples as tables `rollouts`, in one wandb run across resumes."""
    import wandb

    id_file = run_dir / "wandb_id.txt"
    settings: Row = {"console": "off"}  # what this program prints is not the run's
    if options.follow:
        settings |= {"x_stats_pid": os.getppid()}  # whose memory and processor are shown
    run = wandb.init(
        project=options.wandb_project or args["wandb_project"],
        entity=options.wandb_entity or args["wandb_entity"],
        name=args["exp_name"],
        dir=str(run_dir),
        config=args,
        id=id_file.read_text() if id_file.exists() else None,
        resume="allow",
        settings=wandb.Settings(**settings),
    )
    id_file.write_text(run.id)
    for name in ("training_step", "episode"):
        run.define_metric(name)
    run.define_metric("*", step_metric="training_step")
    run.define_metric("eval/*", step_metric="training_step", summary="last,max")

    def send(row: Row) -> None:
        if "rollouts" in row:
            columns = list(row["rollouts"][0])
            row = row | {"rollouts": wandb.Table(columns, [list(r.values()) for r in row["rollouts"]])}
        run.log(row, step=row["training_step"])

    def end(status: int) -> None:
        run.finish(exit_code=status)  # waits for wandb's service process, for ever if that hangs
        wandb.teardown()  # of that process, which an exit without destructors would leave

    return "wandb", run.dir if run.offline else run.url or "", send, end


def tensorboard_sender(run_dir: Path, args: Row, options: argparse.Namespace) -> Sender:
    """The same metrics and samples as event files in RUN/tensorboard, by torch's writer."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=options.after + 1)  # what a resume does again
    flags = "\n".join(f"    --{name} {value}" for name, value in args.items())
    writer.add_text("flags", flags, max(options.after, 0))

    def send(row: Row) -> None:
        step = row["training_step"]
        if "rollouts" in row:
            texts = ("\n".join(f"{k}: {v}" for k, v in r.items()) for r in row["rollouts"])
            writer.add_text("rollouts", "\n\n".join("    " + t.replace("\n", "\n    ") for t in texts), step)
        else:
            for name, value in row.items():
                if value is not None:
                    writer.add_scalar(name, value, step)
        writer.flush()

    return "TensorBoard", writer.log_dir, send, lambda status: writer.close()


class Rows:
    """The rows of a run's two files as they come, in the order of their steps."""

    def __init__(self, run_dir: Path, after: int):
        self.paths, self.after = [run_dir / f"{name}.jsonl" for name in ("metrics", "samples")], after
        self.read = [0, 0]  # bytes, whole lines

    def new(self) -> list[Row]:
        """Those since the last call; a line that is being written is left for the next one."""
        rows: list[Row] = []
        for i, path in enumerate(self.paths):  # a step's samples are written after its metrics, and so they are read
            if path.exists():
                with path.open("rb") as file:
                    file.seek(self.read[i])
                    whole = file.read().rpartition(b"\n")[0]
                self.read[i] += len(whole) + bool(whole)
                rows += [json.loads(line) for line in whole.splitlines()]
        return sorted((row for row in rows if row["training_step"] > self.after), key=lambda row: row["training_step"])


class Over:
    """Set when there is nothing more to wait for; `status` is then 0, or 1 where the run ended without a word."""

    def __init__(self, follow: bool, wait_s: float):
        self.event, self.status, self.wait_s = threading.Event(), 0, wait_s
        started_by_a_run = follow and stat.S_ISFIFO(os.fstat(0).st_mode)
        for number in (signal.SIGINT, signal.SIGTERM):  # job queues tell all processes; the run may have a step to end
            signal.signal(number, lambda *_: started_by_a_run or self.event.set())
        if not follow:
            self.event.set()
        elif started_by_a_run:
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        said = b""
        while part := os.read(0, 64):  # not sys.stdin, whose lock this thread would hold at the interpreter's end
            said += part
        self.status = int(b"end" not in said)
        self.event.set()
        timer = threading.Timer(self.wait_s, os._exit, (1,))  # of a tracker that hangs when nobody waits for it
        timer.daemon = True
        timer.start()


def follow(senders: list[Sender], rows: Rows, over: Over) -> list[str]:
    """Send rows until it is over; what did not go well, a line each."""
    failed: dict[str, list[str]] = {name: [] for name, *_ in senders}
    last = False
    while not last:
        last = over.event.wait(POLL_S)
        for row in rows.new():
            for name, _, send, _ in senders:
                try:
                    send(row)
                except Exception as error:  # whatever a tracker raises, the next row may arrive
                    failed[name].append(repr(error))
    for *_, end in senders:
        end(over.status)
    return [f"WARNING: {name}: {len(errors)} rows dropped ({errors[-1]})" for name, errors in failed.items() if errors]


def check_login() -> str:
    """Why wandb.init would refuse at once here, where it is not offline, or "". Asks no server: one that is slow costs
    rows and no run."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared", "run"):
        return ""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody is asked for a key
    try:
        import wandb

        offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
        if offline or wandb.login(prompt=False, verify=False):
            return ""
        return "no key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline, or drop the flag"
    except Exception as error:  # of no package, a key that is none
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir/exp_name")
    parser.add_argument("--wandb", action="store_true", help="to Weights & Biases")
    parser.add_argument("--tensorboard", action="store_true", help="to event files in RUN/tensorboard")
    parser.add_argument("--wandb_project", help="default: the run's --wandb_project")
    parser.add_argument("--wandb_entity", help="default: the run's --wandb_entity")
    parser.add_argument("--follow", action="store_true", help="go on with what the run still writes")
    parser.add_argument("--after", type=int, default=-1, metavar="STEP", help="only later steps; default: all")
    parser.add_argument("--wait_s", type=float, default=30.0, help="seconds for what is left when the run is gone")
    parser.add_argument("--check", action="store_true", help="only whether wandb would begin; RUN need not exist yet")
    options = parser.parse_args()
    if options.check:
        raise SystemExit(check_login() or None)
    if not (options.wandb or options.tensorboard):
        parser.error("where to? --wandb, --tensorboard or both")
    if not (options.run / "args.json").exists():
        parser.error(f"{options.run} is no run: it has no args.json. Give output_dir/exp_name of one that has begun")
    # wandb's own temporary files and sockets, which it would leave when it is killed, go when this process is gone
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="track_")
    line = ["sh", "-c", 'read -r _; rm -rf -- "$0"', tempfile.tempdir]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    sweeper = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True, **quiet)
    # What the one that started us reads: wandb and torch write to file descriptor 1 too
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    over, args = Over(options.follow, options.wait_s), json.loads((options.run / "args.json").read_text())
    makers = [m for m, on in ((wandb_sender, options.wandb), (tensorboard_sender, options.tensorboard)) if on]
    try:
        senders = [make(options.run, args, options) for make in makers]
    except Exception as error:  # of no key, no package, no network
        print(f"track.py: {type(error).__name__}: {error}", file=answer)
        return 1
    print(f"tracked by {' and '.join(f'{name}: {where}' for name, where, *_ in senders)}", file=answer, flush=True)
    problems = follow(senders, Rows(options.run, options.after), over)
    print("\n".join(problems), file=answer, flush=True)
    sweeper.communicate()
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
