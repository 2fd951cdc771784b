# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.7,<2.14", "gymnasium>=1.1,<2", "envpool>=1.2", "numpy", "tensorboard", "tqdm",
#     "tyro>=0.9",
# ]
# ///
"""PPO, clipped, for Atari from pixels, on one process or many, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked where it is. With P processes, every iteration:

    1. each process takes T steps in its N / P environments (EnvPool)
    2. A = GAE(lambda); a lost life ends an episode, the row after it is never learned from
    3. for K epochs, for each minibatch, which is spread over the processes evenly,
       with A normalised in it and r = pi(a | s) / pi_old(a | s):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H
       where V moves by eps from its old value at most (--clip-vloss, the default), and the
       gradients add up over processes before they are clipped

    python ppo_atari_multigpu.py --env-id Breakout-v5                       # one process
    torchrun --standalone --nproc-per-node=2 ppo_atari_multigpu.py --env-id Pong-v5
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        --max-restarts=3 ppo_atari_multigpu.py --num-envs 128               # on both nodes
    sbatch benchmark/ppo_atari_multigpu.slurm --num-envs 128                # Slurm
    python ppo_atari_multigpu.py --resume runs/RUN                          # on any number of them
    python ppo_atari_multigpu.py --evaluate runs/RUN --capture-video        # play greedily

Environments, batch, schedules and normalisation are of all processes together: the number of
processes changes where the work is done, not what is learned. Flags, TensorBoard tags and output
are CleanRL's; `--local-num-envs 8` gives each process 8 environments, as there. Scores are raw
scores of whole games. BreakoutNoFrameskip-v4 and Breakout-v5 are the game without sticky actions,
ALE/Breakout-v5 is the one with them.
Left out on purpose: recurrence, other observations than pixels, environments but EnvPool's.
"""

import contextlib
import csv
import dataclasses
import datetime
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
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from gymnasium.utils.save_video import save_video
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: network, actions, minibatches and environments"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """use GPUs if there are any"""
    device_ids: list[int] = field(default_factory=list)
    """GPU of each process of a node, e.g. 0 0 1 1; default: they take turns"""
    backend: Literal["gloo", "nccl", "mpi"] | None = None
    """of torch.distributed; default nccl if each process has a GPU of its own, else gloo"""
    num_threads: int = 0
    """CPU threads of torch in a process; 0: the node's cores, shared out"""
    env_threads: int = 0
    """CPU threads of the environments of a process; 0: the node's cores, shared out"""
    channels_last: bool = True
    """convolutions in channels-last order: the same results to rounding"""
    compile: bool = False
    """compile the update with torch.compile: same results to rounding"""
    cudagraphs: bool = False
    """compile to CUDA graphs"""
    track: bool = False
    """also log to Weights and Biases"""
    wandb_project_name: str = "ppo"
    """the wandb project's name"""
    wandb_entity: str | None = None
    """the entity (team) of the wandb project"""
    capture_video: bool = False
    """record the evaluation episodes (after training, or with --evaluate) into RUN/videos"""
    save_model: bool = False
    """also save the weights alone, as RUN/{exp_name}.cleanrl_model"""
    run_dir: Path | None = None
    """the run's folder; default runs/{env_id}__{exp_name}__{seed}__{time}"""
    resume: Path | None = None
    """continue the run in this folder, with its own arguments, on any number of processes"""
    evaluate: Path | None = None
    """play games with the greedy actions of the agent saved in this folder, and exit"""
    eval_episodes: int = 10
    """games played by --evaluate"""
    checkpoint_interval: int = 20
    """iterations between checkpoints"""

    # Algorithm specific arguments
    env_id: str = "Breakout-v5"
    """the game: Breakout-v5, BreakoutNoFrameskip-v4, ALE/Breakout-v5 (with sticky actions) ..."""
    total_timesteps: int = 10_000_000
    """steps in all environments of the whole run, 4 frames each; rounded down to iterations"""
    learning_rate: float = 2.5e-4
    """Adam's, in the first iteration"""
    num_envs: int = 8
    """environments of all processes together"""
    local_num_envs: int = 0
    """if given, environments of each process, instead of --num-envs"""
    num_steps: int = 128
    """steps in each environment per iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly: in the last of K iterations it is 1/K of the first's"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of the generalized advantage estimate"""
    num_minibatches: int = 4
    """minibatches per epoch, each with as many steps of every environment"""
    update_epochs: int = 4
    """passes over an iteration's samples"""
    norm_adv: bool = True
    """normalize advantages within each minibatch, over all processes"""
    clip_coef: float = 0.1
    """epsilon of the clipped surrogate"""
    clip_vloss: bool = True
    """clip the change of the value, too, to +-clip-coef"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient over all parameters"""
    target_kl: float | None = None
    """no further epoch once approx_kl = E[(r - 1) - log r], r the probability ratio, averaged over
    an epoch's minibatches, exceeds this; tested after each epoch"""
    bf16: bool = False
    """convolutions and hidden layer in bfloat16: faster where the hardware has it"""
    local_batch_size: int = 0
    """has no effect: --num-envs, --num-steps and the number of processes set it"""
    local_minibatch_size: int = 0
    """has no effect: --num-minibatches sets it"""
    batch_size: int = 0
    """has no effect: --num-envs and --num-steps set it"""
    minibatch_size: int = 0
    """has no effect: --num-minibatches sets it"""
    num_iterations: int = 0
    """has no effect: --total-timesteps, --num-envs and --num-steps set it"""
    world_size: int = 0
    """has no effect: torchrun sets it"""


# What a resumed run may change; every other argument is the run's own.
CHANGEABLE = {
    "cuda", "device_ids", "backend", "num_threads", "env_threads", "channels_last", "compile",
    "cudagraphs", "track", "wandb_project_name", "wandb_entity", "capture_video", "save_model",
    "run_dir", "resume", "evaluate", "eval_episodes", "checkpoint_interval", "total_timesteps",
    "local_batch_size", "local_minibatch_size", "batch_size", "minibatch_size", "num_iterations",
    "world_size", "local_num_envs",
}  # fmt: skip
# Fields that CleanRL computes, accepted for its command lines.
NO_EFFECT = {
    "local_batch_size": "--num-envs, --num-steps and the number of processes set it",
    "local_minibatch_size": "--num-minibatches sets it",
    "batch_size": "--num-envs and --num-steps set it",
    "minibatch_size": "--num-minibatches sets it",
    "num_iterations": "--total-timesteps, --num-envs and --num-steps set it",
    "world_size": "torchrun sets it",
}
# Arguments that need a package of their own.
NEEDS = {"capture_video": "moviepy", "track": "wandb"}
# The least and the greatest value; for others, integers start at 1, floats at 0.
BOUNDS = {
    "seed": (0, 2**63), "gamma": (0, 1), "gae_lambda": (0, 1), "num_threads": (0, math.inf),
    "env_threads": (0, math.inf), "local_num_envs": (0, math.inf),
}  # fmt: skip


def check(args: Args):
    """What the bounds of single arguments can't say."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if args.local_num_envs:
        num_envs, args.local_num_envs = args.local_num_envs * processes, 0
        if args.resume and num_envs != args.num_envs:
            was = f"{args.num_envs / processes:g}"
            fail(f"--local-num-envs is {was} in the run to resume, and can't change in mid-run")
        args.num_envs = num_envs
    if args.num_envs % processes and not args.evaluate:
        fail(f"--num-envs {args.num_envs}: must be a multiple of the {processes} processes")
    if args.num_minibatches > args.num_steps:
        fail(
            f"--num-minibatches {args.num_minibatches}: more than the {args.num_steps} steps of an "
            "iteration in each environment; lower it or raise --num-steps"
        )
    batch_size = args.num_envs * args.num_steps
    if args.total_timesteps < batch_size and not args.evaluate:
        print(
            f"--total-timesteps {args.total_timesteps} is less than an iteration, {batch_size} "
            "(num-envs * num-steps): nothing will be trained"
        )


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


def game(env_id: str) -> tuple[str, float]:
    """EnvPool's id of a game, and the probability that an action sticks, from any of its ids."""
    match = re.fullmatch(r"(ALE/)?(\w+?)(NoFrameskip|Deterministic)?-v(\d)", env_id)
    if not match:
        return env_id, 0.0
    ale, name, _, version = match.groups()
    return f"{name}-v5", 0.25 if ale or version == "0" else 0.0


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Envs:
    """The Atari games of one process, and the score of each so far. By EnvPool: no-ops at the start
    (Atari detail 1), every 4th frame as the maximum of two (Atari detail 2), a lost life ends an
    episode but not the game (Atari detail 3), fire to start (Atari detail 4), 84 x 84 grey pixels
    (Atari detail 5), rewards clipped to their sign (Atari detail 6), 4 frames (Atari detail 7).

    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    """

    def __init__(self, args: Args, which: slice, start: int = 0, threads: int = 1, **more):
        gym.logger.min_level = gym.logger.ERROR
        try:
            import envpool
        except ImportError:
            fail("needs EnvPool: pip install envpool (or '.[atari]' in a clone of the project)")
        name, sticky = game(args.env_id)
        specs = envpool.registration.registry.specs
        ids = [known for known, (module, *_) in specs.items() if module == "envpool.atari"]
        if name not in ids:
            near = difflib.get_close_matches(name, ids, n=3)
            fail(f"--env-id {args.env_id}: no such game (near: {', '.join(near) or 'nothing'})")
        numbers = range(args.num_envs)[which]
        self.vector = envpool.make(
            name, env_type="gymnasium", num_envs=len(numbers), num_threads=threads,
            seed=[episode_seed(args.seed, i, start) % 2**31 for i in numbers],
            episodic_life=True, reward_clip=True, repeat_action_probability=sticky, **more,
        )  # fmt: skip
        self.single_observation_space = self.vector.observation_space  # EnvPool's is the single one
        self.single_action_space = self.vector.action_space
        self.obs = self.vector.reset()[0]  # [N, 4, 84, 84], bytes
        self.over = np.zeros(len(numbers), bool)  # [N], the last step ended an episode
        self.returns = np.zeros(len(numbers))  # [N], raw score of the running game
        self.lengths = np.zeros(len(numbers), int)  # [N], steps of the running game
        self.games: list[tuple[float, int]] = []  # return and length of those that ended just now
        self.seconds = 0.0  # spent in them so far

    def step(self, actions: np.ndarray):
        """Take actions [N]: clipped rewards, terminated, truncated [N]."""
        self.lengths += ~self.over
        start = time.perf_counter()
        self.obs, rewards, terminated, truncated, info = self.vector.step(actions)
        self.seconds += time.perf_counter() - start
        self.over = terminated | truncated
        self.returns += info["reward"]  # neither clipped nor cut at a lost life
        ended = np.flatnonzero(info["terminated"].astype(bool) | truncated)
        self.games = [(float(self.returns[i]), int(self.lengths[i])) for i in ended]
        self.returns[ended], self.lengths[ended] = 0.0, 0
        return rewards, terminated, truncated

    def close(self):
        self.vector.close()


# --- agent ----------------------------------------------------------------------------------------


class FlatAdam:
    """Adam (Kingma & Ba 2015, algorithm 1; eps 1e-5: detail 3) over all parameters of a module
    as one vector [P]. They become views of it: one tensor to add up, clip and step, not many."""

    def __init__(self, module: nn.Module):
        parameters = list(module.parameters())
        self.parameters = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.parameters, parameters)
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.adam = torch.optim.Adam([self.parameters], eps=1e-5, fused=True)
        self.adam.found_inf = torch.zeros((), device=self.parameters.device)  # at 1 it won't step

    def named(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """A vector [P] as the module's named parameters."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def step(self, grad: torch.Tensor, learning_rate: torch.Tensor):
        self.parameters.grad = grad
        self.adam.param_groups[0]["lr"] = learning_rate
        self.adam.step()

    def state(self) -> dict:
        return self.adam.state_dict()

    def restore(self, state: dict):
        self.adam.load_state_dict(state)


def layer_init(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, no bias (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on one convolutional network (Mnih et al. 2015; Atari detail 8).

    `envs` is anything with a gymnasium observation_space (4 x 84 x 84 bytes) and action_space
    (Discrete), single or vectorised. Bytes are scaled to 0 ... 1 here (Atari detail 9).
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        action_space = getattr(envs, "single_action_space", None) or envs.action_space
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, int(action_space.n)), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)

    def hidden(self, obs: torch.Tensor) -> torch.Tensor:
        """The last hidden layer [B, 512] at observations [B, 4, 84, 84], bytes."""
        order = torch.channels_last if self.args.channels_last else torch.contiguous_format
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.args.bf16):
            pixels = obs.to(
                torch.bfloat16 if self.args.bf16 else torch.float32, memory_format=order
            )
            return self.network(pixels / 255.0).float()

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [B] at observations [B, 4, 84, 84]."""
        return self.critic(self.hidden(obs)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [B] (sampled unless given), log-probability, entropy, V at obs [B, 4, 84, 84]."""
        logits, value = self.policy(obs)
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), value

    def policy(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the actions [B, A] and V [B] at observations [B, 4, 84, 84]."""
        hidden = self.hidden(obs)
        return self.actor(hidden).log_softmax(dim=-1), self.critic(hidden).squeeze(-1)

    def forward(self, features: torch.Tensor, actions: torch.Tensor):
        """Log-probability [B] of actions [B], entropy [B], value [B] at obs [B, 4, 84, 84]."""
        logprobs, value = self.policy(features)
        logprob = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return logprob, -(logprobs.exp() * logprobs).sum(dim=-1), value


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


class Rollout(NamedTuple):
    obs: torch.Tensor  # [T, N, 4, 84, 84], bytes; N environments of this process
    actions: torch.Tensor  # [T, N]
    logprobs: torch.Tensor  # [T, N], of the policy that acted
    values: torch.Tensor  # [T + 1, N]
    rewards: np.ndarray  # [T, N], clipped
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end: there its action was
    # ignored and the reward is none, but its observation is the episode's true last one


class Batch(NamedTuple):
    features: torch.Tensor  # [B, 4, 84, 84], bytes
    actions: torch.Tensor  # [B]
    logprobs: torch.Tensor  # [B], of the policy that acted
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update
    weights: torch.Tensor  # [B], 1, or 0 for a row that is not learned from


METRICS = (
    "value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm"
)  # fmt: skip


def ppo_loss(agent: Agent, parameters: dict[str, torch.Tensor], batch: Batch, total, args: Args):
    """This process's share of the clipped objective (Schulman et al. 2017, eq. 9) with these
    parameters, over a minibatch of `total` samples in all processes, and of the METRICS but for the
    last, grad_norm. The shares of all processes add up to the whole. Advantages come normalized."""
    logprob, entropy, value = torch.func.functional_call(
        agent, parameters, (batch.features, batch.actions)
    )
    logratio = logprob - batch.logprobs
    ratio = logratio.exp()

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (batch.weights * x).sum() / total

    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -mean(torch.min(ratio * batch.advantages, clipped * batch.advantages))

    error = (value - batch.returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        near = batch.values + (value - batch.values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (near - batch.returns).square())
    value_loss = 0.5 * mean(error)

    entropy = mean(entropy)  # whose bonus encourages exploration (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    old_approx_kl, approx_kl = -mean(logratio), mean(ratio - 1.0 - logratio)
    clipfrac = mean(((ratio - 1.0).abs() > args.clip_coef).float())
    return loss, (value_loss, policy_loss, entropy, old_approx_kl, approx_kl, clipfrac)


def minibatch_grad(agent: Agent, minibatch: Batch, total: torch.Tensor, args: Args):
    """This process's share of the gradient [P] and of the METRICS [6], to add up."""
    parameters = agent.optimizer.parameters.detach().requires_grad_()
    loss, metrics = ppo_loss(agent, agent.optimizer.named(parameters), minibatch, total, args)
    (grad,) = torch.autograd.grad(loss, parameters)
    metrics = torch.stack(metrics).detach()
    finite = (loss.detach() + metrics.sum()).isfinite()
    return torch.where(finite, grad, math.nan), metrics  # NaN, so that all will know


def apply_grad(agent: Agent, grad: torch.Tensor, learning_rate: torch.Tensor, args: Args):
    """One step of Adam with the gradient of all processes [P]; its norm, before clipping."""
    norm = grad.norm()  # over all parameters (detail 11)
    agent.optimizer.adam.found_inf.logical_or_(~norm.isfinite())  # from then on
    grad.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    agent.optimizer.step(grad, learning_rate)
    return norm


def minibatch_rows(iteration: int, which: slice, args: Args) -> list[list[np.ndarray]]:
    """Of each epoch, of each minibatch: the rows [n] of this process's batch [T * N] in it.

    A minibatch has as many steps of every environment, drawn anew each epoch, and every sample once
    an epoch (detail 6). So it is the same minibatch whatever the number of processes.
    """
    rng = np.random.default_rng((args.seed, iteration, 1))
    order = rng.random((args.update_epochs, args.num_steps, args.num_envs)).argsort(axis=1)
    order = order[:, :, which]  # a permutation of T steps in each column
    rows = order * order.shape[2] + np.arange(order.shape[2])
    return [
        [part.reshape(-1) for part in np.array_split(epoch, args.num_minibatches)] for epoch in rows
    ]


def advantage_moments(batch: Batch, rows: list[torch.Tensor], world: "World") -> torch.Tensor:
    """Mean and standard deviation of the advantages in each of the minibatches, and the number of
    its samples, over all processes: [minibatches, 3]."""
    x, w = batch.advantages.double(), batch.weights.double()
    sums = torch.stack([torch.stack([w[i].sum(), (w * x)[i].sum()]) for i in rows])
    count, total = world.sum(sums).unbind(-1)
    mean = total / count.clamp(min=1.0)
    squares = [(w[i] * (x[i] - m).square()).sum() for i, m in zip(rows, mean, strict=True)]
    std = (world.sum(torch.stack(squares)) / (count - 1.0).clamp(min=1.0)).sqrt()
    return torch.stack([mean, std, count.clamp(min=1.0)], dim=-1).float()


def check_metrics(agent: Agent, metrics: torch.Tensor) -> torch.Tensor:
    """Raise FloatingPointError, telling where, unless all METRICS [minibatches, 7] are finite."""
    bad = ~metrics.isfinite()
    if bad.any():
        first = int(bad.any(dim=1).nonzero()[0])
        names = [name for name, is_bad in zip(METRICS, bad[first], strict=True) if is_bad]
        raise FloatingPointError(f"{', '.join(names)} is not finite in minibatch {first}")
    if not agent.optimizer.parameters.isfinite().all():
        raise FloatingPointError("a parameter is not finite")
    return metrics


def update(
    agent: Agent, data: Rollout, iteration: int, learning_rate: float, args: Args, world: "World"
) -> dict[str, float]:
    """One iteration of learning from everyone's rollout; returns the metrics, averaged over
    minibatches and the same in all processes.

    Raises FloatingPointError if a metric or a parameter is not finite.
    """
    device = world.device
    values = data.values.cpu().double().numpy()
    advantages = gae(  # detail 5
        data.rewards, values, data.terminated, data.truncated, args.gamma, args.gae_lambda
    )
    advantages, weights = (
        torch.as_tensor(x, dtype=torch.float32, device=device) for x in (advantages, data.valid)
    )
    values = data.values[:-1]
    fields = (data.obs, data.actions, data.logprobs, advantages, advantages + values, values)
    batch = Batch(*(x.flatten(0, 1) for x in (*fields, weights)))  # B = T * N

    epochs = [
        [torch.as_tensor(rows, device=device) for rows in epoch]
        for epoch in minibatch_rows(iteration, world.share(args.num_envs), args)
    ]
    moments = iter(advantage_moments(batch, [rows for epoch in epochs for rows in epoch], world))
    learning_rate = torch.tensor(learning_rate, device=device)
    metrics = []  # of each epoch: METRICS [minibatches, 7]
    for epoch in epochs:
        shares, norms = [], []
        for rows in epoch:
            minibatch = Batch(*(x[rows] for x in batch))
            mean, std, total = next(moments)
            if args.norm_adv:  # detail 7
                normal = (minibatch.advantages - mean) / (std + 1e-8)
                minibatch = minibatch._replace(advantages=normal)
            grad, share = agent.minibatch_grad(agent, minibatch, total, args)
            norms.append(apply_grad(agent, world.sum(grad), learning_rate, args))
            shares.append(share.clone())  # the next replay of a CUDA graph overwrites it
        summed = world.sum(torch.stack(shares))
        metrics.append(torch.cat([summed, torch.stack(norms).unsqueeze(-1)], dim=-1))
        kl = metrics[-1][:, METRICS.index("approx_kl")].mean()
        if args.target_kl is not None and kl > args.target_kl:
            break
    means = check_metrics(agent, torch.cat(metrics)).mean(dim=0).cpu()

    residual, targets = (batch.returns - batch.values).double(), batch.returns.double()
    powers = [x.pow(k) * batch.weights for x in (residual, targets) for k in (0, 1, 2)]
    sums = world.sum(torch.stack([x.sum() for x in powers])).view(2, 3)
    residual, targets = (sums[:, 2] / sums[:, 0] - (sums[:, 1] / sums[:, 0]).square()).tolist()
    losses = {f"losses/{name}": mean for name, mean in zip(METRICS, means.tolist(), strict=True)}
    return losses | {"losses/explained_variance": 1.0 - residual / targets if targets else math.nan}


# --- rollout --------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(agent: Agent, envs: Envs, run, args: Args, world: "World") -> Rollout:
    """Take `num_steps` steps in every environment, going on where the last rollout stopped
    (detail 1)."""
    T, N, which = args.num_steps, len(envs.obs), world.share(args.num_envs)
    obs = torch.empty((T, *envs.obs.shape), dtype=torch.uint8, device=world.device)
    logprobs, actions, values = [], [], []
    rewards, terminated, truncated, valid = np.zeros((T, N)), *np.zeros((3, T, N), bool)
    # Gumbel noise, whose argmax is a sample of the policy; drawn for all environments, wherever
    rng = np.random.default_rng((args.seed, run.iteration, 0))
    noise = rng.gumbel(size=(T, args.num_envs, len(agent.actor.bias)))[:, which]
    noise = torch.as_tensor(noise, dtype=torch.float32, device=world.device)
    games = []
    for t in range(T):
        obs[t] = torch.as_tensor(envs.obs)
        valid[t] = ~envs.over
        policy, value = agent.policy(obs[t])
        action = (policy + noise[t]).argmax(dim=-1)
        logprobs.append(policy.gather(-1, action.unsqueeze(-1)).squeeze(-1))
        actions.append(action)
        values.append(value.clone())
        rewards[t], terminated[t], truncated[t] = envs.step(action.cpu().numpy())
        games += [(t, *game) for game in envs.games]
    values.append(agent.get_value(torch.as_tensor(envs.obs, device=world.device)))
    rewards[~valid] = 0.0
    log_games(games, valid, run, world)
    actions, logprobs, values = (torch.stack(x) for x in (actions, logprobs, values))
    return Rollout(obs, actions, logprobs, values, rewards, terminated, truncated, valid)


def log_games(games: list[tuple[int, float, int]], valid: np.ndarray, run, world: "World"):
    """Log everyone's games that ended, (row, raw score, length), in the order of their ends."""
    steps = torch.as_tensor(valid.sum(axis=1), device=world.device)
    steps = run.global_step + world.sum(steps).cumsum(0).cpu().numpy()
    everyones = itertools.chain.from_iterable(world.gather(games))
    for t, score, length in sorted(everyones, key=lambda game: game[0]):
        run.log_episode(int(steps[t]), score, length)
        run.lines.append(f"global_step={steps[t]}, episodic_return={score:.4f}")
    run.global_step = int(steps[-1])


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


class Follower:
    """What processes other than rank 0 have for a Run: its counters. They write nothing."""

    def __init__(self, checkpoint: dict | None = None):
        self.global_step = checkpoint["global_step"] if checkpoint else 0
        self.iteration = checkpoint["iteration"] if checkpoint else 0
        self.lines: list[str] = []

    def log_episode(self, step: int, episodic_return: float, length: int):
        pass

    def log_iteration(self, metrics: dict[str, float]):
        self.iteration += 1
        self.lines.clear()

    def abort(self, error: Exception):
        if not isinstance(error, FloatingPointError):  # which rank 0 tells
            raise error
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
    """Put a checkpoint's agent into one made for the same game."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError:
        fail("the checkpoint does not fit this environment: another version of it, or another id?")


def training_state(agent: Agent, envs: Envs) -> dict:
    """What training needs beyond the agent's own state. Random numbers come from the seed and the
    iteration; EnvPool's games can't be saved."""
    return {"optimizer": agent.optimizer.state(), "launcher": launcher()}


def evaluate(args: Args) -> list[float]:
    """Play `eval_episodes` games with the greedy actions of the agent saved in `args.evaluate`,
    print each score; with `capture_video`, record them into its videos/. Writes nothing else."""
    torch.set_num_threads(args.num_threads or cores())
    args = dataclasses.replace(args, num_envs=1, seed=episode_seed(args.seed, 2**31))
    more = {"render_mode": "rgb_array"} if args.capture_video else {}
    envs = Envs(args, slice(0, 1), **more)
    agent = Agent(envs, args)
    load_agent(agent, load_checkpoint(args.evaluate))
    returns, frames = [], []
    while len(returns) < args.eval_episodes:
        with torch.no_grad():
            policy, _ = agent.policy(torch.as_tensor(envs.obs))
        envs.step(policy.argmax(dim=-1).numpy())
        if args.capture_video:
            frames.append(envs.vector.render(env_ids=[0])[0])
        for score, _ in envs.games:
            print(f"eval_episode={len(returns)}, episodic_return={score:.2f}", flush=True)
            if args.capture_video:
                save_video(
                    frames, str(args.evaluate / "videos"), lambda _: True, fps=15,
                    episode_index=len(returns), save_logger=None,
                )  # fmt: skip
            returns.append(score)
            frames = []
    envs.close()
    print(f"greedy, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------


def compile_agent(agent: Agent, args: Args):
    """torch.compile policy and gradient; go on without where no compiler works."""
    options = {"triton.cudagraphs": True} if args.cudagraphs else {}
    try:
        torch._dynamo.config.trace_autograd_ops = True
        torch.compile(lambda x: x.sin() + x.cos(), options=options)(torch.zeros(8))
    except Exception as error:  # whatever a missing, broken or older compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return
    agent.minibatch_grad = torch.compile(minibatch_grad, fullgraph=True, options=options)
    agent.policy = torch.compile(agent.policy, fullgraph=True, options=options)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class World:
    """The processes of a run, as torchrun's environment variables tell; alone without them."""

    def __init__(self, args: Args):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this node, this one included
        self.threads = max(1, cores() // neighbours)
        gpus = torch.cuda.device_count() if args.cuda else 0
        ids = args.device_ids or list(range(gpus))
        if gpus and not 0 <= min(ids) <= max(ids) < gpus:
            fail(f"--device-ids {args.device_ids}: this node has {gpus} GPUs, counted from 0")
        self.device = (
            torch.device("cuda", ids[local_rank % len(ids)]) if gpus else torch.device("cpu")
        )
        alone_on_gpu = gpus and neighbours <= len(set(ids[:neighbours]))
        if gpus:
            torch.cuda.set_device(self.device)
        if self.size > 1:
            backend = args.backend or ("nccl" if alone_on_gpu else "gloo")
            store = {"store": self.meet(), "rank": self.rank, "world_size": self.size}
            dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10), **store)

    def meet(self) -> dist.Store:
        """A store of these processes alone: torchrun's keeps the addresses of those before a
        restart, https://github.com/pytorch/pytorch/issues/135712. Rank 0 names it."""
        store, *_ = next(dist.rendezvous("env://", timeout=datetime.timedelta(minutes=10)))
        mine = os.urandom(16).hex()
        if self.rank == 0:
            store.set("named", mine)
            for rank in range(1, self.size):
                store.set(store.get(f"{mine}/{rank}").decode(), mine)
        while self.rank and not store.check([mine]):  # until rank 0 has answered
            store.set(f"{store.get('named').decode()}/{self.rank}", mine)
            time.sleep(0.05)
        return dist.PrefixStore(mine if self.rank == 0 else store.get(mine).decode(), store)

    def share(self, total: int) -> slice:
        """Which of `total` environments are this process's."""
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag) -> bool:
        """Whether anyone's flag is set."""
        return bool(self.sum(torch.tensor(float(bool(flag)), device=self.device)))

    def gather(self, thing) -> list:
        """Everyone's `thing`, a plain Python value, in the order of ranks."""
        things = [thing] * self.size
        if self.size > 1:
            dist.all_gather_object(things, thing)
        return things

    def broadcast(self, thing):
        """Rank 0's `thing`: a tensor, changed in place, or anything else."""
        if self.size > 1 and isinstance(thing, torch.Tensor):
            dist.broadcast(thing, src=0)
        elif self.size > 1:
            things = [thing]
            dist.broadcast_object_list(things, src=0)
            (thing,) = things
        return thing

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()


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


def launcher() -> str:
    """What started this process; the same for one that torchrun starts in its place."""
    return f"{platform.node()} {os.getppid()} {os.environ.get('TORCHELASTIC_RUN_ID')}"


def after_restart(args: Args) -> Args:
    """When torchrun or Slurm starts a run again, it goes on from its last checkpoint: the one in
    --run-dir or, without that, of the newest run of this name, if the same launcher made it. With
    --local-num-envs and other nodes, the environments remain as many as they were."""

    def launched_here(path: Path) -> bool:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return load_checkpoint(path.parent)["training"]["launcher"] == launcher()
        except (SystemExit, KeyError):  # damaged, or another version's
            return False

    requeued = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if args.resume or not (requeued or os.environ.get("TORCHELASTIC_RUN_ID")):
        return args
    if args.run_dir:
        found = list(args.run_dir.glob("checkpoint.pt"))
    else:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__*"
        found = sorted(Path("runs").glob(f"{name}/checkpoint.pt"), reverse=True)
    if not (requeued and args.run_dir):
        found = next(([path] for path in found if launched_here(path)), [])
    if not found:
        return args
    saved = asdict(Args(**load_checkpoint(found[0].parent)["args"]))
    more = {"resume": found[0].parent, "run_dir": None, "num_envs": saved["num_envs"]}
    args = dataclasses.replace(args, **more)
    for name in saved.keys() - CHANGEABLE:
        if getattr(args, name) != saved[name]:
            flag = f"--{name.replace('_', '-')}"
            fail(f"{flag} is {saved[name]} in {args.resume}, and can't change in mid-run")
    check(args)
    return args


def set_up(args: Args, world: World):
    """The environments, the agent and the run's folder, new or as the run to resume left them."""
    torch.set_num_threads(args.num_threads or world.threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)
    checkpoint = load_checkpoint(args.resume) if args.resume and world.rank == 0 else None
    checkpoint = world.broadcast(checkpoint)
    which = world.share(args.num_envs)
    threads = args.env_threads or min(world.threads, which.stop - which.start)
    start = checkpoint["iteration"] if checkpoint else 0
    envs = Envs(args, which, start, threads)
    agent = Agent(envs, args).to(world.device)
    agent.optimizer = FlatAdam(agent)
    agent.minibatch_grad = minibatch_grad
    if checkpoint:
        load_agent(agent, checkpoint)
        agent.optimizer.restore(checkpoint["training"]["optimizer"])
    world.broadcast(agent.optimizer.parameters)
    if args.compile or args.cudagraphs:
        compile_agent(agent, args)
    if world.rank:
        return envs, agent, Follower(checkpoint)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    if args.track:
        import wandb  # before the run's writer, which it follows

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": name}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=True)
    run = Run(args, name, checkpoint)
    parameters = sum(p.numel() for p in agent.parameters())
    backend = f", {dist.get_backend()}" if world.size > 1 else ""
    run.write(
        f"{args.env_id}, {world.size} x {world.device}{backend}, {torch.get_num_threads()} + "
        f"{threads} threads each, {parameters:,} parameters, in {run.folder}"
    )
    if checkpoint:
        run.write("EnvPool's environments can't be restored: resuming with new games")
    batch = args.num_envs * args.num_steps
    run.write(
        f"steps {run.global_step:,} to {args.total_timesteps:,}; an iteration: {batch:,} steps, "
        f"{args.update_epochs} epochs of {args.num_minibatches} minibatches of "
        f"{math.ceil(batch / args.num_minibatches)}"
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


def train(args: Args) -> str | None:
    """Train, or go on training; returns the run's name, on rank 0."""
    world = World(args)
    with stop_on_signals() as stop, contextlib.closing(world):
        args = world.broadcast(after_restart(args) if world.rank == 0 else None)
        num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
        envs, agent, run = set_up(args, world)
        leader = world.rank == 0
        try:
            if leader and not args.resume:
                save_checkpoint(run, agent, envs)
            while run.iteration < num_iterations and not world.any(stop):
                # learning-rate annealing (detail 4)
                remaining = 1.0 - run.iteration / num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate
                started, stepping = time.perf_counter(), envs.seconds
                data = rollout(agent, envs, run, args, world)
                rolled, stepping = time.perf_counter(), envs.seconds - stepping
                metrics = update(agent, data, run.iteration, learning_rate, args, world)
                metrics |= shares(stepping, rolled - started, time.perf_counter() - rolled)
                run.log_iteration(metrics | {"charts/learning_rate": learning_rate})
                if leader and run.iteration % args.checkpoint_interval == 0:
                    save_checkpoint(run, agent, envs)
            if leader and run.iteration % args.checkpoint_interval:  # else just saved
                save_checkpoint(run, agent, envs)
        except Exception as error:
            run.abort(error)
        finally:
            envs.close()
        done = run.iteration >= num_iterations
        if leader:
            final = run.close("finished" if done else "running")

    if not leader:
        if not done:
            raise SystemExit(128 + signal.SIGTERM)
        return None
    script = f"python {Path(__file__).name}"
    if not done:
        on = f"go on with: {script} --resume {run.folder}"
        run.write(f"stopped at step {run.global_step:,}; {on}")
        raise SystemExit(128 + (stop or [signal.SIGTERM])[0])
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
    leader = os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as quiet:
        if not leader:  # rank 0 says what is to be said of the arguments
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if os.environ.get("LOCAL_RANK", "0") != "0":  # what is wrong may be so on one node only
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        args = parse_args()
    if not args.evaluate:
        run_name = record(train)(args)
    elif leader:
        evaluate(args)
