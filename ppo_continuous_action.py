# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.3,<4", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for continuous actions, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. Every iteration:

    1. take T steps in each of N environments with actions a ~ pi(a | s)
    2. A = GAE(lambda): a time limit bootstraps from the value of the true last observation, a
       termination does not, and the row after an episode's end (autoreset's) is never learned from
    3. for K epochs or until KL > target_kl, for each minibatch, with A normalised, r = pi / pi_old:
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_continuous_action.py  # --resume runs/RUN goes on, --evaluate runs/RUN plays
    python ppo_continuous_action.py --env-id envpool:Humanoid-v4 --num-envs 64 --env-workers 2

Expect 5,200 over the last 100 episodes of training on HalfCheetah-v4 (1M steps, two minutes on one
CPU core), and 6,300 of the final policy. Flags and tags are CleanRL's. Its defaults are
`--log-std-init 0 --no-scale-actions --clip-vloss --target-kl None --ent-coef 0`.
"""

import atexit
import contextlib
import copy
import difflib
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
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one; networks this small gain little from it
    num_threads: int = 1  # CPU threads of torch; more than one rarely helps networks this small
    compile: bool = True  # compile the update if a compiler works; results are the same to rounding
    compile_from: int = 15_000  # shorter runs, in gradient steps, are not compiled
    cudagraphs: bool = False  # on a GPU, compile the update to CUDA graphs
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
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Environments
    env_id: str = "HalfCheetah-v4"  # gymnasium's id, module:Id, dm_control/... or envpool:Id
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"frame_skip": 2}'
    num_envs: int = 1  # environments played side by side
    env_workers: int = 0  # processes (EnvPool: threads) for the environments; 0: the main process

    # Algorithm
    total_timesteps: int = 1_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 3e-4  # Adam's learning rate in the first iteration
    num_steps: int = 2048  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = False  # also clip the change of the value
    ent_coef: float = 0.01  # weight of the entropy bonus
    anneal_ent_coef: bool = True  # lower this weight linearly to 0
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient of all parameters is scaled down to this norm
    target_kl: float | None = 0.02  # stop the epochs once the mean approx_kl of one exceeds this
    rpo_alpha: float = 0.0  # RPO: noise in [-alpha, alpha] on the means, in learning only; 0: none
    log_std_init: float = -0.7  # initial log standard deviation of the actions, in their unit
    scale_actions: bool = True  # the actions' unit is half their box; otherwise the environment's
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute the last fields; raise ValueError, which tyro shows, for wrong arguments."""
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "compile_from": 0, "env_workers": 0, "log_std_init": -9}
        low |= {"minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {"gamma": 1, "gae_lambda": 1, "log_std_init": 9, "env_workers": self.num_envs}
        check(self, low, high)


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


KEPT = ("seed", "num_envs", "num_steps", "log_std_init", "scale_actions")  # by a resumed run


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
    if not isinstance(actions, gym.spaces.Box):
        hint = "a Box of actions is needed; for discrete ones use ppo.py"
        fail(f"--env-id {env_id}: {actions}: {hint}")


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def seed_others(seed: int):
    """Seed the global generators. Most environments have their own, `np_random`, a few do not."""
    random.seed(seed)
    np.random.seed(seed)


def to_env(box: gym.spaces.Box, actions: np.ndarray) -> np.ndarray:
    """Clip actions [N, A] to the box, in its shape and type; round them if it has whole numbers.
    The agent learns from its own actions, which are not clipped (continuous detail 5)."""
    shaped = actions.reshape(-1, *box.shape)
    clipped = np.minimum(np.maximum(shaped, box.low), box.high)
    if box.dtype.kind in "iu":
        clipped = np.rint(clipped)
    return clipped.astype(box.dtype, copy=False)


class Envs:
    """N environments in this process, stepped one after the other. Every episode has its own seed;
    the actions of the running ones are kept, to play them again on resuming.

    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    """

    def __init__(self, envs: list[gym.Env], args: Args, numbers=(0,), played=None):
        self.envs = envs
        self.args = args
        self.numbers = list(numbers)
        self.observation_space = envs[0].observation_space
        self.action_space = envs[0].action_space
        self.episodes = [-1] * len(envs)  # the number of each environment's running episode
        self.actions = [[] for _ in envs]  # of the running episodes
        self.rewards = [[] for _ in envs]
        self.over = np.zeros(len(envs), bool)  # [N], the last step ended an episode
        self.discounted = np.zeros(len(envs))  # [N], discounted sum of the rewards so far
        self.ended = []  # (environment, return, length) of each episode that the last step ended
        for i, (episode, _) in enumerate(played or ()):
            self.episodes[i] = episode - 1
        self.obs = np.stack([self.reset(i) for i in range(len(envs))])  # [N, D]
        for i, (_, actions) in enumerate(played or ()):
            for action in actions:
                if action not in self.action_space:
                    fail(f"{args.resume}: {action}, played before, is not in {self.action_space}")
                self.play(i, action)

    def reset(self, i: int) -> np.ndarray:
        """Begin the next episode of an environment; gives its first observation [D]."""
        self.episodes[i] += 1
        self.actions[i] = []
        self.rewards[i] = []
        self.over[i] = False
        self.discounted[i] = 0.0
        seed = episode_seed(self.args.seed, self.numbers[i], self.episodes[i])
        seed_others(seed)
        obs, _ = self.envs[i].reset(seed=seed)
        return np.array(obs, np.float32).reshape(self.observation_space.shape)

    def play(self, i: int, action: np.ndarray):
        """One step of an environment with an action of its space: reward, terminated, truncated."""
        obs, reward, terminated, truncated, _ = self.envs[i].step(action.copy())
        try:
            number = float(np.asarray(reward).item())
            self.over[i] = terminated or truncated
        except (TypeError, ValueError):  # an array or None instead of one number
            what = f"{self.args.env_id}: {reward=}, {terminated=}, {truncated=}"
            hint = "one of each is needed (several rewards: a wrapper that weighs them)"
            raise ValueError(f"{what}: {hint}") from None
        self.obs[i] = np.asarray(obs).reshape(self.observation_space.shape)
        self.actions[i].append(action)
        self.rewards[i].append(number)
        self.discounted[i] = self.args.gamma * self.discounted[i] + number
        return number, terminated, truncated

    def step(self, actions: np.ndarray):
        """Take actions [N, ...]: rewards, terminated, truncated [N]."""
        rewards = np.zeros(len(actions))
        terminated = np.zeros(len(actions), bool)
        truncated = np.zeros(len(actions), bool)
        self.ended = []
        for i, action in enumerate(to_env(self.action_space, actions)):
            if self.over[i]:
                self.obs[i] = self.reset(i)
                continue
            rewards[i], terminated[i], truncated[i] = self.play(i, action)
            if self.over[i]:
                both = math.fsum(self.rewards[i]), len(self.rewards[i])
                self.ended.append((self.numbers[i], *both))
        return rewards, terminated, truncated

    def shown(self) -> dict[str, np.ndarray]:
        """What the rollout sees of the environments, [N, ...] each."""
        return {"obs": self.obs, "over": self.over, "discounted": self.discounted}

    def played(self) -> list[tuple[int, np.ndarray]]:
        """What replays the running episodes: their numbers and actions so far, [t, ...]."""
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


class PoolEnvs:
    """EnvPool's environments, stepped by its own threads. Episodes can't be replayed: a run that
    is resumed at iteration `start` begins new ones, with other seeds."""

    def __init__(self, args: Args, num_envs: int, start: int):
        seeds = [episode_seed(args.seed, i, start) % 2**31 for i in range(num_envs)]
        threads = min(max(args.env_workers, 1), num_envs)
        options = {"env_type": "gymnasium", "num_envs": num_envs, "num_threads": threads}
        name = args.env_id.removeprefix("envpool:")
        near = []
        try:
            import envpool

            near = difflib.get_close_matches(name, envpool.list_all_envs())
            self.vector = envpool.make(name, **options, seed=seeds, **json.loads(args.env_kwargs))
        except Exception as error:  # not installed, or an unknown id or argument
            hint = f"near ids: {near}; arguments: --env-kwargs; EnvPool itself: pip install envpool"
            fail(f"--env-id {args.env_id}: {error!r}; {hint}")
        self.space = self.vector.observation_space
        self.action_space = self.vector.action_space
        check_spaces(args.env_id, self.space, self.action_space)
        self.observation_space = gym.spaces.flatten_space(self.space)
        self.gamma = args.gamma
        obs, _ = self.vector.reset()
        self.obs = self.flat(self.space, obs)  # [N, D]
        self.over = np.zeros(num_envs, bool)  # [N], the last step ended an episode
        self.discounted = np.zeros(num_envs)  # [N], discounted sum of the rewards so far
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, int)
        self.ended = []  # (environment, return, length) of each episode that the last step ended

    def step(self, actions: np.ndarray):
        """Take actions [N, ...]: rewards, terminated, truncated [N]."""
        going = ~self.over
        shaped = to_env(self.action_space, actions)
        obs, rewards, terminated, truncated, _ = self.vector.step(shaped)
        self.obs = self.flat(self.space, obs)
        self.over = terminated | truncated
        rewards = rewards.astype(np.float64)
        self.discounted = self.gamma * self.discounted * going + rewards
        self.returns = self.returns * going + rewards
        self.lengths = (self.lengths + 1) * going
        episodes = zip(self.returns.tolist(), self.lengths.tolist(), strict=True)
        self.ended = [(i, *both) for i, both in enumerate(episodes) if self.over[i]]
        return rewards, terminated, truncated

    def flat(self, space: gym.Space, obs) -> np.ndarray:
        """Observations of a space, perhaps a nested one, as rows [N, D]."""
        if isinstance(space, gym.spaces.Dict):
            return np.concatenate([self.flat(space[name], obs[name]) for name in space], axis=1)
        if not isinstance(space, gym.spaces.Box):  # discrete parts become one-hot
            shaped = np.reshape(obs, (len(obs), *space.shape))
            obs = np.stack([gym.spaces.flatten(space, row) for row in shaped])
        return np.asarray(obs, np.float32).reshape(len(obs), -1)

    def played(self) -> list:
        return []

    def close(self):
        self.vector.close()


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
    """Environments of the kind that the arguments name, as the checkpoint left them."""
    checkpoint = checkpoint or {"played": [], "counters": (0, 0, 0.0, 0)}
    if args.env_id.startswith("envpool:"):
        _, iteration, *_ = checkpoint["counters"]
        return PoolEnvs(args, num_envs, start=iteration)
    played = checkpoint["played"]
    if played and len(played) != num_envs:
        fail(f"{args.resume}: its checkpoint has no running episodes of {num_envs} environments")
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
    """Policy and value function for environments with the spaces of `env`."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        space = env.action_space
        (self.dim,) = env.observation_space.shape
        self.action_shape = space.shape
        outputs = math.prod(space.shape)
        self.critic = mlp(self.dim, 1, gain=1.0)  # two networks (detail 13)
        self.actor_mean = mlp(self.dim, outputs, gain=0.01)  # (continuous detail 4)
        # a deviation for each dimension, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full((outputs,), args.log_std_init))
        low = torch.tensor(space.low).float().ravel()
        high = torch.tensor(space.high).float().ravel()
        if not (args.scale_actions and (high - low).isfinite().all()):
            low = -torch.ones(outputs)
            high = torch.ones(outputs)
        self.register_buffer("origin", (low + high) / 2)
        self.register_buffer("unit", torch.where(high > low, (high - low) / 2, 1.0))
        self.obs_moments = RunningMoments((self.dim,))
        self.return_moments = RunningMoments()
        self.rng = np.random.default_rng(args.seed)  # draws actions and minibatches

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations [..., D] standardized and clipped to +-10 (continuous details 6, 7)."""
        scale = (self.obs_moments.var + 1e-8).rsqrt().float()
        return ((obs.float() - self.obs_moments.mean.float()) * scale).clamp(-10.0, 10.0)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [...] at observations [..., D]."""
        return self.critic(self.normalize(obs)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [B, A] (sampled unless given), its log-probability [B], entropy [B] and value [B]:
        components are independent, so log-probabilities add up (continuous details 1, 3)."""
        features = self.normalize(obs)
        mean = self.actor_mean(features)
        logstd = self.actor_logstd
        if action is None:
            action = self.origin + self.unit * (mean + logstd.exp() * torch.randn_like(mean))
        z = ((action - self.origin) / self.unit - mean) * torch.exp(-logstd)
        logscale = logstd + self.unit.log()
        logprob = -0.5 * z.square() - logscale - 0.5 * math.log(2.0 * math.pi)
        entropy = (logscale + 0.5 * math.log(2.0 * math.pi * math.e)).expand_as(mean)
        return action, logprob.sum(-1), entropy.sum(-1), self.critic(features).squeeze(-1)

    forward = get_action_and_value

    @torch.no_grad()
    def numpy_actor(self):
        """`act` with the present weights, in numpy, for rows [N, D] and noise [N, A]. Once a
        rollout `check_actor` compares it with `get_action_and_value`."""
        shift = self.obs_moments.mean.float().cpu().numpy()
        scale = (self.obs_moments.var + 1e-8).rsqrt().float().cpu().numpy()
        mean = as_numpy(self.actor_mean, self.unit, self.origin)
        std = (self.actor_logstd.exp() * self.unit).cpu().numpy()

        def act(obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
            x = mean(np.minimum(np.maximum((obs - shift) * scale, -10.0), 10.0))
            return x if noise is None else x + std * noise

        return act

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Mean actions [N, ...] at observations [N, D]; given `noise(N)`, samples. Not clipped."""
        actions = self.numpy_actor()(np.asarray(obs, np.float32), noise)
        return actions.reshape(-1, *self.action_shape)

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions."""
        return self.rng.standard_normal((*shape, len(self.unit)), np.float32)


@torch.no_grad()
def check_actor(agent: Agent, act, obs: np.ndarray, noise: np.ndarray):
    """Raise RuntimeError if `act` and `get_action_and_value` are two policies. For any Gaussian
    log pi(mean) - log pi(mean + std * noise) = |noise|^2 / 2."""
    actions = np.concatenate([act(obs), act(obs, noise)])
    given = (torch.as_tensor(x, device=agent.unit.device) for x in (np.tile(obs, (2, 1)), actions))
    _, logprobs, *_ = agent(*given)
    mean, sample = logprobs.cpu().numpy().reshape(2, -1)
    expected = 0.5 * np.square(noise).sum(axis=-1)
    if (np.abs(mean - sample - expected) > 0.01 * (1.0 + expected)).any():
        raise RuntimeError("numpy_actor acts by another policy than get_action_and_value learns")


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
    obs: np.ndarray  # [T + 1, N, D], raw
    actions: np.ndarray  # [T, N, A]
    rewards: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored
    # and whose reward is 0; its observation is the episode's true last one


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, D], raw
    actions: torch.Tensor  # [B, A]
    logprobs: torch.Tensor  # [B], before the update
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update
    noise: torch.Tensor  # [B, A], RPO's noise on the means; zeros [B, 1] without


def ppo_loss(agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and its
    metrics."""
    _, logprob, entropy, value = agent(batch.obs, batch.actions - batch.noise)
    logratio = logprob - batch.logprobs
    ratio = logratio.exp()

    advantages = batch.advantages
    if args.norm_adv:  # per minibatch (detail 7)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    error = (value - batch.returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        change = (value - batch.values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (batch.values + change - batch.returns).square())
    value_loss = 0.5 * error.mean()

    entropy = entropy.mean()  # its bonus keeps the policy exploring (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    if args.rpo_alpha:  # metrics are of the policy without the noise
        _, logprob, *_ = agent(batch.obs, batch.actions)
        logratio = logprob - batch.logprobs
        ratio = logratio.exp()
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -logratio.mean(), "approx_kl": (ratio - 1.0 - logratio).mean()}
    return loss, metrics | {"clipfrac": ((ratio - 1.0).abs() > args.clip_coef).float().mean()}


def trained(agent: Agent) -> dict[str, nn.Parameter]:
    """The parameters that are trained: those with `requires_grad`."""
    return {name: p for name, p in agent.named_parameters() if p.requires_grad}


def flat_adam(agent: Agent) -> dict[str, torch.Tensor]:
    """Adam's state. Parameters are one vector [P], of which the agent's own become views."""
    vector = nn.utils.parameters_to_vector(trained(agent).values()).detach()
    nn.utils.vector_to_parameters(vector, trained(agent).values())
    state = {name: torch.zeros_like(vector) for name in ("exp_avg", "exp_avg_sq")}
    return {"parameters": vector.requires_grad_(), "steps": vector.new_zeros(()), **state}


def check_views(agent: Agent):
    """Raise RuntimeError if a parameter was frozen, unfrozen or replaced after `flat_adam`: the
    optimizer would not follow."""
    place = 0
    vector = agent.adam["parameters"]
    for name, p in agent.named_parameters():
        inside = p.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
        if inside != p.requires_grad or (inside and p.storage_offset() != place):
            raise RuntimeError(f"{name} was frozen, unfrozen or replaced after flat_adam")
        if p._backward_hooks:
            raise RuntimeError(f"{name} has a hook on its gradient, which flat_adam does not call")
        place += p.numel() if inside else 0


def named_views(agent: Agent, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """The trained parameters as parts of the vector [P], by name. Modules may share a parameter,
    and networks a module, which has one name here."""
    learning = trained(agent).values()
    parts = vector.split([p.numel() for p in learning])
    views = {p: part.view(p.shape) for p, part in zip(learning, parts, strict=True)}
    named = {}
    for prefix, module in agent.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            if p in views:
                named[name] = views[p]
    return named


def minibatch_step(agent: Agent, adam: dict, batch: Batch, rows, learning_rate, args: Args):
    """One step of Adam (Kingma & Ba 2015, algorithm 1) on rows [M] of the batch; gives metrics."""
    views = named_views(agent, adam["parameters"])

    def policy(*given):
        return torch.func.functional_call(agent, views, given, tie_weights=False)

    loss, metrics = ppo_loss(policy, args, Batch(*[x[rows] for x in batch]))
    (grad,) = torch.autograd.grad(loss, adam["parameters"])
    with torch.no_grad():
        norm = grad.norm()  # over all parameters (detail 11)
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        adam["steps"] += 1.0
        adam["exp_avg"].lerp_(grad, 0.1)  # betas 0.9 and 0.999, eps 1e-5 (detail 3)
        adam["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        mean = adam["exp_avg"] / (1.0 - 0.9 ** adam["steps"])
        square = adam["exp_avg_sq"] / (1.0 - 0.999 ** adam["steps"])
        adam["parameters"] -= learning_rate * mean / (square.sqrt() + 1e-5)
        return [*metrics, "grad_norm"], torch.stack([*metrics.values(), norm])


def update(agent: Agent, data: Rollout, learning_rate: float, args: Args, step=minibatch_step):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    check_views(agent)
    seen = data.obs[:-1][data.valid]
    first = agent.obs_moments.count == 0
    if first:  # later, the scale changes after learning: acting and learning share it
        agent.obs_moments.update(seen)
    device = agent.adam["parameters"].device
    obs = torch.as_tensor(data.obs, device=device)
    actions = torch.as_tensor(data.actions, device=device)
    values = agent.get_value(obs).detach()  # [T + 1, N]
    _, logprobs, *_ = agent(obs[:-1], actions)
    numbers = data.rewards, values.cpu().double().numpy(), data.terminated, data.truncated
    advantages = torch.tensor(gae(*numbers, args.gamma, args.gae_lambda)).to(values)  # detail 5
    returns = advantages + values[:-1]
    noise = torch.zeros_like(returns)[..., None]
    fields = obs[:-1], actions, logprobs.detach(), advantages, returns, values[:-1], noise
    batch = Batch(*[x.flatten(0, 1) for x in fields])  # [B, ...], B = T * N

    rows = np.flatnonzero(data.valid)  # the rows to learn from
    num_minibatches = min(args.num_minibatches, len(rows) // 2)  # at least two rows in each
    if num_minibatches == 0:  # nothing to learn from
        return {}
    steps = []  # metrics of each step
    learning_rate = torch.tensor(learning_rate, device=device)
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(rows), device=device)
        if args.rpo_alpha:  # Rahman & Xue 2023, algorithm 1: shifted actions are shifted means
            noise = agent.rng.uniform(-args.rpo_alpha, args.rpo_alpha, batch.actions.shape)
            batch = batch._replace(noise=torch.as_tensor(noise).to(actions) * agent.unit)
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(num_minibatches):
            names, numbers = step(agent, agent.adam, batch, minibatch, learning_rate, args)
            steps.append(numbers.clone())  # CUDA graphs reuse their output
        approx_kl = torch.stack(steps[-num_minibatches:])[:, names.index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    if not first:
        agent.obs_moments.update(seen)
    means = torch.stack(steps).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
    error = batch.advantages[rows].var()  # variance of R - V
    scale = batch.returns[rows].var()  # variance of R
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    metrics["charts/policy_std"] = (agent.actor_logstd.exp() * agent.unit).mean().item()
    return metrics


# --- rollout --------------------------------------------------------------------------------------
def rollout(agent: Agent, envs: Envs | WorkerEnvs | PoolEnvs, run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1)."""
    T = args.num_steps
    N = args.num_envs
    obs = np.zeros((T + 1, *envs.obs.shape), np.float32)
    actions = np.zeros((T, N, len(agent.unit)), np.float32)
    rewards = np.zeros((T, N))
    discounted = np.zeros((T, N))
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    over = np.zeros((T, N), bool)  # rows after an episode's end
    noise = agent.noise(T, N)
    act = agent.numpy_actor()
    for t in range(T):
        obs[t] = envs.obs
        over[t] = envs.over
        actions[t] = act(obs[t], noise[t])
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t])
        discounted[t] = envs.discounted
        run.global_step += N - int(np.count_nonzero(over[t]))
        if envs.ended:
            run.log_episodes(envs.ended)
    obs[T] = envs.obs
    check_actor(agent, act, obs[:T][:8, 0], noise[:8, 0])
    # rewards over the deviation of the discounted returns, clipped (continuous details 8, 9)
    agent.return_moments.update(discounted[~over])
    rewards = np.clip(rewards / math.sqrt(agent.return_moments.var + 1e-8), -10.0, 10.0)
    return Rollout(obs, actions, rewards, terminated, truncated, ~over)


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
    state |= {"adam": agent.adam, "rng": agent.rng.bit_generator.state}
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


def load(folder: Path, env=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args = checkpoint["args"]
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
        envs = make_envs(played, 1)
    returns = []
    bar = tqdm(unit="step", leave=False, disable=None)  # drawing frames takes a while
    with contextlib.closing(envs), bar:
        agent, _ = load(args.evaluate, envs)
        act = agent.numpy_actor()
        for episode in range(args.eval_episodes):
            for _ in range(100_000):
                noise = agent.noise(1) if name == "sampled" else None
                envs.step(act(envs.obs, noise))
                bar.update()
                if envs.ended:
                    break
            else:
                fail("""100,000 steps, no end: try --env-kwargs '{"max_episode_steps": 1000}'""")
            _, episodic_return, _ = envs.ended[0]
            bar.write(f"{name}_episode={episode}, episodic_return={episodic_return:.2f}")
            returns.append(episodic_return)
    return returns


# --- training -------------------------------------------------------------------------------------
def compile_step(agent: Agent, args: Args):
    """`minibatch_step`, compiled unless the run is short or no compiler works."""
    steps = args.num_iterations * args.update_epochs * args.num_minibatches
    if not args.compile or steps < args.compile_from:
        return minibatch_step
    options = {"cpp_wrapper": agent.adam["steps"].is_cpu, "triton.cudagraphs": args.cudagraphs}
    options |= {"cpp.vec_isa_ok": True, "cpp.use_decompose_tanh": True}  # compiles and runs faster
    try:
        torch.compiler.reset()  # forget what was compiled for another agent
        torch._dynamo.config.trace_autograd_ops = True
        torch.compile(lambda x: x + 1, options=options)(agent.adam["steps"])
    except Exception as error:  # whatever a missing, old or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return minibatch_step
    if args.cudagraphs:  # the graphs change these in place
        for tensor in agent.adam.values():
            torch._dynamo.mark_static_address(tensor, guard=False)
    # An agent's shapes and types stay, except for the number of rows. So only the fields of Args
    # and numbers elsewhere are guarded: the step is compiled again when one changes.
    options["guard_filter_fn"] = lambda guards: [
        re.match(r"(L\[')?args\b", guard.name) is not None
        or guard.guard_type in ("CONSTANT_MATCH", "EQUALS_MATCH")
        for guard in guards
    ]
    torch.compiler.config.dynamic_sources = "L['rows']"
    return following(torch.compile(minibatch_step, fullgraph=True, options=options), args)


def following(step, args: Args):
    """Make a compiled step follow schedules. A number of Args that has changed since the start is
    passed as a tensor, as the learning rate is: then the step is compiled again only once. Numbers
    that fall by a flag are tensors from the start: then it is compiled only once at all."""
    first = dict(vars(args))
    falling = {name for name in first if first.get(f"anneal_{name}")}
    last = {}
    given = args  # made again when a number changes, not in each step

    def follow(agent: Agent, adam: dict, batch: Batch, rows, learning_rate, args: Args):
        nonlocal last, given
        if vars(args) != last:
            last = dict(vars(args))
            given = copy.copy(args)
            for name, value in last.items():
                changed = name in falling or value != first.get(name)
                if changed and isinstance(first.get(name), float):
                    setattr(given, name, torch.tensor(float(value), device=learning_rate.device))
        return step(agent, adam, batch, rows, learning_rate, given)

    return follow


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
        for name, tensor in agent.adam.items():
            tensor.data.copy_(checkpoint["adam"][name].view_as(tensor))
        agent.rng.bit_generator.state = checkpoint["rng"]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
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
            agent, _ = load(args.resume, envs)
        else:
            agent = Agent(envs, args)
        agent.adam = flat_adam(agent.to(device))
        if args.resume:
            restore(agent, checkpoint, args.resume)
        step = compile_step(agent, args)
        with stop_signals() as stop, Run(args, checkpoint) as run:
            how = f"{args.env_id} on {device}, {args.num_iterations} iterations"
            run.bar.write(f"{how}, in {run.folder}")
            save(run, agent, envs)
            while run.iteration < args.num_iterations and not stop:
                remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate  # annealed (detail 4)
                data = rollout(agent, envs, run, args)
                now = copy.copy(args)  # of this iteration; compiled code follows
                if args.anneal_ent_coef:
                    now.ent_coef *= 1.0 - run.iteration / args.num_iterations
                metrics = update(agent, data, learning_rate, now, step)
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
