"""Tasks that need a memory.

    python ppo_lstm.py --env-id benchmark.published.novel:CartPoleNoVel-v1

Four are gymnasium's without the velocities, as rl-baselines3-zoo masks them. In the fifth, Cue, a
sign is shown only once, 20 steps before it is needed. Without a memory the best on Cue is 0.5.
"""

import gymnasium as gym
import numpy as np

SEEN = {  # the numbers of an observation that are left
    "CartPole-v1": [0, 2],
    "Pendulum-v1": [0, 1],
    "MountainCarContinuous-v0": [0],
    "LunarLander-v3": [0, 1, 4, 6, 7],
}


class Cue(gym.Env):
    """The first of `delay` + 1 observations shows one of two signs, the others show none. The last
    one says that it is the last. There the action that the sign has named pays 1. Nothing else
    pays."""

    def __init__(self, delay: int = 20):
        self.delay = delay
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.t = 0
        self.sign = int(self.np_random.integers(2))
        return np.array([2 * self.sign - 1, 1, 0], np.float32), {}

    def step(self, action):
        right = float(action == self.sign)
        over = self.t == self.delay
        self.t += 1
        obs = np.array([0, 0, self.t == self.delay], np.float32)
        return obs, right if over else 0.0, over, False, {}


def without_velocities(env_id: str, **options) -> gym.Env:
    env = gym.make(env_id, **options)
    space = env.observation_space
    kept = SEEN[env_id]
    box = gym.spaces.Box(space.low[kept], space.high[kept], dtype=space.dtype)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[kept], box)


def register(env_id: str):
    name, version = env_id.split("-")
    gym.register(f"{name}NoVel-{version}", lambda **how: without_velocities(env_id, **how))


for env_id in SEEN:
    register(env_id)
gym.register("Cue-v0", Cue)
