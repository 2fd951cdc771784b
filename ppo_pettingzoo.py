# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "pettingzoo>=1.27,<1.28", "mpe2>=1.1",
#                 "pygame-ce", "numpy", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for several agents with shared parameters (PettingZoo), in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. One network plays every agent, from the
agent's own observation and number (IPPO: de Witt et al. 2020). Every iteration:

    1. take T steps in each of N environments of A agents with actions a ~ pi(a | o)
    2. A = GAE(lambda) for each agent: its death ends its chain, a time limit bootstraps from the
       value of the true last observation; rows of the dead, of those who wait for their turn, and
       the row after an episode's end (autoreset's) are never learned from
    3. for K epochs or until KL > target_kl, for each minibatch, with A normalised, r = pi / pi_old:
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_pettingzoo.py --env-id mpe2.simple_speaker_listener_v4    # or sisl/multiwalker_v9
    python ppo_pettingzoo.py --evaluate runs/RUN    # --resume runs/RUN goes on
    python ppo_pettingzoo.py --env-id mpe2.simple_spread_v3 --team-reward --critic concatenated
    python ppo_pettingzoo.py --env-id atari/pong_v3 --num-envs 8 --learning-rate 2.5e-4 \\
        --clip-coef 0.1 --eval-interval 200 --total-timesteps 10000000      # self-play from images

Expect a team return of -32 over the last 100 episodes of the first (500,000 steps, 3 minutes on one
CPU core). Left out: memory, a network for each agent, leagues, --compile.

In order: Args, agent, algorithm, rollout, train. Below the line after train nothing is PPO.
"""

import atexit
import contextlib
import copy
import fcntl
import importlib
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
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import pettingzoo
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from pettingzoo.env_registry.exceptions import PettingZooRegistryError
from pettingzoo.utils.conversions import turn_based_aec_to_parallel_wrapper
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one; networks this small gain little from it
    num_threads: int = 1  # CPU threads of torch; more than one rarely helps networks this small
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    capture_video: bool = False  # record the evaluation in RUN/videos; also with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, with sampled actions and greedily
    eval_episodes: int = 10  # episodes played by --evaluate
    eval_interval: int = 0  # iterations between games of two players for win rates; 0: none
    against: str = ""  # with --evaluate: the second player, RANDOM or the folder of another run
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Environments
    env_id: str = "mpe2.simple_speaker_listener_v4"  # or sisl/pursuit_v5, your module:function
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"NAME": 2}'
    num_envs: int = 16  # environments played side by side
    env_workers: int = 0  # processes for num_envs > 1; 0: the main process
    max_episode_steps: int | None = None  # truncate episodes after that many steps
    frame_stack: int = 0  # images (not vectors) seen at once; 0: 4 for Atari, or else 1
    action_repeat: int = 0  # steps an action is held; 0: 4 for Atari, or else 1
    agent_id: bool = True  # agents see their number, one-hot; turn it off for dozens that are alike
    action_masks: bool = True  # actions that the environment marks as invalid get probability 0

    # Algorithm
    critic: Literal["local", "concatenated"] = "local"  # what the value function sees: or of all
    team_reward: bool = False  # sum the rewards over agents; a death then ends no return
    value_norm: bool | None = None  # scale returns; None: with a joint reward or critic
    total_timesteps: int = 500_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 1e-3  # Adam's learning rate in the first iteration
    num_steps: int = 128  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = True  # also clip the change of the value
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient of all parameters is scaled down to this norm
    target_kl: float | None = None  # stop the epochs once the mean approx_kl of one exceeds this
    log_std_init: float = -0.7  # Box actions: initial log standard deviation, in half boxes
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute the last fields; raise ValueError, which tyro shows, for wrong arguments."""
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        may_be_0 = ["seed", "env_workers", "eval_interval", "frame_stack", "action_repeat"]
        least = dict.fromkeys(may_be_0, 0) | {"total_timesteps": self.batch_size}
        most = {"gamma": 1, "gae_lambda": 1, "num_minibatches": self.batch_size}
        for name, value in vars(self).items():
            low, high = least.get(name, int(type(value) is int)), most.get(name, math.inf)
            if type(value) in (int, float) and name != "log_std_init" and not low <= value <= high:
                why = " (an iteration is num_envs x num_steps)" * (self.batch_size in (low, high))
                raise ValueError(f"{name} is {value}: not in {low} ... {high}{why}")
        try:
            {**json.loads(self.env_kwargs)}
        except (TypeError, ValueError):
            raise ValueError(f"env_kwargs is {self.env_kwargs}: no JSON object") from None


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


def layer_init(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, biases 0 (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def nature_network(height: int, width: int, channels: int) -> nn.Sequential:
    """Nature's network for images [B, C, H, W] (Mnih et al. 2015; Atari detail 8)."""
    sizes = (channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)
    layers = [layer for x in sizes for layer in (layer_init(nn.Conv2d(*x)), nn.ReLU())]
    network = nn.Sequential(*layers, nn.Flatten())
    features = network(torch.zeros(1, channels, height, width)).shape[1]
    return network.extend([layer_init(nn.Linear(features, 512)), nn.ReLU()])


class Agent(nn.Module):
    """Policy and value function that all agents share, for environments like `env` (Envs).

    `obs` [..., A, W] has a row for each possible agent: its observation [D], its number one-hot,
    which choices are valid (of a Box: which dimensions it has) [C], whether it is there, whether it
    waits for its turn, and its image. `inputs` [..., A, I] is what the networks need of it.
    """

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        self.roles = Roles(env.observation_space, env.action_space, args)
        self.critic_kind = args.critic
        auto = args.team_reward or args.critic != "local"
        self.value_norm = auto if args.value_norm is None else args.value_norm
        num_agents, num_ids = self.roles.ids.shape
        self.actor_dim = self.roles.mask  # of an agent's observation and number
        self.outputs = self.roles.there - self.actor_dim  # C
        joint = num_agents * (self.roles.dim + 1) + num_ids
        frames, height, width, channels = self.roles.image_shape
        if frames:
            self.trunk = nature_network(height, width, frames * channels + self.actor_dim)
            self.critic = layer_init(nn.Linear(512, 1), gain=1.0)
            self.actor = layer_init(nn.Linear(512, self.outputs), gain=0.01)
        else:
            self.trunk = None  # two networks (detail 13)
            critic_dim = joint if args.critic == "concatenated" else self.actor_dim
            self.critic = mlp(critic_dim, 1, gain=1.0)
            self.actor = mlp(self.actor_dim, self.outputs, gain=0.01)
        if self.roles.boxes:  # a deviation for each dimension, the same in every state
            self.actor_logstd = nn.Parameter(torch.full((self.outputs,), args.log_std_init))
        self.value_moments = RunningMeanStd()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # of all agents
        self.rng = np.random.default_rng(args.seed)  # draws actions and minibatches

    def inputs(self, obs: torch.Tensor) -> torch.Tensor:
        """Inputs [..., A, I] of the networks from rows [..., A, W]: observation, number and choices
        for the actor and, behind them, what the critic sees. With images, the rows."""
        if self.trunk is not None:
            return obs
        critic_inputs = obs[..., : self.actor_dim]
        if self.critic_kind == "concatenated":  # all observations, who is there, whose value it is
            vectors, number = critic_inputs.tensor_split([self.roles.dim], dim=-1)
            joint = torch.cat([vectors.flatten(-2), obs[..., self.roles.there]], dim=-1)
            joint = joint.unsqueeze(-2).expand(*obs.shape[:-1], -1)
            critic_inputs = torch.cat([joint, number], dim=-1)
        return torch.cat([obs[..., : self.roles.there], critic_inputs], dim=-1)

    def policy(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of choices, or means of a Box's dimensions [..., C], and scaled values [...] at
        inputs [..., I]. A number, and all else beside an image, are planes of it (Gupta 2017)."""
        actor_inputs = inputs[..., : self.actor_dim]
        critic_inputs = inputs[..., self.roles.there :]
        if self.trunk is not None:
            rows = inputs.flatten(0, -2)
            images = rows[:, self.roles.pixels :].unflatten(1, self.roles.image_shape)
            images = images.movedim(4, 2).flatten(1, 2)  # [B, K, H, W]
            count = images.shape[1]
            shape = len(rows), count + self.actor_dim, *images.shape[2:]
            pixels = torch.empty(shape, device=rows.device, memory_format=torch.channels_last)
            pixels[:, :count] = images
            pixels /= self.roles.image_scale  # (Atari detail 9)
            pixels[:, count:] = rows[:, : self.actor_dim, None, None]
            actor_inputs = critic_inputs = self.trunk(pixels).unflatten(0, inputs.shape[:-1])
        outputs = self.actor(actor_inputs)
        if not self.roles.boxes:
            outputs = outputs.where(inputs[..., self.actor_dim : self.roles.there] > 0, -1e8)
        return outputs, self.critic(critic_inputs).squeeze(-1)

    def choose(self, outputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The likeliest (mean) actions [..., B] where `noise` is 0; where it is noise, samples."""
        if self.roles.boxes:
            return outputs + self.actor_logstd.exp() * noise
        parts = (outputs + noise).split(self.roles.choices, dim=-1)
        return torch.stack([part.argmax(dim=-1) for part in parts], dim=-1)

    def get_action_and_value(self, inputs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [M, B] (sampled unless given), its log-probability [M], entropy [M] and scaled
        value [M] at inputs [M, I]: choices in B branches, or B independent numbers, whose
        log-probabilities add up (MultiDiscrete detail 1). What an agent lacks adds none."""
        outputs, value = self.policy(inputs)
        if action is None:
            action = self.choose(outputs, torch.tensor(self.noise(*outputs.shape[:-1])).to(outputs))
        if self.roles.boxes:
            has = inputs[..., self.actor_dim : self.roles.there]
            logstd = self.actor_logstd
            z = (action - outputs) * torch.exp(-logstd)
            logprob = (-0.5 * z.square() - logstd - 0.5 * math.log(2.0 * math.pi)) * has
            entropy = (logstd + 0.5 * math.log(2.0 * math.pi * math.e)) * has
            return action, logprob.sum(-1), entropy.sum(-1), value
        logprobs = [part.log_softmax(-1) for part in outputs.split(self.roles.choices, dim=-1)]
        choices = zip(logprobs, action.split(1, dim=-1), strict=True)
        logprob = sum(part.gather(-1, choice).squeeze(-1) for part, choice in choices)
        entropy = sum(-(part.exp() * part).sum(dim=-1) for part in logprobs)
        return action, logprob, entropy, value

    def act(self, observations: dict, noise: np.ndarray | None = None, infos: dict | None = None):
        """The likeliest (mean) actions of some agents, by name, at their observations, by name;
        given `noise(len(observations))`, samples. Masks may be in observations or in `infos`."""
        infos = infos or {}
        rows = [self.roles.row(x, obs, infos.get(x, {})) for x, obs in observations.items()]
        actions = zip(observations, self.act_on_rows(np.stack(rows), noise), strict=True)
        return {name: self.roles.env_action(name, action) for name, action in actions}

    @torch.no_grad()
    def act_on_rows(self, rows: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """`act` from rows [..., W] to actions [..., B] as the networks have them."""
        outputs, _ = self.policy(self.inputs(torch.as_tensor(rows, device=self.steps.device)))
        noise = torch.as_tensor(0.0 if noise is None else noise).to(outputs)
        return self.choose(outputs, noise).cpu().numpy()

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions, for choices Gumbel's: the argmax of logits with it samples."""
        draw = self.rng.standard_normal if self.roles.boxes else self.rng.gumbel
        return draw(size=(*shape, self.outputs)).astype(np.float32)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float, waits=False):
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values and waits [T + 1, ...].

    While an agent waits for its turn, its last action gets what comes: rewards, undiscounted, an
    end, or the value and the advantage of its next action."""
    rewards = rewards.copy()
    values = values.copy()
    terminated = terminated.copy()
    ended = np.logical_or(terminated, truncated)
    waits = np.broadcast_to(waits, values.shape)
    for t in range(1, len(values)):  # who waits after the last row: its last value is the best one
        values[t] = np.where(waits[t], values[t - 1], values[t])
    advantages = np.zeros_like(values)
    for t in reversed(range(len(rewards))):
        future = gamma * np.where(terminated[t], 0.0, values[t + 1])
        future += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
        advantages[t] = np.where(waits[t], advantages[t + 1], rewards[t] + future - values[t])
        values[t] = np.where(waits[t], values[t + 1], values[t])
        if t > 0:
            rewards[t - 1] += np.where(waits[t], rewards[t], 0.0)
            terminated[t - 1] |= waits[t] & terminated[t]
            ended[t - 1] |= waits[t] & ended[t]
    return advantages[:-1]


class Rollout(NamedTuple):
    obs: np.ndarray  # [T + 1, N, A, W], rows as the Agent describes them
    actions: np.ndarray  # [T, N, A, B]
    rewards: np.ndarray  # [T, N, A]
    terminated: np.ndarray  # [T, N, A]
    truncated: np.ndarray  # [T, N, A]
    acts: np.ndarray  # [T, N, A], the agent lived and chose an action: its policy learns
    valid: np.ndarray  # [T, N, A], its value function learns; not after an episode's end
    waits: np.ndarray  # [T + 1, N, A], the agent lived and could not act


class Batch(NamedTuple):
    inputs: torch.Tensor  # [M, I]
    actions: torch.Tensor  # [M, B]
    logprobs: torch.Tensor  # [M], before the update
    advantages: torch.Tensor  # [M]
    returns: torch.Tensor  # [M], scaled like the value
    values: torch.Tensor  # [M], before the update
    acts: torch.Tensor  # [M], 0 where only the value function learns, else 1


def ppo_loss(agent: Agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M], and its metrics."""
    _, logprob, entropy, value = agent.get_action_and_value(batch.inputs, batch.actions)
    logratio = logprob - batch.logprobs
    ratio = logratio.exp()

    def mean(x):  # over rows of agents that acted
        return (x * batch.acts).sum() / batch.acts.sum().clamp(min=1.0)

    advantages = batch.advantages
    if args.norm_adv:  # per minibatch (detail 7)
        advantages = advantages - mean(advantages)
        count = batch.acts.sum()
        variance = mean(advantages.square()) * count / (count - 1.0).clamp(min=1.0)
        advantages = advantages / (variance.sqrt() + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -mean(torch.min(ratio * advantages, clipped * advantages))

    error = (value - batch.returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        change = (value - batch.values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (batch.values + change - batch.returns).square())
    value_loss = 0.5 * error.mean()

    entropy = mean(entropy)  # its bonus keeps the policy exploring (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -mean(logratio), "approx_kl": mean(ratio - 1.0 - logratio)}
    return loss, metrics | {"clipfrac": mean((ratio != clipped).float())}


def update(agent: Agent, data: Rollout, args: Args) -> dict[str, float]:
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    device = agent.steps.device
    inputs = agent.inputs(torch.as_tensor(data.obs, device=device))  # [T + 1, N, A, I]
    actions = torch.as_tensor(data.actions, device=device)
    with torch.no_grad():  # the last observations have no action
        pairs = zip(inputs, [*actions, actions[-1]], strict=True)
        results = [agent.get_action_and_value(*pair) for pair in pairs]
    _, logprobs, _, scaled_values = (torch.stack(x) for x in zip(*results, strict=True))
    values = scaled_values
    moments = agent.value_moments
    if agent.value_norm:
        values = (values * (moments.var + 1e-8).sqrt() + moments.mean).float()
    numpy_values = values.cpu().double().numpy()  # for GAE (detail 5)
    ends = data.terminated, data.truncated
    advantages = gae(data.rewards, numpy_values, *ends, args.gamma, args.gae_lambda, data.waits)
    advantages = torch.tensor(advantages).to(values)
    returns = advantages + values[:-1]
    if agent.value_norm and data.valid.any():
        moments.update(returns.cpu().numpy()[data.valid])
        returns = ((returns - moments.mean) / (moments.var + 1e-8).sqrt()).float()
    acts = torch.as_tensor(data.acts, device=device).float()
    fields = {"inputs": inputs[:-1], "actions": actions, "logprobs": logprobs[:-1], "acts": acts}
    fields |= {"advantages": advantages, "returns": returns, "values": scaled_values[:-1]}
    batch = Batch(**{name: x.flatten(0, 2) for name, x in fields.items()})  # M = T * N * A

    rows = np.flatnonzero(data.valid)  # the rows to learn from
    num_minibatches = min(args.num_minibatches, len(rows) // 2)  # at least two rows in each
    if num_minibatches == 0:  # nothing to learn from
        return {}
    results = []  # metrics of each step
    agent.adam.param_groups[0]["lr"] = args.learning_rate
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(rows), device=device)
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(num_minibatches):
            loss, metrics = ppo_loss(agent, args, Batch(*[x[minibatch] for x in batch]))
            agent.adam.zero_grad()
            loss.backward()
            # over all parameters (detail 11)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            agent.adam.step()
            results.append(torch.stack([*metrics.values()]).detach())
        approx_kl = torch.stack(results[-num_minibatches:])[:, [*metrics].index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    agent.steps += int(np.count_nonzero(data.acts))
    means = torch.stack(results).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    error = (batch.returns - batch.values)[rows].var()
    scale = batch.returns[rows].var()
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    return metrics | {"charts/agent_steps": agent.steps.item()}


# --- rollout and training -------------------------------------------------------------------------
def rollout(agent: Agent, envs: "Envs | WorkerEnvs", run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1)."""
    T = args.num_steps
    N, A, W = envs.obs.shape
    obs = np.zeros((T + 1, N, A, W), envs.obs.dtype)
    actions = []
    rewards = np.zeros((T, N, A))
    terminated = np.zeros((T, N, A), bool)
    truncated = np.zeros((T, N, A), bool)
    autoreset = np.zeros((T + 1, N), bool)  # rows whose step ignores its action, and resets
    noise = agent.noise(T, N, A)
    for t in range(T):
        obs[t] = envs.obs
        autoreset[t] = envs.autoreset
        actions.append(agent.act_on_rows(obs[t], noise[t]))
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t])
    obs[T] = envs.obs
    autoreset[T] = envs.autoreset
    actions = np.stack(actions)  # [T, N, A, B]
    over = autoreset[1:, :, None]  # [T, N, 1], the step ended an episode
    run.log_rollout(agent.roles.names, actions, rewards, autoreset)  # rewards as they are
    acts = obs[:T, ..., agent.actor_dim : agent.roles.there].any(axis=-1)
    waits = obs[..., agent.roles.waits] > 0
    valid = acts
    if is_ale(args.env_id):  # (Atari detail 6)
        rewards = np.sign(rewards)
    if args.team_reward:  # all get one reward and one end; the value goes on after a death
        rewards = rewards.sum(axis=-1, keepdims=True).repeat(A, axis=-1)
        limit = (truncated & ~terminated).any(axis=-1, keepdims=True)
        terminated = (over & ~limit).repeat(A, axis=-1)
        truncated = (over & limit).repeat(A, axis=-1)
        valid = ~autoreset[:T, :, None] & ~waits[:T]
    ends = {"terminated": terminated, "truncated": truncated, "valid": valid, "waits": waits}
    return Rollout(obs=obs, actions=actions, rewards=rewards, acts=acts, **ends)


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    here = Path.cwd()  # an environment may change it
    envs = make_envs(args, args.num_envs, checkpoint)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = Agent(envs, args).to(device)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # (detail 3)
    if args.resume:
        agent.load_state_dict(load(args.resume, envs)[0].state_dict())
        agent.adam.load_state_dict(agent.adam.state_dict() | {"state": checkpoint["adam"]})
        agent.rng.bit_generator.state = checkpoint["rng"]
    with contextlib.closing(envs), Run(args, checkpoint, here) as run, stop_signals() as signals:
        run.bar.write("keep observations and rewards near 1 in size: docs/your_environment.md")
        save(run, agent)
        while run.iteration < args.num_iterations and not signals:
            scheduled = copy.copy(args)  # coefficients that fall are set here, and only here
            if args.anneal_lr:
                scheduled.learning_rate *= 1.0 - run.iteration / args.num_iterations  # (detail 4)
            data = rollout(agent, envs, run, args)
            metrics = update(agent, data, scheduled)
            check_finite(run.iteration, data._asdict() | metrics | agent.state_dict())
            if args.eval_interval and (run.iteration + 1) % args.eval_interval == 0:
                metrics |= win_rates(agent, run)
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
# --- spaces of observations and actions -----------------------------------------------------------
def branches(space: gym.Space) -> list[int]:
    """How many choices each branch has: a Discrete space is one, a MultiBinary one n of two. A Box
    is one branch with its dimensions."""
    if isinstance(space, Box) and space.dtype.kind == "f":
        return [math.prod(space.shape)]
    if isinstance(space, Discrete):
        return [int(space.n)]
    if isinstance(space, MultiBinary):
        return [2] * math.prod(space.shape)
    if isinstance(space, MultiDiscrete):
        return space.nvec.ravel().tolist()
    raise gym.error.Error(f"{space}: choices are needed, or a Box of real numbers")


class Roles:
    """The observations and actions of A agents, padded to one shape, from Dicts of their spaces. An
    observation is a vector, or an image [H, W] or [H, W, channels] and a vector of all else."""

    def __init__(self, observation_space, action_space, args: Args):
        self.args = args
        self.names = list(action_space)
        self.parts = []  # of each agent's vector, by their keys
        self.image_keys = []  # of each agent; None: it sees no image
        images = []
        for name, space in observation_space.items():
            parts = dict(space) if isinstance(space, gym.spaces.Dict) else {"": space}
            parts.pop("action_mask", None)
            wide = [k for k, x in parts.items() if len(x.shape or ()) > 1 and min(x.shape[:2]) > 35]
            self.image_keys.append(wide[0] if wide else None)
            images.append(parts.pop(self.image_keys[-1], None))
            self.parts.append(parts)
            flat = all(part.is_np_flattenable for part in parts.values())
            shapes = {image and image.shape for image in images}
            if not flat or len(shapes) > 1 or sum(map(gym.spaces.flatdim, parts.values())) > 20_000:
                message = "20,000 numbers are the most, beside one image, channels last, all alike"
                raise gym.error.Error(f"{name} observes {space}: {message}")
        if images[0] and args.critic != "local":
            raise gym.error.Error(f"--critic {args.critic}: of vectors, not of images")
        if (args.eval_interval or args.against) and len(self.names) != 2:
            raise gym.error.Error("--eval-interval, --against: win rates are of two players")
        self.image_shape = (0, 0, 0, 0)  # [F, H, W, channels], F: of the stack
        if images[0]:
            self.raw_shape = images[0].shape
            height, width, *channels = self.raw_shape
            shrink = math.ceil(min(height, width) / 96)
            size = (84, 84) if is_ale(args.env_id) else (height // shrink, width // shrink)
            frames = args.frame_stack or (4 if is_ale(args.env_id) else 1)
            self.image_shape = frames, *size, math.prod(channels)
            self.image_scale = 255.0 if images[0].dtype == np.uint8 else 1.0
        self.actions = list(action_space.values())
        self.boxes = isinstance(self.actions[0], Box)
        counts = [branches(space) for space in self.actions]
        kinds = {(isinstance(x, Box), len(n)) for x, n in zip(self.actions, counts, strict=True)}
        if len(kinds) > 1:
            raise gym.error.Error(f"{action_space}: all Boxes, or all with as many branches")
        self.choices = np.max(counts, axis=0).tolist()  # the most of each branch; C in all
        self.starts = np.cumsum([0, *self.choices[:-1]])
        has = [[np.arange(n) < k for n, k in zip(self.choices, x, strict=True)] for x in counts]
        self.has = np.array([np.hstack(parts) for parts in has])  # [A, C], bool
        ids = len(self.names) if args.agent_id and len(self.names) > 1 else 0
        self.ids = np.eye(len(self.names))[:, :ids]  # one-hot
        self.sizes = [sum(map(gym.spaces.flatdim, parts.values())) for parts in self.parts]
        self.dim = max(self.sizes)  # D
        self.mask = self.dim + ids  # where in a row the mask begins
        self.there = self.mask + self.has.shape[1]
        self.waits = self.there + 1
        self.pixels = self.there + 2  # where an image begins
        self.width = self.pixels + math.prod(self.image_shape)  # W
        self.dtype = np.uint8 if self.dim == 0 and images[0].dtype == np.uint8 else np.float32

    def row(self, name: str, observation, info: dict) -> np.ndarray:
        """The row [W], of bytes if only images of bytes are seen, of an agent that is there."""
        i = self.names.index(name)
        mask = info.get("action_mask", info.get("legal_action_mask"))
        observation = observation if isinstance(observation, dict) else {"": observation}
        mask = observation.get("action_mask", mask)
        valid = self.has[i].copy()
        if mask is not None and self.args.action_masks:
            mask = np.hstack(mask).ravel()
            if len(mask) != valid.sum():
                raise ValueError(f"{name} has a mask of {len(mask)} for {valid.sum()} choices")
            valid[valid] = mask > 0
            if valid.any() and not np.add.reduceat(valid, self.starts, dtype=int).all():
                raise ValueError(f"the action mask {mask} of {name} leaves a branch empty")
        flat = [gym.spaces.flatten(part, observation[k]) for k, part in self.parts[i].items()]
        flat = np.hstack([(), *flat]).reshape(self.sizes[i])
        parts = flat, np.zeros(self.dim - len(flat)), self.ids[i], valid, (1, 0)
        if self.image_shape[0]:
            parts = *parts, self.image(observation[self.image_keys[i]])
        return np.concatenate(parts, dtype=self.dtype, casting="unsafe")

    def image(self, x: np.ndarray) -> np.ndarray:
        """A stack of images, all the same one, as the agent sees it, flat."""
        x = np.reshape(x, (*self.raw_shape[:2], -1))
        x = np.ascontiguousarray(x, np.uint8 if x.dtype == np.uint8 else np.float32)
        frames, *size, _ = self.image_shape
        if size != [*self.raw_shape[:2]]:
            pixels = torch.as_tensor(x).permute(2, 0, 1)[None]
            how = {"size": size, "mode": "bilinear", "antialias": True}
            x = nn.functional.interpolate(pixels, **how)[0].permute(1, 2, 0).numpy()
        return np.tile(x.ravel(), frames)

    def env_action(self, name: str, action: np.ndarray):
        """An agent's action [B] as its environment wants it: choices from its first one on; numbers
        scaled from -1 ... 1 to the Box, if that has bounds, and clipped to it. The agent learns
        from its own actions, which are not clipped (continuous detail 5)."""
        space = self.actions[self.names.index(name)]
        action = action[: math.prod(space.shape)].reshape(space.shape)
        if not self.boxes:
            return (action + getattr(space, "start", 0)).astype(space.dtype)[()]
        low = space.low.astype(np.float64)  # as exact as the result
        high = space.high.astype(np.float64)
        bounded = high - low < 3e38  # some write their largest number for infinity
        scaled = np.where(bounded, (low + high) / 2 + (high - low) / 2 * action, action)
        return np.clip(scaled, low, high).astype(space.dtype)


# --- environments ---------------------------------------------------------------------------------
KNOWN_PACKAGES = {"lbforaging", "magent2", "mpe2", "pettingzoo", "rware"}  # a folder may name them


def is_known(env_id: str) -> bool:
    """Whether an id names no module, or one of the packages above."""
    module, colon, name = env_id.rpartition(":")
    if colon:
        return module in KNOWN_PACKAGES and not name.isidentifier()  # no function of theirs
    return "/" in name or "." not in name or name.split(".")[0] in KNOWN_PACKAGES


def is_ale(env_id: str) -> bool:
    """Whether it is a game of PettingZoo's ALE, for two players or more."""
    return env_id.startswith(("atari/", "pettingzoo.atari."))


def make_env(env_id: str, /, **options):
    """An environment in the form of PettingZoo's parallel ones. Its id is a module
    (mpe2.simple_spread_v3), a name of PettingZoo (sisl/pursuit_v5) or of gymnasium (CartPole-v1,
    lbforaging:Foraging-8x8-2p-2f-coop-v3), or module:function of your own, which returns either."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs no display
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    make = partial(gym.make, env_id, disable_env_checker=True)
    module, _, name = env_id.rpartition(":")
    if module:
        make = getattr(importlib.import_module(module), name, make)
    elif "/" in name:
        kind = "parallel" if name.replace("_v", "-v") in pettingzoo.parallel_registry else "aec"
        make = partial(pettingzoo.make, kind, name)
    elif "." in name:
        scenario = importlib.import_module(name)
        make = getattr(scenario, "parallel_env", None) or scenario.env
    if is_ale(env_id):  # grey images, and the ROMs of ale-py
        roms = str(Path(importlib.import_module("ale_py").__file__).parent)
        options = {"obs_type": "grayscale_image", "auto_rom_install_path": roms} | options
        return make(**options).unwrapped
    env = make(**options)
    if isinstance(env, pettingzoo.AECEnv):
        return turn_based_aec_to_parallel_wrapper(env)
    return FromGymnasium(env, partial(make, **options)) if isinstance(env, gym.Env) else env


class FromGymnasium:
    """A gymnasium environment of one agent or, with Tuple spaces, of several, as PettingZoo's are.
    Those of several are made anew for each episode: lbforaging's depend on the one before."""

    def __init__(self, env: gym.Env, make):
        self.env = env
        self.make = make
        self.several = isinstance(env.action_space, gym.spaces.Tuple)
        count = len(env.action_space) if self.several else 1
        self.possible_agents = [f"agent_{i}" for i in range(count)]
        self.observation_space = self.by_name(env.observation_space).get
        self.action_space = self.by_name(env.action_space).get

    def by_name(self, values) -> dict:
        return dict(zip(self.possible_agents, values if self.several else [values], strict=True))

    def reset(self, seed: int):
        if self.several:
            self.env.close()
            self.env = self.make()
        obs, info = self.env.reset(seed=seed)
        self.agents = self.possible_agents
        return self.by_name(obs), dict.fromkeys(self.agents, info)

    def step(self, actions: dict):
        action = tuple(actions.values()) if self.several else actions["agent_0"]
        obs, rewards, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self.agents = []
        same_for_all = [dict.fromkeys(actions, x) for x in (terminated, truncated, info)]
        return self.by_name(obs), self.by_name(rewards), *same_for_all

    def __getattr__(self, name: str):
        return getattr(self.env, name)  # render, close, state


def episode_seed(*key: int) -> int:
    """The seed of an episode from (seed, environment, episode): no two runs share one. The global
    generators get it, too: most environments have their own, `np_random`, a few do not."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed


class Envs:
    """Environments in this process, stepped one after the other; `indices` are theirs in the run.
    Every episode has its own seed, so it can be played again on resuming. Autoreset is "next step":
    the step that ends an episode returns its true last observations; the next one ignores its
    actions and returns a new episode's first observations with rewards 0."""

    def __init__(self, args: Args, indices, episodes: list):
        self.args = args
        self.indices = indices
        self.envs = []
        for index in indices:
            episode_seed(args.seed, index)  # for what a constructor draws
            self.envs.append(make_env(args.env_id, **json.loads(args.env_kwargs)))
        env = self.envs[0]
        names = env.possible_agents  # pairs keep their order in a Dict
        self.observation_space = gym.spaces.Dict([(x, env.observation_space(x)) for x in names])
        self.action_space = gym.spaces.Dict([(x, env.action_space(x)) for x in names])
        self.roles = Roles(self.observation_space, self.action_space, args)
        self.takes_turns = isinstance(env, turn_based_aec_to_parallel_wrapper)
        self.episode_numbers = [0] * len(self.envs)
        self.lengths = [0] * len(self.envs)  # of the running episodes
        self.autoreset = np.zeros(len(self.envs), bool)  # [N], the next step begins an episode
        self.rows = [None] * len(self.envs)
        for i in range(len(self.envs)):
            number, _, actions = episodes[indices[i]] if episodes else (0, 0.0, [])
            self.begin(i, number)
            for action in tqdm(actions, "replay", disable=len(actions) < 100_000):
                self.play(i, action)
        self.obs = np.stack(self.rows)  # [N, A, W]

    def begin(self, i: int, number: int):
        """Begin an environment's episode of this number."""
        self.episode_numbers[i] = number
        self.lengths[i] = 0
        self.autoreset[i] = False
        seed = episode_seed(self.args.seed, self.indices[i], number)
        limit = 2**31 if self.takes_turns else 2**32  # OpenSpiel's seeds
        observations, infos = self.envs[i].reset(seed=seed % limit)
        self.rows[i] = self.read(i, observations, infos, self.envs[i].agents)

    def play(self, i: int, actions: np.ndarray):
        """Hold actions [A, B] until an agent ends, at most: rewards, terminated, truncated [A]."""
        env = self.envs[i]
        names = self.roles.names
        pairs = zip(names, actions, strict=True)
        acting = {x: self.roles.env_action(x, action) for x, action in pairs if x in env.agents}
        rewards = dict.fromkeys(names, 0.0)
        observations = {}
        for _ in range(self.args.action_repeat or (4 if is_ale(self.args.env_id) else 1)):
            before = observations
            observations, gains, terminated, truncated, infos = env.step(copy.deepcopy(acting))
            rewards = {x: rewards[x] + np.asarray(gains.get(x, 0.0)).item() for x in names}
            if any(terminated.values()) or any(truncated.values()) or acting.keys() - env.agents:
                break
        if before and is_ale(self.args.env_id):  # all see one screen (Atari detail 2)
            screen = np.maximum(*[next(iter(x.values())) for x in (before, observations)])
            observations = dict.fromkeys(observations, screen)
        self.lengths[i] += 1
        limit = self.lengths[i] == self.args.max_episode_steps
        stopped = {name for name in acting if truncated.get(name, False) or limit}
        staying = {*env.agents, *stopped}  # who leaves without an end has died
        dead = {name for name in acting if terminated.get(name, False) or name not in staying}
        living = set() if limit else set(env.agents) - dead - stopped
        self.autoreset[i] = not living
        observations = {name: x for name, x in observations.items() if name not in dead}
        self.rows[i] = self.read(i, observations, infos, living)
        results = [(rewards[name], name in dead, name in stopped) for name in names]
        return zip(*results, strict=True)

    def read(self, i: int, observations: dict, infos: dict, living) -> np.ndarray:
        """An environment's rows [A, W], as the Agent describes them, when these agents live."""
        roles = self.roles
        waits_for = self.envs[i].aec_env.agent_selection if self.takes_turns else None
        rows = np.zeros((len(roles.names), roles.width), roles.dtype)
        rows[:, roles.dim : roles.mask] = roles.ids
        for k, name in enumerate(roles.names):
            if name in observations:
                rows[k] = roles.row(name, observations[name], (infos or {}).get(name) or {})
                valid = rows[k, roles.mask : roles.there]
                if name not in living or waits_for not in (None, name):
                    valid[:] = 0.0
                rows[k, roles.waits] = name in living and not valid.any()
        if self.lengths[i]:  # the images before, and one that is new
            size = math.prod(roles.image_shape[1:])
            past = slice(roles.pixels, roles.width - size)
            rows[:, past] = self.rows[i][:, past.start + size :]
        return rows

    def step(self, actions: np.ndarray):
        """Take actions [N, A, B]: rewards, terminated, truncated [N, A]."""
        rewards = np.zeros(actions.shape[:2])
        terminated = np.zeros(actions.shape[:2], bool)
        truncated = np.zeros(actions.shape[:2], bool)
        for i, action in enumerate(actions):
            if self.autoreset[i]:
                self.begin(i, self.episode_numbers[i] + 1)
            else:
                rewards[i], terminated[i], truncated[i] = self.play(i, action)
        self.obs = np.stack(self.rows)
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


def make_envs(args: Args, num_envs: int, checkpoint: dict):
    """Environments of the kind that the arguments name, as the checkpoint left them."""
    episodes = checkpoint.get("episodes", [])
    try:
        if args.env_workers and num_envs > 1:
            return WorkerEnvs(args, episodes)
        return Envs(args, range(num_envs), episodes)
    except (gym.error.Error, PettingZooRegistryError, ImportError, SystemExit) as error:
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
        self.past = checkpoint.get("past")  # weights at the last win rates
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
        score = score + rewards[rows, i].sum(axis=0)
        past_actions = np.asarray(past_actions, actions.dtype).reshape(-1, *actions.shape[2:])
        return number + len(resets), score, np.concatenate((past_actions, actions[rows, i]))

    def log_rollout(self, names: list[str], actions, rewards, autoreset):
        """Take in a rollout [T, N, A, ...], autoreset [T + 1, N]: log the episodes that ended."""
        seconds = time.monotonic() - self.start
        steps = self.global_step + np.count_nonzero(~autoreset[:-1], axis=1).cumsum()
        self.global_step = int(steps[-1])
        rows = actions, rewards, autoreset
        ended = [(t, *self.episode(i, t + 1, *rows)) for t, i in np.argwhere(autoreset[1:])]
        self.episodes = [self.episode(i, len(steps), *rows) for i in range(len(self.episodes))]
        for t, _, score, past_actions in ended:
            self.last_returns.append(float(score.mean()))
            self.csv.write(f"{steps[t]},{seconds:.2f},{score.mean()},{len(past_actions)}\n")
        if ended:
            score = np.mean([score for _, _, score, _ in ended], axis=0)  # [A]
            line = f"global_step={self.global_step}, episodic_return={score.mean():.4f}"
            self.bar.write(f"{line}, episodes={len(ended)}, SPS={self.global_step / seconds:.0f}")
            values = {"episodic_return": score.mean(), "team_return": score.sum()}
            values["episodic_length"] = np.mean([len(past_actions) for *_, past_actions in ended])
            if len(names) <= 8:
                values |= {f"return/{name}": x for name, x in zip(names, score, strict=True)}
            for name, value in values.items():
                self.writer.add_scalar(f"charts/{name}", value, self.global_step)

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
    state |= {"adam": agent.adam.state_dict()["state"], "rng": agent.rng.bit_generator.state}
    state |= {"global_step": run.global_step, "iteration": run.iteration}
    state |= {"seconds": time.monotonic() - run.start, "last_returns": list(run.last_returns)}
    state["csv_size"] = (run.folder / "episodes.csv").stat().st_size
    state |= {"wandb": run.wandb and run.wandb.id, "past": run.past}
    rows = run.episodes
    state["episodes"] = [(n, np.array(y).tolist(), torch.tensor(np.array(x))) for n, y, x in rows]
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
    args = replace(raw)
    if not is_known(raw.env_id):
        args.env_id = raw.env_id.rpartition(":")[2].rpartition(".")[2]
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
    """Raise FloatingPointError that names the first value with a NaN or an infinity."""
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"iteration {iteration}: {name} is not finite")


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


def play_games(args: Args, envs: Envs, players: list[Agent], name: str = "", frames=None):
    """Returns [episodes, A] of an agent that plays all sides, or of two players, the first's first,
    who change sides after each game. Actions are drawn, but for the name "greedy". Episodes are
    printed under a name; drawings of the first one go to `frames`."""
    envs.begin(0, number=0)
    envs.obs = np.stack(envs.rows)
    returns = []
    scores = 0.0
    while len(returns) < args.eval_episodes:
        actions = []
        for player in players:
            noise = None if name == "greedy" else player.noise(*envs.obs.shape[:2])
            actions.append(player.act_on_rows(envs.obs, noise))
        side = len(returns) % len(players)
        actions[0][:, 1 - side : 2 - side] = actions[-1][:, 1 - side : 2 - side]
        rewards, *_ = envs.step(actions[0])
        scores = scores + rewards[0]
        if frames is not None and not returns:
            frames.append(envs.envs[0].render())
        if envs.autoreset[0]:
            scores = scores[::-1] if side else scores
            if name:
                line = f"episodic_return={scores.mean():.2f} team_return={scores.sum():.2f}"
                line += f" points={scores.tolist()}" if len(players) > 1 else ""
                print(f"{name}_episode={len(returns)}, {line}", flush=True)
            returns.append(scores)
            scores = 0.0
    return np.array(returns)


def rival(agent: Agent, weights: dict | None = None) -> Agent:
    """An agent with these weights or, by default, one to which all choices are equally likely."""
    weights = weights or {k: x * ("actor." not in k) for k, x in agent.state_dict().items()}
    player = copy.deepcopy(agent)  # with a generator of its own
    player.load_state_dict(weights)
    return player


def win_rates(agent: Agent, run: Run) -> dict[str, float]:
    """Shares of games won (draws: half) against a random player, and itself at the last call."""
    args = replace(run.args, seed=episode_seed(run.args.seed, 2**31, run.iteration))
    now = copy.deepcopy(agent.state_dict())
    rates = {}
    with contextlib.closing(make_envs(args, 1, {})) as envs:
        for name, weights in {"random": None, "past": run.past or now}.items():
            scores = play_games(args, envs, [rival(agent, now), rival(agent, weights)])
            rates[f"charts/win_rate_{name}"] = 0.5 + 0.5 * np.sign(scores @ [1, -1]).mean()
    run.past = now
    return rates


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate`, sampled and greedily, or against another; returns the
    sampled returns, means over agents. `capture_video` records the first into its videos/."""
    here = Path.cwd()  # an environment may change it
    options = json.loads(args.env_kwargs)
    if args.capture_video:
        options["render_mode"] = "rgb_array"
    args = replace(args, seed=episode_seed(args.seed, 2**31), env_kwargs=json.dumps(options))
    frames = [] if args.capture_video else None
    with contextlib.closing(make_envs(args, 1, {})) as envs:
        players = [load(here / args.evaluate, envs)[0]]
        if args.against:
            folder = None if args.against == "RANDOM" else here / args.against
            players += [rival(players[0], folder and load_checkpoint(folder)["agent"])]
        returns = {"sampled": play_games(args, envs, players, "eval", frames)}
        if not args.against:
            returns["greedy"] = play_games(args, envs, players, "greedy")
    if args.capture_video:
        from gymnasium.utils.save_video import save_video  # needs moviepy

        save_video(frames, str(here / args.evaluate / "videos"), lambda _: True, fps=15)
        print(f"filmed into {here / args.evaluate / 'videos'}")
    for name, done in returns.items():
        kinds = {"mean": done.mean(axis=1), "sum": done.sum(axis=1)}
        parts = [f"{k} over agents {x.mean():.2f} +- {x.std():.2f}" for k, x in kinds.items()]
        print(f"{name}, {len(done)} episodes: {', '.join(parts)}")
    if args.against:
        rate = 0.5 + 0.5 * np.sign(done @ [1, -1]).mean()
        print(f"points {done.mean(axis=0)}, win rate {rate:.3f}")
    return np.mean(returns["sampled"], axis=1).tolist()


# --- command line ---------------------------------------------------------------------------------
def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's."""
    argv = [x.removesuffix("/checkpoint.pt") for x in (sys.argv[1:] if argv is None else argv) if x]
    line = re.sub(r"(--(?!value)\S+)[ =]True(?= |$)", r"\1", shlex.join(argv))
    argv = shlex.split(re.sub(r"--(?!value)(\S+)[ =]False(?= |$)", r"--no-\1", line))  # CleanRL's
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
    for name in ("seed", "num_envs", "num_steps", "log_std_init", "agent_id", "critic"):
        if args.resume and getattr(args, name) != getattr(saved, name):
            fail(f"{name}: {folder} keeps its {getattr(saved, name)}: leave the flag out")
    done = sum('"status": "finished"' in x.read_text() for x in Path(folder).glob("run.json"))
    if args.resume and args.num_iterations < checkpoint.get("iteration", math.inf) + done:
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
