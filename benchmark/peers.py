"""What a script's speed is measured beside: programs that take the script's own flags.

    python benchmark/peers.py sb3 ppo_continuous_action.py --env-id HalfCheetah-v4 --num-envs 4
    python benchmark/peers.py bare ppo.py --env-id CartPole-v1 --total-timesteps 100000

`sb3` trains Stable-Baselines3's PPO with the hyper-parameters the script would have: its own parser
reads the flags. Beside a script with other hyper-parameters than SB3's it has CleanRL's settings.
`bare` steps the script's environments with random actions and does nothing else. Both leave a
run.json with the number of environment steps. A script takes part if it has `parse_args` and either
`make_env` or, with EnvPool, `Envs`.
"""

import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

CLEANRL = {
    "num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10,
    "learning_rate": 3e-4, "anneal_lr": True, "gamma": 0.99, "gae_lambda": 0.95, "norm_adv": True,
    "clip_coef": 0.2, "clip_vloss": True, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5,
    "target_kl": None, "log_std_init": 0.0, "scale_actions": False,
}  # fmt: skip
DISCRETE = {"num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
DISCRETE |= {"learning_rate": 2.5e-4, "ent_coef": 0.01}


def fit(words: list[str]) -> bool:
    """Whether a command's script can say what its flags mean."""
    found = [Path(word) for word in words if word.endswith(".py")]
    return any(re.search(r"^def parse_args\(", path.read_text(), re.M) for path in found[:1])


def parse(script: str, flags: list[str]):
    """A script as a module, and what it makes of the flags."""
    path = Path(script).resolve()
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    return module, module.parse_args(flags)


def clipped(module, args):
    """The arguments that SB3 is to equal, of clipped PPO."""
    if hasattr(args, "num_steps") and hasattr(args, "num_minibatches"):
        return args
    from gymnasium.spaces import Box

    continuous = isinstance(module.make_env(args.env_id).action_space, Box)
    own = {name: getattr(args, name) for name in ("env_id", "seed", "total_timesteps", "cuda")}
    own["num_threads"] = args.num_threads
    return SimpleNamespace(**(CLEANRL | ({} if continuous else DISCRETE) | own))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def backend(args) -> str:
    """Who steps the script's environments."""
    return getattr(args, "env_backend", "envpool" if hasattr(args, "env_threads") else "gymnasium")


def pool(module, args):
    """The script's EnvPool."""
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

    envs = sb3_envs(module, args)
    if len(envs.observation_space.shape) == 3:  # SB3's defaults for pixels are the same network
        policy, net = "CnnPolicy", {}
    else:
        sizes = {"pi": [64, 64], "vf": [64, 64]}
        policy, net = "MlpPolicy", {"net_arch": sizes, "activation_fn": torch.nn.Tanh}
    return PPO(
        policy,
        envs,
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
    args = clipped(module, args)
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


def refuse(message: str):
    print(f"peers.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: list[str]):
    peers = {"sb3": sb3, "bare": bare}
    if len(argv) < 2 or argv[0] not in peers or not Path(argv[1]).is_file() or not fit(argv[1:2]):
        refuse("give sb3 or bare, a script that has parse_args, and its flags")
    kind, script, *flags = argv
    if kind == "sb3" and importlib.util.find_spec("stable_baselines3") is None:
        refuse("sb3 needs stable_baselines3: pip install stable-baselines3")
    module, args = parse(script, flags)
    steps = peers[kind](module, args)
    folder = args.run_dir or Path("runs") / f"{kind}__{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    info = {"script": f"{kind}.py", "seed": args.seed, "args": {"env_id": args.env_id}}
    info |= {"status": "finished", "global_step": steps}
    (folder / "run.json").write_text(json.dumps(info) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
