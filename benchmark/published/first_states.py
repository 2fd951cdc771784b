"""From which first states a run's policy on InvertedDoublePendulum-v4 falls, by 100 episodes of the
mean action: `python benchmark/published/first_states.py RUN...` prints a row a run of the table in
docs/what_matters.md."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_continuous_action
from benchmark.published import change


def row(folder: Path) -> str:
    """Falls, mean angles (rad) of the upper pole at the start of these and of the other episodes,
    the policy's deviation, and those of the cosines of both angles."""
    saved = ppo_continuous_action.load_checkpoint(folder)["args"]
    known = {path.stem for path in (change.HERE / "changes").glob("*.patch")}
    script = change.changed(saved.exp_name) if saved.exp_name in known else ppo_continuous_action
    env = script.make_env("InvertedDoublePendulum-v4")
    agent, _ = script.load(folder, env)
    leans, fallen = [], []
    for seed in range(100):
        obs, _ = env.reset(seed=seed)
        leans.append(abs(env.unwrapped.data.qpos[1:].sum()))
        ended = truncated = False
        while not (ended or truncated):
            action = agent.act(obs[None])[0].clip(env.action_space.low, env.action_space.high)
            obs, _, ended, truncated, _ = env.step(action)
        fallen.append(ended)
    leans, fallen = np.array(leans), np.array(fallen)
    angles = (f"{leans[x].mean():.3f}" if x.any() else "" for x in (fallen, ~fallen))
    cosines = ", ".join(f"{x:.3f}" for x in agent.obs_moments.var[3:5].sqrt().tolist())
    cells = f"`{saved.exp_name}`, seed {saved.seed}", str(fallen.sum()), *angles
    return " | ".join([*cells, f"{agent.actor_logstd.exp().item():.3f}", cosines])


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(f"| {row(Path(path))} |")
