"""The slots of a rollout memory: who owns each, and their tensors on the device where the net computes."""

import collections
import itertools
import math
import threading
import time
from typing import Any

import torch

from beast.device import Fence
from beast.envs.rows import OBJECTIVE, REWARD_TERMS, nest_observations, written_by

NO_SLOT = -1
RECENT = 0.1  # weight of the newest value in a running mean
DEVIATIONS = 3  # mean deviations beyond the mean that a slot is given to be filled
MOST_OVERTAKEN = 4  # a slot that so many later ones have overtaken does not count: its group is slow, or hangs
PATIENCE = 0.1  # seconds that the learner waits before more slots are handed out than may be ahead


class RunningMean:
    """The mean of the latest values, and their mean deviation from it; NaN before there is one."""

    def __init__(self) -> None:
        self.mean = self.deviation = math.nan

    def add(self, value: float) -> None:
        if math.isnan(self.mean):
            self.mean, self.deviation = value, 0.0
        self.deviation += RECENT * (abs(value - self.mean) - self.deviation)
        self.mean += RECENT * (value - self.mean)


class Slots:
    """A slot is free, being filled (by one group), full, or with the learner, which takes full slots as they come.

    One thread acquires and fills (inference), another takes (the learner), both release. In `lock_step` only one of the
    two works at a time: `take` waits for the other's `may_act`, and that for the next `take`.

    Every column ahead of the learner is policy lag. So slots are handed out just in time: when the learner has no more
    to train before a slot's batch than it trains while the slot is filled.
    """

    def __init__(self, num_slots: int, lock_step: bool = False, width: int = 1, spacing: float = 0.0):
        """`width` is the columns of a slot. The rollouts of a group after its first begin `spacing` rows or more after
        that of any other group."""
        self.free = collections.deque(range(num_slots))
        self._full: collections.deque[int] = collections.deque()  # in the order in which they were filled
        self._wanted = 0  # by a learner that waits
        self._lock_step, self._may_take = lock_step, not lock_step
        self._condition = threading.Condition()
        self._closed = False
        self._found_full: list[int] = []  # slots, each time that the learner came and got some
        self._width, self._at_once = width, 1  # columns of a slot, and slots that the learner takes at once
        self._overtaken: dict[int, int] = {}  # slots that are being filled, in their order: by how many later ones
        self._untrained = 0  # columns that were taken, and whose training has not begun
        self._training = 0  # columns in training, which began at `_trains_since`
        self._begun, self._trains_since = [0.0] * num_slots, 0.0
        self._to_fill, self._per_column = RunningMean(), RunningMean()  # seconds of a slot, and of the learner
        self._came = -math.inf  # when the learner last came for slots
        self._spacing = spacing

    def acquire(self, prefer: int, avoid: set[int], rows: float = math.inf) -> int | None:
        """A free slot, if possible `prefer` and in no case one of `avoid`; None when there is none, or it is early.
        All groups together have made so many `rows` since a slot was last handed out."""
        with self._condition:
            allowed = [slot for slot in self.free if slot not in avoid]
            if not allowed or self._is_early() or self._is_too_soon(rows):
                return None
            slot = prefer if prefer in allowed else allowed[0]
            self.free.remove(slot)
            self._overtaken[slot] = 0
            self._begun[slot] = time.monotonic()
            return slot

    def _is_early(self) -> bool:
        begun = self._begun_slots()
        before = self._untrained + (begun - begun % self._at_once) * self._width  # columns that are trained before it
        seconds_to_fill = self._to_fill.mean + DEVIATIONS * self._to_fill.deviation
        if self._lock_step or not before * self._per_column.mean > seconds_to_fill:  # NaN before anything was measured
            return False
        # Who fills the slots that the learner waits for may hang.
        return not self._wanted or time.monotonic() - self._came < PATIENCE

    def _is_too_soon(self, rows: float) -> bool:
        """Whether a rollout would begin, and so end, too soon after the one that began last."""
        if rows >= self._spacing * len(self._overtaken):  # `spacing` of each group that fills a slot
            return False
        return self._lock_step or time.monotonic() - max(self._begun) < self._to_fill.mean  # who makes rows may hang

    def _begun_slots(self) -> int:
        """Slots that were handed out, and that the learner has not taken."""
        return sum(count < MOST_OVERTAKEN for count in self._overtaken.values()) + len(self._full)

    def fill(self, slot: int) -> None:
        """All rows of the slot are written: the learner may have it."""
        with self._condition:
            for earlier in itertools.takewhile(lambda other: other != slot, self._overtaken):
                self._overtaken[earlier] += 1
            del self._overtaken[slot]
            self._to_fill.add(time.monotonic() - self._begun[slot])
            self._full.append(slot)
            self._condition.notify_all()

    def take(self, count: int, timeout: float | None = None) -> list[int]:
        """The next `count` full slots, in the order in which they were filled. Waits for them; none when closed, and
        when `timeout` seconds are over."""
        with self._condition:
            num_full = len(self._full)
            self._end_training()
            self._came, self._wanted = time.monotonic(), count
            self._condition.notify_all()
            are_there = self._condition.wait_for(
                lambda: self._closed or (len(self._full) >= count and self._may_take), timeout
            )
            self._wanted = 0
            if self._closed or not are_there:
                return []
            self._found_full.append(num_full)
            self._untrained += count * self._width
            self._at_once = max(self._at_once, count)
            return [self._full.popleft() for _ in range(count)]

    def train(self, columns: int) -> None:
        """The learner begins to train so many columns of what it took: they are no longer ahead of it."""
        with self._condition:
            self._end_training()
            self._untrained -= columns
            self._training, self._trains_since = columns, time.monotonic()

    def _end_training(self) -> None:
        if self._training:
            self._per_column.add((time.monotonic() - self._trains_since) / self._training)
            self._training = 0

    def release(self, slots: list[int]) -> None:
        """Slots that were trained, or copied, may be written again."""
        with self._condition:
            self.free.extend(slots)

    def give_up(self, slot: int) -> None:
        """A slot that was begun or taken, and will not be trained, may be written again."""
        with self._condition:
            if self._overtaken.pop(slot, None) is None:
                self._untrained -= self._width
            self.free.append(slot)

    def may_act(self) -> bool:
        """False when closed. In lock step it returns when the learner waits for slots that are not full yet."""
        with self._condition:
            if self._lock_step:
                self._may_take = True
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closed or len(self._full) < self._wanted)
                self._may_take = False
            return not self._closed

    def mean_full(self) -> float:
        """How many full slots the learner found when it came for the next ones, the mean since the last call."""
        with self._condition:
            found, self._found_full = self._found_full, []
            return sum(found) / max(len(found), 1)

    def close(self) -> None:
        """Wake whoever waits; the learner gets no more slots."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


def even_policy_lag(num_slots: int, group_width: int, batch_width: int) -> int:
    """The highest policy lag, in updates, where all groups are equally fast.

    All slots together make ceil(slots * K / B) updates. A slot waits for no more than these, and its own last update
    does not count. Joined slots are free one update earlier, so they wait for one more.
    """
    updates = -(-num_slots * group_width // batch_width)
    return updates if batch_width > group_width else updates - 1


class SlotTensors:
    """The slots of a rollout memory as tensors where the net computes; inference and learner both read them there.

    On a CPU they are the shared memory itself. Elsewhere they are its twin: a row goes up once, when its environments
    have written it, and only actions come down. `full` and `free` have a fence for each slot: inference sets `full`
    when all rows of a rollout are queued, the learner `free` when its last read of them is.
    """

    def __init__(self, memory: Any, device: torch.device, is_twin: bool | None = None):
        """`memory` is a RolloutMemory, or a TensorMemory, which lies on the device and has no twin. `is_twin` is for
        tests: a twin on a CPU."""
        self.memory, self.device = memory, device
        lies_there = isinstance(memory.arrays["env_number"], torch.Tensor)
        self.is_twin = device.type != "cpu" and not lies_there if is_twin is None else is_twin
        self._shared = {name: torch.as_tensor(array) for name, array in memory.arrays.items()}  # views
        self._shared["env_number"][:] = torch.arange(memory.group_width)
        self._tensors = self._shared
        if self.is_twin:
            self._tensors = {name: x.to(device, copy=True) for name, x in self._shared.items()}
        of_env = {"obs", "final_obs", *written_by("env"), OBJECTIVE, REWARD_TERMS}
        self._env_fields = [name for name in self._tensors if name.partition("/")[0] in of_env]
        self._agent_fields = [name for name in self._tensors if name not in (*self._env_fields, *written_by("feed"))]
        self._rows: dict[tuple[int, int], dict] = {}
        self._uploads: dict[tuple[int, int], list[list[torch.Tensor]]] = {}  # where to, where from
        self.full = [Fence(device) for _ in range(memory.num_slots)]
        self.free = [Fence(device) for _ in range(memory.num_slots)]

    def row(self, slot: int, row: int) -> dict:
        """One row as views [1, K, …]; observations under `row["obs"][name]`."""
        if (slot, row) not in self._rows:
            views = {name: tensor[slot, row : row + 1] for name, tensor in self._tensors.items()}
            self._rows[slot, row] = nest_observations(views)
        return self._rows[slot, row]

    def rollout(self, slot: int) -> dict:
        """One whole slot [T+1, K, …]: observations where they lie, which nobody may write; all else is copied."""
        # `data`: autograd need not know that inference writes other slots of the same tensor meanwhile.
        views = nest_observations({name: tensor.data[slot] for name, tensor in self._tensors.items()})
        return {name: x if isinstance(x, dict) else x.clone() for name, x in views.items()}

    def check_unwritten(self, rollout: dict) -> None:
        """Raise RuntimeError if the observations of a `rollout` were written since it was handed out."""
        for field in (field for field in rollout.values() if isinstance(field, dict)):
            for name, x in field.items():
                if x._version:
                    raise RuntimeError(
                        f"the update wrote into the observations {name!r} of its batch in place, which lie in the "
                        "memory of the environments: write into a copy, batch['obs'][name].clone()"
                    )

    def begin(self, slot: int, previous: int, group: int, life: int) -> None:
        """Begin a rollout of this group and this life of its environments. Row 0 repeats row T of slot `previous`, as
        consecutive rollouts of a group overlap by one row. Of new environments there is NO_SLOT, and no action led to
        row 0."""
        if previous == NO_SLOT:
            for name in self._agent_fields:
                self._tensors[name][slot, 0] = 0
        else:
            self.memory.repeat_last_row(previous, slot)
            if self.is_twin:
                for tensor in self._tensors.values():
                    tensor[slot, 0] = tensor[previous, -1]
        for tensors in (self._tensors, self._shared):  # games are read in shared memory
            tensors["group"][slot], tensors["life"][slot] = group, life

    def put(self, name: str, slot: int, row: int, values: torch.Tensor) -> None:
        """Write a field of a row [1, K] that is read in shared memory, too."""
        for tensors in {id(each): each for each in (self._tensors, self._shared)}.values():
            tensors[name][slot, row : row + 1] = values

    def upload(self, slot: int, row: int) -> None:
        """Take over what the environments have written into a row."""
        if self.is_twin:
            if (slot, row) not in self._uploads:
                both = self._tensors, self._shared
                self._uploads[slot, row] = [[x[name][slot, row] for name in self._env_fields] for x in both]
            torch._foreach_copy_(*self._uploads[slot, row], non_blocking=True)

    def download_actions(self, rows: list[tuple[int, int]]) -> None:
        """Give the environments of these slots and rows their actions; returns when they can read them."""
        if self.is_twin:
            for slot, row in rows:
                self._shared["action"][slot, row].copy_(self._tensors["action"][slot, row], non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
