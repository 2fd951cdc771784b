"""Pusher-v4 by EnvPool, because gymnasium's own refuses to run on MuJoCo 3. A script plays it by
`--env-id benchmark.published.pusher:Pusher-v4`."""

from functools import partial

import envpool
import gymnasium as gym

make = partial(envpool.make_gymnasium, "Pusher-v4", num_envs=1, num_threads=1)


class Pusher(gym.Env):
    pool = make(seed=0)
    observation_space = pool.observation_space
    action_space = pool.action_space

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.pool = make(seed=seed % 2**31)
        return self.pool.reset()[0][0], {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.pool.step(action[None])
        return obs[0], reward[0], terminated[0], truncated[0], {}


gym.register("Pusher-v4", Pusher)
