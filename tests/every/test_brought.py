"""Environments that people bring: what they do otherwise than gymnasium's own ones."""

import contextlib
import importlib
import sys

import gymnasium as gym
import numpy as np
import pytest
from program import rows

import ppo
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive

SCRIPTS = [ppo, ppo_continuous_action, ppo_cma, ppo_kl_adaptive]
CLIPPED = "--num-steps 20 --num-minibatches 1 --update-epochs 1 --no-compile"
FLAGS = {
    ppo: CLIPPED,
    ppo_continuous_action: CLIPPED,
    ppo_cma: "--iter-steps 40 --n-updates 2 --minibatch-size 16",
    ppo_kl_adaptive: "-b 4 --update-epochs 1 --value-epochs 1 -m 1",
}
LONG = {ppo: 160, ppo_continuous_action: 160, ppo_cma: 160, ppo_kl_adaptive: 16}
MODULE = '''
import random

import gymnasium as gym
import numpy as np


class Careless(gym.Env):
    """Draws from what belongs to nobody: in the constructor, at a reset and, with `often`, in every
    step. Episodes of 8 steps."""

    observation_space = gym.spaces.Box(-2, 2, (3,))

    def __init__(self, often=False, choices=False):
        self.often = often
        self.action_space = gym.spaces.Discrete(2) if choices else gym.spaces.Box(-1, 1, (1,))
        self.made = np.random.uniform(-1, 1)

    def observe(self):
        return np.array([self.made, self.task, random.uniform(-1, 1) if self.often else 0.0])

    def reset(self, seed=None, options=None):
        self.t, self.task = 0, np.random.uniform(-1, 1) + random.uniform(-1, 1)
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), self.task, False, self.t == 8, {}


class Words(gym.spaces.Space):
    """As MiniGrid's missions: what gymnasium asks of a space is not there."""


class Told(Careless):
    observation_space = gym.spaces.Dict({"mission": Words(), "at": gym.spaces.Discrete(3)})


class Several(Careless):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward, 1.0]), *rest


class Silent(Careless):
    def __init__(self, **options):
        assert options == "wanted"


for Class in (Careless, Told, Several, Silent):
    gym.register(f"{Class.__name__}-v0", Class)
'''


@pytest.fixture(params=SCRIPTS, ids=[script.__name__ for script in SCRIPTS])
def script(request):
    return request.param


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The module above where workers find it, too."""
    (tmp_path / "careless.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "careless"
    sys.modules.pop("careless", None)
    for name in ("Careless", "Told", "Several", "Silent"):
        gym.registry.pop(f"{name}-v0", None)


def parse(script, line: str, more: list[str] = ()):
    return script.parse_args([*line.split(), *FLAGS[script].split(), *more])


def options(script, often: bool = False) -> list[str]:
    choices = "true" if script is ppo else "false"
    return ["--env-kwargs", f'{{"often": {str(often).lower()}, "choices": {choices}}}']


def returns(script, module, folder, flags: str, often: bool = False) -> list:
    """Step and return of each episode of a run with two environments."""
    length = "-n" if script is ppo_kl_adaptive else "--total-timesteps"
    line = f"--env-id {module}:Careless-v0 --num-envs 2 --run-dir {folder}"
    line += f" {length} {LONG[script]} {flags}"
    script.train(parse(script, line, options(script, often)))
    return rows(folder)


def test_chance_from_np_random_is_seeded(script, module, tmp_path):
    """At the same command the same episodes, whatever was drawn before."""
    np.random.seed(5)
    first = returns(script, module, tmp_path / "a", "", often=True)
    again = returns(script, module, tmp_path / "b", "", often=True)
    assert first == again
    assert len({value for _, value, _ in first}) == len(first)  # each episode has its own task
    assert returns(script, module, tmp_path / "c", "--seed 2") != first


def test_chance_at_a_reset_is_the_same_in_workers(script, module, tmp_path):
    alone = returns(script, module, tmp_path / "alone", "")
    assert returns(script, module, tmp_path / "workers", "--env-workers 2") == alone


def test_a_resumed_run_has_the_environments_it_began_with(script, module, tmp_path):
    """Also what their constructors drew, and the task of an episode that was cut in two."""
    steps = "--num-episodes" if script is ppo_kl_adaptive else "--total-timesteps"
    anneal = "" if script is ppo_kl_adaptive else "--no-anneal-lr"
    expected = returns(script, module, tmp_path / "whole", f"{anneal} {steps} {LONG[script]}")
    returns(script, module, tmp_path / "cut", f"{anneal} {steps} {LONG[script] // 2}")
    np.random.seed(5)
    again = f"--resume {tmp_path / 'cut'} --env-id {module}:Careless-v0 {steps} {LONG[script]}"
    script.train(script.parse_args(again.split()))
    assert rows(tmp_path / "cut") == expected


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Told", "observations are no vector (MiniGrid: a Flat wrapper)"),
        ("Silent", "AssertionError()"),
    ],
)
def test_what_can_not_be_trained_is_one_line(script, name, says, module, tmp_path, capfd):
    line = f"--env-id {module}:{name}-v0 --run-dir {tmp_path / 'run'}"
    with pytest.raises(SystemExit) as end:
        script.train(parse(script, line))
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert says in err
    assert name == "Told" or "careless.py, line" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_several_rewards_want_a_wrapper(script, module, tmp_path):
    line = f"--env-id {module}:Several-v0 --run-dir {tmp_path / 'run'}"
    with pytest.raises(ValueError, match=r"several rewards: a wrapper that weighs them"):
        script.train(parse(script, line, options(script)))
    assert not (tmp_path / "run").exists()


def test_drawn_without_what_takes_nine_tenths_of_the_time():
    """CPU-time of a frame of HalfCheetah by Mesa: 106 ms as gymnasium draws it, 11 so."""
    args = ppo_continuous_action.Args(env_id="HalfCheetah-v4")
    with contextlib.closing(ppo_continuous_action.drawn_env(args)) as env:
        quality = env.unwrapped.model.vis.quality
        assert (quality.shadowsize, quality.offsamples) == (0, 0)
        assert not env.unwrapped.model.mat_reflectance.any()
        assert env.unwrapped.mujoco_renderer.camera_id == 0
        assert env.render().std() > 10.0  # something is to be seen


def test_choices_that_envpool_shows_are_one_hot():
    args = ppo.Args(env_id="envpool:FrozenLake-v1", num_envs=3)
    with contextlib.closing(ppo.make_envs(args, 3)) as envs:
        assert envs.observation_space.shape == (16,)
        np.testing.assert_array_equal(envs.obs, np.eye(16)[[0, 0, 0]])
        for _ in range(20):
            envs.step(np.full((3, 1), 1))  # down
            np.testing.assert_array_equal(envs.obs.sum(axis=1), np.ones(3))
        act = ppo.Agent(envs, args).numpy_actor()
        assert act(envs.obs).shape == (3, 1)


def test_the_sleeper_sleeps():
    importlib.import_module("benchmark.published.sleeper")
    env = gym.make("Sleeper-v0", seconds=0.0)
    obs, _ = env.reset(seed=1)
    assert obs.shape == (17,)
    for _ in range(999):
        assert not env.step(env.action_space.sample())[3]
    assert env.step(env.action_space.sample())[3]  # its time limit
    gym.registry.pop("Sleeper-v0")
    sys.modules.pop("benchmark.published.sleeper")
