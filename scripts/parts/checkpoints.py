"""Resumable checkpoints: how a run writes, finds and loads them. utils.py imports this when a run does one of these.

RUN/checkpoints/step_N has a file of plain data for each rank, the sharded state of models and optimizer, and
manifest.json with size and sha256 of each file. It is written as step_N.tmp and, once on disk, renamed and named in
`latest`: whatever kills the run, a step_N is whole. The sums are checked because torch checks none: of 300 checkpoints
with one bit flipped it loaded 191 as other numbers, without an error.
"""

import hashlib
import json
import math
import os
import pickle
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

import utils
from scripts.parts import run_files

Modules = dict[str, Any]  # "policy", and with --ref_policy_update_freq "ref_policy"


class Writer:
    """Writes checkpoints in the background. Where one cannot be written, for instance on a full disk, it prints a
    warning, and the checkpoint before stays. All ranks construct it and call its methods."""

    def __init__(self, run_dir: Path, keep: int, world: utils.World):
        self.root = run_dir / "checkpoints"
        self.keep = keep
        self.world = world
        self.group = dist.new_group(backend="gloo")  # the background must not mix into the learners' collectives
        self.thread: threading.Thread | None = None
        if world.is_main:
            for unfinished in self.root.glob("*.tmp"):  # of a run that was killed
                shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(self.group)  # else rank 0 might remove what another rank already writes

    def save(self, step: int, modules: Modules, optimizer: Optimizer, extra: dict[str, Any]) -> None:
        """See utils.Checkpoints.save."""
        import torch.distributed.checkpoint as dcp

        self.wait()
        temporary = self.root / f"step_{step}.tmp"
        problem = self._write_rank_file(temporary, extra)
        problem = max(utils.all_gather(problem, self.world))  # no rank goes on without the others
        if problem:
            self._failed(temporary, problem)
            return
        state = learner_state(modules, optimizer)
        # Without copying ahead: torch's copies would start CUDA on GPU 0 in every rank
        storage = dcp.filesystem._FileSystemWriter(temporary / "state", per_thread_copy_ahead=0)
        writing = dcp.async_save(state, storage_writer=storage, process_group=self.group)
        self.thread = threading.Thread(target=self._finish, args=(writing, temporary))
        self.thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint being written is on disk, or has failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _write_rank_file(self, temporary: Path, extra: dict[str, Any]) -> str:
        """Write this rank's plain data and random state; returns "", or why that failed. What a fork adds may be saved
        and not be loaded again: so it is loaded here."""
        path = temporary / f"rank_{self.world.rank}.pt"
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                torch.save(extra | {"rng": utils.rng_state()}, file)
                file.flush()
                os.fsync(file.fileno())
            torch.load(path, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:  # the latter two of functions and of locks
            return f"--resume loads tensors, numbers, text, and lists and dicts of them only. {error}".splitlines()[0]
        except (OSError, RuntimeError) as error:  # torch.save has RuntimeErrors for a full disk
            return str(error)
        return ""

    def _finish(self, writing: Future, temporary: Path) -> None:
        """In the thread: wait for all ranks' writes, then publish the checkpoint."""
        from torch.distributed.checkpoint import CheckpointException

        try:
            writing.result()
            if self.world.is_main:
                publish(temporary, self.keep)
        except (OSError, CheckpointException) as error:
            last_line = str(error).strip().splitlines()[-1]
            self._failed(temporary, last_line)

    def _failed(self, temporary: Path, problem: str) -> None:
        if self.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            standing = checkpoint_dirs(self.root)
            stands = f"{standing[0].name} stands" if standing else "there is none yet"
            where = run_files.free_text(self.root.parent)
            print(f"WARNING: checkpoint {temporary.stem} was not written, {stands} ({where}): {problem}", flush=True)


def publish(temporary: Path, keep: int) -> None:
    """Make step_N of a step_N.tmp whose files are all on disk. Remove older checkpoints except the newest `keep`, with
    -1 none. Raises OSError."""
    root = temporary.parent
    final = temporary.with_suffix("")
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {str(file.relative_to(temporary)): stamp(file) for file in files}
    write_synced(temporary / "manifest.json", json.dumps(manifest, indent=1))
    remove(final)  # a damaged one that a resume has skipped
    os.replace(temporary, final)
    write_synced(root / "latest.tmp", final.name)
    os.replace(root / "latest.tmp", root / "latest")
    directory = os.open(root, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    if keep > 0:
        for old in checkpoint_dirs(root)[keep:]:
            remove(old)


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint if it exists. It is renamed first: a run that is killed leaves no half of a step_N."""
    if checkpoint.exists():
        renamed = checkpoint.with_name(f"{checkpoint.name}.old.tmp")
        os.replace(checkpoint, renamed)
        shutil.rmtree(renamed)


def checkpoint_dirs(root: Path) -> list[Path]:
    """The finished checkpoints in a directory, newest first."""
    finished = [path for path in root.glob("step_*") if path.name[5:].isdecimal()]
    return sorted(finished, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name[5:])


def stamp(file: Path) -> list:
    """Size in bytes and sha256 of a file."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    return [file.stat().st_size, digest.hexdigest()]


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, or ""."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        for name, written in manifest.items():
            if stamp(checkpoint / name) != written:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def newest(root: Path, before: float = math.inf) -> Path | None:
    """The newest undamaged checkpoint of a step below `before`; damaged ones are reported and skipped."""
    for path in checkpoint_dirs(root):
        if step_of(path) >= before:
            continue
        problem = damage(path)
        if not problem:
            return path
        print(f"WARNING: checkpoint {path} is damaged and skipped: {problem}", flush=True)
    return None


def learner_state(modules: Modules, optimizer: Optimizer) -> dict[str, Any]:
    """The sharded state of the modules and of the optimizer, which is that of modules["policy"]: of the policy what
    trains, of the others everything."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    trained = StateDictOptions(ignore_frozen_params=True)
    policy_state, optimizer_state = get_state_dict(modules["policy"], optimizer, options=trained)
    state = {"policy": policy_state, "optimizer": optimizer_state}
    for name, module in modules.items():
        if name != "policy":
            state[name] = get_model_state_dict(module)
    return state


def load(path: Path, modules: Modules, optimizer: Optimizer, world: utils.World) -> dict[str, Any]:
    """Load a checkpoint into modules and optimizer, and restore the random state. Returns rank 0's `extra`. The number
    of ranks may have changed."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    need_plain(path / "state")
    state = learner_state(modules, optimizer)
    # The optimizer keeps the learning rates and decays of today's flags, which --resume_anyway may have changed
    groups = state["optimizer"].pop("param_groups")
    dcp.load(state, checkpoint_id=path / "state")
    set_optimizer_state_dict(modules["policy"], optimizer, state["optimizer"] | {"param_groups": groups})
    need_moments(state["optimizer"]["state"], optimizer)
    for name, module in modules.items():
        complete = not utils.has_adapters(module)  # with adapters the frozen weights are not in the checkpoint
        set_model_state_dict(module, state[name], options=StateDictOptions(strict=complete))
    extra = torch.load(path / "rank_0.pt", weights_only=True)
    own_file = path / f"rank_{world.rank}.pt"
    own = torch.load(own_file, weights_only=True) if own_file.exists() else extra
    utils.set_rng_state(own["rng"])
    del extra["rng"]
    return extra


def resume(path: Path, learner: Any, args: Any, world: utils.World) -> dict[str, Any]:
    """Load a checkpoint into a grpo.Learner; returns the run's state. All ranks.

    The learning-rate schedule goes on at the checkpoint's tick, with the flags of this start."""
    scheduler = learner.scheduler
    state = load(path, learner.modules(args), learner.optimizer, world)
    saved = state.pop("scheduler")

    tick = saved["last_epoch"]
    base_rates = scheduler.base_lrs
    rates = []
    for base_rate, schedule in zip(base_rates, scheduler.lr_lambdas, strict=True):
        rates.append(base_rate * schedule(tick))
    scheduler.load_state_dict(saved | {"base_lrs": base_rates, "_last_lr": rates})
    for group, rate in zip(learner.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return state


def need_moments(loaded: dict[str, Any], optimizer: Optimizer) -> None:
    """Raises RuntimeError if the checkpoint's moments, by parameter, are not 0 and the optimizer's are."""
    theirs = any(bool(value.any()) for values in loaded.values() for value in values.values() if value.ndim)
    ours = any(bool(value.any()) for values in optimizer.state.values() for value in values.values() if value.ndim)
    if theirs and not ours:
        raise RuntimeError("the checkpoint's moments did not reach the optimizer")


def take_state(
    args: utils.Flags,
    step: int,
    policy: Any,
    optimizer: Optimizer,
    engine: utils.Engine | None,
    world: utils.World,
) -> None:
    """Load weights and moments after `step` > 0 of the run --load_states into learner and engine. All ranks. A run of
    another program is converted first, by scripts/align/states.py. Raises UserError where there is no such state."""
    path = Path(args.load_states) / "checkpoints" / f"step_{step}"
    converted = args.run_dir / "state.tmp"
    if not path.is_dir():
        path = converted
        arguments = (args.load_states, step, converted, "--model", utils.start_dir(args))
        problem = utils.on_main(lambda: utils.run_program("align/states.py", *arguments, seconds=1500.0), world)
        utils.need(not problem, problem)
    utils.shard_again(policy)
    load(path, {"policy": policy}, optimizer, world)
    if engine is not None:
        engine.load_weights(utils.engine_weights(policy, args), version=step)
    dist.barrier()  # all have read it
    shutil.rmtree(converted, ignore_errors=True)


# --- Metadata of a sharded state

MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
CLASSES = """BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties
    TensorStorageMetadata _MEM_FORMAT_ENCODING _StorageInfo""".split()
OTHERS = (
    "collections.OrderedDict",
    "collections.defaultdict",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
)


class MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of a checkpoint's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        known = (module in MODULES and name in CLASSES) or f"{module}.{name}" in OTHERS
        known = known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        if not known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def need_tensors(content: Any) -> None:
    """Raises UnpicklingError for an entry that is no tensor: torch would unpickle its bytes. The optimizer's groups are
    such entries, but a run never reads them."""
    for name, entry in content.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if not is_tensor and not name.startswith("optimizer.param_groups"):
            raise pickle.UnpicklingError(f"its entry {name} is no tensor")


def need_plain(state: Path) -> None:
    """Raises UserError unless every `.metadata` in the directory of a sharded state is plain data."""
    for path in sorted(state.glob("*.metadata")):
        try:
            with path.open("rb") as file:
                need_tensors(MetadataUnpickler(file).load())
        except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
            raise utils.UserError(f"{path} is refused, it may be a program: {error}") from None
