"""Runs of a study side by side: each lane is a thread that hands one run after the other to the worker of its copy."""

import functools
import hashlib
import importlib.metadata
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from scripts.studies import arms as arms_part
from scripts.studies.arms import Arm
from scripts.studies.endpoints import Curve, curve_of, endpoints, lacking_in
from scripts.studies.record import from_json

WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # the least that vLLM takes, in GiB, is enough for short responses: memory limits how many runs go side by side
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # glibc asks for huge pages and keeps what is freed: a tenth of a run was the kernel handing out pages
    "GLIBC_TUNABLES": ":".join(
        [
            "glibc.malloc.hugetlb=1",
            "glibc.malloc.mmap_max=0",
            f"glibc.malloc.trim_threshold={16 << 30}",
            f"glibc.malloc.top_pad={64 << 20}",
        ]
    ),
}
LOG_TAIL = 3000  # characters of a failed run's log that are kept
STEPS_OF_PLAN = re.compile("^run .* = ([0-9]+) steps,", re.MULTILINE)  # in what --dry_run prints
OF_THE_COPY = re.compile("WARNING: (this copy of .*)")  # what a run says of code that does not do what its flags say


@dataclass(frozen=True)
class Job:
    """A run to do."""

    task: str
    arm: Arm
    seed: int  # of the pair: the row's
    run_seed: int  # --seed
    flags: tuple[str, ...]
    target: float
    steps: int
    measured: Mapping[str, str] = field(default_factory=dict)  # see tasks.Task


class LaneError(RuntimeError):
    """A worker ended in the middle of a run; the message says which run, and what to do."""


class Lane:
    """One worker process, used by one thread. It starts at the first run. The end of the `with` block ends it. If an
    exception ends the block, as Ctrl-C does, the worker is killed in the middle of its run."""

    def __init__(self, number: int, threads: int, folder: Path, copies: dict[str, Path]):
        self.number = number
        self.threads = threads
        self.folder = folder
        self.copies = copies  # arm -> copy
        self.worker: subprocess.Popen | None = None

    def start(self) -> subprocess.Popen:
        """The worker. The kernel kills it when the thread that started it ends, so the main thread starts it."""
        if self.worker is None:
            threads = str(self.threads)
            environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": threads}
            pipe = subprocess.PIPE
            # a group of its own: the terminal's Ctrl-C is for the study alone
            self.worker = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=pipe,
                stdout=pipe,
                env=environment,
                text=True,
                process_group=0,
            )
        return self.worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        worker = self.worker
        if worker is None:
            return
        if kind is not None:
            os.killpg(worker.pid, signal.SIGKILL)  # its run too
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()

    def ask(self, job: Job, more: Sequence[str] = ()) -> dict[str, Any]:
        """Have the worker do a run, with more flags; returns its answer. Raises LaneError if the worker ends."""
        run_dir = self.run_dir(job)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        flags = [*job.flags, "--output_dir", str(run_dir.parent), "--exp_name", run_dir.name]
        flags += ["--seed", str(job.run_seed), *more]
        copy = str(self.copies[job.arm.name].resolve())
        order = {"copy": copy, "script": job.arm.script, "flags": flags, "log": str(self.log(job))}

        worker = self.start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(order) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:  # it has ended since its last run
            line = ""
        if not line:
            self.worker = None
            with suppress(BrokenPipeError):
                worker.stdin.close()
            raise LaneError(
                f"the worker of {run_dir.name} ended with exit status {worker.wait()}, as if it had been killed. This "
                "run has no row; the same line goes on with it"
            )
        return json.loads(line)

    def run_dir(self, job: Job) -> Path:
        """The directory of a run."""
        return self.folder / "runs" / f"{job.task}-{job.arm.name}-{job.seed}"

    def log(self, job: Job) -> Path:
        """The file with what a run prints."""
        return self.folder / f"{self.run_dir(job).name}.log"

    def check(self, job: Job) -> str | None:
        """Have a run's copy check the flags of the run without a run (--dry_run), and its number of steps. Returns what
        is wrong, or None."""
        answer = self.ask(job, ["--dry_run"])
        log = self.log(job)
        text = told(log, self.folder)
        log.unlink(missing_ok=True)
        if answer["code"]:
            return text.strip()[-LOG_TAIL:] or f"exit status {answer['code']}"
        steps = STEPS_OF_PLAN.search(text)
        if steps is None:
            return "its --dry_run prints no plan: is --help among its flags?"
        if int(steps[1]) != job.steps:
            return (
                f"a step has another number of rollouts than the base's: that makes {steps[1]} steps, not {job.steps}. "
                "Keep --num_unique_prompts_rollout x --num_samples_per_prompt_rollout as it is"
            )
        return None

    def run(self, job: Job) -> dict[str, Any]:
        """Do a run; returns its row, of kind run or failure, without what the study adds."""
        copy = self.copies[job.arm.name]
        run_dir = self.run_dir(job)
        log = self.log(job)
        start = time.perf_counter()
        answer = self.ask(job)
        row: dict[str, Any] = {"task": job.task, "arm": job.arm.name, "seed": job.seed, "run_seed": job.run_seed}
        row["wall_seconds"] = round(time.perf_counter() - start, 1)
        row["cpu_seconds"] = round(answer["cpu_seconds"], 1)
        if answer["code"]:
            row |= {"kind": "failure", "code": answer["code"], "log": told(log, self.folder)[-LOG_TAIL:]}
        else:
            row |= self.row_of_end(job, copy, run_dir, log)
        shutil.rmtree(run_dir, ignore_errors=True)  # a failed run may have none
        log.unlink(missing_ok=True)
        return row

    def row_of_end(self, job: Job, copy: Path, run_dir: Path, log: Path) -> dict[str, Any]:
        """What the row of a run that ended by itself says of it: a failure if it has not made all of its steps."""
        curve = curve_in(run_dir, job)
        done = len(curve.tokens)
        if done != job.steps:  # a signal ends a run as if it were done, and flags may change its number of rollouts
            words = f"it made {done} steps, and a run of the study makes {job.steps}"
            return {"kind": "failure", "code": 0, "log": f"{told(log, self.folder)[-LOG_TAIL:]}\n{words}"}
        lacking = lacking_in(curve, job.measured)
        if lacking:
            words = f"its metrics lack {', '.join(lacking)}, which the endpoints are read off"
            return {"kind": "failure", "code": 0, "log": f"{told(log, self.folder)[-LOG_TAIL:]}\n{words}"}
        row = facts_of(run_dir, job, curve)
        row["warnings"] = OF_THE_COPY.findall(text_of(log))
        row["code"] = arms_part.code_hash(copy)
        row["files"] = arms_part.hashes_of_files(copy, job.flags)
        return row


def text_of(log: Path) -> str:
    """What a run printed: "" if the file is gone, and a mark for each byte that is no UTF-8."""
    return log.read_text(errors="replace") if log.exists() else ""


def told(log: Path, folder: Path) -> str:
    """A run's log, with paths that begin at the study's folder, the environment or the checkout: rows are published."""
    text = text_of(log)
    for place in (folder.resolve(), folder, sys.prefix, arms_part.ROOT):
        text = text.replace(f"{place}/", "")
    return text


def processor() -> str:
    """The processor's name and what of its instructions changes bits."""
    words: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        words.setdefault(name.strip(), value.strip())
    flags = words.get("flags", "").split()
    kinds = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return " ".join([words.get("model name", "unknown"), words.get("model", ""), *kinds])


def most_side_by_side(threads: int, gib: float) -> int:
    """How many runs of so many threads, and of so much memory each, the machine holds now: at least one."""
    by_threads = (os.cpu_count() or 1) // threads
    by_memory = int(psutil.virtual_memory().available / (gib * 2**30))
    return max(1, min(by_threads, by_memory))


@functools.cache
def version_of(package: str) -> str:
    """The version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def curve_in(run_dir: Path, job: Job) -> Curve:
    """The curve of a run's directory: one without a step if the run has left none."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return curve_of([from_json(line) for line in lines], job.measured)


def facts_of(run_dir: Path, job: Job, curve: Curve) -> dict[str, Any]:
    """What a finished run's directory says."""
    environment = json.loads((run_dir / "environment.json").read_text())
    digest = hashlib.sha256()
    for path in sorted((run_dir / "model").glob("*.safetensors")):
        digest.update(path.read_bytes())

    facts: dict[str, Any] = {"kind": "run", "weights": digest.hexdigest(), "processor": processor()}
    for name in ("data_hash", "model_hash", "packages", "omp_num_threads"):
        facts[name] = environment[name]
    kept = {name: [short(value) for value in values] for name, values in asdict(curve).items()}
    facts["curve"] = kept
    facts["endpoints"] = endpoints(Curve(**kept), job.target)  # of the values that the row has: it is checked by them
    return facts


def short(value: float | None) -> float | None:
    """A value of a curve to 5 digits: a record holds thousands of them."""
    return value if value is None else float(f"{value:.5g}")


def run_all(jobs: Sequence[Job], lanes: Sequence[Lane], done: Callable[[dict[str, Any]], None], until: float) -> int:
    """Do the jobs in their order, as many side by side as there are lanes, which the caller ends. `done` gets each row.
    No job starts after `until`, a time of time.monotonic. Returns how many were not started. An exception of a lane is
    raised here."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work(lane: Lane) -> None:
        try:
            while time.monotonic() < until and not errors:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                row = lane.run(job)
                with lock:
                    done(row)
        except BaseException as error:
            errors.append(error)

    busy = lanes[: len(jobs)]
    for lane in busy:
        lane.start()
    threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in busy]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return waiting.qsize()
