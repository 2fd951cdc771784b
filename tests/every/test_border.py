"""The border of the gymnasium scripts: environments in this process, in workers and
by EnvPool. The same bits with any number of workers; nothing left behind, however a run ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from program import ROOT, assert_same, in_a_fork, rows, run, status, train_until_killed

import ppo
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive

SCRIPTS = {"ppo": ppo, "ppo_continuous_action": ppo_continuous_action}
EACH = pytest.mark.parametrize("name", SCRIPTS)
# Environments that workers find by their module, each with a fault that the environment variable
# FAULT may name; they write down the process that they are in
MODULE = """
import os
from pathlib import Path

import gymnasium as gym
import numpy as np


class Mine(gym.Env):
    observation_space = gym.spaces.Dict(
        {"b": gym.spaces.Box(-1, 1, (2,)), "a": gym.spaces.Discrete(3)}
    )
    made = 0

    def __init__(self, discrete=False, limit=9):
        box = gym.spaces.Box(-2, 2, (2, 1))
        self.action_space = gym.spaces.MultiDiscrete([2, 3]) if discrete else box
        self.limit, self.fault = limit, os.environ.get("FAULT")
        self.here = Path(os.environ["PIDS"], str(os.getpid()))
        self.here.write_text("open")
        Mine.made += 1
        if self.fault == "constructor" and Mine.made == 2:
            raise ValueError("no second one here")

    def observe(self):
        return {"b": self.np_random.uniform(-1, 1, 2).astype(np.float32), "a": self.t % 3}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, self.np_random.integers(1, self.limit)
        if self.fault == "reset":
            raise ZeroDivisionError("in reset")
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        if self.fault == "step" and self.t == 3:
            raise ZeroDivisionError("in step")
        if self.fault == "kill" and self.t == 3:
            os.kill(os.getpid(), 9)
        reward = float(np.sum(action)) + self.np_random.normal()
        return self.observe(), reward, self.t >= self.length, False, {}

    def close(self):
        self.here.write_text("closed")


gym.register("Mine-v0", Mine)
gym.register("MineDiscrete-v0", Mine, kwargs={"discrete": True})
"""
ENV_ID = {"ppo": "my_mine:MineDiscrete-v0", "ppo_continuous_action": "my_mine:Mine-v0"}
SIZES = (
    "--num-envs 5 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-compile --no-cuda "
    "--checkpoint-interval 2"
)


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("border")
    (folder / "my_mine.py").write_text(MODULE)
    return folder


def environ(place: Path, pids: Path, **more: str) -> dict[str, str]:
    pids.mkdir(parents=True, exist_ok=True)
    return os.environ | {"PYTHONPATH": str(place), "PIDS": str(pids)} | more


def command(name: str, flags: str) -> list[str]:
    return [sys.executable, str(ROOT / f"{name}.py"), *flags.split()]


def new(name: str, folder: Path, workers: int, iterations: int = 6) -> list[str]:
    more = f"--total-timesteps {80 * iterations} --env-workers {workers} --run-dir {folder}"
    return command(name, f"--env-id {ENV_ID[name]} {SIZES} {more}")


def same(name: str, folder: Path) -> dict:
    """The checkpoint, but for what tells how many workers there were."""
    content = SCRIPTS[name].load_checkpoint(folder)
    content["args"].env_workers = 0
    return content


def ended(pids: Path, seconds: float = 10.0) -> bool:
    """Wait until all processes are gone that had an environment."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(alive(int(path.name)) for path in pids.iterdir()):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- the same bits --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def whole(place, tmp_path_factory):
    """A run with so many workers; its folder."""
    made = {}

    def get(name: str, workers: int) -> Path:
        if (name, workers) not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{workers}")
            env = environ(place, folder / "pids")
            done = subprocess.run(
                new(name, folder / "run", workers), env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            made[name, workers] = folder / "run"
        return made[name, workers]

    return get


@EACH
@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 5))]
)
def test_the_same_bits_with_any_number_of_workers(name, workers, whole):
    """Unequal shares, Dicts, episodes of one step, several ends in a step."""
    expected, found = whole(name, 0), whole(name, workers)
    assert_same(same(name, found), same(name, expected))
    assert rows(found) == rows(expected)
    assert len(rows(found)) > 50
    pids = list((found.parent / "pids").iterdir())
    assert len(pids) == workers  # and none in the run's own process
    assert all(path.read_text() == "closed" for path in pids)
    assert ended(found.parent / "pids")
    own = list((expected.parent / "pids").iterdir())
    assert [path.read_text() for path in own] == ["closed"]


@pytest.mark.slow
@EACH
@pytest.mark.parametrize(("target", "call"), [("torch.save", 2), ("rollout", 4), ("update", 5)])
def test_killed_and_resumed_with_other_workers(name, target, call, whole, place, tmp_path):
    """By SIGKILL, and by SIGTERM, which saves; then with 3, 0 and 2 workers."""
    before = (
        "import os, signal, sys, torch; sys.path.insert(0, {root!r}); import {name} as script\n"
        "owner = torch if '.' in {target!r} else script\n"
        "plain, calls = getattr(owner, {last!r}), []\n"
        "def spy(*given):\n"
        "    calls.append(1)\n"
        "    if len(calls) == {call}:\n"
        "        os.kill(os.getpid(), {number})\n"
        "    return plain(*given)\n"
        "if __name__ == '__main__':\n"
        "    setattr(owner, {last!r}, spy)\n"
        "    script.train(script.parse_args(sys.argv[1:]))\n"
    )
    folder = tmp_path / "run"
    env = environ(place, tmp_path / "pids")
    given = new(name, folder, 2)[2:]
    for number, workers in ((signal.SIGKILL, 3), (signal.SIGTERM, 0)):
        program = tmp_path / "program.py"
        names = {"root": str(ROOT), "name": name, "target": target, "call": call}
        names |= {"last": target.split(".")[-1], "number": int(number)}
        program.write_text(before.format(**names))
        done = subprocess.run([sys.executable, program, *given], env=env, capture_output=True)
        assert done.returncode == (-9 if number == signal.SIGKILL else 143), done.stderr
        assert ended(tmp_path / "pids")
        call = 1
        more = f"--resume {folder} --env-id {ENV_ID[name]} --env-workers {workers}"
        given = more.split()
    last = command(name, " ".join(given).replace("--env-workers 0", "--env-workers 2"))
    done = subprocess.run(last, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same(same(name, folder), same(name, whole(name, 0)))
    assert rows(folder) == rows(whole(name, 0))


MOMENTS = [  # a function of the script and which of its calls, counted from the start or resuming
    ("rollout", 2), ("torch.save", 2), ("update", 1), ("Run.log_episodes", 3), ("Run.log", 2),
    ("update", 3), ("Run.log_episodes", 9), ("torch.save", 3), ("save", 1), ("rollout", 3),
]  # fmt: skip
WORKERS = [0, 2, 0, 0, 1, 0, 3, 0]  # of the run that is killed; the next one has others
WHOLE = "--num-envs 3 --checkpoint-interval 1 --no-cuda"
FOUR = {  # and the flags of a run of 30 iterations
    ppo: f"{SIZES} --checkpoint-interval 1 --total-timesteps 2400",
    ppo_continuous_action: f"{SIZES} --checkpoint-interval 1 --total-timesteps 2400",
    ppo_cma: f"{WHOLE} --iter-steps 40 --n-updates 3 --minibatch-size 16 --total-timesteps 1500",
    ppo_kl_adaptive: f"{WHOLE} -b 6 --update-epochs 2 --value-epochs 2 -m 3 -n 180",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", FOUR, ids=lambda module: module.__name__)
def test_killed_at_twenty_moments_and_resumed_with_other_workers(
    script, place, tmp_path, monkeypatch
):
    """One run, killed by SIGKILL again and again, ends with the bits of one that was left alone."""
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    (tmp_path / "pids").mkdir()
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)  # which takes 4 s
    name = script.__name__
    env_id = f"--env-id {ENV_ID.get(name, 'my_mine:Mine-v0')}"
    first = f"{env_id} {FOUR[script]} --run-dir"
    left_alone, folder = tmp_path / "alone", tmp_path / "run"
    assert in_a_fork(lambda: script.train(script.parse_args(f"{first} {left_alone}".split()))) == 0
    given = f"{first} {folder}"
    for k, (target, call) in enumerate(2 * MOMENTS):
        argv = f"{given} --env-workers {WORKERS[k % len(WORKERS)]}".split()
        assert train_until_killed(name, target, call, argv) == -signal.SIGKILL
        assert ended(tmp_path / "pids", 30)
        given = f"{env_id} --resume {folder}"
    argv = f"{given} --env-workers 2".split()
    assert in_a_fork(lambda: script.train(script.parse_args(argv))) == 0
    assert ended(tmp_path / "pids", 30)
    found, expected = script.load_checkpoint(folder), script.load_checkpoint(left_alone)
    assert found["args"].env_workers == 2
    found["args"].env_workers = 0
    assert_same(found, expected)
    assert rows(folder) == rows(left_alone)
    assert expected["counters"][1] >= 20


# --- nothing left behind --------------------------------------------------------------------------


@contextlib.contextmanager
def running(place: Path, tmp_path: Path, workers: int = 2, **env: str):
    """A long run with workers, once it has trained; a group of processes of its own."""
    argv = new("ppo_continuous_action", tmp_path / "run", workers, iterations=10_000)
    process = subprocess.Popen(
        argv, env=environ(place, tmp_path / "pids", **env), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            csv = tmp_path / "run" / "episodes.csv"
            if csv.exists() and csv.read_bytes().count(b"\n") > 20:
                break
            time.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    "how",
    ["a worker", *(pytest.param(x, marks=pytest.mark.slow) for x in ("the run", "Ctrl-C"))],
)
def test_what_is_killed_leaves_nothing(how, place, tmp_path):
    with running(place, tmp_path) as process:
        pids = sorted(int(path.name) for path in (tmp_path / "pids").iterdir())
        assert len(pids) == 2
        if how == "the run":
            process.kill()
        elif how == "a worker":
            os.kill(pids[1], signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert ended(tmp_path / "pids")
    if how == "a worker":
        assert process.returncode == 1
        assert err.count("Traceback") == 1
        assert err.rstrip().splitlines()[-1] == (
            "RuntimeError: a process of --env-workers was killed (exit code -9): not enough memory?"
        )
        assert status(tmp_path / "run") == "failed"
    if how == "Ctrl-C":
        assert process.returncode == 130
        assert "Traceback" not in err
        assert "--resume" in out
        assert status(tmp_path / "run") == "running"
    found = ppo_continuous_action.load_checkpoint(tmp_path / "run")
    assert len(found["played"]) == 5  # the last good checkpoint is there


FAULTS = {
    "step": "ZeroDivisionError: in step",
    "reset": "ZeroDivisionError: in reset",
    "constructor": "ValueError('no second one here')",
    "kill": "killed (exit code -9)",
}


@pytest.mark.parametrize(
    "fault",
    ["constructor", *(pytest.param(x, marks=pytest.mark.slow) for x in ("step", "reset", "kill"))],
)
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_fault_in_an_environment_is_told_once_and_leaves_nothing(fault, workers, place, tmp_path):
    env = environ(place, tmp_path / "pids", FAULT=fault)
    argv = new("ppo_continuous_action", tmp_path / "run", workers)
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert ended(tmp_path / "pids")
    if fault == "kill" and workers == 0:
        assert done.returncode == -9
        return
    assert FAULTS[fault] in done.stderr
    assert done.returncode == (2 if fault == "constructor" else 1)
    if fault == "constructor":
        assert done.stderr.count("\n") == 1
    elif fault != "kill":  # what the environment raised, whole, once
        assert done.stderr.count('raise ZeroDivisionError("in') == 1
        assert done.stderr.count("my_mine.py") == 1
    if fault in ("step", "kill"):  # in the third step
        assert status(tmp_path / "run") == "failed"
        assert ppo_continuous_action.load_checkpoint(tmp_path / "run")["counters"][0] == 0
    else:  # no step was taken
        assert not (tmp_path / "run").exists()


def test_a_worker_other_than_the_first_can_refuse(tmp_path):
    """What it says is not lost: at first it was, as only the first worker writes."""
    text = MODULE.replace(
        'if self.fault == "constructor" and Mine.made == 2:',
        "import multiprocessing\n        if multiprocessing.current_process().name.endswith('-2'):",
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "my_mine.py").write_text(text)
    env = environ(tmp_path / "other", tmp_path / "pids")
    argv = new("ppo_continuous_action", tmp_path / "run", 2)
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no second one here" in done.stderr
    assert done.stderr.count("\n") == 1
    assert ended(tmp_path / "pids")


def test_an_environment_that_a_worker_does_not_find(tmp_path):
    """It is registered where the run starts, and in no module."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, gymnasium as gym\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import ppo as script\n"
        "if __name__ == '__main__':\n"
        "    gym.register('Here-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
        "    script.train(script.parse_args(sys.argv[1:]))\n"
    )
    flags = f"--env-id Here-v0 --env-workers 2 --total-timesteps 1024 --run-dir {tmp_path / 'run'}"
    done = run(program, *flags.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "--env-id Here-v0: NameNotFound" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


# --- EnvPool --------------------------------------------------------------------------------------

POOL = "--num-envs 3 --num-steps 16 --num-minibatches 2 --update-epochs 1 --no-compile --no-cuda"


def refused(script, flags: str, capsys) -> str:
    with pytest.raises(SystemExit) as end:
        script.train(script.parse_args(flags.split()))
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_envpool_names_near_ids_and_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    err = refused(ppo_continuous_action, "--env-id envpool:HalfCheeta-v4", capsys)
    assert "HalfCheeta-v4 is not supported" in err and "near ids: ['HalfCheetah-v4'" in err
    err = refused(ppo, "--env-id envpool:CartPoll-v1", capsys)
    assert "near ids: ['CartPole-v1'" in err
    assert "near ids: []" in refused(ppo, "--env-id envpool:", capsys)
    assert "choices: ppo.py" in refused(
        ppo_continuous_action, "--env-id envpool:CartPole-v1", capsys
    )
    assert "boxes: ppo_continuous_action.py" in refused(ppo, "--env-id envpool:Ant-v4", capsys)
    assert "pixels: ppo_pixels.py" in refused(ppo, "--env-id envpool:Pong-v5", capsys)
    argv = '--env-id envpool:Ant-v4 --env-kwargs {"nonsense":1}'
    assert "nonsense" in refused(ppo_continuous_action, argv, capsys)
    monkeypatch.setitem(sys.modules, "envpool", None)
    err = refused(ppo, "--env-id envpool:CartPole-v1", capsys)
    assert err.endswith("pip install envpool\n")
    assert not list(tmp_path.iterdir())


def pool(env_id: str, num_envs: int = 2, script=ppo_continuous_action, start: int = 0):
    args = script.Args(env_id=f"envpool:{env_id}", num_envs=num_envs)
    return script.make_envs(args, num_envs, {"played": [], "counters": (0, start, 0.0, 0)})


def test_a_time_limit_of_envpool_returns_the_true_last_observation():
    """HalfCheetah's step 1000: truncated, its observation a small step from the one before and no
    reset's; the next step ignores its action and pays nothing."""
    envs, rng = pool("HalfCheetah-v4"), np.random.default_rng(0)
    total = np.zeros(2)
    for step in range(1000):
        before = envs.obs.copy()
        rewards, terminated, truncated = envs.step(rng.uniform(-1, 1, (2, 6)))
        total += rewards
        assert not terminated.any() and truncated.all() == (step == 999)
    assert envs.over.all()
    assert np.abs(envs.obs).max() > 0.5  # at rest, as a reset leaves it, 0.3 at most
    assert np.abs(envs.obs[:, :8] - before[:, :8]).max() < 1.0
    assert [(i, length) for i, _, length in envs.ended] == [(0, 1000), (1, 1000)]
    np.testing.assert_allclose([score for _, score, _ in envs.ended], total, rtol=1e-6)
    rewards, terminated, truncated = envs.step(rng.uniform(-1, 1, (2, 6)))
    assert not rewards.any() and not (terminated | truncated | envs.over).any()
    assert np.abs(envs.obs[:, :8]).max() < 0.3 and not envs.ended
    assert not envs.discounted.any()
    envs.close()


def test_dicts_of_envpool_are_flattened_in_the_order_of_the_space():
    import envpool

    envs = pool("CheetahRun-v1")
    plain = envpool.make(
        "CheetahRun-v1", env_type="gymnasium", num_envs=2,
        seed=[ppo.episode_seed(1, i, 0) % 2**31 for i in range(2)],
    )  # fmt: skip
    obs, _ = plain.reset()
    names = list(gym.spaces.flatten_space(plain.observation_space).shape)
    assert envs.obs.shape == (2, *names)
    action = np.full((2, 6), 0.5, np.float32)
    for _ in range(5):
        expected = [gym.spaces.flatten(plain.observation_space, {k: v[i] for k, v in obs.items()})
                    for i in range(2)]  # fmt: skip
        np.testing.assert_allclose(envs.obs, expected, rtol=1e-6)
        envs.step(action)
        obs, *_ = plain.step(action)
    envs.close()
    plain.close()


@pytest.mark.parametrize(
    ("script", "env_id"), [(ppo, "CartPole-v1"), (ppo_continuous_action, "CheetahRun-v1")]
)
def test_envpool_is_trained_on_played_and_resumed(script, env_id, tmp_path, capsys, monkeypatch):
    folder, made = tmp_path / "run", []
    plain = script.PoolEnvs.__init__

    def spy(self, args, num_envs, start):
        plain(self, args, num_envs, start)
        made.append((num_envs, start, self.obs.copy()))

    monkeypatch.setattr(script.PoolEnvs, "__init__", spy)
    monkeypatch.setattr(gym, "make", None)  # not a gymnasium environment of that name
    flags = f"--env-id envpool:{env_id} {POOL} --total-timesteps 96 --env-workers 2"
    script.train(script.parse_args([*flags.split(), "--run-dir", str(folder)]))
    assert script.load_checkpoint(folder)["args"].env_id == f"envpool:{env_id}"
    script.train(script.parse_args(f"--resume {folder} --total-timesteps 192".split()))
    assert script.load_checkpoint(folder)["counters"][1] == 4
    returns = script.evaluate(script.parse_args(f"--evaluate {folder} --eval-episodes 1".split()))
    assert np.isfinite(returns).all() and len(returns) == 1
    by_size = [(n, start) for n, start, _ in made]
    assert [x for x in by_size if x[0] == 3] == [(3, 0), (3, 2)]
    first, resumed = (obs for n, _, obs in made if n == 3)
    assert not np.isclose(first, resumed).all(axis=1).any()  # new episodes, with other seeds
    assert len({tuple(row) for row in np.concatenate([first, resumed])}) == 6
