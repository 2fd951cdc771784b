"""A small environment with an image, a vector, a choice and a number, to see that all are learned.

    python ppo_pixels.py --env-id benchmark.published.gates:Gates-v0

Random play gets about 2 of 20.
"""

import gymnasium as gym
import numpy as np


class Gates(gym.Env):
    """An image of 36 x 36 bytes shows which of three gates is open, a vector how high it is. A step
    at the open gate pays 1 - |height - chosen height|, at least 0. Other gates pay 0. An episode
    has 20 steps."""

    def __init__(self):
        box = gym.spaces.Box
        self.observation_space = gym.spaces.Dict(
            picture=box(0, 255, (36, 36, 1), np.uint8), height=box(-1.0, 1.0, (1,))
        )
        self.action_space = gym.spaces.Dict(
            gate=gym.spaces.Discrete(3), height=box(-2.0, 2.0, (1,))
        )

    def reset(self, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.t = 0
        return self.show(), {}

    def show(self) -> dict:
        self.gate = int(self.np_random.integers(3))
        self.height = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        picture = self.np_random.integers(0, 100, (36, 36, 1), np.uint8)
        picture[:, 12 * self.gate + 4 : 12 * self.gate + 8] += 150
        return {"picture": picture, "height": self.height}

    def step(self, action):
        self.t += 1
        near = max(0.0, 1.0 - abs(float(action["height"][0]) - float(self.height[0])))
        reward = near if action["gate"] == self.gate else 0.0
        return self.show(), reward, False, self.t == 20, {}


gym.register("Gates-v0", Gates)
