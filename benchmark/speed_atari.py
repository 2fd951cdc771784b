"""Steps per CPU-second and per second of ppo_atari_multigpu.py on 1 and 2 processes, and the rate
of EnvPool alone.

    python benchmark/speed_atari.py --env-id Pong-v5

In each round, one after the other: the variants below, each as a program of its own, once for few
iterations and once for more, whose difference is what is reported: so neither imports nor the first
iterations count. CPU time is of all its processes. Then EnvPool with random actions, as many
environments on one thread. Writes results/speed_atari-<env-id>.csv; its last three columns, shares
of wall time that the script once logged, stay empty.
"""

import csv
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
SCRIPT = str(HERE.parent / "ppo_atari_multigpu.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ONE_THREAD = ["--num-threads", "1", "--env-threads", "1"]
VARIANTS = {  # what goes before the script, and after
    "1 process, 1 thread": ([], ONE_THREAD),
    "1 process, 1 thread, bf16": ([], [*ONE_THREAD, "--bf16"]),
    "2 processes, 1 thread each": (TORCHRUN, ONE_THREAD),
    "2 processes, 1 thread each, bf16": (TORCHRUN, [*ONE_THREAD, "--bf16"]),
}
SHARES = ("environments", "inference", "update")  # older tables have them
COLUMNS = ("round", "what", "steps", "cpu_seconds", "wall_seconds", *SHARES)


@dataclass
class Args:
    env_id: str = "Pong-v5"
    """the game"""
    rounds: int = 3
    """rounds to measure"""
    iterations: tuple[int, int] = (1, 5)
    """of the shorter and of the longer program; what is between them is measured"""
    num_envs: int = 8
    """environments of all processes together"""
    output: Path = HERE / "results"
    """folder for the table"""


def children() -> float:
    """CPU seconds of all ended children and theirs."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def run(args: Args, before: list[str], after: list[str], iterations: int):
    """CPU and wall seconds of a program."""
    steps = iterations * args.num_envs * 128
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *before, SCRIPT, "--env-id", args.env_id, *after]
        command += ["--num-envs", str(args.num_envs), "--total-timesteps", str(steps)]
        command += ["--run-dir", f"{folder}/run", "--no-cuda"]
        cpu, wall = children(), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=os.environ | THREADS)
        return children() - cpu, time.perf_counter() - wall


THREADS = {"OMP_NUM_THREADS": "1"}


def bare(args: Args, steps: int = 20_000) -> tuple[float, float]:
    """CPU and wall seconds of as many steps of EnvPool with random actions."""
    import envpool
    import numpy as np

    envs = envpool.make(
        args.env_id, env_type="gymnasium", num_envs=args.num_envs, num_threads=1, seed=0,
        episodic_life=True, reward_clip=True,
    )  # fmt: skip
    rounds = steps // args.num_envs
    actions = np.random.default_rng(0).integers(envs.action_space.n, size=(rounds, args.num_envs))
    envs.reset()
    cpu, wall = time.process_time(), time.perf_counter()
    for action in actions:
        envs.step(action)
    return time.process_time() - cpu, time.perf_counter() - wall


def main(args: Args):
    few, more = args.iterations
    rows = []
    for k in range(1, args.rounds + 1):
        for what, (before, after) in VARIANTS.items():
            short, long = (run(args, before, after, iterations) for iterations in (few, more))
            steps = (more - few) * args.num_envs * 128
            spent = [round(b - a, 2) for a, b in zip(short, long, strict=True)]
            rows.append([k, what, steps, *spent, *("" for _ in SHARES)])
            print(*rows[-1], flush=True)
        spent = [round(x, 2) for x in bare(args)]
        rows.append([k, "EnvPool alone", 20_000, *spent, *("" for _ in SHARES)])
        print(*rows[-1], flush=True)
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) or ["unknown"]
    facts = {"cpu": cpu[0], "cores": os.cpu_count(), "python": platform.python_version()}
    facts |= {name: version(name) for name in ("torch", "envpool", "numpy")}
    args.output.mkdir(parents=True, exist_ok=True)
    with open(args.output / f"speed_atari-{args.env_id}.csv", "w", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in facts.items())
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(rows)
    print("medians: steps per CPU-second, per second")
    for what in [*VARIANTS, "EnvPool alone"]:
        mine = [row for row in rows if row[1] == what]
        rates = [median(row[2] / row[column] for row in mine) for column in (3, 4)]
        print(f"{what:34} {rates[0]:8.0f} {rates[1]:8.0f}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
