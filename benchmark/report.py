"""python -m benchmark report: tables, figures and one page about the runs in some folders."""

import base64
import csv
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, groupby, product
from pathlib import Path
from textwrap import wrap
from typing import Literal

import numpy as np
import tyro

from benchmark import data, stats
from benchmark.data import Scale
from benchmark.programs import duration, refuse

Metric = Literal["training", "evaluation"]
GOALS = (0.5, 0.9)  # of the normalised scale
POINTS = 100  # of a learning curve
MOST = 8  # algorithms that are compared in pairs: there are as many colours
GAMES = 100  # training episodes whose mean is a training score
METRICS = {
    "training": f"mean return of the last {GAMES} training episodes",
    "evaluation": "mean return of the final policy",
}
REASONS = {"running": "cut off or still at it", "missing": "not begun"}
# Okabe and Ito's colours, which the colour-blind can tell apart, too
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#E69F00", "#000000", "#999999"),
)


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
        """Scores [seeds] of the finished runs that have one."""
        values = np.array([run.score(metric, GAMES) for run in self.finished])
        return values[np.isfinite(values)]


def group(runs: Iterable[data.Run]) -> list[Group]:
    """Groups of runs, each of one budget. An unfinished run that tells no budget joins the largest
    group. Runs that can't be read are in none."""
    by_place = defaultdict(list)
    for run in runs:
        if run.status != "unreadable":
            by_place[run.env_id, run.algorithm].append(run)
    groups = []
    for place, members in by_place.items():
        lengths = [run.budget for run in members if run.budget]
        usual = max(lengths, key=lengths.count, default="")
        by_length = defaultdict(list)
        for run in members:
            joins = run.status != "finished"
            by_length[run.budget or (usual if joins else "")].append(run)
        groups += [Group(*place, name, len(by_length) > 1, own) for name, own in by_length.items()]
    return groups


def must_have(runs: Iterable[data.Run], name: str, wanted: Iterable[str]):
    """Refuse an env_id or algorithm of which there is no run."""
    there = sorted({getattr(run, name) for run in runs})
    missing = sorted(set(wanted) - set(there))
    if missing:
        refuse(f"no run of {', '.join(missing)}; there are {', '.join(there)}")


def only(runs: Iterable[data.Run], name: str, wanted: Iterable[str]) -> list[data.Run]:
    """The runs with such an env_id or algorithm, and those that can't be read."""
    return [run for run in runs if getattr(run, name) in wanted or run.status == "unreadable"]


def observed(groups: Iterable[Group], env_id: str, metric: str) -> Scale:
    """The scale of an environment that has none: from the worst to the best of all its runs."""
    scores = np.concatenate([own.scores(metric) for own in groups if own.env_id == env_id])
    if not len(scores):
        return Scale(0.0, 1.0, "none: no finished run")
    low = scores.min()
    high = scores.max()
    return Scale(low, high if high > low else low + 1.0, "worst and best of these runs")


def compared(groups: list[Group], metric: str) -> list[tuple[dict, list[str]]]:
    """The comparisons over environments, each as ({algorithm: its groups}, environments).

    If some environments have finished runs of all algorithms, there is one comparison of all on
    these. Or else there is one for each set of algorithms that some environment has.
    """
    whole = {name: {} for name in sorted({member.algorithm for member in groups})}
    there = defaultdict(set)  # by environment
    for member in groups:
        if not member.mixed and len(member.scores(metric)):
            whole[member.algorithm][member.env_id] = member
            there[member.env_id].add(member.algorithm)

    def common(names: Iterable[str]) -> tuple[dict, list[str]]:
        env_ids = sorted(set.intersection(*(set(whole[name]) for name in names)))
        return {name: [whole[name][env_id] for env_id in env_ids] for name in names}, env_ids

    if common(whole)[1]:
        return [common(whole)]
    sets = dict.fromkeys(tuple(sorted(there[env_id])) for env_id in sorted(there))
    return [common(names) for names in sets if len(names) > 1]


# --- words and tables -----------------------------------------------------------------------------


def number(value: float | None) -> str:
    if value is None or not np.isfinite(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2
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
    """A cell of a markdown table on one line, without tags, links or an end of the cell in it."""
    text = " ".join(str(cell).split()).replace("|", "\\|").replace("](", "]\\(")
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text)


def table(header: str, rows: Iterable[Iterable], rule: str = " --- ") -> str:
    """A markdown table; `header` holds the names of its columns, between |."""
    ruler = "|".join([rule] * (header.count("|") + 1))
    lines = (" | ".join(map(unmarked, row)) for row in rows)
    return "\n".join([f"| {header} |", f"|{ruler}|", *(f"| {line} |" for line in lines)])


def run_row(run: data.Run) -> dict:
    """A run's row in runs.csv."""
    names = ("env_id", "algorithm", "seed", "status", "reason", "budget", "hours")
    row = {name: getattr(run, name) for name in names}
    row["reason"] = run.reason or REASONS.get(run.status, "")
    row["steps"] = int(run.steps[-1]) if len(run.steps) else 0
    row |= {metric: run.score(metric, GAMES) for metric in METRICS}
    return row | {name: getattr(run, name) for name in ("commit", "cpu", "gpu")}


def summary(groups: Iterable[Group]) -> list[dict]:
    """A row per group and metric, for summary.csv and the tables."""
    rows = []
    for member, metric in product(groups, METRICS):
        scores = member.scores(metric)
        row = {"env_id": member.env_id, "algorithm": member.algorithm, "budget": member.budget}
        row |= {"metric": metric, "runs": len(member.runs), "seeds": len(scores)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about no seed, and about the std of one
            row |= {"mean": np.mean(scores), "std": np.std(scores, ddof=1)}
            row |= {"median": np.median(scores), "iqm": stats.iqm(scores)}
            row["iqm_low"], row["iqm_high"] = map(float, stats.interval(stats.iqm, [scores]))
        rows.append(row | {"note": "runs of other lengths apart" if member.mixed else ""})
    return rows


def listed(rows: list[dict]) -> str:
    """Rows of a csv as a markdown table."""
    cells = ([number(x) if isinstance(x, float) else x for x in row.values()] for row in rows)
    return table(" | ".join(rows[0]), cells)


def normalised(members: list[Group], metric: str, scales: dict[str, Scale]) -> list[np.ndarray]:
    """Normalised scores [seeds] of each environment."""
    scores = []
    for member in members:
        scale = scales[member.env_id]
        scores.append((member.scores(metric) - scale.low) / (scale.high - scale.low))
    return scores


def across(comparisons: list, metric: str, scales: dict[str, Scale]) -> list[str]:
    """Tables of normalised scores over environments."""
    places = []
    aggregates = []
    pairs = []
    crowded = []
    statistics = (stats.iqm, stats.mean, stats.median, stats.optimality_gap)
    for k, (algorithms, env_ids) in enumerate(comparisons, 1):
        lengths = {member.budget for own in algorithms.values() for member in own}
        places.append([k, ", ".join(env_ids), "; ".join(sorted(lengths))])
        scores = {name: normalised(own, metric, scales) for name, own in algorithms.items()}
        for name, own in scores.items():
            cells = [k, name, sum(map(len, own))]
            for statistic in statistics:
                ends = stats.interval(statistic, own)
                cells.append(f"{ratio(statistic(*own))} {between(*ends, ratio)}")
            aggregates.append(cells)
        if len(scores) > MOST:
            crowded.append(k)
            continue
        for x, y in combinations(scores, 2):
            both = [*scores[x], *scores[y]]
            ends = between(*stats.interval(stats.improvement, both), ratio)
            pairs.append([k, x, y, ratio(stats.improvement(*both)), ends])
    blocks = [table("comparison | environments | trained for", places)]
    header = "comparison | algorithm | runs | IQM | mean | median | optimality gap"
    blocks.append(table(header, aggregates))
    if pairs:
        blocks.append(table("comparison | X | Y | P(X > Y) | 95 % interval", pairs))
    if crowded:
        which = ", ".join(map(str, crowded))
        blocks.append(f"No pairs of comparison {which}, of more than {MOST}: name some algorithms.")
    return blocks


def goal_table(groups: Iterable[Group], scales: dict[str, Scale]) -> str:
    """Steps and time to each goal: of every finished seed, and the median."""
    rows = []
    for member, part in product(groups, GOALS):
        runs = [run for run in member.finished if len(run.returns)]
        if not runs:
            continue
        scale = scales[member.env_id]
        goal = scale.low + part * (scale.high - scale.low)
        cells = [member.env_id, member.algorithm, member.budget]
        cells.append(f"{number(goal)} ({100 * part:.0f} %)")
        for name, words in (("steps", "{:,.0f}".format), ("seconds", duration)):
            at = [stats.first_reach(getattr(run, name), run.returns, goal) for run in runs]
            told = [words(x) if np.isfinite(x) else "never" for x in (np.median(at), *at)]
            cells += [told[0], "; ".join(told[1:])]
        rows.append(cells)
    header = "environment | algorithm | trained for | goal | median steps | each seed "
    return table(header + "| median time | each seed", rows)


# --- figures --------------------------------------------------------------------------------------


def styles(groups: Iterable[Group]) -> dict[str, dict]:
    """A line's look for each algorithm."""
    names = sorted({member.algorithm for member in groups})
    looks = [
        {"color": c, "linestyle": line} for line, c in product(("-", "--", "-.", ":"), COLOURS)
    ]
    return {name: looks[k % len(looks)] for k, name in enumerate(names)}


def panels(n: int):
    """A figure with n axes, three in a row."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(3, n)
    rows = -(-n // columns)
    figure = Figure(figsize=(0.3 + 4.2 * columns, 0.1 + 3.1 * rows))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[n:]:
        axis.set_axis_off()
    for axis in axes[:n]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        ticks = {"nbins": 5, "steps": (1, 2, 2.5, 5, 10)}  # few: half of the time is their texts'
        axis.xaxis.set_major_locator(MaxNLocator(**ticks))
        axis.yaxis.set_major_locator(MaxNLocator(**ticks))
    return figure, axes[:n]


def add_legend(figure, looks: dict[str, dict]):
    """Add a legend below the axes. The figure grows, so the legend covers no curve and is whole."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look) for look in looks.values()]
    width = figure.get_figwidth()
    height = figure.get_figheight()
    for columns in range(min(len(looks), 5), 0, -1):
        legend = figure.legend(handles, looks, loc="lower center", ncols=columns, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
        box = legend.get_window_extent(figure.canvas.get_renderer())
        needed = box.width / figure.dpi + 0.2
        if needed <= width or columns == 1:
            break
        legend.remove()
    below = box.height / figure.dpi
    figure.set_size_inches(max(width, needed), height + below)
    lay_out(figure, below)


def lay_out(figure, below: float):
    """Set the room around and between the axes, with `below` inches for a legend. It is enough for
    numbers of seven digits and titles of two lines. matplotlib's own layouts measure all texts,
    which takes as long as drawing them."""
    width, height = figure.get_size_inches()
    grid = figure.axes[0].get_gridspec()
    left = 0.95
    right = 0.15
    bottom = 0.6 + below
    top = 0.5
    between = 0.8  # between columns
    above = 0.95  # between rows
    inner_width = (width - left - right - between * (grid.ncols - 1)) / grid.ncols
    inner_height = (height - bottom - top - above * (grid.nrows - 1)) / grid.nrows
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom / height,
        top=1 - top / height,
        wspace=between / inner_width,
        hspace=above / inner_height,
    )


def save(figure, looks: dict[str, dict], output: Path, name: str, svg: bool = True):
    """Write the figure, with its legend below, as png and, if wanted, as svg. The canvases write
    it, because `savefig` draws everything twice for each file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.set_dpi(120)
    canvas = FigureCanvasAgg(figure)
    add_legend(figure, looks)
    canvas.print_png(output / f"{name}.png")
    if svg:
        with matplotlib.rc_context({"svg.hashsalt": name}):
            FigureCanvasSVG(figure).print_svg(output / f"{name}.svg", metadata={"Date": None})


def band(*lines: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """A grid, the IQM on it and the ends of its interval, each [POINTS], from seeds' curves (x, y)
    on each environment. The grid begins where all have 20 episodes, and ends where the first one
    ends."""
    every = [line for own in lines for line in own]
    start = max(x[min(len(x), 20) - 1] for x, _ in every)
    grid = np.linspace(start, max(start, min(x[-1] for x, _ in every)), POINTS)
    at = [[y[np.searchsorted(x, grid, side="right") - 1] for x, y in own] for own in lines]
    scores = [np.stack(own, axis=1) for own in at]
    return grid, stats.iqm(*scores), *stats.interval(stats.iqm, scores, resamples=1000)


def plot_band(axis, look: dict, *lines: list[tuple[np.ndarray, np.ndarray]]):
    """Draw the IQM of such curves with its interval."""
    grid, middle, low, high = band(*lines)
    axis.plot(grid, middle, **look, linewidth=1.8)
    axis.fill_between(grid, low, high, color=look["color"], alpha=0.18, linewidth=0)


def plot_curves(axes, groups: list[Group], by: Literal["steps", "hours"], looks: dict):
    """Draw learning curves, an environment on each of the axes, in the order of the groups. `looks`
    has the style of each algorithm's lines. Thin lines are single seeds: where there are fewer than
    three, and where a run is not finished."""
    from matplotlib.ticker import EngFormatter

    each = groupby(groups, key=lambda member: member.env_id)
    for (env_id, members), axis in zip(each, axes, strict=True):
        for member in members:
            look = looks[member.algorithm]
            done = []
            few = sum(len(run.returns) > 0 for run in member.finished) < 3
            for run in member.runs:
                x = run.steps if by == "steps" else run.seconds / 3600
                y = stats.running_mean(run.returns)
                if run.status == "finished" and not few and len(y):
                    done.append((x, y))
                elif len(y):
                    some = np.linspace(0, len(x) - 1, min(len(x), 2 * POINTS)).astype(int)
                    axis.plot(x[some], y[some], **look, linewidth=0.8, alpha=0.7)
            if done:
                plot_band(axis, look, done)
        axis.set_title("\n".join(wrap(env_id, 34)), parse_math=False)
        axis.set_xlim(left=0)
        axis.set_xlabel("environment steps" if by == "steps" else "hours of training")
        if by == "steps":
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes[::3]:
        axis.set_ylabel(f"return, mean of {GAMES} episodes")


def plot_profile(axis, algorithms: dict, metric: str, scales: dict, looks: dict):
    """Draw the performance profiles of {algorithm: its groups}."""
    scores = {name: normalised(own, metric, scales) for name, own in algorithms.items()}
    every = np.concatenate([x for own in scores.values() for x in own])
    taus = np.linspace(min(0.0, every.min()), max(1.0, every.max()), POINTS + 1)
    for name, own in scores.items():
        above = [(x > taus[:, None]).astype(float) for x in own]  # environments weigh the same
        low, high = stats.interval(stats.mean, above, resamples=1000)
        axis.step(taus, stats.mean(*above), **looks[name], linewidth=1.8, where="post")
        colour = looks[name]["color"]
        axis.fill_between(taus, low, high, color=colour, alpha=0.18, linewidth=0, step="post")
    axis.set(xlabel="normalised score τ", ylim=(-0.02, 1.02))


# --- files ----------------------------------------------------------------------------------------


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 16px }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: 3px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd }
img { max-width: 100% }
td:not(:last-child) { white-space: nowrap }
p { overflow-x: auto }
@media (max-width: 700px) { img { max-width: none; width: 640px } }
"""


def webpage(text: str, output: Path) -> str:
    """A markdown page as HTML that needs no other file: the figures are in it."""
    from markdown_it import MarkdownIt

    def image(found: re.Match) -> str:
        drawing = (output / f"{found[1]}.svg").read_bytes()
        return f'src="data:image/svg+xml;base64,{base64.b64encode(drawing).decode()}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub(r'src="(\w+)\.png"', image, body)
    head = '<meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>Report</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def write_csv(path: Path, rows: list[dict]):
    def cell(value: object) -> object:
        if isinstance(value, float):
            return f"{value:.6g}" if np.isfinite(value) else ""
        formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@")
        return f"'{value}" if formula else value  # for those who open it in a spreadsheet

    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows({key: cell(value) for key, value in row.items()} for row in rows)


CURVES = """Thick lines are the IQM over finished seeds, as far as all of them got, with a pointwise
95 % interval. Thin lines are single seeds: where fewer than three are finished, and runs that are
not."""
GOAL = f"""This is when the mean of the last {GAMES} training episodes, or of at least 20, first
reached a goal on the normalised scale. A seed that never did counts as later than all others. Time
is that of training, on the machine named in runs.csv."""
SCALES = """Where no scale is known, the worst and the best of these runs are its ends. Such a scale
says nothing beyond these runs."""
COVERED = (f"{100 * p:.0f} % ({seeds} x {envs})" for (seeds, envs), p in stats.COVERAGE.items())
METHOD = f"""IQM is the interquartile mean: the mean without the lowest and highest quarter of runs,
rounded down to whole runs (Agarwal et al., 2021). Over environments it pools all runs. Environments
weigh the same in it, as in mean, median and optimality gap (to 1). P(X > Y) is the probability that
a run of X scores above one of Y, as a mean over environments; ties count half. Intervals are those
of a percentile bootstrap over seeds, stratified by environment. With normal scores, a 95 % interval
of the IQM covers the truth in (seeds x environments) {", ".join(COVERED)}. A single seed has no
interval. An interval from 1 to 1 says that all runs of X beat all of Y, not that it is certain."""


def report(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    output: Path,
    metric: Metric = "training",
    algorithms: tuple[str, ...] = (),
    env_ids: tuple[str, ...] = (),
    scales: Path = data.SCALES,
):
    """Write report.md, index.html (one page that opens offline), runs.csv, summary.csv and figures.

    The exit code is 1 if a run can't be read, is not finished or has no score. Everything is
    written before.

    Args:
        folders: folders with runs: those of `run`, run folders, committed results.
        output: folder for the report, made if it isn't there.
        metric: score that is compared over environments; the tables have both.
        algorithms: algorithms to report, as a report names them (default: all).
        env_ids: environments to report (default: all).
        scales: table of env_id, low, high, source: the returns that count as 0 and as 1.
    """
    runs = data.find(folders)
    for name, wanted in (("env_id", env_ids), ("algorithm", algorithms)):
        if wanted:
            must_have(runs, name, wanted)
            runs = only(runs, name, wanted)
    groups = group(runs)
    if not groups:
        refuse(f"no run that can be read: {runs[0].reason}")
    known = data.read_scales(scales)
    shown = sorted({member.env_id for member in groups})
    ends = {name: known.get(name) or observed(groups, name, metric) for name in shown}
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--output {output}: {error.strerror}")
    rows = [run_row(run) for run in runs]
    scores = summary(groups)
    bad = [row for row in rows if row["status"] != "finished" or not np.isfinite(row[metric])]
    looks = styles(groups)
    comparisons = compared(groups, metric)
    done = sum(run.status == "finished" for run in runs)
    parts = [f"# Report on {len(runs)} runs"]
    parts.append(f"{done} of {len(runs)} runs are finished. Statistics are of these alone.")
    if bad:
        why = f"Not finished, or without a finite {metric} score."
        parts += [f"## Not in the statistics: {len(bad)} runs", why, listed(bad)]
    for name, words in METRICS.items():
        own = [row for row in scores if row["metric"] == name]
        if any(row["seeds"] for row in own):
            parts += [f"## Scores: {name}", f"Of each run: {words}. Over seeds:", listed(own)]
    parts.append("## Learning curves")
    for by in ("steps", "hours"):
        figure, axes = panels(len(shown))
        plot_curves(axes, groups, by, looks)
        save(figure, looks, output, f"curves_{by}")
        parts.append(f"![curves_{by}](curves_{by}.png)\n\n{CURVES}")
    parts.append(f"## Over environments: {metric}")
    if mixed := sorted({f"{m.algorithm} on {m.env_id}" for m in groups if m.mixed}):
        parts.append(unmarked(f"Left out, for runs of different lengths: {', '.join(mixed)}."))
    if comparisons:
        parts.append("Scores are normalised: 0 and 1 are the ends of the scales below.")
        parts += across(comparisons, metric, ends)
        figure, axes = panels(len(comparisons))
        for k, ((algorithms, _), axis) in enumerate(zip(comparisons, axes, strict=True), 1):
            plot_profile(axis, algorithms, metric, ends, looks)
            axis.set(title=f"comparison {k}", ylabel="fraction of runs above τ")
        save(figure, looks, output, "profiles")
        parts.append("![profiles](profiles.png)\n\nProfiles, with pointwise 95 % intervals.")
    else:
        parts.append("Nothing to compare: no environment has finished runs of two algorithms.")
    parts += ["## Steps and time to a score", GOAL, goal_table(groups, ends)]
    parts += ["## Scales", SCALES]
    cells = [[name, number(end.low), number(end.high), end.source] for name, end in ends.items()]
    parts.append(table("environment | 0 | 1 | source", cells))
    parts += ["## How the numbers are made", METHOD]
    write_csv(output / "runs.csv", rows)
    write_csv(output / "summary.csv", scores)
    page = "\n\n".join(parts) + "\n"
    (output / "report.md").write_text(page, encoding="utf-8")
    (output / "index.html").write_text(webpage(page, output), encoding="utf-8")
    print(f"{len(runs)} runs: {output / 'index.html'}")
    for run in runs:
        if run.status == "unreadable":
            print(f"left out, as it can't be read: {run.reason}")
    if bad:
        print(f"{len(bad)} of {len(runs)} runs have no score, see the report", file=sys.stderr)
        raise SystemExit(1)
