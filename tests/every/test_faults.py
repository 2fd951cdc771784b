"""Kill, stop and mislead every script. Each is trained in copies of this process, which end like
programs."""

import importlib
import os
import random
import re
import signal
from pathlib import Path

import envpool
import pytest
from program import (
    assert_same,
    in_a_fork,
    rows,
    scalars,
    status,
    toy,
    train_until_killed,
)
from tqdm import tqdm

import ppo_cma

CLIPPED = "--num-envs 2 --num-steps 40 --num-minibatches 2 --update-epochs 2 --no-compile"
# Flags of each script with which an iteration takes some 20 ms, and its steps
SETTINGS = {
    "ppo": (f"--env-id CartPole-v1 {CLIPPED}", 80),
    "ppo_continuous_action": (f"--env-id InvertedPendulum-v4 {CLIPPED}", 80),
    "ppo_cma": (
        "--env-id InvertedPendulum-v4 --iter-steps 200 --n-updates 2 --minibatch-size 32 "
        "--history-buffer-size 3",
        200,
    ),
    "ppo_kl_adaptive": ("--env-id CartPole-v1 -b 4 --update-epochs 2 --value-epochs 2 -m 4", 130),
}
ENVPOOL = "ppo_atari_multigpu", "ppo_atari_lstm", "ppo_procgen"  # after a resume games are new ones
for script in ENVPOOL:
    SETTINGS[script] = (
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
        "--env-threads 1" + " --num-levels 2 --eval-episodes 2" * (script == "ppo_procgen"),
        32,
    )
EVERY = pytest.mark.parametrize("script", SETTINGS)
N = 6  # iterations of a run


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.setattr(envpool, "make", toy)
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)  # which takes 4 s


def new(script: str, folder: Path, iterations: int = N, every: int = 2) -> list[str]:
    flags, steps = SETTINGS[script]
    more = f"--checkpoint-interval {every} --total-timesteps {iterations * steps} --no-cuda"
    return f"{flags} {more} --run-dir {folder}".split()


def go_on(folder: Path) -> list[str]:
    return ["--resume", str(folder)]


def train(script: str, argv: list[str]):
    module = importlib.import_module(script)
    return module.train(module.parse_args(argv))


def load(script: str, folder: Path) -> dict:
    return importlib.import_module(script).load_checkpoint(folder)


def assert_same_run(script: str, folder: Path, other: Path):
    """Checkpoint, episodes and TensorBoard, to the bit; not what measures time."""
    assert_same(load(script, folder), load(script, other))
    assert rows(folder) == rows(other)
    points = scalars(folder)
    assert points == scalars(other)
    for tag in points.keys() - {"charts/episodic_return", "charts/episodic_length"}:
        assert len({step for step, _ in points[tag]}) == len(points[tag]), tag
    assert status(folder) == status(other) == "finished"
    assert not list(folder.glob("*.tmp"))


def undisturbed(script: str, argv: list[str], resumed: list[int]) -> Path:
    """A run that was never killed; one of Atari was stopped where the other was resumed."""
    folder, done = Path(argv[-1]), 0
    for stop in sorted({*resumed} - {0}) if script in ENVPOOL else []:
        assert train_until_killed(script, "rollout", stop - done, argv, signal.SIGTERM) == 143
        argv, done = go_on(folder), stop
    train(script, argv)
    return folder


# --- kills and signals ----------------------------------------------------------------------------


def train_until_a_moment(script: str, seconds: float, argv: list[str]) -> int:
    def killed_later():
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM, which nobody handles
        train(script, argv)

    return in_a_fork(killed_later)


# Functions, and in which of its calls; a checkpoint is saved at the start and every 2 iterations
MOMENTS = {"torch.save": 2, "an episode": 3, "rollout": 4, "Path.replace": 2, "the clock": 0}


def logging(script: str) -> str:
    """The method that logs what has ended: that of one episode, or of all that one step ended."""
    several = hasattr(importlib.import_module(script).Run, "log_episodes")
    return "Run.log_episodes" if several else "Run.log_episode"


@EVERY
@pytest.mark.parametrize(
    ("kills", "iterations"),
    [(5, 8), pytest.param(30, 40, marks=pytest.mark.slow)],
    ids=["5 kills", "30 kills"],
)
def test_killed_again_and_again(script, kills, iterations, tmp_path):
    rng, folder, resumed = random.Random(1), tmp_path / "run", []
    argv = new(script, folder, iterations)
    for k in range(kills):
        moment, call = list(MOMENTS.items())[k % len(MOMENTS)]
        if moment == "the clock":
            code = train_until_a_moment(script, rng.uniform(0, 0.3), argv)
        else:
            target = logging(script) if moment == "an episode" else moment
            code = train_until_killed(script, target, call, argv)
        assert code in (-signal.SIGKILL, -signal.SIGALRM, 0), moment
        if moment == "torch.save" and code:
            assert (folder / "checkpoint.pt.tmp").stat().st_size > 1000
        argv = go_on(folder)
        resumed.append(load(script, folder)["counters"][1])
    assert resumed[:4] == [0, 0, 2, 2]
    train(script, argv)
    whole = undisturbed(script, new(script, tmp_path / "whole", iterations), resumed)
    assert_same_run(script, folder, whole)


def test_a_copy_killed_as_it_writes_leaves_this_process_free_to_write():
    def writes():
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    tqdm.write("tqdm has made its lock")
    assert in_a_fork(writes) == -signal.SIGKILL
    assert all([lock.acquire(timeout=5) for lock in tqdm.get_lock().locks])
    tqdm.get_lock().release()


@EVERY
def test_a_signal_ends_the_iteration_and_saves(script, tmp_path, capfd):
    folder, argv = tmp_path / "run", new(script, tmp_path / "run", every=100)
    for k, number in enumerate([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], 1):
        assert train_until_killed(script, "rollout", 1, argv, number) == 128 + number
        captured = capfd.readouterr()
        assert re.search(rf"\ngo on with: python \S+ --resume {folder}\n$", captured.out)
        assert captured.err.count("\nstopping after this iteration\n") == 1
        assert "Traceback" not in captured.err
        assert load(script, folder)["counters"][1] == k
        assert status(folder) == "running"
        argv = go_on(folder)
    train(script, argv)
    whole = undisturbed(script, new(script, tmp_path / "whole", every=100), [1, 2, 3])
    assert_same_run(script, folder, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@EVERY
def test_the_second_signal_acts_at_once(script, number, tmp_path):
    argv = new(script, tmp_path / "run")
    code = train_until_killed(script, "rollout", 4, argv, number, number)
    assert code == -number
    assert load(script, tmp_path / "run")["counters"][1] == 2
    assert status(tmp_path / "run") == "running"
