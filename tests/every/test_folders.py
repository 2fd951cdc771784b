"""A run's folder, its checkpoint and its logs: what every script promises of them."""

import contextlib
import fcntl
import importlib
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import ROOT, assert_same, content, rows, run, scalars, status
from scripts import (
    EVERY,
    GYMNASIUM,
    NAMED,
    POOLS,
    SMALL,
    STEPS,
    WHOLE,
    evaluate,
    go_on,
    parse,
    refused,
    small_environments,
    train,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MULTI, LSTM, PROCGEN = POOLS
AGENTS, PLAYERS, WARP = "ppo_pettingzoo", "ppo_pettingzoo_ma_atari", "ppo_continuous_action_warp"


@pytest.fixture(scope="module", autouse=True)
def environments():
    """Small ones; what ppo_continuous_action_warp.py simulates has episodes of six steps. Weights
    begin in no time instead of 0.1 s."""
    with pytest.MonkeyPatch.context() as patch:
        small_environments(patch)
        pendulum = importlib.import_module(WARP).Pendulum
        plain, normal = pendulum.__init__, torch.nn.init.normal_

        def init(envs, *given):
            plain(envs, *given)
            envs.limit = 6

        patch.setattr(pendulum, "__init__", init)
        patch.setattr(torch.nn.init, "orthogonal_", lambda x, gain=1.0: normal(x, 0, gain / 50))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a script's run of two iterations, which no test changes; beside it, what the
    run said."""
    made = {}

    def get(script: str) -> Path:
        if script not in made:
            made[script] = tmp_path_factory.mktemp(script) / "run"
            with contextlib.redirect_stdout(io.StringIO()) as said:
                train(script, made[script])
            (made[script].parent / "said").write_text(said.getvalue())
        return made[script]

    return get


@pytest.fixture(scope="module")
def longer(runs, tmp_path_factory):
    """The folder of a script's run that was copied and resumed for a third iteration."""
    made = {}

    def get(script: str) -> Path:
        if script not in made:
            made[script] = tmp_path_factory.mktemp(script) / "run"
            shutil.copytree(runs(script), made[script])
            go_on(script, made[script])
        return made[script]

    return get


@pytest.fixture
def kept(runs, script, tmp_path) -> Path:
    """A copy of the script's run."""
    return shutil.copytree(runs(script), tmp_path / "run")


# --- one folder, one run --------------------------------------------------------------------------


@EVERY
def test_starts_of_one_second_have_folders_of_their_own(script, tmp_path, monkeypatch):
    """Below runs/, named by what was started; the experiment's name may be a path. Weights lie in
    the run's folder whatever the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 7.5)
    module = importlib.import_module(script)
    flags = f"{SMALL[script]} --total-timesteps {STEPS[script]} --exp-name a/b --save-model"
    folders = [module.train(parse(script, flags)) for _ in range(3)]
    name = f"runs/{parse(script, flags).env_id}__a/b__1__7"
    assert [str(folder) for folder in folders] == [name, f"{name}_2", f"{name}_3"]
    for folder in folders:
        assert status(folder) == "finished"
        assert (folder / "b.cleanrl_model").is_file()
        assert rows(folder) == rows(folders[0])
    train(script, Path("run"), "--exp-name ../x --save-model", 1)
    assert Path("run/x.cleanrl_model").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "runs"}


@EVERY
def test_a_folder_in_use_is_refused(script, kept, capfd):
    new = kept.parent / "new"
    new.mkdir()
    for folder, start in ((kept, go_on), (new, train)):
        with open(folder / "episodes.csv", "a") as file:
            before = content(folder)
            fcntl.flock(file, fcntl.LOCK_EX)
            says = f"{folder}: another process trains in this folder\n"
            refused(capfd, says, start, script, folder)
            assert content(folder) == before
        start(script, folder)
        assert status(folder) == "finished"


@pytest.mark.parametrize("script", ["ppo", MULTI])
@pytest.mark.parametrize("start", [go_on, train])
def test_a_folder_is_in_use_while_a_run_lasts(script, start, tmp_path, monkeypatch, capfd):
    module, folder, said = importlib.import_module(script), tmp_path / "run", []
    plain = module.update

    def still() -> dict:
        """All but the bytes of TensorBoard's files, which a thread of the run still writes."""
        return {
            path: "" if path.name.startswith("events.") else held
            for path, held in content(folder).items()
        }

    def update(*given):
        if not said:
            before = still()
            said.append("")  # a second start does not get here
            said.append(refused(capfd, "another process trains", start, script, folder))
            assert still() == before
            assert status(folder) == "running"
        return plain(*given)

    monkeypatch.setattr(module, "update", update)
    train(script, folder)
    assert len(said) == 2
    assert status(folder) == "finished"
    assert len(scalars(folder)["losses/entropy"]) == 2


@EVERY
def test_a_process_that_was_forked_meanwhile_does_not_keep_the_folder(
    script, tmp_path, monkeypatch
):
    """Such as a simulator that outlives its run."""
    run, children = importlib.import_module(script).Run, []
    plain = run.log

    def log(*given):
        if not children:
            children.append(os.fork())
        if children == [0]:
            signal.pause()
        return plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(run, "log", log)
        train(script, tmp_path / "run")
    try:
        go_on(script, tmp_path / "run")
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


@EVERY
def test_a_start_that_failed_gives_the_folder_up(script, kept, monkeypatch):
    """And leaves nothing: at once, though a notebook keeps the last error with all its frames."""
    wandb = ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(AttributeError) as error:  # it has no `init`
        train(script, kept.parent / "new", "--track", 1)
    assert not (kept.parent / "new").exists()
    (kept.parent / "new").mkdir()
    (kept.parent / "new" / "notes").write_text("mine")
    with pytest.raises(AttributeError):
        train(script, kept.parent / "new", "--track", 1)
    assert (kept.parent / "new" / "notes").read_text() == "mine"
    train(script, kept.parent / "new", iterations=1)
    with pytest.raises(SystemExit) as refusal:  # a run is there
        train(script, kept)
    go_on(script, kept)
    assert error.tb and refusal.tb


@EVERY
def test_links_are_not_written_through(script, kept, capfd):
    outside = kept.parent / "outside"
    outside.write_text("mine\n")
    for name in ("episodes.csv", "run.json", "checkpoint.pt.tmp", "videos", "videos/a.mp4"):
        link, spare = kept / name, kept.parent / "spare"
        link.parent.mkdir(exist_ok=True)
        if link.exists():
            link.replace(spare)
        link.symlink_to(outside)
        refused(capfd, f"{link} is a link", go_on, script, kept)
        link.unlink()
        os.link(outside, link)
        refused(capfd, f"{link} is a link", go_on, script, kept)
        link.unlink()
        if spare.exists():
            spare.replace(link)
    assert outside.read_text() == "mine\n"


@EVERY
def test_folders_that_cannot_be_are_one_line(script, tmp_path, capfd):
    (tmp_path / "file").write_text("mine\n")
    for name in ("file", "file/run", "/proc/run", "x" * 300):
        refused(capfd, str(tmp_path / name), train, script, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine\n"


@EVERY
def test_a_run_that_fails_at_once_leaves_nothing(script, kept, monkeypatch):
    """But for what was there before it: a resumed run, a stranger's file."""
    module, notes = importlib.import_module(script), kept.parent / "notes"
    notes.mkdir()
    (notes / "file").write_text("mine\n")
    good = torch.load(kept / "checkpoint.pt", weights_only=True)
    torch.save(good | {"counters": (0, 0, 0.0, 0)}, kept / "checkpoint.pt")
    monkeypatch.setattr(module, "rollout", lambda *given: 1 / 0)
    for start, folder in ((train, kept.parent / "new"), (train, notes), (go_on, kept)):
        with pytest.raises(ZeroDivisionError):
            start(script, folder)
    assert not (kept.parent / "new").exists()
    assert (notes / "file").read_text() == "mine\n"
    assert (kept / "checkpoint.pt").exists()
    assert status(kept) == "failed"


@pytest.mark.parametrize("script", ["ppo"])
def test_an_ascii_terminal_and_a_folder_of_other_letters(script, tmp_path):
    flags = f"{SMALL[script]} --env-id CartPole-v1 --total-timesteps 88"
    flags += f" --run-dir {tmp_path / 'öß€'}"
    done = run(
        ROOT / f"{script}.py", *flags.split(), env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "öß€") == "finished"


# --- the table of episodes ------------------------------------------------------------------------


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
    return data + b"999999,1.00,5.0,7\n" * 3


@EVERY
@pytest.mark.parametrize("damage", [torn, crlf, garbage, emptied, later])
def test_a_damaged_table_is_cut_back_and_goes_on(script, damage, kept, runs, longer):
    """With the rows that a whole one goes on with."""
    path, before = kept / "episodes.csv", rows(runs(script))
    path.write_bytes(damage(path.read_bytes()))
    go_on(script, kept)
    known = {torn: before[:-1], emptied: before[:1]}.get(damage, before)
    new = rows(longer(script))[len(before) :]
    assert len(before) > 2 and len(new) > 1
    assert rows(kept) == known + new
    lines = path.read_text().splitlines()
    assert all(re.fullmatch(r"\d+,\d+\.\d\d,-?\d[\d.]*,\d+", line) for line in lines[1:])


# --- a checkpoint that is not what was written ----------------------------------------------------

# Whose arguments a script understands, but not the rest
ALIKE = {
    ("ppo_lstm", "ppo_pixels"): "its agent, by ppo_pixels.py, does not fit the environment",
    (MULTI, LSTM): "its agent, by ppo_atari_lstm.py, does not fit the environment",
    (PROCGEN, LSTM): "EnvPool has no such Procgen game",
}


@EVERY
def test_a_checkpoint_of_another_script_names_it(script, runs, capfd):
    load = importlib.import_module(script).load
    for other in SMALL.keys() - {script}:
        made = f"{runs(other)}: no checkpoint.pt, made by {other}.py that can be read here"
        refused(capfd, ALIKE.get((script, other), made), load, runs(other))


@EVERY
def test_a_damaged_checkpoint_is_one_line(script, kept, capfd):
    path, before = kept / "checkpoint.pt", content(kept)
    whole, good = path.read_bytes(), torch.load(path, weights_only=True)
    args = good["args"] | {"epsilon": 0.2}

    def check(says: str):
        for use in (go_on, evaluate):
            refused(capfd, f"{script}.py: {kept}: {says}", use, script, kept)

    path.unlink()
    check("no checkpoint.pt")
    os.mkfifo(path)  # a pipe, which would be waited for
    check("no checkpoint.pt")
    path.unlink()
    halves = [whole[: len(whole) * k // 5] for k in (1, 2, 3, 4)]
    for data in (b"", b"to do: train\n" * 99, *halves):
        path.write_bytes(data)
        check("no checkpoint.pt")
    alone, unknown = good["agent"], good | {"args": args}  # weights; an argument
    for data, error in ((alone, "KeyError"), (unknown, "TypeError")):
        torch.save(data, path)
        check("no checkpoint.pt")
        refused(capfd, error, importlib.import_module(script).load, kept)
    for value in (None, 5, "script", [1], torch.zeros(3)):  # not a run's at all
        torch.save(value, path)
        check("no checkpoint.pt that can be read here")
    torch.save(good | {"agent": {}}, path)
    check("its ")
    path.unlink()
    del before[path]
    assert content(kept) == before


@EVERY
def test_flipped_bits_are_noticed(script, kept, capfd):
    """In a weight always; of 24 places in the whole file none is loaded as if nothing were."""
    load, path = importlib.import_module(script).load_checkpoint, kept / "checkpoint.pt"
    whole, good, accepted = path.read_bytes(), load(kept), 0
    weights = [x.numpy().tobytes() for name, x in good["agent"].items() if "weight" in name]
    inside = [whole.index(weight) for weight in weights[:4]]
    anywhere = np.linspace(100, len(whole) - 100, 24).astype(int)
    for place in (*inside, *anywhere):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        path.write_bytes(flipped)
        if place in inside:
            refused(capfd, "no checkpoint.pt", load, kept)
            continue
        with contextlib.suppress(SystemExit):
            assert_same(load(kept), good)
            accepted += 1  # in the padding between files, which holds nothing
    assert accepted < 12


ANY = {  # of every script; a value that does not fit
    "agent": [None, 5, [1], {}, {"a": 1}],
    "counters": [None, "many", (1, 2), (1, 2, 3), ("a", 1, 1, 1), (-5, 0, 0, 0), (0, 0, np.nan, 0)],
    "returns": [5, ["a"], [None], [[1, 2]], {"a": 1}],
}
ARGS = [{"epsilon": 0.2}, {"num_envs": "2"}, {"gamma": [0.9]}, {"exp_name": ""}]
FLAT = [None, {}, torch.zeros(3), {"parameters": torch.zeros(1)}, {"exp_avg": torch.zeros(3)}]
TORCHS = [None, 3, {}, {"state": {0: {"exp_avg": torch.zeros(3)}}}]
RNG = [None, "x", {}, {"state": 1}]
PLAYED = [5, [(-5, torch.zeros(0))] * 2]
FEWER = [*PLAYED, [(0, torch.zeros(0))]]  # than there are environments
ODD = [*FEWER, [(0, torch.zeros(2, 3))] * 2]
OWN = {  # of what else there is in a checkpoint
    "ppo": {"adam": FLAT, "rng": RNG, "played": ODD},
    "ppo_continuous_action": {"adam": FLAT, "rng": RNG, "played": ODD},
    "ppo_cma": {
        "adam": TORCHS,
        "history": [5, [(torch.zeros(4, 9), torch.zeros(4, 2), torch.zeros(4))]],
        "generator": [None, torch.zeros(3)],
        "rng": RNG,
        "played": FEWER,
    },
    "ppo_kl_adaptive": {
        "optimizers": [
            None,
            {},
            {"policy": {0: {"exp_avg": torch.zeros(3)}}},
            {"policy": {0: {"exp_avg": torch.zeros(()), "exp_avg_sq": torch.zeros(())}}},
        ],
        "servo": [None, {}, {"beta": "much"}],
        "replay": [None, (torch.zeros(4, 9), torch.zeros(4))],
        "rng": RNG,
        "played": FEWER,
    },
    "ppo_pixels": {"adam": TORCHS, "played": ODD},
    "ppo_lstm": {"adam": TORCHS, "memory": [None, torch.zeros(3, 4)], "played": ODD},
    AGENTS: {"adam": TORCHS, "rng": RNG, "played": ODD},
    MULTI: {"optimizer": TORCHS},
    LSTM: {"optimizer": TORCHS},
    PROCGEN: {"optimizer": TORCHS},
    PLAYERS: {
        "optimizer": TORCHS,
        "past": [None, {}],
        "played": [
            "x",
            [(0, torch.full((3, 2), 99))],
            [(0, torch.ones(3, 2))] * 2,
            [("one", torch.ones(3))] * 2,
        ],
    },
    WARP: {
        "adam": FLAT,
        "rng": ["x", None],
        "at": [None, {"obs": torch.zeros(1)}],
        "envs": [None, {}],
    },
}
TORCH_S_ADAM = [script for script in SMALL if script not in ("ppo", "ppo_continuous_action", WARP)]
OWN_ARGS = {
    WARP: [{"hidden": (8, "8")}],
    MULTI: [{"device_ids": ["0"]}, {"backend": "mine"}, {"num_steps": "8"}],
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@EVERY
def test_fields_of_wrong_types_or_shapes_are_one_line(script, kept, capfd):
    path = kept / "checkpoint.pt"
    good = torch.load(path, weights_only=True)
    wrong = [(name, value) for name, values in (ANY | OWN[script]).items() for value in values]
    for change in ARGS + OWN_ARGS.get(script, []) + [{"env_kwargs": "[["}] * (script in GYMNASIUM):
        wrong.append(("args", good["args"] | change))
    wrong += [(name, x[..., :-1]) for name, x in good.items() if isinstance(x, torch.Tensor)]
    for name in good.keys() & {"adam", "optimizer"}:
        states = good[name].get("state")
        for shape in ((3,), ()):  # PyTorch would take moments of any, and write beyond their end
            if states:
                other = states | {0: states[0] | {"exp_avg": torch.zeros(shape)}}
                wrong.append((name, good[name] | {"state": other}))
    known = {"script", "args", "wandb", "names", "cuda_rng"}
    assert good.keys() - known == {name for name, _ in wrong} - {"args"}
    for name, value in wrong:
        torch.save(good | {name: value}, path)
        refused(capfd, f"{script}.py: ", go_on, script, kept)
    for name in good.keys() - {"script", "wandb", "names", "counters", "returns", "played"}:
        torch.save({key: x for key, x in good.items() if key != name}, path)
        refused(capfd, f"{script}.py: ", go_on, script, kept)


@pytest.mark.parametrize("script", TORCH_S_ADAM)
def test_moments_are_taken_in_whatever_their_layout(script, kept):
    """PyTorch's fused Adam takes memory as it lies, and would write beyond that of one number."""
    good = torch.load(kept / "checkpoint.pt", weights_only=True)
    value = {"state": good.get("optimizers", {}).get("value")}
    state = good.get("adam", good.get("optimizer", value))["state"]
    last = []
    for folder, dense in ((kept.parent / "expanded", False), (kept.parent / "dense", True)):
        shutil.copytree(kept, folder)
        zeros = torch.zeros(1).expand(state[0]["exp_avg"].shape)
        state[0]["exp_avg"] = zeros.contiguous() if dense else zeros
        torch.save(good, folder / "checkpoint.pt")
        last.append(go_on(script, folder)["agent"])
    assert_same(*last)


@pytest.mark.parametrize("script", [script for script in TORCH_S_ADAM if "kl" not in script])
def test_an_optimizers_settings_are_those_of_the_code(script, kept):
    """So a resumed run follows an edit of Adam's eps, even if an older checkpoint has one."""
    good = torch.load(kept / "checkpoint.pt", weights_only=True)
    (name,) = good.keys() & {"adam", "optimizer"}
    assert good[name].keys() == {"state"}
    older = kept.parent / "older"
    shutil.copytree(kept, older)
    torch.save(good | {name: good[name] | {"param_groups": []}}, older / "checkpoint.pt")
    assert_same(go_on(script, older)["agent"], go_on(script, kept)["agent"])


def test_emulators_are_not_in_a_checkpoint(runs):
    """States would go to native code, which altered ones abort: games are played again."""
    checkpoint = importlib.import_module(PLAYERS).load_checkpoint(runs(PLAYERS))
    assert "envs" not in checkpoint
    assert [len(actions[0]) for _, actions in checkpoint["played"]] == [2, 2]


class Bomb:
    """Unpickled, it runs `function(*args)`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@EVERY
def test_no_code_in_a_checkpoint_runs(script, kept, capfd):
    path, mark = kept / "checkpoint.pt", kept.parent / "mark"
    good = torch.load(path, weights_only=True)
    for bomb in Bomb(os.system, f"touch {mark}"), Bomb(open, str(mark), "w"):
        pickle.loads(pickle.dumps(bomb))
        mark.unlink()  # which shows that it would work
        torch.save(good | {"agent": bomb}, path)
        for use in (go_on, evaluate):
            refused(capfd, "UnpicklingError", use, script, kept)
        path.write_bytes(pickle.dumps({"agent": bomb}, protocol=2))
        for use in (go_on, evaluate):
            refused(capfd, "no checkpoint.pt", use, script, kept)
        assert not mark.exists()


MODULE = """
import gymnasium as gym
from agents_toy import make
from ppo_continuous_action_warp import Pendulum as Simulation
from scripts import SPACES

open({mark!r}, "w").close()
gym.register("{own}-v0", "program:Clockwork", kwargs={{"action_space": SPACES["{space}"]}})
"""


@EVERY
def test_a_module_is_imported_only_if_the_command_names_it(script, kept, monkeypatch, capfd):
    """Not because a folder, perhaps a stranger's, does."""
    module, own = importlib.import_module(script), f"own_{script}"
    path, mark = kept / "checkpoint.pt", kept.parent / "mark"
    good = torch.load(path, weights_only=True)
    space = "Choice" if script == "ppo" else "Box"
    (kept.parent / f"{own}.py").write_text(MODULE.format(mark=str(mark), own=own, space=space))
    monkeypatch.syspath_prepend(kept.parent)
    env_id = f"{own}:{ {AGENTS: 'make', WARP: 'Simulation'}.get(script, f'{own}-v0') }"
    resume = lambda: module.train(parse(script, f"--resume {kept}"))  # noqa: E731
    play = lambda: module.evaluate(parse(script, f"--evaluate {kept}"))  # noqa: E731
    modules = script not in (*POOLS, PLAYERS)  # they have the games of a package alone
    for named in (env_id, own, f"run.{own}", ":", "a:b:c")[: 5 if modules else 1]:
        torch.save(good | {"args": good["args"] | {"env_id": named}}, path)
        for use in (resume, play, lambda: module.load(kept)):
            refused(capfd, "--env-id ", use)
    assert own not in sys.modules and not mark.exists()
    if not modules:
        return
    given = f"--env-id {env_id}"
    go_on(script, kept, given)
    assert mark.exists()  # which shows that it would work
    if script == WARP:  # what is played is gymnasium's
        return
    assert capfd.readouterr().out.endswith(f"--evaluate {kept} {given}\n")
    assert len(evaluate(script, kept, f"{given} --eval-episodes 2")) == 2
    if script in GYMNASIUM:
        assert module.load(kept)[1].env_id == f"{own}-v0"  # now that it is registered


# --- what is logged -------------------------------------------------------------------------------


@EVERY
def test_what_a_run_writes(script, runs):
    module, folder = importlib.import_module(script), runs(script)
    checkpoint, facts = (
        module.load_checkpoint(folder),
        json.loads((folder / "run.json").read_text()),
    )
    global_step, iteration, seconds, known = checkpoint["counters"]
    assert (facts["script"], facts["status"], facts["seed"]) == (f"{script}.py", "finished", 1)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["args"]
    assert facts["args"] == json.loads(json.dumps(saved))
    assert facts["versions"] == {
        "torch": torch.__version__, "gymnasium": gym.__version__, "numpy": np.__version__
    }  # fmt: skip
    assert facts["global_step"] == global_step
    assert 0 < seconds <= facts["wall_seconds"] + 0.01
    assert iteration == 2

    table = (folder / "episodes.csv").read_text()
    assert table.startswith("global_step,seconds,return,length\n")
    assert known == len(rows(folder)) - 1 > 4
    steps, returns, lengths = np.array(rows(folder)[1:], float).T
    assert (np.diff(steps) >= 0).all() and steps[-1] <= global_step
    if script in GYMNASIUM:  # which pay 1 a step; of two environments, perhaps in an episode each
        assert (returns == lengths).all()
        assert global_step - 20 < lengths.sum() <= global_step
    if script in WHOLE:
        assert lengths.sum() == steps[-1] == global_step
    final = facts["final_return"]
    assert final == pytest.approx(returns[-100:].mean())

    said = (folder.parent / "said").read_text()
    printed = re.findall(r"^global_step=(\d+),.* episodic_return=(-?[\d.]+)$", said, re.M)
    each = [[step, f"{float(score):.4f}"] for step, score, _ in rows(folder)[1:]]
    if script != WARP:  # whose episodes are thousands
        assert [list(line) for line in printed] == each
    named = f" {NAMED[script]}" if script in NAMED else ""
    last = (
        f"return {final} over the last 100 episodes; play: python \\S+ --evaluate {folder}{named}"
    )
    assert re.search(f"^{last}$", said, re.M)
    table = EventAccumulator(str(folder)).Reload().Tensors("hyperparameters/text_summary")
    assert b"|total_timesteps|" in table[0].tensor_proto.string_val[0]


@EVERY
@pytest.mark.parametrize("program", ["ipykernel_launcher.py", "my_study.py"])
def test_where_a_script_is_imported_the_last_line_names_it(
    script, program, kept, capsys, monkeypatch
):
    """In a notebook, or in a program of one's own, which has other flags."""
    monkeypatch.setattr(sys, "argv", [program])
    go_on(script, kept)
    (named,) = re.findall(r"play: python (\S+) --evaluate", capsys.readouterr().out)
    assert Path(named).samefile(ROOT / f"{script}.py")


@EVERY
def test_of_episodes_that_end_at_one_step_tensorboard_has_the_mean(script, runs):
    """And of all else one value an iteration."""
    folder = runs(script)
    points, table = scalars(folder, timed=True), np.array(rows(folder)[1:], float)
    ends = [step for step, _ in points["charts/SPS"]]
    assert len(ends) == 2
    side = ""
    if script == PLAYERS:  # of two players, the second, which dies first
        side = "-player1"
        table = np.array([row for k, row in enumerate(table) if k % 4 < 2])
    if script == WARP:  # one value an iteration
        table[:, 0] = [min(end for end in ends if end >= step) for step in table[:, 0]]
    at = np.unique(table[:, 0])
    assert len(at) < len(table)  # some do
    for tag, column in (("episodic_return", 1), ("episodic_length", 2)):
        means = [(step, table[table[:, 0] == step, column].mean()) for step in at]
        np.testing.assert_allclose(points[f"charts/{tag}{side}"], means, rtol=1e-6)
    episodes = re.compile("charts/(episodic_|return/|team_return|deaths)")
    for tag, values in points.items():
        if not episodes.match(tag):
            assert [step for step, _ in values] == ends, tag


@EVERY
def test_a_run_goes_on_with_other_flags(script, kept, runs, capfd):
    """What was logged stays, and what comes next is by the new flags."""
    flags = "--learning-rate 1e-4 --gamma 0.5 --quiet"
    if hasattr(importlib.import_module(script).Args, "anneal_lr"):
        flags += " --no-anneal-lr"
    resumed = go_on(script, kept, flags)
    assert "episodic_return" not in capfd.readouterr().out
    args = json.loads((kept / "run.json").read_text())["args"]
    assert (args["learning_rate"], args["gamma"]) == (1e-4, 0.5)
    assert (resumed["args"].learning_rate, resumed["args"].gamma) == (1e-4, 0.5)
    before, after = scalars(runs(script)), scalars(kept)
    assert {tag: points[: len(before[tag])] for tag, points in after.items()} == before
    assert rows(kept)[: len(rows(runs(script)))] == rows(runs(script))
    _, rate = after["charts/learning_rate"][-1]
    multiplier = 1.0
    if script == "ppo_kl_adaptive":
        _, multiplier = after["charts/lr_multiplier"][-1]
    if script == WARP:  # the KL may have moved it since
        assert round(math.log(rate / 1e-4, 1.5), 3) in (-1, 0, 1)
    else:
        assert rate == pytest.approx(1e-4 * multiplier)


@EVERY
def test_weights_and_biases_are_one_run_however_often_resumed(script, tmp_path, monkeypatch):
    def init(**more):
        files = list((tmp_path / "run").glob("events.*"))  # the writer follows it
        assert len(files) == len(begun)
        begun.append(more)
        return SimpleNamespace(id=more["id"] or "made", finish=lambda: finished.append(1))

    begun, finished = [], []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=True, init=init))
    flags = "--track --wandb-entity me --wandb-project-name mine"
    assert train(script, tmp_path / "run", flags, 1)["wandb"] == "made"
    assert go_on(script, tmp_path / "run", iterations=2)["wandb"] == "made"
    assert [(more["id"], more["resume"]) for more in begun] == [(None, "allow"), ("made", "allow")]
    assert len(finished) == 2  # so that another one can begin
    for more in begun:
        assert (more["project"], more["entity"], more["name"]) == ("mine", "me", "run")
        assert more["sync_tensorboard"] is True
        assert more["config"]["checkpoint_interval"] == 2


@pytest.mark.filterwarnings("ignore:invalid value")
@EVERY
def test_run_json_has_no_nan(script, tmp_path):
    module = importlib.import_module(script)
    with module.Run(parse(script, f"{SMALL[script]} --run-dir {tmp_path / 'run'}"), {}) as run:
        run.returns += [1.0, np.inf, -np.inf]
        run.global_step = 1
    facts = json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=pytest.fail)
    assert (facts["status"], facts["final_return"]) == ("failed", None)
