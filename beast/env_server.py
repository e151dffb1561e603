"""The env server: a gRPC stream for each group of environments that a learner drives (csrc/rpcenv.proto).

It needs Python, numpy, gymnasium, grpcio, protobuf and the environment; no torch and no compiler.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import numpy as np

from beast import envs, wire

# The fields of a row after the observation's, one number per environment.
ROW_FIELDS = {
    "reward": ((), "float32"),
    "done": ((), "bool"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
    "episode_return": ((), "float32"),
    "episode_step": ((), "int32"),
}
HELLO_SECONDS = 10.0  # a stream that does not say hello must not hold a thread for ever
PLACE_SECONDS = 5.0  # a stream that was closed needs a moment to shut its environments and make place for the next
STUCK_SECONDS = 5.0  # for which a step may go on after its learner has given it up
MAKING_SECONDS = 60.0  # more while environments are made and first reset: 128 of Atari take 25 seconds
END_SECONDS = 0.7  # what environments get to shut themselves when the server ends
MAX_ACTION_BYTES = 64 * 2**20  # of one message: whoever can connect may send one before a token is checked


class Refusal(Exception):
    """A stream that does not fit. It ends with this gRPC status, and both sides are told why."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


class EnvFailure(Exception):
    """An environment raised; the message is its traceback."""


# ---------------------------------------------------------------------------------------- groups and rows


class VectorEnvGroup:
    """A gymnasium vector env in the form that `EnvServer` serves.

    Such a group has `num_envs` (K), `observation_fields`, which maps names to (shape, dtype) of one environment,
    `structure`, a nest of these names, `action`, the (shape, dtype) of one environment's action or None where any will
    do, and `observation_space` and `action_space` as JSON or "". A row maps the name of each field to its array
    [K, *shape].
    """

    def __init__(self, env):
        """Raises ValueError for spaces that are not supported, and for an env that does not reset itself."""
        self._group = envs.EnvGroup(env)
        fields = self._group.observation_fields
        self.num_envs = self._group.num_envs
        self.observation_fields = {f"obs/{name}": field for name, field in fields.items()}  # apart from `reward`, …
        self.structure = {name: f"obs/{name}" for name in fields}
        shape, dtype = envs.action_shape_dtype(env.single_action_space)
        self.action = shape, str(dtype)
        self.observation_space = wire.space_to_json(env.single_observation_space)
        self.action_space = wire.space_to_json(env.single_action_space)

    def reset(self, seed: int, row: dict[str, np.ndarray]) -> None:
        """Begin new episodes with seeds `seed`, `seed + 1`, … (modulo 2³¹ - K) and write their first row."""
        self._group.reset(seed % (2**31 - self.num_envs), self._nested(row))

    def step(self, actions: np.ndarray, row: dict[str, np.ndarray]) -> None:
        """Step all with `actions` [K, *shape] and write the row that came of it."""
        self._group.step(actions, self._nested(row))

    def close(self) -> None:
        self._group.close()

    def _nested(self, row: dict[str, np.ndarray]) -> dict:
        return {"obs": {name: row[field] for name, field in self.structure.items()}, **row}


class Row:
    """One row as it lies on the wire: its fields side by side in one piece of memory, with a view of each."""

    def __init__(self, fields: dict[str, tuple[tuple[int, ...], str]], num_envs: int):
        """`fields` maps names to (shape, dtype) of one environment; `views` maps them to arrays [num_envs, *shape]."""
        places, size = {}, 0
        for name, (shape, dtype) in fields.items():
            places[name] = (num_envs, *shape), wire.little_endian(dtype), size
            size += num_envs * math.prod(shape) * places[name][1].itemsize
        self._memory = bytearray(size)
        self.views = {
            name: np.ndarray(shape, dtype, self._memory, offset) for name, (shape, dtype, offset) in places.items()
        }
        self._prefix = wire.row_prefix(size)

    def SerializeToString(self) -> bytes:
        """The message FromServer(row=…), as protobuf would serialize it, with a single copy."""
        return b"".join((self._prefix, self._memory))


# --------------------------------------------------------------------------------------------- the server


class EnvServer:
    """Serves groups of environments, one to each stream, to whoever connects and knows the token."""

    def __init__(
        self,
        make_group: Callable,
        address: str,
        *,
        env_id: str = "",
        max_streams: int = 2,
        token: str = "",
        tls: tuple[bytes, bytes] | None = None,
        log: Callable[[str], None] = lambda line: None,
        replaceable: bool = False,
    ):
        """Bind the address; `start` serves.

        Args:
            make_group: called in the thread of each stream, for environments of its own (see `VectorEnvGroup`).
            address: `unix:/path` or `host:port`; port 0 takes a free one, which the attribute `address` then names.
            env_id: told to learners, and compared with the one that they expect.
            max_streams: streams at a time; another is refused if none ends within 5 seconds.
            token: what learners must say; empty takes everyone.
            tls: private key and certificate chain in PEM; None speaks plain text.
            log: told of each stream that begins, ends, is refused or fails.
            replaceable: somebody starts another server when this one ends, so it ends when an environment hangs.

        Raises:
            ValueError: the address is malformed, taken, or not one of this machine, or the certificate is bad.
        """
        self._make_group, self._env_id, self._max_streams = make_group, env_id, max_streams
        self._token, self._log, self._replaceable = token, log, replaceable
        self._places = threading.BoundedSemaphore(max_streams)
        threads = max_streams + 8  # the latter for streams that say hello, wait for a place, or are told of none
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads),
            maximum_concurrent_rpcs=threads,
            options=[
                ("grpc.max_receive_message_length", MAX_ACTION_BYTES),
                ("grpc.so_reuseport", 0),  # or two servers share a port, and its streams by chance
                # A learner that lost its power or its network says no goodbye. It is missed within 50 seconds; a link
                # that is cut for less than 20 costs nothing.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.max_ping_strikes", 0),  # learners may ask as often as they like
            ],
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream,
            request_deserializer=wire.FromLearner.FromString,
            response_serializer=lambda reply: reply.SerializeToString(),
        )
        _, service, method = wire.STREAM.split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.address = self._bind(address, tls)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """End all streams, close their environments (for 0.7 seconds at most). gRPC removes the socket."""
        self._server.stop(grace=0)
        deadline = time.monotonic() + END_SECONDS
        for _ in range(self._max_streams):  # all places are free when all environments are closed
            if not self._places.acquire(timeout=max(deadline - time.monotonic(), 0)):
                break

    def _bind(self, address: str, tls: tuple[bytes, bytes] | None) -> str:
        _check_socket_path(address)
        umask = os.umask(0o077)  # a unix socket is for its owner
        try:
            if tls:
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([tls]))
            else:
                port = self._server.add_insecure_port(address)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"cannot listen on {address}: {error}\nIt may be taken (port 0 takes a free one), not be this "
                f"machine's, or be denied to this user{'; or TLS key and certificate do not fit' if tls else ''}"
            ) from error
        finally:
            os.umask(umask)
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    # The rest runs in the threads of the streams.

    def _stream(self, requests: Iterator, context: grpc.ServicerContext) -> Iterator:
        peer = urllib.parse.unquote(context.peer())  # ipv6:%5B::1%5D:53080
        stuck = threading.Timer(MAKING_SECONDS, self._end_stuck, [peer])
        stuck.daemon = True
        if self._replaceable:  # a thread that hangs in an environment would keep its place for ever
            context.add_callback(stuck.start)
        try:
            hello = self._check_hello(requests, context)
            with self._place():
                if context.is_active():  # the learner may have left while this waited
                    yield from self._serve(requests, hello, peer, stuck)
        except Refusal as refusal:
            self._log(f"refused {peer}: {refusal}")
            context.abort(refusal.code, str(refusal))
        except EnvFailure as failure:
            self._log(f"{peer}: its environment failed\n{failure}")
            yield wire.FromServer(error=str(failure))
            context.abort(grpc.StatusCode.ABORTED, f"the environment failed: {str(failure).splitlines()[-1]}")
        except grpc.RpcError:
            pass  # the learner has gone
        finally:
            stuck.cancel()

    def _end_stuck(self, peer: str) -> None:
        self._log(f"{peer} has gone and its environment hangs: this env server ends, to be replaced")
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with what the environment started
        os._exit(1)

    def _serve(self, requests: Iterator, hello, peer: str, stuck: threading.Timer) -> Iterator:
        with _told_to_the_learner():
            group = self._make_group()
        try:
            fields = {**group.observation_fields, **ROW_FIELDS}
            row = Row(fields, group.num_envs)
            yield wire.FromServer(hello=self._hello(group, fields))
            if hello.only_hello:
                return
            self._log(f"{peer} is served {group.num_envs} environments, the first with seed {hello.seed}")
            with _told_to_the_learner():
                group.reset(hello.seed, row.views)
            stuck.interval = STUCK_SECONDS
            yield row
            for request in requests:
                actions = _checked_actions(request, group)
                with _told_to_the_learner():
                    group.step(actions, row.views)
                yield row
        finally:  # also when the learner has gone: this generator is then closed where it is
            try:
                group.close()
            except Exception:
                self._log(f"{peer}: its environments did not close\n{traceback.format_exc()}")
            self._log(f"{peer} is served no more")

    def _check_hello(self, requests: Iterator, context: grpc.ServicerContext):
        """The hello of a learner that fits; Refusal of one that does not."""
        timer = threading.Timer(HELLO_SECONDS, context.cancel)
        timer.start()
        try:
            request = next(requests, None)
        finally:
            timer.cancel()
        if request is None or request.WhichOneof("kind") != "hello":
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with the learner's hello")
        hello = request.hello
        if hello.protocol != wire.PROTOCOL:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the learner speaks version {hello.protocol} of the protocol, the env server version "
                f"{wire.PROTOCOL}: install the same version of Beast on both",
            )
        if self._token and not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise Refusal(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the learner sent {'a wrong' if hello.token else 'no'} token: give both the same --token_file",
            )
        if hello.env and hello.env != self._env_id:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the learner expects environment {hello.env!r}, the env server has {self._env_id!r}: "
                "start either with the other's --env",
            )
        return hello

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if not self._places.acquire(timeout=PLACE_SECONDS):
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"all {self._max_streams} streams of this env server are taken: start it with a higher --max_streams, "
                "start another, or give fewer streams to this address",
            )
        try:
            yield
        finally:
            self._places.release()

    def _hello(self, group, fields: dict):
        shape, dtype = group.action or ((), "")
        return wire.ServerHello(
            protocol=wire.PROTOCOL,
            env=self._env_id,
            num_envs=group.num_envs,
            fields=[wire.Field(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in fields.items()],
            observation=wire.structure_message(group.structure, {name: index for index, name in enumerate(fields)}),
            action=wire.Field(name="action", shape=shape, dtype=dtype),
            observation_space=group.observation_space,
            action_space=group.action_space,
        )


@contextlib.contextmanager
def _told_to_the_learner() -> Iterator[None]:
    """What an environment raises, SystemExit included, as EnvFailure with its traceback."""
    try:
        yield
    except BaseException as error:
        raise EnvFailure(traceback.format_exc().strip()) from error


def _checked_actions(request, group) -> np.ndarray:
    """The actions [K, *shape] of a message, once they are what the hello said; else Refusal."""
    if request.WhichOneof("kind") != "actions":
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "after its hello a learner sends nothing but actions")
    message = request.actions
    shape, dtype = list(message.shape), message.dtype
    if group.action:
        expected_shape, expected_dtype = [group.num_envs, *group.action[0]], group.action[1]
    else:
        expected_shape, expected_dtype = [group.num_envs, *shape[1:]], dtype
    if (shape, dtype) != (expected_shape, expected_dtype):
        raise Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the learner sent actions {dtype} {shape}, the env server takes {expected_dtype} {expected_shape}",
        )
    try:
        return wire.array_from_message(message)
    except ValueError as error:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"the learner's actions are malformed: {error}") from error


# ---------------------------------------------------------------------------------------------- addresses


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address. ValueError where it is not `unix:/path` or `host:port`."""
    if address.startswith("unix:"):
        return True
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"address {address!r} is neither unix:/path nor host:port, as 127.0.0.1:4431 is")
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False  # a host's name


def security(
    address: str, token_file: str = "", tls_cert: str = "", tls_key: str = "", insecure: bool = False
) -> tuple[str, tuple[bytes, bytes] | None]:
    """The token and the TLS key and certificate for an address, as `EnvServer` takes them.

    Raises:
        ValueError: other machines can reach the address and it is not protected, or a file is no good.
    """
    local = is_local(address)
    if bool(tls_cert) != bool(tls_key):
        raise ValueError("--tls_cert and --tls_key go together: give both, or neither")
    if tls_cert and address.startswith("unix:"):
        raise ValueError(f"{address} needs no TLS, as only its owner can open it: leave out --tls_cert and --tls_key")
    if not (local or insecure or (token_file and tls_cert)):
        raise ValueError(
            f"other machines can reach {address}: give --token_file, --tls_cert and --tls_key, or take a unix or "
            "loopback address; --insecure lets everyone who can connect step these environments and read along"
        )
    token = read_token(token_file) if token_file else ""
    return token, (_read(tls_key, "--tls_key"), _read(tls_cert, "--tls_cert")) if tls_cert else None


def read_token(path: str) -> str:
    """The secret in a file, without white space around it.

    Raises:
        ValueError: the file cannot be read, is empty, or is open to other users.
    """
    token = _read(path, "--token_file").decode(errors="replace").strip()
    if not token:
        raise ValueError(f"--token_file {path} is empty: write a secret into it (openssl rand -hex 32 > {path})")
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ValueError(f"--token_file {path} can be read by other users (mode {mode:o}): chmod 600 {path}")
    return token


def _read(path: str, flag: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _check_socket_path(address: str) -> None:
    """ValueError for a unix address that is in use: gRPC replaces any socket, a live one too."""
    if not address.startswith("unix:"):
        return
    path = address.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError as error:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                return  # a server that was killed left it
            raise ValueError(f"cannot listen on {address}: there is a file of that name, and no socket") from error
        except OSError as error:
            raise ValueError(f"cannot listen on {address}: {error.strerror or error}; take another path") from error
    raise ValueError(f"cannot listen on {address}: another server does; stop it, or take another path")


# --------------------------------------------------------------------------------------- a server's process


def serve(server: EnvServer, what: str, parent_pid: int = 0) -> None:
    """Print `serving <what> on <address>` and serve until Ctrl-C, SIGTERM, or the parent's end; exit with code 0.

    A parent's end, even by kill -9, is noticed within half a second. Where there is a parent and this process leads a
    group of processes, what environments started and did not end goes too.
    """

    def interrupt(number, frame):
        raise KeyboardInterrupt

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        server.start()
        print(f"serving {what} on {server.address}", flush=True)
        while not parent_pid or os.getppid() == parent_pid:
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    server.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    if parent_pid and os.getpgrp() == os.getpid():
        orphaned = os.getppid() != parent_pid  # then nobody asks for the exit code, and nobody else cleans up
        if orphaned and server.address.startswith("unix:"):
            with contextlib.suppress(OSError):  # the directory goes with the last of its sockets
                os.unlink(server.address[5:])
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(server.address[5:]))
        os.killpg(os.getpid(), signal.SIGKILL if orphaned else signal.SIGTERM)
    os._exit(0)  # the thread of a hanging environment would hold up an ordinary exit
