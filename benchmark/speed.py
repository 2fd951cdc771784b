"""Steps per second of training programs, side by side: `python -m benchmark speed`.

A program is measured from outside, so any that takes --total-timesteps will do. In each round every
program runs twice, once for few steps and once for more. The difference of the two is the steady
state, free of imports, compilation and the first iterations. The start is what the shorter run took
beyond its steps at that pace. A program's very first run, with an empty torch compile cache, gives
its cold start. CPU time is that of all processes of a program.

Steps are those asked for or, if a program leaves a run.json, its `global_step`. Our scripts leave
one, because they round down to whole iterations. For others let --warmup-steps be a multiple of a
batch.
"""

import contextlib
import csv
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
    run: str  # cold, short or long
    steps: int
    cpu_seconds: float
    wall_seconds: float
    peak_mb: float


COLUMNS = Row._fields


class Cost(NamedTuple):
    """What a run took, or the difference of two runs."""

    steps: int
    cpu: float  # seconds, of all its processes
    wall: float  # seconds
    memory: float  # MB, largest resident set of its largest process, or of ours if that is larger

    def beyond(self, other: "Cost") -> "Cost":
        mine = (self.steps - other.steps, self.cpu - other.cpu, self.wall - other.wall)
        return Cost(*mine, self.memory)


def fail(*lines: str):
    print(f"benchmark: {lines[0]}", *lines[1:], sep="\n", file=sys.stderr)
    raise SystemExit(1)


@dataclass
class Program:
    name: str
    command: str  # as given
    words: list[str]  # as run, from any folder
    variables: dict[str, str] = field(default_factory=dict)  # of its environment
    limit: float = 3600.0  # seconds that a run may take

    def run(self, steps: int) -> Cost:
        """Run to the end in an empty folder. If the program fails or takes longer than its limit,
        this exits with the end of its log."""
        with TemporaryDirectory() as folder, open(f"{folder}/log.txt", "w") as log:
            start = time.perf_counter()
            process = subprocess.Popen(
                [*self.words, "--total-timesteps", str(steps)], cwd=folder, stdout=log, stderr=log,
                env=os.environ | self.variables, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            clock = threading.Timer(self.limit, programs.kill_group, [process.pid])
            clock.start()
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:  # Ctrl-C or SIGTERM
                programs.kill_group(process.pid)
                process.wait()
                raise
            finally:
                clock.cancel()
            wall = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            said = Path(folder, "log.txt")
            how = ""
            if wall > self.limit:
                how = f"still at it after {self.limit:,.0f} s, see --time-limit"
            elif holds(said, b"going on eagerly"):
                how = "does not compile"
            elif process.returncode:
                how = programs.how_it_ended(process.returncode)
            if how:
                fail(f"{self.name}: {how}:", *programs.tail(said, 15))
            done = steps_done(Path(folder), steps)
        cpu = usage.ru_utime + usage.ru_stime
        memory = usage.ru_maxrss * 1024 / 1e6
        return Cost(done, round(cpu, 3), round(wall, 3), round(memory, 1))

    def enough(self, warmup: int, seconds: float) -> int:
        """A multiple of `warmup`: the steps that take about so many CPU-seconds beyond `warmup` or,
        if a program mostly waits, so many seconds."""
        short = self.run(warmup)
        more = warmup
        while more < FASTEST * seconds:
            tried = more
            cost = self.run(warmup + tried).beyond(short)
            waits = cost.cpu <= seconds / 4
            if cost.steps > 0 and waits and cost.wall > seconds:  # perhaps a busy machine is why
                again = self.run(warmup + tried).beyond(short)
                cost = min(cost, again, key=lambda own: own.wall)
            if cost.steps > 0 and (cost.wall > seconds or not waits):
                took = cost.wall if waits else cost.cpu
                return max(1, round(more * seconds / took / warmup)) * warmup
            hardly = max(cost.cpu, cost.wall) < seconds / 100
            more *= 16 if hardly else 4
        fail(
            f"{self.name}: its time does not depend on --total-timesteps: {warmup:,} took "
            f"{short.wall:.1f} s, {tried:,} more {cost.wall:.1f} s"
        )


def holds(path: Path, words: bytes) -> bool:
    """Whether a file has these words in it; it may be larger than memory."""
    before = b""
    with open(path, "rb") as file:
        while part := file.read(2**20):
            if words in before + part:
                return True
            before = part[-len(words) :]
    return False


def steps_done(folder: Path, asked: int) -> int:
    """The environment steps that a program says it did or, if it does not say, those asked for."""
    told = [data.read_json(path).get("global_step") for path in folder.rglob("run.json")]
    numbers = [x for x in told if isinstance(x, int | float) and 0 <= x < math.inf]
    return int(max(numbers, default=asked))


def stem(words: list[str]) -> str:
    """The script's name, or the program's."""
    return Path(words[script_at(words) or 0]).stem


def program(text: str) -> Program:
    """A program from NAME=COMMAND, or from a command, whose script's name it gets. Its files are
    named by their whole paths."""
    name, command = re.fullmatch(r"(?:([\w.+-]+)=)?(.*)", text, re.DOTALL).groups()
    words = programs.split(command)
    whole = [str(Path(word).resolve()) if programs.is_file(word) else word for word in words]
    return Program(name or stem(words), command, programs.executable(whole))


def built_in(kind: str, first: Program) -> Program:
    """The program sb3 or bare (peers.py), with the flags of one of our programs."""
    words = shlex.split(first.command)
    given = words[script_at(words) :]
    told = shlex.join(["python", "benchmark/peers.py", kind, *given])
    return Program(kind, told, [sys.executable, peers.__file__, kind, *first.words[-len(given) :]])


def measure(
    entries: list[Program], rounds: int, warmup: int, seconds: float, steps: int
) -> Iterator[tuple]:
    """All rounds of these programs, as rows of COLUMNS; the runs of a round are neighbours."""
    sizes = {}
    for entry in entries:
        yield entry.name, 1, "cold", *entry.run(warmup)
        sizes[entry.name] = steps or entry.enough(warmup, seconds)
    for k in range(1, rounds + 1):
        for entry in entries:
            short = entry.run(warmup)
            yield entry.name, k, "short", *short
            long = entry.run(warmup + sizes[entry.name])
            yield entry.name, k, "long", *long
            cost = long.beyond(short)
            if min(short.steps, cost.steps, cost.wall) <= 0:
                what = f"{short.steps} steps, then {cost.steps} more in {cost.wall:.3f} s"
                fail(f"{entry.name}: {what}; raise --warmup-steps or --steps, if they matter to it")


# --- what it says ---------------------------------------------------------------------------------


@dataclass
class Summary:
    """What one program took, mostly with a value per round."""

    cpu_rates: np.ndarray  # steps per CPU-second, nan if a program takes no CPU time
    rates: np.ndarray  # steps per second
    starts: np.ndarray  # seconds, with a warm compile cache
    cold: float  # seconds, with an empty one
    memory: float  # MB
    busy: np.ndarray  # CPU time over wall time


def by_round(rows: list[Row], run: str) -> dict[str, np.ndarray]:
    """A program's columns [rounds] of numbers, for its short or its long runs."""
    own = [row for row in rows if row.run == run]
    names = ("steps", "cpu_seconds", "wall_seconds", "peak_mb")
    return {name: np.array([getattr(row, name) for row in own]) for name in names}


def summarise(rows: list[tuple]) -> dict[str, Summary]:
    """A summary of each program, from rows of COLUMNS."""
    summaries = {}
    table = [Row(*row) for row in rows]
    for name in dict.fromkeys(row.program for row in table):
        own = [row for row in table if row.program == name]
        cold = next(row for row in own if row.run == "cold")
        short = by_round(own, "short")
        long = by_round(own, "long")
        steps = long["steps"] - short["steps"]
        cpu = long["cpu_seconds"] - short["cpu_seconds"]
        wall = long["wall_seconds"] - short["wall_seconds"]
        rates = steps / wall
        summaries[name] = Summary(
            cpu_rates=steps / np.where(cpu > 0, cpu, np.nan),
            rates=rates,
            starts=short["wall_seconds"] - short["steps"] / rates,
            cold=cold.wall_seconds - cold.steps / np.median(rates),
            memory=long["peak_mb"].max(),
            busy=cpu / wall,
        )
    return summaries


def spread(values: np.ndarray, digits: str) -> str:
    if np.isnan(values).any():
        return "-"
    return f"{np.median(values):{digits}} ({values.min():{digits}} to {values.max():{digits}})"


def report(summaries: dict[str, Summary], variants: list[str]):
    """Print tables of rates, and of the ratios of our variants to the rest."""
    rows = [["median (range)", "steps per CPU-second", "steps per second", "start, s", "cold, s"]]
    rows[0].append("MB")
    for name, x in summaries.items():
        rates = [spread(values, ",.0f") for values in (x.cpu_rates, x.rates)]
        rows.append([name, *rates, spread(x.starts, ".1f"), f"{x.cold:.1f}", f"{x.memory:,.0f}"])
    for a, b in itertools.product(variants, [name for name in summaries if name not in variants]):
        mine = summaries[a]
        other = summaries[b]
        parts = mine.cpu_rates / other.cpu_rates, mine.rates / other.rates  # round by round
        rows.append([f"{a} / {b}", *(spread(part, ".2f") for part in parts), "", "", ""])
    print(f"\n{programs.aligned(rows, range(6))}")
    busy = np.concatenate([x.busy for x in summaries.values()])
    apart = np.count_nonzero(abs(busy - 1) > 0.05)
    print(f"wall and CPU time more than 5 % apart: {apart} of {len(busy)} measurements")


def commit(found: dict) -> str:
    """The commit in words, from programs.provenance; without a repository the source's digest."""
    if not found["git_commit"]:
        return f"none, sha256 of the source {found['source_sha256']}"
    if found["git_dirty"]:
        return f"{found['git_commit']} and changes"
    return found["git_commit"]


def facts(entries: list[Program]) -> dict[str, object]:
    """The machine, the versions, the commands, the commits."""
    found = programs.provenance([sys.executable, __file__])
    told = found["hardware"] | found["versions"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        told["stable_baselines3"] = metadata.version("stable_baselines3")
    told |= {"commit": commit(found), "load average before": round(os.getloadavg()[0], 2)}
    told |= {f"command of {x.name}": x.command for x in entries}
    for x in entries:
        if script_at(x.words) and peers.__file__ not in x.words:
            told[f"commit of {x.name}"] = commit(programs.provenance(x.words))
    return {name: value for name, value in told.items() if value is not None}


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
    time_limit: float = 3600.0,
):
    """Measure how fast programs train, side by side with peers and the environment alone. The exit
    code is 1 if one of them fails.

    Args:
        command: our program, e.g. "python ppo.py --env-id CartPole-v1 --compile"; --total-timesteps
            is added. Give it again for another variant; "NAME=COMMAND" names it
        peer: another program that takes --total-timesteps, as "NAME=COMMAND"
        sb3: also measure Stable-Baselines3's PPO with the first command's flags, if that script
            has make_env
        bare: also measure the environments of the first command alone, with random actions
        rounds: measurements of each program
        seconds: CPU time to measure; the number of steps follows from it
        steps: number of steps to measure, the same for all programs; 0: as --seconds says
        warmup_steps: steps of the shorter run; raise it if an iteration has more
        threads: threads of OpenMP, OpenBLAS and MKL; our scripts have flags of their own
        vary: a flag and its values, e.g. "num-envs 1 2 4", to measure with each, peers too
        output: the table, or a folder for <script>-<environment>.csv; .part.csv until the end
        time_limit: seconds that a run may take
    """
    at_least(1, rounds=rounds, warmup_steps=warmup_steps, threads=threads)
    at_least(0, steps=steps)
    at_least(0.1, seconds=seconds, time_limit=time_limit)
    if not command:
        refuse("--command is missing")
    flag = vary.removeprefix("--").split()[:1]  # none or one
    values = vary.split()[1:]
    if vary and not (values and re.fullmatch(r"[a-z][\w-]*", flag[0])):
        refuse(f'--vary {vary!r}: give a flag and its values, e.g. "num-envs 1 2 4"')
    variants = [program(text) for text in command]
    entries = variants + [program(text) for text in peer]
    first = variants[0]
    kinds = [kind for kind, wanted in (("sb3", sb3), ("bare", bare)) if wanted]
    entries += [built_in(kind, first) for kind in kinds if peers.fit(first.words)]
    names = [entry.name for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        refuse(f"two programs are called {twice[0]!r}; name them by NAME=COMMAND")

    env_id = re.findall(r"--env[-_](?:id|name)[ =](\S+)", first.command)
    label = re.sub(r"[^\w.+-]", "-", "-".join([stem(first.words), *env_id, *flag]))
    path = output / f"{label}.csv" if output.suffix != ".csv" else output
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--output {path}: {error.strerror}")
    partial = path.with_suffix(".part.csv")
    told = facts(entries) | {"threads": threads, "rounds": rounds}
    print(f"load average before: {told['load average before']}, {told['cores']} cores")
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
                now.append(replace(entry, words=words, variables=own, limit=time_limit))
            for row in measure(now, rounds, warmup_steps, seconds, steps):
                print(*row, flush=True)
                table.writerow([*more[1:], *row])
                rows.append(row)
            report(summarise(rows), [entry.name for entry in variants])
    partial.replace(path)
    print(f"table: {path}")
