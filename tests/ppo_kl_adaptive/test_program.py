"""ppo_kl_adaptive.py as a program: what it logs, budgets, resume, evaluation."""

import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from maths import returns
from program import Clockwork, assert_same, rows, scalars

import ppo_kl_adaptive as script
from ppo_kl_adaptive import Args

# Every KL is too high, which moves beta in each iteration and the learning rate from the second on
SMALL = (
    "--hid1-mult 4 --episodes-per-batch 5 --update-epochs 3 --value-epochs 2 --kl-targ 1e-9 "
    "--beta 15 --checkpoint-interval 2 --no-cuda"
)
SETUPS = {  # of 8 iterations each
    "whole": "--env-id InvertedPendulum-v4 --num-envs 3 --num-episodes 40",
    "choices": "--env-id CartPole-v1 --num-envs 2 --num-episodes 40",
}


def parse(flags: str) -> Args:
    return script.parse_args(flags.split())


def train(folder: Path, flags: str) -> dict:
    """Train in this process; the final checkpoint."""
    script.train(parse(f"{SMALL} --run-dir {folder} {flags}"))
    return script.load_checkpoint(folder)


def resume(folder: Path, flags: str = "") -> dict:
    script.train(parse(f"--resume {folder} {flags}"))
    return script.load_checkpoint(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder and the final checkpoint of an undisturbed run of a setup."""
    done = {}

    def get(setup: str) -> tuple[Path, dict]:
        if setup not in done:
            folder = tmp_path_factory.mktemp(setup) / "run"
            done[setup] = folder, train(folder, SETUPS[setup])
            assert done[setup][1]["counters"][1] == 8
        return done[setup]

    return get


class Varied(Clockwork):
    """Pays an integer in the first episode."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 1 if self.episode % 5 == 0 else 0.75, *rest


gym.register("Varied-v0", Varied, kwargs={"action_space": gym.spaces.Box(-1, 1, (1,))})


# --- the run's folder -----------------------------------------------------------------------------
@pytest.mark.parametrize("setup", ["whole", "choices"])
def test_tensorboard(setup, undisturbed):
    folder, checkpoint = undisturbed(setup)
    charts = "SPS learning_rate beta lr_multiplier policy_passes policy_std"
    losses = "policy_loss kl entropy value_loss explained_variance"
    per_iteration = {f"charts/{x}" for x in charts.split()}
    per_iteration |= {f"losses/{x}" for x in losses.split()}
    if setup == "choices":
        per_iteration -= {"charts/policy_std"}
    points = scalars(folder, timed=True)
    episodes = np.array(rows(folder)[1:], float)
    assert set(points) == per_iteration | {"charts/episodic_return", "charts/episodic_length"}
    ends = [int(step) for step in episodes[4::5, 0]]  # of iterations of 5 episodes
    values = {}
    for tag in per_iteration:
        assert [step for step, _ in points[tag]] == ends, tag
        values[tag.split("/")[1]] = np.array([value for _, value in points[tag]])
        assert np.isfinite(values[tag.split("/")[1]]).all(), tag
    assert values["beta"] == pytest.approx([22.5, 33.75] + 6 * [35])
    multipliers = [1.0] + [1.5**-k for k in range(1, 7)] + [1.5**-6]
    assert values["lr_multiplier"] == pytest.approx(multipliers)
    assert values["learning_rate"] / multipliers == pytest.approx([values["learning_rate"][0]] * 8)
    # the first pass has no KL to stop at, and the one after it may move nothing
    assert values["policy_passes"].min() >= 1 and values["policy_passes"].max() <= 3
    assert (values["kl"] > 2e-9).all()
    assert checkpoint["servo"]["beta"] == 35


def test_budgets(tmp_path):
    checkpoint = train(tmp_path / "episodes", "--env-id CartPole-v1 -b 20 -n 60 --num-envs 4")
    assert len(rows(tmp_path / "episodes")) == 1 + 60
    assert checkpoint["counters"][1] == 3
    checkpoint = train(tmp_path / "steps", "--env-id CartPole-v1 --total-timesteps 500")
    *_, (before, _), (end, _) = scalars(tmp_path / "steps")["charts/beta"]
    assert before < 500 <= end == checkpoint["counters"][0]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v4"])
def test_an_agent_of_ones_own(env_id):
    """It sees the time, which is 0 if none is given."""
    env = gym.make(env_id)
    agent = script.Agent(env)
    obs = np.stack([env.reset(seed=seed)[0] for seed in range(3)])
    actions = agent.act(obs, agent.noise(3), time=[0, 7, 500])
    assert actions.shape == (3, *env.action_space.shape)
    assert env.step(actions[2])[1] > 0
    late, same = (agent.act(obs, time=time) for time in (500, np.full(3, 500)))
    assert (agent.act(obs) == agent.act(obs, time=0)).all() and (late == same).all()
    assert agent.discrete or (late != agent.act(obs)).all()
    tensor = torch.as_tensor(obs)
    with torch.no_grad():  # as CleanRL's
        action, logprob, entropy, value = agent.get_action_and_value(tensor)
        again, same, *_ = agent.get_action_and_value(tensor, action)
        _, late, _, later = agent.get_action_and_value(tensor, action, 500)
    assert env.step(action[0].numpy())[1] > 0
    assert torch.equal(again, action) and torch.equal(same, logprob)
    assert logprob.shape == entropy.shape == value.shape == (3,)
    assert not torch.isclose(late, logprob).any()
    assert not torch.isclose(later, value).any()
    if env_id == "CartPole-v1":
        p = logprob.exp()  # of two
        torch.testing.assert_close(entropy, -p * p.log() - (1 - p) * (1 - p).log())
    small = script.Agent(env, Args(hid1_mult=2))
    assert small.actor[0].out_features == 2 * (obs.shape[1] + 1)


# --- resume, kills, environments ------------------------------------------------------------------
def test_resume_extends_a_run_that_was_moved(tmp_path, undisturbed):
    folder, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    train(folder, f"{SETUPS['whole']} -n 15")
    shutil.move(folder, moved)
    assert_same(resume(moved, "--num-episodes 40"), undisturbed("whole")[1])
    assert rows(moved) == rows(undisturbed("whole")[0])
    assert scalars(moved) == scalars(undisturbed("whole")[0])
    assert not folder.exists()


def test_episodes_are_counted_whatever_the_batch_was(tmp_path):
    train(tmp_path / "run", "--env-id CartPole-v1 --num-envs 2 --num-episodes 10")
    assert resume(tmp_path / "run", "-b 10 --num-episodes 30")["counters"][1] == 4
    assert len(rows(tmp_path / "run")) == 1 + 30


def test_rewards_are_floats_whatever_the_first_is(tmp_path):
    checkpoint = train(tmp_path, "--env-id Varied-v0 -n 20")
    assert sorted(returns(tmp_path)) == [7.5] * 16 + [10.0] * 4
    assert checkpoint["replay"][1].min().item() == pytest.approx(0.005 * 0.75)


# --- evaluation -----------------------------------------------------------------------------------
@pytest.mark.parametrize("setup", ["whole", "choices"])
def test_evaluate_plays_the_mean_with_its_time(setup, undisturbed, monkeypatch):
    plain, times = script.Agent.numpy_actor, []

    def numpy_actor(agent):
        act = plain(agent)

        def spied(obs, noise=None, time=0):
            action = act(obs, noise, time)
            if noise is None:
                times.extend(np.ravel(time).tolist())
                policy = agent.policy(agent.features(torch.as_tensor(obs), time))
                best = policy[0].argmax() if agent.discrete else policy.mean[0]
                torch.testing.assert_close(torch.as_tensor(action[0]), best, atol=1e-5, rtol=1e-5)
            return action

        return spied

    monkeypatch.setattr(script.Agent, "numpy_actor", numpy_actor)
    returns = script.evaluate(parse(f"--evaluate {undisturbed(setup)[0]} --eval-episodes 4"))
    # 1 is paid per step; before each episode an action is ignored
    assert times == [0, *(t for length in returns for t in range(int(length) + 1))][:-1]
