"""PPO-CMA against the algorithm's specification: golden numbers of the original program (measured
on it, seeds and all), fixed points and statistics. The numbers in the test names are the spec's."""

import math
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from maths import Clock, Log
from program import assert_same

import ppo_cma
from benchmark.published.studies import change, didactic
from ppo_cma import Agent, Args, gae, log_density, mean_loss, normalize_advantages, variance_loss


def problem(obs_dim=1, low=(-1.0,), high=(1.0,)):
    return SimpleNamespace(
        observation_space=gym.spaces.Box(-np.inf, np.inf, (obs_dim,)),
        action_space=gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32)),
    )


def make_agent(obs_dim=1, low=(-1.0,), high=(1.0,), pretrain=False, **args) -> Agent:
    return Agent(problem(obs_dim, low, high), Args(**args), pretrain=pretrain)


def batch(agent: Agent, size=300, episode=30, seed=0, reward=None):
    """Arguments of `update`: random states, the agent's own actions, rewards by `reward(a)`."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(size, len(agent.obs_scale))).astype(np.float32)
    actions = agent.act(obs, agent.noise(size))
    rewards = rng.normal(size=size) if reward is None else reward(actions)
    return obs, actions, rewards.astype(np.float64), np.full(size // episode, episode)


def weights(net) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in net.parameters()])


class Constant(torch.nn.Module):
    """A network with one output vector for every state, for fixed points of the losses."""

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
    agent = make_agent(low=[-half_range], high=[half_range])
    agent.var_net = Constant(1, raw)
    assert (0.5 * agent.logvar(torch.zeros(1))).exp().item() == pytest.approx(sigma, rel=2e-5)


def test_1_mean_stays_in_an_asymmetric_box():
    agent = make_agent(low=[-1.0, 0.5], high=[0.25, 3.0])
    for raw, expected in ((50.0, [0.25, 3.0]), (-50.0, [-1.0, 0.5]), (0.0, [-0.375, 1.75])):
        agent.mean_net = Constant(2, raw)
        assert agent.mean(torch.zeros(1)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("net", ["mean_net", "var_net", "critic"])
def test_2_shapes_unit_rows_and_centred_pre_activations(net):
    agent = make_agent(11, [-1] * 3, [1] * 3)
    mlp, extra = getattr(agent, net), int(net == "critic")
    inputs, outputs = 11 + extra, 1 if extra else 3
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
    # the one-product form is the network with concatenating skip connections and slope 0.1
    bias = mlp.bias.split(mlp.widths)
    h = x
    for rows, b in zip((first, second), bias, strict=False):
        z = h @ rows.T + b
        h = torch.cat([h, torch.where(z > 0, z, 0.1 * z)], dim=1)
    torch.testing.assert_close(h @ output.T + bias[2], mlp(x), atol=1e-4, rtol=1e-4)


def test_2_parameter_counts_of_the_original():
    def count(mode):
        return sum(p.numel() for p in make_agent(11, [-1] * 3, [1] * 3, mode=mode).parameters())

    assert count("ppo-cma") == count("ppo-cma-m") == 60_501
    assert count("ppo") == count("pg") == 41_045


def test_3_pretraining_reaches_the_initial_gaussian():
    agent = make_agent(11, [-1] * 3, [1] * 3, pretrain=True)
    with torch.no_grad():
        for scale, low, high in ((1.0, 0.98, 1.02), (0.5, 0.96, 1.01), (0.1, 0.75, 0.87)):
            x = scale * torch.randn(4000, 11, generator=torch.Generator().manual_seed(7))
            sigma = (0.5 * agent.logvar(x)).exp()
            assert low < sigma.mean() < high  # 1.00, .99 and .79-.84 in the original
            if scale == 1.0:
                assert (sigma - 1.0).abs().max() < 0.12
                assert (sigma - 1.0).square().mean().sqrt() < 0.07
                assert agent.mean(x).square().mean().sqrt() < 0.02 * 2


def test_4_first_iteration_samples_the_initial_gaussian_whatever_the_weights():
    agent = make_agent(3, [-1, 0], [1, 4])
    agent.mean_net.bias.data += 100.0
    actions = agent.act(np.zeros((40_000, 3)), agent.noise(40_000))
    assert actions.dtype == np.float32
    for k, (low, high) in enumerate([(-1, 1), (0, 4)]):
        assert actions[:, k].min() == low
        assert actions[:, k].max() == high
        at_bounds = np.isin(actions[:, k], (low, high)).mean()
        assert at_bounds == pytest.approx(0.317, abs=0.008)
        assert actions[:, k].mean() == pytest.approx((low + high) / 2, abs=0.02 * (high - low))
    assert agent.act(np.zeros((2, 3))).tolist() == [[0.0, 2.0]] * 2


# --- 5 scaler, 6 returns, 7 advantages ------------------------------------------------------------
def test_4_get_action_and_value_samples_as_act_and_has_a_true_density():
    agent, twin = make_agent(4, [-1] * 2, [1] * 2), make_agent(4, [-1] * 2, [1] * 2)
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
    assert torch.equal(late, agent.critic(inputs).squeeze(-1))
    assert late[0] == value[0] and (late[1:] != value[1:]).all()  # the critic sees the time
    assert (make_agent(4, gamma=0.0).critic_inputs(obs, 500)[:, 4] == 0).all()


def test_5_scaler_golden_numbers_weighs_iterations_equally_and_only_shrinks():
    agent = make_agent(3)
    ppo_cma.update_obs_scale(agent, torch.tensor([[1, 10, 0.01], [3, -10, 0.02]]))
    assert agent.obs_scale.tolist() == pytest.approx([0.223557, 0.049998, 1.0], abs=1e-6)
    ppo_cma.update_obs_scale(agent, torch.tensor([[0.1, 2.0, 0.0]] * 3))
    assert agent.obs_sq_mean.tolist() == pytest.approx([2.505, 52.0, 0.000125], rel=1e-5)
    assert agent.obs_scale.tolist() == pytest.approx([0.223557, 0.049998, 1.0], abs=1e-6)
    agent = make_agent(1)
    previous = 1.0
    for size, value in ((10, 1.0), (10_000, 3.0), (5, 0.1), (7, 9.0)):
        ppo_cma.update_obs_scale(agent, torch.full((size, 1), value))
        assert 0.0 < agent.obs_scale.item() <= previous <= 1.0
        previous = agent.obs_scale.item()
    assert agent.obs_sq_mean.item() == pytest.approx((1 + 9 + 0.01 + 81) / 4, rel=1e-5)


REWARDS, VALUES, END = np.array([1, 2, -1, 0.5]), np.array([0.3, 0.1, -0.2, 0.4]), np.eye(4)[3]


def test_6_returns_and_gae_golden_numbers():
    returns = gae(REWARDS, np.zeros(5), END, END, 0.99, 1.0)
    assert returns == pytest.approx([2.485049, 1.50005, -0.505, 0.5], abs=1e-6)
    expected = [2.125568, 1.410492, -0.30995, 0.1]
    for terminated, truncated in ((END, 0 * END), (END, END)):
        advantages = gae(REWARDS, np.append(VALUES, 0.0), terminated, truncated, 0.99, 0.95)
        assert advantages == pytest.approx(expected, abs=1e-6)
    # with an end value of 0 a truncation is a termination
    truncation = gae(REWARDS, np.append(VALUES, 0.0), 0 * END, END, 0.99, 0.95)
    assert truncation == pytest.approx(expected, abs=1e-6)


def test_6_critic_targets_do_not_depend_on_the_critic(monkeypatch):
    seen = []
    monkeypatch.setattr(
        ppo_cma, "gae", lambda r, v, *a: seen.append((v.copy(), a)) or gae(r, v, *a)
    )
    agent = make_agent(3, n_updates=3, minibatch_size=16)
    ppo_cma.update(agent, *batch(agent))
    (no_values, target_args), (values, advantage_args) = seen
    assert (no_values == 0).all()
    assert target_args[-1] == 1.0
    assert advantage_args[-1] == 0.95
    assert values[-1] == 0.0
    assert np.abs(values[:-1]).max() > 0


def test_7_advantages_are_scaled_over_the_iteration_and_never_centred():
    advantages = np.random.default_rng(0).normal(3.0, 2.0, 1000)
    scaled = normalize_advantages(advantages, "ppo-cma-m")
    assert (np.sign(scaled) == np.sign(advantages)).all()
    assert scaled.std() == pytest.approx(1.0)
    assert scaled.mean() == pytest.approx(advantages.mean() / advantages.std())
    clipped = normalize_advantages(advantages, "ppo-cma")
    assert clipped == pytest.approx(np.maximum(advantages, 0) / np.maximum(advantages, 0).std())
    assert (normalize_advantages(-np.abs(advantages), "ppo-cma") == 0).all()
    assert (normalize_advantages(-np.abs(advantages), "ppo-cma-m") < 0).all()


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
    changed = golden.advantages.clone()
    changed[1] = -7.0
    again = variance_loss(golden.actions, changed, golden.mean, golden.logvar)
    assert again.item() == pytest.approx(loss.item())


@pytest.mark.parametrize(
    ("mirror", "value", "row_2"),
    [(False, -0.3087995, [0.0, 0.0]), (True, -0.5703018, [-0.3032654, 0.3594255])],
)
def test_8_mean_loss_golden(golden, mirror, value, row_2):
    loss = mean_loss(
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
    given = golden.actions, torch.zeros(3), golden.mean, golden.logvar, old
    ppo_cma.ppo_loss(*given, 0.2, 0.6).backward()  # the entropy's bonus widens the policy
    torch.testing.assert_close(golden.logvar.grad, torch.full((3, 2), -0.6 * 0.5 / 3))


# --- 9 variance fixed point, 10 mirroring, 13 clipped actions -------------------------------------
def fixed_point_of_sigma(actions, advantages, mean, floor=0.01, top=2.0) -> np.ndarray:
    raw = torch.zeros(actions.shape[1], requires_grad=True)
    adam = torch.optim.Adam([raw], lr=0.02)
    low, high = 2 * np.log(floor), 2 * np.log(top)
    for _ in range(1500):
        logvar = (low + (high - low) * torch.sigmoid(raw)).expand_as(actions)
        adam.zero_grad()
        variance_loss(actions, advantages, mean, logvar).backward()
        adam.step()
    return (0.5 * logvar[0]).exp().detach().numpy()


def test_9_variance_fixed_point_is_the_weighted_squared_deviation():
    rng = np.random.default_rng(3)
    actions = torch.tensor(rng.normal(size=(400, 2)) * [0.3, 0.5] + 0.2).float()
    advantages = torch.tensor(rng.normal(size=400)).float()
    mean = torch.tensor([0.1, -0.1]).expand(400, 2)
    positive = advantages.clamp(min=0)[:, None]
    expected = (positive * (actions - mean).square()).sum(0) / positive.sum(0)
    variance = fixed_point_of_sigma(actions, advantages, mean) ** 2
    assert variance == pytest.approx(expected.numpy(), rel=0.01)


@pytest.mark.parametrize("dims", [1, 17])
def test_10_kernel_is_a_mean_over_dimensions(dims):
    """The mirrored term of one sample over its log-density is advantage x kernel."""
    generator = torch.Generator().manual_seed(0)
    actions = torch.randn(20_000, dims, generator=generator)
    mean_old, logvar = torch.zeros_like(actions), torch.zeros_like(actions)
    minus = -torch.ones(1)

    def kernel(action):
        mean = torch.full((1, dims), 0.3)  # not the old mean: the mirror image must be about that
        loss = mean_loss(action[None], minus, mean, logvar[:1], mean_old[:1], True)
        return -(loss / log_density(-action[None], mean, logvar[:1])).item()

    sample = torch.tensor([kernel(a) for a in actions[:4000]])
    assert sample.mean().item() == pytest.approx(2**-0.5, abs=0.015)  # .707^17 for a product
    assert kernel(torch.zeros(dims)) == pytest.approx(1.0, abs=1e-5)


def test_10_negative_sample_pushes_the_mean_to_its_other_side():
    mean = torch.zeros(1, 2, requires_grad=True)
    action, old = torch.tensor([[0.5, -0.25]]), torch.tensor([[0.1, 0.0]])
    logvar = torch.zeros(1, 2)
    mean_loss(action, torch.tensor([-1.0]), mean, logvar, old, True).backward()
    kernel = torch.exp(-0.5 * (action - old).square()).mean()
    torch.testing.assert_close(-mean.grad, kernel * (2 * old - action))  # towards 2 mu_old - a


def test_10_all_negative_advantages_move_the_mean_but_not_the_variance():
    agent = make_agent(2, history_buffer_size=1, n_updates=20, minibatch_size=64)
    before_mean, before_var = weights(agent.mean_net), weights(agent.var_net)
    data = batch(agent, reward=lambda a: a[:, 0] - 1000.0)  # far below what the critic expects
    metrics = ppo_cma.update(agent, *data)
    assert metrics["charts/positive_advantages"] == 0.0
    assert not torch.equal(weights(agent.mean_net), before_mean)
    assert torch.equal(weights(agent.var_net), before_var)


def test_13_clipped_actions_are_what_is_stored():
    """Equal weights, mean at the centre: sigma falls to sqrt(.516) = .718 by clipping alone."""
    agent = make_agent(1)
    actions = agent.act(np.zeros((60_000, 1)), agent.noise(60_000))
    for action in actions:
        agent.memorize(np.zeros(1), action, 0.0, True)
    stored = torch.tensor(np.array([episode[0][1] for episode in agent.memory]))
    sigma = fixed_point_of_sigma(stored, torch.ones(len(stored)), torch.zeros_like(stored))
    assert sigma == pytest.approx([0.718], abs=0.01)


# --- 11 the order of phases, 12 the history -------------------------------------------------------
def test_11_critic_then_variance_then_mean(monkeypatch):
    agent = make_agent(3, [-1] * 2, [1] * 2)
    phases, plain_fit = [], ppo_cma.fit

    def spy(name, adam, minibatches, loss_fn):
        before = {n: weights(getattr(agent, n)) for n in ("critic", "var_net", "mean_net")}
        result = plain_fit(name, adam, minibatches, loss_fn)
        moved = [n for n, w in before.items() if not torch.equal(w, weights(getattr(agent, n)))]
        phases.append((name, len(minibatches), moved))
        return result

    monkeypatch.setattr(ppo_cma, "fit", spy)
    ppo_cma.update(agent, *batch(agent))
    # the first minibatch ever sets the critic's biases and takes no step
    assert phases == [
        ("value", 99, ["critic"]), ("variance", 100, ["var_net"]), ("policy", 100, ["mean_net"])
    ]  # fmt: skip
    ppo_cma.update(agent, *batch(agent, seed=1))
    assert phases[3] == ("value", 100, ["critic"])


def test_11_old_mean_is_constant_through_the_mean_phase(monkeypatch):
    agent = make_agent(3, [-1] * 2, [1] * 2, n_updates=30)
    obs, actions, rewards, lengths = batch(agent)
    expected, seen = [], []
    plain_scale, plain_loss = ppo_cma.update_obs_scale, ppo_cma.mean_loss

    def scale(*a):
        plain_scale(*a)
        expected.append(agent.mean(torch.as_tensor(obs)).detach())

    monkeypatch.setattr(ppo_cma, "update_obs_scale", scale)
    monkeypatch.setattr(
        ppo_cma, "mean_loss", lambda *a: (seen.append((a[0], a[4])), plain_loss(*a))[1]
    )
    ppo_cma.update(agent, obs, actions, rewards, lengths)
    inside = (np.abs(actions) < 1).any(axis=1)  # so that an action tells its row
    rows = {tuple(a): m for a, m in zip(actions[inside].tolist(), expected[0][inside], strict=True)}
    assert len(seen) == 30
    for minibatch_actions, mean_old in seen:
        for a, m in zip(minibatch_actions.tolist(), mean_old, strict=True):
            torch.testing.assert_close(rows.get(tuple(a), m), m, atol=1e-6, rtol=0)


def test_12_history_is_sampled_by_iteration_then_uniformly_within():
    generator = torch.Generator().manual_seed(0)
    index = ppo_cma.history_minibatches([10, 1000], (200, 500), generator)
    assert index.shape == (200, 500)
    counts = np.bincount(index.flatten().numpy(), minlength=1010)
    assert len(counts) == 1010
    draws = 100_000

    def chi_square(observed, expected):
        return ((observed - expected) ** 2 / expected).sum()

    assert abs(counts[:10].sum() - draws / 2) < 4 * (draws / 4) ** 0.5
    small, large = counts[:10], counts[10:]  # 9 and 999 degrees of freedom, p = 0.999
    assert chi_square(small, small.sum() / 10) < 27.9
    assert chi_square(large, large.sum() / 1000) < 1142


def test_12_history_length_contents_and_late_scaling(monkeypatch):
    agent = make_agent(2, history_buffer_size=3, n_updates=2, minibatch_size=16)
    data = [batch(agent, seed=seed) for seed in range(5)]
    for k, (obs, *rest) in enumerate(data):
        ppo_cma.update(agent, obs * 10.0**k, *rest)
    assert [obs.abs().max().item() for obs, _, _ in agent.history] == [  # raw, the newest included
        pytest.approx(np.abs(data[k][0] * 10.0**k).max()) for k in (2, 3, 4)
    ]
    old = agent.history[0][0]
    before = agent.mean(old)
    agent.obs_scale *= 0.5
    assert not torch.allclose(before, agent.mean(old))


def test_12_only_the_variance_sees_the_past(monkeypatch):
    agent = make_agent(2, n_updates=5, minibatch_size=64)
    seen = {"variance_loss": [], "mean_loss": []}
    for name in seen:
        plain = getattr(ppo_cma, name)
        spy = lambda *a, n=name, f=plain: seen[n].append(a[0]) or f(*a)  # noqa: E731
        monkeypatch.setattr(ppo_cma, name, spy)
    first, second = batch(agent, seed=1), batch(agent, seed=2)
    ppo_cma.update(agent, *first)
    for drawn in seen.values():
        drawn.clear()
    ppo_cma.update(agent, *second)
    past = {float(a[0]) for a in first[1] if abs(a[0]) < 1}
    drawn = {k: {float(a) for x in v for a in x.flatten() if abs(a) < 1} for k, v in seen.items()}
    assert drawn["variance_loss"] & past
    assert not drawn["mean_loss"] & past


# --- 14 the two-dimensional quadratic -------------------------------------------------------------
def quadratic(mode: str, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and deviations, [seed, iteration]."""
    runs = [didactic.optimize(mode, seed) for seed in range(seeds)]
    return np.array([run.rewards for run in runs]), np.array([run.sigmas for run in runs])


def fit_in_one_state(agent: Agent):
    """Instead of the pretraining, which takes seconds: the first policy in the only state."""
    state, adam = torch.zeros(1, 1), torch.optim.Adam(agent.parameters(), lr=3e-3)
    for _ in range(300):
        error = (agent.mean(state) - agent.initial_mean).square().sum()
        error += (0.5 * agent.logvar(state) - agent.initial_std.log()).square().sum()
        adam.zero_grad()
        error.backward()
        adam.step()
    assert error < 1e-9


def test_14_ppo_cma_m_widens_and_ppo_shrinks(monkeypatch):
    """One seed; with the pretraining it widens to 0.457, too, and shrinks to 0.155."""
    monkeypatch.setattr(didactic, "pretrain_policy", fit_in_one_state)
    monkeypatch.setattr(didactic, "ITERATIONS", 7)
    reward, sigma = quadratic("ppo-cma-m", 1)
    assert 0.19 < sigma[0].min() < 0.22
    assert sigma[0].argmax() + 1 == 6
    assert sigma[0].max() == pytest.approx(0.457, abs=0.04)
    assert reward[0, 5] == pytest.approx(-0.32, abs=0.08)
    monkeypatch.setattr(didactic, "ITERATIONS", 4)
    _, sigma = quadratic("ppo", 1)
    assert (np.diff(sigma[0]) < 0).all()
    assert sigma[0, 3] == pytest.approx(0.155, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ppo-cma-m", "ppo-cma", "ppo", "pg", "pg-pos"])
def test_14_who_widens_and_who_shrinks(mode):
    reward, sigma = quadratic(mode, 5 if mode == "ppo-cma-m" else 3)
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
        assert (np.diff(sigma[:, :18], axis=1) < 0).all()  # until a seed has arrived
        assert -0.12 < last < -0.04
    if mode == "pg":
        assert last < -4
    if mode == "pg-pos":
        assert sigma.max() < 0.25
        assert mean[19] < 0.02


@pytest.mark.slow
def test_14_a_longer_history_widens_more():
    peaks = [
        np.mean([max(didactic.optimize("ppo-cma-m", seed, history).sigmas) for seed in range(2)])
        for history in (1, 5, 9)
    ]
    assert peaks[0] < peaks[1] < peaks[2]


# --- 15 accounting --------------------------------------------------------------------------------
def play(lengths_of_each, iter_steps, action_repeat=2):
    args = Args(num_envs=len(lengths_of_each), iter_steps=iter_steps, action_repeat=action_repeat)
    made = [Clock(lengths=lengths) for lengths in lengths_of_each]
    envs, agent, log = ppo_cma.Envs(made, args, range(len(made))), make_agent(2), Log()
    ppo_cma.rollout(agent, envs, log, args)
    return agent, log, envs


def test_15_action_repeat_counts_decisions_and_steps():
    agent, log, _ = play([[5, 4, 7]], iter_steps=10)
    assert [len(episode) for episode in agent.memory] == [3, 2, 4]  # ceil(length / 2)
    assert [reward for _, _, reward in agent.memory[0]] == [2.0, 2.0, 1.0]
    assert [float(obs[1]) for obs, _, _ in agent.memory[2]] == [0.0, 2.0, 4.0, 6.0]
    assert log.rows == [(5, 5.0, 5), (9, 4.0, 4), (16, 7.0, 7)]  # the last one plays to its end
    assert log.global_step == 16
    assert not agent.running


def test_15_running_episodes_finish_and_short_ones_are_not_favoured():
    # environment 0 plays one long episode beside many short ones of environment 1
    agent, log, envs = play([[40, 9], [2]], iter_steps=30, action_repeat=1)
    lengths = [length for _, _, length in log.rows]
    assert lengths.count(40) == 1
    assert lengths.count(2) == 8  # those started before both had made 30 steps together
    assert log.global_step == sum(lengths) == 40 + 16
    seeds = [seed for env in envs.envs for seed in env.unwrapped.seeds]
    assert len(set(seeds)) == len(seeds) == 9
    assert len(agent.memory) == 9


def test_15_an_action_is_held_to_the_end_at_most_and_may_be_written_to():
    class Odd(Clock):
        """Spoils its action, and gives back what is of another type than gymnasium's."""

        def step(self, action):
            obs, _, terminated, truncated, info = super().step(action)
            action[:] = 7.0
            return obs, np.array([0.5], np.float32), int(terminated), np.array([truncated]), info

    args, log, env = Args(action_repeat=3, iter_steps=3), Log(), Odd(lengths=[4])
    agent, envs = make_agent(2), ppo_cma.Envs([env], args)
    ppo_cma.rollout(agent, envs, log, args)
    assert log.rows == [(4, 2.0, 4)]
    ((first, second),) = agent.memory
    assert (first[2], second[2]) == (1.5, 0.5)
    assert [float(a[0]) for a in env.taken] == [float(first[1][0])] * 3 + [float(second[1][0])]
    assert abs(first[1][0]) <= 1 and envs.over.tolist() == [True]


# --- beyond the list ------------------------------------------------------------------------------
def assert_numpy_is_the_policy(agent: Agent, obs: np.ndarray, near: float):
    """Greedily, with noise, of many states and of one."""
    mean = agent.mean(torch.as_tensor(obs)).detach().numpy()
    std = (0.5 * agent.logvar(torch.as_tensor(obs))).exp().detach().numpy()
    low, high = agent.low.numpy(), agent.high.numpy()
    noise = np.random.default_rng(4).standard_normal(mean.shape, np.float32)
    np.testing.assert_allclose(agent.act(obs), np.clip(mean, low, high), atol=near)
    np.testing.assert_allclose(agent.act(obs[:1]), np.clip(mean[:1], low, high), atol=near)
    expected = np.clip(mean + std * noise, low, high)
    np.testing.assert_allclose(agent.act(obs, noise), expected, atol=2.5 * near)
    agent.rng = np.random.default_rng(4)
    assert (agent.noise(len(obs)) == noise).all()


@pytest.mark.parametrize("mode", ppo_cma.MODES)
def test_acting_in_numpy_is_the_policy(mode):
    agent = make_agent(5, [-1, 0], [1, 3], mode=mode)
    agent.updates += 1
    agent.obs_scale.uniform_(0.1, 1.0)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    obs = np.random.default_rng(0).normal(size=(2000, 5)).astype(np.float32)
    assert_numpy_is_the_policy(agent, obs, 2e-6)


@pytest.mark.parametrize(("gamma", "unit"), [(0.99, 0.001), (0.0, 0.0)])
def test_the_critic_sees_the_time_but_not_at_gamma_0(gamma, unit):
    agent, seen = make_agent(2, gamma=gamma, n_updates=2), []
    agent.critic.register_forward_pre_hook(lambda net, given: seen.append(given[0]))
    obs, *rest = batch(agent)  # ten episodes of 30
    ppo_cma.update(agent, obs, *rest)
    scaled, time = seen[-1].split((2, 1), dim=1)  # of the whole iteration, for the advantages
    torch.testing.assert_close(scaled, torch.as_tensor(obs) * agent.obs_scale)
    torch.testing.assert_close(time[:, 0], unit * torch.arange(30).repeat(10))


@pytest.mark.parametrize("mode", ["ppo-cma-m", "ppo"])
def test_adam_as_in_the_original(mode):
    """One for all networks is one for each: it leaves alone what a loss does not depend on."""
    agent = make_agent(2, mode=mode, n_updates=10)
    (group,) = agent.adam.param_groups
    assert (group["eps"], group["lr"], group["betas"]) == (1e-8, 5e-4, (0.9, 0.999))
    ppo_cma.update(agent, *batch(agent))
    for name, net in agent.named_children():
        steps = {agent.adam.state[parameter]["step"].item() for parameter in net.parameters()}
        assert steps == {9 if name == "critic" else 10}
    assert set(dict(agent.named_children())) == (
        {"mean_net", "critic"} if mode == "ppo" else {"mean_net", "var_net", "critic"}
    )


def play_on(agent: Agent, iterations: int, seed: int):
    """A loop of one's own, three episodes of 20 transitions an iteration."""
    rng = np.random.default_rng(seed)
    for _ in range(iterations):
        for t in range(60):
            obs = rng.normal(size=3)
            (action,) = agent.act(obs[None], agent.noise(1))
            agent.memorize(obs, action, np.array([rng.normal() - action.sum()]), t % 20 == 19)
        agent.update_with_memorized()


@pytest.mark.parametrize("mode", ["ppo-cma-m", "ppo"])
def test_ones_own_loop_goes_on_from_its_saved_state(mode, tmp_path):
    def new():
        return make_agent(3, [-1, 0], [1, 3], mode=mode, n_updates=5, history_buffer_size=2)

    agent = new()
    play_on(agent, 3, seed=0)
    torch.save(agent.training_state(), tmp_path / "state")
    resumed = new()
    play_on(resumed, 1, seed=5)  # which is forgotten
    resumed.load_training_state(torch.load(tmp_path / "state", weights_only=True))
    for each in (agent, resumed):
        play_on(each, 3, seed=1)
    assert_same(resumed.training_state(), agent.training_state())


def test_memorized_are_copies():
    agent, obs = make_agent(2), np.zeros(2)
    for t in range(3):  # a simulator that returns the same array each step
        obs[:] = t
        agent.memorize(obs, agent.act(obs[None])[0], 0.0, t == 2)
    assert [list(o) for o, _, _ in agent.memory[0]] == [[0, 0], [1, 1], [2, 2]]


def test_saturated_means():
    """One of two mean actions is at its bound, in every state."""
    agent = make_agent(3, [-1] * 2, [1] * 2, n_updates=2)
    with torch.no_grad():
        agent.mean_net.bias[-2:] = torch.tensor([30.0, 0.0])
    for t in range(5):
        agent.memorize(np.ones(3), np.zeros(2), 1.0, t == 4)
    assert agent.update_with_memorized()["charts/saturated_means"] == 0.5


# --- ablations of the benchmark -------------------------------------------------------------------
@pytest.fixture
def updated(monkeypatch):
    """Two updates by a script with a change: its agent, and of its functions what each call of them
    was given and gave, in order."""

    def update(name: str):
        script, calls = change.changed(name), {"fit": [], "gae": [], "normalize_advantages": []}

        def record(part, plain, *given):
            given = [x.copy() if isinstance(x, np.ndarray) else x for x in given]
            result = plain(*given)
            calls[part].append((*given, result.copy()))
            return result

        for part in calls:
            monkeypatch.setattr(script, part, partial(record, part, getattr(script, part)))
        args = script.Args(n_updates=10, minibatch_size=32)
        agent = script.Agent(problem(), args, pretrain=False)
        for seed in (0, 1):
            script.update(agent, *batch(agent, seed=seed))
        return agent, calls

    return update


def test_product_kernel():
    script = change.changed("cma-product-kernel")
    actions, mean_old = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    given = actions, torch.tensor([-1.0]), torch.full((1, 2), 0.5), torch.zeros(1, 2), mean_old
    density = -0.5 * (1.5**2 + 2.5**2)  # of the mirror image (-1, -2) about the new mean
    average = (math.exp(-0.5) + math.exp(-2.0)) / 2
    assert ppo_cma.mean_loss(*given, True).item() == pytest.approx(-average * density)
    assert script.mean_loss(*given, True).item() == pytest.approx(-math.exp(-2.5) * density)
    assert script.mean_loss(*given, False).item() == 0


@pytest.mark.parametrize(
    ("name", "steps"),
    [  # the first minibatch ever sets the critic's biases
        ("mean-first", "value 9, policy 10, variance 10, value 10, policy 10, variance 10"),
        ("critic-steps", "value 36, variance 10, policy 10, value 40, variance 10, policy 10"),
    ],
)
def test_what_is_fitted_when(name, steps, updated):
    _, calls = updated(f"cma-{name}")
    found = [f"{net} {len(minibatches)}" for net, _, minibatches, *_ in calls["fit"]]
    assert ", ".join(found) == steps


def test_scaled_rewards(updated):
    agent, calls = updated("cma-scaled-rewards")
    squares = []
    for k in (0, 3):  # of returns, rewards for the critic, for the policy
        (raw, *_, returns), (critics, *_), (policys, *_) = calls["gae"][k : k + 3]
        squares.append(np.mean(returns**2))
        scale = np.mean(squares) ** 0.5  # all iterations weigh the same
        np.testing.assert_allclose(raw, critics * scale, rtol=1e-6)
        np.testing.assert_array_equal(critics, policys)
        assert len(raw) == 300
    assert agent.state_dict()["return_sq_mean"].item() == pytest.approx(np.mean(squares))


def test_centred_advantages(updated):
    _, calls = updated("cma-centred-advantages")
    before = [call[-1] for call in calls["gae"][1::2]]
    for (centred, *_), own in zip(calls["normalize_advantages"], before, strict=True):
        np.testing.assert_allclose(centred, own - own.mean(), atol=1e-9)
        assert abs(own.mean()) > 1e-3


def test_published_ends(updated):
    _, calls = updated("cma-published-ends")
    for rewards, values, ends, *_, result in calls["gae"]:
        if values.any():  # advantages: 0 at an end, and the value there follows the step before
            assert ends.sum() == 10 and (result[ends] == 0).all()
            last = np.flatnonzero(ends)
            delta = rewards[last - 1] + 0.99 * values[last] - values[last - 1]
            np.testing.assert_allclose(result[last - 1], delta)
        else:  # returns stay as they are
            np.testing.assert_array_equal(result[ends], rewards[ends])


def test_linear_mean():
    """The mean reaches the bounds and goes beyond."""
    script = change.changed("cma-linear-mean")
    agent = script.Agent(problem(3, (-1.0, 0.0), (1.0, 4.0)), script.Args(), pretrain=False)
    agent.updates.fill_(1)
    obs = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    agent.mean_net.from_input.data *= 5.0
    mean = agent.mean(torch.as_tensor(obs))
    assert (mean > agent.high).any() and (mean < agent.low).any()
    assert_numpy_is_the_policy(agent, obs, 4e-6)
