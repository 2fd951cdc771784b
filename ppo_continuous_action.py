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

Expect 5,400 over the last 100 episodes of training on HalfCheetah-v4 (1M steps, two to five minutes
on a CPU core), and 6,200 of the final policy. Flags and tags are CleanRL's. Its defaults are
`--ent-coef 0 --log-std-init 0 --no-scale-actions --clip-vloss --target-kl None`.

In order: Args, agent, algorithm, rollout, train. Below the line after train nothing is PPO.
"""

import atexit
import contextlib
import copy
import fcntl
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, replace
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
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # CleanRL's; it changes nothing here
    cuda: bool = False  # use a GPU: its launches take longer than steps of such networks on a CPU
    num_threads: int = 1  # CPU threads of torch; more than one rarely helps networks this small
    compile: bool = True  # compile the update if a compiler works; results are the same to rounding
    compile_from: int = 15_000  # shorter runs, in gradient steps, are not compiled
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    capture_video: bool = False  # record the evaluation in RUN/videos; also with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, greedily and with sampled actions
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Environments
    env_id: str = "HalfCheetah-v4"  # gymnasium's id, module:Id, dm_control/... or envpool:Id
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"NAME": 2}'
    max_episode_steps: int | None = None  # truncate episodes after that many steps
    num_envs: int = 1  # environments played side by side
    env_workers: int = 0  # processes (EnvPool: threads) for num_envs > 1; 0: the main process

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
    adapt_ent_coef: bool = True  # times the share of rewards that repeat: 0 on most robots
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient of all parameters is scaled down to this norm
    target_kl: float | None = 0.02  # stop the epochs once the mean approx_kl of one exceeds this
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
        least = {"seed": 0, "compile_from": 0, "env_workers": 0, "total_timesteps": self.batch_size}
        most = {"gamma": 1, "gae_lambda": 1, "num_minibatches": self.batch_size}
        for name, value in vars(self).items():
            low, high = least.get(name, int(type(value) is int)), most.get(name, math.inf)
            if type(value) in (int, float) and name != "log_std_init" and not low <= value <= high:
                why = " (an iteration is num_envs x num_steps)" * (self.batch_size in (low, high))
                raise ValueError(f"{name} is {value}: not in {low} ... {high}{why}")
        try:
            options = {**json.loads(self.env_kwargs)}
        except (TypeError, ValueError):
            raise ValueError(f"env_kwargs is {self.env_kwargs}: no JSON object") from None
        if self.max_episode_steps:
            self.env_kwargs = json.dumps(options | {"max_episode_steps": self.max_episode_steps})


# --- agent ----------------------------------------------------------------------------------------
class RunningMeanStd(nn.Module):
    """Mean and variance of all that was seen (Chan, Golub & LeVeque 1979), saved with the agent."""

    def __init__(self, shape: tuple[int, ...] = ()):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x: np.ndarray | torch.Tensor):
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
        layers += [layer := nn.Linear(*sizes), nn.Tanh()]
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Policy and value function for environments with the spaces of `env`."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        (self.dim,) = env.observation_space.shape
        self.space = env.action_space
        outputs = math.prod(self.space.shape)
        self.critic = mlp(self.dim, 1, gain=1.0)  # two networks (detail 13)
        self.actor_mean = mlp(self.dim, outputs, gain=0.01)  # (continuous detail 4)
        # a deviation for each dimension, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full((outputs,), args.log_std_init))
        low, high = (torch.tensor(x).float().ravel() for x in (self.space.low, self.space.high))
        if not (args.scale_actions and (high - low).isfinite().all()):
            low, high = -torch.ones(outputs), torch.ones(outputs)
        self.register_buffer("action_bias", (low + high) / 2)
        self.register_buffer("action_scale", torch.where(high > low, (high - low) / 2, 1.0))
        self.obs_moments = RunningMeanStd((self.dim,))
        self.return_moments = RunningMeanStd()
        self.discounted = np.zeros(1)  # [N], return so far of each episode in training
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
            action = self.action_bias + self.action_scale * torch.normal(mean, logstd.exp())
        z = ((action - self.action_bias) / self.action_scale - mean) * torch.exp(-logstd)
        logscale = logstd + self.action_scale.log()
        logprob = -0.5 * z.square() - logscale - 0.5 * math.log(2.0 * math.pi)
        entropy = (logscale + 0.5 * math.log(2.0 * math.pi * math.e)).expand_as(mean)
        return action, logprob.sum(-1), entropy.sum(-1), self.critic(features).squeeze(-1)

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Mean actions [N, ...] at observations [N, D]; given `noise(N)`, samples. Not clipped."""
        actions = numpy_actor(self)(np.asarray(obs, np.float32), noise)
        return actions.reshape(-1, *self.space.shape)

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions."""
        return self.rng.standard_normal((*shape, len(self.action_scale)), np.float32)


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
    obs: np.ndarray  # [T + 1, N, D], raw
    actions: np.ndarray  # [T, N, A]
    rewards: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, D], raw
    actions: torch.Tensor  # [B, A]
    logprobs: torch.Tensor  # [B], before the update
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update


def ppo_loss(agent: Agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and its
    metrics. `args` is as `update` gives it: its floats may be tensors."""
    _, logprob, entropy, value = agent.get_action_and_value(batch.obs, batch.actions)
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
    return loss, metrics | {"clipfrac": (ratio != clipped).float().mean()}


def adam_state(agent: Agent) -> dict[str, torch.Tensor]:
    """Adam's steps and its two moments, each a vector [P] of all parameters in turn."""
    vector = torch.zeros_like(nn.utils.parameters_to_vector(agent.parameters()).detach())
    return {"steps": vector.new_zeros(()), "exp_avg": vector, "exp_avg_sq": vector.clone()}


def adam_step(agent: Agent, adam: dict, learning_rate, grad: torch.Tensor):
    """One step of Adam (Kingma & Ba 2015, algorithm 1) by the gradient [P] of all parameters. It is
    by hand to be compiled with the rest: 0.4 ms together, 0.6 ms with torch.optim.Adam apart."""
    adam["steps"] += 1.0
    adam["exp_avg"].lerp_(grad, 0.1)  # betas 0.9 and 0.999, eps 1e-5 (detail 3)
    adam["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
    mean = adam["exp_avg"] / (1.0 - 0.9 ** adam["steps"])
    square = adam["exp_avg_sq"] / (1.0 - 0.999 ** adam["steps"])
    change = learning_rate * mean / (square.sqrt() + 1e-5)
    parameters = list(agent.parameters())
    for p, part in zip(parameters, change.split([p.numel() for p in parameters]), strict=True):
        if p.requires_grad:
            p -= part.view_as(p)


def minibatch_step(agent: Agent, adam: dict, args: Args, batch: Batch, rows: torch.Tensor):
    """Learn from rows [M] of the batch; gives the names of metrics, and their values."""
    loss, metrics = ppo_loss(agent, args, Batch(*[x[rows] for x in batch]))
    trainable = [p for p in agent.parameters() if p.requires_grad]
    grads = iter(torch.autograd.grad(loss, trainable, materialize_grads=True))
    grads = [next(grads) if p.requires_grad else torch.zeros_like(p) for p in agent.parameters()]
    with torch.no_grad():
        grad = torch.cat([x.flatten() for x in grads])
        norm = grad.norm()  # over all parameters (detail 11)
        grad *= (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        adam_step(agent, adam, args.learning_rate, grad)
        return [*metrics, "grad_norm"], torch.stack([*metrics.values(), norm])


def update(agent: Agent, data: Rollout, args: Args, step=minibatch_step) -> dict[str, float]:
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    new_obs = data.obs[:-1][data.valid]
    is_first = agent.obs_moments.count == 0
    if is_first:  # later the scale changes after the epochs: old and new policy have the same
        agent.obs_moments.update(new_obs)
    device = agent.adam["steps"].device
    obs = torch.as_tensor(data.obs, device=device)
    actions = torch.as_tensor(data.actions, device=device)
    values = agent.get_value(obs).detach()  # [T + 1, N]
    _, logprobs, *_ = agent.get_action_and_value(obs[:-1], actions)
    numpy_values = values.cpu().double().numpy()
    ends = data.terminated, data.truncated
    advantages = gae(data.rewards, numpy_values, *ends, args.gamma, args.gae_lambda)  # (detail 5)
    advantages = torch.tensor(advantages).to(values)
    fields = {"obs": obs[:-1], "actions": actions, "logprobs": logprobs.detach()}
    fields |= {"advantages": advantages, "returns": advantages + values[:-1], "values": values[:-1]}
    batch = Batch(**{name: x.flatten(0, 1) for name, x in fields.items()})  # [B, ...], B = T * N

    rows = np.flatnonzero(data.valid)  # the rows to learn from
    num_minibatches = min(args.num_minibatches, len(rows) // 2)  # at least two rows in each
    if num_minibatches == 0:  # nothing to learn from
        return {}
    results = []  # metrics of each step
    coefficients = as_tensors(args, device)  # a compiled step would keep floats
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(rows), device=device)
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for learn, minibatch in epoch_steps(step, order.tensor_split(num_minibatches)):
            names, result = learn(agent, agent.adam, coefficients, batch, minibatch)
            results.append(result)
        approx_kl = torch.stack(results[-num_minibatches:])[:, names.index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    if not is_first:
        agent.obs_moments.update(new_obs)
    means = torch.stack(results).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
    error = batch.advantages[rows].var()  # variance of R - V
    scale = batch.returns[rows].var()  # variance of R
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    metrics["charts/policy_std"] = (agent.actor_logstd.exp() * agent.action_scale).mean().item()
    return metrics


# --- rollout and training -------------------------------------------------------------------------
def rollout(agent: Agent, envs: "Envs | WorkerEnvs | PoolEnvs", run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1)."""
    T, N = args.num_steps, args.num_envs
    obs = np.zeros((T + 1, *envs.obs.shape), np.float32)
    actions = np.zeros((T, N, len(agent.action_scale)), np.float32)
    rewards = np.zeros((T, N))
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    autoreset = np.zeros((T + 1, N), bool)  # rows whose step ignores its action, and resets
    noise = agent.noise(T, N)
    act = numpy_actor(agent)  # the policy in numpy, which is faster for few rows
    for t in range(T):
        obs[t] = envs.obs
        autoreset[t] = envs.autoreset
        actions[t] = act(obs[t], noise[t])
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t])
    obs[T] = envs.obs
    autoreset[T] = envs.autoreset
    run.log_rollout(actions, rewards, autoreset)  # rewards changed later are learned, not logged
    check_actor(agent, obs[:T][:8, 0], actions[:8, 0], noise[:8, 0])
    ends = {"terminated": terminated, "truncated": truncated, "valid": ~autoreset[:T]}
    return Rollout(obs=obs, actions=actions, rewards=rewards, **ends)


def scale_rewards(agent: Agent, data: Rollout, args: Args) -> Rollout:
    """Rewards over the deviation of the discounted returns, clipped (continuous details 8, 9)."""
    discounted = np.zeros_like(data.rewards)
    for t, valid in enumerate(data.valid):
        agent.discounted = valid * (args.gamma * agent.discounted + data.rewards[t])
        discounted[t] = agent.discounted
    agent.return_moments.update(discounted[data.valid])
    scale = math.sqrt(agent.return_moments.var + 1e-8)
    return data._replace(rewards=np.clip(data.rewards / scale, -10.0, 10.0))


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    here = Path.cwd()  # an environment may change it
    envs = make_envs(args, args.num_envs, checkpoint)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = Agent(envs, args).to(device)
    agent.adam = adam_state(agent)
    if args.resume:
        agent.load_state_dict(load(args.resume, envs)[0].state_dict())
        agent.adam = {name: checkpoint["adam"][name].to(device) for name in agent.adam}
        agent.rng.bit_generator.state = checkpoint["rng"]
        agent.discounted = np.array(checkpoint.get("discounted", [0.0]))
    step = compile_step(agent, args)
    with contextlib.closing(envs), Run(args, checkpoint, here) as run, stop_signals() as signals:
        run.bar.write(f"on {device}")
        save(run, agent)
        while run.iteration < args.num_iterations and not signals:
            remaining = 1.0 - run.iteration / args.num_iterations
            scheduled = copy.copy(args)  # coefficients that fall are set here, and only here
            if args.anneal_lr:
                scheduled.learning_rate *= remaining  # (detail 4)
            if args.anneal_ent_coef:
                scheduled.ent_coef *= remaining
            data = rollout(agent, envs, run, args)
            rewards = data.rewards[data.valid]
            repeated = 1.0 - len(np.unique(rewards)) / max(len(rewards), 1)
            if args.adapt_ent_coef:  # explore where most rewards are alike: a good one is rare
                scheduled.ent_coef *= repeated
            data = scale_rewards(agent, data, args)
            metrics = update(agent, data, scheduled, step)
            metrics["charts/repeated_rewards"] = repeated
            check_finite(run.iteration, data._asdict() | metrics | agent.state_dict())
            run.log(metrics | {"charts/learning_rate": scheduled.learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent)
        save(run, agent)
    print_next_command(run, here, run.iteration == args.num_iterations)
    if run.iteration < args.num_iterations:
        raise SystemExit(128 + signals[0])
    if args.capture_video:
        evaluate(replace(args, evaluate=run.folder))
    return run.folder


# ==== below this line nothing is PPO ==============================================================
# --- speed ----------------------------------------------------------------------------------------
@torch.no_grad()
def numpy_actor(agent: Agent):
    """`agent.act` with the present weights, in numpy, for rows [N, D] and noise [N, A]. Once a
    rollout `check_actor` compares it with `get_action_and_value`."""
    shift = agent.obs_moments.mean.float().cpu().numpy()
    scale = (agent.obs_moments.var + 1e-8).rsqrt().float().cpu().numpy()
    mean = as_numpy(agent.actor_mean, agent.action_scale, agent.action_bias)
    std = (agent.actor_logstd.exp() * agent.action_scale).cpu().numpy()

    def act(obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        x = mean(np.minimum(np.maximum((obs - shift) * scale, -10.0), 10.0))
        return x if noise is None else x + std * noise

    return act


@torch.no_grad()
def as_numpy(network: nn.Module, scale=1.0, shift=0.0):
    """scale * network(x) + shift, with the present weights, as a function of arrays x [N, D].
    Linear layers and tanh run in numpy, which is faster for few rows; others run in torch."""
    scale, shift = (torch.as_tensor(x).cpu() for x in (scale, shift))
    if type(network) is nn.Sequential:
        *hidden, last = network
        steps = [np.tanh if type(layer) is nn.Tanh else as_numpy(layer) for layer in hidden]
        steps.append(as_numpy(last, scale, shift))
        return lambda x: functools.reduce(lambda y, step: step(y), steps, x)
    if type(network) is nn.Linear and network.bias is not None:
        weight = (network.weight.cpu() * scale[..., None]).numpy().T
        bias = (network.bias.cpu() * scale + shift).numpy()
        return lambda x: x @ weight + bias
    module = copy.deepcopy(network).cpu().requires_grad_(False)
    return lambda x: (module(torch.from_numpy(x)) * scale + shift).numpy()


@torch.no_grad()
def check_actor(agent: Agent, obs: np.ndarray, actions: np.ndarray, noise: np.ndarray):
    """Raise RuntimeError if these actions, taken by `act`, are not of `get_action_and_value`. For
    any Gaussian log pi(mean) - log pi(mean + std * noise) = |noise|^2 / 2."""
    actions = np.concatenate([numpy_actor(agent)(obs), actions])
    rows = (torch.as_tensor(x).to(agent.action_scale) for x in (np.tile(obs, (2, 1)), actions))
    _, logprobs, *_ = agent.get_action_and_value(*rows)
    mean, sample = logprobs.cpu().numpy().reshape(2, -1)
    expected = 0.5 * np.square(noise).sum(axis=-1)
    rounding = 10.0 * np.spacing(np.abs(actions)) / agent.action_scale.cpu().numpy()  # if large
    if (np.abs(mean - sample - expected) > (0.01 + rounding.max()) * (1.0 + expected)).any():
        raise RuntimeError("numpy_actor acts by another policy than get_action_and_value learns")


def as_tensors(args: Args, device: torch.device) -> Args:
    """Args of one update. Its fractions become tensors: compiled code would keep a float as it was.
    So no `if` in `ppo_loss` can ask for their values."""
    args = copy.copy(args)
    floats = {name: x for name, x in vars(args).items() if isinstance(x, float)}
    vars(args).update({name: torch.tensor(x, device=device) for name, x in floats.items()})
    return args


def epoch_steps(step, minibatches):
    """Each minibatch of an epoch with its step. torch.compile asks in the first only if its code
    still fits, which takes a third of a step: what changes within an epoch has to be a tensor."""
    for k, minibatch in enumerate(minibatches):
        if k == 1 and hasattr(step, "_torchdynamo_orig_callable"):
            used, *_ = torch._dynamo.eval_frame._debug_get_cache_entry_list(minibatch_step)
            step = type(step)(used.code, globals())  # the code alone, as a function
        yield step, minibatch


def compile_step(agent: Agent, args: Args):
    """`minibatch_step`, compiled unless the run is short, hooks are set or no compiler works."""
    steps = args.num_iterations * args.update_epochs * args.num_minibatches
    hooks = any(p._backward_hooks for p in agent.parameters())  # compiled code calls none
    if not args.compile or steps < args.compile_from or hooks:
        return minibatch_step
    options = {"cpp.vec_isa_ok": True, "cpp.use_decompose_tanh": True}  # compiles and runs faster
    options["cpp_wrapper"] = agent.adam["steps"].is_cpu  # kernels are called from C++
    try:
        torch.compiler.reset()  # forget what was compiled for another agent
        torch._dynamo.config.trace_autograd_ops = True  # the gradient, too
        torch.compile(lambda x: x + 1, options=options)(agent.adam["steps"])
    except Exception as error:  # whatever a missing, old or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return minibatch_step
    torch.compiler.config.dynamic_sources = "L['rows']"  # minibatches may differ by a row
    print("compiling the update...")
    return torch.compile(minibatch_step, fullgraph=True, options=options)


# --- environments ---------------------------------------------------------------------------------
def make_env(env_id: str, /, **options) -> gym.Env:
    """A gymnasium environment with flat observations."""
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    module = "shimmy:" if env_id.startswith("dm_control/") else ""
    env = gym.make(f"{module}{env_id}", **{"disable_env_checker": True} | options)
    check_spaces(env.observation_space, env.action_space)
    space = env.observation_space
    return env if gym.spaces.flatten_space(space) == space else gym.wrappers.FlattenObservation(env)


def check_spaces(space: gym.Space, actions: gym.Space):
    """Raise gymnasium's Error for spaces that this script can't learn with."""
    images = space.dtype == np.uint8 and np.sum(np.greater(space.shape, 35)) > 1
    if images or "'mission'" in str(space) or not space.is_np_flattenable:  # MiniGrid's has words
        raise gym.error.Error(f"{space}: no vector of a fixed size; for images: ppo_pixels.py")
    if not isinstance(actions, gym.spaces.Box):
        raise gym.error.Error(f"{actions}: a Box of actions is needed; for discrete ones: ppo.py")


def episode_seed(*key: int) -> int:
    """The seed of an episode from (seed, environment, episode): no two runs share one. The global
    generators get it, too: most environments have their own, `np_random`, a few do not."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed


def env_actions(box: gym.spaces.Box, actions: np.ndarray) -> np.ndarray:
    """Clip actions [N, A] to the box, in its shape and type; round them if it has whole numbers.
    The agent learns from its own actions, which are not clipped (continuous detail 5)."""
    high = box.high if box.dtype.kind == "f" else np.nextafter(box.high, -np.inf)  # 2^63 - 1
    clipped = np.minimum(np.maximum(actions.reshape(-1, *box.shape), box.low), high)
    return (clipped if box.dtype.kind == "f" else np.rint(clipped)).astype(box.dtype, copy=False)


class Envs:
    """Environments in this process, stepped one after the other; `indices` are theirs in the run.
    Every episode has its own seed, so it can be played again on resuming. Autoreset is "next step":
    the step that ends an episode returns its true last observation; the next one ignores its action
    and returns a new episode's first observation with reward 0."""

    def __init__(self, args: Args, indices, episodes: list):
        self.args = args
        self.indices = indices
        self.envs = []
        for index in indices:
            episode_seed(args.seed, index)  # for what a constructor draws
            self.envs.append(make_env(args.env_id, **json.loads(args.env_kwargs)))
        self.observation_space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space
        self.episode_numbers = [0] * len(self.envs)
        self.autoreset = np.zeros(len(self.envs), bool)  # [N], the next step begins an episode
        self.obs = np.zeros((len(self.envs), *self.observation_space.shape), np.float32)  # [N, D]
        for i, env in enumerate(self.envs):
            number, _, actions = episodes[indices[i]] if episodes else (0, 0.0, [])
            self.begin(i, number)
            for action in tqdm(actions, "replay", disable=len(actions) < 100_000):
                obs, _, *ended, _ = env.step(env_actions(self.action_space, action)[0])
                self.obs[i] = np.reshape(obs, self.observation_space.shape)
                self.autoreset[i] = any(ended)

    def begin(self, i: int, number: int):
        """Begin an environment's episode of this number."""
        self.episode_numbers[i] = number
        seed = episode_seed(self.args.seed, self.indices[i], number)
        obs, _ = self.envs[i].reset(seed=seed)
        self.obs[i] = np.reshape(obs, self.observation_space.shape)  # no other shape is broadcast

    def step(self, actions: np.ndarray):
        """Take actions [N, ...]: rewards, terminated, truncated [N]."""
        rewards = np.zeros(len(actions))
        terminated = np.zeros(len(actions), bool)
        truncated = np.zeros(len(actions), bool)
        for i, action in enumerate(env_actions(self.action_space, actions)):
            if self.autoreset[i]:
                self.begin(i, self.episode_numbers[i] + 1)
            else:
                obs, reward, terminated[i], truncated[i], _ = self.envs[i].step(action)
                self.obs[i] = np.reshape(obs, self.observation_space.shape)
                rewards[i] = np.asarray(reward).item()
        self.autoreset = terminated | truncated
        return rewards, terminated, truncated

    def close(self):
        for env in self.envs:
            with contextlib.suppress(Exception):  # training has ended, and is saved
                env.close()


def worker_loop(pipe, *envs_arguments):
    """In a worker process: make Envs, step them with the actions that come, until the pipe ends."""
    for number in SIGNALS:  # the main process decides when to stop
        signal.signal(number, lambda *_: None)  # programs started here would inherit SIG_IGN
    try:
        with contextlib.closing(Envs(*envs_arguments)) as envs:
            reply = envs.observation_space, envs.action_space
            while True:
                pipe.send((envs.obs, envs.autoreset, *reply))
                reply = envs.step(pipe.recv())
    except (gym.error.Error, ImportError) as error:
        reply = error
    except BaseException:  # sys.exit, too, and what can't be sent
        reply = RuntimeError(f"in a worker process: {traceback.format_exc()}")
    with contextlib.suppress(ConnectionError):  # the main process has ended, too
        pipe.send(reply)


class WorkerEnvs:
    """Like Envs, with a share of the environments in each worker process: the same bits."""

    def __init__(self, args: Args, episodes: list):
        atexit.register(self.close)  # or the interpreter would wait for the workers
        context = multiprocessing.get_context("forkserver")  # imports packages only once
        context.set_forkserver_preload(["__main__", "gymnasium", "torch.utils.tensorboard", "tyro"])
        self.pipes = []
        for indices in np.array_split(range(args.num_envs), min(args.env_workers, args.num_envs)):
            pipe, worker_pipe = context.Pipe()
            context.Process(target=worker_loop, args=(worker_pipe, args, indices, episodes)).start()
            worker_pipe.close()
            self.pipes.append(pipe)
        (self.observation_space, *_), (self.action_space, *_) = self.receive()  # alike in all

    def receive(self) -> list:
        """Receive obs, autoreset and more from each worker; returns the tuples of what is more."""
        try:
            replies = [pipe.recv() for pipe in self.pipes]
        except (EOFError, ConnectionResetError):
            raise RuntimeError("a worker ended: out of memory, or no __main__ guard?") from None
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        obs, autoreset, *more = zip(*replies, strict=True)
        self.obs = np.concatenate(obs)
        self.autoreset = np.concatenate(autoreset)
        return more

    def step(self, actions: np.ndarray):
        """`Envs.step`: rewards, terminated, truncated [N]."""
        shares = np.array_split(actions, len(self.pipes))
        for pipe, share in zip(self.pipes, shares, strict=True):
            with contextlib.suppress(BrokenPipeError):  # `receive` says why
                pipe.send(share)
        return [np.concatenate(parts) for parts in self.receive()]

    def close(self):
        for pipe in self.pipes:
            pipe.close()


class PoolEnvs:
    """EnvPool's environments, stepped by its own threads. Episodes can't be replayed: a run that
    is resumed at iteration `start` begins new ones, with other seeds."""

    def __init__(self, args: Args, num_envs: int, start: int):
        import envpool

        task = args.env_id.removeprefix("envpool:")
        if task not in envpool.list_all_envs():
            raise gym.error.Error(f"EnvPool has no {task}")
        seeds = [episode_seed(args.seed, i, start) % 2**31 for i in range(num_envs)]
        options = {"env_type": "gymnasium", "num_envs": num_envs, "seed": seeds}
        options["num_threads"] = min(max(args.env_workers, 1), num_envs)
        self.vector = envpool.make(task, **options | json.loads(args.env_kwargs))
        self.space = self.vector.observation_space
        self.action_space = self.vector.action_space
        self.close = self.vector.close
        check_spaces(self.space, self.action_space)
        self.observation_space = gym.spaces.flatten_space(self.space)
        self.obs = self.flatten(self.space, self.vector.reset()[0])  # [N, D]
        self.autoreset = np.zeros(num_envs, bool)  # [N], the next step begins an episode

    def step(self, actions: np.ndarray):
        """Take actions [N, ...]: rewards, terminated, truncated [N]."""
        rows = env_actions(self.action_space, actions)
        obs, rewards, terminated, truncated, _ = self.vector.step(rows)
        self.obs = self.flatten(self.space, obs)
        self.autoreset = terminated | truncated
        return rewards, terminated, truncated

    def flatten(self, space: gym.Space, obs) -> np.ndarray:
        """Observations of a space, perhaps a nested one, as rows [N, D]."""
        if isinstance(space, gym.spaces.Dict):
            return np.concatenate([self.flatten(space[name], obs[name]) for name in space], axis=1)
        return np.asarray(obs, np.float32).reshape(len(obs), -1)


def make_envs(args: Args, num_envs: int, checkpoint: dict):
    """Environments of the kind that the arguments name, as the checkpoint left them."""
    episodes = checkpoint.get("episodes", [])
    try:
        if args.env_id.startswith("envpool:"):
            return PoolEnvs(args, num_envs, checkpoint.get("iteration", 0))
        if args.env_workers and num_envs > 1:
            return WorkerEnvs(args, episodes)
        return Envs(args, range(num_envs), episodes)
    except (gym.error.Error, ImportError, SystemExit) as error:
        fail(f"--env-id {args.env_id}: {error!r}; see docs/your_environment.md")


# --- run folder and checkpoints -------------------------------------------------------------------
class Run(contextlib.AbstractContextManager):
    """A run's folder, logs and counters. While it is open, no other process can use the folder."""

    def __init__(self, args: Args, checkpoint: dict, here: Path = Path()):
        self.args = replace(args, run_dir=None, resume=None, evaluate=None)  # folders may move
        self.global_step = checkpoint.get("global_step", 0)
        self.iteration = checkpoint.get("iteration", 0)
        self.start = time.monotonic() - checkpoint.get("seconds", 0.0)
        self.last_returns = deque(checkpoint.get("last_returns", []), maxlen=100)
        # each environment's running episode: its number, return and actions so far
        self.episodes = checkpoint.get("episodes") or [(0, 0.0, [])] * args.num_envs
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
        if kind is SystemExit:  # an environment's, which would end without a word
            traceback.print_exc()
        ended = self.iteration == self.args.num_iterations
        self.write_json("failed" if kind else "finished" if ended else "running")
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        self.csv.close()

    def episode(self, i: int, t: int, actions: np.ndarray, rewards, autoreset):
        """An environment's running episode before row t of a rollout [T, N, ...]."""
        number, score, past_actions = self.episodes[i]
        resets = np.flatnonzero(autoreset[:t, i])  # rows that began an episode
        if len(resets):
            score, past_actions = 0.0, []
        rows = slice(resets[-1] + 1 if len(resets) else 0, t)
        score += float(rewards[rows, i].sum())
        past_actions = np.asarray(past_actions, actions.dtype).reshape(-1, actions.shape[-1])
        return number + len(resets), score, np.concatenate((past_actions, actions[rows, i]))

    def log_rollout(self, actions: np.ndarray, rewards: np.ndarray, autoreset: np.ndarray):
        """Take in a rollout, [T, N, ...] and autoreset [T + 1, N]: log the episodes that ended."""
        seconds = time.monotonic() - self.start
        steps = self.global_step + np.count_nonzero(~autoreset[:-1], axis=1).cumsum()
        self.global_step = int(steps[-1])
        rows = actions, rewards, autoreset
        ended = [(t, *self.episode(i, t + 1, *rows)) for t, i in np.argwhere(autoreset[1:])]
        self.episodes = [self.episode(i, len(steps), *rows) for i in range(len(self.episodes))]
        for t, _, score, past_actions in ended:
            self.csv.write(f"{steps[t]},{seconds:.2f},{score},{len(past_actions)}\n")
            self.last_returns.append(score)
        if ended:
            score = np.mean([score for _, _, score, _ in ended])
            length = np.mean([len(past_actions) for *_, past_actions in ended])
            line = f"global_step={self.global_step}, episodic_return={score:.4f}"
            self.bar.write(f"{line}, episodes={len(ended)}, SPS={self.global_step / seconds:.0f}")
            self.writer.add_scalar("charts/episodic_return", score, self.global_step)
            self.writer.add_scalar("charts/episodic_length", length, self.global_step)

    def log(self, metrics: dict[str, float]):
        """Log an iteration."""
        self.iteration += 1
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
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    state |= {"adam": agent.adam, "rng": agent.rng.bit_generator.state}
    state |= {"global_step": run.global_step, "iteration": run.iteration}
    state |= {"seconds": time.monotonic() - run.start, "last_returns": list(run.last_returns)}
    state |= {"csv_size": run.csv.tell(), "wandb": run.wandb and run.wandb.id}
    if not run.args.env_id.startswith("envpool:"):  # whose episodes can't be played again
        episodes = [(n, score, torch.tensor(np.array(x))) for n, score, x in run.episodes]
        state |= {"episodes": episodes, "discounted": agent.discounted.tolist()}
    torch.save(state, run.folder / "checkpoint.pt.tmp")
    (run.folder / "checkpoint.pt.tmp").replace(run.folder / "checkpoint.pt")
    if run.args.save_model:
        torch.save(state["agent"], run.folder / f"{Path(run.args.exp_name).name}.cleanrl_model")


def load_checkpoint(folder: Path) -> dict:
    """Read what `save` wrote. It runs no code, and names no module to import and no file."""
    try:
        checkpoint = torch.load(f"{folder}/checkpoint.pt", map_location="cpu", weights_only=True)
        script = checkpoint.get("script", Path(__file__).name)
        if script != Path(__file__).name and {*checkpoint["args"]} - {*Args.__annotations__}:
            raise ValueError(f"it is of {script}")  # not of a copy under another name
        raw = Args(**{k: v for k, v in checkpoint["args"].items() if k in Args.__annotations__})
    except Exception as error:  # damaged files raise errors of many kinds
        fail(f"{folder}: no checkpoint of this script: {error!r}")
    args = replace(raw, env_id=re.sub("(?s)^(?!envpool:).*:", "", raw.env_id))
    words = re.findall('"(.*?)"', raw.env_kwargs)
    if any(re.search(r"[^\w -]", x) or Path(x).exists() for x in words):
        args.env_kwargs = "{}"
    episodes = [(n, score, [*x.numpy()]) for n, score, x in checkpoint.get("episodes", [])]
    return checkpoint | {"raw": raw, "args": args, "episodes": episodes}


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals():
    """A list of the signals that came to the main thread. The first ends training after its
    iteration, or in it if a compiler, too, got Ctrl-C. A second of its kind acts at once."""
    received = []

    def handler(number, frame):
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    with contextlib.ExitStack() as stack:
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            stack.callback(signal.signal, number, signal.signal(number, handler))
        stack.push(lambda _, error, __: received and error and not print(f"{error!r:.200}"))
        yield received


def print_next_command(run: Run, here: Path, ended: bool):
    """Print a line to paste: this interpreter, this file; code that may run is named again."""
    program = [min(x, os.path.relpath(x, here), key=len) for x in (sys.executable, __file__)]
    words = ["--env-id", run.args.env_id]
    words += ["--env-kwargs", run.args.env_kwargs] * (run.args.env_kwargs != "{}")
    says, flag = ("play with:", "--evaluate") if ended else ("go on with:", "--resume")
    print(says, shlex.join([*program, flag, str(run.folder), *words]))


def check_finite(iteration: int, values: dict):
    """Raise FloatingPointError for the first NaN or infinity. Once, name what hardly moves."""
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"iteration {iteration}: {name} is not finite")
        if iteration == 0 and "obs" in name and name.endswith(".var"):  # it is scaled
            what = name.split(".")[-2].removesuffix("_moments").replace("obs", "observation", 1)
            mean, std = values[name[:-3] + "mean"].flatten(), x.sqrt().flatten()
            for i in ((std < 1e-4) & (std > 1e-6 * mean.abs())).nonzero().flatten().tolist():
                tqdm.write(f"{what} {i} moves by {std[i]:.0e} only: give it in a smaller unit")


# --- evaluation -----------------------------------------------------------------------------------
def load(folder: Path, env=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args, weights = checkpoint["args"], checkpoint["agent"]
    envs = env or make_envs(args, 1, {})
    agent = Agent(envs, args)
    names = [[(k, x.shape) for k, x in y.items()] for y in (agent.state_dict(), weights)]
    if names[0] != names[1]:
        fail(f"{folder} was trained by {checkpoint.get('script')}, with other networks or spaces")
    agent.load_state_dict(weights)
    if env is None:
        envs.close()
    return agent, args


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` with sampled actions, then the same episodes greedily;
    returns the greedy returns. `capture_video` records the first of these into its videos/."""
    folder = args.evaluate.absolute()
    options = json.loads(args.env_kwargs)
    if args.capture_video:
        options["render_mode"] = "rgb_array"
        os.environ.setdefault("MUJOCO_GL", "egl" if sys.platform == "linux" else "glfw")
    args = replace(args, seed=episode_seed(args.seed, 2**31), env_kwargs=json.dumps(options))
    for name in ("sampled", "eval"):
        envs = make_envs(args, 1, {})
        if args.capture_video and name == "eval":
            env = envs.envs[0]
            if hasattr(env.unwrapped, "mujoco_renderer"):  # its camera follows the robot
                env.unwrapped.mujoco_renderer.camera_id = 0 if env.unwrapped.model.ncam else -1
            envs.envs[0] = gym.wrappers.RecordVideo(env, f"{folder}/videos", lambda k: k == 0)
            print(f"filmed into {folder}/videos")
            envs.begin(0, number=0)
        scores = [0.0]  # the last is that of the running episode
        with contextlib.closing(envs), tqdm(unit="step", disable=None, leave=False) as bar:
            agent, _ = load(folder, envs)
            act = numpy_actor(agent)
            while len(scores) <= args.eval_episodes:
                noise = agent.noise(1) if name == "sampled" else None
                rewards, *_ = envs.step(act(envs.obs, noise))
                bar.update()
                scores[-1] += float(rewards[0])
                if envs.autoreset[0]:
                    bar.write(f"{name}_episode={len(scores) - 1}, episodic_return={scores[-1]:.2f}")
                    scores.append(0.0)
        scores.pop()
        print(f"{name}, {len(scores)} episodes: {np.mean(scores):.2f} +- {np.std(scores):.2f}")
    return scores


# --- command line ---------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's."""
    argv = [x.removesuffix("/checkpoint.pt") for x in (sys.argv[1:] if argv is None else argv) if x]
    line = re.sub(r"(--\S+)[ =]True(?= |$)", r"\1", shlex.join(argv))  # CleanRL's older flags
    argv = shlex.split(re.sub(r"--(\S+)[ =]False(?= |$)", r"--no-\1", line))
    folder = "".join(re.findall(r"(?m)^--(?:resume|evaluate)[\n=](.*)", "\n".join(argv)))
    checkpoint = load_checkpoint(folder) if folder else {}
    saved = checkpoint.get("args", Args())
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    for name, value in re.findall(r"--(batch.size|minibatch.size|num.iterations)[ =](\d+)", line):
        if int(value) != (computed := getattr(args, name.replace("-", "_"))):
            fail(f"--{name} is {computed}: see --num-steps, --num-minibatches, --total-timesteps")
    for name, value in vars(checkpoint.get("raw", saved)).items():
        if getattr(args, name) == getattr(saved, name) != value:  # it names a module or a file
            fail(f"{folder}: give --{name.replace('_', '-')} {shlex.quote(value)} again")
    for name in ("seed", "num_envs", "num_steps", "log_std_init", "scale_actions"):
        if args.resume and getattr(args, name) != getattr(saved, name):
            fail(f"{name}: {folder} keeps its {getattr(saved, name)}: leave the flag out")
    done = sum('"status": "finished"' in x.read_text() for x in Path(folder).glob("run.json"))
    if args.resume and args.num_iterations < checkpoint.get("iteration", math.inf) + done:
        fail(f"{folder} has finished: a larger --total-timesteps goes on, not a policy alone")
    for package, needed in (("wandb", args.track), ("moviepy", args.capture_video)):
        if needed and importlib.util.find_spec(package) is None:
            fail(f"{package} is not installed: pip install {package}")
    if args.capture_video and args.env_id.startswith("envpool:"):
        fail("--capture-video: of gymnasium's environments, not EnvPool's")
    return args


def fail(message: str):
    """Print one line to standard error and exit with code 2."""
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    args = parse_args()
    evaluate(args) if args.evaluate else train(args)
