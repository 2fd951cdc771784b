"""Steps per second of whole trainings, for each way to step the environments.

    python -m benchmark.published.studies.border_training sleep HalfCheetah Humanoid

Each round trains once with each engine, in turn. Seconds are the run's own, by the clock, from the
time when all processes are up. The rows of other environments in the table stay.
"""

import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmark import data
from benchmark.published import RESULTS
from benchmark.published.studies.border_speed import machine

LARGE = "--num-envs 64 --num-steps 64 --num-minibatches 4 --update-epochs 2 --learning-rate 2.95e-3"
SLEEP = "--num-envs 8 --num-steps 512 --num-minibatches 4 --update-epochs 4"
TASKS = {  # id, flags, steps
    "sleep": ("benchmark.published.sleeper:Sleeper-v0", SLEEP, 12_288),
    "HalfCheetah": ("HalfCheetah-v4", LARGE, 131_072),
    "Humanoid": ("Humanoid-v4", LARGE, 65_536),
}
ENGINES = {"sleep": ("0", "2", "4", "8")}  # workers
ENGINES |= dict.fromkeys(("HalfCheetah", "Humanoid"), ("0", "2", "envpool 1", "envpool 2"))
COLUMNS = ("environment", "engine", "round", "steps", "seconds", "load_before")
TABLE = RESULTS / "speed" / "border_training.csv"


def train(name: str, engine: str) -> tuple[int, float]:
    """Steps of a training and the seconds that they took."""
    env_id, flags, steps = TASKS[name]
    *pool, workers = engine.split()
    prefix = "envpool:" if pool else ""
    command = f"ppo_continuous_action.py --no-cuda --no-compile {flags}"
    command += f" --total-timesteps {steps} --env-id {prefix}{env_id} --env-workers {workers}"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [sys.executable, *shlex.split(command), "--run-dir", str(run)]
        subprocess.run(words, check=True, capture_output=True)
        done = json.loads((run / "run.json").read_text())
    return done["global_step"], done["wall_seconds"]


def main(names: list[str], rounds: int = 3):
    rows = []
    for name in names:
        for k in range(rounds):
            for engine in ENGINES[name]:
                load = f"{os.getloadavg()[0]:.2f}"
                rows.append([name, engine, k + 1, *train(name, engine), load])
                print(*rows[-1], flush=True)
    if TABLE.exists():
        before = [list(row.values()) for row in data.read_csv(TABLE)]
        rows = [row for row in before if row[0] not in names] + rows
    with open(TABLE, "w", newline="") as file:
        file.write(f"# {machine()}\n")
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main(sys.argv[1:] or list(TASKS))
