"""What the scripts that prepare data share: rows in, jsonl with its sha256 out, and the decontamination check.

A row is {"messages": [{role, content}, ...], "ground_truth": text, "dataset": verifier's name}, and "prompt", the same
list as messages. open-instruct reads the first three (`--dataset_mixer_list FILE.jsonl 1.0`). TRL's GRPOTrainer reads
prompt, and hands ground_truth and dataset to its reward functions by name: `load_dataset("json", data_files=FILE)`.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.parts.rows import parse_row
from scripts.parts.rows import read_rows as read

NGRAM = 13  # words; GPT-3's (arXiv:2005.14165, appendix C)

Row = dict[str, Any]
Asked = tuple[str, Row]  # a bare question, and the row made of it


def make_row(messages: list[dict[str, str]], ground_truth: Any, dataset: str | list[str]) -> Row:
    """One row in the shape above. A label that is no text is written as JSON; several verifiers stay lists of texts."""
    if isinstance(dataset, list) and len(dataset) == 1:
        dataset = dataset[0]
        if isinstance(ground_truth, list):
            ground_truth = ground_truth[0]
    if isinstance(dataset, list):
        label = [text_of(value) for value in ground_truth]
    else:
        label = text_of(ground_truth)
    return {"messages": messages, "ground_truth": label, "dataset": dataset, "prompt": messages}


def question_row(text: str, ground_truth: Any, dataset: str) -> Row:
    """The row of a prompt of one user turn."""
    return make_row([{"role": "user", "content": text}], ground_truth, dataset)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    """(where, row) of a hub dataset (`org/name` or `org/name:config`), or of a local .jsonl, .parquet or directory."""
    try:
        yield from read(source, split)
    except ValueError as error:
        sys.exit(str(error))


def words_of(text: str) -> list[str]:
    """Lower-case words and numbers, without punctuation: what two copies of a question have in common."""
    return re.findall(r"\w+", text.lower())


def question_of(row: Row) -> str:
    """The last user turn of any row that the loader reads, with the text that the prompt puts around the question."""
    messages, _, _ = parse_row(row)
    turns = [message["content"] for message in messages if message["role"] == "user"]
    return turns[-1]


class Contamination:
    """Which questions are in an evaluation set: equal to one of its questions, or sharing NGRAM words in a row with
    one. Words are those of words_of. Questions of fewer words can only be equal."""

    def __init__(self, questions: Iterable[str]) -> None:
        self.exact: set[tuple[str, ...]] = set()
        self.known: set[tuple[str, ...]] = set()
        for question in questions:
            words = tuple(words_of(question))
            self.exact.add(words)
            self.known |= self.grams(words)

    def grams(self, words: tuple[str, ...]) -> set[tuple[str, ...]]:
        return {words[i : i + NGRAM] for i in range(len(words) - NGRAM + 1)}

    def kind(self, question: str) -> str | None:
        """ "exact", "n-gram" or None."""
        words = tuple(words_of(question))
        if words in self.exact:
            return "exact"
        return None if self.known.isdisjoint(self.grams(words)) else "n-gram"


def write(asked: list[Asked], path: Path) -> None:
    """Write jsonl, and its sha256 beside it in the format of `sha256sum -c`.

    Where one row has several verifiers, each has lists: in a column of texts and lists `datasets` turns "3" into 3.
    """
    rows = [row for _, row in asked]
    if not rows:
        sys.exit(f"{path}: no row is left to write")
    if any(isinstance(row["dataset"], list) for row in rows):
        rows = [with_lists(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    digest = hashlib.sha256(data).hexdigest()
    replace_file(path, data)
    replace_file(path.with_name(f"{path.name}.sha256"), f"{digest}  {path.name}\n".encode())
    print(f"{path}: {len(rows)} rows, sha256 {digest}")


def with_lists(row: Row) -> Row:
    """The row with lists of labels and verifiers."""
    if isinstance(row["dataset"], list):
        return row
    return row | {"ground_truth": [row["ground_truth"]], "dataset": [row["dataset"]]}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is never half written."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def parser(doc: str | None, out: str, source: str | None = None) -> argparse.ArgumentParser:
    """The flags that all these scripts have; --source where `source` is its default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help=f"directory to write to (default: {out})")
    parser.add_argument(
        "--decontaminate",
        metavar="EVAL",
        nargs="+",
        default=[],
        help="drop train rows found in these files or hub datasets (NAME or NAME@SPLIT; the split is test)",
    )
    if source is not None:
        parser.add_argument("--source", default=source, help="hub dataset or local directory")
    return parser


def convert(args: argparse.Namespace, make: Callable[[Row], Row]) -> None:
    """Write train.jsonl and test.jsonl of --source, whose rows have a question. make: a source's row -> ours."""
    made: dict[str, list[Asked]] = {"train": [], "test": []}
    for split, asked in made.items():
        for where, row in read_rows(args.source, split):
            try:
                asked.append((row["question"], make(row)))
            except (KeyError, ValueError) as error:
                sys.exit(f"{where}: {error!r}")
    save_train(made["train"], args)
    write(made["test"], args.out / "test.jsonl")


def save_train(asked: list[Asked], args: argparse.Namespace) -> None:
    """Write train.jsonl without what --decontaminate finds, which is printed."""
    evaluation: list[str] = []
    for source in args.decontaminate:
        name, _, split = source.partition("@")
        evaluation += [question_of(row) for _, row in read_rows(name, split or "test")]
    if evaluation:
        asked = decontaminate(asked, Contamination(evaluation), len(evaluation))
    write(asked, args.out / "train.jsonl")


def decontaminate(asked: list[Asked], evaluation: Contamination, size: int) -> list[Asked]:
    """The rows whose questions are not in an evaluation set of `size` questions; prints what is dropped."""
    kept = []
    dropped = []
    for question, row in asked:
        kind = evaluation.kind(question)
        if kind is None:
            kept.append((question, row))
        else:
            dropped.append((kind, question))
    for kind, question in dropped[:5]:
        print(f"  {kind}: {question[:150]!r}")
    exact = sum(kind == "exact" for kind, _ in dropped)
    print(
        f"decontamination against {size} questions: {exact} equal, {len(dropped) - exact} share {NGRAM} words "
        f"in a row; {len(kept)} of {len(asked)} rows kept"
    )
    return kept
