"""Means with intervals of 95 % and a test, for whatever compares runs: what the numbers of a few prompts cannot say.

Several responses to one prompt are alike: they are one draw of a prompt, and not that many draws. So whatever is a mean
over responses has its interval over prompts here.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

Z = 1.96  # 0.975 quantile of the normal distribution
MOST_WAYS = 20_000  # of a test: more are drawn at random
FEWEST_DIFFERENT = 6  # fewer differences that are not 0 give no sign test below 0.05, and intervals that are too narrow


class Estimate(NamedTuple):
    """A mean over n prompts, its standard error and its interval."""

    mean: float
    error: float
    low: float
    high: float
    n: int


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of a value for each of 2 and more prompts: m +- t(0.975, n - 1) s / sqrt(n)."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(special.stdtrit(len(values) - 1, 0.975)) * error
    return Estimate(mean, error, mean - half, mean + half, len(values))


def share_of(share: float, n: int) -> Estimate:
    """A share of right responses to n prompts, as if those to a prompt were equal: no interval is too narrow.

    Wilson's: (a + z^2/2n +- z sqrt(a (1 - a) / n + z^2/4n^2)) / (1 + z^2/n). It has a width at 0 and 1.
    """
    square = Z * Z / n
    variance = share * (1 - share) / n
    middle = share + square / 2
    half = Z * math.sqrt(variance + square / (4 * n))
    low = (middle - half) / (1 + square)
    high = (middle + half) / (1 + square)
    return Estimate(share, math.sqrt(variance), low, high, n)


def held_out(row: dict[str, Any]) -> Estimate | None:
    """The share of right responses of the evaluation in a row of metrics.jsonl, None without one."""
    share = row.get("eval/objective/verifiable_correct_rate")
    prompts = int(row.get("eval/num_prompts") or 0)
    return None if share is None or not prompts else share_of(share, prompts)


def sign_test(differences: Sequence[float]) -> float:
    """p-value of |mean difference| when every sign is random."""
    from scipy import stats  # takes a second, which no picture of a run should

    if len(differences) < 2:
        return 1.0
    how: dict[str, Any] = {"n_resamples": MOST_WAYS, "batch": 1000, "rng": 0}
    return float(stats.permutation_test((differences,), np.mean, permutation_type="samples", **how).pvalue)
