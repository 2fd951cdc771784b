"""Every script, each with an environment of a few steps an episode: an iteration takes some 20 ms.

train(script, folder)    two iterations
resume(script, folder)   the run goes on
refused(capfd, "no such game", train, script, folder, "--env-id Nothing-v0")
"""

import importlib
import os
import time
from multiprocessing import forkserver as server
from pathlib import Path

import envpool
import pytest
from program import ROOT, Toy

# environments of several agents, for this process and for those that it starts
os.environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"

SPAN = "--num-minibatches 2 --update-epochs 1 --no-cuda --checkpoint-interval 2"
STEPS_OF_8 = f"--num-envs 2 --num-steps 8 --num-threads 1 {SPAN}"
WHOLE_EPISODES = "--env-id toys:Walk-v0 --num-envs 2 --no-cuda --checkpoint-interval 2"
SMALL = {  # flags of a small run; episodes of toys.py have 2 to 5 steps
    "ppo": f"--env-id toys:Turn-v0 {STEPS_OF_8}",
    "ppo_continuous_action": f"--env-id toys:Walk-v0 {STEPS_OF_8}",
    "ppo_kl_adaptive": f"{WHOLE_EPISODES} -b 4 --update-epochs 1 --value-epochs 1 -m 2",
    "ppo_cma": f"{WHOLE_EPISODES} --iter-steps 16 --n-updates 2",
    "ppo_atari_multigpu": (f"--num-envs 4 --num-steps 8 {SPAN} --num-threads 1 --env-threads 1"),
    "ppo_continuous_action_warp": (
        f"--env-id Pendulum-v1 --num-envs 4 --num-steps 8 {SPAN} --hidden 8"
    ),
    "ppo_pixels": f"--env-id toys:Walk-v0 {STEPS_OF_8}",
    "ppo_lstm": f"--env-id toys:Walk-v0 {STEPS_OF_8}",
    "ppo_pettingzoo": f"--env-id toys:make {STEPS_OF_8}",
}
SCRIPTS = [*SMALL]
STEPS = dict.fromkeys(SMALL, 16) | {  # of an iteration; rows after an episode's end count in games
    "ppo_atari_multigpu": 32, "ppo_continuous_action_warp": 32,
}  # fmt: skip
WHOLE = ["ppo_kl_adaptive", "ppo_cma"]  # whole episodes: STEPS is about right
GYMNASIUM = ["ppo", "ppo_continuous_action", *WHOLE, "ppo_pixels", "ppo_lstm"]
PARALLEL = [*GYMNASIUM, "ppo_pettingzoo"]  # with --env-workers
EVERY = pytest.mark.parametrize("script", SMALL)


def small_environments(monkeypatch):
    """EnvPool's games are toys; ppo_cma.py learns its first policy in no time instead of 4 s."""
    monkeypatch.setattr(envpool, "make", Toy)
    monkeypatch.setattr("ppo_cma.pretrain_policy", lambda *_: None)


def named(script: str) -> str:
    """The flag that names a module anew on resuming and playing."""
    flags = SMALL[script].split()
    return " ".join(flags[:2]) if ":" in flags[1] else ""


def parse(script: str, flags: str):
    return importlib.import_module(script).parse_args(flags.split())


def train(script: str, folder: Path, flags: str = "", iterations: int = 2) -> dict:
    """Train in this process; the final checkpoint."""
    module = importlib.import_module(script)
    total = iterations * STEPS[script]
    module.train(
        parse(script, f"{SMALL[script]} --run-dir {folder} --total-timesteps {total} {flags}")
    )
    return module.load_checkpoint(folder)


def resume(script: str, folder: Path, flags: str = "") -> dict:
    """Go on in this process, if no flag says otherwise up to the end; the final checkpoint."""
    module = importlib.import_module(script)
    module.train(parse(script, f"--resume {folder} {named(script)} {flags}"))
    return module.load_checkpoint(folder)


def evaluate(script: str, folder: Path, flags: str = "") -> list[float]:
    module = importlib.import_module(script)
    return module.evaluate(
        parse(script, f"--evaluate {folder} {named(script)} --no-cuda --eval-episodes 3 {flags}")
    )


def quick_workers(monkeypatch):
    """Workers are forked from a process that has imported all scripts, and starts only once."""
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{os.environ['PYTHONPATH']}")
        server.set_forkserver_preload([*PARALLEL, "toys", "pytest"])
        server.ensure_running()
    monkeypatch.setattr(server._forkserver, "ensure_running", lambda: None)  # in forks, too


def no_worker_stays(seconds: float = 20.0) -> bool:
    """Wait until all workers have ended."""
    pid = server._forkserver._forkserver_pid
    children = Path(f"/proc/{pid}/task/{pid}/children")  # Linux has it
    until = time.monotonic() + seconds
    while children.exists() and children.read_text():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def refused(capfd, says: str, call, *given) -> str:
    """The call ends with exit code 2 and one line that says this."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        call(*given)
    err = capfd.readouterr().err
    assert end.value.code == 2, err
    assert says in err
    assert err.count("\n") == 1, err
    return err
