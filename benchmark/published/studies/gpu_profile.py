"""Where the time of a script's training goes: steps per second, and milliseconds of an iteration.

    python -m benchmark.published.studies.gpu_profile TABLE.csv SECONDS SCRIPT FLAGS...

trains SCRIPT once for each FLAGS (a quoted string), from a warm start and for about SECONDS, in its
own loop with its own logs. Each training adds a row to the table. `games` is the time within the
environments' step, `acting` the rest of the rollout, `learning` the update, `other` the logs and
checks between them. One more iteration is run under torch.profiler. It shows what the device did in
rollout and update, in kernels and copies, whose number is `launches`. These milliseconds are those
of the device's clock, not of the host's. A row that is there is not measured again.
"""

import csv
import importlib
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

WARM = 3  # iterations before the clock starts, for compilation and recorded graphs


class EnoughError(Exception):
    """Ends a training that has been measured."""


class Clock:
    """Times the parts of a script's iterations: it stands in for the script's functions."""

    def __init__(self, script, seconds: float):
        self.seconds = seconds
        self.spent = Counter()
        self.marks = []  # for each iteration: when it began, and what was spent until then
        self.device = {"rollout": Counter(), "update": Counter()}
        self.profiling = False
        self.saved = [(script, "rollout"), (script, "update")]
        kinds = ("Envs", "WorkerEnvs", "PoolEnvs")
        self.saved += [(getattr(script, name), "step") for name in kinds if hasattr(script, name)]
        self.saved = [(owner, name, getattr(owner, name)) for owner, name in self.saved]
        for owner, name, function in self.saved:
            setattr(owner, name, self.timed(name, function))

    def timed(self, name, function):
        def stand_in(*args, **options):
            if name == "rollout":
                self.begin()
            start = time.perf_counter()
            if self.profiling and name in self.device:
                result = self.profile(name, lambda: function(*args, **options))
            else:
                result = function(*args, **options)
            if name == "rollout":
                wait()
            self.spent[name] += time.perf_counter() - start
            return result

        return stand_in

    def begin(self):
        """Begin an iteration; the last one is profiled and not timed."""
        if self.profiling:
            raise EnoughError
        self.marks.append((time.perf_counter(), Counter(self.spent)))
        timed = len(self.marks) - 1 - WARM
        self.profiling = timed > 0 and self.marks[-1][0] - self.marks[WARM][0] > self.seconds

    def profile(self, name, function):
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CUDA if torch.cuda.is_available() else activity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            result = function()
            wait()
        for event in profiler.events():
            host = event.device_type == torch.autograd.DeviceType.CPU
            if not host and not getattr(event, "is_user_annotation", False):
                kind = "to_device" if "HtoD" in event.name else "kernels"
                kind = "to_host" if "DtoH" in event.name else kind
                self.device[name][f"{kind}_ms"] += event.time_range.elapsed_us() / 1000
                self.device[name]["launches"] += 1
        return result

    def row(self, batch_size: int) -> dict:
        start, before = self.marks[WARM]
        end, after = self.marks[-1]
        count = len(self.marks) - 1 - WARM
        whole = 1000 * (end - start) / count
        spent = {name: 1000 * (after[name] - before[name]) / count for name in after}
        games = spent.get("step", 0.0)
        row = {"steps_per_second": round(1000 * batch_size / whole), "iteration_ms": whole}
        row |= {"games_ms": games, "acting_ms": spent["rollout"] - games}
        row |= {"learning_ms": spent["update"]}
        row |= {"other_ms": whole - spent["rollout"] - spent["update"]}
        for name, parts in (("rollout", "kernels_ms to_device_ms to_host_ms launches"),
                            ("update", "kernels_ms launches")):  # fmt: skip
            row |= {f"{name}_{part}": self.device[name][part] for part in parts.split()}
        return {name: round(value, 2) for name, value in row.items()}


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(script, flags: str, seconds: float) -> dict:
    """Train with these flags; returns a row of the table."""
    torch.compiler.reset()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        more = ["--run-dir", f"{folder}/run", "--total-timesteps", "1000000000"]
        args = script.parse_args([*more, *shlex.split(flags)])
        clock = Clock(script, seconds)
        try:
            script.train(args)
        except EnoughError:
            pass
        finally:
            for owner, name, function in clock.saved:
                setattr(owner, name, function)
    row = {"script": script.__name__, "flags": flags} | clock.row(args.batch_size)
    row["warm_seconds"] = round(clock.marks[WARM][0] - began, 2)
    row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return row | {"torch": torch.__version__}


def read(table: Path) -> list[dict]:
    if not table.exists():
        return []
    with table.open() as file:
        return list(csv.DictReader(file))


def add(table: Path, row: dict):
    """Add a row at once, because what comes after may be cut off."""
    new = not table.exists()
    with table.open("a") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)


def main(table: str, seconds: str, name: str, *all_flags: str) -> int:
    script = importlib.import_module(name)
    failed = 0
    for flags in all_flags:
        if any((row["script"], row["flags"]) == (name, flags) for row in read(Path(table))):
            continue
        try:
            add(Path(table), measure(script, flags, float(seconds)))
        except (Exception, SystemExit):
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
