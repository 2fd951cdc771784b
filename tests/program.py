"""What the tests of scripts as programs share."""

import csv
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


def run(script, *argv, cwd=None, **kwargs):
    return subprocess.run(
        [sys.executable, str(script), *argv], cwd=cwd, capture_output=True, text=True, **kwargs
    )


def rows(folder: Path) -> list[list[str]]:
    """episodes.csv without its seconds."""
    with open(folder / "episodes.csv") as file:
        return [[step, ret, length] for step, _, ret, length in csv.reader(file)]


def scalars(folder: Path, timed: bool = False) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard has of each tag; of how long things took only if `timed`."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    if not timed:
        tags = [tag for tag in tags if not re.match("charts/(SPS|share_)", tag)]
    return {tag: sorted((e.step, e.value) for e in events.Scalars(tag)) for tag in tags}


def status(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["status"]


def write_checkpoint(folder: Path, content: dict):
    """As the scripts do: torch's file and its digest."""
    file = io.BytesIO()
    torch.save(content, file)
    data = file.getvalue()
    (folder / "checkpoint.pt").write_bytes(data + hashlib.sha256(data).digest())


def content(folder: Path) -> dict:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def installed(monkeypatch, **packages: bool):
    """As if these packages were there, or not."""
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: packages.get(name, plain(name, *a)) or None
    )


class Clockwork(gym.Env):
    """Episodes of 10 steps that pay 1 each; `nan` says what is NaN in which episode and step."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    nan = ("nothing", 0, 0)

    def __init__(self, action_space):
        self.action_space, self.episode = action_space, -1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.np_random.uniform(-1, 1, 2), {}

    def step(self, action):
        self.t += 1
        what = self.nan[0] if self.nan[1:] == (self.episode, self.t) else None
        obs = np.full(2, np.nan if what == "an observation" else 0.5)
        return obs, np.nan if what == "a reward" else 1.0, self.t == 10, False, {}


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
