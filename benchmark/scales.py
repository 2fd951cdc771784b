"""Random policies' mean returns, the low ends in scales.csv.

python -m benchmark.scales HalfCheetah-v4 Hopper-v4    # prints a line per environment
"""

import numpy as np
import tyro


def random_return(env_id: str, episodes: int = 100, seed: int = 0) -> np.ndarray:
    """Raw returns [episodes] of actions drawn uniformly from the action space."""
    import gymnasium as gym

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
    env.close()
    return returns


def scales(env_ids: tyro.conf.Positional[list[str]], episodes: int = 100, seed: int = 0):
    """Print each environment's mean return under a random policy, and its standard error."""
    for env_id in env_ids:
        returns = random_return(env_id, episodes, seed)
        error = returns.std(ddof=1) / np.sqrt(episodes)
        print(f"{env_id},{returns.mean():.2f} +- {error:.2f}", flush=True)


if __name__ == "__main__":
    tyro.cli(scales)
