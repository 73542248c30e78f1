"""Is an idea better? Runs it and the code without it with the same seeds, and says how much they differ.

    python scripts/study.py run --out runs/study --seeds 1-8 [--jobs 2] --arms base "mini4: --num_mini_batches 4"
        "rloo@scripts/forks/rloo.diff: --advantage_normalization_type rloo" "mine@my-branch: --my_flag 1"
        -- --model_name_or_path MODEL --dataset_mixer_list train.jsonl 1.0 ...      flags of grpo.py, for all arms
    python scripts/study.py run --out runs/study --fly last --arms ...              the flags of a model of 1 MB
    python scripts/study.py table runs/study                                        the differences again

An arm is NAME: FLAGS, NAME@FILE.diff: FLAGS or NAME@BRANCH: FLAGS, and its flags may begin with grpo_fast.py. The first
arm is the base. Each arm runs in a copy of the commit that was checked out when --out was made, with its diff. The same
line goes on where a study was stopped; more seeds and arms may be added. Paths in flags begin in the arm's copy, or
where you are if the copy has no such file. Exit status: 1 if a run failed or a control is not shown to lose.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("grpo.py", "grpo_fast.py")
METRIC = "eval/objective/verifiable_correct_rate"  # held-out accuracy
# Its reward is for the most frequent answer and sees no label
CONTROLS = ("majority@scripts/forks/ttrl.diff: --majority_vote",)
LEVEL = 0.05  # below which an adjusted p is a verdict
FLY = """--model_name_or_path scripts/studies/fly --rollout_backend transformers --model_dtype float32
    --dataset_mixer_list data/tasks/{task}/train.jsonl 1.0 --dataset_mixer_eval_list data/tasks/{task}/eval.jsonl 1.0
    --remap_verifier learned=gsm8k --local_eval_every 4 --total_episodes 2560 --num_unique_prompts_rollout 8
    --num_samples_per_prompt_rollout 8 --response_length 14 --temperature 1.0 --learning_rate 1e-3
    --lr_scheduler_type constant --advantage_normalization_type centered --beta 0 --pack_length 2048 --save_freq -1"""
NEEDED = ("dataset_mixer_eval_list", "local_eval_every")
OF_THE_STUDY = ("seed", "exp_name", "output_dir", "overwrite", "resume", "dry_run", "eval_on_step_0")
# With these, what arms are compared by, so that no arm may change it
SAME_FOR_ALL = """dataset_mixer_list dataset_mixer_list_splits dataset_mixer_eval_list_splits eval_pass_at_k
    eval_temperature eval_response_length response_length model_name_or_path model_revision chat_template_name shuffle
    total_episodes""".split()
STEPS_OF_PLAN = re.compile(r"^run .* = ([\d,]+) steps,", re.MULTILINE)  # in what --dry_run prints


class StudyError(ValueError):
    """A study cannot be run or read; the message says why and what to do."""


@dataclass(frozen=True)
class Arm:
    """What differs from the base: a diff against the study's commit, flags, and the script that gets them."""

    name: str
    script: str
    flags: list[str]
    diff: str  # "" for the code as it is
    is_control: bool = False


@dataclass
class Study:
    """What its runs have in common, and its arms by name, the base first. It is kept as OUT/study.json."""

    commit: str
    flags: list[str]  # of all arms
    steps: int  # of each run
    arms: dict[str, Arm] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run to do, and its directory once it has made all of its steps."""

    arm: Arm
    seed: int
    finished: Path

    @property
    def unfinished(self) -> Path:
        return self.finished.with_suffix(".part")

    @property
    def log(self) -> Path:
        return self.finished.with_suffix(".log")


def git(*arguments: str) -> bytes:
    """What git prints about this checkout. Raises StudyError with git's words."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if done.returncode:
        raise StudyError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def parse_arm(text: str, commit: str, is_control: bool = False) -> Arm:
    """An arm as it is written on the command line: NAME[@DIFF or @BRANCH][: [SCRIPT] FLAGS]. Raises StudyError."""
    head, _, tail = text.partition(":")
    name, _, source = head.strip().partition("@")
    words = shlex.split(tail)
    script = SCRIPTS[0]
    if words and words[0] in SCRIPTS:
        script = words.pop(0)
    if not re.fullmatch(r"[\w.-]+", name) or (words and not words[0].startswith("--")):
        raise StudyError(f"arm {text!r}: write NAME: --FLAGS, NAME@FILE.diff: --FLAGS or NAME@BRANCH: --FLAGS")
    check_flags(f"arm {name}", words, (*OF_THE_STUDY, *NEEDED, *SAME_FOR_ALL))
    diff = read_diff(name, source, commit) if source else ""
    return Arm(name, script, words, diff, is_control)


def flag_names(words: Sequence[str]) -> set[str]:
    """The flags among these words: --x 1, --x=1, --no_x and --no-x are all x."""
    names = set()
    for word in words:
        if word.startswith("--"):
            names.add(word.removeprefix("--").partition("=")[0].replace("-", "_").removeprefix("no_"))
    return names


def check_flags(whose: str, words: Sequence[str], fixed: Sequence[str]) -> None:
    """Raises StudyError if one of the flags is fixed."""
    not_free = sorted(flag_names(words) & set(fixed))
    if not_free:
        raise StudyError(f"{whose}: --{not_free[0]} is the study's, and the same for all arms")


def read_diff(name: str, source: str, commit: str) -> str:
    """The text of a diff file, or of what a branch has changed since it left the study's commit. Raises StudyError for
    a file or branch that is not there or that changes nothing."""
    if source.endswith(".diff"):
        if not os.path.isfile(source):
            raise StudyError(f"arm {name}: no file {source}")
        text = Path(source).read_text(errors="surrogateescape")
    else:
        changes = git("diff", "--no-ext-diff", "--no-color", "--binary", f"{commit}...{source}")
        text = changes.decode(errors="surrogateescape")
    if not text:
        raise StudyError(
            f"arm {name}: {source} changes nothing of commit {commit[:12]}, which was checked out when the study "
            "began. Begin it on the code without the idea: git switch main"
        )
    return text


def make_copy(arm: Arm, commit: str, out: Path) -> Path:
    """The code of an arm in OUT/code/, made once for each commit and diff. Raises StudyError for a diff that does not
    apply."""
    text = f"{commit}\n{arm.diff}".encode(errors="surrogateescape")
    copy = out / "code" / hashlib.sha256(text).hexdigest()[:12]
    if copy.exists():
        return copy
    unfinished = copy.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a study that was killed
    unfinished.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", unfinished], input=git("archive", commit), check=True)
    if arm.diff:
        # in a folder of a checkout git would take the diff's paths as that checkout's
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(unfinished.parent.resolve())}
        how: dict[str, Any] = {"cwd": unfinished, "env": environment, "capture_output": True}
        diff = arm.diff.encode(errors="surrogateescape")
        done = subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=diff, **how)
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()
            raise StudyError(f"arm {arm.name}: its diff does not apply to the commit of the study: {words}")
    unfinished.rename(copy)
    return copy


def choose_arms(study: Study, arms: Sequence[str], controls: Sequence[str]) -> list[Arm]:
    """The arms of a command line. Raises StudyError for two arms with one name."""
    chosen = []
    for text in (*arms, *controls):
        arm = parse_arm(text, study.commit, is_control=text not in arms)
        if study.arms.get(arm.name, arm) != arm:
            raise StudyError(f"arm {arm.name} is another one in this study: a new version needs a new name")
        chosen.append(arm)
    if len({arm.name for arm in chosen}) < len(chosen):
        raise StudyError("two arms have the same name")
    return chosen


def parse_seeds(text: str) -> list[int]:
    """Seeds as 1-8, 3 or 1,2,5. Raises ArgumentTypeError for other texts."""
    seeds: list[int] = []
    for part in text.split(","):
        words = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not words:
            raise argparse.ArgumentTypeError(f"{text!r}: write seeds as 1-8, 3 or 1,2,5")
        first = int(words[1])
        last = int(words[2] or first)
        seeds += range(first, last + 1)
    return sorted(set(seeds))


@contextmanager
def locked(out: Path) -> Generator[int]:
    """Hold the lock of a study's directory, and give its number to pass it on to runs: it stays locked until the last
    process that has it ends. Raises StudyError if another process has it."""
    with open(out / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyError(f"{out} is in use: a study, or a run that one has left behind, is under way") from None
        yield file.fileno()


def read_study(out: Path) -> Study:
    """The study of a directory. Raises StudyError if there is none."""
    path = out / "study.json"
    if not path.is_file():
        raise StudyError(f"{out} has no study: there is no {path}")
    facts = json.loads(path.read_text())
    arms = {name: Arm(**arm) for name, arm in facts.pop("arms").items()}
    return Study(**facts, arms=arms)


def write_study(study: Study, out: Path) -> None:
    """Keep a study; a reader sees the old file or the new one."""
    unfinished = out / "study.json.part"
    unfinished.write_text(json.dumps(asdict(study), indent=1))
    unfinished.rename(out / "study.json")


def begin_study(flags: Sequence[str]) -> Study:
    """A new study of the commit that is checked out. Raises StudyError for flags that a study cannot have."""
    check_flags("after --", flags, OF_THE_STUDY)
    missing = [name for name in NEEDED if name not in flag_names(flags)]
    if missing:
        raise StudyError(
            f"--{missing[0]} is missing: give it after --, with the other flags of all arms, or give --fly"
        )
    changed = git("status", "--porcelain", "--untracked-files=no").decode()
    if changed:
        print(f"WARNING: what is not committed is in no arm:\n{changed}", end="")
    commit = git("rev-parse", "HEAD").decode().strip()
    return Study(commit, list(flags), steps=0)


def located(word: str, copy: Path) -> str:
    """A word of the flags, as an absolute path if it is a file that is here and not in the copy."""
    is_here = os.path.exists(word) and not os.path.exists(copy / word)
    return os.path.abspath(word) if is_here else word


def command_of(study: Study, arm: Arm, out: Path) -> list[str]:
    """The command of an arm's runs, without seed and directory; the last of two equal flags counts."""
    copy = make_copy(arm, study.commit, out)
    words = [located(word, copy) for word in (*study.flags, *arm.flags)]
    return [sys.executable, arm.script, *words, "--eval_on_step_0"]


def add_arms(study: Study, arms: Sequence[Arm], out: Path) -> None:
    """Take the arms that are new to the study, once their own code has checked their flags and planned their steps.
    Raises StudyError, with the words of the script, for an arm that cannot run or that would make another number of
    steps than the base."""
    for arm in arms:
        if arm.name in study.arms:
            continue
        copy = make_copy(arm, study.commit, out)
        line = [*command_of(study, arm, out), "--dry_run"]
        done = subprocess.run(line, cwd=copy, capture_output=True, text=True)
        planned = STEPS_OF_PLAN.search(done.stdout)
        if done.returncode or not planned:
            raise StudyError(f"arm {arm.name} cannot run: {done.stderr.strip() or done.stdout.strip()}")
        steps = int(planned[1].replace(",", ""))
        if not study.arms:
            study.steps = steps
        if steps != study.steps:
            raise StudyError(
                f"arm {arm.name} makes {steps} steps and the base {study.steps}: keep the rollouts of a step"
            )
        study.arms[arm.name] = arm
    write_study(study, out)


def start_run(study: Study, run: Run, out: Path, threads: int, lock: int) -> subprocess.Popen:
    """Start a run, in a process group of its own: the terminal's Ctrl-C is for the study alone."""
    shutil.rmtree(run.unfinished, ignore_errors=True)  # of a run that failed or was killed
    run.finished.parent.mkdir(parents=True, exist_ok=True)
    line = command_of(study, run.arm, out)
    line += ["--output_dir", str(run.finished.parent), "--exp_name", run.unfinished.name, "--seed", str(run.seed)]
    copy = make_copy(run.arm, study.commit, out)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    options: dict[str, Any] = {"cwd": copy, "env": environment, "process_group": 0, "pass_fds": [lock]}
    with open(run.log, "w") as log:
        return subprocess.Popen(line, stdout=log, stderr=log, **options)


def end_run(study: Study, run: Run, code: int) -> str | None:
    """Give the directory of a run that has made all of its steps its final name, without the model, which nobody
    reads. Returns what is wrong with a run that has not."""
    metrics = run.unfinished / "metrics.jsonl"
    if code or not metrics.exists():
        last_line = run.log.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"exit status {code}: {last_line} ({run.log})"
    done = read_metrics(metrics)[-1]["training_step"]
    if done != study.steps:  # a signal lets a run end as if it were done
        return f"it made {done} of {study.steps} steps ({run.log})"
    shutil.rmtree(run.unfinished / "model", ignore_errors=True)
    run.unfinished.rename(run.finished)
    return None


def run_all(study: Study, runs: Sequence[Run], out: Path, jobs: int, lock: int) -> int:
    """Do the runs in their order, as many at a time as there are jobs. Returns how many failed. If an exception ends
    it, as Ctrl-C does, the runs that are under way are killed."""
    threads = max(1, int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1) // jobs)
    waiting = list(runs)
    running: dict[subprocess.Popen, Run] = {}
    begun = time.monotonic()
    failed = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running[start_run(study, run, out, threads, lock)] = run
            time.sleep(0.1)
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                problem = end_run(study, run, process.returncode)
                failed += problem is not None
                number = len(runs) - len(waiting) - len(running)
                minutes = (time.monotonic() - begun) / 60
                said = (
                    f"FAILED, {problem}" if problem else f"held-out area {read_result(run.finished, METRIC).area:.3f}"
                )
                print(f"{number} of {len(runs)}, {minutes:.1f} min: {run.arm.name} seed {run.seed}: {said}", flush=True)
    finally:
        for process in [process for process in running if process.poll() is None]:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return failed


def run(options: argparse.Namespace, flags: list[str]) -> bool:
    """Do the runs that are missing, and print the table. Returns whether no run failed and all controls lose."""
    if options.fly:
        flags = [*FLY.format(task=options.fly).split(), *flags]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out) as lock:
        if (out / "study.json").exists():
            study = read_study(out)
            if flags and flags != study.flags:
                raise StudyError(f"{options.out} is a study with other flags of all arms: begin one with another --out")
        else:
            study = begin_study(flags)
        arms = choose_arms(study, options.arms, options.controls)
        add_arms(study, arms, out)

        runs = []
        for seed in options.seeds:
            runs += [Run(arm, seed, out / "runs" / arm.name / str(seed)) for arm in arms]
        missing = [run for run in runs if not run.finished.exists()]
        print(f"{len(runs) - len(missing)} of {len(runs)} runs are done; {len(missing)} to do", flush=True)
        failed = run_all(study, missing, out, options.jobs, lock)
    return print_table([out], METRIC) and not failed


class Result(NamedTuple):
    """What a run came to: the metric before training, the area under its curve, and its last value."""

    start: float
    area: float
    last: float


Results = dict[int, Result]  # of an arm, by seed


class Difference(NamedTuple):
    """The mean of paired differences with its 95 % interval by Student's t over seeds, and the p of the t test. The
    last three are NaN where there is no interval: of one seed, or if no seed differs."""

    mean: float
    low: float
    high: float
    p: float


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_result(run_dir: Path, metric: str) -> Result:
    """The result of a run. Its area is the mean height of the curve, by trapezoids. Raises StudyError if fewer than two
    steps have the metric."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if metric in row]
    if len(rows) < 2:
        raise StudyError(f"{run_dir} has {metric} at {len(rows)} steps, and its area needs two")
    steps = [row["training_step"] for row in rows]
    values = [row[metric] for row in rows]
    area = float(np.trapezoid(values, steps)) / (steps[-1] - steps[0])
    return Result(values[0], area, values[-1])


def results_of(outs: Sequence[Path], arm: str, metric: str) -> Results:
    """The results of an arm's finished runs: means over some studies, for the seeds that all of them have."""
    finished = []
    for out in outs:
        folders = (out / "runs" / arm).glob("*")
        finished.append({int(folder.name): folder for folder in folders if folder.name.isdigit()})
    results = {}
    for seed in sorted(set.intersection(*map(set, finished))):
        of_studies = [read_result(folders[seed], metric) for folders in finished]
        results[seed] = Result(*map(mean_of, zip(*of_studies, strict=True)))
    return results


def mean_of(values: Iterable[float]) -> float:
    """Their mean, NaN of no values."""
    known = list(values)
    return float(np.mean(known)) if known else math.nan


def compare(arm: Results, base: Results, what: str) -> Difference:
    """The arm minus the base in their areas or last values, paired by the seeds that both have."""
    seeds = sorted(arm.keys() & base.keys())
    ours = [getattr(arm[seed], what) for seed in seeds]
    theirs = [getattr(base[seed], what) for seed in seeds]
    mean = mean_of(np.subtract(ours, theirs))
    if len(seeds) < 2 or ours == theirs:
        return Difference(mean, math.nan, math.nan, math.nan)
    test: Any = stats.ttest_rel(ours, theirs)
    interval = test.confidence_interval(0.95)
    return Difference(mean, float(interval.low), float(interval.high), float(test.pvalue))


def shown(difference: Difference) -> str:
    """A difference with its interval."""
    if math.isnan(difference.low):
        return f"{difference.mean:+.3f}, no interval"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def verdict_of(arm: Arm, area: Difference, p: float) -> str:
    """better, worse or cannot tell; of a control whether it loses, which it does if its whole interval is below 0."""
    if arm.is_control:
        return "loses, as it must" if area.high < 0 else "NOT shown to lose"
    if p >= LEVEL:
        return f"cannot tell (p {p:.2g})"
    word = "better" if area.mean > 0 else "worse"
    return f"{word} (p {p:.2g})"


def warnings_of(results: Mapping[str, Results]) -> list[str]:
    """What makes the comparison of an arm with the first one doubtful."""
    base = next(iter(results))
    all_seeds = sorted(set().union(*results.values()))
    lines = []
    for name, arm in results.items():
        lacking = [str(seed) for seed in all_seeds if seed not in arm]
        if lacking:
            lines.append(f"{name} has no run of seeds {', '.join(lacking)}. Seeds that only it fails on flatter it")
        both = arm.keys() & results[base].keys()
        if any(arm[seed].start != results[base][seed].start for seed in both):
            lines.append(f"{name} begins at another value than {base}: does it judge held-out rows in another way?")
        if name != base and both and all(arm[seed].area == results[base][seed].area for seed in both):
            lines.append(f"{name} equals {base} on each seed: does its change act here?")
    return lines


def print_table(outs: Sequence[Path], metric: str) -> bool:
    """Print what the studies say. Returns whether all controls lose. Raises StudyError if the studies' arms differ."""
    arms_of_studies = [read_study(out).arms for out in outs]
    if any(other != arms_of_studies[0] for other in arms_of_studies):
        raise StudyError("the studies have other arms, or arms with other code or flags: they have no common table")
    arms = list(arms_of_studies[0].values())
    results = {arm.name: results_of(outs, arm.name, metric) for arm in arms}
    base = arms[0].name
    areas = {arm.name: compare(results[arm.name], results[base], "area") for arm in arms[1:]}
    ideas = [arm.name for arm in arms[1:] if not arm.is_control]
    # Benjamini and Hochberg: of those below 0.05 one in twenty is expected to be chance
    adjusted = stats.false_discovery_control(np.nan_to_num([areas[name].p for name in ideas], nan=1.0))
    p_values = dict(zip(ideas, adjusted, strict=True))

    print(f"| arm | seeds | area | area - {base}, 95 % interval | last | last - {base}, 95 % interval | verdict |")
    print("|---|---|---|---|---|---|---|")
    verdicts = []
    for arm in arms:
        own = results[arm.name]
        area = mean_of([result.area for result in own.values()])
        last = mean_of([result.last for result in own.values()])
        if arm.name == base:
            print(f"| {base} | {len(own)} | {area:.3f} | | {last:.3f} | | |")
            continue
        verdicts.append(verdict_of(arm, areas[arm.name], p_values.get(arm.name, math.nan)))
        name = f"control {arm.name}" if arm.is_control else arm.name
        words = [shown(areas[arm.name]), f"{last:.3f}", shown(compare(own, results[base], "last")), verdicts[-1]]
        print(f"| {name} | {len(own)} | {area:.3f} | {' | '.join(words)} |")

    for line in warnings_of(results):
        print(f"WARNING: {line}")
    if not any(arm.is_control for arm in arms):
        print("WARNING: no control: nothing shows that the base learns from its labels")
    if "NOT shown to lose" in verdicts:
        print("A control is not shown to lose: the task is unfit or the seeds are too few. Believe no verdict here")
        return False
    return True


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """The command line, without what follows --."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="do the runs that are missing, print the table")
    running.add_argument("--out", type=Path, required=True, help="the study's directory, new or to go on with")
    running.add_argument("--arms", nargs="+", default=["base"], help="the first one is the base")
    running.add_argument("--controls", nargs="*", default=CONTROLS, help="arms that must lose; default: %(default)s")
    running.add_argument("--seeds", type=parse_seeds, default="1-8", help="as 1-8 or 1,2,5")
    running.add_argument("--jobs", type=int, choices=range(1, 65), default=1, metavar="N", help="at a time")
    running.add_argument("--fly", choices=("last", "largest_digit"), help="the flags of the fly on this task")
    showing = commands.add_parser("table", help="paired differences with intervals")
    showing.add_argument("studies", type=Path, nargs="+", help="several: a seed's value is its mean over them")
    showing.add_argument("--metric", default=METRIC, help="of metrics.jsonl; default: %(default)s")
    return parser.parse_args(words)


def main() -> None:
    words = sys.argv[1:]
    flags: list[str] = []
    if "--" in words:
        place = words.index("--")
        flags = words[place + 1 :]
        words = words[:place]
    options = parse_options(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        good = run(options, flags) if options.command == "run" else print_table(options.studies, options.metric)
    except StudyError as error:
        raise SystemExit(f"study.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("study.py: stopped. The same line goes on") from None
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
