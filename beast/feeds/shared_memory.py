"""The feed of one machine: actors write rows into shared memory, where inference and the learner read them."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from beast.envs.groups import finished_episodes
from beast.feeds.actors import ActorProcesses, LocalActors
from beast.feeds.feed import Rows
from beast.feeds.memory import RolloutMemory
from beast.feeds.slot_tensors import SlotTensors
from beast.feeds.slots import NO_SLOT, Slots
from beast.learn.learner import Learner
from beast.learn.nests import columns, join
from beast.run.profile import Laps


@dataclass
class Group:
    """Where one group of environments is: row `row` of `slot` is the newest one written (or being written)."""

    slot: int = NO_SLOT
    row: int = 0
    core_state: tuple = ()  # before that row
    life: int = 0


class SharedMemoryFeed:
    """Rows are read where actors wrote them, and actions are written beside them; a full slot is a rollout.

    Slots are trained in the order in which they become full, so a slow group holds nobody up. A rollout whose oldest
    action would be more than `max_policy_lag` updates old in its last update is dropped and counted; 0 drops none. With
    `lock_step` acting waits while the learner has anything to train on: then the order of all work is fixed.
    """

    def __init__(
        self, memory: RolloutMemory, learner: Learner, actors: ActorProcesses | LocalActors, num_groups: int,
        batch_width: int, max_policy_lag: int = 0, lock_step: bool = False,
    ):  # fmt: skip
        device = next(learner.net.parameters()).device
        self.memory, self.learner, self.actors, self.device = memory, learner, actors, device
        self.batch_width, self.max_policy_lag, self.lock_step = batch_width, max_policy_lag, lock_step
        self.slots, self.tensors = Slots(memory.num_slots, lock_step), SlotTensors(memory, device)
        self.groups = [Group() for _ in range(num_groups)]
        self.laps = Laps()
        self.dropped_rollouts = 0
        self._new_state = tuple(state.to(device) for state in learner.net.initial_state(memory.group_width))
        self._starving: list[int] = []  # groups with a full slot that wait for a free one
        self._initial_states: list[tuple] = [()] * memory.num_slots  # of each slot's rollout, before its row 0
        self._oldest_versions = [0] * memory.num_slots  # of each slot's rollout
        self._batch_sizes: collections.deque[int] = collections.deque(maxlen=1000)
        self._starved_seconds = 0.0  # time of all groups together
        self._starving_since = time.monotonic()
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()
        self.slots.close()
        self.actors.wake()

    def workers(self) -> dict:
        return self.actors.workers()

    def cores(self) -> dict:
        return {"envs": self.actors.cpu_seconds}

    def measure(self, seconds: float, shares: dict[str, float]) -> dict[str, float]:
        starved, self._starved_seconds = self._starved_seconds, 0.0
        return {
            **({"stats/policy_lag_bound": self.max_policy_lag} if self.max_policy_lag else {}),
            "stats/inference_batch": sum(self._batch_sizes) / max(len(self._batch_sizes), 1),
            "stats/actor_wait": starved / seconds / len(self.groups),
            "stats/queue_full_slots": self.slots.mean_full(),
            "stats/queue_free_slots": self.slots.num_free(),
            "stats/env_restarts": self.actors.total_restarts,
            "stats/dropped_rollouts": self.dropped_rollouts,
        }

    # The thread that acts.

    def acting(self) -> Iterator[Rows]:
        while not self._closed.is_set():
            if self.lock_step:
                self.slots.wait_for_learner()
                if self._closed.is_set():
                    return
            ready = self._ready_groups(timeout=0.2)
            if self.device.type == "cpu":  # a group's rows fit the cache, and need no gathering
                for group in ready:
                    yield self._rows([group])
            elif ready:
                yield self._rows(ready)

    def _ready_groups(self, timeout: float) -> list[int]:
        """Groups whose newest row waits for actions and has a place for them; waits for the first."""
        ready, lost = self.actors.wait(timeout)
        self.laps.lap("wait")
        for number in lost:  # the rollout is given up: what follows belongs to other environments
            group = self.groups[number]
            if group.slot != NO_SLOT and number not in self._starving:
                self.slots.release([group.slot])
            self.groups[number] = Group(life=group.life + 1)
        for group in (self.groups[number] for number in ready):
            if group.slot != NO_SLOT:
                self.tensors.upload(group.slot, group.row)
        now = time.monotonic()
        self._starved_seconds += len(self._starving) * (now - self._starving_since)
        self._starving_since = now
        self._starving = [number for number in self._starving if number not in lost]
        return [number for number in self._starving + ready if self._place(number)]

    def _place(self, number: int) -> bool:
        """Make sure that the group's newest row has a successor in a slot; False if it has to wait or is resetting."""
        group, is_starving = self.groups[number], number in self._starving
        previous = group.slot
        if previous != NO_SLOT and group.row < self.memory.unroll_length:
            return True
        if previous != NO_SLOT and not is_starving:
            self.tensors.full[previous].set()
            self.slots.fill(previous)
        # A full slot still holds the last row of the group that waits, so nobody else may have it.
        kept = {self.groups[other].slot for other in self._starving if other != number}
        slot = self.slots.acquire(prefer=previous, avoid=kept)
        if slot is None:
            if not is_starving:
                self._starving.append(number)
            return False
        if is_starving:
            self._starving.remove(number)
        self.tensors.free[slot].wait()
        self.tensors.begin(slot, previous, number, group.life)
        group.slot, group.row = slot, 0
        if previous == NO_SLOT:
            group.core_state = self._new_state
            self.actors.go(number, slot, 0)  # resets the environments
        return previous != NO_SLOT

    def _rows(self, numbers: list[int]) -> Rows:
        groups = [self.groups[number] for number in numbers]
        for group in groups:
            if group.row == 0:
                self._initial_states[group.slot] = group.core_state
        rows = [self.tensors.row(group.slot, group.row) for group in groups]
        names = ("obs", "reward", "done", "action", "group", "life")
        inputs = join([{name: row[name] for name in names} for row in rows], self.device)
        core_state = tuple(torch.cat(parts, dim=1) for parts in zip(*(group.core_state for group in groups)))
        self.laps.lap("gather")
        return Rows(inputs, core_state, partial(self._answer, numbers))

    def _answer(
        self, numbers: list[int], action: Tensor, policy_logits: Tensor, baseline: Tensor, version: int, core_state
    ) -> None:
        self.laps.lap("forward")
        groups, width = [self.groups[number] for number in numbers], self.memory.group_width
        for index, group in enumerate(groups):
            mine = slice(index * width, (index + 1) * width)
            if group.row == 0:
                self._oldest_versions[group.slot] = version
            group.row += 1
            row = self.tensors.row(group.slot, group.row)
            row["action"].copy_(action[:, mine])
            row["policy_logits"].copy_(policy_logits[:, mine])
            row["baseline"].copy_(baseline[:, mine])
            row["policy_version"].fill_(version)
            group.core_state = tuple(state[:, mine] for state in core_state)
        self.tensors.download_actions([(group.slot, group.row) for group in groups])
        for number, group in zip(numbers, groups):
            self.actors.go(number, group.slot, group.row)
        self._batch_sizes.append(len(numbers) * width)
        self.laps.lap("answer")

    # The thread that trains.

    def rollouts(self) -> Iterator[tuple[dict, tuple]]:
        laps, width = self.learner.laps, self.batch_width
        while taken := self._take(max(width // self.memory.group_width, 1)):
            for slot in taken:
                self.tensors.full[slot].wait()
            rollouts = [self.tensors.rollout(slot) for slot in taken]
            rollout = join(rollouts, self.device)  # [T+1, m·K, …]
            states = zip(*(self._initial_states[slot] for slot in taken))
            core_state = tuple(torch.cat(parts, dim=1) for parts in states)
            laps.lap("gather")
            is_copy = len(taken) > 1
            if is_copy:
                self._release(taken)
            for first in range(0, len(taken) * self.memory.group_width, width):
                yield columns(rollout, first, width), tuple(state[:, first : first + width] for state in core_state)
            if not is_copy:
                self.tensors.check_unwritten(rollout)
                self._release(taken)

    def _release(self, slots: list[int]) -> None:
        for slot in slots:
            self.tensors.free[slot].set()
        self.slots.release(slots)
        self.actors.wake()

    def _take(self, count: int) -> list[int]:
        """The next `count` full slots that are not too old; none when closed."""
        taken: list[int] = []
        updates_of_a_slot = max(self.memory.group_width // self.batch_width, 1)
        while len(taken) < count:
            found = self.slots.take(count - len(taken))
            self.learner.laps.lap("wait")
            if found is None:
                return []
            for slot in found:
                with self.learner.updating:
                    self.learner.record_episodes(finished_episodes(self.memory.rollout(slot)))
                lag = self.learner.updates + updates_of_a_slot - 1 - self._oldest_versions[slot]
                if self.max_policy_lag and lag > self.max_policy_lag:
                    self.dropped_rollouts += 1
                    self.slots.release([slot])
                    self.actors.wake()
                else:
                    taken.append(slot)
            self.learner.laps.lap("records")
        return taken
