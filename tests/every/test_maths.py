"""What the algorithms of several scripts have in common, against plain loops: advantages, the
update, what is learned from, networks, normalisers. What is of one script alone is in its
test_math.py."""

import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from maths import (
    FRAMES,
    brute_force,
    frames_agent,
    frames_rollout,
    minibatches,
    quiet,
    slow_network,
    slow_policy,
    two_updates,
    vector,
)
from program import METRICS, Toy, rows
from scripts import SMALL, train
from torch import nn

CLIPPED = [name for name in SMALL if name not in ("ppo_cma", "ppo_kl_adaptive")]
ON_DEVICE = "ppo_continuous_action_warp"  # whose rollouts have no row of junk
STEPWISE = [name for name in SMALL if name != ON_DEVICE]
NORMALISED = ["ppo_continuous_action", "ppo_kl_adaptive", "ppo_pixels", "ppo_lstm"]
NORMALISED += ["ppo_pettingzoo"]
on_frames = pytest.mark.parametrize("script", FRAMES)


# --- advantages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", STEPWISE)
def test_gae_by_hand(script):
    """Flags at index t belong to the step taken at t."""
    gae = importlib.import_module(script).gae
    flags = np.zeros((2, 4, 1), bool)
    flags[1, 1] = True  # truncated in the second step; the third row is junk
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0])[:, None]
    rewards = np.array([1.0, 1.0, 99.0, 1.0])[:, None]
    advantages = gae(rewards, values, *flags, 0.5, 0.5)[:, 0]
    second = 1 + 0.5 * 4 - 2  # bootstraps from the true last observation's value, in row 2
    assert advantages[[0, 1, 3]] == pytest.approx([1 + 0.5 * 2 - 1 + 0.25 * second, second, 1.0])
    flags = flags[::-1]  # the same, terminated
    advantages = gae(rewards, values, *flags, 0.5, 0.5)[:, 0]
    assert advantages[[0, 1, 3]] == pytest.approx([1 + 0.5 * 2 - 1 + 0.25 * -1.0, -1.0, 1.0])
    both = np.logical_or(*flags)
    assert gae(rewards, values, both, both, 0.5, 0.5)[1, 0] == -1.0


@pytest.mark.parametrize("script", STEPWISE)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gae_is_the_brute_force_sum(script, data):
    T, N = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    kinds = st.sampled_from(["go", "go", "go", "terminated", "truncated", "both"])
    drawn = np.array(data.draw(st.lists(kinds, min_size=T * N, max_size=T * N))).reshape(T, N)
    gamma, gae_lambda = (data.draw(st.sampled_from([0.0, 0.9, 1.0])) for _ in range(2))
    local = np.random.default_rng(data.draw(st.integers(0, 999)))
    rewards, values = local.normal(size=(T, N)), local.normal(size=(T + 1, N))
    valid = np.ones((T, N), bool)
    for t in range(1, T):  # the row after an end is junk, and ends nothing
        valid[t] = (drawn[t - 1] == "go") | ~valid[t - 1]
        drawn[t][~valid[t]] = "go"
    flags = [np.isin(drawn, [kind, "both"]) for kind in ("terminated", "truncated")]
    expected = brute_force(rewards, values, *flags, gamma, gae_lambda)
    rewards[~valid] = np.nan
    gae = importlib.import_module(script).gae
    advantages = gae(rewards, values, *flags, gamma, gae_lambda)
    np.testing.assert_allclose(advantages[valid], expected[valid], atol=1e-12)


# --- the update -----------------------------------------------------------------------------------


@on_frames
def test_update_is_plain_autograd_with_torchs_adam(script):
    """Advantages, losses, gradient, its clipping, Adam and metrics of two epochs. What is learned
    from vectors is compared with Stable-Baselines3 and between scripts."""
    module = importlib.import_module(script)
    flags = "--num-envs 6 --num-steps 7 --num-minibatches 3 --update-epochs 2"
    args, data = quiet(script, flags), frames_rollout(script, 7, 6)
    agent, net = frames_agent(script, args, 2.0), frames_agent(script, args, 2.0)
    start = vector(net)
    adam = torch.optim.Adam(net.parameters(), lr=1e-4, eps=1e-5)
    ends = data.terminated, data.truncated
    given = data.rewards, data.values.double().numpy(), *ends, args.gamma, args.gae_lambda
    advantages = torch.tensor(brute_force(*given), dtype=torch.float32).flatten()
    actions, old, v0 = (x.flatten() for x in (data.actions, data.logprobs, data.values[:-1]))
    returns, clip, seen = advantages + v0, args.clip_coef, []
    for epoch in minibatches(script, args, data, 2):
        for i in epoch:
            logprobs, v = slow_policy(net, data, i)
            pi = torch.distributions.Categorical(logits=logprobs)
            a = (advantages[i] - advantages[i].mean()) / (advantages[i].std() + 1e-8)
            ratio = (pi.log_prob(actions[i]) - old[i]).exp()
            pg = torch.max(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)).mean()
            near = v0[i] + (v - v0[i]).clamp(-clip, clip)
            vl = torch.max((v - returns[i]) ** 2, (near - returns[i]) ** 2).mean() / 2
            adam.zero_grad()
            (pg - 0.01 * pi.entropy().mean() + 0.5 * vl).backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            adam.step()
            kl = (ratio - 1 - ratio.log()).mean()
            clipped = ((ratio - 1).abs() > clip).float().mean()
            means = [vl, pg, pi.entropy().mean(), -ratio.log().mean(), kl, clipped, norm]
            seen.append([x.item() for x in means])
    metrics = module.update(agent, data, 2, 1e-4, args)
    assert 3 < (~data.valid).sum() < 20
    assert (vector(net) - start).abs().max() > 2e-4
    torch.testing.assert_close(vector(agent), vector(net), atol=2e-5, rtol=0)
    for name, value in zip(METRICS, torch.tensor(seen).mean(dim=0).tolist(), strict=True):
        assert metrics[f"losses/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert 0 < metrics["losses/clipfrac"] < 0.8
    valid = data.valid.ravel()
    residual, targets = (x.double()[valid].var() for x in (returns - v0, returns))
    explained = 1 - (residual / targets).item()
    assert metrics["losses/explained_variance"] == pytest.approx(explained, abs=1e-5)


@on_frames
def test_rows_of_junk_are_never_learned_from(script):
    """Whatever is in them, but for the value after a truncation, no bit of what is learned or
    logged changes. Other rewards of other rows change it."""
    module = importlib.import_module(script)
    args = quiet(script, "--num-envs 8 --num-steps 6 --num-minibatches 2 --update-epochs 1")
    data, after = frames_rollout(script, 6), []
    junk, actions = torch.as_tensor(~data.valid), FRAMES[script][1]
    assert 3 < junk.sum() < 20
    values, bootstrap = data.values.clone(), torch.as_tensor(data.truncated)
    values[1:-1][junk[1:] & ~bootstrap[:-1]] += 3.0
    other = data._replace(
        actions=torch.where(junk, actions - 1 - data.actions, data.actions),
        logprobs=torch.where(junk, -1.0, data.logprobs),
        obs=torch.where(junk[..., None, None, None], 255 - data.obs, data.obs),
        rewards=np.where(data.valid, data.rewards, 5.0),
        values=values,
    )
    assert not torch.equal(values, data.values)
    changed = data._replace(rewards=data.rewards + data.valid * 0.5 * np.eye(6, 8))
    for it in (data, other, changed):
        agent = frames_agent(script, args)
        metrics = module.update(agent, it, 0, 1e-3, args)
        after.append((metrics, vector(agent)))
    assert after[0][0] == after[1][0]
    assert torch.equal(after[0][1], after[1][1])
    assert not torch.equal(after[0][1], after[2][1])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("script", [name for name in CLIPPED if name != ON_DEVICE])
def test_every_valid_sample_once_an_epoch_and_a_kl_stop_after_one(script, tmp_path, monkeypatch):
    """By the returns in the minibatches of a run of two iterations."""
    module, calls = importlib.import_module(script), []
    plain = module.ppo_loss

    def spy(*args):
        (batch,) = (x for x in args if hasattr(x, "returns"))
        weights = getattr(batch, "weights", torch.ones_like(batch.returns))
        calls.append(batch.returns[weights > 0].detach().clone())
        return plain(*args)

    monkeypatch.setattr(module, "ppo_loss", spy)
    for flags, epochs in (("--target-kl 1e9", 3), ("--target-kl 0", 1)):
        flags = f"--update-epochs 3 --learning-rate 1e-3 {flags}"
        checkpoint = train(script, tmp_path / f"{len(flags)}", flags)
        assert len(calls) == 2 * 2 * epochs, flags  # iterations, minibatches
        learned = checkpoint["agent"].get("steps", checkpoint["counters"][0])  # of all agents
        pairs = [torch.cat(calls[k : k + 2]).sort().values for k in range(0, len(calls), 2)]
        assert sum(map(len, pairs)) == epochs * learned
        for k, pair in enumerate(pairs):
            assert torch.equal(pair, pairs[k - k % epochs])
        assert abs(len(calls[0]) - len(calls[1])) <= len(pairs[0]) / 3
        calls.clear()


# --- networks and normalisers ---------------------------------------------------------------------

SIZES = [  # actions, all parameters, those of the network before memory and heads
    ("ppo_atari_multigpu", 4, 1_686_693, 1_684_128),
    ("ppo_atari_lstm", 4, 2_007_333, 1_677_984),
    ("ppo_atari_lstm", 6, 2_007_591, 1_677_984),
    ("ppo_procgen", 15, 626_256, 622_144),
    ("ppo_pettingzoo_ma_atari", 6, 1_691_815, 1_688_224),
    ("ppo_pettingzoo_ma_atari", 5, 1_691_302, 1_688_224),
    ("ppo_pettingzoo_ma_atari", 18, 1_697_971, 1_688_224),
]


@pytest.mark.parametrize(("script", "actions", "parameters", "network"), SIZES)
def test_networks_for_frames_are_cleanrls(script, actions, parameters, network, monkeypatch):
    """Sizes, initial weights, and what is given back of a batch."""
    shape, _ = FRAMES[script]
    monkeypatch.setitem(FRAMES, script, (shape, actions))
    agent = frames_agent(script, quiet(script, ""))
    assert sum(p.numel() for p in agent.parameters()) == parameters
    assert sum(p.numel() for p in agent.network.parameters()) == network
    gains = {agent.actor.weight: 0.01, agent.critic.weight: 1.0}
    hidden = [m for m in agent.network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    if script == "ppo_procgen":  # torch's own: uniform in +- 1 / sqrt(fan in)
        assert len(hidden) == 15 + 1
        for layer in hidden:
            bound = 1 / math.sqrt(layer.weight[0].numel())
            assert 0.9 * bound < layer.weight.abs().max() <= bound
    else:
        gains |= {layer.weight: math.sqrt(2) for layer in hidden}
        assert not any(layer.bias.any() for layer in (*hidden, agent.actor, agent.critic))
    given = (torch.randint(0, 256, (6, *shape), dtype=torch.uint8),)
    if script == "ppo_atari_lstm":
        gains |= {agent.lstm.weight_ih_l0: 1.0, agent.lstm.weight_hh_l0: 1.0}
        assert not agent.lstm.bias_ih_l0.any() and not agent.lstm.bias_hh_l0.any()
        state = agent.initial_state(2)
        assert state.shape == (2, 2, 128) and not state.any()
        given = *given, state, torch.zeros(6).bool()
    for weight, gain in gains.items():
        singular = torch.linalg.svdvals(weight.detach().flatten(1))
        torch.testing.assert_close(singular, torch.full_like(singular, gain))
    with torch.no_grad():
        action, logprob, entropy, value, *after = agent.get_action_and_value(*given)
        same, again, *_ = agent.get_action_and_value(*given, action)
        if hasattr(agent, "get_value"):
            assert torch.equal(agent.get_value(*given), value)
            floats = agent.get_value(given[0].float(), *given[1:])  # scaled in the network
            torch.testing.assert_close(floats, value)
    assert action.shape == logprob.shape == entropy.shape == value.shape == (6,)
    assert action.dtype == torch.int64
    assert [x.shape for x in after] == [(2, 2, 128)] * (script == "ppo_atari_lstm")
    assert torch.equal(same, action)
    assert torch.equal(again, logprob)
    assert entropy.tolist() == pytest.approx([math.log(actions)] * 6, abs=1e-3)


HOW = ["", "--no-channels-last", "--bf16"]


@pytest.mark.parametrize("flags", HOW)
@pytest.mark.parametrize("script", [name for name in FRAMES if name != "ppo_atari_lstm"])
def test_networks_for_frames_are_their_formulas(script, flags):
    """That of ppo_atari_lstm.py is in its own tests."""
    if flags == "--no-channels-last" and script == "ppo_pettingzoo_ma_atari":
        pytest.skip("it has no such flag")
    args, (shape, _) = quiet(script, flags), FRAMES[script]
    agent = frames_agent(script, args)
    obs = torch.randint(0, 256, (6, *shape), dtype=torch.uint8)
    with torch.no_grad():
        agent.actor.weight.mul_(100)
        policy, value = agent.policy(obs)
        logprobs, wanted = slow_network(agent.parameters(), obs)
    near = {"atol": 0.02, "rtol": 0.02} if flags == "--bf16" else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(policy, logprobs, **near)
    torch.testing.assert_close(value, wanted, **near)
    assert policy.std() > 0.05 > 0.02 * float(value.std())
    assert (flags == "--bf16") == ((value - wanted).abs().max() > 1e-4)


@pytest.mark.parametrize("flags", HOW[1:])
@pytest.mark.parametrize("script", ["ppo_atari_multigpu", "ppo_atari_lstm", "ppo_procgen"])
def test_memory_order_and_bf16_learn_nearly_the_same(script, flags):
    changes = [two_updates(script, more) for more in ("", flags)]
    if flags == "--bf16":
        assert not torch.equal(*changes)
        assert torch.cosine_similarity(*changes, dim=0) > 0.95
        assert (changes[1] - changes[0]).norm() < 0.3 * changes[0].norm()
    else:
        torch.testing.assert_close(*changes, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_atari_multigpu", "ppo_atari_lstm", "ppo_procgen"])
def test_compiled_learns_nearly_the_same(script, capsys):
    compiled = two_updates(script, "--compile")
    assert "going on eagerly" not in capsys.readouterr().out
    torch.testing.assert_close(compiled, two_updates(script, ""), atol=1e-5, rtol=0)


@pytest.mark.parametrize("script", NORMALISED)
def test_moments_are_those_of_all_that_was_seen(script):
    rng, moments = np.random.default_rng(0), importlib.import_module(script).RunningMoments((4,))
    batches = [rng.normal(1000.0, [1e-2, 1, 5, 100], (n, 4)) for n in (1, 7, 93, 5000)]
    for batch in batches:
        moments.update(batch)
    seen = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean, seen.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, seen.var(axis=0), rtol=1e-6)
    assert moments.count == 5101


# --- games of EnvPool -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("script", ["ppo_atari_multigpu", "ppo_atari_lstm"])
def test_a_score_is_the_raw_sum_over_a_whole_game(script, tmp_path):
    """Games of 2 lives, after each of which there is a row of junk."""
    flags = "--num-steps 25 --checkpoint-interval 1 --total-timesteps 100"
    steps = train(script, tmp_path / "run", flags)["counters"][0]
    valid, wanted = np.ones((25, 4), bool), []
    for i, life in enumerate((3, 4, 5, 3)):
        valid[life :: life + 1, i] = False
        for end in range(2 * life, 25, 2 * life + 2):
            wanted.append((end, i, sum(i + t for t in range(1, 2 * life + 1)), 2 * life))
    after = valid.sum(axis=1).cumsum()
    told = [
        [str(after[end]), f"{score:.1f}", f"{length}"] for end, _, score, length in sorted(wanted)
    ]
    assert rows(tmp_path / "run")[1:] == told
    assert steps == after[-1] < 100


IDS = {"Breakout-v5": 0.0, "BreakoutNoFrameskip-v4": 0.0, "ALE/Breakout-v5": 0.25}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("script", ["ppo_atari_multigpu", "ppo_atari_lstm"])
def test_ids_of_gymnasium_and_their_sticky_actions(script, env_id, monkeypatch):
    monkeypatch.setattr(Toy, "made", [])
    args = quiet(script, f"--env-id {env_id} --num-envs 4")
    importlib.import_module(script).Envs(args, slice(0, 4))
    assert Toy.made[0]["name"] == "Breakout-v5"
    assert Toy.made[0]["repeat_action_probability"] == IDS[env_id]
