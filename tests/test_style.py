"""Linter, formatter and type checker find nothing in the repository. Their settings are in pyproject.toml."""

import ast
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


def test_ruler_counts_statements_and_not_lines(tmp_path, monkeypatch):
    """Joined and broken lines count the same; a docstring, an import and a flag count nothing."""
    monkeypatch.setattr(ruler, "ROOT", tmp_path)
    loose, packed = tmp_path / "loose.py", tmp_path / "packed.py"
    loose.write_text("import os\n\ndef f(a):\n    '''Words.'''\n    b = [\n        a,\n    ]\n    return b\n")
    packed.write_text("def f(a):\n    b = [a,]\n    return b\n")
    assert ruler.row_of([loose])["tokens"] == ruler.row_of([packed])["tokens"]
    flags = tmp_path / "flags.py"
    flags.write_text("class AFlags:\n    x: int = 1\n    '''Words.'''\n")
    assert ruler.row_of([flags])["tokens"] == 3
    pairs = tmp_path / "pairs.py"
    pairs.write_text("a, b = 1, 2\nprint(c := 3)\n")
    assert ruler.row_of([pairs])["parallel"] == ruler.row_of([pairs])["walrus"] == 500.0
    dense = tmp_path / "dense.py"
    dense.write_text("def f(x):\n" + "    x = [(a + b, c) for a, b, c in x if a and b and c]\n" * 5)
    assert ruler.row_of([dense])["dense"] == 1


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
