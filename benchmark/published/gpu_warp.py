"""Steps per second of ppo_continuous_action_warp.py on a CUDA device: the environment alone, with
inference, with learning. `python -m benchmark.published.gpu_warp ENV_ID NUM_ENVS HOW`, HOW being
eager or cudagraphs."""

import sys
import time

import torch

import ppo_continuous_action_warp as script

env_id, num_envs, how = sys.argv[1:]
args = script.Args(env_id=env_id, num_envs=int(num_envs), total_timesteps=10**9)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)
envs = script.make_envs(env_id, args.num_envs, device)
agent = script.Agent(envs, args).to(device)
agent.adam = script.flat_adam(agent)
agent.adam["learning_rate"] = torch.tensor(args.learning_rate, device=device)
at, data = script.start(agent, envs, args)
actions = torch.zeros(args.num_envs, len(envs.low), device=device)


def environment():
    _, _, terminated, truncated = envs.step(actions)
    envs.reset(terminated | truncated)


functions = environment, script.rollout, script.update
environment, rollout, update = map(script.Recorded, functions) if how == "cudagraphs" else functions

for name, part in {
    "environment": lambda: [environment() for _ in range(args.num_steps)],
    "and inference": lambda: rollout(agent, envs, at, data, args),
    "everything": lambda: (rollout(agent, envs, at, data, args), update(agent, data, args)),
}.items():
    for k in range(25):
        if k == 5:  # warm
            torch.cuda.synchronize()
            start = time.perf_counter()
        part()
    torch.cuda.synchronize()
    rate = 20 * args.batch_size / (time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 1e9
    print(f"{env_id},{num_envs},{how},{name},{rate:.0f} steps/s,{memory:.2f} GB of torch")
