# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy", "tensorboard",
#     "tqdm", "tyro>=0.9",
# ]
# ///
"""PPO, clipped, for continuous actions, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked where it is. Every iteration:

    1. take T steps in each of N environments with a ~ N(mu(s), sigma^2)
    2. A = GAE(lambda): a time limit bootstraps from the value of the true last observation, a
       termination does not, and the row after an episode's end (autoreset's) is never learned from
    3. for K epochs, for each minibatch, with A normalised in it and r = pi(a | s) / pi_old(a | s):
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_continuous_action.py --env-id HalfCheetah-v4               # train, 1M steps
    python ppo_continuous_action.py --env-id Humanoid-v4 --no-compile     # eager: slower
    python ppo_continuous_action.py --env-id dm_control/walker-walk-v0    # needs shimmy
    python ppo_continuous_action.py --resume runs/RUN                     # go on where it stopped
    python ppo_continuous_action.py --evaluate runs/RUN --capture-video   # play the mean action

Expect about 5,900 on HalfCheetah-v4 after 1M steps, 4,300 on Walker2d-v4, 3,500 on Hopper-v4 and
1,000 on Humanoid-v4 (mean action, seeds and tables in README.md), in two to four minutes each on
one CPU core (Humanoid eight), about twice that with --no-compile.

Flags, TensorBoard tags and output are CleanRL's. Three defaults are not: the policy starts with a
deviation of 0.5 and not 1 (`--log-std-init`), in units of half the action box
(`--scale-actions`), and the value loss is not clipped. CleanRL's own:
`--log-std-init 0 --no-scale-actions --clip-vloss`.
Left out on purpose: pixels, recurrence, squashed actions, state-dependent deviations.
"""

import atexit
import contextlib
import copy
import csv
import dataclasses
import difflib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import math
import multiprocessing
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
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


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
    compile: bool = True
    """compile the update with torch.compile, where there is a compiler: same results to rounding"""
    compile_from: int = 15_000
    """but not in a run of fewer gradient steps, which would not repay the seconds it takes"""
    cudagraphs: bool = False
    """on a GPU, compile to CUDA graphs"""
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
    upload_model: bool = False
    """also upload the run's folder to the Hugging Face hub"""
    hf_entity: str = ""
    """the user or organisation to upload to; default: the account logged in"""
    run_dir: Path | None = None
    """the run's folder; default runs/{env_id}__{exp_name}__{seed}__{time}"""
    resume: Path | None = None
    """continue the run in this folder, with its own arguments"""
    evaluate: Path | None = None
    """play episodes with the mean action of the agent saved in this folder, and exit"""
    eval_episodes: int = 10
    """episodes played by --evaluate"""
    checkpoint_interval: int = 20
    """iterations between checkpoints"""

    # Algorithm specific arguments
    env_id: str = "HalfCheetah-v4"
    """the environment: a gymnasium id with Box actions, or dm_control/..."""
    env_backend: Literal["gymnasium", "async", "envpool"] = "gymnasium"
    """who steps the environments: this process, a process for each, or EnvPool's threads"""
    env_threads: int = 0
    """EnvPool's threads; 0: one for each environment, at most one for each core"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, rounded down to whole iterations"""
    learning_rate: float = 3e-4
    """Adam's, in the first iteration"""
    num_envs: int = 1
    """environments played side by side"""
    num_steps: int = 2048
    """steps in each environment per iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly: in the last of K iterations it is 1/K of the first's"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of the generalized advantage estimate"""
    num_minibatches: int = 32
    """minibatches per epoch, of nearly equal size"""
    update_epochs: int = 10
    """passes over an iteration's samples"""
    norm_adv: bool = True
    """normalize advantages within each minibatch"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate"""
    clip_vloss: bool = False
    """clip the change of the value, too, to +-clip-coef"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient over all parameters"""
    target_kl: float | None = None
    """no further epoch once approx_kl = E[(r - 1) - log r], r the probability ratio, averaged over
    an epoch's minibatches, exceeds this; tested after each epoch"""
    log_std_init: float = -0.7
    """initial log standard deviation of the actions, in the policy's units"""
    scale_actions: bool = True
    """the policy's unit is half the range of the action box, its origin the centre; if not, they
    are the environment's"""
    batch_size: int = 0
    """has no effect: --num-envs and --num-steps set it"""
    minibatch_size: int = 0
    """has no effect: --num-minibatches sets it"""
    num_iterations: int = 0
    """has no effect: --total-timesteps, --num-envs and --num-steps set it"""


# What a resumed run may change; every other argument is the run's own.
CHANGEABLE = {
    "cuda", "num_threads", "env_threads", "compile", "compile_from", "cudagraphs", "track",
    "wandb_project_name", "wandb_entity", "capture_video", "save_model", "upload_model",
    "hf_entity", "run_dir", "resume", "evaluate", "eval_episodes", "checkpoint_interval",
    "total_timesteps", "batch_size", "minibatch_size", "num_iterations",
}  # fmt: skip
# Fields that CleanRL computes, accepted for its command lines.
NO_EFFECT = {
    "batch_size": "--num-envs and --num-steps set it",
    "minibatch_size": "--num-minibatches sets it",
    "num_iterations": "--total-timesteps, --num-envs and --num-steps set it",
}
# Arguments that need a package of their own.
NEEDS = {"capture_video": "moviepy", "track": "wandb", "upload_model": "huggingface_hub"}
# The least and the greatest value; for others, integers start at 1, floats at 0.
BOUNDS = {
    "seed": (0, 2**63), "env_threads": (0, 1024), "compile_from": (0, math.inf), "gamma": (0, 1),
    "gae_lambda": (0, 1), "log_std_init": (-9, 9),
}  # fmt: skip


def check(args: Args):
    """What the bounds of single arguments can't say."""
    batch_size = args.num_envs * args.num_steps
    if args.num_minibatches > batch_size:
        fail(
            f"--num-minibatches {args.num_minibatches}: more than the {batch_size} samples of an "
            "iteration (num-envs * num-steps); lower it or raise those"
        )
    if args.total_timesteps < batch_size and not args.evaluate:
        print(
            f"--total-timesteps {args.total_timesteps} is less than an iteration, {batch_size} "
            "(num-envs * num-steps): nothing will be trained"
        )


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


def make_env(env_id, idx, capture_video, run_name, gamma=None, seed=1, video_folder=None):
    """A function that makes environment `idx` of a run, as gymnasium.vector wants them. With
    `capture_video`, environment 0 records its episodes into `video_folder`, or videos/{run_name}.
    `gamma` is CleanRL's and not needed: rewards are scaled in the update, not in a wrapper."""
    folder = (video_folder or Path("videos") / run_name) if capture_video and idx == 0 else None
    return lambda: Episodes(build_env(env_id, folder), seed, idx)


class GymnasiumEnvs:
    """gymnasium.vector.SyncVectorEnv, lighter: environments stepped one by one in this process."""

    def __init__(self, thunks):
        self.envs = [thunk() for thunk in thunks]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self):
        return np.stack([env.reset()[0] for env in self.envs]), {}

    def step(self, actions):
        n = len(self.envs)
        obs = np.empty((n, *self.single_observation_space.shape), np.float32)
        rewards, terminated, truncated = np.empty(n), np.empty(n, bool), np.empty(n, bool)
        for i, env in enumerate(self.envs):
            obs[i], rewards[i], terminated[i], truncated[i], _ = env.step(actions[i])
        return obs, rewards, terminated, truncated, {}

    def call(self, method: str, *args) -> tuple:
        return tuple(getattr(env, method)(*args) for env in self.envs)

    def close(self):
        self.call("close")


class AsyncEnvs(gym.vector.AsyncVectorEnv):
    """gymnasium's, with each environment in a process of its own; tells when one of these dies."""

    def __init__(self, thunks):
        self.processes = []
        with self.deaths_told():
            super().__init__([in_worker(thunk) for thunk in thunks])
        for process in self.processes:
            atexit.register(process.kill)  # SIGTERM would not do

    def reset(self, **kwargs):
        with self.deaths_told():
            return super().reset(**kwargs)

    def step(self, actions):
        with self.deaths_told():
            return super().step(actions)

    def call(self, name: str, *args, **kwargs) -> tuple:
        with self.deaths_told():
            return super().call(name, *args, **kwargs)

    @contextlib.contextmanager
    def deaths_told(self):
        try:
            yield
        except (EOFError, ConnectionError) as error:
            for process in self.processes:
                process.join(0.1)
            dead = {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}
            for process in self.processes:
                process.kill()
            for i, code in dead.items():
                raise RuntimeError(
                    f"the process of environment {i} died, exit code {code} (-9: it was killed, "
                    "perhaps for want of memory; try fewer environments)"
                ) from error
            raise

    def close_extras(self, timeout: float | None = None, terminate: bool = False):
        try:
            if not terminate:
                return super().close_extras(timeout)
        except (EOFError, ConnectionError):  # one is dead already
            pass
        for process in self.processes:
            process.kill()
            process.join()


def in_worker(thunk):
    """`thunk` for a process of its own, which leaves signals to the process that trains."""

    def start():
        if multiprocessing.parent_process():
            for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # a scheduler sends them to all
                if hasattr(signal, name):
                    signal.signal(getattr(signal, name), signal.SIG_IGN)
        return thunk()

    return start


class Envs:
    """Environments that step together, and where each stands between two rollouts (detail 1).

    `vector` is any gymnasium vector environment whose autoreset is "next step" (see `Episodes`).
    """

    STANDING = ("obs", "over", "returns", "lengths", "discounted")

    def __init__(self, vector):
        self.vector = vector
        self.single_observation_space = vector.single_observation_space
        self.single_action_space = vector.single_action_space
        self.low, self.high = self.single_action_space.low, self.single_action_space.high
        self.obs = vector.reset()[0].astype(np.float32)  # [N, D]
        self.over = np.zeros(len(self.obs), bool)  # [N], the last step ended an episode
        self.returns = np.zeros(len(self.obs))  # [N], of the running episode
        self.lengths = np.zeros(len(self.obs), int)  # [N], of the running episode
        self.seconds = 0.0  # spent in them so far
        self.discounted = np.zeros(len(self.obs))  # [N], its return discounted, for the scaling

    def step(self, actions: np.ndarray):
        """Take actions [N, A], clipped to the box, while those stored are not (continuous detail
        5): rewards, terminated, truncated [N]."""
        actions = np.minimum(np.maximum(actions, self.low), self.high)
        start = time.perf_counter()
        obs, rewards, terminated, truncated, _ = self.vector.step(actions)
        self.seconds += time.perf_counter() - start
        self.obs, self.over = obs.astype(np.float32, copy=False), terminated | truncated
        return rewards, terminated, truncated

    def state(self) -> dict:
        """Where the environments stand, as plain values and tensors, for a checkpoint."""
        state = {name: torch.as_tensor(getattr(self, name)) for name in self.STANDING}
        if hasattr(self.vector, "call"):  # EnvPool has no way into its environments
            progress = self.vector.call("progress")
            state["progress"] = [(k, torch.as_tensor(np.array(acts))) for k, acts in progress]
        return state

    def restore(self, state: dict):
        """Put new environments where `state` was taken, by playing their episodes so far again."""
        if "progress" not in state:
            print("EnvPool's environments can't be restored: resuming with new episodes")
            return
        progress = [(k, actions.numpy()) for k, actions in state["progress"]]
        replayed = zip(self.vector.call("replay", progress), state["obs"].numpy(), strict=True)
        if any(o is not None and (np.float32(o) != then).any() for o, then in replayed):
            print("an episode played again went elsewhere: resuming with new episodes")
            self.obs = self.vector.reset()[0].astype(np.float32)
            return
        for name in self.STANDING:
            setattr(self, name, state[name].numpy())

    def close(self):
        self.vector.close()


def make_envs(args: Args, start: int = 0, video_folder: Path | None = None) -> Envs:
    """The environments of the chosen backend, for a run that starts at step `start`."""
    if args.env_backend == "envpool" and not video_folder:
        vector = make_envpool(args, start)
    else:
        more = {"seed": args.seed, "video_folder": video_folder}
        thunks = [
            make_env(args.env_id, i, bool(video_folder), "", **more) for i in range(args.num_envs)
        ]
        vector = (AsyncEnvs if args.env_backend == "async" else GymnasiumEnvs)(thunks)
    problem = unsupported(vector.single_observation_space, vector.single_action_space)
    if problem:
        fail(f"--env-id {args.env_id}: {problem}")
    return Envs(vector)


def make_envpool(args: Args, start: int):
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
    seeds = [episode_seed(args.seed, i, start) % 2**31 for i in range(args.num_envs)]
    return envpool.make(
        args.env_id, env_type="gymnasium", num_envs=args.num_envs, num_threads=args.env_threads,
        seed=seeds, **more,
    )  # fmt: skip


def unsupported(obs_space: gym.Space, action_space: gym.Space) -> str | None:
    """What keeps this script from these spaces, in words, or None."""
    box = gym.spaces.Box
    if not (isinstance(obs_space, box) and len(obs_space.shape) == 1):
        return f"observations are {obs_space}: this script needs one flat Box"
    if not (isinstance(action_space, box) and len(action_space.shape) == 1):
        return f"actions are {action_space}: this script needs a flat Box; see ppo.py"


# --- agent ----------------------------------------------------------------------------------------


OBS_LIMIT = np.float32(10.0)  # of normalized observations


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


class FlatAdam:
    """Adam (Kingma & Ba 2015, algorithm 1; eps 1e-5: detail 3) over all parameters of a module
    as one vector [P]. They become views of it: one tensor to clip, compile and step, not many."""

    def __init__(self, module: nn.Module):
        parameters = list(module.parameters())
        self.parameters = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(self.parameters, parameters)
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.exp_avg = torch.zeros_like(self.parameters)
        self.exp_avg_sq = torch.zeros_like(self.parameters)
        self.steps = torch.zeros((), device=self.parameters.device)

    def named(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """A vector [P] as the module's named parameters."""
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def step(self, grad: torch.Tensor, learning_rate: torch.Tensor):
        self.steps += 1.0
        self.exp_avg.lerp_(grad, 0.1)  # betas 0.9 and 0.999
        self.exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=0.001)
        mean = self.exp_avg / (1.0 - 0.9**self.steps)
        square = self.exp_avg_sq / (1.0 - 0.999**self.steps)
        change = learning_rate * mean / (square.sqrt() + 1e-5)
        # what is not finite stays in the averages, and no step is taken any more
        self.parameters -= torch.where(change.isfinite().all(), change, 0.0)

    def state(self) -> dict[str, torch.Tensor]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "steps": self.steps}

    def restore(self, state: dict[str, torch.Tensor]):
        for name, value in self.state().items():
            value.copy_(state[name])


def layer_init(layer: nn.Linear, gain: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights, no bias (detail 2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy, value function and both normalisers; what a saved agent needs to be played.

    `envs` is anything with a gymnasium observation_space (one flat Box) and action_space (a flat
    Box), single or vectorised. Observations go in raw; actions come out before clipping to the box.
    """

    def __init__(self, envs, args: Args | None = None):
        super().__init__()
        args = args or Args()
        obs_space = getattr(envs, "single_observation_space", None) or envs.observation_space
        action_space = getattr(envs, "single_action_space", None) or envs.action_space
        problem = unsupported(obs_space, action_space)
        if problem:
            raise ValueError(problem)
        (dim,), (actions,) = obs_space.shape, action_space.shape
        # separate networks (detail 13, continuous detail 4)
        self.critic = nn.Sequential(
            layer_init(nn.Linear(dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 1), gain=1.0),
        )
        self.actor_mean = nn.Sequential(
            layer_init(nn.Linear(dim, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, 64)),
            nn.Tanh(),
            layer_init(nn.Linear(64, actions), gain=0.01),
        )
        # a deviation for each dimension, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full((actions,), args.log_std_init))
        low, high = (torch.tensor(bound).float() for bound in (action_space.low, action_space.high))
        if not (args.scale_actions and (high - low).isfinite().all()):
            low, high = -torch.ones(actions), torch.ones(actions)
        self.register_buffer("origin", (low + high) / 2)
        self.register_buffer("unit", torch.where(high > low, (high - low) / 2, 1.0))
        self.obs_moments = RunningMoments((dim,))
        self.return_moments = RunningMoments()
        self.rng = np.random.default_rng(args.seed)  # of actions and minibatches
        self.refresh_actor()

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Raw observations [..., D] less their mean, over their deviation, clipped to +-10
        (continuous details 6, 7)."""
        moments, limit = self.obs_moments, OBS_LIMIT.item()
        scale = (moments.var + 1e-8).rsqrt().float()
        return (obs.float() - moments.mean.float()).mul_(scale).clamp_(-limit, limit)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [...] at raw observations [..., D]."""
        return self.critic(self.normalize(obs)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action (sampled unless given), its log-density, entropy, value at raw obs [..., D]."""
        features = self.normalize(obs)
        if action is None:
            mean = self.actor_mean(features)
            noise = self.actor_logstd.exp() * torch.randn_like(mean)
            action = self.origin + self.unit * (mean + noise)
        return action, *self(features, action)

    def forward(self, features: torch.Tensor, actions: torch.Tensor):
        """Log-density [B] of actions [B, A], entropy [B], value [B] at normalized obs [B, D].
        A normal distribution of independent components (continuous details 1, 3)."""
        mean, logstd = self.actor_mean(features), self.actor_logstd
        z = ((actions - self.origin) / self.unit - mean) * torch.exp(-logstd)
        logscale = logstd + self.unit.log()
        logprob = -0.5 * z.square() - logscale - 0.5 * math.log(2.0 * math.pi)
        entropy = (logscale + 0.5 * math.log(2.0 * math.pi * math.e)).expand_as(mean)
        return logprob.sum(-1), entropy.sum(-1), self.critic(features).squeeze(-1)

    @torch.no_grad()
    def refresh_actor(self):
        """Make the policy as it is now available to `act`, in units of the environment."""

        def array(x: torch.Tensor) -> np.ndarray:  # on a CPU the tensor's own memory, not a copy
            return x.detach().cpu().numpy()

        layers = [layer for layer in self.actor_mean if isinstance(layer, nn.Linear)]
        *self.hidden, (weight, bias) = [(array(x.weight).T, array(x.bias)) for x in layers]
        origin, unit = array(self.origin), array(self.unit)
        self.output = weight * unit, bias * unit + origin
        self.std = array(self.actor_logstd.exp()) * unit
        self.shift = array(self.obs_moments.mean.float())
        self.scale = array((self.obs_moments.var + 1e-8).rsqrt().float())

    def noise(self, *shape: int) -> np.ndarray:
        """What `act` needs to sample `shape` actions."""
        return self.rng.standard_normal((*shape, len(self.std)), np.float32)

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Actions [N, A] at raw observations [N, D]: samples given noise [N, A], else the means.
        In numpy, several times faster than torch for the few observations of a step."""
        x = (obs - self.shift) * self.scale
        x = np.minimum(np.maximum(x, -OBS_LIMIT), OBS_LIMIT)
        for weight, bias in self.hidden:
            x = np.tanh(x @ weight + bias)
        weight, bias = self.output
        mean = x @ weight + bias
        return mean if noise is None else mean + self.std * noise


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
    obs: np.ndarray  # [T + 1, N, D], raw
    actions: np.ndarray  # [T, N, A], before clipping to the box
    rewards: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N]
    truncated: np.ndarray  # [T, N]
    valid: np.ndarray  # [T, N], False in the row after an episode's end: there its action was
    # ignored and the reward is none, but its observation is the episode's true last one


class Batch(NamedTuple):
    features: torch.Tensor  # [B, D], normalized observations
    actions: torch.Tensor  # [B, A]
    logprobs: torch.Tensor  # [B], of the policy that acted
    advantages: torch.Tensor  # [B]
    returns: torch.Tensor  # [B]
    values: torch.Tensor  # [B], before the update


METRICS = (
    "value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm"
)  # fmt: skip


def ppo_loss(agent: Agent, parameters: dict[str, torch.Tensor], batch: Batch, args: Args):
    """The clipped objective (Schulman et al. 2017, eq. 9) with these parameters, and the METRICS
    but for the last, grad_norm."""
    logprob, entropy, value = torch.func.functional_call(
        agent, parameters, (batch.features, batch.actions)
    )
    logratio = logprob - batch.logprobs
    ratio = logratio.exp()

    advantages = batch.advantages  # normalized per minibatch (detail 7)
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    # clipped surrogate (detail 8)
    clipped = ratio.clamp(1.0 - args.clip_coef, 1.0 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()

    error = (value - batch.returns).square()
    if args.clip_vloss:  # value clipping (detail 9)
        near = batch.values + (value - batch.values).clamp(-args.clip_coef, args.clip_coef)
        error = torch.max(error, (near - batch.returns).square())
    value_loss = 0.5 * error.mean()

    entropy = entropy.mean()  # whose bonus encourages exploration (detail 10)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # debug variables (detail 12); approx_kl is Schulman's estimator k3
    old_approx_kl, approx_kl = -logratio.mean(), (ratio - 1.0 - logratio).mean()
    clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean()
    return loss, (value_loss, policy_loss, entropy, old_approx_kl, approx_kl, clipfrac)


def minibatch_step(agent: Agent, batch: Batch, rows: torch.Tensor, learning_rate, args: Args):
    """One step of gradient descent on the given rows [M] of the batch; METRICS [7]."""
    parameters = agent.optimizer.parameters.detach().requires_grad_()
    minibatch = Batch(*(x[rows] for x in batch))
    loss, metrics = ppo_loss(agent, agent.optimizer.named(parameters), minibatch, args)
    (grad,) = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        norm = grad.norm()  # over all parameters (detail 11)
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        metrics = torch.stack([*metrics, norm])
        agent.optimizer.step(torch.where(metrics.isfinite().all(), grad, math.nan), learning_rate)
        return metrics


def check_finite(data: Rollout):
    """Raise FloatingPointError if an observation or a reward is not finite."""
    rewards = np.where(data.valid, data.rewards, 0.0)
    for name, array in (("an observation", data.obs), ("a reward", rewards)):
        if not np.isfinite(array).all():
            t, i, *_ = np.argwhere(~np.isfinite(array))[0]
            raise FloatingPointError(f"{name} is not finite in row {t}, column {i} of the rollout")


def check_metrics(agent: Agent, metrics: torch.Tensor) -> torch.Tensor:
    """Raise FloatingPointError, telling where, unless all METRICS [minibatches, 7] are finite."""
    bad = ~metrics.isfinite()
    if bad.any():
        first = int(bad.any(dim=1).nonzero()[0])
        names = [name for name, is_bad in zip(METRICS, bad[first], strict=True) if is_bad]
        raise FloatingPointError(f"{', '.join(names)} is not finite in minibatch {first}")
    if not agent.optimizer.parameters.isfinite().all():
        raise FloatingPointError("a parameter is not finite")
    return metrics


def update(agent: Agent, data: Rollout, learning_rate: float, args: Args) -> dict[str, float]:
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches.

    Raises FloatingPointError if the data, a metric or a parameter is not finite.
    """
    check_finite(data)
    # Observations are scaled for learning as they were for acting; only the first time there is
    # no scale yet, and a policy that hardly depends on them.
    first = agent.obs_moments.count == 0
    if first:
        agent.obs_moments.update(data.obs[:-1][data.valid])

    device = agent.optimizer.parameters.device
    with torch.no_grad():
        features = agent.normalize(torch.as_tensor(data.obs, device=device))  # [T + 1, N, D]
        actions = torch.as_tensor(data.actions, device=device)
        values = agent.critic(features).squeeze(-1)  # [T + 1, N]
        logprobs, _, _ = agent(features[:-1], actions)
    advantages = gae(  # detail 5
        data.rewards, values.cpu().double().numpy(), data.terminated, data.truncated,
        args.gamma, args.gae_lambda,
    )  # fmt: skip
    advantages = torch.as_tensor(advantages, dtype=torch.float32, device=device)
    values, features = values[:-1], features[:-1]
    fields = (features, actions, logprobs, advantages, advantages + values, values)
    batch = Batch(*(x.flatten(0, 1) for x in fields))  # B = T * N

    rows = np.flatnonzero(data.valid)  # what is learned from
    if len(rows) == 0:
        return {}
    learning_rate = torch.tensor(learning_rate, device=device)
    metrics = []
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(rows), device=device)
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        minibatches = order.tensor_split(min(args.num_minibatches, len(rows)))
        for minibatch in minibatches:
            # the compiled step is of two samples or more: one has no deviation
            step = agent.minibatch_step if len(minibatch) > 1 else minibatch_step
            metrics.append(step(agent, batch, minibatch, learning_rate, args))
        if args.target_kl is not None:
            kl = torch.stack(metrics[-len(minibatches) :])[:, METRICS.index("approx_kl")].mean()
            if kl > args.target_kl:
                break
    means = check_metrics(agent, torch.stack(metrics)).mean(dim=0).cpu()
    if not first:
        agent.obs_moments.update(data.obs[:-1][data.valid])
    agent.refresh_actor()
    residual, targets = (batch.returns - batch.values)[rows], batch.returns[rows]
    variance = targets.var(correction=0).item()
    explained = 1.0 - residual.var(correction=0).item() / variance if variance else math.nan
    losses = {f"losses/{name}": mean for name, mean in zip(METRICS, means.tolist(), strict=True)}
    return losses | {
        "losses/explained_variance": explained,
        "charts/policy_std": float(agent.std.mean()),
    }


# --- rollout --------------------------------------------------------------------------------------


def rollout(agent: Agent, envs: Envs, run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, going on where the last rollout stopped."""
    T, N = args.num_steps, args.num_envs
    obs = np.zeros((T + 1, *envs.obs.shape), np.float32)
    rewards, actions = np.zeros((T, N)), []
    terminated, truncated, valid = np.zeros((3, T, N), bool)
    noise = agent.noise(T, N)
    for t in range(T):
        obs[t], valid[t] = envs.obs, ~envs.over
        actions.append(agent.act(envs.obs, noise[t]))
        rewards[t], terminated[t], truncated[t] = envs.step(actions[t])
    obs[T] = envs.obs
    rewards[~valid] = 0.0
    data = Rollout(obs, np.stack(actions), rewards, terminated, truncated, valid)
    log_episodes(data, envs, run)
    return data._replace(rewards=scale_rewards(agent, envs, data, args.gamma))


def log_episodes(data: Rollout, envs: Envs, run: "Run"):
    """Log the raw return and the length of every episode that ended, in the order of their ends."""
    steps = run.global_step + data.valid.sum(axis=1).cumsum()
    first = np.zeros(len(envs.obs), int)
    for t, i in np.argwhere(data.terminated | data.truncated):
        part = slice(first[i], t + 1)
        envs.returns[i] += data.rewards[part, i].sum()
        envs.lengths[i] += data.valid[part, i].sum()
        run.log_episode(int(steps[t]), envs.returns[i], envs.lengths[i])
        run.lines.append(f"global_step={steps[t]}, episodic_return={envs.returns[i]:.4f}")
        envs.returns[i], envs.lengths[i], first[i] = 0.0, 0, t + 1
    for i, t in enumerate(first):
        envs.returns[i] += data.rewards[t:, i].sum()
        envs.lengths[i] += data.valid[t:, i].sum()
    run.global_step = int(steps[-1])


def scale_rewards(agent: Agent, envs: Envs, data: Rollout, gamma: float) -> np.ndarray:
    """Rewards [T, N] over the deviation of the discounted returns so far, clipped to +-10
    (continuous details 8, 9)."""
    discounted, going = np.zeros_like(data.rewards), 1.0 - (data.terminated | data.truncated)
    for t, reward in enumerate(data.rewards):
        discounted[t] = gamma * envs.discounted + reward
        envs.discounted = discounted[t] * going[t]
    agent.return_moments.update(discounted[data.valid])
    return np.clip(data.rewards / math.sqrt(agent.return_moments.var + 1e-8), -10.0, 10.0)


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
        "optimizer": agent.optimizer.state(),
        "rng": agent.rng.bit_generator.state,
        "envs": envs.state(),
    }


def load_training_state(agent: Agent, envs: Envs, state: dict):
    agent.optimizer.restore(state["optimizer"])
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
    returns, total, steps = [], 0.0, 0
    while len(returns) < args.eval_episodes:
        (reward,), (terminated,), (truncated,) = envs.step(agent.act(envs.obs))
        total, steps = total + float(reward), steps + 1
        check_length(steps, args.env_id)
        if terminated or truncated:
            print(f"eval_episode={len(returns)}, episodic_return={total:.2f}", flush=True)
            returns.append(total)
            total, steps = 0.0, 0
    envs.close()
    print(f"mean action, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


def link_videos(run: Run):
    """Make videos/{run name} lead to the run's videos; CleanRL's are there."""
    if run.folder == Path("runs") / run.name:
        link = Path("videos") / run.name  # an id may hold a slash
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # some file systems have no links
            link.symlink_to((run.folder / "videos").resolve())


def upload(run: Run):
    """Copy the run's folder into a repository of the Hugging Face hub."""
    from huggingface_hub import HfApi

    api, args = HfApi(), run.args
    owner = args.hf_entity or api.whoami()["name"]
    name = f"{args.env_id}-{args.exp_name}-seed{args.seed}".replace("/", "-")
    api.create_repo(f"{owner}/{name}", exist_ok=True)
    api.upload_folder(repo_id=f"{owner}/{name}", folder_path=run.folder)
    print(f"uploaded to {owner}/{name}")


# --- training -------------------------------------------------------------------------------------


def compile_update(agent: Agent, args: Args) -> str:
    """torch.compile a minibatch's step, and say what came of it: nothing, without a compiler that
    works or in a short run."""
    size = args.num_envs * args.num_steps
    steps = args.total_timesteps // size * args.update_epochs * args.num_minibatches
    if not args.compile or steps < args.compile_from or size < 4 * args.num_minibatches:
        return "eager"
    start, device = time.time(), agent.optimizer.parameters.device
    # the shapes and types of an agent do not change, but for the number of rows: no guards
    options = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    options |= {"cpp_wrapper": device.type == "cpu", "triton.cudagraphs": args.cudagraphs}
    options["cpp.vec_isa_ok"] = True  # saves 1.3 s of trying vector units
    obs = torch.zeros(size, agent.critic[0].in_features)
    batch = Batch(obs, torch.as_tensor(agent.act(obs.numpy())), *torch.zeros(4, size))
    batch = Batch(*(x.to(device) for x in batch))
    rows = torch.arange(size // args.num_minibatches, device=device)
    try:
        import torch._inductor.config as inductor

        torch.compiler.reset()  # of another agent in this process
        if hasattr(inductor.cpp, "use_decompose_tanh"):  # by exp, as torch 2.7 does anyway
            options["cpp.use_decompose_tanh"] = True
        torch._dynamo.config.trace_autograd_ops = True
        torch._dynamo.config.specialize_float = True
        torch._dynamo.mark_dynamic(rows, 0)
        for tensor in (agent.optimizer.parameters, *agent.optimizer.state().values()):
            if args.cudagraphs:  # which change these in place
                torch._dynamo.mark_static_address(tensor, guard=False)
        step = torch.compile(minibatch_step, fullgraph=True, options=options)
        step(copy.deepcopy(agent), batch, rows, torch.tensor(0.0, device=device), args)
    except Exception as error:  # whatever a missing, broken or older compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return "eager"
    # the next run of a CUDA graph writes over what this one returned
    agent.minibatch_step = (lambda *x: step(*x).clone()) if args.cudagraphs else step
    return f"compiled in {time.time() - start:.0f} s"


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
    agent.optimizer = FlatAdam(agent)
    agent.minibatch_step = minibatch_step
    if checkpoint:
        load_agent(agent, checkpoint)
        load_training_state(agent, envs, checkpoint["training"])
    agent.refresh_actor()
    how = compile_update(agent, args)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    if args.track:
        import wandb  # before the run's writer, which it follows

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": name}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=True)
    run = Run(args, name, checkpoint)
    parameters = sum(p.numel() for p in agent.parameters())
    run.write(f"{args.env_id}, {device}, {how}, {parameters:,} parameters, in {run.folder}")
    batch = args.num_envs * args.num_steps
    run.write(
        f"steps {run.global_step:,} to {args.total_timesteps:,}; an iteration: {batch:,} steps, "
        f"{args.update_epochs} epochs of {args.num_minibatches} minibatches of "
        f"{math.ceil(batch / args.num_minibatches)}"
    )
    return envs, agent, run


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
    num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    with stop_on_signals() as stop:
        envs, agent, run = set_up(args)
        try:
            if not args.resume:
                save_checkpoint(run, agent, envs)
            while run.iteration < num_iterations and not stop:
                # learning-rate annealing (detail 4)
                remaining = 1.0 - run.iteration / num_iterations if args.anneal_lr else 1.0
                learning_rate = remaining * args.learning_rate
                started, stepping = time.perf_counter(), envs.seconds
                data = rollout(agent, envs, run, args)
                rolled, stepping = time.perf_counter(), envs.seconds - stepping
                metrics = update(agent, data, learning_rate, args)
                metrics |= shares(stepping, rolled - started, time.perf_counter() - rolled)
                run.log_iteration(metrics | {"charts/learning_rate": learning_rate})
                if run.iteration % args.checkpoint_interval == 0:
                    save_checkpoint(run, agent, envs)
            if run.iteration % args.checkpoint_interval:  # else just saved
                save_checkpoint(run, agent, envs)
        except Exception as error:
            run.abort(error)
        finally:
            envs.close()
        done = run.iteration >= num_iterations
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
    print(f"train on:  {script} --resume {run.folder} --total-timesteps {2 * args.total_timesteps}")
    if args.save_model:
        torch.save(agent.state_dict(), run.folder / f"{args.exp_name}.cleanrl_model")
    if args.capture_video:
        evaluate(dataclasses.replace(args, evaluate=run.folder))
        link_videos(run)
    if args.upload_model:
        upload(run)
    return run.name


if __name__ == "__main__":
    args = parse_args()
    if args.evaluate:
        evaluate(args)
    else:
        run_name = train(args)
