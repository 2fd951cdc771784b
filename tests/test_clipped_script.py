"""ppo.py and ppo_continuous_action.py as programs: command line, run folder, resume, kills,
evaluation, backends."""

import copy
import hashlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import threading
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
    content,
    installed,
    rows,
    run,
    scalars,
    status,
    train_until_killed,
    write_checkpoint,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
import ppo_continuous_action

SIZES = "--num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 2 --checkpoint-interval 2"
ENV_ID = {ppo: "CartPole-v1", ppo_continuous_action: "InvertedPendulum-v4"}  # both pay 1 a step
SMALL = {script: f"--env-id {env_id} {SIZES}" for script, env_id in ENV_ID.items()}
# 8 iterations, shorter than many of the episodes
LONG = {
    ppo: "--num-steps 16 --total-timesteps 256",
    ppo_continuous_action: "--env-id Hopper-v4 --num-steps 16 --total-timesteps 256",
}
BOTH = pytest.mark.parametrize("script", SMALL, ids=lambda module: module.__name__)


def train(script, folder: Path, flags: str) -> dict:
    """Train in this process; the final checkpoint."""
    script.train(script.parse_args(f"{SMALL[script]} --run-dir {folder} {flags}".split()))
    return script.load_checkpoint(folder)


def resume(script, folder: Path, flags: str = "") -> dict:
    script.train(script.parse_args(f"--resume {folder} {flags}".split()))
    return script.load_checkpoint(folder)


def assert_same_but(checkpoint: dict, other: dict, **changed):
    """Equal but for these arguments."""
    assert_same(checkpoint | {"args": checkpoint["args"] | changed}, other)


@pytest.fixture(scope="module", params=SMALL, ids=lambda module: module.__name__)
def script(request):
    return request.param


@pytest.fixture(scope="module")
def undisturbed(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, train(script, folder, "--total-timesteps 700")


@pytest.fixture(scope="module")
def long(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "run"
    checkpoint = train(script, folder, LONG[script])
    assert max(int(row[2]) for row in rows(folder)[1:]) > 16
    return folder, checkpoint


SPACES = {
    "ppo": gym.spaces.Discrete(2),
    "ppo_continuous_action": gym.spaces.Box(-1, 1, (1,)),
    "odd": gym.spaces.Tuple([gym.spaces.Discrete(2)]),
}
for name, space in SPACES.items():
    gym.register(f"Clockwork_{name}-v0", Clockwork, kwargs={"action_space": space})

# --- command line ---------------------------------------------------------------------------------

# Every flag of CleanRL's, with a value that is not the default; booleans come and go
CLEANRL = {
    "exp_name": "x", "seed": 7, "torch_deterministic": bool, "cuda": bool, "track": bool,
    "wandb_project_name": "p", "wandb_entity": "me", "capture_video": bool,
    "env_id": "Acrobot-v1", "total_timesteps": 12345, "learning_rate": 0.125, "num_envs": 3,
    "num_steps": 65, "anneal_lr": bool, "gamma": 0.5, "gae_lambda": 0.25, "num_minibatches": 5,
    "update_epochs": 6, "norm_adv": bool, "clip_coef": 0.375, "clip_vloss": bool,
    "ent_coef": 0.0625, "vf_coef": 0.75, "max_grad_norm": 1.5, "target_kl": 0.875,
    "batch_size": 8, "minibatch_size": 9, "num_iterations": 10,
}  # fmt: skip
CONTINUOUS = {"save_model": bool, "upload_model": bool, "hf_entity": "us"}


@BOTH
@pytest.mark.parametrize(
    ("mark", "joint", "on"),
    [("-", " ", True), ("-", "=", False), ("_", " ", False), ("_", "=", True)],
)
def test_every_flag_of_cleanrl_in_every_spelling(script, mark, joint, on, monkeypatch):
    installed(monkeypatch, wandb=True, huggingface_hub=True, moviepy=True)
    flags = CLEANRL | (CONTINUOUS if script is ppo_continuous_action else {})
    wanted = {name: on if value is bool else value for name, value in flags.items()}
    words = []
    for name, value in wanted.items():
        flag = name.replace("_", mark)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no{mark}{flag}")
        else:
            words += f"--{flag}{joint}{value}".split()
    assert asdict(script.parse_args(words)).items() >= wanted.items()


@BOTH
def test_run_time_fields_are_accepted_with_one_line(script, capsys):
    script.parse_args(["--batch-size", "7", "--minibatch_size=7", "--num-iterations=7"])
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    for says in (
        "--batch-size has no effect: --num-envs and --num-steps set it",
        "--minibatch-size has no effect: --num-minibatches sets it",
        "--num-iterations has no effect: --total-timesteps, --num-envs and --num-steps set it",
    ):
        assert says in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("ppo.py", 256),
        ("ppo_continuous_action.py --env-id Hopper-v4", 128),
        ("ppo_continuous_action.py --env-id dm_control/cartpole-balance-v0", 128),
    ],
)
def test_cleanrls_own_tests(line, steps, root, tmp_path):
    name, *argv = f"{line} --num-envs 1 --num-steps 64 --total-timesteps {steps}".split()
    result = run(root / name, *argv, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^SPS: \d+$", result.stdout, re.M)) == steps // 64


WRONG = [
    ("--env-id CartPol-v1", "CartPole-v1"),
    ("--env-id halfcheetah", "HalfCheetah-v"),
    ("--env-id Hopper-v9", "provides versioned environments"),
    ("--env-id Hopper-v2", "gymnasium-robotics"),
    ("--env-id Hoper-v4 --env-backend async", "Hopper-v4"),
    ("--env-id Hoper-v4 --env-backend envpool", "Hopper-v4"),
    ("--env-id Pong-v5 --env-backend envpool", "one flat Box"),
    ("--env-id Clockwork_odd-v0", "actions are Tuple(Discrete(2)): this script needs"),
    ("--env-backend brax", "invalid choice 'brax' for argument '--env-backend'"),
    ("--total-timesteps 1e6", "--total-timesteps: invalid literal"),
    ("--total-timesteps 0", "--total-timesteps 0: must lie between 1"),
    ("--num-envs -1", "--num-envs -1"),
    ("--num-steps 0", "--num-steps 0"),
    ("--num-minibatches 0", "--num-minibatches 0"),
    ("--update-epochs 0", "--update-epochs 0"),
    ("--eval-episodes 0", "--eval-episodes 0"),
    ("--checkpoint-interval 0", "--checkpoint-interval 0"),
    ("--num-threads 0", "--num-threads 0"),
    ("--batch-size -1", "--batch-size -1"),
    ("--learning-rate -0.1", "--learning-rate -0.1: must lie between 0"),
    ("--gamma 1.1", "--gamma 1.1: must lie between 0 and 1"),
    ("--gamma nan", "--gamma nan"),
    ("--gae-lambda -0.1", "--gae-lambda -0.1"),
    ("--clip-coef -0.1", "--clip-coef -0.1"),
    ("--target-kl -0.1", "--target-kl -0.1"),
    ("--seed -1", "--seed -1"),
    ("--num-envs 2 --num-steps 4 --num-minibatches 9", "more than the 8 samples of an iteration"),
    ("--epsilon 0.2", "Unrecognized options: --epsilon"),
    ("--cuda False", "Unrecognized options: False"),
    ("--resume nowhere", "nowhere: no checkpoint.pt there"),
    ("--evaluate nowhere", "nowhere: no checkpoint.pt there"),
    ("--resume a --evaluate b", "give one of them"),
    ("--resume a --run-dir b", "--run-dir is for a new run"),
    ("--resume damaged", "damaged, or not a checkpoint"),
    ("--resume weights", "damaged, or not a checkpoint"),
    ("--evaluate foreign", "written by ppo_cma.py; use that script"),
    ("--run-dir full", "full: not empty; --resume"),
    ("--run-dir full --env-backend async", "full: not empty; --resume"),
    ("--run-dir full/notes.txt", "full/notes.txt: File exists"),
    ("--track", "--track needs wandb: pip install wandb"),
    ("--capture-video", "--capture-video needs moviepy: pip install moviepy"),
]
OTHER = {ppo: "Pendulum-v1", ppo_continuous_action: "CartPole-v1"}
HINT = {ppo: "continuous; see ppo_continuous_action.py", ppo_continuous_action: "see ppo.py"}
ITS_OWN = [
    *(
        (script, f"--env-id {OTHER[script]} --env-backend {backend}", HINT[script])
        for script in SMALL for backend in ("gymnasium", "async", "envpool")
    ),
    (ppo_continuous_action, "--env-id dm_control/cartpole-balanc-v0", "cartpole-balance-v0"),
    (ppo_continuous_action, "--log-std-init 10", "--log-std-init 10.0: must lie between -9 and 9"),
    (ppo_continuous_action, "--upload-model", "--upload-model needs huggingface_hub"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "line", "says"),
    [(script, line, says) for script in SMALL for line, says in WRONG] + ITS_OWN,
)
def test_wrong_input_is_one_line_and_exit_code_2(script, line, says, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    installed(monkeypatch, wandb=False, moviepy=False, huggingface_hub=False)
    for name in ("damaged", "weights", "foreign", "full"):
        (tmp_path / name).mkdir()
    torch.save({"critic.0.bias": torch.zeros(64)}, tmp_path / "weights" / "checkpoint.pt")
    half = (tmp_path / "weights" / "checkpoint.pt").read_bytes()[:800]
    (tmp_path / "damaged" / "checkpoint.pt").write_bytes(half)
    write_checkpoint(tmp_path / "foreign", {"script": "ppo_cma", "args": {}})
    (tmp_path / "full" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as end:
        script.train(script.parse_args(f"--env-id {ENV_ID[script]} {line}".split()))
    assert end.value.code == 2
    captured = capfd.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"{script.__name__}.py: ")
    assert says in captured.err
    assert sorted(tmp_path.rglob("*")) == before  # no half-made run


@BOTH
@pytest.mark.parametrize("backend", ["async", "envpool"])
def test_wrong_input_from_a_shell(script, backend, tmp_path):
    argv = ("--env-id", OTHER[script], "--env-backend", backend)
    result = run(script.__file__, *argv, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert HINT[script] in result.stderr
    assert not list(tmp_path.iterdir())


@BOTH
def test_help_exits_0(script, capsys):
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--help"])
    assert end.value.code == 0
    assert "--anneal-lr, --no-anneal-lr" in capsys.readouterr().out


# --- the run's folder -----------------------------------------------------------------------------


def test_less_than_an_iteration_trains_nothing(script, tmp_path, capsys):
    checkpoint = train(script, tmp_path / "run", "--total-timesteps 127")
    out = capsys.readouterr().out
    assert out.count("nothing will be trained") == 1
    assert "--total-timesteps 127 is less than an iteration, 128" in out
    assert (checkpoint["iteration"], checkpoint["global_step"]) == (0, 0)
    assert status(tmp_path / "run") == "finished"
    assert "SPS" not in out


def test_run_folder(script, undisturbed):
    folder, checkpoint = undisturbed
    info = json.loads((folder / "run.json").read_text())
    assert info["script"] == f"{script.__name__}.py"
    assert info["status"] == "finished"
    assert info["seed"] == 1
    assert info["args"]["env_id"] == ENV_ID[script]
    assert info["args"]["total_timesteps"] == 700
    assert info["source_sha256"] == hashlib.sha256(Path(script.__file__).read_bytes()).hexdigest()
    assert info["versions"]["torch"] == torch.__version__
    assert info["versions"]["gymnasium"] == gym.__version__
    assert info["hardware"]["cores"] == os.cpu_count()
    assert info["wall_seconds"] > 0
    assert info["global_step"] == checkpoint["global_step"]
    assert checkpoint["iteration"] == 5  # 60 steps are no iteration

    with open(folder / "episodes.csv") as file:
        assert file.readline() == "global_step,seconds,return,length\n"
    episodes = np.array(rows(folder)[1:], float)
    steps, returns, lengths = episodes.T
    assert len(episodes) > 10
    assert (returns == lengths).all()  # both environments pay 1 a step
    assert (np.diff(steps) >= 0).all()
    assert steps[-1] <= info["global_step"] <= 640
    assert info["global_step"] - 128 < lengths.sum() <= info["global_step"]
    assert info["final_return"] == pytest.approx(returns[-100:].mean(), abs=1e-3)


CLEANRL_TAGS = {
    "charts/episodic_return", "charts/episodic_length", "charts/learning_rate", "charts/SPS",
    "losses/value_loss", "losses/policy_loss", "losses/entropy", "losses/old_approx_kl",
    "losses/approx_kl", "losses/clipfrac", "losses/explained_variance",
}  # fmt: skip


def test_tensorboard(script, undisturbed):
    folder, checkpoint = undisturbed
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert set(events.Tags()["scalars"]) >= CLEANRL_TAGS
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]
    episodes = np.array(rows(folder)[1:], float)
    for tag in events.Tags()["scalars"]:
        points = events.Scalars(tag)
        if tag.startswith("charts/episodic_"):
            column = 1 if tag.endswith("return") else 2
            assert [[e.step, e.value] for e in points] == episodes[:, [0, column]].tolist()
        else:
            assert len({e.step for e in points}) == len(points) == 5, tag
            assert points[-1].step == checkpoint["global_step"], tag
    rates = [script.Args.learning_rate * (1 - k / 5) for k in range(5)]
    got = [e.value for e in events.Scalars("charts/learning_rate")]
    assert got == [float(np.float32(rate)) for rate in rates]


def test_constant_learning_rate(script, tmp_path):
    train(script, tmp_path, "--no-anneal-lr --total-timesteps 384")
    rates = {value for _, value in scalars(tmp_path)["charts/learning_rate"]}
    assert rates == {float(np.float32(script.Args.learning_rate))}


def test_stdout_can_be_read_as_cleanrls(script, tmp_path, capsys):
    folder = tmp_path / "run"
    train(script, folder, "--total-timesteps 256")
    out = capsys.readouterr().out
    found = re.findall(r"^global_step=(\d+), episodic_return=([\d.]+)$", out, re.M)
    assert len(found) > 3
    assert [(int(s), float(r)) for s, r in found] == [
        (int(s), float(r)) for s, r, _ in rows(folder)[1:]
    ]
    assert len(re.findall(r"^SPS: \d+$", out, re.M)) == 2
    assert f"--evaluate {folder}\n" in out
    assert f"--resume {folder} --total-timesteps 512\n" in out


def test_episodes_that_end_together_are_logged_one_by_one(script, tmp_path):
    folder = tmp_path / "run"
    env_id = f"Clockwork_{script.__name__}-v0"
    checkpoint = train(script, folder, f"--env-id {env_id} --total-timesteps 128")
    # an episode takes 10 steps and a row for the reset; 9 more steps fit into the 64 rows
    assert rows(folder)[1:] == [[str(20 * e), "10.0", "10"] for e in range(1, 6) for _ in (0, 1)]
    assert checkpoint["global_step"] == 2 * (5 * 10 + 9)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--num-envs 1 --num-steps 4 --num-minibatches 4 --total-timesteps 8", None),
        ("--num-steps 50 --num-minibatches 3 --total-timesteps 200", 2 * 2 * 3),
        ("--target-kl 0 --total-timesteps 256", 2 * 1 * 2),  # one epoch
        ("--target-kl 1e9 --total-timesteps 256", 2 * 2 * 2),  # all
    ],
)
def test_gradient_steps(script, flags, steps, tmp_path):
    """Minibatches of one sample or of unequal sizes, and when the KL divergence stops an update."""
    checkpoint = train(script, tmp_path / "run", flags)
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())
    done = checkpoint["training"]["optimizer"]["steps"].item()
    assert done == steps if steps else 0 < done <= 2 * 2 * 4


def test_same_seed_same_bits(script, undisturbed, tmp_path):
    folder, checkpoint = undisturbed
    again = train(script, tmp_path / "again", "--total-timesteps 700")
    assert_same(again, checkpoint)
    assert rows(tmp_path / "again") == rows(folder)
    assert scalars(tmp_path / "again") == scalars(folder)
    other = train(script, tmp_path / "other", "--total-timesteps 700 --seed 2")
    assert rows(tmp_path / "other") != rows(folder)
    weight = "critic.0.weight"
    assert not torch.isclose(other["agent"][weight], checkpoint["agent"][weight]).all()


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_no_two_episodes_start_alike(script, backend):
    first = []
    for seed in range(6):
        args = script.Args(env_id=ENV_ID[script], env_backend=backend, num_envs=4, seed=seed)
        envs = script.make_envs(args)
        first += list(envs.obs)
        if backend == "gymnasium":
            first += [env.reset()[0] for env in envs.vector.envs for _ in range(5)]
        envs.close()
    assert len({tuple(obs.astype(np.float32)) for obs in first}) == len(first)


def test_the_script_alone_in_an_empty_folder(script, tmp_path):
    shutil.copy(script.__file__, tmp_path)
    if script is ppo:  # it needs no mujoco
        (tmp_path / "mujoco.py").write_text("raise ImportError")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    name = script.__name__
    flags = f"{SMALL[script]} --total-timesteps 256 --save-model"
    result = run(f"{name}.py", *flags.split(), cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    (folder,) = tmp_path.glob(f"runs/{ENV_ID[script]}__{name}__1__*")
    assert json.loads((folder / "run.json").read_text())["git_commit"] is None
    weights = torch.load(folder / f"{name}.cleanrl_model", weights_only=True)
    assert_same(weights, script.load_checkpoint(folder)["agent"])
    if script is ppo_continuous_action:  # a saved policy is nothing without its scaler
        assert weights["obs_moments.mean"].abs().min() > 0


def test_dependencies_in_the_header_are_the_projects(script, root):
    header = re.search(r"# /// script\n(.*?)# ///\n", Path(script.__file__).read_text(), re.S)
    header = tomllib.loads(re.sub("^# ?", "", header[1], flags=re.M))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"]
    if script is ppo:
        wanted = [d.replace("[mujoco]", "") for d in wanted if not d.startswith("mujoco")]
    assert header["dependencies"] == wanted
    assert header["requires-python"] == project["requires-python"]


def test_driving_as_cleanrls_tuner(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"{SMALL[script]} --total-timesteps 256 --capture-video --eval-episodes 1"
    monkeypatch.setattr(sys, "argv", [script.__file__, *flags.split()])
    threads = threading.active_count()
    name = runpy.run_path(script.__file__, run_name="__main__")["run_name"]
    assert re.fullmatch(rf"{ENV_ID[script]}__{script.__name__}__1__\d+", name)
    assert len(scalars(tmp_path / "runs" / name)["charts/episodic_return"]) > 3
    assert threading.active_count() == threads  # the event file is closed, its writer has ended
    (video,) = Path("videos", name).glob("*.mp4")
    assert video.stat().st_size > 1000
    plain = train(script, tmp_path / "plain", "--total-timesteps 256 --eval-episodes 1")
    filmed = script.load_checkpoint(tmp_path / "runs" / name)
    assert_same_but(filmed, plain, capture_video=False)


def test_importing_does_nothing(script, tmp_path, monkeypatch, capfd):
    def world():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return handlers, numbers, torch.get_num_threads(), dict(os.environ)

    monkeypatch.chdir(tmp_path)
    before = world()
    names = runpy.run_path(script.__file__, run_name="imported")
    assert world() == before
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
    assert {"Args", "make_env", "Agent"} <= names.keys()
    assert "run_name" not in names


def test_make_env_and_agent_as_in_cleanrl(script):
    more = [0.99] if script is ppo_continuous_action else []
    thunks = [script.make_env(ENV_ID[script], i, False, "name", *more) for i in range(2)]
    envs = gym.vector.SyncVectorEnv(thunks)
    agent = script.Agent(envs)
    obs = torch.Tensor(envs.reset(seed=1)[0])
    with torch.no_grad():
        action, logprob, entropy, value = agent.get_action_and_value(obs)
        same, again, _, _ = agent.get_action_and_value(obs, action)
        assert torch.equal(agent.get_value(obs), value)
    assert torch.equal(same, action)
    assert torch.equal(again, logprob)
    assert len(logprob) == len(entropy) == len(value) == 2
    if script is ppo:
        assert set(action.tolist()) <= {0, 1}
    after, rewards, *_ = envs.step(action.numpy())
    assert list(rewards) == [1, 1]
    assert not np.isclose(after, obs.numpy()).all()
    envs.close()


def test_tracking_and_upload_with_stand_ins(script, tmp_path, monkeypatch, capsys):
    calls = {}

    def record(name):
        return lambda **kwargs: calls.update({name: kwargs})

    hub = SimpleNamespace(
        whoami=lambda: {"name": "me"}, create_repo=lambda name, **_: calls.update(repo=name),
        upload_folder=record("upload"),
    )  # fmt: skip

    def init(**kwargs):  # before there is a writer for it to follow
        assert not (tmp_path / "run").exists()
        calls["init"] = kwargs

    modules = {"wandb": {"init": init}, "huggingface_hub": {"HfApi": lambda: hub}}
    for name, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=True, **stand_in))
    upload = "--upload-model" if script is ppo_continuous_action else ""
    train(script, tmp_path / "run", f"--total-timesteps 128 --track {upload}")
    assert calls["init"]["project"] == script.Args.wandb_project_name
    assert calls["init"]["sync_tensorboard"] is True
    assert calls["init"]["config"]["num_steps"] == 64
    if upload:
        assert calls["repo"] == "me/InvertedPendulum-v4-ppo_continuous_action-seed1"
        assert calls["upload"] == {"repo_id": calls["repo"], "folder_path": tmp_path / "run"}
        assert f"uploaded to {calls['repo']}" in capsys.readouterr().out


# --- resume, kills, faults ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "call", "iteration"),
    [("GymnasiumEnvs.step", 5 * 16 + 8, 4), ("ppo_loss", 5 * 4 + 2, 4), ("torch.save", 3, 2)],
)
def test_killed_and_resumed_is_undisturbed(script, target, call, iteration, tmp_path, long):
    folder = tmp_path / "run"
    argv = f"{SMALL[script]} {LONG[script]} --run-dir {folder}".split()
    assert train_until_killed(script.__name__, target, call, argv) == -signal.SIGKILL
    interrupted = script.load_checkpoint(folder)  # readable
    assert interrupted["iteration"] == iteration
    assert any(len(actions) for _, actions in interrupted["training"]["envs"]["progress"])
    assert_same(resume(script, folder), long[1])
    assert rows(folder) == rows(long[0])
    assert scalars(folder) == scalars(long[0])
    assert status(folder) == "finished"


@pytest.mark.parametrize(
    ("number", "backend"), [(signal.SIGTERM, "gymnasium"), (signal.SIGINT, "async")]
)
def test_a_signal_checkpoints_and_says_how_to_go_on(
    script, number, backend, tmp_path, long, capfd, monkeypatch
):
    plain, folder = script.rollout, tmp_path / "run"

    def rollout(agent, envs, run, args):
        if run.iteration == 2:  # as a terminal does, to the workers, too
            for process in [multiprocessing.current_process(), *multiprocessing.active_children()]:
                os.kill(process.pid, number)
        return plain(agent, envs, run, args)

    monkeypatch.setattr(script, "rollout", rollout)
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as end:
        train(script, folder, f"{LONG[script]} --env-backend {backend}")
    assert end.value.code == 128 + number
    captured = capfd.readouterr()
    assert f"go on with: python {script.__name__}.py --resume {folder}\n" in captured.out
    assert captured.err.count("stopping after this iteration") == 1
    assert signal.getsignal(number) is handler
    assert script.load_checkpoint(folder)["iteration"] == 3
    monkeypatch.setattr(script, "rollout", plain)
    assert_same_but(resume(script, folder), long[1], env_backend="gymnasium")
    assert rows(folder) == rows(long[0])
    assert scalars(folder) == scalars(long[0])


def test_resume_extends_but_does_not_change_a_run(script, tmp_path, capsys):
    folder, whole, constant = tmp_path / "run", tmp_path / "whole", "--no-anneal-lr"
    train(script, folder, f"{constant} --total-timesteps 384")
    for flag in ("--seed 2", "--env-id Acrobot-v1", "--learning-rate 0.1", "--anneal-lr",
                 "--num-envs 3", "--exp-name x", "--env-backend async"):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            resume(script, folder, flag)
        assert end.value.code == 2
        assert f"{flag.split()[0]} is " in capsys.readouterr().err
    resumed = resume(script, folder, "--total-timesteps 768")
    assert_same(resumed, train(script, whole, f"{constant} --total-timesteps 768"))
    assert rows(folder) == rows(whole)
    assert scalars(folder) == scalars(whole)


@pytest.mark.parametrize("backend", ["gymnasium", "async"])
def test_resumed_where_an_episode_had_just_ended(script, backend, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    env_id = f"Clockwork_{script.__name__}-v0"
    flags = f"--env-id {env_id} --num-steps 10 --no-anneal-lr --env-backend {backend}"
    first = train(script, folder, f"{flags} --total-timesteps 20")
    assert first["training"]["envs"]["over"].all()
    resumed = resume(script, folder, "--total-timesteps 80")
    assert_same(resumed, train(script, whole, f"{flags} --total-timesteps 80"))
    assert rows(folder) == rows(whole)


@pytest.mark.parametrize(
    ("what", "episode", "step"),
    [
        ("an observation", 20, 5),
        ("a reward", 20, 5),
        ("an observation", 20, 10),  # the last of an episode
        ("an observation", 23, 3),  # the last of an iteration
    ],
)
def test_nan_stops_with_its_name_and_keeps_the_checkpoint(
    script, what, episode, step, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Clockwork, "nan", (what, episode, step))
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as end, np.errstate(invalid="ignore"):
        env_id = f"Clockwork_{script.__name__}-v0"
        train(script, folder, f"--env-id {env_id} --total-timesteps 900")
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{folder}: stopped in iteration 4, after step ")
    assert f": {what} is not finite in step " in said and said.count("\n") == 1
    assert status(folder) == "failed"
    checkpoint = script.load_checkpoint(folder)
    assert checkpoint["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# --- evaluation, backends, compilation ------------------------------------------------------------


def test_evaluate_is_deterministic_and_writes_nothing(script, undisturbed, monkeypatch, capsys):
    folder, _ = undisturbed
    monkeypatch.setattr(script.Agent, "noise", None)  # not needed
    before = content(folder)
    argv = ["--evaluate", str(folder), "--eval-episodes", "4"]
    returns, again = (script.evaluate(script.parse_args(argv)) for _ in range(2))
    assert returns == again
    assert len(returns) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == lines[5:]
    for i, line in enumerate(lines[:4]):
        assert line == f"eval_episode={i}, episodic_return={returns[i]:.2f}"
    assert lines[4].endswith(f"4 episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    assert content(folder) == before


def test_evaluate_in_an_environment_that_does_not_fit(script, undisturbed, capsys):
    env_id = {ppo: "Acrobot-v1", ppo_continuous_action: "Hopper-v4"}[script]
    with pytest.raises(SystemExit) as end:
        script.evaluate(script.parse_args(["--evaluate", str(undisturbed[0]), "--env-id", env_id]))
    assert end.value.code == 2
    assert "the checkpoint does not fit this environment" in capsys.readouterr().err


def test_capture_video(script, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    before = content(folder)
    argv = ["--evaluate", str(folder), "--eval-episodes", "2", "--capture-video"]
    script.evaluate(script.parse_args(argv))
    videos = list((folder / "videos").glob("*.mp4"))
    assert len(videos) == 2
    assert all(video.stat().st_size > 1000 for video in videos)
    assert content(folder).items() >= before.items()


def test_envpool_trains_and_resumes_with_new_episodes(script, tmp_path, capsys):
    folder = tmp_path / "run"
    flags = "--env-backend envpool --num-envs 3 --total-timesteps 576"
    checkpoint = train(script, folder, flags)
    assert checkpoint["iteration"] == 3
    assert_same(train(script, tmp_path / "again", flags), checkpoint)  # whatever its threads do
    assert rows(tmp_path / "again") == rows(folder)
    episodes = np.array(rows(folder)[1:], float)
    assert len(episodes) > 10
    assert (episodes[:, 1] == episodes[:, 2]).all()
    assert "resuming with new episodes" not in capsys.readouterr().out
    assert resume(script, folder, "--total-timesteps 768")["iteration"] == 4
    assert "resuming with new episodes" in capsys.readouterr().out
    episodes = np.array(rows(folder)[1:], float)
    assert (episodes[:, 1] == episodes[:, 2]).all()
    args = script.parse_args(["--evaluate", str(folder), "--eval-episodes", "2"])
    assert len(script.evaluate(args)) == 2


def test_async_is_gymnasium_in_other_processes(script, undisturbed, tmp_path):
    folder = tmp_path / "run"
    checkpoint = train(script, folder, "--env-backend async --total-timesteps 700")
    assert_same_but(checkpoint, undisturbed[1], env_backend="gymnasium")
    assert rows(folder) == rows(undisturbed[0])


def test_without_a_compiler_training_goes_on_eagerly(
    script, undisturbed, tmp_path, monkeypatch, capsys
):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    checkpoint = train(script, tmp_path / "run", "--compile-from 0 --total-timesteps 700")
    assert capsys.readouterr().out.count("going on eagerly") == 1
    assert_same_but(checkpoint, undisturbed[1], compile_from=15_000)


def test_short_runs_are_not_compiled(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", None)
    train(script, tmp_path / "run", "--total-timesteps 128")  # 2 x 4 gradient steps
    assert ", cpu, eager, " in capsys.readouterr().out


def one_iteration(script, folder: Path, flags: str):
    """At the default sizes: how far log-ratios are from 0 before the first step; the losses of an
    iteration; the agent after it."""
    argv = f"--env-id {ENV_ID[script]} --total-timesteps 4096 --compile-from 0 --run-dir {folder}"
    args = script.parse_args([*argv.split(), *flags.split()])
    envs, agent, run = script.set_up(args)
    data, step, logratios = script.rollout(agent, envs, run, args), agent.minibatch_step, []

    def spy(agent, batch, rows, learning_rate, args):
        if not logratios:
            other = copy.deepcopy(agent)
            for i in range(0, len(batch.values), 37):  # a sample twice: two rows are the fewest
                metrics = step(other, batch, torch.tensor([i, i]), 0 * learning_rate, args)
                logratios.append(metrics[script.METRICS.index("old_approx_kl")].item())
        return step(agent, batch, rows, learning_rate, args)

    agent.minibatch_step = spy
    losses = script.update(agent, data, 3e-4, args)
    envs.close()
    run.close("finished")
    return np.abs(logratios), losses, agent.state_dict()


def check_compiled_is_eager(script, tmp_path, capsys, flags: str):
    eager = one_iteration(script, tmp_path / "eager", f"{flags} --no-compile")
    compiled = one_iteration(script, tmp_path / "compiled", flags)
    said = capsys.readouterr().out
    assert ", eager, " in said and ", compiled in " in said
    for logratios, losses, _ in (eager, compiled):
        assert len(logratios) >= 14 and logratios.max() < 1e-5
        assert abs(losses["losses/approx_kl"]) > 1e-5  # something was learned
    assert compiled[1] == pytest.approx(eager[1], abs=1e-4)
    for name, value in eager[2].items():
        torch.testing.assert_close(compiled[2][name], value, rtol=0, atol=1e-4)


def test_compiled_is_eager_to_rounding(script, tmp_path, capsys):
    check_compiled_is_eager(script, tmp_path, capsys, "--no-cuda")


@pytest.mark.slow
def test_another_environment_is_compiled_anew(script, tmp_path, capsys):
    another = {"ppo": "Acrobot-v1", "ppo_continuous_action": "Pendulum-v1"}[script.__name__]
    one_iteration(script, tmp_path / "one", "--no-cuda")
    check_compiled_is_eager(script, tmp_path, capsys, f"--no-cuda --env-id {another}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("flags", ["", "--cudagraphs"])
def test_compiled_on_a_gpu_is_eager_to_rounding(flags, script, tmp_path, capsys):
    check_compiled_is_eager(script, tmp_path, capsys, f"--cuda {flags}")


@pytest.mark.slow
def test_compiled_runs_resume_to_the_same_bits(script, tmp_path):
    train(script, tmp_path / "parts", "--compile-from 0 --no-anneal-lr --total-timesteps 128")
    whole = train(
        script, tmp_path / "whole", "--compile-from 0 --total-timesteps 256 --no-anneal-lr"
    )
    parts = resume(script, tmp_path / "parts", "--total-timesteps 256")
    assert_same(parts["agent"], whole["agent"])
