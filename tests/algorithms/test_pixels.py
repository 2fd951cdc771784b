"""ppo_pixels.py: observations of a vector, a choice and a grid; actions of two numbers and three
choices behind masks."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import CLIPPED, VALUES, ends, make, record, same_metrics, same_parameters
from reference import PPO, Row, Seen, advantages, choice, gaussian, linear, parameters
from torch.nn.functional import conv2d

import ppo_pixels

T, N = 11, 4
OBSERVATIONS = gym.spaces.Dict(
    a=gym.spaces.Box(-np.inf, np.inf, (3,)),
    b=gym.spaces.Discrete(3),
    c=gym.spaces.Box(0, 255, (7, 7, 2), np.uint8),
)
ACTIONS = gym.spaces.Dict(  # a row of an action has the choices first
    a=gym.spaces.Box(np.float32([-1, 0]), np.float32([3, 0.5])),
    b=gym.spaces.Discrete(3),
    c=gym.spaces.MultiDiscrete([2, 2]),
)
ORIGIN, UNIT = torch.tensor([1.0, 0.25]).double(), torch.tensor([2.0, 0.25]).double()
BRANCHES = [slice(0, 3), slice(3, 5), slice(5, 7)]  # of the 7 options


def rollout(rng, iteration):
    """Observations [T + 1, N, ...], actions [T, N, 3 + 2], rewards [T, N]."""
    vector = rng.normal(3 * iteration, [1, 5, 0.1], (T + 1, N, 3)).astype(np.float32)
    vector[5, 2, 0] = 500.0
    kind = np.eye(3, dtype=np.float32)[rng.integers(0, 3, (T + 1, N))]
    grid = rng.integers(0, 6, (T + 1, N, 7, 7, 2)).astype(np.uint8)
    mask = rng.random((T + 1, N, 7)) < 0.7
    mask[..., [0, 3, 6]] = True
    actions = np.zeros((T, N, 5), np.float32)
    actions[..., 3:] = rng.normal([1, 0.25], [2, 0.25], (T, N, 2))
    for t, i, k in np.ndindex(T, N, 3):
        actions[t, i, k] = rng.choice(np.flatnonzero(mask[t, i, BRANCHES[k]]))
    obs = {"obs/a": vector, "obs/b": kind, "obs/c": grid, "mask": mask}
    obs = ppo_pixels.Obs({name: torch.as_tensor(x) for name, x in obs.items()})
    return obs, torch.as_tensor(actions), rng.normal(0, 1, (T, N))


class Policy:
    """The networks by their formulas, at rows of this rollout."""

    def __init__(self, args):
        self.args, self.vectors, self.grids = args, Seen(), Seen()

    def see(self, obs, valid):
        valid = torch.as_tensor(valid)
        self.vectors.add(obs["obs/a"][:-1][valid])
        self.grids.add(obs["obs/c"][:-1][valid])

    def trunk(self, p, name, t, i):
        x = self.grids.standardized(self.obs["obs/c"][t, i]).permute(2, 0, 1)
        for k in (0, 2, 4):
            layer = f"{name}.obs/c.{k}"
            x = conv2d(x, p[f"{layer}.weight"], p[f"{layer}.bias"]).relu()
        image = linear(p, f"{name}.obs/c.7", x.flatten()).relu()
        vector = self.vectors.standardized(self.obs["obs/a"][t, i])
        x = torch.cat([vector, self.obs["obs/b"][t, i].double()])
        return torch.cat([image, torch.tanh(linear(p, f"{name}.vectors.0", x))])

    def row(self, p, t, i):
        hidden = self.trunk(p, "trunk", t, i)
        value_hidden = self.trunk(p, "value_trunk", t, i) if self.args.separate_critic else hidden
        outputs = linear(p, "actor", hidden)
        action = self.actions[min(t, T - 1), i].double()
        std = UNIT * p["actor_logstd"].exp()
        logprob, of_boxes = gaussian(action[3:], ORIGIN + UNIT * outputs[7:], std)
        of_choices = 0.0
        for k, branch in enumerate(BRANCHES):
            one, entropy = choice(outputs[branch], int(action[k]), self.obs["mask"][t, i, branch])
            logprob, of_choices = logprob + one, of_choices + entropy
        entropies = {"choices": of_choices, "boxes": of_boxes}
        return logprob, entropies, linear(p, "critic", value_hidden)[0]

    def __call__(self, p, numbers) -> list:
        return [self.row(p, n // N, n % N) for n in numbers]


KINDS = {
    "one network": {},
    "two networks": {"separate_critic": True, "clip_vloss": False},
    "stops": {"target_kl": 1e-3, "norm_adv": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_updates(monkeypatch, kind):
    flags = {"ent_coef": 0.05, "box_ent_coef": 0.02} | KINDS[kind]
    module, args, agent = make("ppo_pixels", OBSERVATIONS, ACTIONS, learning_rate=0.003, **flags)
    policy, rng, rate = Policy(args), np.random.default_rng(4), args.learning_rate
    ppo = PPO(agent, args, policy, {"choices": args.ent_coef, "boxes": args.box_ent_coef})
    terminated, truncated, valid = ends()
    for iteration in range(2):
        policy.obs, policy.actions, rewards = rollout(rng, iteration)
        rewards *= valid
        if iteration == 0:
            policy.see(policy.obs, valid)
        with torch.no_grad():
            outputs = policy(ppo.p, range((T + 1) * N))
        values = torch.tensor([float(v) for *_, v in outputs]).view(T + 1, N)
        logprobs = torch.tensor([float(x) for x, *_ in outputs]).view(T + 1, N)[:-1]
        given = policy.obs, policy.actions, logprobs, values, rewards, terminated, truncated, valid
        data = module.Rollout(*given)
        rows, values = {}, values.double().numpy()
        for i in range(N):
            column = rewards[:, i], values[:, i], terminated[:, i], truncated[:, i]
            a = advantages(*map(list, column), args.gamma, args.gae_lambda)
            for t in np.flatnonzero(valid[:, i]).tolist():
                v, logprob = values[t, i], float(outputs[t * N + i][0])
                rows[t * N + i] = Row(logprob, v, a[t], a[t] + v)
        orders = record(monkeypatch, agent, seeded=False)
        start = parameters(agent)
        metrics = module.update(agent, data, args)
        same_metrics(metrics, ppo.learn(rows, orders.minibatches(3, rows), rate))
        same_parameters(agent, ppo.p, start, rate)
        if iteration == 1:
            policy.see(policy.obs, valid)
    torch.testing.assert_close(agent.moments["obs/a"].mean, policy.vectors.mean)
    torch.testing.assert_close(agent.moments["obs/c"].var, policy.grids.var)
    assert agent.moments.keys() == {"obs/a", "obs/c"}
    if kind == "stops":
        assert ppo.epochs == [1, 1]
    else:
        assert CLIPPED | (VALUES if args.clip_vloss else set()) <= ppo.seen.keys()
