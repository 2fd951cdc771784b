"""benchmark report and compare: statistics against slow ones, and what is written about runs."""

import base64
import csv
import json
import math
import re
import shlex
import subprocess
import sys
import time
from html.parser import HTMLParser
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from benchmark import data, stats
from benchmark.compare import compare, judge
from benchmark.published import curves, docs, tables
from benchmark.report import band, compared, group, panels, report, run_row, save

EXACT = {"rel": 0, "abs": 1e-9}


def ragged(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(k, 1, n).round(1) for k, n in enumerate((3, 5, 10))]


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", range(1, 14))
def test_iqm_sorts_and_trims_whole_runs(runs):
    x = np.random.default_rng(runs).normal(size=runs)
    kept = sorted(x)[runs // 4 : runs - runs // 4]
    assert stats.iqm(x) == pytest.approx(sum(kept) / len(kept), **EXACT)
    if runs % 3 == 0:
        assert stats.iqm(*x.reshape(3, -1)) == pytest.approx(sum(kept) / len(kept), **EXACT)


def test_iqm_weighs_environments_the_same():
    scores = ragged()  # of 3, 5 and 10 seeds
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
    above = [
        (scores > np.array([[0.0], [0.25], [0.5], [0.75], [1.0]])).astype(float) for scores in x
    ]
    low, high = stats.interval(stats.mean, above)
    assert stats.mean(*above) == pytest.approx([0.975, 0.875, 0.675, 0.3375, 0.125], **EXACT)
    assert low == pytest.approx([0.9375, 0.8, 0.575, 0.2375, 0.0625], abs=0.013)  # a run in 80
    assert high == pytest.approx([1.0, 0.9375, 0.775, 0.4375, 0.2], abs=0.013)


def test_interval_by_a_loop():
    scores, rng, found = ragged(), np.random.default_rng(5), []
    for _ in range(3000):
        found.append(stats.iqm(*(x[rng.integers(0, len(x), len(x))] for x in scores)))
    low, high = stats.interval(stats.iqm, scores)
    assert (low, high) == pytest.approx(np.percentile(found, [2.5, 97.5]), abs=0.06)
    assert high - low > 0.5
    assert np.isnan(stats.interval(stats.iqm, [*scores, np.ones(1)])).all()
    assert stats.interval(stats.iqm, [np.ones(3)]) == (1, 1)


def test_a_curve_is_a_bootstrap_at_each_point():
    values = np.random.default_rng(0).normal(size=(7, 5)).cumsum(axis=0)
    middle, (low, high) = stats.iqm(values), stats.interval(stats.iqm, [values], resamples=1000)
    for k in range(7):
        assert middle[k] == pytest.approx(np.sort(values[k])[1:4].mean(), **EXACT)
        ends = stats.interval(stats.iqm, [values[k]], resamples=1000)
        assert (low[k], high[k]) == pytest.approx(ends, **EXACT)


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
    assert stats.permutation_test(*apart) == pytest.approx(2 / 252, **EXACT)
    assert stats.permutation_test(*apart, 251) == pytest.approx(2 / 252, abs=0.01)


@pytest.mark.parametrize(
    ("seeds", "least"),
    [
        ([(3, 3)], 0.1),
        ([(2, 2)], 1 / 3),
        ([(4, 4)], 2 / 70),
        ([(3, 5)], 2 / 56),
        ([(2, 2), (2, 2)], 2 / 36),
        ([(2, 3), (2, 2), (3, 2)], 2 / 600),
        ([(1, 1)], 1.0),
    ],
)
def test_the_least_p_that_seeds_can_give(seeds, least):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        x, y = ([rng.normal(size=pair[side]) for pair in seeds] for side in (0, 1))
        found.append(stats.permutation_test(x, y))
    high = [np.arange(n) + 100.0 for n, _ in seeds]
    low = [np.arange(m) * 1.0 for _, m in seeds]
    assert stats.permutation_test(high, low) == pytest.approx(least, **EXACT)
    assert stats.permutation_test(low, high) == pytest.approx(least, **EXACT)
    assert min(found) >= least - 1e-9
    assert stats.least_p(high, low) == pytest.approx(least, **EXACT)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_false_alarms(seeds):
    """Nothing has changed: a verdict in at most 5 % of cases; but not in none, which no test is."""
    rng, alarms, times = np.random.default_rng(seeds), 0, 400
    for k in range(times):
        a, b = (list(rng.normal(size=(4, seeds))) for _ in range(2))
        alarms += judge(a, b, resamples=400, seed=k)[-1] != "no evidence"
    assert 0.01 < alarms / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


def test_power():
    rng, found = np.random.default_rng(0), []
    for k in range(60):
        a, b = (list(rng.normal(shift, 1, (4, 5))) for shift in (0, 1.5))
        found += [judge(a, b, 400, k)[-1], judge(b, a, 400, k)[-1]]
    assert found[::2].count("improved") >= 54 and "worse" not in found[::2]
    assert found[1::2].count("worse") >= 54 and "improved" not in found[1::2]


def test_a_verdict_takes_both_the_interval_and_the_test():
    a = [np.array([4, 6, 5, -9]), np.array([5, 1, 2, 1])]
    b = [np.array([2, 2, 1, -1, 1, 0, 2, 1, 1, 0]), np.array([1, 1, 0, 2, 1, 0, -1, 2, 1, 1])]
    _, low, high, p, verdict = judge(a, b)
    assert low < 0.5 < high and p < 0.05 and verdict == "no evidence"
    three = [np.arange(3.0)], [np.arange(3.0) + 9]  # 2 of 20 labellings
    _, low, high, p, verdict = judge(*three)
    assert low == high == 1 and p == pytest.approx(0.1, abs=0.01) and verdict == "no evidence"


def test_seeds_needed_give_their_power():
    shift = 0.6
    probability = 0.5 * (1 + math.erf(shift / 2))  # P(N(shift, 1) > N(0, 1))
    seeds = stats.seeds_needed(probability, 4)
    assert 9 < seeds < 14
    rng = np.random.default_rng(0)
    found = 0
    for k in range(200):
        x, y = (list(rng.normal(mean, 1, (4, seeds))) for mean in (shift, 0))
        found += stats.permutation_test(x, y, 400, k) < 0.05
    assert 0.7 < found / 200 < 0.9
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
    assert np.isnan(means[20:130]).all() and np.isfinite(means[[19, 130, 199]]).all()
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


# --- runs -----------------------------------------------------------------------------------------


def write_run(
    root: Path, env_id: str, script: str, seed: int, level: float, status: str = "finished",
    steps: int = 1000, evaluation: tuple = (), reason: str | None = None, variant: str = "default",
):  # fmt: skip
    """A job whose training returns rise from 0 to 2 * level and stay there: its score."""
    job = {"env_id": env_id, "script": script, "variant": variant, "seed": seed}
    folder = root / env_id / script / f"{variant}-s{seed}"
    (folder / "run").mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job | ({"reason": reason} if reason else {})))
    if status == "missing":
        return
    args = {"env_id": env_id, "total_timesteps": steps}
    info = {"script": f"{script}.py", "seed": seed, "status": status, "args": args}
    info |= {"git_commit": "abc", "hardware": {"cpu": "Z80", "gpu": None}, "wall_seconds": 7200}
    (folder / "run" / "run.json").write_text(json.dumps(info))
    if evaluation:
        (folder / "evaluation.json").write_text(json.dumps({"returns": evaluation}))
    returns = np.minimum(np.arange(200) / 100, 1) * level
    lines = [
        f"{(k + 1) * steps // 200},{k},{value!r},5" for k, value in enumerate(returns.tolist())
    ]
    (folder / "run" / "episodes.csv").write_text(
        "\n".join(["global_step,seconds,return,length", *lines]) + "\n"
    )


def table(path: Path) -> list[dict]:
    with open(path) as file:
        return list(csv.DictReader(file))


def ends(capsys, verb, *args, **kwargs) -> tuple[int, str]:
    """Exit code of a verb, and what it wrote to standard error."""
    capsys.readouterr()
    try:
        verb(*args, **kwargs)
        return 0, capsys.readouterr().err
    except SystemExit as stop:
        return stop.code, capsys.readouterr().err


class References(HTMLParser):
    """What a page fetches or links to."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report of healthy runs, a failed, a cut-off and a missing one."""
    root, output = (tmp_path_factory.mktemp(name) for name in ("runs", "report"))
    for seed, level in enumerate((100, 200, 300, 400, 450)):
        write_run(root, "CartPole-v1", "ppo", seed, level, evaluation=(level + 1, level + 3))
        write_run(root, "CartPole-v1", "other", seed, level / 2)
        write_run(root, "Home-v0", "ppo", seed, level)
    for seed in range(3):
        write_run(root, "Home-v0", "other", seed, 200 + seed, steps=1000 * (1 + (seed == 2)))
    write_run(root, "CartPole-v1", "ppo", 5, 999, status="running")
    write_run(root, "CartPole-v1", "ppo", 6, 999, status="running", reason="exit | code <9>")
    write_run(root, "CartPole-v1", "ppo", 7, 0, status="missing")
    with pytest.raises(SystemExit) as stop:
        report([root], output)
    assert stop.value.code == 1
    return root, output


def test_report_numbers(written):
    _, output = written
    summary = {
        (row["env_id"], row["algorithm"], row["metric"], row["budget"]): row
        for row in table(output / "summary.csv")
    }
    row = summary["CartPole-v1", "ppo", "training", "1,000 steps"]
    assert (row["runs"], row["seeds"], row["mean"], row["median"], row["iqm"]) == (
        *("8", "5", "290", "300", "300"),
    )
    assert 100 <= float(row["iqm_low"]) < 290 < float(row["iqm_high"]) <= 450
    assert summary["CartPole-v1", "ppo", "evaluation", "1,000 steps"]["mean"] == "292"
    assert summary["CartPole-v1", "other", "evaluation", "1,000 steps"]["seeds"] == "0"
    # trained for other lengths: not averaged
    assert summary["Home-v0", "other", "training", "1,000 steps"]["mean"] == "200.5"
    assert summary["Home-v0", "other", "training", "2,000 steps"]["mean"] == "202"
    text = (output / "report.md").read_text()
    assert "Left out, for runs of different lengths: other on Home-v0." in text
    assert "| 1 | other | ppo | 0.20 | [" in text  # CartPole alone: 5 of 25 pairs
    scaled = (300 - 21.6) / (500 - 21.6)
    assert f"| 1 | ppo | 5 | {scaled:.2f} [" in text
    runs = {
        (row["env_id"], row["algorithm"], row["seed"]): row for row in table(output / "runs.csv")
    }
    assert len(runs) == 21
    row = runs["CartPole-v1", "ppo", "0"]
    assert (row["status"], row["steps"], row["hours"], row["training"]) == (
        *("finished", "1000", "2", "100"),
    )
    assert (row["evaluation"], row["commit"], row["cpu"], row["gpu"]) == ("102", "abc", "Z80", "")


def test_report_lists_what_is_not_finished_first(written):
    text = (written[1] / "report.md").read_text()
    section = text[text.index("## ") : text.index("## Scores")]
    assert section.startswith("## Not in the statistics: 3 runs")
    lines = [line for line in section.splitlines() if "| ppo |" in line]
    assert [re.split(r"(?<!\\)\|", line)[3:6] for line in lines] == [
        [" 5 ", " running ", " cut off or still at it "],
        [" 6 ", " failed ", " exit \\| code <9> "],
        [" 7 ", " missing ", " not begun "],
    ]
    assert "exit | code &lt;9&gt;" in (written[1] / "index.html").read_text()


def test_report_shows_seeds_that_never_got_there(written):
    text = (written[1] / "report.md").read_text()
    half, most = (
        line for line in text.splitlines() if re.match(r"\| CartPole.* ppo .*0 %\)", line)
    )
    assert "260.8 (50 %) | " in half and "never; never; " in half
    cells = [cell.strip() for cell in half.split("|")]
    assert cells[5] == cells[6].split("; ")[2]  # the median of five is the slowest of three
    assert "452.2 (90 %) | never | never; never; never; never; never | never" in most


def test_report_without_a_scale_says_so(written):
    text = (written[1] / "report.md").read_text()
    assert "Where no scale is known" in text
    assert "| Home-v0 | 100.0 | 450.0 | worst and best of these runs |" in text


def test_page_opens_offline(written):
    page = (written[1] / "index.html").read_text()
    references = References()
    references.feed(page)
    assert len(references.found) == references.tags.count("img") == 3
    kind, _, image = references.found[0].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(image) == (written[1] / "curves_steps.svg").read_bytes()
    assert all(value.startswith(kind) for value in references.found)
    assert not {"script", "link", "iframe"} & set(references.tags)
    assert "url(" not in page and "@import" not in page
    for name in ("curves_steps", "curves_hours", "profiles"):
        assert f"![{name}]({name}.png)" in (written[1] / "report.md").read_text()
        svg = (written[1] / f"{name}.svg").read_text()
        assert all(value[0] == "#" for value in re.findall(r'(?:href|src)="([^"]*)"', svg))
        assert (written[1] / f"{name}.png").stat().st_size > 10_000


def test_page_is_made_for_phones_and_screens(written):
    page = (written[1] / "index.html").read_text()
    head, _, body = page.partition("<body>")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in head
    assert re.search(r"body {[^}]*padding: 0 16px", head)
    assert re.search(r"table {[^}]*overflow-x: auto", head)  # a wide one moves, not the page
    titles = re.findall(r"<h([12])>(.*?)</h", body)
    assert [level for level, _ in titles] == ["1"] + ["2"] * (len(titles) - 1)
    names = [title.split(":")[0] for _, title in titles]
    assert names[1:] == [
        *("Not in the statistics", "Scores", "Scores", "Learning curves", "Over environments"),
        *("Steps and time to a score", "Scales", "How the numbers are made"),
    ]  # fmt: skip
    rows = [row.count("<t") for row in re.findall(r"<tr>.*?</tr>", body, re.S)]
    assert len(rows) > 20
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
        assert texts.x0 >= 0 and texts.x1 <= width
        assert texts.y1 <= figure.get_figheight() * figure.dpi
        assert axis.get_window_extent().height > 1.5 * figure.dpi  # inches, however many settings
    assert [text.get_text() for text in legend.get_texts()] == names
    assert (tmp_path / "figure.svg").exists()


def test_at_most_a_comparison_for_each_environment(tmp_path):
    """A-v0 has one and two, B-v0 one, two and three, C-v0 four alone; D-v0 has as many as A-v0."""
    there = {"A-v0": "12", "B-v0": "123", "C-v0": "4", "D-v0": "12"}
    for (env_id, names), seed in product(there.items(), range(2)):
        for name in names:
            write_run(tmp_path, env_id, f"algorithm-{name}", seed, 100)
    found = compared(group(data.find([tmp_path])), "training")
    names = [("".join(name.split("-")[1][0] for name in own), env_ids) for own, env_ids in found]
    assert names == [("12", ["A-v0", "B-v0", "D-v0"]), ("123", ["B-v0"])]


def test_pairs_are_compared_where_no_environment_has_all(tmp_path):
    for env_id, script in (("A-v0", "ppo"), ("A-v0", "cma"), ("B-v0", "ppo"), ("B-v0", "kl")):
        for seed in range(2):
            write_run(tmp_path / "runs", env_id, script, seed, 100 * (1 + seed + (script == "kl")))
    report([tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| 1 | A-v0 | 1,000 steps |" in text and "| 2 | B-v0 | 1,000 steps |" in text
    assert "| 1 | cma | ppo | 0.50 | [" in text
    assert "| 2 | kl | ppo | 0.88 | [" in text  # three of four pairs are won, one is tied
    assert "## Over environments" in text and "Nothing to compare" not in text


def test_report_ends(written, tmp_path, capsys):
    root, _ = written
    home = [root / "Home-v0"]
    assert ends(capsys, report, home, tmp_path / "out") == (0, "")
    assert ends(capsys, report, home, tmp_path / "out", metric="evaluation") == (
        *(1, "8 of 8 runs have no score, see the report\n"),
    )
    assert "without a finite evaluation score" in (tmp_path / "out" / "report.md").read_text()
    write_run(tmp_path / "begun", "CartPole-v1", "ppo", 1, 0, status="missing")
    assert ends(capsys, report, [tmp_path / "begun"], tmp_path / "out") == (
        *(1, "1 of 1 runs have no score, see the report\n"),
    )
    for seed in range(2):
        write_run(tmp_path / "flat", "Flat-v0", "ppo", seed, 7)
    assert ends(capsys, report, [tmp_path / "flat"], tmp_path / "out") == (0, "")
    assert "| Flat-v0 | 7.00 | 8.00 |" in (tmp_path / "out" / "report.md").read_text()
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for args, kwargs, words in [
        (([tmp_path / "nowhere"], tmp_path), {}, "nowhere: no such folder"),
        (([tmp_path / "empty"], tmp_path), {}, "no runs in"),
        ((home * 2, tmp_path), {}, "a second run of"),
        ((home, tmp_path / "file"), {}, "--output"),
        ((home, tmp_path), {"algorithms": ["ppo", "a2c"]}, "no run of a2c; there are other, ppo"),
        ((home, tmp_path), {"env_ids": ["Pong"]}, "no run of Pong; there are Home-v0"),
    ]:
        code, error = ends(capsys, report, *args, **kwargs)
        assert code == 2 and words in error and error.count("\n") == 1


def test_compare_ends(tmp_path, capsys):
    for folder, shift in (("old", 0), ("same", 0), ("better", 50), ("worse", -50)):
        for env_id in ("A-v0", "B-v0"):
            for seed in range(5):
                level = 200 + 10 * seed + shift
                write_run(tmp_path / folder, env_id, "ppo", seed, level, evaluation=(-level,))
    old, same, better, worse = (tmp_path / name for name in ("old", "same", "better", "worse"))

    def said(*args, **kwargs) -> tuple[int, str]:
        try:
            compare(*args, **kwargs)
            return 0, capsys.readouterr().out
        except SystemExit as stop:
            return stop.code, capsys.readouterr().out

    code, text = said(old, better)
    assert code == 0 and "\n  improved\n" in text
    assert re.search(r"A-v0 +5 +5 +220\.0 +270\.0 +1\.00\n", text)
    assert "mean: P(B > A) = 1.00, 95 % interval [1.00, 1.00], permutation p = 0.000" in text
    code, text = said(old, worse)
    assert code == 1 and "\n  worse\n" in text
    assert said(old, worse, metric="evaluation")[0] == 0
    code, text = said(old, same)
    assert code == 0 and "no evidence; at this P a power of 80 % takes 1,000 seeds or more" in text
    # trained for other lengths: not averaged
    for seed in range(4):
        write_run(old, "C-v0", "ppo", seed, 300)
        write_run(worse, "C-v0", "ppo", seed, 300, steps=1000 + 1000 * (seed > 1))
    code, text = said(old, worse)
    assert code == 1 and "one length: C-v0" in text and "C-v0  " not in text
    # two algorithms of one folder
    for seed in range(5):
        write_run(better, "A-v0", "slow", seed, 1 + seed)
    assert said(better, algorithm=("ppo", "slow"))[0] == 1
    code, text = said(better, algorithm=("slow", "ppo"))
    assert code == 0 and "A slow, B ppo" in text and "one length: B-v0" in text
    # a new version that breaks is not good
    write_run(better, "A-v0", "ppo", 5, 1, status="failed")
    code, error = ends(capsys, compare, old, better)
    lost = "B lacks C-v0 ppo: two finished seeds of one length\n"
    assert (code, error) == (1, f"{lost}B lacks A-v0 seed 5: failed\n")
    code, error = ends(capsys, compare, better, same)
    assert (code, error) == (1, "B lacks A-v0 slow: two finished seeds of one length\n")
    write_run(tmp_path / "single", "A-v0", "ppo", 0, 1)
    write_run(tmp_path / "foreign", "A-v0", "dqn", 0, 1)
    for args, kwargs, words in [
        ((old, tmp_path / "single"), {}, "no environment on which both"),
        ((old, tmp_path / "foreign"), {}, "A has ppo; B has dqn"),
        ((old, tmp_path / "none"), {}, "no such folder"),
        ((old,), {}, "two folders"),
        ((old,), {"algorithm": ("ppo", "dqn")}, "A has ppo; B has ppo"),
    ]:
        code, error = ends(capsys, compare, *args, **kwargs)
        assert code == 2 and words in error and error.count("\n") == 1


def sides(root: Path, seeds: int, env_ids: tuple[str, ...] = ("A-v0",)) -> tuple[Path, Path]:
    """Two folders of runs, the second one's all better."""
    for folder, shift in (("before", 0), ("after", 500)):
        for env_id, seed in product(env_ids, range(seeds)):
            write_run(root / folder, env_id, "ppo", seed, 200 + 10 * seed + shift)
    return root / "before", root / "after"


def test_compare_says_which_folder_is_a_and_which_is_b(tmp_path, capsys):
    a, b = sides(tmp_path, 5)
    compare(a, b)
    assert capsys.readouterr().out.startswith(f"A, the old: {a}\nB, the new: {b}\n")
    for seed in range(5):
        write_run(a, "A-v0", "slow", seed, 1.0 + seed)
    compare(a, algorithm=("slow", "ppo"))
    told = capsys.readouterr().out
    assert told.startswith(f"A, the old: {a}\nB, the new: {a}\n") and "A slow, B ppo" in told


def test_compare_says_when_no_result_could_be_evidence(tmp_path, capsys):
    compare(*sides(tmp_path / "three", 3))
    told = capsys.readouterr().out
    assert "P(B > A) = 1.00" in told and "permutation p = 0.1\n" in told
    assert "  with 3 against 3 seeds no result could reach p < 0.05: the smallest is 0.1\n" in told
    compare(*sides(tmp_path / "four", 4))
    told = capsys.readouterr().out
    assert "permutation p = 0.0286\n" in told and "\n  improved\n" in told
    assert "could reach" not in told
    compare(*sides(tmp_path / "two", 2, ("A-v0", "B-v0")))
    told = capsys.readouterr().out
    assert "  with 2 against 2 seeds no result could reach p < 0.05: the smallest is 0.0556" in told
    a, b = sides(tmp_path / "more", 2, ("A-v0", "B-v0"))
    write_run(b, "B-v0", "ppo", 2, 900)
    compare(a, b)  # 60 labellings
    assert "could reach" not in capsys.readouterr().out


def test_compare_on_some_environments(tmp_path, capsys):
    a, b = sides(tmp_path, 4, ("A-v0", "B-v0"))
    compare(a, b, env_ids=("B-v0",))
    told = capsys.readouterr().out
    assert "B-v0" in told and "A-v0" not in told
    code, error = ends(capsys, compare, a, b, env_ids=("C-v0",))
    assert (code, error) == (2, "benchmark: no run of C-v0; there are A-v0, B-v0\n")


def quoted() -> list[tuple[Path, str]]:
    """The compare commands in README.md and docs/ that read committed runs, and their pages."""
    found = []
    for page in docs.PAGES:
        text = page.read_text().replace("\\\n", " ")
        for command in re.findall(
            r"python -m benchmark (compare benchmark/published[^`\n]*)", text
        ):
            found.append((page, command))
    return found


@pytest.mark.parametrize("page, command", quoted(), ids=lambda value: getattr(value, "stem", None))
def test_a_quoted_command_prints_what_stands_in_the_table(page, command, monkeypatch):
    monkeypatch.chdir(docs.ROOT)
    words = [sys.executable, "-m", "benchmark", *shlex.split(command)]
    told = subprocess.run(words, capture_output=True, text=True).stdout
    line = r"mean: P\(B > A\) = (\S+), 95 % interval (\[.*\]), permutation p = (\S+)\n  (\w+ ?\w*)"
    ((probability, interval, p, verdict),) = re.findall(line, told)
    rows = rows_of(page.read_text())
    judged = [f"{probability} {interval}", f"{float(p):.2g}", verdict.strip()]
    (row,) = (row for row in rows if row[-3:] == judged)
    shown = re.findall(r"^  (\S+) +\d+ +\d+ +\S+ +(\S+) +\S+$", told, re.MULTILINE)
    assert len(shown) > 1
    names = next(own for own in rows if {env_id for env_id, _ in shown} <= set(own))
    for env_id, iqm in shown:
        assert row[names.index(env_id)].split(" [")[0] == iqm


def test_a_command_is_quoted():
    assert [page.stem for page, _ in quoted()] == ["ppo_continuous_action"]


def rows_of(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_head_to_head(tmp_path, monkeypatch):
    for seed, level in enumerate((1000, 2000, 3000, 4000, 5000)):
        for k, env_id in enumerate(curves.MUJOCO):
            played = (level, level + 2 * k)
            write_run(tmp_path, env_id, "ppo_continuous_action", seed, level, evaluation=played)
            for script in ("ppo_kl_adaptive", "ppo_cma"):
                more = {"variant": "1M", "evaluation": (level / 2,)}
                write_run(tmp_path, env_id, script, seed, level / 2, **more)
    write_run(tmp_path, "Humanoid-v4", "ppo_cma", 0, 1e9, variant="1M")  # is not part of it
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    # of 25 pairs 4 are won; 2 are tied, in evaluation on the first environment only
    for metric, wanted, won in (("training", "3,000", 0.2), ("evaluation", "3,001", 0.165)):
        _, _, *rows, pooled, better = rows_of(tables.head_to_head(metric))
        assert [row[:2] for row in rows] == [[env_id, "5, 5, 5"] for env_id in curves.MUJOCO]
        assert pooled[0] == "all eight, normalised"
        assert better[2] == ""
        wins = [float(cell.split(" [")[0]) for cell in better[3:]]
        assert wins == pytest.approx([won, won], abs=0.006)
        (hopper,) = (row for row in rows if row[0] == "Hopper-v4")
        said = [cell.split(" [")[0] for cell in hopper[2:]]
        assert said == [f"**{wanted}**", "1,500", "1,500"]
    (tmp_path / "head-to-head").mkdir()
    curves.head_to_head()
    assert [path.name for path in (tmp_path / "head-to-head").iterdir()] == ["curves.png"]


def test_modes(tmp_path, monkeypatch):
    for seed, env_id in product(range(3), curves.MUJOCO):
        scales = data.read_scales(data.SCALES)[env_id]
        for variant, part in (("1M", 0.75), ("1M-ppo", 0.25)):
            level = scales.low + part * (scales.high - scales.low)
            write_run(tmp_path, env_id, "ppo_cma", seed, level, variant=variant)
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    drawn = {}
    monkeypatch.setattr(curves.report, "save", lambda figure, *_, **__: drawn.update(figure=figure))
    curves.modes()
    *_, pooled = drawn["figure"].axes
    assert [line.get_ydata()[-1] for line in pooled.lines] == pytest.approx([0.75, 0.25])
    _, _, whole, ppo = rows_of(tables.BLOCKS["modes-training"]())
    assert (whole[0], ppo[0]) == ("none", "`--mode ppo`, its own flags")
    assert ppo[1] == ", ".join("3" * 8) and ppo[-3:] == ["0.00 [0.00, 0.00]", ppo[-2], "worse"]


def test_what_matters(tmp_path, monkeypatch):
    """A change on two of the environments is judged there, and drawn."""
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    for seed in range(101, 106):  # the last two are of the finalists
        for env_id in curves.STUDIED:
            played = {"evaluation": (float(seed),)}
            own = ("ppo_continuous_action", seed, 1.0)
            write_run(tmp_path, env_id, *own, variant="study", **played)
            if env_id in curves.STUDIED[:2]:
                write_run(tmp_path, env_id, *own, variant="study-8-envs", evaluation=(5.0 + seed,))
    (_, none, _), (name, scores, judged) = curves.effects(*curves.SCREENED)
    assert [len(x) for x in none] == [3, 3, 3, 3] and [len(x) for x in scores] == [3, 3, 0, 0]
    assert name == "ppo_continuous_action study-8-envs" and judged[:3] == (1.0, 1.0, 1.0)
    curves.what_matters()
    assert (tmp_path / "what_matters.png").stat().st_size > 5_000


def test_ablations(tmp_path, monkeypatch):
    for seed in range(8):
        for env_id in curves.ABLATED:
            write_run(tmp_path, env_id, "ppo_cma", seed, 1000 + seed, variant="1M")
            write_run(tmp_path, env_id, "ppo_cma", seed, 500 + seed, variant="1M-H1")
            write_run(tmp_path, env_id, "change", seed, 1000 + seed, variant="cma-mean-first")
        write_run(tmp_path, "Walker2d-v4", "ppo_cma", seed, 2000 + seed, variant="1M-H5")
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    _, _, *rows = rows_of(tables.BLOCKS["ablations-training"]())
    found = dict(zip(("whole", "H1", "H5", "mean first"), rows, strict=True))
    assert found["whole"][:2] == ["none", "8, 8"]
    assert found["whole"][2].startswith("1,004 [")  # of 1002 to 1005
    assert found["H1"][0] == curves.CHANGES["ppo_cma 1M-H1"]
    assert found["H1"][2].startswith("503.5 [")
    assert found["H1"][4].startswith("0.00 [")
    assert found["H1"][6] == "worse"
    assert found["mean first"][4].startswith("0.50 [")
    assert found["mean first"][6] == "no evidence"
    assert found["H5"][1:3] == ["0, 8", "-"]  # judged where it ran
    assert found["H5"][4].startswith("1.00 [")
    assert found["H5"][6] == "improved"


def test_the_study_takes_its_words_from_the_patches(tmp_path, monkeypatch):
    for seed in range(101, 104):
        played = {"variant": "study", "evaluation": (seed, seed + 2)}
        changed = {"variant": "symlog", "evaluation": (seed + 5, seed + 7)}
        for env_id in curves.STUDIED:
            write_run(tmp_path, env_id, "ppo_continuous_action", seed, 1, **played)
            write_run(tmp_path, env_id, "change", seed, 0, **changed)
    monkeypatch.setattr(curves, "RESULTS", tmp_path)
    took = {"study": 8.0, "symlog": 10.0}  # seconds of 20 steps
    times = {"cold": 1, "short": 1, "long": 2}
    lines = [f"{x},1,{k},{20 * n},{n * took[x]},{n},1" for x in took for k, n in times.items()]
    monkeypatch.setattr(tables, "SPEED", tmp_path)
    text = "\n".join(["program,round,run,steps,cpu_seconds,wall_seconds,peak_mb", *lines])
    (tmp_path / "what_matters-changes.csv").write_text(text)
    _, _, whole, change = rows_of(tables.BLOCKS["what-matters"]())
    assert whole[:4] == ["none", "1.00", "3, 3, 3, 3", "103.0 [102.0, 104.0]"]
    assert change[0] == "rewards are sign(r) log(1 + abs(r)), not scaled by their returns (+1)"
    assert change[1:4:2] == ["1.25", "108.0 [107.0, 109.0]"]
    assert change[7].startswith("1.00 [") and change[9] == "improved"


def test_a_committed_run_goes_by_its_program_not_by_the_script_that_imports(tmp_path):
    write_run(tmp_path, "Hopper-v4", "ppo_cma", 3, 1000)
    folder = tmp_path / "Hopper-v4" / "ppo_cma" / "default-s3"
    job = {"env_id": "Hopper-v4", "script": "cma_mean_first", "variant": "1M", "seed": 3}
    job["command"] = f"python benchmark/cma_mean_first.py --run-dir {folder / 'run'}"
    data.commit(folder / "run", job, [7.0, 9.0], tmp_path / "kept")
    (run,) = data.find([tmp_path / "kept"])
    assert (run.script, run.variant, run.seed) == ("cma_mean_first", "1M", 3)
    assert run.algorithm == "cma_mean_first 1M" and run.info["script"] == "ppo_cma.py"
    assert (run.score("training"), run.score("evaluation")) == (1000.0, 8.0)


HEAD = b"global_step,seconds,return,length\n"


@pytest.mark.parametrize(
    "hardware, cpu",
    [
        (None, ""),
        ("a TPU", "a TPU"),
        ([1], "[1]"),
        ({"cpu": None}, ""),
        ({"cpu": {"a": 1}}, "{'a': 1}"),
    ],
)
def test_any_hardware_can_be_told(hardware, cpu, tmp_path):
    write_run(tmp_path, "A-v0", "ppo", 2, 100.0)
    info = {"status": "finished", "hardware": hardware, "git_commit": 7, "args": None, "seed": "2"}
    (tmp_path / "A-v0/ppo/default-s2/run/run.json").write_text(json.dumps(info))
    row = run_row(data.find([tmp_path])[0])
    assert (row["status"], row["seed"], row["commit"], row["cpu"]) == ("finished", 2, "7", cpu)


EVIL = "=cmd|'/C calc'!A0<script>alert(1)</script>|$x^$\ud800\n[a](http://b)"


def test_what_a_run_says_is_never_markup_nor_a_formula(tmp_path, capsys):
    for seed in (1, 2, 3):
        for script in ("ppo", "=other"):
            folder = tmp_path / "runs" / f"{script}{seed}"
            folder.mkdir(parents=True)
            info = {"script": script, "seed": seed, "status": "finished"}
            info |= {"args": {"env_id": EVIL, "exp_name": "+$1"}}
            (folder / "run.json").write_text(json.dumps(info))
            rows = "".join(f"{k},{k},{seed},1\n" for k in range(1, 40))
            (folder / "episodes.csv").write_bytes(HEAD + rows.encode())
    assert ends(capsys, report, [tmp_path / "runs"], tmp_path / "out") == (0, "")
    text, page = ((tmp_path / "out" / name).read_text() for name in ("report.md", "index.html"))
    assert "<script" not in text and "&lt;script>alert" in text
    assert "<script" not in page and "&lt;script&gt;alert" in page
    (row,) = (line for line in text.splitlines() if "worst and best of these runs" in line)
    assert len(re.split(r"(?<!\\)\|", row)) == 4 + 2  # each | of the id is escaped
    references = References()
    references.feed(page)
    assert all(found.startswith("data:image/svg") for found in references.found)
    for name in ("runs.csv", "summary.csv"):
        for line in table(tmp_path / "out" / name):
            assert line["env_id"].startswith("'=cmd|") and "\n" not in line["env_id"]
            assert line["algorithm"] in ("ppo +$1", "'=other +$1")
    assert table(tmp_path / "out" / "runs.csv")[0]["training"] == "1"


def by_hand(folder: Path, name: str, seed: int, level: float):
    """A run as a script leaves it, with or without an --exp-name."""
    folder.mkdir(parents=True)
    info = {"script": "ppo.py", "seed": seed, "status": "finished"}
    info |= {"args": {"env_id": "A-v0", "exp_name": name, "total_timesteps": 100}}
    (folder / "run.json").write_text(json.dumps(info))
    rows = "".join(f"{k},{k},{level},1\n" for k in range(1, 40))
    (folder / "episodes.csv").write_bytes(HEAD + rows.encode())


def test_another_exp_name_is_a_variant_of_its_own(tmp_path, capsys):
    for seed in range(5):
        for name, level in (("ppo", 10 + seed), ("wide", 30 + seed)):
            by_hand(tmp_path / "runs" / f"{name}{seed}", name, seed, level)
    assert ends(capsys, report, [tmp_path / "runs"], tmp_path / "out") == (0, "")
    rows = table(tmp_path / "out" / "summary.csv")
    means = {row["algorithm"]: row["mean"] for row in rows if row["metric"] == "training"}
    assert means == {"ppo": "12", "ppo wide": "32"}
    compare(tmp_path / "runs", algorithm=("ppo", "ppo wide"))
    assert "P(B > A) = 1.00" in capsys.readouterr().out
    by_hand(tmp_path / "runs" / "again", "wide", 3, 1.0)
    code, error = ends(capsys, report, [tmp_path / "runs"], tmp_path / "out")
    assert code == 2 and "a second run of ppo wide on A-v0 with seed 3" in error
    assert "give one another --variant or --exp-name" in error


def test_a_run_of_b_that_can_not_be_read_is_missed(tmp_path, capsys):
    for side in ("a", "b"):
        for seed in range(5):
            by_hand(tmp_path / side / f"{seed}", "ppo", seed, seed)
    assert ends(capsys, compare, tmp_path / "a", tmp_path / "b") == (0, "")
    (tmp_path / "b" / "4" / "episodes.csv").write_bytes(b"\xff\n")
    code, error = ends(capsys, compare, tmp_path / "a", tmp_path / "b")
    assert code == 1 and "unreadable" in error and error.startswith("B lacks ")
    assert ends(capsys, compare, tmp_path / "b", tmp_path / "a") == (0, "")


def test_scales():
    rows = table(data.SCALES)
    assert all(float(row["low"]) < float(row["high"]) and row["source"] for row in rows)
    from benchmark.published.studies.scales import random_return

    known = {row["env_id"]: float(row["low"]) for row in rows}
    returns = random_return("CartPole-v1", 30)
    assert abs(returns.mean() - known["CartPole-v1"]) < 4 * returns.std() / math.sqrt(30)


def test_90_runs_in_9_seconds(tmp_path, capsys):
    """90 runs of 1M steps: 10 environments, 3 algorithms, 3 seeds, 5,000 episodes each."""
    rng = np.random.default_rng(0)
    for k, (e, script, seed) in enumerate(product(range(10), ("ppo", "cma", "kl"), range(3))):
        env_id = f"Env{e}-v0"
        folder = tmp_path / "runs" / env_id / script / str(seed)
        folder.mkdir(parents=True)
        args = {"env_id": env_id, "total_timesteps": 1_000_000}
        info = {"script": script, "seed": seed, "status": "finished", "args": args}
        (folder / "run.json").write_text(json.dumps(info))
        if k < 30:
            returns = np.linspace(0, 1000 + 10 * k, 5000) + rng.normal(0, 100, 5000)
            rows = [f"{200 * (i + 1)},{i / 10},{x:.2f},200" for i, x in enumerate(returns)]
            text = "\n".join(["global_step,seconds,return,length", *rows]) + "\n"
        (folder / "episodes.csv").write_text(text)
    start = time.process_time()  # other programs don't count
    report([tmp_path / "runs"], tmp_path / "out")
    seconds = time.process_time() - start
    with capsys.disabled():
        print(f"90 runs: {seconds:.1f} s")
    assert seconds < 9
