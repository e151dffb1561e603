"""Rollout memory: the slots that actors, inference and learner all work in.

A slot holds T+1 rows of K columns (one group's rollout). The memory is an anonymous file: it has no name that could
collide with another run's or be left behind, and the kernel frees it with its last process, whatever kills that.
"""

import math
import mmap
import os
import weakref
from typing import Any

import numpy as np

from beast.envs.rows import nest_observations
from beast.errors import OutOfMemory
from beast.files import anonymous_file
from beast.machine import available_memory

ALIGNMENT = 4096  # bytes: every field starts on a page, so that it can be pinned for a GPU
REMEDY = "use a smaller --num_slots, a narrower --group_width, fewer --num_actors or a shorter --unroll_length"
Fields = dict[str, tuple[tuple[int, ...], str]]  # name -> shape and dtype


class SlotArrays:
    """Slots of rollouts: each field is one array, or tensor, `[num_slots, T+1, K, *shape]` in `arrays`."""

    arrays: dict[str, Any]

    def row(self, slot: int, row: int) -> dict:
        """One row as views `[K, *shape]`; observations under `row["obs"][name]`."""
        return nest_observations({name: array[slot, row] for name, array in self.arrays.items()})

    def repeat_last_row(self, previous: int, slot: int) -> None:
        """Copy row T of slot `previous` to row 0 of `slot`: consecutive rollouts of a group overlap by one row."""
        for array in self.arrays.values():
            array[slot, 0] = array[previous, -1]


def unwritten(name: str, dtype: str) -> float:
    """What a field holds before anybody writes it, so that a read of such a row shows at once. The net sees the final
    observations of all columns, and few of them are ever written: they are 0."""
    kind = np.dtype(dtype).kind
    poison = np.nan if kind == "f" else np.iinfo(dtype).max if kind in "iu" else True
    return 0 if name.startswith("final_obs/") else poison


class RolloutMemory(SlotArrays):
    """The arrays of all slots in one anonymous file that other processes map by its descriptor.

    `fields` maps a name to (shape, dtype) of one column of one row, as `rollout_fields` does. Each field is one array
    `[num_slots, T+1, K, *shape]` in `arrays`. `categories` are for actors to compare with those of their environments
    (`categories_by_part`). Raises OutOfMemory when the machine has not so much memory.
    """

    def __init__(
        self, fields: Fields, num_slots: int, unroll_length: int, group_width: int,
        categories: dict[str, str] | None = None, fd: int | None = None,
    ):  # fmt: skip
        self.categories = categories or {}
        self.fields = {name: (tuple(shape), str(np.dtype(dtype))) for name, (shape, dtype) in fields.items()}
        self.num_slots, self.unroll_length, self.group_width = num_slots, unroll_length, group_width
        places, self.num_bytes = {}, 0
        for name, (shape, dtype) in self.fields.items():
            shape = (num_slots, unroll_length + 1, group_width, *shape)
            places[name] = shape, dtype, self.num_bytes
            self.num_bytes += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.fd = _memory_of(self.num_bytes) if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        self.buffer = np.frombuffer(mmap.mmap(self.fd, self.num_bytes), np.uint8)  # all arrays
        self.arrays = {name: np.ndarray(shape, dtype, self.buffer, at) for name, (shape, dtype, at) in places.items()}
        if fd is None:
            for name, array in self.arrays.items():  # missing memory is noticed now, not later
                array.fill(unwritten(name, array.dtype.str))

    def description(self) -> dict:
        """What another process that has the file descriptor needs to map the same arrays: JSON-compatible."""
        names = ("fields", "num_slots", "unroll_length", "group_width", "categories", "fd")
        return {name: getattr(self, name) for name in names}

    def rollout(self, slot: int) -> dict:
        """One whole slot as views `[T+1, K, *shape]`; observations under `rollout["obs"][name]`."""
        return nest_observations({name: array[slot] for name, array in self.arrays.items()})


def _memory_of(size: int) -> int:
    """A descriptor of `size` bytes of memory without a name. Raises OutOfMemory when there is not so much."""
    available = available_memory()
    if size > available:
        raise OutOfMemory(f"the rollout slots need {size / 1e6:.0f} MB and {available / 1e6:.0f} MB are free: {REMEDY}")
    try:
        return anonymous_file("beast-rollouts", size)
    except OSError as error:
        raise OutOfMemory(f"the rollout slots need {size / 1e6:.0f} MB of shared memory ({error}): {REMEDY}") from error
