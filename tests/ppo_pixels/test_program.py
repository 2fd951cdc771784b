"""ppo_pixels.py as a program: its runs, what it says of wrong input, what it saves and plays."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from maths import checkpoint, killed_and_resumed
from program import content
from scripts import refused

import ppo_pixels

BYTES = {"low": 0, "high": 255, "dtype": np.uint8}
SMALL = (
    "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --num-threads 1 --no-cuda"
)
GATES = "benchmark.published.gates:Gates-v0"


class Kinds(gym.Env):
    """Observations drawn from any space, the last action's sum in every reward; episodes of 7 to 11
    steps, whose end is a termination if their length is even."""

    def __init__(self, observation=None, action=None, info=None):
        self.observation_space = observation or spaces.Dict(
            screen=spaces.Box(shape=(16, 12, 3), **BYTES),
            codes=spaces.Box(shape=(7, 7, 2), **BYTES),
            speed=spaces.Box(-np.inf, np.inf, (2,)),
            text=spaces.Text(4),
            where=spaces.Discrete(3),
        )
        self.action_space = action or spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
        self.info = info or {}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t, self.end = 0, int(self.np_random.integers(7, 12))
        return self.observation_space.sample(), self.info

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        total = float(np.sum(np.hstack(gym.spaces.flatten(self.action_space, action))))
        over, even = self.t == self.end, self.end % 2 == 0
        obs = self.observation_space.sample()
        return obs, total + self.t, over and even, over and not even, self.info


def register(name: str, **kwargs) -> str:
    gym.register(f"Pixels{name}-v0", Kinds, kwargs=kwargs)
    return f"Pixels{name}-v0"


KINDS = register("Kinds")
VECTOR = spaces.Box(-1, 1, (3,))


def train(folder: Path, flags: str, env_id: str = KINDS) -> Path:
    args = ppo_pixels.parse_args(f"--env-id {env_id} --run-dir {folder} {SMALL} {flags}".split())
    return ppo_pixels.train(args)


# --- runs -----------------------------------------------------------------------------------------
STACKED = "--frame-stack 2 --grayscale --action-repeat 2 --resize 16x16"


@pytest.mark.parametrize(
    "flags",
    [
        f"--env-id {KINDS} {STACKED}",
        f"--env-id {KINDS} --separate-critic --no-scale-rewards",
        "--env-id envpool:MiniGrid-DoorKey-5x5-v0",
    ],
)
def test_a_run_cut_off_goes_on_to_the_same_bits(tmp_path, flags):
    flags = f"{flags} {SMALL} --total-timesteps 160 --checkpoint-interval 2"
    killed_and_resumed("ppo_pixels", tmp_path, flags, least=0 if "envpool" in flags else 8)


def test_what_is_seen_is_said(tmp_path, capfd):
    train(tmp_path / "run", "--total-timesteps 64 --frame-stack 2", GATES)
    assert "sees picture image (36, 36, 2)\nsees height vector (1,)\n" in capfd.readouterr().out


SPACES = [  # of observations and of actions
    (spaces.Box(shape=(36, 40, 3), **BYTES), spaces.Discrete(4, start=2)),
    (spaces.Box(shape=(3, 40, 36), **BYTES), spaces.MultiDiscrete([[2, 3], [3, 2]])),
    (spaces.Box(shape=(36, 36), **BYTES), spaces.MultiBinary(3)),
    (spaces.Box(shape=(2, 20, 20, 3), **BYTES), spaces.Box(-1, 1, (2, 3))),
    (spaces.Box(-1, 1, (16, 16, 3)), spaces.Box(0, 9, (2,), np.int64)),
    (VECTOR, spaces.Box(-np.inf, 3.4e38, (2,), np.float64)),
    (spaces.MultiDiscrete([3, 4]), spaces.Tuple([spaces.Discrete(2)] * 2)),
    (spaces.Tuple([spaces.Dict(a=spaces.Discrete(2)), spaces.MultiBinary([2, 2])]),
     spaces.Dict(z=spaces.Dict(b=spaces.Box(0, 1, ())), a=spaces.Tuple([spaces.MultiBinary(2)]))),
]  # fmt: skip


@pytest.mark.parametrize("observation, action", SPACES)
def test_every_kind_of_space_trains(tmp_path, observation, action):
    env_id = register("Any", observation=observation, action=action)
    folder = train(tmp_path / "run", "--total-timesteps 64", env_id)
    play = ppo_pixels.parse_args(f"--evaluate {folder} --eval-episodes 2".split())
    assert len(ppo_pixels.evaluate(play)) == 2
    agent, args = ppo_pixels.load(folder)
    assert args.env_id == env_id
    batch = gym.vector.utils.create_empty_array(observation, 3)
    gym.vector.utils.concatenate(observation, [observation.sample() for _ in range(3)], batch)
    chosen = agent.act(batch)
    for k in range(3):
        one = row_of(chosen, k)
        assert ppo_pixels.without_binaries(action).contains(one), one


def row_of(batch, k):
    if isinstance(batch, dict):
        return {key: row_of(x, k) for key, x in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row_of(x, k) for x in batch)
    return batch[k]


def test_masks_reach_the_policy(tmp_path):
    """By info; what is masked is never done."""
    mask, choices = np.array([1, 0, 1, 0], np.int8), {"action": spaces.Discrete(4)}
    by_info = register("Info", observation=VECTOR, info={"action_mask": mask}, **choices)
    folder = train(tmp_path / "run", "--total-timesteps 64", by_info)
    for _, actions in checkpoint(folder)["played"]:
        assert actions[:, [1, 3]].sum() == 0
    nothing = register("None", observation=VECTOR, info={"action_mask": 0 * mask}, **choices)
    with pytest.raises(ValueError, match="leaves nothing to choose"):
        train(tmp_path / "none", "--total-timesteps 64", nothing)
    assert not (tmp_path / "none").exists()


# --- wrong input ----------------------------------------------------------------------------------
CUBE = register("Cube", observation=spaces.Box(shape=(9, 9, 9), **BYTES))
OPEN = register("Open", observation=spaces.Box(-np.inf, np.inf, (64, 64, 3)))
WORDS = register("Words", observation=spaces.Text(9))
SAY = register("Say", action=spaces.Text(9))
THREE = {"action_mask": np.ones(3)}
MASK = register("Mask", observation=VECTOR, action=spaces.Discrete(4), info=THREE)
WRONG = {
    "--env-id NoSuch-v0": "NoSuch",
    "--env-id envpool:CarRacng-v3": "EnvPool has no such environment; near: CarRacing-v3",
    "--env-id no_module:X-v0": "no_module",
    f"--env-id {CUBE}": "channels can't be told",
    f"--env-id {OPEN}": "without bounds",
    f"--env-id {WORDS}": "nothing there can be learned from",
    f"--env-id {SAY}": "no actions that can be learned",
    f"--env-id {MASK}": "action_mask has 3 entries, the choices 4",
    "--encoder nature": "too small",
    "--num-steps 100000000 --total-timesteps 200000000": "GB a rollout",
    '--env-kwargs {"no_such":1}': "no_such",
}


@pytest.mark.parametrize("flags", WRONG, ids=lambda x: x[:40])
def test_wrong_input_is_one_line(tmp_path, capfd, flags):
    env_id = flags.split()[1] if "--env-id" in flags else KINDS
    more = "" if "--env-id" in flags else flags
    given = tmp_path / "run", f"--total-timesteps 64 {more}", env_id
    refused(capfd, WRONG[flags], train, *given)
    assert not (tmp_path / "run").exists()


def test_an_agent_for_other_eyes_or_with_another_network(tmp_path, capfd):
    folder = train(tmp_path / "run", "--total-timesteps 64")
    before, other = content(folder), register("Other", observation=spaces.Dict(a=VECTOR))
    play = ppo_pixels.parse_args(f"--evaluate {folder} --env-id {other}".split())
    refused(capfd, "its agent sees", ppo_pixels.evaluate, play)
    more = ppo_pixels.parse_args(["--resume", str(folder), "--separate-critic"])
    says = "does not fit the environment and the flags"
    refused(capfd, says, ppo_pixels.train, more)
    assert content(folder) == before


# --- acting ---------------------------------------------------------------------------------------
def test_a_saved_policy_acts_as_it_did(tmp_path):
    folder = train(
        tmp_path / "run", f"--total-timesteps 64 {STACKED.replace('--action-repeat 2', '')}"
    )
    (agent, args), env = ppo_pixels.load(folder), gym.make(KINDS)
    played = ppo_pixels.own_envs(ppo_pixels.replace(args, num_envs=1), [0], None)
    obs, _ = env.reset(seed=ppo_pixels.episode_seed(args.seed, 0, 0))
    batched = {key: np.asarray(x)[None] for key, x in obs.items()}
    seen = agent.observe(batched)
    for _ in range(5):
        for a, b in zip(seen, played.obs, strict=True):
            assert np.array_equal(a, b)
        choice, numbers = agent.act(seen)
        policy, _ = agent.policy(ppo_pixels.as_tensors(played.obs, "cpu"))
        played.step(agent.choose_action(policy).detach().numpy())
        obs, *_ = env.step((choice[0], numbers[0]))
        seen = agent.observe({key: np.asarray(x)[None] for key, x in obs.items()}, seen)


def test_weights_and_arguments_alone_are_a_policy(tmp_path):
    """What the harness keeps of a run has no names of what the agent sees."""
    folder = train(tmp_path / "run", "--total-timesteps 32")
    agent, _ = ppo_pixels.load(folder)
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    kept = {name: content[name] for name in ("args", "agent")}
    torch.save(kept, folder / "checkpoint.pt")
    again, _ = ppo_pixels.load(folder)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in agent.state_dict().items())


@pytest.mark.slow
def test_compiled_is_the_same_to_rounding(tmp_path):
    eager = checkpoint(train(tmp_path / "eager", "--total-timesteps 64"))["agent"]
    compiled = checkpoint(train(tmp_path / "compiled", "--total-timesteps 64 --compile"))["agent"]
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, rtol=1e-2, atol=1e-3)
    half = checkpoint(train(tmp_path / "half", "--total-timesteps 64 --bf16"))["agent"]
    assert all(x.isfinite().all() for x in half.values())
