"""ppo_atari_multigpu.py: the same on one process and on many, its environments, acting in a CUDA
graph. Most tests replace EnvPool's games by Toy, whose ends, lives and scores are known."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import envpool
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from program import ROOT, Toy, Waits, assert_same, end_of, free_port, rows, train_until_killed
from scripts import SMALL

import ppo_atari_multigpu as script
from ppo_atari_multigpu import Args

NAME = "ppo_atari_multigpu"


def parse(flags: str) -> Args:
    return script.parse_args(f"--no-cuda --num-threads 1 {flags}".split())


def small(flags: str = "") -> Args:
    return parse(f"{SMALL[NAME]} {flags}")


def new_agent(args: Args) -> script.Agent:
    torch.manual_seed(args.seed)
    agent = script.Agent(Toy, args)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    return agent


def vector(agent: script.Agent) -> torch.Tensor:
    """A copy of all parameters."""
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def noise_rollout(T: int, N: int = 8) -> script.Rollout:
    """Noise, with junk rows. Log-probabilities are those of a uniform policy, more or less."""
    rng = np.random.default_rng(T)
    ends = (rng.random((T + 1, N)) < 0.15) & (np.arange(T + 1) % 2 == 1)[:, None]
    terminated, truncated = (ends[1:] & (rng.random((T, N)) < 0.5), ends[1:])
    tensors = [
        rng.integers(0, 256, (T, N, 4, 84, 84), np.uint8), rng.integers(0, 4, (T, N)),
        np.float32(0.1 * rng.normal(size=(T, N)) - math.log(4)),
        np.float32(rng.normal(size=(T + 1, N))),
    ]  # fmt: skip
    tensors = [torch.as_tensor(x) for x in tensors]
    rewards = rng.normal(size=(T, N)) * ~ends[:T]
    return script.Rollout(*tensors, rewards, terminated, truncated & ~terminated, ~ends[:T])


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(envpool, "make", Toy)
    monkeypatch.setattr(Toy, "made", [])
    return Toy.made


# --- one process and many -------------------------------------------------------------------------
SETUPS = {  # of 8 environments: updates with the same data
    "default": "--num-steps 6",
    "kl": "--num-steps 6 --target-kl 1e-9 --learning-rate 1e-3",
    "raw": "--num-steps 5 --no-norm-adv --no-clip-vloss --max-grad-norm 0.01",
}


def two_updates(setup: str) -> dict:
    """Two updates of this process with its share of the data, and what they left."""
    args = parse(f"--num-envs 8 --num-minibatches 2 --update-epochs 2 {SETUPS[setup]}")
    agent, columns = new_agent(args), script.rank_slice(args)
    data = script.Rollout(*(x[:, columns] for x in noise_rollout(args.num_steps)))
    metrics = [script.update(agent, data, args, k) for k in (3, 4)]
    steps = int(agent.adam.state_dict()["state"][0]["step"])
    return {"parameters": vector(agent), "metrics": metrics, "steps": steps}


RANK = """
import os, sys
sys.path[:0] = {paths!r}
import envpool, torch
import test_math as tests
script = tests.script
torch.set_num_threads(1)
envpool.make = tests.Toy
rank = os.environ["RANK"]
folder, port, *argv = sys.argv[1:]
os.chdir(folder)
script.join(script.Args(cuda=False))
updates = {{name: tests.two_updates(name) for name in tests.SETUPS}}
torch.save(updates, f"updates{{rank}}.pt")
script.leave()
os.environ["MASTER_PORT"] = port  # the first may still be in use
agents, plain = [], script.compile_grad
script.compile_grad = lambda agent, args: agents.append(agent) or plain(agent, args)
seed = torch.manual_seed  # each rank begins with weights of its own; those of rank 0 count
torch.manual_seed = lambda number: seed(number + int(rank))
script.train(script.parse_args(argv))
torch.save(tests.vector(agents[0]), f"parameters{{rank}}.pt")
""".format(paths=[str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)])


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """The folder of two processes which made the updates of SETUPS, and trained on Toys."""
    folder = tmp_path_factory.mktemp("pair")
    flags = f"{SMALL[NAME]} --run-dir run --total-timesteps 160 --target-kl 1e-9".split()
    port, later, processes = str(free_port()), str(free_port()), []
    for rank in ("0", "1"):
        env = os.environ | {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        log = (folder / f"log{rank}").open("w")
        command = [sys.executable, "-c", RANK, str(folder), later, *flags]
        processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    assert end_of(*processes) == [0, 0], [x.read_text() for x in sorted(folder.glob("log*"))]
    return folder


@pytest.mark.parametrize("setup", SETUPS)
def test_two_processes_update_as_one(setup, pair):
    """Gradients, advantage statistics and the KL decision are of all processes."""
    both = [torch.load(pair / f"updates{rank}.pt")[setup] for rank in (0, 1)]
    assert_same(both[0], both[1])
    alone = two_updates(setup)
    start = vector(new_agent(Args(num_envs=8)))
    assert (alone["parameters"] - start).abs().max() > 2e-4  # went somewhere
    gap = (both[0]["parameters"] - alone["parameters"]).abs()
    assert (gap > 1e-6).float().mean() < 1e-3  # rounding moves a unit across its kink, if any
    assert gap.max() < 3e-5
    for two, one in zip(both[0]["metrics"], alone["metrics"], strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
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
    assert steps[:4].tolist() == [24, 24, 30, 30]  # 4 in each of 7 and of 9 rows, less junk
    assert checkpoint["global_step"] == 160 - 2 * (40 // 4 + 40 // 5)
    out = (pair / "log0").read_text()
    assert sum(map(int, re.findall(r"episodes=(\d+)", out))) == len(steps)
    assert "processes: 2 x cpu" in out
    told = (pair / "log1").read_text().splitlines()
    assert [line for line in told if not line.startswith("[W")] == []  # but for torch's warnings


def test_a_run_of_two_processes_goes_on_with_one(pair, toys, tmp_path):
    shutil.copytree(pair / "run", tmp_path / "run")
    before = script.load_checkpoint(tmp_path / "run")
    script.train(parse(f"--resume {tmp_path / 'run'} --total-timesteps 224"))
    after = script.load_checkpoint(tmp_path / "run")
    assert (before["iteration"], after["iteration"]) == (5, 7)
    steps = [int(run["adam"][0]["step"]) for run in (before, after)]
    assert steps[1] == steps[0] + 4
    assert len(toys[0]["seed"]) == 4


# --- environments and acting ----------------------------------------------------------------------
def test_no_two_games_are_alike(toys):
    """Of two seeds, two processes each, resumed once. EnvPool ends episodes and clips rewards."""
    for seed, start, columns in np.ndindex(2, 2, 2):
        columns = slice(4 * columns, 4 * columns + 4)
        script.Envs(Args(seed=seed, env_id="ALE/Pong-v5"), columns, 7 * start)
    seeds = [seed for made in toys for seed in made["seed"]]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 8
    options = {"name": "Pong-v5", "repeat_action_probability": 0.25}
    options |= {"episodic_life": True, "reward_clip": True}
    assert all(made.items() >= options.items() for made in toys)


def test_a_real_game_and_its_score():
    """By EnvPool itself: bytes, lives, raw scores of whole games."""
    envs = script.Envs(small("--env-id Breakout-v5"), slice(0, 4))
    rng, ends, games, score = np.random.default_rng(0), 0, [], np.zeros(4)
    for _ in range(700):
        begins = envs.autoreset.copy()
        rewards, terminated, truncated = envs.step(rng.integers(0, 4, 4))
        assert (envs.obs.shape, envs.obs.dtype) == ((4, 4, 84, 84), np.uint8)
        assert (rewards == np.sign(envs.raw_rewards)).all()
        assert not ((terminated | truncated) & begins).any() and not envs.raw_rewards[begins].any()
        ends += envs.autoreset.sum()
        score += envs.raw_rewards
        games += score[envs.new_game].tolist()
        score[envs.new_game] = 0
    assert len(games) >= 8 and max(games) > 0
    assert 4 * len(games) < ends < 6 * len(games) + 20  # five lives a game


def players(args: Args, columns=slice(0, 4)):
    """An agent, toys, buffers."""
    agent, envs = new_agent(args), script.Envs(args, columns)
    return agent, envs, script.make_buffers(agent, envs, args)


def test_no_host_waits_for_acting(toys):
    agent, _, buffers = players(small())
    with Waits() as waits:
        script.acting_step(agent, buffers)
    assert waits.found == []
    assert waits.calls > 20


def test_actions_do_not_depend_on_the_number_of_processes(toys, monkeypatch):
    args, drawn = small("--num-envs 8 --num-steps 3"), []
    run = SimpleNamespace(iteration=0, log_rollout=lambda *_: None)
    for columns in (slice(0, 8), slice(0, 4), slice(4, 8)):
        monkeypatch.setattr(script, "rank_slice", lambda args, columns=columns: columns)
        drawn.append(script.rollout(*players(args, columns), run, args).actions)
    assert torch.equal(drawn[0], torch.cat(drawn[1:], dim=1))
    assert len({tuple(column) for column in drawn[0].T.tolist()}) > 4


def test_a_layer_that_is_frozen_later_stays():
    agent, data = new_agent(args := small()), noise_rollout(small().num_steps, 4)
    script.update(agent, data, args, 0)
    before = agent.critic.weight.requires_grad_(False).clone()
    script.update(agent, data, args, 1)
    assert torch.equal(agent.critic.weight, before)


# --- the network ----------------------------------------------------------------------------------
HOW = ["", "--no-channels-last", "--bf16"]


@pytest.mark.parametrize("flags", HOW)
def test_the_network_is_its_formula(flags):
    """Sizes and initial weights are CleanRL's; samples have the probabilities of the loss."""
    agent, rng = new_agent(parse(flags)), np.random.default_rng(0)
    assert sum(p.numel() for p in agent.parameters()) == 1_686_693
    hidden = [x for x in agent.network if hasattr(x, "weight")]
    for layer in (*hidden, agent.actor, agent.critic):
        gain = {agent.actor: 0.01, agent.critic: 1.0}.get(layer, math.sqrt(2))
        singular = torch.linalg.svdvals(layer.weight.detach().flatten(1))
        torch.testing.assert_close(singular, torch.full_like(singular, gain), rtol=1e-4, atol=0)
        assert not layer.bias.any()
    obs = torch.randint(0, 256, (6, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        agent.actor.weight.mul_(200)
        weights, x = iter(agent.parameters()), obs.float() / 255
        for stride in (4, 2, 1):
            x = F.conv2d(x, next(weights), next(weights), stride=stride).relu()
        x = F.linear(x.flatten(1), next(weights), next(weights)).relu()
        logprobs = F.linear(x, next(weights), next(weights)).log_softmax(dim=1)
        wanted = F.linear(x, next(weights), next(weights))[:, 0]
        action, logprob, entropy, value = agent.get_action_and_value(obs)
        policy, _ = agent.policy(obs[:1])
    near = {"atol": 0.05, "rtol": 0.05} if flags == "--bf16" else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(logprob, logprobs.gather(1, action[:, None])[:, 0], **near)
    torch.testing.assert_close(entropy, -(logprobs.exp() * logprobs).sum(dim=1), **near)
    torch.testing.assert_close(value, wanted, **near)
    assert (flags == "--bf16") == ((value - wanted).abs().max() > 1e-4)
    agent.policy = lambda _: (policy.expand(20_000, -1), None)  # as at so many of them
    actions, p = agent.act(obs[:1], rng.gumbel(size=(20_000, 4))), policy[0].exp().numpy()
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 20_000, p, atol=0.015)
    assert p.max() - p.min() > 0.1 and agent.act(obs[:1])[0] == p.argmax()


# --- compiled -------------------------------------------------------------------------------------
@pytest.mark.slow
def test_compiled_code_follows_numbers_of_args():
    """Also the third and later ones, which torch 2.13 would not follow by itself."""
    args, data = small("--compile"), noise_rollout(8, 4)
    agents = [new_agent(args) for _ in range(2)]
    gradient = script.compile_grad(agents[1], args)
    assert gradient is not script.minibatch_grad
    for k, clip in enumerate((0.1, 0.05, 0.02, 0.3, 0.01, 0.01)):
        args.clip_coef, args.ent_coef, args.norm_adv = clip, 0.1 * k, k < 5
        metrics = script.update(agents[0], data, args, k)
        compiled = script.update(agents[1], data, args, k, gradient)
        assert compiled == pytest.approx(metrics, rel=1e-3, abs=1e-4)
        torch.testing.assert_close(*map(vector, agents), atol=2e-4, rtol=0)


# --- as a program ---------------------------------------------------------------------------------
def test_the_same_command_goes_on_where_it_was_cut_off(tmp_path, toys):
    """With --run-dir: what torchrun's restarts and Slurm's requeue need."""
    argv = f"{SMALL[NAME]} --run-dir {tmp_path / 'run'} --total-timesteps 160".split()
    assert train_until_killed(NAME, "update", 3, argv) == -signal.SIGKILL
    assert script.load_checkpoint(tmp_path / "run")["iteration"] == 2
    args = script.parse_args([*argv, "--gamma", "0.9"])
    assert (args.resume, args.run_dir, args.gamma) == (tmp_path / "run", None, 0.9)
    assert Args(**vars(args)) == args  # as rank 0 sends them
    script.train(args)
    assert script.load_checkpoint(tmp_path / "run")["iteration"] == 5
    with pytest.raises(SystemExit) as end:  # a finished run is not begun again
        script.parse_args(argv)
    assert end.value.code == 2
