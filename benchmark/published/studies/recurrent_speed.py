"""Steps per CPU second of ppo_lstm.py and of sb3-contrib's RecurrentPPO, in turn in this process.

    pip install --no-deps stable-baselines3 sb3-contrib
    python -m benchmark.published.studies.recurrent_speed FILE.csv [rounds]

CartPole without velocities has rl-baselines3-zoo's settings: 8 x 32 steps, 20 epochs of one
minibatch, LSTMs of 64 for policy and value. Frames of 64 x 64 bytes, which cost nothing to make,
have RecurrentPPO's default settings: 128 steps, 10 epochs of minibatches of 128 rows, LSTMs of 256.
A short training warms up.
"""

import csv
import platform
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env

import ppo_lstm
from benchmark.published import novel

FIELDS = ["task", "program", "round", "steps", "cpu_seconds", "steps_per_cpu_second", "torch"]
FIELDS += ["sb3_contrib", "machine"]


class Noise(gym.Env):
    """Frames of noise, two actions that do nothing, episodes of 100 steps."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 1), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.t = 0
        self.frames = self.np_random.integers(0, 256, (101, 64, 64, 1), np.uint8)
        return self.frames[0], {}

    def step(self, action):
        self.t += 1
        return self.frames[self.t], float(action), self.t == 100, False, {}


gym.register("Noise-v0", Noise)
CARTPOLE = {"learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.8, "ent_coef": 0.0}
TASKS = {  # id: steps, settings of both, of ppo_lstm.py, of RecurrentPPO
    "CartPoleNoVel-v1": (
        4_096,
        CARTPOLE,
        {"num_steps": 32, "num_minibatches": 1, "update_epochs": 20, "memory_size": 64},
        {
            "policy": "MlpLstmPolicy",
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 20,
            "policy_kwargs": {"lstm_hidden_size": 64, "net_arch": {"pi": [64], "vf": [64]}},
        },
    ),
    "Noise-v0": (
        1_024,
        {},
        {"num_minibatches": 8, "update_epochs": 10, "memory_size": 256},
        {"policy": "CnnLstmPolicy"},
    ),
}


def ours(env_id: str, steps: int, **settings) -> float:
    """CPU seconds of a training."""
    with tempfile.TemporaryDirectory() as folder:
        args = ppo_lstm.Args(
            env_id=env_id,
            total_timesteps=steps,
            num_threads=1,
            cuda=False,
            run_dir=Path(folder) / "run",
            **settings,
        )
        start = time.process_time()
        ppo_lstm.train(args)
        return time.process_time() - start


def theirs(env_id: str, steps: int, **settings) -> float:
    """CPU seconds of a training."""
    torch.set_num_threads(1)
    envs = make_vec_env(env_id, 8, seed=1)
    start = time.process_time()
    RecurrentPPO(env=envs, seed=1, device="cpu", **settings).learn(steps)
    return time.process_time() - start


def main(file: str, rounds: int = 3):
    assert novel.SEEN  # its environments are registered
    found = []
    versions = torch.__version__, sys.modules["sb3_contrib"].__version__, platform.machine()
    for number in range(rounds + 1):  # the first one warms up
        for task, (steps, both, our_own, their_own) in TASKS.items():
            steps = steps if number else 1_024
            two = our_own | {"separate_critic": True}
            programs = [
                ("ppo_lstm.py", ours, our_own),
                ("ppo_lstm.py --separate-critic", ours, two),
                ("RecurrentPPO", theirs, their_own),
            ]
            for program, train, own in programs:
                seconds = train(task, steps, **both, **own)
                if number:
                    speed = round(steps / seconds, 1)
                    row = [task, program, number, steps, round(seconds, 2), speed, *versions]
                    found.append(row)
                    print(*row, flush=True)
    with open(file, "w", newline="") as output:
        csv.writer(output).writerows([FIELDS, *found])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
