"""`film.py SCRIPT RUN FILE.gif [WIDTH HEIGHT FRAMES EVERY]` makes a small animation of a run's mean
or likeliest actions, for a script that sees vectors, and prints the returns so far of the episodes
that it shows. Without a display: MUJOCO_GL=osmesa."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]


def film(script: str, run: Path, path: Path, width=300, height=225, frames=200, every=2):
    module = importlib.import_module(script)
    agent, args = module.load(run)
    options = json.loads(args.env_kwargs) | {"render_mode": "rgb_array"}
    env = module.make_env(args.env_id, **options)
    if hasattr(env.unwrapped, "mujoco_renderer"):
        env.unwrapped.mujoco_renderer.camera_id = 0  # the model's own, which follows the body
    images = []
    returns = []
    ended = True
    for step in range(frames * every):
        if ended:
            obs, _ = env.reset(seed=step)
            returns.append(0.0)
        if step % every == 0:
            images.append(Image.fromarray(env.render()).resize((width, height)).quantize(64))
        action = agent.act(obs[None])[0]
        if action.dtype.kind == "f":
            action = np.clip(action, env.action_space.low, env.action_space.high)
        obs, reward, terminated, truncated, _ = env.step(action)
        returns[-1] += float(reward)
        ended = terminated or truncated
    env.close()
    images[0].save(path, save_all=True, append_images=images[1:], duration=every * 15, loop=0)
    print(f"{path}: {len(images)} frames, returns so far {', '.join(f'{x:.0f}' for x in returns)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    script, run, path, *numbers = sys.argv[1:]
    film(script.removesuffix(".py"), Path(run), Path(path), *map(int, numbers))
