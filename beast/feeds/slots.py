"""Tracks who owns each slot of the rollout memory."""

from __future__ import annotations

import collections
import threading

NO_SLOT = -1


class Slots:
    """A slot is free, being filled (by one group), full, or with the learner, which takes full slots as they come.

    One thread acquires and fills (inference), another takes (the learner), both release. In `lock_step` only one of the
    two works at a time: `take` waits for the other's `wait_for_learner`, and that for the next `take`.
    """

    def __init__(self, num_slots: int, lock_step: bool = False):
        self._free = collections.deque(range(num_slots))
        self._full: collections.deque[int] = collections.deque()  # in the order in which they were filled
        self._wanted = 0  # by a learner that waits
        self._lock_step, self._acting_waits = lock_step, False
        self._condition = threading.Condition()
        self._closed = False
        self._found_full: list[int] = []  # slots, each time that the learner came and got some

    def acquire(self, prefer: int, avoid: set[int]) -> int | None:
        """A free slot, if possible `prefer` and in no case one of `avoid`; None when there is none."""
        with self._condition:
            allowed = [slot for slot in self._free if slot not in avoid]
            if not allowed:
                return None
            slot = prefer if prefer in allowed else allowed[0]
            self._free.remove(slot)
            return slot

    def fill(self, slot: int) -> None:
        """All rows of the slot are written: the learner may have it."""
        with self._condition:
            self._full.append(slot)
            self._condition.notify_all()

    def take(self, count: int) -> list[int] | None:
        """The next `count` full slots, in the order in which they were filled. Waits for them; None when closed."""
        with self._condition:
            num_full = len(self._full)
            self._wanted = count
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._closed or (len(self._full) >= count and (self._acting_waits or not self._lock_step))
            )
            self._wanted = 0
            if self._closed:
                return None
            self._found_full.append(num_full)
            return [self._full.popleft() for _ in range(count)]

    def release(self, slots: list[int]) -> None:
        """Slots that were trained, or given up before they were full, may be written again."""
        with self._condition:
            self._free.extend(slots)

    def wait_for_learner(self) -> None:
        """Return when the learner waits for slots that are not full yet, or when closed."""
        with self._condition:
            self._acting_waits = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._closed or len(self._full) < self._wanted)
            self._acting_waits = False

    def mean_full(self) -> float:
        """How many full slots the learner found when it came for the next ones, the mean since the last call."""
        with self._condition:
            found, self._found_full = self._found_full, []
            return sum(found) / max(len(found), 1)

    def num_free(self) -> int:
        with self._condition:
            return len(self._free)

    def close(self) -> None:
        """Wake whoever waits; the learner gets no more slots."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


def even_policy_lag(flags) -> int:
    """The highest policy lag, in updates, where all groups are equally fast.

    Between the first row of a slot and the last update on it, each slot is trained at most once, this one included; the
    last of these updates is the one whose lag is counted. Where slots are joined to a batch, this one is free again
    before the update on its last rollout ends.
    """
    updates = -(-flags.num_slots * flags.group_width // flags.batch_width)
    return updates if flags.batch_width > flags.group_width else updates - 1
