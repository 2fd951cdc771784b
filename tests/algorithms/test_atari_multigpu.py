"""ppo_atari_multigpu.py in one process, against the slow reference and games that are known."""

from types import SimpleNamespace

import envpool
import numpy as np
import pytest
import torch
from common import CLIPPED, VALUES, ends, make, rows_to_learn, same
from program import Toy, rows, scalars
from reference import PPO, choice, linear, parameters

import ppo_atari_multigpu as script

T, N = 11, 4
SPACE = SimpleNamespace(n=3)


def means(obs: torch.Tensor) -> torch.Tensor:
    """Of each 28 x 28 pixels [..., 36], from 0 to 1."""
    parts = (obs.double() / 255).unfold(-2, 28, 28).unfold(-2, 28, 28)
    return parts.mean(dim=(-1, -2)).flatten(-3)


def outputs(p: dict, obs: torch.Tensor, action: int):
    """Log-probability, entropies and value of an action at means [36]."""
    hidden = linear(p, "network.2", obs).relu()
    logprob, entropy = choice(linear(p, "actor", hidden), action)
    return logprob, {"all": entropy}, linear(p, "critic", hidden)[0]


STOPS = {"norm_adv": False, "clip_vloss": False, "target_kl": 1e-6}


@pytest.mark.parametrize("flags", [{}, STOPS], ids=["", "stops"])
def test_update(flags):
    """The old policy is another one: its log-probabilities and values are in the rollout."""
    rate = 0.003
    _, args, agent = make("ppo_atari_multigpu", None, SPACE, learning_rate=rate, **flags)
    small = torch.nn.AvgPool2d(28), torch.nn.Flatten(), torch.nn.Linear(36, 512), torch.nn.ReLU()
    agent.network = torch.nn.Sequential(*small)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    rng, (terminated, truncated, valid) = np.random.default_rng(9), ends()
    ppo, used = PPO(agent, args, None, {"all": args.ent_coef}), []
    for iteration in range(2):
        obs = torch.as_tensor(rng.integers(0, 256, (T, N, 4, 84, 84), np.uint8))
        actions = torch.as_tensor(rng.integers(0, 3, (T, N)))
        rewards = rng.normal(0, 1, (T, N)) * valid
        given = means(obs.flatten(0, 1)), actions.flatten().tolist()
        ppo.outputs = lambda p, numbers, given=given: [
            outputs(p, given[0][n], given[1][n]) for n in numbers
        ]
        with torch.no_grad():
            now = ppo.outputs(ppo.p, range(T * N))
        logprobs = np.array([float(x[0]) for x in now]) + rng.normal(0, 0.3, T * N)
        values = np.array([float(x[2]) for x in now] + [0.3] * N) + rng.normal(0, 0.2, T * N + N)
        logprobs, values = np.float32(logprobs).reshape(T, N), np.float32(values).reshape(T + 1, N)
        rows = rows_to_learn(rewards, values, logprobs, terminated, truncated, valid, args)
        acted = obs, actions, *map(torch.as_tensor, (logprobs, values))
        data = script.Rollout(*acted, rewards, terminated, truncated, valid)
        start = parameters(agent)
        orders = [[part.tolist() for part in epoch]
                  for epoch in script.minibatch_rows(iteration, slice(0, N), args)]  # fmt: skip
        used += [str(epoch) for epoch in orders]
        for epoch in orders:  # each row once; in each minibatch as many steps of each environment
            assert sorted(n for part in epoch for n in part) == [*range(T * N)]
            assert all(
                len({sum(n % N == i for n in part) for i in range(N)}) == 1 for part in epoch
            )
        orders = [[[n for n in part if n in rows] for part in epoch] for epoch in orders]
        metrics = script.update(agent, data, args, iteration)
        expected = ppo.learn(rows, orders[:1] if args.target_kl else orders, rate)
        same(agent, metrics, expected, ppo.p, start, rate)
    assert len(used) == len(set(used)) == 4
    assert args.target_kl or ppo.seen.keys() >= CLIPPED | VALUES


def test_rollouts(tmp_path, monkeypatch):
    """Two rollouts of Toys, which go on from one to the next: rows, and the games in the log."""
    monkeypatch.setattr(envpool, "make", Toy)
    monkeypatch.setattr(Toy, "limit", 7)  # truncates the games of environments 1 and 2
    folder = tmp_path / "run"
    flags = {"num_envs": 3, "run_dir": folder, "total_timesteps": 66}
    _, args, agent = make("ppo_atari_multigpu", None, Toy.action_space, **flags)
    envs, run = script.Envs(args, slice(0, 3)), script.Run(args, {})
    plain = script.Envs(args, slice(0, 3)).vector  # another with the same games
    buffers = script.make_buffers(agent, envs, args)
    before, _ = plain.reset()
    over, games, scores, taken, cases = np.zeros(3, bool), [], np.zeros((2, 3)), 0, set()
    for iteration in range(2):
        run.iteration = iteration
        data = script.rollout(agent, envs, buffers, run, args)
        gumbel = np.random.default_rng((args.seed, iteration, 0)).gumbel(size=(T, 3, 4))
        with torch.no_grad():
            logprobs, values = agent.policy(data.obs.flatten(0, 1))
        logprobs = logprobs.view(T, 3, 4)
        torch.testing.assert_close(data.values[:T], values.view(T, 3), atol=1e-5, rtol=1e-4)
        noisy = logprobs.numpy() + np.float32(gumbel)
        top = np.sort(noisy, axis=-1)
        clear = top[..., -1] - top[..., -2] > 1e-4
        assert clear.mean() > 0.9
        assert (data.actions.numpy() == noisy.argmax(axis=-1))[clear].all()
        chosen = logprobs.gather(-1, data.actions[..., None])[..., 0]
        torch.testing.assert_close(data.logprobs, chosen, atol=1e-5, rtol=1e-4)
        for t in range(T):
            assert (data.obs[t].numpy() == before).all()
            assert (data.valid[t] == ~over).all()
            taken += np.count_nonzero(~over)
            scores += [np.zeros(3), ~over]
            before, reward, terminated, truncated, info = plain.step(data.actions[t].numpy())
            over = terminated | truncated
            rows_t = [x[t] for x in (data.rewards, data.terminated, data.truncated)]
            np.testing.assert_array_equal(rows_t, [reward, terminated, truncated])
            scores[0] += info["reward"]
            for i in np.flatnonzero(over):
                cases.add("limit" if truncated[i] else "game" if info["terminated"][i] else "life")
                if truncated[i] or info["terminated"][i]:
                    games.append([taken, *scores[:, i]])
                    scores[:, i] = 0
        with torch.no_grad():
            last = agent.get_value(torch.as_tensor(before))
        torch.testing.assert_close(data.values[T], last, atol=1e-5, rtol=1e-4)
    assert cases == {"limit", "game", "life"}
    run.__exit__(None)
    assert np.array(rows(folder)[1:], float).tolist() == games and len(games) >= 5
    assert run.global_step == taken < 2 * 3 * T
    assert [*run.last_returns] == [score for _, score, _ in games]
    assert len(scalars(folder)["charts/episodic_return"]) == 2
