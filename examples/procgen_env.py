"""Procgen's games for gymnasium, whose interface the package does not have: `--env examples.procgen_env:coinrun-v0`.

Procgen needs Python 3.10 or older. An env server of that Python has the games, without torch:
`pip install -r requirements-env.txt procgen gym`.
"""

from functools import partial

import gym
import gymnasium
import numpy as np
import procgen.env
from gymnasium import spaces


class Procgen(gymnasium.Env):
    """Images [64, 64, 3] and 15 actions. An episode that ends has terminated. A game draws its levels itself, so it is
    seeded when it is made: by `rand_seed` in --env_kwargs."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(self, name: str, render_mode: str | None = None, **kwargs):
        self.render_mode, self._image = render_mode, None
        self._env = gym.make(f"procgen:procgen-{name}-v0", disable_env_checker=True, **kwargs).unwrapped
        self.observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = spaces.Discrete(15)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._image = self._env.reset()
        return self._image, {}

    def step(self, action):
        self._image, reward, done, info = self._env.step(int(action))
        return self._image, float(reward), bool(done), False, {}

    def render(self):
        return self._image


for name in procgen.env.ENV_NAMES:
    gymnasium.register(f"{name}-v0", partial(Procgen, name))
