"""The rows of a data set, whatever shape they have: messages, ground truths and verifiers' names.

    open-instruct   {messages, ground_truth, dataset}
    verl            {prompt, data_source, reward_model.ground_truth}
    GSM8K           {question, answer}
    TRL             {prompt, + columns}

scripts/rows.py prints them. A run reads data sets through that program, so that pyarrow, datasets and the rows that are
not drawn never take the trainer's memory.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERL_SOURCES = {"openai/gsm8k": "gsm8k_verl", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math"}
PROMPTS = ("messages", "prompt", "question", "problem")  # columns
ANSWERS = ("answer", "solution", "final_answer")
WITH_MARK = (None, "gsm8k", "gsm8k_strict", "gsm8k_verl")  # verifiers whose label is what follows "####"


def need(condition: bool, message: str) -> None:
    """Raises ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def read_rows(name: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, row) of a data set in file order; `where` names file and row for error messages.

    NAME is a .jsonl or .parquet file, a directory (saved by datasets, or with such files that have the split in their
    name) or a hub dataset (`org/name` or `org/name:config`). Raises ValueError.
    """
    path = Path(name)
    is_file = path.suffix in (".jsonl", ".parquet")
    need(path.exists() or not is_file, f"{name}: no such file")
    is_saved = (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()
    if path.is_dir() and not is_saved:
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
        rows = enumerate(dataset_rows(name, split), start=1)
        name = f"{name} [{split}]"
    for i, row in rows:
        yield f"{name} row {i}", row


def jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, row) of each line that is not blank. `datasets` would cast labels of several types to one."""
    with path.open("rb") as file:
        for i, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield i, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} row {i}: not JSON in UTF-8 ({error})") from None


def dataset_rows(name: str, split: str) -> Any:
    """The rows of a directory that `datasets` saved, or of a hub dataset."""
    import datasets

    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        hub_name, _, config = name.partition(":")
        return datasets.load_dataset(hub_name, config or None, split=split)
    except (OSError, ValueError, KeyError) as error:  # no such name, config or split, or no network
        raise ValueError(
            f"{name} [{split}]: {str(error).strip().splitlines()[0]}. It is no .jsonl, .parquet or directory; a hub "
            "dataset is ORG/NAME or ORG/NAME:CONFIG, with a network to reach it"
        ) from None


def parse_row(row: Any) -> tuple[list[dict[str, str]], list[Any], list[str]]:
    """(messages, ground truths, verifiers' names) of a row. Raises ValueError with the reason."""
    need(isinstance(row, dict), f"a row must be an object, got {type(row).__name__}")
    messages = messages_of(row)
    verifier, label = verifier_and_label(row)
    need(label is not None, f"no ground_truth: columns are {sorted(row)}")
    need(verifier is not None, f"no dataset (the verifier's name): columns are {sorted(row)}")

    verifiers = [verifier]
    labels = [label]
    if isinstance(verifier, (list, tuple)):
        verifiers = list(verifier)
        if isinstance(label, (list, tuple)):
            labels = list(label)
        if len(verifiers) == 1 and len(labels) != 1:
            labels = [label]  # the list is the label
    all_named = all(isinstance(name, str) for name in verifiers)
    need(all_named, f"dataset must be a verifier's name or a list of them, got {verifier!r}")
    need(len(labels) == len(verifiers), f"{len(labels)} ground truths for {len(verifiers)} verifiers")
    return messages, labels, [name.lower() for name in verifiers]


def messages_of(row: dict[str, Any]) -> list[dict[str, str]]:
    """The conversation to answer. A trailing assistant turn is dropped."""
    prompt: Any = first(row.get(name) or None for name in PROMPTS)
    need(prompt is not None, f"no prompt: none of messages, prompt, question, problem in {sorted(row)}")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    is_list = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    need(is_list, "the prompt must be a text or a list of messages {role, content}")
    ends_with_answer = prompt[-1].get("role") == "assistant"
    messages = prompt[:-1] if ends_with_answer else prompt

    problem = "each message needs a role and a text content, and one must not be the assistant's"
    need(messages != [], problem)
    for message in messages:
        content = message.get("content")
        need(isinstance(content, str) and bool(message.get("role")), problem)
        content.encode()  # raises for half a character of UTF-16, which no tokenizer takes
    return messages


def verifier_and_label(row: dict[str, Any]) -> tuple[Any, Any]:
    """(verifier, label) as the columns name them. Each may be a list, or None if no column has it."""
    reward_model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    answer = first(row.get(name) for name in ANSWERS)
    label = first([row.get("ground_truth"), reward_model.get("ground_truth"), answer])
    verifier: Any = row.get("dataset") or row.get("verifier")

    if verifier is None and row.get("instruction_id_list"):
        verifier = "ifeval"
        label = {"instruction_id_list": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    source = row.get("data_source")
    if verifier is None and source:
        need(source in VERL_SOURCES, f"data_source {source!r} names no verifier; known: {sorted(VERL_SOURCES)}")
        verifier = VERL_SOURCES[source]
    if isinstance(label, str) and "####" in label and verifier in WITH_MARK:
        verifier = verifier or "gsm8k"
        label = label.rpartition("####")[2].strip()
    if verifier is None and row.get("solution") is not None:
        verifier = "math"
    return verifier, label


def first(values: Any) -> Any:
    """The first value that is not None. In data sets that were joined, a row has None in columns that its own data set
    lacks."""
    return next((value for value in values if value is not None), None)


def environment_of(row: Any) -> dict[str, Any]:
    """What a row asks of an environment: its columns tools and env_config, if they have a value."""
    columns = ("tools", "env_config") if isinstance(row, dict) else ()
    return {name: row[name] for name in columns if row.get(name) is not None}


def draw(name: str, rows: list[Any], amount: float | int, seed: int) -> list[Any]:
    """A fixed subset of the rows, in file order. An int is their number; a float is the fraction, above 1 with
    repetitions. Raises ValueError if there are fewer."""
    need(rows != [], f"{name}: no rows")
    size = len(rows)
    if isinstance(amount, float):
        count = round(amount * size)
        need(count > 0, f"{name} {amount}: that is no row of {size}; give a larger fraction or a count")
    else:
        count = amount
        need(count <= size, f"{name} {amount}: only {size} rows; a fraction such as 2.0 repeats them")
    if count >= size:
        return [rows[i % size] for i in range(count)]
    chosen = random.Random(seed).sample(range(size), count)
    return [rows[i] for i in sorted(chosen)]


def drawn_rows(name: str, amount: float | int, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """The fields of utils.Row of each row that NAME AMOUNT takes. Raises ValueError."""
    rows = list(read_rows(name, split))
    some_ask_for_turns = any(environment_of(row) for _, row in rows)
    for where, row in draw(name, rows, amount, seed):
        try:
            messages, ground_truths, verifiers = parse_row(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        columns = environment_of(row)
        yield {
            "where": where,
            "messages": messages,
            "ground_truths": ground_truths,
            "verifiers": verifiers,
            "columns": columns,
            "has_turns": columns != {} or not some_ask_for_turns,
        }
