"""The env server: a gRPC stream for each group of environments that a learner drives (csrc/rpcenv.proto). No torch."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import ipaddress
import math
import os
import resource
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from beast.envs.groups import EnvGroup
from beast.envs.rows import ENV_FIELDS
from beast.errors import InputError
from beast.feeds import wire
from beast.feeds.memory import nest_observations

PLACE_SECONDS = 5.0  # for a stream that has ended to close its environments, before another one is refused
CLOSING_SECONDS = 240.0  # for environments to close, before they count as hanging
MAKING_SECONDS = 240.0  # more while environments are made and first reset: 128 of Atari take 25 to 66 CPU seconds
END_SECONDS = 0.7  # for environments to close when the server ends
KEEP_SECONDS = 10.0  # for a server that is told to end
CONNECTING_MS, IDLE_MS = 5000, 20_000  # then a connection ends that does not speak HTTP/2, or has no stream
# Then a connection takes no more calls, so that who is refused again and again does not keep it. Its stream goes on.
AGE_MS = 30_000
# A small message could grow a thousandfold before its length is compared. Beast compresses none.
NO_COMPRESSION = ("grpc.per_message_decompression", 0)
# A learner that lost its power or its network says no goodbye. It is missed within 50 seconds; a link that is cut for
# less than 20 costs nothing. Newer versions of gRPC go by ping_timeout, which is a minute by default.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
]
MAX_ACTION_BYTES = 2**20  # of one message, where it is not known what the actions are
MAX_ERROR = 60_000  # bytes of a traceback that a learner gets: it takes 64 KB more than a row
REFUSALS_PER_MINUTE = 20  # that are logged
KEPT_GIL = "was ended by SIGALRM, as an environment kept Python's GIL for longer than --gil_timeout"


class Refusal(Exception):
    """A stream that does not fit. It ends with this gRPC status; the learner and the log get the message."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT):
        super().__init__(wire.readable(message))
        self.code = code


class VectorEnvGroup(EnvGroup):
    """A gymnasium vector env in the form that `EnvServer` serves: an EnvGroup that describes itself.

    Such a group has `reset(seed, row)`, `step(actions, row)` and `close()` of an EnvGroup, and
    - `num_envs`: environments of a stream, as the hello says; by default `env`'s own number
    - `observation_fields`: name -> (shape, dtype) of one environment
    - `structure`: a nest of these names
    - `action`: (shape, dtype) of one environment's action, or None where any will do, nests of arrays too
    - `observation_space`, `action_space`: as JSON, or ""

    An observation `name` is the field `obs/<name>`. Under SAME_STEP autoreset the final observation has the field
    `final_obs/<name>` and this same name in `structure`. Errors are those of EnvGroup.
    """

    def __init__(self, env, num_envs: int | None = None):
        super().__init__(env)
        self.num_envs = num_envs or env.num_envs
        # `obs/` and `final_obs/` set an observation apart from `reward`, …
        self.observation_fields = {name: field for name, field in self.fields.items() if "obs/" in name}
        self.structure = {name.removeprefix("obs/"): name for name in self.observation_fields}
        self.action = self.fields["action"]
        self.observation_space = wire.space_to_json(env.single_observation_space)
        self.action_space = wire.space_to_json(env.single_action_space)
        self.frames_per_step = (env.metadata or {}).get("frames_per_step", 1)


class Row:
    """One row as it lies on the wire: its fields side by side in the memory of its message, with a view of each."""

    def __init__(self, fields: dict[str, tuple[tuple[int, ...], str]], num_envs: int):
        """`fields` maps names to (shape, dtype) of one environment. `views` maps them to arrays [num_envs, *shape];
        `obs/<name>` is `views["obs"][name]`."""
        layout = np.dtype([(name, wire.little_endian(d), (num_envs, *shape)) for name, (shape, d) in fields.items()])
        # gRPC takes `bytes` and nothing else, and copies them before it asks for the next message. Environments write
        # into the memory of the very object that it gets, which nobody else has, so that its copy is the only one.
        self._message = wire.FromServer(row=bytes(layout.itemsize)).SerializeToString()
        size = len(self._message)
        memory: Any = (ctypes.c_ubyte * size).from_address(np.frombuffer(self._message, np.uint8).ctypes.data)
        memory.owner = self._message  # which the views keep alive, also after this row
        record = np.ndarray((), layout, memory, size - layout.itemsize)
        self.views = nest_observations({name: record[name] for name in fields})

    def SerializeToString(self) -> bytes:
        """The message FromServer(row=…), as protobuf would serialize it. The next row overwrites it in place."""
        return self._message


class ServedGroup:
    """A group of environments (see `VectorEnvGroup`) with what is said of it: `hello` and, time after time, `row`."""

    def __init__(self, group, env_id: str):
        """Raises InputError where its spaces cannot be sent."""
        self._group, self.num_envs = group, group.num_envs
        self.hello = describe(group, env_id)
        self.row = Row(_fields(group), group.num_envs)

    def reset(self, seed: int) -> None:
        """Begin new episodes, with the seed of a learner's hello."""
        self._group.reset(seed % (2**31 - self.num_envs), self.row.views)

    def step(self, actions) -> None:
        """Step with an Array message. Raises Refusal where the actions are not what the hello said."""
        self._group.step(_checked_actions(actions, self._group), self.row.views)


class EnvServer(grpc.GenericRpcHandler):
    """Serves groups of environments, one to each stream, to learners that know the token."""

    failure = ""  # it serves whatever happens

    def __init__(
        self, make_group: Callable, address: str, *,
        example: VectorEnvGroup | None = None, env_id: str = "", max_streams: int = 2, token: str = "",
        tls: tuple[bytes, bytes] | None = None, log: Callable = lambda line: None, stuck_seconds: float = 0.0,
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
        """
        self._make_group = make_group
        self._env_id, self._max_streams = env_id, max_streams
        self._token, self._log, self._stuck_seconds = token.encode(), log, stuck_seconds
        self._log_refusal = Throttled(log, REFUSALS_PER_MINUTE, 60.0)
        self._places = threading.BoundedSemaphore(max_streams)
        self._hello: wire.FromServer | None = None
        self._example_lock = threading.Lock()
        message_bytes = MAX_ACTION_BYTES
        if example:
            message_bytes = max_action_bytes(example)
            self._hello = describe(example, env_id)
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
        self.socket_path = Path(address.removeprefix("unix:")) if address.startswith("unix:") else None

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """End all streams, close their environments (for 0.7 seconds at most). gRPC removes the socket in its time."""
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
        return grpc.stream_stream_rpc_method_handler(
            answer, wire.Array.FromString, lambda reply: reply.SerializeToString()
        )

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
        self._log_refusal(f"refused {_peer_of(context)}: {refusal}")
        context.abort(refusal.code, str(refusal))

    def _stream(self, hello, requests: Iterator, context: grpc.ServicerContext) -> Iterator:
        peer = _peer_of(context)
        stuck = threading.Timer(MAKING_SECONDS, self._end_stuck, [peer])
        stuck.daemon = True
        if self._stuck_seconds:  # a thread that hangs in an environment keeps its place
            context.add_callback(stuck.start)
        try:
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
            failure = last_traceback()
            self._log(f"{peer}: its environment failed\n{failure}")
            yield wire.FromServer(error=failure)
            last = wire.readable(failure.splitlines()[-1])
            context.abort(grpc.StatusCode.ABORTED, f"the environment failed: {last}")
        finally:
            stuck.cancel()

    def _end_stuck(self, peer: str) -> None:
        end_stuck(peer, self._log)

    def _serve(self, requests: Iterator, hello, peer: str, stuck: threading.Timer) -> Iterator:
        began = time.monotonic()
        group = self._make_group()
        try:
            served, width = ServedGroup(group, self._env_id), group.num_envs
            # Before the hello: a learner gives making and the first reset more time together than it gives a step.
            self._log(f"made {width} environments for {peer} in {time.monotonic() - began:.1f} s, resetting them")
            try:
                served.reset(hello.seed)
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
            close_group(group, peer, self._log, self._stuck_seconds > 0)

    def _example_hello(self):
        """The hello of every stream. Where no example was given, environments are made for the first who asks."""
        with self._example_lock:
            if not self._hello:
                group = self._make_group()
                try:
                    self._hello = describe(group, self._env_id)
                finally:
                    group.close()
        return self._hello


class Throttled:
    """A log of at most `count` lines in `seconds`. The first line after them tells how many were left out."""

    def __init__(self, log: Callable[[str], None], count: int, seconds: float):
        self._log, self._count, self._seconds = log, count, seconds
        self._lock, self._began, self._lines = threading.Lock(), -math.inf, 0

    def __call__(self, line: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._began > self._seconds:
                if self._lines > self._count:
                    self._log(f"{self._lines - self._count} lines like the next one were left out")
                self._began, self._lines = now, 0
            self._lines += 1
            if self._lines <= self._count:
                self._log(line)


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


def describe(group, env_id: str):
    """The hello of a group's stream, a FromServer. Raises InputError where its spaces cannot be sent."""
    fields, (shape, dtype) = _fields(group), group.action or ((), "")
    hello = wire.ServerHello(
        protocol=wire.PROTOCOL,
        env=env_id,
        num_envs=group.num_envs,
        fields=[wire.Field(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in fields.items()],
        observation=wire.structure_message(group.structure, {name: index for index, name in enumerate(fields)}),
        action=wire.Field(name="action", shape=shape, dtype=dtype),
        observation_space=group.observation_space,
        action_space=group.action_space,
        frames_per_step=getattr(group, "frames_per_step", 1),
    )
    if hello.ByteSize() > wire.MAX_HELLO_BYTES - 1000:
        raise InputError(
            f"the description of the spaces has {hello.ByteSize()} bytes, learners take {wire.MAX_HELLO_BYTES}: "
            "give a Box one bound for all of its numbers"
        )
    return wire.FromServer(hello=hello)


def max_action_bytes(group) -> int:
    """Of one message of a learner, for gRPC to refuse what is longer."""
    if not group.action:
        return MAX_ACTION_BYTES
    shape, dtype = group.action
    return group.num_envs * math.prod(shape) * np.dtype(dtype).itemsize + 2**16


def close_group(group, whose: str, log: Callable[[str], None], ends_when_stuck: bool = False) -> None:
    """Close environments, and log if they raise. End this process, if it shall, where that takes too long."""
    stuck = threading.Timer(CLOSING_SECONDS, end_stuck, [whose, log])
    stuck.daemon = True
    if ends_when_stuck:
        stuck.start()
    try:
        group.close()
    except (Exception, SystemExit, KeyboardInterrupt):
        log(f"the environments of {whose} did not close\n{traceback.format_exc()}")
    finally:
        stuck.cancel()
    log(f"closed the environments of {whose}")


def last_traceback() -> str:
    """The end of the traceback of the exception that is handled, as a learner takes it: MAX_ERROR bytes at most, and
    lone surrogates, which UTF-8 has not, are escaped."""
    text = traceback.format_exc().strip().encode("utf-8", "backslashreplace")
    return text[-MAX_ERROR:].decode("utf-8", "ignore")


def log_to_stderr(line: str) -> None:
    """Streams go on where nobody reads stderr any more."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def end_stuck(peer: str, log: Callable[[str], None]) -> None:
    """End this process, as nothing else ends a thread that hangs in an environment."""
    log(f"{peer} has left and its environment hangs: this env server ends; with --keep it starts again")
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # with what the environment started
    os._exit(1)


def _fields(group) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of each field of a row."""
    return {**group.observation_fields, **{name: ((), dtype) for name, dtype in ENV_FIELDS.items()}}


def _peer_of(context: grpc.ServicerContext) -> str:
    return wire.readable(urllib.parse.unquote(context.peer()))  # ipv6:%5B::1%5D:53080


def _checked_actions(actions, group):
    """The actions [K, *shape] of a message, once they are what the hello said; else Refusal. Where any action will do,
    they may be a nest of such arrays."""
    is_nest = actions.HasField("structure")
    for array in actions.parts if is_nest else (actions,):
        shape, dtype = group.action or (array.shape[1:], array.dtype)
        sent, expected = f"{array.dtype} {list(array.shape)}", f"{dtype} {[group.num_envs, *shape]}"
        if sent != expected:
            raise Refusal(f"the learner sent actions {sent}, the env server takes {expected}")
    if is_nest and group.action:
        raise Refusal(f"the learner sent a nest of {len(actions.parts)} actions, the env server takes one array")
    try:
        return wire.nest_from_message(actions)
    except ValueError as error:
        raise Refusal(f"the learner's actions are malformed: {error}") from error


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address. InputError where it is not `unix:/path` or `host:port`."""
    if address.startswith("unix:"):
        return True
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise InputError(f"address {address!r} is neither unix:/path nor host:port, as 127.0.0.1:4431 is")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def security(address: str, token_file="", tls_cert="", tls_key="", insecure=False) -> tuple[str, tuple | None]:
    """The token and the TLS key and certificate for an address, as `EnvServer` takes them.

    Raises InputError if other machines can reach the address and it is not protected, or if a file cannot be used.
    """
    if bool(tls_cert) != bool(tls_key):
        raise InputError("--tls_cert and --tls_key go together: give both, or neither")
    if tls_cert and address.startswith("unix:"):
        raise InputError(f"{address} needs no TLS, as only its owner can open it: leave out --tls_cert and --tls_key")
    if not (is_local(address) or insecure or (token_file and tls_cert)):
        raise InputError(
            f"other machines can reach {address}: give --token_file, --tls_cert and --tls_key, or take a unix or "
            "loopback address; --insecure lets everyone who can connect step these environments and read along"
        )
    token = read_token(token_file) if token_file else ""
    if not tls_cert:
        return token, None
    tls = _read(tls_key, "--tls_key"), read_certificates(tls_cert, "--tls_cert")
    _check_private(tls_key, "--tls_key")
    return token, tls


def dial_security(addresses: list[str], token_file="", tls_ca="", insecure=False) -> tuple[str, bytes | None]:
    """The token for learners at these addresses, and the certificate (PEM) that theirs must be signed with, or None
    for plain text.

    Raises InputError if one is on another machine and is not dialed with both, or if a file cannot be used.
    """
    for address in addresses:
        if not (is_local(address) or insecure or (token_file and tls_ca)):
            raise InputError(
                f"other machines are between here and the learner at {address}: give --token_file and --tls_ca; "
                "--insecure lets everyone on the way read along, the token too, and step these environments"
            )
        if tls_ca and address.startswith("unix:"):
            raise InputError(f"{address} needs no TLS, as only its owner can open it: leave out --tls_ca")
    return read_token(token_file) if token_file else "", read_certificates(tls_ca, "--tls_ca") if tls_ca else None


def read_certificates(path: str, flag: str) -> bytes:
    """The certificates (PEM) in a file. Raises InputError if it cannot be read or holds none: gRPC would say no more
    than that it cannot connect."""
    content = _read(path, flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"{flag} {path} holds no certificate: give the file that begins with -----BEGIN CERTIFICATE----- ({error})"
        ) from error
    return content


def read_token(path: str) -> str:
    """The secret in a file, without white space around it. Raises InputError if the file cannot be read, holds no
    token, or is open to other users."""
    token = _read(path, "--token_file").strip()
    remedy = f"write a secret into it (openssl rand -hex 32 > {path})"
    if not token:
        raise InputError(f"--token_file {path} is empty: {remedy}")
    if len(token) > 1000 or not all(0x20 < byte < 0x7F for byte in token):
        raise InputError(f"--token_file {path} must hold at most 1000 characters, ASCII and without spaces: {remedy}")
    _check_private(path, "--token_file")
    return token.decode()


def _check_private(path: str, flag: str) -> None:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise InputError(f"{flag} {path} can be read by other users (mode {mode:o}): chmod 600 {path}")


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{flag} {path} cannot be read: {error.strerror}") from error


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


def allow_many_connections() -> None:
    """Raise this process's limit of descriptors, so that some hundred idle connections do not shut others out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


class Served(Protocol):
    """What `serve` runs: an EnvServer or a Dialer."""

    failure: str  # why it cannot go on; empty while it can
    socket_path: Path | None  # a file to remove at the end

    def start(self) -> None: ...

    def stop(self) -> None: ...


def serve(server: Served, announcement: str, parent_pid: int = 0, gil_seconds: float = MAKING_SECONDS) -> None:
    """Start, print `announcement` and serve until Ctrl-C, SIGTERM, the parent's end (exit code 0), or a failure of the
    server (its message and exit code 1).

    The end of the parent, even by kill -9, is noticed within half a second. Where there is a parent and this process
    leads its process group, what environments started and did not end is killed too.

    SIGALRM ends the process when an environment has kept the GIL for `gil_seconds`, unless the environment has a
    handler of its own for that signal.
    """
    allow_many_connections()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt, in forked environments too
        server.start()
        if announcement:
            print(announcement, flush=True)
        while not server.failure and (not parent_pid or os.getppid() == parent_pid):
            if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
                signal.setitimer(signal.ITIMER_REAL, gil_seconds)  # the kernel needs no GIL
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    server.stop()
    if server.failure:
        log_to_stderr(f"error: {server.failure}")
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            output.flush()
    orphaned = bool(parent_pid) and os.getppid() != parent_pid  # nobody asks for the exit code, or else cleans up
    if server.socket_path:
        with contextlib.suppress(OSError):
            server.socket_path.unlink(missing_ok=True)  # gRPC removes it in a thread of its own, which ends here
            if orphaned:
                server.socket_path.parent.rmdir()  # with the last of its sockets
    if parent_pid and os.getpgrp() == os.getpid():
        # SIGTERM is ignored here, and the exit code is still to come.
        os.killpg(os.getpid(), signal.SIGKILL if orphaned else signal.SIGTERM)
    os._exit(1 if server.failure else 0)  # the thread of a hanging environment would hold up an ordinary exit


def keep(command: list[str], address: str, log: Callable[[str], None]) -> None:
    """Run an env server's command, and again when it has ended, until Ctrl-C or SIGTERM; exit with code 0.

    Exits with the command's own code where that ends before it has ever served: it would end so again. Raises
    InputError for port 0, as each start would take another one.
    """
    if not address.startswith("unix:") and address.endswith(":0"):
        raise InputError(f"--address {address}: a server that starts again needs a port that stays: give one")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    pause, has_served = 1.0, threading.Event()
    server: subprocess.Popen | None = None

    def pass_on(output: Iterable[str]) -> None:
        for line in output:
            with contextlib.suppress(OSError):  # nobody reads it any more
                print(line, end="", flush=True)
            if line.startswith("serving "):  # environments print, too
                has_served.set()

    try:
        while True:
            began = time.monotonic()
            server = subprocess.Popen(
                [*command, "--parent_pid", str(os.getpid())], start_new_session=True, stdout=subprocess.PIPE, text=True
            )
            # What an environment started may outlive the server and hold its output open: the end of it says nothing.
            printer = threading.Thread(target=pass_on, args=(server.stdout,), daemon=True)
            printer.start()
            code = server.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of zombies
                os.killpg(server.pid, signal.SIGKILL)
            printer.join(1.0)
            if not has_served.is_set():
                sys.exit(code)
            pause = min(2 * pause, 60.0) if time.monotonic() - began < 60 else 1.0
            why = KEPT_GIL if code == -signal.SIGALRM else f"ended with code {code}"
            log(f"the env server {why}: it starts again in {pause:.0f} s")
            time.sleep(pause)
    except KeyboardInterrupt:
        if server:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(KEEP_SECONDS)
            server.kill()  # if an environment keeps the GIL, which the handler of SIGTERM needs
            server.wait()
        sys.exit(0)
