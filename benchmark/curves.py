"""Tables and curves of the README, from the committed tables of finished runs and anchors.csv.

    python -m benchmark.curves report      # -> results/ppo_cma.md and .png
    python -m benchmark.curves table       # -> results/ppo.md and .png
    python -m benchmark.curves episodes    # -> results/ppo_kl_adaptive.md and .png
    python -m benchmark.curves atari       # -> results/ppo_atari_multigpu.md and .png

A training return is the mean over the episodes that ended in one window of as many steps as an
iteration has, and less than half a window at the end of a run is left out; in `episodes`, over
those of five iterations.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmark.data import RESULTS, anchors, read_committed
from benchmark.report import estimate, number
from benchmark.stats import first_reach, iqm, running_mean

BLUE, ORANGE = "#0072B2", "#D55E00"


@dataclass
class Curve:
    seed: int
    steps: np.ndarray  # [windows], the end of each, the last one's the run's
    returns: np.ndarray  # [windows]
    info: dict


def runs(env_id: str, script: str, variant: str = "default") -> Iterator[tuple]:
    """Of an environment's runs, in any order: run.json, and of each episode, in order of their
    ends, the step of that and the return."""
    for path in (RESULTS / env_id / script).glob(f"{variant}-s*.json"):
        run = read_committed(path)
        yield run.info, run.steps, run.returns


def load(
    env_id: str, script: str, variant: str = "default", width: int | None = None
) -> list[Curve]:
    """The curves of an environment's runs, by seed, in windows of `width` steps: by default
    --iter-steps, or a fiftieth of the run where the script has no such flag."""
    curves = []
    for info, steps, returns in runs(env_id, script, variant):
        args = info["args"]
        size = width or args.get("iter_steps") or args["total_timesteps"] // 50
        window = ((steps - 1) // size).astype(int)
        filled = np.unique(window)
        if steps[-1] < (filled[-1] + 0.5) * size:
            filled = filled[:-1]
        means = np.array([returns[window == w].mean() for w in filled])
        ends = np.minimum((filled + 1) * size, steps[-1])
        curves.append(Curve(info["seed"], ends, means, info))
    return sorted(curves, key=lambda curve: curve.seed)


def unversioned(env_id: str) -> str:
    return re.sub(r"-v\d$", "", env_id)


def original(env_id: str) -> tuple[np.ndarray, str, int]:
    """Of the original PPO-CMA's curve (steps, score) [n, 2], in order of steps, the environment,
    version 2 where this one was not tried, and the number of seeds."""
    for name in (env_id, f"{unversioned(env_id)}-v2"):
        found = [
            anchor
            for anchor in anchors()
            if anchor.algorithm.startswith("ppo-cma-m") and anchor.env_id == name
        ]
        if found:
            points = np.array(sorted((anchor.steps, anchor.score) for anchor in found), float)
            return points, name, found[0].seeds
    raise ValueError(f"the original PPO-CMA was not run on {env_id}")


def smooth(values: np.ndarray, width: int = 3) -> np.ndarray:
    """Mean of each window and those before it, `width` in all."""
    return np.array([values[max(0, i + 1 - width) : i + 1].mean() for i in range(len(values))])


CROSSINGS = (1000, 2000, 3000, 4000)  # of returns on Humanoid
ORIGINAL_CROSSINGS = ("2.01M", "2.48M", "2.91M", "3.34M")  # read off the original's figure


def crossing(curve: Curve, score: float) -> str:
    """Millions of steps after which the return first reaches `score`."""
    above = np.flatnonzero(curve.returns >= score)
    return f"{curve.steps[above[0]] / 1e6:.2f}M" if len(above) else "not yet"


def at(curve: Curve, start: float, end: float) -> float:
    """Mean return of the windows that end after step `start`, and by `end`; nan without them."""
    inside = (curve.steps > start) & (curve.steps <= end)
    return float(curve.returns[inside].mean()) if inside.any() else math.nan


def published(env_id: str, metrics: tuple[str, ...], several: bool = True) -> str:
    """The highest score of other PPO programs with several seeds, or with one or an unknown number,
    by one of the metrics, at the same steps and any version of the environment, as text."""
    name = unversioned(env_id)
    steps = load(env_id, script_of(env_id))[0].info["args"]["total_timesteps"]
    found = [
        anchor
        for anchor in anchors()
        if unversioned(anchor.env_id) == name
        and anchor.algorithm.startswith("ppo")
        and anchor.steps == steps
        and anchor.metric in metrics
        and ((anchor.seeds or 1) > 1) == several
    ]
    if not found:
        return ""
    best = max(found, key=lambda anchor: anchor.score)
    seeds = {None: "seeds unknown", 1: "1 run"}.get(best.seeds, f"{best.seeds} seeds")
    return f"{number(best.score)} ({best.project}, {best.env_id}, {seeds})"


ELSEWHERE = (  # headings and arguments of published()
    ("training", ("training",), True),
    ("maximum over training", ("max-over-training",), True),
    ("evaluation", ("evaluation", "table"), False),
)


CLIPPED = {
    "ppo_continuous_action": (
        "HalfCheetah-v4", "Walker2d-v4", "Hopper-v4", "Ant-v4", "Swimmer-v4", "Reacher-v4",
        "InvertedPendulum-v4", "InvertedDoublePendulum-v4", "Humanoid-v4", "Pendulum-v1",
    ),
    "ppo": ("CartPole-v1", "Acrobot-v1", "MountainCar-v0"),
}  # fmt: skip
VARIANTS = {"default": "defaults", "cleanrl": "CleanRL's settings"}


def script_of(env_id: str) -> str:
    return next(script for script, env_ids in CLIPPED.items() if env_id in env_ids)


def summary(scores: list[float]) -> str:
    """Interquartile mean over seeds, bold, and its 95% bootstrap interval."""
    middle, _, ends = estimate(np.array(scores)).partition(" ")
    return f"**{middle}** {ends}".rstrip()


def last_hundred(curve: Curve) -> float:
    return curve.info["final_return"]


def final_policy(curve: Curve) -> float:
    return float(np.mean(curve.info["evaluation"]))


def table():
    """Write results/ppo.md and results/ppo.png: the clipped scripts."""
    import matplotlib.pyplot as plt

    lines = ["# ppo.py and ppo_continuous_action.py\n"]
    lines.append(
        "Interquartile means over seeds with 95% percentile-bootstrap intervals (of five seeds or "
        "fewer: wide ones).\nFinal policy: mean action (for ppo.py the greedy one), 20 episodes a "
        "seed, of the policy at the end of training.\nTraining: mean of the last 100 training "
        "episodes, with exploration. Other projects' numbers are published ones,\nof the metric "
        "the column says, at the same number of steps, not rerun.\n"
    )
    lines.append(
        "| environment | steps | setting | seeds | final policy | training | each seed's policy "
        "| commits |"
    )
    lines.append("|---|---|---|---|---|---|---|---|")
    env_ids = [env for script in CLIPPED for env in CLIPPED[script] if load(env, script)]
    rows = math.ceil(len(env_ids) / 4)
    figure, axes = plt.subplots(rows, 4, figsize=(15, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(env_ids) :]:
        axis.remove()
    for env_id, axis in zip(env_ids, axes.flat, strict=False):
        seeds = []
        for (variant, name), color in zip(VARIANTS.items(), (BLUE, ORANGE), strict=True):
            curves = load(env_id, script_of(env_id), variant)
            if not curves:
                continue
            seeds.append(str(len(curves)))
            scores = [final_policy(curve) for curve in curves]
            steps = curves[0].info["args"]["total_timesteps"]
            cells = [env_id, f"{steps:,}", name, len(curves), summary(scores)]
            cells += [summary([last_hundred(curve) for curve in curves])]
            cells += [", ".join(map(number, scores))]
            cells += [", ".join(sorted({curve.info["git_commit"][:7] for curve in curves}))]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            grid = np.linspace(0.02, 1.0, 50) * steps
            values = np.array([np.interp(grid, c.steps, smooth(c.returns)) for c in curves])
            front = {"color": color, "zorder": 3 - len(seeds)}
            axis.plot(grid / 1e6, iqm(values, axis=0), label=name, **front)
            ends = values.min(axis=0), values.max(axis=0)
            axis.fill_between(grid / 1e6, *ends, alpha=0.2, linewidth=0, **front)
        title = f"{env_id}, {' and '.join(seeds)} seeds"
        axis.set(title=title, xlabel="environment steps (millions)")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("training return")
    axes[0, 0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(RESULTS / "ppo.png", dpi=120)
    lines += ["", "In the figure lines are interquartile means over seeds, bands reach from the "]
    lines[-1] += "lowest to the highest.\n\nThe highest that others published, at the same number "
    lines[-1] += "of steps; evaluations are of one run or of an unknown number:\n"
    names = [name for name, *_ in ELSEWHERE]
    lines += [f"| environment | {' | '.join(names)} |", "|---|---|---|---|"]
    for env_id in env_ids:
        cells = [published(env_id, metrics, several) for _, metrics, several in ELSEWHERE]
        if any(cells):
            lines.append(f"| {env_id} | {' | '.join(cells)} |")
    (RESULTS / "ppo.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


THIN = {"color": "black", "linewidth": 0.8, "alpha": 0.5}
GREEN = {"color": "#009E73", "linewidth": 1.4, "alpha": 0.8}
BLACK = {"color": "black", "linewidth": 1.4, "alpha": 0.8}
BESIDE = {  # what the figure of ppo_cma.py shows, too: name, script, variant, looks
    "ppo_continuous_action.py": ("ppo_continuous_action", "default", THIN),
    "ppo_continuous_action.py, 64 environments": ("ppo_continuous_action", "10M-64envs", BLACK),
    "ppo_cma.py --anneal-lr": ("ppo_cma", "anneal-lr", GREEN),
    "ppo_cma.py --action-repeat 2": ("ppo_cma", "repeat2", GREEN),
}


def draw(env_ids: list[str], script: str, path: Path):
    import matplotlib.pyplot as plt

    size = (4.4 * len(env_ids), 4.2)
    figure, axes = plt.subplots(1, len(env_ids), figsize=size, squeeze=False, layout="constrained")
    for axis, env_id in zip(axes[0], env_ids, strict=True):
        curves = load(env_id, script)
        for curve in curves:
            axis.plot(
                curve.steps / 1e6, smooth(curve.returns), color=BLUE, linewidth=1.4, alpha=0.8
            )
        args = curves[0].info["args"]
        repeat = args["action_repeat"]
        label = f"{script}.py, {len(curves)} seeds, action repeat {repeat}"
        axis.plot([], [], color=BLUE, label=label)
        longest = max(curve.steps[-1] for curve in curves)
        for label, (other, variant, looks) in BESIDE.items():
            beside = load(env_id, other, variant, width=args["iter_steps"])
            for curve in beside:
                within = curve.steps <= 1.05 * longest
                axis.plot(curve.steps[within] / 1e6, smooth(curve.returns)[within], **looks)
            if beside:
                seeds = f"{len(beside)} seed{'s' * (len(beside) > 1)}"
                axis.plot([], [], label=f"{label}, {seeds}", **looks)
        points, name, seeds = original(env_id)
        points = points[points[:, 0] <= 1.05 * longest]
        label = f"original, {name}, {seeds} seed{'s' * (seeds > 1)}, action repeat 2"
        axis.plot(points[:, 0] / 1e6, points[:, 1], "o--", color=ORANGE, label=label, ms=4)
        axis.set(title=env_id, xlabel="environment steps (millions)", ylabel="training return")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    figure.savefig(path, dpi=140)
    plt.close(figure)


SETTINGS = {  # variants of ppo_cma.sh
    "default": "",
    "anneal-lr": " `--anneal-lr`",
    "repeat2": " `--action-repeat 2`",
}


def report(script: str = "ppo_cma"):
    """Write results/<script>.md and results/<script>.png."""
    known = ("Humanoid-v4", "Hopper-v4", "MountainCarContinuous-v0")
    env_ids = [env_id for env_id in known if load(env_id, script)]
    lines = [f"# {script}.py: training returns\n"]
    lines += ["| environment | seed | steps | training return, last 3 windows | best window "]
    lines[-1] += "| mean action, 20 episodes | commit |"
    lines += ["|---|---|---|---|---|---|---|"]
    for env_id in env_ids:
        for variant, words in SETTINGS.items():
            curves = load(env_id, script, variant)
            name = env_id + words
            for c in curves:
                played, last = c.info["evaluation"], smooth(c.returns)[-1]
                cells = [name, c.seed, f"{c.info['global_step']:,}", f"{last:.1f}"]
                cells += [f"{c.returns.max():.1f}"]
                cells += [f"{np.mean(played):.1f} +- {np.std(played):.1f}"]
                lines.append(f"| {' | '.join(map(str, cells))} | {c.info['git_commit'][:7]} |")
            if len(curves) < 2:
                continue
            last = np.mean([smooth(c.returns)[-1] for c in curves])
            played = np.mean([c.info["evaluation"] for c in curves])
            cells = [name, f"mean of {len(curves)}", "", f"**{last:.1f}**", ""]
            lines.append(f"| {' | '.join(cells)} | **{played:.1f}** | |")
    lines.append(
        "\nTraining returns are with exploration noise. Hardware, versions and arguments of"
    )
    lines.append("each run: the .json beside its table.\n")
    humanoid = load("Humanoid-v4", script)
    if humanoid:
        lines.append("Humanoid-v4, N = 32,000: steps to a mean return of\n")
        lines.append(f"| | {' | '.join(map(str, CROSSINGS))} |")
        lines.append("|---" * (1 + len(CROSSINGS)) + "|")
        for c in humanoid:
            cells = " | ".join(crossing(c, score) for score in CROSSINGS)
            lines.append(f"| seed {c.seed} (to {c.info['global_step'] / 1e6:.2f}M) | {cells} |")
        lines.append(f"| original, Humanoid-v2, mean of 3 | {' | '.join(ORIGINAL_CROSSINGS)} |\n")
    (RESULTS / f"{script}.md").write_text("\n".join(lines))
    draw(env_ids, script, RESULTS / f"{script}.png")
    print("\n".join(lines))


MARKS = {  # episodes
    "HalfCheetah-v4": (300, 600, 900, 1000, 1500, 2000, 3000),
    "Swimmer-v4": (100, 250, 500, 750, 1000),
    "Hopper-v4": (1000, 2000, 3000, 5000),
    "InvertedPendulum-v4": (400, 560, 600, 640, 680, 760, 1000),
}


@dataclass
class Batches:
    """A run of ppo_kl_adaptive.py by its iterations of whole episodes."""

    seed: int
    steps: int
    returns: np.ndarray  # [episodes]
    means: np.ndarray  # [iterations]
    ends: np.ndarray  # [iterations], episodes so far
    info: dict

    def at(self, mark: int) -> float | None:
        """Mean return of the five iterations that end with episode `mark`; None before it."""
        k = int(np.searchsorted(self.ends, mark))
        return smooth(self.means, 5)[k] if k < len(self.ends) else None


def by_batch(env_id: str) -> list[Batches]:
    """The runs of an environment, by seed; an iteration that isn't whole is left out."""
    curves = []
    for info, steps, returns in runs(env_id, "ppo_kl_adaptive"):
        size = info["args"]["episodes_per_batch"]
        whole = len(returns) // size
        means = returns[: whole * size].reshape(whole, size).mean(axis=1)
        ends = size * np.arange(1, whole + 1)
        curves.append(Batches(info["seed"], int(steps[-1]), returns, means, ends, info))
    return sorted(curves, key=lambda curve: curve.seed)


def coady(env_id: str) -> dict[int, float]:
    """Coady's published curve, score by episode."""
    return {
        anchor.episodes: anchor.score
        for anchor in anchors()
        if anchor.project == "Coady"
        and anchor.metric.startswith("training")
        and unversioned(anchor.env_id) == unversioned(env_id)
    }


def episodes():
    """Write results/ppo_kl_adaptive.md and results/ppo_kl_adaptive.png."""
    found = {path.parts[-3] for path in RESULTS.glob("*/ppo_kl_adaptive/default-s*.json")}
    marked = [env_id for env_id in MARKS if env_id in found]
    curves = {env_id: by_batch(env_id) for env_id in [*marked, *sorted(found - MARKS.keys())]}
    lines = ["# ppo_kl_adaptive.py\n"]
    lines.append(
        "Training returns, with exploration noise, at the same number of episodes: mean over the "
        "five iterations up to\nthat episode, so of 25 episodes for HalfCheetah and Swimmer (5 an "
        "iteration) and of 100 for the others (20 an\niteration). Published: Coady, AI Gym "
        "Workout, one unseeded run on Gym v1 environments and MuJoCo 1.31, read off its\nplots of "
        "the mean return of single iterations; where returns rise fast, a mean of five lags behind "
        "that.\nHardware, versions and arguments of each run: the .json beside its table.\n"
    )
    lines.append("| environment | episodes | published | seeds | median | best | each seed |")
    lines.append("|---|---|---|---|---|---|---|")
    for env_id in marked:
        points = coady(env_id)
        for mark in MARKS[env_id]:
            scores = [s for s in (curve.at(mark) for curve in curves[env_id]) if s is not None]
            if not scores:
                continue
            cells = [env_id, f"{mark:,}", f"{points[mark]:,.0f}" if mark in points else ""]
            cells += [len(scores), f"**{np.median(scores):,.0f}**", f"{max(scores):,.0f}"]
            cells += [", ".join(f"{score:,.0f}" for score in scores)]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| environment | seed | episodes | steps | return, last 100 episodes "]
    lines[-1] += "| mean action, 20 episodes | first iteration at 950 ends with episode | commit |"
    lines.append("|---|---|---|---|---|---|---|---|")
    for env_id, mine in curves.items():
        for c in mine:
            played, above = c.info["evaluation"], c.ends[c.means >= 950]
            cells = [env_id, c.seed, f"{len(c.returns):,}", f"{c.steps:,}"]
            cells += [f"{c.returns[-100:].mean():,.1f}"]
            cells += [f"{np.mean(played):,.1f} +- {np.std(played):,.1f}"]
            solved = f"{above[0]:,}" if len(above) else "not yet"
            cells += [solved if env_id.startswith("InvertedPendulum-") else ""]
            lines.append(f"| {' | '.join(map(str, cells))} | {c.info['git_commit'][:7]} |")
    (RESULTS / "ppo_kl_adaptive.md").write_text("\n".join(lines) + "\n")
    draw_episodes({env_id: curves[env_id] for env_id in marked})
    print("\n".join(lines))


def draw_episodes(curves: dict[str, list[Batches]]):
    import matplotlib.pyplot as plt

    size = (4.0 * len(curves), 3.8)
    figure, axes = plt.subplots(1, len(curves), figsize=size, squeeze=False, layout="constrained")
    for axis, (env_id, mine) in zip(axes[0], curves.items(), strict=True):
        values = [smooth(curve.means, 5) for curve in mine]
        for curve, value in zip(mine, values, strict=True):
            axis.plot(curve.ends, value, color=BLUE, linewidth=0.8, alpha=0.45)
        shared = min(map(len, values))
        median = np.median([value[:shared] for value in values], axis=0)
        axis.plot(mine[0].ends[:shared], median, color=BLUE, linewidth=2.2)
        last = max(curve.ends[-1] for curve in mine)
        points = [point for point in coady(env_id).items() if point[0] <= 1.05 * last]
        axis.plot(*np.array(points).reshape(-1, 2).T, "o--", color=ORANGE, ms=4)
        whole = sum(len(value) == max(map(len, values)) for value in values)
        to_the_end = f", {whole} to the end" * (whole < len(mine))
        axis.set(title=f"{env_id}, {len(mine)} seeds{to_the_end}", xlabel="episodes")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("training return")
    names = ("a seed of ppo_kl_adaptive.py", "median of the seeds", "published: one run, Gym v1")
    handles = [axes[0, 0].lines[i] for i in (0, -2, -1)]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(RESULTS / "ppo_kl_adaptive.png", dpi=140)
    plt.close(figure)


GOALS = {"Pong-v5": (0, 10, 18, 20), "Breakout-v5": (10, 50, 100, 200)}  # scores


def reach(goal: float, steps: np.ndarray, scores: np.ndarray) -> str:
    """A goal and the steps to a mean over 100 games of it, in words."""
    step = first_reach(steps, scores, goal, least=100)
    return f"{goal}: {step / 1e6:.2f}M" if math.isfinite(step) else f"{goal}: not reached"


def atari():
    """Write results/ppo_atari_multigpu.md and results/ppo_atari_multigpu.png."""
    import matplotlib.pyplot as plt

    script = "ppo_atari_multigpu"
    found = {path.parts[-3] for path in RESULTS.glob(f"*/{script}/default-s*.json")}
    env_ids = [env_id for env_id in GOALS if env_id in found]
    lines = ["# ppo_atari_multigpu.py\n"]
    lines.append(
        "Raw scores of whole games, without sticky actions. Training: mean of the last 100 games, "
        "drawn actions. Greedy: 20\ngames of the final policy, mean and standard deviation. Hours "
        "are of training. Arguments, versions and hardware of\neach run: the .json beside its "
        "table.\n"
    )
    lines.append("| game | seed | processes | steps | hours | training | greedy | commit |")
    lines.append("|---|---|---|---|---|---|---|---|")
    reached = ["", "| game | seed | steps to a mean over 100 games of |", "|---|---|---|"]
    size = (5.2 * len(env_ids), 3.6)
    figure, axes = plt.subplots(1, len(env_ids), figsize=size, squeeze=False, layout="constrained")
    for env_id, axis in zip(env_ids, axes[0], strict=True):
        for info, steps, scores in sorted(runs(env_id, script), key=lambda run: run[0]["seed"]):
            means, played = running_mean(scores), info["evaluation"]
            cells = [env_id, info["seed"], info["processes"], f"{int(steps[-1]):,}"]
            cells += [f"{info['wall_seconds'] / 3600:.1f}", f"**{means[-1]:.1f}**"]
            cells += [f"{np.mean(played):.1f} +- {np.std(played):.1f}", info["git_commit"][:7]]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            firsts = [reach(goal, steps, scores) for goal in GOALS[env_id]]
            reached.append(f"| {env_id} | {info['seed']} | {', '.join(firsts)} |")
            axis.plot(steps / 1e6, scores, ".", color=BLUE, ms=2, alpha=0.25)
            axis.plot(steps / 1e6, means, color=BLUE, linewidth=1.8)
        axis.set(title=env_id, xlabel="environment steps (millions)", ylabel="raw score of a game")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    names = ("a training game", "mean of the last 100")
    figure.legend(axes[0, 0].lines[:2], names, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(RESULTS / f"{script}.png", dpi=140)
    text = "\n".join(lines + reached) + "\n"
    (RESULTS / f"{script}.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {f.__name__: f for f in (report, table, episodes, atari)},
        description=__doc__,
    )
