"""This project's own numbers: commands, studies, and the makers of tables and figures."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results"
