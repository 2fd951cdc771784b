"""benchmark report and compare: statistics against slow ones, and what is found out about runs."""

import math
import re
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from harness import HEAD, SEVENS, ended, refused, table, write_job, write_run

from benchmark import data, stats
from benchmark.compare import compare
from benchmark.programs import duration
from benchmark.report import band, holm, report

EXACT = {"rel": 0, "abs": 1e-9}


def test_iqm_sorts_and_trims_whole_runs():
    for runs in range(1, 14):
        x = np.random.default_rng(runs).normal(size=runs)
        kept = sorted(x)[runs // 4 : runs - runs // 4]
        assert stats.iqm(x) == pytest.approx(sum(kept) / len(kept), **EXACT)
        if runs % 3 == 0:
            assert stats.iqm(*x.reshape(3, -1)) == pytest.approx(sum(kept) / len(kept), **EXACT)


def test_iqm_weighs_environments_the_same():
    rng = np.random.default_rng(0)
    scores = [rng.normal(k, 1, seeds).round(1) for k, seeds in enumerate((3, 5, 10))]
    copies = sorted(np.concatenate([np.repeat(x, 120 // len(x)) for x in scores]))
    assert stats.iqm(*scores) == pytest.approx(np.mean(copies[90:270]), **EXACT)


def test_against_rliable():
    """rliable 1.2.0 with pandas 2.3 and arch 7.2, on these scores [runs, environments]:
    get_interval_estimates with 50,000 resamples (5,000 for P), create_performance_profile."""
    rng = np.random.default_rng(0)
    x = list(rng.normal(0.6, 0.3, size=(10, 8)).round(2).T)
    y = list(rng.normal(0.5, 0.3, size=(7, 8)).round(2).T)
    golden = {
        stats.iqm: (0.629, 0.5003571428571428, 0.55975, 0.702),
        stats.mean: (0.636, 0.4932142857142857, 0.57525, 0.69625),
    }
    for statistic, (of_x, of_y, low, high) in golden.items():
        assert statistic(*x) == pytest.approx(of_x, **EXACT)
        assert statistic(*y) == pytest.approx(of_y, **EXACT)
        assert stats.interval(statistic, x) == pytest.approx((low, high), abs=0.006)
    assert stats.improvement(*x, *y) == pytest.approx(0.6267857142857143, **EXACT)
    assert stats.interval(stats.improvement, [*x, *y]) == pytest.approx((0.5313, 0.7223), abs=0.006)


@pytest.mark.parametrize(("seeds", "environments"), stats.COVERAGE)
def test_coverage(seeds, environments):
    rng = np.random.default_rng(seeds)
    scores = [list(rng.normal(size=(environments, seeds))) for _ in range(600)]
    ends = [stats.interval(stats.iqm, x, resamples=400, seed=k) for k, x in enumerate(scores)]
    hits = np.mean([low <= 0 <= high for low, high in ends])
    stated = stats.COVERAGE[seeds, environments]
    assert abs(hits - stated) < 3 * math.sqrt(stated * (1 - stated) / 600) + 0.01


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


def test_learning_curves_are_of_all_seeds_at_each_point():
    steps = [np.arange(1, 101) * 10, np.arange(1, 201) * 10, np.arange(1, 51) * 30]
    grid, middle, low, high = band([(x, x + 100.0 * k) for k, x in enumerate(steps)])
    assert (grid[0], grid[-1]) == (600, 1000)
    # at 1,000 the last episode of the third ended at 990
    assert middle[-1] == pytest.approx((1000 + 1100 + 1190) / 3, **EXACT)
    assert (low[-1], high[-1]) == (1000, 1190)


def write_jobs(root: Path, env_ids: list[str], script: str, levels: tuple, first: int = 0, **more):
    """Jobs of seeds from `first`, whose scores are these levels."""
    for env_id, (seed, level) in product(env_ids, enumerate(levels, first)):
        write_job(root, env_id, script, seed, level, **more)


def verdict(output: Path) -> str:
    """The top of a report."""
    text = (output / "report.md").read_text()
    return text[text.index("## Verdict") : text.index(" runs are finished")]


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
    write_job(root, "CartPole-v1", "ppo", 6, 999, reason="exit | code <9>")
    write_job(root, "CartPole-v1", "ppo", 7, 0, status="missing")
    ended(report, [root], output, code=1)
    return root, output


def test_report_numbers(written):
    _, output = written
    key = ("env_id", "algorithm", "metric", "budget")
    summary = {tuple(row[x] for x in key): row for row in table(output / "summary.csv")}
    row = summary["CartPole-v1", "ppo", "training", "1,000 steps"]
    assert (row["runs"], row["seeds"]) == ("8", "5")
    assert (row["mean"], row["median"], row["iqm"]) == ("290", "300", "300")
    assert float(row["std"]) == pytest.approx(143.178, abs=1e-3)
    assert 100 <= float(row["iqm_low"]) < 290 < float(row["iqm_high"]) <= 450
    assert row["note"] == ""
    assert summary["CartPole-v1", "ppo", "evaluation", "1,000 steps"]["mean"] == "292"
    assert ("CartPole-v1", "other", "evaluation", "1,000 steps") not in summary
    # trained for other lengths: not averaged
    row = summary["Home-v0", "other", "training", "1,000 steps"]
    assert (row["mean"], row["seeds"]) == ("200.5", "2")
    assert row["note"] == "runs of other lengths apart, 2 seeds: too narrow an interval"
    assert summary["Home-v0", "other", "training", "2,000 steps"]["mean"] == "202"
    runs = table(output / "runs.csv")
    assert len(runs) == 21
    row = next(x for x in runs if (x["env_id"], x["algorithm"]) == ("Home-v0", "ppo"))
    wanted = {"seed": "0", "status": "finished", "steps": "1000", "hours": "2", "training": "100"}
    wanted |= {"commit": "abc", "cpu": "Z80"}
    assert {name: row[name] for name in wanted} == wanted
    bad = [(x["seed"], x["status"], x["reason"]) for x in runs if x["status"] != "finished"]
    told = [("5", "running", "cut off or still at it"), ("6", "failed", "exit | code <9>")]
    assert bad == [*told, ("7", "missing", "not begun")]


def test_a_report_begins_with_a_verdict(written, tmp_path):
    """CartPole alone: 5 of 25 pairs; of Home there are runs of two lengths."""
    text = verdict(written[1])
    assert "No evidence that ppo is ahead of other" in text
    assert "IQM 300.0 against 150.0; P(ppo > other) = 0.80" in text
    assert "Not compared, for want of runs of one length of all algorithms: Home-v0." in text
    for script, first in (("ppo", 10), ("cma", 20), ("kl", 19)):
        write_jobs(tmp_path, ["A-v0", "B-v0"], script, range(first, first + 5))
    ended(report, [tmp_path], tmp_path / "out")
    text = verdict(tmp_path / "out")
    first, second = (line for line in text.splitlines() if line.startswith("*"))
    assert "No evidence that cma is ahead of kl" in first
    assert "cma is ahead of ppo" in second
    assert "over 2 environments, IQM 0.86 against 0.14; P(cma > ppo) = 1.00" in second
    p = 2 * 2 / 252**2  # the smallest there is, of two tests
    assert float(re.search(r"p = ([\d.e-]+)\.", second)[1]) < 2 * p + 3e-4
    assert "corrected for 2 comparisons" in text


def test_three_seeds_are_too_few(tmp_path):
    write_jobs(tmp_path, ["A-v0"], "ppo", (1, 2, 3))
    write_jobs(tmp_path, ["A-v0"], "cma", (11, 12, 13))
    ended(report, [tmp_path], tmp_path / "out")
    text = verdict(tmp_path / "out")
    assert "Too few seeds to tell cma from ppo" in text
    assert "with 3 against 3 seeds no result could reach p < 0.05: the smallest is 0.1" in text
    assert "interval" not in text
    said = ended(compare, tmp_path, algorithm=("ppo", "cma")).stdout
    assert "too few seeds to tell" in said
    assert "interval" not in said


def test_p_values_are_corrected_by_holm():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1, 1])


def test_time_as_people_write_it():
    words = {4.21: "4.2 s", 35: "35 s", 119: "2 min", 3600: "1 h", 11999: "3 h 20 min"}
    assert {seconds: duration(seconds) for seconds in words} == words


def test_the_page_needs_nothing_else(written):
    page = (written[1] / "index.html").read_text()
    found = re.findall(r'(?:src|href|data)="([^"]{0,18})', page)
    assert found == ["data:image/svg+xml"] * 3
    assert "exit | code &lt;9&gt;" in page


def test_report_ends(written, tmp_path):
    home, out = [written[0] / "Home-v0"], tmp_path / "out"
    write_job(tmp_path / "begun", "CartPole-v1", "ppo", 1, 0, status="missing")
    write_jobs(tmp_path / "flat", ["Flat-v0"], "ppo", (7, 7))
    ended(report, home, out)
    unplayed = ended(report, home, out, metric="evaluation", code=1)
    assert "8 of 8 runs have no score" in unplayed.stderr
    ended(report, [tmp_path / "begun"], out, code=1)
    ended(report, [tmp_path / "flat"], out)
    (tmp_path / "empty").mkdir()
    refused("nowhere: no such folder", report, [tmp_path / "nowhere"], out)
    refused("no runs in", report, [tmp_path / "empty"], out)
    refused("a second run of", report, home * 2, out)
    refused("no run of a2c; there are other, ppo", report, home, out, algorithms=["ppo", "a2c"])
    refused("no run of Pong; there are Home-v0", report, home, out, env_ids=["Pong"])


ROWS = "".join(f"{k},{k},7.0,1\n" for k in range(1, 40))
DAMAGED = {  # a file of a run, and what is in it instead
    "half": ("run.json", '{"status"'),
    "no seed": ("run.json", '{"args": {"env_id": "A-v0"}}'),
    "no header": ("episodes.csv", "step,score\n1,1\n"),
    "two runs": ("episodes.csv", HEAD + ROWS + ROWS),
    "a job": ("job.json", "["),
}


def test_each_bad_run_is_named_and_the_others_are_reported(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "runs" / f"s{seed}", seed)
    for k, (name, content) in enumerate(DAMAGED.values(), 3):
        write_run(tmp_path / "runs" / f"bad{k}", k)
        (tmp_path / "runs" / f"bad{k}" / name).write_text(content)
    ended(report, [tmp_path / "runs"], tmp_path / "out", code=1)
    rows = table(tmp_path / "out" / "runs.csv")
    bad = sorted(row["reason"] for row in rows if row["status"] == "unreadable")
    assert len(bad) == len(DAMAGED)
    assert all(f"bad{k}: " in " ".join(bad) for k in range(3, 3 + len(DAMAGED)))
    good = [row for row in rows if row["status"] == "finished"]
    assert [(row["seed"], row["training"]) for row in good] == [("1", "7"), ("2", "7")]
    refused("no run that can be read", report, [tmp_path / "runs" / "bad3"], tmp_path / "out")


def test_a_table_cut_off_in_mid_write_has_all_its_whole_rows(tmp_path):
    write_run(tmp_path / "s1", 1)
    (tmp_path / "s1" / "episodes.csv").write_text(f"{HEAD}{ROWS}40,40,9")
    (found,) = data.find([tmp_path])
    assert found.returns.tolist() == SEVENS
    assert found.steps.tolist() == list(range(1, 40))


def write_side(root: Path, env_ids: tuple, shift: float) -> Path:
    """Runs of one side; their evaluations are the negative scores."""
    for env_id, seed in product(env_ids, range(5)):
        level = 200 + 10 * seed + shift
        write_job(root, env_id, "ppo", seed, level, evaluation=(-level,))
    return root


def test_compare_ends(tmp_path):
    two = ("A-v0", "B-v0")
    shifts = {"old": 0, "same": 0, "better": 50, "worse": -50}
    old, same, better, worse = (write_side(tmp_path / x, two, shift) for x, shift in shifts.items())
    text = ended(compare, old, better).stdout
    assert "\n  improved\n" in text
    assert re.search(r"A-v0 +5 +5 +220\.0 +270\.0 +1\.00\n", text)
    assert "P(B > A) = 1.00, 95 % interval [1.00, 1.00], permutation p = 0.000" in text
    assert "\n  worse\n" in ended(compare, old, worse, code=1).stdout
    ended(compare, old, worse, metric="evaluation")
    few = "at this P a power of 80 % takes 1,000 seeds or more an environment\n  no evidence\n"
    assert few in ended(compare, old, same).stdout
    refused("two folders", compare, old)
    write_job(tmp_path / "single", "A-v0", "ppo", 0, 1)
    ended(compare, old, tmp_path / "single", code=2)
    # trained for other lengths: not averaged
    write_jobs(old, ["C-v0"], "ppo", [300] * 4)
    write_jobs(worse, ["C-v0"], "ppo", [300] * 2)
    write_jobs(worse, ["C-v0"], "ppo", [300] * 2, first=2, steps=2000)
    assert "one length: C-v0" in ended(compare, old, worse, code=1).stdout
    # two algorithms of one folder
    write_jobs(better, ["A-v0"], "slow", range(1, 6))
    ended(compare, better, algorithm=("ppo", "slow"), code=1)
    assert "one length: B-v0" in ended(compare, better, algorithm=("slow", "ppo")).stdout
    # a new version that breaks is not good
    write_job(better, "A-v0", "ppo", 5, 1, status="failed")
    lost = "two finished seeds of one length\n"
    text = ended(compare, old, better, code=1).stderr
    assert text == f"B lacks C-v0 ppo: {lost}B lacks A-v0 seed 5: failed\n"
    ended(compare, old, better, env_ids=two, code=1)  # for the failed one alone
    assert ended(compare, better, same, code=1).stderr == f"B lacks A-v0 slow: {lost}"
