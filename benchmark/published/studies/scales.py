"""`python -m benchmark.published.studies.scales ENV...` prints the mean return of random actions on
each environment: the low ends in scales.csv."""

import sys

import gymnasium as gym
import numpy as np


def random_return(env_id: str, episodes: int = 100, seed: int = 0) -> np.ndarray:
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id), buffer_length=episodes)
    env.action_space.seed(seed)
    env.reset(seed=seed)
    while len(env.return_queue) < episodes:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    return np.array(env.return_queue)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = random_return(name)
        error = found.std(ddof=1) / len(found) ** 0.5
        print(f"{name},{found.mean():.2f} +- {error:.2f}", flush=True)
