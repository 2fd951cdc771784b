"""The old gym's wrapper for EnvPool's present environments: a step gives four results, not five."""

from gymnasium import spaces

__all__ = ["Wrapper", "spaces"]


class Wrapper:
    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, **options):
        return self.env.reset()[0]

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated | truncated, info
