"""Where the time of a script's training goes: steps per second, and milliseconds of an iteration.

    python -m benchmark.published.gpu_profile TABLE.csv SECONDS SCRIPT FLAGS...

trains SCRIPT once for each FLAGS (a quoted string), from a warm start and for about SECONDS, in its
own loop with its own logs, and adds a row to the table: `games` is the time within the
environments' step (a script without a class Envs has none), `acting` the rest of the rollout,
`learning` the update, `other` the logs and checks between them. Then one more iteration is run
under torch.profiler: what the device did in rollout and update, in kernels and copies, whose
number is `launches`; its milliseconds are those of the device's clock, not of the host's. A row
that is there is not measured again.
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

WARM = 3  # iterations before the clock starts: compilation, autotuning, recorded graphs
FIELDS = (
    "script", "flags", "steps_per_second", "iteration_ms", "games_ms", "acting_ms", "learning_ms",
    "other_ms", "rollout_kernels_ms", "rollout_to_device_ms", "rollout_to_host_ms",
    "rollout_launches", "update_kernels_ms", "update_launches", "warm_seconds", "device", "torch",
)  # fmt: skip


class EnoughError(Exception):
    """Ends a training that has been measured."""


class Clock:
    """Times the parts of a script's iterations, from inside: stands in for its functions."""

    def __init__(self, script, seconds: float):
        self.script = script
        self.seconds = seconds
        self.spent = Counter()
        self.profiled = 0  # iterations
        self.marks = []  # of each iteration: the time at its end, and what was spent until then
        self.began = time.perf_counter()
        self.device = {"rollout": Counter(), "update": Counter()}
        self.saved = script.rollout, script.update
        self.step = script.Envs.step if hasattr(script, "Envs") else None
        script.rollout = self.part("rollout", script.rollout)
        script.update = self.part("update", script.update)
        if self.step:
            script.Envs.step = self.part("games", script.Envs.step)

    def part(self, name, function):
        def timed(*args, **options):
            if name == "rollout":
                self.next_iteration()
            profiled = self.enough() and name in self.device
            start = time.perf_counter()
            if profiled:
                result = self.profile(name, lambda: function(*args, **options))
            else:
                result = function(*args, **options)
            if name == "rollout" and torch.cuda.is_available():
                torch.cuda.synchronize()
            self.spent[name] += time.perf_counter() - start
            return result

        return timed

    def enough(self) -> bool:
        """Whether the time is up, and one more iteration is to be profiled."""
        return len(self.marks) > WARM and self.marks[-1][0] - self.marks[WARM][0] > self.seconds

    def next_iteration(self):
        if self.enough():
            self.profiled += 1
            if self.profiled > 1:
                raise EnoughError
        else:
            self.marks.append((time.perf_counter(), Counter(self.spent)))

    def profile(self, name, function):
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            result = function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self.device[name] = device_times(profiler)
        return result

    def row(self, args) -> dict:
        start, end = self.marks[WARM], self.marks[-1]
        count = len(self.marks) - 1 - WARM
        whole = 1000 * (end[0] - start[0]) / count
        spent = {name: 1000 * (end[1][name] - start[1][name]) / count for name in self.spent}
        row = {"steps_per_second": round(1000 * args.batch_size / whole)}
        row["iteration_ms"] = whole
        row["games_ms"] = spent.get("games", 0.0)
        row["acting_ms"] = spent["rollout"] - row["games_ms"]
        row["learning_ms"] = spent["update"]
        row["other_ms"] = whole - spent["rollout"] - spent["update"]
        rollout, update = self.device["rollout"], self.device["update"]
        row["rollout_kernels_ms"] = rollout["kernels"]
        row["rollout_to_device_ms"] = rollout["to device"]
        row["rollout_to_host_ms"] = rollout["to host"]
        row["rollout_launches"] = rollout["launches"]
        row["update_kernels_ms"] = update["kernels"]
        row["update_launches"] = update["launches"]
        row["warm_seconds"] = start[0] - self.began
        return {name: round(value, 2) for name, value in row.items()}

    def restore(self):
        self.script.rollout, self.script.update = self.saved
        if self.step:
            self.script.Envs.step = self.step


def device_times(profiler) -> Counter:
    """Milliseconds of a device's kernels and copies, and their number."""
    times = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CPU:
            continue
        if getattr(event, "is_user_annotation", False):
            continue
        kind = "kernels"
        if "HtoD" in event.name:
            kind = "to device"
        if "DtoH" in event.name:
            kind = "to host"
        times[kind] += event.time_range.elapsed_us() / 1000
        times["launches"] += 1
    return times


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def measure(script, flags: str, seconds: float) -> dict:
    """A row of the table."""
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        more = ["--run-dir", f"{folder}/run", "--total-timesteps", "1000000000"]
        args = script.parse_args([*more, *shlex.split(flags)])
        clock = Clock(script, seconds)
        try:
            script.train(args)
        except EnoughError:
            pass
        finally:
            clock.restore()
    row = {"script": script.__name__, "flags": flags} | clock.row(args)
    return row | {"device": device_name(), "torch": torch.__version__}


def done(table: Path) -> set[str]:
    if not table.exists():
        return set()
    with table.open() as file:
        return {row["script"] + row["flags"] for row in csv.DictReader(file)}


def add(table: Path, row: dict):
    """Add a row at once: what comes after may be cut off."""
    new = not table.exists()
    with table.open("a") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main(argv: list[str]) -> int:
    table, seconds = Path(argv[0]), float(argv[1])
    script = importlib.import_module(argv[2].removesuffix(".py"))
    failed = 0
    for flags in argv[3:]:
        if script.__name__ + flags in done(table):
            continue
        try:
            row = measure(script, flags, seconds)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed = 1
            continue
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        add(table, row)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
