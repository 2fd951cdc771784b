"""python -m benchmark compare: are the new runs better or worse than the old ones?"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from benchmark import data, stats
from benchmark.data import Group, Metric
from benchmark.programs import aligned, number, refuse

LEVEL = 0.05
ENOUGH = 5  # seeds: with fewer, an interval over seeds is too narrow


class Judgement(NamedTuple):
    """How B compares with A."""

    probability: float  # P(B > A), mean over environments
    low: float  # end of its 95 % interval
    high: float
    p: float  # of the permutation test
    verdict: str  # improved, worse or no evidence


def judge(
    a: list[np.ndarray], b: list[np.ndarray], resamples: int = 10_000, seed: int = 0
) -> Judgement:
    """Judge B by the scores [seeds] of both on each environment."""
    probability = float(stats.improvement(*b, *a))
    low, high = stats.interval(stats.improvement, [*b, *a], 1 - LEVEL, resamples, seed)
    p = stats.permutation_test(b, a, resamples, seed)
    verdict = "no evidence"
    if p < LEVEL and low > 0.5:
        verdict = "improved"
    elif p < LEVEL and high < 0.5:
        verdict = "worse"
    return Judgement(probability, float(low), float(high), p, verdict)


def in_words(a: list[np.ndarray], b: list[np.ndarray], judged: Judgement) -> tuple[str, str]:
    """A verdict and what is behind it: the interval, the test, the seeds that it would take."""
    counts = {f"{len(x)} against {len(y)}" for x, y in zip(a, b, strict=True)}
    seeds = counts.pop() if len(counts) == 1 else "so few"
    least = stats.least_p(a, b)
    if least >= LEVEL:
        why = f"with {seeds} seeds no result could reach p < {LEVEL}: the smallest is {least:.3g}"
        return "too few seeds to tell", why
    words = f"95 % interval [{judged.low:.2f}, {judged.high:.2f}]"
    if min(map(len, [*a, *b])) < ENOUGH:
        words += f" (too narrow, for want of {ENOUGH} seeds)"
    words += f", permutation p = {judged.p:.3g}"
    if judged.verdict == "no evidence":
        needed = stats.seeds_needed(judged.probability, len(a))
        count = f"about {needed} seeds" if needed < 1000 else "1,000 seeds or more"
        words += f"; at this P a power of 80 % takes {count} an environment"
    return judged.verdict, words


def comparable(groups: Iterable[Group], metric: str) -> dict[str, Group]:
    """An algorithm's groups of two or more finished seeds of one length, by environment."""
    return {own.env_id: own for own in groups if not own.mixed and len(own.scores(metric)) > 1}


def effect(
    old: Iterable[Group], new: Iterable[Group], metric: str
) -> tuple[list[tuple[Group, Group]], Judgement | None]:
    """Pairs of two algorithms' groups on the environments where both can be compared, sorted, and
    the judgement, which is None if there is no pair. The tables of the pages use it, too."""
    ours = comparable(old, metric)
    theirs = comparable(new, metric)
    pairs = [(ours[env_id], theirs[env_id]) for env_id in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return [], None
    before = [a.scores(metric) for a, _ in pairs]
    after = [b.scores(metric) for _, b in pairs]
    return pairs, judge(before, after)


def show(title: str, pairs: list[tuple[Group, Group]], judged: Judgement, metric: str):
    """Print one comparison."""
    olds = [own.scores(metric) for own, _ in pairs]
    news = [own.scores(metric) for _, own in pairs]
    rows = [["environment", "seeds A", "seeds B", "IQM A", "IQM B", "P(B > A)", "note"]]
    for (old, new), a, b in zip(pairs, olds, news, strict=True):
        numbers = [number(stats.iqm(a)), number(stats.iqm(b)), f"{stats.improvement(b, a):.2f}"]
        note = f"A: {old.budget}, B: {new.budget}" if old.budget != new.budget else ""
        rows.append([old.env_id, str(len(a)), str(len(b)), *numbers, note])
    verdict, why = in_words(olds, news, judged)
    print(f"{title}, {metric} returns\n{aligned(rows, left=(0, 6))}")
    print(f"  mean: P(B > A) = {judged.probability:.2f}, {why}\n  {verdict}\n")


def compare(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path | None] = None,
    metric: Metric = "training",
    algorithm: tuple[str, str] | None = None,
    env_ids: tuple[str, ...] = (),
):
    """Compare B, the new runs, with A, the old ones, on environments where both have two finished
    seeds of one length.

    P(B > A) is the probability that a run of B scores above one of A. The verdict is "improved" or
    "worse" if its 95 % interval excludes 1/2 and a permutation test has p < 0.05. Each algorithm is
    tested by itself, so one in twenty seems to have changed without cause. The exit code is 1 if
    something is worse or B lacks what A has, and 2 if there is nothing to compare.

    Args:
        a: folder of the old runs.
        b: folder of the new runs (default: that of A, with --algorithm).
        metric: mean of the last 100 training episodes, or of the final policy's episodes.
        algorithm: an algorithm of A and one of B, as ppo "ppo VARIANT" (default: all of both).
        env_ids: environments to compare on (default: all).
    """
    if b is None and algorithm is None:
        refuse("compare takes two folders, or one and --algorithm X Y, each as 'SCRIPT VARIANT'")
    old_runs = data.only(data.find([a]), "env_id", env_ids)
    new_runs = data.only(data.find([b]), "env_id", env_ids) if b else old_runs
    old = data.group(old_runs)
    new = data.group(new_runs)
    names = sorted({own.algorithm for own in old})
    print(f"A, the old: {a}\nB, the new: {b or a}\n")
    verdicts = []
    lacks = []
    pairs = [algorithm] if algorithm else [(name, name) for name in names]
    for x, y in pairs:
        mine = [own for own in old if own.algorithm == x]
        theirs = [own for own in new if own.algorithm == y]
        both, judged = effect(mine, theirs, metric)
        if both:
            show(x if x == y else f"A {x}, B {y}", both, judged, metric)
            verdicts.append(judged.verdict)
        left_out = {own.env_id for own in mine + theirs} - {own.env_id for own, _ in both}
        why = "two finished seeds of one length"
        if left_out:
            print(f"{x}: left out for want of {why}: {', '.join(sorted(left_out))}\n")
        if not algorithm:
            had = sorted(left_out & comparable(mine, metric).keys())
            lacks += [f"{env_id} {x}: {why}" for env_id in had]
    for run in new_runs:
        lost = run.status != "finished" or not np.isfinite(run.score(metric))
        if run.status == "unreadable" or (lost and run.algorithm in {y for _, y in pairs}):
            words = f"{run.env_id} seed {run.seed}: {run.status} {run.reason}"
            lacks.append(words.rstrip())
    for line in lacks:
        print(f"B lacks {line}", file=sys.stderr)
    if not verdicts:
        others = sorted({own.algorithm for own in new})
        refuse(f"nothing to compare: A has {names}; B has {others}")
    if lacks or "worse" in verdicts:
        raise SystemExit(1)
