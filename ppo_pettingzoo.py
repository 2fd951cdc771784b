# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "pettingzoo>=1.27,<1.28", "mpe2>=1.1",
#                 "pygame-ce", "numpy", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for several agents with shared parameters (PettingZoo), in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. One network plays every agent, from the
agent's own observation and number (IPPO: de Witt et al. 2020). Every iteration:

    1. take T steps in each of N environments of A agents with actions a ~ pi(a | o)
    2. A = GAE(lambda) for each agent: its death ends its chain, a time limit bootstraps from the
       value of the true last observation; rows of the dead, of those who wait for their turn, and
       the row after an episode's end (autoreset's) are never learned from
    3. for K epochs or until KL > target_kl, for each minibatch, with A normalised, r = pi / pi_old:
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_pettingzoo.py --env-id mpe2.simple_speaker_listener_v4    # or sisl/multiwalker_v9
    python ppo_pettingzoo.py --evaluate runs/RUN    # --resume runs/RUN goes on
    python ppo_pettingzoo.py --env-id mpe2.simple_spread_v3 --team-reward --critic concatenated \
        --num-envs 128 --num-steps 25 --num-minibatches 1 --update-epochs 10     # as MAPPO does

Expect a team return of -32 over the last 100 episodes of the first (500,000 steps, 3 minutes on one
CPU core). Left out on purpose: recurrent policies, a network for each agent, past opponents,
images, --compile.
"""

import atexit
import contextlib
import fcntl
import importlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
import zipfile
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import gymnasium as gym
import numpy as np
import pettingzoo
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from pettingzoo.utils.conversions import turn_based_aec_to_parallel_wrapper
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one; networks this small gain little from it
    num_threads: int = 1  # CPU threads of torch; more than one rarely helps networks this small
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    quiet: bool = False  # print no line per episode
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, sampled and greedily, and exit
    eval_greedy: bool = False  # list the greedy episodes, not the sampled ones
    eval_episodes: int = 10  # episodes played by --evaluate, each way
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Environments
    env_id: str = "mpe2.simple_speaker_listener_v4"  # or sisl/pursuit_v5, your module:function
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"frame_skip": 2}'
    env_workers: int = 0  # processes that step the environments; 0: the main process
    num_envs: int = 16  # environments played side by side
    max_episode_steps: int | None = None  # truncate episodes after that many steps
    agent_id: bool = True  # agents see their number, one-hot; turn it off for dozens that are alike
    action_masks: bool = True  # actions that the environment marks as invalid get probability 0

    # Algorithm
    critic: str = "local"  # local: its agent's observation; concatenated: all; state: env.state()
    team_reward: bool = False  # sum the rewards over agents; a death then ends no return
    value_norm: bool | None = None  # scale returns; None: with a joint reward or critic
    total_timesteps: int = 500_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 1e-3  # Adam's learning rate in the first iteration
    num_steps: int = 128  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = True  # also clip the change of the value
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient of all parameters is scaled down to this norm
    target_kl: float | None = None  # stop the epochs once the mean approx_kl of one exceeds this
    log_std_init: float = -0.7  # Box actions: initial log standard deviation, in half boxes
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute the last fields; raise ValueError, which tyro shows, for wrong arguments."""
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "env_workers": 0, "log_std_init": -9}
        low |= {"minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {
            "gamma": 1,
            "gae_lambda": 1,
            "log_std_init": 9,
            "env_workers": max(self.num_envs, 0),
        }
        check(self, low, high)
        if self.critic not in ("local", "concatenated", "state"):
            raise ValueError(f"--critic {self.critic}: not local, concatenated or state")


def check(args, low: dict, high: dict):
    """Raise ValueError for a value of a wrong type, for a number out of its bounds (by default 1
    to 1e18, for fractions 0 to 1e18) and for flags that exclude each other."""
    for name, hint in get_type_hints(type(args)).items():
        flag = f"--{name.replace('_', '-')}"
        value = getattr(args, name)
        kinds = get_args(hint) or (hint,)  # types, or the values of a Literal
        types = tuple(kind for kind in kinds if isinstance(kind, type))
        whole = float in kinds and isinstance(value, int)
        truth = isinstance(value, bool) and bool not in kinds  # an int, to Python
        if truth or not (isinstance(value, types) or value in kinds or whole):
            raise ValueError(f"{flag} {value!r}: not of type {hint}")
        if type(value) in (int, float):
            least = low.get(name, 0 if float in kinds else 1)
            most = high.get(name, 1e18)
            if not least <= value <= most:
                raise ValueError(f"{flag} {value}: not in {least} ... {most}")
    if not args.exp_name:
        raise ValueError("--exp-name '': a name is needed")
    try:
        dict(**json.loads(args.env_kwargs))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"--env-kwargs {args.env_kwargs}: no JSON object: {error}") from None
    if args.resume and (args.run_dir or args.evaluate):
        raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")


KEPT = ("seed", "num_envs", "num_steps", "log_std_init")  # by a resumed run


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fail("one process trains here; torchrun is for ppo_atari_multigpu.py")

    def given(resume: Path | None = None, evaluate: Path | None = None):
        return resume or evaluate

    folder, _ = tyro.cli(given, args=argv, return_unknown_args=True, add_help=False)
    checkpoint = load_checkpoint(folder) if folder else {}
    saved = checkpoint.get("args", Args())
    steps, *_ = checkpoint.get("counters", (0,))
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    for name in KEPT:
        if args.resume and getattr(args, name) != getattr(saved, name):
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            fail(f"{flag}: {args.resume} keeps its {getattr(saved, name)}: leave the flag out")
    if args.resume and args.total_timesteps < min(steps, saved.total_timesteps):
        fail(f"--total-timesteps {args.total_timesteps}: {args.resume} has trained {steps}")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track: wandb is not installed: pip install wandb")
    if args.capture_video:  # find out before training what is missing
        if importlib.util.find_spec("moviepy") is None or metadata.version("moviepy") < "2":
            fail("--capture-video: moviepy 2 is not installed: pip install 'moviepy>=2'")
        drawn_env(args).close()
    return args


def fail(message: str):
    """Print one line to standard error and exit with code 2."""
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


# --- environments ---------------------------------------------------------------------------------
# packages whose modules a run's folder may name; any other is imported if the command line names it
KNOWN = {"lbforaging", "magent2", "mpe2", "pettingzoo", "rware"}


class Gymnasium:
    """A gymnasium environment of one agent or, with Tuple spaces, of several, as PettingZoo's
    parallel ones. Those of several are made anew for each episode, or lbforaging's differ."""

    def __init__(self, env: gym.Env, make):
        self.env = env
        self.make = make
        self.several = isinstance(self.env.action_space, gym.spaces.Tuple)
        count = len(self.env.action_space) if self.several else 1
        self.possible_agents = [f"agent_{i}" for i in range(count)]
        self.observation_space = self.each(self.env.observation_space).get
        self.action_space = self.each(self.env.action_space).get

    def each(self, values) -> dict:
        """A dict by the agents' names of what is given for them in turn."""
        values = values if self.several else [values]
        return dict(zip(self.possible_agents, values, strict=True))

    def reset(self, seed: int):
        if self.several:
            self.env.close()
            self.env = self.make()
        obs, info = self.env.reset(seed=seed)
        self.agents = self.possible_agents
        return self.each(obs), dict.fromkeys(self.agents, info)

    def step(self, actions: dict):
        choices = tuple(actions.values())
        choices = choices if self.several else choices[0]
        obs, rewards, terminated, truncated, info = self.env.step(choices)
        if terminated or truncated:
            self.agents = []
        shared = [dict.fromkeys(actions, x) for x in (terminated, truncated, info)]
        return self.each(obs), self.each(rewards), *shared

    def __getattr__(self, name: str):
        return getattr(self.env, name)  # render, close, state


def is_known(env_id: str) -> bool:
    """Whether an id names no module, or one of the packages above."""
    module, colon, name = env_id.rpartition(":")
    if colon:
        return module in KNOWN
    return "/" in name or "." not in name or name.split(".")[0] in KNOWN


def find_maker(env_id: str):
    """The function that makes environments of this id: a module (mpe2.simple_spread_v3), a name of
    PettingZoo (sisl/pursuit_v5) or gymnasium (lbforaging:Foraging-8x8-2p-2f-coop-v3, CartPole-v1),
    or module:function of your own, which returns an environment of either."""
    module, _, name = env_id.rpartition(":")
    if module and hasattr(importlib.import_module(module), name):
        return getattr(importlib.import_module(module), name)
    if "/" in name and not module:
        known = [spec.id for spec in pettingzoo.parallel_registry.values()]
        kind = "parallel" if name.replace("_v", "-v") in known else "aec"
        return partial(pettingzoo.make, kind, name)
    if "." in name and not module:
        found = importlib.import_module(name)
        return getattr(found, "parallel_env", None) or found.env
    return partial(gym.make, env_id, disable_env_checker=True)


def make_env(env_id: str, /, **options):
    """An environment as PettingZoo's parallel ones, to which turn-based ones (AEC) are converted;
    exits with one line if it can't be made."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs no display
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    try:
        make = find_maker(env_id)
        env = make(**options)
        if isinstance(env, pettingzoo.AECEnv):
            env = turn_based_aec_to_parallel_wrapper(env)
        elif isinstance(env, gym.Env):
            env = Gymnasium(env, partial(make, **options))
    except Exception as error:  # whatever the environment's own code raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        hint = f"raised in {place.filename}, line {place.lineno}; your own: module:function; "
        fail(f"--env-id {env_id}: {error!r}, {hint}its arguments: --env-kwargs")
    if not hasattr(env, "possible_agents"):
        fail(f"--env-id {env_id}: no possible_agents: all agents that may appear must be listed")
    return env


def branches(space: gym.Space) -> list[int]:
    """How many choices each branch has: a Discrete space is one, a MultiBinary one n of two."""
    if isinstance(space, Discrete):
        return [int(space.n)]
    if isinstance(space, MultiBinary):
        return [2] * math.prod(space.shape)
    return space.nvec.ravel().tolist()


class Roles:
    """What each of A agents, with these spaces by their names, sees and does, padded to one shape:
    D numbers and C choices (for Boxes, dimensions) are the most that one has."""

    def __init__(self, observation_space: gym.spaces.Dict, action_space, args: Args):
        self.args = args
        self.names = list(action_space)
        self.seen = []
        self.actions = list(action_space.values())
        for name, actions in action_space.items():
            space = observation_space[name]
            said = f"--env-id {args.env_id}: {name} sees {space}, does {actions}:"
            if "action_mask" in getattr(space, "spaces", ()):
                space = space["observation"]
            if isinstance(space, gym.spaces.Dict | gym.spaces.Text) or not space.is_np_flattenable:
                fail(f"{said} a vector is needed, or a Dict of observation and action_mask")
            if gym.spaces.flatdim(space) > 20_000:
                fail(f"{said} above 20,000 numbers; shrink them in your own module:function")
            real = isinstance(actions, Box) and actions.dtype.kind == "f"
            if not real and not isinstance(actions, Discrete | MultiDiscrete | MultiBinary):
                fail(f"{said} choices are needed, or a Box of real numbers")
            self.seen.append(space)
        kinds = {isinstance(space, Box) for space in self.actions}
        self.boxes = kinds == {True}
        if self.boxes:  # the dimensions are one branch
            sizes = [[math.prod(space.shape)] for space in self.actions]
        else:
            sizes = [branches(space) for space in self.actions if not isinstance(space, Box)]
        if len(kinds) > 1 or len({len(own) for own in sizes}) > 1:
            fail(f"--env-id {args.env_id}: {action_space}: all Box, or all with as many branches")
        self.sizes = [gym.spaces.flatdim(space) for space in self.seen]
        self.dim = max(self.sizes)  # D
        self.choices = np.max(sizes, axis=0).tolist()  # of each branch; C in all
        has = [[np.arange(n) < k for n, k in zip(self.choices, own, strict=True)] for own in sizes]
        self.has = np.array([np.hstack(parts) for parts in has])  # [A, C]
        self.starts = np.cumsum([0, *self.choices[:-1]])
        width = self.choices[0] if self.boxes else len(self.choices)
        self.shape = len(self.names), width  # of everyone's actions, A and B
        count = len(self.names)
        self.ids = np.eye(count)[:, : count if args.agent_id and count > 1 else 0]  # one-hot
        # where in a row the numbers end, and where the masks
        self.mask = self.dim + self.ids.shape[1]
        self.there = self.mask + self.has.shape[1]

    def row(self, i: int, observation, info: dict) -> np.ndarray:
        """Agent i's observation [D], its number [A or 0] and the mask of its choices [C]."""
        mask = info.get("action_mask", info.get("legal_action_mask"))
        if isinstance(observation, dict):
            mask = observation["action_mask"]
            observation = observation["observation"]
        flat = gym.spaces.flatten(self.seen[i], observation).reshape(self.sizes[i])
        valid = self.has[i].copy()
        if mask is not None and self.args.action_masks:
            mask = np.hstack(mask)
            if len(mask) != valid.sum():
                fail(f"the action_mask of {self.names[i]} has {len(mask)} of {valid.sum()} choices")
            valid[valid] = mask > 0
            left = np.add.reduceat(valid, self.starts, dtype=int)  # choices of each branch
            if valid.any() and not left.all():
                raise ValueError(f"the action_mask {mask} of {self.names[i]} leaves a branch empty")
        padding = np.zeros(self.dim - len(flat))
        return np.concatenate([flat, padding, self.ids[i], valid], dtype=np.float32)

    def action(self, i: int, action: np.ndarray):
        """Agent i's action [B] as its environment wants it: choices from its first one on; numbers
        scaled from -1 ... 1 to the Box, if that has bounds, and clipped to it."""
        space = self.actions[i]
        if not self.boxes:
            action = action.reshape(space.shape) + getattr(space, "start", 0)
            return action.astype(space.dtype)[()]
        action = action[: math.prod(space.shape)].reshape(space.shape).astype(np.float64)
        low = space.low.astype(np.float64)
        high = space.high.astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        scaled = np.where(bounded, (low + high) / 2 + (high - low) / 2 * action, action)
        return np.clip(scaled, low, high).astype(space.dtype)


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def seed_others(seed: int):
    """Seed the global generators. Most environments have their own, `np_random`, a few do not."""
    random.seed(seed)
    np.random.seed(seed)


class Envs:
    """N environments in this process, stepped one after the other. Every episode has its own seed;
    the actions of the running ones are kept, to play them again on resuming.

    `obs` [N, A, W] has a row for each possible agent: its observation, number and mask (Roles.row),
    whether it is there, whether it waits for its turn, and the state [S]. The mask is zero of those
    who can't act: the dead, those who wait, and all after the last step.
    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    """

    def __init__(self, envs: list, args: Args, numbers=(0,), played=None):
        self.envs = envs
        self.args = args
        self.numbers = list(numbers)
        seen = [(name, envs[0].observation_space(name)) for name in envs[0].possible_agents]
        does = [(name, envs[0].action_space(name)) for name in envs[0].possible_agents]
        self.observation_space = gym.spaces.Dict(OrderedDict(seen))
        self.action_space = gym.spaces.Dict(OrderedDict(does))
        self.roles = Roles(self.observation_space, self.action_space, args)
        self.turns = isinstance(envs[0], turn_based_aec_to_parallel_wrapper)
        self.episodes = [-1] * len(envs)  # the number of each environment's running episode
        self.actions = [[] for _ in envs]  # of the running episodes
        self.over = np.zeros(len(envs), bool)  # [N], the last step ended an episode
        self.returns = np.zeros((len(envs), len(does)))
        self.deaths = np.zeros(len(envs), int)
        self.ended = []  # (environment, returns [A], length, deaths) of what the last step ended
        for i, (episode, _) in enumerate(played or ()):
            self.episodes[i] = episode - 1
        self.obs = np.stack([self.reset(i) for i in range(len(envs))])
        for i, (_, actions) in enumerate(played or ()):
            for action in actions:
                if action.shape != self.roles.shape:
                    fail(f"{args.resume}: {action}, played before, is not in {self.action_space}")
                self.play(i, action)

    def reset(self, i: int) -> np.ndarray:
        """Begin the next episode of an environment; gives its first rows [A, W]."""
        self.episodes[i] += 1
        self.actions[i] = []
        self.over[i] = False
        self.returns[i] = 0.0
        self.deaths[i] = 0
        seed = episode_seed(self.args.seed, self.numbers[i], self.episodes[i])
        seed_others(seed)
        if self.turns:  # OpenSpiel's seeds have 31 bits
            seed %= 2**31
        observations, infos = self.envs[i].reset(seed=seed)
        return self.rows(i, observations, infos, self.envs[i].agents)

    def rows(self, i: int, observations: dict, infos: dict, living) -> np.ndarray:
        """The rows [A, W] of agents with these observations, of which not all may be living."""
        roles = self.roles
        env = self.envs[i]
        state = []
        mover = None
        if self.args.critic == "state":
            try:
                state = np.ravel(env.state())
            except Exception as error:
                fail(f"--critic state: {self.args.env_id} has none: {error!r}")
        if self.turns:
            mover = env.aec_env.agent_selection
        rows = np.zeros((len(roles.names), roles.there + 2 + len(state)), np.float32)
        rows[:, roles.dim : roles.mask] = roles.ids
        rows[:, roles.there + 2 :] = state
        for k, name in enumerate(roles.names):
            if name in observations:
                row = roles.row(k, observations[name], infos.get(name, {}))
                if name not in living or mover not in (None, name):
                    row[roles.mask :] = 0.0
                rows[k, : roles.there] = row
                rows[k, roles.there] = 1.0
                rows[k, roles.there + 1] = name in living and not row[roles.mask :].any()
        return rows

    def play(self, i: int, actions: np.ndarray):
        """One step of an environment, with actions [A, B]: rewards, terminated, truncated [A]."""
        env = self.envs[i]
        names = self.roles.names
        args = self.args
        acting = {}
        for k, name in enumerate(names):
            if name in env.agents:
                acting[name] = self.roles.action(k, actions[k])
        observations, rewards, terminated, truncated, infos = env.step(acting)
        if unknown := rewards.keys() - set(names):
            fail(f"--env-id {args.env_id}: rewards for {unknown}, not among possible_agents")
        self.actions[i].append(actions)
        limit = len(self.actions[i]) == args.max_episode_steps
        dies = np.zeros(len(names), bool)
        stops = np.zeros(len(names), bool)
        for k, name in enumerate(names):
            if name in acting:
                stops[k] = truncated.get(name, False) or limit
                dies[k] = terminated.get(name, False)
                if name not in env.agents and not stops[k] and not dies[k]:
                    warnings.warn(f"{name} left without an end: taken for dead", stacklevel=2)
                    dies[k] = True
        gone = {name for k, name in enumerate(names) if dies[k] or stops[k]}
        living = set() if limit else set(env.agents) - gone
        self.over[i] = not living
        self.deaths[i] += 0 if self.over[i] else np.count_nonzero(dies)
        dead = {name for k, name in enumerate(names) if dies[k]}  # their observations are not used
        seen = {name: x for name, x in observations.items() if name not in dead}
        self.obs[i] = self.rows(i, seen, infos, living)
        try:
            rewards = np.array([float(np.asarray(rewards.get(name, 0.0)).item()) for name in names])
        except (TypeError, ValueError):
            raise ValueError(f"{args.env_id}: {rewards=}: one for each agent is needed") from None
        self.returns[i] += rewards
        if args.team_reward:  # all get one reward, and one end
            rewards = np.full(len(names), rewards.sum())
            cut = (stops & ~dies).any()
            dies = np.full(len(names), self.over[i] and not cut)
            stops = np.full(len(names), self.over[i] and cut)
        return rewards, dies, stops

    def step(self, actions: np.ndarray):
        """Take actions [N, A, B]: rewards, terminated, truncated [N, A]."""
        rewards = np.zeros(actions.shape[:2])
        terminated = np.zeros(actions.shape[:2], bool)
        truncated = np.zeros(actions.shape[:2], bool)
        self.ended = []
        for i, action in enumerate(actions):
            if self.over[i]:
                self.obs[i] = self.reset(i)
                continue
            rewards[i], terminated[i], truncated[i] = self.play(i, action)
            if self.over[i]:
                numbers = self.returns[i].copy(), len(self.actions[i]), int(self.deaths[i])
                self.ended.append((self.numbers[i], *numbers))
        return rewards, terminated, truncated

    def shown(self) -> dict[str, np.ndarray]:
        """What the rollout sees of the environments, [N, ...] each."""
        return {"obs": self.obs, "over": self.over}

    def played(self) -> list[tuple[int, np.ndarray]]:
        """What replays the running episodes: their numbers and actions so far."""
        return [(n, np.array(x)) for n, x in zip(self.episodes, self.actions, strict=True)]

    def close(self):
        for env in self.envs:
            try:
                env.close()
            except Exception as error:  # the others are closed all the same
                print(f"closing {self.args.env_id}: {error!r}", file=sys.stderr)


def work(pipe, args: Args, numbers: list[int], played: list | None):
    """A worker process: it does what its pipe says with its environments, until the pipe ends."""
    for number in SIGNALS:  # the main process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # all would print the same warnings
            envs = own_envs(args, numbers, played)
        if 0 in numbers:
            sys.stderr.write(said.getvalue())
        with contextlib.closing(envs):
            result = envs.observation_space, envs.action_space
            while True:
                pipe.send((envs.shown(), envs.ended, result))
                method, *given = pipe.recv()
                result = getattr(envs, method)(*given)
    except BaseException as error:
        told = isinstance(error, SystemExit) and said.getvalue()
        with contextlib.suppress(OSError):  # the main process may be gone
            pipe.send(SystemExit(told) if told else RuntimeError(traceback.format_exc()))


class WorkerEnvs:
    """Like Envs, with the environments in worker processes. The results are the same bits."""

    def __init__(self, args: Args, played: list | None):
        self.workers = []
        atexit.register(self.close)  # or the interpreter would wait for the workers
        context = multiprocessing.get_context("spawn")
        for numbers in np.array_split(range(args.num_envs), args.env_workers):
            ours, theirs = context.Pipe()
            share = [played[i] for i in numbers] if played else None
            process = context.Process(target=work, args=(theirs, args, numbers.tolist(), share))
            process.start()
            theirs.close()
            self.workers.append((process, ours, slice(numbers[0], numbers[-1] + 1)))
        self.observation_space, self.action_space = self.receive()[0]

    def receive(self) -> list:
        """What each worker answers. The observations of all become this object's."""
        replies = []
        for process, pipe, _ in self.workers:
            try:
                replies.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                process.join(1)
                why = f"a process of --env-workers was killed (exit code {process.exitcode})"
                replies.append(RuntimeError(f"{why}: not enough memory?"))
            if isinstance(replies[-1], SystemExit):  # the worker exited with a message
                self.close()
                sys.stderr.write(str(replies[-1]))
                raise SystemExit(2)
            if isinstance(replies[-1], Exception):
                self.close()
                raise replies[-1]
        shown, ended, results = zip(*replies, strict=True)
        for name in shown[0]:  # obs, over and so on, [N, ...] each
            setattr(self, name, np.concatenate([part[name] for part in shown]))
        self.ended = [*itertools.chain(*ended)]
        return results

    def call(self, method: str, *rows: np.ndarray) -> list:
        """Call a method of `Envs` in each worker, with its share of the rows [N, ...]."""
        for _, pipe, share in self.workers:
            with contextlib.suppress(BrokenPipeError):  # `receive` says why
                pipe.send((method, *[each[share] for each in rows]))
        return self.receive()

    def step(self, *rows: np.ndarray):
        """`Envs.step`: rewards, terminated, truncated [N]."""
        return [np.concatenate(parts) for parts in zip(*self.call("step", *rows), strict=True)]

    def played(self) -> list[tuple[int, np.ndarray]]:
        """`Envs.played` of all workers."""
        return [*itertools.chain(*self.call("played"))]

    def close(self):
        for _, pipe, _ in self.workers:
            pipe.close()
        for process, _, _ in self.workers:
            process.join(5)
            process.kill()  # if an environment hangs
        self.workers = []


def own_envs(args: Args, numbers, played: list | None) -> Envs:
    options = json.loads(args.env_kwargs)
    envs = []
    with contextlib.ExitStack() as made:  # closed, if one can't be made or can't begin
        for number in numbers:
            seed_others(episode_seed(args.seed, number))
            envs.append(make_env(args.env_id, **options))
            made.callback(envs[-1].close)
        begun = Envs(envs, args, numbers, played)
        made.pop_all()
    return begun


def make_envs(args: Args, num_envs: int, checkpoint: dict | None = None):
    """Environments in this process or in others, as the checkpoint left them."""
    played = checkpoint["played"] if checkpoint else None
    if checkpoint and len(played) != num_envs:
        fail(f"{args.resume}: its checkpoint is of {len(played)} environments, not {num_envs}")
    if args.env_workers and num_envs > 1:
        return WorkerEnvs(args, played)
    return own_envs(args, range(num_envs), played)


# --- agent ----------------------------------------------------------------------------------------
class RunningMoments(nn.Module):
    """Mean and variance of all that was seen (Chan, Golub & LeVeque 1979), saved with the agent."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x: np.ndarray):
        """Take in a batch [B, *shape]."""
        for start in range(0, len(x), 4096):
            part = torch.as_tensor(x[start : start + 4096], device=self.mean.device).double()
            total = self.count + len(part)
            mean = part.mean(dim=0)
            delta = mean - self.mean
            squares = self.var * self.count + (part - mean).square().sum(dim=0)
            self.var.copy_((squares + delta.square() * self.count * len(part) / total) / total)
            self.mean += delta * len(part) / total
            self.count.copy_(total)


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two layers of 64 tanh units and a linear one; orthogonal weights, biases 0 (detail 2)."""
    layers = []
    for sizes, scale in (((inputs, 64), 2**0.5), ((64, 64), 2**0.5), ((64, outputs), gain)):
        layers += [nn.Linear(*sizes), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight, scale)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Policy and value function, shared by the agents of environments like `env` (Envs)."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        self.value_norm = self.args.value_norm
        if self.value_norm is None:
            self.value_norm = self.args.team_reward or self.args.critic != "local"
        self.roles = Roles(env.observation_space, env.action_space, self.args)
        self.dim = self.roles.mask
        self.there = self.roles.there
        self.width = self.there - self.dim  # C
        self.choices = self.roles.choices
        agents, ids = self.roles.ids.shape
        inputs = {
            "local": self.dim,
            "concatenated": agents * (self.roles.dim + 1) + ids,
            "state": env.obs.shape[-1] - self.there - 2 + self.dim,
        }
        self.critic = mlp(inputs[self.args.critic], 1, gain=1.0)  # two networks (detail 13)
        self.actor = mlp(self.dim, self.width, gain=0.01)
        if self.roles.boxes:  # a deviation for each dimension, the same in every state
            self.actor_logstd = nn.Parameter(torch.full((self.width,), self.args.log_std_init))
        self.value_moments = RunningMoments()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # of all agents, learned
        self.rng = np.random.default_rng(self.args.seed)  # draws actions and minibatches

    def inputs(self, obs: torch.Tensor) -> torch.Tensor:
        """The networks' inputs [..., A, I], from the rows of all agents [..., A, W]: observation,
        number and mask for the actor and, behind them, what a central critic sees."""
        own = obs[..., : self.there]
        there = obs[..., self.there]
        if self.args.critic == "local":
            return own
        if self.args.critic == "state":
            return torch.cat([own, obs[..., self.there + 2 :], obs[..., : self.dim]], dim=-1)
        joint = torch.cat([obs[..., : self.roles.dim].flatten(-2), there], dim=-1)
        joint = joint.unsqueeze(-2).expand(*obs.shape[:-1], -1)
        return torch.cat([own, joint, obs[..., self.roles.dim : self.dim]], dim=-1)

    def scaled_value(self, inputs: torch.Tensor) -> torch.Tensor:
        """V [...] at inputs [..., I]; with --value-norm less the returns' mean, in deviations."""
        local = self.args.critic == "local"
        return self.critic(inputs[..., : self.dim] if local else inputs[..., self.there :])[..., 0]

    def get_value(self, inputs: torch.Tensor) -> torch.Tensor:
        """V [...] at inputs [..., I]."""
        value = self.scaled_value(inputs)
        if not self.value_norm:
            return value
        moments = self.value_moments
        return (value * (moments.var + 1e-8).sqrt() + moments.mean).float()

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of the choices, or means of a Box's dimensions [..., C], at inputs [..., I]."""
        scores = self.actor(inputs[..., : self.dim])
        valid = inputs[..., self.dim : self.there] > 0
        return scores if self.roles.boxes else scores.where(valid, -1e8)

    def choose(self, scores: torch.Tensor, noise) -> torch.Tensor:
        """The likeliest actions [..., B] where noise is 0; where it is `noise(...)`, samples."""
        if self.roles.boxes:
            return scores + self.actor_logstd.exp() * noise
        parts = (scores + noise).split(self.choices, dim=-1)
        return torch.stack([part.argmax(dim=-1) for part in parts], dim=-1)

    def get_action_and_value(self, inputs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [M, B] (sampled unless given), its log-probability [M], entropy [M] and scaled
        value [M] at inputs [M, I]: choices in B branches, or independent numbers, whose
        log-probabilities add up (MultiDiscrete detail 1). What an agent lacks adds none."""
        scores = self.scores(inputs)
        if action is None:
            action = self.choose(scores, torch.tensor(self.noise(*scores.shape[:-1])).to(scores))
        if self.roles.boxes:
            has = inputs[..., self.dim : self.there]
            logstd = self.actor_logstd
            z = (action - scores) * torch.exp(-logstd)
            logprob = (-0.5 * z.square() - logstd - 0.5 * math.log(2.0 * math.pi)) * has
            entropy = (logstd + 0.5 * math.log(2.0 * math.pi * math.e)) * has
            return action, logprob.sum(-1), entropy.sum(-1), self.scaled_value(inputs)
        logprobs = [part.log_softmax(-1) for part in scores.split(self.choices, dim=-1)]
        choices = zip(logprobs, action.split(1, dim=-1), strict=True)
        logprob = sum(part.gather(-1, choice).squeeze(-1) for part, choice in choices)
        entropy = sum(-(part.exp() * part).sum(dim=-1) for part in logprobs)
        return action, logprob, entropy, self.scaled_value(inputs)

    forward = get_action_and_value

    @torch.no_grad()
    def act_on_rows(self, rows: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """As `act`, but from rows [..., W] and to actions [..., B] as the networks have them."""
        scores = self.scores(torch.as_tensor(rows, device=self.actor[0].weight.device))
        noise = torch.as_tensor(0.0 if noise is None else noise).to(scores)
        return self.choose(scores, noise).cpu().numpy()

    def act(self, observations: dict, noise: np.ndarray | None = None, infos: dict | None = None):
        """The likeliest (mean) actions of one agent or more, by name, at their observations, by
        name; given `noise(len(observations))`, samples. Only masks are taken from `infos`."""
        numbers = [self.roles.names.index(name) for name in observations]
        infos = infos or {}
        rows = []
        for i, (name, observation) in zip(numbers, observations.items(), strict=True):
            rows.append(self.roles.row(i, observation, infos.get(name, {})))
        actions = zip(numbers, self.act_on_rows(np.stack(rows), noise), strict=True)
        given = [self.roles.action(i, action) for i, action in actions]
        return dict(zip(observations, given, strict=True))

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions. For choices it is Gumbel's: the argmax of noise +
        log-probabilities is a sample."""
        draw = self.rng.standard_normal if self.roles.boxes else self.rng.gumbel
        return draw(size=(*shape, self.width)).astype(np.float32)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma, gae_lambda, waits=None) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values and waits [T + 1, ...].

    While an agent waits for its turn, its last action gets what comes: rewards, undiscounted, an
    end, or the value and the advantage of its next action."""
    rewards = rewards.copy()
    values = values.copy()
    terminated = terminated.copy()
    ended = np.logical_or(terminated, truncated)
    waits = np.zeros(values.shape, bool) if waits is None else waits
    for t in range(1, len(values)):  # what is known of the steps after the last row
        values[t] = np.where(waits[t], values[t - 1], values[t])
    advantages = np.zeros_like(values)
    for t in reversed(range(len(rewards))):
        following = gamma * np.where(terminated[t], 0.0, values[t + 1])
        following += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
        advantages[t] = np.where(waits[t], advantages[t + 1], rewards[t] + following - values[t])
        values[t] = np.where(waits[t], values[t + 1], values[t])
        if t > 0:
            rewards[t - 1] += np.where(waits[t], rewards[t], 0.0)
            terminated[t - 1] |= waits[t] & terminated[t]
            ended[t - 1] |= waits[t] & ended[t]
    return advantages[:-1]


class Rollout(NamedTuple):
    obs: np.ndarray  # [T + 1, N, A, W], rows as Envs has them
    actions: np.ndarray  # [T, N, A, B]
    rewards: np.ndarray  # [T, N, A]
    terminated: np.ndarray  # [T, N, A]
    truncated: np.ndarray  # [T, N, A]
    running: np.ndarray  # [T, N, A], False in the row after an episode's end: there actions were
    # ignored and rewards are none, but observations are the episode's true last ones
    valid: np.ndarray  # [T, N, A], the agent lived and acted
    waits: np.ndarray  # [T + 1, N, A], the agent lived and could not act


class Batch(NamedTuple):
    inputs: torch.Tensor  # [M, I]
    actions: torch.Tensor  # [M, B]
    logprobs: torch.Tensor  # [M], before the update
    advantages: torch.Tensor  # [M]
    returns: torch.Tensor  # [M], scaled like the value
    values: torch.Tensor  # [M], before the update
    acts: torch.Tensor  # [M], 0 where only the value function learns, else 1


def ppo_loss(agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and its
    metrics."""
    _, logprob, entropy, value = agent(batch.inputs, batch.actions)
    logratio = logprob - batch.logprobs
    ratio = logratio.exp()

    def mean(x):  # over rows of agents that acted
        return (x * batch.acts).sum() / batch.acts.sum().clamp(min=1.0)

    advantages = batch.advantages
    if args.norm_adv:  # per minibatch (detail 7)
        advantages = advantages - mean(advantages)
        count = batch.acts.sum()
        variance = mean(advantages.square()) * count / (count - 1.0).clamp(min=1.0)
        advantages = advantages / (variance.sqrt() + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -mean(torch.min(ratio * advantages, clipped * advantages))

    error = (value - batch.returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        change = (value - batch.values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (batch.values + change - batch.returns).square())
    value_loss = 0.5 * error.mean()

    entropy = mean(entropy)  # its bonus keeps the policy exploring (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -mean(logratio), "approx_kl": mean(ratio - 1.0 - logratio)}
    return loss, metrics | {"clipfrac": mean(((ratio - 1.0).abs() > args.clip_coef).float())}


def update(agent: Agent, data: Rollout, learning_rate: float, args: Args):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    device = agent.actor[0].weight.device
    inputs = agent.inputs(torch.as_tensor(data.obs, device=device))
    actions = torch.as_tensor(data.actions, device=device)
    with torch.no_grad():
        values = agent.get_value(inputs)  # [T + 1, N, A]
        _, logprobs, _, scaled_values = agent(inputs[:-1], actions)
    numbers = data.rewards, values.cpu().double().numpy(), data.terminated, data.truncated
    advantages = gae(*numbers, args.gamma, args.gae_lambda, data.waits)  # detail 5
    advantages = torch.tensor(advantages).to(values)
    returns = advantages + values[:-1]
    # the return of a team, and so its value, goes on after an agent's death
    learned = data.running & ~data.waits[:-1] if args.team_reward else data.valid
    if agent.value_norm and learned.any():
        moments = agent.value_moments
        moments.update(returns.cpu().numpy()[learned])
        returns = ((returns - moments.mean) / (moments.var + 1e-8).sqrt()).float()
    acts = torch.as_tensor(data.valid, device=device).float()
    fields = inputs[:-1], actions, logprobs, advantages, returns, scaled_values, acts
    batch = Batch(*[x.flatten(0, 2) for x in fields])  # [T * N * A, ...]

    rows = np.flatnonzero(learned)
    num_minibatches = min(args.num_minibatches, len(rows) // 2)  # at least two rows in each
    if num_minibatches == 0:  # nothing to learn from
        return {}
    steps = []  # metrics of each step
    agent.adam.param_groups[0]["lr"] = learning_rate
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(rows), device=device)
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(num_minibatches):
            loss, metrics = ppo_loss(agent, args, Batch(*[x[minibatch] for x in batch]))
            agent.adam.zero_grad()
            loss.backward()
            # over all parameters (detail 11)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            agent.adam.step()
            steps.append(torch.stack([*metrics.values()]).detach())
        approx_kl = torch.stack(steps[-num_minibatches:])[:, [*metrics].index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    agent.steps += int(np.count_nonzero(data.valid))
    means = torch.stack(steps).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    error = (batch.returns - batch.values)[rows].var()
    scale = batch.returns[rows].var()
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    return metrics | {"charts/agent_steps": agent.steps.item()}


# --- rollout --------------------------------------------------------------------------------------
def rollout(agent: Agent, envs: Envs | WorkerEnvs, run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1)."""
    T = args.num_steps
    (N, A, W) = envs.obs.shape
    obs = np.zeros((T + 1, N, A, W), np.float32)
    actions = []
    rewards = np.zeros((T, N, A))
    terminated = np.zeros((T, N, A), bool)
    truncated = np.zeros((T, N, A), bool)
    running = np.zeros((T, N, A), bool)
    noise = agent.noise(T, N, A)
    for t in range(T):
        obs[t] = envs.obs
        running[t] = ~envs.over[:, None]
        actions.append(agent.act_on_rows(obs[t], noise[t]))
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t])
        run.global_step += int(np.count_nonzero(running[t, :, 0]))
        if envs.ended:
            means = [(i, float(own.mean()), length) for i, own, length, _ in envs.ended]
            run.log_episodes(means)
            log_agents(run, agent.roles.names, envs.ended)
    obs[T] = envs.obs
    valid = obs[:T, ..., agent.dim : agent.there].any(axis=-1)
    waits = obs[..., agent.there + 1] > 0
    actions = np.stack(actions)
    return Rollout(obs, actions, rewards, terminated, truncated, running, valid, waits)


def log_agents(run: "Run", names: list[str], ended: list[tuple[int, np.ndarray, int, int]]):
    """For TensorBoard, means over the episodes that one step has ended: the team's return, deaths,
    and each agent's return; with more than eight, of those whose names differ by a number."""
    _, returns, _, deaths = zip(*ended, strict=True)
    returns = np.mean(returns, axis=0)  # [A]
    numbers = {"team_return": returns.sum(), "deaths": np.mean(deaths)}
    kinds = [n if len(names) <= 8 else n.rstrip("_0123456789") for n in names]
    for kind in dict.fromkeys(kinds):
        numbers[f"return/{kind}"] = returns[[own == kind for own in kinds]].mean()
    for tag, number in numbers.items():
        run.writer.add_scalar(f"charts/{tag}", number, run.global_step)


# --- run folder, checkpoints, evaluation ----------------------------------------------------------
class Run:
    """A run's folder, logs and counters. While it is open, no other process can use the folder."""

    def __init__(self, args: Args, checkpoint: dict):
        self.args = replace(args, run_dir=None, resume=None, evaluate=None)  # folders may move
        self.global_step, self.iteration, seconds, rows = checkpoint.get("counters", (0, 0, 0.0, 0))
        self.returns = deque(checkpoint.get("returns", ()), maxlen=100)  # of the last episodes
        self.start = time.monotonic() - seconds
        self.status = "failed"  # until training has ended well
        try:
            self.folder = args.resume or args.run_dir or new_folder(args)
            self.folder.mkdir(parents=True, exist_ok=True)
            self.new = not any(self.folder.iterdir())
            refuse_links(self.folder)
            path = self.folder / "episodes.csv"
            self.csv = open(path, "a", buffering=1)  # noqa: SIM115
        except OSError as error:
            fail(f"no folder for the run: {error}")
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.csv)  # if the start fails, close it: the folder is free again
            try:
                fcntl.flock(self.csv, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{self.folder}: another process trains in this folder")
            except OSError as error:  # a file system without locks
                fail(f"{self.folder}: {error}")
            if self.new:  # if the start fails, leave nothing
                undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if not args.resume and (self.folder / "checkpoint.pt").exists():
                fail(f"a run is there: --resume {self.folder} goes on with it")
            # drop the rows after the checkpoint: they will be logged again
            known = re.findall(rb".*\n", path.read_bytes())[: rows + 1] if args.resume else []
            self.csv.truncate(len(b"".join(known)))
            self.rows = max(len(known) - 1, 0)
            if not known:
                self.csv.write("global_step,seconds,return,length\n")
            self.wandb = None
            if args.track:
                import wandb  # before SummaryWriter, which it patches

                project = {"project": args.wandb_project_name, "entity": args.wandb_entity}
                more = {"config": vars(self.args), "sync_tensorboard": True}
                more |= {"id": checkpoint.get("wandb"), "resume": "allow"}  # resumed: the same run
                self.wandb = wandb.init(name=self.folder.name, **project, **more)
            self.writer = SummaryWriter(str(self.folder), purge_step=self.global_step + 1)
            table = [f"|{name}|{value}|" for name, value in vars(self.args).items()]
            self.writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *table]))
            self.bar = tqdm(total=args.total_timesteps, unit="step", disable=None)
            self.write_json("running")
            undo.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        self.write_json(self.status)
        if kind and self.new and self.global_step == 0:  # failed before a step: leave nothing
            shutil.rmtree(self.folder, ignore_errors=True)
        fcntl.flock(self.csv, fcntl.LOCK_UN)  # of a process that was forked meanwhile, too
        self.csv.close()

    def log_episodes(self, ended: list[tuple[int, float, int]]):
        """Log the (environment, return, length) of the episodes that one step has ended: a row
        each, and for TensorBoard, which has one value a step, their mean."""
        for _, score, length in ended:
            seconds = time.monotonic() - self.start
            self.csv.write(f"{self.global_step},{seconds:.2f},{score},{length}\n")
            if not self.args.quiet:
                self.bar.write(f"global_step={self.global_step}, episodic_return={score:.4f}")
            self.returns.append(score)
        self.rows += len(ended)
        _, returns, lengths = zip(*ended, strict=True)
        self.writer.add_scalar("charts/episodic_return", np.mean(returns), self.global_step)
        self.writer.add_scalar("charts/episodic_length", np.mean(lengths), self.global_step)

    def log(self, metrics: dict[str, float]):
        self.iteration += 1
        self.bar.update(self.global_step - self.bar.n)
        metrics["charts/SPS"] = int(self.global_step / (time.monotonic() - self.start))
        for tag, value in metrics.items():
            self.writer.add_scalar(tag, value, self.global_step)

    def final_return(self) -> float | None:
        """The mean return of the last 100 training episodes, if there is one."""
        mean = float(np.mean(self.returns)) if self.returns else math.nan
        return mean if math.isfinite(mean) else None

    def write_json(self, status: str):
        versions = {package.__name__: package.__version__ for package in (torch, gym, np)}
        content = {"script": Path(__file__).name, "status": status, "args": vars(self.args)}
        content |= {"seed": self.args.seed, "global_step": self.global_step, "versions": versions}
        content["wall_seconds"] = round(time.monotonic() - self.start, 2)
        content["final_return"] = self.final_return()
        (self.folder / "run.json").write_text(json.dumps(content, indent=2) + "\n")


def new_folder(args: Args) -> Path:
    """Make a new folder below runs/. Two runs that start in one second get two folders."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    for k in itertools.count(1):
        folder = Path("runs") / (name if k == 1 else f"{name}_{k}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def refuse_links(folder: Path):
    """Exit with one line if a folder has links: through them a run would write elsewhere."""
    for path in folder.rglob("*"):
        if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):  # hard ones, too
            fail(f"{path} is a link: a run writes into its own folder alone")


def save(run: Run, agent: Agent, envs):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    adam = {"state": agent.adam.state_dict()["state"]}  # its settings are the code's
    state |= {"adam": adam, "rng": agent.rng.bit_generator.state}
    state["played"] = [(episode, torch.tensor(x)) for episode, x in envs.played()]
    state["counters"] = run.global_step, run.iteration, time.monotonic() - run.start, run.rows
    state |= {"returns": list(run.returns), "wandb": run.wandb and run.wandb.id}
    torch.save(state, run.folder / "checkpoint.pt.tmp")
    (run.folder / "checkpoint.pt.tmp").replace(run.folder / "checkpoint.pt")


def load_checkpoint(folder: Path) -> dict:
    """Read what `save` wrote. No code in the file is run."""
    content = {}
    path = Path(folder) / "checkpoint.pt"
    try:
        if not path.is_file():
            raise FileNotFoundError("this is no folder of a run")
        with zipfile.ZipFile(path) as file:
            if file.testzip():
                raise ValueError("it is damaged")
        content |= torch.load(path, map_location="cpu", weights_only=True)
        args = Args(**content["args"])
        step, iteration, seconds, rows = content.get("counters", (0, 0, 0.0, 0))
        content["counters"] = int(step), int(iteration), float(seconds), int(rows)
        content["returns"] = [float(x) for x in content.get("returns", ())]
        content["played"] = [(int(n), np.atleast_1d(x)) for n, x in content.get("played", ())]
        numbers = [*content["counters"], *(n + 1 for n, _ in content["played"])]  # -1: none begun
        if not all(number >= 0 for number in numbers):
            raise ValueError(f"its counters are {numbers}")
    except Exception as error:  # damaged files raise errors of many kinds
        maker = f", made by {content['script']}" if "script" in content else ""
        fail(f"{folder}: no checkpoint.pt{maker} that can be read here: {error!r}")
    if not is_known(args.env_id):  # only the command line may name a module to import
        args.env_id = args.env_id.rpartition(":")[2].rpartition(".")[2]
    return content | {"args": args}


def load(folder: Path, env=None, args: Args | None = None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments or
    those given."""
    checkpoint = load_checkpoint(folder)
    args = args or checkpoint["args"]
    envs = env or make_envs(args, 1)
    agent = Agent(envs, args)
    if env is None:
        envs.close()
    try:
        agent.load_state_dict(checkpoint["agent"])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        maker = checkpoint.get("script")
        fail(
            f"{folder}: its agent, by {maker}, does not fit the environment and the flags: {error}"
        )
    return agent, args


def drawn_env(args: Args):
    """An environment that can draw its frames; exits with one line if they can't."""
    env = make_env(args.env_id, **json.loads(args.env_kwargs) | {"render_mode": "rgb_array"})
    try:
        env.reset(seed=0)
        env.render()
    except Exception as error:  # no display, or a package for drawing is missing
        env.close()
        fail(f"--capture-video: {args.env_id} can't be drawn: {error!r}")
    return env


def play(agent: Agent, envs: Envs, args: Args, greedy: bool) -> tuple[np.ndarray, list]:
    """Returns [episodes, A] of greedy or sampled actions and, with `capture_video`, the frames of
    the first episode."""
    returns = []
    frames = []
    steps = 0
    while len(returns) < args.eval_episodes:
        noise = None if greedy else agent.noise(*envs.obs.shape[:2])
        envs.step(agent.act_on_rows(envs.obs, noise))
        if args.capture_video and not returns:
            frames.append(envs.envs[0].render())
        steps += 1
        for _, own, _, _ in envs.ended:
            returns.append(own)
            steps = 0
        if steps > 100_000:
            fail(f"{args.env_id}: 100,000 steps, no end; --max-episode-steps sets one")
    return np.array(returns), frames


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate`, the same episodes with sampled and with greedy actions, and
    list those of one kind; `capture_video` records the first of these into its videos/."""
    played = {}
    frames = {}
    seeded = replace(args, seed=episode_seed(args.seed, 2**31))
    for greedy in (False, True):
        if args.capture_video:
            refuse_links(args.evaluate)
            envs = Envs([drawn_env(args)], seeded)
        else:
            envs = make_envs(seeded, 1)
        with contextlib.closing(envs):
            agent, _ = load(args.evaluate, envs)
            played[greedy], frames[greedy] = play(agent, envs, args, greedy)
    for episode, returns in enumerate(played[args.eval_greedy]):
        score = f"episodic_return={returns.mean():.2f} team_return={returns.sum():.2f}"
        print(f"eval_episode={episode}, {score}", flush=True)
    if args.capture_video:
        from gymnasium.utils.save_video import save_video  # needs moviepy

        videos = str(args.evaluate / "videos")
        save_video(frames[args.eval_greedy], videos, lambda _: True, fps=15)
        print(f"videos: {videos}")
    for greedy, returns in played.items():
        mean = returns.mean(axis=1)
        team = returns.sum(axis=1)
        said = f"mean over agents {mean.mean():.2f} +- {mean.std():.2f}, "
        said += f"sum over agents {team.mean():.2f} +- {team.std():.2f}"
        print(f"{'greedy' if greedy else 'sampled'}, {len(returns)} episodes: {said}")
    return played[args.eval_greedy].mean(axis=1).tolist()


# --- training -------------------------------------------------------------------------------------
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals():
    """A list of the signals that have come. The first ends training after its iteration, the next
    acts at once. Only the main thread can catch signals; elsewhere the list stays empty."""
    stop = []

    def handler(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS if main}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def restore(agent: Agent, checkpoint: dict, folder: Path):
    """Set the optimizer and the random numbers to what the checkpoint has."""
    try:
        saved = {"state": checkpoint["adam"]["state"]}  # its settings are the code's
        agent.adam.load_state_dict(agent.adam.state_dict() | saved)
        for parameter, state in agent.adam.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].shape != parameter.shape:
                    raise ValueError(f"{name} has shape {tuple(state[name].shape)}")
                state[name] = torch.empty_like(parameter).copy_(state[name])  # in the same layout
        agent.rng.bit_generator.state = checkpoint["rng"]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        fail(f"{folder}: its checkpoint does not fit: {error!r}")


def check_finite(iteration: int, values: dict):
    """Raise FloatingPointError that names the first value with a NaN or an infinity."""
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"iteration {iteration}: {name} is not finite")


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    with contextlib.closing(make_envs(args, args.num_envs, checkpoint)) as envs:
        torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
        if args.resume:
            agent, _ = load(args.resume, envs, args)
        else:
            agent = Agent(envs, args)
        parameters = agent.to(device).parameters()
        agent.adam = torch.optim.Adam(parameters, eps=1e-5, fused=True)  # (detail 3)
        if args.resume:
            restore(agent, checkpoint, args.resume)
        with stop_signals() as stop, Run(args, checkpoint) as run:
            how = f"{args.env_id} on {device}, {args.num_iterations} iterations"
            run.bar.write(f"{how}, in {run.folder}")
            save(run, agent, envs)
            while run.iteration < args.num_iterations and not stop:
                remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate  # annealed (detail 4)
                data = rollout(agent, envs, run, args)
                metrics = update(agent, data, learning_rate, args)
                check_finite(run.iteration, {"observations": data.obs, "rewards": data.rewards})
                check_finite(run.iteration, metrics | agent.state_dict())
                run.log(metrics | {"charts/learning_rate": learning_rate})
                if run.iteration % args.checkpoint_interval == 0:
                    save(run, agent, envs)
            save(run, agent, envs)
            run.status = "running" if run.iteration < args.num_iterations else "finished"
    return finish(run, agent, stop)


def finish(run: Run, agent: Agent, stop: list[int]) -> Path:
    """Print how to go on or to play; save the weights and record a video, if asked to."""
    # where it is imported, as in a notebook, the file itself
    program = sys.argv[0] if __name__ == "__main__" else os.path.relpath(__file__)
    script = f"python {shlex.quote(program)}"
    folder = shlex.quote(str(run.folder))
    if not is_known(run.args.env_id):  # a module must be named again
        folder += f" --env-id {run.args.env_id}"
    if run.status == "running":
        print(f"go on with: {script} --resume {folder}")
        raise SystemExit(128 + stop[0])
    final = run.final_return()
    print(f"return {final} over the last 100 episodes; play: {script} --evaluate {folder}")
    if run.args.save_model:
        name = f"{Path(run.args.exp_name).name}.cleanrl_model"
        torch.save(agent.state_dict(), run.folder / name)
    if run.args.capture_video:
        evaluate(replace(run.args, evaluate=run.folder))
    return run.folder


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):  # a terminal may not know all letters
        stream.reconfigure(errors="backslashreplace")
    args = parse_args()
    evaluate(args) if args.evaluate else train(args)
