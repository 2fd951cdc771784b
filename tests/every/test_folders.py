"""ppo.py and ppo_continuous_action.py: one folder, one run; what is damaged, foreign or cannot be
written is told in one line; environments are closed, in threads, too."""

import shutil
import threading
from pathlib import Path

import gymnasium as gym
import pytest
from program import Clockwork, status

import ppo
import ppo_continuous_action

SCRIPTS = {"ppo": ppo, "ppo_continuous_action": ppo_continuous_action}
EACH = pytest.mark.parametrize("name", SCRIPTS)
SPACES = {"ppo": gym.spaces.Discrete(2), "ppo_continuous_action": gym.spaces.Box(-1, 1, (1,))}
SIZES = "--num-envs 2 --num-steps 22 --num-minibatches 2 --update-epochs 1 --no-cuda --no-compile"


class Closing(Clockwork):
    """Notes how many are open."""

    opened = closed = 0

    def __init__(self, *given, fault=None, **kwargs):
        super().__init__(*given, **kwargs)
        self.fault = fault
        Closing.opened += 1

    def step(self, action):
        if self.fault and self.episode == 3:
            raise OSError(self.fault)
        return super().step(action)

    def close(self):
        Closing.closed += 1


for script_name, space in SPACES.items():
    kwargs = {"action_space": space}
    gym.register(f"Folder_{script_name}-v0", Closing, kwargs=kwargs)


def parse(name: str, flags: str):
    env_id = "" if "--env-id" in flags or "--resume" in flags else f"--env-id Folder_{name}-v0"
    sizes = "" if "--resume" in flags else f"{SIZES} --total-timesteps 88"
    return SCRIPTS[name].parse_args(f"{env_id} {sizes} {flags}".split())


def train(name: str, flags: str) -> Path:
    return SCRIPTS[name].train(parse(name, flags))


def refused(capfd, call, *given) -> str:
    """The one line with which it ends."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        call(*given)
    err = capfd.readouterr().err
    assert end.value.code == 2, err
    assert err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of a script; never changed."""
    return {
        name: train(name, f"--run-dir {tmp_path_factory.mktemp(name) / 'run'}") for name in SCRIPTS
    }


@pytest.fixture
def folder(runs, tmp_path):
    """A copy of a script's run."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(runs[name], tmp_path / "run"))

    return copy


# --- ends -----------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("how", ["finished", "failed", "refused"])
def test_environments_are_closed_however_a_run_ends(name, how, tmp_path, runs, monkeypatch):
    script = SCRIPTS[name]
    before = Closing.opened - Closing.closed
    made = Closing.opened
    flags = f"--run-dir {tmp_path / 'run'} --total-timesteps 176"
    if how == "finished":
        train(name, flags)
    elif how == "failed":
        with pytest.raises(OSError, match="cable"):
            train(name, f'{flags} --env-kwargs {{"fault":"cable"}}')
        assert status(tmp_path / "run") == "failed"
    else:
        with pytest.raises(SystemExit):
            train(name, f"--run-dir {runs[name]}")
    assert Closing.opened == made + 2
    assert Closing.opened - Closing.closed == before
    args = script.parse_args(["--evaluate", str(runs[name]), "--eval-episodes", "1"])
    script.evaluate(args)
    assert Closing.opened - Closing.closed == before


@EACH
def test_training_in_a_thread(name, tmp_path):
    """As in servers of notebooks and in tuners; two at once."""
    done, errors = [], []

    def start(k: int):
        try:
            done.append(train(name, f"--run-dir {tmp_path / str(k)} --seed {k}"))
        except BaseException as error:
            errors.append(error)

    args = [threading.Thread(target=start, args=(k,)) for k in range(2)]
    for thread in args:
        thread.start()
    for thread in args:
        thread.join(60)
    assert not errors
    assert [status(each) for each in done] == ["finished", "finished"]
