"""Episodes that begin ahead: while an environment plays one, a thread makes the next."""

import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np


class ResetAhead(gymnasium.Env):
    """An environment that is made twice: while one plays an episode, a thread of this process resets the other.

    That hides resets which take long, where the process waits for actions or the reset leaves Python's GIL free. Seeds
    decide all episodes, but they are others than those of one environment.
    """

    def __init__(self, make: Callable[[], gymnasium.Env]):
        self._env = make()
        try:
            self._other = make()
        except BaseException:
            self._env.close()
            raise
        self._begun: Future | None = None  # the reset of the other
        self._begin: Callable[[], Any] = self._other.reset
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.metadata, self.render_mode = self._env.metadata, self._env.render_mode
        self.spec = self._env.spec

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def unwrapped(self) -> gymnasium.Env:
        """That of the one which plays now."""
        return self._env.unwrapped

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        begun, self._begun = self._begun, None
        if begun is None or seed is not None or options:
            if begun is not None:
                begun.exception()  # wait for its end: what it began is not played
            first = self._env.reset(seed=seed, options=options)
            seed = None if seed is None else int(np.random.SeedSequence([seed, 1]).generate_state(1)[0] >> 2)
            self._begin = functools.partial(self._other.reset, seed=seed)
        else:
            first = self._begin() if begun.cancel() else begun.result()  # others' resets may be in front of it
            self._env, self._other = self._other, self._env
            self._begin = self._other.reset
        self._begun = _thread().submit(self._begin)
        return first

    def step(self, action):
        return self._env.step(action)

    def render(self):
        return self._env.render()

    def close(self) -> None:
        if self._begun and not self._begun.cancel():
            self._begun.exception()
        self._begun = None
        try:
            self._env.close()
        finally:
            self._other.close()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """Of this process. It yields to all others."""

    def yield_to_others() -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

    sys.setswitchinterval(SWITCH_SECONDS)
    return ThreadPoolExecutor(1, "beast-resets", yield_to_others)


SWITCH_SECONDS = 5e-4  # after which a reset in Python lets a step go on; Python's own 5 ms are several steps
