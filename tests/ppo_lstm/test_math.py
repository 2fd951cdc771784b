"""ppo_lstm.py: the memory's state where episodes begin and end, acting with it, going on with it.
What it shares with ppo_pixels.py is tested there, an update in algorithms/test_mixed.py."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from program import returns
from scripts import train

import ppo_lstm as script
from ppo_lstm import Args, Memory

SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-cuda"
EVERYTHING = "--memory gru --previous-action --separate-critic --memory-size 16"
MEMORIES = pytest.mark.parametrize("flags", ["", EVERYTHING], ids=str)


class Known(gym.Env):
    """Random vectors; episodes of 3, 4, 5, ... 9 steps and again, of which those of odd length
    terminate and the others are cut off. A choice between three and two numbers."""

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 3, (2,))])

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, 3 + seed % 7
        return self.look(), {}

    def look(self):
        return self.np_random.normal(size=5).astype(np.float32)

    def step(self, action):
        self.t += 1
        over, odd = self.t == self.length, self.length % 2 == 1
        return self.look(), float(action[0]), over and odd, over and not odd, {}


gym.register("Known-v0", Known)


def parse(flags: str = "") -> Args:
    return script.parse_args(f"--env-id Known-v0 {SMALL} {flags}".split())


# --- the memory -----------------------------------------------------------------------------------
def test_what_is_made():
    """The kinds, their sizes and initial weights (Huang et al. 2022, LSTM detail 1)."""
    for flags, state in [
        ({}, 256),
        ({"memory": "gru"}, 128),
        ({"separate_critic": True, "memory_size": 7}, 28),
        ({"previous_action": True, "memory_size": 7}, 14 + 5 + 1),
    ]:
        agent = script.Agent(Known(), Args(**flags))
        assert agent.initial_state(3).shape == (3, state)
        assert not agent.initial_state(3).any()
        for memory in agent.memories:
            for name, parameter in memory.net.named_parameters():
                if "bias" in name:
                    assert not parameter.any()
                else:
                    singular = torch.linalg.svdvals(parameter.detach())
                    torch.testing.assert_close(singular, torch.ones_like(singular))
    for kind, net in (("lstm", torch.nn.LSTMCell(3, 5)), ("gru", torch.nn.GRUCell(3, 5))):
        memory = Memory(3, Args(memory=kind, memory_size=5, memory_span=16))
        # only a bias decides how much of the state is left
        with torch.no_grad():
            for own, other in zip(net.parameters(), memory.net.parameters(), strict=True):
                own.copy_(other if own.ndim == 1 else 0.0 * other)
            before = torch.ones(1, 5)
            after = net(torch.zeros(1, 3), before if kind == "gru" else (0 * before, before))
        left = after if kind == "gru" else after[1]
        kept = [1 - 1 / (1 + 16 ** (k / 4)) for k in range(5)]
        torch.testing.assert_close(left[0], torch.tensor(kept))


# --- acting and learning --------------------------------------------------------------------------
@MEMORIES
def test_learning_goes_through_the_states_that_acting_went_through(flags):
    """Whole sequences as in learning, row by row as in acting; a louder memory shows more."""
    args, starts = parse(f"--learning-rate 1e-12 {flags}"), 0
    run = SimpleNamespace(log_rollout=lambda *x: None)
    envs = script.make_envs(args, 4, {})
    agent = script.Agent(envs, args)
    with torch.no_grad():
        for parameter in agent.memories.parameters():
            parameter *= 3.0
        agent.critic.weight *= 3.0
        agent.actor.weight *= 30.0
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5)
    last = agent.initial_state(4)
    for k in range(3):
        agent.rng = np.random.default_rng(k)
        data, last = script.rollout(agent, envs, last, run, args)
        starts += int(data.episode_starts.sum())
        obs = data.obs.map(lambda x: x[:-1].transpose(0, 1))
        inputs = data.episode_starts.T, data.actions.transpose(0, 1)
        with torch.no_grad():
            _, logprob, _, value, _ = agent.get_action_and_value(obs, data.state, *inputs)
            _, other, *_ = agent.get_action_and_value(obs, 0.0 * data.state, *inputs)
        torch.testing.assert_close(logprob.T, data.logprobs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(value.T, data.values[:-1], atol=1e-5, rtol=1e-4)
        assert k == 0 or (other - logprob).abs().max() > 1e-2
        if k == 0:  # the first update would change the scale before it learns
            agent.update_moments(data)
    assert starts > 12
    metrics = script.update(agent, data, args)
    assert abs(metrics["losses/approx_kl"]) < 1e-6
    assert metrics["losses/clipfrac"] == 0


@MEMORIES
def test_a_saved_policy_acts_as_it_did(tmp_path, flags):
    """A loop of one's own, over gymnasium's environment, is what --evaluate plays."""
    folder = script.train(parse(f"--run-dir {tmp_path / 'run'} --total-timesteps 128 {flags}"))
    agent, args = script.load(folder)
    seed = script.episode_seed(args.seed, 2**31)
    env, state, played = gym.make("Known-v0"), agent.initial_state(1), []
    for episode in range(6):
        obs, _ = env.reset(seed=script.episode_seed(seed, 0, episode))
        state[0], score, over = 0.0, 0.0, False
        while not over:
            choice, numbers = agent.act(obs[None], state=state)
            obs, reward, terminated, truncated, _ = env.step((choice[0], numbers[0]))
            score, over = score + reward, terminated or truncated
        played.append(score)
    assert script.evaluate(parse(f"--evaluate {folder} --eval-episodes 6")) == pytest.approx(played)
    assert len({*played}) > 1


# --- it learns ------------------------------------------------------------------------------------
LEARN = """--env-id benchmark.published.novel:Cue-v0 --env-kwargs {"delay":4} --num-envs 16
--num-steps 128 --num-minibatches 4 --learning-rate 1e-3 --total-timesteps 32768"""


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["lstm", "gru", "cleared in each row", "ppo_pixels"])
def test_a_sign_is_remembered_by_a_memory(tmp_path, memory, monkeypatch):
    """A sign shown four steps before it is needed: at best 1; 0.5 without a memory."""
    plain = script.Agent.policy

    def cleared(self, obs, state, episode_starts=None, action=None):
        every = None if episode_starts is None else torch.ones_like(episode_starts)
        return plain(self, obs, torch.zeros_like(state), every, action)

    if memory == "cleared in each row":
        monkeypatch.setattr(script.Agent, "policy", cleared)
    kind = f"--memory {'gru' if memory == 'gru' else 'lstm'} --memory-size 32 --memory-span 16"
    name, flags = ("ppo_pixels", "") if memory == "ppo_pixels" else ("ppo_lstm", kind)
    train(name, tmp_path / "run", f"{LEARN} --update-epochs 4 {flags}")
    score = np.mean(returns(tmp_path / "run")[-100:])
    assert score >= 0.95 if memory in ("lstm", "gru") else score <= 0.65
