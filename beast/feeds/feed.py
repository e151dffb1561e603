"""What a feed is: rows for the agent to act on, rollouts to train on, whatever carries them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from beast.clock import Laps
from beast.envs.env_metrics import EnvMetrics
from beast.feeds.processes import Child


class Rows(NamedTuple):
    """The newest rows of one or more groups of environments, which wait for their actions."""

    inputs: dict[str, Any]
    """All that environments and the feed write into a row (`envs/rows.py`), and `action`, the last one; each
    [1, N, …], on the device."""
    core_state: tuple
    """The core's state before these rows, tensors [layers, N, …]."""
    answer: Callable
    """`answer(action, policy_logits, baseline, version, core_state)` sends the actions back. All are of these rows,
    [1, N, …], but `core_state`, the one after them. `version` is the learner update whose weights chose, one number for
    all or int32 [1, N] on the CPU. Fields that a feed was opened with beside its own are given by name, on
    the CPU."""


class Consumer(NamedTuple):
    """Whom a feed works for, as far as it is told."""

    device: torch.device
    core_state: tuple
    """The core's state of one environment that begins, tensors [layers, 1, …]."""
    newest_update: Callable[[], int]
    """The number of the learner's newest update."""
    record_games: Callable[[dict], None]
    """Takes the rows of a rollout, numpy arrays [T+1, B] by field, in which games may have ended."""
    laps: Laps
    """Of the thread that trains."""
    max_policy_lag: int = 0
    """Drop a rollout whose oldest action would be more updates old than this in its last update; 0 drops none."""


class Feed:
    """Brings rows to act on and rollouts to train on, each to a thread of its own; `close`, from any thread, ends both
    loops."""

    description: str
    """Its environments and memory, for the log's first line."""
    workers: dict[str, Callable[[], dict[str, float]]]
    """Whoever else works for the feed: a name, and a function that gives the seconds by stage so far."""
    cores: dict[str, Callable[[], float]]
    """Processes on this machine: a name, and a function that gives their CPU seconds so far."""

    def __init__(self, consumer: Consumer, processes: Sequence[Child] | None):
        """`processes` step the environments, where they are of this machine."""
        self.consumer, self.device = consumer, consumer.device
        self.cores = {}
        if processes is not None:
            self.cores = {"envs": lambda: sum(process.total_cpu_seconds() for process in processes)}
        self.laps = Laps()  # of the thread that acts
        self.env_metrics = EnvMetrics()
        self.dropped_rollouts = 0
        self.closed = threading.Event()

    def acting(self) -> Iterator[Rows]:
        """Rows whenever groups are ready. Answer them before asking for the next."""
        raise NotImplementedError

    def rollouts(self, limit: float | None = None) -> Iterator[tuple[dict, tuple]]:
        """Rollouts [T+1, B, …] (docs/rollout.md) with the core's state before row 0, on the device.

        A rollout is valid until the next one is asked for. The loop ends when the feed closes, and when nothing has
        come for `limit` seconds; then ask again. A rollout that waits for others meanwhile keeps the lag it came with.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End both loops."""
        raise NotImplementedError

    def measure(self, seconds: float, shares: dict[str, float]) -> dict[str, float]:
        """Metrics over the `seconds` since the last call, of which `shares` are the profile's."""
        limit = self.consumer.max_policy_lag
        bound = {"stats/policy_lag_bound": limit} if limit else {}
        return {**bound, "stats/dropped_rollouts": self.dropped_rollouts, **self.env_metrics.take()}

    def _accept(self, rollout: dict, lag: int) -> bool:
        """Record the games that ended in a rollout of numpy arrays; False if its `lag` is too high."""
        self.consumer.record_games({name: x for name, x in rollout.items() if not isinstance(x, dict)})
        self.consumer.laps.lap("records")
        is_too_old = 0 < self.consumer.max_policy_lag < lag
        self.dropped_rollouts += is_too_old
        return not is_too_old
