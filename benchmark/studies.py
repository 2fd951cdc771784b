"""Pages about several programs, from the committed runs: the head-to-head of mujoco.sh and the
ablations of ablations.sh. `python -m benchmark report`, without arguments, makes them.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmark import data, report
from benchmark.compare import judge

SCRIPTS = ("ppo_continuous_action", "ppo_kl_adaptive 1M", "ppo_cma 1M")
MUJOCO = (
    *("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Swimmer-v4", "Reacher-v4"),
    *("InvertedPendulum-v4", "InvertedDoublePendulum-v4"),
)
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


def committed(algorithms: Sequence[str], env_ids: Sequence[str]) -> list[report.Group]:
    """The committed runs of these algorithms on these environments, in this order."""
    runs = data.find([data.RESULTS])
    groups = report.group(r for r in runs if r.algorithm in algorithms and r.env_id in env_ids)
    return sorted(groups, key=lambda g: (env_ids.index(g.env_id), algorithms.index(g.algorithm)))


def write(output: Path, blocks: list[tuple]):
    for drawing in output.glob("*.svg"):  # the page shows the .png
        drawing.unlink()
    (output / "README.md").write_text(report.markdown(blocks))


def scores_by_script(groups: list[report.Group], metric: str) -> list[list[str]]:
    """A row per environment: seeds of each script, and each script's score."""
    rows = []
    for env_id in MUJOCO:
        own = {g.algorithm: g.scores(metric) for g in groups if g.env_id == env_id}
        scores = [own.get(name, np.empty(0)) for name in SCRIPTS]
        seeds = ", ".join(str(len(x)) for x in scores)
        rows.append([env_id, seeds, *map(report.estimate, scores)])
    return rows


def head_to_head(output: Path = data.RESULTS / "head-to-head"):
    """Write a page: clipped, KL-adaptive and CMA on eight environments."""
    output.mkdir(exist_ok=True)
    groups = committed(SCRIPTS, MUJOCO)
    comparisons = report.compared(groups, "evaluation")
    scales = report.read_scales(data.HERE / "scales.csv")
    blocks = [("title", "Clipped, KL-adaptive and CMA on eight MuJoCo environments, 1M steps")]
    text = (
        "Runs of `benchmark/mujoco.sh` and, of the clipped script's seeds 6 to 10, `ppo.sh`, each "
        "script at one setting: the clipped one at its "
        "defaults, PPO-CMA at 8,000 steps an iteration, KL-adaptive at the original's episodes a "
        "batch: 5 where an episode always has 1,000 steps, 50 on Reacher, else 20. Scores are "
        "interquartile means over seeds with 95 % bootstrap intervals. One core a run; commit, "
        "hardware and versions are in the .json beside each run's table."
    )
    blocks.append(("text", text))
    for metric, words in report.METRICS.items():
        blocks.append(("section", f"{metric.capitalize()}: {words}"))
        rows = scores_by_script(groups, metric)
        blocks.append(report.table(" | ".join(["environment", "seeds", *SCRIPTS]), rows))
        blocks.append(("text", "Over environments, on the normalised scale below:"))
        blocks += report.across(comparisons, metric, scales)[1:]
    figure, axes = report.panels(len(MUJOCO) + 1)
    looks = report.styles(groups)
    report.plot_curves(axes[:-1], groups, "steps", looks)
    report.plot_profile(axes[-1], comparisons[0][0], "evaluation", scales, looks)
    axes[-1].set(title="final policies", ylabel="fraction of runs above τ")
    report.save(figure, looks, output, "curves")
    caption = (
        "IQM over seeds of the mean return of the last 100 training episodes; last panel: the "
        "fraction of runs whose final policy is above τ on the normalised scale. Intervals are "
        "pointwise 95 %."
    )
    blocks += [("section", "Curves"), ("figure", "curves", caption)]
    blocks.append(("section", "Scales"))
    rows = [
        [env_id, scales[env_id].low, scales[env_id].high, scales[env_id].source]
        for env_id in MUJOCO
    ]
    blocks.append(report.table("environment | 0 | 1 | source", rows))
    write(output, blocks)


def verdicts(groups: list[report.Group], metric: str) -> list[list[str]]:
    """A row for the whole and one per change: seeds, scores, P with its interval, p and verdict
    over the environments that the change was run on."""
    found, rows = {(g.algorithm, g.env_id): g.scores(metric) for g in groups}, []
    for name in (WHOLE, *CHANGES):
        scores = [found.get((name, env_id), np.empty(0)) for env_id in ABLATED]
        if not any(map(len, scores)):
            continue
        seeds = ", ".join(str(len(x)) for x in scores)
        cells = [name.removesuffix(" 1M"), CHANGES.get(name, ""), seeds]
        cells += map(report.estimate, scores)
        if name == WHOLE:
            rows.append([*cells, "", "", ""])
            continue
        both = [env_id for env_id, own in zip(ABLATED, scores, strict=True) if len(own)]
        whole, changed = ([found[key, env_id] for env_id in both] for key in (WHOLE, name))
        probability, low, high, p, verdict = judge(whole, changed)
        ends = report.between(low, high, report.ratio)
        rows.append([*cells, f"{probability:.2f} {ends}".rstrip(), f"{p:.2g}", verdict])
    return rows


def draw_changes(groups: list[report.Group], output: Path):
    """A figure of learning curves, for each change and environment a panel with and without it."""
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
    report.save(figure, {"ppo_cma.py": without, "with the change": with_it}, output, "curves")


def ablations(output: Path = data.RESULTS / "ablations"):
    """Write a page: PPO-CMA with one part changed; nothing as long as there are no such runs."""
    groups = committed((WHOLE, *CHANGES), ABLATED)
    if {group.algorithm for group in groups} <= {WHOLE}:
        return
    output.mkdir(exist_ok=True)
    blocks = [("title", "What the parts of PPO-CMA are worth: 1M steps with one part changed")]
    text = (
        "Runs of `benchmark/ablations.sh`, beside the variant 1M of `mujoco.sh`: mirrored, the "
        "variance fitted to nine iterations (H = 9) before the mean moves, a kernel averaged over "
        "the action's dimensions, 8,000 steps an iteration. Interquartile means over seeds with "
        "95 % bootstrap intervals. P is the probability that a run with the change scores above "
        "one without, mean over environments; improved or worse takes an interval without 1/2 "
        "and p < 0.05 in a permutation test. Each change is tested by itself: of many without any "
        "effect, one in twenty would seem to have one."
    )
    blocks.append(("text", text))
    for metric, words in report.METRICS.items():
        blocks.append(("section", f"{metric.capitalize()}: {words}"))
        header = ["program", "change", "seeds", *ABLATED, "P", "p", "verdict"]
        blocks.append(report.table(" | ".join(header), verdicts(groups, metric)))
    draw_changes(groups, output)
    caption = "Training: IQM over seeds of the mean return of the last 100 episodes, and its "
    blocks.append(("figure", "curves", caption + "pointwise 95 % interval; thin: single seeds."))
    write(output, blocks)
