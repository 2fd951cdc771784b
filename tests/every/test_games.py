"""What a run may do to its folder, a folder to a run, and numbers to training: in the scripts that
play games or simulate on the device. `Small` environments stand for the real ones."""

import fcntl
import importlib
import json
import sys
import time
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from program import Levels, Toy, content, installed, rows, scalars, status, write_checkpoint
from scripts import small_environments

ENVPOOL = (
    "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
    "--env-threads 1 --no-cuda --checkpoint-interval 2"
)
FLAGS = {
    "ppo_atari_multigpu": ENVPOOL,
    "ppo_atari_lstm": ENVPOOL,
    "ppo_procgen": f"{ENVPOOL} --eval-episodes 2",
    "ppo_pettingzoo_ma_atari": (
        "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 --num-threads 1 "
        "--no-cuda --checkpoint-interval 2 --eval-episodes 2 --env-id duel_v0 --eval-interval 99"
    ),
    "ppo_continuous_action_warp": (
        "--env-id Pendulum-v1 --num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 1 "
        "--hidden 8 --no-cuda --checkpoint-interval 2"
    ),
}
STEPS = 4 * 8  # of an iteration, junk rows included
EVERY = pytest.mark.parametrize("script", FLAGS)
MULTI, LSTM, PROCGEN, TWO, WARP = FLAGS
PIXELS = pytest.mark.parametrize("script", [MULTI, LSTM, PROCGEN, TWO])


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    small_environments(monkeypatch)


def parse(script: str, flags: str):
    return importlib.import_module(script).parse_args(flags.split())


def train(script: str, folder: Path, more: str = "", iterations: int = 2) -> dict:
    """Train in this process; the final checkpoint."""
    module = importlib.import_module(script)
    flags = f"{FLAGS[script]} --run-dir {folder} --total-timesteps {iterations * STEPS} {more}"
    module.train(parse(script, flags))
    return module.load_checkpoint(folder)


def go_on(script: str, folder: Path, iterations: int = 3) -> dict:
    module = importlib.import_module(script)
    module.train(parse(script, f"--resume {folder} --total-timesteps {iterations * STEPS}"))
    return module.load_checkpoint(folder)


def refused(capfd, says: str, call, *given):
    """The call ends with exit code 2 and one line that says this."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        call(*given)
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


# --- a folder, and who writes into it -------------------------------------------------------------


@EVERY
def test_a_folder_in_use_is_refused(script, tmp_path, capfd):
    train(script, tmp_path / "run")
    before = content(tmp_path / "run")
    with open(tmp_path / "run" / "episodes.csv", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(capfd, "another process trains in this folder", go_on, script, tmp_path / "run")
        assert content(tmp_path / "run") == before
    go_on(script, tmp_path / "run")
    (tmp_path / "new").mkdir()
    with open(tmp_path / "new" / "episodes.csv", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(capfd, "another process trains in this folder", train, script, tmp_path / "new")


@EVERY
def test_a_start_that_failed_gives_the_folder_up(script, tmp_path, monkeypatch):
    """At once, though a notebook keeps the last error with all its frames."""
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(AttributeError) as kept:  # it has no `init`
        train(script, tmp_path / "run", "--track")
    train(script, tmp_path / "run")
    with pytest.raises(SystemExit) as also_kept:
        train(script, tmp_path / "run")
    go_on(script, tmp_path / "run")
    assert kept.tb and also_kept.tb


@EVERY
def test_two_runs_of_one_second_get_two_folders(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 7.0)
    module = importlib.import_module(script)
    flags = f"{FLAGS[script]} --total-timesteps {STEPS}"
    folders = {module.train(parse(script, flags)) for _ in range(2)}
    assert len(folders) == 2
    assert all(status(folder) == "finished" for folder in folders)


@EVERY
@pytest.mark.parametrize("name", ["episodes.csv", "run.json", "checkpoint.pt.tmp"])
def test_no_link_in_a_folder_is_followed(script, name, tmp_path, capfd):
    train(script, tmp_path / "run")
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(outside)
    refused(capfd, f"{name} is a link", go_on, script, tmp_path / "run")
    assert outside.read_text() == "mine\n"


@EVERY
def test_a_torn_table_is_cut_to_its_whole_rows(script, tmp_path):
    flags = "--no-stagger-episodes" if script == WARP else ""
    train(script, tmp_path / "run", flags, 60 if script == WARP else 4)
    path = tmp_path / "run" / "episodes.csv"
    before = rows(tmp_path / "run")
    assert len(before) > 2
    path.write_bytes(path.read_bytes()[:-9])
    go_on(script, tmp_path / "run", 62 if script == WARP else 8)
    after = rows(tmp_path / "run")
    assert after[: len(before) - 1] == before[:-1]
    assert all(len(row) == 3 for row in after)
    assert status(tmp_path / "run") == "finished"


@EVERY
def test_the_table_goes_on_after_the_checkpoint_s_last_row(script, tmp_path):
    flags = "--no-stagger-episodes" if script == WARP else ""
    train(script, tmp_path / "run", flags, 60 if script == WARP else 4)
    before = rows(tmp_path / "run")
    with open(tmp_path / "run" / "episodes.csv", "a") as file:
        file.write("999999,1.0,5.0,7\n" * 3)
    go_on(script, tmp_path / "run", 61 if script == WARP else 5)
    after = rows(tmp_path / "run")
    assert after[: len(before)] == before
    assert ["999999", "5.0", "7"] not in after


# --- a checkpoint from elsewhere ------------------------------------------------------------------


@EVERY
def test_a_flipped_bit_is_noticed(script, tmp_path, capfd):
    weights = train(script, tmp_path / "run")["agent"]
    path = tmp_path / "run" / "checkpoint.pt"
    whole, load = path.read_bytes(), importlib.import_module(script).load_checkpoint
    for name in [name for name in weights if "weight" in name][:4]:
        place = whole.index(weights[name].numpy().tobytes())
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        refused(capfd, "no checkpoint.pt", load, tmp_path / "run")


@EVERY
def test_fields_of_wrong_types_and_shapes_are_one_line(script, tmp_path, capfd):
    good = train(script, tmp_path / "run")
    args = vars(good["args"])
    wrong = [
        {"counters": "many"},
        {"counters": (1, 2)},
        {"agent": 3},
        {"args": args | {"num_steps": "8"}},
        {"args": args | {"gamma": [0.9]}},
        {"args": args | {"exp_name": ""}},
    ]
    if script == WARP:
        adam, at = good["adam"], good["at"]
        wrong += [{"adam": adam | {"exp_avg": torch.zeros(3)}}, {"adam": {}}, {"rng": "x"}]
        wrong += [{"at": at | {"obs": torch.zeros(1)}}, {"envs": None}]
        wrong += [{"args": args | {"hidden": (8, "8")}}]
    else:
        wrong += [{"optimizer": 3}, {"optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}}]
    if script == TWO:
        wrong += [{"played": "x"}, {"played": [(0, np.full((3, 2), 99))]}, {"past": {}}]
        wrong += [{"played": [(0, np.ones((3, 2)))] * 2}, {"played": [("one", np.ones(3))] * 2}]
    if script == MULTI:
        wrong += [{"args": args | {"device_ids": ["0"]}}, {"args": args | {"backend": "mine"}}]
    for change in wrong:
        if "args" in change:
            change["args"] = {name: x for name, x in change["args"].items()}
        torch.save(good | {"args": args} | change, tmp_path / "run" / "checkpoint.pt")
        if script == TWO and "played" not in change:
            write_checkpoint(tmp_path / "run", good | {"args": args} | change)
        refused(capfd, f"{script}.py: {tmp_path / 'run'}: ", go_on, script, tmp_path / "run")


def test_a_checkpoint_names_its_maker(tmp_path, capfd):
    train(LSTM, tmp_path / "run")
    load = importlib.import_module(WARP).load_checkpoint
    refused(capfd, "made by ppo_atari_lstm.py", load, tmp_path / "run")


def test_no_module_is_imported_but_for_an_id_with_a_colon(tmp_path, monkeypatch, capfd):
    good = train(WARP, tmp_path / "run")
    monkeypatch.syspath_prepend(tmp_path)
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    for env_id in ("evil", "evil:Envs", "run.evil", ":", "a:b:c"):
        write_checkpoint(tmp_path / "run", good | {"args": vars(good["args"]) | {"env_id": env_id}})
        refused(capfd, "--env-id ", go_on, WARP, tmp_path / "run")
        assert not mark.exists()
    flags = f"{FLAGS[WARP]} --env-id evil:Envs --run-dir {tmp_path / 'new'}"
    module = importlib.import_module(WARP)
    refused(capfd, "evil:Envs: AttributeError", module.train, parse(WARP, flags))
    assert mark.exists()  # which shows that it would work


def test_emulators_are_not_in_a_checkpoint(tmp_path):
    """States would go to native code, which altered ones abort: games are played again."""
    checkpoint = train(TWO, tmp_path / "run")
    assert "envs" not in checkpoint
    assert [len(actions[0]) for _, actions in checkpoint["played"]] == [2, 2]


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [LSTM, PROCGEN])
def test_a_game_without_an_end_ends_the_evaluation(script, tmp_path, monkeypatch, capfd):
    train(script, tmp_path / "run")
    module = importlib.import_module(script)
    no, obs = (
        np.zeros(2, bool),
        module.Envs(parse(script, FLAGS[script]), slice(0, 1)).obs
        if (script != PROCGEN)
        else np.zeros((2, 3, 64, 64), np.uint8),
    )
    n = len(obs)
    info = {"terminated": no[:n], "reward": np.zeros(n)}
    for kind in (Toy, Levels):
        monkeypatch.setattr(kind, "step", lambda *_: (obs, np.zeros(n), no[:n], no[:n], info))
    monkeypatch.setattr(module.Agent, "act", lambda self, obs, *_, **__: np.zeros(len(obs), int))
    args = parse(script, f"--evaluate {tmp_path / 'run'}")
    refused(capfd, "100,000 steps, and", module.evaluate, args)


@EVERY
def test_run_json_has_no_nan(script, tmp_path):
    module = importlib.import_module(script)
    flags = f"{FLAGS[script]} --run-dir {tmp_path / 'run'}"
    with module.Run(parse(script, flags), {}) as run:
        run.returns += [1.0, np.inf, -np.inf]
        run.global_step = 1
    facts = json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=pytest.fail)
    assert facts["final_return"] is None


# --- logs -----------------------------------------------------------------------------------------


@PIXELS
def test_of_episodes_that_end_at_one_step_tensorboard_has_the_mean(script, tmp_path):
    train(script, tmp_path / "run", iterations=8)
    by_step = {}
    table = rows(tmp_path / "run")[1:]
    for k, (step, score, _) in enumerate(table):
        if script != TWO or k % 4 < 2:  # of two players, the second, which dies first
            by_step.setdefault(int(step), []).append(float(score))
    assert max(map(len, by_step.values())) > 1
    tag = "charts/episodic_return" + "-player1" * (script == TWO)
    wanted = sorted((step, np.mean(scores)) for step, scores in by_step.items())
    np.testing.assert_allclose(scalars(tmp_path / "run")[tag], wanted, rtol=1e-6)


@EVERY
def test_weights_and_biases_are_one_run_however_often_resumed(script, tmp_path, monkeypatch):
    begun, finished = [], []

    class Logged:
        id = "w7"

        def finish(self):
            finished.append(self)

    wandb = ModuleType("wandb")
    wandb.init = lambda **more: begun.append(more) or Logged()
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(script, tmp_path / "run", "--track")
    go_on(script, tmp_path / "run")
    assert [more["id"] for more in begun] == [None, "w7"]
    assert len(finished) == 2


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [LSTM, PROCGEN, TWO, WARP])
def test_torchrun_is_refused(script, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capfd, "torchrun is for ppo_atari_multigpu.py", parse, script, FLAGS[script])


@EVERY
def test_moviepy_1_is_refused_before_training(script, monkeypatch, capfd):
    installed(monkeypatch, moviepy=True)
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.3")
    refused(capfd, "pip install 'moviepy>=2'", parse, script, f"{FLAGS[script]} --capture-video")


@pytest.mark.parametrize("script", [MULTI, LSTM])
def test_a_frame_is_drawn_before_training(script, monkeypatch, capfd):
    installed(monkeypatch, moviepy=True)
    monkeypatch.setattr(metadata, "version", lambda name: "2.1")
    flags = f"{FLAGS[script]} --capture-video"  # Toy has no `render`
    refused(capfd, "--capture-video: Breakout-v5 can't be drawn", parse, script, flags)


@EVERY
@pytest.mark.parametrize(
    "change", [{"gamma": "0.9"}, {"num_steps": 8.0}, {"seed": None}, {"run_dir": "runs/1"}]
)
def test_values_of_other_types_are_refused(script, change):
    (name,) = change
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*: not of type"):
        importlib.import_module(script).Args(**change)


def test_lists_and_choices_are_checked():
    multi, warp = (importlib.import_module(script) for script in (MULTI, WARP))
    assert multi.Args(device_ids=[0, 1], backend="gloo").device_ids == [0, 1]
    for change in ({"device_ids": [0.5]}, {"device_ids": 3}, {"backend": "tcp"}):
        with pytest.raises(ValueError, match="not of type"):
            multi.Args(**change)
    with pytest.raises(ValueError, match="not of type"):
        warp.Args(hidden=(64, "64"))
