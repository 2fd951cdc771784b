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

from benchmark import compare, data
from benchmark.published import HERE, RESULTS, ROOT, curves, docs, index, superseded, tables
from benchmark.published.lists import CLIPPED, EIGHT, HARD, MUJOCO, SCRIPTS
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
    assert {json.loads(x.read_text())["git_commit"][:7] for x in jsons} == set(
        row["commit"].split()
    )


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


def test_a_row_of_a_superseded_run_has_its_scores(tmp_path):
    kept = RESULTS / "Hopper-v4/ppo_cma"
    folder = tmp_path / "runs/Hopper-v4/ppo_cma"
    folder.mkdir(parents=True)
    for path in kept.glob("default-s*.[jc]*"):
        (folder / path.name).write_bytes(path.read_bytes())
    superseded.write(tmp_path / "runs", tmp_path)
    rows, runs = superseded.read(tmp_path), data.find([folder])
    assert [run.seed for run in rows] == [1, 2, 3, 4, 5]
    for row, run in zip(rows, runs, strict=True):
        assert (row.env_id, row.algorithm, row.commit) == (
            run.env_id,
            run.algorithm,
            run.commit[:7],
        )
        assert row.info["global_step"] == run.info["global_step"]
        for metric in ("training", "evaluation"):
            assert row.score(metric) == pytest.approx(run.score(metric), abs=1e-4)


# --- numbers in sentences -------------------------------------------------------------------------
EXPECTED = [  # of a docstring: what stands around the number, and what it is of which runs
    ("ppo", r"Expect (\S+) on CartPole", "CartPole-v1", "default", "evaluation", np.median),
    ("ppo_continuous_action", r"Expect (\S+) over", "HalfCheetah-v4", "default", "training", iqm),
    (
        "ppo_continuous_action",
        r"(\S+) of the final",
        "HalfCheetah-v4",
        "default",
        "evaluation",
        iqm,
    ),
    ("ppo_cma", r"Expect (\S+) over the last", "Humanoid-v4", "anneal-lr", "training", iqm),
    ("ppo_cma", r"(\S+) of the final", "Humanoid-v4", "anneal-lr", "evaluation", iqm),
    ("ppo_kl_adaptive", r"Expect (\S+) on Hopper", "Hopper-v4", "default", "training", np.median),
    ("ppo_kl_adaptive", r"and (\S+) to \S+ on Half", "HalfCheetah-v4", "1M", "training", np.min),
    ("ppo_kl_adaptive", r"to (\S+) on HalfCheetah", "HalfCheetah-v4", "1M", "training", np.max),
    ("ppo_lstm", r"Expect (\S+) on", "CartPoleNoVel-v1", "default", "evaluation", iqm),
    ("ppo_pixels", r"Expect (\S+) over", "MiniGrid-DoorKey-5x5-v0", "default", "training", iqm),
    ("ppo_atari_multigpu", r"Expect (\S+) on Pong", "Pong-v5", "default", "training", iqm),
    ("ppo_atari_multigpu", r"and (\S+) on Breakout", "Breakout-v5", "default", "training", iqm),
]


@pytest.mark.parametrize(("script", "words", "env_id", "variant", "metric", "of"), EXPECTED)
def test_what_a_docstring_expects(script, words, env_id, variant, metric, of):
    """To two digits."""
    text = " ".join((ROOT / f"{script}.py").read_text().split('"""')[1].split())
    (number,) = re.findall(words, text)
    scores = [run.score(metric) for run in curves.runs(env_id, script, variant)]
    assert float(number.replace(",", "")) == float(f"{of(np.array(scores)):.2g}")


def test_numbers_to_search_for_are_in_the_index():
    """Pages show the command `grep 'NUMBER' .../INDEX.csv`."""
    pages = [*docs.PAGES, HERE / "README.md"]
    shown = re.findall(r"grep '([\d,]+)'", "".join(page.read_text() for page in pages))
    lines = index.INDEX.read_text().splitlines()
    assert len(shown) >= 3
    for number in shown:
        assert any(line.startswith("README.md,scores,") and number in line for line in lines)


def test_who_is_ahead_for_certain():
    """What README says below its scores: p below 0.05 after Holm's correction for 16 tests."""
    clipped, *others = SCRIPTS
    groups = {(g.algorithm, g.env_id): g for g in curves.committed(SCRIPTS, MUJOCO)}
    found = {}
    for name, env_id in product(others, MUJOCO):
        pair = [
            groups[name, env_id].scores("evaluation"),
            groups[clipped, env_id].scores("evaluation"),
        ]
        judged = compare.judge([pair[0]], [pair[1]])
        found[name.split()[0], env_id.split("-")[0]] = judged.p, judged.probability > 0.5
    ahead, alive = set(), True
    for k, (pair, (p, above)) in enumerate(sorted(found.items(), key=lambda item: item[1])):
        alive = alive and p * (len(found) - k) < 0.05
        if alive:
            assert above  # the clipped one is the better one
            ahead.add(pair)
    assert "ahead of both others on HalfCheetah and Ant" in docs.PAGES[0].read_text()
    assert "of KL-adaptive PPO on Hopper and Walker2d" in docs.PAGES[0].read_text()
    both = {
        (name, env) for name in ("ppo_kl_adaptive", "ppo_cma") for env in ("HalfCheetah", "Ant")
    }
    assert ahead == both | {("ppo_kl_adaptive", "Hopper"), ("ppo_kl_adaptive", "Walker2d")}


def test_means_over_dm_control():
    ours, theirs = (cell.split()[1] for cell in cells("control", "all")[2:4])
    for page in (docs.PAGES[0], docs.DOCS / "measurements.md"):
        (line,) = re.findall(rf".*behind CleanRL's.*{ours}.*", page.read_text())
        assert theirs in line


def test_runs_without_a_command_are_as_many_as_the_page_says():
    kept = [run for run in curves.read() if run.place.suffix == ".json"]
    without = sum("command" not in run.info for run in kept)
    assert f"({without} of the first runs have none" in (HERE / "README.md").read_text()


EXPLORED = f"{CLIPPED} explore-defaults", "change explore-entropy-falls"
STOP, BONUS = (f"{CLIPPED} no-target-kl", CLIPPED), (CLIPPED, f"{CLIPPED} ent-coef-0.01")
JUDGED = [  # of what_matters.md: a sentence with P and p, before and after, tasks, metric
    (r"P is (\S+) on Humanoid \(5,235, not 1,086; p = (\S+)\)", STOP, EIGHT[6:7], "evaluation"),
    (r"and (\S+) on Ant \(4,638, not 3,739; p = (\S+)\)", STOP, ["Ant-v4"], "evaluation"),
    (r"Hopper's (\S+) \(p = (\S+)\)", STOP, ["Hopper-v4"], "evaluation"),
    (r"Walker2d's (\S+) \(p = (\S+)\)", STOP, ["Walker2d-v4"], "evaluation"),
    (r"By training returns P is (\S+) over all eight \(p = (\S+)\)", STOP, EIGHT, "training"),
    (
        r"On the eight alone P is (\S+) \(.{0,20}p = (\S+)\) by the final",
        BONUS,
        EIGHT,
        "evaluation",
    ),
    (r"policies, and (\S+) \(.{0,20}p = (\S+)\) by training", BONUS, EIGHT, "training"),
    (r"P = (\S+), p = (\S+)\), and level", EXPLORED, HARD, "evaluation"),
]


@pytest.mark.parametrize(("words", "pair", "env_ids", "metric"), JUDGED)
def test_what_matters_says_what_compare_says(words, pair, env_ids, metric):
    found = [curves.committed([name], env_ids) for name in pair]
    _, judged = compare.effect(*found, metric)
    text = " ".join((docs.DOCS / "what_matters.md").read_text().split())
    ((probability, p),) = re.findall(words, text)
    assert (probability, float(p)) == (f"{judged.probability:.2f}", float(f"{judged.p:.2g}"))
