# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "pettingzoo>=1.24,<1.28", "ale-py>=0.11",
#                 "multi-agent-ale-py", "pygame-ce", "numpy", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, in self-play on two-player Atari from pixels (PettingZoo's games), in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked where it is. One network plays both sides; two more
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
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # the experiment's name, part of the run's
    seed: int = 1  # of everything: network, actions, minibatches and environments
    torch_deterministic: bool = True  # torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one
    num_threads: int = 0  # CPU threads of torch; 0: as many as there are cores
    bf16: bool = False  # convolutions and hidden layer in bfloat16: faster if the hardware has it
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # its project
    wandb_entity: str | None = None  # its entity (team)
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # go on with the run in this folder, with its own arguments
    evaluate: Path | None = None  # play the run in this folder against another, and exit
    against: str = "RANDOM"  # with --evaluate: the folder of the other run; RANDOM: a random player
    eval_episodes: int = 20  # games of an evaluation, every other one with sides changed
    eval_interval: int = 200  # iterations between games against itself, as it was that long ago
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = "pong_v3"  # a two-player Atari game, by its id in PettingZoo
    total_timesteps: int = 20_000_000  # steps of all players, rounded down to iterations
    learning_rate: float = 2.5e-4  # Adam's, in the first iteration
    num_envs: int = 16  # players side by side, two in each game; rounded down to an even number
    num_steps: int = 128  # steps of each player per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.1  # epsilon of the clipped surrogate
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient over all parameters
    target_kl: float | None = None  # no further epoch once the mean approx_kl of one exceeds it
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute what is computed; a ValueError, which tyro shows, for what can't be meant."""
        self.num_envs -= self.num_envs % 2
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"minibatch_size": 4, "seed": 0, "num_threads": 0}
        high = {"gamma": 1, "gae_lambda": 1}
        for name, value in vars(self).items():
            least, most = low.get(name, int(type(value) is int)), high.get(name, 1e18)
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value}: not in {least} ... {most}")
        if self.resume and (self.run_dir or self.evaluate):
            raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args; with --resume or --evaluate, on top of that run's arguments."""

    def given(resume: Path | None = None, evaluate: Path | None = None):
        return resume or evaluate

    folder, _ = tyro.cli(given, args=argv, return_unknown_args=True, add_help=False)
    saved = load_checkpoint(folder)["args"] if folder else Args()
    args = tyro.cli(Args, args=argv, description=__doc__, default=saved)
    if args.resume and (args.env_id, args.num_envs) != (saved.env_id, saved.num_envs):
        fail(f"{args.resume} goes on with its {saved.num_envs} environments of {saved.env_id}")
    more = ["moviepy"] * args.capture_video + ["wandb"] * args.track
    for package in ["pettingzoo", "multi_agent_ale_py", "ale_py", *more]:
        if importlib.util.find_spec(package) is None:
            fail(f"{package} is not installed: pip install {package}")
    return args


def fail(message: str):
    """One line on standard error, exit code 2."""
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
    """

    def __init__(self, args: Args, n: int, autoreset: bool = True):
        more = {"auto_rom_install_path": Path(importlib.util.find_spec("ale_py").origin).parent}
        seeds = [episode_seed(args.seed, g) % 2**31 for g in range(n // 2)]  # of mazes and the like
        try:
            make = importlib.import_module(f"pettingzoo.atari.{args.env_id}").parallel_env
            self.games = [make(seed=seed, **more).unwrapped for seed in seeds]
            _first, _second = self.games[0].possible_agents
        except (ImportError, AttributeError, OSError, ValueError) as error:
            fail(f"--env-id {args.env_id}: {error} (ids are PettingZoo's for two, as pong_v3)")
        self.ales = [game.ale for game in self.games]
        self.actions, sizes = self.games[0].action_mapping, self.ales[0].getScreenDims()
        self.action_space = gym.spaces.Discrete(len(self.actions))
        # 84 times how much of each pixel is in each of 84 equal parts: whole numbers, exact sums
        reached = [np.clip(np.linspace(0, m, 85)[:, None] - np.arange(m), 0, 1) for m in sizes]
        self.columns, self.rows = (np.float32(84 * np.diff(x, axis=0)).round() for x in reached)
        self.seed, self.autoreset, self.max_steps = args.seed, autoreset, 25_000  # 100,000 frames
        self.obs = np.zeros((n, 6, 84, 84), np.uint8)
        self.obs[::2, 4] = self.obs[1::2, 5] = 255
        # [N], whether a player's episode has ended; its raw score and its steps so far
        self.over, (self.scores, self.lengths) = np.zeros(n, bool), np.zeros((2, n))
        self.episodes = np.full(n // 2, -1)
        for g in range(n // 2):
            self.reset(g)

    def reset(self, g: int):
        """Start a game, which 1 to 30 no-ops tell from others."""
        pair, self.episodes[g] = slice(2 * g, 2 * g + 2), self.episodes[g] + 1
        self.over[pair] = self.scores[pair] = self.lengths[pair] = 0
        self.ales[g].reset_game()
        for _ in range(1 + episode_seed(self.seed, g, self.episodes[g]) % 30):
            self.ales[g].act(np.zeros(2, int))
        self.obs[pair, :4] = self.shrink(self.ales[g].getScreenGrayscale())

    def shrink(self, *screens: np.ndarray) -> np.ndarray:
        """The maximum of screens [H, W, 1] as 84 x 84 bytes: means over areas."""
        sums = self.rows @ np.float32(np.max(screens, axis=0)[:, :, 0]) @ self.columns.T
        return np.uint8(sums / screens[0].size + 0.5)

    def step(self, actions: np.ndarray):
        """Take actions [N]: clipped rewards, terminated, truncated [N]."""
        before, rewards, actions = self.over.copy(), np.zeros(len(self.over)), self.actions[actions]
        for g, ale in enumerate(self.ales):
            pair, screens = slice(2 * g, 2 * g + 2), []
            over = self.over[pair]  # a view: changes in place
            while len(screens) < 4 and not over.all():
                rewards[pair] += ~over * ale.act(np.where(over, 0, actions[pair]))
                over |= (ale.allLives() < 0) | ale.game_over()
                screens.append(ale.getScreenGrayscale())
            if screens:
                self.obs[pair, :4] = [*self.obs[2 * g, 1:4], self.shrink(*screens[-2:])]
            elif self.autoreset:
                self.reset(g)
        self.scores += rewards
        self.lengths += ~before
        truncated = ~self.over & (self.lengths >= self.max_steps)
        terminated, self.over = self.over & ~before, self.over | truncated
        return np.sign(rewards), terminated, truncated

    def state_dict(self) -> dict:
        """All that `load_state_dict` needs to go on to the same bits."""
        content = {name: torch.tensor(x) for name, x in vars(self).items() if type(x) is np.ndarray}
        return content | {"games": [torch.tensor(game.clone_full_state()) for game in self.games]}

    def load_state_dict(self, content: dict):
        for game, state in zip(self.games, content.pop("games"), strict=True):
            game.restore_full_state(state.numpy())
        for name, x in content.items():
            getattr(self, name)[:] = x.numpy()


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
        self.actor, self.critic = nn.Linear(512, actions), nn.Linear(512, 1)
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


def ppo_loss(agent, args, obs, actions, old_logprobs, advantages, returns, old_values):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and what is
    logged of it. Old is what policy and value function gave before the update."""
    _, logprob, entropy, value = agent(obs, actions)
    logratio = logprob - old_logprobs
    ratio = logratio.exp()

    if args.norm_adv:  # per minibatch (detail 7)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    error = (value - returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        near = old_values + (value - old_values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (near - returns).square())
    value_loss = 0.5 * error.mean()

    entropy = entropy.mean()  # whose bonus encourages exploration (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -logratio.mean(), "approx_kl": (ratio - 1.0 - logratio).mean()}
    return loss, metrics | {"clipfrac": ((ratio - 1.0).abs() > args.clip_coef).float().mean()}


def update(agent: Agent, data: Rollout, iteration: int, learning_rate: float, args: Args):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    numbers = data.rewards, data.values.cpu().double().numpy(), data.terminated, data.truncated
    advantages = gae(*numbers, args.gamma, args.gae_lambda)  # detail 5
    advantages, values = torch.tensor(advantages).to(data.values), data.values[:-1]
    fields = data.obs, data.actions, data.logprobs, advantages, advantages + values, values
    batch = [x.flatten(0, 1) for x in fields]  # [B, ...], B = T * N

    rows, steps = np.flatnonzero(data.valid), []  # what is learned from; metrics of each step
    rng = np.random.default_rng((args.seed, iteration, 1))
    agent.adam.param_groups[0]["lr"] = learning_rate
    for _ in range(args.update_epochs):
        order = torch.as_tensor(rng.permutation(rows), device=values.device)
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(args.num_minibatches):
            loss, metrics = ppo_loss(agent, args, *[x[minibatch] for x in batch])
            agent.adam.zero_grad()
            loss.backward()
            # over all parameters (detail 11)
            metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            agent.adam.step()
            steps.append(torch.stack([*metrics.values()]).detach())
        approx_kl = torch.stack(steps[-args.num_minibatches :])[:, [*metrics].index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    means = torch.stack(steps).mean(dim=0).tolist()
    unexplained = batch[3][rows].var() / batch[4][rows].var().clamp(min=1e-12)  # of R - V and R
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    return metrics | {"losses/explained_variance": 1.0 - unexplained.item()}


# --- rollout --------------------------------------------------------------------------------------
@torch.no_grad()
def rollout(agent: Agent, envs: Envs, run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, going on where the last ended (detail 1)."""
    T, N, device = args.num_steps, args.num_envs, agent.actor.bias.device
    obs = torch.empty((T, N, 84, 84, 6), dtype=torch.uint8, device=device).permute(0, 1, 4, 2, 3)
    rewards, (terminated, truncated, valid) = np.zeros((T, N)), np.zeros((3, T, N), bool)
    logprobs, actions, values = [], [], []
    # Gumbel noise, whose argmax is a sample of the policy
    rng = np.random.default_rng((args.seed, run.iteration, 0))
    noise = torch.tensor(rng.gumbel(size=(T, N, len(agent.actor.bias)))).float().to(device)
    for t in range(T):
        obs[t], valid[t] = torch.as_tensor(envs.obs), ~envs.over
        policy, value = agent.policy(obs[t])
        action = (policy + noise[t]).argmax(dim=-1)
        logprobs.append(policy.gather(-1, action.unsqueeze(-1)).squeeze(-1))
        actions.append(action)
        values.append(value)
        rewards[t], terminated[t], truncated[t] = envs.step(action.cpu().numpy())
        run.global_step += int(valid[t].sum())
        for i in np.flatnonzero(terminated[t] | truncated[t]):
            run.log_episode(run.global_step, envs.scores[i], int(envs.lengths[i]), player=i % 2)
    values.append(agent.policy(torch.as_tensor(envs.obs, device=device))[1])
    actions, logprobs, values = (torch.stack(x) for x in (actions, logprobs, values))
    return Rollout(obs, actions, logprobs, values, rewards, terminated, truncated, valid)


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

            more = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            wandb.init(name=name, config=vars(args), sync_tensorboard=True, **more)
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

    def log_episode(self, step: int, episodic_return: float, length: int, player: int):
        self.csv.write(f"{step},{time.monotonic() - self.start:.2f},{episodic_return},{length}\n")
        self.writer.add_scalar(f"charts/episodic_return-player{player}", episodic_return, step)
        self.writer.add_scalar(f"charts/episodic_length-player{player}", length, step)
        self.bar.write(
            f"global_step={step}, player={player}, episodic_return={episodic_return:.4f}"
        )

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


def save(run: Run, agent: Agent, past: Agent, envs: Envs):
    """Everything needed to continue, whole or not at all: written aside, then renamed."""
    run.writer.flush()
    state = {"args": vars(run.args), "agent": agent.state_dict()}
    state["optimizer"] = agent.adam.state_dict()
    state |= {"past": past.state_dict(), "envs": envs.state_dict()}
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


def load(folder: Path, envs=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `envs` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args = checkpoint["args"]
    agent = Agent(envs or Envs(args, 2), args)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        fail(f"{folder}: its agent does not fit the environment: {error}")
    return agent, args


def play(agents: list[Agent | None], args: Args, seed: int, film=None) -> np.ndarray:
    """Scores [n, 2] of two agents, None being a random one, which draw actions in some games."""
    n, rng = args.eval_episodes, np.random.default_rng(seed)
    envs = Envs(replace(args, seed=seed), 2 * n, autoreset=False)
    sides = np.arange(2 * n).reshape(n, 2) ^ (np.arange(n)[:, None] % 2)  # changed in odd games
    while (playing := ~envs.over.reshape(n, 2).all(axis=1)).any():
        (games,), actions = playing.nonzero(), np.zeros(2 * n, int)
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
    n, p, z = len(scores), 0.5 + 0.5 * np.sign(scores[:, 0] - scores[:, 1]).mean(), 1.96
    centre, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = ((centre + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
    return {"charts/win_rate": p, "charts/win_rate_low": low, "charts/win_rate_high": high}


def evaluate(args: Args) -> list[float]:
    """Play the agent saved in `args.evaluate` against another, and film a game if that is asked."""
    torch.set_num_threads(args.num_threads or torch.get_num_threads())
    (agent, _), other, film = load(args.evaluate), None, [] if args.capture_video else None
    if args.against != "RANDOM":
        other, theirs = load(Path(args.against))
        if theirs.env_id != args.env_id:
            fail(f"--against {args.against}: plays {theirs.env_id}, not {args.env_id}")
    scores = play([agent, other], args, episode_seed(args.seed, 2**31), film)
    for episode, (mine, others) in enumerate(scores):
        print(f"eval_episode={episode}, episodic_return={mine:.2f} to {others:.2f}", flush=True)
    if film:
        from gymnasium.utils.save_video import save_video

        save_video(film, str(args.evaluate / "videos"), lambda _: True, fps=15, save_logger=None)
    rate, low, high = win_rate(scores).values()
    print(f"{len(scores)} games, win rate {rate:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    return scores[:, 0].tolist()


# --- training -------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(args.num_threads or cores)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    envs = Envs(args, args.num_envs)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent, past = Agent(envs, args).to(device), Agent(envs, args).to(device)  # past: untrained
    agent.adam = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # (detail 3)
    if args.resume:
        agent.load_state_dict(checkpoint["agent"])
        agent.adam.load_state_dict(checkpoint["optimizer"])
        past.load_state_dict(checkpoint["past"])
        envs.load_state_dict(checkpoint["envs"])
    run = Run(args, checkpoint)
    run.bar.write(f"{args.env_id} on {device}, {args.num_iterations} iterations, in {run.folder}")
    stop, status = [], "failed"

    def handler(number, frame):  # ends training after this iteration; the next signal acts at once
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    signals = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)}
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        save(run, agent, past, envs)
        while run.iteration < args.num_iterations and not stop:
            remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
            learning_rate = remaining * args.learning_rate  # annealed (detail 4)
            data = rollout(agent, envs, run, args)
            metrics = update(agent, data, run.iteration, learning_rate, args)
            for name, x in ({"rewards": data.rewards} | metrics | agent.state_dict()).items():
                if not torch.as_tensor(x).isfinite().all():
                    raise FloatingPointError(f"iteration {run.iteration}: {name} is not finite")
            if (run.iteration + 1) % args.eval_interval == 0:
                seed = episode_seed(args.seed, 2**31, run.iteration)
                metrics |= win_rate(play([agent, past], args, seed))
                past.load_state_dict(agent.state_dict())
            run.log(metrics | {"charts/learning_rate": learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent, past, envs)
        save(run, agent, past, envs)
        status = "running" if run.iteration < args.num_iterations else "finished"
    finally:
        for log in (run.bar, run.writer, run.csv):
            log.close()
        final = run.write_json(status)
        for number, old in before.items():
            signal.signal(number, old)
    script, folder = f"python {shlex.quote(sys.argv[0])}", shlex.quote(str(run.folder))
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
