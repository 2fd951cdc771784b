"""benchmark tune: the search, and studies that are stopped, killed, shared or fail"""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from harness import background, ended, lines, refused, table, told, wait_for

from benchmark import data
from benchmark.tune import dimension, flag, tune

RUNS = Path("study/Toy-v0/toy")
FLAGS = {"search": ["x float -1 1"], "env_ids": ["Toy-v0"], "study": Path("study"), "num_seeds": 2}


pytestmark = pytest.mark.usefixtures("toy")


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
    output = tuned(**flags).stdout
    rows = table("study/trials.csv")
    assert [int(row["trial"]) for row in rows] == list(range(24))
    complete = [row for row in rows if row["state"] == "complete"]
    for row in complete:
        lost = 20 if row["kind"] == "b" else 0
        assert float(row["score"]) + lost == best_at(row["x"])
    best = max(complete, key=lambda row: float(row["score"]))
    assert abs(float(best["x"]) - 0.3) < 0.12
    assert best["kind"] == "a"
    assert f"by python toy.py --x={best['x']} --kind=a\n" in output
    assert "a score is the mean return of a run's last 100 training episodes\n" in output
    assert "(24 of 24 done)" in output
    pruned = [int(row["trial"]) for row in rows if row["state"] == "pruned"]
    assert pruned and len(pruned) + len(complete) == 24
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


@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_leaves_a_study_that_continues(workers):
    command = "python toy.py --tick 0.3"
    first = begin(command, trials=2, workers=workers)
    running("trial-0000-s1")
    for _ in range(2):  # as under uv
        first.send_signal(signal.SIGINT)
    assert first.wait(20) == 128 + signal.SIGINT
    assert "the same command goes on" in Path("out.txt").read_text()
    assert "Traceback" not in Path("out.txt").read_text()
    tuned(command, trials=2)
    assert starts(0) == ["s1 new", "s1 resumed", "s2 new"]
    assert states() == ["complete"] * 2


def test_two_processes_share_a_study():
    command = "python toy.py --tick 0.02"
    both = [begin(command, trials=9, workers=workers) for workers in (2, 1)]
    assert [process.wait(60) for process in both] == [0, 0], Path("out.txt").read_text()
    assert set(states()) == {"complete"}
    assert len(states()) in (9, 10, 11)  # those that are begun at the same moment may be too many
    assert len({row["x"] for row in table("study/trials.csv")}) == len(states())  # none twice
    assert {row[6] for row in lines("starts.txt")} == {str(process.pid) for process in both}


def test_failures_are_told_and_replaced():
    done = tuned("python toy.py --fail-above -9", trials=2, code=1)
    assert "0 of 2 trials done, 2 failed" in done.stdout
    assert re.search(r"trial 0 \(0 of 2 done\): failed: exit code 1: ", done.stdout)
    assert states() == ["fail"] * 2
    again = {"command": "python toy.py --fail-above 0", "study": Path("other"), "trials": 4}
    with contextlib.suppress(AssertionError):  # when it ends with 0
        for _ in range(20):  # in the place of each that failed another, which may fail, too
            tuned(**again, code=1)
    text = Path("other/trials.csv").read_text()
    assert text.count(",complete,") == 4
    assert text.count(",fail,") > 0


def test_score_is_scaled_and_averaged_over_environments():
    Path("scales.csv").write_text("# a comment\nenv_id,low,high\nA-v0,0,200\nB-v0,-100,100\n")
    tuned(env_ids=["A-v0", "B-v0"], trials=1, scales=Path("scales.csv"))
    (row,) = table("study/trials.csv")
    raw = 101.5 - 100 * (float(row["x"]) - 0.3) ** 2
    assert float(row["A-v0"]) == pytest.approx(raw / 200)
    assert float(row["B-v0"]) == pytest.approx((raw + 100) / 200)
    assert float(row["score"]) == pytest.approx((raw + 50) / 200)


def test_flags_of_every_kind():
    assert flag("logvar", -1e-5) == "--logvar=-1e-05"  # one word: no flag called -1e-05
    assert [flag("anneal-lr", on) for on in (True, False)] == ["--anneal-lr", "--no-anneal-lr"]
    kinds = {"log 1e-5 1e-2": "Float", "int 2 10": "Int", "choice 4 8": "Categorical", "flag": "C"}
    for text, kind in kinds.items():
        name, values = dimension(f"--lr {text}")
        assert (name, type(values).__name__.startswith(kind)) == ("lr", True)


def test_wrong_input_is_one_line():
    searches = ("", "x float 1 0", "x float 0 inf", "x log 0 1", "x int 1.5 2", "x choice 1 1")
    wrongs = [{"search": [text]} for text in searches]
    wrongs += [{"search": ["x float 0 1", "x log 1 2"]}, {"trials": 0}]
    wrongs += [{"env_ids": ["Toy-v0", "Toy-v1"]}, {"command": "python toy.py --x=1"}]
    for wrong in wrongs:
        refused("benchmark: --", tune, **({"command": "python toy.py"} | FLAGS | wrong))
    assert not Path("study").exists()
