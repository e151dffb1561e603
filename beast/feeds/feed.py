"""What a feed is: rows for the agent to act on, rollouts to train on, whatever carries them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from beast.clock import Laps
from beast.envs.groups import finished_episodes
from beast.learn.learner import Learner


class Rows(NamedTuple):
    """The newest rows of one or more groups of environments, which wait for their actions."""

    inputs: dict[str, Any]
    """`obs[name]`, `reward`, `done`, `group`, `life`, and `action`, the last one; each [1, N, …], on the device."""
    core_state: tuple
    """The core's state before these rows, tensors [layers, N, …]."""
    answer: Callable
    """`answer(action, policy_logits, baseline, version, core_state)` sends the actions back. All are of these rows,
    [1, N, …], but `version`, the learner update whose weights chose, and `core_state`, the one after them."""


class Feed:
    """Brings rows to act on and rollouts to train on, each to a thread of its own; `close`, from any thread, ends both.

    A rollout whose oldest action would be more than `max_policy_lag` updates old in its last update is dropped and
    counted; 0 drops none.
    """

    workers: dict[str, Callable[[], dict[str, float]]]
    """Whoever else works for the feed: a name, and a function that gives the seconds by stage so far."""
    cores: dict[str, Callable[[], float]]
    """Processes on this machine: a name, and a function that gives their CPU seconds so far."""

    def __init__(self, learner: Learner, max_policy_lag: int):
        self.learner, self.max_policy_lag = learner, max_policy_lag
        self.device = next(learner.net.parameters()).device
        self.laps = Laps()  # of the thread that acts
        self.dropped_rollouts = 0
        self.closed = threading.Event()
        self.return_columns = slice(None)  # of each rollout: the environments whose games the learner's returns are of

    def acting(self) -> Iterator[Rows]:
        """Rows whenever groups are ready. Answer them before asking for the next."""
        raise NotImplementedError

    def rollouts(self) -> Iterator[tuple[dict, tuple]]:
        """Rollouts [T+1, B, …] (docs/rollout.md) with the core's state before row 0, on the device.

        A rollout is valid until the next one is asked for.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End both loops."""
        raise NotImplementedError

    def measure(self, seconds: float, shares: dict[str, float]) -> dict[str, float]:
        """Statistics over the `seconds` since the last call, of which `shares` are the profile's."""
        bound = {"stats/policy_lag_bound": self.max_policy_lag} if self.max_policy_lag else {}
        return {**bound, "stats/dropped_rollouts": self.dropped_rollouts}

    def _accept(self, rollout: dict, lag: int) -> bool:
        """Record the games that ended in a rollout of numpy arrays; False if its `lag` is too high."""
        with self.learner.updating:
            rows = {name: x[:, self.return_columns] for name, x in rollout.items() if not isinstance(x, dict)}
            self.learner.record_episodes(finished_episodes(rows))
        self.learner.laps.lap("records")
        is_too_old = 0 < self.max_policy_lag < lag
        self.dropped_rollouts += is_too_old
        return not is_too_old
