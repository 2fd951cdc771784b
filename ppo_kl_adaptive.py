# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy",
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

    python ppo_kl_adaptive.py --env-id Hopper-v4                    # train, 1M steps
    python ppo_kl_adaptive.py HalfCheetah-v4 -n 3000 -b 5           # the original's command line
    python ppo_kl_adaptive.py --resume runs/RUN                     # go on where it stopped
    python ppo_kl_adaptive.py --evaluate runs/RUN --capture-video   # play it greedily

This is `--servo coady`. `schulman` is the PPO paper's: beta doubles at D > 1.5 d, halves at D < d /
1.5, no more; with `fixed` it stays. `learning-rate` is what rl_games and RSL-RL call adaptive: the
clipped loss, no penalty, and after each step, D > 2 d: rate / 1.5, D < d / 2: rate * 1.5.

Expect 2,600 on Hopper-v4 after 1.5M steps (one seed of three falls back to 500) and 900 to 2,600 on
HalfCheetah-v4 after 1M, in three to five minutes per 1M steps on one CPU core (README.md: others).
Left out on purpose: pixels, recurrence, several or mixed action branches.
"""

import importlib.util
import itertools
import json
import math
import os
import shlex
import signal
import sys
import time
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
    exp_name: str = Path(__file__).stem  # the experiment's name, part of the run's
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
    env_id: Annotated[str, arg(aliases=["--env-name"])] = "Hopper-v4"  # gymnasium's, dm_control/...
    total_timesteps: int = 1_000_000  # steps of the whole run; the last iteration may overshoot
    num_episodes: Annotated[int, arg(aliases=["-n"])] = 0  # of the whole run, instead of steps
    num_envs: int = 1  # environments played side by side; their whole episodes are pooled
    episodes_per_batch: Annotated[int, arg(aliases=["--batch-size", "-b"])] = 20  # an iteration's b
    gamma: Annotated[float, arg(aliases=["-g"])] = 0.995  # discount factor
    gae_lambda: Annotated[float, arg(aliases=["--lam", "-l"])] = 0.98  # lambda of the advantage
    update_epochs: int = 20  # most passes of the policy over an iteration's batch, one step each
    value_epochs: int = 10  # passes of the value function, in minibatches of 256 to 511
    hid1_mult: Annotated[int, arg(aliases=["-m"])] = 10  # first hidden layers' units per input
    policy_logvar: Annotated[float, arg(aliases=["-v"])] = -1.0  # initial log variance of actions
    learning_rate: float | None = None  # the policy's; default 9e-4 / sqrt(second layer's units)
    value_learning_rate: float | None = None  # its own; default 1e-2 / sqrt(second layer's units)
    servo: Literal["coady", "schulman", "fixed", "learning-rate"] = "coady"  # what adapts
    kl_targ: Annotated[float | None, arg(aliases=["-k"])] = None  # d: coady's 0.003, others 0.01
    beta: float | None = None  # weight of the KL penalty at first; 1, with learning-rate 0
    bootstrap_truncation: bool = False  # departure: the value after a time limit is not 0
    lambda_returns: bool = False  # departure: the value function learns advantages + values

    def __post_init__(self):
        """A ValueError, which tyro shows, for what can't be meant."""
        low = {"learning_rate": 1e-9, "value_learning_rate": 1e-9, "kl_targ": 1e-9, "seed": 0}
        low |= {"num_episodes": 0, "policy_logvar": -20}
        high = {"gamma": 1, "gae_lambda": 1, "policy_logvar": 20}
        high |= {"num_envs": self.episodes_per_batch}
        for name, value in vars(self).items():
            least, most = low.get(name, int(type(value) is int)), high.get(name, 1e18)
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value}: not in {least} ... {most}")
        if self.resume and (self.run_dir or self.evaluate):
            raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args; with --resume or --evaluate, on top of that run's arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):  # the original's environment name
        argv = ["--env-id", *argv]

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
    flat = isinstance(actions, gym.spaces.Box) and len(actions.shape) == 1
    discrete = isinstance(actions, gym.spaces.Discrete)
    if pixels or not space.is_np_flattenable or not (flat or discrete):
        hint = "a vector and a flat Box or Discrete wanted; several choices: ppo.py"
        fail(f"--env-id {env_id}: {space}, {actions}: {hint}; pixels: ppo_atari_multigpu.py")
    return env if gym.spaces.flatten_space(space) == space else gym.wrappers.FlattenObservation(env)


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Episodes(gym.Wrapper):
    """Seeds every episode by (seed, environment, episode), and keeps the steps of the running one.
    The next one starts when it is asked for."""

    def __init__(self, env: gym.Env, args: Args, index: int):
        super().__init__(env)
        self.args, self.index, self.episode, self.over = args, index, -1, True
        self.first = getattr(self.action_space, "start", 0)  # of Discrete actions

    def reset(self, **kwargs):
        self.episode, self.over, self.actions, self.rewards = self.episode + 1, False, [], []
        obs, info = self.env.reset(seed=episode_seed(self.args.seed, self.index, self.episode))
        self.obs = [np.array(obs, np.float32)]
        return obs, info

    def step(self, action: np.ndarray):
        """Take an action [A], not clipped to the box, or a choice counted from 0."""
        obs, reward, terminated, truncated, info = self.env.step(action + self.first)  # a copy
        self.obs.append(np.array(obs, np.float32))
        self.actions.append(action)
        self.rewards.append(float(np.asarray(reward).item()))  # from any shape or type
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        self.over = self.terminated or self.truncated
        if len(self.rewards) > 100_000 and not self.over:
            raise TimeoutError("100,000 steps, no end: whole episodes need max_episode_steps")
        return obs, self.rewards[-1], self.terminated, self.truncated, info


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

    def entropy(self) -> torch.Tensor:
        return 0.5 * (self.logvar + math.log(2.0 * math.pi * math.e)).sum(-1)


class Categorical(NamedTuple):
    logprobs: torch.Tensor  # [B, n]

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:  # [B]
        return self.logprobs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def kl(self, new: "Categorical") -> torch.Tensor:  # KL(self || new) [B]
        return (self.logprobs.exp() * (self.logprobs - new.logprobs)).sum(-1)

    def entropy(self) -> torch.Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum(-1)


def mlp(inputs: int, hid1_mult: int, third: int, outputs: int) -> nn.Sequential:
    """Three layers of tanh units, the second of the geometric mean of the others' numbers, and a
    linear one; weights ~ N(0, 1 / fan-in) in all, no bias."""
    first = hid1_mult * inputs
    sizes = inputs, first, math.isqrt(first * third), third, outputs
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())][:-1])


class Agent(nn.Module):
    """Networks, scale of observations, optimisers and servo: all that is needed to act and to learn
    in environments with the spaces of `env`. `time` is the number of an episode's steps so far."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args, space, (dim,) = args or Args(), env.action_space, env.observation_space.shape
        self.discrete = isinstance(space, gym.spaces.Discrete)
        outputs = int(space.n) if self.discrete else space.shape[0]
        self.actor = mlp(dim + 1, args.hid1_mult, 10 * outputs, outputs)
        self.critic = mlp(dim + 1, args.hid1_mult, 5, 1)
        groups = [{"params": self.actor.parameters(), "speed": 1}]
        if not self.discrete:
            # the original's is the sum of `speed` equal parameters, and Adam moves each as far
            self.actor_logvar = nn.Parameter(torch.full((outputs,), args.policy_logvar))
            groups.append({"params": [self.actor_logvar], "speed": 100 * outputs // 48})
        rate = args.learning_rate or 9e-4 / math.sqrt(self.actor[2].out_features)
        value_rate = args.value_learning_rate or 1e-2 / math.sqrt(self.critic[2].out_features)
        value_adam = torch.optim.Adam(self.critic.parameters(), value_rate, fused=True)
        policy_adam = torch.optim.Adam(groups, rate, fused=True)
        self.optimizers = {"policy": policy_adam, "value": value_adam}
        self.obs_moments = RunningMoments((dim,))
        self.obs_moments.var.zero_()  # nothing seen, no spread: warm-up sees observations / 0.3
        self.replay = ()  # features [B, D + 1] and returns [B] of the batch before
        given = {k: x for k, x in vars(args).items() if k in ("kl_targ", "beta") and x is not None}
        self.servo = Servo(**PRESETS[args.servo] | given)
        self.rng = np.random.default_rng(args.seed)  # of actions and minibatches

    def features(self, obs: torch.Tensor, time) -> torch.Tensor:
        """Raw observations [..., D] less their mean, over 3 (deviation + 0.1), and time [...]."""
        scaled = (obs - self.obs_moments.mean) / (3.0 * (self.obs_moments.var.sqrt() + 0.1))
        time = 0.001 * torch.as_tensor(time, device=obs.device).expand(obs.shape[:-1])
        return torch.cat([scaled, time.unsqueeze(-1)], dim=-1).float()

    def policy(self, features: torch.Tensor) -> Gaussian | Categorical:
        """The distribution of actions at features [B, D + 1]."""
        output = self.actor(features)
        if self.discrete:
            return Categorical(output.log_softmax(dim=-1))
        return Gaussian(output, self.actor_logvar.expand_as(output).clone())

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None, time=0):
        """Action (sampled unless given), its log-probability [B], entropy [B] and value [B] at raw
        observations [B, D], `time` steps into their episodes."""
        features = self.features(obs, time)
        policy, value = self.policy(features), self.critic(features).squeeze(-1)
        if action is None:
            sample = self.act(obs.cpu().numpy(), self.noise(len(obs)), time)
            action = torch.as_tensor(sample, device=obs.device)
        return action, policy.log_prob(action), policy.entropy(), value

    @torch.no_grad()
    def numpy_actor(self):
        """The policy as it is now, as a function of raw observations [N, D], noise and time [N].
        Numpy is several times faster than torch for the few observations of a step."""
        moments, logvar = self.obs_moments, getattr(self, "actor_logvar", torch.zeros(()))
        scale = (1.0 / (3.0 * (moments.var.sqrt() + 0.1))).float()
        tensors = moments.mean.float(), scale, (0.5 * logvar).exp(), *self.actor.parameters()
        shift, scale, std, *hidden, weight, bias = (x.clone().cpu().numpy().T for x in tensors)

        def act(obs: np.ndarray, noise: np.ndarray | None = None, time=0) -> np.ndarray:
            x = np.empty((len(obs), len(shift) + 1), np.float32)
            x[:, :-1] = (obs - shift) * scale
            x[:, -1] = 0.001 * np.asarray(time)
            for w, b in zip(hidden[::2], hidden[1::2], strict=True):
                x = np.tanh(x @ w + b)
            x = x @ weight + bias
            x = x if noise is None else x + std * noise
            return x.argmax(axis=-1) if self.discrete else x

        return act

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None, time=0) -> np.ndarray:
        """Actions [N, A] or [N] at raw observations [N, D] and time [N], or one time for all: the
        means or likeliest ones or, given `noise(N)`, samples. They may lie beyond the box."""
        return self.numpy_actor()(np.asarray(obs, np.float32), noise, time)

    def noise(self, num: int) -> np.ndarray:
        """Noise for `num` actions; for choices Gumbel's, so that the argmax is a sample."""
        shape = num, self.actor[-1].out_features
        if self.discrete:
            return self.rng.gumbel(size=shape).astype(np.float32)
        return self.rng.standard_normal(shape, np.float32)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values [T + 1, ...]."""
    advantages = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    ended = np.logical_or(terminated, truncated)
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
    return advantages


class Rollout(NamedTuple):
    obs: np.ndarray  # [T + 1, E, D], raw, of E whole episodes, the longest of T steps
    actions: np.ndarray  # [T, E, A] or [T, E], as sampled
    rewards: np.ndarray  # [T, E]
    lengths: np.ndarray  # [E], steps; beyond them all is 0 and means nothing
    terminated: np.ndarray  # [E], at the last step
    truncated: np.ndarray  # [E], at the last step

    @property
    def valid(self) -> np.ndarray:  # [T, E]
        return np.arange(len(self.rewards))[:, None] < self.lengths


@dataclass
class Servo:
    """Holds the KL of an iteration's update near kl_targ, by the weight of the penalty, beta, or by
    the learning rate. These numbers are Coady's, PRESETS what others have instead."""

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
        """After an update that ended at this KL. What moves the rate is beta as just set."""
        if kl > self.kl_targ * self.tolerance:
            self.beta = min(self.beta_max, self.beta * self.factor)
            if self.lr_servo == "with-beta" and self.beta > 30 and self.lr_multiplier > 0.1:
                self.lr_multiplier /= 1.5
        elif kl < self.kl_targ / self.tolerance:
            self.beta = max(self.beta_min, self.beta / self.factor)
            if self.lr_servo == "with-beta" and self.beta < 1 / 30 and self.lr_multiplier < 10:
                self.lr_multiplier *= 1.5

    def adapt_rate(self, kl: float, learning_rate: float):
        """After a pass over the batch; the rate stays between 1e-5 and 1e-2."""
        if self.lr_servo == "with-kl" and kl > self.kl_targ * self.tolerance:
            self.lr_multiplier = max(self.lr_multiplier / 1.5, 1e-5 / learning_rate)
        elif self.lr_servo == "with-kl" and 0.0 < kl < self.kl_targ / self.tolerance:
            self.lr_multiplier = min(self.lr_multiplier * 1.5, 1e-2 / learning_rate)


PAPER = {"kl_targ": 0.01, "tolerance": 1.5, "factor": 2.0, "beta_min": 0.0, "beta_max": 1e9}
PAPER |= {"hinge_coef": 0.0, "early_stop": math.inf, "lr_servo": "never"}
RATE = {"beta": 0.0, "factor": 1.0, "tolerance": 2.0, "clip_coef": 0.2, "lr_servo": "with-kl"}
PRESETS = {"coady": {}, "schulman": PAPER, "fixed": PAPER | {"factor": 1.0}}
PRESETS |= {"learning-rate": PAPER | RATE}


def advantages_and_returns(data: Rollout, values: np.ndarray, args: Args):
    """Advantages and targets of the value function [T, E], given values [T + 1, E]. The value after
    an episode's last step is 0, unless a time limit is to bootstrap."""
    rewards = data.rewards * (1.0 - args.gamma if args.gamma < 0.999 else 1.0)
    last = np.arange(1, len(values))[:, None] == data.lengths
    zero_after = data.terminated | (data.truncated & (not args.bootstrap_truncation))
    advantages = gae(rewards, values, last & zero_after, last, args.gamma, args.gae_lambda)
    if args.lambda_returns:
        return advantages, advantages + values[:-1]
    # discounted sums of rewards: the GAE at lambda = 1 of values that are 0 but after the end
    after = np.where(np.arange(len(values))[:, None] == data.lengths, values, 0.0)
    return advantages, gae(rewards, after, last & zero_after, last, args.gamma, 1.0)


def policy_loss(policy, old, old_logprobs, actions, advantages, servo: Servo):
    """The penalised objective, -E[r A] alone, the mean KL(old || new) and the mean entropy."""
    ratio = (policy.log_prob(actions) - old_logprobs).exp()
    surrogate = ratio * advantages
    if servo.clip_coef:
        clipped = ratio.clamp(1.0 - servo.clip_coef, 1.0 + servo.clip_coef)
        surrogate = torch.min(surrogate, clipped * advantages)
    kl = old.kl(policy).mean()
    hinge = (kl - 2.0 * servo.kl_targ).clamp(min=0.0).square()
    loss = -surrogate.mean() + servo.beta * kl + servo.hinge_coef * hinge
    return loss, -(ratio * advantages).mean(), kl, policy.entropy().mean()


def fit_policy(agent: Agent, features, actions, advantages, args: Args) -> dict[str, float]:
    """Up to `update_epochs` passes over the batch [B, ...], the early stop, and the servo."""
    servo, adam = agent.servo, agent.optimizers["policy"]
    with torch.no_grad():
        old = agent.policy(features)
        old_logprobs = old.log_prob(actions)
    rate = adam.defaults["lr"]
    for epoch in range(args.update_epochs + 1):
        # the loss that the next step descends also measures what the last one did
        given = old, old_logprobs, actions, advantages, servo
        loss, *measured = policy_loss(agent.policy(features), *given)
        surrogate, kl, entropy = torch.stack(measured).tolist()
        servo.adapt_rate(kl, rate)
        if epoch == args.update_epochs or kl > servo.early_stop * servo.kl_targ:
            break
        for group in adam.param_groups:
            group["lr"] = rate * servo.lr_multiplier * group["speed"]
        adam.zero_grad()
        loss.backward()
        adam.step()
    servo.adapt(kl)
    metrics = {"losses/policy_loss": surrogate, "losses/kl": kl, "losses/entropy": entropy}
    metrics |= {"charts/lr_multiplier": servo.lr_multiplier, "charts/policy_passes": epoch}
    return metrics | {"charts/learning_rate": rate * servo.lr_multiplier, "charts/beta": servo.beta}


def fit_value(agent: Agent, features, returns, args: Args):
    """Fit the value function to returns [B] at features [B, D + 1] and to the batch before, whose
    features and returns stay as they were; then keep this batch in its place."""
    inputs, targets = features, returns
    if agent.replay:
        inputs, targets = map(torch.cat, zip((features, returns), agent.replay, strict=True))
    # minibatches of 256 to 511; a pass shuffles all, but stops after as many as this batch has
    batches, adam = max(len(returns) // 256, 1), agent.optimizers["value"]
    width = len(returns) // batches
    for _ in range(args.value_epochs):
        order = torch.as_tensor(agent.rng.permutation(len(targets)), device=targets.device)
        for rows in order[: batches * width].split(width):
            loss = (agent.critic(inputs[rows]).squeeze(-1) - targets[rows]).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    agent.replay = features, returns


def update(agent: Agent, data: Rollout, args: Args) -> dict[str, float]:
    """One iteration of learning: advantages, policy, value function, in this order."""
    valid, device = data.valid, agent.obs_moments.mean.device
    # scaled for learning as they were for acting; the moments take them in for the next iteration
    obs = torch.as_tensor(data.obs, device=device)
    features = agent.features(obs, torch.arange(len(obs), device=device)[:, None])
    agent.obs_moments.update(data.obs[:-1][valid])
    with torch.no_grad():
        values = agent.critic(features).squeeze(-1)  # [T + 1, E]
    both = advantages_and_returns(data, values.cpu().double().numpy(), args)
    advantages, returns = (x[valid] for x in both)  # [B]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    batch = data.actions[valid], advantages.astype(np.float32), returns.astype(np.float32)
    actions, advantages, returns = (torch.as_tensor(x, device=device) for x in batch)
    features, values = features[:-1][valid], values[:-1][valid]
    metrics = fit_policy(agent, features, actions, advantages, args)
    fit_value(agent, features, returns, args)
    residual = returns - values  # as they were before the fit
    unexplained = residual.var(correction=0) / returns.var(correction=0).clamp(min=1e-12)
    metrics["losses/value_loss"] = residual.square().mean().item()
    metrics["losses/explained_variance"] = 1.0 - unexplained.item()
    if not agent.discrete:
        metrics["charts/policy_std"] = (0.5 * agent.actor_logvar).exp().mean().item()
    return metrics


# --- rollout --------------------------------------------------------------------------------------
def rollout(agent: Agent, envs: list[Episodes], episodes: int, run: "Run | None" = None) -> Rollout:
    """Play whole episodes. As many start as are wanted, and all are played to their ends: taking
    the first that end, or cutting the last off, would favour short ones. `run` logs them."""
    act, left, ended = agent.numpy_actor(), episodes, []
    while len(ended) < episodes:
        for env in [env for env in envs if env.over][:left]:
            env.reset()
            left -= 1
        playing = [env for env in envs if not env.over]
        obs = np.array([env.obs[-1] for env in playing])
        actions = act(obs, agent.noise(len(playing)), [len(env.rewards) for env in playing])
        if run:
            run.global_step += len(playing)
        for env, action in zip(playing, actions, strict=True):
            env.step(action)
            if env.over:
                ended.append((env.obs, env.actions, env.rewards, env.terminated, env.truncated))
            if env.over and run:
                run.log_episode(run.global_step, math.fsum(env.rewards), len(env.rewards))
    *fields, terminated, truncated = zip(*ended, strict=True)  # now side by side
    tensors = ([torch.as_tensor(np.array(x)) for x in field] for field in fields)
    padded = (nn.utils.rnn.pad_sequence(each).numpy() for each in tensors)
    lengths = np.array([len(rewards) for rewards in fields[2]])
    return Rollout(*padded, lengths, np.array(terminated), np.array(truncated))


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
    state = {"args": vars(run.args), "agent": agent.state_dict(), "replay": agent.replay}
    state["optimizers"] = {k: x.state_dict()["state"] for k, x in agent.optimizers.items()}
    state["servo"] = {"beta": agent.servo.beta, "lr_multiplier": agent.servo.lr_multiplier}
    # no episode is running between iterations
    state |= {"rng": agent.rng.bit_generator.state, "episodes": [env.episode for env in envs]}
    state["counters"] = run.global_step, run.iteration, time.monotonic() - run.start, run.csv.tell()
    torch.save(state, run.folder / "checkpoint.pt.tmp")
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
    agent = Agent(env or make_env(args.env_id), args)
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
    env = Episodes(env, replace(args, seed=episode_seed(args.seed, 2**31)), 0)
    act, returns = load(args.evaluate, env)[0].numpy_actor(), []
    for episode in range(args.eval_episodes):
        env.reset()
        while not env.over:
            env.step(act(env.obs[-1][None], time=len(env.rewards))[0])
        returns.append(math.fsum(env.rewards))
        print(f"eval_episode={episode}, episodic_return={returns[-1]:.2f}", flush=True)
    env.close()
    print(f"greedy, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------
def finished(run: Run, envs: list[Episodes], args: Args) -> bool:
    episodes = sum(env.episode + 1 for env in envs) - 5  # those of the first scale do not count
    played = episodes if args.num_episodes else run.global_step
    return played >= (args.num_episodes or args.total_timesteps)


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
    if args.resume:
        for name, adam in agent.optimizers.items():
            adam.load_state_dict(adam.state_dict() | {"state": checkpoint["optimizers"][name]})
        agent.servo = replace(agent.servo, **checkpoint["servo"])
        agent.replay = tuple(x.to(device) for x in checkpoint["replay"])
        agent.rng.bit_generator.state = checkpoint["rng"]
        for env, episode in zip(envs, checkpoint["episodes"], strict=True):
            env.episode = episode
    run = Run(args, checkpoint)
    run.bar.total = None if args.num_episodes else args.total_timesteps
    run.bar.write(f"{args.env_id} on {device}, in {run.folder}")
    stop, status = [], "failed"

    def handler(number, frame):  # ends training after this iteration; the next signal acts at once
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    signals = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)}
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        save(run, agent, envs)
        while not finished(run, envs, args) and not stop:
            if run.iteration == 0:  # the first scale, from 5 episodes that count for nothing else
                data = rollout(agent, envs, 5)
                agent.obs_moments.update(data.obs[:-1][data.valid])
            data = rollout(agent, envs, args.episodes_per_batch, run)
            metrics = update(agent, data, args)
            checked = {"observations": data.obs, "rewards": data.rewards} | metrics
            for name, x in (checked | agent.state_dict()).items():
                if not torch.as_tensor(x).isfinite().all():
                    raise FloatingPointError(f"iteration {run.iteration}: {name} is not finite")
            run.log(metrics)
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent, envs)
        save(run, agent, envs)
        status = "finished" if finished(run, envs, args) else "running"
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
