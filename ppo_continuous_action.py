# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.7,<2.14", "gymnasium[mujoco]>=1.1,<2", "mujoco>=3.13,<4", "numpy",
#                 "tensorboard", "tqdm", "tyro>=1.0.17"]
# ///
"""PPO, clipped, for continuous actions, in one file.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of Huang et al. 2022 ("The
37 implementation details of PPO"), each marked where it is. Every iteration:

    1. take T steps in each of N environments with actions a ~ pi(a | s)
    2. A = GAE(lambda): a time limit bootstraps from the value of the true last observation, a
       termination does not, and the row after an episode's end (autoreset's) is never learned from
    3. for K epochs or until KL > target_kl, for each minibatch, with A normalised, r = pi / pi_old:
           minimise  -E[ min(r A, clip(r, 1 - eps, 1 + eps) A) ] + c_v E[ (V - R)^2 ] / 2 - c_e H

    python ppo_continuous_action.py  # --resume runs/RUN goes on, --evaluate runs/RUN plays

Expect 5,900 on HalfCheetah-v4 after 1M steps, in two minutes on one CPU core. Flags and tags are
CleanRL's, its defaults `--log-std-init 0 --no-scale-actions --clip-vloss --target-kl None`.
"""

import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import time
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

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
    seed: int = 1  # of everything: networks, actions, minibatches and each episode's reset
    torch_deterministic: bool = True  # torch.backends.cudnn.deterministic
    cuda: bool = True  # use a GPU if there is one; networks this small gain little from it
    num_threads: int = 1  # CPU threads of torch; more rarely pay for networks of this size
    compile: bool = True  # compile the update, if there is a compiler: same results to rounding
    compile_from: int = 15_000  # but not in a run of fewer gradient steps: it would not pay
    cudagraphs: bool = False  # on a GPU, compile to CUDA graphs
    track: bool = False  # also log to Weights and Biases
    wandb_project_name: str = "ppo"  # its project
    wandb_entity: str | None = None  # its entity (team)
    capture_video: bool = False  # record the evaluation, after training or with --evaluate
    save_model: bool = False  # also save the weights alone, as RUN/{exp_name}.cleanrl_model
    run_dir: Path | None = None  # default runs/{env_id}__{exp_name}__{seed}__{time}
    resume: Path | None = None  # go on with the run in this folder, with its own arguments
    evaluate: Path | None = None  # play the run in this folder greedily, and exit
    eval_episodes: int = 10  # episodes played by --evaluate
    checkpoint_interval: int = 20  # iterations between checkpoints

    # Algorithm
    env_id: str = "HalfCheetah-v4"  # a gymnasium id with Box actions, or dm_control/...
    total_timesteps: int = 1_000_000  # steps in all environments, rounded down to iterations
    learning_rate: float = 3e-4  # Adam's, in the first iteration
    num_envs: int = 1  # environments played side by side
    num_steps: int = 2048  # steps in each environment per iteration
    anneal_lr: bool = True  # lower the learning rate linearly
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimate
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # passes over an iteration's samples
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = False  # clip the change of the value, too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient over all parameters
    target_kl: float | None = 0.02  # no further epoch once the mean approx_kl of one exceeds it
    rpo_alpha: float = 0.0  # noise in [-alpha, alpha] on the means in learning (RPO); 0: none
    log_std_init: float = -0.7  # initial log standard deviation of the actions, in their unit
    scale_actions: bool = True  # that unit is half the action box; if not, the environment's
    batch_size: int = 0  # computed: num_envs * num_steps
    minibatch_size: int = 0  # computed: batch_size // num_minibatches
    num_iterations: int = 0  # computed: total_timesteps // batch_size

    def __post_init__(self):
        """Compute what is computed; a ValueError, which tyro shows, for what can't be meant."""
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        low = {"seed": 0, "compile_from": 0, "log_std_init": -9, "minibatch_size": 4}
        high = {"gamma": 1, "gae_lambda": 1, "log_std_init": 9}
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
    vector = space.is_np_flattenable and not (space.dtype == np.uint8 and len(space.shape) > 1)
    if not vector or not isinstance(actions, gym.spaces.Box) or len(actions.shape) != 1:
        hint = "a vector and a flat Box wanted; choices: ppo.py"
        fail(f"--env-id {env_id}: {space}, {actions}: {hint}; pixels: ppo_atari_multigpu.py")
    return env if gym.spaces.flatten_space(space) == space else gym.wrappers.FlattenObservation(env)


def episode_seed(*key: int) -> int:
    """The reset seed of an episode from (seed, environment, episode): no two runs share one."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


class Episodes(gym.Wrapper):
    """Seeds every episode, and keeps the actions of the running one to play it again on resuming.
    Autoreset is "next step": the step that ends an episode returns its true last observation; the
    next one ignores its action and returns a new episode's first observation with reward 0."""

    def __init__(self, env: gym.Env, args: Args, index: int):
        super().__init__(env)
        self.args, self.index, self.episode = args, index, -1
        self.low, self.high = self.action_space.low, self.action_space.high

    def reset(self, **kwargs):
        self.episode, self.over, self.actions, self.rewards = self.episode + 1, False, [], []
        self.discounted = 0.0
        obs, info = self.env.reset(seed=episode_seed(self.args.seed, self.index, self.episode))
        self.obs = np.array(obs, np.float32)
        return self.obs, info

    def step(self, action: np.ndarray):
        """Take an action [A], clipped to the box: the agent's is not (continuous detail 5)."""
        if self.over:
            return self.reset()[0], 0.0, False, False, {}
        clipped = np.minimum(np.maximum(action, self.low), self.high)
        obs, reward, terminated, truncated, info = self.env.step(clipped)
        self.obs, reward = np.array(obs, np.float32), np.asarray(reward).item()
        self.actions.append(action)
        self.rewards.append(reward)
        self.discounted = self.args.gamma * self.discounted + reward  # return so far, seen from now
        self.over = bool(terminated or truncated)
        return self.obs, reward, terminated, truncated, info


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
    """Policy and value function for environments with the spaces of `env`."""

    def __init__(self, env, args: Args | None = None):
        super().__init__()
        args, space = args or Args(), env.action_space
        (self.dim,) = env.observation_space.shape
        self.critic = mlp(self.dim, 1, gain=1.0)  # two networks (detail 13)
        self.actor_mean = mlp(self.dim, *space.shape, gain=0.01)  # (continuous detail 4)
        # a deviation for each dimension, the same in every state (continuous detail 2)
        self.actor_logstd = nn.Parameter(torch.full(space.shape, args.log_std_init))
        low, high = torch.tensor(space.low).float(), torch.tensor(space.high).float()
        if not (args.scale_actions and (high - low).isfinite().all()):
            low, high = -torch.ones(space.shape), torch.ones(space.shape)
        self.register_buffer("origin", (low + high) / 2)
        self.register_buffer("unit", torch.where(high > low, (high - low) / 2, 1.0))
        self.obs_moments, self.return_moments = RunningMoments((self.dim,)), RunningMoments()
        self.rng = np.random.default_rng(args.seed)  # of actions and minibatches

    def normalize(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations [..., D] standardized and clipped to +-10 (continuous details 6, 7)."""
        scale = (self.obs_moments.var + 1e-8).rsqrt().float()
        return ((obs.float() - self.obs_moments.mean.float()) * scale).clamp(-10.0, 10.0)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V [...] at observations [..., D]."""
        return self.critic(self.normalize(obs)).squeeze(-1)

    def get_action_and_value(self, obs: torch.Tensor, action: torch.Tensor | None = None):
        """Action [B, A] (sampled unless given), its log-probability [B], entropy [B] and value [B]:
        independent components, whose numbers add up (continuous details 1, 3)."""
        features = self.normalize(obs)
        mean, logstd = self.actor_mean(features), self.actor_logstd
        if action is None:
            action = self.origin + self.unit * (mean + logstd.exp() * torch.randn_like(mean))
        z = ((action - self.origin) / self.unit - mean) * torch.exp(-logstd)
        logscale = logstd + self.unit.log()
        logprob = -0.5 * z.square() - logscale - 0.5 * math.log(2.0 * math.pi)
        entropy = (logscale + 0.5 * math.log(2.0 * math.pi * math.e)).expand_as(mean)
        return action, logprob.sum(-1), entropy.sum(-1), self.critic(features).squeeze(-1)

    forward = get_action_and_value

    @torch.no_grad()
    def numpy_actor(self):
        """`act` by the policy as it is now, in numpy: fast where observations are few."""
        moments, unit = self.obs_moments, self.unit
        *hidden, weight, bias = self.actor_mean.parameters()
        last = weight * unit[:, None], bias * unit + self.origin, self.actor_logstd.exp() * unit
        tensors = moments.mean.float(), (moments.var + 1e-8).rsqrt().float(), *hidden, *last
        shift, scale, *hidden, weight, bias, std = (x.clone().cpu().numpy().T for x in tensors)

        def act(obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
            x = np.minimum(np.maximum((obs - shift) * scale, -10.0), 10.0)
            for w, b in zip(hidden[::2], hidden[1::2], strict=True):
                x = np.tanh(x @ w + b)
            x = x @ weight + bias
            return x if noise is None else x + std * noise

        return act

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """Mean actions [N, A] at observations [N, D] or, given `noise(N)`, samples; not clipped."""
        return self.numpy_actor()(np.asarray(obs, np.float32), noise)

    def noise(self, *shape: int) -> np.ndarray:
        """Noise for `shape` actions."""
        return self.rng.standard_normal((*shape, len(self.unit)), np.float32)


# --- algorithm ------------------------------------------------------------------------------------
def gae(rewards, values, terminated, truncated, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimate (Schulman et al. 2016, eq. 16), numpy arrays over time:
    rewards, terminated, truncated and the result [T, ...], values [T + 1, ...]."""
    advantages = rewards + gamma * values[1:] * (1.0 - terminated) - values[:-1]
    ended = np.logical_or(terminated, truncated)
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += np.where(ended[t], 0.0, gamma * gae_lambda * advantages[t + 1])
    return advantages


# obs [T + 1, N, D] raw, actions [T, N, A], the rest [T, N]; valid is False in the row after an
# episode's end: its action was ignored, its reward is none, its obs is the true last one
Rollout = namedtuple("Rollout", "obs actions rewards terminated truncated valid")


def ppo_loss(agent, args, obs, actions, old_logprobs, advantages, returns, old_values, noise=0.0):
    """The clipped objective (Schulman et al. 2017, eq. 9) of a minibatch [M, ...], and what is
    logged of it. Old is what policy and value function gave before the update."""
    _, logprob, entropy, value = agent(obs, actions - noise)
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
    if args.rpo_alpha:  # of the policy without noise
        logratio = agent(obs, actions)[1] - old_logprobs
        ratio = logratio.exp()
    metrics = {"value_loss": value_loss, "policy_loss": policy_loss, "entropy": entropy}
    metrics |= {"old_approx_kl": -logratio.mean(), "approx_kl": (ratio - 1.0 - logratio).mean()}
    return loss, metrics | {"clipfrac": ((ratio - 1.0).abs() > args.clip_coef).float().mean()}


def flat_adam(agent: Agent) -> dict[str, torch.Tensor]:
    """Adam's state for all parameters as one vector [P], of which the agent's become views."""
    vector = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(vector, agent.parameters())
    state = {name: torch.zeros_like(vector) for name in ("exp_avg", "exp_avg_sq")}
    return {"parameters": vector.requires_grad_(), "steps": vector.new_zeros(()), **state}


def minibatch_step(agent: Agent, adam: dict, batch: tuple, rows, learning_rate, args: Args):
    """One step of Adam (Kingma & Ba 2015, algorithm 1) on rows [M] of the batch; metrics."""
    parts = iter(adam["parameters"].split([p.numel() for p in agent.parameters()]))
    views = {name: next(parts).view(p.shape) for name, p in agent.named_parameters()}

    def policy(*given):
        return torch.func.functional_call(agent, views, given)

    loss, metrics = ppo_loss(policy, args, *[x[rows] for x in batch])
    (grad,) = torch.autograd.grad(loss, adam["parameters"])
    with torch.no_grad():
        norm = grad.norm()  # over all parameters (detail 11)
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        adam["steps"] += 1.0
        adam["exp_avg"].lerp_(grad, 0.1)  # betas 0.9 and 0.999, eps 1e-5 (detail 3)
        adam["exp_avg_sq"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        mean = adam["exp_avg"] / (1.0 - 0.9 ** adam["steps"])
        square = adam["exp_avg_sq"] / (1.0 - 0.999 ** adam["steps"])
        adam["parameters"] -= learning_rate * mean / (square.sqrt() + 1e-5)
        return [*metrics, "grad_norm"], torch.stack([*metrics.values(), norm])


def update(agent: Agent, data: Rollout, learning_rate: float, args: Args, step=minibatch_step):
    """One iteration of learning from a rollout; returns the metrics, averaged over minibatches."""
    first, seen = agent.obs_moments.count == 0, data.obs[:-1][data.valid]
    if first:  # later observations are scaled for learning as they were for acting
        agent.obs_moments.update(seen)
    device = agent.adam["parameters"].device
    obs, actions = (torch.as_tensor(x, device=device) for x in (data.obs, data.actions))
    values, logprobs = agent.get_value(obs).detach(), agent(obs[:-1], actions)[1].detach()
    numbers = data.rewards, values.cpu().double().numpy(), data.terminated, data.truncated
    advantages = torch.tensor(gae(*numbers, args.gamma, args.gae_lambda)).to(values)  # detail 5
    fields = obs[:-1], actions, logprobs, advantages, advantages + values[:-1], values[:-1]
    batch = [x.flatten(0, 1) for x in fields]  # [B, ...], B = T * N

    rows, steps = np.flatnonzero(data.valid), []  # what is learned from; metrics of each step
    learning_rate = torch.tensor(learning_rate, device=device)
    for _ in range(args.update_epochs):
        order = torch.as_tensor(agent.rng.permutation(rows), device=device)
        if args.rpo_alpha:  # Rahman & Xue 2023, algorithm 1: shifted actions are shifted means
            noise = agent.rng.uniform(-args.rpo_alpha, args.rpo_alpha, batch[1].shape)
            batch[6:] = [torch.as_tensor(noise).to(actions) * agent.unit]
        # every sample once an epoch, in minibatches of nearly equal size (detail 6)
        for minibatch in order.tensor_split(args.num_minibatches):
            names, numbers = step(agent, agent.adam, batch, minibatch, learning_rate, args)
            steps.append(numbers.clone())  # CUDA graphs write into theirs again
        approx_kl = torch.stack(steps[-args.num_minibatches :])[:, names.index("approx_kl")]
        if args.target_kl is not None and approx_kl.mean() > args.target_kl:
            break
    if not first:
        agent.obs_moments.update(seen)
    means = torch.stack(steps).mean(dim=0).tolist()
    unexplained = batch[3][rows].var() / batch[4][rows].var().clamp(min=1e-12)  # of R - V and R
    metrics = {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
    metrics["charts/policy_std"] = (agent.actor_logstd.exp() * agent.unit).mean().item()
    return metrics | {"losses/explained_variance": 1.0 - unexplained.item()}


# --- rollout --------------------------------------------------------------------------------------
def rollout(agent: Agent, envs: list[Episodes], run: "Run", args: Args) -> Rollout:
    """Take `num_steps` steps in every environment, from where the last ones stopped (detail 1)."""
    T, N = args.num_steps, args.num_envs
    obs, actions = np.zeros((T + 1, N, *envs[0].obs.shape), np.float32), []
    rewards, (terminated, truncated, valid) = np.zeros((T, N)), np.zeros((3, T, N), bool)
    discounted = np.zeros((T, N))
    obs[0], noise, act = [env.obs for env in envs], agent.noise(T, N), agent.numpy_actor()
    for t in range(T):
        valid[t] = going = [not env.over for env in envs]
        run.global_step += sum(going)
        actions.append(act(obs[t], noise[t]))
        for i, (env, action) in enumerate(zip(envs, actions[t], strict=True)):
            obs[t + 1, i], rewards[t, i], terminated[t, i], truncated[t, i], _ = env.step(action)
            discounted[t, i] = env.discounted
            if env.over:
                run.log_episode(run.global_step, math.fsum(env.rewards), len(env.rewards))
    # rewards over the deviation of the discounted returns, clipped (continuous details 8, 9)
    agent.return_moments.update(discounted[valid])
    rewards = np.clip(rewards / math.sqrt(agent.return_moments.var + 1e-8), -10.0, 10.0)
    return Rollout(obs, np.stack(actions), rewards, terminated, truncated, valid)


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
    state = {"args": vars(run.args), "agent": agent.state_dict(), "adam": agent.adam}
    state |= {"rng": agent.rng.bit_generator.state, "episodes": [env.episode for env in envs]}
    state["actions"] = [torch.tensor(np.array(env.actions)) for env in envs]
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


def load(folder: Path, env=None) -> tuple[Agent, Args]:
    """The agent saved in a run's folder, for `env` or a new one of its id, and its arguments."""
    checkpoint = load_checkpoint(folder)
    args = checkpoint["args"]
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
        obs, _ = env.reset()
        while not env.over:
            obs, *_ = env.step(act(obs[None])[0])
        returns.append(math.fsum(env.rewards))
        print(f"eval_episode={episode}, episodic_return={returns[-1]:.2f}", flush=True)
    env.close()
    print(f"greedy, {len(returns)} episodes: {np.mean(returns):.2f} +- {np.std(returns):.2f}")
    return returns


# --- training -------------------------------------------------------------------------------------
def compile_step(agent: Agent, args: Args):
    """`minibatch_step` compiled; as it is in a short run, or if no compiler works."""
    steps = args.num_iterations * args.update_epochs * args.num_minibatches
    if not args.compile or steps < args.compile_from:
        return minibatch_step
    options = {"cpp_wrapper": agent.adam["steps"].is_cpu, "triton.cudagraphs": args.cudagraphs}
    options |= {"cpp.vec_isa_ok": True, "cpp.use_decompose_tanh": True}  # starts, and runs, faster
    try:
        torch.compiler.reset()  # of another agent in this process
        torch._dynamo.config.trace_autograd_ops = True
        torch.compile(lambda x: x + 1, options=options)(agent.adam["steps"])
    except Exception as error:  # whatever a missing, old or broken compiler raises
        print(f"--compile: no working compiler ({type(error).__name__}), going on eagerly")
        return minibatch_step
    for tensor in agent.adam.values() if args.cudagraphs else ():  # which change these in place
        torch._dynamo.mark_static_address(tensor, guard=False)
    # the shapes and types of an agent do not change, but for the number of rows: no guards
    options["guard_filter_fn"] = lambda guards: [False] * len(guards)
    torch.compiler.config.dynamic_sources = "L['rows']"
    return torch.compile(minibatch_step, fullgraph=True, options=options)


def train(args: Args) -> Path:
    """Train, or go on training; returns the run's folder."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else {}
    envs = [Episodes(make_env(args.env_id), args, i) for i in range(args.num_envs)]
    torch.manual_seed(args.seed)  # after the environments, which may seed torch themselves
    agent = load(args.resume, envs[0])[0] if args.resume else Agent(envs[0], args)
    agent.adam = flat_adam(agent.to(device))
    for name, value in checkpoint.get("adam", {}).items():
        agent.adam[name].data.copy_(value)
    agent.rng.bit_generator.state = checkpoint.get("rng", agent.rng.bit_generator.state)
    for i, env in enumerate(envs):  # on resuming, the running episodes are played again
        env.episode += checkpoint["episodes"][i] if args.resume else 0
        env.reset()
        for action in checkpoint["actions"][i].numpy() if args.resume else ():
            env.step(action)
    step = compile_step(agent, args)
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
        save(run, agent, envs)
        while run.iteration < args.num_iterations and not stop:
            remaining = 1.0 - run.iteration / args.num_iterations if args.anneal_lr else 1.0
            learning_rate = remaining * args.learning_rate  # annealed (detail 4)
            data = rollout(agent, envs, run, args)
            metrics = update(agent, data, learning_rate, args, step)
            checked = {"observations": data.obs, "rewards": data.rewards} | metrics
            for name, x in (checked | agent.state_dict()).items():
                if not torch.as_tensor(x).isfinite().all():
                    raise FloatingPointError(f"iteration {run.iteration}: {name} is not finite")
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
