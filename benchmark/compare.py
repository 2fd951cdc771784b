"""python -m benchmark compare: is the new better or worse than the old, or can seeds not tell?"""

import sys
from pathlib import Path

import numpy as np
import tyro

from benchmark import data, stats
from benchmark.programs import aligned, refuse
from benchmark.report import Group, Metric, group, number

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
    olds, news = ([member.scores(metric) for member in side] for side in zip(*pairs, strict=True))
    rows = [["environment", "seeds A", "seeds B", "IQM A", "IQM B", "P(B > A)", "note"]]
    for (old, new), a, b in zip(pairs, olds, news, strict=True):
        numbers = [number(stats.iqm(a)), number(stats.iqm(b)), f"{stats.improvement(b, a):.2f}"]
        note = f"A: {old.budget}, B: {new.budget}" if old.budget != new.budget else ""
        rows.append([old.env_id, str(len(a)), str(len(b)), *numbers, note])
    print(f"{title}, {metric}\n{aligned(rows, left=(0, 6))}")
    probability, low, high, p, verdict = judge(olds, news)
    line = f"P(B > A) = {probability:.2f}, 95 % interval [{low:.2f}, {high:.2f}]"
    print(f"  mean: {line}, permutation p = {p:.3g}")
    more = ""
    if verdict == "no evidence":
        seeds = stats.seeds_needed(probability, len(pairs))
        count = f"about {seeds} seeds" if seeds < 1000 else "1,000 seeds or more"
        more = f"; at this P a power of 80 % takes {count} an environment"
    print(f"  {verdict}{more}\n")
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
    sides = [data.find([folder]) for folder in (a, b or a)]
    names = [sorted({run.algorithm for run in runs}) for runs in sides]
    old, new = (
        {
            (member.algorithm, member.env_id): member
            for member in group(runs)
            if not member.mixed and len(member.scores(metric)) > 1
        }
        for runs in sides
    )
    pairs = [algorithm] if algorithm else [(name, name) for name in names[0]]
    verdicts, gone, unfinished = [], [], []
    for x, y in pairs:
        named = zip(sides, (x, y), strict=True)
        env_ids = {run.env_id for runs, name in named for run in runs if run.algorithm == name}
        common = sorted(env_id for env_id in env_ids if (x, env_id) in old and (y, env_id) in new)
        if common:
            title = x if x == y else f"A {x}, B {y}"
            both = [(old[x, env_id], new[y, env_id]) for env_id in common]
            verdicts.append(show(title, both, metric))
        for env_id in sorted(env_ids - set(common)):
            print(f"{x}: left out for want of two finished seeds of one length: {env_id}\n")
            if not algorithm and (x, env_id) in old:
                gone.append(f"{env_id} {x}: two finished seeds of one length")
    for run in sides[1]:
        lost = run.status != "finished" or not np.isfinite(run.score(metric))
        if run.status == "unreadable" or (run.algorithm in [y for _, y in pairs] and lost):
            words = f"{run.env_id} seed {run.seed}: {run.status} {run.reason}"
            unfinished.append(words.rstrip())
    if not verdicts and not unfinished:
        refuse(
            "no environment on which both have two finished seeds of one algorithm; "
            f"A has {', '.join(names[0])}; B has {', '.join(names[1])}"
        )
    for line in gone + unfinished:
        print(f"B lacks {line}", file=sys.stderr)
    if gone or unfinished or "worse" in verdicts:
        raise SystemExit(1)
