"""ppo_atari_multigpu.py under torchrun and Slurm: restarts, signals, faults, two nodes. Its workers
play Toys."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from program import ROOT, end_of, free_port, rows, scalars, status
from scripts import SMALL

import ppo_atari_multigpu as script

SCRIPT = Path(script.__file__)
STEPS = 32  # of an iteration
pytestmark = pytest.mark.slow

# A worker that plays Toys, and in a step of its choice does something else
WORKER = """
import os, runpy, signal, sys, time
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


def check_logs(folder: Path, iterations: int):
    """Every step is logged once, and the checkpoint is of the last."""
    found, checkpoint = scalars(folder), script.load_checkpoint(folder)
    steps = [step for step, _ in found["losses/entropy"]]
    assert len(set(steps)) == len(steps) == iterations
    assert (checkpoint["global_step"], checkpoint["iteration"]) == (steps[-1], iterations)
    assert max(np.diff([0, *steps])) <= steps[0] * 1.3
    ends, returns, _ = np.array(rows(folder)[1:], float).T
    assert (np.diff(ends) >= 0).all()
    iteration = np.searchsorted(steps, ends)  # in which a game ended; TensorBoard has their mean
    means = [(steps[k], returns[iteration == k].mean()) for k in sorted({*iteration})]
    np.testing.assert_allclose(found["charts/episodic_return"], means, rtol=1e-6)


RESTARTS = [  # torchrun's store still has the addresses of the dead (pytorch issue 135712)
    "if first and rank == 1 and calls == 8 * 5 + 3: os.kill(os.getpid(), signal.SIGKILL)",
    "if rank == 0 and int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 4: os._exit(1)",
]


@pytest.mark.parametrize("fault", RESTARTS, ids=["killed", "ends"])
def test_restarts_go_on_from_the_last_checkpoint(fault, tmp_path):
    torchrun = f"{ALONE} --max-restarts=4"
    process = launch(tmp_path, f"--total-timesteps {8 * STEPS}", fault, torchrun)
    assert end_of(process) == [0], (tmp_path / "log").read_text()
    check_logs(tmp_path / "run", 8)
    assert status(tmp_path / "run") == "finished"


NAN = """import numpy as np; np.sign = lambda x: x
        self.number = self.number * (float('nan') if (rank, calls) == (1, 20) else 1.0)"""
BROKEN = "if rank == 1 and calls == 20: raise ValueError('the game broke')"
FAULTS = [
    (BROKEN, ["ValueError: the game broke"]),
    (NAN, ["2: rewards is not finite", "2: losses/value_loss is not finite"]),  # ranks 1 and 0
]


@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=["raises", "not finite"])
def test_a_fault_in_one_rank_ends_all_before_it_is_saved(fault, says, tmp_path):
    assert end_of(launch(tmp_path, f"--total-timesteps {8 * STEPS}", fault)) != [0]
    log = (tmp_path / "log").read_text()
    assert [text for text in says if text not in log] == []
    assert status(tmp_path / "run") == "failed"
    assert script.load_checkpoint(tmp_path / "run")["iteration"] == 2


SIGNALS = {  # Slurm sends it to everyone; the launcher then sends it to its workers once more
    "everyone": "if calls == 20: os.kill(os.getpid(), 15); rank or os.kill(os.getppid(), 15)",
    "one rank": "if rank == 1 and calls == 20: os.kill(os.getpid(), signal.SIGUSR1)",
}


@pytest.mark.parametrize("to", SIGNALS)
def test_a_signal_stops_all_and_saves(to, tmp_path):
    flags = f"--total-timesteps {9999 * STEPS} --checkpoint-interval 9999"
    assert end_of(launch(tmp_path, flags, SIGNALS[to])) != [0]
    log = (tmp_path / "log").read_text()
    iteration = script.load_checkpoint(tmp_path / "run")["iteration"]
    assert iteration > 0, log
    check_logs(tmp_path / "run", iteration)
    assert status(tmp_path / "run") == "running"
    assert log.count("go on with: ") == 1


def test_a_rank_killed_on_the_other_node_brings_all_back(tmp_path):
    """Torchrun of the first node restarts its worker, too, and does not count it as a restart."""
    fault = (
        "if first and rank == 0 and calls > 42: time.sleep(1)\n"
        "        if first and rank == 1 and calls == 43:\n"
        "            open('restarted', 'w'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    torchrun = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{free_port()} "
    torchrun += "--rdzv-id=7 --max-restarts=3 --nproc-per-node=1"
    flags = f"--total-timesteps {8 * STEPS}"
    nodes = [launch(tmp_path, flags, fault, torchrun) for _ in range(2)]
    assert end_of(*nodes) == [0, 0], (tmp_path / "log").read_text()
    check_logs(tmp_path / "run", 8)
