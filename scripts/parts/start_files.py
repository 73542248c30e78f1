"""The start model: its commit on the hub, and its files beside trained weights, in place of what transformers wrote.

Files that training does not change are the start model's own, byte for byte: what transformers would write anew has
names that older versions of it and of vLLM misread, some of them (rope_parameters) silently.
"""

import contextlib
import functools
import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZER_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model spiece.model""".split()


@functools.cache
def commit_of(name: str, revision: str | None) -> str | None:
    """The commit at which the hub has a model's revision (None: the default branch). It is asked once in a process, so
    that all that loads here is of one commit. A directory, or what neither hub nor cache knows, gives `revision`."""
    from huggingface_hub import ResolvedRevision
    from transformers.utils.hub import resolve_revision

    found = resolve_revision(name, revision)
    return found.resolved if isinstance(found, ResolvedRevision) else revision


def keep_start_files(path: Path, start: str, revision: str | None, dtype: str, tied: bool, eos_ids: list[int]) -> None:
    """Copy the files of `start` (a directory or hub name, at `revision`) into the directory `path`, in which
    save_pretrained has written a model and its tokenizer. Then set what belongs to the trained model:

    config.json             its dtype, and whether the head is tied to the embedding
    generation_config.json  the tokens that ended responses
    tokenizer_config.json   the chat template, for versions from before chat_template.jinja
    """
    copy_start_files(path, start, revision)

    config = read(path / "config.json")
    names = {"dtype", "torch_dtype"} & config.keys()  # by the version of transformers
    for name in names or {"dtype"}:
        config[name] = dtype
    config["tie_word_embeddings"] = tied
    write(path / "config.json", config)

    # Stop strings are not written: generate() would refuse to run without a tokenizer
    generation = read(path / "generation_config.json")
    generation["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else eos_ids
    write(path / "generation_config.json", generation)

    tokenizer = read(path / "tokenizer_config.json")
    template = path / "chat_template.jinja"
    several = (path / "additional_chat_templates").exists()
    if "chat_template" in tokenizer and template.exists() and not several:
        tokenizer["chat_template"] = template.read_text()
    write(path / "tokenizer_config.json", tokenizer)


def copy_start_files(path: Path, start: str, revision: str | None) -> None:
    """Copy the tokenizer's files and the configs that `start` has over those in `path`."""
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        source = start_file(start, name, revision)
        if source is not None:
            shutil.copyfile(source, path / name)
    # If only a part of the start model was loaded, its config describes another architecture
    source = start_file(start, "config.json", revision)
    target = path / "config.json"
    if source is not None and read(source).get("architectures") == read(target).get("architectures"):
        shutil.copyfile(source, target)


def start_file(start: str, name: str, revision: str | None) -> Path | None:
    """A file of the start model, or None if it has no such file."""
    from transformers.utils import cached_file

    with contextlib.suppress(OSError):  # no such file; or a hub out of reach, which must not cost the model
        source = cached_file(start, name, revision=revision)
        return Path(source) if source else None
    return None


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
