"""ppo_procgen.py: the levels that are asked for, scaled rewards, learning, playing on training
levels and on all. Most tests replace EnvPool's games by Levels, whose ends and rewards are known;
those of real games are skipped where Qt 5 is missing."""

import ctypes
import hashlib
import importlib.util
import sys
from types import SimpleNamespace

import envpool
import numpy as np
import pytest
from maths import program, random_ends
from program import Levels, assert_same, rows, scalars

import ppo_procgen as script
from ppo_procgen import Args


@pytest.fixture
def levels(monkeypatch):
    monkeypatch.setattr(envpool, "make", Levels)
    monkeypatch.setattr(Levels, "made", [])
    return Levels.made


@pytest.fixture
def games():
    """EnvPool's own."""
    try:
        script.make_games("MazeEasy-v0", num_envs=1)
    except SystemExit:
        pytest.skip("EnvPool's Procgen needs Qt 5: pip install PyQt5-Qt5")


parse, small, train = program("ppo_procgen", "--num-levels 0 --eval-interval 10 --eval-episodes 6")


# --- levels ---------------------------------------------------------------------------------------
CHECKSUMS = {  # of seeds 1 and 2 with Qt 5.15: the start, and after 100 steps of action t % 15
    "starpilot": ("c60edbdcbd1de7d9", "627f2f8c96f0d2ff"),
    "BossfightEasy-v0": ("2ab087c7bda16a61", "34d6ff73c08c80c2"),
    "BigfishEasy-v0": ("315759df1afc178c", "0ca6d85e1b72c587"),
    "MazeEasy-v0": ("aaed4fe5bbdd08df", "dc41c79c924977f3"),
}


def digest(obs: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(obs).tobytes()).hexdigest()[:16]


@pytest.mark.usefixtures("games")
@pytest.mark.parametrize("env_id", CHECKSUMS)
def test_frames_of_a_real_game(env_id, monkeypatch):
    monkeypatch.setattr(script, "episode_seed", lambda seed, i, start: i + 1)
    envs = script.Envs(Args(env_id=env_id), 2)
    found = [digest(envs.obs)]
    for t in range(100):
        envs.step(np.full(2, t % 15))
    assert (*found, digest(envs.obs)) == CHECKSUMS[env_id]


@pytest.mark.usefixtures("games")
def test_levels_are_those_asked_for(monkeypatch):
    """By the level that EnvPool says it plays: of 200 all are below 200 and many are seen; of
    all, none of 64 is. One level always looks as it was measured."""
    played = {}
    for asked in ((200, 0), (3, 5), (0, 0)):
        envs = script.Envs(
            Args(env_id="LeaperEasy-v0", num_levels=asked[0], start_level=asked[1]), 64
        )
        seen, step = set(), envs.vector.step

        def note(actions, step=step, seen=seen):
            found = step(actions)
            seen.update(found[4]["level_seed"].tolist())
            return found

        monkeypatch.setattr(envs.vector, "step", note)
        for t in range(60):
            envs.step(np.full(64, t % 15))
        played[asked] = seen
    assert played[200, 0] <= set(range(200))
    assert len(played[200, 0]) > 45
    assert played[3, 5] == {5, 6, 7}
    assert min(played[0, 0]) >= 200
    assert len(played[0, 0]) > 60
    monkeypatch.setattr(script, "episode_seed", lambda seed, i, start: i + 1)
    envs = script.Envs(Args(env_id="MazeEasy-v0", num_levels=1), 1)
    assert (digest(envs.obs), envs.obs.sum()) == ("818e920d706433b3", 1_769_133)


@pytest.mark.usefixtures("games")
def test_rows_of_a_real_game_where_episodes_end():
    """Autoreset is "next step", in games that end by death and by the time limit of 500 steps."""
    args, died = Args(env_id="LeaperEasy-v0", num_envs=8), 0
    envs, last, rng = script.Envs(args, 8), np.zeros(8, bool), np.random.default_rng(0)
    for t in range(502):
        before, frames = envs.lengths * ~envs.over, envs.obs
        # only environments 4 to 7 move
        actions = np.r_[[4] * 4, rng.integers(0, 15, 4)]
        rewards, terminated, truncated = envs.step(actions)
        assert not (terminated & truncated).any()
        assert (rewards[last] == 0).all()
        assert not (last & envs.over).any()
        assert (envs.lengths == before + ~last).all()
        changed = (envs.obs != frames).mean(axis=(1, 2, 3))
        assert (changed[last] > 0.1).all()  # another level
        assert (changed[envs.over] < 0.1).all()  # the true last observation of this one
        if t == 499:
            assert truncated[:4].all()  # who stands still lives
            assert (envs.lengths[:4] == 500).all()
        elif t < 499:
            assert not truncated.any()
        died, last = died + terminated.sum(), envs.over
    assert died >= 4


IDS = {"starpilot": "StarpilotEasy-v0", "StarpilotHard-v0": "StarpilotHard-v0"}


@pytest.mark.parametrize("env_id", IDS)
def test_ids_and_levels_as_envpool_gets_them(env_id, levels):
    flags = f"--env-id {env_id} --num-levels 200 --start-level 7 --env-threads 3"
    script.Envs(small(flags), 4)
    (made,) = levels
    found = {name: made[name] for name in ("name", "num_levels", "start_level", "threads")}
    assert found == {
        "name": IDS[env_id], "num_levels": 200, "start_level": 7, "threads": 3
    }  # fmt: skip


def test_qt_of_a_package_is_loaded_and_envpool_tries_again(monkeypatch):
    tries, loaded = [], []

    def make(name, **more):
        tries.append((name, "envpool.procgen" in sys.modules))
        if not loaded:
            raise ImportError("no Qt")
        return Levels(name, **more)

    def spec(name):
        return SimpleNamespace(submodule_search_locations=["/there"]) if name == "PyQt5" else None

    monkeypatch.setitem(sys.modules, "envpool.procgen", "knows of no Qt")
    monkeypatch.setattr(envpool, "make", make)
    monkeypatch.setattr(importlib.util, "find_spec", spec)
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    envs = script.Envs(Args(num_envs=2), 2)
    assert tries == [("StarpilotEasy-v0", True), ("StarpilotEasy-v0", False)]
    assert loaded == [("/there/Qt5/lib/libQt5Gui.so.5", ctypes.RTLD_GLOBAL)]
    assert envs.obs.shape == (2, 3, 64, 64)


@pytest.mark.parametrize("gamma", [0.999, 0.9])
def test_rewards_are_scaled_as_by_hand(gamma):
    """Of five environments and three rollouts, by the discounted returns of their episodes."""
    rng, seen = np.random.default_rng(0), []
    agent, envs = script.Agent(Levels), SimpleNamespace(discounted=np.zeros(5))
    running, ended = np.zeros(5), np.zeros(5, bool)
    for k in range(3):
        terminated, truncated, valid = random_ends(rng, 20, 5, ~ended)
        rewards = np.where(valid, rng.exponential(10.0**k, (20, 5)), 0.0)
        if k == 2:  # one that is clipped
            rewards[19, np.flatnonzero(valid[19])[0]] = 1e6
        for t, i in np.ndindex(20, 5):
            if valid[t, i]:
                running[i] = rewards[t, i] + gamma * running[i]
                seen.append(running[i])
            if terminated[t, i] or truncated[t, i]:
                running[i] = 0.0
        ends = {"terminated": terminated, "truncated": truncated, "valid": valid}
        found = script.scale_rewards(agent, envs, SimpleNamespace(rewards=rewards, **ends), gamma)
        np.testing.assert_allclose(found, np.clip(rewards / np.std(seen), -10, 10), rtol=1e-6)
        assert (found.max() == 10) == (k == 2)
        np.testing.assert_allclose(envs.discounted, running)
        ended = terminated[-1] | truncated[-1]
    assert agent.state_dict()["return_sums"][0] == len(seen)


def test_the_first_rewards_are_scaled_already_and_none_are_none():
    agent, envs = script.Agent(Levels), SimpleNamespace(discounted=np.zeros(2))
    no = np.zeros((4, 2), bool)
    data = SimpleNamespace(rewards=np.zeros((4, 2)), terminated=no, truncated=no, valid=~no)
    assert (script.scale_rewards(agent, envs, data, 0.999) == 0).all()
    data.rewards = np.full((4, 2), 50.0)
    assert 0.1 < script.scale_rewards(agent, envs, data, 0.999).max() < 1.5


@pytest.mark.slow
@pytest.mark.usefixtures("games")
def test_it_learns_the_way_through_a_maze(tmp_path):
    """Level 0 alone. A random policy takes 55 steps; every way out pays 10, so length tells.
    Measured, of the last 100: 7.6, 8.9 and 7.2 steps with seeds 1 to 3, in 85 CPU seconds."""
    flags = "--env-id MazeEasy-v0 --num-levels 1 --num-envs 16 --num-steps 64 --num-minibatches 4"
    more = f"--total-timesteps 10240 --eval-interval 1000 --num-threads 1 --run-dir {tmp_path}"
    script.train(parse(f"{flags} {more} --no-cuda"))
    played = np.array(rows(tmp_path)[1:], float)[-100:]
    assert played[:, 2].mean() < 15
    assert played[:, 1].mean() > 9


# --- playing on training levels and on all --------------------------------------------------------
def test_evaluation_plays_the_training_levels_and_all(levels, tmp_path, capsys, monkeypatch):
    train(tmp_path / "run", "--num-levels 200 --start-level 30 --eval-interval 99")
    capsys.readouterr()
    levels.clear()
    monkeypatch.setattr(Levels, "lengths", (3, 4, 9))  # some environments end twice
    monkeypatch.setattr(Levels, "later", 50)
    greedy, plain = [], script.Agent.act

    def act(self, obs, noise=None):
        greedy.append(noise is None)
        return plain(self, obs, noise)

    monkeypatch.setattr(script.Agent, "act", act)
    returns = script.evaluate(parse(f"--evaluate {tmp_path / 'run'}"))
    # the first episode of each of six environments, however long, whose steps pay i + t
    wanted = [sum(i + t for t in range(1, (4, 5, 10)[i % 3])) for i in range(6)]
    assert returns == wanted
    out = capsys.readouterr().out.splitlines()
    for name, lines, what in (("train", out[:7], "200"), ("eval", out[7:], "all")):
        assert lines[:6] == [
            f"{name}_episode={i}, episodic_return={x:.2f}" for i, x in enumerate(wanted)
        ]
        spread = f"{np.mean(wanted):.2f} +- {np.std(wanted):.2f}"
        assert lines[6:] == [f"greedy, 6 episodes on {what} levels: {spread}"]
    played = [(m["num_levels"], m["start_level"]) for m in levels if len(m["seed"]) == 6]
    assert played == [(200, 30), (0, 30)]  # from 0 levels on, EnvPool plays all
    assert all(greedy)
    assert len(greedy) == 2 * 9  # until the longest has ended
    script.evaluate(parse(f"--evaluate {tmp_path / 'run'} --eval-sample"))
    assert not any(greedy[18:])
    assert "sampled, 6 episodes on all levels: " in capsys.readouterr().out


def test_a_run_on_all_levels_is_played_once(levels, tmp_path, capsys):
    train(tmp_path / "run")
    assert "charts/test_return" not in scalars(tmp_path / "run")
    capsys.readouterr()
    script.evaluate(parse(f"--evaluate {tmp_path / 'run'} --eval-episodes 1"))
    assert capsys.readouterr().out == (
        "eval_episode=0, episodic_return=6.00\ngreedy, 1 episodes on all levels: 6.00 +- 0.00\n"
    )


def test_in_training_all_levels_are_played_and_nothing_else_changes(levels, tmp_path):
    after = [
        train(tmp_path / name, f"--num-levels 2 --eval-interval {name}") for name in ("1", "2", "9")
    ]
    points = [scalars(tmp_path / name).get("charts/test_return", []) for name in ("1", "2", "9")]
    assert [len(each) for each in points] == [3, 1, 0]
    steps = [step for step, _ in scalars(tmp_path / "1")["losses/entropy"]]
    assert [step for step, _ in points[0]] == steps
    assert points[1][0][0] == steps[1]
    mean = np.mean([sum(i + t for t in range(1, 4 + i % 3)) for i in range(6)])
    assert [value for _, value in points[0]] == pytest.approx([mean] * 3)
    for name in ("agent", "optimizer"):
        assert_same(after[0][name], after[1][name])
        assert_same(after[0][name], after[2][name])
    assert rows(tmp_path / "1") == rows(tmp_path / "9")
    assert {m["num_levels"] for m in levels if len(m["seed"]) == 6} == {0}
