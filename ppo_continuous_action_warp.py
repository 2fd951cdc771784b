# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy",
#                 "mujoco-warp>=3.13,<4", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for continuous actions, in one file, for thousands of environments on a GPU.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. Every iteration:

    1. take T steps in each of N environments with actions a ~ pi(a | s)
    2. A = GAE(lambda): a time limit bootstraps from the value of the true last observation, a
       termination does not
    3. for K epochs, for each minibatch, with A normalised, r = pi / pi_old:
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H
       and lower the learning rate if the policy moved too far (KL), or raise it

    python ppo_continuous_action_warp.py  # --resume runs/RUN goes on, --evaluate runs/RUN plays
    python ppo_continuous_action_warp.py --env-id Pendulum-v1 --num-envs 256 --num-steps 32 \\
        --hidden 64 64 --total-timesteps 800000  # without engine or GPU; expect -180

Expect 10,000 on HalfCheetah-v4 after a minute on an H100 (on a CPU use ppo_continuous_action.py).
Left out: --target-kl, --compile (a GPU records CUDA graphs), --anneal-lr (the KL sets it), pixels.

In order: Args, agent, algorithm, rollout, train. Below the line after train nothing is PPO.
"""

import contextlib
import copy
import fcntl
import importlib.util
import json
import math
import os
import random
import re
import shlex
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
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
    cuda: bool = True  # use a GPU if there is one; without, this is the wrong script for MuJoCo
    num_threads: int = 1  # CPU threads of torch
    cudagraphs: bool = True  # on a GPU, record rollout and update, and replay them
    tf32: bool = False  # on a GPU, matrix products to three digits (TensorFloat32): faster
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    capture_video: bool = False  # record the evaluation in RUN/videos; also with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder greedily, in gymnasium's environment
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Environments
    env_id: str = "HalfCheetah-v4"  # one of TASKS, Pendulum-v1, or your own, module:Class
    num_envs: int = 4096  # environments played side by side
    stagger_episodes: bool = True  # the first episodes end at different times, unlogged

    # Algorithm
    total_timesteps: int = 100_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 1e-3  # Adam's, at first: --desired-kl moves it in 1e-5 ... 1e-2
    num_steps: int = 24  # steps in each environment per iteration
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
        least = {"seed": 0, "total_timesteps": self.batch_size, "log_std_init": -math.inf}
        most = {"gamma": 1, "gae_lambda": 1, "num_minibatches": self.batch_size // 2}
        for name, value in vars(self).items():
            low, high = least.get(name, int(type(value) is int)), most.get(name, math.inf)
            if type(value) in (int, float) and not low <= value <= high:
                why = " (an iteration is num_envs x num_steps)" * (self.batch_size in (low, high))
                raise ValueError(f"{name} is {value}: not in {low} ... {high}{why}")


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


def mlp(sizes: list[int], gain: float) -> nn.Sequential:
    """Layers of ELU units and a linear one; orthogonal weights, biases 0 (detail 2)."""
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [layer := nn.Linear(inputs, outputs), nn.ELU()]
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layer.weight, gain)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Policy and value function for environments with the spaces of `env`."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        space = env.action_space
        (self.dim,) = env.observation_space.shape
        outputs = math.prod(space.shape)
        hidden = [self.dim, *args.hidden]
        self.critic = mlp([*hidden, 1], gain=1.0)  # two networks (detail 13)
        self.actor_mean = mlp([*hidden, outputs], gain=0.01)  # (continuous detail 4)
        # a deviation for each dimension, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full((outputs,), args.log_std_init))
        low, high = (torch.tensor(x).float().ravel() for x in (space.low, space.high))
        if not (args.scale_actions and (high - low).isfinite().all()):
            low, high = -torch.ones(outputs), torch.ones(outputs)
        self.register_buffer("action_bias", (low + high) / 2)
        self.register_buffer("action_scale", torch.where(high > low, (high - low) / 2, 1.0))
        self.obs_moments = RunningMeanStd((self.dim,))
        self.return_moments = RunningMeanStd()

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

    @torch.no_grad()
    def act(self, obs, noise: torch.Tensor | None = None):
        """Mean actions [N, A] at observations [N, D], as tensors if these are, else as arrays;
        given `noise(N)`, samples. Not clipped."""
        mean = self.actor_mean(self.normalize(torch.as_tensor(obs, device=self.action_bias.device)))
        if noise is not None:
            mean = mean + self.actor_logstd.exp() * noise
        actions = self.action_bias + self.action_scale * mean
        return actions if isinstance(obs, torch.Tensor) else actions.cpu().numpy()

    def noise(self, *shape: int) -> torch.Tensor:
        """Noise for `shape` actions."""
        return torch.randn(*shape, len(self.action_scale), device=self.action_scale.device)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, next_values, terminated, truncated, gamma: float, gae_lambda: float):
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), tensors [T, N] over time;
    `next_values` are of the observation after each step, an episode's true last one if it ended."""
    advantages = rewards + gamma * next_values * ~terminated - values
    ended = terminated | truncated
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += torch.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
    return advantages


class Rollout(NamedTuple):
    obs: torch.Tensor  # [T + 1, N, D], raw; after an episode's end a new one's first
    next_obs: torch.Tensor  # [T, N, D], raw, after the step; at an episode's end its true last
    actions: torch.Tensor  # [T, N, A]
    rewards: torch.Tensor  # [T, N], raw
    terminated: torch.Tensor  # [T, N]
    truncated: torch.Tensor  # [T, N]
    discounted: torch.Tensor  # [T, N], discounted sum of the episode's rewards so far


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


def adapt(learning_rate: torch.Tensor, approx_kl: torch.Tensor, desired_kl: float):
    """Lower the learning rate, in place, if the policy has moved too far, or raise it."""
    slower = torch.where(approx_kl > 2.0 * desired_kl, learning_rate / 1.5, learning_rate)
    faster = torch.where(approx_kl < 0.5 * desired_kl, learning_rate * 1.5, slower)
    learning_rate.copy_(faster.clamp(1e-5, 1e-2))


def update(agent: Agent, data: Rollout, args: Args, is_first: bool = False) -> dict:
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches, as
    tensors. Nothing here asks for a value on the host."""
    obs = data.obs[:-1]
    new_obs = obs.flatten(0, 1)
    if is_first:  # later the scale changes after the epochs: old and new policy have the same
        agent.obs_moments.update(new_obs)
    # rewards over the deviation of the discounted returns, clipped (continuous details 8, 9)
    agent.return_moments.update(data.discounted.flatten())
    scale = (agent.return_moments.var + 1e-8).rsqrt().float()
    rewards = (data.rewards * scale).clamp(-10.0, 10.0)
    with torch.no_grad():
        values = agent.get_value(obs)  # [T, N]
        next_values = agent.get_value(data.next_obs)
        _, logprobs, *_ = agent.get_action_and_value(obs, data.actions)
    ends = data.terminated, data.truncated
    advantages = gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)  # detail 5
    fields = {"obs": obs, "actions": data.actions, "logprobs": logprobs}
    fields |= {"advantages": advantages, "returns": advantages + values, "values": values}
    batch = Batch(**{name: x.flatten(0, 1) for name, x in fields.items()})  # [B, ...], B = T * N

    results = []  # metrics of each step
    coefficients = copy.copy(args)
    coefficients.learning_rate = agent.adam["learning_rate"]  # a tensor, which `adapt` changes
    for _ in range(args.update_epochs):
        order = torch.rand_like(batch.values).argsort()
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(args.num_minibatches):
            names, result = minibatch_step(agent, agent.adam, coefficients, batch, minibatch)
            results.append(result)
            if args.desired_kl and len(results) > 1:  # before the first step the KL is 0
                adapt(coefficients.learning_rate, result[names.index("approx_kl")], args.desired_kl)
    if not is_first:
        agent.obs_moments.update(new_obs)
    means = torch.stack(results).mean(dim=0)
    metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
    error = batch.advantages.var()  # variance of R - V
    scale = batch.returns.var()  # variance of R
    metrics["losses/explained_variance"] = 1.0 - error / scale.clamp(min=1e-12)
    metrics["charts/policy_std"] = (agent.actor_logstd.detach().exp() * agent.action_scale).mean()
    return metrics | {"charts/learning_rate": coefficients.learning_rate}


# --- rollout and training -------------------------------------------------------------------------
def start(agent: Agent, envs: "DeviceEnvs", args: Args) -> Rollout:
    """Begin an episode in every environment; returns the rollout that is filled again and again,
    with the first observations in its last row."""
    T, N = args.num_steps, args.num_envs
    rewards = torch.zeros(T, N, device=envs.device)
    ends = rewards > 0
    obs = envs.reset(~ends[0]).repeat(T + 1, 1, 1)
    if args.stagger_episodes:  # or all would reach the limit at once, again and again
        envs.steps.random_(envs.limit)
    actions = agent.noise(N).repeat(T, 1, 1)
    ends = {"terminated": ends, "truncated": ends.clone(), "discounted": rewards.clone()}
    return Rollout(obs=obs, next_obs=obs[1:].clone(), actions=actions, rewards=rewards, **ends)


@torch.no_grad()
def rollout(agent: Agent, envs: "DeviceEnvs", data: Rollout, args: Args):
    """Fill the rollout with `num_steps` steps in every environment, from where its last row stopped
    (detail 1). All is written in place: a CUDA graph can hold it."""
    data.obs[0] = data.obs[-1]
    total = data.discounted[-1].masked_fill(data.terminated[-1] | data.truncated[-1], 0.0)
    for t in range(args.num_steps):
        data.actions[t] = agent.act(data.obs[t], agent.noise(args.num_envs))
        clipped = data.actions[t].clamp(envs.low, envs.high)  # (continuous detail 5)
        data.next_obs[t], data.rewards[t], *ends = envs.step(clipped)
        data.terminated[t], data.truncated[t] = ends
        ended = data.terminated[t] | data.truncated[t]
        data.obs[t + 1] = torch.where(ended[:, None], envs.reset(ended), data.next_obs[t])
        data.discounted[t] = args.gamma * total + data.rewards[t]
        total = data.discounted[t].masked_fill(ended, 0.0)


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    here = Path.cwd()  # an environment may change it
    torch.manual_seed(args.seed)
    envs = make_envs(args.env_id, args.num_envs, device)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = Agent(envs, args).to(device)
    agent.adam = adam_state(agent)
    agent.adam["learning_rate"] = torch.tensor(args.learning_rate, device=device)
    data = start(agent, envs, args)
    if args.resume:
        agent.load_state_dict(load(args.resume, envs)[0].state_dict())
        agent.adam = {name: checkpoint["adam"][name].to(device) for name in agent.adam}
        if args.learning_rate != checkpoint["args"].learning_rate:  # by the command line
            agent.adam["learning_rate"].fill_(args.learning_rate)
        if envs.resumable:
            envs.load_state_dict(checkpoint["envs"])
            for x, last_row in zip(data, checkpoint["rollout"], strict=True):
                x[-1] = last_row
        torch.set_rng_state(checkpoint["rng"])
        torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
    graphs = args.cudagraphs and device.type == "cuda"
    collect = Recorded(rollout) if graphs and envs.resumable else rollout
    learn = Recorded(update) if graphs else update
    with contextlib.closing(envs), Run(args, checkpoint, here) as run, stop_signals() as signals:
        save(run, agent, envs, data)
        while run.iteration < args.num_iterations and not signals:
            collect(agent, envs, data, args)
            metrics = learn(agent, data, args, run.iteration == 0)
            # the host waits here, once an iteration
            metrics = dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True))
            check_finite(run.iteration, data._asdict() | metrics | agent.state_dict())
            run.log_rollout(data)
            run.log(metrics)
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent, envs, data)
        save(run, agent, envs, data)
    print_next_command(run, here, run.iteration == args.num_iterations)
    if run.iteration < args.num_iterations:
        raise SystemExit(128 + signals[0])
    if args.capture_video:
        evaluate(replace(args, evaluate=run.folder))
    return run.folder


# ==== below this line nothing is PPO ==============================================================
# --- speed ----------------------------------------------------------------------------------------
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


# --- environments ---------------------------------------------------------------------------------
def make_env(env_id: str, /, **options) -> gym.Env:
    """One environment of gymnasium's own, to read the task's facts from, to play and to film."""
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    try:
        return gym.make(env_id, disable_env_checker=True, **options)
    except gym.error.Error as error:
        fail(f"--env-id {env_id}: {error!r}; for your own: see `load`")


def episode_seed(*key: int) -> int:
    """The seed of an episode from (seed, environment, episode): no two runs share one. The global
    generators get it, too: most environments have their own, `np_random`, a few do not."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed


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
        self.low = torch.tensor(box.low, device=device)
        self.high = torch.tensor(box.high, device=device)
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
        truncated = self.steps >= self.limit
        return self.observe(), -cost, torch.zeros_like(truncated), truncated


class Task(NamedTuple):
    """The parts of a task that gymnasium's environments have in their code only. The reward is
    forward * velocity + alive - cost * |action|^2."""

    forward: float
    alive: float
    cost: float
    noise: float  # size of the uniform noise at an episode's start
    normal: bool  # velocities get normal noise instead
    clip: float  # velocities are observed within +-clip
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
        self.env = env
        self.hidden = env.model.nq + env.model.nv - dim  # positions not observed
        with warp.ScopedDevice(str(device)):
            self.model = mujoco_warp.put_model(env.model)
            sizes = {"nconmax": 32, "njmax": 128}  # contacts and constraints of a robot on its back
            self.data = mujoco_warp.make_data(env.model, nworld=num_envs, **sizes)
        for name in ("qpos", "qvel", "qacc_warmstart", "xpos", "ctrl"):
            self.register_buffer(name, warp.to_torch(getattr(self.data, name)))
        self.register_buffer("x", self.qpos[:, 0].clone())  # the robot's place before a step
        self.init_qpos = self.qpos[0].clone()
        self.healthy_low = torch.full((env.model.nq + env.model.nv,), -math.inf, device=device)
        self.healthy_high = -self.healthy_low
        for entries, low, high in self.task.healthy:
            self.healthy_low[entries] = low
            self.healthy_high[entries] = high

    def simulate(self):
        for _ in range(self.env.frame_skip):
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
        qpos = self.init_qpos + self.task.noise * (2.0 * torch.rand_like(self.qpos) - 1.0)
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
        x = self.xpos[:, 1, 0] if self.task is TASKS["Ant-v4"] else self.qpos[:, 0]
        reward = self.task.forward * (x - self.x) / self.env.dt + self.task.alive
        reward = reward - self.task.cost * actions.square().sum(dim=1)
        self.x.copy_(x)
        state = torch.cat([self.qpos, self.qvel], dim=1)
        healthy = ((self.healthy_low < state) & (state < self.healthy_high)).all(dim=1)
        return self.observe(), reward, ~healthy, self.steps >= self.limit


def make_envs(env_id: str, num_envs: int, device) -> DeviceEnvs:
    """Environments on the device. An id with a colon, which no checkpoint has, imports a module."""
    if env_id == "Pendulum-v1":
        return Pendulum(num_envs, device)
    if env_id in TASKS:
        if str(device) == "cpu":
            print("on a CPU ppo_continuous_action.py is several times faster")
        return Warp(env_id, num_envs, device)
    module, _, name = env_id.rpartition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        fail(f"--env-id {env_id}: none of Pendulum-v1, {', '.join(TASKS)}, module:Class ({error})")
    return make(num_envs, device)


# --- run folder and checkpoints -------------------------------------------------------------------
class Run(contextlib.AbstractContextManager):
    """A run's folder, logs and counters. While it is open, no other process can use the folder."""

    def __init__(self, args: Args, checkpoint: dict, here: Path = Path()):
        self.args = replace(args, run_dir=None, resume=None, evaluate=None)  # folders may move
        self.global_step = checkpoint.get("global_step", 0)
        self.iteration = checkpoint.get("iteration", 0)
        self.start = time.monotonic() - checkpoint.get("seconds", 0.0)
        self.last_returns = deque(checkpoint.get("last_returns", []), maxlen=100)
        # each environment's running episode: its return and length so far
        first = -math.inf if args.stagger_episodes else 0.0  # -inf: it is cut short, and not logged
        self.returns = np.float32(checkpoint.get("returns", [first] * args.num_envs))
        self.lengths = np.int64(checkpoint.get("lengths", [0] * args.num_envs))
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
        ended = self.iteration == self.args.num_iterations
        self.write_json("failed" if kind else "finished" if ended else "running")
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        self.csv.close()

    def log_rollout(self, data: Rollout):
        """Take in a rollout: log the episodes that ended."""
        seconds = time.monotonic() - self.start
        rewards = data.rewards.cpu().numpy()
        ends = (data.terminated | data.truncated).cpu().numpy()
        ended = []  # step, return and length
        for t in range(len(rewards)):
            self.global_step += self.args.num_envs
            self.returns += rewards[t]
            self.lengths += 1
            logged = ends[t] & np.isfinite(self.returns)
            scores = self.returns[logged].tolist()
            ended += zip(repeat(self.global_step), scores, self.lengths[logged].tolist())
            self.returns[ends[t]] = 0.0
            self.lengths[ends[t]] = 0
        self.csv.write("".join(f"{step},{seconds:.2f},{x},{n}\n" for step, x, n in ended))
        self.last_returns.extend(score for _, score, _ in ended)
        if ended:
            _, score, length = np.mean(ended, axis=0)
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


def save(run: Run, agent: Agent, envs: DeviceEnvs, data: Rollout):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    state |= {"adam": agent.adam, "rng": torch.get_rng_state()}
    state["cuda_rng"] = torch.cuda.get_rng_state_all()
    state |= {"global_step": run.global_step, "iteration": run.iteration}
    state |= {"seconds": time.monotonic() - run.start, "last_returns": list(run.last_returns)}
    state |= {"csv_size": run.csv.tell(), "wandb": run.wandb and run.wandb.id}
    if envs.resumable:
        state |= {"envs": envs.state_dict(), "rollout": [x[-1].clone() for x in data]}
        state |= {"returns": run.returns.tolist(), "lengths": run.lengths.tolist()}
    torch.save(state, run.folder / "checkpoint.pt.tmp")
    (run.folder / "checkpoint.pt.tmp").replace(run.folder / "checkpoint.pt")
    if run.args.save_model:
        torch.save(state["agent"], run.folder / f"{Path(run.args.exp_name).name}.cleanrl_model")


def load_checkpoint(folder: Path) -> dict:
    """Read what `save` wrote. It runs no code, and names no module to import."""
    try:
        checkpoint = torch.load(f"{folder}/checkpoint.pt", map_location="cpu", weights_only=True)
        script = checkpoint.get("script", Path(__file__).name)
        if script != Path(__file__).name and {*checkpoint["args"]} - {*Args.__annotations__}:
            raise ValueError(f"it is of {script}")  # not of a copy under another name
        raw = Args(**{k: v for k, v in checkpoint["args"].items() if k in Args.__annotations__})
    except Exception as error:  # damaged files raise errors of many kinds
        fail(f"{folder}: no checkpoint of this script: {error!r}")
    args = replace(raw, env_id=raw.env_id.rpartition(":")[2])
    return checkpoint | {"raw": raw, "args": args}


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
    """Print a line to paste: this interpreter, this file; a module must be named again."""
    program = [min(x, os.path.relpath(x, here), key=len) for x in (sys.executable, __file__)]
    module = ["--env-id", run.args.env_id] if ":" in run.args.env_id else []
    says, flag = ("play with:", "--evaluate") if ended else ("go on with:", "--resume")
    if not (ended and module):  # of your own, and can't be played
        print(says, shlex.join([*program, flag, str(run.folder), *module]))


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
    envs = env or make_env(args.env_id)
    agent = Agent(envs, args)
    names = [[(k, x.shape) for k, x in y.items()] for y in (agent.state_dict(), weights)]
    if names[0] != names[1]:
        fail(f"{folder} was trained by {checkpoint.get('script')}, with other networks or spaces")
    agent.load_state_dict(weights)
    if env is None:
        envs.close()
    return agent, args


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` greedily, in gymnasium's own environment: an independent
    check. `capture_video` records the episodes into its videos/."""
    env = make_env(args.env_id, render_mode="rgb_array" if args.capture_video else None)
    box = env.action_space
    if args.capture_video:
        os.environ.setdefault("MUJOCO_GL", "egl" if sys.platform == "linux" else "glfw")
        videos = str(args.evaluate / "videos")
        env = gym.wrappers.RecordVideo(env, videos, lambda k: k < args.eval_episodes)
        print(f"filmed into {videos}")
    returns = []
    with contextlib.closing(env), tqdm(unit="step", disable=None, leave=False) as bar:
        agent, _ = load(args.evaluate, env)
        while len(returns) < args.eval_episodes:
            obs, _ = env.reset(seed=episode_seed(args.seed, 2**31, len(returns)))
            score = 0.0
            ended = False
            while not ended:
                action = agent.act(obs[None])[0].clip(box.low, box.high)
                obs, reward, terminated, truncated, _ = env.step(action)
                bar.update()
                score += float(reward)
                ended = terminated or truncated
            bar.write(f"eval_episode={len(returns)}, episodic_return={score:.2f}")
            returns.append(score)
        print(f"eval, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- command line ---------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fail("one process trains here; torchrun is for ppo_atari_multigpu.py")
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
    if args.capture_video and ":" in args.env_id:
        fail("--capture-video: of gymnasium's environments, not your own")
    return args


def fail(message: str):
    """Print one line to standard error and exit with code 2."""
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    args = parse_args()
    evaluate(args) if args.evaluate else train(args)
