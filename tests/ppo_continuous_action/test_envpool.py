"""`--env-id envpool:...` of ppo.py and ppo_continuous_action.py."""

import contextlib
import sys

import envpool
import gymnasium as gym
import numpy as np
import pytest
from scripts import refused, train

import ppo
import ppo_continuous_action

POOL = "--num-envs 3 --num-steps 16 --num-minibatches 2 --update-epochs 1 --no-compile --no-cuda"


def test_near_ids_and_what_is_missing_are_named(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for script, flags, *says in (
        ("ppo_continuous_action", "HalfCheeta-v4", "is not supported", "ids: ['HalfCheetah-v4'"),
        ("ppo", "CartPoll-v1", "near ids: ['CartPole-v1'"),
        ("ppo", "", "near ids: []"),
        ("ppo_continuous_action", "CartPole-v1", "for discrete ones use ppo.py"),
        ("ppo", "Ant-v4", "for a Box use ppo_continuous_action.py"),
        ("ppo", "Pong-v5", "pixels: ppo_pixels.py"),
        ("ppo_continuous_action", 'Ant-v4 --env-kwargs {"nonsense":1}', "nonsense"),
    ):
        for said in says:
            refused(capfd, said, train, script, tmp_path / "run", f"--env-id envpool:{flags}")
    monkeypatch.setitem(sys.modules, "envpool", None)
    flags = "--env-id envpool:CartPole-v1"
    assert refused(capfd, "", train, "ppo", tmp_path / "run", flags).endswith("install envpool\n")
    assert not list(tmp_path.iterdir())


def pool(env_id: str, num_envs: int = 2, script=ppo_continuous_action, start: int = 0):
    args = script.Args(env_id=f"envpool:{env_id}", num_envs=num_envs)
    return script.make_envs(args, num_envs, {"played": [], "counters": (0, start, 0.0, 0)})


def test_a_time_limit_returns_the_true_last_observation():
    """HalfCheetah's step 1000: truncated, its observation a small step from the one before and no
    reset's; the next step ignores its action and pays nothing."""
    envs, rng = pool("HalfCheetah-v4"), np.random.default_rng(0)
    total = np.zeros(2)
    for step in range(1000):
        before = envs.obs.copy()
        rewards, terminated, truncated = envs.step(rng.uniform(-1, 1, (2, 6)))
        total += rewards
        assert not terminated.any() and truncated.all() == (step == 999)
    assert envs.over.all()
    assert np.abs(envs.obs).max() > 0.5  # at rest, as a reset leaves it, 0.3 at most
    assert np.abs(envs.obs[:, :8] - before[:, :8]).max() < 1.0
    assert [(i, length) for i, _, length in envs.ended] == [(0, 1000), (1, 1000)]
    np.testing.assert_allclose([score for _, score, _ in envs.ended], total, rtol=1e-6)
    rewards, terminated, truncated = envs.step(rng.uniform(-1, 1, (2, 6)))
    assert not rewards.any() and not (terminated | truncated | envs.over).any()
    assert np.abs(envs.obs[:, :8]).max() < 0.3 and not envs.ended
    assert not envs.discounted.any()
    envs.close()


def test_dicts_are_flattened_in_the_order_of_the_space():
    envs = pool("CheetahRun-v1")
    plain = envpool.make(
        "CheetahRun-v1", env_type="gymnasium", num_envs=2,
        seed=[ppo.episode_seed(1, i, 0) % 2**31 for i in range(2)],
    )  # fmt: skip
    obs, _ = plain.reset()
    names = list(gym.spaces.flatten_space(plain.observation_space).shape)
    assert envs.obs.shape == (2, *names)
    action = np.full((2, 6), 0.5, np.float32)
    for _ in range(5):
        expected = [gym.spaces.flatten(plain.observation_space, {k: v[i] for k, v in obs.items()})
                    for i in range(2)]  # fmt: skip
        np.testing.assert_allclose(envs.obs, expected, rtol=1e-6)
        envs.step(action)
        obs, *_ = plain.step(action)
    envs.close()
    plain.close()


@pytest.mark.parametrize(
    ("script", "env_id"), [(ppo, "CartPole-v1"), (ppo_continuous_action, "CheetahRun-v1")]
)
def test_it_is_trained_on_played_and_resumed(script, env_id, tmp_path, capsys, monkeypatch):
    folder, made = tmp_path / "run", []
    plain = script.PoolEnvs.__init__

    def spy(self, args, num_envs, start):
        plain(self, args, num_envs, start)
        made.append((num_envs, start, self.obs.copy()))

    monkeypatch.setattr(script.PoolEnvs, "__init__", spy)
    monkeypatch.setattr(gym, "make", None)  # not a gymnasium environment of that name
    flags = f"--env-id envpool:{env_id} {POOL} --total-timesteps 96 --env-workers 2"
    script.train(script.parse_args([*flags.split(), "--run-dir", str(folder)]))
    assert script.load_checkpoint(folder)["args"].env_id == f"envpool:{env_id}"
    script.train(script.parse_args(f"--resume {folder} --total-timesteps 192".split()))
    assert script.load_checkpoint(folder)["counters"][1] == 4
    returns = script.evaluate(script.parse_args(f"--evaluate {folder} --eval-episodes 1".split()))
    assert np.isfinite(returns).all() and len(returns) == 1
    by_size = [(n, start) for n, start, _ in made]
    assert [x for x in by_size if x[0] == 3] == [(3, 0), (3, 2)]
    first, resumed = (obs for n, _, obs in made if n == 3)
    assert not np.isclose(first, resumed).all(axis=1).any()  # new episodes, with other seeds
    assert len({tuple(row) for row in np.concatenate([first, resumed])}) == 6


def test_choices_are_one_hot():
    args = ppo.Args(env_id="envpool:FrozenLake-v1", num_envs=3)
    with contextlib.closing(ppo.make_envs(args, 3)) as envs:
        assert envs.observation_space.shape == (16,)
        np.testing.assert_array_equal(envs.obs, np.eye(16)[[0, 0, 0]])
        for _ in range(20):
            envs.step(np.full((3, 1), 1))  # down
            np.testing.assert_array_equal(envs.obs.sum(axis=1), np.ones(3))
        act = ppo.Agent(envs, args).numpy_actor()
        assert act(envs.obs).shape == (3, 1)
