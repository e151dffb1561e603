"""Environments that only an env server's tests need: `server_toys:Scalar-v0` and so on, with tests/ on the path."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces

from beast.envs.probe import SEED
from beast.hosts.wire import DTYPES

_meeting = threading.Barrier(2, timeout=60)


class _Toy(gymnasium.Env):
    """Observes `self.space.sample()`; episodes of 3 steps."""

    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.count += 1
        return self.observation_space.sample(), 0.5, self.count == 3, False, {}


class Scalar(_Toy):
    """A Discrete and a Box of shape (): zero-dimensional both. One is called `reward`, and is none."""

    observation_space = spaces.Dict({"reward": spaces.Discrete(5), "level": spaces.Box(0, 1, (), np.float32)})


class Large(_Toy):
    """6 MB an observation, which is more than gRPC lets through by default."""

    observation_space = spaces.Box(0, 255, (6_000_000,), np.uint8)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._observation(), {}

    def step(self, action):
        self.count += 1
        return self._observation(), 0.0, False, False, {}

    def _observation(self):
        return np.full(6_000_000, 7 + self.count, np.uint8)


class Dtypes(_Toy):
    """One field of each dtype that the protocol has, each [2, 3] and laid out as the transpose of a [3, 2]."""

    observation_space = spaces.Dict([(name, spaces.Box(0, 1, (2, 3), np.dtype(name).type)) for name in DTYPES])

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._observation(), {}

    def step(self, action):
        self.count += 1
        return self._observation(), 0.0, False, False, {}

    def _observation(self):
        return {name: (np.arange(6).reshape(3, 2).T % 2 == self.count % 2).astype(name) for name in DTYPES}


class _InSecondStep(_Toy):
    """Does something in its second step, before the step is done, but not for `probe_env`."""

    observation_space = spaces.Discrete(2)
    is_probed = False

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.is_probed = seed in (SEED, SEED + 1)
        return super().reset(seed=seed)

    def step(self, action):
        if self.count == 1 and not self.is_probed:
            self.do()
        return super().step(action)

    def do(self):
        raise NotImplementedError


class Meeting(_InSecondStep):
    """A second step that ends only when another environment of this process is in its own at the same time."""

    def do(self):
        _meeting.wait()


class CannotBeMade(_Toy):
    def __init__(self):
        raise RuntimeError("this toy cannot be made")


class Prints(_Toy):
    """Greets on stdout when it is made."""

    observation_space = spaces.Discrete(2)

    def __init__(self):
        print("hello from the toy", flush=True)


class Exits(_InSecondStep):
    """Ends the program, it believes."""

    def do(self):
        sys.exit("this toy exits")


class Hangs(_InSecondStep):
    """Says so on stderr and sleeps for an hour."""

    def do(self):
        print("hanging", file=sys.stderr, flush=True)
        time.sleep(3600)


class KeepsGil(_InSecondStep):
    """Says so on stderr and sleeps for an hour with the GIL, as an endless loop in C does."""

    def do(self):
        print("hanging", file=sys.stderr, flush=True)
        ctypes.PyDLL(None).sleep(3600)


for _toy in (Scalar, Large, Dtypes, Meeting, CannotBeMade, Prints, Exits, Hangs, KeepsGil):
    gymnasium.register(f"{_toy.__name__}-v0", f"server_toys:{_toy.__name__}")
