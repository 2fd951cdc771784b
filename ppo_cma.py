# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy",
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

    python ppo_cma.py --env-id Humanoid-v4                   # train, 10M steps
    python ppo_cma.py --resume runs/RUN                      # go on where it stopped
    python ppo_cma.py --evaluate runs/RUN --capture-video    # play the mean action

Expect 5,500 on Humanoid-v4 after 10M steps, in an hour and a half on one CPU core (README.md:
others). Tune `--iter-steps` (N): 4k for toys, 8k for planar robots, 32k for 3-D ones.
Left out on purpose: discrete or unbounded actions, gradient clipping, bootstrapping at time limits.
"""

import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

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
    seed: int = 1  # of everything: networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one; networks this small gain little from it
    num_threads: int = 1  # CPU threads of torch; more rarely pay for networks of this size
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # its project
    wandb_entity: str | None = None  # its entity (team)
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # go on with the run in this folder, with its own arguments
    evaluate: Path | None = None  # play the run in this folder greedily, and exit
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 10  # iterations between checkpoints

    # Algorithm
    env_id: Annotated[str, arg(aliases=["--env-name"])] = "Humanoid-v4"  # with a finite action Box
    total_timesteps: Annotated[int, arg(aliases=["--max-steps"])] = 10_000_000  # in whole episodes
    num_envs: int = 1  # environments played side by side; their whole episodes are pooled
    action_repeat: int = 2  # steps for which an action is held; their rewards are summed
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
        """A ValueError, which tyro shows, for what can't be meant."""
        self.mode = self.mode.lower().replace("_", "-")  # the original's spelling, too
        low, high = {"seed": 0, "n_updates": 2}, {"gamma": 1, "gae_lambda": 1}
        for name, value in vars(self).items():
            least, most = low.get(name, int(type(value) is int)), high.get(name, 1e18)
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value}: not in {least} ... {most}")
        if self.mode not in MODES:
            raise ValueError(f"--mode {self.mode}: not one of {', '.join(MODES)}")
        if self.resume and (self.run_dir or self.evaluate):
            raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")


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
def make_env(env_id: str, **options) -> gym.Env:
    """A gymnasium environment with flat observations; one clear line if there is no such thing."""
    gym.logger.min_level = gym.logger.ERROR  # v4 ids are "out of date", and meant
    try:
        module = "shimmy:" if env_id.startswith("dm_control/") else ""
        env = gym.make(f"{module}{env_id}", disable_env_checker=True, **options)
    except (gym.error.Error, ImportError, NotImplementedError) as error:
        fail(f"--env-id {env_id}: {error} (your own: module:Id; Atari: ppo_atari_multigpu.py)")
    space, actions = env.observation_space, env.action_space
    pixels = space.dtype == np.uint8 and len(space.shape) > 1
    flat = isinstance(actions, gym.spaces.Box) and len(actions.shape) == 1 and actions.is_bounded()
    if pixels or not space.is_np_flattenable or not flat:
        hint = "a vector and a flat, finite Box wanted; choices: ppo.py"
        fail(f"--env-id {env_id}: {space}, {actions}: {hint}; pixels: ppo_atari_multigpu.py")
    return env if gym.spaces.flatten_space(space) == space else gym.wrappers.FlattenObservation(env)


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Episodes(gym.Wrapper):
    """Seeded episodes, each begun when it is asked for; an action is held for some steps."""

    def __init__(self, env: gym.Env, args: Args, index: int):
        super().__init__(env)
        self.args, self.index, self.episode, self.over = args, index, -1, True

    def reset(self, **kwargs):
        self.episode, self.over, self.rewards = self.episode + 1, False, []
        obs, info = self.env.reset(seed=episode_seed(self.args.seed, self.index, self.episode))
        self.obs = np.array(obs, np.float32)
        return self.obs, info

    def step(self, action: np.ndarray):
        """Hold an action [A] for `action_repeat` steps or to the end; their rewards are summed."""
        total, last = 0.0, len(self.rewards) + self.args.action_repeat
        while len(self.rewards) < last and not self.over:
            obs, reward, terminated, truncated, info = self.env.step(action.copy())
            self.rewards.append(float(np.asarray(reward).item()))  # from any shape or type
            total += self.rewards[-1]
            self.over = bool(terminated or truncated)
        self.obs = np.array(obs, np.float32)
        if len(self.rewards) > 100_000 and not self.over:
            raise TimeoutError("100,000 steps, no end: whole episodes need max_episode_steps")
        return self.obs, total, bool(terminated), bool(truncated), info


# --- agent ----------------------------------------------------------------------------------------
class MLP(nn.Module):
    """Two layers of 128 leaky ReLUs and a linear output; each layer sees the input and every layer
    below it. The input's part in all three is one matrix product."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator):
        super().__init__()
        self.widths = (128, 128, outputs)
        sizes = [(width, inputs + 128 * k) for k, width in enumerate(self.widths)]  # a row a unit
        rows = [F.normalize(torch.randn(size, generator=generator)) for size in sizes]
        self.from_input = nn.Parameter(torch.cat([row[:, :inputs] for row in rows]))
        self.bias = nn.Parameter(torch.zeros(sum(self.widths)))  # until `center`
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
    """All that is needed to act and to learn in environments with the observation_space and
    action_space of `env`. In a loop of your own: `act`, `memorize`, `update_with_memorized`."""

    def __init__(self, env, args: Args | None = None, pretrain: bool = True):
        super().__init__()
        self.args = args = args or Args()
        (dim,), box = env.observation_space.shape, env.action_space
        if not box.is_bounded():
            raise ValueError(f"actions are {box}: PPO-CMA needs finite bounds")
        low, high = torch.tensor(box.low).float(), torch.tensor(box.high).float()  # [A]
        buffers = {"low": low, "high": high, "logvar_max": (high - low).square().log()}
        buffers |= {"logvar_min": torch.full_like(low, 0.01**2).log(), "updates": torch.tensor(0)}
        buffers |= {"initial_mean": (low + high) / 2, "initial_std": (high - low) / 2}
        buffers |= {"obs_sq_mean": torch.zeros(dim), "obs_scale": torch.ones(dim)}
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)
        self.rng = np.random.default_rng(args.seed)  # of actions
        self.generator = torch.Generator().manual_seed(args.seed)  # of weights and minibatches
        self.cma = args.mode.startswith("ppo-cma")  # else one network, its outputs shared out
        self.mean_net = MLP(dim, len(low) if self.cma else 2 * len(low), self.generator)
        self.var_net = MLP(dim, len(low), self.generator) if self.cma else self.mean_net
        self.critic = MLP(dim + 1, 1, self.generator)
        # Adam leaves alone what a loss gives no gradient: it is one for each network
        self.adam = torch.optim.Adam(self.parameters(), args.learning_rate, eps=1e-8, fused=True)
        self.history = []  # of the last iterations' (obs, actions, advantages)
        self.memory, self.running = [], {}  # finished episodes; environment -> its unfinished one
        if pretrain:
            pretrain_policy(self)

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
        clock = (0.001 if self.args.gamma > 0 else 0.0) * torch.as_tensor(time, device=obs.device)
        return torch.cat([obs * self.obs_scale, clock.expand(obs.shape[:-1])[..., None]], dim=-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None, time=0):
        """Action [B, A] (a clipped sample unless given), its log-density [B], the entropy [B] and
        the value [B] at raw observations [B, D], `time` decisions into their episodes."""
        if action is None:
            sample = self.act(obs.cpu().numpy(), self.noise(len(obs)))
            action = torch.as_tensor(sample, device=obs.device)
        policy = torch.distributions.Normal(self.mean(obs), (0.5 * self.logvar(obs)).exp())
        logprob, entropy = policy.log_prob(action).sum(-1), policy.entropy().sum(-1)
        return action, logprob, entropy, self.critic(self.critic_inputs(obs, time)).squeeze(-1)

    @torch.no_grad()
    def numpy_actor(self):
        """The policy as it is now, as a function of raw observations [N, D] and noise [N, A]. Numpy
        is several times faster than torch for the few observations of a step."""
        nets = [net.parameters() for net in dict.fromkeys((self.mean_net, self.var_net))]  # 2 or 1
        from_input, bias, from_first, from_both = map(torch.stack, zip(*nets, strict=True))
        from_input = (from_input * self.obs_scale).flatten(0, 1).T  # one product for all networks
        low, high = torch.cat([self.low, self.logvar_min]), torch.cat([self.high, self.logvar_max])
        tensors = [from_input, bias.flatten(), from_first.mT, from_both.mT, (low + high) / 2]
        tensors += [(high - low) / 2, self.low, self.high, self.initial_mean, self.initial_std]
        arrays = [x.contiguous().cpu().numpy() for x in tensors]
        from_input, bias, from_first, from_both, middle, half, low, high, *initial = arrays
        first = not self.updates

        def act(obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
            z = (obs @ from_input + bias).reshape(len(obs), len(nets), 1, -1)
            h1 = np.maximum(z[..., :128], 0.1 * z[..., :128])  # leaky ReLU
            h2 = z[..., 128:256] + h1 @ from_first
            h2 = np.maximum(h2, 0.1 * h2)
            raw = z[..., 256:] + np.concatenate((h1, h2), axis=-1) @ from_both
            # the sigmoid between two bounds, as a tanh about their middle
            policy = middle + half * np.tanh(0.5 * raw.reshape(len(obs), -1))
            mean, std = policy[:, : len(low)], np.exp(0.5 * policy[:, len(low) :])
            if first:  # the first iteration samples the initial Gaussian itself
                mean, std = np.tile(initial[0], (len(obs), 1)), initial[1]
            return mean if noise is None else np.minimum(np.maximum(mean + std * noise, low), high)

        return act

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions [N, A] at raw observations [N, D]: means or, with `noise(N)`, clipped samples."""
        return self.numpy_actor()(np.asarray(obs, np.float32), noise)

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions."""
        return self.rng.standard_normal((*shape, len(self.low)), np.float32)

    def memorize(self, obs: np.ndarray, action: np.ndarray, reward: float, done: bool, env=0):
        """Store a transition; `done` ends the episode of environment `env`, for any reason."""
        obs, action = np.array(obs, np.float32), np.array(action, np.float32)  # copies
        self.running.setdefault(env, []).append((obs, action, float(np.asarray(reward).item())))
        if done:
            self.memory.append(self.running.pop(env))

    def update_with_memorized(self) -> dict[str, float]:
        """Learn from the finished episodes, at least one, and forget them; returns the metrics. An
        episode still running stays, and counts in the update after its end."""
        episodes, self.memory = self.memory, []
        transitions = [transition for episode in episodes for transition in episode]
        obs, actions, rewards = map(np.array, zip(*transitions, strict=True))
        metrics = {"charts/mean_episodic_return": rewards.sum() / len(episodes)}
        return metrics | update(self, obs, actions, rewards, [len(episode) for episode in episodes])

    def training_state(self) -> dict:
        """What is needed to go on learning, but for what is memorized, for `torch.save`."""
        state = {"agent": self.state_dict(), "adam": self.adam.state_dict()}
        state |= {"history": self.history, "generator": self.generator.get_state()}
        return state | {"rng": self.rng.bit_generator.state}

    def load_training_state(self, state: dict):
        self.load_state_dict(state["agent"])
        self.adam.load_state_dict(state["adam"])
        self.history = [tuple(x.to(self.low) for x in batch) for batch in state["history"]]
        self.generator.set_state(state["generator"])
        self.rng.bit_generator.state = state["rng"]


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values [T + 1, ...]."""
    advantages = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    ended = np.logical_or(terminated, truncated)
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
    return advantages


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
    """The same for the mean, no gradient to the variance; bad actions attract to their mirror image
    about the old mean, weighted by a Gaussian kernel averaged over the action's dimensions."""
    logvar = logvar.detach()
    loss = -(F.relu(advantages) * log_density(actions, mean, logvar)).mean()
    if mirror:
        kernel = torch.exp(-0.5 * (actions - mean_old).square() / logvar.exp()).mean(-1)
        mirrored = log_density(2.0 * mean_old - actions, mean, logvar)
        loss = loss - (F.relu(-advantages) * kernel * mirrored).mean()
    return loss


def ppo_loss(actions, advantages, mean, logvar, log_density_old, clip_coef, ent_coef):
    """The clipped surrogate (Schulman et al. 2017, eq. 7) and the entropy bonus, for comparison."""
    ratio = torch.exp(log_density(actions, mean, logvar) - log_density_old)
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
        adam.step()
        losses.append(loss.detach())
    return {f"losses/{name}_loss": torch.stack(losses).mean().item()}


def pretrain_policy(agent: Agent):
    """Fit the policy to N(initial_mean, initial_std) at states from N(0, I), before any step."""
    shape = (256, len(agent.obs_scale))
    batches = (torch.randn(shape, generator=agent.generator) for _ in range(2000))
    first = next(batches)
    for net in {agent.mean_net, agent.var_net}:  # two, or one for both
        net.center(first)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        std_error = (0.5 * agent.logvar(x)).exp() - agent.initial_std
        return (agent.mean(x) - agent.initial_mean).square().mean() + std_error.square().mean()

    adam = torch.optim.Adam(agent.parameters(), agent.args.learning_rate, eps=1e-8, fused=True)
    fit("pretraining", adam, batches, loss_fn)


def update_obs_scale(agent: Agent, obs: torch.Tensor):
    """Divide observations [B, D] by twice their RMS, every iteration weighing the same. Uncentred;
    the scale starts at 1 and only shrinks, so small observations are never magnified."""
    agent.updates += 1
    agent.obs_sq_mean += (obs.square().mean(dim=0) - agent.obs_sq_mean) / agent.updates
    scale = 1.0 / (2.0 * agent.obs_sq_mean.sqrt() + 0.001)
    agent.obs_scale.copy_(torch.minimum(agent.obs_scale, scale))


def update(agent: Agent, obs, actions, rewards, lengths) -> dict[str, float]:
    """One iteration of learning, from whole episodes of `lengths` decisions, one after the other:
    obs [B, D] raw, actions [B, A], rewards [B]."""
    args, critic, adam, device = agent.args, agent.critic, agent.adam, agent.low.device
    time = np.concatenate([np.arange(length) for length in lengths])
    ends = np.append(time[1:] == 0, True)
    obs, actions, time = (torch.as_tensor(x, device=device) for x in (obs, actions, time))
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
        seen, *past = (torch.cat(tensors) for tensors in zip(*agent.history, strict=True))
        sizes = [len(advantages) for _, _, advantages in agent.history]
        minibatches = history_minibatches(sizes, shape, agent.generator).to(device)

        def past_loss(i: torch.Tensor) -> torch.Tensor:
            return variance_loss(*(x[i] for x in past), agent.mean(seen[i]), agent.logvar(seen[i]))

        metrics |= fit("variance", adam, minibatches, past_loss)
    logvar = agent.logvar(obs).detach()
    density_old = log_density(actions, mean_old, logvar)

    # then the mean, from this iteration, with the variance just learned; or else mean and variance
    def policy_loss(i: torch.Tensor) -> torch.Tensor:
        a, advantage, mean = actions[i], advantages[i], agent.mean(obs[i])
        if agent.cma:
            return mean_loss(a, advantage, mean, logvar[i], mean_old[i], args.mode == "ppo-cma-m")
        policy = mean, agent.logvar(obs[i])
        if args.mode == "ppo":
            return ppo_loss(a, advantage, *policy, density_old[i], args.clip_coef, args.ent_coef)
        return -(advantage * log_density(a, *policy)).mean()  # pg, pg-pos

    minibatches = torch.randint(len(obs), shape, generator=agent.generator).to(device)
    metrics |= fit("policy", adam, minibatches, policy_loss)
    unexplained = np.var(returns - values) / max(np.var(returns), 1e-12)
    entropy = 0.5 * (logvar + math.log(2.0 * math.pi * math.e)).sum(-1).mean()
    metrics |= {"losses/entropy": entropy.item(), "losses/explained_variance": 1.0 - unexplained}
    metrics["charts/policy_std"] = (0.5 * logvar).exp().mean().item()
    saturated = (mean_old - agent.initial_mean).abs() > 0.98 * agent.initial_std  # nearly bounds
    metrics["charts/saturated_means"] = saturated.double().mean().item()
    return metrics | {"charts/positive_advantages": (advantages > 0).double().mean().item()}


# --- rollout --------------------------------------------------------------------------------------
def rollout(agent: Agent, envs: list[Episodes], run: "Run", args: Args):
    """Play whole episodes, and memorize them: new ones start until N steps are reached, then the
    running ones play to their end. To cut them off would favour short episodes."""
    act, last, playing = agent.numpy_actor(), run.global_step + args.iter_steps, envs
    while playing:
        obs = np.array([env.reset()[0] if env.over else env.obs for env in playing])  # [K, D]
        actions = act(obs, agent.noise(len(playing)))  # [K, A]
        for k, env in enumerate(playing):
            run.global_step -= len(env.rewards)
            _, reward, *_ = env.step(actions[k])
            run.global_step += len(env.rewards)
            agent.memorize(obs[k], actions[k], reward, env.over, env.index)
        for env in playing:
            if env.over:
                run.log_episode(run.global_step, math.fsum(env.rewards), len(env.rewards))
        playing = [env for env in playing if run.global_step < last or not env.over]


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

            project = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            wandb.init(name=name, config=vars(args), sync_tensorboard=True, **project)
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

    def log_episode(self, step: int, episodic_return: float, length: int):
        self.csv.write(f"{step},{time.monotonic() - self.start:.2f},{episodic_return},{length}\n")
        self.writer.add_scalar("charts/episodic_return", episodic_return, step)
        self.writer.add_scalar("charts/episodic_length", length, step)
        self.bar.write(f"global_step={step}, episodic_return={episodic_return:.4f}")

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


def save(run: Run, agent: Agent, envs: list[Episodes]):
    """Everything needed to continue, whole or not at all: written aside, then renamed."""
    run.writer.flush()
    state = {"args": vars(run.args), "episodes": [env.episode for env in envs]}  # none is running
    state["counters"] = run.global_step, run.iteration, time.monotonic() - run.start, run.csv.tell()
    torch.save(state | agent.training_state(), run.folder / "checkpoint.pt.tmp")
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


def load(folder: Path, env=None, args: Args | None = None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args = args or checkpoint["args"]
    agent = Agent(env or make_env(args.env_id), args, pretrain=False)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        fail(f"{folder}: its agent does not fit the environment: {error}")
    return agent, args


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` greedily; `capture_video` records it into its videos/."""
    if args.capture_video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display
    env = make_env(args.env_id, **{"render_mode": "rgb_array"} if args.capture_video else {})
    if hasattr(env.unwrapped, "mujoco_renderer") and env.unwrapped.model.ncam:
        env.unwrapped.mujoco_renderer.camera_id = 0  # follows the robot
    if args.capture_video:
        videos = str(args.evaluate / "videos")
        env = gym.wrappers.RecordVideo(env, videos, lambda _: True, disable_logger=True)
    env = Episodes(env, args, 2**31)
    act, returns = load(args.evaluate, env)[0].numpy_actor(), []
    for episode in range(args.eval_episodes):
        obs, _ = env.reset()
        while not env.over:
            obs, *_ = env.step(act(obs[None])[0])
        returns.append(math.fsum(env.rewards))
        print(f"eval_episode={episode}, episodic_return={returns[-1]:.2f}", flush=True)
    env.close()
    print(f"greedy, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    envs = [Episodes(make_env(args.env_id), args, i) for i in range(args.num_envs)]
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = load(args.resume, envs[0], args)[0] if args.resume else Agent(envs[0], args)
    agent.to(device)
    if checkpoint:
        agent.load_training_state(checkpoint)
        for env, episode in zip(envs, checkpoint["episodes"], strict=True):
            env.episode = episode
    run = Run(args, checkpoint)
    run.bar.write(f"{args.env_id} on {device}, {args.mode}, in {run.folder}")
    stop, status = [], "failed"

    def handler(number, frame):  # ends training after this iteration; the next signal acts at once
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    signals = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)}
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        save(run, agent, envs)
        while run.global_step < args.total_timesteps and not stop:
            remaining = 1.0 - run.global_step / args.total_timesteps if args.anneal_lr else 1.0
            learning_rate = remaining * args.learning_rate
            agent.adam.param_groups[0]["lr"] = learning_rate
            rollout(agent, envs, run, args)
            metrics = agent.update_with_memorized()
            checked = {"observations": agent.obs_sq_mean} | metrics
            for name, x in (checked | agent.state_dict()).items():
                if not torch.as_tensor(x).isfinite().all():
                    raise FloatingPointError(f"iteration {run.iteration}: {name} is not finite")
            run.log(metrics | {"charts/learning_rate": learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent, envs)
        save(run, agent, envs)
        status = "running" if run.global_step < args.total_timesteps else "finished"
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
