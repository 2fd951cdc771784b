# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "envpool>=1.2", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for Atari from pixels, with an LSTM instead of stacked frames, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked in the code. Every iteration:

    1. take T steps in each of N environments (EnvPool's); keep the LSTM's state before the first
    2. A = GAE(lambda); a lost life ends an episode. The row after it is never learned from: it has
       the true last observation, whose value a time limit bootstraps from. Then state is cleared
    3. for K epochs, for each minibatch of whole environments, replayed from the kept state, with A
       normalised in it and r = pi(a | s, state) / pi_old(a | s, state):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_atari_lstm.py --env-id Breakout-v5                 # train, 10,000,000 steps
    python ppo_atari_lstm.py --resume runs/RUN                    # go on, in new games
    python ppo_atari_lstm.py --evaluate runs/RUN --capture-video  # play it greedily

CleanRL's reaches 129 on Breakout, 19.8 on Pong after 10M steps (raw scores); its flags and tags.
Left out on purpose: many processes (ppo_atari_multigpu.py), other environments than EnvPool's.
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
from itertools import pairwise
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
    compile: bool = False  # compile these layers if a compiler works: same results to rounding
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
    num_envs: int = 8  # environments played side by side
    num_steps: int = 128  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch, each of all steps of some environments
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
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "num_threads": 0, "env_threads": 0}
        low |= {"minibatch_size": 2, "total_timesteps": self.batch_size}
        high = {"gamma": 1, "gae_lambda": 1, "num_minibatches": self.num_envs}
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
    if args.capture_video:  # find out before training what is missing
        if importlib.util.find_spec("moviepy") is None or metadata.version("moviepy") < "2":
            fail("--capture-video: moviepy 2 is not installed: pip install 'moviepy>=2'")
        drawn_envs(args).close()
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
    """The Atari games, and the score of each so far. By EnvPool: no-ops at the start
    (Atari detail 1), every 4th frame as the maximum of two (Atari detail 2), a lost life ends an
    episode but not the game (Atari detail 3), fire to start (Atari detail 4), 84 x 84 grey pixels
    (Atari detail 5), rewards clipped to their sign (Atari detail 6), one frame.

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
        self.vector = envpool.make(name, env_type="gymnasium", seed=seeds, stack_num=1, **more)
        self.action_space = self.vector.action_space
        self.obs, _ = self.vector.reset()  # [N, 1, 84, 84], bytes
        self.over = np.zeros(len(numbers), bool)  # [N], the last step ended an episode
        self.first = torch.ones(len(numbers), dtype=bool)  # [N], obs is an episode's first
        self.scores = np.zeros(len(numbers))  # [N], of the game so far, raw
        self.lengths = np.zeros(len(numbers), int)
        self.ended = []  # (environment, score, length) of each game that the last step ended

    def step(self, actions: np.ndarray):
        """Take actions [N]: clipped rewards, terminated, truncated [N]."""
        self.first = torch.as_tensor(self.over)
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
    """Policy and value function on one convolutional network (Mnih et al. 2015; Atari detail 8) and
    an LSTM, whose state in N environments is a tensor of h and c [2, N, 128].

    `envs` is anything with gymnasium's action_space (Discrete), single or vectorised; observations
    are 1 x 84 x 84 bytes, scaled to 0 ... 1 here (Atari detail 9). A batch is T rows of each of the
    N environments, B = T * N; `first` [B], on the CPU, says which are an episode's first.
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        actions = int(getattr(envs, "single_action_space", envs.action_space).n)
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(1, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(512, 128)
        for name, parameter in self.lstm.named_parameters():  # (LSTM detail 1)
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        self.actor = layer_init(nn.Linear(128, actions), gain=0.01)
        self.critic = layer_init(nn.Linear(128, 1), gain=1.0)

    def initial_state(self, n: int) -> torch.Tensor:
        """The LSTM's state in n environments before anything was seen (LSTM detail 2)."""
        return self.actor.bias.new_zeros((2, n, self.lstm.hidden_size))

    def hidden(self, obs: torch.Tensor) -> torch.Tensor:
        """The last hidden layer [B, 512] at observations [B, 1, 84, 84], bytes."""
        order = torch.channels_last if self.args.channels_last else torch.contiguous_format
        dtype = torch.bfloat16 if self.args.bf16 else torch.float32
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.args.bf16):
            return self.network(obs.to(dtype, memory_format=order) / 255.0).float()

    def policy(self, obs: torch.Tensor, state: torch.Tensor, first: torch.Tensor):
        """Log-probabilities of the actions [B, A] and V [B] at observations [B, 1, 84, 84], and the
        state after them. It is cleared before an episode's first row (LSTM detail 3). Rows between
        two such, of any environments, take one call of the LSTM: one call a row is slow."""
        rows = self.hidden(obs).view(-1, state.shape[1], 512)  # [T, N, 512]
        first = first.view(len(rows), -1)
        outputs = []
        keep = (~first).to(state).unsqueeze(-1)  # [T, N, 1]
        starts = (first[1:].any(dim=1).nonzero().flatten() + 1).tolist()
        for begin, end in pairwise([0, *starts, len(rows)]):
            h, c = (state * keep[begin]).unsqueeze(1)
            output, state = self.lstm(rows[begin:end], (h, c))
            outputs.append(output)
            state = torch.cat(state)
        hidden = torch.cat(outputs).flatten(0, 1)  # [B, 128]
        return self.actor(hidden).log_softmax(dim=-1), self.critic(hidden).squeeze(-1), state

    def get_value(self, obs: torch.Tensor, state: torch.Tensor, first: torch.Tensor):
        """V [B] at observations [B, 1, 84, 84]."""
        _, value, _ = self.policy(obs, state, first)
        return value

    def get_action_and_value(self, obs, state, first, action: torch.Tensor | None = None):
        """Action [B] (sampled unless given), log-probability, entropy, V [B], the state after."""
        logprobs, value, state = self.policy(obs, state, first)
        if action is None:
            action = torch.distributions.Categorical(logits=logprobs).sample()
        logprob = logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return action, logprob, -(logprobs.exp() * logprobs).sum(dim=-1), value, state

    forward = get_action_and_value

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: np.ndarray | None = None, *, state) -> np.ndarray:
        """Greedy actions [N] at bytes [N, 1, 84, 84] or, given Gumbel noise [N, A], samples. The
        state becomes the one after; set state[:, i] = 0 before an episode's first observation."""
        first = torch.zeros(len(obs), dtype=bool)
        obs = torch.as_tensor(obs, device=state.device)
        policy, _, state[:] = self.policy(obs, state, first)
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
    state: torch.Tensor  # [2, N, 128], the LSTM's before the first row
    first: torch.Tensor  # [T, N], on the CPU: an episode's first row, before which it is cleared
    obs: torch.Tensor  # [T, N, 1, 84, 84], bytes
    actions: torch.Tensor  # [T, N]
    logprobs: torch.Tensor  # [T, N], of the policy that acted
    values: torch.Tensor  # [T + 1, N]
    rewards: np.ndarray  # [T, N], clipped
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end, whose action was ignored
    # and whose reward is 0; its observation is the episode's true last one


class Batch(NamedTuple):
    state: torch.Tensor  # [2, N, 128], before the first of T rows
    first: torch.Tensor  # [B], on the CPU; B = T * N
    obs: torch.Tensor  # [B, 1, 84, 84], bytes
    actions: torch.Tensor  # [B]
    rows: torch.Tensor  # [M], what of B is learned from
    logprobs: torch.Tensor  # [M], of the policy that acted
    advantages: torch.Tensor  # [M]
    returns: torch.Tensor  # [M]
    values: torch.Tensor  # [M], before the update


def ppo_loss(agent, args: Args, batch: Batch):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch, and its metrics."""
    # states, too, as the parameters now make them (LSTM detail 5)
    _, *outputs, _ = agent(batch.obs, batch.state, batch.first, batch.actions)
    logprob, entropy, value = (x[batch.rows] for x in outputs)
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
    returns = advantages + values
    shown = data.first, data.obs, data.actions
    learned = data.logprobs, advantages, returns, values
    steps = []  # metrics of each step
    rng = np.random.default_rng((args.seed, iteration, 1))
    agent.adam.param_groups[0]["lr"] = learning_rate
    for _ in range(args.update_epochs):
        epoch = []
        # every environment once an epoch, with all its rows (detail 6, LSTM detail 4)
        for which in np.array_split(rng.permutation(args.num_envs), args.num_minibatches):
            rows = torch.as_tensor(np.flatnonzero(data.valid[:, which]), device=values.device)
            if len(rows) < 2:  # fewer than two advantages can't be normalized
                continue
            inputs = [x[:, which].flatten(0, 1) for x in shown]
            targets = [x[:, which].flatten(0, 1)[rows] for x in learned]
            minibatch = Batch(data.state[:, which], *inputs, rows, *targets)
            loss, metrics = ppo_loss(agent, args, minibatch)
            agent.adam.zero_grad()
            loss.backward()
            # over all parameters (detail 11)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            agent.adam.step()
            epoch.append(torch.stack([*metrics.values()]).detach())
        if not epoch:  # nothing to learn from
            return {}
        steps += epoch
        approx_kl = torch.stack(epoch)[:, [*metrics].index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    means = torch.stack(steps).mean(dim=0).tolist()
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    error = advantages[data.valid].var(correction=0)  # variance of R - V
    scale = returns[data.valid].var(correction=0)  # variance of R
    metrics["losses/explained_variance"] = 1.0 - (error / scale.clamp(min=1e-12)).item()
    return metrics


# --- rollout --------------------------------------------------------------------------------------
@torch.no_grad()
def rollout(agent: Agent, envs: Envs, state: torch.Tensor, run: "Run", args: Args):
    """Take `num_steps` steps in every environment, going on where the last rollout stopped
    (detail 1), with the LSTM's state there: a Rollout, and the state where this one stopped."""
    T = args.num_steps
    N = args.num_envs
    device = state.device
    obs = torch.empty((T, *envs.obs.shape), dtype=torch.uint8, device=device)
    first = torch.zeros((T, N), dtype=bool)
    rewards = np.zeros((T, N))
    terminated = np.zeros((T, N), bool)
    truncated = np.zeros((T, N), bool)
    over = np.zeros((T, N), bool)  # rows after an episode's end
    logprobs = []
    actions = []
    values = []
    before = state
    # Gumbel noise, whose argmax is a sample of the policy
    rng = np.random.default_rng((args.seed, run.iteration, 0))
    noise = rng.gumbel(size=(T, N, len(agent.actor.bias)))
    noise = torch.as_tensor(noise, dtype=torch.float32, device=device)
    for t in range(T):
        obs[t] = torch.as_tensor(envs.obs)
        first[t] = envs.first
        over[t] = envs.over
        policy, value, state = agent.policy(obs[t], state, first[t])
        action = (policy + noise[t]).argmax(dim=-1)
        logprobs.append(policy.gather(-1, action.unsqueeze(-1)).squeeze(-1))
        actions.append(action)
        values.append(value)
        rewards[t], terminated[t], truncated[t] = envs.step(action.cpu().numpy())
        run.global_step += N - int(np.count_nonzero(over[t]))
        if envs.ended:
            run.log_episodes(envs.ended)
    values.append(agent.get_value(torch.as_tensor(envs.obs, device=device), state, envs.first))
    actions, logprobs, values = (torch.stack(x) for x in (actions, logprobs, values))
    acted = before, first, obs, actions, logprobs, values
    return Rollout(*acted, rewards, terminated, truncated, ~over), state


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
        state = agent.initial_state(1)
        while len(returns) < args.eval_episodes:
            state[:, envs.first] = 0.0  # where training cleared it
            noise = rng.gumbel(size=(1, len(agent.actor.bias))) if name == "sampled" else None
            envs.step(agent.act(envs.obs, noise, state=state))
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
def compile_hidden(agent: Agent) -> str:
    """Compile all before the LSTM, whose calls are as long as episodes are; says what was done."""
    try:
        torch.compile(lambda x: x + 1)(agent.actor.bias)
    except Exception as error:  # whatever a missing or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return "eager"
    agent.hidden = torch.compile(agent.hidden, fullgraph=True)
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
    envs = Envs(args, slice(None), start, args.env_threads or cores)
    with contextlib.closing(envs):
        torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
        agent = Agent(envs, args).to(device)
        agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # (detail 3)
        if args.resume:
            restore(agent, checkpoint, args.resume)
        how = f"{device}, {compile_hidden(agent) if args.compile else 'eager'}"
        state = agent.initial_state(args.num_envs)
        with stop_signals() as stop, Run(args, checkpoint) as run:
            how = f"{args.env_id} on {how}, {args.num_iterations} iterations"
            run.bar.write(f"{how}, in {run.folder}")
            save(run, agent)
            while run.iteration < args.num_iterations and not stop:
                remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate  # annealed (detail 4)
                data, state = rollout(agent, envs, state, run, args)
                metrics = update(agent, data, run.iteration, learning_rate, args)
                check_finite(run.iteration, {"rewards": data.rewards})
                check_finite(run.iteration, metrics | agent.state_dict())
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
