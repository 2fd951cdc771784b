# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "envpool>=1.2", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for Atari from pixels, on one process or many, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. With P processes, every iteration:

    1. take T steps in each of N environments, N / P of them (EnvPool's) in each process
    2. A = GAE(lambda); a lost life ends an episode, the row after it is never learned from
    3. for K epochs, for each minibatch, a P-th of which is in each process, with A normalised in it
       and r = pi(a | s) / pi_old(a | s), gradients added up over processes, then clipped:
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_atari_multigpu.py --env-id Breakout-v5                       # one process
    torchrun --standalone --nproc-per-node=2 ppo_atari_multigpu.py --env-id Pong-v5
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \\
        --max-restarts=3 ppo_atari_multigpu.py --run-dir runs/1 --num-envs 128     # on both nodes
    python ppo_atari_multigpu.py --resume runs/RUN     # --evaluate runs/RUN --capture-video plays

The number of processes changes where the work is done, not what is learned. The same command with
--run-dir goes on where a run was cut off: torchrun's restarts and Slurm's requeue need no more.
Expect 20 on Pong-v5 and 290 on Breakout-v5 after 4M steps with the flags on its page (raw scores).
Flags and tags are CleanRL's. Left out on purpose: recurrence, other environments than EnvPool's.

In order: Args, agent, algorithm, rollout, train. Below the line after train nothing is PPO.
"""

import contextlib
import copy
import fcntl
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

RANK = int(os.environ.get("RANK", 0))  # number of this process; only 0 writes and prints


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the network, actions, minibatches and environments
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use GPUs if there are any
    device_ids: list[int] = field(default_factory=list)  # GPU of each process of a node: 0 0 1 1
    backend: Literal["gloo", "nccl", "mpi"] | None = None  # default nccl, if none share a GPU
    num_threads: int = 0  # CPU threads of torch; 0: its own number, of several processes a share
    env_threads: int = 0  # CPU threads of a process's environments; 0: as for --num-threads
    channels_last: bool = True  # convolutions in channels-last order: same results to rounding
    bf16: bool = False  # convolutions and hidden layer in bfloat16: faster if the hardware has it
    compile: bool = False  # compile the update if a compiler works: same results to rounding
    cudagraphs: bool = False  # on a GPU, compile, and make acting and gradients CUDA graphs
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    capture_video: bool = False  # record the evaluation in RUN/videos; also with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, greedily and with sampled actions
    eval_episodes: int = 10  # games played by --evaluate
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = "Breakout-v5"  # or BreakoutNoFrameskip-v4; ALE/Breakout-v5: sticky actions
    total_timesteps: int = 10_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 2.5e-4  # Adam's learning rate in the first iteration
    num_envs: int = 8  # environments played side by side, of all processes together
    local_num_envs: int = 0  # if given, environments of each process, instead of --num-envs
    num_steps: int = 128  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch, each with as many steps of every environment
    update_epochs: int = 4  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch, over all processes
    clip_coef: float = 0.1  # epsilon of the clipped surrogate
    clip_vloss: bool = True  # also clip the change of the value
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient of all parameters is scaled down to this norm
    target_kl: float | None = None  # stop the epochs once the mean approx_kl of one exceeds this
    world_size: int = 0  # computed: number of processes, torchrun's
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute the last fields; raise ValueError, which tyro shows, for wrong arguments."""
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.num_envs = self.local_num_envs * self.world_size or self.num_envs
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        least = {"seed": 0, "num_threads": 0, "env_threads": 0, "local_num_envs": 0}
        least |= {"total_timesteps": self.batch_size, "minibatch_size": 2}  # to be normalized
        most = {"gamma": 1, "gae_lambda": 1, "num_minibatches": self.num_steps}
        for name, value in vars(self).items():
            low, high = least.get(name, int(type(value) is int)), most.get(name, math.inf)
            if type(value) in (int, float) and not low <= value <= high:
                why = " (an iteration is num_envs x num_steps)" * (self.batch_size in (low, high))
                raise ValueError(f"{name} is {value}: not in {low} ... {high}{why}")
        if self.num_envs % self.world_size:
            raise ValueError(f"num_envs is {self.num_envs}: not the same for each process")
        if self.evaluate and self.world_size > 1:
            raise ValueError("evaluate: in one process")


# --- agent ----------------------------------------------------------------------------------------
def layer_init(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, biases 0 (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on one convolutional network (Mnih et al. 2015; Atari detail 8).

    `env` is anything with gymnasium's action_space (Discrete), single or vectorised; observations
    are 4 x 84 x 84 bytes, scaled to 0 ... 1 here (Atari detail 9).
    """

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        actions = int(getattr(env, "single_action_space", env.action_space).n)
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
        self.actor = layer_init(nn.Linear(512, actions), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)

    def hidden(self, obs: torch.Tensor) -> torch.Tensor:
        """The last hidden layer [B, 512] at observations [B, 4, 84, 84], bytes."""
        order = torch.channels_last if self.args.channels_last else torch.contiguous_format
        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.network(obs.to(dtype, memory_format=order) / 255.0).float()

    def policy(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the actions [B, A] and V [B] at observations [B, 4, 84, 84]."""
        hidden = self.hidden(obs)
        return self.actor(hidden).log_softmax(dim=-1), self.critic(hidden).squeeze(-1)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [B] at observations [B, 4, 84, 84]."""
        return self.critic(self.hidden(obs)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [B] (sampled unless given), log-probability, entropy, V [B] at [B, 4, 84, 84]."""
        logprobs, value = self.policy(obs)
        if action is None:
            action = torch.distributions.Categorical(logits=logprobs).sample()
        logprob = logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return action, logprob, -(logprobs.exp() * logprobs).sum(dim=-1), value

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Greedy actions [N] at bytes [N, 4, 84, 84] or, given Gumbel noise [N, A], samples."""
        logprobs, _ = self.policy(torch.as_tensor(obs, device=self.actor.bias.device))
        return (logprobs.cpu().numpy() + np.float32(0 if noise is None else noise)).argmax(axis=-1)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values [T + 1, ...]."""
    advantages = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    keep = gamma * gae_lambda * ~np.logical_or(terminated, truncated)
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += keep[t] * advantages[t + 1]
    return advantages


class Rollout(NamedTuple):
    obs: torch.Tensor  # [T, N, 4, 84, 84], bytes, channels last; N environments of this process
    actions: torch.Tensor  # [T, N]
    logprobs: torch.Tensor  # [T, N], of the policy that acted
    values: torch.Tensor  # [T + 1, N]
    rewards: np.ndarray  # [T, N], clipped
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, 4, 84, 84], bytes
    actions: torch.Tensor  # [B]
    logprobs: torch.Tensor  # [B], of the policy that acted
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update
    weights: torch.Tensor  # [B], 1, or 0 for a row that is not learned from


def ppo_loss(agent: Agent, args: Args, batch: Batch, moments: torch.Tensor):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch, and its metrics: shares
    of this process, which add up. `moments`: mean, deviation, number of its advantages."""
    _, logprob, entropy, value = agent.get_action_and_value(batch.obs, batch.actions)
    logratio = logprob - batch.logprobs
    ratio = logratio.exp()
    advantage_mean, advantage_std, count = moments

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (batch.weights * x).sum() / count

    advantages = batch.advantages
    if args.norm_adv:  # per minibatch (detail 7)
        advantages = (advantages - advantage_mean) / (advantage_std + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -mean(torch.min(ratio * advantages, clipped * advantages))

    error = (value - batch.returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        change = (value - batch.values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (batch.values + change - batch.returns).square())
    value_loss = 0.5 * mean(error)

    entropy = mean(entropy)  # its bonus keeps the policy exploring (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -mean(logratio), "approx_kl": mean(ratio - 1.0 - logratio)}
    return loss, metrics | {"clipfrac": mean((ratio != clipped).float())}


def minibatch_grad(agent: Agent, args: Args, batch: Batch, moments: torch.Tensor):
    """Names of the metrics; this process's gradient and metrics, one vector for one all-reduce."""
    loss, metrics = ppo_loss(agent, args, batch, moments)
    trainable = [p for p in agent.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trainable, materialize_grads=True)
    values = torch.stack([*metrics.values()]).detach()
    return [*metrics], torch.cat([*[grad.flatten() for grad in grads], values])


def minibatch_step(agent: Agent, args: Args, batch: Batch, moments, gradient=minibatch_grad):
    """One step of Adam on a minibatch, with the gradient of all processes; gives metrics."""
    names, shares = gradient(agent, args, batch, moments)
    grad, metrics = world_sum(shares).tensor_split([-len(names)])
    norm = grad.norm(keepdim=True)  # over all parameters (detail 11)
    grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    trainable = [p for p in agent.parameters() if p.requires_grad]
    agent.adam.zero_grad()
    for p, part in zip(trainable, grad.split([p.numel() for p in trainable]), strict=True):
        p.grad = part.view_as(p)
    agent.adam.step()
    return [*names, "grad_norm"], torch.cat([metrics, norm])


def minibatch_rows(iteration: int, columns: slice, args: Args, device="cpu") -> list[list]:
    """For each epoch and minibatch, its rows [M] of this process's batch [B]. Every minibatch has
    equally many steps of each environment, every epoch each sample once (detail 6). So a minibatch
    is the same for any number of processes."""
    rng = np.random.default_rng((args.seed, iteration, 1))
    order = rng.random((args.update_epochs, args.num_steps, args.num_envs)).argsort(axis=1)
    order = order[:, :, columns]  # a permutation of T steps in each column
    rows = torch.as_tensor(order * order.shape[2] + np.arange(order.shape[2]), device=device)
    return [[part.flatten() for part in epoch.tensor_split(args.num_minibatches)] for epoch in rows]


def world_moments(x: torch.Tensor, weights: torch.Tensor, parts: list) -> torch.Tensor:
    """Mean, deviation and number of x [B] in parts of the rows, over all processes: [parts, 3]."""
    x = x.double()
    w = weights.double()
    sums = torch.stack([torch.stack([w[i].sum(), (w * x)[i].sum()]) for i in parts])
    count, total = world_sum(sums).unbind(-1)
    mean = total / count.clamp(min=1.0)
    squares = [(w[i] * (x[i] - m).square()).sum() for i, m in zip(parts, mean, strict=True)]
    std = (world_sum(torch.stack(squares)) / (count - 1.0).clamp(min=1.0)).sqrt()
    return torch.stack([mean, std, count.clamp(min=1.0)], dim=-1).float()


def update(agent: Agent, data: Rollout, args: Args, iteration: int, gradient=minibatch_grad):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    values = data.values[:-1]
    numpy_values = data.values.cpu().double().numpy()
    ends = data.terminated, data.truncated
    advantages = gae(data.rewards, numpy_values, *ends, args.gamma, args.gae_lambda)  # detail 5
    advantages = torch.tensor(advantages).to(values)
    weights = torch.tensor(data.valid).to(values)
    returns = advantages + values
    fields = {"obs": data.obs, "actions": data.actions, "logprobs": data.logprobs}
    fields |= {"advantages": advantages, "returns": returns, "values": values, "weights": weights}
    batch = Batch(**{name: x.flatten(0, 1) for name, x in fields.items()})  # [B, ...], B = T * N

    epochs = minibatch_rows(iteration, rank_slice(args), args, values.device)
    parts = [rows for epoch in epochs for rows in epoch]
    moments = world_moments(batch.advantages, batch.weights, parts)
    results = []  # metrics of each step
    coefficients = as_tensors(args, values.device)
    agent.adam.param_groups[0]["lr"] = coefficients.learning_rate
    for epoch in epochs:
        for rows in epoch:
            minibatch = Batch(*[x[rows] for x in batch])
            inputs = minibatch, moments[len(results)]
            names, result = minibatch_step(agent, coefficients, *inputs, gradient)
            results.append(result)
        approx_kl = torch.stack(results[-len(epoch) :])[:, names.index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    means = torch.stack(results).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
    _, error_std, _ = world_moments(batch.advantages, batch.weights, [slice(None)])[0]  # R - V
    _, return_std, _ = world_moments(batch.returns, batch.weights, [slice(None)])[0]
    unexplained = (error_std / return_std.clamp(min=1e-6)).square()
    metrics["losses/explained_variance"] = 1.0 - unexplained.item()
    return metrics


# --- rollout and training -------------------------------------------------------------------------
class Buffers(NamedTuple):
    """Tensors on the device that acting reads and writes in place: a CUDA graph can hold it."""

    now: torch.Tensor  # [N, 4, 84, 84], bytes, the present observations
    noise: torch.Tensor  # [T, N, A], Gumbel's
    t: torch.Tensor  # [1], the next row of all that follows
    obs: torch.Tensor  # [T, N, 4, 84, 84], bytes, channels last
    actions: torch.Tensor  # [T, N]
    logprobs: torch.Tensor  # [T, N]
    values: torch.Tensor  # [T + 1, N]


@torch.no_grad()
def acting_step(agent: Agent, buffers: Buffers) -> torch.Tensor:
    """Actions [N] at the present observations; both become the rollout's next row."""
    t = buffers.t
    logprobs, values = agent.policy(buffers.now)
    # the argmax with Gumbel noise is a sample of the policy
    actions = (logprobs + buffers.noise[t].squeeze(0)).argmax(dim=-1)
    buffers.obs[t] = buffers.now
    buffers.actions[t] = actions
    buffers.logprobs[t] = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    buffers.values[t] = values
    t += 1
    return actions


@torch.no_grad()
def rollout(agent: Agent, envs: "Envs", buffers: Buffers, run: "Run", args: Args, act=acting_step):
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1)."""
    T = args.num_steps
    N = len(envs.obs)
    rewards = np.zeros((T, N))  # clipped
    raw_rewards = np.zeros((T + 1, N))  # not clipped; row T fits world_columns
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    autoreset = np.zeros((T + 1, N), bool)  # rows whose step ignores its action, and resets
    new_game = np.zeros((T + 1, N), bool)  # the same, but not after a lost life
    rng = np.random.default_rng((args.seed, run.iteration, 0))
    noise = rng.gumbel(size=(T, args.num_envs, len(agent.actor.bias)))  # for all processes
    buffers.noise.copy_(torch.as_tensor(noise[:, rank_slice(args)], dtype=torch.float32))
    buffers.t.zero_()
    for t in range(T):
        autoreset[t] = envs.autoreset
        new_game[t] = envs.new_game
        actions = act(agent, buffers).cpu().numpy()
        rewards[t], terminated[t], truncated[t] = envs.step(actions)
        raw_rewards[t] = envs.raw_rewards
        buffers.now.copy_(torch.as_tensor(envs.obs), non_blocking=True)
    autoreset[T] = envs.autoreset
    new_game[T] = envs.new_game
    buffers.values[T] = agent.get_value(buffers.now)
    run.log_rollout(*world_columns(args, buffers.t.device, raw_rewards, autoreset, new_game))
    acted = {name: getattr(buffers, name) for name in ("obs", "actions", "logprobs", "values")}
    ends = {"terminated": terminated, "truncated": truncated, "valid": ~autoreset[:T]}
    return Rollout(rewards=rewards, **acted, **ends)


def train(args: Args | None) -> Path | None:
    """Train, or go on training; returns the run's folder. All processes get rank 0's arguments."""
    args, device, threads = join(args)
    checkpoint = world_checkpoint(args)
    torch.set_num_threads(args.num_threads or threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    start = checkpoint.get("iteration", 0)
    envs = Envs(args, rank_slice(args), start, args.env_threads or threads)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = Agent(envs, args).to(device)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # (detail 3)
    if args.resume:
        if RANK == 0:
            load(args.resume, envs)  # which ends if its networks are others
        agent.load_state_dict(checkpoint["agent"])
        agent.adam.load_state_dict(agent.adam.state_dict() | {"state": checkpoint["adam"]})
    copy_from_rank_0(agent)
    gradient = compile_grad(agent, args)
    buffers = make_buffers(agent, envs, args)
    act = Recorded(acting_step) if args.cudagraphs and device.type == "cuda" else acting_step
    with contextlib.closing(envs), Run(args, checkpoint) as run, stop_signals() as signals:
        save(run, agent)
        stopped = False
        while run.iteration < args.num_iterations and not stopped:
            remaining = 1.0 - run.iteration / args.num_iterations
            scheduled = copy.copy(args)  # coefficients that fall are set here, and only here
            if args.anneal_lr:
                scheduled.learning_rate *= remaining  # (detail 4)
            data = rollout(agent, envs, buffers, run, args, act)
            metrics = update(agent, data, scheduled, run.iteration, gradient)
            found = {"rewards": data.rewards} | metrics | agent.state_dict()
            check_finite(run.iteration, found)
            run.log(metrics | {"charts/learning_rate": scheduled.learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent)
            stopped = world_sum(torch.tensor(len(signals), device=device)) > 0  # of any process
        save(run, agent)
    leave()
    print_next_command(run, run.iteration == args.num_iterations)
    if run.iteration < args.num_iterations:
        raise SystemExit(128 + (signals or [signal.SIGTERM])[0])  # or another process got it
    if RANK > 0:
        return None
    if args.capture_video:
        evaluate(replace(args, evaluate=run.folder))
    return run.folder


# ==== below this line nothing is PPO ==============================================================
# --- speed ----------------------------------------------------------------------------------------
def make_buffers(agent: Agent, envs: "Envs", args: Args) -> Buffers:
    """Buffers for rollouts of these environments."""
    T = args.num_steps
    N = len(envs.obs)
    device = agent.actor.bias.device
    pixels = torch.zeros((T, N, 84, 84, 4), dtype=torch.uint8, device=device)
    return Buffers(
        now=torch.as_tensor(envs.obs, device=device).clone(),
        noise=torch.zeros((T, N, len(agent.actor.bias)), device=device),
        t=torch.zeros(1, dtype=torch.int64, device=device),
        obs=pixels.permute(0, 1, 4, 2, 3),
        actions=torch.zeros((T, N), dtype=torch.int64, device=device),
        logprobs=torch.zeros((T, N), device=device),
        values=torch.zeros((T + 1, N), device=device),
    )


def as_tensors(args: Args, device: torch.device) -> Args:
    """Args of one update. Its fractions become tensors: compiled code would keep a float as it was.
    So no `if` in `ppo_loss` can ask for their values."""
    args = copy.copy(args)
    floats = {name: x for name, x in vars(args).items() if isinstance(x, float)}
    vars(args).update({name: torch.tensor(x, device=device) for name, x in floats.items()})
    return args


def compile_grad(agent: Agent, args: Args):
    """`minibatch_grad` compiled, and the agent's policy; as they are, if no compiler works."""
    if not (args.compile or args.cudagraphs):
        return minibatch_grad
    if any(p._backward_hooks for p in agent.parameters()):
        raise RuntimeError("a compiled step calls no hooks on gradients: --no-compile")
    options = {"triton.cudagraphs": args.cudagraphs}
    try:
        torch.compiler.reset()  # forget what was compiled for another agent
        torch._dynamo.config.trace_autograd_ops = True
        torch.compile(lambda x: x + 1)(agent.actor.bias.detach())
    except Exception as error:  # whatever a missing, old or broken compiler raises
        if RANK == 0:
            print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return minibatch_grad
    if RANK == 0:
        print("compiling the update...")
    agent.policy = torch.compile(agent.policy, fullgraph=True)
    return torch.compile(minibatch_grad, fullgraph=True, options=options)


class Recorded:
    """A function whose tensors stay where they are, as a CUDA graph: called as it is three times,
    in which libraries get ready, then recorded, and replayed ever after. A graph holds numbers as
    they were: it is recorded again when one of Args has changed, or a parameter is frozen."""

    def __init__(self, function):
        self.function = function
        self.calls = 0
        self.key = None  # what the graph holds

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls <= 3:
            return self.function(*arguments)
        key = [dict(vars(x)) for x in arguments if isinstance(x, Args)]
        for agent in (x for x in arguments if isinstance(x, Agent)):
            key += [(p.data_ptr(), p.requires_grad) for p in agent.parameters()]
        if key != self.key:
            self.key = key
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.function(*arguments)
        self.graph.replay()
        return self.result


# --- processes ------------------------------------------------------------------------------------
def join(args: Args | None) -> tuple[Args, torch.device, int]:
    """Join torchrun's other processes, if any: rank 0's arguments; this one's device, threads."""
    if "WORLD_SIZE" in os.environ:
        store, args = meet(args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node, this one included
    device = torch.device("cpu")
    backend = "gloo"
    if args.cuda and torch.cuda.is_available():
        ids = args.device_ids or list(range(torch.cuda.device_count()))
        device = torch.device("cuda", ids[int(os.environ.get("LOCAL_RANK", 0)) % len(ids)])
        torch.cuda.set_device(device)
        backend = "nccl" if neighbours <= len(set(ids[:neighbours])) else "gloo"
    if args.world_size > 1:
        more = {"store": store, "rank": RANK, "world_size": args.world_size}
        dist.init_process_group(args.backend or backend, **more)
    if RANK == 0:
        print(f"processes: {args.world_size} x {device}")
    threads = cores // neighbours if args.world_size > 1 else torch.get_num_threads()
    return args, device, max(1, threads)


def meet(args: Args | None) -> tuple[dist.Store, Args]:
    """A store of these processes alone: torchrun's keeps the addresses of those before a restart,
    https://github.com/pytorch/pytorch/issues/135712. Rank 0 names it and sends its arguments."""
    store, *_ = next(dist.rendezvous("env://"))
    key = os.urandom(16).hex()  # of this process
    if RANK == 0:
        store.set("rank 0", key)
        others = [store.get(f"{key}/{rank}").decode() for rank in range(1, args.world_size)]
        for other in (key, *others):
            store.set(other, json.dumps([key, vars(args)], default=str))
    while not store.check([key]):  # until rank 0 has answered
        store.set(f"{store.get('rank 0').decode()}/{RANK}", key)
        time.sleep(0.05)
    name, args = json.loads(store.get(key))
    paths = {key: Path(args[key]) for key in ("run_dir", "resume", "evaluate") if args[key]}
    return dist.PrefixStore(name, store), Args(**args | paths)


def leave():
    """Leave the other processes. gloo's threads may abort at exit (pytorch pull request 179291)."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_slice(args: Args) -> slice:
    """This process's share of the environments."""
    each = args.num_envs // args.world_size
    return slice(RANK * each, (RANK + 1) * each)


def world_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Add up a tensor over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def world_columns(args: Args, device: torch.device, *arrays: np.ndarray) -> np.ndarray:
    """Arrays [rows, N] of this process as those of all: [arrays, rows, --num-envs]."""
    columns = np.zeros((len(arrays), len(arrays[0]), args.num_envs))
    columns[:, :, rank_slice(args)] = arrays
    return world_sum(torch.as_tensor(columns, device=device)).cpu().numpy()


def world_checkpoint(args: Args) -> dict:
    """The checkpoint to resume; rank 0's, as other processes may not see its folder."""
    checkpoints = [load_checkpoint(args.resume) if args.resume and RANK == 0 else {}]
    if dist.is_initialized():
        dist.broadcast_object_list(checkpoints, src=0)
    return checkpoints[0]


def copy_from_rank_0(agent: Agent):
    """Give all processes the parameters of rank 0."""
    if dist.is_initialized():
        for p in agent.parameters():
            dist.broadcast(p.detach(), src=0)


# --- environments ---------------------------------------------------------------------------------
def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Envs:
    """The Atari games of one process. By EnvPool: no-ops at the start (Atari detail 1), every 4th
    frame as the maximum of two (Atari detail 2), a lost life ends an episode but not the game
    (Atari detail 3), fire to start (Atari detail 4), 84 x 84 grey pixels (Atari detail 5), rewards
    clipped to their sign (Atari detail 6), 4 frames (Atari detail 7).

    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    Games can't be saved: a run resumed at iteration `start` plays new ones, with other seeds.
    """

    def __init__(self, args: Args, columns: slice, start: int = 0, threads: int = 1, **options):
        import envpool

        task = re.sub(r"^(ALE/)?(\w+?)(NoFrameskip|Deterministic)?-v\d$", r"\2-v5", args.env_id)
        sticky = 0.25 if args.env_id.startswith("ALE/") or args.env_id.endswith("-v0") else 0.0
        if envpool.registration.registry.specs.get(task, [None])[0] != "envpool.atari":
            fail(f"--env-id {args.env_id}: EnvPool has no such Atari game (ids are as Breakout-v5)")
        seeds = [episode_seed(args.seed, i, start) % 2**31 for i in range(args.num_envs)[columns]]
        options |= {"episodic_life": True, "reward_clip": True, "repeat_action_probability": sticky}
        options |= {"num_envs": len(seeds), "num_threads": min(threads, len(seeds))}
        self.vector = envpool.make(task, env_type="gymnasium", seed=seeds, **options)
        self.action_space = self.vector.action_space
        self.autoreset = np.zeros(len(seeds), bool)  # [N], the next step begins an episode
        self.new_game = self.autoreset  # [N], the same, but not after a lost life
        self.raw_rewards = np.zeros(len(seeds))  # [N], the last rewards, not clipped
        self.obs, _ = self.vector.reset()  # [N, 4, 84, 84], bytes

    def step(self, actions: np.ndarray):
        """Take actions [N]: clipped rewards, terminated, truncated [N]."""
        self.obs, rewards, terminated, truncated, info = self.vector.step(actions)
        self.autoreset = terminated | truncated
        self.raw_rewards = info["reward"]
        self.new_game = info["terminated"].astype(bool) | truncated
        return rewards, terminated, truncated

    def close(self):
        self.vector.close()


# --- run folder and checkpoints -------------------------------------------------------------------
class Run(contextlib.AbstractContextManager):
    """A run's counters and, in rank 0, its folder and logs. While it is open, no other process can
    use the folder."""

    def __init__(self, args: Args, checkpoint: dict, here: Path = Path()):
        # folders may move, and processes may be more or fewer
        self.args = replace(args, run_dir=None, resume=None, evaluate=None, local_num_envs=0)
        self.global_step = checkpoint.get("global_step", 0)
        self.iteration = checkpoint.get("iteration", 0)
        self.start = time.monotonic() - checkpoint.get("seconds", 0.0)
        self.last_returns = deque(checkpoint.get("last_returns", []), maxlen=100)
        self.episodes = [(0.0, 0)] * args.num_envs  # each environment's game so far: score, length
        if RANK > 0:
            return
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.3f}"
        self.folder = here / (args.resume or args.run_dir or Path("runs") / name)
        self.folder.mkdir(parents=True, exist_ok=self.folder.name != name)
        self.csv = open(self.folder / "episodes.csv", "a", buffering=1)  # noqa: SIM115
        try:
            fcntl.flock(self.csv, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another process trains in {self.folder}")
        except OSError as error:
            print(f"{self.folder} is not locked: {error}", file=sys.stderr)
        if not args.resume and (self.folder / "checkpoint.pt").exists():
            fail(f"a run is there: --resume {shlex.quote(str(self.folder))} goes on with it")
        self.csv.truncate(min(checkpoint.get("csv_size", 0), self.csv.tell()))  # to the checkpoint
        if self.csv.seek(0, os.SEEK_END) == 0:
            self.csv.write("global_step,seconds,return,length\n")
        self.wandb = None
        if args.track:
            import wandb  # before SummaryWriter, which it patches

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            more = {"id": checkpoint.get("wandb"), "resume": "allow", "sync_tensorboard": True}
            self.wandb = wandb.init(name=self.folder.name, config=vars(self.args), **names, **more)
        self.writer = SummaryWriter(str(self.folder), purge_step=self.global_step + 1)
        table = [f"|{name}|{value}|" for name, value in vars(self.args).items()]
        self.writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *table]))
        self.bar = tqdm(total=args.total_timesteps, unit="step", disable=None)
        self.bar.write(f"{args.env_id}, {args.num_iterations} iterations, in {self.folder}")
        self.write_json("running")

    def __exit__(self, kind, *_):
        if RANK > 0:
            return
        ended = self.iteration == self.args.num_iterations
        self.write_json("failed" if kind else "finished" if ended else "running")
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        self.csv.close()

    def episode(self, i: int, t: int, raw_rewards: np.ndarray, autoreset, new_game):
        """Score and length of an environment's game before row t of a rollout [T, N]."""
        begins = np.flatnonzero(new_game[:t, i])  # rows that began a game
        score, length = (0.0, 0) if len(begins) else self.episodes[i]
        rows = slice(begins[-1] if len(begins) else 0, t)
        score += float(raw_rewards[rows, i].sum())
        return score, length + np.count_nonzero(autoreset[rows, i] == 0)

    def log_rollout(self, raw_rewards: np.ndarray, autoreset: np.ndarray, new_game: np.ndarray):
        """Take in a rollout of all processes, [T + 1, N] each: log the games that ended."""
        if RANK > 0:
            return
        seconds = time.monotonic() - self.start
        steps = self.global_step + np.count_nonzero(autoreset[:-1] == 0, axis=1).cumsum()
        self.global_step = int(steps[-1])
        rows = raw_rewards, autoreset, new_game
        ended = [(t, *self.episode(i, t + 1, *rows)) for t, i in np.argwhere(new_game[1:])]
        self.episodes = [self.episode(i, len(steps), *rows) for i in range(len(self.episodes))]
        for t, score, length in ended:
            self.csv.write(f"{steps[t]},{seconds:.2f},{score},{length}\n")
            self.last_returns.append(score)
        if ended:
            score = np.mean([score for _, score, _ in ended])
            length = np.mean([length for *_, length in ended])
            line = f"global_step={self.global_step}, episodic_return={score:.4f}"
            self.bar.write(f"{line}, episodes={len(ended)}, SPS={self.global_step / seconds:.0f}")
            self.writer.add_scalar("charts/episodic_return", score, self.global_step)
            self.writer.add_scalar("charts/episodic_length", length, self.global_step)

    def log(self, metrics: dict[str, float]):
        """Log an iteration."""
        self.iteration += 1
        if RANK > 0:
            return
        self.bar.update(self.global_step - self.bar.n)
        metrics["charts/SPS"] = int(self.global_step / (time.monotonic() - self.start))
        for tag, value in metrics.items():
            self.writer.add_scalar(tag, value, self.global_step)

    def write_json(self, status: str):
        content = {"script": Path(__file__).name, "status": status, "args": vars(self.args)}
        content |= {"seed": self.args.seed, "global_step": self.global_step}
        content["versions"] = {x.__name__: x.__version__ for x in (torch, gym, np)}
        content["wall_seconds"] = round(time.monotonic() - self.start, 2)
        content["final_return"] = np.mean(self.last_returns) if self.last_returns else None
        (self.folder / "run.json").write_text(json.dumps(content, indent=2) + "\n")


def save(run: Run, agent: Agent):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    if RANK > 0:
        return
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    state |= {"adam": agent.adam.state_dict()["state"]}
    state |= {"global_step": run.global_step, "iteration": run.iteration}
    state |= {"seconds": time.monotonic() - run.start, "last_returns": list(run.last_returns)}
    state |= {"csv_size": run.csv.tell(), "wandb": run.wandb and run.wandb.id}
    torch.save(state, run.folder / "checkpoint.pt.tmp")
    (run.folder / "checkpoint.pt.tmp").replace(run.folder / "checkpoint.pt")
    if run.args.save_model:
        torch.save(state["agent"], run.folder / f"{Path(run.args.exp_name).name}.cleanrl_model")


def load_checkpoint(folder: Path) -> dict:
    """Read what `save` wrote. No code in the file is run."""
    try:
        checkpoint = torch.load(f"{folder}/checkpoint.pt", map_location="cpu", weights_only=True)
        script = checkpoint.get("script", Path(__file__).name)
        if script != Path(__file__).name and {*checkpoint["args"]} - {*Args.__annotations__}:
            raise ValueError(f"it is of {script}")  # not of a copy under another name
        args = Args(**{k: v for k, v in checkpoint["args"].items() if k in Args.__annotations__})
    except Exception as error:  # damaged files raise errors of many kinds
        fail(f"{folder}: no checkpoint of this script: {error!r}")
    return checkpoint | {"args": args}


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals():
    """A list of the signals that came. The first ends training after its iteration, the next acts
    at once, except under torchrun, which passes on what its processes have got already.
    Only the main thread can catch signals; elsewhere the list stays empty."""
    received = []

    def handler(number, frame):
        received.append(number)
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
        if RANK == 0:
            os.write(2, b"\nstopping after this iteration\n")

    with contextlib.ExitStack() as stack:
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            stack.callback(signal.signal, number, signal.signal(number, handler))
        # a terminal's Ctrl-C ends compilers and simulators, too: the last checkpoint stays
        stack.push(lambda _, error, __: received and error and not print(f"{error!r:.200}"))
        yield received


def print_next_command(run: Run, ended: bool):
    """Print a line to paste: this interpreter, this file."""
    program = [min(x, os.path.relpath(x), key=len) for x in (sys.executable, __file__)]
    says, flag = ("play with:", "--evaluate") if ended else ("go on with:", "--resume")
    if RANK == 0:
        print(says, shlex.join([*program, flag, str(run.folder)]))


def check_finite(iteration: int, values: dict):
    """Raise FloatingPointError that names the first value with a NaN or an infinity."""
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"iteration {iteration}: {name} is not finite")


# --- evaluation -----------------------------------------------------------------------------------
def load(folder: Path, env=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args, weights = checkpoint["args"], checkpoint["agent"]
    envs = env or Envs(args, slice(0, 1))
    agent = Agent(envs, args)
    names = [[(k, x.shape) for k, x in y.items()] for y in (agent.state_dict(), weights)]
    if names[0] != names[1]:
        fail(f"{folder} was trained by {checkpoint.get('script')}, with other networks or spaces")
    agent.load_state_dict(weights)
    if env is None:
        envs.close()
    return agent, args


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` greedily, then with sampled actions; returns the greedy
    returns. `capture_video` records the greedy games into its videos/."""
    torch.set_num_threads(args.num_threads or 1)
    seed = episode_seed(args.seed, 2**31)
    options = {"render_mode": "rgb_array"} if args.capture_video else {}
    envs = Envs(replace(args, seed=seed), slice(0, 1), **options)
    rng = np.random.default_rng(seed)
    returns = {"eval": [], "sampled": []}
    with contextlib.closing(envs):
        agent, _ = load(args.evaluate, envs)
        for name, done in returns.items():
            score = 0.0
            frames = []
            while len(done) < args.eval_episodes:
                noise = rng.gumbel(size=(1, len(agent.actor.bias))) if name == "sampled" else None
                envs.step(agent.act(envs.obs, noise))
                score += float(envs.raw_rewards[0])
                if args.capture_video and name == "eval":
                    frames.append(envs.vector.render(env_ids=[0])[0])
                if envs.new_game[0]:
                    print(f"{name}_episode={len(done)}, episodic_return={score:.2f}")
                    save_frames(frames, args.evaluate / "videos", len(done))
                    done.append(score)
                    score = 0.0
                    frames = []
            print(f"{name}, {len(done)} episodes: {np.mean(done):.2f} +- {np.std(done):.2f}")
    return returns["eval"]


def save_frames(frames: list[np.ndarray], folder: Path, episode: int):
    """Write the frames [H, W, 3] of an episode, if there are any, as a video into a folder."""
    if frames:
        from gymnasium.utils.save_video import save_video

        options = {"fps": 15, "episode_index": episode, "save_logger": None}
        save_video(frames, str(folder), lambda _: True, **options)
        print(f"filmed into {folder}")


# --- command line ---------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's; so they
    are with --run-dir, if a run was cut off there, which then goes on."""
    argv = [x.removesuffix("/checkpoint.pt") for x in (sys.argv[1:] if argv is None else argv) if x]
    line = re.sub(r"(--\S+)[ =]True(?= |$)", r"\1", shlex.join(argv))  # CleanRL's older flags
    argv = shlex.split(re.sub(r"--(\S+)[ =]False(?= |$)", r"--no-\1", line))

    def run_folder(
        resume: Path | None = None, evaluate: Path | None = None, run_dir: Path | None = None
    ):
        cut_off = run_dir and (run_dir / "checkpoint.pt").exists()
        return resume or evaluate or (run_dir if cut_off else None)

    folder, _ = tyro.cli(run_folder, args=argv, return_unknown_args=True, add_help=False)
    checkpoint = load_checkpoint(folder) if folder else {}
    saved = checkpoint.get("args", Args())
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    for name, value in re.findall(r"--(batch.size|minibatch.size|num.iterations)[ =](\d+)", line):
        if int(value) != (computed := getattr(args, name.replace("-", "_"))):
            fail(f"--{name} is {computed}: see --num-steps, --num-minibatches, --total-timesteps")
    if folder and args.local_num_envs:  # there may be more or fewer processes than there were
        args = replace(args, local_num_envs=0, num_envs=saved.num_envs)
    if folder and folder == args.run_dir:
        if '"status": "finished"' in (folder / "run.json").read_text():
            fail(f"a finished run is there: --resume {folder} --total-timesteps N goes on with it")
        args = replace(args, resume=folder, run_dir=None)
    for name in ("seed", "num_envs", "num_steps", "env_id"):
        if args.resume and getattr(args, name) != getattr(saved, name):
            fail(f"{name}: {folder} keeps its {getattr(saved, name)}: leave the flag out")
    done = sum('"status": "finished"' in x.read_text() for x in Path(folder or "").glob("run.json"))
    if args.resume and args.num_iterations < checkpoint.get("iteration", math.inf) + done:
        fail(f"{folder} has finished: a larger --total-timesteps goes on, not a policy alone")
    packages = (("envpool", True), ("wandb", args.track), ("moviepy", args.capture_video))
    for package, needed in packages:
        if needed and importlib.util.find_spec(package) is None:
            fail(f"{package} is not installed: pip install {package}")
    return args


def fail(message: str):
    """Print one line to standard error and exit with code 2."""
    if RANK > 0:
        time.sleep(60)  # rank 0 prints it, too, and torchrun then ends all processes
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    leave()
    raise SystemExit(2)


if __name__ == "__main__":
    args = parse_args() if RANK == 0 or {"-h", "--help"} & {*sys.argv} else None
    evaluate(args) if args and args.evaluate else train(args)
