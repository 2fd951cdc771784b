"""What is collected: against what the environments wrote down. And when which rate is used."""

import copy
import importlib

import envpool
import gymnasium as gym
import numpy as np
import pytest
import scripts
import torch
from common import make
from program import Toy, rows, scalars
from reference import Seen, gaussian, linear, lstm, mlp, parameters
from toys import BOX, Group, Walk

STEPWISE = ["ppo", "ppo_continuous_action", "ppo_pixels", "ppo_lstm"]


@pytest.fixture(autouse=True)
def lists(monkeypatch):
    monkeypatch.setattr(Walk, "made", [])


def rows_of(env, count: int, repeat: int = 1) -> list[dict]:
    """What an environment said, as rows: an episode's end is followed by a row of nothing, in which
    the next one begins. An action that is held is one row."""
    rows, now, held = [], env.said[0]["obs"], 0
    for said in env.said[1:]:
        if 0 < held < repeat and said["valid"]:
            rows[-1] |= {**said, "reward": rows[-1]["reward"] + said["reward"]}
        else:
            rows.append({"seen": now, **said})
        now, held = said["obs"], said["valid"] * (held % repeat + 1)
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
    both = script in ("ppo_pixels", "ppo_lstm")  # keep log-probabilities and values
    repeat, centre, half = 1 + both, torch.tensor([1, 0.5]), torch.tensor([2, 0.5])
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

    def hidden(x, i):
        """What the heads of policy and value see, and the memory."""
        if script == "ppo_pixels":
            return trunk(p, x), trunk(p, x, "value_trunk"), None
        h, c = lstm(p, "memories.0.net", trunk(p, x), *states[i].double().chunk(2))
        return h, h, torch.cat([h, c]).detach().float()

    run = module.Run(args, {})
    assert run.bar.total == args.total_timesteps
    for iteration in range(2):
        noise = np.asarray(copy.deepcopy(agent).noise(T, N))
        if script == "ppo_lstm":
            data, state = module.rollout(agent, envs, state, run, args)
            torch.testing.assert_close(data.state, states)
        else:
            data = module.rollout(agent, envs, run, args)
        raw = data.rewards
        data = module.scale_rewards(agent, data, args)
        obs = np.asarray(next(iter(data.obs.values())) if both else data.obs)
        actions = np.asarray(data.actions)
        columns = [rows_of(walk, (iteration + 1) * T, repeat)[iteration * T :] for walk in walks]
        names = "seen", "reward", "discounted", "terminated", "truncated", "valid"
        said = {x: np.array([[column[t][x] for column in columns] for t in range(T)])
                for x in names}  # fmt: skip
        # the deviation of all discounted sums so far, those of this rollout included
        returns.add(said["discounted"][said["valid"]])
        scaled = said["reward"] / float((returns.var + 1e-8).sqrt())
        np.testing.assert_array_equal(obs[:-1], said["seen"])
        np.testing.assert_array_equal(raw, said["reward"])
        np.testing.assert_allclose(data.rewards, np.clip(scaled, -10, 10), rtol=1e-5)
        for name in names[3:]:
            np.testing.assert_array_equal(getattr(data, name), said[name])
            cases |= {(name, x) for x in np.unique(said[name])}
        states = states.clone()
        for t, i in np.ndindex(T, N):
            row, x = columns[i][t], seen.standardized(obs[t, i])
            # the action is the policy's, drawn by the noise; what was taken is clipped to the box
            if script == "ppo":
                assert actions[t, i] == (mlp(p, "actor", x).detach().numpy() + noise[t, i]).argmax()
                assert not row["valid"] or row["action"] == actions[t, i]
                continue
            if both:
                h, of_value, memory = hidden(x, i)
                mean, std = linear(p, "actor", h), half * p["actor_logstd"].exp()
                logprob, _ = gaussian(torch.as_tensor(actions[t, i]), centre + half * mean, std)
                assert float(data.logprobs[t, i]) == pytest.approx(float(logprob), rel=1e-4)
                value = float(linear(p, "critic", of_value))
                assert float(data.values[t, i]) == pytest.approx(value, rel=1e-3, abs=1e-5)
            else:
                mean = mlp(p, "actor_mean", x)
            if script == "ppo_lstm":
                states[i] = memory * row["valid"]  # cleared after an end
            drawn = mean + p["actor_logstd"].exp() * torch.as_tensor(noise[t, i])
            expected = (centre + half * drawn).detach().numpy()
            np.testing.assert_allclose(actions[t, i], expected, rtol=1e-4, atol=1e-4)
            if row["valid"]:
                clipped = np.clip(actions[t, i], BOX.low, BOX.high)
                np.testing.assert_allclose(row["action"], clipped, rtol=1e-6)
                cases.add(("clipped", bool((clipped != actions[t, i]).any())))
        if script == "ppo_lstm":
            starts = np.concatenate([np.zeros((1, N), bool), ~data.valid[:-1]])
            assert (data.episode_starts.numpy() == starts).all()
            torch.testing.assert_close(state, states, rtol=1e-4, atol=1e-5)
        for i in range(N) if both else ():  # the value after the last step
            value = float(linear(p, "critic", hidden(seen.standardized(obs[T, i]), i)[1]))
            assert float(data.values[T, i]) == pytest.approx(value, rel=1e-3, abs=1e-5)
        assert all((obs[T, i] == walk.said[-1]["obs"]).all() for i, walk in enumerate(walks))
        if both:
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
    taken, games, ended = 0, np.zeros((N, 2)), []  # raw return and length, in decisions
    for steps in zip(*(rows_of(walk, 2 * T, repeat) for walk in walks), strict=True):
        taken += sum(row["valid"] for row in steps)
        for game, row in zip(games, steps, strict=True):
            game += row["reward"], row["valid"]
            if row["terminated"] or row["truncated"]:  # each at its own step
                ended.append([taken, *game])
                game[:] = 0
    np.testing.assert_allclose(np.array(rows(tmp_path / "run")[1:], float), ended)
    seeds = [said["seed"] for walk in walks for said in walk.said if "seed" in said]
    assert len(set(seeds)) == len(seeds)  # no two episodes are alike


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
    assert [length for *_, length in rows(tmp_path / "run")[1:]] == ["4", "4"]


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


@pytest.mark.parametrize("script", [*FEW, "ppo_lstm", "ppo_atari_multigpu"])
def test_rates_fall_to_nothing(script, tmp_path, monkeypatch):
    """In iteration k of 4 they are 1 - k / 4 of the first."""
    module = importlib.import_module(script)
    env_id = {"ppo": "toys:Turn-v0", "ppo_pettingzoo": "toys:make"}.get(script, "toys:Walk-v0")
    flags = {"env_id": env_id, "num_envs": 2, "num_steps": 8, "num_minibatches": 2}
    continuous = script == "ppo_continuous_action"  # there the bonus falls, too
    flags |= {"adapt_ent_coef": False} if continuous else {}
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
    assert bonuses == pytest.approx([0.3, 0.225, 0.15, 0.075] if continuous else [0.3] * 4)


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
