"""ppo_pettingzoo.py: rows, deaths, turns, masks, images, critics, learning, resuming, games of two.
The update is compared with a reference in algorithms/test_agents.py; agents_toy.py has environments
whose best policy is known."""

import json
import re
import signal
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import agents_toy
import gymnasium as gym
import numpy as np
import pytest
import scripts
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from program import rows, scalars, train_until_killed

import ppo_pettingzoo as script
from ppo_pettingzoo import Args, Envs

SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-cuda"
SPEAKER = "mpe2.simple_speaker_listener_v4"
KAZ = "butterfly/knights_archers_zombies_v11"
FORAGING = "lbforaging:Foraging-5x5-2p-1f-coop-v3"


parse = partial(scripts.parse, "ppo_pettingzoo")


def make_envs(env_id: str = "agents_toy:make", kwargs=None, **flags) -> Envs:
    flags = {"env_id": env_id, "env_kwargs": json.dumps(kwargs or {}), "num_envs": 1} | flags
    return script.make_envs(Args(**flags), flags["num_envs"], {})


def make_agent(envs: Envs):
    torch.manual_seed(1)
    agent = script.Agent(envs, envs.args)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    return agent


def roll(folder, num_steps: int, env_id: str, kwargs=None, **flags):
    """The agent, the rollout of one environment, and what was logged."""
    envs = make_envs(env_id, kwargs, num_steps=num_steps, num_minibatches=2, **flags)
    agent = make_agent(envs)
    with script.Run(replace(envs.args, run_dir=folder), {}) as run:
        data = script.rollout(agent, envs, run, envs.args)
    return agent, data, scalars(folder)


COMING_AND_GOING = {  # the limit is at 6
    "sizes": [2, 1, 1],
    "dies": {"drone_0": 2},
    "joins": {"drone_1": 3},
    "stops": {"drone_2": 5},
}


# --- rows -----------------------------------------------------------------------------------------
def test_a_row_is_observation_number_mask_and_whether_there():
    envs = make_envs()
    assert envs.obs.shape == (1, 3, 3 + 3 + 3 + 2)
    scout, guard, other = envs.obs[0]
    right = envs.envs[0].right
    assert scout[:3].tolist() == np.eye(3)[right["scout"]].tolist()
    assert guard[:3].tolist() == [1 - 2 * right["guard_0"], 0, 0]  # padded
    np.testing.assert_array_equal(envs.obs[0, :, 3:6], np.eye(3))
    assert scout[6:9].sum() == 2  # its mask
    assert guard[6:9].tolist() == other[6:9].tolist() == [1, 1, 0]  # choices it has
    assert envs.obs[0, :, 9:].tolist() == [[1, 0]] * 3
    assert make_envs(agent_id=False).obs.shape == (1, 3, 3 + 3 + 2)
    unmasked = make_envs(action_masks=False).obs[0]
    assert unmasked[0, 6:9].tolist() == [1, 1, 1]
    assert unmasked[1, 6:9].tolist() == [1, 1, 0]


def test_rows_of_agents_that_die_join_stop_and_vanish(tmp_path):
    _, data, tags = roll(tmp_path / "a", 8, "agents_toy:drift", COMING_AND_GOING)
    acts = [[1, 1, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 1]]
    assert data.acts[:, 0].T.astype(int).tolist() == data.valid[:, 0].T.astype(int).tolist() == acts
    assert np.argwhere(data.terminated[:, 0]).tolist() == [[1, 0]]
    assert np.argwhere(data.truncated[:, 0]).tolist() == [[4, 2], [5, 1]]
    assert data.obs[5, 0, 2, 0] != 0  # the true last observation of who was stopped
    assert not data.obs[2, 0, 0, :3].any()  # of who died there is none
    assert rows(tmp_path / "a")[1][2] == "6"
    assert tags["charts/return/drone_0"][0][0] == 7
    # drone_0 leaves without a word, and the limit is the script's
    kwargs = COMING_AND_GOING | {"silent": True, "limit": 99}
    _, same, _ = roll(tmp_path / "b", 8, "agents_toy:drift", kwargs, max_episode_steps=6)
    for name in ("terminated", "truncated", "acts", "rewards", "obs"):
        np.testing.assert_array_equal(getattr(same, name), getattr(data, name))


@pytest.mark.parametrize("end", ["dies", "stops", "silent"])
def test_a_held_action_ends_with_the_first_agent_that_does(end):
    """In its second step of three; the next one is held to the end."""
    kwargs = {"sizes": [1, 1], "limit": 99, "silent": end == "silent"}
    kwargs["stops" if end == "stops" else "dies"] = {"drone_0": 2}
    envs = make_envs("agents_toy:drift", kwargs, action_repeat=3)
    rewards, terminated, truncated = envs.step(np.zeros((1, 2, 1), np.float32))
    assert (envs.envs[0].t, rewards.tolist()) == (2, [[2.0, 2.0]])
    assert terminated.tolist() == [[end != "stops", False]]
    assert truncated.tolist() == [[end == "stops", False]]
    envs.step(np.zeros((1, 2, 1), np.float32))
    assert envs.envs[0].t == 5


def test_turns_and_the_rewards_of_who_waits(tmp_path):
    for folder, team in ((tmp_path / "one", False), (tmp_path / "team", True)):
        kwargs = {"masks": not team}  # who waits has none, or one of ones
        _, data, _ = roll(folder, 8, "agents_toy:turns", kwargs, team_reward=team)
        acts = [[1, 0, 1, 0, 1, 0, 0, 1], [0, 1, 0, 1, 0, 1, 0, 0]]
        assert data.acts[:, 0].T.astype(int).tolist() == acts
        assert data.valid[:, 0].T.astype(int).tolist() == acts
        waits = [[0, 1, 0, 1, 0, 1, 0, 0, 1], [1, 0, 1, 0, 1, 0, 0, 1, 0]]
        assert data.waits[:, 0].T.astype(int).tolist() == waits
        assert data.terminated[5, 0].all()  # the second's move ends it for both
        expected = np.where(data.acts[:6, 0], data.actions[:6, 0, :, 0], -1.0)
        if team:
            expected = expected.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(data.rewards[:6, 0], expected * np.ones(2))


def test_no_one_waits_if_no_one_says_so():
    values = np.arange(8.0)[:, None]
    ends = np.eye(7, 1, -2, bool), np.eye(7, 1, -4, bool)
    inputs = np.ones((7, 1)), values, *ends, 0.9, 0.8
    np.testing.assert_array_equal(script.gae(*inputs), script.gae(*inputs, values < 0))
    assert (script.gae(*inputs) != script.gae(*inputs, values >= 0)).any()


def test_what_is_logged_is_what_was_paid(tmp_path, monkeypatch):
    """Episodes of six steps, of which a rollout has four."""
    paid, plain = [], agents_toy.Drift.step
    monkeypatch.setattr(
        agents_toy.Drift, "step", lambda *given: paid.append(plain(*given)) or paid[-1]
    )
    flags = "--env-id agents_toy:drift --num-envs 1 --num-steps 4 --total-timesteps 40"
    scripts.train("ppo_pettingzoo", tmp_path / "run", flags)
    episodes = np.array(rows(tmp_path / "run")[1:], float)
    assert len(episodes) >= 5
    means = [np.mean([*rewards.values()]) for _, rewards, *_ in paid[: 6 * len(episodes)]]
    sums = np.reshape(means, (-1, 6)).sum(axis=1)
    np.testing.assert_allclose(episodes[:, 1:], np.stack([sums, 0 * sums + 6], axis=1), rtol=1e-6)


def test_seeds_of_games_in_turns_fit_into_31_bits(monkeypatch):
    seeds, reset = [], agents_toy.Turns.reset
    monkeypatch.setattr(
        agents_toy.Turns, "reset", lambda *x, seed, **_: seeds.append(seed) or reset(*x)
    )
    make_envs("agents_toy:turns", num_envs=8)
    wide = [script.episode_seed(1, i, 0) for i in range(8)]
    assert seeds == [x % 2**31 for x in wide] != wide


VECTOR, CHOICE = Box(0, 1, (3,)), Discrete(3)


def roles(space=VECTOR, action=CHOICE, other=None):
    spaces = Dict({"a": space, "b": space}), Dict({"a": action, "b": other or action})
    return script.Roles(*spaces, Args(agent_id=False))


def test_boxes_are_scaled_clipped_and_cut_to_each_agents_size():
    envs = make_envs("agents_toy:drift")  # boxes from -2 to 4
    act = envs.roles.env_action
    np.testing.assert_allclose(act("drone_0", np.float32([0, 0.5])), [1.0, 2.5])
    np.testing.assert_allclose(act("drone_1", np.float32([0, 0.5])), [1.0])
    np.testing.assert_array_equal(act("drone_0", np.float32([-7, 7])), np.float32([-2, 4]))
    assert act("drone_0", np.float32([0, 0.5])).dtype == np.float32
    assert envs.obs[0, 1, 3:].tolist() == [0, 1, 1, 0, 1, 0]  # number, dimensions, there
    high = np.full(2, np.finfo(np.float32).max)  # a Box as large as its type has no bounds
    act = roles(action=Box(-high, high), other=Box(-2.0, 2.0, (2,))).env_action
    assert act("a", np.float32([0.5, -3.0])).tolist() == [0.5, -3.0]
    assert act("b", np.float32([0.5, -3.0])).tolist() == [1.0, -2.0]


def test_masks_and_spaces():
    nested = roles(Dict(action_mask=Box(0, 1, (3,)), goal=Discrete(2), x=Box(0, 1, (1,))))
    observation = {"x": np.float32([0.5]), "goal": 1, "action_mask": np.array([0, 1, 1])}
    assert nested.row("b", observation, {}).tolist() == [0, 1, 0.5, 0, 1, 1, 1, 0]
    info = {"action_mask": np.ones(1)}  # would be broadcast
    with pytest.raises(ValueError, match="a has a mask of 1 for 3 choices"):
        roles().row("a", np.zeros(3), info)
    bits = roles(action=MultiBinary(2))
    assert bits.row("a", np.zeros(3), {"action_mask": np.array([1, 0, 1, 1])}).sum() == 3 + 1
    with pytest.raises(ValueError, match="leaves a branch empty"):
        bits.row("a", np.zeros(3), {"action_mask": np.array([0, 0, 1, 1])})
    for wrong in (
        {"other": Box(0, 1, (1,))},  # beside Discrete
        {"other": MultiBinary(2)},  # two branches beside one
        {"action": Box(0, 9, (1,), np.int64)},
        {"action": gym.spaces.Tuple([Discrete(2)])},
        {"space": Box(0, 255, (3, 200, 200), np.uint8)},  # channels first
        {"space": gym.spaces.Sequence(Discrete(2))},
    ):
        with pytest.raises(gym.error.Error):
            roles(**wrong)


# --- images ---------------------------------------------------------------------------------------
def test_rows_with_images():
    """A stack of images, the newest last, filled with the first one when an episode begins; bytes
    where only images of bytes are seen. Held actions: every second image is skipped."""
    envs = make_envs("agents_toy:duel", frame_stack=3, action_repeat=2)
    assert envs.obs.shape == (1, 2, 2 + 2 + 2 + 3 * 40 * 40)
    assert envs.obs.dtype == np.uint8
    seen = []
    for _ in range(5):
        stack = envs.obs[0, :, 6:].reshape(2, 3, 40, 40)
        assert (stack[0] == stack[1]).all()
        assert set(stack[0, :, 1, 1]) | set(stack[0, :, 1, -1]) <= {0, 255}
        seen.append(stack[0, :, 0, 0].tolist())
        envs.step(np.zeros((1, 2, 1), int))
    assert seen == [[0, 0, 0], [0, 0, 2], [0, 2, 4], [2, 4, 5], [0, 0, 0]]
    envs = make_envs("agents_toy:duel", {"dicts": True, "size": 200})  # made smaller: by 3
    row = envs.obs[0, 1]
    assert row.shape == (2 + 2 + 3 + 2 + 66 * 66,)
    assert row.dtype == np.float32
    assert row[:2].sum() == 1  # the choice that is seen, one-hot
    assert row[2:9].tolist() == [0, 1, 1, 1, 0, 1, 0]  # number, mask, there
    screen = row[9:].reshape(66, 66)
    assert {screen[9, 9], screen[9, -9]} == {0, 255}
    assert set(np.unique(screen[3:, :30])) < {0, 255}


def test_the_network_sees_images_number_and_all_else_as_planes():
    agent = make_agent(make_envs("agents_toy:duel", {"dicts": True}, frame_stack=2))
    rows = torch.zeros(3, 2 + 2 + 3 + 2 + 2 * 1600)
    rows[:, :4] = torch.tensor([0.0, 1, 1, 0])
    rows[:, 4:7] = 1.0
    rows[1, 9 : 9 + 1600] = 255.0
    calls = []
    agent.trunk.register_forward_hook(lambda _, x, __: calls.append(x[0]))
    scores, values = agent.policy(agent.inputs(rows))
    (pixels,) = calls
    assert pixels.shape == (3, 2 + 4, 40, 40)
    means = [[0, 0, 0, 1, 1, 0], [1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0]]  # 2 images, then planes
    assert pixels.mean(dim=(2, 3)).tolist() == means
    torch.testing.assert_close(scores[0], scores[2])
    assert (values[0] - values[1]).abs() > 1e-4
    count = sum(p.numel() for p in agent.parameters())
    convs = 6 * 32 * 64 + 32, 32 * 64 * 16 + 64, 64 * 64 * 9 + 64  # 40 -> 9 -> 3 -> 1
    assert count == sum(convs) + 64 * 512 + 512 + 512 * (3 + 1) + 4


def test_atari_for_two():
    """Grey 84 x 84 images, the maximum of every fourth frame and the one before, in stacks of 4;
    both players' actions matter; scores are raw, what is learned are signs."""
    pytest.importorskip("multi_agent_ale_py")
    envs = make_envs("atari/pong_v3", seed=3)
    env = script.make_env("atari/pong_v3")
    env.reset(seed=script.episode_seed(3, 0, 0))
    assert envs.obs.dtype == np.uint8
    for k in range(60):
        actions = np.array([[[2 + k % 2], [k % 6]]])
        envs.step(actions)
        frames = [env.step(dict(zip(env.agents, actions[0, :, 0], strict=True))) for _ in range(4)]
        screen = np.maximum(frames[2][0]["first_0"], frames[3][0]["first_0"])[None, None, ..., 0]
        small = torch.nn.functional.interpolate(
            torch.tensor(screen).double(), (84, 84), mode="bilinear", antialias=True
        )
        for player in range(2):
            newest = envs.obs[0, player, 2 + 6 + 2 :].reshape(4, 84, 84)[3]
            assert np.abs(newest - small[0, 0].numpy()).max() <= 1.0
            assert envs.obs[0, player, :2].tolist() == [1 - player, player]
    assert np.ptp(envs.obs[0, 0, 10:].reshape(4, -1).astype(int), axis=0).max() > 50  # it moves


def test_an_atari_game_is_played_again():
    """A maze that ALE draws for each environment and episode. The same actions lead through the
    same screens in another emulator, also after one of the players has left."""
    pytest.importorskip("multi_agent_ale_py")
    envs = make_envs("atari/maze_craze_v3", num_envs=2)
    mazes = [envs.obs[0].tobytes(), envs.obs[1].tobytes()]
    there = envs.roles.there
    rng, taken = np.random.default_rng(0), []
    while envs.obs[0, :, there].all():
        taken.append(rng.integers(18, size=(2, 2, 1)))
        envs.step(taken[-1])
        assert len(taken) < 500
    assert envs.obs[0, :, there].any()
    played = [actions[0] for actions in taken]
    again = script.make_envs(replace(envs.args, num_envs=1), 1, {"episodes": [(0, 0.0, played)]})
    for _ in range(20):
        actions = rng.integers(18, size=(2, 2, 1))
        for found, wanted in zip(again.step(actions[:1]), envs.step(actions), strict=True):
            np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(again.obs[0], envs.obs[0])
    again.begin(0, number=1)
    mazes.append(again.rows[0].tobytes())
    assert len({*mazes}) == 3


# --- games of two ---------------------------------------------------------------------------------
def test_players_change_sides(monkeypatch):
    """One is always right, the other chooses 0, which is right half of the time on either side."""

    def player(best):
        def act(rows, noise):
            left = rows[0, :, 6:].reshape(2, 40, 40)[:, 1, 0] == 255
            return (best * (left ^ [True, False])).astype(int).reshape(1, 2, 1)

        return SimpleNamespace(noise=lambda *shape: None, act_on_rows=act)

    envs = make_envs("agents_toy:duel", {"limit": 1}, eval_episodes=100)
    halves = []
    look = agents_toy.Duel.look
    spy = lambda env: (look(env), halves.append(env.half))[0]  # noqa: E731
    monkeypatch.setattr(agents_toy.Duel, "look", spy)
    scores = script.play_games(envs.args, envs, [player(1), player(0)])
    points = np.array(halves[:200:2]) == np.arange(100) % 2  # when they chose; whose side is which
    np.testing.assert_array_equal(scores, np.stack([points, -1.0 * points], axis=1))
    assert 30 < points.sum() < 70


def test_a_player_of_images_learns_who_it_is_and_beats_random(tmp_path, capsys):
    """Self-play: without its number no one could choose well for both sides."""
    flags = "--env-id agents_toy:duel --num-envs 8 --num-steps 32 --learning-rate 1e-3 --no-cuda"
    flags = f"{flags} --total-timesteps 3072 --eval-interval 6 --eval-episodes 40"
    script.train(parse(f"{flags} --run-dir {tmp_path / 'run'}"))
    points = scalars(tmp_path / "run", timed=True)
    (first, _), (last, rate) = points["charts/win_rate_random"]
    assert [first, last] == [step for step, _ in points["charts/SPS"]][5::6] and rate > 0.9
    assert points["charts/win_rate_past"][0][1] == pytest.approx(0.5, abs=0.2)  # against itself
    play = f"--evaluate {tmp_path / 'run'} --env-id agents_toy:duel --eval-episodes 40 --against"
    capsys.readouterr()
    script.evaluate(parse(f"{play} RANDOM"))
    assert float(re.search(r"win rate (\S+)", capsys.readouterr().out)[1]) > 0.9
    script.evaluate(parse(f"{play} {tmp_path / 'run'}"))
    assert 0.3 < float(re.search(r"win rate (\S+)", capsys.readouterr().out)[1]) < 0.7
    agent, _ = script.load(tmp_path / "run", make_envs("agents_toy:duel"))
    env = agents_toy.Duel()
    observations, _ = env.reset(seed=3)
    assert agent.act(observations) == {"first": env.half, "second": 1 - env.half}


# --- networks -------------------------------------------------------------------------------------
def test_frequencies_are_the_probabilities():
    """Of a guard that has two of three choices, of a scout with a mask or none, of a Box."""
    agent = make_agent(make_envs())
    agent.actor[-1].weight.data.zero_()
    agent.actor[-1].bias.data = torch.log(torch.tensor([0.05, 0.25, 0.7]))
    for mask in ([1, 1, 0], [1, 0, 1], [1, 1, 1]):
        p = mask * np.array([0.05, 0.25, 0.7])
        p /= p.sum()
        inputs = torch.tensor([*[0.0] * 6, *mask, *[0] * 6]).repeat(4000, 1)
        actions = agent.get_action_and_value(inputs)[0]
        frequencies = np.bincount(actions.ravel(), minlength=3) / 4000
        assert (np.abs(frequencies - p) <= 4 * np.sqrt(p * (1 - p) / 4000)).all()
    agent = make_agent(make_envs("agents_toy:drift"))
    scores = torch.tensor([[0.3, 0.0]]).repeat(4000, 1)
    actions = agent.choose(scores, torch.tensor(agent.noise(4000)))[:, 0]
    std = agent.actor_logstd.exp()[0]
    assert ((actions.mean() - 0.3) / std).abs() < 4 / 4000**0.5
    assert (actions.std() / std - 1).abs() < 4 / 8000**0.5


# --- learning -------------------------------------------------------------------------------------
LEARNING = [  # what only it shows; flags, which actions, the least team return
    pytest.param(
        "--env-id agents_toy:make --num-envs 8 --num-steps 64 --total-timesteps 20000",
        "sampled", 55.0, id="padding, masks, deaths, limits",
    ),
    pytest.param(
        f"--env-id {FORAGING} --num-steps 64 --total-timesteps 80000 --max-episode-steps 50 "
        '--env-kwargs {"max_episode_steps":1000000}',
        "sampled", 0.9, id="Tuple spaces, a joint reward", marks=pytest.mark.slow,
    ),
    pytest.param(
        f"--env-id {SPEAKER} --num-steps 100 --total-timesteps 60000",
        "greedy", -45.0, id="agents that differ, communication", marks=pytest.mark.slow,
    ),
    pytest.param(
        f"--env-id {KAZ} --num-envs 8 --total-timesteps 50000 "
        '--env-kwargs {"max_cycles":900,"max_zombies":10}',
        "sampled", 4.5, id="early deaths", marks=pytest.mark.slow,
    ),
]  # fmt: skip
SUMMARY = r"{}, \d+ episodes: mean over agents (\S+) .* sum over agents (\S+) "


@pytest.mark.parametrize(("flags", "actions", "least"), LEARNING)
def test_learning(tmp_path, capsys, flags, actions, least):
    script.train(parse(f"{flags} --no-cuda --run-dir {tmp_path / 'run'}"))
    play = f"--evaluate {tmp_path / 'run'} --env-id {flags.split()[1]} --eval-episodes 100"
    script.evaluate(parse(play))
    assert float(re.search(SUMMARY.format(actions), capsys.readouterr().out)[2]) >= least


# --- resuming -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("env_id", "flags"),
    [
        ("agents_toy:turns", "--max-episode-steps 4"),
        ("agents_toy:duel", "--eval-interval 2 --eval-episodes 2"),
        pytest.param(SPEAKER, "--team-reward --critic concatenated", marks=pytest.mark.slow),
        pytest.param(KAZ, "--critic concatenated --value-norm False", marks=pytest.mark.slow),
        (FORAGING, ""),
    ],
)
def test_killed_and_resumed_to_the_same_bits(tmp_path, env_id, flags):
    flags = f"{SMALL} {flags} --env-id {env_id} --total-timesteps {5 * 4 * 16}"
    flags = f"{flags} --checkpoint-interval 1 --run-dir"
    script.train(parse(f"{flags} {tmp_path / 'whole'}"))
    argv = f"{flags} {tmp_path / 'killed'}".split()
    assert train_until_killed("ppo_pettingzoo", "update", 4, argv) == -signal.SIGKILL
    again = "" if script.is_known(env_id) else f"--env-id {env_id}"
    script.train(parse(f"--resume {tmp_path / 'killed'} {again}"))
    whole, killed = (script.load_checkpoint(tmp_path / name) for name in ("whole", "killed"))
    assert all(torch.equal(x, killed["agent"][name]) for name, x in whole["agent"].items())
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    assert scalars(tmp_path / "whole") == scalars(tmp_path / "killed")


# --- logs, saved policies -------------------------------------------------------------------------
def test_a_saved_policy_acts_for_one_agent_and_for_all(tmp_path):
    scripts.train("ppo_pettingzoo", tmp_path / "run", "--env-id agents_toy:make")
    agent, args = script.load(tmp_path / "run", make_envs())
    env = agents_toy.Watch()
    observations, infos = env.reset(seed=3)
    actions = agent.act(observations, infos=infos)
    assert actions.keys() == observations.keys()
    assert all(env.action_space(name).contains(action) for name, action in actions.items())
    for name, observation in observations.items():
        assert agent.act({name: observation}, infos=infos) == {name: actions[name]}
    scout = {"scout": observations["scout"]}
    assert {agent.act(scout, agent.noise(1))["scout"] for _ in range(99)} == {0, 1, 2}
    valid = set(np.flatnonzero(infos["scout"]["action_mask"]))
    assert {agent.act(scout, agent.noise(1), infos)["scout"] for _ in range(99)} == valid


# --- environments ---------------------------------------------------------------------------------
def test_what_an_environment_may_give(monkeypatch):
    """Rewards of shape (1,), a `close` that raises."""
    envs = make_envs()
    env = envs.envs[0]
    step = env.step

    def odd(actions):
        observations, gains, *rest = step(actions)
        return observations, {name: np.array([x + 0.5]) for name, x in gains.items()}, *rest

    monkeypatch.setattr(env, "step", odd)
    rewards, *_ = envs.step(np.zeros((1, 3, 1), int))
    assert rewards.shape == (1, 3) and (rewards % 1.0 == 0.5).all()
    monkeypatch.setattr(env, "close", lambda: 1 / 0)
    envs.close()


def test_value_norm_is_true_false_or_none():
    """And no switch of CleanRL's older form, as the others may be."""
    for word, value in (("True", True), ("False", False), ("None", None)):
        args = parse(f"--value-norm {word} --cuda False")
        assert args.value_norm is value and not args.cuda


def test_modules_that_a_folder_may_name():
    """Those of packages that are known."""
    known = {
        SPEAKER: True, KAZ: True, FORAGING: True, "CartPole-v1": True,
        "magent2.environments.battle_v4": True, "evil": True, "evil:make": False,
        "runs.stranger.evil": False, "mpe2evil.x": False, "evil:mpe2.x": False,
        "evil:sisl/pursuit_v5": False, "mpe2.core:os": False, "lbforaging:register": False,
    }  # fmt: skip
    assert {env_id: script.is_known(env_id) for env_id in known} == known
