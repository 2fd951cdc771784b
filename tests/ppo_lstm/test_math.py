"""ppo_lstm.py: the memory's state where episodes begin and end, its replay in learning, acting with
it. What it shares with ppo_pixels.py is tested there."""

from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from maths import Log, checkpoint, killed_and_resumed, lstm_cell, returns
from program import rows, scalars, train_until_killed

import ppo_lstm as script
import ppo_pixels
from ppo_lstm import Args, Memory

SMALL = (
    "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 2 --num-threads 1 --no-cuda"
)
CUE = "benchmark.published.novel:Cue-v0"
EVERYTHING = "--memory gru --previous-action --separate-critic --memory-size 16"
MEMORIES = pytest.mark.parametrize(
    "flags", ["", "--memory gru", "--previous-action", EVERYTHING], ids=str
)


class Known(gym.Env):
    """Random vectors; episodes of 3, 4, 5, ... 9 steps and again, of which those of odd length
    terminate and the others are cut off. A choice between three and two numbers."""

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 3, (2,))])

    def __init__(self, mask=None):
        self.info = {} if mask is None else {"action_mask": np.array(mask)}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, 3 + seed % 7
        return self.look(), self.info

    def look(self):
        return self.np_random.normal(size=5).astype(np.float32)

    def step(self, action):
        self.t += 1
        over, odd = self.t == self.length, self.length % 2 == 1
        return self.look(), float(action[0]), over and odd, over and not odd, self.info


gym.register("Known-v0", Known)


def parse(flags: str = "", env_id: str = "Known-v0") -> Args:
    return script.parse_args(f"--env-id {env_id} {SMALL} {flags}".split())


def train(folder: Path, flags: str = "", env_id: str = "Known-v0", module=script) -> Path:
    argv = f"--env-id {env_id} --run-dir {folder} {SMALL} {flags}".split()
    return module.train(module.parse_args(argv))


def make_agent(args: Args, env=None):
    """A new agent, whose memory and heads are louder: what it remembers shows more."""
    torch.manual_seed(args.seed)
    agent = script.Agent(env or Known(), args)
    with torch.no_grad():
        for memory in agent.memories:
            for parameter in memory.parameters():
                parameter *= 3.0
        agent.critic.weight *= 3.0
        agent.actor.weight *= 30.0
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5)
    return agent


class Game:
    """Environments, an agent and its state; `roll()` is the next rollout."""

    def __init__(self, args: Args):
        self.args, self.log = args, Log()
        self.envs, self.agent = script.make_envs(args, args.num_envs), make_agent(args)
        self.state = self.agent.initial_state(args.num_envs)

    def roll(self) -> script.Rollout:
        given = self.agent, self.envs, self.state, self.log, self.args
        data, self.state = script.rollout(*given)
        return data


# --- the memory -----------------------------------------------------------------------------------
def cell(net, x, state):
    """A step as in the book: x [F], state [S]; the output [H] and the state after."""
    w_ih, w_hh, b_ih, b_hh = net.parameters()
    if isinstance(net, torch.nn.GRU):
        ir, iz, i_n = (w_ih @ x + b_ih).chunk(3)
        hr, hz, hn = (w_hh @ state + b_hh).chunk(3)
        n = (i_n + (ir + hr).sigmoid() * hn).tanh()
        z = (iz + hz).sigmoid()
        h = (1 - z) * n + z * state
        return h, h
    h, c = lstm_cell(net.parameters(), x, *state.chunk(2))
    return h, torch.cat([h, c])


def slow_memory(memory, inputs, state, first):
    """`Memory.replay`, row by row and environment by environment."""
    T, N, _ = inputs.shape
    states, outputs = [*state], []
    for t in range(T):
        for i in range(N):
            if first[t, i]:
                states[i] = torch.zeros_like(states[i])
            output, states[i] = cell(memory.net, inputs[t, i], states[i])
            outputs.append(output)
    return torch.stack(outputs).view(T, N, -1)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("often", [0.0, 0.2, 1.0])
def test_a_whole_sequence_is_what_a_cell_gives_row_by_row(kind, often):
    """Outputs and all gradients, in one call; no state poisoned before a beginning matters."""
    T, N, F, H = 9, 3, 6, 8
    torch.manual_seed(0)
    memory, calls, found = Memory(kind, F, H), [], []
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.copy_(torch.randn_like(parameter))
    memory.net.register_forward_pre_hook(lambda net, given: calls.append(given[0].shape))
    inputs, first = torch.randn(T, N, F, requires_grad=True), torch.rand(T, N) < often
    state = torch.randn(N, memory.state_size, requires_grad=True)
    weights = torch.randn(T, N, H)
    assert memory.state_size == {"lstm": 16, "gru": 8}[kind]
    for replay in (memory.replay, lambda *given: slow_memory(memory, *given)):
        output = replay(inputs, state, first)
        sources = [inputs, state, *memory.parameters()]
        grads = torch.autograd.grad((output * weights).sum(), sources, materialize_grads=True)
        found.append([output.detach(), *grads])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-4)
    lengths = []
    for i in range(N):
        begins = [0, *(t for t in range(1, T) if first[t, i]), T]
        lengths += np.diff(begins).tolist()
    assert calls == [(max(lengths), len(lengths), F)]
    poisoned = memory.replay(inputs, torch.full_like(state, torch.nan), first)
    began = first.int().cumsum(dim=0) > 0
    assert torch.equal(poisoned[began], found[0][0][began])
    assert poisoned[~began].isnan().all()


def test_what_is_made():
    """The kinds, their sizes and initial weights (Huang et al. 2022, LSTM detail 1)."""
    for flags, state, width in [
        ({}, 256, 128),
        ({"memory": "gru"}, 128, 128),
        ({"memory_size": 7}, 14, 7),
        ({"separate_critic": True, "memory_size": 7}, 28, 7),
        ({"previous_action": True, "memory_size": 7}, 14 + 5 + 1, 7),
        ({"memory": "none"}, 0, 64),
        ({"memory": "none", "previous_action": True}, 6, 64 + 6),
    ]:
        agent = script.Agent(Known(), Args(**flags))
        assert agent.initial_state(3).shape == (3, state)
        assert not agent.initial_state(3).any()
        assert agent.actor.in_features == agent.critic.in_features == width
    for kind, net in (("lstm", torch.nn.LSTMCell(3, 5)), ("gru", torch.nn.GRUCell(3, 5))):
        memory = Memory(kind, 3, 5, span=16)
        gates = memory.net.bias_ih_l0.view(-1, 5)
        kept = [1 - 1 / (1 + 16 ** (k / 4)) for k in range(5)]  # of an LSTM's f, a GRU's z
        torch.testing.assert_close(gates[1].sigmoid(), torch.tensor(kept))
        assert not gates[[k for k in range(len(gates)) if k != 1]].any()
        # torch's gate is that one: only its bias decides how much of the state is left
        with torch.no_grad():
            for own, other in zip(net.parameters(), memory.net.parameters(), strict=True):
                own.copy_(other if own.ndim == 1 else 0.0 * other)
            before = torch.ones(1, 5)
            after = net(torch.zeros(1, 3), before if kind == "gru" else (0 * before, before))
        left = after if kind == "gru" else after[1]
        torch.testing.assert_close(left[0], torch.tensor(kept))
    agent = script.Agent(Known(), Args(separate_critic=True))
    assert len(agent.memories) == 2
    for memory in agent.memories:
        for name, parameter in memory.net.named_parameters():
            if "bias" in name:
                assert not parameter.any()
            else:
                singular = torch.linalg.svdvals(parameter.detach())
                torch.testing.assert_close(singular, torch.ones_like(singular))


# --- the state where episodes end -----------------------------------------------------------------
@MEMORIES
def test_learning_goes_through_the_states_that_acting_went_through(flags):
    """Three rollouts, each row by row as in acting, beside whole sequences as in learning."""
    game = Game(parse(flags))
    for k in range(3):
        data = game.roll()
        logprobs, values = script.judge(game.agent, data, 3)
        actions = torch.cat([data.actions, data.actions[-1:]])
        state = data.state.clone()
        for t in range(17):
            state[data.first[t]] = 0.0
            if t == 16:
                torch.testing.assert_close(state, game.state, atol=1e-5, rtol=1e-4)
            obs, action = [x[t] for x in data.obs], actions[t]
            with torch.no_grad():
                _, logprob, _, value, state = game.agent(obs, state, action=action)
            torch.testing.assert_close(value, values[t], atol=1e-5, rtol=1e-4)
            if t < 16:
                torch.testing.assert_close(logprob, logprobs[t], atol=1e-5, rtol=1e-4)
        others = data._replace(state=torch.zeros_like(data.state))
        changed = (script.judge(game.agent, others, 3)[1] - values).abs().max()
        assert changed > 1e-2 or k == 0
    metrics = script.update(game.agent, data, 1, 1e-12, game.args)
    assert abs(metrics["losses/approx_kl"]) < 1e-6
    assert metrics["losses/clipfrac"] == 0


@MEMORIES
def test_values_are_those_of_each_episode_by_itself(flags):
    """From a cleared state, to the last observation, from whose value and history a time limit
    bootstraps."""
    game = Game(parse(f"{flags} --num-steps 60"))
    agent, data = game.agent, game.roll()
    _, values = script.judge(agent, data, 4)
    every = torch.cat([data.actions, data.actions[-1:]])
    seen, cleared = {"terminated": 0, "truncated": 0, "cut off": 0}, []
    for i in range(4):
        for begin, following in pairwise([0, *np.flatnonzero(data.first[:, i]), 61]):
            if begin in (following, 60):
                continue
            ends = np.flatnonzero(~data.valid[begin:following, i])
            last = begin + ends[0] if len(ends) else 60
            episode, actions = (
                [x[begin : last + 1, i] for x in data.obs],
                every[begin : last + 1, i],
            )
            none = torch.zeros(last + 1 - begin, 1, dtype=torch.bool)
            with torch.no_grad():
                v = agent.get_value(episode, agent.initial_state(1), none, actions)
                only = [x[-1:] for x in episode]
                alone = agent.get_value(only, agent.initial_state(1), none[-1:], actions[-1:])
            torch.testing.assert_close(v, values[begin : last + 1, i], atol=1e-5, rtol=1e-4)
            cleared.append(abs(float(alone - v[-1])))
            kind = "terminated" if data.terminated[last - 1, i] else "truncated"
            seen[kind if len(ends) else "cut off"] += 1
    assert min(seen.values()) >= 2
    assert np.median(cleared) > 0.01  # a state cleared in the last row would be found


def test_what_a_memory_is_given_of_actions(monkeypatch):
    """With --previous-action: the last action in its unit and a one, zeros at a beginning."""
    game = Game(parse("--previous-action --num-steps 40"))
    given = []
    game.agent.memories[0].net.register_forward_pre_hook(
        lambda net, inputs: given.append(inputs[0][..., -6:])
    )
    data = game.roll()
    acting = torch.cat(given)
    given.clear()
    plain = Memory.replay
    monkeypatch.setattr(
        Memory, "replay", lambda self, *x: given.append(x[0][..., -6:]) or plain(self, *x)
    )
    script.judge(game.agent, data, 4)
    learning = given[0][:40]
    assert torch.equal(acting, learning)
    begins = np.concatenate([np.ones((1, 4), bool), data.first[1:].numpy()])
    assert begins.sum() > 12
    for t, i in np.ndindex(40, 4):
        if begins[t, i]:
            assert not acting[t, i].any()
        else:
            choice, numbers = data.actions[t - 1, i, :3], (data.actions[t - 1, i, 3:] - 1) / 2
            expected = torch.cat([choice, numbers, torch.ones(1)])
            torch.testing.assert_close(acting[t, i], expected)


# --- learning -------------------------------------------------------------------------------------
IMAGE = spaces.Dict(screen=spaces.Box(0, 255, (16, 16, 3), np.uint8), speed=spaces.Box(-9, 9, (2,)))


class Seen(Known):
    """The same with an image."""

    observation_space = IMAGE

    def look(self):
        IMAGE.seed(int(self.np_random.integers(2**31)))
        return IMAGE.sample()


gym.register("Seen-v0", Seen)


@pytest.mark.parametrize("env_id, flags", [("Known-v0", "--separate-critic"), ("Seen-v0", "")])
def test_without_a_memory_it_is_ppo_pixels(tmp_path, env_id, flags):
    """To rounding; minibatches of whole environments are all of them."""
    flags = f"{flags} --num-minibatches 1 --total-timesteps 192"
    theirs = train(tmp_path / "theirs", flags, env_id, ppo_pixels)
    ours = train(tmp_path / "ours", f"{flags} --memory none", env_id)
    a, b = checkpoint(ours)["agent"], checkpoint(theirs)["agent"]
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)
    assert rows(ours)[1:] == [pytest.approx(row) for row in rows(theirs)[1:]]
    mine, other = scalars(ours), scalars(theirs)
    assert mine.keys() == other.keys()
    for tag in mine:
        assert mine[tag] == [(t, pytest.approx(x, rel=1e-3, abs=1e-5)) for t, x in other[tag]]
    lstm = scalars(train(tmp_path / "lstm", flags, env_id))["losses/value_loss"]
    assert abs(lstm[-1][1] - other["losses/value_loss"][-1][1]) > 1e-3


# --- runs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", ["", EVERYTHING, "--memory none"])
def test_a_run_cut_off_goes_on_to_the_same_bits(tmp_path, flags):
    flags = f"--env-id Known-v0 {SMALL} {flags} --total-timesteps 320 --checkpoint-interval 2"
    whole = killed_and_resumed("ppo_lstm", tmp_path, flags)
    # without the state, which the checkpoint has, the run would be another
    argv = f"{flags} --run-dir {tmp_path / 'cut'}".split()
    assert train_until_killed("ppo_lstm", "update", 4, argv) == -9
    left = torch.load(tmp_path / "cut/checkpoint.pt", weights_only=True)
    assert left["memory"].any() == ("none" not in flags)
    torch.save(left | {"memory": 0 * left["memory"]}, tmp_path / "cut/checkpoint.pt")
    script.train(script.parse_args(["--resume", str(tmp_path / "cut")]))
    same = torch.equal(
        checkpoint(tmp_path / "cut")["agent"]["actor.weight"], whole["agent"]["actor.weight"]
    )
    assert same == ("none" in flags)


@MEMORIES
def test_a_saved_policy_acts_as_it_did(tmp_path, flags):
    """A loop of one's own, over gymnasium's environment, beside the script's environments."""
    folder = train(tmp_path / "run", f"--total-timesteps 128 {flags}")
    (agent, args), env = script.load(folder), gym.make("Known-v0")
    played = script.own_envs(args, [0], None)
    state, theirs = agent.initial_state(1), agent.initial_state(1)
    episode, begins = 0, 0
    obs, _ = env.reset(seed=script.episode_seed(args.seed, 0, 0))
    for _ in range(60):
        assert np.array_equal(obs, played.obs[0][0])
        choice, numbers = agent.act(obs[None], state=state)
        with torch.no_grad():
            seen = script.as_tensors(played.obs, "cpu")
            action, theirs = agent.step(seen, theirs)
        theirs[played.over] = 0.0
        over = played.over.copy()
        done = agent.translate.to_space(action[0].numpy())
        assert done[0] == choice[0]
        np.testing.assert_allclose(done[1], numbers[0], atol=1e-6)
        played.step(action.numpy())
        if over[0]:  # the row after the end, which a loop of one's own does not need
            episode += 1
            state[0], begins = 0.0, begins + 1
            obs, _ = env.reset(seed=script.episode_seed(args.seed, 0, episode))
        else:
            obs, *_ = env.step((choice[0], numbers[0]))
    assert begins > 5


def test_masks_and_a_memory_together():
    gym.register("KnownMasked-v0", Known, kwargs={"mask": [1, 0, 1]})
    game = Game(parse("--previous-action", "KnownMasked-v0"))
    data = game.roll()
    taken = data.actions[data.valid]
    assert taken[:, 1].sum() == 0
    assert min(taken[:, 0].sum(), taken[:, 2].sum()) > 0
    obs = [x[:-1].flatten(0, 1) for x in data.obs]
    given = obs, data.state, data.first[:-1], data.actions.flatten(0, 1)
    *_, entropy, _, _ = game.agent(*given)
    assert (entropy - game.agent.box_entropy()).max() <= np.log(2) + 1e-6


# --- learning -------------------------------------------------------------------------------------
LEARN = "--num-envs 16 --num-steps 128 --num-minibatches 4 --update-epochs 4 --learning-rate 1e-3"


def learn_cue(folder: Path, flags: str) -> float:
    """A sign shown four steps before it is needed: at best 1; 0.5 without a memory."""
    flags = f"{LEARN} --memory-size 32 --memory-span 16 --total-timesteps 32768 {flags}"
    argv = f"--env-id {CUE} --run-dir {folder} {SMALL} {flags} --env-kwargs".split()
    return np.mean(returns(script.train(script.parse_args([*argv, '{"delay": 4}'])))[-100:])


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["lstm", "gru", "none", "cleared in each row"])
def test_a_sign_is_remembered_by_a_memory(tmp_path, memory, monkeypatch):
    plain = script.Agent.recall

    def cleared(self, obs, state, first=None, action=None):
        every = None if first is None else torch.ones_like(first)
        return plain(self, obs, torch.zeros_like(state), every, action)

    if memory == "cleared in each row":
        monkeypatch.setattr(script.Agent, "recall", cleared)
    kind = "lstm" if memory == "cleared in each row" else memory
    score = learn_cue(tmp_path / "run", f"--memory {kind}")
    assert score >= 0.95 if memory in ("lstm", "gru") else score <= 0.65
