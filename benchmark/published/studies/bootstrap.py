"""What the bootstrap at a time limit is worth to ppo_continuous_action_warp.py on Pendulum-v1.

Runs have 800k steps, limits of 200 and 20 steps, and 10 seeds. All take 15 minutes; given again,
this goes on. The scores in results/bootstrap.csv are mean returns of 200 steps of the mean action,
in 1,024 environments.
"""

import tempfile
from pathlib import Path

import ppo_continuous_action_warp as script
from benchmark.published import RESULTS

FILE = RESULTS / "bootstrap.csv"
PENDULUM = script.Pendulum
GAE = script.gae
RULES = {  # from V before and after a step and its flags: what follows, and where it is not used
    "the true last observation": lambda v, after, over, cut: (after, over),
    "the observation before it": lambda v, after, over, cut: (v.where(cut, after), over),
    "nothing": lambda v, after, over, cut: (after, over | cut),
}


def score(rule: str, limit: int, seed: int) -> float:  # of a policy trained here
    def pendulum(*given):
        envs = PENDULUM(*given)
        envs.limit = limit
        return envs

    script.Pendulum = pendulum
    script.gae = lambda rewards, *x: GAE(rewards, x[0], *RULES[rule](*x[:4]), *x[3:])
    sizes = {"num_envs": 256, "num_steps": 32, "hidden": (64, 64), "total_timesteps": 800_000}
    with tempfile.TemporaryDirectory() as folder:
        args = script.Args(env_id="Pendulum-v1", seed=seed, run_dir=Path(folder), **sizes)
        agent, _ = script.load(script.train(args))
    envs = pendulum(1024, "cpu")
    total = 0.0
    obs = envs.reset(envs.steps == 0)
    for _ in range(200):
        obs, rewards, _, _ = envs.step(agent.act(obs).clamp(envs.low, envs.high))
        total += rewards.mean().item()
    return total


if __name__ == "__main__":
    done = FILE.read_text() if FILE.exists() else "rule,limit,seed,score\n"
    for seed, limit, rule in ((s, n, r) for s in range(1, 11) for n in (200, 20) for r in RULES):
        if (row := f"{rule},{limit},{seed},") not in done:
            done += f"{row}{score(rule, limit, seed):.1f}\n"
            FILE.write_text(done)
