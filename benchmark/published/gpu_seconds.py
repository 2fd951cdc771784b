"""When a training had what return: `python -m benchmark.published.gpu_seconds RUN...`

For each run its environment, steps, seconds, and when the mean return of 100 training episodes
first reached a goal of GOALS, by its own table of episodes.
"""

import csv
import json
import sys
from pathlib import Path

import numpy as np

GOALS = {
    "Pong-v5": (0, 10, 18, 20),
    "Breakout-v5": (10, 50, 100, 290),
    "HalfCheetah-v4": (5000, 6490, 10000),
    "Walker2d-v4": (3000, 5000, 7046),
    "Hopper-v4": (2000, 3000, 3100),
    "Ant-v4": (3000, 5000, 6294),
}
WINDOW = 100  # episodes


def reached(returns: np.ndarray, goal: float) -> int | None:
    """The episode with which the mean of the last WINDOW first was `goal`; None if it never was."""
    if len(returns) < WINDOW:
        return None
    sums = np.cumsum([0.0, *returns])
    means = (sums[WINDOW:] - sums[:-WINDOW]) / WINDOW
    hits = np.flatnonzero(means >= goal)
    return int(hits[0]) + WINDOW - 1 if len(hits) else None


def report(folder: Path) -> list[str]:
    """Lines on a run."""
    run = json.loads((folder / "run.json").read_text())
    env_id = run["args"]["env_id"]
    with (folder / "episodes.csv").open() as file:
        rows = list(csv.DictReader(file))
    returns = np.array([float(row["return"]) for row in rows])
    steps, seconds = run["global_step"], run["wall_seconds"]
    lines = [f"{env_id}, seed {run['seed']}: {steps} steps in {seconds:.0f} s, {run['status']}"]
    if len(rows) > 1:
        last = float(rows[-1]["seconds"])
        half = next(row for row in rows if float(row["seconds"]) >= last / 2)
        covered = int(rows[-1]["global_step"]) - int(half["global_step"])
        rate = covered / max(last - float(half["seconds"]), 1e-9)
        lines.append(f"{env_id}: {rate:.0f} steps/s in the second half of this time")
        lines.append(
            f"{env_id}: {returns[-WINDOW:].mean():.2f}, mean of the last {WINDOW} episodes"
        )
    for goal in GOALS.get(env_id, ()):
        index = reached(returns, goal)
        if index is None:
            lines.append(f"{env_id}: {goal} not reached")
        else:
            row = rows[index]
            step = int(row["global_step"]) / 1e6
            lines.append(f"{env_id}: {goal} after {float(row['seconds']):.0f} s, {step:.2f}M steps")
    return lines


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(report(Path(name))))
