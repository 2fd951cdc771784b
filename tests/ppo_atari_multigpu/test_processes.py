"""ppo_atari_multigpu.py under torchrun and Slurm: restarts, signals, faults, two nodes. Its workers
play Toys."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from program import ROOT, free_port, rows, scalars, status
from scripts import SMALL, train

import ppo_atari_multigpu as script

SCRIPT = Path(script.__file__)
STEPS = 32  # of an iteration
pytestmark = pytest.mark.slow

# A worker that plays Toys, and in a step of its choice does something else
WORKER = """
import atexit, os, runpy, signal, sys, time
from torch import distributed
atexit.register(lambda: distributed.is_initialized() and print("the process group is open"))
sys.path[:0] = {paths!r}
import envpool
from program import Toy
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not os.path.exists("restarted")
rank, calls = int(os.environ["RANK"]), 0

class Faulty(Toy):
    def step(self, actions):
        global calls
        calls += 1
        {fault}
        return super().step(actions)

envpool.make = Faulty
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
KILL = "if first and rank == 1 and calls == 8 * 5 + 3: os.kill(os.getpid(), signal.SIGKILL)"
ALONE = "--standalone --nproc-per-node=2"


def launch(folder: Path, flags: str, fault: str = "pass", torchrun: str = ALONE):
    """Start torchrun in a folder, with a worker that has this fault."""
    worker = folder / "worker.py"
    paths = [str(ROOT), str(ROOT / "tests")]
    worker.write_text(WORKER.format(paths=paths, fault=fault, script=str(SCRIPT)))
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun.split(), str(worker)]
    flags = f"{SMALL['ppo_atari_multigpu']} --run-dir run {flags}"
    with (folder / "log").open("a") as log:
        return subprocess.Popen([*command, *flags.split()], cwd=folder, stdout=log, stderr=log)


def end_of(*processes: subprocess.Popen, timeout: float = 240) -> list[int]:
    try:
        return [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def wait_for(condition, seconds: float = 120):
    end = time.time() + seconds
    while not (found := condition()):
        assert time.time() < end
        time.sleep(0.1)
    return found


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(number) for number in found.stdout.split()]


def check_logs(folder: Path, iterations: int):
    """Every step is logged once, and the checkpoint is of the last."""
    found = scalars(folder)
    steps = [step for step, _ in found["losses/entropy"]]
    assert len(set(steps)) == len(steps) == iterations
    assert script.load_checkpoint(folder)["counters"][:2] == (steps[-1], iterations)
    episodes = [(int(step), float(score)) for step, score, _ in rows(folder)[1:]]
    assert [step for step, _ in episodes] == sorted(step for step, _ in episodes)
    scores = {step: [] for step, _ in episodes}  # of those that end at one step: their mean
    for step, score in episodes:
        scores[step].append(score)
    means = [(step, np.mean(scores[step])) for step in sorted(scores)]
    np.testing.assert_allclose(found["charts/episodic_return"], means, rtol=1e-6)
    assert max(np.diff([0, *steps])) <= steps[0] * 1.3


def test_a_killed_rank_brings_all_back_from_the_last_checkpoint(tmp_path):
    process = launch(tmp_path, f"--total-timesteps {8 * STEPS}", KILL, f"{ALONE} --max-restarts=3")
    assert end_of(process) == [0], (tmp_path / "log").read_text()
    check_logs(tmp_path / "run", 8)
    assert status(tmp_path / "run") == "finished"
    begun = re.findall(r"iterations (\d+) to 8", (tmp_path / "log").read_text())
    assert begun == ["0", "4"]


def test_every_restart_comes_up(tmp_path):
    """Torchrun's store still has the addresses of the dead (pytorch issue 135712)."""
    fault = "if rank == 0 and int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 4: os._exit(1)"
    torchrun = f"{ALONE} --max-restarts=4"
    process = launch(tmp_path, f"--total-timesteps {2 * STEPS}", fault, torchrun)
    assert end_of(process) == [0], (tmp_path / "log").read_text()
    check_logs(tmp_path / "run", 2)


WRONG = {
    "--num-envs 5": "not the same for", "--gamma 2": "not in 0 ... 1",
    "--env-id Brekout-v5": "no such Atari game", "--epsilon 1": "options: --epsilon",
}  # fmt: skip


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_arguments_are_said_once(flags, tmp_path):
    (returncode,) = end_of(launch(tmp_path, flags))
    log = (tmp_path / "log").read_text()
    assert returncode != 0
    assert log.count("exitcode  : 2") in (1, 2), log  # torchrun may end the other itself
    assert log.count(WRONG[flags]) == 1, log
    assert "the process group is open" not in log
    assert "Traceback" not in log.partition("torch/distributed/elastic")[0]
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_begun_again(tmp_path, small):
    train("ppo_atari_multigpu", tmp_path / "run", iterations=3)
    process = launch(tmp_path, f"--total-timesteps {8 * STEPS}")
    assert end_of(process) != [0]
    assert (tmp_path / "log").read_text().count("a finished run is there") == 1
    check_logs(tmp_path / "run", 3)


NAN = """import numpy as np; np.sign = lambda x: x
        self.number = self.number * (float('nan') if (rank, calls) == (1, 20) else 1.0)"""
BROKEN = "if rank == {} and calls == 20: raise ValueError('the game broke')"
FAULTS = [
    (BROKEN.format(0), ["ValueError: the game broke"]),
    (BROKEN.format(1), ["ValueError: the game broke"]),
    (NAN, ["2: rewards is not finite", "2: losses/value_loss is not finite"]),  # ranks 1 and 0
]


@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=["rank 0", "rank 1", "not finite"])
def test_a_fault_in_one_rank_ends_all_before_it_is_saved(fault, says, tmp_path):
    started = time.time()
    assert end_of(launch(tmp_path, f"--total-timesteps {8 * STEPS}", fault)) != [0]
    assert time.time() - started < 120
    log = (tmp_path / "log").read_text()
    assert [text for text in says if text not in log] == []
    assert status(tmp_path / "run") == "failed"
    assert script.load_checkpoint(tmp_path / "run")["counters"][1] == 2


@pytest.mark.parametrize("to", ["launcher", "everyone"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves(number, to, tmp_path):
    """Slurm sends it to everyone; the launcher then sends it to its workers once more."""
    flags = f"--total-timesteps {9999 * STEPS} --checkpoint-interval 9999"
    process = launch(tmp_path, flags, "time.sleep(0.1)")
    csv_file = tmp_path / "run" / "episodes.csv"
    wait_for(lambda: csv_file.exists() and csv_file.read_text().count("\n") > 6)
    workers = children(process.pid)
    assert len(workers) == 2
    for pid in workers if to == "everyone" else []:
        os.kill(pid, number)
        time.sleep(0.1)
    process.send_signal(number)
    assert end_of(process, timeout=60) != [0]
    iteration = script.load_checkpoint(tmp_path / "run")["counters"][1]
    assert iteration > 0, (tmp_path / "log").read_text()
    assert status(tmp_path / "run") == "running"
    check_logs(tmp_path / "run", iteration)
    assert (tmp_path / "log").read_text().count("go on with: ") == 1


def test_a_signal_to_one_rank_stops_all(tmp_path):
    fault = "if rank == 1 and calls == 20: os.kill(os.getpid(), signal.SIGUSR1)"
    assert end_of(launch(tmp_path, f"--total-timesteps {8 * STEPS}", fault)) != [0]
    check_logs(tmp_path / "run", 3)
    assert status(tmp_path / "run") == "running"


def test_a_run_of_one_process_goes_on_with_two(tmp_path, small):
    train("ppo_atari_multigpu", tmp_path / "run", iterations=3)
    flags = f"{SMALL['ppo_atari_multigpu']} --resume run --total-timesteps {5 * STEPS}"
    command = [sys.executable, "-m", "torch.distributed.run", *ALONE.split(), str(SCRIPT)]
    done = subprocess.run([*command, *flags.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_logs(tmp_path / "run", 5)
    assert "iterations 3 to 5" in done.stdout


# --- two nodes ------------------------------------------------------------------------------------
def two_nodes(tmp_path: Path, flags: str, fault: str = "pass", restarts: int = 0) -> list:
    torchrun = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} "
    torchrun += f"--rdzv-id=7 --max-restarts={restarts} --nproc-per-node=1"
    return [launch(tmp_path, flags, fault, torchrun) for _ in range(2)]


def test_two_launchers_are_two_nodes(tmp_path):
    launchers = two_nodes(tmp_path, f"--total-timesteps {6 * STEPS}")
    assert end_of(*launchers) == [0, 0], (tmp_path / "log").read_text()
    check_logs(tmp_path / "run", 6)
    log = (tmp_path / "log").read_text()
    assert log.count("episodic_return=") == len(rows(tmp_path / "run")) - 1
    # in all 4 environments 48 rows, of which an end makes one in 4 (or 5) junk
    steps = script.load_checkpoint(tmp_path / "run")["counters"][0]
    assert steps == 4 * 48 - 2 * (48 // 4 + 48 // 5)


def test_a_rank_killed_on_the_other_node_brings_all_back(tmp_path):
    """Torchrun of the first node restarts its worker because of the second node's, which is not
    counted as a restart there."""
    fault = (
        "if first and rank == 0 and calls > 42: time.sleep(1)\n"
        "        if first and rank == 1 and calls == 43:\n"
        "            open('restarted', 'w'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    launchers = two_nodes(tmp_path, f"--total-timesteps {8 * STEPS}", fault, restarts=3)
    assert end_of(*launchers) == [0, 0], (tmp_path / "log").read_text()
    check_logs(tmp_path / "run", 8)


def test_only_the_first_node_needs_to_see_the_folder(tmp_path):
    """A run that was cut off goes on also where the others find nothing."""
    folders = [tmp_path / name for name in "ab"]
    torchrun = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} "
    torchrun += "--rdzv-id=7 --nproc-per-node=1 --node-rank="
    kill = "if calls == 8 * 5 + 3: os.kill(os.getpid(), signal.SIGUSR1)"
    for fault, iterations in ((kill, 6), ("pass", 8)):
        launchers = []
        for folder in folders:
            folder.mkdir(exist_ok=True)
            launchers.append(
                launch(folder, f"--total-timesteps {8 * STEPS}", fault, torchrun[:-13])
            )
        codes = end_of(*launchers)
        (seen,) = [folder / "run" for folder in folders if (folder / "run").exists()]
        assert (codes == [0, 0]) == (iterations == 8), (seen.parent / "log").read_text()
        check_logs(seen, iterations)
