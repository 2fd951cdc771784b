"""The tables of README.md and docs/, from the committed runs.

Each stands between <!-- its name --> and <!-- end -->. `python -m benchmark.published` makes them
anew. README.md here says which page shows a table, and which command made its runs.
"""

from functools import partial
from statistics import median

import numpy as np
from scipy.stats import norm

from benchmark import compare, data, report, speed, stats
from benchmark.published import RESULTS, curves
from benchmark.report import estimate, number, table

SPEED = RESULTS / "speed"
CLIPPED = "ppo_continuous_action"


def bold(text: str) -> str:
    """The first word in bold: the number, not its interval."""
    first, _, rest = text.partition(" ")
    return f"**{first}** {rest}".rstrip() if text else ""


def by_seed(runs: list[data.Run], metric: str = "evaluation") -> str:
    return estimate([run.score(metric) for run in runs]) if runs else ""


def plural(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def length(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps // 1000}k"


def clipped_results() -> str:
    header = "environment, steps | final policy | training | final policy at CleanRL's settings "
    header += "| training there"
    rows = []
    for env_id, script in curves.CLIPPED.items():
        own, cleanrl = (curves.runs(env_id, script, name) for name in ("default", "cleanrl"))
        steps = own[0].info["args"]["total_timesteps"]
        name = f"{env_id}, {length(steps)}"
        if len(own) != 5:
            name += f" ({plural(len(own))})"
        there = by_seed(cleanrl)
        if cleanrl:
            there += f" ({plural(len(cleanrl))})"
        cells = [name, bold(by_seed(own)), by_seed(own, "training"), there]
        cells.append(by_seed(cleanrl, "training"))
        others = (curves.published(env_id, steps, *which) for which in curves.ELSEWHERE.values())
        rows.append([*cells, *others])
    return table(" | ".join([header, *(f"elsewhere, {name}" for name in curves.ELSEWHERE)]), rows)


def above(runs: list[data.Run], anchor) -> float:
    """P(a run here > one of the anchor's), as a mean over the runs here. The anchor's training
    returns are taken as normal, with the published mean and deviation."""
    scores = [run.score("training") for run in runs]
    return float(norm.cdf(scores, anchor.score, anchor.spread).mean())


def control() -> str:
    """Clipped PPO on dm_control, with and without the entropy bonus, beside CleanRL's, all after 1M
    steps. The last row has the means of those that have run on all tasks here."""
    rows = []
    means = []  # of a task: ours, without the bonus, theirs, and two probabilities
    for anchor in sorted(curves.control(), key=lambda anchor: anchor.env_id):
        both = [curves.runs(anchor.env_id, CLIPPED, x) for x in ("default", "ent-coef-0")]
        if not any(both):
            continue
        cells = [anchor.env_id, ", ".join(str(len(own)) for own in both), bold(by_seed(both[0]))]
        cells += [by_seed(own, "training") for own in both]
        cells.append(f"{number(anchor.score)} ± {number(anchor.spread)}")
        chances = [above(own, anchor) if own else np.nan for own in both]
        rows.append(cells + ["" if np.isnan(x) else f"{x:.2f}" for x in chances])
        ends = [[run.score("training") for run in own] or [np.nan] for own in both]
        means.append([*map(np.mean, ends), anchor.score, *chances])
    *returns, ours, before = np.mean(means, axis=0)
    cells = ["" if np.isnan(x) else f"mean {number(x)}" for x in returns]
    cells += ["" if np.isnan(x) else f"mean {x:.2f}" for x in (ours, before)]
    rows.append([f"all {len(rows)} tasks", "", "", *cells])
    header = "environment | seeds | final policy | training | training, `--ent-coef 0` | "
    header += "CleanRL's PPO, training, 3 seeds | P(ours above) | so with `--ent-coef 0`"
    return table(header, rows)


def goals() -> str:
    """The study's goals, what the defaults make, and the most that one of its changes makes."""
    rows = []
    names = curves.STUDY | curves.FOUND
    for row in data.read_csv(RESULTS.parent / "goals.csv"):
        env_id = row["env_id"]
        name = f"{row['env_id']}, {row['setting']}"
        best = ""
        own = curves.runs(env_id, CLIPPED, row["variant"])
        if row["variant"] == "default":
            tried = curves.committed(list(names), [env_id], curves.SEEDS)
            top = max(tried, key=lambda group: stats.iqm(group.scores("evaluation")))
            best = f"{estimate(top.scores('evaluation'))}, {names[top.algorithm]}"
        made = f"{by_seed(own)} ({plural(len(own))})" if own else "not run"
        rows.append([name, number(row["goal"]), row["elsewhere"], made, best])
    header = "environment | goal | highest found elsewhere | the defaults "
    return table(header + "| highest of the study, 3 seeds", rows)


def bootstrap() -> str:
    """Scores of bootstrap.py: mean and range of the seeds."""
    cells = {}
    for row in data.read_csv(RESULTS / "bootstrap.csv"):
        cells.setdefault(row["rule"], {}).setdefault(row["limit"], []).append(row["score"])
    rows = []
    for rule, limits in cells.items():
        ranges = (f"{np.mean(x):,.0f} ({min(x):,.0f} to {max(x):,.0f})" for x in limits.values())
        rows.append([rule, *ranges])
    return table("what follows the last step | limit 200 | limit 20", rows)


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
    for env_id in curves.MUJOCO:
        own = {g.algorithm: g.scores(metric) for g in groups if g.env_id == env_id}
        scores = [own.get(name, np.empty(0)) for name in curves.SCRIPTS]
        seeds = ", ".join(str(len(x)) for x in scores)
        rows.append([env_id, seeds, *map(estimate, scores)])
    return rows


def head_to_head(metric: str) -> str:
    """Scores with the best in bold, those over all environments, and P(above the clipped one)."""
    groups = curves.committed(curves.SCRIPTS, curves.MUJOCO)
    scales = data.read_scales(data.SCALES)
    rows = []
    for env_id, seeds, *scores in scores_by_script(groups, metric):
        numbers = [float(score.split()[0].replace(",", "")) for score in scores]
        marked = (bold(x) if y == max(numbers) else x for x, y in zip(scores, numbers, strict=True))
        rows.append([env_id, seeds, *marked])
    (algorithms, _), *_ = report.compared(groups, metric)
    scores = [report.normalised(algorithms[name], metric, scales) for name in curves.SCRIPTS]
    rows.append(["all eight, normalised", "", *(in_words(stats.iqm, own) for own in scores)])
    wins = [in_words(stats.improvement, [*own, *scores[0]]) for own in scores[1:]]
    rows.append(["P(above clipped)", "", "", *wins])
    header = " | ".join(f"`{name.split()[0]}.py`" for name in curves.SCRIPTS)
    return table(f"environment | seeds | {header}", rows)


def in_words(statistic, scores: list[np.ndarray]) -> str:
    """A statistic of scores by environment, with its 95 % interval."""
    ends = report.between(*stats.interval(statistic, scores), report.ratio)
    return f"{statistic(*scores):.2f} {ends}"


def scores() -> str:
    """README's table: final policies of all scripts, of one setting each unless a row says so."""
    groups = curves.committed(curves.SCRIPTS, curves.MUJOCO)
    rows = [[f"{name}, 1M", *cells] for name, *cells in scores_by_script(groups, "evaluation")]
    lengths = "10M-64envs", "ent-coef-0-3M", "default"
    clipped, *more = (curves.runs("Humanoid-v4", CLIPPED, name) for name in lengths)
    cma = curves.runs("Humanoid-v4", "ppo_cma", "anneal-lr")
    seeds = f"{len(clipped)}, 0, {len(cma)}"
    rows.append(["Humanoid-v4, 10M", seeds, by_seed(clipped), "", by_seed(cma)])
    for found in more + [curves.runs(*x) for x in curves.CLIPPED.items() if "ppo" in x]:
        name = f"{found[0].env_id}, {length(found[0].info['args']['total_timesteps'])}"
        rows.append([name, f"{len(found)}, 0, 0", by_seed(found), "", ""])
    for run in {run.env_id: run for run in games("ppo_atari_multigpu", "10M")}.values():  # longest
        name = f"{run.env_id}, {run.steps[-1] / 1e6:.2g}M"
        rows.append([name, "1, 0, 0", by_seed([run]), "", ""])
    header = "environment, steps | seeds | clipped PPO | `ppo_kl_adaptive.py` | `ppo_cma.py`"
    return table(header, rows)


# --- PPO-CMA --------------------------------------------------------------------------------------


def ablations(
    whole: str, changes: dict[str, str], env_ids, metric: str, seeds=curves.ANY, paid: str = ""
) -> str:
    """A row for the whole and one for each change: seeds, scores, P with its interval, p, verdict.
    If `paid` names a table of speeds, also the CPU time, over that of the whole."""
    rows = []
    found = costs(paid) if paid else {}
    for name, scores, judged in curves.effects(whole, changes, env_ids, metric, seeds):
        cells = [changes.get(name, "none"), ", ".join(str(len(x)) for x in scores)]
        if paid:
            cells.insert(1, ratio(found["study"], found.get(name.split()[-1])))
        cells += map(estimate, scores)
        rows.append(cells + (judgement(judged) if judged else ["", "", ""]))
    first = ["change", "CPU time", "seeds"] if paid else ["change", "seeds"]
    return table(" | ".join([*first, *env_ids, "P(better)", "p", "verdict"]), rows)


def judgement(judged: compare.Judgement) -> list[str]:
    """P with its interval, p, verdict."""
    ends = report.between(judged.low, judged.high, report.ratio)
    return [f"{judged.probability:.2f} {ends}".rstrip(), f"{judged.p:.2g}", judged.verdict]


def explored() -> str:
    """The entropy bonus that falls, over the ten tasks of dm_control of steps 1 and 2."""
    without = []
    falling = []
    for step in ("explore", "explore-led"):
        whole, _, tasks = curves.EXPLORING[step]
        without += curves.committed([whole], tasks)
        falling += curves.committed(["change explore-entropy-falls"], tasks)
    rows = []
    for metric, name in (("evaluation", "final policy"), ("training", "training")):
        _, judged = compare.effect(without, falling, metric)
        rows.append([name, *judgement(judged)])
    return table("returns | P(better) on the ten | p | verdict", rows)


def cma_results() -> str:
    """Means over seeds, and the range of single ones."""
    car = "`--iter-steps 4000 --minibatch-size 2048 --action-repeat %d`"
    rows = []
    for env_id, variant, setting in (
        ("Humanoid-v4", "default", "`--no-anneal-lr`"),
        ("Humanoid-v4", "anneal-lr", "defaults"),
        ("Hopper-v4", "default", "`--iter-steps 8000`"),
        ("MountainCarContinuous-v0", "repeat2", car % 2),
        ("MountainCarContinuous-v0", "default", car % 4),
    ):
        found = curves.load(env_id, "ppo_cma", variant)
        most = found[0].run.info["args"]["total_timesteps"]
        points = [x for x in curves.anchors(env_id) if x.algorithm.startswith("ppo-cma-m")]
        nearest = min(points, key=lambda x: abs(x.steps - most))
        who = plural(nearest.seeds)
        if nearest.env_id != env_id:
            who = f"{nearest.env_id}, {who}"
        original = f"{number(nearest.score)} at {nearest.steps / 1e6:g}M ({who})"
        cells = []
        for own in (
            [stats.running_mean(curve.returns, 3)[-1] for curve in found],
            [curve.run.score("evaluation") for curve in found],
        ):
            cells.append(f"**{number(np.mean(own))}** ({number(min(own))} to {number(max(own))})")
        if setting == car % 4:  # the original's action repeat is 2
            original = ""
        cells.insert(1, original)
        rows.append([f"{env_id}, {setting}", f"{len(found)} x {length(most)}", *cells])
    header = "environment, command | seeds, steps | training return | original's training return "
    return table(header + "| mean action", rows)


def saturation() -> str:
    """The share of mean actions at a bound, by million steps, measured by saturation.py."""
    return report.listed(data.read_csv(RESULTS / "saturation.csv"))


def crossing(curve: curves.Curve, score: float) -> int:
    """The end of the first window with at least this return; 0 if there is none."""
    above = curve.ends[curve.returns >= score]
    return int(above[0]) if len(above) else 0


def humanoid() -> str:
    goals = (1000, 2000, 3000, 4000)
    rows = []
    ppo = (("ppo_cma", f"5M-ppo-{x}", f", mode ppo, clip {x}") for x in (0.0025, 0.05, 0.1, 0.2))
    for script, variant, words in (
        ("ppo_cma", "default", ", `--no-anneal-lr`"),
        ("ppo_cma", "anneal-lr", ""),
        ("ppo_cma", "half-rate", ", `--no-anneal-lr --learning-rate 2.5e-4`"),
        ("ppo_cma", "5M-N8000", ", `--no-anneal-lr`, N = 8,000"),
        *ppo,
        ("ppo_cma", "5M-ppo-N8000", ", mode ppo, clip 0.0025, N = 8,000"),
        ("change", "cma-published-ends", ", cma-published-ends"),
        ("change", "cma-linear-mean", ", cma-linear-mean"),
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
            rows.append([*cells, number(curve.run.score("evaluation"))])
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
        scores = [
            stats.running_mean(curve.returns, 5)[np.searchsorted(curve.ends, mark)]
            for curve in curves.by_batch(env_id)
        ]
        score = curves.coady(env_id).get(mark)
        cells = [f"{env_id}, {mark:,}", f"{score:,.0f}" if score else ""]
        cells += [f"**{median(scores):,.0f}**", f"{max(scores):,.0f}"]
        rows.append([*cells, ", ".join(f"{score:,.0f}" for score in scores)])
    firsts = [crossing(curve, 950) for curve in curves.by_batch("InvertedPendulum-v4")]
    cells = ["InvertedPendulum-v4, first iteration at 950", "710 to 760"]
    cells += [f"**{median(firsts)}**", min(firsts), ", ".join(map(str, firsts))]
    header = "environment, episodes | published, one run | median of ours | best | each seed"
    return table(header, [*rows, cells])


def longest(runs: list[data.Run]) -> int:
    """Episodes of the longest run; 0 if there is none."""
    return max((len(run.returns) for run in runs), default=0)


def between_ends(episodes: list[int]) -> str:
    """The range from the fewest to the most, in words."""
    if not episodes:
        return "not run"
    fewest = f"{min(episodes):,}"
    most = f"{max(episodes):,}"
    return fewest if fewest == most else f"{fewest} to {most}"


def coady(prefix: str) -> str:
    """Table 1 of "AI Gym Workout", the episodes until the mean of five is at a threshold. With the
    prefix "best_" it is table 2, the highest such mean. Each seed of our longest runs is beside."""
    rows = []
    for row in data.read_csv(RESULTS.parent / "coady.csv"):
        both = [curves.runs(row["env_id"], "ppo_kl_adaptive", name) for name in ("default", "1M")]
        found = max(both, key=longest)
        episodes = [len(run.returns) for run in found]
        own = []
        for run, count in zip(found, episodes, strict=True):
            if prefix:
                own.append(number(stats.running_mean(run.returns, 5)[4:].max()))
                continue
            numbers = np.arange(1, count + 1)
            reached = stats.first_reach(numbers, run.returns, row["threshold"], games=5, least=5)
            own.append(f"{reached:,.0f}" if np.isfinite(reached) else "-")
        name = row["env_id"] if prefix else f"{row['env_id']}, {row['threshold']:,}"
        cells = [name, ", ".join(own)]
        for other in ("ppo", "q_prop", "trpo", "ddpg"):
            value = row[prefix + other]
            cells.append(f"{value:,}" if isinstance(value, int | float) else value or "")
        rows.append([*cells, between_ends(episodes)])
    header = f"environment{'' if prefix else ', threshold'} | each seed | the post, one run "
    return table(header + "| Q-Prop | TRPO | DDPG | episodes that ours ran", rows)


# --- Atari ----------------------------------------------------------------------------------------


def games(script: str, *more: str) -> list[data.Run]:
    kinds = "default", *more
    return [x for kind in kinds for game in curves.GOALS for x in curves.runs(game, script, kind)]


def atari_results(script: str = "ppo_atari_multigpu") -> str:
    rows = []
    for run in games(script, "2M-by-1", "2M-by-2", "10M"):
        setting = run.env_id
        if run.variant != "default":
            setting += f", {run.variant}"
        name = f"{setting}, seed {run.seed}"
        cells = [name, f"{run.steps[-1] / 1e6:.2f}M, {run.hours:.1f}"]
        cells += [f"**{run.score(metric):.1f}**" for metric in ("training", "evaluation")]
        for goal in curves.GOALS[run.env_id]:
            step = stats.first_reach(run.steps, run.returns, goal, least=100) / 1e6
            cells.append(f"{goal}: {step:.2f}M" if np.isfinite(step) else f"{goal}: not reached")
        rows.append([*cells[:4], ", ".join(cells[4:])])
    header = "game | steps, hours | training, last 100 games | greedy, 20 games "
    return table(header + "| steps to a mean of", rows)


# --- speed ----------------------------------------------------------------------------------------


def costs(name: str) -> dict[str, speed.Summary]:
    """The programs of a table of `python -m benchmark speed`."""
    return speed.summarise([tuple(row.values()) for row in data.read_csv(SPEED / f"{name}.csv")])


def rate(mine: speed.Summary) -> str:
    return f"{median(mine.cpu_rates):,.0f}"


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


CHEETAH = "ppo_continuous_action-HalfCheetah-v4"
HUMANOID = "ppo_continuous_action-Humanoid-v4"
KL = "ppo_kl_adaptive-HalfCheetah-v4"

SPEEDS = (  # the first five are README's
    ("`ppo.py`, CartPole-v1", "ppo-CartPole-v1", "compiled"),
    ("`ppo_continuous_action.py`, HalfCheetah-v4", CHEETAH, "compiled"),
    ("the same, 8 environments", f"{CHEETAH}-8envs", "compiled"),
    ("the same, Humanoid-v4", HUMANOID, "compiled"),
    ("`ppo_kl_adaptive.py`, HalfCheetah-v4", KL, "1_environment"),
    ("the same, 5 environments", KL, "5_environments"),
    ("`ppo_continuous_action.py`, Hopper-v4", "ppo_continuous_action-Hopper-v4", "compiled"),
    ("the same, Humanoid-v4, 32,000 steps an iteration, 1 epoch", f"{HUMANOID}-32k", "compiled"),
)


def speeds(most: int | None = 5, columns: int | None = 4) -> str:
    """Steps per CPU-second of the scripts, all of them or README's part."""
    header = "script, environment", "steps per CPU-second", "to Stable-Baselines3's PPO"
    header += "to the bare environment", "eager, to Stable-Baselines3"
    header += ("memory: compiled, eager, Stable-Baselines3",)
    rows = []
    for words, file, name in SPEEDS[:most]:
        mine, sb3, eager, bare = map(costs(file).get, (name, "sb3", "eager", "bare"))
        memory = ", ".join(f"{x.memory:.0f}" if x else "-" for x in (mine, eager, sb3))
        cells = [words, rate(mine), spread(mine, sb3), ratio(mine, bare), ratio(eager, sb3, 1)]
        rows.append([*cells, f"{memory} MB"][:columns])
    return table(" | ".join(header[:columns]), rows)


def study_speed() -> str:
    """Times of whole runs of the clipped script, relative to those without a KL stop."""
    rows = []
    names = ("default", "large", "none", "bare")
    for env_id in ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4"):
        own, large, none, bare = map(costs(f"what_matters-{env_id}").get, names)
        rows.append([env_id, rate(own), *(ratio(none, x) for x in (own, large, bare))])
    header = "environment | steps per CPU-second | time, over that by `--target-kl None` "
    return table(header + "| so with 64 environments | of the bare environment", rows)


def growth(flag: str) -> str:
    """The clipped script by the values of a flag, one round."""
    measured = {}
    for row in data.read_csv(SPEED / f"{CHEETAH}-{flag}.csv"):
        cost = [row[name] for name in speed.COLUMNS]
        measured.setdefault(row[flag], []).append(cost)
    rows = []
    for value, costs_there in measured.items():
        found = speed.summarise(costs_there)
        mine = found["ppo_continuous_action"]
        rows.append([value, rate(mine), ratio(mine, found.get("bare"))])
    return table(f"`--{flag}` | steps per CPU-second | to the bare environment", rows)


def atari_speed() -> str:
    measured = data.read_csv(RESULTS / "speed_atari-Pong-v5.csv")
    rows = []
    for name, words in {
        "1 process, 1 thread": "1 process",
        "1 process, 1 thread, bf16": "1 process, `--bf16`",
        "2 processes, 1 thread each": "2 processes",
        "2 processes, 1 thread each, bf16": "2 processes, `--bf16`",
        "EnvPool alone": "EnvPool alone, 1 thread, random actions",
    }.items():
        own = [row for row in measured if row["what"] == name]
        cells = [words]
        for clock in ("wall_seconds", "cpu_seconds"):
            cells.append(f"{median(row['steps'] / row[clock] for row in own):,.0f}")
        for part in ("environments", "inference", "update"):
            shares = [row[part] for row in own]
            cells.append("" if None in shares else f"{median(shares):.0%}")
        rows.append(cells)
    header = "steps per second | per CPU-second | environments | inference | update"
    return table(f" | {header}", rows)


def recurrent_speed() -> str:
    measured = data.read_csv(SPEED / "ppo_lstm.csv")
    rows = []
    for task in ("CartPoleNoVel-v1", "Noise-v0"):
        speeds = {}
        for row in (row for row in measured if row["task"] == task):
            speeds.setdefault(row["program"], []).append(row["steps_per_cpu_second"])
        for program, own in speeds.items():
            ratios = [a / b for a, b in zip(own, speeds["RecurrentPPO"], strict=True)]
            rows.append([task, program, f"{median(own):,.0f}", f"{median(ratios):.1f}"])
    return table("task | program | steps per CPU second | to RecurrentPPO", rows)


def gpu_atari() -> str:
    """Milliseconds of an iteration's parts on a GPU, by gpu_profile.py."""
    rows = []
    for row in data.read_csv(RESULTS / "gpu/atari.csv"):
        words = row["flags"].removeprefix("--env-id Breakout-v5 --num-envs ").split(" ", 1)
        cells = [words[0], f"`{words[1]}`" if words[1:] else "eager"]
        cells.append(f"{row['steps_per_second']:,.0f}")
        for part in ("games_ms", "acting_ms", "learning_ms"):
            cells.append(f"{row[part]:.0f} ({row[part] / row['iteration_ms']:.0%})")
        for part in ("rollout_kernels_ms", "rollout_to_device_ms", "update_kernels_ms"):
            cells.append(f"{row[part]:.0f}")
        rows.append([*cells, f"{row['rollout_launches']:,.0f}, {row['update_launches']:,.0f}"])
    header = "steps per second | games, ms | acting | learning | the device: acting | copies there"
    return table(f"games | flags | {header} | learning | launches: rollout, update", rows)


def gpu_games() -> str:
    """Steps per second of EnvPool alone, by gpu_games.py."""
    rows = {}
    for row in data.read_csv(RESULTS / "gpu/games.csv"):
        size = f"{row['games']:.0f}, {row['threads']:.0f}"
        rows.setdefault(size, [size]).append(f"{row['steps_per_second']:,.0f}")
    return table("games, threads | memory given back | memory kept", list(rows.values()))


def gpu_overlap() -> str:
    """What serving games in two halves would gain, by gpu_overlap.py --model."""
    rows = []
    for row in data.read_csv(RESULTS / "gpu/overlap-model.csv"):
        cells = [f"{row['games']:.0f}", f"{row['acting']:.1f}"]
        cells += [f"{row[way]:.2f}" for way in ("together", "halves")]
        rows.append([*cells, f"{row['gain']:.2f}"])
    return table("games | acting takes | a step, together | a step, in halves | ratio", rows)


def gpu_warp() -> str:
    """Steps per second of the parts of an iteration by MuJoCo Warp, by gpu_warp.py."""
    rows = {}
    for row in data.read_csv(RESULTS / "gpu/warp.csv"):
        size = f"{row['env_id']}, {row['num_envs']:,.0f}"
        rows.setdefault(size, [size]).append(f"{row['steps_per_second']:,.0f}")
    header = "environment | environment and inference | learning alone | everything"
    return table(f"task, environments | {header}", list(rows.values()))


def pace(rows: list[dict]) -> tuple[float, str]:
    """Median steps per second over rounds; the same with its range."""
    rates = sorted(row["steps"] / row["seconds"] for row in rows)
    middle = median(rates)
    return middle, f"{middle:,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})"


def engine_name(engine: str, workers: str) -> str:
    """An engine of the border in words."""
    kinds = {"ours": "workers", "EnvPool": "EnvPool, threads", "envpool": "EnvPool, threads"}
    if engine == "ours" and workers == "0":
        return "one process"
    return f"{kinds.get(engine, f'{engine}, processes')}: {workers}"


def border(name: str) -> str:
    """Steps per second of each way to step environments, and their ratio to one process. `border`
    has environments alone, with random actions, `border_training` has whole trainings."""
    grouped = {}
    for row in data.read_csv(SPEED / f"{name}.csv"):
        engine = row["engine"]
        workers = row.get("workers")
        if workers is None:  # "envpool 2", or our workers
            kind, _, workers = str(engine).rpartition(" ")
            engine = kind or "ours"
        number_of_envs = row.get("num_envs", 8 if row["environment"] == "sleep" else 64)
        key = row["environment"], number_of_envs, engine, str(workers)
        grouped.setdefault(key, []).append(row)
    rows = []
    for (environment, num_envs, engine, workers), found in grouped.items():
        first, _ = pace(grouped[environment, num_envs, "ours", "0"])
        rate, text = pace(found)
        cells = environment, num_envs, engine_name(engine, workers), len(found), text
        rows.append([*cells, f"{rate / first:.2f}"])
    header = "environment | N | stepped by | rounds | steps per second | to one process"
    return table(header, rows)


BLOCKS = {
    make.__name__.replace("_", "-"): make
    for make in (
        scores, speeds, study_speed, clipped_results, control, goals, helped, bootstrap,
        cma_results, humanoid, kl_results, atari_results, atari_speed, recurrent_speed,
        gpu_atari, gpu_games, gpu_overlap, gpu_warp,
    )
}  # fmt: skip
BLOCKS |= {name.replace("_", "-"): partial(border, name) for name in ("border", "border_training")}
BLOCKS |= {"coady-episodes": partial(coady, ""), "coady-best": partial(coady, "best_")}
BLOCKS |= {f"growth-{flag}": partial(growth, flag) for flag in ("num-envs", "num-minibatches")}
BLOCKS["all-speeds"] = partial(speeds, None, None)
BLOCKS["saturation"] = saturation
BLOCKS["lstm-results"] = partial(atari_results, "ppo_atari_lstm")
ALPHAS = {f"{CLIPPED} rpo-{x}": f"`--rpo-alpha {x}`" for x in (0.01, 0.1, 0.5)}
TASKS = "cheetah-run", "hopper-hop", "reacher-easy", "walker-walk"
ON = *curves.MUJOCO[:4], *(f"dm_control/{task}-v0" for task in TASKS)
BLOCKS["rpo"] = partial(ablations, f"{CLIPPED} no-target-kl", ALPHAS, ON, "evaluation")
CLAIMS = "ppo_kl_adaptive 200k", curves.COADY, curves.CLAIMED
for metric in report.METRICS:
    BLOCKS |= {f"claims-{metric}": partial(ablations, *CLAIMS, metric)}
    BLOCKS |= {f"head-to-head-{metric}": partial(head_to_head, metric)}
    parts = (curves.CHANGES, curves.ABLATED)
    modes = (curves.MODES, curves.MUJOCO)
    for name, studied in {"ablations": parts, "modes": modes}.items():
        BLOCKS |= {f"{name}-{metric}": partial(ablations, "ppo_cma 1M", *studied, metric)}
BLOCKS["explore-ten"] = explored
for name, studied in curves.EXPLORING.items():
    BLOCKS[name] = partial(ablations, *studied, "evaluation")
for name, studied in {"what-matters": curves.SCREENED, "finalists": curves.FINALISTS}.items():
    BLOCKS[name] = partial(ablations, *studied, paid="what_matters-changes")
