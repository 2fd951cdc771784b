"""Rollouts in which everything happens, agents far from their first weights, and comparisons."""

import importlib
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from reference import Row, advantages

# Of each environment its rows: . a step, T a step that terminates, L one at the time limit, - the
# row after an end, whose action was ignored. One begins with such a row, two end with an end.
ENDS = ["...T-...L-.", "-..L-T-....", "..........L", "....T-L-..T"]
SEEN = gym.spaces.Box(-np.inf, np.inf, (3,))
BOX = gym.spaces.Box(np.float32([-1, 0]), np.float32([3, 0.5]))  # half boxes of 2 and 1/4
NASTY = {  # unlike every default
    "gamma": 0.9, "gae_lambda": 0.8, "clip_coef": 0.15, "ent_coef": 0.05, "vf_coef": 0.7,
    "max_grad_norm": 0.02, "num_minibatches": 3, "update_epochs": 2, "num_steps": 11, "num_envs": 4,
    "clip_vloss": True, "cuda": False, "num_threads": 1, "seed": 3, "total_timesteps": 10**6,
    "target_kl": None,
}  # fmt: skip
CLIPPED = {("above", "good"), ("above", "bad"), ("below", "good"), ("below", "bad")}
CLIPPED |= {("within", "good"), ("within", "bad"), ("gradient", "clipped")}
VALUES = {("value", "up"), ("value", "down"), ("value", "within"), ("value", "flat")}


def ends(patterns=ENDS):
    """terminated, truncated, valid [T, N]."""
    rows = np.array([[*row] for row in patterns]).T
    return rows == "T", rows == "L", rows != "-"


def make(script: str, observation_space, action_space, rate_of=None, **flags):
    """module, args, agent: all weights moved at random, with an optimizer."""
    module = importlib.import_module(script)
    known = {f: x for f, x in (NASTY | flags).items() if f in module.Args.__dataclass_fields__}
    args = module.Args(**known)
    torch.manual_seed(5)
    shape = (1, *(getattr(observation_space, "shape", None) or (1,)))
    space = SimpleNamespace(
        observation_space=observation_space, action_space=action_space, obs=np.zeros(shape)
    )
    agent = module.Agent(space, args)
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p) / max(1, p[0].numel()) ** 0.5)
    if hasattr(module, "adam_state"):
        agent.adam = module.adam_state(agent)
    elif not hasattr(agent, "adam") and not hasattr(agent, "policy_adam"):
        agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5)
    return module, args, agent


def rows_to_learn(rewards, values, logprobs, terminated, truncated, valid, args) -> dict:
    """The valid rows of a rollout [T, N] by their number, as they were before the update."""
    rows, N = {}, rewards.shape[1]
    for i in range(N):
        column = [x[:, i].tolist() for x in (rewards, values, terminated, truncated)]
        a = advantages(*column, args.gamma, args.gae_lambda)
        for t in np.flatnonzero(valid[:, i]).tolist():
            v = float(values[t, i])
            rows[t * N + i] = Row(float(logprobs[t, i]), v, a[t], a[t] + v)
    return rows


class Orders:
    """Stands for a generator, and keeps the permutations that it gave."""

    def __init__(self, rng):
        self.rng, self.given = rng, []

    def permutation(self, x):
        self.given.append(self.rng.permutation(x))
        return self.given[-1]

    def __getattr__(self, name):
        return getattr(self.rng, name)

    def minibatches(self, count: int, expected) -> list:
        """Of each epoch: every expected row once, in parts of nearly equal size (detail 6)."""
        for order in self.given:
            assert sorted(order.tolist()) == sorted(expected)
        assert len({str(order.tolist()) for order in self.given}) == len(self.given)
        return [[part.tolist() for part in np.array_split(x, count)] for x in self.given]


def record(agent) -> Orders:
    """The orders that the next update draws."""
    agent.rng = Orders(getattr(agent.rng, "rng", agent.rng))
    return agent.rng


def same(agent, metrics: dict, expected: dict, p: dict, start: dict, rate: float):
    """Metrics; parameters to a twentieth of a step of Adam: float32 is off by up to a fiftieth."""
    for name, x in expected.items():
        got = metrics[f"losses/{name}"]
        assert abs(got - x) < 2e-3 * (0.05 + abs(x)), f"{name}: {got}, not {x}"
    moved = 0.0
    for name, x in agent.named_parameters():
        gap = (x.detach().double() - p[name]).abs().max().item()
        assert gap < 0.05 * rate + 2e-7, f"{name}: off by {gap / rate:.3f} of a step"
        moved = max(moved, (p[name] - start[name]).abs().max().item())
    assert moved > rate, "nothing was learned"
