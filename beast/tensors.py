"""Batches as nested dicts of tensors, what a rollout holds, and weights that a learner hands to inference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from gymnasium import Space
from torch import nn

from beast.distributions import action_shape_dtype, policy_width
from beast.envs import observation_field
from beast.machine import Fence
from beast.rollout import RolloutMemory, nest_observations


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


# What inference writes into a row; all other fields are its environments'.
AGENT_FIELDS = ("action", "policy_logits", "baseline", "policy_version")


class SlotTensors:
    """The slots of a rollout memory as tensors where the net computes; inference and learner both read them there.

    On a CPU they are the shared memory itself. Elsewhere they are its twin: a row goes up once, when its environments
    have written it, and only actions come down. `full` and `free` have a fence for each slot: inference sets `full`
    when all rows of a rollout are queued, the learner `free` when all its work on them is.
    """

    def __init__(self, memory: RolloutMemory, device: torch.device, is_twin: bool | None = None):
        """`is_twin` is for tests: a twin on a CPU."""
        self.memory, self.device = memory, device
        self.is_twin = device.type != "cpu" if is_twin is None else is_twin
        self._shared = {name: torch.from_numpy(array) for name, array in memory.arrays.items()}
        self._tensors = (
            {name: torch.empty_like(x, device=device) for name, x in self._shared.items()}
            if self.is_twin
            else self._shared
        )
        self._env_fields = [name for name in self._tensors if name not in AGENT_FIELDS]
        self._rows: dict[tuple[int, int], dict] = {}
        self.full = [Fence(device) for _ in range(memory.num_slots)]
        self.free = [Fence(device) for _ in range(memory.num_slots)]

    def row(self, slot: int, row: int) -> dict:
        """One row as views [1, K, …]; observations under `row["obs"][name]`."""
        if (slot, row) not in self._rows:
            views = {name: tensor[slot, row : row + 1] for name, tensor in self._tensors.items()}
            self._rows[slot, row] = nest_observations(views)
        return self._rows[slot, row]

    def rollout(self, slot: int) -> dict:
        """One whole slot as views [T+1, K, …]."""
        # `data`: autograd need not know that inference writes other slots of the same tensor meanwhile.
        return nest_observations({name: tensor.data[slot] for name, tensor in self._tensors.items()})

    def begin(self, slot: int) -> None:
        """No action led to row 0 of new environments."""
        for name in AGENT_FIELDS:
            self._tensors[name][slot, 0] = 0

    def repeat_last_row(self, previous: int, slot: int) -> None:
        """Copy row T of slot `previous` to row 0 of `slot`: consecutive rollouts of a group overlap by one row."""
        self.memory.repeat_last_row(previous, slot)
        if self.is_twin:
            for tensor in self._tensors.values():
                tensor[slot, 0] = tensor[previous, -1]

    def upload(self, slot: int, row: int) -> None:
        """Take over what the environments have written into a row."""
        if self.is_twin:
            for name in self._env_fields:
                self._tensors[name][slot, row].copy_(self._shared[name][slot, row], non_blocking=True)

    def download_actions(self, rows: list[tuple[int, int]]) -> None:
        """Give the environments of these slots and rows their actions; returns when they can read them."""
        if self.is_twin:
            for slot, row in rows:
                self._shared["action"][slot, row].copy_(self._tensors["action"][slot, row], non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()


class SeenObservations:
    """The latest observations that inference has seen, kept on its GPU, so that the learner need not upload them again.

    `keep` numbers the observations, the numbers travel through the rollouts with the actions, and `find` looks them up.
    On a CPU there is nothing to save: nothing is kept, and all numbers are 0.
    """

    def __init__(self, num_observations: int, device: torch.device, is_keeping: bool | None = None):
        """Finds the last `num_observations`, less at most one batch of inference's; takes memory of the device for
        twice as many. `is_keeping` is for tests: to keep them on a CPU."""
        self._half, self._device = num_observations, device
        self._is_keeping = device.type != "cpu" if is_keeping is None else is_keeping
        self._kept: dict[str, torch.Tensor] = {}
        self._next = 0  # number n lies at n modulo twice `num_observations`
        self._lock = threading.Lock()
        self._found = Fence(device)

    def keep(self, observations: dict) -> torch.Tensor:
        """Take in what inference has on its device, [1, K, …] by name; the numbers [1, K], on the CPU.

        They may go to the learner as soon as the host has waited for inference's stream.
        """
        count = next(iter(observations.values())).shape[1]
        if not self._is_keeping:
            return torch.zeros(1, count, dtype=torch.int64)
        size = 2 * self._half
        if not self._kept:
            self._kept = {name: x.new_empty((size, *x.shape[2:])) for name, x in observations.items()}
        with self._lock:
            first = self._next if self._next % size + count <= size else self._next + size - self._next % size
            if self._next // self._half != (first + count) // self._half:
                self._found.wait()  # the other half is written over next; the learner's stream may be behind
            for name, x in observations.items():
                self._kept[name][first % size : first % size + count] = x[0]
            self._next = first + count
        return torch.arange(first, first + count).unsqueeze(0)

    def find(self, observations: dict, numbers: torch.Tensor) -> dict:
        """A batch's observations [T+1, B, …] on the device, by its own copies of them and `numbers` [T+1, B], both on
        the CPU. Row t+1 of `numbers` is that of observation t.

        The last row always goes up again, as its number is not known before the next rollout, and so does everything
        if not all are still kept.
        """
        if self._is_keeping:
            # Outside of the lock: for pageable memory the host may have to wait, and inference shall not.
            places = (numbers[1:] % (2 * self._half)).to(self._device, non_blocking=True)
            last = map_tensors(lambda x: x[-1:].to(self._device, non_blocking=True), observations)
            with self._lock:
                if int(numbers[1:].min()) >= self._next - self._half:
                    found = {name: torch.cat([self._kept[name][places], last[name]]) for name in observations}
                    self._found.set()
                    return found
        return map_tensors(lambda x: x.to(self._device, non_blocking=True), observations)


class PublishedWeights:
    """Two copies of a net for inference: the learner writes the one that is not in use, then they swap roles.

    `net` is a variant's `Net`; its `inference_copy()` may hold the same weights in a lower precision.
    """

    def __init__(self, net: nn.Module, version: int, is_compiled: bool = False):
        self._copies = [net.inference_copy() for _ in range(2)]
        if is_compiled:
            for mine in self._copies:
                mine.forward = torch.compile(mine.forward)
        self._locks = [threading.Lock() for _ in range(2)]
        device = next(net.parameters()).device
        self._written = [Fence(device) for _ in range(2)]
        self._read = [Fence(device) for _ in range(2)]
        self._versions = [version, version]
        self._current = 0

    @torch.no_grad()
    def publish(self, net: nn.Module, version: int) -> None:
        """Give inference the weights (and buffers) after learner update number `version`."""
        spare = 1 - self._current
        with self._locks[spare]:  # waits only for a forward pass that began two updates ago
            self._read[spare].wait()
            for mine, theirs in zip(self._copies[spare].state_dict().values(), net.state_dict().values()):
                mine.copy_(theirs)
            self._written[spare].set()
            self._versions[spare] = version
        self._current = spare

    @contextlib.contextmanager
    def newest(self):
        """The net to act with, and the learner update that its weights come from."""
        current = self._current
        with self._locks[current]:
            self._written[current].wait()
            yield self._copies[current], self._versions[current]
            self._read[current].set()
