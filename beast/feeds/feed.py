"""What a feed is: rows for the agent to act on, rollouts to train on, whatever carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from beast.run.profile import Laps


class Rows(NamedTuple):
    """The newest rows of one or more groups of environments, which wait for their actions."""

    inputs: dict[str, Any]
    """`obs[name]`, `reward`, `done`, `group`, `life`, and `action`, the last one; each [1, N, …], on the device."""
    core_state: tuple
    """The core's state before these rows, tensors [layers, N, …]."""
    answer: Callable
    """`answer(action, policy_logits, baseline, version, core_state)` sends the actions back. All are of these rows,
    [1, N, …], but `version`, the learner update whose weights chose, and `core_state`, the one after them."""


class Feed(Protocol):
    """One thread acts, another one trains; `close`, from any thread, ends the loops of both."""

    laps: Laps  # of the thread that acts

    def acting(self) -> Iterator[Rows]:
        """Rows whenever groups are ready. Answer them before asking for the next."""

    def rollouts(self) -> Iterator[tuple[dict, tuple]]:
        """Rollouts [T+1, B, …] (docs/rollout.md) with the core's state before row 0, on the device.

        Their memory goes back to the environments when the next one is asked for.
        """

    def close(self) -> None:
        """End both loops."""

    def workers(self) -> dict[str, Callable[[], dict[str, float]]]:
        """Whoever else works for the feed: a name, and a function that gives the seconds by stage so far."""

    def cores(self) -> dict[str, Callable[[], float]]:
        """Processes on this machine: a name, and a function that gives their CPU seconds so far."""

    def measure(self, seconds: float, shares: dict[str, float]) -> dict[str, float]:
        """Statistics over the `seconds` since the last call, of which `shares` are the profile's."""
