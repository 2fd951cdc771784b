"""ppo_continuous_action_warp.py: environments of tensors, what is learned from them, what a CUDA
graph needs, the engine. The blocks it shares are tested with their siblings."""

import contextlib
import importlib.util
import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from maths import returns
from program import ROOT, assert_same, installed, rows, scalars, status
from replay import Waits, no_graphs_but_tapes
from scripts import refused

import ppo_continuous_action_warp as script
from benchmark.published.studies import bootstrap
from ppo_continuous_action_warp import Args, DeviceEnvs, Pendulum

SMALL = (
    "--env-id Pendulum-v1 --num-envs 16 --num-steps 8 --num-minibatches 2 --update-epochs 2 "
    "--hidden 16 --no-cuda --checkpoint-interval 1"
)
STEPS = 16 * 8  # of an iteration
PENDULUM = "--env-id Pendulum-v1 --num-envs 256 --num-steps 32 --hidden 64 64 --no-cuda"

no_warp = pytest.mark.skipif(
    importlib.util.find_spec("mujoco_warp") is None,
    reason="no mujoco-warp (pip install -e .[warp])",
)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


def small(flags: str = "", base: str = SMALL) -> Args:
    return script.parse_args(f"{base} {flags}".split())


def train(folder: Path, flags: str = "", base: str = SMALL) -> dict:
    """Train in this process; the final checkpoint."""
    script.train(small(f"--run-dir {folder} --total-timesteps {3 * STEPS} {flags}", base))
    return script.load_checkpoint(folder)


class Toy(DeviceEnvs):
    """Environment i ends its episodes after 3 + i % 3 steps, by a time limit or, where i is odd,
    a death. It observes (i, t) and pays i + t. It returns the same tensors in every step."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, device, 2, [-1.0], [1.0], limit=3)
        self.number, self.obs = torch.arange(num_envs), torch.zeros(num_envs, 2)
        self.reward = torch.zeros(num_envs)
        self.flags = torch.zeros(2, num_envs, dtype=torch.bool)

    def observe(self):
        self.obs[:, 0], self.obs[:, 1] = self.number, self.steps
        return self.obs

    def reset(self, mask):
        self.replace(mask, steps=0)
        return self.observe()

    def step(self, actions):
        assert actions.abs().max() <= 1.0
        self.steps += 1
        self.reward.copy_(self.number + self.steps)
        over = self.steps >= 3 + self.number % 3
        self.flags[0], self.flags[1] = over & (self.number % 2 == 1), over & (self.number % 2 == 0)
        return self.observe(), self.reward, *self.flags


def ended(data: script.Rollout) -> torch.Tensor:
    """Where an episode ended that is logged."""
    return (data.terminated | data.truncated) & data.returns.isfinite()


def play_toy(flags: str = "", iterations: int = 1):
    """Roll out the toy; agent, environments, where they are, a copy of each rollout."""
    args = small(f"--num-envs 6 --num-steps 10 --no-stagger-episodes {flags}")
    torch.manual_seed(1)
    envs = Toy(args.num_envs)
    agent = script.Agent(envs, args)
    at, data = script.start(agent, envs, args)
    copies = []
    for _ in range(iterations):
        script.rollout(agent, envs, at, data, args)
        copies.append(script.Rollout(*(x.clone() for x in data)))
    return agent, envs, at, copies, args


# --- environments ---------------------------------------------------------------------------------
def test_pendulum_is_gymnasiums():
    envs, ours = gym.make("Pendulum-v1").unwrapped, Pendulum(200, "cpu")
    torch.manual_seed(1)
    ours.reset(torch.ones(200, dtype=torch.bool))
    ours.state[:, 0] *= 5.0  # more than a turn
    ours.state[:, 1] *= 8.0
    envs.reset(seed=1)
    for _ in range(3):
        states = ours.state.double().numpy().copy()
        actions = torch.rand(200, 1) * 4.0 - 2.0
        obs, rewards, terminated, truncated = ours.step(actions)
        for k in range(200):
            envs.state = states[k]
            their_obs, reward, *_ = envs.step(actions[k].numpy())
            np.testing.assert_allclose(obs[k], their_obs, atol=3e-6)
            assert float(rewards[k]) == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert not terminated.any() and not truncated.any()


def test_pendulum_starts_and_ends_as_gymnasiums():
    torch.manual_seed(1)
    envs = Pendulum(20_000, "cpu")
    obs = envs.reset(torch.ones(20_000, dtype=torch.bool))
    angle, velocity = envs.state.T
    for x, most in ((angle, math.pi), (velocity, 1.0)):
        assert most * 0.999 < x.max() <= most and -most <= x.min() < -most * 0.999
        assert x.std() == pytest.approx(most / math.sqrt(3.0), rel=0.02)
    assert torch.equal(obs[:, 2], velocity)
    assert gym.spec("Pendulum-v1").max_episode_steps == envs.limit == 200
    ends = [envs.step(torch.zeros(20_000, 1))[3].sum().item() for _ in range(200)]
    assert ends == [0] * 199 + [20_000]
    single = gym.make("Pendulum-v1")
    assert np.array_equal(single.action_space.low, envs.action_space.low)
    assert np.array_equal(single.action_space.high, envs.action_space.high)


def test_a_masked_reset_touches_only_its_rows():
    envs = Pendulum(6, "cpu")
    envs.reset(torch.ones(6, dtype=torch.bool))
    envs.step(torch.ones(6, 1))
    before, place = envs.state.clone(), envs.state.data_ptr()
    mask = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    obs = envs.reset(mask)
    assert torch.equal(envs.state[~mask], before[~mask])
    assert (envs.state[mask] != before[mask]).all()
    assert envs.steps.tolist() == [1, 0, 1, 1, 0, 1]
    assert torch.equal(obs, envs.observe()) and envs.state.data_ptr() == place


def test_every_row_of_a_rollout_is_a_step():
    """With an environment that uses its buffers again. `next_obs` is an episode's true last one."""
    _, _, at, (data, more), _ = play_toy(iterations=2)
    for i in range(6):
        length = 3 + i % 3
        for t in range(20):
            x, row = (data, t) if t < 10 else (more, t - 10)
            s = t % length  # steps of the episode before this one
            assert x.obs[row, i].tolist() == [i, s]
            assert x.next_obs[row, i].tolist() == [i, s + 1]
            assert x.rewards[row, i] == i + s + 1
            assert x.lengths[row, i] == s + 1
            assert x.returns[row, i] == sum(i + k + 1 for k in range(s + 1))
            discounted = sum(0.99 ** (s - k) * (i + k + 1) for k in range(s + 1))
            assert float(x.discounted[row, i]) == pytest.approx(discounted, rel=1e-5)
            assert x.terminated[row, i] == (s + 1 == length and i % 2 == 1)
            assert x.truncated[row, i] == (s + 1 == length and i % 2 == 0)
        assert at["obs"][i].tolist() == [i, 20 % length]
    assert (data.actions.abs() > 1.0).any()  # stored as drawn, clipped for the environment


def test_first_episodes_are_staggered_and_not_logged(tmp_path):
    args = small("--num-envs 64 --num-steps 200")
    torch.manual_seed(1)
    envs = Pendulum(64, "cpu")
    at, data = script.start(agent := script.Agent(envs, args), envs, args)
    script.rollout(agent, envs, at, data, args)
    ends = data.truncated.nonzero()[:, 0]
    assert len(ends) == 64 and len(ends.unique()) > 40 and ends.min() < 20 and ends.max() > 180
    assert not ended(data).any()
    script.rollout(agent, envs, at, data, args)
    assert ended(data).sum() == 64 and (data.lengths[ended(data)] == 200).all()

    for flags, lines in (("", 16 * 1), ("--no-stagger-episodes", 16 * 2)):
        folder = tmp_path / (flags or "staggered")
        train(folder, f"--num-steps 100 --total-timesteps {16 * 400} {flags}")
        table = rows(folder)[1:]
        assert len(table) == lines and {length for *_, length in table} == {"200"}
        same = len({step for step, *_ in table})
        assert same == 2 if flags else same > 8


# --- what is learned ------------------------------------------------------------------------------
def test_gae_is_the_brute_force_sum():
    """Of a rollout without rows between episodes: `next_values` are those of true observations."""
    rng, found = np.random.default_rng(1), np.zeros((40, 7))
    rewards, values, after = rng.normal(size=(3, 40, 7))
    terminated, truncated = rng.random((2, 40, 7)) < 0.1
    for t, i in np.ndindex(40, 7):
        for k in range(t, 40):
            delta = rewards[k, i] + 0.97 * after[k, i] * (not terminated[k, i]) - values[k, i]
            found[t, i] += (0.97 * 0.9) ** (k - t) * delta
            if terminated[k, i] or truncated[k, i]:
                break
    given = map(torch.tensor, (rewards, values, after, terminated, truncated))
    np.testing.assert_allclose(script.gae(*given, 0.97, 0.9), found, atol=1e-12)


def spied_update(agent, data, args, **more):
    """The batch that `update` learns from, without learning; and its metrics."""
    batches = []

    def step(agent, adam, batch, rows, learning_rate, args):
        batches.append((batch, rows.clone(), float(learning_rate)))
        return ["approx_kl", "value_loss"], torch.zeros(2)

    agent.adam = script.flat_adam(agent) | {"learning_rate": torch.tensor(1e-3)}
    with mock.patch.object(script, "minibatch_step", step):
        metrics = script.update(agent, data, args, **more)
    return batches, metrics


def test_a_time_limit_bootstraps_from_the_true_last_observation():
    agent, _, _, (data,), args = play_toy("--gamma 0.5 --gae-lambda 1")
    agent.get_value = lambda obs: 100.0 * obs[..., 0] + 10.0 * obs[..., 1]  # of (i, t)
    unit = data.discounted.double().std(correction=0).item()
    ((batch, *_), *_), _ = spied_update(agent, data, args)
    returns = batch[4].view(10, 6)
    for i, value in ((0, 30.0), (1, 0.0), (2, 250.0)):  # lengths 3, 4, 5; 1 dies
        for t in reversed(range(3 + i % 3)):
            value = (i + t + 1) / unit + 0.5 * value
            assert float(returns[t, i]) == pytest.approx(value, rel=1e-5)
    # environment 0 has begun a new episode at step 9, and has not ended it
    assert float(returns[9, 0]) == pytest.approx(1.0 / unit + 0.5 * 10.0, rel=1e-5)


LAST = list(zip(bootstrap.RULES, (0.0, 0.5, -1.0), strict=True))


@pytest.mark.parametrize("rule, last", LAST)
def test_the_bootstraps_that_were_compared(rule, last):
    """The first step goes on, the second terminates, the third is cut: r + gamma V - V."""
    values, after = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[90.0], [18.0], [2.0]])
    over, cut = torch.tensor([[0], [1], [0]]) > 0, torch.tensor([[0], [0], [1]]) > 0
    counted = bootstrap.RULES[rule](values, after, over, cut)
    found = bootstrap.GAE(torch.full((3, 1), 2.0), values, *counted, cut, 0.5, 0.0)
    assert found.flatten().tolist() == [46.0, 0.0, last]


def test_every_sample_once_an_epoch():
    agent, _, _, (data,), args = play_toy("--num-minibatches 7 --update-epochs 3")
    batches, _ = spied_update(agent, data, args)
    assert len(batches) == 21
    orders = [torch.cat([rows for _, rows, _ in batches[k : k + 7]]) for k in (0, 7, 14)]
    for order in orders:
        assert order.sort().values.tolist() == list(range(60))
    assert not torch.equal(orders[0], orders[1])
    assert {len(rows) for _, rows, _ in batches} == {8, 9}


def test_the_normaliser_is_all_that_was_seen():
    """The first rollout is learned from in the scale that it gives, later ones in the one that
    they were acted in, to which they are added afterwards."""
    agent, _, _, copies, args = play_toy(iterations=3)
    for k, data in enumerate(copies):
        seen = data.obs.flatten(0, 1)
        before = agent.normalize(seen)
        scaled = []
        agent.get_value = lambda obs, scaled=scaled: (
            scaled.append(agent.normalize(obs)) or obs[..., 0]
        )
        spied_update(agent, data, args, first=k == 0)
        assert torch.equal(scaled[0].flatten(0, 1), before) == (k > 0)
        everything = torch.cat([data.obs.flatten(0, 1) for data in copies[: k + 1]]).double()
        assert torch.allclose(agent.obs_moments.mean, everything.mean(dim=0))
        assert torch.allclose(agent.obs_moments.var, everything.var(dim=0, correction=0))
    x = (seen.double() - everything.mean(dim=0)) / everything.var(dim=0, correction=0).sqrt()
    assert torch.allclose(agent.normalize(seen).double(), x, atol=1e-5)


def test_rewards_are_scaled_by_the_deviation_of_all_returns_so_far():
    """Whose discounted sums are tested above."""
    agent, _, _, copies, args = play_toy("--gamma 0.9 --gae-lambda 0", iterations=2)
    agent.get_value = lambda obs: obs[..., 0] * 0.0  # returns are rewards then
    for k, data in enumerate(copies):
        data.rewards[0, :2] = torch.tensor([1e6, -1e6])  # to be clipped
        ((batch, *_), *_), _ = spied_update(agent, data, args)
        seen = torch.cat([one.discounted.flatten() for one in copies[: k + 1]]).double()
        expected = data.rewards / (seen.var(correction=0) + 1e-8).sqrt()
        np.testing.assert_allclose(batch[4].view(10, 6), expected.clamp(-10, 10), rtol=1e-5)


@pytest.mark.parametrize(
    "kl, before, after",
    [
        (0.021, 3e-4, 2e-4), (0.0199, 3e-4, 3e-4), (0.0051, 3e-4, 3e-4), (0.0049, 3e-4, 4.5e-4),
        (1.0, 1.2e-5, 1e-5), (0.0, 9e-3, 1e-2),
    ],
)  # fmt: skip
def test_the_learning_rate_follows_the_kl(kl, before, after):
    rate = torch.tensor(before)
    place = rate.data_ptr()
    script.adapt(rate, torch.tensor(kl), 0.01)
    assert float(rate) == pytest.approx(after, rel=1e-5) and rate.data_ptr() == place


def test_the_learning_rate_in_an_update(tmp_path):
    """Each step has the rate that the KL seen before it gave; the first shows none."""
    agent, _, _, (data,), args = play_toy("--num-minibatches 2 --update-epochs 3")
    batches, metrics = spied_update(agent, data, args)  # KL 0 all along
    rates = [rate for *_, rate in batches]
    assert rates == pytest.approx([1e-3, 1e-3, 1.5e-3, 2.25e-3, 3.375e-3, 5.0625e-3])
    assert float(metrics["charts/learning_rate"]) == pytest.approx(7.59375e-3)
    agent, _, _, (data,), args = play_toy("--desired-kl 0")
    batches, _ = spied_update(agent, data, args)
    assert [rate for *_, rate in batches] == pytest.approx([1e-3] * 4)
    train(tmp_path, "--desired-kl 0 --learning-rate 0.003")
    rates = [value for _, value in scalars(tmp_path)["charts/learning_rate"]]
    assert rates == pytest.approx([0.003] * 3)


# --- what a CUDA graph needs ----------------------------------------------------------------------
def places(*things) -> list[int]:
    tensors = []
    for thing in things:
        thing = thing.state_dict() if isinstance(thing, torch.nn.Module) else thing
        tensors += thing.values() if isinstance(thing, dict) else thing
    return [x.data_ptr() for x in tensors]


def iterate(args: Args, envs, iterations: int = 1, mode=None):
    torch.manual_seed(args.seed)
    agent = script.Agent(envs, args)
    agent.adam = script.flat_adam(agent)
    agent.adam["learning_rate"] = torch.tensor(args.learning_rate)
    at, data = script.start(agent, envs, args)
    before = places(agent, agent.adam, at, data, envs)
    with mode or contextlib.nullcontext():
        for k in range(iterations):
            script.rollout(agent, envs, at, data, args)
            script.update(agent, data, args, first=k == 0)
    return before, places(agent, agent.adam, at, data, envs)


def test_no_host_waits_in_an_iteration_and_no_tensor_moves():
    waits = Waits()
    before, after = iterate(small(), Pendulum(16, "cpu"), 2, waits)
    assert waits.found == [] and waits.calls > 1000
    assert before == after
    with Waits() as control:
        torch.ones(2)[torch.tensor([True, False])].sum().item()
    assert control.found == ["a mask as an index", "_local_scalar_dense"]


def test_recorded_again_when_a_number_has_changed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    called, found = [], []
    recorded = script.Recorded(lambda args: called.append(args.clip_coef) or called[-1])
    args, given = small(), [0.2] * 6 + [0.1] * 2 + [0.05]
    for clip in given:
        args.clip_coef = clip
        found.append(recorded(args))
    assert found == given
    assert called == [0.2] * 4 + [0.1, 0.05]


def seven(record, args: Args, device: str = "cpu", change: bool = False) -> list:
    """What seven rollouts and updates leave; if `change`, numbers of Args are others from the
    sixth on."""
    collect, learn = record(script.rollout), record(script.update)
    envs = Pendulum(16, device)
    torch.manual_seed(args.seed)
    agent = script.Agent(envs, args).to(device)
    agent.adam = script.flat_adam(agent)
    agent.adam["learning_rate"] = torch.tensor(args.learning_rate, device=device)
    at, data = script.start(agent, envs, args)
    metrics = []
    for k in range(7):
        if change and k == 5:
            args.ent_coef, args.gamma, args.clip_coef = 0.5, 0.5, 0.01
        collect(agent, envs, at, data, args)
        found = learn(agent, data, args, k == 0)
        metrics.append({name: x.item() for name, x in found.items()})
    return [metrics, agent.state_dict(), agent.adam, envs.state_dict(), at]


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("more", ["", "--desired-kl 0 --clip-vloss --no-stagger-episodes"])
def test_what_is_recorded_is_replayed_to_the_same_bits(more, change, monkeypatch):
    """With a stand-in for CUDA graphs, which hold numbers as they were: after a change both are
    recorded again."""
    plain = seven(lambda function: function, small(more), change=change)
    made = no_graphs_but_tapes(monkeypatch)
    assert_same(seven(script.Recorded, small(more), change=change), plain)
    assert [tape.replays for tape in made] == ([2, 2, 2, 2] if change else [4, 4])


@pytest.mark.gpu
@gpu
def test_a_changed_number_is_recorded_again_on_a_gpu():
    def numbers(record) -> list[float]:
        return [x["losses/value_loss"] for x in seven(record, small(), "cuda", change=True)[0]]

    recorded = numbers(script.Recorded)
    assert recorded == pytest.approx(numbers(lambda function: function), rel=1e-2)
    (unchanged, *_) = seven(script.Recorded, small(), "cuda")
    assert abs(unchanged[-1]["losses/value_loss"] / recorded[-1] - 1.0) > 0.1


@pytest.mark.gpu
@gpu
def test_cuda_graphs_are_eager_to_rounding(tmp_path):
    flags = f"--cuda --total-timesteps {8 * STEPS}"
    plain = train(tmp_path / "plain", f"{flags} --no-cudagraphs")
    graphs = train(tmp_path / "graphs", flags)
    assert torch.allclose(plain["at"]["obs"], graphs["at"]["obs"], atol=1e-4)
    for name, x in plain["agent"].items():
        assert torch.allclose(x, graphs["agent"][name], rtol=1e-3, atol=1e-5), name
    assert len(rows(tmp_path / "plain")) == len(rows(tmp_path / "graphs"))


@pytest.mark.gpu
@gpu
@no_warp
@pytest.mark.parametrize("env_id", script.TASKS)
@pytest.mark.parametrize("more", ["", "--no-cudagraphs"])
def test_warp_trains_on_a_gpu(env_id, more, tmp_path):
    flags = f"--cuda --env-id {env_id} --num-envs 256 --hidden 64 64 --no-stagger-episodes {more}"
    train(tmp_path, f"{flags} --num-steps 100 --total-timesteps {12 * 100 * 256}")
    assert status(tmp_path) == "finished" and len(rows(tmp_path)) > 256
    argv = ["--evaluate", str(tmp_path), "--eval-episodes", "2"]
    assert np.isfinite(script.evaluate(script.parse_args(argv))).all()


# --- a program ------------------------------------------------------------------------------------
def test_acting_by_hand(tmp_path):
    train(tmp_path, "--hidden 16 8")
    obs = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    agent, args = script.load(tmp_path)
    assert args.hidden == (16, 8)
    assert isinstance(agent.act(obs), np.ndarray)
    assert np.array_equal(agent.act(torch.tensor(obs)).numpy(), agent.act(obs))
    shift, scale = agent.obs_moments.mean.numpy(), np.sqrt(agent.obs_moments.var.numpy() + 1e-8)
    x = np.clip((obs - shift) / scale, -10, 10)
    for layer in (m for m in agent.actor_mean if isinstance(m, torch.nn.Linear)):
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        x = np.where(x > 0, x, np.expm1(x)) if layer is not agent.actor_mean[-1] else x
    np.testing.assert_allclose(agent.act(obs), 2.0 * x, atol=1e-5)  # half the box is 2
    noise = agent.noise(5)
    std = agent.actor_logstd.detach().exp().numpy()
    np.testing.assert_allclose(agent.act(obs, noise), 2.0 * (x + std * noise.numpy()), atol=1e-5)


def test_what_acts_is_what_learns():
    """The log-density of the actions of a rollout is the normal one around `act`'s means."""
    agent, _, _, (data,), _ = play_toy()
    agent.obs_moments.update(data.obs.flatten(0, 1))
    obs, actions = data.obs.flatten(0, 1), data.actions.flatten(0, 1)
    _, logprob, entropy, value = agent(obs, actions)
    policy = torch.distributions.Normal(agent.act(obs), agent.actor_logstd.exp() * agent.unit)
    assert torch.allclose(logprob, policy.log_prob(actions).sum(-1), atol=1e-5)
    assert torch.allclose(entropy, policy.entropy().sum(-1), atol=1e-5)
    assert torch.equal(value, agent.get_value(obs))


def test_nan_actions_that_the_engine_hides_are_not_saved(tmp_path, monkeypatch):
    plain, act, calls = Pendulum.step, script.Agent.act, []

    def spoilt(*given):
        calls.append(1)
        return act(*given) * (math.nan if len(calls) == 12 else 1.0)  # in the second iteration

    monkeypatch.setattr(script.Agent, "act", spoilt)
    monkeypatch.setattr(Pendulum, "step", lambda envs, actions: plain(envs, actions.nan_to_num()))
    with pytest.raises(FloatingPointError, match=r"iteration 1: (actions|losses/.*) is not finite"):
        train(tmp_path)
    assert status(tmp_path) == "failed"
    assert script.load_checkpoint(tmp_path)["counters"][1] == 1


def test_without_the_engine_there_is_one_line(monkeypatch, capfd):
    installed(monkeypatch, mujoco_warp=False)
    refused(capfd, "pip install 'mujoco-warp<4'", script.make_envs, "Ant-v4", 2, "cpu")
    policy = script.Agent(script.make_env("Ant-v4"))  # which still plays in gymnasium
    assert policy.act(np.zeros((2, 27))).shape == (2, 8)


def test_the_pages_environment_trains(tmp_path, monkeypatch, capfd):
    page = (ROOT / "docs" / "ppo_continuous_action_warp.md").read_text()
    module, play, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_robots.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--env-id my_robots:Point --num-envs 64 --num-steps 32 --total-timesteps 60000"
    checkpoint = train(tmp_path / "run", flags)
    scores = returns(tmp_path / "run")
    assert np.mean(scores[:50]) < -25 and np.mean(scores[-50:]) > -15
    assert checkpoint["envs"].keys() == {"steps", "place", "goal"}
    assert "play:" not in capfd.readouterr().out
    argv = ["--evaluate", str(tmp_path / "run")]
    refused(capfd, "--env-id Point: ", script.evaluate, script.parse_args(argv))
    with pytest.raises(SystemExit):  # it loads no module by itself
        script.parse_args([*argv, "--env-id", "my_robots:Point"])
    capfd.readouterr()
    exec(play, {"folder": tmp_path / "run"})  # as the page says
    assert -15 < float(capfd.readouterr().out) < 0


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "least"), [(1, -220), (2, -250), (3, -250)])
def test_pendulum_is_learned(seed, least, tmp_path):
    flags = f"{PENDULUM} --total-timesteps 800000 --seed {seed} --run-dir {tmp_path}"
    assert np.mean(returns(script.train(small(flags, "")))[-100:]) > least
    argv = ["--evaluate", str(tmp_path), "--eval-episodes", "20"]
    assert np.mean(script.evaluate(script.parse_args(argv))) > least  # in gymnasium's


# --- MuJoCo Warp ----------------------------------------------------------------------------------
def leans(env) -> bool:
    """Whether a capsule near the floor is within 37 degrees of upright. There the engines turn the
    pyramid of friction differently: C to the capsule's axis, Warp (3.17) to a fixed one."""
    upright = np.abs(env.data.geom_xmat.reshape(-1, 3, 3)[:, 2, 2])
    low = env.data.geom_xpos[:, 2] - upright * env.model.geom_size[:, 1] - env.model.geom_size[:, 0]
    capsule = env.model.geom_type == 3  # mjGEOM_CAPSULE
    return bool((capsule & (low < 0.06) & (upright > 0.8)).any())


@pytest.mark.slow
@no_warp
@pytest.mark.parametrize("env_id", script.TASKS)
def test_a_step_on_warp_is_gymnasiums(env_id):
    """From the same states, those of random actions; what differs are contacts that begin within
    rounding of a step's part, and the ant's upright legs on the floor."""
    torch.manual_seed(1)
    N, errors, ends = 64, [], []
    envs, single = script.make_envs(env_id, N, "cpu"), script.make_env(env_id).unwrapped
    single.reset(seed=0)
    envs.reset(torch.ones(N, dtype=torch.bool))
    for t in range(30):
        envs.x.copy_(envs.qpos[:, 0])  # as after gymnasium's set_state
        states = [x.double().numpy().copy() for x in (envs.qpos, envs.qvel)]
        actions = envs.low + (envs.high - envs.low) * torch.rand(N, len(envs.low))
        obs, reward, terminated, truncated = (x.clone() for x in envs.step(actions))
        for i in range(N) if t % 6 == 5 else ():
            single.set_state(states[0][i], states[1][i])
            steep = leans(single)
            their_obs, their_reward, their_end, *_ = single.step(actions[i].numpy())
            if env_id != "Ant-v4" or not (steep or leans(single)):
                scale = 1.0 + np.abs(their_obs)
                error = np.abs(obs[i].numpy() - their_obs) / scale
                errors.append((error.max(), abs(reward[i].item() - their_reward)))
                ends.append((terminated[i].item(), their_end))
        envs.reset(terminated | truncated)
    obs_error, reward_error = np.array(errors).T
    assert len(errors) >= (50 if env_id == "Ant-v4" else 320)
    assert np.quantile(obs_error, 0.95) < 1e-4 and np.quantile(reward_error, 0.95) < 1e-4
    if env_id != "Ant-v4":
        assert obs_error.max() < 1e-3 and reward_error.max() < 1e-4
    assert all(ours == theirs for ours, theirs in ends)
    assert any(ours for ours, _ in ends) == (env_id != "HalfCheetah-v4")


@pytest.mark.slow
@no_warp
@pytest.mark.parametrize("env_id", script.TASKS)
def test_a_reset_on_warp_is_gymnasiums(env_id):
    torch.manual_seed(1)
    envs, single = script.make_envs(env_id, 512, "cpu"), gym.make(env_id)
    first = envs.reset(torch.ones(512, dtype=torch.bool)).clone()
    theirs = np.stack([single.reset(seed=k)[0] for k in range(512)])
    assert first.shape == theirs.shape
    np.testing.assert_allclose(first.mean(dim=0), theirs.mean(axis=0), atol=0.2 * theirs.std())
    np.testing.assert_allclose(first.std(dim=0), theirs.std(axis=0), rtol=0.2, atol=1e-6)
    kinds = np.abs(first.numpy() - first.numpy().mean(0)).max(0) / first.numpy().std(0)
    normal = np.abs(theirs - theirs.mean(0)).max(0) / theirs.std(0)
    assert np.array_equal(kinds > 2.2, normal > 2.2)  # a uniform variable reaches 1.73 deviations
    for _ in range(3):
        envs.step(torch.zeros(512, len(envs.low)))
    before, mask = envs.state_dict(), torch.arange(512) % 5 == 0
    before = {name: x.clone() for name, x in before.items() if name not in ("xpos", "ctrl")}
    envs.reset(mask)
    for name, x in before.items():
        assert torch.equal(envs.state_dict()[name][~mask], x[~mask])
    assert (envs.qpos[mask] != before["qpos"][mask]).any(dim=1).all()
    assert (envs.qacc_warmstart[mask] == 0).all() and (envs.steps[mask] == 0).all()
    assert np.array_equal(envs.low, single.action_space.low)
    assert np.array_equal(envs.high, single.action_space.high)
    assert envs.limit == single.spec.max_episode_steps


@pytest.mark.slow
@no_warp
def test_warp_resumes_to_the_same_bits(tmp_path):
    base = SMALL.replace("Pendulum-v1", "Hopper-v4")
    whole = train(tmp_path / "whole", f"--total-timesteps {6 * STEPS}", base)
    train(tmp_path / "parts", "", base)
    argv = ["--resume", str(tmp_path / "parts"), "--total-timesteps", str(6 * STEPS)]
    script.train(script.parse_args(argv))
    assert_same(script.load_checkpoint(tmp_path / "parts"), whole)


@pytest.mark.slow
@no_warp
def test_half_cheetah_on_warp_improves(tmp_path):
    flags = "--env-id HalfCheetah-v4 --num-envs 64 --num-steps 64 --hidden 64 64 --no-cuda"
    folder = script.train(small(f"{flags} --total-timesteps 300000 --run-dir {tmp_path}", ""))
    assert np.mean(returns(folder)[-64:]) > np.mean(returns(folder)[:64]) + 300
