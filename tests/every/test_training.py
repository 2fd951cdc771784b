"""Training as a process: the same bits again, killed and resumed, stopped by signals, in threads,
with what is edited, without a compiler, for long. Kills are of copies of this process."""

import importlib
import itertools
import json
import math
import os
import random
import re
import signal
import threading
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch._dynamo  # so does an optimizer of torch's: once here, not in each copy
from program import (
    Clockwork,
    Levels,
    Toy,
    assert_same,
    in_a_fork,
    rows,
    scalars,
    status,
    train_until_killed,
)
from scripts import (
    EVERY,
    LENGTHS,
    NAMED,
    PARALLEL,
    POOLS,
    SMALL,
    STEPS,
    WHOLE,
    Duel,
    lengths,
    quick_workers,
    train,
)
from torch import nn
from tqdm import tqdm

import ppo_cma

pytestmark = [
    pytest.mark.usefixtures("small"),
    pytest.mark.filterwarnings("ignore"),  # of what is not finite
]
WARP, TWO, MULTI = "ppo_continuous_action_warp", "ppo_pettingzoo_ma_atari", "ppo_atari_multigpu"
FLAT = ["ppo", "ppo_continuous_action", MULTI, WARP]  # Adam in one vector
NUMPY = ["ppo", "ppo_continuous_action", *WHOLE]  # which act without torch
COMPILED = [script for script in SMALL if hasattr(importlib.import_module(script).Args, "compile")]


def new(script: str, folder: Path, iterations: int = 6, flags: str = "") -> list[str]:
    total = iterations * STEPS[script]
    return f"{SMALL[script]} --run-dir {folder} --total-timesteps {total} {flags}".split()


def again(script: str, folder: Path, named: str = "") -> list[str]:
    return f"--resume {folder} {named or NAMED.get(script, '')}".split()


def start(script: str, argv: list[str]):
    module = importlib.import_module(script)
    module.train(module.parse_args(argv))


def load(script: str, folder: Path) -> dict:
    return importlib.import_module(script).load_checkpoint(folder)


def assert_same_run(script: str, folder: Path, other: Path, **changed):
    """Checkpoint, episodes and TensorBoard, to the bit; not what measures time."""
    one, two = load(script, folder), load(script, other)
    assert_same(*({**run, "args": vars(run["args"]) | changed} for run in (one, two)))
    assert rows(folder) == rows(other)
    points = scalars(folder)
    assert points == scalars(other)
    for tag in points:
        if not tag.startswith("charts/episodic_"):
            assert len({step for step, _ in points[tag]}) == len(points[tag]), tag
    assert status(folder) == status(other) == "finished"
    assert not list(folder.glob("*.tmp"))


def undisturbed(script: str, argv: list[str], resumed: list[int]) -> Path:
    """A run that was never killed; one of EnvPool's was stopped where the other was resumed."""
    folder = Path(argv[argv.index("--run-dir") + 1])
    done = 0
    for stop in sorted({*resumed} - {0}) if script in POOLS else []:
        assert train_until_killed(script, "rollout", stop - done, argv, signal.SIGTERM) == 143
        argv = again(script, folder)
        done = stop
    start(script, argv)
    return folder


@EVERY
def test_the_same_command_gives_the_same_bits(script, tmp_path):
    first = train(script, tmp_path / "first")
    train(script, tmp_path / "again")
    assert_same_run(script, tmp_path / "first", tmp_path / "again")
    other = train(script, tmp_path / "other", "--seed 2")["agent"]
    weights = [
        name for name, x in first["agent"].items() if name.endswith("weight") and x.dim() > 1
    ]
    for name in weights or ["critic.from_input"]:
        assert not torch.isclose(other[name], first["agent"][name]).all(), name


# --- kills and signals ----------------------------------------------------------------------------

# Functions, and in which of its calls; a checkpoint is saved at the start and every 2 iterations
MOMENTS = {"torch.save": 2, "an episode": 2, "rollout": 4, "Path.replace": 2, "the clock": 0}


def logging(script: str) -> str:
    """The method that logs what has ended: an iteration's or a step's."""
    by_step = hasattr(importlib.import_module(script).Run, "log_episodes")
    return "Run.log_episodes" if by_step else "Run.log"


def train_until_a_moment(script: str, seconds: float, argv: list[str]) -> int:
    def killed_later():
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM, which nobody handles
        start(script, argv)

    return in_a_fork(killed_later)


def train_and_kill(script: str, folder: Path, k: int, seconds: float, argv: list[str]):
    """Until the k-th of the moments, over and over."""
    moment, call = list(MOMENTS.items())[k % len(MOMENTS)]
    if moment == "the clock":
        code = train_until_a_moment(script, seconds, argv)
    else:
        target = logging(script) if moment == "an episode" else moment
        code = train_until_killed(script, target, call, argv)
    assert code in (-signal.SIGKILL, -signal.SIGALRM, 0), moment
    if moment == "torch.save" and code:
        assert (folder / "checkpoint.pt.tmp").stat().st_size > 1000


@EVERY
@pytest.mark.parametrize(
    ("kills", "iterations"),
    [(5, 8), pytest.param(30, 40, marks=pytest.mark.slow)],
    ids=["5 kills", "30 kills"],
)
def test_killed_again_and_again(script, kills, iterations, tmp_path):
    rng, folder, resumed = random.Random(1), tmp_path / "run", []
    argv = new(script, folder, iterations)
    for k in range(kills):
        train_and_kill(script, folder, k, rng.uniform(0, 0.3), argv)
        argv = again(script, folder)
        resumed.append(load(script, folder)["counters"][1])
    assert resumed[:4] == [0, 0, 2, 2]
    if status(folder) != "finished":  # before the clock struck
        start(script, argv)
    whole = undisturbed(script, new(script, tmp_path / "whole", iterations), resumed)
    assert_same_run(script, folder, whole)


@EVERY
def test_a_run_killed_after_its_last_step_ends_in_the_same_checkpoint(script, tmp_path):
    """Resumed, it has nothing to learn, and saves once more."""
    folder = tmp_path / "run"
    start(script, new(script, folder, 2))
    before = load(script, folder)
    start(script, again(script, folder))
    assert_same(load(script, folder), before)


@pytest.mark.slow
@pytest.mark.parametrize("script", PARALLEL)
def test_killed_again_and_again_with_any_number_of_workers(script, tmp_path, monkeypatch):
    quick_workers(monkeypatch)
    rng, folder, named = random.Random(1), tmp_path / "run", f"--env-id {LENGTHS}"
    flags = lengths(script, "--num-envs 3", nested=script != "ppo_pettingzoo")
    start(script, new(script, tmp_path / "whole", 30, flags))
    argv = new(script, folder, 30, flags)
    for k in range(20):
        train_and_kill(script, folder, k, rng.uniform(0, 0.3), [*argv, "--env-workers", str(k % 4)])
        argv = again(script, folder, named)
    start(script, [*argv, "--env-workers", "2"])
    assert_same_run(script, folder, tmp_path / "whole", env_workers=0)
    assert len(rows(folder)) > 100


def test_a_copy_killed_as_it_writes_leaves_this_process_free_to_write():
    def writes():
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    tqdm.write("tqdm has made its lock")
    assert in_a_fork(writes) == -signal.SIGKILL
    assert all([lock.acquire(timeout=5) for lock in tqdm.get_lock().locks])
    tqdm.get_lock().release()


@EVERY
def test_a_signal_ends_the_iteration_and_saves(script, tmp_path, capfd):
    folder, often = tmp_path / "run", "--checkpoint-interval 100"
    argv = new(script, folder, 5, often)
    for k, number in enumerate([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], 1):
        assert train_until_killed(script, "rollout", 1, argv, number) == 128 + number
        captured = capfd.readouterr()
        assert re.search(rf"\ngo on with: python \S+ --resume {folder}( --env-id \S+)?\n$",
                         captured.out)  # fmt: skip
        assert captured.err.count("\nstopping after this iteration\n") == 1
        assert "Traceback" not in captured.err
        assert load(script, folder)["counters"][1] == k
        assert status(folder) == "running"
        argv = again(script, folder)
    start(script, argv)
    whole = undisturbed(script, new(script, tmp_path / "whole", 5, often), [1, 2, 3])
    assert_same_run(script, folder, whole)


@EVERY
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_acts_at_once(script, number, tmp_path):
    argv = new(script, tmp_path / "run")
    assert train_until_killed(script, "rollout", 4, argv, number, number) == -number
    assert load(script, tmp_path / "run")["counters"][1] == 2
    assert status(tmp_path / "run") == "running"


@EVERY
def test_a_thread_may_train(script, tmp_path):
    """As in servers of notebooks and in tuners; two at once."""
    errors = []

    def trained(k: int):
        try:
            train(script, tmp_path / str(k), f"--seed {k}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=trained, args=(k,)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert [status(tmp_path / str(k)) for k in (1, 2)] == ["finished", "finished"]


# --- what is not finite ---------------------------------------------------------------------------


def assert_failed(script: str, folder: Path, iteration: int):
    assert status(folder) == "failed"
    checkpoint = load(script, folder)
    assert checkpoint["counters"][1] == iteration
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


@pytest.mark.parametrize("value", [math.nan, 1e30])  # whose square is infinite
@EVERY
def test_nothing_is_saved_once_learning_is_not_finite(script, value, tmp_path, monkeypatch):
    if script == "ppo_cma" and value == 1e30:
        pytest.skip("it has no squares")
    module, calls = importlib.import_module(script), []
    gae, update = module.gae, module.update

    def spoilt(*given, **more):
        advantages = gae(*given, **more)
        if len(calls) > 3:
            advantages[:1] = value
        return advantages

    monkeypatch.setattr(
        module, "update", lambda *given, **m: calls.append(1) or update(*given, **m)
    )
    monkeypatch.setattr(module, "gae", spoilt)
    with pytest.raises(FloatingPointError, match=r"iteration 3: losses/\w+ is not finite"):
        train(script, tmp_path / "run", iterations=5)
    assert_failed(script, tmp_path / "run", 2)


@EVERY
def test_nothing_is_saved_once_a_parameter_is_not_finite(script, tmp_path, monkeypatch):
    module, calls = importlib.import_module(script), []
    plain = module.update

    def update(agent, *given, **more):
        metrics = plain(agent, *given, **more)
        calls.append(1)
        with torch.no_grad():
            list(agent.parameters())[-1].view(-1)[-1] = math.inf if len(calls) > 3 else 0.0
        return metrics

    monkeypatch.setattr(module, "update", update)
    with pytest.raises(FloatingPointError, match=r"iteration 3: [\w.]+ is not finite"):
        train(script, tmp_path / "run", iterations=5)
    assert_failed(script, tmp_path / "run", 2)


# --- hardly anything to learn from ----------------------------------------------------------------


def episodes_of_one_step(monkeypatch):
    """In all environments but gymnasium's, which have a flag for it."""
    toy, pendulum = Toy.__init__, importlib.import_module(WARP).Pendulum

    def one_step(self, *given, **more):
        toy(self, *given, **more)
        self.life[:] = 1

    monkeypatch.setattr(Toy, "__init__", one_step)
    monkeypatch.setattr(Levels, "lengths", (1, 1, 1))
    monkeypatch.setattr(Duel, "death", 1)
    monkeypatch.setattr(Duel, "end", 1)
    monkeypatch.setattr(pendulum, "limit", property(lambda self: 1, lambda self, _: None),
                        raising=False)  # fmt: skip


FEW = {
    "minibatches of two rows": "--num-steps 4 --num-minibatches {}",
    "one row an iteration": "--num-steps 1 --num-minibatches 1",
    "episodes of one step": "--num-steps 1 --num-minibatches 1",
}


@EVERY
@pytest.mark.parametrize("kind", FEW)
def test_hardly_anything_to_learn_from_is_no_nan(script, kind, tmp_path, monkeypatch):
    """Ends together leave iterations without one row to learn from."""
    envs = 2 if "num-envs 2" in SMALL[script] else 4
    recurrent = script in ("ppo_lstm", "ppo_atari_lstm")  # minibatches are whole environments
    flags = FEW[kind].format(envs if recurrent else 2 * envs)
    if script == "ppo_atari_multigpu":  # minibatches are so many steps of all environments
        flags = flags.replace("--num-minibatches 8", "--num-minibatches 4 --num-envs 2")
    if script in WHOLE:
        rows_ = "--iter-steps 2 --minibatch-size 2" if script == "ppo_cma" else "-b 2"
        flags = rows_ if kind != "one row an iteration" else f"{rows_} --num-envs 1"
    if kind == "episodes of one step":
        episodes_of_one_step(monkeypatch)
        if script in PARALLEL and script != "ppo_pettingzoo":
            flags += ' --env-kwargs {"max_episode_steps":1}'
        if script == "ppo_pettingzoo":
            flags += " --max-episode-steps 1"
    checkpoint = train(script, tmp_path / "run", f"{flags} --total-timesteps 64")
    assert status(tmp_path / "run") == "finished"
    assert checkpoint["counters"][1] >= 4
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())
    if kind == "episodes of one step":
        lives = 2 if script in ("ppo_atari_multigpu", "ppo_atari_lstm") else 1
        assert {row[2] for row in rows(tmp_path / "run")[1:]} == {str(lives)}


def test_cleanrls_own_test_command(tmp_path):
    script = importlib.import_module("ppo_continuous_action")
    flags = "--env-id Hopper-v4 --num-envs 1 --num-steps 64 --total-timesteps 128 --no-cuda"
    script.train(script.parse_args([*flags.split(), "--run-dir", str(tmp_path / "run")]))
    assert script.load_checkpoint(tmp_path / "run")["counters"][1] == 2
    assert script.load(tmp_path / "run")[0].actor_logstd.isfinite().all()


# --- parameters -----------------------------------------------------------------------------------


def edit_agent(monkeypatch, script: str, edit):
    """What someone may write at the end of Agent.__init__."""
    module = importlib.import_module(script)
    plain = module.Agent.__init__

    def init(agent, *given, **more):
        plain(agent, *given, **more)
        edit(agent)

    monkeypatch.setattr(module.Agent, "__init__", init)


@EVERY
@pytest.mark.parametrize("part", ["the critic", "all of it but one"])
def test_frozen_parameters_stay(script, part, tmp_path, monkeypatch):
    if script in WHOLE and part == "the critic":
        pytest.skip("its loss would have nothing to descend")
    before, frozen = {}, []

    def freeze(agent):
        names = [name for name, _ in agent.named_parameters() if name.startswith("critic.")]
        frozen[:] = names if part == "the critic" else names[1:]
        for name, p in agent.named_parameters():
            p.requires_grad_(name not in frozen)
            before.setdefault(name, p.detach().clone())

    edit_agent(monkeypatch, script, freeze)
    monkeypatch.setattr(ppo_cma.MLP, "center", lambda net, x: None)
    after = train(script, tmp_path / "run", iterations=3)["agent"]
    assert frozen
    assert [name for name, x in before.items() if torch.equal(after[name], x)] == frozen


@pytest.mark.parametrize("script", WHOLE)
def test_a_parameter_that_no_optimizer_has_is_named(script, tmp_path, monkeypatch):
    edit_agent(
        monkeypatch, script, lambda agent: setattr(agent, "extra", nn.Parameter(torch.ones(3)))
    )
    with pytest.raises(RuntimeError, match="extra is in no optimizer"):
        train(script, tmp_path / "run")


@pytest.mark.parametrize("script", FLAT)
@pytest.mark.parametrize("edit", ["frozen", "thawed", "replaced", "a new one"])
def test_parameters_that_leave_the_vector_are_named(script, edit, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    plain = module.flat_adam

    def flat_adam(agent):
        name, first = next((name, p) for name, p in agent.critic.named_parameters())
        first.requires_grad_(edit != "thawed")
        adam = plain(agent)
        first.requires_grad_(edit != "frozen")
        if edit == "replaced":
            first.data = first.data.clone()
        if edit == "a new one":
            path, _, last = name.rpartition(".")
            setattr(agent.critic.get_submodule(path), last, nn.Parameter(first.detach().clone()))
        return adam

    monkeypatch.setattr(module, "flat_adam", flat_adam)
    with pytest.raises(RuntimeError, match=r"critic\S* was frozen, unfrozen or replaced"):
        train(script, tmp_path / "run")


@pytest.mark.parametrize("script", [name for name in FLAT if name != MULTI])
def test_a_hook_that_would_not_be_called_is_named(script, tmp_path, monkeypatch):
    def half(agent):
        agent.critic[0].weight.register_hook(lambda grad: 0.5 * grad)

    edit_agent(monkeypatch, script, half)
    with pytest.raises(RuntimeError, match=r"critic.0.weight has a hook on its gradient"):
        train(script, tmp_path / "run")


@pytest.mark.parametrize("script", FLAT)
def test_a_layer_of_two_networks_learns_from_both(script, tmp_path, monkeypatch):
    """One module in two places, and one parameter in two modules."""
    if script == MULTI:  # whose networks share a trunk
        pytest.skip("gradients are of parameters, wherever they are used")

    def share(how: str):
        def edit(agent):
            actor = getattr(agent, "actor", None) or agent.actor_mean
            if how == "module":
                agent.critic[0] = actor[0]
            else:
                agent.critic[0].weight = actor[0].weight

        return edit

    sizes = {}
    for how in ("module", "parameter"):
        with monkeypatch.context() as patch:
            edit_agent(patch, script, share(how))
            final = train(script, tmp_path / how, iterations=3)
        weights = [x for name, x in final["agent"].items() if name.endswith(".0.weight")]
        assert len(weights) == 2 and torch.equal(*weights)
        sizes[how] = final["adam"]["parameters"].numel()
    assert sizes["module"] < sizes["parameter"]


# --- one policy -----------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.a(x) * self.b(x).sigmoid()


def layers(*between, bias=True):
    """A maker of networks with these layers, of 16 units, behind linear ones."""

    def make(inputs: int, outputs: int) -> nn.Sequential:
        made = []
        for layer in between:
            made += [nn.Linear(inputs, 16), layer()]
            inputs = 16
        return nn.Sequential(*made, nn.Linear(inputs, outputs, bias=bias))

    return make


NETWORKS = {
    "tanh": layers(nn.Tanh, nn.Tanh, nn.Tanh),
    "relu": layers(nn.ReLU, nn.ReLU),
    "elu, silu": layers(nn.ELU, nn.SiLU),
    "gelu, leaky": layers(nn.GELU, nn.LeakyReLU),
    "layer norm": layers(partial(nn.LayerNorm, 16), nn.Tanh),
    "no bias": layers(nn.Tanh, bias=False),
    "tanh behind": lambda inputs, outputs: nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()),
    "a module": Own,
    "nested": lambda inputs, outputs: nn.Sequential(layers(nn.ReLU)(inputs, 8), Own(8, outputs)),
    "a linear layer": nn.Linear,
    "spectral norm": lambda inputs, outputs: nn.Sequential(
        nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(inputs, outputs)).eval()
    ),
}
WIDE = gym.spaces.Box(np.float32([1, -3]), np.float32([2, 7]))  # neither centred nor of unit size
gym.register("ClockWide-v0", Clockwork, kwargs={"action_space": WIDE})
SEVERAL = gym.spaces.MultiDiscrete([3, 4])
gym.register("ClockSeveral-v0", Clockwork, kwargs={"action_space": SEVERAL})


@pytest.mark.parametrize("script", NUMPY)
@pytest.mark.parametrize("network", NETWORKS)
def test_whatever_the_network_what_acts_is_what_learns(script, network, tmp_path, monkeypatch):
    """The run itself compares them, as the next test shows."""
    module, make = importlib.import_module(script), NETWORKS[network]

    class Network(nn.Module):
        def __init__(self, inputs, outputs, generator):
            super().__init__()
            self.layers = make(inputs, outputs)

        def forward(self, x):
            return self.layers(x)

        def center(self, x):
            pass

    if script == "ppo_cma":
        monkeypatch.setattr(module, "MLP", Network)
    elif script == "ppo_kl_adaptive":
        monkeypatch.setattr(module, "mlp", lambda inputs, _, third, outputs: make(inputs, outputs))
    else:
        monkeypatch.setattr(module, "mlp", lambda inputs, outputs, gain: make(inputs, outputs))
    env_id = "ClockSeveral-v0" if script == "ppo" else "ClockWide-v0"
    final = train(script, tmp_path / "run", f"--env-id {env_id}", iterations=3)
    assert final["counters"][1] == 3
    agent, _ = module.load(tmp_path / "run")
    obs = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    with torch.no_grad():
        given = torch.as_tensor(obs)
        if script == "ppo":
            np.testing.assert_allclose(agent.numpy_scores()(obs), agent.actor(given), atol=1e-5)
        elif script == "ppo_continuous_action":
            mean = agent.origin + agent.unit * agent.actor_mean(agent.normalize(given))
            np.testing.assert_allclose(agent.act(obs), mean, atol=1e-5)
        elif script == "ppo_cma":
            np.testing.assert_allclose(agent.act(obs), agent.mean(given), atol=1e-4)


def changed(change):
    """What makes of a function one with other results."""
    return lambda plain: lambda *given, **more: change(plain(*given, **more))


twice = changed(lambda x: 2.0 * x)
EDITED = {  # one definition of the policy alone
    ("ppo", "as_numpy"): changed(twice),
    ("ppo", "nn.Sequential.forward"): twice,
    ("ppo_continuous_action", "as_numpy"): changed(twice),
    ("ppo_continuous_action", "nn.Sequential.forward"): twice,
    ("ppo_continuous_action", "Agent.normalize"): twice,
    ("ppo_cma", "MLP.forward"): changed(lambda x: x + 0.5),
    ("ppo_cma", "Agent.mean"): changed(lambda x: 0.5 * x + 0.2),
    ("ppo_cma", "Agent.logvar"): changed(lambda x: x - 1.0),
    ("ppo_kl_adaptive", "as_numpy"): changed(changed(lambda x: x + 0.1)),
    ("ppo_kl_adaptive", "Agent.policy"): changed(lambda x: x._replace(logvar=x.logvar + 0.5)),
    ("ppo_kl_adaptive", "nn.Sequential.forward"): changed(lambda x: x + 0.1),
}


@pytest.mark.parametrize(("script", "name"), EDITED)
def test_two_policies_are_an_error(script, name, tmp_path, monkeypatch):
    owner = importlib.import_module(script)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, last, EDITED[script, name](getattr(owner, last)))
    if script in FLAT:  # whose policies begin with all actions nearly alike

        def spread(agent):
            net = agent.actor if script == "ppo" else agent.actor_mean
            with torch.no_grad():
                net[-1].weight.normal_()

        edit_agent(monkeypatch, script, spread)
    with pytest.raises(RuntimeError, match="acts by another policy than"):
        train(script, tmp_path / "run")


# --- compilers, long runs -------------------------------------------------------------------------


@pytest.mark.parametrize("script", COMPILED)
def test_without_a_compiler_one_line_and_on(script, tmp_path, monkeypatch, capfd):
    def missing(*args, **kwargs):
        raise RuntimeError("no g++")

    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", missing)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    often = "--compile-from 0" if script in ("ppo", "ppo_continuous_action") else ""
    assert train(script, tmp_path / "run", f"--compile {often}")["counters"][1] == 2
    said = capfd.readouterr()
    told = re.findall(r"--compile: no working compiler.*going on eagerly", said.out)
    assert len(told) == 1
    assert "Traceback" not in said.err


def sample(script: str, folder: Path, iterations: int):
    """Train and write down, twenty times: iteration, resident bytes, open files, rows of
    episodes.csv, bytes of the event file."""
    samples, run = [], importlib.import_module(script).Run
    plain = run.log

    def log(run, *given):
        plain(run, *given)
        if run.iteration % (iterations // 20) == 0:
            run.writer.flush()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(list(Path("/proc/self/fd").iterdir()))
            (events,) = run.folder.glob("events.*")
            rows = len((run.folder / "episodes.csv").read_text().splitlines()) - 1
            size = pages * os.sysconf("SC_PAGE_SIZE")
            samples.append([run.iteration, size, files, rows, events.stat().st_size])

    run.log = log
    train(script, folder / "run", "--checkpoint-interval 20", iterations)
    (folder / "samples.json").write_text(json.dumps(samples))


# Measured: -0.3 to 0.2 MB per 1,000 iterations; in the first 300 a few pages more. The screens of
# Toy come and go by 10 MB; an iteration's are 1 MB, so that 1,000 that stay would be 900 MB.
PIXELS = [*POOLS, TWO]
LONG = [
    ("ppo", 300, 10),
    *(
        pytest.param(script, 2000, 1, marks=pytest.mark.slow)
        for script in SMALL
        if script not in PIXELS
    ),
    *(pytest.param(script, 200, 200, marks=pytest.mark.slow) for script in PIXELS),
]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize(("script", "iterations", "bound"), LONG)
def test_a_long_run_does_not_grow(script, iterations, bound, tmp_path):
    """`bound`: MB per 1,000 iterations, of the median slope between two samples after the first
    quarter."""
    assert in_a_fork(sample, script, tmp_path, iterations) == 0
    samples = np.array(json.loads((tmp_path / "samples.json").read_text()))
    at, memory, files, _, events = samples[5:].T
    pairs = itertools.combinations(range(len(at)), 2)
    slope = np.median([(memory[j] - memory[i]) / (at[j] - at[i]) for i, j in pairs])
    assert slope * 1000 < bound * 1e6
    assert set(files) == {files[0]}
    growth = np.diff(events)
    assert growth.max() < 1.05 * growth.min()
    points = {tag: len(found) for tag, found in scalars(tmp_path / "run", timed=True).items()}
    assert len(points) <= 20
    episodes = {number for tag, number in points.items() if "charts/episodic_" in tag}
    if script in PARALLEL and script != "ppo_pettingzoo":  # what one step ended is one point
        ends = {step for step, *_ in rows(tmp_path / "run")[1:]}
        assert episodes == {len(ends)}
    metrics = {number for tag, number in points.items() if tag.startswith("losses/")}
    assert metrics | {points["charts/SPS"]} == {iterations}
