"""Environments that are not as usual: what they return, keep and change does not matter."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import assert_same, rows, status

import ppo
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive

CLIPPED = "--num-steps 40 --num-minibatches 2 --update-epochs 1 --no-compile"
SETUPS = {
    ppo: CLIPPED,
    ppo_continuous_action: CLIPPED,
    ppo_kl_adaptive: "-b 10 --value-epochs 1 --update-epochs 1 --hid1-mult 2",
    ppo_cma: "--iter-steps 80 --n-updates 2",
}
ALL = pytest.mark.parametrize("script", SETUPS, ids=lambda module: module.__name__)


class Plain(gym.Env):
    """Episodes of `length` steps that pay what the action says."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, action_space, length=7):
        self.action_space, self.length = action_space, length

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(size=2)
        return self.obs, {}

    def step(self, action):
        self.obs = self.obs + np.array([0.1, 1.0])
        return self.obs, float(np.sum(action)), self.obs[1] > self.length, False, {}


class RewardOfShape1(Plain):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class IntegerFlags(Plain):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, int(terminated), np.int64(truncated), info


class OneArray(Plain):
    """The observations are one array, which is overwritten."""

    array = None

    def observe(self, obs):
        self.array = np.zeros(2) if self.array is None else self.array
        self.array[:] = obs
        return self.array

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return self.observe(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self.observe(obs), *rest


class WritesIntoItsAction(Plain):
    def step(self, action):
        result = super().step(action)
        if np.ndim(action):
            action[:] = np.nan
        return result


class SeedsTorch(Plain):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(5)


ODD = [RewardOfShape1, IntegerFlags, OneArray, WritesIntoItsAction, SeedsTorch]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train a script in an environment; the final checkpoint and the rows of its episodes."""
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)

    def run(script, env, flags="", **kwargs):
        box = gym.spaces.Box(-1, 1, (1,), np.float32)
        kwargs["action_space"] = gym.spaces.Discrete(2) if script is ppo else box
        spec = gym.envs.registration.EnvSpec("Odd-v0", entry_point=env, kwargs=kwargs)
        monkeypatch.setitem(gym.registry, "Odd-v0", spec)
        folder = tmp_path / f"{env.__name__}{flags}"
        line = f"--env-id Odd-v0 --num-envs 2 {SETUPS[script]} --total-timesteps 240 {flags}"
        script.train(script.parse_args([*line.split(), "--run-dir", str(folder)]))
        assert status(folder) == "finished"
        return script.load_checkpoint(folder), rows(folder)

    return run


@ALL
def test_what_is_odd_does_not_matter(script, train):
    expected = train(script, Plain)
    assert len(expected[1]) > 20
    for env in ODD:
        assert_same(train(script, env), expected)


@ALL
def test_networks_differ_with_the_seed_even_if_the_environment_seeds_torch(script, train):
    one, two = (train(script, SeedsTorch, f"--seed {seed}")[0]["agent"] for seed in (1, 2))
    weights = [name for name, x in one.items() if x.dim() > 1]
    assert weights and not any(torch.equal(one[name], two[name]) for name in weights)


@pytest.mark.parametrize("script", [ppo, ppo_continuous_action])
def test_episodes_of_one_step(script, train):
    """Every second row is an autoreset's, and minibatches are the smallest."""
    checkpoint, episodes = train(script, Plain, "--num-steps 40 --num-minibatches 20", length=0)
    assert len(episodes) - 1 == checkpoint["counters"][0] == 120
