"""PPO and PPO-CMA-m on a quadratic of two action dimensions, without a state: didactic.gif.

    python benchmark/published/studies/didactic.py

Both maximise r(a) = -|a|^2 over the box [-2, 2]^2. They start from N((-1, -1), 0.25^2) and take 20
iterations of 64 actions. This is the problem of the PPO-CMA paper's first figure, solved by the
`Agent` of ppo_cma.py.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from ppo_cma import Agent, Args, Rollout, pretrain_policy, update

ITERATIONS = 20
ACTIONS = 64
PROBLEM = SimpleNamespace(
    observation_space=gym.spaces.Box(0.0, 0.0, (1,)),  # one dummy state
    action_space=gym.spaces.Box(-2.0, 2.0, (2,)),
)


class Result(NamedTuple):
    rewards: list[float]  # mean over the iteration's actions, drawn before its update
    sigmas: list[float]  # mean deviation of the policy, after the update
    clouds: list[np.ndarray]  # the actions [64, 2]


def optimize(mode: str, seed: int, history: int = 5) -> Result:
    """20 iterations of one algorithm; every action is an episode of its own."""
    torch.set_num_threads(1)
    more = {"minibatch_size": ACTIONS, "history_buffer_size": history}
    args = Args(mode=mode, seed=seed, gamma=0.0, **more)
    agent = Agent(PROBLEM, args)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-8, fused=True)
    agent.initial_mean.fill_(-1.0)
    agent.initial_std.fill_(0.25)
    pretrain_policy(agent, args)
    obs = np.zeros((ACTIONS, 1), np.float32)
    result = Result([], [], [])
    for _ in range(ITERATIONS):
        actions = agent.act(obs, agent.noise(ACTIONS))
        rewards = np.array([-float(action @ action) for action in actions])
        metrics = update(agent, Rollout(obs, actions, rewards, np.ones(ACTIONS, bool)), args)
        result.clouds.append(actions)
        result.rewards.append(metrics["charts/mean_episodic_return"])
        with torch.no_grad():
            result.sigmas.append((0.5 * agent.logvar(torch.zeros(1))).exp().mean().item())
    return result


def draw(sides: list[tuple[str, str, Result]], path: Path):
    """Draw the clouds of actions side by side, one frame for each iteration. A side is its name,
    its colour and its result."""
    import matplotlib.pyplot as plt
    from PIL import Image

    frames = []
    for k in range(ITERATIONS):
        figure, axes = plt.subplots(1, 2, figsize=(8.0, 4.2), layout="constrained")
        for axis, (name, color, result) in zip(axes, sides, strict=True):
            for radius in np.arange(0.5, 3.0, 0.5):
                axis.add_patch(plt.Circle((0, 0), radius, fill=False, color="0.75", linewidth=0.8))
            axis.plot(0, 0, "+", color="black", markersize=9)
            axis.scatter(*result.clouds[k].T, s=16, color=color, alpha=0.7, linewidths=0)
            axis.set(xlim=(-2, 1), ylim=(-2, 1), xticks=[], yticks=[], aspect="equal")
            axis.set_title(f"{name}   (mean reward {result.rewards[k]:.3f})")
        figure.suptitle(f"iteration {k + 1}")
        figure.set_dpi(100)
        figure.canvas.draw()
        frames.append(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3]))
        plt.close(figure)
    palette = frames[len(frames) // 4].quantize(64)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [400] * (ITERATIONS - 1) + [2000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)


if __name__ == "__main__":
    left = ("PPO", "#D55E00", optimize("ppo", 0))
    right = ("PPO-CMA-m", "#0072B2", optimize("ppo-cma-m", 0))
    draw([left, right], Path(__file__).resolve().parents[1] / "results/didactic/didactic.gif")
