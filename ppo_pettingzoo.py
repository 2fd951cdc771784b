# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium>=1.1,<2", "pettingzoo>=1.27,<1.28", "mpe2>=1.1",
#                 "pygame-ce", "numpy", "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for several agents with shared parameters (PettingZoo), in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked where it is. Every agent is played by one network
that sees the agent's own observation and its number (IPPO: de Witt et al. 2020). Every iteration:

    1. take T steps in each of N environments of A agents with actions a ~ pi(a | o)
    2. A = GAE(lambda), for each agent by its own end: its death ends its chain, a time limit
       bootstraps from the value of the true last observation; rows of the dead, of those who wait
       for their turn, and the row after an episode's end are never learned from
    3. for K epochs or until KL > target_kl, for each minibatch, with A normalised, r = pi / pi_old:
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_pettingzoo.py --env-id mpe2.simple_speaker_listener_v4   # or sisl/multiwalker_v9
    python ppo_pettingzoo.py --env-id mpe2.simple_spread_v3 --team-reward --critic concatenated \
        --num-envs 128 --num-steps 25 --num-minibatches 1 --update-epochs 10         # MAPPO
    python ppo_pettingzoo.py --evaluate runs/RUN    # --resume runs/RUN goes on

Expect a team return of -35 on the first after 200,000 steps, in 4 minutes on one core (random: -81).
Left out on purpose: recurrent policies, a network for each agent, opponents from the past, images.
"""

import importlib
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import time
import warnings
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# packages whose modules a run's folder may name; others are imported if the command line names them
KNOWN = ("mpe2", "pettingzoo", "magent2", "lbforaging", "rware")


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
    evaluate: Path | None = None  # play the run in this folder, drawn and greedily, and exit
    eval_greedy: bool = False  # of these, --evaluate lists the greedy episodes, not the drawn ones
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = (
        "mpe2.simple_speaker_listener_v4"  # a module, NAMESPACE/NAME, module:function, ...
    )
    env_kwargs: str = "{}"  # arguments of the environment, as JSON
    max_episode_steps: int | None = None  # truncate episodes after that many steps
    total_timesteps: int = 500_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 1e-3  # Adam's, in the first iteration
    num_envs: int = 16  # environments played side by side
    num_steps: int = 128  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient over all parameters
    target_kl: float | None = None  # no further epoch once the mean approx_kl of one exceeds it
    log_std_init: float = 0.0  # Box actions: initial log standard deviation, in half boxes
    agent_id: bool = True  # each agent sees its number, one-hot; no: with many that are alike
    action_masks: bool = True  # actions that an environment names invalid have probability 0
    critic: Literal["local", "concatenated", "state"] = "local"  # sees what the agent, all, env see
    team_reward: bool = False  # each agent's reward is the sum of all; its death ends no return
    value_norm: bool | None = None  # scale returns; default: with a team reward or central critic
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute what is computed; a ValueError, which tyro shows, for what can't be meant."""
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "log_std_init": -9, "minibatch_size": 4}
        high = {"gamma": 1, "gae_lambda": 1, "log_std_init": 9}
        for name, value in vars(self).items():
            least, most = low.get(name, int(type(value) is int)), high.get(name, 1e18)
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value}: not in {least} ... {most}")
        if self.resume and (self.run_dir or self.evaluate):
            raise ValueError("--resume goes on in its folder: not with --run-dir or --evaluate")
        if self.value_norm is None:
            self.value_norm = self.team_reward or self.critic != "local"
        if not isinstance(json.loads(self.env_kwargs), dict):
            raise ValueError(f"--env-kwargs {self.env_kwargs}: not a JSON object")


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
class Gymnasium:
    """A gymnasium environment of one agent or, with Tuple spaces, of several, as PettingZoo's
    parallel ones. Those of several are made anew for each episode: lbforaging needs it to repeat."""

    def __init__(self, make):
        self.make, self.env = make, make()
        self.several = isinstance(self.env.action_space, gym.spaces.Tuple)
        count = len(self.env.action_space) if self.several else 1
        self.possible_agents = [f"agent_{i}" for i in range(count)]
        self.observation_space = self.each(self.env.observation_space).get
        self.action_space = self.each(self.env.action_space).get

    def each(self, values) -> dict:
        """What is given for the agents in turn, by their names."""
        values = values if self.several else [values]
        return dict(zip(self.possible_agents, values, strict=True))

    def reset(self, seed: int):
        if self.several:
            self.env.close()
            self.env = self.make()
        obs, info = self.env.reset(seed=seed)
        self.agents = self.possible_agents
        return self.each(obs), dict.fromkeys(self.agents, info)

    def step(self, actions: dict):
        choices = tuple(actions.values())
        choices = choices if self.several else choices[0]
        obs, rewards, terminated, truncated, info = self.env.step(choices)
        if terminated or truncated:
            self.agents = []
        shared = [dict.fromkeys(actions, x) for x in (terminated, truncated, info)]
        return self.each(obs), self.each(rewards), *shared

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()


def make_env(env_id: str, **options):
    """An environment in PettingZoo's parallel form; one clear line if there is no such thing.

    `env_id` is a module (mpe2.simple_spread_v3), a name that PettingZoo (sisl/pursuit_v5) or
    gymnasium (lbforaging:Foraging-8x8-2p-2f-coop-v3) knows, or your own module:function, which
    returns an environment of either. Turn-based ones (AEC) are converted."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # for pygame without a display
    gym.logger.min_level = gym.logger.ERROR
    module, _, name = env_id.rpartition(":")
    try:
        import pettingzoo
        from pettingzoo.utils.conversions import turn_based_aec_to_parallel

        make = partial(gym.make, env_id, disable_env_checker=True)
        if module and hasattr(importlib.import_module(module), name):
            make = getattr(importlib.import_module(module), name)
        elif "/" in name and not module:
            known = [spec.id for spec in pettingzoo.parallel_registry.values()]
            kind = "parallel" if name.replace("_v", "-v") in known else "aec"
            make = partial(pettingzoo.make, kind, name)
        elif "." in name and not module:
            found = importlib.import_module(name)
            make = getattr(found, "parallel_env", None) or found.env
        env = make(**options)
        if isinstance(env, pettingzoo.AECEnv):
            env = turn_based_aec_to_parallel(env)
        elif isinstance(env, gym.Env):
            env = Gymnasium(partial(make, **options))
    except Exception as error:  # whatever other people's code raises
        fail(f"--env-id {env_id}: {type(error).__name__}: {error}")
    if not hasattr(env, "possible_agents"):
        fail(f"--env-id {env_id}: no possible_agents: who may come must be known from the start")
    return env


def branches(space: gym.Space) -> list[int]:
    """How many choices each branch of an action has; for a Box, how many dimensions."""
    if isinstance(space, gym.spaces.Box):
        return [math.prod(space.shape)]
    # a Discrete space is one branch, a MultiBinary n of two
    sizes = getattr(space, "nvec", np.full(space.shape, 2 if space.shape else space.n))
    return np.ravel(sizes).tolist()


class Roles:
    """What each of A agents sees and does, padded to one shape: D numbers and C choices (or, of
    Boxes, dimensions) are the most that one has."""

    def __init__(self, env, args: Args):
        self.args, self.names = args, list(env.possible_agents)
        self.seen = [env.observation_space(name) for name in self.names]
        self.done = [env.action_space(name) for name in self.names]
        for i, (seen, done) in enumerate(zip(self.seen, self.done, strict=True)):
            parts = getattr(seen, "spaces", {})
            self.seen[i] = parts["observation"] if "action_mask" in parts else seen
            said = f"--env-id {args.env_id}: {self.names[i]} sees {seen}, does {done}:"
            if not self.seen[i].is_np_flattenable or "Dict" in str(self.seen[i]):
                fail(f"{said} a vector is wanted, or a Dict of observation and action_mask")
            if gym.spaces.flatdim(self.seen[i]) > 20_000:
                fail(f"{said} above 20,000 numbers; shrink them in your own module:function")
            if not (hasattr(done, "n") or hasattr(done, "nvec") or done.dtype.kind == "f"):
                fail(f"{said} choices are wanted, or a Box of real numbers")
        sizes = [branches(space) for space in self.done]
        kinds = {isinstance(space, gym.spaces.Box) for space in self.done}
        if len(kinds) > 1 or len({len(own) for own in sizes}) > 1:
            fail(f"--env-id {args.env_id}: {self.done}: all Box, or all with as many branches")
        self.boxes = kinds == {True}
        self.dim = max(gym.spaces.flatdim(space) for space in self.seen)  # D
        self.choices = np.max(sizes, axis=0).tolist()  # of each branch; C in all
        has = [[np.arange(n) < k for n, k in zip(self.choices, own, strict=True)] for own in sizes]
        self.has = np.array([np.hstack(parts) for parts in has])  # [A, C]
        A = len(self.names)
        self.ids = np.eye(A)[:, : A if args.agent_id and A > 1 else 0]  # one-hot numbers
        self.state_size = 0
        if args.critic == "state":
            env.reset(seed=0)
            self.state_size = len(self.state(env))

    def state(self, env) -> np.ndarray:
        """What the environment says of itself [S]."""
        try:
            return np.ravel(env.state())
        except Exception as error:
            fail(f"--critic state: {self.args.env_id} gives none: {type(error).__name__}: {error}")

    def row(self, i: int, observation, info: dict) -> np.ndarray:
        """Agent i's observation [D], its number [A or 0] and the mask of its choices [C]."""
        mask = info.get("action_mask", info.get("legal_action_mask"))
        if isinstance(observation, dict):
            observation, mask = observation["observation"], observation["action_mask"]
        flat, valid = gym.spaces.flatten(self.seen[i], observation), self.has[i].copy()
        if mask is not None and self.args.action_masks:
            mask = np.hstack(mask)
            if len(mask) != valid.sum():
                fail(f"the action_mask of {self.names[i]} has {len(mask)} of {valid.sum()} choices")
            valid[valid] = mask
        padding = np.zeros(self.dim - len(flat))
        return np.concatenate([flat, padding, self.ids[i], valid], dtype=np.float32)

    def action(self, i: int, action: np.ndarray):
        """Agent i's action [B], as its environment wants it: choices from its first one on, or
        numbers scaled from -1 ... 1 to the Box, if it has bounds, and clipped to it."""
        space = self.done[i]
        if not self.boxes:
            action = action.reshape(space.shape) + getattr(space, "start", 0)
            return action.astype(space.dtype)[()]
        action = action[: math.prod(space.shape)].reshape(space.shape).astype(np.float64)
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        scaled = np.where(bounded, (low + high) / 2 + (high - low) / 2 * action, action)
        return np.clip(scaled, low, high).astype(space.dtype)


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Episodes:
    """Seeds every episode, and keeps the actions of the running one to play it again on resuming.
    `obs` [A, W] has a row for each possible agent: its observation, number and mask (`Roles.row`),
    whether it is there, whether it waits for its turn, and the state [S]. The mask of who can't act
    is zero: of the dead, of who waits, and of all after the last step.
    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0."""

    def __init__(self, env, args: Args, index: int):
        self.env, self.args, self.index, self.episode = env, args, index, -1
        self.roles = Roles(env, args)
        self.turns = type(env).__name__ == "turn_based_aec_to_parallel_wrapper"

    def reset(self):
        self.episode += 1
        self.over, self.length, self.deaths = False, 0, 0
        self.actions, self.returns = [], np.zeros(len(self.roles.names))
        seed = episode_seed(self.args.seed, self.index, self.episode)
        observations, infos = self.env.reset(seed=seed)
        self.obs = self.rows(observations, infos, self.env.agents)
        return self.obs

    def rows(self, observations: dict, infos: dict, living) -> np.ndarray:
        """The rows [A, W] of these observations; a mask is kept of who lives and has a choice."""
        roles = self.roles
        n, C = roles.dim + roles.ids.shape[1], sum(roles.choices)
        rows = np.zeros((len(roles.names), n + C + 2 + roles.state_size), np.float32)
        rows[:, roles.dim : n] = roles.ids
        for i, name in enumerate(roles.names):
            if name in observations:
                rows[i, : n + C] = roles.row(i, observations[name], infos.get(name, {}))
                rows[i, n + C] = 1.0
                waits = self.turns and name != self.env.aec_env.agent_selection
                if name not in living or waits:
                    rows[i, n : n + C] = 0.0
                rows[i, n + C + 1] = name in living and not rows[i, n : n + C].any()
        if roles.state_size:
            rows[:, n + C + 2 :] = roles.state(self.env)
        return rows

    def step(self, actions: np.ndarray):
        """Take actions [A, B]: rows [A, W], rewards, terminated, truncated [A]."""
        names, args = self.roles.names, self.args
        if self.over:
            zeros = np.zeros(len(names))
            return self.reset(), zeros, zeros > 0, zeros > 0
        acting = {}
        for i, name in enumerate(names):
            if name in self.env.agents:
                acting[name] = self.roles.action(i, actions[i])
        observations, rewards, terminated, truncated, infos = self.env.step(acting)
        if unknown := rewards.keys() - set(names):
            fail(f"--env-id {args.env_id}: rewards for {unknown}, who are no possible_agents")
        self.actions.append(actions)
        self.length += 1
        for name in acting.keys() - set(self.env.agents):
            if not terminated.get(name) and not truncated.get(name):
                warnings.warn(f"{name} left without an end: taken for terminated", stacklevel=1)
                terminated = terminated | {name: True}
        limit = self.length == args.max_episode_steps
        dies = np.array([name in acting and bool(terminated.get(name)) for name in names])
        stops = np.array([name in acting and bool(truncated.get(name) or limit) for name in names])
        ended = {name for name in names if terminated.get(name) or truncated.get(name) or limit}
        living = set(self.env.agents) - ended
        self.over = not living
        if not self.over:
            self.deaths += int(dies.sum())
        dead = {name for name, dead in zip(names, dies, strict=True) if dead}
        there = {name: x for name, x in observations.items() if name not in dead}
        self.obs = self.rows(there, infos, living)
        rewards = np.array([np.asarray(rewards.get(name, 0.0)).item() for name in names])
        self.returns = self.returns + rewards
        if args.team_reward:  # one reward for all, and one end
            rewards = np.full(len(names), rewards.sum())
            cut = self.over and bool((stops & ~dies).any())
            dies = np.full(len(names), self.over and not cut)
            stops = np.full(len(names), cut)
        return self.obs, rewards, dies, stops

    def close(self):
        self.env.close()


class Envs:
    """`--num-envs` environments in this process, stepped one after the other."""

    def __init__(self, args: Args, checkpoint: dict):
        options = json.loads(args.env_kwargs)
        made = [make_env(args.env_id, **options) for _ in range(args.num_envs)]
        self.envs = [Episodes(env, args, i) for i, env in enumerate(made)]
        for i, env in enumerate(self.envs):  # on resuming, the running episodes are played again
            episode, actions = checkpoint["played"][i] if checkpoint else (0, [])
            env.episode += episode
            env.reset()
            for action in actions:
                env.step(action.numpy())
        self.env, self.ended = self.envs[0].env, []
        self.obs = np.stack([env.obs for env in self.envs])  # [N, A, W]
        self.over = np.array([env.over for env in self.envs])  # [N]

    def step(self, actions: np.ndarray):
        """Take actions [N, A, B]: rewards, terminated, truncated [N, A]."""
        self.ended, results = [], []
        for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            before = env.over
            self.obs[i], *rest = env.step(action)
            results.append(rest)
            self.over[i] = env.over
            if env.over and not before:
                self.ended.append((i, env.returns, env.length, env.deaths))
        return [np.stack(x) for x in zip(*results, strict=True)]

    def played(self) -> list:
        """The running episodes' numbers and actions."""
        return [(env.episode, torch.tensor(np.array(env.actions))) for env in self.envs]

    def close(self):
        for env in self.envs:
            env.close()


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


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two layers of 64 tanh units and a linear one; orthogonal weights, no bias (detail 2)."""
    layers = []
    for sizes, scale in (((inputs, 64), 2**0.5), ((64, 64), 2**0.5), ((64, outputs), gain)):
        layers += [nn.Linear(*sizes), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight, scale)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """Policy and value function, shared by all agents of an environment like `env` (make_env)."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        self.args = args or Args()
        self.roles = Roles(env, self.args)
        agents, ids = self.roles.ids.shape
        self.choices, self.width = self.roles.choices, sum(self.roles.choices)  # C
        self.dim = self.roles.dim + ids
        inputs = {
            "local": self.dim,
            "concatenated": agents * (self.roles.dim + 1) + ids,
            "state": self.roles.state_size + self.dim,
        }
        self.critic = mlp(inputs[self.args.critic], 1, gain=1.0)  # two networks (detail 13)
        self.actor = mlp(self.dim, self.width, gain=0.01)
        if self.roles.boxes:  # a deviation for each dimension, the same in every state
            self.actor_logstd = nn.Parameter(torch.full((self.width,), self.args.log_std_init))
        self.value_moments = RunningMoments()
        self.rng = np.random.default_rng(self.args.seed)  # of actions and minibatches

    def inputs(self, obs: torch.Tensor) -> torch.Tensor:
        """Of all rows of environments [..., A, W], what the agent is given: [..., A, dim + C] and,
        if the critic is central, what that one sees behind it."""
        own, there = obs[..., : self.dim + self.width], obs[..., self.dim + self.width]
        if self.args.critic == "local":
            return own
        if self.args.critic == "state":
            return torch.cat([own, obs[..., self.dim + self.width + 2 :], obs[..., : self.dim]], -1)
        seen = obs[..., : self.roles.dim].flatten(-2)
        joint = torch.cat([seen, there], dim=-1).unsqueeze(-2).expand(*obs.shape[:-1], -1)
        return torch.cat([own, joint, obs[..., self.roles.dim : self.dim]], dim=-1)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [...] at `inputs`, in the critic's unit: with --value-norm a deviation of returns."""
        central = self.args.critic != "local"
        seen = obs[..., self.dim + self.width :] if central else obs[..., : self.dim]
        return self.critic(seen).squeeze(-1)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [...] at `inputs` [..., dim + C + ...]."""
        if not self.args.value_norm:
            return self.value(obs)
        mean, std = self.value_moments.mean, (self.value_moments.var + 1e-8).sqrt()
        return self.value(obs) * std.float() + mean.float()

    def scores(self, obs: torch.Tensor) -> torch.Tensor:
        """Of choices logits [..., C], of Boxes means, at rows [..., W] or `inputs`."""
        scores = self.actor(obs[..., : self.dim])
        valid = obs[..., self.dim : self.dim + self.width] > 0
        return scores if self.roles.boxes else scores.where(valid, -1e8)

    def pick(self, scores: torch.Tensor, noise: torch.Tensor | float) -> torch.Tensor:
        """Actions [..., B]: a sample, if it is `noise` that is given, or else the likeliest."""
        if self.roles.boxes:
            return scores + self.actor_logstd.exp() * noise
        parts = (scores + noise).split(self.choices, dim=-1)
        return torch.stack([part.argmax(dim=-1) for part in parts], dim=-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [M, B] (sampled unless given), its log-probability [M], entropy [M], and value [M]
        in the critic's unit, at `inputs` [M, dim + C + ...]. Choices in B branches, or independent
        numbers, whose log-probabilities add up; what an agent lacks has none."""
        scores = self.scores(obs)
        if action is None:
            action = self.pick(scores, torch.as_tensor(self.noise(*scores.shape[:-1])).to(scores))
        if self.roles.boxes:
            normal = torch.distributions.Normal(scores, self.actor_logstd.exp())
            has = obs[..., self.dim : self.dim + self.width]
            logprob = (normal.log_prob(action) * has).sum(dim=-1)
            return action, logprob, (normal.entropy() * has).sum(dim=-1), self.value(obs)
        logprobs = [part.log_softmax(-1) for part in scores.split(self.choices, dim=-1)]
        choices = zip(logprobs, action.split(1, dim=-1), strict=True)
        logprob = sum(part.gather(-1, choice).squeeze(-1) for part, choice in choices)
        entropy = sum(-(part.exp() * part).sum(dim=-1) for part in logprobs)
        return action, logprob, entropy, self.value(obs)

    forward = get_action_and_value

    @torch.no_grad()
    def act_rows(self, rows: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions [M, B], as the network gives them, at rows [M, W]; see `act`."""
        scores = self.scores(torch.as_tensor(rows, device=self.actor[0].weight.device))
        noise = torch.as_tensor(0.0 if noise is None else noise).to(scores)
        return self.pick(scores, noise).cpu().numpy()

    def act(self, observations: dict, noise: np.ndarray | None = None, infos: dict | None = None):
        """By name the likeliest (mean) action of each agent or, given `noise(len(observations))`,
        samples: from observations (and infos) by name as PettingZoo gives them, of one or more."""
        names, infos = list(observations), infos or {}
        numbers = [self.roles.names.index(name) for name in names]
        pairs = zip(numbers, names, strict=True)
        rows = [self.roles.row(i, observations[name], infos.get(name, {})) for i, name in pairs]
        found = zip(numbers, self.act_rows(np.stack(rows), noise), strict=True)
        actions = [self.roles.action(i, action) for i, action in found]
        return dict(zip(names, actions, strict=True))

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions. Gumbel's, for choices: the argmax of it and log-probabilities
        is a sample."""
        draw = self.rng.standard_normal if self.roles.boxes else self.rng.gumbel
        return draw(size=(*shape, self.width)).astype(np.float32)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma, gae_lambda, idle=None) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values [T + 1, ...].

    Where an agent waits for its turn, idle [T + 1, ...], its last action gets what came of it: the
    rewards, undiscounted, the end, and the value and the advantage of its next action."""
    rewards, values, terminated = rewards.copy(), values.copy(), terminated.copy()
    ended = np.logical_or(terminated, truncated)
    idle = np.zeros(values.shape, bool) if idle is None else idle
    for t in range(1, len(values)):  # what comes after the last row is not known
        values[t] = np.where(idle[t], values[t - 1], values[t])
    advantages = np.zeros_like(values)
    for t in reversed(range(len(rewards))):
        following = gamma * np.where(terminated[t], 0.0, values[t + 1])
        following += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
        advantages[t] = np.where(idle[t], advantages[t + 1], rewards[t] + following - values[t])
        values[t] = np.where(idle[t], values[t + 1], values[t])
        if t > 0:
            rewards[t - 1] += np.where(idle[t], rewards[t], 0.0)
            terminated[t - 1] |= idle[t] & terminated[t]
            ended[t - 1] |= idle[t] & ended[t]
    return advantages[:-1]


# obs [T + 1, N, A, W] as Envs gives them, idle [T + 1, N, A], actions [T, N, A, B], the rest
# [T, N, A]. valid: the agent lived and acted; running: its environment was not in the row after an
# episode's end, whose action was ignored, whose reward is none, whose obs are the true last ones
Rollout = namedtuple("Rollout", "obs actions rewards terminated truncated valid running idle")


def ppo_loss(agent, args, obs, actions, old_logprobs, advantages, returns, old_values, acts):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and what is
    logged of it. Old is what policy and value function gave before the update. The policy learns
    from rows whose `acts` is 1, the value function from all."""
    _, logprob, entropy, value = agent(obs, actions)
    logratio = logprob - old_logprobs
    ratio = logratio.exp()

    def mean(x):
        return (x * acts).sum() / acts.sum().clamp(min=1.0)

    if args.norm_adv:  # per minibatch (detail 7)
        centred = advantages - mean(advantages)
        variance = (centred.square() * acts).sum() / (acts.sum() - 1.0).clamp(min=1.0)
        advantages = centred / (variance.sqrt() + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -mean(torch.min(ratio * advantages, clipped * advantages))

    error = (value - returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        near = old_values + (value - old_values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (near - returns).square())
    value_loss = 0.5 * error.mean()

    entropy = mean(entropy)  # its bonus encourages exploration (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -mean(logratio), "approx_kl": mean(ratio - 1.0 - logratio)}
    return loss, metrics | {"clipfrac": mean(((ratio - 1.0).abs() > args.clip_coef).float())}


def update(agent: Agent, data: Rollout, learning_rate: float, args: Args):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    device = agent.actor[0].weight.device
    obs, actions = (torch.as_tensor(x, device=device) for x in (data.obs, data.actions))
    obs = agent.inputs(obs)
    values = agent.get_value(obs).detach()
    _, logprobs, _, old_values = (x.detach() for x in agent(obs[:-1], actions))
    ends = data.terminated, data.truncated, args.gamma, args.gae_lambda, data.idle
    advantages = gae(data.rewards, values.cpu().double().numpy(), *ends)  # detail 5
    advantages = torch.tensor(advantages).to(values)
    returns = advantages + values[:-1]
    # a team's return goes on after a death, and so does the value of it
    learned = data.running if args.team_reward else data.valid
    if args.value_norm:
        agent.value_moments.update(returns.cpu().numpy()[learned])
        std = (agent.value_moments.var + 1e-8).sqrt()
        returns = ((returns - agent.value_moments.mean) / std).float()
    acts = torch.as_tensor(data.valid, device=device).float()
    fields = obs[:-1], actions, logprobs, advantages, returns, old_values, acts
    batch = [x.flatten(0, 2) for x in fields]  # [T * N * A, ...]

    rows, steps = np.flatnonzero(learned), []  # what is learned from; metrics of each step
    agent.adam.param_groups[0]["lr"] = learning_rate
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(rows), device=device)
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
    returns, old_values = batch[4][rows], batch[5][rows]
    unexplained = (returns - old_values).var() / returns.var().clamp(min=1e-12)
    metrics = {f"losses/{name}": mean for name, mean in zip(metrics, means, strict=True)}
    return metrics | {"losses/explained_variance": 1.0 - unexplained.item()}


# --- rollout --------------------------------------------------------------------------------------
def rollout(agent: Agent, envs: Envs, run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1)."""
    T, (N, A, W) = args.num_steps, envs.obs.shape
    obs, actions = np.zeros((T + 1, N, A, W), np.float32), []
    rewards = np.zeros((T, N, A))
    terminated = np.zeros((T, N, A), bool)
    truncated = np.zeros((T, N, A), bool)
    running = np.zeros((T, N, A), bool)
    noise = agent.noise(T, N, A)
    for t in range(T):
        obs[t] = envs.obs
        running[t] = ~envs.over[:, None]
        run.global_step += int((~envs.over).sum())
        choice = agent.act_rows(obs[t].reshape(N * A, W), noise[t].reshape(N * A, -1))
        actions.append(choice.reshape(N, A, -1))
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t])
        for _, returns, length, deaths in envs.ended:
            run.log_episode(run.global_step, returns, length, deaths)
    obs[T] = envs.obs
    valid = obs[:-1, ..., agent.dim : agent.dim + agent.width].any(axis=-1)
    idle = obs[..., agent.dim + agent.width + 1] > 0
    run.agent_steps += int(valid.sum())
    actions = np.stack(actions)
    return Rollout(obs, actions, rewards, terminated, truncated, valid, running, idle)


# --- run folder, checkpoints, evaluation ----------------------------------------------------------
class Run:
    """A run's folder, its logs and its counters."""

    def __init__(self, args: Args, checkpoint: dict, names: list[str]):
        env_id = args.env_id.replace("/", "-")
        name = f"{env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
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
        self.agent_steps = checkpoint.get("agent_steps", 0)
        # agents that are many are logged by the mean of those that differ only by their number
        self.labels = [n if len(names) <= 8 else n.rstrip("0123456789").rstrip("_") for n in names]
        self.start = time.monotonic() - seconds
        # what was logged after the checkpoint goes: it will be logged again
        self.writer = SummaryWriter(str(self.folder), purge_step=self.global_step + 1)
        self.csv = open(self.folder / "episodes.csv", "a", buffering=1)  # noqa: SIM115
        self.csv.truncate(self.csv.seek(min(size, self.csv.tell())))
        if self.csv.tell() == 0:
            self.csv.write("global_step,seconds,return,length\n")
        self.bar = tqdm(total=args.total_timesteps, unit="step", disable=None)
        self.write_json("running")

    def log_episode(self, step: int, returns: np.ndarray, length: int, deaths: int):
        """An episode with each agent's return [A]: its score is their mean."""
        mean, seconds = returns.mean(), time.monotonic() - self.start
        self.csv.write(f"{step},{seconds:.2f},{mean},{length}\n")
        numbers = {"episodic_return": mean, "team_return": returns.sum()}
        numbers |= {"episodic_length": length, "deaths": deaths}
        for label in dict.fromkeys(self.labels):
            own = [x for name, x in zip(self.labels, returns, strict=True) if name == label]
            numbers[f"return/{label}"] = np.mean(own)
        for name, number in numbers.items():
            self.writer.add_scalar(f"charts/{name}", number, step)
        self.bar.write(f"global_step={step}, episodic_return={mean:.4f}")

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


def save(run: Run, agent: Agent, envs: Envs):
    """Everything needed to continue, whole or not at all: written aside, then renamed."""
    run.writer.flush()
    state = {"args": vars(run.args), "agent": agent.state_dict(), "adam": agent.adam.state_dict()}
    state |= {"rng": agent.rng.bit_generator.state, "played": envs.played()}
    state["counters"] = run.global_step, run.iteration, time.monotonic() - run.start, run.csv.tell()
    state["agent_steps"] = run.agent_steps
    torch.save(state, run.folder / "checkpoint.pt.tmp")
    (run.folder / "checkpoint.pt.tmp").replace(run.folder / "checkpoint.pt")


def load_checkpoint(folder: Path) -> dict:
    """What `save` wrote; runs no code, whoever wrote it."""
    try:
        content = torch.load(Path(folder) / "checkpoint.pt", map_location="cpu", weights_only=True)
        args = Args(**content["args"])
    except Exception as error:  # damage shows in many ways
        fail(f"{folder}: no checkpoint.pt that can be read: {error!r}")
    if args.env_id.replace(":", ".").split(".")[0] not in KNOWN:
        args.env_id = args.env_id.split(":")[-1].split(".")[
            -1
        ]  # else code runs only if it is named
    return content | {"args": args}


def load(folder: Path, env=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args = checkpoint["args"]
    agent = Agent(env or make_env(args.env_id, **json.loads(args.env_kwargs)), args)
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        fail(f"{folder}: its agent does not fit the environment: {error}")
    return agent, args


def play(agent: Agent, env, args: Args, greedy: bool) -> tuple[np.ndarray, list]:
    """Returns [episodes, A] of greedy or drawn actions, always of the same episodes; and the first
    one's frames, with `capture_video`."""
    episodes = Episodes(env, replace(args, seed=episode_seed(args.seed, 2**31)), 0)
    returns, frames = [], []
    for episode in range(args.eval_episodes):
        episodes.reset()
        while not episodes.over:
            noise = None if greedy else agent.noise(len(episodes.obs))
            episodes.step(agent.act_rows(episodes.obs, noise))
            if episode == 0 and args.capture_video:
                frames.append(env.render())
            if episodes.length > 100_000:
                fail(f"{args.env_id}: 100,000 steps, no end: --max-episode-steps N ends it")
        returns.append(episodes.returns)
    return np.array(returns), frames


def evaluate(args: Args) -> list[float]:
    """Play the run in `args.evaluate` drawn and greedily, and list the drawn (or greedy) episodes;
    `capture_video` records the first one into its videos/."""
    options = json.loads(args.env_kwargs)
    if args.capture_video:
        options["render_mode"] = "rgb_array"
    env = make_env(args.env_id, **options)
    agent, _ = load(args.evaluate, env)
    played = {greedy: play(agent, env, args, greedy) for greedy in (False, True)}
    env.close()
    listed, frames = played[args.eval_greedy]
    for episode, returns in enumerate(listed):
        score = f"episodic_return={returns.mean():.2f} team_return={returns.sum():.2f}"
        print(f"eval_episode={episode}, {score}", flush=True)
    if frames:
        from gymnasium.utils.save_video import save_video

        save_video(frames, str(args.evaluate / "videos"), lambda _: True, fps=15)
    for greedy, (returns, _) in played.items():
        mean, team = returns.mean(axis=1), returns.sum(axis=1)
        said = f"mean over agents {mean.mean():.2f} +- {mean.std():.2f}"
        said += f", sum over agents {team.mean():.2f} +- {team.std():.2f}"
        print(f"{'greedy' if greedy else 'drawn'}, {len(returns)} episodes: {said}")
    return listed.mean(axis=1).tolist()


# --- training -------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    envs = Envs(args, checkpoint)
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = load(args.resume, envs.env)[0] if args.resume else Agent(envs.env, args)
    agent.adam = torch.optim.Adam(agent.to(device).parameters(), eps=1e-5, fused=True)  # (detail 3)
    if args.resume:
        agent.adam.load_state_dict(checkpoint["adam"])
    agent.rng.bit_generator.state = checkpoint.get("rng", agent.rng.bit_generator.state)
    run = Run(args, checkpoint, agent.roles.names)
    run.bar.write(f"{args.env_id} on {device}, {args.num_iterations} iterations, in {run.folder}")
    stop, status = [], "failed"

    def handler(number, frame):  # ends training after this iteration; the next signal acts at once
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"\nstopping after this iteration\n")

    signals = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGTERM)}
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        save(run, agent, envs)
        while run.iteration < args.num_iterations and not stop:
            remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
            learning_rate = remaining * args.learning_rate  # annealed (detail 4)
            data = rollout(agent, envs, run, args)
            metrics = update(agent, data, learning_rate, args)
            checked = {"observations": data.obs, "rewards": data.rewards} | metrics
            for name, x in (checked | agent.state_dict()).items():
                if not torch.as_tensor(x).isfinite().all():
                    raise FloatingPointError(f"iteration {run.iteration}: {name} is not finite")
            metrics["charts/agent_steps"] = run.agent_steps
            run.log(metrics | {"charts/learning_rate": learning_rate})
            if run.iteration % args.checkpoint_interval == 0:
                save(run, agent, envs)
        save(run, agent, envs)
        status = "running" if run.iteration < args.num_iterations else "finished"
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
