"""compat/: what was written for TorchBeast's `nest` and `libtorchbeast` modules, on ours."""

import collections
import contextlib
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from env_hosts import ROOT, ServerProcess, Stream, array_message
from waiting import PATIENCE, wait_until

from beast.envs.rows import ENV_FIELDS

sys.path.insert(0, str(ROOT / "compat"))
import nest  # noqa: E402

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
    "first, second",
    [
        ((1, 2), (1,)),
        ((1,), 1),
        (1, (1,)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ((), {}),
        ({"a": 1}, (1,)),
    ],
)
def test_nests_of_different_structure_are_refused(first, second):
    for function in (lambda: nest.map_many(list, first, second), lambda: nest.map_many2(max, first, second)):
        with pytest.raises(ValueError, match="differ in structure"):
            function()


def test_flatten_and_pack_as_are_inverse():
    structure = {"b": [1, (2, 3)], "a": 0}
    assert nest.flatten(structure) == [0, 1, 2, 3]
    assert nest.pack_as(structure, "wxyz") == {"a": "w", "b": ("x", ("y", "z"))}
    assert nest.flatten(7) == [7] and nest.pack_as(7, [8]) == 8
    for leaves in ("xyz", "vwxyz"):
        with pytest.raises(ValueError, match=f"has 4 leaves, got {len(leaves)}"):
            nest.pack_as(structure, leaves)


def test_front_is_the_first_leaf():
    assert nest.front({"b": 1, "a": ((), [2, 3])}) == 2
    with pytest.raises(ValueError, match="has no leaf"):
        nest.front(({}, []))


def test_leaves_may_be_anything():
    tensor, array = torch.zeros(2), np.zeros(3)
    assert nest.flatten((tensor, [array, None, "text"]))[0] is tensor
    assert nest.front((array,)) is array


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


@pytest.mark.parametrize("second", [np.zeros(1), np.zeros((3, 1)), np.zeros(3, np.float32), (np.zeros(3),)], ids=repr)
def test_an_observation_that_changes_its_form_is_refused_rather_than_broadcast(second):
    class Changing(OldEnv):
        def _observation(self):
            return second if self.count else np.zeros(3)

    env = libtorchbeast.FourValueEnv(Changing())
    row = {name: np.zeros((1, *shape), dtype) for name, (shape, dtype) in env.observation_fields.items()}
    row |= {name: np.zeros(1) for name in ENV_FIELDS}
    env.reset(0, row)
    with pytest.raises(ValueError, match="the first one was float64 .3.|differ in structure"):
        env.step(np.zeros(1), row)


def test_a_server_runs_once_at_a_time_and_stops_only_when_it_runs(tmp_path):
    address = f"unix:{tmp_path / 'old'}"
    with served(OldEnv, address) as server:
        with pytest.raises(RuntimeError, match="running already"):
            server.run()
    with pytest.raises(RuntimeError, match="not running"):
        server.stop()
    wait_until(lambda: not (tmp_path / "old").exists(), "gRPC removes the socket in a thread of its own")


def test_a_server_that_other_machines_can_reach_must_be_wanted():
    with pytest.raises(ValueError, match="other machines can reach 0.0.0.0:1: .*insecure=True"):
        libtorchbeast.Server(OldEnv, "0.0.0.0:1")
    libtorchbeast.Server(OldEnv, "0.0.0.0:1", insecure=True)


# --------------------------------------------------------------------------------- a learner in TorchBeast's style


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


OLD_SCRIPT = """
import os, sys, threading, time
import numpy as np
import libtorchbeast

class Cue:
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

address = sys.argv[1]
server = libtorchbeast.Server(Cue, server_address=address)
def tell():
    while not os.path.exists(address[5:]):
        time.sleep(0.01)
    print("serving old environments on", address, flush=True)
threading.Thread(target=tell).start()
server.run()
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
            script = ["-c", OLD_SCRIPT, f"unix:{directory / 'envs'}"]
            addresses.append(stack.enter_context(ServerProcess(directory, "", script=script)).address)
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
