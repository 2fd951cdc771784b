"""What runs left behind: the folders of `run`, any script's run folders, and committed tables.

    runs-dir/<env>/<script>/<variant>-s<seed>/         a job of `run`: job.json, log.txt and run/
    any folder with run.json and episodes.csv          a run by hand, or of another program
    results/<env>/<script>/<variant>-s<seed>.json      and .csv.gz: a run to commit

A program that is not ours takes part if it leaves an `episodes.csv` (global_step, seconds, return,
length; a row per training episode) and a `run.json` with "script", "seed", "status" ("finished" at
the end) and "args" with "env_id". If "args" has an "exp_name" other than the script's, it names a
variant. `run` records how the program was started (programs.provenance).
"""

import contextlib
import csv
import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmark.programs import read_bytes, refuse, write_bytes, write_json

PUBLISHED = Path(__file__).resolve().parent / "published"
SCALES = PUBLISHED / "scales.csv"
ANCHORS = PUBLISHED / "anchors.csv"
COLUMNS = ("global_step", "seconds", "return", "length")
MOST_TABLE = 256 * 2**20  # bytes of a table, some 8 million episodes
MOST_JSON = 16 * 2**20  # bytes of a run.json or job.json
LARGEST = 1e30  # a return beyond it can't be drawn, nor its square summed


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

    def score(self, metric: str, games: int = 100) -> float:
        """Mean return of the last `games` training episodes or, in evaluation, of the episodes
        that the final policy played; nan if there is none, or if one is not finite."""
        values = self.evaluation if metric == "evaluation" else self.returns[-games:]
        if not len(values) or not np.isfinite(values).all():
            return float("nan")
        return float(np.mean(values))


def plain(value: object, most: int = 500) -> str:
    """A value as printable text on one line, of at most `most` characters."""
    text = "".join(c if c.isprintable() else " " for c in str(value or ""))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def without_module(env_id: str) -> str:
    """An environment's id without its module: Id for package.module:Id."""
    return re.sub(r"^[\w.]+:", "", env_id)


def slug(env_id: str) -> str:
    """An environment's id without its module, as a folder's name; ValueError if it can't be one."""
    name = without_module(env_id).replace("/", "-")
    if name in ("", ".", "..") or name != plain(name) or len(name.encode()) > 200:
        raise ValueError(f"{env_id!r} can't name a folder")
    return name


def read_table(text: str) -> np.ndarray:
    """The rows [episodes, 4] of an episodes.csv; a last row cut off in mid-write is left out.

    ValueError if it holds anything else: another header, words, rows of other widths, steps that
    go back (perhaps two runs wrote into one file), or numbers too large to be scores.
    """
    whole = text[: text.rfind("\n") + 1].replace("\r\n", "\n")
    header, _, body = whole.partition("\n")
    if not whole and ",".join(COLUMNS).startswith(text):  # it is about to be written
        return np.empty((0, len(COLUMNS)))
    if tuple(header.split(",")) != COLUMNS:
        raise ValueError(f"not a table of episodes: the columns are {(header or text)[:80]}")
    if not body.strip():
        return np.empty((0, len(COLUMNS)))
    try:
        table = np.loadtxt(io.StringIO(body), delimiter=",", ndmin=2, comments=None)
    except ValueError as error:  # after a semicolon it advises the programmer
        raise ValueError(f"not a table of episodes: {str(error).partition(';')[0]}") from None
    if table.shape[1] != len(COLUMNS) or not np.isfinite(table[:, [0, 1, 3]]).all():
        raise ValueError("not a table of episodes: a row lacks a step or a time or a length")
    steps = table[:, 0]
    if steps[0] < 0 or (np.diff(steps) < 0).any():
        raise ValueError("not a table of one run's episodes: global_step goes back")
    finite = table[np.isfinite(table)]
    if abs(finite).max() > LARGEST:
        raise ValueError(f"not a table of episodes: a number is beyond {LARGEST:g}")
    return table


def read_text(path: Path) -> str:
    """An episodes.csv, packed or not; ValueError if it is larger than MOST_TABLE."""
    content = read_bytes(path, MOST_TABLE)
    if path.suffix == ".gz":
        with gzip.open(io.BytesIO(content)) as file:
            content = file.read(MOST_TABLE + 1)
        if len(content) > MOST_TABLE:
            raise ValueError(f"{path.name} holds more than {MOST_TABLE:,} bytes")
    return content.decode("utf-8-sig")


def load_json(path: Path) -> dict:
    """A JSON file's content; ValueError if it is no object, OSError if it can't be read."""
    try:
        content = json.loads(read_bytes(path, MOST_JSON).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def read_json(path: Path) -> dict:
    """A JSON file's content; empty if there is none or it can't be read."""
    try:
        return load_json(path)
    except (OSError, ValueError):
        return {}


def there(path: Path) -> bool:
    """Whether anything has this name, even a link that leads nowhere."""
    return os.path.lexists(path)


def told(info: dict, job: dict) -> dict:
    """The content of run.json, completed by what `run` recorded when the run began."""
    first, *later = job.get("starts") or [{}]
    info = first | info
    own = info.get("versions")
    if isinstance(own, dict) and first:
        if later:  # run.json has the versions of the last start
            info["versions"] = own | first["versions"]
        else:
            info["versions"] = first["versions"] | own
    if later:  # the run was resumed with another source, hardware or versions
        info["resumed_with"] = later
    return info


def typed(name: str, value: object, kind: type):
    """The value; ValueError if it is of another kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}, which is no {kind.__name__}")
    return value


def whole(name: str, value: object) -> int:
    """A value as a whole number, also if it is text; ValueError if it is none."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if int(value) == float(value):
            return int(value)
    raise ValueError(f"{name} is {value!r:.80}, which is no whole number")


def make_run(info: dict, text: str, job: dict) -> Run:
    """A run from its run.json, the text of its episodes.csv and its job.json ({} if there is none).
    ValueError if something in them can't be used."""
    table = read_table(text)
    info = told(info, job)
    args = typed("args", info.get("args") or {}, dict)
    hardware = info.get("hardware") or {}
    if not isinstance(hardware, dict):
        hardware = {"cpu": hardware}
    env_id = job.get("env_id") or args.get("env_id")
    seed = job.get("seed", info.get("seed", args.get("seed")))
    if not env_id or seed is None:
        raise ValueError("nothing says of which environment and seed it is")
    env_id = typed("env_id", env_id, str)
    script = job.get("script") or Path(typed("script", info.get("script", "unknown"), str)).stem
    name = args.get("exp_name") or script
    seconds = info.get("wall_seconds")
    if not seconds:
        seconds = table[-1, 1] if len(table) else np.nan
    variant = job.get("variant")
    if not variant:
        variant = "default" if name == script else name
    status = info.get("status") or "missing"
    if job.get("reason"):
        status = "failed"
    budget = ""
    if args.get("num_episodes"):
        budget = f"{whole('num_episodes', args['num_episodes']):,} episodes"
    elif args.get("total_timesteps"):
        budget = f"{whole('total_timesteps', args['total_timesteps']):,} steps"
    words = {
        "env_id": without_module(env_id),
        "script": script,
        "variant": variant,
        "status": status,
        "reason": job.get("reason"),
        "budget": budget,
        "commit": info.get("git_commit"),
        "cpu": hardware.get("cpu"),
        "gpu": hardware.get("gpu"),
    }
    return Run(
        **{name: plain(value) for name, value in words.items()},
        seed=whole("seed", seed),
        info=info,
        steps=table[:, 0],
        seconds=table[:, 1],
        returns=table[:, 2],
        evaluation=scores(info.get("evaluation") or []),
        hours=float(seconds) / 3600,
    )


def scores(values: list) -> np.ndarray:
    """Returns of the final policy [episodes]; ValueError if the values are no returns."""
    returns = np.array(typed("evaluation", values, list), float)
    if returns.ndim != 1 or (abs(returns[np.isfinite(returns)]) > LARGEST).any():
        raise ValueError("evaluation is no list of returns")
    return returns


def unreadable(place: Path, job: dict, error: Exception) -> Run:
    """A stand-in for a run whose files can't be used."""
    kinds = {"env_id": str, "script": str, "variant": str, "seed": int}
    said = {name: job[name] for name, kind in kinds.items() if isinstance(job.get(name), kind)}
    said = {"env_id": "unknown", "script": "unknown", "seed": 0} | said
    run = make_run({}, "", said)
    run.status = "unreadable"
    run.reason = plain(f"{place}: {error or type(error).__name__}")
    return run


def read_folder(folder: Path, job: dict | None = None) -> Run:
    """A run from its folder, which may be missing or half-made."""
    table = folder / "episodes.csv"
    path = folder / "run.json"
    played = folder.parent / "evaluation.json"
    info = load_json(path) if there(path) else {}
    if there(path) and not info:
        raise ValueError("run.json is no JSON object with anything in it")
    if job and there(played):
        returns = load_json(played).get("returns")
        info["evaluation"] = typed(f"returns in {played.name}", returns, list)
    return make_run(info, read_text(table) if there(table) else "", job or {})


def read_job(folder: Path) -> Run:
    """A job of `run`, begun or not, from its folder."""
    job = load_json(folder / "job.json")
    if not job:
        raise ValueError("job.json is no JSON object with anything in it")
    run = folder / "run"
    if there(run) and not run.is_dir():
        raise ValueError("run is no folder")
    return read_folder(run, job)


def read_committed(path: Path) -> Run:
    """A run from its table in results; `path` is that of the .json."""
    text = read_text(path.with_suffix(".csv.gz"))
    variant = path.stem.rpartition("-s")[0]
    job = {"script": path.parent.name, "variant": variant}  # run.json names what that one imports
    return make_run(load_json(path), text, job)


def read(place: Path) -> Run:
    """The run at a place or, if its files can't be used, a stand-in that says why."""
    job = read_json(place / "job.json")
    try:
        run = read_place(place)
    except Exception as error:  # of any kind: one bad run must not cost the report
        run = unreadable(place, job, error)
    run.place = place
    return run


def read_place(place: Path) -> Run:
    """The run at a place: a committed one, a job's or a script's own. An error if there is none."""
    if place.suffix == ".json" and not is_run(place):
        return read_committed(place)
    if there(place / "job.json"):
        return read_job(place)
    if there(place / "run.json"):
        return read_folder(place)
    list(place.iterdir())  # the error, if it still can't be listed
    raise ValueError("it could not be listed, or its run is gone")


def real(path: Path) -> Path:
    """Where a path leads; never an error, as with links in a circle."""
    return Path(os.path.realpath(path))


def is_run(folder: Path) -> bool:
    """Whether a folder is a job's or a run's, whatever its files hold."""
    return there(folder / "job.json") or there(folder / "run.json")


def entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """What may hold runs in a folder, sorted by name: (folders and committed tables, links)."""
    plain = []
    links = []
    for path in sorted(folder.iterdir()):
        committed = path.suffix == ".json" and there(path.with_suffix(".csv.gz"))
        if path.is_symlink():
            links.append(path)
        elif committed or path.is_dir():
            plain.append(path)
    return plain, links


def search(top: Path) -> Iterator[Path]:
    """The places of runs in or under a folder, each once. A link adds nothing if it leads to one of
    them, or to a folder that holds them all. A folder that can't be listed counts as a place."""
    if not top.is_dir():
        refuse(f"{top}: no such folder")
    start = real(top)
    seen = set()  # real paths
    runs = set()  # those of them that hold a run
    left = [(top, start)]
    links = []  # they come last, so that a run is found under its own name
    while left or links:
        if left:
            path, here = left.pop()
        else:
            path = links.pop(0)
            here = real(path)
            if here in start.parents or not runs.isdisjoint(here.parents):
                continue
        if here in seen:
            continue
        seen.add(here)
        if is_run(path):
            runs.add(here)
            yield path
        elif os.path.isdir(path):  # noqa: PTH112, which is no error where it may not look
            try:
                more, later = entries(path)
            except OSError:
                yield path
                continue
            left += [(own, here / own.name) for own in reversed(more)]
            links += later
        elif path.suffix == ".json" and there(path.with_suffix(".csv.gz")):
            yield path


def find(folders: Iterable[Path]) -> list[Run]:
    """All runs anywhere under these folders, in order of environment, algorithm and seed.

    Refuses folders without a run, and two runs that claim the same place.
    """
    runs = []
    places = {}
    for place in (place for folder in folders for place in search(Path(folder))):
        run = read(place)
        key = (run.env_id, run.algorithm, run.seed)
        if run.status != "unreadable" and places.setdefault(key, place) is not place:
            refuse(
                f"{place}: a second run of {run.algorithm} on {run.env_id} with seed {run.seed}, "
                f"the first is in {places[key]}; report them apart, or give one another "
                "--variant or --exp-name"
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
    """Write a run into `results`: its table, with whole seconds and returns of two decimals, and
    its run.json, with what `run` knows of it."""
    table = read_table(read_text(run_folder / "episodes.csv"))
    text = io.StringIO()
    head = ",".join(COLUMNS)
    np.savetxt(text, table, fmt="%d,%.0f,%.2f,%d", header=head, comments="")
    info = {"seed": job["seed"]} | told(load_json(run_folder / "run.json"), job)
    info["args"] = {"env_id": job["env_id"]} | (info.get("args") or {})  # if it has no such entry
    if len(table):
        info["global_step"] = int(table[-1, 0])
    info["command"] = job["command"].replace(str(run_folder), "RUN")
    info["evaluation"] = evaluation or info.get("evaluation", [])
    path = committed(job, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".pt").unlink(missing_ok=True)  # the policy of an earlier table
    packed = gzip.compress(text.getvalue().encode(), mtime=0)
    write_bytes(path.with_suffix(".csv.gz"), packed)
    write_json(path, info)


@dataclass
class Scale:
    """Scores are normalised to 0 at low and 1 at high."""

    low: float
    high: float
    source: str = ""


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
    """Scales by environment, from a table of env_id, low, high, source; refuses other files."""
    scales = {}
    try:
        for row in read_csv(path):
            scale = Scale(float(row["low"]), float(row["high"]), row.get("source") or "")
            if not -LARGEST < scale.low < scale.high < LARGEST:
                raise ValueError(f"{row['env_id']}: low {scale.low} is not below high {scale.high}")
            scales[str(row["env_id"])] = scale
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        refuse(f"--scales {path}: no table of env_id, low, high: {plain(error)}")
    return scales


def read_anchors(path: Path) -> list[SimpleNamespace]:
    """Other projects' published scores, never part of our statistics: project, algorithm, env_id,
    steps or episodes, score, spread, spread_kind, seeds, metric, source."""
    return [SimpleNamespace(**row) for row in read_csv(path)]
