"""Rollout memory and the order in which slots pass from hand to hand."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from beast.rollout import RolloutMemory, Slots, max_policy_lag

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
        "import sys, json; from beast.rollout import RolloutMemory\n"
        "memory = RolloutMemory(**json.loads(sys.argv[2]), fd=int(sys.argv[1]))\n"
        "memory.row(1, 3)['reward'][2] = 42\n"
    )
    import json

    subprocess.run(
        [sys.executable, "-c", code, str(memory.fd), json.dumps(memory.description())],
        pass_fds=[memory.fd],
        check=True,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
    assert memory.rollout(1)["reward"][3, 2] == 42


def test_slots_that_do_not_fit_into_memory_are_refused_with_their_size_and_a_remedy():
    with pytest.raises(MemoryError, match=r"need \d+ MB .*--num_slots"):
        RolloutMemory({"obs/obs": ((1 << 30,), "float32")}, 1000, 20, 32)


def test_slots_are_trained_in_the_order_in_which_they_were_handed_out():
    slots = Slots(3)
    first, second, third = (slots.acquire() for _ in range(3))
    slots.fill(second)
    assert slots.take(1, block=False) is None, "the first one is not full yet"
    slots.fill(first)
    assert slots.take(2, block=False) == [first, second]
    slots.fill(third)
    assert slots.take(1, block=False) == [third]


def test_a_slot_that_was_given_up_no_longer_holds_up_those_behind_it():
    slots = Slots(2)
    lost, kept = slots.acquire(), slots.acquire()
    slots.fill(kept)
    slots.drop(lost)
    assert slots.take(1, block=False) == [kept]
    assert slots.acquire() == lost


def test_no_slot_is_handed_out_twice_before_it_is_released():
    slots = Slots(2)
    a, b = slots.acquire(), slots.acquire()
    assert {a, b} == {0, 1} and slots.acquire() is None
    slots.fill(a)
    slots.take(1)
    assert slots.acquire() is None, "a taken slot is being trained"
    slots.release([a])
    assert slots.acquire() == a


def test_a_waiting_group_is_offered_its_own_slot_first_and_never_that_of_another_one_that_waits():
    slots = Slots(3)
    for slot in (slots.acquire(), slots.acquire(), slots.acquire()):
        slots.fill(slot)
    slots.release(slots.take(2))
    assert slots.acquire(prefer=1, avoid={0}) == 1
    assert slots.acquire(prefer=2, avoid={0}) is None
    assert slots.acquire(prefer=2) == 0


def test_slots_tell_how_many_were_full_when_the_learner_came():
    slots = Slots(3)
    for slot in (slots.acquire(), slots.acquire(), slots.acquire()):
        slots.fill(slot)
    for _ in range(3):
        slots.take(1)
    assert slots.mean_full() == 2, "3, 2 and 1"
    assert slots.take(1, block=False) is None
    assert slots.mean_full() == 0, "of the last call alone"
    assert slots.mean_full() == 0, "and of none"


def test_closing_wakes_the_learner_with_nothing():
    import threading

    slots, taken = Slots(1), []
    thread = threading.Thread(target=lambda: taken.append(slots.take(1)))
    thread.start()
    slots.close()
    thread.join(timeout=5)
    assert taken == [None]


def test_policy_lag_stays_within_its_bound_for_any_interleaving_and_reaches_it():
    """Groups of random speed, a learner of random speed: the lag of every trained rollout is counted and held to the
    bound."""
    for num_slots, K, B in ((4, 16, 16), (5, 16, 4), (6, 8, 16), (5, 8, 16)):
        rng, slots, updates, worst = random.Random(0), Slots(num_slots), 0, 0
        filling, versions = {}, {}
        per_batch = max(B // K, 1)
        for _ in range(20_000):
            if rng.random() < 0.5:
                slot = slots.acquire()
                if slot is not None:
                    filling[slot] = versions[slot] = updates  # the oldest weights that can act in this rollout
            elif filling and rng.random() < 0.7:
                slot = rng.choice(list(filling))
                del filling[slot]
                slots.fill(slot)
            elif (taken := slots.take(per_batch, block=False)) is not None:
                for _ in range(max(K // B, 1)):
                    worst = max(worst, *(updates - versions[slot] for slot in taken))
                    updates += 1
                slots.release(taken)
        assert worst <= max_policy_lag(num_slots, K, B)
        assert worst >= max_policy_lag(num_slots, K, B) - 1, (
            "a bound that is never approached is no bound worth printing"
        )
