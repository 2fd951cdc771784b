"""What a script's speed is measured beside: programs that take the script's own flags.

    python benchmark/peers.py sb3 ppo_continuous_action.py --env-id HalfCheetah-v4 --num-envs 4
    python benchmark/peers.py bare ppo.py --env-id CartPole-v1 --total-timesteps 100000

`sb3` trains Stable-Baselines3's PPO with the script's hyper-parameters, but an entropy bonus that
falls or adapts stays constant there; with --env-workers each environment has its own process.
`bare` steps the environments with random actions. Both leave a run.json with the number of steps. A
script takes part if it has `parse_args` and `make_env` and, for sb3, the flags of clipped PPO.
"""

import importlib
import json
import sys
from pathlib import Path


def fit(kind: str, words: list[str]) -> bool:
    """Whether a command's script can have such a peer."""
    text = "".join(Path(word).read_text() for word in words if word.endswith(".py"))
    needed = [
        "def parse_args(",
        "def make_env(",
        *(["    num_minibatches:"] if kind == "sb3" else []),
    ]
    return all(f"\n{part}" in text for part in needed)


def parse(script: str, flags: list[str]):
    """A script as a module, and what it makes of the flags."""
    path = Path(script).resolve()
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    return module, module.parse_args(flags)


def sb3_envs(module, args):
    import gymnasium as gym
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    def make():
        env = module.make_env(args.env_id)
        if getattr(args, "scale_actions", False) and env.action_space.is_bounded():
            env = gym.wrappers.RescaleAction(env, -1.0, 1.0)
        return Monitor(env)

    kind = SubprocVecEnv if getattr(args, "env_workers", 0) else DummyVecEnv
    envs = kind([make] * args.num_envs)
    continuous = isinstance(envs.action_space, gym.spaces.Box)
    return VecNormalize(envs, gamma=args.gamma) if continuous else envs


def sb3_model(module, args):
    """SB3's PPO with a script's hyper-parameters."""
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(args.num_threads)
    batch = args.num_envs * args.num_steps
    iterations = max(1, args.total_timesteps // batch)

    def rate(left: float) -> float:  # SB3 counts the rollout it is about to learn from as done
        return args.learning_rate * (left + 1 / iterations if args.anneal_lr else 1.0)

    net = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
    return PPO(
        "MlpPolicy",
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
        vf_coef=args.vf_coef / 2,  # SB3's squared error has no 1/2
        max_grad_norm=args.max_grad_norm,
        target_kl=args.target_kl and args.target_kl / 1.5,  # SB3 stops at 1.5 times it
        policy_kwargs=net | {"ortho_init": True, "log_std_init": getattr(args, "log_std_init", 0)},
        seed=args.seed,
        device="cuda" if args.cuda and torch.cuda.is_available() else "cpu",
    )


def sb3(module, args) -> int:
    """Train SB3's PPO; returns the number of environment steps."""
    model = sb3_model(module, args)
    batch = args.num_envs * args.num_steps
    if args.total_timesteps >= batch:  # a shorter run trains nothing, as in our scripts
        model.learn(args.total_timesteps // batch * batch)
    return model.num_timesteps


def bare(module, args) -> int:
    """Step with random actions; returns the number of environment steps."""
    envs = [module.make_env(args.env_id) for _ in range(args.num_envs)]
    for env in envs:
        env.reset(seed=args.seed)
    space = envs[0].action_space
    space.seed(args.seed)
    actions = [space.sample() for _ in range(1000)]
    rounds = args.total_timesteps // args.num_envs
    for k in range(rounds):
        for i, env in enumerate(envs):
            _, _, terminated, truncated, _ = env.step(actions[(k + i) % 1000])
            if terminated or truncated:
                env.reset()
    return rounds * args.num_envs


def main(argv: list[str]):
    module, args = parse(argv[1], argv[2:])
    steps = {"sb3": sb3, "bare": bare}[argv[0]](module, args)
    folder = args.run_dir or Path("runs", f"{argv[0]}__{args.seed}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"global_step": steps}))


if __name__ == "__main__":
    main(sys.argv[1:])
