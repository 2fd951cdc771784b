"""ppo_cma.py and ppo_kl_adaptive.py beyond their algorithms: worker processes, one definition of
the policy, boxes of any shape and type, what is edited or damaged."""

import json
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import episodes_toy
import numpy as np
import pytest
import torch
from program import (
    rows,
    scalars,
    status,
    write_checkpoint,
)

import ppo_cma
import ppo_kl_adaptive

SMALL = {
    ppo_cma: "--iter-steps 120 --n-updates 3 --minibatch-size 16 --total-timesteps 600",
    ppo_kl_adaptive: "-b 8 --update-epochs 2 --value-epochs 2 -m 3 -n 40",
}
BOTH = pytest.mark.parametrize("script", SMALL, ids=lambda module: module.__name__)
TOY = "--env-id episodes_toy:Lengths-v0 --num-envs 4 --checkpoint-interval 2 --no-cuda"


@pytest.fixture(autouse=True)
def no_pretraining(monkeypatch):
    monkeypatch.setattr(ppo_cma, "pretrain_policy", lambda agent: None)  # which takes 4 s


def line(script, folder: Path, flags: str = "", **kwargs) -> list[str]:
    argv = f"{TOY} {SMALL[script]} {flags} --run-dir {folder}".split()
    return [*argv, "--env-kwargs", json.dumps(kwargs)]


def train(script, folder: Path, flags: str = "", **kwargs) -> dict:
    script.train(script.parse_args(line(script, folder, flags, **kwargs)))
    return script.load_checkpoint(folder)


@BOTH
def test_more_workers_than_environments_are_refused(script, capfd):
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--num-envs", "2", "--env-workers", "3"])
    assert end.value.code == 2
    assert "--env-workers 3: not in 0 ... 2" in capfd.readouterr().err


# --- folders --------------------------------------------------------------------------------------


@BOTH
def test_tracking_with_a_stand_in(script, tmp_path, monkeypatch):
    def init(**kwargs):
        before = [call for call in calls if call != "finished"]  # the writer follows it
        assert len(list((tmp_path / "run").glob("events.*"))) == len(before)
        calls.append(kwargs)
        return SimpleNamespace(id=kwargs["id"] or "made", finish=lambda: calls.append("finished"))

    calls = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=True, init=init))
    assert train(script, tmp_path / "run", "--track --wandb-entity me")["wandb"] == "made"
    call, end = calls
    assert (call["project"], call["entity"], call["sync_tensorboard"]) == ("ppo", "me", True)
    assert (call["name"], call["config"]["checkpoint_interval"]) == ("run", 2)
    assert (call["id"], end) == (None, "finished")  # so that another one can begin
    argv = ["--resume", str(tmp_path / "run"), "--env-id", "episodes_toy:Lengths-v0"]
    longer = "--total-timesteps 700" if script is ppo_cma else "-n 48"
    script.train(script.parse_args([*argv, *longer.split()]))
    assert (calls[2]["id"], calls[2]["resume"], calls[3]) == ("made", "allow", "finished")


@BOTH
def test_a_run_of_infinite_rewards_writes_json_that_is_json(script, monkeypatch, tmp_path):
    step = episodes_toy.Lengths.step

    def spoilt(env, action):
        obs, reward, *rest = step(env, action)
        return obs, np.nan if env.left == 0 else reward, *rest

    monkeypatch.setattr(episodes_toy.Lengths, "step", spoilt)
    with pytest.raises(FloatingPointError, match=r"iteration 0: .* is not finite"):
        train(script, tmp_path / "run")

    def refuse(constant):
        raise ValueError(constant)

    text = (tmp_path / "run" / "run.json").read_text()
    info = json.loads(text, parse_constant=refuse)
    assert (info["status"], info["final_return"]) == ("failed", None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}

    def get(script) -> Path:
        if script not in made:
            made[script] = tmp_path_factory.mktemp(script.__name__) / "run"
            train(script, made[script])
        return made[script]

    return get


DAMAGES = {
    ppo_cma: {
        "adam": lambda x: {"state": {0: {"exp_avg": torch.zeros(3)}}},
        "history": lambda x: [(torch.zeros(4, 9), torch.zeros(4, 2), torch.zeros(4))],
        "generator": lambda x: torch.zeros(3),
        "rng": lambda x: {"state": 1},
        "played": lambda x: x[:2],
    },
    ppo_kl_adaptive: {
        "optimizers": lambda x: x | {"policy": {0: {"exp_avg": torch.zeros(3)}}},
        "servo": lambda x: {"beta": "much"},
        "replay": lambda x: (torch.zeros(4, 9), torch.zeros(4)),
        "rng": lambda x: None,
        "played": lambda x: x[:2],
    },
}
DAMAGED = [(script, field) for script, fields in DAMAGES.items() for field in fields]


@pytest.mark.parametrize(("script", "field"), DAMAGED)
def test_a_checkpoint_with_a_field_that_does_not_fit_is_one_line(
    script, field, runs, tmp_path, capfd
):
    good = script.load_checkpoint(runs(script))
    write_checkpoint(tmp_path, good | {field: DAMAGES[script][field](good[field])})
    argv = ["--resume", str(tmp_path), "--env-id", "episodes_toy:Lengths-v0"]
    with pytest.raises(SystemExit) as end:
        script.train(script.parse_args(argv))
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert re.fullmatch(rf"{script.__name__}.py: {tmp_path}: .*\n", err)


@BOTH
def test_a_single_flipped_bit_is_noticed(script, runs, tmp_path, capfd):
    whole = (runs(script) / "checkpoint.pt").read_bytes()
    with zipfile.ZipFile(runs(script) / "checkpoint.pt") as file:
        biggest = max(file.infolist(), key=lambda info: info.file_size)
    places = np.linspace(0.2, 0.8, 5) * biggest.file_size + biggest.header_offset + 200
    for place in places.astype(int).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 4
        (tmp_path / "checkpoint.pt").write_bytes(damaged)
        with pytest.raises(SystemExit):
            script.load(tmp_path)
        assert "no checkpoint.pt" in capfd.readouterr().err


@BOTH
def test_tensorboard_has_the_mean_of_episodes_that_end_at_one_step(script, runs):
    """The table has each."""
    episodes = np.array(rows(runs(script))[1:], float)
    steps = episodes[:, 0]
    assert len(set(steps)) < len(steps)  # some do
    expected = [(int(at), episodes[steps == at, 1].mean()) for at in sorted(set(steps))]
    found = scalars(runs(script))["charts/episodic_return"]
    assert [step for step, _ in found] == [step for step, _ in expected]
    means = [mean for _, mean in expected]
    np.testing.assert_allclose([value for _, value in found], means, rtol=1e-5)


@BOTH
def test_a_torn_row_does_not_block_resuming(script, runs, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("checkpoint.pt", "episodes.csv"):
        (folder / name).write_bytes((runs(script) / name).read_bytes())
    with open(folder / "episodes.csv", "r+b") as file:
        file.truncate((folder / "episodes.csv").stat().st_size - 9)
    more = "--total-timesteps 900" if script is ppo_cma else "-n 56"
    argv = f"--resume {folder} --env-id episodes_toy:Lengths-v0 {more}".split()
    script.train(script.parse_args(argv))
    assert status(folder) == "finished"
    whole, torn = rows(runs(script)), rows(folder)
    assert torn[: len(whole) - 1] == whole[:-1]
    assert all(len(row) == 3 for row in torn)


@BOTH
def test_env_kwargs_are_kept_and_environments_closed(script, monkeypatch, tmp_path):
    closed = []
    monkeypatch.setattr(episodes_toy.Lengths, "close", lambda env: closed.append(env))
    train(script, tmp_path / "run", actions="double")
    assert len(closed) == 4
    agent, args = script.load(tmp_path / "run")
    assert json.loads(args.env_kwargs) == {"actions": "double"}
    assert agent.action_shape == (2, 3)


@BOTH
def test_evaluation_of_an_endless_episode_is_one_line(script, runs, monkeypatch, capfd):
    def endless(env, action):
        return np.zeros(3), 0.0, False, False, {}

    monkeypatch.setattr(episodes_toy.Lengths, "step", endless)
    argv = ["--evaluate", str(runs(script)), "--env-id", "episodes_toy:Lengths-v0"]
    with pytest.raises(SystemExit) as end:
        script.evaluate(script.parse_args(argv))
    assert end.value.code == 2
    assert "100,000 steps, no end" in capfd.readouterr().err


@BOTH
def test_envpools_environments_are_refused(script, capfd):
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--env-id", "envpool:HalfCheetah-v4"])
    assert end.value.code == 2
    assert "envpool:HalfCheetah-v4" in capfd.readouterr().err
