"""What the README promises of every script: wrong input is told, long runs do not grow, nothing
listens or connects, and nothing that is loaded is run."""

import ast
import importlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from program import ROOT, Clockwork, installed, run, write_checkpoint
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from test_atari import Toy

import benchmark.__main__
import benchmark.run
import benchmark.speed
import ppo
import ppo_atari_multigpu
import ppo_cma
import ppo_continuous_action
import ppo_kl_adaptive

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
        "--env-id PromiseBox-v0 --num-envs 2 -b 4 --update-epochs 1 --value-epochs 1 --hid1-mult 2"
    ),
    ppo_atari_multigpu: (
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
        "--env-threads 1 --no-cuda"
    ),
}
ALL = pytest.mark.parametrize("script", SMALL, ids=lambda module: module.__name__)


# --- wrong input ----------------------------------------------------------------------------------

# For every script; `run` is a run of its own, the other names are in `place`
WRONG = [
    ("--learning-rat 0.1", "--learning-rate"),
    ("--total_timestep=5", "--total-timesteps"),
    ("--epsilon 0.2", "--epsilon"),
    ("surplus", "surplus"),
    ("--cuda maybe", "maybe"),
    ("--env-id", "--env-id'. Expected 1 values"),
    ("--env-id no_such_module:Env-v0", "--env-id no_such_module:Env-v0: "),
    ("--env-id=", "--env-id : "),
    ("--seed one", "--seed: invalid literal"),
    ("--seed -1", "--seed -1: must lie between 0"),
    ("--seed 9223372036854775809", "--seed 9223372036854775809: must lie between 0"),
    ("--total-timesteps 1e6", "--total-timesteps: invalid literal"),
    ("--total-timesteps -1", "--total-timesteps -1: must lie between 1"),
    ("--num-envs 2.5", "--num-envs: invalid literal"),
    ("--num-envs 0", "--num-envs 0: must lie between 1"),
    ("--num-threads -1", "--num-threads -1: must lie between"),
    ("--eval-episodes 0", "--eval-episodes 0: must lie between 1"),
    ("--checkpoint-interval -3", "--checkpoint-interval -3: must lie between 1"),
    ("--num-iterations -1", "--num-iterations -1: must lie between 0"),
    ("--learning-rate fast", "--learning-rate"),
    ("--learning-rate nan", "--learning-rate nan: must lie between"),
    ("--learning-rate inf", "--learning-rate inf: must lie between"),
    ("--learning-rate -1", "--learning-rate -1.0: must lie between"),
    ("--gamma high", "--gamma: could not convert"),
    ("--gamma nan", "--gamma nan: must lie between 0 and 1"),
    ("--gamma inf", "--gamma inf: must lie between 0 and 1"),
    ("--gae-lambda -0.1", "--gae-lambda -0.1: must lie between 0 and 1"),
    ("--clip-coef nan", "--clip-coef nan: must lie between 0"),
    ("--ent-coef nan", "--ent-coef nan: must lie between 0"),
    ("--ent-coef inf", "--ent-coef inf: must lie between 0"),
    ("--resume nowhere", "nowhere: no checkpoint.pt there"),
    ("--resume file", "file: no checkpoint.pt there"),
    ("--resume empty", "empty: no checkpoint.pt there"),
    ("--resume damaged", "damaged/checkpoint.pt: damaged, or not a checkpoint"),
    ("--evaluate cut", "cut/checkpoint.pt: damaged, or not a checkpoint"),
    ("--evaluate foreign", "foreign/checkpoint.pt: written by another.py; use that script"),
    ("--resume newer", "newer/checkpoint.pt: of another version of"),
    ("--resume older --gamma 0.5", "--gamma is 0.99"),
    ("--resume run --evaluate run", "--resume continues training and --evaluate plays"),
    ("--resume run --run-dir new", "--run-dir is for a new run"),
    ("--resume run --seed 2", "--seed is 1 in the run to resume"),
    ("--resume run --gamma 0.5", "--gamma is 0.99"),
    ("--resume run --env-id Other-v0", "--env-id is "),
    ("--resume run --num-envs 7", "--num-envs is "),
    ("--resume run --checkpoint-interval 0", "--checkpoint-interval 0: must lie between 1"),
    ("--run-dir file", "file: File exists; choose a folder"),
    ("--run-dir file/below", "file/below: Not a directory; choose a folder"),
    ("--run-dir full", "--run-dir full: not empty; --resume full"),
    ("--run-dir run", "--run-dir run: not empty; --resume run continues"),
    ("--track", "--track needs wandb: pip install wandb"),
    ("--capture-video", "--capture-video needs moviepy: pip install moviepy"),
    ("--evaluate run --capture-video", "--capture-video needs moviepy: pip install moviepy"),
]
CLIPPED = [
    ("--num-steps 4 --num-minibatches 9", "--num-minibatches 9: more than the"),
    ("--vf-coef inf", "--vf-coef inf: must lie between 0"),
    ("--max-grad-norm nan", "--max-grad-norm nan: must lie between 0"),
    ("--target-kl nan", "--target-kl nan: must lie between 0"),
    ("--update-epochs 1.5", "--update-epochs: invalid literal"),
    ("--minibatch-size -1", "--minibatch-size -1: must lie between 0"),
]
ITS_OWN = {
    ppo: [
        *CLIPPED,
        ("--env-id CartPol-v1", "CartPole-v1"),
        ("--env-id Cart-v1 --env-backend envpool", "CartPole-v1"),
        ("--env-id PromiseBox-v0", "continuous; see ppo_continuous_action.py"),
        ("--env-id PromiseTuple-v0 --env-backend async", "this script needs Discrete"),
        ("--env-backend asink", "'asink' for argument '--env-backend'"),
    ],
    ppo_continuous_action: [
        *CLIPPED,
        ("--env-id Penduluum-v1", "Pendulum-v1"),
        ("--env-id PromiseChoice-v0", "this script needs a flat Box; see ppo.py"),
        ("--env-id dm_control/cartpole-balance-v0", "needs shimmy: pip install 'shimmy"),
        ("--env-id Hopper-v4 --run-dir full", "--run-dir full: not empty"),
        ("--log-std-init inf", "--log-std-init inf: must lie between -9 and 9"),
        ("--upload-model", "--upload-model needs huggingface_hub: pip install huggingface_hub"),
    ],
    ppo_cma: [
        ("--env-name Penduluum-v1", "Pendulum-v1"),
        ("--env-id PromiseChoice-v0", "see ppo.py"),
        ("--env-id PromiseEndless-v0", "needs finite bounds; wrap in RescaleAction"),
        ("--env-backend async", "'async' for argument '--env-backend'"),
        ("--mode cma", "--mode cma: choose one of ppo-cma-m, ppo-cma, ppo, pg, pg-pos"),
        ("--iter-steps 0", "--iter-steps 0: must lie between 1"),
        ("--batch-size 0", "--minibatch-size 0: must lie between 1"),
        ("--history-buffer-size -1", "--history-buffer-size -1: must lie between 1"),
        ("-lr 0", "--learning-rate 0.0: must lie between 1e-09 and 1"),
        ("--ppo-epsilon inf", "--clip-coef inf: must lie between 0"),
        ("--render", "--render needs a display"),
    ],
    ppo_kl_adaptive: [
        ("--env-name Penduluum-v1", "Pendulum-v1"),
        ("--env-id PromiseTuple-v0", "this script needs a flat Box or Discrete"),
        ("--servo kody", "'kody' for argument '--servo'"),
        ("--kl-targ 0", "--kl-targ 0.0: must lie between 1e-09"),
        ("--kl-targ inf", "--kl-targ inf: must lie between 1e-09"),
        ("--beta inf", "--beta inf: must lie between 0"),
        ("--raise-factor 0.5", "--raise-factor 0.5: must lie between 1"),
        ("--hinge-coef inf", "--hinge-coef inf: must lie between 0"),
        ("--policy-logvar nan", "--policy-logvar nan: must lie between -20 and 20"),
        ("--value-learning-rate inf", "--value-learning-rate inf: must lie between 1e-09 and 1"),
        ("--beta-min 2 --beta-max 1", "--beta-min 2: above --beta-max 1"),
        ("-b 1", "--num-envs 2: more than the 1 episodes of an iteration"),
        ("--num-steps 4 -n 4", "--num-episodes counts whole batches of episodes"),
        ("--num-steps 4 --num-minibatches 9", "--num-minibatches 9: more than the 8"),
    ],
    ppo_atari_multigpu: [
        *CLIPPED,
        ("--env-id Breakot-v5", "Breakout-v5"),
        ("--env-id CartPole-v1", "--env-id CartPole-v1: no such game"),
        ("--num-envs 9", "--num-envs 9: must be a multiple of the 2 processes"),
        ("--local-num-envs -1", "--local-num-envs -1: must lie between 0"),
        ("--env-threads -1", "--env-threads -1: must lie between 0"),
        ("--backend mpl", "'mpl' for argument '--backend'"),
        ("--cuda --device-ids 0 2", "--device-ids [0, 2]: this node has 2 GPUs"),
        ("--cuda --device-ids -1", "--device-ids [-1]"),
        ("--device-ids one", "Error parsing --device-ids: "),
    ],
}
FOR_EACH = [(script, *case) for script in SMALL for case in WRONG + ITS_OWN[script]]

TRAIN = "run --env-ids A-v0 --command 'python train.py'"
TUNE = "tune --env-ids A-v0 --command 'python train.py' --search 'x float 0 1'"
SPEED = "speed --command 'python train.py'"
HARNESS = [
    ("", "run"),
    ("ruin", "run"),
    ("run --env-ids A-v0", "--command"),
    (f"{TRAIN} --worker 2", "--workers"),
    (f"{TRAIN} --workers two", "--workers: invalid literal"),
    (f"{TRAIN} --workers 0", "--workers 0: must be at least 1"),
    (f"{TRAIN} --num-seeds 0", "--num-seeds 0: must be at least 1"),
    (f"{TRAIN} --start-seed -1", "--start-seed -1: must be at least 0"),
    (f"{TRAIN} --eval-episodes -1", "--eval-episodes -1: must be at least 0"),
    (f"{TRAIN} --gpus-per-job -1", "--gpus-per-job -1"),
    (f"{TRAIN} --cluster sge", "'sge' for argument '--cluster'"),
    (f"{TRAIN} --variant a/b", "--variant 'a/b': must be a word"),
    (f"{TRAIN} --runs-dir file", "--runs-dir file"),
    ("run --env-ids A-v0 --command 'python none.py'", "none.py does not exist"),
    ("run --env-ids A-v0 --command 'pyton train.py'", "there is no program pyton"),
    ("run --env-ids --command 'python train.py'", "--env-ids"),
    ("run --env-ids A-v0 --command 'python train.py {seed}'", "{run_dir} is missing"),
    ("run --env-ids A B --command 'python train.py {seed} {run_dir}'", "{env_id} is missing"),
    ("run --env-ids A-v0 --command 'python train.py --seed 1'", "--seed is given to each job"),
    ("report run", "--output"),
    ("report --output new", "no folders: --output"),
    ("report nowhere --output new", "nowhere: no such folder"),
    ("report empty --output new", "no runs in empty"),
    ("report run --output file", "--output file: File exists"),
    ("report run --output new --algorithms dqn", "no run of dqn; there are ppo"),
    ("report run --output new --metric mean", "'mean' for argument '--metric'"),
    ("compare", "PATH"),
    ("compare run", "compare takes two folders, or one and --algorithm X Y"),
    ("compare run nowhere", "nowhere: no such folder"),
    ("compare run run --algorithm ppo dqn", "no run of dqn; there are ppo"),
    ("speed", "--command is missing"),
    ("speed --command 'python none.py'", "none.py does not exist"),
    (f"{SPEED} --rounds 0", "--rounds 0: must be at least 1"),
    (f"{SPEED} --threads 0", "--threads 0: must be at least 1"),
    (f"{SPEED} --seconds nan", "--seconds nan"),
    (f"{SPEED} --seconds inf", "--seconds inf"),
    (f"{SPEED} --vary num-envs", "--vary 'num-envs': give a flag and its values"),
    (f"{SPEED} --peer 'python train.py'", "--peer 'python train.py': give NAME=COMMAND"),
    (f"{SPEED} --output file/table.csv", "--output file/table.csv"),
    (f"{TUNE} --trials 0", "--trials 0: must be at least 1"),
    (f"{TUNE} --trials many", "--trials: invalid literal"),
    (f"{TUNE} --study file", "--study file: File exists"),
    (f"{TUNE} 'x int 1 2'", "--search: one of them is given twice"),
    (f"{TUNE} 'y log 0 1'", "--search 'y log 0 1': give NAME log LOW HIGH"),
    (f"{TUNE} 'y float 0 nan'", "--search 'y float 0 nan': give NAME log LOW HIGH"),
    ("tune --env-ids A-v0 --command 'python train.py'", "--search"),
]


def start(script, argv: list[str]):
    """What the script does as a program."""
    args = script.parse_args(argv)
    (script.evaluate if args.evaluate else script.train)(args)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run of a script, and what is none."""
    made = {}

    def get(script) -> Path:
        if script in made:
            return made[script]
        folder = made[script] = tmp_path_factory.mktemp(script.__name__)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(envpool, "make", Toy)
            patch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)
            flags = f"{SMALL[script]} --total-timesteps 32 --run-dir {folder / 'run'}"
            script.train(script.parse_args(flags.split()))
        for name in ("empty", "full", "damaged", "cut", "foreign", "newer", "older"):
            (folder / name).mkdir()
        (folder / "file").write_text("mine")
        (folder / "full" / "notes.txt").write_text("mine")
        (folder / "train.py").write_text("raise SystemExit('started')")
        whole = (folder / "run" / "checkpoint.pt").read_bytes()
        middle = len(whole) // 2
        changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        (folder / "damaged" / "checkpoint.pt").write_bytes(changed)
        (folder / "cut" / "checkpoint.pt").write_bytes(whole[:middle])
        saved = script.load_checkpoint(folder / "run")["args"]
        for name, stem, args in (
            ("foreign", "another", saved),
            ("newer", script.__name__, saved | {"temperature": 1.0}),
            ("older", script.__name__, {k: v for k, v in saved.items() if k != "gamma"}),
        ):
            write_checkpoint(folder / name, {"script": stem, "args": args})
        return folder

    return get


def tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file and folder with its size and the time of its last change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.fixture
def refused(place, monkeypatch, capfd):
    """Check that a call ends with one line on standard error and changes no file."""

    def check(script, call, name: str, says: str):
        folder = place(script)
        monkeypatch.chdir(folder)
        before = tree(folder)
        with pytest.raises(SystemExit) as end:
            call()
        err = capfd.readouterr().err
        assert end.value.code == 2, err
        assert err.count("\n") == 1, err
        assert err.startswith(name)
        assert says in err
        assert tree(folder) == before

    return check


@pytest.mark.parametrize(
    ("script", "line", "says"), FOR_EACH, ids=[f"{s.__name__} {line}" for s, line, _ in FOR_EACH]
)
def test_wrong_input_of_a_script(script, line, says, refused, monkeypatch):
    installed(monkeypatch, wandb=False, moviepy=False, huggingface_hub=False, shimmy=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(envpool, "make", Toy if script is ppo_atari_multigpu else envpool.make)
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)
    if "processes" in says:
        monkeypatch.setenv("WORLD_SIZE", "2")
    if "--device-ids" in line:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # soon over if it is not refused
    argv = shlex.split(f"{SMALL[script]} --total-timesteps 32 {line}")
    refused(script, lambda: start(script, argv), f"{script.__name__}.py: ", says)


@pytest.mark.parametrize(("line", "says"), HARNESS, ids=[line for line, _ in HARNESS])
def test_wrong_input_of_the_harness(line, says, refused, monkeypatch):
    def started(*_, **__):
        raise AssertionError("not refused")

    for owner, name in ((benchmark.run.Local, "submit"), (benchmark.speed, "measure")):
        monkeypatch.setattr(owner, name, started)
    monkeypatch.setattr(sys, "argv", ["benchmark", *shlex.split(line)])
    refused(ppo, benchmark.__main__.main, "benchmark", says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ppo.py", "--learning-rate", "nan"], "ppo.py: --learning-rate nan: must lie between"),
        (["ppo_cma.py", "--resume", "file"], "ppo_cma.py: file: no checkpoint.pt there"),
        (["-m", "benchmark", *shlex.split(TRAIN), "--workers", "0"], "benchmark run: --workers 0"),
    ],
    ids=["ppo", "ppo_cma", "benchmark"],
)
def test_wrong_input_from_a_shell(words, says, root, place, monkeypatch):
    folder = place(ppo)
    monkeypatch.setenv("PYTHONPATH", str(root))
    before = tree(folder)
    result = run(root / words[0] if words[0].endswith(".py") else words[0], *words[1:], cwd=folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1, result.stderr
    assert tree(folder) == before


# --- long runs ------------------------------------------------------------------------------------

STEPS = {  # that an iteration of SMALL counts in --total-timesteps
    ppo: 44, ppo_continuous_action: 44, ppo_cma: 40, ppo_kl_adaptive: 40, ppo_atari_multigpu: 32
}  # fmt: skip
ENV = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def sample(name: str, folder: str, iterations: str, every: str):
    """Train and write down, every so many iterations: iteration, resident bytes, open files, rows
    of episodes.csv, its bytes, bytes of the event file."""
    script, samples = importlib.import_module(name), []
    envpool.make, plain = Toy, script.Run.log_iteration
    ppo_cma.pretrain_policy = lambda agent: None

    def log_iteration(run, metrics):
        plain(run, metrics)
        if run.iteration % int(every) == 0:
            run.writer.flush()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(list(Path("/proc/self/fd").iterdir()))
            events, table = run.logs()
            with open(table) as file:
                sizes = sum(1 for _ in file) - 1, table.stat().st_size, events.stat().st_size
            samples.append([run.iteration, pages * os.sysconf("SC_PAGE_SIZE"), files, *sizes])

    script.Run.log_iteration = log_iteration
    flags = f"{SMALL[script]} --run-dir {folder}/run --total-timesteps"
    script.train(script.parse_args([*flags.split(), str(STEPS[script] * int(iterations))]))
    Path(folder, "samples.json").write_text(json.dumps(samples))


def sizes_of_points(path: Path) -> dict[str, list[int]]:
    """Bytes in an event file of each point of each tag, or tags written together."""
    sizes = {}
    for raw in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(raw)
        tag = " ".join(value.tag for value in event.summary.value) or "version"
        sizes.setdefault(tag, []).append(len(raw) + 16)  # its length and two checksums
    return sizes


# Measured: -0.3 to 0.2 MB per 1,000 iterations; in the first 300 a few pages more. The screens of
# Toy come and go by 10 MB; an iteration's are 1 MB, so that 1,000 that stay would be 900 MB.
LONG = [
    (ppo, 300, 10),
    (ppo_cma, 300, 10),
    *(
        pytest.param(script, 2000, 1, marks=pytest.mark.slow)
        for script in SMALL if script is not ppo_atari_multigpu
    ),
    pytest.param(ppo_atari_multigpu, 200, 200, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize(("script", "iterations", "bound"), LONG)
def test_a_long_run_does_not_grow(script, iterations, bound, tmp_path):
    """`bound`: MB per 1,000 iterations, of the median slope between two samples after the first
    quarter."""
    code = "import sys, test_promises; test_promises.sample(*sys.argv[1:])"
    words = [script.__name__, str(tmp_path), str(iterations), str(iterations // 20)]
    result = run("-c", code, *words, env=ENV)
    assert result.returncode == 0, result.stderr
    samples = np.array(json.loads((tmp_path / "samples.json").read_text()))
    assert samples[:, 0].tolist() == [iterations * k // 20 for k in range(1, 21)]
    at, memory, files, episodes, table, events = samples[5:].T
    pairs = itertools.combinations(range(len(at)), 2)
    slope = np.median([(memory[j] - memory[i]) / (at[j] - at[i]) for i, j in pairs])
    assert slope * 1000 < bound * 1e6
    assert set(files) == {files[0]}

    # an episode: a row, and a pair of points in TensorBoard; an iteration: 10 to 16 points
    if script is not ppo_atari_multigpu:
        assert (episodes == 4 * at).all()
    row = np.diff(table) / np.diff(episodes)
    assert (row > 15).all() and (row < 22).all()
    growth = np.diff(events)
    assert growth.max() < 1.05 * growth.min()
    (path,) = (tmp_path / "run").glob("events.out.tfevents.*")
    points = sizes_of_points(path)
    assert sum(map(sum, points.values())) == path.stat().st_size
    number = {tag: len(sizes) for tag, sizes in points.items()}
    assert number.pop("version") == number.pop("hyperparameters/text_summary") == 1
    assert number.pop("charts/episodic_return charts/episodic_length") == episodes[-1]
    assert set(number.values()) == {iterations}
    assert 10 <= len(number) <= 16
    assert max(size for tag in number for size in points[tag]) <= 72


# --- security -------------------------------------------------------------------------------------

SOURCES = [Path(script.__file__) for script in SMALL] + sorted((ROOT / "benchmark").glob("*.py"))
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_that_is_read_is_run(path):
    text = path.read_text()
    assert list(dangers(text)) == []
    assert ("torch.load(" in text) == (path.parent == ROOT)


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)", "torch.load(path, weights_only=False)", "import pickle",
        "from torch import load", "import cloudpickle as c", "np.load(path, allow_pickle=True)",
        "eval(text)", "exec(text)", "os.system(text)", "subprocess.run(text, shell=True)",
    ],
)  # fmt: skip
def test_what_runs_what_it_reads_would_be_seen(line):
    assert list(dangers(f"def f():\n    {line}")) == [line]


# A run as a program; what it does with sockets, and which modules it has at its end
WATCHED = """
import atexit, json, runpy, sys
events, folder = [], sys.argv.pop(1)

def hook(event, args):
    if event in ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"):
        events.append([event, str(args)])
        raise RuntimeError(event)

@atexit.register
def tell():
    with open(f"{folder}/told.json", "w") as file:
        json.dump({"events": events, "modules": sorted(sys.modules)}, file)

sys.addaudithook(hook)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FLAGS = {
    ppo: "--env-id CartPole-v1 --no-compile",
    ppo_continuous_action: (
        "--env-id Pendulum-v1 --env-backend async --num-envs 2 --num-steps 128 --no-compile"
    ),
    ppo_cma: "--env-id Pendulum-v1 --iter-steps 400 --n-updates 5",
    ppo_kl_adaptive: "--env-id Pendulum-v1 -b 2",
    ppo_atari_multigpu: f"--env-id Pong-v5 {SMALL[ppo_atari_multigpu]}",
}


def sockets(pid: int) -> list[str]:
    """Internet sockets of a process, in any state, as /proc lists them."""
    links = [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    mine = {link.readlink().name[8:-1] for link in links}  # socket:[12345]
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
        found += [f"{kind} {line}" for line in lines if line.split()[9] in mine]
    return found


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in threads for child in path.read_text().split()]


LINUX = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc")


@LINUX
@pytest.mark.parametrize(
    ("script", "more"),
    [
        *((script, "") for script in SMALL),
        pytest.param(ppo, "--compile --compile-from 0", marks=pytest.mark.slow),
    ],
)
def test_nothing_listens_or_connects(script, more, tmp_path):
    flags = f"{FLAGS[script]} --run-dir {tmp_path / 'run'} {more}"
    words = [tmp_path, script.__file__, *flags.split()]
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert any(line.startswith("SPS: ") for line in process.stdout)
        family = [process.pid, *children(process.pid)]
        if not more:  # the compiler has processes, too
            assert len(family) == (3 if script is ppo_continuous_action else 1)
        assert [sockets(pid) for pid in family] == [[]] * len(family)
        process.terminate()
        process.stdout.read()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["events"] == []
    packages = {name.partition(".")[0] for name in told["modules"]}
    assert packages >= {"torch", "gymnasium", "tensorboard"}
    assert not packages & {"wandb", "huggingface_hub"}


@LINUX
def test_a_socket_would_be_seen(tmp_path):
    assert sockets(os.getpid()) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        (line,) = sockets(os.getpid())
        assert f"0100007F:{server.getsockname()[1]:04X}" in line
    program = "import socket; socket.create_connection(('127.0.0.1', 9))"
    (tmp_path / "connects.py").write_text(program)
    result = run("-c", WATCHED, str(tmp_path), str(tmp_path / "connects.py"))
    assert result.returncode == 1
    told = json.loads((tmp_path / "told.json").read_text())
    assert [event for event, _ in told["events"]] == ["socket.getaddrinfo"]


@ALL
def test_ctrl_c_passed_on_by_a_launcher_and_after_the_end_of_its_reader(script, tmp_path):
    """`uv run ppo.py | tee log`: tee ends at Ctrl-C, and uv passes its own copy on."""
    words = [script.__file__, *FLAGS[script].split(), "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert any(line.startswith("SPS: ") for line in process.stdout)
        process.stdout.close()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        told = process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGINT, told
    finally:
        process.kill()
    assert told.count("stopping after this iteration; Ctrl-C: at once\n") == 1
    step = script.load_checkpoint(tmp_path / "run")["global_step"]
    assert f"stopped at step {step:,}; go on with: python {script.__name__}.py --resume" in told
    assert "Traceback" not in told


@ALL
def test_a_second_ctrl_c_acts_at_once(script):
    # a shell's & has it ignored
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    with script.stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop == [signal.SIGINT] * 2
    assert signal.signal(signal.SIGINT, inherited) is signal.default_int_handler


def test_tensorboard_is_never_opened_to_others():
    texts = [*SOURCES, *ROOT.glob("*.md"), *(ROOT / "benchmark").glob("*.s*")]
    found = "".join(path.read_text() for path in texts)
    assert "tensorboard --logdir runs" in found
    assert not re.search(r"bind_all|--host[= ]|0\.0\.0\.0", found)


def test_readme_has_the_numbers_of_these_tests():
    text = (ROOT / "README.md").read_text()
    lines = f"{len(FOR_EACH)} wrong lines for the scripts, {len(HARNESS)} for the harness"
    assert lines in text
    faults = importlib.import_module("test_faults_environments")
    told = f"{len(faults.FAULTS)} faults in {len(faults.GYMNASIUM)} setups"
    assert told in text
    spoilt = len(faults.DAMAGE) * len(faults.LOSSES) + len(faults.SPOILT)
    assert f"{spoilt} spoilt minibatches" in text
