# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.3,<4", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO with an adaptive KL penalty and GAE, in one file.

Coady 2017, "AI Gym Workout", after Schulman et al. 2017 (https://arxiv.org/abs/1707.06347, section
4) and Heess et al. 2017 (https://arxiv.org/abs/1707.02286). Every iteration:

    1. play b whole episodes with a ~ N(mu(s, t), sigma^2), or a categorical of logits(s, t)
    2. A = GAE(lambda), normalized; R = Monte-Carlo returns. The value after an episode's end is 0,
       at a time limit too: policy and value function see the time t
    3. up to 20 times, on the whole batch, with r = pi(a | s) / pi_old(a | s), D = KL(pi_old || pi):
           minimise  -E[ r A ] + beta D + 50 max(0, D - 2 d)^2       until D > 4 d, d the target
    4. D > 2 d: beta *= 1.5; D < d / 2: beta /= 1.5; at its limits the learning rate moves, too
    5. fit the value function to R of this batch and of the one before

    python ppo_kl_adaptive.py  # --resume runs/RUN goes on, --evaluate runs/RUN plays
    python ppo_kl_adaptive.py HalfCheetah-v4 -n 3000 -b 5  # the original's command line

This is `--servo coady`. `schulman` is the PPO paper's: beta doubles at D > 1.5 d, halves at D < d /
1.5, no more; with `fixed` it stays. `learning-rate` is what rl_games and RSL-RL call adaptive: the
clipped loss, no penalty, and after each step, D > 2 d: rate / 1.5, D < d / 2: rate * 1.5.

Expect 2,600 on Hopper-v4 after 1.5M steps (one seed of three falls back to 500) and 920 to 2,600 on
HalfCheetah-v4 after 1M; 1M steps take three to five minutes on one CPU core. Left out on purpose:
pixels, recurrence, several or mixed action branches, EnvPool, a compiled step.

In order: Args, agent, algorithm, rollout, train. Below the line after train nothing is PPO.
"""

import atexit
import contextlib
import copy
import fcntl
import functools
import importlib.util
import itertools
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
from typing import Annotated, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tyro.conf import arg


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # CleanRL's; it changes nothing here
    cuda: bool = True  # use a GPU if there is one; networks this small gain little from it
    num_threads: int = 1  # CPU threads of torch; more than one rarely helps networks this small
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    capture_video: bool = False  # record the evaluation in RUN/videos; also with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, greedily and with sampled actions
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 10  # iterations between checkpoints

    # Environments
    env_id: Annotated[str, arg(aliases=["--env-name"])] = "Hopper-v4"  # or module:Id, dm_control/Id
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"NAME": 2}'
    max_episode_steps: int | None = None  # truncate episodes after that many steps
    num_envs: int = 1  # environments played side by side; their whole episodes are pooled
    env_workers: int = 0  # processes for num_envs > 1; 0: the main process

    # Algorithm
    total_timesteps: int = 1_000_000  # steps of the whole run; the last iteration may overshoot
    num_episodes: Annotated[int, arg(aliases=["-n"])] = 0  # episodes of the run, instead of steps
    episodes_per_batch: Annotated[int, arg(aliases=["--batch-size", "-b"])] = 20  # episodes (b)
    gamma: Annotated[float, arg(aliases=["-g"])] = 0.995  # discount factor
    gae_lambda: Annotated[float, arg(aliases=["--lam", "-l"])] = 0.98  # lambda of the advantage
    update_epochs: int = 20  # at most so many passes over an iteration's batch, one step each
    value_epochs: int = 10  # passes of the value function, in minibatches of 256 to 511
    hid1_mult: Annotated[int, arg(aliases=["-m"])] = 10  # first hidden layers' units per input
    policy_logvar: Annotated[float, arg(aliases=["-v"])] = -1.0  # initial log variance of actions
    learning_rate: float | None = None  # the policy's; default 9e-4 / sqrt(second layer's units)
    value_learning_rate: float | None = None  # default 1e-2 / sqrt(second layer's units)
    servo: Literal["coady", "schulman", "fixed", "learning-rate"] = "coady"  # how to hold the KL
    kl_targ: Annotated[float | None, arg(aliases=["-k"])] = None  # d: coady's 0.003, others 0.01
    beta: float | None = None  # initial weight of the KL penalty; 1 or, with learning-rate, 0
    bootstrap_truncation: bool = False  # departure: the value after a time limit is not 0
    lambda_returns: bool = False  # departure: the value function learns advantages + values

    def __post_init__(self):
        """Raise ValueError, which tyro shows, for wrong arguments."""
        least = {"seed": 0, "env_workers": 0, "num_episodes": 0, "policy_logvar": -math.inf}
        most = {"gamma": 1, "gae_lambda": 1, "num_envs": self.episodes_per_batch}  # or some idle
        for name, value in vars(self).items():
            low, high = least.get(name, int(type(value) is int)), most.get(name, math.inf)
            if type(value) in (int, float) and not low <= value <= high:
                raise ValueError(f"{name} is {value}: not in {low} ... {high}")
        try:
            options = {**json.loads(self.env_kwargs)}
        except (TypeError, ValueError):
            raise ValueError(f"env_kwargs is {self.env_kwargs}: no JSON object") from None
        if self.max_episode_steps:
            self.env_kwargs = json.dumps(options | {"max_episode_steps": self.max_episode_steps})
        if self.env_id.startswith("envpool:"):
            raise ValueError("whole episodes can't be played with EnvPool")


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


class Gaussian(NamedTuple):
    mean: torch.Tensor  # [B, A]
    logvar: torch.Tensor  # [B, A], the same in every state

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:  # [B]
        squares = (actions - self.mean).square() * torch.exp(-self.logvar)
        return -0.5 * (squares + self.logvar + math.log(2.0 * math.pi)).sum(-1)

    def kl(self, new: "Gaussian") -> torch.Tensor:  # KL(self || new) [B]
        squares = (new.mean - self.mean).square() * torch.exp(-new.logvar)
        change = self.logvar - new.logvar
        return 0.5 * (squares + change.exp() - change - 1.0).sum(-1)

    def entropy(self) -> torch.Tensor:  # [B]
        return 0.5 * (self.logvar + math.log(2.0 * math.pi * math.e)).sum(-1)


class Categorical(NamedTuple):
    logprobs: torch.Tensor  # [B, A], of A choices

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:  # [B]
        return self.logprobs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def kl(self, new: "Categorical") -> torch.Tensor:  # KL(self || new) [B]
        return (self.logprobs.exp() * (self.logprobs - new.logprobs)).sum(-1)

    def entropy(self) -> torch.Tensor:  # [B]
        return -(self.logprobs.exp() * self.logprobs).sum(-1)


def mlp(inputs: int, hid1_mult: int, third: int, outputs: int) -> nn.Sequential:
    """Three layers of tanh units, the second of the geometric mean of the others' sizes, and a
    linear one; weights ~ N(0, 1 / fan-in) in all, biases 0."""
    first = hid1_mult * inputs
    sizes = inputs, first, math.isqrt(first * third), third, outputs
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())][:-1])


class Agent(nn.Module):
    """Policy and value function for environments with the spaces of `env`. Both see the time: the
    number of an episode's steps so far."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        space = env.action_space
        (dim,) = env.observation_space.shape
        self.space = space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        self.outputs = int(space.n) if self.discrete else math.prod(space.shape)
        self.actor = mlp(dim + 1, args.hid1_mult, 10 * self.outputs, self.outputs)
        self.critic = mlp(dim + 1, args.hid1_mult, 5, 1)
        if not self.discrete:
            self.actor_logvar = nn.Parameter(torch.full((self.outputs,), args.policy_logvar))
        self.obs_moments = RunningMeanStd((dim,))
        self.obs_moments.var.zero_()  # so the first episodes' observations are divided by 0.3
        flags = {"kl_targ": args.kl_targ, "beta": args.beta}
        flags = {name: value for name, value in flags.items() if value is not None}
        self.servo = Servo(**PRESETS[args.servo] | flags)
        self.replay = ()  # features [B, D + 1] and returns [B] of the batch before
        self.rng = np.random.default_rng(args.seed)  # draws actions and minibatches

    def features(self, obs: torch.Tensor, time) -> torch.Tensor:
        """Observations [..., D] less their mean, over 3 (deviation + 0.1), and time [...]."""
        scaled = (obs - self.obs_moments.mean) / (3.0 * (self.obs_moments.var.sqrt() + 0.1))
        time = 0.001 * torch.as_tensor(time, device=obs.device).expand(obs.shape[:-1])
        return torch.cat([scaled, time.unsqueeze(-1)], dim=-1).float()

    def policy(self, features: torch.Tensor) -> Gaussian | Categorical:
        """The distribution of actions at features [B, D + 1]."""
        output = self.actor(features)
        if self.discrete:
            return Categorical(output.log_softmax(dim=-1))
        # a copy: Adam changes the parameter in place
        return Gaussian(output, self.actor_logvar.expand_as(output).clone())

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None, time=0):
        """Action [B, A] or choice [B] (sampled unless given), its log-probability [B], entropy [B]
        and value [B] at observations [B, D] and time [B]."""
        features = self.features(obs, time)
        policy = self.policy(features)
        value = self.critic(features).squeeze(-1)
        if action is None:
            sample = numpy_actor(self)(obs.float().cpu().numpy(), self.noise(len(obs)), time)
            action = torch.as_tensor(sample, device=obs.device)
        return action, policy.log_prob(action), policy.entropy(), value

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None, time=0) -> np.ndarray:
        """Mean or likeliest actions [N, ...] at observations [N, D] and time [N], or one time for
        all; given `noise(N)`, samples. Not clipped."""
        actions = numpy_actor(self)(np.asarray(obs, np.float32), noise, time)
        return env_actions(self.space, actions)

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions; for choices Gumbel's, so that the argmax is a sample."""
        if self.discrete:
            return self.rng.gumbel(size=(*shape, self.outputs)).astype(np.float32)
        return self.rng.standard_normal((*shape, self.outputs), np.float32)


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
    time: np.ndarray  # [T + 1, N], steps of the episode so far
    actions: np.ndarray  # [T, N, A] or, of choices, [T, N]
    rewards: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False after an episode's end and where an environment waits


class Batch(NamedTuple):
    features: torch.Tensor  # [B, D + 1]
    actions: torch.Tensor  # [B, A] or, of choices, [B]
    policy: Gaussian | Categorical  # before the update
    logprobs: torch.Tensor  # [B], before the update
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]


@dataclass
class Servo:
    """Keeps the KL of each update near kl_targ, by the weight of the penalty, beta, or by the
    learning rate. The defaults are Coady's."""

    kl_targ: float = 0.003  # d
    beta: float = 1.0
    tolerance: float = 2.0  # beta moves when the KL ends beyond d times this, or below d over this,
    factor: float = 1.5  # by this factor,
    beta_min: float = 1 / 35  # within these limits
    beta_max: float = 35.0
    hinge_coef: float = 50.0  # weight of max(0, KL - 2 d)^2
    early_stop: float = 4.0  # no further pass once the KL exceeds d times this
    clip_coef: float = 0.0  # epsilon of the clipped surrogate; 0: unclipped
    lr_servo: Literal["with-beta", "with-kl", "never"] = "with-beta"  # what moves the learning rate
    lr_multiplier: float = 1.0

    def adapt(self, kl: float):
        """Adapt beta after an update that ended at this KL; the new beta may move the rate."""
        if kl > self.kl_targ * self.tolerance:
            self.beta = min(self.beta_max, max(self.beta, self.beta_min) * self.factor)
            if self.lr_servo == "with-beta" and self.beta > 30 and self.lr_multiplier > 0.1:
                self.lr_multiplier /= 1.5
        elif kl < self.kl_targ / self.tolerance:
            self.beta = max(self.beta_min, self.beta / self.factor)
            if self.lr_servo == "with-beta" and self.beta < 1 / 30 and self.lr_multiplier < 10:
                self.lr_multiplier *= 1.5

    def adapt_rate(self, kl: float, learning_rate: float):
        """Adapt the learning rate after a pass over the batch, between 1e-5 and 1e-2."""
        if self.lr_servo == "with-kl" and kl > self.kl_targ * self.tolerance:
            self.lr_multiplier = max(self.lr_multiplier / 1.5, 1e-5 / learning_rate)
        elif self.lr_servo == "with-kl" and 0.0 < kl < self.kl_targ / self.tolerance:
            self.lr_multiplier = min(self.lr_multiplier * 1.5, 1e-2 / learning_rate)


# The paper has no limits. But a beta of 0 would never rise again; at 1e-3 the penalty is no longer
# felt (beta d is 1e-5, where E[r A] moves by some 0.01), and ten doublings bring it back to 1.
PAPER = {"kl_targ": 0.01, "tolerance": 1.5, "factor": 2.0, "beta_min": 1e-3, "beta_max": 1e9}
PAPER |= {"hinge_coef": 0.0, "early_stop": math.inf, "lr_servo": "never"}
FIXED = PAPER | {"factor": 1.0, "beta_min": 0.0}
RATE = FIXED | {"beta": 0.0, "tolerance": 2.0, "clip_coef": 0.2, "lr_servo": "with-kl"}
PRESETS = {"coady": {}, "schulman": PAPER, "fixed": FIXED, "learning-rate": RATE}


def ppo_loss(agent: Agent, batch: Batch):
    """The penalized objective (Schulman et al. 2017, eq. 8; the hinge is Heess et al.'s) of a batch
    [B, ...], and its metrics."""
    policy = agent.policy(batch.features)
    servo = agent.servo
    ratio = (policy.log_prob(batch.actions) - batch.logprobs).exp()
    gain = ratio * batch.advantages
    surrogate = gain
    if servo.clip_coef:
        clipped = ratio.clamp(1.0 - servo.clip_coef, 1.0 + servo.clip_coef)
        surrogate = torch.min(gain, clipped * batch.advantages)
    kl = batch.policy.kl(policy).mean()
    hinge = (kl - 2.0 * servo.kl_targ).clamp(min=0.0).square()
    loss = -surrogate.mean() + servo.beta * kl + servo.hinge_coef * hinge
    return loss, {"policy_loss": -gain.mean(), "kl": kl, "entropy": policy.entropy().mean()}


def advantages_and_returns(data: Rollout, values: np.ndarray, args: Args):
    """Advantages and targets of the value function [T, N], given values [T + 1, N]. The value after
    an episode's last step is 0, unless a time limit is to bootstrap."""
    # as Coady: so returns have the size of a reward
    rewards = data.rewards * (1.0 - args.gamma if args.gamma < 0.999 else 1.0)
    terminated = data.terminated
    if not args.bootstrap_truncation:
        terminated = terminated | data.truncated
    # discounted sums of rewards: the GAE at lambda = 1 of values that are 0 but after a time limit
    last_values = np.zeros_like(values)
    last_values[1:] = np.where(data.truncated, values[1:], 0.0)
    ends = terminated, data.truncated
    advantages = gae(rewards, values, *ends, args.gamma, args.gae_lambda)
    returns = gae(rewards, last_values, *ends, args.gamma, 1.0)
    return advantages, advantages + values[:-1] if args.lambda_returns else returns


def optimizers(agent: Agent) -> tuple[torch.optim.Adam, torch.optim.Adam]:
    """Adam for the policy's loss and for the critic's, each of all parameters: one without a
    gradient stays. Coady's rates, if none are given, depend on the second layers' units."""
    policy_rate = 9e-4 / math.sqrt(agent.actor[2].out_features)
    value_rate = 1e-2 / math.sqrt(agent.critic[2].out_features)
    logvar = [] if agent.discrete else [agent.actor_logvar]
    others = [p for p in agent.parameters() if p not in {*logvar}]
    # the original's log variance is the sum of `speed` equal parameters, and Adam moves each as far
    groups = [{"params": others, "speed": 1}]
    groups.append({"params": logvar, "speed": 100 * agent.outputs // 48})
    policy_adam = torch.optim.Adam(groups, policy_rate, eps=1e-8, fused=True)
    return policy_adam, torch.optim.Adam(agent.parameters(), value_rate, eps=1e-8, fused=True)


def fit_policy(agent: Agent, batch: Batch, args: Args) -> dict[str, float]:
    """Up to `update_epochs` passes over the batch, a step of Adam each, and the servo."""
    servo = agent.servo
    adam = agent.policy_adam
    rate = adam.defaults["lr"] if args.learning_rate is None else args.learning_rate
    for epoch in range(args.update_epochs + 1):
        # the loss that the next step descends also measures what the last one did
        loss, metrics = ppo_loss(agent, batch)
        means = torch.stack([*metrics.values()]).tolist()
        metrics = dict(zip(metrics, means, strict=True))
        servo.adapt_rate(metrics["kl"], rate)
        if epoch == args.update_epochs or metrics["kl"] > servo.early_stop * servo.kl_targ:
            break
        for group in adam.param_groups:
            group["lr"] = rate * servo.lr_multiplier * group["speed"]
        adam.zero_grad()
        loss.backward()
        adam.step()
    servo.adapt(metrics["kl"])
    charts = {"learning_rate": rate * servo.lr_multiplier, "lr_multiplier": servo.lr_multiplier}
    charts |= {"beta": servo.beta, "policy_passes": epoch}
    metrics = {f"losses/{name}": mean for name, mean in metrics.items()}
    return metrics | {f"charts/{name}": value for name, value in charts.items()}


def fit_value(agent: Agent, batch: Batch, args: Args):
    """Fit the value function to the returns of this batch and of the one before, whose features and
    returns stay as they were; then keep this batch in its place."""
    adam = agent.value_adam
    rate = args.value_learning_rate
    adam.param_groups[0]["lr"] = adam.defaults["lr"] if rate is None else rate
    features = batch.features
    returns = batch.returns
    # minibatches of 256 to 511; a pass shuffles all, but stops after as many as this batch has
    num_minibatches = max(len(returns) // 256, 1)
    width = len(returns) // num_minibatches
    if agent.replay:
        features = torch.cat([features, agent.replay[0]])
        returns = torch.cat([returns, agent.replay[1]])
    for _ in range(args.value_epochs):
        order = torch.as_tensor(agent.rng.permutation(len(returns)), device=returns.device)
        for rows in order[: num_minibatches * width].split(width):
            loss = (agent.critic(features[rows]).squeeze(-1) - returns[rows]).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    agent.replay = batch.features, batch.returns


def update(agent: Agent, data: Rollout, args: Args) -> dict[str, float]:
    """One iteration of learning from a rollout; returns the metrics."""
    device = agent.obs_moments.mean.device
    obs = torch.as_tensor(data.obs, device=device)
    # scaled as they were for acting; the next iteration's scale knows these observations, too
    features = agent.features(obs, torch.as_tensor(data.time, device=device))  # [T + 1, N, D + 1]
    agent.obs_moments.update(data.obs[:-1][data.valid])
    values = agent.critic(features).squeeze(-1).detach()  # [T + 1, N]
    both = advantages_and_returns(data, values.cpu().double().numpy(), args)
    advantages, returns = (x[data.valid] for x in both)  # [B]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    advantages, returns = (torch.tensor(x).to(values) for x in (advantages, returns))
    features = features[:-1][data.valid]
    actions = torch.as_tensor(data.actions[data.valid], device=device)
    with torch.no_grad():
        policy = agent.policy(features)
        logprobs = policy.log_prob(actions)
    fields = {"features": features, "actions": actions, "policy": policy, "logprobs": logprobs}
    batch = Batch(advantages=advantages, returns=returns, **fields)
    metrics = fit_policy(agent, batch, args)
    fit_value(agent, batch, args)
    error = returns - values[:-1][data.valid]  # of the values before the fit
    scale = returns.var(correction=0).clamp(min=1e-12)
    metrics["losses/value_loss"] = error.square().mean().item()
    metrics["losses/explained_variance"] = 1.0 - (error.var(correction=0) / scale).item()
    if not agent.discrete:
        metrics["charts/policy_std"] = (0.5 * agent.actor_logvar).exp().mean().item()
    return metrics


# --- rollout and training -------------------------------------------------------------------------
WARM_UP = 5  # episodes that set the first scale of observations, and serve nothing else


def rollout(agent: Agent, envs: "Envs | WorkerEnvs", run: "Run", num_episodes: int) -> Rollout:
    """Play whole episodes. As many begin as are needed, and all are played to their ends: taking
    the first that end, or cutting the last off, would favour short ones."""
    act = numpy_actor(agent)
    actions = np.zeros_like(act(envs.obs))
    envs.step(actions, envs.autoreset)  # begins episodes where the last ones ended
    playing = np.arange(len(actions)) < num_episodes  # [N], the others wait
    begun = np.count_nonzero(playing)  # episodes
    ended = 0  # episodes
    obs = [envs.obs.copy()]
    time = [np.zeros(len(actions), int)]
    steps = []  # actions, rewards, terminated, truncated, valid of each row, [N, ...]
    while ended < num_episodes:
        valid = playing & ~envs.autoreset
        rows = valid.nonzero()[0]
        actions[rows] = act(obs[-1][rows], agent.noise(len(rows)), time[-1][rows])
        rewards, terminated, truncated = envs.step(actions, playing)
        steps.append((actions.copy(), rewards, terminated, truncated, valid))
        obs.append(envs.obs.copy())
        time.append((time[-1] + 1) * valid)
        for i in (terminated | truncated).nonzero()[0]:
            ended += 1
            number, *_ = run.episodes[i]
            run.episodes[i] = number + 1, 0.0, []  # the next one
            playing[i] = begun < num_episodes  # plays another episode, or waits
            begun += playing[i]
        if len(steps) % 1000 == 0 and time[-1].max() > 100_000:
            raise TimeoutError("100,000 steps, no end: --max-episode-steps 1000")
    actions, rewards, terminated, truncated, valid = map(np.array, zip(*steps, strict=True))
    ends = {"terminated": terminated, "truncated": truncated, "valid": valid}
    data = Rollout(obs=np.array(obs), time=np.array(time), actions=actions, rewards=rewards, **ends)
    check_actor(agent, act, data.obs[:8, 0], data.time[:8, 0])
    return data


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    here = Path.cwd()  # an environment may change it
    envs = make_envs(args, args.num_envs, checkpoint)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = Agent(envs, args).to(device)
    agent.policy_adam, agent.value_adam = optimizers(agent)
    if args.resume:
        agent.load_state_dict(load(args.resume, envs)[0].state_dict())
        for name in ("policy_adam", "value_adam"):  # their rates are those of the arguments
            adam = getattr(agent, name)
            adam.load_state_dict(adam.state_dict() | {"state": checkpoint[name]})
        agent.servo = replace(agent.servo, **checkpoint["servo"])
        agent.replay = tuple(x.to(device) for x in checkpoint["replay"])
        agent.rng.bit_generator.state = checkpoint["rng"]
    with contextlib.closing(envs), Run(args, checkpoint, here) as run, stop_signals() as signals:
        run.bar.write("keep observations and rewards near 1 in size: docs/your_environment.md")
        save(run, agent)
        while not run.finished() and not signals:
            if run.iteration == 0:
                data = rollout(agent, envs, run, WARM_UP)
                agent.obs_moments.update(data.obs[:-1][data.valid])
            data = rollout(agent, envs, run, args.episodes_per_batch)
            run.log_rollout(data)  # rewards changed later are learned, not logged
            metrics = update(agent, data, args)
            check_finite(run.iteration, data._asdict() | metrics | agent.state_dict())
            run.log(metrics)
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent)
        save(run, agent)
    print_next_command(run, here, run.finished())
    if not run.finished():
        raise SystemExit(128 + signals[0])
    if args.capture_video:
        evaluate(replace(args, evaluate=run.folder))
    return run.folder


# ==== below this line nothing is PPO ==============================================================
# --- speed ----------------------------------------------------------------------------------------
@torch.no_grad()
def numpy_actor(agent: Agent):
    """`agent.act` with the present weights, in numpy, for rows [N, D], noise [N, A] and time [N].
    Once a rollout `check_actor` compares it with `policy`."""
    shift = agent.obs_moments.mean.float().cpu().numpy()
    scale = (1.0 / (3.0 * (agent.obs_moments.var.sqrt() + 0.1))).float().cpu().numpy()
    logvar = torch.zeros(()) if agent.discrete else agent.actor_logvar
    std = (0.5 * logvar).exp().cpu().numpy()
    output = as_numpy(agent.actor)

    def act(obs: np.ndarray, noise: np.ndarray | None = None, time=0) -> np.ndarray:
        x = np.empty((len(obs), len(shift) + 1), np.float32)
        x[:, :-1] = (obs - shift) * scale
        x[:, -1] = 0.001 * np.asarray(time)
        x = output(x)
        if noise is not None:
            x = x + std * noise
        return x.argmax(axis=-1) if agent.discrete else x

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
def check_actor(agent: Agent, act, obs: np.ndarray, time: np.ndarray):
    """Raise RuntimeError if `act` draws from another policy than `policy`, at observations [B, D]
    and times [B]."""
    device = agent.obs_moments.mean.device
    noise = np.random.default_rng(0).standard_normal((len(obs), agent.outputs), np.float32)
    actions = torch.as_tensor(act(obs, noise, time), device=device)
    obs, time, noise = (torch.as_tensor(x, device=device) for x in (obs, time, noise))
    policy = agent.policy(agent.features(obs, time))
    if agent.discrete:  # the scores that `act` has chosen are the highest, but for rounding
        scores = policy.logprobs + noise
        error = scores.max(dim=-1).values - scores.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    else:
        expected = policy.mean + (0.5 * policy.logvar).exp() * noise
        error = (actions - expected) / (1.0 + expected.abs())
    if (error.abs() > 0.01).any():
        raise RuntimeError("numpy_actor acts by another policy than `policy` learns")


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
    if not isinstance(actions, gym.spaces.Box | gym.spaces.Discrete):
        raise gym.error.Error(f"{actions}: a Box or Discrete is needed; several choices: ppo.py")


def episode_seed(*key: int) -> int:
    """The seed of an episode from (seed, environment, episode): no two runs share one. The global
    generators get it, too: most environments have their own, `np_random`, a few do not."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed


def env_actions(space: gym.Space, actions: np.ndarray) -> np.ndarray:
    """Choices [N], counted from 0, or actions [N, A] in the space's shape and type. They are not
    clipped; only whole numbers are cut at the bounds of their box."""
    if isinstance(space, gym.spaces.Discrete):
        return (actions + space.start).astype(space.dtype)
    shaped = actions.reshape(-1, *space.shape)
    if space.dtype.kind in "iub":
        shaped = np.rint(np.clip(shaped, space.low, np.nextafter(space.high, -np.inf)))
    return shaped.astype(space.dtype)  # a copy: the environment may change it


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

    def step(self, actions: np.ndarray, playing: np.ndarray):
        """Take actions [N, ...] in the environments that are `playing` [N]: rewards, terminated,
        truncated [N]. The others wait."""
        rewards = np.zeros(len(actions))
        terminated = np.zeros(len(actions), bool)
        truncated = np.zeros(len(actions), bool)
        rows = env_actions(self.action_space, actions)
        for i in playing.nonzero()[0]:
            if self.autoreset[i]:
                self.begin(i, self.episode_numbers[i] + 1)
            else:
                obs, reward, terminated[i], truncated[i], _ = self.envs[i].step(rows[i])
                self.obs[i] = np.reshape(obs, self.observation_space.shape)
                rewards[i] = np.asarray(reward).item()
            self.autoreset[i] = terminated[i] or truncated[i]
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
                reply = envs.step(*pipe.recv())
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

    def step(self, *rows: np.ndarray):
        """`Envs.step`: rewards, terminated, truncated [N]."""
        shares = zip(*[np.array_split(x, len(self.pipes)) for x in rows], strict=True)
        for pipe, share in zip(self.pipes, shares, strict=True):
            with contextlib.suppress(BrokenPipeError):  # `receive` says why
                pipe.send(share)
        return [np.concatenate(parts) for parts in self.receive()]

    def close(self):
        for pipe in self.pipes:
            pipe.close()


def make_envs(args: Args, num_envs: int, checkpoint: dict):
    """Environments of the kind that the arguments name, as the checkpoint left them."""
    episodes = checkpoint.get("episodes", [])
    try:
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
        # each environment's next episode: its number, return and actions so far
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
        total = None if args.num_episodes else args.total_timesteps
        self.bar = tqdm(total=total, unit="step", disable=None)
        self.bar.write(f"{args.env_id}, in {self.folder}")
        self.write_json("running")

    def __exit__(self, kind, *_):
        if kind is SystemExit:  # an environment's, which would end without a word
            traceback.print_exc()
        self.write_json("failed" if kind else "finished" if self.finished() else "running")
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        self.csv.close()

    def finished(self) -> bool:
        """Whether the budget, in steps or in episodes, is used up."""
        if not self.args.num_episodes:
            return self.global_step >= self.args.total_timesteps
        return sum(number for number, *_ in self.episodes) - WARM_UP >= self.args.num_episodes

    def log_rollout(self, data: Rollout):
        """Take in a rollout: log its episodes."""
        seconds = time.monotonic() - self.start
        steps = self.global_step + np.count_nonzero(data.valid, axis=1).cumsum()
        self.global_step = int(steps[-1])
        ended = []
        for t, i in np.argwhere(data.terminated | data.truncated):
            length = data.time[t + 1, i]
            score = float(data.rewards[t + 1 - length : t + 1, i].sum())
            ended.append((score, length))
            self.csv.write(f"{steps[t]},{seconds:.2f},{score},{length}\n")
            self.last_returns.append(score)
        score, length = np.mean(ended, axis=0)
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
    state["policy_adam"] = agent.policy_adam.state_dict()["state"]
    state["value_adam"] = agent.value_adam.state_dict()["state"]
    state["servo"] = {"beta": agent.servo.beta, "lr_multiplier": agent.servo.lr_multiplier}
    state |= {"replay": agent.replay, "rng": agent.rng.bit_generator.state}
    state |= {"global_step": run.global_step, "iteration": run.iteration}
    state |= {"seconds": time.monotonic() - run.start, "last_returns": list(run.last_returns)}
    state |= {"csv_size": run.csv.tell(), "wandb": run.wandb and run.wandb.id}
    state["episodes"] = [(n, score, torch.tensor(np.array(x))) for n, score, x in run.episodes]
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
        time = 0
        with contextlib.closing(envs), tqdm(unit="step", disable=None, leave=False) as bar:
            agent, _ = load(folder, envs)
            act = numpy_actor(agent)
            while len(scores) <= args.eval_episodes:
                noise = agent.noise(1) if name == "sampled" else None
                begins = envs.autoreset[0]  # an episode, with this step
                rewards, *_ = envs.step(act(envs.obs, noise, time), np.ones(1, bool))
                time = 0 if begins else time + 1
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
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):  # the original's environment name
        argv = ["--env-id", *argv]
    argv = [x.removesuffix("/checkpoint.pt") for x in argv if x]
    line = re.sub(r"(--\S+)[ =]True(?= |$)", r"\1", shlex.join(argv))  # CleanRL's older flags
    argv = shlex.split(re.sub(r"--(\S+)[ =]False(?= |$)", r"--no-\1", line))
    folder = "".join(re.findall(r"(?m)^--(?:resume|evaluate)[\n=](.*)", "\n".join(argv)))
    checkpoint = load_checkpoint(folder) if folder else {}
    saved = checkpoint.get("args", Args())
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    for name, value in vars(checkpoint.get("raw", saved)).items():
        if getattr(args, name) == getattr(saved, name) != value:  # it names a module or a file
            fail(f"{folder}: give --{name.replace('_', '-')} {shlex.quote(value)} again")
    for name in ("seed", "num_envs", "hid1_mult", "policy_logvar", "beta"):
        if args.resume and getattr(args, name) != getattr(saved, name):
            fail(f"{name}: {folder} keeps its {getattr(saved, name)}: leave the flag out")
    done = sum('"status": "finished"' in x.read_text() for x in Path(folder).glob("run.json"))
    steps = min(checkpoint.get("global_step", 0), saved.total_timesteps)
    steps += done and args.num_episodes == saved.num_episodes
    if args.resume and (args.total_timesteps < steps or "global_step" not in checkpoint):
        fail(f"{folder} has finished: a larger --total-timesteps goes on, not a policy alone")
    for package, needed in (("wandb", args.track), ("moviepy", args.capture_video)):
        if needed and importlib.util.find_spec(package) is None:
            fail(f"{package} is not installed: pip install {package}")
    return args


def fail(message: str):
    """Print one line to standard error and exit with code 2."""
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    args = parse_args()
    evaluate(args) if args.evaluate else train(args)
