"""Linter, formatter and type checker find nothing in the repository. Their settings are in pyproject.toml."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ruler

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "ty check"])
def test_tool_finds_nothing(command):
    tool, *arguments = command.split()
    arguments += ["--python", sys.prefix] if tool == "ty" else []  # the environment that runs the tests
    places = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which(tool, path=places)
    assert program, f"{tool} is neither beside {sys.executable} nor on PATH: bash scripts/setup.sh installs it"
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{command}\n{done.stdout}{done.stderr}", pytrace=False)


def test_tokens_and_density_only_fall():
    """Tokens and density of the four and of the parts, as tests/ruler.py counts them, beside tests/ruler.json."""
    ratchet = json.loads(ruler.RATCHET.read_text())
    rows = ruler.table()
    ruler.show(rows)
    missing = [name for name in rows if name not in ratchet]
    assert not missing, f"new files: python -m tests.ruler --lower takes {missing} into tests/ruler.json"
    risen = [
        f"{name}: {column} {row[column]}, at most {ratchet[name][column]}"
        for name, row in rows.items()
        for column in ruler.limited(name)
        if row[column] > ratchet[name][column]
    ]
    assert not risen, "; ".join(risen) + ": pay with deletions, unpack, or in a fork raise tests/ruler.json"
