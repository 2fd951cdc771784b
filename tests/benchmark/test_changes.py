"""What benchmark/published adds to the scripts: changes, an environment, a table of saturation."""

import math
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from harness import ended
from torch.utils.tensorboard import SummaryWriter

import ppo_continuous_action as script
from benchmark.published.studies import change

CLIPPED = (change.HERE / "changes").glob("[!c]*.patch")  # not cma- and coady-
PATCHES = sorted(path.stem for path in CLIPPED)
FLAGS = (
    "--env-id Pendulum-v1 --num-steps 256 --num-minibatches 4 --total-timesteps 768 --no-compile "
    "--no-cuda --log-std-init -2 --checkpoint-interval 1"
)


def train(of, folder, flags: str = "") -> dict:
    of.train(of.parse_args([*FLAGS.split(), *flags.split(), "--run-dir", str(folder / "run")]))
    return of.load(folder / "run")[0].state_dict()


def agent_of(name: str):
    made = change.changed(name)
    return made.Agent(made.make_env("HalfCheetah-v4"), made.Args(env_id="HalfCheetah-v4"))


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    return train(script, tmp_path_factory.mktemp("unchanged"))


@pytest.mark.parametrize("name", PATCHES)
def test_each_change_changes_what_is_learned(name, unchanged, tmp_path):
    made = train(change.changed(name), tmp_path)
    assert all(x.isfinite().all() for x in made.values())
    first = "actor_mean.0.weight"
    assert made[first].shape == unchanged[first].shape
    if name == "kl-rate":  # 1.5 or 1/1.5 an iteration, or 1, between a tenth and ten
        factor = made["rate"].item()
        assert min(abs(factor - 1.5**k) for k in range(-3, 4)) < 1e-5 and factor != 1.0
    assert not torch.equal(made[first], unchanged[first])


def test_two_changes_at_once():
    agent = agent_of("floor-0.01+layer-norm")
    assert any(isinstance(layer, torch.nn.LayerNorm) for layer in agent.modules())
    agent.obs_moments.var.zero_()
    assert agent.normalize(torch.ones(1, 17))[0, 0].item() == pytest.approx(10.0)
    for names, told in (
        ("nonsense", r"nonsense: not among .*floor-0\.01, "),
        ("cma-mean-first+symlog", r"not among cma-ce.*, cma-scaled-rewards$"),  # other scripts'
    ):
        with pytest.raises(SystemExit, match=told):
            change.changed(names)


def test_a_run_knows_its_changes(tmp_path, monkeypatch):
    """Played with the network it learned with; the script alone says that it does not fit."""
    run = str(tmp_path / "run")

    def said(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["change.py", *words])
        monkeypatch.setattr(sys.modules["__main__"], "__file__", "change.py", raising=False)
        return ended(change.main).stdout

    assert f"play: python change.py --evaluate {run}\n" in said(
        "layer-norm", *FLAGS.split(), "--run-dir", run
    )
    assert "greedy, 2 episodes: -" in said("--evaluate", run, "--eval-episodes", "2")
    done = ended(script.load, run, code=2)
    assert "does not fit the environment: Error(s) in loading" in done.stderr


def test_floors_are_those_of_torch_and_numpy():
    agent = agent_of("floor-0.1")
    agent.obs_moments.var.fill_(0.15)
    obs = np.full((1, 17), 0.5, np.float32)
    assert agent.normalize(torch.tensor(obs))[0, 0].item() == pytest.approx(1.0)
    expected = agent.origin + agent.unit * agent.actor_mean(torch.ones(1, 17))
    np.testing.assert_allclose(agent.act(obs), expected.detach(), atol=1e-6)


def test_deviations_by_state():
    """What acts in numpy is what is learned: the noise of a sample is that of its probability."""
    agent = agent_of("state-std")
    torch.nn.init.normal_(agent.actor_mean[-1].weight, std=0.1)
    obs = np.random.default_rng(0).normal(size=(5, 17)).astype(np.float32)
    mean, sample = agent.act(obs), agent.act(obs, np.ones((5, 6), np.float32))
    std = torch.tensor(sample - mean)
    assert std.std(dim=0).min() > 0.001
    _, logprob, _, _ = agent(torch.tensor(obs), torch.tensor(sample))
    expected = torch.distributions.Normal(torch.tensor(mean), std).log_prob(torch.tensor(sample))
    torch.testing.assert_close(logprob, expected.sum(-1), rtol=1e-4, atol=1e-4)


def test_pink_noise():
    """Of deviation 1, and alike from step to step: white noise has no such correlation."""
    noise = agent_of("pink-noise").noise(4096, 2)
    assert noise.shape == (4096, 2, 6) and noise.dtype == np.float32
    assert noise.std() == pytest.approx(1.0, abs=0.02)
    assert 0.15 < np.mean(noise[1:] * noise[:-1]) < 0.45


def test_value_epochs_move_the_critic_alone(tmp_path, monkeypatch):
    made = change.changed("value-epochs")
    seen, plain = [], made.minibatch_step

    def step(agent, *given):
        result = plain(agent, *given)
        seen.append((agent.actor_mean[0].weight.clone(), agent.critic[0].weight.clone()))
        return result

    monkeypatch.setattr(made, "minibatch_step", step)
    monkeypatch.setattr(made, "compile_step", lambda agent, args: step)
    train(made, tmp_path, "--total-timesteps 256 --update-epochs 2")
    assert len(seen) == 4 * 4
    actors, critics = zip(*seen, strict=True)
    assert all(torch.equal(x, actors[7]) for x in actors[8:])
    assert not torch.equal(actors[6], actors[7]) and not torch.equal(critics[-2], critics[-1])


def test_pusher_is_v4_and_seeded():
    """Version 4 rewards the state before a step; version 5, the one after it."""
    env = script.make_env("benchmark.published.pusher:Pusher-v4")
    firsts = [env.reset(seed=seed)[0] for seed in (2**32 - 1, 2, 2**32 - 1, None)]
    assert [(firsts[0] == obs).all() for obs in firsts] == [True, False, True, False]
    obs, action, played = firsts[-1], np.linspace(-1.5, 1.5, 7), 0
    ended = truncated = False
    while not (ended or truncated):
        arm, thing, goal = obs[14:17], obs[17:20], obs[20:]
        expected = -np.linalg.norm(thing - goal) - 0.5 * np.linalg.norm(arm - thing)
        obs, reward, ended, truncated, _ = env.step(action)
        assert reward == pytest.approx(expected - 0.1 * action @ action, abs=1e-6)
        played += 1
    assert (played, bool(ended), bool(truncated)) == (100, False, True)


def test_saturation_is_a_mean_over_each_million_steps(tmp_path):
    for name, tag in (("a-s1", "charts/saturated_means"), ("other-s1", "charts/policy_std")):
        with SummaryWriter(str(tmp_path / "Humanoid-v4" / "script" / name / "run")) as log:
            for k, value in enumerate((0.25, 0.75, 0.125, 0.375, 1.0)):  # the last one is alone
                log.add_scalar(tag, value, k * 500_000)
    command = [sys.executable, str(change.HERE / "saturation.py"), str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert made == "run,1M,2M,3M,4M,5M,6M,7M,8M,9M,10M\na-s1,50.00,25.00,-,-,-,-,-,-,-,-\n"


def test_a_claim_of_coadys_is_one_number():
    """Each of the three takes away one part, and nothing else."""
    plain = asdict(change.changed("coady-no-hinge").Servo())
    assert plain.pop("hinge_coef") == 0.0
    for name, field, value in (
        ("no-early-stop", "early_stop", math.inf),
        ("fixed-rate", "lr_servo", "never"),
    ):
        servo = asdict(change.changed(f"coady-{name}").Servo())
        assert servo.pop(field) == value
        assert servo.pop("hinge_coef") == 50.0
        assert servo.items() <= plain.items()
