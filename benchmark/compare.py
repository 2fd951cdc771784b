"""python -m benchmark compare: are the new runs better or worse than the old ones?"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from benchmark import data, stats
from benchmark.programs import aligned, refuse
from benchmark.report import Group, Metric, group, must_have, number, only

LEVEL = 0.05


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
    ends = stats.interval(stats.improvement, [*b, *a], 1 - LEVEL, resamples, seed)
    low, high = map(float, ends)
    p = stats.permutation_test(b, a, resamples, seed)
    verdict = "no evidence"
    if p < LEVEL and low > 0.5:
        verdict = "improved"
    elif p < LEVEL and high < 0.5:
        verdict = "worse"
    return Judgement(probability, low, high, p, verdict)


def comparable(groups: Iterable[Group], metric: str) -> dict[str, Group]:
    """An algorithm's groups of two or more finished seeds of one length, by environment."""
    return {own.env_id: own for own in groups if not own.mixed and len(own.scores(metric)) > 1}


def effect(
    old: Iterable[Group], new: Iterable[Group], metric: str
) -> tuple[list[tuple[Group, Group]], Judgement | None]:
    """Compare two algorithms on the environments where both can be compared.

    Returns pairs of their groups, sorted by environment, and the judgement, which is None if there
    is no pair. The command and the tables of the pages both use this, so they agree to the digit.
    """
    ours = comparable(old, metric)
    theirs = comparable(new, metric)
    pairs = [(ours[env_id], theirs[env_id]) for env_id in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return [], None
    before = [a.scores(metric) for a, _ in pairs]
    after = [b.scores(metric) for _, b in pairs]
    return pairs, judge(before, after)


def show(title: str, pairs: list[tuple[Group, Group]], judgement: Judgement, metric: str):
    """Print one comparison."""
    olds = [own.scores(metric) for own, _ in pairs]
    news = [own.scores(metric) for _, own in pairs]
    rows = [["environment", "seeds A", "seeds B", "IQM A", "IQM B", "P(B > A)", "note"]]
    for (old, new), a, b in zip(pairs, olds, news, strict=True):
        numbers = [number(stats.iqm(a)), number(stats.iqm(b)), f"{stats.improvement(b, a):.2f}"]
        note = f"A: {old.budget}, B: {new.budget}" if old.budget != new.budget else ""
        rows.append([old.env_id, str(len(a)), str(len(b)), *numbers, note])
    print(f"{title}, {metric}\n{aligned(rows, left=(0, 6))}")
    probability, low, high, p, verdict = judgement
    line = f"P(B > A) = {probability:.2f}, 95 % interval [{low:.2f}, {high:.2f}]"
    print(f"  mean: {line}, permutation p = {p:.3g}")
    more = ""
    if verdict == "no evidence":
        seeds = stats.seeds_needed(probability, len(pairs))
        count = f"about {seeds} seeds" if seeds < 1000 else "1,000 seeds or more"
        more = f"; at this P a power of 80 % takes {count} an environment"
    print(f"  {verdict}{more}")
    least = stats.least_p(olds, news)
    if least >= LEVEL:
        counts = {f"{len(a)} against {len(b)}" for a, b in zip(olds, news, strict=True)}
        few = counts.pop() if len(counts) == 1 else "so few"
        print(f"  with {few} seeds no result could reach p < {LEVEL}: the smallest is {least:.3g}")
    print()


def compare(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path | None] = None,
    metric: Metric = "training",
    algorithm: tuple[str, str] | None = None,
    env_ids: tuple[str, ...] = (),
):
    """Compare B, the new runs, with A, the old ones.

    P(B > A) is the probability that a run of B scores above one of A. The verdict is "improved" or
    "worse" if its 95 % interval excludes 1/2 and a permutation test has p < 0.05. Otherwise it is
    "no evidence". An environment takes part if A and B have two finished seeds of one length of
    training. Each algorithm is tested by itself, so one in twenty seems to have changed without
    cause. The exit code is 1 if something is worse, if a run of B is not finished, or if B lacks
    what A has. It is 2 if A and B have nothing in common.

    Args:
        a: folder of the old runs.
        b: folder of the new runs (default: that of A, with --algorithm).
        metric: mean of the last 100 training episodes, or of the final policy's episodes.
        algorithm: an algorithm of A and one of B (default: each that both have).
        env_ids: environments to compare on (default: all).
    """
    if b is None and algorithm is None:
        refuse("compare takes two folders, or one and --algorithm X Y")
    old_runs = data.find([a])
    new_runs = data.find([b]) if b else old_runs
    if env_ids:
        must_have(old_runs + new_runs, "env_id", env_ids)
        old_runs = only(old_runs, "env_id", env_ids)
        new_runs = only(new_runs, "env_id", env_ids)
    old = group(old_runs)
    new = group(new_runs)
    old_names = sorted({own.algorithm for own in old})
    new_names = sorted({own.algorithm for own in new})
    pairs = [algorithm] if algorithm else [(name, name) for name in old_names]
    print(f"A, the old: {a}\nB, the new: {b or a}\n")
    for run in old_runs:
        if run.status == "unreadable":
            print(f"A is without {run.reason}\n")
    verdicts = []
    gone = []
    unfinished = []
    for x, y in pairs:
        mine = [own for own in old if own.algorithm == x]
        theirs = [own for own in new if own.algorithm == y]
        both, judgement = effect(mine, theirs, metric)
        if both:
            show(x if x == y else f"A {x}, B {y}", both, judgement, metric)
            verdicts.append(judgement.verdict)
        common = {own.env_id for own, _ in both}
        left_out = sorted({own.env_id for own in mine + theirs} - common)
        if left_out:
            why = "left out for want of two finished seeds of one length"
            print(f"{x}: {why}: {', '.join(left_out)}\n")
        for env_id in left_out:
            if not algorithm and env_id in comparable(mine, metric):
                gone.append(f"{env_id} {x}: two finished seeds of one length")
    compared = {y for _, y in pairs}
    for run in new_runs:
        lost = run.status != "finished" or not np.isfinite(run.score(metric))
        if run.status == "unreadable" or (run.algorithm in compared and lost):
            words = f"{run.env_id} seed {run.seed}: {run.status} {run.reason}"
            unfinished.append(words.rstrip())
    if not verdicts and not unfinished:
        refuse(
            "no environment on which both have two finished seeds of one algorithm; "
            f"A has {', '.join(old_names)}; B has {', '.join(new_names)}"
        )
    for line in gone + unfinished:
        print(f"B lacks {line}", file=sys.stderr)
    if gone or unfinished or "worse" in verdicts:
        raise SystemExit(1)
