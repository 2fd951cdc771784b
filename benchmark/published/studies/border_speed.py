"""Steps per second of environments with random actions, for each way to step many of them.

    python -m benchmark.published.studies.border_speed --names sleep --rounds 3

It measures this project's `Envs` in one process (0 workers), in W worker processes and on W threads
of EnvPool. Beside them are Stable-Baselines3's SubprocVecEnv and gymnasium's AsyncVectorEnv, which
have one process for each environment. In each round the engines take turns. Steps that only begin a
new episode don't count. CPU time is that of all processes, from the first measured step to the
last. The rows of other environments in the table stay.
"""

import csv
import functools
import importlib
import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro

from benchmark import programs
from benchmark.published import RESULTS

NAMES = {  # script and id
    "sleep": ("ppo_continuous_action", "benchmark.published.sleeper:Sleeper-v0"),
    "HalfCheetah": ("ppo_continuous_action", "HalfCheetah-v4"),
    "Humanoid": ("ppo_continuous_action", "Humanoid-v4"),
    "highway": ("ppo", "highway_env:highway-v0"),
}
POOL = {"HalfCheetah": "HalfCheetah-v4", "Humanoid": "Humanoid-v4", "highway": "highway-v0"}
COLUMNS = ("environment", "num_envs", "engine", "workers", "round", "steps", "seconds")
COLUMNS += ("cpu_seconds", "load_before")
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Args:
    names: list[str] = field(default_factory=lambda: list(NAMES))  # environments to measure
    num_envs: list[int] = field(default_factory=lambda: [8, 64])
    workers: list[int] = field(default_factory=lambda: [0, 1, 2, 4, 8])
    rounds: int = 3
    seconds: float = 5.0  # length of a measurement; three steps of all environments at least
    real_time: bool = False  # run before all other programs, on a busy machine: for sleepers alone
    output: Path = RESULTS / "speed" / "border.csv"


def tree(process: int) -> list[int]:
    """A process and all that descend from it."""
    found = [process]
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text().split():
            found += tree(int(child))
    return found


def cpu_seconds() -> float:
    """CPU time of this process and of all living processes that descend from it."""
    total = 0
    for process in tree(os.getpid()):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        user, system = fields[11:13]
        total += int(user) + int(system)
    return total / TICK


def hurry():
    """Let every thread of this process and of those below it run before all other programs, so that
    a sleeper wakes up in time. On a busy machine a sleep of 5 ms would take 15."""
    for process in tree(os.getpid()):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def make(env_id: str) -> gym.Env:
    """The environment as the scripts make it, without importing them in each process."""
    gym.logger.min_level = gym.logger.ERROR
    env = gym.make(env_id, disable_env_checker=True)
    return gym.wrappers.FlattenObservation(env)


class Ours:
    """This project's `Envs`, in this process, in workers or by EnvPool."""

    def __init__(self, script: str, env_id: str, num_envs: int, workers: int):
        module = importlib.import_module(script)
        args = module.Args(env_id=env_id, num_envs=num_envs, env_workers=workers)
        self.envs = module.make_envs(args, num_envs, {})
        self.space = self.envs.action_space

    def step(self, actions: np.ndarray) -> int:
        counts = len(actions) - np.count_nonzero(self.envs.autoreset)
        self.envs.step(actions.reshape(len(actions), -1))
        return counts

    def close(self):
        self.envs.close()


class Async:
    """gymnasium's AsyncVectorEnv with its defaults: shared memory, and the next step resets."""

    def __init__(self, env_id: str, num_envs: int):
        self.envs = gym.vector.AsyncVectorEnv([functools.partial(make, env_id)] * num_envs)
        self.space = self.envs.single_action_space
        self.envs.reset(seed=1)
        self.over = np.zeros(num_envs, bool)

    def step(self, actions: np.ndarray) -> int:
        counts = len(actions) - np.count_nonzero(self.over)
        _, _, terminated, truncated, _ = self.envs.step(actions)
        self.over = terminated | truncated
        return counts

    def close(self):
        self.envs.close()


class Subproc:
    """Stable-Baselines3's SubprocVecEnv, which resets at once. Its processes are started by fork.
    By forkserver, its default, each would import torch, and 64 of them would take 15 GB. Steps cost
    the same."""

    def __init__(self, env_id: str, num_envs: int):
        from stable_baselines3.common.vec_env import SubprocVecEnv

        made = [functools.partial(make, env_id)] * num_envs
        self.envs = SubprocVecEnv(made, start_method="fork")
        self.space = self.envs.action_space
        self.envs.seed(1)
        self.envs.reset()

    def step(self, actions: np.ndarray) -> int:
        self.envs.step(actions)
        return len(actions)

    def close(self):
        self.envs.close()


def engines(
    name: str, num_envs: int, workers: list[int]
) -> dict[tuple[str, int], functools.partial]:
    """A function that opens each engine, by its name and its number of processes or threads."""
    script, env_id = NAMES[name]
    found = {}
    for count in workers:
        found["ours", count] = functools.partial(Ours, script, env_id, num_envs, count)
    found["SubprocVecEnv", num_envs] = functools.partial(Subproc, env_id, num_envs)
    found["AsyncVectorEnv", num_envs] = functools.partial(Async, env_id, num_envs)
    if name in POOL:
        pool_id = f"envpool:{POOL[name]}"
        for count in workers:
            if count > 0:
                found["EnvPool", count] = functools.partial(Ours, script, pool_id, num_envs, count)
    return found


def measure(opened, num_envs: int, seconds: float) -> tuple[int, float, float]:
    """Steps, seconds and CPU-seconds of an engine that is open."""
    opened.space.seed(1)
    drawn = [np.array([opened.space.sample() for _ in range(num_envs)]) for _ in range(16)]
    actions = itertools.cycle(drawn)
    for _ in range(2):  # until every process is up
        opened.step(next(actions))
    steps = 0
    cpu = cpu_seconds()
    start = time.perf_counter()
    for k in itertools.count(1):
        steps += opened.step(next(actions))
        if k >= 3 and time.perf_counter() - start >= seconds:
            return int(steps), time.perf_counter() - start, cpu_seconds() - cpu


def missing(name: str) -> str:
    """Why an environment can't be made; empty if it can."""
    try:
        make(NAMES[name][1]).close()
    except Exception as error:
        return f"{name}: {error}"
    return ""


def table(path: Path) -> tuple[dict[str, str], list[list[str]]]:
    """The facts above a table, by environment, and its rows; both empty if there is no table."""
    if not path.exists():
        return {}, []
    lines = path.read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = [*csv.reader(line for line in lines if not line.startswith("# "))]
    return facts, rows[1:]


def machine() -> str:
    """Hardware, versions and commit in one line."""
    found = programs.provenance([sys.executable, __file__])
    hardware = found["hardware"]
    versions = ", ".join(f"{package} {number}" for package, number in found["versions"].items())
    commit = str(found["git_commit"])[:12]
    changed = " and changes" if found["git_dirty"] else ""
    return f"{hardware['cpu']}, {hardware['cores']} cores; {versions}; commit {commit}{changed}"


def report(rows: list[list[str]]):
    """Print medians over the rounds."""
    shown = [["environment", "N", "engine", "workers", "steps/s", "per CPU-second", "load"]]
    keys = sorted({tuple(order(row)) for row in rows})
    for key in keys:
        group = [row for row in rows if order(row) == key]
        rate = statistics.median(int(row[5]) / float(row[6]) for row in group)
        cpu_rate = statistics.median(int(row[5]) / max(float(row[7]), 0.01) for row in group)
        load = max(float(row[8]) for row in group)
        cells = [f"{rate:,.0f}", f"{cpu_rate:,.0f}", f"{load:.1f}"]
        shown.append([*group[0][:4], *cells])
    print(programs.aligned(shown, (0, 2)))


def order(row: list[str]) -> tuple:
    """A row's place: by environments in the order of NAMES, then sizes, engines and workers."""
    ways = ("ours", "EnvPool", "SubprocVecEnv", "AsyncVectorEnv")
    return [*NAMES].index(row[0]), int(row[1]), ways.index(row[2]), int(row[3])


def main(args: Args):
    facts, rows = table(args.output)
    for name in args.names:
        if why := missing(name):
            programs.refuse(why)
    for name in args.names:
        how = "; before all other programs" if args.real_time else ""
        facts[name] = machine() + how
        rows = [row for row in rows if row[0] != name or int(row[1]) not in args.num_envs]
        for k, num_envs in itertools.product(range(1, args.rounds + 1), args.num_envs):
            for (engine, workers), start in engines(name, num_envs, args.workers).items():
                if workers > num_envs:
                    continue
                load = os.getloadavg()[0]
                opened = start()
                if args.real_time:
                    hurry()
                steps, seconds, cpu = measure(opened, num_envs, args.seconds)
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
                opened.close()
                row = [name, num_envs, engine, workers, k, steps]
                row += [f"{seconds:.3f}", f"{cpu:.2f}", f"{load:.2f}"]
                rows.append([str(cell) for cell in row])
                print(*row, flush=True)
        rows.sort(key=lambda row: (*order(row), int(row[4])))
        with open(args.output, "w", newline="") as file:  # once an environment is whole
            for known in sorted(facts, key=[*NAMES].index):
                file.write(f"# {known}: {facts[known]}\n")
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    report([row for row in rows if row[0] in args.names])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
