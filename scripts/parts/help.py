"""What --help prints: a panel for each class of flags, the algorithm's first. --help WORD or --help --WORD:
only the flags with WORD."""

import contextlib
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from typing import Any

import tyro


def show(cls: Any, tokens: Sequence[str]) -> None:
    """Print the help that a command line asks for, and end the process with status 0."""
    word = word_of(tokens)
    if word:
        text = io.StringIO()  # tyro draws no frames around its panels here
        with contextlib.redirect_stdout(text):
            print_help(cls)
        flags = flags_with(word, text.getvalue())
        print(flags or f"No flag has {word!r} in its name or text: --help without a word shows all flags.")
    else:
        print_help(cls)
    raise SystemExit(0)


def word_of(tokens: Sequence[str]) -> str:
    """The word behind --help or -h, without the dashes of a flag; "" for none."""
    flag = "--help" if "--help" in tokens else "-h"
    after = tokens[tokens.index(flag) + 1 :]
    if not after:
        return ""
    return after[0].lstrip("-")


def print_help(cls: Any) -> None:
    """Print all flags of a dataclass with tyro, which makes a panel of each nested dataclass."""
    panels = []
    for base in cls.__mro__:
        if not is_dataclass(base) or any(map(is_dataclass, base.__bases__)):
            continue
        values = {flag.name: default_of(flag) for flag in fields(base)}
        panel = field(default_factory=functools.partial(base, **values))
        panels.append((base.__name__, base, panel))
    nested = make_dataclass(cls.__name__, panels, namespace={"__doc__": cls.__doc__})
    with contextlib.suppress(SystemExit):
        tyro.cli(nested, args=["--help"], use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))


def default_of(flag: Field) -> Any:
    """The default of a flag, or tyro's mark for one that must be given."""
    if flag.default_factory is not MISSING:
        return flag.default_factory()
    return tyro.MISSING if flag.default is MISSING else flag.default


def flags_with(word: str, text: str) -> str:
    """The part of the help `text` about flags that have the word, in any case, in their name or text. The name of their
    class comes first. "" if no flag has it."""
    shown = []
    panels = re.split(r"^ (?=\w+ options)", text, flags=re.MULTILINE)[1:]
    for panel in panels:
        title, *flags = re.split(r"^  (?=--\w)", panel, flags=re.MULTILINE)
        matching = [flag for flag in flags if word.lower() in " ".join(flag.split()).lower()]
        if matching:
            class_name = title.split()[0]
            shown += [class_name, *matching]
    lines = [line.rstrip() for line in "\n".join(shown).splitlines()]
    return "\n".join(line for line in lines if line)
