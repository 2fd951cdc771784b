"""benchmark tune: the search, and studies that are killed, shared or fail"""

import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark import data
from benchmark.tune import dimension, flag, tune

ROOT = Path(__file__).resolve().parent.parent.parent
# Its return is highest, 100 + seed, at x = 0.3 and kind a. It notes every start in starts.txt.
FAKE = """
import argparse, json, math, os, signal, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--kind", default="a")
parser.add_argument("--env-id")
parser.add_argument("--seed", type=int)
parser.add_argument("--sleep", type=float, default=0)
parser.add_argument("--fail-above", type=float, default=math.inf)
parser.add_argument("--run-dir", type=Path)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()
if args.resume:  # with its own arguments
    args.__dict__ |= json.loads((args.resume / "run.json").read_text())["own"]
folder = args.resume or args.run_dir
folder.mkdir(exist_ok=True)
with open(folder.parent.parent / "starts.txt", "a") as file:
    file.write(f"{folder.parent.name} {'resumed' if args.resume else 'new'}\\n")

def stop(*args):
    time.sleep(0.3)
    (folder / "saved").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
info = {"script": "fake.py", "seed": args.seed, "args": {"env_id": args.env_id}}
info["own"] = {"x": args.x, "kind": args.kind, "seed": args.seed, "sleep": args.sleep}
(folder / "run.json").write_text(json.dumps(info | {"status": "running", "pid": os.getpid()}))
(folder / "checkpoint.pt").touch()
if args.x > args.fail_above:
    sys.exit(f"{args.x} is too much")
time.sleep(0 if args.resume else args.sleep)
score = 100 - 100 * (args.x - 0.3) ** 2 - 20 * (args.kind == "b") + args.seed
rows = "".join(f"{i},1,{score if i > 50 else 0},1\\n" for i in range(151))
(folder / "episodes.csv").write_text("global_step,seconds,return,length\\n" + rows)
(folder / "run.json").write_text(json.dumps(info | {"status": "finished"}))
"""
SETUP = {"search": ["x float -1 1"], "env_ids": ["Toy-v0"], "study": Path("study"), "num_seeds": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, request):
    import optuna

    if "finds_the_best" not in request.node.name:  # grows forests
        plain = "get_param_importances"
        monkeypatch.setattr(optuna.importance, plain, lambda study: dict.fromkeys(["x"], 1.0))
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def rows() -> list[dict]:
    with open("study/trials.csv") as file:
        return list(csv.DictReader(file))


def starts(trial: int) -> list[str]:
    """The seeds of its runs, and whether these were new, in order."""
    lines = Path("study/Toy-v0/fake/starts.txt").read_text().splitlines()
    return re.findall(rf"trial-{trial:04}-(.*)", "\n".join(lines))


def start(*flags: str) -> subprocess.Popen:
    """The same search in another process."""
    code = "import tyro; from benchmark.tune import tune; tyro.cli(tune)"
    command = [sys.executable, "-c", code, "--search", "x float -1 1", "--env-ids", "Toy-v0"]
    command += ["--study", "study", "--num-seeds", "2", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def running(path: str) -> dict:
    """run.json of a run, once it is training."""
    for _ in range(600):
        info = data.read_json(Path(path))
        if info.get("status") == "running":
            return info
        time.sleep(0.05)
    raise AssertionError(f"{path}: not there in 30 s")


def test_finds_the_best(capsys):
    search = ["x float -1 1", "kind choice a b"]
    tune("python fake.py", search, ["Toy-v0"], num_seeds=2, trials=24, study=Path("study"))
    told, table = capsys.readouterr().out, rows()
    assert [int(row["trial"]) for row in table] == list(range(24))
    complete = [row for row in table if row["state"] == "complete"]
    for row in complete:
        score = 100 - 100 * (float(row["x"]) - 0.3) ** 2 - 20 * (row["kind"] == "b") + 1.5
        assert float(row["score"]) == float(row["Toy-v0"]) == pytest.approx(score)
    best = max(complete, key=lambda row: float(row["score"]))
    assert abs(float(best["x"]) - 0.3) < 0.12
    assert best["kind"] == "a"
    assert f"\nbest: python fake.py --x={best['x']} --kind=a\n" in told
    assert "importance: x " in told
    pruned = [int(row["trial"]) for row in table if row["state"] == "pruned"]
    assert pruned
    assert len(pruned) + len(complete) == 24
    assert all(starts(trial) == ["s1 new"] for trial in pruned)  # after the first seed
    later = [float(row["score"]) for row in complete if int(row["trial"]) >= 12]
    assert sum(score > 80 for score in later) >= 0.8 * len(later)
    tune("python fake.py", search, ["Toy-v0"], num_seeds=2, trials=24, study=Path("study"))
    assert rows() == table
    with pytest.raises(SystemExit) as end:
        tune("python fake.py", search, ["Toy-v0"], num_seeds=3, trials=24, study=Path("study"))
    assert end.value.code == 2
    assert "seeds was [1, 2]; give another folder" in capsys.readouterr().err


@pytest.mark.parametrize("orphan", ["lives", "dies"])
def test_killed_in_mid_trial_and_gone_on(orphan):
    flags = "--command", "python fake.py --sleep 0.8", "--trials", "2", "--no-prune"
    first = start(*flags)
    script = running("study/Toy-v0/fake/trial-0001-s2/run/run.json")["pid"]
    first.kill()
    first.wait()
    if orphan == "dies":
        os.kill(script, signal.SIGKILL)
    tune("python fake.py --sleep 0.8", **SETUP, trials=2, prune=False)  # waits for one that lives
    assert [row["state"] for row in rows()] == ["complete"] * 2
    begun = ["s1 new", "s2 new"]
    assert starts(0) == begun
    assert starts(1) == begun + ["s2 resumed"] * (orphan == "dies")
    score = 101.5 - 100 * (float(rows()[1]["x"]) - 0.3) ** 2
    assert float(rows()[1]["score"]) == pytest.approx(score)


def test_sigterm_leaves_a_study_that_continues():
    flags = "--command", "python fake.py --sleep 30", "--trials", "1"
    first = start(*flags)
    script = running("study/Toy-v0/fake/trial-0000-s1/run/run.json")["pid"]
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=20)
    assert first.returncode == 128 + signal.SIGTERM
    assert "the same command goes on" in out
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(script, 0)
    assert rows()[0]["state"] == "running"
    second = start(*flags)
    running("study/Toy-v0/fake/trial-0000-s2/run/run.json")
    for _ in range(2):  # as under uv; not yet "at once", which kills
        second.send_signal(signal.SIGINT)
        time.sleep(0.02)
    second.communicate(timeout=20)
    assert second.returncode == 128 + signal.SIGINT
    assert Path("study/Toy-v0/fake/trial-0000-s2/run/saved").exists()
    tune("python fake.py --sleep 30", **SETUP, trials=1)
    assert starts(0) == [f"s{s} {how}" for s in (1, 2) for how in ("new", "resumed")]
    assert [row["state"] for row in rows()] == ["complete"]
    digest = hashlib.sha256(FAKE.encode()).hexdigest()  # of what each run began with, noted once
    for job in ("trial-0000-s1", "trial-0000-s2"):
        assert Path(f"study/Toy-v0/fake/{job}/job.json").read_text().count(digest) == 1


def test_two_processes_share_a_study():
    flags = "--command", "python fake.py --sleep 0.1", "--trials", "9", "--no-prune"
    both = [start(*flags, "--workers", "2"), start(*flags)]
    told = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all("9 of 9 trials done, 0 of them pruned, 0 failed" in out for out in told)
    assert [row["state"] for row in rows()] == ["complete"] * 9
    assert len({row["x"] for row in rows()}) == 9  # one seed of the search, yet none twice
    assert all(len(starts(trial)) == 2 for trial in range(9))
    mine = [re.findall(r"^trial (\d+):", out, re.MULTILINE) for out in told]
    assert sorted(mine[0] + mine[1]) == sorted("012345678")
    assert all(mine)


def test_failures_are_told_and_replaced(capfd):
    with pytest.raises(SystemExit) as end:
        tune("python fake.py --fail-above -9", **SETUP, trials=2)
    assert end.value.code == 1
    told = capfd.readouterr()
    assert "0 of 2 trials done, 0 of them pruned, 2 failed" in told.out
    assert told.err.count("Toy-v0, seed 1: exit code 1: ") == 2
    assert told.err.count(" is too much; study/Toy-v0/fake/trial-") == 2
    assert [row["state"] for row in rows()] == ["fail"] * 2
    again = SETUP | {"study": Path("other")}
    with pytest.raises(SystemExit) as end:
        tune("python fake.py --fail-above 0", **again, trials=6, prune=False)
    assert end.value.code == 1
    table = Path("other/trials.csv").read_text()
    failed = table.count(",fail,")
    assert 0 < failed < 6
    assert table.count(",complete,") == 6 - failed
    for _ in range(20):
        try:
            tune("python fake.py --fail-above 0", **again, trials=6, prune=False)
        except SystemExit as end:
            assert end.code == 1
        else:
            break
    assert Path("other/trials.csv").read_text().count(",complete,") == 6


def test_score_is_scaled_and_averaged_over_environments():
    Path("scales.csv").write_text("# a comment\nenv_id,low,high\nA-v0,0,200\nB-v0,-100,100\n")
    study = {"num_seeds": 2, "trials": 1, "study": Path("study"), "scales": Path("scales.csv")}
    tune("python fake.py", ["x float -1 1"], ["A-v0", "B-v0"], **study)
    (row,) = rows()
    raw = 101.5 - 100 * (float(row["x"]) - 0.3) ** 2
    assert float(row["A-v0"]) == pytest.approx(raw / 200)
    assert float(row["B-v0"]) == pytest.approx((raw + 100) / 200)
    assert float(row["score"]) == pytest.approx((raw + 50) / 200)
    info = json.loads(Path("study/B-v0/fake/trial-0000-s2/run/run.json").read_text())
    assert info["args"]["env_id"] == "B-v0"


def test_flags_of_every_kind():
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    kinds = {
        "--lr log 1e-5 1e-2": FloatDistribution(1e-5, 1e-2, log=True),
        "lr float -2 0": FloatDistribution(-2, 0),
        "lr int 2 10": IntDistribution(2, 10),
        "lr choice 64 128": CategoricalDistribution(["64", "128"]),
        "lr flag": CategoricalDistribution([True, False]),
    }
    for text, values in kinds.items():
        assert dimension(text) == ("lr", values)
    assert flag("lr", 1.5e-4) == "--lr=0.00015"
    assert flag("logvar", -1e-5) == "--logvar=-1e-05"  # no flag called -1e-05
    assert flag("anneal-lr", True) == "--anneal-lr"
    assert flag("anneal-lr", False) == "--no-anneal-lr"


@pytest.mark.parametrize(
    "wrong",
    [
        {"search": [text]} for text in (
            "", "x", "x float 1", "x float 1 0", "x float nan 1", "x float 0 inf", "x log 0 1",
            "x int 1.5 2", "x choice 1", "x choice 1 1", "x flag 1", "x between 0 1",
        )
    ] + [
        {"search": []},
        {"search": ["x float 0 1", "x log 1 2"]},
        {"env_ids": ["Toy-v0", "Toy-v0"]},
        {"env_ids": ["Toy-v0", "Toy-v1"]},  # without scales
        {"command": "python none.py"},
        {"command": "python 'fake.py"},
        {"command": "python fake.py --seed 1"},
        {"command": "python fake.py --x=1"},
        {"trials": 0},
        {"workers": 0},
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(wrong, capsys):
    with pytest.raises(SystemExit) as end:
        tune(**({"command": "python fake.py"} | SETUP | wrong))
    assert end.value.code == 2
    told = capsys.readouterr()
    assert told.err.startswith("benchmark: --")
    assert told.err.count("\n") == 1
    assert not Path("study").exists()


def test_a_journal_cut_off_goes_on_and_a_damaged_one_is_told(capsys):
    tune("python fake.py", **SETUP, trials=3, prune=False)
    before, journal = rows(), Path("study/journal.log")
    whole = journal.read_bytes()
    for cut in range(1, len(whole), len(whole) // 8):  # as a full disk leaves it, at any byte
        journal.write_bytes(whole[:cut])
        tune("python fake.py", **SETUP, trials=3, prune=False)
        table = rows()
        assert [row["state"] for row in table] == ["complete"] * 3
        assert [row["score"] for row in table] != [""] * 3
        assert all(line.endswith(b"}\n") for line in journal.read_bytes().splitlines(True))
    journal.write_bytes(whole[:-7])  # the last trial's end is lost, its runs are not
    Path("study/Toy-v0/fake/starts.txt").write_text("")
    journal.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 5])
    tune("python fake.py", **SETUP, trials=3, prune=False)
    assert [len(starts(trial)) for trial in range(3)] == [0, 0, 0]  # nothing is trained again
    capsys.readouterr()
    journal.write_bytes(whole[: len(whole) // 2] + b"\xff{\n" + whole[len(whole) // 2 :])
    with pytest.raises(SystemExit) as end:
        tune("python fake.py", **SETUP, trials=3)
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("benchmark: --study study: journal.log is damaged (")
    assert told.count("\n") == 1 and before


@pytest.mark.timeout(120)
def test_a_journal_that_is_no_file_is_told(capsys):
    Path("study").mkdir()
    os.mkfifo("study/journal.log")
    with pytest.raises(SystemExit) as end:
        tune("python fake.py", **SETUP, trials=1)
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("benchmark: --study study: ") and told.count("\n") == 1


def damage(path: Path, content: str):
    """A file of a trial, with something else in it."""
    path.unlink()
    path.write_text(content)


@pytest.mark.parametrize("content", ['{"starts": 5}', '{"done": "yes"}', "[" * 200_000, ""])
def test_a_spoilt_job_of_a_trial_costs_no_table(content):
    tune("python fake.py", **SETUP, trials=2, prune=False)
    scores = [row["score"] for row in rows()]
    damage(Path("study/Toy-v0/fake/trial-0000-s1/job.json"), content)
    tune("python fake.py", **SETUP, trials=2, prune=False)
    assert [row["score"] for row in rows()] == scores
    assert rows()[0]["trial"] == "0"


@pytest.mark.parametrize("link", [True, False])
def test_what_lies_where_a_trial_begins_goes_but_not_what_it_leads_to(link, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    Path("study/Toy-v0/fake").mkdir(parents=True)
    place = Path("study/Toy-v0/fake/trial-0000-s1")
    if link:
        place.symlink_to(tmp_path / "precious")
    else:
        place.write_text("in the way")
    tune("python fake.py", **SETUP, trials=1, prune=False)
    assert [row["state"] for row in rows()] == ["complete"]
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["file"]
