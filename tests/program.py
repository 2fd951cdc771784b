"""What the tests of scripts as programs share."""

import csv
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def run(script, *argv, cwd=None, **kwargs):
    return subprocess.run(
        [sys.executable, str(script), *argv], cwd=cwd, capture_output=True, text=True, **kwargs
    )


def rows(folder: Path) -> list[list[str]]:
    """episodes.csv without its seconds."""
    with open(folder / "episodes.csv") as file:
        return [[step, ret, length] for step, _, ret, length in csv.reader(file)]


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            if key not in ("seconds", "logs"):
                assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


KILLER = """
import importlib, io, os, signal, sys
import torch
sys.path.insert(0, sys.argv[1])
script = importlib.import_module(sys.argv[2])
target, call, argv = sys.argv[3], int(sys.argv[4]), sys.argv[5:]
*path, name = target.split(".")
owner = torch if target == "torch.save" else getattr(script, path[0]) if path else script
plain, calls = getattr(owner, name), 0

def spy(*args, **kwargs):
    global calls
    calls += 1
    if calls == call:
        if target == "torch.save":  # half a checkpoint reaches the disk
            content, file = args
            whole = io.BytesIO()
            plain(content, whole)
            file.write(whole.getvalue()[: whole.tell() // 2])
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args, **kwargs)

setattr(owner, name, spy)
script.train(script.parse_args(argv))
"""


def train_until_killed(script: str, target: str, call: int, argv: list[str]) -> int:
    """Train in another process, killed in the given call of a function; its exit status."""
    command = [sys.executable, "-c", KILLER, str(ROOT), script, target, str(call), *argv]
    return subprocess.run(command).returncode
