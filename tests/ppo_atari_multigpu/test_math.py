"""ppo_atari_multigpu.py: the same on one process and on many, its environments, acting in a CUDA
graph. Most tests replace EnvPool's games by Toy, whose ends, lives and scores are known."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import envpool
import numpy as np
import pytest
import torch
from maths import Player, frames_agent, frames_rollout, program, two_updates
from program import ROOT, Toy, assert_same, free_port, rows, scalars, status, train_until_killed
from replay import Waits, no_graphs_but_tapes
from scripts import SMALL

import ppo_atari_multigpu as script
from ppo_atari_multigpu import Args

NAME = "ppo_atari_multigpu"


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(envpool, "make", Toy)
    monkeypatch.setattr(Toy, "made", [])
    return Toy.made


parse, small, train = program(NAME)


# --- one process and many -------------------------------------------------------------------------
# 8 environments each; what `update` is asked to do with the same data
SETUPS = {
    "plain": "--num-steps 6",
    "kl": "--num-steps 6 --target-kl 1e-9 --learning-rate 1e-3",
    "raw": "--num-steps 5 --no-norm-adv --no-clip-vloss --max-grad-norm 0.01",
}


def share_of(data: script.Rollout, which: slice) -> script.Rollout:
    return script.Rollout(*(x[:, which] for x in data))


def spied_update(setup: str) -> dict:
    """Two updates of this process with its share of the data, and what they left."""
    args = parse(f"--num-envs 8 --num-minibatches 2 --update-epochs 2 {SETUPS[setup]}")
    agent, found = frames_agent(NAME, args), []
    plain = script.advantage_moments
    script.advantage_moments = lambda *inputs: found.append(plain(*inputs)) or found[-1]
    data = share_of(frames_rollout(NAME, args.num_steps), script.own_envs(args))
    metrics = [script.update(agent, data, k, args.learning_rate, args) for k in (3, 4)]
    script.advantage_moments = plain
    steps = int(agent.adam.state_dict()["state"][0]["step"])
    return {"parameters": agent.vector, "metrics": metrics, "moments": found, "steps": steps}


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
updates = {{name: tests.spied_update(name) for name in tests.SETUPS}}
torch.save(updates, f"updates{{rank}}.pt")
torch.distributed.destroy_process_group()
os.environ["MASTER_PORT"] = port  # the first may still be in use
agents, plain = [], script.flat_adam
script.flat_adam = lambda agent: agents.append(agent) or plain(agent)
script.train(script.parse_args(argv))
torch.save(agents[0].vector, f"parameters{{rank}}.pt")
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
    alone = spied_update(setup)
    start = frames_agent(NAME, Args(num_envs=8)).vector
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
    assert checkpoint["counters"][0] == 160 - 2 * (40 // 4 + 40 // 5)
    out = (pair / "log0").read_text()
    assert out.count("episodic_return=") == len(steps)
    assert "Breakout-v5 on 2 x cpu" in out
    assert (pair / "log1").read_text() == ""


def test_a_run_of_two_processes_goes_on_with_one(pair, toys, tmp_path):
    shutil.copytree(pair / "run", tmp_path / "run")
    before = script.load_checkpoint(tmp_path / "run")
    flags = f"--resume {tmp_path / 'run'} --num-threads 1 --total-timesteps 224"
    script.train(parse(flags))
    after = script.load_checkpoint(tmp_path / "run")
    (step, first), (last, second) = (run["counters"][:2] for run in (before, after))
    assert (first, second) == (5, 7)
    points = [step for step, _ in scalars(tmp_path / "run")["losses/entropy"]]
    assert (len(points), points[4]) == (7, step)
    assert 32 < last - step < 2 * 32
    steps = [int(run["optimizer"]["state"][0]["step"]) for run in (before, after)]
    assert steps[1] == steps[0] + 4
    assert len(toys[0]["seed"]) == 4


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
@pytest.mark.parametrize(
    ("env_id", "n"),
    [
        ("ALE/Pong-v5", 16),
        pytest.param("Breakout-v5", 64, marks=pytest.mark.slow),
        pytest.param("ALE/Breakout-v5", 64, marks=pytest.mark.slow),
    ],
)
def test_games_start_and_go_on_differently(env_id, n):
    """Acceptance 2. At most 30 starts can differ, by EnvPool's no-ops, in the game's memory, and
    fewer on the screen. Sticky actions part all; without them, what the policy draws does."""
    ways = []
    for seed in (1, 2):
        envs = script.Envs(Args(env_id=env_id, num_envs=n, seed=seed), slice(0, n))
        first = envs.vector.step(np.zeros(n, int))[4]["ram"]
        assert len({ram.tobytes() for ram in first}) > n // 3
        rng, paths = np.random.default_rng(seed), [b""] * n
        for _ in range(60):
            same = np.full(n, rng.integers(0, 4))
            envs.step(same if env_id.startswith("ALE") else rng.integers(0, 4, n))
            seen = zip(paths, envs.obs, strict=True)
            paths = [hashlib.sha256(path + obs.tobytes()).digest() for path, obs in seen]
        ways += paths
        envs.vector.close()
    assert len(set(ways)) == 2 * n


def three_rollouts(player: Player) -> list[list[torch.Tensor]]:
    """The rows of three rollouts, between which the policy changes."""
    found, vector = [], player.agent.vector
    for k in range(3):
        player.log.iteration = k
        found.append([torch.as_tensor(x).clone().cpu() for x in player.roll()])
        vector += 0.01 * torch.cos(torch.arange(len(vector))).to(vector)
    return found


def test_acting_is_recorded_and_replayed_to_the_same_bits(toys, monkeypatch):
    """With a stand-in for CUDA graphs, which holds numbers of the host as they were; rollouts fill
    the same tensors again."""
    args = small("--num-steps 7")
    plain = Player(NAME, args)
    wanted = three_rollouts(plain)
    made = no_graphs_but_tapes(monkeypatch)
    recorded = Player(NAME, args, act=script.Recorded(script.acting_step))
    assert_same(three_rollouts(recorded), wanted)
    assert [tape.replays for tape in made] == [3 * 7 - 3]
    assert_same(recorded.log.rows, plain.log.rows)
    obs = torch.stack([rows[0] for rows in wanted]).flatten(0, 1)
    assert (obs[1:] != obs[:-1]).flatten(2).any(dim=2).float().mean() > 0.6  # no row twice


def test_no_host_waits_for_acting(toys):
    player = Player(NAME, small())
    with Waits() as waits:
        script.acting_step(player.agent, *player.more)
    assert waits.found == []
    assert waits.calls > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("flags", ["", "--bf16", "--cudagraphs"])
def test_acting_in_a_cuda_graph_is_acting(flags, toys, monkeypatch, capsys):
    """Actions, and all that is kept of them, as without a graph; compiled ones to rounding."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    args = parse(f"--num-envs 4 --num-steps 16 {flags}")
    wanted = three_rollouts(Player(NAME, args, device="cuda"))
    player = Player(NAME, args, device="cuda", act=script.Recorded(script.acting_step))
    if flags == "--cudagraphs":
        script.compile_grad(player.agent, args)
    for one, other in zip(three_rollouts(player), wanted, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert isinstance(player.how["act"].graph, torch.cuda.CUDAGraph)
    assert "going on eagerly" not in capsys.readouterr().out


def test_actions_do_not_depend_on_the_number_of_processes(toys, monkeypatch):
    args, drawn = small("--num-envs 8 --num-steps 3"), []
    for which in (slice(0, 8), slice(0, 4), slice(4, 8)):
        monkeypatch.setattr(script, "own_envs", lambda args, which=which: which)
        drawn.append(Player(NAME, args, which=which).roll().actions)
    assert torch.equal(drawn[0], torch.cat(drawn[1:], dim=1))
    assert len({tuple(column) for column in drawn[0].T.tolist()}) > 4


@pytest.mark.slow
def test_compiled_code_follows_numbers_of_args():
    """Also the third and later ones, which torch 2.13 would not follow by itself."""
    args, data = small("--compile"), frames_rollout(NAME, 8, 4)
    agents = [frames_agent(NAME, args) for _ in range(2)]
    gradient = script.compile_grad(agents[1], args)
    assert gradient is not script.minibatch_grad
    for k, clip in enumerate((0.1, 0.05, 0.02, 0.3, 0.01)):
        args.clip_coef, args.ent_coef = clip, 0.1 * k
        script.update(agents[0], data, k, 1e-3, args)
        script.update(agents[1], data, k, 1e-3, args, gradient)
        torch.testing.assert_close(agents[0].vector, agents[1].vector, atol=1e-4, rtol=0)
    args.norm_adv = False
    for agent, given in zip(agents, ((), (gradient,)), strict=True):
        script.update(agent, data, 9, 1e-3, args, *given)
    torch.testing.assert_close(agents[0].vector, agents[1].vector, atol=2e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("flags", ["--compile", "--compile --cudagraphs"])
def test_compiled_on_a_gpu_learns_nearly_the_same(flags, tmp_path, toys, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain = two_updates(NAME, "", "cuda")
    compiled = two_updates(NAME, flags, "cuda")
    assert "going on eagerly" not in capsys.readouterr().out
    torch.testing.assert_close(compiled, plain, atol=1e-6, rtol=0)
    script.train(small(f"{flags} --cuda --run-dir {tmp_path / 'run'} --total-timesteps 96"))
    assert status(tmp_path / "run") == "finished"


# --- as a program ---------------------------------------------------------------------------------
def test_the_same_command_goes_on_where_it_was_cut_off(tmp_path, toys):
    """With --run-dir: what torchrun's restarts and Slurm's requeue need."""
    argv = f"{SMALL[NAME]} --run-dir {tmp_path / 'run'} --total-timesteps 160".split()
    assert train_until_killed(NAME, "update", 3, argv) == -signal.SIGKILL
    assert script.load_checkpoint(tmp_path / "run")["counters"][1] == 2
    args = script.parse_args(argv)
    assert args.resume == tmp_path / "run"
    script.train(args)
    assert script.load_checkpoint(tmp_path / "run")["counters"][1] == 5
    assert status(tmp_path / "run") == "finished"
    steps = [step for step, _ in scalars(tmp_path / "run")["losses/entropy"]]
    assert len(steps) == len(set(steps)) == 5
    with pytest.raises(SystemExit) as end:  # a finished run is not begun again
        script.parse_args(argv)
    assert end.value.code == 2


def test_arguments_of_a_run_cut_off_can_be_told_to_the_other_processes(tmp_path):
    """Rank 0 tells its arguments as they are, and each process makes Args of them."""
    torch.save({"args": vars(Args(num_envs=4))}, tmp_path / "checkpoint.pt")
    (tmp_path / "run.json").write_text('{"status": "running"}')
    args = script.parse_args(["--run-dir", str(tmp_path), "--gamma", "0.9"])
    assert (args.resume, args.num_envs, args.gamma) == (tmp_path, 4, 0.9)
    assert Args(**vars(args)) == args


def test_a_real_game_and_its_score():
    """By EnvPool itself: bytes, lives, raw scores of whole games."""
    envs = script.Envs(small("--env-id Breakout-v5"), slice(0, 4))
    rng, ends, games = np.random.default_rng(0), 0, []
    for _ in range(700):
        over = envs.over.copy()
        rewards, terminated, truncated = envs.step(rng.integers(0, 4, 4))
        assert envs.obs.shape == (4, 4, 84, 84)
        assert envs.obs.dtype == np.uint8
        assert set(np.unique(rewards)) <= {-1.0, 0.0, 1.0}
        assert not (over & (terminated | truncated)).any()
        ends += (terminated | truncated).sum()
        games += [(score, length) for _, score, length in envs.ended]
    assert len(games) >= 8
    assert 4 * len(games) < ends < 6 * len(games) + 20  # five lives a game
    assert all(score == int(score) >= 0 and 20 < length < 700 for score, length in games)
