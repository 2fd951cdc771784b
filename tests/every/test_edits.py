"""The recipes of docs/change_this_script.md, as patches of a script. Each works eagerly and
compiled, and does what it is for."""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from program import ROOT, returns, rows, scalars, status

import ppo_continuous_action

PATCHES = ROOT / "tests" / "edits"
PAGE = (ROOT / "docs" / "change_this_script.md").read_text()
SMALL = "--num-envs 2 --num-steps 128 --num-minibatches 4 --total-timesteps 2560 --no-cuda"
FLAGS = {
    "ppo": f"--env-id CartPole-v1 {SMALL} --learning-rate 3e-3",
    "ppo_continuous_action": f"--env-id Pendulum-v1 {SMALL} --update-epochs 5 --learning-rate 3e-3 "
    "--target-kl None",
    "ppo_lstm": f"--env-id Pendulum-v1 {SMALL} --num-minibatches 2 --learning-rate 3e-3",
}
MORE = {
    "vector-environment": "--env-id envpool:mine",
    "best-model": "--total-timesteps 12800 --learning-rate 5e-5 --target-return 25",
}
ONE_STEP = "--total-timesteps 256 --num-minibatches 1 --update-epochs 1 --no-compile"


class Swing(gym.vector.VectorWrapper):
    """Pendulums whose episodes have 25 steps, each with a seed of its own."""

    def __init__(self, num_envs: int):
        super().__init__(gym.make_vec("Pendulum-v1", num_envs, max_episode_steps=25))

    def reset(self, *, seed=None, options=None):
        assert len(set(seed)) == self.num_envs
        return super().reset(seed=seed, options=options)


def teacher(obs: np.ndarray) -> np.ndarray:
    """Actions [B, 1] at Pendulum's observations [B, 3]."""
    return 1.5 * np.tanh(obs[:, 1:2] + 0.3 * obs[:, 2:])


def observations(number: int) -> np.ndarray:
    """Some of Pendulum's."""
    rng = np.random.default_rng(1)
    angle = rng.uniform(-np.pi, np.pi, number)
    return np.float32([np.cos(angle), np.sin(angle), rng.uniform(-8, 8, number)]).T


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The script with an edit, a module with a name of its own."""

    @functools.cache
    def get(name: str):
        folder, patch = tmp_path_factory.mktemp(name), PATCHES / f"{name}.patch"
        (script,) = re.findall(r"^--- a/(\w+\.py)$", patch.read_text(), re.M)
        path = shutil.copy(ROOT / script, folder)
        alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
        subprocess.run(["git", "apply", str(patch)], cwd=folder, env=alone, check=True)
        spec = importlib.util.spec_from_file_location(f"edited_{name.replace('-', '_')}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return get


def train(script, folder: Path, flags: str = "--no-compile") -> dict:
    small = FLAGS[Path(script.__file__).stem]
    script.train(script.parse_args(shlex.split(f"{small} {flags} --run-dir {folder}")))
    return script.load_checkpoint(folder)


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    """The folder of a run of the script as it is."""
    folder = tmp_path_factory.mktemp("unedited") / "run"
    train(ppo_continuous_action, folder, "--no-compile --save-model")
    return folder


@pytest.fixture(autouse=True)
def surroundings(unedited, tmp_path, monkeypatch):
    """What the edits find: a saved policy, a teacher's actions, a vector environment to import."""
    saved = unedited / "ppo_continuous_action.cleanrl_model"
    shutil.copy(saved, tmp_path / "pretrained.cleanrl_model")
    obs = observations(4000)
    np.savez(tmp_path / "demos.npz", obs=obs, actions=teacher(obs))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_vector", SimpleNamespace(MyVectorEnv=Swing))


def first_agent(script, folder: Path):
    """That with which a run in this folder began, but for what `train` loads into it."""
    args = script.load_checkpoint(folder)["args"]
    envs = script.make_envs(args, args.num_envs, {})
    torch.manual_seed(args.seed)
    return script.Agent(envs, args)


def moved(before: dict, after: dict, part: str) -> float:
    """The largest change of a parameter whose name begins so."""
    return max(float((after[k] - before[k]).abs().max()) for k in after if k.startswith(part))


def falls(folder: Path, name: str, ratio: float):
    """The last value of a loss is below this part of the first one."""
    (_, first), *_, (_, last) = scalars(folder)[f"losses/{name}"]
    assert last < ratio * first


# --- what each edit does --------------------------------------------------------------------------
def check_network(script, folder, tmp_path):
    """The first policy's means are near the middle of the box, from -2 to 2."""
    agent = first_agent(script, folder)
    assert type(agent.actor_mean).__name__ == "Residual"
    assert np.abs(agent.act(observations(100))).max() < 0.6


def check_state_deviation(script, folder, tmp_path):
    agent, _ = script.load(folder)
    obs = observations(100)
    deviations = agent.act(obs, np.ones((100, 1), np.float32)) - agent.act(obs)
    assert deviations.min() > 0.0
    assert deviations.std() > 0.01 * deviations.mean()


def check_memory_deviation(script, folder, tmp_path):
    """Of one observation, after what differs."""
    agent, _ = script.load(folder)
    obs = script.Obs(obs=torch.zeros(100, 3))
    states = torch.randn(100, agent.initial_state(1).shape[1])
    deviations = agent.step(obs, states, torch.ones(100, 1))[0] - agent.step(obs, states)[0]
    assert deviations.min() > 0.0
    assert deviations.std() > 0.01 * deviations.mean()


def check_layer_norm(script, folder, tmp_path):
    """What goes into each tanh has mean 0 and variance 1; the outputs have not."""
    agent = first_agent(script, folder)
    x = torch.randn(100, 4)
    for network in (agent.actor, agent.critic):
        hidden = network[:2](x)
        torch.testing.assert_close(hidden.mean(-1), torch.zeros(100), rtol=0, atol=1e-5)
        torch.testing.assert_close(hidden.var(-1, correction=0), torch.ones(100), rtol=0, atol=1e-2)
        assert network(x).std() > 0.001


def check_adamw(script, folder, tmp_path):
    """A step takes a hundredth of the rate from each matrix, and is Adam's otherwise."""
    ours = train(script, tmp_path / "ours", ONE_STEP)["agent"]
    adam = train(ppo_continuous_action, tmp_path / "adam", ONE_STEP)["agent"]
    for name, p in first_agent(script, folder).named_parameters():
        decay = (0.01 * 3e-3 if p.dim() > 1 else 0.0) * p.detach()
        torch.testing.assert_close(adam[name] - ours[name], decay, rtol=0, atol=3e-7)


def check_schedules(script, folder, tmp_path):
    """Those of ten iterations, and the arguments that are saved stay what they were."""
    taken, update = [], script.update
    script.update = lambda *a: taken.append((a[2].clip_coef, a[2].ent_coef)) or update(*a)
    flags = "--no-compile --no-adapt-ent-coef"
    saved = train(script, tmp_path / "spied", flags)["args"]
    script.update = update
    expected = [(0.2 * (1 - k / 10), 0.01 * 0.9**k) for k in range(10)]
    np.testing.assert_allclose(taken, expected)
    assert (saved.clip_coef, saved.ent_coef) == (0.2, 0.01)


def check_reward_transform(script, folder, tmp_path):
    """Each reward is -1 to PPO, so the discounted return comes near -100; the log is as ever."""
    mean = script.load_checkpoint(folder)["agent"]["return_moments.mean"]
    assert -100.0 < mean < -50.0
    assert min(returns(folder)) < -400.0


def check_auxiliary_loss(script, folder, tmp_path):
    falls(folder, "aux_loss", 0.8)
    assert script.parse_args(["--evaluate", str(folder), "--aux-coef", "0.5"]).aux_coef == 0.5


def check_rpo(script, folder, tmp_path):
    """The noise is uniform, of the actions' unit, and new in every epoch."""
    data, batches, update, step = [], [], script.update, script.minibatch_step
    script.update = lambda *a: data.append(a[1].actions) or update(*a)
    script.minibatch_step = lambda *a: batches.append(a[3].actions) or step(*a)
    train(script, tmp_path / "spied", "--no-compile --total-timesteps 1280")
    script.update, script.minibatch_step = update, step
    assert len(batches) == 5 * 5 * 4  # iterations, epochs, minibatches
    assert all(a is b for a, b in zip(batches[::4], batches[3::4], strict=True))
    moves = [data[k // 5].reshape(-1, 1) - x.numpy() for k, x in enumerate(batches[::4])]
    noise = np.float32(moves)
    assert len(np.unique(noise.round(4), axis=0)) == 25
    assert abs(noise.mean()) < 0.05 and 0.99 < np.abs(noise).max() < 1.0001  # half of 2.0
    assert noise.var() == pytest.approx(1 / 3, rel=0.05)


def check_rnd(script, folder, tmp_path):
    """The predictor learns, the target stays, and the rewards of every row but those after an
    episode's end are higher by half the novelty."""
    falls(folder, "rnd_loss", 0.5)
    first = first_agent(script, folder).state_dict()
    assert moved(first, script.load_checkpoint(folder)["agent"], "rnd_target") == 0.0
    data, scale, update, novelty = [], [], script.update, script.Agent.novelty
    script.update = lambda *a: data.append(a[1]) or update(*a)
    for name in ("with", "without"):
        final = train(script, tmp_path / name, "--total-timesteps 512 --num-steps 256 --no-compile")
        scale.append(float(final["agent"]["return_moments.var"]) ** 0.5)
        script.Agent.novelty = lambda agent, obs: 0.0 * novelty(agent, obs)
    script.update, script.Agent.novelty = update, novelty
    valid = data[0].valid
    bonus = data[0].rewards * scale[0] - data[1].rewards * scale[1]
    assert (bonus[valid] > 1e-3).all() and (~valid).any() and not bonus[~valid].any()


def check_behaviour_cloning(script, folder, tmp_path):
    """With almost no learning rate the policy stays the teacher's."""
    train(script, tmp_path / "still", "--learning-rate 1e-9 --total-timesteps 256 --no-compile")
    obs = observations(200)
    clone = script.load(tmp_path / "still")[0].act(obs)
    first = first_agent(script, folder).act(obs)
    assert np.abs(clone - teacher(obs)).mean() < 0.1 < 0.5 < np.abs(first - teacher(obs)).mean()


def one_step(script, tmp_path) -> tuple[dict, dict]:
    """The agent as it is made, and after one step of Adam."""
    after = train(script, tmp_path / "one", ONE_STEP)["agent"]
    return first_agent(script, tmp_path / "one").state_dict(), after


def check_pretrained_actor(script, folder, tmp_path):
    """Adam's first step moves a parameter by its rate, whatever the gradient."""
    before, after = one_step(script, tmp_path)
    saved = torch.load("pretrained.cleanrl_model", weights_only=True)
    assert moved(saved, after, "actor_mean") == pytest.approx(0.1 * 3e-3, rel=0.02)
    assert moved(before, after, "actor_mean") > 3e-3
    assert moved(before, after, "critic") == pytest.approx(3e-3, rel=0.02)
    assert after["obs_moments.count"] == saved["obs_moments.count"] + 256


def check_two_rates(script, folder, tmp_path):
    before, after = one_step(script, tmp_path)
    assert moved(before, after, "actor_mean") == pytest.approx(3e-3, rel=0.02)
    assert moved(before, after, "critic") == pytest.approx(3 * 3e-3, rel=0.02)


def check_asymmetric_critic(script, folder, tmp_path):
    agent, _ = script.load(folder)
    obs = observations(100)
    other = obs + np.float32([0, 0, 1])
    assert (agent.act(other) == agent.act(obs)).all()
    change = agent.get_value(torch.tensor(other)) - agent.get_value(torch.tensor(obs))
    assert change.abs().mean() > 0.01


def check_gradient_accumulation(script, folder, tmp_path):
    """The sum of the parts is the whole: the same weights and metrics as without the edit."""
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    ours = train(script, parts, f"{ONE_STEP} --update-epochs 3")["agent"]
    theirs = train(ppo_continuous_action, whole, f"{ONE_STEP} --update-epochs 3")["agent"]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    for tag, values in scalars(whole).items():
        assert scalars(parts)[tag] == [(k, pytest.approx(x, rel=1e-3, abs=1e-4)) for k, x in values]


def check_vector_environment(script, folder, tmp_path):
    assert {length for *_, length in rows(folder)[1:]} == {"25"}


def check_best_model(script, folder, tmp_path):
    """The run ends early, at the score, and its best model is there to play."""
    assert status(folder) == "finished"
    final, best = (script.load_checkpoint(x) for x in (folder, folder / "best"))
    assert best["iteration"] == final["iteration"] < 50
    score = best["agent"]["best"].item()
    assert score == pytest.approx(np.mean(returns(folder)[-100:])) and score > 25


CHECKS = {
    name.removeprefix("check_").replace("_", "-"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def check(name: str, script, tmp_path: Path):
    """All that should learn has moved, the policy can be played, and the edit does its own."""
    folder = tmp_path / "run"
    before = first_agent(script, folder).state_dict()
    after = script.load_checkpoint(folder)["agent"]
    for key, p in script.load(folder)[0].named_parameters():
        assert not p.requires_grad or not torch.equal(before[key], after[key]), key
    played = script.parse_args(["--evaluate", str(folder), "--eval-episodes", "1"])
    assert np.isfinite(script.evaluate(played)).all()
    CHECKS[name](script, folder, tmp_path)


@pytest.mark.parametrize("name", CHECKS)
def test_an_edit_works(name, edited, tmp_path):
    script = edited(name)
    train(script, tmp_path / "run", f"--no-compile {MORE.get(name, '')}")
    check(name, script, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "memory-deviation"])
def test_an_edit_works_compiled(name, edited, tmp_path, monkeypatch):
    """To the same numbers as eagerly, to rounding, as long as that stays small."""
    script = edited(name)
    compiler, steps = script.compile_step, []
    monkeypatch.setattr(script, "compile_step", lambda *a: steps.append(compiler(*a)) or steps[-1])
    short = f"{MORE.get(name, '')} --total-timesteps 768 --learning-rate 3e-4"
    train(script, tmp_path / "first", f"{short} --learning-rate 1e-30 --no-compile")
    eager = train(script, tmp_path / "eager", f"{short} --no-compile")["agent"]
    compiled = train(script, tmp_path / "compiled", f"{short} --compile-from 0")["agent"]
    assert [step is script.minibatch_step for step in steps] == [True, True, False]
    before = script.load_checkpoint(tmp_path / "first")["agent"]
    for key, value in eager.items():
        assert (compiled[key] - value).abs().max() <= 0.02 * moved(before, eager, key) + 1e-6, key
    train(script, tmp_path / "run", f"{MORE.get(name, '')} --compile-from 0")
    check(name, script, tmp_path)


# --- the page -------------------------------------------------------------------------------------
def test_the_page_has_every_edit(unedited):
    """In few words, with tags that are logged."""
    shown = re.findall(r"^# git apply tests/edits/([\w-]+)\.patch$", PAGE, re.M)
    assert sorted(shown) == sorted(CHECKS) == sorted(path.stem for path in PATCHES.iterdir())
    assert PAGE.count("**Silent:**") == len(shown) + 1
    prose = re.sub(r"```[\s\S]*?```|<!--.*?-->|^\|.*$", "", PAGE, flags=re.M)
    assert len(prose.split()) <= 62 * len(shown)
    named = set(re.findall(r"`((?:charts|losses)/\w+)`", prose))
    logged = {"losses/aux_loss", "losses/rnd_loss", *scalars(unedited, timed=True)}
    assert named - {"losses/NAME"} <= logged


def test_the_page_names_each_learning_step():
    (row,) = re.findall(r"^\| (.*) \| `minibatch_step`", PAGE, re.M)
    own = {path.name for path in ROOT.glob("ppo*.py") if "def adam_state" in path.read_text()}
    assert set(re.findall(r"`(ppo\w*\.py)`", row)) == own


def test_the_script_takes_what_a_sweep_gives():
    (text,) = re.findall(r"```yaml\n([\s\S]*?)```", PAGE)
    sweep = yaml.safe_load(text)
    rate = sweep["parameters"].pop("learning-rate")
    values = {name: x.get("values", [*x.values()])[0] for name, x in sweep["parameters"].items()}
    values["learning-rate"] = rate["max"]
    args = ppo_continuous_action.parse_args([f"--{name}={x}" for name, x in values.items()])
    assert {name: getattr(args, name.replace("-", "_")) for name in values} == values
    assert sweep["command"][3:] == ["--track", "${args}"]
    assert sweep["metric"]["name"] == "charts/episodic_return"
