# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "envpool>=1.2", "numpy", "tensorboard",
#                 "PyQt5-Qt5; platform_machine == 'x86_64'", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for Procgen from pixels, with IMPALA's network, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. Procgen (Cobbe et al. 2020) makes each
level from a number: train on some, play others, and see what was learned. Every iteration:

    1. take T steps in each of N environments (EnvPool's), with rewards scaled by their returns
    2. A = GAE(lambda): a time limit bootstraps from the value of the true last observation, a
       termination does not, and the row after an episode's end (autoreset's) is never learned from
    3. for K epochs, for each minibatch, with A normalised in it and r = pi(a | s) / pi_old(a | s):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_procgen.py --env-id StarpilotEasy-v0 --num-levels 200    # train on levels 0 to 199
    python ppo_procgen.py --resume runs/RUN                             # go on, in new games
    python ppo_procgen.py --evaluate runs/RUN                           # play those levels, and all

CleanRL's reaches 31 on starpilot after 25M steps on all levels; its flags, defaults and tags.
"""

import contextlib
import ctypes
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
    env_threads: int = 0  # CPU threads of the environments; 0: as for --num-threads
    channels_last: bool = True  # convolutions in channels-last order: same results to rounding
    bf16: bool = False  # convolutions and hidden layer in bfloat16: faster if the hardware has it
    compile: bool = False  # compile the network if a compiler works: same results to rounding
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # project in Weights and Biases
    wandb_entity: str | None = None  # team (entity) in Weights and Biases
    quiet: bool = False  # print no line per episode
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # new folder; default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # continue the run in this folder with its own arguments
    evaluate: Path | None = None  # play the run in this folder, on its levels and on all, and exit
    eval_episodes: int = 100  # episodes of an evaluation, on its levels and on all
    eval_sample: bool = False  # --evaluate samples actions instead of playing greedily
    eval_interval: int = 20  # with --num-levels, iterations between plays on all levels, sampled
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = "StarpilotEasy-v0"  # or starpilot, the same; StarpilotHard-v0: harder levels
    num_levels: int = 0  # levels trained on; 0: all, about 2^31
    start_level: int = 0  # the first level, if --num-levels is given
    total_timesteps: int = 25_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 5e-4  # Adam's learning rate in the first iteration
    num_envs: int = 64  # environments played side by side
    num_steps: int = 256  # steps in each environment per iteration
    anneal_lr: bool = False  # lower the learning rate linearly
    gamma: float = 0.999  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 3  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
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
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "num_threads": 0, "env_threads": 0, "num_levels": 0, "start_level": 0}
        low |= {"minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {"gamma": 1, "gae_lambda": 1, "num_levels": 10**9, "start_level": 10**9}
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
    if importlib.util.find_spec("envpool") is None:
        fail("envpool is not installed: pip install envpool")
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


def make_games(env_id: str, **more):
    """EnvPool's games, drawn by the system's Qt 5 or else by that of the package PyQt5-Qt5."""
    import envpool

    name = env_id if "-" in env_id else f"{env_id.capitalize()}Easy-v0"  # CleanRL's ids
    if envpool.registration.registry.specs.get(name, [None])[0] != "envpool.procgen":
        fail(f"--env-id {env_id}: EnvPool has no such Procgen game (ids are as StarpilotEasy-v0)")
    try:
        return envpool.make(name, env_type="gymnasium", **more)
    except ImportError:  # no Qt, which EnvPool remembers until its module is forgotten
        sys.modules.pop("envpool.procgen", None)
    try:
        for folder in getattr(importlib.util.find_spec("PyQt5"), "submodule_search_locations", ()):
            ctypes.CDLL(f"{folder}/Qt5/lib/libQt5Gui.so.5", mode=ctypes.RTLD_GLOBAL)
        return envpool.make(name, env_type="gymnasium", **more)
    except (ImportError, OSError) as error:
        fail(f"{error} (or, without root: pip install PyQt5-Qt5)")


class Envs:
    """Procgen's games by EnvPool, each on a level drawn from `num_levels`, and the scores so far.

    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    Games can't be saved: a run resumed at iteration `start` plays new ones, with other seeds.
    """

    def __init__(self, args: Args, n: int, start: int = 0):
        seeds = [episode_seed(args.seed, i, start) % 2**31 for i in range(n)]
        threads = min(args.env_threads or torch.get_num_threads(), n)
        more = {"num_levels": args.num_levels, "start_level": args.start_level, "seed": seeds}
        self.vector = make_games(args.env_id, num_envs=n, num_threads=threads, **more)
        self.action_space = self.vector.action_space
        self.obs, _ = self.vector.reset()  # [N, 3, 64, 64], bytes
        self.over = np.zeros(n, bool)  # [N], the last step ended an episode
        self.discounted = np.zeros(n)  # [N], discounted sum of the rewards so far
        self.returns = np.zeros(n)
        self.lengths = np.zeros(n, int)
        self.ended = []  # (environment, return, length) of each episode that the last step ended

    def step(self, actions: np.ndarray):
        """Take actions [N]: rewards, terminated, truncated [N]."""
        going = ~self.over
        self.obs, rewards, terminated, truncated, _ = self.vector.step(actions)
        self.over = terminated | truncated
        self.returns = self.returns * going + rewards
        self.lengths = (self.lengths + 1) * going
        episodes = zip(self.returns.tolist(), self.lengths.tolist(), strict=True)
        self.ended = [(i, *both) for i, both in enumerate(episodes) if self.over[i]]
        return rewards, terminated, truncated

    def close(self):
        self.vector.close()


# --- agent ----------------------------------------------------------------------------------------
class Residual(nn.Sequential):
    """x + f(x) (He et al. 2016)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Agent(nn.Module):
    """Policy and value function on IMPALA's network, without its LSTM (Espeholt et al. 2018).

    `envs` is anything with gymnasium's action_space (Discrete), single or vectorised; observations
    are 3 x 64 x 64 bytes, scaled to 0 ... 1 here.
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        actions = int(getattr(envs, "single_action_space", envs.action_space).n)
        layers = []
        for inputs, size in ((3, 16), (16, 32), (32, 32)):  # channels; 64 x 64 pixels become 8 x 8
            conv = [nn.Conv2d(k, size, 3, padding=1) for k in (inputs, size, size, size, size)]
            layers += [conv[0], nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [Residual(nn.ReLU(), a, nn.ReLU(), b) for a, b in (conv[1:3], conv[3:])]
        layers += [nn.Flatten(), nn.ReLU(), nn.Linear(32 * 8 * 8, 256), nn.ReLU()]
        self.network = nn.Sequential(*layers)  # with torch's own initial weights
        self.actor = nn.Linear(256, actions)
        self.critic = nn.Linear(256, 1)
        for head, gain in ((self.actor, 0.01), (self.critic, 1.0)):  # (detail 2)
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)
        # of discounted returns, for scaling rewards: number, sum and sum of squares
        self.register_buffer("return_sums", torch.zeros(3, dtype=torch.float64))

    def policy(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the actions [B, A] and V [B] at observations [B, 3, 64, 64]."""
        order = torch.channels_last if self.args.channels_last else torch.contiguous_format
        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.args.bf16):
            hidden = self.network(obs.to(dtype, memory_format=order) / 255.0).float()
        return self.actor(hidden).log_softmax(dim=-1), self.critic(hidden).squeeze(-1)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [B] at observations [B, 3, 64, 64]."""
        _, value = self.policy(obs)
        return value

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [B] (sampled unless given), log-probability, entropy, V [B] at [B, 3, 64, 64]."""
        logprobs, value = self.policy(obs)
        if action is None:
            action = torch.distributions.Categorical(logits=logprobs).sample()
        logprob = logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return action, logprob, -(logprobs.exp() * logprobs).sum(dim=-1), value

    forward = get_action_and_value

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Greedy actions [N] at bytes [N, 3, 64, 64] or, given Gumbel noise [N, A], samples."""
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
    obs: torch.Tensor  # [T, N, 3, 64, 64], bytes
    actions: torch.Tensor  # [T, N]
    logprobs: torch.Tensor  # [T, N], of the policy that acted
    values: torch.Tensor  # [T + 1, N]
    rewards: np.ndarray  # [T, N], scaled
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored
    # and whose reward is 0; its observation is the episode's true last one


class Batch(NamedTuple):
    obs: torch.Tensor  # [B, 3, 64, 64], bytes
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
    obs = torch.empty((T, *envs.obs.shape), dtype=torch.uint8, device=device)
    rewards = np.zeros((T, N))
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    over = np.zeros((T, N), bool)  # rows after an episode's end
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
    values.append(agent.get_value(torch.as_tensor(envs.obs, device=device)))
    actions, logprobs, values = (torch.stack(x) for x in (actions, logprobs, values))
    data = Rollout(obs, actions, logprobs, values, rewards, terminated, truncated, ~over)
    return data._replace(rewards=scale_rewards(agent, envs, data, args.gamma))


def scale_rewards(agent: Agent, envs: Envs, data: Rollout, gamma: float) -> np.ndarray:
    """Rewards [T, N] over the deviation of the discounted returns so far, clipped to +-10
    (continuous details 8, 9)."""
    discounted = np.zeros_like(data.rewards)
    going = 1.0 - (data.terminated | data.truncated)
    for t, reward in enumerate(data.rewards):
        discounted[t] = gamma * envs.discounted + reward
        envs.discounted = discounted[t] * going[t]
    seen = discounted[data.valid]
    sums = np.array([len(seen), seen.sum(), np.square(seen).sum()])
    agent.return_sums += torch.as_tensor(sums).to(agent.return_sums)
    _, mean, square = (agent.return_sums / agent.return_sums[0]).tolist()
    return np.clip(data.rewards / math.sqrt(square - mean**2 + 1e-8), -10.0, 10.0)


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
    made = envs or Envs(args, 1)
    agent = Agent(made, args)
    if envs is None:
        made.close()
    try:
        agent.load_state_dict(checkpoint["agent"])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        maker = checkpoint.get("script")
        fail(f"{folder}: its agent, by {maker}, does not fit the environment: {error}")
    return agent, args


def play(agent: Agent, args: Args, num_levels: int, sample: bool, films=()) -> list[float]:
    """Returns of `eval_episodes` episodes, one in each of as many environments: of more, those that
    end first would be the short ones. The first of them add their frames to `films`."""
    seed = episode_seed(args.seed, 2**31)
    n = args.eval_episodes
    rng = np.random.default_rng(seed)
    returns = np.full(n, np.nan)
    actions = np.zeros(n, int)
    with contextlib.closing(Envs(replace(args, seed=seed, num_levels=num_levels), n)) as envs:
        for _ in range(100_000):
            playing = np.isnan(returns)
            if not playing.any():
                return returns.tolist()
            for i in np.flatnonzero(playing[: len(films)]):
                films[i].append(envs.obs[i].transpose(1, 2, 0))
            noise = rng.gumbel(size=(n, len(agent.actor.bias)))
            actions[playing] = agent.act(envs.obs[playing], noise[playing] if sample else None)
            envs.step(actions)
            for i, episodic_return, _ in envs.ended:
                returns[i] = episodic_return if playing[i] else returns[i]
    fail("100,000 steps, and an episode has no end")


def evaluate(args: Args) -> list[float]:
    """Play `eval_episodes` greedily with the agent saved in `args.evaluate`, on its levels and on
    all; print each return and, with `capture_video`, record ten of each. Writes nothing else."""
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    agent, _ = load(args.evaluate)
    how = "sampled" if args.eval_sample else "greedy"
    videos = args.evaluate / "videos"
    films = min(10, args.eval_episodes) if args.capture_video else 0
    if films:
        refuse_links(args.evaluate)
        print(f"videos: {videos}")
    plays = {"train": args.num_levels, "eval": 0} if args.num_levels else {"eval": 0}
    for name, levels in plays.items():
        frames = [[] for _ in range(films)]
        returns = play(agent, args, levels, args.eval_sample, frames)
        for episode, episodic_return in enumerate(returns):
            print(f"{name}_episode={episode}, episodic_return={episodic_return:.2f}", flush=True)
        for episode, film in enumerate(frames):
            save_frames(film, videos, episode, name_prefix=name)
        played = f"{how}, {len(returns)} episodes on {levels or 'all'} levels"
        print(f"{played}: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


def save_frames(frames: list[np.ndarray], folder: Path, episode: int, **more):
    """Write frames [H, W, 3] of an episode as a video into a folder."""
    from gymnasium.utils.save_video import save_video

    options = {"fps": 15, "episode_index": episode, "save_logger": None}
    save_video(frames, str(folder), lambda _: True, **options, **more)


# --- training -------------------------------------------------------------------------------------
def compile_policy(agent: Agent) -> str:
    """Compile the network, for acting and for learning; says what was done."""
    try:
        torch.compile(lambda x: x + 1)(agent.actor.bias)
    except Exception as error:  # whatever a missing or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return "eager"
    agent.policy = torch.compile(agent.policy, fullgraph=True)
    return "compiled"


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


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(args.num_threads or cores)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    _, start, *_ = checkpoint.get("counters", (0, 0))
    envs = Envs(args, args.num_envs, start)
    with contextlib.closing(envs):
        torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
        agent = Agent(envs, args).to(device)
        agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # (detail 3)
        if args.resume:
            restore(agent, checkpoint, args.resume)
        how = f"{device}, {compile_policy(agent) if args.compile else 'eager'}"
        with stop_signals() as stop, Run(args, checkpoint) as run:
            how = f"{args.env_id} on {how}, {args.num_iterations} iterations"
            run.bar.write(f"{how}, in {run.folder}")
            save(run, agent)
            while run.iteration < args.num_iterations and not stop:
                remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate  # annealed (detail 4)
                data = rollout(agent, envs, run, args)
                metrics = update(agent, data, run.iteration, learning_rate, args)
                check_finite(run.iteration, {"rewards": data.rewards})
                check_finite(run.iteration, metrics | agent.state_dict())
                if args.num_levels and (run.iteration + 1) % args.eval_interval == 0:
                    metrics["charts/test_return"] = np.mean(play(agent, args, 0, sample=True))
                run.log(metrics | {"charts/learning_rate": learning_rate})
                if run.iteration % args.checkpoint_interval == 0:
                    save(run, agent)
            save(run, agent)
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
