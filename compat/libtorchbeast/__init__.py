"""TorchBeast's `libtorchbeast` module on top of libbeast: code that was written for it runs unchanged.

    PYTHONPATH=/path/to/beast/compat python your_polybeast.py

What differs from libbeast: the queues keep TorchBeast's rules (`as_torchbeast` in libbeast.pyi); an ActorPool's
`env_outputs` are TorchBeast's five, (observation, reward, done, episode_step, episode_return); and `Server` serves
environments of the old gym, whose `step` returns observation, reward, done and what TorchBeast does not read.
`libtorchbeast.actorpool` and `libtorchbeast.rpcenv` are the same by the names of TorchBeast's first release.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # libbeast and beast, where they are not installed

import nest  # noqa: E402
import numpy as np  # noqa: E402

import libbeast  # noqa: E402
from beast.hosts import env_server, security, throttle, wire  # noqa: E402
from libbeast import AsyncError, ClosedBatchingQueue  # noqa: E402

__all__ = ["ActorPool", "AsyncError", "BatchingQueue", "ClosedBatchingQueue", "DynamicBatcher", "Server"]
ROW_FIELDS = ("reward", "done", "episode_step", "episode_return")  # what follows the observation, in TorchBeast's order
NUM_ENV_OUTPUTS = 1 + len(ROW_FIELDS)  # libbeast adds `group`, `life` and `env_number`
# What std::future_error says of a dropped batch: in libstdc++, then in libc++, which TorchBeast's own tests expect.
BROKEN_PROMISE = (
    "std::future_error: Broken promise. The associated promise has been destructed prior to the associated state "
    "becoming ready."
)


class _AsTorchBeast:
    """A queue with TorchBeast's rules. Errors of its constructor say the rule that was broken and no more, for programs
    that compare whole texts."""

    def __init__(self, *args, **kwargs):
        try:
            super().__init__(*args, **kwargs, as_torchbeast=True)
        except ValueError as error:
            raise ValueError(str(error).partition(", but got ")[0]) from error


@contextlib.contextmanager
def _broken_promises():
    """An AsyncError of a dropped batch has TorchBeast's text, and libbeast's."""
    try:
        yield
    except AsyncError as error:
        if "dropped unanswered" not in str(error):
            raise
        raise AsyncError(f"{BROKEN_PROMISE} {error}") from error


class BatchingQueue(_AsTorchBeast, libbeast.BatchingQueue):
    """libbeast's; as an ActorPool's learner queue it gives batches with five env_outputs."""

    _is_of_actors = False

    def __next__(self):
        batch = super().__next__()
        if not self._is_of_actors:
            return batch
        (env_outputs, agent_outputs), initial_agent_state = batch
        return (env_outputs[:NUM_ENV_OUTPUTS], agent_outputs), initial_agent_state


class DynamicBatcher(_AsTorchBeast, libbeast.DynamicBatcher):
    """libbeast's; as an ActorPool's inference batcher it gives inputs with five env_outputs."""

    _is_of_actors = False

    def compute(self, inputs, **options):
        with _broken_promises():
            return super().compute(inputs, **options)

    def __next__(self):
        batch = super().__next__()
        return _ActorsBatch(batch) if self._is_of_actors else batch


class _ActorsBatch:
    def __init__(self, batch):
        self._batch = batch
        self.set_outputs = batch.set_outputs

    def get_inputs(self):
        env_outputs, agent_state = self._batch.get_inputs()
        return env_outputs[:NUM_ENV_OUTPUTS], agent_state


class ActorPool(libbeast.ActorPool):
    """libbeast's, for the queues of this module."""

    def __init__(
        self,
        unroll_length: int,
        learner_queue: BatchingQueue,
        inference_batcher: DynamicBatcher,
        env_server_addresses: list[str],
        initial_agent_state,
        **options,
    ):
        """`options` are libbeast.ActorPool's. As TorchBeast does, it connects for ten minutes and waits for a step as
        long as it takes."""
        options = {"connect_timeout": 600.0, "env_timeout": 999_999.0} | options
        super().__init__(
            unroll_length, learner_queue, inference_batcher, env_server_addresses, initial_agent_state,
            row_fields=ROW_FIELDS, **options,
        )  # fmt: skip
        learner_queue._is_of_actors = inference_batcher._is_of_actors = True

    def run(self) -> None:
        with _broken_promises():
            super().run()


class Server:
    """Serves environments of the old gym: reset() -> observation, step(action) -> observation, reward, done, ...

    An observation is a nest of arrays and numbers whose structure, shapes and dtypes never change. An action is the
    first entry of the agent's outputs for this environment, without dimensions of time and batch: an array, or a nest
    of arrays. What follows `done` is not read, but for gymnasium's five values, of which `truncated` is.
    """

    def __init__(self, env_class: Callable, server_address: str = "unix:/tmp/polybeast", *, insecure: bool = False):
        """`env_class()` is called for every stream; `server_address` is `unix:/path` or `host:port`.

        Raises:
            ValueError: other machines can reach the address, and it is not said that this is `insecure`.
        """
        if not insecure and not security.is_local(server_address):
            raise ValueError(
                f"other machines can reach {server_address}: take a unix or loopback address, serve your environment "
                "with polybeast_env.py, which has tokens and TLS, or pass insecure=True in a network that you trust"
            )
        self._env_class, self._address = env_class, server_address
        self._stop = threading.Event()
        self._running = threading.Lock()

    def run(self) -> None:
        """Serve until `stop` is called, or Ctrl-C. Raises RuntimeError if it runs already, ValueError if it cannot."""
        if not self._running.acquire(blocking=False):
            raise RuntimeError("Server is running already")
        try:
            server = env_server.EnvServer(
                lambda: ServedEnv(self._env_class()),
                self._address,
                max_streams=1024,  # TorchBeast knows no limit; a thread is made only for a stream that comes
                log=throttle.log_to_stderr,
            )
            try:
                server.start()
                self._stop.wait()
            finally:
                server.stop()
        finally:
            self._stop.clear()
            self._running.release()

    def stop(self) -> None:
        """Make `run` return, from any thread. Raises RuntimeError where it does not run."""
        if not self._running.locked():
            raise RuntimeError("Server is not running")
        self._stop.set()


class ServedEnv:
    """One environment of the old gym as an env server's group of one (see `served_group.VectorEnvGroup`).

    It resets in the step that ends an episode: that row is `done` and `terminated`, has the next episode's first
    observation, and the step count and return of the episode that has ended, as TorchBeast has it.
    """

    num_envs = 1
    action = None  # any will do
    observation_space = action_space = ""  # old environments need have none

    def __init__(self, env):
        self._env = env
        self._first = nest.map(np.asarray, self._reset())
        leaves = nest.flatten(self._first)
        for leaf in leaves:
            wire.little_endian(leaf.dtype)  # ValueError if it cannot be sent
        names = [f"observation/{index}" for index in range(len(leaves))]
        self.structure = nest.pack_as(self._first, names)
        self.observation_fields = {name: (leaf.shape, leaf.dtype.name) for name, leaf in zip(names, leaves)}

    def reset(self, seed: int, row: dict[str, np.ndarray]) -> None:
        """Write the first row. The old gym had no seeds that all environments take, so none is given."""
        self._episode_step, self._episode_return = 0, 0.0
        self._write(row, self._first, 0.0, done=True, terminated=False, truncated=False)

    def step(self, actions, row: dict[str, np.ndarray]) -> None:
        # Copies, as the environment may write to its action, and whole arrays, not numpy's numbers.
        action = nest.map(lambda array: np.array(array[0]), actions)
        observation, reward, terminated, truncated = _read_step(self._env.step(action))
        done = terminated or truncated
        self._episode_step += 1
        self._episode_return += float(reward)
        if done:
            observation = self._reset()
        self._write(row, observation, reward, done, terminated, truncated)
        if done:
            self._episode_step, self._episode_return = 0, 0.0

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()

    def _reset(self):
        """The first observation of an episode. Gymnasium returns (observation, info); for TorchBeast it is a nest, in
        which an empty dict has no place."""
        result = self._env.reset()
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            if not result[1] or _is_gymnasiums(self._env):
                return result[0]
        return result

    def _write(self, row: dict[str, np.ndarray], observation, reward, done, terminated, truncated) -> None:
        def write(name: str, leaf) -> None:
            leaf, (shape, dtype) = np.asarray(leaf), self.observation_fields[name]
            if (leaf.shape, leaf.dtype.name) != (shape, dtype):
                raise ValueError(f"{name} is {leaf.dtype} {list(leaf.shape)}, the first one was {dtype} {list(shape)}")
            row[name][0] = leaf

        nest.map_many2(write, self.structure, observation)
        row["reward"][0], row["done"][0] = reward, done
        row["terminated"][0], row["truncated"][0] = terminated, truncated
        row["episode_step"][0], row["episode_return"][0] = self._episode_step, self._episode_return


def _read_step(result) -> tuple:
    """(observation, reward, terminated, truncated) of what a step returned.

    As TorchBeast does, it reads observation, reward and done by their places, whatever follows. Five values of which
    the fourth is a bool and the fifth a dict are gymnasium's: TorchBeast would go on after a truncation.
    """
    if not isinstance(result, (tuple, list)) or len(result) < 3:
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
        raise ValueError(
            f"step() of the environment returned {got}: return at least three, (observation, reward, done, ...)"
        )
    observation, reward, done, *more = result
    is_gymnasiums = len(more) == 2 and isinstance(more[0], (bool, np.bool_)) and isinstance(more[1], dict)
    return observation, reward, bool(done), is_gymnasiums and bool(more[0])


def _is_gymnasiums(env) -> bool:
    """Whether an environment is of gymnasium, or of a gym that has its interface."""
    packages = {kind.__module__.partition(".")[0] for kind in type(env).__mro__}
    if "gymnasium" in packages:
        return True
    version = getattr(sys.modules.get("gym"), "__version__", "0.0").split(".")
    return "gym" in packages and [int(number) for number in version[:2]] >= [0, 26]
