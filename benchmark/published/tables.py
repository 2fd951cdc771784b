"""The tables of README.md, docs/ and results/, from the committed runs: each stands between
<!-- its name --> and <!-- end -->. `python -m benchmark.published` makes them anew.
"""

import re
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from statistics import median

import numpy as np

from benchmark import data, report, speed, stats
from benchmark.compare import judge
from benchmark.published import RESULTS, curves
from benchmark.published.curves import final, last
from benchmark.report import estimate, number, table

SPEED = RESULTS / "speed"


def bold(text: str) -> str:
    """The first word in bold: the number, not its interval."""
    first, _, rest = text.partition(" ")
    return f"**{first}** {rest}".rstrip()


def in_words(statistic, scores: list[np.ndarray]) -> str:
    """Of scores by environment, with its 95 % interval."""
    ends = report.between(*stats.interval(statistic, scores), report.ratio)
    return f"{statistic(*scores):.2f} {ends}".rstrip()


def by_seed(found: list[curves.Curve], score) -> str:
    return estimate([score(curve) for curve in found]) if found else ""


def length(steps: float) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps // 1000}k"


def commits(found: Iterable[curves.Curve]) -> str:
    return ", ".join(sorted({curve.run.commit[:7] for curve in found}))


def played(run: data.Run, text: str = ".1f") -> str:
    """Mean and standard deviation of the returns of the final policy."""
    return f"{np.mean(run.evaluation):{text}} +- {np.std(run.evaluation):{text}}"


def trained_for(found: list[curves.Curve]) -> int:
    return found[0].run.info["args"]["total_timesteps"]


# --- clipped PPO ----------------------------------------------------------------------------------


def clipped_results() -> str:
    header = "environment, steps | final policy | training | final policy at CleanRL's settings "
    header += "| training there | "
    rows = []
    for env_id, script in curves.CLIPPED.items():
        own, cleanrl = (curves.load(env_id, script, variant) for variant in curves.VARIANTS)
        steps = trained_for(own)
        name = f"{env_id}, {length(steps)}" + f" ({len(own)} seeds)" * (len(own) != 5)
        cells = [name, bold(by_seed(own, final)), by_seed(own, last), by_seed(cleanrl, final)]
        cells[3] += f" ({curves.plural(len(cleanrl))})" * bool(cleanrl)
        cells.append(by_seed(cleanrl, last))
        others = (curves.published(env_id, steps, *which) for _, *which in curves.ELSEWHERE)
        rows.append([*cells, *(other.partition(" ")[0] for other in others)])
    return table(header + " | ".join(f"elsewhere, {name}" for name, *_ in curves.ELSEWHERE), rows)


def clipped_runs() -> str:
    header = "environment | steps | setting | seeds | final policy | training "
    rows = []
    for env_id, script in curves.CLIPPED.items():
        for variant, name in curves.VARIANTS.items():
            if found := curves.load(env_id, script, variant):
                cells = [env_id, f"{trained_for(found):,}", name, len(found)]
                cells += [bold(by_seed(found, final)), bold(by_seed(found, last))]
                rows.append([*cells, ", ".join(number(final(c)) for c in found), commits(found)])
    return table(header + "| each seed's policy | commits", rows, "---")


def clipped_elsewhere() -> str:
    rows = []
    for env_id, script in curves.CLIPPED.items():
        steps = trained_for(curves.load(env_id, script))
        cells = [curves.published(env_id, steps, *which) for _, *which in curves.ELSEWHERE]
        if any(cells):
            rows.append([env_id, *cells])
    return table(" | ".join(["environment", *(name for name, *_ in curves.ELSEWHERE)]), rows, "---")


# --- three scripts, eight environments ------------------------------------------------------------


def scores_by_script(groups: list[report.Group], metric: str) -> list[list[str]]:
    """A row per environment: seeds of each script, and each script's score."""
    rows = []
    for env_id in curves.MUJOCO:
        own = {g.algorithm: g.scores(metric) for g in groups if g.env_id == env_id}
        scores = [own.get(name, np.empty(0)) for name in curves.SCRIPTS]
        seeds = ", ".join(str(len(x)) for x in scores)
        rows.append([env_id, seeds, *map(estimate, scores)])
    return rows


def head_to_head() -> str:
    groups = curves.committed(curves.SCRIPTS, curves.MUJOCO)
    rows = []
    for env_id, seeds, *scores in scores_by_script(groups, "evaluation"):
        own = {g.algorithm: stats.iqm(g.scores("evaluation")) for g in groups if g.env_id == env_id}
        cells = [
            bold(score) if own.get(name) == max(own.values()) else score
            for name, score in zip(curves.SCRIPTS, scores, strict=True)
        ]
        rows.append([env_id, seeds, *cells])
    scales = data.read_scales(data.SCALES)
    better = []
    for metric, words in (("evaluation", ""), ("training", ", training")):
        (algorithms, _), *_ = report.compared(groups, metric)
        scores = [report.normalised(algorithms[name], metric, scales) for name in curves.SCRIPTS]
        cells = [in_words(stats.iqm, own) for own in scores]
        rows.append([f"all eight, normalised{words}", "", *cells])
        cells = [in_words(stats.improvement, [*own, *scores[0]]) for own in scores[1:]]
        better.append([f"P(above clipped){words}", "", "", *cells])
    header = " | ".join(f"`{name.split()[0]}.py`" for name in curves.SCRIPTS)
    return table(f"environment | seeds | {header}", rows + better)


def each_environment(metric: str) -> str:
    groups = curves.committed(curves.SCRIPTS, curves.MUJOCO)
    header = " | ".join(["environment", "seeds", *curves.SCRIPTS])
    return table(header, scores_by_script(groups, metric))


def all_environments(metric: str) -> str:
    groups = curves.committed(curves.SCRIPTS, curves.MUJOCO)
    scales = data.read_scales(data.SCALES)
    blocks = report.across(report.compared(groups, "evaluation"), metric, scales)
    return "\n\n".join(blocks[1:])


def ends_of_scales() -> str:
    scales = data.read_scales(data.SCALES)
    rows = [[e, scales[e].low, scales[e].high, scales[e].source] for e in curves.MUJOCO]
    return table("environment | 0 | 1 | source", rows)


def scores() -> str:
    """README's: final policies of all scripts, one setting a script but where it is said."""
    groups = curves.committed(curves.SCRIPTS, curves.MUJOCO)
    rows = [[f"{name}, 1M", *cells] for name, *cells in scores_by_script(groups, "evaluation")]
    for env_id, *which in (
        ("Humanoid-v4, 10M", ("ppo_continuous_action", "10M-64envs"), ("ppo_cma", "anneal-lr")),
        ("CartPole-v1, 100k", ("ppo", "default")),
        ("Acrobot-v1, 500k", ("ppo", "default")),
        ("MountainCar-v0, 500k", ("ppo", "default")),
    ):
        found = [curves.load(env_id.partition(",")[0], *script) for script in which]
        cells = [by_seed(own, final) for own in found] + [""]
        seeds = ", ".join(str(len(own)) for own in found)
        rows.append([env_id, seeds, cells[0], "", cells[1]])
    for name in curves.GOALS:
        for run in curves.runs(name, "ppo_atari_multigpu"):
            steps = f"{run.steps[-1] / 1e6:.0f}M"
            rows.append([f"{name}, {steps}", 1, f"{np.mean(run.evaluation):.1f}", "", ""])
    header = "environment, steps | seeds | clipped PPO | `ppo_kl_adaptive.py` | `ppo_cma.py`"
    return table(header, rows)


# --- PPO-CMA --------------------------------------------------------------------------------------


def verdicts(metric: str) -> list[list[str]]:
    """A row for the whole and one per change: seeds, scores, P with its interval, p and verdict
    over the environments that the change was run on."""
    groups = curves.committed((curves.WHOLE, *curves.CHANGES), curves.ABLATED)
    found, rows = {(g.algorithm, g.env_id): g.scores(metric) for g in groups}, []
    for name in (curves.WHOLE, *curves.CHANGES):
        scores = [found.get((name, env_id), np.empty(0)) for env_id in curves.ABLATED]
        if not any(map(len, scores)):
            continue
        seeds = ", ".join(str(len(x)) for x in scores)
        cells = [name.removesuffix(" 1M"), curves.CHANGES.get(name, ""), seeds]
        cells += map(estimate, scores)
        if name == curves.WHOLE:
            rows.append([*cells, "", "", ""])
            continue
        both = [env_id for env_id, own in zip(curves.ABLATED, scores, strict=True) if len(own)]
        whole, changed = ([found[key, env_id] for env_id in both] for key in (curves.WHOLE, name))
        probability, low, high, p, verdict = judge(whole, changed)
        ends = report.between(low, high, report.ratio)
        rows.append([*cells, f"{probability:.2f} {ends}".rstrip(), f"{p:.2g}", verdict])
    return rows


def ablations() -> str:
    rows = []
    for program, change, seeds, *scores, p, _, verdict in verdicts("training"):
        rows.append([change or f"none: `{program}.py`", seeds, *scores, p, verdict])
    header = " | ".join(["change", "seeds", *curves.ABLATED, "P(better)", "verdict"])
    return table(header, rows)


def each_change(metric: str) -> str:
    header = ["program", "change", "seeds", *curves.ABLATED, "P", "p", "verdict"]
    return table(" | ".join(header), verdicts(metric))


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
        most = trained_for(found)
        steps = f"{most / 1e6:.1f}M" if most >= 1e6 else length(most)
        points, name, seeds = curves.original(env_id)
        nearest = points[np.abs(points[:, 0] - most).argmin()]
        published = f"{number(nearest[1])} at {nearest[0] / 1e6:g}M ("
        published += f"{name}, " * (name != env_id) + f"{curves.plural(seeds)})"
        if variant == "default" and "--action-repeat" in setting:
            published = ""  # which repeats an action twice
        cells = []
        for own in ([curves.smooth(c.returns)[-1] for c in found], list(map(final, found))):
            ends = f" ({number(min(own))} to {number(max(own))})" * (len(own) > 1)
            cells.append(f"**{number(np.mean(own))}**{ends}")
        name = f"{env_id}, {setting}"
        rows.append([name, f"{len(found)} x {steps}", cells[0], published, cells[1]])
    header = "environment, command | seeds, steps | training return | original's training return "
    return table(header + "| mean action", rows)


CROSSINGS = (1000, 2000, 3000, 4000)  # of returns on Humanoid
ORIGINAL = ["original, Humanoid-v2, mean of 3", "2.01M", "2.48M", "2.91M", "3.34M"]  # off a figure


def crossings(curve: curves.Curve) -> list[str]:
    return [curves.crossing(curve, score) for score in CROSSINGS]


def humanoid() -> str:
    rows = []
    for script, variant, words in (
        ("ppo_cma", "default", ""),
        ("ppo_cma", "anneal-lr", ", `--anneal-lr`"),
        ("cma_published_ends", "default", ""),
        ("ppo_continuous_action", "10M-64envs", ", 64 environments"),
    ):
        for curve in curves.load("Humanoid-v4", script, variant, width=32_000):
            steps = curve.run.info["global_step"] / 1e6
            cells = [f"`{script}.py`{words}, seed {curve.run.seed}, to {steps:.1f}M"]
            for end in ((4.5e6, 5e6), (9e6, 10e6)):
                cells.append(number(curves.at(curve, *end)))
            rows.append([cells[0], *crossings(curve), *cells[1:], number(final(curve))])
    rows.append([*ORIGINAL, "4,593 at 5M", "4,609", ""])
    header = ["", *map(str, CROSSINGS), "4.5 to 5M", "9 to 10M", "mean action"]
    return table(" | ".join(header), rows)


def cma_runs() -> str:
    settings = {"default": "", "anneal-lr": " `--anneal-lr`", "repeat2": " `--action-repeat 2`"}
    rows = []
    for env_id in curves.CMA:
        for variant, words in settings.items():
            found = curves.load(env_id, "ppo_cma", variant)
            ends = [curves.smooth(c.returns)[-1] for c in found]
            for c, end in zip(found, ends, strict=True):
                cells = [env_id + words, c.run.seed, f"{c.run.info['global_step']:,}"]
                cells += [f"{end:.1f}", f"{c.returns.max():.1f}", played(c.run), commits([c])]
                rows.append(cells)
            if len(found) > 1:
                cells = [env_id + words, f"mean of {len(found)}", "", f"**{np.mean(ends):.1f}**"]
                middle = np.mean([c.run.evaluation for c in found])
                rows.append([*cells, "", f"**{middle:.1f}**", ""])
    header = "environment | seed | steps | training return, last 3 windows | best window "
    text = table(header + "| mean action, 20 episodes | commit", rows, "---")
    return re.sub(r"\|  \|$", "| |", text, flags=re.M)


def cma_crossings() -> str:
    rows = [
        [f"seed {c.run.seed} (to {c.run.info['global_step'] / 1e6:.2f}M)", *crossings(c)]
        for c in curves.load("Humanoid-v4", "ppo_cma")
    ]
    return table(f"| {' | '.join(map(str, CROSSINGS))}", [*rows, ORIGINAL], "---")


# --- KL-adaptive PPO ------------------------------------------------------------------------------


def at_mark(env_id: str, mark: int) -> tuple[list[float], list[str]]:
    """Each seed's return at an episode; in words, what was published there, the number of seeds,
    their median, the best and each."""
    scores = [curves.at_episode(curve, mark) for curve in curves.by_batch(env_id)]
    scores = [score for score in scores if score is not None]
    published = curves.coady(env_id).get(mark)
    if not scores:
        return [], []
    words = [f"{published:,.0f}" if published else "", len(scores), f"**{median(scores):,.0f}**"]
    return scores, [*words, f"{max(scores):,.0f}", ", ".join(f"{score:,.0f}" for score in scores)]


def first_at_950(curve: curves.Curve) -> int | None:
    above = curve.ends[curve.returns >= 950]
    return int(above[0]) if len(above) else None


def kl_results() -> str:
    marks = [("HalfCheetah-v4", 1000), ("HalfCheetah-v4", 3000), ("Swimmer-v4", 1000)]
    marks += [("Hopper-v4", mark) for mark in (1000, 2000, 3000)] + [("InvertedPendulum-v4", 640)]
    rows = []
    for env_id, mark in marks:
        published, _, *words = at_mark(env_id, mark)[1]
        rows.append([f"{env_id}, {mark:,}", published, *words])
    firsts = list(map(first_at_950, curves.by_batch("InvertedPendulum-v4")))
    cells = ["InvertedPendulum-v4, first iteration at 950", "710 to 760"]
    cells += [f"**{median(firsts):,.0f}**", min(firsts), ", ".join(map(str, firsts))]
    header = "environment, episodes | published, one run | median of ours | best | each seed"
    return table(header, [*rows, cells])


def kl_marks() -> str:
    rows = []
    for env_id, marks in curves.MARKS.items():
        for mark in marks:
            if words := at_mark(env_id, mark)[1]:
                rows.append([env_id, f"{mark:,}", *words])
    header = "environment | episodes | published | seeds | median | best | each seed"
    return table(header, rows, "---")


def kl_runs() -> str:
    found = {path.parts[-3] for path in RESULTS.glob("*/ppo_kl_adaptive/default-s*.json")}
    rows = []
    for env_id in [*curves.MARKS, *sorted(found - curves.MARKS.keys())]:
        for c in curves.by_batch(env_id):
            cells = [env_id, c.run.seed, f"{len(c.run.returns):,}", f"{c.run.steps[-1]:,.0f}"]
            cells += [f"{c.run.score('training'):,.1f}", played(c.run, ",.1f")]
            solved = f"{first_at_950(c) or 'not yet':,}" if "InvertedPend" in env_id else ""
            rows.append([*cells, solved, commits([c])])
    header = "environment | seed | episodes | steps | return, last 100 episodes | mean action, "
    header += "20 episodes | first iteration at 950 ends with episode | commit"
    return table(header, rows, "---")


# --- Atari ----------------------------------------------------------------------------------------


def games() -> list[data.Run]:
    return [run for name in curves.GOALS for run in curves.runs(name, "ppo_atari_multigpu")]


def atari_results() -> str:
    rows = []
    for run in games():
        firsts = [curves.reach(goal, run) for goal in curves.GOALS[run.env_id][:-1]]
        cells = [f"{run.env_id}, seed {run.seed}", f"{run.steps[-1] / 1e6:.2f}M, {run.hours:.1f}"]
        cells += [f"**{run.score(metric):.1f}**" for metric in ("training", "evaluation")]
        rows.append([*cells, ", ".join(firsts)])
    header = (
        "game | steps, hours | training, last 100 games | greedy, 20 games | steps to a mean of"
    )
    return table(header, rows)


def atari_runs() -> str:
    rows = []
    for run in games():
        cells = [run.env_id, run.seed, run.info["processes"], f"{run.steps[-1]:,.0f}"]
        cells += [f"{run.hours:.1f}", f"**{run.score('training'):.1f}**", played(run)]
        rows.append([*cells, run.commit[:7]])
    header = "game | seed | processes | steps | hours | training | greedy | commit"
    return table(header, rows, "---")


def atari_goals() -> str:
    rows = [
        [run.env_id, run.seed, ", ".join(curves.reach(x, run) for x in curves.GOALS[run.env_id])]
        for run in games()
    ]
    return table("game | seed | steps to a mean over 100 games of", rows, "---")


# --- speed ----------------------------------------------------------------------------------------


def costs(name: str) -> dict[str, speed.Summary]:
    """The programs of a table of `python -m benchmark speed`."""
    return speed.summarise([tuple(row.values()) for row in data.read_csv(SPEED / f"{name}.csv")])


def rate(mine: speed.Summary) -> str:
    return f"{median(mine.cpu_rates):,.0f}"


def spread(mine: speed.Summary, other: speed.Summary) -> str:
    """The ratio of steps per CPU-second: its median, and the range over rounds."""
    values = speed.ratios(mine.cpu_rates, other.cpu_rates)
    if len(values) == 1:
        return f"**{values[0]:.1f}** (1 round)"
    return f"**{median(values):.1f}** ({min(values):.1f} to {max(values):.1f})"


def ratio(mine: speed.Summary, other: speed.Summary, digits: int = 2) -> str:
    return f"{median(speed.ratios(mine.cpu_rates, other.cpu_rates)):.{digits}f}"


CHEETAH = "ppo_continuous_action-HalfCheetah-v4"
HUMANOID = "ppo_continuous_action-Humanoid-v4"
CLIPPED_SPEED = {
    "CartPole-v1": "ppo-CartPole-v1",
    "HalfCheetah-v4": CHEETAH,
    "HalfCheetah-v4, 8 environments": f"{CHEETAH}-8envs",
    "Hopper-v4": "ppo_continuous_action-Hopper-v4",
    "Humanoid-v4": HUMANOID,
    "Humanoid-v4, 32,000 steps an iteration, 1 epoch": f"{HUMANOID}-32k",
}


def clipped_speed() -> str:
    header = "| steps per CPU-second | relative to Stable-Baselines3 | to the bare environment, "
    header += "random actions | eager, to Stable-Baselines3 "
    header += "| memory: compiled, eager, Stable-Baselines3"
    rows = []
    for name, file in CLIPPED_SPEED.items():
        mine, sb3, eager, bare = map(costs(file).get, ("compiled", "sb3", "eager", "bare"))
        memory = [f"{x.memory:.0f}" if x else "-" for x in (mine, eager, sb3)]
        cells = [name, rate(mine), spread(mine, sb3), ratio(mine, bare) if bare else ""]
        cells += [ratio(eager, sb3, 1) if eager else "", ", ".join(memory) + " MB"]
        rows.append(cells)
    return table(f" {header}", rows)


def speeds() -> str:
    """README's: steps per CPU-second of all scripts."""
    rows = []
    for words, file, name in (
        ("`ppo.py`, CartPole-v1", "ppo-CartPole-v1", "compiled"),
        ("`ppo_continuous_action.py`, HalfCheetah-v4", CHEETAH, "compiled"),
        ("the same, 8 environments", f"{CHEETAH}-8envs", "compiled"),
        ("the same, Humanoid-v4", HUMANOID, "compiled"),
        ("`ppo_kl_adaptive.py`, HalfCheetah-v4", "ppo_kl_adaptive-HalfCheetah-v4", "1_environment"),
    ):
        found = costs(file)
        mine = found[name]
        rows.append([words, rate(mine), spread(mine, found["sb3"]), ratio(mine, found["bare"])])
    header = "script, environment | steps per CPU-second | to Stable-Baselines3's PPO "
    return table(header + "| to the bare environment", rows)


def growth(name: str, corner: str) -> str:
    """A table in which one flag varies, its values in the first column."""
    measured = map(tuple, map(dict.values, data.read_csv(SPEED / f"{CHEETAH}-{name}.csv")))
    found = {
        value: speed.summarise([row[1:] for row in rows])
        for value, rows in groupby(measured, lambda row: row[0])
    }
    values = [8 * 1024 // value for value in found] if name == "num-minibatches" else found
    rows = [["", *(rate(one["ppo_continuous_action"]) for one in found.values())]]
    if all("bare" in one for one in found.values()):
        pairs = [(one["ppo_continuous_action"], one["bare"]) for one in found.values()]
        rows.append(["to the bare environment", *(ratio(*pair) for pair in pairs)])
    return table(" | ".join(map(str, [corner, *values])), rows)


def kl_speed() -> str:
    found = costs("ppo_kl_adaptive-HalfCheetah-v4")
    rows = []
    for name, more in {"1_environment": "", "5_environments": " --num-envs 5"}.items():
        mine, sb3, bare = found[name], found["sb3"], found["bare"]
        rows.append([f"`ppo_kl_adaptive.py{more}`", spread(mine, sb3), ratio(mine, bare)])
    header = "relative to Stable-Baselines3 2.9's PPO | to the bare environment, random actions"
    return table(f" | {header}", rows)


def atari_speed() -> str:
    measured, rows = data.read_csv(RESULTS / "speed_atari-Pong-v5.csv"), []
    for name, words in {
        "1 process, 1 thread": "1 process",
        "1 process, 1 thread, bf16": "1 process, `--bf16`",
        "2 processes, 1 thread each": "2 processes",
        "2 processes, 1 thread each, bf16": "2 processes, `--bf16`",
        "EnvPool alone": "EnvPool alone, 1 thread, random actions",
    }.items():
        own = [row for row in measured if row["what"] == name]
        rates = (
            median(row["steps"] / row[clock] for row in own)
            for clock in ("wall_seconds", "cpu_seconds")
        )
        shares = [[row[part] for row in own] for part in ("environments", "inference", "update")]
        parts = (f"{median(x):.0%}" if None not in x else "" for x in shares)
        rows.append([words, *(f"{rate:,.0f}" for rate in rates), *parts])
    header = "steps per second | per CPU-second | environments | inference | update"
    return table(f" | {header}", rows)


BLOCKS = {
    make.__name__.replace("_", "-"): make
    for make in (
        scores, speeds, clipped_results, clipped_runs, clipped_elsewhere, head_to_head,
        ends_of_scales, ablations, cma_results, humanoid, cma_runs, cma_crossings, kl_results,
        kl_marks, kl_runs, atari_results, atari_runs, atari_goals, clipped_speed, kl_speed,
        atari_speed,
    )
}  # fmt: skip
BLOCKS |= {
    f"{make.__name__.replace('_', '-')}-{metric}": partial(make, metric)
    for make in (each_environment, all_environments, each_change)
    for metric in report.METRICS
}
BLOCKS |= {
    "growth-environments": partial(
        growth, "num-envs", "environments (256 steps each, 8 minibatches)"
    ),
    "growth-minibatches": partial(
        growth, "num-minibatches", "samples a minibatch (8 environments of 1024 steps)"
    ),
}
