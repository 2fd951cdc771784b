"""A modernisation of ppo_cma.py, tried as an ablation, with its flags: the learning rate falls
linearly to 0 at the last step, as in the clipped scripts. (The log keeps showing the first one.)"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_cma

rollout = ppo_cma.rollout


def annealed_rollout(agent, envs, run, args):
    """As ppo_cma.rollout; sets the rate of the update that follows it."""
    remaining = max(0.0, 1.0 - run.global_step / args.total_timesteps)
    for optimizer in agent.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = remaining * args.learning_rate
    rollout(agent, envs, run, args)


ppo_cma.rollout = annealed_rollout

if __name__ == "__main__":
    args = ppo_cma.parse_args()
    (ppo_cma.evaluate if args.evaluate else ppo_cma.train)(args)
