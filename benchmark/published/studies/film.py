"""`python benchmark/published/studies/film.py RUN ENV_ID FILE.gif` makes a small animation of some
greedy episodes of a run of ppo_pixels.py, and prints their returns."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]


@torch.no_grad()
def film(run: Path, env_id: str, path: Path, episodes: int = 4, side: int = 192):
    import ppo_pixels

    args = replace(ppo_pixels.load_checkpoint(run)["args"], env_id=env_id, seed=1)
    args = replace(args, env_kwargs=json.dumps({"render_mode": "rgb_array"}))
    envs = ppo_pixels.make_envs(args, 1, {})
    agent, _ = ppo_pixels.load(run, envs)
    frames = []
    returns = [0.0]
    while len(returns) <= episodes:
        image = Image.fromarray(envs.envs[0].render()).resize((side, side))
        frames.append(image.quantize(32))
        logprobs, mean, _ = agent.policy(envs.obs.to("cpu"))
        rewards, _, _ = envs.step(agent.choose_action(logprobs, mean).numpy())
        returns[-1] += rewards[0]
        if envs.autoreset[0]:
            returns.append(0.0)
    envs.close()
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=150, loop=0)
    print(f"{path}: {len(frames)} frames, returns {', '.join(f'{x:.2f}' for x in returns[:-1])}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    film(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
