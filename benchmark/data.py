"""What runs left behind: the folders of `run`, any script's run folders, and committed tables.

    runs-dir/<env>/<script>/<variant>-s<seed>/         a job of `run`: job.json, log.txt and run/
    any folder with run.json and episodes.csv          a run by hand, or of another program
    results/<env>/<script>/<variant>-s<seed>.json      and .csv.gz: a run to commit

A program that is not ours takes part if it leaves an `episodes.csv` (global_step, seconds, return,
length; a row per training episode) and a `run.json` with "script", "seed", "status" ("finished" at
the end) and "args" with "env_id". How it was started (`provenance`) `run` records for it.
"""

import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
COLUMNS = ("global_step", "seconds", "return", "length")
VERSIONS = """
import json, platform
from importlib import metadata
found = {"python": platform.python_version()}
for package in ("torch", "gymnasium", "mujoco", "numpy", "envpool"):
    try:
        found[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass
class Run:
    """One training, by one seed."""

    env_id: str
    script: str  # without .py
    variant: str  # "default", or the name of a setting
    seed: int
    status: str  # finished; running: cut off or still at it; failed; missing: never begun
    reason: str  # why it failed, else ""
    info: dict  # run.json and what `run` recorded, empty if there is neither
    steps: np.ndarray  # [episodes], environment steps at the end of each training episode
    seconds: np.ndarray  # [episodes], of training until then
    returns: np.ndarray  # [episodes], raw
    evaluation: np.ndarray  # [episodes played], returns of the final policy; often empty

    @property
    def algorithm(self) -> str:
        return self.script if self.variant == "default" else f"{self.script} {self.variant}"

    def score(self, metric: str, games: int = 100) -> float:
        """The number that stands for this run, nan if it has none.

        training: mean return of the last `games` training episodes; evaluation: of the episodes
        played by the final policy.
        """
        values = self.evaluation if metric == "evaluation" else self.returns[-games:]
        return float(np.mean(values)) if len(values) else float("nan")


def slug(env_id: str) -> str:
    """An environment's id as the name of a folder."""
    return env_id.replace("/", "-")


def read_table(text: str) -> np.ndarray:
    """The rows [episodes, 4] of an episodes.csv; a last row cut off in mid-write is left out."""
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines:
        return np.empty((0, len(COLUMNS)))
    if tuple(lines[0].split(",")) != COLUMNS:
        raise ValueError(f"the columns are {lines[0]}, not {','.join(COLUMNS)}")
    if len(lines) == 1:
        return np.empty((0, len(COLUMNS)))
    return np.loadtxt(lines[1:], delimiter=",", ndmin=2)


def read_json(path: Path) -> dict:
    """A JSON file's content; empty if there is none, it was cut off or is not an object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def provenance(words: list[str], environment: Mapping[str, str] = os.environ) -> dict:
    """What a reader needs to believe or repeat a run, of a command that is about to start.

    Commit and source are of its script, versions of its Python, {} if it names none; `processes`
    those that torchrun's flags ask for, None if only torchrun knows. What is not known is None.
    """

    def said(*command: str) -> str | None:
        with contextlib.suppress(OSError, ValueError):
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            return None if done.returncode else done.stdout.strip()

    before = list(itertools.takewhile(lambda word: not word.endswith(".py"), words))
    source = Path(words[len(before)]).resolve() if len(before) < len(words) else None
    git = "git", "--no-optional-locks", "-C", str(source.parent if source else os.devnull)
    changed = said(*git, "status", "--porcelain")
    cpu, versions, gpus = platform.processor(), {}, None
    with contextlib.suppress(OSError, IndexError):
        cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    for word in before:
        if re.fullmatch(r"python[\d.]*", Path(word).name):
            versions = json.loads((said(word, "-c", VERSIONS) or "{}").splitlines()[-1])
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown not in ("", "-1"):
        query = "nvidia-smi", "--query-gpu=name", "--format=csv,noheader"
        gpus = (shown and said(*query, f"--id={shown}")) or said(*query)  # parts have no such id
    sizes = re.findall(r"--(?:nproc[-_]per[-_]node|nnodes)[= ](\S+)", " ".join(before))
    gpu = ", ".join(gpus.splitlines()) if gpus else None
    return {
        "versions": versions,
        "git_commit": said(*git, "rev-parse", "HEAD"),
        "git_dirty": None if changed is None else bool(changed),
        "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest() if source else None,
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu},
        "processes": math.prod(map(int, sizes)) if all(map(str.isdigit, sizes)) else None,
    }


def told(info: dict, job: dict) -> dict:
    """What run.json says and, where it is silent, what `run` recorded when the run began."""
    first, *later = job.get("starts") or [{}]
    more = {name: value for name, value in first.items() if name not in info}
    if isinstance(info.get("versions"), dict) and first:
        more["versions"] = first["versions"] | info["versions"]
    if later:  # starts of what was cut off, with another source, hardware or versions
        more["resumed_with"] = later
    return info | more


def make_run(info: dict, text: str, job: dict, where: Path) -> Run:
    """A run from its run.json, the text of its episodes.csv, its job.json ({} without one)."""
    try:
        table = read_table(text)
    except ValueError as error:
        raise SystemExit(f"{where}: not a table of episodes: {error}") from None
    reason = job.get("reason", "")
    try:
        info = told(info, job)
        args = info.get("args") or {}
        return Run(
            env_id=str(job.get("env_id") or args.get("env_id") or "unknown"),
            script=job.get("script") or Path(info.get("script", "unknown")).stem,
            variant=str(job.get("variant") or info.get("variant") or "default"),
            seed=int(job.get("seed", info.get("seed", args.get("seed"))) or 0),
            status="failed" if reason else str(info.get("status", "missing")),
            reason=reason,
            info=info,
            steps=table[:, 0],
            seconds=table[:, 1],
            returns=table[:, 2],
            evaluation=np.array(info.get("evaluation", []), float),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise SystemExit(f"{where}: run.json or job.json can't be understood: {error}") from None


def read_folder(folder: Path, job: dict) -> Run:
    """A run from its folder, which may be missing or half-made."""
    table = folder / "episodes.csv"
    text = table.read_text() if table.exists() else ""
    return make_run(read_json(folder / "run.json"), text, job, folder)


def read_job(folder: Path) -> Run:
    """A job of `run`, begun or not, from its folder."""
    job = read_json(folder / "job.json")
    run = read_folder(folder / "run", job)
    run.evaluation = np.array(read_json(folder / "evaluation.json").get("returns", []), float)
    return run


def read_committed(path: Path) -> Run:
    """A run from its table in results; `path` is that of the .json."""
    with gzip.open(path.with_suffix(".csv.gz"), "rt") as file:
        text = file.read()
    variant = path.stem.rpartition("-s")[0]
    job = {"script": path.parent.name, "variant": variant}  # run.json names what that imports
    return make_run(json.loads(path.read_text()), text, job, path)


def find(folders: Iterable[Path]) -> list[Run]:
    """All runs anywhere under these folders, in order of environment, algorithm and seed.

    Exits with a line if a folder does not exist or if two runs claim the same place.
    """

    def search(folder: Path) -> Iterator[tuple[Path, Run]]:
        if not folder.is_dir():
            raise SystemExit(f"{folder}: no such folder")
        if (folder / "job.json").exists():
            yield folder, read_job(folder)
        elif (folder / "run.json").exists():
            yield folder, read_folder(folder, {})
        else:
            for path in sorted(folder.iterdir()):
                if path.is_dir():
                    yield from search(path)
                elif path.suffix == ".json" and path.with_suffix(".csv.gz").exists():
                    yield path, read_committed(path)

    runs, places = [], {}
    for folder in folders:
        for place, run in search(Path(folder)):
            key = (run.env_id, run.algorithm, run.seed)
            if key in places:
                raise SystemExit(
                    f"{place}: a second run of {run.algorithm} on {run.env_id} with seed "
                    f"{run.seed}, the first is in {places[key]}; report them apart"
                )
            places[key] = place
            runs.append(run)
    return sorted(runs, key=lambda run: (run.env_id, run.algorithm, run.seed))


def committed(job: dict, results: Path) -> Path:
    """Where a job's run.json goes in `results`; the table goes beside it."""
    stem = f"{job['variant']}-s{job['seed']}"
    return results / slug(job["env_id"]) / job["script"] / f"{stem}.json"


def commit(run_folder: Path, job: dict, evaluation: list[float], results: Path) -> Path:
    """Write a run's table, seconds whole and returns to two places, and its run.json, with what
    `run` knows of it, into `results`; the path of the latter."""
    info = told(read_json(run_folder / "run.json"), job)
    table = read_table((run_folder / "episodes.csv").read_text())
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for step, seconds, episodic_return, length in table:
        rows.writerow([int(step), f"{seconds:.0f}", f"{episodic_return:.2f}", int(length)])
    if len(table):
        info["global_step"] = int(table[-1, 0])
    command = job["command"].replace(str(run_folder), "RUN")
    info |= {"command": command, "evaluation": evaluation}
    path = committed(job, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    compressed = gzip.compress(text.getvalue().encode(), mtime=0)
    path.with_suffix(".csv.gz").write_bytes(compressed)
    path.write_text(json.dumps(info, indent=2) + "\n")
    return path


@dataclass
class Anchor:
    """Another project's published score. Never part of our statistics."""

    project: str
    algorithm: str
    env_id: str
    steps: int | None
    episodes: int | None
    score: float
    spread: float | None
    spread_kind: str
    seeds: int | None
    metric: str
    source: str


def anchors(path: Path = HERE / "anchors.csv") -> list[Anchor]:
    kinds = {"steps": int, "episodes": int, "seeds": int, "score": float, "spread": float}
    with open(path) as file:
        return [
            Anchor(
                **{
                    name: (kinds[name](value) if value else None) if name in kinds else value
                    for name, value in row.items()
                }
            )
            for row in csv.DictReader(file)
        ]
