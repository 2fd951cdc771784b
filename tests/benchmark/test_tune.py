"""benchmark tune: the search, and studies that are killed, shared or fail"""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import optuna
import pytest
from harness import TOY, background, digest, ended, lines, refused, table, told, wait_for
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from benchmark import data, programs
from benchmark.tune import Search, dimension, flag, tune

RUNS = Path("study/Toy-v0/toy")
FLAGS = {"search": ["x float -1 1"], "env_ids": ["Toy-v0"], "study": Path("study"), "num_seeds": 2}


@pytest.fixture(autouse=True)
def here(toy, monkeypatch, request):
    if "finds_the_best" not in request.node.name:  # grows forests
        plain = "get_param_importances"
        monkeypatch.setattr(optuna.importance, plain, lambda study: dict.fromkeys(["x"], 1.0))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def tuned(command: str = "python toy.py", **flags) -> subprocess.CompletedProcess:
    return ended(tune, command, **FLAGS | {"prune": False} | flags)


def begin(command: str, **flags) -> subprocess.Popen:
    """The same search in another process."""
    return background("tune", command=command, **FLAGS | {"no_prune": []} | flags)


def states() -> list[str]:
    return [row["state"] for row in table("study/trials.csv")]


def starts(trial: int) -> list[str]:
    """The seeds of its runs, and whether these were new, in order."""
    mine = [row for row in lines("starts.txt") if row[5].startswith(f"trial-{trial:04}-")]
    return [f"s{row[1]} {row[4]}" for row in mine]


def best_at(x: str) -> float:
    """The mean score of seeds 1 and 2 at this x."""
    return pytest.approx(101.5 - 100 * (float(x) - 0.3) ** 2)


def running(job: str) -> int:
    """The process of a run, once it is training."""
    path = RUNS / job / "run" / "run.json"
    wait_for(lambda: data.read_json(path).get("status") == "running")
    return told(path)["pid"]


def test_finds_the_best():
    flags = {"search": ["x float -1 1", "kind choice a b"], "trials": 24, "prune": True}
    said = tuned(**flags).stdout
    rows = table("study/trials.csv")
    assert [int(row["trial"]) for row in rows] == list(range(24))
    complete = [row for row in rows if row["state"] == "complete"]
    for row in complete:
        lost = 20 if row["kind"] == "b" else 0
        assert float(row["score"]) + lost == best_at(row["x"])
        assert row["score"] == row["Toy-v0"]
    best = max(complete, key=lambda row: float(row["score"]))
    assert abs(float(best["x"]) - 0.3) < 0.12
    assert best["kind"] == "a"
    assert f"\nbest: python toy.py --x={best['x']} --kind=a\n" in said
    assert "importance: x " in said
    pruned = [int(row["trial"]) for row in rows if row["state"] == "pruned"]
    assert pruned
    assert len(pruned) + len(complete) == 24
    assert all(starts(trial) == ["s1 new"] for trial in pruned)  # after the first seed
    later = [float(row["score"]) for row in complete if int(row["trial"]) >= 12]
    assert len([score for score in later if score > 80]) >= 0.8 * len(later)
    tuned(**flags)
    assert table("study/trials.csv") == rows
    other = {"command": "python toy.py", **FLAGS, **flags, "num_seeds": 3}
    refused("seeds was [1, 2]; give another folder", tune, **other)


@pytest.mark.parametrize("orphan", ["lives", "dies"])
def test_killed_in_mid_trial_and_gone_on(orphan):
    command = "python toy.py --tick 0.16"
    first = begin(command, trials=2)
    script = running("trial-0001-s2")
    first.kill()
    first.wait()
    if orphan == "dies":
        os.kill(script, signal.SIGKILL)
    tuned(command, trials=2)  # waits for one that lives
    assert states() == ["complete"] * 2
    begun = ["s1 new", "s2 new"]
    assert starts(0) == begun
    assert starts(1) == (begun if orphan == "lives" else [*begun, "s2 resumed"])
    row = table("study/trials.csv")[1]
    assert float(row["score"]) == best_at(row["x"])


def test_sigterm_leaves_a_study_that_continues():
    command = "python toy.py --tick 1"
    first = begin(command, trials=1)
    script = running("trial-0000-s1")
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 128 + signal.SIGTERM
    assert "the same command goes on" in Path("out.txt").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(script, 0)
    assert states() == ["running"]
    second = begin(command, trials=1)
    running("trial-0000-s2")
    for _ in range(2):  # as under uv; not yet "at once", which kills
        second.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert second.wait(20) == 128 + signal.SIGINT
    assert "Traceback" not in Path("out.txt").read_text()
    assert told(RUNS / "trial-0000-s2/run/checkpoint.pt")[1] > 0  # it was let save
    tuned(command, trials=1)
    assert starts(0) == [f"s{s} {how}" for s in (1, 2) for how in ("new", "resumed")]
    assert states() == ["complete"]
    for job in ("trial-0000-s1", "trial-0000-s2"):  # what each run began with, noted once
        assert (RUNS / job / "job.json").read_text().count(digest(TOY)) == 1


def test_two_processes_share_a_study():
    command = "python toy.py --tick 0.02"
    both = [begin(command, trials=9, workers=workers) for workers in (2, 1)]
    assert [process.wait(60) for process in both] == [0, 0]
    out = Path("out.txt").read_text()
    assert out.count("9 of 9 trials done, 0 of them pruned, 0 failed") == 2
    assert states() == ["complete"] * 9
    assert len({row["x"] for row in table("study/trials.csv")}) == 9  # one seed, yet none twice
    assert all(len(starts(trial)) == 2 for trial in range(9))
    assert sorted(re.findall(r"^trial (\d+):", out, re.MULTILINE)) == sorted("012345678")
    assert {row[6] for row in lines("starts.txt")} == {str(process.pid) for process in both}


def test_a_trial_that_another_process_ends_just_now_is_not_claimed(monkeypatch):
    space = dict([dimension("x float -1 1")])
    Path("study").mkdir()
    search = Search("python toy.py", space, {"Toy-v0": (0, 1)}, [1], 2, Path("study"), False, 0)
    study = search.study()
    other, theirs, _ = search.claim(study)
    theirs.close()

    def lock(path, **how):
        if path.name == "trial-0000.lock" and study.trials[0].state.name == "RUNNING":
            study.tell(other, 0.5)
        return programs.lock(path, **how)

    monkeypatch.setattr("benchmark.tune.lock", lock)
    assert search.claim(study) == (None, None, True)
    trial, held, _ = search.claim(study)
    assert trial.number == 1
    held.close()
    with programs.lock(Path("study/trial-0000.lock")):  # nobody keeps it
        pass


def test_failures_are_told_and_replaced():
    done = tuned("python toy.py --fail-above -9", trials=2, code=1)
    assert "0 of 2 trials done, 0 of them pruned, 2 failed" in done.stdout
    assert done.stderr.count("Toy-v0, seed 1: exit code 1: ") == 2
    assert done.stderr.count(" is too much; study/Toy-v0/toy/trial-") == 2
    assert states() == ["fail"] * 2
    again = {"command": "python toy.py --fail-above 0", "study": Path("other"), "trials": 6}
    tuned(**again, code=1)
    text = Path("other/trials.csv").read_text()
    failed = text.count(",fail,")
    assert 0 < failed < 6
    assert text.count(",complete,") == 6 - failed
    for _ in range(20):  # in the place of each that failed another, which may fail, too
        with contextlib.suppress(SystemExit):
            tune(**FLAGS | again | {"prune": False})
            break
    assert Path("other/trials.csv").read_text().count(",complete,") == 6


def test_score_is_scaled_and_averaged_over_environments():
    Path("scales.csv").write_text("# a comment\nenv_id,low,high\nA-v0,0,200\nB-v0,-100,100\n")
    tuned(env_ids=["A-v0", "B-v0"], trials=1, scales=Path("scales.csv"))
    (row,) = table("study/trials.csv")
    raw = 101.5 - 100 * (float(row["x"]) - 0.3) ** 2
    assert float(row["A-v0"]) == pytest.approx(raw / 200)
    assert float(row["B-v0"]) == pytest.approx((raw + 100) / 200)
    assert float(row["score"]) == pytest.approx((raw + 50) / 200)
    info = told("study/B-v0/toy/trial-0000-s2/run/run.json")
    assert info["args"]["env_id"] == "B-v0"


@pytest.mark.parametrize(
    "text, values",
    [
        ("--lr log 1e-5 1e-2", FloatDistribution(1e-5, 1e-2, log=True)),
        ("lr float -2 0", FloatDistribution(-2, 0)),
        ("lr int 2 10", IntDistribution(2, 10)),
        ("lr choice 64 128", CategoricalDistribution(["64", "128"])),
        ("lr flag", CategoricalDistribution([True, False])),
    ],
)
def test_what_is_searched(text, values):
    assert dimension(text) == ("lr", values)


def test_flags_of_every_kind():
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
        {"search": []}, {"search": ["x float 0 1", "x log 1 2"]}, {"trials": 0}, {"workers": 0},
        {"env_ids": ["Toy-v0", "Toy-v0"]}, {"env_ids": ["Toy-v0", "Toy-v1"]},  # without scales
        {"command": "python none.py"}, {"command": "python 'toy.py"},
        {"command": "python toy.py --seed 1"}, {"command": "python toy.py --x=1"},
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(wrong):
    refused("benchmark: --", tune, **({"command": "python toy.py"} | FLAGS | wrong))
    assert not Path("study").exists()


def test_a_journal_cut_off_goes_on():
    tuned(trials=3)
    scores = [row["score"] for row in table("study/trials.csv")]
    journal = Path("study/journal.log")
    whole = journal.read_bytes()
    for cut in range(1, len(whole), len(whole) // 8):  # as a full disk leaves it, at any byte
        journal.write_bytes(whole[:cut])
        tuned(trials=3)
        assert states() == ["complete"] * 3
        assert "" not in [row["score"] for row in table("study/trials.csv")]
        assert all(line.endswith(b"}\n") for line in journal.read_bytes().splitlines(True))
    Path("starts.txt").unlink()
    journal.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 5])  # the last trial's end is lost
    tuned(trials=3)
    assert lines("starts.txt") == []  # its runs are not: nothing is trained again
    assert [row["score"] for row in table("study/trials.csv")] == scores


@pytest.mark.timeout(120)
@pytest.mark.parametrize("damage", ["garbled", "pipe"])
def test_a_journal_that_is_none_is_told(damage):
    journal = Path("study/journal.log")
    if damage == "pipe":
        journal.parent.mkdir()
        os.mkfifo(journal)
        said = ""
    else:
        tuned(trials=1)
        whole = journal.read_bytes()
        middle = len(whole) // 2
        journal.write_bytes(whole[:middle] + b"\xff{\n" + whole[middle:])
        said = "journal.log is damaged ("
    refused(f"--study study: {said}", tune, "python toy.py", **FLAGS, trials=1)


@pytest.mark.parametrize("content", ['{"starts": 5}', '{"done": "yes"}', "[" * 200_000, ""])
def test_a_spoilt_job_of_a_trial_costs_no_table(content):
    tuned(trials=2)
    scores = [row["score"] for row in table("study/trials.csv")]
    (RUNS / "trial-0000-s1/job.json").write_text(content)
    tuned(trials=2)
    rows = table("study/trials.csv")
    assert [row["score"] for row in rows] == scores
    assert rows[0]["trial"] == "0"


@pytest.mark.parametrize("link", [True, False])
def test_what_lies_where_a_trial_begins_goes_but_not_what_it_leads_to(link):
    precious = Path("precious").absolute()
    precious.mkdir()
    (precious / "file").write_text("precious")
    RUNS.mkdir(parents=True)
    if link:
        (RUNS / "trial-0000-s1").symlink_to(precious)
    else:
        (RUNS / "trial-0000-s1").write_text("in the way")
    tuned(trials=1)
    assert states() == ["complete"]
    assert [path.name for path in precious.iterdir()] == ["file"]
