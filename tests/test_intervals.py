"""Intervals and tests of the reports: by hand, and by how often they hold the truth in simulated evaluations."""

import math
from collections.abc import Callable

import numpy as np
import pytest

import grpo
import utils
from scripts.reports import intervals

WORLD = utils.World(0, 0, 1, grpo.torch.device("cpu"))


def coverage(interval_of: Callable[[np.ndarray], tuple[float, float]], prompts: int, samples: int, beta, times=1500):
    """How often the interval of simulated right responses, (prompts, samples), holds the mean difficulty of prompts."""
    rng = np.random.default_rng(prompts + samples)
    truth = beta[0] / (beta[0] + beta[1])
    held = 0
    for difficulties in rng.beta(*beta, (times, prompts)):
        low, high = interval_of(rng.random((prompts, samples)) < difficulties[:, None])
        held += low <= truth <= high
    return held / times


def evaluation(right: np.ndarray) -> dict[str, float]:
    """The metrics of an evaluation with these right responses, by grpo.py's own definitions."""
    prompts, samples = right.shape
    row = {"eval/objective/verifiable_correct_rate": right.mean(), "eval/num_prompts": prompts}
    row["eval/pass_at_1"] = right.mean()
    if samples > 1:
        counts = right.sum(1).tolist()
        row["eval/pass_at_2_unbiased"] = np.mean([grpo.pass_at_k(samples, count, 2) for count in counts])
    return row


CASES = [(400, 1, (0.5, 0.5)), (200, 8, (2, 2)), (100, 16, (0.5, 0.5)), (100, 4, (9, 1))]


@pytest.mark.parametrize("prompts, samples, beta", CASES)
def test_the_interval_of_an_accuracy_holds_the_truth_as_often_as_it_says(prompts, samples, beta):
    """Wilson's over all responses does not where a prompt has several: it held it 0.49 of the times with 16."""

    def over_prompts(right):
        found = intervals.held_out(evaluation(right), samples)
        assert found is not None and found.n == prompts
        return found.low, found.high

    assert 0.92 <= coverage(over_prompts, prompts, samples, beta) <= 0.98


@pytest.mark.parametrize("sizes", [(1, 2), (1, 8)])
def test_a_mean_of_clusters_of_several_sizes_holds_the_truth_as_often_as_it_says(sizes):
    """40 clusters whose values share a part: with sizes (1, 8) the plain interval of all values is too narrow."""
    rng = np.random.default_rng(0)
    clusters = [i for i in range(40) for _ in range(sizes[i % 2])]
    held = 0
    for _ in range(1500):
        shared = rng.normal(3.0, 1.0, 40)
        values = (shared[clusters] + rng.normal(0.0, 0.5, len(clusters))).tolist()
        found = intervals.mean_of_clusters(values, clusters)
        held += found.low <= 3.0 <= found.high
    assert 0.92 <= held / 1500 <= 0.98 and found.n == 40


def test_the_error_of_an_evaluation_is_that_of_its_prompts_means():
    """grpo.py's note_pass_at_k and its reduction make pass@1 and the unbiased pass@2, of which it is made."""
    metrics = utils.Metrics()
    counts = [0, 1, 4, 4, 2]
    for i, count in enumerate(counts):
        prompt = utils.Prompt(i, (1,), "", ("7",), ("gsm8k",))
        group = [utils.Rollout(prompt, i, j, verifiable=float(j < count)) for j in range(4)]
        grpo.note_pass_at_k(group, metrics)
    out = metrics.reduce(WORLD)
    row = {f"eval/{name}": value for name, value in out.items()} | {"eval/num_prompts": 5}
    row["eval/objective/verifiable_correct_rate"] = 11 / 20
    found = intervals.held_out(row, 4)
    assert found is not None and found.error == pytest.approx(np.std([0, 0.25, 1, 1, 0.5], ddof=1) / math.sqrt(5))


def test_an_accuracy_by_hand():
    """3 of 4 right at a response each: Wilson's. Of 4 prompts x 4 equal responses each too: they are 4 draws."""
    one = {"eval/objective/verifiable_correct_rate": 0.75, "eval/num_prompts": 4, "eval/pass_at_1": 0.75}
    middle, half, scale = 0.75 + 0.4802, 1.96 * math.sqrt(0.1875 / 4 + 3.8416 / 64), 1 + 0.9604
    want = pytest.approx([(middle - half) / scale, (middle + half) / scale])
    for row, samples in ((one, 1), (one | {"eval/pass_at_2_unbiased": 0.75}, 4), (one, 4)):
        found = intervals.held_out(row, samples)
        assert found is not None and [found.low, found.high] == want and found.n == 4
    assert intervals.held_out(one | {"eval/objective/verifiable_correct_rate": None}, 1) is None
    assert intervals.held_out({}, 1) is None
    # half-right answers: pass@1 is not the share shown, so its error is not that share's
    half_right = one | {"eval/pass_at_1": 0.25, "eval/pass_at_2_unbiased": 0.3}
    found = intervals.held_out(half_right, 4)
    assert found is not None and [found.low, found.high] == want


def test_no_more_draws_than_responses_and_no_fewer_than_prompts():
    alike = intervals.share_of_clusters(0.5, 1e-9, clusters=10, responses=40)
    assert [alike.low, alike.high] == pytest.approx(intervals.wilson(0.5, 40))
    apart = intervals.share_of_clusters(0.5, 0.5, clusters=10, responses=40)
    assert [apart.low, apart.high] == pytest.approx(intervals.wilson(0.5, 10))
    all_right = intervals.share_of_clusters(1.0, 0.0, clusters=10, responses=40)
    assert all_right.low == pytest.approx(intervals.wilson(1.0, 10)[0]) and all_right.error == 0


def test_means_by_hand():
    """Clusters {1, 3} and {5}: mean 3, residuals -2 and 2, so the error is sqrt(2 / 1 * 8) / 3."""
    found = intervals.mean_of_clusters([1.0, 3.0, 5.0], ["a", "a", "b"])
    assert (found.mean, found.n) == (3.0, 2) and found.error == pytest.approx(4 / 3)
    assert [found.low, found.high] == pytest.approx([3 - 12.7062 * 4 / 3, 3 + 12.7062 * 4 / 3])
    with pytest.raises(ValueError, match="an interval needs 2 clusters; there is 1"):
        intervals.mean_of_clusters([1.0, 2.0], ["a", "a"])


def test_few_prompts_that_differ_have_no_sign_test():
    """5 signs of 32 cannot be rarer than 2 of 32, 6 signs can."""
    few = intervals.FEWEST_DIFFERENT
    assert intervals.sign_test([1.0] * (few - 1)) > 0.05 >= intervals.sign_test([1.0] * few)
