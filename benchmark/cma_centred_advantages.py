"""A modernisation of ppo_cma.py, tried as an ablation, with its flags: each iteration's advantages
are centred, so that about half of them are positive however far the critic lags behind."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_cma

normalize_advantages = ppo_cma.normalize_advantages


def centred(advantages, mode: str):
    """As ppo_cma.normalize_advantages, of advantages [B] less their mean."""
    return normalize_advantages(advantages - advantages.mean(), mode)


ppo_cma.normalize_advantages = centred

if __name__ == "__main__":
    args = ppo_cma.parse_args()
    (ppo_cma.evaluate if args.evaluate else ppo_cma.train)(args)
