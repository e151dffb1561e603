"""The feed of one machine: actors write rows into shared memory, where inference and the learner read them, or
environments of tensors write them on the device (device.py)."""

import collections
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from beast.envs.rows import written_by
from beast.feeds.actors import Actors
from beast.feeds.device import TensorMemory
from beast.feeds.feed import Consumer, Feed, Rows
from beast.feeds.memory import RolloutMemory
from beast.feeds.slots import NO_SLOT, Slots, SlotTensors
from beast.learn.nests import columns, join


@dataclass
class Group:
    """Where one group of environments is: row `row` of `slot` is the newest one written (or being written)."""

    slot: int = NO_SLOT
    row: int = 0
    core_state: tuple = ()  # before that row
    life: int = 0


class SharedMemoryFeed(Feed):
    """Rows are read where actors wrote them, and actions are written beside them; a full slot is a rollout.

    Slots are trained in the order in which they become full, so a slow group holds nobody up. With `--deterministic`
    acting waits while the learner has anything to train on: then the order of all work is fixed.
    """

    def __init__(
        self, consumer: Consumer, memory: RolloutMemory | TensorMemory, actors: Actors, batch_width: int, *,
        lock_step: bool = False, stagger: bool = False, joins_groups: bool | None = None,
        arrived: Callable[[dict], None] | None = None,
    ):  # fmt: skip
        """`lock_step` is for `--deterministic`. With `stagger` G groups begin their rollouts T/G rows apart.
        `joins_groups` is for tests: answer all ready groups at once, as on a GPU. `arrived(row)` may change a row
        [1, K, …] before anybody else reads it."""
        super().__init__(consumer, actors.processes)
        self.workers, self.memory, self.actors, self.batch_width = actors.workers, memory, actors, batch_width
        spacing = memory.unroll_length / actors.num_groups if stagger else 0.0
        self.slots = Slots(memory.num_slots, lock_step, memory.group_width, spacing)
        self._rows_since = 0  # that all groups together have made since the latest rollout began
        is_here = isinstance(memory, TensorMemory)  # on the device
        self.tensors = SlotTensors(memory, self.device)
        self.groups = [Group() for _ in range(actors.num_groups)]
        size = f"{memory.num_bytes / 1e6:.0f} MB of slots{f' on {self.device}' if is_here else ''}"
        self.description = f"{actors.num_groups} groups of {memory.group_width} environments, {size}"
        # A group's rows fit a CPU's cache, and need no gathering. A GPU is faster with more of them.
        # Environments on a GPU step while the net computes for another group.
        on_gpu = self.device.type != "cpu" and not is_here
        self._joins_groups = on_gpu if joins_groups is None else joins_groups
        self._input_names = [name for name in memory.row(0, 0) if name not in written_by("agent")] + ["action"]
        self._new_state = tuple(
            x.to(self.device).repeat_interleave(memory.group_width, dim=1) for x in consumer.core_state
        )
        self._arrived = arrived
        self._taken: list[int] = []  # full slots of the next batch, which waits for more
        self._starving: list[int] = []  # groups that wait for a free slot
        self._starved_seconds, self._starving_since = 0.0, time.monotonic()  # time of all groups together
        self._initial_states: list[tuple] = [()] * memory.num_slots  # of each slot's rollout, before its row 0
        self._oldest_versions = [0] * memory.num_slots  # of each slot's rollout
        self._batch_sizes: collections.deque[int] = collections.deque(maxlen=1000)

    def close(self) -> None:
        self.closed.set()
        self.slots.close()
        self.actors.wake()

    def measure(self, seconds: float, shares: dict[str, float]) -> dict[str, float]:
        starved, self._starved_seconds = self._starved_seconds, 0.0
        return {
            "stats/inference_batch": sum(self._batch_sizes) / max(len(self._batch_sizes), 1),
            "stats/actor_wait": starved / seconds / len(self.groups),
            "stats/queue_full_slots": self.slots.mean_full(),
            "stats/queue_free_slots": len(self.slots.free),
            "stats/env_restarts": self.actors.total_restarts,
            **super().measure(seconds, shares),
        }

    # The thread that acts.

    def acting(self) -> Iterator[Rows]:
        while self.slots.may_act():
            ready = self._ready_groups()
            batches = [ready] if self._joins_groups else [[group] for group in ready]
            for groups in filter(None, batches):
                yield self._rows(groups)

    def _ready_groups(self) -> list[int]:
        """Groups whose newest row waits for actions and has a place for them; waits for the first."""
        ready, lost = self.actors.wait(0.2)
        while self.actors.told:
            self.env_metrics.add(self.actors.told.pop())
        self.laps.lap("wait")
        now = time.monotonic()
        self._starved_seconds += len(self._starving) * (now - self._starving_since)
        self._starving_since = now
        for number in lost:  # the rollout is given up: what follows belongs to other environments
            group = self.groups[number]
            if group.slot != NO_SLOT and number not in self._starving:
                self.slots.give_up(group.slot)
            self.groups[number] = Group(life=group.life + 1)
        for group in (self.groups[number] for number in ready):
            if group.slot != NO_SLOT:
                self.tensors.upload(group.slot, group.row)
                if self._arrived:
                    self._arrived(self.tensors.row(group.slot, group.row))
                if group.row == self.memory.unroll_length:
                    self.tensors.full[group.slot].set()
                    self.slots.fill(group.slot)
        waiting = [number for number in self._starving if number not in lost] + ready
        new = [number for number in waiting if self.groups[number].slot == NO_SLOT]  # their row 0 is yet to be written
        self._starving = [number for number in waiting if not self._place(number)]
        return [number for number in waiting if number not in self._starving + new]

    def _place(self, number: int) -> bool:
        """Make sure that the group's newest row has a successor in a slot; False if it has to wait for one."""
        group = self.groups[number]
        previous, T = group.slot, self.memory.unroll_length
        if previous != NO_SLOT and group.row < T:
            return True
        # A full slot still holds the last row of the group that waits, so nobody else may have it.
        kept = {other.slot for other in self.groups if other.row == T and other is not group}
        # First rollouts begin at once: environments are reset together.
        rows = math.inf if previous == NO_SLOT else self._rows_since
        slot = self.slots.acquire(prefer=previous, avoid=kept, rows=rows)
        if slot is None:
            return False
        self._rows_since = 0
        self.tensors.free[slot].wait()
        self.tensors.begin(slot, previous, number, group.life)
        if previous == NO_SLOT:
            group.core_state = self._new_state
            self.actors.go(number, slot, 0)  # resets the environments
        group.slot, group.row = slot, 0
        self._initial_states[slot] = group.core_state
        return True

    def _rows(self, numbers: list[int]) -> Rows:
        groups = [self.groups[number] for number in numbers]
        rows = [self.tensors.row(group.slot, group.row) for group in groups]
        inputs = join([{name: row[name] for name in self._input_names} for row in rows], self.device)
        core_state = tuple(torch.cat(parts, dim=1) for parts in zip(*(group.core_state for group in groups)))
        self.laps.lap("gather")
        return Rows(inputs, core_state, partial(self._answer, numbers))

    def _answer(self, numbers: list[int], action, policy_logits, baseline, version, core_state, **more) -> None:
        self.laps.lap("forward")
        groups, width = [self.groups[number] for number in numbers], self.memory.group_width
        versions = torch.as_tensor(version, dtype=torch.int32).expand(baseline.shape)
        on_device = versions.to(self.device, non_blocking=True)
        for index, group in enumerate(groups):
            mine = slice(index * width, (index + 1) * width)
            if group.row == 0:
                self._oldest_versions[group.slot] = int(versions[:, mine].min())
            group.row += 1
            row = self.tensors.row(group.slot, group.row)
            answers = action, policy_logits, baseline, on_device
            names = "action", "policy_logits", "baseline", "policy_version"
            torch._foreach_copy_([row[name] for name in names], [x[:, mine] for x in answers])
            for name, x in more.items():
                self.tensors.put(name, group.slot, group.row, x[:, mine])
            group.core_state = tuple(state[:, mine] for state in core_state)
        self.tensors.download_actions([(group.slot, group.row) for group in groups])
        for number, group in zip(numbers, groups):
            self.actors.go(number, group.slot, group.row)
        self._rows_since += len(numbers)
        self._batch_sizes.append(len(numbers) * width)
        self.laps.lap("answer")

    # The thread that trains.

    def rollouts(self, limit: float | None = None) -> Iterator[tuple[dict, tuple]]:
        width = self.batch_width
        while taken := self._take(max(width // self.memory.group_width, 1), limit):
            for slot in taken:
                self.tensors.full[slot].wait()
            rollouts = [self.tensors.rollout(slot) for slot in taken]
            rollout = join(rollouts, self.device)  # [T+1, m·K, …]
            states = zip(*(self._initial_states[slot] for slot in taken))
            core_state = tuple(torch.cat(parts, dim=1) for parts in states)
            self.consumer.laps.lap("gather")
            is_copy = len(taken) > 1
            if is_copy:
                self._release(taken)
            for first in range(0, len(taken) * self.memory.group_width, width):
                self.slots.train(width)
                self.actors.wake()  # groups that wait for a slot
                yield columns(rollout, first, width), tuple(state[:, first : first + width] for state in core_state)
            if not is_copy:
                self.tensors.check_unwritten(rollout)
                self._release(taken)

    def _release(self, slots: list[int]) -> None:
        for slot in slots:
            self.tensors.free[slot].set()
        self.slots.release(slots)
        self.actors.wake()

    def _take(self, count: int, limit: float | None) -> list[int]:
        """The next `count` full slots that are not too old; none when closed, or when they did not come for `limit`
        seconds. Those that came by then stay for the next call."""
        updates_of_a_slot = max(self.memory.group_width // self.batch_width, 1)
        while len(self._taken) < count:
            found = self.slots.take(count - len(self._taken), limit)
            self.consumer.laps.lap("wait")
            if not found:
                return []
            for slot in found:
                lag = self.consumer.newest_update() + updates_of_a_slot - 1 - self._oldest_versions[slot]
                if self._accept(self.memory.rollout(slot), lag):
                    self._taken.append(slot)
                else:
                    self.slots.give_up(slot)
                    self.actors.wake()
        taken, self._taken = self._taken, []
        return taken
