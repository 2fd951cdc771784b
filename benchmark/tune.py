"""Search for good flags of a script: `python -m benchmark tune`, by optuna's TPE.

    STUDY/journal.log     optuna's storage; any number of processes and nodes may share it
    STUDY/trial-0007/     a trial: a lock, and <env>-s<seed>/, a job as `run` has it, of each run
    STUDY/trials.csv      all trials, written at the end, with the commit that each began with

A trial's lock is held by the process that works on it, a job's by that and the script it started. A
trial that is begun and not locked was cut off: whoever comes next goes on with it and repeats no
finished run. Its score is the mean over environments of the mean over seeds of the return of the
last 100 training episodes, scaled to 0 ... 1 by --scales; a single environment needs no scale.
"""

import contextlib
import csv
import itertools
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from benchmark import data, programs
from benchmark.programs import at_least, lock, locked, refuse, split, tail, write_json
from benchmark.run import OURS, Work

KINDS = "NAME log LOW HIGH, float LOW HIGH, int LOW HIGH, choice VALUE VALUE ... or flag"


# --- what is searched -----------------------------------------------------------------------------


@dataclass
class Dimension:
    """A flag of the script and the values it may take."""

    name: str
    kind: str  # log, float, int, choice or flag
    values: list  # low and high, or the choices

    def suggest(self, trial):
        if self.kind in ("choice", "flag"):
            return trial.suggest_categorical(self.name, self.values)
        if self.kind == "int":
            return trial.suggest_int(self.name, *self.values)
        return trial.suggest_float(self.name, *self.values, log=self.kind == "log")

    def flags(self, value) -> list[str]:
        if self.kind == "flag":
            return [f"--{self.name}" if value else f"--no-{self.name}"]
        negative = str(value).startswith("-")  # which alone could be taken for a flag
        return [f"--{self.name}={value}"] if negative else [f"--{self.name}", str(value)]


def dimension(text: str) -> Dimension:
    """From e.g. "learning-rate log 1e-5 1e-2"."""
    name, kind, *values = text.split() if len(text.split()) > 1 else ("", "")
    name = name.removeprefix("--")
    if kind == "flag" and not values:
        return Dimension(name, kind, [True, False])
    if kind == "choice" and len(set(values)) == len(values) > 1:
        return Dimension(name, kind, values)
    if kind in ("log", "float", "int") and len(values) == 2:
        with contextlib.suppress(ValueError):
            low, high = (int(v) if kind == "int" else float(v) for v in values)
            if low < high < math.inf and low > (0 if kind == "log" else -math.inf):
                return Dimension(name, kind, [low, high])
    refuse(f"--search {text!r}: give {KINDS}; LOW below HIGH, in log above 0")


def scales_of(env_ids: list[str], path: Path) -> dict[str, data.Scale]:
    """Returns that count as 0 and as 1; 0 and 1 themselves for an environment alone without."""
    known = data.read_scales(path) if path.exists() else {}
    missing = [env_id for env_id in env_ids if env_id not in known]
    if missing and len(env_ids) > 1:
        refuse(f"--env-ids {missing[0]}: no scale in {path.name} to weigh it by; tune on it alone")
    return {env_id: known.get(env_id, data.Scale(0.0, 1.0)) for env_id in env_ids}


# --- a trial --------------------------------------------------------------------------------------


class Failed(Exception):
    """A run did not end well, and how."""


class Stopped(Exception):
    """This program is to end."""


@dataclass
class Search:
    """What is asked for, and what is under way."""

    command: str
    dimensions: list[Dimension]
    scales: dict[str, data.Scale]  # by environment
    seeds: list[int]
    trials: int
    folder: Path
    prune: bool
    seed: int
    stop: threading.Event = field(default_factory=threading.Event)
    signal: int = 0  # that set it
    works: set[Work] = field(default_factory=set)  # that train
    failed_before: set[int] = field(default_factory=set)  # numbers; they don't count

    def settings(self) -> dict:
        """What all trials of a study must have in common."""
        return {
            "command": self.command,
            "search": [[d.name, d.kind, d.values] for d in self.dimensions],
            "environments and scales": [
                [name, scale.low, scale.high] for name, scale in self.scales.items()
            ],
            "seeds": self.seeds,
        }

    def trial_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number:04}"

    def flags(self, params: dict) -> list[str]:
        return [flag for d in self.dimensions for flag in d.flags(params[d.name])]

    def study(self):
        """optuna's study, new or as it stands."""
        import optuna
        from optuna.storages.journal import JournalFileBackend

        storage = JournalFileBackend(str(self.folder / "journal.log"))
        return optuna.create_study(
            study_name="tune",
            storage=optuna.storages.JournalStorage(storage),
            pruner=optuna.pruners.MedianPruner() if self.prune else optuna.pruners.NopPruner(),
            direction="maximize",
            load_if_exists=True,
        )

    def open_study(self):
        """The study, less the last line of its journal if that was cut off."""
        from optuna.storages.journal import JournalFileSymlinkLock

        journal = self.folder / "journal.log"
        held = JournalFileSymlinkLock(str(journal))
        held.acquire()
        if journal.exists() and (lines := journal.read_bytes().splitlines(keepends=True)):
            cut = 0 if lines[-1].endswith(b"\n") else len(lines[-1])
            os.truncate(journal, journal.stat().st_size - cut)
        held.release()
        try:
            return self.study()
        except Exception as error:  # whatever else was done to it
            refuse(
                f"--study {self.folder}: {journal.name} is damaged ({error}); give another folder"
            )

    def claim(self, study) -> Iterator:
        """Trials to work on, locked, until there are enough; one cut off before a new one."""
        import numpy as np
        import optuna
        from optuna.trial import TrialState

        while not self.stop.is_set():
            trial = held = None
            with lock(self.folder / "lock", wait=True):
                trials = study.get_trials(deepcopy=False)
                running = [t for t in trials if t.state == TrialState.RUNNING]
                for begun in running:
                    if held := lock(self.trial_folder(begun.number) / "lock"):
                        break
                number = begun.number if held else len(trials)
                # Another seed for each trial: processes must not all begin with the same one
                seeds = np.random.SeedSequence((self.seed, number)).generate_state(1)
                study.sampler = optuna.samplers.TPESampler(seed=int(seeds[0]))
                if held:
                    trial = optuna.trial.Trial(study, begun._trial_id)
                elif len(trials) - len(self.failed_before) < self.trials:
                    shutil.rmtree(self.trial_folder(number), ignore_errors=True)  # of no study
                    trial = study.ask()
                    held = lock(self.trial_folder(number) / "lock", wait=True)
                if trial:
                    for d in self.dimensions:
                        d.suggest(trial)
            if trial:
                with held:
                    yield trial
            elif running:
                self.stop.wait(0.5)  # another process may be killed and leave us its trial
            else:
                return

    def train(self, number: int, env_id: str, seed: int, flags: list[str]) -> float:
        """Train, or go on, or find it done; the scaled score."""
        folder = self.trial_folder(number) / f"{data.slug(env_id)}-s{seed}"
        if not (folder / "job.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # a run of no job
            folder.mkdir(parents=True)
            own = zip(OURS, (env_id, str(seed), str(folder / "run")), strict=True)
            words = [*shlex.split(self.command), *flags, *itertools.chain(*own)]
            job = {"command": shlex.join(words), "env_id": env_id, "seed": seed, "reason": ""}
            job |= {"variant": f"trial-{number:04}", "foreign": False, "eval_episodes": 0}
            write_json(folder / "job.json", job | {"done": False})
        while locked(folder):  # by a script that outlived the process that started it
            if self.stop.wait(0.5):
                raise Stopped
        work = Work(folder, None)
        self.works.add(work)
        if self.stop.is_set():  # since just now
            work.stop()
        work()
        self.works.discard(work)
        job, log = data.read_json(folder / "job.json"), folder / "log.txt"
        if not job["done"] and not job["reason"]:
            raise Stopped
        said = "".join(f"\n  | {line}" for line in tail(log))
        if job["reason"]:
            raise Failed(f"{env_id}, seed {seed}: {job['reason']}; {log}{said}")
        score = data.read_job(folder).score("training")
        if not math.isfinite(score):
            raise Failed(f"{env_id}, seed {seed}: its score is {score}; {log}{said}")
        scale = self.scales[env_id]
        return (score - scale.low) / (scale.high - scale.low)

    def work(self, trial) -> tuple[str, float | None, dict]:
        """Do what is left of a trial: how it ended (an optuna state), its score, those of each
        environment; reports after each seed."""
        flags, scores = self.flags(trial.params), {env_id: [] for env_id in self.scales}
        reported = trial.study.trials[trial.number].intermediate_values
        for k, seed in enumerate(self.seeds):
            for env_id, mine in scores.items():
                mine.append(self.train(trial.number, env_id, seed, flags))
            score = mean(mean(mine) for mine in scores.values())
            if k < len(self.seeds) - 1:
                if k not in reported:
                    trial.report(score, k)
                if trial.should_prune():
                    return "PRUNED", score, scores
        return "COMPLETE", score, scores

    def worker(self):
        """Work on trials until there are enough."""
        from optuna.trial import TrialState

        study = self.study()
        for trial in self.claim(study):
            name, flags = f"trial {trial.number}", shlex.join(self.flags(trial.params))
            start = time.time()
            try:
                state, score, scores = self.work(trial)
            except Stopped:
                return
            except (Failed, OSError, ValueError) as error:  # the last of a damaged table
                study.tell(trial, state=TrialState.FAIL)
                print(f"{name} failed: {flags}\n  {error}", file=sys.stderr, flush=True)
                continue
            trial.set_user_attr("scores", scores)
            value = score if state == "COMPLETE" else None
            study.tell(trial, value, TrialState[state])
            told = f"{score:.4g}" + (", pruned" if state == "PRUNED" else "")
            print(f"{name}: {told}, {time.time() - start:.0f} s  {flags}", flush=True)


# --- all trials -----------------------------------------------------------------------------------


def write(search: Search, trials: list):
    """trials.csv, whole or not at all."""
    names = [d.name for d in search.dimensions]
    columns = ["trial", "state", "score", "seconds", *names, *search.scales, "commit"]
    temporary = search.folder / f"trials.csv.{os.getpid()}"
    with open(temporary, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        for trial in trials:
            scores = trial.user_attrs.get("scores", {})
            seconds = trial.duration and round(trial.duration.total_seconds(), 1)
            row = [trial.number, trial.state.name.lower(), trial.value, seconds]
            row += [trial.params.get(name, "") for name in names]
            row += [mean(scores[e]) if e in scores else "" for e in search.scales]
            jobs = sorted(search.trial_folder(trial.number).glob("*/job.json"))
            starts = [start for job in jobs for start in data.read_json(job).get("starts", [])]
            table.writerow([*row, starts[0]["git_commit"] if starts else ""])
    temporary.replace(search.folder / "trials.csv")


def report(search: Search, study, trials: list):
    """The best trials, what mattered and the best command."""
    import optuna

    best = sorted((t for t in trials if t.state.name == "COMPLETE"), key=lambda t: -t.value)
    if not best:
        return
    names = [d.name for d in search.dimensions]
    rows = [["trial", "score", *names]]
    for trial in best[:10]:
        cells = (trial.params[name] for name in names)
        cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
        rows.append([str(trial.number), f"{trial.value:.4g}", *cells])
    print(f"\n{programs.aligned(rows, range(9**9))}")
    if len({trial.value for trial in best}) > 1:
        importances = optuna.importance.get_param_importances(study)
        parts = (f"{name} {share:.2f}" for name, share in importances.items())
        print(f"\nimportance: {', '.join(parts)}")
    print(f"\nbest: {search.command} {shlex.join(search.flags(best[0].params))}")


@contextlib.contextmanager
def stop_on_signals(search: Search):
    """Inside, Ctrl-C or SIGTERM asks the scripts to stop, which save themselves; again, they are
    killed."""

    received = []

    def handler(number, frame):
        received.append(time.monotonic())
        kill, search.signal = received[-1] - received[0] > 1, number  # uv sends a copy at once
        search.stop.set()
        print("\nstopping after these iterations; Ctrl-C: at once", file=sys.stderr, flush=True)
        for work in list(search.works):
            work.stop(kill)

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def tune(
    command: str,
    search: list[str],
    env_ids: list[str],
    num_seeds: int = 3,
    trials: int = 40,
    study: Path = Path("runs/tune"),
    start_seed: int = 1,
    workers: int = 1,
    prune: bool = True,
    seed: int = 0,
    scales: Path = data.SCALES,
):
    """Search for the flags with the highest returns. The same command goes on where it was cut off;
    several at once, on any number of nodes, work on one study. Exit code 1 if fewer than --trials
    succeeded; the same command then replaces those that failed.

    Args:
        command: e.g. "python ppo.py --total-timesteps 50000"; what is searched is added, --env-id,
            --seed and --run-dir
        search: flags and their values: "learning-rate log 1e-5 1e-2", "ent-coef float 0 0.02",
            "update-epochs int 2 10", "num-steps choice 64 128 256", "anneal-lr flag"
        env_ids: environments
        num_seeds: seeds of each environment in each trial
        trials: trials of the study
        study: its folder
        start_seed: the first seed of the runs
        workers: trials at once, of this process
        prune: end a trial after a seed if it is then below the median of the others
        seed: of the search
        scales: a table of env_id, low, high: the returns that count as 0 and as 1
    """
    at_least(1, num_seeds=num_seeds, trials=trials, workers=workers)
    at_least(0, start_seed=start_seed, seed=seed)
    if not search or not env_ids:
        refuse("--search and --env-ids each need at least one value")
    dimensions = [dimension(text) for text in search]
    for names, what in (([d.name for d in dimensions], "--search"), (env_ids, "--env-ids")):
        if len(set(names)) < len(names):
            refuse(f"{what}: one of them is given twice")
    if given := programs.given_twice(split(command), [*OURS, *(f"--{d.name}" for d in dimensions)]):
        refuse(f"--command {command!r}: {given} is given to each run by this program")
    try:
        import optuna
    except ImportError:
        refuse("needs optuna: pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seeds = list(range(start_seed, start_seed + num_seeds))
    scale = scales_of(env_ids, scales)
    plan = Search(command, dimensions, scale, seeds, trials, study, prune, seed)
    try:
        guard = lock(study / "lock", wait=True)
    except OSError as error:
        refuse(f"--study {study}: {error.strerror}")
    with guard:
        known = plan.open_study()
        settings = known.user_attrs.get("settings")
        if settings is None:
            known.set_user_attr("settings", plan.settings())
        for name, value in plan.settings().items():
            if settings and settings[name] != value:
                refuse(f"--study {study}: {name} was {settings[name]}; give another folder")
        plan.failed_before = {t.number for t in known.trials if t.state.name == "FAIL"}
    with stop_on_signals(plan), ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(plan.worker) for _ in range(workers)]:
            future.result()

    everything = known.trials
    states = [t.state.name for t in everything]
    write(plan, everything)
    report(plan, known, everything)
    done = states.count("COMPLETE") + states.count("PRUNED")
    print(
        f"{done} of {trials} trials done, {states.count('PRUNED')} of them pruned, "
        f"{states.count('FAIL')} failed; table: {study / 'trials.csv'}"
    )
    if plan.stop.is_set():
        print("stopped; the same command goes on")
        raise SystemExit(128 + plan.signal)
    if done < trials:
        raise SystemExit(1)
