"""The same tasks in seven units: observations times k plus b, rewards times c. See units.sh."""

from functools import partial
from importlib import import_module

import gymnasium as gym

UNITS = {"k1": (1, 0, 1), "k100": (100, 0, 1), "k0.01": (0.01, 0, 1), "b100": (1, 100, 1)}
UNITS |= {"c100": (1, 0, 100), "c0.01": (1, 0, 0.01), "k100-b50-c100": (100, 50, 100)}


def make(unit: str, module: str, name: str, *given, **options):
    """What a module makes, of gymnasium's form, PettingZoo's or on a device, in another unit."""
    env = getattr(import_module(module), name)(*given, **options)
    reset, step = env.reset, env.step
    k, b, c = UNITS[unit]

    def scaled(x, k=k, b=b):  # of each agent, if there are several
        return {agent: k * y + b for agent, y in x.items()} if isinstance(x, dict) else k * x + b

    def begun(*given, **options):
        obs = reset(*given, **options)
        return (scaled(obs[0]), *obs[1:]) if isinstance(obs, tuple) else scaled(obs)

    def stepped(actions):
        obs, rewards, *others = step(actions)
        return scaled(obs), scaled(rewards, c, 0), *others

    env.reset, env.step = begun, stepped
    return env


for unit in UNITS:
    for task in ("CartPole", "Pendulum"):
        kwargs = {"unit": unit, "module": "gymnasium", "name": "make", "id": f"{task}-v1"}
        gym.register(f"{task}-{unit}-v0", make, kwargs=kwargs)
    for task, *place in (
        ("Pendulum", "ppo_continuous_action_warp", "Pendulum"),
        ("Speaker", "mpe2.simple_speaker_listener_v4", "parallel_env"),
    ):
        globals()[f"{task}-{unit}-v0"] = partial(make, unit, *place)
