"""What is collected: against what the environments wrote down. And when which rate is used."""

import copy
import csv
import importlib
import math

import envpool
import gymnasium as gym
import numpy as np
import pytest
import scripts
import torch
from common import make
from program import Toy, scalars
from reference import Seen, gaussian, linear, lstm, mlp, parameters
from toys import BOX, Group, Walk

STEPWISE = ["ppo", "ppo_continuous_action", "ppo_pixels", "ppo_lstm"]


@pytest.fixture(autouse=True)
def lists(monkeypatch):
    monkeypatch.setattr(Walk, "made", [])


def logged(folder) -> list[list[float]]:
    """Steps, return and length of each episode in episodes.csv."""
    with open(folder / "episodes.csv") as file:
        return [[float(x[0]), float(x[2]), float(x[3])] for x in [*csv.reader(file)][1:]]


def rows_of(env, count: int, repeat: int = 1) -> list[dict]:
    """What an environment said, as rows: an episode's end is followed by a row of nothing, in which
    the next one begins. An action that is held is one row."""
    rows, now, held = [], env.said[0]["obs"], 0
    for said in env.said[1:]:
        if "seed" in said:
            nothing = {"reward": 0.0, "terminated": False, "truncated": False, "valid": False}
            rows.append({"seen": now, **nothing})
            held = 0
        elif 0 < held < repeat:
            rows[-1] |= {**said, "reward": rows[-1]["reward"] + said["reward"]}
            held += 1
        else:
            rows.append({"seen": now, **said, "valid": True})
            held = 1
        now = said["obs"]
    total = 0.0
    for row in rows:
        total = row["discounted"] = row["valid"] * (row["reward"] + 0.9 * total)
    return rows[:count]


def trunk(p, x, name="trunk"):
    hidden = torch.tanh(linear(p, f"{name}.vectors.0", x))
    return torch.tanh(linear(p, f"{name}.vectors.2", hidden))


@pytest.mark.parametrize("script", STEPWISE)
def test_rollouts(script, tmp_path):
    """Two, each of 11 steps in two environments."""
    T, N = 11, 2
    space = gym.spaces.Discrete(3) if script == "ppo" else BOX
    repeat = 2 if script in ("ppo_pixels", "ppo_lstm") else 1
    flags = {"num_envs": N, "num_minibatches": 2, "memory_size": 8, "memory": "lstm"}
    flags |= {"env_id": "Turn-v0" if script == "ppo" else "Walk-v0", "action_repeat": repeat}
    module, args, agent = make(
        script, Walk.observation_space, space, run_dir=tmp_path / "run", **flags
    )
    envs, p, walks = module.make_envs(args, N, {}), parameters(agent), Walk.made
    assert len(walks) == N
    seen, returns, found, cases = Seen(), Seen(), [], set()
    small = np.random.default_rng(0).normal(0, 0.1, 5000)  # so that some are clipped at 10
    returns.add(small)
    agent.return_moments.update(small)
    state = states = torch.zeros((N, 16))
    run = module.Run(args, {})
    for iteration in range(2):
        noise = np.asarray(copy.deepcopy(agent).noise(T, N))
        if script == "ppo_lstm":
            data, state = module.rollout(agent, envs, state, run, args)
            torch.testing.assert_close(data.state, states)
        else:
            data = module.rollout(agent, envs, run, args)
        raw = data.rewards
        data = module.scale_rewards(agent, data, args)
        obs = (
            data.obs if isinstance(data.obs, np.ndarray) else next(iter(data.obs.values())).numpy()
        )
        actions = np.asarray(data.actions)
        columns = [rows_of(walk, (iteration + 1) * T, repeat)[iteration * T :] for walk in walks]
        # the deviation of all discounted sums so far, those of this rollout included
        returns.add([r["discounted"] for t in range(T) for column in columns
                     for r in [column[t]] if r["valid"]])  # fmt: skip
        scale = float((returns.var + 1e-8).sqrt())
        states = states.clone()
        for t, i in np.ndindex(T, N):
            row = columns[i][t]
            assert (obs[t, i] == row["seen"]).all()
            reward = np.clip(row["reward"] / scale, -10, 10)
            assert raw[t, i] == row["reward"]
            assert data.rewards[t, i] == pytest.approx(reward, rel=1e-5)
            for name in ("terminated", "truncated", "valid"):
                assert getattr(data, name)[t, i] == row[name], (name, t, i)
                cases.add((name, row[name]))
            # the action is the policy's, drawn by the noise; what was taken is clipped to the box
            x = torch.as_tensor(obs[t, i]).double()
            x = seen.standardized(obs[t, i]) if iteration else x.clamp(-10, 10)  # no scale yet
            if script == "ppo":
                assert actions[t, i] == (mlp(p, "actor", x).detach().numpy() + noise[t, i]).argmax()
                assert not row["valid"] or row["action"] == actions[t, i]
                continue
            if script == "ppo_lstm":
                h, c = lstm(p, "memories.0.net", trunk(p, x), *states[i].double().chunk(2))
                # cleared after an end
                states[i] = torch.cat([h, c]).detach().float() * row["valid"]
            elif script == "ppo_pixels":
                h = trunk(p, x)
            if script == "ppo_continuous_action":
                mean = mlp(p, "actor_mean", x)
            else:
                mean = linear(p, "actor", h)
                std = torch.tensor([2, 0.5]) * p["actor_logstd"].exp()
                action = torch.as_tensor(actions[t, i])
                logprob, _ = gaussian(
                    action, torch.tensor([1, 0.5]) + torch.tensor([2, 0.5]) * mean, std
                )
                assert float(data.logprobs[t, i]) == pytest.approx(float(logprob), rel=1e-4)
                h = trunk(p, x, "value_trunk") if script == "ppo_pixels" else h
                value = float(linear(p, "critic", h))
                assert float(data.values[t, i]) == pytest.approx(value, rel=1e-3, abs=1e-5)
            drawn = mean + p["actor_logstd"].exp() * torch.as_tensor(noise[t, i])
            expected = (torch.tensor([1, 0.5]) + torch.tensor([2, 0.5]) * drawn).detach().numpy()
            np.testing.assert_allclose(actions[t, i], expected, rtol=1e-4, atol=1e-4)
            if row["valid"]:
                clipped = np.clip(actions[t, i], BOX.low, BOX.high)
                np.testing.assert_allclose(row["action"], clipped, rtol=1e-6)
                cases.add(("clipped", bool((clipped != actions[t, i]).any())))
        if script == "ppo_lstm":
            starts = np.concatenate([np.zeros((1, N), bool), ~data.valid[:-1]])
            assert (data.episode_starts.numpy() == starts).all()
            torch.testing.assert_close(state, states, rtol=1e-4, atol=1e-5)
        if script in ("ppo_pixels", "ppo_lstm"):  # the value after the last step
            for i in range(N):
                x = torch.as_tensor(obs[T, i]).double()
                x = seen.standardized(obs[T, i]) if iteration else x.clamp(-10, 10)
                h = trunk(p, x, "value_trunk" if script == "ppo_pixels" else "trunk")
                if script == "ppo_lstm":
                    h, _ = lstm(p, "memories.0.net", h, *states[i].double().chunk(2))
                value = float(linear(p, "critic", h))
                assert float(data.values[T, i]) == pytest.approx(value, rel=1e-3, abs=1e-5)
        assert all((obs[T, i] == walk.said[-1]["obs"]).all() for i, walk in enumerate(walks))
        if script in ("ppo_pixels", "ppo_lstm"):
            agent.update_moments(data)
        else:
            agent.obs_moments.update(obs[:-1][data.valid])
        seen.add(obs[:-1][data.valid])
        found.append(data.valid.sum())
        cases.add(("clipped reward", (np.abs(data.rewards) == 10).any()))
    run.csv.close()
    assert run.global_step == sum(found)
    cases.discard(("clipped reward", False))
    assert len(cases) == (7 if script == "ppo" else 9)
    taken, ends, columns = 0, [], [rows_of(walk, 2 * T, repeat) for walk in walks]
    for rows in zip(*columns, strict=True):
        taken += sum(row["valid"] for row in rows)
        ends += [taken for row in rows if row["terminated"] or row["truncated"]]
    assert [step for step, *_ in logged(tmp_path / "run")] == ends  # each at its own step
    scores = [list(ended) for walk in walks for ended in games(walk, repeat)]
    np.testing.assert_allclose(sorted(row[1:] for row in logged(tmp_path / "run")), sorted(scores))
    seeds = [said["seed"] for walk in walks for said in walk.said if "seed" in said]
    assert len(set(seeds)) == len(seeds)  # no two episodes are alike


def games(walk, repeat: int = 1) -> list:
    """Raw return and length, in decisions, of each whole episode."""
    found = []
    for said in walk.said:
        if "seed" in said:
            own = []
            continue
        own.append(said["reward"])
        if said["terminated"] or said["truncated"]:
            found.append((sum(own), math.ceil(len(own) / repeat)))
    return found


@pytest.mark.parametrize("team", [False, True])
def test_agents(team, tmp_path):
    """Rows of two agents: b dies in the third row; the episode's end is in the fourth."""
    spaces = [gym.spaces.Dict({a: space(Group(), a) for a in "ab"})
              for space in (Group.observation_space, Group.action_space)]  # fmt: skip
    flags = {"num_envs": 1, "num_minibatches": 2, "team_reward": team, "env_id": "toys:make"}
    flags |= {"run_dir": tmp_path / "run"}
    module, args, agent = make("ppo_pettingzoo", *spaces, **flags)
    with module.Run(args, {}) as run:
        data = module.rollout(agent, module.make_envs(args, 1, {}), run, args)
    times, lives = [1, 2, 3, 4, 0] * 2 + [1], [1, 1, 0, 0, 0] * 2 + [1]
    chosen = 0.5 * data.actions[:, 0, :, 0].T
    a, b = (10 * np.array(times) + chosen) * [np.sign(times), lives]
    assert set(data.actions.ravel()) == {0, 1}
    np.testing.assert_array_equal(data.rewards[:, 0].T, [a + b] * 2 if team else [a, b])
    die, stop = [3], [8]
    if module.episode_seed(args.seed, 0, 0) % 2:
        die, stop = stop, die
    assert np.flatnonzero(data.terminated[:, 0, 0]).tolist() == die
    assert np.flatnonzero(data.terminated[:, 0, 1]).tolist() == (die if team else [1, 6])
    assert np.flatnonzero(data.truncated[:, 0, 0]).tolist() == stop
    assert np.flatnonzero(data.truncated[:, 0, 1]).tolist() == (stop if team else [])
    assert np.flatnonzero(~data.acts[:, 0, 0]).tolist() == [4, 9]
    assert np.flatnonzero(~data.acts[:, 0, 1]).tolist() == [2, 3, 4, 7, 8, 9]
    valid = np.ones((11, 2), bool)
    valid[[4, 9]] = False  # a team's value goes on after a death
    assert (data.valid[:, 0] == (valid if team else data.acts[:, 0])).all()
    assert not data.waits.any()
    assert run.global_step == 9
    assert data.obs[stop[0] + 1, 0, 0, 0] == 4  # at a limit, the true last observation
    assert [length for *_, length in logged(tmp_path / "run")] == [4, 4]


FEW = ["ppo", "ppo_continuous_action", "ppo_pixels", "ppo_pettingzoo"]


@pytest.mark.parametrize("script", FEW)
def test_few_rows(script, tmp_path):
    """Of one no advantage can be normalized: nothing is learned. Of two something is."""
    before = scripts.train(script, tmp_path / "0", "--total-timesteps 16 --learning-rate 0")
    for steps in (1, 2):
        flags = f"--num-envs 1 --num-steps {steps} --num-minibatches 1 --total-timesteps {steps}"
        found = scripts.train(script, tmp_path / f"{steps}", flags)
        actor = [name for name in before["agent"] if "actor" in name]
        same = all(torch.equal(found["agent"][x], before["agent"][x]) for x in actor)
        assert same == (steps == 1 and script != "ppo_pettingzoo")  # which has two agents
        assert found["iteration"] == 1


FALLS = {  # with these flags the bonus falls, too
    "ppo_continuous_action": {"adapt_ent_coef": False}, "ppo": {}, "ppo_pixels": {},
    "ppo_lstm": {}, "ppo_pettingzoo": {}, "ppo_atari_multigpu": {},
}  # fmt: skip


@pytest.mark.parametrize("script", FALLS)
def test_rates_fall_to_nothing(script, tmp_path, monkeypatch):
    """In iteration k of 4 they are 1 - k / 4 of the first; and the scale is still in evaluation."""
    module = importlib.import_module(script)
    env_id = {"ppo": "toys:Turn-v0", "ppo_pettingzoo": "toys:make"}.get(script, "toys:Walk-v0")
    flags = FALLS[script] | {"env_id": env_id, "num_envs": 2, "num_steps": 8, "num_minibatches": 2}
    flags |= {"total_timesteps": 4 * 16, "ent_coef": 0.3, "cuda": False, "num_threads": 1}
    if script == "ppo_atari_multigpu":
        monkeypatch.setattr(envpool, "make", Toy)
        flags["env_id"] = "Pong-v5"
    rates, bonuses, plain = [], [], module.update

    def update(agent, data, args, *more):
        rates.append(args.learning_rate)
        bonuses.append(args.ent_coef)
        metrics = plain(agent, data, args, *more)
        if not isinstance(agent.adam, dict):
            assert float(agent.adam.param_groups[0]["lr"]) == pytest.approx(args.learning_rate)
        return metrics

    monkeypatch.setattr(module, "update", update)
    module.train(module.Args(run_dir=tmp_path / "run", learning_rate=0.1, **flags))
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    falls = [0.3, 0.225, 0.15, 0.075] if FALLS[script] else [0.3] * 4
    assert bonuses == pytest.approx(falls)
    if hasattr(module, "RunningMeanStd"):
        monkeypatch.setattr(module.RunningMeanStd, "update", lambda *_: pytest.fail("it moved"))
    args = module.load_checkpoint(tmp_path / "run")["args"]
    args.evaluate, args.eval_episodes, args.env_id = tmp_path / "run", 2, flags["env_id"]
    assert len(module.evaluate(args)) == 2


def test_a_bonus_where_rewards_repeat(tmp_path, monkeypatch):
    """Eleven of the twelve rewards that count are like another."""
    module, taken = importlib.import_module("ppo_continuous_action"), []
    roll, update = module.rollout, module.update
    rewards = np.array([5.0] * 12 + [1.0, 2.0, 3.0, 4.0]).reshape(8, 2)

    def rollout(*args):
        return roll(*args)._replace(rewards=rewards, valid=rewards == 5.0)

    monkeypatch.setattr(module, "rollout", rollout)
    monkeypatch.setattr(module, "update", lambda *a: taken.append(a[2].ent_coef) or update(*a))
    flags = "--total-timesteps 32 --ent-coef 0.3"
    scripts.train("ppo_continuous_action", tmp_path / "plain", f"{flags} --no-adapt-ent-coef")
    scripts.train("ppo_continuous_action", tmp_path / "run", flags)
    assert taken == pytest.approx([0.3, 0.15, 0.3 * 11 / 12, 0.15 * 11 / 12])
    logged = scalars(tmp_path / "run")["charts/repeated_rewards"]
    assert [x for _, x in logged] == pytest.approx([11 / 12] * 2)
