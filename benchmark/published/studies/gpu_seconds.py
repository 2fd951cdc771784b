"""When a training reached which return: `python -m benchmark.published.studies.gpu_seconds RUN...`

It prints for each run the steps per second of its second half, its last mean of 100 training
episodes, and when that mean first reached the goals below.
"""

import json
import sys
from pathlib import Path

import numpy as np

from benchmark.stats import first_reach

GOALS = {
    "Pong-v5": (0, 10, 18, 20),
    "Breakout-v5": (10, 50, 100, 290),
    "HalfCheetah-v4": (5000, 5500, 6490, 10000),
    "Walker2d-v4": (3000, 5000, 7046),
    "Hopper-v4": (2000, 3000, 3100),
    "Ant-v4": (3000, 5000, 6294),
}

for folder in map(Path, sys.argv[1:]):
    run = json.loads((folder / "run.json").read_text())
    table = np.loadtxt(folder / "episodes.csv", delimiter=",", skiprows=1, ndmin=2)
    env_id = run["args"]["env_id"].removeprefix("envpool:")
    end = run["global_step"], run["wall_seconds"]
    print(f"{env_id}, seed {run['seed']}: {end[0]} steps in {end[1]:.1f} s, {run['status']}")
    if not len(table):
        print(f"{env_id}: no episode has ended")
        continue
    steps, seconds, returns, _ = table.T
    half = np.searchsorted(seconds, seconds[-1] / 2)
    rate = (steps[-1] - steps[half]) / max(seconds[-1] - seconds[half], 1e-9)
    print(f"{env_id}: {rate:.0f} steps/s in the second half of this time")
    print(f"{env_id}: {returns[-100:].mean():.2f}, mean of the last 100 episodes")
    for goal in GOALS.get(env_id, ()):
        after = first_reach(seconds, returns, goal, least=100)
        step = first_reach(steps, returns, goal, least=100)
        print(f"{env_id}: {goal} after {after:.0f} s, {step / 1e6:.2f}M steps")
