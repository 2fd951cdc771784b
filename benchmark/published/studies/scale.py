"""The table of a protocol: returns in training and at the end of all runs in a folder.

python -m benchmark.published.studies.scale RUNS
"""

import csv
import sys
from pathlib import Path

import numpy as np

from benchmark import data

TABLE = data.PUBLISHED / "results/scale.csv"
FIELDS = ["env_id", "arm", "seed", "steps", "training", "last_100", "final"]


def over_training(run: data.Run, parts: int = 20) -> float:
    """Mean return over training: of each twentieth of the steps the mean of the episodes that
    ended in it, or the one before if none did."""
    ends = np.linspace(0, run.steps[-1], parts + 1)
    rows = np.split(run.returns, np.searchsorted(run.steps, ends[1:-1], side="right"))
    means = [part.mean() for part in rows if len(part)]
    filled = np.cumsum([bool(len(part)) for part in rows]) - 1
    return float(np.mean([means[max(k, 0)] for k in filled]))


if __name__ == "__main__":
    with open(TABLE, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for run in data.find([Path(sys.argv[1])]):
            if run.status == "finished" and len(run.evaluation):
                scores = over_training(run), run.score("training"), run.score("evaluation")
                steps = int(run.steps[-1])
                writer.writerow(
                    [run.env_id, run.variant, run.seed, steps, *(round(x, 3) for x in scores)]
                )
