"""What run, speed and tune need to start programs: commands, provenance, locks, logs."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TextIO
from uuid import uuid4

VERSIONS = """
import json, platform
from importlib import metadata
found = {"python": platform.python_version()}
for package in ("torch", "gymnasium", "mujoco", "numpy", "envpool"):
    try:
        found[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


HERE = Path(__file__).resolve().parents[1]  # where `benchmark` is imported from


def refuse(message: str) -> NoReturn:
    """End on wrong input: a line on standard error, exit code 2."""
    print(f"benchmark: {message}", file=sys.stderr)
    raise SystemExit(2)


def at_least(least: float, **flags: float):
    """Refuse flags whose values are below `least`."""
    for name, value in flags.items():
        if not least <= value < math.inf:
            refuse(f"--{name.replace('_', '-')} {value}: must be at least {least}")


# --- commands -------------------------------------------------------------------------------------


def is_file(word: str) -> bool:
    """Whether a word of a command names a file; no error if it is too long for a name."""
    return os.path.isfile(word)  # noqa: PTH113


def split(command: str) -> list[str]:
    """A command's words. It refuses a command whose program or script is missing."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        refuse(f"--command {command!r}: {error}")
    at = script_at(words)
    if not words or (at is not None and not is_file(words[at])):
        refuse(f"--command {command!r}: {words[at] if words else 'it'} does not exist")
    if shutil.which(executable(words)[0]) is None:
        refuse(f"--command {command!r}: there is no program {words[0]}")
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


def env_workers(words: list[str]) -> int:
    """How many processes or threads a command's --env-workers asks for; 1 if it asks for none."""
    text = " ".join(words)
    told = re.findall(r"(?:^| )--env[-_]workers[= ](\d{1,9})(?= |$)", text)
    return max(1, int(told[-1])) if told else 1


def warn_of_cores(words: list[str], workers: int):
    """Warn if `workers` jobs of this command want more cores than there are."""
    each = env_workers(words)
    cores = len(os.sched_getaffinity(0))
    if each > 1 and workers * each > cores:
        print(
            f"warning: --workers {workers} times --env-workers {each} want {workers * each} cores, "
            f"and there are {cores}",
            file=sys.stderr,
        )


def kill_group(leader: int):
    """End a process that leads a session of its own, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def episodes_told(text: str) -> list[float]:
    """The returns that a script's --evaluate prints."""
    found = re.findall(r"eval_episode=\d+, episodic_return=(\S+)", text)
    return [float(episodic_return) for episodic_return in found]


def how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def provenance(words: list[str], environment: Mapping[str, str] = os.environ) -> dict:
    """What a reader needs to believe or repeat a run of this command, which is about to start.

    Commit and source are those of its script. Versions are those of its Python, {} if it names
    none. `processes` is the number that torchrun's flags ask for, None if only torchrun knows it.
    What is not known is None.
    """

    def said(*command: str) -> str | None:
        with contextlib.suppress(OSError, ValueError):
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            return None if done.returncode else done.stdout.strip()

    at = script_at(words)
    before = words[:at]
    source = None if at is None else Path(words[at]).resolve()
    git = "git", "--no-optional-locks", "-C", str(source.parent if source else os.devnull)
    changed = said(*git, "status", "--porcelain")
    cpu = platform.processor()
    versions = {}
    gpus = None
    with contextlib.suppress(OSError, IndexError):
        cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    for word in before:
        if re.fullmatch(r"python[\d.]*", Path(word).name):
            versions = json.loads((said(word, "-c", VERSIONS) or "{}").splitlines()[-1])
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown not in ("", "-1"):
        query = "nvidia-smi", "--query-gpu=name", "--format=csv,noheader"
        gpus = (shown and said(*query, f"--id={shown}")) or said(*query)  # a GPU's part has no id
    sizes = re.findall(r"--(?:nproc[-_]per[-_]node|nnodes)[= ](\S+)", " ".join(before))
    gpu = ", ".join(gpus.splitlines()) if gpus else None
    return {
        "versions": versions,
        "git_commit": said(*git, "rev-parse", "HEAD"),
        "git_dirty": None if changed is None else bool(changed),
        "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest() if source else None,
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu},
        "processes": math.prod(map(int, sizes)) if all(map(str.isdigit, sizes)) else None,
    }


# --- files and words ------------------------------------------------------------------------------


def plain_file(path: str, flags: int) -> int:
    """An opener for open(): OSError if the path leads to no plain file. Reading a pipe would wait
    for ever, and a device would never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"no plain file: {path}")
    return descriptor


def no_link(path: str, flags: int) -> int:
    """An opener for writing plain files. It follows no link, because a link may lead anywhere."""
    if Path(path).is_symlink():
        raise OSError(f"a link, which is not followed: {path}")
    return plain_file(path, flags | os.O_NOFOLLOW)


def read_bytes(path: Path, most: int) -> bytes:
    """A plain file's content; ValueError if it has more bytes than `most`."""
    with open(path, "rb", opener=plain_file) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most:,} bytes")
    return content


def lock(path: Path, wait: bool = False) -> TextIO | None:
    """The file, open and locked until it is closed; None if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", opener=no_link)  # noqa: SIM115, the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def locked(folder: Path) -> bool:
    """Whether a process of this job lives. If the lock can't be opened, no process holds it."""
    try:
        file = lock(folder / "lock")
    except OSError:
        return False
    if file:
        file.close()
    return file is None


def write_bytes(path: Path, content: bytes):
    """Write a file whole or not at all. A link there is replaced, not followed."""
    temporary = path.with_name(f"{path.name}.{uuid4().hex}")  # two commands may write it at once
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def strict(value: object) -> object:
    """A value as JSON can hold it, with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: strict(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [strict(own) for own in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: dict):
    """Write a JSON file whole or not at all."""
    text = json.dumps(strict(content), indent=2, allow_nan=False)
    write_bytes(path, f"{text}\n".encode())


def remove(path: Path):
    """Remove a folder with all that is in it, a file, or a link but not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def tail(path: Path, lines: int = 6) -> list[str]:
    """A text file's last lines that hold anything; none if it can't be read."""
    try:
        with open(path, "rb", opener=plain_file) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 20_000))
            text = file.read(20_000).decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def last_word(path: Path) -> str:
    """The last line of a log. If the log ends with a frame, as tyro's errors do, it is the text in
    the frame, up to its first line across."""
    lines = tail(path, 40)
    if lines and lines[-1].startswith("╰"):
        top = max((i for i, line in enumerate(lines) if line.startswith("╭")), default=-1)
        inside = itertools.takewhile(lambda line: "──" not in line, lines[top + 1 :])
        return " ".join(line.strip("│ ") for line in inside)
    return lines[-1].strip() if lines else ""


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def aligned(rows: list[list[str]], left: Iterable[int] = (0,)) -> str:
    """Rows of cells as lines. The columns in `left` are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        line = (c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(cells))
        lines.append("  " + "  ".join(line).rstrip())
    return "\n".join(lines)
