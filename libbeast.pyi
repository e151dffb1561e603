"""Batching queues and the actor pool of PolyBeast, in C++.

A nest is a leaf, or a tuple, list or `str`-keyed dict of nests. Leaves may be numpy arrays, torch tensors in CPU
memory, Python and numpy numbers (arrays without dimensions), and objects with the buffer protocol or `__dlpack__`.
Their dtype must be bool, int8 to int64, uint8 to uint64, float16, float32 or float64; others raise TypeError. Results
are tuples, dicts in key order, and torch tensors, or numpy arrays if torch is not installed.

Memory is shared where possible, not copied. Do not write to inputs that you have handed over. Write to a result only if
nothing else uses it. Inputs that are read-only or not C-contiguous are copied.

Rows are the elements of dimension `batch_dim`. All leaves of a nest have the same number of rows. All sizes count rows.

`as_torchbeast`, of both queues, is for compat/, which runs code written for TorchBeast. It changes these things:
- `enqueue` and `compute` take an item of any number of rows, which counts as one row and stays whole. `compute` is
  answered with one row of the outputs. An ActorPool's items have a row for each environment all the same.
- A batch never shares memory with an item.
- The timeout begins when a consumer waits, not when the first row arrives.
- Outputs that do not fit raise in `set_outputs` alone. The batch can be answered again.
- A full batch at the closing of a queue goes to a consumer that waits for it.

A call that waits releases the GIL, is interrupted by Ctrl-C within 0.1 s, and ends when its queue is closed. Every
method may be called from any thread.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict

Nest: TypeAlias = Any  # of arrays, as above

__version__: str

class ClosedBatchingQueue(RuntimeError):
    """The queue or batcher was closed before the call or during it."""

class AsyncError(RuntimeError):
    """The consumer did not answer a `compute`: its outputs did not fit, or it dropped the batch."""

class BatchingQueue:
    """A queue that many threads fill and that is iterated over in batches.

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
        *,
        as_torchbeast: bool = False,
    ) -> None:
        """A batch has `minimum_batch_size` to `maximum_batch_size` rows, or fewer once `timeout_ms` milliseconds have
        passed since its first row arrived. With a timeout of None it always waits for the minimum.

        `check_inputs`: `enqueue` refuses an item if its leaves differ in their number of rows, or if it cannot be
        joined with the queued ones. Unchecked, the whole batch fails in the consumer.
        `maximum_queue_size`: `enqueue` waits while this many rows are queued; waiting calls proceed in order of
        arrival. With None it never waits.

        Raises ValueError with the value.
        """

    def enqueue(self, inputs: Nest) -> None:
        """Add an item of one row or more. Waits while the queue is full.

        An item that does not fit into a batch is split; its rows keep their order. An item that is a whole batch is
        handed on without a copy.

        Raises ClosedBatchingQueue, ValueError (shapes) and TypeError (not a valid leaf).
        """

    def get(self, timeout: float | None = None) -> Nest | None:
        """The next batch: the items' leaves joined along `batch_dim`. None where it has not come within `timeout`
        seconds: what has come of it stays queued, in order. With None it waits as long as it takes.

        Raises ClosedBatchingQueue, and ValueError for a negative `timeout`.
        """

    def __iter__(self) -> BatchingQueue: ...
    def __next__(self) -> Nest:
        """The next batch, as `get` returns it. Waits for it. Iteration ends with the queue."""

    def size(self) -> int:
        """The number of queued rows."""

    def is_closed(self) -> bool: ...
    def close(self) -> None:
        """Drop all queued rows and end all waiting calls. Raises RuntimeError the second time."""

class DynamicBatcher:
    """A function call that is answered in batches: many threads call `compute`, another one iterates and answers.

    >>> for batch in inference_batcher:
    ...     batch.set_outputs(infer(batch.get_inputs()))  # until the batcher is closed

    A waiting consumer gets a batch when the minimum is reached, or when `timeout_ms` have passed since its first row
    arrived. The batch has all waiting rows that fit. A caller's rows are never split.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: int | None = 100,
        check_outputs: bool = True,
        *,
        as_torchbeast: bool = False,
    ) -> None:
        """Sizes are in rows, `timeout_ms` in milliseconds (None always waits for the minimum).

        `check_outputs`: every leaf given to `set_outputs` must have as many rows as the batch.

        Raises ValueError with the value.
        """

    def compute(self, inputs: Nest, *, timeout_ms: int | None = 600_000) -> Nest:
        """The outputs for these rows; the consumer chooses their structure. Waits up to `timeout_ms` milliseconds.

        Raises ClosedBatchingQueue, AsyncError (the consumer failed), TimeoutError, ValueError (shapes, or more rows
        than `maximum_batch_size`) and TypeError (not a valid leaf).
        """

    def __iter__(self) -> DynamicBatcher: ...
    def __next__(self) -> Batch:
        """The next batch. Waits for it. Iteration ends when the batcher is closed."""

    def size(self) -> int:
        """The number of rows that no consumer has taken yet."""

    def is_closed(self) -> bool: ...
    def close(self) -> None:
        """End the wait of every consumer, and every `compute` with ClosedBatchingQueue, even if a consumer has taken
        its rows. Raises RuntimeError the second time."""

class Batch:
    """The rows of several `compute` calls, which wait for the consumer's answer. They raise AsyncError if the batch is
    dropped unanswered."""

    def get_inputs(self) -> Nest:
        """The callers' inputs, joined along `batch_dim` in order of arrival."""

    def set_outputs(self, outputs: Nest) -> None:
        """Give each caller its rows of `outputs`, as views if they are adjacent in memory.

        Raises ValueError or TypeError if the outputs do not fit; the callers then raise AsyncError with the same
        message. Raises RuntimeError if the batch was answered before.
        """

class StreamSpec(TypedDict):
    """What an env server offers in one stream."""

    env: str  # the environments' id
    num_envs: int  # K
    fields: dict[str, tuple[str, tuple[int, ...]]]  # of a row: name -> (dtype, shape of one environment)
    observation: Any  # the names of the observation's fields, nested as the observation is
    action: tuple[str, tuple[int, ...]] | None  # (dtype, shape of one environment); with None any action is accepted
    observation_space: str  # JSON (space_to_json in wire.py); empty for environments of the old gym
    action_space: str
    frames_per_step: int  # frames of the emulator in one step of the agent

class Counters(TypedDict):
    """An ActorPool's counters since it was made. Seconds are sums over all streams."""

    restarts: int  # attempts to connect a lost stream again
    dropped_rollouts: int  # incomplete when their stream was lost
    streams_connected: int  # at the moment
    streams_come: int  # so far; only where streams dial in
    seconds_inference: float
    seconds_environment: float
    seconds_enqueue: float

class EnvListener:
    """Where env servers dial in, from when it is made until the pool that has it ends, or `close`. A pool has it for
    itself while it runs."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        certificate: bytes = b"",
        key: bytes = b"",
        env_timeout: float = 60.0,
        max_streams: int = 256,
    ) -> None:
        """Bind `host:port` or `unix:/path`; with a certificate and its key (PEM) it is TLS.

        A caller that does not send the `token` is refused before a message of it is read. `env_timeout`: seconds for
        one row. `max_streams`: streams at a time. An eighth of this process's descriptors is left to it, and
        connections without a hello may have a quarter of them, 1,024 at most: the oldest one of the host that has most
        is closed for another. A host may send 20 wrong tokens, and one more each second. Raises ValueError, also
        where only one of certificate and key is given.
        """

    address: str
    max_streams: int
    def first_hello(
        self, check: Callable[[StreamSpec], str] | None = None, *, timeout: float = 999999.0
    ) -> StreamSpec | None:
        """Wait for an env server of use; what it has. It dials again when the pool runs.

        Give that to the pool as `expected`: all others must have the same.

        `check` says why one is of no use, else "": that one is told why, and refused. None where none of use came
        within `timeout` seconds.
        """

    def refusals(self) -> tuple[list[str], int]:
        """Why callers were refused since the last call: at most 20 messages, and how many more there were."""

    def close(self) -> None:
        """End it, and free its address. Raises RuntimeError while a pool runs with it: `ActorPool.stop` comes first."""

class ActorPool:
    """Steps the environments of all servers: gets actions from `inference_batcher` and puts rollouts into
    `learner_queue`.

    There is a stream of K environments for each address, which may be listed several times, or for each that has come
    to the `listener`. A few threads serve them all.

    - Inference: the pool calls `compute((env_outputs, agent_state))`, leaves [1, K, ...]. The answer must be
      `(agent_outputs, agent_state)`. The first leaf of `agent_outputs` is the action. A server that accepts any action
      gets all of the first entry, which may be a nest.
    - Items of the learner queue: `((env_outputs, agent_outputs), initial_agent_state)`, leaves [T+1, K, ...], with
      `env_outputs = (observation, *row_fields, group, life, env_number)`.
      Row t of `agent_outputs` is the answer that led to row t; in the first row of a life it is zero. Row 0 repeats
      row T of the previous rollout. The state is the one before row 0.
    - `group` (int32) is the index of the stream in `env_server_addresses`. `life` (int32) is 0 until the stream is
      lost and one more after every reconnection; failed attempts to connect do not count. `env_number` (int32) is the
      index of a column's environment in its stream, 0 to K-1. All three are constant in a rollout: all its columns
      belong to one life of one stream.
    """

    def __init__(
        self,
        unroll_length: int,
        learner_queue: BatchingQueue,
        inference_batcher: DynamicBatcher,
        env_server_addresses: Sequence[str],
        initial_agent_state: Nest,
        *,
        row_fields: Sequence[str] = (
            "reward",
            "done",
            "episode_step",
            "episode_return",
            "terminated",
            "truncated",
        ),
        token: str = "",
        root_certificates: bytes = b"",
        seed: int = 1,
        env: str = "",
        env_timeout: float = 60.0,
        connect_timeout: float = 30.0,
        max_env_restarts: int = 5,
        insecure: bool = False,
        min_streams: int | None = None,
        expected: StreamSpec | None = None,
        listener: EnvListener | None = None,
        log: Callable[[str], object] | None = None,
    ) -> None:
        """`unroll_length` is T, 1 to 1,000,000 steps; addresses are "unix:/path" or "host:port"; leaves of
        `initial_agent_state` are [L, 1, ...] and are repeated to [L, K, ...].

        - `row_fields`: the fields of a row that `env_outputs` have, by name and in this order, each once and none of
          the observation's. A server without one of them is refused; what else it sends is left out.
        - `token`: the content of the servers' --token_file, ASCII without white space around it.
        - `root_certificates`: PEM; if given, host:port is reached over TLS.
        - `insecure`: allows a token to cross a network without TLS.
        - `env`: the environment id that the servers must have; empty accepts any.
        - `env_timeout`: seconds for one step. `connect_timeout`: seconds to reach a server, retries included.
        - `max_env_restarts`: how often a stream may be restarted in a row. After that, or when its server refuses it,
          it rests: 30 seconds, then twice as long each time, up to 10 minutes. Rows over more than 10 minutes of one
          life begin both counts again.
        - `min_streams`: the run ends when fewer streams than these work; None ends it with the first that rests. A
          stream that has never worked ends it in any case.
        - `expected`: what every stream must have in all its lives, as `handshake` returned it; by default it is what
          the first stream has, and so is a `frames_per_step` that it lacks. A row that has a number which is not
          finite ends its stream, as a lost server does.
        - `listener`: where streams come and go by themselves; there are no addresses then. `group` is the place that a
          stream has taken, `max_streams` of the listener in all. Streams that are lost are not connected again, and
          while there are fewer than `min_streams` the others wait. None is too few to go on.
        - `log`: called with a message for every stream that is lost; None prints it to stderr.

        Raises ValueError and TypeError.
        """

    def run(self) -> None:
        """Step the environments until both queues are closed (with a `listener` one), `stop` is called or a failure
        ends the run.

        Raises the first failure:
        - ConnectionError: a stream was not reached within `connect_timeout` at the start, or was lost more often than
          `max_env_restarts` in a row and fewer than `min_streams` were left. The message has the environment's
          traceback if it raised one.
        - ConnectionRefusedError: the two sides do not fit together (token, protocol, environment).
        - AsyncError: inference failed.
        - ValueError: inference's answer does not fit, a rollout is larger than this machine's memory, or the listener
          is closed, another pool's, or has had no `first_hello`.
        """

    def stop(self) -> None:
        """End `run`. May be called from any thread."""

    def count(self) -> int:
        """Environment steps so far, over all streams."""

    def tell(self, progress: bytes) -> None:
        """Send each stream how far training is, with its next hello or actions. The text has 4000 bytes at most; raises
        ValueError for a longer one."""

    def take_metrics(self) -> list[bytes]:
        """What rows in which games ended have brought since the last call, as env servers wrote it (32 KiB each at
        most). 4 MiB wait at most; what comes beyond them is dropped."""

    def counters(self) -> Counters: ...

def handshake(
    address: str,
    *,
    token: str = "",
    root_certificates: bytes = b"",
    env: str = "",
    timeout: float = 30.0,
    insecure: bool = False,
) -> StreamSpec:
    """Ask a server which environments it offers. Arguments are ActorPool's; `timeout` is in seconds.

    Raises ConnectionError, ConnectionRefusedError if the two sides do not fit together, and ValueError.
    """
