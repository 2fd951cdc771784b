"""Train scripts on environments with seeds: `python -m benchmark run`.

Every job has a folder, runs-dir/<env>/<script>/<variant>-s<seed>:

    job.json         the command and how it ended; "starts" has the source, commit, versions and
                     hardware that it began with, and those of each resumption in which any of
                     them but the commit had changed
    run/             the script's own run folder
    log.txt          what the script said
    evaluation.json  returns of the final policy
    lock             held by the job's processes as long as one of them lives

All state is in these files. A command given again skips jobs that are finished, resumes those that
were cut off, and tries failed ones again. It waits for jobs that run already: another command runs
them, or a killed one has left them.
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO

from tqdm import tqdm

from benchmark import data, programs
from benchmark.programs import at_least, executable, lock, refuse, script_at, tail, write_json
from benchmark.verify import MOST, NotKept, keep, weight

ENDING = (signal.SIGINT, signal.SIGTERM)  # they end `run`
STOPPED = {-15, 128 + 15, -2, 128 + 2, -10, 128 + 10}  # by SIGTERM, SIGINT or SIGUSR1
PLACES = ("{env_id}", "{seed}", "{run_dir}")  # in the command of a program that is not ours
OURS = ("--env-id", "--seed", "--run-dir")  # the flags that each job is given
KINDS = {  # types of what job.json holds
    "env_id": str, "script": str, "variant": str, "seed": int, "asked": str, "command": str,
    "foreign": bool, "done": bool, "reason": str, "eval_episodes": int, "starts": list,
    "policy": str,
}  # fmt: skip


# --- one job --------------------------------------------------------------------------------------


class Ended(Exception):
    """A program did not end well. The message says how, and is empty if the program was stopped."""


@dataclass(eq=False)
class Work:
    """A job: it trains or goes on, plays the final policy, and leaves a table."""

    folder: Path
    results: Path | None
    variables: dict[str, str] = field(default_factory=dict)  # of its programs' environment
    process: subprocess.Popen | None = None
    stopped: bool = False  # by SIGTERM
    lock: TextIO | None = None
    slurm_id: str = ""
    broken: str = ""  # why its folder can't be used
    keep: bool = False  # also keep its policy in results

    def __call__(self):
        with contextlib.suppress(ValueError):  # in a thread, which gets no signals
            signal.signal(signal.SIGTERM, lambda *_: self.stop())
        try:
            held = self.hold()
        except OSError as error:  # for example, its lock is a link
            self.write(self.read() | {"done": False, "reason": str(error)})
            return
        if not held:
            return
        with held as self.lock:
            job = self.read() | {"done": False, "reason": ""}
            self.write(job)
            try:
                self.train(job)
                self.finish(job)
                job["done"] = True
            except (Exception, SystemExit) as error:  # the disk, the command, the run's table
                job["reason"] = str(error)
            self.write(job)

    def __str__(self) -> str:
        return "/".join(self.folder.parts[-3:])

    def hold(self) -> TextIO | None:
        """Wait for its lock; None if the job is stopped before."""
        while not self.stopped:
            held = lock(self.folder / "lock")
            if held:
                return held
            time.sleep(0.2)
        return None

    def load(self) -> dict:
        """The content of job.json, empty if there is none; ValueError if a type is wrong."""
        path = self.folder / "job.json"
        job = data.load_json(path) if data.there(path) else {}
        for name, kind in KINDS.items():
            if name in job:
                data.typed(f"{name} in job.json", job[name], kind)
        for start in job.get("starts", []):
            data.typed("a start in job.json", start, dict)
        return job

    def read(self) -> dict:
        """The content of job.json; if it can't be read, one of a job that is not done."""
        try:
            job = self.load()
        except (OSError, ValueError) as error:
            job = {"reason": str(error)}
        return {"done": False, "reason": "", "foreign": False, "starts": []} | job

    def write(self, job: dict):
        write_json(self.folder / "job.json", job)

    def stop(self, kill: bool = False):
        """Ask the program to end, but only once; or kill it."""
        if self.process and kill:
            self.process.kill()
        elif self.process and not self.stopped:
            self.process.terminate()
        self.stopped = True

    def environment(self) -> dict[str, str]:
        """The environment variables of its programs."""
        return {"OMP_NUM_THREADS": "1"} | os.environ | self.variables

    def record(self, job: dict, words: list[str], resumed: bool):
        """Note in job.json what the command is started with. What a run is resumed with is noted if
        it has changed."""
        now = programs.provenance(executable(words), self.environment())
        starts = job["starts"] if resumed else []
        same = ("source_sha256", "versions", "hardware")
        if not starts or any(now[name] != starts[-1].get(name) for name in same):
            starts = [*starts, now]
        job["starts"] = starts
        self.write(job)

    def start(self, words: list[str]):
        """Run a command to its end, and hand SIGTERM on to it."""
        if self.stopped:
            raise Ended
        path = self.folder / "log.txt"
        with open(path, "a", opener=programs.no_link) as log:
            log.write(f"$ {shlex.join(words)}\n")
            log.flush()
            self.process = subprocess.Popen(
                executable(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment(), start_new_session=True, pass_fds=[self.lock.fileno()],
            )  # fmt: skip
            if self.stopped:  # since the question above
                self.process.terminate()
            code = self.process.wait()
        if code in STOPPED or (code and self.stopped):
            raise Ended
        if code:
            raise Ended(f"{programs.how_it_ended(code)}: {programs.last_word(path)}")

    def train(self, job: dict):
        words = shlex.split(job["command"])
        run = self.folder / "run"
        if run.is_symlink():
            raise Ended(f"a link, which is not followed: {run}")
        if data.read_json(run / "run.json").get("status") == "finished":
            return
        resumed = not job["foreign"] and (run / "checkpoint.pt").exists()
        if resumed:  # the id is given again: if it names a module, this lets the module's code run
            words = words[: script_at(words) + 1]
            words += ["--resume", str(run), "--env-id", job["env_id"]]
        else:
            shutil.rmtree(run, ignore_errors=True)
            (self.folder / "evaluation.json").unlink(missing_ok=True)
        self.record(job, words, resumed)
        self.start(words)
        if data.read_json(run / "run.json").get("status") != "finished":
            raise Ended(f"exit code 0, but {run / 'run.json'} does not say that it is finished")

    def finish(self, job: dict):
        """Play and write the table."""
        run = self.folder / "run"
        log = self.folder / "log.txt"
        returns = self.played()
        data.read_folder(run, job)  # an error if the run can't be read
        if job["eval_episodes"] not in (0, len(returns)):
            words = shlex.split(job["command"])
            flags = ["--evaluate", str(run), "--env-id", job["env_id"]]
            flags += ["--eval-episodes", str(job["eval_episodes"])]
            before = log.stat().st_size
            self.start(["python", words[script_at(words)], *flags])
            with open(log, "rb") as file:
                file.seek(before)
                said = file.read().decode(errors="replace")
            returns = programs.episodes_told(said)
            write_json(self.folder / "evaluation.json", {"returns": returns})
        job["policy"] = ""
        if self.results:
            data.commit(run, job, returns, self.results)
        if self.results and self.keep:
            try:
                keep(run, data.committed(job, self.results))
            except NotKept as why:
                job["policy"] = str(why)

    def played(self) -> list:
        """Returns of the final policy, empty if it has not played; deletes a file without any."""
        path = self.folder / "evaluation.json"
        if not data.there(path):
            return []
        try:
            returns = data.load_json(path).get("returns")
            data.scores(returns)
        except (OSError, ValueError, TypeError):
            path.unlink()
            return []
        return returns

    def checkpoint(self):
        """When Slurm warns of the time limit: stop the script, which saves, and queue the job."""
        from submitit.helpers import DelayedSubmission

        self.process.terminate()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Work(self.folder, self.results, keep=self.keep))


# --- all jobs -------------------------------------------------------------------------------------


class Local:
    """Programs on this machine, `workers` at once, each with its share of the GPUs."""

    def __init__(self, workers: int, gpus: list[str], gpus_per_job: int):
        if gpus_per_job > len(gpus) and gpus:
            refuse(f"--gpus-per-job {gpus_per_job}: there are {len(gpus)}, {', '.join(gpus)}")
        dealt = itertools.cycle(gpus or [""])
        each = gpus_per_job if gpus else 1
        shares = [",".join(itertools.islice(dealt, each)) for _ in range(workers)]
        self.mine = threading.local()  # each thread's share
        self.pool = ThreadPoolExecutor(
            workers, initializer=lambda: setattr(self.mine, "gpus", shares.pop())
        )
        self.futures = {}  # by job

    def work(self, job: Work):
        job.variables = {"CUDA_VISIBLE_DEVICES": self.mine.gpus} if self.mine.gpus else {}
        job()

    def start(self, jobs: list[Work]):
        self.futures |= dict.fromkeys(jobs)  # a Ctrl-C may come during the next line
        self.futures |= {job: self.pool.submit(self.work, job) for job in jobs}

    def ended(self, jobs: list[Work]) -> list[Work]:
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
        self.asked = 0.0  # when Slurm was asked
        self.queue = set()  # the ids that Slurm named
        self.ours = set()  # ids of the jobs handed over

    def queued(self) -> set[str]:
        """Ids of this user's jobs that wait or run. Slurm is asked every few seconds at most."""
        if time.time() - self.asked > 3.0:
            command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                self.asked = time.time()
                self.queue = set(done.stdout.split())
            elif not self.asked:  # what an earlier command has submitted must be known
                refuse(f"squeue: {done.stderr.strip()}")
        return self.queue

    def start(self, jobs: list[Work]):
        """Hand over all jobs that no earlier command has handed over."""
        for job in jobs:
            job.slurm_id = str(data.read_json(job.folder / "slurm.json").get("id", ""))
        new = [job for job in jobs if job.slurm_id not in self.queued()]
        for job, handle in zip(new, self.executor.submit_array(new) if new else [], strict=True):
            job.slurm_id = handle.job_id
            write_json(job.folder / "slurm.json", {"id": job.slurm_id})
            self.queue.add(job.slurm_id)
        self.asked = time.time()
        self.ours = {job.slurm_id for job in jobs}

    def ended(self, jobs: list[Work]) -> list[Work]:
        gone = [job for job in jobs if job.slurm_id not in self.queued()]
        return [job for job in gone if not programs.locked(job.folder)]

    def stop(self) -> str:
        ids = " ".join(sorted(self.ours & self.queue))
        return f"Slurm goes on; the same command watches, this ends it: scancel {ids}"


def plan(
    env_ids: list[str], command: str, seeds: range, runs_dir: Path, variant: str,
    eval_episodes: int, results: Path | None = None, keep_policies: bool = False,
) -> list[Work]:  # fmt: skip
    """The jobs of a command. New ones get their folder and job.json. A job whose folder can't be
    used is broken."""
    words = programs.split(command)
    at = script_at(words)
    given = programs.given_twice(words, OURS)
    foreign = any(place in command for place in PLACES)
    if not foreign:
        words += itertools.chain(*zip(OURS, PLACES, strict=True))
    needed = PLACES if len(env_ids) > 1 else PLACES[1:]
    lacking = [place for place in needed if place not in shlex.join(words)]
    if at is None:
        refuse(f"--command {command!r}: names no script (a word that ends with .py)")
    if lacking:
        why = f"{' and '.join(lacking)} is missing, so that all jobs would be the same"
        refuse(f"--command {command!r}: {why}")
    if given and not foreign:
        refuse(f"--command {command!r}: {given} is given to each job by this program")
    if not re.fullmatch(r"[\w.+-]+", variant):
        refuse(f"--variant {variant!r}: must be a word; it names files")
    try:
        slugs = {env_id: data.slug(env_id) for env_id in env_ids}
    except ValueError as error:
        refuse(f"--env-ids: {error}")
    jobs = []
    script = Path(words[at]).stem
    for env_id, seed in itertools.product(slugs, seeds):
        folder = runs_dir / slugs[env_id] / script / f"{variant}-s{seed}"
        own = words
        for place, value in zip(PLACES, (env_id, seed, folder / "run"), strict=True):
            own = [word.replace(place, str(value)) for word in own]
        work = Work(folder, results, keep=keep_policies)
        jobs.append(work)
        try:
            made = work.load()
        except (OSError, ValueError) as error:
            work.broken = f"{folder}: {error}; delete it, or give another --variant or --runs-dir"
            continue
        before = made.get("asked", command)
        of = made.get("env_id", env_id)
        if before != command or of != env_id:
            refuse(
                f"{folder} was made by {before!r} for {of}; give another --variant or --runs-dir, "
                "or delete it"
            )
        job = {"done": False, "reason": ""} | made
        job |= {"env_id": env_id, "script": script, "variant": variant, "seed": seed}
        job |= {"foreign": foreign}
        played = 0 if foreign else eval_episodes
        if made.get("eval_episodes") != played:
            job |= {"done": False, "reason": ""}
        job |= {"asked": command, "command": shlex.join(own), "eval_episodes": played}
        if job != made:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                work.write(job)
            except OSError as error:
                work.broken = str(error)
    return jobs


def gpus_here() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; empty if not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
            visible = ",".join(subprocess.check_output(query, text=True).split())
    return [gpu.strip() for gpu in (visible or "").split(",") if gpu.strip()]


def say(line: str):
    tqdm.write(line)
    sys.stdout.flush()


def attempt(place: Local | Slurm, jobs: list[Work], last: bool) -> tuple[list[Work], list[Work]]:
    """Do these jobs once; returns those to be tried again, and those that failed."""
    for job in jobs:
        if programs.locked(job.folder):  # another command runs it, or a killed one has left it
            say(f"{job}: runs already")
    place.start(jobs)
    left = list(jobs)
    again = []
    failed = []
    bar = tqdm(total=len(jobs), unit=" jobs", leave=False, disable=None)  # only on a terminal
    while left:
        time.sleep(0.5)
        for job in place.ended(left):
            left.remove(job)
            ended = job.read()
            reason = ended["reason"] or "cut off"
            if ended["done"]:
                run = data.read(job.folder)
                scores = (f"{name} {run.score(name):,.1f}" for name in ("training", "evaluation"))
                line = f"{job}: done; {', '.join(scores)}"
                if ended.get("policy"):  # it says why the policy is not kept
                    line += f"; {ended['policy']}"
                say(line)
            elif last or re.match(r"exit code 2\b", reason):  # which means wrong arguments
                with contextlib.suppress(OSError):
                    job.write(ended | {"reason": reason})
                say(f"{job}: failed; {reason}")
                failed.append(job)
            else:
                say(f"{job}: {reason}; will be tried again")
                again.append(job)
            bar.update()
    bar.close()
    return again, failed


def run(
    env_ids: list[str],
    command: str,
    num_seeds: int = 3,
    start_seed: int = 1,
    workers: int = 1,
    runs_dir: Path = Path("runs/benchmark"),
    variant: str = "default",
    results: Path | None = None,
    keep_policies: bool = False,
    eval_episodes: int = 20,
    retries: int = 2,
    cluster: Literal["local", "slurm"] = "local",
    gpus_per_job: int = 1,
    slurm_minutes: int = 24 * 60,
    sbatch: tuple[str, ...] = (),
    dry_run: bool = False,
):
    """Train on every environment with every seed. Jobs that are finished are skipped, those that
    were cut off go on, and failed ones are tried again. The exit code is 1 if a job failed.

    Args:
        env_ids: environments to train on
        command: the program, e.g. "python ppo.py --total-timesteps 100000"; --env-id, --seed and
            --run-dir are added. For a program with other flags write {env_id}, {seed} and {run_dir}
            into the command; benchmark/data.py says what it must leave
        num_seeds: number of seeds for each environment
        start_seed: the first seed
        workers: number of jobs at once
        runs_dir: folder with the jobs' folders
        variant: name of this setting of the script
        results: folder for the compressed table of each finished run, to commit
        keep_policies: also keep each run's policy there, if it has at most 1 MB; `verify` plays it
            again
        eval_episodes: episodes that the final policy plays after training; 0: none
        retries: further tries of a job that fails
        cluster: where jobs run: as processes on this machine, or in a Slurm array
        gpus_per_job: GPUs of this machine for each job; jobs share them if there are too few
        slurm_minutes: time limit of a Slurm job; a job that reaches it is queued again and goes on
        sbatch: further flags of sbatch, e.g. partition=long cpus-per-task=4 gpus-per-node=1
        dry_run: print the commands and start nothing
    """
    at_least(1, env_ids=len(env_ids), num_seeds=num_seeds, workers=workers)
    at_least(1, gpus_per_job=gpus_per_job, slurm_minutes=slurm_minutes)
    at_least(0, start_seed=start_seed, retries=retries, eval_episodes=eval_episodes)
    if keep_policies and not (results and eval_episodes):
        refuse("--keep-policies: keeps them in --results, with the --eval-episodes they played")
    if runs_dir.exists() and not runs_dir.is_dir():
        refuse(f"--runs-dir {runs_dir}: not a folder")
    seeds = range(start_seed, start_seed + num_seeds)
    if cluster == "local":
        programs.warn_of_cores(programs.split(command), workers)
    if dry_run:
        with tempfile.TemporaryDirectory() as folder:
            for job in plan(env_ids, command, seeds, Path(folder), variant, eval_episodes):
                print(job.read()["command"].replace(folder, str(runs_dir)))
        return
    jobs = plan(env_ids, command, seeds, runs_dir, variant, eval_episodes, results, keep_policies)
    if cluster == "local":
        place = Local(workers, gpus_here(), gpus_per_job)
    else:
        place = Slurm(runs_dir, workers, slurm_minutes, sbatch)

    def ready(job: dict) -> bool:
        """Whether nothing that is asked for is missing."""
        if not job["done"]:
            return False
        if results is None:
            return True
        table = data.committed(job, results)
        if not keep_policies or job.get("policy"):
            return table.exists()
        return table.exists() and table.with_suffix(".pt").exists()

    failed = [job for job in jobs if job.broken]
    left = [job for job in jobs if not job.broken and not ready(job.read())]
    say(f"{len(jobs)} jobs in {runs_dir}, {len(jobs) - len(left) - len(failed)} done before")

    def end(number, frame):
        raise KeyboardInterrupt(number)

    for number in ENDING:
        signal.signal(number, end)  # a shell's & makes SIGINT ignored
    try:
        while left:
            left, lost = attempt(place, left, last=retries == 0)
            failed += lost
            retries -= 1
    except KeyboardInterrupt as stopped:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)  # uv sends its copy of a Ctrl-C at once
        time.sleep(0.5)
        for number in ENDING:
            signal.signal(number, end)
        say(place.stop())
        (number,) = stopped.args
        raise SystemExit(128 + number) from None
    for job in failed:
        reason = job.broken or job.read()["reason"]
        print(f"\n{job} failed: {reason}\n  log: {job.folder / 'log.txt'}")
        print("".join(f"  | {line}\n" for line in tail(job.folder / "log.txt")), end="")
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs done, {len(failed)} failed")
    if keep_policies and weight(results) > MOST:
        print(f"the policies in {results} have more than {MOST / 1e6:g} MB", file=sys.stderr)
    if failed:
        raise SystemExit(1)
