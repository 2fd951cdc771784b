"""What the tables and figures show: tasks, scripts, and studies of changes."""

from collections.abc import Container, Sequence
from typing import NamedTuple

from benchmark import data
from benchmark.published import HERE

CLIPPED = "ppo_continuous_action"
SCRIPTS = CLIPPED, "ppo_kl_adaptive 1M", "ppo_cma 1M"
MUJOCO = (
    *("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Swimmer-v4", "Reacher-v4"),
    *("InvertedPendulum-v4", "InvertedDoublePendulum-v4"),
)
TASKS = dict.fromkeys((*MUJOCO, "Humanoid-v4", "Pusher-v4", "Pendulum-v1"), CLIPPED)
TASKS |= dict.fromkeys(("CartPole-v1", "Acrobot-v1", "MountainCar-v0"), "ppo")
GOALS = {"Pong-v5": (0, 10, 18), "Breakout-v5": (10, 50, 100), "BeamRider-v5": (500, 1000, 1900)}


def control(*tasks: str) -> tuple[str, ...]:
    return tuple(f"dm_control/{task}-v0" for task in tasks)


BONUS_TASKS = (  # of studies/default.py
    *("InvertedPendulum-v4", "InvertedDoublePendulum-v4", "Walker2d-v4", "Humanoid-v4"),
    *control("finger-spin", "walker-run", "hopper-hop", "quadruped-walk"),
)
RARE = (  # of the fourth protocol: one dimension, two, four
    *("InvertedPendulum-v4", *control("pendulum-swingup", "cartpole-swingup_sparse")),
    *control("finger-spin", "ball_in_cup-catch", "reacher-easy", "hopper-hop"),
)
FOUR = "HalfCheetah-v4", "Walker2d-v4", "Ant-v4", "InvertedDoublePendulum-v4"
EIGHT = *FOUR, "Hopper-v4", "Swimmer-v4", "Humanoid-v4", "Reacher-v4"
HARD = control("finger-spin", "pendulum-swingup", "walker-run", "hopper-hop", "acrobot-swingup")
LED = control("cartpole-swingup", "cheetah-run", "walker-walk", "reacher-easy", "quadruped-walk")
NOISY = *MUJOCO[:4], *control("cheetah-run", "hopper-hop", "reacher-easy", "walker-walk")
ANY = range(2**63)  # seeds

CHANGES = {}  # of changes.csv: by study the algorithms, and what they change in words
for row in data.read_csv(HERE / "changes.csv"):
    for name in row["studies"].split():
        CHANGES.setdefault(name, {})[row["algorithm"]] = row["change"]


class Study(NamedTuple):
    whole: str  # the algorithm without a change
    env_ids: Sequence[str]
    seeds: Container[int] = ANY


STUDIES = {
    "ablations": Study("ppo_cma 1M", ("Hopper-v4", "Walker2d-v4")),
    "modes": Study("ppo_cma 1M", MUJOCO),
    "claims": Study("ppo_kl_adaptive 200k", ("Hopper-v4", "HalfCheetah-v4")),
    "what-matters": Study(f"{CLIPPED} study", FOUR, range(101, 104)),
    "finalists": Study(f"{CLIPPED} no-target-kl", EIGHT),
    "explore": Study(f"{CLIPPED} explore-defaults", HARD),
    "explore-eight": Study(CLIPPED, EIGHT),
    "explore-led": Study(CLIPPED, LED),
    "explore-winner": Study(CLIPPED, (*EIGHT, "InvertedPendulum-v4")),
    "rpo": Study(f"{CLIPPED} no-target-kl", NOISY),
}
