"""Edits that researchers make, as patches of ppo_continuous_action.py. Each works eagerly and
compiled, and does what it is for."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import ROOT, rows, scalars

import ppo_continuous_action

PATCHES = ROOT / "tests" / "edits"
EDITS = pytest.mark.parametrize("name", sorted(path.stem for path in PATCHES.glob("*.patch")))
FLAGS = (
    "--env-id Pendulum-v1 --num-envs 2 --num-steps 128 --num-minibatches 4 --total-timesteps 2560 "
    "--update-epochs 5 --learning-rate 3e-3 --target-kl None --no-cuda"
)
MORE = {"vector-environment": "--env-id envpool:mine"}


class Slide(gym.vector.VectorEnv):
    """A point on a line in each of N environments, which the action moves; 25 steps an episode."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space = gym.spaces.Box(-9, 9, (1,))
    single_action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.autoreset = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        assert len(set(seed)) == self.num_envs
        self.generators = [np.random.default_rng(s) for s in seed]
        self.t = np.zeros(self.num_envs, int)
        self.x = np.array([rng.uniform(-1, 1, 1) for rng in self.generators])
        return self.x.astype(np.float32), {}

    def step(self, actions):
        assert actions.shape == (self.num_envs, 1)
        first = np.array([rng.uniform(-1, 1, 1) for rng in self.generators])
        self.x = np.where(self.autoreset[:, None], first, self.x + 0.2 * actions)
        self.t = np.where(self.autoreset, 0, self.t + 1)
        rewards = -np.abs(self.x[:, 0]) * ~self.autoreset
        truncated = self.t == 25
        self.autoreset = truncated
        return self.x.astype(np.float32), rewards, np.zeros(self.num_envs, bool), truncated, {}


def load_module(folder: Path, name: str):
    """The script in a folder under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, folder / "ppo_continuous_action.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The script with an edit."""
    modules = {}

    def get(name: str):
        if name not in modules:
            folder = tmp_path_factory.mktemp(name)
            shutil.copy(ppo_continuous_action.__file__, folder)
            alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
            command = ["git", "apply", str(PATCHES / f"{name}.patch")]
            subprocess.run(command, cwd=folder, env=alone, check=True)
            modules[name] = load_module(folder, f"edited_{name.replace('-', '_')}")
        return modules[name]

    return get


def train(script, folder: Path, flags: str = "--no-compile") -> dict:
    script.train(script.parse_args([*FLAGS.split(), *flags.split(), "--run-dir", str(folder)]))
    return script.load_checkpoint(folder)


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    """The folder of a run of the script as it is."""
    folder = tmp_path_factory.mktemp("unedited") / "run"
    train(ppo_continuous_action, folder, "--no-compile --save-model")
    return folder


@pytest.fixture(autouse=True)
def surroundings(unedited, tmp_path, monkeypatch):
    """What the edits find: a saved policy, and a vector environment to import."""
    shutil.copy(
        unedited / "ppo_continuous_action.cleanrl_model", tmp_path / "pretrained.cleanrl_model"
    )
    monkeypatch.chdir(tmp_path)
    module = type(sys)("my_vector")
    module.MyVectorEnv = Slide
    monkeypatch.setitem(sys.modules, "my_vector", module)


def first_weights(script, folder: Path) -> dict:
    """Those with which a run in this folder began."""
    args = script.load_checkpoint(folder)["args"]
    envs = script.make_envs(args, args.num_envs, {})
    torch.manual_seed(args.seed)
    return script.Agent(envs, args).state_dict()


def moved(before: dict, after: dict, part: str) -> float:
    """The largest change of a parameter whose name begins so."""
    return max(float((after[k] - before[k]).abs().max()) for k in after if k.startswith(part))


def check_effect(name: str, script, folder: Path, unedited: Path):
    """All that should learn has moved, what should not has not, the edit's own effect is there,
    and the policy can be played."""
    before = first_weights(script, folder)
    after = script.load_checkpoint(folder)["agent"]
    learning = {key for key, p in script.load(folder)[0].named_parameters() if p.requires_grad}
    for key in learning:
        assert not torch.equal(before[key], after[key]), key
    frozen = {"frozen-critic": "critic", "rnd-bonus": "rnd_target"}.get(name, "nothing")
    assert all(torch.equal(before[k], after[k]) for k in after if k.startswith(frozen))
    as_ever = script.load_checkpoint(unedited)["agent"]
    assert not torch.equal(after["actor_logstd"], as_ever["actor_logstd"])
    own = {"auxiliary-loss": "prediction_loss", "second-value-head": "short_value_loss",
           "rnd-bonus": "rnd_loss"}  # fmt: skip
    if name in own:
        values = [value for _, value in scalars(folder)[f"losses/{own[name]}"]]
        assert values[-1] < 0.8 * values[0]
    if name == "reward-transform":  # each of the 200 rewards of an episode, which are all negative
        assert {float(score) for _, score, _ in rows(folder)[1:]} == {-200.0}
    if name == "vector-environment":
        assert {length for *_, length in rows(folder)[1:]} == {"25"}
    played = script.parse_args(["--evaluate", str(folder), "--eval-episodes", "1"])
    assert np.isfinite(script.evaluate(played)).all()


@EDITS
def test_an_edit_works(name, edited, unedited, tmp_path):
    script = edited(name)
    train(script, tmp_path / "run", f"--no-compile {MORE.get(name, '')}")
    check_effect(name, script, tmp_path / "run", unedited)


def test_a_bonus_reaches_the_advantages(edited, tmp_path, monkeypatch):
    """The rewards of every row but those after an episode's end are higher by half the novelty."""
    script, data, scale = edited("rnd-bonus"), [], []
    plain, zero = script.update, script.Agent.novelty
    monkeypatch.setattr(script, "update", lambda *a: data.append(a[1]) or plain(*a))
    for name in ("with", "without"):
        final = train(script, tmp_path / name, "--total-timesteps 512 --num-steps 256 --no-compile")
        scale.append(float(final["agent"]["return_moments.var"]) ** 0.5)
        monkeypatch.setattr(script.Agent, "novelty", lambda agent, obs: 0.0 * zero(agent, obs))
    (plus, rewards), valid = ((x.rewards * x.valid for x in data), data[0].valid)
    bonus = plus * scale[0] - rewards * scale[1]
    assert (bonus[valid] > 1e-3).all()
    assert not bonus[~valid].any() and (~valid).any()


@pytest.mark.slow
@EDITS
def test_an_edit_works_compiled(name, edited, unedited, tmp_path, monkeypatch):
    """To the same numbers as eagerly, to rounding, as long as that stays small."""
    script = edited(name)
    steps = []
    plain = script.compile_step
    monkeypatch.setattr(script, "compile_step", lambda *a: steps.append(plain(*a)) or steps[-1])
    short = f"--total-timesteps 768 --learning-rate 3e-4 {MORE.get(name, '')}"
    eager = train(script, tmp_path / "eager", f"{short} --no-compile")["agent"]
    compiled = train(script, tmp_path / "compiled", f"{short} --compile-from 0")["agent"]
    assert [step is script.minibatch_step for step in steps] == [True, False]
    before = first_weights(script, tmp_path / "eager")
    if name == "pretrained-actor":
        before |= torch.load("pretrained.cleanrl_model", weights_only=True)
    for key, value in eager.items():
        assert (compiled[key] - value).abs().max() <= 0.02 * moved(before, eager, key) + 1e-6, key
    longer = f"{MORE.get(name, '')} --compile-from 0"
    train(script, tmp_path / "longer", longer)
    check_effect(name, script, tmp_path / "longer", unedited)
