"""Steps per second of ppo_continuous_action_warp.py on a device: the environment alone, with
inference, and with learning. With CUDA each is a CUDA graph.

    python -m benchmark.published.studies.gpu_warp TABLE.csv ENV_ID NUM_ENVS... [--tf32]

A row that is there is not measured again.
"""

import sys
import time
from pathlib import Path

import torch

import ppo_continuous_action_warp as script
from benchmark.published.studies.gpu_profile import add, read, wait

REPEATS = 8


class Training:
    """The parts of an iteration, ready to be called again and again."""

    def __init__(self, env_id: str, num_envs: int, tf32: bool):
        more = {"num_envs": num_envs, "tf32": tf32, "total_timesteps": 10**9}
        self.args = script.Args(env_id=env_id, **more)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        torch.manual_seed(1)
        self.envs = script.make_envs(env_id, num_envs, device)
        self.agent = script.Agent(self.envs, self.args).to(device)
        self.agent.adam = script.adam_state(self.agent)
        self.agent.adam["learning_rate"] = torch.tensor(self.args.learning_rate, device=device)
        self.data = script.start(self.agent, self.envs, self.args)
        self.actions = torch.zeros(num_envs, len(self.envs.low), device=device)
        record = script.Recorded if cuda else lambda function: function
        self.play_one = record(self.environment)
        self.rollout = record(script.rollout)
        self.update = record(script.update)

    def environment(self):
        _, _, terminated, truncated = self.envs.step(self.actions)
        self.envs.reset(terminated | truncated)

    def play(self):
        for _ in range(self.args.num_steps):
            self.play_one()

    def act(self):
        self.rollout(self.agent, self.envs, self.data, self.args)

    def learn(self):
        self.update(self.agent, self.data, self.args)

    def everything(self):
        self.act()
        self.learn()


def seconds_of(function, repeats: int = REPEATS) -> float:
    """Seconds of one call. Five calls before it make libraries ready and record a graph."""
    for _ in range(5):
        function()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - start) / repeats


def measure(table: Path, env_id: str, num_envs: int, tf32: bool, repeats: int):
    """Add the rows of one size to the table."""
    size = env_id, str(num_envs)
    if any((row["env_id"], row["num_envs"]) == size for row in read(table)):
        return
    began = time.perf_counter()
    training = Training(env_id, num_envs, tf32)
    training.play()
    wait()
    ready = time.perf_counter() - began
    parts = {
        "environment": training.play,
        "environment and inference": training.act,
        "learning": training.learn,
        "everything": training.everything,
    }
    for part, function in parts.items():
        seconds = seconds_of(function, repeats)
        row = {"env_id": env_id, "num_envs": num_envs, "part": part}
        row["steps_per_second"] = round(training.args.batch_size / seconds)
        row["iteration_ms"] = round(1000 * seconds, 2)
        row["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        row["start_seconds"] = round(ready, 1)
        row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        add(table, row | {"torch": torch.__version__})


def main(table: str, env_id: str, *words: str):
    for num_envs in (int(word) for word in words if word != "--tf32"):
        measure(Path(table), env_id, num_envs, "--tf32" in words, REPEATS)


if __name__ == "__main__":
    main(*sys.argv[1:])
