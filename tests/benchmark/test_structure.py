"""benchmark/: a general harness, and a room beside it for what is of this project alone."""

import os
import shutil
import subprocess
import sys

from harness import ROOT, TOY

ALONE = """
from pathlib import Path
from benchmark.report import report
from benchmark.run import run

run(["A-v0"], "python toy.py", num_seeds=2, runs_dir=Path("runs"), eval_episodes=2)
report([Path("runs")], Path("out"), scales=Path("scales.csv"))
"""


def test_the_harness_works_without_this_projects_scripts_and_results(tmp_path):
    (tmp_path / "benchmark").mkdir()
    for path in (ROOT / "benchmark").glob("*.py"):
        shutil.copy(path, tmp_path / "benchmark")
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "scales.csv").write_text("env_id,low,high\nA-v0,0,10\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for words in (["-m", "benchmark", "--help"], ["-c", ALONE]):
        subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, check=True)
    assert "| A-v0 | 0.00 | 10.0 |" in (tmp_path / "out" / "report.md").read_text()
