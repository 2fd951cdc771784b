"""Each script's environments: spaces of every kind, masks, chance, EnvPool's vectors, wrong shapes.
Rows of rollouts, ends of episodes and their seeds are in algorithms/test_acting.py."""

import contextlib
import importlib

import envpool
import gymnasium as gym
import numpy as np
import pytest
import toys
from gymnasium import spaces
from scripts import GYMNASIUM, WHOLE, evaluate, refused, train

VECTORS = ["ppo", "ppo_continuous_action", *WHOLE]  # whose observations are vectors
CHOICES = ["ppo", "ppo_pixels", "ppo_lstm"]
EACH = pytest.mark.parametrize("script", GYMNASIUM)
BOXES = ["whole", "byte", "half", "double", "number"]


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


class Seer(gym.Env):
    """Episodes of 3 steps, with observations of the space and all that was observed."""

    def __init__(self, space: gym.Space, actions: gym.Space, spoil=lambda obs: obs):
        self.observation_space, self.action_space, self.seen = space, actions, []
        self.spoil = spoil

    def look(self):
        self.seen.append(self.observation_space.sample())
        return self.spoil(self.seen[-1])

    def reset(self, seed=None, options=None):
        self.observation_space.seed(seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        self.t += 1
        return self.look(), 1.0, self.t == 3, False, {}


VECTOR = spaces.Box(-1, 1, (3,))
SEEN = {
    "dict": spaces.Dict({"b": spaces.Box(-1, 1, (2, 2)), "a": spaces.Discrete(3, start=1)}),
    "tuple": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
    "nested": spaces.Dict({"x": VECTOR, "y": spaces.Tuple([VECTOR, spaces.Discrete(2)])}),
    "table": spaces.Box(-1, 1, (2, 3), np.float64),
    "discrete": spaces.Discrete(4),
}


@EACH
@pytest.mark.parametrize("name", SEEN)
def test_observations_of_any_space(script, name, registered, tmp_path):
    """Vectors are those of gymnasium's flatten."""
    made = []

    def make():
        made.append(Seer(SEEN[name], usual(script)))
        return made[-1]

    module, flags = importlib.import_module(script), registered(make)
    train(script, tmp_path / "run", flags)
    assert len(evaluate(script, tmp_path / "run", f"{flags} --eval-episodes 2")) == 2
    if script in VECTORS:
        with contextlib.closing(module.make_envs(module.Args(env_id="Own-v0"), 1, {})) as envs:
            action = np.zeros((1, 1 if script == "ppo" else 2), int if script == "ppo" else float)
            more = [np.ones(1, bool)] if script in WHOLE else []  # which environments play
            for _ in range(6):
                expected = spaces.flatten(SEEN[name], made[-1].seen[-1])
                np.testing.assert_allclose(envs.obs[0], expected, rtol=1e-6)
                envs.step(action, *more)


IMAGE = spaces.Box(0, 255, (36, 36, 3), np.uint8)


@EACH
def test_what_can_not_be_is_refused_or_raises(script, registered, tmp_path, capfd):
    """Images for a vector's script; an observation of another shape, which is never broadcast."""
    if script in VECTORS:
        flags = registered(lambda: Seer(IMAGE, usual(script)))
        refused(capfd, "ppo_pixels.py", train, script, tmp_path / "run", flags)
    box = spaces.Box(-1, 1, (3,))
    for shape in (slice(1), slice(2)):
        flags = registered(lambda k=shape: Seer(box, usual(script), lambda obs: obs[k]))
        with pytest.raises(ValueError, match="shape"):
            train(script, tmp_path / "run", flags)
    assert not (tmp_path / "run").exists()
    flags = registered(lambda: Seer(box, spaces.Text(5)))
    refused(capfd, "Text(1, 5", train, script, tmp_path / "run", flags)


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

    def look(self):
        self.open = [np.int8(self.np_random.permutation(n) < 1 + n // 3) for n in self.walls]
        obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        mask = self.open[0] if len(self.walls) == 1 else tuple(self.open)
        if self.kind == "dict":
            return {"observation": obs, "action_mask": np.hstack(self.open)}, {}
        info = {"info": {"action_mask": mask}, "legal": {"legal_action_mask": mask}, "none": {}}
        return obs, info[self.kind]

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


@pytest.mark.parametrize("script", CHOICES)
@pytest.mark.parametrize(("kind", "walls"), KINDS)
def test_only_valid_choices_are_taken(script, kind, walls, registered, tmp_path):
    """Through ends of episodes, in training and evaluation; otherwise the run would end."""
    flags = registered(lambda: Doors(kind, walls))
    train(script, tmp_path / "run", flags, 6)
    assert len(evaluate(script, tmp_path / "run", f"{flags} --eval-episodes 3")) == 3
    with pytest.raises(RuntimeError, match=r"\binto\b"):
        train(script, tmp_path / "free", f"{flags} --no-action-masks", 6)


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
    first, resumed = (obs for n, _, obs in made if n == 3)
    assert len({tuple(row) for row in np.concatenate([first, resumed])}) == 6


@pytest.mark.parametrize("script", CHOICES)
def test_games_of_envpool(script, tmp_path, capfd, monkeypatch):
    """Its mask of 2048's moves is followed; several players are refused; MiniGrid's mission, which
    is letters as numbers, is left out, or else the environment."""
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
    grid = tmp_path / "grid", "--env-id envpool:MiniGrid-Empty-5x5-v0"
    if script == "ppo":
        refused(capfd, "use ppo_pixels.py", train, script, *grid)
    else:
        train(script, *grid)
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
