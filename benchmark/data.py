"""What runs left behind: the folders of `run`, any script's run folders, and committed tables.

    runs-dir/<env>/<script>/<variant>-s<seed>/         a job of `run`: job.json, log.txt and run/
    any folder with run.json and episodes.csv          a run by hand, or of another program
    results/<env>/<script>/<variant>-s<seed>.json      and .csv.gz: a run to commit

A program that is not ours takes part if it leaves an `episodes.csv` (global_step, seconds, return,
length; a row per training episode) and a `run.json` with "script", "seed", "status" ("finished" at
the end) and "args" with "env_id".
"""

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
COLUMNS = ("global_step", "seconds", "return", "length")


@dataclass
class Run:
    """One training, by one seed."""

    env_id: str
    script: str  # without .py
    variant: str  # "default", or the name of a setting
    seed: int
    status: str  # finished; running: cut off or still at it; failed; missing: never begun
    reason: str  # why it failed, else ""
    info: dict  # run.json, empty if there is none
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


def make_run(info: dict, text: str, job: dict, where: Path) -> Run:
    """A run from its run.json, the text of its episodes.csv, its job.json ({} without one)."""
    try:
        table = read_table(text)
    except ValueError as error:
        raise SystemExit(f"{where}: not a table of episodes: {error}") from None
    reason = job.get("reason", "")
    try:
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
    """Write a run's table, seconds whole and returns to two places, and its run.json, with command
    and evaluation, into `results`; the path of the latter."""
    info = read_json(run_folder / "run.json")
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
