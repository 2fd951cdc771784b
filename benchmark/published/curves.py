"""The committed runs as curves, what others have published, and all figures in results/.

A point of a curve is the mean return of the episodes that ended in one window. A window has as many
steps as an iteration. If less than half of the last window is there, it is left out. For
ppo_kl_adaptive.py the mean is over five iterations.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmark import compare, data, report
from benchmark.published import RESULTS, superseded
from benchmark.published.lists import CHANGES, CLIPPED, GOALS, MUJOCO, SCRIPTS, STUDIES, TASKS
from benchmark.stats import running_mean

BLUE = "#0072B2"
SKY = "#56B4E9"
ORANGE = "#D55E00"


# --- what was measured ----------------------------------------------------------------------------


class Curve(NamedTuple):
    run: data.Run
    ends: np.ndarray  # [windows], steps or episodes at the end of each; the last step is the run's
    returns: np.ndarray  # [windows]


@cache
def read() -> list[data.Run]:
    """All committed runs, in order of environment, algorithm and seed; they are read once."""
    found = data.find([RESULTS]) + superseded.read()
    return sorted(found, key=lambda run: (run.env_id, run.algorithm, run.seed))


def runs(env_id: str, script: str, variant: str = "default") -> list[data.Run]:
    """The committed runs, by seed."""
    wanted = env_id, script, variant
    return [x for x in read() if (x.env_id, x.script, x.variant) == wanted]


def without_bonus(env_id: str) -> list[data.Run]:
    """Clipped PPO with --ent-coef 0, which is the default where no rewards repeat."""
    return runs(env_id, CLIPPED, "no-bonus") or runs(env_id, CLIPPED)


def load(env_id: str, script: str, variant: str = "default", width: int = 0) -> list[Curve]:
    """The curves of runs in windows of `width` steps. The default is --iter-steps, or a fiftieth of
    the run if the script has no such flag."""
    curves = []
    for run in runs(env_id, script, variant):
        args = run.info["args"]
        size = width or args.get("iter_steps") or args["total_timesteps"] // 50
        window = ((run.steps - 1) // size).astype(int)
        filled = np.unique(window)
        if run.steps[-1] < (filled[-1] + 0.5) * size:
            filled = filled[:-1]
        means = np.array([run.returns[window == w].mean() for w in filled])
        curves.append(Curve(run, np.minimum((filled + 1) * size, run.steps[-1]), means))
    return curves


def by_batch(env_id: str) -> list[Curve]:
    """The runs of ppo_kl_adaptive.py by iterations of episodes; an unfinished one is left out."""
    curves = []
    for run in runs(env_id, "ppo_kl_adaptive"):
        size = run.info["args"]["episodes_per_batch"]
        whole = len(run.returns) // size
        means = run.returns[: whole * size].reshape(whole, size).mean(axis=1)
        curves.append(Curve(run, size * np.arange(1, whole + 1), means))
    return curves


def committed(algorithms: Sequence[str], env_ids: Sequence[str]) -> list[report.Group]:
    """The committed runs of these algorithms on these environments, in this order."""
    groups = report.group(x for x in read() if x.algorithm in algorithms and x.env_id in env_ids)
    return sorted(groups, key=lambda g: (env_ids.index(g.env_id), algorithms.index(g.algorithm)))


class Effect(NamedTuple):
    """The runs with a change, or those of the script without it."""

    name: str
    runs: list[list[data.Run]]  # by environment
    judgement: compare.Judgement | None  # on the environments that both have run on


def effects(study: str, metric: str) -> Iterator[Effect]:
    """The whole, then each change that has run, judged as `compare` does."""
    whole, env_ids, seeds = STUDIES[study]
    found = [run for run in read() if run.seed in seeds and run.env_id in env_ids]
    before = report.group(run for run in found if run.algorithm == whole)
    if whole == CLIPPED:  # the studies were made before it had a bonus
        before = report.group(run for env_id in env_ids for run in without_bonus(env_id))
    for name in (whole, *CHANGES[study]):
        own = before if name == whole else report.group(x for x in found if x.algorithm == name)
        by_task = {group.env_id: group.finished for group in own}
        runs = [by_task.get(env_id, []) for env_id in env_ids]
        if name == whole:
            yield Effect(name, runs, None)
        elif any(runs):
            _, judgement = compare.effect(before, own, metric)
            yield Effect(name, runs, judgement)


# --- what others published ------------------------------------------------------------------------


def anchors(env_id: str) -> list:
    """Other projects' scores on an environment, of any version."""
    name = re.sub(r"-v\d$", "", env_id)
    return [x for x in data.read_anchors(data.ANCHORS) if re.sub(r"-v\d$", "", x.env_id) == name]


def control() -> list:
    """CleanRL's scores on dm_control after 1M steps."""
    found = data.read_anchors(data.ANCHORS)
    return [x for x in found if x.env_id.startswith("dm_control/") and x.steps == 1_000_000]


def coady(env_id: str) -> dict[int, float]:
    """Coady's published curve, score by episode."""
    own = (x for x in anchors(env_id) if x.project == "Coady" and x.metric.startswith("training"))
    return {x.episodes: x.score for x in own}


ELSEWHERE = {  # heading: (metrics, whether of several seeds)
    "training": (("training",), True),
    "maximum over training": (("max-over-training",), True),
    "evaluation": (("evaluation", "table"), False),
}


def published(env_id: str, steps: int, metrics: tuple[str, ...], several: bool) -> str:
    """The highest score of other PPO programs after the same steps, on any version."""
    scores = [
        anchor.score
        for anchor in anchors(env_id)
        if anchor.algorithm.startswith("ppo")
        and (anchor.steps, anchor.metric in metrics) == (steps, True)
        and ((anchor.seeds or 1) > 1) == several
    ]
    return report.number(max(scores)) if scores else ""


# --- figures --------------------------------------------------------------------------------------


def kl_adaptive():
    """ppo_kl_adaptive.py: single seeds, their median, and Coady's run."""
    env_ids = ("HalfCheetah-v4", "Swimmer-v4", "Hopper-v4", "Walker2d-v4", "InvertedPendulum-v4")
    each = {"color": BLUE, "linewidth": 0.8, "alpha": 0.45}
    middle = {"color": BLUE, "linewidth": 2.2}
    original = {"color": ORANGE, "linestyle": "--", "marker": "o", "markersize": 4}
    names = "a seed of ppo_kl_adaptive.py", "median of the seeds", "published: one run, Gym v1"
    looks = dict(zip(names, (each, middle, original), strict=True))
    figure, axes = report.panels(len(env_ids))
    for env_id, axis in zip(env_ids, axes, strict=True):
        curves = by_batch(env_id)
        values = [running_mean(curve.returns, 5) for curve in curves]
        for curve, value in zip(curves, values, strict=True):
            axis.plot(curve.ends, value, **each)
        shared = min(map(len, values))
        median = np.median([value[:shared] for value in values], axis=0)
        axis.plot(curves[0].ends[:shared], median, **middle)
        end = max(curve.ends[-1] for curve in curves)
        points = [point for point in coady(env_id).items() if point[0] <= 1.05 * end]
        axis.plot(*np.transpose(points), **original)
        axis.set(title=f"{env_id}, {len(curves)} seeds", xlabel="episodes")
        axis.set_xlim(left=0)
    for axis in axes[::3]:
        axis.set_ylabel("training return")
    report.save(figure, looks, RESULTS, "ppo_kl_adaptive", svg=False)


def learning(algorithms: Sequence[str], env_ids: Sequence[str], more: int = 0) -> tuple:
    """Learning curves: the figure, the axes that are left, the groups and their looks."""
    groups = committed(algorithms, env_ids)
    figure, axes = report.panels(len(env_ids) + more)
    looks = report.styles(groups)
    report.plot_curves(axes[: len(env_ids)], groups, "steps", looks)
    return figure, axes[len(env_ids) :], groups, looks


FIGURES = {  # file: algorithms, environments
    "ppo": ([f"{script}{x}" for script in TASKS.values() for x in ("", " cleanrl")], [*TASKS]),
    "readme": (
        ["ppo_continuous_action", "ppo_continuous_action cleanrl", "ppo", "ppo cleanrl"],
        ["HalfCheetah-v4", "Hopper-v4", "Humanoid-v4", "Walker2d-v4", "CartPole-v1", "Acrobot-v1"],
    ),
    "ppo_atari_multigpu": (
        [
            *(f"ppo_atari_multigpu{x}" for x in ("", " 2M-by-1", " 2M-by-2", " 10M")),
            "ppo_atari_lstm",
        ],
        [*GOALS],
    ),
    "ppo_lstm": (
        ["ppo_lstm", "ppo_lstm span", "ppo_lstm none"],
        ["CartPoleNoVel-v1", "PendulumNoVel-v1", "popgym-RepeatPreviousEasy-v0", "Cue-v0"],
    ),
}


def head_to_head():
    """Clipped, KL-adaptive and CMA on eight environments, and the profile of final policies."""
    figure, (axis,), groups, looks = learning(SCRIPTS, MUJOCO, more=1)
    algorithms, _ = report.compared(groups, "evaluation")
    report.plot_profile(axis, algorithms, "evaluation", data.read_scales(data.SCALES), looks)
    axis.set(title="final policies", ylabel="fraction of runs above τ")
    names = {name.removesuffix(" 1M"): look for name, look in looks.items()}
    report.save(figure, names, RESULTS / "head-to-head", "curves", svg=False)


def humanoid():
    """PPO-CMA on Humanoid: its seeds, its PPO mode's, and the points of the original's figure."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8.0, 4.6), layout="constrained")
    for variant, color, label in (
        ("anneal-lr", BLUE, "ppo_cma.py"),
        ("default", SKY, "with --no-anneal-lr, as the original"),
        ("5M-ppo-0.1", "0.55", "with --mode ppo, to 5M steps"),
    ):
        own = runs("Humanoid-v4", "ppo_cma", variant)
        for run in own:
            name = f"{label}, {len(own)} seeds" if run is own[0] else None
            returns = running_mean(run.returns)
            axis.plot(run.steps / 1e6, returns, color=color, linewidth=0.9, label=name)
    for algorithm, look in (("ppo-cma-m N=32k", "o"), ("ppo N=32k", "x")):
        found = (x for x in anchors("Humanoid-v2") if x.algorithm == algorithm)
        points = sorted((x.steps / 1e6, x.score) for x in found)
        name = f"original {algorithm.split()[0]}, mean of 3 seeds"
        axis.plot(*np.transpose(points), look, color=ORANGE, label=name)
    axis.set(xlabel="million environment steps", ylabel="training return, last 100 episodes")
    axis.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "ppo_cma_humanoid.png", dpi=140)
    plt.close(figure)


def figures():
    """Make all figures anew."""
    for name, shown in FIGURES.items():
        figure, _, _, looks = learning(*shown)
        report.save(figure, looks, RESULTS, name, svg=False)
    for make in (kl_adaptive, head_to_head, humanoid):
        make()
