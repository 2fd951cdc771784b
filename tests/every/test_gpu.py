"""What each script learns on a GPU is what it learns on a CPU, to rounding: its first iteration is
compared, then more are played there, resumed and evaluated. Skipped where there is no CUDA."""

import importlib
import shlex

import numpy as np
import pytest
import torch
from program import ROOT, scalars, status

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


def first_losses(folder) -> dict[str, float]:
    found = {tag: values for tag, values in scalars(folder).items() if tag.startswith("losses/")}
    return {tag: values[0][1] for tag, values in found.items()}


@pytest.mark.parametrize("name", FLAGS)
def test_learning_on_a_gpu_is_learning_on_a_cpu(name, tmp_path, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    losses = []
    for device in ("--no-cuda", "--cuda"):
        flags = f"{FLAGS[name]} {device} --total-timesteps {STEPS.get(name, 256)}"
        script.train(script.parse_args(shlex.split(f"{flags} --run-dir {tmp_path / device}")))
        losses.append(first_losses(tmp_path / device))
    assert torch.cuda.max_memory_allocated() > 0
    assert len(losses[0]) >= 2 and losses[0].keys() == losses[1].keys()
    for tag, value in losses[0].items():
        assert losses[1][tag] == pytest.approx(value, rel=0.02, abs=1e-3), tag
    before = script.load_checkpoint(tmp_path / "--cuda")
    again = f"--resume {tmp_path / '--cuda'} --total-timesteps {2 * STEPS.get(name, 256)}"
    env_id = script.parse_args(shlex.split(FLAGS[name])).env_id
    named = f" --env-id {env_id}" if ":" in env_id else ""
    script.train(script.parse_args(shlex.split(again + named)))
    after = script.load_checkpoint(tmp_path / "--cuda")
    key = "counters" if "counters" in after else "iteration"
    assert after[key] > before[key]
    assert all(torch.as_tensor(x).isfinite().all() for x in after["agent"].values())
    assert status(tmp_path / "--cuda") == "finished"
    if name in EVALUATED:
        argv = f"--evaluate {tmp_path / '--cuda'} --eval-episodes 2{named}"
        assert np.isfinite(script.evaluate(script.parse_args(shlex.split(argv)))).all()
