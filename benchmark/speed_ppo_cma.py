"""Steps per CPU-second of ppo_cma.py's whole training loop beside its bare environment.

    python benchmark/speed_ppo_cma.py --rounds 6

In each round, in one process and one after the other: 16,000 steps of the environment with uniform
random actions and nothing else, then one training iteration (rollout, update, logs, checkpoint) as
`train` does it. Writes results/speed_ppo_cma-<num_envs>envs.csv; the ratio is of CPU time, of
medians over rounds.
"""

import csv
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import ppo_cma  # noqa: E402


@dataclass
class Args:
    env_id: str = "Humanoid-v4"
    """environment"""
    iter_steps: int = 32_000
    """N"""
    num_envs: int = 1
    """environments played side by side"""
    rounds: int = 6
    """rounds to measure, after one to warm up"""
    output: Path = HERE / "results"
    """folder for the table of all rounds"""


def bare(args: ppo_cma.Args, steps: int) -> tuple[float, float]:
    """CPU and wall microseconds per step of the environment with random actions."""
    env = ppo_cma.make_env(args.env_id)
    low, high = env.action_space.low, env.action_space.high
    actions = np.random.default_rng(0).uniform(low, high, (steps, len(low)))
    env.reset(seed=0)
    cpu, wall = time.process_time(), time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return (
        (time.process_time() - cpu) * 1e6 / steps,
        (time.perf_counter() - wall) * 1e6 / steps,
    )


def main(speed: Args):
    names = ["round", "bare_cpu_us", "bare_wall_us", "rollout_cpu_us", "update_cpu_us"]
    names += ["logs_cpu_us", "train_cpu_us", "train_wall_us", "cpu_ratio"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        args = ppo_cma.Args(
            env_id=speed.env_id,
            iter_steps=speed.iter_steps,
            num_envs=speed.num_envs,
            cuda=False,
            run_dir=Path(folder) / "run",
        )
        envs = [
            ppo_cma.Episodes(ppo_cma.make_env(args.env_id), args, i) for i in range(args.num_envs)
        ]
        torch.set_num_threads(args.num_threads)
        agent, run = ppo_cma.Agent(envs[0], args), ppo_cma.Run(args, {})
        for k in range(speed.rounds + 1):
            bare_cpu, bare_wall = bare(args, 16_000)
            first, wall = run.global_step, time.perf_counter()
            times = [time.process_time()]
            ppo_cma.rollout(agent, envs, run, args)
            times.append(time.process_time())
            metrics = agent.update_with_memorized()
            times.append(time.process_time())
            run.log(metrics | {"charts/learning_rate": args.learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                ppo_cma.save(run, agent, envs)
            times.append(time.process_time())
            micro = 1e6 / (run.global_step - first)
            parts = np.diff(times) * micro
            wall = (time.perf_counter() - wall) * micro
            ratio = bare_cpu / parts.sum()
            row = [k, bare_cpu, bare_wall, *parts, parts.sum(), wall, ratio]
            print("  ".join(f"{n} {v:.3g}" for n, v in zip(names, row, strict=True)), flush=True)
            rows.append(row)
        run.close("finished")
    speed.output.mkdir(parents=True, exist_ok=True)
    path = speed.output / f"speed_ppo_cma-{speed.num_envs}envs.csv"
    with open(path, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        table.writerows([row[0], *(f"{v:.4g}" for v in row[1:])] for row in rows[1:])
    medians = np.median(rows[1:], axis=0)
    print(
        f"{speed.env_id}: {1e6 / medians[6]:.0f} steps per CPU-second training, "
        f"{1e6 / medians[1]:.0f} stepping at random: {medians[1] / medians[6]:.3f} "
        f"(medians of {speed.rounds} rounds)"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
