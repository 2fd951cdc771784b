"""ppo_atari_lstm.py: the recurrent state where episodes end, its replay in learning, acting with
it. Most tests replace EnvPool's games by Frame, whose ends are known."""

import hashlib
from pathlib import Path

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from maths import Player, program, returns, see_coarsely
from program import Toy

import ppo_atari_lstm as script
import ppo_atari_multigpu
from ppo_atari_lstm import Args

NAME = "ppo_atari_lstm"


class Frame(Toy):
    """Toy, of which one frame is seen: a new one each step, so that memory matters."""

    observation_space = gym.spaces.Box(0, 255, (1, 84, 84), np.uint8)

    def __init__(self, name, *, stack_num, **more):
        assert stack_num == 1
        super().__init__(name, **more)

    def obs(self):
        shifted = [np.roll(p[:1], 5 * t) for p, t in zip(self.pixels, self.t, strict=True)]
        return np.stack(shifted).astype(np.uint8)


@pytest.fixture
def frames(monkeypatch):
    monkeypatch.setattr(envpool, "make", Frame)
    monkeypatch.setattr(Toy, "made", [])
    return Toy.made


parse, small, train = program(NAME)


# --- the state where episodes end -----------------------------------------------------------------
def test_the_state_is_cleared_before_the_row_after_the_ended_one(frames):
    """Environment 0 has lives of 3 steps: row 3 has the last observation, row 4 is the next
    episode's first, and so on in fours, also from one rollout to the next."""
    game = Player(NAME, small("--num-steps 10"), 1.0)
    calls = []  # of every call of the LSTM, the state that it got and the one that it left

    def note(module, given, output):
        calls.append([torch.cat(state).detach().clone() for state in (given[1], output[1])])

    game.agent.lstm.register_forward_hook(note)
    rollouts = [game.roll(), game.roll()]
    del calls[10], calls[-1]  # of the values after the rollouts
    after = torch.zeros(2, 4, 128)
    for row, (used, left) in enumerate(calls):
        for i, life in enumerate([3, 4, 5, 3]):
            begins = row % (life + 1) == 0
            assert bool(rollouts[row // 10].first[row % 10, i]) == begins
            if begins:
                assert not used[:, i].any()
            else:  # in the ended row, too
                assert torch.equal(used[:, i], after[:, i])
                assert (used[:, i] != 0).all()
        after = left
    assert not rollouts[0].state.any()
    assert torch.equal(rollouts[1].state, calls[9][1])
    assert torch.equal(game.state, calls[19][1])


def test_learning_goes_through_the_states_that_acting_went_through(frames):
    """In the first minibatch, with the parameters as they were: the spec's replay check."""
    game = Player(NAME, small("--num-steps 10 --num-minibatches 1"), 3.0)
    for data in (game.roll(), game.roll(), game.roll()):
        flat = (x.flatten(0, 1) for x in (data.obs, data.first, data.actions))
        obs, first, actions = flat
        _, logprob, _, value, after = game.agent(obs, data.state, first, actions)
        torch.testing.assert_close(logprob, data.logprobs.flatten(), atol=1e-5, rtol=0)
        torch.testing.assert_close(value, data.values[:-1].flatten(), atol=1e-5, rtol=1e-5)
        other = game.agent(obs, torch.zeros_like(data.state), first, actions)[3]
        assert (other - value).abs().max() > 1e-3 or not data.state.any()
    torch.testing.assert_close(after, game.state, atol=1e-5, rtol=1e-5)
    metrics = script.update(game.agent, data, 0, 1e-9, game.args)
    assert abs(metrics["losses/approx_kl"]) < 1e-6
    assert metrics["losses/clipfrac"] == 0


class Cue:
    """The first frame lights the left or the right half, dark ones follow, then a bar asks: which?
    One of 4 actions is right and pays 1, others cost 1. Without memory 0 is the best mean."""

    observation_space = gym.spaces.Box(0, 255, (1, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)
    delay = 2

    def __init__(self, name, *, num_envs, seed, **config):
        self.rng, self.n = np.random.default_rng(seed), num_envs
        self.cue, self.t = self.rng.integers(0, 2, num_envs), np.zeros(num_envs, int)
        self.over = np.zeros(num_envs, bool)

    def reset(self):
        obs = np.zeros((self.n, 1, 84, 84), np.uint8)
        for i, (cue, t) in enumerate(zip(self.cue, self.t, strict=True)):
            obs[i, 0, :, 42 * cue : 42 * (cue + 1)] = 255 * (t == 0)
            obs[i, 0, 36:48] += np.uint8(255 * (t == self.delay))
        return obs, {}

    def step(self, actions):
        asked = ~self.over & (self.t == self.delay)
        reward = asked * np.where(actions == self.cue, 1.0, -1.0)
        self.cue = np.where(self.over, self.rng.integers(0, 2, self.n), self.cue)
        self.t, self.over = np.where(self.over, 0, self.t + 1), asked
        info = {"reward": reward, "terminated": asked.astype(np.int32)}
        return self.reset()[0], reward, asked, np.zeros(self.n, bool), info

    def close(self):
        pass


def last_returns(folder: Path, flags: str) -> float:
    """Train on Cue; the mean return of the last 100 episodes."""
    more = f"--no-cuda --num-threads 1 --learning-rate 1e-3 --run-dir {folder}"
    return np.mean(returns(script.train(parse(f"{more} {flags}")))[-100:])


def forgets(monkeypatch):
    """The state is cleared before every row, in acting and in learning: no memory."""
    plain = script.Agent.policy
    monkeypatch.setattr(
        script.Agent, "policy", lambda self, o, s, first: plain(self, o, s, torch.ones_like(first))
    )


def test_it_remembers(monkeypatch, tmp_path):
    see_coarsely(monkeypatch, NAME)
    monkeypatch.setattr(envpool, "make", Cue)
    flags = "--num-steps 32 --total-timesteps 4096"
    assert last_returns(tmp_path / "run", flags) > 0.7


@pytest.mark.slow
def test_it_remembers_for_longer_and_not_without_its_state(monkeypatch, tmp_path):
    monkeypatch.setattr(envpool, "make", Cue)
    monkeypatch.setattr(Cue, "delay", 4)
    flags = "--no-anneal-lr --total-timesteps 20480"
    assert last_returns(tmp_path / "run", flags) > 0.8
    forgets(monkeypatch)
    assert last_returns(tmp_path / "forgets", flags) < 0.2


# --- the games ------------------------------------------------------------------------------------
CHECKSUMS = {  # seeds 1 and 2, one frame: at the start, and after 100 steps of action t % actions
    "Breakout-v5": (4, "6f158746b1689eed", "19cff08f16735540"),
    "Pong-v5": (6, "8cd4c61db3bb4bc4", "113a39c0cf752055"),
}


@pytest.mark.parametrize("env_id", CHECKSUMS)
def test_frames_of_a_real_game(env_id, monkeypatch):
    """The bytes that were measured of EnvPool; each is the newest of the stack that the sibling's
    network sees."""
    actions, *wanted = CHECKSUMS[env_id]
    args, found = Args(env_id=env_id, num_envs=2, num_minibatches=1), []
    sibling = ppo_atari_multigpu.Args(env_id=env_id, num_envs=2)
    for module in (script, ppo_atari_multigpu):
        monkeypatch.setattr(module, "episode_seed", lambda seed, i, start: i + 1)
    envs = script.Envs(args, slice(None))
    four = ppo_atari_multigpu.Envs(sibling, slice(None))
    for t in range(101):
        assert envs.obs.shape == (2, 1, 84, 84)
        assert (envs.obs == four.obs[:, -1:]).all()
        if t in (0, 100):
            found.append(hashlib.sha256(envs.obs.tobytes()).hexdigest()[:16])
        over = envs.over
        rewards, terminated, truncated = envs.step(np.full(2, t % actions))
        four.step(np.full(2, t % actions))
        assert (envs.first.numpy() == over).all()
        assert not (over & (terminated | truncated)).any()
    assert found == wanted


# --- acting ---------------------------------------------------------------------------------------
def test_a_saved_policy_carries_its_state_as_the_network_does(frames, tmp_path):
    """Through episodes, the state cleared by hand where one ends."""
    train(tmp_path / "run")
    agent, _ = script.load(tmp_path / "run", Frame)
    rng, state = np.random.default_rng(0), agent.initial_state(6)
    for t in range(8):
        obs = rng.integers(0, 256, (6, 1, 84, 84), dtype=np.uint8)
        noise = rng.gumbel(size=(6, 4))
        state[:, 2:4] *= t != 5
        before = state.clone()
        first = torch.zeros(6, dtype=bool)
        with torch.no_grad():
            policy, _, wanted = agent.policy(torch.as_tensor(obs), before, first)
        sample = agent.act(obs, noise, state=state)
        assert sample.shape == (6,)
        assert (sample == (policy.numpy() + noise.astype(np.float32)).argmax(axis=1)).all()
        assert torch.equal(state, wanted)
        greedy = agent.act(obs, state=before)
        assert (greedy == policy.numpy().argmax(axis=1)).all()
        assert (before == wanted).all()


def test_evaluation_carries_the_state_and_clears_it_as_training_did(
    frames, tmp_path, monkeypatch, capsys
):
    train(tmp_path / "run")
    used, plain = [], script.Agent.act

    def act(self, obs, noise=None, *, state):
        used.append(bool(state.any()))
        return plain(self, obs, noise, state=state)

    monkeypatch.setattr(script.Agent, "act", act)
    capsys.readouterr()
    scores = script.evaluate(parse(f"--evaluate {tmp_path / 'run'} --eval-episodes 2"))
    assert scores == [21.0, 21.0]  # two lives of three steps: 1 + ... + 6
    # cleared at each life's first row, carried through its third step's last observation
    life = [False, True, True, True]  # the fourth is the last observation of three steps
    games = [*life, *life[:3], True, *life, *life[:3]]
    assert used == [*games, *games]  # greedily, then drawn
    assert capsys.readouterr().out.count("eval_episode=") == 2
