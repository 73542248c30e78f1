"""The project against tests/reference.py on a few random configurations; hundreds: python -m tests.reference 240."""

import re

import pytest

from tests import programs, reference


@pytest.mark.parametrize("seed", range(10))
def test_a_step_is_the_references(tiny_models, world, seed):
    errors = reference.compare_step(seed, tiny_models(tied=seed % 2 == 0), world)
    assert max(errors, default=0.0) < 2e-5


@pytest.mark.house  # half a minute
@pytest.mark.runs
def test_steps_of_two_ranks_are_the_references():
    done = programs.run([*programs.torchrun(2), "-m", "tests.reference", "6"], OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* gradients", done.stdout)
