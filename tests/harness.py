"""What the tests of the harness share: its commands, called in this process, which saves their
imports; a toy program that they train; runs as programs leave them."""

import contextlib
import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOY = (ROOT / "tests" / "harness_toy.py").read_text()
HEAD = "global_step,seconds,return,length\n"
SEVENS = [7.0] * 39


def ended(call: Callable, *args, code: int = 0, **more) -> subprocess.CompletedProcess:
    """What a call wrote, which ends with this exit code, or returns if that is 0."""
    out, err, found = io.StringIO(), io.StringIO(), 0
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            call(*args, **more)
        except SystemExit as end:
            found = end.code or 0
            if isinstance(found, str):
                print(found, file=sys.stderr)
                found = 1
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    assert found == code, out.getvalue() + err.getvalue()
    return subprocess.CompletedProcess(args, found, out.getvalue(), err.getvalue())


def refused(says: str, call: Callable, *args, **more):
    """The call ends with exit code 2 and one line, which says this."""
    text = ended(call, *args, code=2, **more).stderr
    assert text.startswith("benchmark: ")
    assert text.count("\n") == 1, text
    assert says in text


def background(verb: str, **flags) -> subprocess.Popen:
    """`python -m benchmark` in a process of its own, which writes to out.txt. env_ids=["A", "B"] is
    --env-ids A B, and dry_run=[] is --dry-run."""
    words = [sys.executable, "-m", "benchmark", verb]
    for name, value in flags.items():
        words.append(f"--{name.replace('_', '-')}")
        words += map(str, value if isinstance(value, list) else [value])
    out = open("out.txt", "a")  # noqa: SIM115
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env)


def wait_for(condition: Callable, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def lines(name: str) -> list[list[str]]:
    """Of starts.txt or ends.txt, which toy programs write."""
    path = Path(name)
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def write_run(folder: Path, seed: object, returns: Iterable[float] = SEVENS, step: int = 1, **info):
    """A run as a script leaves it."""
    folder.mkdir(parents=True)
    args = {"env_id": "A-v0", "total_timesteps": 100}
    content = {"script": "ppo.py", "seed": seed, "status": "finished", "args": args} | info
    (folder / "run.json").write_text(json.dumps(content))
    rows = [f"{k * step},{k},{value!r},1\n" for k, value in enumerate(returns, 1)]
    (folder / "episodes.csv").write_text("".join([HEAD, *rows]))


def write_job(
    root: Path, env_id: str, script: str, seed: int, level: float, status: str = "finished",
    steps: int = 1000, evaluation: tuple = (), variant: str = "default", **more,
):  # fmt: skip
    """A job whose training returns rise from 0 to the level and stay there: its score."""
    folder = root / env_id / script / f"{variant}-s{seed}"
    job = {"env_id": env_id, "script": script, "variant": variant, "seed": seed} | more
    if status == "missing":
        folder.mkdir(parents=True)
    else:
        returns = [min(k / 100, 1) * level for k in range(200)]
        info = {"git_commit": "abc", "hardware": {"cpu": "Z80", "gpu": None}, "wall_seconds": 7200}
        info |= {"args": {"env_id": env_id, "total_timesteps": steps}, "status": status}
        write_run(folder / "run", seed, returns, steps // 200, script=f"{script}.py", **info)
    (folder / "job.json").write_text(json.dumps(job))
    if evaluation:
        (folder / "evaluation.json").write_text(json.dumps({"returns": evaluation}))


def table(path: Path | str) -> list[dict]:
    with open(path) as file:
        return list(csv.DictReader(file))


def told(path: Path | str) -> dict:
    return json.loads(Path(path).read_text())


def digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
