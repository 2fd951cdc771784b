"""ppo.py: its choices, and masks of them. What it shares with ppo_continuous_action.py is tested
there, an update with all its cases in algorithms/test_vectors.py."""

import numpy as np
import pytest
import torch
from common import SEEN, make
from gymnasium import spaces

DISCRETE = {  # and how many choices each branch has
    "discrete": (spaces.Discrete(4, start=3), [4]),
    "multi-discrete": (spaces.MultiDiscrete([[2, 3], [4, 2]]), [2, 3, 4, 2]),
    "multi-binary": (spaces.MultiBinary(3), [2, 2, 2]),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", DISCRETE)
def test_sampled_choices_have_the_policys_frequencies(name, masked):
    """In numpy and torch, alone and masked; the joint probability is the branches' product."""
    space, sizes = DISCRETE[name]
    _, _, agent = make("ppo", SEEN, space)
    assert agent.choices == sizes
    mask = np.concatenate([np.arange(n) % 2 == 0 for n in sizes]).astype(np.float32)
    row = np.concatenate([np.ones(3), mask] if masked else [np.ones(3)]).astype(np.float32)
    obs = np.tile(row, (20_000, 1))
    actions, greedy = agent.act(obs, agent.noise(20_000)), agent.act(obs[:1])
    assert actions.shape == (20_000, *space.shape) and greedy[0] in space
    start = getattr(space, "start", 0)
    acted, greedy = ((x - start).reshape(len(x), -1) for x in (actions, greedy))
    tensor = torch.as_tensor(obs)
    sampled, logprob, entropy, _ = agent.get_action_and_value(tensor)
    scores = agent.actor(torch.ones(3)).detach()
    scores = scores.where(torch.tensor(mask) > 0, -torch.inf) if masked else scores
    parts = [torch.distributions.Categorical(logits=x) for x in scores.split(sizes)]
    for k, part in enumerate(parts):
        for drawn in (acted, sampled.numpy()):
            frequency = np.bincount(drawn[:, k], minlength=sizes[k]) / 20_000
            np.testing.assert_allclose(frequency, part.probs, atol=0.015)
            assert (frequency[part.probs == 0] == 0).all()
        assert greedy[0, k] == part.probs.argmax()
    expected = sum(part.log_prob(sampled[:, k]) for k, part in enumerate(parts))
    torch.testing.assert_close(logprob, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy[0], sum(part.entropy() for part in parts))


def test_a_mask_of_all_or_of_nothing_is_no_mask():
    _, _, agent = make("ppo", SEEN, spaces.Discrete(3))
    obs, actions = torch.randn(50, 3), torch.randint(3, (50, 1))
    plain = agent.get_action_and_value(obs, actions)
    noise = agent.noise(50)
    for mask, rtol, atol in ((torch.ones(50, 3), 1e-4, 1e-5), (torch.zeros(50, 3), 1e-3, 1e-3)):
        masked = torch.cat([obs, mask], dim=1)
        found = agent.get_action_and_value(masked, actions)
        torch.testing.assert_close(found, plain, rtol=rtol, atol=atol)
        assert (agent.act(masked.numpy(), noise) == agent.act(obs.numpy(), noise)).all()


@pytest.mark.parametrize("name", DISCRETE)
def test_actions_of_another_policy_are_an_error(name):
    """Those taken are compared: with three times the noise, or a fifth of them replaced by 0."""
    space, sizes = DISCRETE[name]
    module, _, agent = make("ppo", SEEN, space)
    with torch.no_grad():
        agent.actor[-1].weight *= 100  # a policy that has learned
    rng = np.random.default_rng(0)
    obs = rng.normal(0, 1, (32, 3)).astype(np.float32)
    obs = np.concatenate([obs, np.ones((32, sum(sizes)), np.float32)], axis=1)
    obs[:, 4] = 0.0
    noise = agent.noise(32)
    act = module.numpy_actor(agent)
    actions = act(obs, noise)
    assert not (actions[:, 0] == 1).any()  # which the mask forbids
    module.check_actor(agent, obs, actions, noise)
    fifth = np.where((np.arange(32) % 5 == 0)[:, None], 0, actions)
    for other in (act(obs, 3.0 * noise), fifth, act(obs)):
        with pytest.raises(RuntimeError, match="another policy"):
            module.check_actor(agent, obs, other, noise)
