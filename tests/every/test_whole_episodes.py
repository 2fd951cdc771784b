"""ppo_cma.py and ppo_kl_adaptive.py beyond their algorithms: worker processes, one definition of
the policy, boxes of any shape and type, what is edited or damaged."""

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import episodes_toy
import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from program import (
    assert_same,
    in_a_fork,
    rows,
    scalars,
    status,
    train_until_killed,
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


def plain(checkpoint: dict) -> dict:
    """But for how it was run."""
    how = {"env_workers": 0, "env_id": ""}
    return checkpoint | {"args": asdict(checkpoint["args"]) | how}


# --- workers --------------------------------------------------------------------------------------


@pytest.fixture
def workers(monkeypatch):
    """The worker processes that were started in this test and still live."""
    monkeypatch.setenv("EPISODES_TEST", mark := f"{os.getpid()}-{time.monotonic_ns()}")

    def living() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                started = mark.encode() in (path / "environ").read_bytes()
                if started and b"spawn_main" in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:  # it has just ended, or is another user's
                continue
        return found

    return living


def none_left(workers) -> bool:
    end = time.monotonic() + 30
    while workers() and time.monotonic() < end:
        time.sleep(0.1)
    return not workers()


@BOTH
@pytest.mark.parametrize("counts", [[2], pytest.param([1, 4], marks=pytest.mark.slow)])
def test_any_number_of_workers_gives_the_same_bits(script, counts, tmp_path, workers):
    expected = train(script, tmp_path / "0")
    assert len(rows(tmp_path / "0")) > 30
    for count in counts:
        given = train(script, tmp_path / str(count), f"--env-workers {count}")
        assert_same(plain(given), plain(expected))
        assert rows(tmp_path / str(count)) == rows(tmp_path / "0")
        assert scalars(tmp_path / str(count)) == scalars(tmp_path / "0")
    assert none_left(workers)


@BOTH
def test_killed_with_workers_and_resumed_without(script, tmp_path, workers):
    expected, folder = train(script, tmp_path / "whole"), tmp_path / "run"
    argv = line(script, folder, "--env-workers 2")
    assert train_until_killed(script.__name__, "update", 4, argv) == -signal.SIGKILL
    assert none_left(workers)
    assert script.load_checkpoint(folder)["counters"][1] == 2
    on = "--env-id episodes_toy:Lengths-v0 --env-workers 0"
    script.train(script.parse_args(["--resume", str(folder), *on.split()]))
    assert_same(plain(script.load_checkpoint(folder)), plain(expected))
    assert rows(folder) == rows(tmp_path / "whole")


@BOTH
def test_ctrl_c_with_workers_saves_and_leaves_nothing(
    script, tmp_path, workers, monkeypatch, capfd
):
    """It reaches every process of the terminal's group: the run decides, the workers ignore it."""
    expected, folder = train(script, tmp_path / "whole"), tmp_path / "run"
    capfd.readouterr()
    update, calls = script.update, []  # of this process; the fork has its own

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 3:
            os.killpg(0, signal.SIGINT)
        return update(*given)

    def train_in_a_group():
        os.setpgrp()
        script.update = interrupted
        script.train(script.parse_args(line(script, folder, "--env-workers 2")))

    assert in_a_fork(train_in_a_group) == 130
    assert none_left(workers)
    said = capfd.readouterr()
    assert "stopping after this iteration" in said.err
    assert "Traceback" not in said.out + said.err
    assert f"--resume {folder}" in said.out
    assert script.load_checkpoint(folder)["counters"][1] == 3
    assert status(folder) == "running"
    on = "--env-id episodes_toy:Lengths-v0 --env-workers 0"
    script.train(script.parse_args(["--resume", str(folder), *on.split()]))
    assert_same(plain(script.load_checkpoint(folder)), plain(expected))
    assert rows(folder) == rows(tmp_path / "whole")


@BOTH
@pytest.mark.parametrize("fault", ["step", "reset"])
def test_an_exception_in_a_worker_is_shown_whole_and_once(script, fault, tmp_path, workers, capfd):
    with pytest.raises(RuntimeError) as error:
        train(script, tmp_path / "run", "--env-workers 2", fault=fault)
    text = str(error.value)
    assert text.count(f"ZeroDivisionError: boom in {fault}") == 1
    assert 'self.strike("' in text  # the line of the environment
    assert "Traceback" not in capfd.readouterr().err
    assert none_left(workers)


@BOTH
def test_an_exception_in_the_constructor_is_one_line(script, tmp_path, workers, capfd):
    with pytest.raises(SystemExit) as end:
        train(script, tmp_path / "run", "--env-workers 2", fault="constructor")
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert err.count("boom in constructor") == 1 and "Traceback" not in err
    assert not (tmp_path / "run").exists()
    assert none_left(workers)


@BOTH
def test_a_worker_that_is_killed_ends_the_run_by_name(script, tmp_path, workers):
    with pytest.raises(RuntimeError, match=r"--env-workers was killed \(exit code -9\)"):
        train(script, tmp_path / "run", "--env-workers 2", fault="death")
    assert none_left(workers)


@BOTH
def test_more_workers_than_environments_are_refused(script, capfd):
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--num-envs", "2", "--env-workers", "3"])
    assert end.value.code == 2
    assert "--env-workers 3: not in 0 ... 2" in capfd.readouterr().err


# --- one definition of the policy -----------------------------------------------------------------


class Residual(nn.Module):
    """A network that a researcher puts in a script's place."""

    def __init__(self, inputs: int, outputs: int, *_):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 16), nn.Linear(16, outputs)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h + torch.relu(h))

    def center(self, x):
        pass


@BOTH
def test_another_network_acts_as_it_learns(script, monkeypatch, tmp_path):
    monkeypatch.setattr(ppo_cma, "MLP", Residual)
    monkeypatch.setattr(
        ppo_kl_adaptive, "mlp", lambda inputs, m, third, outputs: Residual(inputs, outputs)
    )
    final = train(script, tmp_path / "run")
    assert final["counters"][1] == 5
    agent, _ = script.load(tmp_path / "run")
    assert sum(isinstance(net, Residual) for net in agent.children()) >= 2


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.ELU(), nn.LayerNorm(7)])
def test_layers_of_another_kind_act_as_they_learn(layer, monkeypatch, tmp_path):
    made = ppo_kl_adaptive.mlp

    def mlp(*sizes):
        net = made(*sizes)
        for k, each in enumerate(net):
            if isinstance(each, nn.Tanh):
                width = net[k - 1].out_features
                net[k] = nn.LayerNorm(width) if isinstance(layer, nn.LayerNorm) else layer
        return net

    monkeypatch.setattr(ppo_kl_adaptive, "mlp", mlp)
    assert train(ppo_kl_adaptive, tmp_path / "run")["counters"][1] == 5


EDITED = [
    (ppo_cma, "MLP.forward", lambda plain: lambda net, x, layer=2: plain(net, x, layer) + 0.5),
    (ppo_cma, "Agent.mean", lambda plain: lambda agent, obs: 0.5 * plain(agent, obs) + 0.2),
    (ppo_cma, "Agent.logvar", lambda plain: lambda agent, obs: plain(agent, obs) - 1.0),
    (
        ppo_kl_adaptive,
        "Agent.policy",
        lambda plain: (
            lambda agent, x: ppo_kl_adaptive.Gaussian(
                plain(agent, x).mean.tanh() + 0.1, plain(agent, x).logvar
            )
        ),
    ),
    (
        ppo_kl_adaptive,
        "Agent.policy",
        lambda plain: (
            lambda agent, x: ppo_kl_adaptive.Gaussian(
                plain(agent, x).mean, plain(agent, x).logvar + x[:, :1]
            )
        ),
    ),
]


@pytest.mark.parametrize(("script", "name", "edit"), EDITED)
def test_what_would_act_by_another_policy_ends_by_name(script, name, edit, monkeypatch, tmp_path):
    owner, method = name.split(".")
    owner = getattr(script, owner)
    monkeypatch.setattr(owner, method, edit(getattr(owner, method)))
    with pytest.raises(RuntimeError, match="numpy_policy acts by another policy"):
        train(script, tmp_path / "run")


# --- what is edited -------------------------------------------------------------------------------


@BOTH
def test_a_parameter_that_no_optimizer_has_is_named(script, monkeypatch, tmp_path):
    made = script.Agent.__init__

    def init(agent, *args, **kwargs):
        made(agent, *args, **kwargs)
        agent.extra = nn.Parameter(torch.zeros(3))

    monkeypatch.setattr(script.Agent, "__init__", init)
    with pytest.raises(RuntimeError, match="extra is in no optimizer"):
        train(script, tmp_path / "run")


@BOTH
def test_a_frozen_parameter_stays(script, monkeypatch, tmp_path):
    made, frozen = script.Agent.__init__, []

    def init(agent, *args, **kwargs):
        made(agent, *args, **kwargs)
        agent.critic.requires_grad_(False)
        first = next(iter(agent.critic.parameters()))
        first.requires_grad_(True)  # so that there is something to descend
        frozen.append([p.clone() for p in agent.critic.parameters()])

    monkeypatch.setattr(script.Agent, "__init__", init)
    monkeypatch.setattr(ppo_cma.MLP, "center", lambda net, x: None)
    final = train(script, tmp_path / "run")["agent"]
    last = [value for name, value in final.items() if name.startswith("critic.")]
    same = [torch.equal(a, b) for a, b in zip(frozen[0], last, strict=True)]
    assert same == [False] + [True] * (len(same) - 1)


def test_numbers_of_args_are_followed_when_they_change(monkeypatch, tmp_path):
    """As on each iteration of a schedule."""
    seen, plain_update = [], ppo_kl_adaptive.update

    def update(agent, data, args):
        args.kl_targ = 0.5 / (1 + len(seen))
        args.learning_rate = 1e-3 / (1 + len(seen))
        args.value_learning_rate = 2e-3 / (1 + len(seen))
        metrics = plain_update(agent, data, args)
        rates = {name: x.param_groups[0]["lr"] for name, x in agent.optimizers.items()}
        seen.append((agent.servo.kl_targ, *rates.values()))
        return metrics

    monkeypatch.setattr(ppo_kl_adaptive, "update", update)
    train(ppo_kl_adaptive, tmp_path / "run", "--servo fixed")
    expected = [(0.5 / k, 1e-3 / k, 2e-3 / k) for k in range(1, 6)]
    np.testing.assert_allclose(seen, expected)


# --- boxes ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("actions", episodes_toy.BOXES)
def test_boxes_of_any_type_and_shape(script, actions, monkeypatch, tmp_path):
    """The environment asserts shape and type; whole numbers are in the box, of either script."""
    step, taken = episodes_toy.Lengths.step, []

    def spy(env, action):
        taken.append(env.action_space.contains(action))
        return step(env, action)

    monkeypatch.setattr(episodes_toy.Lengths, "step", spy)
    train(script, tmp_path / "run", actions=actions)
    fractions = episodes_toy.BOXES[actions].dtype.kind == "f"
    assert all(taken) or (script is ppo_kl_adaptive and fractions)
    agent, args = script.load(tmp_path / "run")
    obs = np.zeros((5, 3), np.float32)
    shape = episodes_toy.BOXES[actions].shape
    assert agent.act(obs).shape == agent.act(obs, agent.noise(5)).shape == (5, *shape)
    action, logprob, *_ = agent.get_action_and_value(torch.zeros(5, 3))
    assert action.shape == (5, np.prod(shape)) and logprob.shape == (5,)
    argv = ["--evaluate", str(tmp_path / "run"), "--env-id", "episodes_toy:Lengths-v0"]
    assert len(script.evaluate(script.parse_args([*argv, "--eval-episodes", "2"]))) == 2


BOUNDS = [(-3e38, 3e38), (0, 1e-40), (0, 0), (-1e20, 1e20), (-1, np.inf), (1e8, 1e8 + 1)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_boxes_that_ppo_cma_can_not_learn_in_are_refused(low, high, monkeypatch, tmp_path, capfd):
    box = gym.spaces.Box(np.array([low, -1.0]), np.array([high, 1.0]), dtype=np.float64)
    monkeypatch.setitem(episodes_toy.BOXES, "odd", box)
    with pytest.raises(SystemExit) as end:
        train(ppo_cma, tmp_path / "run", actions="odd")
    assert end.value.code == 2
    err = capfd.readouterr().err
    assert "a finite Box of actions is wanted, its sides from 1e-6 to 1e6" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    spaces = SimpleNamespace(observation_space=gym.spaces.Box(-1, 1, (3,)), action_space=box)
    with pytest.raises(ValueError, match="PPO-CMA needs finite bounds"):
        ppo_cma.Agent(spaces)


@pytest.mark.parametrize("side", [2e-6, 1e-3, 9e5])
def test_boxes_at_the_limits_are_learned_in(side, monkeypatch, tmp_path):
    monkeypatch.setitem(episodes_toy.BOXES, "odd", gym.spaces.Box(0, side, (2,), np.float32))
    final = train(ppo_cma, tmp_path / "run", "--total-timesteps 1500", actions="odd")
    assert all(x.isfinite().all() for x in final["agent"].values())
    returns = [float(row[1]) for row in rows(tmp_path / "run")[1:]]
    assert max(returns) > 0


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}

    def get(script) -> Path:
        if script not in made:
            made[script] = tmp_path_factory.mktemp(script.__name__) / "run"
            train(script, made[script])
        return made[script]

    return get


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
