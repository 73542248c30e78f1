"""Linter, formatter and type checker find nothing in the repository. Their settings are in pyproject.toml."""

import ast
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
    over = [name for name in most if lines[name] > most[name]]
    assert not over, f"{sizes}: delete as many lines of {', '.join(over)}, or in a fork raise CONTRIBUTING.md's figure"


def test_functions_fit_on_a_screen():
    """60 lines at most, but for the two loops, which read top to bottom."""
    long = {}
    for path in sorted(ROOT.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                if (lines := node.end_lineno - node.lineno + 1) > 60:
                    long[f"{path.name}: {node.name}"] = lines
    assert long.keys() <= {"grpo.py: main", "grpo_fast.py: run_learner"}, long


def test_no_two_files_of_tests_have_the_same_name():
    """Each is a module of that name alone: pytest collects nothing at all of a folder with the second one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 30 and sorted(names) == sorted(set(names))
