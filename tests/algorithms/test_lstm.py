"""ppo_lstm.py: observations of a vector, a choice and a grid; actions of two numbers and three
choices behind masks; memories that are cleared in the middle."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import CLIPPED, VALUES, ends, make, record, same_metrics, same_parameters
from reference import PPO, Row, Seen, advantages, choice, gaussian, gru, linear, lstm, parameters
from torch.nn.functional import conv2d

T, N, H = 11, 4, 16
NUMBERS = 2
BIAS = {"ent_coef": 0.05, "box_ent_coef": 0.02}
SEEN = gym.spaces.Dict(
    a=gym.spaces.Box(-np.inf, np.inf, (3,)),
    b=gym.spaces.Discrete(3),
    c=gym.spaces.Box(0, 255, (7, 7, 2), np.uint8),
)
DOES = gym.spaces.Dict(  # a row of an action has the choices first
    a=gym.spaces.Box(np.float32([-1, 0]), np.float32([3, 0.5])),
    b=gym.spaces.Discrete(3),
    c=gym.spaces.MultiDiscrete([2, 2]),
)
ORIGIN, UNIT = torch.tensor([1.0, 0.25]).double(), torch.tensor([2.0, 0.25]).double()
BRANCHES = [slice(0, 3), slice(3, 5), slice(5, 7)]  # of the options
OPTIONS = 7


def rollout(rng, iteration, module):
    """Observations [T + 1, N, ...], actions [T, N, 3 + 2], rewards [T, N]."""
    vector = rng.normal(3 * iteration, [1, 5, 0.1], (T + 1, N, 3)).astype(np.float32)
    vector[5, 2, 0] = 500.0
    kind = np.eye(3, dtype=np.float32)[rng.integers(0, 3, (T + 1, N))]
    grid = rng.integers(0, 6, (T + 1, N, 7, 7, 2)).astype(np.uint8)
    mask = rng.random((T + 1, N, OPTIONS)) < 0.7
    mask[..., [0, 3, 6]] = True
    actions = np.zeros((T, N, len(BRANCHES) + NUMBERS), np.float32)
    actions[..., len(BRANCHES) :] = rng.normal([1, 0.25], [2, 0.25], (T, N, NUMBERS))
    for t, i, k in np.ndindex(T, N, len(BRANCHES)):
        actions[t, i, k] = rng.choice(np.flatnonzero(mask[t, i, BRANCHES[k]]))
    obs = {"obs/a": vector, "obs/b": kind, "obs/c": grid, "mask": mask}
    obs = module.Obs({name: torch.as_tensor(x) for name, x in obs.items()})
    return obs, torch.as_tensor(actions), rng.normal(0, 1, (T, N))


class Policy:
    """The networks and memories by their formulas, at rows of this rollout."""

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

    def heads(self, p, t, i, hidden, value_hidden):
        scores = linear(p, "actor", hidden)
        action = self.actions[min(t, T - 1), i].double()
        mean = ORIGIN + UNIT * scores[OPTIONS:]
        logprob, of_boxes = gaussian(action[3:], mean, UNIT * p["actor_logstd"].exp())
        of_choices = 0.0
        for k, branch in enumerate(BRANCHES):
            one, entropy = choice(scores[branch], int(action[k]), self.obs["mask"][t, i, branch])
            logprob, of_choices = logprob + one, of_choices + entropy
        entropies = {"choices": of_choices, "boxes": of_boxes}
        return logprob, entropies, linear(p, "critic", value_hidden)[0]

    def environment(self, p, i, rows) -> list:
        """Of one environment, the outputs at these of its rows; memories run through all."""
        found, names = {}, ["trunk", "value_trunk"][: 1 + self.args.separate_critic]
        size = H * (2 if self.args.memory == "lstm" else 1)
        past_size = 10 if self.args.previous_action else 0
        *states, past = self.state[i].double().split([*[size] * len(names), past_size])
        for t in range(max(rows) + 1):
            if self.episode_starts[t, i]:  # nothing is remembered
                states, past = [torch.zeros(size).double() for _ in names], torch.zeros(past_size)
            hidden = []
            for k, name in enumerate(names):
                x = torch.cat([self.trunk(p, name, t, i), past.double()])
                if self.args.memory == "lstm":
                    h, c = lstm(p, f"memories.{k}.net", x, *states[k].chunk(2))
                    states[k] = torch.cat([h, c])
                else:
                    h = states[k] = gru(p, f"memories.{k}.net", x, states[k])
                hidden.append(h)
            if t in rows:
                found[t] = self.heads(p, t, i, hidden[0], hidden[-1])
            action = self.actions[min(t, T - 1), i].double()
            ones = [torch.eye(b.stop - b.start)[int(action[k])] for k, b in enumerate(BRANCHES)]
            past = torch.cat([*ones, (action[3:] - ORIGIN) / UNIT, torch.ones(1)])[:past_size]
        return found

    def __call__(self, p, numbers) -> list:
        found = {}
        for i in {n % N for n in numbers}:
            outputs = self.environment(p, i, [n // N for n in numbers if n % N == i])
            found |= {t * N + i: output for t, output in outputs.items()}
        return [found[n] for n in numbers]


KINDS = {
    "lstm": {"memory": "lstm"},
    "gru, two networks": {"memory": "gru", "separate_critic": True},
    "no actions": {"memory": "gru", "previous_action": False, "clip_vloss": False},
    "stops": {"memory": "lstm", "target_kl": 1e-3, "norm_adv": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_updates(monkeypatch, kind):
    rate = 0.003
    flags = {"previous_action": True, "memory_size": H, "learning_rate": rate} | BIAS | KINDS[kind]
    module, args, agent = make("ppo_lstm", SEEN, DOES, **flags)
    policy, rng = Policy(args), np.random.default_rng(4)
    ppo = PPO(agent, args, policy, {"choices": args.ent_coef, "boxes": args.box_ent_coef})
    terminated, truncated, valid = ends()
    policy.episode_starts = torch.as_tensor(np.concatenate([np.zeros((1, N), bool), ~valid]))
    assert policy.episode_starts[1:-1].sum() >= 4  # cleared in the middle
    for iteration in range(2):
        policy.obs, policy.actions, rewards = rollout(rng, iteration, module)
        rewards *= valid
        size = sum(agent.state_sizes)
        policy.state = torch.as_tensor(rng.normal(0, 0.5, (N, size))).float()
        if iteration == 0:
            policy.see(policy.obs, valid)
        with torch.no_grad():
            outputs = policy(ppo.p, range((T + 1) * N))
        values = torch.tensor([float(v) for *_, v in outputs]).view(T + 1, N)
        logprobs = torch.tensor([float(x) for x, *_ in outputs]).view(T + 1, N)[:-1]
        given = policy.obs, policy.actions, logprobs, values, rewards, terminated, truncated, valid
        data = module.Rollout(*given, policy.state, policy.episode_starts[:-1])
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
        # all rows of some environments (LSTM detail 4)
        epochs = orders.minibatches(3, range(N))
        epochs = [[[n for n in rows if n % N in part] for part in epoch] for epoch in epochs]
        same_metrics(metrics, ppo.learn(rows, epochs, rate))
        same_parameters(agent, ppo.p, start, rate)
        if iteration == 1:
            policy.see(policy.obs, valid)
    torch.testing.assert_close(agent.moments["obs/a"].mean, policy.vectors.mean)
    torch.testing.assert_close(agent.moments["obs/c"].var, policy.grids.var)
    if kind == "stops":
        assert ppo.epochs == [1, 1]
    else:
        assert CLIPPED | (VALUES if args.clip_vloss else set()) <= ppo.seen.keys()


def test_the_ratio_is_clipped_on_both_sides():
    """Ratios within eps of 1, and up to 4 eps from it on either side, with good and bad advantages:
    the objective and its gradient, by cases (Schulman et al. 2017, figure 1)."""
    flags = {"memory_size": H, "norm_adv": False, "ent_coef": 0.0, "vf_coef": 0.0}
    module, args, agent = make("ppo_lstm", SEEN, DOES, **flags)
    rng, eps = np.random.default_rng(0), args.clip_coef
    obs, actions, _ = rollout(rng, 0, module)
    obs = obs.map(lambda x: x[:-1].transpose(0, 1))
    _, _, valid = ends()
    valid = torch.as_tensor(valid).T
    starts = torch.zeros(N, T, dtype=torch.bool)
    state, actions = agent.initial_state(N), actions.transpose(0, 1)
    _, logprobs, *_ = agent.get_action_and_value(obs, state, starts, actions)
    ratio = 1.0 + eps * torch.tensor([-3.5, -1.5, -0.5, 0.5, 1.5, 1.8, 3.5]).repeat(7)[: N * T]
    advantages = torch.as_tensor(rng.normal(0, 1, (N, T))).float()
    ratio = ratio.view(N, T).clamp(min=0.1)
    old = logprobs.detach() - ratio.log()
    zeros = torch.zeros(N, T)
    batch = module.Batch(obs, state, starts, actions, valid, old, advantages, zeros, zeros)
    loss, metrics = module.ppo_loss(agent, args, batch)
    good = advantages > 0
    flat = (good & (ratio > 1 + eps)) | (~good & (ratio < 1 - eps))
    for case in (good, ~good):  # all cases occur in rows that are learned from
        for side in (ratio > 1 + eps, ratio < 1 - eps, (ratio - 1).abs() < eps):
            assert (valid & case & side).sum() >= 2
    edge = torch.where(good, 1 + eps, 1 - eps)
    expected = -(torch.where(flat, edge, ratio) * advantages)[valid].mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["policy_loss"], expected)
    slope = -(ratio * advantages * ~flat * valid) / valid.sum()  # d loss / d log pi
    wanted = torch.autograd.grad((logprobs * slope).sum(), agent.actor.weight)
    torch.testing.assert_close(torch.autograd.grad(loss, agent.actor.weight), wanted)
