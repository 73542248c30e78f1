"""Fault drill: break small runs on purpose and see whether each ends as the documentation promises.

    python scripts/proof/chaos.py                                all drills, with a tiny model on this machine's CPU
    python scripts/proof/chaos.py kill_engine sigterm --script grpo_fast.py --out DIR --seed 2

kill_learner, kill_engine, kill_launcher   kill -9 while the engine decodes, between two backwards, while a checkpoint
                  is half written, and when the first prompt of an epoch is drawn: one after the other in one run, at
                  steps that --seed draws. After each kill nothing is left running, and --resume works
sigterm           to the launcher, then to the learner under torchrun: a checkpoint and exit status 0; --resume works
drop_request      an engine swallows a response: the run ends within --stall_timeout_s and names it; --resume works
delay_reward      a slow verifier changes nothing; one that misses its deadline costs that sample alone
corrupt_weights   noise in a weight broadcast: the logprob gap ends the run before the next checkpoint; --resume works
full_disk         a checkpoint that does not fit is a warning; the run completes
wedge_wandb       wandb's service process is stopped for good: the run completes, metrics.jsonl is whole

"--resume works" means: final weights and all metrics but times are bit-equal to those of an undisturbed run. A drill
also counts: every step is logged once, every rollout was trained or filtered once, no process and no *.tmp is left. The
exit status is 1 if a drill ends otherwise than promised. Nothing in the product knows this script: faults inside its
processes come from a sitecustomize.py on their PYTHONPATH. Needs Linux (/proc).
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
SYNC = ("grpo.py", None)  # script, async_steps
FAST0 = ("grpo_fast.py", 0)
FAST1 = ("grpo_fast.py", 1)
SETTINGS = (SYNC, FAST0, FAST1)
STEPS = 8
PROMPTS = 8
SAMPLES = 8
ROWS = 20  # an epoch ends within step 3, after step 5, within step 8
FLAGS = f"""--total_episodes {STEPS * PROMPTS * SAMPLES} --num_unique_prompts_rollout {PROMPTS} --seed 3
    --num_samples_per_prompt_rollout {SAMPLES} --model_dtype float32 --response_length 6 --max_prompt_token_length 48
    --pack_length 128 --temperature 1.0 --learning_rate 3e-3 --beta 0 --per_device_train_batch_size 8
    --max_logprob_gap 0.01 --save_freq -1 --checkpoint_state_freq 2 --local_eval_every 2 --save_traces --deterministic
    --vllm_enforce_eager --vllm_enable_prefix_caching --vllm_gpu_memory_utilization 0.3"""
TIMED = re.compile(  # metrics that depend on how long something took
    r"^time/|^memory/|^learner_|^val/actor|_share$|per_second|seconds|utilization|groups_started|groups_in_flight|weight_sync"
)
MOMENTS = ("generation", "update", "checkpoint", "epoch")
TIMEOUT_S = 240.0  # of anything that is waited for
GONE_S = 10.0  # until the processes of a run that ended are gone
STALL_S = 30  # --stall_timeout_s of drop_request; an engine needs half of it to start
WANDB_S = 30  # track.WAIT_S of scripts/parts

# Acts once, at the moment named by CHAOS=what:when, and says so by making the file CHAOS_MARKER. A pause ends with
# CHAOS_MARKER.go, so that a signal sent meanwhile meets the process exactly there.
SITECUSTOMIZE = """
import importlib.abc
import importlib.util
import os
import sys
import time

WHAT, _, WHEN = os.environ["CHAOS"].partition(":")
WHEN, MARKER = int(WHEN), os.environ["CHAOS_MARKER"]
step = 0


def once(text=""):
    try:
        with open(MARKER, "x") as file:
            file.write(text)
        return True
    except FileExistsError:
        return False


def pause():
    if once():
        end = time.monotonic() + 5.0
        while time.monotonic() < end and not os.path.exists(MARKER + ".go"):
            time.sleep(0.002)


def before(owner, name, act):
    original = getattr(owner, name)

    def wrapped(*args, **kwargs):
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def set_step(self, args, run_dir, num_steps, start_step, world):
    global step
    step = start_step + 1


def next_step(self, metrics):
    global step
    step = metrics["training_step"] + 1


def drop(engine):
    original = engine.step

    def wrapped(self):
        finished = original(self)
        if finished and self.version >= WHEN and not finished[0][0].startswith("now/") and once(finished[0][0]):
            return finished[1:]
        return finished

    engine.step = wrapped


def corrupt(engine):
    import torch

    original, noise = engine.load_weights, torch.Generator().manual_seed(0)

    def noisy(named_tensors):
        for i, (name, tensor) in enumerate(named_tensors):
            yield name, tensor + 0.1 * torch.randn(tensor.shape, generator=noise) if i == 1 else tensor

    def wrapped(self, named_tensors, version):
        hit = version == WHEN and once()
        return original(self, noisy(named_tensors) if hit else named_tensors, version)

    engine.load_weights = wrapped


def patch(utils):
    from scripts.parts.transformers_engine import TransformersEngine

    before(utils.Logger, "__init__", set_step)
    before(utils.Logger, "log", next_step)
    for engine in (utils.VLLMEngine, TransformersEngine):
        if WHAT == "generation":
            before(engine, "step", lambda self: self.version >= WHEN - 1 and pause())
        if WHAT == "drop_request":
            drop(engine)
        if WHAT == "corrupt_weights":
            corrupt(engine)
    if WHAT == "update":
        before(utils.Gap, "add", lambda *args: step >= WHEN and pause())
    if WHAT == "epoch":
        before(
            utils,
            "prompt_at",
            lambda prompts, position, *args: position % len(prompts) == 0 and position >= WHEN and pause(),
        )


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), patch(module))
        return spec


if "utils" in sys.modules:  # a test's process, forked from one that has imported it
    patch(sys.modules["utils"])
else:
    sys.meta_path.insert(0, Finder())
"""

# Scores as the built-in verifier does, and is late for some responses: DELAY seconds for each in 40, or for one only
# where DELAY_MARKER names a file.
REWARD_FILE = """
import os
import time
import zlib

import rewards


def slow(response, ground_truth):
    marker, late = os.environ.get("DELAY_MARKER"), zlib.crc32(response.encode()) % 40 == 0
    if marker and late:
        try:
            open(marker, "x").close()
        except FileExistsError:
            late = False
    time.sleep(float(os.environ["DELAY"]) if late else 0.0)
    return rewards.verify_gsm8k(rewards.RewardRecord(response, ground_truth, "gsm8k")).score
"""


class Broken(Exception):
    """A promise was not kept; the message says which."""


def promise(kept: bool, text: str) -> None:
    if not kept:
        raise Broken(text)


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Lab:
    """Where all drills take place, and the undisturbed runs that they are compared with."""

    directory: Path
    backend: str
    seed: int
    kills: int
    unbroken: dict[tuple, "Run"] = field(default_factory=dict)


def title_of(setting: tuple) -> str:
    script, async_steps = setting
    return script if async_steps is None else f"{script}, {async_steps}"


class Run:
    """A run of the product, started as often as needed: again with --resume, or with --overwrite where there is no
    checkpoint yet."""

    def __init__(self, lab: Lab, name: str, setting: tuple, flags: str = "", **env: str):
        self.lab = lab
        self.setting = setting
        self.flags = flags
        self.env = env
        script, async_steps = setting
        self.directory = lab.directory / f"{name}_{script[:-3]}_{async_steps or 0}"
        self.directory.mkdir(parents=True)
        self.path = self.directory / "it"
        self.checkpoints = self.path / "checkpoints"
        self.starts = 0
        self.anew = 0  # starts after the first one that found no checkpoint
        self.twin = lab.unbroken.get(setting)  # whose bits it should end with

    def start(self, chaos: str = "", torchrun: bool = False) -> None:
        """Start it, or go on with it. chaos: what:when of SITECUSTOMIZE."""
        self.starts += 1
        self.log = self.directory / f"log_{self.starts}"
        self.marker = self.directory / f"marker_{self.starts}"
        self.name = f"{self.directory}:{self.starts}"  # in the environment of all its processes
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CHAOS_RUN": self.name} | self.env
        if chaos:
            hooks = [str(self.lab.directory / "hooks"), os.environ.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, hooks))
            env["CHAOS"] = chaos
            env["CHAOS_MARKER"] = str(self.marker)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"] if torchrun else []
        self.begin([*launcher, *self.command()], env)

    def command(self) -> list[str]:
        """The script and its flags for the next start."""
        script, async_steps = self.setting
        directory = self.lab.directory
        command = [script, "--exp_name", "it", "--output_dir", str(self.directory), *FLAGS.split(), *self.flags.split()]
        command += ["--model_name_or_path", str(directory / "model"), "--rollout_backend", self.lab.backend]
        command += ["--dataset_mixer_list", str(directory / "train.jsonl"), "1.0"]
        if async_steps is not None:
            command += ["--async_steps", str(async_steps)]
        if self.starts > 1:  # before its first checkpoint a run can only start anew
            saved = any(self.checkpoints.glob("step_?"))
            command.append("--resume" if saved else "--overwrite")
            self.anew += not saved
        return command

    def begin(self, line: list[str], env: dict[str, str]) -> None:
        """`python *line`."""
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *line], cwd=REPO, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something to happen while it runs."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            promise(self.process.poll() is None, f"ended before {what}: {self.last_words()}")
            promise(time.monotonic() < deadline, f"no {what} within {TIMEOUT_S:.0f} s")
            time.sleep(0.002)

    def end(self) -> int:
        """Wait for its end; the exit status. Nothing of it may be left running."""
        try:
            status = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"has not ended after {TIMEOUT_S:.0f} s: {self.last_words()}") from None
        deadline = time.monotonic() + GONE_S
        left = self.processes()
        while left:
            promise(time.monotonic() < deadline, f"left running: {left}")
            time.sleep(0.02)
            left = self.processes()
        return status

    def complete(self, chaos: str = "") -> None:
        """Start it, or go on with it, to its end."""
        self.start(chaos)
        status = self.end()
        promise(status == 0, f"start {self.starts} ended with status {status}: {self.last_words()}")

    def processes(self) -> dict[int, str]:
        """Its processes in whatever session, with their command lines: those with its name in their environment."""
        return processes_with(f"CHAOS_RUN={self.name}\0")

    def rank(self, number: int) -> int:
        """The pid of a rank: 0 is the learner, 1 the engine."""
        for pid, line in self.processes().items():
            started_by_launcher = f"\0RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            if started_by_launcher and self.setting[0] in line and "worker.py" not in line:
                return pid
        raise Broken(f"rank {number} does not run")

    def victim(self, who: str) -> int:
        """The pid of the launcher, learner or engine."""
        command = Path(f"/proc/{self.process.pid}/cmdline").read_text()
        one_process = self.setting == SYNC and "torch.distributed" not in command
        if who == "launcher" or one_process:
            return self.process.pid
        return self.rank(("learner", "engine").index(who))

    def proceed(self) -> None:
        """End the pause of SITECUSTOMIZE."""
        Path(f"{self.marker}.go").touch()

    def last_words(self) -> str:
        return " | ".join(self.log.read_text().strip().splitlines()[-3:])[-600:]

    def rows(self) -> int:
        """Steps logged so far."""
        path = self.path / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def weights(self) -> str:
        """sha256 of the final weights."""
        return hashlib.sha256((self.path / "model" / "model.safetensors").read_bytes()).hexdigest()

    def difference(self, other: "Run") -> str:
        """What differs from another run: weights or the first metric; empty if nothing does."""
        if self.weights() != other.weights():
            return f"weights {self.weights()[:12]}, not {other.weights()[:12]}"
        for row, other_row in zip(self.metrics(), other.metrics(), strict=False):  # account counts the steps
            for name in sorted(row.keys() | other_row.keys()):
                value = row.get(name)
                expected = other_row.get(name)
                if value != expected and not TIMED.search(name):
                    return f"step {row['training_step']}: {name} {value}, not {expected}"
        return ""

    def account(self) -> str:
        """Count what a complete run has left, in words. Raises Broken."""
        rows = self.metrics()
        steps = [row["training_step"] for row in rows]
        promise(steps == list(range(1, STEPS + 1)), f"steps logged: {steps}")
        rollouts = [json.loads(line) for line in (self.path / "rollouts.jsonl").read_text().splitlines()]
        names = sorted((r["position"], r["sample"]) for r in rollouts)
        expected = [(position, sample) for position in range(STEPS * PROMPTS) for sample in range(SAMPLES)]
        promise(
            names == expected, f"{len(names)} rollouts logged, {len(set(names))} different ones, not {len(expected)}"
        )
        words = f"{STEPS} steps, {len(names)} rollouts"
        if self.setting != SYNC:
            words += f", {account_of_groups(rows)}"
        leftovers = [str(path.relative_to(self.path)) for path in self.path.rglob("*.tmp")]
        promise(not leftovers, f"left behind: {leftovers}")
        return words


def account_of_groups(rows: list[dict]) -> str:
    """Count the groups in the metrics of grpo_fast.py, in words. Raises Broken."""
    for row in rows:
        started = row["batch/groups_started"]
        trained = row["batch/groups_trained"]
        filtered = row["batch/groups_filtered"]
        in_flight = row["batch/groups_in_flight"]
        promise(started == trained + filtered + in_flight, f"groups lost at step {row['training_step']}")
    promise(started == STEPS * PROMPTS and in_flight == 0, f"{started:.0f} groups, {in_flight:.0f} in flight")
    return f"{started:.0f} groups = {trained:.0f} + {filtered:.0f} + {in_flight:.0f}"


def processes_with(mark: str) -> dict[int, str]:
    """Command lines of all processes that have some text in their environment, by pid."""
    command_lines = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "environ").read_bytes():
                line = (directory / "cmdline").read_bytes()
                command_lines[int(directory.name)] = line.replace(b"\0", b" ").decode()
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return command_lines


# ---------------------------------------------------------------------------------------------------------------------
# Drills: each breaks a run and has it completed
# ---------------------------------------------------------------------------------------------------------------------


class Drilled(NamedTuple):
    run: Run
    done: str  # to it
    ended: str  # how its first attempts ended


def pause_at(run: Run, step: int) -> None:
    """Start a run that pauses in the update of a step, and wait for the pause."""
    run.start(f"update:{step}")
    run.until(run.marker.exists, f"update {step}")


def kill(who: str, lab: Lab, setting: tuple) -> Drilled:
    rng = random.Random(f"{lab.seed} {who} {setting[0]}")  # of both async_steps: they share the moments out
    moments = rng.sample(MOMENTS, len(MOMENTS))
    n = lab.kills
    numbers = {SYNC: range(n), FAST0: range((n + 1) // 2), FAST1: range(n // 2, n)}[setting]
    chosen = [moments[i % len(MOMENTS)] for i in numbers]
    chosen.sort(key=lambda moment: moment != "epoch")  # first: later it may have been drawn before the kill
    steps = sorted(rng.choices(range(2, STEPS - 1), k=len(chosen)))
    run = Run(lab, f"kill_{who}", setting)
    done = [kill_once(run, who, moment, step) for moment, step in zip(chosen, steps, strict=True)]
    run.complete()
    anew = f", started anew x {run.anew}: no checkpoint yet" if run.anew else ""
    return Drilled(run, f"kill -9 in {', '.join(done)}", f"resumed x {len(done) - run.anew}{anew}")


def kill_once(run: Run, who: str, moment: str, step: int) -> str:
    """Start a run and kill it at a moment of a step; what was done, in words."""
    when = PROMPTS * (step - 1) if moment == "epoch" else step
    run.start(f"{moment}:{when}")
    if moment == "checkpoint":
        run.until(partial(is_half_written, run, step), f"{moment} {step}")
    else:
        run.until(run.marker.exists, f"{moment} {step}")
    os.kill(run.victim(who), signal.SIGKILL)
    rows = run.rows()
    run.proceed()
    promise(run.end() != 0, "status 0 after kill -9")
    if run.setting != SYNC and who != "launcher":
        words = f"{who} 0 (pid"
        log = run.log.read_text()
        promise(words in log and "SIGKILL" in log, f"no word of {words}")
    return f"{moment} (after step {rows})"


def is_half_written(run: Run, step: int) -> bool:
    """Whether a checkpoint of that step, or of a later one, is being written."""
    return any(int(path.stem[5:]) >= step for path in run.checkpoints.glob("step_*.tmp"))


def sigterm(lab: Lab, setting: tuple) -> Drilled:
    rng = random.Random(f"{lab.seed} sigterm {setting}")
    run = Run(lab, "sigterm", setting)
    done = []
    for who, step in (("launcher", rng.randint(2, 3)), ("learner", rng.randint(5, 6))):
        run.start(f"update:{step}", torchrun=setting == SYNC and who == "learner")
        run.until(run.marker.exists, f"update {step}")
        os.kill(run.victim(who), signal.SIGTERM)
        run.proceed()
        status = run.end()
        rows = run.rows()
        promise(status == 0, f"status {status} after SIGTERM to the {who}: {run.last_words()}")
        promise(f"SIGTERM: stopped after step {rows}; --resume" in run.log.read_text(), "no word about SIGTERM")
        latest = (run.checkpoints / "latest").read_text()
        promise(latest == f"step_{rows}", f"{rows} steps, but the newest checkpoint is {latest}")
        done.append(f"{who} (step {rows})")
    run.complete()
    return Drilled(run, f"SIGTERM to the {', '.join(done)}", "exit 0 with a checkpoint, resumed x 2")


def drop_request(lab: Lab, setting: tuple) -> Drilled:
    version = random.Random(f"{lab.seed} drop {setting}").randint(3, 5)
    run = Run(lab, "drop_request", setting, f"--stall_timeout_s {STALL_S}")
    run.start(f"drop_request:{version}")
    status = run.end()
    name = run.marker.read_text()
    stalled = re.search(r"stalled: nothing moved for (\d+) s\. Outstanding: (.*)", run.log.read_text())
    promise(status != 0 and stalled is not None, f"status {status}, no stall: {run.last_words()}")
    seconds, outstanding = stalled.groups()
    promise(f"{name} (engine 0)" in outstanding, f"{name} is not among {outstanding}")
    run.complete()
    done = f"the engine swallows response {name} (version {version})"
    return Drilled(run, done, f"status {status} after {seconds} s: 'Outstanding: {outstanding[:40]}', resumed")


def delay_reward(seconds: float, lab: Lab, setting: tuple) -> Drilled:
    late = seconds > 10.0  # the deadline of a worker's job
    flags = f"--reward_file {lab.directory / 'reward_file.py'} --remap_verifier gsm8k=slow"
    run = Run(lab, f"delay_reward_{seconds:g}", setting, flags, DELAY=str(seconds))
    if late:
        run.env["DELAY_MARKER"] = str(run.directory / "late")
    else:  # a reward file's metrics have names of their own
        run.twin = Run(lab, "delay_reward_0", setting, flags, DELAY="0")
        run.twin.complete()
    run.complete()
    missing = sum(row["batch/missing_rewards"] for row in run.metrics())
    timeouts = sum(row.get("reward/slow_timeout") or 0 for row in run.metrics())
    promise(missing == (1 if late else 0), f"{missing} missing rewards")
    promise((timeouts > 0) == late, f"reward/slow_timeout {timeouts}")
    done = f"{'one score takes' if late else 'a score in 40 takes'} {seconds:g} s; the deadline is 10 s"
    return Drilled(run, done, f"completed, {missing:.0f} missing")


def corrupt_weights(lab: Lab, setting: tuple) -> Drilled:
    # with async_steps fresh responses are looked at every --local_eval_every steps
    versions = [2, 4] if setting == FAST1 else [2, 3, 4, 5]
    version = random.Random(f"{lab.seed} corrupt {setting}").choice(versions)
    run = Run(lab, "corrupt_weights", setting)
    run.start(f"corrupt_weights:{version}")
    status = run.end()
    gap = re.search(r"GapError: (.*): mean \|learner - engine\| logprob (\S+)", run.log.read_text())
    broken = status != 0 and run.marker.exists()
    promise(broken and gap is not None, f"status {status}, no gap: {run.last_words()}")
    run.complete()
    ended = f"status {status}: {gap[1]}: gap {gap[2]}; resumed"
    return Drilled(run, f"noise in the broadcast of version {version}", ended)


def full_disk(lab: Lab, setting: tuple) -> Drilled:
    """A limit on the size of files stands for the full disk: the model fits, a checkpoint's state does not."""
    size = 2 * (lab.directory / "model" / "model.safetensors").stat().st_size
    run = Run(lab, "full_disk", setting)
    pause_at(run, 4)
    rows = run.rows()
    steps = range(2, STEPS + 1, 2)
    before = [f"step_{step}" for step in steps if step <= rows]
    after = [f"step_{step}" for step in steps if step > rows]
    latest = run.checkpoints / "latest"
    run.until(lambda: latest.exists() and latest.read_text() == before[-1], before[-1])
    resource.prlimit(run.victim("learner"), resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    run.proceed()
    status = run.end()
    warned = re.findall(r"WARNING: checkpoint (\S+) was not written", run.log.read_text())
    promise(status == 0, f"status {status}: {run.last_words()}")
    promise(warned == after, f"warnings about {warned}, not {after}")
    left = sorted(path.name for path in run.checkpoints.iterdir())
    promise(left == ["latest", *before], f"checkpoints left: {left}")
    done = f"no file above {size / 1e6:.1f} MB from step {rows + 1} on"
    return Drilled(run, done, f"completed, {len(warned)} warnings, {before[-1]} stays")


def wedge_wandb(lab: Lab, setting: tuple) -> Drilled:
    run = Run(lab, "wedge_wandb", setting, "--with_tracking", WANDB_MODE="offline", WANDB_SILENT="true")
    pause_at(run, 3)
    services = [pid for pid, line in run.processes().items() if "wandb-core" in line.split(" ")[0]]
    promise(len(services) == 1, f"wandb's processes: {run.processes()}")
    os.kill(services[0], signal.SIGSTOP)
    start = time.monotonic()
    try:
        run.proceed()
        promise(run.process.wait(2 * WANDB_S + 30) == 0, f"status {run.process.returncode}: {run.last_words()}")
        seconds = time.monotonic() - start
    except subprocess.TimeoutExpired:
        raise Broken(f"runs still, {2 * WANDB_S + 30} s after wandb stopped") from None
    finally:
        os.kill(services[0], signal.SIGCONT)  # it sees that its client is gone, and ends
    run.end()
    return Drilled(run, "SIGSTOP to wandb-core in step 3", f"completed {seconds:.0f} s later")


DRILLS: dict[str, list[tuple[Callable, tuple]]] = {  # and the settings of each
    "kill_learner": [(partial(kill, "learner"), s) for s in SETTINGS],
    "kill_engine": [(partial(kill, "engine"), s) for s in (FAST0, FAST1)],
    "kill_launcher": [(partial(kill, "launcher"), FAST1)],
    "sigterm": [(sigterm, s) for s in (SYNC, FAST1)],
    "drop_request": [(drop_request, FAST1)],
    "delay_reward": [(partial(delay_reward, 0.2), SYNC), (partial(delay_reward, 60.0), SYNC)],
    "corrupt_weights": [(corrupt_weights, s) for s in (FAST0, FAST1)],
    "full_disk": [(full_disk, s) for s in (SYNC, FAST1)],
    "wedge_wandb": [(wedge_wandb, s) for s in (SYNC, FAST1)],
}


def carry_out(lab: Lab, name: str, drill: Callable, setting: tuple) -> dict:
    """A row of the table."""
    start = time.monotonic()
    row = {"drill": name, "script": title_of(setting)}
    row |= {"done": "", "ended": "", "weights": "", "equal": "", "accounting": "", "kept": False}
    try:
        run, row["done"], row["ended"] = drill(lab, setting)
        row["weights"] = run.weights()[:12]
        difference = run.difference(run.twin)
        row["equal"] = difference or "yes"
        missing = sum(metrics["batch/missing_rewards"] for metrics in run.metrics())
        promise(not difference or missing > 0, f"not the unbroken run's: {difference}")
        row["accounting"] = run.account()
        row["kept"] = True
    except Broken as error:
        row["ended"] = f"BROKEN: {error}"
    except (OSError, ValueError, KeyError) as error:  # files that are not there or not whole are a result too
        row["ended"] = f"BROKEN: {type(error).__name__} {error}"
    row["seconds"] = round(time.monotonic() - start)
    columns = "drill script done ended seconds weights equal accounting".split()
    print(" | ".join(str(row[column]) for column in columns), flush=True)
    return row


def prepare(directory: Path) -> None:
    """Write model, data, reward file and hooks."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "model").exists():  # tests bring theirs
        line = [sys.executable, "scripts/data/make_tiny_model.py", "--out", str(directory / "model")]
        subprocess.run(line, cwd=REPO, check=True, capture_output=True)
    with (directory / "train.jsonl").open("w") as file:
        for i in range(ROWS):  # a random model says 7 now and then
            turns = [{"role": "user", "content": f"Say {i}, then 7."}]
            file.write(json.dumps({"messages": turns, "ground_truth": "7", "dataset": "gsm8k"}) + "\n")
    (directory / "reward_file.py").write_text(REWARD_FILE)
    (directory / "hooks").mkdir()
    (directory / "hooks" / "sitecustomize.py").write_text(SITECUSTOMIZE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drills", nargs="*", metavar="DRILL", help=f"of {', '.join(DRILLS)}; none: all")
    parser.add_argument("--script", choices=("grpo.py", "grpo_fast.py"), help="only this script's drills")
    parser.add_argument("--out", type=Path, help="new directory for runs, logs and table.json; else a temporary one")
    parser.add_argument("--seed", type=int, default=1, help="draws the moments")
    parser.add_argument("--kills", type=int, default=4, help="kill -9 for each victim and script")
    parser.add_argument("--jobs", type=int, default=2, help="drills at the same time")
    parser.add_argument("--rollout_backend", choices=("vllm", "transformers"), default="vllm")
    args = parser.parse_args()
    unknown = set(args.drills) - DRILLS.keys()
    if unknown:
        parser.error(f"no drill {', '.join(sorted(unknown))}; known are {', '.join(DRILLS)}")
    chosen = []
    for name in args.drills or DRILLS:
        for drill, setting in DRILLS[name]:
            if args.script in (None, setting[0]):
                chosen.append((name, drill, setting))
    if not chosen:
        parser.error(f"{', '.join(args.drills)}: not a drill of {args.script}")
    print(
        "drill | script, async_steps | what was done | how it ended | s | weights | equal to the unbroken run | account"
    )
    start = time.monotonic()
    out = args.out or Path(tempfile.mkdtemp(prefix="chaos_"))
    lab = Lab(out.resolve(), args.rollout_backend, args.seed, args.kills)
    prepare(lab.directory)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pool = ThreadPoolExecutor(args.jobs)
    try:
        settings = [setting for _, _, setting in chosen]
        lab.unbroken = {s: Run(lab, "unbroken", s) for s in SETTINGS if s in settings}
        list(pool.map(Run.complete, lab.unbroken.values()))
        rows = list(pool.map(partial(carry_out, lab), *zip(*chosen, strict=True)))
    finally:
        end_all(lab)  # a drill that still runs breaks, and starts nothing more
        pool.shutdown(cancel_futures=True)
    for setting, run in lab.unbroken.items():
        print(f"unbroken {title_of(setting)}: weights {run.weights()[:12]}, {run.account()}")
    kept = sum(row["kept"] for row in rows)
    print(f"{kept} of {len(rows)} drills ended as promised; {time.monotonic() - start:.0f} s; logs in {lab.directory}")
    (lab.directory / "table.json").write_text(json.dumps(rows, indent=1))
    return 0 if kept == len(rows) else 1


def end_all(lab: Lab) -> None:
    """kill -9 for whatever of a broken drill still runs."""
    for pid in processes_with(f"CHAOS_RUN={lab.directory}/"):
        with contextlib.suppress(OSError):  # gone meanwhile
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
