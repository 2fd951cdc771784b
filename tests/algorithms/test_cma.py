"""ppo_cma.py (Hämäläinen et al. 2020), which learns from whole episodes, against the slow
reference."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from common import BOX, CLIPPED, SEEN, make, same
from reference import Adam, advantages, clipped_objective, descend, gaussian, mean, parameters

LENGTHS = [[5, 9, 3, 7], [4, 2, 6], [8, 3, 9, 5, 2]]  # of the episodes of each iteration


def of_episodes(rewards, values, gamma, lam) -> list:
    """Advantages of all steps, from lists of one list for each episode; values have one more."""
    result = []
    for paid, v in zip(rewards, values, strict=True):
        last = [False] * (len(paid) - 1) + [True]
        result += advantages(paid, v, last, last, gamma, lam)
    return result


def leaky(x):
    return x.where(x > 0, 0.1 * x)


def skip_net(p: dict, name: str, x):
    """Pre-activations of three layers; each sees the input and all layers before it."""
    first, second, output = (p[f"{name}.from_input"] @ x + p[f"{name}.bias"]).split(
        [128, 128, len(p[f"{name}.bias"]) - 256]
    )
    second = second + p[f"{name}.from_first"] @ leaky(first)
    both = torch.cat([leaky(first), leaky(second)])
    return first, second, output + p[f"{name}.from_both"] @ both


@pytest.mark.parametrize("mode", ["ppo-cma-m", "ppo-cma", "ppo", "pg", "pg-pos"])
def test_cma(monkeypatch, mode):
    flags = {"n_updates": 4, "minibatch_size": 16, "history_buffer_size": 2, "mode": mode}
    module, args, agent = make("ppo_cma", SEEN, BOX, learning_rate=0.004, **flags)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-8, fused=True)
    p, seen, adam, rng = parameters(agent), Counter(), Adam(1e-8), np.random.default_rng(8)
    cma, rate = mode.startswith("ppo-cma"), args.learning_rate
    low, high = torch.tensor(BOX.low).double(), torch.tensor(BOX.high).double()
    floor, ceiling = math.log(0.01**2), (high - low).square().log()
    squares, scale, history, drawn = [], torch.ones(3).double(), [], []
    plain, draw, sizes = module.fit, module.history_minibatches, []

    def fit(name, adam, minibatches, loss_fn):
        drawn.append([part.tolist() for part in minibatches])
        return plain(name, adam, torch.tensor(drawn[-1]), loss_fn)

    def history_minibatches(*given):
        sizes.append(given[0])
        return draw(*given)

    monkeypatch.setattr(module, "fit", fit)
    monkeypatch.setattr(module, "history_minibatches", history_minibatches)

    def gauss(p, x):
        """Mean and log variance, between bounds."""
        output = skip_net(p, "mean_net", x * scale)[2]
        spread = skip_net(p, "var_net", x * scale)[2] if cma else output[2:]
        mu = low + (high - low) * torch.sigmoid(output[:2])
        return mu, floor + (ceiling - floor) * torch.sigmoid(spread)

    def logprob(action, mu, logvar):
        return gaussian(action, mu, (logvar / 2).exp())[0] + math.log(2 * math.pi)

    for iteration, lengths in enumerate(LENGTHS):
        B, ends = sum(lengths), np.cumsum(lengths)
        ended = np.isin(np.arange(1, B + 1), ends)
        raw = rng.normal(0, [1, 5, 0.1], (B, 3)).astype(np.float32)
        acts = rng.uniform(BOX.low, BOX.high, (B, 2)).astype(np.float32)
        rewards, start = rng.normal(0, 1, B), parameters(agent)
        drawn.clear()
        twin = torch.Generator().set_state(agent.generator.get_state())
        metrics = module.update(agent, module.Rollout(raw, acts, rewards, ended), args)

        obs, actions = torch.as_tensor(raw).double(), torch.as_tensor(acts).double()
        squares.append(mean([x**2 for x in obs]))  # each iteration weighs the same
        scale = torch.minimum(scale, 1 / (2 * mean(squares).sqrt() + 0.001))  # only shrinks
        with torch.no_grad():
            mu_old = [gauss(p, x)[0] for x in obs]
        times = [t for length in lengths for t in range(length)]
        clock = [torch.tensor([0.001 * t]).double() for t in times]
        inputs = [torch.cat([x * scale, t]) for x, t in zip(obs, clock, strict=True)]
        paid = [x.tolist() for x in np.split(rewards, ends[:-1])]
        nothing = [[0.0] * (n + 1) for n in lengths]
        returns = of_episodes(paid, nothing, args.gamma, 1.0)
        if iteration == 0:  # the first minibatch set the biases: it is not in `drawn`
            rows = torch.randint(B, (args.n_updates, 16), generator=twin)[0].tolist()
            for layer, (begin, end) in enumerate([(0, 128), (128, 256), (256, 257)]):
                first = [skip_net(p, "critic", inputs[i])[layer] for i in rows]
                p["critic.bias"].data[begin:end] -= mean(first).detach()
        value_losses = []
        for rows in drawn[0]:
            errors = [(skip_net(p, "critic", inputs[i])[2][0] - returns[i]).abs() for i in rows]
            value_losses.append(float(mean(errors).detach()))
            descend(p, "critic", mean(errors), adam, rate)
        assert len(drawn[0]) == args.n_updates - (iteration == 0)
        v = [float(skip_net(p, "critic", x)[2][0].detach()) for x in inputs]
        v = [[*part, 0.0] for part in np.split(v, ends[:-1])]  # 0 after an end
        a = of_episodes(paid, v, args.gamma, args.gae_lambda)
        if mode in ("ppo-cma", "pg-pos"):
            a = [max(x, 0.0) for x in a]
        width = math.sqrt(mean([(x - mean(a)) ** 2 for x in a]))
        a = [x / width for x in a]  # never centred

        if cma:  # the variance, from the last iterations, about means that have not moved yet
            history = [*history, [*zip(obs, actions, a, strict=True)]][-2:]
            assert sizes[-1] == [len(batch) for batch in history]
            past = [row for batch in history for row in batch]
            for rows in drawn[1]:
                seen["past"] += sum(i < sizes[-1][0] for i in rows) if len(history) == 2 else 0
                terms = []
                for x, action, advantage in [past[i] for i in rows]:
                    mu, logvar = gauss(p, x)
                    terms.append(max(advantage, 0.0) * logprob(action, mu.detach(), logvar))
                descend(p, "var_net", -mean(terms), adam, rate)
        with torch.no_grad():
            logvars = [gauss(p, x)[1] for x in obs]
            entropies = [sum(x) / 2 + math.log(2 * math.pi * math.e) for x in logvars]
            deviations = [x.exp().sqrt().mean() for x in logvars]
        for rows in drawn[-1]:
            terms = []
            for i in rows:
                mu, logvar = gauss(p, obs[i])
                if cma:  # then the mean, with the variance just learned
                    fixed = logvars[i]
                    terms.append(max(a[i], 0.0) * logprob(actions[i], mu, fixed))
                    if mode == "ppo-cma-m" and a[i] < 0:  # to the other side of the old mean
                        seen["mirrored"] += 1
                        kernel = mean([*(-((actions[i] - mu_old[i]) ** 2) / 2 / fixed.exp()).exp()])
                        mirror = 2 * mu_old[i] - actions[i]
                        terms[-1] = -a[i] * kernel * logprob(mirror, mu, fixed)
                elif mode == "ppo":
                    old = logprob(actions[i], mu_old[i], logvars[i])
                    ratio = (logprob(actions[i], mu, logvar) - old).exp()
                    bonus = args.ent_coef * logvar.sum() / 2
                    terms.append(clipped_objective(ratio, a[i], args.clip_coef, seen) + bonus)
                else:
                    terms.append(a[i] * logprob(actions[i], mu, logvar))
            descend(p, "mean_net", -mean(terms), adam, rate)
        expected = {"value_loss": mean(value_losses), "entropy": float(mean(entropies))}
        same(agent, metrics, expected, p, start, rate)
        assert metrics["charts/policy_std"] == pytest.approx(float(mean(deviations)), rel=1e-4)
        torch.testing.assert_close(agent.obs_scale, scale.float())
        assert metrics["charts/mean_episodic_return"] == pytest.approx(rewards.sum() / len(lengths))
    if mode == "ppo":
        assert CLIPPED - {("gradient", "clipped")} <= seen.keys()
    assert not cma or seen["past"]
    assert mode != "ppo-cma-m" or seen["mirrored"]
