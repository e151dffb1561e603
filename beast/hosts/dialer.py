"""The env server that dials learners: a gRPC stream for each group of environments (csrc/rpcenv.proto). No torch."""

import collections
import contextlib
import math
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from beast.envs import progress
from beast.errors import InputError
from beast.hosts import env_server, served_group, throttle, wire

PAUSE, FULL_PAUSE = (0.5, 30.0), (1.0, 10.0)  # seconds between two calls: first and longest; of who found no place
END_SECONDS = 3.0  # for a step to be done, and a learner to end a stream that was closed on this side
CLOSE_SECONDS = 6.0  # more for environments to close when the server is told to stop
ANSWER_SECONDS = 10.0  # for a call to end that was answered without a hello
REFUSED_SECONDS, RETOLD_SECONDS = 300.0, 600.0  # until a refused call is tried again, a reason told again
MAX_FAILURES, FAILURE_SECONDS = 5, 600.0  # of environments, before the server ends
# With these a learner says what another call would not change.
FINAL = {
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED,
}  # fmt: skip

UNTRUSTED = "its certificate is not in --tls_ca, has expired, or names another host than --learner does: make a new one"


class Final(Exception):
    """What another call to this learner would not change; the message is for the user."""


class EnvironmentFailure(Exception):
    """An environment raised; the message is its traceback."""


class Dialer:
    """Brings groups of environments to learners that listen, one in each stream, until it is told to stop.

    Each stream is a thread with environments of its own, which it keeps when the learner goes: it dials again, and the
    next life begins with a reset.
    """

    socket_path: Path | None = None  # it listens nowhere

    def __init__(
        self, make_group: Callable, addresses: list[str], *,
        env_id: str = "", max_streams: int = 2, token: str = "", root_certificates: bytes | None = None,
        log: Callable = lambda line: None, on_first_stream: Callable = lambda address: None,
        stuck_seconds: float = 0.0, deflate: bool = False,
    ):  # fmt: skip
        """`start` dials.

        Args:
            make_group: called in the thread of each stream, for environments of its own (see `VectorEnvGroup`).
            addresses: of the learners, `unix:/path` or `host:port`. A stream goes on to the next when one is full or
                gone.
            env_id: what the hello says. A learner that expects another one is left out; the last one ends this server.
            max_streams: how many there are.
            token: what the learners ask for; it is sent as it is where there are no certificates.
            root_certificates: in PEM, for TLS; None speaks plain text.
            log: gets a line when a stream begins, is lost or fails, and while its environments are made.
            on_first_stream: called once, with the address of the first learner that takes a stream.
            stuck_seconds, deflate: as of an `EnvServer`.
        """
        self.failure = ""  # why this server cannot go on
        self.make_group, self.addresses, self.env_id, self.log = make_group, addresses, env_id, log
        self.log_connection = throttle.Throttled(log)
        self.stuck_seconds, self.deflate, self.stopping = stuck_seconds, deflate, threading.Event()
        self._credentials = grpc.ssl_channel_credentials(root_certificates) if root_certificates else None
        self.headers = [(wire.TOKEN_HEADER, f"Bearer {token}")] if token else []
        self._on_first_stream: Callable | None = on_first_stream
        self._lock, self._failures = threading.Lock(), collections.deque[float](maxlen=MAX_FAILURES)
        self.refusals: dict[str, float] = {}  # address -> when its learner said so last
        first = random.randrange(len(addresses))  # so that servers spread over the learners, and streams of one too
        self._streams = [DialedStream(self, index, first + index) for index in range(max_streams)]
        self.name = secrets.token_hex(16)

    def start(self) -> None:
        for stream in self._streams:
            stream.start()

    def stop(self) -> None:
        """End all streams, each after the step that it is in, and close their environments (for 9 seconds at most)."""
        self.stopping.set()
        for stream in self._streams:
            stream.leave()
        self._join(END_SECONDS)
        for stream in self._streams:
            stream.cut()
        self._join(CLOSE_SECONDS)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for stream in self._streams:
            if stream.is_alive():
                stream.join(max(deadline - time.monotonic(), 0))

    def connect(self, address: str, max_message_bytes: int) -> grpc.Channel:
        options = [
            *env_server.KEEPALIVE,
            env_server.NO_COMPRESSION,
            ("grpc.http2.max_pings_without_data", 0),  # the learner may be silent for long
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
            ("grpc.enable_http_proxy", int(bool(self._credentials))),  # a proxy would read along
        ]
        if self._credentials:
            return grpc.secure_channel(address, self._credentials, options)
        return grpc.insecure_channel(address, options)

    def refused(self, address: str, message: str) -> None:
        """Leave a learner out that would refuse another call, too. Where all have refused, this server ends."""
        self.refusals[address] = time.monotonic()
        if self.refusals.keys() >= set(self.addresses):
            return self.fail(message)
        self.log_connection(f"{message}; it is dialed again in {REFUSED_SECONDS / 60:.0f} minutes")

    def accepted(self, address: str) -> None:
        with self._lock:
            self.refusals.pop(address, None)
            on_first_stream, self._on_first_stream = self._on_first_stream, None
            if on_first_stream:
                with contextlib.suppress(OSError):  # it prints, and nobody reads that any more
                    on_first_stream(address)

    def fail(self, message: str) -> None:
        """End this server, which `serve` notices; the first reason counts."""
        with self._lock:
            self.failure = self.failure or message
        self.stopping.set()

    def count_failure(self, failure: str) -> None:
        """Of an environment; five within ten minutes end this server."""
        with self._lock:
            self._failures.append(time.monotonic())
            seconds = self._failures[-1] - self._failures[0]
            is_too_often = len(self._failures) == MAX_FAILURES and seconds < FAILURE_SECONDS
        if is_too_often:
            last = wire.readable(failure.splitlines()[-1])
            self.fail(f"environments failed {MAX_FAILURES} times within {FAILURE_SECONDS / 60:.0f} minutes: {last}")


class DialedStream(threading.Thread):
    """One stream of a Dialer: a thread, its environments, and one life of them after another."""

    def __init__(self, dialer: Dialer, index: int, turn: int):
        """`turn`, modulo their number, is the first address."""
        super().__init__(name=f"stream {index}", daemon=True)
        self._dialer, self._index, self._turn = dialer, index, turn
        self._stopping, self._log = dialer.stopping, dialer.log
        self._group: Any = None
        self._call: Any = None
        self._lock = threading.Lock()
        self._interrupt: Callable | None = None  # ends what this stream waits for
        self._told: dict = {}  # why it has no learner, as the log says, and when it did
        self._pauses = _pauses()

    def leave(self) -> None:
        """To be called when `stopping` is set: what the stream waits for ends now, and a step when it is done."""
        with self._lock:
            if self._interrupt:
                self._interrupt()

    def cut(self) -> None:
        """End the call, whatever it is at."""
        if call := self._call:
            call.cancel()

    def run(self) -> None:
        try:
            self._dial()
        except BaseException:
            self._dialer.fail(served_group.last_traceback())  # or the server would live on without this stream

    def _dial(self) -> None:
        """Until `stopping` is set: dial one learner after the other."""
        addresses = self._dialer.addresses
        while not self._stopping.is_set():
            address = addresses[self._turn % len(addresses)]
            self._turn += 1
            if time.monotonic() < self._dialer.refusals.get(address, -math.inf) + REFUSED_SECONDS:
                continue  # never all of them
            try:
                if not self._group:
                    self._make_group()
                self._live(address)
                self._tell_lost(address, "it ended the stream")
            except Final as final:
                self._dialer.refused(address, str(final))
            except InputError as error:  # of the environments
                self._dialer.fail(str(error))
            except EnvironmentFailure as failure:
                self._log(f"stream {self._index}: its environment failed\n{failure}")
                self._close_group()
                self._dialer.count_failure(str(failure))
            except served_group.Refusal as refusal:
                self._tell_lost(address, str(refusal))
            except grpc.RpcError as error:
                code, details = error.code(), wire.readable(error.details() or "")
                if code in FINAL:
                    details = f"the learner at {address} refuses this env server ({code.name}): {details}"
                    self._dialer.refused(address, details)
                    continue
                if is_distrusted := "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
                    details = f"{UNTRUSTED} ({details})"
                self._tell_lost(address, f"{code.name}: {details}", kind=(code, is_distrusted))
                if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self._stopping.wait(random.uniform(*FULL_PAUSE))
                    continue
            self._stopping.wait(next(self._pauses))
        self._close_group()

    def _make_group(self) -> None:
        began = time.monotonic()
        progress.page_of_thread()  # for processes, too, that the environments start
        try:
            self._group = self._dialer.make_group()
            self._served = served_group.ServedGroup(self._group, self._dialer.env_id, self._dialer.deflate)
        except InputError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt):
            raise EnvironmentFailure(served_group.last_traceback()) from None
        seconds = time.monotonic() - began
        self._log(f"stream {self._index}: made {self._served.num_envs} environments in {seconds:.1f} s")

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group:
            served_group.close_group(group, f"stream {self._index}", self._log, self._dialer.stuck_seconds > 0)

    def _live(self, address: str) -> None:
        """A life of the environments, from a call to its end. Raises grpc.RpcError with the learner's reason, Final
        where it does not fit, Refusal where its actions do not, EnvironmentFailure."""
        outgoing: queue.SimpleQueue = queue.SimpleQueue()
        with self._dialer.connect(address, served_group.max_action_bytes(self._group)) as channel:
            dial = channel.stream_stream(wire.DIAL, lambda message: message.SerializeToString(), wire.Array.FromString)
            outgoing.put(self._served.hello)
            name = wire.STREAM_HEADER, f"{self._dialer.name}/{self._index}"
            call = self._call = dial(iter(outgoing.get, None), metadata=[*self._dialer.headers, name])
            ended = threading.Event()
            call.add_done_callback(lambda call: ended.set())
            stuck = threading.Timer(wire.MAKING_SECONDS, served_group.end_stuck, [address, self._log])
            stuck.daemon = True
            if self._dialer.stuck_seconds:
                call.add_done_callback(lambda call: stuck.start())
            try:
                hello = self._learner_hello(address, call, ended)
                if not hello:
                    return
                self._served.reset(hello)
                stuck.interval = self._dialer.stuck_seconds
                outgoing.put(self._served.row)
                # Until the learner ends the call, or this server is told to stop, which closes this side.
                while (actions := self._wait(lambda: next(call, None), lambda: outgoing.put(None))) is not None:
                    if self._stopping.is_set():
                        break
                    self._served.step(actions)
                    outgoing.put(self._served.row)
                    self._pauses = _pauses()  # a learner that acts is in good health
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                if error is call or isinstance(error, Final):
                    raise
                is_refusal = isinstance(error, served_group.Refusal)
                failure = str(error) if is_refusal else served_group.last_traceback()
                outgoing.put(wire.FromServer(error=failure))
                outgoing.put(None)
                ended.wait(END_SECONDS)
                if is_refusal:
                    raise
                raise EnvironmentFailure(failure) from None
            finally:
                stuck.cancel()
                outgoing.put(None)  # closes this side, and ends gRPC's thread
                if self._stopping.is_set():
                    ended.wait(END_SECONDS)  # what was sent arrives before the call ends

    def _learner_hello(self, address: str, call, ended: threading.Event):
        """The learner's hello, which may take as long as it likes; None where it ended the call instead. Raises
        grpc.RpcError with its reason, Final where the hello does not fit."""
        headers = dict(self._wait(call.initial_metadata, call.cancel))
        if wire.HELLO_HEADER not in headers and ended.wait(ANSWER_SECONDS):
            return next(call, None)  # or raises the reason
        try:
            hello = env_server.read_learner_hello(headers, self._dialer.env_id)
        except served_group.Refusal as refusal:
            raise Final(f"{address}: {refusal}") from refusal
        self._dialer.log_connection(
            f"{address} is served {self._served.num_envs} environments by stream {self._index}, the first with seed "
            f"{hello.seed}"
        )
        self._told.clear()
        self._dialer.accepted(address)
        return hello

    def _wait(self, wait: Callable, interrupt: Callable):
        """`wait()`, with `interrupt()` when this server is told to stop."""
        with self._lock:
            self._interrupt = interrupt
            if self._stopping.is_set():
                interrupt()
        try:
            return wait()
        finally:
            with self._lock:
                self._interrupt = None

    def _tell_lost(self, address: str, reason: str, kind: object = None) -> None:
        """Log why there is no learner: once in ten minutes for each kind of reason, until one takes this stream."""
        told = self._told.get((address, kind), -math.inf)
        if not self._stopping.is_set() and time.monotonic() > told + RETOLD_SECONDS:
            self._told[address, kind] = time.monotonic()
            self._dialer.log_connection(f"{address}: stream {self._index} dials on, as it has no learner: {reason}")


def _pauses() -> Iterator[float]:
    """Seconds to wait before each of the next calls: about twice as long each time, and never in step with others."""
    pause, longest = PAUSE
    while True:
        yield min(pause, longest) * random.uniform(0.5, 1.5)
        pause *= 2
