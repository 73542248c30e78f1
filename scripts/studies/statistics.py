"""What a study of seeds says of a difference: intervals, tests and words. Its coverage is shown in tests/test_study.py.

A study runs each arm with the same seeds, so that prompts and requests are the same and differences are paired by task
and seed. The unit is the seed: the mean over tasks of a seed's differences. Tasks are fixed, seeds are drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from scripts.reports.intervals import Z, holm, share_of_clusters

LEVEL = 0.95  # of intervals; 1 - LEVEL is the error rate of verdicts
POWER = 0.8  # of seeds_needed
ROUNDING = 2e-5  # what equal areas differ by: a record keeps the values of its curves to 5 digits
LEAST_EQUAL = 6  # seeds of equal differences that the sign test tells from 0
MOST_SEEDS = 1000  # seeds_needed looks no further
LEAST_SEEDS_OF_CHANCE = 6  # with 5 of 5 above, the interval would leave out 0.5, which the sign test cannot
LEAST_SEEDS_OF_IQM = 12  # fixed before the runs of the record


class Interval(NamedTuple):
    """An estimate and the bounds of its interval."""

    value: float
    low: float
    high: float


def t_interval(values: Sequence[float]) -> Interval:
    """Mean and its Student t interval with n - 1 degrees of freedom. One value has an infinite interval."""
    mean = float(np.mean(values))
    n = len(values)
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    reach = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * error
    return Interval(mean, mean - reach, mean + reach)


def t_test(differences: Sequence[float]) -> float:
    """Two-sided p that the mean difference is 0, by the paired t test. One seed gives p = 1. If all differences are
    equal, the t test would divide by 0. Then p is the sign test's. A difference that is no number gives p = 1."""
    if len(differences) < 2:
        return 1.0
    if np.ptp(differences) < ROUNDING:
        return sign_test(differences).p
    p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return 1.0 if math.isnan(p) else p


class Signs(NamedTuple):
    """A sign test: how many differences are above and below 0, p, and the smallest p that so many could have had."""

    above: int
    below: int
    p: float
    smallest_p: float


def sign_test(differences: Sequence[float]) -> Signs:
    """The exact two-sided sign test. Differences of 0 are left out."""
    above = sum(difference > 0 for difference in differences)
    below = sum(difference < 0 for difference in differences)
    n = above + below
    if n == 0:
        return Signs(0, 0, 1.0, 1.0)
    p = float(stats.binomtest(above, n).pvalue)
    return Signs(above, below, p, 2.0 ** (1 - n))


def without_rounding(differences: np.ndarray) -> np.ndarray:
    """The differences, with 0 for those that are no larger than what rounding leaves of equal areas."""
    return np.where(np.abs(differences) < ROUNDING, 0.0, differences)


def improvement(differences: np.ndarray) -> Interval:
    """The chance that the arm beats the base on a task and seed, a tie counting half. differences (tasks, seeds).

    From 6 seeds on the interval is Wilson's, for as many independent pairs of a task and seed as would spread that much
    over seeds. With fewer seeds it is infinite."""
    tasks, seeds = differences.shape
    wins = (differences > 0) + 0.5 * (differences == 0)  # (tasks, seeds)
    of_seed = wins.mean(0)
    share = float(of_seed.mean())
    if seeds < LEAST_SEEDS_OF_CHANCE:
        return Interval(share, -math.inf, math.inf)
    error = None  # equal shares do not tell it
    if np.ptp(of_seed) > 0:
        error = float(np.std(of_seed, ddof=1)) / math.sqrt(seeds)
    found = share_of_clusters(share, error, seeds, tasks * seeds)
    return Interval(share, max(0.0, found.low), min(1.0, found.high))


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """The mean of the middle half of each row (rliable, arXiv:2108.13264)."""
    n = values.shape[-1]
    quarter = n // 4
    return np.sort(values)[..., quarter : n - quarter].mean(-1)


def iqm_interval(values: np.ndarray, draws: int = 2000) -> Interval | None:
    """Interquartile mean over tasks and seeds with a bootstrap interval. values (tasks, seeds).

    The bootstrap draws seeds, the same for all tasks: each task keeps its number of runs, and a seed that is good on
    all tasks counts once. Its percentiles are moved away from the mean: see stretch_of. None with fewer than 12
    seeds."""
    seeds = values.shape[1]
    if seeds < LEAST_SEEDS_OF_IQM:
        return None
    rng = np.random.default_rng(0)
    picks = rng.integers(seeds, size=(draws, seeds))
    drawn = values[:, picks].transpose(1, 0, 2)  # (draws, tasks, seeds)
    means = interquartile_mean(drawn.reshape(draws, -1))
    low, high = np.quantile(means, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    mean = float(interquartile_mean(values.ravel()))
    stretch = stretch_of(seeds)
    below = stretch * (mean - float(low))
    above = stretch * (float(high) - mean)
    return Interval(mean, mean - below, mean + above)


def stretch_of(seeds: int) -> float:
    """By how much the percentiles of a bootstrap of so many seeds are too near to the mean: it has the normal
    distribution's quantiles for Student's, and divides squares by n for n - 1."""
    quantile = float(stats.t.ppf(0.5 + LEVEL / 2, seeds - 1))
    return quantile / Z * math.sqrt(seeds / (seeds - 1))


def power_of_t_test(effect: float, n: int) -> float:
    """The chance that a paired t test of n differences finds a mean of `effect` standard deviations."""
    bound = stats.t.ppf(0.5 + LEVEL / 2, n - 1)
    shift = effect * math.sqrt(n)
    return float(stats.nct.sf(bound, n - 1, shift) + stats.nct.cdf(-bound, n - 1, shift))


def seeds_needed(difference: float, deviation: float) -> int | None:
    """Seeds with which a paired t test finds this mean difference in 80 % of the studies, if differences have this
    standard deviation. None for more than 1000."""
    if deviation < ROUNDING:
        return LEAST_EQUAL if abs(difference) > ROUNDING else None
    effect = abs(difference) / deviation
    low = 2
    high = MOST_SEEDS
    if power_of_t_test(effect, high) < POWER:
        return None
    while low < high:
        middle = (low + high) // 2
        if power_of_t_test(effect, middle) < POWER:
            low = middle + 1
        else:
            high = middle
    return low


def smallest_effect(deviation: float, n: int) -> float:
    """The mean difference that n seeds find in 80 % of the studies."""
    if n < 2:
        return math.inf
    low = 0.0
    high = 100.0  # standard deviations
    for _ in range(60):
        middle = (low + high) / 2
        if power_of_t_test(middle, n) < POWER:
            low = middle
        else:
            high = middle
    return high * deviation


@dataclass(frozen=True)
class Comparison:
    """An arm against the base in one endpoint."""

    seeds: int
    difference: Interval
    are_equal: bool  # the seeds' differences, of which the interval says nothing then
    p: float  # of the t test
    adjusted_p: float  # Holm over the arms
    signs: Signs
    improvement: Interval
    needed: int | None  # seeds for this difference
    smallest: float  # difference that so many seeds could have seen

    @property
    def verdict(self) -> str:
        """better, worse or cannot tell."""
        if self.adjusted_p >= 1 - LEVEL:
            return "cannot tell"
        return "better" if self.difference.value > 0 else "worse"


def compare(differences: dict[str, np.ndarray]) -> dict[str, Comparison]:
    """Each arm against the base. differences: arm -> (tasks, seeds), arm minus base, larger is better."""
    of_seeds = {arm: without_rounding(table.mean(0)).tolist() for arm, table in differences.items()}
    p_values = [t_test(values) for values in of_seeds.values()]
    adjusted = holm(p_values)
    comparisons = {}
    for i, (arm, values) in enumerate(of_seeds.items()):
        n = len(values)
        interval = t_interval(values)
        are_equal = bool(np.ptp(values) < ROUNDING)
        needed = None
        smallest = math.inf
        if n > 1:
            deviation = float(np.std(values, ddof=1))
            needed = seeds_needed(interval.value, deviation)
            smallest = smallest_effect(deviation, n)
        signs = sign_test(values)
        wins = improvement(without_rounding(differences[arm]))
        comparisons[arm] = Comparison(n, interval, are_equal, p_values[i], adjusted[i], signs, wins, needed, smallest)
    return comparisons
