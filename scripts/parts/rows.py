"""Print the rows of a data set as a run takes them: JSON lines [where, messages, ground truths, verifiers' names], and
where any row has a column tools or env_config, these two of each row, null without.

    python scripts/parts/rows.py openai/gsm8k:main 0.5 --split test --seed 1

NAME is a .jsonl or .parquet file, a directory (saved by datasets, or holding such files whose name has the split) or a
hub dataset (`org/name` or `org/name:config`). AMOUNT is as in --dataset_mixer_list, for which the training scripts
start this: 1.0 is a fraction, above 1 with repetitions, 1 a row; the seed fixes which. Rows have one of these shapes:

    open-instruct   {messages, ground_truth, dataset}
    verl            {prompt, data_source, reward_model.ground_truth}
    GSM8K           {question, answer}
    TRL             {prompt, + columns}

Where a row or the data set cannot be used, the last line is a JSON text that says why, and the exit status is 1. A
process of its own keeps pyarrow, datasets and the rows that are not drawn out of the trainer's memory.
"""

import argparse
import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERL_SOURCES = {"openai/gsm8k": "gsm8k_verl", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math"}


def need(condition: bool, message: str) -> None:
    """Raises ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def read_rows(name: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, row) of a data set in file order; `where` names file and row for error messages."""
    path = Path(name)
    if path.suffix in (".jsonl", ".parquet") and not path.exists():
        raise ValueError(f"{name}: no such file")
    if path.is_dir() and not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists():
        files = sorted(f for f in path.iterdir() if f.suffix in (".jsonl", ".parquet") and split in f.name)
        need(files != [], f"{name}: no .jsonl or .parquet file with {split!r} in its name")
        for file in files:
            yield from read_rows(str(file), split)
        return
    if path.suffix == ".jsonl":
        rows = jsonl_rows(path)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        rows = enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1)
    else:
        rows, name = enumerate(dataset_rows(name, split), start=1), f"{name} [{split}]"
    for i, row in rows:
        yield f"{name} row {i}", row


def jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:  # datasets would cast labels of several kinds to one
        for i, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield i, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} row {i}: not JSON in UTF-8 ({error})") from None


def dataset_rows(name: str, split: str) -> Any:
    import datasets

    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        hub_name, _, config = name.partition(":")
        return datasets.load_dataset(hub_name, config or None, split=split)
    except (OSError, ValueError, KeyError) as error:  # no such name, config or split, no network
        raise ValueError(
            f"{name} [{split}]: {str(error).strip().splitlines()[0]}. It is no .jsonl, .parquet or directory; a hub "
            "dataset is ORG/NAME or ORG/NAME:CONFIG, with a network to reach it"
        ) from None


def parse_row(row: Any) -> tuple[list[dict[str, str]], list[Any], list[str]]:
    """(messages, ground truths, verifier names) of one row, whatever shape it has. A trailing assistant turn is
    dropped. Raises ValueError with the reason."""
    need(isinstance(row, dict), f"a row must be an object, got {type(row).__name__}")
    turns = next((row[k] for k in ("messages", "prompt", "question", "problem") if row.get(k)), None)
    need(turns is not None, f"no prompt: none of messages, prompt, question, problem in {sorted(row)}")
    messages: Any = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    whole = isinstance(messages, list) and all(isinstance(t, dict) for t in messages)
    need(whole, "the prompt must be a text or a list of messages {role, content}")
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    whole = messages and all(isinstance(t.get("content"), str) and t.get("role") for t in messages)
    need(whole, "each message needs a role and a text content, and one must not be the assistant's")
    "".join(t["content"] for t in messages).encode()  # half a character of UTF-16 raises: no tokenizer takes it

    answer = next((row[k] for k in ("answer", "solution", "final_answer") if row.get(k) is not None), None)
    nested = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    labels = (row.get("ground_truth"), nested.get("ground_truth"), answer)
    label = next((x for x in labels if x is not None), None)  # data sets put together have null for what one lacks
    verifier: Any = row.get("dataset") or row.get("verifier")
    if verifier is None and row.get("instruction_id_list"):
        verifier, label = "ifeval", {"instruction_id_list": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    if verifier is None and (source := row.get("data_source")):
        need(source in VERL_SOURCES, f"data_source {source!r} names no verifier; known: {sorted(VERL_SOURCES)}")
        verifier = VERL_SOURCES[source]
    if isinstance(label, str) and "####" in label and verifier in (None, "gsm8k", "gsm8k_strict", "gsm8k_verl"):
        verifier, label = verifier or "gsm8k", label.rpartition("####")[2].strip()
    if verifier is None and row.get("solution") is not None:
        verifier = "math"
    need(label is not None, f"no ground_truth: columns are {sorted(row)}")
    need(verifier is not None, f"no dataset (the verifier's name): columns are {sorted(row)}")
    verifiers = list(verifier) if isinstance(verifier, (list, tuple)) else [verifier]
    named = all(isinstance(v, str) for v in verifiers)
    need(named, f"dataset must be a verifier's name or a list of them, got {verifier!r}")
    labels = [label] if isinstance(verifier, str) or not isinstance(label, (list, tuple)) else list(label)
    if len(verifiers) == 1 and len(labels) != 1:
        labels = [label]
    need(len(labels) == len(verifiers), f"{len(labels)} ground truths for {len(verifiers)} verifiers")
    return messages, labels, [v.lower() for v in verifiers]


def asked_by(row: Any) -> dict[str, Any] | None:
    """What a row wants of an environment: its columns tools and env_config; None: nothing."""
    there = ("tools", "env_config") if isinstance(row, dict) else ()
    return {name: row[name] for name in there if row.get(name) is not None} or None


def draw(name: str, rows: list[Any], amount: float | int, seed: int) -> list[Any]:
    """That fraction or number of rows: a fixed subset, in file order, or for a fraction above 1 all again and again.
    Raises ValueError where there are not as many."""
    need(rows != [], f"{name}: no rows")
    count = round(amount * len(rows)) if isinstance(amount, float) else amount
    need(count > 0, f"{name} {amount}: that is no row of {len(rows)}; give a larger fraction or a count")
    there = isinstance(amount, float) or amount <= len(rows)
    need(there, f"{name} {amount}: only {len(rows)} rows; a fraction such as 2.0 repeats them")
    if count < len(rows):
        return [rows[j] for j in sorted(random.Random(seed).sample(range(len(rows)), count))]
    return [rows[j % len(rows)] for j in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("amount", metavar="AMOUNT", type=json.loads)
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGPIPE):  # who reads answers to Ctrl-C, and may have seen enough
        signal.signal(number, signal.SIG_DFL)
    try:
        rows = list(read_rows(args.name, args.split))
        some_ask = any(asked_by(row) for _, row in rows)
        for where, row in draw(args.name, rows, args.amount, args.seed):
            try:
                more = [asked_by(row)] if some_ask else []
                print(json.dumps([where, *parse_row(row), *more], default=str))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    except ValueError as error:
        print(json.dumps(str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
