"""Models and data sets of the Hugging Face hub: the first rank asks for each once, and all read the cache from then on.

A name and a revision mean a commit, which environment.json keeps. Other ranks, engines, saves and a resumed run take
the files of that commit, wherever main is by then. A model is the directory of its snapshot in the cache; the rows of a
data set are the files that `datasets` has made of its commit. Nothing here imports torch: scripts/rows.py is small.
"""

import contextlib
import errno
import functools
import json
import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
LIST_S = 60.0  # for the list of its files, which huggingface_hub asks for several times
BUSY_S = (1, 2, 4, 8, 16)  # between tries where the hub says that it is busy
BUSY = (408, 429, 500, 502, 503, 504)  # statuses
MOST_BUSY_S = 30  # that the hub may ask to wait before the next try
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


def commit_or_none(name: str, revision: str | None) -> str | None:
    """The commit of a model, or None of a directory."""
    return None if Path(name).is_dir() else commit_of("model", name, revision)


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
    answers: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer in {seconds:g} s") from None
    if error is not None:
        raise error
    return answer


def go_offline() -> None:
    """Ask the hub for nothing more, here and in programs that this process starts: it would not answer them either."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


# --- Files of a model -------------------------------------------------------------------------------------------------


@functools.cache  # a save finds the directory of the start, whatever has become of the cache
def model(name: str, revision: str | None = None) -> Path:
    """The directory of a model: itself, or the snapshot in the hub's cache, which is filled. Raises UserError."""
    if Path(name).is_dir():
        return Path(name)
    commit = commit_of("model", name, revision)
    return snapshot(name, commit) or patiently("model", name, revision, lambda: download(name, commit))


def on_this_machine(name: str, revision: str | None) -> Path | None:
    """Where this machine has a model's config.json, without a question to the hub: the directory, or that of the cache.
    None: nowhere."""
    if Path(name).is_dir():
        return Path(name)
    if checks.is_missing_path(name):
        return None
    config = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def snapshot(name: str, commit: str) -> Path | None:
    """The directory in the cache with all files of a model that are needed, or None."""
    config = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=commit)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    try:
        tree = huggingface_hub.get_cached_repo_tree(name, revision=commit)
        files = needed([file.path for file in tree])
    except errors.CachedRepoTreeNotFoundError:  # other programs have filled the cache
        files = files_by_index(directory)
    return directory if all((directory / file).exists() for file in files) else None


def files_by_index(directory: Path) -> list[str]:
    """The files that a model must have, as far as those that are there tell."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return ["tokenizer_config.json", *json.loads(index.read_text())["weight_map"].values()]
    has_weights = [name for name in ("model.safetensors", "pytorch_model.bin") if (directory / name).exists()]
    return ["tokenizer_config.json", *(has_weights or ["model.safetensors"])]


def needed(files: Sequence[str]) -> list[str]:
    """Those of a repository's files that transformers and vLLM read: configs, tokenizer, code, and the weights once."""
    chosen = [file for file in files if re.fullmatch(OTHERS, file)]
    for pattern in WEIGHTS:
        weights = [file for file in files if re.fullmatch(pattern, file)]
        if weights:
            return chosen + weights
    return chosen


def download(name: str, commit: str) -> Path:
    """Fill the cache with a commit of a model, and return its directory."""
    tree = within(LIST_S, lambda: list(huggingface_hub.HfApi().list_repo_tree(name, recursive=True, revision=commit)))
    files = needed([entry.path for entry in tree])
    return Path(huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=files))


def asks_for_code(directory: Path) -> bool:
    """Whether a model asks for code of its own, or its tokenizer does."""
    files = [directory / name for name in ("config.json", "tokenizer_config.json")]
    return any("auto_map" in json.loads(file.read_text()) for file in files if file.exists())


def code_of(directory: Path) -> list[str]:
    """The Python files of a model that asks for them, by name."""
    return sorted(file.name for file in directory.glob("*.py")) if asks_for_code(directory) else []


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
            seconds = min(MOST_BUSY_S, max(wait, wish_of(found)))
            words = f"the hub answered {found.status_code}" if found is not None else "the hub cut an answer off"
            print(f"{name}: {words}; again in {seconds} s", flush=True)
            time.sleep(seconds)
    raise AssertionError


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def status_of(error: BaseException) -> Any:
    """The hub's answer that an error came from, or None."""
    return next((e.response for e in chain(error) if isinstance(e, errors.HfHubHTTPError)), None)


def wish_of(answer: Any) -> int:
    """The seconds that a busy hub asks to wait, or 0."""
    text = "" if answer is None else answer.headers.get("Retry-After", "")
    return int(text) if text.isdecimal() else 0


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


# --- Rows of a data set -----------------------------------------------------------------------------------------------


def data_set(name: str, commit: str = "") -> Any:
    """`datasets`' builder of ORG/NAME or ORG/NAME:CONFIG whose files are in the cache. Raises UserError."""
    hub_name, _, config = name.partition(":")
    commit = commit or commit_of("dataset", hub_name)
    return cached_builder(hub_name, config, commit) or patiently(
        "dataset", hub_name, None, lambda: build(hub_name, config, commit)
    )


def cached_builder(name: str, config: str, commit: str) -> Any:
    """The builder of files that were made of this commit before, or None. `datasets` would ask the hub again, and
    without it take the newest files, of whatever commit."""
    import datasets.config
    from datasets.naming import camelcase_to_snakecase
    from datasets.packaged_modules.cache.cache import Cache

    owner, slash, last = name.rpartition("/")
    folder = f"{owner}{slash and '___'}{camelcase_to_snakecase(last)}"
    config = config or default_config(name, commit)
    found = sorted(Path(datasets.config.HF_DATASETS_CACHE, folder).glob(f"{config or '*'}/*/{commit}"))
    if len(found) != 1:
        return None
    *_, config, version, _ = found[0].parts
    return Cache(repo_id=name, dataset_name=last, config_name=config, version=version, hash=commit)


def default_config(name: str, commit: str) -> str:
    """The config that the card of a data set names as the one to take; "" where it names none."""
    card = huggingface_hub.try_to_load_from_cache(name, "README.md", repo_type="dataset", revision=commit)
    if not isinstance(card, str):
        return ""
    configs = huggingface_hub.DatasetCard.load(card).data.to_dict().get("configs") or []
    names = [entry["config_name"] for entry in configs]
    chosen = [entry["config_name"] for entry in configs if entry.get("default")]
    if not chosen and (len(names) == 1 or "default" in names):
        chosen = ["default"] if "default" in names else names
    return chosen[0] if chosen else ""


def build(name: str, config: str, commit: str) -> Any:
    """Download the files of a config, and have `datasets` make its own of them. Raises UserError for a config that
    there is not."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, config or None, revision=commit)
    except ValueError as error:
        known = datasets.get_dataset_config_names(name, revision=commit)
        if config in known:
            raise
        what = f"it has no config {config}" if config else "it has several configs"
        raise ValueError(f"{what}: give {' or '.join(f'{name}:{one}' for one in known)}") from error
    if builder.hash != commit:  # of the cache: the hub did not answer
        raise ConnectionError(f"commit {commit} is not in the cache")
    builder.download_and_prepare()
    return builder


# --- A run's names ----------------------------------------------------------------------------------------------------


def ask_all(args: Any, readers: int = 1) -> dict[str, str]:
    """Ask the hub for all that the flags name; returns the commits. A run that goes on has those with which it began.
    Models are in this machine's cache then and, where several `readers` would meet there, data sets. Raises
    UserError."""
    if args.resume:
        remember(args.run_dir)
    for flag in ("model_name_or_path", "ref_model_name_or_path"):
        if getattr(args, flag):
            have_model(args if flag == "model_name_or_path" else args.of_reference(), flag)
    flags = ["dataset_mixer_eval_list"] if args.load_batches else ["dataset_mixer_list", "dataset_mixer_eval_list"]
    for flag in flags:
        splits = getattr(args, f"{flag}_splits")
        for i, (name, _) in enumerate(args.mixer(flag)):
            commit = commit_for_rows(flag, name)
            if commit and readers > 1:
                fetch(flag, name, splits[i % len(splits)], commit)
    return COMMITS


def have_model(args: Any, flag: str) -> None:
    """Have the files of --model_name_or_path in this machine's cache. Code of its own is refused here or, before other
    ranks would write it too, where transformers imports it from. Raises UserError."""
    import utils

    if not asks_for_code(Path(utils.start_dir(args, flag))):
        return
    from transformers import AutoConfig

    config = utils.pretrained(AutoConfig, args, flag)
    utils.model_class(config, utils.class_of(config, args.model_name_or_path))


def fetch(flag: str, name: str, split: str, commit: Sequence[str]) -> None:
    """Have a data set in this machine's cache. Raises UserError."""
    import utils

    line = utils.program("rows.py", name, 1.0, "--split", split, *commit, "--fetch")
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        problem = json.loads(done.stdout)["error"] if done.stdout else f"{name}: rows.py ended with {done.returncode}"
        raise UserError(f"--{flag} {problem}")


def commit_for_rows(flag: str, name: str) -> list[str]:
    """What scripts/rows.py is told of a data set's commit: nothing of one that is not of the hub. Raises UserError."""
    hub_name = name.partition(":")[0]
    if hub_name == "reasoning_gym" or Path(name).exists() or Path(hub_name).is_dir() or checks.problem_of_data(name):
        return []
    try:
        return ["--commit", commit_of("dataset", hub_name)]
    except ValueError as error:
        raise UserError(f"--{flag} {name}: {error}") from None


def share(args: Any, world: Any) -> None:
    """Have all ranks take the files of the commits that the first rank finds, so that none asks the hub for itself. One
    rank of each node fills its cache. All ranks. The first rank tells of what is wrong, and the others end."""
    import utils

    try:
        COMMITS.update(utils.on_main(functools.partial(ask_all, args, world.size), world))
    except UserError:
        if world.is_main:
            raise
        utils.exit_process(1)
    if world.local_rank == 0 and not world.is_main:
        ask_all(args, world.size)
    if world.size > 1:
        utils.dist.barrier()


def share_by_store(args: Any, store: Any, learners: int) -> None:
    """The same for ranks that meet in a store, of which so many learn."""
    is_main = os.environ["RANK"] == "0"
    if is_main:
        store.set("hub", json.dumps(ask_all(args, learners)))
    COMMITS.update(json.loads(store.get("hub")))
    filled = f"hub {os.environ['GROUP_RANK']}"
    if os.environ["LOCAL_RANK"] == "0":
        if not is_main:
            ask_all(args, learners)
        store.set(filled, "")
    store.get(filled)
