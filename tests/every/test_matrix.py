"""Every script as a program: killed, stopped, resumed, evaluated; its folder; wrong flags, broken
environments and strangers' files. What is learned is compared with tests/reference.py elsewhere."""

import csv
import dataclasses
import errno
import fcntl
import importlib
import json
import os
import pickle
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import envpool
import numpy as np
import pytest
import torch
import toys
from program import (
    ROOT,
    Toy,
    assert_same,
    content,
    in_a_fork,
    installed,
    rows,
    scalars,
    status,
    train_until_killed,
)
from scripts import (
    GYMNASIUM,
    PARALLEL,
    SCRIPTS,
    SMALL,
    STEPS,
    WHOLE,
    evaluate,
    named,
    no_worker_stays,
    parse,
    quick_workers,
    refused,
    resume,
    train,
)

EVERY = pytest.mark.parametrize("script", SCRIPTS)
MULTI, WARP, AGENTS = "ppo_atari_multigpu", "ppo_continuous_action_warp", "ppo_pettingzoo"
COMPILED = [x for x in SCRIPTS if hasattr(importlib.import_module(x).Args, "compile")]


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Atari's games are toys, Warp's pendulum swings for six steps, and ppo_cma.py learns its first
    policy in no time instead of 4 s."""
    six = property(lambda _: 6, lambda *_: None)
    monkeypatch.setattr(f"{WARP}.Pendulum.limit", six, raising=False)
    monkeypatch.setattr("ppo_cma.pretrain_policy", lambda *_: None)
    if request.node.callspec.params["script"] == MULTI:
        monkeypatch.setattr(envpool, "make", Toy)


def argv(script: str, folder: Path, flags: str = "", iterations: int = 6) -> list[str]:
    total = f"--total-timesteps {iterations * STEPS[script]}"
    return shlex.split(f"{SMALL[script]} --run-dir '{folder}' {total} {flags}")


def outcome(script: str, folder: Path):
    """All that a run leaves, but for what it took: checkpoint, episodes, TensorBoard."""
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    for how in ("env_workers", "checkpoint_interval"):
        checkpoint["args"].pop(how, None)
    for measured in ("seconds", "csv_size"):
        del checkpoint[measured]
    assert status(folder) == "finished" and not list(folder.glob("*.tmp"))
    return checkpoint, rows(folder), scalars(folder)


# --- resumed, stopped, seeded ---------------------------------------------------------------------
@EVERY
def test_killed_and_resumed_is_uninterrupted(script, tmp_path, monkeypatch):
    """The same tensors, episodes and points of TensorBoard, with and without workers; EnvPool's
    games can't be played again, so there both runs are interrupted. The time goes on, too."""
    quick_workers(monkeypatch)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    if script == MULTI:
        assert train_until_killed(script, "update", 3, argv(script, whole), signal.SIGTERM) == 143
        resume(script, whole)
    else:
        train(script, whole, iterations=6)
    start = argv(script, cut, "--checkpoint-interval 3 --env-workers 2")
    start = start if script in PARALLEL else start[:-2]
    # in the third time that it saves: half of that file is there
    assert train_until_killed(script, "torch.save", 3, start) == -signal.SIGKILL
    assert no_worker_stays()
    assert status(cut) == "running"
    checkpoint = torch.load(cut / "checkpoint.pt", weights_only=True)
    assert checkpoint["iteration"] == 3
    written = (cut / "episodes.csv").stat().st_size
    assert written > checkpoint["csv_size"] or script == WARP  # rows that will be logged again
    if script in PARALLEL and script not in WHOLE:  # an episode was cut in two
        assert any(len(actions) for *_, actions in checkpoint["episodes"])
    torch.save(checkpoint | {"seconds": 5000.0}, cut / "checkpoint.pt")
    for workers in (0, 2)[: 1 + (script in PARALLEL)]:
        folder = shutil.copytree(cut, tmp_path / f"{workers}")
        final = resume(script, folder, f"--env-workers {workers}" if script in PARALLEL else "")
        assert_same(outcome(script, folder), outcome(script, whole))
        assert final["iteration"] >= 5 and len(rows(folder)) > 3
        table = csv.DictReader((folder / "episodes.csv").read_text().splitlines())
        after = [float(row["seconds"]) > 5000.0 for row in table]
        assert after == sorted(after) and after[-1] and not after[0]
        facts = json.loads((folder / "run.json").read_text())
        assert 5000 < final["seconds"] < facts["wall_seconds"] + 1 < 5600
        assert scalars(folder, timed=True)["charts/SPS"][-1][1] < 1


@pytest.mark.parametrize("script", PARALLEL)
def test_five_environments_in_two_workers(script, tmp_path, monkeypatch):
    """The first three are the first worker's: the bits are those without workers."""
    quick_workers(monkeypatch)
    for workers in (0, 2):
        flags = f"--num-envs 5 --env-workers {workers}{' -b 5' * (script == WHOLE[0])}"
        train(script, tmp_path / f"{workers}", flags, iterations=5)
    assert_same(*(outcome(script, tmp_path / name) for name in ("0", "2")))


@EVERY
def test_a_signal_saves_and_the_second_acts_at_once(script, tmp_path, capfd):
    folder = tmp_path / "a run"  # its name is quoted in what is printed
    start = argv(script, folder, "--checkpoint-interval 100")
    load = importlib.import_module(script).load_checkpoint
    assert train_until_killed(script, "rollout", 1, start) == -signal.SIGKILL
    assert load(folder)["iteration"] == 0  # it can be resumed before its first iteration has ended
    start, two = ["--resume", str(folder), *named(script).split()], (signal.SIGTERM, signal.SIGUSR1)
    assert train_until_killed(script, "rollout", 1, start, *two) == 128 + signal.SIGTERM
    printed = capfd.readouterr()
    program = min(sys.executable, os.path.relpath(sys.executable), key=len)
    again = f"--resume '{folder}'" + f" {named(script)}".rstrip()
    says = rf"^go on with: {re.escape(program)} \S*{script}\.py {re.escape(again)}$"
    assert re.search(says, printed.out, re.M)
    assert printed.err.count("stopping after this iteration") == 2
    assert "Traceback" not in printed.err
    assert load(folder)["iteration"] == 1 and status(folder) == "running"
    twice = signal.SIGINT, signal.SIGINT
    assert train_until_killed(script, "rollout", 2, start, *twice) == -signal.SIGINT
    assert load(folder)["iteration"] == 1 and status(folder) == "running"
    assert train_until_killed(script, "rollout", 1, start, signal.SIGUSR1) == 128 + signal.SIGUSR1
    assert load(folder)["iteration"] == 2


@EVERY
def test_the_same_seed_gives_the_same_bits_and_another_one_others(script, tmp_path):
    """Also in a thread, where no signal can be caught: as in notebooks' servers and tuners."""
    train(script, tmp_path / "1")
    for name, flags in (("again", ""), ("2", "--seed 2")):
        thread = threading.Thread(target=train, args=(script, tmp_path / name, flags))
        thread.start()
        thread.join()
    first, same, other = (outcome(script, tmp_path / name) for name in ("1", "again", "2"))
    assert_same(first, same)
    assert other[1] != first[1] or script == MULTI  # whose toys pay for time alone
    pairs = [(x, other[0]["agent"][name]) for name, x in first[0]["agent"].items() if x.dim() > 1]
    assert pairs and not any(torch.isclose(*pair).all() for pair in pairs)


@EVERY
def test_what_ends_with_a_signal_is_no_failure(script, tmp_path, monkeypatch, capfd):
    """A terminal's Ctrl-C goes to all processes of a group: a compiler or a simulator ends, too."""
    folder, module = tmp_path / "run", importlib.import_module(script)

    def killed(*given, **more):
        with subprocess.Popen(["sleep", "99"]) as compiler:
            os.killpg(0, signal.SIGINT)
        raise RuntimeError(f"g++ ended with {compiler.returncode}\n" * 99)

    def train():
        os.setsid()
        module.train(parse(script, f"{SMALL[script]} --run-dir {folder}"))

    monkeypatch.setattr(module, "update", killed)
    assert in_a_fork(train) == 128 + signal.SIGINT
    printed = capfd.readouterr()
    assert f"--resume {folder}" in printed.out.splitlines()[-1]
    assert "g++ ended with -2" in printed.out and len(printed.out.splitlines()) < 9
    assert "Traceback" not in printed.err
    assert status(folder) == "running" and module.load_checkpoint(folder)["iteration"] == 0


@EVERY
def test_a_finished_run_is_told_and_stays_as_it_is(script, tmp_path, capfd):
    """A policy alone is told, too. A run that was killed after its last save is not finished."""
    folder = tmp_path / "run"
    checkpoint = train(script, folder)
    before = content(folder)
    for name in (folder, folder / "checkpoint.pt"):
        for flags in (named(script), "--env-id Other-v0" * (script != MULTI)):  # which keeps it
            refused(capfd, f"{folder} has finished", parse, script, f"--resume {name} {flags}")
    assert content(folder) == before
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace('"finished"', '"running"'))
    assert resume(script, folder)["iteration"] == checkpoint["iteration"]
    assert status(folder) == "finished"
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    torch.save({name: saved[name] for name in ("args", "agent")}, folder / "checkpoint.pt")
    refused(capfd, f"{folder} has finished", resume, script, folder, "--total-timesteps 999")


@EVERY
def test_a_lost_table_begins_anew(script, tmp_path):
    train(script, tmp_path / "run")
    table = tmp_path / "run" / "episodes.csv"
    header = table.read_bytes().splitlines(keepends=True)[0]
    for total, left in ((4, None), (6, b""), (8, header)):
        table.unlink() if left is None else table.write_bytes(left)
        resume(script, tmp_path / "run", f"--total-timesteps {total * STEPS[script]}")
        assert table.read_bytes().startswith(header) and b"\0" not in table.read_bytes()
        assert len(rows(tmp_path / "run")) > (script != MULTI)


# --- what a run leaves ----------------------------------------------------------------------------
@EVERY
def test_what_a_run_writes(script, tmp_path, capfd):
    folder = tmp_path / "run"
    final = train(script, folder, "--save-model --exp-name mine", iterations=3)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    facts = json.loads((folder / "run.json").read_text(), parse_constant=pytest.fail)
    assert (facts["script"], facts["status"], facts["seed"]) == (f"{script}.py", "finished", 1)
    assert facts["args"] == json.loads(json.dumps(saved["args"]))
    assert facts["versions"].keys() == {"torch", "gymnasium", "numpy"}
    assert facts["global_step"] == final["global_step"]
    assert_same(dict(torch.load(folder / "mine.cleanrl_model")), dict(final["agent"]))
    # a row an episode, and what the console and TensorBoard say of each iteration's
    assert (folder / "episodes.csv").read_text().startswith("global_step,seconds,return,length\n")
    steps, returns, lengths = np.array(rows(folder)[1:], float).T
    assert (np.diff(steps) >= 0).all() and 0 < steps[-1] <= final["global_step"]
    assert facts["final_return"] == pytest.approx(returns[-100:].mean())
    points = scalars(folder, timed=True)
    ends = [step for step, _ in points["charts/SPS"]]
    assert len(ends) == final["iteration"] == len(set(ends))
    assert 0.5 < facts["wall_seconds"] * points["charts/SPS"][-1][1] / facts["global_step"] < 99
    printed, told = capfd.readouterr()
    unscaled = "keep observations and rewards near 1 in size" in printed
    assert unscaled == (script in (*WHOLE, AGENTS))
    assert told == ""  # where no one looks, no bar
    assert b"|seed|1|" in b"".join(path.read_bytes() for path in folder.glob("events.*"))
    of = np.searchsorted(ends, steps)
    for tag, column in (("return", returns), ("length", lengths)):
        means = [(ends[k], column[of == k].mean()) for k in np.unique(of)]
        np.testing.assert_allclose(points[f"charts/episodic_{tag}"], means, rtol=1e-6)
        for end, mean in means if tag == "return" else ():
            assert f"global_step={end}, episodic_return={mean:.4f}, episodes=" in printed
    for tag in ("losses/policy_loss", "losses/value_loss", "losses/explained_variance"):
        assert [step for step, _ in points[tag]] == ends, tag
    assert f"--evaluate {folder}" + f" {named(script)}".rstrip() in printed.splitlines()[-1]
    # the last 100 returns are kept, whatever is resumed
    torch.save(saved | {"last_returns": [float(k) for k in range(100)]}, folder / "checkpoint.pt")
    final = resume(script, folder, f"--total-timesteps {6 * STEPS[script]}")
    more = np.array(rows(folder)[1 + len(returns) :], float)[:, 1]
    assert 0 < len(more) < 100
    assert final["last_returns"] == pytest.approx([*range(len(more), 100), *more])
    facts = json.loads((folder / "run.json").read_text())
    assert facts["final_return"] == pytest.approx(np.mean(final["last_returns"]))
    # a total that whole episodes reach, and do not exceed
    train(script, tmp_path / "exact", f"--total-timesteps {saved['global_step']}")
    assert status(tmp_path / "exact") == "finished"


EPSILONS = dict.fromkeys(("ppo_pixels", "ppo_lstm", "ppo_pettingzoo", MULTI), 1e-5)


@pytest.mark.parametrize("script", [*EPSILONS, *WHOLE])
def test_epsilon_of_adam(script, tmp_path, monkeypatch):
    found, plain = set(), torch.optim.Adam.__init__

    def init(adam, *args, **more):
        found.add(more["eps"])
        plain(adam, *args, **more)

    monkeypatch.setattr(torch.optim.Adam, "__init__", init)
    train(script, tmp_path / "run", iterations=1)
    assert found == {EPSILONS.get(script, 1e-8)}


@EVERY
def test_one_folder_one_run(script, tmp_path, monkeypatch, capfd):
    """Refused where a run is, or a process that trains; without locks of files it is told. A folder
    without a name has the experiment's."""
    folder, module = tmp_path / "run", importlib.import_module(script)
    plain, said = module.update, []

    def update(*given, **more):
        said.append(refused(capfd, "another process trains", resume, script, folder))
        return plain(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, "update", update)
        train(script, folder)
    assert said and status(folder) == "finished"
    before = content(folder)
    args = parse(script, f"{SMALL[script]} --total-timesteps {STEPS[script]}")
    there = dataclasses.replace(args, run_dir=folder)
    refused(capfd, f"a run is there: --resume {folder}", module.train, there)
    assert content(folder) == before

    def no_locks(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.chdir(tmp_path)
    module.train(args)
    (unlocked,) = (tmp_path / "runs").iterdir()
    assert unlocked.name.startswith(f"{args.env_id}__{script}__1__")
    assert f"{unlocked.name} is not locked: " in capfd.readouterr().err


@EVERY
def test_weights_and_biases_are_one_run_however_often_resumed(script, tmp_path, monkeypatch):
    begun, ended = [], []

    def init(**more):
        assert len(list((tmp_path / "run").glob("events.*"))) == len(begun)  # a writer follows it
        begun.append(more)
        return SimpleNamespace(id=more["id"] or "made", finish=lambda: ended.append(1))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(__spec__=True, init=init))
    train(script, tmp_path / "run", "--track --wandb-entity me --wandb-project-name mine")
    resume(script, tmp_path / "run", "--total-timesteps 200")
    assert [(x["id"], x["resume"]) for x in begun] == [(None, "allow"), ("made", "allow")]
    assert {(x["project"], x["entity"], x["name"]) for x in begun} == {("mine", "me", "run")}
    assert len(ended) == 2 and all(x["sync_tensorboard"] for x in begun)


# --- evaluation -----------------------------------------------------------------------------------
def act(script: str, agent, episode: list, repeat: int) -> np.ndarray:
    """What `agent.act` does at the observations of an episode, as the environment gets it."""
    actions, more = [], {}
    if script == "ppo_lstm":
        more["state"] = agent.initial_state(1)
    for time, row in enumerate(episode[:-1:repeat]):
        more |= {"time": time} if script == "ppo_kl_adaptive" else {}
        (action,) = agent.act(row["obs"][None], **more)
        unclipped = script in ("ppo", "ppo_kl_adaptive")
        actions.append(action if unclipped else np.clip(action, toys.BOX.low, toys.BOX.high))
    return np.repeat(actions, repeat, axis=0)[: len(episode) - 1]


@EVERY
def test_evaluation(script, tmp_path, monkeypatch, capfd):
    """It repeats, tells each return, writes nothing, and leaves the agent as it was saved; the
    actions are those of `load` and `act`."""
    folder, module, agents = tmp_path / "run", importlib.import_module(script), []
    checkpoint = train(script, folder, iterations=4)
    before, plain = content(folder), module.load
    monkeypatch.setattr(module, "load", lambda *given: agents.append(plain(*given)) or agents[-1])
    monkeypatch.setattr(toys.Walk, "made", [])
    capfd.readouterr()
    returns = [evaluate(script, folder) for _ in range(2)]
    printed = capfd.readouterr().out.splitlines()
    assert returns[0] == returns[1] and len(returns[0]) == 3
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]
    assert content(folder) == before
    assert len(agents) >= 2
    for agent, _ in agents:
        assert_same(dict(agent.cpu().state_dict()), dict(checkpoint["agent"]))
    told = [line for line in printed if line.startswith("eval_episode=")]
    for i, score in enumerate(returns[0]):
        assert told[i].startswith(f"eval_episode={i}, episodic_return={score:.2f}")
    other = ("sampled_episode=2, ", "greedy_episode=2, ")
    assert any(line.startswith(other) for line in printed) or script == WARP
    if script not in GYMNASIUM:
        return
    said = toys.Walk.made[-1].said
    starts = [k for k, row in enumerate(said) if "seed" in row]
    episodes = [said[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    episodes = [episode for episode in episodes if len(episode) > 1]
    agent, args = plain(folder)
    for episode, score in zip(episodes, returns[0], strict=False):
        taken = [row["action"] for row in episode[1:]]
        assert sum(row["reward"] for row in episode[1:]) == pytest.approx(score)
        acted = act(script, agent, episode, getattr(args, "action_repeat", 1) or 1)
        np.testing.assert_allclose(acted, taken, rtol=1e-4, atol=1e-4)
    trained = {module.episode_seed(args.seed, i, k) for i in range(2) for k in range(99)}
    seeds = {episode[0]["seed"] for episode in episodes}
    assert len(seeds) == len(episodes) >= 3 and not seeds & trained


@EVERY
def test_videos(script, tmp_path, monkeypatch, capfd):
    """After training, and of a run that is played again."""
    train(script, tmp_path / "run", "--capture-video --eval-episodes 1")
    (tmp_path / "run" / "videos").rename(tmp_path / "first")
    assert list((tmp_path / "first").glob("*.mp4"))
    returns = evaluate(script, tmp_path / "run", "--eval-episodes 1 --capture-video")
    assert returns == evaluate(script, tmp_path / "run", "--eval-episodes 1")
    assert f"filmed into {tmp_path / 'run' / 'videos'}\n" in capfd.readouterr().out
    films = list((tmp_path / "run" / "videos").glob("*.mp4"))
    assert films and min(film.stat().st_size for film in films) > 500

    def full(*given, **more):
        raise OSError("no space")

    writer = "moviepy.video.io.ImageSequenceClip.ImageSequenceClip.write_videofile"
    monkeypatch.setattr(writer, full)
    flags = f"--eval-episodes {1 + (script in GYMNASIUM[:4])} --capture-video"
    with pytest.raises(OSError, match="no space"):  # before the last film, which is closed silently
        evaluate(script, tmp_path / "run", flags)


# --- what is broken -------------------------------------------------------------------------------
OWNER = {MULTI: Toy, AGENTS: toys.Group}  # of a method `step`; the others' is Walk


@EVERY
@pytest.mark.parametrize("fault", ["an exception", "observations", "rewards", "parameters"])
def test_a_fault_ends_the_run_which_goes_on_when_it_is_mended(script, fault, tmp_path, monkeypatch):
    """In the fourth iteration, of which nothing is saved or learned: one without a fault has the
    same end. An environment's own exception is Python's, with its line."""
    if fault == "observations" and script == MULTI:
        pytest.skip("of bytes")
    module, folder, logged = importlib.import_module(script), tmp_path / "run", []
    log, update = module.Run.log, module.update
    owner = module.Pendulum if script == WARP else OWNER.get(script, toys.Walk)
    step = owner.step

    def faulty(env, action):
        result = [*step(env, action)]
        if fault == "parameters" or len(logged) != 3:
            return result
        if fault == "an exception":
            raise ZeroDivisionError("physics blew up")
        k = ("observations", "rewards").index(fault)
        several = isinstance(result[k], dict)
        result[k] = {x: y * np.nan for x, y in result[k].items()} if several else result[k] * np.nan
        if script == MULTI:  # whose raw rewards are EnvPool's
            result[-1]["reward"] *= np.nan
        return result

    def infinite(agent, *given, **more):
        metrics = update(agent, *given, **more)
        if fault == "parameters" and len(logged) == 3:
            list(agent.parameters())[-1].data.view(-1)[-1] = np.inf
        return metrics

    says = {"an exception": "^physics blew up$", "parameters": r"iteration 3: [\w.]+ is not finite"}
    match = says.get(fault, rf"iteration 3: .*{fault[:3]}.* is not finite")
    error = ZeroDivisionError if fault == "an exception" else FloatingPointError
    with monkeypatch.context() as patch:
        patch.setattr(module.Run, "log", lambda *given: logged.append(1) or log(*given))
        patch.setattr(module, "update", infinite)
        patch.setattr(owner, "step", faulty)
        with pytest.raises(error, match=match) as raised:
            train(script, folder, iterations=6)
    assert any(entry.name == "faulty" for entry in raised.traceback) == (fault == "an exception")
    assert status(folder) == "failed"
    checkpoint = module.load_checkpoint(folder)
    assert checkpoint["iteration"] == 2
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())
    resume(script, folder)
    if script != MULTI:  # whose games are new ones
        train(script, tmp_path / "whole", iterations=6)
        assert_same(outcome(script, folder), outcome(script, tmp_path / "whole"))


FAULTS = {"step": "boom in step", "reset": "boom in reset", "death": "a worker ended",
          "constructor": "boom in constructor", "deaf": "boom: SIGTERM is heard",
          "exit of step": "SystemExit: no license", "exit of constructor": "SystemExit: no license",
          "socket": "ConnectionResetError: no simulator"}  # fmt: skip
BEFORE = ["constructor", "deaf", "exit of constructor"]  # the run


@pytest.mark.parametrize("script", PARALLEL)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_worker_is_named(script, fault, tmp_path, monkeypatch):
    """With the environment's own line; no process stays."""
    quick_workers(monkeypatch)
    kwargs = json.dumps({"fault": fault})
    flags = f"{SMALL[script]} --total-timesteps 32 --env-workers 2 --run-dir {tmp_path / 'run'}"
    args = importlib.import_module(script).parse_args([*flags.split(), "--env-kwargs", kwargs])
    with pytest.raises(RuntimeError, match=FAULTS[fault]) as error:
        importlib.import_module(script).train(args)
    assert fault == "death" or "self.strike(" in str(error.value)
    assert no_worker_stays()
    assert (tmp_path / "run").exists() == (fault not in BEFORE)
    if fault not in BEFORE:
        assert status(tmp_path / "run") == "failed"


# --- strangers' files -----------------------------------------------------------------------------
@EVERY
def test_no_file_runs_code(script, tmp_path, monkeypatch, capfd):
    """Nor does a checkpoint name a module to import. What is no checkpoint is one line."""
    folder, mark = tmp_path / "run", tmp_path / "mark"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {mark}",)

    train(script, folder)
    path = folder / "checkpoint.pt"
    whole, good = path.read_bytes(), torch.load(path, weights_only=True)
    pickle.loads(pickle.dumps(Bomb()))
    mark.unlink()  # which shows that it would work
    files = [
        lambda: torch.save(good | {"agent": Bomb()}, path),
        lambda: path.write_bytes(whole[: len(whole) // 2]),
        path.unlink,
    ]
    for write in files:
        write()
        for use in (resume, evaluate):
            refused(capfd, f"{folder}: no checkpoint of this script", use, script, folder)
        assert not mark.exists()
    (tmp_path / f"own_{script}.py").write_text(f"open({str(mark)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    torch.save(good | {"args": good["args"] | {"env_id": f"own_{script}:Own-v0"}}, path)
    for use, flag in (("train", "--resume"), ("evaluate", "--evaluate")):
        with pytest.raises(BaseException):  # noqa: B017
            getattr(importlib.import_module(script), use)(parse(script, f"{flag} {folder}"))
    assert not mark.exists()


@EVERY
def test_a_run_of_another_script_is_told(script, tmp_path, capfd):
    """By name, if it has flags that this one lacks; a renamed script goes on."""
    folder = tmp_path / "run"
    train(script, folder)
    returns = evaluate(script, folder)
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    other = {"script": "other.py", "args": checkpoint["args"] | {"flag": 1}}
    torch.save(checkpoint | other, folder / "checkpoint.pt")
    for use in (resume, evaluate):
        refused(capfd, "it is of other.py", use, script, folder)
    torch.save(checkpoint | {"script": "other.py"}, folder / "checkpoint.pt")
    assert evaluate(script, folder) == returns
    flags = [{*importlib.import_module(x).Args.__annotations__} for x in SCRIPTS if x != script]
    # but ppo_lstm.py has all those of ppo_pixels.py, and ends in torch's missing keys
    assert script == "ppo_pixels" or all({*checkpoint["args"]} - x for x in flags)


@EVERY
def test_other_networks_are_told(script, tmp_path, capfd):
    """A copy's, which have other shapes, or, for which Adam's moments would be mixed, an order."""
    folder = tmp_path / "run"
    train(script, folder)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    wide = {name: x.repeat(2, 1) if x.ndim == 2 else x for name, x in saved["agent"].items()}
    for weights in (wide, dict(reversed(saved["agent"].items()))):
        torch.save(saved | {"script": "mine.py", "agent": weights}, folder / "checkpoint.pt")
        says = f"{folder} was trained by mine.py, with other networks"
        refused(capfd, says, evaluate, script, folder)
        refused(capfd, says, resume, script, folder, "--total-timesteps 999")


@pytest.mark.parametrize("script", [x for x in SCRIPTS if named(x)])
def test_a_module_or_a_file_is_named_again(script, tmp_path, monkeypatch, capfd):
    """What a folder's arguments name is not used; the command line may name it."""
    folder, flag = tmp_path / "run", named(script)
    train(script, folder)
    refused(capfd, f"{folder}: give {flag} again", parse, script, f"--evaluate {folder}")
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    load = importlib.import_module(script).load_checkpoint
    paths = [{"x": "/a"}, {"x": [{"y": "\\a"}]}, {"x": {"y": "file"}}, {"x": "os.system"}]
    for kwargs in [json.dumps(x) for x in paths] + ['{"\\u002fa": "b"}', '{"x": "a:b"}']:
        args = saved["args"] | {"env_kwargs": kwargs}
        torch.save(saved | {"args": args}, folder / "checkpoint.pt")
        assert load(folder)["args"].env_kwargs == "{}"
        again = ["--evaluate", str(folder), *flag.split()]
        says = f"{folder}: give --env-kwargs {shlex.quote(kwargs)} again"
        refused(capfd, says, importlib.import_module(script).parse_args, again)
        given = importlib.import_module(script).parse_args([*again, f"--env-kwargs={kwargs}"])
        assert given.env_kwargs == kwargs
    args = saved["args"] | {"env_kwargs": '{"x": ["rgb_array", "8x8", "Do it-v0"], "y": 0.5}'}
    torch.save(saved | {"args": args}, folder / "checkpoint.pt")
    assert load(folder)["args"].env_kwargs == args["env_kwargs"]


# --- the command line -----------------------------------------------------------------------------
COMPUTED = ["total_timesteps", "batch_size", "minibatch_size", "num_iterations", "world_size"]
FULLY = {  # and what is said of it, by tyro's frame or in one line
    "--learning-rat 0.1": "--learning-rate", "--seed one": "one", "--seed -1": "seed is -1",
    "--env-id nowhere:Env-v0": "nowhere", "--env-id Penduluum-v1": "Pendulum",
    "--env-id envpool:Nothing-v0": "EnvPool has no Nothing-v0",
    "--env-id envpool:Pong-v5": "for images: ppo_pixels.py",
    "--env-id toys:Turn-v0": "for discrete ones: ppo.py", "--learning-rate nan": "is nan",
    "--total-timesteps 1": "total_timesteps is 1: not in 16 ... inf (an iteration is num_envs x",
    "--clip-coef -0.1": "clip_coef is -0.1: not in 0 ... inf",
    "--num-minibatches 99": "is 99: not in 1 ... 16", "--env-workers -1": "env_workers is -1",
    "--env-kwargs {'a':True}": "env_kwargs is {'a':True}: no JSON object",
    "--max-episode-steps 0": "max_episode_steps is 0", "--run-dir run": "a run is there: --resume",
    "--evaluate nowhere": "nowhere: no checkpoint",
    "--resume run --num-envs 3 --total-timesteps 96": "num_envs: run keeps its 2",
    "--resume run --no-scale-actions": "scale_actions: run keeps its True",
    "--resume run --total-timesteps 16": "run has finished: a larger",
    "--evaluate run --capture-video": "moviepy is not installed",
}  # fmt: skip
FEW = {  # on each script
    "--epsilon 1": "Unrecognized options: --epsilon", "--gamma 1.1": "gamma is 1.1: not in 0 ... 1",
    "--resume nowhere": "no checkpoint", "--checkpoint-interval 0": "checkpoint_interval is 0",
    "--resume run --seed 9": "seed: run keeps its 1: leave the flag out",
    "--gae-lambda 1.1": "gae_lambda is 1.1: not in 0 ... 1",
}  # fmt: skip
IF = {  # it has this flag
    "num_steps": {"--num-envs 0": "num_envs is 0", "--total-timesteps 1": "(an iteration is num_"},
    "env_kwargs": {"--env-kwargs []": "no JSON object"},
    "num_minibatches": {"--num-minibatches 0": "num_minibatches is 0"},
    "scale_obs": {"--env-id envpool:Pong-v5": "for images: ppo_pixels.py"},
    "resize": {"--resize 60": "height and width are needed"},
}


@EVERY
def test_numbers_are_within_their_ends(script):
    module = importlib.import_module(script)
    for name, value in vars(module.Args()).items():
        if type(value) is int and value >= 0 and name not in COMPUTED:
            with pytest.raises(ValueError, match=f"({name}|num_envs) is -?1: not in [0-9]"):
                module.Args(**{name: -1})
    args = module.Args(seed=0)
    if hasattr(args, "num_minibatches"):
        most = {MULTI: args.num_steps, WARP: args.batch_size // 2, "ppo_lstm": args.num_envs}
        most = most.get(script, args.batch_size)
        module.Args(num_minibatches=most)
        with pytest.raises(ValueError, match=f"num_minibatches is {most + 1}: not in 1 ... {most}"):
            module.Args(num_minibatches=most + 1)


@EVERY
def test_wrong_flags_are_told_and_change_nothing(script, tmp_path, monkeypatch, capfd):
    """All on one script, a few on each. Exit code 2, no traceback, no folder."""
    installed(monkeypatch, wandb=False, moviepy=False)
    monkeypatch.chdir(tmp_path)
    train(script, Path("run"))
    before, cases, otherwise = content(tmp_path), dict(FEW), []
    module = importlib.import_module(script)
    for flag in IF.keys() & vars(module.Args).keys():
        cases |= IF[flag]
    cases |= FULLY if script == "ppo_continuous_action" else {}
    for flags, says in cases.items():
        capfd.readouterr()
        small = named(script) if "run " in flags else f"{SMALL[script]} --total-timesteps 99"
        try:
            args = parse(script, f"{small} {flags}")
            code = (module.evaluate if args.evaluate else module.train)(args)
        except SystemExit as end:
            code = end.code
        err = capfd.readouterr().err
        text = " ".join(word for word in err.split() if word != "│")
        if code != 2 or says not in text or "Traceback" in err:
            otherwise.append((flags, code, err))
    assert not otherwise, "\n".join(map(str, otherwise))
    assert content(tmp_path) == before


CLEANRL = """--exp-name x --seed 7 --no-torch-deterministic --no-cuda --track --wandb-project-name p
--wandb-entity me --capture-video --save-model --env-id some --total-timesteps 123456
--learning-rate 0.125 --num-envs 6 --num-steps 65 --gamma 0.5 --gae-lambda 0.25 --num-minibatches 3
--update-epochs 6 --no-norm-adv --clip-coef 0.375 --no-clip-vloss --ent-coef 0.0625 --vf-coef 0.75
--max-grad-norm 1.5 --batch-size 390 --minibatch-size 130 --num-iterations 316"""
ANNEALED = " --no-anneal-lr --target-kl 0.875"  # Warp's rate follows the KL


@pytest.mark.parametrize("script", [x for x in SCRIPTS if x not in WHOLE])
def test_command_lines_of_cleanrl_run(script, monkeypatch, capfd):
    installed(monkeypatch, wandb=True, moviepy=True)
    line = CLEANRL + ANNEALED * (script != WARP)
    spelled = re.sub("(?<=[a-z])-(?=[a-z])", "_", line) if script == "ppo" else line
    args = vars(parse(script, spelled))
    older = re.sub(r"--no-(\S+)", r"--\1 False", spelled).replace("--track", "--track=True")
    assert vars(parse(script, older)) == args
    for flag, value in re.findall(r"--(\S+)(?:\s+(?!--)(\S+))?", line):
        name = flag.removeprefix("no-").replace("-", "_")
        assert str(args[name]) == (value or str(not flag.startswith("no-"))), flag
    for flag in ("--minibatch-size=7", "--batch_size 391", "--num-iterations 3"):
        with pytest.raises(SystemExit):
            parse(script, f"{line} {flag}")
        assert "see --num-steps, --num-minibatches, --total-timesteps" in capfd.readouterr().err


ORIGINALS = {  # and what their flags are called here
    "ppo_cma": (
        "--env_name Humanoid-v4 --max_steps 123 --mode PPO-CMA --iter_steps 321 --batch_size 51 "
        "--run_suffix 1 -lr 0.125 --ppo_epsilon 0.5",
        "--env-id Humanoid-v4 --total-timesteps 123 --mode ppo-cma --iter-steps 321 "
        "--minibatch-size 51 --exp-name 1 --learning-rate 0.125 --clip-coef 0.5",
    ),
    "ppo_kl_adaptive": (
        "Ant-v4 -n 9 -g 0.9 -l 0.8 -k 0.02 -b 7 -m 3 -v -0.5",
        "--env_name Ant-v4 --num_episodes 9 --gamma 0.9 --lam 0.8 --kl_targ 0.02 --batch_size=7 "
        "--hid1_mult 3 --policy_logvar -0.5",
    ),
}


@pytest.mark.parametrize("script", ORIGINALS)
def test_the_originals_flags_mean_what_they_did(script):
    first, second = (parse(script, line) for line in ORIGINALS[script])
    assert first == second != importlib.import_module(script).Args()


# --- as programs ----------------------------------------------------------------------------------
@EVERY
def test_what_the_header_requires_is_what_the_project_installs(script):
    """Version for version: the project's own dependencies or those of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = set(project["dependencies"])
    listed |= {each for extra in project["optional-dependencies"].values() for each in extra}
    listed |= {each.replace("[mujoco]", "") for each in listed}  # which not every script needs
    text = re.search(r"# /// script\n(.*?)# ///\n", (ROOT / f"{script}.py").read_text(), re.S)[1]
    header = tomllib.loads(re.sub("^# ?", "", text, flags=re.M))
    assert header["requires-python"] == project["requires-python"]
    assert set(header["dependencies"]) - listed == set()


@EVERY
def test_importing_does_nothing(script, tmp_path, monkeypatch, capfd):
    def world():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        numbers = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return handlers, numbers, torch.get_num_threads(), dict(os.environ)

    monkeypatch.chdir(tmp_path)
    before = world()
    names = runpy.run_path(str(ROOT / f"{script}.py"), run_name="imported")
    assert {"Args", "Agent"} <= names.keys()
    assert world() == before
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", COMPILED)
def test_without_a_compiler_one_line_and_on(script, tmp_path, monkeypatch, capfd):
    def missing(*args, **kwargs):
        raise RuntimeError("no g++")

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", missing)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    module = importlib.import_module(script)
    often = "--compile-from 0" if "compile_from" in module.Args.__annotations__ else ""
    assert train(script, tmp_path / "run", f"--compile {often}")["iteration"] == 2
    printed = capfd.readouterr()
    assert len(re.findall("--compile: no working compiler.*going on eagerly", printed.out)) == 1
    assert "Traceback" not in printed.err


ALONE = [pytest.param(x, marks=[pytest.mark.slow] * (x != "ppo_lstm")) for x in PARALLEL]


@pytest.mark.parametrize("script", ALONE)
def test_a_script_alone_in_an_empty_folder(script, tmp_path):
    """Copied, with an environment of one's own, in a run folder with a blank, stopped; what it
    prints works when pasted where no Python is in PATH. Two workers cost one import of the
    script more."""
    text = (ROOT / f"{script}.py").read_text()
    counted = 'import sys; print(__name__, "torch" in sys.modules, file=open("imports", "a"))'
    (tmp_path / "own.py").write_text(text.replace("\nimport ", f"\n{counted}\nimport ", 1))
    shutil.copy(toys.__file__, tmp_path / "mine.py")
    for package in ("wandb", "moviepy", "benchmark"):
        (tmp_path / f"{package}.py").write_text("raise ImportError")

    def call(command: str, code: int) -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=tmp_path, capture_output=True, text=True,
            env={"OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    flags = SMALL[script].replace("toys:", "mine:")
    flags += """ --env-kwargs '{"fault":"stop"}' --total-timesteps 96"""
    start = f"{sys.executable} own.py {flags} --run-dir 'a run'"
    (again,) = re.findall("go on with: (.*)", call(start, 128 + signal.SIGTERM))
    (play,) = re.findall("play with: (.*)", call(f"{again} --env-workers 2 --env-kwargs '{{}}'", 0))
    assert "eval_episode=0, episodic_return=" in call(f"{play} --eval-episodes 1", 0)
    assert status(tmp_path / "a run") == "finished"
    imports = (tmp_path / "imports").read_text().splitlines()
    assert imports.count("__main__ False") == 3 and imports.count("__mp_main__ False") <= 1
    assert len(imports) > 3
    # workers that no one closes keep no program
    words = f"{SMALL[script].replace('toys:', 'mine:')} --env-workers 2".split()
    program = f"import own; own.WorkerEnvs(own.parse_args({words}), [])"
    call(f'timeout 60 {sys.executable} -c "{program}"', 0)
