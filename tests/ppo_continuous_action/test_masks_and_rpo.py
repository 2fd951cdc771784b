"""Action masks of ppo.py; noise on the means, --rpo-alpha, of ppo_continuous_action.py."""

import math
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from maths import Log, killed_and_resumed, returns
from scripts import SMALL, train

import ppo
import ppo_continuous_action


class Doors(gym.Env):
    """Opens some doors of each wall at every step, never none, and ends the run that walks into a
    closed one. How it says which are open is its kind."""

    def __init__(self, kind="info", walls=(4,), length=7):
        self.kind, self.walls, self.length = kind, walls, length
        self.action_space = spaces.Discrete(4) if len(walls) == 1 else spaces.MultiDiscrete(walls)
        self.observation_space = spaces.Box(-1, 1, (3,))
        if kind == "dict":
            mask = spaces.MultiBinary(sum(walls))
            parts = {"observation": self.observation_space, "action_mask": mask}
            self.observation_space = spaces.Dict(parts)

    def show(self):
        self.open = [np.int8(self.np_random.permutation(n) < 1 + n // 3) for n in self.walls]
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        mask = self.open[0] if len(self.walls) == 1 else tuple(self.open)
        if self.kind == "dict":
            return {"observation": obs, "action_mask": np.hstack(self.open)}, {}
        info = {"info": {"action_mask": mask}, "legal": {"legal_action_mask": mask}, "none": {}}
        return obs, info[self.kind]

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show()

    def step(self, action):
        taken = zip(self.open, np.ravel(action), strict=True)
        if self.kind != "none" and not all(wall[choice] for wall, choice in taken):
            raise RuntimeError(f"{action} into {self.open}")
        self.steps += 1
        obs, info = self.show()
        return obs, float(np.sum(action)), False, self.steps == self.length, info


KINDS = [("info", (4,)), ("legal", (4,)), ("dict", (4,)), ("info", (3, 4)), ("dict", (3, 4))]
for k, (kind, walls) in enumerate([*KINDS, ("none", (4,))]):
    gym.register(f"Doors{k}-v0", Doors, kwargs={"kind": kind, "walls": walls})
each = pytest.mark.parametrize("env_id", [f"Doors{k}-v0" for k in range(len(KINDS))])


def small_args(env_id="Doors0-v0", **more):
    return ppo.Args(env_id=env_id, num_steps=32, num_envs=2, num_minibatches=2, **more)


def agent_for(env_id, **more):
    args = small_args(env_id, **more)
    envs = ppo.make_envs(args, 1)
    torch.manual_seed(0)
    agent = ppo.Agent(envs, args)
    with torch.no_grad():
        agent.actor[-1].bias.uniform_(-3, 3)  # choices are not all alike
    return agent, envs


def seen(agent, envs, steps: int) -> np.ndarray:
    """Observations, with their masks, of the first environment in so many steps."""
    rows = []
    for _ in range(steps):
        rows.append(envs.obs[0].copy())
        envs.step(agent.numpy_actor()(envs.obs))
    return np.array(rows)


@each
def test_invalid_choices_have_probability_zero_and_no_gradient(env_id):
    agent, envs = agent_for(env_id)
    obs = torch.tensor(seen(agent, envs, 200))
    mask = obs[:, agent.dim :]
    assert mask.shape[1] == sum(agent.choices) and 0.2 < mask.mean() < 0.8
    action, logprob, entropy, _ = agent.get_action_and_value(obs)
    start, expected = 0, 0.0
    for branch, n in enumerate(agent.choices):
        valid = mask[:, start : start + n]
        assert valid.gather(1, action[:, [branch]]).all()
        scores = agent.actor(obs[:, : agent.dim])[:, start : start + n]
        weights = scores.exp() * valid  # the softmax over valid choices alone
        p = weights / weights.sum(1, keepdim=True)
        expected = expected - torch.where(p > 0, p * p.log(), 0.0).sum(1)
        start += n
    torch.testing.assert_close(entropy, expected, atol=1e-6, rtol=1e-5)
    closed = 1 - mask.split(agent.choices, dim=1)[0].int()
    invalid = action.clone()
    invalid[:, 0] = closed.argmax(dim=1)
    _, logprob_invalid, *_ = agent.get_action_and_value(obs, invalid)
    assert (logprob_invalid.exp() == 0.0).all() and (logprob.exp() > 0.0).all()
    scores = []
    agent.actor.register_forward_hook(lambda module, given, output: scores.append(output))
    _, logprob, entropy, _ = agent.get_action_and_value(obs, action)
    (gradients,) = torch.autograd.grad((logprob + entropy).sum(), scores)
    assert (gradients[mask == 0] == 0.0).all() and (gradients[mask == 1] != 0.0).any()


@each
def test_only_valid_choices_are_taken_in_training_and_evaluation(env_id, tmp_path):
    """Through ends of episodes, after which the first mask is that of the reset."""
    folder = ppo.train(small_args(env_id, total_timesteps=512, run_dir=tmp_path / "run"))
    agent, args = ppo.load(folder)
    assert agent.dim == (3 if KINDS[int(env_id[5])][0] != "dict" else 3 + sum(agent.choices))
    assert len(ppo.evaluate(small_args(env_id, evaluate=folder, eval_episodes=3))) == 3
    with pytest.raises(RuntimeError, match="into"):
        ppo.train(small_args(env_id, total_timesteps=512, action_masks=False))


@each
def test_sampling_matches_the_probabilities_of_the_loss(env_id):
    agent, envs = agent_for(env_id)
    obs = np.repeat(envs.obs, 20_000, axis=0)
    actions = agent.act(obs, agent.noise(len(obs))).reshape(len(obs), -1)
    codes, counts = np.unique(actions, axis=0, return_counts=True)
    given = torch.tensor(obs[: len(codes)]), torch.tensor(codes)
    p = agent.get_action_and_value(*given)[1].exp().detach().numpy()
    assert p.sum() == pytest.approx(1.0, abs=2e-3)  # nothing else is likely
    assert np.abs(counts / len(obs) - p).max() < 0.015


def test_rows_carry_the_mask_of_their_own_observation():
    agent, _ = agent_for("Doors0-v0")
    args, shown = small_args(), []
    made = [ppo.make_env(args.env_id) for _ in range(2)]
    doors = made[0].unwrapped
    show = doors.show
    doors.show = lambda: shown.append(show()) or shown[-1]
    envs = ppo.Envs(made, args, range(2))
    agent.adam = ppo.flat_adam(agent)
    data = ppo.rollout(agent, envs, Log(), args)
    assert data.obs.shape == (33, 2, 3 + 4) and (~data.valid[:, 0]).sum() == 4
    for row, (obs, info) in zip(data.obs[:, 0], shown, strict=True):
        assert (row == np.float32([*obs, *info["action_mask"]])).all()


def test_a_mask_of_all_is_no_mask(tmp_path):
    """The same bits as without masks; a row without a valid choice is finite."""
    free = agent_for("Doors5-v0")[0]
    obs = torch.randn(50, 3)
    whole = torch.cat([obs, torch.ones(50, 4)], dim=1)
    actions = torch.randint(4, (50, 1))
    for x, y in zip(free(obs, actions), free(whole, actions), strict=True):
        assert torch.equal(x, y)
    assert (free.act(obs.numpy()) == free.act(whole.numpy())).all()
    nothing = torch.cat([obs, torch.zeros(50, 4)], dim=1)
    _, logprob, entropy, _ = free(nothing, actions)
    torch.testing.assert_close(logprob, torch.full((50,), -math.log(4)))
    torch.testing.assert_close(entropy, torch.full((50,), math.log(4)))
    assert (free.act(nothing.numpy()) < 4).all()


class Masked(gym.Env):
    """Shows a mask, whatever it says, in its observations or beside them."""

    def __init__(self, kind: str, mask: np.ndarray, choices: gym.Space):
        self.action_space, self.observation_space = choices, spaces.Box(-1, 1, (3,))
        self.shown = np.zeros(3), {"action_mask": mask}
        if kind == "observation":
            parts = {"action_mask": spaces.MultiBinary(mask.shape), "x": self.observation_space}
            self.observation_space = spaces.Dict(parts)
            self.shown = {"action_mask": mask, "x": np.zeros(3)}, {}

    def reset(self, seed=None, options=None):
        return self.shown


@pytest.mark.parametrize("kind", ["info", "observation"])
@pytest.mark.parametrize(
    ("mask", "walls", "says"),
    [
        ([0, 0, 0, 0], [4], "leaves nothing to choose"),
        ([1, 0, 0, 0, 0, 0, 0], [3, 4], "leaves nothing to choose"),
        ([1], [4], "is not one of 4 choices"),
        ([1, 1, 1, 1, 1], [4], "is not one of 4 choices"),
        ([[1, 1, 1, 1]] * 2, [4], "is not one of 4 choices"),
    ],
)
def test_masks_that_cannot_be_meant(kind, mask, walls, says, monkeypatch):
    choices = spaces.Discrete(4) if walls == [4] else spaces.MultiDiscrete(walls)
    spec = gym.envs.registration.EnvSpec(
        "Masked-v0", entry_point=lambda **_: Masked(kind, np.int8(mask), choices)
    )
    monkeypatch.setitem(gym.registry, "Masked-v0", spec)
    with pytest.raises(ValueError, match=f"the action mask .*{says}"):
        ppo.make_envs(small_args("Masked-v0"), 2)
    assert ppo.make_envs(small_args("Masked-v0", action_masks=False), 2).obs.shape[0] == 2


@pytest.mark.slow
def test_taxi_is_learned_sooner_with_its_masks(tmp_path):
    """100,000 steps: a random player makes -778, a random one of valid moves -191."""
    means = []
    for flag in ("--action-masks", "--no-action-masks"):
        flags = f"--env-id Taxi-v4 --total-timesteps 100000 {flag} --run-dir {tmp_path / flag}"
        means.append(np.mean(returns(ppo.train(ppo.parse_args(flags.split())))))
    assert means[0] > means[1] + 50


# --- --rpo-alpha ----------------------------------------------------------------------------------
def learner(alpha, **more):
    script = ppo_continuous_action
    args = script.Args(num_steps=512, num_minibatches=4, rpo_alpha=alpha, log_std_init=0.0, **more)
    env = gym.make("Hopper-v4")
    torch.manual_seed(0)
    agent = script.Agent(env, args)
    agent.adam = script.flat_adam(agent)
    rng = np.random.default_rng(1)
    obs = rng.normal(size=(513, 1, 11)).astype(np.float32)
    actions = agent.act(obs[:-1, 0], agent.noise(512))[:, None]
    flags = np.zeros((2, 512, 1), bool)
    data = script.Rollout(obs, actions, rng.normal(size=(512, 1)), *flags, flags[0] == 0)
    agent.obs_moments.update(obs[:-1, 0])  # not the first time: policy and scale do not change
    return agent, data, args


def captured(alpha, **more):
    """What `update` gives to its steps: batches, rows; the metrics of each; nothing is learned."""
    agent, data, args = learner(alpha, **more)
    calls = []

    def step(agent, adam, batch, rows, learning_rate, args):
        minibatch = ppo_continuous_action.Batch(*[x[rows] for x in batch])
        _, metrics = ppo_continuous_action.ppo_loss(agent, args, minibatch)
        metrics = {name: x.detach() for name, x in metrics.items()}
        calls.append((batch, rows, metrics))
        return list(metrics), torch.stack(list(metrics.values()))

    ppo_continuous_action.update(agent, data, 0.0, args, step)
    return agent, calls


def test_no_alpha_draws_no_noise():
    agent, calls = captured(0.0)
    assert all((batch.noise == 0.0).all() for batch, *_ in calls)
    expected = np.random.default_rng(1)  # that of Args.seed
    expected.standard_normal((512, 3), np.float32)
    for _ in range(10):
        expected.permutation(512)
    assert agent.rng.random() == expected.random()


def test_noise_is_uniform_and_new_in_every_epoch():
    agent, calls = captured(0.5)
    noise = [batch.noise for batch, *_ in calls]
    assert len(noise) == 40 and all(x is y for x, y in zip(noise[::4], noise[3::4], strict=True))
    drawn = torch.stack(noise[::4]) / agent.unit  # [epochs, B, A]
    assert drawn.shape == (10, 512, 3) and len(drawn.unique()) > 0.99 * drawn.numel()
    assert drawn.abs().max() < 0.5 and drawn.abs().max() > 0.49
    assert drawn.mean() == pytest.approx(0.0, abs=0.01)
    assert drawn.var() == pytest.approx(1 / 12, rel=0.02)


@pytest.mark.parametrize("scale", [True, False])
def test_the_loss_is_that_of_shifted_means(scale):
    agent, calls = captured(0.3, scale_actions=scale)
    with torch.no_grad():
        for batch, rows, _ in calls[:3]:
            obs, actions, noise = batch.obs[rows], batch.actions[rows], batch.noise[rows]
            mean = agent.origin + agent.unit * agent.actor_mean(agent.normalize(obs))
            policy = torch.distributions.Normal(mean + noise, agent.unit * agent.actor_logstd.exp())
            found = agent(obs, actions - noise)[1]
            torch.testing.assert_close(found, policy.log_prob(actions).sum(1), atol=1e-4, rtol=0)


def test_distances_are_measured_without_the_noise():
    """As nothing is learned here they are 0. With the noise the KL would be alpha^2 d / (6 std^2):
    0.126 for 3 actions of deviation 1 and alpha 0.5, and the clipped share 0.65."""
    agent, calls = captured(0.5)
    for name in ("approx_kl", "old_approx_kl", "clipfrac"):
        assert max(metrics[name].abs().item() for *_, metrics in calls) < 1e-5
    with torch.no_grad():
        batch = calls[0][0]
        logratio = agent(batch.obs, batch.actions - batch.noise)[1] - batch.logprobs
    assert (logratio.exp() - 1 - logratio).mean() == pytest.approx(0.126, abs=0.03)
    assert ((logratio.exp() - 1).abs() > 0.2).float().mean() == pytest.approx(0.65, abs=0.05)
    assert calls[0][2]["policy_loss"].abs() > 1e-3  # the objective is with it


def test_a_further_field_is_no_noise(monkeypatch):
    """The batch has names: at a learning rate of 0 the policy stays, whatever else it holds."""
    script, fields = ppo_continuous_action, ppo_continuous_action.Batch.__annotations__
    longer = NamedTuple("Batch", [*fields.items(), ("weights", torch.Tensor)])
    fill = len(fields) + 1
    monkeypatch.setattr(script, "Batch", lambda *x: longer(*x, *[x[0]] * (fill - len(x))))
    agent, data, args = learner(0.0, target_kl=None)
    assert abs(script.update(agent, data, 0.0, args)["losses/approx_kl"]) < 1e-5


def test_training_with_noise_resumes_to_the_same_bits(tmp_path, small):
    name = "ppo_continuous_action"
    flags = f"{SMALL[name]} --no-anneal-lr --total-timesteps 220"
    noisy = killed_and_resumed(name, tmp_path, f"{flags} --rpo-alpha 0.1")
    without = train(name, tmp_path / "without", "--no-anneal-lr", 5)
    assert not torch.equal(without["agent"]["critic.0.bias"], noisy["agent"]["critic.0.bias"])
