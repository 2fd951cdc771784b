"""The policies that the repository carries play as well as their table says."""

import importlib

import numpy as np
import pytest

from benchmark.published.policies import POLICIES

ROWS = [
    [cell.strip(" `") for cell in line.strip("|\n ").split("|")]
    for line in (POLICIES / "README.md").read_text().splitlines()
    if line.startswith("| ") and "`" in line
]


def test_every_folder_is_in_the_table():
    folders = [path.name for path in POLICIES.iterdir() if path.is_dir()]
    assert sorted(row[0] for row in ROWS) == sorted(folders)
    assert len(folders) >= 6


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_it_plays(row, capsys):
    env_id, script, arguments, *_, score = row
    mean = float(score.split()[0].replace(",", ""))
    module = importlib.import_module(script.removesuffix(".py"))
    folder = POLICIES / env_id
    assert sum(path.stat().st_size for path in folder.glob("*.pt")) < 1_000_000
    flags = ["--evaluate", str(folder), "--eval-episodes", "2", "--no-cuda"]
    if "env_id=" in arguments:  # a package that need not be there
        named = arguments.split("env_id=")[1].split("`")[0]
        pytest.importorskip(named.split(":")[0])
        flags += ["--env-id", named]
    returns = module.evaluate(module.parse_args(flags))
    # another processor rounds otherwise, and episodes differ: most of the score, not its digits
    assert np.mean(returns) > 0.7 * mean > 0
