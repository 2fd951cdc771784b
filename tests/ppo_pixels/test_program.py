"""ppo_pixels.py as a program: every kind of space, masks, EnvPool's games, saved policies."""

from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from program import Toy, rows, scalars, train_until_killed
from scripts import refused

import ppo_pixels

BYTES = {"low": 0, "high": 255, "dtype": np.uint8}
SMALL = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --num-threads 1"
SMALL += " --no-cuda --total-timesteps 64"
VECTOR = spaces.Box(-1, 1, (3,))


class Kinds(gym.Env):
    """Observations drawn from any space, the last action's sum in every reward; episodes of 7 to 11
    steps, whose end is a termination if their length is even. `mask` says how the mask of a choice
    among 4 is given; the last one has only zeros."""

    def __init__(self, observation=None, action=None, mask=None, plus=0.0):
        self.observation_space = observation or spaces.Dict(
            screen=spaces.Box(shape=(16, 12, 3), **BYTES),
            grid=spaces.Box(shape=(7, 7, 2), **BYTES),
            speed=spaces.Box(-np.inf, np.inf, (2,)),
            place=spaces.Discrete(3),
        )
        self.action_space = action or spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
        self.mask = mask
        self.plus = plus
        if mask == "method":
            self.action_masks = lambda: self.valid

    def look(self):
        obs = self.observation_space.sample()
        self.valid = self.np_random.permutation(np.int8([1, 1, 0, 0])) * (self.t < self.end)
        if self.mask == "Dict":
            obs["action_mask"] = self.valid
        return obs, {self.mask: self.valid} if self.mask and "_" in self.mask else {}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t, self.end = 0, int(self.np_random.integers(7, 12))
        return self.look()

    def step(self, action):
        assert self.action_space.contains(action), action
        assert not self.mask or self.valid[action], "an invalid choice"
        self.t += 1
        total = float(np.sum(np.hstack(gym.spaces.flatten(self.action_space, action)))) + self.plus
        over, even = self.t == self.end, self.end % 2 == 0
        obs, info = self.look()
        return obs, total + self.t, over and even, over and not even, info


def register(name: str, **kwargs) -> str:
    gym.register(f"Pixels{name}-v0", Kinds, kwargs=kwargs)
    return f"Pixels{name}-v0"


KINDS = register("Kinds")


def train(folder: Path, flags: str = "", env_id: str = KINDS) -> Path:
    flags = f"--env-id {env_id} --run-dir {folder} {SMALL} {flags}"
    return ppo_pixels.train(ppo_pixels.parse_args(flags.split()))


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(x, b[name]) for name, x in a.items())
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_run_cut_off_goes_on_to_the_same_bits(tmp_path):
    """With a stack of frames and actions that are held."""
    more = "--frame-stack 2 --grayscale --action-repeat 2 --resize 16x16 --checkpoint-interval 2"
    flags = f"--env-id {KINDS} {SMALL} {more} --total-timesteps 160"
    ppo_pixels.train(ppo_pixels.parse_args(f"{flags} --run-dir {tmp_path / 'whole'}".split()))
    argv = f"{flags} --run-dir {tmp_path / 'killed'}".split()
    assert train_until_killed("ppo_pixels", "update", 4, argv) == -9
    ppo_pixels.train(ppo_pixels.parse_args(["--resume", str(tmp_path / "killed")]))
    a, b = (checkpoint(tmp_path / name) for name in ("whole", "killed"))
    assert a["iteration"] == 5
    assert same(*[{name: x[name] for name in ("agent", "adam", "rng")} for x in (a, b)])
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    assert len(rows(tmp_path / "whole")) > 8


SPACES = [  # of observations and of actions
    (spaces.Box(shape=(36, 40, 3), **BYTES), spaces.Discrete(4, start=2)),
    (spaces.Box(shape=(36, 36), **BYTES), spaces.MultiBinary(3)),
    (spaces.Box(-1, 1, (16, 16, 3)), spaces.Box(0, 9, (2,), np.int64)),
    (VECTOR, spaces.Box(-np.inf, 3.4e38, (2,), np.float64)),
    (spaces.MultiDiscrete([3, 4]), spaces.Tuple([spaces.Discrete(2)] * 2)),
    (spaces.Tuple([spaces.Dict(a=spaces.Discrete(2)), spaces.MultiBinary([2, 2])]),
     spaces.Dict(z=spaces.Dict(b=spaces.Box(0, 1, ())), a=spaces.Tuple([spaces.MultiBinary(2)]))),
]  # fmt: skip


@pytest.mark.parametrize("observation, action", SPACES)
def test_every_kind_of_space_trains(tmp_path, observation, action):
    env_id = register("Any", observation=observation, action=action)
    folder = train(tmp_path / "run", env_id=env_id)
    play = ppo_pixels.parse_args(f"--evaluate {folder} --eval-episodes 2".split())
    assert len(ppo_pixels.evaluate(play)) == 2
    agent, args = ppo_pixels.load(folder)
    assert args.env_id == env_id
    batch = gym.vector.utils.create_empty_array(observation, 3)
    gym.vector.utils.concatenate(observation, [observation.sample() for _ in range(3)], batch)
    for one in gym.vector.utils.iterate(gym.vector.utils.batch_space(action, 3), agent.act(batch)):
        assert action.contains(one), one


@pytest.mark.parametrize("mask", ["action_mask", "legal_action_mask", "method", "Dict"])
def test_masks(tmp_path, mask):
    """The environment raises an error for an invalid choice. Zeros are an error but at an end."""
    choice = {"action": spaces.Discrete(4), "mask": mask}
    dictionary = spaces.Dict(a=VECTOR, action_mask=spaces.MultiBinary(4))
    choice["observation"] = dictionary if mask == "Dict" else VECTOR
    folder = train(tmp_path / "run", env_id=register("Mask", **choice))
    assert len(rows(folder)) > 2
    with pytest.raises(AssertionError, match="an invalid choice"):
        train(tmp_path / "none", "--no-action-masks", register("Mask", **choice))


def test_a_mask_of_zeros(tmp_path, monkeypatch):
    env_id = register("Zero", observation=VECTOR, action=spaces.Discrete(4), mask="action_mask")
    look = Kinds.look
    monkeypatch.setattr(Kinds, "look", lambda x: (look(x)[0], {"action_mask": np.zeros(4)}))
    with pytest.raises(ValueError, match="leaves nothing to choose"):
        train(tmp_path / "run", env_id=env_id)


# --- EnvPool --------------------------------------------------------------------------------------
def test_scores_of_whole_games(tmp_path, monkeypatch):
    """Rewards are clipped and a lost life ends an episode; what is logged is the game's score."""
    spec = SimpleNamespace(config=SimpleNamespace(max_num_players=1))
    monkeypatch.setattr(Toy, "spec", spec, raising=False)
    monkeypatch.setattr("envpool.make", Toy)
    rewards = []

    def update(agent, data, args):
        rewards.append(data)
        return {}

    monkeypatch.setattr(ppo_pixels, "update", update)
    folder = train(tmp_path / "run", "--no-scale-rewards", "envpool:Pong-v5")
    (data, _) = rewards
    assert data.rewards.max() == 1  # clipped
    assert data.terminated[:6].any(axis=0).all()  # with the first life
    scores = [(float(score), int(length)) for _, score, length in rows(folder)[1:]]
    games = [(sum(i + t for t in range(1, 2 * life + 1)), 2 * life) for i, life in ((0, 3), (1, 4))]
    assert set(scores) == set(games)


def test_evaluation_during_training(tmp_path):
    """Of other environments; the training is the same."""
    flags = '--eval-interval 2 --eval-episodes 3 --eval-env-kwargs {"plus":1000.0}'
    folder = train(tmp_path / "run", flags)
    ((step, score),) = scalars(folder)["charts/test_return"]
    assert 7_000 < score < 12_000
    assert step == checkpoint(folder)["global_step"]
    without = train(tmp_path / "without")
    assert same(checkpoint(folder)["agent"], checkpoint(without)["agent"])


WRONG = {
    "--env-id envpool:TicTacToe-v1": "a game of several players",
    "--env-id envpool:Pong-v5 --action-repeat 4": "frame_skip",
    "--env-id envpool:Nothing-v0": "EnvPool has no Nothing-v0",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_input_is_one_line(tmp_path, capfd, flags):
    refused(capfd, WRONG[flags], train, tmp_path / "run", flags)
    assert not (tmp_path / "run").exists()


def test_the_mission_of_envpool_is_not_read(tmp_path, capfd):
    train(tmp_path / "run", "", "envpool:MiniGrid-DoorKey-5x5-v0")
    out = capfd.readouterr()
    assert "sees obs/direction (4,), obs/image (7, 7, 3); not obs/mission" in out.out + out.err


# --- saved policies -------------------------------------------------------------------------------
def test_a_saved_policy_acts_as_it_did(tmp_path):
    folder = train(tmp_path / "run", "--frame-stack 2 --grayscale --resize 16x16")
    (agent, args), env = ppo_pixels.load(folder), gym.make(KINDS)
    envs = ppo_pixels.Envs(args, range(1), [])
    raw, _ = env.reset(seed=ppo_pixels.episode_seed(args.seed, 0, 0))
    obs = agent.codec.read(raw)
    for _ in range(5):
        assert obs.keys() == envs.obs.keys()
        for name, x in obs.items():
            assert np.array_equal(x, envs.obs[name])
        choice, numbers = agent.act(obs)
        logprobs, mean, _ = agent.policy(envs.obs.to("cpu"))
        envs.step(agent.choose_action(logprobs, mean).detach().numpy())
        raw, *_ = env.step((choice[0], numbers[0]))
        obs = agent.codec.read(raw, obs)


@pytest.mark.slow
def test_compiled_is_the_same_to_rounding(tmp_path):
    eager = checkpoint(train(tmp_path / "eager"))["agent"]
    compiled = checkpoint(train(tmp_path / "compiled", "--compile"))["agent"]
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, rtol=1e-2, atol=1e-3)
    half = checkpoint(train(tmp_path / "half", "--bf16"))["agent"]
    assert all(x.isfinite().all() for x in half.values())


@pytest.mark.slow
def test_it_learns(tmp_path):
    """A picture, a number, a choice and a distance: random play gets 2 of 20."""
    flags = (
        "--num-envs 16 --num-steps 64 --num-minibatches 4 --update-epochs 4 --learning-rate 1e-3"
    )
    flags += " --log-std-init -0.5 --total-timesteps 16384"
    folder = train(tmp_path / "run", flags, "benchmark.published.gates:Gates-v0")
    scores = [float(score) for _, score, _ in rows(folder)[1:]]
    assert np.mean(scores[:50]) < 4 < np.mean(scores[-50:])
    play = f"--evaluate {folder} --env-id benchmark.published.gates:Gates-v0"
    assert np.mean(ppo_pixels.evaluate(ppo_pixels.parse_args(play.split()))) > 16
