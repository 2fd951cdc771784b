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


@functools.cache
def versions(command: tuple) -> subprocess.CompletedProcess:
    """What a Python says of its packages: asked once, not before every job."""
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The harness looks ten times as often whether a job has ended."""

    def run(command, **more):
        if programs.VERSIONS in command:
            return versions(command)
        return subprocess.run(command, **more)

    clock = SimpleNamespace(**vars(time))
    clock.sleep = lambda seconds: time.sleep(seconds / 10)
    monkeypatch.setattr(programs, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys.modules["benchmark.run"], "time", clock)


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A folder to work in, with a toy program."""
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TOY)
    return tmp_path
