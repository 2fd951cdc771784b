"""docs/deploy.md: its snippets export every script's policy; what is exported acts alike."""

import functools
import re
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch
from program import ROOT
from torch.onnx._internal.exporter._registration import ONNXRegistry

import ppo
import ppo_atari_multigpu
import ppo_cma
import ppo_continuous_action
import ppo_continuous_action_warp
import ppo_kl_adaptive
import ppo_lstm
import ppo_pettingzoo
import ppo_pixels

PAGE = (ROOT / "docs" / "deploy.md").read_text()
EXPORT, *SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(LOOP,) = (x for x in SNIPPETS if "while not over" in x)
(MEMORY,) = (x for x in SNIPPETS if "memory = np.zeros" in x)
(NUMPY,) = (x for x in SNIPPETS if "np.savez" in x)
(TORCHSCRIPT,) = (x for x in SNIPPETS if "torch.jit.load" in x)
ROWS = 32
SLOW = pytest.mark.slow  # an export takes 3 s
VECTOR, BOX = gym.spaces.Box(-np.inf, np.inf, (5,)), gym.spaces.Box(-1.0, np.float32([2, 3]))
CHOICES = gym.spaces.Discrete(4)
IMAGE = gym.spaces.Box(0, 255, (20, 24, 3), np.uint8)

pytestmark = pytest.mark.filterwarnings("ignore")  # of TorchScript, and within the exporter
operations = functools.cache(ONNXRegistry.from_torchlib)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with the page's export.py, imported from there. The exporter reads its list of
    operations once, not for each export, which is half of its time."""
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(operations))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "export.py").write_text(EXPORT)
    yield tmp_path
    sys.modules.pop("export", None)


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def spaces(observations, actions):
    return SimpleNamespace(observation_space=observations, action_space=actions)


def shaken(agent, loud: float = 30.0):
    """The agent with other weights, and with normalisers that matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in agent.named_parameters():
            if x.ndim > 1:  # the heads begin with small ones
                x *= loud if "actor" in name else 1.5
            else:
                x += 0.1 * torch.randn(x.shape, generator=generator)
        for name, x in agent.named_buffers():
            if re.search(r"moments(\.[^.]+)?\.mean$", name):
                x += torch.randn(x.shape, generator=generator)
            elif name.endswith("var") or name == "obs_scale":
                x *= 0.5 + torch.rand(x.shape, generator=generator)
    return agent


def export(script, agent, monkeypatch) -> dict:
    """Run the page's snippet of this script, or of its group, on this agent; its names."""
    monkeypatch.setattr(script, "load", lambda folder: (agent, getattr(agent, "args", None)))
    found = [x for x in SNIPPETS if f"from {script.__name__} import" in x]
    if not found:
        section = rf"### [^\n]*`{script.__name__}\.py`.*?```python\n(.*?)```"
        (text,) = re.findall(section, PAGE, re.S)
        found = [re.sub(r"from ppo\w+ import", f"from {script.__name__} import", text)]
    (snippet,) = found
    exec(snippet, names := {})
    return names


def alike(a, b):
    """The same results of two programs, whose sums may have another order. Of choices one may be so
    near to another that they round to either side."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    if a.dtype.kind in "iu":
        assert np.count_nonzero(a != b) <= 1
    else:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def undecided(head: torch.nn.Linear, scores: torch.Tensor):
    """Change a head so that each choice is the likeliest somewhere, by its scores [rows, C]."""
    head.bias.data -= scores.detach().mean(dim=0)


def run(name: str, **inputs) -> list[np.ndarray]:
    """Outputs of name.onnx, which name.pt and single rows must equal."""
    session = onnxruntime.InferenceSession(f"{name}.onnx")
    assert [x.name for x in session.get_inputs()] == list(inputs)
    outputs = session.run(None, inputs)
    given = [torch.as_tensor(x) for x in inputs.values()]
    scripted = torch.jit.load(f"{name}.pt")(*given)
    scripted = scripted if isinstance(scripted, tuple) else (scripted,)
    for a, b in zip(outputs, scripted, strict=True):
        alike(a, b.numpy())
    first = {key: x[:1] for key, x in inputs.items()}
    alike(session.run(None, first)[0], outputs[0][:1])
    return outputs


CLIPPED, TIMED = ppo_continuous_action, ppo_kl_adaptive
WARP = ppo_continuous_action_warp
VECTORS = {  # the script, its actions, how loud its actor, its network
    "box": (CLIPPED, BOX, 8.0, "actor_mean"), "warp": (WARP, BOX, 8.0, "actor_mean"),
    "choices": (ppo, CHOICES, 30.0, "actor"), "cma": (ppo_cma, BOX, 30.0, "mean_net"),
    "time": (TIMED, BOX, 2.0, "actor"), "time, choices": (TIMED, CHOICES, 2.0, "actor"),
}  # fmt: skip
RARE = ("warp", "time, choices")


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[SLOW] * RARE.count(x)) for x in VECTORS])
def test_vectors(kind, monkeypatch, rng):
    script, actions, loud, network = VECTORS[kind]
    agent = shaken(script.Agent(spaces(VECTOR, actions)), loud)
    if script is ppo_cma:
        agent.updates += 1  # before the first update, it acts by the initial Gaussian
    export(script, agent, monkeypatch)
    inputs = {"obs": rng.standard_normal((ROWS, 5)).astype(np.float32)}
    if script is TIMED:
        inputs["time"] = np.arange(ROWS, dtype=np.float32) * 20
    expected = agent.act(**inputs)
    assert np.ptp(expected, axis=0).min() > (0.1 if network == "actor_mean" else 0.5)
    (actions,) = run("policy", **inputs)
    alike(actions, expected)
    if script is TIMED:
        assert not np.array_equal(expected, agent.act(inputs["obs"]))


def test_pixels_as_bytes(monkeypatch, rng):
    agent = shaken(ppo_atari_multigpu.Agent(spaces(None, CHOICES)))
    obs = rng.integers(0, 256, (ROWS, 4, 84, 84))
    obs = np.uint8(obs * np.linspace(0, 1, ROWS).reshape(-1, 1, 1, 1))  # from dark to bright
    undecided(agent.actor, agent.policy(torch.tensor(obs))[0])
    agent.args.bf16 = True  # which the snippet undoes
    export(ppo_atari_multigpu, agent, monkeypatch)
    expected = agent.act(obs)
    assert len(set(expected)) > 1
    (actions,) = run("policy", obs=obs)
    alike(actions, expected)


def test_images_and_more(monkeypatch, rng):
    observations = gym.spaces.Dict({"camera": IMAGE, "joints": VECTOR})
    does = gym.spaces.Tuple([BOX, CHOICES])
    agent = shaken(ppo_pixels.Agent(spaces(observations, does), ppo_pixels.Args()))
    batch = gym.vector.utils.batch_space(observations, ROWS)
    batch.seed(1)
    raw = batch.sample()
    parts = agent.codec.read(raw)
    undecided(agent.actor, agent.actor(agent.features(parts.to("cpu"))[0]))
    names = export(ppo_pixels, agent, monkeypatch)
    assert list(names["parts"]) == list(parts)
    (rows,) = run("policy", **parts)
    numbers, chosen = agent.act(raw)
    assert rows.shape[1] == 1 + 2 and len(set(chosen)) > 1
    alike(rows[:, 0].astype(int), chosen)
    alike(np.clip(rows[:, 1:], BOX.low, BOX.high), numbers)


@pytest.mark.parametrize("flags", [{}, {"memory": "gru", "previous_action": True}], ids=str)
def test_a_memory_for_any_observation(flags, monkeypatch, rng):
    space = gym.spaces.Dict({"camera": IMAGE, "joints": VECTOR})
    agent = shaken(ppo_lstm.Agent(spaces(space, BOX), ppo_lstm.Args(**flags)))
    names = export(ppo_lstm, agent, monkeypatch)
    assert list(names["parts"]) == ["obs/camera", "obs/joints"]
    theirs = agent.initial_state(ROWS)
    memory = theirs.numpy().copy()
    for _ in range(3):
        images = rng.integers(0, 256, (ROWS, *IMAGE.shape)).astype(np.uint8)
        joints = rng.standard_normal((ROWS, 5)).astype(np.float32)
        parts = {"obs/camera": images, "obs/joints": joints}
        actions, memory = run("policy", memory=memory, **parts)
        expected = agent.act({"camera": images, "joints": joints}, state=theirs)
        alike(np.clip(actions, BOX.low, BOX.high), expected)
        alike(memory, theirs.numpy())
    assert np.abs(memory).max() > 0.05
    assert np.ptp(expected, axis=0).min() > 0.03


def test_the_loop_with_a_memory(monkeypatch):
    frame = gym.spaces.Box(0, 255, (84, 84, 1), np.uint8)
    agent = shaken(ppo_lstm.Agent(spaces(frame, CHOICES), ppo_lstm.Args()))
    export(ppo_lstm, agent, monkeypatch)
    exec(MEMORY, names := {})
    assert np.abs(names["memory"]).max() > 0.01


def test_several_agents(monkeypatch, rng):
    args = ppo_pettingzoo.Args(env_id="agents_toy:Watch")
    envs = ppo_pettingzoo.Envs(args, range(1), [])
    agent = shaken(ppo_pettingzoo.Agent(envs, args))
    export(ppo_pettingzoo, agent, monkeypatch)
    for name, size in (("scout", 3), ("guard_1", 1)):
        obs = rng.uniform(-1, 1, (ROWS, size)).astype(np.float32)
        (rows,) = run(name, obs=obs)
        expected = [agent.act({name: x})[name] for x in obs]
        alike(rows[:, 0], expected)
        assert len(set(expected)) > 1 or name != "scout"


def test_the_loops_of_a_trained_policy(place, monkeypatch):
    """The first snippet on a run's folder, the loop without this project, TorchScript's."""
    flags = "--num-steps 64 --total-timesteps 128 --update-epochs 1 --run-dir runs/RUN"
    ppo_continuous_action.train(ppo_continuous_action.parse_args(flags.split()))
    for snippet in SNIPPETS:
        if "from ppo_continuous_action import" in snippet:
            exec(snippet, {})
    agent, _ = ppo_continuous_action.load("runs/RUN")
    assert agent.obs_moments.count > 100
    exec(NUMPY, plain := {})
    obs = np.linspace(-30, 30, ROWS * 17).reshape(ROWS, 17).astype(np.float32)
    alike(plain["act"](obs), agent.act(obs))
    loop, seen = LOOP.replace('"HalfCheetah-v4"', '"HalfCheetah-v4", max_episode_steps=50'), []
    monkeypatch.setattr(np, "clip", lambda x, *bounds: seen.append(x) or x)
    exec(loop, names := {})
    assert len(seen) == 50 and names["truncated"]
    exec(TORCHSCRIPT, names := {})
    alike(names["actions"].numpy(), agent.act(np.zeros((1, 17))))
