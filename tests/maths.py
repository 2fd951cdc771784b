"""What tests of the algorithms share: rollouts whose episodes end at random, references in plain
loops, and what a rollout needs of a run."""

import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from program import in_process, rows
from scripts import SMALL, STEPS

FRAMES = {  # scripts that learn from frames alone: the shape of an observation, how many actions
    "ppo_atari_multigpu": ((4, 84, 84), 4),
    "ppo_atari_lstm": ((1, 84, 84), 4),
    "ppo_procgen": ((3, 64, 64), 15),
    "ppo_pettingzoo_ma_atari": ((6, 84, 84), 4),
}


class Log:
    """What rollout needs of a Run. `ended` is what was told of each episode; `rows` has the step at
    which it was told, its return and its length."""

    def __init__(self):
        self.global_step, self.iteration, self.rows, self.ended = 0, 0, [], []

    def log_episodes(self, ended):
        self.ended += ended
        self.rows += [(self.global_step, score, length) for _, score, length in ended]


def returns(folder: Path) -> list[float]:
    """Of a run's training episodes."""
    return [float(score) for _, score, _ in rows(folder)[1:]]


def program(script: str, more: str = ""):
    """`in_process` with a script's small run of scripts.py and these flags."""
    module = importlib.import_module(script)
    return in_process(module, f"{SMALL[script]} {more}", STEPS[script])


def random_ends(rng, T: int, N: int, first=None):
    """Terminated, truncated and valid [T, N] of episodes that end now and then, each end followed
    by a row of junk. `first` [N] is False where the first row is one."""
    terminated, truncated, valid = np.zeros((3, T, N), bool)
    valid[0] = True if first is None else first
    for t in range(T):
        if t > 0:
            valid[t] = ~(terminated | truncated)[t - 1]
        terminated[t], truncated[t] = valid[t] & (rng.random((2, N)) < 0.15)
        truncated[t] &= ~terminated[t]
    return terminated, truncated, valid


def vector(agent) -> torch.Tensor:
    """A copy of all parameters."""
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


class Told(gym.Env):
    """Pays and ends as told, in each step by the next of `rows`."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, rows):
        self.rows = iter(rows)

    def reset(self, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        return np.zeros(1), *next(self.rows), {}


class Clock(gym.Env):
    """Pays 1 a step and ends its k-th episode after `lengths[k]` steps; observes (k, steps so far),
    in the same array each time. Without lengths the reset seed draws them, from 1 to 50, and k. It
    demands what an environment may demand, and keeps seeds and actions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, action_space=Told.action_space, lengths=()):
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


# --- scripts that learn from frames ---------------------------------------------------------------
def frames_agent(script: str, args, louder: float = 0.0):
    """A new agent. If `louder`, the recurrent one's weights for the state and its heads are so much
    larger: what it remembers shows more."""
    module, (shape, actions) = importlib.import_module(script), FRAMES[script]
    space = SimpleNamespace(
        observation_space=gym.spaces.Box(0, 255, shape, np.uint8),
        action_space=gym.spaces.Discrete(actions),
    )
    torch.manual_seed(args.seed)
    agent = module.Agent(space, args)
    if louder and hasattr(agent, "lstm"):
        with torch.no_grad():
            agent.lstm.weight_hh_l0 *= louder
            agent.critic.weight *= louder
            agent.actor.weight *= 10 * louder
    if hasattr(module, "flat_adam"):
        agent.adam = module.flat_adam(agent)
    else:
        agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    return agent


class Player:
    """Games of a script that learns from frames, an agent and its memory; `roll()` is the next
    rollout, for which the script's `rollout` gets `how`, too."""

    def __init__(self, script: str, args, louder=0.0, device="cpu", which=None, **how):
        self.module = importlib.import_module(script)
        self.args = args
        self.how = how
        self.log = Log()
        if which is None:
            whole = script in ("ppo_procgen", "ppo_pettingzoo_ma_atari")
            which = args.num_envs if whole else slice(0, args.num_envs)
        self.envs = self.module.Envs(args, which)
        self.agent = frames_agent(script, args, louder).to(device)
        self.more = []  # where environments are, and the rollout that is filled again and again
        if hasattr(self.agent, "initial_state"):
            self.state = self.agent.initial_state(args.num_envs)
        if hasattr(self.module, "start"):
            self.agent.adam = self.module.flat_adam(self.agent)
            self.more = self.module.start(self.agent, self.envs, args)

    def roll(self):
        """A Rollout; `state` is the memory after it."""
        memory = [self.state] if hasattr(self, "state") else []
        given = self.agent, self.envs, *memory, *self.more, self.log, self.args
        data = self.module.rollout(*given, **self.how)
        if memory:
            data, self.state = data
        return self.more[1] if self.more else data


def see_coarsely(monkeypatch, script: str):
    """Agents see means over 12 x 12 pixels instead of a convolutional network's features, and so
    learn in a tenth of the time: for tests of what else it takes."""
    plain, (shape, _) = importlib.import_module(script).Agent, FRAMES[script]
    init = plain.__init__

    def coarse(agent, *given):
        init(agent, *given)
        layer = torch.nn.Linear(shape[0] * (shape[1] // 12) ** 2, 512)
        torch.nn.init.orthogonal_(layer.weight, math.sqrt(2))
        parts = torch.nn.AvgPool2d(12), torch.nn.Flatten(), layer, torch.nn.ReLU()
        agent.network = torch.nn.Sequential(*parts)

    monkeypatch.setattr(plain, "__init__", coarse)
