"""Faults of environments and of learning: a run stops at once, says where, and keeps its last good
checkpoint; no process is left behind."""

import contextlib
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from program import ROOT, assert_same, rows, scalars, status
from test_atari import Toy

import ppo
import ppo_atari_multigpu
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive

EPISODE = 10  # steps


class Faulty(gym.Env):
    """Episodes of 10 steps that pay 1 each. The episode that is reset with `bad_seed`, or every one
    without it, has a fault in step `at`; 0 is its reset."""

    observation_space = gym.spaces.Box(-1, 1, (3,))
    longest = 0  # episode so far

    def __init__(self, action_space, fault="none", at=0, bad_seed=None):
        self.action_space, self.fault, self.at, self.bad_seed = action_space, fault, at, bad_seed

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.bad, self.t = self.bad_seed in (None, seed), 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        Faulty.longest = max(Faulty.longest, self.t)
        endless = self.bad and self.fault == "endless"
        reward = math.inf if self.strikes("reward") else 1.0
        return self.observe(), reward, self.t == EPISODE and not endless, False, {}

    def strikes(self, fault: str) -> bool:
        return self.bad and (fault, self.t) == (self.fault, self.at)

    def observe(self) -> np.ndarray:
        if self.strikes("exception"):
            raise ZeroDivisionError("physics blew up")
        if self.strikes("death"):
            os.kill(os.getpid(), signal.SIGKILL)
        obs = self.np_random.uniform(-1, 1, 4 if self.strikes("shape") else 3)
        obs[1] = np.nan if self.strikes("observation") else obs[1]
        return obs


# Each with two environments that play 4 episodes an iteration each
CLIPPED = "--num-envs 2 --num-steps 44 --num-minibatches 2 --update-epochs 2 --env-backend"
SETUPS = {
    "ppo": (ppo, f"{CLIPPED} gymnasium --total-timesteps 880"),
    "ppo-async": (ppo, f"{CLIPPED} async --total-timesteps 880"),
    "continuous": (ppo_continuous_action, f"{CLIPPED} gymnasium --total-timesteps 880"),
    "continuous-async": (ppo_continuous_action, f"{CLIPPED} async --total-timesteps 880"),
    "cma": (ppo_cma, "--num-envs 2 --iter-steps 80 --n-updates 5 --total-timesteps 800"),
    "kl": (
        ppo_kl_adaptive,
        "--num-envs 2 -b 8 --update-epochs 2 --num-minibatches 3 --value-epochs 6 --hid1-mult 2 "
        "--early-stop 0 --total-timesteps 800",
    ),
    "atari": (
        ppo_atari_multigpu,
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 2 --num-threads 1 "
        "--env-threads 1 --no-cuda --total-timesteps 320",
    ),
}
GYMNASIUM = [name for name in SETUPS if name != "atari"]
SYNCHRONOUS = [name for name in GYMNASIUM if not name.endswith("-async")]
ACTIONS = {"ppo": gym.spaces.Discrete(2)}
ENVIRONMENT, EPISODE_NUMBER = 1, 14  # of the fault; in the fourth iteration of every setup


def parse(setup: str, folder: Path, flags: str = ""):
    """A script and its arguments for a run of Faulty-v0, or of Atari."""
    script, more = SETUPS[setup]
    env_id = "" if setup == "atari" else "--env-id Faulty-v0"
    line = f"{env_id} {more} --checkpoint-interval 2 --run-dir {folder} {flags}"
    return script, script.parse_args(line.split())


@pytest.fixture
def faulty(monkeypatch):
    """Give Faulty-v0 a fault, by default of one episode of the second environment; the seed that
    this episode is reset with."""
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)  # nothing is learned here
    monkeypatch.setattr(Faulty, "longest", 0)
    before = set(multiprocessing.active_children())

    def give(setup: str, fault: str, at: int = 0, episode: int | None = EPISODE_NUMBER) -> int:
        script, _ = SETUPS[setup]
        seed = None if episode is None else script.episode_seed(1, ENVIRONMENT, episode)
        space = ACTIONS.get(setup.removesuffix("-async"), gym.spaces.Box(-1, 1, (1,)))
        kwargs = {"action_space": space, "fault": fault, "at": at, "bad_seed": seed}
        spec = gym.envs.registration.EnvSpec("Faulty-v0", entry_point=Faulty, kwargs=kwargs)
        monkeypatch.setitem(gym.registry, "Faulty-v0", spec)
        return seed

    yield give
    for process in set(multiprocessing.active_children()) - before:  # if a test failed
        process.kill()
        process.join()


@contextlib.contextmanager
def time_limit(seconds: float):
    def over(*_):
        raise AssertionError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def failure(call: Callable, capfd, seconds: float = 20) -> tuple[str, BaseException]:
    """What a call that soon fails tells, as a program would, and its exception."""
    capfd.readouterr()
    with pytest.raises((Exception, SystemExit)) as end, time_limit(seconds):
        call()
    error = end.value
    if isinstance(error, SystemExit):
        assert error.code == 1
        return capfd.readouterr().err, error.__context__
    return "\n".join([str(error), *getattr(error, "__notes__", ())]), error


def assert_failed(folder: Path, script, text: str):
    """The text tells the iteration and the checkpoint, which is of two iterations and sound."""
    where = rf"{folder}: stopped in iteration 4, after step [23]\d\d"
    assert re.search(where, text)
    assert "; its checkpoint.pt is the last good one: mend the cause and --resume" in text
    assert status(folder) == "failed"
    checkpoint = script.load_checkpoint(folder)
    assert checkpoint["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# --- environments ---------------------------------------------------------------------------------


def first_fault(seed: int) -> int | None:
    """The step in which something is wrong in the episode of Faulty-v0 that has this seed."""
    env = gym.make("Faulty-v0", disable_env_checker=True)
    for step in range(EPISODE + 1):
        try:
            obs, reward = env.step(0)[:2] if step else (env.reset(seed=seed)[0], 0.0)
        except ZeroDivisionError:
            return step
        if obs.shape != (3,) or not np.isfinite([*obs, reward]).all():
            return step
    return None


FAULTS = {
    "exception": (5, RuntimeError, "ZeroDivisionError('physics blew up') in step"),
    "reset": (0, RuntimeError, "ZeroDivisionError('physics blew up') in step"),
    "observation": (5, FloatingPointError, "an observation is not finite in step"),
    "reward": (10, FloatingPointError, "a reward is not finite in step"),
    "shape": (5, ValueError, "an observation (4,), not (3,), in step"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("setup", GYMNASIUM)
def test_a_fault_of_an_environment_is_told_with_its_place(setup, fault, faulty, tmp_path, capfd):
    at, kind, says = FAULTS[fault]
    seed = faulty(setup, "exception" if fault == "reset" else fault, at)
    script, args = parse(setup, tmp_path / "run")
    text, error = failure(lambda: script.train(args), capfd)
    assert type(error) is kind
    assert f"{says} {at} of environment 1, episode 14 (seed {seed})" in text
    assert_failed(tmp_path / "run", script, text)
    assert (first_fault(seed), first_fault(seed + 1)) == (at, None)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("setup", GYMNASIUM)
def test_a_run_goes_on_when_the_fault_is_mended(setup, faulty, tmp_path, capfd):
    faulty(setup, "none")
    script, args = parse(setup, tmp_path / "whole")
    script.train(args)
    faulty(setup, "exception", 5)
    script, args = parse(setup, tmp_path / "run")
    failure(lambda: script.train(args), capfd)
    faulty(setup, "none")
    script.train(script.parse_args(["--resume", str(tmp_path / "run")]))
    mended, whole = (script.load_checkpoint(tmp_path / name) for name in ("run", "whole"))
    assert_same(mended, whole)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


@pytest.mark.parametrize("setup", GYMNASIUM)
def test_a_fault_of_the_first_episode(setup, faulty, tmp_path, capfd):
    """Before there is a run, or in its first iteration."""
    seed = faulty(setup, "exception", 0, episode=0)
    script, args = parse(setup, tmp_path / "run")
    text, error = failure(lambda: script.train(args), capfd)
    assert f"in step 0 of environment 1, episode 0 (seed {seed})" in text
    if (tmp_path / "run").exists():
        assert status(tmp_path / "run") == "failed"
        assert script.load_checkpoint(tmp_path / "run")["iteration"] == 0


# --- processes of environments --------------------------------------------------------------------


def alive(session: int) -> list[int]:
    """Processes of a session, but those that have ended and wait to be asked how."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it just ended
            continue
        if int(number) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable, seconds: float):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    """Start a script in a session of its own."""
    processes = []

    def start(setup: str, env_id: str) -> subprocess.Popen:
        script, flags = SETUPS[setup]
        words = f"--env-id {env_id} {flags} --checkpoint-interval 2".split()
        process = subprocess.Popen(
            [sys.executable, script.__file__, *words, "--run-dir", str(tmp_path / "run")],
            env=os.environ | {"PYTHONPATH": str(ROOT / "tests") + os.pathsep + str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        for pid in alive(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("setup", ["ppo-async", "continuous-async"])
def test_a_process_that_dies_is_named(setup, at, faulty, tmp_path, capfd):
    faulty(setup, "death", at)
    script, args = parse(setup, tmp_path / "run")
    text, error = failure(lambda: script.train(args), capfd)
    assert type(error) is RuntimeError
    assert text.startswith("the process of environment 1 died, exit code -9 (-9: it was killed,")
    assert_failed(tmp_path / "run", script, text)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("setup", ["ppo-async", "continuous-async"])
def test_a_process_that_dies_at_the_start_is_named(setup, faulty, tmp_path, capfd):
    faulty(setup, "death", 0, episode=0)
    script, args = parse(setup, tmp_path / "run")
    text, error = failure(lambda: script.train(args), capfd)
    assert type(error) is RuntimeError
    assert text.startswith("the process of environment 1 died, exit code -9")
    assert not (tmp_path / "run").exists()


# Also for the processes that `start` starts, which import this file
for fault, at in (("observation", 5), ("exception", 5), ("none", 0)):
    kwargs = {"fault": fault, "at": at, "bad_seed": ppo.episode_seed(1, 1, EPISODE_NUMBER)}
    for name, space in (("", gym.spaces.Box(-1, 1, (1,))), ("_discrete", gym.spaces.Discrete(2))):
        kwargs = kwargs | {"action_space": space}
        gym.register(f"Program_{fault}{name}-v0", Faulty, kwargs=kwargs)


@LINUX
@pytest.mark.parametrize(
    ("setup", "env_id", "last"),
    [
        ("ppo-async", "Program_observation_discrete-v0", "an observation is not finite in step 5"),
        ("kl", "Program_exception-v0", "RuntimeError: ZeroDivisionError('physics blew up') in"),
    ],
)
def test_a_fault_ends_the_program(setup, env_id, last, start, tmp_path):
    process = start(setup, f"test_faults_environments:{env_id}")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(rf"{re.escape(last)}.* of environment 1, episode 14 \(seed \d+\)", text)
    assert_failed(tmp_path / "run", SETUPS[setup][0], text)
    assert alive(process.pid) == []


@LINUX
@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGTERM, 60), (signal.SIGKILL, 5)])
def test_no_process_outlives_the_one_that_trains(number, seconds, start, tmp_path):
    """SIGTERM goes to all of them, as a scheduler sends it, SIGKILL to the one alone."""
    process = start("ppo-async", "CartPole-v1 --no-compile --total-timesteps 10000000")
    assert any(line.startswith("SPS: ") for line in process.stdout)
    assert len(alive(process.pid)) == 3
    (os.killpg if number == signal.SIGTERM else os.kill)(process.pid, number)
    if number == signal.SIGTERM:
        rest = process.stdout.read()
        assert f"go on with: python ppo.py --resume {tmp_path / 'run'}" in rest
        assert process.wait(seconds) == 128 + signal.SIGTERM
        assert ppo.load_checkpoint(tmp_path / "run")["iteration"] >= 1
    wait_until(lambda: not alive(process.pid), seconds)
    assert status(tmp_path / "run") == "running"


# --- endless episodes -----------------------------------------------------------------------------

LIMIT = 50  # steps
REMEDY = (
    "Faulty-v0: an episode has not ended after {:,} steps; register the environment with "
    "max_episode_steps, or raise LONGEST_EPISODE"
)


@pytest.mark.parametrize("setup", ["cma", "kl"])
def test_an_endless_episode_stops_training_by_episodes(setup, faulty, tmp_path, monkeypatch, capfd):
    faulty(setup, "endless")
    script, args = parse(setup, tmp_path / "run")
    monkeypatch.setattr(script, "LONGEST_EPISODE", LIMIT)
    text, error = failure(lambda: script.train(args), capfd)
    assert type(error) is TimeoutError
    assert REMEDY.format(LIMIT) in text
    assert_failed(tmp_path / "run", script, text)
    assert LIMIT < Faulty.longest <= LIMIT + 2  # an action is held for 2 steps


def test_an_endless_episode_stops_the_warm_up(faulty, tmp_path, monkeypatch, capfd):
    faulty("kl", "endless", episode=1)
    script, args = parse("kl", tmp_path / "run")
    monkeypatch.setattr(script, "LONGEST_EPISODE", LIMIT)
    text, _ = failure(lambda: script.train(args), capfd)
    assert text == f"--env-id Faulty-v0: {REMEDY.format(LIMIT)}, in the warm-up episodes\n"
    assert Faulty.longest == LIMIT + 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setup", GYMNASIUM)
def test_an_endless_episode_stops_an_evaluation(setup, faulty, tmp_path, monkeypatch, capfd):
    faulty(setup, "none")
    script, args = parse(setup, tmp_path / "run", "--total-timesteps 90")
    script.train(args)
    faulty(setup, "endless", episode=None)
    monkeypatch.setattr(script, "LONGEST_EPISODE", LIMIT)
    args = script.parse_args(["--evaluate", str(tmp_path / "run")])
    text, error = failure(lambda: script.evaluate(args), capfd)
    assert type(error) is TimeoutError
    assert REMEDY.format(LIMIT) in text


@pytest.mark.slow
def test_100_000_steps_look_endless(faulty, tmp_path, capfd):
    faulty("cma", "endless")
    script, args = parse("cma", tmp_path / "run")
    text, _ = failure(lambda: script.train(args), capfd, 120)
    assert REMEDY.format(100_000) in text
    assert Faulty.longest == 100_002


@pytest.mark.parametrize("setup", [name for name in GYMNASIUM if name not in ("cma", "kl")])
def test_rollouts_of_fixed_length_need_no_end(setup, faulty, tmp_path, monkeypatch):
    """Trained in an endless environment, and resumed to the same bits."""
    faulty(setup, "endless", episode=None)
    script, args = parse(setup, tmp_path / "whole")
    monkeypatch.setattr(script, "LONGEST_EPISODE", LIMIT)
    script.train(args)
    whole = script.load_checkpoint(tmp_path / "whole")
    assert (whole["iteration"], whole["global_step"]) == (10, 880)
    assert len(rows(tmp_path / "whole")) == 1  # the header
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["final_return"] is None

    stopping, plain = [], script.update

    def update(*args):
        stopping.append(1)
        if len(stopping) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*args)

    monkeypatch.setattr(script, "update", update)
    script, args = parse(setup, tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        script.train(args)
    assert end.value.code == 128 + signal.SIGTERM
    assert script.load_checkpoint(tmp_path / "run")["iteration"] == 5
    script.train(script.parse_args(["--resume", str(tmp_path / "run")]))
    assert_same(script.load_checkpoint(tmp_path / "run"), whole)
    assert scalars(tmp_path / "run") == scalars(tmp_path / "whole")


# --- learning -------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is `factor` times what it should be."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


DAMAGE = {
    "loss": lambda loss: loss * math.nan,
    "infinite loss": lambda loss: loss + math.inf,  # its gradient is as before
    "gradient": lambda loss: Scaled.apply(loss, math.nan),
    "infinite gradient": lambda loss: Scaled.apply(loss, math.inf),
    "huge gradient": lambda loss: Scaled.apply(loss, 1e30),  # its norm overflows
}
# Of each script: a loss function, how often an iteration calls it, which call in the third is
# damaged, and what is said of it
CLIPPED_LOSS = ("ppo_loss", 4, 1, "grad_norm is not finite in minibatch 1")
LOSSES = {
    "ppo": CLIPPED_LOSS,
    "continuous": CLIPPED_LOSS,
    "atari": CLIPPED_LOSS,
    "cma": ("mean_loss", 5, 1, r"the policy loss is \S+ in minibatch 1, the norm of its"),
    # twice the whole batch and three minibatches, then the whole batch
    "kl": ("policy_loss", 9, 2, r"after pass \d the policy loss is"),
}


class Watch:
    """All parameters of a script's agent, as they were whenever `keep` was called."""

    def __init__(self, script, monkeypatch):
        self.kept: list[torch.Tensor] = []
        plain = script.set_up

        def set_up(*args):
            envs, self.agent, run = plain(*args)
            return envs, self.agent, run

        monkeypatch.setattr(script, "set_up", set_up)
        monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)

    def parameters(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.agent.parameters()).detach().clone()

    def keep(self):
        self.kept.append(self.parameters())


@pytest.fixture
def healthy(faulty, monkeypatch):
    """Environments without a fault for a setup."""

    def give(setup: str):
        monkeypatch.setattr(envpool, "make", Toy if setup == "atari" else envpool.make)
        faulty(setup, "none")

    return give


def assert_stopped(folder: Path, script, text: str, error: BaseException, says: str):
    """In the third iteration, in one line."""
    assert type(error) is FloatingPointError
    assert text.count("\n") == 1
    assert re.match(rf"{folder}: stopped in iteration 3, after step [\d,]+: {says}", text)
    assert text.endswith("; its checkpoint.pt is the last good one: mend the cause and --resume\n")
    assert status(folder) == "failed"
    checkpoint = script.load_checkpoint(folder)
    assert checkpoint["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("setup", LOSSES)
def test_no_step_from_a_bad_minibatch_on(setup, damage, healthy, tmp_path, monkeypatch, capfd):
    name, an_iteration, which, says = LOSSES[setup]
    healthy(setup)
    script, args = parse(setup, tmp_path / "run")
    watch, plain = Watch(script, monkeypatch), getattr(script, name)

    def loss_function(*args):
        watch.keep()
        result = plain(*args)
        if len(watch.kept) != 2 * an_iteration + which + 1:
            return result
        loss, *more = result if isinstance(result, tuple) else (result,)
        loss = DAMAGE[damage](loss)
        if damage == "infinite loss" and name == "ppo_loss":  # of which it is a part
            value_loss, *rest = more[0]
            more = [(value_loss + math.inf, *rest)]
        return (loss, *more) if more else loss

    monkeypatch.setattr(script, name, loss_function)
    text, error = failure(lambda: script.train(args), capfd)
    if damage == "infinite loss":  # of one of Atari's processes; the gradient tells the others
        said = "value_loss, grad_norm" if setup == "atari" else "value_loss"
        says = says.replace("grad_norm", said)
    assert_stopped(tmp_path / "run", script, text, error, says)
    at = 2 * an_iteration + which
    assert len(watch.kept) > at + 1  # more minibatches came
    assert not torch.equal(watch.kept[at - 2], watch.kept[at])  # and it did learn
    assert all(torch.equal(x, watch.kept[at]) for x in [*watch.kept[at:], watch.parameters()])


# Of each script: which call of gae is spoilt, with what, minibatches before those that could tell,
# and what is said
NANS = "value_loss, policy_loss, grad_norm is not finite in minibatch {}"
HUGE = "value_loss, grad_norm is not finite in minibatch {}"
SPOILT = {
    "ppo NaN": (2, math.nan, 0, NANS),
    "ppo huge": (2, 1e30, 0, HUGE),
    "continuous NaN": (2, math.nan, 0, NANS),
    "continuous huge": (2, 1e30, 0, HUGE),
    "atari NaN": (2, math.nan, 0, NANS),
    "atari huge": (2, 1e30, 0, HUGE),
    "cma returns": (4, math.nan, 0, "the value loss is nan in minibatch {}, the norm of its"),
    "cma advantages": (5, math.nan, 0, "the variance loss is nan in minibatch {}, the norm of its"),
    "kl advantages": (4, math.nan, 0, "after pass 0 the policy loss is nan"),
    "kl returns": (5, math.nan, 6, "the value loss is nan in minibatch {}, the norm of its"),
}


def spoil(script, call: int, value: float, monkeypatch, then: Callable):
    """Put a value into the first row of what the given call of gae returns."""
    plain, calls = script.gae, []

    def gae(*args):
        advantages = plain(*args)
        calls.append(1)
        if len(calls) == call + 1:
            advantages[:1] = value
            then()
        return advantages

    monkeypatch.setattr(script, "gae", gae)


@pytest.mark.parametrize("case", SPOILT)
def test_no_step_from_a_bad_advantage_on(case, healthy, tmp_path, monkeypatch, capfd):
    setup, (call, value, before, says) = case.split()[0], SPOILT[case]
    healthy(setup)
    script, args = parse(setup, tmp_path / "run")
    watch, spoilt, bad = Watch(script, monkeypatch), [], []
    spoil(script, call, value, monkeypatch, lambda: spoilt.append(len(watch.kept)))
    name = "descend" if setup in ("cma", "kl") else "ppo_loss"
    plain = getattr(script, name)

    def step(*args):
        seen = args[1] if name == "descend" else torch.stack([args[2].advantages, args[2].returns])
        if not (seen.abs() < 1e20).all():
            bad.append(len(watch.kept))
        watch.keep()
        return plain(*args)

    monkeypatch.setattr(script, name, step)
    text, error = failure(lambda: script.train(args), capfd)
    at = bad[0] if bad else spoilt[0]
    assert_stopped(tmp_path / "run", script, text, error, says.format(at - spoilt[0] - before))
    assert all(torch.equal(x, watch.parameters()) for x in watch.kept[at:])
    assert not torch.equal(watch.kept[0], watch.parameters())


@pytest.mark.slow
def test_no_step_from_a_bad_advantage_on_when_compiled(healthy, tmp_path, monkeypatch, capfd):
    healthy("ppo")
    script, args = parse("ppo", tmp_path / "run", "--compile-from 0")
    watch = Watch(script, monkeypatch)
    spoil(script, 2, math.nan, monkeypatch, lambda: None)
    plain, bad = script.update, []

    def update(agent, *rest):
        compiled = agent.minibatch_step
        if compiled is script.minibatch_step:
            pytest.fail("not compiled")

        def minibatch_step(agent, batch, rows, *rest):
            if batch.returns[rows].isnan().any():
                bad.append(len(watch.kept))
            watch.keep()
            return compiled(agent, batch, rows, *rest)

        monkeypatch.setattr(agent, "minibatch_step", minibatch_step)
        try:
            return plain(agent, *rest)
        finally:
            agent.minibatch_step = compiled

    monkeypatch.setattr(script, "update", update)
    text, error = failure(lambda: script.train(args), capfd, 120)
    says = NANS.format(bad[0] - 8)
    assert_stopped(tmp_path / "run", script, text, error, says)
    assert len(watch.kept) == 12
    assert all(torch.equal(x, watch.parameters()) for x in watch.kept[bad[0] :])
    assert not torch.equal(watch.kept[bad[0] - 1], watch.kept[bad[0]])
