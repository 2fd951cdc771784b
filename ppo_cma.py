# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.3,<4", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO-CMA: Proximal Policy Optimization with Covariance Matrix Adaptation, in one file.

Hämäläinen, Babadi, Ma & Lehtinen 2020, https://arxiv.org/abs/1810.02541, as in the code that made
the published curves (docs/ppo_cma.md: where the paper differs). Every iteration:

    1. play whole episodes with a ~ N(mu(s), var(s)) until N environment steps are reached
    2. fit the critic to Monte-Carlo returns; A = GAE(lambda) / std(A), never centred
    3. variance network:  min  -E_H[ max(A, 0) log N(a | mu, var) ]      over the last H iterations
    4. mean network:      min  -E  [ max(A, 0) log N(a | mu, var) ]      over this iteration
                               -E  [ max(-A, 0) k(a) log N(2 mu_old - a | mu, var) ]   (mirroring)

The variance comes first and measures deviations from the mean not yet moved, so it grows along the
direction of progress, as in CMA-ES: that prevents PPO's early loss of exploration. Mirroring makes
a negative advantage at `a` a positive one on the other side of the mean.

    python ppo_cma.py --env-id Humanoid-v4  # --resume runs/RUN goes on, --evaluate runs/RUN plays
    python ppo_cma.py --env-id Hopper-v4 --iter-steps 8000 --num-envs 4 --env-workers 2

Expect 5,600 over the last 100 episodes of training on Humanoid-v4 (10M steps, an hour and a half on
one CPU core), and 6,600 of the final policy. Tune `--iter-steps` (N): 4k for toys, 8k for planar
robots, 32k for 3-D ones.
Left out on purpose: discrete or unbounded actions, gradient clipping, bootstrapping at time limits.

In order: Args, agent, algorithm, rollout, train. Below the line after train nothing is PPO.
"""

import atexit
import contextlib
import copy
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
from typing import Annotated, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tyro.conf import arg

MODES = ("ppo-cma-m", "ppo-cma", "ppo", "pg", "pg-pos")


@dataclass
class Args:
    exp_name: Annotated[str, arg(aliases=["--run-suffix"])] = Path(__file__).stem  # in RUN's name
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
    env_id: Annotated[str, arg(aliases=["--env-name"])] = "Humanoid-v4"  # with a finite action Box
    env_kwargs: str = "{}"  # arguments of the environment as a JSON object: '{"NAME": 2}'
    max_episode_steps: int | None = None  # truncate episodes after that many steps
    num_envs: int = 1  # environments played side by side; their whole episodes are pooled
    env_workers: int = 0  # processes for num_envs > 1; 0: the main process
    action_repeat: int = 2  # steps for which an action is held; their rewards are summed

    # Algorithm
    total_timesteps: Annotated[int, arg(aliases=["--max-steps"])] = 10_000_000  # whole iterations
    mode: Annotated[str, arg(aliases=["-m"])] = "ppo-cma-m"  # or ppo-cma, ppo, pg, pg-pos
    iter_steps: int = 32_000  # N: environment steps per iteration, rounded up to whole episodes
    minibatch_size: Annotated[int, arg(aliases=["--batch-size"])] = 512  # M: in decisions
    n_updates: int = 100  # minibatches per iteration, for each of critic, variance and mean
    history_buffer_size: int = 9  # H: iterations whose samples train the variance
    learning_rate: Annotated[float, arg(aliases=["-lr"])] = 5e-4  # Adam's, for every network
    anneal_lr: bool = True  # lower the learning rate linearly; the original's is constant
    gamma: float = 0.99  # discount factor, per decision
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    clip_coef: Annotated[float, arg(aliases=["--ppo-epsilon"])] = 0.2  # epsilon of mode ppo
    ent_coef: Annotated[float, arg(aliases=["--ppo-ent-l-w"])] = 0.0  # entropy bonus of mode ppo

    def __post_init__(self):
        """Raise ValueError, which tyro shows, for wrong arguments."""
        self.mode = self.mode.lower().replace("_", "-")  # the original's spelling, too
        least = {"seed": 0, "env_workers": 0, "n_updates": 2}
        most = {"gamma": 1, "gae_lambda": 1}
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
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode}: not one of {', '.join(MODES)}")
        if self.env_id.startswith("envpool:"):
            raise ValueError("whole episodes can't be played with EnvPool")


# --- agent ----------------------------------------------------------------------------------------
class MLP(nn.Module):
    """Two layers of 128 leaky ReLUs and a linear output; each layer sees the input and every layer
    below it. The input's part in all three is one matrix product."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator):
        super().__init__()
        self.widths = (128, 128, outputs)
        rows = []  # of each layer; a unit's weights are a random vector of length 1
        for layer, width in enumerate(self.widths):
            size = width, inputs + 128 * layer
            rows.append(F.normalize(torch.randn(size, generator=generator)))
        self.from_input = nn.Parameter(torch.cat([row[:, :inputs] for row in rows]))
        self.bias = nn.Parameter(torch.zeros(sum(self.widths)))  # 0 until `center`
        self.from_first = nn.Parameter(rows[1][:, inputs:].contiguous())
        self.from_both = nn.Parameter(rows[2][:, inputs:].contiguous())

    def forward(self, x: torch.Tensor, layer: int = 2) -> torch.Tensor:
        """Outputs [..., outputs], or a layer's pre-activations, at inputs x [..., inputs]."""
        first, second, output = F.linear(x, self.from_input, self.bias).split(self.widths, dim=-1)
        h1 = F.leaky_relu(first, 0.1)
        second = second + F.linear(h1, self.from_first)
        h2 = F.leaky_relu(second, 0.1)
        output = output + F.linear(torch.cat([h1, h2], dim=-1), self.from_both)
        return (first, second, output)[layer]

    @torch.no_grad()
    def center(self, x: torch.Tensor):
        """Set the biases so that every pre-activation has mean 0 over the batch x [B, inputs]."""
        for layer, bias in enumerate(self.bias.split(self.widths)):
            bias -= self.forward(x, layer).mean(dim=0)


class Agent(nn.Module):
    """Policy and value function for environments with the spaces of `env`."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args = args or Args()
        box = env.action_space
        (dim,) = env.observation_space.shape
        self.action_shape = box.shape
        low = torch.tensor(box.low).float().ravel()  # [A]
        high = torch.tensor(box.high).float().ravel()
        buffers = {"low": low, "high": high, "logvar_max": (high - low).square().log()}
        buffers |= {"logvar_min": torch.full_like(low, 0.01**2).log(), "updates": torch.tensor(0)}
        buffers |= {"initial_mean": (low + high) / 2, "initial_std": (high - low) / 2}
        buffers |= {"obs_sq_mean": torch.zeros(dim), "obs_scale": torch.ones(dim)}
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self.rng = np.random.default_rng(args.seed)  # draws actions
        self.generator = torch.Generator().manual_seed(args.seed)  # draws weights and minibatches
        self.cma = args.mode.startswith("ppo-cma")  # otherwise one network has both as outputs
        self.mean_net = MLP(dim, len(low) if self.cma else 2 * len(low), self.generator)
        self.var_net = MLP(dim, len(low), self.generator) if self.cma else self.mean_net
        self.critic = MLP(dim + 1, 1, self.generator)
        self.time_unit = 0.001 if args.gamma > 0.0 else 0.0  # as the original
        self.history = []  # (obs, actions, advantages) of the last iterations

    def mean(self, obs: torch.Tensor) -> torch.Tensor:
        """mu [..., A] at raw observations [..., D]."""
        raw = self.mean_net(obs * self.obs_scale)[..., : len(self.low)]
        return self.low + (self.high - self.low) * torch.sigmoid(raw)

    def logvar(self, obs: torch.Tensor) -> torch.Tensor:
        """log var [..., A] at raw observations [..., D]; deviations from 0.01 to the full range."""
        raw = self.var_net(obs * self.obs_scale)[..., -len(self.low) :]
        return self.logvar_min + (self.logvar_max - self.logvar_min) * torch.sigmoid(raw)

    def critic_inputs(self, obs: torch.Tensor, time) -> torch.Tensor:
        """[..., D + 1]: raw observations [..., D], scaled, and decisions since the start [...]."""
        clock = self.time_unit * torch.as_tensor(time, device=obs.device)
        return torch.cat([obs * self.obs_scale, clock.expand(obs.shape[:-1])[..., None]], dim=-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None, time=0):
        """Action [B, A] (a clipped sample unless given), its log-density [B], the entropy [B] and
        the value [B] at raw observations [B, D], `time` decisions into their episodes."""
        if action is None:
            sample = numpy_actor(self)(obs.float().cpu().numpy(), self.noise(len(obs)))
            action = torch.as_tensor(sample, device=obs.device)
        policy = torch.distributions.Normal(self.mean(obs), (0.5 * self.logvar(obs)).exp())
        value = self.critic(self.critic_inputs(obs, time)).squeeze(-1)
        return action, policy.log_prob(action).sum(-1), policy.entropy().sum(-1), value

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Mean actions [N, ...] at observations [N, D]; given `noise(N)`, clipped samples. In the
        first iteration they are of N(initial_mean, initial_std), not of the networks."""
        actions = numpy_actor(self)(np.asarray(obs, np.float32), noise)
        return actions.reshape(-1, *self.action_shape)

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions."""
        return self.rng.standard_normal((*shape, len(self.low)), np.float32)


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
    """Whole episodes, one after the other. A row is a decision, held for `action_repeat` steps."""

    obs: np.ndarray  # [B, D], raw
    actions: np.ndarray  # [B, A], in the box
    rewards: np.ndarray  # [B]
    ended: np.ndarray  # [B], True in the last row of an episode, for any reason


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
    """The same for the mean; no gradient reaches the variance. Bad actions attract to their mirror
    image about the old mean, weighted by a Gaussian kernel averaged over the dimensions."""
    logvar = logvar.detach()
    loss = -(F.relu(advantages) * log_density(actions, mean, logvar)).mean()
    if mirror:
        kernel = torch.exp(-0.5 * (actions - mean_old).square() / logvar.exp()).mean(-1)
        mirrored = log_density(2.0 * mean_old - actions, mean, logvar)
        loss = loss - (F.relu(-advantages) * kernel * mirrored).mean()
    return loss


def ppo_loss(actions, advantages, mean, logvar, logprobs_old, clip_coef, ent_coef):
    """The clipped surrogate (Schulman et al. 2017, eq. 7) and the entropy bonus, for comparison."""
    ratio = torch.exp(log_density(actions, mean, logvar) - logprobs_old)
    clipped = torch.clamp(ratio, 1.0 - clip_coef, 1.0 + clip_coef)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages).mean()
    return -surrogate - ent_coef * 0.5 * logvar.sum(-1).mean()


def history_minibatches(sizes, shape, generator: torch.Generator) -> torch.Tensor:
    """Indices of this shape into the concatenated iterations of the given sizes: first an iteration
    is drawn, then a sample of it, so that each weighs the same whatever its size."""
    sizes = torch.tensor(sizes)
    slots = torch.randint(len(sizes), shape, generator=generator)
    within = torch.rand(shape, dtype=torch.float64, generator=generator) * sizes[slots]
    return (sizes.cumsum(0) - sizes)[slots] + within.long()


def fit(name: str, adam: torch.optim.Adam, minibatches, loss_fn) -> dict[str, float]:
    """One step of Adam per minibatch on `loss_fn(minibatch)`; the mean loss, as a metric."""
    losses = []
    for minibatch in minibatches:
        loss = loss_fn(minibatch)
        adam.zero_grad()
        loss.backward()
        adam.step()  # leaves alone what got no gradient: one Adam is as good as one a network
        losses.append(loss.detach())
    return {f"losses/{name}_loss": torch.stack(losses).mean().item()}


def pretrain_policy(agent: Agent, args: Args):
    """Fit the policy to N(initial_mean, initial_std) at states from N(0, I), before any step."""
    device = agent.low.device
    shape = (256, len(agent.obs_scale))
    batches = (torch.randn(shape, generator=agent.generator).to(device) for _ in range(2000))
    first = next(batches)
    for net in {agent.mean_net, agent.var_net}:  # two, or one for both
        net.center(first)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        std_error = (0.5 * agent.logvar(x)).exp() - agent.initial_std
        return (agent.mean(x) - agent.initial_mean).square().mean() + std_error.square().mean()

    adam = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-8, fused=True)
    fit("pretraining", adam, batches, loss_fn)


def update_obs_scale(agent: Agent, obs: torch.Tensor):
    """Divide observations [B, D] by twice their RMS, every iteration weighing the same. Uncentred;
    the scale starts at 1 and only shrinks, so small observations are never magnified."""
    agent.updates += 1
    agent.obs_sq_mean += (obs.square().mean(dim=0) - agent.obs_sq_mean) / agent.updates
    scale = 1.0 / (2.0 * agent.obs_sq_mean.sqrt() + 0.001)
    agent.obs_scale.copy_(torch.minimum(agent.obs_scale, scale))


def update(agent: Agent, data: Rollout, args: Args) -> dict[str, float]:
    """One iteration of learning from whole episodes; returns the metrics."""
    critic = agent.critic
    adam = agent.adam
    adam.param_groups[0]["lr"] = args.learning_rate
    device = agent.low.device
    rewards = data.rewards
    ends = data.ended
    obs = torch.as_tensor(data.obs, device=device)
    actions = torch.as_tensor(data.actions, device=device)
    lengths = np.diff(np.flatnonzero(ends), prepend=-1)  # of episodes, in decisions
    time = torch.as_tensor(np.concatenate([np.arange(x) for x in lengths]), device=device)
    shape = (args.n_updates, min(args.minibatch_size, len(obs)))  # drawn with replacement
    update_obs_scale(agent, obs)
    mean_old = agent.mean(obs).detach()

    # critic: L1 on Monte-Carlo returns, which are the GAE of V = 0 at lambda = 1
    returns = gae(rewards, np.zeros(len(obs) + 1), ends, ends, args.gamma, 1.0)
    targets = torch.tensor(returns).to(obs)[:, None]
    inputs = agent.critic_inputs(obs, time)
    minibatches = torch.randint(len(obs), shape, generator=agent.generator).to(device)
    if agent.updates == 1:  # the first minibatch ever sets the biases instead
        critic.center(inputs[minibatches[0]])
        minibatches = minibatches[1:]
    metrics = fit("value", adam, minibatches, lambda i: F.l1_loss(critic(inputs[i]), targets[i]))

    # advantages by the new critic; the value after an episode's last step is 0
    values = critic(inputs).detach().squeeze(-1).cpu().double().numpy()
    advantages = gae(rewards, np.append(values, 0.0), ends, ends, args.gamma, args.gae_lambda)
    advantages = torch.tensor(normalize_advantages(advantages, args.mode)).to(obs)

    if agent.cma:  # variance first, from the history, about the mean that has not moved yet
        agent.history = [*agent.history, (obs, actions, advantages)][-args.history_buffer_size :]
        past_obs, past_actions, past_advantages = map(torch.cat, zip(*agent.history, strict=True))
        sizes = [len(advantages) for *_, advantages in agent.history]
        minibatches = history_minibatches(sizes, shape, agent.generator).to(device)

        def past_loss(i: torch.Tensor) -> torch.Tensor:
            policy = agent.mean(past_obs[i]), agent.logvar(past_obs[i])
            return variance_loss(past_actions[i], past_advantages[i], *policy)

        metrics |= fit("variance", adam, minibatches, past_loss)
    logvar = agent.logvar(obs).detach()
    logprobs_old = log_density(actions, mean_old, logvar)

    # then the mean, from this iteration, with the variance just learned; or else mean and variance
    def policy_loss(i: torch.Tensor) -> torch.Tensor:
        a = actions[i]
        advantage = advantages[i]
        mean = agent.mean(obs[i])
        if agent.cma:
            return mean_loss(a, advantage, mean, logvar[i], mean_old[i], args.mode == "ppo-cma-m")
        policy = mean, agent.logvar(obs[i])
        if args.mode == "ppo":
            return ppo_loss(a, advantage, *policy, logprobs_old[i], args.clip_coef, args.ent_coef)
        return -(advantage * log_density(a, *policy)).mean()  # pg, pg-pos

    minibatches = torch.randint(len(obs), shape, generator=agent.generator).to(device)
    metrics |= fit("policy", adam, minibatches, policy_loss)
    unexplained = np.var(returns - values) / max(np.var(returns), 1e-12)
    entropy = 0.5 * (logvar + math.log(2.0 * math.pi * math.e)).sum(-1).mean()
    metrics |= {"losses/entropy": entropy.item(), "losses/explained_variance": 1.0 - unexplained}
    metrics["charts/mean_episodic_return"] = rewards.sum() / len(lengths)
    metrics["charts/policy_std"] = (0.5 * logvar).exp().mean().item()
    saturated = (mean_old - agent.initial_mean).abs() > 0.98 * agent.initial_std  # near a bound
    metrics["charts/saturated_means"] = saturated.double().mean().item()
    return metrics | {"charts/positive_advantages": (advantages > 0).double().mean().item()}


# --- rollout and training -------------------------------------------------------------------------
def whole_episodes(ended: np.ndarray) -> list[tuple[slice, int]]:
    """Rows and environment of each episode, from the rows [T, N] that end one; in this order."""
    start = [0] * ended.shape[1]
    episodes = []
    for t, i in np.argwhere(ended).tolist():
        episodes.append((slice(start[i], t + 1), i))
        start[i] = t + 1
    return episodes


def rollout(agent: Agent, envs: "Envs | WorkerEnvs", run: "Run", args: Args) -> Rollout:
    """Play whole episodes: new ones begin until N steps are taken, then the running ones play to
    their ends. To cut them off would favour short episodes."""
    shape = args.num_envs, len(agent.low)
    envs.step(np.zeros(shape), envs.autoreset)  # begins episodes where the last ones ended
    playing = np.ones(args.num_envs, bool)  # [N], the others wait
    total = 0  # steps in all environments
    rows = []
    act = numpy_actor(agent)
    while np.count_nonzero(playing):
        obs = envs.obs.copy()
        actions = np.zeros(shape, np.float32)
        noise = np.zeros(shape, np.float32)
        noise[playing] = agent.noise(np.count_nonzero(playing))
        actions[playing] = act(obs[playing], noise[playing])
        rewards, terminated, truncated, steps = envs.step(actions, playing)
        ended = terminated | truncated
        rows.append((obs, actions, rewards, ended, noise, steps))
        total += sum(steps.tolist())
        if np.count_nonzero(ended):
            playing &= ~ended | (total < args.iter_steps)
            envs.step(actions, playing & ended)  # begins new episodes
        if len(rows) > args.iter_steps + 100_000:
            raise RuntimeError("an endless episode: --max-episode-steps 1000")
    obs, actions, rewards, ended, noise, steps = map(np.array, zip(*rows, strict=True))  # [T, N]
    episodes = whole_episodes(ended)
    run.log_rollout(rewards, steps, episodes)  # rewards changed later are learned, not logged
    fields = {"obs": obs, "actions": actions, "rewards": rewards, "ended": ended, "noise": noise}
    fields = {k: np.concatenate([x[episode] for episode in episodes]) for k, x in fields.items()}
    noise = fields.pop("noise")
    check_actor(agent, fields["obs"][:8], fields["actions"][:8], noise[:8])
    return Rollout(**fields)


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    here = Path.cwd()  # an environment may change it
    envs = make_envs(args, args.num_envs, checkpoint)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = Agent(envs, args).to(device)
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-8, fused=True)
    if args.resume:
        agent.load_state_dict(load(args.resume, envs)[0].state_dict())
        agent.adam.load_state_dict(agent.adam.state_dict() | {"state": checkpoint["adam"]})
        agent.history = [[x.to(device) for x in batch] for batch in checkpoint["history"]]
        agent.rng.bit_generator.state = checkpoint["rng"]
        agent.generator.set_state(checkpoint["generator"])
    else:
        pretrain_policy(agent, args)
    with contextlib.closing(envs), Run(args, checkpoint, here) as run, stop_signals() as signals:
        run.bar.write("keep observations and rewards near 1 in size: docs/your_environment.md")
        save(run, agent)
        while run.global_step < args.total_timesteps and not signals:
            remaining = 1.0 - run.global_step / args.total_timesteps
            scheduled = copy.copy(args)  # coefficients that fall are set here, and only here
            if args.anneal_lr:
                scheduled.learning_rate *= remaining
            data = rollout(agent, envs, run, args)
            metrics = update(agent, data, scheduled)
            check_finite(run.iteration, data._asdict() | metrics | agent.state_dict())
            run.log(metrics | {"charts/learning_rate": scheduled.learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent)
        save(run, agent)
    print_next_command(run, here, run.global_step >= args.total_timesteps)
    if run.global_step < args.total_timesteps:
        raise SystemExit(128 + signals[0])
    if args.capture_video:
        evaluate(replace(args, evaluate=run.folder))
    return run.folder


# ==== below this line nothing is PPO ==============================================================
# --- speed ----------------------------------------------------------------------------------------
@torch.no_grad()
def numpy_policy(agent: Agent):
    """The present mean and deviation, a function of raw observations [N, D]; see `check_actor`."""
    raw = mlps_as_numpy(list(dict.fromkeys((agent.mean_net, agent.var_net))), agent.obs_scale)
    low = torch.cat([agent.low, agent.logvar_min]).cpu().numpy()
    high = torch.cat([agent.high, agent.logvar_max]).cpu().numpy()
    middle = (low + high) / 2
    half = (high - low) / 2
    dims = len(agent.low)

    def policy(obs: np.ndarray):
        # the sigmoid between two bounds, as a tanh about their middle
        both = middle + half * np.tanh(0.5 * raw(obs))
        return both[:, :dims], np.exp(0.5 * both[:, dims:])

    return policy


def numpy_actor(agent: Agent):
    """`agent.act` with the present weights, in numpy, for rows [N, D] and noise [N, A]."""
    policy = numpy_policy(agent)
    low = agent.low.cpu().numpy()
    high = agent.high.cpu().numpy()
    if not agent.updates:  # the first iteration
        initial = agent.initial_mean.cpu().numpy(), agent.initial_std.cpu().numpy()

        def policy(obs: np.ndarray):
            return [np.tile(x, (len(obs), 1)) for x in initial]

    def act(obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        mean, std = policy(obs)
        x = mean if noise is None else mean + std * noise
        return np.minimum(np.maximum(x, low), high)

    return act


@torch.no_grad()
def mlps_as_numpy(nets: list[nn.Module], scale: torch.Tensor):
    """The outputs of networks at scale * x, side by side, with the present weights, as a function
    of arrays x [N, D]. `MLP`s run in numpy, all in one product, which is several times faster than
    torch for the few rows of a step; any other network runs in torch."""
    names = ["from_input", "bias", "from_first", "from_both"]
    if any([name for name, _ in net.named_parameters()] != names for net in nets):
        scale = scale.cpu().clone()
        nets = [copy.deepcopy(net).cpu().requires_grad_(False) for net in nets]

        def in_torch(x: np.ndarray) -> np.ndarray:
            inputs = torch.from_numpy(x) * scale
            return torch.cat([net(inputs) for net in nets], dim=-1).numpy()

        return in_torch
    parameters = zip(*[net.parameters() for net in nets], strict=True)
    from_input, bias, from_first, from_both = (torch.stack(each) for each in parameters)
    from_input = (from_input * scale).flatten(0, 1).T
    tensors = from_input, bias.flatten(), from_first.mT, from_both.mT
    from_input, bias, from_first, from_both = (x.contiguous().cpu().numpy() for x in tensors)

    def function(x: np.ndarray) -> np.ndarray:
        z = (x @ from_input + bias).reshape(len(x), len(nets), 1, -1)
        h1 = np.maximum(z[..., :128], 0.1 * z[..., :128])  # leaky ReLU
        h2 = z[..., 128:256] + h1 @ from_first
        h2 = np.maximum(h2, 0.1 * h2)
        output = z[..., 256:] + np.concatenate((h1, h2), axis=-1) @ from_both
        return output.reshape(len(x), -1)

    return function


@torch.no_grad()
def check_actor(agent: Agent, obs: np.ndarray, actions: np.ndarray, noise: np.ndarray):
    """Raise RuntimeError if the actions [B, A] taken at observations [B, D] by this noise are not
    those of the learning policy."""
    obs, actions, noise = (torch.as_tensor(x).to(agent.low) for x in (obs, actions, noise))
    mean, std = agent.mean(obs), (0.5 * agent.logvar(obs)).exp()
    if not agent.updates:  # the first iteration
        mean, std = agent.initial_mean, agent.initial_std
    expected = (mean + std * noise).clamp(agent.low, agent.high)
    if ((actions - expected).abs() > 1e-3 * (agent.high - agent.low + expected.abs())).any():
        raise RuntimeError("actions are of another policy than mean and logvar learn")


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
    sides = np.float32(actions.high) - np.float32(actions.low)
    if not ((sides > 1e-6) & (sides < 1e6)).all():  # their squares bound the variance
        raise gym.error.Error(f"{actions}: its sides must be from 1e-6 to 1e6")


def episode_seed(*key: int) -> int:
    """The seed of an episode from (seed, environment, episode): no two runs share one. The global
    generators get it, too: most environments have their own, `np_random`, a few do not."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed


def env_actions(box: gym.spaces.Box, actions: np.ndarray) -> np.ndarray:
    """Actions [N, A] in the box's shape and type, rounded if it has whole numbers. They were
    clipped, but to bounds of 32 bits."""
    shaped = actions.reshape(-1, *box.shape)
    if box.dtype.kind in "iub":
        shaped = np.rint(shaped)
    return np.minimum(np.maximum(shaped, box.low), box.high).astype(box.dtype, copy=False)


class Envs:
    """Environments in this process, stepped one after the other; `indices` are theirs in the run.
    Every episode has its own seed; `episodes` are the numbers of the first ones. Autoreset is "next
    step": the step that ends an episode returns its true last observation; the next one ignores its
    action and returns a new episode's first observation with reward 0."""

    def __init__(self, args: Args, indices, episodes: list[int]):
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
        for i, index in enumerate(indices):
            self.begin(i, episodes[index] if episodes else 0)

    def begin(self, i: int, number: int):
        """Begin an environment's episode of this number."""
        self.episode_numbers[i] = number
        seed = episode_seed(self.args.seed, self.indices[i], number)
        obs, _ = self.envs[i].reset(seed=seed)
        self.obs[i] = np.reshape(obs, self.observation_space.shape)  # no other shape is broadcast

    def step(self, actions: np.ndarray, playing: np.ndarray):
        """Take actions [N, A] in the environments that are `playing` [N], each for `action_repeat`
        steps or to its episode's end: rewards, terminated, truncated, steps [N]. The others
        wait."""
        rewards = np.zeros(len(actions))
        terminated = np.zeros(len(actions), bool)
        truncated = np.zeros(len(actions), bool)
        steps = np.zeros(len(actions), int)
        rows = env_actions(self.action_space, actions)
        for i in playing.nonzero()[0]:
            if self.autoreset[i]:
                self.begin(i, self.episode_numbers[i] + 1)
                continue
            while steps[i] < self.args.action_repeat and not (terminated[i] or truncated[i]):
                obs, reward, terminated[i], truncated[i], _ = self.envs[i].step(rows[i].copy())
                rewards[i] += np.asarray(reward).item()
                steps[i] += 1
            self.obs[i] = np.reshape(obs, self.observation_space.shape)
        self.autoreset = np.where(playing, terminated | truncated, self.autoreset)
        return rewards, terminated, truncated, steps

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
        """`Envs.step`: rewards, terminated, truncated, steps [N]."""
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
        # the number of each environment's next episode; between rollouts none is running
        self.episodes = checkpoint.get("episodes", [0] * args.num_envs)
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
        self.bar.write(f"{args.env_id}, {args.mode}, in {self.folder}")
        self.write_json("running")

    def __exit__(self, kind, *_):
        if kind is SystemExit:  # an environment's, which would end without a word
            traceback.print_exc()
        ended = self.global_step >= self.args.total_timesteps
        self.write_json("failed" if kind else "finished" if ended else "running")
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        self.csv.close()

    def log_rollout(self, rewards: np.ndarray, steps: np.ndarray, episodes: list):
        """Take in a rollout, [T, N] each: log its episodes, each some rows of an environment."""
        seconds = time.monotonic() - self.start
        global_steps = self.global_step + steps.sum(axis=1).cumsum()
        self.global_step = int(global_steps[-1])
        scores = [float(rewards[episode].sum()) for episode in episodes]
        lengths = [int(steps[episode].sum()) for episode in episodes]
        for (rows, i), score, length in zip(episodes, scores, lengths, strict=True):
            self.csv.write(f"{global_steps[rows.stop - 1]},{seconds:.2f},{score},{length}\n")
            self.last_returns.append(score)
            self.episodes[i] += 1
        score = np.mean(scores)
        line = f"global_step={self.global_step}, episodic_return={score:.4f}"
        self.bar.write(f"{line}, episodes={len(scores)}, SPS={self.global_step / seconds:.0f}")
        self.writer.add_scalar("charts/episodic_return", score, self.global_step)
        self.writer.add_scalar("charts/episodic_length", np.mean(lengths), self.global_step)

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
    state |= {"history": agent.history, "generator": agent.generator.get_state()}
    state |= {"global_step": run.global_step, "iteration": run.iteration}
    state |= {"seconds": time.monotonic() - run.start, "last_returns": list(run.last_returns)}
    state["csv_size"] = (run.folder / "episodes.csv").stat().st_size
    state |= {"episodes": run.episodes, "wandb": run.wandb and run.wandb.id}
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


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` with sampled actions, then the same episodes greedily;
    returns the greedy returns. `capture_video` records the first of these into its videos/."""
    folder = args.evaluate.absolute()
    options = json.loads(args.env_kwargs)
    if args.capture_video:
        options["render_mode"] = "rgb_array"
        os.environ.setdefault("MUJOCO_GL", "egl" if sys.platform == "linux" else "glfw")
    args = replace(args, env_kwargs=json.dumps(options))
    for name in ("sampled", "eval"):
        envs = make_envs(args, 1, {})
        envs.indices = [2**31]  # other seeds than in training
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
                rewards, *_ = envs.step(act(envs.obs, noise), np.ones(1, bool))
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
    for name, value in vars(checkpoint.get("raw", saved)).items():
        if getattr(args, name) == getattr(saved, name) != value:  # it names a module or a file
            fail(f"{folder}: give --{name.replace('_', '-')} {shlex.quote(value)} again")
    for name in ("seed", "num_envs"):
        if args.resume and getattr(args, name) != getattr(saved, name):
            fail(f"{name}: {folder} keeps its {getattr(saved, name)}: leave the flag out")
    done = sum('"status": "finished"' in x.read_text() for x in Path(folder).glob("run.json"))
    steps = min(checkpoint.get("global_step", 0), saved.total_timesteps) + done
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
