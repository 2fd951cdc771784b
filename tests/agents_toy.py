"""Environments of several agents whose best policy is known, for tests of ppo_pettingzoo.py: named
on the command line as agents_toy:make and the like, with this folder on PYTHONPATH."""

import gymnasium as gym
import numpy as np
from pettingzoo import AECEnv, ParallelEnv


class Drawn(ParallelEnv):
    """What all need that can be drawn."""

    metadata = {"name": "toy", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def render(self):
        return np.full((64, 64, 3), self.t, np.uint8)


class Watch(Drawn):
    """A scout with three choices, of which its mask allows two, and two guards with two choices.
    The right choice pays 1, a wrong one kills; after 20 steps time is up. The scout sees which is
    right in three numbers, a guard in one. The best return is 20 each, 60 in all."""

    possible_agents = ["scout", "guard_0", "guard_1"]  # noqa: RUF012

    def __init__(self, limit: int = 20, render_mode=None):
        self.limit, self.render_mode = limit, render_mode

    def observation_space(self, agent):
        return gym.spaces.Box(-1, 1, (3,) if agent == "scout" else (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(3 if agent == "scout" else 2)

    def look(self):
        self.right, observations, infos = {}, {}, {agent: {} for agent in self.agents}
        for agent in self.agents:
            right = self.right[agent] = int(self.rng.integers(3 if agent == "scout" else 2))
            observations[agent] = np.float32([1 - 2 * right])
            if agent == "scout":
                allowed = np.ones(3, np.int8)
                allowed[(right + 1 + self.rng.integers(2)) % 3] = 0
                observations[agent] = np.eye(3, dtype=np.float32)[right]
                infos[agent] = {"action_mask": allowed}
        return observations, infos

    def reset(self, seed=None, options=None):
        self.rng, self.t = np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        return self.look()

    def step(self, actions):
        assert actions.keys() == set(self.agents)
        self.t += 1
        hit = {agent: bool(actions[agent] == self.right[agent]) for agent in self.agents}
        rewards = {agent: float(hit[agent]) for agent in self.agents}
        terminated = {agent: not hit[agent] for agent in self.agents}
        truncated = {agent: self.t >= self.limit for agent in self.agents}
        observations, infos = self.look()
        self.agents = [a for a in self.agents if hit[a] and self.t < self.limit]
        return observations, rewards, terminated, truncated, infos


class Drift(Drawn):
    """Agents that are alike, with Box actions of different sizes if `sizes` says so; each is paid
    for being near its target, dies where `dies` says, and stops where `stops` says. If `silent`, no
    death is reported: the agent is gone."""

    def __init__(self, sizes=(2, 1), limit=6, dies=None, stops=None, joins=None, silent=False):
        self.possible_agents = [f"drone_{i}" for i in range(len(sizes))]
        self.sizes = dict(zip(self.possible_agents, sizes, strict=True))
        self.dies, self.stops, self.joins = dies or {}, stops or {}, joins or {}
        self.limit, self.silent = limit, silent

    def observation_space(self, agent):
        return gym.spaces.Box(-1, 1, (self.sizes[agent] + 1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Box(-2, 4, (self.sizes[agent],), np.float32)

    def look(self, agents):
        number = {agent: int(agent.split("_")[1]) for agent in agents}
        wave = {a: np.sin(self.phase + self.t + number[a]) for a in agents}
        return {a: np.full(self.sizes[a] + 1, wave[a], np.float32) for a in agents}

    def reset(self, seed=None, options=None):
        self.phase, self.t = np.random.default_rng(seed).uniform(0, 6), 0
        self.agents = [a for a in self.possible_agents if a not in self.joins]
        return self.look(self.agents), {a: {} for a in self.agents}

    def step(self, actions):
        self.t += 1
        acted = list(self.agents)
        rewards = {a: float(1 - np.square(actions[a] - 1).mean()) for a in acted}
        over = self.t >= self.limit
        terminated = {a: self.dies.get(a) == self.t for a in acted}
        truncated = {a: over or self.stops.get(a) == self.t for a in acted}
        seen = self.look(acted)
        joined = [a for a in self.possible_agents if self.joins.get(a) == self.t and not over]
        self.agents = [a for a in acted if not terminated[a] and not truncated[a]] + joined
        seen |= self.look(joined)
        if self.silent:
            terminated = dict.fromkeys(acted, False)
        return seen, rewards, terminated, truncated, {a: {} for a in seen}


class Turns(AECEnv):
    """Two players in turn, three moves each: a move pays its mover 0 or 1, and the other -1. If
    `masks`, who waits has a mask of zeros."""

    metadata = {"name": "turns", "is_parallelizable": False}  # noqa: RUF012

    def __init__(self, masks=True):
        super().__init__()
        self.masks, self.render_mode, self.possible_agents = masks, None, ["first", "second"]

    def observation_space(self, agent):
        return gym.spaces.Dict(
            observation=gym.spaces.Box(0, 6, (1,), np.float32),
            action_mask=gym.spaces.Box(0, 1, (2,), np.int8),
        )

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def observe(self, agent):
        mask = np.full(2, agent == self.agent_selection or not self.masks, np.int8)
        return {"observation": np.float32([self.moves]), "action_mask": mask}

    def reset(self, seed=None, options=None):
        self.agents, self.moves, self.agent_selection = [*self.possible_agents], 0, "first"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def step(self, action):
        mover = self.agent_selection
        if self.terminations[mover]:
            self._was_dead_step(action)
            return
        other = "second" if mover == "first" else "first"
        self.rewards = {mover: float(action), other: -1.0}
        self.moves += 1
        self.terminations = dict.fromkeys(self.agents, self.moves == 6)
        self.agent_selection = other


class Duel(Drawn):
    """Two players see one screen, of which the left or the right half is lit: the first must choose
    that half, the second the other one, which pays a point that the opponent loses. The corner
    shows the step; after `limit` steps time is up. Observations are images of bytes, or Dicts with
    the image, which half of another screen is lit (noise), and a mask that forbids choice 2."""

    possible_agents = ["first", "second"]  # noqa: RUF012

    def __init__(self, limit=5, dicts=False, size=40, wide=0, render_mode=None):
        self.limit, self.dicts, self.size, self.wide = limit, dicts, size, wide
        self.render_mode = render_mode

    def observation_space(self, agent):
        wide = self.size + (self.wide if agent == "second" else 0)
        image = gym.spaces.Box(0, 255, (self.size, wide, 1), np.uint8)
        if not self.dicts:
            return image
        noise, mask = gym.spaces.Discrete(2), gym.spaces.Box(0, 1, (3,), np.int8)
        return gym.spaces.Dict(screen=image, noise=noise, action_mask=mask)

    def action_space(self, agent):
        return gym.spaces.Discrete(3 if self.dicts else 2)

    def look(self):
        self.half = int(self.rng.integers(2))
        screen = np.zeros((self.size, self.size, 1), np.uint8)
        screen[:, self.half * self.size // 2 :][:, : self.size // 2] = 255
        screen[0, 0] = self.t
        if not self.dicts:
            return dict.fromkeys(self.agents, screen)
        more = {"noise": int(self.rng.integers(2)), "action_mask": np.int8([1, 1, 0])}
        return {agent: {"screen": screen, **more} for agent in self.agents}

    def reset(self, seed=None, options=None):
        self.rng, self.t, self.agents = np.random.default_rng(seed), 0, [*self.possible_agents]
        return self.look(), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert max(actions.values()) < 2
        self.t += 1
        points = int(actions["first"] == self.half) - int(actions["second"] != self.half)
        seen, acted = self.look(), self.agents
        over = dict.fromkeys(acted, self.t >= self.limit)
        self.agents = [] if self.t >= self.limit else acted
        rewards = {"first": float(points), "second": -float(points)}
        return seen, rewards, dict.fromkeys(acted, False), over, {agent: {} for agent in acted}


make, drift, turns, duel = Watch, Drift, Turns, Duel
