"""ppo.py and ppo_continuous_action.py: one folder, one run; what is damaged, foreign or cannot be
written is told in one line; environments are closed, in threads, too."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import ROOT, Clockwork, content, rows, run, status

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


class Endless(Clockwork):
    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, False, False, {}


class Needy(Clockwork):
    def __init__(self, action_space, data):
        super().__init__(action_space)
        self.data = data


for script_name, space in SPACES.items():
    kwargs = {"action_space": space}
    gym.register(f"Folder_{script_name}-v0", Closing, kwargs=kwargs)
    gym.register(f"Endless_{script_name}-v0", Endless, kwargs=kwargs)
    gym.register(f"Needy_{script_name}-v0", Needy, kwargs=kwargs)


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


# --- one folder, one run --------------------------------------------------------------------------


@EACH
def test_starts_within_one_second_have_folders_of_their_own(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.5)
    made = [train(name, "") for _ in range(3)]
    assert len(set(made)) == 3
    assert [len(rows(each)) for each in made] == [9, 9, 9]


@EACH
@pytest.mark.parametrize("how", ["--resume", "--run-dir"])
def test_a_folder_in_use_is_refused(name, how, folder, capfd):
    """While a run holds it, and not after that."""
    script, kept, seen = SCRIPTS[name], folder(name), []
    plain = script.update

    def still(folder: Path) -> dict:
        """All but the bytes of TensorBoard's files, which a thread of the run still writes."""
        return {
            path: "" if path.name.startswith("events.") else held
            for path, held in content(folder).items()
        }

    def update(*given):
        if not seen:
            before = still(kept)
            target = kept if how == "--resume" else f"{kept} --total-timesteps 44"
            err = refused(capfd, train, name, f"{how} {target}")
            seen.append(err)
            assert still(kept) == before
        return plain(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "update", update)
        train(name, f"--resume {kept} --total-timesteps 176")
    assert seen[0].endswith(f"{kept}: another process trains in this folder\n")
    assert len(rows(kept)) == 17
    assert status(kept) == "finished"
    train(name, f"--resume {kept} --total-timesteps 220")


@EACH
def test_a_start_that_failed_gives_the_folder_up(name, folder):
    """At once, though a notebook keeps the last error with all its frames."""
    kept = folder(name)
    with pytest.raises(SystemExit) as error:
        train(name, f"--run-dir {kept}")
    train(name, f"--resume {kept} --total-timesteps 132")
    assert error.tb


@EACH
def test_torchrun_of_one_process_is_refused(name, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "ppo_atari_multigpu.py" in refused(capfd, SCRIPTS[name].parse_args, [])
    monkeypatch.setenv("WORLD_SIZE", "1")
    SCRIPTS[name].parse_args([])


@EACH
def test_flipped_bits_are_found(name, folder, capfd):
    """Of 40 places in the checkpoint none is loaded as if nothing were."""
    kept, script = folder(name), SCRIPTS[name]
    path, accepted = kept / "checkpoint.pt", 0
    whole = path.read_bytes()
    original = script.load(kept)[0].state_dict()
    for place in np.linspace(100, len(whole) - 100, 40).astype(int):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        try:
            found = script.load(kept)[0].state_dict()
        except SystemExit:
            continue
        accepted += 1  # in the padding between files, which holds nothing
        assert all(torch.equal(found[key], x) for key, x in original.items())
    assert accepted < 20


@EACH
@pytest.mark.parametrize(
    "link", ["episodes.csv", "run.json", "checkpoint.pt.tmp", "videos", "videos/a.mp4"]
)
def test_links_are_not_written_through(name, link, folder, tmp_path, capfd):
    kept, outside = folder(name), tmp_path / "outside"
    outside.write_text("mine")
    (kept / link).unlink(missing_ok=True)
    (kept / link).parent.mkdir(exist_ok=True)
    (kept / link).symlink_to(outside)
    err = refused(capfd, train, name, f"--resume {kept} --total-timesteps 176")
    assert f"{kept / link} is a link" in err
    assert outside.read_text() == "mine"


# --- damage ---------------------------------------------------------------------------------------


def torn(data: bytes) -> bytes:
    return data[:-9]


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def garbage(data: bytes) -> bytes:
    return data + b"\xff\xfe,,,\n12,nonsense\n\x00"


def emptied(data: bytes) -> bytes:
    return b""


def later(data: bytes) -> bytes:
    """Rows that a killed run logged after its checkpoint."""
    return data + b"99,1.00,10.0,10\n109,1.00,10.0,10\n"


@EACH
@pytest.mark.parametrize("damage", [torn, crlf, garbage, emptied, later])
def test_episodes_csv_is_cut_back_and_goes_on(name, damage, folder, tmp_path):
    kept = folder(name)
    path = kept / "episodes.csv"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    train(name, f"--resume {kept} --total-timesteps 176")
    after = path.read_bytes().replace(b"\r\n", b"\n")
    known = {torn: 7, emptied: 0}.get(damage, 8)
    assert after.startswith(b"\n".join(before.split(b"\n")[: known + 1]) + b"\n")
    assert len(after.splitlines()) == 1 + known + 8
    lines = after.decode().splitlines()
    assert all(re.fullmatch(r"\d+,[\d.]+,10\.0,10", line) for line in lines[1:])


WRONG = {
    "agent": [None, 5, [1], {}, {"a": 1}],
    "adam": [None, {}, torch.zeros(3), {"parameters": torch.zeros(1)}],
    "rng": [None, "x", {}],
    "played": [5, [(0, torch.zeros(2, 3))] * 2, [(-5, torch.zeros(0))] * 2, [(0, torch.zeros(0))]],
    "counters": [None, (1, 2, 3), ("a", 1, 1.0, 1), (-5, 0, 0.0, 0), (0, 0, float("nan"), 0)],
    "returns": [5, ["a"], [None], [[1, 2]], {"a": 1}],
    "args": [None, {"seed": 1, "epsilon": 0.2}, {"env_kwargs": "[["}, {"num_envs": "2"}],
}


@EACH
@pytest.mark.parametrize("field", WRONG)
def test_fields_of_wrong_types_or_shapes_are_one_line(name, field, folder, capfd):
    kept = folder(name)
    good = torch.load(kept / "checkpoint.pt", weights_only=True)
    for value in WRONG[field]:
        torch.save(good | {field: value}, kept / "checkpoint.pt")
        err = refused(capfd, train, name, f"--resume {kept} --total-timesteps 176")
        assert err.startswith(f"{name}.py: ")
    torch.save({key: x for key, x in good.items() if key != field}, kept / "checkpoint.pt")
    if field in ("agent", "adam", "rng", "args"):
        refused(capfd, train, name, f"--resume {kept} --total-timesteps 176")


@EACH
def test_a_checkpoint_of_another_script_names_it(name, runs, capfd):
    (other,) = SCRIPTS.keys() - {name}
    err = refused(capfd, train, name, f"--resume {runs[other]}")
    assert f"made by {other}.py" in err


@EACH
def test_a_resumed_run_that_fails_at_once_keeps_its_folder(name, folder, monkeypatch):
    """Its checkpoint is of before the first step; a new run's folder would go."""
    script, kept = SCRIPTS[name], folder(name)
    good = torch.load(kept / "checkpoint.pt", weights_only=True)
    torch.save(good | {"counters": (0, 0, 0.0, 0)}, kept / "checkpoint.pt")
    monkeypatch.setattr(script.Envs, "step", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(name, f"--resume {kept}")
    assert (kept / "checkpoint.pt").exists() and status(kept) == "failed"
    with pytest.raises(ZeroDivisionError):
        train(name, f"--run-dir {kept.parent / 'new'}")
    assert not (kept.parent / "new").exists()


# --- what cannot be meant or written --------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    "flags",
    ["--env-id :", "--env-id a:b:c", "--env-id nowhere:", "--env-id :CartPole-v1", "--env-id -v0"],
)
def test_strange_ids_are_one_line(name, flags, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = flags.replace(" -v0", "=-v0")
    assert "--env-id" in refused(capfd, lambda: SCRIPTS[name].train(parse(name, flags)))
    assert not list(tmp_path.iterdir())


@EACH
@pytest.mark.parametrize("where", ["a file", "below a file", "too long", "read-only"])
def test_folders_that_cannot_be_are_one_line(name, where, capfd, tmp_path):
    (tmp_path / "file").write_text("mine")
    target = {"a file": "file", "below a file": "file/run", "too long": "x" * 300}.get(where)
    if where == "read-only":
        target = "/proc/run"
    err = refused(capfd, train, name, f"--run-dir {tmp_path / target}")
    assert str(tmp_path / target) in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@EACH
def test_arguments_of_the_environment(name, tmp_path, capfd):
    script, env_id = SCRIPTS[name], f"Needy_{name}-v0"
    err = refused(capfd, train, name, f"--env-id {env_id}")
    assert f"--env-id {env_id}: TypeError" in err and "'data'" in err and "--env-kwargs" in err
    assert "raised in" in err
    flags = f'--env-id {env_id} --env-kwargs {{"data":"x.csv"}} --run-dir {tmp_path / "run"}'
    kept = train(name, flags)
    assert script.load_checkpoint(kept)["args"].env_kwargs == '{"data":"x.csv"}'
    args = script.parse_args(["--evaluate", str(kept), "--eval-episodes", "2"])
    assert script.evaluate(args) == [10.0, 10.0]
    for wrong in ("[1]", "{", "5", '{"a":1}}', "null"):
        with pytest.raises(SystemExit):
            parse(name, f"--env-kwargs {wrong}")
        assert "no JSON object" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    "error", [AssertionError("no"), NotImplementedError(), OSError("dis\nplay")]
)
@EACH
def test_whatever_making_an_environment_raises_is_one_line(name, error, monkeypatch, capfd):
    def make(*given, **kwargs):
        raise error

    monkeypatch.setattr(gym, "make", make)
    err = refused(capfd, train, name, "")
    assert type(error).__name__ in err and "test_folders.py, line" in err


@pytest.mark.parametrize(
    "name", [pytest.param("ppo", marks=pytest.mark.slow), "ppo_continuous_action"]
)
def test_an_environment_that_never_ends_is_told(name, tmp_path, capfd, monkeypatch):
    script = SCRIPTS[name]
    kept = train(name, f"--env-id Endless_{name}-v0 --run-dir {tmp_path / 'run'}")
    assert json.loads((kept / "run.json").read_text())["final_return"] is None
    args = script.parse_args(["--evaluate", str(kept)])
    assert "100,000 steps, no end" in refused(capfd, script.evaluate, args)
    limit = '{"max_episode_steps":50}'
    args = script.parse_args(["--evaluate", str(kept), "--env-kwargs", limit])
    assert script.evaluate(args) == [50.0] * 10


def test_an_ascii_terminal_and_a_folder_of_other_letters(tmp_path):
    flags = f"--env-id CartPole-v1 {SIZES} --total-timesteps 88 --run-dir {tmp_path / 'öß€'}"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = run(ROOT / "ppo.py", *flags.split(), env=env)
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "öß€") == "finished"


# --- ends -----------------------------------------------------------------------------------------
