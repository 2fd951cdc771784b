"""Steps per second of training programs, side by side: `python -m benchmark speed`.

A program is measured from outside, so any that takes --total-timesteps will do. In each round every
program runs twice, once for few steps and once for more; what the longer run took beyond the
shorter one is the steady state, free of imports, compilation and the first iterations. What the
shorter one took beyond its steps at that pace is the start. A program's first run of all, with an
empty torch compile cache, gives its cold start. CPU time is of all processes of a program.

Steps are those asked for, or, where a program leaves a run.json (ours do), its `global_step`: our
scripts round down to whole iterations. For others let --warmup-steps be a multiple of a batch. Exit
code 2 means wrong arguments, too few steps for an iteration perhaps: more are tried.
"""

import contextlib
import csv
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Annotated

from tyro.conf import UseAppendAction

from benchmark import data, peers
from benchmark.programs import (
    aligned,
    at_least,
    executable,
    how_it_ended,
    provenance,
    refuse,
    script_at,
    split,
    tail,
)

COLUMNS = ("program", "round", "run", "steps", "cpu_seconds", "wall_seconds", "peak_mb")


# --- programs -------------------------------------------------------------------------------------


@dataclass
class Program:
    name: str
    command: str  # as given
    words: list[str]  # as run, from any folder


def program(name: str, command: str) -> Program:
    """A command whose files, as seen from here, have their whole paths."""
    words = [str(Path(w).resolve()) if Path(w).is_file() else w for w in split(command)]
    return Program(name, command, executable(words))


def named(text: str) -> tuple[str, str]:
    """NAME=COMMAND as both; the name is empty if there is none."""
    match = re.fullmatch(r"([\w.+-]+)=(.+)", text, re.DOTALL)
    return match.groups() if match else ("", text)


def stem(words: list[str]) -> str:
    """The script's name, or the program's."""
    return Path(words[script_at(words) or 0]).stem


def ours(commands: tuple[str, ...]) -> list[Program]:
    """The variants to measure. Without a name of its own, a variant has the script's and the flags
    that not all variants share."""
    programs = []
    pairs = [named(text) for text in commands]
    flags = [re.split(r"\s+(?=-)", command) for _, command in pairs]
    shared = set.intersection(*map(set, flags)) if len(pairs) > 1 else set(flags[0])
    for (name, command), mine in zip(pairs, flags, strict=True):
        own = [stem(split(command)), *(flag for flag in mine[1:] if flag not in shared)]
        programs.append(program(name or " ".join(own), command))
    return programs


def built_in(kind: str, command: str) -> Program:
    """sb3 or bare (peers.py), with the flags of one of our commands."""
    words = split(command)
    told = ["python", "benchmark/peers.py", kind, *words[script_at(words) :]]
    peer = [
        sys.executable,
        str(Path(peers.__file__)),
        kind,
        str(Path(words[script_at(words)]).resolve()),
    ]
    return Program(kind, shlex.join(told), [*peer, *told[4:]])


# --- a measurement --------------------------------------------------------------------------------


@dataclass
class Cost:
    """What a run, or the difference of two, took."""

    steps: int
    cpu: float  # seconds, of all its processes
    wall: float  # seconds
    memory: float  # MB, largest resident set

    def beyond(self, other: "Cost") -> "Cost":
        mine = (self.steps - other.steps, self.cpu - other.cpu, self.wall - other.wall)
        return Cost(*mine, self.memory)

    def rates(self) -> tuple[float, float]:
        """Steps per CPU-second, nan of a program that takes no CPU time, and per second."""
        return self.steps / self.cpu if self.cpu > 0 else math.nan, self.steps / self.wall


def resident(pid: int) -> int:
    """Resident bytes of a process and all below it; what they share counts for each."""
    total, pending = 0, [str(pid)]
    while pending:
        folder = Path("/proc", pending.pop())
        with contextlib.suppress(OSError):  # it just ended
            pages = int((folder / "statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
            for children in folder.glob("task/*/children"):
                pending += children.read_text().split()
    return total


@dataclass
class Bench:
    """Runs programs, each in an empty folder, with as many threads as told."""

    folder: Path  # of the compile caches
    threads: int

    def cache(self, name: str) -> Path:
        return self.folder / re.sub(r"\W", "_", name)

    def run(self, program: Program, steps: int, refusable: bool = False) -> Cost:
        """Run to the end; exits with the end of its log if it fails, unless it refuses so few steps
        (exit code 2) and may: then it has done none."""
        threads = {f"{lib}_NUM_THREADS": str(self.threads) for lib in ("OMP", "OPENBLAS", "MKL")}
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.cache(program.name))}
        path = {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
        words = [*program.words, "--total-timesteps", str(steps)]
        peak, ended = [0], threading.Event()

        def watch():
            peak.append(max(peak.pop(), resident(process.pid)))
            while not ended.wait(0.5):
                peak.append(max(peak.pop(), resident(process.pid)))

        with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log.txt", "w") as log:
            start = time.perf_counter()
            try:
                process = subprocess.Popen(
                    words, cwd=folder, env=os.environ | threads | cache | path,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                refuse(f"{program.command!r}: {error.strerror}")
            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                _, status, usage = os.wait4(process.pid, 0)
                wall = time.perf_counter() - start
                process.returncode = os.waitstatus_to_exitcode(status)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
            finally:
                ended.set()
                watcher.join()
            end = tail(Path(folder, "log.txt"), 15)
            eager = "going on eagerly" in Path(folder, "log.txt").read_text(errors="replace")
            refused = refusable and process.returncode == 2
            if (process.returncode or eager) and not refused:
                how = "does not compile" if eager else how_it_ended(process.returncode)
                print(f"benchmark: {program.name}: {how}:", *end, sep="\n", file=sys.stderr)
                raise SystemExit(1)
            told = [data.read_json(file) for file in Path(folder).rglob("run.json")]
            done = [run["global_step"] for run in told if run.get("global_step") is not None]
        # Without /proc that of its largest process, which where forks are cheap counts ours, too
        alone = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        memory = (peak[0] or alone) / 1e6
        cpu = usage.ru_utime + usage.ru_stime
        return Cost(0 if refused else max(done, default=steps), cpu, wall, memory)

    def start_cold(self, program: Program, warmup: int) -> tuple[Cost, int]:
        """A first run, with an empty cache, of the least number of steps not below `warmup` that is
        an iteration or more; that number."""
        most = 64 * warmup
        while True:
            shutil.rmtree(self.cache(program.name), ignore_errors=True)
            cost = self.run(program, warmup, refusable=warmup < most)
            if cost.steps:
                return cost, warmup
            warmup *= 4

    def enough(self, program: Program, warmup: int, seconds: float) -> int:
        """How many steps beyond `warmup` take about so many CPU-seconds, or, of a program that
        mostly waits, seconds; a multiple of it."""
        short, more = self.run(program, warmup), warmup
        while True:
            cost = self.run(program, warmup + more).beyond(short)
            if cost.steps > 0 and (cost.cpu > seconds / 4 or cost.wall > seconds):
                took = cost.cpu if cost.cpu > seconds / 4 else cost.wall  # it mostly waits
                return max(1, round(more * seconds / took / warmup)) * warmup
            more *= 4


def measure(
    bench: Bench, programs: list[Program], rounds: int, warmup: int, seconds: float, steps: int,
    save: Callable[[list[tuple]], None],
) -> list[tuple]:  # fmt: skip
    """All rounds of these programs, as rows of COLUMNS; the runs of a round are neighbours. After
    each run all so far go to `save`."""
    rows, sizes = [], {}

    def note(program: Program, k: int, kind: str, cost: Cost):
        steps, cpu, wall, memory = astuple(cost)
        rows.append((program.name, k, kind, steps, round(cpu, 3), round(wall, 3), round(memory, 1)))
        print(*rows[-1], flush=True)
        save(rows)

    for program in programs:
        cost, least = bench.start_cold(program, warmup)
        note(program, 1, "cold", cost)
        sizes[program.name] = least, steps or bench.enough(program, least, seconds)
    for k in range(1, rounds + 1):
        for program in programs:
            least, more = sizes[program.name]
            short = bench.run(program, least)
            note(program, k, "short", short)
            long = bench.run(program, least + more)
            note(program, k, "long", long)
            cost = long.beyond(short)
            if min(cost.steps, cost.wall) <= 0:
                what = f"{more} steps more took {cost.wall:.3f} s and were {cost.steps}"
                print(f"benchmark: {program.name}: {what}; raise --steps", file=sys.stderr)
                raise SystemExit(1)
    return rows


# --- what it says ---------------------------------------------------------------------------------


@dataclass
class Summary:
    """Of one program, a value per round."""

    cpu_rates: list[float]  # steps per CPU-second
    rates: list[float]  # steps per second
    starts: list[float]  # seconds, with a warm compile cache
    cold: float  # seconds, with an empty one
    memory: float  # MB
    busy: list[float]  # CPU time over wall time


def summarise(rows: list[tuple]) -> dict[str, Summary]:
    """From rows of COLUMNS, program by program."""
    costs = {(name, k, kind): Cost(*rest) for name, k, kind, *rest in rows}
    rounds = range(1, 1 + max(k for _, k, _ in costs))
    summaries = {}
    for name in dict.fromkeys(row[0] for row in rows):
        short = [costs[name, k, "short"] for k in rounds]
        long = [costs[name, k, "long"] for k in rounds]
        steady = [b.beyond(a) for a, b in zip(short, long, strict=True)]
        cpu_rates, rates = (list(x) for x in zip(*(cost.rates() for cost in steady), strict=True))
        starts = [a.wall - a.steps / rate for a, rate in zip(short, rates, strict=True)]
        cold = costs[name, 1, "cold"]
        summaries[name] = Summary(
            cpu_rates, rates, starts, cold.wall - cold.steps / median(rates),
            max(cost.memory for cost in long), [cost.cpu / cost.wall for cost in steady],
        )  # fmt: skip
    return summaries


def ratios(mine: list[float], other: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, other, strict=True)]


def spread(values: list[float], digits: str) -> str:
    if any(map(math.isnan, values)):
        return "-"
    return f"{median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def report(summaries: dict[str, Summary], variants: list[str]):
    """Tables of rates, and of the ratios of our variants to the rest."""
    pairs = list(itertools.product(variants, [name for name in summaries if name not in variants]))
    heads = ("steps per CPU-second", "steps per second", "start, s", "cold, s", "MB")
    rows = [["median (range)", *heads]]
    for name, x in summaries.items():
        rates = [spread(values, ",.0f") for values in (x.cpu_rates, x.rates)]
        rows.append([name, *rates, spread(x.starts, ".1f"), f"{x.cold:.1f}", f"{x.memory:,.0f}"])
    for a, b in pairs:
        mine, other = summaries[a], summaries[b]
        parts = ratios(mine.cpu_rates, other.cpu_rates), ratios(mine.rates, other.rates)
        rows.append([f"{a} / {b}", *(spread(part, ".2f") for part in parts), "", "", ""])
    print(f"\n{aligned(rows, range(6))}")
    busy = [x for summary in summaries.values() for x in summary.busy]
    apart = sum(abs(x - 1) > 0.05 for x in busy)
    print(f"wall and CPU time more than 5 % apart: {apart} of {len(busy)} measurements")


def commit(found: dict) -> str:
    """Of data.provenance, in words; of a script in no repository the digest of its source."""
    if not found["git_commit"]:
        return f"none, sha256 of the source {found['source_sha256']}"
    return found["git_commit"] + " and changes" * found["git_dirty"]


def facts() -> dict[str, object]:
    """The machine, the versions, the commit."""
    found = provenance([sys.executable, __file__])
    told = found["hardware"] | found["versions"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        told["stable_baselines3"] = metadata.version("stable_baselines3")
    told |= {"commit": commit(found), "load average before": round(os.getloadavg()[0], 2)}
    return {name: value for name, value in told.items() if value is not None}


def write(path: Path, told: dict, columns: tuple[str, ...], rows: list[tuple]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in told.items())
        table = csv.writer(file, lineterminator="\n")
        table.writerows([columns, *rows])


def speed(
    command: Annotated[tuple[str, ...], UseAppendAction] = (),
    peer: Annotated[tuple[str, ...], UseAppendAction] = (),
    sb3: bool = True,
    bare: bool = True,
    rounds: int = 5,
    seconds: float = 10.0,
    steps: int = 0,
    warmup_steps: int = 8192,
    threads: int = 1,
    vary: str = "",
    output: Path = Path("runs/speed"),
):
    """Measure how fast programs train, side by side with peers and the environment alone. Exit code
    1 if one of them fails.

    Args:
        command: our program, e.g. "python ppo.py --env-id CartPole-v1 --compile"; --total-timesteps
            is added. Given again, another variant; "NAME=COMMAND" names it
        peer: "NAME=COMMAND", another program that takes --total-timesteps
        sb3: beside scripts laid out as ours, Stable-Baselines3's PPO with the first command's flags
        bare: beside these, the environments of the first command alone, at random
        rounds: measurements of each program
        seconds: the steps to measure are as many as take about so much CPU time
        steps: if given, that number of steps instead, the same for all programs
        warmup_steps: steps before those; more where an iteration has more
        threads: of OpenMP, OpenBLAS and MKL; our scripts have flags of their own
        vary: a flag and its values, e.g. "num-envs 1 2 4": measure with each, peers too
        output: the table, or a folder for it: <script>-<environment>.csv. What is measured so far
            is in .part.csv
    """
    at_least(1, rounds=rounds, warmup_steps=warmup_steps, threads=threads)
    at_least(0, steps=steps)
    at_least(0.1, seconds=seconds)
    if not command:
        refuse("--command is missing")
    flag, *values = vary.split() or [""]
    if vary and (not values or not re.fullmatch(r"(--)?[a-z][\w-]*", flag)):
        refuse(f'--vary {vary!r}: give a flag and its values, e.g. "num-envs 1 2 4"')
    flag = flag.removeprefix("--")
    variants, others = ours(command), [named(text) for text in peer]
    for name, text in others:
        if not name:
            refuse(f"--peer {text!r}: give NAME=COMMAND")
    first = named(command[0])[1]
    kinds = [kind for kind, wanted in (("sb3", sb3), ("bare", bare)) if wanted]
    if not peers.fit(split(first)):
        kinds = []
    programs = variants + [program(*pair) for pair in others]
    programs += [built_in(kind, first) for kind in kinds]
    names = [p.name for p in programs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        refuse(f"two programs are called {twice[0]!r}; name them by NAME=COMMAND")

    env_id = re.findall(r"--env[-_](?:id|name)[ =](\S+)", first)
    label = "-".join([stem(split(first)), *env_id, *([flag] if vary else [])])
    label = re.sub(r"[^\w.+-]", "-", label)
    path = output / f"{label}.csv" if output.suffix != ".csv" else output
    for folder in path.parents:
        if folder.is_file():
            refuse(f"--output {path}: {folder} is a file")
    told = facts() | {f"command of {p.name}": p.command for p in programs}
    for p in programs:
        if p.name not in kinds and any(word.endswith(".py") for word in p.words):
            told[f"commit of {p.name}"] = commit(provenance(p.words))
    told |= {"threads": threads, "rounds": rounds}
    print(f"load average before: {told['load average before']}, {told['cores']} cores")
    rows, columns = [], (flag, *COLUMNS) if vary else COLUMNS
    partial = path.with_suffix(".part.csv")

    def labelled(part: list[tuple]) -> list[tuple]:
        return [(value, *row) if vary else row for row in part]

    def save(part: list[tuple]):
        write(partial, told, columns, rows + labelled(part))

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), threads)
        for value in values or [""]:
            more = [f"--{flag}", value] if vary else []
            if vary:
                print(f"\n--{flag} {value}")
            now = [Program(p.name, p.command, p.words + more) for p in programs]
            try:
                part = measure(bench, now, rounds, warmup_steps, seconds, steps, save)
            except (KeyboardInterrupt, SystemExit) as end:
                if partial.exists():
                    print(f"measured so far: {partial}", file=sys.stderr)
                raise SystemExit(getattr(end, "code", 130)) from None
            report(summarise(part), [p.name for p in variants])
            rows += labelled(part)
    partial.replace(path)
    print(f"table: {path}")
