"""Breakout by EnvPool and nothing else: steps per second by games and threads.

    python -m benchmark.published.gpu_games TABLE.csv

It measures twice: as the C library allocates memory by default, and with large blocks kept (by the
variables MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_). Fresh pages are costly on a virtual
machine.
"""

import csv
import os
import subprocess
import sys
import time

SIZES = (8, 1), (8, 2), (8, 4), (8, 8), (128, 1), (128, 8), (128, 16)
KEPT = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}


def measure():
    """Print a row for each of SIZES."""
    import envpool
    import numpy as np

    for games, threads in SIZES:
        envs = envpool.make(
            "Breakout-v5", env_type="gymnasium", num_envs=games, num_threads=threads
        )
        envs.reset()
        actions = np.zeros(games, int)
        count = max(20, 2000 // games)
        for _ in range(20):
            envs.step(actions)
        start = time.perf_counter()
        for _ in range(count):
            envs.step(actions)
        rate = games * count / (time.perf_counter() - start)
        print(f"{games},{threads},{rate:.0f}", flush=True)


def main(table: str):
    with open(table, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["games", "threads", "memory", "steps_per_second"])
        for memory, more in {"default": {}, "kept": KEPT}.items():
            command = [sys.executable, "-m", "benchmark.published.gpu_games"]
            output = subprocess.check_output(command, env=os.environ | more, text=True)
            for line in output.splitlines():
                games, threads, rate = line.split(",")
                writer.writerow([games, threads, memory, rate])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        measure()
