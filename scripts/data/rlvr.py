"""A mix of datasets in open-instruct's shape as one train.jsonl: the RLVR mixes of Tulu 3 and OLMo 3.

    python scripts/data/rlvr.py --dataset_mixer_list NAME AMOUNT [NAME AMOUNT ...] [--out data/rlvr] [--seed 1]

NAME is a hub dataset (`org/name` or `org/name:config`), a .jsonl or .parquet file or a directory; AMOUNT a fraction
(1.0) or a number of rows (20000), as in grpo.py. Rows keep their verifiers, with two changes: names are in lower case,
and the older form of instruction labels (func_name, of RLVR-IFeval and the Tulu 3 mix) becomes IFEval's. Rows without a
prompt, a label or a verifier, or with a constraint that IFEval lacks, are dropped, and counted by reason.
"""

import collections
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils
from scripts.data import prepare as data
from scripts.parts.rows import draw, parse_row


class Function(NamedTuple):
    """What func_name is in IFEval (arXiv:2311.07911 has the constraints)."""

    constraint: str
    arguments: dict[str, str]  # the constraint's -> those of the older form


def read_functions() -> dict[str, Function]:
    """func_name -> constraint, from rlvr_functions.tsv."""
    functions = {}
    for line in Path(__file__).with_name("rlvr_functions.tsv").read_text().splitlines()[1:]:
        name, constraint, arguments = line.split("\t")
        pairs = [pair.split("=") for pair in arguments.split() if "=" in pair]
        functions[name] = Function(constraint, {new: old for new, old in pairs})
    return functions


FUNCTIONS = read_functions()


def ifeval_label(label: str) -> str:
    """An instruction label of the older form in IFEval's; any other is returned as it is.

    "at most N" is "less than N + 1". Raises ValueError for what IFEval does not have, such as "around N".
    """
    try:
        old = json.loads(label)
    except ValueError:
        return label
    if not isinstance(old, dict) or "func_name" not in old:
        return label
    if old["func_name"] not in FUNCTIONS:
        raise ValueError(f"no constraint of IFEval is {old['func_name']}")
    constraint, arguments = FUNCTIONS[old["func_name"]]
    kwargs = {}
    for new, name in arguments.items():
        value = old.get(name)
        if name == "quantifier" and value not in ("at least", "at most", "less than"):
            raise ValueError(f"no relation of IFEval is {value!r}")
        if name == "quantifier" and value == "at most":
            value = "less than"
        elif name == "N" and "quantifier" in arguments.values() and old.get("quantifier") == "at most":
            value = int(value) + 1
        kwargs[new] = value
    return json.dumps([{"instruction_id": [constraint], "kwargs": [kwargs]}])


def rlvr_row(row: dict) -> dict:
    """A row of any shape that the loader reads, in that of prepare.py. Raises ValueError for what is none."""
    messages, labels, verifiers = parse_row(row)
    labels = list(labels)
    for i, verifier in enumerate(verifiers):
        if verifier == "ifeval":
            labels[i] = ifeval_label(data.text_of(labels[i]))
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    return data.make_row(messages, labels, verifiers)


def read(name: str) -> list[dict]:
    """The rows of a data set; prints how many are dropped and why."""
    rows = []
    dropped: collections.Counter[str] = collections.Counter()
    for _, row in data.read_rows(name, "train"):
        try:
            rows.append(rlvr_row(row))
        except ValueError as error:
            dropped[str(error)[:100]] += 1
    for reason, count in dropped.most_common():
        print(f"{name}: {count} rows dropped: {reason}")
    return rows


def main() -> None:
    parser = data.parser(__doc__, "data/rlvr")
    parser.add_argument("--dataset_mixer_list", nargs="+", required=True, metavar="NAME AMOUNT")
    parser.add_argument("--seed", type=int, default=1, help="of the draw and the order")
    args = parser.parse_args()
    mixed: list[dict] = []
    try:
        for name, amount in utils.parse_mixer("dataset_mixer_list", args.dataset_mixer_list):
            mixed += draw(name, read(name), amount, args.seed)
    except ValueError as error:
        sys.exit(str(error))
    rng = random.Random(args.seed)
    rng.shuffle(mixed)

    counts: collections.Counter[str] = collections.Counter()
    for row in mixed:
        counts.update(parse_row(row)[2])
    print("verifiers: " + ", ".join(f"{verifier} {count}" for verifier, count in counts.most_common()))
    data.write(mixed, args.out / "train.jsonl")


if __name__ == "__main__":
    main()
