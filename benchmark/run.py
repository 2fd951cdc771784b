"""Train scripts on environments with seeds: `python -m benchmark run`.

Every job has a folder, runs-dir/<env>/<script>/<variant>-s<seed>:

    job.json         the command, how it ended, and the provenance of each of its starts
    run/             the script's own run folder
    log.txt          what the script said
    evaluation.json  returns of the final policy
    lock             held by the job's processes as long as one of them lives

All state is in these files. A command given again skips jobs that are finished, resumes those that
were cut off, tries failed ones again, and waits for those that run already.
"""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from tqdm import tqdm

from benchmark import data, programs
from benchmark.programs import at_least, executable, lock, refuse, script_at, tail, write_json
from benchmark.verify import keep

PLACES = ("{env_id}", "{seed}", "{run_dir}")  # in the command of a program that is not ours
OURS = ("--env-id", "--seed", "--run-dir")  # the flags that each job is given


class Ended(Exception):
    """How a program ended that failed; empty if it was stopped."""


def again(job: dict) -> list[str]:
    """The flags of a job that its folder may not give: they may name a module or a file."""
    words = shlex.split(job["command"])
    found = [i for i, word in enumerate(words) if re.match(r"--(eval[-_])?env[-_]kwargs", word)]
    kwargs = [x for i in found for x in words[i : i + 2 - ("=" in words[i])]]
    return ["--env-id", job["env_id"], *kwargs]


@dataclass(eq=False)
class Work:
    """A job: it trains or goes on, plays the final policy, and leaves a table."""

    folder: Path
    results: Path | None = None
    keep: bool = False  # also keep its policy in results
    tries: int = 1
    process: subprocess.Popen | None = None
    stopped: bool = False  # by SIGTERM
    lock: TextIO | None = None

    def __str__(self) -> str:
        return "/".join(self.folder.parts[-3:])

    def __call__(self):
        with contextlib.suppress(ValueError):  # in a thread, which gets no signals
            signal.signal(signal.SIGTERM, lambda *_: self.stop())
        while not (held := lock(self.folder / "lock")):
            if self.stopped:
                return
            time.sleep(0.2)
        with held as self.lock:
            for left in reversed(range(self.tries)):
                job = self.read()
                if self.ready(job) or self.stopped:
                    return
                job |= {"done": False, "reason": ""}
                write_json(self.folder / "job.json", job)
                try:
                    self.train(job)
                    self.finish(job)
                    job["done"] = True
                except (Exception, SystemExit) as error:  # the disk, the command, the run's table
                    job["reason"] = str(error)
                write_json(self.folder / "job.json", job)
                if job["done"] or re.match(r"exit code 2\b", job["reason"]):  # wrong arguments
                    return
                if left and not self.stopped:
                    say(f"{self}: {job['reason']}; is tried again")

    def locked(self) -> bool:
        """Whether a process of this job lives."""
        if held := lock(self.folder / "lock"):
            held.close()
        return not held

    def read(self) -> dict:
        """The content of job.json; of a job that is not done if it can't be read."""
        start = {"done": False, "reason": "", "foreign": False, "starts": []}
        return start | data.read_json(self.folder / "job.json")

    def ready(self, job: dict) -> bool:
        """Whether nothing that is asked for is missing."""
        if not job["done"] or self.results is None:
            return job["done"]
        table = data.committed(job, self.results)
        lacks = self.keep and not job.get("policy") and not table.with_suffix(".pt").exists()
        return table.exists() and not lacks

    def stop(self):
        """Ask the program to end, once."""
        if self.process and not self.stopped:
            self.process.terminate()
        self.stopped = True

    def start(self, words: list[str]):
        """Run a command to its end, and hand SIGTERM on to it."""
        path = self.folder / "log.txt"
        variables = {"OMP_NUM_THREADS": "1"} | os.environ
        with open(path, "a") as log:
            log.write(f"$ {shlex.join(words)}\n")
            log.flush()
            # Slurm warns all processes of a job: the program inherits that it does not listen
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
            self.process = subprocess.Popen(
                executable(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables,
                start_new_session=True, pass_fds=[self.lock.fileno()],
            )  # fmt: skip
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
            if self.stopped:
                self.process.terminate()
            code = self.process.wait()
        if code:
            how = f"{programs.how_it_ended(code)}: {programs.last_word(path)}"
            raise Ended("" if self.stopped else how)

    def train(self, job: dict):
        words = shlex.split(job["command"])
        run = self.folder / "run"
        if data.read_json(run / "run.json").get("status") == "finished":
            return
        resumed = not job["foreign"] and (run / "checkpoint.pt").exists()
        if resumed:
            words = [*words[: script_at(words) + 1], "--resume", str(run), *again(job)]
        else:
            shutil.rmtree(run, ignore_errors=True)
            (self.folder / "evaluation.json").unlink(missing_ok=True)
        before = job["starts"] if resumed else []
        job["starts"] = [*before, programs.provenance(executable(words))]
        write_json(self.folder / "job.json", job)
        self.start(words)
        if data.read_json(run / "run.json").get("status") != "finished":
            raise Ended(f"exit code 0, but {run / 'run.json'} does not say that it is finished")

    def finish(self, job: dict):
        """Play and write the table."""
        run = self.folder / "run"
        log = self.folder / "log.txt"
        data.read_place(self.folder)  # an error if the run can't be read
        returns = data.read_json(self.folder / "evaluation.json").get("returns", [])
        if job["eval_episodes"] not in (0, len(returns)):
            words = shlex.split(job["command"])
            flags = ["--evaluate", str(run), "--eval-episodes", str(job["eval_episodes"])]
            flags += again(job)
            self.start(["python", words[script_at(words)], *flags])
            output = log.read_text(errors="replace").rpartition("\n$ ")[2]
            returns = programs.played_returns(output)
            if len(returns) != job["eval_episodes"]:
                raise Ended(f"{len(returns)} of {job['eval_episodes']} episodes were played")
            write_json(self.folder / "evaluation.json", {"returns": returns})
        if self.results:
            data.commit(run, job, returns, self.results)
            kept = self.keep and keep(run, data.committed(job, self.results))
            job["policy"] = kept or ""  # why it is not kept

    def checkpoint(self):
        """When Slurm warns of the time limit: stop the script, which saves, and queue the job."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        with contextlib.suppress(ChildProcessError):  # it has just ended
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Work(self.folder, self.results, self.keep, self.tries))


class Local:
    """Programs on this machine, `workers` at once."""

    def __init__(self, workers: int):
        self.pool = ThreadPoolExecutor(workers)

    def start(self, jobs: list[Work]):
        self.futures = {job: self.pool.submit(job) for job in jobs}

    def ended(self, jobs: list[Work]) -> list[Work]:
        time.sleep(0.5)
        return [job for job in jobs if self.futures[job].done()]

    def stop(self) -> str:
        self.pool.shutdown(wait=False, cancel_futures=True)
        for job in self.futures:
            job.stop()
        self.pool.shutdown()
        return "stopped; the same command goes on"


class Slurm:
    """A Slurm array. A job that is requeued, or warned of its time limit, goes on."""

    def __init__(self, folder: Path, workers: int, minutes: int, flags: tuple[str, ...]):
        from submitit import SlurmExecutor

        try:
            self.executor = SlurmExecutor(folder / "submitit", max_num_timeout=1000)
        except RuntimeError as error:
            refuse(f"--cluster slurm: {error}")
        given = {name: value or True for name, _, value in (flag.partition("=") for flag in flags)}
        more = {"requeue": True} | given
        self.executor.update_parameters(
            array_parallelism=workers, time=minutes, additional_parameters=more
        )
        self.queue = None  # the ids of this user's jobs that waited or ran when Slurm was asked
        self.ids = {}  # by job

    def ask(self):
        time.sleep(3.0)
        command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            self.queue = set(done.stdout.split())
        elif self.queue is None:  # what an earlier command has submitted must be known
            refuse(f"squeue: {done.stderr.strip()}")

    def start(self, jobs: list[Work]):
        """Hand over all jobs that no earlier command has handed over."""
        self.ask()
        self.ids = {job: job.read().get("slurm", "") for job in jobs}
        new = [job for job in jobs if self.ids[job] not in self.queue]
        for job, handle in zip(new, self.executor.submit_array(new) if new else [], strict=True):
            self.ids[job] = handle.job_id
            write_json(job.folder / "job.json", job.read() | {"slurm": handle.job_id})

    def ended(self, jobs: list[Work]) -> list[Work]:
        self.ask()
        return [job for job in jobs if self.ids[job] not in self.queue and not job.locked()]

    def stop(self) -> str:
        ids = " ".join(sorted(set(self.ids.values()) & self.queue))
        return f"Slurm goes on; the same command watches, this ends it: scancel {ids}"


def plan(
    env_ids: list[str], command: str, seeds: range, runs_dir: Path, variant: str,
    eval_episodes: int, **more,
) -> list[Work]:  # fmt: skip
    """The jobs of a command. New ones get their folder and job.json."""
    words = programs.split(command)
    foreign = any(place in command for place in PLACES)
    if script_at(words) is None:
        refuse(f"--command {command!r}: names no script (a word that ends with .py)")
    if not foreign:
        if given := programs.given_twice(words, OURS):
            refuse(f"--command {command!r}: {given} is given to each job by this program")
        words += itertools.chain(*zip(OURS, PLACES, strict=True))
    needed = PLACES if len(env_ids) > 1 else PLACES[1:]
    if lacking := [place for place in needed if place not in shlex.join(words)]:
        refuse(f"--command {command!r}: {lacking[0]} is missing, so all jobs would be the same")
    if not re.fullmatch(r"[\w.+-]+", variant):
        refuse(f"--variant {variant!r}: must be a word; it names files")
    jobs = []
    for env_id, seed in itertools.product(env_ids, seeds):
        job = {"env_id": env_id, "script": Path(words[script_at(words)]).stem}
        folder = runs_dir / data.slug(env_id) / job["script"] / f"{variant}-s{seed}"
        own = words
        for place, value in zip(PLACES, (env_id, seed, folder / "run"), strict=True):
            own = [word.replace(place, str(value)) for word in own]
        job |= {"variant": variant, "seed": seed, "asked": command, "command": shlex.join(own)}
        job |= {"foreign": foreign, "eval_episodes": 0 if foreign else eval_episodes}
        work = Work(folder, **more)
        before = work.read()
        for name in ("asked", "env_id"):
            if before.get(name, job[name]) != job[name]:
                how = "give another --variant or --runs-dir, or delete it"
                refuse(f"{folder} was made by {before['asked']!r} for {before['env_id']}; {how}")
        if before.get("eval_episodes") != job["eval_episodes"]:
            job |= {"done": False, "reason": ""}
        if before | job != before:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "job.json", before | job)
        jobs.append(work)
    return jobs


def say(line: str):
    tqdm.write(line)
    sys.stdout.flush()


def outcome(job: Work) -> str:
    """How a job ended, in words."""
    ended = job.read()
    if not ended["done"]:
        return f"failed; {ended['reason'] or 'cut off'}"
    run = data.read(job.folder)
    scores = [f"{name} return {run.score(name):,.1f}" for name in ("training", "evaluation")]
    return "; ".join(["done", ", ".join(scores), *filter(None, [ended.get("policy")])])


def run(
    env_ids: list[str],
    command: str,
    num_seeds: int = 5,
    start_seed: int = 1,
    workers: int = 1,
    runs_dir: Path = Path("runs/benchmark"),
    variant: str = "default",
    results: Path | None = None,
    keep_policies: bool = False,
    eval_episodes: int = 20,
    retries: int = 2,
    cluster: Literal["local", "slurm"] = "local",
    slurm_minutes: int = 24 * 60,
    sbatch: tuple[str, ...] = (),
    dry_run: bool = False,
):
    """Train on every environment with every seed. Jobs that are finished are skipped, those that
    were cut off go on, and failed ones are tried again. The exit code is 1 if a job failed.

    Args:
        env_ids: environments to train on
        command: the program, e.g. "python ppo.py --total-timesteps 100000"; it is given --env-id,
            --seed and --run-dir, or these in the place of {env_id}, {seed} and {run_dir} in it
        num_seeds: number of seeds for each environment
        start_seed: the first seed
        workers: number of jobs at once
        runs_dir: folder with the jobs' folders
        variant: name of this setting of the script
        results: folder for the compressed table of each finished run, to commit
        keep_policies: also keep each run's policy of at most 1 MB there; `verify` plays it again
        eval_episodes: episodes that the final policy plays after training; 0: none
        retries: further tries of a job that fails
        cluster: where jobs run: as processes on this machine, or in a Slurm array
        slurm_minutes: time limit of a Slurm job; a job that reaches it is queued again and goes on
        sbatch: further flags of sbatch, e.g. partition=long cpus-per-task=4 gpus-per-node=1
        dry_run: print the commands and start nothing
    """
    at_least(1, env_ids=len(env_ids), num_seeds=num_seeds, workers=workers)
    at_least(0, start_seed=start_seed, retries=retries, eval_episodes=eval_episodes)
    if keep_policies and not (results and eval_episodes):
        refuse("--keep-policies: keeps them in --results, with the --eval-episodes they played")
    seeds = range(start_seed, start_seed + num_seeds)
    asked = (env_ids, command, seeds)
    if dry_run:
        with tempfile.TemporaryDirectory() as empty:
            for job in plan(*asked, Path(empty), variant, eval_episodes):
                print(job.read()["command"].replace(empty, str(runs_dir)))
        return
    more = {"results": results, "keep": keep_policies, "tries": 1 + retries}
    jobs = plan(*asked, runs_dir, variant, eval_episodes, **more)
    if cluster == "local":
        place = Local(workers)
    else:
        place = Slurm(runs_dir, workers, slurm_minutes, sbatch)
    left = [job for job in jobs if not job.ready(job.read())]
    say(f"{len(jobs)} jobs in {runs_dir}, {len(jobs) - len(left)} done before")
    for job in filter(Work.locked, left):  # another command runs it, or a killed one has left it
        say(f"{job}: runs already")
    signals = []
    programs.on_signals(signals.append)
    place.start(left)
    with tqdm(total=len(left), unit=" jobs", leave=False, disable=None) as bar:  # on a terminal
        while left and not signals:
            for job in place.ended(left):
                left.remove(job)
                say(f"{job}: {outcome(job)}")
                bar.update()
    if signals:
        say(place.stop())
        raise SystemExit(128 + signals[0])
    failed = [job for job in jobs if not job.ready(job.read())]
    for job in failed:
        print(f"\n{job} {outcome(job)}\n  log: {job.folder / 'log.txt'}")
        print("".join(f"  | {line}\n" for line in tail(job.folder / "log.txt")), end="")
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs done, {len(failed)} failed")
    if failed:
        raise SystemExit(1)
