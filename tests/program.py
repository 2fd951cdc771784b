"""What the tests of scripts as programs share."""

import csv
import gc
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent


def rows(folder: Path) -> list[list[str]]:
    """episodes.csv without its seconds."""
    with open(folder / "episodes.csv") as file:
        return [[step, ret, length] for step, _, ret, length in csv.reader(file)]


def returns(folder: Path) -> list[float]:
    """Of a run's training episodes."""
    return [float(score) for _, score, _ in rows(folder)[1:]]


def scalars(folder: Path, timed: bool = False) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of each tag; of how long things took only if `timed`."""
    files = sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    with tempfile.TemporaryDirectory() as ordered:  # by name; those of one second would not be
        for i, path in enumerate(files):
            Path(ordered, f"events.out.tfevents.{i:04}").symlink_to(path.resolve())
        events = EventAccumulator(ordered, size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if timed or tag != "charts/SPS"]
    return {tag: sorted((e.step, e.value) for e in events.Scalars(tag)) for tag in tags}


def status(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["status"]


def content(folder: Path) -> dict:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def installed(monkeypatch, **packages: bool):
    """As if these packages were there, or not."""
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: packages.get(name, plain(name, *a)) or None
    )
    for name, there in packages.items():
        if not there:
            monkeypatch.setitem(sys.modules, name, None)


class Waits(TorchDispatchMode):
    """Notes what a host would have to wait for."""

    def __init__(self):
        super().__init__()
        self.found, self.calls = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, self.calls = function.overloadpacket.__name__, self.calls + 1
        if name in ("_local_scalar_dense", "nonzero", "equal", "item", "unique", "masked_select"):
            self.found.append(name)
        if name == "index" and any(
            x is not None and x.dtype == torch.bool for x in (args[1] if len(args) > 1 else ())
        ):
            self.found.append("a mask as an index")
        return function(*args, **(kwargs or {}))


class Toy:
    """What the script needs of EnvPool's Atari. Environment i has games of two lives of 3 + i % 3
    steps, and pays i + t in the t-th step of a game; `limit` truncates a game after that many."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)
    limit, made = 1000, []

    def __init__(self, name, *, num_envs, seed, **config):
        assert len(seed) == num_envs
        Toy.made.append({"name": name, "seed": seed, **config})
        self.pixels = np.stack(
            [np.random.default_rng(s).integers(0, 256, (4, 84, 84)) for s in seed]
        )
        self.number, self.life = np.arange(num_envs), 3 + np.arange(num_envs) % 3
        self.t, self.over = np.zeros(num_envs, int), np.zeros(num_envs, bool)

    def obs(self):
        return (self.pixels + 7 * self.t[:, None, None, None]).astype(np.uint8)

    def reset(self):
        return self.obs(), {}

    def step(self, actions):
        assert actions.shape == self.t.shape
        assert all(self.action_space.contains(a) for a in actions)
        junk = self.over
        self.t[junk & self.game_over()] = 0
        self.t[~junk] += 1
        truncated = ~junk & (self.t >= self.limit)
        self.over = ~junk & ((self.t % self.life == 0) | truncated)
        raw = np.where(junk, 0, self.number + self.t).astype(np.float32)
        terminated = self.over & ~truncated
        info = {"reward": raw, "terminated": (terminated & self.game_over()).astype(np.int32)}
        return self.obs(), np.sign(raw), terminated, truncated, info

    def render(self, env_ids):
        return self.obs()[env_ids, -1:]

    def game_over(self):
        return (self.t >= 2 * self.life) | (self.t >= self.limit)

    def close(self):
        pass


def assert_same(a, b):
    assert type(a) is type(b) or {type(a), type(b)} == {list, tuple}
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def in_a_fork(function, *args) -> int:
    """Call a function in a copy of this process: a program without the seconds of its imports. Its
    exit status, or less than 0: the signal that ended it. Nothing may draw here or there: OpenGL's
    threads do not live through a fork, and whoever waits for them waits for ever."""

    def called():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGALRM):  # not what others left: pytest, a library
            signal.signal(number, signal.SIG_DFL)
        tqdm.set_lock(threading.RLock())  # its own is shared with this copy, and dies locked
        gc.disable()  # an EnvPool ends its threads, which are not here
        function(*args)

    gc.collect()
    process = multiprocessing.get_context("fork").Process(target=called)
    process.start()
    process.join(300)
    ended = process.exitcode
    process.kill()
    process.join()
    assert ended is not None, "it hangs"
    return ended


def train_until_killed(script: str, target: str, call: int, argv: list[str], *numbers: int) -> int:
    """Train in another process, which in the given call of a function sends itself these signals,
    SIGKILL by default; its exit status."""

    def train():
        module, numbers_ = importlib.import_module(script), numbers or (signal.SIGKILL,)
        *path, name = target.split(".")
        owner = torch if target == "torch.save" else getattr(module, path[0]) if path else module
        plain, calls = getattr(owner, name), itertools.count(1)

        def spy(*args, **kwargs):
            if next(calls) == call:
                if target == "torch.save":  # half a checkpoint reaches the disk
                    whole = io.BytesIO()
                    plain(args[0], whole)
                    Path(args[1]).write_bytes(whole.getvalue()[: whole.tell() // 2])
                for number in numbers_:
                    os.kill(os.getpid(), number)
            return plain(*args, **kwargs)

        setattr(owner, name, spy)
        module.train(module.parse_args(argv))

    return in_a_fork(train)


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def end_of(*processes: subprocess.Popen) -> list[int]:
    """Exit codes."""
    try:
        return [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
