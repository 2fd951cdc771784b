"""ppo_cma.py as a program: command line, run folder, resume, saved policy, evaluation. What kills,
signals and damage do is in every/."""

import json
import os
import re
import runpy
import shutil
import signal
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import (
    Clockwork,
    assert_same,
    check_both_evaluations,
    content,
    installed,
    rows,
    run,
    scalars,
    train_until_killed,
    write_checkpoint,
)

import ppo_cma
from ppo_cma import Args

SMALL = (
    "--env-id InvertedPendulum-v4 --iter-steps 200 --n-updates 5 --minibatch-size 32 "
    "--history-buffer-size 3 --checkpoint-interval 2 --no-cuda --no-anneal-lr"
)
SPACES = {
    "Clockwork_cma": gym.spaces.Box(-1, 1, (2,)),
    "Unbounded": gym.spaces.Box(0, np.inf, (1,)),
}
for name, space in SPACES.items():
    gym.register(f"{name}-v0", Clockwork, kwargs={"action_space": space})


class Pixels(Clockwork):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


gym.register("Pixels_cma-v0", Pixels, kwargs={"action_space": SPACES["Clockwork_cma"]})
PRETRAINING = ppo_cma.pretrain_policy


@pytest.fixture(scope="module", autouse=True)
def no_pretraining():
    """It takes 4 s: done where a test puts it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)
        yield


def train(folder: Path, flags: str = "") -> dict:
    """Train in this process; the final checkpoint."""
    ppo_cma.train(ppo_cma.parse_args(f"{SMALL} --run-dir {folder} {flags}".split()))
    return ppo_cma.load_checkpoint(folder)


def resume(folder: Path, flags: str = "") -> dict:
    ppo_cma.train(ppo_cma.parse_args(f"--resume {folder} {flags}".split()))
    return ppo_cma.load_checkpoint(folder)


def evaluate(folder: Path, flags: str = "") -> list[float]:
    return ppo_cma.evaluate(ppo_cma.parse_args(f"--evaluate {folder} {flags}".split()))


def plain(checkpoint: dict, **changed) -> dict:
    """With these arguments changed."""
    return checkpoint | {"args": asdict(checkpoint["args"]) | changed}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of seven iterations: its folder and its checkpoint."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, train(folder, "--total-timesteps 1500 --save-model")


# --- command line ---------------------------------------------------------------------------------

ORIGINAL = (
    "--env_name Humanoid-v4 --max_steps 10000000 --mode PPO-CMA-m --iter_steps 32000 "
    "--batch_size 512 --history_buffer_size 9 --run_suffix 1"
)


def test_the_original_readme_line_means_what_it_did():
    args = ppo_cma.parse_args(ORIGINAL.split())
    assert args == Args(
        env_id="Humanoid-v4", total_timesteps=10_000_000, mode="ppo-cma-m", iter_steps=32_000,
        minibatch_size=512, history_buffer_size=9, exp_name="1",
    )  # fmt: skip


def test_the_original_readme_line_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [*ORIGINAL.split(), "--no-cuda"]
    assert train_until_killed("ppo_cma", "Run.log_episodes", 20, argv) == -signal.SIGKILL
    (folder,) = tmp_path.glob("runs/Humanoid-v4__1__1__*")
    assert len(rows(folder)) == 20


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("-m PPO", "mode", "ppo"), ("--mode ppo_cma_m", "mode", "ppo-cma-m"),
        ("--mode PG-pos", "mode", "pg-pos"), ("-lr 0.001", "learning_rate", 0.001),
        ("--learning_rate 0.001", "learning_rate", 0.001), ("--ppo_epsilon 0.1", "clip_coef", 0.1),
        ("--ppo_ent_l_w 0.01", "ent_coef", 0.01), ("--n_updates 7", "n_updates", 7),
        ("--batch-size=64", "minibatch_size", 64), ("--no_cuda", "cuda", False),
    ],
)  # fmt: skip
def test_names_of_the_original_and_of_cleanrl(line, field, value):
    assert getattr(ppo_cma.parse_args(line.split()), field) == value


WRONG = [
    (
        "--env-id CartPole-v1",
        "Discrete(2): a finite Box of actions is wanted, its sides from 1e-6 to 1e6; choices",
    ),
    (
        "--env-id Unbounded-v0",
        "Box(0.0, inf, (1,), float32): a finite Box of actions is wanted",
    ),
    ("--env-id Humanoid-v9", "provides versioned environments"),
    ("--env-id HalfCheeta-v4", "Did you mean: `HalfCheetah`?"),
    (
        "--env-id Pixels_cma-v0",
        "observations are no vector (MiniGrid: a Flat wrapper); pixels: ppo_pixels.py",
    ),
    ("--mode cma", "--mode cma: not one of ppo-cma-m, ppo-cma, ppo, pg, pg-pos"),
    ("--total-timesteps 1e6", "--total-timesteps: invalid literal"),
    ("--total-timesteps 0", "--total-timesteps 0: not in 1 ..."),
    ("--num-envs -1", "--num-envs -1: not in 1 ..."),
    ("--iter-steps 0", "--iter-steps 0: not in 1 ..."),
    ("--history-buffer-size 0", "--history-buffer-size 0: not in 1 ..."),
    ("--n-updates 1", "--n-updates 1: not in 2 ..."),
    ("--action-repeat 0", "--action-repeat 0: not in 1 ..."),
    ("--gamma 1.1", "--gamma 1.1: not in 0 ... 1"),
    ("--gae-lambda nan", "--gae-lambda nan: not in 0 ... 1"),
    ("--epsilon 0.2", "Unrecognized options: --epsilon"),
    ("--run-dir run", "a run is there: --resume run goes on with it"),
    ("--resume nowhere", "nowhere: no checkpoint.pt that can be read here"),
    ("--resume run --evaluate run", "--resume goes on in its folder: not with"),
    ("--resume run --num-envs 3", "--num-envs 3: run goes on with its 1"),
    ("--resume run --mode ppo", "run: its agent does not fit the environment"),
    ("--evaluate run --env-id Hopper-v4", "run: its agent does not fit the environment"),
    (
        "--evaluate foreign",
        "foreign: no checkpoint.pt, made by ppo_cma.py that can be read here: TypeError",
    ),
    ("--track", "wandb is not installed: pip install wandb"),
]


def test_wrong_input_is_told_and_changes_nothing(undisturbed, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    installed(monkeypatch, wandb=False)
    shutil.copytree(undisturbed[0], "run")
    Path("foreign").mkdir()
    write_checkpoint(Path("foreign"), plain(undisturbed[1], servo="kl"))
    before = content(tmp_path)
    for line, says in WRONG:
        new = "--resume" not in line and "--evaluate" not in line
        with pytest.raises(SystemExit) as end:
            args = ppo_cma.parse_args(f"{SMALL if new else ''} {line}".split())
            (ppo_cma.evaluate if args.evaluate else ppo_cma.train)(args)
        assert end.value.code == 2, line
        err = capfd.readouterr().err
        assert says in re.sub(r"[\s│]+", " ", err), line  # which tyro frames and wraps
        assert err.startswith("╭─") or re.fullmatch("ppo_cma.py: .*\n", err), line
        assert content(tmp_path) == before, line


def test_help_lists_both_names_and_exits_0(capsys):
    with pytest.raises(SystemExit) as end:
        ppo_cma.parse_args(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--env-name", "--env-id", "--max-steps", "--batch-size", "--ppo-epsilon"):
        assert flag in out


# --- the run's folder -----------------------------------------------------------------------------


def test_run_folder_and_logs(undisturbed):
    folder, checkpoint = undisturbed
    info = json.loads((folder / "run.json").read_text())
    assert (info["script"], info["status"], info["seed"]) == ("ppo_cma.py", "finished", 1)
    assert info["args"] == asdict(checkpoint["args"])
    assert info["versions"]["torch"] == torch.__version__
    assert info["wall_seconds"] > 0
    episodes = np.array(rows(folder)[1:], float)
    steps, returns, lengths = episodes.T
    assert lengths.sum() == info["global_step"] == checkpoint["counters"][0] >= 1500
    assert (returns == lengths).all()  # InvertedPendulum-v4 pays 1 a step, also on the last one
    assert steps.tolist() == np.cumsum(lengths).tolist()
    assert info["final_return"] == pytest.approx(returns[-100:].mean())

    points = scalars(folder, timed=True)
    for tag, column in (("charts/episodic_return", returns), ("charts/episodic_length", lengths)):
        assert points.pop(tag) == list(zip(steps, column, strict=True))
    losses = ("value_loss", "variance_loss", "policy_loss", "entropy", "explained_variance")
    charts = ["SPS", "learning_rate", "policy_std", "positive_advantages", "mean_episodic_return"]
    charts += ["saturated_means"]
    tags = [f"losses/{name}" for name in losses] + [f"charts/{name}" for name in charts]
    assert points.keys() == set(tags)
    for tag, values in points.items():
        assert len({step for step, _ in values}) == checkpoint["counters"][1], tag


@pytest.mark.parametrize("mode", ppo_cma.MODES)
def test_every_mode_trains(mode, tmp_path, monkeypatch):
    if mode == "ppo":  # whose ratios overflow between a policy and quite another
        monkeypatch.setattr(ppo_cma, "pretrain_policy", PRETRAINING)
    flags = f"--mode {mode} --ent-coef 0.01 --env-id Clockwork_cma-v0 --total-timesteps 400"
    assert train(tmp_path / "run", flags)["counters"][1] == 2
    assert ("losses/variance_loss" in scalars(tmp_path / "run")) == mode.startswith("ppo-cma")
    assert evaluate(tmp_path / "run", "--eval-episodes 1") == [10.0]


def test_the_script_alone_in_an_empty_folder(root, tmp_path, monkeypatch):
    shutil.copy(root / "ppo_cma.py", tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    flags = f"{SMALL} --total-timesteps 300 --save-model"
    result = run("ppo_cma.py", *flags.split(), cwd=tmp_path, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    (folder,) = tmp_path.glob("runs/InvertedPendulum-v4__ppo_cma__1__*")
    assert f"InvertedPendulum-v4 on cpu, ppo-cma-m, in runs/{folder.name}\n" in result.stdout
    weights = torch.load(folder / "ppo_cma.cleanrl_model", weights_only=True)
    assert weights["updates"] == 2  # a saved policy is nothing without its counter and its scaler
    monkeypatch.setattr(ppo_cma, "pretrain_policy", PRETRAINING)
    here = train(tmp_path / "here", "--total-timesteps 300 --save-model")
    assert_same(plain(ppo_cma.load_checkpoint(folder)), plain(here))  # by the same seed


def test_weights_stay_in_the_folder_whatever_the_name(tmp_path):
    train(tmp_path / "run", "--total-timesteps 200 --exp-name ../x --save-model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run/x.cleanrl_model").is_file()


def test_dependencies_in_the_header_are_the_projects(root):
    header = re.search(r"# /// script\n(.*?)# ///\n", (root / "ppo_cma.py").read_text(), re.S)
    header = tomllib.loads(re.sub("^# ?", "", header[1], flags=re.M))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert header["dependencies"] == project["dependencies"]
    assert header["requires-python"] == project["requires-python"]


def test_importing_does_nothing(root, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    names = runpy.run_path(str(root / "ppo_cma.py"), run_name="imported")
    assert {"Args", "Agent"} <= names.keys()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


# --- boxes ----------------------------------------------------------------------------------------


@pytest.fixture
def boxed(monkeypatch):
    """Register an environment with this box of actions."""

    def register(low, high, dtype) -> gym.spaces.Box:
        box = gym.spaces.Box(np.array([low, -1.0]), np.array([high, 1.0]), dtype=dtype)
        spec = gym.envs.registration.EnvSpec("Boxed-v0", entry_point=lambda **_: Clockwork(box))
        monkeypatch.setitem(gym.registry, "Boxed-v0", spec)
        return box

    return register


BOUNDS = [(-3e38, 3e38), (0, 1e-40), (0, 0), (-1e20, 1e20), (-1, np.inf), (1e8, 1e8 + 1)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_boxes_that_can_not_be_learned_in_are_refused(low, high, boxed, tmp_path, capfd):
    box = boxed(low, high, np.float64)
    with pytest.raises(SystemExit) as end:
        train(tmp_path / "run", "--env-id Boxed-v0")
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert "a finite Box of actions is wanted, its sides from 1e-6 to 1e6" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    spaces = SimpleNamespace(observation_space=gym.spaces.Box(-1, 1, (3,)), action_space=box)
    with pytest.raises(ValueError, match="PPO-CMA needs finite bounds"):
        ppo_cma.Agent(spaces)


@pytest.mark.parametrize("side", [2e-6, 1e-3, 9e5])
def test_boxes_at_the_limits_are_learned_in(side, boxed, tmp_path, monkeypatch):
    step, taken = Clockwork.step, []
    monkeypatch.setattr(Clockwork, "step", lambda env, a: taken.append(a[0] / side) or step(env, a))
    boxed(0, side, np.float32)
    final = train(tmp_path / "run", "--env-id Boxed-v0 --total-timesteps 1500")
    assert all(x.isfinite().all() for x in final["agent"].values())
    assert 0 <= min(taken) < 0.2 < 0.8 < max(taken) < 1.0001


# --- resume ---------------------------------------------------------------------------------------


def test_resume_extends_a_run_and_takes_other_flags(tmp_path, undisturbed):
    folder, whole = undisturbed[0], tmp_path / "whole"
    shutil.copytree(folder, tmp_path / "copied")
    expected = train(whole, "--total-timesteps 2500 --save-model")
    assert_same(resume(tmp_path / "copied", "--total-timesteps 2500"), expected)
    assert rows(tmp_path / "copied") == rows(whole)
    # a warm start: what comes next is by the new flags
    shutil.copytree(folder, tmp_path / "other")
    flags = "--total-timesteps 1800 --history-buffer-size 2 --n-updates 3 --learning-rate 1e-4"
    resumed = resume(tmp_path / "other", flags)
    assert len(resumed["history"]) == 2
    assert resumed["adam"]["param_groups"][0]["lr"] == 1e-4
    steps = max(x["step"].item() for x in resumed["adam"]["state"].values())
    before, after = undisturbed[1]["counters"][1], resumed["counters"][1]
    assert steps == 5 * before + 3 * (after - before)


# --- a saved policy -------------------------------------------------------------------------------


def test_a_saved_policy_in_ones_own_code(undisturbed):
    """The README's lines; weights alone, from either file, give the same actions bit for bit."""
    folder, checkpoint = undisturbed
    agent, args = ppo_cma.load(str(folder))
    assert args == checkpoint["args"]
    env = gym.make(args.env_id)
    obs, info = env.reset(seed=1)
    obs, reward, terminated, truncated, info = env.step(agent.act(obs[None])[0])
    assert reward == 1
    obs, noise = np.random.default_rng(0).normal(size=(100, len(obs))), agent.noise(100)
    weights = torch.load(folder / "ppo_cma.cleanrl_model", weights_only=True)
    for state in (weights, checkpoint["agent"]):
        fresh = ppo_cma.Agent(env, pretrain=False)
        assert (fresh.act(obs, noise) != agent.act(obs, noise)).any()
        fresh.load_state_dict(state)
        for given in (None, noise):
            assert (fresh.act(obs, given) == agent.act(obs, given)).all()


def test_evaluate_is_deterministic_and_writes_nothing(undisturbed, capsys):
    folder = undisturbed[0]
    before = content(folder)
    returns, again = (evaluate(folder, "--eval-episodes 4") for _ in range(2))
    assert returns == again and len(returns) == 4
    check_both_evaluations(capsys.readouterr().out, returns)
    assert content(folder) == before


def test_capture_video(undisturbed, root, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    flags = f"--evaluate {folder} --eval-episodes 2 --capture-video"
    assert run(root / "ppo_cma.py", *flags.split()).returncode == 0
    videos = sorted((folder / "videos").glob("*.mp4"))
    assert len(videos) == 2
    assert all(video.stat().st_size > 1000 for video in videos)


def test_ones_own_loop_of_the_page(root, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/ppo_cma.md").read_text(), re.S)
    (code,) = [block for block in blocks if "update_with_memorized" in block]
    assert len(code.splitlines()) <= 22
    code = code.replace("1_000_000", "6000").replace("Args()", "Args(n_updates=5)")
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[0]) for line in lines]
    assert len(lines) >= 2
    assert steps == sorted(steps)
    assert all(np.isfinite(float(line.split()[1])) for line in lines)


# --- learning -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "at_least"),
    [
        (
            "--env-id MountainCarContinuous-v0 --iter-steps 4000 --minibatch-size 2048 "
            "--action-repeat 4 --total-timesteps 50000",
            88,
        ),
        # the original's return at 400,000 steps
        ("--env-id Hopper-v4 --iter-steps 8000 --minibatch-size 512 --total-timesteps 300000", 624),
    ],
    ids=["mountain_car", "hopper"],
)
def test_learns(flags, at_least, tmp_path):
    train(tmp_path / "run", f"{flags} --n-updates 100 --history-buffer-size 9")
    returns = [float(row[1]) for row in rows(tmp_path / "run")[1:]]
    assert np.mean(returns[-20:]) > at_least
