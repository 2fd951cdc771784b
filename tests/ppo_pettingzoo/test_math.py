"""ppo_pettingzoo.py: rows, deaths, turns, advantages, critics, learning, resuming, acting for one
agent. agents_toy.py has environments whose best policy is known."""

import os
import re
import sys
from collections import defaultdict
from dataclasses import replace

import gymnasium as gym
import maths
import numpy as np
import pytest
import torch
from program import METRICS, ROOT, in_process, rows, scalars
from scripts import refused

sys.path.insert(0, str(ROOT / "tests"))
os.environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"  # for programs
import agents_toy

import ppo
import ppo_pettingzoo as script
from ppo_pettingzoo import Args, Batch, Envs

SMALL = (
    "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-cuda "
    "--checkpoint-interval 1 --eval-episodes 3"
)
STEPS = 4 * 16  # of an iteration, rows after an episode's end included
SPEAKER, SPREAD = "mpe2.simple_speaker_listener_v4", "mpe2.simple_spread_v3"
KAZ = "butterfly/knights_archers_zombies_v11"
FORAGING = "lbforaging:Foraging-5x5-2p-1f-coop-v3"


parse, small, train = in_process(script, f"{SMALL} --env-id agents_toy:make", STEPS)


def make_envs(env, args: Args | None = None, n: int = 1) -> Envs:
    return Envs([env() for _ in range(n)], args or Args(), range(n))


def make_agent(envs, args: Args):
    torch.manual_seed(args.seed)
    agent = script.Agent(envs, args)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    return agent


def made(env, args: Args | None = None):
    """One such environment, and an agent for it."""
    envs = make_envs(env, args)
    return envs, make_agent(envs, args or Args())


class Log(maths.Log):
    """And of what is told of a group of agents, the deaths."""

    def __init__(self):
        super().__init__()
        self.writer = self

    def add_scalar(self, tag, value, step):
        if tag == "charts/deaths":
            self.deaths = value


def roll(env, flags: str = "", n: int = 2, steps: int = 16):
    args = replace(small(flags), num_envs=n, num_steps=steps)
    envs = make_envs(env, args, n)
    agent, log = make_agent(envs, args), Log()
    return args, agent, script.rollout(agent, envs, log, args), log


def coming_and_going():
    ends = {"dies": {"drone_0": 2}, "joins": {"drone_1": 3}, "stops": {"drone_2": 5}}
    return agents_toy.Drift((2, 1, 1), **ends)


# --- rows -----------------------------------------------------------------------------------------
def test_a_row_is_observation_number_mask_and_whether_there():
    envs = make_envs(agents_toy.Watch)
    assert envs.obs.shape == (1, 3, 3 + 3 + 3 + 2)
    scout, guard, other = envs.obs[0]
    assert scout[:3].tolist() == np.eye(3)[envs.envs[0].right["scout"]].tolist()
    assert guard[:3].tolist() == [1 - 2 * envs.envs[0].right["guard_0"], 0, 0]  # padded
    np.testing.assert_array_equal(envs.obs[0, :, 3:6], np.eye(3))
    assert scout[6:9].sum() == 2  # its mask
    assert guard[6:9].tolist() == other[6:9].tolist() == [1, 1, 0]  # choices it has
    assert envs.obs[0, :, 9:].tolist() == [[1, 0]] * 3
    assert make_envs(agents_toy.Watch, Args(agent_id=False)).obs.shape == (1, 3, 3 + 3 + 2)
    plain = make_envs(agents_toy.Watch, Args(action_masks=False)).obs[0]
    assert plain[0, 6:9].tolist() == [1, 1, 1]
    assert plain[1, 6:9].tolist() == [1, 1, 0]


def test_a_death_a_limit_and_the_row_after():
    """scout dies in the first step, guards are stopped by --max-episode-steps after two."""
    envs = make_envs(agents_toy.Watch, Args(max_episode_steps=2))
    right = envs.envs[0].right
    wrong = (right["scout"] + 1) % 3
    rewards, terminated, truncated = envs.step(
        np.array([[[wrong], [right["guard_0"]], [right["guard_1"]]]])
    )
    assert (rewards.tolist(), truncated.any()) == ([[0, 1, 1]], False)
    assert terminated.tolist() == [[True, False, False]]
    assert envs.obs[0, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]  # only its number is left
    assert envs.obs[0, 1:, 9].tolist() == [1, 1]
    assert not envs.over[0]
    right = envs.envs[0].right
    rewards, terminated, truncated = envs.step(
        np.array([[[0], [right["guard_0"]], [right["guard_1"]]]])
    )
    assert truncated.tolist() == [[False, True, True]]
    assert not terminated.any()
    assert envs.over[0]
    ((number, returns, length, deaths),) = envs.ended
    assert (number, returns.tolist(), length, deaths) == (0, [0, 2, 2], 2, 1)
    assert envs.obs[0, 1:, 0].any(axis=-1).all()  # the true last observations
    assert not envs.obs[0, :, 6:9].any()  # nobody acts
    rewards, terminated, truncated = envs.step(np.zeros((1, 3, 1), int))  # ignored
    assert not rewards.any() and not terminated.any() and not truncated.any()
    assert envs.obs[0, :, 6:9].any(axis=-1).all()
    assert (envs.episodes, envs.actions, envs.ended) == ([1], [[]], [])


def test_valid_rows_are_those_of_agents_that_lived_and_acted():
    """drone_0 dies at step 2, drone_1 joins at step 3, drone_2 stops at 5, the limit is at 6."""

    _, _, data, log = roll(coming_and_going, n=1, steps=8)
    assert data.valid[:, 0].T.astype(int).tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 1],
    ]
    assert data.running[:, 0, 0].astype(int).tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert np.argwhere(data.terminated[:, 0]).tolist() == [[1, 0]]
    assert np.argwhere(data.truncated[:, 0]).tolist() == [[4, 2], [5, 1]]
    assert data.obs[5, 0, 2, 0] != 0  # the true last observation of who was stopped
    assert (log.global_step, data.valid.sum()) == (7, 12)
    assert [length for _, _, length in log.ended] == [6]
    assert log.deaths == 1


def test_an_agent_that_vanishes_counts_as_dead_with_a_warning():
    class Vanishing(agents_toy.Drift):
        def step(self, actions):
            seen, rewards, terminated, truncated, infos = super().step(actions)
            return seen, rewards, dict.fromkeys(terminated, False), truncated, infos

    envs = make_envs(lambda: Vanishing(dies={"drone_0": 1}))
    with pytest.warns(UserWarning, match="drone_0 left without an end"):
        _, terminated, truncated = envs.step(np.zeros((1, 2, 2)))
    assert terminated.tolist() == [[True, False]]
    assert not truncated.any()


def test_rewards_of_a_defaultdict_make_no_entry():
    class Default(agents_toy.Drift):
        def step(self, actions):
            seen, rewards, *rest = super().step(actions)
            self.given = defaultdict(int, rewards)
            return seen, self.given, *rest

    envs = make_envs(lambda: Default(dies={"drone_0": 1}))
    for _ in range(2):
        envs.step(np.zeros((1, 2, 2)))
    assert list(envs.envs[0].given) == ["drone_1"]


def test_boxes_are_scaled_clipped_and_cut_to_each_agents_size():
    envs = make_envs(agents_toy.Drift)  # boxes from -2 to 4
    action = np.float32([0.0, 0.5])
    np.testing.assert_allclose(envs.roles.action(0, action), [1.0, 2.5])
    np.testing.assert_allclose(envs.roles.action(1, action), [1.0])
    np.testing.assert_array_equal(envs.roles.action(0, np.float32([-7, 7])), np.float32([-2, 4]))
    assert envs.roles.action(0, action).dtype == np.float32
    assert envs.obs[0, 1, 3:].tolist() == [0, 1, 1, 0, 1, 0]  # number, dimensions, there


def test_turns_idle_rows_and_their_rewards():
    args, _, data, log = roll(lambda: script.make_env("agents_toy:turns"), n=1, steps=8)
    assert data.valid[:, 0].T.astype(int).tolist() == [
        [1, 0, 1, 0, 1, 0, 0, 1],
        [0, 1, 0, 1, 0, 1, 0, 0],
    ]
    waits = data.waits[:, 0].T.astype(int).tolist()
    assert waits == [[0, 1, 0, 1, 0, 1, 0, 0, 1], [1, 0, 1, 0, 1, 0, 0, 1, 0]]
    assert data.terminated[5, 0].all()  # the second's move ends it for both
    played = data.actions[:6, 0, :, 0]
    expected = np.where(data.valid[:6, 0], played, -1.0)
    np.testing.assert_array_equal(data.rewards[:6, 0], expected)
    assert log.ended[0][1] == expected.sum() / 2


# --- advantages -----------------------------------------------------------------------------------
def test_gae_of_turns_by_hand():
    """gamma 0.5, lambda 1: t = 0 and 2 are the agent's, it waits at 1 and 3. The last action's
    value stands for what comes after the end of the rollout."""
    rewards = np.array([[1.0, 10, 2, 20, 0]]).T
    values = np.array([[4.0, 77, 6, 88, 8, 99]]).T
    waits = np.array([[False, True, False, True, False, True]]).T
    no = np.zeros((5, 1), bool)
    found = script.gae(rewards, values, no, no, 0.5, 1.0, waits)
    last = 0 + 8 / 2 - 8
    middle = 2 + 20 + 8 / 2 - 6 + last / 2
    np.testing.assert_allclose(found[[0, 2, 4], 0], [1 + 10 + 6 / 2 - 4 + middle / 2, middle, last])
    ends = no.copy()
    ends[3] = True  # the other's move ends it: so it does for the last action
    found = script.gae(rewards, values, ends, no, 0.5, 1.0, waits)
    np.testing.assert_allclose(found[2], 2 + 20 - 6)
    found = script.gae(rewards, values, no, ends, 0.5, 1.0, waits)
    np.testing.assert_allclose(found[2], 2 + 20 + 8 / 2 - 6)


def test_team_reward_is_the_sum_and_ends_for_all_at_once():
    """drone_0 dies at step 2; the limit at step 6 truncates the other, and so the team."""
    _, _, data, log = roll(
        lambda: agents_toy.Drift(dies={"drone_0": 2}), "--team-reward", n=1, steps=7
    )
    np.testing.assert_array_equal(data.rewards[:, 0, 0], data.rewards[:, 0, 1])
    assert data.rewards[:6].sum() / 2 == pytest.approx(2 * log.ended[0][1])
    assert not data.terminated.any()
    assert data.truncated[:, 0].T.astype(int).tolist() == [[0, 0, 0, 0, 0, 1, 0]] * 2
    both = {"drone_0": 2, "drone_1": 4}
    _, _, data, _ = roll(lambda: agents_toy.Drift(dies=both), "--team-reward", n=1, steps=5)
    assert data.terminated[:, 0].T.astype(int).tolist() == [[0, 0, 0, 1, 0]] * 2
    assert not data.truncated.any()


# --- critics and learning -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("critic", "seen"),
    [
        ("local", [0, 1, 2, 3, 4]),  # two numbers, padded to three, and the agent's number
        ("concatenated", [0, 1, 2, 10, 11, 12, 1, 1, 3, 4]),
        ("state", [20, 21, 22, 23, 0, 1, 2, 3, 4]),
    ],
)
def test_what_a_critic_sees(critic, seen):
    args = Args(critic=critic)
    _, agent = made(agents_toy.Drift, args)
    row = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 1, 0], [10, 11, 12, 13, 14, 15, 16, 1, 0]])
    if critic == "state":
        row = torch.cat([row, torch.tensor([[20.0, 21, 22, 23]] * 2)], dim=-1)
    inputs = agent.inputs(row[None])[0]
    assert inputs[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    seen_by_critic = []
    agent.critic.register_forward_hook(lambda _, given, __: seen_by_critic.append(given[0]))
    agent.get_value(inputs)
    assert seen_by_critic[0][0].tolist() == seen
    assert agent.critic[0].in_features == len(seen)
    assert agent.actor[0].in_features == 5  # the actor sees what is its own


def test_dead_agents_are_zeros_to_a_central_critic():
    concatenated = Args(critic="concatenated")
    envs, agent = made(lambda: agents_toy.Drift(dies={"drone_0": 1}), concatenated)
    envs.step(np.zeros((1, 2, 2)))
    _, other = agent.inputs(torch.tensor(envs.obs))[0]
    joint = other[agent.there :]
    assert joint[:3].tolist() == [0, 0, 0]
    assert joint[3:5].abs().min() > 0
    assert joint[6:].tolist() == [0, 1, 0, 1]  # who is there, and the number


def test_what_an_agent_lacks_is_never_chosen_and_adds_no_entropy():
    envs, agent = made(agents_toy.Watch)
    inputs = agent.inputs(torch.tensor(envs.obs))[0, 1].repeat(1000, 1)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(100)
        actions, _, entropy, _ = agent(inputs)
        _, logprob, _, _ = agent(inputs[:3], torch.arange(3)[:, None])
    assert set(actions.ravel().tolist()) == {0, 1}
    assert logprob.exp()[2] == 0
    assert logprob.exp().sum() == pytest.approx(1, abs=1e-6)
    expected = -(logprob[:2].exp() * logprob[:2]).sum()
    torch.testing.assert_close(entropy[0], expected)
    envs, agent = made(agents_toy.Drift)
    inputs = agent.inputs(torch.tensor(envs.obs))[0]
    _, one, entropy, _ = agent(inputs, torch.tensor([[0.3, 0.4], [0.3, 0.4]]))
    _, other, _, _ = agent(inputs, torch.tensor([[0.3, -9.0], [0.3, -9.0]]))
    assert one[0] != other[0]
    assert one[1] == other[1]
    torch.testing.assert_close(entropy[0], 2 * entropy[1])


def learn(data, args, agent) -> tuple[dict, torch.Tensor]:
    metrics = script.update(agent, data, 1e-3, args)
    return metrics, torch.nn.utils.parameters_to_vector(agent.parameters()).detach()


def test_rows_of_the_dead_change_nothing():
    """Filled with NaN wherever an agent was not there, with its true last rows kept."""

    args, agent, data, _ = roll(coming_and_going, "--num-steps 20", n=2, steps=20)
    dead = ~data.valid
    there = data.obs[..., agent.there] > 0
    obs, rewards, actions = data.obs.copy(), data.rewards.copy(), data.actions.copy()
    obs[~there] = np.nan
    rewards[dead] = np.nan
    actions[dead] = np.nan
    spoilt = data._replace(obs=obs, rewards=rewards, actions=actions)
    assert np.isnan(obs).any() and np.isnan(rewards).any()
    metrics, weights = learn(data, args, agent)
    _, agent, _, _ = roll(coming_and_going, "--num-steps 20", n=2, steps=20)
    others, same = learn(spoilt, args, agent)
    assert metrics == others
    assert torch.equal(weights, same)
    assert {f"losses/{name}" for name in METRICS} < metrics.keys()


def test_the_dead_of_a_team_teach_the_value_function_alone():
    """A batch whose rows do not act leaves the actor as it is, and changes the critic."""
    args, agent, data, _ = roll(
        lambda: agents_toy.Drift(dies={"drone_0": 1, "drone_1": 3}), "--team-reward --no-clip-vloss"
    )
    inputs = agent.inputs(torch.tensor(data.obs))[:-1].flatten(0, 2)
    dead = torch.tensor((data.running & ~data.valid).ravel())
    n = int(dead.sum())
    numbers = torch.ones(n), torch.arange(n) * 1.0, torch.ones(n), torch.zeros(n), torch.zeros(n)
    batch = Batch(inputs[dead], torch.tensor(data.actions).flatten(0, 2)[dead], *numbers)
    loss, metrics = script.ppo_loss(agent, args, batch)
    loss.backward()
    assert metrics["policy_loss"] == metrics["entropy"] == metrics["clipfrac"] == 0
    assert all(p.grad is None or not p.grad.any() for p in agent.actor.parameters())
    assert all(p.grad.any() for p in agent.critic.parameters())


def short():
    return agents_toy.Drift(dies={"drone_0": 2}, limit=4)


def turns():
    return script.make_env("agents_toy:turns")


@pytest.mark.parametrize(
    ("env", "flags", "learned"),
    [  # rows of both agents, in five steps
        (short, "", [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),
        (short, "--team-reward", [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
        (turns, "--team-reward", [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]),
    ],
)
def test_which_rows_are_learned_from(env, flags, learned):
    args, agent, data, _ = roll(env, f"{flags} --update-epochs 1", n=1, steps=5)
    asked = []

    class Order:
        def permutation(self, rows):
            asked.append(rows)
            return rows

    agent.rng = Order()
    script.update(agent, data, 0.0, args)
    found = np.zeros(10, int)
    found[asked[0]] = 1
    assert found.reshape(5, 2).T.tolist() == learned


def test_weighted_loss_is_that_of_the_rows_that_act():
    args = small()
    envs, agent = made(agents_toy.Watch, args)
    rng = np.random.default_rng(1)
    inputs = agent.inputs(torch.tensor(envs.obs))[0].repeat(4, 1)
    fields = [torch.tensor(rng.normal(size=12), dtype=torch.float32) for _ in range(4)]
    acts = torch.tensor([1.0, 0, 1] * 4)
    batch = Batch(inputs, torch.zeros(12, 1, dtype=torch.long), *fields, acts)
    _, found = script.ppo_loss(agent, args, batch)
    kept = Batch(*[x[acts > 0] for x in batch])
    _, expected = script.ppo_loss(agent, args, kept)
    for name in set(expected) - {"value_loss"}:
        torch.testing.assert_close(found[name], expected[name])
    advantages = kept.advantages
    by_hand = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (agent(kept.inputs, kept.actions)[1] - kept.logprobs).exp()
    surrogate = torch.min(ratio * by_hand, ratio.clamp(0.8, 1.2) * by_hand)
    torch.testing.assert_close(found["policy_loss"], -surrogate.mean())


def test_value_norm_learns_scaled_returns_and_gives_values_in_the_unit_of_rewards(monkeypatch):
    args, agent, data, _ = roll(agents_toy.Watch, "--value-norm True")
    agent.value_moments.mean.fill_(50.0)
    agent.value_moments.var.fill_(100.0)
    agent.value_moments.count.fill_(1e9)
    inputs = agent.inputs(torch.tensor(data.obs))
    scaled = agent.scaled_value(inputs)
    torch.testing.assert_close(agent.get_value(inputs), 50 + 10 * scaled)
    torch.testing.assert_close(agent(inputs)[3], scaled)
    batches, plain = [], script.ppo_loss
    monkeypatch.setattr(script, "ppo_loss", lambda a, b, c: batches.append(c) or plain(a, b, c))
    script.update(agent, data, 0.0, args)
    first = torch.cat([b.returns - b.values for b in batches[:2]])
    errors = torch.cat([b.advantages for b in batches[:2]])
    moments = agent.value_moments
    torch.testing.assert_close(moments.mean.item(), 50.0, atol=1e-4, rtol=0)
    torch.testing.assert_close(first, errors / 10, atol=1e-3, rtol=0)
    flags = ["", "--value-norm True", "--team-reward", "--critic concatenated"]
    made = [make_agent(make_envs(agents_toy.Watch), small(f)).value_norm for f in flags]
    assert made == [False, True, True, True]
    off = small("--team-reward --value-norm False")
    assert make_agent(make_envs(agents_toy.Watch), off).value_norm is False


def test_agents_that_are_alike_can_be_permuted():
    """Without numbers, in another order: the same rows elsewhere, and the same learning."""
    sizes = (2, 2, 2)
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        flags = "--no-agent-id --num-minibatches 1 --update-epochs 3"
        args = replace(small(flags), num_envs=2, num_steps=12)
        envs = make_envs(lambda order=order: agents_toy.Drift(sizes, order=order), args, 2)
        agent = make_agent(envs, args)
        plain = agent.noise
        agent.noise = lambda *shape, order=order, plain=plain: plain(*shape)[:, :, list(order)]
        data = script.rollout(agent, envs, Log(), args)
        metrics, weights = learn(data, args, agent)
        results.append((order, data, metrics, weights))
    (_, data, metrics, weights), (order, other, others, same) = results
    for name in ("obs", "actions", "rewards", "valid"):
        x, y = getattr(data, name), getattr(other, name)
        np.testing.assert_allclose(x[:, :, list(order)], y, atol=1e-6)
    torch.testing.assert_close(weights, same, atol=1e-5, rtol=0)
    assert metrics == pytest.approx(others, abs=1e-4)


def test_one_agent_of_a_gymnasium_environment_learns_as_in_ppo_py(tmp_path):
    """The same episodes, and the same weights to rounding."""
    flags = "--env-id CartPole-v1 --total-timesteps 2048 --num-envs 4 --num-steps 128 --no-cuda "
    flags = f"{flags} --update-epochs 4 --learning-rate 1e-3 --seed 7".split()
    for module, more in ((ppo, ["--no-compile"]), (script, [])):
        folder = str(tmp_path / module.__name__)
        module.train(module.parse_args([*flags, *more, "--run-dir", folder]))
    assert rows(tmp_path / "ppo") == rows(tmp_path / "ppo_pettingzoo")
    assert len(rows(tmp_path / "ppo")) > 40
    ours, theirs = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["agent"]
        for name in ("ppo_pettingzoo", "ppo")
    )
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, atol=1e-5, rtol=1e-4)


LEARNING = [  # what only it shows; flags, greedy, the least team return
    pytest.param(
        "--env-id agents_toy:make --num-envs 8 --num-steps 64 --total-timesteps 20000",
        False, 55.0, id="padding, masks, deaths, limits",
    ),
    pytest.param(
        f"--env-id {FORAGING} --num-steps 64 --total-timesteps 80000 --max-episode-steps 50 "
        '--env-kwargs {"max_episode_steps":1000000}',
        False, 0.9, id="Tuple spaces, a joint reward", marks=pytest.mark.slow,
    ),
    pytest.param(
        f"--env-id {SPEAKER} --num-steps 100 --total-timesteps 60000",
        True, -45.0, id="agents that differ, communication", marks=pytest.mark.slow,
    ),
    pytest.param(
        f"--env-id {KAZ} --num-envs 8 --total-timesteps 50000 "
        '--env-kwargs {"max_cycles":900,"max_zombies":10}',
        False, 4.5, id="early deaths", marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "greedy", "least"), LEARNING)
def test_learning(tmp_path, flags, greedy, least):
    script.train(parse(f"{flags} --no-cuda --run-dir {tmp_path / 'run'}"))
    env_id = flags.split()[1]
    play = f"--evaluate {tmp_path / 'run'} --env-id {env_id} --eval-episodes 100"
    means = script.evaluate(parse(f"{play} {'--eval-greedy' if greedy else ''}"))
    agents = script.make_envs(Args(env_id=env_id, num_envs=1), 1).obs.shape[1]
    assert agents * np.mean(means) >= least


# --- resuming -------------------------------------------------------------------------------------
RESUMED = [
    pytest.param("--env-id agents_toy:turns --max-episode-steps 4", id="turns"),
    pytest.param(f"--env-id {SPEAKER} --team-reward --critic concatenated", id="mpe2"),
    pytest.param(f"--env-id {KAZ} --critic state --value-norm False", id="kaz"),
    pytest.param(f"--env-id {FORAGING}", id="foraging"),
]


@pytest.mark.parametrize("flags", RESUMED)
def test_killed_and_resumed_to_the_same_bits(tmp_path, flags):
    named = f"--env-id {flags.split()[1]}"
    flags = f"{SMALL} {flags} --total-timesteps {5 * STEPS}"
    maths.killed_and_resumed(
        "ppo_pettingzoo", tmp_path, flags, named, least=0 if KAZ in flags else 1
    )


# --- logs, saved policies -------------------------------------------------------------------------
def test_what_is_logged(tmp_path):
    checkpoint = train(tmp_path / "run")
    told = scalars(tmp_path / "run", timed=True)
    own = {f"charts/return/{name}" for name in ("scout", "guard_0", "guard_1")}
    more = {"episodic_return", "team_return", "episodic_length", "deaths", "agent_steps", "SPS"}
    assert own | {f"charts/{name}" for name in more} < told.keys()
    assert {f"losses/{name}" for name in [*METRICS, "explained_variance"]} < told.keys()
    for (_, mean), (_, team) in zip(
        told["charts/episodic_return"], told["charts/team_return"], strict=True
    ):
        assert team == pytest.approx(3 * mean, rel=1e-5)
    parts = [[value for _, value in told[name]] for name in sorted(own)]
    means = [value for _, value in told["charts/episodic_return"]]
    np.testing.assert_allclose(np.mean(parts, axis=0), means, rtol=1e-5)
    agent_steps = told["charts/agent_steps"][-1][1]
    assert agent_steps == checkpoint["agent"]["steps"] < 3 * checkpoint["counters"][0]
    between = 3 * STEPS - checkpoint["counters"][0]  # rows after an episode's end
    assert 0 <= len(rows(tmp_path / "run")) - 1 - between <= 4


def test_many_agents_are_logged_by_the_names_without_numbers(tmp_path):
    names = ["red_0", "red_1", "blue_0", *[f"blue_{i}" for i in range(1, 7)]]
    with script.Run(replace(small(), run_dir=tmp_path / "run"), {}) as log:
        ended = [(0, np.arange(9.0), 5, 2), (1, np.arange(9.0) + 2, 7, 0)]
        log.global_step = 7
        script.log_agents(log, names, ended)
        log.status = "finished"
    told = {name: values[0][1] for name, values in scalars(tmp_path / "run").items()}
    assert told["charts/return/red"] == 1.5
    assert told["charts/return/blue"] == 6
    assert (told["charts/team_return"], told["charts/deaths"]) == (45, 1)


def test_a_saved_policy_acts_for_one_agent_and_for_all(tmp_path):
    train(tmp_path / "run")
    env = agents_toy.Watch()
    agent, args = script.load(tmp_path / "run", Envs([env], small()))
    observations, infos = env.reset(seed=3)
    actions = agent.act(observations, infos=infos)
    assert actions.keys() == observations.keys()
    assert all(env.action_space(name).contains(action) for name, action in actions.items())
    for name, observation in observations.items():
        assert agent.act({name: observation}, infos=infos) == {name: actions[name]}
    drawn = {
        agent.act({"scout": observations["scout"]}, agent.noise(1))["scout"] for _ in range(99)
    }
    assert drawn == {0, 1, 2}
    allowed = set(np.flatnonzero(infos["scout"]["action_mask"]))
    given = {"scout": observations["scout"]}
    assert {agent.act(given, agent.noise(1), infos)["scout"] for _ in range(99)} == allowed


def test_a_saved_policy_acts_in_mpe2_as_its_users_write_it(tmp_path):
    from mpe2 import simple_speaker_listener_v4

    script.train(parse(f"{SMALL} --run-dir {tmp_path / 'run'} --total-timesteps {STEPS}"))
    agent, args = script.load(tmp_path / "run")
    env = simple_speaker_listener_v4.parallel_env()
    observations, infos = env.reset(seed=1)
    while env.agents:
        observations, rewards, *_ = env.step(agent.act(observations))
    assert args.env_id == SPEAKER


def test_evaluation_prints_sampled_and_greedy_sums_and_means(tmp_path, capsys):
    train(tmp_path / "run")
    play = f"--evaluate {tmp_path / 'run'} --env-id agents_toy:make --eval-episodes 5"
    for more, kind in (("", "sampled"), ("--eval-greedy", "greedy")):
        capsys.readouterr()
        found = script.evaluate(parse(f"{play} {more}"))
        said = capsys.readouterr().out
        pattern = r"eval_episode=\d+, episodic_return=(\S+) team_return=(\S+)"
        listed = [(float(mean), float(team)) for mean, team in re.findall(pattern, said)]
        assert [mean for mean, _ in listed] == pytest.approx(found, abs=0.006)
        assert [team / 3 for _, team in listed] == pytest.approx(found, abs=0.01)
        summary = re.search(rf"{kind}, 5 episodes: mean over agents (\S+) .* agents (\S+) ", said)
        assert float(summary[1]) == pytest.approx(np.mean(found), abs=0.006)
        assert float(summary[2]) == pytest.approx(3 * np.mean(found), abs=0.01)
        assert "sampled, 5" in said and "greedy, 5" in said
        assert script.evaluate(parse(f"{play} {more}")) == found  # always the same episodes


# --- environments ---------------------------------------------------------------------------------
def test_a_mask_of_another_size_and_no_state(capfd):
    class Short(agents_toy.Watch):
        def look(self):
            observations, infos = super().look()
            infos["scout"]["action_mask"] = np.ones(1)  # would be broadcast
            return observations, infos

    refused(capfd, "the action_mask of scout has 1 of 3 choices", make_envs, Short)
    refused(capfd, "--critic state", script.train, small("--critic state"))


def test_modules_that_a_folder_may_name():
    """Those of packages that are known."""
    known = {
        SPEAKER: True, KAZ: True, FORAGING: True, "CartPole-v1": True,
        "magent2.environments.battle_v4": True, "evil": True, "evil:make": False,
        "runs.stranger.evil": False, "mpe2evil.x": False, "evil:mpe2.x": False,
        "evil:sisl/pursuit_v5": False, "mpe2.core:os": False,
    }  # fmt: skip
    assert {env_id: script.is_known(env_id) for env_id in known} == known


def test_spaces_of_gymnasium_environments():
    """One agent of a plain one; its mask is in `info`, a MultiBinary has branches of two."""

    class Bits(gym.Env):
        observation_space = gym.spaces.Discrete(3)
        action_space = gym.spaces.MultiBinary(2)

        def reset(self, seed=None, options=None):
            return 2, {"action_mask": np.array([1, 0, 1, 1])}

        def step(self, action):
            assert self.action_space.contains(action)
            return 1, float(action.sum()), True, False, {}

    envs = make_envs(lambda: script.Gymnasium(Bits(), Bits))
    assert envs.obs.tolist() == [[[0, 0, 1, 1, 0, 1, 1, 1, 0]]]
    rewards, terminated, _ = envs.step(np.array([[[0, 1]]]))
    assert (rewards.item(), terminated.item()) == (1, True)


def test_episodes_of_foraging_repeat():
    """Its resets depend on the episode before, unless it is made anew."""
    envs = Envs([script.make_env(FORAGING)], Args())
    first = [envs.reset(0) for _ in range(30)]
    for _ in range(40):
        envs.step(np.full((1, 2, 1), 1))
    envs.episodes = [0]
    again = [envs.reset(0) for _ in range(30)]
    np.testing.assert_array_equal(first, again)
