"""PPO, PPO-CMA, PPO-CMA-m, PG and PG-pos on a quadratic of two action dimensions, and no state.

    python benchmark/published/didactic.py          # 10 seeds: table, figure and animation, minutes
    python benchmark/published/didactic.py --seeds 3 --output /tmp/didactic

Maximise r(a) = -|a|^2 over the box [-2, 2]^2 from N((-1, -1), 0.25^2), 64 actions an iteration,
20 iterations: the problem of the PPO-CMA paper's first figure, by the `Agent` of ppo_cma.py.
Writes didactic.csv, didactic.png and didactic.gif.
"""

import csv
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from ppo_cma import MODES, Agent, pretrain_policy
from ppo_cma import Args as AgentArgs

ITERATIONS, ACTIONS = 20, 64
RESULTS = Path(__file__).resolve().parent / "results" / "didactic"
NAMES = {
    "ppo-cma-m": "PPO-CMA-m",
    "ppo-cma": "PPO-CMA",
    "ppo": "PPO",
    "pg-pos": "PG-pos",
    "pg": "PG",
}
COLORS = dict(zip(NAMES, ["#0072B2", "#56B4E9", "#D55E00", "#999999", "#333333"], strict=True))
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
    args = AgentArgs(mode=mode, seed=seed, gamma=0.0, **more)
    agent = Agent(PROBLEM, args, pretrain=False)
    agent.initial_mean.fill_(-1.0)
    agent.initial_std.fill_(0.25)
    pretrain_policy(agent)
    state, result = np.zeros((ACTIONS, 1), np.float32), Result([], [], [])
    for _ in range(ITERATIONS):
        actions = agent.act(state, agent.noise(ACTIONS))
        for action in actions:
            agent.memorize(state[0], action, -float(action @ action), done=True)
        result.clouds.append(actions)
        result.rewards.append(agent.update_with_memorized()["charts/mean_episodic_return"])
        with torch.no_grad():
            result.sigmas.append((0.5 * agent.logvar(torch.zeros(1))).exp().mean().item())
    return result


def write_table(runs: dict[str, list[Result]], path: Path):
    with open(path, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["mode", "seed", "iteration", "mean_reward", "std_after_update"])
        for mode, results in runs.items():
            for seed, result in enumerate(results):
                for k in range(ITERATIONS):
                    row = [f"{result.rewards[k]:.6f}", f"{result.sigmas[k]:.6f}"]
                    table.writerow([mode, seed, k + 1, *row])


def draw_convergence(runs: dict[str, list[Result]], path: Path):
    """Reward and deviation against iteration: median over seeds, band from minimum to maximum."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    iterations = np.arange(1, ITERATIONS + 1)
    for mode, name in NAMES.items():
        losses, sigmas = (
            [[-x for x in r.rewards] for r in runs[mode]],
            [r.sigmas for r in runs[mode]],
        )
        for axis, values in zip(axes, (losses, sigmas), strict=True):
            style = {"color": COLORS[mode], "label": name, "linewidth": 2}
            axis.plot(iterations, np.median(values, axis=0), **style)
            low, high = np.min(values, axis=0), np.max(values, axis=0)
            axis.fill_between(iterations, low, high, color=COLORS[mode], alpha=0.15, linewidth=0)
    axes[0].set(title="mean squared distance from the optimum, $-r$", yscale="log")
    axes[1].set(title="standard deviation of the policy", yscale="log")
    axes[1].axhline(0.25, color="black", linewidth=0.8, linestyle=":")
    axes[1].annotate("start", (20, 0.25), ha="right", va="bottom", fontsize=8)
    for axis in axes:
        axis.set(xlabel="iteration", xlim=(1, ITERATIONS), xticks=[1, 5, 10, 15, 20])
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_animation(left: Result, right: Result, path: Path):
    """The clouds of actions of PPO and PPO-CMA-m side by side, one frame an iteration."""
    import matplotlib.pyplot as plt
    from PIL import Image

    frames = []
    for k in range(ITERATIONS):
        figure, axes = plt.subplots(1, 2, figsize=(8.0, 4.2), layout="constrained")
        for axis, name, result in ((axes[0], "PPO", left), (axes[1], "PPO-CMA-m", right)):
            for radius in np.arange(0.5, 3.0, 0.5):
                axis.add_patch(plt.Circle((0, 0), radius, fill=False, color="0.75", linewidth=0.8))
            axis.plot(0, 0, "+", color="black", markersize=9)
            color = COLORS["ppo" if name == "PPO" else "ppo-cma-m"]
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


def main(seeds: int = 10, workers: int = 2, output: Path = RESULTS):
    """Args:
    seeds: seeds 0, 1, ... of each algorithm
    workers: processes
    output: folder for the table and the pictures
    """
    output.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        runs = {mode: list(pool.map(optimize, repeat(mode), range(seeds))) for mode in MODES}
    write_table(runs, output / "didactic.csv")
    draw_convergence(runs, output / "didactic.png")
    draw_animation(runs["ppo"][0], runs["ppo-cma-m"][0], output / "didactic.gif")
    for mode, results in runs.items():
        print(f"{NAMES[mode]:10} last reward {np.mean([x.rewards[-1] for x in results]):.3f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
