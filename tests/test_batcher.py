"""DynamicBatcher: when it fires, who gets which rows, and who learns of which failure.

What it shares with BatchingQueue (nests, dtypes, the GIL, Ctrl-C, the interpreter's exit) is in test_queues.py.
"""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import pytest
import torch
from blocking import InThread, ended_if_it_hangs, libbeast, stays_blocked  # noqa: F401
from waiting import wait_until

DynamicBatcher, AsyncError, ClosedBatchingQueue = (
    libbeast.DynamicBatcher,
    libbeast.AsyncError,
    libbeast.ClosedBatchingQueue,
)

HOUR = 3_600_000  # ms: a timeout that never passes here


def rows(*values):
    """An array [len(values), 2] whose rows can be told apart."""
    return np.array([[value, -value] for value in values], np.int64)


def waiting_calls(batcher, *items) -> list[InThread]:
    """One compute() for each item, queued in this order."""
    calls = []
    for item in items:
        size = batcher.size()
        calls.append(InThread(batcher.compute, item))
        wait_until(lambda: batcher.size() > size)
    return calls


def answering(batcher, function) -> InThread:
    """A consumer that answers every batch with function(inputs) until the batcher closes; its result: batch sizes."""

    def consume():
        sizes = []
        for batch in batcher:
            inputs = batch.get_inputs()
            sizes.append(len(inputs))
            batch.set_outputs(function(inputs))
        return sizes

    return InThread(consume)


# ---- construction


@pytest.mark.parametrize(
    "options, message",
    [
        ({"minimum_batch_size": 0}, "Min batch size must be >= 1, but got 0"),
        ({"minimum_batch_size": 3, "maximum_batch_size": 2}, "Max batch size must be >= min batch size, but got 2"),
        ({"batch_dim": -1}, "Batch dim must be >= 0, but got -1"),
        ({"timeout_ms": -1}, "Timeout must be >= 0 ms, but got -1"),
    ],
)
def test_a_batcher_that_could_not_work_is_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicBatcher(**options)


def test_the_defaults_are_torchbeasts():
    batcher = DynamicBatcher()
    consumer = answering(batcher, lambda x: x)
    assert batcher.compute(np.zeros((3, 2))).shape == (3, 2)  # batch_dim 1, minimum 1, at once
    with pytest.raises(ValueError, match="1025 rows exceed the maximum batch size of 1024"):
        batcher.compute(np.zeros((1, 1025)))
    batcher.close()
    consumer.result()


# ---- who gets what


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_each_caller_gets_the_outputs_of_its_own_rows(batch_dim):
    batcher = DynamicBatcher(batch_dim=batch_dim, minimum_batch_size=6, timeout_ms=HOUR)
    items = [rows(1), rows(2, 3, 4), rows(5, 6)]
    items = items if batch_dim == 0 else [np.stack([item, 10 * item]) for item in items]
    calls = waiting_calls(batcher, *({"x": item} for item in items))
    batch = next(batcher)
    assert batcher.size() == 0
    inputs = batch.get_inputs()["x"]
    np.testing.assert_array_equal(inputs, np.concatenate(items, axis=batch_dim))
    batch.set_outputs([inputs + 1, (inputs.sum(-1) == 0,)])
    for call, item in zip(calls, items):
        doubled, (zero,) = call.result()
        np.testing.assert_array_equal(doubled, item + 1)
        assert zero.shape == item.shape[:-1] and zero.all()


def test_outputs_are_views_of_what_was_set_where_rows_lie_together():
    batcher = DynamicBatcher(batch_dim=1, minimum_batch_size=2, timeout_ms=HOUR)
    calls = waiting_calls(batcher, np.zeros((1, 1)), np.zeros((1, 1)))
    outputs = torch.tensor([[1.0, 2.0]])
    next(batcher).set_outputs(outputs)
    first, second = (call.result() for call in calls)
    outputs += 10
    assert first.tolist() == [[11.0]] and second.tolist() == [[12.0]]


def test_one_caller_alone_gets_its_inputs_and_outputs_without_a_copy():
    batcher = DynamicBatcher(batch_dim=1)
    inputs, outputs = torch.zeros(4, 3), torch.zeros(5, 3)
    (call,) = waiting_calls(batcher, inputs)
    batch = next(batcher)
    assert batch.get_inputs().data_ptr() == inputs.data_ptr()
    batch.set_outputs(outputs)
    assert call.result().data_ptr() == outputs.data_ptr()


def test_outputs_without_leaves_reach_every_caller():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2, timeout_ms=HOUR)
    calls = waiting_calls(batcher, rows(1), rows(2))
    next(batcher).set_outputs(((), {}))
    assert [call.result() for call in calls] == [((), {})] * 2


def test_many_callers_and_consumers_never_get_each_others_rows():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=5, maximum_batch_size=9, timeout_ms=5)
    consumers = [answering(batcher, lambda x: (x * 2, x[:, :1].numpy() + 0.5)) for _ in range(3)]

    def call_often(caller):
        generator = random.Random(caller)
        for number in range(100):
            inputs = rows(*(1000 * caller + number + i for i in range(generator.randint(1, 4))))
            doubled, half = batcher.compute(inputs)
            np.testing.assert_array_equal(doubled, 2 * inputs)
            np.testing.assert_array_equal(half, inputs[:, :1] + 0.5)
        return number

    assert [caller.result() for caller in [InThread(call_often, i) for i in range(12)]] == [99] * 12
    batcher.close()
    assert max(max(consumer.result()) for consumer in consumers) <= 9


# ---- when it fires


def test_it_fires_at_once_when_the_minimum_is_there_and_a_consumer_waits():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2, timeout_ms=HOUR)
    batch = InThread(next, batcher)
    calls = waiting_calls(batcher, rows(1))
    assert stays_blocked(batch)
    calls.append(InThread(batcher.compute, rows(2)))
    outputs = batch.result()
    outputs.set_outputs(outputs.get_inputs())
    assert [call.result()[0, 0].item() for call in calls] == [1, 2]


def test_it_fires_below_the_minimum_once_the_timeout_has_passed():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=100, timeout_ms=300)
    consumer = answering(batcher, lambda x: x)
    begin = time.monotonic()
    batcher.compute(rows(1, 2, 3))
    assert time.monotonic() - begin >= 0.3
    batcher.close()
    assert consumer.result() == [3]


def test_the_timeout_runs_from_the_first_row_however_often_others_follow():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=1000, timeout_ms=500)
    batch, calls = InThread(next, batcher), []

    def feed():
        calls.append(InThread(batcher.compute, rows(1)))
        time.sleep(0.05)
        return batch.is_done()

    wait_until(feed)
    assert 1 <= len(batch.result().get_inputs()) < 1000
    batcher.close()


def test_a_busy_consumers_next_batch_is_full_and_no_item_is_split():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=4, timeout_ms=HOUR)
    calls = waiting_calls(batcher, rows(1), rows(2, 3), rows(4), rows(5, 6, 7), rows(8, 9), rows(10))
    consumer = answering(batcher, lambda x: x)
    for call in calls:
        call.result()
    batcher.close()
    assert consumer.result() == [4, 3, 3]


def test_an_item_that_does_not_fit_sends_off_those_before_it():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=4, maximum_batch_size=4, timeout_ms=HOUR)
    calls = waiting_calls(batcher, rows(1, 2, 3), rows(4, 5))
    batch = next(batcher)
    np.testing.assert_array_equal(batch.get_inputs(), rows(1, 2, 3))
    batch.set_outputs(batch.get_inputs())
    calls[0].result()
    assert batcher.size() == 2
    batcher.close()


# ---- who learns of which failure


TOO_FEW_DIMS = "With batch dimension {}, output shape must have at least {} dimensions, but got {}"
OTHER_ROWS = "Output shape must have the same batch dimension as the input batch size. Expected: 2. Observed: {}"


@pytest.mark.parametrize(
    "batch_dim, outputs, error, message",
    [
        (0, np.zeros(()), ValueError, TOO_FEW_DIMS.format(0, 1, r"\[\]")),
        (2, np.zeros((1, 1)), ValueError, TOO_FEW_DIMS.format(2, 3, r"\[1, 1\]")),
        (0, np.zeros((3, 2)), ValueError, OTHER_ROWS.format(3)),
        (0, (np.zeros((2, 2)), np.zeros((1, 2))), ValueError, OTHER_ROWS.format(1)),
        (0, "text", TypeError, "cannot take a str in a nest"),
        (0, torch.zeros(2, dtype=torch.bfloat16), TypeError, "cannot take a torch.bfloat16 tensor on cpu"),
    ],
)
def test_outputs_that_do_not_fit_are_an_error_in_the_consumer_and_in_the_callers(batch_dim, outputs, error, message):
    batcher = DynamicBatcher(batch_dim=batch_dim, minimum_batch_size=2, timeout_ms=HOUR)
    item = np.zeros([1] * (batch_dim + 1))
    calls = waiting_calls(batcher, item, item)
    batch = next(batcher)
    with pytest.raises(error, match=message):
        batch.set_outputs(outputs)
    for call in calls:
        with pytest.raises(AsyncError, match=message):
            call.result()


def test_unchecked_outputs_need_only_have_the_rows():
    batcher = DynamicBatcher(batch_dim=0, check_outputs=False)
    (call,) = waiting_calls(batcher, rows(1, 2))
    next(batcher).set_outputs(rows(3, 4, 5))  # more rows than asked for
    np.testing.assert_array_equal(call.result(), rows(3, 4))
    (call,) = waiting_calls(batcher, rows(1, 2))
    with pytest.raises(ValueError, match="cannot take 2 elements from index 0 in dimension 0"):
        next(batcher).set_outputs(rows(3))
    with pytest.raises(AsyncError, match="cannot take 2 elements from index 0 in dimension 0"):
        call.result()


def test_a_batch_is_answered_once():
    batcher = DynamicBatcher(batch_dim=0)
    (call,) = waiting_calls(batcher, rows(1))
    batch = next(batcher)
    batch.set_outputs(rows(5))
    with pytest.raises(RuntimeError, match="^set_outputs called twice$"):
        batch.set_outputs(rows(6))
    with pytest.raises(RuntimeError, match="^set_outputs called twice$"):
        batch.set_outputs(rows(6, 7))  # which would not fit either
    assert call.result()[0, 0] == 5


def test_a_batch_dropped_unanswered_is_an_async_error_in_its_callers_only():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=2)
    calls = waiting_calls(batcher, rows(1), rows(2), rows(3))
    dropped, answered = next(batcher), next(batcher)
    del dropped
    gc.collect()
    for call in calls[:2]:
        with pytest.raises(AsyncError, match="dropped unanswered"):
            call.result()
    assert not calls[2].is_done()
    answered.set_outputs(rows(30))
    assert calls[2].result()[0, 0] == 30
    assert issubclass(AsyncError, RuntimeError)


def test_inputs_that_cannot_join_the_waiting_ones_fail_their_own_caller_only():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2, timeout_ms=HOUR)
    (first,) = waiting_calls(batcher, {"x": rows(1)})
    for bad, message in (
        ({"x": rows(1)[:, :1]}, r"int64\[1, 2\] and int64\[1, 1\]"),
        ({"y": rows(1)}, 'only one has "x"'),
    ):
        with pytest.raises(ValueError, match=message):
            batcher.compute(bad)
    calls = [first, InThread(batcher.compute, {"x": rows(2)})]
    batch = next(batcher)
    batch.set_outputs(batch.get_inputs())
    assert [call.result()["x"][0, 0].item() for call in calls] == [1, 2]


@pytest.mark.parametrize("inputs", [np.float32(1), [], np.zeros((0, 2)), (rows(1), rows(1, 2))])
def test_inputs_without_an_equal_number_of_rows_are_refused(inputs):
    batcher = DynamicBatcher(batch_dim=0)
    with pytest.raises(ValueError, match="(Enqueued tensors must have|Cannot enqueue)"):
        batcher.compute(inputs)
    assert batcher.size() == 0


def test_a_compute_that_nobody_answers_ends_with_a_timeout_and_leaves_nothing_behind():
    batcher = DynamicBatcher(batch_dim=0)
    with pytest.raises(TimeoutError, match=r"Compute timeout reached\. No consumer set outputs within 50 ms"):
        batcher.compute(rows(1), timeout_ms=50)
    assert batcher.size() == 0

    consumer = InThread(next, batcher)
    call = InThread(lambda: batcher.compute(rows(1), timeout_ms=1000))
    batch = consumer.result()
    with pytest.raises(TimeoutError):
        call.result()
    batch.set_outputs(rows(1))  # nobody waits for it any more, which is no error
    (call,) = waiting_calls(batcher, rows(2))
    next(batcher).set_outputs(rows(20))
    assert call.result()[0, 0] == 20


def test_compute_waits_for_ever_without_a_timeout():
    batcher = DynamicBatcher(batch_dim=0)
    call = InThread(lambda: batcher.compute(rows(1), timeout_ms=None))
    assert stays_blocked(call)
    next(batcher).set_outputs(rows(1))
    call.result()


# ---- closing


def test_a_second_close_is_an_error_and_a_closed_batcher_computes_nothing():
    batcher = DynamicBatcher(batch_dim=0)
    assert not batcher.is_closed()
    batcher.close()
    assert batcher.is_closed() and list(batcher) == []
    with pytest.raises(RuntimeError, match="^Queue was closed already$"):
        batcher.close()
    with pytest.raises(ClosedBatchingQueue, match="Enqueue to closed queue"):
        batcher.compute(rows(1))


def test_closing_ends_every_compute_the_queued_and_the_taken_ones():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=1)
    calls = waiting_calls(batcher, rows(1), rows(2))
    taken = next(batcher)
    batcher.close()
    for call in calls:
        with pytest.raises(ClosedBatchingQueue, match="closed during compute"):
            call.result()
    assert batcher.size() == 0 and list(batcher) == []
    taken.set_outputs(rows(1))  # an answer that comes too late is no error of the consumer's


def test_closing_wakes_every_waiting_consumer():
    batcher = DynamicBatcher(batch_dim=0)
    consumers = [InThread(list, batcher) for _ in range(3)]
    assert stays_blocked(consumers[0])
    batcher.close()
    assert [consumer.result() for consumer in consumers] == [[], [], []]


def test_closing_among_many_callers_leaves_none_behind():
    for _ in range(20):
        batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=3, maximum_batch_size=4, timeout_ms=1)
        started = threading.Barrier(7)

        def call_until_closed():
            started.wait()
            while True:
                try:
                    batcher.compute(rows(1))
                except ClosedBatchingQueue:
                    return True

        consumers = [answering(batcher, lambda x: x) for _ in range(2)]
        callers = [InThread(call_until_closed) for _ in range(6)]
        started.wait()
        time.sleep(0.005)
        batcher.close()
        assert all(caller.result() for caller in callers)
        for consumer in consumers:
            consumer.result()


def test_a_timeout_of_more_years_than_a_clock_has_is_one_that_never_passes():
    for timeout_ms in (10**13, 2**63 - 1):
        batcher = DynamicBatcher(batch_dim=0, timeout_ms=10**16)
        call = InThread(lambda: batcher.compute(rows(1), timeout_ms=timeout_ms))
        assert stays_blocked(call), "nobody answers yet"
        answering(batcher, lambda x: x)
        np.testing.assert_array_equal(call.result(), rows(1))
        batcher.close()
