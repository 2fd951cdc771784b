"""ppo_cma.py as a program: command line, run folder, resume, kills, evaluation, backends."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import assert_same, rows, run, train_until_killed, write_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_cma
from ppo_cma import Args

SMALL = [
    "--env-id", "InvertedPendulum-v4", "--iter-steps", "200", "--n-updates", "5",
    "--minibatch-size", "32", "--history-buffer-size", "3", "--checkpoint-interval", "2",
]  # fmt: skip


def train(folder: Path, *argv) -> dict:
    """Train in this process; the final checkpoint."""
    args = ppo_cma.parse_args([*SMALL, "--run-dir", str(folder), *argv])
    ppo_cma.train(args)
    return ppo_cma.load_checkpoint(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, train(folder, "--total-timesteps", "1500")


# --- command line ---------------------------------------------------------------------------------

ORIGINAL = (
    "--env_name Humanoid-v4 --max_steps 10000000 --mode PPO-CMA-m --iter_steps 32000 "
    "--batch_size 512 --history_buffer_size 9 --run_suffix 1"
)


def test_the_original_readme_line_means_what_it_did():
    args = ppo_cma.parse_args(ORIGINAL.split())
    assert args == Args(
        env_id="Humanoid-v4", total_timesteps=10_000_000, mode="ppo-cma-m", iter_steps=32_000,
        minibatch_size=512, history_buffer_size=9, run_suffix="1",
    )  # fmt: skip


def test_the_original_readme_line_runs(root, tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(root / "ppo_cma.py"), *ORIGINAL.split()],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        deadline = time.time() + 240
        while time.time() < deadline and process.poll() is None:
            files = list(tmp_path.glob("runs/Humanoid-v4__ppo_cma__1__*__1/episodes.csv"))
            if files and len(files[0].read_text().splitlines()) > 20:
                break
            time.sleep(0.5)
        else:
            pytest.fail(f"no episodes: {process.stderr.read().decode() if process.poll() else ''}")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("-m PPO", "mode", "ppo"), ("--mode ppo_cma_m", "mode", "ppo-cma-m"),
        ("--mode PG-pos", "mode", "pg-pos"), ("-lr 0.001", "learning_rate", 0.001),
        ("--learning_rate 0.001", "learning_rate", 0.001), ("--ppo_epsilon 0.1", "clip_coef", 0.1),
        ("--ppo_ent_l_w 0.01", "ent_coef", 0.01), ("--n_updates 7", "n_updates", 7),
        ("--batch-size=64", "minibatch_size", 64), ("--no_cuda", "cuda", False),
        ("--env-backend envpool", "env_backend", "envpool"),
    ],
)  # fmt: skip
def test_names_of_the_original_and_of_cleanrl(line, field, value):
    assert getattr(ppo_cma.parse_args(line.split()), field) == value


def test_run_time_field_of_cleanrl_is_accepted_with_one_line(capsys):
    assert ppo_cma.parse_args(["--num-iterations", "5"]).num_iterations == 5
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "--num-iterations has no effect" in out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--env-id CartPole-v1", "Discrete(2): PPO-CMA needs continuous"),
        ("--env-id Humanoid-v9", "provides versioned environments"),
        ("--env-id HalfCheeta-v4", "HalfCheetah"),
        ("--env-id halfcheetah", "HalfCheetah-v"),
        ("--env-id Hoper-v4 --env-backend envpool", "Hopper-v4"),
        ("--env-id CartPole-v1 --env-backend envpool", "needs continuous"),
        ("--env-id Unbounded-v0", "needs finite bounds"),
        ("--env-id Pixels-v0", "one flat Box"),
        ("--mode cma", "--mode cma: choose one of ppo-cma-m, ppo-cma, ppo, pg, pg-pos"),
        ("--env-backend brax", "invalid choice 'brax' for argument '--env-backend'"),
        ("--total-timesteps 1e6", "--total-timesteps: invalid literal"),
        ("--total-timesteps 0", "--total-timesteps 0: must lie between 1"),
        ("--num-envs -1", "--num-envs -1"),
        ("--iter-steps 0", "--iter-steps 0"),
        ("--minibatch-size 0", "--minibatch-size 0"),
        ("--history-buffer-size 0", "--history-buffer-size 0"),
        ("--n-updates 0", "--n-updates 0"),
        ("--action-repeat 0", "--action-repeat 0"),
        ("--learning-rate 0", "--learning-rate 0"),
        ("--gamma 1.1", "--gamma 1.1: must lie between 0 and 1"),
        ("--gae-lambda -0.1", "--gae-lambda -0.1"),
        ("--gamma nan", "--gamma nan"),
        ("--seed -1", "--seed -1"),
        ("--epsilon 0.2", "Unrecognized options: --epsilon"),
        ("--cuda False", "Unrecognized options: False"),
        ("--resume nowhere", "nowhere: no checkpoint.pt there"),
        ("--evaluate nowhere", "nowhere: no checkpoint.pt there"),
        ("--resume a --evaluate b", "give one of them"),
        ("--resume a --run-dir b", "--run-dir is for a new run"),
        ("--resume damaged", "damaged, or not a checkpoint"),
        ("--resume foreign", "written by ppo.py"),
        ("--run-dir full", "full: not empty; --resume"),
        ("--run-dir full/notes.txt", "full/notes.txt: File exists"),
        ("--track", "--track needs wandb: pip install wandb"),
        ("--render", "--render needs a display"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(line, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(  # wandb as if not installed
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "wandb" else find_spec(name, *a),
    )
    monkeypatch.delenv("DISPLAY", raising=False)
    for name in ("damaged", "foreign", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "checkpoint.pt").write_bytes(b"\x80\x04not a checkpoint")
    write_checkpoint(tmp_path / "foreign", {"script": "ppo", "args": {}})
    (tmp_path / "full" / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as end:
        ppo_cma.train(ppo_cma.parse_args(line.split()))
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("ppo_cma.py: ")
    assert says in captured.err
    assert sorted(tmp_path.rglob("*")) == before  # no half-made run


class Strange(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,))


class Pixels(Strange):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (2,))


class Poisoned(gym.Env):
    """Its 40th episode returns a NaN observation."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (2,))
    episodes = 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        Poisoned.episodes += 1
        self.t = 0
        return self.np_random.uniform(-1, 1, 2), {}

    def step(self, action):
        self.t += 1
        obs = np.full(2, np.nan if Poisoned.episodes == 40 else 0.5)
        return obs, float(action[0]), self.t == 10, False, {}


gym.register("Unbounded-v0", Strange)
gym.register("Pixels-v0", Pixels)
gym.register("Poisoned-v0", Poisoned)


def test_help_lists_both_names_and_exits_0(root):
    result = run(root / "ppo_cma.py", "--help")
    assert result.returncode == 0
    for flag in ("--env-name", "--env-id", "--max-steps", "--batch-size", "--ppo-epsilon"):
        assert flag in result.stdout


def test_wrong_input_from_a_shell(root, tmp_path):
    result = run(root / "ppo_cma.py", "--env-id", "Humanoidd-v4", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Humanoid-v4" in result.stderr
    assert not list(tmp_path.iterdir())


# --- the run's folder -----------------------------------------------------------------------------


def test_run_folder(undisturbed, root):
    folder, checkpoint = undisturbed
    info = json.loads((folder / "run.json").read_text())
    assert info["status"] == "finished"
    assert info["seed"] == 1
    assert info["args"]["env_id"] == "InvertedPendulum-v4"
    source = (root / "ppo_cma.py").read_bytes()
    assert info["source_sha256"] == hashlib.sha256(source).hexdigest()
    assert info["versions"]["torch"] == torch.__version__
    assert info["hardware"]["cores"] == os.cpu_count()
    assert info["wall_seconds"] > 0

    header, *episodes = rows(folder)
    assert header == ["global_step", "return", "length"]
    returns, lengths = (np.array([float(r[k]) for r in episodes]) for k in (1, 2))
    assert lengths.sum() == info["global_step"] == checkpoint["global_step"] >= 1500
    assert (returns == lengths).all()  # InvertedPendulum-v4 pays 1 a step, also on the last one
    assert info["final_return"] == pytest.approx(returns[-100:].mean(), abs=1e-3)
    assert [int(r[0]) for r in episodes] == list(np.cumsum(lengths).astype(int))

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [e.value for e in events.Scalars("charts/episodic_return")] == list(returns)
    iterations = checkpoint["iteration"]
    for tag in (
        "charts/SPS", "charts/learning_rate", "charts/policy_std", "charts/positive_advantages",
        "charts/history_length", "charts/mean_episodic_return", "charts/share_environments",
        "charts/share_inference", "charts/share_update", "losses/value_loss",
        "losses/variance_loss", "losses/policy_loss", "losses/entropy",
        "losses/explained_variance",
    ):  # fmt: skip
        assert len(events.Scalars(tag)) == iterations, tag
    history = [e.value for e in events.Scalars("charts/history_length")]
    assert history[:4] == [1, 2, 3, 3]
    assert "hyperparameters/text_summary" in events.Tags()["tensors"]


def test_stdout_can_be_read_as_cleanrls(tmp_path, capsys):
    train(tmp_path / "run", "--total-timesteps", "400")
    out = capsys.readouterr().out
    assert len(re.findall(r"^global_step=\d+, episodic_return=[\d.]+, policy_std", out, re.M)) == 2
    assert len(re.findall(r"^SPS: \d+$", out, re.M)) == 2
    assert f"--evaluate {tmp_path / 'run'}" in out
    assert f"--resume {tmp_path / 'run'}" in out


def test_same_seed_same_bits_other_seed_other_states(tmp_path, undisturbed):
    folder, checkpoint = undisturbed
    again = train(tmp_path / "again", "--total-timesteps", "1500")
    assert_same(again, checkpoint)
    assert rows(tmp_path / "again") == rows(folder)
    other = train(tmp_path / "other", "--total-timesteps", "400", "--seed", "2")
    first = {tuple(x) for x in checkpoint["training"]["history"][0][0].tolist()}
    assert not first & {tuple(x) for x in other["training"]["history"][0][0].tolist()}


def test_no_two_episodes_share_a_reset_seed():
    seeds = {
        ppo_cma.episode_seed(seed, env, episode)
        for seed in range(20) for env in range(8) for episode in range(20)
    }  # fmt: skip
    assert len(seeds) == 20 * 8 * 20


def test_the_script_alone_in_an_empty_folder(root, tmp_path):
    shutil.copy(root / "ppo_cma.py", tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = run(
        "ppo_cma.py", *SMALL, "--total-timesteps", "300", "--save-model", cwd=tmp_path,
        env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (folder,) = tmp_path.glob("runs/InvertedPendulum-v4__ppo_cma__1__*")
    assert json.loads((folder / "run.json").read_text())["git_commit"] is None
    weights = torch.load(folder / "ppo_cma.cleanrl_model", weights_only=True)
    assert "obs_scale" in weights  # a saved policy is nothing without its scaler


def test_dependencies_in_the_header_are_the_projects(root):
    import tomllib

    header = re.search(r"# /// script\n(.*?)# ///\n", (root / "ppo_cma.py").read_text(), re.S)
    script = tomllib.loads(re.sub("^# ?", "", header[1], flags=re.M))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert script["dependencies"] == project["dependencies"]
    assert script["requires-python"] == project["requires-python"]


def test_importing_does_nothing_and_driving_as_cleanrl(root, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); import ppo_cma, runpy\n"
        f"assert {{'Args', 'Agent'}} <= set(dir(ppo_cma))\n"
        f"import os; assert not os.listdir('.')\n"
        f"sys.argv = ['ppo_cma.py', *{SMALL!r}, '--total-timesteps', '250']\n"
        f"names = runpy.run_path({str(root / 'ppo_cma.py')!r}, run_name='__main__')\n"
        f"assert any(f.startswith('events') for f in os.listdir('runs/' + names['run_name']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


# --- resume, kills, faults ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "call"), [("GymnasiumEnvs.step", 700), ("mean_loss", 22), ("torch.save", 3)]
)
def test_killed_and_resumed_is_undisturbed(target, call, tmp_path, undisturbed):
    folder = tmp_path / "run"
    argv = [*SMALL, "--run-dir", str(folder), "--total-timesteps", "1500"]
    assert train_until_killed("ppo_cma", target, call, argv) == -signal.SIGKILL
    interrupted = ppo_cma.load_checkpoint(folder)  # readable
    assert 0 < interrupted["iteration"] < undisturbed[1]["iteration"]
    ppo_cma.train(ppo_cma.parse_args(["--resume", str(folder)]))
    assert_same(ppo_cma.load_checkpoint(folder), undisturbed[1])
    assert rows(folder) == rows(undisturbed[0])
    for tag in ("charts/episodic_return", "losses/policy_loss"):
        logs = [
            EventAccumulator(str(f), size_guidance={"scalars": 0}).Reload().Scalars(tag)
            for f in (folder, undisturbed[0])
        ]
        points = [sorted((e.step, e.value) for e in log) for log in logs]
        assert points[0] == points[1]  # each step once
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_says_how_to_go_on(number, tmp_path, capsys, monkeypatch):
    plain, folder = ppo_cma.update, tmp_path / "run"

    def update(agent, *data):
        if agent.updates == 2:
            os.kill(os.getpid(), number)
        return plain(agent, *data)

    monkeypatch.setattr(ppo_cma, "update", update)
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as end:
        train(folder, "--total-timesteps", "1500", "--num-envs", "3")
    assert end.value.code == 128 + number
    assert f"--resume {folder}" in capsys.readouterr().out
    assert signal.getsignal(number) is handler
    assert ppo_cma.load_checkpoint(folder)["iteration"] == 3
    monkeypatch.setattr(ppo_cma, "update", plain)
    ppo_cma.train(ppo_cma.parse_args(["--resume", str(folder)]))
    whole = train(tmp_path / "whole", "--total-timesteps", "1500", "--num-envs", "3")
    assert_same(ppo_cma.load_checkpoint(folder), whole)
    assert rows(folder) == rows(tmp_path / "whole")


def test_resume_extends_but_does_not_change_a_run(tmp_path, undisturbed, capsys):
    folder = tmp_path / "run"
    train(folder, "--total-timesteps", "800")
    for flag in (["--seed", "2"], ["--env-id", "Hopper-v4"], ["--learning-rate", "0.1"]):
        with pytest.raises(SystemExit) as end:
            ppo_cma.parse_args(["--resume", str(folder), *flag])
        assert end.value.code == 2
        assert f"{flag[0]} is " in capsys.readouterr().err
    ppo_cma.train(ppo_cma.parse_args(["--resume", str(folder), "--total-timesteps", "1500"]))
    checkpoint = ppo_cma.load_checkpoint(folder)
    checkpoint["args"]["total_timesteps"] = 1500
    assert_same(checkpoint, undisturbed[1])
    assert rows(folder) == rows(undisturbed[0])


def test_non_finite_observation_stops_with_its_name_and_keeps_the_checkpoint(tmp_path, capsys):
    Poisoned.episodes = 0
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as end:
        train(folder, "--env-id", "Poisoned-v0", "--iter-steps", "100", "--total-timesteps", "900")
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{folder}: stopped in iteration 4, after step 390: ")
    assert ": an observation is not finite in step 1 of environment 0, episode 39 " in said
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    checkpoint = ppo_cma.load_checkpoint(folder)
    assert checkpoint["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# --- evaluation, backends, one's own loop ---------------------------------------------------------


def test_evaluate_plays_the_mean_and_writes_nothing(undisturbed, capsys):
    folder, _ = undisturbed
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*")}
    argv = ["--evaluate", str(folder), "--eval-episodes", "4"]
    returns = [ppo_cma.evaluate(ppo_cma.parse_args(argv)) for _ in range(2)]
    assert returns[0] == returns[1]
    assert len(returns[0]) == 4
    out = capsys.readouterr().out
    assert f"eval_episode=3, episodic_return={returns[0][3]:.2f}" in out
    assert f"{np.mean(returns[0]):.2f} +- {np.std(returns[0]):.2f}" in out
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*")} == before


def test_capture_video(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    argv = ["--evaluate", str(folder), "--eval-episodes", "2", "--capture-video"]
    ppo_cma.evaluate(ppo_cma.parse_args(argv))
    videos = sorted((folder / "videos").glob("*.mp4"))
    assert len(videos) == 2
    assert all(video.stat().st_size > 1000 for video in videos)


def test_envpool_humanoid_has_contact_forces_and_trains(tmp_path, capsys):
    envs = ppo_cma.make_envs(Args(env_id="Humanoid-v4", env_backend="envpool", num_envs=2))
    for i in range(2):
        assert envs.reset(i, 0).shape == (376,)
    ids, actions = np.arange(2), np.full((2, 17), 0.4, np.float32)
    contact = 0.0
    for _ in range(30):
        obs, rewards, dones, steps = envs.step(ids, actions)
        assert obs.shape == (2, 376)
        assert set(steps) <= {1, 2}
        contact = max(contact, np.abs(obs[:, 292:]).max())
        ids, actions = ids[~dones], actions[~dones]
        if not len(ids):
            break
    assert contact > 1.0
    assert rewards.min() > 0
    envs.close()

    folder = tmp_path / "run"
    backend = ("--env-backend", "envpool", "--num-envs", "3")
    checkpoint = train(folder, *backend, "--total-timesteps", "500")
    again = train(tmp_path / "again", *backend, "--total-timesteps", "500")
    assert_same(again, checkpoint)  # whatever its threads do
    lengths = [int(row[2]) for row in rows(folder)[1:]]
    assert sum(lengths) == checkpoint["global_step"]
    ppo_cma.train(ppo_cma.parse_args(["--resume", str(folder), "--total-timesteps", "800"]))
    assert "resuming with new episodes" in capsys.readouterr().out


def test_ones_own_loop_from_the_readme(root, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.S)
    (code,) = [block for block in blocks if "update_with_memorized" in block]
    assert len(code.splitlines()) <= 22
    code = code.replace("1_000_000", "6000").replace("Args()", "Args(n_updates=5)")
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[0]) for line in lines]
    assert len(lines) >= 2
    assert steps == sorted(steps)
    assert all(np.isfinite(float(line.split()[1])) for line in lines)


def test_agent_of_unsupported_spaces_is_a_value_error():
    with pytest.raises(ValueError, match="PPO-CMA needs continuous ones"):
        ppo_cma.Agent(gym.make("CartPole-v1"), pretrain=False)


def test_agent_keeps_a_copy_of_what_it_memorizes():
    agent = ppo_cma.Agent(gym.make("MountainCarContinuous-v0"), Args(), pretrain=False)
    obs = np.zeros(2)
    for t in range(3):  # a simulator that returns the same array each step
        obs[:] = t
        agent.memorize(obs, agent.act(obs), 0.0, t == 2)
    assert [list(o) for o, _, _ in agent.memory[0]] == [[0, 0], [1, 1], [2, 2]]
    with pytest.raises(ValueError, match="no finished episode"):
        ppo_cma.Agent(gym.make("MountainCarContinuous-v0"), pretrain=False).update_with_memorized()


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
    sizes = ["--n-updates", "100", "--history-buffer-size", "9"]
    train(tmp_path / "run", *flags.split(), *sizes)
    returns = [float(row[1]) for row in rows(tmp_path / "run")[1:]]
    assert np.mean(returns[-20:]) > at_least
