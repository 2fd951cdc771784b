"""ppo_kl_adaptive.py as a program: command line, run folder, resume, kills, evaluation, backends"""

import hashlib
import json
import os
import re
import runpy
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

import ppo_cma
import ppo_kl_adaptive as script
from ppo_kl_adaptive import PRESETS, Args

# Every KL is too high, which moves beta in each iteration and the learning rate from the second on
SMALL = (
    "--hid1-mult 4 --episodes-per-batch 5 --update-epochs 3 --value-epochs 2 --early-stop 0 "
    "--kl-targ 1e-9 --beta 15 --checkpoint-interval 2"
)
# 8 iterations each
SETUPS = {
    "whole": "--env-id InvertedPendulum-v4 --num-envs 3 --num-episodes 40",
    "choices": "--env-id CartPole-v1 --num-envs 2 --num-episodes 40",
    "wide": "--env-id CartPole-v1 --num-envs 6 --episodes-per-batch 6 --num-episodes 48",
    "cut": "--env-id InvertedPendulum-v4 --num-envs 2 --num-steps 20 --total-timesteps 320",
    "long": "--env-id Pendulum-v1 --num-envs 2 --num-steps 70 --total-timesteps 1120",
}


def parse(flags: str) -> Args:
    return script.parse_args(flags.split())


def train(folder: Path, flags: str) -> dict:
    """Train in this process; the final checkpoint."""
    script.train(parse(f"{SMALL} --run-dir {folder} {flags}"))
    return script.load_checkpoint(folder)


def resume(folder: Path, flags: str = "") -> dict:
    script.train(parse(f"--resume {folder} {flags}"))
    return script.load_checkpoint(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder and the final checkpoint of an undisturbed run of a setup."""
    done = {}

    def get(setup: str) -> tuple[Path, dict]:
        if setup not in done:
            folder = tmp_path_factory.mktemp(setup) / "run"
            done[setup] = folder, train(folder, SETUPS[setup])
            assert done[setup][1]["iteration"] == 8
        return done[setup]

    return get


SPACES = {
    "box": gym.spaces.Box(-1, 1, (1,)),
    "choice": gym.spaces.Discrete(2, start=1),
    "tuple": gym.spaces.Tuple([gym.spaces.Discrete(2)]),
    "dict": gym.spaces.Dict(a=gym.spaces.Discrete(2)),
    "multi": gym.spaces.MultiDiscrete([2, 3]),
    "bits": gym.spaces.MultiBinary(3),
    "matrix": gym.spaces.Box(-1, 1, (2, 2)),
}


class Pixels(Clockwork):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


for name, space in SPACES.items():
    gym.register(f"Clock_{name}-v0", Clockwork, kwargs={"action_space": space})
gym.register("Clock_pixels-v0", Pixels, kwargs={"action_space": SPACES["box"]})

# --- command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["_", "-"])
def test_flags_of_the_original(mark):
    line = "--env_name Hopper-v4 --num_episodes 30000 --gamma 0.995 --lam 0.98 --kl_targ 0.003 "
    line += "--batch_size 20 --hid1_mult 10 --policy_logvar -1.0"  # all the defaults but one
    args = parse(re.sub("(?<=[a-z0-9])_(?=[a-z])", mark, line))
    assert args == Args(env_id="Hopper-v4", num_episodes=30_000, **PRESETS["coady"])
    line = "--env_name Ant-v4 --num_episodes 9 --gamma 0.9 --lam 0.8 --kl_targ 0.02 "
    line += "--batch_size=7 --hid1_mult 3 --policy_logvar -0.5"
    wanted = Args(
        env_id="Ant-v4", num_episodes=9, gamma=0.9, gae_lambda=0.8, episodes_per_batch=7,
        hid1_mult=3, policy_logvar=-0.5, **PRESETS["coady"] | {"kl_targ": 0.02},
    )  # fmt: skip
    assert parse(re.sub("(?<=[a-z0-9])_(?=[a-z])", mark, line)) == wanted
    assert parse("--env-id Ant-v4 -n 9 -g 0.9 -l 0.8 -k 0.02 -b 7 -m 3 -v -0.5") == wanted


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--env_id Ant-v4", "env_id", "Ant-v4"), ("--gae_lambda=0.5", "gae_lambda", 0.5),
        ("--episodes-per-batch 5", "episodes_per_batch", 5), ("--ent_coef 0.1", "ent_coef", 0.1),
        ("--no-cuda", "cuda", False), ("--no_torch_deterministic", "torch_deterministic", False),
        ("--lr_servo never", "lr_servo", "never"), ("--roll_back", "roll_back", True),
        ("--early-stop 0", "early_stop", 0.0), ("--beta 0", "beta", 0.0),
        ("--total_timesteps 5", "total_timesteps", 5), ("--exp_name=x", "exp_name", "x"),
    ],
)  # fmt: skip
def test_kebab_and_snake_case(line, field, value):
    assert getattr(parse(line), field) == value


def test_run_time_fields_of_cleanrl_are_accepted_with_one_line(capsys):
    parse("--minibatch_size 7 --num-iterations=7")
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "--minibatch-size has no effect: --episodes-per-batch and" in captured.out
    assert "--num-iterations has no effect: --total-timesteps or" in captured.out
    assert captured.err == ""


def test_presets_and_what_overrides_them(tmp_path):
    schulman = {
        "kl_targ": 0.01, "beta": 1.0, "raise_above": 1.5, "raise_factor": 2.0,
        "lower_below": 1 / 1.5, "lower_factor": 2.0, "beta_min": 0.0, "beta_max": 1e9,
        "hinge_coef": 0.0, "early_stop": 0.0, "clip_coef": 0.0, "lr_servo": "never",
    }  # fmt: skip
    coady = {
        "kl_targ": 0.003, "beta": 1.0, "raise_above": 2.0, "raise_factor": 1.5,
        "lower_below": 0.5, "lower_factor": 1.5, "beta_min": 1 / 35, "beta_max": 35.0,
        "hinge_coef": 50.0, "early_stop": 4.0, "clip_coef": 0.0, "lr_servo": "with-beta",
    }  # fmt: skip
    fixed = schulman | {"raise_factor": 1.0, "lower_factor": 1.0}
    for line, numbers in (
        ("", coady),
        ("--servo schulman", schulman),
        ("--servo schulman --kl-targ 0.03", schulman | {"kl_targ": 0.03}),
        ("--beta-max 50 --servo schulman", schulman | {"beta_max": 50}),
        ("--servo fixed --beta 3", fixed | {"beta": 3}),
    ):
        assert asdict(parse(line)).items() >= numbers.items(), line
    rate = asdict(parse("--servo learning-rate"))
    assert (rate["kl_targ"], rate["beta"], rate["clip_coef"]) == (0.01, 0, 0.2)
    assert (rate["lr_servo"], rate["raise_above"], rate["lower_below"]) == ("with-kl", 2, 0.5)

    folder = tmp_path / "run"
    line = "--env-id InvertedPendulum-v4 --servo schulman --kl-targ 0.5 -n 40"
    script.train(parse(f"{line} --run-dir {folder}"))
    saved = json.loads((folder / "run.json").read_text())["args"]
    assert saved.items() >= (schulman | {"kl_targ": 0.5, "servo": "schulman"}).items()
    assert [value for _, value in scalars(folder)["charts/beta"]] == [0.5, 0.25]
    folder = tmp_path / "fixed"
    line = "--env-id InvertedPendulum-v4 --servo fixed --beta 3 --kl-targ 1e-6 -n 40"
    script.train(parse(f"{line} --run-dir {folder}"))
    assert [value for _, value in scalars(folder)["charts/beta"]] == [3, 3]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_learning_rate_servo_moves_the_rate_after_every_pass(epochs, tmp_path):
    flags = f"--env-id CartPole-v1 --servo learning-rate --kl-targ 1e-9 --update-epochs {epochs}"
    script.train(parse(f"{flags} -b 5 -n 5 --run-dir {tmp_path / 'run'}"))
    ((_, multiplier),) = scalars(tmp_path / "run")["charts/lr_multiplier"]
    assert multiplier == pytest.approx(1.5**-epochs)


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for servo in PRESETS:
        assert re.search(rf" {servo} (the above|the PPO paper|that of rl_games)", text), servo
    assert "Not OpenAI baselines' PPO1 or PPO2: those are both clipped" in text
    for flag in ("--env-name", "--lam", "-k {None}|FLOAT, --kl-targ", "--batch-size", "--resume"):
        assert flag in text


WRONG = [
    ("--env-id CartPol-v1", "near: CartPole-v1"),
    ("--env-id halfcheetah", "HalfCheetah-v"),
    ("--env-id Hopper-v9", "provides versioned environments"),
    ("--env-id Hopper-v2", "gymnasium-robotics"),
    ("--env-id Hoper-v4 --env-backend envpool", "Hopper-v4"),
    ("--env-id Pong-v5 --env-backend envpool", "one flat Box"),
    ("--env-id Clock_pixels-v0", "one flat Box"),
    ("--env-id Clock_multi-v0", "actions are MultiDiscrete([2 3]): this script needs a flat Box"),
    ("--env-id Clock_tuple-v0", "actions are Tuple(Discrete(2)): this script needs a flat Box"),
    ("--env-id Clock_dict-v0", "actions are Dict("),
    ("--env-id Clock_bits-v0", "actions are MultiBinary(3)"),
    ("--env-id Clock_matrix-v0", "this script needs a flat Box or Discrete"),
    ("--env-backend brax", "invalid choice 'brax' for argument '--env-backend'"),
    ("--servo kody", "invalid choice 'kody' for argument '--servo'"),
    ("--lr-servo sometimes", "invalid choice 'sometimes' for argument '--lr-servo'"),
    ("--total-timesteps 1e6", "--total-timesteps: invalid literal"),
    ("--total-timesteps 0", "--total-timesteps 0: must lie between 1"),
    ("-n -1", "--num-episodes -1: must lie between 0"),
    ("-n", "Missing value for argument"),
    ("-b 0", "--episodes-per-batch 0: must lie between 1"),
    ("--num-envs 0", "--num-envs 0"),
    ("--num-envs 21", "--num-envs 21: more than the 20 episodes of an iteration"),
    ("--num-steps -1", "--num-steps -1"),
    ("--num-steps 100 -n 100", "--num-episodes counts whole batches"),
    ("--update-epochs 0", "--update-epochs 0"),
    ("--value-epochs 0", "--value-epochs 0"),
    ("--num-minibatches 0", "--num-minibatches 0"),
    ("--hid1-mult 0", "--hid1-mult 0"),
    ("--num-threads 0", "--num-threads 0"),
    ("--eval-episodes 0", "--eval-episodes 0"),
    ("--checkpoint-interval 0", "--checkpoint-interval 0"),
    ("--minibatch-size -1", "--minibatch-size -1"),
    ("--learning-rate 0", "--learning-rate 0.0: must lie between 1e-09 and 1"),
    ("--value-learning-rate 2", "--value-learning-rate 2.0"),
    ("--policy-logvar 21", "--policy-logvar 21.0: must lie between -20 and 20"),
    ("--gamma 1.1", "--gamma 1.1: must lie between 0 and 1"),
    ("--gamma nan", "--gamma nan"),
    ("--lam -0.1", "--gae-lambda -0.1"),
    ("--seed -1", "--seed -1"),
    ("--kl-targ 0", "--kl-targ 0.0: must lie between 1e-09"),
    ("--kl-targ big", "no type matching {None}|FLOAT"),
    ("--beta -1", "--beta -1.0: must lie between 0"),
    ("--raise-factor 0.5", "--raise-factor 0.5: must lie between 1"),
    ("--lower-factor 0.5", "--lower-factor 0.5: must lie between 1"),
    ("--beta-min 2 --beta-max 1", "--beta-min 2: above --beta-max 1"),
    ("--beta-min 36", "--beta-min 36: above --beta-max 35"),
    ("--hinge-coef -1", "--hinge-coef -1"),
    ("--early-stop nan", "--early-stop nan"),
    ("--clip-coef -0.2", "--clip-coef -0.2"),
    ("--ent-coef -1", "--ent-coef -1"),
    ("--epsilon 0.2", "Unrecognized options: --epsilon"),
    ("--cuda False", "Unrecognized options: False"),
    ("--resume nowhere", "nowhere: no checkpoint.pt there"),
    ("--evaluate nowhere", "nowhere: no checkpoint.pt there"),
    ("--resume damaged", "damaged, or not a checkpoint"),
    ("--evaluate weights", "damaged, or not a checkpoint"),
    ("--resume foreign", "written by ppo_cma.py; use that script"),
    ("--resume a --evaluate b", "give one of them"),
    ("--resume a --run-dir b", "--run-dir is for a new run"),
    ("--run-dir full", "full: not empty; --resume"),
    ("--run-dir full/notes.txt", "full/notes.txt: File exists"),
    ("--track", "--track needs wandb: pip install wandb"),
    ("--capture-video", "--capture-video needs moviepy: pip install moviepy"),
]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(line, says, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "warm_up", lambda *_: None)  # never reached
    installed(monkeypatch, wandb=False, moviepy=False)
    for name in ("damaged", "weights", "foreign", "full"):
        (tmp_path / name).mkdir()
    torch.save({"critic.0.bias": torch.zeros(64)}, tmp_path / "weights" / "checkpoint.pt")
    half = (tmp_path / "weights" / "checkpoint.pt").read_bytes()[:800]
    (tmp_path / "damaged" / "checkpoint.pt").write_bytes(half)
    write_checkpoint(tmp_path / "foreign", {"script": "ppo_cma", "args": {}})
    (tmp_path / "full" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as end:
        script.train(parse(f"--env-id CartPole-v1 {line}"))
    assert end.value.code == 2
    captured = capfd.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("ppo_kl_adaptive.py: ")
    assert says in captured.err
    assert sorted(tmp_path.rglob("*")) == before  # no half-made run


def test_wrong_input_from_a_shell(tmp_path):
    result = run(script.__file__, "--env-id", "Hoper-v4", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Hopper-v4" in result.stderr
    assert not list(tmp_path.iterdir())


# --- the run's folder -----------------------------------------------------------------------------


def test_run_folder(undisturbed):
    folder, checkpoint = undisturbed("whole")
    info = json.loads((folder / "run.json").read_text())
    assert info["script"] == "ppo_kl_adaptive.py"
    assert info["status"] == "finished"
    assert info["seed"] == 1
    assert info["args"]["env_id"] == "InvertedPendulum-v4"
    assert info["args"]["beta_max"] == 35  # the preset's
    assert info["source_sha256"] == hashlib.sha256(Path(script.__file__).read_bytes()).hexdigest()
    assert info["versions"]["torch"] == torch.__version__
    assert info["versions"]["gymnasium"] == gym.__version__
    assert info["hardware"]["cores"] == os.cpu_count()
    assert info["wall_seconds"] > 0
    assert info["global_step"] == checkpoint["global_step"]

    with open(folder / "episodes.csv") as file:
        assert file.readline() == "global_step,seconds,return,length\n"
    episodes = np.array(rows(folder)[1:], float)
    steps, returns, lengths = episodes.T
    assert len(episodes) == 40
    assert (returns == lengths).all()  # InvertedPendulum-v4 pays 1 a step, also on the last one
    assert (np.diff(steps) >= 0).all()
    assert lengths.sum() == steps[-1] == checkpoint["global_step"]  # without the warm-up,
    assert checkpoint["agent"]["obs_moments.count"] > lengths.sum()  # which there was
    assert info["final_return"] == pytest.approx(returns.mean(), abs=1e-3)


@pytest.mark.parametrize("setup", ["whole", "choices"])
def test_tensorboard(setup, undisturbed):
    folder, checkpoint = undisturbed(setup)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    charts = "SPS learning_rate beta lr_multiplier policy_passes policy_std "
    charts += "share_environments share_inference share_update"
    losses = "policy_loss kl entropy value_loss explained_variance explained_variance_after"
    per_iteration = {f"charts/{x}" for x in charts.split()} | {
        f"losses/{x}" for x in losses.split()
    }
    if setup == "choices":
        per_iteration -= {"charts/policy_std"}
    per_episode = ["charts/episodic_return", "charts/episodic_length"]
    assert set(events.Tags()["scalars"]) == per_iteration | set(per_episode)
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]
    episodes = np.array(rows(folder)[1:], float)
    for column, tag in enumerate(per_episode, start=1):
        points = [[e.step, e.value] for e in events.Scalars(tag)]
        assert points == episodes[:, [0, column]].tolist()
    ends = [int(step) for step in episodes[4::5, 0]]  # of iterations of 5 episodes
    for tag in per_iteration:
        assert [e.step for e in events.Scalars(tag)] == ends, tag
        assert all(np.isfinite(e.value) for e in events.Scalars(tag)), tag
    betas, multipliers, rates, passes, kls = (
        np.array([e.value for e in events.Scalars(tag)])
        for tag in ("charts/beta", "charts/lr_multiplier", "charts/learning_rate",
                    "charts/policy_passes", "losses/kl")
    )  # fmt: skip
    assert betas == pytest.approx([22.5, 33.75] + 6 * [35])
    assert multipliers == pytest.approx([1.0] + [1.5**-k for k in range(1, 7)] + [1.5**-6])
    assert rates / multipliers == pytest.approx(8 * [rates[0]])
    assert (passes == 3).all()
    assert (kls > 2e-9).all()
    assert checkpoint["training"]["servo"]["beta"] == 35


def test_stdout_can_be_read_as_cleanrls(tmp_path, capsys):
    folder = tmp_path / "run"
    train(folder, "--env-id CartPole-v1 -n 10")
    out = capsys.readouterr().out
    found = re.findall(r"^global_step=(\d+), episodic_return=([\d.]+)$", out, re.M)
    assert [(int(s), float(r)) for s, r in found] == [
        (int(s), float(r)) for s, r, _ in rows(folder)[1:]
    ]
    assert len(re.findall(r"^SPS: \d+$", out, re.M)) == 2
    assert f"--evaluate {folder}\n" in out
    assert f"--resume {folder} --num-episodes 20\n" in out


def test_budgets(tmp_path):
    checkpoint = train(tmp_path / "episodes", "--env-id CartPole-v1 -b 20 -n 60 --num-envs 4")
    assert len(rows(tmp_path / "episodes")) == 1 + 60
    assert checkpoint["iteration"] == 3
    checkpoint = train(tmp_path / "steps", "--env-id CartPole-v1 --total-timesteps 500")
    *_, (before, _), (end, _) = scalars(tmp_path / "steps")["charts/beta"]
    assert before < 500 <= end == checkpoint["global_step"]
    flags = "--env-id CartPole-v1 --num-envs 2 --num-steps 30 --total-timesteps 100"
    checkpoint = train(tmp_path / "cut", flags)
    assert (checkpoint["global_step"], checkpoint["iteration"]) == (120, 2)


@pytest.mark.parametrize("setup", ["whole", "cut"])
def test_same_seed_same_bits(setup, undisturbed, tmp_path):
    folder, checkpoint = undisturbed(setup)
    assert_same(train(tmp_path / "again", SETUPS[setup]), checkpoint)
    assert rows(tmp_path / "again") == rows(folder)
    assert scalars(tmp_path / "again") == scalars(folder)
    other = train(tmp_path / "other", f"{SETUPS[setup]} --seed 2")
    assert rows(tmp_path / "other") != rows(folder)
    weight = "critic.0.weight"
    assert not torch.isclose(other["agent"][weight], checkpoint["agent"][weight]).any()


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_no_two_episodes_start_alike(backend):
    first = []
    for seed in range(1, 5):
        envs = script.make_envs(
            Args(env_id="InvertedPendulum-v4", env_backend=backend, num_envs=4, seed=seed)
        )
        for i in 3 * [0, 1, 2, 3]:
            envs.reset(i)
            first.append(tuple(envs.obs[i]))
        envs.close()
    assert len(set(first)) == len(first) == 48


def test_the_script_alone_in_an_empty_folder(tmp_path):
    shutil.copy(script.__file__, tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    flags = "--env_name InvertedPendulum-v4 -n 40 -g 0.99 -l 0.9 -k 0.01 -b 20 -m 5 -v -2"
    flags = f"{flags} --num-envs 2 --save-model"
    result = run("ppo_kl_adaptive.py", *flags.split(), cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    (folder,) = tmp_path.glob("runs/InvertedPendulum-v4__ppo_kl_adaptive__1__*")
    assert json.loads((folder / "run.json").read_text())["git_commit"] is None
    assert len(rows(folder)) == 41
    assert script.load_checkpoint(folder)["iteration"] == 2
    weights = torch.load(folder / "ppo_kl_adaptive.cleanrl_model", weights_only=True)
    assert_same(weights, script.load_checkpoint(folder)["agent"])
    assert weights["obs_moments.mean"].abs().min() > 0  # a policy is nothing without its scaler


def test_dependencies_in_the_header_are_the_projects(root):
    header = re.search(r"# /// script\n(.*?)# ///\n", Path(script.__file__).read_text(), re.S)
    header = tomllib.loads(re.sub("^# ?", "", header[1], flags=re.M))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert header["dependencies"] == project["dependencies"]
    assert header["requires-python"] == project["requires-python"]


def test_importing_does_nothing(tmp_path, monkeypatch, capfd):
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
    assert {"Args", "Agent", "train"} <= names.keys()
    assert "run_name" not in names


def test_driving_as_cleanrls_tuner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"{SMALL} --env-id CartPole-v1 -n 10 --capture-video --eval-episodes 1"
    monkeypatch.setattr(sys, "argv", [script.__file__, *flags.split()])
    name = runpy.run_path(script.__file__, run_name="__main__")["run_name"]
    assert re.fullmatch(r"CartPole-v1__ppo_kl_adaptive__1__\d+", name)
    assert len(scalars(tmp_path / "runs" / name)["charts/episodic_return"]) == 10
    (video,) = Path("runs", name, "videos").glob("*.mp4")
    assert video.stat().st_size > 1000


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v4"])
def test_agent_as_in_cleanrl(env_id):
    envs = gym.vector.SyncVectorEnv([lambda: gym.make(env_id)] * 3)
    agent = script.Agent(envs)
    obs = torch.Tensor(envs.reset(seed=1)[0])
    with torch.no_grad():
        action, logprob, entropy, value = agent.get_action_and_value(obs)
        same, again, _, later = agent.get_action_and_value(obs, action, torch.full((3,), 500))
        assert torch.equal(agent.get_value(obs, torch.zeros(3)), value)
    assert action.shape == ((3,) if env_id == "CartPole-v1" else (3, 3))
    assert logprob.shape == entropy.shape == value.shape == (3,)
    assert torch.equal(same, action)
    assert not torch.isclose(again, logprob).any()  # the policy and
    assert not torch.isclose(later, value).any()  # the value function see the time
    assert (envs.step(action.numpy())[1] > 0).all()
    envs.close()
    one = script.Agent(gym.make(env_id), Args(hid1_mult=2))
    assert one.actor[0].out_features == 2 * (obs.shape[1] + 1)
    with pytest.raises(ValueError, match="this script needs a flat Box or Discrete"):
        script.Agent(Clockwork(SPACES["multi"]))


def test_tracking_with_a_stand_in(tmp_path, monkeypatch):
    calls, folder = [], tmp_path / "run"

    def init(**kwargs):
        calls.append((kwargs, list(folder.glob("events.*"))))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=True, init=init))
    train(folder, "--env-id CartPole-v1 -n 5 --track --wandb-entity me")
    ((call, events),) = calls
    assert (call["project"], call["entity"], call["sync_tensorboard"]) == ("ppo", "me", True)
    assert call["config"]["beta"] == 15
    assert not events  # wandb only follows writers that are made after its init


# --- resume, kills, faults ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "target", "call", "iteration"),
    [
        ("whole", "Run.log_episode", 23, 4),  # in a rollout, 5 in each
        ("whole", "policy_loss", 5 * 4 + 3, 4),  # after the second pass, 4 in each
        ("whole", "explained_variance", 3 * 2 + 2, 2),  # after the value function's fit
        ("whole", "update", 1, 0),
        ("whole", "torch.save", 4, 4),  # the first is of iteration 0
        ("choices", "Run.log_episode", 33, 6),
        ("wide", "Run.log_episode", 3, 0),  # the warm-up has started 5 environments of 6
        ("wide", "Run.log_episode", 15, 2),
        ("choices", "explained_variance", 5 * 2 + 2, 4),
        ("cut", "policy_loss", 5 * 4 + 3, 4),
        ("cut", "torch.save", 3, 2),
        ("long", "GymnasiumEnvs.step", 3 * 200 + 4 * 70 + 35, 4),  # the warm-up's first
        ("long", "explained_variance", 3 * 2 + 2, 2),
    ],
)
def test_killed_and_resumed_is_undisturbed(setup, target, call, iteration, tmp_path, undisturbed):
    whole, wanted = undisturbed(setup)
    folder = tmp_path / "run"
    argv = f"{SMALL} {SETUPS[setup]} --run-dir {folder}".split()
    assert train_until_killed("ppo_kl_adaptive", target, call, argv) == -signal.SIGKILL
    interrupted = script.load_checkpoint(folder)  # readable
    assert interrupted["iteration"] == iteration
    if iteration:  # there is something to restore
        state = interrupted["training"]
        assert state["servo"]["beta"] > 30
        assert state["servo"]["lr_multiplier"] < 1
        assert len(state["replay"][1]) > 20
        running = ~state["envs"]["over"]
        assert running.all() if setup == "long" else running.any() == (setup == "cut")
    assert_same(resume(folder), wanted)
    assert rows(folder) == rows(whole)
    assert scalars(folder) == scalars(whole)
    assert status(folder) == "finished"


@pytest.mark.parametrize(("number", "setup"), [(signal.SIGTERM, "whole"), (signal.SIGINT, "cut")])
def test_a_signal_checkpoints_and_says_how_to_go_on(
    number, setup, tmp_path, undisturbed, capsys, monkeypatch
):
    plain, folder = script.rollout, tmp_path / "run"

    def rollout(agent, envs, run, args):
        if run and run.iteration == 2:
            os.kill(os.getpid(), number)
        return plain(agent, envs, run, args)

    monkeypatch.setattr(script, "rollout", rollout)
    numbers = signal.SIGTERM, signal.SIGINT
    handlers = [signal.getsignal(n) for n in numbers]
    with pytest.raises(SystemExit) as end:
        train(folder, SETUPS[setup])
    assert end.value.code == 128 + number
    captured = capsys.readouterr()
    assert f"go on with: python ppo_kl_adaptive.py --resume {folder}\n" in captured.out
    assert captured.err.count("stopping after this iteration") == 1
    assert [signal.getsignal(n) for n in numbers] == handlers
    assert script.load_checkpoint(folder)["iteration"] == 3
    assert status(folder) == "running"
    monkeypatch.setattr(script, "rollout", plain)
    assert_same(resume(folder), undisturbed(setup)[1])
    assert rows(folder) == rows(undisturbed(setup)[0])
    assert scalars(folder) == scalars(undisturbed(setup)[0])


def test_resume_extends_but_does_not_change_a_run(tmp_path, undisturbed, capsys):
    folder, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    train(folder, f"{SETUPS['whole']} -n 15")
    shutil.move(folder, moved)
    for flag in ("--seed 2", "--env-id Hopper-v4", "--servo schulman", "--gamma 0.9", "-k 0.1",
                 "--beta 1", "--num-envs 1", "--exp-name x", "--roll-back"):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            resume(moved, flag)
        assert end.value.code == 2
        err = capsys.readouterr().err
        assert "can't change in mid-run" in err
        assert flag.split()[0].replace("-k", "--kl-targ") in err
    resumed = resume(moved, "--num-episodes 40")
    assert_same(resumed, undisturbed("whole")[1])
    assert rows(moved) == rows(undisturbed("whole")[0])
    assert scalars(moved) == scalars(undisturbed("whole")[0])
    assert not folder.exists()


@pytest.mark.parametrize(
    ("what", "episode", "step"),
    [
        ("an observation", 5 + 3 * 5 + 2, 5),  # 5 of the warm-up, 5 in each iteration
        ("a reward", 5 + 3 * 5 + 2, 5),
        ("an observation", 5 + 3 * 5 + 4, 10),  # the last of an episode and of the iteration
    ],
)
def test_nan_stops_with_its_name_and_keeps_the_checkpoint(
    what, episode, step, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Clockwork, "nan", (what, episode, step))
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as end, np.errstate(invalid="ignore"):
        train(folder, "--env-id Clock_box-v0 -n 100")
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{folder}: stopped in iteration 4, after step ")
    assert f": {what} is not finite in step " in said and said.count("\n") == 1
    assert status(folder) == "failed"
    checkpoint = script.load_checkpoint(folder)
    assert checkpoint["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_nan_in_the_warm_up_stops_with_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Clockwork, "nan", ("an observation", 2, 5))
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as end, np.errstate(invalid="ignore"):
        train(folder, "--env-id Clock_box-v0 -n 100")
    assert end.value.code == 1
    assert "an observation is not finite" in capsys.readouterr().err
    if (folder / "checkpoint.pt").exists():  # else there was none to keep
        agent = script.load_checkpoint(folder)["agent"]
        assert all(x.isfinite().all() for x in agent.values())


def test_choices_that_start_at_1(tmp_path, monkeypatch):
    plain, actions = Clockwork.step, set()

    def step(env, action):
        actions.add(int(action))
        return plain(env, action)

    monkeypatch.setattr(Clockwork, "step", step)
    folder = tmp_path / "run"
    train(folder, "--env-id Clock_choice-v0 -n 20")
    script.evaluate(parse(f"--evaluate {folder}"))
    assert actions == {1, 2}


# --- evaluation, backends, compilation, learning --------------------------------------------------


@pytest.mark.parametrize("setup", ["whole", "choices", "cut"])
def test_evaluate_plays_the_mean_with_its_time_and_writes_nothing(
    setup, undisturbed, monkeypatch, capsys
):
    folder, checkpoint = undisturbed(setup)
    plain, times = script.Agent.act, []

    def act(agent, obs, time, noise=None):
        assert noise is None
        times.append(int(time[0]))
        (action,) = plain(agent, obs, time)
        policy = agent.policy(agent.features(torch.as_tensor(obs), torch.as_tensor(time)))
        best = policy[0].argmax() if agent.discrete else policy.mean[0]
        torch.testing.assert_close(torch.as_tensor(action), best, atol=1e-5, rtol=1e-5)
        return action[None]

    monkeypatch.setattr(script.Agent, "act", act)
    before = content(folder)
    flags = f"--evaluate {folder} --eval-episodes 4"
    returns = script.evaluate(parse(flags))
    assert times == [t for length in returns for t in range(int(length))]  # 1 is paid per step
    assert script.evaluate(parse(flags)) == returns
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == lines[5:]
    for i, line in enumerate(lines[:4]):
        assert line == f"eval_episode={i}, episodic_return={returns[i]:.2f}"
    assert lines[4].endswith(f"4 episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    assert content(folder) == before


def test_evaluate_a_copy_with_video(undisturbed, tmp_path):
    folder = tmp_path / "elsewhere"
    shutil.copytree(undisturbed("whole")[0], folder)
    before = content(folder)
    flags = f"--evaluate {folder} --eval-episodes 2"
    returns = script.evaluate(parse(flags))
    assert content(folder) == before
    assert script.evaluate(parse(f"{flags} --capture-video")) == returns
    videos = list((folder / "videos").glob("*.mp4"))
    assert len(videos) == 2
    assert all(video.stat().st_size > 1000 for video in videos)
    assert content(folder).items() >= before.items()


def test_evaluate_in_an_environment_that_does_not_fit(undisturbed, capsys):
    with pytest.raises(SystemExit) as end:
        script.evaluate(parse(f"--evaluate {undisturbed('whole')[0]} --env-id Hopper-v4"))
    assert end.value.code == 2
    assert "the checkpoint does not fit this environment" in capsys.readouterr().err


@pytest.mark.parametrize("setup", ["whole", "choices", "cut"])
def test_envpool_trains_and_resumes_with_new_episodes(setup, tmp_path, capsys):
    folder, again = tmp_path / "run", tmp_path / "again"
    cut = setup == "cut"
    first, more = ("--total-timesteps 200", "--total-timesteps 280") if cut else ("-n 25", "-n 35")
    flags = f"{SETUPS[setup]} --env-backend envpool {first}"
    checkpoint = train(folder, flags)
    assert checkpoint["iteration"] == 5
    assert_same(train(again, flags), checkpoint)  # whatever its threads do
    assert rows(again) == rows(folder)
    assert "resuming with new episodes" not in capsys.readouterr().out
    checkpoint = resume(folder, more)
    assert checkpoint["iteration"] == 7
    assert "resuming with new episodes" in capsys.readouterr().out
    _, returns, lengths = np.array(rows(folder)[1:], float).T
    assert (returns == lengths).all()
    if cut:
        assert checkpoint["global_step"] == 280 > lengths.sum()
        assert len(lengths) > 10
    else:  # all whole
        assert len(lengths) == 35
        assert checkpoint["global_step"] == lengths.sum()
    assert len(script.evaluate(parse(f"--evaluate {folder} --eval-episodes 2"))) == 2


@pytest.mark.parametrize("module", [ppo_cma, script], ids=lambda module: module.__name__)
def test_envpool_steps_in_threads(module, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    for num_envs, threads in ((2, 2), (4, 3)):
        argv = f"--env-id Hopper-v4 --env-backend envpool --num-envs {num_envs}"
        envs = module.EnvPoolEnvs(module.parse_args(argv.split()))
        assert envs.pool.config["num_threads"] == threads
        envs.close()


def test_envpool_answers_in_any_order():
    answers = [  # observation, reward, terminated, truncated of environments 4, 0 and 2
        ([[i]], [10 * i], [i == 2], [i == 0], {"env_id": [i]}) for i in (4, 0, 2)
    ]
    backend = object.__new__(script.EnvPoolEnvs)
    backend.pool = SimpleNamespace(send=lambda *_: None, recv=lambda: answers.pop(0))
    results = [x.tolist() for x in backend.step(np.array([0, 2, 4]), np.zeros(3))]
    assert results == [[[0], [2], [4]], [0, 20, 40], [False, True, False], [True, False, False]]


def test_without_a_compiler_training_goes_on_eagerly(undisturbed, tmp_path, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    checkpoint = train(tmp_path / "run", f"{SETUPS['whole']} --compile")
    assert capsys.readouterr().out.count("going on eagerly") == 1
    checkpoint["args"]["compile"] = False
    assert_same(checkpoint, undisturbed("whole")[1])


def assert_same_to_rounding(tmp_path: Path, *flags: str):
    """Two runs of two iterations learn the same."""
    plain, other = (
        train(tmp_path / flag, f"--env-id InvertedPendulum-v4 -n 10 {flag}") for flag in flags
    )
    for name, value in plain["agent"].items():
        torch.testing.assert_close(other["agent"][name], value, rtol=0, atol=1e-4)
    tags = [scalars(tmp_path / flag) for flag in flags]
    for tag in ("losses/policy_loss", "losses/value_loss", "losses/entropy"):
        for (step, a), (same, b) in zip(tags[0][tag], tags[1][tag], strict=True):
            assert step == same
            assert a == pytest.approx(b, abs=1e-4), tag


@pytest.mark.slow
def test_compiled_is_eager_to_rounding(tmp_path, capsys):
    assert_same_to_rounding(tmp_path, "--no-compile", "--compile")
    assert "going on eagerly" not in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_learning_on_a_gpu_is_learning_on_a_cpu(tmp_path, capsys):
    assert_same_to_rounding(tmp_path, "--no-cuda", "--cuda")
    assert "InvertedPendulum-v4, cuda" in capsys.readouterr().out
    assert resume(tmp_path / "--cuda", "-n 15")["iteration"] == 3


def test_learns_cartpole(tmp_path):
    folder = tmp_path / "run"
    script.train(parse(f"--env-id CartPole-v1 --total-timesteps 100000 --run-dir {folder}"))
    returns = [float(row[1]) for row in rows(folder)[1:]]
    assert np.mean(returns[-20:]) >= 475
