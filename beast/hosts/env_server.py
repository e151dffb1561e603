"""The env server: a gRPC stream for each group of environments that a learner drives (csrc/rpcenv.proto). No torch."""

import hmac
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from beast.envs import progress
from beast.errors import InputError
from beast.hosts import served_group, wire
from beast.hosts.served_group import Refusal
from beast.hosts.throttle import Guesses, Throttled

PLACE_SECONDS = 5.0  # for a stream that has ended to close its environments, before another one is refused
END_SECONDS = 0.7, 9.0  # when the server ends, for steps to be done, and for environments to be closed
CONNECTING_MS, IDLE_MS = 5000, 20_000  # then a connection ends that does not speak HTTP/2, or has no stream
# Then a connection takes no more calls, so that who is refused again and again does not keep it. Its stream goes on.
AGE_MS = 30_000
# A small message could grow a thousandfold before its length is compared. Beast lets gRPC compress none; a
# deflated row has a known length.
NO_COMPRESSION = ("grpc.per_message_decompression", 0)
# A learner that lost its power or its network says no goodbye. It is missed within 50 seconds; a link that is cut for
# less than 20 costs nothing. Newer versions of gRPC go by ping_timeout, which is a minute by default.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 20_000), ("grpc.http2.ping_timeout_ms", 20_000),
]  # fmt: skip

TOO_MANY = Refusal("too many wrong tokens came from there: dial again in a second", grpc.StatusCode.RESOURCE_EXHAUSTED)


class EnvServer(grpc.GenericRpcHandler):
    """Serves groups of environments, one to each stream, to learners that know the token."""

    failure = ""  # it serves whatever happens

    def __init__(
        self, make_group: Callable, address: str, *,
        example: served_group.VectorEnvGroup | None = None, env_id: str = "", max_streams: int = 2, token: str = "",
        tls: tuple[bytes, bytes] | None = None, log: Callable = lambda line: None, stuck_seconds: float = 0.0,
        deflate: bool = False,
    ):  # fmt: skip
        """Bind the address; `start` serves. Raises InputError if the address is malformed, taken, or not one of this
        machine, or if the certificate is bad.

        Args:
            make_group: called in the thread of each stream, for environments of its own (see `VectorEnvGroup`).
            example: a group that describes those of `make_group`, of any number of environments. It is closed here. A
                learner that asks for the hello only is answered by it, and no message may be longer than its actions.
            address: `unix:/path` or `host:port`; port 0 takes a free one, which the attribute `address` then names.
            env_id: what the hello says; a learner that expects another one is refused.
            max_streams: streams at a time; another is refused if none ends within 5 seconds.
            token: what a learner must send; empty takes every learner.
            tls: private key and certificate chain in PEM; None speaks plain text.
            log: gets a line when a stream begins, ends, is refused or fails, and while its environments are made.
            stuck_seconds: the process ends when a step goes on for so long after its learner has left, or environments
                take 4 minutes to close, as nothing else ends a thread that hangs there; 0: never.
            deflate: rows go through zlib, and of stacks of frames only what is new.
        """
        self._make_group, self._env_id, self._max_streams = make_group, env_id, max_streams
        self._token, self._log, self._stuck_seconds = token.encode(), log, stuck_seconds
        self._deflate = deflate
        self._log_refusal, self._guesses = Throttled(log), Guesses()
        self._closing: set = set()  # groups of environments
        self._places = threading.BoundedSemaphore(max_streams)
        self._hello: wire.FromServer | None = None
        self._example_lock = threading.Lock()
        message_bytes = served_group.MAX_ACTION_BYTES
        if example:
            message_bytes = served_group.max_action_bytes(example)
            self._hello = served_group.describe(example, env_id)
            example.close()
        threads = max_streams + 64  # the rest is for streams that wait for a place or are refused, which is quick
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads),
            maximum_concurrent_rpcs=threads,
            options=[
                *KEEPALIVE,
                NO_COMPRESSION,
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.so_reuseport", 0),  # or two servers share a port, and its streams by chance
                ("grpc.http2.max_ping_strikes", 0),  # learners may ask as often as they like
                ("grpc.server_handshake_timeout_ms", CONNECTING_MS),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.max_connection_age_ms", AGE_MS),
            ],
        )
        self._server.add_generic_rpc_handlers((self,))
        self.address = self._bind(address, tls)
        self.socket_path = Path(address[5:]).absolute() if address.startswith("unix:") else None

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """End all streams and close their environments, for 9 seconds at most. gRPC removes the socket in its time."""
        self._server.stop(grace=0)
        began, is_told = time.monotonic(), False
        for _ in range(self._max_streams):  # all places are free when all environments are closed
            while not self._places.acquire(timeout=0.05):
                seconds, limit = time.monotonic() - began, END_SECONDS[bool(self._closing)]
                if seconds > limit:
                    return
                if seconds > 1 and not is_told:
                    is_told = True
                    self._log(f"waiting up to {limit:g} s for environments to close; Ctrl-C ends them now")

    def _bind(self, address: str, tls: tuple[bytes, bytes] | None) -> str:
        _check_socket_path(address)
        umask = os.umask(0o077)  # a unix socket is for its owner
        try:
            if tls:
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([tls]))
            else:
                port = self._server.add_insecure_port(address)
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"cannot listen on {address}: {error}\nIt may be taken (port 0 takes a free one), not be this "
                f"machine's, or be denied to this user{'; or TLS key and certificate do not fit' if tls else ''}"
            ) from error
        finally:
            os.umask(umask)
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    def service(self, details) -> grpc.RpcMethodHandler | None:
        """How a call is answered. gRPC's own thread asks, when a call's headers are here and nothing else is."""
        if details.method != wire.STREAM:
            return None
        try:
            answer: Callable = partial(self._stream, self._check_hello(dict(details.invocation_metadata)))
        except Refusal as refusal:
            answer = partial(self._refuse, refusal)
        return grpc.stream_stream_rpc_method_handler(answer, wire.Array.FromString, lambda x: x.SerializeToString())

    def _check_hello(self, headers: dict) -> wire.LearnerHello:
        """The hello of a learner that fits; Refusal of one that does not."""
        sent = headers.get(wire.TOKEN_HEADER, "").encode()
        if self._token and not hmac.compare_digest(sent, b"Bearer " + self._token):
            raise Refusal(
                f"the learner sent {'a wrong' if sent else 'no'} token: give both the same --token_file, and install "
                "the same version of Beast on both",
                grpc.StatusCode.UNAUTHENTICATED,
            )
        return read_learner_hello(headers, self._env_id)

    # The rest runs in the threads of the streams.

    def _refuse(self, refusal: Refusal, requests: Iterator, context: grpc.ServicerContext) -> None:
        if refusal.code == grpc.StatusCode.UNAUTHENTICATED:
            if self._guesses.may_try(context.peer()):
                self._guesses.was_wrong(context.peer())
            else:
                refusal = TOO_MANY
        self._log_refusal(f"refused {_peer_of(context)}: {refusal}")
        context.abort(refusal.code, str(refusal))

    def _stream(self, hello, requests: Iterator, context: grpc.ServicerContext) -> Iterator:
        peer = _peer_of(context)
        stuck = threading.Timer(wire.MAKING_SECONDS, served_group.end_stuck, [peer, self._log])
        stuck.daemon = True
        if self._stuck_seconds:  # a thread that hangs in an environment keeps its place
            context.add_callback(stuck.start)
        try:
            if self._token and not self._guesses.may_try(context.peer()):
                raise TOO_MANY  # or the answer would tell that the token is right
            if hello.only_hello:
                yield self._example_hello()
                return
            if not self._places.acquire(timeout=PLACE_SECONDS):
                raise Refusal(
                    f"all {self._max_streams} streams of this env server are taken: start it with a higher "
                    "--max_streams, start another, or give fewer streams to this address",
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                )
            try:
                if context.is_active():  # the learner may have left while this waited
                    yield from self._serve(requests, hello, peer, stuck)
            finally:
                self._places.release()
        except Refusal as refusal:
            self._refuse(refusal, requests, context)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, grpc.RpcError) and not context.is_active():
                return  # the learner has left
            failure = served_group.last_traceback()
            self._log(f"{peer}: its environment failed\n{failure}")
            yield wire.FromServer(error=failure)
            last = wire.readable(failure.splitlines()[-1])
            context.abort(grpc.StatusCode.ABORTED, f"the environment failed: {last}")
        finally:
            stuck.cancel()

    def _serve(self, requests: Iterator, hello, peer: str, stuck: threading.Timer) -> Iterator:
        began = time.monotonic()
        progress.page_of_thread().write(hello.progress[: progress.MAX_BYTES])
        group = self._make_group()
        try:
            served, width = served_group.ServedGroup(group, self._env_id, self._deflate), group.num_envs
            # Before the hello: a learner gives making and the first reset more time together than it gives a step.
            self._log(f"made {width} environments for {peer} in {time.monotonic() - began:.1f} s, resetting them")
            try:
                served.reset(hello)
            except BaseException:  # after the hello it is a failure that the learner may try again
                yield served.hello
                raise
            stuck.interval = self._stuck_seconds
            self._log(f"{peer} is served {width} environments, the first with seed {hello.seed}")
            yield served.hello
            yield served.row
            for request in requests:
                served.step(request)
                yield served.row
        finally:  # also when the learner has left: gRPC then closes this generator where it is
            stuck.cancel()
            self._closing.add(group)
            served_group.close_group(group, peer, self._log, self._stuck_seconds > 0)
            self._closing.discard(group)

    def _example_hello(self):
        """The hello of every stream. Where no example was given, environments are made for the first who asks."""
        with self._example_lock:
            if not self._hello:
                group = self._make_group()
                try:
                    self._hello = served_group.describe(group, self._env_id)
                finally:
                    group.close()
        return self._hello


def read_learner_hello(headers: dict, env_id: str):
    """The LearnerHello in the headers of a learner that fits; Refusal of one that does not."""
    try:
        hello = wire.LearnerHello.FromString(headers.get(wire.HELLO_HEADER, b""))
    except DecodeError as error:
        raise Refusal(f"the learner's hello cannot be read: {error}") from error
    if hello.protocol != wire.PROTOCOL:
        raise Refusal(
            f"the learner speaks version {hello.protocol or 'unknown'} of the protocol, the env server version "
            f"{wire.PROTOCOL}: install the same version of Beast on both",
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    if hello.env and hello.env != env_id:
        raise Refusal(
            f"the learner expects environment {hello.env!r}, the env server has {env_id!r}: "
            "start either with the other's --env",
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    return hello


def _peer_of(context: grpc.ServicerContext) -> str:
    return wire.readable(urllib.parse.unquote(context.peer()))  # ipv6:%5B::1%5D:53080


def _check_socket_path(address: str) -> None:
    """InputError for a unix address that is in use: gRPC replaces any socket, a live one too."""
    if not address.startswith("unix:"):
        return
    path, reason = Path(address.removeprefix("unix:")), "another server does; stop it, or take another path"
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if path.is_socket():
                return  # a server that was killed left it
            reason = "there is a file of that name, and no socket"
        except OSError as error:
            reason = f"{error.strerror or error}; take another path"
    raise InputError(f"cannot listen on {address}: {reason}")
