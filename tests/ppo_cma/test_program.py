"""ppo_cma.py as a program: command line, run folder, resume, saved policy, evaluation. What kills,
signals and damage do is in every/."""

import json
import re
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from program import (
    Clockwork,
    assert_same,
    rows,
    scalars,
    train_until_killed,
)

import ppo_cma

SMALL = (
    "--env-id InvertedPendulum-v4 --iter-steps 200 --n-updates 5 --minibatch-size 32 "
    "--history-buffer-size 3 --checkpoint-interval 2 --no-cuda --no-anneal-lr"
)
BOX = gym.spaces.Box(-1, 1, (2,))
gym.register("Clockwork_cma-v0", Clockwork, kwargs={"action_space": BOX})
PRETRAINING = ppo_cma.pretrain_policy


@pytest.fixture(scope="module", autouse=True)
def no_pretraining():
    """It takes 4 s: done where a test puts it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)
        yield


def train(folder: Path, flags: str = "") -> dict:
    """Train in this process; the final checkpoint."""
    ppo_cma.train(ppo_cma.parse_args(f"{SMALL} --run-dir {folder} {flags}".split()))
    return ppo_cma.load_checkpoint(folder)


def resume(folder: Path, flags: str = "") -> dict:
    ppo_cma.train(ppo_cma.parse_args(f"--resume {folder} {flags}".split()))
    return ppo_cma.load_checkpoint(folder)


def evaluate(folder: Path, flags: str = "") -> list[float]:
    return ppo_cma.evaluate(ppo_cma.parse_args(f"--evaluate {folder} {flags}".split()))


def plain(checkpoint: dict, **changed) -> dict:
    """With these arguments changed."""
    return checkpoint | {"args": asdict(checkpoint["args"]) | changed}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of seven iterations: its folder and its checkpoint."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, train(folder, "--total-timesteps 1500 --save-model")


# --- the run's folder -----------------------------------------------------------------------------


def test_what_is_logged(undisturbed):
    points = scalars(undisturbed[0], timed=True)
    losses = ("value_loss", "variance_loss", "policy_loss", "entropy", "explained_variance")
    charts = ["SPS", "learning_rate", "policy_std", "positive_advantages", "mean_episodic_return"]
    charts += ["saturated_means", "episodic_return", "episodic_length"]
    tags = [f"losses/{name}" for name in losses] + [f"charts/{name}" for name in charts]
    assert points.keys() == set(tags)


@pytest.mark.parametrize("mode", ppo_cma.MODES)
def test_every_mode_trains(mode, tmp_path, monkeypatch):
    if mode == "ppo":  # whose ratios overflow between a policy and quite another
        monkeypatch.setattr(ppo_cma, "pretrain_policy", PRETRAINING)
    flags = f"--mode {mode} --ent-coef 0.01 --env-id Clockwork_cma-v0 --total-timesteps 400"
    assert train(tmp_path / "run", flags)["counters"][1] == 2
    assert ("losses/variance_loss" in scalars(tmp_path / "run")) == mode.startswith("ppo-cma")
    assert evaluate(tmp_path / "run", "--eval-episodes 1") == [10.0]


def test_same_seed_same_bits_other_seed_other_states(tmp_path, undisturbed):
    folder, checkpoint = undisturbed
    again = train(tmp_path / "again", "--total-timesteps 1500")
    assert_same(plain(again), plain(checkpoint, save_model=False))
    assert rows(tmp_path / "again") == rows(folder)
    assert scalars(tmp_path / "again") == scalars(folder)
    other = train(tmp_path / "other", "--total-timesteps 400 --seed 2")
    first = {tuple(obs) for obs in checkpoint["history"][0][0].tolist()}
    assert not first & {tuple(obs) for obs in other["history"][0][0].tolist()}


def test_no_two_episodes_share_a_reset_seed():
    seeds = {
        ppo_cma.episode_seed(seed, env, episode)
        for seed in range(20) for env in range(8) for episode in range(20)
    }  # fmt: skip
    assert len(seeds) == 20 * 8 * 20


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "call"), [("Envs.step", 700), ("mean_loss", 22), ("torch.save", 3)]
)
def test_killed_and_resumed_is_undisturbed(target, call, tmp_path, undisturbed):
    folder = tmp_path / "run"
    argv = f"{SMALL} --run-dir {folder} --total-timesteps 1500 --save-model".split()
    assert train_until_killed("ppo_cma", target, call, argv) == -signal.SIGKILL
    interrupted = ppo_cma.load_checkpoint(folder)  # readable
    assert 0 < interrupted["counters"][1] < undisturbed[1]["counters"][1]
    assert_same(resume(folder), undisturbed[1])
    assert rows(folder) == rows(undisturbed[0])
    assert scalars(folder) == scalars(undisturbed[0])  # each step once
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


def test_several_environments_go_on_together(tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    expected = train(whole, "--total-timesteps 1500 --num-envs 3")
    argv = f"{SMALL} --run-dir {folder} --total-timesteps 1500 --num-envs 3".split()
    assert train_until_killed("ppo_cma", "update", 3, argv, signal.SIGTERM) == 143
    assert ppo_cma.load_checkpoint(folder)["counters"][1] == 3
    assert_same(resume(folder), expected)
    assert rows(folder) == rows(whole)


def test_resume_extends_a_run_and_takes_other_flags(tmp_path, undisturbed):
    folder, whole = undisturbed[0], tmp_path / "whole"
    shutil.copytree(folder, tmp_path / "copied")
    expected = train(whole, "--total-timesteps 2500 --save-model")
    assert_same(resume(tmp_path / "copied", "--total-timesteps 2500"), expected)
    assert rows(tmp_path / "copied") == rows(whole)
    # a warm start: what comes next is by the new flags
    shutil.copytree(folder, tmp_path / "other")
    flags = "--total-timesteps 1800 --history-buffer-size 2 --n-updates 3 --learning-rate 1e-4"
    resumed = resume(tmp_path / "other", flags)
    assert len(resumed["history"]) == 2
    assert resumed["adam"]["param_groups"][0]["lr"] == 1e-4
    steps = max(x["step"].item() for x in resumed["adam"]["state"].values())
    before, after = undisturbed[1]["counters"][1], resumed["counters"][1]
    assert steps == 5 * before + 3 * (after - before)


def test_ones_own_loop_of_the_page(root, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/ppo_cma.md").read_text(), re.S)
    (code,) = [block for block in blocks if "update_with_memorized" in block]
    code = code.replace("1_000_000", "6000").replace("Args()", "Args(n_updates=5)")
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[0]) for line in lines]
    assert len(lines) >= 2
    assert steps == sorted(steps)
    assert all(np.isfinite(float(line.split()[1])) for line in lines)


# --- learning -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "at_least"),
    [
        (
            "--env-id MountainCarContinuous-v0 --iter-steps 4000 --minibatch-size 2048 "
            "--action-repeat 4 --total-timesteps 50000",
            88,
        ),
        # the original's return at 400,000 steps
        ("--env-id Hopper-v4 --iter-steps 8000 --minibatch-size 512 --total-timesteps 300000", 624),
    ],
    ids=["mountain_car", "hopper"],
)
def test_learns(flags, at_least, tmp_path):
    train(tmp_path / "run", f"{flags} --n-updates 100 --history-buffer-size 9")
    returns = [float(row[1]) for row in rows(tmp_path / "run")[1:]]
    assert np.mean(returns[-20:]) > at_least
