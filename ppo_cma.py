# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy", "tensorboard",
#     "tqdm", "tyro>=0.9",
# ]
# ///
"""PPO-CMA: Proximal Policy Optimization with Covariance Matrix Adaptation, in one file.

Hämäläinen, Babadi, Ma & Lehtinen, MLSP 2020, https://arxiv.org/abs/1810.02541. Each iteration:

    1. play whole episodes with a ~ N(mu(s), var(s)) until N environment steps are reached
    2. fit the critic to Monte-Carlo returns; A = GAE(lambda) / std(A), never centred
    3. variance network:  min  -E_H[ max(A, 0) log N(a | mu, var) ]      over the last H iterations
    4. mean network:      min  -E  [ max(A, 0) log N(a | mu, var) ]      over this iteration
                               -E  [ max(-A, 0) k(a) log N(2 mu_old - a | mu, var) ]   (mirroring)

The variance comes first and measures deviations from the mean not yet moved, so it grows along
the direction of progress, as the rank-mu update of CMA-ES does; that is what prevents PPO's early
loss of exploration. Mirroring makes a negative advantage at `a` a positive one on the other side.

    python ppo_cma.py --env-id Humanoid-v4                          # train (10M steps), CPU or GPU
    python ppo_cma.py --env-id Hopper-v4 --iter-steps 8000 --total-timesteps 1000000
    python ppo_cma.py --resume runs/RUN                             # go on where it stopped
    python ppo_cma.py --evaluate runs/RUN --capture-video           # play with the mean action

Expect a training return of 4,000 to 4,800 on Humanoid-v4 after 5M steps, an hour or less on one
CPU core (5,500 after 10M with `--anneal-lr`), and 900 to 2,800 on Hopper-v4 after 400,000, three
minutes; seeds and tables: README.md.
`--iter-steps` (N) is the parameter to tune: 4k for toys, 8k for planar robots, 32k for 3-D ones.

Where the paper and its code differ, this follows the code that made the published curves (dense
skip connections, the 1/2 in the log-density, a mirror kernel averaged over action dimensions). One
difference: the value after an episode's last step is 0, whatever ended it; the critic sees time.
Left out on purpose: discrete or unbounded actions, gradient clipping, bootstrapping at time limits.
"""

import contextlib
import csv
import dataclasses
import difflib
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

MODES = ("ppo-cma-m", "ppo-cma", "ppo", "pg", "pg-pos")


def alias(*names: str):
    return tyro.conf.arg(aliases=names)


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: networks, actions, minibatches and each episode's reset"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """use a GPU if there is one (networks this small gain little from it)"""
    num_threads: int = 1
    """CPU threads for torch; more than one rarely pays for networks of this size"""
    compile: bool = False
    """compile the networks with torch.compile: same to rounding; on a CPU it does not pay"""
    track: bool = False
    """also log to Weights and Biases"""
    wandb_project_name: str = "ppo"
    """the wandb project's name"""
    wandb_entity: str | None = None
    """the entity (team) of the wandb project"""
    capture_video: bool = False
    """record the evaluation episodes (after training, or with --evaluate) into RUN/videos"""
    render: bool = False
    """show environment 0 in a window while training"""
    verbose: bool = False
    """has no effect: each iteration tells what it did"""
    save_model: bool = False
    """also save the weights alone, as RUN/{exp_name}.cleanrl_model"""
    run_dir: Path | None = None
    """the run's folder; default runs/{env_id}__{exp_name}__{seed}__{time}"""
    run_suffix: str = ""
    """appended to the default folder's name"""
    resume: Path | None = None
    """continue the run in this folder, with its own arguments"""
    evaluate: Path | None = None
    """play episodes with the mean action of the agent saved in this folder, and exit"""
    eval_episodes: int = 10
    """episodes played by --evaluate"""
    checkpoint_interval: int = 10
    """iterations between checkpoints"""

    # Algorithm specific arguments
    env_id: Annotated[str, alias("--env-name")] = "Humanoid-v4"
    """the environment: a gymnasium id with a finite Box of actions"""
    env_backend: Literal["gymnasium", "envpool"] = "gymnasium"
    """who steps the environments; envpool in threads, one a core (pip install envpool)"""
    total_timesteps: Annotated[int, alias("--max-steps")] = 10_000_000
    """environment steps of the whole run; the last iteration may overshoot"""
    num_envs: int = 1
    """environments played side by side; their whole episodes are pooled"""
    action_repeat: int = 2
    """environment steps for which an action is held; their rewards are summed"""
    mode: Annotated[str, alias("-m")] = "ppo-cma-m"
    """ppo-cma-m (with mirroring), ppo-cma, ppo, or the didactic pg and pg-pos"""
    iter_steps: int = 32_000
    """N: environment steps per iteration, rounded up to whole episodes"""
    minibatch_size: Annotated[int, alias("--batch-size")] = 512
    """M: decisions per minibatch, for every network"""
    n_updates: int = 100
    """minibatches per iteration, for each of critic, variance and mean"""
    history_buffer_size: int = 9
    """H: iterations whose samples train the variance"""
    learning_rate: Annotated[float, alias("-lr")] = 5e-4
    """Adam's, for every network"""
    anneal_lr: bool = False
    """lower the learning rate linearly to 0; the original's is constant"""
    gamma: float = 0.99
    """discount factor per decision"""
    gae_lambda: float = 0.95
    """lambda of the generalized advantage estimate"""
    clip_coef: Annotated[float, alias("--ppo-epsilon")] = 0.2
    """epsilon of the clipped surrogate, mode ppo only"""
    ent_coef: Annotated[float, alias("--ppo-ent-l-w")] = 0.0
    """weight of the entropy bonus, mode ppo only"""
    num_iterations: int = 0
    """has no effect: --total-timesteps and --iter-steps set it"""

    def __post_init__(self):
        self.mode = self.mode.lower().replace("_", "-")  # the original's spelling, too


# What a resumed run may change; every other argument is the run's own.
CHANGEABLE = {
    "cuda", "num_threads", "compile", "track", "wandb_project_name", "wandb_entity", "render",
    "capture_video", "save_model", "run_suffix", "run_dir", "resume", "evaluate", "eval_episodes",
    "checkpoint_interval", "total_timesteps", "num_iterations",
}  # fmt: skip
# Fields that CleanRL computes, accepted for its command lines.
NO_EFFECT = {
    "num_iterations": "--total-timesteps and --iter-steps set it",
    "verbose": "each iteration tells what it did",
}
# Arguments that need a package of their own.
NEEDS = {"capture_video": "moviepy", "track": "wandb"}
# The least and the greatest value; for others, integers start at 1, floats at 0.
BOUNDS = {
    "seed": (0, 2**63), "gamma": (0, 1), "gae_lambda": (0, 1), "learning_rate": (1e-9, 1),
    "n_updates": (2, math.inf),  # the first sets the critic's biases
}  # fmt: skip


def check(args: Args):
    """What the bounds of single arguments can't say."""
    if args.mode not in MODES:
        fail(f"--mode {args.mode}: choose one of {', '.join(MODES)}")
    if args.render and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        fail("--render needs a display; --capture-video records without one")


def fail(message: str):
    """One line on standard error, exit code 2."""
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args; with --resume or --evaluate, on top of that run's arguments."""

    def parse(default: Args) -> Args:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                return tyro.cli(Args, args=argv, default=default, description=__doc__)
        except SystemExit as end:
            if not end.code:
                raise
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()]  # tyro's framed text
        rule = next(i for i, line in enumerate(lines) if i and not line.strip("─╰╯"))
        message = " ".join(lines[1:rule])
        if message.startswith("Unrecognized"):
            known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Args)]
            words = [word.replace("_", "-") for word in re.findall(r"--[\w-]+", message)]
            near = [m for word in words for m in difflib.get_close_matches(word, known, n=1)]
            message += f" (near: {', '.join(near) or 'nothing'})"
        fail(f"{message} (see --help)")

    args = parse(Args())
    if args.resume and args.evaluate:
        fail("--resume continues training and --evaluate plays: give one of them")
    if args.resume and args.run_dir:
        fail("--resume goes on in its own folder; --run-dir is for a new run")
    if args.resume or args.evaluate:
        saved = asdict(Args(**load_checkpoint(args.resume or args.evaluate)["args"]))
        args = parse(Args(**saved))
        for name in () if args.evaluate else saved.keys() - CHANGEABLE:
            if getattr(args, name) != saved[name]:
                flag = f"--{name.replace('_', '-')}"
                fail(f"{flag} is {saved[name]} in the run to resume, and can't change in mid-run")
    for name, value in asdict(args).items():
        low, high = BOUNDS.get(name, (int(type(value) is int and name not in NO_EFFECT), math.inf))
        if type(value) in (int, float) and not (low <= value <= high and value < math.inf):
            fail(f"--{name.replace('_', '-')} {value}: must lie between {low:g} and {high:g}")
    for flag, module in NEEDS.items():
        if getattr(args, flag) and importlib.util.find_spec(module) is None:
            fail(f"--{flag.replace('_', '-')} needs {module}: pip install {module}")
    given = [name for name in NO_EFFECT if getattr(args, name)]
    if given:
        lines = (f"--{name.replace('_', '-')} has no effect: {NO_EFFECT[name]}" for name in given)
        print("; ".join(lines))
    check(args)
    return args


# --- environments ---------------------------------------------------------------------------------


def build_env(env_id: str, video_folder: Path | None = None, render: bool = False) -> gym.Env:
    """A gymnasium environment with flat observations; one clear line if there is no such thing."""
    gym.logger.min_level = gym.logger.ERROR  # v4 ids are "out of date", and meant
    if video_folder and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    mode = "rgb_array" if video_folder else "human" if render else None
    if env_id.startswith("dm_control/"):
        if importlib.util.find_spec("shimmy") is None:
            fail(f"--env-id {env_id} needs shimmy: pip install 'shimmy[dm-control]'")
        import shimmy

        gym.register_envs(shimmy)
    try:
        more = {"render_mode": mode} if mode else {}  # not every environment takes the argument
        env = gym.make(env_id, disable_env_checker=True, **more)
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(env_id, gym.registry.keys() - {env_id}, n=3)
        fail(f"--env-id {env_id}: {error} (near: {', '.join(near) or 'nothing'})")
    if video_folder:
        if hasattr(env.unwrapped, "mujoco_renderer"):  # gymnasium's own camera stays behind
            import mujoco

            camera = mujoco.mjtObj.mjOBJ_CAMERA
            track = mujoco.mj_name2id(env.unwrapped.model, camera, "track")
            env.unwrapped.mujoco_renderer.camera_id = track
        env = gym.wrappers.RecordVideo(
            env, str(video_folder), episode_trigger=lambda _: True, disable_logger=True
        )
    space = env.observation_space
    flat = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    pixels = isinstance(space, gym.spaces.Box) and not flat and space.dtype == np.uint8
    return env if flat or pixels else gym.wrappers.FlattenObservation(env)


LONGEST_EPISODE = 100_000  # steps; where episodes are played to their end, more look endless


def check_length(steps: int, env_id: str):
    """Raise TimeoutError for an episode that does not seem to end."""
    if steps > LONGEST_EPISODE:
        raise TimeoutError(
            f"{env_id}: an episode has not ended after {LONGEST_EPISODE:,} steps; register the "
            "environment with max_episode_steps, or raise LONGEST_EPISODE"
        )


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Episodes(gym.Wrapper):
    """Seeds every episode by (seed, environment, episode), and says where an environment fails."""

    def __init__(self, env: gym.Env, seed: int, index: int):
        super().__init__(env)
        self.key, self.shape = (seed, index), env.observation_space.shape
        self.episode, self.steps = -1, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.episode, self.steps = self.episode + 1, 0
        self.reset_seed = episode_seed(*self.key, self.episode) if seed is None else seed
        try:
            obs, info = self.env.reset(seed=self.reset_seed, options=options)
        except Exception as error:
            raise RuntimeError(f"{error!r} {self.where()}") from error
        self.check(obs)
        return obs, info

    def step(self, action):
        self.steps += 1
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise RuntimeError(f"{error!r} {self.where()}") from error
        self.check(obs, reward)
        return obs, reward, terminated, truncated, info

    def where(self) -> str:
        """Which episode this is, how it was reset, and its step."""
        place = f"environment {self.key[1]}, episode {self.episode} (seed {self.reset_seed})"
        return f"in step {self.steps} of {place}"

    def check(self, obs, reward: float = 0.0):
        """Stop at what nothing can be learned from."""
        if np.shape(obs) != self.shape:
            raise ValueError(f"an observation {np.shape(obs)}, not {self.shape}, {self.where()}")
        # one number is quicker to look at than all; that it is finite proves that they are
        if not math.isfinite(np.dot(obs, obs)) and not np.isfinite(obs).all():
            raise FloatingPointError(f"an observation is not finite {self.where()}")
        if not math.isfinite(reward):
            raise FloatingPointError(f"a reward is not finite {self.where()}")


class GymnasiumEnvs:
    """`num_envs` gymnasium environments, stepped one after the other in this process."""

    seconds = 0.0  # spent in them so far

    def __init__(self, args: Args, first: int = 0, video_folder: Path | None = None):
        self.action_repeat = args.action_repeat
        self.envs = [
            Episodes(build_env(args.env_id, video_folder, args.render and i == 0), args.seed, i)
            for i in range(args.num_envs)
        ]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self, i: int, seed: int | None = None) -> np.ndarray:
        """Start an episode in environment i; its first observation [D]."""
        return self.envs[i].reset(seed=seed)[0].astype(np.float32)

    def step(self, ids: np.ndarray, actions: np.ndarray):
        """Hold actions [K, A] in the environments `ids` [K] for `action_repeat` steps or to the
        episode's end. Returns observations [K, D], summed rewards, dones and steps taken [K]."""
        results = [self.hold(self.envs[i], action) for i, action in zip(ids, actions, strict=True)]
        obs, rewards, dones, steps = zip(*results, strict=True)
        return np.array(obs, np.float32), np.array(rewards), np.array(dones), np.array(steps)

    def hold(self, env: gym.Env, action: np.ndarray):
        total, done, steps = 0.0, False, 0
        while not done and steps < self.action_repeat:
            obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            total += reward
            steps += 1
        return obs, total, done, steps

    def close(self):
        for env in self.envs:
            env.close()


class EnvPoolEnvs:
    """The same over EnvPool, where the environments `ids` step in parallel threads."""

    seconds = 0.0  # spent in them so far

    def __init__(self, args: Args, first: int = 0):
        gym.logger.min_level = gym.logger.ERROR
        try:
            import envpool
        except ImportError:
            fail("--env-backend envpool: not installed; pip install envpool")
        self.action_repeat = args.action_repeat
        if first:
            print("EnvPool's generators can't be restored: resuming with new episodes")
        ids = envpool.list_all_envs()
        if args.env_id not in ids:
            near = difflib.get_close_matches(args.env_id, ids, n=3)
            fail(f"--env-id {args.env_id}: EnvPool has no such id (near: {', '.join(near)})")
        # EnvPool's Humanoid-v4 leaves the contact forces at 0 without post_constraint
        more = {"post_constraint": True} if re.match("Humanoid.*-v4$", args.env_id) else {}
        seeds = [episode_seed(args.seed, i, first) % 2**31 for i in range(args.num_envs)]
        threads = min(args.num_envs, os.cpu_count())
        more |= {"num_envs": args.num_envs, "batch_size": 1, "seed": seeds, "num_threads": threads}
        self.pool = envpool.make(args.env_id, env_type="gymnasium", **more)
        self.single_observation_space = self.pool.observation_space  # EnvPool's is the single one
        self.single_action_space = self.pool.action_space

    def reset(self, i: int, seed: int | None = None) -> np.ndarray:
        """Start an episode in environment i, which goes on with the seed it was made with."""
        return self.pool.reset(np.array([i]))[0][0].astype(np.float32)

    def step(self, ids: np.ndarray, actions: np.ndarray):
        obs = np.zeros((len(ids), *self.single_observation_space.shape), np.float32)
        rewards, steps = np.zeros(len(ids)), np.zeros(len(ids), int)
        dones = np.zeros(len(ids), bool)
        for _ in range(self.action_repeat):
            on = np.flatnonzero(~dones)
            if len(on):
                self.pool.send(actions[on], ids[on])
            for _ in on:
                o, reward, terminated, truncated, info = self.pool.recv()  # in any order
                k = np.searchsorted(ids, info["env_id"][0])
                obs[k], dones[k] = o[0], terminated[0] or truncated[0]
                rewards[k] += reward[0]
                steps[k] += 1
        return obs, rewards, dones, steps

    def close(self):
        self.pool.close()


def make_envs(args: Args, first: int = 0):
    """The environments of the chosen backend, for a run that starts at step `first`."""
    envs = (EnvPoolEnvs if args.env_backend == "envpool" else GymnasiumEnvs)(args, first)
    problem = unsupported(envs.single_observation_space, envs.single_action_space)
    if problem:
        fail(f"--env-id {args.env_id}: {problem}")
    return envs


def unsupported(obs_space: gym.Space, action_space: gym.Space) -> str | None:
    """What keeps PPO-CMA from these spaces, in words, or None."""
    box = gym.spaces.Box
    if not (isinstance(obs_space, box) and len(obs_space.shape) == 1):
        return f"observations are {obs_space}: PPO-CMA needs one flat Box"
    if not (isinstance(action_space, box) and len(action_space.shape) == 1):
        return f"actions are {action_space}: PPO-CMA needs continuous ones, a flat Box; see ppo.py"
    if not (np.isfinite(action_space.low).all() and np.isfinite(action_space.high).all()):
        return f"actions are {action_space}: PPO-CMA needs finite bounds; wrap in RescaleAction"


# --- agent ----------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Two layers of 128 leaky ReLUs and a linear output; each layer sees the input and every layer
    below it. The input's part in all three is one matrix product."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator, hidden: int = 128):
        super().__init__()
        self.widths = (hidden, hidden, outputs)
        self.from_input = nn.Linear(inputs, sum(self.widths))
        self.from_first = nn.Linear(hidden, hidden, bias=False)
        self.from_both = nn.Linear(2 * hidden, outputs, bias=False)
        rows = [  # one per unit, over all that it sees, of unit length; biases 0 until `center`
            F.normalize(torch.randn(width, inputs + below, generator=generator))
            for width, below in zip(self.widths, (0, hidden, 2 * hidden), strict=True)
        ]
        with torch.no_grad():
            self.from_input.weight.copy_(torch.cat([row[:, :inputs] for row in rows]))
            self.from_input.bias.zero_()
            self.from_first.weight.copy_(rows[1][:, inputs:])
            self.from_both.weight.copy_(rows[2][:, inputs:])

    def layers(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pre-activations of the three layers, [..., width] each, at inputs x [..., inputs]."""
        first, second, output = self.from_input(x).split(self.widths, dim=-1)
        h1 = F.leaky_relu(first, 0.1)
        second = second + self.from_first(h1)
        h2 = F.leaky_relu(second, 0.1)
        return first, second, output + self.from_both(torch.cat([h1, h2], dim=-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[-1]

    @torch.no_grad()
    def center(self, x: torch.Tensor):
        """Set the biases so that every pre-activation has mean 0 over the batch x [B, inputs]."""
        for k, bias in enumerate(self.from_input.bias.split(self.widths)):
            bias -= self.layers(x)[k].mean(dim=0)


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, D], raw
    actions: torch.Tensor  # [B, A], clipped to the box
    advantages: torch.Tensor  # [B]


class Agent(nn.Module):
    """The networks, the observation scaler, the optimisers and the history: all that PPO-CMA is.

    `envs` is anything with a gymnasium observation_space (one flat Box) and action_space (a flat,
    finite Box), single or vectorised; one's own simulator will do. In one's own loop: `act`,
    `memorize` each transition, `update_with_memorized` after at least one whole episode.
    `initial_mean` and `initial_std` [A] default to the centre and half the range of the action box.
    """

    def __init__(
        self, envs, args: Args | None = None, device="cpu", initial_mean=None, initial_std=None,
        pretrain: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.args = args = args or Args()
        obs_space = getattr(envs, "single_observation_space", None) or envs.observation_space
        action_space = getattr(envs, "single_action_space", None) or envs.action_space
        problem = unsupported(obs_space, action_space)
        if problem:
            raise ValueError(problem)
        low, high = (torch.tensor(b).float() for b in (action_space.low, action_space.high))
        mean = (low + high) / 2 if initial_mean is None else torch.as_tensor(initial_mean)
        std = (high - low) / 2 if initial_std is None else torch.as_tensor(initial_std)
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("initial_mean", mean.float())
        self.register_buffer("initial_std", std.float())
        self.register_buffer("logvar_min", torch.full_like(low, 0.01).square().log())
        self.register_buffer("logvar_max", (high - low).square().log())
        self.register_buffer("obs_sq_mean", torch.zeros(obs_space.shape))
        self.register_buffer("obs_scale", torch.ones(obs_space.shape))
        self.updates = 0  # iterations learned so far

        self.noise = np.random.default_rng(args.seed)  # of actions
        self.generator = torch.Generator().manual_seed(args.seed)  # of weights and minibatches
        (dim,), (actions,) = obs_space.shape, action_space.shape
        if args.mode.startswith("ppo-cma"):
            self.mean_net = MLP(dim, actions, self.generator)
            self.var_net = MLP(dim, actions, self.generator)
        else:  # one network, its outputs shared out
            self.mean_net = self.var_net = MLP(dim, 2 * actions, self.generator)
        self.critic = MLP(dim + 1, 1, self.generator)
        self.to(device)
        self.optimizers = {
            name: torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=1e-8, fused=True)
            for name, net in self.named_children()
        }
        self.history: deque[Batch] = deque(maxlen=args.history_buffer_size)
        self.running: dict[int, list] = {}  # environment -> transitions of its unfinished episode
        self.memory: list[list] = []  # finished episodes
        if pretrain:
            pretrain_policy(self)
        self.refresh_actor()

    def mean(self, obs: torch.Tensor) -> torch.Tensor:
        """mu [..., A] at raw observations [..., D]."""
        raw = self.mean_net(obs * self.obs_scale)[..., : len(self.low)]
        return self.low + (self.high - self.low) * torch.sigmoid(raw)

    def logvar(self, obs: torch.Tensor) -> torch.Tensor:
        """log var [..., A] at raw observations [..., D]; deviations from 0.01 to the full range."""
        raw = self.var_net(obs * self.obs_scale)[..., -len(self.low) :]
        return self.logvar_min + (self.logvar_max - self.logvar_min) * torch.sigmoid(raw)

    def policy(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """mu and log var [..., A] at raw observations [..., D]."""
        return self.mean(obs), self.logvar(obs)

    def critic_input(self, obs: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Scaled observation and time feature, decisions since the episode's start / 1000."""
        time = time * (0.001 if self.args.gamma > 0 else 0.0)
        return torch.cat([obs * self.obs_scale, time.unsqueeze(-1)], dim=-1)

    def get_value(self, obs: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """V [...] at raw observations [..., D], `time` [...] decisions into the episode."""
        return self.critic(self.critic_input(obs, time)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action=None, time=None):
        """Action (sampled and clipped unless given), its log-density, the entropy, the value."""
        mean, logvar = self.policy(obs)
        normal = torch.distributions.Normal(mean, (0.5 * logvar).exp())
        if action is None:
            action = torch.clamp(normal.sample(), self.low, self.high)
        value = self.get_value(obs, torch.zeros_like(obs[..., 0]) if time is None else time)
        return action, normal.log_prob(action).sum(-1), normal.entropy().sum(-1), value

    @torch.no_grad()
    def refresh_actor(self):
        """Copy the policy to numpy, where `act` runs several times faster on a few observations."""
        nets = list(dict.fromkeys((self.mean_net, self.var_net)))  # two, or one for both
        low = torch.cat([self.low, self.logvar_min])
        high = torch.cat([self.high, self.logvar_max])
        arrays = (
            torch.cat([net.from_input.weight * self.obs_scale for net in nets]).T,
            torch.cat([net.from_input.bias for net in nets]),
            torch.stack([net.from_first.weight.T for net in nets]),
            torch.stack([net.from_both.weight.T for net in nets]),
            *((low + high) / 2, (high - low) / 2),
            *(self.low, self.high, self.initial_mean, self.initial_std),
        )
        self.actor = [array.cpu().numpy().copy() for array in arrays]

    def act(self, obs: np.ndarray, deterministic: bool = False) -> np.ndarray:
        """Actions [A] or [K, A], clipped to the box, at raw observations [D] or [K, D]."""
        from_input, bias, from_first, from_both, middle, half, low, high, mean, std = self.actor
        obs = np.asarray(obs, np.float32)
        if self.updates > 0:
            nets, h, _ = from_first.shape
            z = (obs @ from_input + bias).reshape(-1, nets, 1, len(bias) // nets)
            h1 = z[..., :h]
            h1 = np.maximum(h1, 0.1 * h1)  # leaky ReLU, [K, nets, 1, hidden]
            h2 = z[..., h : 2 * h] + h1 @ from_first
            h2 = np.maximum(h2, 0.1 * h2)
            raw = z[..., 2 * h :] + np.concatenate((h1, h2), axis=-1) @ from_both
            # the sigmoid between two bounds, as a tanh about their middle
            policy = middle + half * np.tanh(0.5 * raw.reshape(*obs.shape[:-1], len(middle)))
            mean, std = policy[..., : len(low)], np.exp(0.5 * policy[..., len(low) :])
        else:  # the first iteration samples the initial Gaussian itself
            mean = np.broadcast_to(mean, (*obs.shape[:-1], len(low)))
        if deterministic:
            return mean
        noise = self.noise.standard_normal(mean.shape, np.float32)
        return np.minimum(np.maximum(mean + std * noise, low), high)

    def memorize(self, obs: np.ndarray, action: np.ndarray, reward: float, done: bool, env=0):
        """Store a transition; `done` ends the episode of environment `env`, for any reason."""
        transition = np.array(obs, np.float32), np.array(action, np.float32), float(reward)
        self.running.setdefault(env, []).append(transition)
        if done:
            self.memory.append(self.running.pop(env))

    def update_with_memorized(self) -> dict[str, float]:
        """Learn from the finished episodes and forget them; returns the iteration's metrics.

        An episode still running stays, and counts in the update after its end.
        """
        if not self.memory:
            raise ValueError("no finished episode to learn from: memorize one with done=True")
        returns = [sum(reward for _, _, reward in episode) for episode in self.memory]
        lengths = [len(episode) for episode in self.memory]
        obs, actions, rewards = zip(*itertools.chain.from_iterable(self.memory), strict=True)
        self.memory.clear()
        metrics = update(
            self, np.array(obs), np.array(actions), np.array(rewards), np.array(lengths)
        )
        self.refresh_actor()
        return {"charts/mean_episodic_return": float(np.mean(returns))} | metrics


# --- algorithm ------------------------------------------------------------------------------------


def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time.

    rewards, terminated, truncated [T, ...]; values [T + 1, ...]; advantages [T, ...].
    """
    deltas = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    ended = np.logical_or(terminated, truncated)
    advantages = np.zeros_like(deltas)
    advantage = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + np.where(ended[t], 0.0, gamma * gae_lambda * advantage)
        advantages[t] = advantage
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
    """The same for the mean, no gradient to the variance; bad actions attract to their mirror image
    about the old mean, weighted by a Gaussian kernel averaged over the action's dimensions."""
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


def pg_loss(actions, advantages, mean, logvar) -> torch.Tensor:
    """Plain policy gradient, several steps a batch: what goes wrong without the two ideas."""
    return -(advantages * log_density(actions, mean, logvar)).mean()


def uniform_minibatches(size: int, args: Args, generator: torch.Generator) -> torch.Tensor:
    """Indices [n_updates, min(M, size)] of samples, uniform with replacement."""
    shape = (args.n_updates, min(args.minibatch_size, size))
    return torch.randint(size, shape, generator=generator)


def history_minibatches(sizes, batch: int, args: Args, generator: torch.Generator) -> torch.Tensor:
    """Indices [n_updates, min(M, batch)] into the concatenated iterations of the given sizes: first
    an iteration is drawn, then a sample of it, so that each weighs the same whatever its size."""
    sizes = torch.tensor(sizes)
    shape = (args.n_updates, min(args.minibatch_size, batch))
    slots = torch.randint(len(sizes), shape, generator=generator)
    within = torch.rand(shape, dtype=torch.float64, generator=generator) * sizes[slots]
    return (sizes.cumsum(0) - sizes)[slots] + within.long()


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """A step down the gradient of the loss; the gradient's norm, NaN if the loss is not finite.
    From then on no step is taken: `found_inf` keeps a fused optimiser from it."""
    optimizer.zero_grad()
    loss.backward()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    norm = nn.utils.get_total_norm(parameter.grad for parameter in parameters)
    norm = torch.where(loss.isfinite(), norm, math.nan)
    found = getattr(optimizer, "found_inf", torch.zeros_like(norm))
    optimizer.found_inf = found.logical_or(~norm.isfinite()).float()
    optimizer.step()
    return norm


def fit(name: str, optimizer: torch.optim.Optimizer, minibatches, loss_fn) -> float:
    """One optimiser step per minibatch on `loss_fn(minibatch)`; the mean loss.

    Raises FloatingPointError with the first loss or gradient that is not finite.
    """
    losses, norms = [], []
    for minibatch in minibatches:
        loss = loss_fn(minibatch)
        norms.append(descend(optimizer, loss))
        losses.append(loss.detach())
    table = torch.stack([torch.stack(losses), torch.stack(norms)]).cpu()  # [2, minibatches]
    if not table.isfinite().all():
        first = int((~table.isfinite()).any(dim=0).nonzero()[0])
        loss, norm = table[:, first].tolist()
        raise FloatingPointError(
            f"the {name} loss is {loss} in minibatch {first}, the norm of its gradient {norm}"
        )
    return table[0].mean().item()


def pretrain_policy(agent: Agent):
    """Fit the policy to N(initial_mean, initial_std) at states from N(0, I), before any step."""
    shape, device = (256, len(agent.obs_scale)), agent.low.device
    batches = (torch.randn(shape, generator=agent.generator).to(device) for _ in range(2000))
    first = next(batches)
    nets = list(dict.fromkeys((agent.mean_net, agent.var_net)))  # two, or one for both
    for net in nets:
        net.center(first)

    def loss_fn(x):
        mean, logvar = agent.policy(x)
        std_error = (0.5 * logvar).exp() - agent.initial_std
        return (mean - agent.initial_mean).square().mean() + std_error.square().mean()

    parameters = [parameter for net in nets for parameter in net.parameters()]
    adam = torch.optim.Adam(parameters, lr=agent.args.learning_rate, eps=1e-8, fused=True)
    fit("pre-training", adam, batches, loss_fn)


def update_obs_scale(agent: Agent, obs: torch.Tensor):
    """Divide observations [B, D] by twice their RMS, every iteration weighing the same. Uncentred;
    the scale starts at 1 and only shrinks, so small observations are never magnified."""
    agent.updates += 1
    agent.obs_sq_mean += (obs.square().mean(dim=0) - agent.obs_sq_mean) / agent.updates
    scale = 1.0 / (2.0 * agent.obs_sq_mean.sqrt() + 0.001)
    agent.obs_scale.copy_(torch.minimum(agent.obs_scale, scale))


def update(agent: Agent, obs, actions, rewards, lengths) -> dict[str, float]:
    """One iteration of learning: scaler, critic, advantages, variance, mean, in this order.

    Whole episodes of `lengths` decisions, one after the other: obs [B, D] raw, actions [B, A],
    rewards [B]. Raises FloatingPointError before anything is learned if the data are not finite,
    and when a loss or a parameter is not.
    """
    args, device, total = agent.args, agent.low.device, len(rewards)
    for name, array in (("an observation", obs), ("an action", actions), ("a reward", rewards)):
        if not np.isfinite(array).all():
            raise FloatingPointError(f"{name} is not finite")
    ends = np.zeros(total)
    ends[np.cumsum(lengths) - 1] = 1.0
    time = torch.cat([torch.arange(length) for length in lengths]).to(device)
    obs, actions = torch.as_tensor(obs, device=device), torch.as_tensor(actions, device=device)
    update_obs_scale(agent, obs)

    # Critic: L1 on Monte-Carlo returns, which are the GAE of V = 0 at lambda = 1
    returns = gae(rewards, np.zeros(total + 1), ends, ends, args.gamma, 1.0)
    targets = torch.as_tensor(returns, dtype=torch.float32, device=device)
    minibatches = iter(uniform_minibatches(total, args, agent.generator).to(device))
    if agent.updates == 1:  # the first minibatch ever sets the biases instead
        i = next(minibatches)
        agent.critic.center(agent.critic_input(obs[i], time[i]))
    value_loss = fit(
        "value", agent.optimizers["critic"], minibatches,
        lambda i: (agent.get_value(obs[i], time[i]) - targets[i]).abs().mean(),
    )  # fmt: skip

    # Advantages with the new critic; the value after an episode's last step is 0
    with torch.no_grad():
        values = agent.get_value(obs, time).cpu().double().numpy()
        mean_old = agent.mean(obs)
    raw_advantages = gae(rewards, np.append(values, 0.0), ends, ends, args.gamma, args.gae_lambda)
    advantages = normalize_advantages(raw_advantages, args.mode)
    advantages = torch.as_tensor(advantages, dtype=torch.float32, device=device)
    losses = {"losses/value_loss": value_loss}

    if args.mode.startswith("ppo-cma"):
        # Variance first, from the history, about the mean that has not moved yet
        agent.history.append(Batch(obs, actions, advantages))
        past = Batch(*(torch.cat(field) for field in zip(*agent.history, strict=True)))
        sizes = [len(batch.obs) for batch in agent.history]
        losses["losses/variance_loss"] = fit(
            "variance", agent.optimizers["var_net"],
            history_minibatches(sizes, total, args, agent.generator).to(device),
            lambda i: variance_loss(
                past.actions[i], past.advantages[i], *agent.policy(past.obs[i])
            ),
        )  # fmt: skip
        # Then the mean, from this iteration, with the variance just learned
        with torch.no_grad():
            logvar = agent.logvar(obs)
        mirror = args.mode == "ppo-cma-m"

        def policy_loss(i: torch.Tensor) -> torch.Tensor:
            mean = agent.mean(obs[i])
            return mean_loss(actions[i], advantages[i], mean, logvar[i], mean_old[i], mirror)

    elif args.mode == "ppo":
        with torch.no_grad():
            logvar = agent.logvar(obs)
            old = log_density(actions, mean_old, logvar)

        def policy_loss(i: torch.Tensor) -> torch.Tensor:
            policy = agent.policy(obs[i])
            return ppo_loss(
                actions[i], advantages[i], *policy, old[i], args.clip_coef, args.ent_coef
            )

    else:
        logvar = agent.logvar(obs).detach()

        def policy_loss(i: torch.Tensor) -> torch.Tensor:
            return pg_loss(actions[i], advantages[i], *agent.policy(obs[i]))

    minibatches = uniform_minibatches(total, args, agent.generator).to(device)
    optimizer = agent.optimizers["mean_net"]
    losses["losses/policy_loss"] = fit("policy", optimizer, minibatches, policy_loss)
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        raise FloatingPointError("a parameter is not finite")
    entropy = 0.5 * (logvar + math.log(2 * math.pi * math.e)).sum(-1).mean()
    return losses | {
        "losses/entropy": entropy.item(),
        "losses/explained_variance": 1.0 - np.var(returns - values) / (np.var(returns) or np.nan),
        "charts/policy_std": (0.5 * logvar).exp().mean().item(),
        "charts/positive_advantages": float((raw_advantages > 0).mean()),
        "charts/history_length": len(agent.history),
    }


# --- rollout --------------------------------------------------------------------------------------


def rollout(agent: Agent, envs, run: "Run", args: Args):
    """Play whole episodes until they make N environment steps, and memorize them.

    New episodes start until N is reached; then the running ones play to their end. Cutting them off
    instead, or taking the first to finish, would favour short episodes.
    """
    ids, budget = np.arange(args.num_envs), args.iter_steps
    obs = np.stack([envs.reset(i) for i in ids])  # [K, D]
    returns, lengths = [0.0] * args.num_envs, [0] * args.num_envs
    while len(ids):
        actions = agent.act(obs)  # [K, A]
        obs_before = obs
        start = time.perf_counter()
        obs, rewards, dones, steps = envs.step(ids, actions)
        envs.seconds += time.perf_counter() - start
        total = int(steps.sum())
        run.global_step += total
        budget -= total
        for k, i in enumerate(ids):
            agent.memorize(obs_before[k], actions[k], rewards[k], dones[k], env=i)
            returns[i] += rewards[k]
            lengths[i] += steps[k]
            check_length(lengths[i], args.env_id)
            if dones[k]:
                run.log_episode(run.global_step, returns[i], lengths[i])
                returns[i], lengths[i] = 0.0, 0
                if budget > 0:
                    obs[k] = envs.reset(i)
        if budget <= 0:
            ids, obs = ids[~dones], obs[~dones]


# --- run folder, checkpoints, evaluation ----------------------------------------------------------


class Run:
    """A run's folder and counters. Logs go on where the checkpoint left them, with no row twice."""

    def __init__(self, args: Args, name: str, checkpoint: dict | None = None):
        self.args, self.name, state = args, name, checkpoint or {}
        self.folder = args.resume or args.run_dir or Path("runs") / name
        self.global_step = state.get("global_step", 0)
        self.iteration = state.get("iteration", 0)
        self.first_step, self.start = self.global_step, time.time()
        self.seconds_before = state.get("seconds", 0.0)
        self.lines: list[str] = []  # for standard output, at the end of the iteration
        self.shares: dict[str, float] = {}  # of time, in the last iteration
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not checkpoint and self.is_taken():
                fail(f"--run-dir {self.folder}: not empty; --resume {self.folder} continues a run")
            self.open_logs(state.get("logs", {}))
            self.write_json("running")
        except OSError as error:
            fail(f"{self.folder}: {error.strerror or error}; choose a folder to write to")
        self.bar = tqdm(
            total=args.total_timesteps, initial=self.global_step, unit="step", unit_scale=True,
            disable=None, dynamic_ncols=True, leave=False,
        )  # fmt: skip

    def is_taken(self) -> bool:
        """Whether the folder holds more than a run leaves that died before its first checkpoint."""
        names, table = {path.name for path in self.folder.iterdir()}, self.folder / "episodes.csv"
        if table.is_file() and len(table.read_bytes().splitlines()) < 2:
            names -= {path.name for path in self.logs()}
            names -= {"run.json", "run.json.tmp", "checkpoint.pt.tmp"}
        return bool(names)

    def open_logs(self, sizes: dict[str, int]):
        """Open the logs, which no other process may, as they were at the checkpoint: `sizes`."""
        self.csv_file = (self.folder / "episodes.csv").open("a", buffering=1, newline="")
        with contextlib.suppress(ImportError):  # on Windows
            import fcntl

            try:
                fcntl.flock(self.csv_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{self.folder}: another process is training there")
            except OSError as error:
                print(f"{self.folder}: no locks ({error.strerror}); train there once at a time")
        found = {path.name: path for path in self.logs() if path.stat().st_size}
        for name, size in sizes.items():
            if size and name not in found:
                print(f"{self.folder / name}: gone since the checkpoint, and going on without")
            elif size and found[name].stat().st_size < size:
                fail(f"{found[name]}: cut off since the checkpoint; put it back, or delete it")
        for name, path in found.items():
            if name in sizes or path.suffix == ".csv":  # which is open
                os.truncate(path, sizes.get(name, 0))
            else:
                path.unlink()
        self.writer = SummaryWriter(str(self.folder))
        self.csv = csv.writer(self.csv_file, lineterminator="\n")
        if "episodes.csv" not in found.keys() & sizes.keys():
            self.csv.writerow(["global_step", "seconds", "return", "length"])
        if not sizes:
            rows = "".join(f"\n|{name}|{value}|" for name, value in asdict(self.args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|{rows}")

    def logs(self) -> list[Path]:
        return [*self.folder.glob("events.out.tfevents.*"), *self.folder.glob("episodes.csv")]

    def seconds(self) -> float:
        return self.seconds_before + time.time() - self.start

    def log_episode(self, step: int, episodic_return: float, length: int):
        self.csv.writerow([step, f"{self.seconds():.2f}", float(episodic_return), int(length)])
        values = {"charts/episodic_return": episodic_return, "charts/episodic_length": length}
        pair = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=pair), step)  # half add_scalar's time
        self.bar.set_postfix_str(f"return {episodic_return:.1f}", refresh=False)
        self.bar.update(step - self.bar.n)

    def log_iteration(self, metrics: dict[str, float]):
        self.iteration += 1
        sps = int((self.global_step - self.first_step) / (time.time() - self.start))
        share = "charts/share_"
        self.shares = {k.removeprefix(share): v for k, v in metrics.items() if k.startswith(share)}
        for tag, value in (metrics | {"charts/SPS": sps}).items():
            self.writer.add_scalar(tag, value, self.global_step)
        self.bar.update(self.global_step - self.bar.n)
        self.write("\n".join([*self.lines, f"SPS: {sps}"]))
        self.lines.clear()

    def write(self, line: str):
        """A line on standard output, above the live progress bar."""
        try:
            self.bar.write(line, file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # Ctrl-C ends a `| tee`, too
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            with contextlib.suppress(OSError):
                print(line, flush=True)

    def write_json(self, status: str, **more):
        """run.json: what a reader needs to believe, repeat or continue this run."""

        def git(*command: str) -> str | None:
            folder = Path(__file__).resolve().parent
            done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
            return None if done.returncode else done.stdout.strip()

        cpu, has_git = platform.processor(), shutil.which("git")
        with contextlib.suppress(OSError, IndexError):
            cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
        versions = {"python": platform.python_version()}
        for package in ("torch", "gymnasium", "mujoco", "numpy", "envpool"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        content = {
            "script": Path(__file__).name,
            "status": status,
            "args": savable(self.args),
            "seed": self.args.seed,
            "global_step": self.global_step,
            "wall_seconds": round(self.seconds(), 2),
            "versions": versions,
            "git_commit": git("rev-parse", "HEAD") if has_git else None,
            "git_dirty": bool(git("status", "--porcelain")) if has_git else None,
            "source_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "hardware": {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu},
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
        }
        temporary = self.folder / "run.json.tmp"
        temporary.write_text(json.dumps(content | more, indent=2) + "\n")
        temporary.replace(self.folder / "run.json")

    def close(self, status: str) -> float:
        """Close the logs; returns the mean training return of the last 100 episodes."""
        self.bar.close()
        self.writer.close()
        self.csv_file.close()
        with open(self.folder / "episodes.csv") as file:
            last = deque(csv.DictReader(file), maxlen=100)
        final = sum(float(row["return"]) for row in last) / len(last) if last else math.nan
        self.write_json(status, final_return=round(final, 4) if last else None)
        return final

    def abort(self, error: Exception):
        """Close a run that failed. Says where, and the rest if no traceback is needed for it."""
        with contextlib.suppress(OSError):  # of a full disk, for one
            self.close("failed")
        where = f"in iteration {self.iteration + 1}, after step {self.global_step:,}"
        line, hint = f"{self.folder}: stopped {where}", ""
        if (self.folder / "checkpoint.pt").is_file():
            hint = "; its checkpoint.pt is the last good one: mend the cause and --resume"
        if not isinstance(error, FloatingPointError | OSError):
            error.add_note(line + hint)
            raise error
        what = "its logs can't be written: " if getattr(error, "errno", None) else ""
        print(f"{line}: {what}{error}{hint}", file=sys.stderr)
        raise SystemExit(1)


def savable(args: Args) -> dict:
    """The arguments as plain values; not the folders, which may move."""
    return asdict(dataclasses.replace(args, run_dir=None, resume=None, evaluate=None))


def save_checkpoint(run: Run, agent: Agent, envs):
    """Everything needed to continue, whole or not at all: written aside, then renamed."""
    run.writer.flush()
    content = {
        "script": Path(__file__).stem,
        "args": savable(run.args),
        "agent": agent.state_dict(),
        "training": training_state(agent, envs),
        "global_step": run.global_step,
        "iteration": run.iteration,
        "seconds": run.seconds(),
        "logs": {path.name: path.stat().st_size for path in run.logs()},
    }
    for path in run.logs():  # which must last as long as the checkpoint that counts on them
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
    temporary = run.folder / "checkpoint.pt.tmp"
    try:
        with open(temporary, "w+b") as file:
            torch.save(content, file)
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())  # after torch's own end
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        why = error.__context__ if isinstance(error, RuntimeError) else error  # torch's, of another
        raise OSError(f"{temporary} can't be written: {why}") from None
    temporary.replace(run.folder / "checkpoint.pt")


def load_checkpoint(folder: Path) -> dict:
    """The checkpoint in a run's folder; one clear line if there is none, or not one of ours."""
    path = Path(folder) / "checkpoint.pt"
    if not path.is_file():
        fail(f"{folder}: no checkpoint.pt there; a run writes its first one as training starts")
    try:
        data = memoryview(path.read_bytes())
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:  # torch.load would not notice
            raise ValueError("not the bytes that were written")
        content = torch.load(path, map_location="cpu", weights_only=True)
        script, args = content["script"], content["args"]
    except Exception as error:  # damage shows in many ways
        fail(f"{path}: damaged, or not a checkpoint of this project ({type(error).__name__})")
    if script != Path(__file__).stem:
        fail(f"{path}: written by {script}.py; use that script")
    unknown = args.keys() - {field.name for field in dataclasses.fields(Args)}
    if unknown:
        fail(f"{path}: of another version of {script}.py, which has --{unknown.pop()}")
    return content


def load_agent(agent: Agent, checkpoint: dict):
    """Put a checkpoint's agent into one made for the same environment with the same arguments."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError:
        fail("the checkpoint does not fit this environment: another version of it, or another id?")
    agent.updates = checkpoint["training"]["updates"]
    agent.refresh_actor()


def training_state(agent: Agent, envs) -> dict:
    """What training needs beyond the agent's own state."""
    return {
        "optimizers": {name: adam.state_dict() for name, adam in agent.optimizers.items()},
        "history": [tuple(batch) for batch in agent.history],
        "updates": agent.updates,
        "generator": agent.generator.get_state(),
        "noise": agent.noise.bit_generator.state,
        "episodes": [env.episode for env in getattr(envs, "envs", ())],  # EnvPool tells nothing
    }


def load_training_state(agent: Agent, envs, state: dict):
    for name, optimizer in agent.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    device = agent.low.device
    agent.history.extend(Batch(*(x.to(device) for x in batch)) for batch in state["history"])
    agent.generator.set_state(state["generator"])
    agent.noise.bit_generator.state = state["noise"]
    for env, episode in zip(getattr(envs, "envs", ()), state["episodes"], strict=True):
        env.episode = episode


def try_video(args: Args):
    """Record a first frame: what is missing shows before training, not after it, and MuJoCo comes
    to draw without a display before anything else loads it."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            env = build_env(args.env_id, Path(folder))
            env.reset()
            env.close()
    except Exception as error:
        fail(f"--capture-video: {error!r}")


def evaluate(args: Args) -> list[float]:
    """Play `eval_episodes` with the mean action of the agent saved in `args.evaluate`, print each
    return; with `capture_video`, record them into its videos/. Writes nothing else."""
    if args.capture_video:
        try_video(args)
    torch.set_num_threads(args.num_threads)
    args = dataclasses.replace(args, num_envs=1, render=False)
    video = {"video_folder": args.evaluate / "videos"} if args.capture_video else {}
    others = dataclasses.replace(args, seed=episode_seed(args.seed, 2**31))  # EnvPool's episodes
    envs = GymnasiumEnvs(args, **video) if video else make_envs(others)
    agent = Agent(envs, args, pretrain=False)
    load_agent(agent, load_checkpoint(args.evaluate))
    returns = []
    for episode in range(args.eval_episodes):
        obs, done = envs.reset(0, episode_seed(args.seed, 2**31, episode)), False
        total, length = 0.0, 0
        while not done:
            action = agent.act(obs, deterministic=True)
            (obs,), (reward,), (done,), (steps,) = envs.step(np.arange(1), action[None])
            total, length = total + float(reward), length + steps
            check_length(length, args.env_id)
        returns.append(total)
        print(f"eval_episode={episode}, episodic_return={total:.2f}", flush=True)
    envs.close()
    print(f"mean action, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------


def compile_networks(agent: Agent):
    """torch.compile each network in place; go on without where no compiler works."""
    try:
        torch.compile(lambda x: x.sin() + x.cos())(torch.zeros(8))
    except Exception as error:  # whatever a missing or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return
    for net in agent.children():
        net.compile()


@contextlib.contextmanager
def stop_on_signals():
    """Inside, SIGTERM, SIGUSR1 (a scheduler's warning) or Ctrl-C only joins the list yielded; a
    Ctrl-C more than a second after the first acts at once."""
    received, pressed = [], []

    def handler(number, frame):
        received.append(number)
        if number == signal.SIGINT:  # schedulers and launchers may each send a SIGTERM
            pressed.append(time.monotonic())
            if pressed[-1] - pressed[0] > 1:  # uv sends its copy of a Ctrl-C at once
                signal.signal(number, before[number])
                signal.raise_signal(number)
        if len(received) > 1:
            return
        with contextlib.suppress(OSError, RuntimeError):  # nobody reads; it is being written to
            print("\nstopping after this iteration; Ctrl-C: at once", file=sys.stderr, flush=True)

    numbers = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGINT)}
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def set_up(args: Args):
    """The environments, the agent and the run's folder, new or as the run to resume left them."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.capture_video:
        try_video(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    envs = make_envs(args, checkpoint["global_step"] if checkpoint else 0)
    agent = Agent(envs, args, device, pretrain=not checkpoint)
    if checkpoint:
        load_agent(agent, checkpoint)
        load_training_state(agent, envs, checkpoint["training"])
    if args.compile:
        compile_networks(agent)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    name = f"{name}__{args.run_suffix}" if args.run_suffix else name
    if args.track:
        import wandb  # before the run's writer, which it follows

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": name}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=True)
    run = Run(args, name, checkpoint)
    parameters = sum(p.numel() for p in agent.parameters())
    run.write(f"{args.mode} on {args.env_id}, {device}, {parameters:,} parameters, in {run.folder}")
    run.write(
        f"steps {run.global_step:,} to {args.total_timesteps:,}; an iteration: {args.iter_steps:,} "
        f"steps, {args.n_updates} minibatches of {args.minibatch_size} for each network"
    )
    return envs, agent, run


def shares(stepping: float, rollout: float, update: float) -> dict[str, float]:
    """Where an iteration's seconds went: to the environments, to the rest of the rollout, to the
    update."""
    total = rollout + update
    return {
        "charts/share_environments": stepping / total,
        "charts/share_inference": (rollout - stepping) / total,
        "charts/share_update": update / total,
    }


def train(args: Args) -> str:
    """Train, or go on training; returns the run's name."""
    with stop_on_signals() as stop:
        envs, agent, run = set_up(args)
        try:
            if not args.resume:
                save_checkpoint(run, agent, envs)
            while run.global_step < args.total_timesteps and not stop:
                remaining = 1.0 - run.global_step / args.total_timesteps if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate
                for optimizer in agent.optimizers.values():
                    optimizer.param_groups[0]["lr"] = learning_rate
                started, stepping = time.perf_counter(), envs.seconds
                rollout(agent, envs, run, args)
                rolled, stepping = time.perf_counter(), envs.seconds - stepping
                metrics = agent.update_with_memorized()
                metrics |= shares(stepping, rolled - started, time.perf_counter() - rolled)
                run.lines.append(
                    f"global_step={run.global_step}, "
                    f"episodic_return={metrics['charts/mean_episodic_return']:.2f}, "
                    f"policy_std={metrics['charts/policy_std']:.3f}"
                )
                run.log_iteration(metrics | {"charts/learning_rate": learning_rate})
                if run.iteration % args.checkpoint_interval == 0:
                    save_checkpoint(run, agent, envs)
            if run.iteration % args.checkpoint_interval:  # else just saved
                save_checkpoint(run, agent, envs)
        except Exception as error:
            run.abort(error)
        finally:
            envs.close()
        done = run.global_step >= args.total_timesteps
        final = run.close("finished" if done else "running")

    script = f"python {Path(__file__).name}"
    if not done:
        on = f"go on with: {script} --resume {run.folder}"
        run.write(f"stopped at step {run.global_step:,}; {on}")
        raise SystemExit(128 + stop[0])
    print(f"return {final:.2f} (mean of the last 100 training episodes), {run.seconds():.0f} s")
    if run.shares:
        print("time: " + ", ".join(f"{name} {share:.0%}" for name, share in run.shares.items()))
    print(f"play it:   {script} --evaluate {run.folder}")
    print(f"train on:  {script} --resume {run.folder} --total-timesteps {2 * args.total_timesteps}")
    if args.save_model:
        torch.save(agent.state_dict(), run.folder / f"{args.exp_name}.cleanrl_model")
    if args.capture_video:
        evaluate(dataclasses.replace(args, evaluate=run.folder))
    return run.name


if __name__ == "__main__":
    args = parse_args()
    if args.evaluate:
        evaluate(args)
    else:
        run_name = train(args)
