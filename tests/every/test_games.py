"""What a run may do to its folder, a folder to a run, and numbers to training: in the scripts that
play games or simulate on the device. `Small` environments stand for the real ones."""

import importlib
import threading
from pathlib import Path

import pytest
import torch
from maths import frames_agent, frames_rollout
from program import Levels, Toy, scalars, status
from scripts import Duel, small_environments

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


# --- ends -----------------------------------------------------------------------------------------


@EVERY
def test_a_thread_trains(script, tmp_path):
    thread = threading.Thread(target=train, args=(script, tmp_path / "run"))
    thread.start()
    thread.join(60)
    assert status(tmp_path / "run") == "finished"


@EVERY
@pytest.mark.parametrize("fault", [False, True])
def test_environments_are_closed_however_a_run_ends(script, fault, tmp_path, monkeypatch):
    module, closed = importlib.import_module(script), []
    envs = module.Pendulum if script == WARP else module.Envs
    monkeypatch.setattr(envs, "close", lambda self: closed.append(self))
    if fault:
        monkeypatch.setattr(module, "update", None)
        with pytest.raises(TypeError):
            train(script, tmp_path / "run")
        if script != WARP:  # which counts an iteration's steps after it: none were taken
            assert status(tmp_path / "run") == "failed"
        assert (tmp_path / "run").exists() == (script != WARP)
    else:
        train(script, tmp_path / "run")
    assert len(closed) == 1


@PIXELS
def test_minibatches_of_too_few_rows_are_none(script, tmp_path, monkeypatch):
    """Episodes of one step: every second rollout of one step has no row to learn from."""
    monkeypatch.setattr(Levels, "lengths", (1, 1, 1))
    plain = Toy.__init__

    def one_step(self, *given, **more):
        plain(self, *given, **more)
        self.life[:] = 1

    monkeypatch.setattr(Toy, "__init__", one_step)
    monkeypatch.setattr(Duel, "death", 1)
    monkeypatch.setattr(Duel, "end", 1)
    flags = "--num-steps 1 --num-minibatches 1 --total-timesteps 24"
    checkpoint = train(script, tmp_path / "run", flags)
    assert checkpoint["counters"][:2] == (12, 6)
    assert status(tmp_path / "run") == "finished"
    assert len(scalars(tmp_path / "run")["losses/entropy"]) == 3
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


@EVERY
def test_minibatches_of_two_rows(script, tmp_path):
    checkpoint = train(script, tmp_path / "run", "--num-steps 2 --num-minibatches 2")
    assert status(tmp_path / "run") == "finished"
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# --- edits ----------------------------------------------------------------------------------------


def freeze(agent):
    agent.critic.requires_grad_(False)


def swap(agent):
    parameter = next(agent.critic.parameters())
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize("script", [MULTI, WARP])
@pytest.mark.parametrize("edit", [freeze, swap])
def test_parameters_that_leave_the_vector_are_an_error_by_name(script, edit, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    plain = module.flat_adam

    def edited(agent):
        adam = plain(agent)
        edit(agent)
        return adam

    monkeypatch.setattr(module, "flat_adam", edited)
    with pytest.raises(RuntimeError, match=r"critic.*was frozen, thawed or replaced"):
        train(script, tmp_path / "run")


@pytest.mark.parametrize("script", [MULTI, WARP])
def test_parameters_frozen_before_stay_as_they_are(script, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    plain, agents, start = module.flat_adam, [], {}

    def frozen(agent):
        freeze(agent)
        agents.append(agent)
        start.update({name: x.clone() for name, x in agent.state_dict().items()})
        return plain(agent)

    monkeypatch.setattr(module, "flat_adam", frozen)
    train(script, tmp_path / "run")
    moved = {name for name, p in agents[0].named_parameters() if not torch.equal(p, start[name])}
    assert moved == {n for n, _ in agents[0].named_parameters() if not n.startswith("critic")}


@pytest.mark.slow
def test_compiled_code_follows_numbers_of_args():
    """Also the third and later ones, which torch 2.13 would not follow by itself."""
    script, args = importlib.import_module(MULTI), parse(MULTI, f"{ENVPOOL} --compile")
    data, agents = frames_rollout(MULTI, 8, 4), []
    for _ in range(2):
        agents.append(frames_agent(MULTI, args))
    gradient = script.compile_grad(agents[1], args)
    assert gradient is not script.minibatch_grad
    for k, clip in enumerate((0.1, 0.05, 0.02, 0.3, 0.01)):
        args.clip_coef, args.ent_coef = clip, 0.1 * k
        script.update(agents[0], data, k, 1e-3, args)
        script.update(agents[1], data, k, 1e-3, args, gradient)
        torch.testing.assert_close(agents[0].vector, agents[1].vector, atol=1e-4, rtol=0)
    args.norm_adv = False
    for agent, given in zip(agents, ((), (gradient,)), strict=True):
        script.update(agent, data, 9, 1e-3, args, *given)
    torch.testing.assert_close(agents[0].vector, agents[1].vector, atol=2e-4, rtol=0)


def test_a_graph_is_recorded_again_when_a_number_has_changed(monkeypatch):
    module = importlib.import_module(WARP)

    class Graph:
        def replay(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: threading.Lock())
    called = []
    recorded = module.Recorded(lambda args: called.append(args.clip_coef) or called[-1])
    args = parse(WARP, FLAGS[WARP])
    given = [0.2] * 6 + [0.1] * 2 + [0.05]
    found = []
    for clip in given:
        args.clip_coef = clip
        found.append(recorded(args))
    assert found == given
    assert called == [0.2] * 4 + [0.1, 0.05]
