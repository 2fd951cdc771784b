"""Random policies' mean returns, the low ends in scales.csv.

python -m benchmark.published.scales Hopper-v4    # prints a line per environment
"""

import sys

import gymnasium as gym
import numpy as np


def random_return(env_id: str, episodes: int = 100, seed: int = 0) -> np.ndarray:
    """Raw returns [episodes] of actions drawn uniformly from the action space."""
    env = gym.make(env_id)
    env.action_space.seed(seed)
    returns = np.zeros(episodes)
    for episode in range(episodes):
        env.reset(seed=seed if episode == 0 else None)
        done = False
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            returns[episode] += reward
            done = terminated or truncated
    return returns


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = random_return(name)
        print(
            f"{name},{found.mean():.2f} +- {found.std(ddof=1) / len(found) ** 0.5:.2f}", flush=True
        )
