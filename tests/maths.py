"""What tests of several scripts share: a run's returns, an agent's parameters, a clock."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from program import rows

LINE = gym.spaces.Box(-1, 1, (1,))


def returns(folder: Path) -> list[float]:
    """Of a run's training episodes."""
    return [float(score) for _, score, _ in rows(folder)[1:]]


def vector(agent) -> torch.Tensor:
    """A copy of all parameters."""
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


class Clock(gym.Env):
    """Pays 1 a step and ends its k-th episode after `lengths[k]` steps; observes (k, steps so far),
    in the same array each time. Without lengths the reset seed draws them, from 1 to 50, and k. It
    demands what an environment may demand, and keeps seeds and actions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, action_space=LINE, lengths=()):
        self.action_space, self.lengths, self.episode, self.over = action_space, lengths, -1, True
        self.obs, self.seeds, self.taken = np.zeros(2), [], []

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.over = self.episode + 1, False
        self.length = self.np_random.integers(1, 51)
        self.obs[:] = self.np_random.normal(), 0
        if self.lengths:
            self.length = self.lengths[self.episode % len(self.lengths)]
            self.obs[0] = self.episode
        return self.obs, {}

    def step(self, action):
        assert not self.over, "stepped beyond the end"
        assert self.action_space.contains(action), action
        self.taken.append(np.array(action))
        self.obs[1] += 1
        self.over = bool(self.obs[1] == self.length)
        return self.obs, 1.0, self.over, False, {}
