"""What the verbs share to start programs: commands, provenance, locks, files, words."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TextIO
from uuid import uuid4

VERSIONS = """
import json, platform
from importlib import metadata
names = "torch", "gymnasium", "mujoco", "numpy", "envpool"
there = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
versions = {name: there[name] for name in names if name in there}
print(json.dumps({"python": platform.python_version()} | versions))
"""


def refuse(message: str) -> NoReturn:
    """End on wrong input: a line on standard error, exit code 2."""
    print(f"benchmark: {message}", file=sys.stderr)
    raise SystemExit(2)


def at_least(least: float, **flags: float):
    """Refuse flags whose values are below `least`."""
    for name, value in flags.items():
        if not least <= value < math.inf:
            refuse(f"--{name.replace('_', '-')} {value}: must be at least {least}")


def split(command: str) -> list[str]:
    """A command's words. It refuses a command whose program or script is missing."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        refuse(f"--command {command!r}: {error}")
    at = script_at(words)
    if at is not None and not Path(words[at]).is_file():
        refuse(f"--command {command!r}: {words[at]} does not exist")
    if not words or shutil.which(executable(words)[0]) is None:
        refuse(f"--command {command!r}: there is no such program")
    return words


def script_at(words: list[str]) -> int | None:
    """The index of the script among a command's words; None if there is none."""
    return next((i for i, word in enumerate(words) if word.endswith(".py")), None)


def executable(words: list[str]) -> list[str]:
    """A command's words with this Python, whatever `python` or `torchrun` is on the path."""
    ours = {"python": [], "python3": [], "torchrun": ["-m", "torch.distributed.run"]}
    return [sys.executable, *ours[words[0]], *words[1:]] if words[0] in ours else words


def given_twice(words: list[str], flags: Iterable[str]) -> str:
    """One of these flags that the command also has; empty if there is none."""
    own = {word.partition("=")[0].replace("_", "-") for word in words}
    return min(own & set(flags), default="")


def on_signals(stop: Callable[[int], None]):
    """Have SIGTERM and Ctrl-C call `stop` with their number. A second one ends this program."""
    numbers = signal.SIGTERM, signal.SIGINT

    def handler(number, frame):
        for own in numbers:
            signal.signal(own, signal.SIG_IGN)  # uv sends its copy of a Ctrl-C at once
        stop(number)
        time.sleep(0.5)
        for own in numbers:
            signal.signal(own, signal.SIG_DFL)

    for number in numbers:  # also if a shell's & made SIGINT ignored
        signal.signal(number, handler)


def played_returns(text: str) -> list[float]:
    """The returns that a script's --evaluate prints."""
    found = re.findall(r"eval_episode=\d+, episodic_return=(\S+)", text)
    return [float(episodic_return) for episodic_return in found]


def how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def provenance(words: list[str], environment: Mapping[str, str] = os.environ) -> dict:
    """What a reader needs to believe or repeat a run of this command, None for what isn't known.
    `git_dirty` says whether its script differs from the commit. Versions are those of its Python,
    {} if it names none."""

    def output(*command: str) -> str | None:
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            return None if done.returncode else done.stdout.strip()

    at = script_at(words)
    commit = dirty = sha256 = None
    if at is not None:
        source = Path(words[at]).resolve()
        sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
        git = "git", "-C", str(source.parent)
        commit = output(*git, "rev-parse", "HEAD")
        if commit:
            committed = output(*git, "rev-parse", f"HEAD:./{source.name}")
            dirty = committed != output(*git, "hash-object", source.name)
    cpu = platform.processor()
    with contextlib.suppress(OSError, IndexError):
        cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    gpus = None
    if environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        gpus = output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    versions = {}
    for word in words[:at]:
        if re.fullmatch(r"python[\d.]*", Path(word).name):
            versions = json.loads(output(word, "-c", VERSIONS) or "{}")
    gpu = ", ".join(gpus.splitlines()) if gpus else None
    return {
        "versions": versions,
        "git_commit": commit,
        "git_dirty": dirty,
        "source_sha256": sha256,
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu},
    }


def lock(path: Path) -> TextIO | None:
    """The file, open and locked until it is closed; None if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a")  # noqa: SIM115, the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def write_bytes(path: Path, content: bytes):
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{uuid4().hex}")  # two commands may write it at once
    temporary.write_bytes(content)
    temporary.replace(path)


def write_json(path: Path, content: dict):
    """Write a JSON file whole or not at all."""
    write_bytes(path, f"{json.dumps(content, indent=2)}\n".encode())


def tail(path: Path, lines: int = 6) -> list[str]:
    """A text file's last lines that hold anything; none if it isn't there."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [line for line in text.splitlines() if line.strip()][-lines:]


def last_word(path: Path) -> str:
    """The last line of a log that has a word, also of an error in a frame."""
    words = [line.strip("│ ") for line in tail(path, 40) if re.search(r"\w", line)]
    return words[-1] if words else ""


def duration(seconds: float) -> str:
    """As people write it: 4.2 s, 35 s, 12 min, 3 h 20 min."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    parts = [f"{hours} h"] if hours else []
    return " ".join([*parts, f"{minutes} min"] if minutes else parts)


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def aligned(rows: list[list[str]], left: Iterable[int] = (0,)) -> str:
    """Rows of cells as lines. The columns in `left` are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = (c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(cells))
        lines.append("  " + "  ".join(line).rstrip())
    return "\n".join(lines)
