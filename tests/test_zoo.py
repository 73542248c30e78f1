"""Each diff of tests/zoo is a bug of other systems that ended no run there. Put into a copy of the tree, it fails the
test that tests/README.md names beside it. Without it that test passes."""

import itertools
import os
import re
import shutil
import subprocess

import pytest

from tests import programs
from tests.conftest import REPO

ZOO = REPO / "tests" / "zoo"
ROW = re.compile(r"^\| \[.+\]\(zoo/(\w+)\.diff\) \| .+ \| `(.+)` \|$", re.MULTILINE)
TESTS = dict(ROW.findall((REPO / "tests" / "README.md").read_text()))  # name of a diff -> its test
MOST_LINES = 5
TIMES = itertools.count(1)
OURS = ("grpo", "grpo_fast", "utils", "rewards", "scripts", "tests")  # what a copy has of its own
# Runs pytest in the copy, in a process that has imported the libraries: it forgets our modules and takes the copy's
IN_THE_COPY = f"""
import os, sys
copy, *tests = sys.argv[1:]
for name in list(sys.modules):
    if name.partition(".")[0] in {OURS!r}:
        del sys.modules[name]
sys.path[:] = [copy, *(path for path in sys.path if os.path.realpath(path or ".") != {str(REPO)!r})]
os.chdir(copy)
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
"""
pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the four files, the scripts and the tests."""
    directory = tmp_path_factory.mktemp("zoo") / "tree"
    directory.mkdir()
    for pattern in ("*.py", "*.toml", "*.md"):
        for file in REPO.glob(pattern):
            shutil.copy2(file, directory)
    for folder in ("scripts", "tests"):
        shutil.copytree(REPO / folder, directory / folder)
    return directory


def run_tests(tree, *names):
    """Run these tests in the copy, up to the first that fails. Raises RuntimeError if pytest could not run them."""
    done = programs.run(["-c", IN_THE_COPY, tree, *(f"tests/{name}" for name in names)])
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{names} did not run:\n{(done.stdout + done.stderr)[-3000:]}")
    return done


def change(tree, name, *options):
    """Put a bug into the copy, or with -R take it out."""
    diff = ZOO / f"{name}.diff"
    subprocess.run(["git", "apply", *options, str(diff)], cwd=tree, check=True)
    for file in re.findall(r"^\+\+\+ b/(.+)$", diff.read_text(), re.MULTILINE):
        # or Python takes the bytecode of another bug, of the same second and length, for this one's
        os.utime(tree / file, (next(TIMES),) * 2)


def test_the_table_has_every_diff_and_each_is_short():
    """At most five lines go, and five come."""
    assert set(TESTS) == {path.stem for path in ZOO.glob("*.diff")}
    for name in TESTS:
        body = (ZOO / f"{name}.diff").read_text().partition("\n--- a/")[2]
        for sign in ("-", r"\+"):
            assert len(re.findall(rf"^{sign}(?!\+\+ b/)", body, re.MULTILINE)) <= MOST_LINES, name


def test_without_a_bug_the_tests_pass(tree):
    """All but whole runs, which the suite itself shows."""
    done = run_tests(tree, *sorted(name for name in set(TESTS.values()) if not name.startswith("runs/")))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", TESTS)
def test_its_test_fails_on_it(tree, name):
    change(tree, name)
    try:
        done = run_tests(tree, TESTS[name])
    finally:
        change(tree, name, "-R")
    assert done.returncode == 1, f"{TESTS[name]} passes with {name}.diff"
