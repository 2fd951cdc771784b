"""What each script learns on a GPU is what it learns on a CPU, to rounding: its first iteration is
compared, then more are played there, resumed and evaluated. Skipped where there is no CUDA."""

import importlib

import numpy as np
import pytest
import torch
from program import scalars, status
from scripts import parse

SIZES = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --checkpoint-interval 1"
FLAGS = {
    "ppo": f"--env-id CartPole-v1 {SIZES}",
    "ppo_continuous_action": f"--env-id InvertedPendulum-v4 {SIZES}",
    "ppo_kl_adaptive": "--env-id InvertedPendulum-v4 --num-envs 3 --episodes-per-batch 6",
    "ppo_cma": "--env-id InvertedPendulum-v4 --iter-steps 200 --n-updates 3",
    "ppo_atari_multigpu": f"--env-id Breakout-v5 --cudagraphs {SIZES}",
    "ppo_pixels": f"--env-id benchmark.published.gates:Gates-v0 {SIZES}",
    "ppo_pettingzoo": f"--env-id agents_toy:make {SIZES}",
    "ppo_lstm": SIZES,
}
STEPS = {"ppo_kl_adaptive": 400, "ppo_cma": 400}  # of two iterations; the others: 256
EVALUATED = {"ppo", "ppo_continuous_action", "ppo_pixels", "ppo_pettingzoo"}  # the others take long

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


@pytest.mark.parametrize("name", FLAGS)
def test_learning_on_a_gpu_is_learning_on_a_cpu(name, tmp_path, monkeypatch):
    script, steps, losses = importlib.import_module(name), STEPS.get(name, 256), []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for device in ("--no-cuda", "--cuda"):
        flags = f"{FLAGS[name]} {device} --total-timesteps {steps} --run-dir {tmp_path / device}"
        script.train(parse(name, flags))
        found = scalars(tmp_path / device).items()
        losses.append({tag: values[0][1] for tag, values in found if tag.startswith("losses/")})
    assert torch.cuda.max_memory_allocated() > 0
    assert len(losses[0]) >= 2
    assert losses[1] == pytest.approx(losses[0], rel=0.02, abs=1e-3)
    before = script.load_checkpoint(tmp_path / "--cuda")
    env_id = parse(name, FLAGS[name]).env_id
    named = f"--env-id {env_id}" if ":" in env_id else ""
    again = f"--resume {tmp_path / '--cuda'} --total-timesteps {2 * steps} {named}"
    script.train(parse(name, again))
    after = script.load_checkpoint(tmp_path / "--cuda")
    assert after["iteration"] > before["iteration"]
    assert all(torch.as_tensor(x).isfinite().all() for x in after["agent"].values())
    assert status(tmp_path / "--cuda") == "finished"
    if name in EVALUATED:
        play = f"--evaluate {tmp_path / '--cuda'} --eval-episodes 2 {named}"
        assert np.isfinite(script.evaluate(parse(name, play))).all()
