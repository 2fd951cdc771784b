"""Environments that worker processes can import:
`--env-id episodes_toy:Lengths-v0 --env-kwargs '{"fault": "step"}'`."""

import multiprocessing
import os
import random
import signal
from pathlib import Path

import gymnasium as gym
import numpy as np

BOXES = {
    "box": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
    "whole": gym.spaces.Box(0, 10, (2,), np.int64),
    "byte": gym.spaces.Box(-1, 1, (1,), np.int8),
    "bytes": gym.spaces.Box(0, 255, (2, 2), np.uint8),
    "half": gym.spaces.Box(-1.0, 1.0, (2,), np.float16),
    "double": gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "deep": gym.spaces.Box(-1, 1, (1, 1, 2), np.int32),
    "number": gym.spaces.Box(-1.0, 1.0, (), np.float32),
}
CHOICES = {"choices": gym.spaces.MultiDiscrete([2, 3]), "choice": gym.spaces.Discrete(3)}


class Lengths(gym.Env):
    """Episodes of 1 to `longest` steps that pay the sum of the action, in `actions`, and a draw.
    The second episode of each environment has a `fault`. In the folder `here` is a file for each
    process that has environments, which says whether they are open."""

    def __init__(self, actions="box", fault="none", longest=8, here=None, nested=False):
        self.action_space, self.fault, self.longest = (BOXES | CHOICES)[actions], fault, longest
        box = gym.spaces.Box(-1, 1, (3,))
        nest = gym.spaces.Dict(b=box, a=gym.spaces.Discrete(3))
        self.observation_space = nest if nested else box
        self.episode = 0
        self.file = Path(here, str(os.getpid())) if here else None
        self.write("open")
        self.strike("constructor")
        if fault == "second" and multiprocessing.current_process().name.endswith("-2"):
            raise ZeroDivisionError(f"boom in {fault}")

    def write(self, text: str):
        if self.file:
            self.file.write_text(text)

    def strike(self, place: str):
        if self.fault == place:
            raise ZeroDivisionError(f"boom in {place}")

    def observe(self):
        box = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        nested = isinstance(self.observation_space, gym.spaces.Dict)
        return {"b": box, "a": self.left % 3} if nested else box

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.left = int(self.np_random.integers(1, self.longest + 1))
        if self.episode == 2:
            self.strike("reset")
        return self.observe(), {}

    def step(self, action):
        assert np.shape(action) == self.action_space.shape
        assert np.asarray(action).dtype == self.action_space.dtype
        self.left -= 1
        if self.episode == 2:
            self.strike("step")
            if self.fault == "death":
                os.kill(os.getpid(), signal.SIGKILL)
        reward = float(np.sum(action, dtype=np.float64)) + self.np_random.normal()
        return self.observe(), reward, self.left == 0, False, {}

    def close(self):
        self.write("closed")


gym.register("Lengths-v0", Lengths)


class Careless(Lengths):
    """Draws from what belongs to nobody: in the constructor, at a reset and, with `often`, in every
    step. Episodes of 8 steps."""

    def __init__(self, often=False, actions="box"):
        super().__init__(actions)
        self.often, self.made = often, np.random.uniform(-1, 1)

    def observe(self):
        drawn = random.uniform(-1, 1) if self.often else 0.0
        return np.clip([self.made, self.task, drawn], -1, 1).astype(np.float32)

    def reset(self, seed=None, options=None):
        self.task = np.random.uniform(-0.5, 0.5) + random.uniform(-0.5, 0.5)
        super().reset()
        self.left = 8
        return self.observe(), {}

    def step(self, action):
        self.left -= 1
        return self.observe(), self.task, False, self.left == 0, {}


gym.register("Careless-v0", Careless)
