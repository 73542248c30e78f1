"""Is an idea better? Runs the arms of a study with the same seeds and says so with intervals, or that it cannot tell.

    python scripts/data/make_tasks.py                                            rows of the tasks
    python scripts/study.py calibrate --scale fly                                which tasks the model can learn
    python scripts/study.py run --out study.jsonl --seeds 1-8 --controls
        --arms base "maxrl@scripts/forks/maxrl.diff: --advantage_normalization_type maxrl" "mini4: --num_mini_batches 4"
    python scripts/study.py table study.jsonl [--plot study.png]                 differences from the first arm
    python scripts/study.py replay study.jsonl [--task last --arm base --seed 3]    default: a random run
    python scripts/study.py page [--check]                                       tables of the READMEs, from their rows

An arm is NAME, NAME: FLAGS, NAME@FORK.diff: FLAGS or NAME@BRANCH: FLAGS. The first arm is the base. To go on with an
arm of the record, write its name alone: its diff and flags come from the record, and later edits of its fork change
nothing. `run` goes through the seeds, within a seed through tasks and arms, so that it can be stopped at any time and
continued by the same line: what is done is in the file. Endpoints are fixed by the file's first row. `replay` makes a
run again and compares the SHA-256 of its final weights. Exit status: 0, or 1 if a run failed, a control was not shown
to lose or has no run yet, a replay differs or a page is not what its rows say, and 130 after Ctrl-C.
"""

import argparse
import math
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from scripts.studies import arms as arms_part
from scripts.studies import lanes, record, report, tasks
from scripts.studies import page as page_part
from scripts.studies.arms import Arm, ArmError
from scripts.studies.endpoints import ENDPOINTS, PRIMARY
from scripts.studies.record import Record, RecordError

SCALE = "fly"  # where the command line names none, and there is no record yet
THREADS = 1
DATA = arms_part.ROOT / "data"  # folders of tasks
CALIBRATED = 24  # groups that a calibration samples
MOST_SEEDS = 10_000
PICTURES = (".png", ".pdf", ".svg")
RESERVED = (*tasks.CONTROL_NAMES, tasks.AGAIN)  # names of arms that --controls adds


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
        if last - first >= MOST_SEEDS:
            raise RecordError(f"--seeds {text!r}: more than {MOST_SEEDS:,} seeds")
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise RecordError(f"--seeds {text!r} names a seed twice")
    return seeds


def base_flags(scale: tasks.Scale, name: str, steps: int, common: Sequence[str] = ()) -> tuple[str, ...]:
    """The flags of the base on the task of that name, but for seed and directory. `common`: those of --flags."""
    task = tasks.task_of(name, DATA)
    data = f"data/{task.data}"
    evaluation = ["--local_eval_every", "-1"]
    if task.is_evaluated:
        evaluation = ["--dataset_mixer_eval_list", f"{data}/eval.jsonl", "1.0"]
        evaluation += ["--local_eval_every", str(scale.evaluate_every), "--eval_on_step_0"]
    own = (*scale.flags, *task.flags, *scale.of_task.get(name, ()), *common)
    flags = ["--model_name_or_path", scale.model]
    flags += ["--dataset_mixer_list", f"{data}/train.jsonl", "1.0"]
    flags += evaluation
    flags += ["--total_episodes", str(rollouts_of(own) * steps)]
    return (*flags, *own)


def rollouts_of(flags: Sequence[str]) -> int:
    """The rollouts of a step with these flags."""
    values = dict(arms_part.flags_of(flags))
    (prompts,) = values["num_unique_prompts_rollout"]
    (samples,) = values["num_samples_per_prompt_rollout"]
    return int(prompts) * int(samples)


def common_flags(options: argparse.Namespace) -> list[str]:
    """The words of --flags. Raises ArmError for flags that study.py gives itself."""
    words = shlex.split(options.flags)
    arms_part.check_flags("--flags", words, arms_part.OF_THE_STUDY)
    return words


def task_name(text: str) -> str:
    """A task as --tasks names it: data/mine is mine."""
    return text.removeprefix("data/").rstrip("/")


def describe_study(options: argparse.Namespace) -> dict[str, Any]:
    """The study's row: what its runs have in common, with a hash."""
    scale_name = options.scale or SCALE
    scale = tasks.SCALES[scale_name]
    steps = options.steps or scale.steps
    commit = arms_part.git("rev-parse", "HEAD")
    common = common_flags(options)
    flags = {}
    targets = {}
    measured = {}
    for name in options.tasks or scale.tasks:
        task = tasks.task_of(name, DATA)
        if steps < 2 and not task.is_evaluated:
            raise RecordError(f"--steps {steps}: the area of {name} needs 2 steps, as it has no value before the first")
        flags[name] = list(base_flags(scale, name, steps, common))
        targets[name] = options.target or task.target
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
    arms = []
    for text in options.arms:
        arm = arm_of(rows, text)
        if arm.name in RESERVED and text not in (*rows.arms, *tasks.CONTROLS):
            raise ArmError(f"arm {arm.name}: --controls adds the arms {', '.join(RESERVED)}; give yours another name")
        arms.append(arm)
    if options.controls:
        for name, text in zip(tasks.CONTROL_NAMES, tasks.CONTROLS, strict=True):
            arms.append(arm_of(rows, name if name in rows.arms else text))
        base = arms[0] if not rows.arms else arm_of(rows, base_of(rows, arms))
        arms.append(Arm(tasks.AGAIN, base.diff, base.script, base.flags))
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ArmError(f"two arms have the same name: {', '.join(names)}")
    known = [arm_of(rows, name) for name in rows.arms]
    arms_part.check_twins([arm for arm in (*known, *arms) if arm.name != tasks.AGAIN])
    return arms


def base_of(rows: Record, arms: Sequence[Arm]) -> str:
    """The arm that the others are compared with: the record's first one, or of a new record the command line's."""
    return next(iter(rows.arms), arms[0].name)


def try_flags(study: dict[str, Any], arms: Sequence[Arm], lane: lanes.Lane) -> None:
    """Raises ArmError for an arm that its own code refuses on a task: each of its runs would fail."""
    for arm in arms:
        for task in study["tasks"]:
            problem = lane.check(job_of(study, task, arm, 1))
            if problem:
                raise ArmError(f"arm {arm.name} cannot run on {task}: {problem}")


def first_of_base(rows: Record, jobs: Sequence[lanes.Job], base: str) -> list[lanes.Job]:
    """The base's first run on each task on which it has none. These go before all others: a row is compared with the
    rows before it, so an arm that differs in more than it says is found wrong, and not the base."""
    done = {task for task, arm, _ in rows.runs if arm == base}
    first: dict[str, lanes.Job] = {}
    for job in jobs:
        if job.arm.name == base and job.task not in done:
            first.setdefault(job.task, job)
    return list(first.values())


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
    common = common_flags(options)
    for name, flags in study["tasks"].items():
        if as_given(flags) != as_given([*flags, *common]):
            raise RecordError(f"{options.out} is a study with other flags of all arms: --flags differs on {name}")
        if options.target not in (None, study["targets"][name]):
            raise RecordError(f"{options.out} has the target {study['targets'][name]} on {name}: --target differs")


def as_given(flags: Sequence[str]) -> dict[str, tuple[bool, list[str]]]:
    """Flags by name, with whether they are --no_x and their values."""
    given = {}
    for flag, values in arms_part.flags_of(flags):
        given[flag] = (f"--no_{flag}" in flags, values)
    return given


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


def check_files(study_tasks: Mapping[str, Sequence[str]]) -> None:
    """Raises RecordError if the rows of a task or a scale's model are not there: each run would fail, and a failure is
    final. A task is a name with its flags."""
    models = {scale.model for scale in tasks.SCALES.values()}
    for name, flags in study_tasks.items():
        given = dict(arms_part.flags_of(flags))
        (model,) = given["model_name_or_path"]
        path, _ = given["dataset_mixer_list"]
        maker = "the maker of your task"
        if name in tasks.TASKS:
            maker = tasks.TASKS[name].maker
        makers = {}
        if model in models:
            makers[f"{model}/config.json"] = "python scripts/data/get_smollm2.py"
        makers[path] = maker
        for needed, its_maker in makers.items():
            if not (arms_part.ROOT / needed).exists():
                raise RecordError(f"there is no {needed}: run {its_maker}")


def tell_of_code(commit: str) -> None:
    """Say which changes are in no arm."""
    head = arms_part.git("rev-parse", "HEAD").decode().strip()
    if head != commit:
        print(f"this record's code is commit {commit[:12]}; later ones are in no arm. A new version needs a new --out")
    changed = arms_part.git("diff", "HEAD", "--name-only", "--", "*.py").decode().split()
    if changed:
        print(f"WARNING: {', '.join(changed)}: what is not committed is in no arm")


def tell_of_diff(arm: Arm) -> None:
    """Say what a new arm changes: more than its idea may be in a diff."""
    if not arm.diff:
        return
    print(f"arm {arm.name} changes {arms_part.size_of(arm.diff)}")
    if "rewards.py" in arms_part.code_of(arm.diff):
        print(
            f"arm {arm.name} has another rewards.py, which judges its held-out rows too: a new reward is a verifier of "
            f"its own, --remap_verifier {arms_part.LEARNED}=NAME"
        )


OF_A_FAILURE = ("study", "task", "arm", "seed", "run_seed", "wall_seconds", "cpu_seconds")


class Running:
    """The rows of a study under way: each is written, kept and told as its run ends."""

    def __init__(self, rows: Record, append: Callable[[dict[str, Any]], None], total: int):
        self.rows = rows
        self.append = append
        self.total = total
        self.count = 0
        self.begun = time.monotonic()
        self.warned: set[str] = set()  # arms, and "task NAME", of which that has been told

    def done(self, row: dict[str, Any]) -> None:
        """Take the row of a run that has ended."""
        row = {"kind": row["kind"], "study": self.rows.study["hash"], **row}
        try:
            record.check_one_more(self.rows, row)  # before it is in the file, which it would make unreadable
        except RecordError as error:
            row = {name: value for name, value in row.items() if name in OF_A_FAILURE}
            row |= {"kind": "failure", "code": 0, "log": f"its row does not fit the record: {error}"}
        self.rows.take(row)
        self.append(row)
        self.count += 1
        print(self.line(row), flush=True)
        if row["kind"] == "run":
            self.warn(row)

    def warn(self, row: dict[str, Any]) -> None:
        """Tell what is wrong with an arm or a task, once for each."""
        if row["arm"] not in self.warned:
            self.warned.add(row["arm"])
            for warning in row.get("warnings", ()):
                print(f"arm {row['arm']}: WARNING: {warning}", flush=True)
        task = row["task"]
        if not any(row["curve"]["informative"]) and f"task {task}" not in self.warned:
            self.warned.add(f"task {task}")
            fits = "does the task fit the model? study.py calibrate tells"
            print(f"{task}: WARNING: no group of {row['arm']} had a gradient: {fits}", flush=True)

    def line(self, row: dict[str, Any]) -> str:
        """What is told of a row."""
        minutes = (time.monotonic() - self.begun) / 60
        left = minutes / self.count * (self.total - self.count)
        run = f"{row['task']} {row['arm']} seed {row['seed']}"
        words = f"{self.count} of {self.total}, {minutes:.0f} min, some {left:.0f} min left: {run}"
        if row["kind"] == "failure":
            reason = report.reason(row)
            return f"{words}: FAILED {reason}"
        held_out = row["curve"]["held_out"]
        first = held_out[0]
        last = held_out[-1]
        area = row["endpoints"]["area"]
        seconds = row["wall_seconds"]
        return f"{words}: held-out {first:.2f} -> {last:.2f}, area {area:.3f}, {seconds:.0f} s"


def jobs_of(study: dict[str, Any]) -> int:
    """How many runs go side by side where --jobs does not say it: one, if the model is not the scale's, whose memory is
    not known."""
    scale = tasks.SCALES[study["scale"]]
    for flags in study["tasks"].values():
        if dict(arms_part.flags_of(flags))["model_name_or_path"] != [scale.model]:
            return 1
    return lanes.most_side_by_side(study["threads"], scale.gib)


def run(options: argparse.Namespace) -> bool:
    """Do the runs that are missing. Returns whether none of those that were asked for has failed."""
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
        games = record.games_of(study)
        for arm in arms:
            arms_part.check_games(arm, games)
        check_files(study["tasks"])
        tell_of_code(study["commit"])
        new_arms = [arm for arm in arms if arm.name not in rows.arms]
        base = base_of(rows, arms)
        most = options.jobs or jobs_of(study)
        with tempfile.TemporaryDirectory(prefix="study-") as name, ExitStack() as stack:
            folder = Path(name)
            copies = {arm.name: arms_part.make_copy(arm, study["commit"], folder) for arm in arms}
            work = [stack.enter_context(lanes.Lane(i, study["threads"], folder, copies)) for i in range(most)]
            for arm in arms:
                rows.take(arm_row(arm))  # refuses one that was another before
            try_flags(study, new_arms, work[0])
            if not is_begun:
                append(study)
            for arm in new_arms:
                append(arm_row(arm))
                tell_of_diff(arm)

            jobs = missing_jobs(rows, arms, seeds, options.retry_failed)
            total = len(seeds) * len(arms) * len(study["tasks"])
            done = total - len(jobs)
            print(f"{done} of {total} runs are done; {len(jobs)} to do, {most} side by side", flush=True)
            first = first_of_base(rows, jobs, base)
            left = run_all(jobs, first, Running(rows, append, len(jobs)), work, options.budget_minutes)
    if left:
        print(f"{left} runs are left: the same line goes on")
    print(f"python scripts/study.py table {options.out}  says what they say")
    names = {arm.name for arm in arms}
    return not any(arm in names and seed in seeds for _, arm, seed in rows.failed)


def run_all(
    jobs: Sequence[lanes.Job],
    first: Sequence[lanes.Job],
    running: Running,
    work: Sequence[lanes.Lane],
    minutes: float,
) -> int:
    """Do the jobs, those of `first` before all others. Returns how many the minutes did not suffice for."""
    others = [job for job in jobs if job not in first]
    until = running.begun + 60 * minutes
    left = lanes.run_all(first, work, running.done, until)
    return left + lanes.run_all(others, work, running.done, until)


def table(options: argparse.Namespace) -> bool:
    """Print what the record says. Returns whether all controls that it has lose."""
    plot = options.plot
    if plot and (plot.suffix not in PICTURES or not plot.parent.is_dir()):
        raise RecordError(f"--plot {plot}: name a file ({', '.join(PICTURES)}) in a folder that is there")
    rows = record.read(options.records)
    if options.tasks:
        rows = rows.of_tasks(options.tasks)
    text, fit = report.text_of(rows, options.base)
    print(text)
    for line in not_of_scale(rows.study):
        print(line)
    if plot:
        report.draw(rows, plot, options.base)
        print(f"wrote {plot}")
    return fit


def not_of_scale(study: dict[str, Any]) -> list[str]:
    """What a study's tasks have in another way than this version's: who takes rows of others looks at it."""
    lines = []
    scale = tasks.SCALES.get(study["scale"])
    for name, flags in study["tasks"].items():
        if scale is None or name not in tasks.TASKS:
            lines.append(f"{name} at the scale {study['scale']} is not in scripts/studies/tasks.py")
            continue
        then = dict(arms_part.flags_of(flags))
        now = dict(arms_part.flags_of(base_flags(scale, name, study["steps"])))
        changed = [f"--{flag}" for flag in sorted(then.keys() | now.keys()) if then.get(flag) != now.get(flag)]
        if study["targets"][name] != tasks.TASKS[name].target:
            changed.append(f"the target, {study['targets'][name]}")
        if changed:
            lines.append(f"{name} has in another way than scripts/studies/tasks.py now: {', '.join(changed)}")
    return lines


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
    check_files({task: rows.study["tasks"][task]})
    arm = arm_of(rows, name)
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        copy = arms_part.make_copy(arm, rows.commits[old["study"]], Path(folder))
        with lanes.Lane(0, rows.study["threads"], Path(folder), {arm.name: copy}) as lane:
            new = lane.run(job_of(rows.study, task, arm, seed))
    if new["kind"] == "failure":
        print(new["log"], file=sys.stderr)
        raise RecordError(f"the run failed with exit status {new['code']}")

    for name in (*record.SAME, *record.SAME_IN_TASK, "code", "files"):
        there = old.get(name)  # rows of before have no files
        if there is not None and new[name] != there:
            print(f"{name} is another one: {there} in the record, {new[name]} here")
    text, good = report.replayed(rows, old, new)
    print(text)
    return good


def page(options: argparse.Namespace) -> bool:
    """Draw the tables of pages from their rows. Returns whether they are what their rows say."""
    changed = page_part.draw_pages(options.pages, options.check)
    words = "is not what its rows say" if options.check else "drawn"
    for line in changed:
        print(f"{line}: {words}")
    if not changed:
        print("all tables and pictures are what their rows say")
    return not (changed and options.check)


def calibrate(options: argparse.Namespace) -> bool:
    """Tell which tasks a model can learn from: one step at learning rate 0."""
    scale = tasks.SCALES[options.scale or SCALE]
    names = options.tasks or scale.tasks
    common = common_flags(options)
    flags_of_tasks = {name: base_flags(scale, name, 1, common) for name in names}
    check_files(flags_of_tasks)
    arm = Arm("calibrate")
    commit = arms_part.git("rev-parse", "HEAD").decode().strip()
    print(report.CALIBRATION)
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        copy = arms_part.make_copy(arm, commit, Path(folder))
        with lanes.Lane(0, options.threads or THREADS, Path(folder), {arm.name: copy}) as lane:
            for name, its_flags in flags_of_tasks.items():
                own = ("--learning_rate", "0", "--num_unique_prompts_rollout", str(CALIBRATED))
                own += ("--local_eval_every", "1")
                own += ("--total_episodes", str(rollouts_of((*its_flags, *own))))
                flags = arms_part.merge_flags(its_flags, own)
                measured = tasks.task_of(name, DATA).measured
                row = lane.run(lanes.Job(name, arm, 1, 1, tuple(flags), math.inf, 1, measured))
                if row["kind"] == "failure":
                    raise RecordError(f"{name}: exit status {row['code']}: {row['log'][-500:]}")
                print(report.calibration(name, row["curve"], CALIBRATED), flush=True)
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
    running.add_argument("--target", type=float, help="accuracy for steps, tokens and seconds; default: the task's")
    running.add_argument("--steps", type=positive, help="of each run; default: the scale's")
    running.add_argument("--jobs", type=positive, help="runs side by side; default: as many as the machine holds")
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
    paging = commands.add_parser("page", help="draw the tables of pages from the rows of their records")
    defaults = [arms_part.ROOT / name for name in page_part.PAGES]
    paging.add_argument("pages", type=Path, nargs="*", default=defaults, help="default: README.md and records.md")
    paging.add_argument("--check", action="store_true", help="draw nothing; exit status 1 if a page is another one")
    calibrating = commands.add_parser("calibrate", help="which tasks a model can learn")
    for command in (running, calibrating):
        command.add_argument("--scale", choices=tasks.SCALES, help="default: fly, or the record's")
        command.add_argument(
            "--tasks", nargs="+", type=task_name, help="of tasks.py, or a folder of data/ with train.jsonl, eval.jsonl"
        )
        command.add_argument(
            "--flags", default="", help='of all arms, as "--model_name_or_path org/model --response_length 256"'
        )
        command.add_argument("--threads", type=positive, help="of a run; default: 1, or the record's")
    return parser


STOPPED = 128 + signal.SIGINT  # as a shell has it
COMMANDS = {"run": run, "table": table, "replay": replay, "page": page, "calibrate": calibrate}


def main() -> None:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        good = COMMANDS[options.command](options)
    except (ArmError, RecordError, tasks.TaskError, lanes.LaneError, OSError) as error:
        raise SystemExit(f"study.py: {error}") from None
    except KeyboardInterrupt:
        print("study.py: stopped. The same line goes on: what `run` has done is in its file", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
