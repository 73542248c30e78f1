"""Linter, formatter and type checker find nothing in the repository. Their settings are in pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_files_keep_to_their_budget():
    """Lines of the files that people read, beside what CONTRIBUTING.md allows."""
    (told,) = re.findall(r"fails above: (.*?)\. They are to fall", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    most = {name: int(lines.replace(",", "")) for name, lines in re.findall(r"([\w/]+\.py) ([\d,]*\d)", told)}
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in most}
    sizes = ", ".join(f"{name} {lines[name]} of {most[name]}" for name in most)
    print(sizes)
    assert {path.name for path in ROOT.glob("*.py")} < most.keys()
    assert all(lines[name] <= most[name] for name in most), sizes
