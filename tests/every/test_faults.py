"""Kill, stop and mislead every script. Each is trained in copies of this process, which end like
programs."""

import importlib
import os
import pickle
from pathlib import Path

import envpool
import gymnasium as gym
import pytest
import torch
import torch._dynamo  # so does an optimizer of torch's: once here, not in each copy
from program import (
    content,
    toy,
    write_checkpoint,
)

import ppo_cma

CLIPPED = "--num-envs 2 --num-steps 40 --num-minibatches 2 --update-epochs 2 --no-compile"
# Flags of each script with which an iteration takes some 20 ms, and its steps
SETTINGS = {
    "ppo": (f"--env-id CartPole-v1 {CLIPPED}", 80),
    "ppo_continuous_action": (f"--env-id InvertedPendulum-v4 {CLIPPED}", 80),
    "ppo_cma": (
        "--env-id InvertedPendulum-v4 --iter-steps 200 --n-updates 2 --minibatch-size 32 "
        "--history-buffer-size 3",
        200,
    ),
    "ppo_kl_adaptive": ("--env-id CartPole-v1 -b 4 --update-epochs 2 --value-epochs 2 -m 4", 130),
}
ENVPOOL = "ppo_atari_multigpu", "ppo_atari_lstm", "ppo_procgen"  # after a resume games are new ones
for script in ENVPOOL:
    SETTINGS[script] = (
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
        "--env-threads 1" + " --num-levels 2 --eval-episodes 2" * (script == "ppo_procgen"),
        32,
    )
EVERY = pytest.mark.parametrize("script", SETTINGS)
N = 6  # iterations of a run


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.setattr(envpool, "make", toy)
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)  # which takes 4 s


def new(script: str, folder: Path, iterations: int = N, every: int = 2) -> list[str]:
    flags, steps = SETTINGS[script]
    more = f"--checkpoint-interval {every} --total-timesteps {iterations * steps} --no-cuda"
    return f"{flags} {more} --run-dir {folder}".split()


def train(script: str, argv: list[str]):
    module = importlib.import_module(script)
    return module.train(module.parse_args(argv))


def load(script: str, folder: Path) -> dict:
    return importlib.import_module(script).load_checkpoint(folder)


# --- a checkpoint that is not what was written ----------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each script, one iteration long; its checkpoint is put back after each test."""
    folders = {}

    def get(script: str) -> Path:
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp(script)
            train(script, new(script, folders[script], 1))
        return folders[script]

    return get


@pytest.fixture
def refused(capfd):
    """Check that --resume and --evaluate of a folder end in one line, and change nothing in it."""

    def check(script: str, folder: Path, *says: str, modes=("resume", "evaluate")):
        module, before = importlib.import_module(script), content(folder)
        for mode in modes:
            with pytest.raises(SystemExit) as end:
                args = module.parse_args([f"--{mode}", str(folder)])
                (module.evaluate if args.evaluate else module.train)(args)
            assert end.value.code == 2
            err = capfd.readouterr().err
            assert err.startswith(f"{script}.py: {folder}: {says[0]}")
            assert all(part in err for part in says)
            assert err.count("\n") == 1
        assert content(folder) == before

    return check


@EVERY
def test_a_damaged_checkpoint_is_one_line(script, runs, refused, tmp_path):
    whole, path = (runs(script) / "checkpoint.pt").read_bytes(), tmp_path / "checkpoint.pt"
    refused(script, tmp_path, "no checkpoint.pt")
    for data in (
        b"",
        b"to do: train\n" * 99,
        *(whole[: len(whole) * k // 5] for k in (1, 2, 3, 4)),
    ):
        path.write_bytes(data)
        refused(script, tmp_path, "no checkpoint.pt")
    good = load(script, runs(script))
    torch.save(good["agent"], path)  # the weights alone
    refused(script, tmp_path, "no checkpoint.pt")
    write_checkpoint(tmp_path, good | {"args": vars(good["args"]) | {"epsilon": 0.2}})
    refused(script, tmp_path, "no checkpoint.pt", "TypeError")
    write_checkpoint(tmp_path, good | {"agent": {}})
    refused(script, tmp_path, "its agent does not fit the environment", modes=["evaluate"])


class Bomb:
    """Unpickled, it runs `function(*args)`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@EVERY
def test_no_code_in_a_checkpoint_runs(script, runs, refused, tmp_path):
    good, mark = load(script, runs(script)), tmp_path / "mark"
    for bomb in Bomb(os.system, f"touch {mark}"), Bomb(open, str(mark), "w"):
        pickle.loads(pickle.dumps(bomb))
        mark.unlink()  # which shows that it would work
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        write_checkpoint(folder, good | {"agent": bomb})
        refused(script, folder, "no checkpoint.pt", "UnpicklingError")
        (folder / "checkpoint.pt").write_bytes(pickle.dumps({"agent": bomb}, protocol=2))
        refused(script, folder, "no checkpoint.pt")
        assert not mark.exists()


@pytest.mark.parametrize("script", sorted(SETTINGS.keys() - set(ENVPOOL)))
def test_a_module_is_imported_only_if_the_command_names_it(
    script, runs, monkeypatch, tmp_path, capfd
):
    module, good = importlib.import_module(script), load(script, runs(script))
    spec, mark, name = gym.spec(good["args"].env_id), tmp_path / "mark", f"of_{script}"
    (tmp_path / f"{name}.py").write_text(
        f"import gymnasium as gym\nopen({str(mark)!r}, 'w').close()\n"
        f"gym.register('Of-{script}-v0', {spec.entry_point!r}, max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env_id = f"{name}:Of-{script}-v0"
    write_checkpoint(tmp_path, good | {"args": vars(good["args"]) | {"env_id": env_id}})
    evaluate, resume = ([f"--{mode}", str(tmp_path)] for mode in ("evaluate", "resume"))
    for use in (
        lambda: module.evaluate(module.parse_args(evaluate)),
        lambda: module.train(module.parse_args(resume)),
        lambda: module.load(tmp_path),
    ):
        with pytest.raises(SystemExit) as end:
            use()
        assert end.value.code == 2
        err = capfd.readouterr().err
        assert err.startswith(f"{script}.py: --env-id Of-{script}-v0: ")
        assert f"Environment `Of-{script}`" in err
        assert "your own: module:Id" in err
    assert not mark.exists()
    named = module.parse_args([*evaluate, "--env-id", env_id, "--eval-episodes", "2"])
    assert len(module.evaluate(named)) == 2
    assert mark.exists()  # which shows that it would work
    assert module.load(tmp_path)[1].env_id == f"Of-{script}-v0"  # now that it is registered
