"""ppo.py and ppo_continuous_action.py against Stable-Baselines3 and environments whose values are
known. "Trap n" is a known way in which implementations go wrong."""

import copy
import dataclasses
import itertools
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from maths import Clock, Log
from program import METRICS
from stable_baselines3.common.logger import Logger

import ppo
import ppo_continuous_action

SCRIPTS = [ppo, ppo_continuous_action]
both = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
rng = np.random.default_rng(0)
BOX = spaces.Box(-1.0, 1.0, (1,))


for name, space in (("ppo", spaces.Discrete(2)), ("ppo_continuous_action", BOX)):
    kwargs = {"action_space": space, "lengths": (1000,)}
    gym.register(f"Clock{name}-v0", Clock, kwargs=kwargs)
    gym.register(f"ClockLimit7{name}-v0", Clock, kwargs=kwargs, max_episode_steps=7)
    kwargs = {"action_space": space, "lengths": (5, 3)}
    gym.register(f"ClockEnds5and3{name}-v0", Clock, kwargs=kwargs, max_episode_steps=5)


def make_agent(script, env, args):
    torch.manual_seed(0)
    agent = script.Agent(env, args)
    agent.adam = script.flat_adam(agent)
    return agent


def set_up(script, env_id="Clock", **kwargs):
    """Args, environments and an agent; Clock... stands for that of the script's actions."""
    if env_id.startswith("Clock"):
        env_id += f"{script.__name__}-v0"
    args = script.Args(
        env_id=env_id, **{"num_envs": 1, "num_steps": 64, "num_minibatches": 4} | kwargs
    )
    envs = script.make_envs(args, args.num_envs)
    return args, envs, make_agent(script, envs, args)


def spying(script):
    """A minibatch step that notes what it was given and what it gave."""
    seen = []

    def step(*given):
        names, numbers = script.minibatch_step(*given)
        named = dict(zip(names, numbers.tolist(), strict=True))
        seen.append(SimpleNamespace(batch=given[2], rows=given[3], **named))
        return names, numbers

    return step, seen


def random_rollout(script, T, N, obs_dim=2, actions=1, choices=2, ends=0.0):
    shape = (T, N, actions)
    chosen = rng.integers(0, choices, shape)
    if script is ppo_continuous_action:
        chosen = rng.normal(size=shape).astype(np.float32)
    return script.Rollout(
        rng.normal(size=(T + 1, N, obs_dim)).astype(np.float32), chosen, rng.normal(size=(T, N)),
        rng.random((T, N)) < ends, np.zeros((T, N), bool), np.ones((T, N), bool),
    )  # fmt: skip


# --- episode ends ---------------------------------------------------------------------------------
@both
@pytest.mark.parametrize("env_id", ["ClockLimit7", "ClockEnds5and3"])
def test_truncation_bootstraps_and_termination_does_not(script, env_id):
    """Traps 1, 3, 4, 36, 45. Where all rewards are 1 the value is 1 / (1 - gamma) if nothing ends
    but by a time limit; a critic that says so leaves no advantage."""
    args, envs, agent = set_up(script, env_id, num_envs=3, num_steps=41)
    log = Log()
    data = script.rollout(agent, envs, log, args)
    flags, rewards = (data.terminated, data.truncated), data.rewards
    if script is ppo_continuous_action:  # the rewards as they were before they were scaled
        rewards = rewards * math.sqrt(agent.return_moments.var + 1e-8)
    advantages = script.gae(rewards, np.full((42, 3), 10.0), *flags, 0.9, 0.95)
    lengths = [7] if env_id == "ClockLimit7" else [5, 3]
    for i in range(3):  # no two episodes meet in a row, and none of an episode is lost
        steps, junk = data.obs[:-1, i, 1], ~data.valid[:, i]
        expected = [t for _ in range(41) for n in lengths for t in range(n)]
        assert list(steps[~junk]) == expected[: (~junk).sum()]
        assert list(steps[junk]) == (lengths * 41)[: junk.sum()]
        assert (np.diff(data.obs[:, i, 0])[junk] == 1).all()
    assert log.global_step == data.valid.sum()
    assert len(log.rows) == (flags[0] | flags[1]).sum() > 9
    assert {(ret, length) for _, ret, length in log.rows} == {(n, n) for n in lengths}
    if env_id == "ClockLimit7":
        assert not flags[0].any()
        assert np.abs(advantages[data.valid]).max() < 1e-12
    else:  # the five-step episodes end at the time limit as well
        assert (flags[1] <= flags[0]).all() and flags[1].any()
        np.testing.assert_allclose(advantages[data.valid & flags[0]], 1.0 - 10.0)


@both
def test_a_rollout_goes_on_where_the_last_one_stopped(script):
    """Trap 46, and returns of episodes that span rollouts."""
    sizes = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1}
    args, envs, agent = set_up(script, "ClockEnds5and3", **sizes)
    log = Log()
    first, second = (script.rollout(agent, envs, log, args) for _ in range(2))
    assert (second.obs[0] == first.obs[-1]).all()
    assert first.obs[:, 0, 1].tolist() == [0, 1, 2, 3, 4]  # trap 33: rows are copies
    assert second.obs[:, 0, 1].tolist() == [4, 5, 0, 1, 2]
    assert second.valid[:, 0].tolist() == [True, False, True, True]
    assert log.rows == [(10, 5.0, 5)] * 2
    assert log.global_step == 14
    script.rollout(agent, envs, log, args)
    assert log.rows[2:] == [(16, 3.0, 3)] * 2


# --- normalisers ----------------------------------------------------------------------------------
def test_observations_are_normalized_and_clipped():
    """Traps 5, 11: the same for every observation, and from the agent's own buffers."""
    args, envs, agent = set_up(ppo_continuous_action)
    agent.obs_moments.update(rng.normal(5.0, 2.0, (5000, 2)))
    obs = torch.tensor([[5.0, 7.0], [1e6, -1e6]])
    normal = agent.normalize(obs)
    assert normal.dtype == torch.float32
    torch.testing.assert_close(normal[0], torch.tensor([0.0, 1.0]), atol=0.1, rtol=0)
    assert normal[1].tolist() == [10.0, -10.0]
    assert torch.equal(agent.get_value(obs), agent.critic(normal).squeeze(-1))


def test_the_policy_that_acted_is_the_one_that_the_update_starts_from(monkeypatch):
    """The moments are those of the rollout until its update is done."""
    script, noises = ppo_continuous_action, []
    args, envs, agent = set_up(script, "Pendulum-v1")
    plain = script.gae

    def gae(*given):
        obs, actions = torch.tensor(data.obs[:-1]), torch.tensor(data.actions)
        z = (actions - agent.origin) / agent.unit - agent.actor_mean(agent.normalize(obs))
        noises.append((z / agent.actor_logstd.exp()).detach().numpy())
        return plain(*given)

    monkeypatch.setattr(script, "gae", gae)
    for k in range(3):
        noise = copy.deepcopy(agent).noise(64, 1)
        data = script.rollout(agent, envs, Log(), args)
        script.update(agent, data, 1e-3, args)
        assert agent.obs_moments.count == 64 * (k + 1)
        if k:  # the first update has nothing to normalize by but its own rollout
            np.testing.assert_allclose(noises[k], noise, atol=1e-4)


# --- policies -------------------------------------------------------------------------------------
def agent_of(box, **kwargs):
    env = SimpleNamespace(observation_space=Clock.observation_space, action_space=box)
    return ppo_continuous_action.Agent(env, ppo_continuous_action.Args(**kwargs))


def test_log_density_and_entropy_are_those_of_torch():
    """Trap 22, for a box that is neither centred nor of unit size; actions are in its units."""
    box = spaces.Box(np.array([-2.0, 0.0]), np.array([4.0, 1.0]), dtype=np.float32)
    agent = agent_of(box, log_std_init=-0.3)
    agent.obs_moments.update(rng.normal(3.0, 2.0, (99, 2)))
    obs, actions = torch.randn(50, 2), torch.randn(50, 2)
    features, unit = agent.normalize(obs), torch.tensor([3.0, 0.5])
    mean = torch.tensor([1.0, 0.5]) + unit * agent.actor_mean(features)
    normal = torch.distributions.Normal(mean, math.exp(-0.3) * unit)
    same, logprob, entropy, value = agent(obs, actions)
    assert same is actions
    torch.testing.assert_close(logprob, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    torch.testing.assert_close(value, agent.get_value(obs))
    sampled = agent(obs.repeat(400, 1))[0].view(400, 50, 2)
    torch.testing.assert_close(sampled.mean(0), mean, atol=0.6, rtol=0)
    torch.testing.assert_close(sampled.std(0).mean(0), math.exp(-0.3) * unit, atol=0, rtol=0.02)


def test_the_unit_of_actions():
    """Half the box; 1 where it has no end, an infinite width or none."""
    most = float(np.finfo(np.float32).max)
    narrow = spaces.Box(np.float32([-1, 2]), np.float32([3, 2]))
    for box, origin, unit, scale in (
        (spaces.Box(-2, 4, (1,)), [1], [3], True),
        (spaces.Box(-2, 4, (1,)), [0], [1], False),
        (spaces.Box(-np.inf, np.inf, (2,)), [0, 0], [1, 1], True),
        (spaces.Box(-most, most, (2,)), [0, 0], [1, 1], True),
        (narrow, [1, 2], [2, 1], True),
    ):
        agent = agent_of(box, scale_actions=scale)
        assert (agent.origin.tolist(), agent.unit.tolist()) == (origin, unit)
        _, logprob, entropy, _ = agent.get_action_and_value(torch.zeros(4, 2))
        assert logprob.isfinite().all() and entropy.isfinite().all()


def test_numpy_policy_is_the_torch_policy():
    args, envs, agent = set_up(ppo_continuous_action, "Pendulum-v1", num_envs=5)
    agent.obs_moments.update(rng.normal(size=(99, 3)))
    obs, noise = rng.normal(size=(5, 3)).astype(np.float32), agent.noise(5)
    mean = agent.origin + agent.unit * agent.actor_mean(agent.normalize(torch.tensor(obs)))
    sample = (mean + agent.unit * agent.actor_logstd.exp() * torch.tensor(noise)).detach()
    np.testing.assert_allclose(agent.act(obs), mean.detach(), atol=1e-6)
    np.testing.assert_allclose(agent.act(obs, noise), sample, atol=1e-6)


@pytest.mark.parametrize("scale_actions", [True, False])
def test_stored_actions_are_not_clipped_and_those_taken_are(scale_actions, monkeypatch):
    """Traps 22, 23."""
    more = {"num_steps": 200, "log_std_init": 1.0, "scale_actions": scale_actions}
    args, envs, agent = set_up(ppo_continuous_action, "Pendulum-v1", **more)
    env, taken = envs.envs[0], []
    step = env.step
    monkeypatch.setattr(env, "step", lambda action: taken.append(action) or step(action))
    data = ppo_continuous_action.rollout(agent, envs, Log(), args)
    assert np.abs(data.actions).max() > 4
    np.testing.assert_array_equal(taken, np.clip(data.actions[:, 0], -2, 2))
    assert data.actions.std() == pytest.approx(math.e * (2 if scale_actions else 1), rel=0.15)


class Guess(gym.Env):
    """Pays where the action hits the target."""

    def __init__(self, action_space, observation_space=None):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        reward = float(np.mean(np.asarray(action) == 1 + 3 * (np.ndim(action) == 0)))
        over = bool(self.np_random.random() < 0.1)
        return self.observation_space.sample(), reward, over, False, {}


DISCRETE = {  # and how many choices each branch has
    "discrete": (spaces.Discrete(4, start=3), [4]),
    "multi-discrete": (spaces.MultiDiscrete([[2, 3], [4, 2]]), [2, 3, 4, 2]),
    "multi-binary": (spaces.MultiBinary(3), [2, 2, 2]),
}
OBSERVATIONS = {
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict({"a": spaces.Box(-1, 1, (2, 2)), "b": spaces.Discrete(3)}),
}
GUESSES = {f"Guess{name}-v0": {"action_space": space} for name, (space, _) in DISCRETE.items()}
for name, space in OBSERVATIONS.items():
    GUESSES[f"See{name}-v0"] = {"action_space": spaces.Discrete(5), "observation_space": space}
for name, kwargs in GUESSES.items():
    gym.register(name, Guess, kwargs=kwargs)


@pytest.mark.parametrize("name", DISCRETE)
def test_joint_log_probability_of_branches_is_the_sum(name):
    """Trap 43."""
    args, envs, agent = set_up(ppo, f"Guess{name}-v0", num_envs=6)
    assert agent.choices == DISCRETE[name][1]
    obs = torch.randn(6, 2)
    with torch.no_grad():  # not the nearly uniform policy of the start
        agent.actor[-1].weight.mul_(100)
        logits = agent.actor(obs).split(agent.choices, dim=-1)
    actions = torch.stack([torch.randint(n, (6,)) for n in agent.choices], dim=-1)
    parts = [torch.distributions.Categorical(logits=part) for part in logits]
    _, logprob, entropy, value = agent(obs, actions)
    expected = sum(part.log_prob(a) for part, a in zip(parts, actions.unbind(-1), strict=True))
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))
    assert torch.equal(value, agent.get_value(obs))
    action, logprob, *_ = agent(obs)
    assert action.shape == (6, len(agent.choices))
    assert torch.equal(agent(obs, action)[1], logprob)


@pytest.mark.parametrize("name", DISCRETE)
def test_sampled_actions_have_the_policys_frequencies(name):
    args, envs, agent = set_up(ppo, f"Guess{name}-v0")
    with torch.no_grad():
        agent.actor[-1].bias.copy_(torch.linspace(-1, 1, sum(agent.choices)))
    obs, space = np.zeros((20_000, 2), np.float32), DISCRETE[name][0]
    actions, greedy = agent.act(obs, agent.noise(20_000)), agent.act(obs[:1])
    assert actions.shape == (20_000, *space.shape) and greedy[0] in space
    actions, greedy = (
        (x - getattr(space, "start", 0)).reshape(len(x), -1) for x in (actions, greedy)
    )
    sampled = agent(torch.zeros(20_000, 2))[0].numpy()
    for k, part in enumerate(agent.actor(torch.zeros(2)).detach().split(agent.choices)):
        for drawn in (actions, sampled):
            frequency = np.bincount(drawn[:, k], minlength=len(part)) / 20_000
            np.testing.assert_allclose(frequency, part.softmax(-1), atol=0.015)
        assert greedy[0, k] == part.argmax()


@pytest.mark.parametrize("env_id", GUESSES)
def test_every_space_is_learned_on(env_id):
    args, envs, agent = set_up(ppo, env_id, num_envs=4, num_steps=128, ent_coef=0.0)
    log, means = Log(), []
    for _ in range(10):
        data = ppo.rollout(agent, envs, log, args)
        means.append(data.rewards[data.valid].mean())
        ppo.update(agent, data, 1e-3, args)
    assert means[-1] > 1.4 * means[0]


@pytest.mark.parametrize(("script", "actor"), [(ppo, "actor"), (SCRIPTS[1], "actor_mean")])
def test_initial_policy_and_networks(script, actor):
    """Traps 29, 30."""
    args, envs, agent = set_up(script)
    for net, gain in ((agent.critic, 1.0), (getattr(agent, actor), 0.01)):
        layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
        for layer, g in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
            w = layer.weight
            w = w if w.shape[0] <= w.shape[1] else w.T
            torch.testing.assert_close(w @ w.T, g**2 * torch.eye(len(w)), atol=1e-5, rtol=1e-4)
            assert not layer.bias.any()
    *_, entropy, _ = agent(torch.randn(100, 2))
    unit_normal = 0.5 * math.log(2 * math.pi * math.e)
    expected = math.log(2) if script is ppo else args.log_std_init + unit_normal
    torch.testing.assert_close(entropy, torch.full((100,), expected), atol=1e-3, rtol=0)


# --- loss and update ------------------------------------------------------------------------------
class Fixed(torch.nn.Module):
    """An agent whose log-probability and value are its parameters."""

    def __init__(self, logprob, value):
        super().__init__()
        self.logprob, self.value = (torch.nn.Parameter(torch.tensor(x)) for x in (logprob, value))

    def forward(self, obs, actions):
        return actions, self.logprob, -self.logprob.detach(), self.value


def loss_of(script, logratio, advantage, value=0.0, old=0.0, target=0.0, **kwargs):
    agent = Fixed([logratio], [value])
    numbers = {"advantages": advantage, "returns": target, "values": old}
    batch = {name: torch.tensor([float(numbers.get(name, 0))]) for name in script.Batch._fields}
    args = script.Args(norm_adv=False, **kwargs)
    loss, metrics = script.ppo_loss(agent, args, script.Batch(**batch))
    loss.backward()
    return metrics, agent.logprob.grad.item(), agent.value.grad.item()


@both
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
def test_clipped_surrogate_is_pessimistic(script, ratio, advantage):
    """Trap 19: no gradient where moving on would only be optimistic. Schulman's k1 and k3 are in
    the columns of CleanRL's names."""
    metrics, grad, _ = loss_of(script, math.log(ratio), advantage)
    inactive = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert grad == pytest.approx(0.0 if inactive else -advantage * ratio, rel=1e-5)
    policy_loss = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    k1, k3 = -math.log(ratio), ratio - 1 - math.log(ratio)
    expected = {
        "policy_loss": policy_loss, "entropy": k1, "old_approx_kl": k1, "approx_kl": k3,
        "clipfrac": float(not 0.8 <= ratio <= 1.2),
    }  # fmt: skip
    found = {name: metrics[name].item() for name in expected}  # k1 is this agent's entropy, too
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


@both
@pytest.mark.parametrize(("value", "target"), [(0.1, 1.0), (0.5, 1.0), (0.5, -1.0), (-0.5, 1.0)])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_value_loss(script, value, target, clip_vloss):
    """Trap 20: the larger of both errors, the clipped one's gradient 0."""
    metrics, _, grad = loss_of(script, 0.0, 0.0, value, 0.0, target, clip_vloss=clip_vloss)
    near = min(max(value, -0.2), 0.2)
    errors = [(value - target) ** 2, (near - target) ** 2 if clip_vloss else 0.0]
    assert metrics["value_loss"].item() == pytest.approx(0.5 * max(errors), rel=1e-5)
    expected = 0.0 if errors[1] > errors[0] else 0.5 * (value - target)  # vf_coef is 0.5
    assert grad == pytest.approx(expected, rel=1e-5)


@both
def test_first_minibatch_has_ratio_one(script):
    """Trap 18, in the second iteration too, when the normaliser has moved."""
    args, envs, agent = set_up(script, "CartPole-v1" if script is ppo else "Pendulum-v1")
    for _ in range(3):
        data, (step, seen) = script.rollout(agent, envs, Log(), args), spying(script)
        metrics = script.update(agent, data, 1e-3, args, step)
        assert abs(seen[0].old_approx_kl) < 1e-6 and abs(seen[0].approx_kl) < 1e-6
        assert seen[0].clipfrac == 0
        floats = [x for name, x in seen[0].batch._asdict().items() if name != "actions"]
        assert {x.dtype for x in floats} == {torch.float32}  # trap 34
        assert agent.adam["parameters"].dtype == torch.float32
        assert seen[-1].approx_kl > 1e-5
        assert vars(seen[0]).keys() == {"batch", "rows", *METRICS}
        for name in METRICS:
            mean = np.mean([vars(one)[name] for one in seen])
            assert metrics[f"losses/{name}"] == pytest.approx(mean, rel=1e-4, abs=1e-6)


@both
def test_every_sample_once_an_epoch(script):
    """Trap 16: in minibatches of nearly equal size, with junk rows, and never one sample alone,
    which has no deviation: not even where each second row is junk."""
    agent, minibatches = set_up(script)[2], []

    def step(agent, adam, batch, rows, learning_rate, args):
        minibatches.append(rows)
        return METRICS, torch.zeros(len(METRICS))

    sizes = [(size, count) for size in (4, 5, 8, 17, 40) for count in range(1, size // 2 + 1)]
    for (size, given), each in itertools.product(sizes, (1, 2)):
        valid = np.arange(size)[:, None] % each == each - 1
        data = random_rollout(script, size, 1)._replace(valid=valid)
        args = script.Args(num_envs=1, num_steps=size, num_minibatches=given, update_epochs=2)
        script.update(agent, data, 1e-3, args, step)
        count = min(given, valid.sum() // 2)
        assert len(minibatches) == 2 * count
        for epoch in (minibatches[:count], minibatches[count:]):
            assert sorted(torch.cat(epoch).tolist()) == np.flatnonzero(valid).tolist()
            lengths = [len(rows) for rows in epoch]
            assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 2
        minibatches.clear()
    with pytest.raises(ValueError, match="--minibatch-size 1"):
        script.Args(num_envs=1, num_steps=15, num_minibatches=8)


@both
def test_target_kl(script):
    """Trap 25: the mean of approx_kl over an epoch's minibatches, tested after each epoch."""

    def epochs(target):
        env_id = "CartPole-v1" if script is ppo else "Pendulum-v1"
        args, envs, agent = set_up(script, env_id, target_kl=target, update_epochs=6)
        step, seen = spying(script)
        script.update(agent, script.rollout(agent, envs, Log(), args), 3e-3, args, step)
        assert agent.adam["steps"] == len(seen)
        return np.array([one.approx_kl for one in seen]).reshape(-1, 4).mean(axis=1)

    kls = epochs(None)
    assert [len(kls), len(epochs(0.0)), len(epochs(1e9))] == [6, 1, 6]
    between = (kls[1] + kls[:3].max()) / 2
    assert len(epochs(between)) == np.argmax(kls > between) + 1 < 6


@both
def test_explained_variance(script):
    """Trap 38: of the values before the update; finite if the returns are constant."""
    args, envs, agent = set_up(script, update_epochs=1)
    data = random_rollout(script, 32, 2)
    if script is ppo_continuous_action:
        agent.obs_moments.update(data.obs[:-1].reshape(-1, 2))
    twin = copy.deepcopy(agent)
    values = twin.get_value(torch.tensor(data.obs)).detach().double().numpy()
    flags = data.terminated, data.truncated
    returns = script.gae(data.rewards, values, *flags, args.gamma, args.gae_lambda) + values[:-1]
    expected = 1 - (returns - values[:-1]).var() / returns.var()
    metrics = script.update(agent, data, 1e-3, args)
    assert metrics["losses/explained_variance"] == pytest.approx(expected, rel=1e-4)
    constant = data._replace(rewards=np.zeros((32, 2)), terminated=np.ones((32, 2), bool))
    assert math.isfinite(script.update(agent, constant, 1e-3, args)["losses/explained_variance"])


# --- numbers of Args, compiled --------------------------------------------------------------------
# Every number of Args that a step uses, and another value
OTHER = {
    "clip_coef": 0.01, "ent_coef": 5.0, "vf_coef": 3.0, "max_grad_norm": 0.01, "norm_adv": False,
    "clip_vloss": None,  # the opposite
}  # fmt: skip


def batch_of(script, agent, rows: int = 64):
    """Normal numbers, and choices of two."""
    local, batch = np.random.default_rng(3), {}
    for field in script.Batch._fields:
        shape = {"obs": (rows, agent.dim), "actions": (rows, 1), "noise": (rows, 1)}
        batch[field] = torch.tensor(local.normal(size=shape.get(field, rows))).float()
    if script is ppo:
        batch["actions"] = (batch["actions"] > 0).long()
    elif "noise" in batch:
        batch["noise"] *= 0
    return script.Batch(**batch)


@pytest.mark.slow
@both
def test_compiled_steps_follow_every_number_of_args(script):
    """One after the other, and back; then a schedule of 20 values, each of its own."""
    args, _, agent = set_up(script, num_envs=2, compile_from=0)
    batch, compiled = batch_of(script, agent), script.compile_step(agent, args)
    assert compiled is not script.minibatch_step
    kept = {name: x.detach().clone() for name, x in agent.adam.items()}

    def step(how, **changed):
        """Metrics and how far the parameters move from where they are kept."""
        for name, x in agent.adam.items():
            x.data.copy_(kept[name])
        given = agent, agent.adam, batch, torch.arange(32), torch.tensor(1e-3)
        numbers = how(*given, dataclasses.replace(args, **changed))[1].clone()
        return [numbers, agent.adam["parameters"].detach() - kept["parameters"]]

    plain, _ = step(script.minibatch_step)
    others = {name: not getattr(args, name) if x is None else x for name, x in OTHER.items()}
    changes = [{name: value} for name, value in others.items()]
    changes += [{"clip_coef": 0.2 - 0.01 * k, "ent_coef": 0.003 * k} for k in range(20)]
    for changed in changes:
        step(compiled)
        numbers, moved = step(script.minibatch_step, **changed)
        found, moved_compiled = step(compiled, **changed)
        torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-6, msg=str(changed))
        torch.testing.assert_close(moved_compiled, moved, rtol=1e-3, atol=1e-6)
        if len(changed) == 1 and "max_grad_norm" not in changed:  # whose effect Adam undoes
            assert not torch.allclose(numbers, plain, rtol=1e-4), changed


SCALE = 1.0


@both
def test_compiled_steps_follow_numbers_that_are_not_in_args(script, monkeypatch):
    """The agent's own, a list's, a global one, and whether it is in training."""

    class Edited(script.Agent):
        def __init__(self, *given):
            super().__init__(*given)
            self.temperature = 1.0
            self.factors = [1.0]

        def get_action_and_value(self, *given):
            action, logprob, entropy, value = super().get_action_and_value(*given)
            value = value * self.factors[0] * SCALE + (0.0 if self.training else 1.0)
            return action, logprob * self.temperature, entropy, value

        forward = get_action_and_value

    plain = torch.compile

    def without_a_compiler(function, options, fullgraph=False):  # in no time
        guards = {name: x for name, x in options.items() if name == "guard_filter_fn"}
        return plain(function, backend="eager", fullgraph=fullgraph, options=guards or None)

    monkeypatch.setattr(script, "Agent", Edited)
    monkeypatch.setattr(torch, "compile", without_a_compiler)
    args, _, agent = set_up(script, num_envs=2, compile_from=0)
    batch, compiled = batch_of(script, agent), script.compile_step(agent, args)
    assert compiled is not script.minibatch_step
    kept = {name: x.detach().clone() for name, x in agent.adam.items()}

    def step(how):
        for name, x in agent.adam.items():
            x.data.copy_(kept[name])
        _, numbers = how(agent, agent.adam, batch, torch.arange(32), torch.tensor(1e-3), args)
        return numbers.clone()

    def check():
        expected, found = step(script.minibatch_step), step(compiled)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

    check()
    for k in range(12):
        agent.temperature = 1.0 + 0.1 * k
        agent.factors[0] = 1.0 - 0.05 * k
        check()
    agent.eval()
    check()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    check()


# --- a whole update beside Stable-Baselines3's ----------------------------------------------------
@both
@pytest.mark.parametrize("ent_coef", [0.0, 0.01])
def test_one_update_is_stable_baselines3s(script, ent_coef, monkeypatch):
    """Traps 17, 21, 26, 29: from the same weights and stored rollout, in the same index order, all
    epochs and minibatches leave the same parameters."""
    T, N, D = 64, 4, 3
    spaces_ = {"observation_space": spaces.Box(-np.inf, np.inf, (D,), np.float32)}
    spaces_["action_space"] = spaces.Discrete(3) if script is ppo else spaces.Box(-1, 1, (2,))
    Env = type("Env", (gym.Env,), spaces_)
    args = script.Args(
        num_envs=N, num_steps=T, num_minibatches=8, update_epochs=10, clip_vloss=False,
        ent_coef=ent_coef, max_grad_norm=0.1, target_kl=None,
    )  # fmt: skip
    agent = make_agent(script, Env(), args)
    data = random_rollout(script, T, N, D, 1 if script is ppo else 2, 3, ends=0.05)
    if script is ppo_continuous_action:  # an identity
        agent.obs_moments.count.fill_(1e-9)

    model = stable_baselines3.PPO(
        "MlpPolicy", stable_baselines3.common.vec_env.DummyVecEnv([Env] * N), learning_rate=3e-4,
        n_steps=T, batch_size=T * N // 8, n_epochs=10, gamma=args.gamma, gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef, ent_coef=ent_coef, max_grad_norm=args.max_grad_norm,
        device="cpu", vf_coef=args.vf_coef / 2,  # SB3's squared error has no 1/2
        policy_kwargs={"net_arch": [64, 64]},
    )  # fmt: skip
    model.set_logger(Logger(None, []))
    extractor, policy = model.policy.mlp_extractor, model.policy
    ours = [*(agent.actor if script is ppo else agent.actor_mean)[::2], *agent.critic[::2]]
    theirs = [*extractor.policy_net[::2], policy.action_net]
    theirs += [*extractor.value_net[::2], policy.value_net]
    for mine, sb3 in zip(ours, theirs, strict=True):
        sb3.load_state_dict(mine.state_dict())
    if script is ppo_continuous_action:
        policy.log_std.data.copy_(agent.actor_logstd)

    # the rollout as SB3 stores it: a start flag where the step before ended an episode
    starts = np.zeros(N, bool)
    with torch.no_grad():
        for t in range(T):
            obs, acts = torch.tensor(data.obs[t]), torch.tensor(data.actions[t])
            chosen = acts.squeeze(-1) if script is ppo else acts
            values, logprobs, _ = policy.evaluate_actions(obs, chosen)
            stored = data.obs[t], data.actions[t], data.rewards[t], starts, values, logprobs
            model.rollout_buffer.add(*stored)
            starts = data.terminated[t]
        last = policy.predict_values(torch.tensor(data.obs[T]))
    model.rollout_buffer.compute_returns_and_advantage(last, dones=starts)

    orders = [np.random.default_rng(k).permutation(T * N) for k in range(10)]
    sb3s = iter(orders)  # environment after environment there, step after step here
    monkeypatch.setattr(np.random, "permutation", lambda size: next(sb3s))
    mine = iter([(order % T) * N + order // T for order in orders])
    agent.rng = SimpleNamespace(permutation=lambda rows: next(mine))
    before = agent.adam["parameters"].clone()
    model._current_progress_remaining = 1.0
    model.train()
    step, seen = spying(script)
    script.update(agent, data, 3e-4, args, step)

    assert max(one.grad_norm for one in seen) > 2 * args.max_grad_norm
    assert (agent.adam["parameters"] - before).abs().max() > 5e-3  # 80 steps went somewhere
    for mine, sb3 in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.weight, sb3.weight, atol=1e-5, rtol=0)
        torch.testing.assert_close(mine.bias, sb3.bias, atol=1e-5, rtol=0)
    if script is ppo_continuous_action:
        torch.testing.assert_close(agent.actor_logstd, policy.log_std, atol=1e-5, rtol=0)
