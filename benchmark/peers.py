"""What our scripts' speed is measured beside: programs that take a script's own flags.

    python benchmark/peers.py sb3 ppo_continuous_action.py --env-id HalfCheetah-v4 --num-envs 4
    python benchmark/peers.py bare ppo.py --env-id CartPole-v1 --total-timesteps 100000

`sb3` trains Stable-Baselines3's PPO with the hyper-parameters the script would have: its own parser
reads the flags. ppo_kl_adaptive.py and ppo_cma.py have no equal there; beside them it trains one
environment with CleanRL's settings. `bare` steps the script's environments with random actions and
does nothing else. Both leave a run.json with the number of environment steps, as our scripts do.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (
    "ppo", "ppo_continuous_action", "ppo_kl_adaptive", "ppo_cma", "ppo_atari_multigpu"
)  # fmt: skip
CLEANRL = {  # what differs from our defaults
    "ppo": "--learning-rate 2.5e-4 --update-epochs 4",
    "ppo_continuous_action": "--log-std-init 0 --no-scale-actions --clip-vloss",
}


def parse(script: str, flags: list[str]):
    """A script as a module, and what it makes of the flags."""
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(Path(script).stem)
    return module, module.parse_args(flags)


def clipped(module, args):
    """The script of clipped PPO, and its arguments, that SB3 is to equal."""
    if not hasattr(args, "servo") and not hasattr(args, "iter_steps"):
        return module, args
    from gymnasium.spaces import Box

    continuous = isinstance(module.make_env(args.env_id).action_space, Box)
    script = "ppo_continuous_action" if continuous else "ppo"
    flags = [*CLEANRL[script].split(), "--env-id", args.env_id, "--seed", str(args.seed)]
    flags += ["--total-timesteps", str(args.total_timesteps)]
    flags += ["--cuda" if args.cuda else "--no-cuda"]
    return parse(script, [*flags, "--num-threads", str(args.num_threads)])


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def backend(args) -> str:
    """Who steps the script's environments: EnvPool those of Atari."""
    return "envpool" if hasattr(args, "bf16") else getattr(args, "env_backend", "gymnasium")


def pool(module, args):
    """The Atari script's EnvPool."""
    threads = args.env_threads or min(cores(), args.num_envs)
    return module.Envs(args, slice(None), threads=threads).vector


# --- Stable-Baselines3 ----------------------------------------------------------------------------


def sb3_pool(envs, num_envs: int):
    """EnvPool as SB3 wants it: an ended episode's next one begins in the same step."""
    from stable_baselines3.common.vec_env import VecEnv, VecMonitor

    class Pool(VecEnv):
        def reset(self):
            return envs.reset()[0]

        def step_async(self, actions):
            self.actions = actions.astype(envs.action_space.dtype)

        def step_wait(self):
            obs, rewards, terminated, truncated, _ = envs.step(self.actions)
            infos = [{} for _ in rewards]
            ended = np.flatnonzero(terminated | truncated)
            for i in ended:
                infos[i]["terminal_observation"] = obs[i].copy()
                infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            if len(ended):
                obs[ended] = envs.reset(ended)[0]
            return obs, rewards, terminated | truncated, infos

        def close(self):
            envs.close()

        def get_attr(self, name, indices=None):
            return [None] * num_envs

        def set_attr(self, name, value, indices=None): ...

        def env_method(self, name, *args, indices=None, **kwargs): ...

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * num_envs

    return VecMonitor(Pool(num_envs, envs.observation_space, envs.action_space))


def sb3_envs(module, args):
    import gymnasium as gym
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    if backend(args) == "envpool":
        return sb3_pool(pool(module, args), args.num_envs)

    def make():
        env = module.make_env(args.env_id)
        if getattr(args, "scale_actions", False) and env.action_space.is_bounded():
            env = gym.wrappers.RescaleAction(env, -1.0, 1.0)
        return Monitor(env)

    envs = (SubprocVecEnv if backend(args) == "async" else DummyVecEnv)([make] * args.num_envs)
    continuous = isinstance(envs.action_space, gym.spaces.Box)
    return VecNormalize(envs, gamma=args.gamma) if continuous else envs


def sb3_model(module, args):
    """SB3's PPO with a clipped script's hyper-parameters."""
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(args.num_threads or cores())
    batch = args.num_envs * args.num_steps
    iterations = max(1, args.total_timesteps // batch)

    def rate(left: float) -> float:  # SB3 counts the rollout it is about to learn from as done
        return args.learning_rate * (left + 1 / iterations if args.anneal_lr else 1.0)

    if hasattr(args, "bf16"):  # Atari; SB3's defaults for pixels are the same network
        policy, net = "CnnPolicy", {}
    else:
        sizes = {"pi": [64, 64], "vf": [64, 64]}
        policy, net = "MlpPolicy", {"net_arch": sizes, "activation_fn": torch.nn.Tanh}
    return PPO(
        policy,
        sb3_envs(module, args),
        learning_rate=rate,
        n_steps=args.num_steps,
        batch_size=-(-batch // args.num_minibatches),
        n_epochs=args.update_epochs,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        clip_range=args.clip_coef,
        clip_range_vf=args.clip_coef if args.clip_vloss else None,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        target_kl=args.target_kl and args.target_kl / 1.5,  # SB3 stops at 1.5 times it
        policy_kwargs=net | {"ortho_init": True, "log_std_init": getattr(args, "log_std_init", 0)},
        seed=args.seed,
        device="cuda" if args.cuda and torch.cuda.is_available() else "cpu",
    )


def sb3(module, args) -> int:
    """Train; the environment steps done."""
    module, args = clipped(module, args)
    model = sb3_model(module, args)
    batch = args.num_envs * args.num_steps
    if args.total_timesteps >= batch:  # else nothing is trained, as in ours
        model.learn(args.total_timesteps // batch * batch)
    model.env.close()
    return model.num_timesteps


# --- bare environments ----------------------------------------------------------------------------


def bare(module, args) -> int:
    """Step with random actions; the environment steps done."""
    n = args.num_envs
    if backend(args) == "gymnasium":
        envs = [module.make_env(args.env_id) for _ in range(n)]
        space = envs[0].action_space
    else:
        vector = module.make_envs(args) if backend(args) == "async" else pool(module, args)
        space = getattr(vector, "single_action_space", vector.action_space)
    space.seed(args.seed)
    actions = [np.stack([space.sample() for _ in range(n)]) for _ in range(1000)]
    rounds = args.total_timesteps // n
    if backend(args) == "gymnasium":
        for env in envs:
            env.reset(seed=args.seed)
        for k in range(rounds):
            for env, action in zip(envs, actions[k % 1000], strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
        return rounds * n
    vector.reset()
    steps, over = 0, np.zeros(n, bool)
    for k in range(rounds):
        _, _, terminated, truncated, _ = vector.step(actions[k % 1000])
        steps += n - int(over.sum())  # the step after an episode's end only resets
        over = terminated | truncated
    vector.close()
    return steps


def main(argv: list[str]):
    peers = {"sb3": sb3, "bare": bare}
    if len(argv) < 2 or argv[0] not in peers or Path(argv[1]).stem not in SCRIPTS:
        print(f"peers.py: give sb3 or bare, one of {', '.join(SCRIPTS)}, flags", file=sys.stderr)
        raise SystemExit(2)
    kind, script, *flags = argv
    if kind == "sb3" and importlib.util.find_spec("stable_baselines3") is None:
        print(
            "peers.py: sb3 needs stable_baselines3: pip install stable-baselines3", file=sys.stderr
        )
        raise SystemExit(2)
    module, args = parse(script, flags)
    steps = peers[kind](module, args)
    folder = args.run_dir or Path("runs") / f"{kind}__{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    info = {"script": f"{kind}.py", "seed": args.seed, "args": {"env_id": args.env_id}}
    info |= {"status": "finished", "global_step": steps}
    (folder / "run.json").write_text(json.dumps(info) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
