"""ppo.py and ppo_continuous_action.py: policies by their formulas, compilation, learning; Warp's
first networks, too. Updates with all their cases are in algorithms/test_vectors.py."""

import copy
import dataclasses
import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import SEEN, make
from gymnasium import spaces
from program import returns
from scripts import train
from torch import nn

import ppo
import ppo_continuous_action
import ppo_continuous_action_warp as warp

boxes = pytest.mark.parametrize("script", [ppo_continuous_action, warp], ids=lambda x: x.__name__)
both = pytest.mark.parametrize("script", [ppo, ppo_continuous_action], ids=lambda x: x.__name__)


def actor(agent) -> nn.Module:
    return getattr(agent, "actor", None) or agent.actor_mean


def usual(script):
    return spaces.Discrete(3) if script is ppo else spaces.Box(-1, 1, (2,))


def set_up(script, action_space=None, **flags):
    """Args and an agent with weights moved at random."""
    flags = {"max_grad_norm": 0.5, "clip_vloss": False} | flags
    return make(script.__name__, SEEN, action_space or usual(script), **flags)[1:]


# --- policies -------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", [ppo, ppo_continuous_action, warp], ids=lambda x: x.__name__)
def test_initial_policy_and_networks(script):
    """Orthogonal weights of gains sqrt(2), sqrt(2) and 1 or 0.01 (details 2, continuous 4)."""
    hidden, unit = ((16, 8), nn.ELU) if script is warp else ((64, 64), nn.Tanh)
    args = script.Args(**{"hidden": hidden} if script is warp else {})
    problem = SimpleNamespace(observation_space=SEEN, action_space=usual(script))
    agent = script.Agent(problem, args)
    for net, gain in ((agent.critic, 1.0), (actor(agent), 0.01)):
        assert [type(layer) for layer in net] == [nn.Linear, unit] * 2 + [nn.Linear]
        assert tuple(layer.out_features for layer in net[:4:2]) == hidden
        for layer, g in zip(net[::2], (math.sqrt(2), math.sqrt(2), gain), strict=True):
            singular = torch.linalg.svdvals(layer.weight.detach())
            torch.testing.assert_close(singular, torch.full_like(singular, g), rtol=1e-4, atol=0)
            assert not layer.bias.any()
    *_, entropy, _ = agent.get_action_and_value(torch.randn(100, 3))
    normal = 2 * getattr(args, "log_std_init", 0.0) + math.log(2 * math.pi * math.e)
    expected = math.log(3) if script is ppo else normal
    torch.testing.assert_close(entropy, torch.full((100,), expected), atol=1e-3, rtol=0)


@boxes
def test_samples_are_of_the_policy(script):
    """In torch and in numpy, in a box that is neither centred nor of unit size."""
    _, agent = set_up(script, spaces.Box(np.float32([-2, 0]), np.float32([4, 1])))
    agent.obs_moments.update(np.random.default_rng(0).normal(3.0, 2.0, (99, 3)))
    obs, unit = torch.randn(5, 3), torch.tensor([3.0, 0.5])
    mean = torch.tensor([1.0, 0.5]) + unit * agent.actor_mean(agent.normalize(obs))
    std = agent.actor_logstd.exp() * unit
    many = obs.repeat(4000, 1)
    noise = agent.noise(20_000)
    for drawn in (agent.get_action_and_value(many)[0], torch.as_tensor(agent.act(many, noise))):
        z = ((drawn.view(4000, 5, 2) - mean) / std).detach()
        assert z.mean(0).abs().max() < 0.08 and (z.std(0) - 1).abs().max() < 0.06
    drawn, logprob, entropy, _ = agent.get_action_and_value(obs)
    normal = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(logprob, normal.log_prob(drawn).sum(-1))
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))


@boxes
def test_the_unit_of_actions(script):
    """Half the box; 1 where it has no end, an infinite width or none."""
    most = float(np.finfo(np.float32).max)
    for box, origin, unit, scale in (
        (spaces.Box(-2, 4, (1,)), [1], [3], True),
        (spaces.Box(-2, 4, (1,)), [0], [1], False),
        (spaces.Box(-np.inf, np.inf, (2,)), [0, 0], [1, 1], True),
        (spaces.Box(-most, most, (2,)), [0, 0], [1, 1], True),
        (spaces.Box(np.float32([-1, 2]), np.float32([3, 2])), [1, 2], [2, 1], True),
    ):
        _, agent = set_up(script, box, scale_actions=scale)
        assert (agent.action_bias.tolist(), agent.action_scale.tolist()) == (origin, unit)


def test_moments_are_those_of_all_that_was_seen():
    rng, moments = np.random.default_rng(0), ppo_continuous_action.RunningMeanStd((4,))
    batches = [rng.normal(1000.0, [1e-2, 1, 5, 100], (n, 4)) for n in (1, 7, 93, 5000)]
    for batch in batches:
        moments.update(batch)
    seen = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean, seen.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, seen.var(axis=0), rtol=1e-6)
    assert moments.count == 5101


NETWORKS = {
    "no bias": lambda i, o: nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o, False)),
    "nested": lambda i, o: nn.Sequential(nn.Sequential(nn.Linear(i, 8), nn.ELU()), nn.Linear(8, o)),
}


@both
@pytest.mark.parametrize("network", NETWORKS)
def test_whatever_the_network_what_acts_is_what_learns(script, network, tmp_path, monkeypatch):
    """The run itself compares them: if one of two definitions changes, it says so."""
    monkeypatch.setattr(script, "mlp", lambda i, o, gain: NETWORKS[network](i, o))
    assert train(script.__name__, tmp_path / "run")["iteration"] == 2
    plain = script.as_numpy
    wrong = lambda *given: lambda x: 2 * plain(*given)(x) + x[:, :1]  # noqa: E731
    monkeypatch.setattr(script, "as_numpy", wrong)
    with pytest.raises(RuntimeError, match="acts by another policy than"):
        train(script.__name__, tmp_path / "other")


# --- the update -----------------------------------------------------------------------------------
@both
def test_no_sample_is_alone_in_a_minibatch(script):
    """It has no deviation: not even where most rows are junk. No row changes nothing."""
    args, agent = set_up(script)
    for size, count, each in ((5, 2, 2), (17, 8, 2), (8, 3, 1), (8, 3, 99)):
        minibatches = []

        def step(agent, adam, args, batch, rows, minibatches=minibatches):
            minibatches.append(rows.tolist())
            return ["approx_kl"], torch.zeros(1)

        obs = np.float32(np.random.normal(size=(size + 1, 1, 3)))
        actions = np.zeros((size, 1, 1 if script is ppo else 2), int if script is ppo else float)
        valid = np.arange(size)[:, None] % each == each - 1
        never = np.zeros_like(valid)
        data = script.Rollout(obs, actions, obs[1:, :, 0], never, never, valid)
        flags = dataclasses.replace(args, num_minibatches=count, update_epochs=1)
        metrics = script.update(agent, data, flags, step)
        assert len(minibatches) == min(count, valid.sum() // 2) and bool(metrics) == (each < 99)
        learned = sorted(row for rows in minibatches for row in rows)
        assert learned == np.flatnonzero(valid).tolist() * (each < 99)
        lengths = [len(rows) for rows in minibatches] or [2]
        assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 2


# --- compilation ----------------------------------------------------------------------------------
def compiled_step(script):
    """Args, agent, a batch of 64 rows, and the compiled step."""
    args, agent = set_up(script, compile_from=0, update_epochs=99, num_steps=99)
    shapes = {"obs": (64, 3), "actions": (64, 1 if script is ppo else 2)}
    batch = script.Batch(*(torch.randn(shapes.get(x, (64,))) for x in script.Batch._fields))
    if script is ppo:
        batch = batch._replace(actions=(batch.actions > 0).long())
    args.compile = True
    compiled = script.compile_step(agent, args)
    assert compiled is not script.minibatch_step
    return args, agent, batch, compiled


@both
def test_a_step_whose_gradients_have_hooks_stays_eager(script):
    args, agent = set_up(script, compile=True, compile_from=0)
    agent.critic[0].bias.register_hook(torch.zeros_like)
    assert script.compile_step(agent, args) is script.minibatch_step


@pytest.mark.slow
@both
def test_compiled_steps_follow_every_number_of_args(script):
    """One after the other, and back; then a schedule of 20 values, each of its own."""
    args, agent, batch, compiled = compiled_step(script)
    state, adam = copy.deepcopy(agent.state_dict()), copy.deepcopy(agent.adam)

    def step(how, **changed):
        """Metrics, and the parameters after them."""
        agent.load_state_dict(state)
        for name, x in agent.adam.items():
            x.copy_(adam[name])
        coefficients = script.as_tensors(dataclasses.replace(args, **changed), torch.device("cpu"))
        numbers = how(agent, agent.adam, coefficients, batch, torch.arange(32))[1].clone()
        return [numbers, nn.utils.parameters_to_vector(agent.parameters()).detach()]

    plain, _ = step(script.minibatch_step)
    others = {"ent_coef": 5.0, "vf_coef": 3.0, "max_grad_norm": 0.01, "learning_rate": 0.1}
    others |= {"norm_adv": not args.norm_adv, "clip_vloss": not args.clip_vloss}
    changes = [{name: value} for name, value in others.items()]
    changes += [{"clip_coef": 0.2 - 0.01 * k, "ent_coef": 0.003 * k} for k in range(20)]
    for changed in changes:
        step(compiled)
        numbers, parameters = step(script.minibatch_step, **changed)
        found, compiled_parameters = step(compiled, **changed)
        torch.testing.assert_close(found, numbers, rtol=1e-3, atol=1e-5, msg=str(changed))
        torch.testing.assert_close(compiled_parameters, parameters, rtol=1e-3, atol=1e-5)
        if changed.keys() <= {"norm_adv", "clip_vloss"}:
            assert not torch.allclose(numbers, plain, rtol=1e-4), changed


@pytest.mark.slow
@both
def test_later_minibatches_run_the_code_of_an_epochs_first(script):
    """To the same bits as with torch's checks in each: with two codes in turn, minibatches that
    differ by a row, and another learning rate within an epoch."""
    args, agent, batch, compiled = compiled_step(script)
    state, adam = copy.deepcopy(agent.state_dict()), copy.deepcopy(agent.adam)

    def learn(checks: bool):
        """Metrics and parameters after six epochs; the functions that made the steps."""
        agent.load_state_dict(state)
        agent.adam = copy.deepcopy(adam)
        results, steps = [], []
        generator = torch.Generator().manual_seed(5)
        for epoch in range(6):
            flags = {"norm_adv": epoch % 2 == 0, "learning_rate": 0.01 / (1 + epoch)}
            now = dataclasses.replace(args, **flags)
            coefficients = script.as_tensors(now, torch.device("cpu"))
            minibatches = torch.randperm(62, generator=generator).tensor_split(4)  # 16 and 15 rows
            direct = script.epoch_steps(compiled, minibatches)
            for step, part in zip([compiled] * 4, minibatches, strict=True) if checks else direct:
                results.append(step(agent, agent.adam, coefficients, batch, part)[1].clone())
                steps.append(step)
                coefficients.learning_rate = coefficients.learning_rate * 0.5
        return [*results, *(p.detach().clone() for p in agent.parameters())], steps

    (checked, each), (found, steps) = learn(True), learn(False)
    assert set(each) == set(steps[::4]) == {compiled}
    assert compiled not in steps[1::4] + steps[2::4] + steps[3::4]
    assert len({step.__code__ for step in steps}) == 3  # torch.compile's, and both codes
    assert all(torch.equal(x, y) for x, y in zip(checked, found, strict=True))


# --- learning -------------------------------------------------------------------------------------
def test_dm_control(tmp_path):
    train("ppo_continuous_action", tmp_path / "run", "--env-id dm_control/cartpole-balance-v0")
    assert ppo_continuous_action.load(tmp_path / "run")[0].obs_moments.mean.shape == (5,)


LONG = "--total-timesteps 200000 --num-steps 2048 --num-minibatches 32 --update-epochs 10"
CARTPOLE = "--env-id CartPole-v1 --num-envs 4 --num-steps 128 --num-minibatches 4 --update-epochs 4"
# Flags; the mean that so many of the last episodes in training exceed, and the first ones do not;
# the least mean of ten greedy ones
LEARNED = [("ppo", f"{CARTPOLE} --total-timesteps 20000 --no-compile", 20, 60, 150)]
SLOW = []
for how in ("--compile-from 0 --compile", "--no-compile"):
    for seed in (1, 2, 3):  # without the bootstrap at time limits, about -1,100
        flags = f"--env-id Pendulum-v1 --num-envs 1 --seed {seed} {LONG} {how}"
        SLOW.append(("ppo_continuous_action", flags, 100, -200, -250))
    # a policy saved without its normaliser plays to near 0
    flags = f"--env-id Hopper-v4 --num-envs 1 {LONG} {how}"
    SLOW.append(("ppo_continuous_action", flags, 100, 500, 500))
    SLOW.append(("ppo", f"{CARTPOLE} --total-timesteps 200000 {how}", 100, 300, 499.9))
LEARNED += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("script", "flags", "last", "mean", "played"), LEARNED)
def test_it_learns(script, flags, last, mean, played, tmp_path):
    module, folder = importlib.import_module(script), tmp_path / "run"
    train(script, folder, flags)
    scores = returns(folder)
    assert np.mean(scores[:last]) < mean < np.mean(scores[-last:])
    assert np.mean(module.evaluate(module.parse_args(["--evaluate", str(folder)]))) >= played
