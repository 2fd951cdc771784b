"""benchmark/: a general harness, and a room beside it for what is of this project alone."""

import os
import shutil
import subprocess
import sys

from harness import ROOT, TOY
from program import folded

HARNESS = ROOT / "benchmark"
ALONE = """
import importlib, sys
from pathlib import Path
from benchmark.report import report
from benchmark.run import run

for name in sys.argv[1:]:
    importlib.import_module(f"benchmark.{name}")
run(["A-v0"], "python toy.py", num_seeds=2, runs_dir=Path("runs"), eval_episodes=2)
report([Path("runs")], Path("out"), scales=Path("scales.csv"))
"""


def test_the_harness_works_without_this_projects_scripts_and_results(tmp_path):
    names = [path.stem for path in HARNESS.glob("[a-z]*.py")]
    assert len(names) > 10
    (tmp_path / "benchmark").mkdir()
    for path in HARNESS.glob("*.py"):
        shutil.copy(path, tmp_path / "benchmark")
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "scales.csv").write_text("env_id,low,high\nA-v0,0,10\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", ALONE, *names]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert "| A-v0 | 0.00 | 10.0 |  |" in (tmp_path / "out" / "report.md").read_text()


def test_one_line_says_one_thing():
    paths = [path for path in HARNESS.rglob("*.py") if not path.stem.startswith("gpu_")]
    assert len(paths) > 20
    assert {path: folded(path.read_text()) for path in paths} == {path: [] for path in paths}
    lines = ("a, b = [], 1", "x = f', {y}' * (y != 0)", "x = y * bool(z)", "x = y * (not z)")
    for line in (*lines, "x = 's' * (n > 1)", "x = y * (a and b)"):
        assert len(folded(line)) == 1
    assert folded("a, b = pair\na, *b = *c, 1\nx = 2 * y\nx = [0] * n\n") == []
