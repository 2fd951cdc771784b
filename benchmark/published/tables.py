"""The tables of README.md and docs/, from the committed runs.

Each stands between <!-- its name --> and <!-- end -->. `python -m benchmark.published` makes them
anew. README.md here says which page shows a table, and which command made its runs.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
from scipy.stats import norm, ttest_ind_from_stats

from benchmark import compare, data, report, speed, stats
from benchmark.published import RESULTS, curves
from benchmark.published.lists import (
    BONUS_TASKS,
    CHANGES,
    CLIPPED,
    GOALS,
    MUJOCO,
    RARE,
    SCRIPTS,
    STUDIES,
    TASKS,
)
from benchmark.published.units import UNITS
from benchmark.report import estimate, number

SPEED = RESULTS / "speed"
BONUSES = RESULTS / "default.csv"
SCALE = RESULTS / "scale.csv"
IN_UNITS = RESULTS / "units.csv"
BONUS = "ent-coef-0.01"


class Cell(str):
    """The text of a cell, and what it was computed from: runs, or committed tables."""

    sources: tuple[data.Run | Path, ...] = ()


def cell(text: str, sources: Iterable[data.Run | Path]) -> Cell:
    made = Cell(text)
    made.sources = tuple(sources)
    return made


def measured(row: Iterable, *sources: data.Run | Path) -> list:
    """A row whose cells, but the first, come from these."""
    first, *others = row
    return [first, *(cell(str(x), sources) for x in others)]


MADE = []  # the tables made last, each as the names of its columns and its rows; for index.py


def table(header: str, rows: Iterable[Iterable], rule: str = " --- ") -> str:
    """A markdown table."""
    rows = [list(row) for row in rows]
    MADE.append(([name.strip() for name in header.split("|")], rows))
    return report.table(header, rows, rule)


def bold(text: str) -> str:
    """The first word in bold: the number, not its interval."""
    first, _, rest = text.partition(" ")
    return cell(f"**{first}** {rest}".rstrip() if text else "", getattr(text, "sources", ()))


def by_seed(runs: list[data.Run], metric: str = "evaluation") -> str:
    return cell(estimate([run.score(metric) for run in runs]), runs) if runs else ""


def length(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps // 1000}k"


def clipped_results() -> str:
    header = "environment, steps | seeds | final policy | its worst seed | training "
    header += "| final policy at CleanRL's settings | training there"
    rows = []
    for env_id, script in TASKS.items():
        own, cleanrl = (curves.runs(env_id, script, name) for name in ("default", "cleanrl"))
        steps = own[0].info["args"]["total_timesteps"]
        seeds = ", ".join(str(len(runs)) for runs in (own, cleanrl))
        cells = [f"{env_id}, {length(steps)}", seeds]
        worst = min(own, key=lambda run: run.score("evaluation"))
        cells += [bold(by_seed(own)), by_seed([worst]), by_seed(own, "training")]
        cells += [by_seed(cleanrl), by_seed(cleanrl, "training")]
        others = (curves.published(env_id, steps, *which) for which in curves.ELSEWHERE.values())
        rows.append([*cells, *others])
    return table(" | ".join([header, *(f"elsewhere, {name}" for name in curves.ELSEWHERE)]), rows)


def control() -> str:
    """Clipped PPO on dm_control beside CleanRL's, both after 1M steps. P(a run of ours is above one
    of theirs) takes theirs as normal, with the published mean and deviation. The last rows have
    means; and, of tasks with three seeds or more, for how many p is below 0.05 after Holm's
    correction."""
    rows = []
    found = []  # of a task: the mean of ours, CleanRL's, P of each seed, p
    for anchor in sorted(curves.control(), key=lambda anchor: anchor.env_id):
        own = curves.runs(anchor.env_id, CLIPPED)
        if not own:
            continue
        ends = np.array([run.score("training") for run in own])
        above = norm.cdf(ends, anchor.score, anchor.spread)
        p = None
        if len(own) >= 3:
            ours = ends.mean(), ends.std(ddof=1), len(ends)
            theirs = anchor.score, anchor.spread, anchor.seeds
            p = ttest_ind_from_stats(*ours, *theirs, equal_var=False).pvalue
        cells = [anchor.env_id, len(own), by_seed(own, "training")]
        cells += [f"{number(anchor.score)} ± {number(anchor.spread)}"]
        rows.append([*cells, f"{above.mean():.2f}", "" if p is None else f"{p:.2g}"])
        found.append([ends.mean(), anchor.score, above, p])
    tested = [x for x in found if x[-1] is not None]
    for name, tasks in (("with 3 seeds or more", tested), ("all", found)):
        ours, theirs, above, p = zip(*tasks, strict=True)
        cells = [f"{name}: {len(tasks)} tasks", "", f"mean {number(np.mean(ours))}"]
        cells.append(f"mean {number(np.mean(theirs))}")
        if tasks is tested:
            certain = report.holm(p) < 0.05
            ahead = int((certain & (np.array(ours) > theirs)).sum())
            cells.append(in_words(stats.mean, above))
            cells.append(f"certain: {ahead} ahead, {certain.sum() - ahead} behind")
        else:
            cells += [f"{np.mean([x.mean() for x in above]):.2f}", ""]
        rows.append(cells)
    header = "environment | seeds | training | CleanRL's PPO, training, 3 seeds "
    return table(f"{header}| P(ours above) | p", rows)


def bonuses(step: int, measure: str) -> dict[tuple[str, str], np.ndarray]:
    """Scores of studies/default.py by environment and arm, each [seeds]."""
    found = {}
    for row in data.read_csv(BONUSES):
        if row["step"] == step:
            found.setdefault((row["env_id"], str(row["arm"])), []).append(row[measure])
    return {key: np.array(scores) for key, scores in found.items()}


def bonus_ant() -> str:
    """Step 1 of studies/default.py: mean returns between 100k and 200k steps."""
    rows = []
    scores = bonuses(1, "early")
    for (env_id, arm), own in scores.items():
        judged = judgement(compare.judge([scores[env_id, "0"]], [own]))[:2] if arm != "0" else []
        ends = f"{own.mean():.0f} ({own.min():.0f} to {own.max():.0f})"
        rows.append(measured([f"`{arm}`", ends, *(judged or ["", ""])], BONUSES))
    return table("bonus | five seeds | P(better) | p", rows)


def bonus_tasks(step: int = 2, arm: str = "0.01/dims") -> str:
    """Steps 2 and 3: an arm beside none. On one dimension it is 0.01, which was published, too."""

    def bonus(env_id, metric):
        published = curves.runs(env_id, CLIPPED, BONUS) if "Inverted" in env_id else []
        if published:
            return [run.score(metric) for run in published], published
        return bonuses(step, metric.replace("evaluation", "final"))[env_id, arm], [BONUSES]

    return beside_none(BONUS_TASKS if step == 2 else BONUS_TASKS[2:4], bonus)


def bonus_repeats(arm: str) -> str:
    """The fourth protocol: an arm beside none. On one dimension both arms are the same."""

    def bonus(env_id, metric):
        own = curves.runs(env_id, CLIPPED, arm) or curves.runs(env_id, CLIPPED, "repeats")
        return [run.score(metric) for run in own], own

    return beside_none(RARE, bonus)


def beside_none(tasks: Iterable[str], bonus: Callable) -> str:
    """No bonus beside one: its scores on a task by a metric, and where they are from."""
    rows = []
    pairs = {"training": [], "evaluation": []}
    for env_id in tasks:
        without = curves.without_bonus(env_id)
        cells = [env_id]
        for metric, own in pairs.items():
            mine, sources = bonus(env_id, metric)
            own.append((np.array([run.score(metric) for run in without]), np.array(mine)))
            before, mine = own[-1]
            new = estimate(mine), *judgement(compare.judge([before], [mine]))[:2]
            cells += [by_seed(without, metric), *(cell(x, sources) for x in new)]
        rows.append(cells)
    ends = (judgement(compare.judge(*zip(*x, strict=True)))[:2] for x in pairs.values())
    rows.append(["together", *(x for own in ends for x in ("", "", *own))])
    header = "training, none | training, bonus | P(better) | p"
    return table(f"environment | {header} | {header.replace('training', 'final')}", rows)


def scale() -> str:
    """The protocol of scale.sh: each arm beside none, and four epochs beside ten."""
    scores = {}
    for row in data.read_csv(SCALE):
        for measure in ("training", "final"):
            own = scores.setdefault((measure, row["arm"], row["env_id"]), [])
            own.append(row[measure])
    tasks = list(dict.fromkeys(env_id for *_, env_id in scores))
    arms = {"none": "", "rewards": "none", "obs": "none", "both": "none", "both-4-epochs": "both"}
    ran = {arm for _, arm, _ in scores}  # of all that the protocol names
    arms = {arm: other for arm, other in arms.items() if arm in ran}
    rows = []
    for arm, other in arms.items():
        for measure in ("training", "final"):
            own = [env_id for env_id in tasks if (measure, arm, env_id) in scores]
            mine, before = (
                [np.array(scores[measure, x, env_id]) for env_id in own]
                for x in (arm, other or arm)
            )
            cells = [f"{number(stats.iqm(x))}" for x in mine]
            if other:
                judged = [compare.judge([a], [b]) for a, b in zip(before, mine, strict=True)]
                cells = [f"{x} (p {y.p:.2g})" for x, y in zip(cells, judged, strict=True)]
            cells = dict.fromkeys(tasks, "") | dict(zip(own, cells, strict=True))
            ends = judgement(compare.judge(before, mine))[:2] if other else ["", ""]
            rows.append(measured([f"{arm}, {measure}", other, *cells.values(), *ends], SCALE))
    return table(f"arm, measure | beside | {' | '.join(tasks)} | P(better) | p", rows)


def helped() -> str:
    """Final policies without and with what helped, as helped.csv lists them."""
    rows = []
    for row in data.read_csv(RESULTS.parent / "helped.csv"):
        before = curves.runs(row["env_id"], row["script"], row["without"])
        after = curves.runs(row["env_id"], row["with_script"], row["with"])
        seeds = f"{len(before)}, {len(after)}"
        run = f"{row['env_id']}, `{row['script']}.py`"
        rows.append([row["task"], run, row["changed"], seeds, by_seed(before), by_seed(after)])
    return table("task | run | what was changed | seeds | without | with", rows)


# --- three scripts, eight environments ------------------------------------------------------------


def scores_by_script(groups: list[report.Group], metric: str) -> list[list[str]]:
    """A row for each environment: seeds of each script, and each script's score."""
    rows = []
    for env_id in MUJOCO:
        own = {g.algorithm: g.finished for g in groups if g.env_id == env_id}
        found = [own.get(name, []) for name in SCRIPTS]
        seeds = ", ".join(str(len(x)) for x in found)
        rows.append([env_id, seeds, *(by_seed(x, metric) for x in found)])
    return rows


def head_to_head(metric: str) -> str:
    """Scores with the best in bold, those over all environments, and P(above the clipped one)."""
    groups = curves.committed(SCRIPTS, MUJOCO)
    scales = data.read_scales(data.SCALES)
    rows = []
    for env_id, seeds, *scores in scores_by_script(groups, metric):
        numbers = [float(score.split()[0].replace(",", "")) for score in scores]
        marked = (bold(x) if y == max(numbers) else x for x, y in zip(scores, numbers, strict=True))
        rows.append([env_id, seeds, *marked])
    algorithms, _ = report.compared(groups, metric)
    scores = [report.normalised(algorithms[name], metric, scales) for name in SCRIPTS]
    rows.append(["all eight, normalised", "", *(in_words(stats.iqm, own) for own in scores)])
    wins = [in_words(stats.improvement, [*own, *scores[0]]) for own in scores[1:]]
    rows.append(["P(above clipped)", "", "", *wins])
    header = " | ".join(f"`{name.split()[0]}.py`" for name in SCRIPTS)
    return table(f"environment | seeds | {header}", rows)


def in_words(statistic, scores: list[np.ndarray]) -> str:
    """A statistic of scores by environment, with its 95 % interval."""
    ends = report.between(*stats.interval(statistic, scores), report.ratio)
    return f"{statistic(*scores):.2f} {ends}"


def scores() -> str:
    """README's table: final policies of three seeds or more, of one setting each unless a row says
    so."""

    def score(count: int, *which: str) -> str:
        found = curves.runs(*which)
        seeds = f" ({len(found)} seeds)" if len(found) not in (0, count) else ""
        return cell(by_seed(found) + seeds, found)

    rows = []
    for env_id, script in TASKS.items():
        steps = curves.runs(env_id, script)[0].info["args"]["total_timesteps"]
        cells = [score(10, env_id, script), score(5, env_id, script, "cleanrl")]
        cells += [score(5, env_id, f"ppo_{x}", "1M") for x in ("kl_adaptive", "cma")]
        if env_id not in ("Pusher-v4", "Pendulum-v1", "Acrobot-v1", "InvertedPendulum-v4"):
            rows.append([f"{env_id}, {length(steps)}", *cells])
    more = score(5, "CartPole-v1", "ppo", "cleanrl-500k")
    rows.insert(-1, ["CartPole-v1, CleanRL's 500k", "", more, "", ""])
    rows.append(["Humanoid-v4, 3M", score(10, "Humanoid-v4", CLIPPED, "3M"), "", "", ""])
    header = "environment, steps | clipped PPO, 10 seeds | at CleanRL's settings, 5 seeds"
    header += " | `ppo_kl_adaptive.py`, 5 seeds | `ppo_cma.py`, 5 seeds"
    return table(header, rows)


# --- PPO-CMA --------------------------------------------------------------------------------------


def ablations(study: str, metric: str = "evaluation") -> str:
    """A row for the whole and one for each change: seeds, scores, P with its interval, p, verdict.
    If it was measured, also the CPU time, over that of the whole."""
    rows = []
    paid = study in ("what-matters", "finalists")
    found = costs("what_matters-changes")
    for name, runs, judged in curves.effects(study, metric):
        cells = [CHANGES[study].get(name, "none"), ", ".join(str(len(x)) for x in runs)]
        if paid:
            time = ratio(found["study"], found.get(name.split()[-1]))
            cells.insert(1, cell(time, [SPEED / "what_matters-changes.csv"]))
        cells += [by_seed(x, metric) or "-" for x in runs]
        rows.append(cells + (judgement(judged) if judged else ["", "", ""]))
    first = ["change", "CPU time", "seeds"] if paid else ["change", "seeds"]
    columns = [*first, *STUDIES[study].env_ids, "P(better)", "p", "verdict"]
    return table(" | ".join(columns), rows)


def judgement(judged: compare.Judgement) -> list[str]:
    """P with its interval, p, verdict."""
    ends = report.between(judged.low, judged.high, report.ratio)
    return [f"{judged.probability:.2f} {ends}".rstrip(), f"{judged.p:.2g}", judged.verdict]


def studied() -> str:
    """Each change of both studies of the clipped script, on the tasks where it was tried first."""
    rows = []
    for study, words in {"what-matters": "four of MuJoCo", "explore": "five of dm_control"}.items():
        for name, runs, judged in curves.effects(study, "evaluation"):
            if judged:
                everything = [run for x in runs for run in x]
                cells = (cell(x, everything) for x in judgement(judged))
                rows.append([CHANGES[study][name], words, *cells])
    return table("change | on | P(better) | p | verdict", rows)


def mean_and_range(runs: list[data.Run], metric: str) -> str:
    scores = [run.score(metric) for run in runs]
    ends = f"{number(min(scores))} to {number(max(scores))}" if len(runs) > 1 else "one run"
    return cell(f"**{number(np.mean(scores))}** ({ends})", runs)


def cma_results() -> str:
    """Means over seeds, and the range of single ones."""
    car = "`--iter-steps 4000 --minibatch-size 2048 --action-repeat %d`"
    rows = []
    for env_id, variant, setting in (
        ("Humanoid-v4", "anneal-lr", "defaults"),
        ("Humanoid-v4", "default", "`--no-anneal-lr`"),
        ("Hopper-v4", "default", "`--iter-steps 8000`"),
        ("MountainCarContinuous-v0", "repeat2", car % 2),
        ("MountainCarContinuous-v0", "default", car % 4),
    ):
        found = curves.runs(env_id, "ppo_cma", variant)
        most = found[0].info["args"]["total_timesteps"]
        points = [x for x in curves.anchors(env_id) if x.algorithm.startswith("ppo-cma-m")]
        nearest = min(points, key=lambda x: abs(x.steps - most))
        who = "1 seed" if nearest.seeds == 1 else f"{nearest.seeds} seeds"
        if nearest.env_id != env_id:
            who = f"{nearest.env_id}, {who}"
        original = f"{number(nearest.score)} at {nearest.steps / 1e6:g}M ({who})"
        if setting == car % 4:  # the original's action repeat is 2
            original = ""
        training, final = (mean_and_range(found, metric) for metric in ("training", "evaluation"))
        seeds = f"{len(found)} x {length(most)}"
        rows.append([f"{env_id}, {setting}", seeds, training, original, final])
    header = "environment, command | seeds, steps | training | original's training return "
    return table(header + "| mean action", rows)


def crossing(curve: curves.Curve, score: float) -> int:
    """The end of the first window with at least this return; 0 if there is none."""
    above = curve.ends[curve.returns >= score]
    return int(above[0]) if len(above) else 0


def humanoid() -> str:
    goals = (1000, 2000, 3000, 4000)
    rows = []
    for script, variant, words in (
        ("ppo_cma", "anneal-lr", ""),
        ("ppo_cma", "default", ", `--no-anneal-lr`"),
        ("ppo_continuous_action", "10M-64envs", ", 64 environments"),
    ):
        for curve in curves.load("Humanoid-v4", script, variant, width=32_000):
            steps = [crossing(curve, goal) / 1e6 for goal in goals]
            name = f"`{script}.py`{words}, seed {curve.run.seed}"
            cells = [f"{name}, to {curve.run.steps[-1] / 1e6:.1f}M"]
            cells += [f"{step:.2f}M" if step else "not yet" for step in steps]
            for start, end in ((4.5e6, 5e6), (9e6, 10e6)):
                inside = (curve.ends > start) & (curve.ends <= end)
                cells.append(number(curve.returns[inside].mean()) if inside.any() else "")
            cells.append(number(curve.run.score("evaluation")))
            rows.append(measured(cells, curve.run))
    original = ["original, Humanoid-v2, mean of 3", "2.01M", "2.48M", "2.91M", "3.34M"]
    rows.append([*original, "4,593 at 5M", "4,609", ""])  # read off a figure
    return table(f" | {' | '.join(map(str, goals))} | 4.5 to 5M | 9 to 10M | mean action", rows)


# --- KL-adaptive PPO ------------------------------------------------------------------------------


def kl_results() -> str:
    """For each seed the mean return of the five iterations that end at an episode."""
    rows = []
    marks = {"HalfCheetah-v4": (1000, 3000), "Swimmer-v4": (1000, 2480)}
    marks |= {"Hopper-v4": (1000, 2000, 3000), "InvertedPendulum-v4": (640,)}
    marks |= {"Walker2d-v4": (1000, 2500, 5000), "Humanoid-v4": (5000, 10_000)}
    marks |= {"HumanoidStandup-v4": (1000,)}
    for env_id, mark in [(name, mark) for name in marks for mark in marks[name]]:
        found = curves.by_batch(env_id)
        scores = [
            stats.running_mean(curve.returns, 5)[np.searchsorted(curve.ends, mark)]
            for curve in found
        ]
        score = curves.coady(env_id).get(mark)
        cells = [f"**{median(scores):,.0f}**", f"{max(scores):,.0f}"]
        cells.append(", ".join(f"{score:,.0f}" for score in scores))
        published = f"{score:,.0f}" if score else ""
        runs = [curve.run for curve in found]
        rows.append([f"{env_id}, {mark:,}", published, *measured(["", *cells], *runs)[1:]])
    header = "environment, episodes | published, one run | median of ours | best | each seed"
    return table(header, rows)


def coady(prefix: str) -> str:
    """Table 1 of "AI Gym Workout", the episodes until the mean of five is at a threshold. With the
    prefix "best_" it is table 2, the highest such mean. Each seed of our longest runs is beside."""
    rows = []
    for row in data.read_csv(RESULTS.parent / "coady.csv"):
        both = [curves.runs(row["env_id"], "ppo_kl_adaptive", name) for name in ("default", "1M")]
        found = max(both, key=lambda runs: len(runs[0].returns) if runs else 0)
        episodes = [len(run.returns) for run in found]
        played = " to ".join(f"{x:,}" for x in dict.fromkeys((min(episodes), max(episodes))))
        own = []
        for run, count in zip(found, episodes, strict=True):
            if prefix:
                own.append(number(stats.running_mean(run.returns, 5)[4:].max()))
                continue
            numbers = np.arange(1, count + 1)
            reached = stats.first_reach(numbers, run.returns, row["threshold"], games=5, least=5)
            own.append(f"{reached:,.0f}" if np.isfinite(reached) else "-")
        name = row["env_id"] if prefix else f"{row['env_id']}, {row['threshold']:,}"
        cells = [name, cell(", ".join(own), found)]
        for other in ("ppo", "q_prop", "trpo", "ddpg"):
            value = row[prefix + other]
            cells.append(f"{value:,}" if isinstance(value, int | float) else value or "")
        rows.append([*cells, played])
    header = f"environment{'' if prefix else ', threshold'} | each seed | the post, one run "
    return table(header + "| Q-Prop | TRPO | DDPG | episodes that ours ran", rows)


# --- Atari ----------------------------------------------------------------------------------------


def games(script: str, *more: str) -> list[data.Run]:
    kinds = "default", *more
    return [x for kind in kinds for game in GOALS for x in curves.runs(game, script, kind)]


def atari_results(script: str = "ppo_atari_multigpu") -> str:
    rows = []
    for run in games(script, "2M-by-1", "2M-by-2", "10M"):
        setting = run.env_id
        if run.variant != "default":
            setting += f", {run.variant}"
        name = f"{setting}, seed {run.seed}"
        cells = [name, f"{run.steps[-1] / 1e6:.2f}M, {run.hours:.1f}"]
        cells += [f"**{run.score(metric):.1f}**" for metric in ("training", "evaluation")]
        for goal in GOALS[run.env_id]:
            step = stats.first_reach(run.steps, run.returns, goal, least=100) / 1e6
            cells.append(f"{goal}: {step:.2f}M" if np.isfinite(step) else f"{goal}: not reached")
        rows.append(measured([*cells[:4], ", ".join(cells[4:])], run))
    header = "game | steps, hours | training, last 100 games | greedy, 20 games "
    return table(header + "| steps to a mean of", rows)


# --- speed ----------------------------------------------------------------------------------------


def costs(name: str) -> dict[str, speed.Summary]:
    """The programs of a table of `python -m benchmark speed`."""
    return speed.summarise([tuple(row.values()) for row in data.read_csv(SPEED / f"{name}.csv")])


def ratio(mine: speed.Summary | None, other: speed.Summary | None, digits: int = 2) -> str:
    """The median over rounds of the ratio of steps per CPU-second, if both were measured."""
    if not mine or not other:
        return ""
    return f"{median(mine.cpu_rates / other.cpu_rates):.{digits}f}"


def spread(mine: speed.Summary, other: speed.Summary) -> str:
    """The same ratio with its range over rounds."""
    values = mine.cpu_rates / other.cpu_rates
    ends = f"{min(values):.1f} to {max(values):.1f}" if len(values) > 1 else "1 round"
    return f"**{median(values):.1f}** ({ends})"


SPEEDS = {
    "`ppo.py`, CartPole-v1": "ppo-CartPole-v1",
    "`ppo_continuous_action.py`, HalfCheetah-v4": "ppo_continuous_action-HalfCheetah-v4",
}


def all_speeds() -> str:
    """Steps per CPU-second of the scripts."""
    header = "script, environment", "steps per CPU-second", "to Stable-Baselines3's PPO"
    header += "to the bare environment", "eager, to Stable-Baselines3"
    header += ("memory: compiled, eager, Stable-Baselines3",)
    rows = []
    for words, file in SPEEDS.items():
        mine, sb3, eager, bare = map(costs(file).get, ("compiled", "sb3", "eager", "bare"))
        memory = ", ".join(f"{x.memory:.0f}" for x in (mine, eager, sb3))
        cells = [words, f"{median(mine.cpu_rates):,.0f}", spread(mine, sb3), ratio(mine, bare)]
        cells.append(ratio(eager, sb3, 1))
        rows.append(measured([*cells, f"{memory} MB"], SPEED / f"{file}.csv"))
    return table(" | ".join(header), rows)


def gpu_atari() -> str:
    """Milliseconds of an iteration's parts on a GPU, by gpu_profile.py."""
    path = RESULTS / "gpu/atari.csv"
    rows = []
    for row in data.read_csv(path):
        words = row["flags"].removeprefix("--env-id Breakout-v5 --num-envs ").split(" ", 1)
        cells = [f"{words[0]}, `{words[1]}`" if words[1:] else f"{words[0]}, eager"]
        cells.append(f"{row['steps_per_second']:,.0f}")
        for part in ("games_ms", "acting_ms", "learning_ms"):
            cells.append(f"{row[part]:.0f} ({row[part] / row['iteration_ms']:.0%})")
        for part in ("rollout_kernels_ms", "rollout_to_device_ms", "update_kernels_ms"):
            cells.append(f"{row[part]:.0f}")
        cells.append(f"{row['rollout_launches']:,.0f}, {row['update_launches']:,.0f}")
        rows.append(measured(cells, path))
    header = "steps per second | games, ms | acting | learning | the device: acting | copies there"
    return table(f"games, flags | {header} | learning | launches: rollout, update", rows)


def gpu_warp() -> str:
    """Steps per second of the parts of an iteration by MuJoCo Warp, by gpu_warp.py."""
    path = RESULTS / "gpu/warp.csv"
    rows = {}
    for row in data.read_csv(path):
        size = f"{row['env_id']}, {row['num_envs']:,.0f}"
        rows.setdefault(size, [size]).append(f"{row['steps_per_second']:,.0f}")
    header = "environment | environment and inference | learning alone | everything"
    return table(f"task, environments | {header}", [measured(row, path) for row in rows.values()])


def units() -> str:
    """Returns in the task's own unit, by units.sh: the seeds' mean, and the worst one."""
    rows = {}
    for row in data.read_csv(IN_UNITS):
        unit = row["env_id"].split("-", 1)[1].removesuffix("-v0")
        own = rows.setdefault(f"`{row['algorithm']}.py`", {name: [] for name in UNITS})
        own[unit].append(row["training"] / UNITS[unit][2])
    texts = (f"{number(np.mean(x))} ({number(min(x))})" for y in rows.values() for x in y.values())
    lines = [measured([script, *islice(texts, len(UNITS))], IN_UNITS) for script in rows]
    return table(" | ".join(["mean (worst seed)", *UNITS]), lines)


BLOCKS = {
    make.__name__.replace("_", "-"): make
    for make in (
        scores, all_speeds, clipped_results, control, helped, cma_results, humanoid, kl_results,
        atari_results, gpu_atari, gpu_warp, studied, bonus_ant, bonus_tasks,
    )
}  # fmt: skip
for made, make in {SCALE: scale, IN_UNITS: units}.items():
    if made.exists():  # its runs have ended
        BLOCKS[make.__name__] = make
BLOCKS |= {"coady-episodes": partial(coady, ""), "coady-best": partial(coady, "best_")}
BLOCKS["bonus-fresh"] = partial(bonus_tasks, 3)
for arm, name in {"repeats": "", "repeats-dims": "-dims", "default": "-fresh"}.items():
    BLOCKS[f"bonus-repeats{name}"] = partial(bonus_repeats, arm)
for metric in report.METRICS:
    BLOCKS[f"head-to-head-{metric}"] = partial(head_to_head, metric)
    for name in ("ablations", "modes", "claims"):
        BLOCKS[f"{name}-{metric}"] = partial(ablations, name, metric)
for name in STUDIES.keys() - {"ablations", "modes", "claims"}:
    BLOCKS[name] = partial(ablations, name)
