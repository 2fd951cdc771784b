"""Environments and machines that are not as usual: what outlives an episode, what drawing lacks,
file systems without locks, minibatches of one sample."""

import errno
import fcntl
import re
from pathlib import Path
from typing import ClassVar

import envpool
import gymnasium as gym
import numpy as np
import pytest
from program import rows, status
from test_atari import Toy

import ppo
import ppo_atari_multigpu
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive

CLIPPED = "--num-envs 2 --num-minibatches 2 --update-epochs 1 --no-compile --num-steps"
KL = "--num-envs 2 --value-epochs 1 --update-epochs 1 --hid1-mult 2"
SETUPS = {
    ppo: f"{CLIPPED} 20",
    ppo_continuous_action: f"{CLIPPED} 20",
    ppo_kl_adaptive: f"{KL} --num-steps 20",
    ppo_cma: "--num-envs 2 --iter-steps 40 --n-updates 2",
    ppo_atari_multigpu: "--num-envs 4 --num-steps 10 --num-minibatches 2 --update-epochs 1 "
    "--num-threads 1 --env-threads 1 --no-cuda --no-compile",
}
SMALL = [script for script in SETUPS if script is not ppo_atari_multigpu]


class Odd(gym.Env):
    """Episodes of `length` steps that pay 1 each. `haunted`: it shows the steps of its whole life.
    `blind`: what draws it is not installed."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    metadata: ClassVar = {"render_modes": ["rgb_array"]}

    def __init__(self, action_space, length=7, haunted=False, blind=False, render_mode=None):
        self.action_space, self.length, self.render_mode = action_space, length, render_mode
        self.haunted, self.blind, self.life = haunted, blind, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.start = 0, self.np_random.uniform()
        return self.observe(), {}

    def step(self, action):
        self.t, self.life = self.t + 1, self.life + 1
        return self.observe(), 1.0, self.t == self.length, False, {}

    def observe(self):
        return np.array([self.start + self.t / 10, self.haunted * self.life / 100])

    def render(self):
        if self.blind:
            raise gym.error.DependencyNotInstalled("pygame is not installed")
        return np.zeros((16, 16, 3), np.uint8)


@pytest.fixture
def odd(monkeypatch):
    """Register Odd-v0 for a script with these arguments."""
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)
    monkeypatch.setattr(envpool, "make", Toy)

    def register(script, **kwargs):
        box = gym.spaces.Box(-1, 1, (1,))
        kwargs["action_space"] = gym.spaces.Discrete(2) if script is ppo else box
        spec = gym.envs.registration.EnvSpec("Odd-v0", entry_point=Odd, kwargs=kwargs)
        monkeypatch.setitem(gym.registry, "Odd-v0", spec)

    return register


def train(script, folder: Path, flags: str):
    game = "" if script is ppo_atari_multigpu else "--env-id Odd-v0"
    line = f"{game} {SETUPS[script]} --run-dir {folder} {flags}"
    script.train(script.parse_args(line.split()))


@pytest.mark.parametrize("haunted", [False, True])
@pytest.mark.parametrize(
    ("script", "more"),
    [
        (ppo, "--env-backend gymnasium"),
        (ppo, "--env-backend async"),
        (ppo_continuous_action, "--env-backend gymnasium"),
        (ppo_continuous_action, "--env-backend async"),
        (ppo_kl_adaptive, ""),
    ],
)
def test_a_run_goes_on_with_new_episodes_where_old_ones_cant_be_played_again(
    script, more, haunted, odd, tmp_path, capsys
):
    """An environment that remembers the episodes before is elsewhere after the same actions."""
    odd(script, length=6, haunted=haunted)
    train(script, tmp_path / "run", f"--total-timesteps 80 {more}")
    script.train(script.parse_args(f"--resume {tmp_path}/run --total-timesteps 400".split()))
    assert ("went elsewhere: resuming with new episodes" in capsys.readouterr().out) == haunted
    episodes = np.array(rows(tmp_path / "run")[1:], float)
    assert len(episodes) >= 40
    assert (episodes[:, 1:] == 6).all()  # no two episodes were mixed
    assert (episodes[:, 0] <= 80).any() and (episodes[:, 0] > 80).any()


@pytest.mark.parametrize("script", SMALL)
def test_what_drawing_lacks_is_told_before_training(script, odd, tmp_path, capsys):
    odd(script, blind=True)
    with pytest.raises(SystemExit) as end:
        train(script, tmp_path / "run", "--total-timesteps 80 --capture-video")
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1 and "--capture-video: " in error and "pygame" in error
    assert not list(tmp_path.iterdir())
    train(script, tmp_path / "run", "--total-timesteps 80")  # no frame is drawn
    with pytest.raises(SystemExit) as end:
        script.evaluate(script.parse_args(f"--evaluate {tmp_path}/run --capture-video".split()))
    assert end.value.code == 2
    assert "--capture-video: DependencyNotInstalled('pygame" in capsys.readouterr().err


@pytest.mark.parametrize("script", SETUPS)
def test_a_file_system_without_locks(script, odd, tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    odd(script)
    monkeypatch.setattr(fcntl, "flock", flock)
    train(script, tmp_path / "run", "--total-timesteps 80")
    assert "no locks (Function not implemented); train there once at" in capsys.readouterr().out
    assert status(tmp_path / "run") == "finished"


@pytest.mark.parametrize("script", [ppo, ppo_continuous_action])
def test_the_compiled_step_never_gets_one_sample(script, odd, tmp_path, monkeypatch):
    """Its std() would be nan: it is traced with many samples and asks no more."""
    sizes = []

    def compile_update(agent, args):
        def step(agent, batch, minibatch, *rest):
            sizes.append(len(minibatch))
            return script.minibatch_step(agent, batch, minibatch, *rest)

        agent.minibatch_step = step
        return "recorded"

    odd(script, length=1)  # every second row is an autoreset's
    monkeypatch.setattr(script, "compile_update", compile_update)
    flags = "--num-envs 1 --num-steps 7 --num-minibatches 3 --total-timesteps 70 --norm-adv"
    train(script, tmp_path / "run", flags)
    assert sizes and min(sizes) == 2  # of 3 or 4 rows in 3 minibatches
    assert status(tmp_path / "run") == "finished"


def test_bounds_whose_distance_is_infinite_are_none(odd, tmp_path, capsys):
    most = np.finfo(np.float32).max
    space = gym.spaces.Box(-most, most, (2,))
    env = type("Env", (), {"single_observation_space": Odd.observation_space})
    env.single_action_space = space
    agent = ppo_continuous_action.Agent(env, ppo_continuous_action.Args())
    assert agent.unit.tolist() == [1, 1] and agent.origin.tolist() == [0, 0]


def test_videos_are_linked_for_ids_with_a_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "dm_control/walker-walk-v0__ppo__1__2"
    (tmp_path / "runs" / name / "videos").mkdir(parents=True)
    run = type("Run", (), {"folder": Path("runs") / name, "name": name})
    for script in (ppo, ppo_continuous_action):
        script.link_videos(run)
        assert (Path("videos") / name).resolve() == tmp_path / "runs" / name / "videos"
        (Path("videos") / name).unlink()
    assert re.fullmatch(r"[^/]+/[^/]+", name)
