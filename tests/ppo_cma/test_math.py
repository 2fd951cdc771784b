"""PPO-CMA against the algorithm's specification: golden numbers of the original program (measured
on it), fixed points and statistics. The numbers in the test names are the spec's."""

import csv
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_cma
from ppo_cma import Agent, Args, Rollout, gae, log_density, variance_loss


def problem(obs_dim=1, low=(-1.0,), high=(1.0,)):
    return SimpleNamespace(
        observation_space=gym.spaces.Box(-np.inf, np.inf, (obs_dim,)),
        action_space=gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32)),
    )


def make_agent(obs_dim=1, low=(-1.0,), high=(1.0,), **flags) -> tuple[Agent, Args]:
    """An agent that is not pretrained, and its arguments."""
    args = Args(**flags)
    agent = Agent(problem(obs_dim, low, high), args)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-8, fused=True)
    return agent, args


class Constant(torch.nn.Module):
    """A network with one output vector for every state."""

    def __init__(self, outputs: int, value=0.0):
        super().__init__()
        self.raw = torch.nn.Parameter(torch.full((outputs,), value))

    def forward(self, x):
        return self.raw.expand(*x.shape[:-1], -1)


# --- 1 squash, 2 initialisation, 3 pre-training, 4 the first iteration ----------------------------
@pytest.mark.parametrize(
    ("half_range", "raw", "sigma"),
    [
        (1.0, 0.0, 0.141421), (1.0, 1.893693, 1.0), (2.0, 0.0, 0.2), (2.0, 2.033902, 2.0),
        (0.4, 0.0, 0.0894427), (0.4, 1.671836, 0.4), (1.0, 50.0, 2.0), (1.0, -50.0, 0.01),
    ],
)  # fmt: skip
def test_1_deviation_is_a_sigmoid_between_floor_and_full_range(half_range, raw, sigma):
    agent, _ = make_agent(low=[-half_range], high=[half_range])
    agent.var_net = Constant(1, raw)
    assert (0.5 * agent.logvar(torch.zeros(1))).exp().item() == pytest.approx(sigma, rel=2e-5)


@pytest.mark.parametrize("net", ["mean_net", "var_net", "critic"])
def test_2_shapes_unit_rows_and_centred_pre_activations(net):
    agent, _ = make_agent(11, [-1] * 3, [1] * 3)
    mlp = getattr(agent, net)
    inputs, outputs = (12, 1) if net == "critic" else (11, 3)
    first, second, output = mlp.from_input.split(mlp.widths)
    second = torch.cat([second, mlp.from_first], dim=1)
    output = torch.cat([output, mlp.from_both], dim=1)
    assert first.shape == (128, inputs)
    assert second.shape == (128, inputs + 128)
    assert output.shape == (outputs, inputs + 256)
    for rows in (first, second, output):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    x = torch.randn(500, inputs) * 3 + 1
    mlp.center(x)
    for layer in range(3):
        assert mlp(x, layer).mean(dim=0).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("mode", "count"), [("ppo-cma", 60_501), ("ppo-cma-m", 60_501), ("ppo", 41_045), ("pg", 41_045)]
)
def test_2_parameter_counts_of_the_original(mode, count):
    agent, _ = make_agent(11, [-1] * 3, [1] * 3, mode=mode)
    assert sum(p.numel() for p in agent.parameters()) == count


def test_3_pretraining_reaches_the_initial_gaussian():
    agent, args = make_agent(11, [-1] * 3, [1] * 3)
    ppo_cma.pretrain_policy(agent, args)
    with torch.no_grad():
        for scale, low, high in ((1.0, 0.98, 1.02), (0.5, 0.96, 1.01), (0.1, 0.75, 0.87)):
            x = scale * torch.randn(4000, 11, generator=torch.Generator().manual_seed(7))
            sigma = (0.5 * agent.logvar(x)).exp()
            assert low < sigma.mean() < high  # 1.00, .99 and .79-.84 in the original
            if scale == 1.0:
                assert (sigma - 1.0).abs().max() < 0.12
                assert (sigma - 1.0).square().mean().sqrt() < 0.07
                assert agent.mean(x).square().mean().sqrt() < 0.02 * 2


def test_4_and_13_first_actions_are_of_the_initial_gaussian_and_clipped():
    """Whatever the weights. Clipping alone lowers the variance to .516 of the half-range's."""
    agent, _ = make_agent(3, [-1, 0], [1, 4])
    agent.mean_net.bias.data += 100.0
    actions = agent.act(np.zeros((40_000, 3)), agent.noise(40_000))
    assert actions.dtype == np.float32
    unit = (actions - [0, 2]) / [1, 2]
    assert np.abs(unit).max() == 1.0
    assert (np.abs(unit) == 1.0).mean(axis=0) == pytest.approx([0.317] * 2, abs=0.008)
    assert unit.mean(axis=0) == pytest.approx([0.0] * 2, abs=0.02)
    assert np.square(unit).mean(axis=0) == pytest.approx([0.516] * 2, abs=0.01)
    assert agent.act(np.zeros((2, 3))).tolist() == [[0.0, 2.0]] * 2


def test_4_get_action_and_value_samples_as_act_and_has_a_true_density():
    (agent, _), (twin, _) = (make_agent(4, [-1] * 2, [1] * 2) for _ in range(2))
    agent.updates += 1  # from here on the networks are the policy
    twin.updates += 1
    obs = torch.randn(6, 4)
    action, logprob, entropy, value = agent.get_action_and_value(obs)
    assert (action.numpy() == twin.act(obs.numpy(), twin.noise(6))).all()
    expected = log_density(action, agent.mean(obs), agent.logvar(obs)) - np.log(2 * np.pi)
    torch.testing.assert_close(logprob, expected)
    differential = 0.5 * agent.logvar(obs).sum(-1) + np.log(2 * np.pi * np.e)
    torch.testing.assert_close(entropy, differential)
    inputs = agent.critic_inputs(obs, torch.arange(6))
    torch.testing.assert_close(inputs[:, 4], 0.001 * torch.arange(6))
    late = agent.get_action_and_value(obs, action, torch.arange(6))[3]
    assert late[0] == value[0] and (late[1:] != value[1:]).all()  # the critic sees the time
    no_future, _ = make_agent(4, gamma=0.0)
    assert (no_future.critic_inputs(obs, 500)[:, 4] == 0).all()


# --- 5 scaler, 6 returns; test_cma.py has the rest of an iteration --------------------------------
def test_5_scaler_golden_numbers():
    agent, _ = make_agent(3)
    ppo_cma.update_obs_scale(agent, torch.tensor([[1, 10, 0.01], [3, -10, 0.02]]))
    assert agent.obs_scale.tolist() == pytest.approx([0.223557, 0.049998, 1.0], abs=1e-6)
    ppo_cma.update_obs_scale(agent, torch.tensor([[0.1, 2.0, 0.0]] * 3))
    assert agent.obs_sq_mean.tolist() == pytest.approx([2.505, 52.0, 0.000125], rel=1e-5)
    assert agent.obs_scale.tolist() == pytest.approx([0.223557, 0.049998, 1.0], abs=1e-6)


def test_6_returns_and_gae_golden_numbers():
    rewards, values, end = np.array([1, 2, -1, 0.5]), [0.3, 0.1, -0.2, 0.4, 0.0], np.eye(4)[3]
    returns = gae(rewards, np.zeros(5), end, end, 0.99, 1.0)
    assert returns == pytest.approx([2.485049, 1.50005, -0.505, 0.5], abs=1e-6)
    for terminated in (end, 0 * end):  # with an end value of 0 a truncation is a termination
        advantages = gae(rewards, np.array(values), terminated, end, 0.99, 0.95)
        assert advantages == pytest.approx([2.125568, 1.410492, -0.30995, 0.1], abs=1e-6)


# --- 8 losses and gradients -----------------------------------------------------------------------
@pytest.fixture
def golden():
    sigma = torch.tensor([[0.5, 0.8], [0.4, 0.3], [0.6, 0.9]])
    return SimpleNamespace(
        actions=torch.tensor([[0.5, -0.2], [-0.3, 0.9], [0.1, 0.4]]),
        advantages=torch.tensor([1.5, -0.8, 0.3]),
        mean=torch.tensor([[0.1, 0.0], [0.2, 0.5], [-0.4, 0.3]], requires_grad=True),
        mean_old=torch.tensor([[0.0, 0.1], [0.1, 0.6], [-0.5, 0.2]]),
        logvar=sigma.square().log().requires_grad_(),
    )


def test_8_variance_loss_golden(golden):
    loss = variance_loss(golden.actions, golden.advantages, golden.mean, golden.logvar)
    loss.backward()
    assert loss.item() == pytest.approx(-0.3087995, abs=1e-6)
    assert golden.mean.grad is None
    # d/d ln var of -A [-(a - mu)^2 / 2 var - ln var / 2] / 3, by hand
    deviation = (golden.actions - golden.mean.detach()).square() / golden.logvar.detach().exp()
    weight = golden.advantages.clamp(min=0)[:, None] / 3
    torch.testing.assert_close(golden.logvar.grad, 0.5 * weight * (1 - deviation))
    golden.advantages[1] = -7.0  # of a bad action
    again = variance_loss(golden.actions, golden.advantages, golden.mean, golden.logvar)
    assert again.item() == pytest.approx(loss.item())


@pytest.mark.parametrize(
    ("mirror", "value", "row_2"),
    [(False, -0.3087995, [0.0, 0.0]), (True, -0.5703018, [-0.3032654, 0.3594255])],
)
def test_8_mean_loss_golden(golden, mirror, value, row_2):
    loss = ppo_cma.mean_loss(
        golden.actions, golden.advantages, golden.mean, golden.logvar, golden.mean_old, mirror
    )
    loss.backward()
    assert loss.item() == pytest.approx(value, abs=1e-5)
    assert golden.logvar.grad is None
    expected = torch.tensor([[-0.8, 0.15625], row_2, [-0.1388889, -0.0123457]])
    torch.testing.assert_close(golden.mean.grad, expected, atol=1e-5, rtol=0)


def test_8_ppo_loss_golden(golden):
    logvar = golden.logvar.detach()
    old = log_density(golden.actions, golden.mean_old, logvar)
    assert old.tolist() == pytest.approx([0.345978, 1.120264, 0.091495], abs=1e-5)
    ratio = (log_density(golden.actions, golden.mean, logvar) - old).exp()
    assert ratio.tolist() == pytest.approx([1.244909, 0.511638, 1.186842], abs=1e-5)
    loss = ppo_cma.ppo_loss(golden.actions, golden.advantages, golden.mean, logvar, old, 0.2, 0.0)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5053509, abs=1e-5)
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [-0.164839, -0.014652]])
    torch.testing.assert_close(golden.mean.grad, expected, atol=1e-5, rtol=0)
    zeros = torch.zeros(3)
    ppo_cma.ppo_loss(golden.actions, zeros, golden.mean, golden.logvar, old, 0.2, 0.6).backward()
    # the entropy's bonus widens the policy
    torch.testing.assert_close(golden.logvar.grad, torch.full((3, 2), -0.6 * 0.5 / 3))


def test_12_history_is_sampled_by_iteration_then_uniformly_within():
    generator = torch.Generator().manual_seed(0)
    index = ppo_cma.history_minibatches([10, 1000], (200, 500), generator)
    assert index.shape == (200, 500)
    counts = np.bincount(index.flatten().numpy(), minlength=1010)
    assert len(counts) == 1010
    small, large = counts[:10], counts[10:]
    assert abs(small.sum() - 50_000) < 4 * 25_000**0.5
    for part, bound in ((small, 27.9), (large, 1142)):  # 9 and 999 degrees of freedom, p = 0.999
        expected = part.sum() / len(part)
        assert ((part - expected) ** 2 / expected).sum() < bound


# --- 14 the two-dimensional quadratic -------------------------------------------------------------
def optimize(mode: str, seeds: int, iterations=20, history=5, pretrain=ppo_cma.pretrain_policy):
    """Mean rewards before and deviations after each update, [seed, iteration], of r(a) = -|a|^2
    over [-2, 2]^2 from N((-1, -1), 0.25^2); each of 64 actions is an episode of its own."""
    result = np.zeros((2, seeds, iterations))
    flags = {"mode": mode, "gamma": 0.0, "minibatch_size": 64, "history_buffer_size": history}
    for seed in range(seeds):
        agent, args = make_agent(1, [-2.0] * 2, [2.0] * 2, seed=seed, **flags)
        agent.initial_mean.fill_(-1.0)
        agent.initial_std.fill_(0.25)
        pretrain(agent, args)
        for k in range(iterations):
            obs = np.zeros((64, 1), np.float32)
            actions = agent.act(obs, agent.noise(64))
            rewards = -np.square(actions, dtype=float).sum(axis=1)
            metrics = ppo_cma.update(agent, Rollout(obs, actions, rewards, np.ones(64, bool)), args)
            assert metrics["charts/mean_episodic_return"] == pytest.approx(rewards.mean())
            sigma = (0.5 * agent.logvar(torch.zeros(1))).exp().mean().item()
            result[:, seed, k] = rewards.mean(), sigma
    return result


def fit_in_one_state(agent: Agent, args: Args):
    """Instead of the pretraining, which takes seconds: the first policy in the only state."""
    state, adam = torch.zeros(1, 1), torch.optim.Adam(agent.parameters(), lr=3e-3)
    for _ in range(300):
        error = (agent.mean(state) - agent.initial_mean).square().sum()
        error += (0.5 * agent.logvar(state) - agent.initial_std.log()).square().sum()
        adam.zero_grad()
        error.backward()
        adam.step()
    assert error < 1e-9


def test_14_ppo_cma_m_widens_and_ppo_shrinks():
    """One seed; with the pretraining it widens to 0.457, too, and shrinks to 0.155."""
    (reward,), (sigma,) = optimize("ppo-cma-m", 1, 7, pretrain=fit_in_one_state)
    assert 0.19 < sigma.min() < 0.22
    assert sigma.argmax() + 1 == 6
    assert sigma.max() == pytest.approx(0.457, abs=0.04)
    assert reward[5] == pytest.approx(-0.32, abs=0.08)
    _, (sigma,) = optimize("ppo", 1, 4, pretrain=fit_in_one_state)
    assert (np.diff(sigma) < 0).all()
    assert sigma[3] == pytest.approx(0.155, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ppo-cma-m", "ppo-cma", "ppo", "pg", "pg-pos"])
def test_14_modes_that_widen_and_modes_that_shrink(mode):
    reward, sigma = optimize(mode, 5 if mode == "ppo-cma-m" else 3)
    mean, last = sigma.mean(axis=0), reward[:, 19].mean()
    if mode == "ppo-cma-m":  # it widens, then contracts
        assert 0.24 < mean[0] < 0.34  # mean before variance would give .18-.21
        assert 4 <= mean.argmax() + 1 <= 7
        assert 0.36 < mean.max() < 0.50
        assert mean[19] < 0.04
        assert last > -0.01
        assert -0.2 < reward[:, 8].mean() < -0.05
    if mode == "ppo-cma":
        assert 0.30 < mean.max() < 0.45
        assert last > -0.015
    if mode == "ppo":
        assert (np.diff(mean) < 0).all()
        assert (np.diff(sigma[:, :18], axis=1) < 0.003).all()  # until a seed has arrived
        assert -0.12 < last < -0.04
    if mode == "pg":
        assert last < -4
    if mode == "pg-pos":
        assert sigma.max() < 0.25
        assert mean[19] < 0.02


@pytest.mark.slow
def test_14_a_longer_history_widens_more():
    peaks = [optimize("ppo-cma-m", 2, history=h)[1].max(axis=1).mean() for h in (1, 5, 9)]
    assert peaks[0] < peaks[1] < peaks[2]


# --- 15 accounting --------------------------------------------------------------------------------
class Clock(gym.Env):
    """Episodes of these lengths that pay 1 a step and show (seed, step). It spoils its actions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))
    made = []  # noqa: RUF012

    def __init__(self, lengths):
        number = len(Clock.made)
        self.lengths = lengths[number] if isinstance(lengths[0], list) else lengths
        self.actions, self.seeds = [], []
        Clock.made.append(self)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.t = 0
        return np.array([seed % 1000, 0], np.float32), {}

    def step(self, action):
        self.actions.append(float(action[0]))
        action[:] = 7.0
        self.t += 1
        lengths = self.lengths
        ended = self.t == lengths[(len(self.seeds) - 1) % len(lengths)]
        return np.array([self.seeds[-1] % 1000, self.t], np.float32), 1.0, ended, False, {}


gym.register("ClockOfCMA-v0", Clock)


@pytest.fixture
def play(tmp_path):
    """A rollout in such environments: its data, the rows of episodes.csv, the environments."""

    def play(lengths, iter_steps, action_repeat=2, workers=0):
        Clock.made.clear()
        flags = {"num_envs": len(lengths), "iter_steps": iter_steps, "env_workers": workers}
        kwargs = f'{{"lengths": {lengths}}}'
        flags |= {"env_id": "ClockOfCMA-v0", "env_kwargs": kwargs, "run_dir": tmp_path / "run"}
        agent, args = make_agent(2, action_repeat=action_repeat, **flags)
        envs = ppo_cma.make_envs(args, args.num_envs, {})
        with ppo_cma.Run(args, {}) as run:
            data = ppo_cma.rollout(agent, envs, run, args)
        with open(tmp_path / "run" / "episodes.csv") as file:
            rows = [(int(a), float(b), int(c)) for a, _, b, c in [*csv.reader(file)][1:]]
        assert run.episodes == [len(env.seeds) for env in Clock.made]
        assert run.global_step == rows[-1][0] == sum(len(env.actions) for env in Clock.made)
        return data, rows, Clock.made

    return play


def test_15_action_repeat_counts_decisions_and_steps(play):
    data, rows, (env,) = play([[5, 4, 7]], iter_steps=10)
    assert rows == [(5, 5.0, 5), (9, 4.0, 4), (16, 7.0, 7)]  # the last one plays to its end
    lengths = np.diff(np.flatnonzero(data.ended), prepend=-1)
    assert lengths.tolist() == [3, 2, 4]  # ceil(length / 2)
    assert data.rewards[:5].tolist() == [2.0, 2.0, 1.0, 2.0, 2.0]
    assert data.obs[5:, 1].tolist() == [0.0, 2.0, 4.0, 6.0]
    # an action is held, to the end at most, and the agent keeps it as it was
    a = data.actions[:, 0].tolist()
    assert env.actions == [*np.repeat(a[:3], [2, 2, 1]), *np.repeat(a[3:], [2, 2, 2, 2, 2, 1])]
    assert max(map(abs, a)) <= 1.0


def test_15_running_episodes_finish_and_short_ones_are_not_favoured(play):
    # environment 0 plays one long episode beside many short ones of environment 1
    data, rows, envs = play([[40, 9], [2, 2]], iter_steps=30, action_repeat=1)
    lengths = [length for *_, length in rows]
    assert lengths == [2] * 8 + [40]  # started before both had made 30 steps together
    seeds = [seed for env in envs for seed in env.seeds]
    assert len(set(seeds)) == len(seeds) == 9
    # one episode after the other, in the order of their ends
    order = [*envs[1].seeds, *envs[0].seeds]
    assert data.obs[:, 0].tolist() == np.repeat(np.array(order) % 1000, lengths).tolist()
    assert data.obs[:, 1].tolist() == [t for length in lengths for t in range(length)]
    assert np.flatnonzero(data.ended).tolist() == (np.cumsum(lengths) - 1).tolist()


@pytest.mark.slow
def test_15_an_episode_without_an_end_is_an_error(play, monkeypatch):
    monkeypatch.setattr(Clock, "step", lambda env, a: (np.zeros(2), 1.0, False, False, {}))
    monkeypatch.setattr(ppo_cma, "numpy_actor", lambda agent: lambda obs, noise: noise)
    with pytest.raises(RuntimeError, match="max_episode_steps"):
        play([[1]], iter_steps=1, action_repeat=1)


# --- beyond the list ------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ppo_cma.MODES)
def test_acting_in_numpy_is_the_policy(mode):
    """Greedily, with noise, of many states and of one; and so is a network of one's own."""
    agent, _ = make_agent(5, [-1, 0], [1, 3], mode=mode)
    agent.updates += 1
    agent.obs_scale.uniform_(0.1, 1.0)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    obs = np.random.default_rng(0).normal(size=(2000, 5)).astype(np.float32)
    for _ in range(2):
        mean = agent.mean(torch.as_tensor(obs)).detach().numpy()
        std = (0.5 * agent.logvar(torch.as_tensor(obs))).exp().detach().numpy()
        noise = agent.noise(len(obs))
        np.testing.assert_allclose(agent.act(obs), mean, atol=2e-6)
        np.testing.assert_allclose(agent.act(obs[:1]), mean[:1], atol=2e-6)
        expected = np.clip(mean + std * noise, [-1, 0], [1, 3])
        np.testing.assert_allclose(agent.act(obs, noise), expected, atol=5e-6)
        ppo_cma.check_actor(agent, obs)
        agent.mean_net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ELU(), agent.mean_net)
        agent.mean_net[2] = torch.nn.Linear(8, 2 if agent.cma else 4)
        agent.var_net = agent.var_net if agent.cma else agent.mean_net


def test_another_policy_in_numpy_is_an_error(monkeypatch):
    agent, _ = make_agent(5)
    obs = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    monkeypatch.setattr(ppo_cma.F, "leaky_relu", lambda x, slope: torch.tanh(x))
    with pytest.raises(RuntimeError, match="another policy"):
        ppo_cma.check_actor(agent, obs)


def test_saturated_means():
    """One of two mean actions is at its bound, in every state."""
    agent, args = make_agent(3, [-1] * 2, [1] * 2, n_updates=2)
    with torch.no_grad():
        agent.mean_net.bias[-2:] = torch.tensor([30.0, 0.0])
    obs, actions = np.ones((5, 3), np.float32), np.zeros((5, 2), np.float32)
    data = Rollout(obs, actions, np.ones(5), np.eye(5, dtype=bool)[4])
    assert ppo_cma.update(agent, data, args)["charts/saturated_means"] == 0.5
