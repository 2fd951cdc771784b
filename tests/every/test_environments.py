"""Environments: in worker processes, with faults, endless, closed in the end, and those that people
bring, which do otherwise than gymnasium's own."""

import importlib
import itertools
import multiprocessing
import os
import signal
from pathlib import Path

import agents_toy
import episodes_toy
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from program import (
    Clockwork,
    Levels,
    Toy,
    assert_same,
    in_a_fork,
    rows,
    scalars,
    status,
    train_until_killed,
)
from scripts import (
    EVERY,
    GYMNASIUM,
    LENGTHS,
    PARALLEL,
    POOLS,
    SMALL,
    STEPS,
    WHOLE,
    Duel,
    ended,
    evaluate,
    go_on,
    lengths,
    quick_workers,
    refused,
    train,
)

pytestmark = [
    pytest.mark.usefixtures("small"),
    pytest.mark.filterwarnings("ignore"),  # of what is not finite, and of gymnasium's
]
SEVERAL = pytest.mark.parametrize("script", PARALLEL)  # environments, each of its own
VECTORS = ["ppo", "ppo_continuous_action", *WHOLE]  # whose observations are vectors
BOXES = [  # ppo_pettingzoo.py has none of whole numbers
    (script, name)
    for script in PARALLEL
    for name, box in episodes_toy.BOXES.items()
    if script != "ppo" and (script != "ppo_pettingzoo" or box.dtype.kind == "f")
]


def plain(checkpoint: dict) -> dict:
    """But for how it was run."""
    how = {"env_workers": 0, "env_kwargs": "", "total_timesteps": 0}
    return checkpoint | {"args": vars(checkpoint["args"]) | how}


def assert_same_run(script: str, folder: Path, other: Path):
    load = importlib.import_module(script).load_checkpoint
    assert_same(plain(load(folder)), plain(load(other)))
    assert rows(folder) == rows(other)
    assert scalars(folder) == scalars(other)
    assert status(folder) == status(other) == "finished"


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture
def pids(tmp_path, monkeypatch) -> Path:
    """A folder with a file for each process that has environments."""
    quick_workers(monkeypatch)
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


@SEVERAL
@pytest.mark.parametrize("counts", [[2], pytest.param([1, 3], marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_bits(script, counts, pids, tmp_path):
    """Unequal shares, Dicts, episodes of one step, several ends in a step."""
    nested = script != "ppo_pettingzoo"
    train(script, tmp_path / "0", lengths(script, here=str(pids), nested=nested), 6)
    assert len(rows(tmp_path / "0")) > 25
    (own,) = pids.iterdir()
    assert own.read_text() == "closed"
    own.unlink()
    for count in counts:
        flags = lengths(script, f"--env-workers {count}", here=str(pids), nested=nested)
        train(script, tmp_path / str(count), flags, 6)
        assert_same_run(script, tmp_path / str(count), tmp_path / "0")
        assert [path.read_text() for path in pids.iterdir()] == ["closed"] * count
        assert ended(pids)
        for path in pids.iterdir():
            path.unlink()


@SEVERAL
def test_a_run_that_is_killed_leaves_no_worker(script, pids, tmp_path):
    """It goes on in this process to the same bits."""
    flags = lengths(script, here=str(pids))
    train(script, tmp_path / "whole", flags, 6)
    (own,) = pids.iterdir()
    own.unlink()
    argv = f"{SMALL[script]} {flags} --env-workers 2 --run-dir {tmp_path / 'run'}".split()
    argv += ["--total-timesteps", str(6 * STEPS[script])]
    assert train_until_killed(script, "update", 4, argv) == -signal.SIGKILL
    assert len(list(pids.iterdir())) == 2
    assert ended(pids)
    go_on(script, tmp_path / "run", f"--env-id {LENGTHS} --env-workers 0", 6)
    assert_same_run(script, tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("script", ["ppo", pytest.param("ppo_cma", marks=pytest.mark.slow)])
def test_ctrl_c_with_workers_saves_and_leaves_nothing(script, tmp_path, capfd, monkeypatch):
    """It reaches every process of the terminal's group: the run decides, the workers ignore it.
    These are as a user's, from a new interpreter."""
    module, pids, folder = importlib.import_module(script), tmp_path / "pids", tmp_path / "run"
    pids.mkdir()
    flags = lengths(script, here=str(pids))
    train(script, tmp_path / "whole", flags, 6)
    (own,) = pids.iterdir()
    own.unlink()
    update, calls = module.update, []  # of this process; the fork has its own

    def interrupted(*given, **more):
        calls.append(1)
        if len(calls) == 3:
            os.killpg(0, signal.SIGINT)
        return update(*given, **more)

    def train_in_a_group():
        os.setpgrp()
        module.update = interrupted
        train(script, folder, f"{flags} --env-workers 2", 6)

    capfd.readouterr()
    assert in_a_fork(train_in_a_group) == 130
    assert ended(pids)
    said = capfd.readouterr()
    assert "stopping after this iteration" in said.err
    assert "Traceback" not in said.out + said.err
    assert f"--resume {folder}" in said.out
    assert module.load_checkpoint(folder)["counters"][1] == 3
    assert status(folder) == "running"
    go_on(script, folder, f"--env-id {LENGTHS} --env-workers 0", 6)
    assert_same_run(script, folder, tmp_path / "whole")


FAULTS = {
    "step": (RuntimeError, "ZeroDivisionError: boom in step"),
    "reset": (RuntimeError, "ZeroDivisionError: boom in reset"),
    "death": (RuntimeError, "a process of --env-workers was killed (exit code -9): not enough"),
    "constructor": (SystemExit, "boom in constructor"),
    "second": (SystemExit, "boom in second"),
}


@SEVERAL
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_worker_is_told_once_and_leaves_nothing(
    script, fault, pids, tmp_path, capfd, monkeypatch
):
    flags = lengths(script, "--env-workers 2", here=str(pids), fault=fault)
    monkeypatch.setattr(multiprocessing.process, "_process_counter", itertools.count(1))
    if fault in ("step", "reset", "death"):
        with pytest.raises(RuntimeError) as error:
            train(script, tmp_path / "run", flags)
        kind, says = FAULTS[fault]
        text = str(error.value)
        assert text.count(says) == 1
        assert fault == "death" or text.count('self.strike("') == 1  # the environment's line
        assert "Traceback" not in capfd.readouterr().err
        if script == "ppo_kl_adaptive":  # in its warm-up, which counts for nothing
            assert not (tmp_path / "run").exists()
        else:
            assert status(tmp_path / "run") == "failed"
    else:
        refused(capfd, FAULTS[fault][1], train, script, tmp_path / "run", flags)
        assert not (tmp_path / "run").exists()
    assert ended(pids)


def test_an_environment_that_a_worker_does_not_find(tmp_path, capfd, monkeypatch):
    """It is registered where the run starts, and in no module."""
    quick_workers(monkeypatch)
    spec = gym.envs.registration.EnvSpec(
        "Here-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv"
    )
    monkeypatch.setitem(gym.registry, "Here-v0", spec)
    flags = "--env-id Here-v0 --env-workers 2"
    refused(capfd, "--env-id Here-v0: NameNotFound", train, "ppo", tmp_path / "run", flags)
    assert not (tmp_path / "run").exists()


# --- faults ---------------------------------------------------------------------------------------


def owner(script: str) -> tuple[type, str]:
    """A script's small environment, and its method that makes a step."""
    if script in GYMNASIUM:
        return Clockwork, "step"
    if script == "ppo_pettingzoo":
        return agents_toy.Watch, "step"
    if script == "ppo_pettingzoo_ma_atari":
        return Duel, "act"
    if script == "ppo_continuous_action_warp":
        return importlib.import_module(script).Pendulum, "step"
    return (Levels if script == "ppo_procgen" else Toy), "step"


def times_nan(x):
    return {name: y * np.nan for name, y in x.items()} if isinstance(x, dict) else x * np.nan


def spoilt(result, fault: str):
    """What a step gives, with an observation or a reward that is no number."""
    if fault == "an exception":
        raise ZeroDivisionError("physics blew up")
    if isinstance(result, np.ndarray):  # rewards alone
        return times_nan(result)
    obs, rewards, *rest = result
    if fault == "observations":
        return times_nan(obs), rewards, *rest
    if isinstance(rest[-1], dict) and "reward" in rest[-1]:  # EnvPool's raw ones
        rest[-1] |= {"reward": times_nan(rest[-1]["reward"])}
    return obs, times_nan(rewards), *rest


@pytest.fixture(scope="module")
def wholes(tmp_path_factory) -> dict[str, Path]:
    """Runs without a fault, by script."""
    return {}


@EVERY
@pytest.mark.parametrize("fault", ["an exception", "observations", "rewards"])
def test_a_fault_ends_the_run_which_goes_on_when_it_is_mended(
    script, fault, wholes, tmp_path, tmp_path_factory, monkeypatch
):
    """In the fourth iteration, of which nothing is saved."""
    if fault == "observations" and script in (*POOLS, "ppo_pettingzoo_ma_atari"):
        pytest.skip("of bytes")
    module, folder = importlib.import_module(script), tmp_path / "run"
    if script not in wholes:
        wholes[script] = tmp_path_factory.mktemp(script) / "run"
        train(script, wholes[script], iterations=6)
    logged, steps = [], []
    log = module.Run.log
    (kind, name) = owner(script)
    step = getattr(kind, name)

    def faulty(env, action):
        result = step(env, action)
        steps.extend([1] if len(logged) == 3 else [])
        return spoilt(result, fault) if len(steps) >= 5 else result

    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "log", lambda *given: logged.append(1) or log(*given))
        patch.setattr(kind, name, faulty)
        errors = {"an exception": (ZeroDivisionError, "physics blew up")}
        says = rf"iteration 3: ({fault}|vector|charts/mean_episodic_return) is not finite"
        error, match = errors.get(fault, (FloatingPointError, says))
        with pytest.raises(error, match=match):
            train(script, folder, iterations=6)
    assert status(folder) == "failed"
    checkpoint = module.load_checkpoint(folder)
    assert checkpoint["counters"][1] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())
    final = go_on(script, folder, iterations=6)
    assert all(x.isfinite().all() for x in final["agent"].values())
    if script not in POOLS:  # whose games are new ones
        assert_same_run(script, folder, wholes[script])


@pytest.mark.parametrize("script", PARALLEL)
def test_an_endless_episode(script, tmp_path, monkeypatch):
    """Rollouts of fixed length need no end, and are resumed to the same bits; those of whole
    episodes stop and say so."""
    if script in WHOLE:
        step = Clockwork.step
        never = lambda env, action: (*step(env, action)[:2], env.episode == -1, False, {})  # noqa: E731
        monkeypatch.setattr(Clockwork, "step", never)
        with pytest.raises(TimeoutError, match="max_episode_steps"):
            train(script, tmp_path / "run")
        return
    flags = lengths(script, "--num-envs 2", longest=10**6)
    train(script, tmp_path / "whole", flags, 6)
    assert len(rows(tmp_path / "whole")) == 1  # the header
    argv = f"{SMALL[script]} {flags} --run-dir {tmp_path / 'run'}".split()
    argv += ["--total-timesteps", str(6 * STEPS[script])]
    assert train_until_killed(script, "update", 4, argv) == -signal.SIGKILL
    go_on(script, tmp_path / "run", f"--env-id {LENGTHS}", 6)
    assert_same_run(script, tmp_path / "run", tmp_path / "whole")


@EVERY
@pytest.mark.parametrize("how", ["finished", "failed", "refused"])
def test_environments_are_closed_however_a_run_ends(script, how, tmp_path, monkeypatch):
    module, opened, closed = importlib.import_module(script), [], []
    kind, _ = owner(script)
    init, close = kind.__init__, kind.close

    def noted(env, *given, **more):
        opened.append(env)
        init(env, *given, **more)

    monkeypatch.setattr(kind, "__init__", noted)
    monkeypatch.setattr(kind, "close", lambda env: closed.append(env) or close(env))
    if how == "failed":
        monkeypatch.setattr(module, "update", None)
        with pytest.raises(TypeError):
            train(script, tmp_path / "run")
    else:
        train(script, tmp_path / "run")
        evaluate(script, tmp_path / "run", "--eval-episodes 1")
    if how == "refused":
        with pytest.raises(SystemExit):
            train(script, tmp_path / "run")
    assert opened
    assert {id(env) for env in closed} == {id(env) for env in opened}


class Careful(gym.Env):
    """An environment that is counted: what can't begin, and what can't end."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    open: list = []  # noqa: RUF012

    def __init__(self, fault: str, actions: str, env_id: int = 0):
        self.open.append(self)
        if fault == "the second" and len(self.open) == 2:
            self.open.remove(self)
            raise OSError("the port is in use")
        if fault == "a space":
            self.observation_space = spaces.Text(5)
        self.fault = fault
        self.action_space = spaces.Discrete(2) if actions == "choices" else spaces.Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        if self.fault == "a reset":
            raise OSError("no licence")
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 5, False, {}

    def close(self):
        self.open.remove(self)
        if self.fault == "closing":
            raise OSError("was closed before")


@pytest.mark.parametrize("script", PARALLEL)
@pytest.mark.parametrize("fault", ["the second", "a space", "a reset", "closing"])
def test_all_environments_are_closed_whatever_one_does(script, fault, tmp_path, monkeypatch, capfd):
    """Processes of theirs would keep the program from ending."""
    monkeypatch.setattr(Careful, "open", [])
    spec = gym.envs.registration.EnvSpec("Careful-v0", entry_point=Careful)
    monkeypatch.setitem(gym.registry, "Careful-v0", spec)
    actions = "choices" if script == "ppo" else "box"
    kwargs = f'{{"fault":"{fault}","actions":"{actions}","env_id":1}}'.replace(" ", "\\u0020")
    given = train, script, tmp_path / "run", f"--env-id Careful-v0 --env-kwargs {kwargs}"
    if fault == "closing":
        train(*given[1:])
        assert status(tmp_path / "run") == "finished"
        assert "closing Careful-v0: OSError('was closed before')" in capfd.readouterr().err
    elif fault == "a reset":
        with pytest.raises(OSError, match="no licence"):
            train(*given[1:])
    else:
        images = script in ("ppo_pixels", "ppo_lstm")
        says = (
            "can be learned from" if images else "a vector is" if "zoo" in script else "no vector"
        )
        refused(capfd, "the port is in use" if fault == "the second" else says, *given)
    assert Careful.open == []


# --- chance ---------------------------------------------------------------------------------------


def careless(script: str, often: bool = False) -> str:
    actions = "choices" if script == "ppo" else "box"
    kwargs = f'{{"often":{str(often).lower()},"actions":"{actions}"}}'
    return f"--env-id episodes_toy:Careless-v0 --env-kwargs {kwargs}"


@pytest.mark.parametrize("script", PARALLEL)
def test_chance_from_np_random_is_seeded(script, tmp_path):
    """At the same command the same episodes, whatever was drawn before."""
    np.random.seed(5)
    train(script, tmp_path / "a", careless(script, often=True), 3)
    train(script, tmp_path / "b", careless(script, often=True), 3)
    first = rows(tmp_path / "a")
    assert_same_run(script, tmp_path / "a", tmp_path / "b")
    assert len({value for _, value, _ in first}) == len(first) > 4  # each has its own task
    train(script, tmp_path / "c", f"{careless(script)} --seed 2", 3)
    assert not {value for _, value, _ in rows(tmp_path / "c")[1:]} & {
        value for _, value, _ in first
    }


@pytest.mark.parametrize("script", PARALLEL)
def test_a_resumed_run_has_the_environments_it_began_with(script, tmp_path, monkeypatch):
    """Also what their constructors drew, and the task of an episode that was cut in two; in
    workers, too."""
    quick_workers(monkeypatch)
    fields = vars(importlib.import_module(script).Args())
    anneal = " ".join(f"--no-{x}".replace("_", "-") for x in fields if x.startswith("anneal"))
    train(script, tmp_path / "whole", f"{careless(script)} {anneal}", 4)
    train(script, tmp_path / "cut", f"{careless(script)} {anneal} --env-workers 2", 2)
    np.random.seed(5)
    go_on(script, tmp_path / "cut", "--env-id episodes_toy:Careless-v0 --env-workers 0", 4)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


@SEVERAL
def test_no_two_episodes_start_alike(script, tmp_path, monkeypatch):
    seeds, reset = [], episodes_toy.Lengths.reset

    def spy(env, seed=None, options=None):
        seeds.append(seed)
        return reset(env, seed, options)

    monkeypatch.setattr(episodes_toy.Lengths, "reset", spy)
    for seed in (1, 2, 3):
        train(script, tmp_path / str(seed), lengths(script, f"--seed {seed}"), 4)
    assert len(set(seeds)) == len(seeds) > 60


# --- what is odd, and what can't be trained -------------------------------------------------------


class Plain(gym.Env):
    """Episodes of 8 steps that pay what the action says."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(size=2)
        return self.obs, {}

    def step(self, action):
        self.obs = self.obs + np.array([0.1, 1.0])
        return self.obs, float(np.sum(action)), self.obs[1] > 8, False, {}


class RewardOfShape1(Plain):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward]), *rest


class IntegerFlags(Plain):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, int(terminated), np.int64(truncated), info


class OneArray(Plain):
    """The observations are one array, which is overwritten."""

    array = None

    def observe(self, obs):
        self.array = np.zeros(2) if self.array is None else self.array
        self.array[:] = obs
        return self.array

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return self.observe(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self.observe(obs), *rest


class WritesIntoItsAction(Plain):
    def step(self, action):
        result = super().step(action)
        if np.ndim(action):
            action[:] = np.nan
        return result


class SeedsTorch(Plain):
    def __init__(self, *given):
        super().__init__(*given)
        torch.manual_seed(5)


class SeveralRewards(Plain):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward, 1.0]), *rest


class ListOfRewards(Plain):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, [reward, 1.0], *rest


class SeveralFlags(Plain):
    def step(self, action):
        obs, reward, _, *rest = super().step(action)
        return obs, reward, np.array([True, False]), *rest


class NoReward(Plain):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, None, *rest


class FlagsOfShape1(Plain):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, np.array([terminated]), None, info


class Tensors(Plain):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return torch.tensor(obs), torch.tensor(reward, dtype=torch.float64), *rest


class Smaller(Plain):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs[:1], *rest


class Silent(Plain):
    def __init__(self, *given, **more):
        raise AssertionError


@pytest.fixture
def registered(monkeypatch):
    """Register an environment; the flag that names it."""

    def register(script: str, kind, action_space=None) -> str:
        usual = spaces.Discrete(2) if script == "ppo" else spaces.Box(-1, 1, (1,), np.float32)
        spec = gym.envs.registration.EnvSpec(
            "Odd-v0", entry_point=lambda **_: kind(action_space or usual)
        )
        monkeypatch.setitem(gym.registry, "Odd-v0", spec)
        return "--env-id Odd-v0"

    return register


ODD = [
    RewardOfShape1,
    IntegerFlags,
    FlagsOfShape1,
    Tensors,
    OneArray,
    WritesIntoItsAction,
    SeedsTorch,
]


@SEVERAL
def test_what_is_odd_does_not_matter(script, registered, tmp_path):
    train(script, tmp_path / "plain", registered(script, Plain), 3)
    assert len(rows(tmp_path / "plain")) > 9
    for kind in ODD:
        train(script, tmp_path / kind.__name__, registered(script, kind), 3)
        assert_same_run(script, tmp_path / kind.__name__, tmp_path / "plain")


@SEVERAL
def test_networks_differ_with_the_seed_even_if_the_environment_seeds_torch(
    script, registered, tmp_path
):
    flags = registered(script, SeedsTorch)
    one, two = (train(script, tmp_path / s, f"{flags} --seed {s}")["agent"] for s in "12")
    weights = [name for name, x in one.items() if x.dim() > 1]
    assert weights and not any(torch.equal(one[name], two[name]) for name in weights)


ONE = r"reward.*: one of each is needed \(several rewards: a wrapper that weighs them"
WRONG = {
    SeveralRewards: ONE,
    ListOfRewards: ONE,
    NoReward: ONE,
    SeveralFlags: ONE,
    Smaller: r"cannot reshape array of size 1 into shape \(2,\)",  # no broadcast
}


@SEVERAL
@pytest.mark.parametrize("kind", WRONG)
def test_several_numbers_for_one_are_named(script, kind, registered, tmp_path):
    says = "rewards=.*: one for each agent is needed" if WRONG[kind] == ONE else WRONG[kind]
    if script == "ppo_pettingzoo" and kind is SeveralFlags:
        pytest.skip("each agent has its own")
    with pytest.raises(ValueError, match=says if script == "ppo_pettingzoo" else WRONG[kind]):
        train(script, tmp_path / "run", registered(script, kind))
    assert not (tmp_path / "run").exists()


@SEVERAL
def test_a_constructor_without_a_word_is_one_line(script, registered, tmp_path, capfd):
    flags = registered(script, Silent)
    said = refused(capfd, "AssertionError()", train, script, tmp_path / "run", flags)
    assert "test_environments.py, line" in said
    assert not (tmp_path / "run").exists()


class Mission(spaces.Space):
    """As MiniGrid's missions: what gymnasium asks of a space is not there."""


VECTOR = spaces.Box(-1, 1, (3,))
NO_VECTORS = {
    "Dict": spaces.Dict({"screen": spaces.Box(0, 255, (20, 32, 3), np.uint8), "x": VECTOR}),
    "nested": spaces.Tuple([VECTOR, spaces.Dict({"x": spaces.Box(0, 255, (8, 8), np.uint8)})]),
    "floats": spaces.Box(-1, 1, (240, 320, 3)),  # too many of them
    "text": spaces.Dict({"mission": spaces.Text(10), "x": VECTOR}),
    "sequence": spaces.Sequence(VECTOR),
    "its own": spaces.Dict({"mission": Mission(), "x": VECTOR}),
    "an empty Dict": spaces.Dict({}),
    "empty parts": spaces.Dict({"x": spaces.Tuple([]), "y": spaces.Dict({})}),
    "no number": spaces.Box(-1, 1, (0,)),
}


@pytest.mark.parametrize("script", VECTORS)
@pytest.mark.parametrize("space", NO_VECTORS)
def test_what_is_no_vector_is_refused(script, space, registered, tmp_path, capfd):
    kind = type("Env", (Plain,), {"observation_space": NO_VECTORS[space]})
    says = "observations are no vector (MiniGrid: a Flat wrapper); pixels: ppo_pixels.py"
    refused(capfd, says, train, script, tmp_path / "run", registered(script, kind))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("script", "actions"), BOXES)
def test_boxes_of_any_type_and_shape(script, actions, tmp_path, monkeypatch):
    """The environment asserts shape and type; whole numbers are in the box, of any script."""
    step, taken = episodes_toy.Lengths.step, []
    box = episodes_toy.BOXES[actions]

    def spy(env, action):
        taken.append(box.contains(action))
        return step(env, action)

    monkeypatch.setattr(episodes_toy.Lengths, "step", spy)
    wide = "--log-std-init 1" if script == "ppo_continuous_action" else ""
    train(script, tmp_path / "run", lengths(script, wide, actions=actions))
    assert all(taken) or (script == "ppo_kl_adaptive" and box.dtype.kind == "f")
    assert len(evaluate(script, tmp_path / "run", f"--env-id {LENGTHS} --eval-episodes 2")) == 2
    if script in VECTORS:
        agent, _ = importlib.import_module(script).load(tmp_path / "run")
        obs = np.zeros((5, 3), np.float32)
        assert agent.act(obs).shape == agent.act(obs, agent.noise(5)).shape == (5, *box.shape)
        action, logprob, *_ = agent.get_action_and_value(torch.zeros(5, 3))
        assert (action.shape, logprob.shape) == ((5, int(np.prod(box.shape))), (5,))


# --- masks ----------------------------------------------------------------------------------------

MASKED = ["ppo", "ppo_pixels", "ppo_lstm", "ppo_pettingzoo"]
MASKS = spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(3)})


class Masked(gym.Env):
    """Three choices, of which each mask of `masks` in turn allows some."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Discrete(3)

    def __init__(self, masks=((0, 1, 0),), action_space=None):
        self.masks = masks
        self.action_space = action_space or self.action_space
        self.taken = set()

    def info(self):
        mask = self.masks[self.t % len(self.masks)]
        return {} if mask is None else {"action_mask": np.array(mask)}

    def reset(self, seed=None, options=None):
        self.t = 0
        return np.ones(1, np.float32), self.info()

    def step(self, action):
        self.t += 1
        self.taken.add(np.ravel(action)[0].item())
        return np.ones(1, np.float32), 1.0, self.t == 5, False, self.info()


class InFront(gym.Wrapper):
    """Its Dict has a mask, which the environment's own observation has not."""

    observation_space = MASKS

    def shown(self):
        return {"observation": np.zeros(3, np.float32), "action_mask": np.array([0, 1, 0], np.int8)}

    def reset(self, **more):
        self.env.reset(**more)
        return self.shown(), {}

    def step(self, action):
        _, *rest, _ = self.env.step(action)
        return self.shown(), *rest, {}


class Behind(InFront):
    """Its Dict has one more part before those of the environment's own."""

    observation_space = spaces.Dict({"a": spaces.Box(0, 1, (4,)), **MASKS.spaces})

    def shown(self):
        return {"a": np.zeros(4, np.float32), **super().shown()}


@pytest.fixture
def masked(monkeypatch):
    """Register what makes environments; the flag that names it."""

    def register(make) -> str:
        spec = gym.envs.registration.EnvSpec("Masked-v0", entry_point=make)
        monkeypatch.setitem(gym.registry, "Masked-v0", spec)
        return "--env-id Masked-v0"

    return register


@pytest.mark.parametrize("script", MASKED)
@pytest.mark.parametrize("wrapped", [InFront, lambda env: Behind(InFront(env))])
def test_a_mask_of_a_wrapper_is_a_mask(script, wrapped, masked, tmp_path):
    made = []

    def make():
        made.append(Masked([None]))
        return wrapped(made[-1])

    train(script, tmp_path / "run", masked(make))
    assert set().union(*[env.taken for env in made]) == {1}


@pytest.mark.parametrize("script", MASKED[:-1])
@pytest.mark.parametrize("masks", [((0, 1, 0), None), (None, (0, 1, 0))])
def test_a_mask_that_comes_and_goes_is_named(script, masks, masked, tmp_path):
    with pytest.raises(ValueError, match="an action mask is needed in every observation, or in"):
        train(script, tmp_path / "run", masked(lambda: Masked(masks)))


def test_masks_of_agents_are_of_numbers_above_zero(masked, tmp_path):
    """As those of the other scripts, and no branch of choices may be without one."""
    made = []
    for mask in ((-1, 1, -1), (np.nan, 0.5, -np.inf)):
        made.append(Masked([mask]))
        train("ppo_pettingzoo", tmp_path / str(len(made)), masked(lambda: made[-1]))
        assert made[-1].taken == {1}
    branch = Masked([(0, 0, 1, 1)], spaces.MultiDiscrete([2, 2]))
    with pytest.raises(ValueError, match=r"the action_mask \[0 0 1 1\] of agent_0 leaves a branch"):
        train("ppo_pettingzoo", tmp_path / "branch", masked(lambda: branch))
