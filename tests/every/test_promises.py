"""What every script promises: wrong input is told, what is missing is one line, a saved policy is
complete, long runs do not grow, nothing listens or connects, nothing that is read is run."""

import ast
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from program import (
    ROOT,
    Clockwork,
    Levels,
    Toy,
    in_a_fork,
    installed,
    run,
    toy,
    write_checkpoint,
)  # fmt: skip

import ppo
import ppo_atari_lstm
import ppo_atari_multigpu
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive
import ppo_lstm
import ppo_pixels
import ppo_procgen

SPACES = {
    "Box": gym.spaces.Box(-1, 1, (1,)),
    "Choice": gym.spaces.Discrete(2),
    "Tuple": gym.spaces.Tuple([gym.spaces.Discrete(2)]),
    "Endless": gym.spaces.Box(-torch.inf, torch.inf, (1,)),
}
for name, space in SPACES.items():
    gym.register(f"Promise{name}-v0", Clockwork, kwargs={"action_space": space})

# Iterations of four episodes of 10 steps each
SIZES = "--num-envs 2 --num-steps 22 --num-minibatches 2 --update-epochs 1"
SMALL = {
    ppo: f"--env-id PromiseChoice-v0 {SIZES}",
    ppo_continuous_action: f"--env-id PromiseBox-v0 {SIZES}",
    ppo_cma: "--env-id PromiseBox-v0 --num-envs 2 --iter-steps 40 --n-updates 2",
    ppo_kl_adaptive: (
        "--env-id PromiseBox-v0 --num-envs 2 -b 4 --update-epochs 1 --value-epochs 1 -m 2"
    ),
    **dict.fromkeys(
        [ppo_atari_multigpu, ppo_atari_lstm],
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
        "--env-threads 1",
    ),
    ppo_pixels: f"--env-id PromiseBox-v0 {SIZES} --num-threads 1",
    ppo_lstm: f"--env-id PromiseBox-v0 {SIZES} --num-threads 1",
    ppo_procgen: (
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
        "--env-threads 1 --num-levels 2 --eval-interval 1 --eval-episodes 2"
    ),
}
STEPS = dict(zip(SMALL, (44, 44, 40, 40, 32, 32, 44, 44, 32), strict=True))  # of an iteration
ALL = pytest.mark.parametrize("script", SMALL, ids=lambda module: module.__name__)
GYMNASIUM = [ppo, ppo_continuous_action, ppo_cma, ppo_kl_adaptive]
@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.setattr(envpool, "make", toy)
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)  # which takes 4 s


def start(script, flags: str):
    """What the script does as a program."""
    args = script.parse_args(shlex.split(f"{SMALL[script]} --no-cuda {flags}"))
    return (script.evaluate if args.evaluate else script.train)(args)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a `run` of a script, of two iterations, and with what is none."""
    made = {}

    def get(script) -> Path:
        if script not in made:
            folder = made[script] = tmp_path_factory.mktemp(script.__name__)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(envpool, "make", toy)
                patch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)
                more = f"--total-timesteps {2 * STEPS[script]}"
                start(script, f"{more} --run-dir {folder / 'run'}")
            (folder / "file").write_text("mine")
            (folder / "empty").mkdir()
        return made[script]

    return get


# --- wrong input ----------------------------------------------------------------------------------

# For every script; what is said of it, by tyro's frame or in one line
WRONG = [
    ("--learning-rat 0.1", "--learning-rate"),
    ("surplus", "surplus"),
    ("--cuda maybe", "maybe"),
    ("--env-id", "Expected 1"),
    ("--env-id=", "--env-id"),
    ("--seed one", "one"),
    ("--seed -1", "--seed -1: not in 0 ..."),
    ("--total-timesteps 1e6", "1e6"),
    ("--total-timesteps 0", "--total-timesteps 0: not in 1 ..."),
    ("--num-envs 2.5", "2.5"),
    ("--num-envs 0", "0: not in 1 ..."),
    ("--num-threads -1", "--num-threads -1: not in"),
    ("--eval-episodes 0", "--eval-episodes 0: not in 1 ..."),
    ("--checkpoint-interval 0", "--checkpoint-interval 0: not in 1 ..."),
    ("--learning-rate nan", "--learning-rate nan: not in"),
    ("--learning-rate inf", "--learning-rate inf: not in"),
    ("--gamma 1.5", "--gamma 1.5: not in 0 ... 1"),
    ("--gae-lambda -0.1", "--gae-lambda -0.1: not in 0 ... 1"),
    ("--resume nowhere", "nowhere: no checkpoint.pt"),
    ("--evaluate empty", "empty: no checkpoint.pt"),
    ("--resume run --evaluate run", "--resume goes on in its folder"),
    ("--resume run --run-dir new", "--resume goes on in its folder"),
    ("--resume run --num-envs 3", "goes on with its"),
    ("--resume run --gamma 1.5", "--gamma 1.5: not in 0 ... 1"),
    ("--run-dir run", "--resume run"),
    ("--track", "wandb is not installed: pip install wandb"),
    ("--capture-video", "is not installed: pip install"),
    ("--evaluate run --capture-video", "is not installed: pip install"),
]
CLIPPED = [
    ("--vf-coef inf", "--vf-coef inf: not in 0 ..."),
    ("--target-kl nan", "--target-kl nan: not in 0 ..."),
    ("--update-epochs 1.5", "1.5"),
]
ITS_OWN = {
    ppo: [
        *CLIPPED,
        ("--num-steps 4 --num-minibatches 9", "--minibatch-size 0: not in 2 ..."),
        ("--env-id CartPol-v1", "CartPole"),
        ("--env-id no_such_module:Env-v0", "no_such_module"),
        ("--env-id PromiseBox-v0", "choices are wanted as actions; boxes: ppo_continuous_action"),
        ("--env-id PromiseTuple-v0", "choices are wanted as actions"),
        ("--env-workers 3", "--env-workers 3: not in 0 ... 2"),
        ("--env-kwargs []", "no JSON object"),
    ],
    ppo_continuous_action: [
        *CLIPPED,
        ("--num-steps 4 --num-minibatches 9", "--minibatch-size 0: not in 2 ..."),
        ("--env-id Penduluum-v1", "Pendulum"),
        ("--env-id PromiseChoice-v0", "a Box of actions is wanted; choices: ppo.py"),
        ("--env-workers 3", "--env-workers 3: not in 0 ... 2"),
        ("--env-kwargs []", "no JSON object"),
        ("--env-id dm_control/cartpole-balance-v0", "import of shimmy halted"),
        ("--log-std-init inf", "--log-std-init inf: not in -9 ... 9"),
    ],
    ppo_cma: [
        ("--env-name Penduluum-v1", "Pendulum"),
        ("--env-id PromiseChoice-v0", "a finite Box of actions is wanted"),
        ("--env-id PromiseEndless-v0", "its sides from 1e-6 to 1e6; choices: ppo.py"),
        ("--mode cma", "--mode cma: not one of ppo-cma-m, ppo-cma, ppo, pg, pg-pos"),
        ("--batch-size 0", "--minibatch-size 0: not in 1 ..."),
        ("--ppo-epsilon inf", "--clip-coef inf: not in 0 ..."),
    ],
    ppo_kl_adaptive: [
        ("--env-name Penduluum-v1", "Pendulum"),
        (
            "--env-id PromiseTuple-v0",
            "a Box or Discrete of actions is wanted; several choices: ppo.py",
        ),
        ("--servo kody", "kody"),
        ("--kl-targ 0", "--kl-targ 0.0: not in 1e-09 ..."),
        ("--policy-logvar nan", "--policy-logvar nan: not in -20 ... 20"),
        ("-b 1", "--num-envs 2: not in 1 ... 1"),
    ],
    ppo_atari_multigpu: [
        *CLIPPED,
        ("--num-minibatches 9", "--num-minibatches 9: not in 1 ... 8"),
        ("--env-id CartPole-v1", "--env-id CartPole-v1: EnvPool has no such Atari game"),
        ("--backend mpl", "mpl"),
    ],
    ppo_pixels: [
        *CLIPPED,
        ("--env-id PromiseNothing-v0", "PromiseNothing"),
        ("--encoder resnet", "resnet"),
        ("--resize 84", "--resize 84: height and width are wanted, as 60x80"),
    ],
    ppo_lstm: [
        *CLIPPED,
        ("--memory rnn", "rnn"),
        ("--num-minibatches 9", "--num-minibatches 9: not in 1 ..."),
    ],
    ppo_procgen: [
        *CLIPPED,
        ("--num-minibatches 19", "--minibatch-size 1: not in 2 ..."),
        ("--num-levels -1", "--num-levels -1: not in 0 ..."),
        ("--env-id CartPole-v1", "--env-id CartPole-v1: EnvPool has no such Procgen game"),
    ],
    ppo_atari_lstm: [
        *CLIPPED,
        ("--num-minibatches 9", "--num-minibatches 9: not in 1 ... 4"),
        ("--env-id CartPole-v1", "--env-id CartPole-v1: EnvPool has no such Atari game"),
    ],
}
FOR_EACH = [(script, *case) for script in SMALL for case in WRONG + ITS_OWN[script]]


def tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file and folder with its size and the time of its last change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("script", "line", "says"), FOR_EACH, ids=[f"{s.__name__} {line}" for s, line, _ in FOR_EACH]
)
def test_wrong_input_is_told_and_leaves_nothing(script, line, says, place, monkeypatch, capfd):
    installed(monkeypatch, wandb=False, moviepy=False, shimmy=False)
    folder = place(script)
    monkeypatch.chdir(folder)
    before = tree(folder)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:  # it would soon be over if it were not refused
        start(script, f"--total-timesteps {2 * STEPS[script]} {line}")
    err = " ".join(word for word in capfd.readouterr().err.split() if word != "│")
    assert end.value.code == 2
    assert says in err
    assert tree(folder) == before


@pytest.mark.parametrize("line", ["--learning-rate nan", "--resume nowhere"])
def test_wrong_input_from_a_shell(line, tmp_path):
    result = run(ROOT / "ppo.py", *line.split(), cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert line in result.stderr.replace("ppo.py: ", "--resume ")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


# --- what is missing, and what is enough ----------------------------------------------------------


def test_scripts_start_without_what_only_a_flag_needs():
    """--capture-video and --track; no header names their packages."""
    names = sorted(path.stem for path in ROOT.glob("ppo*.py"))
    assert len(names) == 12
    hidden = "import importlib, sys; sys.modules |= dict.fromkeys(['moviepy', 'wandb'])"
    code = f"{hidden}; [importlib.import_module(name) for name in {names}]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@ALL
def test_what_a_tracked_run_needs_its_policy_does_not(script, place, tmp_path, monkeypatch):
    """A run that was tracked and filmed can be loaded where neither is installed."""
    installed(monkeypatch, wandb=False, moviepy=False)
    saved = script.load_checkpoint(place(script) / "run")
    saved["args"].track = saved["args"].capture_video = True
    write_checkpoint(tmp_path, saved)
    assert script.load(tmp_path)[1].track
    flags = f"--evaluate {tmp_path} --no-track --no-capture-video --eval-episodes 1"
    assert len(script.evaluate(script.parse_args(flags.split()))) == 1


@ALL
def test_a_saved_policy_is_complete(script, tmp_path, monkeypatch):
    """As loaded, and as the weights alone in a new agent of another seed, it acts as the one that
    was trained; the run is played the same each time."""
    saved, plain = [], script.save

    def save(run, agent, *args):
        saved.append(agent)
        plain(run, agent, *args)

    monkeypatch.setattr(script, "save", save)
    folder = tmp_path / "run"
    named = "--save-model --exp-name a/name"  # the file gets the last part
    start(script, f"{named} --total-timesteps {2 * STEPS[script]} --run-dir {folder}")
    agent, args = script.load(folder)
    if script in (*GYMNASIUM, ppo_pixels, ppo_lstm):
        envs = gym.make(args.env_id)
    elif script is ppo_procgen:
        envs = Levels
    else:
        envs = Toy("", num_envs=1, seed=[1], stack_num=1 if script is ppo_atari_lstm else 4)
    other = script.Agent(envs, script.replace(args, seed=7))
    other.load_state_dict(torch.load(folder / "name.cleanrl_model", weights_only=True))
    obs = np.stack([envs.observation_space.sample() for _ in range(99)])

    def act(agent):
        recurrent = script in (ppo_atari_lstm, ppo_lstm)
        state = {"state": agent.initial_state(99)} if recurrent else {}
        return agent.act(obs, **state)

    actions = act(saved[-1])
    assert actions.shape == (99, *envs.action_space.shape)
    assert (act(agent) == actions).all()
    assert (act(other) == actions).all()
    args = script.parse_args(["--evaluate", str(folder), "--eval-episodes", "2"])
    before = tree(folder)
    returns = script.evaluate(args)
    assert returns == script.evaluate(args)
    assert tree(folder) == before
    if script in GYMNASIUM:
        assert returns == [10.0, 10.0]


# --- long runs ------------------------------------------------------------------------------------


# --- security -------------------------------------------------------------------------------------

SOURCES = [Path(script.__file__) for script in SMALL] + sorted((ROOT / "benchmark").rglob("*.py"))
LOADERS = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "load"}
RUNNERS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pty.spawn"}


def dangers(text: str) -> Iterator[str]:
    """What in a program runs what it reads, or could."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & LOADERS:
                yield ast.unparse(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = given.get("weights_only") == "True" if name == "torch.load" else True
            flags = {given.get(flag, "False") for flag in ("shell", "allow_pickle")}
            if name in RUNNERS or not safe or flags != {"False"}:
                yield ast.unparse(node)


def test_nothing_that_is_read_is_run():
    assert {str(path): [*dangers(path.read_text())] for path in SOURCES} == {
        str(path): [] for path in SOURCES
    }
    for line in (
        "torch.load(path)", "torch.load(path, weights_only=False)", "import pickle",
        "from torch import load", "import cloudpickle as c", "np.load(path, allow_pickle=True)",
        "eval(text)", "exec(text)", "os.system(text)", "subprocess.run(text, shell=True)",
    ):  # fmt: skip
        assert list(dangers(f"def f():\n    {line}")) == [line]


@ALL
def test_nothing_listens_or_connects(script, tmp_path):
    def watched(call, *args):
        def hook(event, _):
            if event in ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"):
                os._exit(77)

        sys.addaudithook(hook)
        call(*args)
        assert not {"wandb", "huggingface_hub"} & sys.modules.keys()

    assert in_a_fork(watched, socket.create_connection, ("127.0.0.1", 9)) == 77  # it would be seen
    more = f"--total-timesteps {2 * STEPS[script]} --run-dir {tmp_path / 'run'}"
    assert in_a_fork(watched, start, script, more) == 0
