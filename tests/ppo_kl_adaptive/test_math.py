"""ppo_kl_adaptive.py against its specification, whose checklist numbers the tests: golden numbers
of the original program, distributions, toys. Updates: tests/algorithms/test_kl_adaptive.py."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from maths import Clock, vector
from torch.distributions import Normal, kl_divergence

import ppo_kl_adaptive as script
from ppo_kl_adaptive import Agent, Args, Batch, Categorical, Gaussian, Rollout, Servo

LINE = spaces.Box(-np.inf, np.inf, (1,))
gym.register("Drawn-v0", Clock, kwargs={"action_space": LINE})
gym.register(
    "Limit4-v0", Clock, kwargs={"action_space": LINE, "lengths": (9,)}, max_episode_steps=4
)
gym.register("Endless-v0", Clock, kwargs={"action_space": LINE, "lengths": (10**9,)})
gym.register("Choice-v0", Clock, kwargs={"action_space": spaces.Discrete(3, start=5)})


def parsed(line: str) -> Args:
    return script.parse_args(line.split())


def make_agent(obs_dim=3, actions=2, discrete=False, **args) -> tuple[Agent, Args]:
    torch.manual_seed(0)
    box = spaces.Box(-1.0, 1.0, (actions,), np.float32)
    problem = SimpleNamespace(
        observation_space=spaces.Box(-np.inf, np.inf, (obs_dim,)),
        action_space=spaces.Discrete(actions) if discrete else box,
    )
    args = Args(**args)
    agent = Agent(problem, args)
    agent.policy_adam, agent.value_adam = script.optimizers(agent, args)
    return agent, args


def play(agent: Agent, T=120, seed=0) -> Rollout:
    """One episode of random observations and rewards and the agent's own actions."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(1.0, 2.0, (T + 1, 1, agent.actor[0].in_features - 1)).astype(np.float32)
    actions = agent.act(obs[:-1, 0], agent.noise(T), np.arange(T))[:, None]
    last = np.arange(T)[:, None] == T - 1
    time = np.arange(T + 1)[:, None]
    return Rollout(obs, time, actions, rng.normal(size=(T, 1)), last, ~last & last, last | ~last)


def policy_batch(agent: Agent, size=300, seed=0) -> Batch:
    """Actions of the policy as it is now, and random advantages."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    features = torch.randn(size, agent.actor[0].in_features, generator=generator)
    with torch.no_grad():
        policy = agent.policy(features)
    if agent.discrete:
        actions = torch.distributions.Categorical(logits=policy.logprobs).sample()
    else:
        actions = policy.mean + (0.5 * policy.logvar).exp() * torch.randn_like(policy.mean)
    logprobs = policy.log_prob(actions)
    return Batch(features, actions, policy, logprobs, torch.randn(size, generator=generator), None)


def servo(preset="coady", **numbers) -> Servo:
    return dataclasses.replace(make_agent(servo=preset)[0].servo, **numbers)


def gaussian(mean, logvar) -> Gaussian:
    return Gaussian(*(torch.tensor(x, dtype=torch.float64) for x in (mean, logvar)))


def objective(ratio, advantages, kl, preset="coady", **numbers):
    """ppo_loss of a policy with these ratios and this KL; the loss, and its slope in the KL."""
    ratio, kl = torch.tensor(ratio), torch.tensor(kl, requires_grad=True)
    policy = SimpleNamespace(log_prob=lambda _: ratio.log(), entropy=lambda: torch.zeros(2))
    agent = SimpleNamespace(policy=lambda _: policy, servo=servo(preset, **numbers))
    old = SimpleNamespace(kl=lambda new: kl)
    batch = Batch(None, None, old, torch.zeros(len(ratio)), torch.tensor(advantages), None)
    loss, metrics = script.ppo_loss(agent, batch)
    loss.backward()
    assert metrics["kl"].item() == pytest.approx(kl.mean().item())
    return loss.item(), kl.grad.sum().item()


# --- 1 the KL, 2 the loss, 13 its gradient --------------------------------------------------------
def test_1_kl_golden_numbers_and_direction():
    old, new = gaussian([[0.0]], [[0.0]]), gaussian([[0.1]], [[0.2]])
    assert old.kl(new).item() == pytest.approx(0.0134590303, abs=1e-8)
    assert new.kl(old).item() == pytest.approx(0.0157013791, abs=1e-8)
    old, new = gaussian([[0.0] * 3], [[-1.0] * 3]), gaussian([[0.05] * 3], [[-1.0] * 3])
    assert old.kl(new).item() == pytest.approx(0.0101935569, abs=1e-8)


@pytest.mark.parametrize("kind", ["Gaussian", "Categorical"])
def test_1_policies_are_those_of_torch(kind):
    torch.manual_seed(0)
    if kind == "Gaussian":
        mean, logvar, actions = torch.randn(2, 100, 4), torch.randn(2, 1, 4), torch.randn(100, 4)
        ours = [Gaussian(mean[k], logvar[k].expand(100, 4)) for k in range(2)]
        normal = [Normal(one.mean, (0.5 * one.logvar).exp()) for one in ours]
        theirs = [torch.distributions.Independent(one, 1) for one in normal]
    else:
        actions = torch.randint(5, (100,))
        ours = [Categorical(torch.randn(100, 5).log_softmax(-1)) for _ in range(2)]
        theirs = [torch.distributions.Categorical(logits=each.logprobs) for each in ours]
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(ours[0].kl(ours[1]), kl_divergence(*theirs), **close)
    assert not torch.allclose(ours[0].kl(ours[1]), ours[1].kl(ours[0]), rtol=0.01)
    torch.testing.assert_close(ours[0].log_prob(actions), theirs[0].log_prob(actions))
    torch.testing.assert_close(ours[0].entropy(), theirs[0].entropy())


def test_2_loss_golden_number_and_hinge():
    loss, slope = objective([1.1, 0.9], [1.0, -1.0], 0.02)
    assert loss == pytest.approx(-0.0702, abs=1e-6)
    assert slope == pytest.approx(1.0 + 1.4, abs=1e-5)
    for kl, hinge, hinge_slope in ((0.0, 0, 0), (0.0059, 0, 0), (0.012, 50 * 0.006**2, 0.6)):
        loss, slope = objective([1.0, 1.0], [0.0, 0.0], kl, beta=3.0)
        assert loss == pytest.approx(3 * kl + hinge, abs=1e-7)  # the blog's: 4.5e-4 at KL 0
        assert slope == pytest.approx(3 + hinge_slope, abs=1e-5)
    loss, _ = objective([1.0, 1.0], [0.0, 0.0], [0.0, 0.01])
    assert loss == pytest.approx(0.005, abs=1e-7)  # of the mean; that of the hinges is not 0
    # the ratio is clipped in the learning-rate preset alone, which has no penalty
    ratio, advantages = [1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0]
    loss, slope = objective(ratio, advantages, 0.5, "learning-rate")
    assert loss == pytest.approx(-np.mean([1.2, -1.5, 0.5, -0.8, 2.2]), abs=1e-6)
    assert slope == 0.0
    for preset in ("schulman", "fixed"):
        loss, slope = objective(ratio, advantages, 0.5, preset, beta=2.0)
        assert loss == pytest.approx(1.0 - np.mean(np.multiply(ratio, advantages)), abs=1e-6)
        assert slope == 2.0


@pytest.mark.parametrize(("action", "expected"), [(1.3, 2.84), (0.2 + 0.5**0.5, 0.0)])
def test_13_gradient_of_the_variance(action, expected):
    variance = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    mean = torch.tensor([0.2], dtype=torch.float64)
    log_prob = Gaussian(mean, variance.log()).log_prob(torch.tensor([action]).double())
    (2.0 * log_prob).backward()
    assert variance.grad.item() == pytest.approx(expected, abs=1e-6)


# --- 3 the servos ---------------------------------------------------------------------------------
CLIMB = [1.5, 2.25, 3.375, 5.0625, 7.59375, 11.390625, 17.0859375, 25.62890625, *[35.0] * 12]
RATE_FALLS = [*[1.0] * 8, 0.6666667, 0.4444444, 0.2962963, 0.1975309, 0.1316872, *[0.0877915] * 7]
RATE_RISES = [*[1.0] * 8, 1.5, 2.25, 3.375, 5.0625, 7.59375, *[11.390625] * 7]


@pytest.mark.parametrize(
    ("kl", "betas", "rates"),
    [(1.0, CLIMB, RATE_FALLS), (0.0, [1 / beta for beta in CLIMB], RATE_RISES)],
)
def test_3_ladders_of_beta_and_of_the_learning_rate(kl, betas, rates):
    it, seen = servo(), []
    for _ in range(20):
        it.adapt(kl)
        seen.append((it.beta, it.lr_multiplier))
    seen = np.array(seen)
    assert seen[:, 0] == pytest.approx(betas)
    assert seen[:, 1] == pytest.approx(rates, abs=1e-6)
    # from its limit beta goes back by factors of 1.5, not on the powers it came by
    it.adapt(1.0 - kl)
    assert it.beta == pytest.approx(35 / 1.5 if kl else 1.5 / 35)
    assert it.lr_multiplier == pytest.approx(rates[-1], abs=1e-6)


@pytest.mark.parametrize(
    ("preset", "above", "below", "raised", "lowered"),
    [("coady", 2, 0.5, 1.5, 1 / 1.5), ("schulman", 1.5, 1 / 1.5, 2, 0.5), ("fixed", 9, 0, 1, 1)],
)
def test_3_thresholds_are_strict(preset, above, below, raised, lowered):
    def after(targets):
        it = servo(preset)
        it.adapt(np.float64(targets) * it.kl_targ)
        assert it.lr_multiplier == 1.0
        return it.beta

    assert [after(x) for x in (above, 1.0, below * (1 + 1e-15))] == [1.0] * 3
    assert after(above * (1 + 1e-9)) == pytest.approx(raised)
    assert after(below * (1 - 1e-9)) == pytest.approx(lowered)


def test_3_schulmans_beta_has_a_floor_from_which_it_rises_and_the_fixed_one_stays():
    it, fixed = servo("schulman"), servo("fixed", beta=3.0)
    for _ in range(1100):  # without a floor it would be 0 now, and stay there
        it.adapt(0.0)
        fixed.adapt(0.0)
    assert (it.beta, fixed.beta) == (1e-3, 3.0)
    it.adapt(1.0)
    assert (it.beta, it.lr_multiplier) == (2e-3, 1.0)


def test_3_learning_rate_preset_moves_the_rate_and_nothing_else():
    def after(kl, rate=3e-4, times=1):
        it = servo("learning-rate")
        for _ in range(times):
            it.adapt_rate(kl, rate)
            it.adapt(kl)
        assert it.beta == 0.0
        return rate * it.lr_multiplier

    assert after(0.0201) == pytest.approx(3e-4 / 1.5)
    assert after(0.0049) == pytest.approx(3e-4 * 1.5)
    assert [after(kl) for kl in (0.0, 0.005, 0.01, 0.02)] == [3e-4] * 4
    assert after(1.0, times=50) == pytest.approx(1e-5)
    assert after(1e-4, times=50) == pytest.approx(1e-2)
    coady = servo()
    coady.adapt_rate(1.0, 3e-4)
    assert coady.lr_multiplier == 1.0


def test_3_presets_and_flags():
    def beta_and_target(**flags):
        it = make_agent(**flags)[0].servo
        return it.beta, it.kl_targ

    kinds = {"coady": (1.0, 0.003), "schulman": (1.0, 0.01), "learning-rate": (0.0, 0.01)}
    for kind, numbers in kinds.items():
        assert beta_and_target(servo=kind) == numbers
        assert beta_and_target(servo=kind, beta=0.0, kl_targ=0.03) == (0.0, 0.03)  # 0 is a number
    assert [servo(kind).early_stop for kind in kinds] == [4.0, math.inf, math.inf]


# --- 12 speed of the variance ---------------------------------------------------------------------
@pytest.mark.parametrize("multiplier", [1.0, 1.5])
def test_12_log_variance_moves_speed_times_as_far(multiplier):
    agent, args = make_agent(11, 3, update_epochs=1)  # Hopper
    agent.servo.lr_multiplier = multiplier
    bias, logvar = (p.detach().clone() for p in (agent.actor[-1].bias, agent.actor_logvar))
    script.fit_policy(agent, policy_batch(agent), args)
    moved = (agent.actor[-1].bias - bias).abs().tolist()
    assert moved == pytest.approx([1.162e-4 * multiplier] * 3, rel=1e-3)
    moved = (agent.actor_logvar - logvar).abs().tolist()
    assert moved == pytest.approx([6.972e-4 * multiplier] * 3, rel=1e-3)


# --- 6, 8 advantages and returns ------------------------------------------------------------------
REWARDS, VALUES = [1.0, 2.0, -1.0, 0.5], [0.3, 0.1, -0.2, 0.4]


def one_episode(terminated=True, truncated=False, after=0.7, **args):
    """Advantages and returns of the golden episode; `after` is the value at its end."""
    last = np.arange(4)[:, None] == 3
    rewards = np.array(REWARDS)[:, None]
    flags = last & terminated, last & truncated
    data = Rollout(None, None, None, rewards, *flags, np.ones_like(last))
    both = script.advantages_and_returns(data, np.array([*VALUES, after])[:, None], Args(**args))
    return [x[:, 0] for x in both]


def test_6_golden_advantages_and_returns():
    advantages, returns = one_episode()
    assert advantages == pytest.approx([-0.28200761, -0.08871665, 0.20539775, -0.3975], abs=1e-8)
    assert returns == pytest.approx([0.01246256, 0.00750006, -0.0025125, 0.0025], abs=1e-8)
    _, returns = one_episode(gamma=0.9995)
    assert returns == pytest.approx([2.49925012, 1.50000013, -0.50025, 0.5], abs=1e-8)
    assert one_episode(gamma=0.999)[1][-1] == pytest.approx(0.5)
    assert one_episode(gamma=0.9989)[1][-1] == pytest.approx(0.5 * 0.0011)  # below it, scaled


def test_8_truncation_golden_numbers():
    ended = one_episode()
    for flags in ((True, False), (True, True), (False, True)):
        np.testing.assert_array_equal(one_episode(*flags), ended)
    for flags in ((True, False), (True, True)):  # a termination stays one
        np.testing.assert_array_equal(one_episode(*flags, bootstrap_truncation=True), ended)
    advantages, returns = one_episode(False, True, bootstrap_truncation=True)
    assert advantages == pytest.approx([0.3637486, 0.57352948, 0.8845549, 0.299], abs=1e-8)
    assert returns == pytest.approx([0.69856721, 0.69705248, 0.690505, 0.699], abs=1e-8)


# --- 10 the scaler --------------------------------------------------------------------------------
def test_10_scale_and_time():
    agent, _ = make_agent(3)
    obs, time = torch.tensor([[5.0, 6.0, 1.0]]), torch.tensor([250])
    # nothing seen yet
    features = agent.features(obs, time)[0].tolist()
    assert features == pytest.approx([5 / 0.3, 6 / 0.3, 1 / 0.3, 0.25])
    agent.obs_moments.update(np.array([[5.0, 4.0, 0.0], [5.0, 6.0, 200.0]]))  # deviations 0, 1, 100
    features = agent.features(obs, time)[0].tolist()
    assert features == pytest.approx([0.0, 1 / 3.3, -99 / 300.3, 0.25])
    assert features[0] == 0.0


# --- 11 sizes and initial values ------------------------------------------------------------------
SIZES = {  # inputs, actions; policy: layers, rate, speed, parameters, entropy; value: the same
    "InvertedPendulum":
        (5, 1, (50, 22, 10), 1.919e-4, 2, 1665, 0.9189, (50, 15, 5), 2.582e-3, 1151),
    "InvertedDoublePendulum":
        (12, 1, (120, 34, 10), 1.543e-4, 2, 6037, 0.9189, (120, 24, 5), 2.041e-3, 4595),
    "Reacher": (12, 2, (120, 48, 20), 1.299e-4, 4, 8398, 1.8379, (120, 24, 5), 2.041e-3, 4595),
    "Swimmer": (9, 2, (90, 42, 20), 1.389e-4, 4, 5632, 1.8379, (90, 21, 5), 2.182e-3, 2927),
    "Hopper": (12, 3, (120, 60, 30), 1.162e-4, 6, 10761, 2.7568, (120, 24, 5), 2.041e-3, 4595),
    "HalfCheetah":
        (18, 6, (180, 103, 60), 8.868e-5, 12, 28741, 5.5136, (180, 30, 5), 1.826e-3, 9011),
    "Ant":
        (112, 8, (1120, 299, 80), 5.205e-5, 16, 486515, 7.3515, (1120, 74, 5), 1.162e-3, 209895),
    "Humanoid":
        (377, 17, (3770, 800, 170), 3.182e-5, 35, 4581532, 15.622,
         (3770, 137, 5), 8.544e-4, 1942383),
}  # fmt: skip
SIZES["Walker2d"], SIZES["HumanoidStandup"] = SIZES["HalfCheetah"], SIZES["Humanoid"]


def layers(net) -> list[torch.nn.Linear]:
    return [layer for layer in net if isinstance(layer, torch.nn.Linear)]


@pytest.mark.parametrize("env", SIZES)
def test_11_sizes_rates_and_entropy(env):
    inputs, actions, hidden, rate, speed, count, entropy, *value = SIZES[env]
    agent, _ = make_agent(inputs - 1, actions)
    assert tuple(layer.out_features for layer in layers(agent.actor)) == (*hidden, actions)
    assert agent.policy_adam.defaults["lr"] == pytest.approx(rate, rel=1e-3)
    assert agent.policy_adam.param_groups[1]["speed"] == speed
    assert len(vector(agent.actor)) + speed * actions == count
    assert agent.policy(torch.zeros(1, inputs)).entropy().item() == pytest.approx(entropy, abs=1e-4)
    assert agent.actor_logvar.tolist() == [-1.0] * actions
    assert tuple(layer.out_features for layer in layers(agent.critic)) == (*value[0], 1)
    group = agent.value_adam.param_groups[0]
    assert group["lr"] == pytest.approx(value[1], rel=1e-3)
    assert len(vector(agent.critic)) == value[2]
    for adam in (agent.policy_adam, agent.value_adam):
        for group in adam.param_groups:
            settings = [group[name] for name in ("betas", "eps", "weight_decay", "amsgrad")]
            assert settings == [(0.9, 0.999), 1e-8, 0, False]


def test_11_size_rate_and_variance_can_be_given():
    agent, _ = make_agent(9, 2)  # the author's own log, of ten inputs
    assert [layer.out_features for layer in layers(agent.critic)] == [100, 22, 5, 1]
    assert agent.value_adam.param_groups[0]["lr"] == pytest.approx(0.00213, rel=2e-3)
    numbers = {"hid1_mult": 3, "policy_logvar": -2.0, "learning_rate": 1e-3}
    agent, _ = make_agent(11, 3, value_learning_rate=2e-3, **numbers)
    assert [layer.out_features for layer in layers(agent.actor)] == [36, 32, 30, 3]
    assert [layer.out_features for layer in layers(agent.critic)] == [36, 13, 5, 1]
    assert agent.policy_adam.defaults["lr"] == 1e-3
    assert agent.value_adam.param_groups[0]["lr"] == 2e-3
    assert agent.actor_logvar.tolist() == [-2.0] * 3


def test_11_weights_are_normal_in_every_layer_and_biases_0():
    agent, _ = make_agent(111, 8)
    for net in (agent.actor, agent.critic):
        for layer in layers(net):
            assert (layer.bias == 0).all()
            scaled = layer.weight.detach() * layer.in_features**0.5
            error = 4 / (2 * scaled.numel()) ** 0.5
            assert scaled.std(correction=0).item() == pytest.approx(1.0, abs=max(error, 0.01))
    scaled = agent.actor[0].weight * 112**0.5
    assert scaled.abs().max() > 4.0  # not truncated


# --- 16 the numpy actor and its log-probabilities -------------------------------------------------
@pytest.mark.parametrize("discrete", [False, True])
def test_16_act_draws_from_the_policy(discrete):
    agent, args = make_agent(actions=4, discrete=discrete, learning_rate=0.01, policy_logvar=0.7)
    script.update(agent, play(agent), args)
    obs = np.random.default_rng(3).normal(1.0, 2.0, (200, 3)).astype(np.float32)
    time, noise = np.arange(200) * 5, agent.noise(200)
    with torch.no_grad():
        policy = agent.policy(agent.features(torch.as_tensor(obs), torch.as_tensor(time)))
    best = policy.logprobs.argmax(-1) if discrete else policy.mean
    np.testing.assert_allclose(agent.act(obs, time=time), best, atol=1e-5)
    if not discrete:
        sample = policy.mean + (0.5 * policy.logvar).exp() * torch.as_tensor(noise)
        np.testing.assert_allclose(agent.act(obs, noise, time), sample, atol=1e-5)
    sample = agent.act(np.repeat(obs[:1], 40_000, 0), agent.noise(40_000), time[0])
    if discrete:
        frequencies = np.bincount(sample, minlength=4) / 40_000
        assert frequencies == pytest.approx(policy.logprobs[0].exp().numpy(), abs=0.01)
    else:
        np.testing.assert_allclose(sample.mean(axis=0), policy.mean[0], atol=0.03)
        variance = policy.logvar[0].exp().numpy()
        assert np.cov(sample.T) == pytest.approx(variance * np.eye(4), abs=0.06)


# --- 14 the value function ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "before", "widths"),
    [
        (5000, 0, [263] * 19), (5000, 5000, [263] * 19), (200, 0, [200]), (200, 90, [200]),
        (255, 0, [255]), (511, 0, [511]), (512, 0, [256] * 2), (700, 100, [350] * 2),
    ],
)  # fmt: skip
def test_14_value_schedule(size, before, widths):
    agent, args = make_agent()
    rows, inputs = [], torch.arange(size + before).double().unsqueeze(-1).expand(-1, 4)

    def critic(features):
        rows.append(features[:, 0].long())
        return (features * weight).sum(dim=-1, keepdim=True)

    weight = torch.zeros(4, requires_grad=True)
    agent.critic.forward = critic  # on features that are numbers of rows
    if before:
        agent.replay = inputs[size:], torch.ones(before)
    batch = Batch(inputs[:size], None, None, None, None, torch.ones(size))
    script.fit_value(agent, batch, args)
    assert agent.replay[0] is batch.features and agent.replay[1] is batch.returns
    assert [len(each) for each in rows] == widths * 10
    passes = [torch.cat(rows[k * len(widths) : (k + 1) * len(widths)]) for k in range(10)]
    for each in passes:
        assert len(each.unique()) == len(each)
        assert each.min() >= 0
        assert each.max() < size + before
    assert not torch.equal(passes[0], passes[1])
    # of both batches in proportion
    share = np.mean([(each >= size).float().mean().item() for each in passes])
    assert share == pytest.approx(before / (size + before), abs=0.03)


# --- rollouts -------------------------------------------------------------------------------------
def start(env_id="Drawn-v0", num_envs=1):
    """An agent, its environments, and what a rollout needs of a run."""
    args = Args(env_id=env_id, num_envs=num_envs)
    envs = script.make_envs(args, num_envs, {})
    torch.manual_seed(0)
    agent = Agent(envs, args)
    agent.policy_adam, agent.value_adam = script.optimizers(agent, args)
    return agent, envs, SimpleNamespace(episodes=[(0, 0.0, [])] * num_envs), args


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_exactly_b_whole_episodes(num_envs):
    agent, envs, run, _ = start(num_envs=num_envs)
    lengths, steps = [], 0
    for _ in range(80):
        data = script.rollout(agent, envs, run, 8)
        ends = np.argwhere(data.terminated)
        assert len(ends) == 8 and not data.truncated.any()
        assert envs.autoreset.all()
        for t, i in ends:
            n = data.time[t + 1, i]
            rows = slice(t + 1 - n, t + 1)
            assert data.valid[rows, i].all()
            assert data.time[t + 1 - n : t + 2, i].tolist() == list(range(n + 1))
            assert data.obs[t + 1 - n : t + 2, i, 1].tolist() == list(range(n + 1))
            lengths.append(n)
        steps += data.valid.sum()
        assert data.rewards.sum() == data.valid.sum() and (data.rewards[~data.valid] == 0).all()
    assert steps == sum(lengths) == sum(len(env.unwrapped.taken) for env in envs.envs)
    numbers = [number for number, *_ in run.episodes]
    assert sum(numbers) == 640 and [x + 1 for x in envs.episode_numbers] == numbers
    # the first b to end, of more side by side, would be shorter
    assert np.mean(lengths) == pytest.approx(25.5, abs=3.5 * np.std(np.arange(1, 51)) / 640**0.5)
    agent, envs, run, _ = start("Limit4-v0", num_envs)  # a time limit is told from an end
    data = script.rollout(agent, envs, run, 3)
    assert data.truncated.sum() == 3 and not data.terminated.any()
    assert (data.obs[1:][data.truncated][:, 1] == 4).all()


@pytest.mark.parametrize("env_id", ["Drawn-v0", "Choice-v0"])
def test_stored_actions_are_those_acted_on_stored_observations(env_id):
    """In order, with noise from the agent's own generator; Discrete actions count from `start`."""
    agent, envs, run, _ = start(env_id)
    rng = copy.deepcopy(agent.rng)
    data = script.rollout(agent, envs, run, 3)
    agent.rng = rng
    (env,) = envs.envs
    acted = []
    for t in data.valid[:, 0].nonzero()[0]:
        acted.append(agent.act(data.obs[t], agent.noise(1), data.time[t])[0])
    np.testing.assert_array_equal(np.array(env.unwrapped.taken), acted)
    stored = data.actions[:, 0][data.valid[:, 0]]
    assert data.valid.sum() == len(acted) < len(data.valid)
    np.testing.assert_array_equal(stored + (5 if env_id == "Choice-v0" else 0), acted)
    assert env_id == "Drawn-v0" or set(np.unique(stored)) == {0, 1, 2}


@pytest.mark.slow
def test_an_endless_episode_is_an_error():
    agent, envs, run, _ = start("Endless-v0")
    with pytest.raises(TimeoutError, match="max_episode_steps"):
        script.rollout(agent, envs, run, 2)


# --- 18 learning ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_18_inverted_pendulum_within_1000_episodes():
    agent, envs, run, args = start("InvertedPendulum-v4")
    warm_up = script.rollout(agent, envs, run, 5)
    agent.obs_moments.update(warm_up.obs[:-1][warm_up.valid])
    kls, passes, best = [], [], 0.0
    while run.episodes[0][0] < 1005 and best < 950:
        data = script.rollout(agent, envs, run, 20)
        metrics = script.update(agent, data, args)
        kls.append(metrics["losses/kl"])
        passes.append(metrics["charts/policy_passes"])
        best = data.rewards.sum() / 20
    assert best >= 950
    assert 0.002 < np.mean(kls) < 0.005
    assert np.mean(np.array(passes) < 20) < 0.2
