"""What runs left behind: the folders of `run`, any script's run folders, and committed tables.

    runs-dir/<env>/<script>/<variant>-s<seed>/         a job of `run`: job.json, log.txt and run/
    any folder with run.json and episodes.csv          a run by hand, or of another program
    results/<env>/<script>/<variant>-s<seed>.json      and .csv.gz: a run to commit

A program that is not ours takes part if it leaves an `episodes.csv` (global_step, seconds, return,
length; a row per training episode) and a `run.json` with "script", "seed", "status" ("finished" at
the end) and "args" with "env_id". An "exp_name" in "args" other than the script names a variant.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np

from benchmark.programs import refuse, write_bytes, write_json

PUBLISHED = Path(__file__).resolve().parent / "published"
SCALES = PUBLISHED / "scales.csv"
ANCHORS = PUBLISHED / "anchors.csv"
COLUMNS = ("global_step", "seconds", "return", "length")
GAMES = 100  # training episodes whose mean is a training score
Metric = Literal["training", "evaluation"]


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
    place: Path | None = None  # its folder or, of a committed one, its .json

    @property
    def algorithm(self) -> str:
        return self.script if self.variant == "default" else f"{self.script} {self.variant}"

    def score(self, metric: str, games: int = GAMES) -> float:
        """Mean return of the last `games` training episodes or, in evaluation, of the episodes
        that the final policy played; nan if there is none, or if one is not finite."""
        values = self.evaluation if metric == "evaluation" else self.returns[-games:]
        if not len(values) or not np.isfinite(values).all():
            return float("nan")
        return float(np.mean(values))


def slug(env_id: str) -> str:
    """An environment's id without its module, as a folder's name."""
    return re.sub(r"^[\w.]+:", "", env_id).replace("/", "-")


def read_table(path: Path) -> np.ndarray:
    """The rows [episodes, 4] of an episodes.csv, packed or not; a last row cut off in mid-write is
    left out. ValueError if it holds anything else, or if steps go back: perhaps two runs wrote."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    header, _, body = text[: text.rfind("\n") + 1].partition("\n")
    if header and header.strip() != ",".join(COLUMNS):
        raise ValueError(f"not a table of episodes: the columns are {header[:80]}")
    if not body.strip():
        return np.empty((0, len(COLUMNS)))
    table = np.loadtxt(io.StringIO(body), delimiter=",", ndmin=2, comments=None)
    if table.shape[1] != len(COLUMNS) or (np.diff(table[:, 0]) < 0).any():
        raise ValueError("not a table of one run's episodes: global_step goes back")
    return table


def read_json(path: Path) -> dict:
    """A JSON file's content; empty if there is none or it can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def with_starts(info: dict, job: dict) -> dict:
    """The content of run.json, completed by what `run` recorded when the run began."""
    first, *later = job.get("starts") or [{}]
    versions = info.get("versions", {}) | first.get("versions", {})
    resumed = {"resumed_with": later} if later else {}
    return first | info | {"versions": versions} | resumed


def make_run(info: dict, table: np.ndarray, job: dict) -> Run:
    """A run from its run.json, its episodes and its job.json ({} if there is none). An error if
    something in them can't be used."""
    info = with_starts(info, job)
    args = info.get("args") or {}
    hardware = info.get("hardware") or {}
    if not isinstance(hardware, dict):
        hardware = {"cpu": hardware}
    script = job.get("script") or Path(info.get("script", "unknown")).stem
    name = args.get("exp_name") or script
    seconds = info.get("wall_seconds") or (table[-1, 1] if len(table) else np.nan)
    budget = ""
    if args.get("num_episodes"):
        budget = f"{int(args['num_episodes']):,} episodes"
    elif args.get("total_timesteps"):
        budget = f"{int(args['total_timesteps']):,} steps"
    return Run(
        env_id=re.sub(r"^[\w.]+:", "", job.get("env_id") or args["env_id"]),
        script=script,
        variant=job.get("variant") or ("default" if name == script else name),
        seed=int(job["seed"] if "seed" in job else info.get("seed", args.get("seed"))),
        status="failed" if job.get("reason") else info.get("status") or "missing",
        reason=job.get("reason") or "",
        info=info,
        steps=table[:, 0],
        seconds=table[:, 1],
        returns=table[:, 2],
        evaluation=np.array(info.get("evaluation") or [], float),
        budget=budget,
        hours=float(seconds) / 3600,
        commit=str(info.get("git_commit") or ""),
        cpu=str(hardware.get("cpu") or ""),
        gpu=str(hardware.get("gpu") or ""),
    )


def read_place(place: Path) -> Run:
    """The run at a place: a committed one, a job's or a script's own. An error if there is none."""
    if place.suffix == ".json":
        # run.json names the script that the program imports, so the folder's name counts
        job = {"script": place.parent.name, "variant": place.stem.rpartition("-s")[0]}
        table = read_table(place.with_suffix(".csv.gz"))
        return make_run(json.loads(place.read_text()), table, job)
    job = {}
    folder = place
    if (place / "job.json").exists():
        job = json.loads((place / "job.json").read_text())
        folder = place / "run"
    info = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
    if job and (place / "evaluation.json").exists():
        info["evaluation"] = json.loads((place / "evaluation.json").read_text())["returns"]
    path = folder / "episodes.csv"
    return make_run(info, read_table(path) if path.exists() else np.empty((0, 4)), job)


def read(place: Path) -> Run:
    """The run at a place or, if its files can't be used, a stand-in that says why."""
    try:
        run = read_place(place)
    except Exception as error:  # of any kind: one bad run must not cost the report
        job = {"env_id": "unknown", "script": "unknown", "seed": 0} | read_json(place / "job.json")
        job = {name: job[name] for name in ("env_id", "script", "seed")}
        run = make_run({}, np.empty((0, 4)), job)
        run.status = "unreadable"
        run.reason = f"{place}: {error!r}"
    run.place = place
    return run


def search(folder: Path) -> Iterator[Path]:
    """The places of runs in or under a folder, sorted by name. Links are not followed."""
    if not folder.is_dir():
        refuse(f"{folder}: no such folder")
    if (folder / "job.json").exists() or (folder / "run.json").exists():
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from search(path)
        elif path.suffix == ".json" and path.with_suffix(".csv.gz").exists():
            yield path


def find(folders: Iterable[Path]) -> list[Run]:
    """All runs anywhere under these folders, in order of environment, algorithm and seed. Refuses
    folders without a run, and two runs that claim the same place."""
    runs = {}
    for place in itertools.chain(*map(search, map(Path, folders))):
        run = read(place)
        bad = run.status == "unreadable"
        first = runs.setdefault(place if bad else (run.env_id, run.algorithm, run.seed), run)
        if first is not run:
            what = f"{run.algorithm} on {run.env_id} with seed {run.seed}"
            how = "report them apart, or give one another --variant or --exp-name"
            refuse(f"{place}: a second run of {what}, the first is in {first.place}; {how}")
    if not runs:
        refuse(f"no runs in {', '.join(map(str, folders)) or 'no folder'}")
    return sorted(runs.values(), key=lambda run: (run.env_id, run.algorithm, run.seed))


def committed(job: dict, results: Path) -> Path:
    """Where a job's run.json goes in `results`; the table goes beside it."""
    return results / slug(job["env_id"]) / job["script"] / f"{job['variant']}-s{job['seed']}.json"


def commit(run_folder: Path, job: dict, evaluation: list[float], results: Path):
    """Write a run into `results`: its table, with whole seconds and returns of two decimals, and
    its run.json, with what `run` knows of it."""
    table = read_table(run_folder / "episodes.csv")
    text = io.StringIO()
    np.savetxt(text, table, "%d,%.0f,%.2f,%d", header=",".join(COLUMNS), comments="")
    info = {"seed": job["seed"]} | with_starts(read_json(run_folder / "run.json"), job)
    info["args"] = {"env_id": job["env_id"]} | (info.get("args") or {})  # if it has no such entry
    if len(table):
        info["global_step"] = int(table[-1, 0])
    info["command"] = job["command"].replace(str(run_folder), "RUN")
    info["evaluation"] = evaluation or info.get("evaluation", [])
    path = committed(job, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".pt").unlink(missing_ok=True)  # the policy of an earlier table
    write_bytes(path.with_suffix(".csv.gz"), gzip.compress(text.getvalue().encode(), mtime=0))
    write_json(path, info)


@dataclass
class Group:
    """The runs of an algorithm on an environment, by seed, all trained equally long."""

    env_id: str
    algorithm: str
    budget: str
    mixed: bool  # this algorithm has runs of another budget on this environment
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    def scores(self, metric: str) -> np.ndarray:
        """Scores [seeds] of the finished runs that have one."""
        values = np.array([run.score(metric) for run in self.finished])
        return values[np.isfinite(values)]


def group(runs: Iterable[Run]) -> list[Group]:
    """Groups of runs, each of one budget. A run that tells none, as one that has not begun, joins
    the largest group. Runs that can't be read are in none."""
    by_place = defaultdict(list)
    for run in runs:
        if run.status != "unreadable":
            by_place[run.env_id, run.algorithm].append(run)
    groups = []
    for place, members in by_place.items():
        lengths = [run.budget for run in members if run.budget]
        usual = max(lengths, key=lengths.count, default="")
        by_length = defaultdict(list)
        for run in members:
            by_length[run.budget or usual].append(run)
        groups += [Group(*place, name, len(by_length) > 1, own) for name, own in by_length.items()]
    return groups


def only(runs: list[Run], name: str, wanted: Iterable[str]) -> list[Run]:
    """The runs with such an env_id or algorithm, and those that can't be read; all if nothing is
    wanted. Refuses an env_id or algorithm of which there is no run."""
    there = sorted({getattr(run, name) for run in runs})
    if missing := sorted(set(wanted) - set(there)):
        refuse(f"no run of {', '.join(missing)}; there are {', '.join(there)}")
    wanted = wanted or there
    return [run for run in runs if getattr(run, name) in wanted or run.status == "unreadable"]


class Scale(NamedTuple):
    """Scores are normalised to 0 at low and 1 at high."""

    low: float
    high: float
    source: str | None = None


def cell(text: str | None) -> int | float | str | None:
    """A table's cell as a number or a text; None if it is empty."""
    for kind in (int, float):
        with contextlib.suppress(ValueError, TypeError):
            return kind(text)
    return text or None


def read_csv(path: Path) -> list[dict]:
    """Rows of a table below its comments, numbers as numbers, None for what is empty."""
    with open(path, encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [{name: cell(text) for name, text in row.items()} for row in rows]


def read_scales(path: Path) -> dict[str, Scale]:
    """Scales by environment, from a table of env_id, low, high, source."""
    rows = read_csv(path)
    return {row["env_id"]: Scale(row["low"], row["high"], row.get("source")) for row in rows}


def read_anchors(path: Path) -> list[SimpleNamespace]:
    """Other projects' published scores, never part of our statistics: project, algorithm, env_id,
    steps or episodes, score, spread, spread_kind, seeds, metric, source."""
    return [SimpleNamespace(**row) for row in read_csv(path)]
