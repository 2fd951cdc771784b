"""ppo.py and ppo_continuous_action.py as programs: command line, run folder, resume, saved policy,
evaluation, compilers. What all scripts promise is in every/."""

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import (
    METRICS,
    ROOT,
    Clockwork,
    assert_same,
    check_both_evaluations,
    content,
    installed,
    rows,
    run,
    scalars,
)

import ppo
import ppo_continuous_action

SIZES = "--num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 2 --checkpoint-interval 2"
ENV_ID = {ppo: "CartPole-v1", ppo_continuous_action: "InvertedPendulum-v4"}  # both pay 1 a step
SMALL = {script: f"--env-id {env_id} {SIZES} --no-cuda" for script, env_id in ENV_ID.items()}
OTHER = {ppo: ppo_continuous_action, ppo_continuous_action: ppo}
LARGER = {ppo: "Acrobot-v1", ppo_continuous_action: "Hopper-v4"}
SPACES = {"ppo": gym.spaces.Discrete(2), "ppo_continuous_action": gym.spaces.Box(-1, 1, (1,))}


class Pixels(Clockwork):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


for name, space in SPACES.items():
    gym.register(f"Clockwork_{name}-v0", Clockwork, kwargs={"action_space": space})
gym.register("Pixels-v0", Pixels, kwargs={"action_space": space})


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


# --- command line ---------------------------------------------------------------------------------

# Every flag of CleanRL's, with a value that is not the default; booleans come and go
CLEANRL = {
    "exp_name": "x", "seed": 7, "torch_deterministic": bool, "cuda": bool, "track": bool,
    "wandb_project_name": "p", "wandb_entity": "me", "capture_video": bool, "save_model": bool,
    "env_id": "Acrobot-v1", "total_timesteps": 12345, "learning_rate": 0.125, "num_envs": 3,
    "num_steps": 65, "anneal_lr": bool, "gamma": 0.5, "gae_lambda": 0.25, "num_minibatches": 5,
    "update_epochs": 6, "norm_adv": bool, "clip_coef": 0.375, "clip_vloss": bool,
    "ent_coef": 0.0625, "vf_coef": 0.75, "max_grad_norm": 1.5, "target_kl": 0.875,
}  # fmt: skip
COMPUTED = {"batch_size": 3 * 65, "minibatch_size": 39, "num_iterations": 63}


@pytest.mark.parametrize(("mark", "joint", "on"), [("-", " ", True), ("_", "=", False)])
def test_every_flag_of_cleanrl_in_every_spelling(script, mark, joint, on, monkeypatch):
    installed(monkeypatch, wandb=True, moviepy=True)
    wanted = {name: on if value is bool else value for name, value in CLEANRL.items()}
    wanted["env_id"] = LARGER[script]  # which can be drawn
    words = []
    for name, value in (wanted | dict.fromkeys(COMPUTED, 5)).items():
        flag = name.replace("_", mark)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no{mark}{flag}")
        else:
            words += f"--{flag}{joint}{value}".split()
    assert asdict(script.parse_args(words)).items() >= (wanted | COMPUTED).items()


def test_what_another_script_is_for_is_told(script, undisturbed, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sibling = f"{OTHER[script].__name__}.py"
    other = {ppo: "boxes", ppo_continuous_action: "choices"}[script]
    for line, says in (
        ("--env-id Pixels-v0", "--env-id Pixels-v0: Box(0, 255, (8, 8, 3), uint8): "),
        ("--env-id Pixels-v0", "; pixels: ppo_pixels.py\n"),
        (f"--env-id {ENV_ID[OTHER[script]]}", f"{other}: {sibling}\n"),
        ("--env-id Hopper-v2", "gymnasium-robotics"),
        ("--env-id Nothing-v0", "your own: module:Id; arguments: --env-kwargs\n"),
        (f"--evaluate {undisturbed[0]} --env-id {LARGER[script]}", "its agent does not fit"),
    ):
        with pytest.raises(SystemExit) as end:
            args = script.parse_args(line.split())
            (script.evaluate if args.evaluate else script.train)(args)
        assert end.value.code == 2
        err = capfd.readouterr().err
        assert says in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_exits_0(script, capsys):
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--anneal-lr, --no-anneal-lr" in out
    assert "computed: num_envs * num_steps" in out


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


def test_the_script_alone_in_an_empty_folder_without_a_compiler(script, undisturbed, tmp_path):
    shutil.copy(script.__file__, tmp_path)
    if script is ppo:  # it needs no mujoco
        (tmp_path / "mujoco.py").write_text("raise ImportError")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    flags = f"{SMALL[script]} --total-timesteps 700 --compile-from 0"
    name = script.__name__
    result = run(f"{name}.py", *flags.split(), cwd=tmp_path, env=environment)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(rf"{ENV_ID[script]}__{name}__1__\d+", folder.name)
    assert result.stdout.count("going on eagerly\n") == 1
    assert f"{ENV_ID[script]} on cpu, 5 iterations, in runs/{folder.name}\n" in result.stdout
    same = plain(undisturbed[1], compile_from=0, save_model=False)
    assert_same(plain(script.load_checkpoint(folder)), same)


def test_the_experiments_name_may_be_a_path(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"{SMALL[script]} --total-timesteps 128 --exp-name a/b --save-model"
    script.train(script.parse_args(flags.split()))
    (path,) = Path().rglob("*.cleanrl_model")
    assert re.fullmatch(rf"runs/{ENV_ID[script]}__a/b__1__\d+/b\.cleanrl_model", str(path))


def test_dependencies_in_the_header_are_the_projects(script, root):
    header = re.search(r"# /// script\n(.*?)# ///\n", Path(script.__file__).read_text(), re.S)
    header = tomllib.loads(re.sub("^# ?", "", header[1], flags=re.M))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"]
    if script is ppo:
        wanted = [d.replace("[mujoco]", "") for d in wanted if not d.startswith("mujoco")]
    assert header["dependencies"] == wanted
    assert header["requires-python"] == project["requires-python"]


def test_importing_does_nothing(script, tmp_path, monkeypatch, capfd):
    def world():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return handlers, numbers, torch.get_num_threads(), dict(os.environ)

    monkeypatch.chdir(tmp_path)
    before = world()
    assert {"Args", "Agent"} <= runpy.run_path(script.__file__, run_name="imported").keys()
    assert world() == before
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


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
    """The README's lines; weights alone, from either file, give the same actions bit for bit."""
    folder, checkpoint, _ = undisturbed
    agent, args = script.load(str(folder))
    assert args == checkpoint["args"]
    env = gym.make(args.env_id)
    obs, info = env.reset(seed=1)
    obs, reward, terminated, truncated, info = env.step(agent.act(obs[None])[0])
    assert reward == 1
    obs = np.random.default_rng(0).normal(size=(100, len(obs)))
    noise = agent.noise(100)
    weights = torch.load(folder / f"{script.__name__}.cleanrl_model", weights_only=True)
    for state in (weights, checkpoint["agent"]):
        fresh = script.Agent(env)
        assert (fresh.act(obs, noise) != agent.act(obs, noise)).any()
        fresh.load_state_dict(state)
        for given in (None, noise):
            assert (fresh.act(obs, given) == agent.act(obs, given)).all()
    with torch.no_grad():  # as CleanRL's
        action, logprob, _, value = agent.get_action_and_value(torch.tensor(obs).float())
        again = agent.get_action_and_value(torch.tensor(obs).float(), action)
    assert torch.equal(again[1], logprob) and torch.equal(again[3], value)
    if script is ppo_continuous_action:  # a saved policy is nothing without its scaler
        assert weights["obs_moments.mean"].abs().min() > 0


def test_evaluate_is_deterministic_and_writes_nothing(script, undisturbed, capsys):
    folder = undisturbed[0]
    before = content(folder)
    returns, again = (evaluate(script, folder, "--eval-episodes 4") for _ in range(2))
    assert returns == again and len(returns) == 4
    check_both_evaluations(capsys.readouterr().out, returns)
    assert content(folder) == before


def test_video_of_the_final_policy(script, undisturbed, tmp_path):
    flags = f"{SMALL[script]} --total-timesteps 700 --capture-video --eval-episodes 2"
    done = run(ROOT / f"{script.__name__}.py", "--run-dir", str(tmp_path), *flags.split())
    assert done.returncode == 0, done.stderr
    checkpoint = script.load_checkpoint(tmp_path)
    videos = list((tmp_path / "videos").glob("*.mp4"))
    assert len(videos) == 2
    assert all(video.stat().st_size > 1000 for video in videos)
    same = {"capture_video": False, "eval_episodes": 10, "save_model": True}
    assert_same(plain(checkpoint, **same), plain(undisturbed[1]))


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
