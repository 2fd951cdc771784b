"""Search for good flags of a script: `python -m benchmark tune`, by optuna's TPE.

    STUDY/journal.log                         optuna's storage; processes and nodes may share it
    STUDY/<env>/<script>/trial-0007-s<seed>/  a run of a trial, a job as `run` has it
    STUDY/trials.csv                          all trials and their commits, written at the end

A trial that was stopped or killed is queued again: it repeats no finished run, and goes on with the
others. A run's score is the mean return of its last 100 training episodes, of several environments
scaled to 0 ... 1 by --scales. A trial's score is the mean over seeds, then over environments.
"""

import contextlib
import csv
import fcntl
import math
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from benchmark import data, programs
from benchmark.programs import at_least, duration, number, refuse, split
from benchmark.run import OURS, Work, plan

KINDS = "NAME log LOW HIGH, float LOW HIGH, int LOW HIGH, choice VALUE VALUE ... or flag"


def dimension(text: str) -> tuple:
    """A flag and optuna's distribution of its values, from e.g. "learning-rate log 1e-5 1e-2"."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    with contextlib.suppress(ValueError):
        match text.removeprefix("--").split():
            case [name, "flag"]:
                return name, CategoricalDistribution([True, False])
            case [name, "choice", *values] if len(set(values)) == len(values) > 1:
                return name, CategoricalDistribution(values)
            case [name, "int", low, high]:
                return name, IntDistribution(int(low), int(high))
            case [name, "log" | "float" as kind, low, high] if math.isfinite(float(high)):
                return name, FloatDistribution(float(low), float(high), log=kind == "log")
    refuse(f"--search {text!r}: give {KINDS}; LOW below HIGH, in log above 0")


def flag(name: str, value) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"  # one word, because a value may begin with "-"


def place(trial) -> int:
    """The number by which a trial's runs are named: that of the trial that it goes on with."""
    return trial.user_attrs.get("runs", trial.number)


def done(study) -> int:
    states = [trial.state.name for trial in study.get_trials(deepcopy=False)]
    return states.count("COMPLETE") + states.count("PRUNED")


class Stopped(Exception):
    """This program has been told to end."""


@dataclass
class Search:
    """What is asked for, and what is running."""

    command: str
    space: dict  # optuna's distribution of each flag
    scales: dict[str, list[float]]  # returns that count as 0 and as 1, by environment
    seeds: list[int]
    trials: int
    folder: Path
    stopped_by: int = 0  # a signal
    works: list[Work] = field(default_factory=list)

    def flags(self, params: dict) -> str:
        return shlex.join(flag(name, params[name]) for name in self.space)

    def stop(self, number: int):
        """Ask the scripts to save and stop."""
        self.stopped_by = number
        print("\nstopping after these iterations", file=sys.stderr, flush=True)
        for work in self.works:
            work.stop()

    def train(self, trial, env_id: str, seed: int) -> float:
        """Train or go on, unless the run is done; returns the scaled score."""
        command = f"{self.command} {self.flags(trial.params)}"
        variant = f"trial-{place(trial):04}"
        (work,) = plan([env_id], command, range(seed, seed + 1), self.folder, variant, 0)
        self.works.append(work)
        if self.stopped_by:  # just now
            work.stop()
        work()
        job = work.read()
        if work.stopped and not job["done"]:
            raise Stopped
        score = data.read(work.folder).score("training") if job["done"] else math.nan
        if not math.isfinite(score):
            reason = job["reason"] or f"its score is {score}"
            trial.set_user_attr("reason", f"{reason}; {work.folder / 'log.txt'}")
            raise ValueError(reason)
        print(f"  {work}: return {number(score)}", flush=True)
        low, high = self.scales[env_id]
        return (score - low) / (high - low)

    def objective(self, trial) -> float:
        """A trial's score; reports to the pruner after each seed."""
        from optuna import TrialPruned

        for name, values in self.space.items():
            trial._suggest(name, values)
        scores = {env_id: [] for env_id in self.scales}
        for k, seed in enumerate(self.seeds):
            for env_id, own in scores.items():
                own.append(self.train(trial, env_id, seed))
            score = mean(map(mean, scores.values()))
            trial.report(score, k)
            trial.set_user_attr("scores", scores)
            if seed != self.seeds[-1] and trial.should_prune():
                raise TrialPruned
        return score

    def ended(self, study, trial):
        """Tell how a trial ended. One that was stopped is queued again."""
        state = trial.state.name.lower()
        if self.stopped_by:
            if state == "fail":
                study.enqueue_trial(trial.params, user_attrs={"runs": place(trial)})
            study.stop()
            return
        told = f"failed: {trial.user_attrs.get('reason')}"
        if trial.value is not None:
            told = f"{state}, score {trial.value:.4g}, {duration(trial.duration.total_seconds())}"
        line = f"trial {place(trial)} ({done(study)} of {self.trials} done): {told}"
        print(f"{line}  {self.flags(trial.params)}", flush=True)


def write(search: Search, trials: list):
    """Write trials.csv."""
    rows = [["trial", "state", "score", "seconds", *search.space, *search.scales, "commit"]]
    for trial in trials:
        scores = trial.user_attrs.get("scores", {})
        seconds = trial.duration and round(trial.duration.total_seconds(), 1)
        row = [place(trial), trial.state.name.lower(), trial.value, seconds]
        row += [trial.params.get(name, "") for name in search.space]
        row += [mean(scores[env_id]) if scores else "" for env_id in search.scales]
        jobs = sorted(search.folder.glob(f"*/*/trial-{place(trial):04}-s*/job.json"))
        starts = [start for job in jobs for start in data.read_json(job).get("starts", [])]
        rows.append([*row, starts[0].get("git_commit") if starts else ""])
    with open(search.folder / "trials.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


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
        command: the program, e.g. "python ppo.py --total-timesteps 50000"; the rest is added
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
    from optuna.storages.journal import JournalFileBackend
    from optuna.study import MaxTrialsCallback
    from optuna.trial import TrialState

    at_least(1, num_seeds=num_seeds, trials=trials, workers=workers)
    space = dict(map(dimension, search))
    if not search or len(space) < len(search):
        refuse("--search: give each flag once, and one at least")
    if given := programs.given_twice(split(command), [*OURS, *(f"--{name}" for name in space)]):
        refuse(f"--command {command!r}: {given} is given to each run by this program")
    known = {env_ids[0]: (0.0, 1.0)} if len(env_ids) == 1 else data.read_scales(scales)
    if unknown := set(env_ids) - set(known):
        refuse(f"--env-ids: no scale in {scales} to weigh {', '.join(unknown)} by; tune it alone")
    seeds = list(range(start_seed, start_seed + num_seeds))
    ends = {name: list(known[name][:2]) for name in env_ids}
    asked = Search(command, space, ends, seeds, trials, study)
    study.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    found = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(study / "journal.log"))),
        pruner=optuna.pruners.MedianPruner() if prune else optuna.pruners.NopPruner(),
        study_name="tune",
        direction="maximize",
        load_if_exists=True,
    )
    common = {"command": command, "search": search, "scales": ends, "seeds": seeds}
    for name, value in common.items():
        before = found.user_attrs.get("settings", common)[name]
        if before != value:
            refuse(f"--study {study}: {name} was {before}; give another folder")
    found.set_user_attr("settings", common)
    commands = found.user_attrs.get("commands", 0)
    found.set_user_attr("commands", commands + 1)
    found.sampler = optuna.samplers.TPESampler(seed=seed + commands)  # each tries other flags
    guard = programs.lock(study / "lock")
    if guard:  # nobody else works on the study: trials that run were killed
        for trial in found.trials:
            if trial.state.name == "RUNNING":
                found.tell(trial.number, state=TrialState.FAIL)
                found.enqueue_trial(trial.params, user_attrs={"runs": place(trial)})
    with guard or open(study / "lock") as working:
        fcntl.flock(working, fcntl.LOCK_SH)
        missing = trials - done(found)
        unit = "the mean return of a run's last 100 training episodes"
        unit += f", where 0 and 1 are the ends in {scales}" if len(env_ids) > 1 else ""
        runs = f"each of {num_seeds} seeds on {len(env_ids)} environments"
        print(f"{missing} of {trials} trials to do, {runs}, {workers} at once; a score is {unit}")
        programs.on_signals(asked.stop)
        if missing > 0:
            states = TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING
            callbacks = [asked.ended, MaxTrialsCallback(trials, states)]
            catch = ValueError, Stopped
            found.optimize(asked.objective, missing, None, workers, catch, callbacks)
    # of a trial that was queued again the last try counts
    tried = list({place(trial): trial for trial in found.trials}.values())
    write(asked, tried)
    states = [trial.state.name for trial in tried]
    elsewhere = states.count("RUNNING")  # by other processes
    told = f"{done(found)} of {trials} trials done, {states.count('FAIL')} failed"
    told += f", {elsewhere} run in another process" if elsewhere else ""
    print(f"{told}; table: {study / 'trials.csv'}")
    if "COMPLETE" in states:
        print(f"best score: {found.best_value:.4g}, by {command} {asked.flags(found.best_params)}")
    if asked.stopped_by:
        print("stopped; the same command goes on")
        raise SystemExit(128 + asked.stopped_by)
    if done(found) + elsewhere < trials:
        raise SystemExit(1)
