"""An environment whose steps take 5 ms and compute nothing, like those of a simulator on another
machine. A script plays it by `--env-id benchmark.published.sleeper:Sleeper-v0`. Sizes are
HalfCheetah's, rewards and observations are random."""

import time

import gymnasium as gym
import numpy as np


class Sleeper(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (17,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (6,), np.float32)

    def __init__(self, seconds: float = 0.005):
        self.seconds = seconds

    def observe(self) -> np.ndarray:
        return self.np_random.standard_normal(17, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        time.sleep(self.seconds)
        return self.observe(), float(self.np_random.random()), False, False, {}


gym.register("Sleeper-v0", Sleeper, max_episode_steps=1000)
