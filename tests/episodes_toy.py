"""Environments for tests of ppo_cma.py and ppo_kl_adaptive.py that worker processes can import:
`--env-id episodes_toy:Lengths-v0 --env-kwargs '{"fault": "step"}'`."""

import os
import signal

import gymnasium as gym
import numpy as np

BOXES = {
    "box": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
    "whole": gym.spaces.Box(0, 10, (2,), np.int64),
    "bytes": gym.spaces.Box(0, 255, (2, 2), np.uint8),
    "half": gym.spaces.Box(-1.0, 1.0, (2,), np.float16),
    "double": gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64),
}


class Lengths(gym.Env):
    """Episodes of 3 to 20 steps that pay the sum of the action, in `actions`. The third episode of
    each environment has a `fault`."""

    observation_space = gym.spaces.Box(-1, 1, (3,))

    def __init__(self, actions="box", fault="none"):
        self.action_space, self.fault, self.episode = BOXES[actions], fault, 0
        self.strike("constructor")

    def strike(self, place: str):
        if self.fault == place:
            raise ZeroDivisionError(f"boom in {place}")

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.left = int(self.np_random.integers(3, 21))
        if self.episode == 3:
            self.strike("reset")
        return self.np_random.uniform(-1, 1, 3), {}

    def step(self, action):
        assert action.shape == self.action_space.shape
        assert action.dtype == self.action_space.dtype
        self.left -= 1
        if self.episode == 3:
            self.strike("step")
            if self.fault == "death":
                os.kill(os.getpid(), signal.SIGKILL)
        reward = float(np.sum(action, dtype=np.float64))
        return self.np_random.uniform(-1, 1, 3), reward, self.left == 0, False, {}


gym.register("Lengths-v0", Lengths)
