"""python -m benchmark compare: is the new better or worse than the old, or can seeds not tell?"""

import sys
from pathlib import Path

import numpy as np
import tyro

from benchmark import stats
from benchmark.programs import aligned, refuse
from benchmark.report import Group, Metric, group, number, read

LEVEL = 0.05


def judge(a: list[np.ndarray], b: list[np.ndarray], resamples: int = 10_000, seed: int = 0):
    """P(B > A) over environments, the ends of its 95 % interval, p-value and verdict of scores
    [seeds] by environment."""
    probability = float(stats.improvement(*b, *a))
    ends = stats.interval(stats.improvement, [*b, *a], 1 - LEVEL, resamples, seed)
    low, high = map(float, ends)
    p = stats.permutation_test(b, a, resamples, seed)
    verdict = "no evidence"
    if p < LEVEL and (low > 0.5 or high < 0.5):
        verdict = "improved" if low > 0.5 else "worse"
    return probability, low, high, p, verdict


def show(title: str, pairs: list[tuple[Group, Group]], metric: str) -> str:
    """Print one comparison; its verdict."""
    olds, news = ([pair[k].scores(metric) for pair in pairs] for k in (0, 1))
    rows = [["environment", "seeds A", "seeds B", "IQM A", "IQM B", "P(B > A)", "note"]]
    for (old, new), a, b in zip(pairs, olds, news, strict=True):
        numbers = [number(stats.iqm(a)), number(stats.iqm(b)), f"{stats.improvement(b, a):.2f}"]
        note = f"A: {old.budget}, B: {new.budget}" if old.budget != new.budget else ""
        rows.append([old.env_id, str(len(a)), str(len(b)), *numbers, note])
    print(f"{title}, {metric}\n{aligned(rows, left=(0, 6))}")
    probability, low, high, p, verdict = judge(olds, news)
    line = f"P(B > A) = {probability:.2f}, 95 % interval [{low:.2f}, {high:.2f}]"
    print(f"  mean: {line}, permutation p = {p:.3g}")
    if verdict == "no evidence":
        seeds = stats.seeds_needed(probability, len(pairs))
        more = f"about {seeds:,} seeds an environment" if seeds < 1000 else "1,000 seeds or more"
        verdict += f"; if P is {probability:.2f}, it takes {more} to tell (power 80 %)"
    print(f"  {verdict}\n")
    return verdict


def compare(
    a: tyro.conf.Positional[Path],
    b: tyro.conf.Positional[Path | None] = None,
    metric: Metric = "training",
    algorithm: tuple[str, str] | None = None,
):
    """Compare B, the new, to A, the old, on the environments that both have finished seeds on.

    "improved" or "worse" if the 95 % interval of P(B > A), the probability that a run of B scores
    above one of A, excludes 1/2 and a permutation test has p < 0.05; else "no evidence". Exit code
    1 if something is worse, if a run of B is not finished or if B lacks what A has, 2 if nothing
    is in common: an environment takes part if both have two finished seeds of one length of
    training. Each algorithm is tested by itself: of many that have not changed, one in twenty
    seems to have.

    Args:
        a: folder of the old runs.
        b: folder of the new runs (default: that of A, with --algorithm).
        metric: mean of the last 100 training episodes, or of the final policy's.
        algorithm: compare this one of A to that one of B (default: each that both have).
    """
    if b is None and algorithm is None:
        refuse("compare takes two folders, or one and --algorithm X Y")
    runs = read([a]), read([b or a])
    olds, news = map(group, runs)
    names = [sorted({member.algorithm for member in side}) for side in (olds, news)]
    pairs = [algorithm] if algorithm else [(name, name) for name in names[0] if name in names[1]]
    for side, folder, there in zip((0, 1), (a, b or a), names, strict=True):
        if algorithm and algorithm[side] not in there:
            refuse(f"{folder}: no run of {algorithm[side]}; there are {', '.join(there)}")
    verdicts, lacking, gone = [], [], []
    for name in () if algorithm else names[0]:
        if name not in names[1]:
            gone.append(f"{name}: no run")
    for x, y in pairs:
        old, new = (
            {
                member.env_id: member
                for member in side
                if member.algorithm == name and not member.mixed and len(member.scores(metric)) > 1
            }
            for side, name in ((olds, x), (news, y))
        )
        common = sorted(old.keys() & new.keys())
        if common:
            title = x if x == y else f"A {x}, B {y}"
            verdicts.append(show(title, [(old[e], new[e]) for e in common], metric))
        apart = sorted({m.env_id for m in [*olds, *news] if m.algorithm in (x, y)} - set(common))
        if apart:
            places = ", ".join(apart)
            print(f"{x}: left out for want of two finished seeds of one length: {places}\n")
        if not algorithm:
            for env_id in sorted(old.keys() - new.keys()):
                gone.append(f"{env_id} {x}: two finished seeds of one length")
    tested = {y for _, y in pairs}
    for run in runs[1]:
        lost = run.status != "finished" or not np.isfinite(run.score(metric))
        if run.status == "unreadable" or (run.algorithm in tested and lost):
            why = f"{run.env_id} seed {run.seed}: {run.status} {run.reason}"
            lacking.append(why.rstrip())
    if not verdicts and not lacking:
        refuse(
            "no environment on which both have two finished seeds of one algorithm; "
            f"A has {', '.join(names[0])}; B has {', '.join(names[1])}"
        )
    for line in gone + lacking:
        print(f"B lacks {line}", file=sys.stderr)
    if gone or lacking or "worse" in verdicts:
        raise SystemExit(1)
