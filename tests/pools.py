"""A pool with its two loops, groups and an agent that are easy to check, and an env server's messages."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from waiting import PATIENCE

from beast.envs.rows import written_by
from beast.hosts import env_server, wire

libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)

UNROLL_LENGTH = 5
LIMIT = PATIENCE  # seconds after which a test that got stuck is ended


def act_with_zeros(env_outputs, agent_state):
    """The simplest agent: action 0, and a state that stays as it is."""
    return (np.zeros(tuple(env_outputs[1].shape), np.int64),), agent_state


class Learner:
    """A pool and the loops around it, each in a thread. `errors` is what run() raised; `log` what it told;
    `agent_errors` what the agent raised, whose batches are dropped.

    `agent(env_outputs, agent_state)` returns what a batch is answered with.
    """

    def __init__(self, addresses, *, agent=act_with_zeros, width=1, state=(), unroll_length=UNROLL_LENGTH, **options):
        self.queue = libbeast.BatchingQueue(
            minimum_batch_size=width, maximum_batch_size=width, maximum_queue_size=width
        )
        self.batcher = libbeast.DynamicBatcher(minimum_batch_size=1, timeout_ms=5)
        self.agent, self.agent_errors, self.errors, self.log = agent, [], [], []
        options = {"log": self.log.append, "env_timeout": LIMIT, "connect_timeout": 60.0, **options}
        self.pool = libbeast.ActorPool(unroll_length, self.queue, self.batcher, list(addresses), state, **options)
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._run, self._infer)]
        self._timer = threading.Timer(LIMIT, self._give_up)

    def _run(self):
        try:
            self.pool.run()
        except BaseException as error:
            self.errors.append(error)
        self.close()

    def _infer(self):
        for batch in self.batcher:
            try:
                batch.set_outputs(self.agent(*batch.get_inputs()))
            except Exception as error:
                self.agent_errors.append(error)
            del batch

    def _give_up(self):
        self.errors.append(TimeoutError(f"still not done after {LIMIT} s"))
        self.close()

    def close(self):
        for closable in (self.queue, self.batcher):
            with contextlib.suppress(RuntimeError):  # the other thread was first
                closable.close()

    def rollouts(self, count):
        """That many items of the queue; fails with what run() raised if it ends before."""
        for _ in range(count):
            try:
                yield next(self.queue)
            except StopIteration:
                self.threads[0].join()
                raise AssertionError(f"run() has ended: {self.errors}") from None

    def wait(self):
        """Until run() is done, whatever rollouts come. Returns what it raised, or None."""
        for _ in self.queue:
            pass
        self.threads[0].join(LIMIT + 5)
        assert not self.threads[0].is_alive()
        return self.errors[0] if self.errors else None

    def __enter__(self):
        self._timer.start()
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exception):
        self._timer.cancel()
        self.close()
        for thread in self.threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a loop did not end with its queue"


@contextlib.contextmanager
def in_process_server(make_group, address, **options):
    server = env_server.EnvServer(make_group, address, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Group:
    """Environments given by two functions: field i of row t is `content(t)[i]`, and `on_step(t)` may do anything.

    A stream's first row is row 0 and all belong to one endless episode, in the form that `EnvServer` serves.
    """

    observation_space = action_space = ""

    def __init__(self, fields, structure, content, num_envs=1, action=None, on_step=lambda row: None):
        self.observation_fields, self.structure, self.num_envs, self.action = fields, structure, num_envs, action
        self.content, self.on_step = content, on_step

    def reset(self, seed, row):
        self.count = 0
        self._write(row)

    def step(self, actions, row):
        self.count += 1
        self.on_step(self.count)
        self._write(row)

    def close(self):
        pass

    def _write(self, row):
        for name in written_by("env"):
            row[name][...] = 0
        row["done"][...] = self.count == 0
        row["episode_step"][...] = self.count
        for name, value in self.content(self.count).items():
            row[name][...] = value


def counting_group(num_envs=1, on_step=lambda row: None):
    return Group({"count": ((), "int64")}, "count", lambda t: {"count": t}, num_envs, on_step=on_step)


def assert_equal(a, b):
    """Nests of arrays are equal to the bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        a, b = a.values(), b.values()
    if not hasattr(a, "dtype"):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def at(nest, rows):
    """The nest with each leaf indexed by `rows`."""
    if isinstance(nest, dict):
        return {name: at(part, rows) for name, part in nest.items()}
    return nest[rows] if hasattr(nest, "dtype") else tuple(at(part, rows) for part in nest)


def remember(state, observation, done):
    """The memory of a toy agent: a number made of all that was seen since the episode began. [1, K] each."""
    return np.where(done, 0, state) * 3 % 1009 + observation[..., 2] + 1


NO_MEMORY = (np.zeros((1, 1), np.float32),)  # what `remember` begins with


def agent_that_remembers(env_outputs, agent_state):
    observation, done = np.asarray(env_outputs[0]["obs"]), np.asarray(env_outputs[2])
    state = remember(np.asarray(agent_state[0]), observation, done)
    action = (observation.sum(-1) % 2).astype(np.int64)
    return ({"action": action, "saw": observation.copy(), "state": state.copy()},), (state,)


def check_contract(learner, width, num_streams):
    """The counting environment tells its own number, episode and step in every observation."""
    last, ends = {}, 0  # what is known of each stream, by the numbers of its environments
    for (env_outputs, (outputs,)), (state_before,) in learner.rollouts(100 * num_streams):
        observation, reward, done, episode_step, episode_return, terminated, truncated, group, life, env_number = map(
            np.asarray, (env_outputs[0]["obs"], *env_outputs[1:])
        )
        assert observation.shape == (UNROLL_LENGTH + 1, width, 3) and state_before.shape == (1, width)
        number, episode, step = np.moveaxis(observation, -1, 0)
        assert (number == number[0]).all(), "columns keep their environments"
        assert (group == group[0, 0]).all() and 0 <= group[0, 0] < num_streams and (life == 0).all()
        assert env_number.dtype == np.int32 and (env_number == np.arange(width)).all()
        key, state_before = number[0, 0], np.asarray(state_before)
        if key in last:
            assert_equal(last[key][0], at((env_outputs, outputs), 0))
        else:
            assert done[0].all() and (state_before == 0).all()
            assert_equal(at(outputs, 0), {name: np.zeros_like(outputs[name][0]) for name in outputs})
        walked = last[key][1] if key in last else np.zeros((1, width), np.float32)
        assert_equal(state_before, walked)

        np.testing.assert_array_equal(episode_step, step)
        np.testing.assert_array_equal(done, step == 0)
        np.testing.assert_array_equal((terminated | truncated)[:-1], done[1:])
        np.testing.assert_array_equal(episode[1:], episode[:-1] + done[1:])
        np.testing.assert_array_equal(reward, step)
        np.testing.assert_array_equal(episode_return, step * (step + 1) / 2)
        np.testing.assert_array_equal(outputs["saw"][1:], observation[:-1])
        for row in range(UNROLL_LENGTH):
            walked = remember(walked, observation[row : row + 1], done[row : row + 1])
            np.testing.assert_array_equal(outputs["state"][row + 1], walked[0])
        last[key] = at((env_outputs, outputs), -1), walked
        ends += int((terminated | truncated).sum())
    assert len(last) == num_streams and ends > 50


def hello(fields=None, **changes):
    """What a server of one environment with one number for an observation says, but for the changes."""
    fields = [("x", "float32", ())] if fields is None else fields
    fields = [wire.Field(name=n, dtype=d, shape=s) for n, d, s in fields]
    fields += [wire.Field(name=n, dtype=d) for n, d in written_by("env").items()]
    default = {
        "protocol": wire.PROTOCOL,
        "env": "lies",
        "num_envs": 1,
        "fields": fields,
        "observation": wire.Structure(field=0),
    }
    return wire.FromServer(hello=wire.ServerHello(**{**default, **changes})).SerializeToString()


ZEROS = b"\xfa\x07\x80\x50" + bytes(10240)  # a field that rpcenv.proto has not, which compresses well


def row_of(x: float, reward: float, done: bool = True, num_envs: int = 1, truncated: int = 0) -> bytes:
    """A row of `hello()`'s environments, which all have the same."""
    types = {"float32": np.float32, "bool": np.bool_, "int32": np.int32}
    values = {name: types[dtype](0) for name, dtype in written_by("env").items()}
    values |= {"reward": np.float32(reward), "done": np.bool_(done), "truncated": np.uint8(truncated)}
    row = np.float32(x).tobytes() * num_envs + b"".join(values[name].tobytes() * num_envs for name in written_by("env"))
    return wire.FromServer(row=row).SerializeToString()
