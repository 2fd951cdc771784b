"""Steps per second of training programs, side by side: `python -m benchmark speed`.

A program is measured from outside, so any that takes --total-timesteps will do. In each round every
program runs twice, for few steps and for more. The difference is the steady state; the start is
what the shorter run took beyond its steps at that pace. A program's very first run, with an empty
torch compile cache, gives its cold start. With --whole each program runs from its start to its end:
in each round with an empty compile cache (cold), and again with the cache that this filled (warm).

CPU time is that of all processes of a program. Steps are those asked for or, if a program leaves a
run.json, its `global_step`: our scripts round down to whole iterations.
"""

import contextlib
import csv
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import numpy as np
from tyro.conf import UseAppendAction

from benchmark import data, peers, programs
from benchmark.programs import at_least, refuse, script_at

FASTEST = 1e9  # steps per second that no program makes


class Row(NamedTuple):
    """A row of the table: what one run took."""

    program: str
    round: int
    run: str  # cold, short or long; of whole runs: cold or warm
    steps: int
    cpu_seconds: float  # of all its processes
    wall_seconds: float
    peak_mb: float  # largest resident set of its largest process, or of ours if that is larger


COLUMNS = Row._fields
STEPS, CPU, WALL = range(3)  # of what Program.run returns


@dataclass
class Program:
    name: str
    command: str  # as given
    words: list[str]  # as run, from any folder
    variables: dict[str, str] = field(default_factory=dict)  # of its environment

    def run(self, steps: int) -> np.ndarray:
        """Run to the end in an empty folder; returns steps, CPU-seconds, seconds and MB. If the
        program fails, this exits with the end of its log."""
        with TemporaryDirectory() as folder, open(f"{folder}/log.txt", "w") as log:
            start = time.perf_counter()
            process = subprocess.Popen(
                [*self.words, "--total-timesteps", str(steps)], cwd=folder, stdout=log, stderr=log,
                env=os.environ | self.variables, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:  # Ctrl-C or SIGTERM
                os.killpg(process.pid, signal.SIGKILL)
                raise
            wall = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            path = Path(folder, "log.txt")
            eagerly = "going on eagerly" in path.read_text(errors="replace")
            if process.returncode or eagerly:
                how = "does not compile" if eagerly else programs.how_it_ended(process.returncode)
                raise SystemExit("\n".join([f"{self.name}: {how}:", *programs.tail(path, 15)]))
            infos = map(data.read_json, Path(folder).rglob("run.json"))
            done = max((info.get("global_step", 0) for info in infos), default=steps)
        cpu = usage.ru_utime + usage.ru_stime
        return np.array([done, cpu, wall, usage.ru_maxrss * 1024 / 1e6])

    def row(self, number: int, kind: str, cost: np.ndarray) -> Row:
        steps, *rest = cost.tolist()
        return Row(self.name, number, kind, int(steps), *(round(x, 3) for x in rest))

    def enough(self, warmup: int, seconds: float) -> int:
        """A multiple of `warmup`: the steps that take about so many CPU-seconds beyond `warmup` or,
        if a program mostly waits, so many seconds."""
        short = self.run(warmup)
        more = warmup
        while more < FASTEST * seconds:
            steps, cpu, wall, _ = self.run(warmup + more) - short
            if steps > 0 and (cpu > seconds / 4 or wall > seconds):
                took = cpu if cpu > seconds / 4 else wall
                return max(1, round(more * seconds / took / warmup)) * warmup
            more *= 16 if wall < seconds / 100 else 4
        raise SystemExit(f"{self.name}: its time does not depend on --total-timesteps")


def stem(words: list[str]) -> str:
    """The script's name, or the program's."""
    return Path(words[script_at(words) or 0]).stem


def program(text: str) -> Program:
    """A program from NAME=COMMAND, or from a command, whose script's name it gets. Its files are
    named by their whole paths."""
    name, command = re.fullmatch(r"(?:([\w.+-]+)=)?(.*)", text, re.DOTALL).groups()
    words = programs.split(command)
    for k, word in enumerate(words):
        if os.path.isfile(word):  # noqa: PTH113, a word may be too long for a path
            words[k] = str(Path(word).absolute())
    return Program(name or stem(words), command, programs.executable(words))


def built_in(kind: str, first: Program) -> Program:
    """The program sb3 or bare (peers.py), with the flags of one of our programs."""
    words = shlex.split(first.command)
    given = words[script_at(words) :]
    told = shlex.join(["python", "benchmark/peers.py", kind, *given])
    return Program(kind, told, [sys.executable, peers.__file__, kind, *first.words[-len(given) :]])


def measure(
    entries: list[Program], rounds: int, warmup: int, seconds: float, steps: int
) -> Iterator[Row]:
    """All rounds of these programs; the runs of a round are neighbours."""
    sizes = {}
    for entry in entries:
        yield entry.row(1, "cold", entry.run(warmup))
        sizes[entry.name] = steps or entry.enough(warmup, seconds)
    for k in range(1, rounds + 1):
        for entry in entries:
            short = entry.run(warmup)
            yield entry.row(k, "short", short)
            long = entry.run(warmup + sizes[entry.name])
            yield entry.row(k, "long", long)
            if min(short[STEPS], *(long - short)[[STEPS, WALL]]) <= 0:
                raise SystemExit(f"{entry.name}: no more steps: raise --warmup-steps or --steps")


def measure_whole(entries: list[Program], rounds: int, steps: int) -> Iterator[Row]:
    """Whole runs of these programs in turn, each with an empty compile cache and then with its own
    from before."""
    for k in range(1, rounds + 1):
        for entry in entries:
            with TemporaryDirectory() as cache:
                entry.variables["TORCHINDUCTOR_CACHE_DIR"] = cache
                for kind in ("cold", "warm"):
                    yield entry.row(k, kind, entry.run(steps))


@dataclass
class Summary:
    """What one program took, mostly with a value per round."""

    cpu_rates: np.ndarray  # steps per CPU-second, nan if a program takes no CPU time
    rates: np.ndarray  # steps per second
    starts: np.ndarray  # seconds, with a warm compile cache
    cold: float  # seconds, with an empty one
    memory: float  # MB


def numbers(rows: list[Row], name: str, run: str) -> np.ndarray:
    """Steps, CPU-seconds, seconds and MB [4, rounds] of a program's runs of one kind."""
    return np.array([row[3:] for row in rows if (row.program, row.run) == (name, run)], float).T


def summarise(rows: list[tuple]) -> dict[str, Summary]:
    """A summary of each program, from rows of COLUMNS."""
    summaries = {}
    rows = [Row(*row) for row in rows]
    for name in dict.fromkeys(row.program for row in rows):
        cold, short, long = (numbers(rows, name, run) for run in ("cold", "short", "long"))
        steps, cpu, wall, _ = long - short
        rates = steps / wall
        summaries[name] = Summary(
            cpu_rates=steps / np.where(cpu > 0, cpu, np.nan),
            rates=rates,
            starts=short[WALL] - short[STEPS] / rates,
            cold=cold[WALL, 0] - cold[STEPS, 0] / np.median(rates),
            memory=long[3].max(),
        )
    return summaries


def spread(values: np.ndarray, digits: str) -> str:
    if np.isnan(values).any():
        return "-"
    return f"{np.median(values):{digits}} ({values.min():{digits}} to {values.max():{digits}})"


def report(rows: list[Row], ours: list[str]):
    """Print tables of rates, and of the ratios of our programs to the rest."""
    summaries = summarise(rows)
    head = "median (range),steps per CPU-second,steps per second,start (s),cold (s),MB"
    table = [head.split(",")]
    for name, x in summaries.items():
        rates = [spread(values, ",.0f") for values in (x.cpu_rates, x.rates)]
        table.append([name, *rates, spread(x.starts, ".1f"), f"{x.cold:.1f}", f"{x.memory:,.0f}"])
    for a, b in itertools.product(ours, [name for name in summaries if name not in ours]):
        mine = summaries[a]
        other = summaries[b]
        parts = mine.cpu_rates / other.cpu_rates, mine.rates / other.rates  # round by round
        table.append([f"{a} / {b}", *(spread(part, ".2f") for part in parts), "", "", ""])
    print(f"\n{programs.aligned(table, range(6))}")


def report_whole(rows: list[Row], ours: list[str]):
    """Print tables of whole runs, and of the rest's seconds over those of our programs."""
    table = [["whole runs, median (range)", "cache", "seconds", "CPU-seconds", "steps per second"]]
    rest = [name for name in dict.fromkeys(row.program for row in rows) if name not in ours]
    for name, run in itertools.product([*ours, *rest], ("warm", "cold")):
        steps, cpu, wall, _ = numbers(rows, name, run)
        cells = [spread(x, ",.1f") for x in (wall, cpu)]
        table.append([name, run, *cells, spread(steps / wall, ",.0f")])
    for a, b, run in itertools.product(ours, rest, ("warm", "cold")):
        _, cpu, wall, _ = numbers(rows, b, run) / numbers(rows, a, run)
        table.append([f"{b} / {a}", run, spread(wall, ".2f"), spread(cpu, ".2f"), ""])
    print(f"\n{programs.aligned(table, range(5))}")


def facts(entries: list[Program]) -> dict[str, object]:
    """The machine, the versions, the commands, the commits of their scripts."""
    told = {"load average before": round(os.getloadavg()[0], 2)}
    with contextlib.suppress(metadata.PackageNotFoundError):
        told["stable_baselines3"] = metadata.version("stable_baselines3")
    for entry in entries:
        found = programs.provenance(entry.words)
        commit = found["git_commit"] or f"none, sha256 of the source {found['source_sha256']}"
        told[f"command of {entry.name}"] = entry.command
        told[f"commit of {entry.name}"] = commit + (" and changes" if found["git_dirty"] else "")
    return found["hardware"] | found["versions"] | told


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
    whole: bool = False,
):
    """Measure how fast programs train, side by side with peers and the environment alone. The exit
    code is 1 if one of them fails.

    Args:
        command: our program, e.g. "python ppo.py --env-id CartPole-v1 --compile"; --total-timesteps
            is added. Give it again for another variant; "NAME=COMMAND" names it
        peer: another program that takes --total-timesteps, as "NAME=COMMAND"
        sb3: also measure Stable-Baselines3's PPO with the first command's flags (see peers.py)
        bare: also measure the environments of the first command alone, with random actions
        rounds: measurements of each program
        seconds: CPU time to measure; the number of steps follows from it
        steps: number of steps to measure, the same for all programs; 0: as --seconds says
        warmup_steps: steps of the shorter run; raise it if an iteration has more
        threads: threads of OpenMP, OpenBLAS and MKL; our scripts have flags of their own
        vary: a flag and its values, e.g. "num-envs 1 2 4", to measure with each, peers too
        output: the table, or a folder for <script>-<environment>.csv; .part.csv until the end
        whole: measure whole runs of --steps, start included, with a cold and a warm compile cache
    """
    at_least(1, rounds=rounds, warmup_steps=warmup_steps, threads=threads)
    at_least(0.1, seconds=seconds)
    if not command:
        refuse("--command is missing")
    if whole and not steps:
        refuse("--whole: give the --steps of a run")
    flag = vary.removeprefix("--").split()[:1]  # none or one
    values = vary.split()[1:]
    if vary and not (values and re.fullmatch(r"[a-z][\w-]*", flag[0])):
        refuse(f'--vary {vary!r}: give a flag and its values, e.g. "num-envs 1 2 4"')
    variants = [program(text) for text in command]
    entries = variants + [program(text) for text in peer]
    first = variants[0]
    kinds = [kind for kind, wanted in (("sb3", sb3), ("bare", bare)) if wanted]
    entries += [built_in(kind, first) for kind in kinds if peers.fit(kind, first.words)]
    names = [entry.name for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        refuse(f"two programs are called {twice[0]!r}; name them by NAME=COMMAND")

    env_id = re.findall(r"--env[-_](?:id|name)[ =](\S+)", first.command)
    label = "-".join([stem(first.words), *env_id, *flag, *(["whole"] if whole else [])])
    label = re.sub(r"[^\w.+-]", "-", label)
    path = output / f"{label}.csv" if output.suffix != ".csv" else output
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part.csv")
    told = facts(entries) | {"threads": threads, "rounds": rounds}
    print(f"measured so far: {partial}", flush=True)
    variables = {f"{lib}_NUM_THREADS": str(threads) for lib in ("OMP", "OPENBLAS", "MKL")}
    variables["PYTHONPATH"] = f"{Path.cwd()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with open(partial, "w", newline="", buffering=1) as file, TemporaryDirectory() as caches:
        file.writelines(f"# {name}: {value}\n" for name, value in told.items())
        table = csv.writer(file, lineterminator="\n")
        table.writerow([*flag, *COLUMNS])
        for value in values or [""]:
            more = [f"--{flag[0]}", value] if vary else []
            print(f"\n{' '.join(more)}")
            now = []
            rows = []
            for entry in entries:
                own = variables | {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{entry.name}{value}"}
                words = entry.words + more
                now.append(Program(entry.name, "", words, own))
            how = (warmup_steps, seconds, steps)
            measured = measure_whole(now, rounds, steps) if whole else measure(now, rounds, *how)
            for row in measured:
                print(*row, flush=True)
                table.writerow([*more[1:], *row])
                rows.append(row)
            ours = [entry.name for entry in variants]
            (report_whole if whole else report)(rows, ours)
    partial.replace(path)
    print(f"table: {path}")
