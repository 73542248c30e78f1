"""Real, silent bugs of other systems, put into a copy of this tree one at a time: who notices?

    python -m tests.zoo                   all of them: writes tests/zoo/noticed.tsv and the table of tests/zoo/README.md
    python -m tests.zoo NAME [NAME ...]   some of them: prints what noticed each, and changes their rows
    python -m tests.zoo --study RECORD [NAME ...] [--seeds 1-8 and other flags of scripts/study.py run]
                                          what they cost: runs of the fruit fly with each, and with the clean code;
                                          --scale smollm2 --tasks largest: of SmolLM2-135M
    python -m tests.zoo --costs RECORD [RECORD ...]
                                          keeps what costs need of such a record, and writes their column

An animal is tests/zoo/NAME.diff. Its head says what goes wrong, of which kind it is, in which systems' threads it was
seen, which of their commits mended it (Fix, where that was read), which test of ours fails on it, with which flags the
debug task runs into it (Run; none where one process in ten steps cannot meet it), and with which flags its cost is
measured (Study). `FLAGS against OTHERS` is for a bug that ends its run: the clean code with FLAGS does what the bug
does, and is compared with the clean code with OTHERS. The noticer is the first of

    start    a check before the first step: the run ends, or says something else than the clean run
    run      an assertion at run time ends the run, at the step that is named
    metric   a check of scripts/reports/checks.py that warns at the end of the run and does not for the clean run of the
             same flags and seed; the step is the first from which it warns on
    test     the test of the head fails

The debug task is scripts/train/debug/letters.sh, ten steps of it: a random model of models/tiny's kind, float32.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from scripts.reports import checks
from scripts.studies import record
from tests.zoo import costs

REPO = Path(__file__).resolve().parents[2]
ZOO = Path(__file__).parent
NOTICED = ZOO / "noticed.tsv"
COSTS = {"fly": ZOO / "costs.jsonl", "smollm2": ZOO / "costs_smollm2.jsonl"}  # by scale of the study
OURS = ("grpo", "grpo_fast", "utils", "rewards", "scripts", "tests")  # what a copy has of its own
TASK = "largest_digit"  # of scripts/studies/tasks.py
LETTERS = """--exp_name run --overwrite --model_dtype float32 --dataset_mixer_list reasoning_gym:chain_sum 100
    --reward_file scripts/train/debug/letters.py --remap_verifier reasoning_gym=letters --rollout_backend transformers
    --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --response_length 16 --temperature 1.0
    --learning_rate 1e-3 --lr_scheduler_type constant --beta 0 --no_load_ref_policy --total_episodes 640"""
PROBE = "WARNING: this copy of grpo.py: "
RESUMES = "--checkpoint_state_freq"
HEAD = r"(.+)\nKind: (.+)\nSeen in: (.+)\n(?:Fix: .+\n)?Test: (\S+)\nRun: (.+)\nStudy: (none: )?(.+)\n"
# In a process that has imported the libraries: forget our own modules, and take those of a copy
IN_A_COPY = f"""
import os, runpy, sys
copy, program, *words = sys.argv[1:]
for name in list(sys.modules):
    if name.partition(".")[0] in {OURS!r}:
        del sys.modules[name]
sys.path[:] = [copy, *(path for path in sys.path if os.path.realpath(path or ".") != {str(REPO)!r})]
os.chdir(copy)
if program == "pytest":
    import pytest
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *words]))
sys.argv = [program, *words]
runpy.run_path(program, run_name="__main__")
"""


@dataclass(frozen=True)
class Animal:
    """A diff and what its head says."""

    name: str
    what: str
    kind: str
    seen_in: list[str]  # system#number of each thread
    test: str  # pytest's name of it
    run: list[str]  # program and flags; empty: no run shows it
    study: list[str]  # program and flags of the fruit fly's runs, which tell what it costs; empty: no study can
    why: str  # no study can
    against: list[str]  # program and flags of the clean runs; empty: those of `study`

    @property
    def path(self) -> Path:
        return ZOO / f"{self.name}.diff"


class Noticed(NamedTuple):
    """Who notices an animal, and at which step; 0 is before the first."""

    by: str
    step: str


def read(path: Path) -> Animal:
    """The animal of a diff. Raises ValueError for a head that lacks something."""
    head = path.read_text().partition("\n--- a/")[0]
    match = re.fullmatch(HEAD, head)
    if match is None:
        raise ValueError(f"{path.name}: its head is not: a sentence, Kind, Seen in, (Fix,) Test, Run, Study")
    what, kind, threads, test, run, no_study, study = match.groups()
    line = [] if run == "none" else run.split()
    if no_study:
        return Animal(path.stem, what, kind, threads.split(", "), test, line, [], study, [])
    of_flags, _, clean = study.partition(" against ")
    return Animal(path.stem, what, kind, threads.split(", "), test, line, of_flags.split(), "", clean.split())


def animals() -> dict[str, Animal]:
    """Name -> animal."""
    return {path.stem: read(path) for path in sorted(ZOO.glob("*.diff"))}


def copy_tree(directory: Path) -> Path:
    """A copy of the four files, the scripts and the tests."""
    directory.mkdir()
    for file in (*REPO.glob("*.py"), *REPO.glob("*.toml"), *REPO.glob("*.md")):
        shutil.copy2(file, directory)
    for folder in ("scripts", "tests"):
        shutil.copytree(REPO / folder, directory / folder)
    return directory


def put(animal: Animal, tree: Path) -> None:
    """Put an animal into a copy. Raises subprocess.CalledProcessError if its diff does not apply."""
    subprocess.run(["git", "apply", str(animal.path)], cwd=tree, check=True, capture_output=True, text=True)


def run_in(tree: Path, program: str, *words: str) -> subprocess.CompletedProcess:
    """Run a program of a copy, or pytest, in a process forked from one that has imported the libraries. Ranks of
    grpo_fast.py are Pythons of their own, and so is it."""
    from tests import programs

    if program == "grpo_fast.py":
        env = os.environ | {"PYTHONPATH": str(tree)}
        return subprocess.run([sys.executable, program, *words], cwd=tree, env=env, capture_output=True, text=True)
    return programs.run(["-c", IN_A_COPY, str(tree), program, *words])


@dataclass
class Run:
    """What a run of the debug task left."""

    status: int
    output: str
    rows: list[dict]  # of metrics.jsonl, a row for each training step
    args: dict

    def said(self, beginning: str) -> list[str]:
        """The lines of the output that begin so."""
        return [line for line in self.output.splitlines() if line.startswith(beginning)]

    def warnings(self, steps: int) -> set[str]:
        """The checks that warn after so many steps. Ten steps of noise say nothing about learning."""
        found = checks.check_run(self.rows[:steps], self.args)
        return {check["name"] for check in found if not check["fine"]} - {"score", "held-out score"}


def debug_run(tree: Path, line: list[str], model: Path) -> Run:
    """The debug task in a copy, with the animal's flags. With checkpoints its last five steps are made again, from the
    checkpoint before them."""
    out = tree / "out"
    program, *flags = line
    words = [*LETTERS.split(), "--model_name_or_path", str(model), "--output_dir", str(out), *flags]
    done = run_in(tree, program, *words)
    if RESUMES in flags and not done.returncode:
        shutil.rmtree(out / "run" / "checkpoints" / "step_10")
        words[words.index("--overwrite")] = "--resume"
        done = run_in(tree, program, *words)
    rows = []
    if (out / "run" / "metrics.jsonl").exists():
        rows = [json.loads(row) for row in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["training_step"] > 0]
    args = {}
    if (out / "run" / "args.json").exists():
        args = json.loads((out / "run" / "args.json").read_text())
    return Run(done.returncode, done.stdout + done.stderr, rows, args)


def seen_by_the_run(animal: Animal, run: Run, clean: Run) -> Noticed | None:
    """What a run with the animal says that the clean run of the same flags and seed does not."""
    if clean.status:
        raise RuntimeError(f"{animal.name}: the clean run fails:\n{clean.output[-3000:]}")
    if run.status:
        errors = re.findall(r"\b(\w*Error: .*)", run.output)  # of a rank of grpo_fast.py with its name before it
        lines = run.output.strip().splitlines()
        text = [*errors[:1], *lines[-1:], "?"][0]
        words = " ".join(text.partition(" (")[0].split()[:12])
        step = len(run.rows) + 1 if run.rows or "ready after" in run.output else 0
        return Noticed(f"{'run' if step else 'start'}: {words}", str(step))

    for beginning in ("WARNING", "packing"):
        new = [line for line in run.said(beginning) if line not in clean.said(beginning)]
        if new:
            words = new[0].removeprefix(PROBE).removeprefix("WARNING: ").partition(";")[0]
            return Noticed(f"start: {words}", "0")

    steps = range(1, len(run.rows) + 1)
    last = run.warnings(len(run.rows)) - clean.warnings(len(clean.rows))
    found = {}
    for name in last:
        silent = [step for step in steps if name not in run.warnings(step)]
        found[name] = max(silent, default=0) + 1
    if not found:
        return None
    name = min(found, key=lambda name: (found[name], name))
    return Noticed(f"metric: {name}", str(found[name]))


def fails_test(animal: Animal, tree: Path) -> bool:
    """Whether the animal's test, which is there, fails in a copy that has the animal."""
    done = run_in(tree, "pytest", animal.test)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{animal.name}: {animal.test} did not run:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.returncode == 1


def write_bos(path: Path) -> None:
    """Have a tokenizer begin what it tokenizes with its BOS token, unless it is told not to, as many do."""
    from tokenizers import Tokenizer, processors

    from scripts.data.make_tiny_model import BOS

    tokenizer = Tokenizer.from_file(str(path))
    special = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=special)
    tokenizer.save(str(path))


class Keeper:
    """Finds out who notices animals. Clean runs are kept: one for all animals of the same flags."""

    def __init__(self, directory: Path):
        from scripts.data.make_tiny_model import make_tiny_model

        self.directory = directory
        self.model = make_tiny_model(directory / "model", arch="llama", tied=True, seed=0)
        write_bos(self.model / "tokenizer.json")
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
        self.clean = functools.cache(self._clean)

    def _clean(self, *line: str) -> Run:
        with tempfile.TemporaryDirectory(dir=self.directory) as parent:
            return debug_run(copy_tree(Path(parent, "tree")), list(line), self.model)

    def ask(self, animal: Animal) -> tuple[Noticed, Noticed, bool]:
        """Who notices the animal, who would without the probe of the copy, and whether its test fails."""
        with tempfile.TemporaryDirectory(dir=self.directory) as parent:
            tree = copy_tree(Path(parent, "tree"))
            put(animal, tree)
            fails = fails_test(animal, tree)
            noticed = without = Noticed("test", "") if fails else Noticed("nobody", "")
            if animal.run:
                run = debug_run(tree, animal.run, self.model)
                clean = self.clean(*animal.run)
                noticed = seen_by_the_run(animal, run, clean) or noticed
                silent = replace(run, output=re.sub(f"^{PROBE}.*\n", "", run.output, flags=re.MULTILINE))
                without = seen_by_the_run(animal, silent, clean) or without
        return noticed, without, fails


def known() -> dict[str, list[str]]:
    """The rows of noticed.tsv by name: noticed by, step, noticed by without the probe, test."""
    rows = [line.split("\t") for line in NOTICED.read_text().splitlines()[1:]] if NOTICED.exists() else []
    return {name: rest for name, *rest in rows}


def write(rows: dict[str, list[str]]) -> None:
    """Write noticed.tsv, and the table of README.md from it."""
    lines = ["animal\tnoticed by\tstep\twithout the probe\ttest"]
    lines += ["\t".join([name, *rows[name]]) for name in sorted(rows)]
    NOTICED.write_text("\n".join(lines) + "\n")
    readme = ZOO / "README.md"
    text = readme.read_text()
    head = text.partition("| bug |")[0]
    readme.write_text(head + table(rows))


def table(rows: dict[str, list[str]]) -> str:
    """The table of README.md, by kind."""
    columns = ["bug", "what goes wrong", "threads", "noticed by", "without the probe", "test", "cost"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    everything = animals()
    known_costs = costs.read(COSTS["fly"], everything)
    of_the_large_model = costs.read(COSTS["smollm2"], everything)
    for animal in sorted(everything.values(), key=lambda animal: (animal.kind, animal.name)):
        by, step, without, test = rows.get(animal.name, ["not asked yet", "", "", animal.test])
        when = f", step {step}" if step not in ("", "0") else ""
        named = test.removeprefix("tests/")
        cost = f"not measured: {animal.why}" if animal.why else "not measured yet"
        if animal.name in known_costs:
            cost = costs.worded(known_costs[animal.name])
        if animal.name in of_the_large_model:
            cost += f"; 135M {costs.worded(of_the_large_model[animal.name])}"
        cells = [f"`{animal.name}` ({animal.kind})", animal.what, ", ".join(animal.seen_in), by + when, without]
        cells += [f"`{named}`" if named else "", cost]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def study(path: str, words: list[str]) -> int:
    """Runs of these animals, or all, and of the clean code, with the study's flags that follow the names."""
    first_flag = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    names, flags = words[:first_flag], words[first_flag:]
    everything = animals()
    scale = "smollm2" if "smollm2" in flags else "fly"
    arms = costs.arms({name: everything[name] for name in names or everything}, scale)
    line = ["scripts/study.py", "run", "--out", path, "--tasks", TASK, *flags, "--arms", *arms]
    return subprocess.run([sys.executable, *line], cwd=REPO).returncode


def main(words: list[str]) -> int:
    """Ask who notices these animals, or all; returns how many nobody does."""
    if words[:1] == ["--study"]:
        return study(words[1], words[2:])
    if words[:1] == ["--costs"]:
        records = [record.read([Path(word)]) for word in words[1:]]
        costs.keep(records, COSTS[records[0].study["scale"]])
        write(known())
        return 0
    names = words
    everything = animals()
    unknown = [name for name in names if name not in everything]
    if unknown:
        raise SystemExit(f"no such animal: {', '.join(unknown)}. There are: {', '.join(everything)}")
    rows = known()
    rows = {name: rows[name] for name in everything if name in rows}
    with tempfile.TemporaryDirectory(prefix="zoo-") as directory:
        os.environ.setdefault("TESTS_SHARE", directory)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TESTS_OF_UNITS", "1")  # no engine of vLLM is started: it need not be imported
        keeper = Keeper(Path(directory))
        for name in names or everything:
            noticed, without, fails = keeper.ask(everything[name])
            test = everything[name].test
            rows[name] = [noticed.by, noticed.step, without.by, test if fails else ""]
            when = noticed.step and f" at step {noticed.step}"
            print(f"{name:30} {noticed.by}{when}; {test} {'fails' if fails else 'PASSES'}", flush=True)
            write(rows)
    return sum(rows[name][0] == "nobody" for name in names or everything)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
