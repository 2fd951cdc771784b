"""ppo_kl_adaptive.py: golden numbers of the original program, the servo's limits, sizes and initial
weights, whole episodes, budgets. Updates are in algorithms/test_kl_adaptive.py."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scripts
import torch
from gymnasium import spaces
from program import rows, scalars

import ppo_kl_adaptive as script
from ppo_kl_adaptive import Agent, Args, Batch, Gaussian, Rollout, Servo


def make_agent(obs_dim=3, actions=2, discrete=False, **args) -> Agent:
    torch.manual_seed(0)
    box = spaces.Box(-1.0, 1.0, (actions,), np.float32)
    problem = SimpleNamespace(
        observation_space=spaces.Box(-np.inf, np.inf, (obs_dim,)),
        action_space=spaces.Discrete(actions) if discrete else box,
    )
    agent = Agent(problem, Args(**args))
    agent.policy_adam, agent.value_adam = script.optimizers(agent)
    return agent


def servo(preset="coady", **numbers) -> Servo:
    return dataclasses.replace(make_agent(servo=preset).servo, **numbers)


# --- golden numbers -------------------------------------------------------------------------------
def test_the_kl_of_the_old_policy_from_the_new_one():
    old, new = (Gaussian(torch.tensor([[m]]), torch.tensor([[v]])) for m, v in ((0, 0), (0.1, 0.2)))
    assert old.kl(new).item() == pytest.approx(0.0134590303, rel=1e-4)
    assert new.kl(old).item() == pytest.approx(0.0157013791, rel=1e-4)
    normal = torch.distributions.Normal(new.mean, (0.5 * new.logvar).exp())
    action = torch.tensor([[0.7]])
    torch.testing.assert_close(new.log_prob(action), normal.log_prob(action).sum(-1))


def test_the_loss_and_its_hinge():
    def loss(ratio, advantages, kl, **numbers):
        ratio = torch.tensor(ratio)
        policy = SimpleNamespace(log_prob=lambda _: ratio.log(), entropy=lambda: torch.zeros(2))
        agent = SimpleNamespace(policy=lambda _: policy, servo=servo(**numbers))
        old = SimpleNamespace(kl=lambda new: torch.tensor(kl))
        batch = Batch(None, None, old, torch.zeros(len(ratio)), torch.tensor(advantages), None)
        return script.ppo_loss(agent, batch)[0].item()

    assert loss([1.1, 0.9], [1.0, -1.0], 0.02) == pytest.approx(-0.0702, rel=1e-4)
    assert loss([1.0, 1.0], [0.0, 0.0], 0.0059, beta=3.0) == pytest.approx(0.0177, rel=1e-4)
    # of the mean KL; that of the hinges is not 0
    assert loss([1.0, 1.0], [0.0, 0.0], [0.0, 0.01]) == pytest.approx(0.005, rel=1e-4)


def test_advantages_and_returns():
    def of(**args):
        last = np.arange(4)[:, None] == 3
        rewards = np.array([1.0, 2.0, -1.0, 0.5])[:, None]
        data = Rollout(None, None, None, rewards, last & False, last, np.ones_like(last))
        values = np.array([0.3, 0.1, -0.2, 0.4, 0.7])[:, None]
        return [x[:, 0] for x in script.advantages_and_returns(data, values, Args(**args))]

    assert of()[0] == pytest.approx([-0.28200761, -0.08871665, 0.20539775, -0.3975])
    assert of()[1] == pytest.approx([0.01246256, 0.00750006, -0.0025125, 0.0025], rel=1e-5)
    for gamma, scale in ((0.999, 1.0), (0.9989, 0.0011), (0.9995, 1.0)):
        assert of(gamma=gamma)[1][-1] == pytest.approx(0.5 * scale)


# --- the servo ------------------------------------------------------------------------------------
CLIMB = [1.5**k for k in range(1, 9)] + 12 * [35.0]
FALL = 8 * [1.0] + [1.5**-k for k in range(1, 7)] + 6 * [1.5**-6]


@pytest.mark.parametrize("kl", [1.0, 0.0])
def test_beta_climbs_to_its_limit_and_then_the_rate_falls(kl):
    it, seen = servo(), []
    for _ in range(20):
        it.adapt(kl)
        seen.append((it.beta, it.lr_multiplier) if kl else (1 / it.beta, 1 / it.lr_multiplier))
    betas, rates = np.transpose(seen)
    assert betas == pytest.approx(CLIMB) and rates == pytest.approx(FALL)
    it.adapt(1.0 - kl)  # from its limit, not on the powers it came by
    assert it.beta == pytest.approx(35 / 1.5 if kl else 1.5 / 35)
    for beta in (29.9, 30.1):
        it = servo(beta=beta / 1.5 if kl else 1.5 / beta)
        it.adapt(kl)
        assert (it.lr_multiplier == 1.0) == (beta < 30)


@pytest.mark.parametrize(
    ("preset", "above", "below", "raised", "lowered"),
    [("coady", 2, 0.5, 1.5, 1 / 1.5), ("schulman", 1.5, 1 / 1.5, 2, 0.5), ("fixed", 9, 0, 1, 1)],
)
def test_thresholds_are_strict(preset, above, below, raised, lowered):
    def after(targets):
        it = servo(preset)
        it.adapt(np.float64(targets) * it.kl_targ)
        return it.beta

    assert [after(x) for x in (above, 1.0, below * (1 + 1e-15))] == [1.0] * 3
    assert after(above * (1 + 1e-9)) == pytest.approx(raised)
    assert after(below * (1 - 1e-9)) == pytest.approx(lowered)


def test_schulmans_beta_has_a_floor_and_the_rates_own_servo_two_limits():
    it = servo("schulman")
    for _ in range(1100):  # without a floor it would be 0 now, and stay there
        it.adapt(0.0)
    assert it.beta == 1e-3

    def rate(kl, times=1):
        it = servo("learning-rate")
        for _ in range(times):
            it.adapt_rate(kl, 3e-4)
            it.adapt(kl)
        assert it.beta == 0.0
        return 3e-4 * it.lr_multiplier

    assert [rate(kl) for kl in (0.0, 0.005, 0.01, 0.02)] == [3e-4] * 4
    assert (rate(0.0201), rate(0.0049)) == pytest.approx((2e-4, 4.5e-4))
    assert (rate(1.0, 50), rate(1e-4, 50)) == pytest.approx((1e-5, 1e-2))
    kinds = {"coady": (1.0, 0.003), "schulman": (1.0, 0.01), "learning-rate": (0.0, 0.01)}
    for kind, numbers in kinds.items():
        assert (servo(kind).beta, servo(kind).kl_targ) == numbers
        given = make_agent(servo=kind, beta=0.0, kl_targ=0.03).servo  # 0 is a number
        assert (given.beta, given.kl_targ) == (0.0, 0.03)
    assert [servo(kind).early_stop for kind in kinds] == [4.0, math.inf, math.inf]


# --- sizes, weights, samples ----------------------------------------------------------------------
SIZES = {  # inputs, actions; policy: layers, rate, speed, parameters, entropy; value: the same
    "Reacher": (12, 2, (120, 48, 20), 1.299e-4, 4, 8398, 1.8379, (120, 24, 5), 2.041e-3, 4595),
    "Hopper": (12, 3, (120, 60, 30), 1.162e-4, 6, 10761, 2.7568, (120, 24, 5), 2.041e-3, 4595),
    "HalfCheetah":
        (18, 6, (180, 103, 60), 8.868e-5, 12, 28741, 5.5136, (180, 30, 5), 1.826e-3, 9011),
}  # fmt: skip


def layers(net) -> list[torch.nn.Linear]:
    return [layer for layer in net if isinstance(layer, torch.nn.Linear)]


def count(net) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("env", SIZES)
def test_sizes_rates_entropy_and_weights(env):
    inputs, actions, hidden, rate, speed, number, entropy, *value = SIZES[env]
    agent = make_agent(inputs - 1, actions)
    assert tuple(layer.out_features for layer in layers(agent.actor)) == (*hidden, actions)
    assert agent.policy_adam.defaults["lr"] == pytest.approx(rate, rel=1e-3)
    assert agent.policy_adam.param_groups[1]["speed"] == speed
    assert count(agent.actor) + speed * actions == number
    assert agent.policy(torch.zeros(1, inputs)).entropy().item() == pytest.approx(entropy, abs=1e-4)
    assert tuple(layer.out_features for layer in layers(agent.critic)) == (*value[0], 1)
    assert agent.value_adam.param_groups[0]["lr"] == pytest.approx(value[1], rel=1e-3)
    assert count(agent.critic) == value[2]
    for layer in (*layers(agent.actor), *layers(agent.critic)):  # normal, not truncated; biases 0
        assert (layer.bias == 0).all()
        scaled = layer.weight.detach() * layer.in_features**0.5
        error = 4 / (2 * scaled.numel()) ** 0.5
        assert scaled.std(correction=0).item() == pytest.approx(1.0, abs=max(error, 0.01))
    assert (agent.actor[2].weight * agent.actor[2].in_features ** 0.5).abs().max() > 3.0
    agent = make_agent(11, 3, hid1_mult=3, policy_logvar=-2.0)  # as given
    assert [layer.out_features for layer in layers(agent.actor)] == [36, 32, 30, 3]
    assert agent.actor_logvar.tolist() == [-2.0] * 3


@pytest.mark.parametrize("discrete", [False, True])
def test_act_draws_from_the_policy(discrete):
    agent = make_agent(actions=4, discrete=discrete, policy_logvar=0.7)
    agent.obs_moments.update(np.random.default_rng(0).normal(1.0, 2.0, (99, 3)))
    with torch.no_grad():
        for p in agent.actor.parameters():
            p.add_(0.1 * torch.randn_like(p))
    obs = np.random.default_rng(3).normal(1.0, 2.0, (200, 3)).astype(np.float32)
    time = np.arange(200) * 5
    with torch.no_grad():
        policy = agent.policy(agent.features(torch.as_tensor(obs), torch.as_tensor(time)))
    best = (policy.logprobs.argmax(-1) if discrete else policy.mean).numpy()
    np.testing.assert_allclose(agent.act(obs, time=time), best, rtol=1e-4, atol=1e-5)
    assert (agent.act(obs, time=time) != agent.act(obs)).any()
    sample = agent.act(np.repeat(obs[:1], 40_000, 0), agent.noise(40_000), time[0])
    if discrete:
        frequencies = np.bincount(sample, minlength=4) / 40_000
        assert frequencies == pytest.approx(policy.logprobs[0].exp().numpy(), abs=0.01)
    else:
        np.testing.assert_allclose(sample.mean(axis=0), policy.mean[0], atol=0.03)
        variance = policy.logvar[0].exp().numpy()
        assert np.cov(sample.T) == pytest.approx(variance * np.eye(4), abs=0.06)


# --- whole episodes -------------------------------------------------------------------------------
def start(env_id="toys:Clock-v0", num_envs=1):
    """An agent, its environments, and what a rollout needs of a run."""
    args = Args(env_id=env_id, num_envs=num_envs)
    envs = script.make_envs(args, num_envs, {})
    torch.manual_seed(0)
    agent = Agent(envs, args)
    agent.policy_adam, agent.value_adam = script.optimizers(agent)
    return agent, envs, SimpleNamespace(episodes=[(0, 0.0, [])] * num_envs), args


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_exactly_b_whole_episodes(num_envs):
    agent, envs, run, _ = start(num_envs=num_envs)
    lengths, steps = [], 0
    for _ in range(80):
        data = script.rollout(agent, envs, run, 8)
        ends = np.argwhere(data.terminated)
        assert len(ends) == 8 and not data.truncated.any()
        for t, i in ends:
            n = data.time[t + 1, i]
            assert data.valid[t + 1 - n : t + 1, i].all()
            assert data.time[t + 1 - n : t + 2, i].tolist() == list(range(n + 1))
            assert data.obs[t + 1 - n : t + 2, i, 1].tolist() == list(range(n + 1))
            lengths.append(n)
        steps += data.valid.sum()
        assert data.rewards.sum() == data.valid.sum() and (data.rewards[~data.valid] == 0).all()
    assert steps == sum(lengths) == sum(len(env.unwrapped.actions) for env in envs.envs)
    numbers = [number for number, *_ in run.episodes]
    assert sum(numbers) == 640 and [x + 1 for x in envs.episode_numbers] == numbers
    # the first b to end, of more side by side, would be shorter
    assert np.mean(lengths) == pytest.approx(25.5, abs=3.5 * np.std(np.arange(1, 51)) / 640**0.5)
    agent, envs, run, _ = start("toys:Limit4-v0", num_envs)  # a time limit is told from an end
    data = script.rollout(agent, envs, run, 3)
    assert data.truncated.sum() == 3 and not data.terminated.any()
    assert (data.obs[1:][data.truncated][:, 1] == 4).all()


# --- runs -----------------------------------------------------------------------------------------
# Every KL is too high, which moves beta in each iteration and the learning rate from the second on
SMALL = (
    "--env-id CartPole-v1 --hid1-mult 4 --episodes-per-batch 5 --update-epochs 3 --value-epochs 2 "
    "--kl-targ 1e-9 --beta 15 --checkpoint-interval 2 --no-cuda"
)


parse = partial(scripts.parse, "ppo_kl_adaptive")


def train(folder: Path, flags: str) -> dict:
    script.train(parse(f"{SMALL} --run-dir {folder} {flags}"))
    return script.load_checkpoint(folder)


def test_budgets_and_what_a_resumed_run_takes_from_its_flags(tmp_path, monkeypatch):
    """Rates and target; beta and the multiplier are the run's. The warm-up only sets the scale."""
    folder, seen, plain = tmp_path / "run", [], script.rollout

    def rollout(agent, envs, run, num_episodes):
        if run.global_step == 0:
            seen.append((num_episodes, agent.obs_moments.count.item()))
        return plain(agent, envs, run, num_episodes)

    monkeypatch.setattr(script, "rollout", rollout)
    first = train(folder, "-n 20 --num-envs 2")
    assert seen[0] == (5, 0) and seen[1][0] == 5 and len(seen) == 2
    assert first["agent"]["obs_moments.count"] == seen[1][1] + first["global_step"]
    assert seen[1][1] > 5 * 8
    assert sum(number for number, *_ in first["episodes"]) == 25
    scores, lengths = np.array([episode[1:] for episode in rows(folder)[1:]], float).T
    assert scores.tolist() == lengths.tolist() and sum(lengths) == first["global_step"]
    assert first["iteration"] == 4 and len(rows(folder)) == 1 + 20
    points = scalars(folder)
    betas = [value for _, value in points["charts/beta"]]
    assert betas == pytest.approx([22.5, 33.75, 35, 35])
    assert points["charts/lr_multiplier"][-1][1] == pytest.approx(1.5**-3)
    assert first["servo"] == {"beta": 35.0, "lr_multiplier": pytest.approx(1.5**-3)}
    found, update = [], script.update

    def spy(agent, *given):
        found.append((agent.servo.kl_targ, agent.servo.beta, len(agent.replay[1]) > 5))
        metrics = update(agent, *given)
        found.append([x.param_groups[0]["lr"] for x in (agent.policy_adam, agent.value_adam)])
        return metrics

    rates = "--learning-rate 1e-5 --value-learning-rate 1e-6"
    with monkeypatch.context() as patch:
        patch.setattr(script, "update", spy)
        script.train(parse(f"--resume {folder} {rates} -k 0.7 -b 10 -n 30"))
    assert len(rows(folder)) == 1 + 30
    assert found == [(0.7, 35, True), [pytest.approx(1e-5 * 1.5**-3), 1e-6]]
    rates = "--learning-rate 0 --value-learning-rate 0"  # 0 is a number
    short, long = (train(tmp_path / n, f"-n {n} {rates}")["agent"] for n in ("5", "10"))
    assert all(torch.equal(short[name], long[name]) for name in short if "moments" not in name)
    checkpoint = train(tmp_path / "steps", "--total-timesteps 500")
    *_, (before, _), (end, _) = scalars(tmp_path / "steps")["charts/beta"]
    assert before < 500 <= end == checkpoint["global_step"]


@pytest.mark.slow
def test_inverted_pendulum_within_1000_episodes():
    agent, envs, run, args = start("InvertedPendulum-v4")
    warm_up = script.rollout(agent, envs, run, 5)
    agent.obs_moments.update(warm_up.obs[:-1][warm_up.valid])
    kls, passes, best = [], [], 0.0
    while run.episodes[0][0] < 1005 and best < 950:
        data = script.rollout(agent, envs, run, 20)
        metrics = script.update(agent, data, args)
        kls.append(metrics["losses/kl"])
        passes.append(metrics["charts/policy_passes"])
        best = data.rewards.sum() / 20
    assert best >= 950
    assert 0.002 < np.mean(kls) < 0.005
    assert np.mean(np.array(passes) < 20) < 0.2
