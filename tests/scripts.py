"""Every script, each with an environment of a few steps an episode: an iteration takes some 20 ms.

train(script, folder)    two iterations
resume(script, folder)   the run goes on
refused(capfd, "no such game", train, script, folder, "--env-id Nothing-v0")
"""

import importlib
import os
import sys
import time
from multiprocessing import forkserver as server
from pathlib import Path
from types import ModuleType

import envpool
import numpy as np
import pytest
from program import ROOT, toy

# environments of several agents, for this process and for those that it starts
os.environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"

SPAN = "--num-minibatches 2 --update-epochs 1 --no-cuda --checkpoint-interval 2"
STEPS_OF_8 = f"--num-envs 2 --num-steps 8 --num-threads 1 {SPAN}"
WHOLE_EPISODES = "--env-id toys:Walk-v0 --num-envs 2 --no-cuda --checkpoint-interval 2"
ENVPOOL = f"--num-envs 4 --num-steps 8 {SPAN} --num-threads 1 --env-threads 1"
SCRIPTS = {  # flags of a small run; episodes of toys.py have 2 to 5 steps
    "ppo": f"--env-id toys:Turn-v0 {STEPS_OF_8}",
    "ppo_continuous_action": f"--env-id toys:Walk-v0 {STEPS_OF_8}",
    "ppo_kl_adaptive": f"{WHOLE_EPISODES} -b 4 --update-epochs 1 --value-epochs 1 -m 2",
    "ppo_cma": f"{WHOLE_EPISODES} --iter-steps 16 --n-updates 2",
    "ppo_atari_multigpu": ENVPOOL,
    "ppo_continuous_action_warp": (
        f"--env-id Pendulum-v1 --num-envs 4 --num-steps 8 {SPAN} --hidden 8"
    ),
    "ppo_pixels": f"--env-id toys:Walk-v0 {STEPS_OF_8}",
    "ppo_lstm": f"--env-id toys:Walk-v0 {STEPS_OF_8}",
    "ppo_pettingzoo": f"--env-id toys:make {STEPS_OF_8}",
}
SMALL = SCRIPTS | {  # three scripts of the old form leave soon
    "ppo_atari_lstm": ENVPOOL,
    "ppo_procgen": f"{ENVPOOL} --num-levels 2 --eval-interval 1 --eval-episodes 2",
    "ppo_pettingzoo_ma_atari": (
        f"--env-id duel_v0 --num-envs 4 --num-steps 8 {SPAN} --num-threads 1 --eval-episodes 2 "
        "--eval-interval 99"
    ),
}
STEPS = dict.fromkeys(SMALL, 16) | {  # of an iteration; rows after an episode's end count in games
    "ppo_atari_multigpu": 32, "ppo_atari_lstm": 32, "ppo_procgen": 32,
    "ppo_pettingzoo_ma_atari": 32, "ppo_continuous_action_warp": 32,
}  # fmt: skip
WHOLE = ["ppo_kl_adaptive", "ppo_cma"]  # whole episodes: STEPS is about right
GYMNASIUM = ["ppo", "ppo_continuous_action", *WHOLE, "ppo_pixels", "ppo_lstm"]
PARALLEL = [*GYMNASIUM, "ppo_pettingzoo"]  # with --env-workers
EVERY = pytest.mark.parametrize("script", SMALL)


class Duel:
    """What ppo_pettingzoo_ma_atari.py needs of a game of PettingZoo and its ale. Player 0 gets 3
    points a frame, player 1 one; who takes action 2 gets 5 more. Player 1 dies in frame `death`,
    the game ends in `end`."""

    possible_agents, action_mapping = ("first_0", "second_0"), np.arange(4)
    death, end = 10, 22

    def __init__(self):
        self.ale, self.t, self.games = self, 0, 0

    def getScreenDims(self):
        return 160, 210

    def getScreenGrayscale(self):
        return np.full((210, 160, 1), (self.t * 7 + self.games) % 256, np.uint8)

    def getScreenRGB(self):
        return np.zeros((210, 160, 3), np.uint8)

    def reset_game(self):
        self.t, self.games = -100, self.games + 1

    def allLives(self):
        return np.array([0, -1 if self.t >= self.death else 0])

    def game_over(self):
        return self.t >= self.end

    def act(self, actions):
        if self.t < 0:  # no-ops
            assert not actions.any()
            return np.zeros(2, np.intc)
        assert not self.game_over()
        assert self.t < self.death or actions[1] == 0  # the dead do nothing
        self.t += 1
        return np.array([3, 1]) + 5 * (np.asarray(actions) == 2)

    def reset(self, seed):
        self.reset_game()
        self.games = seed % 100

    def clone_full_state(self):
        return self.games

    def restore_full_state(self, state):
        self.games = state

    def close(self):
        pass


def small_environments(monkeypatch):
    """EnvPool's games are toys, and --env-id duel_v0 and other_v0 are Duels; ppo_cma.py learns its
    first policy in no time instead of 4 s."""
    monkeypatch.setattr(envpool, "make", toy)
    cma = importlib.import_module("ppo_cma")
    players = importlib.import_module("ppo_pettingzoo_ma_atari")
    monkeypatch.setattr(cma, "pretrain_policy", lambda *_: None)
    module = ModuleType("pettingzoo.atari.duel_v0")

    def parallel_env(**more):
        game = Duel()
        game.unwrapped = game
        return game

    module.parallel_env = parallel_env
    for name in ("duel_v0", "other_v0"):
        monkeypatch.setitem(sys.modules, f"pettingzoo.atari.{name}", module)
    plain = players.Envs.reset

    def reset(envs, g):  # the clock starts when the no-ops are over
        plain(envs, g)
        envs.ales[g].t = 0

    monkeypatch.setattr(players.Envs, "reset", reset)


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
    """The process from which workers are forked has imported all scripts: it starts once, not for
    each run."""
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
