"""ppo_cma.py as a program: tags, modes, boxes, resume, a loop of one's own."""

import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import Clockwork, scalars
from scripts import refused

import ppo_cma
from ppo_cma import Agent, Args, Rollout

SMALL = (
    "--env-id InvertedPendulum-v4 --iter-steps 200 --n-updates 5 --minibatch-size 32 "
    "--history-buffer-size 3 --checkpoint-interval 2 --no-cuda --no-anneal-lr"
)
gym.register("Clockwork_cma-v0", Clockwork, kwargs={"action_space": gym.spaces.Box(-1, 1, (2,))})
PRETRAINING = ppo_cma.pretrain_policy


@pytest.fixture(scope="module", autouse=True)
def no_pretraining():
    """It takes 4 s: done where a test puts it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_cma, "pretrain_policy", lambda *_: None)
        yield


def train(folder: Path, flags: str = "") -> dict:
    """Train in this process; the final checkpoint."""
    ppo_cma.train(ppo_cma.parse_args(f"{SMALL} --run-dir {folder} {flags}".split()))
    return ppo_cma.load_checkpoint(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of seven iterations: its folder and its checkpoint."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, train(folder, "--total-timesteps 1500 --num-envs 3")


def test_tags(undisturbed):
    losses = ("value_loss", "variance_loss", "policy_loss", "entropy", "explained_variance")
    charts = ["SPS", "learning_rate", "policy_std", "positive_advantages", "mean_episodic_return"]
    charts += ["saturated_means", "episodic_return", "episodic_length"]
    tags = {f"losses/{name}" for name in losses} | {f"charts/{name}" for name in charts}
    points = scalars(undisturbed[0], timed=True)
    assert points.keys() == tags
    assert {len(x) for x in points.values()} == {undisturbed[1]["iteration"]}
    # rewards are not scaled: the logged returns are those that were learned from
    assert points["charts/episodic_return"] == points["charts/mean_episodic_return"]


@pytest.mark.parametrize("mode", ppo_cma.MODES)
def test_every_mode_trains(mode, tmp_path, monkeypatch):
    if mode == "ppo":  # whose ratios overflow between a policy and quite another
        monkeypatch.setattr(ppo_cma, "pretrain_policy", PRETRAINING)
    flags = f"--mode {mode} --ent-coef 0.01 --env-id Clockwork_cma-v0 --total-timesteps 400"
    assert train(tmp_path / "run", flags)["iteration"] == 2
    assert ("losses/variance_loss" in scalars(tmp_path / "run")) == mode.startswith("ppo-cma")
    args = ppo_cma.parse_args(f"--evaluate {tmp_path / 'run'} --eval-episodes 1".split())
    assert ppo_cma.evaluate(args) == [10.0]


# --- boxes ----------------------------------------------------------------------------------------
@pytest.fixture
def boxed(monkeypatch):
    """Register an environment with this box of actions."""

    def register(low, high, dtype):
        box = gym.spaces.Box(np.array([low, -1.0]), np.array([high, 1.0]), dtype=dtype)
        spec = gym.envs.registration.EnvSpec("Boxed-v0", entry_point=lambda **_: Clockwork(box))
        monkeypatch.setitem(gym.registry, "Boxed-v0", spec)

    return register


BOUNDS = [(0, 1e-40), (0, 0), (-1e20, 1e20), (-1, np.inf), (1e8, 1e8 + 1)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_boxes_that_can_not_be_learned_in_are_refused(low, high, boxed, tmp_path, capfd):
    boxed(low, high, np.float64)
    says = "its sides must be from 1e-6 to 1e6"
    refused(capfd, says, train, tmp_path / "run", "--env-id Boxed-v0")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("side", [2e-6, 1e-3, 9e5])
def test_boxes_at_the_limits_are_learned_in(side, boxed, tmp_path, monkeypatch):
    step, first = Clockwork.step, []
    monkeypatch.setattr(Clockwork, "step", lambda env, a: first.append(a[0] / side) or step(env, a))
    boxed(0, side, np.float32)
    final = train(tmp_path / "run", "--env-id Boxed-v0 --total-timesteps 1500")
    assert all(x.isfinite().all() for x in final["agent"].values())
    assert 0 <= min(first) < 0.2 < 0.8 < max(first) < 1.0001


# --- resume, own loop -----------------------------------------------------------------------------
def test_a_resumed_run_takes_other_flags(tmp_path, undisturbed):
    shutil.copytree(undisturbed[0], tmp_path / "run")
    flags = "--total-timesteps 1800 --history-buffer-size 2 --n-updates 3 --learning-rate 1e-4"
    ppo_cma.train(ppo_cma.parse_args(f"--resume {tmp_path / 'run'} {flags}".split()))
    resumed = ppo_cma.load_checkpoint(tmp_path / "run")
    assert len(resumed["history"]) == 2
    assert scalars(tmp_path / "run")["charts/learning_rate"][-1][1] == pytest.approx(1e-4)
    steps = max(x["step"].item() for x in resumed["adam"].values())
    before, after = undisturbed[1]["iteration"], resumed["iteration"]
    assert before < after
    assert steps == 5 * before + 3 * (after - before)


def test_a_loop_of_ones_own():
    """As on the page: any simulator with an observation_space and an action_space."""
    sim = gym.make("Clockwork_cma-v0")
    args = Args(n_updates=3)
    agent = Agent(sim, args)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-8, fused=True)
    ppo_cma.pretrain_policy(agent, args)
    before = agent.act(np.ones((1, 2)))
    for _ in range(2):
        rows = []
        for _ in range(5):
            obs, _ = sim.reset()
            done = False
            while not done:
                action = agent.act(obs[None], agent.noise(1))[0]
                next_obs, reward, terminated, truncated, _ = sim.step(action)
                done = terminated or truncated
                rows.append((obs.astype(np.float32), action, reward, done))
                obs = next_obs
        metrics = ppo_cma.update(agent, Rollout(*map(np.array, zip(*rows, strict=True))), args)
        assert metrics["charts/mean_episodic_return"] == 10.0
    assert (agent.act(np.ones((1, 2))) != before).all()
