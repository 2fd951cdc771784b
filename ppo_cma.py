# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.3,<4", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO-CMA: Proximal Policy Optimization with Covariance Matrix Adaptation, in one file.

Hämäläinen, Babadi, Ma & Lehtinen 2020, https://arxiv.org/abs/1810.02541, as in the code that made
the published curves (docs/ppo_cma.md: where the paper differs). Every iteration:

    1. play whole episodes with a ~ N(mu(s), var(s)) until N environment steps are reached
    2. fit the critic to Monte-Carlo returns; A = GAE(lambda) / std(A), never centred
    3. variance network:  min  -E_H[ max(A, 0) log N(a | mu, var) ]      over the last H iterations
    4. mean network:      min  -E  [ max(A, 0) log N(a | mu, var) ]      over this iteration
                               -E  [ max(-A, 0) k(a) log N(2 mu_old - a | mu, var) ]   (mirroring)

The variance comes first and measures deviations from the mean not yet moved, so it grows along the
direction of progress, as in CMA-ES: that prevents PPO's early loss of exploration. Mirroring makes
a negative advantage at `a` a positive one on the other side of the mean.

    python ppo_cma.py --env-id Humanoid-v4                   # train, 10M steps
    python ppo_cma.py --num-envs 4 --env-workers 2           # on two cores
    python ppo_cma.py --resume runs/RUN                      # go on where it stopped
    python ppo_cma.py --evaluate runs/RUN --capture-video    # play the mean action

Expect 5,500 over the last 100 episodes of training on Humanoid-v4 (10M steps, an hour and a half on
one CPU core), and 6,600 of the final policy. Tune `--iter-steps` (N): 4k for toys, 8k for planar
robots, 32k for 3-D ones.
Left out on purpose: discrete or unbounded actions, gradient clipping, bootstrapping at time limits.
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
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tyro.conf import arg

MODES = ("ppo-cma-m", "ppo-cma", "ppo", "pg", "pg-pos")


@dataclass
class Args:
    exp_name: Annotated[str, arg(aliases=["--run-suffix"])] = Path(__file__).stem  # in RUN's name
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
    env_id: Annotated[str, arg(aliases=["--env-name"])] = "Humanoid-v4"  # with a finite action Box
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"frame_skip": 2}'
    env_workers: int = 0  # processes that step the environments; 0: the main process
    num_envs: int = 1  # environments played side by side; their whole episodes are pooled
    action_repeat: int = 2  # steps for which an action is held; their rewards are summed

    # Algorithm
    total_timesteps: Annotated[int, arg(aliases=["--max-steps"])] = 10_000_000  # in whole episodes
    mode: Annotated[str, arg(aliases=["-m"])] = "ppo-cma-m"  # or ppo-cma, ppo, pg, pg-pos
    iter_steps: int = 32_000  # N: environment steps per iteration, rounded up to whole episodes
    minibatch_size: Annotated[int, arg(aliases=["--batch-size"])] = 512  # M: in decisions
    n_updates: int = 100  # minibatches per iteration, for each of critic, variance and mean
    history_buffer_size: int = 9  # H: iterations whose samples train the variance
    learning_rate: Annotated[float, arg(aliases=["-lr"])] = 5e-4  # Adam's, for every network
    anneal_lr: bool = True  # lower the learning rate linearly; the original's is constant
    gamma: float = 0.99  # discount factor, per decision
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    clip_coef: Annotated[float, arg(aliases=["--ppo-epsilon"])] = 0.2  # epsilon of mode ppo
    ent_coef: Annotated[float, arg(aliases=["--ppo-ent-l-w"])] = 0.0  # entropy bonus of mode ppo

    def __post_init__(self):
        """Raise ValueError, which tyro shows, for wrong arguments."""
        self.mode = self.mode.lower().replace("_", "-")  # the original's spelling, too
        low = {"seed": 0, "n_updates": 2, "env_workers": 0}
        check(self, low, {"gamma": 1, "gae_lambda": 1, "env_workers": max(self.num_envs, 0)})
        if self.mode not in MODES:
            raise ValueError(f"--mode {self.mode}: not one of {', '.join(MODES)}")
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


KEPT = ("seed", "num_envs")  # by a resumed run


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


def can_act(actions: gym.Space) -> bool:
    """Whether actions are a finite box, no side of which is too short or long to be squared."""
    if not isinstance(actions, gym.spaces.Box) or not actions.is_bounded():
        return False
    with np.errstate(over="ignore"):
        sides = np.float32(actions.high) - np.float32(actions.low)
    return bool(((sides > 1e-6) & (sides < 1e6)).all())


def check_spaces(env_id: str, space: gym.Space, actions: gym.Space):
    """Exit with one line if this script can't learn with these spaces."""
    pixels = any(leaf.dtype == np.uint8 and len(leaf.shape) > 1 for leaf in leaves(space))
    vector = all(isinstance(leaf, VECTORS) for leaf in leaves(space)) and not pixels
    if not vector or not 1 <= gym.spaces.flatdim(space) <= 20_000:
        hint = "observations are no vector (MiniGrid: a Flat wrapper); pixels: ppo_pixels.py"
        fail(f"--env-id {env_id}: {space}: {hint}")
    if not can_act(actions):
        hint = "a finite Box of actions is needed, its sides from 1e-6 to 1e6; choices: ppo.py"
        fail(f"--env-id {env_id}: {actions}: {hint}")


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def seed_others(seed: int):
    """Seed the global generators. Most environments have their own, `np_random`, a few do not."""
    random.seed(seed)
    np.random.seed(seed)


def to_env(box: gym.spaces.Box, actions: np.ndarray) -> np.ndarray:
    """Actions [N, A], which are in the box, in its shape and type; rounded, if it has only whole
    numbers."""
    shaped = actions.reshape(-1, *box.shape)
    if box.dtype.kind in "iu":
        shaped = np.rint(shaped)
    return shaped.astype(box.dtype, copy=False)


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
        """Hold an action for `action_repeat` steps of an environment or to its episode's end: the
        sum of the rewards, terminated, truncated."""
        rewards = self.rewards[i]
        total = 0.0
        for _ in range(self.args.action_repeat):
            obs, reward, terminated, truncated, _ = self.envs[i].step(shaped.copy())
            try:
                rewards.append(float(np.asarray(reward).item()))
                over = bool(terminated or truncated)
            except (TypeError, ValueError):  # an array or None instead of one number
                what = f"reward {reward}, terminated {terminated}, truncated {truncated}"
                hint = "one of each is needed (several rewards: a wrapper that weighs them)"
                raise ValueError(f"{self.args.env_id}: {what}: {hint}") from None
            total += rewards[-1]
            if over:
                break
        self.obs[i] = np.asarray(obs).reshape(self.observation_space.shape)
        self.over[i] = over
        self.lengths[i] = len(rewards)
        if over:
            self.ended.append((self.numbers[i], math.fsum(rewards), len(rewards)))
        elif len(rewards) > 100_000:
            hint = """max_episode_steps, --env-kwargs '{"max_episode_steps": 1000}'"""
            raise TimeoutError(f"100,000 steps, no end: whole episodes need {hint}")
        return total, terminated, truncated

    def step(self, actions: np.ndarray, going: np.ndarray):
        """Take actions [N, A] in the environments that are `going` [N]: rewards, terminated,
        truncated [N]."""
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
class MLP(nn.Module):
    """Two layers of 128 leaky ReLUs and a linear output; each layer sees the input and every layer
    below it. The input's part in all three is one matrix product."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator):
        super().__init__()
        self.widths = (128, 128, outputs)
        sizes = [
            (width, inputs + 128 * k) for k, width in enumerate(self.widths)
        ]  # one row for each unit
        rows = [F.normalize(torch.randn(size, generator=generator)) for size in sizes]
        self.from_input = nn.Parameter(torch.cat([row[:, :inputs] for row in rows]))
        self.bias = nn.Parameter(torch.zeros(sum(self.widths)))  # 0 until `center`
        self.from_first = nn.Parameter(rows[1][:, inputs:].contiguous())
        self.from_both = nn.Parameter(rows[2][:, inputs:].contiguous())

    def forward(self, x: torch.Tensor, layer: int = 2) -> torch.Tensor:
        """Outputs [..., outputs], or a layer's pre-activations, at inputs x [..., inputs]."""
        first, second, output = F.linear(x, self.from_input, self.bias).split(self.widths, dim=-1)
        h1 = F.leaky_relu(first, 0.1)
        second = second + F.linear(h1, self.from_first)
        h2 = F.leaky_relu(second, 0.1)
        output = output + F.linear(torch.cat([h1, h2], dim=-1), self.from_both)
        return (first, second, output)[layer]

    @torch.no_grad()
    def center(self, x: torch.Tensor):
        """Set the biases so that every pre-activation has mean 0 over the batch x [B, inputs]."""
        for layer, bias in enumerate(self.bias.split(self.widths)):
            bias -= self.forward(x, layer).mean(dim=0)


@torch.no_grad()
def mlps_as_numpy(nets: list[nn.Module], scale: torch.Tensor):
    """The outputs of networks at scale * x, side by side, as they are now, as a function of arrays
    x [N, D]. `MLP`s become numpy, all in one product, which is several times faster than torch for
    the few rows of a step; any other network is called in torch."""
    own = ["from_input", "bias", "from_first", "from_both"]
    if any([name for name, _ in net.named_parameters()] != own for net in nets):
        scale = scale.cpu().clone()
        nets = [copy.deepcopy(net).cpu() for net in nets]

        @torch.no_grad()
        def called(x: np.ndarray) -> np.ndarray:
            inputs = torch.from_numpy(x) * scale
            return torch.cat([net(inputs) for net in nets], dim=-1).numpy()

        return called
    parameters = zip(*[net.parameters() for net in nets], strict=True)
    from_input, bias, from_first, from_both = (torch.stack(each) for each in parameters)
    from_input = (from_input * scale).flatten(0, 1).T
    tensors = from_input, bias.flatten(), from_first.mT, from_both.mT
    from_input, bias, from_first, from_both = (x.contiguous().cpu().numpy() for x in tensors)

    def function(x: np.ndarray) -> np.ndarray:
        z = (x @ from_input + bias).reshape(len(x), len(nets), 1, -1)
        h1 = np.maximum(z[..., :128], 0.1 * z[..., :128])  # leaky ReLU
        h2 = z[..., 128:256] + h1 @ from_first
        h2 = np.maximum(h2, 0.1 * h2)
        output = z[..., 256:] + np.concatenate((h1, h2), axis=-1) @ from_both
        return output.reshape(len(x), -1)

    return function


class Agent(nn.Module):
    """All that is needed to act and to learn in environments with the observation_space and
    action_space of `env`. In a loop of your own: `act`, `memorize`, `update_with_memorized`."""

    def __init__(self, env, args: Args | None = None, pretrain: bool = True):
        super().__init__()
        self.args = args = args or Args()
        (dim,) = env.observation_space.shape
        box = env.action_space
        if not can_act(box):
            raise ValueError(f"actions are {box}: PPO-CMA needs finite bounds, 1e-6 to 1e6 apart")
        self.action_shape = box.shape
        low = torch.tensor(box.low).float().ravel()  # [A]
        high = torch.tensor(box.high).float().ravel()
        buffers = {"low": low, "high": high, "logvar_max": (high - low).square().log()}
        buffers |= {"logvar_min": torch.full_like(low, 0.01**2).log(), "updates": torch.tensor(0)}
        buffers |= {"initial_mean": (low + high) / 2, "initial_std": (high - low) / 2}
        buffers |= {"obs_sq_mean": torch.zeros(dim), "obs_scale": torch.ones(dim)}
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self.rng = np.random.default_rng(args.seed)  # draws actions
        self.generator = torch.Generator().manual_seed(args.seed)  # draws weights and minibatches
        self.cma = args.mode.startswith("ppo-cma")  # otherwise one network has both as outputs
        self.mean_net = MLP(dim, len(low) if self.cma else 2 * len(low), self.generator)
        self.var_net = MLP(dim, len(low), self.generator) if self.cma else self.mean_net
        self.critic = MLP(dim + 1, 1, self.generator)
        # Adam skips what gets no gradient, so this is as good as one optimizer for each network
        self.adam = torch.optim.Adam(self.parameters(), args.learning_rate, eps=1e-8, fused=True)
        self.history = []  # of the last iterations' (obs, actions, advantages)
        self.memory = []  # finished episodes
        self.running = {}  # the unfinished episode of each environment
        if pretrain:
            pretrain_policy(self)

    def mean(self, obs: torch.Tensor) -> torch.Tensor:
        """mu [..., A] at raw observations [..., D]."""
        raw = self.mean_net(obs * self.obs_scale)[..., : len(self.low)]
        return self.low + (self.high - self.low) * torch.sigmoid(raw)

    def logvar(self, obs: torch.Tensor) -> torch.Tensor:
        """log var [..., A] at raw observations [..., D]; deviations from 0.01 to the full range."""
        raw = self.var_net(obs * self.obs_scale)[..., -len(self.low) :]
        return self.logvar_min + (self.logvar_max - self.logvar_min) * torch.sigmoid(raw)

    def critic_inputs(self, obs: torch.Tensor, time) -> torch.Tensor:
        """[..., D + 1]: raw observations [..., D], scaled, and decisions since the start [...]."""
        clock = (0.001 if self.args.gamma > 0 else 0.0) * torch.as_tensor(time, device=obs.device)
        return torch.cat([obs * self.obs_scale, clock.expand(obs.shape[:-1])[..., None]], dim=-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None, time=0):
        """Action [B, A] (a clipped sample unless given), its log-density [B], the entropy [B] and
        the value [B] at raw observations [B, D], `time` decisions into their episodes."""
        if action is None:
            sample = self.numpy_actor()(obs.float().cpu().numpy(), self.noise(len(obs)))
            action = torch.as_tensor(sample, device=obs.device)
        policy = torch.distributions.Normal(self.mean(obs), (0.5 * self.logvar(obs)).exp())
        value = self.critic(self.critic_inputs(obs, time)).squeeze(-1)
        return action, policy.log_prob(action).sum(-1), policy.entropy().sum(-1), value

    def numpy_policy(self):
        """`mean` and the deviation, as they are now, as a function of raw observations [N, D].
        `check_actor` compares it with them once a rollout."""
        raw = mlps_as_numpy(list(dict.fromkeys((self.mean_net, self.var_net))), self.obs_scale)
        low = torch.cat([self.low, self.logvar_min]).cpu().numpy()
        high = torch.cat([self.high, self.logvar_max]).cpu().numpy()
        middle = (low + high) / 2
        half = (high - low) / 2
        dims = len(self.low)

        def policy(obs: np.ndarray):
            # the sigmoid between two bounds, as a tanh about their middle
            both = middle + half * np.tanh(0.5 * raw(obs))
            return both[:, :dims], np.exp(0.5 * both[:, dims:])

        return policy

    def numpy_actor(self):
        """`act` with the present weights, for rows [N, D] and noise [N, A]."""
        policy = self.numpy_policy()
        if not self.updates:  # the first iteration samples the initial Gaussian itself
            initial = self.initial_mean.cpu().numpy(), self.initial_std.cpu().numpy()

            def policy(obs: np.ndarray):
                return [np.tile(x, (len(obs), 1)) for x in initial]

        low = self.low.cpu().numpy()
        high = self.high.cpu().numpy()

        def act(obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
            mean, std = policy(obs)
            x = mean if noise is None else mean + std * noise
            return np.minimum(np.maximum(x, low), high)

        return act

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions [N, ...] at raw observations [N, D]: means or, by `noise(N)`, clipped samples."""
        actions = self.numpy_actor()(np.asarray(obs, np.float32), noise)
        return actions.reshape(-1, *self.action_shape)

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions."""
        return self.rng.standard_normal((*shape, len(self.low)), np.float32)

    def memorize(self, obs: np.ndarray, action: np.ndarray, reward: float, done: bool, env=0):
        """Store a transition; `done` ends the episode of environment `env`, for any reason."""
        obs = np.array(obs, np.float32)  # a copy
        action = np.array(action, np.float32).ravel()
        self.running.setdefault(env, []).append((obs, action, float(np.asarray(reward).item())))
        if done:
            self.memory.append(self.running.pop(env))

    def update_with_memorized(self) -> dict[str, float]:
        """Learn from the finished episodes, at least one, and forget them; returns the metrics. An
        episode still running stays, and counts in the update after its end."""
        episodes = self.memory
        self.memory = []
        transitions = [transition for episode in episodes for transition in episode]
        obs, actions, rewards = map(np.array, zip(*transitions, strict=True))
        metrics = {"charts/mean_episodic_return": rewards.sum() / len(episodes)}
        return metrics | update(self, obs, actions, rewards, [len(episode) for episode in episodes])

    def training_state(self) -> dict:
        """All that is needed to go on learning, except memorized steps, for `torch.save`."""
        adam = {"state": self.adam.state_dict()["state"]}  # its settings are the code's
        state = {"agent": self.state_dict(), "adam": adam}
        state |= {"history": self.history, "generator": self.generator.get_state()}
        return state | {"rng": self.rng.bit_generator.state}

    def load_training_state(self, state: dict):
        self.load_state_dict(state["agent"])
        load_adam(self.adam, state["adam"]["state"])
        widths = self.obs_scale.shape, self.low.shape, torch.Size()
        self.history = [tuple(x.to(self.low) for x in batch) for batch in state["history"]]
        for batch in self.history:
            if tuple(x.shape[1:] for x in batch) != widths:
                raise ValueError("the history is of other spaces")
        self.generator.set_state(state["generator"])
        self.rng.bit_generator.state = state["rng"]


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
def check_actor(agent: Agent, obs: np.ndarray):
    """Raise RuntimeError if `numpy_policy` is not the learning policy, at observations [B, D]."""
    given = torch.as_tensor(obs, device=agent.low.device)
    mean, std = agent.numpy_policy()(obs)
    learned = agent.mean(given), (0.5 * agent.logvar(given)).exp()
    for acts, learns in zip((mean, std), learned, strict=True):
        scale = agent.high - agent.low + learns.abs()
        if ((torch.as_tensor(acts).to(scale) - learns).abs() > 1e-3 * scale).any():
            raise RuntimeError("numpy_policy acts by another policy than mean and logvar learn")


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values [T + 1, ...]."""
    advantages = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    ended = np.logical_or(terminated, truncated)
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
    return advantages


def normalize_advantages(advantages: np.ndarray, mode: str) -> np.ndarray:
    """Advantages [B] of one iteration over their deviation. Never centred: signs must survive."""
    if mode in ("ppo-cma", "pg-pos"):
        advantages = np.maximum(advantages, 0.0)
    return advantages / (advantages.std() + 1e-10)


def log_density(actions, mean, logvar) -> torch.Tensor:
    """log N(a | mu, var) [B], without its constant."""
    return -0.5 * ((actions - mean).square() / logvar.exp() + logvar).sum(-1)


def variance_loss(actions, advantages, mean, logvar) -> torch.Tensor:
    """-E[ max(A, 0) log N(a | mu, var) ]; no gradient reaches the mean."""
    return -(F.relu(advantages) * log_density(actions, mean.detach(), logvar)).mean()


def mean_loss(actions, advantages, mean, logvar, mean_old, mirror: bool) -> torch.Tensor:
    """The same for the mean; no gradient reaches the variance. Bad actions attract to their mirror
    image about the old mean, weighted by a Gaussian kernel averaged over the dimensions."""
    logvar = logvar.detach()
    loss = -(F.relu(advantages) * log_density(actions, mean, logvar)).mean()
    if mirror:
        kernel = torch.exp(-0.5 * (actions - mean_old).square() / logvar.exp()).mean(-1)
        mirrored = log_density(2.0 * mean_old - actions, mean, logvar)
        loss = loss - (F.relu(-advantages) * kernel * mirrored).mean()
    return loss


def ppo_loss(actions, advantages, mean, logvar, log_density_old, clip_coef, ent_coef):
    """The clipped surrogate (Schulman et al. 2017, eq. 7) and the entropy bonus, for comparison."""
    ratio = torch.exp(log_density(actions, mean, logvar) - log_density_old)
    clipped = torch.clamp(ratio, 1.0 - clip_coef, 1.0 + clip_coef)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages).mean()
    return -surrogate - ent_coef * 0.5 * logvar.sum(-1).mean()


def history_minibatches(sizes, shape, generator: torch.Generator) -> torch.Tensor:
    """Indices of this shape into the concatenated iterations of the given sizes: first an iteration
    is drawn, then a sample of it, so that each weighs the same whatever its size."""
    sizes = torch.tensor(sizes)
    slots = torch.randint(len(sizes), shape, generator=generator)
    within = torch.rand(shape, dtype=torch.float64, generator=generator) * sizes[slots]
    return (sizes.cumsum(0) - sizes)[slots] + within.long()


def fit(name: str, adam: torch.optim.Adam, minibatches, loss_fn) -> dict[str, float]:
    """One step of Adam per minibatch on `loss_fn(minibatch)`; the mean loss, as a metric."""
    losses = []
    for minibatch in minibatches:
        loss = loss_fn(minibatch)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.detach())
    return {f"losses/{name}_loss": torch.stack(losses).mean().item()}


def pretrain_policy(agent: Agent):
    """Fit the policy to N(initial_mean, initial_std) at states from N(0, I), before any step."""
    shape = (256, len(agent.obs_scale))
    batches = (torch.randn(shape, generator=agent.generator) for _ in range(2000))
    first = next(batches)
    for net in {agent.mean_net, agent.var_net}:  # two, or one for both
        net.center(first)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        std_error = (0.5 * agent.logvar(x)).exp() - agent.initial_std
        return (agent.mean(x) - agent.initial_mean).square().mean() + std_error.square().mean()

    adam = torch.optim.Adam(agent.parameters(), agent.args.learning_rate, eps=1e-8, fused=True)
    fit("pretraining", adam, batches, loss_fn)


def update_obs_scale(agent: Agent, obs: torch.Tensor):
    """Divide observations [B, D] by twice their RMS, every iteration weighing the same. Uncentred;
    the scale starts at 1 and only shrinks, so small observations are never magnified."""
    agent.updates += 1
    agent.obs_sq_mean += (obs.square().mean(dim=0) - agent.obs_sq_mean) / agent.updates
    scale = 1.0 / (2.0 * agent.obs_sq_mean.sqrt() + 0.001)
    agent.obs_scale.copy_(torch.minimum(agent.obs_scale, scale))


def update(agent: Agent, obs, actions, rewards, lengths) -> dict[str, float]:
    """One iteration of learning, from whole episodes of `lengths` decisions, one after the other:
    obs [B, D] raw, actions [B, A], rewards [B]."""
    args = agent.args
    critic = agent.critic
    adam = agent.adam
    device = agent.low.device
    check_learned(agent, adam)
    time = np.concatenate([np.arange(length) for length in lengths])
    ends = np.append(time[1:] == 0, True)
    obs, actions, time = (torch.as_tensor(x, device=device) for x in (obs, actions, time))
    shape = (args.n_updates, min(args.minibatch_size, len(obs)))  # drawn with replacement
    update_obs_scale(agent, obs)
    mean_old = agent.mean(obs).detach()

    # critic: L1 on Monte-Carlo returns, which are the GAE of V = 0 at lambda = 1
    returns = gae(rewards, np.zeros(len(obs) + 1), ends, ends, args.gamma, 1.0)
    targets = torch.tensor(returns).to(obs)[:, None]
    inputs = agent.critic_inputs(obs, time)
    minibatches = torch.randint(len(obs), shape, generator=agent.generator).to(device)
    if agent.updates == 1:  # the first minibatch ever sets the biases instead
        critic.center(inputs[minibatches[0]])
        minibatches = minibatches[1:]
    metrics = fit("value", adam, minibatches, lambda i: F.l1_loss(critic(inputs[i]), targets[i]))

    # advantages by the new critic; the value after an episode's last step is 0
    values = critic(inputs).detach().squeeze(-1).cpu().double().numpy()
    advantages = gae(rewards, np.append(values, 0.0), ends, ends, args.gamma, args.gae_lambda)
    advantages = torch.tensor(normalize_advantages(advantages, args.mode)).to(obs)

    if agent.cma:  # variance first, from the history, about the mean that has not moved yet
        agent.history = [*agent.history, (obs, actions, advantages)][-args.history_buffer_size :]
        seen, *past = (torch.cat(tensors) for tensors in zip(*agent.history, strict=True))
        sizes = [len(advantages) for _, _, advantages in agent.history]
        minibatches = history_minibatches(sizes, shape, agent.generator).to(device)

        def past_loss(i: torch.Tensor) -> torch.Tensor:
            return variance_loss(*(x[i] for x in past), agent.mean(seen[i]), agent.logvar(seen[i]))

        metrics |= fit("variance", adam, minibatches, past_loss)
    logvar = agent.logvar(obs).detach()
    density_old = log_density(actions, mean_old, logvar)

    # then the mean, from this iteration, with the variance just learned; or else mean and variance
    def policy_loss(i: torch.Tensor) -> torch.Tensor:
        a = actions[i]
        advantage = advantages[i]
        mean = agent.mean(obs[i])
        if agent.cma:
            return mean_loss(a, advantage, mean, logvar[i], mean_old[i], args.mode == "ppo-cma-m")
        policy = mean, agent.logvar(obs[i])
        if args.mode == "ppo":
            return ppo_loss(a, advantage, *policy, density_old[i], args.clip_coef, args.ent_coef)
        return -(advantage * log_density(a, *policy)).mean()  # pg, pg-pos

    minibatches = torch.randint(len(obs), shape, generator=agent.generator).to(device)
    metrics |= fit("policy", adam, minibatches, policy_loss)
    unexplained = np.var(returns - values) / max(np.var(returns), 1e-12)
    entropy = 0.5 * (logvar + math.log(2.0 * math.pi * math.e)).sum(-1).mean()
    metrics |= {"losses/entropy": entropy.item(), "losses/explained_variance": 1.0 - unexplained}
    metrics["charts/policy_std"] = (0.5 * logvar).exp().mean().item()
    saturated = (mean_old - agent.initial_mean).abs() > 0.98 * agent.initial_std  # near a bound
    metrics["charts/saturated_means"] = saturated.double().mean().item()
    return metrics | {"charts/positive_advantages": (advantages > 0).double().mean().item()}


# --- rollout --------------------------------------------------------------------------------------
def rollout(agent: Agent, envs: Envs | WorkerEnvs, run: "Run", args: Args):
    """Play whole episodes, and memorize them: new ones start until N steps are reached, then the
    running ones play to their end. To cut them off would favour short episodes."""
    last = run.global_step + args.iter_steps
    act = agent.numpy_actor()
    actions = np.zeros((len(envs.over), len(agent.low)), np.float32)  # [N, A]
    going = np.ones(len(envs.over), bool)  # [N], True where an episode is running
    envs.step(actions, going)  # starts the episodes
    while playing := going.nonzero()[0].tolist():
        obs = envs.obs[going]  # [K, D], of those that play
        before = sum(envs.lengths.tolist())
        actions[going] = act(obs, agent.noise(len(obs)))
        rewards, _, _ = envs.step(actions, going)
        run.global_step += sum(envs.lengths.tolist()) - before
        for k, i in enumerate(playing):
            agent.memorize(obs[k], actions[i], rewards[i], envs.over[i], i)
        if envs.ended:
            run.log_episodes(envs.ended)
            going &= ~envs.over | (run.global_step < last)
            envs.step(actions, going & envs.over)  # starts new ones
    check_actor(agent, np.array([obs for obs, _, _ in agent.memory[-1][:8]]))


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
    state = {"script": Path(__file__).name, "args": vars(run.args)} | agent.training_state()
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
    agent = Agent(envs, args, pretrain=False)
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
    if args.capture_video:
        refuse_links(args.evaluate)
        videos = str(args.evaluate / "videos")
        env = gym.wrappers.RecordVideo(drawn_env(args), videos, lambda _: True, disable_logger=True)
        envs = Envs([env], args, numbers=[2**31])
        print(f"videos: {videos}")
    else:
        envs = own_envs(args, [2**31], None)
    returns = []
    bar = tqdm(unit="step", leave=False, disable=None)  # drawing frames takes a while
    with contextlib.closing(envs), bar:
        agent, _ = load(args.evaluate, envs)
        act = agent.numpy_actor()
        while len(returns) < args.eval_episodes:
            noise = agent.noise(1) if name == "sampled" else None
            try:
                envs.step(act(envs.obs, noise), np.ones(1, bool))
            except TimeoutError as error:
                fail(str(error))
            bar.update()
            for _, episodic_return, _ in envs.ended:
                said = f"episodic_return={episodic_return:.2f}"
                bar.write(f"{name}_episode={len(returns)}, {said}")
                returns.append(episodic_return)
    return returns


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
    """Set the optimizer, the history and the random numbers to what the checkpoint has."""
    try:
        agent.load_training_state(checkpoint)
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
            run.bar.write(f"{args.env_id} on {device}, {args.mode}, in {run.folder}")
            save(run, agent, envs)
            while run.global_step < args.total_timesteps and not stop:
                remaining = 1.0 - run.global_step / args.total_timesteps if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate
                agent.adam.param_groups[0]["lr"] = learning_rate
                rollout(agent, envs, run, args)
                metrics = agent.update_with_memorized()
                check_finite(run.iteration, {"observations": agent.obs_sq_mean})
                check_finite(run.iteration, metrics | agent.state_dict())
                run.log(metrics | {"charts/learning_rate": learning_rate})
                if run.iteration % args.checkpoint_interval == 0:
                    save(run, agent, envs)
            save(run, agent, envs)
            run.status = "running" if run.global_step < args.total_timesteps else "finished"
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
