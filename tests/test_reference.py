"""The project against tests/reference.py on a few random configurations; hundreds: python -m tests.reference 240."""

import random
import re
from dataclasses import fields

import pytest

import grpo
from tests import programs, reference

ELSEWHERE = {"total_episodes", "local_eval_every", "eval_on_step_0", "eval_pass_at_k"}  # no part of an update


@pytest.mark.house
def test_every_flag_of_the_algorithm_is_drawn():
    drawn = [reference.draw_args(random.Random(seed), "x") for seed in range(60)]
    for field in fields(grpo.GRPOFlags):
        values = {getattr(a, field.name) for a in drawn}
        words = f"--{field.name} is always {values}: draw it in reference.draw_args, or it is of ELSEWHERE"
        assert (len(values) > 1) != (field.name in ELSEWHERE), words


@pytest.mark.parametrize("seed", range(10))
def test_a_step_is_the_references(tiny_models, world, seed):
    errors, _ = reference.compare_step(seed, tiny_models(tied=seed % 2 == 0), world)
    assert max(errors, default=0.0) < 2e-5


@pytest.mark.house  # half a minute
@pytest.mark.runs
def test_steps_of_two_ranks_are_the_references():
    done = programs.run([*programs.torchrun(2), "-m", "tests.reference", "6"], OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* gradients", done.stdout)
