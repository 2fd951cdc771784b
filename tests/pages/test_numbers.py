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

from benchmark import data
from benchmark.published import HERE, RESULTS, curves, docs, index, superseded, tables


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
