"""ppo_continuous_action_warp.py: environments of tensors, the policy by formula, what a CUDA graph
needs, learning, the engine. Its updates and rollouts are tested in algorithms/test_warp.py."""

import contextlib
import importlib.util
import math
import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from program import ROOT, Waits, assert_same, installed, returns, rows
from reference import Seen, mlp, parameters
from scripts import SMALL, STEPS, parse, refused, resume, train

import ppo_continuous_action_warp as script
from ppo_continuous_action_warp import Args, Pendulum

NAME = "ppo_continuous_action_warp"
PENDULUM = "--env-id Pendulum-v1 --num-envs 256 --num-steps 32 --hidden 64 64 --no-cuda"

no_warp = pytest.mark.skipif(
    importlib.util.find_spec("mujoco_warp") is None,
    reason="no mujoco-warp (pip install -e .[warp])",
)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


def small(flags: str = "") -> Args:
    return parse(NAME, f"{SMALL[NAME]} {flags}")


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
            np.testing.assert_allclose(obs[k], their_obs, rtol=1e-4, atol=1e-5)
            assert float(rewards[k]) == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert not terminated.any() and not truncated.any()


def test_pendulum_starts_and_ends_as_gymnasiums():
    torch.manual_seed(1)
    envs, single = Pendulum(20_000, "cpu"), gym.make("Pendulum-v1")
    envs.reset(torch.ones(20_000, dtype=torch.bool))
    for x, most in zip(envs.state.T, (math.pi, 1.0), strict=True):
        assert most * 0.999 < x.max() <= most and -most <= x.min() < -most * 0.999
        assert x.std() == pytest.approx(most / math.sqrt(3.0), rel=0.02)
    assert single.spec.max_episode_steps == envs.limit == 200
    ends = [envs.step(torch.zeros(20_000, 1))[3].sum().item() for _ in range(200)]
    assert ends == [0] * 199 + [20_000]
    assert single.action_space == envs.action_space
    before, mask = envs.state.clone(), torch.arange(20_000) % 3 == 0
    obs = envs.reset(mask)
    assert torch.equal(obs, envs.observe())
    assert torch.equal((envs.state != before).any(dim=1), mask)
    assert torch.equal(envs.steps == 0, mask)


# --- learning -------------------------------------------------------------------------------------
def test_the_learning_rate_stays_within_its_bounds():
    for kl, before, after in ((0.03, 3e-4, 2e-4), (1.0, 1.2e-5, 1e-5), (0.0, 9e-3, 1e-2)):
        rate = torch.tensor(before)
        script.adapt(rate, torch.tensor(kl), 0.01)
        assert float(rate) == pytest.approx(after, rel=1e-5)


# --- what a CUDA graph needs ----------------------------------------------------------------------
def parts(args: Args, device: str = "cpu"):
    """Environments, an agent with its optimizer, and a rollout to be filled."""
    envs = Pendulum(args.num_envs, device)
    torch.manual_seed(args.seed)
    agent = script.Agent(envs, args).to(device)
    agent.adam = script.adam_state(agent)
    agent.adam["learning_rate"] = torch.tensor(args.learning_rate, device=device)
    return envs, agent, script.start(agent, envs, args)


def test_no_host_waits_in_an_iteration_and_no_tensor_moves():
    args = small("--update-epochs 2")
    envs, agent, data = parts(args)

    def places() -> list[int]:
        tensors = [*agent.state_dict().values(), *envs.state_dict().values()]
        return [x.data_ptr() for x in (*tensors, *agent.adam.values(), *data)]

    before, waits = places(), Waits()
    with waits:
        for k in range(2):
            script.rollout(agent, envs, data, args)
            script.update(agent, data, args, k == 0)
    assert waits.found == [] and waits.calls > 1000
    assert before == places()
    with Waits() as control:
        torch.ones(2)[torch.tensor([True, False])].sum().item()
    assert control.found == ["a mask as an index", "_local_scalar_dense"]


def test_a_graph_is_recorded_again_after_a_change(monkeypatch):
    """Of a number of Args, or of what is trained: it holds both as they were."""
    events, (_, agent, _), args = [], parts(small()), small()
    graph = SimpleNamespace(replay=lambda: events.append("replay"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: events.append("record") or graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    recorded = script.Recorded(lambda agent, args: events.append("call"))
    for k in range(8):
        args.ent_coef = 0.5 if k > 4 else 0.0
        agent.critic.requires_grad_(k < 6)
        recorded(agent, args)
    again = ["record", "call", "replay"]
    assert events == 3 * ["call"] + again + ["replay"] + again + again + ["replay"]


@pytest.mark.gpu
@gpu
def test_cuda_graphs_are_eager_to_rounding(tmp_path):
    flags = "--cuda --num-envs 16 --update-epochs 2"
    plain = train(NAME, tmp_path / "plain", f"{flags} --no-cudagraphs", 32)
    graphs = train(NAME, tmp_path / "graphs", flags, 32)
    assert torch.allclose(plain["rollout"][0], graphs["rollout"][0], atol=1e-4)
    for name, x in plain["agent"].items():
        assert torch.allclose(x, graphs["agent"][name], rtol=1e-3, atol=1e-5), name
    assert len(rows(tmp_path / "plain")) == len(rows(tmp_path / "graphs"))


# --- a program ------------------------------------------------------------------------------------
def test_acting_by_hand(tmp_path):
    train(NAME, tmp_path, "--hidden 16 8")
    agent, args = script.load(tmp_path)
    assert args.hidden == (16, 8)
    obs, noise, moments = torch.randn(5, 3), agent.noise(5), Seen()
    moments.mean, moments.var = agent.obs_moments.mean, agent.obs_moments.var
    layers, p = ((0, 2, 4), torch.nn.functional.elu), parameters(agent)
    means = [mlp(p, "actor_mean", moments.standardized(x), *layers).detach() for x in obs]
    expected = 2.0 * torch.stack(means).float()  # half the box is 2
    for given in (None, noise):
        expected += 0.0 if given is None else 2.0 * agent.actor_logstd.detach().exp() * given
        torch.testing.assert_close(agent.act(obs, given), expected, rtol=1e-4, atol=1e-4)
    assert np.array_equal(agent.act(obs.numpy()), agent.act(obs).numpy())


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
    monkeypatch.chdir(tmp_path)
    run = Path("runs/RUN")
    flags = "--env-id my_robots:Point --num-envs 64 --num-steps 32 --total-timesteps 60000"
    checkpoint = train(NAME, run, f"{flags} --update-epochs 2 --hidden 16")
    scores = returns(run)
    assert np.mean(scores[:50]) < -25 and np.mean(scores[-50:]) > -15
    assert checkpoint["envs"].keys() == {"steps", "place", "goal"}
    assert "play with" not in capfd.readouterr().out
    again = ["--evaluate", str(run)]
    refused(capfd, "give --env-id my_robots:Point again", script.parse_args, again)
    args = script.parse_args([*again, "--env-id", "my_robots:Point"])
    refused(capfd, "for your own: see `load`", script.evaluate, args)
    exec(play, {})  # as the page says
    assert -15 < float(capfd.readouterr().out) < 0


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "least"), [(1, -220), (2, -250), (3, -250)])
def test_pendulum_is_learned(seed, least, tmp_path):
    flags = f"{PENDULUM} --total-timesteps 800000 --seed {seed} --run-dir {tmp_path}"
    assert np.mean(returns(script.train(parse(NAME, flags)))[-100:]) > least
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
    obs = envs.reset(torch.ones(512, dtype=torch.bool)).clone()
    theirs = np.stack([single.reset(seed=k)[0] for k in range(512)])
    assert obs.shape == theirs.shape
    np.testing.assert_allclose(obs.mean(dim=0), theirs.mean(axis=0), atol=0.2 * theirs.std())
    np.testing.assert_allclose(obs.std(dim=0), theirs.std(axis=0), rtol=0.2, atol=1e-6)
    kinds = np.abs(obs.numpy() - obs.numpy().mean(0)).max(0) / obs.numpy().std(0)
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
def test_a_resumed_hopper_has_the_bits_of_a_whole_one(tmp_path):
    flags = "--env-id Hopper-v4 --num-envs 16 --update-epochs 2"  # four times as many steps
    whole = train(NAME, tmp_path / "whole", flags, 24)
    train(NAME, tmp_path / "parts", flags, 12)
    resumed = resume(NAME, tmp_path / "parts", f"--total-timesteps {24 * STEPS[NAME]}")
    for name in ("agent", "adam", "envs", "rollout", "returns", "lengths", "rng"):
        assert_same(resumed[name], whole[name])


@pytest.mark.slow
@no_warp
def test_half_cheetah_on_warp_improves(tmp_path):
    flags = "--env-id HalfCheetah-v4 --num-envs 64 --num-steps 64 --hidden 64 64 --no-cuda"
    script.train(parse(NAME, f"{flags} --total-timesteps 300000 --run-dir {tmp_path}"))
    assert np.mean(returns(tmp_path)[-64:]) > np.mean(returns(tmp_path)[:64]) + 300
