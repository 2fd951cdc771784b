"""Pusher-v4 by EnvPool: gymnasium's own refuses to run on MuJoCo 3. To a script it is
`--env-id benchmark.published.pusher:Pusher-v4`."""

import envpool
import gymnasium as gym


class Pusher(gym.Env):
    pool = envpool.make_gymnasium("Pusher-v4", num_envs=1, num_threads=1)
    observation_space, action_space = pool.observation_space, pool.action_space

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.pool = envpool.make_gymnasium("Pusher-v4", num_envs=1, num_threads=1, seed=seed)
        return self.pool.reset()[0][0], {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.pool.step(action[None])
        return obs[0], reward[0], terminated[0], truncated[0], {}


gym.register("Pusher-v4", Pusher)
