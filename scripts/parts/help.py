"""What --help prints: a panel for each class of flags, the algorithm's first. --help WORD: only the flags with WORD."""

import contextlib
import functools
import io
import re
from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any

import tyro


def show(cls: Any, tokens: Sequence[str]) -> None:
    """Print the help that a command line asks for, and end the process with status 0."""
    word = word_of(tokens)
    if not word:
        print_help(cls)
        raise SystemExit(0)
    text = io.StringIO()  # for which tyro draws panels without frames
    with contextlib.redirect_stdout(text):
        print_help(cls)
    found = flags_with(word, text.getvalue())
    print(found or f"No flag has {word!r} in its name or text: --help without a word shows all flags.")
    raise SystemExit(0)


def word_of(tokens: Sequence[str]) -> str:
    """The word behind --help or -h; "" for none."""
    position = next(i for i, token in enumerate(tokens) if token in ("-h", "--help"))
    following = "".join(tokens[position + 1 : position + 2])
    return "" if following.startswith("-") else following


def print_help(cls: Any) -> None:
    """Print all flags of a dataclass with tyro, which makes a panel of each nested dataclass."""
    bases = [base for base in cls.__mro__ if is_dataclass(base) and not any(map(is_dataclass, base.__bases__))]
    panels = []
    for base in bases:
        defaults = {flag.name: getattr(cls(), flag.name) for flag in fields(base)}
        panels.append((base.__name__, base, field(default_factory=functools.partial(base, **defaults))))
    nested = make_dataclass(cls.__name__, panels, namespace={"__doc__": cls.__doc__})
    with contextlib.suppress(SystemExit):
        tyro.cli(nested, args=["--help"], use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))


def flags_with(word: str, text: str) -> str:
    """Of the help's flags those that have the word, in any case, in their name or text, below the names of their
    classes; "" if there are none."""
    shown = []
    for panel in re.split(r"^ (?=\w+ options)", text, flags=re.MULTILINE)[1:]:
        title, *flags = re.split(r"^  (?=--\w)", panel, flags=re.MULTILINE)
        found = [flag for flag in flags if has_word(flag, word)]
        if found:
            shown += [title.split()[0], *found]
    lines = [line.rstrip() for line in "\n".join(shown).splitlines()]
    return "\n".join(line for line in lines if line)


def has_word(flag: str, word: str) -> bool:
    """Whether a flag's name or text has the word."""
    heading, *text = flag.splitlines()
    names = [name for name in heading.split() if name.startswith("--")]
    words = " ".join([*names, *text]).split()
    return word.lower() in " ".join(words).lower()
