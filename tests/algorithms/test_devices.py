"""ppo_atari_multigpu.py in one process and ppo_continuous_action_warp.py on the CPU."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import CLIPPED, VALUES, ends, make, same_metrics, same_parameters
from reference import PPO, Row, Seen, advantages, choice, gaussian, linear, mlp, parameters
from toys import BOX

T, N = 11, 4


@pytest.mark.parametrize("flags", [{}, {"norm_adv": False, "target_kl": 1e-6}], ids=["", "stops"])
def test_multigpu(flags):
    """The old policy is another one: its log-probabilities and values are in the rollout."""
    space = SimpleNamespace(n=3)
    module, args, agent = make("ppo_atari_multigpu", None, space, **flags)
    small = torch.nn.AvgPool2d(28), torch.nn.Flatten(), torch.nn.Linear(36, 512), torch.nn.ReLU()
    agent.network = torch.nn.Sequential(*small)
    agent.adam = module.flat_adam(agent)
    rng, rate, (terminated, truncated, valid) = np.random.default_rng(9), 0.003, ends()
    ppo = PPO(agent, args, None, {"all": args.ent_coef})
    for iteration in range(2):
        obs = torch.as_tensor(rng.integers(0, 256, (T, N, 4, 84, 84), np.uint8))
        actions = torch.as_tensor(rng.integers(0, 3, (T, N)))
        rewards = rng.normal(0, 1, (T, N)) * valid

        def outputs(p, numbers, obs=obs, actions=actions):
            found = []
            for n in numbers:
                x = (obs.flatten(0, 1)[n].double() / 255).unfold(1, 28, 28).unfold(2, 28, 28)
                hidden = linear(p, "network.2", x.mean(dim=(-1, -2)).flatten()).relu()
                logprob, entropy = choice(linear(p, "actor", hidden), int(actions.flatten()[n]))
                found.append((logprob, {"all": entropy}, linear(p, "critic", hidden)[0]))
            return found

        ppo.outputs = outputs
        with torch.no_grad():
            now = outputs(ppo.p, range(T * N))
        logprobs = np.array([float(x[0]) for x in now]) + rng.normal(0, 0.3, T * N)
        values = np.array([float(x[2]) for x in now] + [0.3] * N) + rng.normal(0, 0.2, T * N + N)
        logprobs, values = np.float32(logprobs).reshape(T, N), np.float32(values).reshape(T + 1, N)
        rows = {}
        for i in range(N):
            column = rewards[:, i], values[:, i], terminated[:, i], truncated[:, i]
            a = advantages(*[x.tolist() for x in column], args.gamma, args.gae_lambda)
            for t in np.flatnonzero(valid[:, i]).tolist():
                v = float(values[t, i])
                rows[t * N + i] = Row(float(logprobs[t, i]), v, a[t], a[t] + v)
        given = obs, actions, *map(torch.as_tensor, (logprobs, values))
        data, start = module.Rollout(*given, rewards, terminated, truncated, valid), parameters(agent)
        orders = [[part.tolist() for part in epoch]
                  for epoch in module.minibatch_rows(iteration, slice(0, N), args)]  # fmt: skip
        for epoch in orders:  # each row once; in each minibatch as many steps of each environment
            assert sorted(n for part in epoch for n in part) == [*range(T * N)]
            assert all(len({sum(n % N == i for n in part) for i in range(N)}) == 1 for part in epoch)
        orders = [[[n for n in part if n in rows] for part in epoch] for epoch in orders]
        metrics = module.update(agent, data, iteration, rate, args)
        expected = ppo.learn(rows, orders[:1] if args.target_kl else orders, rate)
        same_metrics(metrics, expected)
        same_parameters(agent, ppo.p, start, rate)
    assert args.target_kl or CLIPPED | VALUES <= ppo.seen.keys()


def test_warp(monkeypatch):
    """Environments reset themselves: there are no rows of nothing, and next_obs is the true one.
    The learning rate follows the KL."""
    seen_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    flags = {"hidden": (8, 6), "desired_kl": 0.02}
    module, args, agent = make("ppo_continuous_action_warp", seen_space, BOX, **flags)
    agent.adam["learning_rate"] = torch.tensor(0.004)
    rng, moments, returns, rate = np.random.default_rng(10), Seen(), Seen(), 0.004
    ppo = PPO(agent, args, None, {"all": args.ent_coef})
    terminated, truncated, _ = ends()
    orders, plain = [], torch.rand_like

    def rand_like(x):
        drawn = plain(x)
        orders.append([part.tolist() for part in drawn.argsort().tensor_split(3)])
        return drawn

    monkeypatch.setattr(torch, "rand_like", rand_like)
    layers, unit = (0, 2, 4), torch.nn.functional.elu
    for iteration in range(2):
        obs, after = (torch.as_tensor(rng.normal(0, [1, 5, 0.1], (T, N, 3))).float() for _ in "12")
        actions = torch.as_tensor(rng.normal([1, 0.25], [2, 0.25], (T, N, 2))).float()
        rewards, discounted = (torch.as_tensor(rng.normal(0, k, (T, N))).float() for k in (1, 0.1))
        if iteration == 0:
            moments.add(obs.flatten(0, 1))
        returns.add(discounted.flatten())
        scaled = (rewards.double() / (returns.var + 1e-8).sqrt()).clamp(-10, 10)

        def one(p, obs, action):
            x = moments.standardized(obs)
            half = torch.tensor([2.0, 0.25]).double()
            mean = torch.tensor([1.0, 0.25]).double() + half * mlp(p, "actor_mean", x, layers, unit)
            logprob, entropy = gaussian(action.double(), mean, half * p["actor_logstd"].exp())
            return logprob, {"all": entropy}, mlp(p, "critic", x, layers, unit)[0]

        flat = obs.flatten(0, 1), actions.flatten(0, 1)
        ppo.outputs = lambda p, numbers, flat=flat: [one(p, flat[0][n], flat[1][n]) for n in numbers]
        rows = {}
        with torch.no_grad():
            for i in range(N):
                now = [one(ppo.p, obs[t, i], actions[t, i]) for t in range(T)]
                later = [float(one(ppo.p, after[t, i], actions[t, i])[2]) for t in range(T)]
                for t in range(T):
                    total, v = 0.0, float(now[t][2])
                    for k in range(t, T):  # as `advantages`, but V of next_obs
                        delta = float(scaled[k, i]) - float(now[k][2])
                        delta += 0.0 if terminated[k, i] else args.gamma * later[k]
                        total += (args.gamma * args.gae_lambda) ** (k - t) * delta
                        if terminated[k, i] or truncated[k, i]:
                            break
                    rows[t * N + i] = Row(float(now[t][0]), v, total, total + v)
        ended = torch.as_tensor(terminated), torch.as_tensor(truncated)
        zeros = torch.zeros(T, N)
        data = module.Rollout(obs, after, actions, rewards, *ended, discounted, zeros, zeros)
        orders.clear()
        start = parameters(agent)
        metrics = module.update(agent, data, args, iteration == 0)

        def adapt(rate, kl):
            rate = rate / 1.5 if kl > 0.04 else rate * 1.5 if kl < 0.01 else rate
            return min(max(rate, 1e-5), 1e-2)

        same_metrics(metrics, ppo.learn(rows, orders, rate, adapt))
        same_parameters(agent, ppo.p, start, min(rate, ppo.rate))
        rate = ppo.rate
        assert float(metrics["charts/learning_rate"]) == pytest.approx(rate, rel=1e-4)
        if iteration == 1:
            moments.add(obs.flatten(0, 1))
    torch.testing.assert_close(agent.obs_moments.var, moments.var)
    assert CLIPPED | {("value", "flat")} <= ppo.seen.keys()
