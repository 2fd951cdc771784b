"""`python -m benchmark run` with a toy script; slow: with real ones and on Slurm."""

import fcntl
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import harness
import pytest
from harness import HEAD, TOY, digest, lines, refused, told, wait_for
from program import ROOT, rows

from benchmark import data, programs
from benchmark.programs import provenance, write_json
from benchmark.report import run_row
from benchmark.run import Local, Slurm, Work, gpus_here, plan

CORES = len(os.sched_getaffinity(0))
FIVE = "python toy.py --total-timesteps 5"


def asked(command: str, flags: dict) -> dict:
    given = {"command": command, "env_ids": ["A-v0"], "num_seeds": 2, "runs_dir": "runs"}
    return given | flags


def bench(command: str = FIVE, code: int = 0, **flags) -> subprocess.CompletedProcess:
    return harness.bench("run", code, **asked(command, flags))


def background(command: str, **flags) -> subprocess.Popen:
    return harness.background("run", **asked(command, flags))


def folder_of(seed: int, env_id: str = "A-v0") -> Path:
    return Path("runs") / env_id / "toy" / f"default-s{seed}"


def starts_of(seed: int) -> list[dict]:
    """As job.json has them."""
    return told(folder_of(seed) / "job.json")["starts"]


def jobs_of(seeds: int, command: str = FIVE, env_id: str = "A-v0") -> list[Work]:
    return plan([env_id], command, range(1, seeds + 1), Path("runs"), "default", 0)


def played(seed: int, episodes: int = 20) -> list[float]:
    """The toy's returns of its final policy."""
    return [pytest.approx((seed + 0.123) * (k + 1) * 1.11, abs=0.006) for k in range(episodes)]


def check_whole(seeds: list[int], total: int):
    """Each run complete, exactly once."""
    assert sorted(lines("ends.txt")) == [["A-v0", str(seed)] for seed in seeds]
    for seed in seeds:
        steps = [row[0] for row in rows(folder_of(seed) / "run")[1:]]
        assert steps == [str(k) for k in range(1, total + 1)]
        begun = [int(row[2]) for row in lines("starts.txt") if row[1] == str(seed)]
        assert begun == sorted(begun)  # went on, never back


def test_every_environment_with_every_seed_once(toy):
    two = {"env_ids": ["A-v0", "dir/B-v1"], "start_seed": 4, "workers": 3}
    done = bench(**two, num_seeds=3, results="kept")
    assert done.stderr == ""
    assert "6 of 6 jobs done, 0 failed" in done.stdout
    assert "A-v0/toy/default-s5: done; training 15.1, evaluation 59.7" in done.stdout
    wanted = [(env_id, seed) for env_id in ("A-v0", "dir/B-v1") for seed in (4, 5, 6)]
    found = data.find([Path("runs")])
    assert [(run.env_id, run.seed, run.status) for run in found] == [
        (*place, "finished") for place in wanted
    ]
    assert len(lines("ends.txt")) == 6
    again = bench(**two, num_seeds=4)
    assert "8 jobs in runs, 6 done before" in again.stdout
    assert len(lines("starts.txt")) == len(lines("ends.txt")) == 8

    kept = data.find([Path("kept")])
    assert [(run.env_id, run.algorithm, run.seed) for run in kept] == [
        (env_id, "toy", seed) for env_id, seed in wanted
    ]
    assert kept[1].returns.tolist() == [5.12, 10.12, 15.12, 20.12, 25.12]
    assert kept[1].evaluation.tolist() == played(5)
    assert kept[1].info["command"] == f"{FIVE} --env-id A-v0 --seed 5 --run-dir RUN"
    assert kept[1].score("training") == pytest.approx(15.12)
    assert kept[1].score("training", games=2) == pytest.approx(22.62)


def test_killed_harness_and_killed_job(toy):
    """SIGKILL of the harness and of a job; the command given again."""
    command = "python toy.py --total-timesteps 15 --tick 0.1"
    first_harness = background(command, num_seeds=4, workers=2)
    wait_for(lambda: len(lines("starts.txt")) == 2)
    first_harness.kill()
    first_harness.wait()
    first, second = (int(row[3]) for row in lines("starts.txt"))
    time.sleep(0.3)
    os.kill(first, signal.SIGKILL)  # the other trains on without a harness
    done = bench(command, num_seeds=4, workers=2)
    assert "runs already" in done.stdout
    check_whole([1, 2, 3, 4], 15)
    assert len(lines("starts.txt")) == 5
    assert len([row for row in lines("starts.txt") if row[4] == "resumed"]) == 1
    wait_for(lambda: not Path(f"/proc/{second}").exists())  # its table is whole before it has ended


def test_job_killed_under_a_living_harness_is_tried_again(toy):
    running = background("python toy.py --total-timesteps 8 --tick 0.2", num_seeds=1)
    wait_for(lambda: lines("starts.txt"))
    time.sleep(0.6)
    os.kill(int(lines("starts.txt")[0][3]), signal.SIGKILL)
    assert running.wait(60) == 0
    assert "killed by SIGKILL" in Path("out.txt").read_text()
    check_whole([1], 8)
    assert len(lines("starts.txt")) == 2


@pytest.mark.parametrize(
    ("number", "ignored"),
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["Ctrl-C", "Ctrl-C, started with &", "SIGTERM"],
)
def test_a_signal_leaves_resumable_runs(toy, number, ignored):
    command = "python toy.py --total-timesteps 30 --tick 0.1"
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    running = background(command, workers=2)
    signal.signal(signal.SIGINT, handler)
    wait_for(lambda: len(lines("starts.txt")) == 2)
    time.sleep(0.5)
    for _ in range(2):  # as under uv
        running.send_signal(number)
        time.sleep(0.1)
    assert running.wait(30) == 128 + number
    assert "Traceback" not in Path("out.txt").read_text()
    assert "the same command goes on" in Path("out.txt").read_text()
    assert not any(programs.locked(folder_of(seed)) for seed in (1, 2))
    assert not Path("ends.txt").exists()
    cut = data.find([Path("runs")])
    assert [run.status for run in cut] == ["running"] * 2
    assert all(0 < len(run.steps) < 30 for run in cut)
    bench(command, workers=2)
    check_whole([1, 2], 30)


def test_failing_seed(toy):
    command = f"{FIVE} --bad-seed 2"
    done = bench(command, num_seeds=3, retries=1, code=1)
    assert "2 of 3 jobs done, 1 failed" in done.stdout
    assert "default-s2 failed: exit code 1: the loss is not finite" in done.stdout
    assert "  | the loss is not finite" in done.stdout
    starts = [row[2] for row in lines("starts.txt") if row[1] == "2"]
    assert starts == ["0", "2"]  # anew, then from the checkpoint
    failed = data.find([Path("runs")])[1]
    assert (failed.status, failed.reason) == ("failed", "exit code 1: the loss is not finite")
    bench(command, num_seeds=3, retries=0, code=1)
    assert len(lines("starts.txt")) == 2 + 2 + 1  # only the failed one was tried


@pytest.mark.parametrize("code, tries", [(2, 1), (255, 3)])
def test_wrong_arguments_alone_are_not_tried_again(toy, code, tries):
    Path("picky.py").write_text(f"print('no such game'); raise SystemExit({code})")
    done = bench("python picky.py", num_seeds=1, code=1)
    assert f"failed: exit code {code}: no such game" in done.stdout
    log = Path("runs/A-v0/picky/default-s1/log.txt").read_text()
    assert log.count("no such game") == tries


def test_what_a_frame_says_is_the_reason(toy):
    frame = "╭─ Value error ─╮\n│ --seed -1: not in │\n│ 0 ... 9 │\n│ ──── │\n│ help │\n╰────╯\n"
    for text, word in (
        ("", ""),
        ("one\n two \n\n", "two"),
        (frame, "--seed -1: not in 0 ... 9"),
        ("│ the top is cut off │\n╰────╯", "the top is cut off"),
    ):
        Path("log.txt").write_text(text)
        assert programs.last_word(Path("log.txt")) == word
    main = "def main(env_id: str, seed: int, run_dir: str, total: int): ..."
    Path("tyro_like.py").write_text(f"import tyro\n{main}\ntyro.cli(main)\n")
    done = bench("python tyro_like.py --total many", num_seeds=1, code=1)
    assert "failed: exit code 2: Error parsing --total" in done.stdout.replace("INT: ", "")


def test_dry_run(toy):
    done = bench(dry_run=[], variant="fast")
    assert done.stdout.splitlines() == [
        f"{FIVE} --env-id A-v0 --seed {seed} --run-dir runs/A-v0/toy/fast-s{seed}/run"
        for seed in (1, 2)
    ]
    assert list(toy.iterdir()) == [toy / "toy.py"]


# --- programs that are not ours -------------------------------------------------------------------


def stranger(info: str, head: str = repr(HEAD)):
    """Writes other.py; what its run.json says is an expression of `name` and `seed`."""
    Path("other.py").write_text(
        "import json, os, sys\n*name, seed, out = sys.argv[1:]\nos.makedirs(out)\n"
        f"open(f'{{out}}/episodes.csv', 'w').write({head} + '9,1,7,9\\n')\n"
        f"json.dump({info}, open(f'{{out}}/run.json', 'w'))\n"
    )


def test_only_what_says_finished_and_can_be_read_is_done(toy):
    head = f"({HEAD!r} if seed != '2' else 'step,score\\n')"
    stranger("{'status': 'running' if seed == '1' else 'finished'}", head)
    done = bench("python other.py {seed} {run_dir}", num_seeds=3, workers=2, retries=0, code=1)
    assert "1 of 3 jobs done, 2 failed" in done.stdout
    assert "s1/run/run.json does not say that it is finished" in done.stdout
    assert "s2: failed; not a table of episodes: the columns are step,score" in done.stdout
    done = bench("python other.py 1 {run_dir}", num_seeds=3, code=2)
    assert "{seed} is missing" in done.stderr


def test_a_program_that_is_not_ours_and_what_it_says_of_itself(toy):
    stranger(
        "{'args': {'env_id': name[0]}, 'seed': int(seed), 'status': 'finished', "
        "'git_commit': 'mine', 'hardware': 'a TPU', 'versions': {'jax': '1', 'torch': 'own'}}"
    )
    done = bench("python other.py {env_id} {seed} {run_dir}", num_seeds=1, results="kept")
    assert "A-v0/other/default-s1: done; training 7.0" in done.stdout
    for folder in ("runs", "kept"):
        (run,) = data.find([Path(folder)])
        assert (run.info["git_commit"], run.info["hardware"]) == ("mine", "a TPU")
        assert run.info["versions"] | {"jax": "1", "torch": "own"} == run.info["versions"]
        assert run.info["versions"]["numpy"] == metadata.version("numpy")
        assert run.info["source_sha256"] == digest(Path("other.py").read_text())
        assert (run_row(run)["commit"], run_row(run)["cpu"]) == ("mine", "a TPU")


# --- what a run began with ------------------------------------------------------------------------


def commit_all() -> str:
    for git in (["init", "-q"], ["add", "toy.py"], ["commit", "-q", "-m", "Toy"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *git], check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()


def test_what_a_run_began_with_is_recorded(toy):
    """Of a script in a repository, whatever folder the harness is called from and imported from."""
    commit = commit_all()
    Path(".git/info/exclude").write_text("*\n")
    bench(num_seeds=1)
    Path("toy.py").write_text(f"{TOY}\n# changed")
    bench(num_seeds=2, results="kept")
    (first,), (second,) = starts_of(1), starts_of(2)
    assert (first["git_commit"], first["git_dirty"]) == (commit, False)
    assert (second["git_commit"], second["git_dirty"]) == (commit, True)
    assert first["source_sha256"] == digest(TOY)
    assert second["source_sha256"] == digest(f"{TOY}\n# changed")
    assert first["hardware"]["cores"] == os.cpu_count()
    assert first["versions"]["python"] == platform.python_version()
    assert first["versions"]["torch"] == metadata.version("torch")
    assert first["processes"] == 1
    for folder in ("runs", "kept"):  # a report reads them under the names they always had
        for run, start in zip(data.find([Path(folder)]), (first, second), strict=True):
            assert {name: run.info[name] for name in start} == start
            assert "resumed_with" not in run.info
            assert run_row(run)["commit"] == commit
            assert run_row(run)["cpu"] == start["hardware"]["cpu"]


def test_a_resumed_run_says_if_it_went_on_with_another_source(toy):
    command = f"{FIVE} --bad-seed 1"
    sources = [TOY, f"{TOY}\n# a comment", f"{TOY}\nimport os"]
    for k in (0, 1, 1, 2, 2):
        Path("toy.py").write_text(sources[k])
        bench(command, num_seeds=1, retries=0, code=1)
    sources.append(TOY.replace("args.bad_seed", "None"))
    Path("toy.py").write_text(sources[-1])
    bench(command, num_seeds=1, results="kept")
    starts = starts_of(1)
    assert [start["source_sha256"] for start in starts] == [digest(text) for text in sources]
    for folder in ("runs", "kept"):
        (run,) = data.find([Path(folder)])
        assert run.info["source_sha256"] == digest(TOY)
        assert run.info["resumed_with"] == starts[1:]
    shutil.rmtree(folder_of(1) / "run")
    write_json(folder_of(1) / "job.json", Work(folder_of(1), None).read() | {"done": False})
    bench(command, num_seeds=1)
    assert len(starts_of(1)) == 1  # begun anew: so is the list


def test_versions_are_those_of_the_first_start():
    """run.json is written anew when a run goes on, perhaps on another machine: it has the last."""
    starts = [{"versions": {"python": "3", "torch": torch}} for torch in ("2.11", "2.13")]
    info = {"versions": {"torch": "2.13", "jax": "1"}}
    found = data.told(info, {"starts": starts})
    assert found["versions"] == {"python": "3", "torch": "2.11", "jax": "1"}
    assert found["resumed_with"] == starts[1:]
    assert info == {"versions": {"torch": "2.13", "jax": "1"}}


TORCHRUN = ["python", "-m", "torch.distributed.run"]


@pytest.mark.parametrize(
    "words, processes",
    [
        (["python", "toy.py", "--nproc-per-node=9"], 1),  # the script's own
        ([*TORCHRUN, "--standalone", "--nproc-per-node=2", "toy.py"], 2),
        ([*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "4", "toy.py"], 8),
        ([*TORCHRUN, "--nproc-per-node=gpu", "toy.py"], None),
        (["uv", "run", "toy.py"], 1),
    ],
)
def test_processes_and_versions_of_a_command(toy, words, processes):
    found = provenance(programs.executable(words))
    assert found["processes"] == processes
    assert bool(found["versions"]) == (words[0] == "python")  # uv's Python may have others
    assert found["git_commit"] is found["git_dirty"] is None


@pytest.mark.parametrize(
    "visible, gpu",
    [({}, "Z, Y"), ("1", "Y"), ("", None), ("-1", None), ("MIG-7", "Z, Y")],
)
def test_gpus_that_a_run_was_shown(toy, monkeypatch, visible, gpu):
    Path("nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *--id=1*) echo Y;; *--id*) exit 6;; *) echo Z; echo Y;; esac\n'
    )
    Path("nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{toy}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shown = {"CUDA_VISIBLE_DEVICES": visible} if isinstance(visible, str) else {}
    assert provenance(["toy.py"], os.environ | shown)["hardware"]["gpu"] == gpu


# --- given again, stopped, wrong ------------------------------------------------------------------


def test_more_is_asked_of_finished_runs(toy):
    """A table in results, more evaluation, another place: nothing is trained again."""
    bench()
    bench(results="kept")
    table = Path("kept/A-v0/toy/default-s2.json")
    assert told(table)["evaluation"] == played(2)
    bench(results="kept", eval_episodes=3)
    assert told(table)["evaluation"] == played(2, 3)
    Path("runs").rename("moved")
    bench(eval_episodes=3, runs_dir=Path("moved").absolute())
    assert len(lines("starts.txt")) == len(lines("ends.txt")) == 2


def test_stopped_before_it_began(toy):
    """A job whose process gets SIGTERM before its program runs starts none and isn't done."""
    (job,) = jobs_of(1)
    job.stop()
    job()
    assert (job.read()["done"], job.read()["reason"]) == (False, "")
    assert not Path("starts.txt").exists()


WRONG = {
    "no script": ({"command": "echo hello"}, "names no script"),
    "missing script": ({"command": "python gone.py"}, "gone.py does not exist"),
    "given twice": ({"command": "python toy.py --seed 3"}, "--seed is given"),
    "quotes": ({"command": "python toy.py 'a"}, "No closing quotation"),
    "no seeds": ({"num_seeds": 0}, "--num-seeds 0: must be at least 1"),
    "no workers": ({"workers": 0}, "--workers 0: must be at least 1"),
    "retries": ({"retries": -1}, "--retries -1: must be at least 0"),
    "variant": ({"variant": "a/b"}, "--variant 'a/b': must be a word"),
    "number": ({"workers": "two"}, "workers"),
    "outside": ({"env_ids": [".."]}, "--env-ids: '..' can't name a folder"),
    "here": ({"env_ids": ["A-v0", "."]}, "--env-ids: '.' can't name a folder"),
    "empty": ({"env_ids": [""]}, "--env-ids: '' can't name a folder"),
    "lines": ({"env_ids": ["A\nB"]}, "can't name a folder"),
    "long": ({"env_ids": ["A" * 300]}, "can't name a folder"),
}


@pytest.mark.parametrize("flags, message", WRONG.values(), ids=WRONG)
def test_wrong_input(toy, flags, message):
    done = bench(**flags, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(toy.iterdir()) == [toy / "toy.py"]


def test_one_folder_is_of_one_command(toy):
    other = "python toy.py --total-timesteps 6"
    bench(num_seeds=1)
    done = bench(other, num_seeds=1, code=2)
    assert "was made by 'python toy.py --total-timesteps 5'" in done.stderr
    bench(other, num_seeds=1, variant="six")
    assert [run.algorithm for run in data.find([Path("runs")])] == ["toy", "toy six"]


# --- spoilt folders -------------------------------------------------------------------------------


def link_out(path: Path):
    """A link to a file of someone else."""
    path.symlink_to(Path("outside.txt").absolute())


def says(text: str):
    return lambda path: path.write_text(text)


SPOILT = {  # what is in the place of what, and what is said of it
    "pipe for job.json": ("job.json", os.mkfifo, "no plain file: "),
    "circle for job.json": ("job.json", lambda path: path.symlink_to(path.name), "symbolic links"),
    "folder for job.json": ("job.json", Path.mkdir, "no plain file: "),
    "half a job.json": ("job.json", says('{"done"'), "is no JSON object"),
    "deep job.json": ("job.json", says("[" * 200_000), "is no JSON object"),
    "done in words": ("job.json", says('{"done": "yes"}'), "is no bool"),
    "no list of starts": ("job.json", says('{"starts": 5}'), "is no list"),
    "no starts": ("job.json", says('{"starts": [5]}'), "is no dict"),
    "link for the lock": ("lock", link_out, "a link, which is not followed: "),
    "pipe for the lock": ("lock", os.mkfifo, "lock"),
    "folder for the lock": ("lock", Path.mkdir, "lock"),
    "link for the log": ("log.txt", link_out, "a link, which is not followed: "),
    "pipe for the log": ("log.txt", os.mkfifo, "log.txt"),
    "link for the run": ("run", lambda path: path.symlink_to("/tmp"), "a link, which is not foll"),
    "file for its folder": ("", Path.touch, "default-s"),
}


@pytest.mark.timeout(120)
def test_spoilt_jobs_are_named_and_the_others_are_done(toy):
    Path("outside.txt").write_text("precious")
    for seed, (name, make, _) in enumerate(SPOILT.values(), 2):
        spoilt = folder_of(seed) / name
        spoilt.parent.mkdir(parents=True, exist_ok=True)
        make(spoilt)
    last = len(SPOILT) + 2
    done = bench(num_seeds=last, retries=0, results="kept", code=1)
    assert done.stderr == ""
    assert f"2 of {last} jobs done, {len(SPOILT)} failed" in done.stdout
    for seed, (kind, (_, _, said)) in enumerate(SPOILT.items(), 2):
        failed = f"A-v0/toy/default-s{seed} failed: "
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(failed))
        assert said in line, kind
    assert sorted(row[1] for row in lines("ends.txt")) == ["1", str(last)]
    kept = sorted(path.name for path in Path("kept").rglob("*.json"))
    assert kept == ["default-s1.json", f"default-s{last}.json"]
    assert Path("outside.txt").read_text() == "precious"


def test_a_job_json_can_not_send_its_table_elsewhere(toy):
    bench(num_seeds=1)
    path = folder_of(1) / "job.json"
    path.write_text(json.dumps(told(path) | {"script": "../../../out"}))
    bench(num_seeds=1, results="a/b/kept")
    tables = [str(path) for path in Path().rglob("*.csv.gz")]
    assert tables == ["a/b/kept/A-v0/toy/default-s1.csv.gz"]


def test_a_link_among_the_tables_is_replaced_not_followed(toy):
    Path("outside.txt").write_text("precious")
    Path("kept/A-v0/toy").mkdir(parents=True)
    for suffix in (".json", ".csv.gz"):
        link_out(Path(f"kept/A-v0/toy/default-s1{suffix}"))
    bench(num_seeds=1, results="kept")
    assert Path("outside.txt").read_text() == "precious"
    assert [run.seed for run in data.find([Path("kept")])] == [1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("spoil", [os.mkfifo, says('{"returns": 5}')])
def test_a_spoilt_evaluation_is_played_again(toy, spoil):
    bench(num_seeds=1)
    (folder_of(1) / "evaluation.json").unlink()
    spoil(folder_of(1) / "evaluation.json")
    bench(num_seeds=1, results="kept")
    assert len(lines("starts.txt")) == 1
    assert told(Path("kept/A-v0/toy/default-s1.json"))["evaluation"] == played(1)


def test_what_is_written_is_json(toy):
    """Also where a program writes NaN, which JSON does not have."""
    not_finite = 'info["final_return"] = [float("nan"), float("inf")]\n    info["args"] ='
    text = TOY.replace('info["args"] =', not_finite)
    Path("toy.py").write_text(text.replace("{value:.2f}", "nan"))

    def refused_constant(constant: str):
        raise AssertionError(constant)

    bench(num_seeds=1, results="kept")
    assert "NaN" in (folder_of(1) / "run/run.json").read_text()
    for path in (folder_of(1) / "evaluation.json", Path("kept/A-v0/toy/default-s1.json")):
        found = json.loads(path.read_text(), parse_constant=refused_constant)
    assert (found["final_return"], found["evaluation"]) == ([None, None], [None] * 20)
    (run,) = data.find([Path("kept")])
    assert len(run.evaluation) == 20
    assert run.score("evaluation") != run.score("evaluation")


# --- cores and GPUs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, workers, each",
    [
        ("--env-workers 500", 3, 500), ("--env-workers=500", 3, 500),
        ("--env_workers=500", 3, 500), ("--env-workers 500 --env-workers 700", 3, 700),
        (f"--env-workers {CORES + 1}", 1, CORES + 1), (f"--env-workers {CORES}", 1, None),
        ("--env-workers 1", 3, None), ("--env-workers many", 3, None),
        ("--env-workers", 3, None), ("--env-workersmith 500", 3, None),
    ],
)  # fmt: skip
def test_more_cores_than_there_are(toy, flags, workers, each):
    done = bench(f"python toy.py {flags}", workers=workers, dry_run=[])
    if each is None:
        assert done.stderr == ""
    else:
        wanted = f"--workers {workers} times --env-workers {each} want {workers * each} cores"
        assert done.stderr == f"warning: {wanted}, and there are {CORES}\n"


def test_gpus_are_dealt_out(toy, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert gpus_here() == ["4", "6"]

    def dealt(env_id: str, workers: int, each: int, jobs: int) -> list[str]:
        """What CUDA_VISIBLE_DEVICES was in each job."""
        left = jobs_of(jobs, "python toy.py --total-timesteps 3 --tick 0.1", env_id)
        place = Local(workers, gpus_here(), each)
        place.start(left)
        wait_for(lambda: place.ended(left) == left)
        starts = Path("starts.txt").read_text().splitlines()
        return sorted(line.split(" ")[-1] for line in starts if env_id in line)

    assert dealt("A-v0", 3, 1, 3) == ["4", "4", "6"]
    assert dealt("B-v0", 1, 2, 2) == ["4,6", "4,6"]
    refused("--gpus-per-job 3: there are 2, 4, 6", Local, 1, gpus_here(), 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5e1,MIG-77")  # by name
    assert dealt("C-v0", 2, 1, 4) == ["GPU-5e1", "GPU-5e1", "MIG-77", "MIG-77"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # all hidden by the user
    assert dealt("D-v0", 2, 1, 2) == ["", ""]


def test_a_queue_that_cant_be_read_gets_no_second_array(toy, monkeypatch):
    Path("bin").mkdir()
    for name in ("squeue", "sbatch", "srun", "scontrol"):
        Path("bin", name).write_text("#!/bin/sh\necho 'Unable to contact controller' >&2; exit 1\n")
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    place = Slurm(Path("runs"), 1, 60, ())
    refused("squeue: Unable to contact controller", place.start, jobs_of(2))


# --- several commands, and Ctrl-C -----------------------------------------------------------------


def test_a_command_can_be_stopped_before_any_job_is_handed_over():
    assert Local(1, [], 1).stop() == "stopped; the same command goes on"


def test_ctrl_c_while_jobs_are_handed_over(monkeypatch):
    """The job that a worker has begun by then is told to stop, and so ends."""
    place = Local(1, [], 1)
    stopped = threading.Event()
    ends = []
    job = Mock(side_effect=lambda: ends.append(stopped.wait(20)), stop=stopped.set)
    plain = place.pool.submit

    def submit(*work):
        plain(*work)
        raise KeyboardInterrupt

    monkeypatch.setattr(place.pool, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        place.start([job])
    wait_for(lambda: not place.pool._work_queue.qsize())
    place.stop()
    assert ends == [True]


def test_ctrl_c_ends_a_command_that_waits_for_another(toy):
    command = "python toy.py --total-timesteps 40 --tick 0.1"
    first = background(command, num_seeds=1)
    wait_for(lambda: lines("starts.txt"))
    second = background(command, num_seeds=1)
    wait_for(lambda: "runs already" in Path("out.txt").read_text())
    second.send_signal(signal.SIGINT)
    assert second.wait(10) == 130, Path("out.txt").read_text()
    assert programs.locked(folder_of(1))
    assert not lines("ends.txt")
    assert first.wait(60) == 0
    check_whole([1], 40)
    assert len(lines("starts.txt")) == 1


def test_many_commands_at_once_share_the_work_in_a_new_folder(toy):
    """All make the same folders and write the same files at the same moment."""
    command = "python toy.py --total-timesteps 5 --tick 0.1"
    flags = {"num_seeds": 3, "workers": 2, "eval_episodes": 0}
    harnesses = [background(command, **flags) for _ in range(4)]
    assert [one.wait(120) for one in harnesses] == [0] * 4, Path("out.txt").read_text()
    check_whole([1, 2, 3], 5)
    assert len(lines("starts.txt")) == 3
    assert not list(Path("runs").rglob("job.json?*"))


def test_a_file_that_many_write_at_once_is_whole(tmp_path):
    writes = [(tmp_path / "shared.json", {"writer": k}) for k in range(100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_json, *zip(*writes, strict=True)))  # raises what any of them did
    assert told(tmp_path / "shared.json").keys() == {"writer"}
    assert len(list(tmp_path.iterdir())) == 1


def test_tail_reads_the_end_of_a_file(tmp_path):
    assert programs.tail(tmp_path / "log") == []
    (tmp_path / "log").write_text("a\n" * 5000 + "10%\r20%\r\n\nlast\n")
    assert programs.tail(tmp_path / "log", 3) == ["10%", "20%", "last"]


# --- with real scripts, on Slurm ------------------------------------------------------------------

REAL = "python ppo.py --total-timesteps 12000 --num-envs 4 --num-steps 64 --checkpoint-interval 2"
CARTPOLE = {"env_ids": ["CartPole-v1"], "workers": 2, "eval_episodes": 3}


def check_same(one: Path, other: Path):
    """Two folders of runs, equal to the last digit."""
    pairs = list(zip(data.find([one]), data.find([other]), strict=True))
    assert [run.seed for run, _ in pairs] == [1, 2]
    for a, b in pairs:
        assert a.status == b.status == "finished"
        assert a.returns.tolist() == b.returns.tolist()
        assert a.steps.tolist() == b.steps.tolist()
        assert a.evaluation.tolist() == b.evaluation.tolist()


@pytest.mark.slow
def test_real_runs_cut_off_give_the_same_table(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    bench(REAL, runs_dir=tmp_path / "whole", **CARTPOLE)
    words = harness.words("run", **asked(REAL, CARTPOLE | {"runs_dir": tmp_path / "cut"}))
    running = subprocess.Popen([sys.executable, "-m", "benchmark", *words])
    runs = [tmp_path / "cut/CartPole-v1/ppo" / f"default-s{seed}/run" for seed in (1, 2)]
    wait_for(lambda: all((run / "episodes.csv").exists() for run in runs))
    wait_for(lambda: all(len(rows(run)) > 40 for run in runs))
    running.kill()
    for pid in [path.name for path in Path("/proc").glob("[0-9]*")]:
        command = Path(f"/proc/{pid}/cmdline")
        if str(runs[0]) in (command.read_text() if command.exists() else ""):
            os.kill(int(pid), signal.SIGKILL)
    bench(REAL, runs_dir=tmp_path / "cut", **CARTPOLE)
    check_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_an_id_that_names_a_module_is_resumed_and_played(tmp_path, monkeypatch):
    """Ours run a module's code again only if they are told its id again."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import PendulumEnv as env\n"
        "gym.register('Mine-v0', env, max_episode_steps=50)\n"
    )
    command = f"python {ROOT / 'ppo_continuous_action.py'} --total-timesteps 1200 --num-steps 200 "
    command += "--num-minibatches 4 --no-compile"
    flags = {"env_ids": ["mine:Mine-v0"], "num_seeds": 1, "eval_episodes": 2}
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    bench(command, **flags, results="kept")
    folder = Path("runs/Mine-v0/ppo_continuous_action/default-s1")
    info = told(folder / "run" / "run.json")
    (folder / "run" / "run.json").write_text(json.dumps(info | {"status": "running"}))
    write_json(folder / "job.json", Work(folder, None).read() | {"done": False})
    bench(command, **flags)
    assert "--resume" in (folder / "log.txt").read_text()
    (run,), (kept,) = (data.find([Path(name)]) for name in ("runs", "kept"))
    assert run.status == "finished"
    assert len(run.evaluation) == 2
    assert run.evaluation.tolist() == kept.evaluation.tolist()
    assert kept.info["final_return"] == pytest.approx(kept.score("training"), abs=0.01)
    assert kept.info["versions"]["mujoco"] == metadata.version("mujoco")
    other = bench(command, **flags | {"env_ids": ["other:Mine-v0"]}, code=2)
    assert "for mine:Mine-v0; give another" in other.stderr


CLUSTER = ROOT.parent / "shared" / "slurm" / "cluster"


@pytest.fixture(scope="module")
def cluster():
    if not CLUSTER.exists():
        pytest.skip("no cluster to bring up")
    with open(Path(tempfile.gettempdir()) / "slurm-of-the-tests.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # test processes take turns: there is one cluster
        up = subprocess.run([str(CLUSTER), "up"], capture_output=True, text=True)
        if up.returncode:
            pytest.skip(f"the cluster did not come up: {up.stderr[-200:]}")
        subprocess.run(["scancel", "--me"], check=True)  # what a killed test has left
        yield
        subprocess.run([str(CLUSTER), "down"], capture_output=True)


def squeue() -> str:
    return subprocess.check_output(["squeue", "--me", "--noheader", "--array"], text=True)


@pytest.mark.slow
def test_slurm_gives_the_same_table(cluster, tmp_path, monkeypatch):
    """On two nodes."""
    monkeypatch.chdir(ROOT)
    for place in ("local", "slurm"):
        bench(REAL, runs_dir=tmp_path / place, cluster=place, **CARTPOLE)
    check_same(tmp_path / "local", tmp_path / "slurm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, order",
    [
        ("requeue", ["scontrol", "requeue"]),
        ("warning", ["scancel", "--signal=USR2"]),
        ("cancel", ["scancel"]),
    ],
)
def test_slurm_job_goes_on(cluster, toy, how, order):
    """Requeued by an administrator, warned of its time limit, cancelled; and the harness killed."""
    command = "python toy.py --total-timesteps 40 --tick 0.25"
    running = background(command, num_seeds=1, cluster="slurm")
    wait_for(lambda: lines("starts.txt"))
    time.sleep(2.0)
    job = squeue().split()[0]
    if how == "requeue":
        running.kill()
        running.wait()
    subprocess.run([*order, job], check=True)
    if how == "requeue":
        running = background(command, num_seeds=1, cluster="slurm")
        time.sleep(5.0)
        assert len(squeue().splitlines()) == 1  # not submitted twice
    # Slurm holds a requeued job back for two minutes
    assert running.wait(300) == 0, Path("out.txt").read_text()
    check_whole([1], 40)
    assert len(lines("starts.txt")) == 2
    assert int(lines("starts.txt")[1][2]) > 3
    assert told(folder_of(1) / "job.json")["done"]


@pytest.mark.slow
def test_slurm_array_has_no_more_workers_than_asked(cluster, toy):
    flags = {"cluster": "slurm", "sbatch": ["comment=four seeds", "exclusive"]}
    bench("python toy.py --total-timesteps 5 --tick 0.2", num_seeds=4, **flags)
    check_whole([1, 2, 3, 4], 5)
    script = next(Path("runs/submitit").glob("*_submission.sh")).read_text()
    for flag in ("array=0-3%1", "comment='four seeds'", "exclusive", "requeue", "time=1440"):
        assert f"#SBATCH --{flag}\n" in script
    assert shlex.split(script[script.index("srun") :])[-1].endswith("runs/submitit")
