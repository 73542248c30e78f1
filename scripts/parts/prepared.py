"""Large data sets: their prompts are made once a node, by several processes, and kept in an Arrow file in the cache of
`datasets`, HF_DATASETS_CACHE. All ranks and later starts share it through a memory map.

A file is named by all that its prompts depend on: content of the data, tokenizer with its chat template, flags and the
files that they name, code. It appears in one move, once it is whole. `datasets.Dataset.from_file` opens it too.
"""

import errno
import fcntl
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import rewards
import utils
from rewards import UserError, need
from scripts.parts import hub
from utils import Prompt, Row, Taken, World

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK = 500  # rows that a process takes at a time
FLAGS = (utils.DataFlags, rewards.RewardFlags, utils.TurnFlags)  # that rows and prompts can depend on
ELSEWHERE = ("shuffle", "dataset_mixer_list", "dataset_mixer_eval_list")  # and those of them that count otherwise
PACKAGES = ("datasets", "jinja2", "pyarrow", "tokenizers", "transformers")
IN_ARROW = ("index", "token_ids", "text", "environment")  # fields of a Prompt that are not in its column `rest`
FULL = (errno.ENOSPC, errno.EDQUOT)


class Prompts(Sequence[Prompt]):
    """The prompts of an Arrow file, each made when it is asked for: they take no memory of this process."""

    def __init__(self, path: Path, environment: Any):
        import pyarrow as pa

        self.path = str(path)
        self.environment = environment
        self.table = pa.ipc.open_stream(pa.memory_map(self.path)).read_all()

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(len(self)))]
        index = range(len(self))[key]
        row = self.table.slice(index, 1)
        rest = json.loads(row["rest"][0].as_py())
        token_ids = tuple(row["token_ids"][0].values.to_numpy().tolist())
        environment = self.environment if row["answers"][0].as_py() else None
        for name in ("ground_truths", "verifiers"):
            rest[name] = tuple(rest[name])
        return Prompt(index, token_ids, row["text"][0].as_py(), environment=environment, **rest)

    def hashed(self) -> Iterator[bytes]:
        """What utils.data_hash takes of all prompts. It is read beside the map, whose pages would stay."""
        import pyarrow as pa

        with pa.OSFile(self.path) as file:
            for batch in pa.ipc.open_stream(file):
                yield from batch["hashed"].to_pylist()


def load(
    flag: str, args: Any, tokenizer: Any, environment: Any, make: Callable[..., Prompt], world: World
) -> Taken | None:
    """What became of the rows of a mixer flag, from the Arrow file of this node, which its first rank makes where there
    is none. None for data whose content cannot be known. All ranks. Raises UserError."""
    node = os.environ.get("GROUP_RANK", "0")  # torchrun's number of this node
    nodes = utils.all_gather(node, world)
    path = problem = ""
    if nodes.index(node) == world.rank:
        try:
            path = find_or_make(flag, args, tokenizer, environment, make)
        except ValueError as error:
            problem = str(error)
    answers = utils.all_gather((path, problem), world)
    for _, problem in answers:
        need(not problem, problem)
    path, _ = answers[nodes.index(node)]
    if not path:
        return None
    dropped, bad = json.loads(notes_of(Path(path)).read_text())
    return Taken(Prompts(Path(path), environment), dropped, bad)


# --- Names ------------------------------------------------------------------------------------------------------------


def key_of(flag: str, args: Any, tokenizer: Any, environment: Any) -> str:
    """A hash of all that the prompts of a mixer flag depend on; "" where the content of a data set cannot be known."""
    contents = []
    for name in getattr(args, flag)[::2]:
        contents.append(content_of(name, flag))
    if None in contents:
        return ""
    names = {field.name for cls in FLAGS for field in fields(cls)} - set(ELSEWHERE)
    flags = {name: getattr(args, name, None) for name in sorted(names)}
    facts: list[Any] = [flag, getattr(args, flag), contents, args.seed, flags, repr(environment)]
    for value in flags.values():
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and Path(word).is_file():
                facts.append(digest_of(Path(word)))
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        facts.append(content_of(directory))
    if "strftime_now" in str(tokenizer.chat_template):
        facts.append(utils.date_of_start(args)("%Y-%m-%d"))
    facts.append([importlib.metadata.version(name) for name in PACKAGES])
    for folder in (".", "scripts/parts", "scripts/tools"):
        facts += [digest_of(path) for path in sorted((utils.REPO / folder).glob("*.py"))]
    text = json.dumps(facts, default=str)
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:32]


def content_of(name: str, flag: str = "") -> Any:
    """What tells the content of a data set from another: a hash of its files, or the hub's commit. None: unknown."""
    path = Path(name)
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        return sorted((str(file.relative_to(path)), digest_of(file)) for file in files)
    if path.is_file():
        return digest_of(path)
    if name.startswith("reasoning_gym:"):
        return importlib.metadata.version("reasoning_gym")
    return hub.commit_for_rows(flag, name) or None


def digest_of(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_directory() -> Path | None:
    """Where Arrow files are, in the cache of `datasets`; None where that cannot be written."""
    import huggingface_hub.constants

    cache = os.environ.get("HF_DATASETS_CACHE") or os.path.join(huggingface_hub.constants.HF_HOME, "datasets")
    directory = Path(cache) / "grpo_prompts"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return directory if os.access(directory, os.W_OK) else None


def notes_of(path: Path) -> Path:
    """The file beside an Arrow file that has the number of dropped prompts, and the words about rows that are bad."""
    return path.with_suffix(".json")


# --- Making -----------------------------------------------------------------------------------------------------------


def find_or_make(flag: str, args: Any, tokenizer: Any, environment: Any, make: Callable[..., Prompt]) -> str:
    """The path of the Arrow file of a mixer flag; "" for data whose content cannot be known, or where the cache cannot
    be written: then each rank has its prompts in memory. Of several runs that need
    the same file one makes it, while the others wait: the lock goes with its process. Raises UserError."""
    key = key_of(flag, args, tokenizer, environment)
    directory = cache_directory() if key else None
    if directory is None:
        return ""
    path = directory / f"{key}.arrow"
    try:
        with (directory / f"{key}.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not path.exists():
                write(path, flag, args, make)
    except OSError as error:
        full = f"the disk of {directory} is full: free some, or set HF_DATASETS_CACHE to a directory with more"
        raise UserError(f"--{flag}: {full if error.errno in FULL else error}") from None
    return str(path)


def write(path: Path, flag: str, args: Any, make: Callable[..., Prompt]) -> None:
    """Make an Arrow file and its notes. What a run that was killed has left is overwritten."""
    import pyarrow as pa

    dropped = 0
    bad: list[str] = []
    schema = schema_of()
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for batch, more_dropped, more_bad in made(utils.mixed_rows(flag, args), make, args):
                    writer.write_batch(pa.ipc.read_record_batch(pa.py_buffer(batch), schema))
                    dropped += more_dropped
                    bad += more_bad
            file.flush()
            os.fsync(file.fileno())
        notes_of(path).write_text(json.dumps([dropped, bad]))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Made(NamedTuple):
    """What became of a chunk of rows."""

    batch: bytes  # of Arrow
    dropped: int
    bad: list[str]


def made(rows: Iterable[Row], make: Callable[..., Prompt], args: Any) -> Iterator[Made]:
    """What became of the rows, in their order. Each core has a process that makes prompts. They are forks of this one,
    so that they have its tokenizer and verifiers, and end with it."""
    rows = iter(rows)
    longest = args.max_prompt_token_length
    context = multiprocessing.get_context("fork")
    waiting: deque[Future[Made]] = deque()
    cores = len(utils.ALL_CORES)
    most = 2 * cores
    work = (make, longest)
    chunks = iter(lambda: list(islice(rows, CHUNK)), [])
    with ProcessPoolExecutor(cores, context, initializer=be_worker, initargs=work) as pool:
        for chunk in chunks:
            future = pool.submit(make_chunk, chunk)
            waiting.append(future)
            if len(waiting) > most:
                future = waiting.popleft()
                yield future.result()
        for future in waiting:
            yield future.result()


WORK: list[Any] = []  # of a worker: how it makes a prompt, and the longest that it keeps


def be_worker(*work: Any) -> None:
    """The first call in a forked process."""
    import ctypes
    import gc
    import signal

    WORK[:] = work
    gc.disable()  # prompts have no cycles
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def make_chunk(rows: list[Row]) -> Made:
    """Make the prompts of a chunk, in a worker."""
    prompts, dropped, bad = utils.take(rows, *WORK)
    return Made(batch_of(prompts).serialize().to_pybytes(), dropped, bad)


def schema_of() -> "pa.Schema":
    """The columns of an Arrow file."""
    import pyarrow as pa

    types = {"token_ids": pa.list_(pa.int32()), "text": pa.string(), "rest": pa.string(), "answers": pa.bool_()}
    return pa.schema(types | {"hashed": pa.binary()})


def batch_of(prompts: Sequence[Prompt]) -> "pa.RecordBatch":
    """Prompts as columns. `rest` is JSON, for Arrow would cast the labels of a column to one type; `answers` is whether
    the environment answers."""
    import pyarrow as pa

    names = [field.name for field in fields(Prompt) if field.name not in IN_ARROW]
    columns = {
        "token_ids": [prompt.token_ids for prompt in prompts],
        "text": [prompt.text for prompt in prompts],
        "rest": [json.dumps({name: getattr(prompt, name) for name in names}) for prompt in prompts],
        "answers": [prompt.environment is not None for prompt in prompts],
        "hashed": [utils.hashed(prompt) for prompt in prompts],
    }
    return pa.RecordBatch.from_pydict(columns, schema_of())
