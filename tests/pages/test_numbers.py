"""From a number on a page to its rows, and a few numbers computed by hand."""

import csv
import gzip
import json
import math
import re
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmark import compare, report
from benchmark.published import HERE, RESULTS, ROOT, curves, docs, index, tables
from benchmark.published.lists import CLIPPED, EIGHT, HARD, MUJOCO, SCRIPTS, TASKS
from benchmark.stats import iqm


def cells(block: str, first: str) -> list[str]:
    """The row of a table that begins with this text."""
    lines = tables.BLOCKS[block]().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {first}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def returns(stem: str) -> np.ndarray:
    """Of the training episodes of a committed run."""
    with gzip.open(RESULTS / f"{stem}.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",", skiprows=1)[:, 2]


def test_an_interval_of_five_seeds_by_hand():
    """Of all 3,125 resamples, not of some: 2.5% of these are below the ends, or above."""
    files = [RESULTS / f"Hopper-v4/ppo_kl_adaptive/1M-s{seed}.json" for seed in range(1, 6)]
    scores = [np.mean(json.loads(path.read_text())["evaluation"]) for path in files]
    middle = sorted(np.mean(sorted(drawn)[1:4]) for drawn in product(scores, repeat=5))
    low, high = middle[math.ceil(0.025 * 3125) - 1], middle[math.ceil(0.975 * 3125) - 1]
    assert cells("scores", "Hopper-v4")[3].endswith(f" [{low:,.0f}, {high:,.0f}]")


def test_training_returns_are_of_the_last_100_episodes():
    ends = [returns(f"Hopper-v4/ppo_cma/default-s{seed}")[-100:].mean() for seed in range(1, 6)]
    expected = f"**{np.mean(ends):,.0f}** ({min(ends):,.1f} to {max(ends):,.0f})"
    assert cells("cma-results", "Hopper-v4")[2] == expected


# --- from a number to its rows --------------------------------------------------------------------
def expanded(pattern: str) -> list[Path]:
    """The files that a shell makes of a field of INDEX.csv."""
    command = ["bash", "-c", f"printf '%s\\n' {pattern}"]
    lines = subprocess.check_output(command, cwd=HERE, text=True).splitlines()
    return [HERE / line for line in lines if line]


def test_the_index_is_up_to_date():
    assert index.text() == index.INDEX.read_text(), "run: python -m benchmark.published"


def test_from_a_cell_of_readme_to_its_ten_seeds():
    """By one grep, and without the code that made the table."""
    shown = re.search(r"\| HalfCheetah-v4, 1M \| (\S+)", docs.PAGES[0].read_text())[1]
    with open(index.INDEX) as file:
        found = [row for row in csv.DictReader(file) if row["page"] == "README.md"]
    (row,) = (row for row in found if row["value"].startswith(f"{shown} "))
    files = expanded(row["file"])
    tables_of, jsons = ([x for x in files if x.suffix == ending] for ending in (".gz", ".json"))
    assert len(tables_of) == len(jsons) == len(expanded(row["policy"])) == 10
    assert row["seeds"] == "201..210"
    scores = sorted(np.mean(json.loads(path.read_text())["evaluation"]) for path in jsons)
    assert f"{np.mean(scores[2:8]):,.0f}" == shown
    commits = {json.loads(path.read_text())["git_commit"][:7] for path in jsons}
    assert commits == {*row["commit"].split()}


def test_all_files_of_the_index_exist():
    with open(index.INDEX) as file:
        rows = list(csv.DictReader(file))
    fields = {row[name] for row in rows for name in ("file", "policy")}
    assert len(rows) > 500
    for path in expanded(" ".join(fields)):
        assert path.is_file(), path


def test_thinned_rows_have_the_last_100_episodes():
    thinned = [run for run in curves.read() if run.info.get("episodes")]
    assert len(thinned) > 100
    for run in thinned:
        assert len(run.returns) == 200 < run.info["episodes"]
        assert not run.place.with_suffix(".pt").exists()
        if run.info.get("final_return") is not None and run.status == "finished":
            last = run.score("training")
            assert last == pytest.approx(run.info["final_return"], abs=0.01 * abs(last) + 0.02)


# --- numbers in sentences -------------------------------------------------------------------------
LAST, FINAL = "training", "evaluation"
EXPECTED = [  # of a docstring: what stands around the number, and what it is of which runs
    ("ppo", r"Expect (\S+) on CartPole", "CartPole-v1", "default", FINAL, np.median),
    (CLIPPED, r"Expect (\S+) over", "HalfCheetah-v4", "default", LAST, iqm),
    (CLIPPED, r"(\S+) of the final", "HalfCheetah-v4", "default", FINAL, iqm),
    ("ppo_cma", r"Expect (\S+) over the last", "Humanoid-v4", "anneal-lr", LAST, iqm),
    ("ppo_cma", r"(\S+) of the final", "Humanoid-v4", "anneal-lr", FINAL, iqm),
    ("ppo_kl_adaptive", r"Expect (\S+) on Hopper", "Hopper-v4", "default", LAST, np.median),
    ("ppo_kl_adaptive", r"and (\S+) to \S+ on Half", "HalfCheetah-v4", "1M", LAST, np.min),
    ("ppo_kl_adaptive", r"to (\S+) on HalfCheetah", "HalfCheetah-v4", "1M", LAST, np.max),
    ("ppo_lstm", r"Expect (\S+) on", "CartPoleNoVel-v1", "default", FINAL, iqm),
    ("ppo_pixels", r"Expect (\S+) over", "MiniGrid-DoorKey-5x5-v0", "default", LAST, iqm),
    ("ppo_atari_multigpu", r"Expect (\S+) on Pong", "Pong-v5", "default", LAST, iqm),
    ("ppo_atari_multigpu", r"and (\S+) on Breakout", "Breakout-v5", "default", LAST, iqm),
]


@pytest.mark.parametrize(("script", "words", "env_id", "variant", "metric", "of"), EXPECTED)
def test_what_a_docstring_expects(script, words, env_id, variant, metric, of):
    """To two digits."""
    text = " ".join((ROOT / f"{script}.py").read_text().split('"""')[1].split())
    (number,) = re.findall(words, text)
    scores = [run.score(metric) for run in curves.runs(env_id, script, variant)]
    assert float(number.replace(",", "")) == float(f"{of(np.array(scores)):.2g}")


def test_small_numbers_of_pages():
    """Those to search for by grep, of runs without a command, of the means over dm_control."""
    text = "".join(page.read_text() for page in [*docs.PAGES, HERE / "README.md"])
    known = re.findall("^README.md,scores,.*", index.INDEX.read_text(), re.M)
    shown = re.findall(r"grep '([\d,]+)'", text)
    assert len(shown) >= 3 and all(any(x in line for line in known) for x in shown)
    kept = [run for run in curves.read() if run.place.suffix == ".json"]
    without = sum("command" not in run.info for run in kept)
    assert f"({without} of the first runs have none" in text
    ours, theirs = (cell.split()[1] for cell in cells("control", "with 3 seeds")[2:4])
    assert f"its mean is {ours}, CleanRL's {theirs}" in " ".join(text.split())


def judged(before: str, after: str, env_ids, metric: str) -> compare.Judgement:
    return compare.effect(*(curves.committed([x], env_ids) for x in (before, after)), metric)[1]


def certain(found: dict) -> tuple[list, list]:
    """The keys that are ahead, and behind, with a p below 0.05 after Holm's correction."""
    sure = dict(zip(found, report.holm([x.p for x in found.values()]) < 0.05, strict=True))
    ahead = [key for key, x in found.items() if sure[key] and x.probability > 0.5]
    return ahead, [key for key, x in found.items() if sure[key] and x.probability < 0.5]


def listed(names: list[str]) -> str:
    *most, last = (name.rpartition("-")[0] for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def test_who_is_ahead_for_certain():
    """What README says below its scores, of final policies."""
    clipped, *others = SCRIPTS
    pairs = {pair: judged(pair[0], clipped, [pair[1]], FINAL) for pair in product(others, MUJOCO)}
    ahead, behind = certain(pairs)
    kl, cma = (sorted(x for name, x in ahead if name == other) for other in others)
    assert kl == ["Ant-v4", "HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"]
    assert cma == ["Ant-v4", "HalfCheetah-v4"] and not behind
    says = "both others on HalfCheetah and Ant, and of KL-adaptive PPO on Hopper and Walker2d"
    assert says in " ".join(docs.PAGES[0].read_text().split())


def test_who_is_ahead_of_cleanrls_settings():
    """The same, of the rows that have both columns."""
    shown = [x for x in TASKS.items() if f"\n| {x[0]}, " in tables.scores()]
    both = [x for x in shown if curves.runs(*x, "cleanrl")]
    ahead, behind = certain({x: judged(f"{y} cleanrl", y, [x], FINAL) for x, y in both})
    text = " ".join(docs.PAGES[0].read_text().split())
    assert f"ahead of CleanRL's settings on {listed(ahead)}" in text
    assert not behind and len(both) == 10


EXPLORED = f"{CLIPPED} explore-defaults", "change explore-entropy-falls"
STOP, BONUS = (f"{CLIPPED} no-target-kl", CLIPPED), (CLIPPED, f"{CLIPPED} ent-coef-0.01")
JUDGED = [  # of what_matters.md: a sentence with P and p; before and after, tasks, metric
    (r"P is (\S+) on Humanoid \([^;]*; p = (\S+)\)", STOP, ["Humanoid-v4"], FINAL),
    (r"and (\S+) on Ant \([^;]*; p = (\S+)\)", STOP, ["Ant-v4"], FINAL),
    (r"Hopper's (\S+) \(p = (\S+)\)", STOP, ["Hopper-v4"], FINAL),
    (r"Walker2d's (\S+) \(p = (\S+)\)", STOP, ["Walker2d-v4"], FINAL),
    (r"returns P is (\S+) over all eight \(p = (\S+)\)", STOP, EIGHT, LAST),
    (r"alone P is (\S+) \(.{0,20}p = (\S+)\) by the final", BONUS, EIGHT, FINAL),
    (r"policies, and (\S+) \(.{0,20}p = (\S+)\) by training", BONUS, EIGHT, LAST),
    (r"P = (\S+), p = (\S+)\), and level", EXPLORED, HARD, FINAL),
]


@pytest.mark.parametrize(("words", "pair", "env_ids", "metric"), JUDGED)
def test_what_matters_says_what_compare_says(words, pair, env_ids, metric):
    text = " ".join((docs.DOCS / "what_matters.md").read_text().split())
    ((probability, p),) = re.findall(words, text)
    own = judged(*pair, env_ids, metric)
    assert (probability, float(p)) == (f"{own.probability:.2f}", float(f"{own.p:.2g}"))
