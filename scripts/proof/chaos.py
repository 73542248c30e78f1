"""Fault drill: break small runs on purpose and see whether each ends as the documentation promises.

    python scripts/proof/chaos.py                                all drills, with a tiny model on this machine's CPU
    python scripts/proof/chaos.py kill_engine sigterm --script grpo_fast.py --out DIR --seed 2

kill_learner, kill_engine, kill_launcher   kill -9 while the engine decodes, between two backwards, while a checkpoint
                  is half written and when the first prompt of an epoch is drawn, one after the other in one run, at
                  steps that --seed draws; after each nothing is left running, and --resume goes on
sigterm           to the launcher, then to the learner under torchrun: a checkpoint and exit status 0; --resume goes on
drop_request      an engine swallows a response: the run ends within --stall_timeout_s and names it; --resume goes on
delay_reward      a verifier that is slow changes nothing; one that misses its deadline costs that sample alone
corrupt_weights   noise in a weight broadcast: the logprob gap ends the run before the next checkpoint; --resume goes on
full_disk         a checkpoint that does not fit is a warning; the run completes
wedge_wandb       wandb's service process is stopped for good: the run completes, metrics.jsonl is whole

"goes on" means: final weights and all metrics but times are bit-equal to those of a run nobody touched. A drill also
counts: every step is logged once, every rollout was trained or filtered once, no process and no *.tmp is left. The exit
status is 1 if a drill ends otherwise than promised. Nothing in the product knows of this script: faults inside its
processes come from a sitecustomize.py on their PYTHONPATH. Needs Linux (/proc).
"""

import argparse
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

REPO = Path(__file__).resolve().parents[2]
SETTINGS = (("grpo.py", None), ("grpo_fast.py", 0), ("grpo_fast.py", 1))  # script, async_steps
SYNC, FAST0, FAST1 = SETTINGS
STEPS, PROMPTS, SAMPLES, ROWS = 8, 8, 8, 20  # 20 rows: an epoch ends within step 3, after step 5, within step 8
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
        before(utils, "gradient_sync", lambda *args, **kwargs: step >= WHEN and pause())
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
    """Where all drills take place, and what runs that nobody touched gave."""

    directory: Path
    backend: str
    seed: int
    kills: int
    unbroken: dict[tuple, "Run"] = field(default_factory=dict)


class Run:
    """A run of the product, started as often as it takes: again with --resume, or --overwrite where there is no
    checkpoint yet."""

    def __init__(self, lab: Lab, name: str, setting: tuple, flags: str = "", **env: str):
        self.lab, self.setting, self.flags, self.env = lab, setting, flags, env
        self.directory = lab.directory / f"{name}_{setting[0][:-3]}_{setting[1] or 0}"
        self.directory.mkdir(parents=True)
        self.path, self.checkpoints = self.directory / "it", self.directory / "it" / "checkpoints"
        self.starts = self.anew = 0
        self.twin = lab.unbroken.get(setting)  # whose bits it should end with

    def start(self, chaos: str = "", torchrun: bool = False) -> None:
        """Start it, or go on with it. chaos: what:when of SITECUSTOMIZE."""
        self.starts += 1
        self.log, self.marker = self.directory / f"log_{self.starts}", self.directory / f"marker_{self.starts}"
        script, async_steps = self.setting
        line = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"] if torchrun else []
        line += [script, "--exp_name", "it", "--output_dir", str(self.directory), *FLAGS.split(), *self.flags.split()]
        line += ["--model_name_or_path", str(self.lab.directory / "model"), "--rollout_backend", self.lab.backend]
        line += ["--dataset_mixer_list", str(self.lab.directory / "train.jsonl"), "1.0"]
        line += [] if async_steps is None else ["--async_steps", str(async_steps)]
        if self.starts > 1:  # before its first checkpoint a run can only start anew
            saved = any(self.checkpoints.glob("step_?"))
            line.append("--resume" if saved else "--overwrite")
            self.anew += not saved
        self.name = f"{self.directory}:{self.starts}"  # in the environment of all its processes
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CHAOS_RUN": self.name} | self.env
        if chaos:
            hooks = [str(self.lab.directory / "hooks"), os.environ.get("PYTHONPATH", "")]
            env |= {
                "CHAOS": chaos,
                "CHAOS_MARKER": str(self.marker),
                "PYTHONPATH": os.pathsep.join(filter(None, hooks)),
            }
        self.begin(line, env)

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
        while left := self.processes():
            promise(time.monotonic() < deadline, f"left running: {left}")
            time.sleep(0.02)
        return status

    def complete(self, chaos: str = "") -> None:
        """Start it, or go on with it, to its end."""
        self.start(chaos)
        status = self.end()
        promise(status == 0, f"start {self.starts} ended with status {status}: {self.last_words()}")

    def processes(self) -> dict[int, str]:
        """Its processes in whatever session, with their command lines: those with its name in their environment."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if f"CHAOS_RUN={self.name}\0".encode() in (directory / "environ").read_bytes():
                    found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # gone meanwhile, or somebody else's
                continue
        return found

    def rank(self, number: int) -> int:
        """The pid of a rank: 0 is the learner, 1 the engine."""
        for pid, line in self.processes().items():
            started_by_launcher = f"\0RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            if started_by_launcher and self.setting[0] in line and "worker.py" not in line:
                return pid
        raise Broken(f"rank {number} does not run")

    def victim(self, who: str) -> int:
        """The pid of the launcher, learner or engine."""
        alone = (
            self.setting == SYNC and "torch.distributed" not in Path(f"/proc/{self.process.pid}/cmdline").read_text()
        )
        return self.process.pid if who == "launcher" or alone else self.rank(("learner", "engine").index(who))

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
        """What is not equal to another run's: weights or the first metric; "" if all is."""
        if self.weights() != other.weights():
            return f"weights {self.weights()[:12]}, not {other.weights()[:12]}"
        for mine, theirs in zip(self.metrics(), other.metrics(), strict=False):  # see account
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name) and not TIMED.search(name):
                    return f"step {mine['training_step']}: {name} {mine.get(name)}, not {theirs.get(name)}"
        return ""

    def account(self) -> str:
        """Count what a run that is complete has left, in words. Raises Broken."""
        rows = self.metrics()
        steps = [row["training_step"] for row in rows]
        promise(steps == list(range(1, STEPS + 1)), f"steps logged: {steps}")
        lines = (self.path / "rollouts.jsonl").read_text().splitlines()
        names = sorted((row["position"], row["sample"]) for row in map(json.loads, lines))
        want = [(p, s) for p in range(STEPS * PROMPTS) for s in range(SAMPLES)]
        promise(names == want, f"{len(names)} rollouts logged, {len(set(names))} different ones, not {len(want)}")
        words = f"{STEPS} steps, {len(names)} rollouts"
        if self.setting != SYNC:
            kinds = ("started", "trained", "filtered", "in_flight")
            for row in rows:
                started, trained, filtered, in_flight = (row[f"batch/groups_{kind}"] for kind in kinds)
                promise(started == trained + filtered + in_flight, f"groups lost at step {row['training_step']}")
            promise(started == STEPS * PROMPTS and in_flight == 0, f"{started:.0f} groups, {in_flight:.0f} in flight")
            words += f", {started:.0f} groups = {trained:.0f} + {filtered:.0f} + {in_flight:.0f}"
        leftovers = [str(path.relative_to(self.path)) for path in self.path.rglob("*.tmp")]
        promise(not leftovers, f"left behind: {leftovers}")
        return words


# ---------------------------------------------------------------------------------------------------------------------
# Drills: each breaks a run, has it completed and returns the run, what was done and how the first attempts ended
# ---------------------------------------------------------------------------------------------------------------------


def kill(who: str, lab: Lab, setting: tuple) -> tuple[Run, str, str]:
    rng = random.Random(f"{lab.seed} {who} {setting[0]}")  # of both async_steps: they share the moments out
    moments, n = rng.sample(MOMENTS, len(MOMENTS)), lab.kills
    mine = {SYNC: range(n), FAST0: range((n + 1) // 2), FAST1: range(n // 2, n)}[setting]
    whats = [moments[i % len(MOMENTS)] for i in mine]
    whats.sort(key=lambda what: what != "epoch")  # first: later it may have been drawn before the kill
    whens = sorted(rng.choices(range(2, STEPS - 1), k=len(whats)))
    run, done = Run(lab, f"kill_{who}", setting), []
    for what, step in zip(whats, whens, strict=True):
        run.start(f"{what}:{PROMPTS * (step - 1) if what == 'epoch' else step}")

        def half_written(step: int = step) -> bool:
            return any(int(path.stem[5:]) >= step for path in run.checkpoints.glob("step_*.tmp"))

        run.until(half_written if what == "checkpoint" else run.marker.exists, f"{what} {step}")
        os.kill(run.victim(who), signal.SIGKILL)
        rows = run.rows()
        run.proceed()
        promise(run.end() != 0, "status 0 after kill -9")
        if setting != SYNC and who != "launcher":
            words = f"{who} 0 (pid"
            promise(words in run.log.read_text() and "SIGKILL" in run.log.read_text(), f"no word of {words}")
        done.append(f"{what} (after step {rows})")
    run.complete()
    anew = f", started anew x {run.anew}: no checkpoint yet" if run.anew else ""
    return run, f"kill -9 in {', '.join(done)}", f"resumed x {len(done) - run.anew}{anew}"


def sigterm(lab: Lab, setting: tuple) -> tuple[Run, str, str]:
    rng, run, done = random.Random(f"{lab.seed} sigterm {setting}"), Run(lab, "sigterm", setting), []
    for who, step in (("launcher", rng.randint(2, 3)), ("learner", rng.randint(5, 6))):
        run.start(f"update:{step}", torchrun=setting == SYNC and who == "learner")
        run.until(run.marker.exists, f"update {step}")
        os.kill(run.victim(who), signal.SIGTERM)
        run.proceed()
        status, rows = run.end(), run.rows()
        promise(status == 0, f"status {status} after SIGTERM to the {who}: {run.last_words()}")
        promise(f"SIGTERM: stopped after step {rows}; --resume" in run.log.read_text(), "no word about SIGTERM")
        latest = (run.checkpoints / "latest").read_text()
        promise(latest == f"step_{rows}", f"{rows} steps, but the newest checkpoint is {latest}")
        done.append(f"{who} (step {rows})")
    run.complete()
    return run, f"SIGTERM to the {', '.join(done)}", "exit 0 with a checkpoint, resumed x 2"


def drop_request(lab: Lab, setting: tuple) -> tuple[Run, str, str]:
    version = random.Random(f"{lab.seed} drop {setting}").randint(3, 5)
    run = Run(lab, "drop_request", setting, f"--stall_timeout_s {STALL_S}")
    run.start(f"drop_request:{version}")
    status, name = run.end(), run.marker.read_text()
    stalled = re.search(r"stalled: nothing moved for (\d+) s\. Outstanding: (.*)", run.log.read_text())
    promise(status != 0 and stalled is not None, f"status {status}, no stall: {run.last_words()}")
    promise(f"{name} (engine 0)" in stalled[2], f"{name} is not among {stalled[2]}")
    run.complete()
    ended = f"status {status} after {stalled[1]} s: 'Outstanding: {stalled[2][:40]}', resumed"
    return run, f"the engine swallows response {name} (version {version})", ended


def delay_reward(seconds: float, lab: Lab, setting: tuple) -> tuple[Run, str, str]:
    late = seconds > 10.0  # the deadline of a worker's job
    flags = f"--reward_file {lab.directory / 'reward_file.py'} --remap_verifier gsm8k=slow"
    run = Run(lab, f"delay_reward_{seconds:g}", setting, flags, DELAY=str(seconds))
    if late:
        run.env["DELAY_MARKER"] = str(run.directory / "late")
    else:  # a reward file's metrics have names of their own
        run.twin = Run(lab, "delay_reward_0", setting, flags, DELAY="0")
        run.twin.complete()
    run.complete()
    missing, timeouts = (
        sum(row.get(name) or 0 for row in run.metrics()) for name in ("batch/missing_rewards", "reward/slow_timeout")
    )
    promise(missing == (1 if late else 0), f"{missing} missing rewards")
    promise((timeouts > 0) == late, f"reward/slow_timeout {timeouts}")
    done = f"{'one score takes' if late else 'a score in 40 takes'} {seconds:g} s; the deadline is 10 s"
    return run, done, f"completed, {missing:.0f} missing"


def corrupt_weights(lab: Lab, setting: tuple) -> tuple[Run, str, str]:
    # with async_steps fresh responses are looked at every --local_eval_every steps
    version = random.Random(f"{lab.seed} corrupt {setting}").choice([2, 4] if setting == FAST1 else [2, 3, 4, 5])
    run = Run(lab, "corrupt_weights", setting)
    run.start(f"corrupt_weights:{version}")
    status, text = run.end(), run.log.read_text()
    found = re.search(r"GapError: (.*): mean \|learner - engine\| logprob (\S+)", text)
    promise(status != 0 and run.marker.exists() and found is not None, f"status {status}, no gap: {run.last_words()}")
    run.complete()
    return run, f"noise in the broadcast of version {version}", f"status {status}: {found[1]}: gap {found[2]}; resumed"


def full_disk(lab: Lab, setting: tuple) -> tuple[Run, str, str]:
    """A limit on the size of files stands for the full disk: the model fits, a checkpoint's state does not."""
    size = 2 * (lab.directory / "model" / "model.safetensors").stat().st_size
    run = Run(lab, "full_disk", setting)
    run.start("update:4")
    run.until(run.marker.exists, "update 4")
    rows, latest = run.rows(), run.checkpoints / "latest"
    before, after = ([f"step_{s}" for s in range(2, STEPS + 1, 2) if (s > rows) == late] for late in (False, True))
    run.until(lambda: latest.exists() and latest.read_text() == before[-1], before[-1])
    resource.prlimit(run.victim("learner"), resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    run.proceed()
    status, warned = run.end(), re.findall(r"WARNING: checkpoint (\S+) was not written", run.log.read_text())
    promise(status == 0, f"status {status}: {run.last_words()}")
    promise(warned == after, f"warnings about {warned}, not {after}")
    left = sorted(path.name for path in run.checkpoints.iterdir())
    promise(left == ["latest", *before], f"checkpoints left: {left}")
    done = f"no file above {size / 1e6:.1f} MB from step {rows + 1} on"
    return run, done, f"completed, {len(warned)} warnings, {before[-1]} stays"


def wedge_wandb(lab: Lab, setting: tuple) -> tuple[Run, str, str]:
    run = Run(lab, "wedge_wandb", setting, "--with_tracking", WANDB_MODE="offline", WANDB_SILENT="true")
    run.start("update:3")
    run.until(run.marker.exists, "update 3")
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
    return run, "SIGSTOP to wandb-core in step 3", f"completed {seconds:.0f} s later"


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
    row = {"drill": name, "script": setting[0] + ("" if setting[1] is None else f", {setting[1]}")}
    row |= {"done": "", "ended": "", "weights": "", "equal": "", "accounting": "", "kept": False}
    try:
        run, row["done"], row["ended"] = drill(lab, setting)
        row["weights"] = run.weights()[:12]
        difference = run.difference(run.twin)
        row["equal"] = difference or "yes"
        missing = sum(r["batch/missing_rewards"] for r in run.metrics())
        promise(not difference or missing > 0, f"not the unbroken run's: {difference}")
        row["accounting"] = run.account()
        row["kept"] = True
    except (Broken, OSError, ValueError, KeyError) as error:  # files that are not there or not whole are a result too
        row["ended"] = f"BROKEN: {'' if isinstance(error, Broken) else type(error).__name__ + ' '}{error}"
    row["seconds"] = round(time.monotonic() - start)
    print(f"{name} | {row['script']} | {row['done']} | {row['ended']} | {row['seconds']} s", flush=True)
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


def show(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    headings = {"script": "script, async_steps", "done": "what was done", "ended": "how it ended", "seconds": "s"}
    headings |= {"equal": "equal to the unbroken run", "weights": "final weights"}
    for name in ("drill", "script", "done", "ended", "seconds", "weights", "equal", "accounting"):
        table.add_column(headings.get(name, name), justify="right" if name == "seconds" else "left")
    for row in rows:
        cells = [str(row[column]) for column in "drill script done ended seconds weights equal accounting".split()]
        table.add_row(*cells, style=None if row["kept"] else "red")
    Console(width=None if sys.stdout.isatty() else 180).print(table)


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
    if unknown := set(args.drills) - DRILLS.keys():
        parser.error(f"no drill {', '.join(sorted(unknown))}; known are {', '.join(DRILLS)}")
    chosen = [
        (name, drill, setting)
        for name in args.drills or DRILLS
        for drill, setting in DRILLS[name]
        if args.script in (None, setting[0])
    ]
    if not chosen:
        parser.error(f"{', '.join(args.drills)}: not a drill of {args.script}")
    start, out = time.monotonic(), args.out or Path(tempfile.mkdtemp(prefix="chaos_"))
    lab = Lab(out.resolve(), args.rollout_backend, args.seed, args.kills)
    prepare(lab.directory)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pool = ThreadPoolExecutor(args.jobs)
    try:
        lab.unbroken = {s: Run(lab, "unbroken", s) for s in SETTINGS if any(s == setting for *_, setting in chosen)}
        list(pool.map(Run.complete, lab.unbroken.values()))
        rows = list(pool.map(partial(carry_out, lab), *zip(*chosen, strict=True)))
    finally:
        end_all(lab)  # a drill that still runs breaks, and starts nothing more
        pool.shutdown(cancel_futures=True)
    show(rows)
    for (script, async_steps), run in lab.unbroken.items():
        name = script + ("" if async_steps is None else f", {async_steps}")
        print(f"unbroken {name}: weights {run.weights()[:12]}, {run.account()}")
    kept = sum(row["kept"] for row in rows)
    print(f"{kept} of {len(rows)} drills ended as promised; {time.monotonic() - start:.0f} s; logs in {lab.directory}")
    (lab.directory / "table.json").write_text(json.dumps(rows, indent=1))
    return 0 if kept == len(rows) else 1


def end_all(lab: Lab) -> None:
    """kill -9 for whatever of a broken drill still runs."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"CHAOS_RUN={lab.directory}/".encode() in (directory / "environ").read_bytes():
                os.kill(int(directory.name), signal.SIGKILL)
        except OSError:  # gone meanwhile, or somebody else's
            continue


if __name__ == "__main__":
    raise SystemExit(main())
