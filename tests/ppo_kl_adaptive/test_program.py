"""ppo_kl_adaptive.py as a program: what moves beta and the learning rate, budgets, resumed runs, an
agent of one's own, evaluation. What all scripts do: tests/every."""

from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import rows, scalars

import ppo_kl_adaptive as script
from ppo_kl_adaptive import Args

# Every KL is too high, which moves beta in each iteration and the learning rate from the second on
SMALL = (
    "--hid1-mult 4 --episodes-per-batch 5 --update-epochs 3 --value-epochs 2 --kl-targ 1e-9 "
    "--beta 15 --checkpoint-interval 2 --no-cuda"
)
SETUPS = {  # of 8 iterations each
    "Box": "--env-id InvertedPendulum-v4 --num-envs 3 --num-episodes 40",
    "choices": "--env-id CartPole-v1 --num-envs 2 --num-episodes 40",
}


def parse(flags: str) -> Args:
    return script.parse_args(flags.split())


def train(folder: Path, flags: str) -> dict:
    """Train in this process; the final checkpoint."""
    script.train(parse(f"{SMALL} --run-dir {folder} {flags}"))
    return script.load_checkpoint(folder)


@pytest.mark.parametrize("setup", SETUPS)
def test_what_is_logged_and_the_evaluation(setup, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    checkpoint = train(folder, SETUPS[setup])
    charts = "SPS learning_rate beta lr_multiplier policy_passes policy_std"
    losses = "policy_loss kl entropy value_loss explained_variance"
    names = {f"charts/{x}" for x in charts.split()} | {f"losses/{x}" for x in losses.split()}
    if setup == "choices":
        names -= {"charts/policy_std"}
    points = scalars(folder, timed=True)
    assert set(points) == names | {"charts/episodic_return", "charts/episodic_length"}
    ends = [int(step) for step, *_ in rows(folder)[5::5]]  # of iterations of 5 episodes
    values = {}
    for tag in names:
        assert [step for step, _ in points[tag]] == ends, tag
        values[tag.split("/")[1]] = np.array([value for _, value in points[tag]])
    assert values["beta"] == pytest.approx([22.5, 33.75] + 6 * [35])
    multipliers = [1.0] + [1.5**-k for k in range(1, 7)] + [1.5**-6]
    assert values["lr_multiplier"] == pytest.approx(multipliers)
    assert values["learning_rate"] / multipliers == pytest.approx([values["learning_rate"][0]] * 8)
    # the first pass has no KL to stop at, and the one after it may move nothing
    assert values["policy_passes"].min() >= 1 and values["policy_passes"].max() <= 3
    assert (values["kl"] > 2e-9).all() and (values["explained_variance"] <= 1).all()
    assert checkpoint["servo"] == {"beta": 35.0, "lr_multiplier": pytest.approx(1.5**-6)}

    plain, times = script.numpy_actor, []

    def numpy_actor(agent):
        act = plain(agent)

        def spy(obs, noise=None, time=0):
            action = act(obs, noise, time)
            if noise is None:
                times.append(time)
                policy = agent.policy(agent.features(torch.as_tensor(obs), time))
                best = policy[0].argmax() if agent.discrete else policy.mean[0]
                torch.testing.assert_close(torch.as_tensor(action[0]), best, atol=1e-5, rtol=1e-5)
            return action

        return spy

    monkeypatch.setattr(script, "numpy_actor", numpy_actor)
    returns = script.evaluate(parse(f"--evaluate {folder} --eval-episodes 4"))
    # 1 is paid per step; before each episode but the first an action is ignored
    assert times == [t for n in returns for t in range(int(n) + 1)][:-1]


def test_budgets(tmp_path):
    folder = tmp_path / "episodes"
    assert train(folder, "--env-id CartPole-v1 -n 10 --num-envs 2")["iteration"] == 2
    assert len(rows(folder)) == 1 + 10
    # the warm-up does not count, whatever the batch was
    script.train(parse(f"--resume {folder} -b 10 -n 30"))
    assert script.load_checkpoint(folder)["iteration"] == 4
    assert len(rows(folder)) == 1 + 30
    checkpoint = train(tmp_path / "steps", "--env-id CartPole-v1 --total-timesteps 500")
    *_, (before, _), (end, _) = scalars(tmp_path / "steps")["charts/beta"]
    assert before < 500 <= end == checkpoint["global_step"]


def test_a_resumed_run_learns_by_the_flags_given_now(tmp_path, monkeypatch):
    """Rates and target; beta and the multiplier are the run's."""
    folder, seen, plain = tmp_path / "run", [], script.update
    servo = train(folder, "--env-id CartPole-v1 -n 20")["servo"]

    def update(agent, *given):
        seen.append((agent.servo.kl_targ, agent.servo.beta, len(agent.replay[1]) > 5))
        metrics = plain(agent, *given)
        seen.append([x.param_groups[0]["lr"] for x in (agent.policy_adam, agent.value_adam)])
        return metrics

    monkeypatch.setattr(script, "update", update)
    rates = "--learning-rate 1e-5 --value-learning-rate 1e-6"
    script.train(parse(f"--resume {folder} {rates} -k 0.7 -n 25"))
    assert servo["beta"] == 35 and servo["lr_multiplier"] < 1
    assert seen == [(0.7, 35, True), [1e-5 * servo["lr_multiplier"], 1e-6]]


def test_the_warm_up_sets_the_scale_and_counts_for_nothing(tmp_path, monkeypatch):
    seen, plain = [], script.rollout

    def rollout(agent, envs, run, num_episodes):
        if run.global_step == 0:
            seen.append((num_episodes, run.iteration, agent.obs_moments.count.item()))
        return plain(agent, envs, run, num_episodes)

    monkeypatch.setattr(script, "rollout", rollout)
    checkpoint = train(tmp_path / "run", "--env-id CartPole-v1 -n 5 --num-envs 2")
    (warm_up, _, nothing), (batch, _, count) = seen
    assert (warm_up, nothing, batch) == (5, 0, 5) and count > 5 * 8
    assert checkpoint["agent"]["obs_moments.count"] == count + checkpoint["global_step"]
    assert sum(number for number, *_ in checkpoint["episodes"]) == 10
    assert len(rows(tmp_path / "run")) == 1 + 5
    start = script.Agent(gym.make("CartPole-v1"), checkpoint["args"])
    assert start.obs_moments.var.eq(0).all() and start.replay == ()


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
    assert torch.equal(again, action) and torch.equal(same, logprob)
    assert logprob.shape == entropy.shape == value.shape == (3,)
    assert not torch.isclose(late, logprob).any()
    assert not torch.isclose(later, value).any()


@pytest.mark.parametrize("name", ["learning_rate", "value_learning_rate"])
def test_a_schedule_of_a_rate_is_followed(name, tmp_path, monkeypatch):
    """`update` gets the rates of its iteration."""
    moved = []
    for rate in (None, 1e-9):
        plain = script.update
        with monkeypatch.context() as patch:
            patch.setattr(
                script,
                "update",
                lambda agent, data, args, plain=plain, rate=rate: plain(
                    agent, data, replace(args, **{name: rate})
                ),
            )
            flags = "--env-id Pendulum-v1 -b 2 --total-timesteps 400 --no-cuda --seed 3 --run-dir"
            folder = tmp_path / str(rate)
            script.train(script.parse_args([*flags.split(), str(folder)]))
        agent, _ = script.load(folder)
        network = agent.critic if name == "value_learning_rate" else agent.actor
        torch.manual_seed(3)
        first = script.Agent(script.make_env("Pendulum-v1"))
        first = first.critic if name == "value_learning_rate" else first.actor
        pairs = zip(network.parameters(), first.parameters(), strict=True)
        moved.append(max(float((x - y).abs().max()) for x, y in pairs))
    assert moved[0] > 1e-4 > 1e-6 > moved[1]
