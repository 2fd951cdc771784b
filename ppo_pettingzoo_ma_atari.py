# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "pettingzoo>=1.24,<1.28", "ale-py>=0.11",
#                 "multi-agent-ale-py", "pygame-ce", "numpy", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, in self-play on two-player Atari from pixels (PettingZoo's games), in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. One network plays both sides; two more
planes of what it sees say which (Gupta et al. 2017). Every iteration:

    1. take T steps with N players, two in each game
    2. A = GAE(lambda); a player that dies first learns nothing until its game is over
    3. for K epochs, for each minibatch, with A normalised in it and r = pi(a | s) / pi_old(a | s):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_pettingzoo_ma_atari.py --env-id pong_v3         # train, 20,000,000 steps of players
    python ppo_pettingzoo_ma_atari.py --resume runs/RUN        # go on where it stopped
    python ppo_pettingzoo_ma_atari.py --evaluate runs/RUN --against RANDOM     # or runs/RUN2

What one player wins the other loses: returns say nothing, charts/win_rate does, against itself
`--eval-interval` iterations ago. Left out on purpose: more than two players, leagues, --compile.
"""

import contextlib
import fcntl
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections import deque
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

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
    seed: int = 1  # seeds the network, actions, minibatches and environments
    torch_deterministic: bool = True  # sets torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one
    num_threads: int = 0  # CPU threads of torch; 0: as many as there are cores
    bf16: bool = False  # convolutions and hidden layer in bfloat16: faster if the hardware has it
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    quiet: bool = False  # print no line per episode
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder against another, and exit
    against: str = "RANDOM"  # with --evaluate: the folder of the other run; RANDOM: a random player
    eval_episodes: int = 20  # games of an evaluation, every other one with sides changed
    eval_interval: int = 200  # iterations between games against itself, as it was that long ago
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = "pong_v3"  # a two-player Atari game, by its id in PettingZoo
    total_timesteps: int = 20_000_000  # steps of all players, rounded down to iterations
    learning_rate: float = 2.5e-4  # Adam's learning rate in the first iteration
    num_envs: int = 16  # players side by side, two in each game; rounded down to an even number
    num_steps: int = 128  # steps of each player per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.1  # epsilon of the clipped surrogate
    clip_vloss: bool = True  # also clip the change of the value
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient of all parameters is scaled down to this norm
    target_kl: float | None = None  # stop the epochs once the mean approx_kl of one exceeds this
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute the last fields; raise ValueError, which tyro shows, for wrong arguments."""
        self.num_envs -= self.num_envs % 2
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "num_threads": 0}
        low |= {"minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {"gamma": 1, "gae_lambda": 1}
        check(self, low, high)


def check(args, low: dict, high: dict):
    """Raise ValueError for a value of a wrong type, for a number out of its bounds (by default 1
    to 1e18, for fractions 0 to 1e18) and for flags that exclude each other."""
    for name, hint in get_type_hints(type(args)).items():
        flag = f"--{name.replace('_', '-')}"
        value = getattr(args, name)
        kinds = get_args(hint) or (hint,)
        whole = float in kinds and isinstance(value, int)
        truth = isinstance(value, bool) and bool not in kinds  # an int, to Python
        if truth or not (isinstance(value, kinds) or whole):
            raise ValueError(f"{flag} {value!r}: not of type {hint}")
        if type(value) in (int, float):
            least = low.get(name, 0 if float in kinds else 1)
            most = high.get(name, 1e18)
            if not least <= value <= most:
                raise ValueError(f"{flag} {value}: not in {least} ... {most}")
    if not args.exp_name:
        raise ValueError("--exp-name '': a name is needed")
    if args.resume and (args.run_dir or args.evaluate):
        raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")


KEPT = ("seed", "num_envs", "num_steps", "env_id")  # by a resumed run


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fail("one process trains here; torchrun is for ppo_atari_multigpu.py")

    def given(resume: Path | None = None, evaluate: Path | None = None):
        return resume or evaluate

    folder, _ = tyro.cli(given, args=argv, return_unknown_args=True, add_help=False)
    checkpoint = load_checkpoint(folder) if folder else {}
    saved = checkpoint.get("args", Args())
    steps, *_ = checkpoint.get("counters", (0,))
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    for name in KEPT:
        if args.resume and getattr(args, name) != getattr(saved, name):
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            fail(f"{flag}: {args.resume} keeps its {getattr(saved, name)}: leave the flag out")
    if args.resume and args.total_timesteps < min(steps, saved.total_timesteps):
        fail(f"--total-timesteps {args.total_timesteps}: {args.resume} has trained {steps}")
    for package in ("pettingzoo", "multi_agent_ale_py", "ale_py"):
        if importlib.util.find_spec(package) is None:
            fail(f"{package} is not installed: pip install {package}")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track: wandb is not installed: pip install wandb")
    there = importlib.util.find_spec("moviepy") and metadata.version("moviepy") >= "2"
    if args.capture_video and not there:  # find out before training
        fail("--capture-video: moviepy 2 is not installed: pip install 'moviepy>=2'")
    return args


def fail(message: str):
    """Print one line to standard error and exit with code 2."""
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


# --- environments ---------------------------------------------------------------------------------
def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Envs:
    """Atari games, 2g and 2g + 1 being the players of game g: no-ops at the start (Atari detail 1),
    every 4th frame as the maximum of two (Atari detail 2), 84 x 84 grey pixels (Atari detail 5),
    rewards clipped to their sign (Atari detail 6), 4 frames (Atari detail 7), and a plane for each
    player that is lit in what it sees. A player that dies first waits for the end of the game.

    Autoreset is "next step": the step that ends a game returns its true last observation; the
    next one ignores its actions and returns a new game's first observation with reward 0.
    Every game follows from its number; the actions of the running ones are kept, to play them again
    on resuming.
    """

    def __init__(self, args: Args, n: int, autoreset: bool = True):
        roms = {"auto_rom_install_path": Path(importlib.util.find_spec("ale_py").origin).parent}
        try:
            make = importlib.import_module(f"pettingzoo.atari.{args.env_id}").parallel_env
            self.games = [make(**roms).unwrapped for _ in range(n // 2)]
            _first, _second = self.games[0].possible_agents
        except (ImportError, AttributeError, OSError, ValueError) as error:
            fail(f"--env-id {args.env_id}: {error} (ids are PettingZoo's for two, as pong_v3)")
        self.ales = [game.ale for game in self.games]
        self.codes = self.games[0].action_mapping  # ALE's numbers of the actions
        self.action_space = gym.spaces.Discrete(len(self.codes))
        # 84 times how much of each pixel is in each of 84 equal parts: whole numbers, exact sums
        sizes = self.ales[0].getScreenDims()
        reached = [np.clip(np.linspace(0, m, 85)[:, None] - np.arange(m), 0, 1) for m in sizes]
        self.columns, self.rows = (np.float32(84 * np.diff(x, axis=0)).round() for x in reached)
        self.seed = args.seed
        self.autoreset = autoreset
        self.max_steps = 25_000  # of a game: 100,000 frames
        self.obs = np.zeros((n, 6, 84, 84), np.uint8)
        self.obs[::2, 4] = self.obs[1::2, 5] = 255
        self.over = np.zeros(n, bool)  # [N], a player's episode has ended
        self.scores = np.zeros(n)  # [N], of the episode so far, raw
        self.lengths = np.zeros(n, int)
        self.ended = []  # (player, score, length) of each episode that the last step ended
        self.episodes = [-1] * (n // 2)  # the number of each running game
        self.actions = [[] for _ in self.games]  # of the running games
        self.starts = [None] * (n // 2)  # each emulator as it was when its game started
        for g in range(n // 2):
            self.reset(g)

    def reset(self, g: int):
        """Start the next game, which 1 to 30 no-ops tell from others. What else is random in it,
        mazes and the like, follows from the start of the game before; every 16th is seeded."""
        self.episodes[g] += 1
        episode = self.episodes[g]
        game = self.games[g]
        if episode % 16 == 0:  # which takes 0.1 s: the ROM is loaded again
            game.reset(seed=(episode_seed(self.seed, g) + episode // 16) % 2**31)
        else:
            game.restore_full_state(self.starts[g])
            self.ales[g].reset_game()
        self.starts[g] = game.clone_full_state()
        for _ in range(1 + episode_seed(self.seed, g, episode) % 30):
            self.ales[g].act(np.zeros(2, int))
        self.actions[g] = []
        pair = slice(2 * g, 2 * g + 2)
        self.over[pair] = False
        self.scores[pair] = 0.0
        self.lengths[pair] = 0
        self.obs[pair, :4] = self.shrink(self.ales[g].getScreenGrayscale())

    def shrink(self, *screens: np.ndarray) -> np.ndarray:
        """The maximum of screens [H, W, 1] as 84 x 84 bytes: means over areas."""
        sums = self.rows @ np.float32(np.max(screens, axis=0)[:, :, 0]) @ self.columns.T
        return np.uint8(sums / screens[0].size + 0.5)

    def play(self, g: int, actions: np.ndarray, seen: bool = True):
        """A step of a game's two players: clipped rewards, terminated, truncated [2]. Their
        observations change only if `seen`."""
        pair = slice(2 * g, 2 * g + 2)
        ale = self.ales[g]
        rewards = np.zeros(2)
        before = self.over[pair].copy()
        over = self.over[pair]  # a view: changes in place
        screens = []
        for _ in range(4):
            if not over.all():
                rewards += ~over * ale.act(np.where(over, 0, self.codes[actions]))
                over |= (ale.allLives() < 0) | ale.game_over()
                screens += [ale.getScreenGrayscale()] if seen else []
        if seen:
            self.obs[pair, :4] = [*self.obs[2 * g, 1:4], self.shrink(*screens[-2:])]
        self.actions[g].append(actions)
        self.scores[pair] += rewards
        self.lengths[pair] += ~before
        terminated = over & ~before
        truncated = ~over & (self.lengths[pair] >= self.max_steps)
        over |= truncated
        return np.sign(rewards), terminated, truncated

    def step(self, actions: np.ndarray):
        """Take actions [N]: clipped rewards, terminated, truncated [N]."""
        rewards = np.zeros(len(self.over))
        terminated = np.zeros(len(self.over), bool)
        truncated = np.zeros(len(self.over), bool)
        for g in range(len(self.games)):
            pair = slice(2 * g, 2 * g + 2)
            if not self.over[pair].all():
                rewards[pair], terminated[pair], truncated[pair] = self.play(g, actions[pair])
            elif self.autoreset:
                self.reset(g)
        ended = np.flatnonzero(terminated | truncated).tolist()
        self.ended = [(i, float(self.scores[i]), int(self.lengths[i])) for i in ended]
        return rewards, terminated, truncated

    def played(self) -> list[tuple[int, np.ndarray]]:
        """What replays the running games: their numbers and actions so far, [t, 2]."""
        actions = [np.array(x, int).reshape(-1, 2) for x in self.actions]
        return [*zip(self.episodes, actions, strict=True)]

    def play_again(self, played: list[tuple[int, np.ndarray]]):
        """Bring the games to where they were when `played` gave this."""
        for g, (episode, actions) in zip(range(len(self.games)), played, strict=True):
            self.episodes[g] = episode - episode % 16 - 1
            while self.episodes[g] < episode:
                self.reset(g)
            for t, pair in enumerate(actions):
                self.play(g, pair, seen=t >= len(actions) - 4)  # observations have 4 frames

    def close(self):
        for game in self.games:
            game.close()


# --- agent ----------------------------------------------------------------------------------------
class Agent(nn.Module):
    """Policy and value function on one convolutional network (Mnih et al. 2015; Atari detail 8).

    `envs` is anything with gymnasium's action_space (Discrete), single or vectorised; observations
    are 6 x 84 x 84 bytes, scaled to 0 ... 1 here (Atari detail 9). Both players share the network.
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        actions = int(getattr(envs, "single_action_space", envs.action_space).n)
        convs = nn.Conv2d(6, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)
        layers = [layer for conv in convs for layer in (conv, nn.ReLU())]
        self.network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU())
        self.actor = nn.Linear(512, actions)
        self.critic = nn.Linear(512, 1)
        layers = *convs, self.network[7], self.actor, self.critic  # (detail 2)
        for layer, gain in zip(layers, [math.sqrt(2)] * 4 + [0.01, 1.0], strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def policy(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the actions [B, A] and V [B] at observations [B, 6, 84, 84]."""
        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.args.bf16):
            hidden = self.network(obs.to(dtype, memory_format=torch.channels_last) / 255.0).float()
        return self.actor(hidden).log_softmax(dim=-1), self.critic(hidden).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [B] (sampled unless given), log-probability, entropy, V [B] at [B, 6, 84, 84]."""
        logprobs, value = self.policy(obs)
        if action is None:
            action = torch.distributions.Categorical(logits=logprobs).sample()
        logprob = logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return action, logprob, -(logprobs.exp() * logprobs).sum(dim=-1), value

    forward = get_action_and_value

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Greedy actions [N] at bytes [N, 6, 84, 84] or, given Gumbel noise [N, A], samples."""
        policy, _ = self.policy(torch.as_tensor(obs, device=self.actor.bias.device))
        return (policy.cpu().numpy() + np.float32(0 if noise is None else noise)).argmax(axis=-1)


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
    obs: torch.Tensor  # [T, N, 6, 84, 84], bytes, channels last
    actions: torch.Tensor  # [T, N]
    logprobs: torch.Tensor  # [T, N], of the policy that acted
    values: torch.Tensor  # [T + 1, N]
    rewards: np.ndarray  # [T, N], clipped
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False from the row after an episode's end to the one after the
    # game's: there its action was ignored and the reward is none


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, 6, 84, 84], bytes
    actions: torch.Tensor  # [B]
    logprobs: torch.Tensor  # [B], of the policy that acted
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update


def ppo_loss(agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and its
    metrics."""
    _, logprob, entropy, value = agent(batch.obs, batch.actions)
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
    return loss, metrics | {"clipfrac": ((ratio - 1.0).abs() > args.clip_coef).float().mean()}


def update(agent: Agent, data: Rollout, iteration: int, learning_rate: float, args: Args):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    numbers = data.rewards, data.values.cpu().double().numpy(), data.terminated, data.truncated
    advantages = torch.tensor(gae(*numbers, args.gamma, args.gae_lambda))  # detail 5
    values = data.values[:-1]
    advantages = advantages.to(values)
    fields = data.obs, data.actions, data.logprobs, advantages, advantages + values, values
    batch = Batch(*[x.flatten(0, 1) for x in fields])  # [B, ...], B = T * N

    rows = np.flatnonzero(data.valid)  # the rows to learn from
    num_minibatches = min(args.num_minibatches, len(rows) // 2)  # at least two rows in each
    if num_minibatches == 0:  # nothing to learn from
        return {}
    steps = []  # metrics of each step
    rng = np.random.default_rng((args.seed, iteration, 1))
    agent.adam.param_groups[0]["lr"] = learning_rate
    for _ in range(args.update_epochs):
        order = torch.as_tensor(rng.permutation(rows), device=values.device)
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(num_minibatches):
            loss, metrics = ppo_loss(agent, args, Batch(*[x[minibatch] for x in batch]))
            agent.adam.zero_grad()
            loss.backward()
            # over all parameters (detail 11)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            agent.adam.step()
            steps.append(torch.stack([*metrics.values()]).detach())
        approx_kl = torch.stack(steps[-num_minibatches:])[:, [*metrics].index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    means = torch.stack(steps).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    error = batch.advantages[rows].var()  # variance of R - V
    scale = batch.returns[rows].var()  # variance of R
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    return metrics


# --- rollout --------------------------------------------------------------------------------------
@torch.no_grad()
def rollout(agent: Agent, envs: Envs, run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, going on where the last ended (detail 1)."""
    T = args.num_steps
    N = args.num_envs
    device = agent.actor.bias.device
    obs = torch.empty((T, N, 84, 84, 6), dtype=torch.uint8, device=device).permute(0, 1, 4, 2, 3)
    rewards = np.zeros((T, N))
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    over = np.zeros((T, N), bool)  # rows of players whose episode has ended
    logprobs = []
    actions = []
    values = []
    # Gumbel noise, whose argmax is a sample of the policy
    rng = np.random.default_rng((args.seed, run.iteration, 0))
    noise = torch.tensor(rng.gumbel(size=(T, N, len(agent.actor.bias)))).float().to(device)
    for t in range(T):
        obs[t] = torch.as_tensor(envs.obs)
        over[t] = envs.over
        policy, value = agent.policy(obs[t])
        action = (policy + noise[t]).argmax(dim=-1)
        logprobs.append(policy.gather(-1, action.unsqueeze(-1)).squeeze(-1))
        actions.append(action)
        values.append(value)
        rewards[t], terminated[t], truncated[t] = envs.step(action.cpu().numpy())
        run.global_step += N - int(np.count_nonzero(over[t]))
        if envs.ended:
            run.log_episodes(envs.ended)
    _, value = agent.policy(torch.as_tensor(envs.obs, device=device))
    values.append(value)
    actions, logprobs, values = (torch.stack(x) for x in (actions, logprobs, values))
    return Rollout(obs, actions, logprobs, values, rewards, terminated, truncated, ~over)


# --- run folder, checkpoints, evaluation ----------------------------------------------------------
class Run:
    """A run's folder, logs and counters. While it is open, no other process can use the folder."""

    def __init__(self, args: Args, checkpoint: dict):
        self.args = replace(args, run_dir=None, resume=None, evaluate=None)  # folders may move
        self.global_step, self.iteration, seconds, rows = checkpoint.get("counters", (0, 0, 0.0, 0))
        self.returns = deque(checkpoint.get("returns", ()), maxlen=100)  # of the last episodes
        self.start = time.monotonic() - seconds
        self.status = "failed"  # until training has ended well
        try:
            self.folder = args.resume or args.run_dir or new_folder(args)
            self.folder.mkdir(parents=True, exist_ok=True)
            self.new = not any(self.folder.iterdir())
            refuse_links(self.folder)
            path = self.folder / "episodes.csv"
            self.csv = open(path, "a", buffering=1)  # noqa: SIM115
        except OSError as error:
            fail(f"no folder for the run: {error}")
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.csv)  # if the start fails, close it: the folder is free again
            try:
                fcntl.flock(self.csv, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{self.folder}: another process trains in this folder")
            except OSError as error:  # a file system without locks
                fail(f"{self.folder}: {error}")
            if self.new:  # if the start fails, leave nothing
                undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if not args.resume and (self.folder / "checkpoint.pt").exists():
                fail(f"a run is there: --resume {self.folder} goes on with it")
            # drop the rows after the checkpoint: they will be logged again
            known = re.findall(rb".*\n", path.read_bytes())[: rows + 1] if args.resume else []
            self.csv.truncate(len(b"".join(known)))
            self.rows = max(len(known) - 1, 0)
            if not known:
                self.csv.write("global_step,seconds,return,length\n")
            self.wandb = None
            if args.track:
                import wandb  # before SummaryWriter, which it patches

                project = {"project": args.wandb_project_name, "entity": args.wandb_entity}
                more = {"config": vars(self.args), "sync_tensorboard": True}
                more |= {"id": checkpoint.get("wandb"), "resume": "allow"}  # resumed: the same run
                self.wandb = wandb.init(name=self.folder.name, **project, **more)
            self.writer = SummaryWriter(str(self.folder), purge_step=self.global_step + 1)
            table = [f"|{name}|{value}|" for name, value in vars(self.args).items()]
            self.writer.add_text("hyperparameters", "\n".join(["|param|value|", "|-|-|", *table]))
            self.bar = tqdm(total=args.total_timesteps, unit="step", disable=None)
            self.write_json("running")
            undo.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.bar.close()
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        self.write_json(self.status)
        if kind and self.new and self.global_step == 0:  # failed before a step: leave nothing
            shutil.rmtree(self.folder, ignore_errors=True)
        fcntl.flock(self.csv, fcntl.LOCK_UN)  # of a process that was forked meanwhile, too
        self.csv.close()

    def log_episodes(self, ended: list[tuple[int, float, int]]):
        """Log the (player, score, length) of the episodes that one step has ended: a row each, and
        for TensorBoard, which has one value a step, their mean for each side."""
        for player, score, length in ended:
            seconds = time.monotonic() - self.start
            self.csv.write(f"{self.global_step},{seconds:.2f},{score},{length}\n")
            said = f"global_step={self.global_step}, player={player % 2}"
            if not self.args.quiet:
                self.bar.write(f"{said}, episodic_return={score:.4f}")
            self.returns.append(score)
        self.rows += len(ended)
        for side in {player % 2 for player, _, _ in ended}:
            of_side = [(score, length) for player, score, length in ended if player % 2 == side]
            score, length = np.mean(of_side, axis=0)
            self.writer.add_scalar(f"charts/episodic_return-player{side}", score, self.global_step)
            self.writer.add_scalar(f"charts/episodic_length-player{side}", length, self.global_step)

    def log(self, metrics: dict[str, float]):
        self.iteration += 1
        self.bar.update(self.global_step - self.bar.n)
        metrics["charts/SPS"] = int(self.global_step / (time.monotonic() - self.start))
        for tag, value in metrics.items():
            self.writer.add_scalar(tag, value, self.global_step)

    def final_return(self) -> float | None:
        """The mean return of the last 100 training episodes, if there is one."""
        mean = float(np.mean(self.returns)) if self.returns else math.nan
        return mean if math.isfinite(mean) else None

    def write_json(self, status: str):
        versions = {package.__name__: package.__version__ for package in (torch, gym, np)}
        content = {"script": Path(__file__).name, "status": status, "args": vars(self.args)}
        content |= {"seed": self.args.seed, "global_step": self.global_step, "versions": versions}
        content["wall_seconds"] = round(time.monotonic() - self.start, 2)
        content["final_return"] = self.final_return()
        (self.folder / "run.json").write_text(json.dumps(content, indent=2) + "\n")


def new_folder(args: Args) -> Path:
    """Make a new folder below runs/. Two runs that start in one second get two folders."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    for k in itertools.count(1):
        folder = Path("runs") / (name if k == 1 else f"{name}_{k}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def refuse_links(folder: Path):
    """Exit with one line if a folder has links: through them a run would write elsewhere."""
    for path in folder.rglob("*"):
        if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):  # hard ones, too
            fail(f"{path} is a link: a run writes into its own folder alone")


def save(run: Run, agent: Agent, past: Agent, envs: Envs):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    state["optimizer"] = {"state": agent.adam.state_dict()["state"]}
    state["past"] = past.state_dict()
    state["played"] = [(episode, torch.tensor(x)) for episode, x in envs.played()]
    state["counters"] = run.global_step, run.iteration, time.monotonic() - run.start, run.rows
    state |= {"returns": list(run.returns), "wandb": run.wandb and run.wandb.id}
    torch.save(state, run.folder / "checkpoint.pt.tmp")
    (run.folder / "checkpoint.pt.tmp").replace(run.folder / "checkpoint.pt")


def load_checkpoint(folder: Path) -> dict:
    """Read what `save` wrote. No code in the file is run."""
    content = {}
    path = Path(folder) / "checkpoint.pt"
    try:
        if not path.is_file():  # reading a pipe would block
            raise FileNotFoundError("this is no folder of a run")
        with zipfile.ZipFile(path) as file:
            if file.testzip():
                raise ValueError("it is damaged")
        content |= torch.load(path, map_location="cpu", weights_only=True)
        args = Args(**content["args"])
        step, iteration, seconds, rows = content.get("counters", (0, 0, 0.0, 0))
        content["counters"] = int(step), int(iteration), float(seconds), int(rows)
        content["returns"] = [float(x) for x in content.get("returns", ())]
        content["played"] = [(int(n), np.atleast_1d(x)) for n, x in content.get("played", ())]
        numbers = [*content["counters"], *(n + 1 for n, _ in content["played"])]  # -1: none begun
        if not all(number >= 0 for number in numbers):
            raise ValueError(f"its counters are {numbers}")
    except Exception as error:  # damaged files raise errors of many kinds
        maker = f", made by {content['script']}" if "script" in content else ""
        fail(f"{folder}: no checkpoint.pt{maker} that can be read here: {error!r}")
    module, _, name = args.env_id.rpartition(":")
    if module != "envpool":  # only the command line may name a module to import
        args.env_id = name
    return content | {"args": args}


def load(folder: Path, envs=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `envs` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args = checkpoint["args"]
    made = envs or Envs(args, 2)
    agent = Agent(made, args)
    if envs is None:
        made.close()
    try:
        agent.load_state_dict(checkpoint["agent"])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        maker = checkpoint.get("script")
        fail(f"{folder}: its agent, by {maker}, does not fit the environment: {error}")
    return agent, args


def play(agents: list[Agent | None], args: Args, seed: int, film=None) -> np.ndarray:
    """Scores [n, 2] of two agents, None being a random one, which draw actions in some games."""
    n = args.eval_episodes
    rng = np.random.default_rng(seed)
    sides = np.arange(2 * n).reshape(n, 2) ^ (np.arange(n)[:, None] % 2)  # changed in odd games
    with contextlib.closing(Envs(replace(args, seed=seed), 2 * n, autoreset=False)) as envs:
        while (playing := ~envs.over.reshape(n, 2).all(axis=1)).any():
            actions = np.zeros(2 * n, int)
            games = np.flatnonzero(playing)
            for j, agent in enumerate(agents):
                noise = rng.gumbel(size=(n, envs.action_space.n))[games]
                side = sides[games, j]
                actions[side] = agent.act(envs.obs[side], noise) if agent else noise.argmax(axis=-1)
            envs.step(actions)
            if film is not None and playing[0]:
                film.append(envs.ales[0].getScreenRGB())
        return envs.scores[sides]


def win_rate(scores: np.ndarray) -> dict[str, float]:
    """The first agent's share of wins in games with scores [n, 2], a draw being half a win, and its
    95 % interval (Wilson 1927), which draws make only wider than it need be."""
    n = len(scores)
    p = 0.5 + 0.5 * np.sign(scores[:, 0] - scores[:, 1]).mean()
    z = 1.96
    centre = p + z**2 / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((centre + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
    return {"charts/win_rate": p, "charts/win_rate_low": low, "charts/win_rate_high": high}


def evaluate(args: Args) -> list[float]:
    """Play the agent saved in `args.evaluate` against another, and film a game if that is asked."""
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    agent, _ = load(args.evaluate)
    other = None
    film = None
    videos = args.evaluate / "videos"
    if args.capture_video:
        refuse_links(args.evaluate)
        film = []
        print(f"videos: {videos}")
    if args.against != "RANDOM":
        other, theirs = load(Path(args.against))
        if theirs.env_id != args.env_id:
            fail(f"--against {args.against}: plays {theirs.env_id}, not {args.env_id}")
    scores = play([agent, other], args, episode_seed(args.seed, 2**31), film)
    for episode, (mine, others) in enumerate(scores):
        print(f"eval_episode={episode}, episodic_return={mine:.2f} to {others:.2f}", flush=True)
    if film:
        save_frames(film, videos, 0)
    rate, low, high = win_rate(scores).values()
    print(f"{len(scores)} games, win rate {rate:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    return scores[:, 0].tolist()


def save_frames(frames: list[np.ndarray], folder: Path, episode: int, **more):
    """Write frames [H, W, 3] of an episode as a video into a folder."""
    from gymnasium.utils.save_video import save_video

    options = {"fps": 15, "episode_index": episode, "save_logger": None}
    save_video(frames, str(folder), lambda _: True, **options, **more)


# --- training -------------------------------------------------------------------------------------
def check_finite(iteration: int, values: dict):
    """Raise FloatingPointError that names the first value with a NaN or an infinity."""
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"iteration {iteration}: {name} is not finite")


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals():
    """A list of the signals that have come. The first ends training after its iteration, the next
    acts at once. Only the main thread can catch signals; elsewhere the list stays empty."""
    stop = []

    def handler(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS if main}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def restore(agent: Agent, past: Agent, envs: Envs, checkpoint: dict, folder: Path):
    """Set the agents, the optimizer and the running games to what the checkpoint has."""
    try:
        agent.load_state_dict(checkpoint["agent"])
        past.load_state_dict(checkpoint["past"])
        saved = {"state": checkpoint["optimizer"]["state"]}  # its settings are the code's
        agent.adam.load_state_dict(agent.adam.state_dict() | saved)
        for parameter, state in agent.adam.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].shape != parameter.shape:
                    raise ValueError(f"{name} has shape {tuple(state[name].shape)}")
                state[name] = torch.empty_like(parameter).copy_(state[name])  # in the same layout
        envs.play_again(checkpoint["played"])
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        fail(f"{folder}: its checkpoint does not fit: {e!r}")


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(args.num_threads or cores)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    with contextlib.closing(Envs(args, args.num_envs)) as envs:
        torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
        agent = Agent(envs, args).to(device)
        past = Agent(envs, args).to(device)  # untrained
        agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # (detail 3)
        if args.resume:
            restore(agent, past, envs, checkpoint, args.resume)
        with stop_signals() as stop, Run(args, checkpoint) as run:
            how = f"{args.env_id} on {device}, {args.num_iterations} iterations"
            run.bar.write(f"{how}, in {run.folder}")
            save(run, agent, past, envs)
            while run.iteration < args.num_iterations and not stop:
                remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate  # annealed (detail 4)
                data = rollout(agent, envs, run, args)
                metrics = update(agent, data, run.iteration, learning_rate, args)
                check_finite(run.iteration, {"rewards": data.rewards})
                check_finite(run.iteration, metrics | agent.state_dict())
                if (run.iteration + 1) % args.eval_interval == 0:
                    seed = episode_seed(args.seed, 2**31, run.iteration)
                    metrics |= win_rate(play([agent, past], args, seed))
                    past.load_state_dict(agent.state_dict())
                run.log(metrics | {"charts/learning_rate": learning_rate})
                if run.iteration % args.checkpoint_interval == 0:
                    save(run, agent, past, envs)
            save(run, agent, past, envs)
            run.status = "running" if run.iteration < args.num_iterations else "finished"
    return finish(run, agent, stop)


def finish(run: Run, agent: Agent, stop: list[int]) -> Path:
    """Print how to go on or to play; save the weights and record a video, if asked to."""
    # where it is imported, as in a notebook, the file itself
    program = sys.argv[0] if __name__ == "__main__" else os.path.relpath(__file__)
    script = f"python {shlex.quote(program)}"
    folder = shlex.quote(str(run.folder))
    if ":" in run.args.env_id.removeprefix("envpool:"):  # a module must be named again
        folder += f" --env-id {run.args.env_id}"
    if run.status == "running":
        print(f"go on with: {script} --resume {folder}")
        raise SystemExit(128 + stop[0])
    final = run.final_return()
    print(f"return {final} over the last 100 episodes; play: {script} --evaluate {folder}")
    if run.args.save_model:
        name = f"{Path(run.args.exp_name).name}.cleanrl_model"
        torch.save(agent.state_dict(), run.folder / name)
    if run.args.capture_video:
        evaluate(replace(run.args, evaluate=run.folder))
    return run.folder


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):  # a terminal may not know all letters
        stream.reconfigure(errors="backslashreplace")
    args = parse_args()
    evaluate(args) if args.evaluate else train(args)
