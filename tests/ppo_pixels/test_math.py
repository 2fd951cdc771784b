"""ppo_pixels.py: spaces, networks, distributions, weights of older runs, EnvPool's games, saved
policies. Its updates are in algorithms/test_mixed.py."""

import itertools
from types import SimpleNamespace

import envpool
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from program import Toy, assert_same, returns, rows, scalars
from scripts import evaluate, train

import ppo_lstm
import ppo_pixels
from ppo_pixels import Agent, Args, Codec, Obs, Policy

BYTES = {"low": 0, "high": 255, "dtype": np.uint8}
VECTOR = spaces.Box(-1, 1, (3,))


def image(*shape, **more):
    return spaces.Box(shape=shape, **(BYTES | more))


def env_of(observation, action=None):
    return SimpleNamespace(observation_space=observation, action_space=action or spaces.Discrete(3))


def codec(observation=VECTOR, action=None, **flags) -> Codec:
    return Codec(observation, action or spaces.Discrete(3), Args(**flags))


# --- observations ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "space, kind, shape",
    [
        (image(96, 96, 3), "image", (96, 96, 3)), (image(3, 64, 64), "image", (64, 64, 3)),
        (image(84, 84), "image", (84, 84, 1)), (image(7, 7, 3), "grid", (7, 7, 3)),
        (image(4, 84, 84), "image", (84, 84, 4)),  # a stack of grey images
        (image(4, 96, 96, 3), "image", (96, 96, 12)),  # a stack of coloured ones
        (image(240, 320, 3), "image", (80, 106, 3)),  # no shorter side above 96
        (spaces.Box(0, 1, (3, 40, 50)), "image", (40, 50, 3)),
        (spaces.Box(-np.inf, np.inf, (9, 9, 4)), "grid", (9, 9, 4)),
        (spaces.Box(0, 10, (8, 8, 2), np.int64), "grid", (8, 8, 2)),
        (image(64, 3, 64), "vector", (64 * 3 * 64,)),  # three rows only
        (image(128), "vector", (128,)), (image(5, 5, 3), "vector", (75,)),
        (image(4, 4), "vector", (16,)), (spaces.Box(-1, 1, (40, 40)), "vector", (1600,)),
        (spaces.Box(-1, 1, ()), "vector", (1,)), (spaces.Discrete(5, start=-2), "choices", (5,)),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "choices", (14,)),
        (spaces.MultiBinary([2, 3]), "choices", (6,)),
    ],
    ids=str,
)  # fmt: skip
def test_kinds_of_observations(space, kind, shape):
    one = codec(space)
    assert one.shapes == {"obs": shape}
    assert (kind in ("image", "grid")) == ("obs" in one.axes)
    assert (kind in ("image", "choices")) == ("obs" in one.bounds)  # the others are standardized
    x = one.read(space.sample())["obs"]
    assert x.shape == (1, *shape)
    bytes_stay = "obs" in one.axes and space.dtype == np.uint8
    assert x.dtype == (np.uint8 if bytes_stay else np.float32)


def test_spaces_that_cannot_be_learned():
    for observation, action in (
        (image(84, 84, 84), None),  # which axis are the channels?
        (spaces.Box(-np.inf, np.inf, (64, 64, 3)), None),
        (spaces.Dict(), None),
        (VECTOR, spaces.Tuple([spaces.Sequence(spaces.Discrete(2))])),
    ):
        with pytest.raises(gym.error.Error):
            codec(observation, action)


@pytest.mark.parametrize("flip", [slice(None), slice(None, None, -1)])
def test_the_layout_of_images(flip):
    """Also of flipped frames, whose strides are negative."""
    x = np.random.default_rng(1).integers(0, 256, (2, 3, 40, 50)).astype(np.uint8)[:, :, flip]
    read = codec(image(2, 3, 40, 50)).read(x)["obs"]
    for row, column, frame, colour in itertools.product((0, 39), (3, 49), (0, 1), (0, 1, 2)):
        assert read[0, row, column, 3 * frame + colour] == x[frame, colour, row, column]
    other = codec(image(2, 40, 50, 3)).read(x.transpose(0, 2, 3, 1))["obs"]
    assert np.array_equal(other, read)
    assert torch.as_tensor(read).is_contiguous()


def test_nested_observations():
    space = spaces.Dict(
        {
            "b": spaces.Tuple([image(36, 40, 3), spaces.Discrete(3)]),
            "a.b": spaces.Dict(text=spaces.Text(5), speed=spaces.Box(-9, 9, (2, 2))),
            "action_mask": spaces.MultiBinary(3),
        }
    )
    one = codec(space)
    assert one.shapes == {"obs/a_b/speed": (4,), "obs/b/0": (36, 40, 3), "obs/b/1": (3,)}
    assert one.description.endswith("; not obs/a_b/text")
    sample = space.sample() | {"action_mask": np.array([0, 1, 1])}  # one of zeros is none
    obs = one.read(sample)
    assert np.array_equal(obs["obs/b/0"][0], sample["b"][0])
    assert obs["obs/b/1"].tolist() == [np.eye(3)[sample["b"][1]].tolist()]
    assert np.array_equal(obs["obs/a_b/speed"][0], sample["a.b"]["speed"].ravel())
    assert obs["mask"].tolist() == [sample["action_mask"].tolist()]
    assert Agent(env_of(space)).act(sample).shape == (1,)


def test_stacks_sizes_and_greys():
    one = codec(image(40, 60, 3), frame_stack=3, grayscale=True, resize="36x48")
    red = np.zeros((1, 40, 60, 3), np.uint8)
    red[..., 0] = 100
    first = one.read(red)
    assert first["obs"].shape == (1, 36, 48, 3)
    assert np.unique(first["obs"]).tolist() == [29]  # 0.299 * 100
    second = one.read(2 * red, first)
    assert [np.unique(second["obs"][..., k]).tolist() for k in range(3)] == [[29], [29], [59]]
    third = one.read(0 * red, second)
    assert [np.unique(third["obs"][..., k]).tolist() for k in range(3)] == [[29], [59], [0]]
    reset = one.read(0 * red, third, running=np.zeros(1, bool))
    assert reset["obs"].max() == 0
    # a smaller image's pixels are means of the larger one's
    x = np.zeros((40, 60, 3), np.uint8)
    x[:, 30:] = 200
    small = codec(image(40, 60, 3), resize="20x30").read(x)["obs"]
    assert small[0, :, :14].max() == 0
    assert small[0, :, 16:].min() == 200


def test_inputs_of_the_networks():
    space = spaces.Dict(pixels=image(40, 36, 3), floats=spaces.Box(-2, 2, (36, 36, 3)))
    batch = {key: np.stack([space[key].sample() for _ in range(8)]) for key in space}
    agent = Agent(env_of(space))
    inputs = agent.normalize(agent.codec.read(batch).to("cpu"))
    assert inputs["obs/pixels"].shape == (8, 3, 40, 36)
    assert inputs["obs/pixels"].is_contiguous(memory_format=torch.channels_last)
    assert inputs["obs/pixels"][3, 1, 39, 5] == batch["pixels"][3, 39, 5, 1] / np.float32(255)
    expected = (batch["floats"][3, 35, 5, 1] + 2) / 4
    np.testing.assert_allclose(inputs["obs/floats"][3, 1, 35, 5], expected, rtol=1e-6)


# --- networks -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, kind, features, units",
    [
        ((84, 84, 4), "auto", 3136, 512), ((96, 96, 3), "auto", 4096, 512),
        ((36, 36, 1), "auto", 64, 512), ((64, 64, 3), "impala", 2048, 256),
        ((35, 35, 3), "auto", 800, 256), ((16, 16, 3), "auto", 128, 256),
        ((7, 7, 3), "auto", 1024, 128), ((36, 36, 3), "small", 33 * 33 * 64, 128),
    ],
)  # fmt: skip
def test_networks_by_size(shape, kind, features, units):
    network = ppo_pixels.encoder(shape, kind)
    assert (network[-2].in_features, network[-2].out_features) == (features, units)
    height, width, channels = shape
    assert network(torch.zeros(2, channels, height, width)).shape == (2, units)


# --- actions --------------------------------------------------------------------------------------
MIXED = spaces.Dict(
    [
        ("tool", spaces.Discrete(3, start=5)),
        ("aim", spaces.Box(np.array([-2, 0]), np.array([2, 1]), dtype=np.float32)),
        ("more", spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 4])])),
        ("level", spaces.Box(0, 10, (1, 1), np.int64)),
    ]
)


def test_actions_of_a_nested_space():
    one = codec(action=MIXED)
    assert one.sizes == [3, 2, 2, 2, 4]
    action = one.env_actions(np.float32([1, 0, 1, 1, 3, 5, 0.25, 6.7]))
    assert list(action) == ["tool", "aim", "more", "level"]
    assert action["tool"] == 6
    assert action["aim"].tolist() == [2, 0.25]  # clipped
    assert action["more"][0].tolist() == [0, 1]
    assert action["more"][1].tolist() == [1, 3]
    assert action["level"].tolist() == [[7]]  # rounded
    agent = Agent(env_of(image(36, 36, 3), MIXED))
    policy = Policy(torch.zeros(50, 13), torch.zeros(50, 3), agent.actor_logstd)
    for row in agent.choose_action(policy, 30 * agent.noise(50)).detach().numpy():
        assert MIXED.contains(one.env_actions(row)), row


def test_choices_are_drawn_with_their_probabilities():
    torch.manual_seed(0)
    agent = Agent(env_of(VECTOR, spaces.MultiDiscrete([3, 2])))
    agent.actor.weight.data *= 100
    obs = Obs(obs=torch.randn(1, 3).expand(20_000, 3))
    policy, _ = agent.policy(obs)
    drawn = agent.choose_action(policy, agent.noise(20_000))
    for action in (drawn, agent.get_action_and_value(obs)[0]):
        parts = [torch.eye(n)[action[:, k].long()].mean(0) for k, n in enumerate((3, 2))]
        torch.testing.assert_close(torch.cat(parts), policy.logprobs[0].exp(), rtol=0, atol=0.015)


# --- Atari, older runs ----------------------------------------------------------------------------
@pytest.mark.parametrize("script", [ppo_pixels, ppo_lstm])
def test_a_held_action_shows_the_last_image(script, monkeypatch):
    class Dusk(gym.Env):
        observation_space, action_space = image(36, 36, 1), spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.look = np.full((36, 36, 1), 200, np.uint8)
            return self.look, {}

        def step(self, action):
            self.look = self.look - np.uint8(1)
            return self.look, 1.0, False, False, {}

    monkeypatch.setattr(script, "make_env", lambda *_, **__: Dusk())
    envs = script.make_envs(script.Args(action_repeat=3), 1, {})
    rewards, *_ = envs.step(np.zeros((1, 1)))
    assert rewards.tolist() == [3.0] and set(envs.obs["obs"].ravel().tolist()) == {197}


def test_atari_shows_the_brighter_of_two_frames_and_counts_every_reward():
    args = Args(env_id="ALE/Pong-v5", num_envs=1)
    envs, env = ppo_pixels.make_envs(args, 1, {}), ppo_pixels.make_env("ALE/Pong-v5")
    raw, _ = env.reset(seed=ppo_pixels.episode_seed(args.seed, 0, 0))
    obs = envs.codec.read(raw)
    assert obs["obs"].shape == (1, 84, 84, 4)
    rewards, brighter = 0.0, 0
    for choice in (2, 3, 0, 5, 2) * 12:
        reward, _, _ = envs.step(np.float32([[choice]]))
        frames = []
        for _ in range(4):
            raw, more, *_ = env.step(choice)
            frames.append(raw)
            rewards += more
        obs = envs.codec.read(np.maximum(*frames[-2:]), obs)
        brighter += (np.maximum(*frames[-2:]) > raw).any()
        assert np.array_equal(envs.obs["obs"], obs["obs"])
        rewards -= reward[0]
        assert rewards == 0.0
    assert brighter > 10
    env.close()
    envs.close()


# --- runs -----------------------------------------------------------------------------------------
class Kinds(gym.Env):
    """Observations drawn from any space, the last action's sum in every reward; episodes of 7 to 11
    steps, whose end is a termination if their length is even."""

    def __init__(self, plus=0.0):
        self.observation_space = spaces.Dict(
            screen=spaces.Box(shape=(16, 12, 3), **BYTES),
            grid=spaces.Box(shape=(7, 7, 2), **BYTES),
            speed=spaces.Box(-np.inf, np.inf, (2,)),
            place=spaces.Discrete(3),
        )
        self.action_space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))])
        self.plus = plus

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t, self.end = 0, int(self.np_random.integers(7, 12))
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        total = float(np.sum(np.hstack(gym.spaces.flatten(self.action_space, action)))) + self.plus
        over, even = self.t == self.end, self.end % 2 == 0
        obs = self.observation_space.sample()
        return obs, total + self.t, over and even, over and not even, {}


gym.register("Kinds-v0", Kinds)
STEPS_OF_16 = "--num-steps 16 --total-timesteps 64"
KINDS = f"--env-id Kinds-v0 {STEPS_OF_16}"


# --- EnvPool --------------------------------------------------------------------------------------
@pytest.mark.parametrize("script", [ppo_pixels, ppo_lstm])
def test_scores_and_stacks_of_whole_games(script, tmp_path, monkeypatch):
    """Rewards are clipped and a lost life ends an episode; scores are those of whole games, also in
    evaluation. A stack of frames begins anew with each episode, and so does a memory."""
    spec = SimpleNamespace(config=SimpleNamespace(max_num_players=1))
    monkeypatch.setattr(Toy, "spec", spec, raising=False)
    monkeypatch.setattr("envpool.make", Toy)
    rollouts = []

    def update(agent, data, args):
        rollouts.append(data)
        return {}

    monkeypatch.setattr(script, "update", update)
    flags, folder = "--env-id envpool:Pong-v5 --no-scale-rewards --frame-stack 2", tmp_path / "run"
    train(script.__name__, folder, f"{flags} {STEPS_OF_16}")
    (data, _) = rollouts
    older, newer = data.obs["obs"].numpy().reshape(17, 2, -1, 2, 4).transpose(3, 0, 1, 2, 4)
    for t, i in np.ndindex(16, 2):
        expected = newer[t, i] if data.valid[t, i] else newer[t + 1, i]
        assert (older[t + 1, i] == expected).all()
    assert 2 < (~data.valid).sum() < 16
    assert data.rewards.max() == 1  # clipped
    assert np.argwhere(data.terminated[:6]).tolist() == [[2, 0], [3, 1]]  # with the first life
    scores = [(float(score), int(length)) for _, score, length in rows(folder)[1:]]
    # lives of 3 + i steps, which pay i + t in the t-th step of both
    games = [(sum(i + t for t in range(1, 7 + 2 * i)), 6 + 2 * i) for i in range(3)]
    assert set(scores) == set(games[:2])
    remembers = []
    if script is ppo_lstm:
        assert torch.equal(data.episode_starts[1:], torch.tensor(~data.valid[:-1]))
        step = ppo_lstm.Agent.step

        def spy(agent, obs, state, noise):
            remembers.append(bool(state[0].any()))
            return step(agent, obs, state, noise)

        monkeypatch.setattr(ppo_lstm.Agent, "step", spy)
    played = evaluate(script.__name__, folder, "--env-id envpool:Pong-v5")
    assert played == [score for score, _ in games]
    if script is ppo_lstm:  # cleared after the row that follows a lost life
        assert remembers[:10] == [False, True, True, True] * 2 + [False, True]


def test_levels_that_are_asked_for(tmp_path, monkeypatch):
    """By the level that EnvPool says it plays: in training one of three, in evaluation any. Where
    an episode has ended, the next row pays nothing."""
    levels, rewards, plain = {2: set(), 4: set()}, [], envpool.make

    def make(task, **options):
        vector = plain(task, **options)
        step, over = vector.step, [np.zeros(options["num_envs"], bool)]

        def noted(actions):
            result = step(actions)
            levels[len(actions)].update(result[4]["level_seed"].tolist())
            rewards.extend(result[1][over.pop()])
            over.append(result[2] | result[3])
            return result

        vector.step = noted
        return vector

    monkeypatch.setattr(envpool, "make", make)
    monkeypatch.setattr(ppo_pixels, "update", lambda *_: {})
    flags = '--env-kwargs {"num_levels":3,"start_level":5} --eval-env-kwargs {"num_levels":0}'
    flags += " --encoder small --num-steps 128 --total-timesteps 256 --eval-interval 1"
    flags += " --eval-episodes 4 --env-id envpool:LeaperEasy-v0"
    train("ppo_pixels", tmp_path / "run", flags)
    assert levels[2] == {5, 6, 7}
    assert len(levels[4]) >= 4 and min(levels[4]) > 7
    assert len(rewards) > 4 and not any(rewards)


def test_evaluation_during_training(tmp_path):
    """Of other environments; the training is the same."""
    flags = '--eval-env-kwargs {"plus":1000.0,"max_episode_steps":10} --max-episode-steps 3'
    more = f"{KINDS} {flags} --eval-interval 2 --eval-episodes 3"
    final = train("ppo_pixels", tmp_path / "run", more)
    ((step, score),) = scalars(tmp_path / "run")["charts/test_return"]
    assert 7_000 < score < 12_000
    assert step == final["global_step"]
    without = train("ppo_pixels", tmp_path / "without", f"{KINDS} --max-episode-steps 3")
    assert_same(final["agent"], without["agent"])


# --- saved policies -------------------------------------------------------------------------------
def test_a_saved_policy_acts_as_it_did(tmp_path):
    train("ppo_pixels", tmp_path, f"{KINDS} --frame-stack 2 --grayscale --resize 16x16")
    (agent, args), env = ppo_pixels.load(tmp_path), gym.make("Kinds-v0")
    envs = ppo_pixels.Envs(args, range(1), [])
    raw, _ = env.reset(seed=ppo_pixels.episode_seed(args.seed, 0, 0))
    obs = agent.codec.read(raw)
    for _ in range(5):
        assert obs.keys() == envs.obs.keys()
        for name, x in obs.items():
            assert np.array_equal(x, envs.obs[name])
        choice, numbers = agent.act(obs)
        policy, _ = agent.policy(envs.obs.to("cpu"))
        assert choice[0] == int(policy.logprobs[0].argmax())
        clipped = policy.mean[0].detach().clamp(-1, 1).numpy()
        np.testing.assert_allclose(numbers[0], clipped, rtol=1e-4, atol=1e-5)
        envs.step(agent.choose_action(policy).detach().numpy())
        raw, *_ = env.step((choice[0], numbers[0]))
        obs = agent.codec.read(raw, obs)


@pytest.mark.slow
def test_compiled_is_the_same_to_rounding(tmp_path):
    eager, compiled, half = (
        train("ppo_pixels", tmp_path / f"{k}", f"{KINDS} --update-epochs 2 {flag}")["agent"]
        for k, flag in enumerate(("", "--compile", "--bf16"))
    )
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, rtol=1e-2, atol=1e-3)
    assert all(x.isfinite().all() for x in half.values())


@pytest.mark.slow
def test_it_learns(tmp_path):
    """A picture, a number, a choice and a distance: random play gets 2 of 20."""
    env_id = "--env-id benchmark.published.gates:Gates-v0"
    flags = "--num-steps 64 --num-minibatches 4 --update-epochs 4 --learning-rate 1e-3"
    flags += f" --num-envs 16 --log-std-init -0.5 --total-timesteps 16384 {env_id}"
    train("ppo_pixels", tmp_path / "run", flags)
    scores = returns(tmp_path / "run")
    assert np.mean(scores[:50]) < 4 < np.mean(scores[-50:])
    played = evaluate("ppo_pixels", tmp_path / "run", f"{env_id} --eval-episodes 10")
    assert np.mean(played) > 16
