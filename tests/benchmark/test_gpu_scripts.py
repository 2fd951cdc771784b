"""What measures on a GPU, tried without one; and the Slurm script's port."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from harness import ROOT, table, write_run

from benchmark.published.studies import gpu_profile

PUBLISHED = ROOT / "benchmark/published"


def program(folder, name: str, text: str):
    """A program of this name, first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_gpu_steps_are_done_once_and_in_order(tmp_path):
    here = tmp_path / "benchmark/published"
    here.mkdir(parents=True)
    shutil.copy(PUBLISHED / "gpu.sh", here)
    said = tmp_path / "said"
    text = f'echo "$*" >>{said}; echo "done $*"; [[ "$*" != *Ant-v4* ]]'
    env = program(tmp_path / "bin", "python", text)

    def turn(*names: str) -> list[str]:
        said.write_text("")
        command = ["bash", str(here / "gpu.sh"), *names]
        status = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True).returncode
        assert status in (0, 1)
        return [line for line in said.read_text().splitlines() if not line.startswith("-c ")]

    name = "tests-trains"
    assert len(turn(name)) == 1
    assert turn(name) == []  # its table is there
    tests = (here / f"results/gpu/{name}.txt").read_text()
    assert tests.startswith("done -m pytest -m gpu ")
    minutes = (here / "results/gpu/minutes.csv").read_text().splitlines()
    assert [line.split(",")[1:2] + line.split(",")[3:] for line in minutes] == [[name, "0"]]
    first = turn()
    parts = ["ppo_atari_multigpu --env", "nproc-per-node=2"]
    parts += ["tests/ppo_", "gpu_warp", "HalfCheetah-v4 --tf32 --run-dir", "Ant-v4 --tf32"]
    parts += ["envpool:HalfCheetah-v4", "Pong-v5", "ppo_procgen"]
    places = [next(i for i, line in enumerate(first) if part in line) for part in parts]
    assert places == sorted(places)
    again = " ".join(turn("train-HalfCheetah-v4-tf32", "train-Ant-v4"))
    assert "Ant-v4" in again  # what failed is tried again
    assert "HalfCheetah-v4 --tf32 --run-dir" not in again


def toy_script(sleep, fails: bool):
    """A module with the parts of a script, whose iteration has 10 steps of 2 ms, acts 10 ms, learns
    30 ms and logs 5 ms."""

    def rollout(envs):
        for _ in range(10):
            envs.step()
        sleep(0.01)

    def train(args):
        if fails:
            raise RuntimeError("out of memory")
        for _ in range(10**6):
            script.rollout(script.Envs())
            script.update()
            sleep(0.005)

    script = SimpleNamespace(__name__="toy", rollout=rollout, train=train)
    script.Envs = type("Envs", (), {"step": lambda envs: sleep(0.002)})
    script.update = lambda: sleep(0.03)
    script.parse_args = lambda argv: SimpleNamespace(batch_size=130, argv=argv)
    return script


def test_time_of_an_iteration_by_its_parts(tmp_path, monkeypatch):
    now = [100.0]  # and the seconds that passed
    script, path = toy_script(now.append, fails=False), tmp_path / "t.csv"
    monkeypatch.setattr(gpu_profile, "time", SimpleNamespace(perf_counter=lambda: sum(now)))
    monkeypatch.setitem(sys.modules, "toy", script)
    rollout, step = script.rollout, script.Envs.step

    def profile(*flags: str) -> int:
        return gpu_profile.main(str(path), "0.3", "toy", *flags)

    assert profile("--fast", "--slow") == 0
    assert (script.rollout, script.Envs.step) == (rollout, step)  # all is as it was
    rows = table(path)
    assert [row["flags"] for row in rows] == ["--fast", "--slow"]
    parts = {"games": 20, "acting": 10, "learning": 30, "other": 5, "iteration": 65}
    assert {name: float(rows[0][f"{name}_ms"]) for name in parts} == parts
    assert rows[0]["steps_per_second"] == "2000"
    assert float(rows[0]["warm_seconds"]) == pytest.approx(gpu_profile.WARM * 0.065, abs=0.01)
    assert profile("--slow") == 0
    assert table(path) == rows  # measured already
    monkeypatch.setitem(sys.modules, "toy", toy_script(now.append, fails=True))
    assert profile("--other") == 1
    assert table(path) == rows


def test_when_a_training_reached_a_return(tmp_path):
    info = {"global_step": 2500, "wall_seconds": 26.0, "status": "running"}
    returns = [-21] * 100 + [19] * 150
    write_run(tmp_path / "run", 3, returns, 10, args={"env_id": "Pong-v5"}, **info)
    command = [
        sys.executable,
        "-m",
        "benchmark.published.studies.gpu_seconds",
        str(tmp_path / "run"),
    ]
    output = subprocess.check_output(command, text=True, cwd=ROOT)
    assert "seed 3: 2500 steps in 26.0 s, running" in output
    assert "10 steps/s in the second half" in output
    assert "19.00, mean of the last 100" in output
    assert "Pong-v5: 0 after 153 s" in output  # 53 of the last 100 games are won
    assert "Pong-v5: 20 after inf s" in output


def test_two_jobs_of_slurm_do_not_meet(tmp_path):
    program(tmp_path / "bin", "srun", 'echo "$*"')
    env = program(tmp_path / "bin", "scontrol", "echo node7; echo node8")
    env |= {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}

    def end_point(job: str, **more) -> str:
        command = ["bash", str(PUBLISHED / "ppo_atari_multigpu.slurm"), "--seed", "2"]
        told = env | {"SLURM_JOB_ID": job} | more
        words = subprocess.check_output(command, env=told, text=True, cwd=tmp_path).split()
        assert words[-4:] == ["--run-dir", f"runs/slurm-{job}", "--seed", "2"]
        return next(word for word in words if word.startswith("--rdzv-endpoint="))

    assert end_point("123456") == "--rdzv-endpoint=node7:23456"
    assert end_point("123457") == "--rdzv-endpoint=node7:23457"
    assert end_point("7", PORT="29500", HEAD="other") == "--rdzv-endpoint=other:29500"
