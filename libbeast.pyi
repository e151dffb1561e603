"""Batching queues and the actor pool of PolyBeast, in C++.

A nest is a leaf, or a tuple, list or dict with `str` keys of nests. Leaves that go in are numpy arrays, torch tensors
in CPU memory, Python and numpy numbers (arrays without dimensions), and anything with the buffer protocol or
`__dlpack__`; dtypes bool, int8 to int64, uint8 to uint64, float16, float32 and float64, or TypeError. What comes out
are tuples, dicts in key order, and torch tensors where torch is installed, else numpy arrays.

Memory is shared wherever that is possible, not copied: do not write to what you handed over, nor to what you got unless
nobody else has it. Leaves that are read-only or not C-contiguous are copied on their way in.

Rows are the elements of dimension `batch_dim`, of which all leaves of a nest have equally many; all sizes count rows.

Every call that waits lets other Python threads run, is interrupted by Ctrl-C within 0.1 s, and ends when its queue is
closed. All methods may be called from any thread.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict

Nest: TypeAlias = Any  # of arrays, as above

__version__: str

class ClosedBatchingQueue(RuntimeError):
    """The queue or batcher was closed, before the call or during it."""

class AsyncError(RuntimeError):
    """The consumer did not answer a `compute`: its message, or that it dropped the batch."""

class BatchingQueue:
    """What many threads enqueue, iterated over in batches.

    >>> for batch in learner_queue:  # leaves [T+1, B, ...] with batch_dim=1
    ...     learn(batch)             # until the queue is closed
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: int | None = None,
        check_inputs: bool = True,
        maximum_queue_size: int | None = None,
    ) -> None:
        """A batch has `minimum_batch_size` to `maximum_batch_size` rows; fewer where `timeout_ms` milliseconds have
        passed since its first row came, or where draining ends. None waits for the minimum for ever.

        `check_inputs`: an item whose leaves have not equally many rows, or that cannot be joined with those waiting, is
        refused by `enqueue`; unchecked, it fails in the consumer, with its whole batch.
        `maximum_queue_size`: while so many rows wait, `enqueue` waits too, and who came first goes first. None never
        waits.

        Raises ValueError, naming the value.
        """

    def enqueue(self, inputs: Nest) -> None:
        """Add an item of one row or more; waits while the queue is full.

        An item that does not fit into a batch is split, its rows kept in order; one that is a batch by itself is handed
        on without a copy.

        Raises ClosedBatchingQueue, ValueError (shapes) and TypeError (what cannot be a leaf).
        """

    def __iter__(self) -> BatchingQueue: ...
    def __next__(self) -> Nest:
        """The next batch: the items' leaves joined along `batch_dim`. Waits for it; ends when the queue is closed."""

    def size(self) -> int:
        """Rows waiting."""

    def is_closed(self) -> bool: ...
    def close(self, drain: bool = False) -> None:
        """Wake everybody who waits. What is queued is dropped, or with `drain` still iterated over, the last batch with
        as few rows as are left. Raises RuntimeError the second time."""

class DynamicBatcher:
    """A function call that is answered in batches: many threads `compute`, another one iterates and answers.

    >>> for batch in inference_batcher:
    ...     batch.set_outputs(infer(batch.get_inputs()))  # until the batcher is closed

    A batch is handed out when a consumer waits and the minimum is there, or when `timeout_ms` have passed since the
    first of its rows came; then it has all rows waiting that fit. A caller's rows are never split.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: int | None = 100,
        check_outputs: bool = True,
    ) -> None:
        """Sizes in rows, `timeout_ms` in milliseconds (None waits for the minimum for ever).

        `check_outputs`: every leaf given to `set_outputs` must have as many rows as the batch has.

        Raises ValueError, naming the value.
        """

    def compute(self, inputs: Nest, *, timeout_ms: int | None = 600_000) -> Nest:
        """The outputs for these rows, a nest of the consumer's making. Waits for them, up to `timeout_ms` milliseconds.

        Raises ClosedBatchingQueue (closed before, or closed without draining meanwhile), AsyncError (the consumer
        failed, with its message), TimeoutError, ValueError (shapes, or more rows than `maximum_batch_size`) and
        TypeError (what cannot be a leaf).
        """

    def __iter__(self) -> DynamicBatcher: ...
    def __next__(self) -> Batch:
        """The next batch. Waits for it; ends when the batcher is closed."""

    def size(self) -> int:
        """Rows waiting to be taken by a consumer."""

    def is_closed(self) -> bool: ...
    def close(self, drain: bool = False) -> None:
        """Wake every waiting consumer and end every `compute` with ClosedBatchingQueue, the taken but unanswered ones
        too; with `drain` leave those to the consumers instead. Raises RuntimeError the second time."""

class Batch:
    """Rows of several `compute` calls, which wait for whoever has it to answer. Dropped unanswered, it ends them with
    AsyncError."""

    def get_inputs(self) -> Nest:
        """The callers' inputs, joined along `batch_dim` in order of arrival."""

    def set_outputs(self, outputs: Nest) -> None:
        """Give each caller its rows of `outputs`, as views where they lie together in memory.

        Raises ValueError or TypeError for outputs that do not fit, and the callers get AsyncError with the same
        message; RuntimeError where the batch was answered before.
        """

    def set_error(self, message: str) -> None:
        """End the callers' `compute` with AsyncError(message). Does nothing to a batch that was answered."""

    def __len__(self) -> int:
        """Rows."""

class StreamSpec(TypedDict):
    """What an env server says about the environments of one stream."""

    env: str  # their id
    num_envs: int  # K
    fields: dict[str, tuple[str, tuple[int, ...]]]  # of a row: name -> (dtype, shape of one environment)
    observation: Any  # the names of the observation's fields, nested as the observation is
    action: tuple[str, tuple[int, ...]] | None  # (dtype, shape of one environment); None takes any
    observation_space: str  # JSON of beast/wire.py; empty from servers of old four-value environments
    action_space: str

class Counters(TypedDict):
    """An ActorPool's, since it was made; those in seconds are sums over all streams."""

    steps: int  # of environments
    restarts: int  # of streams
    rollouts: int
    dropped_rollouts: int  # cut short by the loss of their environments
    streams_connected: int  # now
    rows_waiting: int  # in the learner queue
    seconds_inference: float
    seconds_environment: float
    seconds_enqueue: float

class ActorPool:
    """Steps the environments of all servers: asks `inference_batcher` for actions and gives `learner_queue` rollouts.

    One C++ thread per address, each with a stream of K environments; an address may be listed several times.

    - Inference: `compute((env_outputs, agent_state))`, leaves [1, K, ...], must be answered with
      `(agent_outputs, agent_state)`; the action is the first leaf of `agent_outputs`.
    - Items of the learner queue: `((env_outputs, agent_outputs), initial_agent_state)`, leaves [T+1, K, ...], with
      `env_outputs = (observation, reward, done, episode_step, episode_return, terminated, truncated)`. Row t of
      `agent_outputs` is what led to row t, zeros in the first row after a connection; row 0 repeats row T of the
      rollout before; the state is the one before row 0.
    """

    def __init__(
        self,
        unroll_length: int,
        learner_queue: BatchingQueue,
        inference_batcher: DynamicBatcher,
        env_server_addresses: Sequence[str],
        initial_agent_state: Nest,
        *,
        token: str = "",
        root_certificates: bytes = b"",
        seed: int = 1,
        env: str = "",
        env_timeout: float = 60.0,
        connect_timeout: float = 30.0,
        max_env_restarts: int = 5,
        insecure: bool = False,
        log: Callable[[str], object] | None = None,
    ) -> None:
        """`unroll_length` is T, in steps; addresses are "unix:/path" or "host:port"; leaves of `initial_agent_state`
        are [L, 1, ...] and are repeated to [L, K, ...].

        `token`: what the servers' --token_file holds. `root_certificates`: PEM; with them host:port is spoken to over
        TLS. `insecure`: a token may cross a network without. `env`: the environment id to insist on; empty takes any.
        `env_timeout`: seconds for one step; `connect_timeout`: seconds to reach a server, retries included.
        `max_env_restarts`: of one stream in a row. `log`: called with a line for every environment that is lost; None
        prints to stderr.

        Raises ValueError and TypeError.
        """

    def run(self) -> None:
        """Step until both queues are closed or `stop` is called, then raise the first failure if there was one:
        ConnectionError (a stream lost more often than `max_env_restarts`, with the environment's traceback where it
        raised one, or not reached within `connect_timeout` at the start; ConnectionRefusedError where the two sides do
        not fit), AsyncError (of inference), or ValueError (an answer of inference that does not fit)."""

    def stop(self) -> None:
        """End `run`, from any thread."""

    def count(self) -> int:
        """Steps of environments so far, over all streams."""

    def counters(self) -> Counters: ...
    def specs(self) -> list[StreamSpec | None]:
        """What each address' server said; None where it was not reached yet."""

def handshake(
    address: str,
    *,
    token: str = "",
    root_certificates: bytes = b"",
    env: str = "",
    timeout: float = 30.0,
    insecure: bool = False,
) -> StreamSpec:
    """Ask a server what environments it has, before there is a pool; arguments as ActorPool's, `timeout` in seconds.

    Raises ConnectionError, ConnectionRefusedError where the two sides do not fit, and ValueError.
    """

def round_trips(
    address: str, seconds: float, *, token: str = "", root_certificates: bytes = b"", insecure: bool = False
) -> list[float]:
    """Step the environments of one stream with actions of zeros for that long, and nothing else.

    Returns how many seconds each round trip took: what the transport costs (benchmarks/transport.py). Raises as
    `handshake` does.
    """
