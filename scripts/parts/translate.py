"""Turn a command line of open-instruct's GRPO into ours. scripts/train/open_instruct.tsv has the kind of each flag:

alias      one of our flags has its meaning
same       every run here already does what it asks for
ignored    it needs nothing here
missing    nothing here does what it asks for, so the run would be another one
"""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "train" / "open_instruct.tsv"  # flag or flag=value, kind, words
Table = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Given:
    """A flag of a command line and its values; or, with name "", a value that belongs to no flag."""

    token: str  # --flag, or --flag=value
    name: str
    values: list[str]


@dataclass
class Translation:
    """A command line of our flags alone, and the other flags by (kind, words)."""

    line: list[str] = field(default_factory=list)
    others: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """What became of the other flags, for a person; "" if there were none."""
        if not self.others:
            return ""
        rows = [f"  {kind:8} {' '.join(flags)}: {words}" for (kind, words), flags in sorted(self.others.items())]
        return "\n".join(["open-instruct's flags:", *rows])

    def missing(self) -> str:
        """The flags without which a run would be another one, each with the reason."""
        flags_and_words = [(flags, words) for (kind, words), flags in self.others.items() if kind == "missing"]
        return "; ".join(f"{' '.join(flags)}: {words}" for flags, words in flags_and_words)


def names_of(cls: type) -> set[str]:
    """The flags of a dataclass, as they are typed."""
    names = {flag.name for flag in fields(cls)}
    negated = {f"no_{flag.name}" for flag in fields(cls) if flag.type is bool}
    return names | negated | {"help"}


def read_table() -> Table:
    """flag or flag=value -> (kind, words)"""
    table = {}
    for line in TABLE.read_text().splitlines()[1:]:
        flag, kind, words = line.split("\t")
        table[flag] = (kind, words)
    return table


def split(tokens: Sequence[str]) -> list[Given]:
    """A command line, flag by flag."""
    line: list[Given] = []
    for token in tokens:
        if token.startswith("--"):
            name, equals, value = token.partition("=")
            name = name.removeprefix("--").replace("-", "_")
            line.append(Given(token, name, [value] if equals else []))
        elif line and line[-1].name and "=" not in line[-1].token:
            line[-1].values.append(token)
        else:
            line.append(Given(token, "", []))
    return line


def translate(argv: Sequence[str], known: set[str]) -> Translation:
    """Translate a command line for a script with the `known` flags. If nobody knows a flag, stderr has the nearest name
    and the process ends with exit status 2."""
    table = read_table()
    names = known | {key.partition("=")[0] for key in table}
    done = Translation()
    problems = []
    waiting = split(argv)
    while waiting:
        given = waiting.pop(0)
        key = find_row(given, table, names)
        if key is not None:
            waiting = replace_flag(given, key, table, done) + waiting
        elif given.name in known or given.name == "" or given.name.startswith("tyro_"):
            try:
                done.line += own_form(given, known)
            except ValueError as error:
                problems.append(str(error))
        else:
            nearest = difflib.get_close_matches(given.name, sorted(names), 1, 0)[0]
            problems.append(f"--{given.name}: no such flag; the nearest is --{nearest}")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        raise SystemExit(2)
    return done


def text_of(given: Given, names: set[str]) -> tuple[str, str]:
    """The flag's name and its value as the table has them: `--no_x` is x with the value false."""
    if given.name in names:
        return given.name, " ".join(given.values) or "true"
    return given.name.removeprefix("no_"), "false"


def find_row(given: Given, table: Table, names: set[str]) -> str | None:
    """The table's key for a flag with its value, or else for the flag with any value."""
    name, text = text_of(given, names)
    for key in (f"{name}={text.lower()}", name):
        if key in table:
            return key
    return None


def replace_flag(given: Given, key: str, table: Table, done: Translation) -> list[Given]:
    """Note what becomes of a flag, and return the flags that stand in its place."""
    kind, words = table[key]
    name, text = text_of(given, {key.partition("=")[0]})
    instead = []
    if kind == "alias":
        for word in words.split():
            instead += (given.values or [text]) if word == "{}" else [word]
        words = " ".join(instead)
    shown = f"--{given.name}"
    if name == given.name and (kind == "alias" or "=" in key):
        shown += f" {text}"
    done.others.setdefault((kind, words), []).append(shown)
    return split(instead)


def own_form(given: Given, known: set[str]) -> list[str]:
    """A flag of ours as the parser takes it: --flag true is --flag, --flag false is --no_flag."""
    has_equals = "=" in given.token
    value = given.values[0].lower() if given.values else ""
    is_switch = {given.name, f"no_{given.name}"} <= known
    if is_switch and value == "true":
        return [f"--{given.name}", *given.values[1:]]
    if is_switch and value == "false":
        return [f"--no_{given.name}", *given.values[1:]]
    if is_switch and has_equals:
        raise ValueError(f"--{given.name} {value}: a yes/no flag takes true, false or nothing")
    return [given.token] if has_equals else [given.token, *given.values]
