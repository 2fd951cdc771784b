# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[box2d]>=1.1,<2", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, with a memory (LSTM or GRU), from vectors, images and choices, for any actions.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. Every iteration:

    1. take T steps in each of N environments with actions a ~ pi(a | s, m), choices and numbers
       alike; keep the memory's state m before the first; rewards are scaled by their returns
    2. A = GAE(lambda): a time limit bootstraps from V(true last observation, m after the episode),
       a termination does not; that row is never learned from, and after it m is cleared
    3. for K epochs or until KL > target_kl, for each minibatch of whole environments, replayed from
       the kept state, with A normalised, r = pi(a | s, m) / pi_old(a | s, m):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_lstm.py --env-id CarRacing-v3         # --resume runs/RUN goes on
    python ppo_lstm.py --env-id minigrid:MiniGrid-MemoryS7-v0 --num-envs 16 --memory gru
    python ppo_lstm.py --env-id popgym:popgym-RepeatPreviousEasy-v0 --previous-action
    python ppo_lstm.py --evaluate runs/RUN           # plays greedily, then samples actions

`diff ppo_pixels.py ppo_lstm.py` shows the memory and little else. --num-steps has to reach from a
cue to its use. Expect 500 on CartPole without velocities after 100,000 steps (greedy). Flags and
tags are CleanRL's. Left out: transformers.
"""

import atexit
import contextlib
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
from typing import Literal, NamedTuple, get_args, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.vector.utils import concatenate, create_empty_array
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one
    num_threads: int = 0  # CPU threads of torch; 0: as many as there are cores
    channels_last: bool = True  # convolutions in channels-last order: same results to rounding
    bf16: bool = False  # layers before the heads in bfloat16: faster if the hardware has it
    compile: bool = False  # compile these layers if a compiler works: same results to rounding
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    quiet: bool = False  # print no line per episode
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, greedily and with sampled actions
    eval_episodes: int = 10  # episodes of an evaluation, greedy and sampled
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Environments
    env_id: str = "CarRacing-v3"  # a gymnasium id, module:Id, or envpool:Id
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"continuous": false}'
    env_workers: int = 0  # processes that step the environments; 0: the main process
    num_envs: int = 8  # environments played side by side
    frame_stack: int = 0  # images seen at once, the newest last; 0: 4 for ALE/..., or else 1
    resize: str = ""  # height and width of images, as 60x80; default: the shorter is 96 at most
    grayscale: bool = False  # grey instead of red, green and blue
    action_repeat: int = 0  # steps an action is held; 0: 4 for ALE/..., or else 1

    # Algorithm
    encoder: Literal["auto", "nature", "impala", "small"] = "auto"  # of images; auto: by their size
    memory: Literal["lstm", "gru", "none"] = "lstm"  # memory between these layers and the heads
    memory_size: int = 128  # units of the memory
    memory_span: int = 1  # new units forget after 1 to this many steps; raise it for long delays
    previous_action: bool = False  # the memory also gets the last action, and where episodes begin
    separate_critic: bool = False  # the value has a network and a memory of its own
    total_timesteps: int = 1_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 5e-4  # Adam's learning rate in the first iteration
    num_steps: int = 128  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch, each of all steps of some environments
    update_epochs: int = 4  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = False  # also clip the change of the value
    ent_coef: float = 0.01  # weight of the entropy bonus of choices
    box_ent_coef: float = 0.0  # weight of the entropy bonus of numbers
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient of all parameters is scaled down to this norm
    target_kl: float | None = None  # stop the epochs once the mean approx_kl of one exceeds this
    log_std_init: float = -0.7  # initial log standard deviation of numbers, in half their box
    scale_rewards: bool = True  # divide rewards by the deviation of discounted returns
    action_masks: bool = True  # choices that the environment marks as invalid get probability 0
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute the last fields; raise ValueError, which tyro shows, for wrong arguments."""
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        if is_atari(self.env_id):  # (Atari details 2, 5, 7)
            self.action_repeat = self.action_repeat or 4
            self.frame_stack = self.frame_stack or 4
            self.resize = self.resize or "84x84"
        low = {"seed": 0, "num_threads": 0, "env_workers": 0, "frame_stack": 0, "action_repeat": 0}
        low |= {"log_std_init": -9, "minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {
            "gamma": 1,
            "gae_lambda": 1,
            "log_std_init": 9,
            "env_workers": max(self.num_envs, 0),
            "num_minibatches": self.num_envs,
        }
        check(self, low, high)
        if self.resize and not re.fullmatch(r"\d+x\d+", self.resize):
            raise ValueError(f"--resize {self.resize}: height and width are needed, as 60x80")


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
def parts(space: gym.Space, path: tuple = ()) -> list[tuple[tuple, gym.Space]]:
    """The spaces inside nested Dicts and Tuples, in order: (keys that lead there, space)."""
    if isinstance(space, gym.spaces.Dict):
        items = space.spaces.items()
    elif isinstance(space, gym.spaces.Tuple):
        items = enumerate(space.spaces)
    else:
        return [(path, space)]
    return [found for key, inner in items for found in parts(inner, (*path, key))]


def pick(tree, path: tuple):
    """What these keys lead to in nested dicts and tuples."""
    for key in path:
        tree = tree[key]
    return tree


CHOICES = gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary


class Leaf(NamedTuple):
    """A part of an observation that is learned from."""

    path: tuple  # keys that lead from the observation to this part
    space: gym.Space
    kind: str  # "image"; "codes", an image below 16 x 16; "vector"; "choices"
    channels: tuple = ()  # an image's axes other than rows and columns
    size: tuple | None = None  # rows and columns that an image is scaled to


def find_leaf(path: tuple, space: gym.Space, args: Args) -> Leaf | None:
    """How a part of an observation is read, if it can be. Bytes of 2 axes are an image, and any
    numbers of 3 or 4. Of 3 the smallest axis is the channels; the first of 4 is a stack of them."""
    if isinstance(space, CHOICES):
        return Leaf(path, space, "choices")
    if not isinstance(space, gym.spaces.Box) or 0 in space.shape:
        return None  # a text, a graph, a sequence
    axes = len(space.shape)
    channels = ()
    if axes in (3, 4):
        first = space.shape[-3] == min(space.shape[-3:])
        channels = (*range(axes - 3), axes - 3 if first else axes - 1)
    sides = [size for axis, size in enumerate(space.shape) if axis not in channels]
    if len(sides) != 2 or min(sides) < 7 or (not channels and space.dtype != np.uint8):
        if math.prod(space.shape) > 20_000:
            raise ValueError(f"{space}: no image, and too long for a vector")
        return Leaf(path, space, "vector")
    if channels and space.shape[channels[-1]] >= min(sides):
        raise ValueError(f"{space}: which axis of the image is its channels can't be told")
    shrink = math.ceil(min(sides) / 96)
    size = [side // shrink for side in sides]
    if args.resize:
        size = [int(side) for side in args.resize.split("x")]
    kind = "codes" if min(size) < 16 else "image"
    if kind == "image" and not -1e6 < space.low.min() < space.high.max() < 1e6:
        raise ValueError(f"{space}: an image without bounds; give its Box a low and a high")
    return Leaf(path, space, kind, channels, None if size == sides else size)


class Reader:
    """Observations of a space as arrays to store and learn from, one for each leaf."""

    def __init__(self, space: gym.Space, args: Args):
        self.args = args
        found = [(path, part) for path, part in parts(space) if path != ("action_mask",)]
        self.leaves = [leaf for leaf in (find_leaf(*part, args) for part in found) if leaf]
        kept = [leaf.path for leaf in self.leaves]
        self.dropped = [".".join(map(str, path)) for path, _ in found if path not in kept]
        if not self.leaves:
            raise ValueError(f"{space}: nothing there can be learned from")
        kinds = [leaf.space for leaf in self.leaves]
        first = [np.zeros(x.shape, x.dtype) + getattr(x, "start", 0) for x in kinds]
        self.shapes = [x.shape for x in self.read(first)]  # (H, W, C) or (D,)

    def names(self) -> list[str]:
        """What is seen, as it is saved with the agent."""
        names = [".".join(map(str, leaf.path)) for leaf in self.leaves]
        pairs = zip(names, self.leaves, strict=True)
        return [f"{name} {leaf.kind}".strip() for name, leaf in pairs]

    def pick(self, obs) -> list[np.ndarray]:
        """The leaves of an observation, or of several: an array, or dicts and tuples of arrays."""
        return [np.asarray(pick(obs, leaf.path)) for leaf in self.leaves]

    def read(self, values: list, before: list | None = None) -> list[np.ndarray]:
        """Leaves of one observation as images [H, W, C] or vectors [D]. With --frame-stack, behind
        those of the step `before`; where an episode begins, behind copies of itself."""
        found = []
        for k, (leaf, x) in enumerate(zip(self.leaves, values, strict=True)):
            x = np.reshape(x, leaf.space.shape)
            if leaf.kind in ("vector", "choices"):
                found.append(gym.spaces.flatten(leaf.space, x).astype(np.float32))
                continue
            x = self.image(leaf, x)
            frames = before[k] if before else np.tile(x, max(self.args.frame_stack, 1))
            found.append(np.concatenate([frames[..., x.shape[-1] :], x], axis=-1))
        return found

    def image(self, leaf: Leaf, x: np.ndarray) -> np.ndarray:
        """An image of any layout as [H, W, C]: bytes stay bytes, other numbers become float32."""
        x = x if x.dtype == np.uint8 else x.astype(np.float32)
        x = np.moveaxis(x, leaf.channels, range(x.ndim - len(leaf.channels), x.ndim))
        x = x.reshape(*x.shape[:2], -1)
        if leaf.size:
            pixels = torch.as_tensor(x).permute(2, 0, 1)[None]
            how = {"size": leaf.size, "mode": "bilinear", "antialias": True}
            x = nn.functional.interpolate(pixels, **how)[0].permute(1, 2, 0).numpy()
        if self.args.grayscale and x.shape[-1] % 3 == 0:
            colours = x.reshape(*x.shape[:2], -1, 3)
            x = (colours @ np.array([0.299, 0.587, 0.114], np.float32)).astype(x.dtype)
        return x


def without_binaries(space: gym.Space) -> gym.Space:
    """An action space whose MultiBinary parts are choices between two."""
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict([(key, without_binaries(x)) for key, x in space.spaces.items()])
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([without_binaries(x) for x in space.spaces])
    if isinstance(space, gym.spaces.MultiBinary):
        return gym.spaces.MultiDiscrete(np.full(space.shape, 2))
    return space


class Actions:
    """Actions of a space as vectors [F], as `gym.spaces.flatten` has them: zeros and a one for each
    choice, the numbers of each Box."""

    def __init__(self, space: gym.Space):
        self.space = without_binaries(space)
        self.blocks = []  # (size, whether it is a Box) of each choice and of each Box
        number = []
        whole = []
        low = []
        high = []
        for _, part in parts(self.space):
            box = isinstance(part, gym.spaces.Box)
            if not box and not isinstance(part, CHOICES):
                raise ValueError(f"{part}: no actions that can be learned")
            choices = [] if box else np.ravel(part.nvec if part.shape else part.n).tolist()
            size = part.low.size if box else sum(choices)
            self.blocks += [(size, True)] if box else [(choice, False) for choice in choices]
            number.append(np.full(size, box))
            whole.append(np.full(size, part.dtype.kind in "iu"))
            low.append(part.low.ravel() if box else np.zeros(size))
            high.append(part.high.ravel() if box else np.ones(size))
        if not any(size for size, _ in self.blocks):
            raise ValueError(f"{space}: nothing to do")
        self.number = np.concatenate(number)  # [F], whether it belongs to a Box
        self.whole = np.concatenate(whole)  # [F], whether it is rounded
        self.low = np.concatenate(low)  # [F]
        self.high = np.concatenate(high)  # [F]

    def to_space(self, action: np.ndarray):
        """An action [F] as the space has it; numbers are clipped (continuous detail 5)."""
        action = np.clip(action, self.low, self.high)
        return gym.spaces.unflatten(self.space, np.where(self.whole, action.round(), action))

    def mask(self, tree) -> np.ndarray:
        """A mask of all choices in a row, or nested as the space is, as an array [F]."""
        if not isinstance(tree, np.ndarray):
            choices = [path for path, part in parts(self.space) if isinstance(part, CHOICES)]
            tree = np.hstack([np.hstack(pick(tree, path)) for path in choices])
        if tree.size != np.sum(~self.number):
            fail(f"action_mask has {tree.size} entries, the choices {np.sum(~self.number)}")
        mask = np.ones(len(self.number), bool)
        mask[~self.number] = tree.ravel() > 0
        ends = np.cumsum([size for size, _ in self.blocks])
        if not all(block.any() for block in np.split(mask, ends[:-1])):
            raise ValueError(f"action_mask {tree} leaves nothing to choose")
        return mask


def check_spaces(env_id: str, space: gym.Space, actions: gym.Space):
    """Exit with one line if this script can't learn with these spaces."""
    try:
        Reader(space, Args()), Actions(actions)
    except ValueError as error:
        fail(f"--env-id {env_id}: {error}")


def is_atari(env_id: str) -> bool:
    """Whether it is a game of gymnasium's ALE."""
    return env_id.rpartition(":")[2].startswith("ALE/")


def with_tuples(options):
    """JSON's lists as tuples, which shapes have to be."""
    if isinstance(options, dict):
        return {key: with_tuples(value) for key, value in options.items()}
    return tuple(map(with_tuples, options)) if isinstance(options, list) else options


def make_env(env_id: str, /, **options) -> gym.Env:
    """An environment of gymnasium or EnvPool; exits with one line if it can't be made."""
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):  # draw without a display
        for name, value in {"PYGLET_HEADLESS": "1", "SDL_VIDEODRIVER": "dummy"}.items():
            os.environ.setdefault(name, value)
    module = {"ALE": "ale_py:", "dm_control": "shimmy:"}.get(env_id.split("/")[0], "")
    options = with_tuples(options)
    if is_atari(env_id):  # `Envs.play` skips images, and they are grey
        options = {"frameskip": 1, "obs_type": "grayscale"} | options
    try:
        if env_id.startswith("envpool:"):
            env = PoolEnv(env_id.removeprefix("envpool:"), options)
        else:
            env = gym.make(f"{module}{env_id}", **{"disable_env_checker": True} | options)
        with contextlib.ExitStack() as refused:
            refused.callback(env.close)
            check_spaces(env_id, env.observation_space, env.action_space)
            refused.pop_all()
    except Exception as error:  # whatever gymnasium or the environment's own code raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = repr(error) if str(error) else f"{error!r}: {place.line}"
        hint = f"raised in {place.filename}, line {place.lineno}; your own: module:Id; "
        fail(f"--env-id {env_id}: {what}, {hint}its arguments: --env-kwargs")
    return env


class PoolEnv(gym.Env):
    """An environment of EnvPool. It takes its seed when it is made, so each episode has a new one;
    rewards are float32."""

    def __init__(self, name: str, options: dict):
        try:
            import envpool
        except ImportError as error:
            fail(f"--env-id envpool:{name}: {error}: pip install envpool")
        known = envpool.list_all_envs()
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known))
            fail(f"--env-id envpool:{name}: EnvPool has no such environment; near: {near}")
        self.make = lambda seed: envpool.make_gymnasium(name, num_envs=1, seed=seed, **options)
        self.pool = self.make(0)
        self.observation_space = self.pool.observation_space
        self.action_space = self.pool.action_space

    def reset(self, seed: int = 0, options: dict | None = None):
        self.pool = self.make(seed % 2**31)
        obs, _ = self.pool.reset()
        return self.only(obs), {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.pool.step(np.asarray(action)[None])
        return self.only(obs), reward[0], terminated[0], truncated[0], {}

    def only(self, obs):
        """The one observation of a batch."""
        return {key: x[0] for key, x in obs.items()} if isinstance(obs, dict) else obs[0]

    def close(self):
        self.pool.close()


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

    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    """

    def __init__(self, envs: list[gym.Env], args: Args, numbers=(0,), played=None):
        self.envs = envs
        self.args = args
        self.numbers = list(numbers)
        self.observation_space = envs[0].observation_space
        self.action_space = envs[0].action_space
        self.reader = Reader(self.observation_space, args)
        self.translate = Actions(self.action_space)
        self.episodes = [-1] * len(envs)  # the number of each environment's running episode
        self.actions = [[] for _ in envs]  # of the running episodes
        self.rewards = [[] for _ in envs]
        self.over = np.zeros(len(envs), bool)  # [N], the last step ended an episode
        self.discounted = np.zeros(len(envs))  # [N], discounted sum of the rewards so far
        self.ended = []  # (environment, return, length) of each episode that the last step ended
        for i, (episode, _) in enumerate(played or ()):
            self.episodes[i] = episode - 1
        first = [self.reset(i) for i in range(len(envs))]
        self.obs = [np.stack(leaf) for leaf in zip(*first, strict=True)]  # of each leaf [N, ...]
        for i, (_, actions) in enumerate(played or ()):
            for action in actions:
                if action.shape != self.translate.low.shape:
                    fail(f"{args.resume}: {action}, played before, is not in {self.action_space}")
                self.play(i, action)

    def reset(self, i: int) -> list[np.ndarray]:
        """Begin the next episode of an environment; gives its first observation, by leaf."""
        self.episodes[i] += 1
        self.actions[i] = []
        self.rewards[i] = []
        self.over[i] = False
        self.discounted[i] = 0.0
        seed = episode_seed(self.args.seed, self.numbers[i], self.episodes[i])
        seed_others(seed)
        return self.look(*self.envs[i].reset(seed=seed))

    def look(self, obs, info: dict, before: list | None = None) -> list[np.ndarray]:
        """An observation, an array for each leaf, then its mask of valid choices [F], if any."""
        mask = info.get("action_mask", info.get("legal_action_mask"))
        if isinstance(obs, dict):
            mask = obs.get("action_mask", mask)
        found = self.reader.read(self.reader.pick(obs), before)
        if mask is not None and self.args.action_masks:
            found.append(self.translate.mask(mask))
        return found

    def show(self, i: int, leaves: list[np.ndarray]):
        """Store an environment's observation in the arrays of all."""
        if len(leaves) != len(self.obs):
            raise ValueError("an action mask is needed in every observation, or in none")
        for all_of, one in zip(self.obs, leaves, strict=True):
            all_of[i] = one

    def play(self, i: int, action: np.ndarray):
        """One step of an environment, with action [F], held for `action_repeat` of its own steps:
        reward, terminated, truncated."""
        given = self.translate.to_space(action)
        total = 0.0
        frame = None
        for _ in range(max(self.args.action_repeat, 1)):
            before = frame
            frame, reward, terminated, truncated, info = self.envs[i].step(given)
            try:
                total += float(np.asarray(reward).item())
                self.over[i] = terminated or truncated
            except (TypeError, ValueError):  # an array or None instead of one number
                what = f"reward {reward}, terminated {terminated}, truncated {truncated}"
                hint = "one of each is needed (several rewards: a wrapper that weighs them)"
                raise ValueError(f"{self.args.env_id}: {what}: {hint}") from None
            if self.over[i]:
                break
        if before is not None and is_atari(self.args.env_id):
            frame = np.maximum(before, frame)  # some objects are drawn only in every second image
        self.show(i, self.look(frame, info, [x[i] for x in self.obs]))
        self.actions[i].append(action)
        self.rewards[i].append(total)
        self.discounted[i] = self.args.gamma * self.discounted[i] + total
        return total, terminated, truncated

    def step(self, actions: np.ndarray):
        """Take actions [N, F]: rewards, terminated, truncated [N]."""
        rewards = np.zeros(len(actions))
        terminated = np.zeros(len(actions), bool)
        truncated = np.zeros(len(actions), bool)
        self.ended = []
        for i, action in enumerate(actions):
            if self.over[i]:
                self.show(i, self.reset(i))
                continue
            rewards[i], terminated[i], truncated[i] = self.play(i, action)
            if self.over[i]:
                both = math.fsum(self.rewards[i]), len(self.rewards[i])
                self.ended.append((self.numbers[i], *both))
        return rewards, terminated, truncated

    def shown(self) -> dict:
        """What the rollout sees of the environments."""
        return {"obs": self.obs, "over": self.over, "discounted": self.discounted}

    def played(self) -> list[tuple[int, np.ndarray]]:
        """What replays the running episodes: their numbers and actions so far, [t, F]."""
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
        leaves = zip(*(part["obs"] for part in shown), strict=True)
        self.obs = [np.concatenate(leaf) for leaf in leaves]
        self.over = np.concatenate([part["over"] for part in shown])
        self.discounted = np.concatenate([part["discounted"] for part in shown])
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
    """Environments of the kind that the arguments name, as the checkpoint left them."""
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


def layer_init(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, biases 0 (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Sequential):
    """x + f(x) (He et al. 2016)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def encoder(shape: tuple[int, int, int], kind: str) -> nn.Sequential:
    """A network for images [B, C, H, W] of this shape (H, W, C); `kind` as --encoder."""
    side = min(shape[:2])
    channels = shape[2]
    if kind == "auto":
        kind = "nature" if side >= 36 else "impala" if side >= 16 else "small"
    layers = []
    if kind == "impala":  # Espeholt et al. 2018, without its LSTM; torch's own initial weights
        for inputs, size in ((channels, 16), (16, 32), (32, 32)):
            conv = [nn.Conv2d(k, size, 3, padding=1) for k in (inputs, size, size, size, size)]
            layers += [conv[0], nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [Residual(nn.ReLU(), a, nn.ReLU(), b) for a, b in (conv[1:3], conv[3:])]
        layers += [nn.ReLU()]
    else:  # Nature's (Mnih et al. 2015; Atari detail 8), or a small one for grids of codes
        nature = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
        small = ((16, 2, 1), (32, 2, 1), (64, 2, 1))
        for size, kernel, stride in nature if kind == "nature" else small:
            layers += [layer_init(nn.Conv2d(channels, size, kernel, stride)), nn.ReLU()]
            channels = size
    network = nn.Sequential(*layers, nn.Flatten())
    try:
        features = network(torch.zeros(1, shape[2], *shape[:2])).shape[1]
    except RuntimeError:
        fail(f"--encoder {kind}: an image of {shape[0]} x {shape[1]} is too small for it")
    linear = nn.Linear(features, {"nature": 512, "impala": 256, "small": 128}[kind])
    return network.extend([linear if kind == "impala" else layer_init(linear), nn.ReLU()])


class Trunk(nn.Module):
    """The layers before the heads: a network for each image, and 64 tanh units for all vectors and
    choices (twice, if there is no image), side by side."""

    def __init__(self, shapes: list[tuple], kind: str):
        super().__init__()
        self.images = nn.ModuleList(encoder(shape, kind) for shape in shapes if len(shape) == 3)
        inputs = sum(shape[0] for shape in shapes if len(shape) == 1)
        layers = []
        if inputs:
            layers += [layer_init(nn.Linear(inputs, 64)), nn.Tanh()]
        if not self.images:
            layers += [layer_init(nn.Linear(64, 64)), nn.Tanh()]
        self.vectors = nn.Sequential(*layers)
        self.size = sum(image[-2].out_features for image in self.images)
        if inputs:
            self.size += 64

    def forward(self, images: list[torch.Tensor], vectors: torch.Tensor) -> torch.Tensor:
        """Features [B, F] of images [B, C, H, W] and of all vectors [B, D]."""
        found = [network(image) for network, image in zip(self.images, images, strict=True)]
        return torch.cat([*found, self.vectors(vectors)], dim=-1)  # vectors [B, 0] stay so


class Memory(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997), a GRU (Cho et al. 2014), or none: what goes in comes
    out. Its state in N environments is a tensor [N, S]: h and c of an LSTM, h of a GRU."""

    def __init__(self, kind: str, inputs: int, size: int, span: int = 1):
        super().__init__()
        self.net = {"lstm": nn.LSTM, "gru": nn.GRU, "none": nn.Identity}[kind](inputs, size)
        for name, parameter in self.net.named_parameters():  # (LSTM detail 1)
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        if kind != "none":  # a gate of k / (1 + k) keeps it for about k steps, 1 ... span
            gates = self.net.bias_ih_l0.data[size : 2 * size]  # an LSTM's f, a GRU's z
            gates.copy_(torch.linspace(0.0, math.log(span), size))
        self.size = inputs if kind == "none" else size
        self.state_size = {"lstm": 2 * size, "gru": size, "none": 0}[kind]

    def forward(self, rows: torch.Tensor, state: torch.Tensor):
        """Outputs [T, N, H] at rows [T, N, F] of which none begins an episode; the state after."""
        if isinstance(self.net, nn.Identity):
            return rows, state
        if isinstance(self.net, nn.GRU):
            output, h = self.net(rows, state.unsqueeze(0).contiguous())
            return output, h.squeeze(0)
        h, c = state.unsqueeze(0).chunk(2, dim=-1)
        output, (h, c) = self.net(rows, (h.contiguous(), c.contiguous()))
        return output, torch.cat([h, c], dim=-1).squeeze(0)

    def replay(self, rows: torch.Tensor, state: torch.Tensor, first: torch.Tensor):
        """Outputs [T, N, H] at rows [T, N, F]. The state is cleared before an episode's first row
        (LSTM detail 3): an environment's rows from there to the next such are a sequence of their
        own. All sequences, side by side and padded, take one call: one call a row is slow."""
        T, N = first.shape
        begins = first.T.clone()  # one environment's rows behind the other's: [N, T]
        begins[:, 0] = True
        begins = begins.flatten()
        starts = begins.nonzero().flatten()  # [S], the first row of each sequence
        sequence = begins.cumsum(dim=0) - 1  # [N * T], which one a row belongs to
        place = torch.arange(N * T) - starts[sequence]  # [N * T], and where in it
        padded = rows.new_zeros((int(place.max()) + 1, len(starts), rows.shape[-1]))
        padded[place, sequence] = rows.transpose(0, 1).flatten(0, 1)
        kept = state.masked_fill(first[0].unsqueeze(-1).to(state.device), 0.0)
        before = state.new_zeros((len(starts), state.shape[-1]))
        before[starts % T == 0] = kept
        output, _ = self(padded, before)
        return output[place, sequence].view(N, T, -1).transpose(0, 1)


class Agent(nn.Module):
    """Policy and value function for environments with the spaces of `env`.

    Observations are lists of arrays or tensors [B, ...], one for each leaf, as `Envs.obs` and
    `observe` give them, perhaps followed by a mask [B, F]; actions are vectors [B, F] of `Actions`.
    The state of N environments is a tensor [N, S], zeros where nothing was seen. To learn, a batch
    is T rows of each, B = T * N; `first` [T, N], on the CPU, says which are an episode's first.
    """

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        self.reader = Reader(env.observation_space, self.args)
        self.translate = Actions(env.action_space)
        shapes = self.reader.shapes
        number = torch.tensor(self.translate.number)
        self.trunk = Trunk(shapes, self.args.encoder)
        two = self.args.separate_critic
        self.value_trunk = Trunk(shapes, self.args.encoder) if two else None
        past = len(number) + 1 if self.args.previous_action else 0  # numbers of `past`
        inputs = self.trunk.size + past
        size = self.args.memory_size
        how = self.args.memory, inputs, size, self.args.memory_span
        self.memories = nn.ModuleList(Memory(*how) for _ in range(1 + two))
        self.state_sizes = [*(memory.state_size for memory in self.memories), past]
        # logits of choices and means of numbers, in the order of an action
        self.actor = layer_init(nn.Linear(self.memories[0].size, len(number)), gain=0.01)
        self.critic = layer_init(nn.Linear(self.memories[0].size, 1), gain=1.0)
        # a deviation for each number, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full((int(number.sum()),), self.args.log_std_init))
        low = torch.tensor(self.translate.low)
        high = torch.tensor(self.translate.high)
        scaled = number & (high > low) & (torch.maximum(-low, high) <= 1e6)  # others are not scaled
        self.register_buffer("number", number)
        self.register_buffer("origin", ((low + high) / 2).where(scaled, 0.0).float())
        self.register_buffer("unit", ((high - low) / 2).where(scaled, 1.0).float())
        self.moments = nn.ModuleList()  # of vectors, and of images that are codes
        for leaf, shape in zip(self.reader.leaves, shapes, strict=True):
            known = leaf.kind in ("image", "choices")
            self.moments.append(nn.Identity() if known else RunningMoments(shape))
        self.return_moments = RunningMoments()

    def normalize(self, obs: list) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Images [B, C, H, W], from 0 to 1 (Atari detail 9), and all vectors [B, D]. Vectors and
        codes are standardized and clipped to +-10 (continuous details 6, 7)."""
        images = []
        vectors = []
        for leaf, moments, x in zip(self.reader.leaves, self.moments, obs, strict=False):
            x = x.float()
            if leaf.kind == "image":
                low = float(leaf.space.low.min())
                high = float(leaf.space.high.max())
                x = (x - low) / (high - low)
            elif leaf.kind != "choices":
                scale = (moments.var + 1e-8).rsqrt().float()
                x = ((x - moments.mean.float()) * scale).clamp(-10.0, 10.0)
            if x.ndim == 2:
                vectors.append(x)
            else:
                x = x.permute(0, 3, 1, 2)  # in memory, channels are last
                images.append(x if self.args.channels_last else x.contiguous())
        return images, torch.cat(vectors, dim=-1) if vectors else x.new_zeros(x.shape[0], 0)

    def features(self, obs: list) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden layers [B, F] of policy and value function."""
        images, vectors = self.normalize(obs)
        with torch.autocast(vectors.device.type, torch.bfloat16, enabled=self.args.bf16):
            hidden = self.trunk(images, vectors).float()
            if self.value_trunk is None:
                return hidden, hidden
            return hidden, self.value_trunk(images, vectors).float()

    def initial_state(self, n: int) -> torch.Tensor:
        """The state in n environments before anything was seen (LSTM detail 2)."""
        return self.unit.new_zeros((n, sum(self.state_sizes)))

    def past(self, action: torch.Tensor) -> torch.Tensor:
        """What is kept of actions [..., F] with --previous-action: themselves, in their unit, and a
        one. All of it is 0 at an episode's first row."""
        if not self.args.previous_action:
            return action[..., :0]
        return torch.cat([(action - self.origin) / self.unit, torch.ones_like(action[..., :1])], -1)

    def recall(self, obs: list, state: torch.Tensor, first=None, action=None):
        """What the memories of policy and value function give [B, H]; without `first`, their states
        after the row."""
        *states, past = state.split(self.state_sizes, dim=-1)
        past = past.unsqueeze(0)  # [1, N, P]
        if first is not None and self.args.previous_action:
            past = torch.cat([past, self.past(action).view(*first.shape, -1)[:-1]])
            past = past.masked_fill(first.unsqueeze(-1).to(past.device), 0.0)
        found = []
        for k, (memory, x) in enumerate(zip(self.memories, self.features(obs), strict=False)):
            rows = x.unsqueeze(0) if first is None else x.view(*first.shape, -1)  # [T, N, F]
            if self.args.previous_action:
                rows = torch.cat([rows, past], dim=-1)
            if first is None:
                hidden, states[k] = memory(rows, states[k])
            else:
                hidden = memory.replay(rows, states[k], first)
            found.append(hidden.flatten(0, 1))
        return found[0], found[-1], torch.cat(states, dim=-1) if first is None else None

    def policy(self, obs: list, state: torch.Tensor, first=None, action=None):
        """Log-probabilities of choices and means of numbers, in their unit [B, F]; V [B]. Without
        `first` there is one row for each environment, and the memories' states after it are given,
        too. With it there are T rows, of which --previous-action wants the actions."""
        hidden, value_hidden, after = self.recall(obs, state, first, action)
        scores = self.actor(hidden)
        if len(obs) > len(self.reader.leaves):  # the mask of valid choices follows the leaves
            scores = scores.where(obs[-1], -1e8)
        parts = [x if box else x.log_softmax(dim=-1) for x, (_, box) in self.blocks(scores)]
        return torch.cat(parts, dim=-1), self.critic(value_hidden).squeeze(-1), after

    def choose_action(self, policy: torch.Tensor, noise: torch.Tensor | None = None):
        """The likeliest choices and the means as actions [B, F] or, given noise, samples."""
        if noise is not None:
            policy = policy + noise * self.logstd().exp()
        found = []
        for block, (size, box) in self.blocks(policy):
            choice = nn.functional.one_hot(block.argmax(dim=-1), size)
            found.append(block if box else choice)
        return self.origin + self.unit * torch.cat(found, dim=-1)

    def blocks(self, x: torch.Tensor):
        """Parts [B, size] of x [B, F]: (part, (size, whether it is a Box))."""
        sizes = [size for size, _ in self.translate.blocks]
        return zip(x.split(sizes, dim=-1), self.translate.blocks, strict=True)

    def logstd(self) -> torch.Tensor:
        """Log standard deviations [F] of the numbers, 0 for choices."""
        return torch.zeros_like(self.unit).masked_scatter(self.number, self.actor_logstd)

    def log_prob(self, policy: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Log-probability [B] of actions [B, F]: independent parts, whose numbers add up
        (MultiDiscrete detail 1, continuous details 1, 3)."""
        logscale = self.logstd() + self.unit.log()
        z = ((action - self.origin) / self.unit - policy) * torch.exp(-self.logstd())
        normal = -0.5 * z.square() - logscale - 0.5 * math.log(2.0 * math.pi)
        return normal.where(self.number, action * policy).sum(dim=-1)

    def box_entropy(self) -> torch.Tensor:
        """Entropy of all numbers, the same in every state."""
        logscale = self.logstd() + self.unit.log()
        entropy = logscale + 0.5 * math.log(2.0 * math.pi * math.e)
        return entropy.where(self.number, 0.0).sum()

    def step(self, obs: list, state: torch.Tensor, noise: torch.Tensor | None = None):
        """Actions [N, F] at the next observations, as `choose_action`, and the state after."""
        policy, _, after = self.policy(obs, state)
        action = self.choose_action(policy, noise)
        return action, torch.cat([after, self.past(action)], dim=-1)

    def get_value(self, obs: list, state: torch.Tensor, first=None, action=None) -> torch.Tensor:
        """V [B] at observations [B, ...]."""
        _, value, _ = self.policy(obs, state, first, action)
        return value

    def get_action_and_value(self, obs: list, state: torch.Tensor, first=None, action=None):
        """Action [B, F] (sampled unless given), its log-probability, entropy and value [B]; without
        `first`, the state after the row."""
        policy, value, after = self.policy(obs, state, first, action)
        if action is None:
            gumbel = -torch.empty_like(policy).exponential_().log()
            action = self.choose_action(policy, torch.randn_like(policy).where(self.number, gumbel))
        logprobs = policy.where(~self.number, 0.0)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1) + self.box_entropy()
        if after is not None:
            after = torch.cat([after, self.past(action)], dim=-1)
        return action, self.log_prob(policy, action), entropy, value, after

    forward = get_action_and_value

    def noise(self, rng: np.random.Generator, *shape: int) -> torch.Tensor:
        """Noise for `shape` actions [..., F]: Gumbel's for choices, whose argmax is a sample."""
        size = (*shape, len(self.unit))
        noise = np.where(self.translate.number, rng.standard_normal(size), rng.gumbel(size=size))
        return torch.as_tensor(noise, dtype=torch.float32, device=self.unit.device)

    def update_moments(self, data: "Rollout"):
        """Take in the observations of a rollout."""
        valid = torch.as_tensor(data.valid)
        for moments, x in zip(self.moments, data.obs, strict=False):
            if isinstance(moments, RunningMoments):
                moments.update(x[:-1][valid])

    def observe(self, obs, before: list | None = None) -> list[np.ndarray]:
        """What `act` needs of raw observations (an array [N, ...], or dicts and tuples of arrays).
        With --frame-stack, `before` is what this gave for the step before."""
        found = []
        for i, values in enumerate(zip(*self.reader.pick(obs), strict=True)):
            found.append(self.reader.read(values, before and [x[i] for x in before]))
            if isinstance(obs, dict) and "action_mask" in obs and self.args.action_masks:
                found[i].append(self.translate.mask(obs["action_mask"][i]))
        return [np.stack(leaf) for leaf in zip(*found, strict=True)]

    @torch.no_grad()
    def act(self, obs, noise: torch.Tensor | None = None, *, state: torch.Tensor):
        """The likeliest actions, nested as the space is, at raw observations [N, ...] or at what
        `observe` gave; with noise [N, F], samples. The state [N, S] becomes the one after; set
        state[i] = 0 before an episode's first observation."""
        obs = obs if isinstance(obs, list) else self.observe(obs)
        actions, state[:] = self.step(as_tensors(obs, self.unit.device), state, noise)
        actions = actions.cpu().numpy()
        space = self.translate.space
        items = [self.translate.to_space(action) for action in actions]
        return concatenate(space, items, create_empty_array(space, len(items)))


def as_tensors(obs: list[np.ndarray], device) -> list[torch.Tensor]:
    """The arrays of an observation on a device."""
    return [torch.as_tensor(x, device=device) for x in obs]


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
    state: torch.Tensor  # [N, S], before the first row
    first: torch.Tensor  # [T + 1, N], on the CPU: an episode's first row, where state is cleared
    obs: list[torch.Tensor]  # of each leaf [T + 1, N, ...]; bytes stay bytes, channels are last
    actions: torch.Tensor  # [T, N, F]
    rewards: np.ndarray  # [T, N], scaled
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored
    # and whose reward is 0; its observation is the episode's true last one


class Batch(NamedTuple):
    state: torch.Tensor  # [N, S], before the first of T rows
    first: torch.Tensor  # [T, N]
    obs: list[torch.Tensor]  # of each leaf [B, ...], B = T * N
    actions: torch.Tensor  # [B, F]
    rows: torch.Tensor  # [M], what of B is learned from
    logprobs: torch.Tensor  # [M], of the policy that acted
    advantages: torch.Tensor  # [M]
    returns: torch.Tensor  # [M]
    values: torch.Tensor  # [M], before the update


def ppo_loss(agent: Agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch, and its metrics."""
    # states, too, as the parameters now make them (LSTM detail 5)
    _, *outputs, _ = agent(batch.obs, batch.state, batch.first, batch.actions)
    logprob, entropy, value = (x[batch.rows] for x in outputs)
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

    # entropy bonuses keep the policy exploring (detail 10)
    entropy = entropy.mean()
    of_boxes = agent.box_entropy()
    bonus = args.ent_coef * (entropy - of_boxes) + args.box_ent_coef * of_boxes
    loss = policy_loss - bonus + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -logratio.mean(), "approx_kl": (ratio - 1.0 - logratio).mean()}
    return loss, metrics | {"clipfrac": ((ratio - 1.0).abs() > args.clip_coef).float().mean()}


@torch.no_grad()
def judge(agent: Agent, data: Rollout, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [T, N] and values [T + 1, N] of a rollout by the policy that acted, all the
    rows of `size` environments at a time."""
    actions = torch.cat([data.actions, data.actions[-1:]])  # the last observations have none
    logprobs = []
    values = []
    for which in torch.arange(len(data.state)).split(size):
        obs = [x[:, which].flatten(0, 1) for x in data.obs]
        taken = actions[:, which].flatten(0, 1)
        _, logprob, _, value, _ = agent(obs, data.state[which], data.first[:, which], taken)
        logprobs.append(logprob.view(len(actions), -1))
        values.append(value.view(len(actions), -1))
    return torch.cat(logprobs, dim=1)[:-1], torch.cat(values, dim=1)


def update(agent: Agent, data: Rollout, iteration: int, learning_rate: float, args: Args):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    first = iteration == 0
    if first:  # later, the scale changes after learning: acting and learning share it
        agent.update_moments(data)
    logprobs, values = judge(agent, data, math.ceil(args.num_envs / args.num_minibatches))
    numbers = data.rewards, values.cpu().double().numpy(), data.terminated, data.truncated
    advantages = gae(*numbers, args.gamma, args.gae_lambda)  # detail 5
    advantages = torch.tensor(advantages).to(values)
    returns = advantages + values[:-1]
    shown = [x[:-1] for x in data.obs]
    learned = logprobs, advantages, returns, values[:-1]
    steps = []  # metrics of each step
    rng = np.random.default_rng((args.seed, iteration, 1))
    agent.adam.param_groups[0]["lr"] = learning_rate
    for _ in range(args.update_epochs):
        epoch = []
        # every environment once an epoch, with all its rows (detail 6, LSTM detail 4)
        for which in np.array_split(rng.permutation(args.num_envs), args.num_minibatches):
            rows = torch.as_tensor(np.flatnonzero(data.valid[:, which]), device=values.device)
            if len(rows) < 2:  # fewer than two advantages can't be normalized
                continue
            obs = [x[:, which].flatten(0, 1) for x in shown]
            inputs = data.first[:-1, which], obs, data.actions[:, which].flatten(0, 1)
            targets = [x[:, which].flatten(0, 1)[rows] for x in learned]
            minibatch = Batch(data.state[which], *inputs, rows, *targets)
            loss, metrics = ppo_loss(agent, args, minibatch)
            agent.adam.zero_grad()
            loss.backward()
            # over all parameters (detail 11)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            agent.adam.step()
            epoch.append(torch.stack([*metrics.values()]).detach())
        if not epoch:  # nothing to learn from
            return {}
        steps += epoch
        approx_kl = torch.stack(epoch)[:, [*metrics].index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    if not first:
        agent.update_moments(data)
    means = torch.stack(steps).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    error = advantages[data.valid].var()  # variance of R - V
    scale = returns[data.valid].var()  # variance of R
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    if agent.number.any():
        metrics["charts/policy_std"] = agent.actor_logstd.exp().mean().item()
    return metrics


# --- rollout --------------------------------------------------------------------------------------
@torch.no_grad()
def rollout(agent: Agent, envs: Envs | WorkerEnvs, state: torch.Tensor, run: "Run", args: Args):
    """Take `num_steps` steps in every environment, going on where the last ended (detail 1), with
    the state there: a Rollout, and the state where this one ended."""
    T = args.num_steps
    N = args.num_envs
    device = agent.unit.device
    now = as_tensors(envs.obs, device)
    obs = [x.new_empty((T + 1, *x.shape)) for x in now]
    actions = []
    before = state
    rewards = np.zeros((T, N))
    discounted = np.zeros((T, N))
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    over = np.zeros((T, N), bool)  # rows after an episode's end
    noise = agent.noise(np.random.default_rng((args.seed, run.iteration, 0)), T, N)
    for t in range(T):
        for kept, x in zip(obs, now, strict=True):
            kept[t] = x
        over[t] = envs.over
        action, state = agent.step(now, state, noise[t])
        actions.append(action)
        state[over[t]] = 0.0  # an episode begins in the next row
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t].cpu().numpy())
        discounted[t] = envs.discounted
        now = as_tensors(envs.obs, device)
        run.global_step += N - int(np.count_nonzero(over[t]))
        if envs.ended:
            run.log_episodes(envs.ended)
    for kept, x in zip(obs, now, strict=True):
        kept[T] = x
    if args.scale_rewards:  # over the deviation of returns, clipped (continuous details 8, 9)
        agent.return_moments.update(discounted[~over])
        rewards = np.clip(rewards / math.sqrt(agent.return_moments.var + 1e-8), -10.0, 10.0)
    first = torch.tensor(np.concatenate([np.zeros((1, N), bool), over]))
    acted = before, first, obs, torch.stack(actions)
    return Rollout(*acted, rewards, terminated, truncated, ~over), state


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


def save(run: Run, agent: Agent, envs, memory: torch.Tensor):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    adam = {"state": agent.adam.state_dict()["state"]}  # its settings are the code's
    state |= {"adam": adam, "names": agent.reader.names(), "memory": memory}
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
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments or
    those given."""
    checkpoint = load_checkpoint(folder)
    args = args or checkpoint["args"]
    envs = env or make_envs(args, 1)
    agent = Agent(envs, args)
    if env is None:
        envs.close()
    shown = agent.reader.names()
    seen = checkpoint.get("names", shown)  # not kept with weights alone
    if seen != shown:
        fail(f"{folder}: its agent sees {seen}, the environment shows {shown}")
    try:
        agent.load_state_dict(checkpoint["agent"])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        maker = checkpoint.get("script")
        fail(
            f"{folder}: its agent, by {maker}, does not fit the environment and the flags: {error}"
        )
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
    greedy returns. `capture_video` records it into its videos/."""
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    greedy = play(args, "eval")
    sampled = play(args, "sampled")
    for name, returns in (("greedy", greedy), ("sampled", sampled)):
        print(f"{name}, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return greedy


@torch.no_grad()
def play(args: Args, name: str) -> list[float]:
    """Returns of `eval_episodes` episodes, printed under this name; "sampled" is not greedy."""
    played = replace(args, seed=episode_seed(args.seed, 2**31))
    if args.capture_video:
        refuse_links(args.evaluate)
        videos = str(args.evaluate / "videos")
        how = {"disable_logger": True, "name_prefix": name}
        env = gym.wrappers.RecordVideo(drawn_env(args), videos, lambda _: True, **how)
        envs = Envs([env], played)
        print(f"videos: {videos}")
    else:
        envs = make_envs(played, 1)
    returns = []
    steps = 0
    bar = tqdm(unit="step", leave=False, disable=None)  # drawing frames takes a while
    with contextlib.closing(envs), bar:
        agent, _ = load(args.evaluate, envs)
        rng = np.random.default_rng(played.seed)
        state = agent.initial_state(1)
        while len(returns) < args.eval_episodes:
            noise = agent.noise(rng, 1) if name == "sampled" else None
            action, state = agent.step(as_tensors(envs.obs, agent.unit.device), state, noise)
            state[envs.over] = 0.0  # as in training
            envs.step(action.numpy())
            steps += 1
            bar.update()
            for _, episodic_return, _ in envs.ended:
                episode = f"{name}_episode={len(returns)}"
                bar.clear()
                print(f"{episode}, episodic_return={episodic_return:.2f}", flush=True)
                returns.append(episodic_return)
                steps = 0
            if steps > 100_000:
                hint = """--env-kwargs '{"max_episode_steps": 1000}'"""
                fail(f"100,000 steps, no end: whole episodes need max_episode_steps, {hint}")
    return returns


# --- training -------------------------------------------------------------------------------------
def compile_features(agent: Agent):
    """Compile the layers before the heads, for acting and for learning, if a compiler works."""
    try:
        torch.compile(lambda x: x + 1)(agent.actor.bias)
    except Exception as error:  # whatever a missing or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return
    agent.features = torch.compile(agent.features, fullgraph=True)


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


def describe(agent: Agent, envs: Envs | WorkerEnvs, args: Args) -> list[str]:
    """What is learned from, and its memory; exits with one line if there is too little."""
    size = (args.num_steps + 1) * sum(x.nbytes for x in envs.obs)
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        fail(f"{size / 1e9:.0f} GB a rollout: less --num-steps, --num-envs or --resize")
    seen = zip(agent.reader.names(), agent.reader.shapes, strict=True)
    lines = [f"sees {name} {shape}" for name, shape in seen]
    lines += [f"does not see {name}" for name in agent.reader.dropped]
    weights = sum(x.numel() for x in agent.parameters())
    return [*lines, f"{weights:,} weights, {size / 1e6:.1f} MB a rollout"]


def restore(agent: Agent, memory: torch.Tensor, checkpoint: dict, folder: Path):
    """Set the optimizer and the memory's state to what the checkpoint has."""
    try:
        saved = {"state": checkpoint["adam"]["state"]}  # its settings are the code's
        agent.adam.load_state_dict(agent.adam.state_dict() | saved)
        for parameter, state in agent.adam.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].shape != parameter.shape:
                    raise ValueError(f"{name} has shape {tuple(state[name].shape)}")
                state[name] = torch.empty_like(parameter).copy_(state[name])  # in the same layout
        memory.copy_(checkpoint["memory"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        fail(f"{folder}: its checkpoint does not fit: {error!r}")


def check_finite(iteration: int, values: dict):
    """Raise FloatingPointError that names the first value with a NaN or an infinity."""
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"iteration {iteration}: {name} is not finite")


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(args.num_threads or cores)
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
        memory = agent.initial_state(args.num_envs)
        if args.resume:
            restore(agent, memory, checkpoint, args.resume)
        if args.compile:
            compile_features(agent)
        told = describe(agent, envs, args)
        with stop_signals() as stop, Run(args, checkpoint) as run:
            how = f"{args.env_id} on {device}, {args.num_iterations} iterations"
            run.bar.write("\n".join([f"{how}, in {run.folder}", *told]))
            save(run, agent, envs, memory)
            while run.iteration < args.num_iterations and not stop:
                remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate  # annealed (detail 4)
                data, memory = rollout(agent, envs, memory, run, args)
                metrics = update(agent, data, run.iteration, learning_rate, args)
                seen = dict(zip(agent.reader.names(), data.obs, strict=False))
                check_finite(run.iteration, seen | {"rewards": data.rewards})
                check_finite(run.iteration, metrics | agent.state_dict())
                run.log(metrics | {"charts/learning_rate": learning_rate})
                if run.iteration % args.checkpoint_interval == 0:
                    save(run, agent, envs, memory)
            save(run, agent, envs, memory)
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
