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
    python ppo_atari_multigpu.py --resume runs/RUN                          # on any number of them
    python ppo_atari_multigpu.py --evaluate runs/RUN --capture-video        # play greedily

The number of processes changes where the work is done, not what is learned. The same command with
--run-dir goes on where a run was cut off: torchrun's restarts and Slurm's requeue need no more.
Expect 20 on Pong-v5 and 290 on Breakout-v5 after 4M steps with the flags on its page (raw scores).
Flags and tags are CleanRL's. Left out on purpose: recurrence, other environments than EnvPool's.
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
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

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
    num_threads: int = 0  # CPU threads of torch in a process; 0: an equal share of the node's cores
    env_threads: int = 0  # CPU threads of a process's environments; 0: as for --num-threads
    channels_last: bool = True  # convolutions in channels-last order: same results to rounding
    bf16: bool = False  # convolutions and hidden layer in bfloat16: faster if the hardware has it
    compile: bool = False  # compile the update if a compiler works: same results to rounding
    cudagraphs: bool = False  # on a GPU, compile, and make acting and gradients CUDA graphs
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    quiet: bool = False  # print no line per episode
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
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
        low = {"seed": 0, "num_threads": 0, "env_threads": 0, "local_num_envs": 0}
        low |= {"minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {"gamma": 1, "gae_lambda": 1, "num_minibatches": self.num_steps}
        check(self, low, high)
        if self.evaluate and self.world_size > 1:
            raise ValueError("--evaluate plays in one process")
        if self.num_envs % self.world_size:
            raise ValueError(f"--num-envs {self.num_envs}: not the same for each process")


def fits(value, hint) -> bool:
    """Whether a value is of a field's type, such as `list[int]` or `Path | None`."""
    kind = get_origin(hint)
    parts = get_args(hint)
    if kind is Literal:
        return value in parts
    if kind in (list, tuple):
        return isinstance(value, kind) and all(isinstance(x, parts[0]) for x in value)
    if parts:  # a choice
        return any(fits(value, part) for part in parts)
    if isinstance(value, bool):  # an int, to Python
        return hint is bool
    return isinstance(value, hint) or (hint is float and isinstance(value, int))


def check(args, low: dict, high: dict):
    """Raise ValueError for a value of a wrong type, for a number out of its bounds (by default 1
    to 1e18, for fractions 0 to 1e18) and for flags that exclude each other."""
    for name, hint in get_type_hints(type(args)).items():
        flag = f"--{name.replace('_', '-')}"
        value = getattr(args, name)
        if not fits(value, hint):
            raise ValueError(f"{flag} {value!r}: not of type {hint}")
        if type(value) in (int, float):
            fraction = float in (hint, *get_args(hint))
            least = low.get(name, 0 if fraction else 1)
            most = high.get(name, 1e18)
            if not least <= value <= most:
                raise ValueError(f"{flag} {value}: not in {least} ... {most}")
    if not args.exp_name:
        raise ValueError("--exp-name '': a name is needed")
    if args.resume and (args.run_dir or args.evaluate):
        raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")


KEPT = ("seed", "num_envs", "num_steps", "env_id")  # by a resumed run


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args. With --resume or --evaluate the defaults are that run's; so they
    are with --run-dir, if a run was cut off there, which then goes on."""

    def runs(resume: Path | None = None, evaluate: Path | None = None, run_dir: Path | None = None):
        begun = False
        with contextlib.suppress(OSError):  # an impossible name is refused later
            begun = run_dir and (run_dir / "checkpoint.pt").exists()
        return resume or evaluate or (begun and run_dir)

    folder, _ = tyro.cli(runs, args=argv, return_unknown_args=True, add_help=False)
    checkpoint = load_checkpoint(folder) if folder else {}
    saved = checkpoint.get("args", Args())
    steps, *_ = checkpoint.get("counters", (0,))
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    if folder and args.local_num_envs:  # there may be more or fewer processes than there were
        args = replace(args, local_num_envs=0, num_envs=saved.num_envs)
    if folder and folder == args.run_dir:
        told = folder / "run.json"
        if told.is_file() and '"status": "finished"' in told.read_text(errors="replace"):
            fail(f"a finished run is there: --resume {folder} --total-timesteps N goes on with it")
        args = replace(args, resume=folder, run_dir=None)
    for name in KEPT:
        if args.resume and getattr(args, name) != getattr(saved, name):
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            fail(f"{flag}: {args.resume} keeps its {getattr(saved, name)}: leave the flag out")
    if args.resume and args.total_timesteps < min(steps, saved.total_timesteps):
        fail(f"--total-timesteps {args.total_timesteps}: {args.resume} has trained {steps}")
    if importlib.util.find_spec("envpool") is None:
        fail("envpool is not installed: pip install envpool")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track: wandb is not installed: pip install wandb")
    if args.capture_video:  # find out before training what is missing
        if importlib.util.find_spec("moviepy") is None or metadata.version("moviepy") < "2":
            fail("--capture-video: moviepy 2 is not installed: pip install 'moviepy>=2'")
        drawn_envs(args).close()
    return args


def fail(message: str):
    """Print one line to standard error and exit with code 2."""
    if RANK > 0:
        time.sleep(60)  # rank 0 prints it, too, and torchrun then ends all processes
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    if dist.is_initialized():  # gloo's threads may abort at exit (pytorch pull request 179291)
        dist.destroy_process_group()
    raise SystemExit(2)


# --- environments ---------------------------------------------------------------------------------
def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Envs:
    """The Atari games of one process, and the score of each so far. By EnvPool: no-ops at the start
    (Atari detail 1), every 4th frame as the maximum of two (Atari detail 2), a lost life ends an
    episode but not the game (Atari detail 3), fire to start (Atari detail 4), 84 x 84 grey pixels
    (Atari detail 5), rewards clipped to their sign (Atari detail 6), 4 frames (Atari detail 7).

    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    Games can't be saved: a run resumed at iteration `start` plays new ones, with other seeds.
    """

    def __init__(self, args: Args, which: slice, start: int = 0, threads: int = 1, **more):
        import envpool

        name = re.sub(r"^(ALE/)?(\w+?)(NoFrameskip|Deterministic)?-v\d$", r"\2-v5", args.env_id)
        sticky = 0.25 if args.env_id.startswith("ALE/") or args.env_id.endswith("-v0") else 0.0
        if envpool.registration.registry.specs.get(name, [None])[0] != "envpool.atari":
            fail(f"--env-id {args.env_id}: EnvPool has no such Atari game (ids are as Breakout-v5)")
        numbers = range(args.num_envs)[which]
        seeds = [episode_seed(args.seed, i, start) % 2**31 for i in numbers]
        more |= {"episodic_life": True, "reward_clip": True, "repeat_action_probability": sticky}
        more |= {"num_envs": len(numbers), "num_threads": min(threads, len(numbers))}
        self.vector = envpool.make(name, env_type="gymnasium", seed=seeds, **more)
        self.action_space = self.vector.action_space
        self.obs, _ = self.vector.reset()  # [N, 4, 84, 84], bytes
        self.over = np.zeros(len(numbers), bool)  # [N], the last step ended an episode
        self.scores = np.zeros(len(numbers))  # [N], of the game so far, raw
        self.lengths = np.zeros(len(numbers), int)
        self.ended = []  # (environment, score, length) of each game that the last step ended

    def step(self, actions: np.ndarray):
        """Take actions [N]: clipped rewards, terminated, truncated [N]."""
        self.lengths += ~self.over
        self.obs, rewards, terminated, truncated, info = self.vector.step(actions)
        self.over = terminated | truncated
        self.scores += info["reward"]  # neither clipped nor cut at a lost life
        games = info["terminated"].astype(bool) | truncated  # whole games, not lost lives
        episodes = zip(self.scores.tolist(), self.lengths.tolist(), strict=True)
        self.ended = [(i, *both) for i, both in enumerate(episodes) if games[i]]
        self.scores[games] = 0.0
        self.lengths[games] = 0
        return rewards, terminated, truncated

    def close(self):
        self.vector.close()


# --- agent ----------------------------------------------------------------------------------------
def layer_init(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, biases 0 (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function on one convolutional network (Mnih et al. 2015; Atari detail 8).

    `envs` is anything with gymnasium's action_space (Discrete), single or vectorised; observations
    are 4 x 84 x 84 bytes, scaled to 0 ... 1 here (Atari detail 9).
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        actions = int(getattr(envs, "single_action_space", envs.action_space).n)
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

    forward = get_action_and_value

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Greedy actions [N] at bytes [N, 4, 84, 84] or, given Gumbel noise [N, A], samples."""
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
    obs: torch.Tensor  # [T, N, 4, 84, 84], bytes, channels last; N environments of this process
    actions: torch.Tensor  # [T, N]
    logprobs: torch.Tensor  # [T, N], of the policy that acted
    values: torch.Tensor  # [T + 1, N]
    rewards: np.ndarray  # [T, N], clipped
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored
    # and whose reward is 0; its observation is the episode's true last one


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, 4, 84, 84], bytes
    actions: torch.Tensor  # [B]
    logprobs: torch.Tensor  # [B], of the policy that acted
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update
    weights: torch.Tensor  # [B], 1, or 0 for a row that is not learned from


METRICS = (
    "value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm"
)  # fmt: skip


def ppo_loss(agent: Agent, batch: Batch, moments: torch.Tensor, args: Args):
    """The clipped objective (Schulman et al. 2017, eq. 9), and the METRICS but for grad_norm: of a
    minibatch with these `advantage_moments`, this process's shares, which add up to the whole."""
    _, logprob, entropy, value = agent(batch.obs, batch.actions)
    logratio = logprob - batch.logprobs
    ratio = logratio.exp()
    centre, deviation, total = moments

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (batch.weights * x).sum() / total

    advantages = batch.advantages
    if args.norm_adv:  # per minibatch (detail 7)
        advantages = (advantages - centre) / (deviation + 1e-8)
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
    old_approx_kl = -mean(logratio)
    approx_kl = mean(ratio - 1.0 - logratio)
    clipfrac = mean(((ratio - 1.0).abs() > args.clip_coef).float())
    return loss, (value_loss, policy_loss, entropy, old_approx_kl, approx_kl, clipfrac)


def trained(agent: Agent) -> dict[str, nn.Parameter]:
    """The parameters that are trained: those with `requires_grad`."""
    return {name: p for name, p in agent.named_parameters() if p.requires_grad}


def flat_adam(agent: Agent) -> torch.optim.Adam:
    """Adam (Kingma & Ba 2015, algorithm 1; eps 1e-5: detail 3) over all trained parameters as one
    vector [P]. The agent's become views of it: one tensor to add up, clip and step, not many."""
    agent.vector = nn.utils.parameters_to_vector(trained(agent).values()).detach()
    nn.utils.vector_to_parameters(agent.vector, trained(agent).values())
    return torch.optim.Adam([agent.vector], eps=1e-5, fused=True)


def check_views(agent: Agent):
    """Raise RuntimeError if a parameter was frozen, unfrozen or replaced after `flat_adam`: the
    optimizer would not follow."""
    place = 0
    vector = agent.vector
    for name, p in agent.named_parameters():
        inside = p.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
        if inside != p.requires_grad or (inside and p.storage_offset() != place):
            raise RuntimeError(f"{name} was frozen, unfrozen or replaced after flat_adam")
        place += p.numel() if inside else 0


def minibatch_grad(agent: Agent, minibatch: Batch, moments: torch.Tensor, args: Args):
    """This process's share of the gradient [P], followed by that of the METRICS [6]."""
    loss, metrics = ppo_loss(agent, minibatch, moments, args)
    grads = torch.autograd.grad(loss, list(trained(agent).values()))
    return torch.cat([*(grad.flatten() for grad in grads), torch.stack(metrics).detach()])


def minibatch_rows(iteration: int, which: slice, args: Args, device="cpu") -> list[list]:
    """For each epoch and minibatch, its rows [n] of this process's batch [T * N]. Every minibatch
    has equally many steps of each environment, every epoch each sample once (detail 6). So a
    minibatch is the same for any number of processes."""
    rng = np.random.default_rng((args.seed, iteration, 1))
    order = rng.random((args.update_epochs, args.num_steps, args.num_envs)).argsort(axis=1)
    order = order[:, :, which]  # a permutation of T steps in each column
    rows = torch.as_tensor(order * order.shape[2] + np.arange(order.shape[2]), device=device)
    return [[part.flatten() for part in epoch.tensor_split(args.num_minibatches)] for epoch in rows]


def advantage_moments(batch: Batch, rows: list[torch.Tensor]) -> torch.Tensor:
    """Mean and deviation of the advantages in each minibatch, and their number, over all processes:
    [minibatches, 3]."""
    x = batch.advantages.double()
    w = batch.weights.double()
    sums = torch.stack([torch.stack([w[i].sum(), (w * x)[i].sum()]) for i in rows])
    count, total = world_sum(sums).unbind(-1)
    mean = total / count.clamp(min=1.0)
    squares = [(w[i] * (x[i] - m).square()).sum() for i, m in zip(rows, mean, strict=True)]
    std = (world_sum(torch.stack(squares)) / (count - 1.0).clamp(min=1.0)).sqrt()
    return torch.stack([mean, std, count.clamp(min=1.0)], dim=-1).float()


def update(agent, data: Rollout, iteration: int, rate: float, args: Args, gradient=minibatch_grad):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    check_views(agent)
    numbers = data.rewards, data.values.cpu().double().numpy(), data.terminated, data.truncated
    advantages = gae(*numbers, args.gamma, args.gae_lambda)  # detail 5
    advantages, weights = (torch.tensor(x).to(data.values) for x in (advantages, data.valid))
    values = data.values[:-1]
    fields = data.obs, data.actions, data.logprobs, advantages, advantages + values, values, weights
    batch = Batch(*(x.flatten(0, 1) for x in fields))  # B = T * N

    epochs = minibatch_rows(iteration, own_envs(args), args, values.device)
    moments = advantage_moments(batch, [rows for epoch in epochs for rows in epoch])
    moments = moments.view(args.update_epochs, args.num_minibatches, 3)
    enough = (moments[..., 2] >= 2).tolist()  # fewer than two advantages can't be normalized
    metrics = []  # of each step
    agent.adam.param_groups[0]["lr"] = torch.tensor(rate, device=values.device)
    for k, epoch in enumerate(epochs):
        for j, rows in enumerate(epoch):
            if not enough[k][j]:
                continue
            minibatch = Batch(*(x[rows] for x in batch))
            shares = gradient(agent, minibatch, moments[k, j], args)
            grad, share = world_sum(shares).tensor_split([len(agent.vector)])
            norm = grad.norm(keepdim=True)  # over all parameters (detail 11)
            agent.vector.grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            agent.adam.step()
            metrics.append(torch.cat([share, norm]))
        if not any(enough[k]):
            return {}
        approx_kl = torch.stack(metrics[-sum(enough[k]) :])[:, METRICS.index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    means = torch.stack(metrics).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(METRICS, means, strict=True)}
    x = torch.stack([batch.returns - batch.values, batch.returns]).double()
    w = batch.weights.expand_as(x)
    count, total, squares = world_sum(torch.stack([w, w * x, w * x.square()]).sum(dim=-1))
    count = count.clamp(min=1.0)
    unexplained, variance = (squares / count - (total / count).square()).tolist()
    return metrics | {"losses/explained_variance": 1.0 - unexplained / max(variance, 1e-12)}


# --- rollout --------------------------------------------------------------------------------------
def start(agent: Agent, envs: Envs, args: Args) -> tuple[dict, Rollout]:
    """What acting reads, and a rollout to be filled; a CUDA graph wants both to stay in place."""
    T = args.num_steps
    N = len(envs.obs)
    device = agent.vector.device
    at = {
        "obs": torch.as_tensor(envs.obs, device=device).clone(),  # [N, 4, 84, 84], bytes
        "noise": torch.zeros((T, N, len(agent.actor.bias)), device=device),
        "t": torch.zeros(1, dtype=torch.int64, device=device),  # the rollout's next row
    }
    pixels = torch.zeros((T, N, 84, 84, 4), dtype=torch.uint8, device=device)
    data = Rollout(
        obs=pixels.permute(0, 1, 4, 2, 3),
        actions=torch.zeros((T, N), dtype=torch.int64, device=device),
        logprobs=torch.zeros((T, N), device=device),
        values=torch.zeros((T + 1, N), device=device),
        rewards=np.zeros((T, N)),
        terminated=np.zeros((T, N), bool),
        truncated=np.zeros((T, N), bool),
        valid=np.zeros((T, N), bool),
    )
    return at, data


@torch.no_grad()
def acting_step(agent: Agent, at: dict, data: Rollout) -> torch.Tensor:
    """Actions [N] at the present observations; both become the rollout's next row. All is done in
    place, on the device, so that a CUDA graph can hold it."""
    t = at["t"]
    policy, values = agent.policy(at["obs"])
    actions = (policy + at["noise"][t].squeeze(0)).argmax(dim=-1)
    data.obs[t] = at["obs"]
    data.actions[t] = actions
    data.logprobs[t] = policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    data.values[t] = values
    t += 1
    return actions


@torch.no_grad()
def rollout(agent, envs: Envs, at: dict, data: Rollout, run: "Run", args: Args, act=acting_step):
    """Fill the rollout with `num_steps` steps in every environment, going on where the last one
    stopped (detail 1)."""
    which = own_envs(args)
    # Gumbel noise, whose argmax is a sample of the policy; drawn for all environments, wherever
    rng = np.random.default_rng((args.seed, run.iteration, 0))
    noise = rng.gumbel(size=(args.num_steps, args.num_envs, len(agent.actor.bias)))[:, which]
    at["noise"].copy_(torch.as_tensor(noise, dtype=torch.float32))
    at["t"].zero_()
    log = np.zeros((4, args.num_steps, args.num_envs))  # valid; a game ended, its score, its length
    for t in range(args.num_steps):
        data.valid[t] = ~envs.over
        actions = act(agent, at, data).cpu().numpy()
        data.rewards[t], data.terminated[t], data.truncated[t] = envs.step(actions)
        at["obs"].copy_(torch.as_tensor(envs.obs), non_blocking=True)
        for i, score, length in envs.ended:
            log[1:, t, which.start + i] = 1.0, score, length
    data.values[-1] = agent.get_value(at["obs"])
    log[0, :, which] = data.valid
    log = world_sum(torch.as_tensor(log, device=at["t"].device)).cpu().numpy()  # of all processes
    for counted, ended, scores, lengths in log.swapaxes(0, 1):
        run.global_step += int(counted.sum())
        games = np.flatnonzero(ended).tolist()
        if games and RANK == 0:
            run.log_episodes([(i, float(scores[i]), int(lengths[i])) for i in games])


# --- run folder, checkpoints, evaluation ----------------------------------------------------------
class Run:
    """A run's counters and, in rank 0, its folder and its logs. While it is open, no other
    process can use the folder."""

    def __init__(self, args: Args, checkpoint: dict):
        # folders may move, and processes may be more or fewer
        self.args = replace(args, run_dir=None, resume=None, evaluate=None, local_num_envs=0)
        self.global_step, self.iteration, seconds, rows = checkpoint.get("counters", (0, 0, 0.0, 0))
        self.returns = deque(checkpoint.get("returns", ()), maxlen=100)  # of the last episodes
        self.start = time.monotonic() - seconds
        self.status = "failed"  # until training has ended well
        self.folder = args.resume or args.run_dir
        if RANK > 0:
            return
        try:
            self.folder = self.folder or new_folder(args)
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
            self.rows = len(known) - 1
            if not known:
                self.csv.write("global_step,seconds,return,length\n")
                self.rows = 0
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
        if RANK > 0:
            return
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
        """Log the (environment, return, length) of the episodes that one step has ended: a row
        each, and for TensorBoard, which has one value a step, their mean."""
        for _, score, length in ended:
            seconds = time.monotonic() - self.start
            self.csv.write(f"{self.global_step},{seconds:.2f},{score},{length}\n")
            if not self.args.quiet:
                self.bar.write(f"global_step={self.global_step}, episodic_return={score:.4f}")
            self.returns.append(score)
        self.rows += len(ended)
        _, returns, lengths = zip(*ended, strict=True)
        self.writer.add_scalar("charts/episodic_return", np.mean(returns), self.global_step)
        self.writer.add_scalar("charts/episodic_length", np.mean(lengths), self.global_step)

    def log(self, metrics: dict[str, float]):
        self.iteration += 1
        if RANK > 0:
            return
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


def save(run: Run, agent: Agent):
    """Save all that is needed to continue. The file is renamed when whole: it is never half."""
    run.writer.flush()
    state = {"script": Path(__file__).name, "args": vars(run.args), "agent": agent.state_dict()}
    state["optimizer"] = {"state": agent.adam.state_dict()["state"]}
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
    made = envs or Envs(args, slice(0, 1))
    agent = Agent(made, args)
    if envs is None:
        made.close()
    try:
        agent.load_state_dict(checkpoint["agent"])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        maker = checkpoint.get("script")
        fail(f"{folder}: its agent, by {maker}, does not fit the environment: {error}")
    return agent, args


def drawn_envs(args: Args) -> Envs:
    """One game that can draw its frames; exits with one line if they can't."""
    try:
        envs = Envs(args, slice(0, 1), render_mode="rgb_array")
        envs.vector.render(env_ids=[0])
    except Exception as error:  # whatever EnvPool raises
        fail(f"--capture-video: {args.env_id} can't be drawn: {error!r}")
    return envs


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` greedily, then with sampled actions; returns the
    greedy returns. `capture_video` records the greedy episodes into its videos/."""
    torch.set_num_threads(args.num_threads or 1)
    greedy = play(args, "eval")
    sampled = play(replace(args, capture_video=False), "sampled")
    for name, returns in (("greedy", greedy), ("sampled", sampled)):
        print(f"{name}, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return greedy


def play(args: Args, name: str) -> list[float]:
    """Returns of `eval_episodes` episodes, printed under this name; "sampled" is not greedy."""
    played = replace(args, seed=episode_seed(args.seed, 2**31))
    videos = args.evaluate / "videos"
    if args.capture_video:
        refuse_links(args.evaluate)
        envs = drawn_envs(played)
        print(f"videos: {videos}")
    else:
        envs = Envs(played, slice(0, 1))
    returns = []
    frames = []
    steps = 0  # of the game so far
    with contextlib.closing(envs):
        agent, _ = load(args.evaluate, envs)
        rng = np.random.default_rng(played.seed)
        while len(returns) < args.eval_episodes:
            noise = rng.gumbel(size=(1, len(agent.actor.bias))) if name == "sampled" else None
            envs.step(agent.act(envs.obs, noise))
            steps += 1
            if args.capture_video:
                frames.append(envs.vector.render(env_ids=[0])[0])
            for _, episodic_return, _ in envs.ended:
                said = f"{name}_episode={len(returns)}, episodic_return={episodic_return:.2f}"
                print(said, flush=True)
                if args.capture_video:
                    save_frames(frames, videos, len(returns))
                returns.append(episodic_return)
                frames = []
                steps = 0
            if steps > 100_000:
                fail("100,000 steps, and the game has no end")
    return returns


def save_frames(frames: list[np.ndarray], folder: Path, episode: int, **more):
    """Write frames [H, W, 3] of an episode as a video into a folder."""
    from gymnasium.utils.save_video import save_video

    options = {"fps": 15, "episode_index": episode, "save_logger": None}
    save_video(frames, str(folder), lambda _: True, **options, **more)


# --- training -------------------------------------------------------------------------------------
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
    return args, device, max(1, cores // neighbours)


def meet(args: Args | None) -> tuple[dist.Store, Args]:
    """A store of these processes alone: torchrun's keeps the addresses of those before a restart,
    https://github.com/pytorch/pytorch/issues/135712. Rank 0 names it and tells its arguments."""
    store, *_ = next(dist.rendezvous("env://"))
    mine = os.urandom(16).hex()
    if RANK == 0:
        store.set("named", mine)
        others = [store.get(f"{mine}/{rank}").decode() for rank in range(1, args.world_size)]
        for name in (mine, *others):
            store.set(name, json.dumps([mine, vars(args)], default=str))
    while not store.check([mine]):  # until rank 0 has answered
        store.set(f"{store.get('named').decode()}/{RANK}", mine)
        time.sleep(0.05)
    name, args = json.loads(store.get(mine))
    paths = {key: Path(args[key]) for key in ("run_dir", "resume", "evaluate") if args[key]}
    return dist.PrefixStore(name, store), Args(**args | paths)


def own_envs(args: Args) -> slice:
    """Which of the environments are this process's."""
    each = args.num_envs // args.world_size
    return slice(RANK * each, (RANK + 1) * each)


def world_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Add up a tensor over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def compile_grad(agent: Agent, args: Args):
    """`minibatch_grad` compiled, and the agent's policy; as they are, if no compiler works."""
    if not (args.compile or args.cudagraphs):
        return minibatch_grad
    options = {"triton.cudagraphs": args.cudagraphs}
    try:
        torch.compiler.reset()  # forget what was compiled for another agent
        torch._dynamo.config.trace_autograd_ops = True
        torch.compile(lambda x: x + 1)(agent.vector)
    except Exception as error:  # whatever a missing or broken compiler raises
        if RANK == 0:
            print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return minibatch_grad
    agent.policy = torch.compile(agent.policy, fullgraph=True)
    compiled = torch.compile(minibatch_grad, fullgraph=True, options=options)
    seen = None
    given = None

    def gradient(agent: Agent, minibatch: Batch, moments: torch.Tensor, args: Args):
        nonlocal seen, given
        if seen != vars(args):
            seen = dict(vars(args))
            given = followed(args, moments.device)
        return compiled(agent, minibatch, moments, given)

    return gradient


class Recorded:
    """A function whose tensors stay where they are, as a CUDA graph: called as it is three times,
    in which libraries get ready, then recorded, and replayed ever after. A graph holds numbers as
    they were: it is recorded again when one of Args has changed."""

    def __init__(self, function):
        self.function = function
        self.calls = 0
        self.numbers = None

    def __call__(self, *given):
        self.calls += 1
        if self.calls <= 3:
            return self.function(*given)
        numbers = [dict(vars(x)) for x in given if isinstance(x, Args)]
        if numbers != self.numbers:
            self.numbers = numbers
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.function(*given)
        self.graph.replay()
        return self.result


def followed(args: Args, device: torch.device) -> SimpleNamespace:
    """Args with its fractions as tensors, whose values compiled code reads each time. Of plain
    numbers it follows only the first change (torch 2.13)."""
    fractions = {name: x for name, x in vars(args).items() if type(x) is float}
    tensors = {
        name: torch.tensor(x, dtype=torch.float64, device=device) for name, x in fractions.items()
    }
    return SimpleNamespace(**vars(args) | tensors)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def stop_signals():
    """A list of the signals that have come. The first ends training after its iteration, the next
    acts at once, except under torchrun, which passes on what its processes have got already.
    Only the main thread can catch signals; elsewhere the list stays empty."""
    stop = []

    def handler(number, frame):
        stop.append(number)
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)
        if RANK == 0:
            os.write(2, b"\nstopping after this iteration\n")

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS if main}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def restore(agent: Agent, checkpoint: dict, folder: Path):
    """Set the agent and its optimizer to what the checkpoint has."""
    try:
        agent.load_state_dict(checkpoint["agent"])
        saved = {"state": checkpoint["optimizer"]["state"]}  # its settings are the code's
        agent.adam.load_state_dict(agent.adam.state_dict() | saved)
        for parameter, state in agent.adam.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].shape != parameter.shape:
                    raise ValueError(f"{name} has shape {tuple(state[name].shape)}")
                state[name] = torch.empty_like(parameter).copy_(state[name])  # in the same layout
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        fail(f"{folder}: its checkpoint does not fit: {error!r}")


def check_finite(iteration: int, values: dict):
    """Raise FloatingPointError that names the first value with a NaN or an infinity."""
    for name, x in values.items():
        if not torch.as_tensor(x).isfinite().all():
            raise FloatingPointError(f"iteration {iteration}: {name} is not finite")


def train(args: Args | None) -> Path | None:
    """Train, or go on training; returns the run's folder, if rank 0 did not name it alone.
    Arguments are rank 0's."""
    args, device, threads = join(args)
    told = [load_checkpoint(args.resume) if args.resume and RANK == 0 else {}]
    if args.world_size > 1:
        dist.broadcast_object_list(told, src=0)  # others may not see the folder
    (checkpoint,) = told
    torch.set_num_threads(args.num_threads or threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    _, iteration, *_ = checkpoint.get("counters", (0, 0))
    envs = Envs(args, own_envs(args), iteration, args.env_threads or threads)
    with contextlib.closing(envs):
        torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
        agent = Agent(envs, args).to(device)
        agent.adam = flat_adam(agent)
        if args.resume:
            restore(agent, checkpoint, args.resume)
        if args.world_size > 1:
            dist.broadcast(agent.vector, src=0)
        gradient = compile_grad(agent, args)
        at, data = start(agent, envs, args)
        act = Recorded(acting_step) if args.cudagraphs and device.type == "cuda" else acting_step
        with stop_signals() as stop, Run(args, checkpoint) as run:
            if RANK == 0:
                how = "eager" if gradient is minibatch_grad else "compiled"
                todo = f"iterations {run.iteration} to {args.num_iterations}, in {run.folder}"
                run.bar.write(f"{args.env_id} on {args.world_size} x {device}, {how}, {todo}")
                save(run, agent)
            stopped = False
            while run.iteration < args.num_iterations and not stopped:
                remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate  # annealed (detail 4)
                rollout(agent, envs, at, data, run, args, act)
                metrics = update(agent, data, run.iteration, learning_rate, args, gradient)
                found = {"rewards": data.rewards} | metrics | agent.state_dict()
                check_finite(run.iteration, found)
                run.log(metrics | {"charts/learning_rate": learning_rate})
                if RANK == 0 and run.iteration % args.checkpoint_interval == 0:
                    save(run, agent)
                stopped = world_sum(torch.tensor(len(stop), device=device))  # of all processes
            if RANK == 0:
                save(run, agent)
            run.status = "running" if run.iteration < args.num_iterations else "finished"
    if args.world_size > 1:
        dist.destroy_process_group()
    return finish(run, agent, stop)


def finish(run: Run, agent: Agent, stop: list[int]) -> Path | None:
    """Print how to go on or to play; save the weights and record a video, if asked to."""
    # where it is imported, as in a notebook, the file itself
    program = sys.argv[0] if __name__ == "__main__" else os.path.relpath(__file__)
    script = f"python {shlex.quote(program)}"
    folder = shlex.quote(str(run.folder))
    if run.status == "running":
        if RANK == 0:
            print(f"go on with: {script} --resume {folder}")
        raise SystemExit(128 + (stop or [signal.SIGTERM])[0])  # or another process was stopped
    if RANK > 0:
        return run.folder
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
    args = parse_args() if RANK == 0 or {"-h", "--help"} & {*sys.argv} else None
    evaluate(args) if args and args.evaluate else train(args)
