"""A modernisation of ppo_cma.py, tried as an ablation: each iteration's advantages are centred, so
that about half of them are positive however far the critic lags behind."""

from cma import change, ppo_cma

normalize = ppo_cma.normalize_advantages


def centred(advantages, mode: str):
    return normalize(advantages - advantages.mean(), mode)


change(__name__, normalize_advantages=centred)
