"""TorchBeast's `libtorchbeast` module on top of libbeast: code that was written for it runs unchanged.

    PYTHONPATH=/path/to/beast/compat python your_polybeast.py

What differs from libbeast: an ActorPool's `env_outputs` are TorchBeast's five, (observation, reward, done,
episode_step, episode_return), and `Server` serves environments of the old gym, whose `step` returns four values.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # libbeast and beast, where they are not installed

import nest  # noqa: E402
import numpy as np  # noqa: E402

import libbeast  # noqa: E402
from beast.feeds import env_server, wire  # noqa: E402
from libbeast import AsyncError, ClosedBatchingQueue  # noqa: E402

__all__ = ["ActorPool", "AsyncError", "BatchingQueue", "ClosedBatchingQueue", "DynamicBatcher", "Server"]
NUM_ENV_OUTPUTS = 5  # libbeast adds `terminated`, `truncated`, `group` and `life`


class _TorchBeastsTexts:
    """Errors of a constructor say the rule that was broken and no more, for programs that compare whole texts."""

    def __init__(self, *args, **kwargs):
        try:
            super().__init__(*args, **kwargs)
        except ValueError as error:
            raise ValueError(str(error).partition(", but got ")[0]) from error


class BatchingQueue(_TorchBeastsTexts, libbeast.BatchingQueue):
    """libbeast's; as an ActorPool's learner queue it gives batches with five env_outputs."""

    _is_of_actors = False

    def __next__(self):
        batch = super().__next__()
        if not self._is_of_actors:
            return batch
        (env_outputs, agent_outputs), initial_agent_state = batch
        return (env_outputs[:NUM_ENV_OUTPUTS], agent_outputs), initial_agent_state


class DynamicBatcher(_TorchBeastsTexts, libbeast.DynamicBatcher):
    """libbeast's; as an ActorPool's inference batcher it gives inputs with five env_outputs."""

    _is_of_actors = False

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
        """`options` are libbeast.ActorPool's."""
        super().__init__(
            unroll_length, learner_queue, inference_batcher, env_server_addresses, initial_agent_state, **options
        )
        learner_queue._is_of_actors = inference_batcher._is_of_actors = True


class Server:
    """Serves environments of the old gym: reset() -> observation, step(action) -> observation, reward, done, info.

    An observation is a nest of arrays and numbers whose structure, shapes and dtypes never change. An action is what
    the learner's agent put out for this environment, without dimensions of time and batch.
    """

    def __init__(self, env_class: Callable, server_address: str = "unix:/tmp/polybeast", *, insecure: bool = False):
        """`env_class()` is called for every stream; `server_address` is `unix:/path` or `host:port`.

        Raises:
            ValueError: other machines can reach the address, and it is not said that this is `insecure`.
        """
        if not insecure and not env_server.is_local(server_address):
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
                lambda: FourValueEnv(self._env_class()),
                self._address,
                max_streams=1024,  # TorchBeast knows no limit; a thread is made only for a stream that comes
                log=lambda line: print(line, file=sys.stderr, flush=True),
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


class FourValueEnv:
    """One environment of the old gym as an env server's group of one (see `env_server.VectorEnvGroup`).

    It resets in the step that ends an episode: that row is `done` and `terminated`, has the next episode's first
    observation, and the step count and return of the episode that has ended, as TorchBeast has it.
    """

    num_envs = 1
    action = None  # any will do
    observation_space = action_space = ""  # old environments need have none

    def __init__(self, env):
        self._env = env
        self._first = nest.map(np.asarray, env.reset())
        leaves = nest.flatten(self._first)
        for leaf in leaves:
            wire.little_endian(leaf.dtype)  # ValueError if it cannot be sent
        names = [f"observation/{index}" for index in range(len(leaves))]
        self.structure = nest.pack_as(self._first, names)
        self.observation_fields = {name: (leaf.shape, leaf.dtype.name) for name, leaf in zip(names, leaves)}

    def reset(self, seed: int, row: dict[str, np.ndarray]) -> None:
        """Write the first row. The old gym had no seeds that all environments take, so none is given."""
        self._episode_step, self._episode_return = 0, 0.0
        self._write(row, self._first, 0.0, done=True, terminated=False)

    def step(self, actions: np.ndarray, row: dict[str, np.ndarray]) -> None:
        observation, reward, done, _ = self._env.step(actions[0])
        self._episode_step += 1
        self._episode_return += float(reward)
        if done:
            observation = self._env.reset()
        self._write(row, observation, reward, done=done, terminated=done)
        if done:
            self._episode_step, self._episode_return = 0, 0.0

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()

    def _write(self, row: dict[str, np.ndarray], observation, reward, done, terminated) -> None:
        def write(name: str, leaf) -> None:
            leaf, (shape, dtype) = np.asarray(leaf), self.observation_fields[name]
            if (leaf.shape, leaf.dtype.name) != (shape, dtype):
                raise ValueError(f"{name} is {leaf.dtype} {list(leaf.shape)}, the first one was {dtype} {list(shape)}")
            row[name][0] = leaf

        nest.map_many2(write, self.structure, observation)
        row["reward"][0], row["done"][0], row["terminated"][0], row["truncated"][0] = reward, done, terminated, False
        row["episode_step"][0], row["episode_return"][0] = self._episode_step, self._episode_return
