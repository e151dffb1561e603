"""Environments that do no work, with observations as large as Atari's: what is left is the plumbing.

PYTHONPATH=benchmarks python monobeast.py --env null_env:Null-v0
"""

import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

core = threading.Lock()  # of the groups of one process, where a step takes time


class NullVectorEnv(VectorEnv):
    """The same random bytes for ever; no reward, no end. With `step_ms` all groups of a process share a core, on which
    a step of one environment takes so long; no CPU time is used."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int, shape=(4, 84, 84), step_ms: float = 0.0):
        self.num_envs, self._seconds = num_envs, num_envs * step_ms / 1e3
        self.single_observation_space = spaces.Box(0, 255, tuple(shape), np.uint8)
        self.single_action_space = spaces.Discrete(4)
        self._observations = np.random.default_rng(1).integers(0, 256, (num_envs, *shape), np.uint8)
        self._nothing, self._never = np.zeros(num_envs), np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        return self._observations, {}

    def step(self, actions):
        if self._seconds:
            with core:
                time.sleep(self._seconds)
        return self._observations, self._nothing, self._never, self._never, {}


gymnasium.register("Null-v0", vector_entry_point=NullVectorEnv)
