"""Batches as nested dicts of tensors, what a rollout holds, and weights that a learner hands to inference."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable

import torch
from gymnasium import Space
from torch import nn

from beast.distributions import action_shape_dtype, policy_width
from beast.envs import observation_field


def map_tensors(function: Callable, *batches):
    """Apply a function to every leaf of nested dicts and tuples (of all batches at once, where there are several of
    one shape)."""
    if isinstance(batches[0], dict):
        return {key: map_tensors(function, *(batch[key] for batch in batches)) for key in batches[0]}
    if isinstance(batches[0], tuple):
        return tuple(map_tensors(function, *parts) for parts in zip(*batches))
    return function(*batches)


def join(batches: list[dict], device: torch.device) -> dict:
    """Rollouts or rows [T, B_i, …] side by side as [T, sum of B_i, …] on the device. A single one on a CPU is not
    copied."""
    if len(batches) == 1:
        return map_tensors(lambda x: x.to(device, non_blocking=True), batches[0])
    return map_tensors(lambda *parts: torch.cat([x.to(device, non_blocking=True) for x in parts], dim=1), *batches)


def columns(batch: dict, first: int, count: int) -> dict:
    """Columns of a batch [T, B, …] as views [T, count, …]; leaves may be tensors or numpy arrays."""
    return map_tensors(lambda x: x[:, first : first + count], batch)


def rollout_fields(observation_spaces: dict, action_space: Space) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of everything that one environment has in one row (README.md, "What a row means")."""
    return {
        **{f"obs/{name}": observation_field(space) for name, space in observation_spaces.items()},
        **{name: ((), "float32") for name in ("reward", "baseline", "episode_return")},
        **{name: ((), "bool") for name in ("done", "terminated", "truncated")},
        **{name: ((), "int32") for name in ("episode_step", "policy_version")},
        "action": action_shape_dtype(action_space),
        "policy_logits": ((policy_width(action_space),), "float32"),
    }


class PublishedWeights:
    """Two copies of a net for inference: the learner writes the one that is not in use, then they swap roles."""

    def __init__(self, net: nn.Module, version: int):
        self._copies = [copy.deepcopy(net).eval().requires_grad_(False) for _ in range(2)]
        self._locks = [threading.Lock() for _ in range(2)]
        self._versions = [version, version]
        self._current = 0

    @torch.no_grad()
    def publish(self, net: nn.Module, version: int) -> None:
        """Give inference the weights (and buffers) after learner update number `version`."""
        spare = 1 - self._current
        with self._locks[spare]:  # waits only for a forward pass that began two updates ago
            for mine, theirs in zip(self._copies[spare].state_dict().values(), net.state_dict().values()):
                mine.copy_(theirs)
            self._versions[spare] = version
        self._current = spare

    @contextlib.contextmanager
    def newest(self):
        """The net to act with, and the learner update that its weights come from."""
        current = self._current
        with self._locks[current]:
            yield self._copies[current], self._versions[current]
