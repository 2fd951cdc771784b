"""A modernisation of ppo_cma.py, tried as an ablation: rewards are divided by the RMS of all
Monte-Carlo returns so far, every iteration weighing the same, so that the critic, whose steps are
few and small, need not follow returns over orders of magnitude."""

import numpy as np
import torch
from cma import change, ppo_cma

update = ppo_cma.update


class Agent(ppo_cma.Agent):
    """With the mean square of returns, which checkpoints hold, too."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.register_buffer("return_sq_mean", torch.zeros((), dtype=torch.float64))


def scaled_update(agent: Agent, obs, actions, rewards, lengths) -> dict[str, float]:
    ends = np.zeros(len(rewards))
    ends[np.cumsum(lengths) - 1] = 1.0
    nothing = np.zeros(len(rewards) + 1)
    returns = ppo_cma.gae(rewards, nothing, ends, ends, agent.args.gamma, 1.0)
    agent.return_sq_mean += (np.mean(returns**2) - agent.return_sq_mean) / (agent.updates + 1)
    scale = agent.return_sq_mean.sqrt().item() + 1e-8
    return update(agent, obs, actions, rewards / scale, lengths)


change(__name__, Agent=Agent, update=scaled_update)
