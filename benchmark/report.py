"""python -m benchmark report: tables, figures and one page about the runs in some folders."""

import base64
import csv
import html
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import tyro

from benchmark import data, stats

Metric = Literal["training", "evaluation"]
GOALS = (0.5, 0.9)  # of the normalised scale
POINTS = 100  # of a learning curve
GAMES = 100  # training episodes whose mean is a training score
METRICS = {
    "training": f"mean return of the last {GAMES} training episodes",
    "evaluation": "mean return of the final policy",
}
# Okabe and Ito's colours, told apart by the colour-blind too
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#E69F00", "#000000", "#999999"),
)


def refuse(message: str) -> NoReturn:
    """End on wrong input: a line on standard error, exit code 2."""
    print(f"benchmark: {message}", file=sys.stderr)
    raise SystemExit(2)


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
class Scale:
    """Scores are normalised to 0 at low and 1 at high."""

    low: float
    high: float
    source: str


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


def budget(run: data.Run) -> str:
    """How long a run was to train, in words; empty if it does not say."""
    args = run.info.get("args") or {}
    for unit, amount in (
        ("episodes", args.get("num_episodes")),
        ("steps", args.get("total_timesteps")),
    ):
        if amount:
            return f"{int(amount):,} {unit}"
    return ""


def group(runs: Iterable[data.Run]) -> list[Group]:
    """Runs of different budgets are never in one group; one that says none joins the largest, but
    not if it is finished."""
    by_place = defaultdict(list)
    for run in runs:
        by_place[run.env_id, run.algorithm].append(run)
    groups = []
    for (env_id, algorithm), members in by_place.items():
        budgets = Counter(filter(None, map(budget, members)))
        usual = budgets.most_common(1)[0][0] if budgets else ""
        by_length = defaultdict(list)
        for run in members:
            by_length[budget(run) or usual * (run.status != "finished")].append(run)
        for name, own in by_length.items():
            groups.append(Group(env_id, algorithm, name, len(by_length) > 1, own))
    return groups


def read_scales(path: Path) -> dict[str, Scale]:
    with open(path) as file:
        return {
            row["env_id"]: Scale(float(row["low"]), float(row["high"]), row["source"])
            for row in csv.DictReader(file)
        }


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


def table(header: str, rows: Iterable[Iterable]) -> tuple:
    """A block of a report; `header` holds the names of its columns, between |."""
    return "table", header.split(" | "), [[" ".join(str(c).split()) for c in row] for row in rows]


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def problems(runs: Iterable[data.Run], metric: str) -> list[list]:
    """A row per run that isn't finished or has no score by this metric."""
    rows = []
    for run in runs:
        reason = run.reason
        if run.status == "finished":
            if np.isfinite(run.score(metric, GAMES)):
                continue
            values = run.evaluation if metric == "evaluation" else run.returns
            reason = "no training episode" if metric == "training" else "not evaluated"
            if len(values):
                reason = "a return that is not finite"
        elif not reason and run.status == "running":
            reason = "cut off or still at it"
        elif not reason and run.status == "missing":
            reason = "not begun"
        reached = f"{run.steps[-1]:,.0f} steps" if len(run.steps) else "nothing"
        cells = [run.env_id, run.algorithm, run.seed, run.status, reason, reached, budget(run)]
        rows.append([*cells, number(run.score("training", GAMES))])
    return rows


def summary(groups: Iterable[Group]) -> list[dict]:
    """A row per group and metric, for summary.csv and the tables."""
    rows = []
    for member in groups:
        for metric in METRICS:
            scores = member.scores(metric)
            low, high = stats.interval(stats.iqm, [scores]) if len(scores) else (np.nan, np.nan)
            row = {
                "env_id": member.env_id,
                "algorithm": member.algorithm,
                "budget": member.budget,
                "metric": metric,
                "runs": len(member.runs),
                "seeds": len(scores),
                "mean": np.nan,
                "std": np.std(scores, ddof=1) if len(scores) > 1 else np.nan,
                "median": np.nan,
                "iqm": np.nan,
                "iqm_low": float(low),
                "iqm_high": float(high),
                "note": "runs of other lengths apart" if member.mixed else "",
            }
            if len(scores):
                row |= {"mean": scores.mean(), "median": np.median(scores)}
                row["iqm"] = stats.iqm(scores)
            rows.append(row)
    return rows


def score_table(rows: Iterable[dict]) -> tuple:
    header = "environment | algorithm | trained for | seeds | mean | std | median | IQM "
    return table(
        header + "| 95 % interval | note",
        [
            [
                row["env_id"],
                row["algorithm"],
                row["budget"],
                f"{row['seeds']} of {row['runs']}",
                *(number(row[name]) for name in ("mean", "std", "median", "iqm")),
                between(row["iqm_low"], row["iqm_high"]),
                row["note"],
            ]
            for row in rows
        ],
    )


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


def across(comparisons: list, metric: str, scales: dict[str, Scale]) -> list[tuple]:
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


def goal_table(groups: Iterable[Group], scales: dict[str, Scale]) -> tuple:
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


def anchor_table(groups: Iterable[Group], anchors: list[data.Anchor]) -> tuple:
    """Our scores and others' published ones; of a published curve, the points nearest to ours."""
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
    return table(header + "| metric | source", rows)


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


def save(figure, looks: dict[str, dict], output: Path, name: str):
    """Write the figure, with its legend below, as png and svg."""
    import matplotlib
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look) for look in looks.values()]
    width = max(map(len, looks))
    columns = max(1, min(len(looks), int(figure.get_figwidth() * 9 / (width + 8))))
    figure.legend(handles, looks, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(output / f"{name}.png", dpi=120)
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
        axis.set_title(env_id)
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
        axis.set_title(f"{k}: {where}")
    for axis in axes[::3]:
        axis.set_ylabel("fraction of runs above τ")
    shown = {name for algorithms, _ in comparisons for name in algorithms}
    save(figure, {name: look for name, look in looks.items() if name in shown}, output, "profiles")


# --- files ----------------------------------------------------------------------------------------


def markdown(blocks: Iterable[tuple]) -> str:
    parts = []
    for kind, *content in blocks:
        if kind == "table":
            header, rows = content
            rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
            lines = [header, ["---"] * len(header), *rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        elif kind == "figure":
            name, caption = content
            parts.append(f"![{name}]({name}.png)\n\n{caption}")
        else:
            parts.append({"title": "# ", "section": "## ", "text": ""}[kind] + content[0])
    return "\n\n".join(parts) + "\n"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto;
       padding: 0 1em }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc }
div { overflow-x: auto; margin: 1.2em 0 }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 3px 10px; text-align: left; vertical-align: top;
         border-bottom: 1px solid #e4e4e4 }
thead th { border-bottom: 2px solid #888; white-space: nowrap }
figure { margin: 1em 0 }
img { max-width: 100% }
"""


def webpage(blocks: Iterable[tuple], output: Path) -> str:
    """One page that needs nothing else: the figures are in it."""
    parts, title = [], ""

    def cells(tag: str, row: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>"

    for kind, *content in blocks:
        if kind == "table":
            header, rows = content
            body = "\n".join(cells("td", row) for row in rows)
            head = f"<thead>{cells('th', header)}</thead>"
            parts.append(f"<div><table>{head}\n<tbody>{body}</tbody></table></div>")
        elif kind == "figure":
            name, caption = content
            image = base64.b64encode((output / f"{name}.svg").read_bytes()).decode()
            caption = html.escape(caption)
            source = f"data:image/svg+xml;base64,{image}"
            parts.append(f'<figure><img alt="{name}" src="{source}">')
            parts.append(f"<figcaption>{caption}</figcaption></figure>")
        else:
            tag = {"title": "h1", "section": "h2", "text": "p"}[kind]
            parts.append(f"<{tag}>{html.escape(content[0])}</{tag}>")
            title = content[0] if kind == "title" else title
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def write_csv(path: Path, rows: list[dict]):
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        for row in rows:
            values = {
                key: f"{value:.6g}" if isinstance(value, float) else value
                for key, value in row.items()
            }
            table.writerow({key: "" if value == "nan" else value for key, value in values.items()})


def run_row(run: data.Run) -> dict:
    hardware = run.info.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {"cpu": hardware}
    seconds = run.info.get("wall_seconds") or (run.seconds[-1] if len(run.seconds) else np.nan)
    return {
        "env_id": run.env_id,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "status": run.status,
        "reason": run.reason,
        "steps": int(run.steps[-1]) if len(run.steps) else 0,
        "budget": budget(run),
        "hours": float(seconds) / 3600,
        "training": run.score("training", GAMES),
        "evaluation": run.score("evaluation", GAMES),
        "commit": run.info.get("git_commit") or "",
        "cpu": hardware.get("cpu") or "",
        "gpu": hardware.get("gpu") or "",
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


def published():
    """The pages and figures in benchmark/results, the tables of README.md and docs/."""
    from benchmark import curves, docs, studies

    pages = (curves.table, curves.report, curves.episodes, curves.atari)
    for make in (*pages, studies.head_to_head, studies.ablations, docs.docs):
        make()


def report(
    folders: tyro.conf.Positional[tuple[Path, ...]] = (),
    output: Path | None = None,
    metric: Metric = "training",
    algorithms: tuple[str, ...] = (),
    env_ids: tuple[str, ...] = (),
):
    """Write report.md, index.html (one page that opens offline), runs.csv, summary.csv and figures.

    Ends with exit code 1, after everything is written, if a run is not finished or has no score.
    Without folders, the pages and figures in benchmark/results and the tables of README.md and
    docs/ are made anew from the committed runs.

    Args:
        folders: where runs are: folders of `run`, run folders, committed results.
        output: a folder for what is written, made if it isn't there.
        metric: what is compared over environments; both are in the tables.
        algorithms: only these, as a report names them (default: all).
        env_ids: only these environments (default: all).
    """
    if not folders:
        if output or algorithms or env_ids:
            refuse("no folders: --output, --algorithms and --env-ids choose among their runs")
        return published()
    if output is None:
        refuse("--output: missing, a folder for what is written")
    runs = choose(choose(read(folders), "env_id", env_ids), "algorithm", algorithms)
    groups = group(runs)
    scales, observations = read_scales(data.HERE / "scales.csv"), []
    training_scales = dict(scales)
    for env_id in sorted({run.env_id for run in runs} - scales.keys()):
        own = [member for member in groups if member.env_id == env_id]
        scales[env_id] = observed(own, metric)
        training_scales[env_id] = observed(own, "training")
        observations.append(env_id)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--output {output}: {error.strerror}")
    bad, rows = problems(runs, metric), summary(groups)
    looks, comparisons = styles(groups), compared(groups, metric)
    done = sum(run.status == "finished" for run in runs)
    blocks = [("title", f"Report on {len(runs)} runs")]
    blocks.append(
        (
            "text",
            f"{done} of {len(runs)} runs are finished. Statistics are of finished runs alone.",
        )
    )
    if bad:
        header = "environment | algorithm | seed | status | reason | reached | to train for "
        blocks += [("section", f"Not in the statistics: {len(bad)} runs")]
        blocks.append(table(header + "| training return so far", bad))
    for name, words in METRICS.items():
        own = [row for row in rows if row["metric"] == name]
        if any(row["seeds"] for row in own):
            blocks.append(("section", f"Scores: {name}"))
            blocks.append(("text", f"Of each run: {words}. Over seeds:"))
            blocks.append(score_table(own))
    blocks.append(("section", "Learning curves"))
    caption = "IQM over finished seeds, as far as all of them got, with a pointwise 95 % interval; "
    caption += "thin: single seeds where fewer than three are finished, and runs that are not."
    for by in ("steps", "hours"):
        draw_curves(groups, by, output, f"curves_{by}")
        blocks.append(("figure", f"curves_{by}", caption))
    blocks.append(("section", f"Over environments: {metric}"))
    mixed = sorted({f"{m.algorithm} on {m.env_id}" for m in groups if m.mixed})
    left_out = f" Left out, for runs of different lengths: {', '.join(mixed)}." * bool(mixed)
    if comparisons:
        text = "Scores are normalised: 0 and 1 are the ends of the scales below."
        if len({member.algorithm for member in groups}) > len(comparisons[0][0]):
            text += " No environment has finished runs of all algorithms, so each pair is compared."
        text += left_out
        blocks.append(("text", text))
        blocks += across(comparisons, metric, scales)
        draw_profiles(comparisons, metric, scales, looks, output)
        caption = "Performance profiles, with pointwise 95 % intervals."
        blocks.append(("figure", "profiles", caption))
    else:
        text = "Nothing to compare: no environment has finished runs of two algorithms."
        blocks.append(("text", text + left_out))
    blocks.append(("section", "Steps and time to a score"))
    text = f"When the mean of the last {GAMES} training episodes, of at least 20, first reached a "
    text += "goal on the normalised scale. A seed that never did counts as later than all others; "
    text += "the median is none if half of them or more never did. Time is of training on the "
    blocks.append(("text", text + "machine named in runs.csv."))
    blocks.append(goal_table(groups, training_scales))
    anchors = anchor_table(groups, data.anchors())
    if anchors[2]:
        blocks.append(("section", "Beside others' published scores"))
        text = "Published by others, with their metrics, versions and numbers of seeds; part of no "
        text += "statistic here. Ours are means over seeds. Of a published curve, the points "
        blocks.append(("text", text + "nearest to our numbers of steps."))
        blocks.append(anchors)
    blocks.append(("section", "Scales"))
    if observations:
        text = f"No scale is known for {', '.join(observations)}: the worst and the best of these "
        blocks.append(("text", text + "runs stand in, which says nothing beyond them."))
    shown = sorted({run.env_id for run in runs})
    ends = [[e, number(scales[e].low), number(scales[e].high), scales[e].source] for e in shown]
    blocks.append(table("environment | 0 | 1 | source", ends))
    blocks.append(("section", "How the numbers are made"))
    measured = ", ".join(
        f"{100 * cover:.0f} % ({seeds} x {environments})"
        for (seeds, environments), cover in stats.COVERAGE.items()
    )
    blocks.append(
        (
            "text",
            "IQM: interquartile mean, the mean without the lowest and highest quarter of runs, "
            "rounded down to whole runs (Agarwal et al., 2021). Over environments it pools all "
            "runs; environments weigh the same in it, as in mean, median and optimality gap (to "
            "1). P(X > Y): the probability that a run of X scores above one of Y, ties counted "
            "half, mean over environments. Intervals: "
            "percentile bootstrap over seeds, stratified by environment; of normal scores, a 95 % "
            "interval of the IQM covers the truth in (seeds x environments) "
            f"{measured}. A single seed has no interval; one from 1 to 1 says that all runs of X "
            "beat all of Y, not that it is certain.",
        )
    )
    write_csv(output / "runs.csv", [run_row(run) for run in runs])
    write_csv(output / "summary.csv", rows)
    (output / "report.md").write_text(markdown(blocks))
    (output / "index.html").write_text(webpage(blocks, output))
    print(f"{len(runs)} runs: {output / 'index.html'}")
    if bad:
        print(f"{len(bad)} of {len(runs)} runs have no score, see the report", file=sys.stderr)
        raise SystemExit(1)
