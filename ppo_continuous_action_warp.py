# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy",
#                 "mujoco-warp>=3.13,<4", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for continuous actions, whole on the device: thousands of environments of tensors.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, as ppo_continuous_action.py, and where
simulators run on a GPU. No tensor leaves the device and no host waits inside an iteration:

    1. take T steps in each of N environments with a ~ N(mu(s), sigma^2), and start a new episode
       in each row where one ended: every row is learned from
    2. A = GAE(lambda): a time limit bootstraps from the value of the true last observation, a
       termination does not
    3. for K epochs, for each minibatch, with A normalised in it and r = pi(a | s) / pi_old(a | s):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H
       after which the learning rate falls if the policy moved too far (KL), or else rises

    python ppo_continuous_action_warp.py --env-id HalfCheetah-v4 --cudagraphs    # MuJoCo Warp
    python ppo_continuous_action_warp.py --env-id Pendulum-v1 --num-envs 256 --num-steps 32 \
        --hidden 64 64 --total-timesteps 800000     # needs no engine and no GPU
    python ppo_continuous_action_warp.py --resume runs/RUN                # go on where it stopped
    python ppo_continuous_action_warp.py --evaluate runs/RUN              # play it in gymnasium

Expect -180 on Pendulum after 800k steps. On a CPU, ppo_continuous_action.py with gymnasium is
several times faster on MuJoCo's tasks. No GPU was at hand: CUDA is written, and not yet run.
Left out on purpose: --target-kl (a host would have to wait), pixels, a critic's own observations.
"""

import importlib
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # the experiment's name, part of the run's
    seed: int = 1  # of everything: networks, actions, minibatches and episodes
    torch_deterministic: bool = True  # torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one; without, this is the wrong script for MuJoCo
    num_threads: int = 1  # CPU threads of torch
    compile: bool = True  # compile the update, if there is a compiler: same results to rounding
    compile_from: int = 15_000  # but not in a run of fewer gradient steps: it would not pay
    cudagraphs: bool = False  # on a GPU, replay a step of all environments and the update as graphs
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # its project
    wandb_entity: str | None = None  # its entity (team)
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # go on with the run in this folder, with its own arguments
    evaluate: Path | None = None  # play the run in this folder greedily, and exit
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = "HalfCheetah-v4"  # see TASKS; Pendulum-v1, or module:Class, your own
    total_timesteps: int = 100_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 1e-3  # Adam's, in the first iteration
    num_envs: int = 4096  # environments played side by side
    num_steps: int = 24  # steps in each environment per iteration
    stagger_episodes: bool = True  # the first episodes end at different times, unlogged
    anneal_lr: bool = False  # lower the learning rate linearly; only with --desired-kl 0
    desired_kl: float = 0.01  # the learning rate follows the KL of the policies; 0: it does not
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 5  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = False  # clip the change of the value, too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 1.0  # weight of the value loss
    max_grad_norm: float = 1.0  # largest norm of the gradient over all parameters
    hidden: tuple[int, ...] = (512, 256, 128)  # sizes of the networks' layers
    log_std_init: float = -0.7  # initial log standard deviation of the actions, in their unit
    scale_actions: bool = True  # that unit is half the action box; if not, the environment's
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute what is computed; a ValueError, which tyro shows, for what can't be meant."""
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "compile_from": 0, "log_std_init": -9, "minibatch_size": 4}
        high = {"gamma": 1, "gae_lambda": 1, "log_std_init": 9}
        for name, value in vars(self).items():
            least, most = low.get(name, int(type(value) is int)), high.get(name, 1e18)
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value}: not in {least} ... {most}")
        if self.resume and (self.run_dir or self.evaluate):
            raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")
        if self.anneal_lr and self.desired_kl:
            raise ValueError("--anneal-lr: the rate follows the KL, unless with --desired-kl 0")
        if not all(size >= 1 for size in self.hidden):
            raise ValueError(f"--hidden {self.hidden}: layers have at least one unit")
        if self.capture_video and self.env_id not in {"Pendulum-v1", *TASKS}:
            raise ValueError(f"--capture-video: gymnasium films, and knows no {self.env_id}")


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args; with --resume or --evaluate, on top of that run's arguments."""

    def given(resume: Path | None = None, evaluate: Path | None = None):
        return resume or evaluate

    folder, _ = tyro.cli(given, args=argv, return_unknown_args=True, add_help=False)
    saved = load_checkpoint(folder)["args"] if folder else Args()
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    if args.resume and args.num_envs != saved.num_envs:
        fail(f"--num-envs {args.num_envs}: {folder} goes on with its {saved.num_envs}")
    for package in ["moviepy"] * args.capture_video + ["wandb"] * args.track:
        if importlib.util.find_spec(package) is None:
            fail(f"{package} is not installed: pip install {package}")
    return args


def fail(message: str):
    """One line on standard error, exit code 2."""
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

    resumable = True  # False: the state is elsewhere, a resumed run starts new episodes

    def __init__(self, num_envs: int, device, dim: int, low, high, limit: int):
        super().__init__()
        self.num_envs, self.device, self.limit = num_envs, torch.device(device), limit
        low, high = np.float32(low), np.float32(high)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (dim,))
        self.action_space = gym.spaces.Box(low, high)
        self.low, self.high = (torch.tensor(bound, device=device) for bound in (low, high))
        self.register_buffer("steps", torch.zeros(num_envs, dtype=torch.int64, device=device))

    def replace(self, mask: torch.Tensor, **fresh):
        """Write the rows where `mask` of these buffers, which others may see: in place."""
        for name, value in fresh.items():
            buffer = getattr(self, name)
            buffer.copy_(torch.where(mask.view(-1, *[1] * (buffer.dim() - 1)), value, buffer))


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
        (angle, velocity), torque = self.state.unbind(-1), actions[:, 0]
        from_top = torch.remainder(angle + math.pi, 2.0 * math.pi) - math.pi
        cost = from_top.square() + 0.1 * velocity.square() + 0.001 * torque.square()
        velocity = (velocity + 0.05 * (15.0 * angle.sin() + 3.0 * torque)).clamp(-8.0, 8.0)
        self.state.copy_(torch.stack([angle + 0.05 * velocity, velocity], dim=-1))
        self.steps += 1
        over = self.steps >= self.limit
        return self.observe(), -cost, torch.zeros_like(over), over


class Task(NamedTuple):
    xml: str  # gymnasium's file
    frame_skip: int  # steps of the engine in one of the environment
    noise: float  # of positions and velocities at a reset, uniform,
    normal: bool  # or of velocities, normal
    hidden: int  # the first positions, which are not observed
    clip: float  # velocities are observed within +-clip
    forward: float  # weight of the velocity in the reward
    alive: float  # reward of every step
    cost: float  # weight of the squared actions
    healthy: Callable  # of positions and velocities [N, ...]; else the episode terminates


inf = math.inf
TASKS = {
    "HalfCheetah-v4": Task(
        "half_cheetah", 5, 0.1, True, 1, inf, 1.0, 0.0, 0.1, lambda q, v: q[:, 0] == q[:, 0]
    ),
    "Hopper-v4": Task(
        "hopper", 4, 5e-3, False, 1, 10.0, 1.0, 1.0, 1e-3,
        lambda q, v: (q[:, 1] > 0.7)
        & (q[:, 2].abs() < 0.2)
        & (torch.cat([q[:, 2:], v], dim=1).abs() < 100.0).all(dim=1),
    ),
    "Walker2d-v4": Task(
        "walker2d", 4, 5e-3, False, 1, 10.0, 1.0, 1.0, 1e-3,
        lambda q, v: (q[:, 1] > 0.8) & (q[:, 1] < 2.0) & (q[:, 2].abs() < 1.0),
    ),
    "Ant-v4": Task(
        "ant", 5, 0.1, True, 2, inf, 1.0, 1.0, 0.5,
        lambda q, v: (q[:, 2] >= 0.2) & (q[:, 2] <= 1.0),
    ),
    "InvertedPendulum-v4": Task(
        "inverted_pendulum", 2, 0.01, False, 0, inf, 0.0, 1.0, 0.0,
        lambda q, v: q[:, 1].abs() <= 0.2,
    ),
}  # fmt: skip


class Warp(DeviceEnvs):
    """gymnasium's MuJoCo tasks (TASKS) on MuJoCo Warp, whose arrays are the buffers here."""

    def __init__(self, env_id: str, num_envs: int, device):
        try:
            import mujoco
            import mujoco_warp
            import warp
        except ImportError as error:
            fail(f"--env-id {env_id}: {error}: pip install 'mujoco-warp<4'")
        self.mjw, self.wp, self.task = mujoco_warp, warp, TASKS[env_id]
        assets = Path(gym.__file__).parent / "envs" / "mujoco" / "assets"
        model = mujoco.MjModel.from_xml_path(str(assets / f"{self.task.xml}.xml"))
        dim = model.nq + model.nv - self.task.hidden
        super().__init__(num_envs, device, dim, *model.actuator_ctrlrange.T, limit=1000)
        with warp.ScopedDevice(str(device)):
            self.model = mujoco_warp.put_model(model)
            sizes = {"nconmax": 32, "njmax": 128}  # contacts and constraints of a robot on its back
            self.data = mujoco_warp.make_data(model, nworld=num_envs, **sizes)
        for name in ("qpos", "qvel", "qacc_warmstart", "xpos", "ctrl"):
            self.register_buffer(name, warp.to_torch(getattr(self.data, name)))
        self.register_buffer("x", self.qpos[:, 0].clone())  # where the robot was
        self.start, self.dt = self.qpos[0].clone(), self.task.frame_skip * model.opt.timestep
        if self.device.type == "cuda":
            self.simulate()  # loads the engine's code, which a graph can't
            with warp.ScopedCapture(device=str(device)) as capture:
                self.simulate()
            self.graph = capture.graph
            warp.synchronize()

    def simulate(self):
        for _ in range(self.task.frame_skip):
            self.mjw.step(self.model, self.data)

    def advance(self):
        """`frame_skip` steps of the engine. Its solver asks after each iteration whether another
        is needed; in a CUDA graph the device answers, and no host waits."""
        if self.device.type == "cpu":
            return self.simulate()
        stream = self.wp.stream_from_torch(torch.cuda.current_stream())
        if not torch.cuda.is_current_stream_capturing():
            return self.wp.capture_launch(self.graph, stream=stream)
        here = self.wp.ScopedStream(stream, sync_enter=False)
        with here, self.wp.ScopedCapture(stream=stream, external=True):  # in that of --cudagraphs
            self.simulate()

    def observe(self) -> torch.Tensor:
        velocity = self.qvel.clamp(-self.task.clip, self.task.clip)
        return torch.cat([self.qpos[:, self.task.hidden :], velocity], dim=1)

    def reset(self, mask: torch.Tensor) -> torch.Tensor:
        qpos = self.start + self.task.noise * (2.0 * torch.rand_like(self.qpos) - 1.0)
        draw = torch.randn_like(self.qvel), 2.0 * torch.rand_like(self.qvel) - 1.0
        qvel = self.task.noise * draw[0 if self.task.normal else 1]
        self.replace(mask, qpos=qpos, qvel=qvel, qacc_warmstart=0.0, x=qpos[:, 0], steps=0)
        return self.observe()

    def step(self, actions: torch.Tensor):
        self.ctrl.copy_(actions)
        self.advance()
        self.steps += 1
        # gymnasium measures the ant where the engine last computed its body's place
        x = self.xpos[:, 1, 0] if self.task.xml == "ant" else self.qpos[:, 0]
        reward = self.task.forward * (x - self.x) / self.dt + self.task.alive
        reward = reward - self.task.cost * actions.square().sum(dim=1)
        self.x.copy_(x)
        healthy = self.task.healthy(self.qpos, self.qvel)
        return self.observe(), reward, ~healthy, self.steps >= self.limit


class Gymnasium(DeviceEnvs):
    """One environment of gymnasium's, to play and film in the original what was learned here."""

    def __init__(self, env_id: str, video_folder: Path | None = None):
        gym.logger.min_level = gym.logger.ERROR  # v4 ids are "out of date", and meant
        if video_folder and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")
        self.env = gym.make(env_id, render_mode="rgb_array" if video_folder else None)
        if video_folder and hasattr(self.env.unwrapped, "mujoco_renderer"):
            camera = 0 if self.env.unwrapped.model.ncam else -1  # one that follows
            self.env.unwrapped.mujoco_renderer.camera_id = camera
        if video_folder:
            more = {"episode_trigger": lambda _: True, "disable_logger": True}
            self.env = gym.wrappers.RecordVideo(self.env, str(video_folder), **more)
        (dim,), box = self.env.observation_space.shape, self.env.action_space
        super().__init__(1, "cpu", dim, box.low, box.high, self.env.spec.max_episode_steps)

    def reset(self, mask: torch.Tensor) -> torch.Tensor:
        obs, _ = self.env.reset(seed=int(torch.randint(2**31, ())))
        return torch.tensor(np.float32(obs)[None])

    def step(self, actions: torch.Tensor):
        obs, reward, terminated, truncated, _ = self.env.step(actions[0].numpy())
        flags = torch.tensor([reward]), torch.tensor([terminated]), torch.tensor([truncated])
        return torch.tensor(np.float32(obs)[None]), *flags


def make_envs(env_id: str, num_envs: int, device) -> DeviceEnvs:
    """The environments, whose tensors are on the device; one clear line if there are no such."""
    if env_id == "Pendulum-v1":
        return Pendulum(num_envs, device)
    if env_id in TASKS:
        return Warp(env_id, num_envs, device)
    module, _, name = env_id.partition(":")
    if not name:
        fail(f"--env-id {env_id}: neither Pendulum-v1, {', '.join(TASKS)}, nor module:Class")
    try:
        return getattr(importlib.import_module(module), name)(num_envs, device)
    except (ImportError, AttributeError) as error:
        fail(f"--env-id {env_id}: {error}")


def make_env(env_id: str, video_folder: Path | None = None) -> DeviceEnvs:
    """One environment to play in: gymnasium's, if the id is one of its."""
    if env_id in {"Pendulum-v1", *TASKS}:
        return Gymnasium(env_id, video_folder)
    return make_envs(env_id, 1, torch.device("cpu"))


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
        for part in torch.as_tensor(x, device=self.mean.device).double().split(4096):
            total, mean = self.count + len(part), part.mean(dim=0)
            delta = mean - self.mean
            squares = self.var * self.count + (part - mean).square().sum(dim=0)
            self.var.copy_((squares + delta.square() * self.count * len(part) / total) / total)
            self.mean += delta * len(part) / total
            self.count.copy_(total)


def mlp(sizes: list[int], gain: float) -> nn.Sequential:
    """Layers of ELU units and a linear one; orthogonal weights, no bias (detail 2)."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ELU()]
        nn.init.orthogonal_(layers[-2].weight, 2**0.5)
        nn.init.zeros_(layers[-2].bias)
    nn.init.orthogonal_(layers[-2].weight, gain)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Policy, value function and both normalisers: all that is needed to act.

    `envs` is anything with gymnasium's observation_space and action_space, single or vectorised.
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        args, single = args or Args(), "single_" if hasattr(envs, "single_action_space") else ""
        (dim,) = getattr(envs, f"{single}observation_space").shape
        box = getattr(envs, f"{single}action_space")
        (actions,) = box.shape
        # separate networks (detail 13, continuous detail 4)
        self.critic = mlp([dim, *args.hidden, 1], gain=1.0)
        self.actor_mean = mlp([dim, *args.hidden, actions], gain=0.01)
        # a deviation for each dimension, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full((actions,), args.log_std_init))
        low, high = torch.tensor(box.low).float(), torch.tensor(box.high).float()
        if not (args.scale_actions and (high - low).isfinite().all()):
            low, high = -torch.ones(actions), torch.ones(actions)
        self.register_buffer("origin", (low + high) / 2)
        self.register_buffer("unit", torch.where(high > low, (high - low) / 2, 1.0))
        self.obs_moments, self.return_moments = RunningMoments((dim,)), RunningMoments()

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Raw observations [..., D] less their mean, over their deviation, clipped to +-10
        (continuous details 6, 7)."""
        scale = (self.obs_moments.var + 1e-8).rsqrt().float()
        return ((obs.float() - self.obs_moments.mean.float()) * scale).clamp(-10.0, 10.0)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [...] at raw observations [..., D]."""
        return self.critic(self.normalize(obs)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [B, A] (sampled unless given), its log-density [B], entropy [B] and value [B] at
        raw observations [B, D]. Its components are independent (continuous details 1, 3)."""
        features = self.normalize(obs)
        mean, logstd = self.actor_mean(features), self.actor_logstd
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
        """Actions [N, A] at raw observations [N, D], a tensor or, as these, an array: the means or,
        given `noise(N)`, samples. They may lie beyond the box: clip them for the environment."""
        features = self.normalize(torch.as_tensor(obs, device=self.unit.device))
        mean = self.actor_mean(features)
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
    next_obs: torch.Tensor  # [T, N, D], raw: after the step, before a reset
    actions: torch.Tensor  # [T, N, A]
    rewards: torch.Tensor  # [T, N], as are all below
    terminated: torch.Tensor
    truncated: torch.Tensor
    discounted: torch.Tensor  # rewards of the episode so far, the older the less
    returns: torch.Tensor  # and their sum
    lengths: torch.Tensor  # its steps so far
    ended: torch.Tensor  # it ended here, and was logged: not if it is a staggered first one


def ppo_loss(agent, args, obs, actions, old_logprobs, advantages, returns, old_values):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and what is
    logged of it. Old is what policy and value function gave before the update."""
    _, logprob, entropy, value = agent(obs, actions)
    logratio = logprob - old_logprobs
    ratio = logratio.exp()

    if args.norm_adv:  # per minibatch (detail 7)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    error = (value - returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        near = old_values + (value - old_values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (near - returns).square())
    value_loss = 0.5 * error.mean()

    entropy = entropy.mean()  # whose bonus encourages exploration (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -logratio.mean(), "approx_kl": (ratio - 1.0 - logratio).mean()}
    return loss, metrics | {"clipfrac": ((ratio - 1.0).abs() > args.clip_coef).float().mean()}


def flat_adam(agent: Agent) -> dict[str, torch.Tensor]:
    """Adam's state for all parameters as one vector [P], of which the agent's become views."""
    vector = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(vector, agent.parameters())
    state = {name: torch.zeros_like(vector) for name in ("exp_avg", "exp_avg_sq")}
    return {"parameters": vector, "steps": vector.new_zeros(()), **state}


def minibatch_step(agent: Agent, adam: dict, batch: tuple, rows, learning_rate, args: Args):
    """One step of Adam (Kingma & Ba 2015, algorithm 1) on rows [M] of the batch; the metrics."""
    vector = adam["parameters"].detach().requires_grad_()
    parts = vector.split([p.numel() for p in agent.parameters()])
    named = zip(agent.named_parameters(), parts, strict=True)
    views = {name: part.view_as(p) for (name, p), part in named}

    def policy(*given):
        return torch.func.functional_call(agent, views, given)

    loss, metrics = ppo_loss(policy, args, *[x[rows] for x in batch])
    (grad,) = torch.autograd.grad(loss, vector)
    with torch.no_grad():
        norm = grad.norm()  # over all parameters (detail 11)
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        adam["steps"] += 1.0
        adam["exp_avg"].lerp_(grad, 0.1)  # betas 0.9 and 0.999, eps 1e-5 (detail 3)
        adam["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        mean = adam["exp_avg"] / (1.0 - 0.9 ** adam["steps"])
        square = adam["exp_avg_sq"] / (1.0 - 0.999 ** adam["steps"])
        adam["parameters"] -= learning_rate * mean / (square.sqrt() + 1e-5)
    return {name: x.detach() for name, x in metrics.items()} | {"grad_norm": norm}


def adapt(learning_rate: torch.Tensor, approx_kl: torch.Tensor, desired_kl: float):
    """Lower the learning rate, in place, if the policy has moved too far, or raise it."""
    slower = torch.where(approx_kl > 2.0 * desired_kl, learning_rate / 1.5, learning_rate)
    faster = torch.where(approx_kl < 0.5 * desired_kl, learning_rate * 1.5, slower)
    learning_rate.copy_(faster.clamp(1e-5, 1e-2))


def update(agent: Agent, data: Rollout, args: Args, step=minibatch_step, first: bool = False):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches,
    as tensors. Nothing here asks for a value on the host."""
    # Observations are scaled for learning as they were for acting; only the first time there is
    # no scale yet, and a policy that hardly depends on them.
    seen = data.obs.flatten(0, 1)
    if first:
        agent.obs_moments.update(seen)
    # rewards over the deviation of the discounted returns so far, clipped (continuous details 8, 9)
    agent.return_moments.update(data.discounted.flatten())
    scale = (agent.return_moments.var + 1e-8).rsqrt().float()
    rewards = (data.rewards * scale).clamp(-10.0, 10.0)
    with torch.no_grad():
        values, next_values = agent.get_value(data.obs), agent.get_value(data.next_obs)
        _, logprobs, _, _ = agent(data.obs, data.actions)
    ends = data.terminated, data.truncated
    advantages = gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)  # detail 5
    returns = advantages + values
    fields = data.obs, data.actions, logprobs, advantages, returns, values
    batch = [x.flatten(0, 1) for x in fields]  # [B, ...], B = T * N

    steps, learning_rate = [], agent.adam["learning_rate"]
    for _ in range(args.update_epochs):
        order = torch.rand_like(batch[-1]).argsort()
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(args.num_minibatches):
            metrics = step(agent, agent.adam, batch, minibatch, learning_rate, args)
            steps.append(torch.stack([*metrics.values()]))
            if args.desired_kl and len(steps) > 1:  # at the first one nothing has moved yet
                adapt(learning_rate, metrics["approx_kl"], args.desired_kl)
    if not first:
        agent.obs_moments.update(seen)
    means = torch.stack(steps).mean(dim=0).unbind()
    unexplained = (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-12)
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    metrics["losses/explained_variance"] = 1.0 - unexplained
    metrics["charts/policy_std"] = (agent.actor_logstd.detach().exp() * agent.unit).mean()
    return metrics | {"charts/learning_rate": learning_rate}


# --- rollout --------------------------------------------------------------------------------------
def start(agent: Agent, envs: DeviceEnvs, args: Args) -> tuple[dict, Rollout]:
    """New episodes in all environments: where they are, and a rollout to be filled."""
    T, N, zeros = args.num_steps, args.num_envs, torch.zeros(args.num_envs, device=envs.device)
    at = {"obs": envs.reset(zeros == 0).clone(), "discounted": zeros.clone()}
    at |= {"returns": zeros.clone(), "lengths": zeros.long(), "whole": zeros == 0}
    if args.stagger_episodes:
        envs.steps.random_(envs.limit)  # or all would reach the limit at once, again and again
        at["whole"] = zeros > 0  # these will be cut short, and say nothing about the policy
    at["t"] = torch.zeros(1, dtype=torch.int64, device=envs.device)
    row = {"obs": at["obs"], "next_obs": at["obs"], "actions": agent.noise(N), "rewards": zeros}
    row |= dict.fromkeys(("terminated", "truncated", "ended"), at["whole"])
    row |= {name: at[name] for name in ("discounted", "returns", "lengths")}
    return at, Rollout(**{name: x.new_zeros(T, *x.shape) for name, x in row.items()})


@torch.no_grad()
def take_step(agent: Agent, envs: DeviceEnvs, at: dict, data: Rollout, args: Args):
    """Take a step in every environment, going on `at` where the last one led to, and write it into
    row `t` of the rollout (detail 1). All is done in place: a CUDA graph can hold it."""
    actions = agent.act(at["obs"], agent.noise(args.num_envs))
    row = {"obs": at["obs"].clone(), "actions": actions}
    # clipped to the box (continuous detail 5); copied, as some engines reuse their buffers
    taken = envs.step(actions.clamp(envs.low, envs.high))
    obs, reward, row["terminated"], row["truncated"] = (x.clone() for x in taken)
    row |= {"next_obs": obs, "rewards": reward}
    over = row["terminated"] | row["truncated"]
    at["lengths"] += 1
    at["returns"] += reward
    at["discounted"].mul_(args.gamma).add_(reward)
    row |= {name: at[name] for name in ("discounted", "returns", "lengths")}
    row["ended"] = over & at["whole"]
    for name, x in row.items():
        getattr(data, name).index_copy_(0, at["t"], x[None])
    at["obs"].copy_(torch.where(over[:, None], envs.reset(over), obs))
    for name in ("discounted", "returns", "lengths"):
        at[name].masked_fill_(over, 0)
    at["whole"] |= over
    at["t"] += 1


def rollout(agent: Agent, envs: DeviceEnvs, at: dict, data: Rollout, args: Args, step=take_step):
    """Fill the rollout: `num_steps` steps in every environment."""
    at["t"].zero_()
    for _ in range(args.num_steps):
        step(agent, envs, at, data, args)


# --- run folder, checkpoints, evaluation ----------------------------------------------------------
class Run:
    """A run's folder, its logs and its counters."""

    def __init__(self, args: Args, checkpoint: dict):
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        self.folder = args.resume or args.run_dir or Path("runs") / name
        if not args.resume and (self.folder / "checkpoint.pt").exists():
            fail(f"a run is there: --resume {self.folder} goes on with it")
        self.folder.mkdir(parents=True, exist_ok=True)
        if args.track:
            import wandb  # before the writer, which it follows

            more = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            wandb.init(name=name, config=vars(args), sync_tensorboard=True, **more)
        self.args = replace(args, run_dir=None, resume=None, evaluate=None)  # folders may move
        self.global_step, self.iteration, seconds, size = checkpoint.get("counters", (0, 0, 0.0, 0))
        self.start = time.monotonic() - seconds
        # what was logged after the checkpoint goes: it will be logged again
        self.writer = SummaryWriter(str(self.folder), purge_step=self.global_step + 1)
        self.csv = open(self.folder / "episodes.csv", "a", buffering=1)  # noqa: SIM115
        self.csv.truncate(self.csv.seek(min(size, self.csv.tell())))
        if self.csv.tell() == 0:
            self.csv.write("global_step,seconds,return,length\n")
        self.bar = tqdm(total=args.total_timesteps, unit="step", disable=None)
        self.write_json("running")

    def log_episodes(self, data: Rollout):
        """Log the episodes that ended in a rollout: each in the table, their means elsewhere."""
        rows = data.ended.nonzero(as_tuple=True)
        columns = rows[0], data.returns[rows], data.lengths[rows]
        times, returns, lengths = (x.tolist() for x in columns)
        if not times:
            return
        seconds = f"{time.monotonic() - self.start:.2f}"
        before = self.global_step - data.ended.numel()
        steps = [before + (t + 1) * self.args.num_envs for t in times]
        lines = (
            f"{s},{seconds},{r},{n}\n" for s, r, n in zip(steps, returns, lengths, strict=True)
        )
        self.csv.write("".join(lines))
        mean = np.mean(returns)
        self.writer.add_scalar("charts/episodic_return", mean, self.global_step)
        self.writer.add_scalar("charts/episodic_length", np.mean(lengths), self.global_step)
        means = f"episodes={len(returns)}, mean episodic_return={mean:.4f}"
        self.bar.write(f"global_step={self.global_step}, {means}")

    def log(self, metrics: dict[str, float]):
        self.iteration += 1
        self.bar.update(self.global_step - self.bar.n)
        metrics["charts/SPS"] = int(self.global_step / (time.monotonic() - self.start))
        for tag, value in metrics.items():
            self.writer.add_scalar(tag, value, self.global_step)

    def write_json(self, status: str) -> float | None:
        """Write run.json; returns the mean return of the last 100 training episodes."""
        rows = (self.folder / "episodes.csv").read_text().splitlines()[1:]
        final = np.mean([float(row.split(",")[2]) for row in rows[-100:]]) if rows else None
        versions = {package.__name__: package.__version__ for package in (torch, gym, np)}
        content = {"script": Path(__file__).name, "status": status, "args": vars(self.args)}
        content |= {"seed": self.args.seed, "global_step": self.global_step, "versions": versions}
        content |= {"wall_seconds": round(time.monotonic() - self.start, 2), "final_return": final}
        (self.folder / "run.json").write_text(json.dumps(content, indent=2) + "\n")
        return final


def save(run: Run, agent: Agent, envs: DeviceEnvs, at: dict):
    """Everything needed to continue, whole or not at all: written aside, then renamed."""
    run.writer.flush()
    content = {"args": vars(run.args), "agent": agent.state_dict(), "adam": agent.adam}
    content |= {"envs": envs.state_dict(), "at": at, "rng": torch.get_rng_state()}
    if envs.device.type == "cuda":
        content["cuda_rng"] = torch.cuda.get_rng_state()
    seconds = time.monotonic() - run.start
    content["counters"] = run.global_step, run.iteration, seconds, run.csv.tell()
    torch.save(content, run.folder / "checkpoint.pt.tmp")
    (run.folder / "checkpoint.pt.tmp").replace(run.folder / "checkpoint.pt")


def load_checkpoint(folder: Path) -> dict:
    """What `save` wrote; runs no code, whoever wrote it."""
    try:
        content = torch.load(Path(folder) / "checkpoint.pt", map_location="cpu", weights_only=True)
        args = Args(**content["args"])
    except Exception as error:  # damage shows in many ways
        fail(f"{folder}: no checkpoint.pt that can be read: {error!r}")
    args.env_id = args.env_id.split(":")[-1]  # a module's code runs if the command line names it
    return content | {"args": args}


def load(folder: Path, env=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args = checkpoint["args"]
    agent = Agent(env or make_env(args.env_id), args)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        fail(f"{folder}: its agent does not fit the environment: {error}")
    return agent, args


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` greedily; `capture_video` records it into its videos/."""
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(episode_seed(args.seed, 2**31))
    env = make_env(args.env_id, args.evaluate / "videos" if args.capture_video else None)
    (agent, _), returns = load(args.evaluate, env), []
    for episode in range(args.eval_episodes):
        obs, rewards, over = env.reset(torch.ones(1, dtype=torch.bool)), [], False
        while not over:
            obs, reward, *ends = env.step(agent.act(obs).clamp(env.low, env.high))
            rewards.append(reward.item())
            over = any(ends)
        returns.append(math.fsum(rewards))
        print(f"eval_episode={episode}, episodic_return={returns[-1]:.2f}", flush=True)
    if isinstance(env, Gymnasium):
        env.env.close()
    print(f"greedy, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------
def compile_step(agent: Agent, args: Args):
    """`minibatch_step` compiled; as it is in a short run, or if no compiler works."""
    steps = args.num_iterations * args.update_epochs * args.num_minibatches
    if not args.compile or steps < args.compile_from:
        return minibatch_step
    # the shapes and types of an agent do not change, but for the number of rows: no guards
    options = {"guard_filter_fn": lambda guards: [False] * len(guards), "cpp.vec_isa_ok": True}
    options |= {"cpp_wrapper": agent.adam["steps"].is_cpu, "triton.cudagraphs": args.cudagraphs}
    options |= {"cpp.use_decompose_tanh": True}  # by exp: faster
    try:
        torch._dynamo.config.trace_autograd_ops = True
        torch.compile(lambda x: x + 1, options=options)(agent.adam["steps"])
    except Exception as error:  # whatever a missing, old or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return minibatch_step
    for tensor in agent.adam.values() if args.cudagraphs else ():  # which change these in place
        torch._dynamo.mark_static_address(tensor, guard=False)
    torch.compiler.config.dynamic_sources = "L['rows']"  # minibatches of any size, compiled once
    return torch.compile(minibatch_step, fullgraph=True, options=options)


class Recorded:
    """A function whose tensors stay where they are, as a CUDA graph: called as it is three times,
    in which libraries get ready, then recorded, and replayed ever after."""

    def __init__(self, function: Callable):
        self.function, self.calls = function, 0
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def __call__(self, *args):
        self.calls += 1
        if self.calls <= 3:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.function(*args)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == 4:
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self.function(*args)
        self.graph.replay()
        return self.result


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    torch.manual_seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs, device)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = load(args.resume, envs)[0] if args.resume else Agent(envs, args)
    agent.to(device)
    agent.adam = flat_adam(agent)
    agent.adam["learning_rate"] = torch.tensor(args.learning_rate, device=device)
    at, data = start(agent, envs, args)
    if checkpoint:
        for name, value in agent.adam.items():
            value.copy_(checkpoint["adam"][name])
        for name, value in at.items() if envs.resumable else ():
            value.copy_(checkpoint["at"][name])
        if envs.resumable:
            envs.load_state_dict(checkpoint["envs"])
        torch.set_rng_state(checkpoint["rng"])
        if device.type == "cuda" and "cuda_rng" in checkpoint:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"])
    step = compile_step(agent, replace(args, cudagraphs=False))
    record = Recorded if args.cudagraphs and device.type == "cuda" else lambda function: function
    take = record(take_step) if envs.resumable else take_step
    learn = record(update)
    run = Run(args, checkpoint)
    how = f"{device}, {'eager' if step is minibatch_step else 'compiled'}"
    run.bar.write(f"{args.env_id} on {how}, {args.num_iterations} iterations, in {run.folder}")
    if device.type == "cpu" and isinstance(envs, Warp):
        run.bar.write("on a CPU ppo_continuous_action.py is several times faster")
    stop, status = [], "failed"

    def handler(number, frame):  # ends training after this iteration; the next signal acts at once
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    signals = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)}
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        save(run, agent, envs, at)
        while run.iteration < args.num_iterations and not stop:
            remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
            if not args.desired_kl:
                agent.adam["learning_rate"].fill_(remaining * args.learning_rate)  # detail 4
            rollout(agent, envs, at, data, args, take)
            metrics = learn(agent, data, args, step, run.iteration == 0)
            # the host waits here, once an iteration
            metrics = dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))
            checked = {"observations": data.next_obs, "rewards": data.rewards}
            checked |= {"actions": data.actions} | metrics
            for name, x in (checked | agent.state_dict()).items():
                if not torch.as_tensor(x).isfinite().all():
                    raise FloatingPointError(f"iteration {run.iteration}: {name} is not finite")
            run.global_step += args.batch_size
            run.log_episodes(data)
            run.log(metrics)
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent, envs, at)
        save(run, agent, envs, at)
        status = "running" if run.iteration < args.num_iterations else "finished"
    finally:
        for log in (run.bar, run.writer, run.csv):
            log.close()
        final = run.write_json(status)
        for number, old in before.items():
            signal.signal(number, old)
    script, folder = f"python {shlex.quote(sys.argv[0])}", shlex.quote(str(run.folder))
    folder += f" --env-id {args.env_id}" if ":" in args.env_id else ""  # it must be given again
    if status == "running":
        print(f"go on with: {script} --resume {folder}")
        raise SystemExit(128 + stop[0])
    print(f"return {final} over the last 100 episodes; play: {script} --evaluate {folder}")
    if args.save_model:
        torch.save(agent.state_dict(), run.folder / f"{Path(args.exp_name).name}.cleanrl_model")
    if args.capture_video:
        evaluate(replace(run.args, evaluate=run.folder))
    return run.folder


if __name__ == "__main__":
    args = parse_args()
    evaluate(args) if args.evaluate else train(args)
