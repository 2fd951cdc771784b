"""Runs of settings that are no default any more: superseded/*.csv, a table for each study.

`python -m benchmark.published.superseded FOLDER` makes them of runs that were committed there by
`run --results FOLDER`, as what_matters.sh, explore.sh, rpo.sh and ppo.sh do.
"""

import csv
import sys
from pathlib import Path

import numpy as np

from benchmark import data
from benchmark.published import HERE

FOLDER = HERE / "superseded"
FIELDS = "env_id", "script", "variant", "seed", "steps", "commit", "final", "training"


def read(folder: Path = FOLDER) -> list[data.Run]:
    """Each row as a run. Its one training episode and its one evaluation have the means."""
    runs = []
    for path in sorted(folder.glob("*.csv")):
        for row in data.read_csv(path):
            info = {"status": "finished", "evaluation": [row["final"]]}
            info |= {"global_step": row["steps"], "git_commit": row["commit"]}
            episode = np.array([[row["steps"], 0.0, row["training"], 0.0]])
            runs.append(data.make_run(info, episode, row))
            runs[-1].place = path
    return runs


def study(run: data.Run) -> str:
    """The table that a run is in."""
    if run.script == "change" or run.variant.startswith(("study", "explore")):
        return "explore" if run.variant.startswith("explore") else "what_matters"
    return "rpo" if run.variant.startswith("rpo") else "defaults"


def write(runs: Path, folder: Path = FOLDER):
    """The tables, from committed runs."""
    tables = {}
    for run in data.find([runs]):
        scores = (round(run.score(metric), 4) for metric in ("evaluation", "training"))
        row = [run.env_id, run.script, run.variant, run.seed, run.info["global_step"]]
        tables.setdefault(study(run), []).append([*row, run.commit[:7], *scores])
    for name, rows in tables.items():
        with open(folder / f"{name}.csv", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([FIELDS, *rows])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
