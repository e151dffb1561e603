"""compat/: what was written for TorchBeast's `nest`, `vtrace` and `libtorchbeast` modules, on ours."""

import collections
import contextlib
import re
import sys
import threading
import time
import types
from pathlib import Path

import grpc
import gymnasium
import numpy as np
import pytest
import torch
from blocking import InThread, stays_blocked
from env_hosts import ROOT, ServerProcess, Stream, array_message
from waiting import PATIENCE, wait_until, wait_until_asleep

from beast.envs.rows import written_by
from beast.hosts import wire

sys.path.insert(0, str(ROOT / "compat"))
import nest  # noqa: E402
import vtrace  # noqa: E402

libtorchbeast = pytest.importorskip(
    "libtorchbeast", reason="libbeast is not built: pip install .", exc_type=ImportError
)

# ------------------------------------------------------------------------------------------------- nest

Pair = collections.namedtuple("Pair", "left right")


def test_map_keeps_the_structure_but_for_lists_and_the_order_of_keys():
    assert nest.map(lambda x: x + 1, 1) == 2
    mapped = nest.map(lambda x: x + 1, {"b": [1, (2,)], "a": Pair({}, 3), "c": ()})
    assert mapped == {"a": ({}, 4), "b": (2, (3,)), "c": ()}
    assert list(mapped) == ["a", "b", "c"]
    assert type(mapped["a"]) is type(mapped["b"]) is tuple


def test_map_many_passes_one_list_and_map_many2_two_arguments():
    assert nest.map_many(lambda leaves: leaves, (1, {"x": 2}), [3, {"x": 4}], (5, {"x": 6})) == (
        [1, 3, 5],
        {"x": [2, 4, 6]},
    )
    assert nest.map_many(sum, (1, 2)) == (1, 2)
    assert nest.map_many2(lambda a, b: a - b, (5, [7]), (1, [2])) == (4, (5,))


@pytest.mark.parametrize(
    "first, second, text",
    [
        ((1, 2), (1,), "^Expected vectors of same length but got 2 vs 1$"),
        ((1, [1]), (1, []), "^Expected vectors of same length but got 1 vs 0$"),
        ({"a": 1}, {"b": 1}, "^Expected maps to have same keys but found 'a' vs 'b'$"),
        ({"a": 1}, {"a": 1, "b": 2}, "^Expected maps of same length but got 1 vs 2$"),
        ((1,), 1, "^nests don't match: a tuple or list against a leaf$"),
        (1, (1,), "^nests don't match: a leaf against a tuple or list$"),
        ((), {}, "^nests don't match: a tuple or list against a dict$"),
        ({"a": 1}, (1,), "^nests don't match: a dict against a tuple or list$"),
    ],
)
def test_nests_of_different_structure_are_refused_in_torchbeasts_words(first, second, text):
    for function in (
        lambda: nest.map_many(list, first, second),
        lambda: nest.map_many(list, first, first, second),
        lambda: nest.map_many2(max, first, second),
    ):
        with pytest.raises(ValueError, match=text):
            function()


def test_a_map_of_no_nest_is_refused():
    with pytest.raises(ValueError, match="^Expected at least one nest"):
        nest.map_many(list)


def test_flatten_and_pack_as_are_inverse():
    structure = {"b": [1, (2, 3)], "a": 0}
    assert nest.flatten(structure) == [0, 1, 2, 3]
    assert nest.pack_as(structure, "wxyz") == {"a": "w", "b": ("x", ("y", "z"))}
    assert nest.flatten(7) == [7] and nest.pack_as(7, [8]) == 8
    for leaves, text in (("xyz", "^Too few elements in sequence: "), ("vwxyz", "^Nest didn't exhaust sequence: ")):
        with pytest.raises(ValueError, match=f"{text}the nest has 4 leaves, got {len(leaves)} to pack$"):
            nest.pack_as(structure, leaves)


def test_front_is_the_first_leaf():
    assert nest.front({"b": 1, "a": ((), [2, 3])}) == 2
    with pytest.raises(ValueError, match="has no leaf"):
        nest.front(({}, []))


def test_leaves_may_be_anything():
    tensor, array = torch.zeros(2), np.zeros(3)
    assert nest.flatten((tensor, [array, None, "text"]))[0] is tensor
    assert nest.front((array,)) is array


# ----------------------------------------------------------------------------------------------- vtrace


def test_shapes_that_do_not_fit_raise_the_classes_and_words_of_torch():
    T, B = 3, 2
    inputs = {name: torch.zeros(T, B, 4) for name in ("log_rhos", "discounts", "rewards", "values")}
    assert vtrace.from_importance_weights(**inputs, bootstrap_value=torch.zeros(B, 4)).vs.shape == (T, B, 4)
    with pytest.raises(
        RuntimeError, match="^Tensors must have same number of dimensions: got 3 and 2: bootstrap_value"
    ):
        vtrace.from_importance_weights(**inputs, bootstrap_value=torch.zeros(B))
    with pytest.raises(RuntimeError, match="^bootstrap_value has shape .3, 4., expected .2, 4."):
        vtrace.from_importance_weights(**inputs, bootstrap_value=torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="^policy logits have shape"):
        vtrace.action_log_probs(torch.zeros(T, B, 6), torch.zeros(T, 3))
    flat = {name: torch.zeros(T, B) for name in ("discounts", "rewards", "values")}
    logits, actions = torch.zeros(T, B, 6), torch.zeros(T, B, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="same number of dimensions: got 2 and 1"):
        vtrace.from_logits(logits, logits, actions, **flat, bootstrap_value=torch.zeros(()))


# ---------------------------------------------------------------------------------- servers of old environments


class OldEnv:
    """Observes (its name, {step, blank image}) and pays the action; episodes of 3 steps. Counts its own making."""

    made = 0

    def __init__(self):
        OldEnv.made += 1
        self.name, self.closed = OldEnv.made, False

    def reset(self):
        self.count = 0
        return self._observation()

    def step(self, action):
        self.count += 1
        if action == 13:
            raise RuntimeError("this old toy breaks on 13")
        self.action = action
        return self._observation(), float(action), self.count == 3, {}

    def _observation(self):
        return self.name, {"step": np.int32(self.count), "image": np.full((1, 2, 2), self.count, np.uint8)}


@contextlib.contextmanager
def served(env_class, address: str):
    """The address of a running Server in a thread of this process."""
    server = libtorchbeast.Server(env_class, server_address=address)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: Path(address.removeprefix("unix:")).exists())
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_an_old_environment_is_served_as_torchbeast_did(tmp_path):
    address = f"unix:{tmp_path / 'old'}"
    with served(OldEnv, address), Stream(address) as stream:
        assert stream.hello.num_envs == 1 and stream.hello.action.dtype == ""
        assert stream.hello.observation_space == stream.hello.action_space == ""
        parts = stream.hello.observation.tuple.parts
        fields = [
            stream.hello.fields[i] for i in (parts[0].field, *(parts[1].dict.parts[k].field for k in ("image", "step")))
        ]
        assert [(field.dtype, list(field.shape)) for field in fields] == [
            ("int64", []),
            ("uint8", [1, 2, 2]),
            ("int32", []),
        ]
        names = [field.name for field in fields]
        rows = [stream.row()] + [stream.act(np.array([action])) for action in (1, 2, 3, 4, 5)]

    def column(name: str) -> list:
        return [row[name][0].item() for row in rows]

    assert column(names[2]) == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]  # the step that ends an episode brings the next one's first observation
    assert [row[names[1]].max() for row in rows] == [0, 1, 2, 0, 1, 2]
    assert column("reward") == [0, 1, 2, 3, 4, 5]
    assert column("done") == [True, False, False, True, False, False]
    assert column("terminated") == [False, False, False, True, False, False]
    assert column("truncated") == [False] * 6
    assert column("episode_step") == [0, 1, 2, 3, 1, 2]
    assert column("episode_return") == [0, 1, 3, 6, 4, 9]


def test_every_stream_has_an_environment_of_its_own_and_any_action_will_do(tmp_path):
    address = f"unix:{tmp_path / 'old'}"
    with served(OldEnv, address), Stream(address) as one, Stream(address) as other:
        first, second = one.row(), other.row()
        assert first["observation/0"] != second["observation/0"]
        assert one.act(np.array([2.5], np.float32))["reward"] == 2.5
        assert other.act(np.array([True]))["reward"] == 1.0
        other.send(array_message(np.array([1, 2])))
        assert "int64 [2], the env server takes int64 [1]" in other.end()[1]


def test_an_old_environment_that_raises_tells_the_learner(tmp_path, capfd):
    address = f"unix:{tmp_path / 'old'}"
    with served(OldEnv, address):
        for _ in range(2):
            with Stream(address) as stream:
                stream.row()
                stream.send(array_message(np.array([13])))
                assert "RuntimeError: this old toy breaks on 13" in stream.receive().error
                assert stream.end()[0] == grpc.StatusCode.ABORTED
    assert "this old toy breaks on 13" in capfd.readouterr().err


def first_and_next_row(env, action=0) -> tuple[dict, dict]:
    """The rows of one environment before and after an action."""
    served_env = libtorchbeast.ServedEnv(env)
    fields = {**served_env.observation_fields, **{name: ((), dtype) for name, dtype in written_by("env").items()}}
    rows = [{name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in fields.items()} for _ in range(2)]
    served_env.reset(0, rows[0])
    served_env.step(nest.map(lambda x: np.asarray(x)[None], action), rows[1])
    return rows[0], rows[1]


class Returns(OldEnv):
    """Observes 0 at a reset. A step returns `values`."""

    def __init__(self, *values):
        self.values = values

    def reset(self):
        return np.int32(0)

    def step(self, action):
        return self.values


@pytest.mark.parametrize(
    "more, done, truncated",
    [
        ((False,), False, False),
        ((True,), True, False),
        ((True, {}), True, False),
        ((np.bool_(True), {}, "whatever", "follows"), True, False),
        ((False, False, {}), False, False),
        ((True, False, {}), True, False),
        ((False, True, {}), True, True),
        ((False, np.bool_(True), {}), True, True),
        ((False, {}, "no info"), False, False),
        ((False, 1.0, {}), False, False),
        ((False, True, {}, "not gymnasium's"), False, False),
    ],
)
def test_a_step_may_return_three_values_or_more_and_gymnasiums_five(more, done, truncated):
    _, row = first_and_next_row(Returns(np.int32(7), 0.5, *more))
    assert row["observation/0"] == (0 if done else 7) and row["reward"] == 0.5
    assert [row[name][0] for name in ("done", "terminated", "truncated")] == [done, done and not truncated, truncated]


@pytest.mark.parametrize(
    "result, what", [((), "0 values"), ((np.int32(7), 0.5), "2 values"), (None, "a NoneType"), (0.5, "a float")]
)
def test_a_step_that_returns_too_little_is_told_what_is_expected(result, what):
    env = Returns()
    env.values = result
    with pytest.raises(ValueError, match=f"returned {what}: return at least three, .observation, reward, done"):
        first_and_next_row(env)


class Modern(gymnasium.Env):
    """Gymnasium's interface: observes the step, is truncated in the first."""

    def reset(self, *, seed=None, options=None):
        return np.int32(0), {"why": "it begins"}

    def step(self, action):
        return np.int32(7), 1.0, False, True, {"why": "time is up"}


def test_an_environment_of_gymnasium_is_served_without_its_infos(monkeypatch):
    plain = type("Plain", (), {name: getattr(Modern, name) for name in ("reset", "step")})
    of_gym = type("OfGym", (plain,), {"__module__": "gym.envs.toy"})
    monkeypatch.setitem(sys.modules, "gym", types.SimpleNamespace(__version__="0.26.2"))
    for env in (Modern(), gymnasium.wrappers.TransformReward(Modern(), float), of_gym()):
        first, row = first_and_next_row(env)
        assert [first["observation/0"], row["observation/0"]] == [0, 0]
        assert row["done"] and row["truncated"] and not row["terminated"]

    plain.reset = lambda self: (np.int32(0), {})  # of no package; an observation of TorchBeast has no empty dict
    assert first_and_next_row(plain())[0]["observation/0"] == 0
    plain.reset = lambda self: (np.int32(0), {"part": np.int32(1)})
    plain.step = lambda self, action: ((np.int32(2), {"part": np.int32(3)}), 0.0, False, {})
    monkeypatch.setitem(sys.modules, "gym", types.SimpleNamespace(__version__="0.21.0"))
    for env in (plain(), of_gym()):
        assert first_and_next_row(env)[1]["observation/1"] == 3


def test_an_action_is_an_array_that_its_environment_may_write_to():
    class Writes(Returns):
        def step(self, action):
            assert isinstance(action, np.ndarray) and action.shape == self.values
            action += 1
            return np.int32(action.sum()), 0.0, False

    assert first_and_next_row(Writes(), np.int64(5))[1]["observation/0"] == 6
    assert first_and_next_row(Writes(2), np.array([5, 6]))[1]["observation/0"] == 13


def test_a_nest_of_actions_that_is_malformed_is_refused(tmp_path):
    address = f"unix:{tmp_path / 'old'}"
    one = array_message(np.array([1]))
    with served(OldEnv, address):
        for message, text in [
            (wire.Array(parts=[one], structure=wire.Structure(field=1)), "a part of a nest is none of its 1 arrays"),
            (wire.Array(parts=[one], structure=wire.Structure()), "a part of a nest is none of its 1 arrays"),
            (wire.Array(parts=[wire.Array()], structure=wire.Structure(field=0)), "actions  .., the env server takes"),
            (
                wire.Array(parts=[one, array_message(np.zeros(2, np.float32))], structure=wire.Structure(field=0)),
                "float32 .2., the env server takes float32 .1.",
            ),
        ]:
            with Stream(address) as stream:
                stream.row()
                stream.send(message)
                code, said = stream.end()
                assert code == grpc.StatusCode.INVALID_ARGUMENT and re.search(text, said), said


@pytest.mark.parametrize("second", [np.zeros(1), np.zeros((3, 1)), np.zeros(3, np.float32), (np.zeros(3),)], ids=repr)
def test_an_observation_that_changes_its_form_is_refused_rather_than_broadcast(second):
    class Changing(OldEnv):
        def _observation(self):
            return second if self.count else np.zeros(3)

    with pytest.raises(ValueError, match="the first one was float64 .3.|nests don't match"):
        first_and_next_row(Changing())


def test_a_server_runs_once_at_a_time_and_stops_only_when_it_runs(tmp_path):
    address = f"unix:{tmp_path / 'old'}"
    with served(OldEnv, address) as server:
        with pytest.raises(RuntimeError, match="running already"):
            server.run()
    with pytest.raises(RuntimeError, match="not running"):
        server.stop()
    wait_until(lambda: not (tmp_path / "old").exists(), "gRPC removes the socket in a thread of its own")


class SlowToMake(OldEnv):
    alive = most = 0

    def __init__(self):
        super().__init__()
        SlowToMake.alive += 1
        SlowToMake.most = max(SlowToMake.most, SlowToMake.alive)
        time.sleep(0.3)

    def close(self):
        SlowToMake.alive -= 1


def test_streams_that_ask_at_once_for_the_hello_wait_for_one_example(tmp_path):
    address = f"unix:{tmp_path / 'old'}"
    made = OldEnv.made

    def ask():
        with Stream(address, only_hello=True) as stream:
            return stream.hello.num_envs

    with served(SlowToMake, address):
        assert [asking.result() for asking in [InThread(ask) for _ in range(4)]] == [1] * 4
    assert OldEnv.made == made + 1 and SlowToMake.most == 1 and SlowToMake.alive == 0


def test_a_pool_names_torchbeasts_fields_of_a_row_and_waits_as_long_by_default(monkeypatch):
    given, make = [], libtorchbeast.libbeast.ActorPool.__init__

    def make_and_tell(pool, *arguments, **options):
        given.append(options)
        make(pool, *arguments, **options)

    monkeypatch.setattr(libtorchbeast.libbeast.ActorPool, "__init__", make_and_tell)
    queues = libtorchbeast.BatchingQueue(), libtorchbeast.DynamicBatcher()
    for options in ({}, {"env_timeout": 1.0, "seed": 2}):
        libtorchbeast.ActorPool(3, *queues, ["unix:/nowhere"], (), **options)
    always = {"connect_timeout": 600.0, "row_fields": ("reward", "done", "episode_step", "episode_return")}
    assert given == [{"env_timeout": 999_999.0, **always}, {"env_timeout": 1.0, "seed": 2, **always}]


def test_a_server_that_other_machines_can_reach_must_be_wanted():
    with pytest.raises(ValueError, match="other machines can reach 0.0.0.0:1: .*insecure=True"):
        libtorchbeast.Server(OldEnv, "0.0.0.0:1")
    libtorchbeast.Server(OldEnv, "0.0.0.0:1", insecure=True)


# --------------------------------------------------------------------------------- a learner in TorchBeast's style


def test_the_first_releases_modules_have_the_same_classes():
    from libtorchbeast import actorpool, rpcenv

    names = {*actorpool.__all__, *rpcenv.__all__}
    assert names == {*libtorchbeast.__all__, "Batch", "NestError"}  # the release after it had neither of the two
    for name in libtorchbeast.__all__:
        assert getattr(rpcenv if name == "Server" else actorpool, name) is getattr(libtorchbeast, name)
    batcher = actorpool.DynamicBatcher(batch_dim=2, minimum_batch_size=1, maximum_batch_size=1)
    call = InThread(batcher.compute, torch.zeros(1, 2, 3))
    batch = next(batcher)
    assert isinstance(batch, actorpool.Batch)
    with pytest.raises(actorpool.NestError):
        batch.set_outputs(torch.ones(1))
    batch.set_outputs(torch.ones(1, 1, 1))
    assert call.result().shape == (1, 1, 1)


def test_the_documented_adapter_gives_four_values():
    source = re.search(r"```python\n(class FourValues.*?)```", (ROOT / "docs" / "polybeast.md").read_text(), re.DOTALL)
    exec(source[1], names := {"gymnasium": gymnasium})
    env = names["FourValues"](gymnasium.make("CartPole-v1", max_episode_steps=3))
    served = libtorchbeast.ServedEnv(env)
    assert served.observation_fields == {"observation/0": ((4,), "float32")}
    assert len(env.reset()) == 4
    assert [env.step(0)[2] for _ in range(3)] == [False, False, True]


def test_the_six_names_are_there():
    assert issubclass(libtorchbeast.ClosedBatchingQueue, RuntimeError)
    assert issubclass(libtorchbeast.AsyncError, RuntimeError)
    queue = libtorchbeast.BatchingQueue(
        batch_dim=0, minimum_batch_size=1, maximum_batch_size=2, timeout_ms=100, check_inputs=True, maximum_queue_size=4
    )
    queue.enqueue((torch.ones(2, 3), {"x": np.zeros(2)}))
    batch = next(queue)
    assert torch.equal(batch[0], torch.ones(2, 3)) and batch[1]["x"].shape == (2,)
    queue.close()
    with pytest.raises(libtorchbeast.ClosedBatchingQueue, match="Enqueue to closed queue"):
        queue.enqueue(torch.ones(2, 3))
    batcher = libtorchbeast.DynamicBatcher(
        batch_dim=0, minimum_batch_size=1, maximum_batch_size=2, timeout_ms=100, check_outputs=True
    )
    asked = threading.Thread(target=lambda: answers.append(batcher.compute(torch.ones(1))))
    answers: list = []
    asked.start()
    batch = next(batcher)
    batch.set_outputs(batch.get_inputs() * 3)
    asked.join()
    assert answers == [torch.tensor([3.0])]
    batcher.close()


@pytest.mark.parametrize(
    "name, options, text",
    [
        *(
            (name, options, text)
            for name in ("BatchingQueue", "DynamicBatcher")
            for options, text in [
                ({"minimum_batch_size": 0}, "Min batch size must be >= 1"),
                ({"minimum_batch_size": 3, "maximum_batch_size": 2}, "Max batch size must be >= min batch size"),
            ]
        ),
        (
            "BatchingQueue",
            {"maximum_batch_size": 8, "maximum_queue_size": 7},
            "Max queue size must be >= max batch size",
        ),
    ],
)
def test_constructors_refuse_in_torchbeasts_words(name, options, text):
    with pytest.raises(ValueError) as refused:
        getattr(libtorchbeast, name)(**options)
    assert str(refused.value) == text


def test_sizes_of_a_queue_count_items_whatever_their_rows():
    queue = libtorchbeast.BatchingQueue(batch_dim=0, minimum_batch_size=2, maximum_batch_size=2, maximum_queue_size=3)
    for rows in (3, 0, 2):
        queue.enqueue((torch.full((rows, 2), rows), torch.full((1,), rows)))
    assert queue.size() == 3
    waits = InThread(queue.enqueue, (torch.ones(1, 2, dtype=torch.int64), torch.ones(1, dtype=torch.int64)))
    assert stays_blocked(waits)
    first, second = next(queue)  # leaves of an item may differ in their rows
    assert first.shape == (3, 2) and (first == 3).all() and second.tolist() == [3, 0]
    waits.result()
    assert queue.size() == 2
    assert [leaf.shape[0] for leaf in next(queue)] == [3, 2]


def test_a_compute_of_many_rows_is_one_item_and_is_answered_with_one_row():
    batcher = libtorchbeast.DynamicBatcher(batch_dim=0, minimum_batch_size=2, maximum_batch_size=2, timeout_ms=None)
    calls = []
    for rows in (3, 5):
        calls.append(InThread(batcher.compute, torch.full((rows, 2), rows)))
        wait_until(lambda: batcher.size() == len(calls))
    batch = next(batcher)
    assert batch.get_inputs().tolist() == [[3, 3]] * 3 + [[5, 5]] * 5
    with pytest.raises(ValueError, match="as the input batch size. Expected: 2. Observed: 8"):
        batch.set_outputs(torch.zeros(8))
    batch.set_outputs(torch.tensor([30, 50]))
    assert [call.result().tolist() for call in calls] == [[30], [50]]


def test_a_batch_never_shares_memory_with_an_item():
    item = torch.ones(1, 2)
    queue = libtorchbeast.BatchingQueue(batch_dim=0)
    queue.enqueue(item)
    next(queue).zero_()
    assert item.tolist() == [[1, 1]]

    batcher = libtorchbeast.DynamicBatcher(batch_dim=0)
    call = InThread(batcher.compute, item)
    batch = next(batcher)
    batch.get_inputs().add_(1)
    assert batch.get_inputs().tolist() == [[2, 2]] and item.tolist() == [[1, 1]]
    batch.set_outputs(batch.get_inputs())
    assert call.result().tolist() == [[2, 2]]


def test_a_batch_can_be_answered_after_outputs_that_do_not_fit():
    batcher = libtorchbeast.DynamicBatcher(batch_dim=1)
    call = InThread(batcher.compute, torch.ones(1, 1))
    batch = next(batcher)
    with pytest.raises(ValueError, match="output shape must have at least 2 dimensions, but got .1."):
        batch.set_outputs(torch.zeros(1))
    with pytest.raises(ValueError, match="Output shape must have the same batch dimension as the input batch size"):
        batch.set_outputs(torch.zeros(1, 2))
    with pytest.raises(TypeError, match="cannot take a str in a nest"):
        batch.set_outputs("text")
    assert stays_blocked(call)
    batch.set_outputs(torch.full((1, 1), 7))
    assert call.result().tolist() == [[7]]
    with pytest.raises(RuntimeError, match="^set_outputs called twice$"):
        batch.set_outputs(torch.zeros(1))


def test_a_batch_that_is_dropped_breaks_its_promise_in_torchbeasts_words():
    batcher = libtorchbeast.DynamicBatcher(batch_dim=0)
    words = "Broken promise. The associated promise has been destructed prior to the associated state becoming ready. "
    for outputs in (None, torch.zeros(5)):
        call = InThread(batcher.compute, torch.ones(1))
        batch = next(batcher)
        if outputs is not None:
            with pytest.raises(ValueError, match="Observed: 5"):
                batch.set_outputs(outputs)
        del batch
        with pytest.raises(libtorchbeast.AsyncError, match=f"{words}.*did not call set_outputs"):
            call.result()


def test_a_full_batch_at_the_closing_reaches_a_consumer_that_waits():
    for number in range(100):
        queue = libtorchbeast.BatchingQueue(batch_dim=0)
        consumer = InThread(next, queue)
        wait_until_asleep(consumer.thread.native_id)
        queue.enqueue(torch.tensor([number]))
        queue.close()
        assert consumer.result().tolist() == [number]
        with pytest.raises(StopIteration):
            next(queue)
    queue = libtorchbeast.BatchingQueue(batch_dim=0, minimum_batch_size=2)
    consumer = InThread(next, queue)
    wait_until_asleep(consumer.thread.native_id)
    queue.enqueue(torch.ones(1))
    queue.close()
    with pytest.raises(StopIteration):
        consumer.result()
    assert queue.size() == 0


def test_calls_queue_in_the_order_in_which_python_runs_them():
    batcher = libtorchbeast.DynamicBatcher(batch_dim=0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread runs until it waits
    try:
        calls, sizes = [], []
        for number in range(50):
            calls.append(InThread(batcher.compute, np.array([number])))
            sizes.append(batcher.size())
    finally:
        sys.setswitchinterval(interval)
    in_order = sum(size == number for number, size in enumerate(sizes, 1))
    assert in_order > 25, sizes  # all but one of 1,500; when they queued without the GIL it was one of twenty
    wait_until(lambda: batcher.size() == 50)
    batch = next(batcher)
    batch.set_outputs(batch.get_inputs())
    assert [call.result().item() for call in calls] == list(range(50))


def test_a_timeout_begins_when_a_consumer_waits():
    batcher = libtorchbeast.DynamicBatcher(batch_dim=0, minimum_batch_size=2, maximum_batch_size=2, timeout_ms=200)
    call = InThread(batcher.compute, torch.ones(1))
    wait_until(lambda: batcher.size() == 1)
    time.sleep(0.3)
    began = time.monotonic()
    batch = next(batcher)
    assert time.monotonic() - began >= 0.2
    batch.set_outputs(batch.get_inputs())
    assert call.result().tolist() == [1]


# ------------------------------------------------------------------------------------- a pool on one old environment

IMPORT = """
import os, sys, threading, time
import numpy as np
import libtorchbeast
"""

SERVE = """
address = sys.argv[1]
server = libtorchbeast.Server(Env, server_address=address)
def tell():
    while not os.path.exists(address[5:]):
        time.sleep(0.01)
    print("serving old environments on", address, flush=True)
threading.Thread(target=tell).start()
server.run()
"""

ECHO = """
class Env:
    '''Observes its last action.'''
    def reset(self):
        return {"look": (np.zeros((2, 2), np.float32),), "move": np.int64(0)}
    def step(self, action):
        assert action["move"].flags.writeable and action["look"][0].flags.writeable
        return {"look": action["look"], "move": action["move"]}, 1.0, False, {}
"""


def server_of(env: str, directory: Path) -> ServerProcess:
    """A process that serves the class Env which `env` defines."""
    return ServerProcess(directory, "", script=["-c", IMPORT + env + SERVE, f"unix:{directory / 'envs'}"])


@contextlib.contextmanager
def pool_on(directory: Path, env: str, answer, unroll_length=3):
    """The learner queue and the run of a pool with one stream of the class Env that `env` defines. `answer` makes the
    agent's outputs of env_outputs."""
    learner_queue = libtorchbeast.BatchingQueue(batch_dim=1, maximum_batch_size=1)
    batcher = libtorchbeast.DynamicBatcher(batch_dim=1, timeout_ms=100)

    def infer():
        for batch in batcher:
            env_outputs, agent_state = batch.get_inputs()
            outputs = answer(env_outputs)
            if outputs is not None:
                batch.set_outputs((outputs, agent_state))
            del batch

    with server_of(env, directory) as server:
        actors = libtorchbeast.ActorPool(unroll_length, learner_queue, batcher, [server.address], ())
        threads = [InThread(actors.run), InThread(infer)]
        yield learner_queue, threads[0]
        with contextlib.suppress(RuntimeError):
            batcher.close()
            learner_queue.close()
        threads[1].result()
        threads[0].thread.join(PATIENCE)


def test_all_of_a_nested_action_reaches_its_environment(tmp_path):
    numbers = iter(range(1, 1000))

    def answer(env_outputs):
        move = torch.tensor([[next(numbers)]])
        return {"move": move, "look": [torch.full((1, 1, 2, 2), move.item() / 2)]}, move * 10

    with pool_on(tmp_path, ECHO, answer) as (learner_queue, run):
        for first in (0, 3, 6):
            ((observation, reward, done, _, _), (action, other)), _ = next(learner_queue)
            assert observation["move"].flatten().tolist() == [first, first + 1, first + 2, first + 3]
            assert torch.equal(observation["move"], action["move"])
            assert torch.equal(observation["look"][0], action["look"][0])
            assert torch.equal(other, action["move"] * 10)
        assert not run.is_done()


def test_an_action_without_an_array_is_refused(tmp_path):
    with pool_on(tmp_path, ECHO, lambda env_outputs: ((), torch.zeros(1, 1))) as (_, run):
        with pytest.raises(ValueError, match="the action, has no array: inference must answer with"):
            run.result()


def test_what_inference_writes_to_its_inputs_does_not_reach_the_learner(tmp_path):
    def answer(env_outputs):
        step = env_outputs[3].item()
        for leaf in nest.flatten(env_outputs):
            leaf.fill_(1)
        return {"move": torch.tensor([[step + 1]]), "look": (torch.zeros(1, 1, 2, 2),)}, torch.zeros(1, 1)

    with pool_on(tmp_path, ECHO, answer) as (learner_queue, _):
        for first in (0, 3):
            ((observation, reward, done, episode_step, episode_return), _), _ = next(learner_queue)
            steps = [first, first + 1, first + 2, first + 3]
            assert observation["move"].flatten().tolist() == episode_step.flatten().tolist() == steps
            assert episode_return.flatten().tolist() == steps
            assert reward.flatten().tolist() == [float(step > 0) for step in steps]
            assert done.flatten().tolist() == [step == 0 for step in steps]
            assert not observation["look"][0].any()


def test_a_dropped_batch_of_a_pool_ends_its_run_in_torchbeasts_words(tmp_path):
    with pool_on(tmp_path, ECHO, lambda env_outputs: None) as (_, run):
        with pytest.raises(libtorchbeast.AsyncError, match="The associated promise has been destructed"):
            run.result()


# -------------------------------------------------------------------------------------------- an agent that learns

CUE = """
class Env:
    '''Shows one of two cues, one-hot; +1 for the action that is the cue, else -1; episodes of 5 steps.'''
    def __init__(self):
        self.random = np.random.default_rng(os.getpid())
    def reset(self):
        self.count, self.cue = 0, self.random.integers(2)
        return np.eye(2, dtype=np.float32)[self.cue]
    def step(self, action):
        reward = 1 if action == self.cue else -1
        self.count, self.cue = self.count + 1, self.random.integers(2)
        return np.eye(2, dtype=np.float32)[self.cue], reward, self.count == 5, {}
"""
EnvOutput = collections.namedtuple("EnvOutput", "frame rewards done episode_step episode_return")
AgentOutput = collections.namedtuple("AgentOutput", "action policy_logits baseline")


def test_a_learner_in_torchbeasts_style_learns_and_stops(tmp_path):
    UNROLL, BATCH, STREAMS = 5, 4, 4
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    learner_queue = libtorchbeast.BatchingQueue(
        batch_dim=1, minimum_batch_size=BATCH, maximum_batch_size=BATCH, check_inputs=True, maximum_queue_size=BATCH
    )
    inference_batcher = libtorchbeast.DynamicBatcher(
        batch_dim=1, minimum_batch_size=1, maximum_batch_size=512, timeout_ms=100, check_outputs=True
    )
    rewards: list[float] = []
    returns: list[float] = []
    failures: list[BaseException] = []
    lock = threading.Lock()
    done_learning = threading.Event()

    def infer():
        for batch in inference_batcher:
            env_outputs, agent_state = batch.get_inputs()
            frame, reward, done, *_ = EnvOutput._make(env_outputs)
            assert frame.shape == (1, reward.shape[1], 2) and len(reward) == 1
            with torch.no_grad():
                logits = model(frame)
            action = torch.multinomial(torch.softmax(logits[0], dim=1), 1).view(1, -1)
            batch.set_outputs(((action, logits, torch.zeros(action.shape)), nest.map(lambda s: s + 1, agent_state)))

    def learn():
        for tensors in learner_queue:
            (env_outputs, actor_outputs), initial_agent_state = tensors
            env_outputs, actor_outputs = EnvOutput._make(env_outputs), AgentOutput._make(actor_outputs)
            assert env_outputs.rewards.shape == (UNROLL + 1, BATCH)
            assert nest.front(initial_agent_state).shape == (1, BATCH, 1)
            assert (nest.front(initial_agent_state) % UNROLL == 0).all()  # it counts the decisions before row 0
            with lock:
                logits = model(env_outputs.frame[:-1])
                chosen = torch.log_softmax(logits, -1).gather(-1, actor_outputs.action[1:, :, None]).squeeze(-1)
                loss = -(chosen * env_outputs.rewards[1:]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rewards.append(env_outputs.rewards[1:].mean().item())
                returns.extend(env_outputs.episode_return[1:][env_outputs.done[1:]].tolist())
            if len(rewards) >= 20 and sum(rewards[-20:]) / 20 > 0.8:
                done_learning.set()

    def watched(work):
        try:
            work()
        except BaseException as error:
            failures.append(error)
            done_learning.set()

    with contextlib.ExitStack() as stack:
        addresses = []
        for index in range(2):
            directory = tmp_path / str(index)
            directory.mkdir()
            addresses.append(stack.enter_context(server_of(CUE, directory)).address)
        actors = libtorchbeast.ActorPool(
            unroll_length=UNROLL,
            learner_queue=learner_queue,
            inference_batcher=inference_batcher,
            env_server_addresses=addresses * (STREAMS // 2),
            initial_agent_state=(torch.zeros(1, 1, 1),),
        )
        threads = [threading.Thread(target=watched, args=(work,)) for work in (infer, learn, learn, actors.run)]
        for thread in threads:
            thread.start()
        learned = done_learning.wait(PATIENCE)
        inference_batcher.close()
        learner_queue.close()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
    assert not failures and learned, f"mean reward {rewards[-20:]}"
    assert actors.count() >= len(rewards) * UNROLL * BATCH
    assert set(returns) <= {-5, -3, -1, 1, 3, 5} and np.mean(returns[-20:]) > 2
