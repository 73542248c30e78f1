"""Models and data sets of the Hugging Face hub: the first rank asks for each once, and all read the cache from then on.

A name and a revision mean a commit, which environment.json keeps. Other ranks, engines, saves and a resumed run take
the files of that commit, wherever main is by then. A model and a data set are the directory of their snapshot in the
cache. Nothing here imports torch: scripts/rows.py is small.
"""

import contextlib
import errno
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import huggingface_hub
from huggingface_hub import constants, errors

from rewards import UserError
from scripts.parts import checks

T = TypeVar("T")
COMMITS: dict[str, str] = {}  # "model ORG/NAME@REVISION" or "dataset ORG/NAME" -> commit
REACH_S = 3.5  # for the hub to name the commit of what is in the cache; without an answer the cache's is taken
ANSWER_S = 20.0  # for the same of what is not in the cache
LIST_S = 60.0  # for the list of its files
BUSY_S = (1, 2, 4, 8, 16)  # between tries where the hub says that it is busy
BUSY = (408, 429, 500, 502, 503, 504)  # statuses
FAULTS = (OSError, httpx2.HTTPError, errors.RevisionResolutionError, errors.HFValidationError)

WEIGHTS = (r"model(-\d+-of-\d+)?\.safetensors", r"[^/]+\.safetensors", r"pytorch_model(-\d+-of-\d+)?\.bin")  # the best
OTHERS = r"[^/]+\.(json|jinja|txt|model|tiktoken)|additional_chat_templates/.*|.*\.py"


# --- Commits ----------------------------------------------------------------------------------------------------------


def commit_of(kind: str, name: str, revision: str | None = None) -> str:
    """The commit of a "model" or "dataset" at a revision (None: the default branch), asked for once in a process.
    Where the hub does not answer it is the one in the cache. Raises UserError."""
    key = f"{kind} {name}@{revision}" if revision else f"{kind} {name}"
    if key not in COMMITS:
        COMMITS[key] = ask_commit(kind, name, revision)
    return COMMITS[key]


def remember(run_dir: Path) -> None:
    """Take the commits with which a run began."""
    path = run_dir / "environment.json"
    if path.exists():
        COMMITS.update(json.loads(path.read_text()).get("hub", {}))  # older runs have none


def ask_commit(kind: str, name: str, revision: str | None) -> str:
    def resolve(local: bool) -> str:
        api = huggingface_hub.HfApi()
        return api.resolve_revision(name, repo_type=kind, revision=revision, local_files_only=local).resolved

    cached = ""
    with contextlib.suppress(*FAULTS):
        cached = resolve(local=True)
    if not cached:
        return patiently(kind, name, revision, lambda: within(ANSWER_S, lambda: resolve(local=False)))
    if constants.is_offline_mode():
        return cached
    try:
        return within(REACH_S, lambda: resolve(local=False))
    except errors.RevisionNotFoundError as error:
        raise UserError(told(error, kind, name, revision)) from None
    except FAULTS as error:
        if isinstance(error, TimeoutError):
            go_offline()
        problem = told(error, kind, name, revision).partition(": ")[0]
        print(f"WARNING: {name}: {problem}. Its commit {cached} is in the cache, and taken", flush=True)
        return cached


def within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises; TimeoutError where that takes longer. Neither the hub's client nor the look-up of a
    host's address has a bound of its own."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer in {seconds:g} s") from None


def go_offline() -> None:
    """Ask the hub for nothing more, here and in programs that this process starts: it would not answer them either."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


# --- Files of a model -------------------------------------------------------------------------------------------------


@functools.cache  # a save finds the directory of the start, whatever has become of the cache
def model(name: str, revision: str | None = None) -> Path:
    """The directory of a model: itself, or that in the hub's cache, which is filled. Raises UserError."""
    if Path(name).is_dir():
        return Path(name)
    commit = commit_of("model", name, revision)
    return patiently("model", name, revision, lambda: snapshot("model", name, commit))


@functools.cache
def data_set(name: str, commit: str = "") -> Path:
    """The directory of a data set in the hub's cache, which is filled with all of its configs. Raises UserError."""
    commit = commit or commit_of("dataset", name)
    return patiently("dataset", name, None, lambda: snapshot("dataset", name, commit))


def snapshot(kind: str, name: str, commit: str) -> Path:
    """The directory in the cache with a commit's files that are needed. Only what is not there is asked for."""
    found = cached(kind, name, commit)
    if found is not None:
        return found

    def fetch(files: list[str]) -> Path:
        options = {"repo_type": kind, "revision": commit, "allow_patterns": files}
        return Path(huggingface_hub.snapshot_download(name, **options))

    directory = within(LIST_S, lambda: fetch(["config.json", "README.md"]))  # which keeps the list of all files
    try:
        return fetch(needed(kind, name, commit))
    except errors.CachedRepoTreeNotFoundError:  # other programs have filled the cache, and there is no network
        if kind == "dataset":
            raise ConnectionError(f"not all files of commit {commit} may be in the cache") from None
        return directory


def cached(kind: str, name: str, commit: str) -> Path | None:
    """The same where the cache has all of them, else None. It asks for nothing."""
    look = functools.partial(huggingface_hub.try_to_load_from_cache, name, repo_type=kind, revision=commit)
    try:
        files = needed(kind, name, commit)
    except errors.CachedRepoTreeNotFoundError:
        return None
    paths = [look(file) for file in files]
    if not paths or not all(isinstance(path, str) for path in paths):
        return None
    return Path(paths[0]).parents[files[0].count("/")]


def needed(kind: str, name: str, commit: str) -> list[str]:
    """All files of a data set. Of a model those that transformers and vLLM read: configs, tokenizer, code, and the
    weights once. Raises CachedRepoTreeNotFoundError."""
    files = [file.path for file in huggingface_hub.get_cached_repo_tree(name, repo_type=kind, revision=commit)]
    return files if kind == "dataset" else read_of_a_model(files)


def read_of_a_model(files: Sequence[str]) -> list[str]:
    """Those of a repository's files that are read."""
    chosen = [file for file in files if re.fullmatch(OTHERS, file)]
    for pattern in WEIGHTS:
        weights = [file for file in files if re.fullmatch(pattern, file)]
        if weights:
            return chosen + weights
    return chosen


# --- Faults -----------------------------------------------------------------------------------------------------------


def patiently(kind: str, name: str, revision: str | None, ask: Callable[[], T]) -> T:
    """What `ask` returns. A hub that is busy, or cuts an answer off, is asked again for half a minute. Raises
    UserError, in words for a person."""
    for wait in (*BUSY_S, None):
        try:
            return ask()
        except FAULTS as error:
            if wait is None or not passes(error):
                raise UserError(told(error, kind, name, revision)) from None
            found = status_of(error)
            words = f"the hub answered {found.status_code}" if found is not None else "the hub cut an answer off"
            print(f"{name}: {words}; again in {wait} s", flush=True)
            time.sleep(wait)
    raise AssertionError


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def status_of(error: BaseException) -> Any:
    """The hub's answer that an error came from, or None."""
    return next((e.response for e in chain(error) if isinstance(e, errors.HfHubHTTPError)), None)


def is_cut(error: BaseException) -> bool:
    """Whether an error came from a file that did not arrive whole."""
    broken = (httpx2.RemoteProtocolError, httpx2.ReadError)
    return any(isinstance(e, broken) or "Consistency check failed" in str(e) for e in chain(error))


def passes(error: BaseException) -> bool:
    """Whether the same question may be answered a little later."""
    answer = status_of(error)
    return is_cut(error) if answer is None else answer.status_code in BUSY


def told(error: BaseException, kind: str, name: str, revision: str | None) -> str:
    """What went wrong, and what to do about it, in one sentence."""
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    answer = status_of(error)
    status = answer.status_code if answer is not None else 0
    found = list(chain(error))
    if any(isinstance(e, errors.GatedRepoError) for e in found) or status == 403:
        if status == 403:
            return f"this account may not read it yet (403): ask for access on {page}, and start again once it is given"
        return f"it is gated ({status}): accept its licence on {page}, then run `hf auth login` or set HF_TOKEN"
    if any(isinstance(e, errors.RevisionNotFoundError) for e in found):
        return f"the hub has no revision {revision or 'main'} of it; there are {revisions(kind, name)}, and commits"
    if any(isinstance(e, errors.RepositoryNotFoundError) for e in found):
        hidden = "or it is private: then run `hf auth login` or set HF_TOKEN"
        return f"the hub has no such {kind} ({status}), {hidden}; or give a directory"
    if status:
        return f"the hub answered {status} ({answer.reason_phrase or 'busy'}): start again later"
    if any(isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT) for e in found):
        return f"no space left for the cache in {constants.HF_HUB_CACHE}: free some, or set HF_HOME to another disk"
    if is_cut(error):
        return "a file did not arrive whole, several times: start again, what has arrived is kept"
    unreached = [str(e) for e in found if isinstance(e, (httpx2.TransportError, ConnectionError, TimeoutError))]
    if unreached:
        flag = " --repo-type dataset" if kind == "dataset" else ""
        fix = f"with a network, `hf download {name}{flag}` fills the cache"
        return f"the hub is out of reach ({' '.join(unreached[0].split()):.100}): {fix}"
    words = " ".join(str(error).split())
    return f"{words:.400}: give a directory, or the name of a {kind} on the hub"


def revisions(kind: str, name: str) -> str:
    """The branches and tags of a repository."""
    try:
        refs = within(ANSWER_S, lambda: huggingface_hub.HfApi().list_repo_refs(name, repo_type=kind))
    except (OSError, httpx2.HTTPError):
        return "others"
    return ", ".join(ref.name for ref in [*refs.branches, *refs.tags])


# --- A run's names ----------------------------------------------------------------------------------------------------


def ask_all(args: Any) -> dict[str, str]:
    """Have all models and data sets that the flags name in this machine's cache; returns the commits. A run that goes
    on has those with which it began. Raises UserError."""
    if args.resume:
        remember(args.run_dir)
    for flag in ("model_name_or_path", "ref_model_name_or_path"):
        if getattr(args, flag):
            have_model(args if flag == "model_name_or_path" else args.of_reference(), flag)
    flags = ["dataset_mixer_eval_list"] if args.load_batches else ["dataset_mixer_list", "dataset_mixer_eval_list"]
    for flag in flags:
        for name, _ in args.mixer(flag):
            commit_for_rows(flag, name)
    return COMMITS


def have_model(args: Any, flag: str) -> None:
    """Have the files of --model_name_or_path in this machine's cache. Code of its own is refused here or, before other
    ranks would write it too, where transformers imports it from. Raises UserError."""
    import utils
    from scripts.parts import run_files

    if not run_files.asks_for_code(Path(utils.start_dir(args, flag))):
        return
    from transformers import AutoConfig

    config = utils.pretrained(AutoConfig, args, flag)
    utils.model_class(config, utils.class_of(config, args.model_name_or_path))


def commit_for_rows(flag: str, name: str) -> list[str]:
    """What scripts/rows.py is told of a data set's commit: nothing of one that is not of the hub. Raises UserError."""
    hub_name = name.partition(":")[0]
    if hub_name == "reasoning_gym" or Path(name).exists() or Path(hub_name).is_dir() or checks.problem_of_data(name):
        return []
    try:
        data_set(hub_name)
        return ["--commit", commit_of("dataset", hub_name)]
    except ValueError as error:
        raise UserError(f"--{flag} {name}: {error}") from None


def share(args: Any, world: Any) -> None:
    """Have all ranks take the files of the commits that the first rank finds, so that none asks the hub for itself. One
    rank of each node fills its cache. All ranks. The first rank tells of what is wrong, and the others end."""
    import utils

    try:
        COMMITS.update(utils.on_main(functools.partial(ask_all, args), world))
    except UserError:
        if world.is_main:
            raise
        utils.exit_process(1)
    if world.local_rank == 0 and not world.is_main:
        ask_all(args)
    if world.size > 1:
        utils.dist.barrier()


def share_by_store(args: Any, store: Any) -> None:
    """The same for ranks that meet in a store."""
    is_main = os.environ["RANK"] == "0"
    if is_main:
        store.set("hub", json.dumps(ask_all(args)))
    COMMITS.update(json.loads(store.get("hub")))
    filled = f"hub {os.environ['GROUP_RANK']}"
    if os.environ["LOCAL_RANK"] == "0":
        if not is_main:
            ask_all(args)
        store.set(filled, "")
    store.get(filled)
