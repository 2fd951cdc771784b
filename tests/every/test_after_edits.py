"""ppo.py and ppo_continuous_action.py after someone changed a line: what is changed is followed, or
ends in an error that names it."""

import dataclasses
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import ppo
import ppo_continuous_action

SCRIPTS = {"ppo": ppo, "ppo_continuous_action": ppo_continuous_action}
EACH = pytest.mark.parametrize("name", SCRIPTS)
ENV_ID = {"ppo": "CartPole-v1", "ppo_continuous_action": "Pendulum-v1"}


class Log:
    """What rollout needs of a Run."""

    global_step = 0

    def log_episodes(self, ended):
        pass


def set_up(name: str, **kwargs):
    """A script, its arguments, environments and an agent that can learn."""
    script = SCRIPTS[name]
    args = script.Args(
        **{"env_id": ENV_ID[name], "num_envs": 2, "num_steps": 64, "num_minibatches": 4} | kwargs
    )
    envs = script.make_envs(args, args.num_envs)
    torch.manual_seed(0)
    agent = script.Agent(envs, args)
    agent.adam = script.flat_adam(agent)
    return script, args, envs, agent


# --- numbers of Args, compiled --------------------------------------------------------------------

# Every number of Args that a step uses, and another value
OTHER = {
    "clip_coef": 0.01, "ent_coef": 5.0, "vf_coef": 3.0, "max_grad_norm": 0.01, "norm_adv": False,
    "clip_vloss": None,  # the opposite
}  # fmt: skip


def batch_of(script, agent, rows: int = 64):
    rng = np.random.default_rng(3)
    discrete = script is ppo
    obs = rng.normal(size=(rows, agent.dim))
    actions = rng.integers(0, 2, (rows, 1)) if discrete else rng.normal(size=(rows, 1))
    fields = {"obs": obs, "actions": actions, "noise": np.zeros((rows, 1))}
    batch = {}
    for field in script.Batch._fields:
        x = torch.as_tensor(fields.get(field, rng.normal(size=rows)))
        batch[field] = x if field == "actions" and discrete else x.float()
    return script.Batch(**batch)


def one_step(step, agent, args, batch) -> tuple[np.ndarray, torch.Tensor]:
    """Metrics and how far the parameters moved; the agent is as it was."""
    kept = {name: x.detach().clone() for name, x in agent.adam.items()}
    rate = torch.tensor(1e-3)
    _, numbers = step(agent, agent.adam, batch, torch.arange(32), rate, args)
    numbers = numbers.clone().numpy()
    moved = agent.adam["parameters"].detach() - kept["parameters"]
    for name, x in agent.adam.items():
        x.data.copy_(kept[name])
    return numbers, moved


@pytest.mark.slow
@EACH
def test_compiled_steps_follow_every_number_of_args(name):
    """One after the other, and back; then a schedule of 20 values, each of its own."""
    script, args, envs, agent = set_up(name, compile_from=0)
    batch, step = batch_of(script, agent), script.compile_step(agent, args)
    assert step is not script.minibatch_step
    plain, _ = one_step(script.minibatch_step, agent, args, batch)
    for field, value in OTHER.items():
        value = not getattr(args, field) if value is None else value
        changed = dataclasses.replace(args, **{field: value})
        expected, moved = one_step(script.minibatch_step, agent, changed, batch)
        one_step(step, agent, args, batch)
        found, moved_compiled = one_step(step, agent, changed, batch)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=field)
        torch.testing.assert_close(moved_compiled, moved, rtol=1e-3, atol=1e-6)
        if field != "max_grad_norm":  # whose effect is the size of the step, which Adam undoes
            assert not np.allclose(expected, plain, rtol=1e-4), field
    for k in range(20):
        args.clip_coef, args.ent_coef = 0.2 - 0.01 * k, 0.003 * k
        expected, _ = one_step(script.minibatch_step, agent, args, batch)
        found, _ = one_step(step, agent, args, batch)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


# --- one policy -----------------------------------------------------------------------------------


def layers(*activations, width=16, bias=True, last=True):
    def mlp(inputs: int, outputs: int, gain: float):
        made = []
        for activation in activations:
            made += [torch.nn.Linear(inputs, width), activation()]
            inputs = width
        if last:
            made.append(torch.nn.Linear(inputs, outputs, bias=bias))
        return torch.nn.Sequential(*made)

    return mlp


class Own(torch.nn.Module):
    def __init__(self, inputs, outputs, gain):
        super().__init__()
        self.a, self.b = torch.nn.Linear(inputs, outputs), torch.nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.a(x) * self.b(x).sigmoid()


NETWORKS = {
    "tanh": layers(torch.nn.Tanh, torch.nn.Tanh, torch.nn.Tanh),
    "relu": layers(torch.nn.ReLU, torch.nn.ReLU),
    "elu, silu": layers(torch.nn.ELU, torch.nn.SiLU),
    "gelu, leaky": layers(torch.nn.GELU, torch.nn.LeakyReLU),
    "no bias": layers(torch.nn.Tanh, bias=False),
    "tanh behind": lambda inputs, outputs, gain: torch.nn.Sequential(
        torch.nn.Linear(inputs, outputs), torch.nn.Tanh()
    ),
    "a module": Own,
    "nested": lambda inputs, outputs, gain: torch.nn.Sequential(
        layers(torch.nn.ReLU)(inputs, 8, gain), Own(8, outputs, gain)
    ),
    "a linear layer": lambda inputs, outputs, gain: torch.nn.Linear(inputs, outputs),
    "spectral norm": lambda inputs, outputs, gain: torch.nn.Sequential(
        torch.nn.Tanh(),
        torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(inputs, outputs)).eval(),
    ),
}


@EACH
@pytest.mark.parametrize("network", NETWORKS)
def test_whatever_the_network_what_acts_is_what_learns(name, network, monkeypatch):
    """Of a box that is neither centred nor of unit size."""
    script = SCRIPTS[name]
    monkeypatch.setattr(script, "mlp", NETWORKS[network])
    box = spaces.Box(np.float32([1, -3]), np.float32([2, 7]))
    env = type("Env", (), {"observation_space": spaces.Box(-1, 1, (3,))})
    env.action_space = box if script is ppo_continuous_action else spaces.MultiDiscrete([3, 4])
    torch.manual_seed(0)
    agent = script.Agent(env, script.Args())
    agent.adam = script.flat_adam(agent)
    obs = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    with torch.no_grad():
        if script is ppo:
            scores = agent.numpy_scores()(obs)
            np.testing.assert_allclose(scores, agent.actor(torch.tensor(obs)), atol=1e-5)
            script.check_actor(agent, obs, agent.numpy_actor()(obs, agent.noise(8)))
        else:
            mean = agent.actor_mean(agent.normalize(torch.tensor(obs)))
            np.testing.assert_allclose(agent.act(obs), agent.origin + agent.unit * mean, atol=1e-5)
            script.check_actor(agent, agent.numpy_actor(), obs, agent.noise(8))


def shifted(script, agent, monkeypatch):
    """Edits of one definition of the policy alone."""
    network = agent.actor if script is ppo else agent.actor_mean
    plain = network.forward
    yield "the torch side", lambda: monkeypatch.setattr(network, "forward", lambda x: 2 * plain(x))
    yield (
        "the numpy side",
        lambda: monkeypatch.setattr(
            script, "as_numpy", lambda n, *a, f=script.as_numpy: lambda x: 2.0 * f(n, *a)(x)
        ),
    )
    if script is ppo_continuous_action:
        yield (
            "the scale of observations",
            lambda: monkeypatch.setattr(script.Agent, "normalize", lambda self, obs: obs * 0.5),
        )


@EACH
@pytest.mark.parametrize("k", [0, 1, 2])
def test_two_policies_are_an_error(name, k, monkeypatch):
    script, args, envs, agent = set_up(name)
    with torch.no_grad():
        network = agent.actor if script is ppo else agent.actor_mean
        network[-1].weight.normal_()
    edits = list(shifted(script, agent, monkeypatch))
    if k >= len(edits):
        pytest.skip("of Gaussians")
    script.rollout(agent, envs, Log(), args)  # no error
    edits[k][1]()
    with pytest.raises(RuntimeError, match="acts by another policy than get_action_and_value"):
        script.rollout(agent, envs, Log(), args)


# --- parameters -----------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("part", ["critic", "critic.2", "critic.4.bias"])
def test_frozen_parameters_stay(name, part, monkeypatch):
    script = SCRIPTS[name]
    plain = script.Agent.__init__

    def frozen(self, *given):
        plain(self, *given)
        for key, p in self.named_parameters():
            p.requires_grad_(not key.startswith(part))

    monkeypatch.setattr(script.Agent, "__init__", frozen)
    script, args, envs, agent = set_up(name)
    before = {key: p.detach().clone() for key, p in agent.named_parameters()}
    for _ in range(2):
        script.update(agent, script.rollout(agent, envs, Log(), args), 1e-2, args)
    stayed = {key for key, p in agent.named_parameters() if torch.equal(p, before[key])}
    assert stayed == {key for key in before if key.startswith(part)}


@EACH
@pytest.mark.parametrize("edit", ["frozen", "replaced", "a new one", "thawed"])
def test_parameters_that_leave_the_vector_are_named(name, edit):
    script, args, envs, agent = set_up(name)
    if edit == "thawed":
        agent.critic[0].requires_grad_(False)
        agent.adam = script.flat_adam(agent)
    data = script.rollout(agent, envs, Log(), args)
    script.update(agent, data, 1e-3, args)  # no error
    if edit == "frozen":
        agent.critic[0].weight.requires_grad_(False)
    elif edit == "thawed":
        agent.critic[0].requires_grad_(True)
    elif edit == "replaced":
        agent.critic[0].weight.data = agent.critic[0].weight.data.clone()
    else:
        agent.critic[0].weight = torch.nn.Parameter(torch.zeros(64, agent.dim))
    with pytest.raises(RuntimeError, match=r"critic\.0\.weight was frozen, thawed or replaced"):
        script.update(agent, data, 1e-3, args)


def test_a_further_field_is_no_noise(monkeypatch):
    """The batch has names: at a learning rate of 0 the policy stays, whatever else it holds."""
    script, args, envs, agent = set_up("ppo_continuous_action", target_kl=None)
    fields = {**script.Batch.__annotations__, "weights": torch.Tensor}
    longer = __import__("typing").NamedTuple("Batch", list(fields.items()))
    monkeypatch.setattr(script, "Batch", lambda *x: longer(*x, *([x[0]] * (len(fields) - len(x)))))
    data = script.rollout(agent, envs, Log(), args)
    metrics = script.update(agent, data, 0.0, args)
    assert abs(metrics["losses/approx_kl"]) < 1e-5


# --- spaces ---------------------------------------------------------------------------------------


class Any(gym.Env):
    """Any spaces, and what it got; `rewards` and `flags` may be what no environment should give."""

    def __init__(self, observation_space, action_space, info=None, reward=1.0, flag=False):
        self.observation_space, self.action_space = observation_space, action_space
        self.info, self.reward, self.flag, self.got = info or {}, reward, flag, []

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), self.info

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        self.got.append(action)
        return self.observation_space.sample(), self.reward, self.flag, False, self.info


@pytest.fixture
def make(monkeypatch):
    """Register an environment with these spaces; its id."""

    def register(*given, **kwargs):
        def entry(**_):
            return Any(*given, **kwargs)

        spec = gym.envs.registration.EnvSpec("Any-v0", entry_point=entry, max_episode_steps=10)
        monkeypatch.setitem(gym.registry, "Any-v0", spec)
        return "Any-v0"

    return register


VECTOR = spaces.Box(-1, 1, (3,))


@pytest.mark.parametrize("kind", ["info", "observation"])
@pytest.mark.parametrize(
    ("mask", "walls", "says"),
    [
        ([0, 0, 0, 0], [4], "leaves nothing to choose"),
        ([1, 0, 0, 0, 0, 0, 0], [3, 4], "leaves nothing to choose"),
        ([1], [4], "is not one of 4 choices"),
        ([1, 1, 1, 1, 1], [4], "is not one of 4 choices"),
        ([[1, 1, 1, 1]] * 2, [4], "is not one of 4 choices"),
    ],
)
def test_masks_that_cannot_be_meant(kind, mask, walls, says, make):
    choices = spaces.Discrete(4) if walls == [4] else spaces.MultiDiscrete(walls)
    mask = np.int8(mask)
    if kind == "info":
        env_id = make(VECTOR, choices, {"action_mask": mask})
    else:
        fixed = spaces.MultiBinary(mask.shape)
        fixed.sample = lambda *given: mask
        env_id = make(spaces.Dict({"action_mask": fixed, "x": VECTOR}), choices)
    with pytest.raises(ValueError, match=f"the action mask .*{says}"):
        set_up("ppo", env_id=env_id)
    assert set_up("ppo", env_id=env_id, action_masks=False)[2].obs.shape[0] == 2


@EACH
@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"screen": spaces.Box(0, 255, (20, 32, 3), np.uint8), "x": VECTOR}),
        spaces.Tuple([VECTOR, spaces.Dict({"deep": spaces.Box(0, 255, (8, 8), np.uint8)})]),
        spaces.Box(-1, 1, (240, 320, 3)),  # floats: too many of them
        spaces.Dict({"mission": spaces.Text(10), "x": VECTOR}),
        spaces.Sequence(VECTOR),
        spaces.Dict({"mission": spaces.Space(), "x": VECTOR}),  # MiniGrid's
    ],
    ids=["Dict", "nested", "floats", "text", "sequence", "its own"],
)
def test_what_is_no_vector_is_refused(name, space, make, capsys):
    actions = spaces.Discrete(2) if name == "ppo" else VECTOR
    with pytest.raises(SystemExit) as end:
        SCRIPTS[name].make_env(make(space, actions))
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "observations are no vector (MiniGrid: a Flat wrapper); pixels: ppo_pixels.py" in err
    assert err.count("\n") == 1


BOXES = [
    spaces.Box(0, 10, (2,), np.int64),
    spaces.Box(-1, 1, (1,), np.int8),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(-1, 1, (2,), np.float16),
    spaces.Box(-5, 5, (2,), np.float64),
    spaces.Box(-1, 1, (2, 3), np.float32),
    spaces.Box(-1, 1, (1, 1, 2), np.int32),
    spaces.Box(-1, 1, (), np.float32),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_boxes_get_their_own_type_and_shape(box, make, tmp_path):
    script = ppo_continuous_action
    env_id = make(VECTOR, box)
    flags = f"--env-id {env_id} --num-steps 40 --num-minibatches 2 --update-epochs 1 --no-cuda"
    flags += f" --total-timesteps 80 --log-std-init 1 --run-dir {tmp_path / 'run'}"
    script.train(script.parse_args(flags.split()))
    agent, args = script.load(tmp_path / "run")
    envs = script.make_envs(args, 1)
    envs.step(agent.numpy_actor()(envs.obs, agent.noise(1)))
    (got,) = envs.envs[0].unwrapped.got
    assert box.contains(got) and np.asarray(got).dtype == box.dtype
    assert agent.act(np.zeros((4, 3)), agent.noise(4)).shape == (4, *box.shape)
    assert len(script.evaluate(script.parse_args(["--evaluate", str(tmp_path / "run")]))) == 10


@EACH
@pytest.mark.parametrize(
    ("reward", "flag"),
    [(np.ones(2), False), ([1.0, 2.0], False), (1.0, np.array([True, False]))],
    ids=["vector", "list", "flags"],
)
def test_several_rewards_or_flags_are_named(name, reward, flag, make, tmp_path):
    script = SCRIPTS[name]
    actions = spaces.Discrete(2) if name == "ppo" else VECTOR
    env_id = make(VECTOR, actions, reward=reward, flag=flag)
    flags = f"--env-id {env_id} --num-steps 40 --num-minibatches 2 --run-dir {tmp_path / 'run'}"
    with pytest.raises(ValueError, match=r"Any-v0: reward=.*: one of each is wanted"):
        script.train(script.parse_args([*flags.split(), "--total-timesteps", "400"]))
    assert not (tmp_path / "run").exists()


@EACH
def test_observations_of_another_size_are_no_broadcast(name, make):
    """A step that returns one number where the space has three."""
    actions = spaces.Discrete(2) if name == "ppo" else VECTOR
    script, args, envs, agent = set_up(name, env_id=make(VECTOR, actions))
    envs.envs[0].unwrapped.observation_space = spaces.Box(-1, 1, (1,))
    with pytest.raises(ValueError, match=r"cannot reshape array of size 1 into shape \(3,\)"):
        envs.step(agent.numpy_actor()(envs.obs))


@EACH
@pytest.mark.parametrize("kind", ["episodes of one step", "one step an iteration"])
def test_hardly_anything_to_learn_from_is_no_nan(name, kind, make, tmp_path):
    """Ends together leave iterations without one row to learn from."""
    script = SCRIPTS[name]
    actions = spaces.Discrete(2) if name == "ppo" else VECTOR
    env_id = make(VECTOR, actions, flag=kind == "episodes of one step")
    steps = 2 if kind == "episodes of one step" else 1
    flags = f"--env-id {env_id} --num-envs 2 --num-steps {steps} --num-minibatches 1 --no-cuda"
    flags += f" --total-timesteps 60 --run-dir {tmp_path / 'run'}"
    script.train(script.parse_args(flags.split()))
    agent, _ = script.load(tmp_path / "run")
    assert all(x.isfinite().all() for x in agent.state_dict().values())


def test_cleanrls_own_test_command(tmp_path):
    script = ppo_continuous_action
    flags = "--env-id Hopper-v4 --num-envs 1 --num-steps 64 --total-timesteps 128 --no-cuda"
    script.train(script.parse_args([*flags.split(), "--run-dir", str(tmp_path / "run")]))
    assert script.load_checkpoint(tmp_path / "run")["counters"][1] == 2
    assert math.isfinite(script.load(tmp_path / "run")[0].actor_logstd.sum())
