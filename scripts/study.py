"""Is an idea better? Runs the arms of a study with the same seeds and says so with intervals, or that it cannot tell.

    python scripts/data/make_tasks.py                                            rows of the tasks
    python scripts/study.py calibrate --scale fly                                which tasks the model can learn
    python scripts/study.py run --out study.jsonl --seeds 1-8 --controls
        --arms base "maxrl@scripts/forks/maxrl.diff: --advantage_normalization_type maxrl" "mini4: --num_mini_batches 4"
    python scripts/study.py table study.jsonl [--plot study.png]                 differences from the first arm
    python scripts/study.py replay study.jsonl [--task last --arm base --seed 3]    default: a random run

An arm is NAME, NAME: FLAGS, NAME@FORK.diff: FLAGS or NAME@BRANCH: FLAGS. An arm that the record has needs its name
only, and is the one it was, also if its fork has changed since. The first arm is the base. `run` goes through the
seeds, within a seed through tasks and arms, so that it can be stopped at any time and continued by the same line:
what is done is in the file. Endpoints are fixed by the file's first row. `replay` makes a run again and compares the
SHA-256 of its final weights. Exit status: 0, or 1 if a run failed, a control did not lose or a replay differs, and 130
after Ctrl-C.
"""

import argparse
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.studies import arms as arms_part
from scripts.studies import lanes, record, report, tasks
from scripts.studies.arms import Arm, ArmError
from scripts.studies.endpoints import ENDPOINTS, PRIMARY
from scripts.studies.record import Record, RecordError

SCALE = "fly"  # where the command line names none, and there is no record yet
THREADS = 1


def positive(text: str) -> int:
    """A number of at least 1. Raises ArgumentTypeError."""
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 1")
    return int(text)


def parse_seeds(text: str) -> list[int]:
    """Seeds as 1-8, 3 or 1,2,5. Raises RecordError for other texts, and for a seed given twice."""
    seeds: list[int] = []
    for part in text.split(","):
        words = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not words:
            raise RecordError(f"--seeds {text!r}: write them as 1-8, 3 or 1,2,5")
        first = int(words[1])
        last = int(words[2] or first)
        if last < first:
            raise RecordError(f"--seeds {text!r}: {first} is above {last}")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise RecordError(f"--seeds {text!r} names a seed twice")
    return seeds


def base_flags(scale: tasks.Scale, name: str, steps: int) -> tuple[str, ...]:
    """The flags of the base on the task of that name, but for seed and directory."""
    task = tasks.TASKS[name]
    data = f"data/{task.data}"
    evaluation = ["--local_eval_every", "-1"]
    if task.is_evaluated:
        evaluation = ["--dataset_mixer_eval_list", f"{data}/eval.jsonl", "1.0"]
        evaluation += ["--local_eval_every", str(scale.evaluate_every), "--eval_on_step_0"]
    flags = ["--model_name_or_path", scale.model]
    flags += ["--dataset_mixer_list", f"{data}/train.jsonl", "1.0"]
    flags += evaluation
    flags += ["--total_episodes", str(scale.rollouts * steps)]
    return (*flags, *scale.flags, *task.flags, *scale.of_task.get(name, ()))


def describe_study(options: argparse.Namespace) -> dict[str, Any]:
    """The study's row: what its runs have in common, with a hash."""
    scale_name = options.scale or SCALE
    scale = tasks.SCALES[scale_name]
    steps = options.steps or scale.steps
    commit = arms_part.git("rev-parse", "HEAD")
    flags = {}
    targets = {}
    measured = {}
    for name in options.tasks or scale.tasks:
        task = tasks.TASKS[name]
        flags[name] = list(base_flags(scale, name, steps))
        targets[name] = task.target
        measured[name] = dict(task.measured)

    content: dict[str, Any] = {"commit": commit.decode().strip(), "scale": scale_name, "steps": steps}
    content |= {"evaluate_every": scale.evaluate_every, "threads": options.threads or THREADS}
    content |= {"tasks": flags, "targets": targets, "measured": measured, "endpoints": ENDPOINTS, "primary": PRIMARY}
    return {"kind": "study", **content, "hash": record.hash_of(content), "begun": time.time()}


def arm_of(rows: Record, text: str) -> Arm:
    """The arm that a text of the command line means: one of the record's by its name alone, or a new one."""
    if text in rows.arms:
        facts = rows.arms[text]
        return Arm(facts["name"], facts["diff"], facts["script"], tuple(facts["flags"]))
    return arms_part.parse_arm(text, rows.study["commit"])


def arms_of(options: argparse.Namespace, rows: Record) -> list[Arm]:
    """The arms of the command line, and the controls: those of the record, where it has them."""
    arms = [arm_of(rows, text) for text in options.arms]
    if options.controls:
        for name, text in zip(tasks.CONTROL_NAMES, tasks.CONTROLS, strict=True):
            arms.append(arm_of(rows, name if name in rows.arms else text))
        arms.append(Arm(tasks.AGAIN, arms[0].diff, arms[0].script, arms[0].flags))
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ArmError(f"two arms have the same name: {', '.join(names)}")
    seen: dict[tuple[Any, ...], str] = {}
    for arm in arms:
        twin = seen.setdefault((arm.diff, arm.script, arm.flags), arm.name)
        if twin != arm.name and arm.name != tasks.AGAIN:
            raise ArmError(f"arms {twin} and {arm.name} have the same code and flags")
    return arms


def arm_row(arm: Arm) -> dict[str, Any]:
    """The row of an arm."""
    return {"kind": "arm", "name": arm.name, "script": arm.script, "flags": list(arm.flags), "diff": arm.diff}


def job_of(study: dict[str, Any], task: str, arm: Arm, seed: int) -> lanes.Job:
    """The run of an arm on a task with a seed."""
    base = tuple(study["tasks"][task])
    flags = arms_part.merge_flags(base, arm.flags)
    run_seed = seed
    if arm.name == tasks.AGAIN:
        run_seed += tasks.AGAIN_SHIFT
    target = study["targets"][task]
    measured = study.get("measured", {}).get(task, {})  # records of before have none
    return lanes.Job(task, arm, seed, run_seed, tuple(flags), target, study["steps"], measured)


def missing_jobs(rows: Record, arms: list[Arm], seeds: list[int], retry_failed: bool = False) -> list[lanes.Job]:
    """The runs that are not in the record, seed by seed, the arms of a seed and task in an order drawn for them. A run
    that failed is missing with `retry_failed` only."""
    done = set(rows.runs)
    if not retry_failed:
        done |= set(map(record.key_of, rows.failures))
    jobs = []
    for seed in seeds:
        for task in rows.study["tasks"]:
            order = list(arms)
            random.Random(f"{seed} {task}").shuffle(order)
            for arm in order:
                if (task, arm.name, seed) not in done:
                    jobs.append(job_of(rows.study, task, arm, seed))
    return jobs


def check_options(options: argparse.Namespace, study: dict[str, Any]) -> None:
    """Raises RecordError if the command line asks for another study than the file's."""
    known = set(study["tasks"])
    asked_tasks = set(options.tasks or known)
    if asked_tasks != known:
        names = ", ".join(study["tasks"])
        raise RecordError(f"{options.out} is a study of {names}: --tasks differs")
    for name in ("scale", "steps", "threads"):
        asked = getattr(options, name)
        given = study[name]
        if asked not in (None, given):
            raise RecordError(f"{options.out} is a study with --{name} {given}: {asked} differs")


def check_machine(rows: Record) -> None:
    """Raises RecordError if the record's runs are of another processor or of other packages than are here: no row made
    here fits them."""
    here = lanes.processor()
    for row in rows.runs.values():
        there = row["processor"]
        packages = row["packages"]
        if there != here:
            raise RecordError(
                f"the runs of --out are of {there}, and this is {here}: begin a record with another --out"
            )
        for name, version in packages.items():
            installed = lanes.version_of(name)
            if installed != version:
                raise RecordError(
                    f"the runs of --out are of {name} {version}, and here is {installed}: begin a record with "
                    "another --out"
                )


def check_files(scale: str, names: Collection[str]) -> None:
    """Raises RecordError if the rows of a task or the model are not there: each run would fail, and a failure is
    final."""
    makers = {f"{tasks.SCALES[scale].model}/config.json": "python scripts/data/get_smollm2.py"}
    for name in names:
        task = tasks.TASKS[name]
        makers[f"data/{task.data}/train.jsonl"] = task.maker
    for path, maker in makers.items():
        if not (arms_part.ROOT / path).exists():
            raise RecordError(f"there is no {path}: run {maker}")


def tell_of_code(commit: str) -> None:
    """Say which changes are in no arm."""
    head = arms_part.git("rev-parse", "HEAD").decode().strip()
    if head != commit:
        print(f"this record's code is commit {commit[:12]}; later ones are in no arm. A new version needs a new --out")
    changed = arms_part.git("diff", "HEAD", "--name-only", "--", "*.py").decode().split()
    if changed:
        print(f"WARNING: {', '.join(changed)}: what is not committed is in no arm")


class Running:
    """The rows of a study under way: each is written, kept and told as its run ends."""

    def __init__(self, rows: Record, append: Callable[[dict[str, Any]], None], total: int):
        self.rows = rows
        self.append = append
        self.total = total
        self.count = 0
        self.begun = time.monotonic()
        self.warned: set[str] = set()  # arms whose warnings have been told

    def done(self, row: dict[str, Any]) -> None:
        """Take the row of a run that has ended."""
        row = {"kind": row["kind"], "study": self.rows.study["hash"], **row}
        record.check_one_more(self.rows, row)  # before it is in the file, which it would make unreadable
        self.rows.take(row)
        self.append(row)
        self.count += 1
        print(self.line(row), flush=True)
        if row["kind"] == "run" and row["arm"] not in self.warned:
            self.warned.add(row["arm"])
            for warning in row.get("warnings", ()):
                print(f"arm {row['arm']}: WARNING: {warning}", flush=True)

    def line(self, row: dict[str, Any]) -> str:
        """What is told of a row."""
        minutes = (time.monotonic() - self.begun) / 60
        left = minutes / self.count * (self.total - self.count)
        run = f"{row['task']} {row['arm']} seed {row['seed']}"
        words = f"{self.count} of {self.total}, {minutes:.0f} min, some {left:.0f} min left: {run}"
        if row["kind"] == "failure":
            reason = report.reason(row)
            return f"{words}: FAILED {reason}"
        first, *_, last = row["curve"]["held_out"]
        area = row["endpoints"]["area"]
        seconds = row["wall_seconds"]
        return f"{words}: held-out {first:.2f} -> {last:.2f}, area {area:.3f}, {seconds:.0f} s"


def run(options: argparse.Namespace) -> bool:
    """Do the runs that are missing. Returns whether none failed."""
    seeds = parse_seeds(options.seeds)
    with record.appending(options.out) as append:
        is_begun = options.out.stat().st_size > 0
        if is_begun:
            rows = record.read([options.out])
        else:
            rows = Record()
            rows.take(describe_study(options))
        study = rows.study
        check_options(options, study)
        check_machine(rows)
        arms = arms_of(options, rows)
        check_files(study["scale"], study["tasks"])
        tell_of_code(study["commit"])
        with tempfile.TemporaryDirectory(prefix="study-") as name:
            folder = Path(name)
            copies = {arm.name: arms_part.make_copy(arm, study["commit"], folder) for arm in arms}
            if not is_begun:
                append(study)
            for arm in arms:
                is_new = arm.name not in rows.arms
                rows.take(arm_row(arm))
                if is_new:
                    append(arm_row(arm))

            jobs = missing_jobs(rows, arms, seeds, options.retry_failed)
            total = len(seeds) * len(arms) * len(study["tasks"])
            done = total - len(jobs)
            most = options.jobs or lanes.most_side_by_side(study["threads"], tasks.SCALES[study["scale"]].gib)
            print(f"{done} of {total} runs are done; {len(jobs)} to do, {most} side by side", flush=True)
            running = Running(rows, append, len(jobs))
            until = running.begun + 60 * options.budget_minutes
            work = [lanes.Lane(i, study["threads"], folder, copies) for i in range(most)]
            left = lanes.run_all(jobs, work, running.done, until)
    if left:
        print(f"{left} runs are left: the same line goes on")
    print(f"python scripts/study.py table {options.out}  says what they say")
    return not rows.failed


def table(options: argparse.Namespace) -> bool:
    """Print what the record says. Returns whether no control won."""
    rows = record.read(options.records)
    if options.tasks:
        rows = rows.of_tasks(options.tasks)
    text, fit = report.text_of(rows, options.base)
    print(text)
    if options.plot:
        report.draw(rows, options.plot, options.base)
        print(f"wrote {options.plot}")
    return fit


def replay(options: argparse.Namespace) -> bool:
    """Make a run of a record again. Returns whether it is the record's: see report.replayed."""
    rows = record.read(options.records)
    asked = {"task": options.task, "arm": options.arm, "seed": options.seed}
    keys = []
    for key, row in rows.runs.items():
        if all(value is None or row[field] == value for field, value in asked.items()):
            keys.append(key)
    if not keys:
        raise RecordError("the record has no such run")
    task, name, seed = random.choice(keys)
    print(f"making {task} {name} seed {seed} again", flush=True)
    old = rows.runs[task, name, seed]
    check_files(rows.study["scale"], [task])
    arm = arm_of(rows, name)
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        copy = arms_part.make_copy(arm, rows.commits[old["study"]], Path(folder))
        with lanes.Lane(0, rows.study["threads"], Path(folder), {arm.name: copy}) as lane:
            new = lane.run(job_of(rows.study, task, arm, seed))
    if new["kind"] == "failure":
        print(new["log"], file=sys.stderr)
        raise RecordError(f"the run failed with exit status {new['code']}")

    for name in (*record.SAME, *record.SAME_IN_TASK, "code"):
        if new[name] != old[name]:
            print(f"{name} is another one: {old[name]} in the record, {new[name]} here")
    text, good = report.replayed(rows, old, new)
    print(text)
    return good


def calibrate(options: argparse.Namespace) -> bool:
    """Tell which tasks a model can learn from: one step at learning rate 0."""
    scale = tasks.SCALES[options.scale or SCALE]
    names = options.tasks or scale.tasks
    check_files(options.scale or SCALE, names)
    arm = Arm("calibrate")
    commit = arms_part.git("rev-parse", "HEAD").decode().strip()
    print("task          sampled  greedy  informative  fit")
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        copy = arms_part.make_copy(arm, commit, Path(folder))
        with lanes.Lane(0, options.threads or THREADS, Path(folder), {arm.name: copy}) as lane:
            for name in names:
                own = ("--learning_rate", "0", "--num_unique_prompts_rollout", "24", "--total_episodes", "192")
                own += ("--local_eval_every", "1")
                flags = arms_part.merge_flags(base_flags(scale, name, 1), own)
                row = lane.run(lanes.Job(name, arm, 1, 1, tuple(flags), math.inf, 1, tasks.TASKS[name].measured))
                if row["kind"] == "failure":
                    raise RecordError(f"{name}: exit status {row['code']}: {row['log'][-500:]}")
                print(report.calibration(name, row["curve"]), flush=True)
    return True


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="do the runs that are missing")
    running.add_argument("--out", type=Path, required=True, help="the record, a .jsonl; it is added to")
    running.add_argument("--arms", nargs="+", default=["base"], help="the first one is the base")
    running.add_argument("--seeds", default="1-8", help="as 1-8 or 1,2,5")
    running.add_argument(
        "--controls", action="store_true", help=f"add the arms {', '.join(tasks.CONTROL_NAMES)}, {tasks.AGAIN}"
    )
    running.add_argument("--steps", type=positive, help="of each run; default: the scale's")
    running.add_argument("--jobs", type=positive, default=os.cpu_count(), help="runs side by side")
    running.add_argument("--budget_minutes", type=float, default=math.inf, help="no run starts later")
    running.add_argument("--retry_failed", action="store_true", help="make failed runs again; their rows stay")
    showing = commands.add_parser("table", help="differences, intervals and verdicts of a record")
    showing.add_argument("records", type=Path, nargs="+", help="several: of the same study, or with other tasks")
    showing.add_argument("--tasks", nargs="+", help="default: all of the record")
    showing.add_argument("--base", help="the arm that the others are compared with; default: the record's first")
    showing.add_argument("--plot", type=Path, help="draw mean curves to this file")
    again = commands.add_parser("replay", help="make a run again and compare its final weights")
    again.add_argument("records", type=Path, nargs="+")
    for name in ("--task", "--arm"):
        again.add_argument(name, help="default: a random one of the record's")
    again.add_argument("--seed", type=int)
    calibrating = commands.add_parser("calibrate", help="which tasks a model can learn")
    for command in (running, calibrating):
        command.add_argument("--scale", choices=tasks.SCALES, help="default: fly, or the record's")
        command.add_argument("--tasks", nargs="+", choices=tasks.TASKS)
        command.add_argument("--threads", type=positive, help="of a run; default: 1, or the record's")
    return parser


STOPPED = 128 + signal.SIGINT  # as a shell has it
COMMANDS = {"run": run, "table": table, "replay": replay, "calibrate": calibrate}


def main() -> None:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        good = COMMANDS[options.command](options)
    except (ArmError, RecordError) as error:
        raise SystemExit(f"study.py: {error}") from None
    except KeyboardInterrupt:
        print("study.py: stopped. The same line goes on: what `run` has done is in its file", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
