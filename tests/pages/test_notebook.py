"""docs/first_steps.ipynb runs from its first cell to its last, and does what it says."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from program import ROOT

from benchmark import data

BOOK = ROOT / "docs" / "first_steps.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """As a program, in a folder that looks like the clone."""
    shutil.copy(ROOT / "ppo.py", tmp_path)
    (tmp_path / "benchmark").symlink_to(ROOT / "benchmark")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells = json.loads(BOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    links = re.findall(r"\]\((\w+\.md)\)", "".join("".join(cell["source"]) for cell in cells))
    assert len(links) == sum((ROOT / "docs" / link).exists() for link in links) == 2
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert np.mean(names["scores"]) > 150
    assert len(names["frames"]) >= 5
    assert (names["actions"] == names["agent"].act(names["rows"])).all()
    runs = data.find([tmp_path / "runs" / "first_steps" / "study"])
    assert sorted(run.algorithm for run in runs) == ["ppo"] * 4 + ["ppo_relu"] * 4
    assert all(run.status == "finished" for run in runs)
