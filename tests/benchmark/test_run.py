"""`python -m benchmark run` with a toy script; slow: on Slurm."""

import fcntl
import os
import platform
import signal
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

import harness
import pytest
from harness import ROOT, TOY, digest, ended, lines, refused, told, wait_for

from benchmark import data
from benchmark.programs import provenance
from benchmark.run import Work, run

FIVE = "python toy.py --total-timesteps 5"


def asked(flags: dict) -> dict:
    return {"command": FIVE, "env_ids": ["A-v0"], "num_seeds": 2, "runs_dir": Path("runs")} | flags


def bench(code: int = 0, **flags) -> subprocess.CompletedProcess:
    return ended(run, code=code, **asked(flags))


def background(**flags) -> subprocess.Popen:
    return harness.background("run", **asked(flags))


def folder_of(seed: int, env_id: str = "A-v0") -> Path:
    return Path("runs") / env_id / "toy" / f"default-s{seed}"


def starts_of(seed: int) -> list[dict]:
    """As job.json has them."""
    return told(folder_of(seed) / "job.json")["starts"]


def check_whole(seeds: list[int], total: int):
    """Each run complete, exactly once."""
    assert sorted(lines("ends.txt")) == [["A-v0", str(seed)] for seed in seeds]
    for seed in seeds:
        rows = (folder_of(seed) / "run/episodes.csv").read_text().splitlines()[1:]
        assert [int(row.partition(",")[0]) for row in rows] == list(range(1, total + 1))
        begun = [int(row[2]) for row in lines("starts.txt") if row[1] == str(seed)]
        assert begun == sorted(begun)  # went on, never back


def test_every_environment_with_every_seed_once(toy):
    two = {"env_ids": ["A-v0", "dir/B-v1"], "start_seed": 4, "workers": 3}
    done = bench(**two, num_seeds=3, results=Path("kept"))
    assert "6 of 6 jobs done, 0 failed" in done.stdout
    wanted = [(env_id, seed) for env_id in ("A-v0", "dir/B-v1") for seed in (4, 5, 6)]
    found = data.find([Path("runs")])
    assert [(x.env_id, x.seed, x.status) for x in found] == [(*x, "finished") for x in wanted]
    again = bench(**two, num_seeds=4)
    assert "8 jobs in runs, 6 done before" in again.stdout
    assert len(lines("starts.txt")) == len(lines("ends.txt")) == 8

    kept = data.find([Path("kept")])
    assert [(x.env_id, x.seed, x.algorithm) for x in kept] == [(*x, "toy") for x in wanted]
    assert kept[1].returns.tolist() == [5.12, 10.12, 15.12, 20.12, 25.12]
    assert kept[1].steps.tolist() == [1, 2, 3, 4, 5]
    played = [5.123 * 1.11 * k for k in range(1, 21)]  # by the toy's final policy
    assert kept[1].evaluation.tolist() == pytest.approx(played, abs=0.006)
    assert kept[1].info["command"] == f"{FIVE} --env-id A-v0 --seed 5 --run-dir RUN"
    assert kept[1].score("training") == pytest.approx(15.12)
    assert kept[1].score("training", games=2) == pytest.approx(22.62)


def test_killed_harness_and_killed_job(toy):
    """SIGKILL of the harness and of a job; the command given again. Slurm's warning goes to all
    processes: the harness alone hears it, and stops its programs."""
    command = "python toy.py --total-timesteps 15 --tick 0.1"
    first_harness = background(command=command, num_seeds=4, workers=2)
    wait_for(lambda: len(lines("starts.txt")) == 2)
    first_harness.kill()
    first_harness.wait()
    first, other = (int(row[3]) for row in lines("starts.txt"))
    os.kill(other, signal.SIGUSR2)
    time.sleep(0.3)
    os.kill(first, signal.SIGKILL)  # the other trains on without a harness
    done = bench(command=command, num_seeds=4, workers=2)
    assert "runs already" in done.stdout
    check_whole([1, 2, 3, 4], 15)
    assert len(lines("starts.txt")) == 5
    assert len([row for row in lines("starts.txt") if row[4] == "resumed"]) == 1


@pytest.mark.parametrize("number, ignored", [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_leaves_resumable_runs(toy, number, ignored):
    """Also Ctrl-C in a shell that made a command started with & ignore it."""
    command = "python toy.py --total-timesteps 30 --tick 0.1"
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    running = background(command=command, workers=2)
    signal.signal(signal.SIGINT, handler)
    wait_for(lambda: len(lines("starts.txt")) == 2)
    time.sleep(0.5)
    for _ in range(2):  # as under uv
        running.send_signal(number)
        time.sleep(0.1)
    assert running.wait(30) == 128 + number
    assert "Traceback" not in Path("out.txt").read_text()
    assert not any(Work(folder_of(seed)).locked() for seed in (1, 2))
    assert not Path("ends.txt").exists()
    cut = data.find([Path("runs")])
    assert [run.status for run in cut] == ["running"] * 2
    assert all(0 < len(run.steps) < 30 for run in cut)
    bench(command=command, workers=2)
    check_whole([1, 2], 30)
    assert {row[4] for row in lines("starts.txt")[2:]} == {"resumed"}


def test_a_seed_that_fails_is_tried_again_and_costs_the_exit_code(toy):
    command = f"{FIVE} --bad-seed 2"
    done = bench(command=command, num_seeds=3, retries=1, code=1)
    assert "2 of 3 jobs done, 1 failed" in done.stdout
    assert "  | the loss is not finite" in done.stdout
    starts = [row[2] for row in lines("starts.txt") if row[1] == "2"]
    assert starts == ["0", "2"]  # anew, then from the checkpoint
    failed = data.find([Path("runs")])[1]
    assert (failed.status, failed.reason) == ("failed", "exit code 1: the loss is not finite")
    bench(command=command, num_seeds=3, retries=0, code=1)
    assert len(lines("starts.txt")) == 2 + 2 + 1  # only the failed one was tried


@pytest.mark.parametrize("code, tries", [(2, 1), (255, 3)])
def test_wrong_arguments_alone_are_not_tried_again(toy, code, tries):
    Path("picky.py").write_text(f"print('no such game'); raise SystemExit({code})")
    done = bench(command="python picky.py", num_seeds=1, code=1)
    assert f"failed; exit code {code}: no such game" in done.stdout
    log = Path("runs/A-v0/picky/default-s1/log.txt").read_text()
    assert log.count("no such game") == tries


def test_a_policy_that_plays_fewer_episodes_than_asked_for_fails(toy):
    Path("toy.py").write_text(TOY.replace("range(args.eval_episodes)", "range(3)"))
    done = bench(num_seeds=1, retries=0, code=1)
    assert "3 of 20 episodes were played" in done.stdout


def test_dry_run(toy):
    done = bench(dry_run=True, variant="fast")
    command = f"{FIVE} --env-id A-v0 --seed %d --run-dir runs/A-v0/toy/fast-s%d/run\n"
    assert done.stdout == command % (1, 1) + command % (2, 2)
    assert list(toy.iterdir()) == [toy / "toy.py"]


def test_wrong_input_is_one_line(toy):
    commands = ("none.py", "'toy.py", "toy.py --seed=1", "toy.py {seed}")
    wrongs = [{"command": f"python {words}"} for words in commands] + [{"command": "true"}]
    for wrong in (*wrongs, {"num_seeds": 0}, {"variant": "a b"}, {"keep_policies": True}):
        refused("benchmark: --", run, **asked(wrong))
        assert not Path("runs").exists()
    bench(num_seeds=1)
    refused(f"was made by '{FIVE}' for A-v0", run, **asked({"command": f"{FIVE} --x 1"}))


OTHER = """
import json, os, sys
_, env_id, seed, out = sys.argv
os.makedirs(out)
head = "step,score" if seed == "2" else "global_step,seconds,return,length"
open(out + "/episodes.csv", "w").write(head + "\\n9,1,7,9\\n")
info = {"status": "running" if seed == "1" else "finished"}
if seed == "4":
    info |= {"args": {"env_id": env_id}, "seed": 4, "git_commit": "mine"}
    info |= {"hardware": "a TPU", "versions": {"jax": "1"}}
json.dump(info, open(out + "/run.json", "w"))
"""


def test_a_program_that_is_not_ours_and_what_it_says_of_itself(toy):
    """Only what says finished and can be read is done."""
    Path("other.py").write_text(OTHER)
    flags = {"num_seeds": 4, "workers": 2, "retries": 0, "keep_policies": True, "code": 1}
    done = bench(command="python other.py {env_id} {seed} {run_dir}", results=Path("kept"), **flags)
    assert "2 of 4 jobs done, 2 failed" in done.stdout
    assert "s1/run/run.json does not say that it is finished" in done.stdout
    assert "s2: failed; not a table of episodes: the columns are step,score" in done.stdout
    assert done.stdout.count("its policy is not kept") == 2
    for folder in ("runs", "kept"):
        found = data.find([Path(folder)])[-1]
        assert (found.commit, found.cpu, found.returns.tolist()) == ("mine", "a TPU", [7])
        assert found.info["versions"]["jax"] == "1"
        assert found.info["versions"]["numpy"] == metadata.version("numpy")
        assert found.info["source_sha256"] == digest(Path("other.py").read_text())


def git(*words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.check_output(["git", *who, *words], text=True).strip()


def test_a_run_is_dirty_only_if_its_program_differs_from_its_commit(toy):
    git("init", "-q")
    git("add", "toy.py")
    git("commit", "-q", "-m", "Toy")
    commit = git("rev-parse", "HEAD")
    Path("other.txt").write_text("new")
    bench(num_seeds=1)  # which writes into the tree, too
    Path("toy.py").write_text(f"{TOY}\n# changed")
    bench(num_seeds=2, results=Path("kept"))
    git("add", "toy.py")
    bench(num_seeds=3)
    Path("new.py").write_text(TOY)
    starts = [*(starts_of(seed)[0] for seed in (1, 2, 3)), provenance(["new.py"])]
    assert [start["git_commit"] for start in starts] == [commit] * 4
    assert [start["git_dirty"] for start in starts] == [False, True, True, True]
    assert starts[0]["source_sha256"] == digest(TOY)
    assert starts[1]["source_sha256"] == digest(f"{TOY}\n# changed")
    assert starts[0]["hardware"]["cores"] == os.cpu_count()
    assert starts[0]["versions"]["python"] == platform.python_version()
    assert starts[0]["versions"]["torch"] == metadata.version("torch")
    (kept, _) = data.find([Path("kept")])
    assert {name: kept.info[name] for name in starts[0]} == starts[0]


def test_a_resumed_run_says_if_it_went_on_with_another_source(toy):
    sources = [TOY, f"{TOY}\n# a comment", TOY.replace("args.bad_seed", "None")]
    for k in (0, 1, 1):
        Path("toy.py").write_text(sources[k])
        bench(command=f"{FIVE} --bad-seed 1", num_seeds=1, retries=0, code=1)
    Path("toy.py").write_text(sources[2])
    bench(command=f"{FIVE} --bad-seed 1", num_seeds=1, results=Path("kept"))
    starts = starts_of(1)
    found = [start["source_sha256"] for start in starts]
    assert found == [digest(sources[k]) for k in (0, 1, 1, 2)]
    (kept,) = data.find([Path("kept")])
    assert kept.info["source_sha256"] == digest(TOY)
    assert kept.info["resumed_with"] == starts[1:]


# --- on Slurm -------------------------------------------------------------------------------------
NODES = {"123456": "node7:23456", "123457": "node7:23457", "7": "other:29500"}  # of jobs


@pytest.mark.parametrize("job", NODES)
def test_two_jobs_of_slurm_do_not_meet(job, tmp_path, monkeypatch):
    """The published script's port is of the job's number, if neither port nor head is given."""
    for name, text in (("srun", 'echo "$*"'), ("scontrol", "echo node7; echo node8")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": job, "SLURM_NNODES": "2"}
    env |= {"SLURM_JOB_NODELIST": "node[7-8]"}
    env |= {"PORT": "29500", "HEAD": "other"} if job == "7" else {}
    script = ROOT / "benchmark/published/ppo_atari_multigpu.slurm"
    words = subprocess.check_output(["bash", script, "--seed", "2"], env=env, text=True).split()
    assert words[-4:] == ["--run-dir", f"runs/slurm-{job}", "--seed", "2"]
    assert f"--rdzv-endpoint={NODES[job]}" in words


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


def squeue() -> list[str]:
    command = ["squeue", "--me", "--noheader", "--array"]
    return subprocess.check_output(command, text=True).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("order", [["scontrol", "requeue"], ["scancel", "--signal=USR2"]])
def test_slurm_job_goes_on(cluster, toy, order):
    """Requeued by an administrator, with the harness killed; warned of its time limit."""
    flags = {"command": "python toy.py --total-timesteps 40 --tick 0.25", "num_seeds": 1}
    running = background(**flags, cluster="slurm", sbatch=["comment=one seed"])
    wait_for(lambda: lines("starts.txt"))
    time.sleep(2.0)
    job = squeue()[0].split()[0]
    if "requeue" in order:
        running.kill()
        running.wait()
    subprocess.run([*order, job], check=True)
    if "requeue" in order:
        running = background(**flags, cluster="slurm")
        time.sleep(5.0)
        assert len(squeue()) == 1  # not submitted twice
    # Slurm holds a requeued job back for two minutes
    assert running.wait(300) == 0, Path("out.txt").read_text()
    check_whole([1], 40)
    assert len(lines("starts.txt")) == 2
    assert int(lines("starts.txt")[1][2]) > 3
    script = next(Path("runs/submitit").glob("*_submission.sh")).read_text()
    assert "#SBATCH --comment='one seed'\n" in script
