"""What benchmark/published adds to the scripts: changes, an environment."""

import math
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from harness import ended

import ppo_continuous_action as script
from benchmark.published.studies import change

CLIPPED = (change.HERE / "changes").glob("[!c]*.patch")  # not cma- and coady-
PATCHES = sorted(path.stem for path in CLIPPED)
FLAGS = (
    "--env-id Pendulum-v1 --num-steps 256 --num-minibatches 4 --total-timesteps 512 --no-compile "
    "--no-cuda --log-std-init -2 --checkpoint-interval 1"
)
HISTORY = ["git", "cat-file", "-e", change.COMMIT]
COMMIT = pytest.mark.skipif(
    subprocess.run(HISTORY, cwd=change.HERE, capture_output=True).returncode != 0,
    reason=f"a shallow clone: the changes are of the scripts at {change.COMMIT}",
)


@COMMIT
@pytest.mark.parametrize("name", PATCHES)
def test_each_change_changes_what_is_learned(name, tmp_path):
    module = change.changed(name)
    args = module.parse_args([*FLAGS.split(), "--run-dir", str(tmp_path / "run")])
    module.train(args)
    final = module.load(tmp_path / "run")[0].state_dict()
    torch.manual_seed(args.seed)
    begun = module.Agent(module.make_env("Pendulum-v1"), args).state_dict()
    assert all(x.isfinite().all() for x in final.values())
    assert not torch.equal(final["actor_mean.0.weight"], begun["actor_mean.0.weight"])


@COMMIT
def test_a_run_knows_its_changes(tmp_path, monkeypatch):
    """Played with the network it learned with."""
    run = str(tmp_path / "run")

    def output(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["change.py", *words])
        monkeypatch.setattr(sys.modules["__main__"], "__file__", "change.py", raising=False)
        return ended(change.main).stdout

    trained = output("layer-norm", *FLAGS.split(), "--run-dir", run)
    assert f"play: python change.py --evaluate {run}\n" in trained
    assert "greedy, 2 episodes: -" in output("--evaluate", run, "--eval-episodes", "2")


def test_an_unknown_change_is_refused():
    for names in ("nonsense", "cma-mean-first+symlog"):  # of two scripts
        with pytest.raises(SystemExit, match=f"{names}: not among".replace("+", r"\+")):
            change.changed(names)


@COMMIT
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


def test_pusher_is_v4_and_seeded():
    """Version 4 rewards the state before a step; version 5, the one after it."""
    env = script.make_env("benchmark.published.pusher:Pusher-v4")
    firsts = [env.reset(seed=seed)[0] for seed in (2**32 - 1, 2, 2**32 - 1, None)]
    assert [(firsts[0] == obs).all() for obs in firsts] == [True, False, True, False]
    obs, action, steps = firsts[-1], np.linspace(-1.5, 1.5, 7), 0
    terminated = truncated = False
    while not (terminated or truncated):
        arm, thing, goal = obs[14:17], obs[17:20], obs[20:]
        expected = -np.linalg.norm(thing - goal) - 0.5 * np.linalg.norm(arm - thing)
        obs, reward, terminated, truncated, _ = env.step(action)
        assert reward == pytest.approx(expected - 0.1 * action @ action, abs=1e-6)
        steps += 1
    assert (steps, bool(terminated), bool(truncated)) == (100, False, True)
