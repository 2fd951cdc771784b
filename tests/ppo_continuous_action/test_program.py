"""ppo.py and ppo_continuous_action.py as programs: what they log, resume, drawing, compilers."""

import contextlib
import importlib.util
import json
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from program import METRICS, Clockwork, assert_same, rows, scalars

import ppo
import ppo_continuous_action

SIZES = "--num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 2 --checkpoint-interval 2"
ENV_ID = {ppo: "CartPole-v1", ppo_continuous_action: "InvertedPendulum-v4"}  # both pay 1 a step
SMALL = {script: f"--env-id {env_id} {SIZES} --no-cuda" for script, env_id in ENV_ID.items()}
LARGER = {ppo: "Acrobot-v1", ppo_continuous_action: "Hopper-v4"}
CONSTANT = "--no-anneal-lr --no-anneal-ent-coef"  # longer runs begin as shorter ones
SPACES = {"ppo": gym.spaces.Discrete(2), "ppo_continuous_action": gym.spaces.Box(-1, 1, (1,))}


for name, space in SPACES.items():
    gym.register(f"Clockwork_{name}-v0", Clockwork, kwargs={"action_space": space})


def train(script, folder: Path, flags: str) -> dict:
    """Train in this process; the final checkpoint."""
    script.train(script.parse_args(f"{SMALL[script]} --run-dir {folder} {flags}".split()))
    return script.load_checkpoint(folder)


def resume(script, folder: Path, flags: str = "") -> dict:
    script.train(script.parse_args(f"--resume {folder} {flags}".split()))
    return script.load_checkpoint(folder)


@pytest.fixture(scope="module", params=SMALL, ids=lambda module: module.__name__)
def script(request):
    return request.param


# --- the run's folder -----------------------------------------------------------------------------
def test_what_is_logged(script, tmp_path):
    checkpoint = train(script, tmp_path, "--total-timesteps 700")
    assert checkpoint["counters"][1] == 5  # 60 steps are no iteration
    points = scalars(tmp_path, timed=True)
    losses = {f"losses/{name}" for name in (*METRICS, "explained_variance")}
    assert points.keys() >= losses | {"charts/learning_rate", "charts/SPS"}


def test_the_entropy_bonus_falls_to_nothing(script, tmp_path, monkeypatch):
    """Linearly, with what is left of all steps, those of a resumed run too."""
    weights = []
    plain = script.update

    def spy(agent, data, learning_rate, args, step):
        weights.append(args.ent_coef)
        return plain(agent, data, learning_rate, args, step)

    monkeypatch.setattr(script, "update", spy)
    falling = tmp_path / "falling"
    constant = tmp_path / "constant"
    train(script, falling, "--total-timesteps 384 --ent-coef 0.1 --anneal-ent-coef")
    assert weights == pytest.approx([0.1, 0.2 / 3, 0.1 / 3])
    after = resume(script, falling, "--total-timesteps 512")
    assert weights[3:] == pytest.approx([0.025])
    assert after["args"].ent_coef == 0.1
    train(script, constant, "--total-timesteps 384 --ent-coef 0.1 --no-anneal-ent-coef")
    assert weights[4:] == [0.1, 0.1, 0.1]


# --- resume ---------------------------------------------------------------------------------------
def test_a_renamed_copy_resumes_a_run(script, tmp_path):
    """To the bits of one that was never interrupted."""
    copied, whole = tmp_path / "copied", tmp_path / "whole"
    begun = train(script, copied, f"{CONSTANT} --total-timesteps 384")
    assert any(len(actions) for _, actions in begun["played"])  # episodes are running
    shutil.copy(script.__file__, tmp_path / "mine.py")
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    mine = sys.modules["mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    expected = train(script, whole, f"{CONSTANT} --total-timesteps 768")
    resumed = resume(mine, copied, "--total-timesteps 768")
    args = {name: asdict(run["args"]) for name, run in (("mine", resumed), ("whole", expected))}
    assert args["mine"] == args["whole"]
    assert_same({**resumed, "args": 0}, {**expected, "args": 0, "script": "mine.py"})
    assert rows(copied) == rows(whole)
    assert scalars(copied) == scalars(whole)
    info = json.loads((copied / "run.json").read_text())
    assert (info["script"], info["args"]["exp_name"]) == ("mine.py", script.__name__)


def test_resumed_where_an_episode_had_just_ended(script, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    flags = f"--env-id Clockwork_{script.__name__}-v0 --num-steps 10 {CONSTANT}"
    begun = train(script, folder, f"{flags} --total-timesteps 20")
    assert [len(actions) for _, actions in begun["played"]] == [10, 10]  # whole episodes
    expected = train(script, whole, f"{flags} --total-timesteps 80")
    assert_same(resume(script, folder, "--total-timesteps 80"), expected)
    assert rows(folder) == rows(whole)


def test_dm_control(tmp_path):
    flags = "--env-id dm_control/cartpole-balance-v0 --total-timesteps 128"
    train(ppo_continuous_action, tmp_path, flags)
    assert ppo_continuous_action.load(tmp_path)[0].obs_moments.mean.shape == (5,)


def test_drawn_without_what_takes_nine_tenths_of_the_time():
    """CPU-time of a frame of HalfCheetah by Mesa: 106 ms as gymnasium draws it, 11 so."""
    args = ppo_continuous_action.Args(env_id="HalfCheetah-v4")
    with contextlib.closing(ppo_continuous_action.drawn_env(args)) as env:
        quality = env.unwrapped.model.vis.quality
        assert (quality.shadowsize, quality.offsamples) == (0, 0)
        assert not env.unwrapped.model.mat_reflectance.any()
        assert env.unwrapped.mujoco_renderer.camera_id == 0
        assert env.render().std() > 10.0  # something is to be seen


# --- compilation ----------------------------------------------------------------------------------
def test_short_runs_are_not_compiled(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", None)
    train(script, tmp_path, "--total-timesteps 128")
    assert "--compile" not in capsys.readouterr().out  # nor tried to


def check_compiled_is_eager(script, folder: Path, monkeypatch, flags: str):
    """Minibatches of two sizes, junk rows, and values that are clipped or not."""
    plain, steps = script.compile_step, []
    spy = lambda *given: steps.append(plain(*given)) or steps[-1]  # noqa: E731
    monkeypatch.setattr(script, "compile_step", spy)
    flags += " --num-steps 128 --num-minibatches 3 --total-timesteps 1024 --compile-from 0"
    compiled = train(script, folder / "compiled", flags)
    eager = train(script, folder / "eager", f"{flags} --no-compile")
    assert [step is script.minibatch_step for step in steps] == [False, True]
    for name, value in eager["agent"].items():
        torch.testing.assert_close(compiled["agent"][name], value, rtol=1e-4, atol=1e-5)
    losses = scalars(folder / "eager")
    for tag, points in scalars(folder / "compiled").items():
        values, expected = ([value for _, value in x] for x in (points, losses[tag]))
        assert values == pytest.approx(expected, rel=1e-3, abs=1e-4), tag


def test_compiled_is_eager_to_rounding(script, tmp_path, monkeypatch):
    check_compiled_is_eager(script, tmp_path, monkeypatch, "")


@pytest.mark.slow
def test_another_agent_is_compiled_anew_and_resumes_to_the_same_bits(script, tmp_path, monkeypatch):
    others = ["", f"--env-id {LARGER[script]}", "--ent-coef 0.5 --gamma 0.9"]
    others += ["--rpo-alpha 0.1"] if script is ppo_continuous_action else []
    for k, more in enumerate(others):
        check_compiled_is_eager(script, tmp_path / str(k), monkeypatch, more)
    flags = "--compile-from 0 --no-anneal-lr --total-timesteps"
    train(script, tmp_path / "parts", f"{flags} 128")
    whole = train(script, tmp_path / "whole", f"{flags} 256")
    assert_same(resume(script, tmp_path / "parts", "--total-timesteps 256"), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("more", ["", "--cudagraphs"])
def test_compiled_on_a_gpu_is_eager_to_rounding(more, script, tmp_path, monkeypatch):
    check_compiled_is_eager(script, tmp_path, monkeypatch, f"--cuda {more}")


def test_parameters_are_made_one_vector_where_they_stay(script, monkeypatch):
    """Adam's vector would be left behind on the CPU if they moved to a GPU afterwards."""

    def flat_adam(agent):
        raise RuntimeError(str(agent.critic[0].weight.dtype))

    monkeypatch.setattr(script, "flat_adam", flat_adam)
    monkeypatch.setattr(script.Agent, "to", lambda self, device: self.double())
    with pytest.raises(RuntimeError, match="float64"):
        script.train(script.parse_args(shlex.split(SMALL[script])))
