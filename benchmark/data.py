"""What runs left behind: the folders of `run`, any script's run folders, and committed tables.

    runs-dir/<env>/<script>/<variant>-s<seed>/         a job of `run`: job.json, log.txt and run/
    any folder with run.json and episodes.csv          a run by hand, or of another program
    results/<env>/<script>/<variant>-s<seed>.json      and .csv.gz: a run to commit

A program that is not ours takes part if it leaves an `episodes.csv` (global_step, seconds, return,
length; a row per training episode) and a `run.json` with "script", "seed", "status" ("finished" at
the end) and "args" with "env_id". An "exp_name" there, if not the script's, names a variant. How it
was started (programs.provenance) `run` records for it.
"""

import contextlib
import csv
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmark.programs import refuse

PUBLISHED = Path(__file__).resolve().parent / "published"
SCALES, ANCHORS = PUBLISHED / "scales.csv", PUBLISHED / "anchors.csv"
COLUMNS = ("global_step", "seconds", "return", "length")


@dataclass
class Run:
    """One training, by one seed."""

    env_id: str
    script: str  # without .py
    variant: str  # "default", or the name of a setting
    seed: int
    status: str  # finished; running: cut off or still at it; failed; missing; unreadable
    reason: str  # why it failed or can't be read, else ""
    info: dict  # run.json and what `run` recorded, empty if there is neither
    steps: np.ndarray  # [episodes], environment steps at the end of each training episode
    seconds: np.ndarray  # [episodes], of training until then
    returns: np.ndarray  # [episodes], raw
    evaluation: np.ndarray  # [episodes played], returns of the final policy; often empty
    budget: str  # how long it was to train, in words; empty if it does not say
    hours: float
    commit: str
    cpu: str
    gpu: str

    @property
    def algorithm(self) -> str:
        return self.script if self.variant == "default" else f"{self.script} {self.variant}"

    def score(self, metric: str, games: int = 100) -> float:
        """Mean return of the last `games` training episodes or, in evaluation, of the episodes
        that the final policy played; nan without any."""
        values = self.evaluation if metric == "evaluation" else self.returns[-games:]
        return float(np.mean(values)) if len(values) else float("nan")


def plain(value: object) -> str:
    """As text on one line that any file can hold."""
    return "".join(c if c.isprintable() else " " for c in str(value or ""))


def without_module(env_id: str) -> str:
    """An environment's id; of package.module:Id it is Id."""
    return re.sub(r"^[\w.]+:", "", env_id)


def slug(env_id: str) -> str:
    """An environment's id without its module, as a folder's name; ValueError if it can't be one."""
    name = without_module(env_id).replace("/", "-")
    if name in ("", ".", "..") or name != plain(name) or len(name.encode()) > 200:
        raise ValueError(f"{env_id!r} can't name a folder")
    return name


def read_table(text: str) -> np.ndarray:
    """The rows [episodes, 4] of an episodes.csv; a last row cut off in mid-write is left out."""
    lines = text[: text.rfind("\n") + 1].splitlines()
    if lines and tuple(lines[0].split(",")) != COLUMNS:
        raise ValueError(f"not a table of episodes: the columns are {lines[0]}")
    if len(lines) < 2:
        return np.empty((0, len(COLUMNS)))
    table = np.loadtxt(lines[1:], delimiter=",", ndmin=2)
    if table.shape[1] != len(COLUMNS) or not np.isfinite(table[:, :2]).all():
        raise ValueError("not a table of episodes: a row lacks a step or a time")
    return table


def read_json(path: Path) -> dict:
    """A JSON file's content; empty if there is none, it was cut off or is not an object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def told(info: dict, job: dict) -> dict:
    """What run.json says and, where it is silent, what `run` recorded when the run began."""
    first, *later = job.get("starts") or [{}]
    info = first | info
    if isinstance(own := info.get("versions"), dict) and first:  # own: those of the last start
        info["versions"] = own | first["versions"] if later else first["versions"] | own
    # starts of what was cut off, with another source, hardware or versions
    return info | ({"resumed_with": later} if later else {})


def make_run(info: dict, text: str, job: dict) -> Run:
    """A run from its run.json, the text of its episodes.csv and its job.json, {} without one. What
    it can't use is an error."""
    table, info = read_table(text), told(info, job)
    args, hardware = info.get("args") or {}, info.get("hardware") or {}
    if not isinstance(hardware, dict):
        hardware = {"cpu": hardware}
    script = job.get("script") or Path(info.get("script", "unknown")).stem
    name, seconds = args.get("exp_name") or script, info.get("wall_seconds")
    if not seconds:
        seconds = table[-1, 1] if len(table) else np.nan
    lengths = (("episodes", args.get("num_episodes")), ("steps", args.get("total_timesteps")))
    words = {
        "env_id": without_module(job.get("env_id") or args.get("env_id") or "unknown"),
        "script": script,
        "variant": job.get("variant") or ("default" if name == script else name),
        "status": "failed" if job.get("reason") else info.get("status") or "missing",
        "reason": job.get("reason"),
        "budget": next((f"{int(length):,} {unit}" for unit, length in lengths if length), ""),
        "commit": info.get("git_commit"),
        "cpu": hardware.get("cpu"),
        "gpu": hardware.get("gpu"),
    }
    return Run(
        **{name: plain(value) for name, value in words.items()},
        seed=int(job.get("seed", info.get("seed", args.get("seed"))) or 0),
        info=info,
        steps=table[:, 0],
        seconds=table[:, 1],
        returns=table[:, 2],
        evaluation=np.array(info.get("evaluation") or [], float),
        hours=float(seconds) / 3600,
    )


def read_folder(folder: Path, job: dict | None = None) -> Run:
    """A run from its folder, which may be missing or half-made."""
    table, path = folder / "episodes.csv", folder / "run.json"
    info = read_json(path)
    if path.exists() and not info:
        raise ValueError("run.json is no JSON object")
    if job and (played := read_json(folder.parent / "evaluation.json")):
        info["evaluation"] = played["returns"]
    return make_run(info, table.read_text() if table.exists() else "", job or {})


def read_job(folder: Path) -> Run:
    """A job of `run`, begun or not, from its folder."""
    job = read_json(folder / "job.json")
    if not job:
        raise ValueError("job.json is no JSON object")
    return read_folder(folder / "run", job)


def read_committed(path: Path) -> Run:
    """A run from its table in results; `path` is that of the .json."""
    text = gzip.decompress(path.with_suffix(".csv.gz").read_bytes()).decode()
    variant = path.stem.rpartition("-s")[0]
    job = {"script": path.parent.name, "variant": variant}  # run.json names what that imports
    return make_run(json.loads(path.read_text()), text, job)


def read(place: Path) -> Run:
    """The run there or, if its files hold what no run's should, one that says so."""
    job = read_json(place / "job.json")
    try:
        if place.is_file():
            return read_committed(place)
        return read_job(place) if (place / "job.json").exists() else read_folder(place)
    except Exception as error:  # any, so that one run does not cost a report
        kinds = {"env_id": str, "script": str, "variant": str, "seed": int}
        job = {name: job[name] for name, kind in kinds.items() if isinstance(job.get(name), kind)}
        run = make_run({}, "", job)
        run.status, run.reason = "unreadable", plain(f"{place}: {error}")
        return run


def search(folder: Path) -> Iterator[Path]:
    """Where there are runs in or under a folder."""
    if not folder.is_dir():
        refuse(f"{folder}: no such folder")
    if (folder / "job.json").exists() or (folder / "run.json").exists():
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from search(path)
        elif path.suffix == ".json" and path.with_suffix(".csv.gz").exists():
            yield path


def find(folders: Iterable[Path]) -> list[Run]:
    """All runs anywhere under these folders, in order of environment, algorithm and seed.

    Refuses folders without a run, and two runs that claim the same place.
    """
    runs, places = [], {}
    for place in (place for folder in folders for place in search(Path(folder))):
        run = read(place)
        key = (run.env_id, run.algorithm, run.seed)
        if run.status != "unreadable" and places.setdefault(key, place) is not place:
            refuse(
                f"{place}: a second run of {run.algorithm} on {run.env_id} with seed {run.seed}, "
                f"the first is in {places[key]}; report them apart, or give one another --exp-name"
            )
        runs.append(run)
    if not runs:
        refuse(f"no runs in {', '.join(map(str, folders)) or 'no folder'}")
    return sorted(runs, key=lambda run: (run.env_id, run.algorithm, run.seed))


def committed(job: dict, results: Path) -> Path:
    """Where a job's run.json goes in `results`; the table goes beside it."""
    stem = f"{job['variant']}-s{job['seed']}"
    return results / slug(job["env_id"]) / job["script"] / f"{stem}.json"


def commit(run_folder: Path, job: dict, evaluation: list[float], results: Path):
    """Write a run's table, seconds whole and returns to two places, and its run.json, with what
    `run` knows of it, into `results`."""
    table = read_table((run_folder / "episodes.csv").read_text())
    text = io.StringIO()
    head = ",".join(COLUMNS)
    np.savetxt(text, table, fmt="%d,%.0f,%.2f,%d", header=head, comments="")
    info = told(read_json(run_folder / "run.json"), job)
    if len(table):
        info["global_step"] = int(table[-1, 0])
    info["command"] = job["command"].replace(str(run_folder), "RUN")
    info["evaluation"] = evaluation or info.get("evaluation", [])
    path = committed(job, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    path.write_text(json.dumps(info, indent=2) + "\n")


@dataclass
class Scale:
    """Scores are normalised to 0 at low and 1 at high."""

    low: float
    high: float
    source: str = ""


def read_csv(path: Path) -> list[dict]:
    """Rows of a table below its comments, numbers as numbers, None for what is empty."""

    def value(text: str) -> int | float | str | None:
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text or None

    with open(path) as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [{name: value(text) for name, text in row.items()} for row in rows]


def read_scales(path: Path) -> dict[str, Scale]:
    """From a table of env_id, low, high and source."""
    return {
        row["env_id"]: Scale(float(row["low"]), float(row["high"]), row.get("source") or "")
        for row in read_csv(path)
    }


def read_anchors(path: Path) -> list[SimpleNamespace]:
    """Other projects' published scores, never part of our statistics: project, algorithm, env_id,
    steps or episodes, score, spread, spread_kind, seeds, metric, source."""
    return [SimpleNamespace(**row) for row in read_csv(path)]
