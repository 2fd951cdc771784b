"""benchmark report and compare: statistics against slow ones, and what is written about runs."""

import base64
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from harness import ended, refused, table, write_job, write_run

from benchmark import data, stats
from benchmark.compare import compare, judge
from benchmark.published import curves, docs, tables
from benchmark.report import band, compared, group, panels, report, run_row, save

EXACT = {"rel": 0, "abs": 1e-9}
SEEDS = (3, 5, 10)  # of three environments


def ragged(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(k, 1, n).round(1) for k, n in enumerate(SEEDS)]


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", range(1, 14))
def test_iqm_sorts_and_trims_whole_runs(runs):
    x = np.random.default_rng(runs).normal(size=runs)
    kept = sorted(x)[runs // 4 : runs - runs // 4]
    assert stats.iqm(x) == pytest.approx(sum(kept) / len(kept), **EXACT)
    if runs % 3 == 0:
        assert stats.iqm(*x.reshape(3, -1)) == pytest.approx(sum(kept) / len(kept), **EXACT)


def test_iqm_weighs_environments_the_same():
    scores = ragged()
    copies = sorted(np.concatenate([np.repeat(x, 120 // len(x)) for x in scores]))
    assert stats.iqm(*scores) == pytest.approx(np.mean(copies[90:270]), **EXACT)
    stacked = [np.stack([x, x[::-1] + 1]) for x in scores]
    wanted = [stats.iqm(*scores), stats.iqm(*scores) + 1]
    assert stats.iqm(*stacked) == pytest.approx(wanted, **EXACT)
    easy, hard = np.full(5, 0.8), np.full(2, 0.2)  # the seeds that fail make no difference
    assert stats.iqm(easy, hard) == pytest.approx(stats.iqm(easy[:2], np.full(5, 0.2)), **EXACT)


def test_statistics_by_loops():
    scores = ragged()
    means = [sum(x) / len(x) for x in scores]
    gaps = [sum(max(0, 1 - value) for value in x) / len(x) for x in scores]
    assert stats.mean(*scores) == pytest.approx(sum(means) / 3, **EXACT)
    assert stats.median(*scores) == pytest.approx(sorted(means)[1], **EXACT)
    assert stats.optimality_gap(*scores) == pytest.approx(sum(gaps) / 3, **EXACT)
    others, wins = ragged(1), []
    for x, y in zip(scores, others, strict=True):
        won = [(a > b) + 0.5 * (a == b) for a, b in product(x, y)]
        assert any(w == 0.5 for w in won) or len(x) < 10  # ties are in it
        wins.append(sum(won) / len(won))
    assert stats.improvement(*scores, *others) == pytest.approx(sum(wins) / 3, **EXACT)


def test_against_rliable():
    """rliable 1.2.0 with pandas 2.3 and arch 7.2, on these scores [runs, environments]:
    get_interval_estimates with 50,000 resamples (5,000 for P), create_performance_profile."""
    rng = np.random.default_rng(0)
    x = list(rng.normal(0.6, 0.3, size=(10, 8)).round(2).T)
    y = list(rng.normal(0.5, 0.3, size=(7, 8)).round(2).T)
    golden = {
        stats.iqm: (0.629, 0.5003571428571428, 0.55975, 0.702),
        stats.mean: (0.636, 0.4932142857142857, 0.57525, 0.69625),
        stats.median: (0.641, 0.4714285714285714, 0.5565, 0.715),
        stats.optimality_gap: (0.376875, 0.5069642857142858, 0.321125, 0.434125),
    }
    for statistic, (of_x, of_y, low, high) in golden.items():
        assert statistic(*x) == pytest.approx(of_x, **EXACT)
        assert statistic(*y) == pytest.approx(of_y, **EXACT)
        assert stats.interval(statistic, x) == pytest.approx((low, high), abs=0.006)
    assert stats.improvement(*x, *y) == pytest.approx(0.6267857142857143, **EXACT)
    assert stats.interval(stats.improvement, [*x, *y]) == pytest.approx((0.5313, 0.7223), abs=0.006)
    taus = np.array([[0.0], [0.25], [0.5], [0.75], [1.0]])
    above = [(scores > taus).astype(float) for scores in x]
    low, high = stats.interval(stats.mean, above)
    assert stats.mean(*above) == pytest.approx([0.975, 0.875, 0.675, 0.3375, 0.125], **EXACT)
    assert low == pytest.approx([0.9375, 0.8, 0.575, 0.2375, 0.0625], abs=0.013)  # a run in 80
    assert high == pytest.approx([1.0, 0.9375, 0.775, 0.4375, 0.2], abs=0.013)


def test_interval_by_a_loop():
    scores, rng = ragged(), np.random.default_rng(5)
    found = [stats.iqm(*(x[rng.integers(0, len(x), len(x))] for x in scores)) for _ in range(3000)]
    low, high = stats.interval(stats.iqm, scores)
    assert (low, high) == pytest.approx(np.percentile(found, [2.5, 97.5]), abs=0.06)
    assert high - low > 0.5
    assert np.isnan(stats.interval(stats.iqm, [*scores, np.ones(1)])).all()
    assert stats.interval(stats.iqm, [np.ones(3)]) == (1, 1)


@pytest.mark.parametrize(("seeds", "environments"), stats.COVERAGE)
def test_coverage(seeds, environments):
    rng, hits, times = np.random.default_rng(seeds), 0, 600
    for k in range(times):
        scores = list(rng.normal(size=(environments, seeds)))
        low, high = stats.interval(stats.iqm, scores, resamples=400, seed=k)
        hits += low <= 0 <= high
    stated = stats.COVERAGE[seeds, environments]
    error = math.sqrt(stated * (1 - stated) / times)
    assert abs(hits / times - stated) < 3 * error + 0.01  # stated in per cent


def test_permutation_test_by_all_labels():
    rng = np.random.default_rng(3)
    x, y = list(rng.normal(0.7, 1, (2, 3)).round(1)), list(rng.normal(0, 1, (2, 3)).round(1))

    def every(a, b):
        pool = [*a, *b]
        for first in combinations(range(6), 3):
            second = [pool[k] for k in range(6) if k not in first]
            yield np.mean([(pool[i] > z) + 0.5 * (pool[i] == z) for i in first for z in second])

    distances = [abs((p + q) / 2 - 0.5) for p, q in product(every(x[0], y[0]), every(x[1], y[1]))]
    observed = abs(stats.improvement(*x, *y) - 0.5)
    p = np.mean(np.array(distances) >= observed - 1e-9)
    assert 0.02 < p < 0.9
    assert stats.permutation_test(x, y) == pytest.approx(p, **EXACT)  # all 400 of them
    assert stats.permutation_test(x, y, 399) == pytest.approx(p, abs=0.08)  # drawn at random
    apart = [np.arange(5.0)], [np.arange(5.0) + 9]  # 2 of 252 labellings
    assert stats.permutation_test(*apart, 251) == pytest.approx(2 / 252, abs=0.01)


@pytest.mark.parametrize(
    ("seeds", "least"),
    [
        ([(1, 1)], 1.0), ([(2, 2)], 1 / 3), ([(3, 3)], 0.1), ([(5, 5)], 2 / 252),
        ([(3, 5)], 2 / 56), ([(2, 2), (2, 2)], 2 / 36), ([(2, 3), (2, 2), (3, 2)], 2 / 600),
    ],
)  # fmt: skip
def test_the_least_p_that_seeds_can_give(seeds, least):
    rng = np.random.default_rng(0)
    for _ in range(40):
        x, y = ([rng.normal(size=pair[side]) for pair in seeds] for side in (0, 1))
        assert stats.permutation_test(x, y) >= least - 1e-9
    high = [np.arange(n) + 100.0 for n, _ in seeds]
    low = [np.arange(m) * 1.0 for _, m in seeds]
    assert stats.permutation_test(high, low) == pytest.approx(least, **EXACT)
    assert stats.permutation_test(low, high) == pytest.approx(least, **EXACT)
    assert stats.least_p(high, low) == pytest.approx(least, **EXACT)


@pytest.mark.parametrize("seeds", SEEDS)
def test_false_alarms(seeds):
    """Nothing has changed: a verdict in at most 5 % of cases; but not in none, which no test is."""
    rng, alarms, times = np.random.default_rng(seeds), 0, 400
    for k in range(times):
        a, b = (list(rng.normal(size=(4, seeds))) for _ in range(2))
        alarms += judge(a, b, resamples=400, seed=k).verdict != "no evidence"
    assert 0.01 < alarms / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


def test_a_verdict_takes_both_the_interval_and_the_test():
    a = [np.array([4, 6, 5, -9]), np.array([5, 1, 2, 1])]
    b = [np.array([2, 2, 1, -1, 1, 0, 2, 1, 1, 0]), np.array([1, 1, 0, 2, 1, 0, -1, 2, 1, 1])]
    by_test = judge(a, b)
    assert by_test.low < 0.5 < by_test.high
    assert by_test.p < 0.05
    by_interval = judge([np.arange(3.0)], [np.arange(3.0) + 9])  # 2 of 20 labellings
    assert by_interval.low == by_interval.high == 1
    assert by_interval.p == pytest.approx(0.1, abs=0.01)
    assert by_test.verdict == by_interval.verdict == "no evidence"


def test_seeds_needed_give_their_power():
    shift = 0.6
    probability = 0.5 * (1 + math.erf(shift / 2))  # P(N(shift, 1) > N(0, 1))
    seeds = stats.seeds_needed(probability, 4)
    assert 9 < seeds < 14
    rng = np.random.default_rng(0)
    found = []
    for k in range(200):
        x, y = (list(rng.normal(mean, 1, (4, seeds))) for mean in (shift, 0))
        found.append(judge(y, x, 400, k).verdict)
    assert 0.7 < found.count("improved") / 200 < 0.9
    assert "worse" not in found
    assert stats.seeds_needed(0.5, 4) == math.inf


def test_seeds_that_never_got_there():
    never = math.inf
    steps, returns = np.arange(1, 201) * 10, np.repeat([0.0, 1.0], 100)
    assert stats.running_mean(returns)[[0, 99, 149, 199]] == pytest.approx([0, 0, 0.5, 1])
    assert stats.first_reach(steps, returns, 0.5) == 1500
    assert stats.first_reach(steps, returns, 1.0) == 2000
    assert stats.first_reach(steps, returns, 1.1) == never
    assert stats.first_reach(steps, returns, 0.0) == 200  # of at least 20 episodes
    assert stats.first_reach(steps[:9], returns[:9], 0.0) == never
    spoilt = returns.copy()
    spoilt[[20, 30]] = np.nan, np.inf
    means = stats.running_mean(spoilt)
    assert np.isnan(means[20:130]).all()
    assert np.isfinite(means[[19, 130, 199]]).all()
    assert stats.first_reach(steps, spoilt, 0.5) == 1500


def test_learning_curves_are_of_all_seeds_at_each_point():
    steps = [np.arange(1, 101) * 10, np.arange(1, 201) * 10, np.arange(1, 51) * 30]
    grid, middle, low, high = band([(x, x + 100.0 * k) for k, x in enumerate(steps)])
    assert (grid[0], grid[-1]) == (600, 1000)
    # at 1,000 the last episode of the third ended at 990
    assert middle[-1] == pytest.approx((1000 + 1100 + 1190) / 3, **EXACT)
    assert (low[-1], high[-1]) == (1000, 1190)


def test_environments_weigh_the_same_in_a_learning_curve_of_several():
    x = np.arange(1, 101) * 10
    one, other = ([(x, np.full(100, level))] * seeds for level, seeds in ((0.0, 9), (1.0, 3)))
    _, middle, low, high = band(one, other)
    assert middle[[0, -1]] == pytest.approx([0.5, 0.5], **EXACT)  # not 3/12
    assert (low[-1], high[-1]) == pytest.approx((0.5, 0.5), **EXACT)
    later = [(x + 500, np.ones(100))] * 3
    assert band(one, later)[0][[0, -1]].tolist() == [700, 1000]


# --- report ---------------------------------------------------------------------------------------


def write_jobs(
    root: Path, env_ids: Iterable[str], script: str, levels: Iterable[float], first: int = 0, **more
):
    """Jobs of seeds from `first`, whose scores are these levels."""
    for env_id, (seed, level) in product(env_ids, enumerate(levels, first)):
        write_job(root, env_id, script, seed, level, **more)


class References(HTMLParser):
    """What a page fetches or links to."""

    def __init__(self, page: str):
        super().__init__()
        self.found, self.tags = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report of healthy runs, a failed, a cut-off and a missing one."""
    root, output = (tmp_path_factory.mktemp(name) for name in ("runs", "report"))
    levels = (100, 200, 300, 400, 450)
    for seed, level in enumerate(levels):
        write_job(root, "CartPole-v1", "ppo", seed, level, evaluation=(level + 1, level + 3))
    write_jobs(root, ["CartPole-v1"], "other", [level / 2 for level in levels])
    write_jobs(root, ["Home-v0"], "ppo", levels)
    write_jobs(root, ["Home-v0"], "other", (200, 201))
    write_job(root, "Home-v0", "other", 2, 202, steps=2000)
    write_job(root, "CartPole-v1", "ppo", 5, 999, status="running")
    write_job(root, "CartPole-v1", "ppo", 6, 999, status="running", reason="exit | code <9>")
    write_job(root, "CartPole-v1", "ppo", 7, 0, status="missing")
    ended(report, [root], output, code=1)
    return root, output


@pytest.fixture
def text(written) -> str:
    return (written[1] / "report.md").read_text()


@pytest.fixture
def page(written) -> str:
    return (written[1] / "index.html").read_text()


def test_report_numbers(written, text):
    _, output = written
    key = ("env_id", "algorithm", "metric", "budget")
    summary = {tuple(row[x] for x in key): row for row in table(output / "summary.csv")}
    row = summary["CartPole-v1", "ppo", "training", "1,000 steps"]
    assert (row["runs"], row["seeds"]) == ("8", "5")
    assert (row["mean"], row["median"], row["iqm"]) == ("290", "300", "300")
    assert 100 <= float(row["iqm_low"]) < 290 < float(row["iqm_high"]) <= 450
    assert summary["CartPole-v1", "ppo", "evaluation", "1,000 steps"]["mean"] == "292"
    assert summary["CartPole-v1", "other", "evaluation", "1,000 steps"]["seeds"] == "0"
    # trained for other lengths: not averaged
    assert summary["Home-v0", "other", "training", "1,000 steps"]["mean"] == "200.5"
    assert summary["Home-v0", "other", "training", "2,000 steps"]["mean"] == "202"
    assert "Left out, for runs of different lengths: other on Home-v0." in text
    assert "| 1 | other | ppo | 0.20 | [" in text  # CartPole alone: 5 of 25 pairs
    assert "| Home-v0 | 100.0 | 450.0 | worst and best of these runs |" in text  # its scale
    scaled = (300 - 21.6) / (500 - 21.6)
    assert f"| 1 | ppo | 5 | {scaled:.2f} [" in text
    key = ("env_id", "algorithm", "seed")
    runs = {tuple(row[x] for x in key): row for row in table(output / "runs.csv")}
    assert len(runs) == 21
    row = runs["CartPole-v1", "ppo", "0"]
    wanted = {"status": "finished", "steps": "1000", "hours": "2", "training": "100"}
    wanted |= {"evaluation": "102", "commit": "abc", "cpu": "Z80", "gpu": ""}
    assert {name: row[name] for name in wanted} == wanted


def test_report_lists_what_is_not_finished_first(text, page):
    section = text[text.index("## ") : text.index("## Scores")]
    assert section.startswith("## Not in the statistics: 3 runs")
    lines = [line for line in section.splitlines() if "| ppo |" in line]
    assert [re.split(r"(?<!\\)\|", line)[3:6] for line in lines] == [
        [" 5 ", " running ", " cut off or still at it "],
        [" 6 ", " failed ", " exit \\| code <9> "],
        [" 7 ", " missing ", " not begun "],
    ]
    assert "exit | code &lt;9&gt;" in page


def test_report_shows_seeds_that_never_got_there(text):
    half, most = (
        line for line in text.splitlines() if re.match(r"\| CartPole.* ppo .*0 %\)", line)
    )
    assert "260.8 (50 %) | " in half
    assert "never; never; " in half
    cells = [cell.strip() for cell in half.split("|")]
    assert cells[5] == cells[6].split("; ")[2]  # the median of five is the slowest of three
    assert "452.2 (90 %) | never | never; never; never; never; never | never" in most


def test_page_opens_offline(written, text, page):
    _, output = written
    references = References(page)
    assert len(references.found) == references.tags.count("img") == 3
    kind, _, image = references.found[0].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(image) == (output / "curves_steps.svg").read_bytes()
    assert all(value.startswith(kind) for value in references.found)
    assert not {"script", "link", "iframe"} & set(references.tags)
    assert "url(" not in page
    assert "@import" not in page
    for name in ("curves_steps", "curves_hours", "profiles"):
        assert f"![{name}]({name}.png)" in text
        svg = (output / f"{name}.svg").read_text()
        assert all(value[0] == "#" for value in re.findall(r'(?:href|src)="([^"]*)"', svg))
        assert (output / f"{name}.png").stat().st_size > 10_000


def test_page_is_made_for_phones_and_screens(page):
    head, _, body = page.partition("<body>")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in head
    titles = re.findall(r"<h([12])>(.*?)</h", body)
    assert [level for level, _ in titles] == ["1"] + ["2"] * (len(titles) - 1)
    names = [title.split(":")[0] for _, title in titles]
    assert names[1:] == [
        *("Not in the statistics", "Scores", "Scores", "Learning curves", "Over environments"),
        *("Steps and time to a score", "Scales", "How the numbers are made"),
    ]  # fmt: skip
    assert len(re.findall("<tr>", body)) > 20
    for block in re.findall(r"<table>.*?</table>", body, re.S):
        cells = [len(re.findall("<t[hd]", row)) for row in re.findall(r"<tr>.*?</tr>", block, re.S)]
        assert len(set(cells)) == 1


@pytest.mark.filterwarnings("error::UserWarning")  # such as that axes have no room
@pytest.mark.parametrize("environments", [1, 2, 7])
@pytest.mark.parametrize("settings", [2, 15])
def test_a_legend_lies_below_its_curves_uncut(environments, settings, tmp_path):
    figure, axes = panels(environments)
    names = [f"ppo_continuous_action a-long-name-of-a-setting-{k}" for k in range(settings)]
    for axis in axes:
        axis.plot([0, 1e6], [-1e5, 1e5])
        axis.set(title="a.module.with.a.rather:\nLongEnvironment-v0", xlabel="steps")
    for axis in axes[::3]:
        axis.set_ylabel("return")
    save(figure, {name: {"color": "C0"} for name in names}, tmp_path, "figure")
    (legend,) = figure.legends
    box = legend.get_window_extent()
    width = figure.get_figwidth() * figure.dpi
    assert 0 <= box.x0 < box.x1 <= width
    assert box.y0 >= 0
    boxes = [axis.get_tightbbox() for axis in axes]
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    for axis, texts in zip(axes, boxes, strict=True):
        assert texts.y0 >= box.y1
        assert texts.x0 >= 0
        assert texts.x1 <= width
        assert texts.y1 <= figure.get_figheight() * figure.dpi
        assert axis.get_window_extent().height > 1.5 * figure.dpi  # inches, however many settings
    assert [text.get_text() for text in legend.get_texts()] == names
    assert (tmp_path / "figure.svg").exists()


def test_at_most_a_comparison_for_each_environment(tmp_path):
    """A-v0 has one and two, B-v0 one, two and three, C-v0 four alone; D-v0 has as many as A-v0."""
    there = {"A-v0": "12", "B-v0": "123", "C-v0": "4", "D-v0": "12"}
    for env_id, names in there.items():
        for name in names:
            write_jobs(tmp_path, [env_id], f"algorithm-{name}", (100, 100))
    found = compared(group(data.find([tmp_path])), "training")
    names = [("".join(name.split("-")[1] for name in own), env_ids) for own, env_ids in found]
    assert names == [("12", ["A-v0", "B-v0", "D-v0"]), ("123", ["B-v0"])]


def test_pairs_are_compared_where_no_environment_has_all(tmp_path):
    write_jobs(tmp_path / "runs", ["A-v0", "B-v0"], "ppo", (100, 200))
    write_jobs(tmp_path / "runs", ["A-v0"], "cma", (100, 200))
    write_jobs(tmp_path / "runs", ["B-v0"], "kl", (200, 300))
    ended(report, [tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| 1 | A-v0 | 1,000 steps |" in text
    assert "| 2 | B-v0 | 1,000 steps |" in text
    assert "| 1 | cma | ppo | 0.50 | [" in text
    assert "| 2 | kl | ppo | 0.88 | [" in text  # three of four pairs are won, one is tied
    assert "## Over environments" in text
    assert "Nothing to compare" not in text


def test_report_ends(written, tmp_path):
    home, out = [written[0] / "Home-v0"], tmp_path / "out"
    write_job(tmp_path / "begun", "CartPole-v1", "ppo", 1, 0, status="missing")
    write_jobs(tmp_path / "flat", ["Flat-v0"], "ppo", (7, 7))

    assert ended(report, home, out).stderr == ""
    lost = "runs have no score, see the report\n"
    said = ended(report, home, out, metric="evaluation", code=1).stderr
    assert said == f"8 of 8 {lost}"
    assert "without a finite evaluation score" in (out / "report.md").read_text()
    assert ended(report, [tmp_path / "begun"], out, code=1).stderr == f"1 of 1 {lost}"
    assert ended(report, [tmp_path / "flat"], out).stderr == ""
    assert "| Flat-v0 | 7.00 | 8.00 |" in (out / "report.md").read_text()
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    refused("nowhere: no such folder", report, [tmp_path / "nowhere"], out)
    refused("no runs in", report, [tmp_path / "empty"], out)
    refused("a second run of", report, home * 2, out)
    refused("--output", report, home, tmp_path / "file")
    refused("no run of a2c; there are other, ppo", report, home, out, algorithms=["ppo", "a2c"])
    refused("no run of Pong; there are Home-v0", report, home, out, env_ids=["Pong"])


# --- compare --------------------------------------------------------------------------------------


def write_side(root: Path, seeds: int = 5, shift: float = 0, env_ids: tuple = ("A-v0",)) -> Path:
    """Runs of one side; their evaluations are the negative scores."""
    for env_id, seed in product(env_ids, range(seeds)):
        level = 200 + 10 * seed + shift
        write_job(root, env_id, "ppo", seed, level, evaluation=(-level,))
    return root


def test_compare_ends(tmp_path):
    two = ("A-v0", "B-v0")
    old, same, better, worse = (
        write_side(tmp_path / name, shift=shift, env_ids=two)
        for name, shift in (("old", 0), ("same", 0), ("better", 50), ("worse", -50))
    )
    done = ended(compare, old, better)
    assert done.stdout.startswith(f"A, the old: {old}\nB, the new: {better}\n")
    assert "\n  improved\n" in done.stdout
    assert re.search(r"A-v0 +5 +5 +220\.0 +270\.0 +1\.00\n", done.stdout)
    wins = "mean: P(B > A) = 1.00, 95 % interval [1.00, 1.00], permutation p = 0.000"
    assert wins in done.stdout
    done = ended(compare, old, worse, code=1)
    assert "\n  worse\n" in done.stdout
    ended(compare, old, worse, metric="evaluation")
    done = ended(compare, old, same)
    few = "no evidence; at this P a power of 80 % takes 1,000 seeds or more"
    assert few in done.stdout
    # trained for other lengths: not averaged
    write_jobs(old, ["C-v0"], "ppo", [300] * 4)
    write_jobs(worse, ["C-v0"], "ppo", [300] * 2)
    write_jobs(worse, ["C-v0"], "ppo", [300] * 2, first=2, steps=2000)
    done = ended(compare, old, worse, code=1)
    assert "one length: C-v0" in done.stdout
    assert "C-v0  " not in done.stdout
    # two algorithms of one folder
    write_jobs(better, ["A-v0"], "slow", range(1, 6))
    ended(compare, better, algorithm=("ppo", "slow"), code=1)
    done = ended(compare, better, algorithm=("slow", "ppo"))
    assert done.stdout.startswith(f"A, the old: {better}\nB, the new: {better}\n")
    assert "A slow, B ppo" in done.stdout
    assert "one length: B-v0" in done.stdout
    # a new version that breaks is not good
    write_job(better, "A-v0", "ppo", 5, 1, status="failed")
    lost = "two finished seeds of one length\n"
    said = ended(compare, old, better, code=1).stderr
    assert said == f"B lacks C-v0 ppo: {lost}B lacks A-v0 seed 5: failed\n"
    ended(compare, old, better, env_ids=two, code=1)  # for the failed one alone
    assert ended(compare, better, same, code=1).stderr == f"B lacks A-v0 slow: {lost}"


def test_compare_refuses(tmp_path):
    old = write_side(tmp_path / "old", env_ids=("A-v0", "B-v0"))
    write_job(tmp_path / "single", "A-v0", "ppo", 0, 1)
    write_job(tmp_path / "foreign", "A-v0", "dqn", 0, 1)
    refused("no environment on which both", compare, old, tmp_path / "single")
    refused("A has ppo; B has dqn", compare, old, tmp_path / "foreign")
    refused("no such folder", compare, old, tmp_path / "none")
    refused("two folders", compare, old)
    refused("A has ppo; B has ppo", compare, old, algorithm=("ppo", "dqn"))
    refused("no run of C-v0; there are A-v0, B-v0", compare, old, old, env_ids=("C-v0",))
    said = ended(compare, old, old, env_ids=("B-v0",)).stdout
    assert "B-v0" in said
    assert "A-v0" not in said


@pytest.mark.parametrize(
    "seeds, env_ids, p, least",
    [
        (3, ("A-v0",), "0.1", "0.1"),
        (4, ("A-v0",), "0.0286", None),
        (2, ("A-v0", "B-v0"), "0.0556", "0.0556"),
    ],
)
def test_compare_says_when_no_result_could_be_evidence(seeds, env_ids, p, least, tmp_path):
    a = write_side(tmp_path / "before", seeds, env_ids=env_ids)
    b = write_side(tmp_path / "after", seeds, 500, env_ids)
    said = ended(compare, a, b).stdout
    assert "P(B > A) = 1.00" in said
    assert f"permutation p = {p}\n" in said
    none = f"  with {seeds} against {seeds} seeds no result could reach p < 0.05: the smallest is "
    if least:
        assert f"{none}{least}\n" in said
    else:
        assert "\n  improved\n" in said
        assert "could reach" not in said
    if len(env_ids) == 2:
        write_job(b, "B-v0", "ppo", 2, 900)  # 60 labellings
        assert "could reach" not in ended(compare, a, b).stdout


def quoted() -> list[tuple[Path, str]]:
    """The compare commands in README.md and docs/ that read committed runs, and their pages."""
    found = []
    for page in docs.PAGES:
        text = page.read_text().replace("\\\n", " ")
        commands = re.findall(r"python -m benchmark (compare benchmark/published[^`\n]*)", text)
        found += [(page, command) for command in commands]
    return found


@pytest.mark.parametrize("page, command", quoted(), ids=lambda value: getattr(value, "stem", None))
def test_a_quoted_command_prints_what_stands_in_the_table(page, command, monkeypatch):
    monkeypatch.chdir(docs.ROOT)
    words = [sys.executable, "-m", "benchmark", *shlex.split(command)]
    said = subprocess.run(words, capture_output=True, text=True).stdout
    line = r"mean: P\(B > A\) = (\S+), 95 % interval (\[.*\]), permutation p = (\S+)\n  (\w+ ?\w*)"
    ((probability, interval, p, verdict),) = re.findall(line, said)
    rows = rows_of(page.read_text())
    judged = [f"{probability} {interval}", f"{float(p):.2g}", verdict.strip()]
    (row,) = (row for row in rows if row[-3:] == judged)
    shown = re.findall(r"^  (\S+) +\d+ +\d+ +\S+ +(\S+) +\S+$", said, re.MULTILINE)
    assert len(shown) > 1
    names = next(own for own in rows if {env_id for env_id, _ in shown} <= set(own))
    for env_id, iqm in shown:
        assert row[names.index(env_id)].split(" [")[0] == iqm


def test_a_command_is_quoted():
    assert [page.stem for page, _ in quoted()] == ["superseded"]


# --- this project's tables ------------------------------------------------------------------------


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """A folder in the place of the published results."""
    monkeypatch.setattr(curves, "FOLDERS", (tmp_path,))
    return tmp_path


def test_ablations(results):
    high, low, better = ([level + seed for seed in range(8)] for level in (1000, 500, 2000))
    write_jobs(results, curves.ABLATED, "ppo_cma", high, variant="1M")
    write_jobs(results, curves.ABLATED, "ppo_cma", low, variant="1M-H1")
    write_jobs(results, curves.ABLATED, "change", high, variant="cma-mean-first")
    write_jobs(results, ["Walker2d-v4"], "ppo_cma", better, variant="1M-H5")
    _, _, whole, h1, h5, mean_first = rows_of(tables.BLOCKS["ablations-training"]())
    assert whole[:2] == ["none", "8, 8"]
    assert whole[2].startswith("1,004 [")  # of 1002 to 1005
    assert h1[0] == curves.CHANGES["ppo_cma 1M-H1"]
    assert h1[2].startswith("503.5 [")
    assert h5[1:3] == ["0, 8", "-"]  # judged where it ran
    for row, probability, verdict in (
        (h1, "0.00", "worse"),
        (mean_first, "0.50", "no evidence"),
        (h5, "1.00", "improved"),
    ):
        assert row[4].startswith(f"{probability} [")
        assert row[6] == verdict


def test_the_study_takes_its_words_from_the_patches(results, monkeypatch):
    for seed in range(101, 104):
        played = {"variant": "study", "evaluation": (seed, seed + 2)}
        changed = {"variant": "symlog", "evaluation": (seed + 5, seed + 7)}
        for env_id in curves.STUDIED:
            write_job(results, env_id, "ppo_continuous_action", seed, 1, **played)
            write_job(results, env_id, "change", seed, 0, **changed)
    took = {"study": 8.0, "symlog": 10.0}  # seconds of 20 steps
    times = {"cold": 1, "short": 1, "long": 2}
    lines = [f"{x},1,{k},{20 * n},{n * took[x]},{n},1" for x in took for k, n in times.items()]
    monkeypatch.setattr(tables, "SPEED", results)
    text = "\n".join(["program,round,run,steps,cpu_seconds,wall_seconds,peak_mb", *lines])
    (results / "what_matters-changes.csv").write_text(text)
    _, _, whole, change = rows_of(tables.BLOCKS["what-matters"]())
    assert whole[:4] == ["none", "1.00", "3, 3, 3, 3", "103.0 [102.0, 104.0]"]
    assert change[0] == "rewards are sign(r) log(1 + abs(r)), not scaled by their returns (+1)"
    assert change[1:4:2] == ["1.25", "108.0 [107.0, 109.0]"]
    assert change[7].startswith("1.00 [")
    assert change[9] == "improved"


# --- what runs say of themselves ------------------------------------------------------------------


def test_a_committed_run_goes_by_its_program_not_by_the_script_that_imports(tmp_path):
    write_job(tmp_path, "Hopper-v4", "ppo_cma", 3, 1000)
    folder = tmp_path / "Hopper-v4" / "ppo_cma" / "default-s3"
    job = {"env_id": "Hopper-v4", "script": "cma_mean_first", "variant": "1M", "seed": 3}
    job["command"] = f"python benchmark/cma_mean_first.py --run-dir {folder / 'run'}"
    data.commit(folder / "run", job, [7.0, 9.0], tmp_path / "kept")
    (run,) = data.find([tmp_path / "kept"])
    assert (run.script, run.variant, run.seed) == ("cma_mean_first", "1M", 3)
    assert run.algorithm == "cma_mean_first 1M"
    assert run.info["script"] == "ppo_cma.py"
    assert (run.score("training"), run.score("evaluation")) == (1000.0, 8.0)


@pytest.mark.parametrize(
    "hardware, cpu",
    [
        (None, ""), ("a TPU", "a TPU"), ([1], "[1]"), ({"cpu": None}, ""),
        ({"cpu": {"a": 1}}, "{'a': 1}"),
    ],
)  # fmt: skip
def test_any_hardware_can_be_told(hardware, cpu, tmp_path):
    write_job(tmp_path, "A-v0", "ppo", 2, 100.0)
    info = {"status": "finished", "hardware": hardware, "git_commit": 7, "args": None, "seed": "2"}
    (tmp_path / "A-v0/ppo/default-s2/run/run.json").write_text(json.dumps(info))
    row = run_row(data.find([tmp_path])[0])
    assert (row["status"], row["seed"], row["commit"], row["cpu"]) == ("finished", 2, "7", cpu)


EVIL = "=cmd|'/C calc'!A0<script>alert(1)</script>|$x^$\ud800\n[a](http://b)"


def test_what_a_run_says_is_never_markup_nor_a_formula(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    for seed, script in product((1, 2, 3), ("ppo", "=other")):
        args = {"env_id": EVIL, "exp_name": "+$1"}
        write_run(runs / f"{script}{seed}", seed, [float(seed)] * 39, script=script, args=args)
    done = ended(report, [runs], out)
    assert done.stderr == ""
    text, page = ((out / name).read_text() for name in ("report.md", "index.html"))
    assert "<script" not in text
    assert "&lt;script>alert" in text
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page
    (row,) = (line for line in text.splitlines() if "worst and best of these runs" in line)
    assert len(re.split(r"(?<!\\)\|", row)) == 4 + 2  # each | of the id is escaped
    assert all(found.startswith("data:image/svg") for found in References(page).found)
    for name in ("runs.csv", "summary.csv"):
        for line in table(out / name):
            assert line["env_id"].startswith("'=cmd|")
            assert "\n" not in line["env_id"]
            assert line["algorithm"] in ("ppo +$1", "'=other +$1")
    assert table(out / "runs.csv")[0]["training"] == "1"


def test_another_exp_name_is_a_variant_of_its_own(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"

    def by_hand(folder: str, name: str, seed: int, level: float):
        args = {"env_id": "A-v0", "exp_name": name, "total_timesteps": 100}
        write_run(runs / folder, seed, [level] * 39, args=args)

    for seed in range(5):
        by_hand(f"ppo{seed}", "ppo", seed, 10.0 + seed)
        by_hand(f"wide{seed}", "wide", seed, 30.0 + seed)
    done = ended(report, [runs], out)
    assert done.stderr == ""
    rows = table(out / "summary.csv")
    means = {row["algorithm"]: row["mean"] for row in rows if row["metric"] == "training"}
    assert means == {"ppo": "12", "ppo wide": "32"}
    assert "P(B > A) = 1.00" in ended(compare, runs, algorithm=("ppo", "ppo wide")).stdout
    by_hand("again", "wide", 3, 1.0)
    refused("a second run of ppo wide on A-v0 with seed 3", report, [runs], out)
    refused("give one another --variant or --exp-name", report, [runs], out)


def test_scales():
    rows = table(data.SCALES)
    assert all(float(row["low"]) < float(row["high"]) and row["source"] for row in rows)
    from benchmark.published.studies.scales import random_return

    known = {row["env_id"]: float(row["low"]) for row in rows}
    returns = random_return("CartPole-v1", 30)
    assert abs(returns.mean() - known["CartPole-v1"]) < 4 * returns.std() / math.sqrt(30)


def test_90_runs_in_9_seconds(tmp_path):
    """90 runs of 1M steps: 10 environments, 3 algorithms, 3 seeds, 5,000 episodes each."""
    rng = np.random.default_rng(0)
    for k, (e, script, seed) in enumerate(product(range(10), ("ppo", "cma", "kl"), range(3))):
        args = {"env_id": f"Env{e}-v0", "total_timesteps": 1_000_000}
        returns = np.linspace(0, 1000 + 10 * k, 5000) + rng.normal(0, 100, 5000)
        folder = tmp_path / "runs" / f"{e}{script}{seed}"
        write_run(folder, seed, returns.round(2).tolist(), 200, script=script, args=args)
    start = time.process_time()  # other programs don't count
    ended(report, [tmp_path / "runs"], tmp_path / "out")
    assert time.process_time() - start < 9
