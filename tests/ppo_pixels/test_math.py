"""ppo_pixels.py: spaces, networks, distributions, the update; on small made environments."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from maths import random_ends
from scripts import refused

import ppo
import ppo_pixels
from ppo_pixels import Actions, Agent, Args, Reader, Rollout

BYTES = {"low": 0, "high": 255, "dtype": np.uint8}


def image(*shape, **more):
    return spaces.Box(shape=shape, **(BYTES | more))


def env_of(observation, action=None):
    return SimpleNamespace(
        observation_space=observation, action_space=spaces.Discrete(3) if action is None else action
    )


def reader(space, **flags) -> Reader:
    return Reader(space, Args(**flags))


# --- what is seen ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "space, kind, shape",
    [
        (image(96, 96, 3), "image", (96, 96, 3)), (image(3, 64, 64), "image", (64, 64, 3)),
        (image(84, 84), "image", (84, 84, 1)), (image(7, 7, 3), "codes", (7, 7, 3)),
        (image(4, 84, 84), "image", (84, 84, 4)),  # a stack of grey images
        (image(4, 96, 96, 3), "image", (96, 96, 12)),  # a stack of coloured ones
        (image(4, 96, 96, 1), "image", (96, 96, 4)), (image(4, 3, 50, 40), "image", (50, 40, 12)),
        (image(240, 320, 3), "image", (80, 106, 3)),  # no shorter side above 96
        (spaces.Box(0, 1, (3, 40, 50)), "image", (40, 50, 3)),
        (spaces.Box(-np.inf, np.inf, (9, 9, 4)), "codes", (9, 9, 4)),
        (spaces.Box(0, 10, (8, 8, 2), np.int64), "codes", (8, 8, 2)),
        (image(64, 3, 64), "vector", (64 * 3 * 64,)),  # three rows only
        (image(128), "vector", (128,)), (image(5, 5, 3), "vector", (75,)),
        (spaces.Box(-1, 1, (40, 40)), "vector", (1600,)), (spaces.Box(-1, 1, ()), "vector", (1,)),
        (spaces.Box(-np.inf, np.inf, (2, 2, 2, 2, 2), np.float64), "vector", (32,)),
        (spaces.Discrete(5, start=-2), "choices", (5,)),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "choices", (14,)),
        (spaces.MultiBinary([2, 3]), "choices", (6,)),
    ],
    ids=str,
)  # fmt: skip
def test_kinds_of_leaves(space, kind, shape):
    one = reader(space)
    (leaf,) = one.leaves
    assert leaf.kind == kind
    assert one.shapes == [shape]
    (x,) = one.read(one.pick(space.sample()))
    assert x.shape == shape
    assert x.dtype == (
        np.uint8 if kind in ("image", "codes") and space.dtype == np.uint8 else np.float32
    )


def test_the_layout_of_images():
    x = np.random.default_rng(1).integers(0, 256, (2, 3, 40, 50)).astype(np.uint8)
    (read,) = reader(image(2, 3, 40, 50)).read([x])
    for row, column, frame, colour in itertools.product((0, 39), (3, 49), (0, 1), (0, 1, 2)):
        assert read[row, column, 3 * frame + colour] == x[frame, colour, row, column]
    x = x.transpose(0, 2, 3, 1)
    (same,) = reader(image(2, 40, 50, 3)).read([x])
    assert np.array_equal(same, read)


NOTHING = [
    spaces.Text(9), spaces.OneOf([image(36, 36, 3), spaces.Discrete(2)]), spaces.Dict(),
    spaces.Graph(spaces.Box(0, 1, (3,)), None), spaces.Sequence(spaces.Box(0, 1, (3,))),
    spaces.Dict(a=spaces.Text(9), b=spaces.Box(0, 1, (0,))),
]  # fmt: skip


@pytest.mark.parametrize(
    "space, said",
    [
        (image(84, 84, 84), "which axis of the image is its channels can't be told"),
        (image(10, 10, 20), "can't be told"),
        (image(64, 20, 64), "can't be told"),
        (spaces.Box(-np.inf, np.inf, (64, 64, 3)), "an image without bounds"),
        (spaces.Box(-3.4e38, 3.4e38, (64, 64, 3)), "an image without bounds"),
        (image(64, 64, 3, 4), "no image, and too long for a vector"),
        *((space, "nothing there can be learned from") for space in NOTHING),
    ],
    ids=str,
)
def test_what_cannot_be_seen(space, said, capfd):
    with pytest.raises(ValueError, match=said):
        reader(space)
    refused(capfd, said, ppo_pixels.check_spaces, "X-v0", space, spaces.Discrete(2))


def test_nested_observations():
    space = spaces.Dict(
        b=spaces.Tuple([image(36, 40, 3), spaces.Discrete(3)]),
        a=spaces.Dict(text=spaces.Text(5), speed=spaces.Box(-9, 9, (2, 2))),
        mission=spaces.Sequence(spaces.Discrete(2)),
        action_mask=spaces.MultiBinary(3),
    )
    one = reader(space)
    assert one.names() == ["b.0 image", "b.1 choices", "a.speed vector"]
    assert one.dropped == ["a.text", "mission"]
    sample = space.sample()
    pixels, choice, speed = one.read(one.pick(sample))
    assert np.array_equal(pixels, sample["b"][0])
    assert choice.tolist() == np.eye(3)[sample["b"][1]].tolist()
    assert np.array_equal(speed, sample["a"]["speed"].ravel())


def test_stacks_sizes_and_greys():
    one = reader(image(40, 60, 3), frame_stack=3, grayscale=True, resize="36x48")
    red = np.zeros((40, 60, 3), np.uint8)
    red[..., 0] = 100
    (first,) = one.read([red])
    assert first.shape == (36, 48, 3)
    assert np.unique(first).tolist() == [29]  # 0.299 * 100
    (second,) = one.read([2 * red], [first])
    assert [np.unique(second[..., k]).tolist() for k in range(3)] == [[29], [29], [59]]
    (third,) = one.read([0 * red], [second])
    assert [np.unique(third[..., k]).tolist() for k in range(3)] == [[29], [59], [0]]
    # a smaller image's pixels are means of the larger one's
    x = np.zeros((40, 60, 3), np.uint8)
    x[:, 30:] = 200
    (small,) = reader(image(40, 60, 3), resize="20x30").read([x])
    assert small[:, :14].max() == 0
    assert small[:, 16:].min() == 200


# --- what is done ---------------------------------------------------------------------------------
MIXED = spaces.Dict(
    [
        ("tool", spaces.Discrete(3, start=5)),
        ("aim", spaces.Box(np.array([-2, 0]), np.array([2, 1]), dtype=np.float32)),
        ("more", spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([2, 4])])),
        ("level", spaces.Box(0, 10, (1, 1), np.int64)),
    ]
)


def test_actions_of_a_nested_space():
    done = Actions(MIXED)
    numbers = [(2, True), (1, True)]
    choices = [(3, False), (2, False), (2, False), (2, False), (4, False)]
    assert done.blocks == [choices[0], numbers[0], *choices[1:], numbers[1]]
    assert done.number.nonzero()[0].tolist() == [3, 4, 15]
    row = np.array([0, 1, 0, 5, 0.25, 1, 0, 0, 1, 0, 1, 0, 0, 0, 1, 6.7], np.float32)
    action = done.to_space(row)
    assert list(action) == ["tool", "aim", "more", "level"]
    assert action["tool"] == 6
    assert action["aim"].tolist() == [2, 0.25]  # clipped
    assert action["more"][0].tolist() == [0, 1]
    assert action["more"][1].tolist() == [1, 3]
    assert action["level"].tolist() == [[7]]  # rounded
    assert action["level"].dtype == np.int64
    rng = np.random.default_rng(0)
    agent = Agent(env_of(image(36, 36, 3), MIXED))
    for _ in range(50):
        noise = 30 * torch.as_tensor(agent.noise(rng, 4))
        for action in agent.choose_action(torch.zeros(4, 16), noise).detach().numpy():
            assert MIXED.contains(done.to_space(action)), action


NO_ACTIONS = [
    spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]), spaces.Text(3),
    spaces.Sequence(spaces.Discrete(2)), spaces.Dict(), spaces.Box(0, 1, (0,)),
]  # fmt: skip


@pytest.mark.parametrize("space", NO_ACTIONS, ids=str)
def test_what_cannot_be_done(space, capfd):
    refused(capfd, "", ppo_pixels.check_spaces, "X-v0", image(36, 36), space)


def test_log_probabilities_and_entropies_are_those_of_torch():
    torch.manual_seed(0)
    agent = Agent(env_of(spaces.Box(-1, 1, (3,)), MIXED))
    agent.actor_logstd.data = torch.tensor([-0.5, 0.2, 0.1])
    obs = [torch.randn(6, 3)]
    agent.actor.weight.data *= 50  # far from uniform
    scores = agent.actor(agent.features(obs)[0])
    action, logprob, entropy, _ = agent.get_action_and_value(obs)
    action[:, 3] = torch.linspace(-5, 5, 6)
    logprob = agent.get_action_and_value(obs, action)[1]
    expected, expected_entropy = torch.zeros(6), torch.zeros(6)
    start, k = 0, 0
    origin, unit = [0, 0.5, 5], [2, 0.5, 5]
    for size, box in agent.translate.blocks:
        part = scores[:, start : start + size]
        taken = action[:, start : start + size]
        if box:
            for j in range(size):
                mean, std = origin[k] + unit[k] * part[:, j], unit[k] * agent.actor_logstd[k].exp()
                normal = torch.distributions.Normal(mean, std)
                expected += normal.log_prob(taken[:, j])
                expected_entropy += normal.entropy()
                k += 1
        else:
            choice = torch.distributions.Categorical(logits=part)
            expected += choice.log_prob(taken.argmax(-1))
            expected_entropy += choice.entropy()
        start += size
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-4)


def test_choices_are_drawn_with_their_probabilities():
    torch.manual_seed(0)
    agent = Agent(env_of(spaces.Box(-1, 1, (3,)), spaces.MultiDiscrete([3, 2])))
    agent.actor.weight.data *= 100
    obs = [torch.randn(1, 3).expand(20_000, 3)]
    policy, _ = agent.policy(obs)
    drawn = agent.choose_action(policy, agent.noise(np.random.default_rng(0), 20_000))
    for action in (drawn, agent.get_action_and_value(obs)[0]):
        torch.testing.assert_close(action.mean(0), policy[0].exp(), rtol=0, atol=0.015)


def test_the_unit_of_numbers():
    box = spaces.Box(
        np.array([-1, 0, -np.inf, -3.4e38]), np.array([3, 1, 5, 3.4e38]), dtype=np.float32
    )
    agent = Agent(env_of(spaces.Box(-1, 1, (3,)), box))
    assert agent.origin.tolist() == [1, 0.5, 0, 0]
    assert agent.unit.tolist() == [2, 0.5, 1, 1]
    policy = torch.tensor([[0.5, -0.5, 7, 9.0]])
    assert agent.choose_action(policy).tolist() == [[2, 0.25, 7, 9]]
    noise = torch.tensor([[1, 2, 3, 4.0]])
    std = math.exp(-0.7)
    expected = [2 + 2 * std, 0.25 + std, 7 + 3 * std, 9 + 4 * std]
    np.testing.assert_allclose(agent.choose_action(policy, noise)[0].detach(), expected, rtol=1e-6)


# --- masks ----------------------------------------------------------------------------------------
def test_masks_of_choices():
    done = Actions(
        spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,)), spaces.MultiDiscrete([2, 2])])
    )
    flat = [1, 0, 1, 1, 1, 0, 1, 1, 0]
    for tree in (
        np.array([1, 0, 1, 0, 1, 1, 0]),
        (np.array([1, 0, 1], np.int8), None, (np.array([0, 1]), np.array([1, 0]))),
    ):
        assert done.mask(tree).tolist() == [bool(x) for x in flat]
    with pytest.raises(ValueError, match="leaves nothing to choose"):
        done.mask(np.array([0, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(SystemExit):
        done.mask(np.array([1, 1, 1]))


def test_masked_choices_have_no_probability_and_no_gradient():
    agent = Agent(env_of(image(36, 36, 3), spaces.Discrete(4)))
    obs = [torch.randint(0, 256, (500, 36, 36, 3), dtype=torch.uint8)]
    mask = torch.tensor([[True, False, True, False]]).expand(500, 4)
    action, logprob, entropy, _ = agent.get_action_and_value([*obs, mask])
    assert action[:, [1, 3]].sum() == 0
    torch.testing.assert_close(logprob.exp(), torch.full((500,), 0.5), rtol=0, atol=0.05)
    assert entropy.max() <= math.log(2) + 1e-6
    (logprob.sum() + entropy.sum()).backward()
    assert agent.actor.weight.grad[[1, 3]].abs().max() == 0
    assert all(p.grad.isfinite().all() for p in agent.parameters() if p.grad is not None)


# --- networks -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape, kind, features, units",
    [
        ((84, 84, 4), "auto", 3136, 512), ((96, 96, 3), "auto", 4096, 512),
        ((60, 80, 3), "auto", 1536, 512), ((36, 36, 1), "auto", 64, 512),
        ((64, 64, 3), "impala", 2048, 256), ((35, 35, 3), "auto", 800, 256),
        ((16, 16, 3), "auto", 128, 256), ((7, 7, 3), "auto", 1024, 128),
        ((36, 36, 3), "small", 33 * 33 * 64, 128),
    ],
)  # fmt: skip
def test_networks_by_size(shape, kind, features, units):
    network = ppo_pixels.encoder(shape, kind)
    assert (network[-2].in_features, network[-2].out_features) == (features, units)
    height, width, channels = shape
    assert network(torch.zeros(2, channels, height, width)).shape == (2, units)


def test_separate_networks():
    """If so asked for; those of a vector are anyway."""
    shared, two = (Agent(env_of(image(36, 36, 3)), Args(separate_critic=x)) for x in (False, True))
    count = [sum(p.numel() for p in x.parameters()) for x in (shared, two, shared.trunk)]
    assert count[1] - count[0] == count[2]
    assert Agent(env_of(spaces.Box(-1, 1, (3,)))).value_trunk is not None


def test_what_the_network_is_given():
    space = spaces.Dict(
        [
            ("pixels", image(40, 36, 3)),
            ("floats", spaces.Box(-2, 2, (36, 36, 3))),
            ("codes", image(7, 7, 3)),
            ("health", spaces.Box(-3.4e38, 3.4e38, (2,))),
            ("where", spaces.Discrete(4)),
        ]
    )
    agent = Agent(env_of(space))
    rng = np.random.default_rng(0)
    seen = [space.sample() for _ in range(64)]
    for x in seen:
        x["codes"] = rng.integers(0, 11, (7, 7, 3)).astype(np.uint8)
        x["codes"][0, 0] = 2  # a wall is always there
        x["health"] = rng.normal(100, 20, 2).astype(np.float32)
    batch = {key: np.stack([x[key] for x in seen]) for key in space}
    obs = ppo_pixels.as_tensors(agent.observe(batch), "cpu")
    moments = SimpleNamespace(obs=[torch.stack([x, x]) for x in obs], valid=np.ones((1, 64), bool))
    agent.update_moments(moments)
    (pixels, floats, codes), vectors = agent.normalize(obs)
    assert pixels.shape == (64, 3, 40, 36)
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert pixels[3, 1, 39, 5] == batch["pixels"][3, 39, 5, 1] / np.float32(255)
    np.testing.assert_allclose(
        floats[3, 1, 35, 5], (batch["floats"][3, 35, 5, 1] + 2) / 4, rtol=1e-6
    )
    assert codes[:, :, 0, 0].abs().max() == 0
    assert codes[:, :, 1:].mean(0).abs().max() < 1e-5
    assert (codes[:, :, 1:].var(0, correction=0) - 1).abs().max() < 1e-3
    assert (vectors[:, :2].std(0, correction=0) - 1).abs().max() < 1e-3
    assert vectors[:, 2:].tolist() == np.eye(4)[batch["where"]].tolist()


# --- the update -----------------------------------------------------------------------------------
def test_an_update_on_a_vector_with_choices_is_that_of_ppo():
    T, N, D = 16, 4, 5
    env = env_of(spaces.Box(-1, 1, (D,)), spaces.MultiDiscrete([3, 2]))
    flags = {"num_envs": N, "num_steps": T, "num_minibatches": 3, "clip_vloss": True}
    args, theirs_args = Args(**flags), ppo.Args(**flags, update_epochs=4)
    torch.manual_seed(0)
    theirs, ours = ppo.Agent(env, theirs_args), Agent(env, args)
    mine = [ours.trunk, ours.actor, ours.value_trunk, ours.critic]
    mine = [parameter for net in mine for parameter in net.parameters()]
    their = [*theirs.actor.parameters(), *theirs.critic.parameters()]
    for a, b in zip(mine, their, strict=True):
        a.data.copy_(b.data)
    ours.adam, theirs.adam = torch.optim.Adam(ours.parameters(), eps=1e-5), ppo.flat_adam(theirs)
    theirs.rng, rng = np.random.default_rng((args.seed, 1, 1)), np.random.default_rng(0)
    obs = rng.normal(size=(T + 1, N, D)).astype(np.float32)
    choices = np.stack([rng.integers(0, n, (T, N)) for n in (3, 2)], axis=-1)
    coded = np.concatenate([np.eye(n)[choices[..., k]] for k, n in enumerate((3, 2))], axis=-1)
    ends = random_ends(rng, T, N)
    made = rng.normal(size=(T, N)) * ends[2], *ends
    data = Rollout([torch.tensor(obs)], torch.tensor(coded, dtype=torch.float32), *made)
    metrics = ppo_pixels.update(ours, data, 1, 1e-2, args)  # not the first: moments are neutral
    expected = ppo.update(theirs, ppo.Rollout(obs, choices, *made), 1e-2, theirs_args)
    for name in expected:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    for a, b in zip(mine, their, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_list_of_json_is_a_tuple():
    given = {"config": {"shape": [84, 84], "inner": [[1], 2], "n": 3}}
    expected = {"config": {"shape": (84, 84), "inner": ((1,), 2), "n": 3}}
    assert ppo_pixels.with_tuples(given) == expected


def test_what_an_atari_game_is_seen_by():
    args = Args(env_id="ALE/Pong-v5")
    assert (args.resize, args.frame_stack, args.action_repeat) == ("84x84", 4, 4)
    args = Args(env_id="ale_py:ALE/Pong-v5", frame_stack=2, resize="42x42", action_repeat=1)
    assert (args.resize, args.frame_stack, args.action_repeat) == ("42x42", 2, 1)
    assert Args().frame_stack == 0


def test_atari_shows_the_brighter_of_two_frames_and_counts_every_reward():
    ale_py = pytest.importorskip("ale_py")
    assert ale_py
    args = Args(env_id="ALE/Pong-v5", num_envs=1)
    envs, env = ppo_pixels.make_envs(args, 1), ppo_pixels.make_env("ALE/Pong-v5")
    obs, _ = env.reset(seed=ppo_pixels.episode_seed(args.seed, 0, 0))
    reader = Reader(env.observation_space, args)
    seen = reader.read(reader.pick(obs))
    for choice in (2, 3, 0, 5, 2) * 12:
        (rewards, _, _) = envs.step(np.eye(6)[[choice]])
        frames, total = [], 0.0
        for _ in range(4):
            obs, reward, *_ = env.step(choice)
            frames.append(obs)
            total += reward
        seen = reader.read(reader.pick(np.maximum(*frames[-2:])), seen)
        assert np.array_equal(envs.obs[0][0], seen[0])
        assert rewards[0] == total
    env.close()
    envs.close()


def test_masks_of_raw_observations():
    """A Dict's mask reaches `act`."""
    space = spaces.Dict(x=spaces.Box(-1, 1, (2,)), action_mask=spaces.MultiBinary(3))
    agent = Agent(env_of(space))
    masks = np.eye(3, dtype=np.int8)
    obs = {"x": np.zeros((3, 2), np.float32), "action_mask": masks}
    assert agent.act(obs).tolist() == [0, 1, 2]
    assert len(Agent(env_of(space), Args(action_masks=False)).observe(obs)) == 1
