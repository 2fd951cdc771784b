"""ppo.py and ppo_continuous_action.py: the mathematics, against Stable-Baselines3, brute force and
environments whose values are known. "Trap n" is a known way in which implementations go wrong."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger

import ppo
import ppo_continuous_action

SCRIPTS = [ppo, ppo_continuous_action]
both = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
rng = np.random.default_rng(0)


class Clock(gym.Env):
    """Pays 1 a step and ends after `lengths[k]` steps in its k-th episode, in the same array each
    time; observes (episode, steps so far), and demands what an environment may demand."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, lengths=(1000,), discrete=False):
        self.lengths, self.episode, self.over = lengths, -1, True
        self.obs = np.zeros(2)
        if discrete:
            self.action_space = spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.over = self.episode + 1, False
        self.obs[:] = self.episode, 0
        return self.obs, {}

    def step(self, action):
        assert not self.over, "stepped beyond the end"
        assert self.action_space.contains(action), action
        self.obs[1] += 1
        self.over = self.obs[1] == self.lengths[self.episode % len(self.lengths)]
        return self.obs, 1.0, bool(self.over), False, {}


for name, discrete in (("Clock", False), ("DiscreteClock", True)):
    gym.register(f"{name}-v0", Clock, kwargs={"discrete": discrete})
    gym.register(f"{name}Limit7-v0", Clock, kwargs={"discrete": discrete}, max_episode_steps=7)
    short = {"lengths": (5, 3), "discrete": discrete}
    gym.register(f"{name}Ends5and3-v0", Clock, kwargs=short, max_episode_steps=5)


class Log:
    """What rollout needs of a Run."""

    def __init__(self):
        self.global_step, self.rows, self.lines = 0, [], []

    def log_episode(self, step, episodic_return, length):
        self.rows.append((step, episodic_return, length))


def make_agent(script, envs, args):
    torch.manual_seed(0)
    agent = script.Agent(envs, args)
    agent.optimizer = script.FlatAdam(agent)
    agent.minibatch_step = script.minibatch_step
    agent.refresh_actor()
    return agent


def set_up(script, env_id="Clock-v0", **kwargs):
    """Args, environments and an agent; Clock-v0 stands for the Clock of the script's actions."""
    if script is ppo and "Clock" in env_id:
        env_id = f"Discrete{env_id}"
    args = script.Args(env_id=env_id, **kwargs)
    envs = script.make_envs(args)
    return args, envs, make_agent(script, envs, args)


# --- advantages -----------------------------------------------------------------------------------


@both
def test_gae_by_hand(script):
    """Trap 10: flags at index t belong to the step taken at t."""
    flags = np.zeros((2, 4, 1), bool)
    flags[1, 1] = True  # truncated in the second step; the third row is junk
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0])[:, None]
    rewards = np.array([1.0, 1.0, 99.0, 1.0])[:, None]
    advantages = script.gae(rewards, values, *flags, 0.5, 0.5)[:, 0]
    second = 1 + 0.5 * 4 - 2  # bootstraps from the true last observation's value, in row 2
    assert advantages[[0, 1, 3]] == pytest.approx([1 + 0.5 * 2 - 1 + 0.25 * second, second, 1.0])
    flags = flags[::-1]  # the same, terminated
    advantages = script.gae(rewards, values, *flags, 0.5, 0.5)[:, 0]
    assert advantages[[0, 1, 3]] == pytest.approx([1 + 0.5 * 2 - 1 + 0.25 * -1.0, -1.0, 1.0])
    both_flags = np.logical_or(flags, flags[::-1])  # trap 2: terminated and truncated
    assert script.gae(rewards, values, *both_flags, 0.5, 0.5)[1, 0] == -1.0


def brute_force(rewards, values, terminated, truncated, gamma, gae_lambda):
    """A_t as the sum over k of (gamma lambda)^k delta_{t+k}, to the end of t's episode."""
    T, N = rewards.shape
    advantages = np.zeros((T, N))
    for i in range(N):
        for t in range(T):
            for k in range(t, T):
                delta = rewards[k, i] - values[k, i]
                if not terminated[k, i]:
                    delta += gamma * values[k + 1, i]
                advantages[t, i] += (gamma * gae_lambda) ** (k - t) * delta
                if terminated[k, i] or truncated[k, i]:
                    break
    return advantages


@both
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_gae_is_the_brute_force_sum(script, data):
    T, N = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    kinds = st.sampled_from(["go", "go", "go", "terminated", "truncated", "both"])
    drawn = np.array(data.draw(st.lists(kinds, min_size=T * N, max_size=T * N))).reshape(T, N)
    gamma, gae_lambda = (data.draw(st.sampled_from([0.0, 0.9, 1.0])) for _ in range(2))
    local = np.random.default_rng(data.draw(st.integers(0, 999)))
    rewards, values = local.normal(size=(T, N)), local.normal(size=(T + 1, N))
    valid = np.ones((T, N), bool)
    for t in range(1, T):  # the row after an end is junk, and ends nothing
        valid[t] = (drawn[t - 1] == "go") | ~valid[t - 1]
        drawn[t][~valid[t]] = "go"
    terminated, truncated = (
        np.isin(drawn, ["terminated", "both"]),
        np.isin(drawn, ["truncated", "both"]),
    )
    expected = brute_force(rewards, values, terminated, truncated, gamma, gae_lambda)
    rewards[~valid] = np.nan
    advantages = script.gae(rewards, values, terminated, truncated, gamma, gae_lambda)
    np.testing.assert_allclose(advantages[valid], expected[valid], atol=1e-12)


# --- episode ends ---------------------------------------------------------------------------------


def backend(script, name, env_id, n):
    if script is ppo:
        env_id = f"Discrete{env_id}"
    thunks = [script.make_env(env_id, i, False, "") for i in range(n)]
    if name == "gymnasium":
        return script.GymnasiumEnvs(thunks)
    if name == "async":
        return gym.vector.AsyncVectorEnv(thunks)
    if name == "sync":
        return gym.vector.SyncVectorEnv(thunks)
    return gym.vector.SyncVectorEnv([lambda: gym.make(env_id, disable_env_checker=True)] * n)


@both
@pytest.mark.parametrize("name", ["gymnasium", "async", "sync", "sync, plain environments"])
def test_truncation_bootstraps_and_termination_does_not(script, name, monkeypatch):
    """Traps 1, 3, 4, 36, 45. Where all rewards are 1 the value is 1 / (1 - gamma) if nothing ends
    but by a time limit; a critic that says so leaves no advantage."""
    if script is ppo_continuous_action:
        monkeypatch.setattr(script, "scale_rewards", lambda agent, envs, data, gamma: data.rewards)
    args = script.Args(num_envs=3, num_steps=41, gamma=0.9)
    for env_id, ends in (("ClockLimit7-v0", "truncated"), ("ClockEnds5and3-v0", "terminated")):
        envs = script.Envs(backend(script, name, env_id, 3))
        agent, log = make_agent(script, envs, args), Log()
        data = script.rollout(agent, envs, log, args)
        envs.close()
        values = np.full((42, 3), 10.0)
        flags = data.terminated, data.truncated
        advantages = script.gae(data.rewards, values, *flags, 0.9, 0.95)

        for i in range(3):  # no two episodes meet in a row, and none of an episode is lost
            steps = data.obs[:-1, i, 1][data.valid[:, i]]
            lengths = [7] if ends == "truncated" else [5, 3]
            assert (
                list(steps)
                == [t for _ in range(41) for n in lengths for t in range(n)][: len(steps)]
            )
            lasts = data.obs[:-1, i, 1][~data.valid[:, i]]
            assert list(lasts) == [*lengths * 41][: len(lasts)]
            assert (np.diff(data.obs[:, i, 0])[~data.valid[:, i]] == 1).all()
        assert log.global_step == data.valid.sum()
        ended = (flags[0] | flags[1]).sum()
        assert len(log.rows) == ended == len(log.lines) > 9
        assert sorted({length for _, _, length in log.rows}) == sorted(lengths)
        assert all(ret == length for _, ret, length in log.rows)
        if ends == "truncated":
            assert not flags[0].any()
            assert np.abs(advantages[data.valid]).max() < 1e-12
        else:  # the five-step episodes end at the time limit as well
            assert (flags[1] <= flags[0]).all()
            np.testing.assert_allclose(advantages[data.valid & flags[0]], 1.0 - 10.0)


@both
def test_truncation_and_termination_through_envpool(script, monkeypatch):
    import envpool

    if script is ppo_continuous_action:
        monkeypatch.setattr(script, "scale_rewards", lambda agent, envs, data, gamma: data.rewards)
    env_id, limit = ("CartPole-v1", 12) if script is ppo else ("InvertedPendulum-v4", 9)
    args = script.Args(num_envs=4, num_steps=100, gamma=0.9)
    pool = envpool.make(
        env_id, env_type="gymnasium", num_envs=4, seed=[3, 4, 5, 6], max_episode_steps=limit
    )
    envs, log = script.Envs(pool), Log()
    data = script.rollout(make_agent(script, envs, args), envs, log, args)
    flags = data.terminated, data.truncated
    assert min(flags[0].sum(), flags[1].sum()) >= 3
    values = np.full((101, 4), 10.0)
    expected = brute_force(data.rewards, values, *flags, 0.9, 0.95)[data.valid]
    advantages = script.gae(data.rewards, values, *flags, 0.9, 0.95)[data.valid]
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    ends = (flags[0] | flags[1])[:-1]
    assert (data.valid[1:] == ~ends).all()
    assert sum(length for _, _, length in log.rows) <= log.global_step == data.valid.sum()
    truncated = [length for _, _, length in log.rows if length == limit]
    assert len(truncated) == flags[1].sum()


@both
def test_a_rollout_goes_on_where_the_last_one_stopped(script):
    """Trap 46, and returns of episodes that span rollouts."""
    args, envs, agent = set_up(script, "ClockEnds5and3-v0", num_envs=2, num_steps=4)
    log = Log()
    first, second = (script.rollout(agent, envs, log, args) for _ in range(2))
    assert (second.obs[0] == first.obs[-1]).all()
    assert first.obs[:, 0, 1].tolist() == [0, 1, 2, 3, 4]
    assert second.obs[:, 0, 1].tolist() == [4, 5, 0, 1, 2]
    assert second.valid[:, 0].tolist() == [True, False, True, True]
    assert log.rows == [(10, 5.0, 5), (10, 5.0, 5)]
    assert log.global_step == 14
    third = script.rollout(agent, envs, log, args)
    assert log.rows[2:] == [(16, 3.0, 3)] * 2
    assert third.obs.base is None or third.obs.base is not second.obs  # trap 33: rows are copies


class PoisonedEnvs:
    """Wraps vectorised environments; what a junk transition returns beside its observation is
    poison."""

    def __init__(self, vector, poison):
        self.vector, self.poison, self.over = vector, poison, False
        self.single_observation_space = vector.single_observation_space
        self.single_action_space = vector.single_action_space

    def reset(self):
        return self.vector.reset()

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.vector.step(actions)
        rewards = np.where(self.over, self.poison, rewards)
        self.over = terminated | truncated
        return obs, rewards, terminated, truncated, infos


@both
def test_junk_transitions_reach_nothing(script):
    """Trap 4: NaN in every junk reward and action changes no bit of what is learned or logged."""
    results = []
    for poison in (0.0, np.nan):
        args, envs, _ = set_up(
            script, "ClockEnds5and3-v0", num_envs=2, num_steps=20, num_minibatches=3
        )
        envs, log = script.Envs(PoisonedEnvs(envs.vector, poison)), Log()
        agent = make_agent(script, envs, args)
        metrics = []
        for _ in range(3):
            data = script.rollout(agent, envs, log, args)
            assert (~data.valid).sum() > 4
            rewards = np.where(data.valid, data.rewards, poison)
            actions = data.actions
            if script is ppo_continuous_action:
                actions = np.where(data.valid[..., None], actions, np.float32(poison))
            data = data._replace(rewards=rewards, actions=actions)
            metrics.append(script.update(agent, data, 1e-3, args))
        results.append((agent.state_dict(), metrics, log.rows))
    (clean, *logs), (poisoned, *poisoned_logs) = results
    assert logs == poisoned_logs
    for name, value in clean.items():
        assert torch.equal(value, poisoned[name]), name
        assert value.isfinite().all()


# --- normalisers ----------------------------------------------------------------------------------


def test_reward_scaling_by_the_loop_it_stands_for():
    """Traps 12, 13, 14: one scale for all environments, from returns that end with the episode,
    whatever ended it; no mean is subtracted; rewards of junk rows do not count."""
    script, T, N = ppo_continuous_action, 30, 3
    args, envs, agent = set_up(script, num_envs=N)
    seen, running = [], np.zeros(N)
    previous = np.zeros(N, bool)
    for _ in range(2):
        flags = rng.random((2, T, N)) < 0.1
        rewards = rng.normal(3.0, 20.0, (T, N))
        valid = np.ones((T, N), bool)
        for t in range(T):
            valid[t], flags[:, t] = ~previous, flags[:, t] & ~previous
            previous = flags[:, t].any(axis=0)
        rewards[~valid] = 0.0
        data = script.Rollout(None, None, rewards, *flags, valid)
        scaled = script.scale_rewards(agent, envs, data, 0.9)
        for t in range(T):
            running = 0.9 * running + rewards[t]
            seen += list(running[valid[t]])
            running[flags[:, t].any(axis=0)] = 0.0
        expected = np.clip(rewards / np.sqrt(np.var(seen) + 1e-8), -10, 10)
        np.testing.assert_allclose(scaled, expected, rtol=1e-9)
        np.testing.assert_allclose(envs.discounted, running)


def test_moments_are_those_of_all_that_was_seen():
    moments = ppo_continuous_action.RunningMoments((4,))
    batches = [rng.normal(1000.0, [1e-2, 1, 5, 100], (n, 4)) for n in (1, 7, 0, 300)]
    for batch in batches:
        moments.update(batch)
    seen = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean, seen.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, seen.var(axis=0), rtol=1e-6)
    assert moments.count == 308


def test_observations_are_normalized_and_clipped():
    """Traps 5, 11: the same for every observation, and from the agent's own buffers."""
    args, envs, agent = set_up(ppo_continuous_action)
    agent.obs_moments.update(rng.normal(5.0, 2.0, (5000, 2)))
    agent.refresh_actor()
    obs = torch.tensor([[5.0, 7.0], [1e6, -1e6]])
    normal = agent.normalize(obs)
    assert normal.dtype == torch.float32
    torch.testing.assert_close(normal[0], torch.tensor([0.0, 1.0]), atol=0.1, rtol=0)
    assert normal[1].tolist() == [10.0, -10.0]
    assert torch.equal(agent.get_value(obs), agent.critic(normal).squeeze(-1))
    copy = ppo_continuous_action.Agent(envs, args)
    copy.load_state_dict(agent.state_dict())
    copy.refresh_actor()
    np.testing.assert_array_equal(copy.act(obs.numpy()), agent.act(obs.numpy()))


def test_moments_used_in_a_rollout_are_those_of_its_update(monkeypatch):
    """The policy that acted is the one whose probabilities the update starts from."""
    script = ppo_continuous_action
    args, envs, agent = set_up(script, "Pendulum-v1", num_steps=50, num_minibatches=2)
    acting, learning = [], []
    monkeypatch.setattr(
        script,
        "gae",
        lambda *a, plain=script.gae: learning.append(agent.obs_moments.mean.clone()) or plain(*a),
    )
    counts = []
    for _ in range(3):
        data = script.rollout(agent, envs, Log(), args)
        acting.append(torch.tensor(agent.shift))
        script.update(agent, data, 1e-3, args)
        counts.append(int(agent.obs_moments.count))
    assert counts == [50, 100, 150]
    for k in (1, 2):  # the first update has nothing to normalize by but its own rollout
        assert torch.equal(acting[k], learning[k].float())


# --- policies -------------------------------------------------------------------------------------


def test_log_density_and_entropy_are_those_of_torch():
    """Trap 22, for a box that is neither centred nor of unit size; actions are in its units."""
    space = spaces.Box(np.array([-2.0, 0.0]), np.array([4.0, 1.0]), dtype=np.float32)
    env = type("Env", (), {"observation_space": Clock.observation_space, "action_space": space})
    agent = ppo_continuous_action.Agent(env, ppo_continuous_action.Args(log_std_init=-0.3))
    features, actions = torch.randn(50, 2), torch.randn(50, 2)
    mean = torch.tensor([1.0, 0.5]) + torch.tensor([3.0, 0.5]) * agent.actor_mean(features)
    normal = torch.distributions.Normal(mean, math.exp(-0.3) * torch.tensor([3.0, 0.5]))
    logprob, entropy, value = agent(features, actions)
    torch.testing.assert_close(logprob, normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    assert value.shape == (50,)
    plain = ppo_continuous_action.Agent(env, ppo_continuous_action.Args(scale_actions=False))
    assert (plain.origin.tolist(), plain.unit.tolist()) == ([0, 0], [1, 1])


def test_numpy_policy_is_the_torch_policy():
    args, envs, agent = set_up(ppo_continuous_action, "Pendulum-v1", num_envs=5)
    agent.obs_moments.update(rng.normal(size=(99, 3)))
    agent.refresh_actor()
    obs, noise = rng.normal(size=(5, 3)).astype(np.float32), agent.noise(5)
    mean = agent.origin + agent.unit * agent.actor_mean(agent.normalize(torch.tensor(obs)))
    std = agent.unit * agent.actor_logstd.exp()
    np.testing.assert_allclose(agent.act(obs), mean.detach(), atol=1e-6)
    expected = (mean + std * torch.tensor(noise)).detach()
    np.testing.assert_allclose(agent.act(obs, noise), expected, atol=1e-6)


@pytest.mark.parametrize("scale_actions", [True, False])
def test_stored_actions_are_not_clipped_and_those_taken_are(scale_actions, monkeypatch):
    """Traps 22, 23."""
    args, envs, agent = set_up(
        ppo_continuous_action, "Pendulum-v1", num_steps=200, log_std_init=1.0,
        scale_actions=scale_actions,
    )  # fmt: skip
    taken, step = [], envs.vector.step
    monkeypatch.setattr(envs.vector, "step", lambda a: taken.append(a.copy()) or step(a))
    data = ppo_continuous_action.rollout(agent, envs, Log(), args)
    assert np.abs(data.actions).max() > 4
    np.testing.assert_array_equal(np.array(taken), np.clip(data.actions, -2, 2))
    std = data.actions.std()
    assert std == pytest.approx(math.e * (2 if scale_actions else 1), rel=0.15)


def test_unbounded_actions_are_not_scaled():
    env = type("Env", (), {"observation_space": Clock.observation_space})
    env.action_space = spaces.Box(-np.inf, np.inf, (3,))
    agent = ppo_continuous_action.Agent(env)
    assert (agent.origin.tolist(), agent.unit.tolist()) == ([0] * 3, [1] * 3)


def test_an_action_with_no_room_has_a_unit_of_1():
    box = gym.spaces.Box(np.float32([-1, 2]), np.float32([3, 2]))
    envs = SimpleNamespace(observation_space=gym.spaces.Box(-1, 1, (3,)), action_space=box)
    agent = ppo_continuous_action.Agent(envs)
    assert (agent.origin.tolist(), agent.unit.tolist()) == ([1, 2], [2, 1])
    _, logprob, entropy, _ = agent.get_action_and_value(torch.zeros(4, 3))
    assert logprob.isfinite().all() and entropy.isfinite().all()


DISCRETE = {
    "discrete": spaces.Discrete(4, start=3),
    "multi-discrete": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "multi-binary": spaces.MultiBinary(3),
}


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
        return (
            self.observation_space.sample(),
            reward,
            bool(self.np_random.random() < 0.1),
            False,
            {},
        )


for name, space in DISCRETE.items():
    gym.register(f"Guess{name}-v0", Guess, kwargs={"action_space": space})
OBSERVATIONS = {
    "Discrete": spaces.Discrete(5),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(4),
    "Dict": spaces.Dict({"a": spaces.Box(-1, 1, (2, 2)), "b": spaces.Discrete(3)}),
}
for name, space in OBSERVATIONS.items():
    kwargs = {"action_space": spaces.Discrete(5), "observation_space": space}
    gym.register(f"See{name}-v0", Guess, kwargs=kwargs)


@pytest.mark.parametrize("name", DISCRETE)
def test_joint_log_probability_of_branches_is_the_sum(name):
    """Trap 43."""
    args, envs, agent = set_up(ppo, f"Guess{name}-v0", num_envs=6)
    choices = {"discrete": [4], "multi-discrete": [2, 3, 4, 2], "multi-binary": [2, 2, 2]}[name]
    assert agent.choices == choices
    features = torch.randn(6, 2)
    with torch.no_grad():  # not the nearly uniform policy of the start
        agent.actor[-1].weight.mul_(100)
        logits = agent.actor(features).split(choices, dim=-1)
    actions = torch.stack([torch.randint(n, (6,)) for n in choices], dim=-1)
    parts = [torch.distributions.Categorical(logits=part) for part in logits]
    logprob, entropy, _ = agent(features, actions)
    expected = sum(part.log_prob(a) for part, a in zip(parts, actions.unbind(-1), strict=True))
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))

    action, logprob, entropy, value = agent.get_action_and_value(features)
    assert action.shape == (6, *envs.single_action_space.shape)
    again = agent.get_action_and_value(features, action)
    assert torch.equal(again[1], logprob)


@pytest.mark.parametrize("name", DISCRETE)
def test_sampled_actions_have_the_policys_frequencies(name):
    args, envs, agent = set_up(ppo, f"Guess{name}-v0")
    with torch.no_grad():
        agent.actor[-1].bias.copy_(torch.linspace(-1, 1, sum(agent.choices)))
    obs = np.zeros((20_000, 2), np.float32)
    actions = agent.act(obs, agent.noise(20_000))
    greedy = agent.act(obs[:1])
    logits = agent.actor(torch.zeros(2)).detach().split(agent.choices)
    for k, part in enumerate(logits):
        frequency = np.bincount(actions[:, k], minlength=len(part)) / 20_000
        np.testing.assert_allclose(frequency, part.softmax(-1), atol=0.015)
        assert greedy[0, k] == part.argmax()


@pytest.mark.parametrize(
    "name", [*(f"Guess{n}" for n in DISCRETE), *(f"See{n}" for n in OBSERVATIONS)]
)
def test_every_space_is_learned_on(name):
    args, envs, agent = set_up(ppo, f"{name}-v0", num_envs=4, ent_coef=0.0)
    log = Log()
    means = []
    for _ in range(12):
        data = ppo.rollout(agent, envs, log, args)
        means.append(data.rewards[data.valid].mean())
        ppo.update(agent, data, 1e-3, args)
    assert means[-1] > 1.4 * means[0]


def test_initial_policy_and_networks():
    """Traps 29, 30."""
    for script, final in ((ppo, "actor"), (ppo_continuous_action, "actor_mean")):
        args, envs, agent = set_up(script)
        for net, gain in ((agent.critic, 1.0), (getattr(agent, final), 0.01)):
            layers = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
            assert len(layers) == 3
            for layer, g in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
                w = (
                    layer.weight
                    if layer.weight.shape[0] <= layer.weight.shape[1]
                    else layer.weight.T
                )
                torch.testing.assert_close(w @ w.T, g**2 * torch.eye(len(w)), atol=1e-5, rtol=1e-4)
                assert not layer.bias.any()
    args, envs, agent = set_up(ppo, "Guessdiscrete-v0")
    _, entropy, _ = agent(torch.randn(100, 2), torch.zeros(100, 1, dtype=torch.int64))
    torch.testing.assert_close(entropy, torch.full((100,), math.log(4)), atol=1e-3, rtol=0)


@both
def test_pixels_are_refused(script, capsys):
    pixels = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    kwargs = {"action_space": spaces.Discrete(5), "observation_space": pixels}
    gym.register("SeePixels-v0", Guess, kwargs=kwargs)
    with pytest.raises(SystemExit) as end:
        script.make_envs(script.Args(env_id="SeePixels-v0"))
    assert end.value.code == 2
    assert "this script needs one flat Box" in capsys.readouterr().err


# --- loss and update ------------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """An agent whose log-probability and value are its parameters."""

    def __init__(self, logprob, value):
        super().__init__()
        self.logprob, self.value = (torch.nn.Parameter(torch.tensor(x)) for x in (logprob, value))

    def forward(self, features, actions):
        return self.logprob, -self.logprob.detach(), self.value


def loss_of(script, logratio, advantage, value=0.0, old=0.0, target=0.0, **kwargs):
    agent = Fixed([logratio], [value])
    tensors = [torch.tensor([float(x)]) for x in (0, 0, 0, advantage, target, old)]
    args = script.Args(norm_adv=False, **kwargs)
    loss, metrics = script.ppo_loss(
        agent, dict(agent.named_parameters()), script.Batch(*tensors), args
    )
    loss.backward()
    return metrics, agent.logprob.grad.item(), agent.value.grad.item()


@both
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
def test_clipped_surrogate_is_pessimistic(script, ratio, advantage):
    """Trap 19: no gradient where moving on would only be optimistic."""
    (_, policy_loss, *_, clipfrac), grad, _ = loss_of(script, math.log(ratio), advantage)
    inactive = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert grad == pytest.approx(0.0 if inactive else -advantage * ratio, rel=1e-5)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert policy_loss.item() == pytest.approx(expected, rel=1e-5)
    assert clipfrac.item() == (not 0.8 <= ratio <= 1.2)


@both
@pytest.mark.parametrize(("value", "target"), [(0.1, 1.0), (0.5, 1.0), (0.5, -1.0), (-0.5, 1.0)])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_value_loss(script, value, target, clip_vloss):
    """Trap 20: the larger of both errors, the clipped one's gradient 0."""
    metrics, _, grad = loss_of(script, 0.0, 0.0, value, 0.0, target, clip_vloss=clip_vloss)
    near = min(max(value, -0.2), 0.2)
    errors = [(value - target) ** 2, (near - target) ** 2 if clip_vloss else 0.0]
    assert metrics[0].item() == pytest.approx(0.5 * max(errors), rel=1e-5)
    expected = 0.0 if errors[1] > errors[0] else 0.5 * (value - target)  # vf_coef is 0.5
    assert grad == pytest.approx(expected, rel=1e-5)


@both
def test_kl_estimators(script):
    """Schulman's k1 and k3 in the columns of CleanRL's names."""
    metrics, _, _ = loss_of(script, 0.3, 1.0)
    _, _, entropy, old_approx_kl, approx_kl, _ = (m.item() for m in metrics)
    assert old_approx_kl == pytest.approx(-0.3)
    assert approx_kl == pytest.approx(math.exp(0.3) - 1 - 0.3, rel=1e-5)
    assert entropy == pytest.approx(-0.3)


@both
def test_entropy_bonus_raises_entropy(script):
    """Trap 21."""
    args, envs, agent = set_up(script, num_envs=2, num_steps=16, ent_coef=1.0, vf_coef=0.0)
    data = script.rollout(agent, envs, Log(), args)
    rewards = np.zeros_like(data.rewards)
    with torch.no_grad():
        for parameter in agent.critic.parameters():
            parameter.zero_()
        if script is ppo:
            agent.actor[-1].bias.copy_(torch.tensor([1.0, -1.0]))
    metrics = [script.update(agent, data._replace(rewards=rewards), 1e-3, args) for _ in range(2)]
    assert metrics[1]["losses/entropy"] > metrics[0]["losses/entropy"] + 1e-4


@both
def test_flat_adam_is_torchs_with_clipping(script):
    """Traps 26, 29: 40 steps beside torch.optim.Adam and clip_grad_norm_ on the same losses."""
    args, envs, agent = set_up(script, num_envs=4, num_steps=16, clip_vloss=True)
    _, _, twin = set_up(script, num_envs=4, num_steps=16, clip_vloss=True)
    del twin.optimizer
    adam = torch.optim.Adam(twin.parameters(), lr=1e-2, eps=1e-5)
    B, norms = 64, []
    actions = torch.randint(2, (B, 1)) if script is ppo else torch.randn(B, 1)
    batch = script.Batch(torch.randn(B, 2), actions, *(torch.randn(4, B) * 3))
    learning_rate = torch.tensor(1e-2)
    for _ in range(40):
        rows = torch.randperm(B)[:32]
        loss, _ = script.ppo_loss(
            twin, dict(twin.named_parameters()), script.Batch(*(x[rows] for x in batch)), args
        )
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(twin.parameters(), args.max_grad_norm))
        adam.step()
        metrics = script.minibatch_step(agent, batch, rows, learning_rate, args)
        assert metrics[-1].item() == pytest.approx(norms[-1].item(), rel=1e-3)
    assert max(norms) > 2 * args.max_grad_norm
    for p, q in zip(agent.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-5, rtol=1e-4)


@both
def test_first_minibatch_has_ratio_one(script):
    """Trap 18, in the second iteration too, when the normaliser has moved."""
    env_id = "CartPole-v1" if script is ppo else "Pendulum-v1"
    args, envs, agent = set_up(script, env_id, num_envs=2, num_steps=64)
    plain, seen = agent.minibatch_step, []

    def spy(*inputs):
        metrics = plain(*inputs)
        seen.append(dict(zip(script.METRICS, metrics.tolist(), strict=True)))
        return metrics

    agent.minibatch_step = spy
    for _ in range(3):
        data = script.rollout(agent, envs, Log(), args)
        seen.clear()
        script.update(agent, data, 1e-3, args)
        assert abs(seen[0]["old_approx_kl"]) < 1e-6
        assert abs(seen[0]["approx_kl"]) < 1e-6
        assert seen[0]["clipfrac"] == 0
        assert seen[-1]["approx_kl"] > 1e-5


def random_rollout(script, T, N, obs_dim=2, actions=1, choices=2, ends=0.0):
    shape = (T, N, actions)
    if script is ppo:
        acts = rng.integers(0, choices, shape)
    else:
        acts = rng.normal(size=shape).astype(np.float32)
    terminated = rng.random((T, N)) < ends
    valid = np.ones((T, N), bool)
    return script.Rollout(
        rng.normal(size=(T + 1, N, obs_dim)).astype(np.float32), acts, rng.normal(size=(T, N)),
        terminated, np.zeros((T, N), bool), valid,
    )  # fmt: skip


@both
def test_every_sample_once_an_epoch(script, monkeypatch):
    """Trap 16, for all batches up to 20 and minibatches up to 25, with junk rows."""
    args, envs, agent = set_up(script)
    seen = []

    def step(agent, batch, rows, learning_rate, args):
        seen.append(rows)
        return torch.zeros(7)

    agent.minibatch_step = step
    monkeypatch.setattr(script, "minibatch_step", step)  # which single samples go to
    for size in range(1, 21):
        data = random_rollout(script, size, 1)
        junk = rng.random((size, 1)) < 0.2
        data = data._replace(valid=~junk)
        for num_minibatches in range(1, 26):
            seen.clear()
            args = script.Args(num_minibatches=num_minibatches, update_epochs=2)
            script.update(agent, data, 1e-3, args)
            rows = np.flatnonzero(~junk)
            count = min(num_minibatches, len(rows))
            assert len(seen) == 2 * count
            for epoch in (seen[:count], seen[count:]):
                assert sorted(torch.cat(epoch).tolist()) == rows.tolist() if count else not seen
                sizes = [len(minibatch) for minibatch in epoch]
                assert not sizes or max(sizes) - min(sizes) <= 1


@both
@pytest.mark.parametrize(("T", "num_minibatches"), [(4, 4), (100, 3), (7, 1), (1, 1)])
def test_minibatches_of_one_sample_and_batches_that_do_not_divide(script, T, num_minibatches):
    """Traps 15, 16: CleanRL's parameters become NaN here, or it stops."""
    args, envs, agent = set_up(script, num_envs=1, num_steps=T, num_minibatches=num_minibatches)
    for _ in range(3):
        metrics = script.update(agent, script.rollout(agent, envs, Log(), args), 1e-3, args)
        assert all(
            math.isfinite(value) for name, value in metrics.items() if "explained" not in name
        )
    assert agent.optimizer.parameters.isfinite().all()
    assert agent.optimizer.steps == 3 * args.update_epochs * num_minibatches


@both
def test_advantages_are_normalized_per_minibatch(script):
    """Trap 17: sample deviation, epsilon outside the root."""
    args, envs, agent = set_up(script)
    data = random_rollout(script, 8, 1)
    advantages = torch.tensor([1.0, 2.0, 4.0, 8.0])
    fields = torch.randn(4, 2), torch.as_tensor(data.actions[:4, 0]), torch.randn(4)
    batch = script.Batch(*fields, advantages, torch.zeros(4), torch.zeros(4))
    normal = (advantages - advantages.mean()) / (np.std(advantages.numpy(), ddof=1) + 1e-8)
    parameters = dict(agent.named_parameters())
    _, with_norm = script.ppo_loss(agent, parameters, batch, args)
    plain = script.Args(norm_adv=False)
    _, without = script.ppo_loss(agent, parameters, batch._replace(advantages=normal), plain)
    assert with_norm[1].item() == pytest.approx(without[1].item(), rel=1e-5)


@both
def test_target_kl(script):
    """Trap 25: the mean of approx_kl over an epoch's minibatches, tested after each epoch."""
    env_id = "CartPole-v1" if script is ppo else "Pendulum-v1"
    sizes = {"num_steps": 64, "num_minibatches": 4, "update_epochs": 6, "num_envs": 1}
    kls = []
    for target in (None, 0.0, math.inf):
        args, envs, agent = set_up(script, env_id, target_kl=target, **sizes)
        plain = agent.minibatch_step

        def spy(*inputs, plain=plain):
            metrics = plain(*inputs)
            kls[-1].append(metrics[script.METRICS.index("approx_kl")].item())
            return metrics

        agent.minibatch_step = spy
        kls.append([])
        script.update(agent, script.rollout(agent, envs, Log(), args), 3e-3, args)
    assert [len(k) for k in kls] == [24, 4, 24]
    epochs = np.array(kls[0]).reshape(6, 4).mean(axis=1)
    between = (epochs[1] + epochs[:3].max()) / 2
    expected = int(np.argmax(epochs > between)) + 1
    args, envs, agent = set_up(script, env_id, target_kl=between, **sizes)
    script.update(agent, script.rollout(agent, envs, Log(), args), 3e-3, args)
    assert agent.optimizer.steps == 4 * expected < 24


@both
def test_metrics_are_means_over_all_minibatches(script):
    args, envs, agent = set_up(script, num_envs=2, num_steps=32)
    data = random_rollout(script, 32, 2)
    plain, seen = agent.minibatch_step, []
    agent.minibatch_step = lambda *inputs: seen.append(plain(*inputs)) or seen[-1]
    metrics = script.update(agent, data, 1e-3, args)
    means = torch.stack(seen).mean(dim=0).tolist()
    for name, mean in zip(script.METRICS, means, strict=True):
        assert metrics[f"losses/{name}"] == pytest.approx(mean)


@both
def test_explained_variance(script):
    """Trap 38: of the values before the update; NaN without a crash if the returns are constant."""
    args, envs, agent = set_up(script, num_envs=2, num_steps=32, update_epochs=1)
    data = random_rollout(script, 32, 2)
    with torch.no_grad():
        features = torch.tensor(data.obs)
        if script is ppo_continuous_action:
            agent.obs_moments.update(data.obs[:-1].reshape(-1, 2))
            features = agent.normalize(features)
        values = agent.critic(features).squeeze(-1).double().numpy()
    flags = data.terminated, data.truncated
    returns = script.gae(data.rewards, values, *flags, args.gamma, args.gae_lambda) + values[:-1]
    expected = 1 - (returns - values[:-1]).var() / returns.var()
    metrics = script.update(agent, data, 1e-3, args)
    assert metrics["losses/explained_variance"] == pytest.approx(expected, rel=1e-4)
    constant = data._replace(rewards=np.zeros((32, 2)), terminated=np.ones((32, 2), bool))
    assert math.isnan(script.update(agent, constant, 1e-3, args)["losses/explained_variance"])


@both
def test_not_finite_is_named(script):
    args, envs, agent = set_up(script)
    data = random_rollout(script, 8, 1)
    before = agent.optimizer.parameters.clone()
    for field, row, says in (
        ("obs", 3, "an observation"), ("obs", -1, "an observation"), ("rewards", 3, "a reward")
    ):  # fmt: skip
        array = getattr(data, field).copy()
        array[row, 0] = np.nan
        with pytest.raises(FloatingPointError, match=says):
            script.update(agent, data._replace(**{field: array}), 1e-3, args)
    assert torch.equal(agent.optimizer.parameters, before)


@both
def test_types_of_what_is_stored_and_learned_from(script):
    """Trap 34."""
    args, envs, agent = set_up(script, num_envs=2, num_steps=8, num_minibatches=2)
    data = script.rollout(agent, envs, Log(), args)
    actions = np.int64 if script is ppo else np.float32
    assert (data.obs.dtype, data.actions.dtype, data.rewards.dtype) == (np.float32, actions, float)
    seen = []
    plain = agent.minibatch_step
    agent.minibatch_step = lambda *inputs: seen.append(inputs[1]) or plain(*inputs)
    script.update(agent, data, 1e-3, args)
    batch = seen[0]._asdict()
    assert batch.pop("actions").dtype == (torch.int64 if script is ppo else torch.float32)
    assert {x.dtype for x in batch.values()} == {torch.float32}
    assert {p.dtype for p in agent.parameters()} == {torch.float32}


# --- a whole update beside Stable-Baselines3's ----------------------------------------------------


@both
@pytest.mark.parametrize("ent_coef", [0.0, 0.01])
def test_one_update_is_stable_baselines3s(script, ent_coef, monkeypatch):
    """From the same weights and stored rollout, in the same index order, all epochs and minibatches
    leave the same parameters."""
    T, N, D = 64, 4, 3
    actions = 2
    obs_space = spaces.Box(-np.inf, np.inf, (D,), np.float32)
    if script is ppo:
        action_space = spaces.Discrete(3)
    else:
        action_space = spaces.Box(-1, 1, (actions,), np.float32)

    class Env(gym.Env):
        observation_space, action_space = obs_space, None

    Env.action_space = action_space
    args = script.Args(
        num_envs=N, num_steps=T, num_minibatches=8, update_epochs=10, clip_vloss=False,
        ent_coef=ent_coef, max_grad_norm=0.5,
    )  # fmt: skip
    agent = make_agent(script, Env(), args)
    data = random_rollout(script, T, N, D, 1 if script is ppo else actions, 3, ends=0.05)
    if script is ppo_continuous_action:  # an identity
        agent.obs_moments.count.fill_(1e-9)

    model = stable_baselines3.PPO(
        "MlpPolicy", stable_baselines3.common.vec_env.DummyVecEnv([Env] * N), learning_rate=3e-4,
        n_steps=T, batch_size=T * N // 8, n_epochs=10, gamma=args.gamma, gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef, ent_coef=ent_coef, max_grad_norm=0.5, device="cpu",
        vf_coef=args.vf_coef / 2,  # SB3's squared error has no 1/2
        policy_kwargs={"net_arch": [64, 64]},
    )  # fmt: skip
    model.set_logger(Logger(None, []))
    actor = agent.actor if script is ppo else agent.actor_mean
    pairs = [
        (actor[0], model.policy.mlp_extractor.policy_net[0]),
        (actor[2], model.policy.mlp_extractor.policy_net[2]),
        (actor[4], model.policy.action_net),
        (agent.critic[0], model.policy.mlp_extractor.value_net[0]),
        (agent.critic[2], model.policy.mlp_extractor.value_net[2]),
        (agent.critic[4], model.policy.value_net),
    ]
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
        if script is ppo_continuous_action:
            model.policy.log_std.copy_(agent.actor_logstd)

    # the rollout as SB3 stores it: a start flag where the step before ended an episode
    buffer = model.rollout_buffer
    assert isinstance(buffer, RolloutBuffer)
    starts = np.zeros(N, bool)
    for t in range(T):
        obs, acts = torch.tensor(data.obs[t]), torch.tensor(data.actions[t])
        with torch.no_grad():
            values, logprobs, _ = model.policy.evaluate_actions(
                obs, acts.squeeze(-1) if script is ppo else acts
            )
        buffer.add(data.obs[t], data.actions[t], data.rewards[t], starts, values, logprobs)
        starts = data.terminated[t]
    with torch.no_grad():
        last = model.policy.predict_values(torch.tensor(data.obs[T]))
    buffer.compute_returns_and_advantage(last, dones=starts)

    orders = [np.random.default_rng(k).permutation(T * N) for k in range(10)]
    theirs = iter(orders)  # environment after environment there, step after step here
    monkeypatch.setattr(np.random, "permutation", lambda size: next(theirs))
    ours = iter([(order % T) * N + order // T for order in orders])
    agent.rng = type("Order", (), {"permutation": lambda self, rows: next(ours)})()
    start = agent.optimizer.parameters.clone()
    model._current_progress_remaining = 1.0
    model.train()
    script.update(agent, data, 3e-4, args)

    assert (agent.optimizer.parameters - start).abs().max() > 5e-3  # 80 steps went somewhere
    for mine, sb3 in pairs:
        torch.testing.assert_close(mine.weight, sb3.weight, atol=1e-5, rtol=0)
        torch.testing.assert_close(mine.bias, sb3.bias, atol=1e-5, rtol=0)
    if script is ppo_continuous_action:
        torch.testing.assert_close(agent.actor_logstd, model.policy.log_std, atol=1e-5, rtol=0)


# --- learning -------------------------------------------------------------------------------------


def learn(script, tmp_path, *argv) -> tuple[list[float], list[float]]:
    """Returns of the training episodes and of ten with the final policy."""
    folder = tmp_path / "run"
    script.train(script.parse_args(["--run-dir", str(folder), *argv]))
    rows = (folder / "episodes.csv").read_text().splitlines()[1:]
    evaluated = script.evaluate(script.parse_args(["--evaluate", str(folder)]))
    return [float(row.split(",")[2]) for row in rows], evaluated


HOW = pytest.mark.parametrize(
    "how", [["--compile-from", "0"], ["--no-compile"]], ids=["compiled", "eager"]
)


@HOW
def test_cartpole_is_learned_in_seconds(how, tmp_path):
    returns, evaluated = learn(ppo, tmp_path, "--total-timesteps", "20000", *how)
    assert np.mean(returns[:20]) < 60
    assert np.mean(evaluated) > 150


@pytest.mark.slow
@HOW
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_pendulum(seed, how, tmp_path):
    """What bootstrapping at time limits is worth: without it, about -1,100."""
    flags = ("--env-id", "Pendulum-v1", "--total-timesteps", "200000", "--seed", seed, *how)
    returns, evaluated = learn(ppo_continuous_action, tmp_path, *flags)
    assert np.mean(returns[-100:]) > -200
    assert np.mean(evaluated) > -250  # ten episodes spread widely


@pytest.mark.slow
@HOW
def test_cartpole(how, tmp_path):
    _, evaluated = learn(ppo, tmp_path, "--total-timesteps", "100000", *how)
    assert evaluated == [500.0] * 10


@pytest.mark.slow
def test_hopper_evaluates_as_it_trained(tmp_path):
    """A policy saved without its normaliser scores near 0 here."""
    flags = ("--env-id", "Hopper-v4", "--total-timesteps", "200000")
    returns, evaluated = learn(ppo_continuous_action, tmp_path, *flags)
    assert np.mean(returns[-50:]) > 500
    assert np.mean(evaluated) > np.mean(returns[-50:]) - np.std(returns[-50:])
