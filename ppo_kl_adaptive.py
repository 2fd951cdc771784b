# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.3,<4", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO with an adaptive KL penalty and GAE, in one file.

Coady 2017, "AI Gym Workout", after Schulman et al. 2017 (https://arxiv.org/abs/1707.06347, section
4) and Heess et al. 2017 (https://arxiv.org/abs/1707.02286). Every iteration:

    1. play b whole episodes with a ~ N(mu(s, t), sigma^2), or a categorical of logits(s, t)
    2. A = GAE(lambda), normalized; R = Monte-Carlo returns. The value after an episode's end is 0,
       at a time limit too: policy and value function see the time t
    3. up to 20 times, on the whole batch, with r = pi(a | s) / pi_old(a | s), D = KL(pi_old || pi):
           minimise  -E[ r A ] + beta D + 50 max(0, D - 2 d)^2       until D > 4 d, d the target
    4. D > 2 d: beta *= 1.5; D < d / 2: beta /= 1.5; at its limits the learning rate moves, too
    5. fit the value function to R of this batch and of the one before

    python ppo_kl_adaptive.py --env-id Hopper-v4                    # train, 1M steps
    python ppo_kl_adaptive.py HalfCheetah-v4 -n 3000 -b 5           # the original's command line
    python ppo_kl_adaptive.py --resume runs/RUN                     # go on where it stopped
    python ppo_kl_adaptive.py --evaluate runs/RUN --capture-video   # play it greedily

This is `--servo coady`. `schulman` is the PPO paper's: beta doubles at D > 1.5 d, halves at D < d /
1.5, no more; with `fixed` it stays. `learning-rate` is what rl_games and RSL-RL call adaptive: the
clipped loss, no penalty, and after each step, D > 2 d: rate / 1.5, D < d / 2: rate * 1.5.

Expect 2,600 on Hopper-v4 after 1.5M steps (one seed of three falls back to 500) and 900 to 2,600 on
HalfCheetah-v4 after 1M, in three to five minutes per 1M steps on one CPU core (README.md: others).
Left out on purpose: pixels, recurrence, several or mixed action branches.
"""

import atexit
import contextlib
import copy
import fcntl
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
import zipfile
from collections import deque
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tyro.conf import arg


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
    evaluate: Path | None = None  # play the run in this folder, greedily and with sampled actions
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 10  # iterations between checkpoints

    # Environments
    env_id: Annotated[str, arg(aliases=["--env-name"])] = "Hopper-v4"  # gymnasium's, dm_control/...
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"frame_skip": 2}'
    env_workers: int = 0  # processes that step the environments; 0: the main process
    num_envs: int = 1  # environments played side by side; their whole episodes are pooled

    # Algorithm
    total_timesteps: int = 1_000_000  # steps of the whole run; the last iteration may overshoot
    num_episodes: Annotated[int, arg(aliases=["-n"])] = 0  # episodes of the run, instead of steps
    episodes_per_batch: Annotated[int, arg(aliases=["--batch-size", "-b"])] = 20  # episodes (b)
    gamma: Annotated[float, arg(aliases=["-g"])] = 0.995  # discount factor
    gae_lambda: Annotated[float, arg(aliases=["--lam", "-l"])] = 0.98  # lambda of the advantage
    update_epochs: int = 20  # at most so many passes over an iteration's batch, one step each
    value_epochs: int = 10  # passes of the value function, in minibatches of 256 to 511
    hid1_mult: Annotated[int, arg(aliases=["-m"])] = 10  # first hidden layers' units per input
    policy_logvar: Annotated[float, arg(aliases=["-v"])] = -1.0  # initial log variance of actions
    learning_rate: float | None = None  # the policy's; default 9e-4 / sqrt(second layer's units)
    value_learning_rate: float | None = None  # default 1e-2 / sqrt(second layer's units)
    servo: Literal["coady", "schulman", "fixed", "learning-rate"] = "coady"  # how to hold the KL
    kl_targ: Annotated[float | None, arg(aliases=["-k"])] = None  # d: coady's 0.003, others 0.01
    beta: float | None = None  # initial weight of the KL penalty; 1 or, with learning-rate, 0
    bootstrap_truncation: bool = False  # departure: the value after a time limit is not 0
    lambda_returns: bool = False  # departure: the value function learns advantages + values

    def __post_init__(self):
        """Raise ValueError, which tyro shows, for wrong arguments."""
        low = {"learning_rate": 1e-9, "value_learning_rate": 1e-9, "kl_targ": 1e-9, "seed": 0}
        low |= {"num_episodes": 0, "policy_logvar": -20, "env_workers": 0}
        high = {"gamma": 1, "gae_lambda": 1, "policy_logvar": 20}
        high |= {"num_envs": self.episodes_per_batch, "env_workers": max(self.num_envs, 0)}
        check(self, low, high)
        if self.env_id.startswith("envpool:"):
            raise ValueError(f"--env-id {self.env_id}: EnvPool's play no whole episodes")


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


KEPT = ("seed", "num_envs", "policy_logvar", "beta")  # by a resumed run


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):  # the original's environment name
        argv = ["--env-id", *argv]
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
def make_env(env_id: str, /, **options) -> gym.Env:
    """A gymnasium environment with flat observations; exits with one line if it can't be made."""
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    module = "shimmy:" if env_id.startswith("dm_control/") else ""
    try:
        env = gym.make(f"{module}{env_id}", **{"disable_env_checker": True} | options)
        with contextlib.ExitStack() as refused:
            refused.callback(env.close)
            check_spaces(env_id, env.observation_space, env.action_space)
            refused.pop_all()
    except Exception as error:  # whatever gymnasium or the environment's own code raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"raised in {place.filename}, line {place.lineno}"
        fail(f"--env-id {env_id}: {error!r}, {where}; your own: module:Id; arguments: --env-kwargs")
    space = env.observation_space
    return env if gym.spaces.flatten_space(space) == space else gym.wrappers.FlattenObservation(env)


# Spaces that flatten to a fixed number of numbers
VECTORS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def leaves(space: gym.Space) -> list[gym.Space]:
    """The spaces inside a Dict or Tuple, nested ones too. Any other space is its own one leaf."""
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return [space]
    parts = space.values() if isinstance(space, gym.spaces.Dict) else space
    return [leaf for part in parts for leaf in leaves(part)]


def check_spaces(env_id: str, space: gym.Space, actions: gym.Space):
    """Exit with one line if this script can't learn with these spaces."""
    pixels = any(leaf.dtype == np.uint8 and len(leaf.shape) > 1 for leaf in leaves(space))
    vector = all(isinstance(leaf, VECTORS) for leaf in leaves(space)) and not pixels
    if not vector or not 1 <= gym.spaces.flatdim(space) <= 20_000:
        hint = "observations are no vector (MiniGrid: a Flat wrapper); pixels: ppo_pixels.py"
        fail(f"--env-id {env_id}: {space}: {hint}")
    if not isinstance(actions, gym.spaces.Box | gym.spaces.Discrete):
        hint = "a Box or Discrete of actions is needed; several choices: ppo.py"
        fail(f"--env-id {env_id}: {actions}: {hint}")


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def seed_others(seed: int):
    """Seed the global generators. Most environments have their own, `np_random`, a few do not."""
    random.seed(seed)
    np.random.seed(seed)


def to_env(space: gym.Space, actions: np.ndarray) -> np.ndarray:
    """Choices [N], counted from 0, or actions [N, A] in a space's shape, type and count. They are
    as they were drawn, perhaps beyond a box; only whole numbers are cut at its bounds."""
    if isinstance(space, gym.spaces.Discrete):
        return (actions + space.start).astype(space.dtype)
    shaped = actions.reshape(-1, *space.shape)
    if space.dtype.kind in "iu":
        shaped = np.rint(np.minimum(np.maximum(shaped, space.low), space.high))
    return shaped.astype(space.dtype)


class Envs:
    """N environments in this process, stepped one after the other. Every episode has its own seed.

    Whole episodes are played: the step of an environment whose episode is over ignores its action
    and begins the next one, with reward 0.
    """

    def __init__(self, envs: list[gym.Env], args: Args, numbers=(0,), played=None):
        self.envs = envs
        self.args = args
        self.numbers = list(numbers)
        self.observation_space = envs[0].observation_space
        self.action_space = envs[0].action_space
        self.episodes = [episode for episode, _ in played or [(-1, ())] * len(envs)]
        self.rewards = [[] for _ in envs]
        self.obs = np.zeros((len(envs), *self.observation_space.shape), np.float32)  # [N, D]
        self.over = np.ones(len(envs), bool)  # [N], no episode is running
        self.lengths = np.zeros(len(envs), int)  # [N], steps of the episode so far
        self.ended = []  # (environment, return, length) of each episode that the last step ended

    def reset(self, i: int):
        """Begin the next episode of an environment."""
        self.episodes[i] += 1
        self.rewards[i] = []
        self.over[i] = False
        self.lengths[i] = 0
        seed = episode_seed(self.args.seed, self.numbers[i], self.episodes[i])
        seed_others(seed)
        obs, _ = self.envs[i].reset(seed=seed)
        self.obs[i] = np.asarray(obs).reshape(self.observation_space.shape)

    def play(self, i: int, shaped: np.ndarray):
        """One step of an environment: reward, terminated, truncated."""
        rewards = self.rewards[i]
        obs, reward, terminated, truncated, _ = self.envs[i].step(shaped)
        try:
            rewards.append(float(np.asarray(reward).item()))
            over = bool(terminated or truncated)
        except (TypeError, ValueError):  # an array or None instead of one number
            what = f"reward {reward}, terminated {terminated}, truncated {truncated}"
            hint = "one of each is needed (several rewards: a wrapper that weighs them)"
            raise ValueError(f"{self.args.env_id}: {what}: {hint}") from None
        self.obs[i] = np.asarray(obs).reshape(self.observation_space.shape)
        self.over[i] = over
        self.lengths[i] = len(rewards)
        if over:
            self.ended.append((self.numbers[i], math.fsum(rewards), len(rewards)))
        elif len(rewards) > 100_000:
            hint = """max_episode_steps, --env-kwargs '{"max_episode_steps": 1000}'"""
            raise TimeoutError(f"100,000 steps, no end: whole episodes need {hint}")
        return rewards[-1], bool(terminated), bool(truncated)

    def step(self, actions: np.ndarray, going: np.ndarray):
        """Take actions [N, A] or choices [N] in the environments that are `going` [N]: rewards,
        terminated, truncated [N]."""
        rewards = [0.0] * len(actions)  # lists are filled faster than arrays
        terminated = [False] * len(actions)
        truncated = [False] * len(actions)
        self.ended = []
        shaped = to_env(self.action_space, actions)
        for i in going.nonzero()[0].tolist():
            if self.over[i]:
                self.reset(i)
            else:
                rewards[i], terminated[i], truncated[i] = self.play(i, shaped[i])
        return rewards, terminated, truncated

    def shown(self) -> dict[str, np.ndarray]:
        """What the rollout sees of the environments, [N, ...] each."""
        return {"obs": self.obs, "over": self.over, "lengths": self.lengths}

    def played(self) -> list[tuple[int, np.ndarray]]:
        """The number of each environment's last episode; no actions: between iterations none runs,
        so that none has to be replayed."""
        return [(episode, np.zeros(0)) for episode in self.episodes]

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
    """Environments in this process or in workers, whose next episodes follow the checkpoint's."""
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


class Gaussian(NamedTuple):
    mean: torch.Tensor  # [B, A]
    logvar: torch.Tensor  # [B, A], the same in every state

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:  # [B]
        squares = (actions - self.mean).square() * torch.exp(-self.logvar)
        return -0.5 * (squares + self.logvar + math.log(2.0 * math.pi)).sum(-1)

    def kl(self, new: "Gaussian") -> torch.Tensor:  # KL(self || new) [B]
        squares = (new.mean - self.mean).square() * torch.exp(-new.logvar)
        change = self.logvar - new.logvar
        return 0.5 * (squares + change.exp() - change - 1.0).sum(-1)

    def entropy(self) -> torch.Tensor:
        return 0.5 * (self.logvar + math.log(2.0 * math.pi * math.e)).sum(-1)


class Categorical(NamedTuple):
    logprobs: torch.Tensor  # [B, n]

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:  # [B]
        return self.logprobs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def kl(self, new: "Categorical") -> torch.Tensor:  # KL(self || new) [B]
        return (self.logprobs.exp() * (self.logprobs - new.logprobs)).sum(-1)

    def entropy(self) -> torch.Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum(-1)


def second_units(inputs: int, hid1_mult: int, third: int) -> int:
    """Units of the second hidden layer, by which the learning rates are chosen, too."""
    return math.isqrt(hid1_mult * inputs * third)


def mlp(inputs: int, hid1_mult: int, third: int, outputs: int) -> nn.Sequential:
    """Three layers of tanh units, the second of the geometric mean of the others' numbers, and a
    linear one; weights ~ N(0, 1 / fan-in) in all, biases 0."""
    first = hid1_mult * inputs
    sizes = inputs, first, second_units(inputs, hid1_mult, third), third, outputs
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())][:-1])


@torch.no_grad()
def as_numpy(network: nn.Module, scale=1.0, shift=0.0):
    """scale * network(x) + shift, with the present weights, as a function of arrays x [N, D].
    Linear layers and tanh run in numpy, which is faster for few rows; others run in torch."""
    scale, shift = (torch.as_tensor(x).cpu() for x in (scale, shift))
    if type(network) is nn.Sequential:
        *hidden, last = network
        steps = [np.tanh if type(layer) is nn.Tanh else as_numpy(layer) for layer in hidden]
        steps.append(as_numpy(last, scale, shift))

        def function(x: np.ndarray) -> np.ndarray:
            for step in steps:
                x = step(x)
            return x

        return function
    if type(network) is nn.Linear and network.bias is not None:
        weight = (network.weight.cpu() * scale[..., None]).numpy().T
        bias = (network.bias.cpu() * scale + shift).numpy()
        return lambda x: x @ weight + bias
    module = copy.deepcopy(network).cpu().requires_grad_(False)
    return lambda x: (module(torch.from_numpy(x)) * scale + shift).numpy()


class Agent(nn.Module):
    """Networks, scale of observations, optimisers and servo: all that is needed to act and to learn
    in environments with the spaces of `env`. `time` is the number of an episode's steps so far."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        space = env.action_space
        (dim,) = env.observation_space.shape
        self.discrete = isinstance(space, gym.spaces.Discrete)
        self.action_shape = space.shape
        self.outputs = int(space.n) if self.discrete else math.prod(space.shape)
        self.actor = mlp(dim + 1, args.hid1_mult, 10 * self.outputs, self.outputs)
        self.critic = mlp(dim + 1, args.hid1_mult, 5, 1)
        groups = [{"params": self.actor.parameters(), "speed": 1}]
        if not self.discrete:
            # the original's is the sum of `speed` equal parameters, and Adam moves each as far
            self.actor_logvar = nn.Parameter(torch.full((self.outputs,), args.policy_logvar))
            groups.append({"params": [self.actor_logvar], "speed": 100 * self.outputs // 48})
        units = second_units(dim + 1, args.hid1_mult, 10 * self.outputs)
        value_units = second_units(dim + 1, args.hid1_mult, 5)
        rate = args.learning_rate or 9e-4 / math.sqrt(units)
        value_rate = args.value_learning_rate or 1e-2 / math.sqrt(value_units)
        value_adam = torch.optim.Adam(self.critic.parameters(), value_rate, fused=True)
        policy_adam = torch.optim.Adam(groups, rate, fused=True)
        self.optimizers = {"policy": policy_adam, "value": value_adam}
        self.obs_moments = RunningMoments((dim,))
        self.obs_moments.var.zero_()  # before the warm-up observations are divided by 0.3
        self.replay = ()  # features [B, D + 1] and returns [B] of the batch before
        self.servo = Servo(**PRESETS[args.servo])
        if args.kl_targ is not None:
            self.servo.kl_targ = args.kl_targ
        if args.beta is not None:
            self.servo.beta = args.beta
        self.rng = np.random.default_rng(args.seed)  # draws actions and minibatches

    def features(self, obs: torch.Tensor, time) -> torch.Tensor:
        """Raw observations [..., D] less their mean, over 3 (deviation + 0.1), and time [...]."""
        scaled = (obs - self.obs_moments.mean) / (3.0 * (self.obs_moments.var.sqrt() + 0.1))
        time = 0.001 * torch.as_tensor(time, device=obs.device).expand(obs.shape[:-1])
        return torch.cat([scaled, time.unsqueeze(-1)], dim=-1).float()

    def policy(self, features: torch.Tensor) -> Gaussian | Categorical:
        """The distribution of actions at features [B, D + 1]."""
        output = self.actor(features)
        if self.discrete:
            return Categorical(output.log_softmax(dim=-1))
        return Gaussian(output, self.actor_logvar.expand_as(output).clone())

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None, time=0):
        """Action (sampled unless given), its log-probability [B], entropy [B] and value [B] at raw
        observations [B, D], `time` steps into their episodes."""
        features = self.features(obs, time)
        policy = self.policy(features)
        value = self.critic(features).squeeze(-1)
        if action is None:
            sample = self.numpy_actor()(obs.float().cpu().numpy(), self.noise(len(obs)), time)
            action = torch.as_tensor(sample, device=obs.device)
        return action, policy.log_prob(action), policy.entropy(), value

    @torch.no_grad()
    def numpy_policy(self):
        """The policy as it is now, as a function of raw observations [N, D] and time [N]: means and
        deviation or, for choices, logits and 1. `check_actor` compares it with `policy` once a
        rollout."""
        moments = self.obs_moments
        shift = moments.mean.float().cpu().numpy()
        scale = (1.0 / (3.0 * (moments.var.sqrt() + 0.1))).float().cpu().numpy()
        logvar = torch.zeros(()) if self.discrete else self.actor_logvar
        std = (0.5 * logvar).exp().cpu().numpy()
        output = as_numpy(self.actor)

        def policy(obs: np.ndarray, time=0):
            x = np.empty((len(obs), len(shift) + 1), np.float32)
            x[:, :-1] = (obs - shift) * scale
            x[:, -1] = 0.001 * np.asarray(time)
            return output(x), std

        return policy

    def numpy_actor(self):
        """`act` with the present weights, for rows [N, D] and, of a Box, noise [N, A]."""
        policy = self.numpy_policy()

        def act(obs: np.ndarray, noise: np.ndarray | None = None, time=0) -> np.ndarray:
            x, std = policy(obs, time)
            x = x if noise is None else x + std * noise
            return x.argmax(axis=-1) if self.discrete else x

        return act

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None, time=0) -> np.ndarray:
        """Actions [N, ...] at raw observations [N, D] and time [N], or one time for all: the means
        or likeliest ones or, given `noise(N)`, samples. They may lie beyond the box."""
        actions = self.numpy_actor()(np.asarray(obs, np.float32), noise, time)
        return actions.reshape(-1, *self.action_shape)

    def noise(self, num: int) -> np.ndarray:
        """Noise for `num` actions; for choices Gumbel's, so that the argmax is a sample."""
        if self.discrete:
            return self.rng.gumbel(size=(num, self.outputs)).astype(np.float32)
        return self.rng.standard_normal((num, self.outputs), np.float32)


def load_adam(adam: torch.optim.Adam, state: dict):
    """Set what an optimizer has gathered; its settings stay those of the code."""
    parameters = [p for group in adam.param_groups for p in group["params"]]
    for number, gathered in state.items():
        for name in gathered.keys() - {"step"}:
            x = gathered[name]
            if x.shape != parameters[number].shape:
                raise ValueError(f"{name} of parameter {number} has shape {tuple(x.shape)}")
            gathered[name] = torch.empty_like(parameters[number]).copy_(x)  # in the same layout
    adam.load_state_dict(adam.state_dict() | {"state": state})


def check_learned(agent: nn.Module, *optimizers: torch.optim.Adam):
    """Raise RuntimeError for a parameter of no optimizer: it was made or replaced after them."""
    known = {p for adam in optimizers for group in adam.param_groups for p in group["params"]}
    for name, p in agent.named_parameters():
        if p.requires_grad and p not in known:
            raise RuntimeError(f"{name} is in no optimizer: it would never be learned")


@torch.no_grad()
def check_actor(agent: Agent, obs: np.ndarray, time: np.ndarray):
    """Raise RuntimeError if `numpy_policy` is not the learning policy, at observations [B, D] and
    times [B]."""
    device = agent.obs_moments.mean.device
    acting = agent.numpy_policy()(obs, time)
    output, std = (torch.as_tensor(x, device=device) for x in acting)
    given = (torch.as_tensor(x, device=device) for x in (obs, time))
    learned = agent.policy(agent.features(*given))
    acting = Gaussian(output, 2.0 * std.log().expand_as(output))
    if agent.discrete:
        acting = Categorical(output.log_softmax(dim=-1))
    for acts, learns in zip(acting, learned, strict=True):
        if ((acts - learns).abs() > 1e-3 * (1.0 + learns.abs())).any():
            raise RuntimeError("numpy_policy acts by another policy than `policy` learns")


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values [T + 1, ...]."""
    advantages = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    ended = np.logical_or(terminated, truncated)
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
    return advantages


class Rollout(NamedTuple):
    obs: np.ndarray  # [T + 1, E, D], raw, of E whole episodes, the longest of T steps
    actions: np.ndarray  # [T, E, A] or [T, E], as sampled
    rewards: np.ndarray  # [T, E]
    lengths: np.ndarray  # [E], steps; beyond them all is 0 and means nothing
    terminated: np.ndarray  # [E], at the last step
    truncated: np.ndarray  # [E], at the last step

    @property
    def valid(self) -> np.ndarray:  # [T, E]
        return np.arange(len(self.rewards))[:, None] < self.lengths


@dataclass
class Servo:
    """Keeps the KL of each update near kl_targ, by the weight of the penalty, beta, or by the
    learning rate. The numbers here are Coady's; PRESETS has those of others."""

    kl_targ: float = 0.003  # d
    beta: float = 1.0
    tolerance: float = 2.0  # beta moves when the KL ends beyond d times this, or below d over this,
    factor: float = 1.5  # by this factor,
    beta_min: float = 1 / 35  # within these limits
    beta_max: float = 35.0
    hinge_coef: float = 50.0  # weight of max(0, KL - 2 d)^2
    early_stop: float = 4.0  # no further pass once the KL exceeds d times this
    clip_coef: float = 0.0  # epsilon of the clipped surrogate; 0: unclipped
    lr_servo: Literal["with-beta", "with-kl", "never"] = "with-beta"  # what moves the learning rate
    lr_multiplier: float = 1.0

    def adapt(self, kl: float):
        """Adapt beta after an update that ended at this KL; the new beta may move the rate."""
        if kl > self.kl_targ * self.tolerance:
            self.beta = min(self.beta_max, max(self.beta, self.beta_min) * self.factor)
            if self.lr_servo == "with-beta" and self.beta > 30 and self.lr_multiplier > 0.1:
                self.lr_multiplier /= 1.5
        elif kl < self.kl_targ / self.tolerance:
            self.beta = max(self.beta_min, self.beta / self.factor)
            if self.lr_servo == "with-beta" and self.beta < 1 / 30 and self.lr_multiplier < 10:
                self.lr_multiplier *= 1.5

    def adapt_rate(self, kl: float, learning_rate: float):
        """Adapt the learning rate after a pass over the batch, between 1e-5 and 1e-2."""
        if self.lr_servo == "with-kl" and kl > self.kl_targ * self.tolerance:
            self.lr_multiplier = max(self.lr_multiplier / 1.5, 1e-5 / learning_rate)
        elif self.lr_servo == "with-kl" and 0.0 < kl < self.kl_targ / self.tolerance:
            self.lr_multiplier = min(self.lr_multiplier * 1.5, 1e-2 / learning_rate)


# The paper has no limits. But a beta of 0 would never rise again; at 1e-3 the penalty is no longer
# felt (beta d is 1e-5, where E[r A] moves by some 0.01), and ten doublings bring it back to 1.
PAPER = {"kl_targ": 0.01, "tolerance": 1.5, "factor": 2.0, "beta_min": 1e-3, "beta_max": 1e9}
PAPER |= {"hinge_coef": 0.0, "early_stop": math.inf, "lr_servo": "never"}
FIXED = PAPER | {"factor": 1.0, "beta_min": 0.0}
RATE = FIXED | {"beta": 0.0, "tolerance": 2.0, "clip_coef": 0.2, "lr_servo": "with-kl"}
PRESETS = {"coady": {}, "schulman": PAPER, "fixed": FIXED, "learning-rate": RATE}


def advantages_and_returns(data: Rollout, values: np.ndarray, args: Args):
    """Advantages and targets of the value function [T, E], given values [T + 1, E]. The value after
    an episode's last step is 0, unless a time limit is to bootstrap."""
    rewards = data.rewards * (1.0 - args.gamma if args.gamma < 0.999 else 1.0)
    last = np.arange(1, len(values))[:, None] == data.lengths
    zero_after = data.terminated | (data.truncated & (not args.bootstrap_truncation))
    advantages = gae(rewards, values, last & zero_after, last, args.gamma, args.gae_lambda)
    if args.lambda_returns:
        return advantages, advantages + values[:-1]
    # discounted sums of rewards: the GAE at lambda = 1 of values that are 0 but after the end
    after = np.where(np.arange(len(values))[:, None] == data.lengths, values, 0.0)
    return advantages, gae(rewards, after, last & zero_after, last, args.gamma, 1.0)


def policy_loss(policy, old, old_logprobs, actions, advantages, servo: Servo):
    """The penalised objective, -E[r A] alone, the mean KL(old || new) and the mean entropy."""
    ratio = (policy.log_prob(actions) - old_logprobs).exp()
    surrogate = ratio * advantages
    if servo.clip_coef:
        clipped = ratio.clamp(1.0 - servo.clip_coef, 1.0 + servo.clip_coef)
        surrogate = torch.min(surrogate, clipped * advantages)
    kl = old.kl(policy).mean()
    hinge = (kl - 2.0 * servo.kl_targ).clamp(min=0.0).square()
    loss = -surrogate.mean() + servo.beta * kl + servo.hinge_coef * hinge
    return loss, -(ratio * advantages).mean(), kl, policy.entropy().mean()


def fit_policy(agent: Agent, features, actions, advantages, args: Args) -> dict[str, float]:
    """Up to `update_epochs` passes over the batch [B, ...], the early stop, and the servo."""
    servo = agent.servo
    servo.kl_targ = args.kl_targ or servo.kl_targ
    adam = agent.optimizers["policy"]
    rate = args.learning_rate or adam.defaults["lr"]
    with torch.no_grad():
        old = agent.policy(features)
        old_logprobs = old.log_prob(actions)
    for epoch in range(args.update_epochs + 1):
        # the loss that the next step descends also measures what the last one did
        given = old, old_logprobs, actions, advantages, servo
        loss, *measured = policy_loss(agent.policy(features), *given)
        surrogate, kl, entropy = torch.stack(measured).tolist()
        servo.adapt_rate(kl, rate)
        if epoch == args.update_epochs or kl > servo.early_stop * servo.kl_targ:
            break
        for group in adam.param_groups:
            group["lr"] = rate * servo.lr_multiplier * group["speed"]
        adam.zero_grad()
        loss.backward()
        adam.step()
    servo.adapt(kl)
    metrics = {"losses/policy_loss": surrogate, "losses/kl": kl, "losses/entropy": entropy}
    metrics |= {"charts/lr_multiplier": servo.lr_multiplier, "charts/policy_passes": epoch}
    return metrics | {"charts/learning_rate": rate * servo.lr_multiplier, "charts/beta": servo.beta}


def fit_value(agent: Agent, features, returns, args: Args):
    """Fit the value function to returns [B] at features [B, D + 1] and to the batch before, whose
    features and returns stay as they were; then keep this batch in its place."""
    adam = agent.optimizers["value"]
    for group in adam.param_groups:
        group["lr"] = args.value_learning_rate or adam.defaults["lr"]
    inputs = features
    targets = returns
    if agent.replay:
        inputs, targets = map(torch.cat, zip((features, returns), agent.replay, strict=True))
    # minibatches of 256 to 511; a pass shuffles all, but stops after as many as this batch has
    batches = max(len(returns) // 256, 1)
    width = len(returns) // batches
    for _ in range(args.value_epochs):
        order = torch.as_tensor(agent.rng.permutation(len(targets)), device=targets.device)
        for rows in order[: batches * width].split(width):
            loss = (agent.critic(inputs[rows]).squeeze(-1) - targets[rows]).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    agent.replay = features, returns


def update(agent: Agent, data: Rollout, args: Args) -> dict[str, float]:
    """One iteration of learning: advantages, policy, value function, in this order."""
    check_learned(agent, *agent.optimizers.values())
    valid = data.valid
    device = agent.obs_moments.mean.device
    # scaled for learning as they were for acting; the moments take them in for the next iteration
    obs = torch.as_tensor(data.obs, device=device)
    features = agent.features(obs, torch.arange(len(obs), device=device)[:, None])
    agent.obs_moments.update(data.obs[:-1][valid])
    with torch.no_grad():
        values = agent.critic(features).squeeze(-1)  # [T + 1, E]
    both = advantages_and_returns(data, values.cpu().double().numpy(), args)
    advantages, returns = (x[valid] for x in both)  # [B]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    batch = data.actions[valid], advantages.astype(np.float32), returns.astype(np.float32)
    actions, advantages, returns = (torch.as_tensor(x, device=device) for x in batch)
    features = features[:-1][valid]
    values = values[:-1][valid]
    metrics = fit_policy(agent, features, actions, advantages, args)
    fit_value(agent, features, returns, args)
    residual = returns - values  # as they were before the fit
    unexplained = residual.var(correction=0) / returns.var(correction=0).clamp(min=1e-12)
    metrics["losses/value_loss"] = residual.square().mean().item()
    metrics["losses/explained_variance"] = 1.0 - unexplained.item()
    if not agent.discrete:
        metrics["charts/policy_std"] = (0.5 * agent.actor_logvar).exp().mean().item()
    return metrics


# --- rollout --------------------------------------------------------------------------------------
@dataclass
class Episode:
    """What was seen and done in it so far, one row for each step; there is one more observation."""

    obs: list[np.ndarray]
    actions: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False


def side_by_side(episodes: list[list]) -> np.ndarray:
    """Rows [t, ...] of E episodes as one array [T, E, ...], with 0 beyond their ends."""
    tensors = [torch.as_tensor(np.array(rows)) for rows in episodes]
    return nn.utils.rnn.pad_sequence(tensors).numpy()


def rollout(agent: Agent, envs: Envs | WorkerEnvs, episodes: int, run: "Run | None" = None):
    """Play whole episodes, a Rollout. As many start as are needed, and all are played to their
    ends: taking the first that end, or cutting the last off, would favour short ones. `run` logs
    them."""
    N = len(envs.over)
    left = episodes  # episodes still to start
    act = agent.numpy_actor()
    actions = np.zeros(N, int) if agent.discrete else np.zeros((N, agent.outputs), np.float32)
    running = {}  # by environment
    ended = []  # in the order of their ends
    while len(ended) < episodes:
        if left and np.count_nonzero(envs.over):
            over = envs.over & (envs.over.cumsum() <= left)
            envs.step(actions, over)  # starts new episodes
            left -= int(over.sum())
            running |= {i: Episode([envs.obs[i].copy()]) for i in over.nonzero()[0].tolist()}
        going = ~envs.over
        obs = envs.obs[going]  # [K, D], of those that play
        time = envs.lengths[going]
        actions[going] = act(obs, agent.noise(len(obs)), time)
        rewards, terminated, truncated = envs.step(actions, going)
        for i in going.nonzero()[0].tolist():
            episode = running[i]
            episode.obs.append(envs.obs[i].copy())
            episode.actions.append(actions[i].copy())
            episode.rewards.append(rewards[i])
            if envs.over[i]:
                episode.terminated = terminated[i]
                episode.truncated = truncated[i]
                ended.append(episode)
        if run:
            run.global_step += len(obs)
            if envs.ended:
                run.log_episodes(envs.ended)
    check_actor(agent, np.array(ended[0].obs[:8]), np.arange(len(ended[0].obs[:8])))
    return Rollout(
        side_by_side([episode.obs for episode in ended]),
        side_by_side([episode.actions for episode in ended]),
        side_by_side([episode.rewards for episode in ended]),
        np.array([len(episode.rewards) for episode in ended]),
        np.array([episode.terminated for episode in ended]),
        np.array([episode.truncated for episode in ended]),
    )


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
    state["optimizers"] = {k: x.state_dict()["state"] for k, x in agent.optimizers.items()}
    state["servo"] = {"beta": agent.servo.beta, "lr_multiplier": agent.servo.lr_multiplier}
    state |= {"replay": agent.replay, "rng": agent.rng.bit_generator.state}
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
        if not path.is_file():  # reading a pipe would block
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
    module, _, name = args.env_id.rpartition(":")
    if module != "envpool":  # only the command line may name a module to import
        args.env_id = name
    return content | {"args": args}


def load(folder: Path, env=None, args: Args | None = None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
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
        fail(f"{folder}: its agent, by {maker}, does not fit the environment: {error}")
    return agent, args


def drawn_env(args: Args) -> gym.Env:
    """An environment that can draw its frames; exits with one line if they can't."""
    if args.env_id.startswith("envpool:"):
        fail("--capture-video: of gymnasium's environments alone, not EnvPool's")
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display
    env = make_env(args.env_id, **json.loads(args.env_kwargs) | {"render_mode": "rgb_array"})
    if hasattr(env.unwrapped, "mujoco_renderer"):
        model = env.unwrapped.model
        if model.ncam:
            env.unwrapped.mujoco_renderer.camera_id = 0  # follows the robot
        # without a GPU shadows, smooth edges and reflections take nine tenths of the time
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        model.mat_reflectance[:] = 0.0
    try:
        env.reset(seed=0)
        env.render()
    except Exception as error:  # no display, or a package for drawing is missing
        env.close()
        fail(f"--capture-video: {args.env_id} can't be drawn: {error!r}")
    return env


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` greedily, then with sampled actions; returns the
    greedy returns. `capture_video` records the greedy episodes into its videos/."""
    greedy = play(args, "eval")
    sampled = play(replace(args, capture_video=False), "sampled")
    for name, returns in (("greedy", greedy), ("sampled", sampled)):
        print(f"{name}, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return greedy


def play(args: Args, name: str) -> list[float]:
    """Returns of `eval_episodes` episodes, printed under this name; "sampled" is not greedy."""
    played = replace(args, seed=episode_seed(args.seed, 2**31))
    if args.capture_video:
        refuse_links(args.evaluate)
        videos = str(args.evaluate / "videos")
        env = gym.wrappers.RecordVideo(drawn_env(args), videos, lambda _: True, disable_logger=True)
        envs = Envs([env], played)
        print(f"videos: {videos}")
    else:
        envs = own_envs(played, [0], None)
    returns = []
    bar = tqdm(unit="step", leave=False, disable=None)  # drawing frames takes a while
    with contextlib.closing(envs), bar:
        agent, _ = load(args.evaluate, envs)
        act = agent.numpy_actor()
        while len(returns) < args.eval_episodes:
            noise = agent.noise(1) if name == "sampled" else None
            try:
                envs.step(act(envs.obs, noise, envs.lengths), np.ones(1, bool))
            except TimeoutError as error:
                fail(str(error))
            bar.update()
            for _, episodic_return, _ in envs.ended:
                said = f"episodic_return={episodic_return:.2f}"
                bar.write(f"{name}_episode={len(returns)}, {said}")
                returns.append(episodic_return)
    return returns


# --- training -------------------------------------------------------------------------------------
def finished(run: Run, envs: Envs | WorkerEnvs, args: Args) -> bool:
    if not args.num_episodes:
        return run.global_step >= args.total_timesteps
    episodes = sum(episode + 1 for episode, _ in envs.played())
    return episodes - 5 >= args.num_episodes  # the five that set the first scale do not count


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
    """Set optimizers, servo, replayed batch and random numbers to what the checkpoint has."""
    device = agent.obs_moments.mean.device
    try:
        for name, adam in agent.optimizers.items():
            load_adam(adam, checkpoint["optimizers"][name])
        agent.servo.beta = float(checkpoint["servo"]["beta"])
        agent.servo.lr_multiplier = float(checkpoint["servo"]["lr_multiplier"])
        agent.replay = tuple(x.to(device) for x in checkpoint["replay"])
        if agent.replay:
            features, returns = agent.replay
            agent.critic(features).squeeze(-1) - returns  # fails if shapes differ
        agent.rng.bit_generator.state = checkpoint["rng"]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
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
        agent.to(device)
        if args.resume:
            restore(agent, checkpoint, args.resume)
        with stop_signals() as stop, Run(args, checkpoint) as run:
            run.bar.total = None if args.num_episodes else args.total_timesteps
            run.bar.write(f"{args.env_id} on {device}, in {run.folder}")
            save(run, agent, envs)
            while not finished(run, envs, args) and not stop:
                if run.iteration == 0:  # 5 episodes set the first scale, and serve nothing else
                    data = rollout(agent, envs, 5)
                    agent.obs_moments.update(data.obs[:-1][data.valid])
                data = rollout(agent, envs, args.episodes_per_batch, run)
                metrics = update(agent, data, args)
                check_finite(run.iteration, {"observations": data.obs, "rewards": data.rewards})
                check_finite(run.iteration, metrics | agent.state_dict())
                run.log(metrics)
                if run.iteration % args.checkpoint_interval == 0:
                    save(run, agent, envs)
            save(run, agent, envs)
            run.status = "finished" if finished(run, envs, args) else "running"
    return finish(run, agent, stop)


def finish(run: Run, agent: Agent, stop: list[int]) -> Path:
    """Print how to go on or to play; save the weights and record a video, if asked to."""
    # where it is imported, as in a notebook, the file itself
    program = sys.argv[0] if __name__ == "__main__" else os.path.relpath(__file__)
    script = f"python {shlex.quote(program)}"
    folder = shlex.quote(str(run.folder))
    if ":" in run.args.env_id.removeprefix("envpool:"):  # a module must be named again
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
