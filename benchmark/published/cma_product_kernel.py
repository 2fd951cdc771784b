"""An ablation of ppo_cma.py: the kernel of mirrored actions is the Gaussian of the whole action, a
product over dimensions, where ppo_cma.py averages over them."""

import torch.nn.functional as F
from cma import change, ppo_cma


def mean_loss(actions, advantages, mean, logvar, mean_old, mirror: bool):
    """As ppo_cma.mean_loss, but for the kernel."""
    logvar = logvar.detach()
    loss = -(F.relu(advantages) * ppo_cma.log_density(actions, mean, logvar)).mean()
    if mirror:
        kernel = (-0.5 * (actions - mean_old).square() / logvar.exp()).sum(-1).exp()
        mirrored = ppo_cma.log_density(2.0 * mean_old - actions, mean, logvar)
        loss = loss - (F.relu(-advantages) * kernel * mirrored).mean()
    return loss


change(__name__, mean_loss=mean_loss)
