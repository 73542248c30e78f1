"""Keys and passwords: they come from the environment where they can, and no file of a run has them.

A text `$NAME` in --tool_configs is the environment's variable NAME: the tool gets its value, and files, trackers and
the model's card show `$NAME`; `Bearer $NAME` is one too. What a command line has in plain words is shown as HIDDEN: in
--tool_configs what stands behind names that sound like a secret's, and in addresses user, password, query and fragment.
"""

import json
import os
import re
from typing import Any

HIDDEN = "***"
VARIABLE = re.compile(r"((?:\w+ )?)\$([A-Za-z_]\w*)")
SECRET = re.compile(r"key|token|secret|passw|pwd|auth|credential|cookie|bearer|signature", re.IGNORECASE)
PASSWORD = re.compile(r"passw|pwd|secret|api.?key|pin\b", re.IGNORECASE)  # such a number is not one of tokens
# NAME=value, "name": "value" and "Name: Bearer value" in words of a command
NAMED = rf"(?<![\w-])[\w-]{{0,40}}(?:{SECRET.pattern})[\w-]{{0,40}}"
ASSIGNED = re.compile(rf"({NAMED}[\"']?\s?[:=]\s?[\"']?)(?:bearer |basic )?[^\s\"',&]+", re.IGNORECASE)
USER_OF_URL = re.compile(r"(?<=://)[^/?#\s]*@")
END_OF_URL = re.compile(r"(?<=://)([^?#\s,]{0,500}[?#])[^\s,]*")


def in_url(text: str) -> str:
    """A text in which the addresses have no user, no password, no query and no fragment."""
    text = USER_OF_URL.sub(f"{HIDDEN}@", text)
    return END_OF_URL.sub(rf"\1{HIDDEN}", text)


def in_settings(value: Any, name: str = "") -> Any:
    """A tool's config, or a part of it under a name, without its secrets. `$NAME` stays."""
    if isinstance(value, dict):
        return {key: in_settings(entry, f"{name} {key}") for key, entry in value.items()}
    if isinstance(value, list):
        return in_words(value, name)
    if isinstance(value, int | float) and PASSWORD.search(name):
        return HIDDEN
    if not isinstance(value, str) or VARIABLE.fullmatch(value):
        return value
    if SECRET.search(name):
        return HIDDEN
    return ASSIGNED.sub(rf"\1{HIDDEN}", in_text(value))


def in_words(words: list, name: str) -> list:
    """The same of a list. In a command the word behind --api-key is hidden, and the value in --api-key=value."""
    shown = []
    last = name
    for word in words:
        if isinstance(word, str) and word.startswith("-"):
            flag, equals, value = word.partition("=")
            shown.append(f"{flag}={in_settings(value, flag)}" if equals else word)
            last = name if equals else f"{name} {flag}"
        else:
            shown.append(in_settings(word, last))
            last = name
    return shown


def in_text(text: str) -> str:
    """A value of the command line: JSON of a tool's config, or any other text, which may be an address."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(in_settings(json.loads(text)))
        except (ValueError, RecursionError):
            return in_url(text)
    return in_url(text)


def in_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a run, for its files."""
    shown = {}
    for name, value in flags.items():
        if isinstance(value, str):
            value = in_text(value)
        if isinstance(value, list):
            value = [in_text(entry) if isinstance(entry, str) else entry for entry in value]
        shown[name] = value
    return shown


def in_command(words: list[str]) -> list[str]:
    """A command line, for the files of a run."""
    shown = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--") and equals:
            shown.append(flag + equals + in_text(value))
        else:
            shown.append(in_text(word))
    return shown


def from_environment(value: Any) -> Any:
    """A tool's config with the values of its `$NAME`. Raises ValueError for one that is not set."""
    if isinstance(value, dict):
        return {key: from_environment(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [from_environment(entry) for entry in value]
    found = VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    before, variable = found.groups()
    if variable not in os.environ:
        raise ValueError(f"{value} in --tool_configs is not set: export {variable}")
    return before + os.environ[variable]
