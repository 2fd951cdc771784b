"""ppo.py and ppo_continuous_action.py as programs: command line, run folder, resume, saved policy,
evaluation, compilers. What all scripts promise is in every/."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import (
    METRICS,
    Clockwork,
    assert_same,
    rows,
    scalars,
)

import ppo
import ppo_continuous_action

SIZES = "--num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 2 --checkpoint-interval 2"
ENV_ID = {ppo: "CartPole-v1", ppo_continuous_action: "InvertedPendulum-v4"}  # both pay 1 a step
SMALL = {script: f"--env-id {env_id} {SIZES} --no-cuda" for script, env_id in ENV_ID.items()}
LARGER = {ppo: "Acrobot-v1", ppo_continuous_action: "Hopper-v4"}
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


def evaluate(script, folder: Path, flags: str = "") -> list[float]:
    return script.evaluate(script.parse_args(f"--evaluate {folder} {flags}".split()))


def plain(checkpoint: dict, **changed) -> dict:
    """With these arguments changed."""
    return checkpoint | {"args": asdict(checkpoint["args"]) | changed}


@pytest.fixture(scope="module", params=SMALL, ids=lambda module: module.__name__)
def script(request):
    return request.param


@pytest.fixture(scope="module")
def undisturbed(script, tmp_path_factory):
    """A run of five iterations: its folder, its checkpoint and what it printed."""
    folder, out = tmp_path_factory.mktemp("undisturbed") / "run", io.StringIO()
    with contextlib.redirect_stdout(out):
        checkpoint = train(script, folder, "--total-timesteps 700 --save-model")
    return folder, checkpoint, out.getvalue()


# --- the run's folder -----------------------------------------------------------------------------


def test_run_folder_and_logs(script, undisturbed):
    folder, checkpoint, out = undisturbed
    info = json.loads((folder / "run.json").read_text())
    assert (info["script"], info["status"]) == (f"{script.__name__}.py", "finished")
    assert info["args"] == asdict(checkpoint["args"])
    assert (info["seed"], info["args"]["total_timesteps"]) == (1, 700)
    assert info["versions"] == {
        "torch": torch.__version__, "gymnasium": gym.__version__, "numpy": np.__version__
    }  # fmt: skip
    assert info["wall_seconds"] > 0
    global_step, iteration, seconds, known = checkpoint["counters"]
    assert iteration == 5  # 60 steps are no iteration
    assert info["global_step"] == global_step <= 640
    assert 0 < seconds <= info["wall_seconds"] + 0.01
    assert known == len(rows(folder)) - 1

    assert (folder / "episodes.csv").read_text().startswith("global_step,seconds,return,length\n")
    episodes = np.array(rows(folder)[1:], float)
    steps, returns, lengths = episodes.T
    assert len(episodes) > 10
    assert (returns == lengths).all()  # both environments pay 1 a step
    assert (np.diff(steps) >= 0).all()
    assert info["global_step"] - 128 < lengths.sum() <= info["global_step"]
    assert info["final_return"] == pytest.approx(returns[-100:].mean())
    printed = re.findall(r"^global_step=(\d+), episodic_return=([\d.]+)$", out, re.M)
    assert [[float(s), float(r)] for s, r in printed] == episodes[:, :2].tolist()
    said = f"return {info['final_return']} over the last 100 episodes; play: python "
    assert said in out and out.endswith(f" --evaluate {folder}\n")

    points = scalars(folder, timed=True)
    for tag, column in (("charts/episodic_return", returns), ("charts/episodic_length", lengths)):
        means = [(step, column[steps == step].mean()) for step in np.unique(steps)]
        np.testing.assert_allclose(points.pop(tag), means)  # of what one step ended
    losses = {f"losses/{name}" for name in (*METRICS, "explained_variance")}
    assert points.keys() >= losses | {"charts/learning_rate", "charts/SPS"}
    for tag, values in points.items():
        assert len({step for step, _ in values}) == 5, tag
        assert values[-1][0] == global_step, tag
    rates = [script.Args.learning_rate * (1 - k / 5) for k in range(5)]
    assert [rate for _, rate in points["charts/learning_rate"]] == pytest.approx(rates)


def test_same_seed_same_bits(script, undisturbed, tmp_path):
    folder, checkpoint, _ = undisturbed
    again = train(script, tmp_path / "again", "--total-timesteps 700")
    assert_same(plain(again), plain(checkpoint, save_model=False))
    assert rows(tmp_path / "again") == rows(folder)
    assert scalars(tmp_path / "again") == scalars(folder)
    other = train(script, tmp_path / "other", "--total-timesteps 128 --seed 2")
    assert rows(tmp_path / "other")[:5] != rows(folder)[:5]
    weight = "critic.0.weight"
    assert not torch.isclose(other["agent"][weight], checkpoint["agent"][weight]).all()


def test_no_two_episodes_start_alike(script):
    first = []
    for seed in range(6):
        args = script.Args(env_id=ENV_ID[script], seed=seed)
        envs = script.make_envs(args, 4)
        first += [tuple(envs.reset(i)) for i in range(4) for _ in range(5)]
    assert len(set(first)) == len(first) == 120


def test_the_experiments_name_may_be_a_path(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"{SMALL[script]} --total-timesteps 128 --exp-name a/b --save-model"
    script.train(script.parse_args(flags.split()))
    (path,) = Path().rglob("*.cleanrl_model")
    assert re.fullmatch(rf"runs/{ENV_ID[script]}__a/b__1__\d+/b\.cleanrl_model", str(path))


def test_tracking_with_a_stand_in(script, tmp_path, monkeypatch):
    def init(**kwargs):
        before = [call for call in calls if call != "finished"]  # the writer follows it
        assert len(list((tmp_path / "run").glob("events.*"))) == len(before)
        calls.append(kwargs)
        return SimpleNamespace(id=kwargs["id"] or "made", finish=lambda: calls.append("finished"))

    calls, stand_in = [], SimpleNamespace(__spec__=True, init=init)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    train(script, tmp_path / "run", "--total-timesteps 128 --track --wandb-entity me")
    call, end = calls
    assert (call["project"], call["entity"], call["sync_tensorboard"]) == ("ppo", "me", True)
    assert call["config"]["num_steps"] == 64
    assert (call["id"], end) == (None, "finished")  # so that another one can begin
    resume(script, tmp_path / "run", "--total-timesteps 256")
    assert (calls[2]["id"], calls[2]["resume"], calls[3]) == ("made", "allow", "finished")


# --- resume ---------------------------------------------------------------------------------------


def test_resume_extends_a_run(script, tmp_path):
    """To the bits of one that was never interrupted; by a renamed copy of the script, too."""
    first, copied, whole = (tmp_path / name for name in ("run", "copied", "whole"))
    begun = train(script, first, "--no-anneal-lr --total-timesteps 384")
    assert any(len(actions) for _, actions in begun["played"])  # episodes are running
    shutil.copytree(first, copied)
    shutil.copy(script.__file__, tmp_path / "mine.py")
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    mine = sys.modules["mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    expected = train(script, whole, "--no-anneal-lr --total-timesteps 768")
    for module, folder in ((script, first), (mine, copied)):
        resumed = resume(module, folder, "--total-timesteps 768")
        assert_same(plain(resumed) | {"script": None}, plain(expected) | {"script": None})
        assert resumed["script"] == f"{module.__name__}.py"
        assert rows(folder) == rows(whole)
        assert scalars(folder) == scalars(whole)
    info = json.loads((copied / "run.json").read_text())
    assert (info["script"], info["args"]["exp_name"]) == ("mine.py", script.__name__)


def test_resume_with_other_flags(script, undisturbed, tmp_path):
    """A warm start: what was logged stays, and what comes next is by the new flags."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    flags = "--learning-rate 1e-4 --no-anneal-lr --num-steps 32 --total-timesteps 448"
    resumed = resume(script, folder, flags)  # two iterations of 64 after the five of 128
    assert (resumed["counters"][1], resumed["args"].learning_rate) == (7, 1e-4)
    assert resumed["args"].env_id == ENV_ID[script]
    before, after = scalars(undisturbed[0]), scalars(folder)
    assert {tag: points[: len(before[tag])] for tag, points in after.items()} == before
    assert [rate for _, rate in after["charts/learning_rate"][5:]] == pytest.approx([1e-4] * 2)
    assert rows(folder)[: len(rows(undisturbed[0]))] == rows(undisturbed[0])
    assert json.loads((folder / "run.json").read_text())["args"]["num_steps"] == 32


def test_resumed_where_an_episode_had_just_ended(script, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    flags = f"--env-id Clockwork_{script.__name__}-v0 --num-steps 10 --no-anneal-lr"
    begun = train(script, folder, f"{flags} --total-timesteps 20")
    assert [len(actions) for _, actions in begun["played"]] == [10, 10]  # whole episodes
    expected = train(script, whole, f"{flags} --total-timesteps 80")
    assert_same(resume(script, folder, "--total-timesteps 80"), expected)
    assert rows(folder) == rows(whole)


# --- a saved policy -------------------------------------------------------------------------------


def test_a_saved_policy_in_ones_own_code(script, undisturbed):
    """The README's lines, and CleanRL's."""
    folder, checkpoint, _ = undisturbed
    agent, args = script.load(str(folder))
    assert args == checkpoint["args"]
    env = gym.make(args.env_id)
    obs, info = env.reset(seed=1)
    obs, reward, terminated, truncated, info = env.step(agent.act(obs[None])[0])
    assert reward == 1
    obs = np.random.default_rng(0).normal(size=(100, len(obs)))
    with torch.no_grad():  # as CleanRL's
        action, logprob, _, value = agent.get_action_and_value(torch.tensor(obs).float())
        again = agent.get_action_and_value(torch.tensor(obs).float(), action)
    assert torch.equal(again[1], logprob) and torch.equal(again[3], value)
    if script is ppo_continuous_action:  # a saved policy is nothing without its scaler
        assert checkpoint["agent"]["obs_moments.mean"].abs().min() > 0


MODULE = """
import gymnasium as gym
from program import Clockwork
space = gym.spaces.Discrete(2) if {discrete} else gym.spaces.Box(-1, 1, (1,))
gym.register("Own-v0", Clockwork, kwargs={{"action_space": space}})
"""


def test_a_module_is_imported_only_if_given_on_the_command_line(
    script, tmp_path, monkeypatch, capsys
):
    def forget():
        del sys.modules["own_module"], gym.registry["Own-v0"]

    (tmp_path / "own_module.py").write_text(MODULE.format(discrete=script is ppo))
    monkeypatch.syspath_prepend(tmp_path)
    given, folder = "--env-id own_module:Own-v0", tmp_path / "run"
    train(script, folder, f"{given} --total-timesteps 128")
    assert f"--evaluate {folder} {given}\n" in capsys.readouterr().out
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["args"]["env_id"]
    assert (saved, script.load_checkpoint(folder)["args"].env_id) == ("own_module:Own-v0", "Own-v0")
    forget()
    for start in (resume, evaluate, lambda script, folder: script.load(folder)):
        with pytest.raises(SystemExit) as end:
            start(script, folder)
        assert end.value.code == 2
        err = capsys.readouterr().err
        assert "--env-id Own-v0: " in err and "your own: module:Id; " in err
        assert err.count("\n") == 1
    assert "own_module" not in sys.modules
    assert evaluate(script, folder, f"{given} --eval-episodes 1") == [10.0]
    assert "own_module" in sys.modules
    assert resume(script, folder, f"{given} --total-timesteps 256")["counters"][1] == 2
    assert evaluate(script, folder, "--eval-episodes 1") == [10.0]  # it is registered by now
    assert script.load(folder)[1].env_id == "Own-v0"
    forget()


def test_dm_control(tmp_path):
    flags = "--env-id dm_control/cartpole-balance-v0 --total-timesteps 128"
    train(ppo_continuous_action, tmp_path, flags)
    assert ppo_continuous_action.load(tmp_path)[0].obs_moments.mean.shape == (5,)


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
    for k, more in enumerate(["", f"--env-id {LARGER[script]}", "--ent-coef 0.5 --gamma 0.9"]):
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
