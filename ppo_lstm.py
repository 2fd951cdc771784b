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

    python ppo_lstm.py --env-id CarRacing-v3  # --resume RUN goes on, --evaluate RUN plays
    python ppo_lstm.py --env-id minigrid:MiniGrid-MemoryS7-v0 --num-envs 16 --memory gru
    python ppo_lstm.py --env-id popgym:popgym-RepeatPreviousEasy-v0 --memory gru  # more: its page

`diff ppo_pixels.py ppo_lstm.py` shows the memory and little else. --num-steps has to reach from a
cue to its use. Expect 500 on CartPole without velocities after 100,000 steps (greedy, by the flags
of its page). Flags and tags are CleanRL's. Left out: transformers.

In order: Args, agent, algorithm, rollout, train. Below the line after train nothing is PPO.
"""

import atexit
import contextlib
import copy
import ctypes
import fcntl
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
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's name
    seed: int = 1  # seeds the networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one
    num_threads: int = 0  # CPU threads of torch; 0: OMP_NUM_THREADS, or as many as there are cores
    bf16: bool = False  # layers before the heads in bfloat16: faster if the hardware has it
    compile: bool = False  # compile these layers if a compiler works: same results to rounding
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    capture_video: bool = False  # record the evaluation in RUN/videos; also with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, greedily and with sampled actions
    eval_episodes: int = 10  # episodes of an evaluation, greedy and sampled
    eval_env_kwargs: str = "{}"  # what --env-kwargs is in evaluations: '{"num_levels": 0}'
    eval_interval: int = 0  # iterations between evaluations in training; 0: none
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Environments
    env_id: str = "CarRacing-v3"  # a gymnasium id, module:Id, or envpool:Id
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"continuous": false}'
    max_episode_steps: int | None = None  # truncate episodes after that many steps
    num_envs: int = 8  # environments played side by side
    env_workers: int = 0  # processes for num_envs > 1, 0: none; EnvPool's threads, 0: torch's
    frame_stack: int = 0  # images (not vectors) seen at once; 0: 4 for ALE/..., or else 1
    resize: str = ""  # height and width of images, as 60x80; default: the shorter is 96 at most
    grayscale: bool = False  # grey instead of red, green and blue
    action_repeat: int = 0  # steps an action is held; 0: 4 for ALE/..., or else 1

    # Algorithm
    encoder: Literal["auto", "nature", "impala", "small"] = "auto"  # of images; auto: by their size
    memory: Literal["lstm", "gru"] = "lstm"  # memory between these layers and the heads
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
        may_be_0 = ["seed", "num_threads", "env_workers", "eval_interval"]
        may_be_0 += ["frame_stack", "action_repeat"]
        least = dict.fromkeys(may_be_0, 0) | {"total_timesteps": self.batch_size, "num_steps": 4}
        most = {"gamma": 1, "gae_lambda": 1, "num_minibatches": self.num_envs}
        for name, value in vars(self).items():
            low, high = least.get(name, int(type(value) is int)), most.get(name, math.inf)
            if type(value) in (int, float) and name != "log_std_init" and not low <= value <= high:
                why = " (an iteration is num_envs x num_steps)" * (self.batch_size in (low, high))
                raise ValueError(f"{name} is {value}: not in {low} ... {high}{why}")
        if self.resize and len([int(size) for size in self.resize.split("x")]) != 2:
            raise ValueError(f"resize is {self.resize}: height and width are needed, as 60x80")
        try:
            options, _ = ({**json.loads(x)} for x in (self.env_kwargs, self.eval_env_kwargs))
        except (TypeError, ValueError):
            raise ValueError("env_kwargs or eval_env_kwargs is no JSON object") from None
        if self.max_episode_steps:
            self.env_kwargs = json.dumps(options | {"max_episode_steps": self.max_episode_steps})


# --- agent ----------------------------------------------------------------------------------------
class Obs(dict):
    """An observation as the agent reads it, arrays or tensors by name: each image [..., H, W, C],
    each vector or choice [..., D] and, if choices can be invalid, "mask" [..., L]."""

    def map(self, function) -> "Obs":
        return Obs({name: function(x) for name, x in self.items()})

    def to(self, device: torch.device) -> "Obs":
        return self.map(lambda x: torch.as_tensor(x, device=device))


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


def layer_init(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, biases 0 (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Sequential):
    """x + f(x) (He et al. 2016)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def encoder(shape: tuple[int, ...], kind: str) -> nn.Sequential:
    """A network for images [B, C, H, W] of this shape (H, W, C); `kind` as --encoder."""
    height, width, channels = shape
    side = min(height, width)
    if kind == "auto":
        kind = "nature" if side >= 36 else "impala" if side >= 16 else "small"
    layers = []
    if kind == "impala":  # Espeholt et al. 2018, without its LSTM; torch's own initial weights
        for inputs, size in ((channels, 16), (16, 32), (32, 32)):
            conv = [nn.Conv2d(k, size, 3, padding=1) for k in (inputs, size, size, size, size)]
            layers += [conv[0], nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [Residual(nn.ReLU(), a, nn.ReLU(), b) for a, b in (conv[1:3], conv[3:])]
        layers += [nn.Flatten(), nn.ReLU(), nn.LazyLinear(256), nn.ReLU()]
    else:  # Nature's (Mnih et al. 2015; Atari detail 8), or a small one for grids of codes
        nature = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
        small = ((16, 2, 1), (32, 2, 1), (64, 2, 1))
        for size, kernel, stride in nature if kind == "nature" else small:
            layers += [layer_init(nn.Conv2d(channels, size, kernel, stride)), nn.ReLU()]
            channels = size
        layers += [nn.Flatten(), nn.LazyLinear(512 if kind == "nature" else 128), nn.ReLU()]
    network = nn.Sequential(*layers)
    network(torch.zeros(1, shape[2], height, width))  # now the number of features is known
    if kind != "impala":
        layer_init(network[-2])
    return network


class Trunk(nn.ModuleDict):
    """The layers before the heads: a network for each image, one for all vectors, side by side."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], kind: str):
        images = {name: encoder(shape, kind) for name, shape in shapes.items() if len(shape) == 3}
        super().__init__(images)
        inputs = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
        if inputs:
            self["vectors"] = nn.Sequential(layer_init(nn.Linear(inputs, 64)), nn.Tanh())
        if not images:
            self["vectors"].extend([layer_init(nn.Linear(64, 64)), nn.Tanh()])
        self.size = sum(network[-2].out_features for network in self.values())

    def forward(self, inputs: Obs) -> torch.Tensor:
        """Features [B, F]."""
        return torch.cat([network(inputs[name]) for name, network in self.items()], dim=-1)


class Memory(nn.Module):
    """An LSTM (Hochreiter & Schmidhuber 1997) or a GRU (Cho et al. 2014). Its state in N
    environments is a tensor [N, S]: h and c of an LSTM, h of a GRU."""

    def __init__(self, inputs: int, args: Args):
        super().__init__()
        size = args.memory_size
        self.net = {"lstm": nn.LSTM, "gru": nn.GRU}[args.memory](inputs, size)
        for name, parameter in self.net.named_parameters():  # (LSTM detail 1)
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        # a gate of k / (1 + k) keeps a unit for about k steps, here 1 ... span
        gates = self.net.bias_ih_l0.data[size : 2 * size]  # an LSTM's f, a GRU's z
        gates.copy_(torch.linspace(0.0, math.log(args.memory_span), size))
        self.state_size = 2 * size if args.memory == "lstm" else size

    def forward(self, rows: torch.Tensor, state: torch.Tensor):
        """Outputs [T, N, H] at rows [T, N, F] of which none begins an episode; the state after."""
        if isinstance(self.net, nn.GRU):
            output, h = self.net(rows, state.unsqueeze(0).contiguous())
            return output, h.squeeze(0)
        h, c = state.unsqueeze(0).chunk(2, dim=-1)
        output, (h, c) = self.net(rows, (h.contiguous(), c.contiguous()))
        return output, torch.cat([h, c], dim=-1).squeeze(0)

    def replay(self, rows: torch.Tensor, state: torch.Tensor, episode_starts: torch.Tensor):
        """Outputs [N, T, H] at rows [N, T, F] with the state before the first one. It is cleared
        where an episode starts later (LSTM detail 3): from there to the next start an environment's
        rows are a sequence. All sequences, side by side and padded, take one call."""
        N, T = episode_starts.shape
        begins = episode_starts.index_fill(1, torch.tensor([0]), True).flatten()
        starts = begins.nonzero().flatten()  # [S], the first row of each sequence
        sequence = begins.cumsum(dim=0) - 1  # [N * T], the sequence that a row is in
        place = torch.arange(N * T) - starts[sequence]  # [N * T], and its place there
        padded = rows.new_zeros((int(place.max()) + 1, len(starts), rows.shape[-1]))
        padded[place, sequence] = rows.flatten(0, 1)
        first_states = state.new_zeros((len(starts), state.shape[-1]))
        first_states[starts % T == 0] = state
        output, _ = self(padded, first_states)
        return output[place, sequence].unflatten(0, (N, T))


class Policy(NamedTuple):
    """A distribution of actions: choices and numbers, all independent."""

    logprobs: torch.Tensor  # [B, L], of the options of all choices
    mean: torch.Tensor  # [B, M], of the numbers, in their unit
    logstd: torch.Tensor  # [M] or [B, M]


class Agent(nn.Module):
    """Policy and value function for environments with the spaces of `env`. An action is a row
    [K + M]: the index of each choice, then each number. The state of N environments is a tensor
    [N, S], zeros before an episode. To act, B is N: one row of each. To learn, B is N, T: T rows
    of each and their actions; at `episode_starts`, bool [N, T] on the CPU, states are cleared."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        self.codec = Codec(env.observation_space, env.action_space, self.args)
        self.sizes = self.codec.sizes  # options of each choice; their sum is L
        shapes = self.codec.shapes
        self.trunk = Trunk(shapes, self.args.encoder)
        self.value_trunk = Trunk(shapes, self.args.encoder) if self.args.separate_critic else None
        self.register_buffer("action_bias", torch.tensor(self.codec.action_bias).float())
        self.register_buffer("action_scale", torch.tensor(self.codec.action_scale).float())
        self.register_buffer("starts", torch.tensor(self.codec.starts), persistent=False)
        # logits of all choices, then means of all numbers
        outputs = sum(self.sizes) + len(self.action_scale)
        action_size = outputs + 1 if self.args.previous_action else 0  # of `action_input`
        inputs = self.trunk.size + action_size
        num_memories = 2 if self.args.separate_critic else 1
        self.memories = nn.ModuleList(Memory(inputs, self.args) for _ in range(num_memories))
        self.state_sizes = [*(memory.state_size for memory in self.memories), action_size]
        self.actor = layer_init(nn.Linear(self.args.memory_size, outputs), gain=0.01)
        self.critic = layer_init(nn.Linear(self.args.memory_size, 1), gain=1.0)
        # a deviation for each number, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full_like(self.action_scale, self.args.log_std_init))
        standardized = [name for name in shapes if name not in self.codec.bounds]
        self.moments = nn.ModuleDict({name: RunningMeanStd(shapes[name]) for name in standardized})
        self.return_moments = RunningMeanStd()
        self.discounted = np.zeros(1)  # [N], return so far of each episode in training
        self.rng = np.random.default_rng(self.args.seed)  # draws actions and minibatches

    def normalize(self, obs: Obs) -> Obs:
        """Images [B, C, H, W] from 0 to 1 (Atari detail 9) and all vectors as one [B, D]. Vectors
        and grids of codes are standardized and clipped to +-10 (continuous details 6, 7)."""
        inputs = Obs()
        vectors = []
        for name in self.codec.shapes:
            x = obs[name].float()
            if name in self.moments:
                scale = (self.moments[name].var + 1e-8).rsqrt().float()
                x = ((x - self.moments[name].mean.float()) * scale).clamp(-10.0, 10.0)
            else:
                low, high = self.codec.bounds[name]
                x = (x - low) / (high - low)
            if x.ndim == 4:
                inputs[name] = x.permute(0, 3, 1, 2)
            else:
                vectors.append(x)
        if vectors:
            inputs["vectors"] = torch.cat(vectors, dim=-1)
        return inputs

    def features(self, obs: Obs) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden layers [B, F] of policy and value function."""
        inputs = self.normalize(obs)
        with torch.autocast(self.action_scale.device.type, torch.bfloat16, enabled=self.args.bf16):
            hidden = self.trunk(inputs).float()
            if self.value_trunk is None:
                return hidden, hidden
            return hidden, self.value_trunk(inputs).float()

    def initial_state(self, n: int) -> torch.Tensor:
        """The state of n environments before their first observations (LSTM detail 2)."""
        return self.action_scale.new_zeros((n, sum(self.state_sizes)))

    def action_input(self, action: torch.Tensor) -> torch.Tensor:
        """Actions [..., K + M] as the memory gets them one row later with --previous-action: ones
        and zeros for choices, numbers in their unit, a one. An episode's first row gets zeros."""
        if not self.args.previous_action:
            return action[..., :0]
        choices, numbers = action.split((len(self.sizes), len(self.action_scale)), dim=-1)
        zeros = action.new_zeros((*action.shape[:-1], sum(self.sizes)))
        ones = zeros.scatter(-1, choices.long() + self.starts, 1.0)
        numbers = (numbers - self.action_bias) / self.action_scale
        return torch.cat([ones, numbers, torch.ones_like(action[..., :1])], dim=-1)

    def policy(self, obs: Obs, state: torch.Tensor, episode_starts=None, action=None):
        """The policy, V [B] and, of single rows, the memories' states after them."""
        *states, last_action = state.split(self.state_sizes, dim=-1)
        if episode_starts is not None:
            obs = obs.map(lambda x: x.flatten(0, 1))
            actions = [last_action.unsqueeze(1), self.action_input(action)[:, :-1]]
            cleared = episode_starts.unsqueeze(-1).to(state.device)
            last_action = torch.cat(actions, dim=1).masked_fill(cleared, 0.0)  # [N, T, A]
        outputs = []  # of the memories of policy and value function, [B, H]; one may serve both
        for k, (memory, x) in enumerate(zip(self.memories, self.features(obs), strict=False)):
            rows = torch.cat([x.view(*last_action.shape[:-1], -1), last_action], dim=-1)
            if episode_starts is None:
                output, states[k] = memory(rows.unsqueeze(0), states[k])
                outputs.append(output.squeeze(0))
            else:
                outputs.append(memory.replay(rows, states[k], episode_starts))
        sizes = sum(self.sizes), len(self.action_scale)
        logits, mean = self.actor(outputs[0]).split(sizes, dim=-1)
        if "mask" in obs:
            logits = logits.where(obs["mask"].view_as(logits), -1e8)
        parts = [part.log_softmax(dim=-1) for part in logits.split(self.sizes, dim=-1)]
        logprobs = torch.cat(parts, dim=-1) if parts else logits
        policy = Policy(logprobs=logprobs, mean=mean, logstd=self.actor_logstd)
        return policy, self.critic(outputs[-1]).squeeze(-1), torch.cat(states, dim=-1)

    def choose_action(self, policy: Policy, noise: torch.Tensor | None = None) -> torch.Tensor:
        """The likeliest choices and the means as actions [B, K + M]; given noise, samples."""
        logprobs, mean, logstd = policy
        if noise is not None:
            logprobs = logprobs + noise[:, : sum(self.sizes)]
            mean = mean + logstd.exp() * noise[:, sum(self.sizes) :]
        parts = logprobs.split(self.sizes, dim=-1)
        choices = [part.argmax(dim=-1, keepdim=True) for part in parts]
        return torch.cat([*choices, self.action_bias + self.action_scale * mean], dim=-1)

    def step(self, obs: Obs, state: torch.Tensor, noise: torch.Tensor | None = None):
        """Actions [N, K + M] as `choose_action` has them, and the state after."""
        policy, _, next_state = self.policy(obs, state)
        action = self.choose_action(policy, noise)
        return action, torch.cat([next_state, self.action_input(action)], dim=-1)

    def get_value(self, obs: Obs, state: torch.Tensor) -> torch.Tensor:
        """V [B]."""
        _, value, _ = self.policy(obs, state)
        return value

    def get_action_and_value(self, obs, state, episode_starts=None, action=None, noise=None):
        """Action [B, K + M] (sampled, by this noise, unless given), log-probability, entropy, value
        [B]: independent parts, which add up (MultiDiscrete detail 1, continuous details 1, 3). And,
        if it is sampled for single rows, the state after it."""
        policy, value, next_state = self.policy(obs, state, episode_starts, action)
        if action is None:
            noise = self.noise(len(policy.mean)) if noise is None else noise
            action = self.choose_action(policy, noise)
            next_state = torch.cat([next_state, self.action_input(action)], dim=-1)
        return action, self.log_prob(policy, action), sum(self.entropies(policy)), value, next_state

    def log_prob(self, policy: Policy, action: torch.Tensor) -> torch.Tensor:
        """The log-probability [B] of actions [B, K + M]."""
        choices, numbers = action.split((len(self.sizes), len(self.action_scale)), dim=-1)
        z = (numbers - self.action_bias) / self.action_scale
        z = (z - policy.mean) * torch.exp(-policy.logstd)
        logscale = policy.logstd + self.action_scale.log()
        normal = -0.5 * z.square() - logscale - 0.5 * math.log(2.0 * math.pi)
        chosen = policy.logprobs.gather(-1, choices.long() + self.starts)
        return chosen.sum(dim=-1) + normal.sum(dim=-1)

    def entropies(self, policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
        """The entropies [B] of all choices and of all numbers."""
        choices = -(policy.logprobs.exp() * policy.logprobs)
        logscale = (policy.logstd + self.action_scale.log()).expand_as(policy.mean)
        numbers = logscale + 0.5 * math.log(2.0 * math.pi * math.e)
        return choices.sum(dim=-1), numbers.sum(dim=-1)

    def noise(self, *shape: int, rng: np.random.Generator | None = None) -> torch.Tensor:
        """Noise [..., L + M] for actions: Gumbel's for choices, whose argmax is a sample."""
        rng = rng or self.rng
        gumbel = rng.gumbel(size=(*shape, sum(self.sizes)))
        normal = rng.standard_normal((*shape, len(self.action_scale)))
        noise = np.concatenate([gumbel, normal], axis=-1)
        return torch.as_tensor(noise, dtype=torch.float32, device=self.action_scale.device)

    def update_moments(self, data: "Rollout"):
        """Take in the observations of a rollout."""
        for name, moments in self.moments.items():
            moments.update(data.obs[name][:-1][torch.as_tensor(data.valid)])

    @torch.no_grad()
    def act(self, obs, noise: torch.Tensor | None = None, *, state: torch.Tensor):
        """The likeliest actions, nested as the space is, at raw observations [N, ...] or at what
        `codec.read` made of them; with `noise(N)`, samples. The state [N, S] becomes the one after;
        set state[i] = 0 before an episode's first observation."""
        obs = obs if isinstance(obs, Obs) else self.codec.read(obs)
        actions, state[:] = self.step(obs.to(self.action_scale.device), state, noise)
        return self.codec.env_actions(actions.cpu().numpy())


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
    obs: Obs  # [T + 1, N, ...]; bytes stay bytes, channels are last
    actions: torch.Tensor  # [T, N, K + M]
    logprobs: torch.Tensor  # [T, N]
    values: torch.Tensor  # [T + 1, N]
    rewards: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored
    state: torch.Tensor  # [N, S], before the first row
    episode_starts: torch.Tensor  # [T, N], on the CPU: before these rows the state is cleared


class Batch(NamedTuple):
    obs: Obs  # [N, T, ...]
    state: torch.Tensor  # [N, S], before the first row
    episode_starts: torch.Tensor  # [N, T], on the CPU
    actions: torch.Tensor  # [N, T, K + M]
    valid: torch.Tensor  # [N, T], on the CPU: the rows to learn from
    logprobs: torch.Tensor  # [N, T], of the policy that acted
    advantages: torch.Tensor  # [N, T]
    returns: torch.Tensor  # [N, T]
    values: torch.Tensor  # [N, T], before the update

    def take(self, rows: torch.Tensor) -> "Batch":
        others = {name: x[rows] for name, x in self._asdict().items() if name != "obs"}
        return Batch(obs=self.obs.map(lambda x: x[rows]), **others)


def ppo_loss(agent: Agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch, and its metrics."""
    # states, too, as the parameters now make them (LSTM detail 5)
    policy, value, _ = agent.policy(batch.obs, batch.state, batch.episode_starts, batch.actions)
    logprob = agent.log_prob(policy, batch.actions)[batch.valid]  # from [M, T] to the valid rows
    value = value[batch.valid]
    targets = "logprobs", "advantages", "returns", "values"
    batch = batch._replace(**{name: getattr(batch, name)[batch.valid] for name in targets})
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
    entropy, box_entropy = (x[batch.valid].mean() for x in agent.entropies(policy))
    bonus = args.ent_coef * entropy + args.box_ent_coef * box_entropy
    loss = policy_loss - bonus + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss}
    metrics |= {"old_approx_kl": -logratio.mean(), "approx_kl": (ratio - 1.0 - logratio).mean()}
    clipfrac = (ratio != clipped).float().mean()
    return loss, metrics | {"clipfrac": clipfrac, "entropy": entropy + box_entropy}


def update(agent: Agent, data: Rollout, args: Args) -> dict[str, float]:
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    is_first = all(m.count == 0 for m in agent.moments.values())
    if is_first:  # later the scale changes after the epochs: the policy that acted has the same
        agent.update_moments(data)
    numpy_values = data.values.cpu().double().numpy()
    ends = data.terminated, data.truncated
    advantages = gae(data.rewards, numpy_values, *ends, args.gamma, args.gae_lambda)  # detail 5
    values = data.values[:-1]
    advantages = torch.tensor(advantages).to(values)
    returns = advantages + values
    fields = {"episode_starts": data.episode_starts, "actions": data.actions}
    fields |= {"valid": torch.as_tensor(data.valid), "logprobs": data.logprobs}
    fields |= {"advantages": advantages, "returns": returns, "values": values}
    fields = {name: x.transpose(0, 1) for name, x in fields.items()}  # [N, T, ...]
    obs = data.obs.map(lambda x: x[:-1].transpose(0, 1))
    batch = Batch(obs=obs, state=data.state, **fields)

    results = []  # metrics of each step
    agent.adam.param_groups[0]["lr"] = args.learning_rate
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(args.num_envs))
        # every environment once an epoch, with all its steps (detail 6, LSTM detail 4)
        for minibatch in order.tensor_split(args.num_minibatches):
            loss, metrics = ppo_loss(agent, args, batch.take(minibatch))
            agent.adam.zero_grad()
            loss.backward()
            # over all parameters (detail 11)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            agent.adam.step()
            results.append(torch.stack([*metrics.values()]).detach())
        approx_kl = torch.stack(results[-args.num_minibatches :])[:, [*metrics].index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    if not is_first:
        agent.update_moments(data)
    means = torch.stack(results).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    error = advantages[data.valid].var()  # variance of R - V
    scale = returns[data.valid].var()  # variance of R
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    if len(agent.action_scale):
        metrics["charts/policy_std"] = (agent.actor_logstd.exp() * agent.action_scale).mean().item()
    return metrics


# --- rollout and training -------------------------------------------------------------------------
@torch.no_grad()
def rollout(agent: Agent, envs, state: torch.Tensor, run: "Run", args: Args):
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1) in
    this state; returns a Rollout and the state after it."""
    T, N = args.num_steps, args.num_envs
    device = agent.action_scale.device
    obs = envs.obs.to(device).map(lambda x: x.new_empty((T + 1, *x.shape)))
    actions = torch.zeros((T, N, len(agent.sizes) + len(agent.action_scale)), device=device)
    logprobs = torch.zeros((T, N), device=device)
    values = torch.zeros((T + 1, N), device=device)
    rewards = np.zeros((T, N))
    raw_rewards = np.zeros((T, N))  # rewards that are neither clipped nor scaled
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    autoreset = np.zeros((T + 1, N), bool)  # rows whose step ignores its action, and resets
    new_game = np.zeros((T + 1, N), bool)  # the same, but not after a lost life
    noise = agent.noise(T, N)
    first_state = state
    for t in range(T):
        now = envs.obs.to(device)
        for name, x in now.items():
            obs[name][t] = x
        autoreset[t] = envs.autoreset
        new_game[t] = getattr(envs, "new_game", envs.autoreset)
        outputs = agent.get_action_and_value(now, state, noise=noise[t])
        actions[t], logprobs[t], _, values[t], state = outputs
        state[autoreset[t]] = 0.0  # an episode begins in the next row
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t].cpu().numpy())
        raw_rewards[t] = getattr(envs, "raw_rewards", rewards[t])
    last = envs.obs.to(device)
    for name, x in last.items():
        obs[name][T] = x
    values[T] = agent.get_value(last, state)
    autoreset[T] = envs.autoreset
    new_game[T] = getattr(envs, "new_game", envs.autoreset)
    run.log_rollout(actions.cpu().numpy(), raw_rewards, autoreset, new_game)
    # an episode starts in the row after autoreset's, but not before the first row
    starts = torch.tensor(np.concatenate([np.zeros((1, N), bool), autoreset[: T - 1]]))
    ends = {"terminated": terminated, "truncated": truncated, "valid": ~autoreset[:T]}
    chosen = {"actions": actions, "logprobs": logprobs, "values": values, "rewards": rewards}
    states = {"state": first_state, "episode_starts": starts}
    return Rollout(obs=obs, **chosen, **ends, **states), state


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
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
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
        agent.discounted = np.array(checkpoint.get("discounted", [0.0]))
    state = checkpoint.get("memory", agent.initial_state(args.num_envs)).to(device)
    if args.compile:
        compile_features(agent)
    with contextlib.closing(envs), Run(args, checkpoint, here) as run, stop_signals() as signals:
        run.bar.write(f"{agent.codec.description}; masks of valid actions: {'mask' in envs.obs}")
        save(run, agent, state)
        while run.iteration < args.num_iterations and not signals:
            remaining = 1.0 - run.iteration / args.num_iterations
            scheduled = copy.copy(args)  # coefficients that fall are set here, and only here
            if args.anneal_lr:
                scheduled.learning_rate *= remaining  # (detail 4)
            data, state = rollout(agent, envs, state, run, args)
            if args.scale_rewards:
                data = scale_rewards(agent, data, args)
            metrics = update(agent, data, scheduled)
            found = data.obs | {"rewards": data.rewards} | metrics
            check_finite(run.iteration, found | agent.state_dict())
            if args.eval_interval and (run.iteration + 1) % args.eval_interval == 0:
                metrics["charts/test_return"] = np.mean(play(args, agent, sample=True))
            run.log(metrics | {"charts/learning_rate": scheduled.learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent, state)
        save(run, agent, state)
    print_next_command(run, here, run.iteration == args.num_iterations)
    if run.iteration < args.num_iterations:
        raise SystemExit(128 + signals[0])
    if args.capture_video:
        evaluate(replace(args, evaluate=run.folder))
    return run.folder


# ==== below this line nothing is PPO ==============================================================
# --- spaces of observations and actions -----------------------------------------------------------
def leaves(space: gym.Space, tree, name: str) -> list[tuple[str, gym.Space, Any]]:
    """The parts of a nested space, each with what a tree of the same form (an observation, a batch
    of them, a mask, the space itself) has there: (name, part, value)."""
    if isinstance(space, gym.spaces.Dict):
        keys = list(space)
    elif isinstance(space, gym.spaces.Tuple):
        keys = range(len(space))
    else:
        return [(name.replace(".", "_"), space, tree)]  # no dots: the name of a network
    return [leaf for key in keys for leaf in leaves(space[key], tree[key], f"{name}/{key}")]


def image_axes(space: gym.Space) -> list[int]:
    """The axes of an image: rows, columns, others; none, if a space has no images. Bytes with 2
    axes are an image, and any numbers with 3 or 4, if both sides have 7 pixels. The smallest of the
    last three axes holds the channels, the first of four a stack of images."""
    axes = len(space.shape or ())
    if not isinstance(space, Box) or axes not in (2, 3, 4):
        return []
    rows = axes - 2
    if axes > 2 and space.shape[-3] > min(space.shape[-3:]):
        rows = axes - 3  # channels are last
    height, width = space.shape[rows : rows + 2]
    if min(height, width) < 7 or (axes == 2 and space.dtype != np.uint8):
        return []
    others = [axis for axis in range(axes) if axis not in (rows, rows + 1)]
    if others and space.shape[others[-1]] >= min(height, width):
        raise gym.error.Error(f"{space}: which axis of the image is its channels can't be told")
    return [rows, rows + 1, *others]


def branches(space: gym.Space) -> list[int]:
    """How many choices each branch has: a Discrete space is one, a MultiBinary one n of two."""
    if isinstance(space, MultiBinary):
        return [2] * math.prod(space.shape)
    if isinstance(space, Discrete | MultiDiscrete):
        return np.ravel(space.nvec if isinstance(space, MultiDiscrete) else space.n).tolist()
    raise gym.error.Error(f"{space}: no actions that can be learned")


class Codec:
    """Between an environment, with spaces of any kind, and what its agent reads and does."""

    def __init__(self, observation_space: gym.Space, action_space: gym.Space, args: Args):
        self.observation_space = observation_space
        self.action_space = action_space
        self.args = args
        self.frames = args.frame_stack or (4 if is_atari(args.env_id) else 1)  # of each image
        self.shapes = {}  # of each part that is read: (H, W, C) or (D,)
        self.bounds = {}  # (low, high) of each part that is not standardized
        self.axes = {}  # of each image, as `image_axes` gives them
        ignored = []  # names of the parts that are not read
        for name, part, _ in leaves(observation_space, observation_space, "obs"):
            if name == "obs/action_mask":
                continue
            if axes := image_axes(part):
                self.axes[name] = axes
                self.shapes[name] = self.image_shape([part.shape[axis] for axis in axes])
                if min(self.shapes[name][:2]) >= 16:  # smaller ones are grids of codes
                    self.bounds[name] = float(part.low.min()), float(part.high.max())
            elif isinstance(part, Discrete | MultiDiscrete | MultiBinary):
                self.shapes[name] = (gym.spaces.flatdim(part),)
                self.bounds[name] = (0.0, 1.0)
            elif isinstance(part, Box) and 0 not in part.shape and name != "obs/mission":
                self.shapes[name] = (math.prod(part.shape),)
            else:  # a text (EnvPool's MiniGrid gives its letters), a graph, a sequence
                ignored.append(name)
        if not self.shapes or np.abs([*self.bounds.values()]).max(initial=0.0) > 1e6:
            raise gym.error.Error(f"{observation_space}: nothing to see, or images without bounds")
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        self.description = f"sees {shapes}" + "".join(f"; not {name}" for name in ignored)

        parts = leaves(action_space, action_space, "action")
        boxes = [(name, part) for name, part, _ in parts if isinstance(part, Box)]
        choices = [(name, part) for name, part, _ in parts if not isinstance(part, Box)]
        self.sizes = [size for _, part in choices for size in branches(part)]  # of each choice
        self.starts = np.cumsum([0, *self.sizes[:-1]])[: len(self.sizes)]  # of its options, of L
        low = np.concatenate([[], *(part.low.ravel() for _, part in boxes)]).clip(-1e30, 1e30)
        high = np.concatenate([[], *(part.high.ravel() for _, part in boxes)]).clip(-1e30, 1e30)
        scaled = (high > low) & (high - low <= 2e6)  # others are not scaled
        self.action_bias = np.where(scaled, (low + high) / 2, 0.0)
        self.action_scale = np.where(scaled, (high - low) / 2, 1.0)
        self.columns = {}  # of each part of an action
        column = 0
        for name, part in (*choices, *boxes):
            self.columns[name] = slice(column, column + math.prod(part.shape))
            column = self.columns[name].stop

    def image_shape(self, sizes: list[int]) -> tuple[int, int, int]:
        """Height, width and channels as the agent reads them, of an image's sizes [H, W, ...]."""
        height, width, *others = sizes
        channels = math.prod(others)
        if self.args.grayscale and channels % 3 == 0:
            channels //= 3
        shrink = math.ceil(min(height, width) / 96)
        resize = self.args.resize or ("84x84" if is_atari(self.args.env_id) else "")
        if resize:
            height, width = map(int, resize.split("x"))
            shrink = 1
        return height // shrink, width // shrink, channels * self.frames

    def read(self, raw, before: Obs | None = None, running=slice(None), mask=None) -> Obs:
        """Read raw observations [N, ...]. With --frame-stack, `before` is what this gave for the
        step before; an episode begins in rows that are not `running`."""
        obs = Obs()
        for name, part, x in leaves(self.observation_space, raw, "obs"):
            if name == "obs/action_mask":
                mask = x
            elif name in self.axes:
                image = self.image(name, np.reshape(x, (-1, *part.shape)))
                obs[name] = np.tile(image, self.frames)
                if before and self.frames > 1:
                    new = image.shape[-1]
                    obs[name][running, ..., :-new] = before[name][running, ..., new:]
            elif name in self.shapes:
                x = np.reshape(x, (-1, *part.shape))
                if not isinstance(part, Box):
                    x = np.stack([gym.spaces.flatten(part, row) for row in x])
                obs[name] = x.reshape(len(x), -1).astype(np.float32)
        if mask is not None and self.args.action_masks:
            obs["mask"] = self.mask(mask)
        return obs

    def image(self, name: str, x: np.ndarray) -> np.ndarray:
        """Images [N, ...] of any layout as [N, H, W, C]: bytes stay bytes, others are float32."""
        x = x if x.dtype == np.uint8 else x.astype(np.float32)
        x = x.transpose(0, *[axis + 1 for axis in self.axes[name]])
        x = np.ascontiguousarray(x.reshape(*x.shape[:3], -1))  # in memory, too: twice as fast
        if x.shape[1:3] != self.shapes[name][:2]:
            pixels = torch.as_tensor(x).permute(0, 3, 1, 2)
            how = {"size": self.shapes[name][:2], "mode": "bilinear", "antialias": True}
            x = nn.functional.interpolate(pixels, **how).permute(0, 2, 3, 1).numpy()
        if self.args.grayscale and x.shape[-1] % 3 == 0:
            colours = x.reshape(*x.shape[:3], -1, 3)
            x = (colours @ np.float32([0.299, 0.587, 0.114])).astype(x.dtype)
        return x

    def mask(self, tree) -> np.ndarray:
        """A mask of all options in a row, or nested as the actions are, as bools [N, L]."""
        if not isinstance(tree, np.ndarray):
            parts = leaves(self.action_space, tree, "action")
            tree = np.hstack([np.hstack(x) for _, part, x in parts if not isinstance(part, Box)])
        valid = np.reshape(tree, (-1, sum(self.sizes))) > 0
        some = np.logical_or.reduceat(valid, self.starts, axis=1)
        return valid | ~np.repeat(some, self.sizes, axis=1)  # if no option is valid, all are

    def env_actions(self, rows: np.ndarray, space: gym.Space | None = None, name: str = "action"):
        """Actions [K + M] or [N, K + M] as the space has them; numbers are clipped, whole ones
        rounded. The agent learns from its own, which are not (continuous detail 5)."""
        space = space or self.action_space
        if isinstance(space, gym.spaces.Dict):
            return {key: self.env_actions(rows, space[key], f"{name}/{key}") for key in space}
        if isinstance(space, gym.spaces.Tuple):
            parts = enumerate(space)
            return tuple(self.env_actions(rows, part, f"{name}/{key}") for key, part in parts)
        x = rows[..., self.columns[name.replace(".", "_")]]
        x = x.reshape((*rows.shape[:-1], *space.shape))
        if isinstance(space, Box):
            x = np.clip(x, space.low, space.high)
            x = np.rint(x) if space.dtype.kind in "iub" else x
        else:
            x = x + getattr(space, "start", 0)
        return x.astype(space.dtype)[()]  # one number is no array


# --- environments ---------------------------------------------------------------------------------
def is_atari(env_id: str) -> bool:
    """Whether it is a game of gymnasium's ALE."""
    return env_id.rpartition(":")[2].startswith("ALE/")


def make_env(env_id: str, /, **options) -> gym.Env:
    """A gymnasium environment."""
    gym.logger.min_level = gym.logger.ERROR  # no warning that v4 ids are old
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):  # draw without a display
        for name, value in {"PYGLET_HEADLESS": "1", "SDL_VIDEODRIVER": "dummy"}.items():
            os.environ.setdefault(name, value)
    module = {"ALE": "ale_py:", "dm_control": "shimmy:"}.get(env_id.split("/")[0], "")
    if is_atari(env_id):  # `Envs.play` skips images, and they are grey
        options = {"frameskip": 1, "obs_type": "grayscale"} | options
    return gym.make(f"{module}{env_id}", **{"disable_env_checker": True} | options)


def find_mask(env: gym.Env, info: dict | None):
    """The mask of valid choices that an environment gives, if there is one."""
    for name in ("action_mask", "legal_action_mask"):
        if info and name in info:
            return info[name]
    return env.get_wrapper_attr("action_masks")() if env.has_wrapper_attr("action_masks") else None


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
        self.codec = Codec(self.observation_space, self.action_space, args)
        self.episode_numbers = [0] * len(self.envs)
        self.autoreset = np.zeros(len(self.envs), bool)  # [N], the next step begins an episode
        self.rows = [None] * len(self.envs)  # the observation of each
        for i in range(len(self.envs)):
            number, _, actions = episodes[indices[i]] if episodes else (0, 0.0, [])
            self.begin(i, number)
            for action in tqdm(actions, "replay", disable=len(actions) < 100_000):
                self.play(i, action)
        self.gather()

    def begin(self, i: int, number: int):
        """Begin an environment's episode of this number."""
        self.episode_numbers[i] = number
        self.autoreset[i] = False
        seed = episode_seed(self.args.seed, self.indices[i], number)
        raw, info = self.envs[i].reset(seed=seed)
        self.rows[i] = self.codec.read(raw, mask=find_mask(self.envs[i], info))

    def play(self, i: int, row: np.ndarray) -> tuple[float, bool, bool]:
        """One step of an environment, its action held for `action_repeat` of its own steps."""
        total = 0.0
        raw = None
        for _ in range(self.args.action_repeat or (4 if is_atari(self.args.env_id) else 1)):
            before = raw
            action = self.codec.env_actions(row)  # anew, as an environment may change it
            raw, reward, terminated, truncated, info = self.envs[i].step(action)
            total += np.asarray(reward).item()
            if terminated or truncated:
                break
        if before is not None and is_atari(self.args.env_id):
            raw = np.maximum(before, raw)  # some objects are drawn only in every second image
        self.autoreset[i] = terminated or truncated
        self.rows[i] = self.codec.read(raw, self.rows[i], mask=find_mask(self.envs[i], info))
        return total, terminated, truncated

    def gather(self):
        """Put the observations of all side by side."""
        self.obs = Obs({x: np.concatenate([row[x] for row in self.rows]) for x in self.rows[0]})

    def step(self, actions: np.ndarray):
        """Take actions [N, K + M]: rewards, terminated, truncated [N]."""
        rewards = np.zeros(len(actions))
        terminated = np.zeros(len(actions), bool)
        truncated = np.zeros(len(actions), bool)
        for i, action in enumerate(actions):
            if self.autoreset[i]:
                self.begin(i, self.episode_numbers[i] + 1)
            else:
                rewards[i], terminated[i], truncated[i] = self.play(i, action)
        self.gather()
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
        self.obs = Obs({name: np.concatenate([x[name] for x in obs]) for name in obs[0]})
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
        # Procgen draws with Qt 5: the system's, or that of the package PyQt5-Qt5
        qt = importlib.util.find_spec("PyQt5")
        for folder in qt.submodule_search_locations if qt else ():
            ctypes.CDLL(f"{folder}/Qt5/lib/libQt5Gui.so.5", mode=ctypes.RTLD_GLOBAL)
            sys.modules.pop("envpool.procgen", None)  # which remembers that there was no Qt
        import envpool

        task = args.env_id.removeprefix("envpool:")
        if task not in envpool.list_all_envs():
            raise gym.error.Error(f"EnvPool has no {task}")
        seeds = [episode_seed(args.seed, i, start) % 2**31 for i in range(num_envs)]
        options = {"env_type": "gymnasium", "num_envs": num_envs, "seed": seeds}
        options["num_threads"] = min(args.env_workers or torch.get_num_threads(), num_envs)
        self.vector = envpool.make(task, **options | json.loads(args.env_kwargs))
        if self.vector.spec.config.max_num_players > 1:
            raise gym.error.Error("a game of several players: ppo_pettingzoo.py")
        if args.action_repeat > 1:
            raise gym.error.Error("no --action-repeat here: EnvPool has frame_skip in --env-kwargs")
        self.observation_space = self.vector.observation_space
        self.action_space = self.vector.action_space
        self.close = self.vector.close
        self.codec = Codec(self.observation_space, self.action_space, args)
        self.autoreset = np.zeros(num_envs, bool)  # [N], the next step begins an episode
        raw, info = self.vector.reset()
        self.obs = self.codec.read(raw, mask=info.get("legal_action_mask"))

    def step(self, actions: np.ndarray):
        """Take actions [N, K + M]: rewards, terminated, truncated [N]."""
        rows = self.codec.env_actions(actions)
        raw, rewards, terminated, truncated, info = self.vector.step(rows)
        running = ~self.autoreset
        self.autoreset = terminated | truncated
        self.raw_rewards = info.get("reward", rewards)  # Atari's, not clipped
        self.new_game = info.get("terminated", terminated).astype(bool) | truncated  # no lost life
        self.obs = self.codec.read(raw, self.obs, running, info.get("legal_action_mask"))
        return rewards, terminated, truncated


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


def compile_features(agent: Agent):
    """Compile the layers before the heads, for acting and for learning, if a compiler works."""
    try:
        torch.compile(lambda x: x + 1)(agent.actor.bias)
    except Exception as error:  # whatever a missing or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return
    print("compiling the networks...")
    agent.features = torch.compile(agent.features, fullgraph=True)


# --- run folder and checkpoints -------------------------------------------------------------------
class Run(contextlib.AbstractContextManager):
    """A run's folder, logs and counters. While it is open, no other process can use the folder."""

    def __init__(self, args: Args, checkpoint: dict, here: Path = Path()):
        self.args = replace(args, run_dir=None, resume=None, evaluate=None)  # folders may move
        self.global_step = checkpoint.get("global_step", 0)
        self.iteration = checkpoint.get("iteration", 0)
        self.start = time.monotonic() - checkpoint.get("seconds", 0.0)
        self.last_returns = deque(checkpoint.get("last_returns", []), maxlen=100)
        # each environment's running game: its number, score and actions so far
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

    def episode(self, i: int, t: int, actions: np.ndarray, raw_rewards, autoreset, new_game):
        """An environment's running game before row t of a rollout [T, N, ...]."""
        number, score, past_actions = self.episodes[i]
        begins = np.flatnonzero(new_game[:t, i])  # rows that began a game
        if len(begins):
            score, past_actions = 0.0, []
        rows = slice(begins[-1] if len(begins) else 0, t)
        taken = actions[rows, i][~autoreset[rows, i]]
        past = np.asarray(past_actions, actions.dtype).reshape(-1, actions.shape[-1])
        score += float(raw_rewards[rows, i].sum())
        return number + len(begins), score, np.vstack((past, taken))

    def log_rollout(self, actions: np.ndarray, raw_rewards: np.ndarray, autoreset, new_game):
        """Take in a rollout, [T, N, ...] and [T + 1, N]: log the games that ended."""
        seconds = time.monotonic() - self.start
        steps = self.global_step + np.count_nonzero(~autoreset[:-1], axis=1).cumsum()
        self.global_step = int(steps[-1])
        rows = actions, raw_rewards, autoreset, new_game
        ended = [(t, *self.episode(i, t + 1, *rows)) for t, i in np.argwhere(new_game[1:])]
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


def save(run: Run, agent: Agent, memory: torch.Tensor):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    state |= {"adam": agent.adam.state_dict()["state"], "rng": agent.rng.bit_generator.state}
    state |= {"global_step": run.global_step, "iteration": run.iteration}
    state |= {"seconds": time.monotonic() - run.start, "last_returns": list(run.last_returns)}
    state |= {"csv_size": run.csv.tell(), "wandb": run.wandb and run.wandb.id}
    if not run.args.env_id.startswith("envpool:"):  # whose episodes can't be played again
        episodes = [(n, score, torch.tensor(np.array(x))) for n, score, x in run.episodes]
        state |= {"episodes": episodes, "discounted": agent.discounted.tolist(), "memory": memory}
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
    for name in ("env_kwargs", "eval_env_kwargs"):
        words = re.findall('"(.*?)"', getattr(raw, name))
        if any(re.search(r"[^\w -]", x) or Path(x).exists() for x in words):
            setattr(args, name, "{}")
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


@torch.no_grad()
def play(args: Args, agent: Agent | None, sample: bool, name: str = "") -> list[float]:
    """Returns of `eval_episodes` episodes of an agent, or of the one in `args.evaluate`; they are
    printed under a name. EnvPool's are played side by side, each in an environment of its own."""
    seed = episode_seed(args.seed, 2**31)
    options = json.loads(args.env_kwargs) | json.loads(args.eval_env_kwargs)
    record = args.capture_video and args.evaluate
    if record:
        options["render_mode"] = "rgb_array"
        os.environ.setdefault("MUJOCO_GL", "egl" if sys.platform == "linux" else "glfw")
    N = args.eval_episodes if args.env_id.startswith("envpool:") else 1
    changed = {"seed": seed, "env_kwargs": json.dumps(options), "max_episode_steps": None}
    envs = make_envs(replace(args, **changed), N, {})
    if record:
        how = {"episode_trigger": lambda _: True, "name_prefix": name}
        envs.envs[0] = gym.wrappers.RecordVideo(envs.envs[0], f"{args.evaluate}/videos", **how)
        envs.close = envs.envs[0].close  # which tells if it can't write the film
        print(f"filmed into {args.evaluate}/videos")
        envs.begin(0, number=0)
    if agent is None:
        agent, _ = load(args.evaluate, envs)
    rng = np.random.default_rng(seed)
    state = agent.initial_state(N)
    returns = []
    scores = np.zeros(N)
    playing = np.ones(N, bool)
    with contextlib.closing(envs), tqdm(unit="step", disable=None if name else True) as bar:
        while len(returns) < args.eval_episodes:
            noise = agent.noise(N, rng=rng) if sample else None
            actions, state = agent.step(envs.obs.to(agent.action_scale.device), state, noise)
            state[envs.autoreset] = 0.0  # as in training
            rewards, *_ = envs.step(actions.cpu().numpy())
            bar.update(N)
            scores += getattr(envs, "raw_rewards", rewards)
            for i in np.flatnonzero(playing & getattr(envs, "new_game", envs.autoreset)):
                if name:
                    bar.write(f"{name}_episode={len(returns)}, episodic_return={scores[i]:.2f}")
                returns.append(float(scores[i]))
                scores[i] = 0.0
                playing[i] = N == 1
    return returns


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` with sampled actions, then greedily; returns the greedy
    returns. `capture_video` records the episodes into its videos/."""
    args = replace(args, evaluate=args.evaluate.absolute())
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    for name in ("sampled", "eval"):
        returns = play(args, None, name == "sampled", name)
        print(f"{name}, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


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
    for name in ("seed", "num_envs", "num_steps", "log_std_init"):
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
