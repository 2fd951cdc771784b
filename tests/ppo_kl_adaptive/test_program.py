"""ppo_kl_adaptive.py as a program: command line, run folder, resume, evaluation, compilation. What
all scripts promise is in every/."""

import json
import os
import re
import runpy
import shutil
import signal
import tomllib
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import (
    Clockwork,
    assert_same,
    check_both_evaluations,
    content,
    rows,
    run,
    scalars,
)

import ppo_kl_adaptive as script
from ppo_kl_adaptive import PRESETS, Args

# Every KL is too high, which moves beta in each iteration and the learning rate from the second on
SMALL = (
    "--hid1-mult 4 --episodes-per-batch 5 --update-epochs 3 --value-epochs 2 --kl-targ 1e-9 "
    "--beta 15 --checkpoint-interval 2 --no-cuda"
)
# 8 iterations each
SETUPS = {
    "whole": "--env-id InvertedPendulum-v4 --num-envs 3 --num-episodes 40",
    "choices": "--env-id CartPole-v1 --num-envs 2 --num-episodes 40",
    "wide": "--env-id CartPole-v1 --num-envs 6 --episodes-per-batch 6 --num-episodes 48",
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


def plain(checkpoint: dict, **changed) -> dict:
    """With these arguments changed."""
    return checkpoint | {"args": asdict(checkpoint["args"]) | changed}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder and the final checkpoint of an undisturbed run of a setup."""
    done = {}

    def get(setup: str) -> tuple[Path, dict]:
        if setup not in done:
            folder = tmp_path_factory.mktemp(setup) / "run"
            done[setup] = folder, train(folder, SETUPS[setup])
            assert done[setup][1]["counters"][1] == 8
        return done[setup]

    return get


SPACES = {
    "choice": gym.spaces.Discrete(2, start=1),
    "multi": gym.spaces.MultiDiscrete([2, 3]),
    "bits": gym.spaces.MultiBinary(3),
    "matrix": gym.spaces.Box(-1, 1, (2, 2)),
}


class Pixels(Clockwork):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


class Varied(Clockwork):
    """Observes a Dict, pays an integer in the first episode and may write into its action."""

    observation_space = gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Box(-1, 1, (2, 2)))

    def __init__(self):
        super().__init__(gym.spaces.Box(-1, 1, (1,)))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": 2, "b": np.zeros((2, 2))}, {}

    def step(self, action):
        *_, over, _, info = super().step(action)
        action[:] = np.nan
        reward = 1 if self.episode % 5 == 0 else 0.75
        return {"a": self.t % 3, "b": np.ones((2, 2))}, reward, over, False, info


for name, space in SPACES.items():
    gym.register(f"Clock_{name}-v0", Clockwork, kwargs={"action_space": space})
gym.register("Clock_pixels-v0", Pixels, kwargs={"action_space": gym.spaces.Box(-1, 1, (1,))})
gym.register("Varied-v0", Varied)

# --- command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["_", "-"])
def test_flags_of_the_original(mark):
    line = "--env_name Hopper-v4 --num_episodes 30000 --gamma 0.995 --lam 0.98 --kl_targ 0.003 "
    line += "--batch_size 20 --hid1_mult 10 --policy_logvar -1.0"  # all the defaults but two
    args = parse(re.sub("(?<=[a-z0-9])_(?=[a-z])", mark, line))
    assert args == Args(env_id="Hopper-v4", num_episodes=30_000, kl_targ=0.003)
    line = "--env_name Ant-v4 --num_episodes 9 --gamma 0.9 --lam 0.8 --kl_targ 0.02 "
    line += "--batch_size=7 --hid1_mult 3 --policy_logvar -0.5"
    wanted = Args(
        env_id="Ant-v4", num_episodes=9, gamma=0.9, gae_lambda=0.8, episodes_per_batch=7,
        hid1_mult=3, policy_logvar=-0.5, kl_targ=0.02,
    )  # fmt: skip
    assert parse(re.sub("(?<=[a-z0-9])_(?=[a-z])", mark, line)) == wanted
    short = "-n 9 -g 0.9 -l 0.8 -k 0.02 -b 7 -m 3 -v -0.5"
    assert parse(f"--env-id Ant-v4 {short}") == wanted
    assert parse(f"Ant-v4 {short}") == wanted  # the original's way to name the environment


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--env_id Ant-v4", "env_id", "Ant-v4"), ("--gae_lambda=0.5", "gae_lambda", 0.5),
        ("--episodes-per-batch 5", "episodes_per_batch", 5), ("--beta 0", "beta", 0.0),
        ("--no-cuda", "cuda", False), ("--no_torch_deterministic", "torch_deterministic", False),
        ("--lambda_returns", "lambda_returns", True), ("--exp_name=x", "exp_name", "x"),
    ],
)  # fmt: skip
def test_kebab_and_snake_case(line, field, value):
    assert getattr(parse(line), field) == value


def test_help_tells_of_the_servos(capsys):
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for servo in PRESETS:
        assert f"`{servo}`" in text or f"`--servo {servo}`" in text
    for flag in ("--env-name", "--lam", "-k {None}|FLOAT, --kl-targ", "--batch-size", "--resume"):
        assert flag in text


WANTED = "a Box or Discrete of actions is wanted; several choices: ppo.py"
WRONG = [
    (
        "--env-id Clock_pixels-v0",
        "uint8): observations are no vector (MiniGrid: a Flat wrapper); pixels: ppo_pixels.py",
    ),
    ("--env-id Clock_multi-v0", f"MultiDiscrete([2 3]): {WANTED}"),
    ("--env-id Clock_bits-v0", f"MultiBinary(3): {WANTED}"),
    ("Hoper-v4", "Did you mean: `Hopper`"),
    ("--learning-rate 0", "--learning-rate 0.0: not in 1e-09 ..."),
    ("--value-learning-rate 0", "--value-learning-rate 0.0: not in 1e-09 ..."),
    ("--policy-logvar 21", "--policy-logvar 21.0: not in -20 ... 20"),
    ("--kl-targ big", "no type matching {None}|FLOAT"),
    ("--num-episodes -1", "--num-episodes -1: not in 0 ..."),
    ("--num-envs 21", "--num-envs 21: not in 1 ... 20"),
    ("--num-steps 100", "Unrecognized options: --num-steps"),
]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_wrong_input_is_told_with_exit_code_2(line, says, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        script.train(parse(line))
    assert end.value.code == 2
    err = " ".join(word for word in capfd.readouterr().err.split() if word != "│")
    assert says in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


# --- the run's folder -----------------------------------------------------------------------------


def test_run_folder(undisturbed):
    folder, checkpoint = undisturbed("whole")
    info = json.loads((folder / "run.json").read_text())
    assert (info["script"], info["status"]) == ("ppo_kl_adaptive.py", "finished")
    assert info["args"] == asdict(checkpoint["args"])
    global_step, _, seconds, size = checkpoint["counters"]
    assert info["global_step"] == global_step
    assert 0 < seconds <= info["wall_seconds"] + 0.01
    assert size == 40  # rows
    assert (folder / "episodes.csv").read_text().startswith("global_step,seconds,return,length\n")
    episodes = np.array(rows(folder)[1:], float)
    steps, returns, lengths = episodes.T
    assert len(episodes) == 40
    assert (returns == lengths).all()  # InvertedPendulum-v4 pays 1 a step, also on the last one
    assert (np.diff(steps) >= 0).all()
    assert lengths.sum() == steps[-1] == global_step  # without the warm-up,
    assert checkpoint["agent"]["obs_moments.count"] > lengths.sum()  # which there was
    assert info["final_return"] == pytest.approx(returns.mean(), abs=1e-3)


@pytest.mark.parametrize("setup", ["whole", "choices"])
def test_tensorboard(setup, undisturbed):
    folder, checkpoint = undisturbed(setup)
    charts = "SPS learning_rate beta lr_multiplier policy_passes policy_std"
    losses = "policy_loss kl entropy value_loss explained_variance"
    per_iteration = {f"charts/{x}" for x in charts.split()}
    per_iteration |= {f"losses/{x}" for x in losses.split()}
    if setup == "choices":
        per_iteration -= {"charts/policy_std"}
    points = scalars(folder, timed=True)
    episodes = np.array(rows(folder)[1:], float)
    steps = sorted(set(episodes[:, 0]))  # of episodes that end in one step, the mean
    for column, tag in ((1, "charts/episodic_return"), (2, "charts/episodic_length")):
        means = [episodes[episodes[:, 0] == step, column].mean() for step in steps]
        assert [step for step, _ in points[tag]] == steps
        assert [value for _, value in points.pop(tag)] == pytest.approx(means)
    assert set(points) == per_iteration
    ends = [int(step) for step in episodes[4::5, 0]]  # of iterations of 5 episodes
    values = {}
    for tag in per_iteration:
        assert [step for step, _ in points[tag]] == ends, tag
        values[tag.split("/")[1]] = np.array([value for _, value in points[tag]])
        assert np.isfinite(values[tag.split("/")[1]]).all(), tag
    assert values["beta"] == pytest.approx([22.5, 33.75] + 6 * [35])
    multipliers = [1.0] + [1.5**-k for k in range(1, 7)] + [1.5**-6]
    assert values["lr_multiplier"] == pytest.approx(multipliers)
    assert values["learning_rate"] / multipliers == pytest.approx([values["learning_rate"][0]] * 8)
    # the first pass has no KL to stop at, and the one after it may move nothing
    assert values["policy_passes"].min() >= 1 and values["policy_passes"].max() <= 3
    assert (values["kl"] > 2e-9).all()
    assert checkpoint["servo"]["beta"] == 35


@pytest.mark.parametrize(
    ("flags", "betas"),
    [("--servo schulman --kl-targ 0.5", [0.5, 0.25]), ("--servo fixed --beta 3 -k 1e-6", [3, 3])],
)
def test_servos(flags, betas, tmp_path):
    script.train(parse(f"InvertedPendulum-v4 {flags} -n 40 --run-dir {tmp_path / 'run'}"))
    assert [value for _, value in scalars(tmp_path / "run")["charts/beta"]] == betas


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_learning_rate_servo_moves_the_rate_after_every_pass(epochs, tmp_path):
    flags = f"--env-id CartPole-v1 --servo learning-rate --kl-targ 1e-9 --update-epochs {epochs}"
    script.train(parse(f"{flags} -b 5 -n 5 --run-dir {tmp_path / 'run'}"))
    ((_, multiplier),) = scalars(tmp_path / "run")["charts/lr_multiplier"]
    assert multiplier == pytest.approx(1.5**-epochs)


def test_budgets(tmp_path):
    checkpoint = train(tmp_path / "episodes", "--env-id CartPole-v1 -b 20 -n 60 --num-envs 4")
    assert len(rows(tmp_path / "episodes")) == 1 + 60
    assert checkpoint["counters"][1] == 3
    checkpoint = train(tmp_path / "steps", "--env-id CartPole-v1 --total-timesteps 500")
    *_, (before, _), (end, _) = scalars(tmp_path / "steps")["charts/beta"]
    assert before < 500 <= end == checkpoint["counters"][0]


def test_the_script_alone_in_an_empty_folder(tmp_path):
    shutil.copy(script.__file__, tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    flags = "InvertedPendulum-v4 -n 40 -g 0.99 -l 0.9 -k 0.01 -b 20 -m 5 -v -2"
    flags = f"{flags} --num-envs 2 --save-model"
    result = run("ppo_kl_adaptive.py", *flags.split(), cwd=tmp_path, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    (folder,) = tmp_path.glob("runs/InvertedPendulum-v4__ppo_kl_adaptive__1__*")
    printed = re.findall(r"^global_step=(\d+), episodic_return=([\d.]+)$", result.stdout, re.M)
    assert [(int(s), float(r)) for s, r in printed] == [
        (int(s), float(r)) for s, r, _ in rows(folder)[1:]
    ]
    final = json.loads((folder / "run.json").read_text())["final_return"]
    said = f"return {final} over the last 100 episodes; play: python ppo_kl_adaptive.py --evaluate"
    assert result.stdout.endswith(f"{said} runs/{folder.name}\n")
    assert script.load_checkpoint(folder)["counters"][1] == 2
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
    assert {"Args", "Agent"} <= runpy.run_path(script.__file__, run_name="imported").keys()
    assert world() == before
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v4"])
def test_an_agent_of_ones_own(env_id):
    env = gym.make(env_id)
    agent = script.Agent(env)
    obs = np.stack([env.reset(seed=seed)[0] for seed in range(3)])
    actions = agent.act(obs, agent.noise(3), time=[0, 7, 500])
    assert actions.shape == (3, *env.action_space.shape)
    assert env.step(actions[2])[1] > 0
    probabilities = []
    for time in (torch.zeros(3), torch.full((3,), 500)):  # the policy sees the time
        with torch.no_grad():
            policy = agent.policy(agent.features(torch.as_tensor(obs), time))
        probabilities.append(policy.log_prob(torch.as_tensor(actions)))
    assert probabilities[0].shape == (3,)
    assert not torch.isclose(*probabilities).any()
    with torch.no_grad():  # as CleanRL's
        action, logprob, entropy, value = agent.get_action_and_value(torch.as_tensor(obs))
        same, late, _, later = agent.get_action_and_value(torch.as_tensor(obs), action, 500)
    assert env.step(action[0].numpy())[1] > 0
    assert torch.equal(same, action)
    assert logprob.shape == entropy.shape == value.shape == (3,)
    assert not torch.isclose(late, logprob).any()
    assert not torch.isclose(later, value).any()
    if env_id == "CartPole-v1":
        p = logprob.exp()  # of two
        torch.testing.assert_close(entropy, -p * p.log() - (1 - p) * (1 - p).log())
    small = script.Agent(env, Args(hid1_mult=2))
    assert small.actor[0].out_features == 2 * (obs.shape[1] + 1)


# --- resume, kills, environments ------------------------------------------------------------------


def test_resume_extends_a_run_that_was_moved(tmp_path, undisturbed):
    folder, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    train(folder, f"{SETUPS['whole']} -n 15")
    shutil.move(folder, moved)
    assert_same(resume(moved, "--num-episodes 40"), undisturbed("whole")[1])
    assert rows(moved) == rows(undisturbed("whole")[0])
    assert scalars(moved) == scalars(undisturbed("whole")[0])
    assert not folder.exists()


def test_episodes_are_counted_whatever_the_batch_was(tmp_path):
    train(tmp_path / "run", "--env-id CartPole-v1 --num-envs 2 --num-episodes 10")
    assert resume(tmp_path / "run", "-b 10 --num-episodes 30")["counters"][1] == 4
    assert len(rows(tmp_path / "run")) == 1 + 30


def test_choices_that_start_at_1(tmp_path, monkeypatch):
    step, actions = Clockwork.step, set()

    def spy(env, action):
        actions.add(int(action))
        return step(env, action)

    monkeypatch.setattr(Clockwork, "step", spy)
    folder = tmp_path / "run"
    train(folder, "--env-id Clock_choice-v0 -n 20")
    script.evaluate(parse(f"--evaluate {folder}"))
    assert actions == {1, 2}


def test_a_varied_environment(tmp_path):
    """Rewards are floats, whatever the first is; what is done to an action is not learned from."""
    checkpoint = train(tmp_path, "--env-id Varied-v0 -n 20")
    returns = sorted(float(row[1]) for row in rows(tmp_path)[1:])
    assert returns == [7.5] * 16 + [10.0] * 4
    assert checkpoint["agent"]["obs_moments.mean"].shape == (7,)
    assert checkpoint["replay"][1].min().item() == pytest.approx(0.005 * 0.75)


# --- evaluation, compilation, learning ------------------------------------------------------------


@pytest.mark.parametrize("setup", ["whole", "choices"])
def test_evaluate_plays_the_mean_with_its_time_and_writes_nothing(
    setup, undisturbed, monkeypatch, capsys
):
    folder, _ = undisturbed(setup)
    plain, times = script.Agent.numpy_actor, []

    def numpy_actor(agent):
        act = plain(agent)

        def spied(obs, noise=None, time=0):
            if noise is not None:
                return act(obs, noise, time)
            times.extend(np.ravel(time).tolist())
            action = act(obs, noise, time)
            policy = agent.policy(agent.features(torch.as_tensor(obs), time))
            best = policy[0].argmax() if agent.discrete else policy.mean[0]
            torch.testing.assert_close(torch.as_tensor(action[0]), best, atol=1e-5, rtol=1e-5)
            return action

        return spied

    monkeypatch.setattr(script.Agent, "numpy_actor", numpy_actor)
    capsys.readouterr()  # this test may be the first that trains
    before = content(folder)
    flags = f"--evaluate {folder} --eval-episodes 4"
    returns = script.evaluate(parse(flags))
    # 1 is paid per step; before each episode an action is ignored
    assert times == [0, *(t for length in returns for t in range(int(length) + 1))][:-1]
    assert script.evaluate(parse(flags)) == returns
    check_both_evaluations(capsys.readouterr().out, returns)
    assert content(folder) == before


def test_a_saved_policy_in_ones_own_code(undisturbed):
    """Time is the state that it needs."""
    agent, args = script.load(undisturbed("whole")[0])
    env = gym.make(args.env_id)
    obs, _ = env.reset(seed=1)
    actions = [agent.act(obs[None], time=time) for time in (0, 500, np.array([500]))]
    assert (actions[0] == agent.act(obs[None])).all()  # the time is 0 if none is given
    assert (actions[1] == actions[2]).all() and (actions[0] != actions[1]).all()
    assert actions[0].shape == (1, *env.action_space.shape)


def test_evaluate_with_video(undisturbed, root, tmp_path):
    folder = tmp_path / "elsewhere"
    shutil.copytree(undisturbed("whole")[0], folder)
    flags = f"--evaluate {folder} --eval-episodes 2"
    returns = script.evaluate(parse(flags))
    done = run(root / "ppo_kl_adaptive.py", *flags.split(), "--capture-video")
    assert [line.split("=")[-1] for line in done.stdout.splitlines()[1:3]] == [
        f"{each:.2f}" for each in returns
    ]
    videos = list((folder / "videos").glob("*.mp4"))
    assert len(videos) == 2
    assert all(video.stat().st_size > 1000 for video in videos)


@pytest.mark.parametrize("how", ["--evaluate", "--resume"])
def test_in_an_environment_that_does_not_fit(how, undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed("whole")[0], tmp_path / "run")
    args = parse(f"{how} {tmp_path / 'run'} --env-id Hopper-v4")
    with pytest.raises(SystemExit) as end:
        (script.evaluate if args.evaluate else script.train)(args)
    assert end.value.code == 2
    assert "its agent does not fit the environment" in capsys.readouterr().err


def assert_same_to_rounding(tmp_path: Path, *flags: str):
    """Two runs of two iterations learn the same."""
    one, other = (
        train(tmp_path / flag, f"--env-id InvertedPendulum-v4 -n 10 {flag}") for flag in flags
    )
    for name, value in one["agent"].items():
        torch.testing.assert_close(other["agent"][name], value, rtol=0, atol=1e-4)
    tags = [scalars(tmp_path / flag) for flag in flags]
    for tag in ("losses/policy_loss", "losses/value_loss", "losses/entropy"):
        for (step, a), (same, b) in zip(tags[0][tag], tags[1][tag], strict=True):
            assert step == same
            assert a == pytest.approx(b, abs=1e-4), tag


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_learning_on_a_gpu_is_learning_on_a_cpu(tmp_path, capsys):
    assert_same_to_rounding(tmp_path, "--no-cuda", "--cuda")
    assert "InvertedPendulum-v4 on cuda" in capsys.readouterr().out
    assert resume(tmp_path / "--cuda", "-n 15")["counters"][1] == 3


def test_learns_cartpole(tmp_path):
    folder = tmp_path / "run"
    script.train(parse(f"--env-id CartPole-v1 --total-timesteps 60000 --run-dir {folder}"))
    returns = [float(row[1]) for row in rows(folder)[1:]]
    assert np.mean(returns[-20:]) >= 475
