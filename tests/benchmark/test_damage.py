"""Run folders that are damaged or hostile: the others are reported, each bad one has its line."""

import contextlib
import csv
import gzip
import json
import math
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark import data
from benchmark.compare import compare
from benchmark.report import report

pytestmark = pytest.mark.timeout(120)  # a pipe that is waited for has no other end
HEAD = "global_step,seconds,return,length\n"
ROWS = "".join(f"{k},{k},7,1\n" for k in range(1, 40))
GOOD = gzip.compress((HEAD + ROWS).encode())
NAN = math.nan


def by_hand(folder: Path, seed: object, **info):
    """A run as a script leaves it."""
    folder.mkdir(parents=True)
    args = {"env_id": "A-v0", "total_timesteps": 100}
    told = {"script": "ppo.py", "seed": seed, "status": "finished", "args": args} | info
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "episodes.csv").write_text(HEAD + ROWS)


def job(folder: Path, **more):
    by_hand(folder / "run", 3)
    told = {"env_id": "A-v0", "script": "ppo", "variant": "default", "seed": 3} | more
    (folder / "job.json").write_text(json.dumps(told))


def committed(folder: Path, table: bytes):
    folder.mkdir()
    args = {"env_id": "A-v0"}
    (folder / "default-s3.json").write_text(json.dumps({"seed": 3, "args": args}))
    (folder / "default-s3.csv.gz").write_bytes(table)


def says(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Makes a run one of whose files holds this."""

    def make(folder: Path):
        by_hand(folder, 3)
        text = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(text)

    return make


def told(**info) -> Callable[[Path], None]:
    """Makes a run whose run.json says this."""
    seed = info.pop("seed", 3)
    return lambda folder: by_hand(folder, seed, **info)


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Makes a run with something else in the place of a file."""

    def whole(folder: Path):
        by_hand(folder, 3)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return whole


def a_job(**more) -> Callable[[Path], None]:
    return lambda folder: job(folder, **more)


def played(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Makes a job with something else for its evaluation.json."""

    def whole(folder: Path):
        job(folder)
        make(folder / "evaluation.json")

    return whole


def in_a_circle(path: Path):
    path.symlink_to(path.name)


def endless(path: Path):
    path.symlink_to("/dev/zero")


def enormous(path: Path):
    path.touch()
    os.truncate(path, 2**40)


PLACES = {"pipe": os.mkfifo, "circle": in_a_circle, "folder": Path.mkdir, "endless": endless}
NAMED = ("run.json", "episodes.csv", "job.json")
DAMAGED = {  # how it is made, and what its reason says
    f"{kind} for {name}": (instead(name, make), f"{name}")
    for kind, make in PLACES.items()
    for name in NAMED
}
DAMAGED |= {
    "deep list": (says("run.json", "[" * 200_000), "run.json is no JSON object"),
    "deep object": (says("run.json", '{"a":' * 200_000), "run.json is no JSON object"),
    "deep job": (says("job.json", "[" * 200_000), "job.json is no JSON object"),
    "long number": (says("run.json", '{"seed":' + "9" * 5000 + "}"), "run.json is no JSON"),
    "enormous run.json": (instead("run.json", enormous), "run.json has more than"),
    "enormous table": (instead("episodes.csv", enormous), "episodes.csv has more than"),
    "empty": (says("run.json", ""), "run.json is no JSON object"),
    "nothing told": (says("run.json", "{}"), "run.json is no JSON object with anything"),
    "no seed": (told(seed=None), "nothing says of which environment and seed"),
    "no args": (told(args=None), "nothing says of which environment and seed"),
    "bytes": (says("run.json", b"\xff\xfe"), "run.json is no JSON object"),
    "a list": (says("run.json", "[]"), "run.json is no JSON object"),
    "half": (says("run.json", '{"status"'), "run.json is no JSON object"),
    "worded seed": (told(seed="first"), "seed is 'first', which is no whole number"),
    "listed seed": (told(seed=[1]), "seed is [1], which is no whole number"),
    "infinite seed": (told(seed=math.inf), "seed is inf, which is no whole number"),
    "nan seed": (told(seed=NAN), "seed is nan, which is no whole number"),
    "broken seed": (told(seed=1.5), "seed is 1.5, which is no whole number"),
    "env_id": (told(args={"env_id": 5}), "env_id is 5, which is no str"),
    "args": (told(args=[1]), "args is [1], which is no dict"),
    "worded args": (told(args="none"), "args is 'none', which is no dict"),
    "numbered script": (told(script=7), "script is 7, which is no str"),
    "worded steps": (told(args={"env_id": "A-v0", "total_timesteps": "many"}), "total_timesteps"),
    "worded seconds": (told(wall_seconds="long"), "could not convert string"),
    "script": (told(script=[1]), "script is [1], which is no str"),
    "nan steps": (told(args={"env_id": "A-v0", "total_timesteps": NAN}), "total_timesteps is nan"),
    "played words": (told(evaluation="abc"), "evaluation is 'abc', which is no list"),
    "played best": (told(evaluation=["best"]), "could not convert string"),
    "played raggedly": (told(evaluation=[[1], [1, 2]]), "setting an array element"),
    "played huge": (told(evaluation=[1e308, 1e308]), "evaluation is no list of returns"),
    "job's seed": (a_job(seed=[1]), "seed is [1], which is no whole number"),
    "job's starts": (a_job(starts=[5]), "int"),
    "job's count of starts": (a_job(starts=7), "int"),
    "pipe for evaluation.json": (played(os.mkfifo), "no plain file: "),
    "evaluation.json without": (played(lambda path: path.write_text("{}")), "returns in eval"),
    "no UTF-8": (says("episodes.csv", HEAD.encode() + b"1,1,\xff,1\n"), "can't decode byte 0xff"),
    "words": (says("episodes.csv", f"{HEAD}1,1,many,1\n"), "could not convert string"),
    "a column less": (says("episodes.csv", f"{HEAD}1,1,1\n"), "a row lacks a step or a time"),
    "nan step": (says("episodes.csv", f"{HEAD}nan,1,1,1\n"), "a row lacks a step or a time"),
    "header": (says("episodes.csv", "step,score\n1,1\n"), "the columns are step,score"),
    "comment": (says("episodes.csv", f"{HEAD}1,1,1,1\n#2,2,2,2\n"), "could not convert"),
    "torn inside": (says("episodes.csv", f"{HEAD}1,1,1,1\n2,2,{ROWS}"), "changed from 4 to 6"),
    "two runs": (says("episodes.csv", HEAD + ROWS + ROWS), "global_step goes back"),
    "before 0": (says("episodes.csv", f"{HEAD}-5,1,1,1\n"), "global_step goes back"),
    "huge return": (says("episodes.csv", f"{HEAD}1,1,1e308,1\n" * 1), "a number is beyond 1e+30"),
    "no length": (says("episodes.csv", f"{HEAD}1,1,1,nan\n"), "a step or a time or a length"),
    "lone CR": (says("episodes.csv", (HEAD + ROWS).replace("\n", "\r")), "the columns are"),
    "no gzip": (lambda folder: committed(folder, b"nothing"), "ot a gzip"),
    "cut gzip": (lambda folder: committed(folder, GOOD[:-12]), "ended before"),
    "wrong gzip": (lambda folder: committed(folder, GOOD[:-6] + b"00" + GOOD[-4:]), "CRC"),
}


@pytest.fixture
def runs(tmp_path) -> Path:
    for seed in (1, 2):
        by_hand(tmp_path / "runs" / f"s{seed}", seed)
    return tmp_path / "runs"


@pytest.mark.parametrize("kind", DAMAGED)
def test_the_bad_one_is_named_and_the_others_are_read(kind, runs):
    make, reason = DAMAGED[kind]
    make(runs / "bad")
    found = {run.status: run for run in data.find([runs])}
    assert sorted(run.seed for run in data.find([runs]) if run.status == "finished") == [1, 2]
    assert found.keys() == {"finished", "unreadable"}
    bad = found["unreadable"]
    assert bad.reason.startswith(f"{runs / 'bad'}") and reason in bad.reason
    assert "\n" not in bad.reason and len(bad.reason) <= 500


def test_one_report_of_all_that_can_be_damaged(runs, tmp_path, capsys):
    for k, (make, _) in enumerate(DAMAGED.values()):
        make(runs / f"bad{k}")
    with pytest.raises(SystemExit) as end:
        report([runs], tmp_path / "out")
    assert end.value.code == 1
    told = capsys.readouterr()
    bad, every = len(DAMAGED), len(DAMAGED) + 2
    assert told.err == f"{bad} of {every} runs have no score, see the report\n"
    assert told.out.count("left out, as it can't be read: ") == bad
    with open(tmp_path / "out" / "runs.csv") as file:
        rows = list(csv.DictReader(file))
    for k in range(bad):
        (row,) = (
            row
            for row in rows
            if f"{runs / f'bad{k}'}:" in row["reason"].replace("/default-s3.json", "")
        )
        assert row["status"] == "unreadable"
    good = [(row["training"], row["reason"]) for row in rows if row["status"] == "finished"]
    assert good == [("7", "")] * 2
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"2 of {every} runs are finished" in text
    assert text.count("| unreadable | ") == bad
    with pytest.raises(SystemExit) as end:
        report([runs / "bad0"], tmp_path / "out")  # nothing else is there
    assert end.value.code == 2


def test_a_gzip_that_unpacks_to_more_than_any_table(runs, monkeypatch):
    monkeypatch.setattr(data, "MOST_TABLE", 100_000)
    committed(runs / "bad", gzip.compress((HEAD + "1,1,1,1\n").encode() + b"\n" * 200_000))
    bad, *good = sorted(data.find([runs]), key=lambda run: run.status != "unreadable")
    assert bad.reason.endswith("default-s3.csv.gz holds more than 100,000 bytes")
    assert [run.seed for run in good] == [1, 2]


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
    assert len(data.find([runs])) == 3


SAME = {
    "latest": ("latest", "s1"),
    "latest, first by name": ("a", "s2"),
    "the folder itself": ("here", "."),
    "the folder above": ("above", ".."),
    "the root": ("root", "/"),
    "itself": ("self", "self"),
    "inside a run": ("inside", "s1/videos"),
}


@pytest.mark.parametrize("kind", SAME)
def test_a_link_to_what_is_there_is_no_second_run(kind, runs):
    (runs / "s1" / "videos").mkdir()
    name, target = SAME[kind]
    (runs / name).symlink_to(target)
    assert [(run.seed, run.status) for run in data.find([runs])] == [
        (1, "finished"),
        (2, "finished"),
    ]


def test_a_link_to_a_job_or_to_the_run_in_it_is_no_second_run(runs):
    job(runs / "A-v0" / "ppo" / "default-s3")
    (runs / "latest").symlink_to("A-v0/ppo/default-s3")
    (runs / "running").symlink_to("A-v0/ppo/default-s3/run")
    (runs / "A-v0" / "round").symlink_to("../A-v0")
    assert [run.seed for run in data.find([runs])] == [1, 2, 3]


def test_a_link_to_a_committed_table_is_no_second_run(runs):
    committed(runs / "ppo", GOOD)
    for suffix in (".json", ".csv.gz"):
        (runs / "ppo" / f"best-s3{suffix}").symlink_to(f"default-s3{suffix}")
    assert [run.seed for run in data.find([runs])] == [1, 2, 3]


def test_runs_that_lie_elsewhere_are_found_by_their_links(runs, tmp_path):
    by_hand(tmp_path / "scratch" / "s3", 3)
    by_hand(tmp_path / "scratch" / "s4", 4)
    (runs / "elsewhere").symlink_to(tmp_path / "scratch")
    (tmp_path / "scratch" / "back").symlink_to(runs)
    assert [run.seed for run in data.find([runs])] == [1, 2, 3, 4]


def test_two_runs_of_one_seed_are_still_refused(runs, capsys):
    by_hand(runs / "copy", 2)
    with pytest.raises(SystemExit) as end:
        data.find([runs])
    assert end.value.code == 2
    assert "a second run of ppo on A-v0 with seed 2" in capsys.readouterr().err


def test_a_thousand_folders_in_each_other(runs):
    here = Path.cwd()
    try:
        os.chdir(runs)
        for _ in range(1200):
            Path("a").mkdir()
            os.chdir("a")
        os.chdir(here)
        assert [run.seed for run in data.find([runs])] == [1, 2]
    finally:
        os.chdir(here)
        subprocess.run(["rm", "-r", str(runs / "a")], check=True)  # shutil can't


WHOLE = {
    "CRLF": (HEAD + ROWS).replace("\n", "\r\n").encode(),
    "byte order mark": b"\xef\xbb\xbf" + (HEAD + ROWS).encode(),
    "torn": (HEAD + ROWS + "40,40,9").encode(),
    "torn with CRLF": (HEAD + ROWS).replace("\n", "\r\n").encode() + b"40,40,9,1\r",
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_table_with_odd_ends_has_all_its_whole_rows(kind, runs):
    (runs / "s2" / "episodes.csv").write_bytes(WHOLE[kind])
    first, second = data.find([runs])
    assert second.returns.tolist() == first.returns.tolist() == [7.0] * 39
    assert second.steps.tolist() == list(range(1, 40))


def test_a_run_that_diverged_costs_no_curve_and_no_warning(runs, tmp_path, capsys, recwarn):
    for k, value in enumerate(("nan", "inf", "-inf"), 3):
        by_hand(runs / f"s{k}", k)
        rows = ROWS.replace("20,20,7,1", f"20,20,{value},1")
        (runs / f"s{k}" / "episodes.csv").write_text(HEAD + rows)
    with contextlib.suppress(SystemExit):
        report([runs], tmp_path / "out")
    assert capsys.readouterr().err == "3 of 5 runs have no score, see the report\n"
    assert [str(warning.message) for warning in recwarn] == []
    assert (tmp_path / "out" / "curves_steps.png").stat().st_size > 5_000


def test_compare_names_what_it_can_not_read(runs, tmp_path, capsys):
    for seed in (1, 2):
        by_hand(tmp_path / "new" / f"s{seed}", seed)
    (runs / "bad").mkdir()
    os.mkfifo(runs / "bad" / "run.json")
    compare(runs, tmp_path / "new")
    assert f"A is without {runs / 'bad'}: no plain file" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        compare(tmp_path / "new", runs)
    assert end.value.code == 1
    told = capsys.readouterr()
    assert told.err.startswith("B lacks ") and f"{runs / 'bad'}: no plain file" in told.err
    assert "P(B > A) = 0.50" in told.out


@pytest.mark.parametrize("name", ["run.json", "episodes.csv"])
def test_files_cut_off_or_garbled_anywhere(name, runs):
    """Whatever bytes are there, the other run is read."""
    whole = (runs / "s2" / name).read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        at, content = draw.randrange(len(whole)), bytearray(whole)
        content[at] ^= 1 << draw.randrange(8)
        (runs / "s2" / name).write_bytes(content[: draw.randrange(at, len(whole) + 1)])
        found = data.find([runs])
        assert len(found) == 2
        assert any((run.status, run.seed) == ("finished", 1) for run in found)


SCALES = {
    "missing": None,
    "equal": "env_id,low,high\nA-v0,1,1\n",
    "words": "env_id,low,high\nA-v0,low,high\n",
    "nan": "env_id,low,high\nA-v0,nan,1\n",
    "columns": "name,from,to\nA-v0,0,1\n",
    "short": "env_id,low,high\nA-v0,1\n",
}


@pytest.mark.parametrize("kind", SCALES)
def test_a_table_of_scales_that_is_none_is_one_line(kind, runs, tmp_path, capsys):
    path = tmp_path / "scales.csv"
    if SCALES[kind] is not None:
        path.write_text(SCALES[kind])
    with pytest.raises(SystemExit) as end:
        report([runs], tmp_path / "out", scales=path)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"benchmark: --scales {path}: ") and said.count("\n") == 1
