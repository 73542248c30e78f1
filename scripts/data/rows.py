"""What the three scripts that prepare data share: rows in, jsonl with its sha256 out, and the decontamination check.

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.parts.rows import parse_row
from scripts.parts.rows import read_rows as read

NGRAM = 13  # words; GPT-3's (arXiv:2005.14165, appendix C)


def make_row(messages: list[dict[str, str]], ground_truth: Any, dataset: str | list[str]) -> dict[str, Any]:
    """One row in the shape above. A label that is no text is written as JSON; several verifiers stay lists of texts."""
    if isinstance(dataset, list) and len(dataset) == 1:
        dataset, ground_truth = dataset[0], ground_truth[0] if isinstance(ground_truth, list) else ground_truth
    if isinstance(dataset, list):
        label = [text_of(value) for value in ground_truth]
    else:
        label = text_of(ground_truth)
    return {"messages": messages, "ground_truth": label, "dataset": dataset, "prompt": messages}


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_rows(source: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a hub dataset (`org/name` or `org/name:config`), or of a local .jsonl, .parquet or directory."""
    try:
        yield from read(source, split)
    except ValueError as error:
        sys.exit(str(error))


def words_of(text: str) -> list[str]:
    """Lower-case words and numbers, without punctuation: what two copies of a question have in common."""
    return re.findall(r"\w+", text.lower())


def question_of(row: dict[str, Any]) -> str:
    """The last user turn of any row that the loader reads, with whatever the prompt puts around the question."""
    messages, _, _ = parse_row(row)
    return next(m["content"] for m in reversed(messages) if m["role"] == "user")


class Contamination:
    """Which questions are in an evaluation set: equal to one of its questions, or sharing `n` words in a row with one.

    Words as words_of has them. Questions of fewer than n words can only be equal. What most questions of the evaluation
    set share, such as instructions for the answer, is in no n-gram: n-grams of more than a tenth of them do not count
    (of at least 10 questions).
    """

    def __init__(self, questions: Iterable[str], n: int = NGRAM) -> None:
        self.n, self.exact, counts, total = n, set(), {}, 0
        for question in questions:
            words = words_of(question)
            self.exact.add(tuple(words))
            total += 1
            for gram in self.grams(words):
                counts[gram] = counts.get(gram, 0) + 1
        most = max(1, total // 10) if total >= 10 else total
        self.known = {gram for gram, count in counts.items() if count <= most}

    def grams(self, words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)}

    def kind(self, question: str) -> str | None:
        """ "exact", "n-gram" or None."""
        words = words_of(question)
        if tuple(words) in self.exact:
            return "exact"
        return "n-gram" if not self.known.isdisjoint(self.grams(words)) else None


def decontaminate(
    found: list[tuple[str, dict[str, Any]]], evaluation: list[str], n: int
) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, str]]]:
    """(the (bare question, row) pairs that are kept, [(kind, question)] of the dropped ones); see Contamination."""
    check = Contamination(evaluation, n)
    kinds = [check.kind(question) for question, _ in found]
    kept = [pair for pair, kind in zip(found, kinds, strict=True) if kind is None]
    return kept, [(kind, question) for (question, _), kind in zip(found, kinds, strict=True) if kind is not None]


def write(rows: list[dict[str, Any]], path: Path) -> str:
    """Write jsonl, and its sha256 beside it in the format of `sha256sum -c`; returns the sha256.

    Where one row has several verifiers, each has lists: in a column of texts and lists `datasets` turns "3" into 3.
    """
    if not rows:
        sys.exit(f"{path}: no row is left to write")
    if any(isinstance(row["dataset"], list) for row in rows):
        columns = ("ground_truth", "dataset")
        rows = [row | {c: row[c] if isinstance(row["dataset"], list) else [row[c]] for c in columns} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    digest = hashlib.sha256(data).hexdigest()
    for target, content in ((path, data), (path.with_name(path.name + ".sha256"), f"{digest}  {path.name}\n".encode())):
        tmp = target.with_name(f".{target.name}.tmp")
        tmp.write_bytes(content)
        os.replace(tmp, target)
    print(f"{path}: {len(rows)} rows, sha256 {digest}")
    return digest


def parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """The flags that all three scripts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help=f"directory to write to (default: {out})")
    parser.add_argument(
        "--decontaminate",
        metavar="EVAL",
        nargs="+",
        default=[],
        help="drop train rows found in these files or hub datasets (NAME or NAME@SPLIT; the split is test)",
    )
    parser.add_argument("--ngram", type=int, default=NGRAM, help=f"words in a row that are too many (default: {NGRAM})")
    return parser


def save_train(found: list[tuple[str, dict[str, Any]]], args: argparse.Namespace) -> None:
    """Drop what --decontaminate finds of these (bare question, row) pairs, say so, and write train.jsonl."""
    evaluation = []
    for source in args.decontaminate:
        name, _, split = source.partition("@")
        evaluation += [question_of(row) for _, row in read_rows(name, split or "test")]
    if evaluation:
        kept, dropped = decontaminate(found, evaluation, args.ngram)
        for kind, question in dropped[:5]:
            print(f"  {kind}: {question[:150]!r}")
        exact = sum(kind == "exact" for kind, _ in dropped)
        print(
            f"decontamination against {len(evaluation)} questions: {exact} equal, {len(dropped) - exact} share "
            f"{args.ngram} words in a row; {len(kept)} of {len(found)} rows kept"
        )
        found = kept
    write([row for _, row in found], args.out / "train.jsonl")
