import functools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import TOY

import benchmark.run  # noqa: F401
from benchmark import programs

plain = functools.cache(lambda words: subprocess.run(words, capture_output=True, text=True))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The harness looks ten times as often whether a job has ended, and asks for versions once."""

    def run(words, **more):
        return plain(words) if programs.VERSIONS in words else subprocess.run(words, **more)

    clock = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(seconds / 10)})
    monkeypatch.setattr(programs, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys.modules["benchmark.run"], "time", clock)


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A folder to work in, with a toy program."""
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TOY)
    return tmp_path
