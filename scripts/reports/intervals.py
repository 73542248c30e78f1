"""Means with intervals and tests, for whatever compares runs: what the numbers of a few prompts or seeds cannot say.

Several responses to one prompt are alike: they are one draw of a prompt, and not that many draws. So whatever is a mean
over responses has its interval over prompts here, its clusters. All intervals are of 95 %.
"""

import math
import statistics
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

Z = 1.96  # 0.975 quantile of the normal distribution
MOST_WAYS = 20_000  # of a test: more are drawn at random
FEWEST_DIFFERENT = 6  # fewer differences that are not 0 give no sign test below 0.05, and intervals that are too narrow


class Estimate(NamedTuple):
    """A mean, its standard error and its interval; n is the number of independent draws."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def t_quantile(freedom: int) -> float:
    """0.975 quantile of Student's t."""
    return float(special.stdtrit(freedom, 0.975))


def mean_of_clusters(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """The mean of all values, with an interval that is robust to values of a cluster being alike.

    With m the mean of all N values, and cluster c of n clusters having N_c values of mean m_c, the standard error is
    sqrt(n / (n - 1) * sum_c (N_c (m_c - m))^2) / N (Liang and Zeger 1986), and the interval is m +- t(0.975, n - 1)
    errors. A cluster for each value gives the plain t interval. Raises ValueError for fewer than 2 clusters.
    """
    residuals: dict[Hashable, float] = {}
    mean = statistics.fmean(values)
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] = residuals.get(cluster, 0.0) + value - mean
    n = len(residuals)
    if n < 2:
        raise ValueError(f"an interval needs 2 clusters; there is {n}")
    squares = math.fsum(residual * residual for residual in residuals.values())
    error = math.sqrt(squares * n / (n - 1)) / len(values)
    half = t_quantile(n - 1) * error
    return Estimate(mean, error, mean - half, mean + half, n)


def wilson(share: float, n: float, z: float = Z) -> tuple[float, float]:
    """Interval of a share of n independent draws: (a + z^2/2n +- z sqrt(a (1 - a) / n + z^2/4n^2)) / (1 + z^2/n).
    Unlike share +- 2 errors it has a width at 0 and 1."""
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return (middle - half) / scale, (middle + half) / scale


def share_of_clusters(share: float, error: float | None, clusters: int, responses: int) -> Estimate:
    """A share of right responses to prompts, its clusters; `error` is its standard error over prompts, None if unknown.

    The interval is Wilson's for as many independent responses as would have this error: a (1 - a) / error^2, less what
    the error's own uncertainty costs, (z / t(0.975, clusters - 1))^2 (Korn and Graubard 1998). They are never fewer
    than the prompts, as if all responses to a prompt were equal, which an unknown error is taken for.
    """
    n = float(clusters)
    if error and clusters > 1:
        n = share * (1 - share) / error**2 * (Z / t_quantile(clusters - 1)) ** 2
        n = min(max(n, clusters), responses)
    low, high = wilson(share, n)
    if error is None:
        error = math.sqrt(share * (1 - share) / clusters)
    return Estimate(share, error, low, high, clusters)


def error_of_prompts(one: float, two: float, samples: int, prompts: int) -> float:
    """The standard error over prompts of pass@1, from pass@1 and the unbiased pass@2 of `samples` responses a prompt.

    With q the share of a prompt's responses that are wrong, 1 - pass@2 is the mean of q (q - 1/k) k / (k - 1) over the
    prompts. That gives the mean of q^2, and with that of q the variance between prompts.
    """
    wrong = 1 - one
    square = (1 - two) * (samples - 1) / samples + wrong / samples
    variance = max(square - wrong * wrong, 0.0)
    return math.sqrt(variance / max(prompts - 1, 1))


def held_out(row: dict[str, Any], samples: int) -> Estimate | None:
    """The share of right responses of the evaluation in a row of metrics.jsonl, with --eval_pass_at_k `samples`. None
    without one. Where a part of a score counts as right too, pass@k says nothing of that share: its error is unknown.
    """
    share = row.get("eval/objective/verifiable_correct_rate")
    prompts = int(row.get("eval/num_prompts") or 0)
    if share is None or not prompts:
        return None
    one = row.get("eval/pass_at_1")
    two = row.get("eval/pass_at_2_unbiased")
    error = None
    if one is not None and two is not None and abs(one - share) < 1e-9:
        error = error_of_prompts(one, two, samples, prompts)
    return share_of_clusters(share, error, prompts, prompts * samples)


def sign_test(differences: Sequence[float]) -> float:
    """p-value of |mean difference| when every sign is random."""
    from scipy import stats  # takes a second, which no picture of a run should

    if len(differences) < 2:
        return 1.0
    how: dict[str, Any] = {"n_resamples": MOST_WAYS, "batch": 1000, "rng": 0}
    return float(stats.permutation_test((differences,), np.mean, permutation_type="samples", **how).pvalue)
