"""ppo_cma.py: golden numbers of the original program (measured on it), first weights and actions,
statistics, whole episodes, boxes. Updates are in algorithms/test_cma.py."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import rows, scalars
from scripts import resume, train
from toys import Clock

import ppo_cma
from ppo_cma import Agent, Args, Rollout, log_density


def make_agent(obs_dim=1, low=(-1.0,), high=(1.0,), **flags) -> tuple[Agent, Args]:
    """An agent that is not pretrained, and its arguments."""
    args = Args(**flags)
    problem = SimpleNamespace(
        observation_space=gym.spaces.Box(-np.inf, np.inf, (obs_dim,)),
        action_space=gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32)),
    )
    agent = Agent(problem, args)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-8, fused=True)
    return agent, args


# --- first weights and actions --------------------------------------------------------------------
@pytest.mark.parametrize("net", ["mean_net", "critic"])
def test_unit_rows_and_centred_pre_activations(net):
    agent, _ = make_agent(11, [-1] * 3, [1] * 3)
    mlp = getattr(agent, net)
    inputs, outputs = (12, 1) if net == "critic" else (11, 3)
    first, second, output = mlp.from_input.split(mlp.widths)
    second = torch.cat([second, mlp.from_first], dim=1)
    output = torch.cat([output, mlp.from_both], dim=1)
    sizes = (128, inputs), (128, inputs + 128), (outputs, inputs + 256)
    for weights, size in zip((first, second, output), sizes, strict=True):
        assert weights.shape == size
        torch.testing.assert_close(weights.norm(dim=1), torch.ones(len(weights)))
    x = torch.randn(500, inputs) * 3 + 1
    mlp.center(x)
    for layer in range(3):
        assert mlp(x, layer).mean(dim=0).abs().max() < 1e-5 * mlp(x, layer).abs().max()
    assert make_agent(11, [-1], [1], gamma=0.0)[0].time_unit == 0.0  # a bandit sees no time
    for mode, number in (("ppo-cma", 60_501), ("ppo", 41_045)):  # as the original's
        agent, _ = make_agent(11, [-1] * 3, [1] * 3, mode=mode)
        assert sum(p.numel() for p in agent.parameters()) == number


def test_pretraining_reaches_the_initial_gaussian():
    agent, args = make_agent(11, [-1] * 3, [1] * 3)
    ppo_cma.pretrain_policy(agent, args)
    with torch.no_grad():
        for scale, low, high in ((1.0, 0.98, 1.02), (0.5, 0.96, 1.01), (0.1, 0.75, 0.87)):
            x = scale * torch.randn(4000, 11, generator=torch.Generator().manual_seed(7))
            sigma = (0.5 * agent.logvar(x)).exp()
            assert low < sigma.mean() < high  # 1.00, .99 and .79-.84 in the original
            if scale == 1.0:
                assert (sigma - 1.0).abs().max() < 0.12
                assert agent.mean(x).square().mean().sqrt() < 0.02 * 2


def test_first_actions_are_of_the_initial_gaussian_and_clipped():
    """Whatever the weights. Clipping alone lowers the variance to .516 of the half-range's."""
    agent, _ = make_agent(3, [-1, 0], [1, 4])
    agent.mean_net.bias.data += 100.0
    actions = agent.act(np.zeros((40_000, 3)), agent.noise(40_000))
    unit = (actions - [0, 2]) / [1, 2]
    assert np.abs(unit).max() == 1.0
    assert (np.abs(unit) == 1.0).mean(axis=0) == pytest.approx([0.317] * 2, abs=0.008)
    assert unit.mean(axis=0) == pytest.approx([0.0] * 2, abs=0.02)
    assert np.square(unit).mean(axis=0) == pytest.approx([0.516] * 2, abs=0.01)
    assert agent.act(np.zeros((2, 3))).tolist() == [[0.0, 2.0]] * 2


@pytest.mark.parametrize("mode", ["ppo-cma-m", "pg"])
def test_later_ones_are_the_networks_and_the_critic_sees_the_time(mode):
    """In numpy, and with a network of one's own; another policy there is an error."""
    agent, _ = make_agent(5, [-1, 0], [1, 3], mode=mode)
    agent.updates += 1
    agent.obs_scale.uniform_(0.1, 1.0)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    obs = np.random.default_rng(0).normal(size=(2000, 5)).astype(np.float32)
    tensor = torch.as_tensor(obs)
    for _ in range(2):
        with torch.no_grad():
            mean = agent.mean(tensor).numpy()
            std = (0.5 * agent.logvar(tensor)).exp().numpy()
        noise = agent.noise(len(obs))
        taken = agent.act(obs, noise)
        np.testing.assert_allclose(agent.act(obs), mean, rtol=1e-4, atol=1e-5)
        expected = np.clip(mean + std * noise, [-1, 0], [1, 3])
        np.testing.assert_allclose(taken, expected, rtol=1e-4, atol=1e-4)
        ppo_cma.check_actor(agent, obs, taken, noise)
        fifth = np.where((np.arange(2000) % 5 == 0)[:, None], 0, taken)
        for other in (agent.act(obs, 3.0 * noise), fifth):
            with pytest.raises(RuntimeError, match="another policy"):
                ppo_cma.check_actor(agent, obs, other, noise)
        agent.mean_net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ELU(), agent.mean_net)
        agent.mean_net[2] = torch.nn.Linear(8, 2 if agent.cma else 4)
        agent.var_net = agent.var_net if agent.cma else agent.mean_net
    action, logprob, entropy, value = agent.get_action_and_value(tensor[:6])
    std = (0.5 * agent.logvar(tensor[:6])).exp()
    normal = torch.distributions.Normal(agent.mean(tensor[:6]), std)
    torch.testing.assert_close(logprob, normal.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    late = agent.get_action_and_value(tensor[:6], action, 200 * torch.arange(6))[3]
    assert ((late - value).abs() > 1e-4).tolist() == [False] + [True] * 5
    agent.mean = lambda obs: 0.5 + 0.0 * obs[:, :2]
    with pytest.raises(RuntimeError, match="another policy"):
        ppo_cma.check_actor(agent, obs, taken, noise)


# --- golden numbers -------------------------------------------------------------------------------
SIGMA = torch.tensor([[0.5, 0.8], [0.4, 0.3], [0.6, 0.9]])
ACTIONS = torch.tensor([[0.5, -0.2], [-0.3, 0.9], [0.1, 0.4]])
GAINS = torch.tensor([1.5, -0.8, 0.3])
MEAN_OLD = torch.tensor([[0.0, 0.1], [0.1, 0.6], [-0.5, 0.2]])


@pytest.mark.parametrize("kind", ["variance", "mean", "mirrored", "ppo"])
def test_losses_and_gradients(kind):
    mean = torch.tensor([[0.1, 0.0], [0.2, 0.5], [-0.4, 0.3]], requires_grad=True)
    logvar = SIGMA.square().log().requires_grad_()
    expected = torch.tensor([[-0.8, 0.15625], [0.0, 0.0], [-0.1388889, -0.0123457]])
    if kind == "variance":
        loss, value = ppo_cma.variance_loss(ACTIONS, GAINS, mean, logvar), -0.3087995
        # d/d ln var of -A [-(a - mu)^2 / 2 var - ln var / 2] / 3, by hand
        weight = GAINS.clamp(min=0)[:, None] / 3
        expected = 0.5 * weight * (1 - (ACTIONS - mean.detach()).square() / SIGMA.square())
    elif kind == "ppo":
        old = log_density(ACTIONS, MEAN_OLD, logvar.detach())
        assert old.tolist() == pytest.approx([0.345978, 1.120264, 0.091495], rel=1e-4)
        loss = ppo_cma.ppo_loss(ACTIONS, GAINS, mean, logvar.detach(), old, 0.2, 0.0)
        expected, value = torch.zeros(3, 2), -0.5053509
        expected[2] = torch.tensor([-0.164839, -0.014652])
    else:
        mirror = kind == "mirrored"
        loss = ppo_cma.mean_loss(ACTIONS, GAINS, mean, logvar, MEAN_OLD, mirror)
        value = -0.5703018 if mirror else -0.3087995
        expected[1] = torch.tensor([-0.3032654, 0.3594255]) * mirror
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-4)
    moved, still = (logvar, mean) if kind == "variance" else (mean, logvar)
    torch.testing.assert_close(moved.grad, expected, atol=1e-5, rtol=1e-4)
    assert still.grad is None


def test_history_is_sampled_by_iteration_then_uniformly_within():
    generator = torch.Generator().manual_seed(0)
    index = ppo_cma.history_minibatches([10, 1000], (200, 500), generator)
    counts = np.bincount(index.flatten().numpy(), minlength=1010)
    assert abs(counts[:10].sum() - 50_000) < 4 * 25_000**0.5
    for part, bound in ((counts[:10], 27.9), (counts[10:], 1142)):  # p = 0.999
        expected = part.sum() / len(part)
        assert ((part - expected) ** 2 / expected).sum() < bound


# --- the two-dimensional quadratic ----------------------------------------------------------------
def optimize(mode: str, seeds: int, iterations=20, history=5):
    """Mean rewards before and deviations after each update, [seed, iteration], of r(a) = -|a|^2
    over [-2, 2]^2 from N((-1, -1), 0.25^2); each of 64 actions is an episode of its own."""
    result = np.zeros((2, seeds, iterations))
    flags = {"mode": mode, "gamma": 0.0, "minibatch_size": 64, "history_buffer_size": history}
    for seed in range(seeds):
        agent, args = make_agent(1, [-2.0] * 2, [2.0] * 2, seed=seed, **flags)
        agent.initial_mean.fill_(-1.0)
        agent.initial_std.fill_(0.25)
        ppo_cma.pretrain_policy(agent, args)
        for k in range(iterations):
            obs = np.zeros((64, 1), np.float32)
            actions = agent.act(obs, agent.noise(64))
            rewards = -np.square(actions, dtype=float).sum(axis=1)
            ppo_cma.update(agent, Rollout(obs, actions, rewards, np.ones(64, bool)), args)
            sigma = (0.5 * agent.logvar(torch.zeros(1))).exp().mean().item()
            result[:, seed, k] = rewards.mean(), sigma
    return result


@pytest.mark.slow
@pytest.mark.parametrize("mode", ppo_cma.MODES)
def test_modes_that_widen_and_modes_that_shrink(mode):
    reward, sigma = optimize(mode, 5 if mode == "ppo-cma-m" else 3)
    mean, last = sigma.mean(axis=0), reward[:, 19].mean()
    if mode == "ppo-cma-m":  # it widens, then contracts
        assert 0.24 < mean[0] < 0.34  # mean before variance would give .18-.21
        assert 4 <= mean.argmax() + 1 <= 7
        assert 0.36 < mean.max() < 0.50
        assert mean[19] < 0.04
        assert last > -0.01
        assert -0.2 < reward[:, 8].mean() < -0.05
        peaks = [optimize(mode, 2, history=h)[1].max(axis=1).mean() for h in (1, 5, 9)]
        assert peaks[0] < peaks[1] < peaks[2]  # a longer history widens more
    if mode == "ppo-cma":
        assert 0.30 < mean.max() < 0.45
        assert last > -0.015
    if mode == "ppo":
        assert (np.diff(mean) < 0).all()
        assert -0.12 < last < -0.04
    if mode == "pg":
        assert last < -4
    if mode == "pg-pos":
        assert sigma.max() < 0.25
        assert mean[19] < 0.02


# --- whole episodes -------------------------------------------------------------------------------
@pytest.fixture
def play(tmp_path):
    """A rollout in such environments: its data, the rows of episodes.csv, the environments."""

    def play(lengths, iter_steps, action_repeat=2):
        Clock.made.clear()
        flags = {"num_envs": len(lengths), "iter_steps": iter_steps, "run_dir": tmp_path / "run"}
        flags |= {"env_id": "Clock-v0", "env_kwargs": f'{{"lengths": {lengths}}}'}
        agent, args = make_agent(2, action_repeat=action_repeat, **flags)
        envs = ppo_cma.make_envs(args, args.num_envs, {})
        with ppo_cma.Run(args, {}) as run:
            data = ppo_cma.rollout(agent, envs, run, args)
        table = np.array(rows(tmp_path / "run")[1:], float).tolist()
        assert run.episodes == [len(env.seeds) for env in Clock.made]
        assert run.global_step == table[-1][0] == sum(len(env.actions) for env in Clock.made)
        return data, table, Clock.made

    return play


def test_action_repeat_counts_decisions_and_steps(play):
    data, table, (env,) = play([[5, 4, 7]], iter_steps=10)
    assert table == [[5, 5, 5], [9, 4, 4], [16, 7, 7]]  # the last one plays to its end
    lengths = np.diff(np.flatnonzero(data.ended), prepend=-1)
    assert lengths.tolist() == [3, 2, 4]  # ceil(length / 2)
    assert data.rewards[:5].tolist() == [2.0, 2.0, 1.0, 2.0, 2.0]
    assert data.obs[5:, 1].tolist() == [0.0, 2.0, 4.0, 6.0]
    # an action is held, to the end at most, and the agent keeps it as it was
    a = data.actions[:, 0].tolist()
    assert env.actions == [*np.repeat(a[:3], [2, 2, 1]), *np.repeat(a[3:], [2, 2, 2, 2, 2, 1])]


def test_running_episodes_finish_and_short_ones_are_not_favoured(play):
    # environment 0 plays one long episode beside many short ones of environment 1
    data, table, envs = play([[40, 9], [2, 2]], iter_steps=30, action_repeat=1)
    lengths = [length for *_, length in table]
    assert lengths == [2] * 8 + [40]  # started before both had made 30 steps together
    order = [*envs[1].seeds, *envs[0].seeds]  # of their ends: one episode after the other
    assert len(set(order)) == len(order) == 9
    assert data.obs[:, 0].tolist() == np.repeat(np.array(order) % 1000, lengths).tolist()
    assert data.obs[:, 1].tolist() == np.hstack([np.arange(n) for n in lengths]).tolist()
    assert np.flatnonzero(data.ended).tolist() == (np.cumsum(lengths) - 1).tolist()


# --- runs -----------------------------------------------------------------------------------------
def test_boxes_that_can_not_be_learned_in_are_refused():
    for low, high in ((0, 1e-40), (0, 0), (-1e20, 1e20), (-1, np.inf), (1e8, 1e8 + 1)):
        box = gym.spaces.Box(np.array([low, -1.0]), np.array([high, 1.0]), dtype=np.float64)
        with pytest.raises(gym.error.Error, match="its sides must be from 1e-6 to 1e6"):
            ppo_cma.check_spaces(Clock.observation_space, box)


def test_a_resumed_run_takes_other_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda *_: None)
    before = train("ppo_cma", tmp_path / "run", "--history-buffer-size 3 --no-anneal-lr", 6)
    flags = "--total-timesteps 160 --history-buffer-size 2 --n-updates 5 --learning-rate 1e-4"
    resumed = resume("ppo_cma", tmp_path / "run", flags)
    assert len(before["history"]) == 3 and len(resumed["history"]) == 2
    assert scalars(tmp_path / "run")["charts/learning_rate"][-1][1] == pytest.approx(1e-4)
    steps = max(x["step"].item() for x in resumed["adam"].values())
    assert before["iteration"] < resumed["iteration"]
    assert steps == 2 * before["iteration"] + 5 * (resumed["iteration"] - before["iteration"])
