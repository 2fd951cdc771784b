# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy", "tensorboard",
#     "tqdm", "tyro>=0.9",
# ]
# ///
"""PPO with an adaptive KL penalty and GAE, in one file.

Coady 2017, "AI Gym Workout", after Schulman et al. 2017 (https://arxiv.org/abs/1707.06347, section
4) and Heess et al. 2017 (https://arxiv.org/abs/1707.02286). Not OpenAI baselines' PPO1 or PPO2:
those are both clipped, as ppo.py and ppo_continuous_action.py are. Each iteration:

    1. play b whole episodes with a ~ N(mu(s, t), sigma^2), or a categorical of logits(s, t)
    2. A = GAE(lambda) with the value function as it is, normalized; R = Monte-Carlo returns
    3. up to 20 times, on the whole batch, with r = pi(a | s) / pi_old(a | s), D = KL(pi_old || pi):
           minimise  -E[ r A ] + beta D + 50 max(0, D - 2 d)^2       until D > 4 d, d the target
    4. D > 2 d: beta *= 1.5; D < d / 2: beta /= 1.5; at its limits the learning rate moves instead
    5. fit the value function to R of this batch and of the one before

    python ppo_kl_adaptive.py --env-id Hopper-v4                        # train, 1M steps
    python ppo_kl_adaptive.py --env-id HalfCheetah-v4 --episodes-per-batch 5
    python ppo_kl_adaptive.py --env_name Walker2d-v4 -n 25000 -b 20     # the original's flags
    python ppo_kl_adaptive.py --env-id CartPole-v1 --total-timesteps 200000
    python ppo_kl_adaptive.py --resume runs/RUN                         # go on where it stopped
    python ppo_kl_adaptive.py --evaluate runs/RUN --capture-video       # play with the mean action

What adapts, and to what, is --servo; each of its numbers is a flag as well:

    coady          the above
    schulman       the PPO paper's d_targ, 0.01: beta doubles at D > 1.5 d, halves at D < d / 1.5
    fixed          the PPO paper's fixed beta (--beta 0.3, 1, 3, 10)
    learning-rate  that of rl_games and RSL-RL, which also call it adaptive: the clipped loss and no
                   penalty; after every epoch, D > 2 d: rate / 1.5, D < d / 2: rate * 1.5; d = 0.01

Expect 2,600 on Hopper-v4 after 3,000 episodes (1.5M steps), 900 to 2,600 on HalfCheetah-v4 after 1M
steps and 950 on InvertedPendulum-v4 within 700 episodes, in three to five minutes per 1M steps on
one CPU core; one seed of three falls back to 500 on Hopper-v4. Seeds and tables: README.md.

The value after an episode's last step is 0, at a time limit too: policy and value function see the
time. Flags for what departs from the published algorithm are listed apart, and off.
Left out on purpose: pixels, recurrence, several or mixed action branches.
"""

import contextlib
import csv
import dataclasses
import difflib
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def alias(*names: str):
    return tyro.conf.arg(aliases=names)


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: networks, actions, minibatches and each episode's reset"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """use a GPU if there is one (networks this small gain little from it)"""
    num_threads: int = 1
    """CPU threads for torch; more than one rarely pays for networks of this size"""
    compile: bool = False
    """compile the networks with torch.compile: same to rounding; on a CPU it does not pay"""
    track: bool = False
    """also log to Weights and Biases"""
    wandb_project_name: str = "ppo"
    """the wandb project's name"""
    wandb_entity: str | None = None
    """the entity (team) of the wandb project"""
    capture_video: bool = False
    """record the evaluation episodes (after training, or with --evaluate) into RUN/videos"""
    save_model: bool = False
    """also save the weights alone, as RUN/{exp_name}.cleanrl_model"""
    run_dir: Path | None = None
    """the run's folder; default runs/{env_id}__{exp_name}__{seed}__{time}"""
    resume: Path | None = None
    """continue the run in this folder, with its own arguments"""
    evaluate: Path | None = None
    """play episodes with the mean action of the agent saved in this folder, and exit"""
    eval_episodes: int = 10
    """episodes played by --evaluate"""
    checkpoint_interval: int = 10
    """iterations between checkpoints"""

    # Algorithm specific arguments
    env_id: Annotated[str, alias("--env-name")] = "Hopper-v4"
    """the environment: a gymnasium id with Box or Discrete actions, or dm_control/..."""
    env_backend: Literal["gymnasium", "envpool"] = "gymnasium"
    """who steps the environments; envpool in threads, one a core (pip install envpool)"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run; the last iteration may overshoot"""
    num_episodes: Annotated[int, alias("-n")] = 0
    """if given, episodes of the whole run, instead of --total-timesteps"""
    num_envs: int = 1
    """environments played side by side; their whole episodes are pooled"""
    episodes_per_batch: Annotated[int, alias("--batch-size", "-b")] = 20
    """b: episodes per iteration; the original takes 5 where an episode always has 1000 steps"""
    gamma: Annotated[float, alias("-g")] = 0.995
    """discount factor; below 0.999 rewards are scaled by 1 - gamma"""
    gae_lambda: Annotated[float, alias("--lam", "-l")] = 0.98
    """lambda of the generalized advantage estimate"""
    update_epochs: int = 20
    """most passes of the policy over an iteration's batch, one step each"""
    value_epochs: int = 10
    """passes of the value function, in minibatches of 256 to 511"""
    hid1_mult: Annotated[int, alias("-m")] = 10
    """units of the first hidden layers per input; the second has their geometric mean with the
    third, of 10 units per action (policy) or 5 (value function)"""
    policy_logvar: Annotated[float, alias("-v")] = -1.0
    """initial log variance of the actions"""
    learning_rate: float | None = None
    """Adam's for the policy; default 9e-4 / sqrt(units of its second layer)"""
    value_learning_rate: float | None = None
    """Adam's for the value function; default 1e-2 / sqrt(units of its second layer)"""
    minibatch_size: int = 0
    """has no effect: --episodes-per-batch and --num-minibatches set the policy's"""
    num_iterations: int = 0
    """has no effect: --total-timesteps or --num-episodes sets it"""

    # What adapts: a preset, and its numbers
    servo: Literal["coady", "schulman", "fixed", "learning-rate"] = "coady"
    """preset of the numbers below"""
    kl_targ: Annotated[float | None, alias("-k")] = None
    """d: target of KL(old || new) of an iteration; coady 0.003, else 0.01"""
    beta: float | None = None
    """weight of the KL penalty in the first iteration; 1, in learning-rate 0"""
    raise_above: float | None = None
    """beta is raised when the KL ends above this many targets; coady 2, schulman 1.5"""
    raise_factor: float | None = None
    """by this factor; coady 1.5, schulman 2, else 1"""
    lower_below: float | None = None
    """beta is lowered when the KL ends below this many targets; coady 0.5, schulman 1 / 1.5"""
    lower_factor: float | None = None
    """by this factor; coady 1.5, schulman 2, else 1"""
    beta_min: float | None = None
    """lower limit of beta; coady 1 / 35, else 0"""
    beta_max: float | None = None
    """upper limit of beta; coady 35, else 1e9"""
    hinge_coef: float | None = None
    """weight of max(0, KL - 2 targets)^2; coady 50, else 0"""
    early_stop: float | None = None
    """no further pass once the KL exceeds this many targets, 0: never; coady 4, else 0"""
    clip_coef: float | None = None
    """epsilon of the clipped surrogate, 0: unclipped; learning-rate 0.2, else 0"""
    lr_servo: Literal["with-beta", "with-kl", "never"] | None = None
    """the learning rate moves by 1.5: once an iteration, while beta is beyond 30 or 1 / 30 (coady);
    after every pass, by the KL (learning-rate); never"""

    # Departures from the published algorithm, all off
    bootstrap_truncation: bool = False
    """departure: a time limit bootstraps from the value of the last observation, and is not a 0"""
    lambda_returns: bool = False
    """departure: the value function learns advantages + values, not Monte-Carlo returns"""
    num_steps: int = 0
    """departure: if given, an iteration is this many steps in each environment; episodes go on in
    the next one, and where they are cut they bootstrap"""
    num_minibatches: int = 1
    """departure: steps of the policy per pass, on minibatches of nearly equal size"""
    full_value_epochs: bool = False
    """departure: a pass of the value function takes every sample, not as many as the batch has"""
    roll_back: bool = False
    """departure: an early stop also takes the last pass back"""
    ent_coef: float = 0.0
    """departure: weight of an entropy bonus"""
    clip_obs: float = 0.0
    """departure: limit of the scaled observations, 0: none"""
    clip_actions: bool = False
    """departure: actions are clipped to the box for the environment"""
    orthogonal_init: bool = False
    """departure: orthogonal weights, times sqrt(2), in the last layers 0.01 (policy) and 1"""


# What a resumed run may change; every other argument is the run's own.
CHANGEABLE = {
    "cuda", "num_threads", "compile", "track", "wandb_project_name", "wandb_entity",
    "capture_video", "save_model", "run_dir", "resume", "evaluate", "eval_episodes",
    "checkpoint_interval", "total_timesteps", "num_episodes", "minibatch_size", "num_iterations",
}  # fmt: skip
# Fields that CleanRL computes, accepted for its command lines.
NO_EFFECT = {
    "minibatch_size": "--episodes-per-batch and --num-minibatches set the policy's",
    "num_iterations": "--total-timesteps or --num-episodes sets it",
}
# Arguments that need a package of their own.
NEEDS = {"capture_video": "moviepy", "track": "wandb"}
# The least and the greatest value; for others, integers start at 1, floats at 0.
BOUNDS = {
    "seed": (0, 2**63), "gamma": (0, 1), "gae_lambda": (0, 1), "num_episodes": (0, math.inf),
    "num_steps": (0, math.inf), "policy_logvar": (-20, 20), "learning_rate": (1e-9, 1),
    "value_learning_rate": (1e-9, 1), "kl_targ": (1e-9, math.inf), "raise_factor": (1, math.inf),
    "lower_factor": (1, math.inf),
}  # fmt: skip
# What --servo sets where the command line says nothing.
COADY = {
    "kl_targ": 0.003, "beta": 1.0, "raise_above": 2.0, "raise_factor": 1.5, "lower_below": 0.5,
    "lower_factor": 1.5, "beta_min": 1 / 35, "beta_max": 35.0, "hinge_coef": 50.0,
    "early_stop": 4.0, "clip_coef": 0.0, "lr_servo": "with-beta",
}  # fmt: skip
SCHULMAN = {
    "kl_targ": 0.01, "beta": 1.0, "raise_above": 1.5, "raise_factor": 2.0, "lower_below": 1 / 1.5,
    "lower_factor": 2.0, "beta_min": 0.0, "beta_max": 1e9, "hinge_coef": 0.0, "early_stop": 0.0,
    "clip_coef": 0.0, "lr_servo": "never",
}  # fmt: skip
FIXED = SCHULMAN | {"raise_factor": 1.0, "lower_factor": 1.0}
LEARNING_RATE = FIXED | {
    "beta": 0.0, "clip_coef": 0.2, "raise_above": 2.0, "lower_below": 0.5, "lr_servo": "with-kl"
}  # fmt: skip
PRESETS = {
    "coady": COADY, "schulman": SCHULMAN, "fixed": FIXED, "learning-rate": LEARNING_RATE
}  # fmt: skip


def check(args: Args):
    """What the bounds of single arguments can't say; fills in the preset's numbers."""
    for name, value in servo_numbers(args).items():
        setattr(args, name, value)
    if args.num_envs > args.episodes_per_batch and not args.num_steps:
        fail(
            f"--num-envs {args.num_envs}: more than the {args.episodes_per_batch} episodes of an "
            "iteration; lower it or raise --episodes-per-batch"
        )
    batch = args.num_steps * args.num_envs
    if batch and args.num_minibatches > batch:
        fail(f"--num-minibatches {args.num_minibatches}: more than the {batch} steps of a batch")
    if args.num_steps and args.num_episodes:
        fail("--num-episodes counts whole batches of episodes; with --num-steps there are none")
    if args.beta_min > args.beta_max:
        fail(f"--beta-min {args.beta_min:g}: above --beta-max {args.beta_max:g}")


def servo_numbers(args: Args) -> dict[str, float | str]:
    """The numbers of the servo: those given, the others from its preset."""
    given = {name: getattr(args, name) for name in PRESETS[args.servo]}
    return PRESETS[args.servo] | {k: value for k, value in given.items() if value is not None}


def fail(message: str):
    """One line on standard error, exit code 2."""
    print(f"{Path(__file__).name}: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line as Args; with --resume or --evaluate, on top of that run's arguments."""

    def parse(default: Args) -> Args:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                return tyro.cli(Args, args=argv, default=default, description=__doc__)
        except SystemExit as end:
            if not end.code:
                raise
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()]  # tyro's framed text
        rule = next(i for i, line in enumerate(lines) if i and not line.strip("─╰╯"))
        message = " ".join(lines[1:rule])
        if message.startswith("Unrecognized"):
            known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Args)]
            words = [word.replace("_", "-") for word in re.findall(r"--[\w-]+", message)]
            near = [m for word in words for m in difflib.get_close_matches(word, known, n=1)]
            message += f" (near: {', '.join(near) or 'nothing'})"
        fail(f"{message} (see --help)")

    args = parse(Args())
    if args.resume and args.evaluate:
        fail("--resume continues training and --evaluate plays: give one of them")
    if args.resume and args.run_dir:
        fail("--resume goes on in its own folder; --run-dir is for a new run")
    if args.resume or args.evaluate:
        saved = asdict(Args(**load_checkpoint(args.resume or args.evaluate)["args"]))
        args = parse(Args(**saved))
        for name in () if args.evaluate else saved.keys() - CHANGEABLE:
            if getattr(args, name) != saved[name]:
                flag = f"--{name.replace('_', '-')}"
                fail(f"{flag} is {saved[name]} in the run to resume, and can't change in mid-run")
    for name, value in asdict(args).items():
        low, high = BOUNDS.get(name, (int(type(value) is int and name not in NO_EFFECT), math.inf))
        if type(value) in (int, float) and not (low <= value <= high and value < math.inf):
            fail(f"--{name.replace('_', '-')} {value}: must lie between {low:g} and {high:g}")
    for flag, module in NEEDS.items():
        if getattr(args, flag) and importlib.util.find_spec(module) is None:
            fail(f"--{flag.replace('_', '-')} needs {module}: pip install {module}")
    given = [name for name in NO_EFFECT if getattr(args, name)]
    if given:
        lines = (f"--{name.replace('_', '-')} has no effect: {NO_EFFECT[name]}" for name in given)
        print("; ".join(lines))
    check(args)
    return args


# --- environments ---------------------------------------------------------------------------------


def build_env(env_id: str, video_folder: Path | None = None, render: bool = False) -> gym.Env:
    """A gymnasium environment with flat observations; one clear line if there is no such thing."""
    gym.logger.min_level = gym.logger.ERROR  # v4 ids are "out of date", and meant
    if video_folder and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    mode = "rgb_array" if video_folder else "human" if render else None
    if env_id.startswith("dm_control/"):
        if importlib.util.find_spec("shimmy") is None:
            fail(f"--env-id {env_id} needs shimmy: pip install 'shimmy[dm-control]'")
        import shimmy

        gym.register_envs(shimmy)
    try:
        more = {"render_mode": mode} if mode else {}  # not every environment takes the argument
        env = gym.make(env_id, disable_env_checker=True, **more)
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(env_id, gym.registry.keys() - {env_id}, n=3)
        fail(f"--env-id {env_id}: {error} (near: {', '.join(near) or 'nothing'})")
    if video_folder:
        if hasattr(env.unwrapped, "mujoco_renderer"):  # gymnasium's own camera stays behind
            import mujoco

            camera = mujoco.mjtObj.mjOBJ_CAMERA
            track = mujoco.mj_name2id(env.unwrapped.model, camera, "track")
            env.unwrapped.mujoco_renderer.camera_id = track
        env = gym.wrappers.RecordVideo(
            env, str(video_folder), episode_trigger=lambda _: True, disable_logger=True
        )
    space = env.observation_space
    flat = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
    pixels = isinstance(space, gym.spaces.Box) and not flat and space.dtype == np.uint8
    return env if flat or pixels else gym.wrappers.FlattenObservation(env)


LONGEST_EPISODE = 100_000  # steps; where episodes are played to their end, more look endless


def check_length(steps: int, env_id: str):
    """Raise TimeoutError for an episode that does not seem to end."""
    if steps > LONGEST_EPISODE:
        raise TimeoutError(
            f"{env_id}: an episode has not ended after {LONGEST_EPISODE:,} steps; register the "
            "environment with max_episode_steps, or raise LONGEST_EPISODE"
        )


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Episodes(gym.Wrapper):
    """Seeds every episode by (seed, environment, episode) and starts the next one by itself.

    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0.
    A resumed run replays the actions of the episode it was stopped in.
    """

    def __init__(self, env: gym.Env, seed: int, index: int):
        super().__init__(env)
        self.key, self.shape = (seed, index), env.observation_space.shape
        self.episode, self.actions, self.over = -1, [], False

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.episode, self.actions, self.over = self.episode + 1, [], False
        self.reset_seed = episode_seed(*self.key, self.episode) if seed is None else seed
        try:
            obs, info = self.env.reset(seed=self.reset_seed, options=options)
        except Exception as error:
            raise RuntimeError(f"{error!r} {self.where()}") from error
        self.check(obs)
        return obs, info

    def step(self, action):
        if self.over:
            obs, info = self.reset()
            return obs, 0.0, False, False, info
        self.actions.append(action)
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise RuntimeError(f"{error!r} {self.where()}") from error
        self.check(obs, reward)
        self.over = terminated or truncated
        return obs, reward, terminated, truncated, info

    def where(self) -> str:
        """Which episode this is, how it was reset, and its step."""
        place = f"environment {self.key[1]}, episode {self.episode} (seed {self.reset_seed})"
        return f"in step {len(self.actions)} of {place}"

    def check(self, obs, reward: float = 0.0):
        """Stop at what nothing can be learned from."""
        if np.shape(obs) != self.shape:
            raise ValueError(f"an observation {np.shape(obs)}, not {self.shape}, {self.where()}")
        # one number is quicker to look at than all; that it is finite proves that they are
        if not math.isfinite(np.dot(obs, obs)) and not np.isfinite(obs).all():
            raise FloatingPointError(f"an observation is not finite {self.where()}")
        if not math.isfinite(reward):
            raise FloatingPointError(f"a reward is not finite {self.where()}")

    def progress(self) -> tuple[int, list]:
        """The number of this episode and its actions so far."""
        return self.episode, self.actions

    def replay(self, progress: list):
        """Bring the environment to where `progress[index]` was taken; the observation there, None
        if no episode had started."""
        episode, actions = progress[self.key[1]]
        if episode < 0:
            return None
        self.episode = episode - 1
        obs, _ = self.reset()
        for action in actions:
            obs, *_ = self.step(action)
        return obs


class GymnasiumEnvs:
    """`num_envs` gymnasium environments, stepped one after the other in this process."""

    def __init__(self, args: Args, video_folder: Path | None = None):
        self.envs = [
            Episodes(build_env(args.env_id, video_folder), args.seed, i)
            for i in range(args.num_envs)
        ]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self, i: int) -> np.ndarray:
        """Start an episode in environment i; its first observation [D]."""
        return self.envs[i].reset()[0]

    def step(self, ids: np.ndarray, actions: np.ndarray):
        """Take actions [K, ...] in the environments `ids` [K]; returns observations [K, D],
        rewards, terminated, truncated [K]."""
        results = [self.envs[i].step(action) for i, action in zip(ids, actions, strict=True)]
        obs, rewards, terminated, truncated, _ = zip(*results, strict=True)
        return np.array(obs), np.array(rewards), np.array(terminated), np.array(truncated)

    def call(self, method: str, *args) -> tuple:
        return tuple(getattr(env, method)(*args) for env in self.envs)

    def close(self):
        self.call("close")


class EnvPoolEnvs:
    """The same over EnvPool, where the environments `ids` step in parallel threads."""

    def __init__(self, args: Args, first: int = 0):
        gym.logger.min_level = gym.logger.ERROR
        try:
            import envpool
        except ImportError:
            fail("--env-backend envpool: not installed; pip install envpool")
        ids = envpool.list_all_envs()
        if args.env_id not in ids:
            near = difflib.get_close_matches(args.env_id, ids, n=3)
            fail(f"--env-id {args.env_id}: EnvPool has no such id (near: {', '.join(near)})")
        # EnvPool's Humanoid-v4 leaves the contact forces at 0 without post_constraint
        more = {"post_constraint": True} if re.match("Humanoid.*-v4$", args.env_id) else {}
        seeds = [episode_seed(args.seed, i, first) % 2**31 for i in range(args.num_envs)]
        threads = min(args.num_envs, os.cpu_count())
        more |= {"num_envs": args.num_envs, "batch_size": 1, "seed": seeds, "num_threads": threads}
        self.pool = envpool.make(args.env_id, env_type="gymnasium", **more)
        self.single_observation_space = self.pool.observation_space  # EnvPool's is the single one
        self.single_action_space = self.pool.action_space

    def reset(self, i: int) -> np.ndarray:
        """Start an episode in environment i, which goes on with the seed it was made with."""
        return self.pool.reset(np.array([i]))[0][0]

    def step(self, ids: np.ndarray, actions: np.ndarray):
        self.pool.send(actions, ids)
        results = {}
        for _ in ids:
            obs, reward, terminated, truncated, info = self.pool.recv()  # in any order
            results[info["env_id"][0]] = obs[0], reward[0], terminated[0], truncated[0]
        return tuple(np.array(field) for field in zip(*(results[i] for i in ids), strict=True))

    def close(self):
        self.pool.close()


class Envs:
    """Environments, and where each stands. A new episode starts when it is asked for.

    `backend` is GymnasiumEnvs or EnvPoolEnvs, or what has their attributes.
    """

    STANDING = ("obs", "over", "returns", "lengths")

    def __init__(self, backend, num_envs: int, clip_actions: bool = False):
        self.backend = backend
        self.single_observation_space = backend.single_observation_space
        self.single_action_space = backend.single_action_space
        self.clip_actions = clip_actions and isinstance(self.single_action_space, gym.spaces.Box)
        self.first = getattr(self.single_action_space, "start", 0)  # of Discrete actions
        self.obs = np.zeros((num_envs, *self.single_observation_space.shape), np.float32)
        self.over = np.ones(num_envs, bool)  # [N], no episode is running
        self.returns = np.zeros(num_envs)  # [N], of the running episode
        self.lengths = np.zeros(num_envs, int)  # [N], of the running episode: its time
        self.seconds = 0.0  # spent in them so far

    def reset(self, i: int):
        """Start an episode in environment i."""
        start = time.perf_counter()
        self.obs[i] = self.backend.reset(i)
        self.seconds += time.perf_counter() - start
        self.over[i], self.returns[i], self.lengths[i] = False, 0.0, 0

    def step(self, ids: np.ndarray, actions: np.ndarray):
        """Take actions [K, ...] in the environments `ids` [K], where an episode is running; those
        beyond the box are the environment's business. Rewards, terminated, truncated [K]."""
        if self.clip_actions:
            space = self.single_action_space
            actions = np.minimum(np.maximum(actions, space.low), space.high)
        elif self.first:
            actions = actions + self.first
        start = time.perf_counter()
        obs, rewards, terminated, truncated = self.backend.step(ids, actions)
        self.seconds += time.perf_counter() - start
        self.obs[ids], self.over[ids] = obs, terminated | truncated
        self.returns[ids] += rewards
        self.lengths[ids] += 1
        return rewards, terminated, truncated

    def state(self) -> dict:
        """Where the environments stand, as plain values and tensors, for a checkpoint."""
        state = {name: torch.as_tensor(getattr(self, name)) for name in self.STANDING}
        if hasattr(self.backend, "call"):  # EnvPool has no way into its environments
            progress = self.backend.call("progress")
            state["progress"] = [(k, torch.as_tensor(np.array(acts))) for k, acts in progress]
        return state

    def restore(self, state: dict):
        """Put new environments where `state` was taken, by playing their episodes so far again."""
        if "progress" not in state:
            print("EnvPool's environments can't be restored: resuming with new episodes")
            return
        progress = [(k, actions.numpy()) for k, actions in state["progress"]]
        replayed = zip(self.backend.call("replay", progress), state["obs"].numpy(), strict=True)
        if any(o is not None and (np.float32(o) != then).any() for o, then in replayed):
            print("an episode played again went elsewhere: resuming with new episodes")
            return
        for name in self.STANDING:
            setattr(self, name, state[name].numpy())

    def close(self):
        self.backend.close()


def make_envs(args: Args, first: int = 0, video_folder: Path | None = None) -> Envs:
    """The environments of the chosen backend, for a run that starts at step `first`."""
    if args.env_backend == "envpool" and not video_folder:
        backend = EnvPoolEnvs(args, first)
    else:
        backend = GymnasiumEnvs(args, video_folder)
    problem = unsupported(backend.single_observation_space, backend.single_action_space)
    if problem:
        fail(f"--env-id {args.env_id}: {problem}")
    return Envs(backend, args.num_envs, args.clip_actions)


def unsupported(obs_space: gym.Space, action_space: gym.Space) -> str | None:
    """What keeps this script from these spaces, in words, or None."""
    box = gym.spaces.Box
    if not (isinstance(obs_space, box) and len(obs_space.shape) == 1):
        return f"observations are {obs_space}: this script needs one flat Box"
    flat = isinstance(action_space, box) and len(action_space.shape) == 1
    if not flat and not isinstance(action_space, gym.spaces.Discrete):
        return f"actions are {action_space}: this script needs a flat Box or Discrete; see ppo.py"


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
        for part in torch.as_tensor(x, device=self.mean.device).split(4096):
            part, n = part.double(), len(part)
            if n == 0:
                return
            total, mean = self.count + n, part.mean(dim=0)
            delta = mean - self.mean
            squares = self.var * self.count + (part - mean).square().sum(dim=0)
            self.var.copy_((squares + delta.square() * self.count * n / total) / total)
            self.mean += delta * n / total
            self.count.copy_(total)


class Gaussian(NamedTuple):
    """Independent normal distributions of the actions in B states."""

    mean: torch.Tensor  # [B, A]
    logvar: torch.Tensor  # [B, A], the same in every state

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log-density [B] of actions [B, A]."""
        squares = (actions - self.mean).square() * torch.exp(-self.logvar)
        return -0.5 * (squares + self.logvar + math.log(2.0 * math.pi)).sum(-1)

    def kl(self, new: "Gaussian") -> torch.Tensor:
        """KL(self || new) [B]."""
        squares = (new.mean - self.mean).square() * torch.exp(-new.logvar)
        change = self.logvar - new.logvar
        return 0.5 * (squares + change.exp() - change - 1.0).sum(-1)

    def entropy(self) -> torch.Tensor:
        return 0.5 * (self.logvar + math.log(2.0 * math.pi * math.e)).sum(-1)

    def sample(self) -> torch.Tensor:
        return self.mean + (0.5 * self.logvar).exp() * torch.randn_like(self.mean)


class Categorical(NamedTuple):
    """A choice of one of n actions in B states."""

    logprobs: torch.Tensor  # [B, n]

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log-probability [B] of actions [B]."""
        return self.logprobs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)

    def kl(self, new: "Categorical") -> torch.Tensor:
        """KL(self || new) [B]."""
        return (self.logprobs.exp() * (self.logprobs - new.logprobs)).sum(-1)

    def entropy(self) -> torch.Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum(-1)

    def sample(self) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.logprobs).sample()


def layer_sizes(inputs: int, hid1_mult: int, third: int) -> tuple[int, int, int]:
    """Units of the three hidden layers; the second is the geometric mean of the others."""
    first = hid1_mult * inputs
    return first, math.isqrt(first * third), third


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int, gain: float | None) -> nn.Sequential:
    """Tanh layers and a linear one, weights ~ N(0, 1 / fan-in) in all and biases 0; given a gain,
    orthogonal weights, times sqrt(2) and in the last layer `gain`."""
    sizes = (inputs, *hidden, outputs)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.zeros_(layer.bias)
        if gain is None:
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        else:
            nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else math.sqrt(2))
    *hidden_layers, last = layers
    return nn.Sequential(*(m for layer in hidden_layers for m in (layer, nn.Tanh())), last)


class Agent(nn.Module):
    """Policy, value function, observation scaler, optimisers, servo and replay.

    `envs` is anything with a gymnasium observation_space (one flat Box) and action_space (a flat
    Box, or Discrete), single or vectorised. Observations go in raw, with the steps since the
    episode's start; actions come out as they were sampled.
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        args = args or Args()
        obs_space = getattr(envs, "single_observation_space", None) or envs.observation_space
        action_space = getattr(envs, "single_action_space", None) or envs.action_space
        problem = unsupported(obs_space, action_space)
        if problem:
            raise ValueError(problem)
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        self.clip_obs = np.float32(args.clip_obs or np.inf)
        (dim,) = obs_space.shape
        actions = int(action_space.n) if self.discrete else action_space.shape[0]
        gains = (0.01, 1.0) if args.orthogonal_init else (None, None)

        hidden = layer_sizes(dim + 1, args.hid1_mult, 10 * actions)
        self.actor = mlp(dim + 1, hidden, actions, gains[0])
        self.learning_rate = args.learning_rate or 9e-4 / math.sqrt(hidden[1])
        groups = [{"params": list(self.actor.parameters()), "speed": 1}]
        if not self.discrete:
            # the log variance is the sum of `speed` equal parameters of the original's, so that
            # Adam moves it `speed` times as far
            self.actor_logvar = nn.Parameter(torch.full((actions,), args.policy_logvar))
            groups.append({"params": [self.actor_logvar], "speed": 10 * hidden[2] // 48})
        hidden = layer_sizes(dim + 1, args.hid1_mult, 5)
        self.critic = mlp(dim + 1, hidden, 1, gains[1])
        value_rate = args.value_learning_rate or 1e-2 / math.sqrt(hidden[1])
        self.optimizers = {
            "policy": torch.optim.Adam(groups, lr=self.learning_rate, eps=1e-8, fused=True),
            "value": torch.optim.Adam(self.critic.parameters(), value_rate, eps=1e-8, fused=True),
        }
        self.servo = Servo(**servo_numbers(args))
        self.replay: tuple = ()  # features [B, D + 1] and returns [B] of the batch before
        self.obs_moments = RunningMoments((dim,))
        self.obs_moments.var.zero_()  # nothing seen, no spread: warm-up sees observations / 0.3
        self.rng = np.random.default_rng(args.seed)  # of actions and minibatches
        self.refresh_actor()

    def features(self, obs: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Raw observations [..., D] less their mean, over 3 (deviation + 0.1), and the time: steps
        [...] since the episode's start, in thousands."""
        moments = self.obs_moments
        scaled = (obs - moments.mean) / (3.0 * (moments.var.sqrt() + 0.1))
        scaled = scaled.clamp(-self.clip_obs.item(), self.clip_obs.item())
        return torch.cat([scaled, 0.001 * time.unsqueeze(-1)], dim=-1).float()

    def policy(self, features: torch.Tensor) -> Gaussian | Categorical:
        """The distribution of actions at features [B, D + 1]."""
        output = self.actor(features)
        if self.discrete:
            return Categorical(output.log_softmax(dim=-1))
        return Gaussian(output, self.actor_logvar.expand_as(output))

    def get_value(self, obs: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """V [...] at raw observations [..., D], `time` [...] steps into the episode (default 0)."""
        time = torch.zeros_like(obs[..., 0]) if time is None else time
        return self.critic(self.features(obs, time)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action=None, time=None):
        """Action (sampled unless given), its log-probability, entropy, value at raw obs [..., D]"""
        time = torch.zeros_like(obs[..., 0]) if time is None else time
        features = self.features(obs, time)
        policy = self.policy(features)
        action = policy.sample() if action is None else action
        value = self.critic(features).squeeze(-1)
        return action, policy.log_prob(action), policy.entropy(), value

    @torch.no_grad()
    def refresh_actor(self):
        """Make the policy as it is now available to `act`."""

        def array(x: torch.Tensor) -> np.ndarray:  # on a CPU the tensor's own memory, not a copy
            return x.detach().cpu().numpy()

        layers = [layer for layer in self.actor if isinstance(layer, nn.Linear)]
        *self.hidden, self.output = [(array(x.weight).T, array(x.bias)) for x in layers]
        self.std = None if self.discrete else array((0.5 * self.actor_logvar).exp())
        self.shift = array(self.obs_moments.mean.float())
        self.scale = array((1.0 / (3.0 * (self.obs_moments.var.sqrt() + 0.1))).float())

    def noise(self, num: int) -> np.ndarray:
        """What `act` needs to sample `num` actions; for a choice Gumbel noise, whose argmax is."""
        shape = (num, len(self.output[1]))
        if self.discrete:
            return self.rng.gumbel(size=shape).astype(np.float32)
        return self.rng.standard_normal(shape, np.float32)

    def act(self, obs: np.ndarray, time: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions [K, A] or [K] at raw observations [K, D], `time` [K] steps into their episodes:
        samples given noise [K, outputs], else the mean or likeliest ones. In numpy, several times
        faster than torch for the few observations of a step."""
        x = np.empty((len(obs), obs.shape[1] + 1), np.float32)
        x[:, :-1] = (obs - self.shift) * self.scale
        x[:, -1] = 0.001 * time
        if np.isfinite(self.clip_obs):
            x[:, :-1] = np.minimum(np.maximum(x[:, :-1], -self.clip_obs), self.clip_obs)
        for weight, bias in self.hidden:
            x = np.tanh(x @ weight + bias)
        weight, bias = self.output
        x = x @ weight + bias
        if noise is not None:
            x = x + (noise if self.discrete else self.std * noise)
        return x.argmax(axis=-1) if self.discrete else x


# --- algorithm ------------------------------------------------------------------------------------


def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time.

    rewards, terminated, truncated [T, ...]; values [T + 1, ...]; advantages [T, ...].
    """
    deltas = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    ended = np.logical_or(terminated, truncated)
    advantages = np.zeros_like(deltas)
    advantage = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + np.where(ended[t], 0.0, gamma * gae_lambda * advantage)
        advantages[t] = advantage
    return advantages


class Rollout(NamedTuple):
    """E trajectories, each a whole episode unless a rollout of fixed length cut it, in rows up to
    the longest: row t of column e means something for t < lengths[e], of `obs` for t <= it."""

    obs: np.ndarray  # [T + 1, E, D], raw, the last one too
    actions: np.ndarray  # [T, E, A] or [T, E], as sampled
    rewards: np.ndarray  # [T, E]
    lengths: np.ndarray  # [E], steps
    starts: np.ndarray  # [E], time of the first: 0 in a whole episode
    terminated: np.ndarray  # [E], at the last step
    truncated: np.ndarray  # [E], at the last step

    @property
    def valid(self) -> np.ndarray:  # [T, E]
        return np.arange(len(self.rewards))[:, None] < self.lengths


@dataclass
class Servo:
    """Holds the KL of an iteration's update near kl_targ, by the weight of the penalty, beta, and
    by the learning rate. The numbers are those of Args, of which PRESETS has four sets."""

    kl_targ: float
    beta: float
    raise_above: float
    raise_factor: float
    lower_below: float
    lower_factor: float
    beta_min: float
    beta_max: float
    hinge_coef: float
    early_stop: float
    clip_coef: float
    lr_servo: str
    lr_multiplier: float = 1.0

    def adapt(self, kl: float):
        """After an update that ended at this KL. What moves the rate is beta as just set."""
        if kl > self.raise_above * self.kl_targ:
            self.beta = min(self.beta_max, self.beta * self.raise_factor)
            if self.lr_servo == "with-beta" and self.beta > 30 and self.lr_multiplier > 0.1:
                self.lr_multiplier /= 1.5
        elif kl < self.lower_below * self.kl_targ:
            self.beta = max(self.beta_min, self.beta / self.lower_factor)
            if self.lr_servo == "with-beta" and self.beta < 1 / 30 and self.lr_multiplier < 10:
                self.lr_multiplier *= 1.5

    def adapt_rate(self, kl: float, learning_rate: float):
        """After a pass over the batch; the rate stays between 1e-5 and 1e-2."""
        if self.lr_servo == "with-kl" and kl > self.raise_above * self.kl_targ:
            self.lr_multiplier = max(self.lr_multiplier / 1.5, 1e-5 / learning_rate)
        elif self.lr_servo == "with-kl" and 0.0 < kl < self.lower_below * self.kl_targ:
            self.lr_multiplier = min(self.lr_multiplier * 1.5, 1e-2 / learning_rate)


def advantages_and_returns(data: Rollout, values: np.ndarray, args: Args):
    """Advantages and targets of the value function [T, E], given values [T + 1, E].

    The value after the last step of an episode is 0, unless a time limit is to bootstrap; after
    that of a trajectory that was only cut off it is the value function's.
    """
    rewards = data.rewards * (1.0 - args.gamma if args.gamma < 0.999 else 1.0)
    last = data.valid & (np.arange(len(rewards))[:, None] == data.lengths - 1)
    zero_after = data.terminated | (data.truncated & (not args.bootstrap_truncation))
    advantages = gae(rewards, values, last & zero_after, last, args.gamma, args.gae_lambda)
    if args.lambda_returns:
        return advantages, advantages + values[:-1]
    # discounted sums of rewards: the GAE at lambda = 1 of values that are 0 but after the end
    after = np.where(np.arange(len(values))[:, None] == data.lengths, values, 0.0)
    return advantages, gae(rewards, after, last & zero_after, last, args.gamma, 1.0)


def policy_loss(policy, old, old_logprobs, actions, advantages, servo: Servo, ent_coef: float):
    """The penalised objective, -E[r A] alone, the mean KL(old || new) and the mean entropy."""
    ratio = (policy.log_prob(actions) - old_logprobs).exp()
    surrogate = ratio * advantages
    if servo.clip_coef:
        clipped = ratio.clamp(1.0 - servo.clip_coef, 1.0 + servo.clip_coef)
        surrogate = torch.min(surrogate, clipped * advantages)
    kl = old.kl(policy).mean()
    hinge = (kl - 2.0 * servo.kl_targ).clamp(min=0.0).square()
    entropy = policy.entropy().mean()
    loss = -surrogate.mean() + servo.beta * kl + servo.hinge_coef * hinge - ent_coef * entropy
    return loss, -(ratio * advantages).mean(), kl, entropy


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """A step down the gradient of the loss; the gradient's norm, NaN if the loss is not finite.
    From then on no step is taken: `found_inf` keeps a fused optimiser from it."""
    optimizer.zero_grad()
    loss.backward()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    norm = nn.utils.get_total_norm(parameter.grad for parameter in parameters)
    norm = torch.where(loss.isfinite(), norm, math.nan)
    found = getattr(optimizer, "found_inf", torch.zeros_like(norm))
    optimizer.found_inf = found.logical_or(~norm.isfinite()).float()
    optimizer.step()
    return norm


def fit_policy(agent: Agent, features, actions, advantages, args: Args) -> dict[str, float]:
    """Up to `update_epochs` passes over the batch [B, ...], the early stop, and the servo."""
    servo, adam = agent.servo, agent.optimizers["policy"]
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    with torch.no_grad():
        policy = agent.policy(features)
        old = type(policy)(*(x.clone() for x in policy))  # else part of it would follow the steps
        old_logprobs = old.log_prob(actions)

    def losses(i):
        before = type(old)(*(x[i] for x in old))
        given = before, old_logprobs[i], actions[i], advantages[i]
        return policy_loss(agent.policy(features[i]), *given, servo, args.ent_coef)

    def step(loss: torch.Tensor):
        for group in adam.param_groups:
            group["lr"] = agent.learning_rate * servo.lr_multiplier * group["speed"]
        norms.append(descend(adam, loss))

    norms = []  # of gradients
    limit = servo.early_stop * servo.kl_targ if servo.early_stop else math.inf
    for epoch in range(args.update_epochs + 1):
        # the loss that the next step descends also measures what the last one did
        whole = losses(slice(None))
        loss, surrogate, kl, entropy, *norms = torch.stack([*whole, *norms]).tolist()
        if not all(math.isfinite(x) for x in (loss, kl, *norms)):
            raise FloatingPointError(
                f"after pass {epoch} the policy loss is {loss}, the KL {kl}, the norm of the "
                f"gradient in each of its minibatches {norms}"
            )
        norms.clear()
        servo.adapt_rate(kl, agent.learning_rate)
        if epoch == args.update_epochs or kl > limit:
            break
        if args.roll_back:
            last_good = [parameter.detach().clone() for parameter in parameters]
        if args.num_minibatches == 1:
            step(whole[0])
            continue
        order = torch.as_tensor(agent.rng.permutation(len(actions)), device=actions.device)
        for rows in order.tensor_split(min(args.num_minibatches, len(actions))):
            step(losses(rows)[0])
    if args.roll_back and kl > limit:
        with torch.no_grad():
            for parameter, value in zip(parameters, last_good, strict=True):
                parameter.copy_(value)
    servo.adapt(kl)
    return {
        "losses/policy_loss": surrogate,
        "losses/kl": kl,
        "losses/entropy": entropy,
        "charts/policy_passes": epoch,
        "charts/beta": servo.beta,
        "charts/lr_multiplier": servo.lr_multiplier,
        "charts/learning_rate": agent.learning_rate * servo.lr_multiplier,
    }


def explained_variance(targets: torch.Tensor, values: torch.Tensor) -> float:
    """1 - var(targets - values) / var(targets), both [B]."""
    if targets.shape != values.shape:
        raise ValueError(f"targets {tuple(targets.shape)} and values {tuple(values.shape)}")
    variance = targets.var(correction=0).item()
    residual = (targets - values).var(correction=0).item()
    return 1.0 - residual / variance if variance else math.nan


def fit(name: str, optimizer: torch.optim.Optimizer, minibatches, loss_fn) -> float:
    """One optimiser step per minibatch on `loss_fn(minibatch)`; the mean loss.

    Raises FloatingPointError with the first loss or gradient that is not finite.
    """
    losses, norms = [], []
    for minibatch in minibatches:
        loss = loss_fn(minibatch)
        norms.append(descend(optimizer, loss))
        losses.append(loss.detach())
    table = torch.stack([torch.stack(losses), torch.stack(norms)]).cpu()  # [2, minibatches]
    if not table.isfinite().all():
        first = int((~table.isfinite()).any(dim=0).nonzero()[0])
        loss, norm = table[:, first].tolist()
        raise FloatingPointError(
            f"the {name} loss is {loss} in minibatch {first}, the norm of its gradient {norm}"
        )
    return table[0].mean().item()


def value_minibatches(size: int, before: int, args: Args, rng: np.random.Generator):
    """Rows [256 to 511], a step each, of a batch of `size` samples and of the `before` samples of
    the one before, which follow. A pass shuffles all, but stops after as many as the batch has."""
    batches = max(size // 256, 1)
    width = size // batches
    for _ in range(args.value_epochs):
        order = torch.as_tensor(rng.permutation(size + before))
        yield from (order if args.full_value_epochs else order[: batches * width]).split(width)


def fit_value(agent: Agent, features, returns, args: Args) -> dict[str, float]:
    """Fit the value function to returns [B] at features [B, D + 1] and to the batch before, whose
    features and returns stay as they were; then keep this batch in its place."""

    def values() -> torch.Tensor:
        with torch.no_grad():
            return agent.critic(features).squeeze(-1)

    before = explained_variance(returns, values())
    replay = agent.replay or (features[:0], returns[:0])
    inputs, targets = torch.cat([features, replay[0]]), torch.cat([returns, replay[1]])
    minibatches = value_minibatches(len(returns), len(replay[1]), args, agent.rng)
    fit(
        "value", agent.optimizers["value"], (i.to(inputs.device) for i in minibatches),
        lambda i: (agent.critic(inputs[i]).squeeze(-1) - targets[i]).square().mean(),
    )  # fmt: skip
    agent.replay = (features, returns)
    return {
        "losses/value_loss": (values() - returns).square().mean().item(),
        "losses/explained_variance": before,
        "losses/explained_variance_after": explained_variance(returns, values()),
    }


def check_finite(data: Rollout):
    """Raise FloatingPointError if an observation or a reward is not finite."""
    rewards = np.where(data.valid, data.rewards, 0.0)
    for name, array in (("an observation", data.obs), ("a reward", rewards)):
        if not np.isfinite(array).all():
            t, i, *_ = np.argwhere(~np.isfinite(array))[0]
            raise FloatingPointError(f"{name} is not finite in row {t}, column {i} of the rollout")


def update(agent: Agent, data: Rollout, args: Args) -> dict[str, float]:
    """One iteration of learning: advantages, policy, value function, in this order.

    Raises FloatingPointError before anything is learned if the data are not finite, and when a
    loss or a parameter is not.
    """
    check_finite(data)
    valid, device = data.valid, agent.obs_moments.mean.device
    # observations are scaled for learning as they were for acting; the moments take them in for
    # the next iteration
    time = torch.as_tensor(data.starts + np.arange(len(data.obs))[:, None], device=device)
    features = agent.features(torch.as_tensor(data.obs, device=device), time)  # [T + 1, E, D + 1]
    agent.obs_moments.update(data.obs[:-1][valid])
    with torch.no_grad():
        values = agent.critic(features).squeeze(-1).cpu().double().numpy()
    advantages, returns = (x[valid] for x in advantages_and_returns(data, values, args))  # [B]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    advantages = torch.as_tensor(advantages, dtype=torch.float32, device=device)
    returns = torch.as_tensor(returns, dtype=torch.float32, device=device)
    features = features[:-1][torch.as_tensor(valid)]
    actions = torch.as_tensor(data.actions[valid], device=device)

    metrics = fit_policy(agent, features, actions, advantages, args)
    metrics |= fit_value(agent, features, returns, args)
    if not all(parameter.isfinite().all() for parameter in agent.parameters()):
        raise FloatingPointError("a parameter is not finite")
    agent.refresh_actor()
    if not agent.discrete:
        metrics["charts/policy_std"] = float(agent.std.mean())
    return metrics


# --- rollout --------------------------------------------------------------------------------------


class Trajectory(NamedTuple):
    steps: list[tuple]  # observation [D], action, reward of each
    obs: np.ndarray  # [D], after the last
    start: int  # steps since the episode's start, at the first
    terminated: bool
    truncated: bool


def rollout(agent: Agent, envs: Envs, run: "Run | None", args: Args) -> Rollout:
    """Play b whole episodes or, if it is given, `num_steps` steps in every environment.

    As many episodes start as are wanted, and all are played to their ends: taking the first that
    end, or cutting the last off, would favour short ones. Without a run nothing is logged.
    """
    left = math.inf if args.num_steps else args.episodes_per_batch
    unfinished = [[] for _ in envs.obs]  # steps of each environment's trajectory
    starts = envs.lengths.copy()
    trajectories, step = [], 0
    while step < (args.num_steps or math.inf):
        for i in np.flatnonzero(envs.over):
            if left > 0:
                envs.reset(i)
                starts[i] = 0
                left -= 1
        ids = np.flatnonzero(~envs.over)
        if len(ids) == 0:
            break
        obs = envs.obs[ids]
        actions = agent.act(obs, envs.lengths[ids], agent.noise(len(ids)))
        rewards, terminated, truncated = envs.step(ids, actions)
        step += 1
        if run:
            run.global_step += len(ids)
        for k, i in enumerate(ids):
            unfinished[i].append((obs[k], actions[k], rewards[k]))
            if not args.num_steps:
                check_length(len(unfinished[i]), args.env_id)
            if envs.over[i] or step == args.num_steps:
                ends = envs.obs[i].copy(), starts[i], terminated[k], truncated[k]
                trajectories.append(Trajectory(unfinished[i], *ends))
                unfinished[i] = []
            if envs.over[i] and run:
                run.log_episode(run.global_step, envs.returns[i], envs.lengths[i])
                run.lines.append(
                    f"global_step={run.global_step}, episodic_return={envs.returns[i]:.4f}"
                )
    return stack(trajectories)


def stack(trajectories: list[Trajectory]) -> Rollout:
    """Trajectories side by side, the shorter ones followed by zeros."""
    fields = [[np.array(x) for x in zip(*each.steps, strict=True)] for each in trajectories]
    lengths = np.array([len(each.steps) for each in trajectories])
    starts, terminated, truncated = np.array([each[2:] for each in trajectories]).T
    rows, columns = lengths.max(), len(trajectories)
    obs, actions, rewards = (
        np.zeros((rows, columns, *field.shape[1:]), field.dtype) for field in fields[0]
    )
    obs = np.concatenate([obs, obs[:1]])  # one more row
    for e, length in enumerate(lengths):
        obs[:length, e], actions[:length, e], rewards[:length, e] = fields[e]
        obs[length, e] = trajectories[e].obs
    ends = lengths, starts, terminated.astype(bool), truncated.astype(bool)
    return Rollout(obs, actions, rewards, *ends)


def warm_up(agent: Agent, envs: Envs, args: Args):
    """Play 5 episodes, which count for nothing else, to know the scale of observations."""
    warm_up_args = dataclasses.replace(args, num_steps=0, episodes_per_batch=5)
    try:
        data = rollout(agent, envs, None, warm_up_args)
        check_finite(data)
    except (FloatingPointError, TimeoutError) as error:
        print(f"--env-id {args.env_id}: {error}, in the warm-up episodes", file=sys.stderr)
        raise SystemExit(1) from None
    agent.obs_moments.update(data.obs[:-1][data.valid])
    agent.refresh_actor()


# --- run folder, checkpoints, evaluation ----------------------------------------------------------


class Run:
    """A run's folder and counters. Logs go on where the checkpoint left them, with no row twice."""

    def __init__(self, args: Args, name: str, checkpoint: dict | None = None):
        self.args, self.name, state = args, name, checkpoint or {}
        self.folder = args.resume or args.run_dir or Path("runs") / name
        self.global_step = state.get("global_step", 0)
        self.iteration = state.get("iteration", 0)
        self.first_step, self.start = self.global_step, time.time()
        self.seconds_before = state.get("seconds", 0.0)
        self.lines: list[str] = []  # for standard output, at the end of the iteration
        self.shares: dict[str, float] = {}  # of time, in the last iteration
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not checkpoint and self.is_taken():
                fail(f"--run-dir {self.folder}: not empty; --resume {self.folder} continues a run")
            self.open_logs(state.get("logs", {}))
            self.write_json("running")
        except OSError as error:
            fail(f"{self.folder}: {error.strerror or error}; choose a folder to write to")
        self.bar = tqdm(
            total=args.total_timesteps, initial=self.global_step, unit="step", unit_scale=True,
            disable=None, dynamic_ncols=True, leave=False,
        )  # fmt: skip

    def is_taken(self) -> bool:
        """Whether the folder holds more than a run leaves that died before its first checkpoint."""
        names, table = {path.name for path in self.folder.iterdir()}, self.folder / "episodes.csv"
        if table.is_file() and len(table.read_bytes().splitlines()) < 2:
            names -= {path.name for path in self.logs()}
            names -= {"run.json", "run.json.tmp", "checkpoint.pt.tmp"}
        return bool(names)

    def open_logs(self, sizes: dict[str, int]):
        """Open the logs, which no other process may, as they were at the checkpoint: `sizes`."""
        self.csv_file = (self.folder / "episodes.csv").open("a", buffering=1, newline="")
        with contextlib.suppress(ImportError):  # on Windows
            import fcntl

            try:
                fcntl.flock(self.csv_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{self.folder}: another process is training there")
            except OSError as error:
                print(f"{self.folder}: no locks ({error.strerror}); train there once at a time")
        found = {path.name: path for path in self.logs() if path.stat().st_size}
        for name, size in sizes.items():
            if size and name not in found:
                print(f"{self.folder / name}: gone since the checkpoint, and going on without")
            elif size and found[name].stat().st_size < size:
                fail(f"{found[name]}: cut off since the checkpoint; put it back, or delete it")
        for name, path in found.items():
            if name in sizes or path.suffix == ".csv":  # which is open
                os.truncate(path, sizes.get(name, 0))
            else:
                path.unlink()
        self.writer = SummaryWriter(str(self.folder))
        self.csv = csv.writer(self.csv_file, lineterminator="\n")
        if "episodes.csv" not in found.keys() & sizes.keys():
            self.csv.writerow(["global_step", "seconds", "return", "length"])
        if not sizes:
            rows = "".join(f"\n|{name}|{value}|" for name, value in asdict(self.args).items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|{rows}")

    def logs(self) -> list[Path]:
        return [*self.folder.glob("events.out.tfevents.*"), *self.folder.glob("episodes.csv")]

    def seconds(self) -> float:
        return self.seconds_before + time.time() - self.start

    def log_episode(self, step: int, episodic_return: float, length: int):
        self.csv.writerow([step, f"{self.seconds():.2f}", float(episodic_return), int(length)])
        values = {"charts/episodic_return": episodic_return, "charts/episodic_length": length}
        pair = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=pair), step)  # half add_scalar's time
        self.bar.set_postfix_str(f"return {episodic_return:.1f}", refresh=False)
        self.bar.update(step - self.bar.n)

    def log_iteration(self, metrics: dict[str, float]):
        self.iteration += 1
        sps = int((self.global_step - self.first_step) / (time.time() - self.start))
        share = "charts/share_"
        self.shares = {k.removeprefix(share): v for k, v in metrics.items() if k.startswith(share)}
        for tag, value in (metrics | {"charts/SPS": sps}).items():
            self.writer.add_scalar(tag, value, self.global_step)
        self.bar.update(self.global_step - self.bar.n)
        self.write("\n".join([*self.lines, f"SPS: {sps}"]))
        self.lines.clear()

    def write(self, line: str):
        """A line on standard output, above the live progress bar."""
        try:
            self.bar.write(line, file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # Ctrl-C ends a `| tee`, too
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            with contextlib.suppress(OSError):
                print(line, flush=True)

    def write_json(self, status: str, **more):
        """run.json: what a reader needs to believe, repeat or continue this run."""

        def git(*command: str) -> str | None:
            folder = Path(__file__).resolve().parent
            done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
            return None if done.returncode else done.stdout.strip()

        cpu, has_git = platform.processor(), shutil.which("git")
        with contextlib.suppress(OSError, IndexError):
            cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
        versions = {"python": platform.python_version()}
        for package in ("torch", "gymnasium", "mujoco", "numpy", "envpool"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        content = {
            "script": Path(__file__).name,
            "status": status,
            "args": savable(self.args),
            "seed": self.args.seed,
            "global_step": self.global_step,
            "wall_seconds": round(self.seconds(), 2),
            "versions": versions,
            "git_commit": git("rev-parse", "HEAD") if has_git else None,
            "git_dirty": bool(git("status", "--porcelain")) if has_git else None,
            "source_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "hardware": {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu},
            "processes": int(os.environ.get("WORLD_SIZE", 1)),
        }
        temporary = self.folder / "run.json.tmp"
        temporary.write_text(json.dumps(content | more, indent=2) + "\n")
        temporary.replace(self.folder / "run.json")

    def close(self, status: str) -> float:
        """Close the logs; returns the mean training return of the last 100 episodes."""
        self.bar.close()
        self.writer.close()
        self.csv_file.close()
        with open(self.folder / "episodes.csv") as file:
            last = deque(csv.DictReader(file), maxlen=100)
        final = sum(float(row["return"]) for row in last) / len(last) if last else math.nan
        self.write_json(status, final_return=round(final, 4) if last else None)
        return final

    def abort(self, error: Exception):
        """Close a run that failed. Says where, and the rest if no traceback is needed for it."""
        with contextlib.suppress(OSError):  # of a full disk, for one
            self.close("failed")
        where = f"in iteration {self.iteration + 1}, after step {self.global_step:,}"
        line, hint = f"{self.folder}: stopped {where}", ""
        if (self.folder / "checkpoint.pt").is_file():
            hint = "; its checkpoint.pt is the last good one: mend the cause and --resume"
        if not isinstance(error, FloatingPointError | OSError):
            error.add_note(line + hint)
            raise error
        what = "its logs can't be written: " if getattr(error, "errno", None) else ""
        print(f"{line}: {what}{error}{hint}", file=sys.stderr)
        raise SystemExit(1)


def savable(args: Args) -> dict:
    """The arguments as plain values; not the folders, which may move."""
    return asdict(dataclasses.replace(args, run_dir=None, resume=None, evaluate=None))


def save_checkpoint(run: Run, agent: Agent, envs):
    """Everything needed to continue, whole or not at all: written aside, then renamed."""
    run.writer.flush()
    content = {
        "script": Path(__file__).stem,
        "args": savable(run.args),
        "agent": agent.state_dict(),
        "training": training_state(agent, envs),
        "global_step": run.global_step,
        "iteration": run.iteration,
        "seconds": run.seconds(),
        "logs": {path.name: path.stat().st_size for path in run.logs()},
    }
    for path in run.logs():  # which must last as long as the checkpoint that counts on them
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
    temporary = run.folder / "checkpoint.pt.tmp"
    try:
        with open(temporary, "w+b") as file:
            torch.save(content, file)
            file.seek(0)
            file.write(hashlib.file_digest(file, "sha256").digest())  # after torch's own end
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        why = error.__context__ if isinstance(error, RuntimeError) else error  # torch's, of another
        raise OSError(f"{temporary} can't be written: {why}") from None
    temporary.replace(run.folder / "checkpoint.pt")


def load_checkpoint(folder: Path) -> dict:
    """The checkpoint in a run's folder; one clear line if there is none, or not one of ours."""
    path = Path(folder) / "checkpoint.pt"
    if not path.is_file():
        fail(f"{folder}: no checkpoint.pt there; a run writes its first one as training starts")
    try:
        data = memoryview(path.read_bytes())
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:  # torch.load would not notice
            raise ValueError("not the bytes that were written")
        content = torch.load(path, map_location="cpu", weights_only=True)
        script, args = content["script"], content["args"]
    except Exception as error:  # damage shows in many ways
        fail(f"{path}: damaged, or not a checkpoint of this project ({type(error).__name__})")
    if script != Path(__file__).stem:
        fail(f"{path}: written by {script}.py; use that script")
    unknown = args.keys() - {field.name for field in dataclasses.fields(Args)}
    if unknown:
        fail(f"{path}: of another version of {script}.py, which has --{unknown.pop()}")
    return content


def load_agent(agent: Agent, checkpoint: dict):
    """Put a checkpoint's agent into one made for the same environment with the same arguments."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError:
        fail("the checkpoint does not fit this environment: another version of it, or another id?")
    agent.refresh_actor()


def training_state(agent: Agent, envs: Envs) -> dict:
    """What training needs beyond the agent's own state."""
    return {
        "optimizers": {name: adam.state_dict() for name, adam in agent.optimizers.items()},
        "servo": {"beta": agent.servo.beta, "lr_multiplier": agent.servo.lr_multiplier},
        "replay": agent.replay,
        "rng": agent.rng.bit_generator.state,
        "envs": envs.state(),
    }


def load_training_state(agent: Agent, envs: Envs, state: dict):
    for name, optimizer in agent.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    agent.servo = dataclasses.replace(agent.servo, **state["servo"])
    agent.replay = tuple(x.to(agent.obs_moments.mean.device) for x in state["replay"])
    agent.rng.bit_generator.state = state["rng"]
    envs.restore(state["envs"])


def try_video(args: Args):
    """Record a first frame: what is missing shows before training, not after it, and MuJoCo comes
    to draw without a display before anything else loads it."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            env = build_env(args.env_id, Path(folder))
            env.reset()
            env.close()
    except Exception as error:
        fail(f"--capture-video: {error!r}")


def evaluate(args: Args) -> list[float]:
    """Play `eval_episodes` with the mean action of the agent saved in `args.evaluate`, print each
    return; with `capture_video`, record them into its videos/. Writes nothing else."""
    if args.capture_video:
        try_video(args)
    torch.set_num_threads(args.num_threads)
    args = dataclasses.replace(args, num_envs=1, seed=episode_seed(args.seed, 2**31))
    video_folder = args.evaluate / "videos" if args.capture_video else None
    envs = make_envs(args, video_folder=video_folder)
    agent = Agent(envs, args)
    load_agent(agent, load_checkpoint(args.evaluate))
    returns = []
    for episode in range(args.eval_episodes):
        envs.reset(0)
        while not envs.over[0]:
            envs.step(np.arange(1), agent.act(envs.obs, envs.lengths))
            check_length(envs.lengths[0], args.env_id)
        returns.append(float(envs.returns[0]))
        print(f"eval_episode={episode}, episodic_return={returns[-1]:.2f}", flush=True)
    envs.close()
    print(f"mean action, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------


def compile_networks(agent: Agent):
    """torch.compile each network in place; go on without where no compiler works."""
    try:
        torch.compile(lambda x: x.sin() + x.cos())(torch.zeros(8))
    except Exception as error:  # whatever a missing or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return
    for net in agent.children():
        net.compile()


@contextlib.contextmanager
def stop_on_signals():
    """Inside, SIGTERM, SIGUSR1 (a scheduler's warning) or Ctrl-C only joins the list yielded; a
    Ctrl-C more than a second after the first acts at once."""
    received, pressed = [], []

    def handler(number, frame):
        received.append(number)
        if number == signal.SIGINT:  # schedulers and launchers may each send a SIGTERM
            pressed.append(time.monotonic())
            if pressed[-1] - pressed[0] > 1:  # uv sends its copy of a Ctrl-C at once
                signal.signal(number, before[number])
                signal.raise_signal(number)
        if len(received) > 1:
            return
        with contextlib.suppress(OSError, RuntimeError):  # nobody reads; it is being written to
            print("\nstopping after this iteration; Ctrl-C: at once", file=sys.stderr, flush=True)

    numbers = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGUSR1", signal.SIGINT)}
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def set_up(args: Args):
    """The environments, the agent and the run's folder, new or as the run to resume left them."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    if args.capture_video:
        try_video(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    envs = make_envs(args, checkpoint["global_step"] if checkpoint else 0)
    agent = Agent(envs, args).to(device)
    if checkpoint:
        load_agent(agent, checkpoint)
        load_training_state(agent, envs, checkpoint["training"])
    if args.compile:
        compile_networks(agent)
    if not checkpoint:
        warm_up(agent, envs, args)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    if args.track:
        import wandb  # before the run's writer, which it follows

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": name}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=True)
    run = Run(args, name, checkpoint)
    if args.num_episodes:
        run.bar.total = None  # steps are not the budget
    parameters = sum(p.numel() for p in agent.parameters())
    run.write(f"{args.env_id}, {device}, {parameters:,} parameters, in {run.folder}")
    batch = f"{args.num_envs} x {args.num_steps} steps"
    goal = f"{args.num_episodes:,} episodes" if args.num_episodes else f"{args.total_timesteps:,}"
    run.write(
        f"steps {run.global_step:,} to {goal}; an iteration: "
        f"{batch if args.num_steps else f'{args.episodes_per_batch} episodes'}, up to "
        f"{args.update_epochs} passes of the policy, {args.value_epochs} of the value function; "
        f"servo {args.servo}, target {agent.servo.kl_targ:g}, rate {agent.learning_rate:.3g}"
    )
    return envs, agent, run


def finished(run: Run) -> bool:
    if run.args.num_episodes:
        return run.iteration * run.args.episodes_per_batch >= run.args.num_episodes
    return run.global_step >= run.args.total_timesteps


def shares(stepping: float, rollout: float, update: float) -> dict[str, float]:
    """Where an iteration's seconds went: to the environments, to the rest of the rollout, to the
    update."""
    total = rollout + update
    return {
        "charts/share_environments": stepping / total,
        "charts/share_inference": (rollout - stepping) / total,
        "charts/share_update": update / total,
    }


def train(args: Args) -> str:
    """Train, or go on training; returns the run's name."""
    with stop_on_signals() as stop:
        envs, agent, run = set_up(args)
        try:
            if not args.resume:
                save_checkpoint(run, agent, envs)
            while not finished(run) and not stop:
                started, stepping = time.perf_counter(), envs.seconds
                data = rollout(agent, envs, run, args)
                rolled, stepping = time.perf_counter(), envs.seconds - stepping
                metrics = update(agent, data, args)
                metrics |= shares(stepping, rolled - started, time.perf_counter() - rolled)
                run.lines.append(
                    f"global_step={run.global_step}, kl={metrics['losses/kl']:.4f}, "
                    f"beta={metrics['charts/beta']:.3f}"
                )
                run.log_iteration(metrics)
                if run.iteration % args.checkpoint_interval == 0:
                    save_checkpoint(run, agent, envs)
            if run.iteration % args.checkpoint_interval:  # else just saved
                save_checkpoint(run, agent, envs)
        except Exception as error:
            run.abort(error)
        finally:
            envs.close()
        done = finished(run)
        final = run.close("finished" if done else "running")

    script = f"python {Path(__file__).name}"
    if not done:
        on = f"go on with: {script} --resume {run.folder}"
        run.write(f"stopped at step {run.global_step:,}; {on}")
        raise SystemExit(128 + stop[0])
    print(f"return {final:.2f} (mean of the last 100 training episodes), {run.seconds():.0f} s")
    if run.shares:
        print("time: " + ", ".join(f"{name} {share:.0%}" for name, share in run.shares.items()))
    print(f"play it:   {script} --evaluate {run.folder}")
    name = "num_episodes" if args.num_episodes else "total_timesteps"
    more = f"--{name.replace('_', '-')} {2 * getattr(args, name)}"
    print(f"train on:  {script} --resume {run.folder} {more}")
    if args.save_model:
        torch.save(agent.state_dict(), run.folder / f"{args.exp_name}.cleanrl_model")
    if args.capture_video:
        evaluate(dataclasses.replace(args, evaluate=run.folder))
    return run.name


if __name__ == "__main__":
    args = parse_args()
    if args.evaluate:
        evaluate(args)
    else:
        run_name = train(args)
