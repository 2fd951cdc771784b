"""Every script, each with an environment of a few steps an episode: what the tests in every/ run.

train(script, folder)    an iteration of a script takes some 20 ms
go_on(script, folder)    the run is resumed
refused(capfd, "no such game", train, script, folder, "--env-id Nothing-v0")
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from multiprocessing import forkserver as server
from pathlib import Path
from types import ModuleType

import envpool
import gymnasium as gym
import numpy as np
import pytest
from program import ROOT, Clockwork, toy

# environments of several agents, for this process and for those that it starts
os.environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"

SPACES = {
    "Box": gym.spaces.Box(-1, 1, (1,)),
    "Choice": gym.spaces.Discrete(2),
    "Tuple": gym.spaces.Tuple([gym.spaces.Discrete(2)]),
    "Endless": gym.spaces.Box(-np.inf, np.inf, (1,)),
}
for name, space in SPACES.items():
    gym.register(f"Clock{name}-v0", Clockwork, kwargs={"action_space": space})

BATCH = "--num-minibatches 2 --update-epochs 1 --no-cuda --checkpoint-interval 2"
CLOCKS = f"--num-envs 2 --num-steps 22 {BATCH}"  # four episodes an iteration
ENVPOOL = f"--num-envs 4 --num-steps 8 {BATCH} --num-threads 1 --env-threads 1"
SMALL = {  # flags of a small run
    "ppo": f"--env-id ClockChoice-v0 {CLOCKS}",
    "ppo_continuous_action": f"--env-id ClockBox-v0 {CLOCKS}",
    "ppo_cma": (
        "--env-id ClockBox-v0 --num-envs 2 --iter-steps 40 --n-updates 2 --no-cuda "
        "--checkpoint-interval 2"
    ),
    "ppo_kl_adaptive": (
        "--env-id ClockBox-v0 --num-envs 2 -b 4 --update-epochs 1 --value-epochs 1 -m 2 --no-cuda "
        "--checkpoint-interval 2"
    ),
    "ppo_pixels": f"--env-id ClockBox-v0 {CLOCKS} --num-threads 1",
    "ppo_lstm": f"--env-id ClockBox-v0 {CLOCKS} --num-threads 1",
    "ppo_pettingzoo": f"--env-id agents_toy:make --num-envs 4 --num-steps 16 {BATCH}",
    "ppo_atari_multigpu": ENVPOOL,
    "ppo_atari_lstm": ENVPOOL,
    "ppo_procgen": f"{ENVPOOL} --num-levels 2 --eval-interval 1 --eval-episodes 2",
    "ppo_pettingzoo_ma_atari": (
        f"--env-id duel_v0 --num-envs 4 --num-steps 8 {BATCH} --num-threads 1 --eval-episodes 2 "
        "--eval-interval 99"
    ),
    "ppo_continuous_action_warp": (
        f"--env-id Pendulum-v1 --num-envs 4 --num-steps 8 {BATCH} --hidden 8"
    ),
}
STEPS = {  # of an iteration; rows after an episode's end count in games
    "ppo": 44, "ppo_continuous_action": 44, "ppo_cma": 40, "ppo_kl_adaptive": 40,
    "ppo_pixels": 44, "ppo_lstm": 44, "ppo_pettingzoo": 64,
    "ppo_atari_multigpu": 32, "ppo_atari_lstm": 32, "ppo_procgen": 32,
    "ppo_pettingzoo_ma_atari": 32, "ppo_continuous_action_warp": 32,
}  # fmt: skip
WHOLE = ["ppo_cma", "ppo_kl_adaptive"]  # whole episodes
GYMNASIUM = ["ppo", "ppo_continuous_action", *WHOLE, "ppo_pixels", "ppo_lstm"]
PARALLEL = [*GYMNASIUM, "ppo_pettingzoo"]  # with --env-workers
POOLS = ["ppo_atari_multigpu", "ppo_atari_lstm", "ppo_procgen"]  # after a resume games are new ones
EVERY = pytest.mark.parametrize("script", SMALL)
NAMED = {"ppo_pettingzoo": "--env-id agents_toy:make"}  # a module is named again each time
# Environments that worker processes find, too
LENGTHS = "episodes_toy:Lengths-v0"


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
    monkeypatch.setattr(cma, "pretrain_policy", lambda agent: None)
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


def parse(script: str, flags: str):
    return importlib.import_module(script).parse_args(flags.split())


def train(script: str, folder: Path, flags: str = "", iterations: int = 2) -> dict:
    """Train in this process; the final checkpoint."""
    module = importlib.import_module(script)
    total = iterations * STEPS[script]
    flags = f"{SMALL[script]} --run-dir {folder} --total-timesteps {total} {flags}"
    module.train(parse(script, flags))
    return module.load_checkpoint(folder)


def go_on(script: str, folder: Path, flags: str = "", iterations: int = 3) -> dict:
    """Resume in this process, up to so many iterations in all; the final checkpoint."""
    module = importlib.import_module(script)
    named = NAMED.get(script, "")
    total = iterations * STEPS[script]
    flags = f"--resume {folder} {named} --total-timesteps {total} {flags}"
    module.train(parse(script, flags))
    return module.load_checkpoint(folder)


def evaluate(script: str, folder: Path, flags: str = "") -> list[float]:
    module = importlib.import_module(script)
    named = NAMED.get(script, "")
    return module.evaluate(parse(script, f"--evaluate {folder} {named} --no-cuda {flags}"))


def lengths(script: str, flags: str = "", **kwargs) -> str:
    """Flags for three environments with episodes of 1 to 8 steps, which worker processes find."""
    kwargs |= {"actions": "choices"} if script == "ppo" and "actions" not in kwargs else {}
    given = json.dumps(kwargs, separators=(",", ":"))
    return f"--env-id {LENGTHS} --num-envs 3 --env-kwargs {given} {flags}"


def quick_workers(monkeypatch):
    """Worker processes start from one that has imported the scripts, in no time instead of 4 s.
    They get what they do of it as they would: by a pipe, and from modules."""
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{os.environ['PYTHONPATH']}")
        server.set_forkserver_preload([*PARALLEL, "pytest"])
        server.ensure_running()
    monkeypatch.setattr(server._forkserver, "ensure_running", lambda: None)  # in forks, too
    plain = multiprocessing.get_context
    kinds = {"spawn": "forkserver"}
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda kind=None: plain(kinds.get(kind, kind))
    )


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def ended(pids: Path, seconds: float = 30.0) -> bool:
    """Wait until all processes are gone that had an environment of `lengths`."""
    until = time.monotonic() + seconds
    while any(alive(int(path.name)) for path in pids.iterdir()):
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
