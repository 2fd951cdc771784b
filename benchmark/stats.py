"""Statistics of a few seeds on a few environments.

`scores` is a list with one array per environment, [..., seeds]; numbers of seeds may differ. A
statistic takes such arrays as its arguments and reduces their last axis, which is what
scipy.stats.bootstrap wants: with one array per environment, its bootstrap is stratified.

Source: Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice,
NeurIPS 2021. Conventions are those of its library, rliable.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, combinations_with_replacement

import numpy as np

Scores = Sequence[np.ndarray]

# Measured coverage of the 95 % interval of the IQM by (seeds, environments), of normal scores;
# tests/benchmark/test_report.py measures it again.
COVERAGE = {(3, 1): 0.76, (5, 1): 0.91, (10, 1): 0.94, (10, 8): 0.94}
FACTORIALS = np.array([math.factorial(n) for n in range(11)], float)


def iqm(*scores: np.ndarray, axis: int = -1):
    """Interquartile mean of all runs, pooled: without the lowest and highest quarter, rounded down
    to whole runs (scipy's trim_mean): 3 runs lose none, 5 lose two. If numbers of seeds differ, all
    environments still weigh the same, and a run may be left out in part."""
    pooled = np.moveaxis(np.concatenate(scores, axis=axis), axis, -1)
    seeds = [np.shape(x)[axis] for x in scores]
    if len(set(seeds)) == 1:
        runs = pooled.shape[-1]
        quarter = runs // 4
        if quarter:  # as scipy's trim_mean does, which also takes time to search for nan
            pooled = np.partition(pooled, (quarter, runs - quarter - 1), axis=-1)
        return pooled[..., quarter : runs - quarter].mean(axis=-1)
    order = np.argsort(pooled, axis=-1)
    weights = np.repeat(1 / np.array(seeds), seeds)[order] / len(seeds)
    above = np.cumsum(weights, axis=-1)
    kept = np.minimum(above, 0.75) - np.maximum(above - weights, 0.25)
    return 2 * (np.take_along_axis(pooled, order, axis=-1) * np.maximum(kept, 0)).sum(axis=-1)


def mean(*scores: np.ndarray, axis: int = -1):
    """Mean over environments of the means over seeds."""
    return np.mean([x.mean(axis=axis) for x in scores], axis=0)


def improvement(*scores: np.ndarray, axis: int = -1):
    """P(X > Y) of one run each, mean over environments; ties count half. The first half of the
    arguments is X by environment, the second half Y."""
    half = len(scores) // 2
    wins = [
        np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1))
        for x, y in zip(scores[:half], scores[half:], strict=True)
    ]
    return 0.5 + 0.5 * np.mean(wins, axis=0)


def interval(
    statistic: Callable, scores: Scores, level: float = 0.95, resamples: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Stratified percentile bootstrap: the ends of the interval, shaped as the statistic.

    Without a number of resamples there are 5,000, but of ten scores of one environment, or fewer,
    all: of some of them an end may be the value beside the right one, which may be far from it.
    Leading axes, such as the points of a curve, share their resampled seeds. The ends are nan if a
    score is not finite, or if an environment has a single seed: one seed does not tell how much
    seeds differ.
    """
    if not resamples and len(scores) == 1 and scores[0].ndim == 1 and 1 < len(scores[0]) <= 10:
        return exact_interval(statistic, scores[0], level)
    resamples = resamples or 5000
    known = np.all([np.isfinite(x).all(axis=-1) for x in scores], axis=0)
    if min(x.shape[-1] for x in scores) < 2:
        known = np.zeros_like(known)
    if not known.all():
        low = np.full(known.shape, np.nan)
        high = np.full(known.shape, np.nan)
        if known.any():
            finite = [x[known] for x in scores]
            low[known], high[known] = interval(statistic, finite, level, resamples, seed)
        return low, high
    from scipy.stats import bootstrap

    found = bootstrap(
        scores, statistic, method="percentile", vectorized=True, axis=-1, rng=seed,
        confidence_level=level, n_resamples=resamples,
        batch=max(1, 5_000_000 // sum(x.size for x in scores)),
    )  # fmt: skip
    return found.confidence_interval.low, found.confidence_interval.high


@cache
def every_resample(seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """The ways to draw as many seeds as there are, [seeds, ways], and how likely each is."""
    ways = np.array(list(combinations_with_replacement(range(seeds), seeds)))
    counts = (ways[:, :, None] == np.arange(seeds)).sum(axis=1)
    weights = 1 / np.prod(FACTORIALS[counts], axis=1)
    return ways.T, weights / weights.sum()


def exact_interval(statistic: Callable, scores: np.ndarray, level: float) -> tuple:
    """The ends of the percentile bootstrap of all resamples; nan if a score is not finite."""
    if not np.isfinite(scores).all():
        return np.nan, np.nan
    ways, weights = every_resample(len(scores))
    values = statistic(scores[ways], axis=0)
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    ends = np.array([(1 - level) / 2, (1 + level) / 2])
    return tuple(values[order][np.searchsorted(below, ends - 1e-12)])


def permutation_test(x: Scores, y: Scores, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of P(X > Y) = 1/2, labels permuted within environments: all labellings if
    there are at most `resamples`, or else a random sample of them. P is linear in the sum of the
    ranks of X (Mann-Whitney), so only ranks are permuted."""
    from scipy.stats import rankdata

    observed = abs(improvement(*x, *y) - 0.5)
    every = labellings(x, y) <= resamples
    rng = np.random.default_rng(seed)
    found = np.zeros(1 if every else resamples)  # P(X > Y) - 1/2 of each labelling
    for a, b in zip(x, y, strict=True):
        n = len(a)
        m = len(b)
        ranks = rankdata(np.concatenate([a, b]))  # ties share the mean of their ranks
        if every:
            sums = np.array([sum(own) for own in combinations(ranks, n)])
        else:
            sums = rng.permuted(np.tile(ranks, (resamples, 1)), axis=1)[:, :n].sum(axis=1)
        beyond = (sums - n * (n + m + 1) / 2) / (n * m * len(x))
        found = np.add.outer(found, beyond).ravel() if every else found + beyond
    reached = np.abs(found) >= observed - 1e-9
    return float(reached.mean() if every else (1 + reached.sum()) / (1 + resamples))


def labellings(x: Scores, y: Scores) -> int:
    """The number of ways to deal out the scores of each environment to X and Y."""
    return math.prod(math.comb(len(a) + len(b), len(a)) for a, b in zip(x, y, strict=True))


def least_p(x: Scores, y: Scores) -> float:
    """The smallest p-value that `permutation_test` can give: all of X above all of Y, or below."""
    return 2 / labellings(x, y)


def seeds_needed(probability: float, environments: int) -> float:
    """Seeds per environment and side for a power of 80 % at a level of 5 %, if P(X > Y) is known
    (Noether, Sample size determination for some common nonparametric tests, JASA 1987)."""
    effect = environments * (probability - 0.5) ** 2
    return math.ceil((1.960 + 0.842) ** 2 / (6 * effect)) if effect else math.inf


def running_mean(returns: np.ndarray, games: int = 100) -> np.ndarray:
    """Mean of each return [episodes] and those before it, at most `games` in all; nan if one of
    them is not finite."""
    if not len(returns):
        return np.empty(0)
    finite = np.where(np.isfinite(returns), returns, np.nan)
    sums = np.convolve(finite, np.ones(games))[: len(returns)]
    return sums / np.minimum(np.arange(1, len(returns) + 1), games)


def first_reach(
    at: np.ndarray, returns: np.ndarray, goal: float, games: int = 100, least: int = 20
) -> float:
    """Where in `at` [episodes] the mean of the last `games` returns, of at least `least` of them,
    first reaches the goal; inf if it never does."""
    above = np.flatnonzero(running_mean(returns, games)[least - 1 :] >= goal)
    return float(at[least - 1 + above[0]]) if len(above) else math.inf
