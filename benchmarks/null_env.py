"""Environments that do no work, with observations as large as Atari's: what is left is the plumbing.

PYTHONPATH=benchmarks python monobeast.py --env null_env:Null-v0
"""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


class NullVectorEnv(VectorEnv):
    """The same random image for ever; no reward, no end."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.single_action_space = spaces.Discrete(4)
        self._observations = np.random.default_rng(1).integers(0, 256, (num_envs, 4, 84, 84), np.uint8)
        self._nothing, self._never = np.zeros(num_envs), np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        return self._observations, {}

    def step(self, actions):
        return self._observations, self._nothing, self._never, self._never, {}


gymnasium.register("Null-v0", vector_entry_point=NullVectorEnv)
