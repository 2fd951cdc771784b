"""What every script promises: long runs do not grow, nothing listens or connects, nothing that is
read is run."""

import ast
import importlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from program import ROOT, in_a_fork, rows, scalars
from scripts import EVERY, POOLS, SMALL, WHOLE, train

pytestmark = pytest.mark.usefixtures("small")

# --- long runs ------------------------------------------------------------------------------------


def sample(script: str, folder: Path, iterations: int):
    """Train and write down, twenty times: iteration, resident bytes, open files, rows of
    episodes.csv, bytes of the event file."""
    module = importlib.import_module(script)
    samples, plain = [], module.Run.log

    def log(run, metrics):
        plain(run, metrics)
        if run.iteration % (iterations // 20) == 0:
            run.writer.flush()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(list(Path("/proc/self/fd").iterdir()))
            (events,) = run.folder.glob("events.*")
            rows = len((run.folder / "episodes.csv").read_text().splitlines()) - 1
            size = pages * os.sysconf("SC_PAGE_SIZE")
            samples.append([run.iteration, size, files, rows, events.stat().st_size])

    module.Run.log = log
    train(script, folder / "run", "--checkpoint-interval 20", iterations)
    (folder / "samples.json").write_text(json.dumps(samples))


# Measured: -0.3 to 0.2 MB per 1,000 iterations; in the first 300 a few pages more. The screens of
# Toy come and go by 10 MB; an iteration's are 1 MB, so that 1,000 that stay would be 900 MB.
LONG = [
    ("ppo", 300, 10),
    *(
        pytest.param(script, 2000, 1, marks=pytest.mark.slow)
        for script in ("ppo", "ppo_continuous_action", *WHOLE)
    ),
    *(pytest.param(script, 200, 200, marks=pytest.mark.slow) for script in POOLS),
]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize(("script", "iterations", "bound"), LONG)
def test_a_long_run_does_not_grow(script, iterations, bound, tmp_path):
    """`bound`: MB per 1,000 iterations, of the median slope between two samples after the first
    quarter."""
    assert in_a_fork(sample, script, tmp_path, iterations) == 0
    samples = np.array(json.loads((tmp_path / "samples.json").read_text()))
    at, memory, files, episodes, events = samples[5:].T
    pairs = itertools.combinations(range(len(at)), 2)
    slope = np.median([(memory[j] - memory[i]) / (at[j] - at[i]) for i, j in pairs])
    assert slope * 1000 < bound * 1e6
    assert set(files) == {files[0]}
    growth = np.diff(events)
    assert growth.max() < 1.05 * growth.min()
    points = {tag: len(found) for tag, found in scalars(tmp_path / "run", timed=True).items()}
    ends = {episodes[-1]}
    if hasattr(
        importlib.import_module(script).Run, "log_episodes"
    ):  # what one step ended is one point
        ends = {len({step for step, *_ in rows(tmp_path / "run")[1:]})}
    found = {points.pop(f"charts/episodic_{name}") for name in ("return", "length")}
    assert found == ends
    assert set(points.values()) == {iterations}
    assert len(points) <= 16


# --- security -------------------------------------------------------------------------------------

SOURCES = [ROOT / f"{script}.py" for script in SMALL] + sorted((ROOT / "benchmark").rglob("*.py"))
LOADERS = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "load"}
RUNNERS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pty.spawn"}


def dangers(text: str) -> Iterator[str]:
    """What in a program runs what it reads, or could."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & LOADERS:
                yield ast.unparse(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = given.get("weights_only") == "True" if name == "torch.load" else True
            flags = {given.get(flag, "False") for flag in ("shell", "allow_pickle")}
            if name in RUNNERS or not safe or flags != {"False"}:
                yield ast.unparse(node)


def test_nothing_that_is_read_is_run():
    assert {str(path): [*dangers(path.read_text())] for path in SOURCES} == {
        str(path): [] for path in SOURCES
    }
    for line in (
        "torch.load(path)", "torch.load(path, weights_only=False)", "import pickle",
        "from torch import load", "import cloudpickle as c", "np.load(path, allow_pickle=True)",
        "eval(text)", "exec(text)", "os.system(text)", "subprocess.run(text, shell=True)",
    ):  # fmt: skip
        assert list(dangers(f"def f():\n    {line}")) == [line]


@EVERY
def test_nothing_listens_or_connects(script, tmp_path):
    def watched(call, *args):
        def hook(event, _):
            if event in ("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.sendto"):
                os._exit(77)

        sys.addaudithook(hook)
        call(*args)
        assert not {"wandb", "huggingface_hub"} & sys.modules.keys()

    assert in_a_fork(watched, socket.create_connection, ("127.0.0.1", 9)) == 77  # it would be seen
    assert in_a_fork(watched, train, script, tmp_path / "run") == 0
