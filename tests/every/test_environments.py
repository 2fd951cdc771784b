"""Each script's environments: spaces of every kind, masks, chance, EnvPool's vectors, wrong shapes.
Rows of rollouts, ends of episodes and their seeds are in algorithms/test_acting.py."""

import contextlib
import importlib
import os
import re
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
import toys
from common import make
from gymnasium import spaces
from program import Toy, assert_same, returns
from scripts import GYMNASIUM, PARALLEL, SMALL, WHOLE, evaluate, parse, refused, resume, train

VECTORS = ["ppo", "ppo_continuous_action", *WHOLE]  # whose observations are vectors
CHOICES = ["ppo", "ppo_pixels", "ppo_lstm"]
EACH = pytest.mark.parametrize("script", GYMNASIUM)
BOXES = ["whole", "byte", "half", "double", "number", "tenth", "far", "bool"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("ppo_cma.pretrain_policy", lambda *_: None)


@pytest.fixture
def registered(monkeypatch):
    """Register what makes an environment; the flag that names it."""

    def register(make) -> str:
        spec = gym.envs.registration.EnvSpec("Own-v0", entry_point=lambda **_: make())
        monkeypatch.setitem(gym.registry, "Own-v0", spec)
        return "--env-id Own-v0"

    return register


def usual(script: str) -> gym.Space:
    return spaces.Discrete(3) if script == "ppo" else toys.BOX


# --- actions and observations ---------------------------------------------------------------------
ACTIONS = [(script, name) for script in GYMNASIUM[1:] for name in BOXES]
ACTIONS += [(script, name) for script in CHOICES for name in ("choice", "choices", "bits")]


@pytest.mark.parametrize(("script", "actions"), ACTIONS)
def test_actions_of_any_type_and_shape(script, actions, tmp_path, monkeypatch):
    """The environment asserts shape and type; they are in the space, at its edges, too."""
    space, taken = toys.SPACES[actions], []
    step = toys.Walk.step
    monkeypatch.setattr(toys.Walk, "step", lambda env, a: taken.append(a) or step(env, a))
    flags = f'--env-id toys:Walk-v0 --env-kwargs {{"actions":"{actions}"}}'
    train(script, tmp_path / "run", flags, 4)
    count = len(taken)
    original = script == "ppo_kl_adaptive" and space.dtype.kind == "f"  # does not clip
    assert original or all(space.contains(np.asarray(a)) for a in taken)
    assert len(np.unique(np.array([np.ravel(a) for a in taken]))) > 1
    assert len(evaluate(script, tmp_path / "run", f"{flags} --eval-episodes 2")) == 2
    assert len(taken) > count
    agent, _ = importlib.import_module(script).load(tmp_path / "run")
    if script in VECTORS:
        obs = np.zeros((5, 3), np.float32)
        assert agent.act(obs).shape == agent.act(obs, agent.noise(5)).shape == (5, *space.shape)


def test_numbers_of_any_size_are_compared_in_their_own_unit():
    """The means of ppo_kl_adaptive.py, which scales nothing, may be a million."""
    script = importlib.import_module("ppo_kl_adaptive")
    agent = script.Agent(toys.Walk(), script.Args())
    torch.nn.init.normal_(agent.actor[-1].weight, std=1e6)
    obs, time = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), np.zeros(8)
    actor = script.numpy_actor(agent)
    script.check_actor(agent, actor, obs, time)
    with pytest.raises(RuntimeError, match="another policy"):
        script.check_actor(agent, lambda *given: 1.1 * actor(*given), obs, time)


@pytest.mark.parametrize("script", GYMNASIUM[1:])
def test_an_environment_may_change_its_actions(script, tmp_path, monkeypatch):
    """What is repeated is what was chosen, and so is what is learned."""
    module, got, learned = importlib.import_module(script), [], []
    step, update = toys.Walk.step, module.update

    def rough(env, action):
        got.append(np.array(action))
        result = step(env, action)
        action[...] = 0
        return result

    monkeypatch.setattr(toys.Walk, "step", rough)
    monkeypatch.setattr(module, "update", lambda *x: learned.append(x[1].actions) or update(*x))
    repeat = "--action-repeat 2" if hasattr(module.Args, "action_repeat") else ""
    train(script, tmp_path / "run", repeat)
    first = np.asarray(learned[0])  # only the row after an episode's end may have no action
    assert all(map(np.any, got)) and np.count_nonzero(first) > first.size / 2


class Seer(gym.Env):
    """Episodes of 3 steps, with observations of the space and all that was observed."""

    made = []  # noqa: RUF012

    def __init__(self, space: gym.Space, actions: gym.Space, spoil=lambda obs: obs, last=3):
        self.observation_space, self.action_space, self.seen = space, actions, []
        self.spoil, self.last = spoil, last
        Seer.made.append(self)

    def look(self):
        self.seen.append(self.observation_space.sample())
        return self.spoil(self.seen[-1])

    def reset(self, seed=None, options=None):
        self.observation_space.seed(seed)
        self.t = 0
        return self.look(), None  # as some do

    def step(self, action):
        self.t += 1
        return self.look(), 1.0, self.t == self.last, False, None


VECTOR = spaces.Box(-1, 1, (3,))
SEEN = {
    "dict": spaces.Dict({"b": spaces.Box(-1, 1, (2, 2)), "a": spaces.Discrete(3, start=1)}),
    "tuple": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
    "nested": spaces.Dict({"x": VECTOR, "y": spaces.Tuple([VECTOR, spaces.Discrete(2)])}),
    "table": spaces.Box(-1, 1, (2, 3), np.float64),
    "discrete": spaces.Discrete(4),
    "board": spaces.Box(0, 255, (4, 4), np.uint8),
    "tetris": spaces.Box(0, 255, (20, 10), np.uint8),
    "bools": spaces.Box(0, 1, (20, 20, 3), np.bool_),
}


@EACH
@pytest.mark.parametrize("name", SEEN)
def test_observations_of_any_space(script, name, registered, tmp_path):
    """Vectors are those of gymnasium's flatten."""
    module = importlib.import_module(script)
    flags = registered(lambda: Seer(SEEN[name], usual(script)))
    train(script, tmp_path / "run", flags)
    assert len(evaluate(script, tmp_path / "run", f"{flags} --eval-episodes 2")) == 2
    if script in VECTORS:
        with contextlib.closing(module.make_envs(module.Args(env_id="Own-v0"), 1, {})) as envs:
            action = np.zeros((1, 1 if script == "ppo" else 2), int if script == "ppo" else float)
            more = [np.ones(1, bool)] if script in WHOLE else []  # which environments play
            for _ in range(6):
                expected = spaces.flatten(SEEN[name], Seer.made[-1].seen[-1])
                np.testing.assert_allclose(envs.obs[0], expected, rtol=1e-6)
                envs.step(action, *more)


@EACH
def test_what_can_not_be_is_refused_or_raises(script, registered, tmp_path, capfd):
    """Images for a vector's script; an observation of another shape, which is never broadcast."""
    if script in VECTORS:
        image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
        flags = registered(lambda: Seer(image, usual(script)))
        refused(capfd, "ppo_pixels.py", train, script, tmp_path / "run", flags)
        words = spaces.Dict({"box": VECTOR, "words": spaces.Sequence(spaces.Discrete(9))})
        flags = registered(lambda: Seer(words, usual(script)))
        refused(capfd, "no vector of a fixed size", train, script, tmp_path / "run", flags)
    for shape in (slice(1), slice(2)):
        flags = registered(lambda k=shape: Seer(VECTOR, usual(script), lambda obs: obs[k]))
        with pytest.raises(ValueError, match="shape"):
            train(script, tmp_path / "run", flags)
    assert not (tmp_path / "run").exists()
    flags = registered(lambda: Seer(VECTOR, spaces.Text(5)))
    refused(capfd, "Text(1, 5", train, script, tmp_path / "run", flags)


# --- units ----------------------------------------------------------------------------------------
SCALED = ["ppo", "ppo_continuous_action", "ppo_pixels", "ppo_lstm", "ppo_continuous_action_warp"]


@pytest.mark.parametrize("script", SCALED)
@pytest.mark.parametrize(("k", "b", "c"), [(100, 0, 1), (0.01, 0, 100), (1, 100, 0.01)])
def test_agents_act_alike_in_any_unit(script, k, b, c):
    """Who saw k x + b and was paid c r acts and values as who saw x and was paid r."""
    rng, found = np.random.default_rng(0), []
    x = rng.normal([1, 0, -2], [1, 3, 0.5], (500, 3))
    pay = rng.normal(1, 2, (40, 4))
    for scale, shift, price in ((1, 0, 1), (k, b, c)):
        module, args, agent = make(script, VECTOR, usual(script), num_envs=4)
        obs = np.float32(scale * x + shift)
        moments = agent.moments.values() if hasattr(agent, "moments") else [agent.obs_moments]
        for each in moments:
            each.update(obs)
        more = {"state": agent.initial_state(500)} if script == "ppo_lstm" else {}
        seen = module.Obs(obs=torch.tensor(obs)) if more or script == "ppo_pixels" else obs
        values = agent.get_value(torch.tensor(obs) if seen is obs else seen, **more).detach()
        noise = {"noise": agent.noise(500)} if script == "ppo" else {}  # or all choose the same
        found.append([agent.act(seen, **more, **noise), values])
        if script != "ppo_continuous_action_warp":
            empty = [None] * (len(module.Rollout._fields) - 2)
            data = module.Rollout(*empty, None, None)._replace(rewards=price * pay, valid=pay < 9)
            found[-1].append(module.scale_rewards(agent, data, args).rewards)
    if script == "ppo":  # two choices may be so near that they round to either side
        choices = [values.pop(0) for values in found]
        assert np.mean(choices[0] != choices[1]) < 0.01 and len(set(choices[0])) > 1
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, mine, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("script", SCALED)
def test_what_hardly_moves_is_named(script, tmp_path, capsys, monkeypatch):
    """Once, in the first iteration. Not what a float32's rounding moves, and not a constant."""

    def look(env, last):
        return np.float32([env.t, 2e-6 * env.t, 1000.1 + 6e-5 * (env.t % 2)])

    monkeypatch.setattr(toys.Walk, "look", look)
    if script == "ppo_continuous_action_warp":
        pendulum = importlib.import_module(script).Pendulum
        observe, scale = pendulum.observe, torch.tensor([1, 2e-6, 0])
        monkeypatch.setattr(pendulum, "observe", lambda envs: observe(envs) * scale)
    train(script, tmp_path / "run", "", 3)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "moves by" in x]
    assert re.fullmatch(r"observation 1 moves by [12]e-06 only: give it in a smaller unit", line)


SEES = [("FrozenLake-v1", 16, 0), ("Taxi-v4", 500, 0), ("Taxi-v4 --no-action-masks", 500, 0)]
SEES += [("envpool:Play2048-v1", 16 * 31, 0), ("Own-v0", 3, 4)]


@pytest.mark.parametrize("script", CHOICES)
@pytest.mark.parametrize(("env_id", "choices", "numbers"), SEES)
def test_choices_are_not_scaled(script, env_id, choices, numbers, registered, tmp_path):
    """They stay zeros and ones; numbers behind them are scaled."""
    both = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-99, 99, (2, 2)))
    registered(lambda: Seer(both, usual(script)))
    train(script, tmp_path / "run", f"--env-id {env_id}")
    module = importlib.import_module(script)
    agent, args = module.load(tmp_path / "run")
    with contextlib.closing(module.make_envs(args, 4, {})) as envs:
        if script == "ppo":
            raw, seen = envs.obs[:, : agent.dim], agent.normalize(torch.tensor(envs.obs))
        else:
            raw = np.hstack([envs.obs[name] for name in agent.codec.shapes])
            seen = agent.normalize(envs.obs.to("cpu"))["vectors"]
    assert raw.shape == seen.shape == (4, choices + numbers)
    assert set(raw[:, :choices].ravel()) == {0, 1}
    np.testing.assert_array_equal(seen[:, :choices], raw[:, :choices])
    assert (seen[:, choices:].abs() < 5).all()
    assert (np.abs(raw[:, choices:]) > 5).any() == (numbers > 0)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["k0.01", "b100", "c100"])
def test_cartpole_is_learned_in_any_unit(unit, tmp_path):
    flags = f"--env-id benchmark.published.units:CartPole-{unit}-v0 --total-timesteps 100000"
    flags += " --num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 10"
    train("ppo", tmp_path / "run", flags)
    assert np.mean(returns(tmp_path / "run")[-100:]) >= 450 * (100 if unit == "c100" else 1)


# --- what simulators do ---------------------------------------------------------------------------
@pytest.mark.parametrize("script", PARALLEL)
def test_a_simulator_may_go_to_its_own_folder(script, tmp_path, monkeypatch):
    """The run stays where the command was given, and is played from there."""
    work, simulator = tmp_path / "work", tmp_path / "simulator"
    work.mkdir()
    simulator.mkdir()
    monkeypatch.setattr(toys.Faulty, "strike", lambda *_: os.chdir(simulator))
    for flags, run in (("--run-dir mine", "mine"), ("", "runs/*")):
        monkeypatch.chdir(work)
        args = parse(script, f"{SMALL[script]} {flags} --total-timesteps 32")
        folder = importlib.import_module(script).train(args)
        assert Path.cwd() == simulator and not list(simulator.iterdir())
        assert [folder] == list(work.glob(run))
        monkeypatch.chdir(work)
        assert len(evaluate(script, folder.relative_to(work))) == 3


THREADS = [(script, 2) for script in (*PARALLEL, "ppo_continuous_action_warp")]
THREADS += [(script, 0) for script in ("ppo_pixels", "ppo_lstm", "ppo_atari_multigpu")]


@pytest.mark.parametrize(("script", "number"), THREADS)
def test_as_many_threads_as_asked_for(script, number, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(envpool, "make", Toy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as OMP_NUM_THREADS allows
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    train(script, tmp_path / "run", f"--num-threads {number}")
    assert taken == [number or 3]


@pytest.mark.parametrize("script", PARALLEL)
@pytest.mark.parametrize("place", ["step", "constructor"])
def test_sys_exit_of_an_environment_is_told(script, place, tmp_path, capfd):
    module = importlib.import_module(script)
    args = f"{SMALL[script]} --total-timesteps 32 --run-dir {tmp_path / 'run'}".split()
    with pytest.raises(SystemExit) as end:
        module.train(module.parse_args([*args, "--env-kwargs", f'{{"fault": "exit of {place}"}}']))
    err = capfd.readouterr().err
    assert "no license" in err and ("in strike" in err) == (place == "step")
    assert end.value.code == ("no license" if place == "step" else 2)


@EACH
def test_what_a_constructor_draws_is_of_the_seed(script):
    module, args = importlib.import_module(script), parse(script, f"{SMALL[script]} --seed 5")
    with contextlib.closing(module.make_envs(args, 2, {})) as envs:
        drawn = [env.unwrapped.drawn for env in envs.envs]
    seeds = [module.episode_seed(5, i) for i in (0, 1)]
    assert drawn == [np.random.RandomState(seed).random() for seed in seeds]


@EACH
def test_a_policy_that_never_ends_its_episode(script, registered, tmp_path, capsys):
    """Sampled episodes are told first. A limit bounds training, and evaluation: 2 x 3 x 5 steps."""
    flags = registered(lambda: Seer(VECTOR, usual(script), last=None))
    train(script, tmp_path / "run", f"{flags} --max-episode-steps 5")
    capsys.readouterr()
    assert evaluate(script, tmp_path / "run", flags) == [5.0] * 3
    assert len(Seer.made[-1].seen) <= 2 * 3 * 6 + 2  # and first observations
    told = capsys.readouterr().out
    assert told.index("sampled, 3 episodes: 5.00") < told.index("eval_episode=0")


# --- masks ----------------------------------------------------------------------------------------
class Doors(gym.Env):
    """Opens some doors of each wall at every step, never none, and ends the run that walks into a
    closed one. How it says which are open is its kind."""

    def __init__(self, kind="info", walls=(4,)):
        self.kind, self.walls = kind, walls
        self.action_space = spaces.Discrete(4) if len(walls) == 1 else spaces.MultiDiscrete(walls)
        self.observation_space = VECTOR
        if kind == "dict":
            mask = spaces.MultiBinary(sum(walls))
            self.observation_space = spaces.Dict({"observation": VECTOR, "action_mask": mask})
        if kind == "method":  # the convention of sb3-contrib
            self.action_masks = lambda: np.hstack(self.open) > 0

    def look(self):
        self.open = [np.int8(self.np_random.permutation(n) < 1 + n // 3) for n in self.walls]
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        mask = self.open[0] if len(self.walls) == 1 else tuple(self.open)
        if self.kind == "dict":
            return {"observation": obs, "action_mask": np.hstack(self.open)}, {}
        info = {"info": {"action_mask": mask}, "legal": {"legal_action_mask": mask}, "none": {}}
        return obs, info.get(self.kind)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look()

    def step(self, action):
        taken = zip(self.open, np.ravel(action), strict=True)
        if self.kind != "none" and not all(wall[choice] for wall, choice in taken):
            raise RuntimeError(f"{action} into {self.open}")
        self.t += 1
        obs, info = self.look()
        return obs, float(np.sum(action)), False, self.t == 7, info


KINDS = [("info", (4,)), ("legal", (4,)), ("dict", (4,)), ("info", (3, 4)), ("dict", (3, 4))]
KINDS += [("method", (4,)), ("method", (3, 4))]


@pytest.mark.parametrize("script", CHOICES)
@pytest.mark.parametrize(("kind", "walls"), KINDS)
def test_only_valid_choices_are_taken(script, kind, walls, registered, tmp_path, capsys):
    """Through ends of episodes, in training and evaluation; otherwise the run would end. A line
    says whether masks are seen."""
    flags = registered(lambda: Doors(kind, walls))
    train(script, tmp_path / "run", flags, 6)
    assert "masks of valid actions: True" in capsys.readouterr().out
    assert len(evaluate(script, tmp_path / "run", f"{flags} --eval-episodes 3")) == 3
    with pytest.raises(RuntimeError, match=r"\binto\b"):
        train(script, tmp_path / "free", f"{flags} --no-action-masks", 6)
    assert "masks of valid actions: False" in capsys.readouterr().out


@pytest.mark.parametrize("script", CHOICES)
def test_a_mask_of_zeros_is_none(script, registered, tmp_path, monkeypatch):
    """During an episode, too: some end it with whatever action comes next. All choices are drawn,
    the same as without masks."""
    look, step, taken = Doors.look, Doors.step, []
    monkeypatch.setattr(Doors, "look", lambda env: (look(env)[0], {"action_mask": np.zeros(4)}))
    monkeypatch.setattr(Doors, "step", lambda env, a: taken.append(int(a)) or step(env, a))
    for flags in ("", " --no-action-masks"):
        train(script, tmp_path / f"{len(taken)}", registered(lambda: Doors("none")) + flags, 3)
    half = len(taken) // 2
    assert half > 40 and set(taken[:half]) == {0, 1, 2, 3}
    assert taken[:14] == taken[half:][:14]  # before the first update, which rounds otherwise


@pytest.mark.parametrize("script", CHOICES)
@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 1], [1, 1, 1]])
def test_a_mask_of_another_size_is_an_error(script, mask, registered, tmp_path, monkeypatch):
    look = Doors.look
    monkeypatch.setattr(Doors, "look", lambda env: (look(env)[0], {"action_mask": np.int8(mask)}))
    with pytest.raises(ValueError, match=r"mask|reshape|broadcast"):
        train(script, tmp_path / "run", registered(Doors))


# --- EnvPool --------------------------------------------------------------------------------------
POOL = [("ppo", "CartPole-v1"), ("ppo_continuous_action", "CheetahRun-v1")]


@pytest.mark.parametrize(("script", "env_id"), POOL)
def test_envpools_vector_is_trained_on_played_and_resumed(script, env_id, tmp_path, monkeypatch):
    """With seeds that no two of its episodes share; Dicts are flattened in the space's order."""
    module, made = importlib.import_module(script), []
    plain = module.PoolEnvs.__init__

    def spy(self, args, num_envs, start):
        plain(self, args, num_envs, start)
        made.append((num_envs, start, self.obs.copy()))
        raw = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=[
            module.episode_seed(args.seed, i, start) % 2**31 for i in range(num_envs)
        ])  # fmt: skip
        obs, space = raw.reset()[0], raw.observation_space
        for i in range(num_envs):
            one = {k: v[i] for k, v in obs.items()} if isinstance(obs, dict) else obs[i]
            np.testing.assert_allclose(self.obs[i], spaces.flatten(space, one), rtol=1e-6)

    scale, discounted = module.scale_rewards, []
    monkeypatch.setattr(
        module, "scale_rewards", lambda x, *more: discounted.append(x.discounted) or scale(x, *more)
    )
    monkeypatch.setattr(module.PoolEnvs, "__init__", spy)
    monkeypatch.setattr(gym, "make", None)  # not a gymnasium environment of that name
    flags = f"--env-id envpool:{env_id} --num-envs 3 --num-steps 16 --env-workers 2"
    train(script, tmp_path / "run", f"{flags} --total-timesteps 96")
    args = module.parse_args(["--resume", str(tmp_path / "run"), "--total-timesteps", "192"])
    module.train(args)
    assert module.load_checkpoint(tmp_path / "run")["iteration"] == 4
    args = module.parse_args(["--evaluate", str(tmp_path / "run"), "--eval-episodes", "1"])
    assert np.isfinite(module.evaluate(args)).all()
    assert [(n, start) for n, start, _ in made if n == 3] == [(3, 0), (3, 2)]
    assert not discounted[0].any() and discounted[1].all() and not discounted[2].any()
    first, resumed = (obs for n, _, obs in made if n == 3)
    assert len({tuple(row) for row in np.concatenate([first, resumed])}) == 6


@pytest.mark.parametrize("script", CHOICES[1:])
def test_games_of_envpool(script, tmp_path, capfd, monkeypatch):
    """Its mask of 2048's moves is followed; several players are refused; MiniGrid's mission, which
    is letters as numbers, is left out."""
    make, valid = envpool.make, []

    def noted(task, **options):
        vector = make(task, **options)
        step, mask = vector.step, np.ones((options["num_envs"], 4), bool)

        def play(actions):
            valid.extend(mask[np.arange(len(mask)), actions])
            *result, info = step(actions)
            mask[:] = info["legal_action_mask"]
            mask[result[2] | result[3]] = True  # the next action is ignored
            return *result, info

        vector.step = play
        return vector

    monkeypatch.setattr(envpool, "make", noted)
    train(script, tmp_path / "2048", "--env-id envpool:Play2048-v1", 8)
    assert len(valid) == 128 and all(valid)
    monkeypatch.setattr(envpool, "make", make)
    players = "--env-id envpool:TicTacToe-v1"
    refused(capfd, "several players", train, script, tmp_path / "players", players)
    train(script, tmp_path / "grid", "--env-id envpool:MiniGrid-Empty-5x5-v0")
    assert "image (7, 7, 3); not obs/mission" in "".join(capfd.readouterr())


def test_envpools_time_limit_returns_the_true_last_observation():
    """HalfCheetah's step 1000: truncated, its observation a small step from the one before and no
    reset's; the next step ignores its action and pays nothing."""
    module, rng = importlib.import_module("ppo_continuous_action"), np.random.default_rng(0)
    args = module.Args(env_id="envpool:HalfCheetah-v4", num_envs=2)
    with contextlib.closing(module.make_envs(args, 2, {})) as envs:
        for step in range(1000):
            before = envs.obs.copy()
            _, terminated, truncated = envs.step(rng.uniform(-1, 1, (2, 6)))
            assert not terminated.any() and truncated.all() == (step == 999)
        assert envs.autoreset.all()
        assert np.abs(envs.obs).max() > 0.5  # at rest, as a reset leaves it, 0.3 at most
        assert np.abs(envs.obs[:, :8] - before[:, :8]).max() < 1.0
        rewards, terminated, truncated = envs.step(rng.uniform(-1, 1, (2, 6)))
        assert not rewards.any() and not (terminated | truncated | envs.autoreset).any()
        assert np.abs(envs.obs[:, :8]).max() < 0.3


@pytest.mark.parametrize("script", GYMNASIUM)
def test_observations_of_another_shape_are_played_again(script, tmp_path, monkeypatch):
    """A column, where the space has a row, and an array that all instances share."""
    shared = np.zeros((3, 1), np.float32)

    def look(env, last):
        shared[:, 0] = env.episode, env.t, last + env.shift
        return shared

    plain = train(script, tmp_path / "plain", iterations=3)
    monkeypatch.setattr(toys.Walk, "look", look)
    odd = train(script, tmp_path / "odd", iterations=3)
    assert_same(dict(odd["agent"]), dict(plain["agent"]))
    resumed = resume(script, tmp_path / "odd", "--total-timesteps 200")
    assert resumed["iteration"] > odd["iteration"]


@pytest.mark.parametrize("script", ["ppo", "ppo_continuous_action", "ppo_pixels", "ppo_lstm"])
def test_a_long_replay_has_a_bar(script, capsys):
    """Of the steps of an endless episode, when a run is resumed."""

    class Actions(list):
        __iter__ = lambda _: iter(())  # noqa: E731

    module = importlib.import_module(script)
    args = module.Args(env_id="CartPole-v1" if script == "ppo" else "Pendulum-v1")
    for length in (99_999, 100_000):
        module.Envs(args, range(1), [(0, 0.0, Actions([0] * length))]).close()
        assert ("replay:" in capsys.readouterr().err) == (length == 100_000)
