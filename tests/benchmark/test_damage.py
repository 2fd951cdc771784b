"""Run folders that are damaged or hostile: the others are reported, each bad one has its line."""

import gzip
import json
import math
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import HEAD, ended, refused, table, write_run

from benchmark import data
from benchmark.compare import compare
from benchmark.report import report

pytestmark = pytest.mark.timeout(120)  # a pipe that is waited for has no other end
ROWS = "".join(f"{k},{k},7.0,1\n" for k in range(1, 40))
GOOD = gzip.compress((HEAD + ROWS).encode())
NAN = math.nan
Make = Callable[[Path], object]


def job(folder: Path, **more):
    write_run(folder / "run", 3)
    told = {"env_id": "A-v0", "script": "ppo", "variant": "default", "seed": 3} | more
    (folder / "job.json").write_text(json.dumps(told))


def committed(folder: Path, content: bytes):
    folder.mkdir()
    info = {"seed": 3, "args": {"env_id": "A-v0"}}
    (folder / "default-s3.json").write_text(json.dumps(info))
    (folder / "default-s3.csv.gz").write_bytes(content)


def instead(name: str, make: Make) -> Make:
    """Makes a run with something else in the place of a file."""

    def whole(folder: Path):
        write_run(folder, 3)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return whole


def says(name: str, content: str | bytes) -> Make:
    """Makes a run one of whose files holds this."""
    raw = content.encode() if isinstance(content, str) else content
    return instead(name, lambda path: path.write_bytes(raw))


def told(**info) -> Make:
    """Makes a run whose run.json says this."""
    return lambda folder: write_run(folder, **({"seed": 3} | info))


def a_job(**more) -> Make:
    return lambda folder: job(folder, **more)


def played(make: Make) -> Make:
    """Makes a job with something else for its evaluation.json."""

    def whole(folder: Path):
        job(folder)
        make(folder / "evaluation.json")

    return whole


def enormous(path: Path):
    path.touch()
    os.truncate(path, 2**40)


PLACES = {
    "pipe": os.mkfifo,
    "circle": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
}
JSON = {  # of run.json
    "deep list": "[" * 200_000,
    "deep object": '{"a":' * 200_000,
    "long number": '{"seed":' + "9" * 5000 + "}",
    "empty": "",
    "bytes": b"\xff\xfe",
    "a list": "[]",
    "half": '{"status"',
}
SEEDS = {"worded": "first", "listed": [1], "infinite": math.inf, "nan": NAN, "broken": 1.5}
TABLES = {  # below the head of episodes.csv, and what is said of it
    "no UTF-8": (b"1,1,\xff,1\n", "can't decode byte 0xff"),
    "words": (b"1,1,many,1\n", "could not convert string"),
    "a column less": (b"1,1,1\n", "a row lacks a step or a time"),
    "nan step": (b"nan,1,1,1\n", "a row lacks a step or a time"),
    "no length": (b"1,1,1,nan\n", "a step or a time or a length"),
    "comment": (b"1,1,1,1\n#2,2,2,2\n", "could not convert"),
    "torn inside": (f"1,1,1,1\n2,2,{ROWS}".encode(), "changed from 4 to 6"),
    "two runs": ((ROWS + ROWS).encode(), "global_step goes back"),
    "before 0": (b"-5,1,1,1\n", "global_step goes back"),
    "huge return": (b"1,1,1e308,1\n", "a number is beyond 1e+30"),
}
DAMAGED = {  # how it is made, and what its reason says
    f"{kind} for {name}": (instead(name, make), name)
    for kind, make in PLACES.items()
    for name in ("run.json", "episodes.csv", "job.json")
}
DAMAGED |= {kind: (says("run.json", x), "run.json is no JSON object") for kind, x in JSON.items()}
DAMAGED |= {
    f"{kind} seed": (told(seed=x), f"seed is {x!r}, which is no whole number")
    for kind, x in SEEDS.items()
}
DAMAGED |= {
    kind: (says("episodes.csv", HEAD.encode() + x), reason) for kind, (x, reason) in TABLES.items()
}
DAMAGED |= {
    "deep job": (says("job.json", "[" * 200_000), "job.json is no JSON object"),
    "enormous run.json": (instead("run.json", enormous), "run.json has more than"),
    "enormous table": (instead("episodes.csv", enormous), "episodes.csv has more than"),
    "nothing told": (says("run.json", "{}"), "run.json is no JSON object with anything"),
    "no seed": (told(seed=None), "nothing says of which environment and seed"),
    "no args": (told(args=None), "nothing says of which environment and seed"),
    "env_id": (told(args={"env_id": 5}), "env_id is 5, which is no str"),
    "args": (told(args=[1]), "args is [1], which is no dict"),
    "worded args": (told(args="none"), "args is 'none', which is no dict"),
    "numbered script": (told(script=7), "script is 7, which is no str"),
    "script": (told(script=[1]), "script is [1], which is no str"),
    "worded steps": (told(args={"env_id": "A-v0", "total_timesteps": "many"}), "total_timesteps"),
    "nan steps": (told(args={"env_id": "A-v0", "total_timesteps": NAN}), "total_timesteps is nan"),
    "worded seconds": (told(wall_seconds="long"), "could not convert string"),
    "played words": (told(evaluation="abc"), "evaluation is 'abc', which is no list"),
    "played best": (told(evaluation=["best"]), "could not convert string"),
    "played raggedly": (told(evaluation=[[1], [1, 2]]), "setting an array element"),
    "played huge": (told(evaluation=[1e308, 1e308]), "evaluation is no list of returns"),
    "job's seed": (a_job(seed=[1]), "seed is [1], which is no whole number"),
    "job's starts": (a_job(starts=[5]), "int"),
    "job's count of starts": (a_job(starts=7), "int"),
    "pipe for evaluation.json": (played(os.mkfifo), "no plain file: "),
    "evaluation.json without": (played(lambda path: path.write_text("{}")), "returns in eval"),
    "header": (says("episodes.csv", "step,score\n1,1\n"), "the columns are step,score"),
    "lone CR": (says("episodes.csv", (HEAD + ROWS).replace("\n", "\r")), "the columns are"),
    "no gzip": (lambda folder: committed(folder, b"nothing"), "ot a gzip"),
    "cut gzip": (lambda folder: committed(folder, GOOD[:-12]), "ended before"),
    "wrong gzip": (lambda folder: committed(folder, GOOD[:-6] + b"00" + GOOD[-4:]), "CRC"),
}


@pytest.fixture
def runs(tmp_path) -> Path:
    for seed in (1, 2):
        write_run(tmp_path / "runs" / f"s{seed}", seed)
    return tmp_path / "runs"


def seeds(runs: Path) -> list[int]:
    return [run.seed for run in data.find([runs]) if run.status == "finished"]


def test_each_bad_one_is_named_and_the_others_are_reported(runs, tmp_path):
    bad = len(DAMAGED)
    for k, (make, _) in enumerate(DAMAGED.values()):
        make(runs / f"bad{k}")
    done = ended(report, [runs], tmp_path / "out", code=1)
    assert done.stderr == f"{bad} of {bad + 2} runs have no score, see the report\n"
    assert done.stdout.count("left out, as it can't be read: ") == bad
    rows = {row["reason"].partition(": ")[0]: row for row in table(tmp_path / "out" / "runs.csv")}
    for k, (kind, (_, reason)) in enumerate(DAMAGED.items()):
        committed = "/default-s3.json" if "gzip" in kind else ""
        row = rows[f"{runs / f'bad{k}'}{committed}"]
        assert row["status"] == "unreadable"
        assert reason in row["reason"], kind
        assert len(row["reason"]) <= 500
        assert "\n" not in row["reason"]
    good = [run for run in data.find([runs]) if run.status == "finished"]
    assert [(run.seed, run.score("training")) for run in good] == [(1, 7.0), (2, 7.0)]
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"2 of {bad + 2} runs are finished" in text
    assert text.count("| unreadable | ") == bad
    refused("no run that can be read", report, [runs / "bad0"], tmp_path / "out")


def test_a_gzip_that_unpacks_to_more_than_any_table(runs, monkeypatch):
    monkeypatch.setattr(data, "MOST_TABLE", 100_000)
    committed(runs / "bad", gzip.compress((HEAD + "1,1,1,1\n").encode() + b"\n" * 200_000))
    (bad,) = (run for run in data.find([runs]) if run.status == "unreadable")
    assert bad.reason.endswith("default-s3.csv.gz holds more than 100,000 bytes")
    assert seeds(runs) == [1, 2]


def test_a_folder_that_can_not_be_listed_is_named(runs, monkeypatch):
    (runs / "closed").mkdir()
    plain = Path.iterdir

    def iterdir(folder: Path):
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return plain(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    (bad,) = (run for run in data.find([runs]) if run.status == "unreadable")
    assert bad.reason.endswith(f"[Errno 13] Permission denied: '{runs / 'closed'}'")
    assert seeds(runs) == [1, 2]


LINKS = {
    "latest": ("latest", "s1"),
    "latest, first by name": ("a", "s2"),
    "the folder itself": ("here", "."),
    "the folder above": ("above", ".."),
    "the root": ("root", "/"),
    "itself": ("self", "self"),
    "inside a run": ("inside", "s1/videos"),
    "a job": ("latest", "A-v0/ppo/default-s3"),
    "the run in a job": ("running", "A-v0/ppo/default-s3/run"),
    "a folder of jobs": ("A-v0/round", "../A-v0"),
}


@pytest.mark.parametrize("name, target", LINKS.values(), ids=LINKS)
def test_a_link_to_what_is_there_is_no_second_run(name, target, runs):
    (runs / "s1" / "videos").mkdir()
    job(runs / "A-v0" / "ppo" / "default-s3")
    (runs / name).symlink_to(target)
    assert seeds(runs) == [1, 2, 3]
    assert len(data.find([runs])) == 3


def test_a_link_to_a_committed_table_is_no_second_run(runs):
    committed(runs / "ppo", GOOD)
    for suffix in (".json", ".csv.gz"):
        (runs / "ppo" / f"best-s3{suffix}").symlink_to(f"default-s3{suffix}")
    assert [run.seed for run in data.find([runs])] == [1, 2, 3]


def test_runs_that_lie_elsewhere_are_found_by_their_links(runs, tmp_path):
    for seed in (3, 4):
        write_run(tmp_path / "scratch" / f"s{seed}", seed)
    (runs / "elsewhere").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch" / "back").symlink_to(runs)
    assert seeds(runs) == [1, 2, 3, 4]


def test_a_thousand_folders_in_each_other(runs):
    here = Path.cwd()
    try:
        os.chdir(runs)
        for _ in range(1200):
            Path("a").mkdir()
            os.chdir("a")
        os.chdir(here)
        assert seeds(runs) == [1, 2]
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-r", str(runs / "a")], check=True)  # shutil can't


CRLF = (HEAD + ROWS).replace("\n", "\r\n").encode()
WHOLE = {
    "CRLF": CRLF,
    "byte order mark": b"\xef\xbb\xbf" + (HEAD + ROWS).encode(),
    "torn": (HEAD + ROWS + "40,40,9").encode(),
    "torn with CRLF": CRLF + b"40,40,9,1\r",
}


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_a_table_with_odd_ends_has_all_its_whole_rows(content, runs):
    (runs / "s2" / "episodes.csv").write_bytes(content)
    first, second = data.find([runs])
    assert second.returns.tolist() == first.returns.tolist() == [7.0] * 39
    assert second.steps.tolist() == list(range(1, 40))


def test_a_run_that_diverged_costs_no_curve_and_no_warning(runs, tmp_path, recwarn):
    for k, value in enumerate((math.nan, math.inf, -math.inf), 3):
        write_run(runs / f"s{k}", k, [7.0] * 19 + [value] + [7.0] * 19)
    done = ended(report, [runs], tmp_path / "out", code=1)
    assert done.stderr == "3 of 5 runs have no score, see the report\n"
    assert [str(warning.message) for warning in recwarn] == []
    assert (tmp_path / "out" / "curves_steps.png").stat().st_size > 5_000


def test_compare_names_what_it_can_not_read(runs, tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / "new" / f"s{seed}", seed)
    (runs / "bad").mkdir()
    os.mkfifo(runs / "bad" / "run.json")
    done = ended(compare, runs, tmp_path / "new")
    assert f"A is without {runs / 'bad'}: no plain file" in done.stdout
    done = ended(compare, tmp_path / "new", runs, code=1)
    assert done.stderr.startswith("B lacks ")
    assert f"unreadable {runs / 'bad'}: no plain file" in done.stderr
    assert "P(B > A) = 0.50" in done.stdout


@pytest.mark.parametrize("name", ["run.json", "episodes.csv"])
def test_files_cut_off_or_garbled_anywhere(name, runs):
    """Whatever bytes are there, the other run is read."""
    whole = (runs / "s2" / name).read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        at = draw.randrange(len(whole))
        content = bytearray(whole)
        content[at] ^= 1 << draw.randrange(8)
        (runs / "s2" / name).write_bytes(content[: draw.randrange(at, len(whole) + 1)])
        assert len(data.find([runs])) == 2
        assert 1 in seeds(runs)


SCALES = {
    "missing": None,
    "equal": "env_id,low,high\nA-v0,1,1\n",
    "words": "env_id,low,high\nA-v0,low,high\n",
    "nan": "env_id,low,high\nA-v0,nan,1\n",
    "columns": "name,from,to\nA-v0,0,1\n",
    "short": "env_id,low,high\nA-v0,1\n",
}


@pytest.mark.parametrize("content", SCALES.values(), ids=SCALES)
def test_a_table_of_scales_that_is_none_is_one_line(content, runs, tmp_path):
    path = tmp_path / "scales.csv"
    if content is not None:
        path.write_text(content)
    refused(f"benchmark: --scales {path}: ", report, [runs], tmp_path / "out", scales=path)
