"""What measures on a GPU, tried without one; and the Slurm script's port."""

import os
import subprocess

from harness import ROOT

PUBLISHED = ROOT / "benchmark/published"


def test_two_jobs_of_slurm_do_not_meet(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", 'echo "$*"'), ("scontrol", "echo node7; echo node8")):
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
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
