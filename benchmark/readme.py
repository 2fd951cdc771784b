"""The tables of README.md, from committed results: each stands between <!-- its name --> and
<!-- end -->. `python -m benchmark report`, without arguments, makes them anew.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmark import curves, data, report, speed, stats, studies
from benchmark.report import estimate, number

SPEED = data.RESULTS / "speed"


def grid(header: Sequence[str], rows: Iterable[Iterable]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def bold(text: str) -> str:
    """The first word in bold: the number, not its interval."""
    first, _, rest = text.partition(" ")
    return f"**{first}** {rest}".rstrip()


# --- results --------------------------------------------------------------------------------------


def clipped_results() -> str:
    header = ["environment, steps", "final policy", "training"]
    header += ["final policy at CleanRL's settings", "training there"]
    header += [f"elsewhere, {name}" for name, *_ in curves.ELSEWHERE]
    rows = []
    for script, env_ids in curves.CLIPPED.items():
        for env_id in env_ids:
            cells = []
            for variant in curves.VARIANTS:
                found = curves.load(env_id, script, variant)
                for score in (curves.final_policy, curves.last_hundred):
                    cells.append(estimate([score(c) for c in found]) if found else "")
                if variant == "default":
                    steps = found[0].info["args"]["total_timesteps"]
                    length = f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps // 1000}k"
                    name = f"{env_id}, {length}" + f" ({len(found)} seeds)" * (len(found) != 5)
                elif found:
                    cells[2] += f" ({len(found)} seed{'s' * (len(found) > 1)})"
            for _, metrics, several in curves.ELSEWHERE:
                cells.append(curves.published(env_id, metrics, several).partition(" ")[0])
            rows.append([name, bold(cells[0]), *cells[1:]])
    return grid(header, rows)


def head_to_head() -> str:
    groups = studies.committed(studies.SCRIPTS, studies.MUJOCO)
    rows = []
    for env_id, seeds, *scores in studies.scores_by_script(groups, "evaluation"):
        own = {g.algorithm: stats.iqm(g.scores("evaluation")) for g in groups if g.env_id == env_id}
        cells = [
            bold(score) if own.get(name) == max(own.values()) else score
            for name, score in zip(studies.SCRIPTS, scores, strict=True)
        ]
        rows.append([env_id, seeds, *cells])
    scales = report.read_scales(data.HERE / "scales.csv")
    better = []
    for metric, words in (("evaluation", ""), ("training", ", training")):
        (algorithms, _), *_ = report.compared(groups, metric)
        scores = [report.normalised(algorithms[name], metric, scales) for name in studies.SCRIPTS]
        cells = [in_words(stats.iqm, own) for own in scores]
        rows.append([f"all eight, normalised{words}", "", *cells])
        cells = [in_words(stats.improvement, [*own, *scores[0]]) for own in scores[1:]]
        better.append([f"P(above clipped){words}", "", "", *cells])
    header = ["environment", "seeds", *(f"`{name.split()[0]}.py`" for name in studies.SCRIPTS)]
    return grid(header, rows + better)


def scores() -> str:
    """README's: final policies of all scripts, one setting a script but where it is said."""
    groups = studies.committed(studies.SCRIPTS, studies.MUJOCO)
    rows = [
        [f"{env_id}, 1M", *cells]
        for env_id, *cells in studies.scores_by_script(groups, "evaluation")
    ]
    for env_id, *runs in (
        ("Humanoid-v4, 10M", ("ppo_continuous_action", "10M-64envs"), ("ppo_cma", "anneal-lr")),
        ("CartPole-v1, 100k", ("ppo", "default"), None),
        ("Acrobot-v1, 500k", ("ppo", "default"), None),
        ("MountainCar-v0, 500k", ("ppo", "default"), None),
    ):
        name = env_id.partition(",")[0]
        found = [curves.load(name, *run) if run else [] for run in runs]
        cells = [estimate([curves.final_policy(c) for c in own]) if own else "" for own in found]
        rows.append(
            [env_id, ", ".join(str(len(own)) for own in found if own), cells[0], "", cells[1]]
        )
    for name in curves.GOALS:
        for info, steps, _ in curves.runs(name, "ppo_atari_multigpu"):
            length = f"{steps[-1] / 1e6:.0f}M"
            rows.append([f"{name}, {length}", 1, f"{np.mean(info['evaluation']):.1f}", "", ""])
    header = ["environment, steps", "seeds", "clipped PPO", "`ppo_kl_adaptive.py`", "`ppo_cma.py`"]
    return grid(header, rows)


def in_words(statistic, scores: list[np.ndarray]) -> str:
    """Of scores by environment, with its 95 % interval."""
    ends = report.between(*stats.interval(statistic, scores), report.ratio)
    return f"{statistic(*scores):.2f} {ends}".rstrip()


def ablations() -> str:
    groups = studies.committed((studies.WHOLE, *studies.CHANGES), studies.ABLATED)
    rows = []
    for program, change, seeds, *scores, p, _, verdict in studies.verdicts(groups, "training"):
        rows.append([change or f"none: `{program}.py`", seeds, *scores, p, verdict])
    header = ["change", "seeds", *studies.ABLATED, "P(better)", "verdict"]
    return grid(header, rows)


KL_MARKS = (  # environment, episodes
    *(("HalfCheetah-v4", 1000), ("HalfCheetah-v4", 3000), ("Swimmer-v4", 1000)),
    *(("Hopper-v4", 1000), ("Hopper-v4", 2000), ("Hopper-v4", 3000), ("InvertedPendulum-v4", 640)),
)


def kl_results() -> str:
    header = ["environment, episodes", "published, one run", "median of ours", "best", "each seed"]
    rows = []
    for env_id, mark in KL_MARKS:
        scores = [s for s in (run.at(mark) for run in curves.by_batch(env_id)) if s is not None]
        published = curves.coady(env_id).get(mark)
        cells = [f"{env_id}, {mark:,}", f"{published:,.0f}" if published else ""]
        cells += [f"**{median(scores):,.0f}**", f"{max(scores):,.0f}"]
        rows.append([*cells, ", ".join(f"{score:,.0f}" for score in scores)])
    runs = curves.by_batch("InvertedPendulum-v4")
    firsts = [int(run.ends[run.means >= 950][0]) for run in runs]
    cells = ["InvertedPendulum-v4, first iteration at 950", "710 to 760"]
    cells += [f"**{median(firsts):,.0f}**", min(firsts), ", ".join(map(str, firsts))]
    return grid(header, [*rows, cells])


def cma_results() -> str:
    """Means over seeds, and the range of single ones."""
    car, rows = "`--iter-steps 4000 --minibatch-size 2048 --action-repeat %d`", []
    for env_id, variant, setting in (
        ("Humanoid-v4", "default", "defaults"),
        ("Humanoid-v4", "anneal-lr", "`--anneal-lr`"),
        ("Hopper-v4", "default", "`--iter-steps 8000`"),
        ("MountainCarContinuous-v0", "repeat2", car % 2),
        ("MountainCarContinuous-v0", "default", car % 4),
    ):
        found = curves.load(env_id, "ppo_cma", variant)
        most = found[0].info["args"]["total_timesteps"]
        length = f"{most / 1e6:.1f}M" if most >= 1e6 else f"{most // 1000:.0f}k"
        cells = [f"{env_id}, {setting}", f"{len(found)} x {length}"]
        points, name, seeds = curves.original(env_id)
        nearest = points[np.abs(points[:, 0] - most).argmin()]
        published = f"{number(nearest[1])} at {nearest[0] / 1e6:g}M ("
        published += f"{name}, " * (name != env_id) + f"{seeds} seed{'s' * (seeds > 1)})"
        if variant == "default" and "--action-repeat" in setting:
            published = ""  # which repeats an action twice
        training = [curves.smooth(curve.returns)[-1] for curve in found]
        for scores in (training, [curves.final_policy(curve) for curve in found]):
            ends = f" ({number(min(scores))} to {number(max(scores))})" * (len(scores) > 1)
            cells.append(f"**{number(np.mean(scores))}**{ends}")
        rows.append([*cells[:3], published, cells[3]])
    header = ["environment, command", "seeds, steps", "training return"]
    return grid([*header, "original's training return", "mean action"], rows)


def humanoid() -> str:
    rows = []
    for script, variant, words in (
        ("ppo_cma", "default", ""),
        ("ppo_cma", "anneal-lr", ", `--anneal-lr`"),
        ("cma_published_ends", "default", ""),
        ("ppo_continuous_action", "10M-64envs", ", 64 environments"),
    ):
        for curve in curves.load("Humanoid-v4", script, variant, width=32_000):
            steps = curve.info["global_step"]
            cells = [f"`{script}.py`{words}, seed {curve.seed}, to {steps / 1e6:.1f}M"]
            cells += [curves.crossing(curve, score) for score in curves.CROSSINGS]
            for end in ((4.5e6, 5e6), (9e6, 10e6)):
                cells.append(number(curves.at(curve, *end)))
            rows.append([*cells, number(curves.final_policy(curve))])
    published = ["original, Humanoid-v2, mean of 3", *curves.ORIGINAL_CROSSINGS]
    rows.append([*published, "4,593 at 5M", "4,609", ""])
    header = ["", *map(str, curves.CROSSINGS), "4.5 to 5M", "9 to 10M", "mean action"]
    return grid(header, rows)


def atari_results() -> str:
    rows = []
    for env_id, goals in curves.GOALS.items():
        for info, steps, scores in curves.runs(env_id, "ppo_atari_multigpu"):
            firsts = [curves.reach(goal, steps, scores) for goal in goals[:-1]]
            cells = [f"{env_id}, seed {info['seed']}"]
            cells += [f"{steps[-1] / 1e6:.2f}M, {info['wall_seconds'] / 3600:.1f}"]
            cells += [f"**{np.mean(scores[-100:]):.1f}**", f"**{np.mean(info['evaluation']):.1f}**"]
            rows.append([*cells, ", ".join(firsts)])
    header = ["game", "steps, hours", "training, last 100 games", "greedy, 20 games"]
    return grid([*header, "steps to a mean of"], rows)


# --- speed ----------------------------------------------------------------------------------------


def costs(name: str) -> dict[str, speed.Summary]:
    """The programs of a table of `python -m benchmark speed`."""
    return speed.summarise([row[-len(speed.COLUMNS) :] for row in rows_of(SPEED / f"{name}.csv")])


def rows_of(path: Path) -> list[tuple]:
    """Rows of a table below its comments, numbers as numbers."""

    def value(text: str):
        for kind in (int, float, str):
            try:
                return kind(text)
            except ValueError:
                pass

    with open(path) as file:
        lines = [line for line in file if not line.startswith("#")]
    return [tuple(map(value, row)) for row in list(csv.reader(lines))[1:]]


def spread(mine: speed.Summary, other: speed.Summary) -> str:
    """The ratio of steps per CPU-second: its median, and the range over rounds."""
    values = speed.ratios(mine.cpu_rates, other.cpu_rates)
    if len(values) == 1:
        return f"**{values[0]:.1f}** (1 round)"
    return f"**{median(values):.1f}** ({min(values):.1f} to {max(values):.1f})"


def ratio(mine: speed.Summary, other: speed.Summary, digits: int = 2) -> str:
    return f"{median(speed.ratios(mine.cpu_rates, other.cpu_rates)):.{digits}f}"


CLIPPED_SPEED = {
    "CartPole-v1": "ppo-CartPole-v1",
    "HalfCheetah-v4": "ppo_continuous_action-HalfCheetah-v4",
    "HalfCheetah-v4, 8 environments": "ppo_continuous_action-HalfCheetah-v4-8envs",
    "Hopper-v4": "ppo_continuous_action-Hopper-v4",
    "Humanoid-v4": "ppo_continuous_action-Humanoid-v4",
    "Humanoid-v4, 32,000 steps an iteration, 1 epoch": "ppo_continuous_action-Humanoid-v4-32k",
}


def clipped_speed() -> str:
    header = ["", "steps per CPU-second", "relative to Stable-Baselines3"]
    header += ["to the bare environment, random actions", "eager, to Stable-Baselines3"]
    header += ["memory: compiled, eager, Stable-Baselines3"]
    rows = []
    for name, table in CLIPPED_SPEED.items():
        found = costs(table)
        mine, sb3, eager, bare = map(found.get, ("compiled", "sb3", "eager", "bare"))
        memory = [f"{x.memory:.0f}" if x else "-" for x in (mine, eager, sb3)]
        cells = [name, f"{median(mine.cpu_rates):,.0f}", spread(mine, sb3)]
        cells += [ratio(mine, bare) if bare else "", ratio(eager, sb3, 1) if eager else ""]
        rows.append([*cells, ", ".join(memory) + " MB"])
    return grid(header, rows)


def speeds() -> str:
    """README's: steps per CPU-second of all scripts."""
    tables = {
        "`ppo.py`, CartPole-v1": ("ppo-CartPole-v1", "compiled"),
        "`ppo_continuous_action.py`, HalfCheetah-v4": (CLIPPED_SPEED["HalfCheetah-v4"], "compiled"),
        "the same, 8 environments": (CLIPPED_SPEED["HalfCheetah-v4, 8 environments"], "compiled"),
        "the same, Humanoid-v4": (CLIPPED_SPEED["Humanoid-v4"], "compiled"),
        "`ppo_kl_adaptive.py`, HalfCheetah-v4": ("ppo_kl_adaptive-HalfCheetah-v4", "1_environment"),
    }
    rows = []
    for words, (table, name) in tables.items():
        found = costs(table)
        mine, sb3, bare = found[name], found["sb3"], found["bare"]
        rate = f"{median(mine.cpu_rates):,.0f}"
        rows.append([words, rate, spread(mine, sb3), ratio(mine, bare)])
    header = ["script, environment", "steps per CPU-second", "to Stable-Baselines3's PPO"]
    return grid([*header, "to the bare environment"], rows)


def growth(name: str, corner: str) -> str:
    """A table in which one flag varies, its values in the first column."""
    by_value = {}
    for value, *row in rows_of(SPEED / f"ppo_continuous_action-HalfCheetah-v4-{name}.csv"):
        by_value.setdefault(value, []).append(tuple(row))
    found = {value: speed.summarise(rows) for value, rows in by_value.items()}
    mine = [summaries["ppo_continuous_action"] for summaries in found.values()]
    values = [8 * 1024 // value for value in found] if name == "num-minibatches" else found
    rows = [["", *(f"{median(summary.cpu_rates):,.0f}" for summary in mine)]]
    if all("bare" in summaries for summaries in found.values()):
        bare = [summaries["bare"] for summaries in found.values()]
        rows.append(["to the bare environment", *map(ratio, mine, bare)])
    return grid([corner, *values], rows)


def growth_environments() -> str:
    return growth("num-envs", "environments (256 steps each, 8 minibatches)")


def growth_minibatches() -> str:
    return growth("num-minibatches", "samples a minibatch (8 environments of 1024 steps)")


def kl_speed() -> str:
    found = costs("ppo_kl_adaptive-HalfCheetah-v4")
    rows = []
    for name, more in {"1_environment": "", "5_environments": " --num-envs 5"}.items():
        mine, sb3, bare = found[name], found["sb3"], found["bare"]
        rows.append([f"`ppo_kl_adaptive.py{more}`", spread(mine, sb3), ratio(mine, bare)])
    header = [
        "",
        "relative to Stable-Baselines3 2.9's PPO",
        "to the bare environment, random actions",
    ]
    return grid(header, rows)


def atari_speed() -> str:
    names = {
        "1 process, 1 thread": "1 process",
        "1 process, 1 thread, bf16": "1 process, `--bf16`",
        "2 processes, 1 thread each": "2 processes",
        "2 processes, 1 thread each, bf16": "2 processes, `--bf16`",
        "EnvPool alone": "EnvPool alone, 1 thread, random actions",
    }
    table, rows = rows_of(data.RESULTS / "speed_atari-Pong-v5.csv"), []
    for name, words in names.items():
        own = [row[2:] for row in table if row[1] == name]
        per_second = median(steps / wall for steps, _, wall, *_ in own)
        per_cpu = median(steps / cpu for steps, cpu, *_ in own)
        shares = [[row[k] for row in own] for k in (3, 4, 5)]
        cells = [f"{median(x):.0%}" if "" not in x else "" for x in shares]
        rows.append([words, f"{per_second:,.0f}", f"{per_cpu:,.0f}", *cells])
    header = ["", "steps per second", "per CPU-second", "environments", "inference", "update"]
    return grid(header, rows)


BLOCKS = {
    make.__name__.replace("_", "-"): make
    for make in (
        scores, speeds, clipped_results, head_to_head, ablations, kl_results, cma_results, humanoid,
        atari_results, clipped_speed, growth_environments, growth_minibatches, kl_speed,
        atari_speed,
    )
}  # fmt: skip
