"""ppo_continuous_action_warp.py on the CPU: two updates against the reference; a rollout and its
log against the payments of a toy. Environments reset themselves: every row is learned from."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from common import CLIPPED, VALUES, ends, make, same
from program import rows
from reference import PPO, Row, Seen, gaussian, mlp, parameters
from toys import BOX

import ppo_continuous_action_warp as script

T, N, D = 11, 4, 3
OBSERVED = gym.spaces.Box(-np.inf, np.inf, (D,))
HALF, CENTRE = torch.tensor([2.0, 0.5]).double(), torch.tensor([1.0, 0.5]).double()  # of BOX


def adapted(rate: float, kl: float) -> float:
    rate = rate / 1.5 if kl > 0.04 else rate * 1.5 if kl < 0.01 else rate
    return min(max(rate, 1e-5), 1e-2)


SETTINGS = {
    "value clipping": ({}, CLIPPED | {("value", "flat")}),
    "plain": ({"clip_vloss": False, "norm_adv": False}, CLIPPED),
    "a fixed rate": ({"desired_kl": 0.0}, CLIPPED | VALUES),
    "no gradient beyond its bound": ({"max_grad_norm": 1e3}, set()),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_updates(monkeypatch, name):
    """The second begins where the first one ended. The learning rate follows the KL."""
    flags, cases = SETTINGS[name]
    flags = {"hidden": (8, 6), "desired_kl": 0.02} | flags
    module, args, agent = make("ppo_continuous_action_warp", OBSERVED, BOX, **flags)
    rate = 0.004
    agent.adam["learning_rate"] = torch.tensor(rate)
    rng, moments, returns = np.random.default_rng(10), Seen(), Seen()
    ppo = PPO(agent, args, None, {"all": args.ent_coef})
    terminated, truncated, _ = ends()
    orders, plain = [], torch.rand_like

    def rand_like(x):
        numbers = plain(x)
        orders.append([part.tolist() for part in numbers.argsort().tensor_split(3)])
        return numbers

    def policy(p, obs, action):
        x = moments.standardized(obs)
        mean = CENTRE + HALF * mlp(p, "actor_mean", x, (0, 2, 4), torch.nn.functional.elu)
        logprob, entropy = gaussian(action.double(), mean, HALF * p["actor_logstd"].exp())
        return logprob, {"all": entropy}, mlp(p, "critic", x, (0, 2, 4), torch.nn.functional.elu)[0]

    def random(*shape, mean=0.0, scale=1.0):
        return torch.as_tensor(rng.normal(mean, scale, shape)).float()

    monkeypatch.setattr(torch, "rand_like", rand_like)
    rates = []
    for iteration in range(2):
        obs = random(T + 1, N, D, scale=[1, 5, 0.1])
        next_obs = random(T, N, D, scale=[1, 5, 0.1])
        actions = random(T, N, 2, mean=[1, 0.25], scale=[2, 0.25])
        rewards, discounted = random(T, N), random(T, N, scale=0.2)
        if iteration == 0:
            moments.add(obs[:-1].flatten(0, 1))
        returns.add(discounted.flatten())
        scaled = (rewards.double() / (returns.var + 1e-8).sqrt()).clamp(-10, 10)
        assert (scaled.abs() == 10).any()
        ppo.outputs = lambda p, numbers, obs=obs, actions=actions: [
            policy(p, obs[n // N, n % N], actions[n // N, n % N]) for n in numbers
        ]
        rows, by = {}, args.gamma * args.gae_lambda
        for t, i in reversed([*np.ndindex(T, N)]):
            with torch.no_grad():
                logprob, value = map(float, policy(ppo.p, obs[t, i], actions[t, i])[::2])
                after = float(policy(ppo.p, next_obs[t, i], actions[t, i])[2])
            gain = float(scaled[t, i]) + args.gamma * after * (not terminated[t, i]) - value
            if t + 1 < T and not terminated[t, i] and not truncated[t, i]:
                gain += by * rows[(t + 1) * N + i].advantage  # equation 16, with V of next_obs
            rows[t * N + i] = Row(logprob, value, gain, gain + value)
        flags = torch.as_tensor(terminated), torch.as_tensor(truncated)
        data = module.Rollout(obs, next_obs, actions, rewards, *flags, discounted)
        orders.clear()
        start = parameters(agent)
        metrics = module.update(agent, data, args, iteration == 0)
        expected = ppo.learn(rows, orders, rate, adapted if args.desired_kl else None)
        same(agent, metrics, expected, ppo.p, start, min(rate, ppo.rate))
        rates.append(rate := ppo.rate)
        assert float(metrics["charts/learning_rate"]) == pytest.approx(rate, rel=1e-4)
        if iteration == 1:
            moments.add(obs[:-1].flatten(0, 1))
    torch.testing.assert_close(agent.obs_moments.mean, moments.mean)
    torch.testing.assert_close(agent.obs_moments.var, moments.var)
    assert cases <= ppo.seen.keys()
    assert (set(rates) == {0.004}) == (args.desired_kl == 0.0)


class Toy(script.DeviceEnvs):
    """Environment i ends its episodes after 3 + i % 3 steps, by a time limit or, where i is odd,
    a death. It observes (i, t) and pays i + t. It returns the same tensors in every step."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, device, 2, [-1.0], [1.0], limit=3)
        self.number, self.obs = torch.arange(num_envs), torch.zeros(num_envs, 2)
        self.reward = torch.zeros(num_envs)
        self.flags = torch.zeros(2, num_envs, dtype=torch.bool)

    def observe(self):
        self.obs[:, 0], self.obs[:, 1] = self.number, self.steps
        return self.obs

    def reset(self, mask):
        self.replace(mask, steps=0)
        return self.observe()

    def step(self, actions):
        assert actions.abs().max() <= 1.0
        self.steps += 1
        self.reward.copy_(self.number + self.steps)
        over = self.steps >= 3 + self.number % 3
        self.flags[0], self.flags[1] = over & (self.number % 2 == 1), over & (self.number % 2 == 0)
        return self.observe(), self.reward, *self.flags


SMALL = script.Args(
    env_id="Pendulum-v1", num_envs=6, num_steps=10, total_timesteps=4 * 60, num_minibatches=2,
    update_epochs=1, hidden=(8,), cuda=False, stagger_episodes=False, checkpoint_interval=1,
)  # fmt: skip


def test_every_row_of_a_rollout_is_a_step():
    """`next_obs` is an episode's true last observation, though the toy uses its buffers again."""
    torch.manual_seed(1)
    envs = Toy(SMALL.num_envs)
    agent = script.Agent(envs, SMALL)
    data = script.start(agent, envs, SMALL)
    begun = 0
    for iteration in range(2):
        script.rollout(agent, envs, data, SMALL)
        for row, i in np.ndindex(10, 6):
            length = 3 + i % 3
            s = (10 * iteration + row) % length  # steps of the episode before this one
            begun += s == 0
            assert data.obs[row, i].tolist() == [i, s]
            assert data.obs[row + 1, i].tolist() == [i, (s + 1) % length]
            assert data.next_obs[row, i].tolist() == [i, s + 1]
            assert data.rewards[row, i] == i + s + 1
            discounted = sum(0.99 ** (s - k) * (i + k + 1) for k in range(s + 1))
            assert float(data.discounted[row, i]) == pytest.approx(discounted, rel=1e-5)
            assert data.terminated[row, i] == (s + 1 == length and i % 2 == 1)
            assert data.truncated[row, i] == (s + 1 == length and i % 2 == 0)
        assert (data.actions.abs() > 1.0).any()  # stored as drawn, clipped for the environment
    assert begun == 2 * (7 + 5 + 4)


@pytest.mark.parametrize("staggered", [False, True])
def test_the_log_has_every_episode(staggered, tmp_path, monkeypatch):
    """Across rollouts and a resumption. Those that a staggered start cuts short are left out."""
    monkeypatch.setattr(script, "make_envs", lambda env_id, *given: Toy(*given))
    args = replace(SMALL, run_dir=tmp_path, stagger_episodes=staggered)
    script.train(args)
    script.train(replace(args, resume=tmp_path, run_dir=None, total_timesteps=7 * 60))
    torch.manual_seed(args.seed)
    envs = Toy(6)
    script.start(script.Agent(envs, args), envs, args)
    expected, steps, cut_short = [], envs.steps.tolist(), [staggered] * 6
    assert (len(set(steps)) > 1) == staggered
    for t, i in np.ndindex(70, 6):
        steps[i] += 1
        if steps[i] == 3 + i % 3:
            if not cut_short[i]:
                score = sum(i + k + 1 for k in range(steps[i]))
                expected.append([6 * (t + 1), float(score), steps[i]])
            steps[i], cut_short[i] = 0, False
    assert np.array(rows(tmp_path)[1:], float).tolist() == expected
    assert len(expected) > 100
    last = script.load_checkpoint(tmp_path)["last_returns"]
    assert last == [score for _, score, _ in expected][-100:]
