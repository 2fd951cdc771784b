"""ppo_atari_multigpu.py: the same on one process and on many, its environments, faults, and as a
program. Most tests replace EnvPool's games by Toy, whose ends, lives and scores are known."""

import hashlib
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from program import (
    ROOT,
    assert_same,
    content,
    installed,
    rows,
    run,
    scalars,
    status,
    write_checkpoint,
)

import ppo_atari_multigpu as script
from ppo_atari_multigpu import METRICS, Args

SCRIPT = Path(script.__file__)
SMALL = (
    "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
    "--env-threads 1 --no-cuda --checkpoint-interval 2"
)
STEPS = 4 * 8  # of an iteration, junk rows included


class Toy:
    """What the script needs of EnvPool's Atari. Environment i has games of two lives of 3 + i % 3
    steps, and pays i + t in the t-th step of a game; `limit` truncates a game after that many."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)
    limit, made = 1000, []

    def __init__(self, name, *, num_envs, seed, **config):
        assert len(seed) == num_envs
        Toy.made.append({"name": name, "seed": seed, **config})
        self.pixels = np.stack(
            [np.random.default_rng(s).integers(0, 256, (4, 84, 84)) for s in seed]
        )
        self.number, self.life = np.arange(num_envs), 3 + np.arange(num_envs) % 3
        self.t, self.over = np.zeros(num_envs, int), np.zeros(num_envs, bool)

    def obs(self):
        return (self.pixels + 7 * self.t[:, None, None, None]).astype(np.uint8)

    def reset(self):
        return self.obs(), {}

    def step(self, actions):
        assert actions.shape == self.t.shape
        assert all(self.action_space.contains(a) for a in actions)
        junk = self.over
        self.t[junk & self.game_over()] = 0
        self.t[~junk] += 1
        truncated = ~junk & (self.t >= self.limit)
        self.over = ~junk & ((self.t % self.life == 0) | truncated)
        raw = np.where(junk, 0, self.number + self.t).astype(np.float32)
        terminated = self.over & ~truncated
        info = {"reward": raw, "terminated": (terminated & self.game_over()).astype(np.int32)}
        return self.obs(), np.sign(raw), terminated, truncated, info

    def game_over(self):
        return (self.t >= 2 * self.life) | (self.t >= self.limit)

    def close(self):
        pass


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(envpool, "make", Toy)
    monkeypatch.setattr(Toy, "made", [])
    return Toy.made


def parse(flags: str) -> Args:
    return script.parse_args(flags.split())


def small(flags: str = "") -> Args:
    return parse(f"{SMALL} {flags}")


def train(folder: Path, flags: str = "") -> dict:
    """Train in this process; the final checkpoint."""
    script.train(small(f"--run-dir {folder} --total-timesteps {3 * STEPS} {flags}"))
    return script.load_checkpoint(folder)


def resume(folder: Path, flags: str = "") -> dict:
    script.train(parse(f"--resume {folder} --num-threads 1 {flags}"))
    return script.load_checkpoint(folder)


def adam_steps(state: dict) -> int:
    return int(state["state"][0]["step"])


def make_agent(args: Args):
    torch.manual_seed(args.seed)
    agent = script.Agent(Toy, args)
    agent.optimizer = script.FlatAdam(agent)
    agent.minibatch_grad = script.minibatch_grad
    return agent


class Log:
    """What rollout needs of a Run."""

    def __init__(self):
        self.global_step, self.iteration, self.rows, self.lines = 0, 0, [], []

    def log_episode(self, *row):
        self.rows.append(row)


# --- one process and many -------------------------------------------------------------------------

# 8 environments each; what `update` is asked to do with the same data
SETUPS = {
    "plain": "--num-steps 6",
    "kl": "--num-steps 6 --target-kl 1e-9 --learning-rate 1e-3",
    "raw": "--num-steps 5 --no-norm-adv --no-clip-vloss --max-grad-norm 0.01",
}


def synthetic(T: int, N: int = 8) -> script.Rollout:
    """A rollout of all environments, which end now and then, each end followed by a junk row."""
    rng = np.random.default_rng(T)
    terminated, truncated, valid = np.zeros((3, T, N), bool)
    for t in range(T):
        valid[t] = True if t == 0 else ~(terminated | truncated)[t - 1]
        terminated[t], truncated[t] = valid[t] & (rng.random((2, N)) < 0.15)
        truncated[t] &= ~terminated[t]
    obs = torch.as_tensor(rng.integers(0, 256, (T, N, 4, 84, 84), dtype=np.uint8))
    noise = torch.as_tensor(rng.normal(size=(2 * T + 1, N)), dtype=torch.float32)
    return script.Rollout(
        obs, torch.as_tensor(rng.integers(0, 4, (T, N))), math.log(0.25) + 0.02 * noise[:T],
        noise[T:], rng.normal(size=(T, N)) * valid, terminated, truncated, valid,
    )  # fmt: skip


def share_of(data: script.Rollout, which: slice) -> script.Rollout:
    return script.Rollout(*(x[:, which] for x in data))


def spied_update(setup: str, world: script.World) -> dict:
    """Two updates of this process with its share of the data, and what they left."""
    args = parse(f"--num-envs 8 --num-minibatches 2 --update-epochs 2 {SETUPS[setup]}")
    agent, found = make_agent(args), []
    plain = script.advantage_moments
    script.advantage_moments = lambda *inputs: found.append(plain(*inputs)) or found[-1]
    data = share_of(synthetic(args.num_steps), world.share(8))
    metrics = [script.update(agent, data, k, args.learning_rate, args, world) for k in (3, 4)]
    script.advantage_moments = plain
    parameters, steps = agent.optimizer.parameters, adam_steps(agent.optimizer.state())
    return {"parameters": parameters, "metrics": metrics, "moments": found, "steps": steps}


RANK = """
import os, sys
sys.path[:0] = {paths!r}
import envpool, torch
import test_atari as tests
script = tests.script
torch.set_num_threads(1)
envpool.make = tests.Toy
rank = os.environ["RANK"]
folder, port, *argv = sys.argv[1:]
os.chdir(folder)
world = script.World(script.Args(cuda=False))
updates = {{name: tests.spied_update(name, world) for name in tests.SETUPS}}
torch.save(updates, f"updates{{rank}}.pt")
world.close()
os.environ["MASTER_PORT"] = port  # the first may still be in use
agents, plain = [], script.FlatAdam
script.FlatAdam = lambda agent: agents.append(plain(agent)) or agents[-1]
script.train(script.parse_args(argv))
torch.save(agents[0].parameters, f"parameters{{rank}}.pt")
""".format(paths=[str(ROOT), str(ROOT / "tests")])


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """The folder of two processes which made the updates of SETUPS, and trained on Toys."""
    folder = tmp_path_factory.mktemp("pair")
    flags = f"{SMALL} --run-dir run --total-timesteps {5 * STEPS} --target-kl 1e-9".split()
    port, later, processes = str(free_port()), str(free_port()), []
    for rank in ("0", "1"):
        env = os.environ | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        log = (folder / f"log{rank}").open("w")
        command = [sys.executable, "-c", RANK, str(folder), later, *flags]
        processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(processes):
            assert process.wait(timeout=120) == 0, (folder / f"log{rank}").read_text()
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.mark.parametrize("setup", SETUPS)
def test_two_processes_update_as_one(setup, pair):
    """Acceptance 1: gradients, advantage statistics and the KL decision are of all processes."""
    both = [torch.load(pair / f"updates{rank}.pt")[setup] for rank in (0, 1)]
    assert_same(both[0], both[1])
    alone = spied_update(setup, script.World(Args(cuda=False)))
    start = make_agent(Args(num_envs=8)).optimizer.parameters
    assert (alone["parameters"] - start).abs().max() > 2e-4  # went somewhere
    torch.testing.assert_close(both[0]["parameters"], alone["parameters"], atol=1e-6, rtol=0)
    torch.testing.assert_close(both[0]["moments"], alone["moments"], atol=1e-6, rtol=1e-6)
    for two, one in zip(both[0]["metrics"], alone["metrics"], strict=True):
        assert two == pytest.approx(one, abs=1e-5)
    epochs = 1 if setup == "kl" else 2
    assert both[0]["steps"] == alone["steps"] == 2 * epochs * 2  # updates, epochs, minibatches


def test_two_processes_train_and_log_as_one(pair):
    parameters = [torch.load(pair / f"parameters{rank}.pt") for rank in (0, 1)]
    assert torch.equal(*parameters)
    checkpoint = script.load_checkpoint(pair / "run")
    saved = torch.nn.utils.parameters_to_vector(checkpoint["agent"].values())
    assert torch.equal(saved, parameters[0])
    steps, returns, lengths = np.array(rows(pair / "run")[1:], float).T
    # each process has environments 0 and 1 of Toy: games of 6 and 8 steps, then 2 junk rows
    counts = {6: sum(range(1, 7)), 8: sum(range(2, 10))}
    assert sorted(lengths) == 2 * (40 // 8) * [6] + 2 * (40 // 10) * [8]
    assert all(counts[int(length)] == score for score, length in zip(returns, lengths, strict=True))
    assert (np.diff(steps) >= 0).all()
    assert steps[:4].tolist() == [24, 24, 30, 30]  # 4 in each of 7 and of 9 rows, less junk
    assert checkpoint["global_step"] == 5 * STEPS - 2 * (40 // 4 + 40 // 5)
    out = (pair / "log0").read_text()
    assert out.count("episodic_return=") == len(steps)
    assert "2 x cpu, gloo, 1 + 1 threads each" in out
    assert (pair / "log1").read_text() == ""


def test_a_run_of_two_processes_goes_on_with_one(pair, toys, tmp_path):
    shutil.copytree(pair / "run", tmp_path / "run")
    before = script.load_checkpoint(tmp_path / "run")
    after = resume(tmp_path / "run", f"--total-timesteps {7 * STEPS}")
    assert (before["iteration"], after["iteration"]) == (5, 7)
    first = [value for step, value in scalars(tmp_path / "run")["losses/entropy"]]
    assert len(first) == 7
    assert [s for s, _ in scalars(tmp_path / "run")["losses/entropy"]][4] == before["global_step"]
    assert STEPS < after["global_step"] - before["global_step"] < 2 * STEPS
    first, second = (adam_steps(run["training"]["optimizer"]) for run in (before, after))
    assert second == first + 4
    assert len(toys[0]["seed"]) == 4


def test_update_is_plain_autograd_with_torchs_adam():
    args = parse("--num-envs 8 --num-steps 7 --num-minibatches 3 --update-epochs 2 --num-threads 1")
    data, agent = synthetic(7), make_agent(args)
    nn, start = torch.nn, agent.optimizer.parameters.clone()
    body = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
    )  # fmt: skip
    net = nn.ModuleDict({"network": body, "actor": nn.Linear(512, 4), "critic": nn.Linear(512, 1)})
    net.load_state_dict(agent.state_dict())
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, eps=1e-5)

    advantages, last = np.zeros((7, 8)), np.zeros(8)
    values = data.values.double().numpy()
    for t in reversed(range(7)):
        delta = data.rewards[t] + 0.99 * values[t + 1] * ~data.terminated[t] - values[t]
        last = delta + 0.99 * 0.95 * last * ~(data.terminated | data.truncated)[t]
        advantages[t] = last
    advantages = torch.tensor(advantages.ravel(), dtype=torch.float32)
    obs, acts, old = data.obs.flatten(0, 1) / 255, data.actions.flatten(), data.logprobs.flatten()
    v0, valid = data.values[:-1].flatten(), data.valid.ravel()
    returns, seen = advantages + v0, []
    for epoch in script.minibatch_rows(2, slice(0, 8), args):
        for i in epoch:
            i = i[valid[i]]
            hidden = net["network"](obs[i])
            pi = torch.distributions.Categorical(logits=net["actor"](hidden))
            v = net["critic"](hidden).squeeze(-1)
            a = (advantages[i] - advantages[i].mean()) / (advantages[i].std() + 1e-8)
            ratio = (pi.log_prob(acts[i]) - old[i]).exp()
            pg = torch.max(-a * ratio, -a * ratio.clamp(0.9, 1.1)).mean()
            near = v0[i] + (v - v0[i]).clamp(-0.1, 0.1)
            vl = torch.max((v - returns[i]) ** 2, (near - returns[i]) ** 2).mean() / 2
            adam.zero_grad()
            (pg - 0.01 * pi.entropy().mean() + 0.5 * vl).backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            adam.step()
            kl = (ratio - 1 - ratio.log()).mean()
            clipped = ((ratio - 1).abs() > 0.1).float().mean()
            means = [vl, pg, pi.entropy().mean(), -ratio.log().mean(), kl, clipped, norm]
            seen.append([x.item() for x in means])
    metrics = script.update(agent, data, 2, 1e-4, args, script.World(args))
    theirs = nn.utils.parameters_to_vector(net.parameters())
    assert (theirs - start).abs().max() > 2e-4
    torch.testing.assert_close(agent.optimizer.parameters, theirs, atol=1e-5, rtol=0)
    for name, value in zip(METRICS, torch.tensor(seen).mean(dim=0).tolist(), strict=True):
        assert metrics[f"losses/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    residual, targets = (x.double()[valid].var() for x in (returns - v0, returns))
    explained = 1 - (residual / targets).item()
    assert metrics["losses/explained_variance"] == pytest.approx(explained, abs=1e-5)


@pytest.mark.parametrize(("T", "minibatches"), [(8, 4), (7, 3), (1, 1), (5, 5)])
def test_every_sample_once_an_epoch_and_every_environment_as_often(T, minibatches):
    args = Args(num_envs=8, num_steps=T, num_minibatches=minibatches, update_epochs=3)
    whole = script.minibatch_rows(5, slice(0, 8), args)
    for epoch in whole:
        assert len(epoch) == minibatches
        assert sorted(np.concatenate(epoch)) == list(range(8 * T))
        for part in epoch:
            assert len(set(np.bincount(part % 8, minlength=8))) == 1
        assert max(map(len, epoch)) - min(map(len, epoch)) in (0, 8)
    for processes in (2, 4):
        n = 8 // processes
        shares = [
            script.minibatch_rows(5, slice(r * n, (r + 1) * n), args) for r in range(processes)
        ]
        for k, m in np.ndindex(3, minibatches):
            union = [row // n * 8 + r * n + row % n for r in range(processes)
                     for row in shares[r][k][m]]  # fmt: skip
            assert sorted(union) == sorted(whole[k][m])
    if T == 8:
        others = [script.minibatch_rows(6, slice(0, 8), args)]
        others += [script.minibatch_rows(5, slice(0, 8), Args(**vars(args) | {"seed": 2}))]
        drawn = [sorted(part) for rows in (whole, *others) for epoch in rows for part in epoch]
        assert len({tuple(part) for part in drawn}) == 3 * 3 * 4  # all different


# --- environments ---------------------------------------------------------------------------------


def test_no_two_environments_of_any_process_run_or_resume_share_a_seed(toys):
    """Acceptance 2, with 8 processes of 8 environments."""
    for seed in (1, 2):
        for start in (0, 20):
            for rank in range(8):
                which = slice(8 * rank, 8 * rank + 8)
                script.Envs(Args(num_envs=64, seed=seed), which, start)
    seeds = [seed for config in toys for seed in config["seed"]]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 64
    script.Envs(Args(num_envs=64), slice(0, 64))
    assert toys[-1]["seed"] == seeds[:64]  # whatever the number of processes


def test_games_start_and_go_on_differently():
    """No-op starts allow at most 30 first screens, most of which show the same; sticky actions
    and different actions part the games later. Few enough environments to be quick."""
    ends = []
    for seed in (1, 2):
        envs = script.Envs(Args(env_id="ALE/Pong-v5", num_envs=16, seed=seed), slice(0, 16))
        for _ in range(60):
            envs.step(np.full(16, 2 + _ // 4 % 2))
        ends += [obs.tobytes() for obs in envs.obs]
        envs.close()
    assert len(set(ends)) == 32


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Breakout-v5", "ALE/Breakout-v5"])
def test_64_environments_of_two_seeds(env_id):
    """Acceptance 2. Of 64 starts at most 30 can differ, by EnvPool's no-ops, in the game's memory,
    and fewer on the screen. Sticky actions part all; without them, what the policy draws does."""
    starts, ways = [], []
    for seed in (1, 2):
        args = Args(env_id=env_id, num_envs=64, seed=seed)
        envs = script.Envs(args, slice(0, 64))
        first = envs.vector.step(np.zeros(64, int))[4]["ram"]
        starts.append({ram.tobytes() for ram in first})
        rng, paths = np.random.default_rng(seed), [b""] * 64
        for _ in range(60):
            same = np.full(64, rng.integers(0, 4))
            envs.step(same if env_id.startswith("ALE") else rng.integers(0, 4, 64))
            paths = [
                hashlib.sha256(path + obs.tobytes()).digest()
                for path, obs in zip(paths, envs.obs, strict=True)
            ]
        ways += paths
        envs.close()
    assert len(set(ways)) == 128
    assert all(len(start) > 20 for start in starts)


IDS = {
    "Breakout-v5": ("Breakout-v5", 0.0), "BreakoutNoFrameskip-v4": ("Breakout-v5", 0.0),
    "ALE/Breakout-v5": ("Breakout-v5", 0.25), "BreakoutDeterministic-v4": ("Breakout-v5", 0.0),
    "PongNoFrameskip-v4": ("Pong-v5", 0.0), "PongNoFrameskip-v0": ("Pong-v5", 0.25),
    "ALE/SpaceInvaders-v5": ("SpaceInvaders-v5", 0.25),
}  # fmt: skip


@pytest.mark.parametrize("env_id", IDS)
def test_ids_of_gymnasium_and_their_sticky_actions(env_id, toys):
    script.Envs(Args(env_id=env_id), slice(0, 8), threads=1)
    name, sticky = IDS[env_id]
    assert toys[0]["name"] == name
    assert toys[0]["repeat_action_probability"] == sticky


def test_a_real_game_and_its_score():
    envs = script.Envs(Args(env_id="ALE/Breakout-v5", num_envs=2), slice(0, 2))
    config = envs.vector.config
    wanted = {
        "repeat_action_probability": 0.25, "episodic_life": True, "reward_clip": True,
        "noop_max": 30, "frame_skip": 4, "stack_num": 4, "use_fire_reset": True,
        "max_episode_steps": 27000, "full_action_space": False,
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    plain, seen, games, rng = envs.vector.step, [], [], np.random.default_rng(0)
    envs.vector.step = lambda actions: seen.append(plain(actions)) or seen[-1]
    while not games:
        rewards, terminated, _ = envs.step(rng.integers(0, 4, 2))
        ended = np.flatnonzero(seen[-1][4]["terminated"])
        games += [(i, *game) for i, game in zip(ended, envs.games, strict=True)]
    i, score, length = games[0]
    ends = np.array([s[2][i] for s in seen])
    assert ends.sum() == 5  # lives
    assert length == len(seen) - 4  # no junk rows
    assert score == sum(s[4]["reward"][i] for s in seen)
    junk = np.flatnonzero(ends[:-1]) + 1
    assert all(seen[t][1][i] == 0 for t in junk)
    assert envs.obs.dtype == np.uint8
    assert envs.obs.shape == (2, 4, 84, 84)
    envs.close()


def toy_rollout(args: Args, T: int, monkeypatch=None):
    envs, agent, log = script.Envs(args, slice(0, 4)), make_agent(args), Log()
    return envs, agent, log, script.rollout(agent, envs, log, args, script.World(args))


def test_score_is_the_raw_sum_over_a_whole_game(toys):
    args = small("--num-steps 25")
    *_, log, data = toy_rollout(args, 25)
    # games of 2 lives, a junk row after each
    wanted = []
    for i, life in enumerate((3, 4, 5, 3)):
        for end in range(2 * life, 25, 2 * life + 2):
            wanted.append((end + 1, sum(i + t for t in range(1, 2 * life + 1)), 2 * life, i))
    wanted.sort(key=lambda game: (game[0], game[3]))
    steps = data.valid.sum(axis=1).cumsum()
    assert log.rows == [(steps[end - 1], score, length) for end, score, length, _ in wanted]
    assert log.global_step == data.valid.sum() == steps[-1] < 100
    assert len(log.lines) == len(wanted)
    assert log.lines[0] == f"global_step={log.rows[0][0]}, episodic_return={log.rows[0][1]:.4f}"
    assert set(np.unique(data.rewards)) <= {0.0, 1.0}  # clipped


def test_rows_of_a_rollout_and_their_types(toys):
    args = small("--num-steps 9")
    envs, agent, log, data = toy_rollout(args, 9)
    assert (data.obs.dtype, data.obs.shape) == (torch.uint8, (9, 4, 4, 84, 84))
    assert data.obs.nbytes == 9 * 4 * 28224
    assert data.actions.dtype == torch.int64
    assert data.values.shape == (10, 4)
    assert data.valid[:, 0].tolist() == [True] * 3 + [False] + [True] * 3 + [False, True]
    assert data.terminated[:, 0].tolist() == [t in (2, 6) for t in range(9)]
    assert (data.rewards[~data.valid] == 0).all()
    with torch.no_grad():  # of the policy that acted, at the observations stored
        logprob, _, values = agent(data.obs.flatten(0, 1), data.actions.flatten())
        assert torch.allclose(agent.get_value(torch.as_tensor(envs.obs)), data.values[-1])
    torch.testing.assert_close(logprob, data.logprobs.flatten())
    torch.testing.assert_close(values, data.values[:-1].flatten(), atol=1e-5, rtol=1e-5)
    assert len(set(data.actions.flatten().tolist())) == 4
    again = script.rollout(agent, envs, log, args, script.World(args))
    assert again.valid[0].tolist() == [True, False, True, True]  # from one rollout to the next


def test_actions_do_not_depend_on_the_number_of_processes(toys):
    args, drawn = small("--num-envs 8 --num-steps 3"), []
    for which in (slice(0, 8), slice(0, 4), slice(4, 8)):
        world = script.World(args)
        world.share = lambda total, which=which: which
        envs = script.Envs(args, which)
        drawn.append(script.rollout(make_agent(args), envs, Log(), args, world).actions)
    assert torch.equal(drawn[0], torch.cat(drawn[1:], dim=1))
    assert len({tuple(column) for column in drawn[0].T.tolist()}) > 4


def test_a_lost_life_ends_the_return_and_truncation_bootstraps(toys, monkeypatch):
    monkeypatch.setattr(Toy, "limit", 5)
    args = small("--num-steps 9 --gamma 0.9 --gae-lambda 1")
    *_, log, data = toy_rollout(args, 9)
    values = data.values.double().numpy()
    advantages = script.gae(data.rewards, values, data.terminated, data.truncated, 0.9, 1.0)
    returns = (advantages + values[:-1])[:, 0]
    assert data.terminated[:, 0].tolist() == [t == 2 for t in range(9)]
    assert data.truncated[:, 0].tolist() == [t == 5 for t in range(9)]
    assert returns[:3] == pytest.approx([2.71, 1.9, 1.0])  # the life is lost
    assert returns[4:6] == pytest.approx([1.9 + 0.81 * values[6, 0], 1 + 0.9 * values[6, 0]])
    assert (15.0, 5) in [row[1:] for row in log.rows]  # the game is over


def test_junk_rows_change_no_bit_of_an_update(toys):
    args = parse("--num-envs 8 --num-steps 6 --num-minibatches 2 --update-epochs 1")
    data, after = synthetic(6), []
    assert 3 < (~data.valid).sum() < 20
    junk = torch.as_tensor(~data.valid)
    noise = torch.randint(0, 4, (6, 8))
    other = data._replace(
        actions=torch.where(junk, noise, data.actions),
        logprobs=torch.where(junk, -1.0, data.logprobs),
        rewards=np.where(data.valid, data.rewards, 5.0),
    )
    for it in (data, other):
        agent = make_agent(args)
        after.append(script.update(agent, it, 0, 1e-3, args, script.World(args)))
        after.append(agent.optimizer.parameters)
    assert torch.equal(after[1], after[3])
    assert after[0] == after[2]


# --- agent ----------------------------------------------------------------------------------------


def test_agent_as_in_cleanrl():
    torch.manual_seed(0)
    agent = script.Agent(Toy)
    obs = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        action, logprob, entropy, value = agent.get_action_and_value(obs)
        same, again, _, _ = agent.get_action_and_value(obs, action)
        floats = agent.get_value(obs.float())
    assert action.shape == logprob.shape == entropy.shape == value.shape == (5,)
    assert action.dtype == torch.int64
    assert torch.equal(same, action)
    assert torch.equal(again, logprob)
    torch.testing.assert_close(floats, value)  # scaled in the network
    assert entropy.tolist() == pytest.approx([math.log(4)] * 5, abs=1e-3)
    layers = [m for m in agent.modules() if hasattr(m, "weight")]
    gains = [math.sqrt(2)] * 4 + [0.01, 1.0]
    for layer, gain in zip(layers, gains, strict=True):
        singular = torch.linalg.svdvals(layer.weight.detach().flatten(1))
        torch.testing.assert_close(singular, torch.full_like(singular, gain))
        assert (layer.bias == 0).all()
    assert sum(p.numel() for p in agent.parameters()) == 1_686_693  # of the paper, 4 actions


def one_update(flags: str, device: str = "cpu") -> torch.Tensor:
    args = parse(f"--num-envs 8 --num-steps 6 --num-minibatches 2 --update-epochs 1 {flags}")
    agent = make_agent(args).to(device)
    agent.optimizer = script.FlatAdam(agent)
    if args.compile or args.cudagraphs:
        script.compile_agent(agent, args)
    data = synthetic(6)
    tensors = {k: x.to(device) for k, x in data._asdict().items() if isinstance(x, torch.Tensor)}
    world = script.World(args)
    for k in range(2):
        script.update(agent, data._replace(**tensors), k, 2.5e-4, args, world)
    return agent.optimizer.parameters.cpu()


def test_memory_order_and_bf16_leave_nearly_the_same_parameters():
    start = make_agent(Args()).optimizer.parameters
    plain = one_update("--no-cuda")
    other = one_update("--no-cuda --no-channels-last")
    torch.testing.assert_close(other, plain, atol=1e-6, rtol=0)
    low = one_update("--no-cuda --bf16")
    assert not torch.equal(low, plain)
    assert torch.cosine_similarity(low - start, plain - start, dim=0) > 0.97
    assert (low - plain).norm() < 0.25 * (plain - start).norm()


@pytest.mark.slow
def test_compiled_leaves_nearly_the_same_parameters(capsys):
    compiled = one_update("--no-cuda --compile")
    assert "going on eagerly" not in capsys.readouterr().out
    torch.testing.assert_close(compiled, one_update("--no-cuda"), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("flags", ["--compile", "--compile --cudagraphs"])
def test_compiled_on_a_gpu_leaves_nearly_the_same_parameters(flags, tmp_path, toys, capsys):
    plain = one_update("", "cuda")
    compiled = one_update(flags, "cuda")
    assert "going on eagerly" not in capsys.readouterr().out
    torch.testing.assert_close(compiled, plain, atol=5e-5, rtol=0)
    script.train(small(f"{flags} --cuda --run-dir {tmp_path / 'run'} --total-timesteps 96"))
    assert status(tmp_path / "run") == "finished"


@pytest.mark.slow
def test_update_raises_the_probability_of_what_paid():
    args = parse("--num-envs 8 --num-steps 8 --num-minibatches 2 --gamma 0 --ent-coef 0")
    agent, data, world = make_agent(args), synthetic(8), script.World(args)
    right = data.obs[..., 0, 0, 0].long() % 2  # of two kinds of pictures
    pictures = torch.zeros_like(data.obs) + 200 * right[..., None, None, None].to(torch.uint8)
    for k in range(12):
        with torch.no_grad():
            logits, values = agent.policy(pictures.flatten(0, 1))
        policy = torch.distributions.Categorical(logits=logits)
        torch.manual_seed(k)
        actions = policy.sample().view(8, 8)
        paid = (actions == right).numpy().astype(float)
        values = torch.cat([values.view(8, 8), torch.zeros(1, 8)])
        logprobs = policy.log_prob(actions.flatten()).view(8, 8)
        told = script.Rollout(pictures, actions, logprobs, values, paid, *data[5:])
        script.update(agent, told, k, 1e-3, args, world)
    with torch.no_grad():
        chances = agent.policy(pictures.flatten(0, 1))[0].exp()
    assert chances.gather(1, right.flatten()[:, None]).min() > 0.6  # from 0.25


# --- command line ---------------------------------------------------------------------------------

CLEANRL = (
    "--exp-name x --seed 2 --no-torch-deterministic --no-cuda --wandb-project-name cleanRL "
    "--wandb-entity me --env-id BreakoutNoFrameskip-v4 --total-timesteps 99999 "
    "--learning-rate 0.001 --local-num-envs 4 --num-steps 16 --no-anneal-lr --gamma 0.9 "
    "--gae-lambda 0.8 --num-minibatches 2 --update-epochs 3 --no-norm-adv --clip-coef 0.3 "
    "--no-clip-vloss --ent-coef 0.02 --vf-coef 0.4 --max-grad-norm 0.6 --target-kl 0.01 "
    "--device-ids 0 1 --backend gloo --local-batch-size 1 --local-minibatch-size 2 --num-envs 12 "
    "--batch-size 3 --minibatch-size 4 --num-iterations 5 --world-size 6 --track --capture-video"
)


@pytest.mark.parametrize("mark", ["-", "_"])
def test_the_34_flags_of_cleanrl(mark, monkeypatch, capsys):
    installed(monkeypatch, wandb=True, moviepy=True)
    assert len(re.findall("--", CLEANRL)) == 34
    args = parse(re.sub("(?<=[a-z])-(?=[a-z]+)(?!v4)", mark, CLEANRL))
    assert args == Args(
        exp_name="x", seed=2, torch_deterministic=False, cuda=False, wandb_project_name="cleanRL",
        wandb_entity="me", env_id="BreakoutNoFrameskip-v4", total_timesteps=99999,
        learning_rate=1e-3, num_envs=4, num_steps=16, anneal_lr=False, gamma=0.9, gae_lambda=0.8,
        num_minibatches=2, update_epochs=3, norm_adv=False, clip_coef=0.3, clip_vloss=False,
        ent_coef=0.02, vf_coef=0.4, max_grad_norm=0.6, target_kl=0.01, device_ids=[0, 1],
        backend="gloo", local_batch_size=1, local_minibatch_size=2, batch_size=3,
        minibatch_size=4, num_iterations=5, world_size=6, track=True, capture_video=True,
    )  # fmt: skip
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    assert "--local-batch-size has no effect: --num-envs, --num-steps and" in captured.out
    assert "--world-size has no effect: torchrun sets it" in captured.out


def test_environments_of_each_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse("--local-num-envs 8").num_envs == 32
    assert parse("--num-envs 32").num_envs == 32
    assert parse("").num_envs == 8


def test_a_budget_below_one_iteration_is_said(capsys):
    small("--total-timesteps 31")
    assert "less than an iteration, 32 (num-envs * num-steps): nothing" in capsys.readouterr().out


WRONG = [
    ("--env-id Breakot-v5", "no such game (near: Breakout-v5"),
    ("--env-id breakout", "--env-id breakout: no such game (near: Breakout-v5"),
    ("--env-id ALE/Pnog-v5", "near: Pong-v5"),
    ("--env-id HalfCheetah-v4", "--env-id HalfCheetah-v4: no such game"),
    ("--env-id CartPole-v1", "no such game"),
    ("--env-id Breakout-ram-v5", "near: Breakout-v5"),
    ("--num-envs 0", "--num-envs 0: must lie between 1"),
    ("--num-envs 9", "--num-envs 9: must be a multiple of the 2 processes"),
    ("--local-num-envs -1", "--local-num-envs -1: must lie between 0"),
    ("--num-minibatches 9", "--num-minibatches 9: more than the 8 steps"),
    ("--num-minibatches 0", "--num-minibatches 0"),
    ("--num-steps 0", "--num-steps 0"),
    ("--update-epochs 0", "--update-epochs 0"),
    ("--total-timesteps 1e6", "--total-timesteps: invalid literal"),
    ("--total-timesteps 0", "--total-timesteps 0"),
    ("--learning-rate -1", "--learning-rate -1.0: must lie between 0"),
    ("--gamma 1.5", "--gamma 1.5: must lie between 0 and 1"),
    ("--gae-lambda nan", "--gae-lambda nan"),
    ("--clip-coef -0.1", "--clip-coef -0.1"),
    ("--target-kl big", "--target-kl"),
    ("--seed -1", "--seed -1"),
    ("--num-threads -1", "--num-threads -1"),
    ("--env-threads -1", "--env-threads -1"),
    ("--eval-episodes 0", "--eval-episodes 0"),
    ("--checkpoint-interval 0", "--checkpoint-interval 0"),
    ("--backend mpl", "invalid choice 'mpl'"),
    ("--epsilon 0.2", "Unrecognized options: --epsilon"),
    ("--track", "--track needs wandb: pip install wandb"),
    ("--capture-video", "--capture-video needs moviepy: pip install moviepy"),
    ("--resume nowhere", "nowhere: no checkpoint.pt there"),
    ("--evaluate nowhere", "nowhere: no checkpoint.pt there"),
    ("--resume foreign", "written by ppo.py; use that script"),
    ("--resume damaged", "damaged, or not a checkpoint"),
    ("--resume a --evaluate b", "give one of them"),
    ("--resume a --run-dir b", "--run-dir is for a new run"),
    ("--run-dir full", "full: not empty; --resume"),
    ("--run-dir full/notes.txt", "full/notes.txt: File exists"),
]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(line, says, tmp_path, monkeypatch, capfd, toys):
    monkeypatch.chdir(tmp_path)
    installed(monkeypatch, wandb=False, moviepy=False)
    if "processes" in says:
        monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("damaged", "foreign", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "checkpoint.pt").write_bytes(b"PK")
    write_checkpoint(tmp_path / "foreign", {"script": "ppo", "args": {}})
    (tmp_path / "full" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as end:
        script.train(small(line))
    assert end.value.code == 2
    captured = capfd.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("ppo_atari_multigpu.py: ")
    assert says in captured.err
    assert sorted(tmp_path.rglob("*")) == before  # no half-made run


def test_without_envpool_a_line_says_what_to_install(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(SystemExit) as end:
        script.train(small())
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "needs EnvPool: pip install envpool (or '.[atari]'" in err
    assert not list(tmp_path.iterdir())


def test_wrong_input_from_a_shell(tmp_path):
    result = run(SCRIPT, "--env-id", "Brekout-v5", "--no-cuda", cwd=tmp_path, timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "near: Breakout-v5" in result.stderr
    assert not list(tmp_path.iterdir())


# --- the run's folder -----------------------------------------------------------------------------


def test_run_folder_tensorboard_and_output(tmp_path, toys, capsys):
    folder = tmp_path / "run"
    checkpoint = train(folder, f"--total-timesteps {4 * STEPS} --save-model")
    info = json.loads((folder / "run.json").read_text())
    assert (info["script"], info["status"], info["seed"]) == (SCRIPT.name, "finished", 1)
    assert info["source_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert info["versions"]["envpool"] == envpool.__version__
    assert info["global_step"] == checkpoint["global_step"]
    assert info["args"]["num_envs"] == 4
    assert (folder / "episodes.csv").read_text().startswith("global_step,seconds,return,length\n")
    episodes = np.array(rows(folder)[1:], float)
    assert info["final_return"] == pytest.approx(episodes[:, 1].mean(), abs=1e-4)

    found = scalars(folder)
    losses = {f"losses/{name}" for name in (*METRICS, "explained_variance")}
    shares = {f"charts/share_{name}" for name in ("environments", "inference", "update")}
    games = {"charts/episodic_return", "charts/episodic_length"}
    assert set(found) == losses | games | {"charts/learning_rate"}
    rates = [value for _, value in found["charts/learning_rate"]]
    assert rates == pytest.approx([2.5e-4 * k / 4 for k in (4, 3, 2, 1)])
    for column, tag in enumerate(("charts/episodic_return", "charts/episodic_length"), start=1):
        assert found[tag] == sorted((int(row[0]), row[column]) for row in episodes)
    ends = [step for step, _ in found["losses/entropy"]]
    assert len(set(ends)) == 4
    assert ends[-1] == checkpoint["global_step"] < 4 * STEPS  # no junk rows
    found = scalars(folder, timed=True)
    parts = np.array([[value for _, value in found[tag]] for tag in sorted(shares)])
    assert parts.sum(axis=0) == pytest.approx([1.0] * 4)
    assert (parts > 0).all()

    out = capsys.readouterr().out
    printed = re.findall(r"^global_step=(\d+), episodic_return=([\d.]+)$", out, re.M)
    assert [(int(s), float(r)) for s, r in printed] == [(int(s), r) for s, r, _ in episodes]
    assert len(re.findall(r"^SPS: \d+$", out, re.M)) == 4
    assert "1 x cpu, 1 + 1 threads each, 1,686,693 parameters" in out
    assert f"--evaluate {folder}\n" in out
    weights = torch.load(folder / "ppo_atari_multigpu.cleanrl_model", weights_only=True)
    assert_same(weights, checkpoint["agent"])


def test_same_command_same_bits(tmp_path):
    """With EnvPool's games."""
    flags = "--env-id ALE/Breakout-v5 --num-minibatches 1"
    first, second, other = (
        train(tmp_path / name, f"{flags} {more}")
        for name, more in (("a", ""), ("b", "--env-threads 2"), ("c", "--seed 2"))
    )
    first["args"]["env_threads"] = 2
    assert_same(first, second)
    assert (
        scalars(tmp_path / "a")["losses/policy_loss"]
        == (scalars(tmp_path / "b")["losses/policy_loss"])
    )
    assert not torch.equal(first["agent"]["actor.weight"], other["agent"]["actor.weight"])


def check_logs(folder: Path, iterations: int):
    """Every step is logged once, and the checkpoint is of the last."""
    found = scalars(folder)
    steps = [step for step, _ in found["losses/entropy"]]
    assert len(set(steps)) == len(steps) == iterations
    checkpoint = script.load_checkpoint(folder)
    assert (checkpoint["iteration"], checkpoint["global_step"]) == (iterations, steps[-1])
    episodes = [(int(step), float(score)) for step, score, _ in rows(folder)[1:]]
    assert [step for step, _ in episodes] == sorted(step for step, _ in episodes)
    assert found["charts/episodic_return"] == sorted(episodes)
    assert max(np.diff([0, *steps])) <= steps[0] * 1.3


def test_killed_runs_go_on_from_their_checkpoint(tmp_path, toys, monkeypatch):
    folder, plain = tmp_path / "run", script.rollout

    def dies(agent, envs, run, args, world):
        data = plain(agent, envs, run, args, world)
        if run.iteration == 3:
            raise SystemError
        return data

    monkeypatch.setattr(script, "rollout", dies)
    with pytest.raises(SystemError):
        train(folder, f"--total-timesteps {5 * STEPS}")
    assert status(folder) == "failed"
    assert script.load_checkpoint(folder)["iteration"] == 2
    logged = len(rows(folder))
    monkeypatch.setattr(script, "rollout", plain)
    resume(folder)
    check_logs(folder, 5)
    assert status(folder) == "finished"
    assert len(rows(folder)) > logged
    first, again = (set(config["seed"]) for config in toys)
    assert not first & again  # not the same games once more


def test_a_resumed_run_may_go_on_elsewhere_and_further_but_not_change(tmp_path, toys, capsys):
    train(tmp_path / "run")
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    for flag in ("--seed 2", "--num-envs 8", "--env-id Pong-v5", "--local-num-envs 2", "--bf16"):
        with pytest.raises(SystemExit) as end:
            resume(folder, flag)
        assert end.value.code == 2
        assert f"{flag.split()[0]} is " in capsys.readouterr().err
    more = "--local-num-envs 4 --num-threads 2 --no-channels-last"
    resume(folder, f"--total-timesteps {4 * STEPS} {more}")
    torch.set_num_threads(1)
    check_logs(folder, 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_says_how_to_go_on(number, tmp_path, toys, monkeypatch, capsys):
    folder, plain = tmp_path / "run", script.rollout

    def rollout(agent, envs, run, args, world):
        if run.iteration == 2:
            os.kill(os.getpid(), number)
        return plain(agent, envs, run, args, world)

    monkeypatch.setattr(script, "rollout", rollout)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as end:
        train(folder, f"--total-timesteps {4 * STEPS}")
    assert end.value.code == 128 + number
    assert f"--resume {folder}\n" in capsys.readouterr().out
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert status(folder) == "running"
    check_logs(folder, 3)


def test_nan_stops_with_its_name_and_keeps_the_checkpoint(tmp_path, toys, monkeypatch, capsys):
    folder, plain = tmp_path / "run", script.rollout

    def rollout(agent, envs, run, args, world):
        data = plain(agent, envs, run, args, world)
        data.rewards[0, 0] = np.nan if run.iteration == 3 else 0
        return data

    monkeypatch.setattr(script, "rollout", rollout)
    with pytest.raises(SystemExit) as end:
        train(folder, f"--total-timesteps {9 * STEPS}")
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{folder}: stopped in iteration 4, after step ")
    assert ": value_loss, policy_loss" in said and "is not finite in minibatch 0; " in said
    assert status(folder) == "failed"
    checkpoint = script.load_checkpoint(folder)
    assert checkpoint["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_evaluation_prints_scores_and_writes_nothing(tmp_path, toys, capsys):
    folder = tmp_path / "run"
    train(folder)
    before = content(folder)
    capsys.readouterr()
    scores = script.evaluate(parse(f"--evaluate {folder} --eval-episodes 3 --num-threads 1"))
    assert scores == [21.0] * 3  # environment 0 of Toy
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"eval_episode={k}, episodic_return=21.00" for k in range(3)]
    assert lines[3] == "greedy, 3 episodes: 21.00 +- 0.00"
    assert content(folder) == before
    training, evaluating = toys
    assert not set(training["seed"]) & set(evaluating["seed"])


def test_dependencies_in_the_header_are_the_projects():
    header = re.search(r"# /// script\n(.*?)# ///\n", SCRIPT.read_text(), re.S)
    header = tomllib.loads(re.sub("^# ?", "", header[1], flags=re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["dependencies"] + project["optional-dependencies"]["atari"]
    assert set(header["dependencies"]) < {re.sub(r"\[.*\]", "", line) for line in known}
    names = {re.match(r"\w+", line)[0] for line in header["dependencies"]}
    assert names == {"torch", "gymnasium", "envpool", "numpy", "tensorboard", "tqdm", "tyro"}
    assert header["requires-python"] == project["requires-python"]


def test_importing_does_nothing(tmp_path, monkeypatch, capfd):
    def world():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return handlers, numbers, torch.get_num_threads(), dict(os.environ)

    monkeypatch.chdir(tmp_path)
    before = world()
    names = runpy.run_path(script.__file__, run_name="imported")
    assert world() == before
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
    assert {"Args", "Agent", "train"} <= names.keys()


@pytest.mark.slow
def test_the_script_alone_in_an_empty_folder(tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    flags = f"{SMALL} --env-id PongNoFrameskip-v4 --total-timesteps 64".split()
    result = run(SCRIPT.name, *flags, cwd=tmp_path, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    (folder,) = tmp_path.glob("runs/PongNoFrameskip-v4__ppo_atari_multigpu__1__*")
    assert json.loads((folder / "run.json").read_text())["git_commit"] is None
    assert script.load_checkpoint(folder)["iteration"] == 2


@pytest.mark.slow
def test_a_video_of_a_game(tmp_path):
    train(tmp_path / "run", "--total-timesteps 32 --capture-video --eval-episodes 1")
    (video,) = (tmp_path / "run" / "videos").glob("*.mp4")
    assert video.stat().st_size > 5000


# --- starting again -------------------------------------------------------------------------------


def saved_run(folder: Path, launcher: str, **args):
    folder.mkdir(parents=True)
    content = {"script": SCRIPT.stem, "args": args, "training": {"launcher": launcher}}
    write_checkpoint(folder, content)


def test_a_restart_finds_the_run_of_its_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    name = "runs/Breakout-v5__ppo_atari_multigpu__1__"
    saved_run(Path(f"{name}100"), "another")
    assert script.after_restart(Args()).resume is None  # a first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert script.after_restart(Args()).resume is None  # killed before its first checkpoint
    saved_run(Path(f"{name}200"), script.launcher())
    saved_run(Path("runs/Breakout-v5__ppo_atari_multigpu__12__300"), script.launcher())
    assert script.after_restart(Args()).resume == Path(f"{name}200")
    assert script.after_restart(Args(seed=2)).resume is None
    assert script.after_restart(Args(resume=Path("x"))).resume == Path("x")
    saved_run(Path(f"{name}400"), "another, which started later")
    assert script.after_restart(Args()).resume == Path(f"{name}200")
    Path(f"{name}500").mkdir()
    Path(f"{name}500/checkpoint.pt").write_text("junk")  # is nobody's, and stops nobody
    saved_run(Path(f"{name}600"), script.launcher(), temperature=2.0)  # another version's
    assert script.after_restart(Args()).resume == Path(f"{name}200")


def test_a_restart_changes_nothing(tmp_path, monkeypatch, capsys):
    """With --local-num-envs 4 on two of three nodes the run keeps its 24 environments."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    saved_run(tmp_path / "run", script.launcher(), num_envs=24, total_timesteps=10**6)
    resumed = script.after_restart(Args(run_dir=tmp_path / "run", num_envs=16))
    assert (resumed.num_envs, resumed.total_timesteps) == (24, Args().total_timesteps)
    monkeypatch.setenv("WORLD_SIZE", "5")
    several = "24: must be a multiple of the 5 processes"
    for changed, says in ({}, several), ({"gamma": 0.5}, "--gamma is 0.99 in"):
        with pytest.raises(SystemExit):
            script.after_restart(Args(run_dir=tmp_path / "run", **changed))
        assert says in capsys.readouterr().err


def test_a_restart_finds_its_run_dir_but_takes_nobody_elses(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert script.after_restart(Args(run_dir=folder)) == Args(run_dir=folder)
    saved_run(folder, script.launcher())
    assert script.after_restart(Args(run_dir=folder)) == Args(resume=folder)
    saved_run(tmp_path / "old", "another")  # at first refused as not empty; then torchrun restarts
    assert script.after_restart(Args(run_dir=tmp_path / "old")).resume is None


def test_plain_runs_from_one_shell_are_runs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    saved_run(Path("runs/Breakout-v5__ppo_atari_multigpu__1__200"), script.launcher())
    assert script.after_restart(Args()) == Args()


def test_a_requeued_slurm_job_finds_its_run_dir(tmp_path, monkeypatch):
    """Its node, launcher and process numbers are new."""
    saved_run(tmp_path / "run", "another")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert script.after_restart(Args(run_dir=tmp_path / "run")).resume == tmp_path / "run"


# A worker that plays Toys, and in a step of its choice does something else
WORKER = """
import os, runpy, signal, sys, time
sys.path[:0] = {paths!r}
import envpool
from test_atari import SCRIPT, Toy
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not os.path.exists("restarted")
rank, calls = int(os.environ["RANK"]), 0

class Faulty(Toy):
    def step(self, actions):
        global calls
        calls += 1
        {fault}
        return super().step(actions)

envpool.make = Faulty
sys.argv[0] = str(SCRIPT)
runpy.run_path(str(SCRIPT), run_name="__main__")
"""
KILL = "if first and rank == 1 and calls == 8 * 5 + 3: os.kill(os.getpid(), signal.SIGKILL)"


def launch(folder: Path, flags: str, fault: str = "", torchrun: str = "", processes: int = 2):
    """Start torchrun in a folder, with a worker that has this fault."""
    worker = folder / "worker.py"
    worker.write_text(WORKER.format(paths=[str(ROOT), str(ROOT / "tests")], fault=fault or "pass"))
    where = torchrun or "--standalone"
    command = [sys.executable, "-m", "torch.distributed.run", *where.split()]
    command += [f"--nproc-per-node={processes}", *([] if torchrun else ["--max-restarts=3"])]
    log = (folder / "log").open("a")
    return subprocess.Popen(
        [*command, str(worker), *SMALL.split(), *flags.split()], cwd=folder, stdout=log, stderr=log
    )


def end_of(*processes: subprocess.Popen, timeout: float = 120) -> list[int]:
    try:
        return [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def wait_for(condition, seconds: float = 60):
    end = time.time() + seconds
    while not (found := condition()):
        assert time.time() < end
        time.sleep(0.1)
    return found


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--run-dir runs/mine"])
def test_a_killed_rank_brings_all_back_from_the_last_checkpoint(flags, tmp_path):
    """Acceptance 4."""
    if not flags:
        saved_run(tmp_path / "runs/Breakout-v5__ppo_atari_multigpu__1__100", "another")
    before = content(tmp_path / "runs")
    process = launch(tmp_path, f"--total-timesteps {8 * STEPS} {flags}", KILL)
    assert end_of(process) == [0], (tmp_path / "log").read_text()
    assert content(tmp_path / "runs").items() >= before.items()
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("*/run.json"))
    check_logs(folder, 8)
    assert status(folder) == "finished"
    assert "resuming with new games" in (tmp_path / "log").read_text()
    assert "steps 100 to 256" in (tmp_path / "log").read_text()  # from iteration 4, not 0


@pytest.mark.slow
def test_every_restart_comes_up(tmp_path):
    """Torchrun's store still has the addresses of the dead (pytorch issue 135712)."""
    fault = "if rank == 0 and int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 5: os._exit(1)"
    where = "--standalone --max-restarts=5"
    process = launch(tmp_path, f"--total-timesteps {2 * STEPS}", fault, where)
    assert end_of(process) == [0], (tmp_path / "log").read_text()
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/run.json"))
    check_logs(folder, 2)


@pytest.mark.slow
def test_an_older_run_dir_is_left_alone_also_when_torchrun_starts_again(tmp_path, toys):
    train(tmp_path / "run")
    before = content(tmp_path / "run")
    process = launch(tmp_path, f"--total-timesteps {8 * STEPS} --run-dir run")
    (returncode,) = end_of(process)
    assert returncode != 0
    assert content(tmp_path / "run") == before
    assert "not empty; --resume" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_one_rank_ends_all(rank, tmp_path):
    fault = f"if rank == {rank} and calls == 20: raise ValueError('the game broke')"
    process = launch(tmp_path, f"--total-timesteps {8 * STEPS}", fault, "--standalone")
    started = time.time()
    (returncode,) = end_of(process, timeout=60)
    assert returncode != 0
    assert time.time() - started < 60
    log = (tmp_path / "log").read_text()
    assert "ValueError: the game broke" in log
    (folder,) = tmp_path.glob("runs/*")
    assert status(folder) == "failed"
    assert script.load_checkpoint(folder)["iteration"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", "everyone"])
def test_a_signal_to_the_launcher_checkpoints(to, tmp_path, toys):
    """Slurm sends it to everyone; the launcher then sends it to its workers once more."""
    flags = f"--total-timesteps {9999 * STEPS} --run-dir run --checkpoint-interval 9999"
    process = launch(tmp_path, flags, "time.sleep(0.1)")
    csv_file = tmp_path / "run" / "episodes.csv"
    wait_for(lambda: csv_file.exists() and csv_file.read_text().count("\n") > 6)
    workers = children(process.pid)
    assert len(workers) == 2
    for pid in workers if to == "everyone" else []:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
    process.terminate()
    (returncode,) = end_of(process, timeout=45)
    assert returncode != 0
    checkpoint = script.load_checkpoint(tmp_path / "run")
    assert checkpoint["iteration"] > 0
    assert status(tmp_path / "run") == "running"
    check_logs(tmp_path / "run", checkpoint["iteration"])


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two(tmp_path, toys):
    train(tmp_path / "run")
    process = launch(tmp_path, f"--resume run --total-timesteps {5 * STEPS}")
    assert end_of(process) == [0], (tmp_path / "log").read_text()
    check_logs(tmp_path / "run", 5)
    assert f"steps {rows(tmp_path / 'run')[-1][0]}" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_twenty_real_iterations_leave_all_ranks_the_same_bits(tmp_path):
    """Acceptance 1, with EnvPool's games and a KL stop."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import torch, ppo_atari_multigpu as script\n"
        "made, plain = [], script.FlatAdam\n"
        "script.FlatAdam = lambda agent: made.append(plain(agent)) or made[-1]\n"
        "script.train(script.parse_args())\n"
        "torch.save(made[0].state() | {'p': made[0].parameters}, f'rank{os.environ[\"RANK\"]}.pt')"
    )
    flags = f"{SMALL} --total-timesteps {20 * STEPS} --update-epochs 2 --target-kl 1e-5"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(worker), *flags.split()], cwd=tmp_path, check=True, timeout=300)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert_same(first, second)
    assert 2 * 20 < adam_steps(first) < 2 * 2 * 20  # the KL decided, now so, now so
    (folder,) = tmp_path.glob("runs/*")
    assert script.load_checkpoint(folder)["iteration"] == 20


# --- two nodes ------------------------------------------------------------------------------------


def two_nodes(tmp_path: Path, flags: str, fault: str = "", restarts: int = 0) -> list:
    where = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} "
    where += f"--rdzv-id=7 --max-restarts={restarts}"
    return [launch(tmp_path, flags, fault, where, processes=1) for _ in range(2)]


@pytest.mark.slow
def test_two_launchers_are_two_nodes(tmp_path):
    """Acceptance 3."""
    launchers = two_nodes(tmp_path, f"--total-timesteps {6 * STEPS}")
    assert end_of(*launchers) == [0, 0], (tmp_path / "log").read_text()
    (folder,) = tmp_path.glob("runs/*")
    check_logs(folder, 6)
    log = (tmp_path / "log").read_text()
    assert log.count("episodic_return=") == len(rows(folder)) - 1
    assert log.count("SPS: ") == 6
    # in all 4 environments 48 rows, of which an end makes one in 4 (or 5) junk
    assert script.load_checkpoint(folder)["global_step"] == 4 * 48 - 2 * (48 // 4 + 48 // 5)


@pytest.mark.slow
def test_a_rank_killed_on_the_other_node_brings_all_back(tmp_path):
    """Torchrun of the first node restarts its worker because of the second node's, which is not
    counted as a restart there."""
    fault = (
        "if first and rank == 0 and calls > 42: time.sleep(1)\n"
        "        if first and rank == 1 and calls == 43:\n"
        "            open('restarted', 'w'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    launchers = two_nodes(tmp_path, f"--total-timesteps {8 * STEPS}", fault, restarts=3)
    assert end_of(*launchers) == [0, 0], (tmp_path / "log").read_text()
    (folder,) = tmp_path.glob("runs/*")
    check_logs(folder, 8)


CLUSTER = ROOT.parent / "shared" / "slurm" / "cluster"


@pytest.fixture(scope="module")
def cluster():
    if not CLUSTER.exists() or os.geteuid():
        pytest.skip("no cluster to bring up")
    up = subprocess.run([str(CLUSTER), "up"], capture_output=True, text=True, timeout=400)
    try:
        if up.returncode:
            pytest.skip(f"the cluster did not come up: {up.stderr[-200:]}")
        yield
    finally:
        subprocess.run([str(CLUSTER), "down"], timeout=60)


def sbatch(folder: Path, flags: str) -> tuple[str, Path]:
    """Queue the batch file in a folder with the script; the job's number and run."""
    shutil.copy(SCRIPT, folder)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "HEAD": "127.0.0.1", "PORT": str(free_port())}
    file = ROOT / "benchmark" / "ppo_atari_multigpu.slurm"
    command = ["sbatch", "--parsable", "--nodes=2", str(file), *SMALL.split(), *flags.split()]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), folder / "runs" / f"slurm-{done.stdout.strip()}"


def job_state(job: str) -> str:
    show = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    return re.search(r"JobState=(\w+)", show.stdout)[1]


def job_end(job: str) -> str:
    going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
    return wait_for(lambda: (s := job_state(job)) not in going and s, seconds=240)


@pytest.mark.slow
def test_slurm_with_two_nodes(cluster, tmp_path):
    """Acceptance 3."""
    job, folder = sbatch(tmp_path, f"--env-id Breakout-v5 --total-timesteps {6 * STEPS}")
    log = tmp_path / f"slurm-{job}.log"
    assert job_end(job) == "COMPLETED", log.read_text()
    assert status(folder) == "finished"
    assert script.load_checkpoint(folder)["iteration"] == 6
    assert "2 x cpu, gloo" in log.read_text()
    assert log.read_text().count("SPS: ") == 6
    assert list(tmp_path.glob("runs/*")) == [folder]


def long_job(folder: Path) -> tuple[str, Path, Path]:
    """A job that has done two of its iterations of 2 s; its number, run and output."""
    flags = "--num-steps 64 --total-timesteps 100000 --checkpoint-interval 9999"
    job, run = sbatch(folder, flags)
    log = folder / f"slurm-{job}.log"
    wait_for(lambda: log.exists() and log.read_text().count("SPS: ") > 1, seconds=120)
    return job, run, log


@pytest.mark.slow
def test_a_slurm_job_is_warned_before_its_time_limit(cluster, tmp_path):
    job, folder, log = long_job(tmp_path)
    subprocess.run(["scancel", "--signal=TERM", job], check=True, timeout=30)  # to everyone
    job_end(job)
    assert script.load_checkpoint(folder)["iteration"] > 1, log.read_text()
    assert status(folder) == "running"


@pytest.mark.slow
def test_a_slurm_job_goes_on_when_it_is_queued_again(cluster, tmp_path):
    job, folder, log = long_job(tmp_path)
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=30)
        wait_for(lambda: job_state(job) == "PENDING")
        checkpoint = script.load_checkpoint(folder)
        assert checkpoint["iteration"] > 1, log.read_text()
        now = ["scontrol", "update", f"JobId={job}", "StartTime=now"]  # else after two minutes
        subprocess.run(now, check=True, timeout=30)
        line = f"steps {checkpoint['global_step']:,} to 100,000"
        wait_for(lambda: line in log.read_text(), seconds=120)
    finally:
        subprocess.run(["scancel", job], timeout=30)
        job_end(job)  # else the nodes do not go down
