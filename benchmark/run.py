"""Train scripts on environments with seeds: `python -m benchmark run`.

Every job has a folder, runs-dir/<env>/<script>/<variant>-s<seed>:

    job.json         the command, how it ended, and in "starts" the source, commit, versions and
                     hardware that it began with; after that those that it was resumed with, if
                     any but the commit had changed
    run/             the script's own run folder
    log.txt          what the script said
    evaluation.json  returns of the final policy
    lock             held by the job's processes as long as one of them lives

All state is in these files: a command given again skips what is finished, resumes what was cut off,
tries again what failed, and waits for what another command, or a killed one, left running.
"""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO

from benchmark import data, programs
from benchmark.programs import at_least, executable, lock, refuse, script_at, tail, write_json

STOPPED = {
    code for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) for code in (-n, 128 + n)
}  # fmt: skip
PLACES = ("{env_id}", "{seed}", "{run_dir}")  # in the command of a program that is not ours
OURS = ("--env-id", "--seed", "--run-dir")  # what each job is given


# --- one job, in a process of its own -------------------------------------------------------------


@dataclass(eq=False)
class Work:
    """What the process of a job does: train or go on, play the final policy, leave a table."""

    folder: Path
    results: Path | None
    variables: dict[str, str | None] = field(default_factory=dict)  # of its programs; None: unset
    process: subprocess.Popen | None = None
    stopped: bool = False  # by SIGTERM
    lock: TextIO | None = None

    def __call__(self):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, lambda *_: self.stop())
        path = self.folder / "job.json"
        with lock(self.folder / "lock", wait=True) as self.lock:
            job = data.read_json(path)
            if job["done"]:
                return
            job["reason"] = ""
            write_json(path, job)
            try:
                reason = self.train(job)
                if reason is None:
                    reason = self.finish(job)
            except (Exception, SystemExit) as error:  # the disk, the command, the run's table
                told = isinstance(error, ValueError | SystemExit)
                reason = str(error) if told else f"{type(error).__name__}: {error}"
            write_json(path, job | {"done": reason is None, "reason": reason or ""})

    def stop(self, kill: bool = False):
        """Ask the program to end, once, or end it."""
        if self.process and kill:
            self.process.kill()
        elif self.process and not self.stopped:
            self.process.terminate()
        self.stopped = True

    def environment(self) -> dict[str, str]:
        """Of its programs."""
        variables = {"OMP_NUM_THREADS": "1"} | os.environ | self.variables
        return {name: value for name, value in variables.items() if value is not None}

    def record(self, job: dict, words: list[str], resumed: bool):
        """Note in job.json what the command is started with, or resumed with if that is another."""
        now = programs.provenance(executable(words), self.environment())
        starts = job.get("starts", []) if resumed else []
        same = ("source_sha256", "versions", "hardware")
        if not starts or any(now[name] != starts[-1][name] for name in same):
            starts = [*starts, now]
        job["starts"] = starts
        write_json(self.folder / "job.json", job)

    def start(self, words: list[str]) -> int:
        """Run a command to its end; its exit code. SIGTERM is handed on to it."""
        if self.stopped:
            return -signal.SIGTERM
        with open(self.folder / "log.txt", "a") as log:
            log.write(f"$ {shlex.join(words)}\n")
            log.flush()
            self.process = subprocess.Popen(
                executable(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment(), start_new_session=True, pass_fds=[self.lock.fileno()],
            )  # fmt: skip
            if self.stopped:  # meanwhile
                self.process.terminate()
            return self.process.wait()

    def train(self, job: dict) -> str | None:
        """Why this did not end well, None if it did; "" if it was stopped."""
        words, run = shlex.split(job["command"]), self.folder / "run"
        if data.read_json(run / "run.json").get("status") == "finished":
            return None
        resumed = not job["foreign"] and (run / "checkpoint.pt").exists()
        if resumed:  # the id again, for an id that names a module: it says that its code may run
            words = words[: script_at(words) + 1]
            words += ["--resume", str(run), "--env-id", job["env_id"]]
        else:
            shutil.rmtree(run, ignore_errors=True)
        self.record(job, words, resumed)
        code = self.start(words)
        if code == 0 and data.read_json(run / "run.json").get("status") == "finished":
            return None
        if code in STOPPED or self.stopped:
            return ""
        if code == 0:
            return f"exit code 0, but {run / 'run.json'} does not say that it is finished"
        said, how = programs.last_word(self.folder / "log.txt"), programs.how_it_ended(code)
        return f"{how}: {said}" if said else how

    def finish(self, job: dict) -> str | None:
        """Play and write the table; why this did not end well, None if it did."""
        data.read_folder(self.folder / "run", job)  # which must be possible
        words, returns = shlex.split(job["command"]), []
        if job["eval_episodes"]:
            script = words[script_at(words)]
            flags = ["--evaluate", str(self.folder / "run"), "--env-id", job["env_id"]]
            flags += ["--eval-episodes", str(job["eval_episodes"])]
            before = (self.folder / "log.txt").stat().st_size
            code = self.start(["python", script, *flags])
            if code:
                return "" if code in STOPPED else f"its evaluation ended with exit code {code}"
            with open(self.folder / "log.txt", "rb") as log:
                log.seek(before)
                played = log.read().decode(errors="replace")
            found = re.findall(r"eval_episode=\d+, episodic_return=(\S+)", played)
            returns = [float(episodic_return) for episodic_return in found]
            write_json(self.folder / "evaluation.json", {"returns": returns})
        if self.results:
            data.commit(self.folder / "run", job, returns, self.results)
        return None

    def checkpoint(self):
        """On Slurm's warning: stop the script, which saves, and be queued again."""
        from submitit.helpers import DelayedSubmission

        self.process.terminate()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Work(self.folder, self.results, self.variables))


# --- all jobs -------------------------------------------------------------------------------------


@dataclass
class Job:
    """A job as the command that watches it sees it."""

    name: str
    folder: Path
    handle: object = None  # submitit's, of a job on this machine
    slurm_id: str = ""
    gpus: tuple[str, ...] = ()
    tries: int = 0  # by this command
    seen: tuple[float, int] | None = None  # when it was first seen running, and its step then

    def read(self) -> dict:
        return data.read_json(self.folder / "job.json")

    def step(self) -> int:
        """Environment steps so far."""
        last = tail(self.folder / "run" / "episodes.csv", 1, 200)
        head = last[0].partition(",")[0] if last else ""
        return int(head) if head.isdigit() else 0

    def total(self) -> int:
        args = data.read_json(self.folder / "run" / "run.json").get("args") or {}
        return 0 if args.get("num_episodes") else int(args.get("total_timesteps") or 0)


class Local:
    """Processes on this machine, `workers` at once, each with its share of the GPUs."""

    def __init__(self, folder: Path, workers: int, gpus: list[str], gpus_per_job: int):
        from submitit import LocalExecutor

        if gpus_per_job > len(gpus) and gpus:
            refuse(f"--gpus-per-job {gpus_per_job}: there are {len(gpus)}, {', '.join(gpus)}")
        self.executor = LocalExecutor(folder / "submitit")
        self.executor.update_parameters(timeout_min=10**6)
        self.workers, self.all_gpus, self.gpus_per_job = workers, gpus, gpus_per_job

    def submit(self, waiting: list[Job], active: list[Job], results: Path | None) -> list[Job]:
        """Start as many as there is room for; those started."""
        started = []
        for job in waiting[: max(0, self.workers - len(active))]:
            taken = [gpu for other in [*active, *started] for gpu in other.gpus]
            free = sorted(self.all_gpus, key=taken.count)  # the least used first
            job.gpus = tuple(free[: self.gpus_per_job])
            # submitit hides all GPUs that it is not told of, and knows them by number only
            shown = ",".join(job.gpus) or os.environ.get("CUDA_VISIBLE_DEVICES")
            # Ctrl-C is for this process, which then asks the jobs to stop
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            work = Work(job.folder, results, {"CUDA_VISIBLE_DEVICES": shown})
            job.handle = self.executor.submit(work)
            signal.signal(signal.SIGINT, before)
            started.append(job)
        return started

    def ended(self, active: list[Job]) -> list[Job]:
        return [
            j
            for j in active
            if not (j.handle and not j.handle.done()) and not programs.locked(j.folder)
        ]

    def stop(self, active: list[Job]) -> str:
        def lives(job: Job) -> bool:
            return programs.locked(job.folder) or bool(
                job.handle and job.handle._process.poll() is None
            )

        while living := [job for job in active if lives(job)]:
            for job in living:
                if job.handle:  # once is not enough: one that has just begun may miss it
                    job.handle._process.terminate()
            time.sleep(0.2)
        return "stopped; the same command goes on"


class Slurm:
    """A Slurm array; what is cancelled and requeued, or warned of its time limit, goes on."""

    def __init__(self, folder: Path, workers: int, options: dict):
        from submitit import SlurmExecutor

        try:
            self.executor = SlurmExecutor(folder / "submitit", max_num_timeout=1000)
        except RuntimeError as error:
            refuse(f"--cluster slurm: {error}")
        given = {name: value for name, value in options.items() if value is not None}
        requeue = {"requeue": True}
        self.executor.update_parameters(
            array_parallelism=workers, additional_parameters=requeue, **given
        )
        self.asked, self.queue = 0.0, set()

    def queued(self) -> set[str]:
        """Ids of this user's jobs that wait or run; asked for every few seconds at most."""
        if time.time() - self.asked > 3.0:
            command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                self.asked, self.queue = time.time(), set(done.stdout.split())
            elif not self.asked:  # what an earlier command has submitted must be known
                refuse(f"squeue: {done.stderr.strip()}")
        return self.queue

    def submit(self, waiting: list[Job], active: list[Job], results: Path | None) -> list[Job]:
        """Hand over all that are not in the queue yet; all are then Slurm's."""
        left = []
        for job in waiting:  # an earlier command's may be in the queue
            job.slurm_id = data.read_json(job.folder / "slurm.json").get("id", "")
            if job.slurm_id not in self.queued():
                left.append(job)
        if left:
            with self.executor.batch():
                handles = [self.executor.submit(Work(job.folder, results)) for job in left]
            for job, handle in zip(left, handles, strict=True):
                job.slurm_id = handle.job_id
                write_json(job.folder / "slurm.json", {"id": job.slurm_id})
                self.queue.add(job.slurm_id)
            self.asked = time.time()
        return list(waiting)

    def ended(self, active: list[Job]) -> list[Job]:
        queue = self.queued()
        return [
            job for job in active if job.slurm_id not in queue and not programs.locked(job.folder)
        ]

    def stop(self, active: list[Job]) -> str:
        ids = " ".join(job.slurm_id for job in active)
        return f"Slurm goes on; the same command watches, this ends it: scancel {ids}"


def plan(
    env_ids: list[str], command: str, seeds: range, runs_dir: Path, variant: str, eval_episodes: int
) -> list[Job]:
    """The jobs of a command; those that are new get their folder and job.json."""
    words = programs.split(command)
    at = script_at(words)
    foreign = any(place in command for place in PLACES)
    lacking = [
        place
        for place in PLACES
        if foreign and place not in command and (place != "{env_id}" or len(env_ids) > 1)
    ]
    if at is None:
        refuse(f"--command {command!r}: names no script (a word that ends with .py)")
    if not env_ids:
        refuse("--env-ids: none is given")
    if lacking:
        refuse(
            f"--command {command!r}: {lacking[0]} is missing, so that all jobs would be the same"
        )
    if shutil.which(executable(words)[0]) is None:
        refuse(f"--command {command!r}: there is no program {words[0]}")
    if (given := programs.given_twice(words, OURS)) and not foreign:
        refuse(f"--command {command!r}: {given} is given to each job by this program")
    if not re.fullmatch(r"[\w.+-]+", variant):
        refuse(f"--variant {variant!r}: must be a word; it names files")
    try:
        slugs = {env_id: data.slug(env_id) for env_id in env_ids}
    except ValueError as error:
        refuse(f"--env-ids: {error}")
    jobs, script = [], Path(words[at]).stem
    for env_id, seed in itertools.product(slugs, seeds):
        name = f"{slugs[env_id]}/{script}/{variant}-s{seed}"
        folder = runs_dir / name
        values = (env_id, str(seed), str(folder / "run"))
        own = [*words, *itertools.chain(*zip(OURS, values, strict=True))]
        if foreign:
            own = words
            for place, value in zip(PLACES, values, strict=True):
                own = [word.replace(place, value) for word in own]
        one, played = shlex.join(own), 0 if foreign else eval_episodes
        made = data.read_json(folder / "job.json")
        place = rf"\S*{re.escape(name)}/run"  # which may have moved
        if made and re.sub(place, "", made["command"]) != re.sub(place, "", one):
            refuse(
                f"{folder} was made by {made['command']!r}; give another --variant or --runs-dir, "
                "or delete it"
            )
        if not made:
            folder.mkdir(parents=True, exist_ok=True)
            made = {"env_id": env_id, "script": script, "variant": variant}
            made |= {"seed": seed, "foreign": foreign, "done": False, "reason": ""}
        changes = {"command": one, "eval_episodes": played}
        if made.get("eval_episodes") != played:
            changes |= {"done": False, "reason": ""}
        if made | changes != made:
            write_json(folder / "job.json", made | changes)
        jobs.append(Job(name, folder))
    return jobs


def gpus_here() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; none if not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", "--list-gpus"]
        found = subprocess.run(command, capture_output=True, text=True).stdout
        return [str(number) for number in range(len(found.splitlines()))]
    return []


class Board:
    """What is running, done, failed; a live table on a terminal, lines elsewhere."""

    def __init__(self, jobs: list[Job]):
        from rich.console import Console
        from rich.live import Live

        self.jobs, self.console = jobs, Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=2, transient=True)

    def __enter__(self):
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_):
        self.live.stop()

    def say(self, line: str):
        self.console.print(line, soft_wrap=True, markup=False)

    def show(self, active: list[Job], waiting: list[Job], failed: list[Job]):
        if not self.console.is_terminal:
            return
        from rich.text import Text

        rows, rates, left, longest = [["job", "step", "steps/s", "left"]], 0.0, 0, 0
        for job in active:
            step, total, now = job.step(), job.total(), time.time()
            job.seen = job.seen or (now, step)
            rate = (step - job.seen[1]) / max(1e-9, now - job.seen[0])
            ends = programs.duration((total - step) / rate) if total and rate else ""
            rows.append([job.name, f"{step:,} / {total:,}", f"{rate:,.0f}", ends])
            rates, longest = rates + rate, max(longest, total)
            left += max(0, total - step)
        done = len(self.jobs) - len(active) - len(waiting) - len(failed)
        line = f"{len(active)} running or queued, {len(waiting)} waiting, {done} done"
        line += f", {len(failed)} failed"
        if rates and longest:  # those that wait are as long as the longest that runs
            seconds = (left + len(waiting) * longest) / rates
            line += f"; about {programs.duration(seconds)} left"
        self.live.update(Text(f"{programs.aligned(rows)}\n{line}"))


def settle(job: Job, retries: int, waiting: list[Job], failed: list[Job], board: Board):
    """What becomes of a job that has just ended: done, tried again or failed."""
    ended = job.read()
    reason = ended["reason"] or "cut off"
    if ended["done"]:
        last = data.read_job(job.folder)
        scores = {name: last.score(name) for name in ("training", "evaluation")}
        told = ", ".join(f"{name} {x:,.1f}" for name, x in scores.items() if x == x)
        board.say(f"{job.name}: done; {told or 'no scores'}")
    elif job.tries > retries or re.match(r"exit code 2\b", reason):  # which means wrong arguments
        write_json(job.folder / "job.json", ended | {"reason": reason})
        board.say(f"{job.name}: failed; {reason}")
        failed.append(job)
    else:
        if job.tries:
            board.say(f"{job.name}: {reason}; try {job.tries + 1} of {retries + 1}")
        waiting.append(job)


def run(
    env_ids: list[str],
    command: str,
    num_seeds: int = 3,
    start_seed: int = 1,
    workers: int = 1,
    runs_dir: Path = Path("runs/benchmark"),
    variant: str = "default",
    results: Path | None = None,
    eval_episodes: int = 20,
    retries: int = 2,
    cluster: Literal["local", "slurm"] = "local",
    gpus_per_job: int = 1,
    slurm_partition: str | None = None,
    slurm_account: str | None = None,
    slurm_cpus: int = 1,
    slurm_gpus: int | None = None,
    slurm_minutes: int = 24 * 60,
    dry_run: bool = False,
):
    """Train on every environment with every seed. What is finished is skipped, what was cut off
    goes on, what failed is tried again. Exit code 1 if anything failed.

    Args:
        env_ids: environments
        command: e.g. "python ppo.py --total-timesteps 100000"; --env-id, --seed and --run-dir are
            added. In the command of a program that takes others, {env_id}, {seed} and {run_dir}
            are filled in; benchmark/data.py says what it must leave
        num_seeds: seeds of each environment
        start_seed: the first of them
        workers: jobs at once
        runs_dir: where the jobs' folders are
        variant: name of this setting of the script
        results: also write each finished run's compressed table here, to commit
        eval_episodes: episodes that the final policy plays after training; 0: none
        retries: further tries of a job that fails
        cluster: processes on this machine, or a Slurm array
        gpus_per_job: of this machine's GPUs, if it has any; jobs share them when there are too few
        slurm_partition: partition
        slurm_account: account
        slurm_cpus: CPUs of a job
        slurm_gpus: GPUs of a job
        slurm_minutes: time limit; a job that reaches it is queued again and goes on
        dry_run: print the commands and start nothing
    """
    at_least(1, num_seeds=num_seeds, workers=workers, gpus_per_job=gpus_per_job)
    at_least(0, start_seed=start_seed, retries=retries, eval_episodes=eval_episodes)
    if runs_dir.exists() and not runs_dir.is_dir():
        refuse(f"--runs-dir {runs_dir}: not a folder")
    seeds = range(start_seed, start_seed + num_seeds)
    if dry_run:
        with tempfile.TemporaryDirectory() as folder:
            jobs = plan(env_ids, command, seeds, Path(folder), variant, eval_episodes)
            for job in jobs:
                print(job.read()["command"].replace(folder, str(runs_dir)))
        return
    jobs = plan(env_ids, command, seeds, runs_dir, variant, eval_episodes)
    if cluster == "local":
        place = Local(runs_dir, workers, gpus_here(), gpus_per_job)
    else:
        options = {"partition": slurm_partition, "account": slurm_account, "time": slurm_minutes}
        options |= {"cpus_per_task": slurm_cpus, "gpus_per_node": slurm_gpus}
        place = Slurm(runs_dir, workers, options)

    waiting = [job for job in jobs if not job.read()["done"]]
    for job in jobs if results else ():
        made = job.read()
        if made["done"] and not data.committed(made, results).exists():
            returns = data.read_json(job.folder / "evaluation.json").get("returns", [])
            data.commit(job.folder / "run", made, returns, results)
    active, failed = [], []
    with Board(jobs) as board:
        board.say(f"{len(jobs)} jobs in {runs_dir}, {len(jobs) - len(waiting)} done before")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
        try:
            while waiting or active:
                for job in [job for job in waiting if programs.locked(job.folder)]:
                    board.say(f"{job.name}: runs already")  # by another command, or a killed one
                    waiting.remove(job)
                    active.append(job)
                for job in place.submit(waiting, active, results):
                    waiting.remove(job)
                    active.append(job)
                    job.tries += 1
                for job in place.ended(active):
                    active.remove(job)
                    settle(job, retries, waiting, failed, board)
                board.show(active, waiting, failed)
                time.sleep(0.5)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # uv sends its copy of a Ctrl-C at once
            time.sleep(0.5)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            board.say(place.stop(active))
            raise SystemExit(128 + signal.SIGINT) from None
    for job in failed:
        print(f"\n{job.name} failed: {job.read()['reason']}\n  log: {job.folder / 'log.txt'}")
        print("".join(f"  | {line}\n" for line in tail(job.folder / "log.txt")), end="")
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs done, {len(failed)} failed")
    if failed:
        raise SystemExit(1)
