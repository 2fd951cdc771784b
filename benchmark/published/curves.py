"""The committed runs as curves, what others published beside them, and all figures in results/.

A training return is the mean over the episodes that ended in one window of as many steps as an
iteration has, and less than half a window at the end of a run is left out; of ppo_kl_adaptive.py,
over those of five iterations.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmark import data, report
from benchmark.published import RESULTS
from benchmark.stats import first_reach, iqm, running_mean

BLUE, ORANGE = "#0072B2", "#D55E00"


# --- what was measured ----------------------------------------------------------------------------


class Curve(NamedTuple):
    run: data.Run
    ends: np.ndarray  # [windows], steps or episodes at the end of each; the last step is the run's
    returns: np.ndarray  # [windows]


def runs(env_id: str, script: str, variant: str = "default") -> list[data.Run]:
    """The committed runs, by seed."""
    paths = (RESULTS / env_id / script).glob(f"{variant}-s*.json")
    return sorted(map(data.read_committed, paths), key=lambda run: run.seed)


def load(
    env_id: str, script: str, variant: str = "default", width: int | None = None
) -> list[Curve]:
    """The curves of runs in windows of `width` steps: by default --iter-steps, or a fiftieth of the
    run where the script has no such flag."""
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
    """The runs of ppo_kl_adaptive.py by iterations of whole episodes; one cut off is left out."""
    curves = []
    for run in runs(env_id, "ppo_kl_adaptive"):
        size = run.info["args"]["episodes_per_batch"]
        whole = len(run.returns) // size
        means = run.returns[: whole * size].reshape(whole, size).mean(axis=1)
        curves.append(Curve(run, size * np.arange(1, whole + 1), means))
    return curves


def smooth(values: np.ndarray, width: int = 3) -> np.ndarray:
    """Mean of each window and those before it, `width` in all."""
    return np.array([values[max(0, i + 1 - width) : i + 1].mean() for i in range(len(values))])


def final(curve: Curve) -> float:
    """Mean return of the final policy."""
    return curve.run.score("evaluation")


def last(curve: Curve) -> float:
    """Mean return of the last 100 training episodes."""
    return curve.run.info["final_return"]


def commits(curves: list[Curve]) -> str:
    return ", ".join(sorted({curve.run.commit[:7] for curve in curves}))


def played(run: data.Run, text: str = ".1f") -> str:
    """Mean and standard deviation of the returns of the final policy."""
    return f"{np.mean(run.evaluation):{text}} +- {np.std(run.evaluation):{text}}"


def crossing(curve: Curve, score: float) -> str:
    """Millions of steps after which the return first reaches `score`."""
    above = np.flatnonzero(curve.returns >= score)
    return f"{curve.ends[above[0]] / 1e6:.2f}M" if len(above) else "not yet"


def at(curve: Curve, start: float, end: float) -> float:
    """Mean return of the windows that end after step `start`, and by `end`; nan without them."""
    inside = (curve.ends > start) & (curve.ends <= end)
    return float(curve.returns[inside].mean()) if inside.any() else math.nan


def at_episode(curve: Curve, mark: int) -> float | None:
    """Mean return of the five iterations that end with episode `mark`; None before it."""
    k = int(np.searchsorted(curve.ends, mark))
    return smooth(curve.returns, 5)[k] if k < len(curve.ends) else None


def reach(goal: float, run: data.Run) -> str:
    """A goal and the steps to a mean over 100 games of it, in words."""
    step = first_reach(run.steps, run.returns, goal, least=100)
    return f"{goal}: {step / 1e6:.2f}M" if math.isfinite(step) else f"{goal}: not reached"


def committed(algorithms: Sequence[str], env_ids: Sequence[str]) -> list[report.Group]:
    """The committed runs of these algorithms on these environments, in this order."""
    runs = data.find([RESULTS])
    groups = report.group(r for r in runs if r.algorithm in algorithms and r.env_id in env_ids)
    return sorted(groups, key=lambda g: (env_ids.index(g.env_id), algorithms.index(g.algorithm)))


# --- what others published ------------------------------------------------------------------------


def unversioned(env_id: str) -> str:
    return re.sub(r"-v\d$", "", env_id)


def anchors(env_id: str) -> list:
    """Those of an environment, of any version."""
    found = data.read_anchors(data.ANCHORS)
    return [anchor for anchor in found if unversioned(anchor.env_id) == unversioned(env_id)]


def original(env_id: str) -> tuple[np.ndarray, str, int]:
    """Of the original PPO-CMA's curve (steps, score) [n, 2], in order of steps, the environment,
    version 2 where this one was not tried, and the number of seeds."""
    curve = [anchor for anchor in anchors(env_id) if anchor.algorithm.startswith("ppo-cma-m")]
    names = {anchor.env_id for anchor in curve}
    name = env_id if env_id in names else f"{unversioned(env_id)}-v2"
    found = [anchor for anchor in curve if anchor.env_id == name]
    points = np.array(sorted((anchor.steps, anchor.score) for anchor in found), float)
    return points, name, found[0].seeds


def coady(env_id: str) -> dict[int, float]:
    """Coady's published curve, score by episode."""
    return {
        anchor.episodes: anchor.score
        for anchor in anchors(env_id)
        if anchor.project == "Coady" and anchor.metric.startswith("training")
    }


ELSEWHERE = (  # headings and arguments of published()
    ("training", ("training",), True),
    ("maximum over training", ("max-over-training",), True),
    ("evaluation", ("evaluation", "table"), False),
)


def published(env_id: str, steps: int, metrics: tuple[str, ...], several: bool) -> str:
    """The highest score of other PPO programs with several seeds, or with one or an unknown number,
    by one of the metrics, at the same steps and any version of the environment, as text."""
    found = [
        anchor
        for anchor in anchors(env_id)
        if anchor.algorithm.startswith("ppo")
        and (anchor.steps, anchor.metric in metrics) == (steps, True)
        and ((anchor.seeds or 1) > 1) == several
    ]
    if not found:
        return ""
    best = max(found, key=lambda anchor: anchor.score)
    seeds = {None: "seeds unknown", 1: "1 run"}.get(best.seeds, f"{best.seeds} seeds")
    return f"{report.number(best.score)} ({best.project}, {best.env_id}, {seeds})"


# --- figures --------------------------------------------------------------------------------------


def panels(n: int, width: float, height: float):
    """A figure with n axes in a row."""
    import matplotlib.pyplot as plt

    size = (width * n, height)
    figure, axes = plt.subplots(1, n, figsize=size, squeeze=False, layout="constrained")
    return figure, axes[0]


def save(figure, name: str, dpi: int = 140):
    import matplotlib.pyplot as plt

    for axis in figure.axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / f"{name}.png", dpi=dpi)
    plt.close(figure)


CLIPPED = {
    env_id: script
    for script, env_ids in {
        "ppo_continuous_action": (
            *("HalfCheetah-v4", "Walker2d-v4", "Hopper-v4", "Ant-v4", "Swimmer-v4", "Reacher-v4"),
            *("InvertedPendulum-v4", "InvertedDoublePendulum-v4", "Humanoid-v4", "Pendulum-v1"),
        ),
        "ppo": ("CartPole-v1", "Acrobot-v1", "MountainCar-v0"),
    }.items()
    for env_id in env_ids
}
VARIANTS = {"default": "defaults", "cleanrl": "CleanRL's settings"}


def clipped():
    """The clipped scripts: IQM over seeds, band from the lowest to the highest."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(-(-len(CLIPPED) // 4), 4, squeeze=False)
    figure.set_size_inches(15, 3.2 * len(axes))
    for axis in axes.flat[len(CLIPPED) :]:
        axis.remove()
    for (env_id, script), axis in zip(CLIPPED.items(), axes.flat, strict=False):
        seeds = []
        for (variant, name), color in zip(VARIANTS.items(), (BLUE, ORANGE), strict=True):
            if not (curves := load(env_id, script, variant)):
                continue
            seeds.append(str(len(curves)))
            x = np.linspace(0.02, 1.0, 50) * curves[0].run.info["args"]["total_timesteps"]
            values = np.array([np.interp(x, c.ends, smooth(c.returns)) for c in curves])
            front = {"color": color, "zorder": 3 - len(seeds)}
            axis.plot(x / 1e6, iqm(values, axis=0), label=name, **front)
            ends = values.min(axis=0), values.max(axis=0)
            axis.fill_between(x / 1e6, *ends, alpha=0.2, linewidth=0, **front)
        title = f"{env_id}, {' and '.join(seeds)} seeds"
        axis.set(title=title, xlabel="environment steps (millions)")
    for axis in axes[:, 0]:
        axis.set_ylabel("training return")
    axes[0, 0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    save(figure, "ppo", dpi=120)


THIN = {"color": "black", "linewidth": 0.8, "alpha": 0.5}
GREEN = {"color": "#009E73", "linewidth": 1.4, "alpha": 0.8}
BLACK = {"color": "black", "linewidth": 1.4, "alpha": 0.8}
BESIDE = {  # what the figure of ppo_cma.py shows, too: name, script, variant, looks
    "ppo_continuous_action.py": ("ppo_continuous_action", "default", THIN),
    "ppo_continuous_action.py, 64 environments": ("ppo_continuous_action", "10M-64envs", BLACK),
    "ppo_cma.py --anneal-lr": ("ppo_cma", "anneal-lr", GREEN),
    "ppo_cma.py --action-repeat 2": ("ppo_cma", "repeat2", GREEN),
}
CMA = ("Humanoid-v4", "Hopper-v4", "MountainCarContinuous-v0")


def plural(seeds: int) -> str:
    return f"{seeds} seed{'s' * (seeds > 1)}"


def cma():
    """ppo_cma.py: single seeds, variants, and the original."""
    figure, axes = panels(len(CMA), 4.4, 4.2)
    for env_id, axis in zip(CMA, axes, strict=True):
        curves = load(env_id, "ppo_cma")
        args, most = curves[0].run.info["args"], 1.05 * max(curve.ends[-1] for curve in curves)
        label = f"ppo_cma.py, {len(curves)} seeds, action repeat {args['action_repeat']}"
        for curve in curves:
            axis.plot(curve.ends / 1e6, smooth(curve.returns), color=BLUE, linewidth=1.4, alpha=0.8)
        axis.plot([], [], color=BLUE, label=label)
        for label, (script, variant, looks) in BESIDE.items():
            beside = load(env_id, script, variant, width=args["iter_steps"])
            for curve in beside:
                within = curve.ends <= most
                axis.plot(curve.ends[within] / 1e6, smooth(curve.returns)[within], **looks)
            if beside:
                axis.plot([], [], label=f"{label}, {plural(len(beside))}", **looks)
        points, name, seeds = original(env_id)
        points = points[points[:, 0] <= most]
        label = f"original, {name}, {plural(seeds)}, action repeat 2"
        axis.plot(points[:, 0] / 1e6, points[:, 1], "o--", color=ORANGE, label=label, ms=4)
        axis.set(title=env_id, xlabel="environment steps (millions)", ylabel="training return")
        axis.set_xlim(left=0)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    save(figure, "ppo_cma")


MARKS = {  # episodes
    "HalfCheetah-v4": (300, 600, 900, 1000, 1500, 2000, 3000),
    "Swimmer-v4": (100, 250, 500, 750, 1000),
    "Hopper-v4": (1000, 2000, 3000, 5000),
    "InvertedPendulum-v4": (400, 560, 600, 640, 680, 760, 1000),
}


def kl_adaptive():
    """ppo_kl_adaptive.py: single seeds, their median, and Coady's run."""
    figure, axes = panels(len(MARKS), 4.0, 3.8)
    for env_id, axis in zip(MARKS, axes, strict=True):
        curves = by_batch(env_id)
        values = [smooth(curve.returns, 5) for curve in curves]
        for curve, value in zip(curves, values, strict=True):
            axis.plot(curve.ends, value, color=BLUE, linewidth=0.8, alpha=0.45)
        shared = min(map(len, values))
        median = np.median([value[:shared] for value in values], axis=0)
        axis.plot(curves[0].ends[:shared], median, color=BLUE, linewidth=2.2)
        end = max(curve.ends[-1] for curve in curves)
        points = [point for point in coady(env_id).items() if point[0] <= 1.05 * end]
        axis.plot(*np.array(points).reshape(-1, 2).T, "o--", color=ORANGE, ms=4)
        whole = sum(len(value) == max(map(len, values)) for value in values)
        to_the_end = f", {whole} to the end" * (whole < len(curves))
        axis.set(title=f"{env_id}, {len(curves)} seeds{to_the_end}", xlabel="episodes")
        axis.set_xlim(left=0)
    axes[0].set_ylabel("training return")
    names = ("a seed of ppo_kl_adaptive.py", "median of the seeds", "published: one run, Gym v1")
    handles = [axes[0].lines[i] for i in (0, -2, -1)]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    save(figure, "ppo_kl_adaptive")


GOALS = {"Pong-v5": (0, 10, 18, 20), "Breakout-v5": (10, 50, 100, 200)}  # scores


def atari():
    """ppo_atari_multigpu.py: every game, and the mean of 100."""
    figure, axes = panels(len(GOALS), 5.2, 3.6)
    for env_id, axis in zip(GOALS, axes, strict=True):
        for run in runs(env_id, "ppo_atari_multigpu"):
            axis.plot(run.steps / 1e6, run.returns, ".", color=BLUE, ms=2, alpha=0.25)
            axis.plot(run.steps / 1e6, running_mean(run.returns), color=BLUE, linewidth=1.8)
        axis.set(title=env_id, xlabel="environment steps (millions)", ylabel="raw score of a game")
        axis.set_xlim(left=0)
    names = ("a training game", "mean of the last 100")
    figure.legend(axes[0].lines[:2], names, loc="outside lower center", ncols=2, frameon=False)
    save(figure, "ppo_atari_multigpu")


SCRIPTS = ("ppo_continuous_action", "ppo_kl_adaptive 1M", "ppo_cma 1M")
MUJOCO = (
    *("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Swimmer-v4", "Reacher-v4"),
    *("InvertedPendulum-v4", "InvertedDoublePendulum-v4"),
)


def head_to_head():
    """Clipped, KL-adaptive and CMA on eight environments, and the profile of final policies."""
    groups = committed(SCRIPTS, MUJOCO)
    figure, axes = report.panels(len(MUJOCO) + 1)
    looks, scales = report.styles(groups), data.read_scales(data.SCALES)
    report.plot_curves(axes[:-1], groups, "steps", looks)
    (algorithms, _), *_ = report.compared(groups, "evaluation")
    report.plot_profile(axes[-1], algorithms, "evaluation", scales, looks)
    axes[-1].set(title="final policies", ylabel="fraction of runs above τ")
    report.save(figure, looks, RESULTS / "head-to-head", "curves", svg=False)


WHOLE = "ppo_cma 1M"
CHANGES = {
    "ppo_cma 1M-no-mirror": "negative advantages are dropped, not mirrored",
    "ppo_cma 1M-H1": "the variance is fitted to one iteration, H = 1",
    "ppo_cma 1M-H5": "the variance is fitted to five iterations, H = 5",
    "ppo_cma 1M-N32k": "32,000 steps an iteration",
    "ppo_cma 1M-anneal-lr": "the learning rate falls linearly to 0",
    "cma_product_kernel 1M": "the mirror kernel is a product over the action's dimensions",
    "cma_mean_first 1M": "the mean moves before the variance",
    "cma_published_ends 1M": "an episode's last transition has an advantage of 0",
    "cma_scaled_rewards 1M": "rewards over the RMS of returns so far",
    "cma_centred_advantages 1M": "advantages less their mean",
    "cma_critic_steps 1M": "the critic takes 400 steps an iteration, not 100",
}
ABLATED = ("Hopper-v4", "Walker2d-v4")


def ablations():
    """PPO-CMA with one part changed: a panel for each change and environment."""
    groups = committed((WHOLE, *CHANGES), ABLATED)
    whole = {group.env_id: group for group in groups if group.algorithm == WHOLE}
    changed = [group for group in groups if group.algorithm != WHOLE]
    figure, axes = report.panels(len(changed))
    with_it, without = {"color": report.COLOURS[0]}, {"color": "black"}
    for group, axis in zip(changed, axes, strict=True):
        looks = {WHOLE: without, group.algorithm: with_it}
        report.plot_curves([axis], [whole[group.env_id], group], "steps", looks)
        axis.set_title(f"{group.env_id}: {textwrap.fill(CHANGES[group.algorithm], 42)}", size=10)
        axis.set_ylabel("")
    axes[0].set_ylabel(f"return, mean of {report.GAMES} episodes")
    looks = {"ppo_cma.py": without, "with the change": with_it}
    report.save(figure, looks, RESULTS / "ablations", "curves", svg=False)
