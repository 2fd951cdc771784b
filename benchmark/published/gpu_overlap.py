"""What would be gained by acting for one half of the games while the other half steps.

    python -m benchmark.published.gpu_overlap TABLE.csv GAMES THREADS ACTING_MS...
    python -m benchmark.published.gpu_overlap TABLE.csv --model

The first form plays Breakout by EnvPool with drawn actions. The host is busy for ACTING_MS between
two steps of a game, as if it acted on a GPU. There are three schedules:

    together   one pool: all games step, then the host acts
    pinned     the same, with each thread on a core of its own
    halves     two pools of half the games, each with as many threads: the host acts for one, as
               long as for all, while the other's games step

They take turns. The table has the medians of the rounds, and the ratio of halves to together with
its range.

The second form needs one core and no quiet machine. It measures the CPU time of a game's steps, and
works out what the schedules would take on so many cores if nothing else cost time.
"""

import heapq
import sys
import time
from pathlib import Path
from statistics import median

import envpool
import numpy as np

from benchmark.published.gpu_profile import add, read

ROUNDS = 5
SECONDS = 1.0  # of a round
MODELS = [(8, 16), (32, 16), (128, 16)]  # games, cores
ACTING = (0.2, 0.5, 1.0, 2.0)  # acting, in mean steps of a game


def busy(milliseconds: float):
    end = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < end:
        pass


class Pools:
    """One or two pools that play all games."""

    def __init__(self, games: int, threads: int, served: str):
        number = 2 if served == "halves" else 1
        self.games = games // number
        more = {"thread_affinity_offset": 0} if served == "pinned" else {}
        more |= {"num_envs": self.games, "num_threads": min(threads, self.games)}
        self.pools = [
            envpool.make("Breakout-v5", env_type="gymnasium", seed=100 * k, **more)
            for k in range(number)
        ]
        self.rng = np.random.default_rng(0)
        for pool in self.pools:
            pool.reset()
            pool.send(self.actions())

    def actions(self) -> np.ndarray:
        return self.rng.integers(0, 4, self.games)

    def rate(self, acting_ms: float, seconds: float) -> float:
        """Steps per second of all games."""
        start = time.perf_counter()
        steps = 0
        while time.perf_counter() < start + seconds:
            for pool in self.pools:
                pool.recv()
                busy(acting_ms)
                pool.send(self.actions())
                steps += self.games
        return steps / (time.perf_counter() - start)


def measure(table: Path, games: str, threads: str, acting: list[str]):
    known = {(row["games"], row["threads"], row["acting_ms"]) for row in read(table)}
    wanted = [float(ms) for ms in acting if (games, threads, str(float(ms))) not in known]
    served = ("together", "pinned", "halves")
    ways = {way: Pools(int(games), int(threads), way) for way in served}
    for acting_ms in wanted:
        rates = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, pools in ways.items():
                rates[way].append(pools.rate(acting_ms, SECONDS))
        row = {"games": games, "threads": threads, "acting_ms": acting_ms}
        row |= {way: round(median(found)) for way, found in rates.items()}
        gains = [b / a for a, b in zip(rates["together"], rates["halves"], strict=True)]
        row |= {"gain": round(median(gains), 3), "least": round(min(gains), 3)}
        add(table, row | {"most": round(max(gains), 3)})


# --- the model ------------------------------------------------------------------------------------
def step_times(steps: int = 6000) -> np.ndarray:
    """CPU time of each step of one game, as a multiple of their mean."""
    game = envpool.make("Breakout-v5", env_type="gymnasium", num_envs=1, num_threads=1, seed=3)
    game.reset()
    rng = np.random.default_rng(0)
    times = []
    for _ in range(steps):
        action = rng.integers(0, 4, 1)
        start = time.process_time()
        game.step(action)
        times.append(time.process_time() - start)
    return np.array(times) / np.mean(times)


def modelled(times, parts: int, games: int, cores: int, acting: float, steps: int = 3000) -> float:
    """Mean time of a step of all games, which `cores` play in order. One host acts for each of
    `parts` equal parts of the games in turn, and takes `acting` for each."""
    rng = np.random.default_rng(1)
    free = [0.0] * cores  # when each core is free
    ready = [0.0] * parts  # when each part's games have stepped
    host = 0.0
    for _ in range(steps):
        for part in range(parts):
            host = max(host, ready[part]) + acting
            for length in rng.choice(times, games // parts):
                end = max(heapq.heappop(free), host) + length
                heapq.heappush(free, end)
                ready[part] = max(ready[part], end)
    return max(ready) / steps


def model(table: Path):
    times = step_times()
    print("slowest step:", times.max(), "99%:", np.percentile(times, 99))
    for games, cores in MODELS:
        for acting in ACTING:
            together = modelled(times, 1, games, cores, acting)
            halves = modelled(times, 2, games, cores, acting)
            row = {"games": games, "cores": cores, "acting": acting}
            row |= {"together": round(together, 2), "halves": round(halves, 2)}
            add(table, row | {"gain": round(together / halves, 3)})


if __name__ == "__main__":
    table = Path(sys.argv[1])
    if sys.argv[2] == "--model":
        model(table)
    else:
        measure(table, sys.argv[2], sys.argv[3], sys.argv[4:])
