"""A modernisation of ppo_cma.py, tried as an ablation, with its flags: each iteration's advantages
are centred, so that about half of them are positive however far the critic lags behind."""

from cma import main, ppo_cma

normalize_advantages = ppo_cma.normalize_advantages


def centred(advantages, mode: str):
    """As ppo_cma.normalize_advantages, of advantages [B] less their mean."""
    return normalize_advantages(advantages - advantages.mean(), mode)


ppo_cma.normalize_advantages = centred

if __name__ == "__main__":
    main()
