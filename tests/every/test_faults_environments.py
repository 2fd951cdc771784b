"""Faults of environments and of learning: a run stops at once, says why, and keeps its last good
checkpoint, from which it goes on once the cause is mended."""

import importlib
import math
import signal
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from program import assert_same, rows, scalars, status, toy, train_until_killed

import ppo
import ppo_cma

pytestmark = pytest.mark.filterwarnings("ignore")  # of what is not finite, and of gymnasium's
EPISODE = 10  # steps


class Faulty(gym.Env):
    """Episodes of 10 steps that pay 1 each. The episode that is reset with `bad_seed`, or every one
    without it, has a fault in step 6, whose observation an action held for 2 sees, too."""

    observation_space = gym.spaces.Box(-1, 1, (3,))

    def __init__(self, action_space, fault="none", bad_seed=None):
        self.action_space, self.fault, self.bad_seed = action_space, fault, bad_seed

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.bad, self.t = self.bad_seed in (None, seed), 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        over = self.t == EPISODE and not (self.bad and self.fault == "endless")
        return self.observe(), math.inf if self.strikes("reward") else 1.0, over, False, {}

    def strikes(self, fault: str) -> bool:
        return self.bad and fault == self.fault and self.t == 6

    def observe(self) -> np.ndarray:
        if self.strikes("exception"):
            raise ZeroDivisionError("physics blew up")
        obs = self.np_random.uniform(-1, 1, 3)
        obs[1] = np.nan if self.strikes("observation") else obs[1]
        return obs


# Each with two environments that play 4 episodes an iteration each, for 10 iterations
CLIPPED = "--num-envs 2 --num-steps 44 --num-minibatches 2 --update-epochs 2 --total-timesteps 880"
SETUPS = {
    "ppo": CLIPPED,
    "ppo_continuous_action": CLIPPED,
    "ppo_cma": "--num-envs 2 --iter-steps 80 --n-updates 5 --total-timesteps 800",
    "ppo_kl_adaptive": (
        "--num-envs 2 -b 8 --update-epochs 2 --value-epochs 6 -m 2 --total-timesteps 800"
    ),
    **dict.fromkeys(
        ["ppo_atari_multigpu", "ppo_atari_lstm", "ppo_procgen"],
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 2 --num-threads 1 "
        "--env-threads 1 --total-timesteps 320",
    ),
}
SETUPS["ppo_procgen"] += " --num-levels 2 --eval-episodes 2"
GYMNASIUM = [setup for setup in SETUPS if "atari" not in setup and "procgen" not in setup]


def parse(setup: str, folder: Path):
    """A script and its arguments for a run of Faulty-v0, or of Atari."""
    script = importlib.import_module(setup)
    env_id = "--env-id Faulty-v0" if setup in GYMNASIUM else ""
    flags = f"{env_id} {SETUPS[setup]} --checkpoint-interval 2 --no-cuda --run-dir {folder}"
    return script, script.parse_args(flags.split())


@pytest.fixture
def faulty(monkeypatch):
    """Give Faulty-v0 a fault, by default of the 15th episode of the second environment, which is in
    the fourth iteration of every setup."""
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)  # which takes 4 s
    monkeypatch.setattr(envpool, "make", toy)

    def give(setup: str, fault: str, seed: int | None = ppo.episode_seed(1, 1, 14)):
        space = gym.spaces.Discrete(2) if setup == "ppo" else gym.spaces.Box(-1, 1, (1,))
        kwargs = {"action_space": space, "fault": fault, "bad_seed": seed}
        spec = gym.envs.registration.EnvSpec("Faulty-v0", entry_point=Faulty, kwargs=kwargs)
        monkeypatch.setitem(gym.registry, "Faulty-v0", spec)

    return give


def assert_failed(folder: Path, script, iteration: int = 2):
    assert status(folder) == "failed"
    checkpoint = script.load_checkpoint(folder)
    assert checkpoint["counters"][1] == iteration
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


FAULTS = {
    "exception": (ZeroDivisionError, "physics blew up"),
    "observation": (FloatingPointError, "iteration 3: observations is not finite"),
    "reward": (
        FloatingPointError,
        r"iteration 3: (rewards|charts/mean_episodic_return) is not finite",
    ),
}


@pytest.mark.parametrize("setup", GYMNASIUM)
def test_a_fault_of_an_environment_ends_the_run_which_goes_on_when_it_is_mended(
    setup, faulty, tmp_path
):
    faulty(setup, "none")
    script, args = parse(setup, tmp_path / "whole")
    script.train(args)
    for fault, (kind, says) in FAULTS.items():
        faulty(setup, fault)
        script, args = parse(setup, tmp_path / fault)
        with pytest.raises(kind, match=says):
            script.train(args)
        assert_failed(tmp_path / fault, script)
        faulty(setup, "none")
        script.train(script.parse_args(["--resume", str(tmp_path / fault)]))
        final, whole = (script.load_checkpoint(tmp_path / name) for name in (fault, "whole"))
        assert_same(final, whole)
        assert rows(tmp_path / fault) == rows(tmp_path / "whole")
        assert scalars(tmp_path / fault) == scalars(tmp_path / "whole")


@pytest.mark.parametrize("setup", ["ppo", "ppo_continuous_action"])
def test_an_endless_episode_is_played_again_from_its_start(setup, faulty, tmp_path):
    """Rollouts of fixed length need no episode to end; a resumed run has the same bits."""
    faulty(setup, "endless", seed=None)
    script, args = parse(setup, tmp_path / "whole")
    script.train(args)
    whole = script.load_checkpoint(tmp_path / "whole")
    assert whole["counters"][:2] == (880, 10)
    assert len(rows(tmp_path / "whole")) == 1  # the header
    flags = f"--env-id Faulty-v0 {SETUPS[setup]} --checkpoint-interval 2 --run-dir"
    argv = [*flags.split(), str(tmp_path / "run"), "--no-cuda"]
    assert train_until_killed(setup, "rollout", 8, argv) == -signal.SIGKILL
    assert script.load_checkpoint(tmp_path / "run")["counters"][1] == 6
    script.train(script.parse_args(["--resume", str(tmp_path / "run")]))
    assert_same(script.load_checkpoint(tmp_path / "run"), whole)


@pytest.mark.parametrize("setup", ["ppo_cma", "ppo_kl_adaptive"])
def test_an_endless_episode_stops_training_by_episodes(setup, faulty, tmp_path):
    faulty(setup, "endless")
    script, args = parse(setup, tmp_path / "run")
    with pytest.raises(TimeoutError, match="max_episode_steps"):
        script.train(args)
    assert_failed(tmp_path / "run", script)


# --- learning -------------------------------------------------------------------------------------

# Calls of `gae` in three iterations
CALLS = dict.fromkeys(SETUPS, 3) | {"ppo_cma": 6, "ppo_kl_adaptive": 6}
# The square of 1e30 is infinite
SPOILT = [(setup, value) for setup in SETUPS for value in (math.nan, 1e30)]
SPOILT.remove(("ppo_cma", 1e30))  # which has no squares


@pytest.mark.parametrize(("setup", "value"), SPOILT)
def test_nothing_is_saved_once_learning_is_not_finite(setup, value, faulty, tmp_path, monkeypatch):
    faulty(setup, "none")
    script, args = parse(setup, tmp_path / "run")
    plain, calls = script.gae, []

    def gae(*args):
        advantages = plain(*args)
        calls.append(1)
        if len(calls) > CALLS[setup]:
            advantages[:1] = value
        return advantages

    monkeypatch.setattr(script, "gae", gae)
    with pytest.raises(FloatingPointError, match=r"iteration 3: losses/\w+ is not finite"):
        script.train(args)
    assert_failed(tmp_path / "run", script)


@pytest.mark.parametrize("setup", SETUPS)
def test_nothing_is_saved_once_a_parameter_is_not_finite(setup, faulty, tmp_path, monkeypatch):
    faulty(setup, "none")
    script, args = parse(setup, tmp_path / "run")
    plain = script.update

    def update(agent, *args):
        metrics = plain(agent, *args)
        with torch.no_grad():
            list(agent.parameters())[-1].view(-1)[-1] = math.inf
        return metrics

    monkeypatch.setattr(script, "update", update)
    with pytest.raises(FloatingPointError, match=r"iteration 0: [\w.]+ is not finite"):
        script.train(args)
    assert_failed(tmp_path / "run", script, iteration=0)
