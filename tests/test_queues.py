"""BatchingQueue, and what it shares with DynamicBatcher: nests to and from Python, blocking, the interpreter's exit."""

from __future__ import annotations

import array
import collections
import gc
import random
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from blocking import BLOCKING_CALLS, InThread, ended_if_it_hangs, libbeast, run_script, stays_blocked  # noqa: F401
from waiting import PATIENCE, wait_until, wait_until_asleep

BatchingQueue, ClosedBatchingQueue = libbeast.BatchingQueue, libbeast.ClosedBatchingQueue

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


def rows(*values, dtype=np.int64):
    """An array [len(values), 2] whose rows can be told apart."""
    return np.array([[value, -value] for value in values], dtype)


def through(nest, **options):
    """What comes out of a queue after this one item."""
    queue = BatchingQueue(**{"batch_dim": 0, **options})
    queue.enqueue(nest)
    return next(queue)


# ---- construction


@pytest.mark.parametrize(
    "options, message",
    [
        ({"minimum_batch_size": 0}, "Min batch size must be >= 1, but got 0"),
        ({"minimum_batch_size": 3, "maximum_batch_size": 2}, "Max batch size must be >= min batch size, but got 2"),
        ({"maximum_batch_size": 8, "maximum_queue_size": 7}, "Max queue size must be >= max batch size, but got 7"),
        ({"batch_dim": -1}, "Batch dim must be >= 0, but got -1"),
        ({"timeout_ms": -1}, "Timeout must be >= 0 ms, but got -1"),
    ],
)
def test_a_queue_that_could_not_work_is_refused_with_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        BatchingQueue(**options)


def test_the_defaults_are_torchbeasts():
    queue = BatchingQueue()
    queue.enqueue(np.zeros((3, 1)))  # batch_dim 1, minimum 1
    assert next(queue).shape == (3, 1)
    queue.enqueue(np.zeros((3, 1025)))
    assert next(queue).shape == (3, 1024)  # maximum 1024
    with pytest.raises(ValueError, match="more than batch_dim == 1 dimensions"):
        queue.enqueue(np.zeros(3))  # inputs are checked


# ---- batches


def test_items_leave_in_order_joined_along_batch_dim():
    queue = BatchingQueue(batch_dim=1, minimum_batch_size=3, maximum_batch_size=3)
    items = [np.arange(4).reshape(2, 1, 2) + 10 * i for i in range(6)]
    for item in items:
        queue.enqueue({"x": item, "y": (item[..., 0],)})
    for first in (0, 3):
        batch = next(queue)
        np.testing.assert_array_equal(batch["x"], np.concatenate(items[first : first + 3], axis=1))
        np.testing.assert_array_equal(batch["y"][0], np.concatenate(items[first : first + 3], axis=1)[..., 0])


def test_sizes_count_rows_not_items():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=4, maximum_batch_size=5)
    queue.enqueue(rows(1, 2, 3))
    assert queue.size() == 3
    batch = InThread(next, queue)
    assert stays_blocked(batch)
    queue.enqueue(rows(4))
    np.testing.assert_array_equal(batch.result(), rows(1, 2, 3, 4))
    assert queue.size() == 0


@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_wide_items_are_split_and_no_row_changes_its_place(batch_dim):
    generator = random.Random(batch_dim)
    queue = BatchingQueue(batch_dim=batch_dim, minimum_batch_size=4, maximum_batch_size=4)
    widths = [generator.randint(1, 11) for _ in range(50)]
    whole = np.random.default_rng(0).normal(size=(3, 2, 5)).repeat(sum(widths), axis=batch_dim)
    whole += np.arange(whole.shape[batch_dim]).reshape([-1 if i == batch_dim else 1 for i in range(3)])
    whole = whole.take(range(sum(widths)), axis=batch_dim)
    for item in np.split(whole, np.cumsum(widths)[:-1], axis=batch_dim):
        queue.enqueue((item, item.astype(np.float32)))
    batches = [next(queue) for _ in range(sum(widths) // 4)]
    assert all(batch[0].shape[batch_dim] == 4 for batch in batches) and queue.size() == sum(widths) % 4
    whole = whole.take(range(4 * len(batches)), axis=batch_dim)
    np.testing.assert_array_equal(np.concatenate([batch[0] for batch in batches], axis=batch_dim), whole)
    np.testing.assert_array_equal(
        np.concatenate([batch[1] for batch in batches], axis=batch_dim), whole.astype(np.float32)
    )


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_an_item_that_is_a_batch_passes_without_a_copy(make):
    item = make((5, 8, 3))
    (out,) = through([item], batch_dim=1, maximum_batch_size=8)
    item[2, 3] = 7.0
    np.testing.assert_array_equal(out, item)


def test_rows_fewer_than_the_minimum_come_once_the_timeout_has_passed():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=100, timeout_ms=300)
    begin = time.monotonic()
    queue.enqueue(rows(1, 2))
    np.testing.assert_array_equal(next(queue), rows(1, 2))
    assert time.monotonic() - begin >= 0.3


def test_the_timeout_runs_from_the_first_row_however_often_others_follow():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=10**6, maximum_batch_size=10**6, timeout_ms=500)
    batch = InThread(next, queue)

    def feed():
        queue.enqueue(rows(1))
        return batch.is_done()

    wait_until(feed)
    assert len(batch.result()) >= 2


def test_without_a_timeout_a_batch_waits_for_the_minimum():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
    queue.enqueue(rows(1))
    batch = InThread(next, queue)
    assert stays_blocked(batch, 0.5)
    queue.enqueue(rows(2))
    np.testing.assert_array_equal(batch.result(), rows(1, 2))


def test_an_empty_queue_gives_no_batch_when_the_timeout_passes():
    queue = BatchingQueue(batch_dim=0, timeout_ms=1)
    batch = InThread(next, queue)
    assert stays_blocked(batch)
    queue.enqueue(rows(1))
    np.testing.assert_array_equal(batch.result(), rows(1))


def test_get_returns_none_when_no_batch_comes_in_time_and_leaves_what_has_come_of_it_in_order():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=3, maximum_batch_size=3)
    began = time.monotonic()
    assert queue.get(timeout=0.2) is None
    assert 0.2 <= time.monotonic() - began < PATIENCE
    queue.enqueue(rows(1, 2))
    assert queue.get(0.0) is None and queue.get(timeout=0.05) is None and queue.size() == 2
    queue.enqueue(rows(3, 4))
    np.testing.assert_array_equal(queue.get(0.0), rows(1, 2, 3))
    assert queue.get(0.0) is None
    queue.enqueue(rows(5, 6))
    np.testing.assert_array_equal(next(queue), rows(4, 5, 6))


def test_get_waits_for_a_batch_as_iteration_does():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1)
    batches = [InThread(queue.get), InThread(queue.get, None), InThread(queue.get, float("inf"))]
    assert all(map(stays_blocked, batches))
    for value in range(3):
        queue.enqueue(rows(value))
    assert sorted(int(batch.result()[0, 0]) for batch in batches) == [0, 1, 2]


def test_a_batch_that_is_cut_short_by_the_queues_timeout_comes_before_gets_own():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=100, timeout_ms=100)
    queue.enqueue(rows(1))
    np.testing.assert_array_equal(queue.get(timeout=PATIENCE), rows(1))


def test_a_consumer_that_gives_up_leaves_its_wake_up_to_another():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1)
    for value in range(200):
        patient, hasty = InThread(next, queue), InThread(queue.get, 0.001)
        time.sleep(0.001)  # so that the row comes about when the hasty one gives up
        queue.enqueue(rows(value))
        if hasty.result() is not None:
            queue.enqueue(rows(value))
        assert patient.result()[0, 0] == value


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_that_is_no_time_is_refused_with_the_value(timeout):
    with pytest.raises(ValueError, match=f"timeout is {timeout:g}.*, must be 0 s or more"):
        BatchingQueue().get(timeout)


def test_closing_ends_get_with_an_error():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
    queue.enqueue(rows(1))
    waiting = InThread(queue.get, PATIENCE)
    assert stays_blocked(waiting)
    queue.close()
    for call in (waiting, InThread(queue.get), InThread(queue.get, 0.0)):
        with pytest.raises(ClosedBatchingQueue):
            call.result()


def test_every_consumer_is_woken_for_rows_that_another_one_left():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1)
    batches = [InThread(next, queue) for _ in range(4)]
    queue.enqueue(rows(1, 2, 3, 4))
    assert sorted(int(batch.result()[0, 0]) for batch in batches) == [1, 2, 3, 4]


# ---- back-pressure


def test_enqueue_waits_while_the_queue_is_full_and_goes_on_when_rows_are_taken():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=2, maximum_queue_size=4)
    queue.enqueue(rows(1, 2, 3))
    queue.enqueue(rows(4, 5, 6))  # there was room for one: an item is let in whole
    blocked = InThread(queue.enqueue, rows(7))
    assert stays_blocked(blocked) and queue.size() == 6
    next(queue)
    assert stays_blocked(blocked) and queue.size() == 4
    next(queue)
    blocked.result()
    assert queue.size() == 3


def test_threads_that_wait_for_room_are_served_in_their_order():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=1)
    queue.enqueue(rows(0))

    calls = collections.Counter()

    def produce(producer):
        for _ in range(20):
            calls[producer] += 1
            queue.enqueue(rows(producer))

    producers = []
    for number in range(1, 6):
        producers.append(InThread(produce, number))
        wait_until_asleep(producers[-1].thread.native_id)  # each waits before the next one comes
    received = []
    for taken in range(1, 2 + 20 * 5):
        received.append(int(next(queue)[0, 0]))
        wait_until(lambda taken=taken: calls.total() >= min(5 + taken, 100))  # who was let in comes again …
        wait_until_asleep(*(p.thread.native_id for p in producers if not p.is_done()))  # … and waits behind all others
    for producer in producers:
        producer.result()
    assert received == [0] + [1, 2, 3, 4, 5] * 20


# ---- many threads


def test_no_row_is_lost_or_doubled_among_many_producers_and_consumers():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=3, maximum_batch_size=7, timeout_ms=5, maximum_queue_size=20)
    num_producers, num_items = 8, 150

    def produce(producer):
        generator, sent = random.Random(producer), 0
        for _ in range(num_items):
            width = generator.randint(1, 9)
            queue.enqueue((np.full((width, 1), producer), np.arange(sent, sent + width)[:, None]))
            sent += width
        return sent

    def consume():
        return [row for who, number in queue for row in zip(who[:, 0].tolist(), number[:, 0].tolist())]

    consumers = [InThread(consume) for _ in range(4)]
    sent = [producer.result() for producer in [InThread(produce, i) for i in range(num_producers)]]
    wait_until(lambda: queue.size() == 0)
    queue.close()
    received = collections.Counter(row for consumer in consumers for row in consumer.result())
    assert received == collections.Counter((i, n) for i in range(num_producers) for n in range(sent[i]))


def test_one_consumer_sees_each_producers_rows_in_order():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=5, maximum_queue_size=10)

    def produce(producer):
        for number in range(0, 300, 3):
            queue.enqueue(np.array([[producer, number + i] for i in range(3)]))

    producers = [InThread(produce, i) for i in range(4)]
    seen = collections.defaultdict(list)
    while sum(map(len, seen.values())) < 4 * 300:
        for producer, number in next(queue).tolist():
            seen[producer].append(number)
    assert all(numbers == list(range(300)) for numbers in seen.values())
    for producer in producers:
        producer.result()


# ---- closing


def test_a_second_close_is_an_error():
    queue = BatchingQueue()
    assert not queue.is_closed()
    queue.close()
    assert queue.is_closed()
    with pytest.raises(RuntimeError, match="^Queue was closed already$"):
        queue.close()


def test_nothing_enters_a_closed_queue():
    queue = BatchingQueue(batch_dim=0)
    queue.close()
    with pytest.raises(ClosedBatchingQueue, match="Enqueue to closed queue"):
        queue.enqueue(rows(1))
    assert issubclass(ClosedBatchingQueue, RuntimeError) and list(queue) == []


def test_closing_drops_what_is_queued():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, maximum_batch_size=2)
    queue.enqueue(rows(1, 2, 3))
    queue.close()
    assert queue.size() == 0 and list(queue) == []


def test_closing_wakes_waiting_consumers():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=5)
    consumers = [InThread(list, queue) for _ in range(3)]
    queue.enqueue(rows(1, 2))
    assert stays_blocked(consumers[0])
    queue.close()
    assert [consumer.result() for consumer in consumers] == [[], [], []]


def test_closing_wakes_waiting_producers():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=1)
    queue.enqueue(rows(1))
    producers = [InThread(queue.enqueue, rows(2)) for _ in range(3)]
    assert stays_blocked(producers[0])
    queue.close()
    for producer in producers:
        with pytest.raises(ClosedBatchingQueue, match="Enqueue to closed queue"):
            producer.result()
    assert list(queue) == []


# ---- what is refused


@pytest.mark.parametrize(
    "nest, message",
    [
        (np.zeros(5), r"more than batch_dim == 1 dimensions, but got 1, shape \[5\]"),
        ((np.zeros((2, 1)), np.float32(3)), r"more than batch_dim == 1 dimensions, but got 0, shape \[\]"),
        ([], "Cannot enqueue empty vector of tensors"),
        ({"a": (), "b": {}}, "Cannot enqueue empty vector of tensors"),
        (np.zeros((2, 0)), "Cannot enqueue no rows: dimension 1 has size 0"),
        ((np.zeros((2, 3)), np.zeros((2, 4))), r"equally many rows in dimension 1, but got 3 and 4, shape \[2, 4\]"),
    ],
)
def test_items_without_an_equal_number_of_rows_are_refused(nest, message):
    queue = BatchingQueue()
    with pytest.raises(ValueError, match=message):
        queue.enqueue(nest)
    assert queue.size() == 0


@pytest.mark.parametrize(
    "other, message",
    [
        (np.zeros((1, 3)), r"float64\[1, 2\] and float64\[1, 3\]"),
        (np.zeros((1, 2), np.float32), r"float64\[1, 2\] and float32\[1, 2\]"),
        (np.zeros((1, 2, 1)), r"float64\[1, 2\] and float64\[1, 2, 1\]"),
        ([np.zeros((1, 2))], "different structures"),
    ],
)
def test_an_item_that_cannot_join_the_waiting_ones_is_refused_where_it_comes_from(other, message):
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
    queue.enqueue(np.zeros((1, 2)))
    with pytest.raises(ValueError, match=message):
        queue.enqueue(other)
    queue.enqueue(np.ones((1, 2)))
    np.testing.assert_array_equal(next(queue), [[0, 0], [1, 1]])


def test_dicts_of_other_keys_and_tuples_of_other_lengths_cannot_be_joined():
    a = np.zeros((1, 2))
    for first, second, message in [
        ({"x": a, "y": a}, {"x": a, "z": a}, 'only one has "y"'),
        ({"x": a}, {"x": a, "z": a}, 'only one has "z"'),
        ((a, a), (a,), "tuples of lengths 2 and 1"),
        ({"x": (a, a)}, {"x": (a, a, a)}, "tuples of lengths 2 and 3"),
    ]:
        queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
        queue.enqueue(first)
        with pytest.raises(ValueError, match=message):
            queue.enqueue(second)


def test_unchecked_inputs_that_do_not_fit_fail_in_the_consumer_and_the_next_batch_is_well():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, maximum_batch_size=2, check_inputs=False)
    for bad in (np.zeros((1, 3)), [np.zeros((1, 2))]):
        queue.enqueue(np.zeros((1, 2)))
        queue.enqueue(bad)
        with pytest.raises(ValueError, match="cannot be batched along dimension 0"):
            next(queue)
    queue.enqueue((np.zeros((2, 1)), np.zeros((1, 1)), np.float32(0)))  # the first leaf speaks for all: two rows
    with pytest.raises(
        ValueError, match=r"cannot take 2 elements from index 0 in dimension 0 of an array of shape \[1, 1\]"
    ):
        next(queue)
    queue.enqueue(rows(1, 2))
    np.testing.assert_array_equal(next(queue), rows(1, 2))


@pytest.mark.parametrize(
    "leaf, message",
    [
        (torch.zeros(1, dtype=torch.bfloat16), "torch.bfloat16 tensor on cpu"),
        (torch.zeros(1, dtype=torch.complex64), "dtype complex64"),
        (torch.zeros(1, device="meta"), "torch.float32 tensor on meta"),
        (np.zeros(1, np.complex128), "dtype complex128"),
        (np.array([None]), "dtype object"),
        (np.array(["text"]), "dtype <U4"),
        (np.zeros(1, "datetime64[s]"), r"dtype datetime64\[s\]"),
        (np.zeros(1, "M8[s]").view([("f", "i8")]), "dtype .*f"),
        (np.zeros(1, ">f4"), "dtype >f4"),
        (np.zeros(1, np.longdouble), "dtype float128|dtype longdouble|dtype float96"),
        (2**70, "dtype object"),
        (1j, "dtype complex128"),
        ("text", "a str in a nest"),
        (None, "a NoneType in a nest"),
        ({1: np.zeros(1)}, r"the key 1 \(int\): keys must be str"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(leaf, message):
    queue = BatchingQueue(batch_dim=0)
    with pytest.raises(TypeError, match=message):
        queue.enqueue((np.zeros(1), leaf))
    assert queue.size() == 0


def test_a_nest_that_contains_itself_is_refused():
    nest = []
    nest.append(nest)
    with pytest.raises(RecursionError):
        BatchingQueue().enqueue(nest)


# ---- nests to and from Python


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_every_dtype_keeps_its_bits_in_a_batch_and_alone(dtype, make):
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, (6, 40), np.uint8).view(dtype)
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=6)
    for part in np.split(bits, [1, 3]):
        queue.enqueue(make(part))
    for batch in (next(queue), through(make(bits))):
        assert isinstance(batch, torch.Tensor) and batch.numpy().dtype == dtype
        assert batch.numpy().tobytes() == bits.tobytes()


def test_lists_come_out_as_tuples_and_dicts_in_key_order():
    a = np.zeros((1, 1))
    Point = collections.namedtuple("Point", "x y")
    batch = through({"b": [a, (a,)], "a": Point({"z": a, "é": a, "Z": a}, ()), "B": a})
    assert list(batch) == ["B", "a", "b"]
    assert type(batch["b"]) is tuple and type(batch["b"][1]) is tuple
    assert type(batch["a"]) is tuple and batch["a"][1] == () and list(batch["a"][0]) == ["Z", "z", "é"]


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_non_contiguous_inputs_arrive_as_they_look(make):
    whole = np.arange(2 * 6 * 4, dtype=np.int16).reshape(2, 6, 4)
    views = [whole.transpose(1, 2, 0), whole[:, ::2], whole[0, 1:5, 1:3], np.moveaxis(whole, 2, 0)[::3]]
    if make is np.asarray:  # torch has no negative strides
        views += [whole[::-1], whole[:, ::-2, ::-1], np.broadcast_to(whole[0], (3, 6, 4)), np.asfortranarray(whole)]
    for view in views:
        np.testing.assert_array_equal(through(make(view)), view)


def test_read_only_and_unaligned_arrays_are_copied():
    read_only = np.ones((2, 2))
    read_only.flags.writeable = False
    through(read_only)[:] = 5
    np.testing.assert_array_equal(read_only, np.ones((2, 2)))
    unaligned = np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float64)
    assert not unaligned.flags.aligned
    assert through(unaligned).data_ptr() % 8 == 0


def test_anything_with_the_buffer_protocol_or_dlpack_is_a_leaf():
    class OnlyDLPack:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    tensor = torch.arange(4.0).reshape(2, 2)
    grad = torch.ones(2, requires_grad=True)
    leaves = [array.array("d", [1, 2]), b"ab", memoryview(bytearray(b"ab")), OnlyDLPack(tensor), grad]
    buffer, letters, view, dlpack, detached = through(leaves)
    assert buffer.tolist() == [1, 2] and buffer.dtype == torch.float64
    assert letters.tolist() == [97, 98] == view.tolist() and letters.dtype == torch.uint8
    assert dlpack.data_ptr() == tensor.data_ptr() and torch.equal(dlpack, tensor)
    assert detached.data_ptr() == grad.data_ptr() and not detached.requires_grad


def test_numbers_are_arrays_without_dimensions():
    for number in (True, 3, 2.5, np.float32(3), np.uint8(200), np.bool_(True), torch.tensor(3)):
        with pytest.raises(ValueError, match=r"more than batch_dim == 0 dimensions, but got 0, shape \[\]"):
            through(number)


class Watched(np.ndarray):
    """An array that weak references can watch."""


def test_inputs_live_as_long_as_what_shares_their_memory_and_no_longer():
    item = np.ones((2, 3)).view(Watched)
    alive = weakref.ref(item)
    batch = through(item)
    del item
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(batch, np.ones((2, 3)))
    del batch
    gc.collect()
    assert alive() is None


def test_joined_inputs_are_let_go_of_whatever_the_main_thread_does():
    def join_two():
        queue = BatchingQueue(batch_dim=0, minimum_batch_size=4)
        items = [np.ones((2, 3)).view(Watched) for _ in range(2)]
        alive = [weakref.ref(item) for item in items]
        while items:
            queue.enqueue(items.pop())
        batch = next(queue)  # their last references go in here, without the GIL
        gc.collect()
        return batch.shape, [item() for item in alive]

    call = InThread(join_two)  # while this thread runs no Python code
    assert call.result() == ((4, 3), [None, None])


@pytest.mark.parametrize("close", [True, False])
def test_inputs_that_nobody_took_go_with_closing_or_with_the_queue(close):
    queue = BatchingQueue(batch_dim=0)
    item = np.ones((2, 3)).view(Watched)
    alive = weakref.ref(item)
    queue.enqueue(item)
    del item
    if close:
        queue.close()
    else:
        del queue
    gc.collect()
    assert alive() is None


NUMPY_ONLY = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import numpy as np
import libbeast

queue = libbeast.BatchingQueue(batch_dim=0)
item = np.ones((2, 2), np.float32)
queue.enqueue({"x": item, "y": (np.zeros((2, 0)),)})
batch = next(queue)
assert type(batch["x"]) is np.ndarray and type(batch["y"][0]) is np.ndarray, batch
item[0] = 5
assert (batch["x"] == [[5, 5], [1, 1]]).all() and batch["x"].flags.writeable
queue.enqueue(batch)  # and back in
assert (next(queue)["x"] == item).all()
"""


def test_without_torch_batches_are_numpy_arrays():
    done = subprocess.run(
        [sys.executable, "-c", NUMPY_ONLY], cwd=Path(libbeast.__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---- blocking calls, all five


@pytest.mark.parametrize("call", BLOCKING_CALLS)
def test_other_python_threads_go_on_while_a_call_blocks(call):
    script = """
        def others():
            wait_until_asleep(os.getpid())  # the main thread
            for _ in range(10):
                time.sleep(0.001)
            print("went on")
            release()

        threading.Thread(target=others).start()
        block()
        sys.stdout.flush()
        os._exit(0)
    """
    assert run_script(call, script) == "went on\n"


@pytest.mark.parametrize("call", BLOCKING_CALLS)
def test_ctrl_c_interrupts(call):
    script = """
        size = queue.size()
        threading.Thread(target=interrupt).start()
        try:
            block()
        except KeyboardInterrupt:
            print("interrupted", queue.size() == size)
    """
    assert run_script(call, script) == "interrupted True\n"


@pytest.mark.parametrize("call", BLOCKING_CALLS)
def test_a_signal_handler_that_returns_does_not_end_the_call(call):
    script = """
        def handler(number, frame):
            print("handled")
            threading.Thread(target=release).start()

        signal.signal(signal.SIGINT, handler)
        threading.Thread(target=interrupt).start()
        block()
        print("returned", flush=True)
        os._exit(0)
    """
    assert run_script(call, script) == "handled\nreturned\n"


@pytest.mark.parametrize("at_exit", ["", "atexit.register(queue.close)"])
@pytest.mark.parametrize("call", BLOCKING_CALLS)
def test_the_interpreter_exits_cleanly_while_daemon_threads_are_blocked(call, at_exit):
    script = f"""
        def quietly():
            try:
                block()
            except (libbeast.ClosedBatchingQueue, StopIteration):
                pass

        threads = [threading.Thread(target=quietly, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until_asleep(*(thread.native_id for thread in threads))
        {at_exit}
        print("end")
    """
    assert run_script(call, script) == "end\n"


def test_a_wait_that_ends_while_the_interpreter_shuts_down_does_not_disturb_it():
    script = """
        class GoesSlowly:
            def __del__(self, sleep=time.sleep):
                sleep(1)

        for _ in range(4):
            threading.Thread(target=lambda: queue.compute(np.ones((1, 2)), timeout_ms=500), daemon=True).start()
        time.sleep(0.1)
        remains = GoesSlowly()  # until the modules are emptied, long after the threads were given up
        print("end")
    """
    assert run_script("compute", script) == "end\n"


def test_ctrl_c_interrupts_in_a_forked_child_whose_main_thread_was_another_here():
    script = """
        def fork():
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                return
            threading.Thread(target=interrupt).start()
            try:
                block()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            os._exit(0)

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    """
    assert run_script("next(queue)", script) == "interrupted\n"


WAKES = """
import resource, sys, threading, numpy as np
sys.modules["torch"] = None
import libbeast
num_blocked = 300
queue = libbeast.BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=1)
threads = [threading.Thread(target=queue.enqueue, args=(np.zeros((1, 1)),), daemon=True) for _ in range(num_blocked)]
for thread in threads:
    thread.start()
while threading.active_count() < num_blocked:  # one has put its row and ended
    pass
import time
time.sleep(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
for _ in range(num_blocked // 2):
    next(queue)
time.sleep(0.2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / (num_blocked // 2))
"""


def test_a_row_that_is_taken_wakes_one_of_those_that_wait_to_put_one():
    done = subprocess.run(
        [sys.executable, "-c", WAKES],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert float(done.stdout) < 20, f"{done.stdout} context switches for each row {done.stderr}"
