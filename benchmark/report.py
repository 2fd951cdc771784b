"""python -m benchmark report: a verdict, tables, figures and one page about the runs in folders."""

import base64
import csv
import re
import sys
from collections.abc import Callable, Iterable
from itertools import cycle, groupby, product
from pathlib import Path
from textwrap import wrap
from typing import Literal

import numpy as np
import tyro

from benchmark import data, stats
from benchmark.compare import ENOUGH, LEVEL, in_words, judge
from benchmark.data import GAMES, Group, Metric, Scale, group, only
from benchmark.programs import duration, number, refuse

POINTS = 100  # of a learning curve
WIDTH = 12.9  # inches of a figure
UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
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


def observed(groups: Iterable[Group], env_id: str, metric: str) -> Scale:
    """The scale of an environment that has none: from the worst to the best of all its runs."""
    scores = np.concatenate([own.scores(metric) for own in groups if own.env_id == env_id])
    low, high = (min(scores), max(scores)) if len(scores) else (0.0, 1.0)
    return Scale(low, high if high > low else low + 1.0, "worst and best of these runs")


def compared(groups: list[Group], metric: str) -> tuple[dict, list[str]]:
    """({algorithm: its groups}, environments) on the environments that have finished runs of all
    algorithms, each of one length."""
    whole = {name: {} for name in sorted({member.algorithm for member in groups})}
    for member in groups:
        if not member.mixed and len(member.scores(metric)):
            whole[member.algorithm][member.env_id] = member
    env_ids = sorted(set.intersection(*map(set, whole.values())))
    return {name: [own[env_id] for env_id in env_ids] for name, own in whole.items()}, env_ids


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
    """A cell of a markdown table on one line, without an end of the cell in it."""
    return " ".join(str(cell).split()).replace("|", "\\|")


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
        if not len(scores):
            continue
        notes = ["runs of other lengths apart"] if member.mixed else []
        if 1 < len(scores) < ENOUGH:
            notes.append(f"{len(scores)} seeds: too narrow an interval")
        row = {"env_id": member.env_id, "algorithm": member.algorithm, "budget": member.budget}
        row |= {"metric": metric, "runs": len(member.runs), "seeds": len(scores)}
        row |= {"mean": np.mean(scores), "median": np.median(scores)}
        row["std"] = np.std(scores, ddof=1) if len(scores) > 1 else np.nan
        row["iqm"] = stats.iqm(scores)
        row["iqm_low"], row["iqm_high"] = map(float, stats.interval(stats.iqm, [scores]))
        rows.append(row | {"note": ", ".join(notes)})
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


def across(algorithms: dict, metric: str, scales: dict[str, Scale]) -> str:
    """A table of normalised scores over environments."""
    rows = []
    for name, own in algorithms.items():
        scores = normalised(own, metric, scales)
        cells = [name, sum(map(len, scores))]
        for statistic in (stats.iqm, stats.mean):
            ends = stats.interval(statistic, scores)
            cells.append(f"{ratio(statistic(*scores))} {between(*ends, ratio)}")
        rows.append(cells)
    return table("algorithm | runs | IQM | mean", rows)


def holm(p: list[float]) -> np.ndarray:
    """p-values of several tests, corrected for their number (Holm, 1979)."""
    order = np.argsort(p)
    times = np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1, np.maximum.accumulate(np.array(p)[order] * times))
    return corrected


def verdict(algorithms: dict, env_ids: list[str], metric: str, scales: dict) -> list[str]:
    """Sentences on {algorithm: its groups}: which is ahead of each other, by how much, and with
    what certainty."""
    scores = {name: [member.scores(metric) for member in own] for name, own in algorithms.items()}
    what = f"{metric} return on {env_ids[0]}, IQM"
    middle = {name: stats.iqm(*own) for name, own in scores.items()}
    if len(env_ids) > 1:
        what = f"normalised {metric} return over {len(env_ids)} environments, IQM"
        for name, own in algorithms.items():
            middle[name] = stats.iqm(*normalised(own, metric, scales))
    best, *others = sorted(middle, key=middle.get, reverse=True)
    judged = [judge(scores[name], scores[best]) for name in others]
    corrected = holm([judgement.p for judgement in judged])
    lines = []
    for name, p, judgement in zip(others, corrected, judged, strict=True):
        if p >= LEVEL:
            judgement = judgement._replace(verdict="no evidence")
        words, why = in_words(scores[name], scores[best], judgement._replace(p=p))
        head = {
            "improved": f"{best} is ahead of {name}",
            "too few seeds to tell": f"Too few seeds to tell {best} from {name}",
        }.get(words, f"No evidence that {best} is ahead of {name}")
        sides = f"{what} {number(middle[best])} against {number(middle[name])}"
        chance = f"P({best} > {name}) = {judgement.probability:.2f}"
        lines.append(unmarked(f"* **{head}**: {sides}; {chance}, {why}."))
    if len(others) > 1:
        lines.append(f"\nEach p is corrected for {len(others)} comparisons (Holm).")
    return lines


def styles(groups: Iterable[Group]) -> dict[str, dict]:
    """A line's look for each algorithm."""
    names = sorted({member.algorithm for member in groups})
    looks = cycle(product(("-", "--", "-.", ":"), COLOURS))
    return {name: {"color": c, "linestyle": s} for name, (s, c) in zip(names, looks, strict=False)}


def panels(n: int):
    """A figure with n axes, at most three in a row."""
    from matplotlib.figure import Figure

    columns = min(3, n)
    rows = -(-n // columns)
    height = 0.1 + rows * min(4.5, 0.74 * WIDTH / columns)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[n:]:
        axis.set_axis_off()
    for axis in axes[:n]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.locator_params(nbins=5)
    return figure, axes[:n]


def save(figure, looks: dict[str, dict], output: Path, name: str, svg: bool = True):
    """Write the figure, with a legend below it, as png and, if wanted, as svg."""
    import matplotlib
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look) for look in looks.values()]
    columns = max(1, 150 // (8 + max(map(len, looks))))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    for text in figure.legend(handles, looks, **place).get_texts():
        text.set_parse_math(False)
    figure.savefig(output / f"{name}.png", dpi=120)
    if svg:
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(output / f"{name}.svg", metadata={"Date": None})


def band(*lines: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """A grid, the IQM on it and the ends of its interval, each [POINTS], from seeds' curves (x, y)
    on each environment: from where all have 20 episodes to where the first one ends."""
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


def plot_curves(axes, groups: list[Group], by: Literal["steps", "time"], looks: dict):
    """Draw learning curves, an environment on each of the axes, in the order of the groups. Thin
    lines are single seeds: where there are fewer than three, and where a run is not finished."""
    from matplotlib.ticker import EngFormatter

    longest = max(max(run.seconds[-1:], default=0) for own in groups for run in own.runs)
    unit, size = next(unit for unit in UNITS if longest >= 2 * unit[1] or unit[1] == 1)
    each = groupby(groups, key=lambda member: member.env_id)
    for (env_id, members), axis in zip(each, axes, strict=True):
        for member in members:
            look = looks[member.algorithm]
            done = []
            few = sum(len(run.returns) > 0 for run in member.finished) < 3
            for run in member.runs:
                x = run.steps if by == "steps" else run.seconds / size
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
        axis.set_xlabel("environment steps" if by == "steps" else f"{unit} of training")
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
        axis.fill_between(
            taus, low, high, color=looks[name]["color"], alpha=0.18, lw=0, step="post"
        )
    axis.set(xlabel="normalised score τ", ylim=(-0.02, 1.02))


HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Report</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 16px }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: 3px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd }
td { white-space: nowrap }
p { overflow-x: auto }
img { width: 100%; min-width: 640px }
</style></head>
<body>
"""


def webpage(text: str, output: Path) -> str:
    """A markdown page as HTML that needs no other file: the figures are in it."""
    from markdown_it import MarkdownIt

    def image(found: re.Match) -> str:
        drawing = base64.b64encode((output / f"{found[1]}.svg").read_bytes()).decode()
        return f'src="data:image/svg+xml;base64,{drawing}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return HEAD + re.sub(r'src="(\w+)\.png"', image, body) + "</body></html>\n"


def write_csv(path: Path, rows: list[dict]):
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(rows[0])
        for row in rows:
            table.writerow(
                f"{x:.6g}".replace("nan", "") if isinstance(x, float) else x for x in row.values()
            )


CURVES = f"""Thick lines are the IQM over finished seeds, as far as all of them got, with a
pointwise 95 % interval, which is too narrow for fewer than {ENOUGH} seeds. Thin lines are single
seeds: where fewer than three are finished, and runs that are not."""
PROFILES = "Scores are normalised: 0 and 1 are the ends of the scales. Bands are 95 % intervals."
COVERED = (f"{100 * p:.0f} % ({seeds} x {envs})" for (seeds, envs), p in stats.COVERAGE.items())
METHOD = f"""IQM is the interquartile mean: the mean without the lowest and highest quarter of runs,
rounded down to whole runs (Agarwal et al., 2021). Over environments it pools all runs; environments
weigh the same. P(X > Y) is the probability that a run of X scores above one of Y, as a mean over
environments; ties count half. p is that of a permutation test of P = 1/2, labels permuted within
environments. Intervals are those of a percentile bootstrap over seeds, stratified by environment.
With normal scores, a 95 % interval of the IQM covers the truth in (seeds x environments)
{", ".join(COVERED)}."""


def report(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    output: Path,
    metric: Metric = "training",
    algorithms: tuple[str, ...] = (),
    env_ids: tuple[str, ...] = (),
    scales: Path = data.SCALES,
):
    """Write report.md, index.html (one page that opens offline), runs.csv, summary.csv and figures.
    The exit code is 1 if a run can't be read, is not finished or has no score.

    Args:
        folders: folders with runs: those of `run`, run folders, committed results.
        output: folder for the report, made if it isn't there.
        metric: score that is compared over environments; the tables have both.
        algorithms: algorithms to report, as a report names them (default: all).
        env_ids: environments to report (default: all).
        scales: table of env_id, low, high, source: the returns that count as 0 and as 1.
    """
    runs = only(only(data.find(folders), "env_id", env_ids), "algorithm", algorithms)
    groups = group(runs)
    if not groups:
        refuse(f"no run that can be read: {runs[0].reason}")
    known = data.read_scales(scales)
    shown = sorted({member.env_id for member in groups})
    ends = {name: known.get(name) or observed(groups, name, metric) for name in shown}
    output.mkdir(parents=True, exist_ok=True)
    rows = [run_row(run) for run in runs]
    bad = [row for row in rows if row["status"] != "finished" or not np.isfinite(row[metric])]
    looks = styles(groups)
    algorithms, shared = compared(groups, metric)
    done = sum(run.status == "finished" for run in runs)
    parts = [f"# Report on {len(runs)} runs", "## Verdict"]
    if len(algorithms) > 1 and shared:
        parts.append("\n".join(verdict(algorithms, shared, metric, ends)))
    else:
        parts.append("Nothing to compare: no environment has finished runs of all algorithms.")
    if apart := sorted(set(shown) - set(shared)):
        names = unmarked(", ".join(apart))
        parts.append(f"Not compared, for want of runs of one length of all algorithms: {names}.")
    parts.append(f"{done} of {len(runs)} runs are finished. Statistics are of these alone.")
    if bad:
        why = f"Not finished, or without a finite {metric} score."
        told = [row | {"hours": duration(3600 * row["hours"])} for row in bad]
        parts += [f"## Not in the statistics: {len(bad)} runs", why, listed(told)]
    scores = summary(groups)
    for name, words in METRICS.items():
        if own := [row for row in scores if row["metric"] == name]:
            parts += [f"## Scores: {name}", f"Of each run: {words}. Over seeds:", listed(own)]
    parts += ["## Learning curves", CURVES]
    for by in ("steps", "time"):
        figure, axes = panels(len(shown))
        plot_curves(axes, groups, by, looks)
        save(figure, looks, output, f"curves_{by}")
        parts.append(f"![curves_{by}](curves_{by}.png)")
    if shared:
        parts += [f"## Over environments: {metric}", across(algorithms, metric, ends)]
        figure, (axis,) = panels(1)
        plot_profile(axis, algorithms, metric, ends, looks)
        axis.set(ylabel="fraction of runs above τ")
        save(figure, looks, output, "profiles")
        parts.append(f"![profiles](profiles.png)\n\n{PROFILES}")
    cells = [[name, number(end.low), number(end.high), end.source] for name, end in ends.items()]
    parts += ["## Scales", table("environment | 0 | 1 | source", cells)]
    parts += ["## How the numbers are made", METHOD]
    write_csv(output / "runs.csv", rows)
    if scores:
        write_csv(output / "summary.csv", scores)
    page = "\n\n".join(parts) + "\n"
    (output / "report.md").write_text(page, encoding="utf-8")
    (output / "index.html").write_text(webpage(page, output), encoding="utf-8")
    print(f"{len(runs)} runs: {output / 'index.html'}")
    if bad:
        print(f"{len(bad)} of {len(runs)} runs have no score, see the report", file=sys.stderr)
        raise SystemExit(1)
