"""Intervals and tests of the reports: by hand, and by how often they hold the truth in simulated evaluations."""

import math

import numpy as np
import pytest

from scripts.reports import intervals


def coverage(prompts, samples, beta, times=1500):
    """How often the interval of simulated right responses, (prompts, samples), holds the mean difficulty of prompts."""
    rng = np.random.default_rng(prompts + samples)
    truth = beta[0] / (beta[0] + beta[1])
    held = 0
    for difficulties in rng.beta(*beta, (times, prompts)):
        right = rng.random((prompts, samples)) < difficulties[:, None]
        row = {"eval/objective/verifiable_correct_rate": right.mean(), "eval/num_prompts": prompts}
        found = intervals.held_out(row)
        assert found is not None and found.n == prompts
        held += found.low <= truth <= found.high
    return held / times


@pytest.mark.parametrize("prompts, samples, beta", [(400, 1, (0.5, 0.5)), (100, 1, (9, 1)), (100, 16, (0.5, 0.5))])
def test_the_interval_of_an_accuracy_holds_the_truth_as_often_as_it_says(prompts, samples, beta):
    """Wilson's over all responses does not where a prompt has several: it held it 0.49 of the times with 16. Over
    prompts it is too wide then, which is safe."""
    assert 0.93 <= coverage(prompts, samples, beta) <= (0.97 if samples == 1 else 1)


def test_an_accuracy_by_hand():
    """3 of 4 prompts right: Wilson's."""
    row = {"eval/objective/verifiable_correct_rate": 0.75, "eval/num_prompts": 4}
    middle, half, scale = 0.75 + 0.4802, 1.96 * math.sqrt(0.1875 / 4 + 3.8416 / 64), 1 + 0.9604
    found = intervals.held_out(row)
    assert found is not None and [found.low, found.high] == pytest.approx([
        (middle - half) / scale, (middle + half) / scale,
    ])  # fmt: skip
    assert found.n == 4 and found.error == pytest.approx(math.sqrt(0.1875 / 4))
    assert intervals.held_out(row | {"eval/objective/verifiable_correct_rate": None}) is None
    assert intervals.held_out({}) is None


def test_a_mean_by_hand():
    """1, 3, 5: mean 3, error 2 / sqrt(3), t of 2 degrees 4.3027."""
    found = intervals.mean_of([1.0, 3.0, 5.0])
    half = 4.302653 * 2 / math.sqrt(3)
    assert list(found) == pytest.approx([3.0, 2 / math.sqrt(3), 3 - half, 3 + half, 3])


def test_few_prompts_that_differ_have_no_sign_test():
    """5 signs of 32 cannot be rarer than 2 of 32, 6 signs can."""
    few = intervals.FEWEST_DIFFERENT
    assert intervals.sign_test([1.0] * (few - 1)) > 0.05 >= intervals.sign_test([1.0] * few)
