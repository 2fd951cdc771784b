"""`python -m benchmark run` with a toy script; slow: with real ones and on Slurm."""

import fcntl
import hashlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from harness import bench as called
from program import ROOT, rows

from benchmark import data
from benchmark.programs import (
    executable,
    last_word,
    locked,
    provenance,
    tail,
    warn_of_cores,
    write_json,
)
from benchmark.report import run_row
from benchmark.run import Local, Slurm, Work, gpus_here, plan

# As our scripts are, from outside: a step a tick, a checkpoint after each, SIGTERM stops it.
TOY = """
import json, os, signal, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
env_id = flags["--env-id"]  # ours want it again for an id that names a module
if "--evaluate" in flags:
    for k in range(int(flags["--eval-episodes"])):
        print(f"eval_episode={k}, episodic_return={k}.5")
    raise SystemExit
folder = Path(flags.get("--resume") or flags["--run-dir"])
saved = folder / "checkpoint.pt"
if "--resume" in flags:
    flags, step = json.loads(saved.read_text())
    assert flags["--env-id"] == env_id
else:
    folder.mkdir(parents=True)  # fails if it is there
    step = 0
seed, total = int(flags["--seed"]), int(flags["--total-timesteps"])
with open("starts.txt", "a") as file:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    file.write(f"{flags['--env-id']} {seed} {step} {os.getpid()} {gpu}\\n")
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
def note(status):
    info = {"script": "toy.py", "status": status, "seed": seed}
    info["args"] = {"env_id": flags["--env-id"], "total_timesteps": total}
    (folder / "run.json").write_text(json.dumps(info))
note("running")
while step < total:
    if stop:
        raise SystemExit(143)
    if flags.get("--bad-seed") == str(seed) and step == 2:
        print("the loss is not finite")
        raise SystemExit(1)
    time.sleep(float(flags.get("--tick", 0.0)))
    step += 1
    table = "global_step,seconds,return,length\\n"
    table += "".join(f"{k},{k}.25,{seed * k}.125,1\\n" for k in range(1, step + 1))
    (folder / "episodes.csv").write_text(table)
    (folder / "new").write_text(json.dumps([flags, step]))
    (folder / "new").rename(saved)
note("finished")
with open("ends.txt", "a") as file:
    file.write(f"{flags['--env-id']} {seed}\\n")
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(TOY)
    return tmp_path


def words(command: str = "python toy.py --total-timesteps 5", **flags) -> list[str]:
    flags = {"env_ids": ["A-v0"], "num_seeds": 2, "runs_dir": "runs"} | flags
    argv = [sys.executable, "-m", "benchmark", "run", "--command", command]
    for name, value in flags.items():
        argv += [f"--{name.replace('_', '-')}"]
        argv += map(str, value if isinstance(value, list) else [value])
    return argv


ENV = os.environ | {"PYTHONPATH": str(ROOT)}


def bench(*args, **flags) -> subprocess.CompletedProcess:
    return called(*words(*args, **flags)[3:], PYTHONPATH=ENV["PYTHONPATH"])


def background(*args, **flags) -> subprocess.Popen:
    return subprocess.Popen(
        words(*args, **flags), stdout=open("out.txt", "a"), stderr=subprocess.STDOUT, env=ENV
    )


def lines(name: str) -> list[list[str]]:
    path = Path(name)
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def folder_of(seed: int, env_id: str = "A-v0") -> Path:
    return Path("runs") / env_id / "toy" / f"default-s{seed}"


def check_whole(seeds: list[int], total: int, env_id: str = "A-v0"):
    """Each run complete, exactly once."""
    assert sorted(lines("ends.txt")) == [[env_id, str(seed)] for seed in seeds]
    for seed in seeds:
        assert [row[0] for row in rows(folder_of(seed) / "run")[1:]] == [
            str(k) for k in range(1, total + 1)
        ]
        starts = [int(row[2]) for row in lines("starts.txt") if row[1] == str(seed)]
        assert starts == sorted(starts)  # went on, never back


def test_every_environment_with_every_seed_once(toy):
    done = bench(env_ids=["A-v0", "dir/B-v1"], num_seeds=3, start_seed=4, workers=3, results="kept")
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 of 6 jobs done, 0 failed" in done.stdout
    assert "A-v0/toy/default-s5: done; training 15.1, evaluation 10.0" in done.stdout
    found = [(run.env_id, run.seed, run.status) for run in data.find([Path("runs")])]
    envs, seeds = ("A-v0", "dir/B-v1"), (4, 5, 6)
    assert found == [(env_id, seed, "finished") for env_id in envs for seed in seeds]
    assert len(lines("ends.txt")) == 6
    again = bench(env_ids=["A-v0", "dir/B-v1"], num_seeds=4, start_seed=4, workers=3)
    assert again.returncode == 0
    assert "8 jobs in runs, 6 done before" in again.stdout
    assert len(lines("starts.txt")) == len(lines("ends.txt")) == 8

    kept = data.find([Path("kept")])
    assert [(run.env_id, run.algorithm, run.seed) for run in kept] == [
        (env_id, "toy", seed) for env_id in envs for seed in seeds
    ]
    assert kept[1].returns.tolist() == [5.12, 10.12, 15.12, 20.12, 25.12]
    assert kept[1].evaluation.tolist() == [k + 0.5 for k in range(20)]
    assert kept[1].info["command"] == (
        "python toy.py --total-timesteps 5 --env-id A-v0 --seed 5 --run-dir RUN"
    )
    assert kept[1].score("training") == pytest.approx(15.12)
    assert kept[1].score("training", games=2) == pytest.approx(22.62)


def test_killed_harness_and_killed_job(toy):
    """Acceptance 1: SIGKILL of the harness and of a job; the command given again."""
    command = "python toy.py --total-timesteps 15 --tick 0.1"
    harness = background(command, num_seeds=4, workers=2)
    wait_for(lambda: len(lines("starts.txt")) == 2)
    harness.kill()
    harness.wait()
    first, second = (int(row[3]) for row in lines("starts.txt"))
    time.sleep(0.3)
    os.kill(first, signal.SIGKILL)  # the other trains on without a harness
    done = bench(command, num_seeds=4, workers=2)
    assert done.returncode == 0
    assert "runs already" in done.stdout
    check_whole([1, 2, 3, 4], 15)
    assert len(lines("starts.txt")) == 5
    resumed = [row for row in lines("starts.txt") if row[2] != "0"]
    assert len(resumed) == 1
    wait_for(lambda: not Path(f"/proc/{second}").exists())  # its table is whole before it has ended


def test_job_killed_under_a_living_harness_is_tried_again(toy):
    harness = background("python toy.py --total-timesteps 8 --tick 0.2", num_seeds=1)
    wait_for(lambda: lines("starts.txt"))
    time.sleep(0.6)
    os.kill(int(lines("starts.txt")[0][3]), signal.SIGKILL)
    assert harness.wait(60) == 0
    assert "killed by SIGKILL" in Path("out.txt").read_text()
    check_whole([1], 8)
    assert len(lines("starts.txt")) == 2


@pytest.mark.parametrize("ignored", [False, True], ids=["", "started with &"])
def test_ctrl_c_leaves_resumable_runs(toy, ignored):
    command = "python toy.py --total-timesteps 30 --tick 0.1"
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL)
    harness = background(command, workers=2)
    signal.signal(signal.SIGINT, handler)
    wait_for(lambda: len(lines("starts.txt")) == 2)
    time.sleep(0.5)
    for _ in range(2):  # as under uv
        harness.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert harness.wait(30) == 130
    assert "Traceback" not in Path("out.txt").read_text()
    assert "the same command goes on" in Path("out.txt").read_text()
    assert not any(locked(folder_of(seed)) for seed in (1, 2))
    assert not Path("ends.txt").exists()
    assert [run.status for run in data.find([Path("runs")])] == ["running"] * 2
    assert all(0 < len(run.steps) < 30 for run in data.find([Path("runs")]))
    assert bench(command, workers=2).returncode == 0
    check_whole([1, 2], 30)


def test_failing_seed(toy):
    """Acceptance 2."""
    command = "python toy.py --total-timesteps 5 --bad-seed 2"
    done = bench(command, num_seeds=3, retries=1)
    assert done.returncode == 1
    assert "2 of 3 jobs done, 1 failed" in done.stdout
    assert "default-s2 failed: exit code 1: the loss is not finite" in done.stdout
    assert "  | the loss is not finite" in done.stdout
    starts = [row[:3] for row in lines("starts.txt") if row[1] == "2"]
    assert starts == [["A-v0", "2", "0"], ["A-v0", "2", "2"]]  # anew, then from the checkpoint
    failed = data.find([Path("runs")])[1]
    assert (failed.status, failed.reason) == ("failed", "exit code 1: the loss is not finite")
    assert bench(command, num_seeds=3, retries=0).returncode == 1
    assert len(lines("starts.txt")) == 2 + 2 + 1  # only the failed one was tried


def test_wrong_arguments_are_not_tried_again(toy):
    Path("picky.py").write_text("print('no such game'); raise SystemExit(2)")
    done = bench("python picky.py", num_seeds=1)
    assert done.returncode == 1
    assert "failed: exit code 2: no such game" in done.stdout
    assert (Path("runs/A-v0/picky/default-s1/log.txt").read_text()).count("no such game") == 1
    Path("picky.py").write_text("print('no such game'); raise SystemExit(255)")
    done = bench("python picky.py", num_seeds=1, start_seed=2)
    assert "failed: exit code 255: no such game" in done.stdout
    assert (Path("runs/A-v0/picky/default-s2/log.txt").read_text()).count("no such game") == 3


def test_what_a_frame_says_is_the_reason(toy):
    log = Path("log.txt")
    for text, told in (
        ("", ""),
        ("one\n two \n\n", "two"),
        ("╭─ Value error ─╮\n│ --seed -1: not in │\n│ 0 ... 9 │\n│ ──── │\n│ help │\n╰────╯\n",
         "--seed -1: not in 0 ... 9"),
        ("│ the top is cut off │\n╰────╯", "the top is cut off"),
    ):  # fmt: skip
        log.write_text(text)
        assert last_word(log) == told
    Path("tyro_like.py").write_text(
        "import tyro\n"
        "def main(env_id: str, seed: int, run_dir: str, total: int): ...\n"
        "tyro.cli(main)\n"
    )
    done = bench("python tyro_like.py --total many", num_seeds=1)
    assert "failed: exit code 2: Error parsing --total" in done.stdout.replace("INT: ", "")


def test_dry_run(toy):
    done = bench(dry_run=[], num_seeds=2, variant="fast")
    assert done.stdout.splitlines() == [
        f"python toy.py --total-timesteps 5 --env-id A-v0 --seed {seed} "
        f"--run-dir runs/A-v0/toy/fast-s{seed}/run"
        for seed in (1, 2)
    ]
    assert list(toy.iterdir()) == [toy / "toy.py"]


def test_program_that_is_not_ours(toy):
    Path("other.py").write_text(
        "import json, os, sys\nname, seed, out = sys.argv[1:]\nos.makedirs(out)\n"
        "print(f'episode of {name}', file=open(f'{out}/episodes.csv', 'w'))\n"
        "open(f'{out}/episodes.csv', 'w').write('global_step,seconds,return,length\\n9,1,7,9\\n')\n"
        "info = {'script': 'other.py', 'seed': int(seed), 'status': 'finished'}\n"
        "json.dump(info | {'args': {'env_id': name}}, open(f'{out}/run.json', 'w'))\n"
    )
    done = bench("python other.py {env_id} {seed} {run_dir}", num_seeds=1)
    assert done.returncode == 0
    assert "A-v0/other/default-s1: done; training 7.0" in done.stdout


def test_only_what_says_finished_and_can_be_read_is_done(toy):
    Path("half.py").write_text(
        "import json, os, sys\nseed, out = sys.argv[1:]\nos.makedirs(out)\n"
        "head = 'global_step,seconds,return,length' if seed != '2' else 'step,score'\n"
        "open(f'{out}/episodes.csv', 'w').write(f'{head}\\n9,1,7,9\\n')\n"
        "info = {'status': 'running' if seed == '1' else 'finished'}\n"
        "json.dump(info, open(f'{out}/run.json', 'w'))\n"
    )
    done = bench("python half.py {seed} {run_dir}", num_seeds=3, workers=2, retries=0)
    assert done.returncode == 1
    assert "1 of 3 jobs done, 2 failed" in done.stdout
    assert "s1/run/run.json does not say that it is finished" in done.stdout
    assert "s2: failed; not a table of episodes: the columns are step,score" in done.stdout
    done = bench("python half.py 1 {run_dir}", num_seeds=3)
    assert done.returncode == 2 and "{seed} is missing" in done.stderr


def commit_all() -> str:
    for words in (["init", "-q"], ["add", "toy.py"], ["commit", "-q", "-m", "Toy"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()


def test_what_a_run_began_with_is_recorded(toy):
    """Of a script in a repository, whatever folder the harness is called from and imported from."""
    commit, digest = commit_all(), hashlib.sha256(TOY.encode()).hexdigest()
    Path(".git/info/exclude").write_text("*\n")
    assert bench(num_seeds=1).returncode == 0
    Path("toy.py").write_text(f"{TOY}\n# changed")
    assert bench(num_seeds=2, results="kept").returncode == 0
    first, second = (json.loads((folder_of(k) / "job.json").read_text())["starts"] for k in (1, 2))
    assert len(first) == len(second) == 1
    assert (first[0]["git_commit"], first[0]["git_dirty"]) == (commit, False)
    assert (second[0]["git_commit"], second[0]["git_dirty"]) == (commit, True)
    assert first[0]["source_sha256"] == digest != second[0]["source_sha256"]
    assert first[0]["hardware"]["cores"] == os.cpu_count()
    assert first[0]["versions"]["python"] == platform.python_version()
    assert first[0]["versions"]["torch"] == metadata.version("torch")
    assert first[0]["processes"] == 1
    for folder in ("runs", "kept"):  # a report reads them under the names they always had
        for run, starts in zip(data.find([Path(folder)]), (first, second), strict=True):
            assert {name: run.info[name] for name in starts[0]} == starts[0]
            assert "resumed_with" not in run.info
            assert run_row(run)["commit"] == commit
            assert run_row(run)["cpu"] == starts[0]["hardware"]["cpu"]


def test_a_resumed_run_says_if_it_went_on_with_another_source(toy):
    command = "python toy.py --total-timesteps 6 --bad-seed 1"
    changes = ("", "\n# a comment", "\n# a comment", "\nimport os", "\nimport os")
    for change in changes:
        Path("toy.py").write_text(TOY + change)
        assert bench(command, num_seeds=1, retries=0).returncode == 1
    Path("toy.py").write_text(TOY.replace("--bad-seed", "--worse-seed"))
    assert bench(command, num_seeds=1, results="kept").returncode == 0
    starts = json.loads((folder_of(1) / "job.json").read_text())["starts"]
    sources = [TOY, f"{TOY}\n# a comment", f"{TOY}\nimport os", Path("toy.py").read_text()]
    digests = [hashlib.sha256(source.encode()).hexdigest() for source in sources]
    assert [start["source_sha256"] for start in starts] == digests
    for folder in ("runs", "kept"):
        (run,) = data.find([Path(folder)])
        assert run.info["source_sha256"] == digests[0]
        assert run.info["resumed_with"] == starts[1:]
    Path(folder_of(1), "run", "run.json").unlink()
    Path(folder_of(1), "run", "checkpoint.pt").unlink()
    write_json(folder_of(1) / "job.json", Work(folder_of(1), None).read() | {"done": False})
    assert bench(command, num_seeds=1).returncode == 0  # begun anew: so is the list
    assert len(json.loads((folder_of(1) / "job.json").read_text())["starts"]) == 1


def test_versions_are_those_of_the_first_start():
    """run.json is written anew when a run goes on, perhaps on another machine: it has the last."""
    starts = [{"versions": {"python": "3", "torch": torch}} for torch in ("2.11", "2.13")]
    info = {"versions": {"torch": "2.13", "jax": "1"}}
    found = data.told(info, {"starts": starts})
    assert found["versions"] == {"python": "3", "torch": "2.11", "jax": "1"}
    assert found["resumed_with"] == starts[1:]
    assert info == {"versions": {"torch": "2.13", "jax": "1"}}


def test_what_a_program_says_of_itself_wins(toy):
    Path("other.py").write_text(
        "import json, os, sys\nseed, out = sys.argv[1:]\nos.makedirs(out)\n"
        "open(f'{out}/episodes.csv', 'w').write('global_step,seconds,return,length\\n9,1,7,9\\n')\n"
        "info = {'status': 'finished', 'git_commit': 'mine', 'hardware': 'a TPU'}\n"
        "info |= {'versions': {'jax': '1', 'torch': 'own'}}\n"
        "json.dump(info, open(f'{out}/run.json', 'w'))\n"
    )
    done = bench("python other.py {seed} {run_dir}", num_seeds=1, results="kept")
    assert done.returncode == 0
    for folder in ("runs", "kept"):
        (run,) = data.find([Path(folder)])
        assert (run.info["git_commit"], run.info["hardware"]) == ("mine", "a TPU")
        versions = run.info["versions"]
        assert (versions["jax"], versions["torch"]) == ("1", "own")
        assert versions["numpy"] == metadata.version("numpy")
        source = Path("other.py").read_bytes()
        assert run.info["source_sha256"] == hashlib.sha256(source).hexdigest()
        assert (run_row(run)["commit"], run_row(run)["cpu"]) == ("mine", "a TPU")


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
    found = provenance(executable(words))
    assert found["processes"] == processes
    assert bool(found["versions"]) == (words[0] == "python")  # uv's Python may have others
    assert found["git_commit"] is found["git_dirty"] is None


@pytest.mark.parametrize(
    "visible, gpu",
    [(None, "Z, Y"), ("1", "Y"), ("", None), ("-1", None), ("MIG-7", "Z, Y")],
)
def test_gpus_that_a_run_was_shown(toy, visible, gpu):
    Path("nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *--id=1*) echo Y;; *--id*) exit 6;; *) echo Z; echo Y;; esac\n'
    )
    Path("nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{toy}:{os.environ['PATH']}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    code = "from benchmark.programs import provenance; print(provenance(['toy.py'])['hardware'])"
    told = subprocess.check_output(
        [sys.executable, "-c", code], text=True, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert f"'gpu': {gpu!r}" in told


def test_more_is_asked_of_finished_runs(toy):
    """A table in results, more evaluation, another place: nothing is trained again."""
    assert bench().returncode == 0
    assert bench(results="kept").returncode == 0
    table = Path("kept/A-v0/toy/default-s2.json")
    assert json.loads(table.read_text())["evaluation"] == [k + 0.5 for k in range(20)]
    assert bench(results="kept", eval_episodes=3).returncode == 0
    assert json.loads(table.read_text())["evaluation"] == [0.5, 1.5, 2.5]
    Path("runs").rename("moved")
    assert bench(eval_episodes=3, runs_dir=Path("moved").absolute()).returncode == 0
    assert len(lines("starts.txt")) == len(lines("ends.txt")) == 2


def test_stopped_before_it_began(toy):
    """A job whose process gets SIGTERM before its program runs starts none and isn't done."""
    (job,) = plan(["A-v0"], "python toy.py --total-timesteps 3", range(1, 2), Path("runs"), "x", 0)
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
    done = bench(**flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(toy.iterdir()) == [toy / "toy.py"]


def test_one_folder_is_of_one_command(toy):
    assert bench(num_seeds=1).returncode == 0
    done = bench("python toy.py --total-timesteps 6", num_seeds=1)
    assert done.returncode == 2
    assert "was made by 'python toy.py --total-timesteps 5'" in done.stderr
    assert bench("python toy.py --total-timesteps 6", num_seeds=1, variant="six").returncode == 0
    assert [run.algorithm for run in data.find([Path("runs")])] == ["toy", "toy six"]


def link_out(path: Path):
    """A link to a file of someone else."""
    path.symlink_to(Path("outside.txt").absolute())


SPOILT = {  # what is in the place of what, and what is said of it
    "pipe for job.json": ("job.json", os.mkfifo, "no plain file: "),
    "circle for job.json": ("job.json", lambda path: path.symlink_to(path.name), "symbolic links"),
    "folder for job.json": ("job.json", Path.mkdir, "no plain file: "),
    "half a job.json": ("job.json", lambda path: path.write_text('{"done"'), "is no JSON object"),
    "deep job.json": ("job.json", lambda path: path.write_text("[" * 200_000), "is no JSON object"),
    "done in words": ("job.json", lambda path: path.write_text('{"done": "yes"}'), "is no bool"),
    "no list of starts": ("job.json", lambda path: path.write_text('{"starts": 5}'), "is no list"),
    "no starts": ("job.json", lambda path: path.write_text('{"starts": [5]}'), "is no dict"),
    "link for the lock": ("lock", link_out, "a link, which is not followed: "),
    "pipe for the lock": ("lock", os.mkfifo, "lock"),
    "folder for the lock": ("lock", Path.mkdir, "lock"),
    "link for the log": ("log.txt", link_out, "a link, which is not followed: "),
    "pipe for the log": ("log.txt", os.mkfifo, "log.txt"),
    "link for the run": ("run", lambda path: path.symlink_to("/tmp"), "a link, which is not foll"),
    "file for its folder": ("", Path.touch, "default-s2"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_job_is_named_and_the_others_are_done(toy, kind):
    name, make, said = SPOILT[kind]
    Path("outside.txt").write_text("precious")
    folder_of(2).parent.mkdir(parents=True)
    if name:
        folder_of(2).mkdir()
    make(folder_of(2) / name)
    done = bench(num_seeds=3, retries=0, results="kept")
    assert (done.returncode, done.stderr) == (1, "")
    assert "2 of 3 jobs done, 1 failed" in done.stdout
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("A-v0/toy/default-s2 failed: "))
    assert said in line
    assert sorted(row[1] for row in lines("ends.txt")) == ["1", "3"]
    assert sorted(path.name for path in Path("kept").rglob("*.json")) == [
        "default-s1.json",
        "default-s3.json",
    ]
    assert Path("outside.txt").read_text() == "precious"


def test_a_job_json_can_not_send_its_table_elsewhere(toy):
    assert bench(num_seeds=1).returncode == 0
    job = json.loads((folder_of(1) / "job.json").read_text())
    (folder_of(1) / "job.json").write_text(json.dumps(job | {"script": "../../../out"}))
    assert bench(num_seeds=1, results="a/b/kept").returncode == 0
    assert [str(path) for path in toy.rglob("*.csv.gz")] == [
        str(toy / "a/b/kept/A-v0/toy/default-s1.csv.gz")
    ]


def test_a_link_among_the_tables_is_replaced_not_followed(toy):
    Path("outside.txt").write_text("precious")
    Path("kept/A-v0/toy").mkdir(parents=True)
    for suffix in (".json", ".csv.gz"):
        link_out(Path(f"kept/A-v0/toy/default-s1{suffix}"))
    Path("kept/A-v0/toy/default-s1.json").unlink()
    assert bench(num_seeds=1, results="kept").returncode == 0
    assert Path("outside.txt").read_text() == "precious"
    assert [run.seed for run in data.find([Path("kept")])] == [1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("spoil", [os.mkfifo, lambda path: path.write_text('{"returns": 5}')])
def test_a_spoilt_evaluation_is_played_again(toy, spoil):
    assert bench(num_seeds=1).returncode == 0
    (folder_of(1) / "evaluation.json").unlink()
    spoil(folder_of(1) / "evaluation.json")
    assert bench(num_seeds=1, results="kept").returncode == 0
    assert len(lines("starts.txt")) == 1
    assert json.loads(Path("kept/A-v0/toy/default-s1.json").read_text())["evaluation"][:2] == [
        *(0.5, 1.5)
    ]


def test_what_is_written_is_json(toy):
    """Also where a program writes NaN, which JSON does not have."""
    Path("toy.py").write_text(
        TOY.replace(
            'info["args"] =',
            'info["final_return"] = [float("nan"), float("inf")]\n    info["args"] =',
        ).replace("episodic_return={k}.5", "episodic_return=nan")
    )

    def refused(constant: str):
        raise AssertionError(constant)

    assert bench(num_seeds=1, results="kept").returncode == 0
    assert "NaN" in (folder_of(1) / "run/run.json").read_text()
    for path in (folder_of(1) / "evaluation.json", Path("kept/A-v0/toy/default-s1.json")):
        told = json.loads(path.read_text(), parse_constant=refused)
    assert (told["final_return"], told["evaluation"]) == ([None, None], [None] * 20)
    (run,) = data.find([Path("kept")])
    assert len(run.evaluation) == 20 and run.score("evaluation") != run.score("evaluation")


@pytest.mark.parametrize(
    "flags, each",
    [
        ("--env-workers 500", 500),
        ("--env-workers=500", 500),
        ("--env_workers=500", 500),
        ("--env-workers 500 --env-workers 700", 700),
        ("--env-workers 1", 1),
        ("--env-workers many", 1),
        ("--env-workers", 1),
        ("--env-workersmith 500", 1),
    ],
)
def test_more_cores_than_there_are(toy, flags, each):
    done = bench(f"python toy.py {flags}", workers=3, dry_run=[])
    assert done.returncode == 0
    cores = len(os.sched_getaffinity(0))
    warned = f"warning: --workers 3 times --env-workers {each} want {3 * each} cores, and there "
    wanted = f"{warned}are {cores}\n" if each > 1 else ""
    assert done.stderr == wanted


def test_as_many_cores_as_there_are_need_no_warning(capsys):
    cores = len(os.sched_getaffinity(0))
    warn_of_cores(["python", "toy.py", "--env-workers", str(cores)], 1)
    assert capsys.readouterr().err == ""
    warn_of_cores(["python", "toy.py", "--env-workers", str(cores + 1)], 1)
    assert capsys.readouterr().err.count("\n") == 1


def test_gpus_are_dealt_out(toy, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert gpus_here() == ["4", "6"]
    command = "python toy.py --total-timesteps 3 --tick 0.1"

    def dealt(env_id: str, workers: int, each: int, jobs: int) -> list[str]:
        """What CUDA_VISIBLE_DEVICES was in each job."""
        left = plan([env_id], command, range(jobs), Path("runs"), "default", 0)
        place = Local(workers, gpus_here(), each)
        place.start(left)
        wait_for(lambda: place.ended(left) == left)
        text = Path("starts.txt").read_text()
        return sorted(line.split(" ")[-1] for line in text.splitlines() if env_id in line)

    assert dealt("A-v0", 3, 1, 3) == ["4", "4", "6"]
    assert dealt("B-v0", 1, 2, 2) == ["4,6", "4,6"]
    with pytest.raises(SystemExit):
        Local(1, gpus_here(), 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5e1,MIG-77")  # by name
    assert dealt("C-v0", 2, 1, 4) == ["GPU-5e1", "GPU-5e1", "MIG-77", "MIG-77"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # all hidden by the user
    assert dealt("D-v0", 2, 1, 2) == ["", ""]


def test_a_queue_that_cant_be_read_gets_no_second_array(toy, monkeypatch, capsys):
    (Path("bin")).mkdir()
    for name in ("squeue", "sbatch", "srun", "scontrol"):
        Path("bin", name).write_text("#!/bin/sh\necho 'Unable to contact controller' >&2; exit 1\n")
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    jobs = plan(["A-v0"], "python toy.py --total-timesteps 3", range(2), Path("runs"), "x", 0)
    place = Slurm(Path("runs"), 1, 60, ())
    with pytest.raises(SystemExit):
        place.start(jobs)
    assert "squeue: Unable to contact controller" in capsys.readouterr().err


def test_two_harnesses_share_the_work(toy):
    command = "python toy.py --total-timesteps 10 --tick 0.1"
    first, second = (background(command, num_seeds=3, workers=2) for _ in range(2))
    assert first.wait(90) == second.wait(90) == 0
    check_whole([1, 2, 3], 10)
    assert len(lines("starts.txt")) == 3


def test_a_command_can_be_stopped_before_any_job_is_handed_over():
    assert Local(1, [], 1).stop() == "stopped; the same command goes on"


def test_ctrl_c_while_jobs_are_handed_over(monkeypatch):
    """The job that a worker has begun by then is told to stop, and so ends."""
    place, ended = Local(1, [], 1), []

    class Job:
        stopped = False

        def __call__(self):
            late = time.monotonic() + 20
            while not self.stopped and time.monotonic() < late:
                time.sleep(0.01)
            ended.append(self.stopped)

        def stop(self):
            self.stopped = True

    def submit(*work):
        handed_over(*work)
        raise KeyboardInterrupt

    handed_over = place.pool.submit
    monkeypatch.setattr(place.pool, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        place.start([Job()])
    wait_for(lambda: not place.pool._work_queue.qsize())
    place.stop()
    assert ended == [True]


def test_ctrl_c_ends_a_command_that_waits_for_another(toy):
    command = "python toy.py --total-timesteps 40 --tick 0.1"
    first = background(command, num_seeds=1)
    wait_for(lambda: lines("starts.txt"))
    second = background(command, num_seeds=1)
    wait_for(lambda: "runs already" in Path("out.txt").read_text())
    second.send_signal(signal.SIGINT)
    assert second.wait(10) == 130, Path("out.txt").read_text()
    assert locked(folder_of(1)) and not lines("ends.txt")
    assert first.wait(60) == 0
    check_whole([1], 40)
    assert len(lines("starts.txt")) == 1


def test_many_commands_at_once_in_a_new_folder(toy):
    """All make the same folders and write the same files at the same moment."""
    command = "python toy.py --total-timesteps 3"
    harnesses = [background(command, num_seeds=2, workers=2, eval_episodes=0) for _ in range(4)]
    assert [harness.wait(120) for harness in harnesses] == [0] * 4, Path("out.txt").read_text()
    check_whole([1, 2], 3)
    assert not list(Path("runs").rglob("job.json?*"))
    writes = [(Path("shared.json"), {"writer": k}) for k in range(100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_json, *zip(*writes, strict=True)))  # raises what any of them did
    assert json.loads(Path("shared.json").read_text()).keys() == {"writer"}


def test_tail_reads_the_end_of_a_file(toy):
    assert tail(Path("log")) == []
    Path("log").write_text("a\n" * 5000 + "10%\r20%\r\n\nlast\n")
    assert tail(Path("log"), 3) == ["10%", "20%", "last"]


# --- with real scripts, on Slurm ------------------------------------------------------------------

REAL = "python ppo.py --total-timesteps 12000 --num-envs 4 --num-steps 64 --checkpoint-interval 2"


@pytest.mark.slow
def test_real_runs_cut_off_give_the_same_table(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = {"env_ids": ["CartPole-v1"], "workers": 2, "eval_episodes": 3}
    assert bench(REAL, runs_dir=tmp_path / "whole", **flags).returncode == 0
    harness = subprocess.Popen(words(REAL, runs_dir=tmp_path / "cut", **flags), env=ENV)
    runs = [tmp_path / "cut/CartPole-v1/ppo" / f"default-s{seed}/run" for seed in (1, 2)]
    wait_for(lambda: all((run / "episodes.csv").exists() for run in runs))
    wait_for(lambda: all(len(rows(run)) > 40 for run in runs))
    harness.kill()
    for pid in [path.name for path in Path("/proc").glob("[0-9]*")]:
        command = Path(f"/proc/{pid}/cmdline")
        if str(runs[0]) in (command.read_text() if command.exists() else ""):
            os.kill(int(pid), signal.SIGKILL)
    assert bench(REAL, runs_dir=tmp_path / "cut", **flags).returncode == 0
    whole, cut = (data.find([tmp_path / name]) for name in ("whole", "cut"))
    assert [run.seed for run in cut] == [1, 2]
    for one, other in zip(whole, cut, strict=True):
        assert one.status == other.status == "finished"
        assert one.returns.tolist() == other.returns.tolist()
        assert one.steps.tolist() == other.steps.tolist()
        assert one.evaluation.tolist() == other.evaluation.tolist()


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
    monkeypatch.setitem(ENV, "PYTHONPATH", f"{ROOT}:{tmp_path}")
    assert bench(command, **flags, results="kept").returncode == 0
    folder = Path("runs/Mine-v0/ppo_continuous_action/default-s1")
    info = data.read_json(folder / "run" / "run.json")
    (folder / "run" / "run.json").write_text(json.dumps(info | {"status": "running"}))
    write_json(folder / "job.json", Work(folder, None).read() | {"done": False})
    assert bench(command, **flags).returncode == 0
    assert "--resume" in (folder / "log.txt").read_text()
    (run,), (kept,) = (data.find([Path(name)]) for name in ("runs", "kept"))
    assert run.status == "finished" and len(run.evaluation) == 2
    assert run.evaluation.tolist() == kept.evaluation.tolist()
    assert kept.info["final_return"] == pytest.approx(kept.score("training"), abs=0.01)
    assert kept.info["versions"]["mujoco"] == metadata.version("mujoco")
    other = bench(command, **flags | {"env_ids": ["other:Mine-v0"]})
    assert other.returncode == 2 and "for mine:Mine-v0; give another" in other.stderr


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
    """Acceptance 3, on two nodes."""
    monkeypatch.chdir(ROOT)
    flags = {"env_ids": ["CartPole-v1"], "workers": 2, "eval_episodes": 3}
    for place in ("local", "slurm"):
        done = bench(REAL, runs_dir=tmp_path / place, cluster=place, **flags)
        assert done.returncode == 0, done.stdout + done.stderr
    local, slurm = (data.find([tmp_path / place]) for place in ("local", "slurm"))
    assert [run.returns.tolist() for run in local] == [run.returns.tolist() for run in slurm]
    assert [run.evaluation.tolist() for run in local] == [r.evaluation.tolist() for r in slurm]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["requeue", "warning", "cancel"])
def test_slurm_job_goes_on(cluster, toy, how):
    """Requeued by an administrator, warned of its time limit, cancelled; and the harness killed."""
    command = "python toy.py --total-timesteps 40 --tick 0.25"
    harness = background(command, num_seeds=1, cluster="slurm")
    wait_for(lambda: lines("starts.txt"))
    time.sleep(2.0)
    job = squeue().split()[0]
    order = {
        "requeue": ["scontrol", "requeue", job],
        "warning": ["scancel", "--signal=USR2", job],
        "cancel": ["scancel", job],
    }
    if how == "requeue":
        harness.kill()
        harness.wait()
    subprocess.run(order[how], check=True)
    if how == "requeue":
        harness = background(command, num_seeds=1, cluster="slurm")
        time.sleep(5.0)
        assert len(squeue().splitlines()) == 1  # not submitted twice
    # Slurm holds a requeued job back for two minutes
    assert harness.wait(300) == 0, Path("out.txt").read_text()
    check_whole([1], 40)
    assert len(lines("starts.txt")) == 2
    assert int(lines("starts.txt")[1][2]) > 3
    assert json.loads((folder_of(1) / "job.json").read_text())["done"]


@pytest.mark.slow
def test_slurm_array_has_no_more_workers_than_asked(cluster, toy):
    flags = {"cluster": "slurm", "sbatch": ["comment=four seeds", "exclusive"]}
    done = bench("python toy.py --total-timesteps 5 --tick 0.2", num_seeds=4, **flags)
    assert done.returncode == 0
    check_whole([1, 2, 3, 4], 5)
    script = next(Path("runs/submitit").glob("*_submission.sh")).read_text()
    for flag in ("array=0-3%1", "comment='four seeds'", "exclusive", "requeue", "time=1440"):
        assert f"#SBATCH --{flag}\n" in script
    assert shlex.split(script[script.index("srun") :])[-1].endswith("runs/submitit")
