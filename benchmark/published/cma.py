"""What the ablations cma_*.py share: each changes a part of ppo_cma.py and has its flags."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_cma


def change(name: str, **parts):
    """Put these in the place of ppo_cma's; of a program, whose `name` is "__main__", run that."""
    for part, new in parts.items():
        setattr(ppo_cma, part, new)
    if name == "__main__":
        args = ppo_cma.parse_args()
        (ppo_cma.evaluate if args.evaluate else ppo_cma.train)(args)
