"""Breakout in which one actor process is slow: `uneven_env:Uneven-v0`, for benchmarks/uneven.py.

The process that creates the file $UNEVEN_LOCK first steps $UNEVEN_FACTOR times as slowly as the others.
"""

from __future__ import annotations

import os
import time

import gymnasium
from gymnasium.vector import VectorWrapper

from beast.envs import make


class Uneven(VectorWrapper):
    """Sleeps after each step of the slow process."""

    is_slow: bool | None = None  # of this process

    def __init__(self, num_envs: int, **kwargs):
        super().__init__(make("BreakoutNoFrameskip-v4", num_envs))
        if num_envs > 1 and Uneven.is_slow is None:  # one environment is a probe of the spaces
            try:
                os.close(os.open(os.environ["UNEVEN_LOCK"], os.O_CREAT | os.O_EXCL))
                Uneven.is_slow = True
            except FileExistsError:
                Uneven.is_slow = False

    def step(self, actions):
        began = time.monotonic()
        result = self.env.step(actions)
        if self.is_slow:
            time.sleep((float(os.environ["UNEVEN_FACTOR"]) - 1) * (time.monotonic() - began))
        return result


gymnasium.register("Uneven-v0", vector_entry_point=Uneven, entry_point=lambda: None)
