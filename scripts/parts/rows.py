"""The rows of a data set, whatever shape they have: messages, ground truths and verifiers' names.

    open-instruct   {messages, ground_truth, dataset}
    verl            {prompt, data_source, reward_model.ground_truth}
    GSM8K           {question, answer}
    TRL             {prompt, + columns}

scripts/rows.py prints them. A run reads data sets through that program, so that pyarrow, datasets and the rows that are
not drawn never take the trainer's memory.
"""

import csv
import gzip
import io
import json
import random
import re
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards import need
from scripts.parts.checks import ending_of, problem_of_data

VERL_SOURCES = {"openai/gsm8k": "gsm8k_verl", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math"}
PROMPTS = ("messages", "prompt", "question", "problem")  # columns
ANSWERS = ("answer", "solution", "final_answer")
WORDS_OF_PROSE = 5
WITH_MARK = (None, "gsm8k", "gsm8k_strict", "gsm8k_verl")  # verifiers whose label is what follows "####"
ALL_COLUMNS = "*"


@dataclass(frozen=True)
class Scoring:
    """Who scores the rows that name no verifier, and what it reads of a row."""

    functions: tuple[str, ...] = ()  # of --reward_file: all of them do
    aliases: tuple[str, ...] = ()  # names that --remap_verifier gives to one of them
    columns: tuple[str, ...] = ()  # that the functions take
    environment: bool = False  # whether one answers the policy: it may score alone


NOTHING_OF_ONES_OWN = Scoring()


def read_rows(name: str, split: str, commit: str = "") -> Iterator[tuple[str, Any]]:
    """(where, row) of a data set in file order; `where` names file and row for error messages.

    NAME is a file with one of the ENDINGS, perhaps compressed, a directory (saved by datasets, or with files that
    datasets takes for the split) or a hub dataset (`org/name` or `org/name:config`) at this `commit`, or that of its
    main. Raises ValueError.
    """
    problem = problem_of_data(name)
    need(not problem, f"{name}: {problem}")
    path = Path(name)
    config = ""
    if not path.exists():
        place, _, config = name.partition(":")
        path = Path(place)
    if not path.exists():
        from scripts.parts import hub

        path = hub.data_set(place, commit)
    files = files_of_split(path, config, split) if path.is_dir() and not is_saved(path) else [path]
    for file in files:
        if not ending_of(file):
            yield from dataset_rows(path, config, split)
            return
        try:
            for i, row in rows_of_file(file):
                yield f"{file} row {i}", row
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{file}: damaged, or cut off ({error})") from None


def is_saved(directory: Path) -> bool:
    """Whether save_to_disk of `datasets` wrote a directory."""
    return any((directory / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))


def files_of_split(directory: Path, config: str, split: str) -> list[Path]:
    """The files that `datasets` takes for a split of a directory: by their names, by a README's, or all for train."""
    import datasets

    try:
        with tempfile.TemporaryDirectory() as cache:  # for a lock
            builder = datasets.load_dataset_builder(str(directory), config or None, cache_dir=cache)
    except (OSError, ValueError) as error:  # no file of rows, or several configurations
        raise ValueError(f"{directory}: {' '.join(str(error).split())}") from None
    files = builder.config.data_files or {}
    there = ", ".join(map(str, files))
    need(split in files, f"{directory}: no file is of the split {split!r}, as datasets names them. It has {there}")
    paths = [Path(file) for file in files[split]]
    return [path for path in paths if ending_of(path)] or paths  # datasets takes a.jsonl.sha256 for JSON too


def rows_of_file(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, row) of each row of a file with one of the ENDINGS, as they stand in the file: `datasets` would cast the
    labels of a column to one type, and give a row keys that others have."""
    read = {".jsonl": jsonl_rows, ".csv": csv_rows, ".json": json_rows, ".parquet": parquet_rows}
    ending = ending_of(path)
    return read[ending](path)


def open_file(path: Path) -> Any:
    """The content of a file, without its compression."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.open(path))
    return path.open("rb")


def parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, row) of each row."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
    return enumerate(rows, start=1)


def jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, row) of each line that is not blank."""
    with open_file(path) as file:
        for i, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield i, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} row {i}: not JSON in UTF-8 ({error})") from None


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, row) of a list of rows, or of a file with an object a line, which `datasets` too names .json."""
    try:
        with open_file(path) as file:
            content = json.load(file)
    except ValueError:
        return jsonl_rows(path)
    is_row = isinstance(content, dict) and any(isinstance(content.get(name), (str, list)) for name in PROMPTS)
    if is_row:
        content = [content]  # a single line
    need(isinstance(content, list), f"{path}: neither a list of rows nor an object a line")
    return enumerate(content, start=1)


def csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, row) of each row under the line of names. Every cell is a text, an empty one is None."""
    csv.field_size_limit(2**31 - 1)
    with open_file(path) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file:
        try:
            for i, row in enumerate(csv.DictReader(file), start=1):
                need(None not in row, f"{path} row {i}: more cells than the first line has names")
                yield i, {name: value or None for name, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not CSV in UTF-8 ({error})") from None


def dataset_rows(directory: Path, config: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, row) of a directory that `datasets` saved, or of another that it alone reads."""
    import datasets.exceptions

    try:
        if is_saved(directory):
            loaded = datasets.load_from_disk(str(directory))
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(str(directory), config or None, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{directory} [{split}]: {' '.join(str(error).split())}") from None
    for i, row in enumerate(rows, start=1):
        yield f"{directory} [{split}] row {i}", row


def parse_row(row: Any, scoring: Scoring = NOTHING_OF_ONES_OWN) -> tuple[list[dict[str, str]], list[Any], list[str]]:
    """(messages, ground truths, verifiers' names) of a row. Raises ValueError with the reason.

    Where a function of one's own or an environment scores a row, the row needs no label: the ground truth is None.
    """
    need(isinstance(row, dict), f"a row must be an object, got {type(row).__name__}")
    messages = messages_of(row)
    verifier, label = verifier_and_label(row, scoring)
    if verifier is None:
        verifier, label = scorers_of_ones_own(label, scoring)
    own = {*scoring.functions, *scoring.aliases, "passthrough"}
    names = verifier if isinstance(verifier, (list, tuple)) else [verifier]
    has_own = verifier is not None and all(str(name).lower() in own for name in names)
    need(label is not None or has_own, f"no ground_truth: columns are {sorted(row)}")
    fix = "or score with a function of your own: --reward_file of grpo.py"
    need(verifier is not None, f"no dataset (the verifier's name): columns are {sorted(row)}; add it, {fix}")

    verifiers = [verifier]
    labels = [label]
    if isinstance(verifier, (list, tuple)):
        verifiers = list(verifier)
        if isinstance(label, (list, tuple)):
            labels = list(label)
        if label is None:
            labels = [None] * len(verifiers)
        if len(verifiers) == 1 and len(labels) != 1:
            labels = [label]  # the list is the label
    all_named = all(isinstance(name, str) for name in verifiers)
    need(all_named, f"dataset must be a verifier's name or a list of them, got {verifier!r}")
    need(len(labels) == len(verifiers), f"{len(labels)} ground truths for {len(verifiers)} verifiers")
    return messages, labels, [name.lower() for name in verifiers]


def scorers_of_ones_own(label: Any, scoring: Scoring) -> tuple[Any, Any]:
    """(verifiers, labels) of a row that names no verifier: each function of --reward_file, or an environment alone."""
    if scoring.functions:
        return list(scoring.functions), [label] * len(scoring.functions)
    return ("passthrough" if scoring.environment else None), label


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
    messages = [message | {"content": text_of(message.get("content"))} for message in messages]
    for message in messages:
        content = message["content"]
        need(isinstance(content, str) and bool(message.get("role")), problem)
        content.encode()  # raises for half a character of UTF-16, which no tokenizer takes
    return messages


def text_of(content: Any) -> Any:
    """The text of a message's content: where it is a list of parts {type: text, text}, they follow one another."""
    is_parts = isinstance(content, list) and content != [] and all(isinstance(part, dict) for part in content)
    if is_parts and all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return content


def verifier_and_label(row: dict[str, Any], scoring: Scoring) -> tuple[Any, Any]:
    """(verifier, label) as the columns name them. Each may be a list, or None if no column has it. With functions of
    one's own only a verifier that is named counts, and none that the row's shape suggests."""
    reward_model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    answer = first(row.get(name) for name in ANSWERS)
    label = first([row.get("ground_truth"), reward_model.get("ground_truth"), answer])
    verifier: Any = row.get("dataset") or row.get("verifier")
    source = row.get("data_source") or None
    need(source is None or isinstance(source, str), f"data_source must be a text, got {type(source).__name__}")
    if verifier is None and str(source).lower() in scoring.aliases:
        verifier = source
    if verifier is None and scoring.functions:
        return None, label

    if verifier is None and row.get("instruction_id_list"):
        verifier = "ifeval"
        label = {"instruction_id_list": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    if verifier is None and source is not None:
        verifier = VERL_SOURCES.get(source, source)  # of an unknown one: see --remap_verifier
    if isinstance(label, str) and "####" in label and verifier in WITH_MARK:
        verifier = verifier or "gsm8k"
        label = label.rpartition("####")[2].strip()
    if verifier is None and row.get("solution") is not None:
        verifier = "math"
    if verifier in ("math", "strict_math") and label is row.get("solution"):
        need(not is_prose(label), f"its solution is prose without a \\boxed{{answer}}: {str(label)[:80]!r}")
    return verifier, label


def is_prose(solution: Any) -> bool:
    """Whether a solution is sentences without a box, which no answer equals."""
    text = str(solution)
    words = re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", text)
    return "\\boxed" not in text and "\\fbox" not in text and len(words) >= WORDS_OF_PROSE


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


def columns_for_rewards(row: dict[str, Any], messages: Any, scoring: Scoring) -> dict[str, Any]:
    """The columns of a row that functions of --reward_file take. Every row has a `prompt` for them."""
    columns = {"prompt": messages} | row
    if ALL_COLUMNS in scoring.columns:
        return columns
    return {name: value for name, value in columns.items() if name in scoring.columns}


def drawn_rows(
    name: str, amount: float | int, split: str, seed: int, scoring: Scoring = NOTHING_OF_ONES_OWN, commit: str = ""
) -> Iterator[dict[str, Any]]:
    """The fields of utils.Row of each row that NAME AMOUNT takes. One that cannot be used has a `problem`. Raises
    ValueError for a data set that cannot be read."""
    some_ask_for_turns = any(environment_of(row) for _, row in read_rows(name, split, commit))
    rows: Any = read_rows(name, split, commit)
    if not isinstance(amount, float) or amount != 1:  # otherwise no row is kept in memory
        rows = draw(name, list(rows), amount, seed)
    is_empty = True
    for where, row in rows:
        is_empty = False
        try:
            fields = fields_of(row, scoring)
        except ValueError as error:
            nothing: Any = {"messages": [], "ground_truths": [], "verifiers": []}
            yield nothing | {"where": where, "problem": str(error)}
            continue
        has_turns = fields["columns"] != {} or not some_ask_for_turns
        yield fields | {"where": where, "has_turns": has_turns}
    need(not is_empty, f"{name}: no rows")


def fields_of(row: Any, scoring: Scoring) -> dict[str, Any]:
    """The fields of utils.Row that a row has by itself. Raises ValueError."""
    messages, ground_truths, verifiers = parse_row(row, scoring)
    return {
        "messages": messages,
        "ground_truths": ground_truths,
        "verifiers": verifiers,
        "columns": environment_of(row),
        "reward_columns": columns_for_rewards(row, messages, scoring),
    }


def options(args: Any) -> list[str]:
    """What a run tells the program scripts/rows.py of its flags, so that it knows the run's Scoring."""
    words = []
    if args.reward_file:
        import rewards
        from scripts.parts import user_files

        functions = user_files.FUNCTIONS
        audits = args.audit_verifier.lower()
        scorers = [name for name in functions if name != audits]
        aliases = [old for old, new in rewards.SETTINGS.renamed.items() if new in functions]
        columns = sorted({column for function in functions.values() for column in function.columns})
        words = ["--functions", *scorers, "--aliases", *aliases, "--columns", *columns]
    if args.has_turns:
        words.append("--environment")
    return words
