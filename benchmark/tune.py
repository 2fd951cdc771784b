"""Search for good flags of a script: `python -m benchmark tune`, by optuna's TPE.

    STUDY/journal.log                         optuna's storage; processes and nodes may share it
    STUDY/<env>/<script>/trial-0007-s<seed>/  a run of a trial, a job as `run` has it
    STUDY/trial-0007.lock                     held by the process that works on the trial
    STUDY/trials.csv                          all trials and their commits, written at the end

A trial that has begun and is not locked was cut off. The next process goes on with it and repeats
no finished run. A run's score is the mean return of its last 100 training episodes, scaled to
0 ... 1 by --scales. A trial's score is the mean over seeds, then over environments. A single
environment needs no scale.
"""

import contextlib
import csv
import math
import os
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np

from benchmark import data, programs
from benchmark.programs import at_least, lock, refuse, split
from benchmark.run import OURS, Work, plan

KINDS = "NAME log LOW HIGH, float LOW HIGH, int LOW HIGH, choice VALUE VALUE ... or flag"

# --- what is searched -----------------------------------------------------------------------------


def dimension(text: str) -> tuple:
    """A flag and optuna's distribution of its values, from e.g. "learning-rate log 1e-5 1e-2"."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    with contextlib.suppress(ValueError):
        match text.removeprefix("--").split():
            case [name, "flag"]:
                return name, CategoricalDistribution([True, False])
            case [name, "choice", *values] if len(set(values)) == len(values) > 1:
                return name, CategoricalDistribution(values)
            case [name, "int", low, high] if int(low) < int(high):
                return name, IntDistribution(int(low), int(high))
            case [name, "log" | "float" as kind, low, top] if (
                0 < float(top) - float(low) < math.inf
            ):
                return name, FloatDistribution(float(low), float(top), log=kind == "log")
    refuse(f"--search {text!r}: give {KINDS}; LOW below HIGH, in log above 0")


def flag(name: str, value) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"  # one word, because a value may begin with "-"


def scales_of(env_ids: list[str], path: Path) -> dict[str, list[float]]:
    """Returns that count as 0 and as 1, by environment; a single one without a scale is not
    scaled."""
    known = data.read_scales(path)
    if len(env_ids) == 1:
        known = {env_ids[0]: data.Scale(0.0, 1.0)} | known
    for name in env_ids:
        if name not in known:
            refuse(f"--env-ids {name}: no scale in {path.name} to weigh it by; tune on it alone")
    return {name: [known[name].low, known[name].high] for name in env_ids}


# --- a trial --------------------------------------------------------------------------------------


class Stopped(Exception):
    """This program has been told to end."""


@dataclass
class Search:
    """What is asked for, and what is running."""

    command: str
    space: dict  # optuna's distribution of each flag
    scales: dict[str, list[float]]  # by environment
    seeds: list[int]
    trials: int
    folder: Path
    prune: bool
    seed: int
    stop: threading.Event = field(default_factory=threading.Event)
    signal: int = 0  # the signal that has set it, and when
    stopped_at: float = 0.0
    works: list[Work] = field(default_factory=list)
    failed_before: int = 0  # trials; they don't count

    def flags(self, params: dict) -> list[str]:
        return [flag(name, params[name]) for name in self.space]

    def study(self):
        """optuna's study, new or from its journal, whose last line is dropped if it was cut off."""
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

        journal = self.folder / "journal.log"
        try:
            open(journal, "ab", opener=programs.no_link).close()
        except OSError as error:
            refuse(f"--study {self.folder}: {error}; give another folder")
        held = JournalFileSymlinkLock(str(journal))  # other processes may write
        held.acquire()
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
        held.release()
        try:
            return optuna.create_study(
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))),
                pruner=optuna.pruners.MedianPruner() if self.prune else optuna.pruners.NopPruner(),
                study_name="tune",
                direction="maximize",
                load_if_exists=True,
            )
        except Exception as error:  # whatever else was done to it
            refuse(f"--study {self.folder}: journal.log is damaged ({error}); give another folder")

    def claim(self, study) -> tuple:
        """A trial to work on and its lock, None if there are enough; and whether any trial is being
        worked on. Trials that were cut off come before new ones."""
        from optuna import samplers, trial

        with lock(self.folder / "lock", wait=True):
            trials = study.get_trials(deepcopy=False)
            running = [t.number for t in trials if t.state.name == "RUNNING"]
            new = [len(trials)] if len(trials) - self.failed_before < self.trials else []
            for folder in self.folder.glob(f"*/*/trial-{len(trials):04}-s*"):
                programs.remove(folder)  # its trial is not in the journal, which was cut
            locks = ((n, lock(self.folder / f"trial-{n:04}.lock")) for n in running + new)
            number, held = next((pair for pair in locks if pair[1]), (None, None))
            if not held:
                return None, None, bool(running)
            # Another seed for each trial: processes must not all begin with the same one
            seed = np.random.SeedSequence((self.seed, number)).generate_state(1)
            study.sampler = samplers.TPESampler(seed=int(seed[0]))
            begun = number in running
            if begun and study.get_trials(deepcopy=False)[number].state.name != "RUNNING":
                held.close()  # another process ended it before we had the lock
                return None, None, True
            mine = trial.Trial(study, trials[number]._trial_id) if begun else study.ask()
            for name, values in self.space.items():
                mine._suggest(name, values)
        return mine, held, True

    def on_signal(self, number, frame):
        """Ask the scripts to save and stop; at a second signal, kill them."""
        self.stopped_at = self.stopped_at or time.monotonic()
        kill = time.monotonic() - self.stopped_at > 1  # uv sends two at once
        self.signal = number
        self.stop.set()
        print("\nstopping after these iterations; Ctrl-C: at once", file=sys.stderr, flush=True)
        for work in self.works:
            work.stop(kill)

    def train(self, number: int, env_id: str, seed: int, flags: list[str]) -> float:
        """Train or go on, unless the run is done; returns the scaled score."""
        command = f"{self.command} {shlex.join(flags)}"
        variant = f"trial-{number:04}"
        (work,) = plan([env_id], command, range(seed, seed + 1), self.folder, variant, 0)
        if work.broken:
            raise ValueError(work.broken)
        self.works.append(work)
        if self.stop.is_set():  # it was set just now
            work.stop()
        work()
        ended = work.read()
        if not ended["done"] and not ended["reason"]:
            raise Stopped
        run = data.read(work.folder)
        score = run.score("training") if ended["done"] else math.nan
        if not math.isfinite(score):
            reason = ended["reason"] or run.reason or f"its score is {score}"
            raise ValueError(f"{env_id}, seed {seed}: {reason}; {work.folder / 'log.txt'}")
        low, high = self.scales[env_id]
        return (score - low) / (high - low)

    def train_all(self, trial, flags: list[str]) -> tuple[dict, bool]:
        """Scores by environment, and whether the trial was pruned; reports after each seed."""
        scores = {env_id: [] for env_id in self.scales}
        reported = trial.study.trials[trial.number].intermediate_values
        for k, seed in enumerate(self.seeds):
            for env_id, mine in scores.items():
                mine.append(self.train(trial.number, env_id, seed, flags))
            if k not in reported:
                trial.report(mean(map(mean, scores.values())), k)
            if seed != self.seeds[-1] and trial.should_prune():
                return scores, True
        return scores, False

    def work(self, trial):
        """Do what is left of a trial and tell the study how it ended."""
        from optuna.trial import TrialState

        start = time.time()
        flags = self.flags(trial.params)
        try:
            scores, pruned = self.train_all(trial, flags)
        except (OSError, ValueError) as error:  # a run that failed, or its table
            trial.study.tell(trial, state=TrialState.FAIL)
            print(f"trial {trial.number} failed: {shlex.join(flags)}\n  {error}", file=sys.stderr)
            return
        score = mean(map(mean, scores.values()))
        trial.set_user_attr("scores", scores)
        if pruned:
            trial.study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.study.tell(trial, score)
        ended = ", pruned" if pruned else ""
        told = f"{score:.4g}{ended}, {time.time() - start:.0f} s"
        print(f"trial {trial.number}: {told}  {shlex.join(flags)}", flush=True)

    def worker(self):
        """Work on trials until there are enough."""
        study = self.study()
        running = True
        while running and not self.stop.is_set():
            trial, held, running = self.claim(study)
            if not trial:  # another process may be killed and leave us its own
                if running:
                    self.stop.wait(0.5)
                continue
            with held, contextlib.suppress(Stopped):
                self.work(trial)


# --- all trials -----------------------------------------------------------------------------------


def write(search: Search, trials: list) -> list[list]:
    """Write trials.csv, one process at a time; returns its header and a row for each trial."""
    rows = [["trial", "state", "score", "seconds", *search.space, *search.scales, "commit"]]
    for trial in trials:
        scores = trial.user_attrs.get("scores", {})
        seconds = trial.duration and round(trial.duration.total_seconds(), 1)
        row = [trial.number, trial.state.name.lower(), trial.value, seconds]
        row += [trial.params.get(name, "") for name in search.space]
        row += [mean(scores[env_id]) if scores else "" for env_id in search.scales]
        jobs = sorted(search.folder.glob(f"*/*/trial-{trial.number:04}-s*/job.json"))
        starts = [start for job in jobs for start in Work(job.parent, None).read()["starts"]]
        row.append(starts[0].get("git_commit") if starts else "")
        rows.append(row)
    table = search.folder / "trials.csv"
    with lock(search.folder / "lock", wait=True), open(table, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return rows


def report(search: Search, study, trials: list, rows: list[list]):
    """Print the best trials from the rows that `write` gave, what mattered, the best command."""
    import optuna

    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    best = sorted(complete, key=lambda trial: -trial.value)
    if not best:
        return
    header, *table = rows
    shown = [header[:-1]]  # without the commit
    for trial in best[:10]:
        cells = table[trial.number][:-1]
        shown.append([f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells])
    print(f"\n{programs.aligned(shown, range(len(shown[0])))}")
    if best[0].value > best[-1].value:
        importances = optuna.importance.get_param_importances(study)
        parts = (f"{name} {share:.2f}" for name, share in importances.items())
        print(f"\nimportance: {', '.join(parts)}")
    print(f"\nbest: {search.command} {shlex.join(search.flags(best[0].params))}")


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
    """Search for the flags with the highest returns. A command that was cut off goes on if it is
    given again. Several commands at once, on any number of nodes, work on one study. The exit code
    is 1 if fewer than --trials succeeded; the same command then replaces those that failed.

    Args:
        command: the program, e.g. "python ppo.py --total-timesteps 50000"; the searched flags,
            --env-id, --seed and --run-dir are added
        search: flags and their values: "learning-rate log 1e-5 1e-2", "ent-coef float 0 0.02",
            "update-epochs int 2 10", "num-steps choice 64 128 256", "anneal-lr flag"
        env_ids: environments to train on
        num_seeds: number of seeds for each environment in each trial
        trials: number of trials
        study: folder of the study
        start_seed: the first seed of the runs
        workers: number of trials at once in this process
        prune: end a trial after a seed if it is then below the median of the others
        seed: seed of the search
        scales: table of env_id, low, high: the returns that count as 0 and as 1
    """
    import optuna

    at_least(1, num_seeds=num_seeds, trials=trials, workers=workers)
    at_least(0, start_seed=start_seed, seed=seed)
    if not search or not env_ids:
        refuse("--search and --env-ids each need at least one value")
    space = dict(map(dimension, search))
    if len(space) < len(search) or len(set(env_ids)) < len(env_ids):
        refuse("--search or --env-ids: one of them is given twice")
    if given := programs.given_twice(split(command), [*OURS, *(f"--{name}" for name in space)]):
        refuse(f"--command {command!r}: {given} is given to each run by this program")
    programs.warn_of_cores(split(command), workers)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seeds = list(range(start_seed, start_seed + num_seeds))
    asked = Search(command, space, scales_of(env_ids, scales), seeds, trials, study, prune, seed)
    common = {"command": command, "search": search, "scales": asked.scales, "seeds": seeds}
    try:
        guard = lock(study / "lock", wait=True)
    except OSError as error:
        refuse(f"--study {study}: {error.strerror}")
    with guard:
        known = asked.study()
        before = known.user_attrs.get("settings", common)
        for name, value in common.items():
            if before.get(name) != value:
                refuse(f"--study {study}: {name} was {before.get(name)}; give another folder")
        known.set_user_attr("settings", common)
        asked.failed_before = sum(t.state.name == "FAIL" for t in known.trials)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked.on_signal)
    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(asked.worker) for _ in range(workers)]:
            future.result()

    ended = known.trials
    states = [t.state.name for t in ended]
    report(asked, known, ended, write(asked, ended))
    pruned = states.count("PRUNED")
    failed = states.count("FAIL")
    done = states.count("COMPLETE") + pruned
    told = f"{done} of {trials} trials done, {pruned} of them pruned, {failed} failed"
    print(f"{told}; table: {study / 'trials.csv'}")
    if asked.stop.is_set():
        print("stopped; the same command goes on")
        raise SystemExit(128 + asked.signal)
    if done < trials:
        raise SystemExit(1)
