"""Writes a model to disk: whole or not at all, and the last one of a run elsewhere if its own disk is full."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

SHARED_MEMORY = "/dev/shm"  # the last resort: it is gone with the machine
LAST = ("model", "model_merged")  # what a run ends with; step_N is another one's copy


def write(path: Path, write_into: Callable[[Path], None]) -> Path:
    """Have `write_into` fill a directory, which becomes `path`; returns where it is. On a disk that is full or cannot
    be written to, the last model of a run goes to the first other place that takes it, and a model of a step is left
    out; both with a warning. Raises OSError or SafetensorError if no place takes the last one."""
    from safetensors import SafetensorError

    try:
        fill(path, write_into)
        return path
    except (OSError, SafetensorError) as error:
        problem = f"{path} cannot be written ({free_text(path.parent)}): {error}"
        if path.name not in LAST:
            print(f"WARNING: {problem}. The run goes on", flush=True)
            return path
        print(f"WARNING: {problem}", flush=True)
        for place in (tempfile.gettempdir(), Path.cwd(), Path.home(), SHARED_MEMORY):
            with contextlib.suppress(OSError, SafetensorError):
                elsewhere = Path(tempfile.mkdtemp(prefix=f"{path.parent.name}_", dir=place)) / path.name
                fill(elsewhere, write_into)
                print(f"WARNING: the model is in {elsewhere}: move it to {path}", flush=True)
                return elsewhere
        raise


def fill(path: Path, write_into: Callable[[Path], None]) -> None:
    """Write a directory beside its place and put it there. Nothing of a failed one stays: the next place may be on the
    same disk."""
    try:
        with whole_directory(path) as temporary:
            write_into(temporary)
    except BaseException:
        shutil.rmtree(path.with_name(path.name + ".tmp"), ignore_errors=True)
        raise


def free_text(directory: Path) -> str:
    """How much room a disk has, for a person."""
    free = shutil.disk_usage(directory).free
    return f"{free / 1e9:.3f} GB free in {directory}"


@contextlib.contextmanager
def whole_directory(path: Path) -> Generator[Path]:
    """A directory to write a model into. It replaces `path` at the end, so that readers never see half a save."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    for file in temporary.iterdir():
        if file.is_file():  # safetensors writes files that only their owner may read
            shutil.copymode(temporary / "tokenizer_config.json", file)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
