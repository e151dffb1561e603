"""Crafter for gymnasium, whose interface the package does not have: `--env examples.crafter_env:Crafter-v0`."""

import crafter
import gymnasium
import numpy as np
from gymnasium import spaces


class Crafter(gymnasium.Env):
    """Images [64, 64, 3] and 17 actions. Death terminates an episode, its 10,000 steps truncate it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, size: int = 64, render_mode: str | None = None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self._make = lambda seed: crafter.Env(size=(size, size), seed=seed)
        self._env = self._make(None)
        self.action_space = spaces.Discrete(int(self._env.action_space.n))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._env = self._make(seed)
        return self._env.reset(), {}

    def step(self, action):
        image, reward, done, info = self._env.step(int(action))
        is_dead = done and info["discount"] == 0
        return image, float(reward), is_dead, done and not is_dead, {}

    def render(self):
        return self._env.render((256, 256))


gymnasium.register("Crafter-v0", Crafter)
