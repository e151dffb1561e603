"""Rollout memory and the order in which slots pass from hand to hand."""

import math
import os
import random
import subprocess
import sys
import threading
from collections import deque

import numpy as np
import pytest

import beast.feeds.slots
from beast.errors import OutOfMemory
from beast.feeds.memory import RolloutMemory
from beast.feeds.slots import Slots, even_policy_lag

FIELDS = {"obs/obs": ((2,), "float32"), "reward": ((), "float32"), "action": ((), "int64"), "done": ((), "bool")}


def test_every_field_is_one_array_per_slot_with_a_row_more_than_steps():
    memory = RolloutMemory(FIELDS, num_slots=3, unroll_length=4, group_width=5)
    assert memory.arrays["obs/obs"].shape == (3, 5, 5, 2)
    assert memory.row(1, 2)["obs"]["obs"].shape == (5, 2)
    assert memory.rollout(2)["reward"].shape == (5, 5)


def test_a_row_is_a_view_of_the_slot_that_holds_it():
    memory = RolloutMemory(FIELDS, 2, 3, 4)
    memory.row(1, 2)["reward"][...] = 7
    assert (memory.rollout(1)["reward"][2] == 7).all()
    assert not (memory.rollout(1)["reward"][[0, 1, 3]] == 7).any()
    assert not (memory.rollout(0)["reward"] == 7).any()


def test_memory_that_nobody_wrote_holds_poison():
    memory = RolloutMemory(FIELDS, 1, 1, 1)
    assert np.isnan(memory.arrays["reward"]).all()
    assert (memory.arrays["action"] == np.iinfo(np.int64).max).all()


def test_final_observations_begin_as_zeros_and_lie_in_a_nest_of_their_own():
    memory = RolloutMemory({**FIELDS, "final_obs/obs": ((2,), "float32")}, 1, 2, 3)
    assert (memory.arrays["final_obs/obs"] == 0).all(), "the net sees all of them, and few are ever written"
    row = memory.row(0, 1)
    assert set(row["obs"]) == set(row["final_obs"]) == {"obs"} and "final_obs/obs" not in row
    row["final_obs"]["obs"][...] = 5
    assert (memory.rollout(0)["final_obs"]["obs"][1] == 5).all() and np.isnan(memory.rollout(0)["obs"]["obs"]).all()


def test_row_zero_repeats_the_last_row_in_every_field():
    memory = RolloutMemory(FIELDS, 2, 3, 2)
    rng = np.random.default_rng(0)
    for array in memory.arrays.values():
        array[0] = rng.integers(0, 2, array[0].shape)
    memory.repeat_last_row(0, 1)
    for array in memory.arrays.values():
        np.testing.assert_array_equal(array[1, 0], array[0, 3])


def test_another_process_maps_the_same_memory_by_its_descriptor():
    memory = RolloutMemory(FIELDS, 2, 3, 4)
    code = (
        "import sys, json; from beast.feeds.memory import RolloutMemory\n"
        "memory = RolloutMemory(**json.loads(sys.argv[1]))\n"
        "memory.row(1, 3)['reward'][2] = 42\n"
    )
    import json

    subprocess.run(
        [sys.executable, "-c", code, json.dumps(memory.description())],
        pass_fds=[memory.fd],
        check=True,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
    assert memory.rollout(1)["reward"][3, 2] == 42


def test_slots_that_do_not_fit_into_memory_are_refused_with_their_size_and_a_remedy():
    with pytest.raises(OutOfMemory, match=r"need \d+ MB .*--num_slots"):
        RolloutMemory({"obs/obs": ((1 << 30,), "float32")}, 1000, 20, 32)


def test_slots_are_trained_in_the_order_in_which_they_become_full():
    slots = Slots(3)
    first, second, third = (slots.acquire(0, set()) for _ in range(3))
    slots.fill(second)
    assert slots.take(1) == [second], "the first one holds nobody up"
    slots.fill(third)
    slots.fill(first)
    assert slots.take(2) == [third, first]


def test_a_slot_that_was_given_up_is_free_again():
    slots = Slots(2)
    lost, kept = slots.acquire(0, set()), slots.acquire(0, set())
    slots.fill(kept)
    slots.give_up(lost)
    assert slots.take(1) == [kept]
    assert slots.acquire(0, set()) == lost


def test_no_slot_is_handed_out_twice_before_it_is_released():
    slots = Slots(2)
    a, b = slots.acquire(0, set()), slots.acquire(0, set())
    assert {a, b} == {0, 1} and slots.acquire(0, set()) is None
    slots.fill(a)
    slots.take(1)
    slots.train(1)
    assert slots.acquire(0, set()) is None, "a taken slot is being trained"
    slots.release([a])
    assert slots.acquire(0, set()) == a


def test_a_waiting_group_is_offered_its_own_slot_first_and_never_that_of_another_one_that_waits():
    slots = Slots(3)
    for slot in [slots.acquire(0, set()) for _ in range(3)]:
        slots.fill(slot)
    slots.release(slots.take(2))
    slots.train(2)
    assert slots.acquire(prefer=1, avoid={0}) == 1
    assert slots.acquire(prefer=2, avoid={0}) is None
    assert slots.acquire(prefer=2, avoid=set()) == 0


def test_slots_tell_how_many_were_full_when_the_learner_came():
    slots = Slots(3)
    for slot in [slots.acquire(0, set()) for _ in range(3)]:
        slots.fill(slot)
    for _ in range(3):
        slots.take(1)
    assert slots.mean_full() == 2, "3, 2 and 1"
    assert slots.mean_full() == 0, "of the last call alone"


def in_thread(function, *arguments) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(function(*arguments)), daemon=True)
    thread.start()
    return thread, found


def test_closing_wakes_the_learner_with_nothing():
    slots = Slots(1)
    thread, taken = in_thread(slots.take, 1)
    slots.close()
    thread.join(timeout=60)
    assert taken == [[]]


def test_in_lock_step_acting_waits_until_the_learner_waits_for_more():
    slots = Slots(2, lock_step=True)
    slots.fill(slots.acquire(0, set()))
    thread, taken = in_thread(slots.take, 1)
    thread.join(timeout=0.2)
    assert not taken, "acting has not come to its end yet"
    acting, acted = in_thread(slots.may_act)
    thread.join(timeout=60)
    assert taken == [[0]]
    acting.join(timeout=0.2)
    assert not acted, "the learner trains"
    thread, taken = in_thread(slots.take, 1)
    acting.join(timeout=60)
    assert acted == [True] and not taken
    slots.close()


def test_the_policy_lag_of_equally_fast_groups_comes_near_the_printed_bound_and_stays_within_it(monkeypatch):
    """Groups fill slots row by row in turn; a learner of random speed. Slots are handed out as early as can be."""
    monkeypatch.setattr(Slots, "_is_early", lambda self: False)
    for num_slots, K, B in ((4, 16, 16), (5, 16, 4), (6, 8, 16), (5, 8, 16)):
        rng, slots, updates, worst = random.Random(0), Slots(num_slots), 0, 0
        filling: deque[int] = deque()
        versions, num_full, per_batch, is_training = {}, 0, max(B // K, 1), False
        for _ in range(20_000):
            if rng.random() < 0.5 and (slot := slots.acquire(0, set())) is not None:
                filling.append(slot)
                versions[slot] = updates  # the oldest weights that can act in this rollout
            elif filling and rng.random() < 0.7:
                slots.fill(filling.popleft())
                num_full += 1
            elif is_training:
                updates, is_training = updates + 1, False
            elif num_full >= per_batch:
                taken, num_full = slots.take(per_batch), num_full - per_batch
                for _ in range(max(K // B, 1)):
                    worst = max(worst, *(updates - versions[slot] for slot in taken))
                    updates += per_batch == 1
                slots.train(per_batch)
                slots.release(taken)  # joined slots are a copy, and free before they are trained
                is_training = per_batch > 1
        lag = even_policy_lag(num_slots, K, B)
        assert lag - 1 <= worst <= lag


class Clock:
    """Learner and groups that fill slots, in simulated time: the policy lags of the second half of its updates, and the
    share of the time that the learner waits."""

    def __init__(self, K: int, B: int, rollout: float, update: float, groups: int = 4, hangs: float = math.inf):
        """The groups need `rollout` seconds for a slot, the learner `update`. Once, from then on, a group `hangs`."""
        self.K, self.B, self.per_batch, self.update = K, B, max(B // K, 1), update
        self.rollout, self.hangs, self.now, self.rng = rollout, hangs, 0.0, random.Random(0)
        self.slots = Slots(groups + self.per_batch, width=K)
        self.filling: list[tuple[float, int]] = []
        self.versions: dict[int, int] = {}
        self.idle, self.updates, self.lags, self.waited = groups, 0, [], 0.0

    def monotonic(self) -> float:
        return self.now

    def pass_until(self, end: float) -> None:
        """Groups act until then."""
        while True:
            while self.idle and (slot := self.slots.acquire(0, set())) is not None:
                self.idle -= 1
                self.versions[slot] = self.updates
                is_stuck = self.now > self.hangs
                self.hangs = math.inf if is_stuck else self.hangs
                seconds = 100 if is_stuck else self.rollout * self.rng.uniform(0.9, 1.1)
                self.filling.append((self.now + seconds, slot))
            then, slot = min(self.filling, default=(math.inf, 0))
            self.now = min(then, end)
            if then > end:
                return
            self.filling.remove((then, slot))
            self.slots.fill(slot)
            self.idle += 1

    def train(self, takes: int) -> None:
        while takes := takes - 1:
            began = self.now
            if not (taken := self.slots.take(self.per_batch, 0)):
                self.slots._wanted = self.per_batch  # it waits
                while len(self.slots._full) < self.per_batch:
                    assert self.now < began + 10, "nobody acts"
                    self.pass_until(min([self.now + 0.2, *(then for then, _ in self.filling)]))
                taken = self.slots.take(self.per_batch, 0)
            self.waited += self.now - began
            if self.per_batch > 1:
                self.slots.release(taken)
            for _ in range(max(self.K // self.B, 1)):
                self.lags += [self.updates - min(self.versions[slot] for slot in taken)]
                self.slots.train(self.B)
                self.pass_until(self.now + self.update)
                self.updates += 1
            if self.per_batch == 1:
                self.slots.release(taken)


@pytest.mark.parametrize(
    "groups, K, B, rollout, update, lag",
    [
        (4, 16, 4, 0.1, 0.05, 5),  # with all slots full it is 17.5
        (4, 16, 4, 0.2, 0.05, 7),
        (4, 16, 16, 0.1, 0.1, 2.1),  # 4
        (4, 16, 32, 0.3, 0.4, 1.1),  # 2
        (16, 4, 4, 0.32, 0.05, 9),  # 16
        (32, 8, 32, 1.28, 0.4, 4.1),  # 9
    ],
)
def test_slots_are_handed_out_just_in_time_for_a_learner_that_hardly_waits(
    monkeypatch, groups, K, B, rollout, update, lag
):  # fmt: skip
    clock = Clock(K, B, rollout, update, groups)
    monkeypatch.setattr(beast.feeds.slots, "time", clock)
    clock.train(2000)
    half = len(clock.lags) // 2
    assert sum(clock.lags[half:]) / half < lag
    assert clock.waited < 0.005 * clock.now


def test_slots_are_handed_out_later_when_groups_become_faster_and_earlier_when_slower(monkeypatch):
    clock = Clock(16, 4, rollout=0.5, update=0.05)
    monkeypatch.setattr(beast.feeds.slots, "time", clock)
    clock.train(500)
    clock.rollout = 0.1
    clock.train(500)
    assert sum(clock.lags[-400:]) / 400 < 5
    clock.rollout = 0.5
    clock.train(100)
    clock.waited, began = 0.0, clock.now
    clock.train(500)
    assert clock.waited < 0.005 * (clock.now - began)


def test_a_learner_that_is_faster_than_the_groups_has_them_all_at_work(monkeypatch):
    clock = Clock(16, 4, rollout=1.0, update=0.01)
    monkeypatch.setattr(beast.feeds.slots, "time", clock)
    clock.train(500)
    assert clock.now < 500 * 1.0 / 4 * 1.05


def test_a_group_that_hangs_holds_nobody_up_however_few_slots_were_handed_out(monkeypatch):
    clock = Clock(16, 16, rollout=0.01, update=0.1, hangs=100.0)
    monkeypatch.setattr(beast.feeds.slots, "time", clock)
    clock.train(2000)
    assert clock.updates == 1999 and clock.waited < 5
    assert clock.slots._begun_slots() == len(clock.filling) + len(clock.slots._full) and clock.now > 200
