"""ppo_kl_adaptive.py as a program: command line, run folder, resume, evaluation, compilation. What
all scripts promise is in every/."""

import shutil
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import (
    Clockwork,
    assert_same,
    check_both_evaluations,
    content,
    rows,
    scalars,
)

import ppo_kl_adaptive as script
from ppo_kl_adaptive import Args

# Every KL is too high, which moves beta in each iteration and the learning rate from the second on
SMALL = (
    "--hid1-mult 4 --episodes-per-batch 5 --update-epochs 3 --value-epochs 2 --kl-targ 1e-9 "
    "--beta 15 --checkpoint-interval 2 --no-cuda"
)
# 8 iterations each
SETUPS = {
    "whole": "--env-id InvertedPendulum-v4 --num-envs 3 --num-episodes 40",
    "choices": "--env-id CartPole-v1 --num-envs 2 --num-episodes 40",
    "wide": "--env-id CartPole-v1 --num-envs 6 --episodes-per-batch 6 --num-episodes 48",
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


def plain(checkpoint: dict, **changed) -> dict:
    """With these arguments changed."""
    return checkpoint | {"args": asdict(checkpoint["args"]) | changed}


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
    """Observes a Dict, pays an integer in the first episode and may write into its action."""

    observation_space = gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Box(-1, 1, (2, 2)))

    def __init__(self):
        super().__init__(gym.spaces.Box(-1, 1, (1,)))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": 2, "b": np.zeros((2, 2))}, {}

    def step(self, action):
        *_, over, _, info = super().step(action)
        action[:] = np.nan
        reward = 1 if self.episode % 5 == 0 else 0.75
        return {"a": self.t % 3, "b": np.ones((2, 2))}, reward, over, False, info


FROM_1 = gym.spaces.Discrete(2, start=1)
gym.register("Clock_choice-v0", Clockwork, kwargs={"action_space": FROM_1})
gym.register("Varied-v0", Varied)

# --- the run's folder -----------------------------------------------------------------------------


def test_steps_of_the_warm_up_are_seen_but_not_counted(undisturbed):
    folder, checkpoint = undisturbed("whole")
    lengths = [int(length) for *_, length in rows(folder)[1:]]
    assert sum(lengths) == checkpoint["counters"][0]
    assert checkpoint["agent"]["obs_moments.count"] > sum(lengths)


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


@pytest.mark.parametrize(
    ("flags", "betas"),
    [("--servo schulman --kl-targ 0.5", [0.5, 0.25]), ("--servo fixed --beta 3 -k 1e-6", [3, 3])],
)
def test_servos(flags, betas, tmp_path):
    script.train(parse(f"InvertedPendulum-v4 {flags} -n 40 --run-dir {tmp_path / 'run'}"))
    assert [value for _, value in scalars(tmp_path / "run")["charts/beta"]] == betas


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_learning_rate_servo_moves_the_rate_after_every_pass(epochs, tmp_path):
    flags = f"--env-id CartPole-v1 --servo learning-rate --kl-targ 1e-9 --update-epochs {epochs}"
    script.train(parse(f"{flags} -b 5 -n 5 --run-dir {tmp_path / 'run'}"))
    ((_, multiplier),) = scalars(tmp_path / "run")["charts/lr_multiplier"]
    assert multiplier == pytest.approx(1.5**-epochs)


def test_budgets(tmp_path):
    checkpoint = train(tmp_path / "episodes", "--env-id CartPole-v1 -b 20 -n 60 --num-envs 4")
    assert len(rows(tmp_path / "episodes")) == 1 + 60
    assert checkpoint["counters"][1] == 3
    checkpoint = train(tmp_path / "steps", "--env-id CartPole-v1 --total-timesteps 500")
    *_, (before, _), (end, _) = scalars(tmp_path / "steps")["charts/beta"]
    assert before < 500 <= end == checkpoint["counters"][0]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v4"])
def test_an_agent_of_ones_own(env_id):
    env = gym.make(env_id)
    agent = script.Agent(env)
    obs = np.stack([env.reset(seed=seed)[0] for seed in range(3)])
    actions = agent.act(obs, agent.noise(3), time=[0, 7, 500])
    assert actions.shape == (3, *env.action_space.shape)
    assert env.step(actions[2])[1] > 0
    probabilities = []
    for time in (torch.zeros(3), torch.full((3,), 500)):  # the policy sees the time
        with torch.no_grad():
            policy = agent.policy(agent.features(torch.as_tensor(obs), time))
        probabilities.append(policy.log_prob(torch.as_tensor(actions)))
    assert probabilities[0].shape == (3,)
    assert not torch.isclose(*probabilities).any()
    with torch.no_grad():  # as CleanRL's
        action, logprob, entropy, value = agent.get_action_and_value(torch.as_tensor(obs))
        same, late, _, later = agent.get_action_and_value(torch.as_tensor(obs), action, 500)
    assert env.step(action[0].numpy())[1] > 0
    assert torch.equal(same, action)
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


def test_choices_that_start_at_1(tmp_path, monkeypatch):
    step, actions = Clockwork.step, set()

    def spy(env, action):
        actions.add(int(action))
        return step(env, action)

    monkeypatch.setattr(Clockwork, "step", spy)
    folder = tmp_path / "run"
    train(folder, "--env-id Clock_choice-v0 -n 20")
    script.evaluate(parse(f"--evaluate {folder}"))
    assert actions == {1, 2}


def test_a_varied_environment(tmp_path):
    """Rewards are floats, whatever the first is; what is done to an action is not learned from."""
    checkpoint = train(tmp_path, "--env-id Varied-v0 -n 20")
    returns = sorted(float(row[1]) for row in rows(tmp_path)[1:])
    assert returns == [7.5] * 16 + [10.0] * 4
    assert checkpoint["agent"]["obs_moments.mean"].shape == (7,)
    assert checkpoint["replay"][1].min().item() == pytest.approx(0.005 * 0.75)


# --- evaluation, compilation, learning ------------------------------------------------------------


@pytest.mark.parametrize("setup", ["whole", "choices"])
def test_evaluate_plays_the_mean_with_its_time_and_writes_nothing(
    setup, undisturbed, monkeypatch, capsys
):
    folder, _ = undisturbed(setup)
    plain, times = script.Agent.numpy_actor, []

    def numpy_actor(agent):
        act = plain(agent)

        def spied(obs, noise=None, time=0):
            if noise is not None:
                return act(obs, noise, time)
            times.extend(np.ravel(time).tolist())
            action = act(obs, noise, time)
            policy = agent.policy(agent.features(torch.as_tensor(obs), time))
            best = policy[0].argmax() if agent.discrete else policy.mean[0]
            torch.testing.assert_close(torch.as_tensor(action[0]), best, atol=1e-5, rtol=1e-5)
            return action

        return spied

    monkeypatch.setattr(script.Agent, "numpy_actor", numpy_actor)
    capsys.readouterr()  # this test may be the first that trains
    before = content(folder)
    flags = f"--evaluate {folder} --eval-episodes 4"
    returns = script.evaluate(parse(flags))
    # 1 is paid per step; before each episode an action is ignored
    assert times == [0, *(t for length in returns for t in range(int(length) + 1))][:-1]
    assert script.evaluate(parse(flags)) == returns
    check_both_evaluations(capsys.readouterr().out, returns)
    assert content(folder) == before


def test_a_saved_policy_in_ones_own_code(undisturbed):
    """Time is the state that it needs."""
    agent, args = script.load(undisturbed("whole")[0])
    env = gym.make(args.env_id)
    obs, _ = env.reset(seed=1)
    actions = [agent.act(obs[None], time=time) for time in (0, 500, np.array([500]))]
    assert (actions[0] == agent.act(obs[None])).all()  # the time is 0 if none is given
    assert (actions[1] == actions[2]).all() and (actions[0] != actions[1]).all()
    assert actions[0].shape == (1, *env.action_space.shape)


def assert_same_to_rounding(tmp_path: Path, *flags: str):
    """Two runs of two iterations learn the same."""
    one, other = (
        train(tmp_path / flag, f"--env-id InvertedPendulum-v4 -n 10 {flag}") for flag in flags
    )
    for name, value in one["agent"].items():
        torch.testing.assert_close(other["agent"][name], value, rtol=0, atol=1e-4)
    tags = [scalars(tmp_path / flag) for flag in flags]
    for tag in ("losses/policy_loss", "losses/value_loss", "losses/entropy"):
        for (step, a), (same, b) in zip(tags[0][tag], tags[1][tag], strict=True):
            assert step == same
            assert a == pytest.approx(b, abs=1e-4), tag


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_learning_on_a_gpu_is_learning_on_a_cpu(tmp_path, capsys):
    assert_same_to_rounding(tmp_path, "--no-cuda", "--cuda")
    assert "InvertedPendulum-v4 on cuda" in capsys.readouterr().out
    assert resume(tmp_path / "--cuda", "-n 15")["counters"][1] == 3


def test_learns_cartpole(tmp_path):
    folder = tmp_path / "run"
    script.train(parse(f"--env-id CartPole-v1 --total-timesteps 60000 --run-dir {folder}"))
    returns = [float(row[1]) for row in rows(folder)[1:]]
    assert np.mean(returns[-20:]) >= 475
