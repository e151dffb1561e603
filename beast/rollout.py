"""Rollout memory: the slots that actors, inference and learner all work in, and the order in which they pass on.

A slot holds T+1 rows of K columns (one group's rollout). The memory is an anonymous file: it has no name that could
collide with another run's or be left behind, and the kernel frees it with its last process, whatever kills that.
"""

from __future__ import annotations

import collections
import mmap
import os
import tempfile
import threading
import weakref

import numpy as np

ALIGNMENT = 4096  # bytes: every field starts on a page, so that it can be pinned for a GPU


class RolloutMemory:
    """The arrays of all slots in one anonymous file that other processes map by its descriptor.

    `fields` maps a name to (shape, dtype) of one column of one row; names are those of DESIGN.md section 3, and
    observations are called `obs/<name>`. Each field is one array `[num_slots, T+1, K, *shape]` in `arrays`.
    """

    def __init__(
        self,
        fields: dict[str, tuple[tuple[int, ...], str]],
        num_slots: int,
        unroll_length: int,
        group_width: int,
        fd: int | None = None,
    ):
        self.fields = {name: (tuple(shape), str(np.dtype(dtype))) for name, (shape, dtype) in fields.items()}
        self.num_slots, self.unroll_length, self.group_width = num_slots, unroll_length, group_width
        shapes = {name: (num_slots, unroll_length + 1, group_width, *shape) for name, (shape, _) in self.fields.items()}
        offsets, size = {}, 0
        for name, (_, dtype) in self.fields.items():
            offsets[name] = size
            num_bytes = int(np.prod(shapes[name], dtype=np.int64)) * np.dtype(dtype).itemsize
            size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = size
        self.fd = _anonymous_file(size) if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        self._map = mmap.mmap(self.fd, size)
        self.buffer = np.frombuffer(self._map, np.uint8)  # all arrays
        self.arrays = {
            name: np.frombuffer(self._map, dtype, int(np.prod(shapes[name], dtype=np.int64)), offsets[name]).reshape(
                shapes[name]
            )
            for name, (_, dtype) in self.fields.items()
        }
        self._rows: dict[tuple[int, int], dict] = {}
        if fd is None:
            # A read of a row that nobody wrote shows at once, and memory that is not there is missed now, not later.
            for array in self.arrays.values():
                array.fill(
                    np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max if array.dtype.kind in "iu" else 1
                )

    def description(self) -> dict:
        """What another process needs, beside the file descriptor, to map the same arrays: JSON-compatible."""
        return {
            "fields": self.fields,
            "num_slots": self.num_slots,
            "unroll_length": self.unroll_length,
            "group_width": self.group_width,
        }

    def row(self, slot: int, row: int) -> dict:
        """One row as views `[K, *shape]`; observations under `row["obs"][name]`."""
        if (slot, row) not in self._rows:
            self._rows[slot, row] = nest_observations({name: array[slot, row] for name, array in self.arrays.items()})
        return self._rows[slot, row]

    def rollout(self, slot: int) -> dict:
        """One whole slot as views `[T+1, K, *shape]`; observations under `rollout["obs"][name]`."""
        return nest_observations({name: array[slot] for name, array in self.arrays.items()})

    def repeat_last_row(self, previous: int, slot: int) -> None:
        """Copy row T of slot `previous` to row 0 of `slot`: consecutive rollouts of a group overlap by one row."""
        for array in self.arrays.values():
            array[slot, 0] = array[previous, -1]


def nest_observations(arrays: dict) -> dict:
    """{"obs/image": a, "reward": r} -> {"obs": {"image": a}, "reward": r}."""
    nested: dict = {"obs": {}}
    for name, array in arrays.items():
        if name.startswith("obs/"):
            nested["obs"][name[4:]] = array
        else:
            nested[name] = array
    return nested


def _anonymous_file(size: int) -> int:
    """A descriptor of `size` bytes of memory without a name. Raises MemoryError when there is not so much."""
    hint = "use a smaller --num_slots, a narrower --group_width, fewer --num_actors or a shorter --unroll_length"
    available = _available_memory()
    if available is not None and size > available:
        raise MemoryError(f"the rollout slots need {size / 1e6:.0f} MB and {available / 1e6:.0f} MB are free: {hint}")
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("beast-rollouts")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.truncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"the rollout slots need {size / 1e6:.0f} MB of shared memory ({error}): {hint}") from error
    return fd


def _available_memory() -> int | None:
    """Bytes that can still be allocated (Linux), or None where that is not known."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


class Slots:
    """Which slot is whose. Slots are trained in the order in which they were handed out, so at most
    `num_slots - 1` rollouts are trained between the hand-out of a slot and its own training: that bounds the
    policy lag (see `max_policy_lag`), however uneven the environments are.

    One thread acquires, fills and drops (inference), another takes and releases (the learner).
    """

    def __init__(self, num_slots: int):
        self._free = collections.deque(range(num_slots))
        self._handed_out: collections.OrderedDict[int, bool] = collections.OrderedDict()  # slot -> is it full?
        self._condition = threading.Condition()
        self._closed = False
        self._found_full: list[int] = []  # slots, each time that the learner came and got some

    def acquire(self, prefer: int | None = None, avoid: set[int] = frozenset()) -> int | None:
        """A free slot, if possible `prefer` and in no case one of `avoid`; None when there is none."""
        with self._condition:
            allowed = [slot for slot in self._free if slot not in avoid]
            if not allowed:
                return None
            slot = prefer if prefer in allowed else allowed[0]
            self._free.remove(slot)
            self._handed_out[slot] = False
            return slot

    def fill(self, slot: int) -> None:
        """All rows of the slot are written: the learner may have it when its turn comes."""
        with self._condition:
            self._handed_out[slot] = True
            self._condition.notify_all()

    def drop(self, slot: int) -> None:
        """Give up a slot whose environments were lost before it was full."""
        with self._condition:
            del self._handed_out[slot]
            self._free.append(slot)
            self._condition.notify_all()

    def take(self, count: int, block: bool = True) -> list[int] | None:
        """The `count` slots that were handed out first, once all are full. None when closed, or not `block`."""
        with self._condition:
            num_full = sum(self._handed_out.values())
            while not self._closed:
                first = list(self._handed_out)[:count]
                if len(first) == count and all(self._handed_out[slot] for slot in first):
                    for slot in first:
                        del self._handed_out[slot]
                    self._found_full.append(num_full)
                    return first
                if not block:
                    return None
                self._condition.wait()
            return None

    def release(self, slots: list[int]) -> None:
        """Trained slots may be written again."""
        with self._condition:
            self._free.extend(slots)

    def mean_full(self) -> float:
        """How many full slots the learner found when it came for the next ones, the mean since the last call."""
        with self._condition:
            found, self._found_full = self._found_full, []
            return sum(found) / max(len(found), 1)

    def num_free(self) -> int:
        with self._condition:
            return len(self._free)

    def close(self) -> None:
        """Wake the learner; nothing is handed to it any more."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


def max_policy_lag(num_slots: int, group_width: int, batch_width: int) -> int:
    """The most updates that can lie between the weights that chose an action and the weights it trains.

    From the hand-out of a slot to the last update on it, at most all `num_slots` slots are trained, the slot itself
    included; the last of these updates is the one whose lag is counted.
    """
    return max(-(-num_slots * group_width // batch_width), 1) - 1
