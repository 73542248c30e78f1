"""Turn a command line of open-instruct's GRPO into ours. scripts/train/open_instruct.tsv has the kind of each flag:

alias      one of our flags has its meaning
same       every run here already does what it asks for
ignored    it needs nothing here
missing    nothing here does what it asks for, so the run would be another one

Names of TRL's and verl's flags are refused, with ours: scripts/train/other_names.tsv.
"""

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "train" / "open_instruct.tsv"  # flag or flag=value, kind, words
OTHER_NAMES = TABLE.with_name("other_names.tsv")  # flag, project, ours
OF_VERL = re.compile(r"\+?(actor_rollout_ref|algorithm|critic|data|trainer)(\.\w+)*\.(?P<flag>\w+)=")
CLOSE = 0.9  # of a name of open-instruct's: below it, only our own names are given for one that nobody knows


@dataclass
class Translation:
    """A command line of our flags alone, and the other flags that it had, by (kind, words)."""

    line: list[str] = field(default_factory=list)
    others: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def text(self) -> str:
        """What became of the other flags, for a person."""
        rows = [f"  {kind:8} {' '.join(flags)}: {words}" for (kind, words), flags in sorted(self.others.items())]
        return "\n".join(["open-instruct's flags:", *rows])

    def missing(self) -> str:
        """The flags without which a run would be another one, each with the reason."""
        rows = [(flags, words) for (kind, words), flags in self.others.items() if kind == "missing"]
        return "; ".join(f"{' '.join(flags)}: {words}" for flags, words in rows)


def names_of(cls: type) -> set[str]:
    """The flags of a dataclass, as they are typed."""
    negated = {f"no_{flag.name}" for flag in fields(cls) if flag.type is bool}
    return {flag.name for flag in fields(cls)} | negated


def read_table() -> dict[str, tuple[str, str]]:
    """flag or flag=value -> (kind, words)"""
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return {flag: (kind, words) for flag, kind, words in rows}


def read_other_names() -> dict[str, tuple[str, str]]:
    """A name of TRL's or verl's -> (whose it is, what does the same here)"""
    rows = [line.split("\t") for line in OTHER_NAMES.read_text().splitlines()[1:]]
    return {flag: (project, ours) for flag, project, ours in rows}


def tell_override(token: str) -> str:
    """A sentence on one of verl's flags, which have the form a.b.c=value; "" for any other token."""
    override = OF_VERL.match(token)
    if not override:
        return ""
    _, ours = read_other_names().get(override["flag"], ("", "a flag of the form --name value: see --help WORD"))
    return f"{token}: this is verl's form; here it is {ours}"


def tell_unknown(name: str, known: set[str], translated: set[str]) -> str:
    """A sentence on a flag that is neither one of ours, `known`, nor one of open-instruct's, `translated`."""
    other_names = read_other_names()
    if name in other_names:
        project, ours = other_names[name]
        return f"--{name}: a name of {project}; here it is {ours}"
    close = difflib.get_close_matches(name, sorted(translated), 1, CLOSE)
    nearest = close or difflib.get_close_matches(name, sorted(known), 1, 0)
    return f"--{name}: no such flag; the nearest is --{nearest[0]}"


def split(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A command line as (flag, values); values before the first flag have the flag ""."""
    line: list[tuple[str, list[str]]] = []
    for token in tokens:
        if token.startswith("--"):
            name, equals, value = token.removeprefix("--").partition("=")
            line.append((name.replace("-", "_"), [value] if equals else []))
        elif line:
            line[-1][1].append(token)
        else:
            line.append(("", [token]))
    return line


def translate(argv: Sequence[str], known: set[str]) -> Translation:
    """Translate a command line for a script with the `known` flags. If a flag or the value of a yes/no flag is unknown,
    stderr says so, with the nearest name, and the process ends with exit status 2."""
    table = read_table()
    names = known | {key.partition("=")[0] for key in table}
    done = Translation()
    overrides = {token: tell_override(token) for token in argv}
    problems = [sentence for sentence in overrides.values() if sentence]
    waiting = split([token for token in argv if not overrides[token]])
    while waiting:
        name, values = waiting.pop(0)
        is_negated = name not in names  # then --no_x is x with the value false
        flag = name.removeprefix("no_") if is_negated else name
        text = "false" if is_negated else " ".join(values) or "true"
        with_value = f"{flag}={text.lower()}"
        kind, words = table.get(with_value) or table.get(flag) or ("", "")
        is_switch = {name, f"no_{name}"} <= known

        if kind:
            if kind == "alias":
                ours = replacement(words, values or [text])
                waiting = split(ours) + waiting
                words = " ".join(ours)
            shows_value = not is_negated and (kind == "alias" or with_value in table)
            shown = f"--{name} {text}" if shows_value else f"--{name}"
            done.others.setdefault((kind, words), []).append(shown)
        elif is_switch and text.lower() == "false":
            done.line.append(f"--no_{name}")
        elif is_switch and text.lower() == "true":
            done.line.append(f"--{name}")
        elif is_switch:
            problems.append(f"--{name} {text}: a yes/no flag takes true, false or nothing")
        elif name in known or name.startswith("tyro_") or not name:
            done.line += own_form(name, values)
        else:
            problems.append(tell_unknown(name, known, names))
    if problems:
        print("\n".join(problems), file=sys.stderr)
        raise SystemExit(2)
    return done


def replacement(words: str, values: list[str]) -> list[str]:
    """The flags that stand in place of an alias: `{}` is its values."""
    tokens = []
    for word in words.split():
        tokens += values if word == "{}" else [word]
    return tokens


def own_form(name: str, values: list[str]) -> list[str]:
    """A flag of ours as the parser takes it. A value that begins with a dash needs an equals sign."""
    if len(values) == 1 and values[0].startswith("-"):
        return [f"--{name}={values[0]}"]
    return [f"--{name}", *values] if name else values
