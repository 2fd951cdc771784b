"""python -m benchmark report: tables, figures and one page about the runs in some folders."""

import base64
import csv
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from benchmark import data, stats
from benchmark.data import Scale
from benchmark.programs import duration, refuse

Metric = Literal["training", "evaluation"]
GOALS = (0.5, 0.9)  # of the normalised scale
POINTS = 100  # of a learning curve
GAMES = 100  # training episodes whose mean is a training score
METRICS = {
    "training": f"mean return of the last {GAMES} training episodes",
    "evaluation": "mean return of the final policy",
}
REASONS = {"running": "cut off or still at it", "missing": "not begun"}
# Okabe and Ito's colours, told apart by the colour-blind too
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#E69F00", "#000000", "#999999"),
)


def read(folders: Iterable[Path]) -> list[data.Run]:
    """All runs in these folders; wrong input ends here."""
    try:
        runs = data.find(folders)
    except SystemExit as error:
        refuse(str(error))
    if not runs:
        refuse(f"no runs in {', '.join(map(str, folders)) or 'no folder'}")
    return runs


@dataclass
class Group:
    """The runs of an algorithm on an environment, by seed, all trained equally long."""

    env_id: str
    algorithm: str
    budget: str
    mixed: bool  # this algorithm has runs of another budget on this environment
    runs: list[data.Run]

    @property
    def finished(self) -> list[data.Run]:
        return [run for run in self.runs if run.status == "finished"]

    def scores(self, metric: str) -> np.ndarray:
        """Of the finished runs that have one, [seeds]."""
        values = np.array([run.score(metric, GAMES) for run in self.finished])
        return values[np.isfinite(values)]


def group(runs: Iterable[data.Run]) -> list[Group]:
    """Runs of different budgets are never in one group; one that says none joins the largest, but
    not if it is finished. Those that can't be read are in none."""
    by_place = defaultdict(list)
    for run in runs:
        if run.status != "unreadable":
            by_place[run.env_id, run.algorithm].append(run)
    groups = []
    for (env_id, algorithm), members in by_place.items():
        budgets = Counter(run.budget for run in members if run.budget)
        usual = budgets.most_common(1)[0][0] if budgets else ""
        by_length = defaultdict(list)
        for run in members:
            by_length[run.budget or usual * (run.status != "finished")].append(run)
        for name, own in by_length.items():
            groups.append(Group(env_id, algorithm, name, len(by_length) > 1, own))
    return groups


def observed(groups: Iterable[Group], metric: str) -> Scale:
    """The scale of an environment that has none: from the worst to the best of all its runs."""
    scores = np.concatenate([group.scores(metric) for group in groups] or [[]])
    if not len(scores):
        return Scale(0.0, 1.0, "none: no finished run")
    low, high = scores.min(), scores.max()
    return Scale(low, high if high > low else low + 1.0, "worst and best of these runs")


def compared(groups: list[Group], metric: str) -> list[tuple[dict, list[str]]]:
    """What can be compared over environments: ({algorithm: its groups}, environments) of all
    algorithms, or of each pair if no environment has finished runs of all."""
    whole = defaultdict(dict)
    for member in groups:
        if not member.mixed and len(member.scores(metric)):
            whole[member.algorithm][member.env_id] = member

    def common(names: Iterable[str]) -> tuple[dict, list[str]]:
        env_ids = sorted(set.intersection(*(set(whole[name]) for name in names)))
        return {name: [whole[name][env_id] for env_id in env_ids] for name in names}, env_ids

    everyone = sorted({member.algorithm for member in groups})
    found = [common(everyone)]
    if not found[0][1]:
        found = [common(pair) for pair in combinations(everyone, 2)]
    return [(names, env_ids) for names, env_ids in found if env_ids]


# --- words and tables -----------------------------------------------------------------------------


def number(value: float | None) -> str:
    if value is None or not np.isfinite(value):
        return "-"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "-"


def between(low: float, high: float, text: Callable = number) -> str:
    return f"[{text(low)}, {text(high)}]" if np.isfinite(low) else ""


def estimate(scores: np.ndarray) -> str:
    """IQM of scores [seeds] and its 95 % interval, in words."""
    if not len(scores):
        return "-"
    ends = stats.interval(stats.iqm, [np.asarray(scores)])
    return f"{number(stats.iqm(scores))} {between(*ends)}".rstrip()


def unmarked(cell: object) -> str:
    """Of a markdown table: on one line, and neither a tag, a link nor the end of the cell."""
    text = " ".join(str(cell).split()).replace("|", "\\|").replace("](", "]\\(")
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text)


def table(header: str, rows: Iterable[Iterable], rule: str = " --- ") -> str:
    """A markdown table; `header` holds the names of its columns, between |."""
    ruler = "|".join([rule] * (header.count("|") + 1))
    lines = (" | ".join(map(unmarked, row)) for row in rows)
    return "\n".join([f"| {header} |", f"|{ruler}|", *(f"| {line} |" for line in lines)])


def problems(runs: Iterable[data.Run], metric: str) -> list[list]:
    """A row per run that isn't finished or has no score by this metric."""
    rows = []
    for run in runs:
        reason = run.reason or REASONS.get(run.status, "")
        if run.status == "finished":
            if np.isfinite(run.score(metric, GAMES)):
                continue
            values = run.evaluation if metric == "evaluation" else run.returns
            reason = "no training episode" if metric == "training" else "not evaluated"
            if len(values):
                reason = "a return that is not finite"
        reached = f"{run.steps[-1]:,.0f} steps" if len(run.steps) else "nothing"
        cells = [run.env_id, run.algorithm, run.seed, run.status, reason, reached, run.budget]
        rows.append([*cells, number(run.score("training", GAMES))])
    return rows


def summary(groups: Iterable[Group]) -> list[dict]:
    """A row per group and metric, for summary.csv and the tables."""
    rows = []
    for member in groups:
        for metric in METRICS:
            scores, low, high = member.scores(metric), np.nan, np.nan
            some, several = len(scores) > 0, len(scores) > 1
            if some:
                low, high = map(float, stats.interval(stats.iqm, [scores]))
            rows.append(
                {
                    "env_id": member.env_id,
                    "algorithm": member.algorithm,
                    "budget": member.budget,
                    "metric": metric,
                    "runs": len(member.runs),
                    "seeds": len(scores),
                    "mean": scores.mean() if some else np.nan,
                    "std": np.std(scores, ddof=1) if several else np.nan,
                    "median": np.median(scores) if some else np.nan,
                    "iqm": stats.iqm(scores) if some else np.nan,
                    "iqm_low": low,
                    "iqm_high": high,
                    "note": "runs of other lengths apart" if member.mixed else "",
                }
            )
    return rows


def score_table(rows: Iterable[dict]) -> str:
    cells = []
    for row in rows:
        names = [row[name] for name in ("env_id", "algorithm", "budget")]
        numbers = [number(row[name]) for name in ("mean", "std", "median", "iqm")]
        ends = between(row["iqm_low"], row["iqm_high"])
        cells.append([*names, f"{row['seeds']} of {row['runs']}", *numbers, ends, row["note"]])
    header = "environment | algorithm | trained for | seeds | mean | std | median | IQM "
    return table(header + "| 95 % interval | note", cells)


def normalised(members: list[Group], metric: str, scales: dict[str, Scale]) -> list[np.ndarray]:
    """[seeds] of each environment."""
    scores = []
    for member in members:
        scale = scales[member.env_id]
        scores.append((member.scores(metric) - scale.low) / (scale.high - scale.low))
    return scores


def lengths(algorithms: dict[str, list[Group]]) -> str:
    """The environments where algorithms trained for different lengths, and those."""
    parts = []
    for members in zip(*algorithms.values(), strict=True):
        if len({member.budget for member in members}) > 1:
            each = ", ".join(f"{member.algorithm} {member.budget}" for member in members)
            parts.append(f"{members[0].env_id} ({each})")
    return "; ".join(parts)


def across(comparisons: list, metric: str, scales: dict[str, Scale]) -> list[str]:
    """Tables of normalised scores over environments."""
    places, aggregates, pairs = [], [], []
    statistics = (stats.iqm, stats.mean, stats.median, stats.optimality_gap)
    for k, (algorithms, env_ids) in enumerate(comparisons, 1):
        places.append([k, ", ".join(env_ids), lengths(algorithms)])
        scores = {name: normalised(own, metric, scales) for name, own in algorithms.items()}
        for name, own in scores.items():
            cells = [k, name, sum(map(len, own))]
            for statistic in statistics:
                ends = stats.interval(statistic, own)
                cells.append(f"{ratio(statistic(*own))} {between(*ends, ratio)}")
            aggregates.append(cells)
        for x, y in combinations(scores, 2):
            both = [*scores[x], *scores[y]]
            ends = between(*stats.interval(stats.improvement, both), ratio)
            pairs.append([k, x, y, ratio(stats.improvement(*both)), ends])
    blocks = [table("comparison | environments | trained for different lengths", places)]
    header = "comparison | algorithm | runs | IQM | mean | median | optimality gap"
    blocks.append(table(header, aggregates))
    if pairs:
        blocks.append(table("comparison | X | Y | P(X > Y) | 95 % interval", pairs))
    return blocks


def goal_table(groups: Iterable[Group], scales: dict[str, Scale]) -> str:
    """Steps and time to each goal: of every finished seed, and the median."""
    rows = []
    for member in groups:
        runs = [run for run in member.finished if len(run.returns)]
        scale = scales[member.env_id]
        for part in GOALS if runs else ():
            goal = scale.low + part * (scale.high - scale.low)
            cells = [member.env_id, member.algorithm, member.budget]
            cells.append(f"{number(goal)} ({100 * part:.0f} %)")
            for name, words in (("steps", "{:,.0f}".format), ("seconds", duration)):
                reached = np.array(
                    [stats.first_reach(getattr(run, name), run.returns, goal) for run in runs]
                )
                middle = stats.censored_median(reached)
                if name == "steps":
                    cells.append(f"{np.isfinite(reached).sum()} of {len(reached)}")
                cells.append("none" if middle is None else words(middle))
                cells.append("; ".join(words(x) if np.isfinite(x) else "never" for x in reached))
            rows.append(cells)
    header = "environment | algorithm | trained for | goal | seeds that reached it "
    return table(header + "| median steps | each seed | median time | each seed", rows)


def family(env_id: str) -> str:
    """An environment's name without its version: Hopper-v4 and Hopper-v3 are one family."""
    return re.sub(r"(NoFrameskip)?(-v\d+)?$", "", env_id.removeprefix("ALE/"))


def anchor_table(groups: Iterable[Group], anchors: list) -> str:
    """Our scores and others' published ones; of a published curve, the points nearest to ours.
    Empty if there are none."""
    rows, by_env = [], defaultdict(list)
    for member in groups:
        by_env[member.env_id].append(member)
    for env_id, members in by_env.items():
        series, lasts = defaultdict(list), set()
        for anchor in anchors:
            if family(anchor.env_id) == family(env_id):
                metric = anchor.metric.partition(" (")[0]
                key = (anchor.project, anchor.algorithm, anchor.env_id, metric)
                series[key].append(anchor)
        ours = []
        for member in members:
            last = [run.steps[-1] for run in member.finished if len(run.steps)]
            for metric in METRICS:
                scores = member.scores(metric)
                if not len(scores) or not last:
                    continue
                lasts.add(np.median(last))
                spread = f"{number(np.std(scores, ddof=1))} std" if len(scores) > 1 else ""
                cells = [env_id, "this report", member.algorithm, f"{np.median(last):,.0f} steps"]
                ours.append([*cells, number(scores.mean()), spread, len(scores), metric, ""])
        theirs = []
        for points in series.values():
            timed = [point for point in points if point.steps]
            nearest = [min(timed, key=lambda p: abs(np.log(p.steps / x))) for x in lasts if timed]
            for point in points if not lasts else nearest or points[-1:]:
                length = f"{point.steps:,} steps" if point.steps else f"{point.episodes:,} episodes"
                spread = f"{number(point.spread)} {point.spread_kind}"
                spread = spread if point.spread is not None else ""
                cells = [point.env_id, point.project, point.algorithm, length, number(point.score)]
                cells += [spread, point.seeds or "", point.metric, point.source]
                if cells not in theirs:
                    theirs.append(cells)
        if theirs:
            rows += ours + theirs
    header = "environment | project | algorithm | trained for | score | spread | seeds "
    return table(header + "| metric | source", rows) if rows else ""


# --- figures --------------------------------------------------------------------------------------


def styles(groups: Iterable[Group]) -> dict[str, dict]:
    """A line's look for each algorithm."""
    names = sorted({member.algorithm for member in groups})
    lines = ("-", "--", "-.", ":")
    return {
        name: {
            "color": COLOURS[k % len(COLOURS)],
            "linestyle": lines[k // len(COLOURS) % len(lines)],
        }
        for k, name in enumerate(names)
    }


def panels(n: int):
    """A figure with n axes, three in a row."""
    from matplotlib.figure import Figure

    columns = min(3, n)
    rows = -(-n // columns)
    figure = Figure(figsize=(0.4 + 4.2 * columns, 0.5 + 3.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[n:]:
        axis.set_axis_off()
    for axis in axes[:n]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[:n]


def save(figure, looks: dict[str, dict], output: Path, name: str, svg: bool = True):
    """Write the figure, with its legend below, as png and, if wanted, as svg."""
    import matplotlib
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look) for look in looks.values()]
    width = max(map(len, looks))
    columns = max(1, min(len(looks), int(figure.get_figwidth() * 9 / (width + 8))))
    look = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    for text in figure.legend(handles, looks, **look).get_texts():
        text.set_parse_math(False)
    figure.savefig(output / f"{name}.png", dpi=120)
    if not svg:
        return
    figure.set_layout_engine("none")  # it is laid out, which takes as long as drawing
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(output / f"{name}.svg", metadata={"Date": None})


def band(lines: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Of seeds' curves (x, y): a grid from where all have 20 episodes to where the first ends, the
    IQM on it and the ends of its interval, each [POINTS]."""
    start = max(x[min(len(x), 20) - 1] for x, _ in lines)
    grid = np.linspace(start, max(start, min(x[-1] for x, _ in lines)), POINTS)
    values = [y[np.searchsorted(x, grid, side="right") - 1] for x, y in lines]
    return grid, *stats.curve(np.stack(values, axis=1))


def plot_curves(axes, groups: list[Group], by: Literal["steps", "hours"], looks: dict):
    """Learning curves, an environment on each of the axes, in the order of the groups; `looks` of
    each algorithm's lines."""
    from matplotlib.ticker import EngFormatter

    for env_id, axis in zip(dict.fromkeys(member.env_id for member in groups), axes, strict=True):
        own = [member for member in groups if member.env_id == env_id]
        times = [run.seconds[-1] for member in own for run in member.runs if len(run.seconds)]
        hours = max(times, default=0) >= 3600
        unit = 3600 if hours else 60
        for member in own:
            look = looks[member.algorithm]
            seeds = [run for run in member.runs if len(run.returns)]
            ends = [run.steps if by == "steps" else run.seconds / unit for run in seeds]
            means = [stats.running_mean(run.returns) for run in seeds]
            lines = list(zip(ends, means, strict=True))
            done = [
                line for run, line in zip(seeds, lines, strict=True) if run.status == "finished"
            ]
            few = len(done) < 3
            for run, (x, y) in zip(seeds, lines, strict=True):
                if few or run.status != "finished":
                    some = np.linspace(0, len(x) - 1, min(len(x), 2 * POINTS)).astype(int)
                    axis.plot(x[some], y[some], **look, linewidth=0.8, alpha=0.7)
            if few:
                continue
            grid, middle, low, high = band(done)
            axis.plot(grid, middle, **look, linewidth=1.8)
            axis.fill_between(grid, low, high, color=look["color"], alpha=0.18, linewidth=0)
        axis.set_title(env_id, parse_math=False)
        axis.set_xlim(left=0)
        if by == "steps":
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.set_xlabel("environment steps")
        else:
            axis.set_xlabel(f"{'hours' if hours else 'minutes'} of training")
    for axis in axes[::3]:
        axis.set_ylabel(f"return, mean of {GAMES} episodes")


def draw_curves(groups: list[Group], by: Literal["steps", "hours"], output: Path, name: str):
    """A figure of learning curves."""
    figure, axes = panels(len({member.env_id for member in groups}))
    looks = styles(groups)
    plot_curves(axes, groups, by, looks)
    save(figure, looks, output, name)


def plot_profile(axis, algorithms: dict, metric: str, scales: dict, looks: dict):
    """Performance profiles of {algorithm: its groups}."""
    scores = {name: normalised(own, metric, scales) for name, own in algorithms.items()}
    every = np.concatenate([x for own in scores.values() for x in own])
    taus = np.linspace(min(0.0, every.min()), max(1.0, every.max()), POINTS + 1)
    for name, own in scores.items():
        fraction, low, high = stats.profile(own, taus)
        axis.step(taus, fraction, **looks[name], linewidth=1.8, where="post")
        colour = looks[name]["color"]
        axis.fill_between(taus, low, high, color=colour, alpha=0.18, linewidth=0, step="post")
    axis.set(xlabel="normalised score τ", ylim=(-0.02, 1.02))


def draw_profiles(comparisons: list, metric: str, scales: dict, looks: dict, output: Path):
    """A figure of performance profiles, a comparison in each panel."""
    figure, axes = panels(len(comparisons))
    for k, ((algorithms, env_ids), axis) in enumerate(zip(comparisons, axes, strict=True), 1):
        plot_profile(axis, algorithms, metric, scales, looks)
        where = env_ids[0] if len(env_ids) == 1 else f"{len(env_ids)} environments"
        axis.set_title(f"{k}: {where}", parse_math=False)
    for axis in axes[::3]:
        axis.set_ylabel("fraction of runs above τ")
    shown = {name for algorithms, _ in comparisons for name in algorithms}
    save(figure, {name: look for name, look in looks.items() if name in shown}, output, "profiles")


# --- files ----------------------------------------------------------------------------------------


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto;
       padding: 0 1em }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums;
        display: block; overflow-x: auto; margin: 1.2em 0 }
th, td { padding: 3px 10px; text-align: left; vertical-align: top;
         border-bottom: 1px solid #e4e4e4 }
thead th { border-bottom: 2px solid #888; white-space: nowrap }
img { max-width: 100% }
"""


def webpage(text: str, output: Path) -> str:
    """A markdown page as one that needs nothing else: the figures are in it."""
    from markdown_it import MarkdownIt

    def image(found: re.Match) -> str:
        drawing = (output / f"{found[1]}.svg").read_bytes()
        return f'src="data:image/svg+xml;base64,{base64.b64encode(drawing).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'src="(\w+)\.png"', image, body)
    head = f'<meta charset="utf-8"><title>Report</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def write_csv(path: Path, rows: list[dict]):
    def cell(value: object) -> object:
        if isinstance(value, float):
            return f"{value:.6g}" if np.isfinite(value) else ""
        formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@")
        return f"'{value}" if formula else value  # for those who open it in a spreadsheet

    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows({key: cell(value) for key, value in row.items()} for row in rows)


def run_row(run: data.Run) -> dict:
    return {
        "env_id": run.env_id,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "status": run.status,
        "reason": run.reason,
        "steps": int(run.steps[-1]) if len(run.steps) else 0,
        "budget": run.budget,
        "hours": run.hours,
        "training": run.score("training", GAMES),
        "evaluation": run.score("evaluation", GAMES),
        "commit": run.commit,
        "cpu": run.cpu,
        "gpu": run.gpu,
    }


def choose(runs: list[data.Run], name: str, wanted: tuple[str, ...]) -> list[data.Run]:
    """The runs whose field `name` is among those wanted; all of them if none are named."""
    if not wanted:
        return runs
    there = sorted({getattr(run, name) for run in runs})
    for value in wanted:
        if value not in there:
            refuse(f"no run of {value}; there are {', '.join(there)}")
    return [run for run in runs if getattr(run, name) in wanted]


CURVES = """IQM over finished seeds, as far as all of them got, with a pointwise 95 % interval;
thin: single seeds where fewer than three are finished, and runs that are not."""
GOAL = f"""When the mean of the last {GAMES} training episodes, of at least 20, first reached a
goal on the normalised scale. A seed that never did counts as later than all others; the median is
none if half of them or more never did. Time is of training on the machine named in runs.csv."""
OTHERS = """Published by others, with their metrics, versions and numbers of seeds; part of no
statistic here. Ours are means over seeds. Of a published curve, the points nearest to our numbers
of steps."""
COVERED = (f"{100 * p:.0f} % ({seeds} x {envs})" for (seeds, envs), p in stats.COVERAGE.items())
METHOD = f"""IQM: interquartile mean, the mean without the lowest and highest quarter of runs,
rounded down to whole runs (Agarwal et al., 2021). Over environments it pools all runs; environments
weigh the same in it, as in mean, median and optimality gap (to 1). P(X > Y): the probability that a
run of X scores above one of Y, ties counted half, mean over environments. Intervals: percentile
bootstrap over seeds, stratified by environment; of normal scores, a 95 % interval of the IQM covers
the truth in (seeds x environments) {", ".join(COVERED)}. A single seed has no interval; one from 1
to 1 says that all runs of X beat all of Y, not that it is certain."""


def figure(name: str, caption: str) -> str:
    return f"![{name}]({name}.png)\n\n{caption}"


def report(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    output: Path,
    metric: Metric = "training",
    algorithms: tuple[str, ...] = (),
    env_ids: tuple[str, ...] = (),
    scales: Path = data.SCALES,
    anchors: Path = data.ANCHORS,
):
    """Write report.md, index.html (one page that opens offline), runs.csv, summary.csv and figures.

    Ends with exit code 1, after everything is written, if a run can't be read, is not finished or
    has no score.

    Args:
        folders: where runs are: folders of `run`, run folders, committed results.
        output: a folder for what is written, made if it isn't there.
        metric: what is compared over environments; both are in the tables.
        algorithms: only these, as a report names them (default: all).
        env_ids: only these environments (default: all).
        scales: a table of env_id, low, high, source: the returns that count as 0 and as 1.
        anchors: a table of others' published scores, shown beside.
    """
    runs = choose(choose(read(folders), "env_id", env_ids), "algorithm", algorithms)
    groups = group(runs)
    if not groups:
        refuse(f"no run that can be read: {runs[0].reason}")
    known = data.read_scales(scales)
    observations = sorted({member.env_id for member in groups} - known.keys())
    ends, training_ends = dict(known), dict(known)  # of the scales
    for env_id in observations:
        own = [member for member in groups if member.env_id == env_id]
        ends[env_id], training_ends[env_id] = observed(own, metric), observed(own, "training")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--output {output}: {error.strerror}")
    bad, rows = problems(runs, metric), summary(groups)
    looks, comparisons = styles(groups), compared(groups, metric)
    done = sum(run.status == "finished" for run in runs)
    parts = [f"# Report on {len(runs)} runs"]
    parts.append(f"{done} of {len(runs)} runs are finished. Statistics are of these alone.")
    if bad:
        header = "environment | algorithm | seed | status | reason | reached | to train for "
        parts.append(f"## Not in the statistics: {len(bad)} runs")
        parts.append(table(header + "| training return so far", bad))
    for name, words in METRICS.items():
        own = [row for row in rows if row["metric"] == name]
        if any(row["seeds"] for row in own):
            parts += [f"## Scores: {name}", f"Of each run: {words}. Over seeds:", score_table(own)]
    parts.append("## Learning curves")
    for by in ("steps", "hours"):
        draw_curves(groups, by, output, f"curves_{by}")
        parts.append(figure(f"curves_{by}", CURVES))
    parts.append(f"## Over environments: {metric}")
    mixed = sorted({f"{m.algorithm} on {m.env_id}" for m in groups if m.mixed})
    left_out = f" Left out, for runs of different lengths: {', '.join(mixed)}." * bool(mixed)
    words = "Nothing to compare: no environment has finished runs of two algorithms."
    if comparisons:
        words = "Scores are normalised: 0 and 1 are the ends of the scales below."
        if len({member.algorithm for member in groups}) > len(comparisons[0][0]):
            words += " No environment has finished runs of all algorithms: each pair is compared."
    parts.append(unmarked(words + left_out))
    if comparisons:
        parts += across(comparisons, metric, ends)
        draw_profiles(comparisons, metric, ends, looks, output)
        parts.append(figure("profiles", "Performance profiles, with pointwise 95 % intervals."))
    parts += ["## Steps and time to a score", GOAL, goal_table(groups, training_ends)]
    if beside := anchor_table(groups, data.read_anchors(anchors)):
        parts += ["## Beside others' published scores", OTHERS, beside]
    parts.append("## Scales")
    if observations:
        words = f"No scale is known for {', '.join(observations)}: the worst and the best of these "
        parts.append(unmarked(words + "runs stand in, which says nothing beyond them."))
    shown = [(env_id, ends[env_id]) for env_id in sorted({member.env_id for member in groups})]
    cells = [[env_id, number(end.low), number(end.high), end.source] for env_id, end in shown]
    parts.append(table("environment | 0 | 1 | source", cells))
    parts += ["## How the numbers are made", METHOD]
    write_csv(output / "runs.csv", [run_row(run) for run in runs])
    write_csv(output / "summary.csv", rows)
    page = "\n\n".join(parts) + "\n"
    (output / "report.md").write_text(page)
    (output / "index.html").write_text(webpage(page, output))
    print(f"{len(runs)} runs: {output / 'index.html'}")
    if bad:
        print(f"{len(bad)} of {len(runs)} runs have no score, see the report", file=sys.stderr)
        raise SystemExit(1)
