"""ppo_kl_adaptive.py against its specification, whose checklist numbers the tests: golden numbers
of the original program, a second implementation in plain loops, brute force, toys."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from maths import Clock, Log, brute_force, killed_and_resumed, vector
from torch.distributions import Normal, kl_divergence

import ppo_kl_adaptive as script
from ppo_kl_adaptive import Agent, Args, Categorical, Gaussian, Rollout, Servo, policy_loss

LINE = spaces.Box(-np.inf, np.inf, (1,))
gym.register("Drawn-v0", Clock, kwargs={"action_space": LINE})
gym.register(
    "Limit4-v0", Clock, kwargs={"action_space": LINE, "lengths": (9,)}, max_episode_steps=4
)
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
    return Agent(problem, args), args


def play(agent: Agent, lengths=(30, 7, 50, 1, 20), seed=0, scale=1.0) -> Rollout:
    """Episodes of random observations, the agent's own actions and random rewards; every second
    one is truncated."""
    rng, lengths, E = np.random.default_rng(seed), np.array(lengths), len(lengths)
    obs = np.zeros((lengths.max() + 1, E, agent.actor[0].in_features - 1), np.float32)
    rewards, actions = np.zeros(obs.shape[:2])[1:], None
    for e, length in enumerate(lengths):
        obs[: length + 1, e] = rng.normal(1.0, 2.0, (length + 1, obs.shape[-1]))
        taken = agent.act(obs[:length, e], agent.noise(length), np.arange(length))
        if actions is None:
            actions = np.zeros((*rewards.shape, *taken.shape[1:]), taken.dtype)
        actions[:length, e], rewards[:length, e] = taken, scale * rng.normal(size=length)
    ended = np.arange(E) % 2 == 0
    return Rollout(obs, actions, rewards, lengths, ended, ~ended)


def policy_batch(agent: Agent, size=300, seed=0):
    """What fit_policy takes: features, actions, advantages."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    features = torch.randn(size, agent.actor[0].in_features, generator=generator)
    with torch.no_grad():
        policy = agent.policy(features)
    if agent.discrete:
        actions = torch.distributions.Categorical(logits=policy.logprobs).sample()
    else:
        actions = policy.mean + (0.5 * policy.logvar).exp() * torch.randn_like(policy.mean)
    return features, actions, torch.randn(size, generator=generator)


def steps_taken(adam) -> int:
    (steps,) = {int(state["step"]) for state in adam.state.values()}
    return steps


def policy_at(agent: Agent, features) -> Gaussian | Categorical:
    """The policy as it is now, in memory of its own."""
    with torch.no_grad():
        policy = agent.policy(features)
    return type(policy)(*(x.clone() for x in policy))


def servo(preset="coady", **numbers) -> Servo:
    return dataclasses.replace(make_agent(servo=preset)[0].servo, **numbers)


def gaussian(mean, logvar, requires_grad=False) -> Gaussian:
    mean, logvar = (torch.tensor(x, dtype=torch.float64) for x in (mean, logvar))
    return Gaussian(mean.requires_grad_(requires_grad), logvar.requires_grad_(requires_grad))


def objective(ratio, advantages, kl, preset="coady", **numbers):
    """policy_loss of a policy with these ratios and this KL; the loss, and its slope in the KL."""
    ratio, kl = torch.tensor(ratio), torch.tensor(kl, requires_grad=True)
    policy = SimpleNamespace(log_prob=lambda _: ratio.log(), entropy=lambda: torch.zeros(2))
    old = SimpleNamespace(kl=lambda new: kl)
    arguments = torch.zeros(len(ratio)), None, torch.tensor(advantages), servo(preset, **numbers)
    loss = policy_loss(policy, old, *arguments)[0]
    loss.backward()
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


def test_2_terms_that_are_reported():
    old = gaussian([[0.0], [0.5]], [[-1.0], [-1.0]])
    new = gaussian([[0.1], [0.4]], [[-0.8], [-0.8]])
    actions, advantages = torch.tensor([[0.3], [0.2]]).double(), torch.tensor([1.0, -2.0])
    given = old.log_prob(actions), actions, advantages, servo()
    loss, surrogate, kl, entropy = policy_loss(new, old, *given)
    ratio = (new.log_prob(actions) - old.log_prob(actions)).exp()
    assert surrogate.item() == pytest.approx(-(ratio * advantages).mean().item())
    assert kl.item() == pytest.approx(old.kl(new).mean().item())
    assert entropy.item() == pytest.approx(0.5 * (math.log(2 * math.pi * math.e) - 0.8))
    hinge = 50 * max(0, kl.item() - 0.006) ** 2
    whole = surrogate.item() + kl.item() + hinge
    assert loss.item() == pytest.approx(whole, abs=1e-6)


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
    for kl, powers in ((1.0, range(1, 25)), (0.0, range(23, -10, -1))):
        for k in powers:
            it.adapt(kl)
            fixed.adapt(kl)
            it.adapt_rate(1.0, 3e-4)
            assert it.beta == 2.0**k
    for _ in range(1100):  # without a floor it would be 0 now, and stay there
        it.adapt(0.0)
    assert it.beta == 1e-3
    it.adapt(1.0)
    assert it.beta == 2e-3
    assert it.lr_multiplier == fixed.lr_multiplier == 1.0
    assert fixed.beta == 3.0
    given = servo("schulman", beta=0.0), servo("fixed", beta=0.0), servo("learning-rate")
    for each in given:
        each.adapt(1.0)
    assert [each.beta for each in given] == [2e-3, 0.0, 0.0]


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
    for passes in (1, 2, 5):  # after every one
        agent, args = make_agent(servo="learning-rate", update_epochs=passes, learning_rate=1e-5)
        metrics = script.fit_policy(agent, *policy_batch(agent), args)
        assert 0.0 < metrics["losses/kl"] < 0.005
        assert metrics["charts/policy_passes"] == passes
        assert agent.servo.lr_multiplier == pytest.approx(1.5**passes)
        assert metrics["charts/learning_rate"] == pytest.approx(1e-5 * 1.5**passes)


def test_3_presets_from_the_command_line():
    def numbers(line):
        agent, _ = make_agent(**{k: getattr(parsed(line), k) for k in ("servo", "kl_targ", "beta")})
        return dataclasses.asdict(agent.servo)

    coady = {
        "kl_targ": 0.003, "beta": 1.0, "tolerance": 2.0, "factor": 1.5, "beta_min": 1 / 35,
        "beta_max": 35.0, "hinge_coef": 50.0, "early_stop": 4.0, "clip_coef": 0.0,
        "lr_servo": "with-beta", "lr_multiplier": 1.0,
    }  # fmt: skip
    schulman = {
        "kl_targ": 0.01, "beta": 1.0, "tolerance": 1.5, "factor": 2.0, "beta_min": 1e-3,
        "beta_max": 1e9, "hinge_coef": 0.0, "early_stop": math.inf, "clip_coef": 0.0,
        "lr_servo": "never", "lr_multiplier": 1.0,
    }  # fmt: skip
    fixed = schulman | {"factor": 1.0, "beta_min": 0.0}
    rate = {"beta": 0.0, "tolerance": 2.0, "clip_coef": 0.2, "lr_servo": "with-kl"}
    assert numbers("") == coady
    assert numbers("--servo schulman") == schulman
    assert numbers("--servo fixed --beta 3") == fixed | {"beta": 3.0}
    assert numbers("--servo learning-rate") == fixed | rate
    given = {"beta": 0.0, "kl_targ": 0.03}
    assert numbers("--servo schulman --beta 0 -k 0.03") == schulman | given  # 0 is a number
    assert numbers("--beta 0 --kl-targ 0.03") == coady | given


# --- 4 early stop, 5 first step, 12 speed of the variance -----------------------------------------
@pytest.mark.parametrize("discrete", [False, True])
def test_4_early_stop_keeps_the_step_and_tells_the_servo(discrete):
    numbers = {"discrete": discrete, "learning_rate": 2.5e-3 if discrete else 7e-4}
    agent, args = make_agent(**numbers)
    data = policy_batch(agent)
    old = policy_at(agent, data[0])
    metrics = script.fit_policy(agent, *data, args)
    passes = metrics["charts/policy_passes"]
    assert 2 <= passes < 20
    assert steps_taken(agent.optimizers["policy"]) == passes
    kl = old.kl(policy_at(agent, data[0])).mean().item()
    assert metrics["losses/kl"] == pytest.approx(kl)
    assert kl > 0.012
    assert agent.servo.beta == 1.5
    # one pass less is not beyond the limit
    shorter, args = make_agent(**numbers, update_epochs=passes - 1)
    assert script.fit_policy(shorter, *policy_batch(shorter), args)["losses/kl"] <= 0.012
    never, args = make_agent(**numbers)
    never.servo.early_stop = math.inf
    assert script.fit_policy(never, *policy_batch(never), args)["charts/policy_passes"] == 20
    slow, args = make_agent(discrete=discrete, learning_rate=5e-5)
    metrics = script.fit_policy(slow, *policy_batch(slow), args)
    assert metrics["losses/kl"] < 0.012
    assert metrics["charts/policy_passes"] == steps_taken(slow.optimizers["policy"]) == 20


def test_4_new_learning_rate_is_of_the_next_iteration():
    """And metrics tell what the servo has set."""
    agent, args = make_agent(beta=35.0, learning_rate=0.03)
    metrics = script.fit_policy(agent, *policy_batch(agent), args)
    assert metrics["losses/kl"] > 0.006
    assert agent.optimizers["policy"].param_groups[0]["lr"] == pytest.approx(0.03)
    assert agent.servo.lr_multiplier == metrics["charts/lr_multiplier"] == pytest.approx(1 / 1.5)
    assert metrics["charts/learning_rate"] == pytest.approx(0.02)
    assert metrics["charts/beta"] == 35.0
    script.fit_policy(agent, *policy_batch(agent, seed=1), args)
    assert agent.optimizers["policy"].param_groups[0]["lr"] == pytest.approx(0.02)


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("numbers", [{}, {"beta": 35.0, "hinge_coef": 1e4}, {"clip_coef": 0.2}])
def test_5_first_step_is_the_plain_policy_gradient(discrete, numbers):
    agent, _ = make_agent(discrete=discrete, actions=3)
    features, actions, advantages = policy_batch(agent)
    old = policy_at(agent, features)
    given = old, old.log_prob(actions), actions, advantages, servo(**numbers)
    policy_loss(agent.policy(features), *given)[0].backward()
    learned = [p for g in agent.optimizers["policy"].param_groups for p in g["params"]]
    gradients = [p.grad.clone() for p in learned]
    agent.zero_grad()
    output = agent.actor(features)
    if discrete:
        log_prob = torch.distributions.Categorical(logits=output).log_prob(actions)
    else:
        log_prob = Normal(output, (0.5 * agent.actor_logvar).exp()).log_prob(actions).sum(-1)
    (-advantages * log_prob).mean().backward()
    for gradient, parameter in zip(gradients, learned, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("multiplier", [1.0, 1.5])
def test_12_log_variance_moves_speed_times_as_far(multiplier):
    agent, args = make_agent(11, 3, update_epochs=1)  # Hopper
    agent.servo.lr_multiplier = multiplier
    bias, logvar = (p.detach().clone() for p in (agent.actor[-1].bias, agent.actor_logvar))
    script.fit_policy(agent, *policy_batch(agent), args)
    moved = (agent.actor[-1].bias - bias).abs().tolist()
    assert moved == pytest.approx([1.162e-4 * multiplier] * 3, rel=1e-3)
    moved = (agent.actor_logvar - logvar).abs().tolist()
    assert moved == pytest.approx([6.972e-4 * multiplier] * 3, rel=1e-3)


# --- 6, 7, 8 advantages and returns, 9 their normalization ----------------------------------------
REWARDS, VALUES = [1.0, 2.0, -1.0, 0.5], [0.3, 0.1, -0.2, 0.4]


def one_episode(terminated=True, truncated=False, after=0.7, **args):
    """Advantages and returns of the golden episode; `after` is the value at its end."""
    flags = np.array([terminated]), np.array([truncated])
    nothing = np.zeros((5, 1, 1))
    rewards = np.array(REWARDS)[:, None]
    data = Rollout(nothing, nothing[1:], rewards, np.array([4]), *flags)
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


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_7_advantages_of_padded_episodes_are_the_brute_force_sums_of_each_alone(data):
    lengths = np.array(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    gamma = data.draw(st.sampled_from([0.0, 0.9, 0.9995, 1.0]))
    gae_lambda = data.draw(st.floats(0, 1))
    bootstrap, lambda_returns = data.draw(st.booleans()), data.draw(st.booleans())
    junk = data.draw(st.sampled_from([0.0, 1e9, np.nan]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    T, E = lengths.max(), len(lengths)
    terminated, truncated = rng.random((2, E)) < 0.5
    rewards, values = rng.normal(size=(T, E)), rng.normal(size=(T + 1, E))
    obs, actions = np.zeros((T + 1, E, 1)), np.zeros((T, E, 1))
    batch = Rollout(obs, actions, rewards, lengths, terminated, truncated)
    rewards[~batch.valid] = junk
    values[np.arange(T + 1)[:, None] > lengths] = junk
    args = Args(
        gamma=gamma, gae_lambda=gae_lambda, bootstrap_truncation=bootstrap,
        lambda_returns=lambda_returns,
    )  # fmt: skip
    advantages, returns = script.advantages_and_returns(batch, values, args)
    for e, n in enumerate(lengths):
        ended = np.zeros((n, 1), bool)
        ended[-1] = terminated[e] or (truncated[e] and not bootstrap)
        scaled = rewards[:n, [e]] * (1 - gamma if gamma < 0.999 else 1)
        alone = scaled, values[: n + 1, [e]], ended, np.zeros_like(ended), gamma
        expected = brute_force(*alone, gae_lambda)[:, 0]
        np.testing.assert_allclose(advantages[:n, e], expected, atol=1e-10)
        expected = expected if lambda_returns else brute_force(*alone, 1.0)[:, 0]
        np.testing.assert_allclose(returns[:n, e], expected + values[:n, e], atol=1e-10)


def test_7_padding_does_not_matter_to_learning():
    results = []
    for junk in (0.0, 1e9):
        agent, args = make_agent(bootstrap_truncation=True)
        data = play(agent)
        data.obs[np.arange(len(data.obs))[:, None] > data.lengths] = junk
        data.actions[~data.valid] = np.nan if junk else 0.0
        data.rewards[~data.valid] = junk
        script.update(agent, data, args)
        results.append((vector(agent), agent.obs_moments.mean, agent.replay[1]))
    for clean, padded in zip(*results, strict=True):
        assert torch.equal(clean, padded)


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


def test_10_warm_up_sets_the_scale_and_counts_for_nothing(tmp_path, monkeypatch):
    plain, seen, folder = script.rollout, [], tmp_path / "run"

    def rollout(agent, envs, episodes, run=None):
        if run:
            seen.extend([agent, envs, run.global_step])
            raise InterruptedError
        return plain(agent, envs, episodes)

    monkeypatch.setattr(script, "rollout", rollout)
    args = parsed(f"--env-id Drawn-v0 --no-cuda --run-dir {folder}")
    with pytest.raises(InterruptedError):
        script.train(args)
    agent, envs, step = seen
    assert (envs.episodes, envs.over.tolist(), step) == ([4], [True], 0)
    (env,) = envs.envs
    assert agent.obs_moments.count == len(env.unwrapped.taken) > 5
    assert agent.obs_moments.mean[1] > 1.0
    assert not folder.exists()  # not one step that counts was taken
    torch.manual_seed(args.seed)
    assert torch.equal(vector(agent), vector(Agent(envs, args)))
    assert not any(adam.state for adam in agent.optimizers.values())


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
    assert agent.optimizers["policy"].defaults["lr"] == pytest.approx(rate, rel=1e-3)
    assert agent.optimizers["policy"].param_groups[1]["speed"] == speed
    assert len(vector(agent.actor)) + speed * actions == count
    assert agent.policy(torch.zeros(1, inputs)).entropy().item() == pytest.approx(entropy, abs=1e-4)
    assert agent.actor_logvar.tolist() == [-1.0] * actions
    assert tuple(layer.out_features for layer in layers(agent.critic)) == (*value[0], 1)
    group = agent.optimizers["value"].param_groups[0]
    assert group["lr"] == pytest.approx(value[1], rel=1e-3)
    assert len(vector(agent.critic)) == value[2]
    for adam in agent.optimizers.values():
        for group in adam.param_groups:
            settings = [group[name] for name in ("betas", "eps", "weight_decay", "amsgrad")]
            assert settings == [(0.9, 0.999), 1e-8, 0, False]


def test_11_size_rate_and_variance_can_be_given():
    agent, _ = make_agent(9, 2)  # the author's own log, of ten inputs
    assert [layer.out_features for layer in layers(agent.critic)] == [100, 22, 5, 1]
    assert agent.optimizers["value"].param_groups[0]["lr"] == pytest.approx(0.00213, rel=2e-3)
    numbers = {"hid1_mult": 3, "policy_logvar": -2.0, "learning_rate": 1e-3}
    agent, _ = make_agent(11, 3, value_learning_rate=2e-3, **numbers)
    assert [layer.out_features for layer in layers(agent.actor)] == [36, 32, 30, 3]
    assert [layer.out_features for layer in layers(agent.critic)] == [36, 13, 5, 1]
    assert agent.optimizers["policy"].defaults["lr"] == 1e-3
    assert agent.optimizers["value"].param_groups[0]["lr"] == 2e-3
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
def test_16_act_is_the_torch_policy_before_and_after_an_update(discrete):
    agent, args = make_agent(actions=4, discrete=discrete, learning_rate=0.01, policy_logvar=0.7)
    for seed in range(3):
        obs = np.random.default_rng(seed).normal(1.0, 2.0, (200, 3)).astype(np.float32)
        time, noise = np.arange(200) * 5, agent.noise(200)
        with torch.no_grad():
            features = agent.features(torch.as_tensor(obs), torch.as_tensor(time))
            policy = agent.policy(features)
            sampled = torch.as_tensor(agent.act(obs, noise, time))
            log_prob = policy.log_prob(sampled).numpy()
        likeliest = agent.act(obs, time=time)
        if discrete:
            assert (likeliest == policy.logprobs.argmax(-1).numpy()).all()
            logits = policy.logprobs.numpy()
            assert (sampled.numpy() == (logits + noise).argmax(axis=-1)).all()
        else:
            np.testing.assert_allclose(likeliest, policy.mean, atol=1e-5)
            logvar = agent.actor_logvar.detach().numpy()
            at_sampling = -0.5 * (noise**2 + logvar + np.log(2 * np.pi)).sum(axis=-1)
            np.testing.assert_allclose(log_prob, at_sampling, atol=1e-4, rtol=1e-5)
        script.update(agent, play(agent, seed=seed), args)
    # samples are of the policy's distribution
    obs = np.ones((40_000, 3), np.float32)
    sample = agent.act(obs, agent.noise(40_000), 100)  # one time for all
    policy = policy_at(agent, agent.features(torch.ones(1, 3), torch.tensor([100])))
    if discrete:
        frequencies = np.bincount(sample, minlength=4) / 40_000
        assert frequencies == pytest.approx(policy.logprobs[0].exp().numpy(), abs=0.01)
    else:
        assert sample.dtype == np.float32
        np.testing.assert_allclose(sample.mean(axis=0), policy.mean[0], atol=0.03)
        variance = policy.logvar[0].exp().numpy()
        assert np.cov(sample.T) == pytest.approx(variance * np.eye(4), abs=0.06)


# --- 14 the value function, 15 explained variance -------------------------------------------------
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
    script.fit_value(agent, inputs[:size], torch.ones(size), args)
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


def test_15_the_value_function_is_measured_before_it_is_fitted():
    def measured():
        values = agent.critic(features).squeeze(-1).detach().double().numpy()
        returns = script.advantages_and_returns(data, values, args)[1][data.valid]
        residual = returns - values[:-1][data.valid]
        return [1 - residual.var() / returns.var(), (residual**2).mean()]

    agent, args = make_agent()
    for seed in range(3):
        data = play(agent, seed=seed)
        features = agent.features(torch.as_tensor(data.obs), torch.arange(51)[:, None])
        before, metrics, after = measured(), script.update(agent, data, args), measured()
        names = "losses/explained_variance", "losses/value_loss"
        assert [metrics[name] for name in names] == pytest.approx(before, rel=1e-4)
        assert before != pytest.approx(after, rel=0.01)
    data.rewards[:] = 0.0
    assert all(math.isfinite(x) for x in script.update(agent, data, args).values())


# --- whole iterations, against plain loops --------------------------------------------------------
class Plain:
    """The algorithm a second time, as the specification has it, with the agent's first weights:
    for Box actions, one episode and one row of everything after the other."""

    def __init__(self, agent: Agent, seen: np.ndarray, speed: int, lr: float, value_lr: float):
        self.actor, self.critic = (
            [p.detach().clone().requires_grad_() for p in net.parameters()]
            for net in (agent.actor, agent.critic)
        )
        self.rows = torch.zeros(speed, len(agent.actor_logvar), requires_grad=True)
        self.adam = torch.optim.Adam([*self.actor, self.rows], lr=lr, eps=1e-8)
        self.value_adam = torch.optim.Adam(self.critic, lr=value_lr, eps=1e-8)
        self.lr, self.multiplier, self.beta, self.seen = lr, 1.0, 1.0, [seen]
        self.replay = [torch.zeros(0, len(seen[0]) + 1), torch.zeros(0)]
        self.rng = copy.deepcopy(agent.rng)

    @staticmethod
    def network(weights, x):
        for k in range(0, len(weights) - 2, 2):
            x = torch.tanh(x @ weights[k].T + weights[k + 1])
        return x @ weights[-2].T + weights[-1]

    def distribution(self, features) -> Normal:
        return Normal(self.network(self.actor, features), (self.rows.sum(0) - 1.0).exp().sqrt())

    def iterate(self, data: Rollout, gamma=0.995, lam=0.98, target=0.003):
        before = np.concatenate(self.seen).astype(np.float64)
        features, actions, advantages, returns = [], [], [], []
        for e, n in enumerate(data.lengths):
            obs = data.obs[:n, e]
            scaled = (obs - before.mean(axis=0)) / (3 * (before.std(axis=0) + 0.1))
            x = torch.tensor(np.column_stack([scaled, 0.001 * np.arange(n)])).float()
            values = np.append(self.network(self.critic, x)[:, 0].detach().double().numpy(), 0.0)
            ended = np.arange(n)[:, None] == n - 1
            alone = 0.005 * data.rewards[:n, [e]], values[:, None], ended, ended, gamma
            advantage = brute_force(*alone, lam)[:, 0]
            value = brute_force(*alone, 1.0)[:, 0] + values[:-1]
            features, actions = [*features, *x], [*actions, *data.actions[:n, e]]
            advantages, returns = [*advantages, *advantage], [*returns, *value]
            self.seen.append(obs)
        step = np.concatenate([np.arange(n) for n in data.lengths])
        order = np.argsort(step, kind="stable")  # rows lie step by step, as the script has them
        features, actions = torch.stack(features)[order], torch.tensor(np.array(actions)[order])
        advantages, returns = np.array(advantages)[order], np.array(returns)[order]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        self.fit_policy(features, actions, torch.tensor(advantages).float(), target)
        self.fit_value(features, torch.tensor(returns).float())

    def fit_policy(self, features, actions, advantages, target):
        with torch.no_grad():
            old = self.distribution(features)
            old_logprobs = old.log_prob(actions).sum(-1)
        self.adam.param_groups[0]["lr"] = self.lr * self.multiplier
        for self.passes in range(1, 21):
            new = self.distribution(features)
            ratio = (new.log_prob(actions).sum(-1) - old_logprobs).exp()
            kl = kl_divergence(old, new).sum(-1).mean()
            loss = -(advantages * ratio).mean() + self.beta * kl
            if kl > 2 * target:
                loss = loss + 50 * (kl - 2 * target) ** 2
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
            with torch.no_grad():
                self.kl = kl_divergence(old, self.distribution(features)).sum(-1).mean().item()
            if self.kl > 4 * target:
                break
        if self.kl > 2 * target:
            self.beta = min(35, 1.5 * self.beta)
            self.multiplier /= 1.5 if self.beta > 30 and self.multiplier > 0.1 else 1
        elif self.kl < target / 2:
            self.beta = max(1 / 35, self.beta / 1.5)
            self.multiplier *= 1.5 if self.beta < 1 / 30 and self.multiplier < 10 else 1

    def fit_value(self, features, returns):
        x, y = torch.cat([features, self.replay[0]]), torch.cat([returns, self.replay[1]])
        batches = max(len(returns) // 256, 1)
        width = len(returns) // batches
        for _ in range(10):
            order = self.rng.permutation(len(y))
            for k in range(batches):
                i = torch.tensor(order[k * width : (k + 1) * width])
                loss = ((self.network(self.critic, x[i])[:, 0] - y[i]) ** 2).mean()
                self.value_adam.zero_grad()
                loss.backward()
                self.value_adam.step()
        self.replay = [features, returns]


@pytest.mark.parametrize(("rate", "passes"), [(None, [20, 20, 20]), (7e-4, None)])
def test_three_iterations_are_those_of_plain_loops(rate, passes):
    agent, args = make_agent(3, 2, learning_rate=rate)
    warm = np.random.default_rng(9).normal(1.0, 2.0, (40, 3)).astype(np.float32)
    agent.obs_moments.update(warm)
    lr = rate or 9e-4 / math.sqrt(28)  # 40, 28, 20 and 40, 14, 5 units
    plain = Plain(agent, warm, speed=4, lr=lr, value_lr=1e-2 / math.sqrt(14))
    taken = []
    for seed in range(3):
        data = play(agent, (200, 31, 300, 1, 90), seed)  # 622 steps
        plain.rng = copy.deepcopy(agent.rng)
        metrics = script.update(agent, data, args)
        plain.iterate(data)
        taken.append(metrics["charts/policy_passes"])
        assert taken[-1] == plain.passes
        assert metrics["losses/kl"] == pytest.approx(plain.kl, rel=1e-3)
        assert (agent.servo.beta, agent.servo.lr_multiplier) == (plain.beta, plain.multiplier)
        for ours, theirs in ((agent.actor, plain.actor), (agent.critic, plain.critic)):
            for p, q in zip(ours.parameters(), theirs, strict=True):
                torch.testing.assert_close(p, q, atol=1e-5, rtol=0)
        logvar = plain.rows.sum(0) - 1.0
        torch.testing.assert_close(agent.actor_logvar, logvar, atol=1e-5, rtol=0)
    assert taken == passes if passes else 1 < min(taken) < 20


# --- rollouts -------------------------------------------------------------------------------------
def playing(env_id="Drawn-v0", num_envs=1):
    args = Args(env_id=env_id, num_envs=num_envs)
    envs = script.make_envs(args, num_envs)
    torch.manual_seed(0)
    return Agent(envs, args), envs, Log(), args


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_exactly_b_whole_episodes(num_envs):
    agent, envs, log, _ = playing(num_envs=num_envs)
    for k in range(1, 4):
        data = script.rollout(agent, envs, 8, log)
        assert len(data.lengths) == 8
        assert data.terminated.all()
        for e, n in enumerate(data.lengths):
            assert data.obs[: n + 1, e, 1].tolist() == list(range(n + 1))
        assert (data.rewards.sum(axis=0) == data.lengths).all()
        assert data.valid.sum(axis=0).tolist() == data.lengths.tolist()
        assert len(log.rows) == 8 * k
        assert sorted(row[1] for row in log.rows[-8:]) == sorted(data.lengths)
        assert all(row[1] == row[2] for row in log.rows)
        assert envs.over.all()
    taken = sum(len(env.unwrapped.taken) for env in envs.envs)
    assert log.global_step == sum(row[2] for row in log.rows) == taken
    assert sum(episode + 1 for episode in envs.episodes) == 24
    if num_envs > 1:  # the first b to end, of more side by side, would be shorter
        lengths = [script.rollout(agent, envs, 8).lengths for _ in range(80)]
        error = np.std(np.arange(1, 51)) / 640**0.5
        assert np.mean(lengths) == pytest.approx(25.5, abs=3.5 * error)
    agent, envs, _, _ = playing("Limit4-v0", num_envs)  # a time limit is told from an end
    data = script.rollout(agent, envs, 3)
    assert data.lengths.tolist() == [4] * 3
    assert data.truncated.all()
    assert not data.terminated.any()
    assert (data.obs[4, :, 1] == 4).all()


@pytest.mark.parametrize("env_id", ["Drawn-v0", "Choice-v0"])
def test_stored_actions_are_those_acted_on_stored_observations(env_id):
    """In order, with noise from the agent's own generator; Discrete actions count from `start`."""
    agent, envs, _, _ = playing(env_id)
    rng = copy.deepcopy(agent.rng)
    data = script.rollout(agent, envs, 3)
    agent.rng = rng
    for e, n in enumerate(data.lengths):
        for t in range(n):
            action = agent.act(data.obs[t, e : e + 1], agent.noise(1), t)[0]
            assert np.array_equal(action, data.actions[t, e])
    (env,) = envs.envs
    acted = data.actions.swapaxes(0, 1)[data.valid.T]
    shift = 5 if env_id == "Choice-v0" else 0
    np.testing.assert_array_equal(np.array(env.unwrapped.taken), acted + shift)
    assert shift == 0 or set(np.unique(acted)) == {0, 1, 2}


# --- 17 checkpoints -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "flags",
    [
        "--num-envs 2 -n 12",
        "--servo learning-rate --total-timesteps 320",
        "--env-id Choice-v0 --num-envs 3 --learning-rate 0.02 -n 12",
    ],
)
def test_17_resumed_run_is_the_uninterrupted_one(tmp_path, flags):
    flags = f"--env-id Drawn-v0 --no-cuda -b 3 --checkpoint-interval 2 {flags}"
    resumed = killed_and_resumed("ppo_kl_adaptive", tmp_path, flags)
    assert len(resumed["replay"]) == 2
    assert set(resumed["optimizers"]) == {"policy", "value"}
    assert resumed["servo"]["lr_multiplier"] != 1.0 or resumed["servo"]["beta"] != 1.0


def test_17_a_resumed_run_learns_by_the_flags_given_now(tmp_path, monkeypatch):
    """Rates and target; beta and the multiplier are the run's."""
    folder, seen, plain = tmp_path / "run", [], script.update
    flags = "--env-id Drawn-v0 --no-cuda -b 3 -n 6 --beta 9"
    script.train(parsed(f"{flags} --run-dir {folder}"))
    servo = script.load_checkpoint(folder)["servo"]

    def update(agent, *given):
        seen.append((agent.servo.kl_targ, agent.servo.beta))
        metrics = plain(agent, *given)
        seen.append([adam.param_groups[0]["lr"] for adam in agent.optimizers.values()])
        return metrics

    monkeypatch.setattr(script, "update", update)
    rates = "--learning-rate 1e-5 --value-learning-rate 1e-6"
    script.train(parsed(f"--resume {folder} {rates} -k 0.7 -n 9"))
    assert seen[0] == (0.7, servo["beta"])
    assert seen[1] == [1e-5 * servo["lr_multiplier"], 1e-6]


# --- 18 learning ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_18_inverted_pendulum_within_1000_episodes():
    agent, envs, log, args = playing("InvertedPendulum-v4")
    warm = script.rollout(agent, envs, 5)
    agent.obs_moments.update(warm.obs[:-1][warm.valid])
    kls, passes, best = [], [], 0.0
    while len(log.rows) < 1000 and best < 950:
        metrics = script.update(agent, script.rollout(agent, envs, 20, log), args)
        kls.append(metrics["losses/kl"])
        passes.append(metrics["charts/policy_passes"])
        best = np.mean([row[1] for row in log.rows[-20:]])
    assert best >= 950
    assert 0.002 < np.mean(kls) < 0.005
    assert np.mean(np.array(passes) < 20) < 0.2
