"""ppo_kl_adaptive.py (Coady 2017; Schulman et al. 2017, section 4), which learns from whole
episodes."""

import math
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import reference
import torch
from common import BOX, CLIPPED, SEEN, make, record, same
from reference import Adam, Seen, advantages, clipped_objective, descend, mean, mlp, parameters

# Of each environment its episodes: steps and how they end. 552 steps in all are two minibatches of
# the value function. Between episodes stands a row of junk, after the last one the others are idle.
COLUMNS = [[(40, "T"), (130, "L"), (77, "T")], [(200, "L"), (105, "T")]]
SERVOS = {
    "coady": {"servo": "coady", "learning_rate": 0.002},
    "coady, slow": {"servo": "coady", "learning_rate": 1e-5, "bootstrap_truncation": True},
    "schulman": {"servo": "schulman", "learning_rate": 0.003, "lambda_returns": True},
    "learning-rate": {"servo": "learning-rate", "learning_rate": 0.01},
    "choices": {"servo": "schulman", "learning_rate": 0.004, "gamma": 0.9995},
}
UNITS = 0, 2, 4, 6  # the linear layers


class Servo:
    """How beta and the learning rate follow the KL, in the words of both papers."""

    def __init__(self, kind: str):
        kinds = {"coady": (0.003, 2, 1.0), "schulman": (0.01, 1.5, 1.0)}
        self.kind, self.rate = kind, 1.0
        self.d, factor, self.beta = kinds.get(kind, (0.01, 2, 0.0))
        self.low, self.high = self.d / factor, self.d * factor

    def after_pass(self, kl: float, rate: float):
        if self.kind == "learning-rate":
            by = 1 / 1.5 if kl > self.high else 1.5 if 0 < kl < self.low else 1
            self.rate = min(max(self.rate * by, 1e-5 / rate), 1e-2 / rate)

    def after_update(self, kl: float):
        up, down = kl > self.high, kl < self.low
        if self.kind == "schulman":
            self.beta *= 2 if up else 0.5 if down else 1
        if self.kind == "coady":
            self.beta *= 1.5 if up else 1 / 1.5 if down else 1
            self.beta = min(max(self.beta, 1 / 35), 35)
            self.rate /= 1.5 if up and self.beta > 30 and self.rate > 0.1 else 1
            self.rate *= 1.5 if down and self.beta < 1 / 30 and self.rate < 10 else 1


def layout():
    """Of each episode its rows (t, column) and the last observation's; the rollout's arrays."""
    T = max(sum(n + 1 for n, _ in column) - 1 for column in COLUMNS)
    time = np.zeros((T + 1, len(COLUMNS)), int)
    terminated, truncated, valid = np.zeros((3, T, len(COLUMNS)), bool)
    episodes = []
    for i, column in enumerate(COLUMNS):
        t = 0
        for n, end in column:
            episodes.append([(t + k, i) for k in range(n + 1)])
            time[t : t + n + 1, i] = range(n + 1)
            valid[t : t + n, i] = True
            (terminated if end == "T" else truncated)[t + n - 1, i] = True
            t += n + 1
    return episodes, time, terminated, truncated, valid


@pytest.mark.parametrize("name", SERVOS)
def test_updates_are_those_of_the_reference(name):
    discrete = name == "choices"
    flags = {"update_epochs": 3, "value_epochs": 3, "hid1_mult": 2, "value_learning_rate": 0.002}
    flags |= {"episodes_per_batch": 5, "num_envs": 2}
    space = gym.spaces.Discrete(3) if discrete else BOX
    module, args, agent = make("ppo_kl_adaptive", SEEN, space, **flags | SERVOS[name])
    agent.policy_adam, agent.value_adam = module.optimizers(agent)
    p, seen, moments, servo = parameters(agent), Counter(), Seen(), Servo(args.servo)
    adams, replay, rng = (Adam(1e-8), Adam(1e-8)), [], np.random.default_rng(7)
    speeds = {"actor_logvar": 100 * 2 // 48}
    warm = rng.normal(0, [1, 5, 0.1], (50, 3))
    moments.add(warm)
    agent.obs_moments.update(warm)
    episodes, time, terminated, truncated, valid = layout()
    steps = [(int(t), int(i)) for t, i in np.argwhere(valid)]  # in the order of the batch
    assert len(steps) == 552 and (~valid).sum() > 50
    for _ in range(2):
        args.learning_rate *= 0.9  # a schedule's
        args.value_learning_rate *= 0.9
        obs = rng.normal(0, [1, 5, 0.1], (*time.shape, 3)).astype(np.float32)
        normal = rng.normal(0, 1, (*valid.shape, 2)).astype(np.float32)
        actions = rng.integers(0, 3, valid.shape) if discrete else normal
        rewards = np.where(valid, rng.normal(0, 1, valid.shape), 1e3)
        data = module.Rollout(obs, time, actions, rewards, terminated, truncated, valid)

        def features(at, obs=obs):
            x = (torch.as_tensor(obs[at]).double() - moments.mean) / 3
            clock = torch.tensor([0.001 * time[at]]).double()
            return torch.cat([x / (moments.var.sqrt() + 0.1), clock])

        def policy(p, x, action):
            """Log-probability, entropy, and what the KL needs."""
            output = mlp(p, "actor", x, UNITS)
            if discrete:
                return *reference.choice(output, int(action)), output.log_softmax(-1)
            std = (p["actor_logvar"] / 2).exp()
            return *reference.gaussian(torch.as_tensor(action).double(), output, std), (output, std)

        def kl(old, new):  # of the old policy from the new one
            if discrete:
                return (old.exp() * (old - new)).sum()
            (m0, s0), (m1, s1) = old, new
            return ((s1 / s0).log() + (s0**2 + (m0 - m1) ** 2) / (2 * s1**2) - 0.5).sum()

        inputs = {at: features(at) for episode in episodes for at in episode}
        with torch.no_grad():
            v = {at: float(mlp(p, "critic", x, UNITS)[0]) for at, x in inputs.items()}
            old = {at: policy(p, inputs[at], actions[at]) for at in steps}
        scale = 1 - args.gamma if args.gamma < 0.999 else 1
        a, targets = {}, {}
        for *rows, last in episodes:
            paid = [scale * rewards[at] for at in rows]
            no = [False] * len(rows)
            end = [*no[1:], True]
            dies = terminated[rows[-1]] or not args.bootstrap_truncation
            ends = (end, no) if dies else (no, end)
            values = [v[at] for at in (*rows, last)]
            gains = advantages(paid, values, *ends, args.gamma, args.gae_lambda)
            a |= dict(zip(rows, gains, strict=True))
            if args.lambda_returns:
                sums = [a[at] + v[at] for at in rows]
            else:  # discounted sums of what was paid, then of the value after a limit
                nothing = [0.0] * len(rows)
                sums = advantages(paid, [*nothing, values[-1]], *ends, args.gamma, 1.0)
            targets |= dict(zip(rows, sums, strict=True))
            seen["dies" if dies else "lives on"] += 1
        centre = mean([*a.values()])
        width = math.sqrt(mean([(x - centre) ** 2 for x in a.values()])) + 1e-6
        a = {at: (x - centre) / width for at, x in a.items()}
        orders, start = record(agent), parameters(agent)
        metrics = module.update(agent, data, args)

        for epoch in range(args.update_epochs + 1):
            new = {at: policy(p, inputs[at], actions[at]) for at in steps}
            ratios = {at: (new[at][0] - old[at][0]).exp() for at in steps}
            far = mean([kl(old[at][2], new[at][2]) for at in steps])
            gain = [ratios[at] * a[at] for at in steps]
            policy_loss = -float(mean(gain).detach())
            if args.servo == "learning-rate":
                gain = [clipped_objective(ratios[at], a[at], 0.2, seen) for at in steps]
            loss = -mean(gain) + servo.beta * far
            if args.servo == "coady" and far > 2 * servo.d:
                loss = loss + 50 * (far - 2 * servo.d) ** 2
            servo.after_pass(float(far.detach()), args.learning_rate)
            stop = args.servo == "coady" and far > 4 * servo.d
            if epoch == args.update_epochs or stop:
                break
            seen["hinge"] += args.servo == "coady" and bool(far > 2 * servo.d)
            rate = args.learning_rate * servo.rate
            descend(p, "actor", loss, adams[0], rate, speeds)
        servo.after_update(float(far.detach()))
        seen["stop" if stop else "beta up" if servo.beta > 1 else "down"] += 1

        batch = [(inputs[at], targets[at]) for at in steps]
        pool, size = batch + replay, len(batch) // (len(batch) // 256)
        for order in orders.minibatches(1, range(len(pool))):
            for first in range(0, len(batch) // size * size, size):
                rows = [pool[n] for n in order[0][first : first + size]]
                errors = [(mlp(p, "critic", x, UNITS)[0] - y) ** 2 for x, y in rows]
                descend(p, "critic", mean(errors), adams[1], args.value_learning_rate)
        assert len(orders.given) == args.value_epochs
        replay = batch
        assert len(agent.replay[1]) == len(replay)  # the batch before, no more
        entropy = float(mean([x[1] for x in new.values()]).detach())
        value_loss = mean([(targets[at] - v[at]) ** 2 for at in steps])
        expected = {"policy_loss": policy_loss, "kl": float(far.detach()), "entropy": entropy}
        expected |= {"value_loss": value_loss}
        same(agent, metrics, expected, p, start, args.learning_rate)
        if not discrete:
            deviation = float(mean((p["actor_logvar"].detach() / 2).exp()))
            assert metrics["charts/policy_std"] == pytest.approx(deviation)
        assert metrics["charts/policy_passes"] == epoch
        assert metrics["charts/beta"] == pytest.approx(servo.beta)
        assert metrics["charts/lr_multiplier"] == pytest.approx(servo.rate)
        moments.add([obs[at] for at in steps])
    torch.testing.assert_close(agent.obs_moments.var, moments.var)
    assert name != "coady" or seen["hinge"]
    assert seen["dies"] and bool(seen["lives on"]) == args.bootstrap_truncation
    expected = {"coady": {"stop"}, "coady, slow": {"down"}, "learning-rate": CLIPPED}
    assert expected.get(name, set()) - {("gradient", "clipped")} <= seen.keys()
