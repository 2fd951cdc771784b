# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy",
#                 "mujoco-warp>=3.13,<4", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for continuous actions, whole on the device: thousands of environments of tensors.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, as ppo_continuous_action.py, where the
simulator runs on a GPU. In an iteration no tensor leaves it and no host waits (CUDA graphs):

    1. take T steps in each of N environments with a ~ N(mu(s), sigma^2), and start a new episode
       in each row where one ended: every row is learned from
    2. A = GAE(lambda): a time limit bootstraps from the value of the true last observation, a
       termination does not
    3. for K epochs, for each minibatch, with A normalised in it and r = pi(a | s) / pi_old(a | s):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H
       after which the learning rate falls if the policy moved too far (KL), or else rises

    python ppo_continuous_action_warp.py  # --resume runs/RUN goes on, --evaluate runs/RUN plays
    python ppo_continuous_action_warp.py --env-id Pendulum-v1 --num-envs 256 --num-steps 32 \
        --hidden 64 64 --total-timesteps 800000     # needs no engine and no GPU; expect -180

On an H100 expect 10,000 on HalfCheetah-v4 after a minute. On a CPU, ppo_continuous_action.py with
gymnasium is several times faster. Left out on purpose: --target-kl (a host would have to wait),
--anneal-lr (the KL sets the rate), --compile (CUDA graphs spare the launches), pixels.
"""

import contextlib
import fcntl
import importlib.util
import itertools
import json
import math
import os
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
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

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
    seed: int = 1  # seeds the networks, actions, minibatches and episodes
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one; without, this is the wrong script for MuJoCo
    num_threads: int = 1  # CPU threads of torch
    cudagraphs: bool = True  # on a GPU, record rollout and update, and replay them
    tf32: bool = False  # on a GPU, matrix products to three digits (TensorFloat32): faster
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    quiet: bool = False  # print no line per episode
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the policy of the run in this folder greedily, and exit
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = "HalfCheetah-v4"  # one of TASKS, Pendulum-v1, or your own, module:Class
    total_timesteps: int = 100_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 1e-3  # Adam's learning rate in the first iteration
    num_envs: int = 4096  # environments played side by side
    num_steps: int = 24  # steps in each environment per iteration
    stagger_episodes: bool = True  # the first episodes end at different times, unlogged
    desired_kl: float = 0.01  # the learning rate follows the KL of the policies; 0: it does not
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 5  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = False  # also clip the change of the value
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 1.0  # weight of the value loss
    max_grad_norm: float = 1.0  # the gradient of all parameters is scaled down to this norm
    hidden: tuple[int, ...] = (512, 256, 128)  # sizes of the networks' layers
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
        low = {"seed": 0, "log_std_init": -9}
        low |= {"minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {"gamma": 1, "gae_lambda": 1, "log_std_init": 9}
        check(self, low, high)
        if min(self.hidden, default=1) < 1:
            raise ValueError(f"--hidden {min(self.hidden)}: not in 1 ... 1e+18")
        if ":" in self.env_id and (self.capture_video or self.evaluate):
            raise ValueError(f"gymnasium plays and films, not {self.env_id}: see `load`")


def fits(value, hint) -> bool:
    """Whether a value is of a field's type, such as `list[int]` or `Path | None`."""
    kind = get_origin(hint)
    parts = get_args(hint)
    if kind is Literal:
        return value in parts
    if kind in (list, tuple):
        return isinstance(value, kind) and all(isinstance(x, parts[0]) for x in value)
    if parts:  # a choice
        return any(fits(value, part) for part in parts)
    if isinstance(value, bool):  # an int, to Python
        return hint is bool
    return isinstance(value, hint) or (hint is float and isinstance(value, int))


def check(args, low: dict, high: dict):
    """Raise ValueError for a value of a wrong type, for a number out of its bounds (by default 1
    to 1e18, for fractions 0 to 1e18) and for flags that exclude each other."""
    for name, hint in get_type_hints(type(args)).items():
        flag = f"--{name.replace('_', '-')}"
        value = getattr(args, name)
        if not fits(value, hint):
            raise ValueError(f"{flag} {value!r}: not of type {hint}")
        if type(value) in (int, float):
            fraction = float in (hint, *get_args(hint))
            least = low.get(name, 0 if fraction else 1)
            most = high.get(name, 1e18)
            if not least <= value <= most:
                raise ValueError(f"{flag} {value}: not in {least} ... {most}")
    if not args.exp_name:
        raise ValueError("--exp-name '': a name is needed")
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
class DeviceEnvs(nn.Module):
    """N environments of tensors on one device. Subclasses have two methods:

    reset(mask [N]) -> obs [N, D]: start a new episode where the mask is true; other rows stay
    step(actions [N, A]) -> obs [N, D], the true last one of an episode that ends, and
        rewards, terminated, truncated [N]

    What they register as buffers is their state. It is saved: a resumed run goes on in mid-episode.
    """

    resumable = True  # False: the state is elsewhere: not resumed, nor recorded as a CUDA graph

    def __init__(self, num_envs: int, device, dim: int, low, high, limit: int):
        super().__init__()
        self.device = torch.device(device)
        self.limit = limit
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (dim,))
        self.action_space = box = gym.spaces.Box(np.float32(low), np.float32(high))
        self.low, self.high = (torch.tensor(bound, device=device) for bound in (box.low, box.high))
        self.register_buffer("steps", torch.zeros(num_envs, dtype=torch.int64, device=device))

    def replace(self, mask: torch.Tensor, **fresh):
        """Write the rows where `mask` of these buffers, which others may see: in place."""
        for name, value in fresh.items():
            buffer = getattr(self, name)
            buffer.copy_(torch.where(mask.view(-1, *[1] * (buffer.dim() - 1)), value, buffer))

    def close(self):
        """End what the environments keep running, if anything."""


class Pendulum(DeviceEnvs):
    """gymnasium's Pendulum-v1."""

    def __init__(self, num_envs: int, device):
        super().__init__(num_envs, device, 3, [-2.0], [2.0], limit=200)
        self.register_buffer("state", torch.zeros(num_envs, 2, device=device))  # angle, velocity

    def observe(self) -> torch.Tensor:
        angle, velocity = self.state.unbind(-1)
        return torch.stack([angle.cos(), angle.sin(), velocity], dim=-1)

    def reset(self, mask: torch.Tensor) -> torch.Tensor:
        state = 2.0 * torch.rand_like(self.state) - 1.0
        state[:, 0] *= math.pi
        self.replace(mask, state=state, steps=0)
        return self.observe()

    def step(self, actions: torch.Tensor):
        angle, velocity = self.state.unbind(-1)
        torque = actions[:, 0]
        from_top = torch.remainder(angle + math.pi, 2.0 * math.pi) - math.pi
        cost = from_top.square() + 0.1 * velocity.square() + 0.001 * torque.square()
        velocity = (velocity + 0.05 * (15.0 * angle.sin() + 3.0 * torque)).clamp(-8.0, 8.0)
        self.state.copy_(torch.stack([angle + 0.05 * velocity, velocity], dim=-1))
        self.steps += 1
        over = self.steps >= self.limit
        return self.observe(), -cost, torch.zeros_like(over), over


class Task(NamedTuple):
    """What gymnasium's environments do not tell: forward * velocity + alive - cost * |action|^2 is
    the reward."""

    forward: float
    alive: float
    cost: float
    noise: float  # size of the uniform noise at an episode's start
    normal: bool  # velocities get normal noise instead
    clip: float  # velocities are seen within +-clip
    healthy: list  # an episode terminates if an entry of (positions, velocities) leaves its range


TASKS = {
    "HalfCheetah-v4": Task(1.0, 0.0, 0.1, 0.1, True, math.inf, []),
    "Hopper-v4": Task(
        1.0, 1.0, 1e-3, 5e-3, False, 10.0,
        [(slice(2, None), -100.0, 100.0), (1, 0.7, math.inf), (2, -0.2, 0.2)],
    ),
    "Walker2d-v4": Task(1.0, 1.0, 1e-3, 5e-3, False, 10.0, [(1, 0.8, 2.0), (2, -1.0, 1.0)]),
    "Ant-v4": Task(1.0, 1.0, 0.5, 0.1, True, math.inf, [(2, 0.2, 1.0)]),
    "InvertedPendulum-v4": Task(0.0, 1.0, 0.0, 0.01, False, math.inf, [(1, -0.2, 0.2)]),
}  # fmt: skip


class Warp(DeviceEnvs):
    """gymnasium's MuJoCo tasks (TASKS) on MuJoCo Warp, whose arrays are the buffers here."""

    def __init__(self, env_id: str, num_envs: int, device):
        try:
            import mujoco_warp
            import warp
        except ImportError as error:
            fail(f"--env-id {env_id}: {error}: pip install 'mujoco-warp<4'")
        env = make_env(env_id).unwrapped
        self.mjw = mujoco_warp
        self.wp = warp
        (dim,) = env.observation_space.shape
        box = env.action_space
        super().__init__(num_envs, device, dim, box.low, box.high, limit=1000)
        self.task = TASKS[env_id]
        self.frame_skip = env.frame_skip
        self.dt = env.dt
        self.hidden = env.model.nq + env.model.nv - dim  # positions not observed
        with warp.ScopedDevice(str(device)):
            self.model = mujoco_warp.put_model(env.model)
            sizes = {"nconmax": 32, "njmax": 128}  # contacts and constraints of a robot on its back
            self.data = mujoco_warp.make_data(env.model, nworld=num_envs, **sizes)
        for name in ("qpos", "qvel", "qacc_warmstart", "xpos", "ctrl"):
            self.register_buffer(name, warp.to_torch(getattr(self.data, name)))
        self.register_buffer("x", self.qpos[:, 0].clone())  # where the robot was
        self.start = self.qpos[0].clone()
        self.is_ant = env_id == "Ant-v4"
        self.least = torch.full((env.model.nq + env.model.nv,), -math.inf, device=device)
        self.most = -self.least
        for entries, low, high in self.task.healthy:
            self.least[entries] = low
            self.most[entries] = high

    def simulate(self):
        for _ in range(self.frame_skip):
            self.mjw.step(self.model, self.data)

    def advance(self):
        """`frame_skip` steps of the engine. Its solver asks after each iteration whether another
        is needed: the host or, when a CUDA graph is recorded, the device."""
        if self.device.type == "cpu":
            return self.simulate()
        stream = self.wp.stream_from_torch(torch.cuda.current_stream())
        with self.wp.ScopedStream(stream, sync_enter=False):
            if not torch.cuda.is_current_stream_capturing():
                return self.simulate()
            with self.wp.ScopedCapture(stream=stream, external=True):
                self.simulate()

    def observe(self) -> torch.Tensor:
        velocity = self.qvel.clamp(-self.task.clip, self.task.clip)
        return torch.cat([self.qpos[:, self.hidden :], velocity], dim=1)

    def reset(self, mask: torch.Tensor) -> torch.Tensor:
        qpos = self.start + self.task.noise * (2.0 * torch.rand_like(self.qpos) - 1.0)
        normal = torch.randn_like(self.qvel)
        uniform = 2.0 * torch.rand_like(self.qvel) - 1.0
        qvel = self.task.noise * (normal if self.task.normal else uniform)
        self.replace(mask, qpos=qpos, qvel=qvel, qacc_warmstart=0.0, x=qpos[:, 0], steps=0)
        return self.observe()

    def step(self, actions: torch.Tensor):
        self.ctrl.copy_(actions)
        self.advance()
        self.steps += 1
        # gymnasium measures the ant where the engine last computed its body's place
        x = self.xpos[:, 1, 0] if self.is_ant else self.qpos[:, 0]
        reward = self.task.forward * (x - self.x) / self.dt + self.task.alive
        reward = reward - self.task.cost * actions.square().sum(dim=1)
        self.x.copy_(x)
        state = torch.cat([self.qpos, self.qvel], dim=1)
        healthy = ((self.least < state) & (state < self.most)).all(dim=1)
        return self.observe(), reward, ~healthy, self.steps >= self.limit


def make_envs(env_id: str, num_envs: int, device) -> DeviceEnvs:
    """The environments, whose tensors are on the device; one clear line if there are no such. Code
    of a module runs only for an id with a colon, which no checkpoint's has."""
    if env_id == "Pendulum-v1":
        return Pendulum(num_envs, device)
    if env_id in TASKS:
        return Warp(env_id, num_envs, device)
    known = ", ".join(["Pendulum-v1", *TASKS])
    module, _, name = env_id.rpartition(":")
    if not module:
        fail(f"--env-id {env_id}: not {known} nor your own, module:Class (mjlab: see docs)")
    try:
        return getattr(importlib.import_module(module), name)(num_envs, device)
    except Exception as error:  # whatever the module's own code raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        hint = f"raised in {place.filename}, line {place.lineno}"
        fail(f"--env-id {env_id}: {error!r}, {hint} (not {known} nor module:Class; see docs)")


def make_env(env_id: str, /, **options) -> gym.Env:
    """One environment of gymnasium's own, to read what a task is, to play and to film."""
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    try:
        return gym.make(env_id, **options)
    except Exception as error:  # whatever gymnasium raises
        fail(f"--env-id {env_id}: {error!r} (your own: module:Class)")


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


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


def mlp(sizes: list[int], gain: float) -> nn.Sequential:
    """Layers of ELU units and a linear one; orthogonal weights, biases 0 (detail 2)."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ELU()]
        nn.init.orthogonal_(layers[-2].weight, 2**0.5)
        nn.init.zeros_(layers[-2].bias)
    nn.init.orthogonal_(layers[-2].weight, gain)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Policy, value function and both normalisers, for environments with the spaces of `env`."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        space = env.action_space
        sizes = [*env.observation_space.shape, *args.hidden]
        self.critic = mlp([*sizes, 1], gain=1.0)  # two networks (detail 13, continuous detail 4)
        self.actor_mean = mlp([*sizes, *space.shape], gain=0.01)
        # a deviation for each dimension, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full(space.shape, args.log_std_init))
        low = torch.tensor(space.low).float()
        high = torch.tensor(space.high).float()
        if not (args.scale_actions and (high - low).isfinite().all()):
            low = -torch.ones(space.shape)
            high = torch.ones(space.shape)
        self.register_buffer("origin", (low + high) / 2)
        self.register_buffer("unit", torch.where(high > low, (high - low) / 2, 1.0))
        self.obs_moments = RunningMoments((sizes[0],))
        self.return_moments = RunningMoments()

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
    def act(self, obs, noise=None):
        """Mean actions [N, A] at observations [N, D], tensors or arrays, or, given `noise(N)`,
        samples; not clipped."""
        mean = self.actor_mean(self.normalize(torch.as_tensor(obs, device=self.unit.device)))
        if noise is not None:
            mean = mean + self.actor_logstd.exp() * noise
        actions = self.origin + self.unit * mean
        return actions if isinstance(obs, torch.Tensor) else actions.cpu().numpy()

    def noise(self, *shape: int) -> torch.Tensor:
        """Noise for `shape` actions."""
        return torch.randn(*shape, len(self.unit), device=self.unit.device)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, next_values, terminated, truncated, gamma: float, gae_lambda: float):
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), tensors [T, N] over time.

    `next_values` are of the observation after each step, an episode's true last one if it ended.
    """
    advantages = rewards + gamma * next_values * ~terminated - values
    ended = terminated | truncated
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += torch.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
    return advantages


class Rollout(NamedTuple):
    obs: torch.Tensor  # [T, N, D], raw
    next_obs: torch.Tensor  # [T, N, D], before a reset
    actions: torch.Tensor  # [T, N, A]
    rewards: torch.Tensor  # [T, N]
    terminated: torch.Tensor  # [T, N]
    truncated: torch.Tensor  # [T, N]
    discounted: torch.Tensor  # [T, N], discounted sum of the episode's rewards
    returns: torch.Tensor  # [T, N], its return so far
    lengths: torch.Tensor  # [T, N], its steps so far


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, D], raw
    actions: torch.Tensor  # [B, A]
    logprobs: torch.Tensor  # [B], before the update
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update


def ppo_loss(agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and its
    metrics."""
    _, logprob, entropy, value = agent(batch.obs, batch.actions)
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


def adapt(learning_rate: torch.Tensor, approx_kl: torch.Tensor, desired_kl: float):
    """Lower the learning rate, in place, if the policy has moved too far, or raise it."""
    slower = torch.where(approx_kl > 2.0 * desired_kl, learning_rate / 1.5, learning_rate)
    faster = torch.where(approx_kl < 0.5 * desired_kl, learning_rate * 1.5, slower)
    learning_rate.copy_(faster.clamp(1e-5, 1e-2))


def update(agent: Agent, data: Rollout, args: Args, first: bool = False):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches,
    as tensors. Nothing here asks for a value on the host."""
    check_views(agent)
    seen = data.obs.flatten(0, 1)
    if first:  # later, the scale changes after learning: acting and learning share it
        agent.obs_moments.update(seen)
    # rewards over the deviation of the discounted returns, clipped (continuous details 8, 9)
    agent.return_moments.update(data.discounted.flatten())
    scale = (agent.return_moments.var + 1e-8).rsqrt().float()
    rewards = (data.rewards * scale).clamp(-10.0, 10.0)
    with torch.no_grad():
        values = agent.get_value(data.obs)
        next_values = agent.get_value(data.next_obs)
        _, logprobs, _, _ = agent(data.obs, data.actions)
    ends = data.terminated, data.truncated
    advantages = gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)  # detail 5
    returns = advantages + values
    fields = data.obs, data.actions, logprobs, advantages, returns, values
    batch = Batch(*[x.flatten(0, 1) for x in fields])  # [B, ...], B = T * N

    steps = []
    learning_rate = agent.adam["learning_rate"]
    for _ in range(args.update_epochs):
        order = torch.rand_like(batch.values).argsort()
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for rows in order.tensor_split(args.num_minibatches):
            names, numbers = minibatch_step(agent, agent.adam, batch, rows, learning_rate, args)
            steps.append(numbers)
            if args.desired_kl and len(steps) > 1:  # before the first step the KL is 0
                adapt(learning_rate, numbers[names.index("approx_kl")], args.desired_kl)
    if not first:
        agent.obs_moments.update(seen)
    means = torch.stack(steps).mean(dim=0).unbind()
    unexplained = (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-12)
    metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
    metrics["charts/policy_std"] = (agent.actor_logstd.detach().exp() * agent.unit).mean()
    metrics["charts/learning_rate"] = learning_rate
    return metrics | {"losses/explained_variance": 1.0 - unexplained}


# --- rollout --------------------------------------------------------------------------------------
def start(agent: Agent, envs: DeviceEnvs, args: Args) -> tuple[dict, Rollout]:
    """New episodes in all environments: where they are, and a rollout to be filled."""
    zeros = torch.zeros(args.num_envs, device=envs.device)
    at = {"obs": envs.reset(zeros == 0).clone(), "discounted": zeros.clone()}
    at |= {"returns": zeros.clone(), "lengths": zeros.long()}
    if args.stagger_episodes:  # or all would reach the limit at once, again and again
        envs.steps.random_(envs.limit)
        at["returns"].fill_(-math.inf)  # these are cut short, and not logged
    row = [at["obs"], at["obs"], agent.noise(args.num_envs), zeros, zeros == 1, zeros == 1]
    row += [at[name] for name in ("discounted", "returns", "lengths")]
    return at, Rollout(*(x.new_zeros(args.num_steps, *x.shape) for x in row))


@torch.no_grad()
def rollout(agent: Agent, envs: DeviceEnvs, at: dict, data: Rollout, args: Args):
    """Fill the rollout with `num_steps` steps in every environment, going on `at` where the last
    ones led to (detail 1). All is done in place: a CUDA graph can hold it."""
    for t in range(args.num_steps):
        actions = agent.act(at["obs"], agent.noise(args.num_envs))
        # clipped to the box (continuous detail 5); copied, as some engines use their buffers again
        step = envs.step(actions.clamp(envs.low, envs.high))
        next_obs, rewards, terminated, truncated = (x.clone() for x in step)
        at["discounted"].mul_(args.gamma).add_(rewards)
        at["returns"] += rewards
        at["lengths"] += 1
        episode = at["discounted"], at["returns"], at["lengths"]
        row = at["obs"], next_obs, actions, rewards, terminated, truncated, *episode
        for field, x in zip(data, row, strict=True):
            field[t] = x
        over = terminated | truncated
        at["obs"].copy_(torch.where(over[:, None], envs.reset(over), next_obs))
        for x in episode:
            x.masked_fill_(over, 0)


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
            self.rows = len(known) - 1
            if not known:
                self.csv.write("global_step,seconds,return,length\n")
                self.rows = 0
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

    def log(self, metrics: dict[str, float], data: Rollout):
        """Log an iteration: each episode that ended in it in the table, and means."""
        seconds = time.monotonic() - self.start
        over = (data.terminated | data.truncated) & data.returns.isfinite()
        steps = self.global_step + (over.nonzero()[:, 0] + 1) * self.args.num_envs
        returns = data.returns[over]
        lengths = data.lengths[over]
        rows = zip(steps.tolist(), returns.tolist(), lengths.tolist(), strict=True)
        self.csv.write("".join(f"{step},{seconds:.2f},{r},{n}\n" for step, r, n in rows))
        self.rows += len(returns)
        self.returns.extend(returns.tolist())
        self.iteration += 1
        self.global_step += self.args.batch_size
        if len(returns):
            metrics["charts/episodic_return"] = mean = returns.double().mean().item()
            metrics["charts/episodic_length"] = lengths.double().mean().item()
            means = f"episodes={len(returns)}, mean episodic_return={mean:.4f}"
            if not self.args.quiet:
                self.bar.write(f"global_step={self.global_step}, {means}")
        self.bar.update(self.global_step - self.bar.n)
        metrics["charts/SPS"] = int(self.global_step / seconds)
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


def save(run: Run, agent: Agent, envs: DeviceEnvs, at: dict):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    state |= {"adam": agent.adam, "envs": envs.state_dict(), "at": at, "rng": torch.get_rng_state()}
    state["cuda_rng"] = torch.cuda.get_rng_state_all()
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
    made = env or make_env(args.env_id)
    agent = Agent(made, args)
    if env is None:
        made.close()
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
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display
    env = make_env(args.env_id, render_mode="rgb_array")
    try:
        env.reset(seed=0)
        env.render()
    except Exception as error:  # no display, or a package for drawing is missing
        env.close()
        fail(f"--capture-video: {args.env_id} can't be drawn: {error!r}")
    return env


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` greedily, in gymnasium's own environment: an independent
    check; `capture_video` records it into its videos/."""
    if args.capture_video:
        refuse_links(args.evaluate)
        videos = str(args.evaluate / "videos")
        env = gym.wrappers.RecordVideo(drawn_env(args), videos, lambda _: True, disable_logger=True)
        print(f"videos: {videos}")
    else:
        env = make_env(args.env_id)
    box = env.action_space
    returns = []
    with contextlib.closing(env):
        agent, _ = load(args.evaluate, env)
        for episode in range(args.eval_episodes):
            obs, _ = env.reset(seed=episode_seed(args.seed, 2**31, episode))
            rewards = []
            over = False
            while not over:
                action = agent.act(obs[None])[0].clip(box.low, box.high)
                obs, reward, terminated, truncated, _ = env.step(action)
                rewards.append(reward)
                over = terminated or truncated
                if len(rewards) > 100_000:
                    fail("100,000 steps, and the episode has no end")
            returns.append(math.fsum(rewards))
            print(f"eval_episode={episode}, episodic_return={returns[-1]:.2f}", flush=True)
    print(f"greedy, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------
class Recorded:
    """A function whose tensors stay where they are, as a CUDA graph: called as it is three times,
    in which libraries get ready, then recorded, and replayed ever after. A graph holds numbers as
    they were: it is recorded again when one of Args has changed."""

    def __init__(self, function):
        self.function = function
        self.calls = 0
        self.numbers = None

    def __call__(self, *given):
        self.calls += 1
        if self.calls <= 3:
            return self.function(*given)
        numbers = [dict(vars(x)) for x in given if isinstance(x, Args)]
        if numbers != self.numbers:
            self.numbers = numbers
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.function(*given)
        self.graph.replay()
        return self.result


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


def restore(agent: Agent, state: dict, checkpoint: dict, folder: Path):
    """Set the optimizer, the environments' state and the random numbers to the checkpoint's."""
    try:
        for part, tensors in (state | {"adam": agent.adam}).items():
            for name, x in tensors.items():
                saved = checkpoint[part][name]
                if saved.shape != x.shape:
                    raise ValueError(f"{name} has shape {tuple(saved.shape)}")
                x.data.copy_(saved)
        torch.set_rng_state(checkpoint["rng"])
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
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
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    torch.manual_seed(args.seed)
    with contextlib.closing(make_envs(args.env_id, args.num_envs, device)) as envs:
        torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
        if args.resume:
            agent, _ = load(args.resume, envs, args)
        else:
            agent = Agent(envs, args)
        agent.adam = flat_adam(agent.to(device))
        agent.adam["learning_rate"] = torch.tensor(args.learning_rate, device=device)
        at, data = start(agent, envs, args)
        if args.resume:
            state = {"at": at, "envs": envs.state_dict()} if envs.resumable else {}
            restore(agent, state, checkpoint, args.resume)
            if args.learning_rate != checkpoint["args"].learning_rate:  # given on the command line
                agent.adam["learning_rate"].fill_(args.learning_rate)
        graphs = args.cudagraphs and device.type == "cuda"
        collect = Recorded(rollout) if graphs and envs.resumable else rollout
        learn = Recorded(update) if graphs else update
        with stop_signals() as stop, Run(args, checkpoint) as run:
            how = f"{args.env_id} on {device}, {args.num_iterations} iterations"
            run.bar.write(f"{how}, in {run.folder}")
            if device.type == "cpu" and isinstance(envs, Warp):
                run.bar.write("on a CPU ppo_continuous_action.py is several times faster")
            save(run, agent, envs, at)
            while run.iteration < args.num_iterations and not stop:
                check_views(agent)
                collect(agent, envs, at, data, args)
                metrics = learn(agent, data, args, run.iteration == 0)
                # the host waits here, once an iteration
                metrics = dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))
                check_finite(run.iteration, {"observations": data.next_obs})
                check_finite(run.iteration, {"rewards": data.rewards, "actions": data.actions})
                check_finite(run.iteration, metrics | agent.state_dict())
                run.log(metrics, data)
                if run.iteration % args.checkpoint_interval == 0:
                    save(run, agent, envs, at)
            save(run, agent, envs, at)
            run.status = "running" if run.iteration < args.num_iterations else "finished"
    return finish(run, agent, stop)


def finish(run: Run, agent: Agent, stop: list[int]) -> Path:
    """Print how to go on or to play; save the weights and record a video, if asked to."""
    # where it is imported, as in a notebook, the file itself
    program = sys.argv[0] if __name__ == "__main__" else os.path.relpath(__file__)
    script = f"python {shlex.quote(program)}"
    folder = shlex.quote(str(run.folder))
    own = f" --env-id {run.args.env_id}" if ":" in run.args.env_id else ""  # name the module again
    if run.status == "running":
        print(f"go on with: {script} --resume {folder}{own}")
        raise SystemExit(128 + stop[0])
    final = run.final_return()
    play = "" if own else f"; play: {script} --evaluate {folder}"
    print(f"return {final} over the last 100 episodes{play}")
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
