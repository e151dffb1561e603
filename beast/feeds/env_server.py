"""The env server: a gRPC stream for each group of environments that a learner drives (csrc/rpcenv.proto). No torch."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
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
from pathlib import Path

import grpc
import numpy as np

from beast.envs.groups import EnvGroup
from beast.envs.rows import ENV_FIELDS
from beast.errors import InputError
from beast.feeds import wire
from beast.feeds.memory import nest_observations

HELLO_SECONDS = 10.0  # then a stream that does not say hello is ended, as it holds a thread
PLACE_SECONDS = 5.0  # for a stream that has ended to close its environments, before another one is refused
STUCK_SECONDS = 5.0  # for which a step may go on after its learner has left
MAKING_SECONDS = 240.0  # more while environments are made and first reset: 128 of Atari take 25 to 66 CPU seconds
END_SECONDS = 0.7  # for environments to close when the server ends
MAX_ACTION_BYTES = 64 * 2**20  # of one message: anyone who can connect may send one before the token is checked


class Refusal(Exception):
    """A stream that does not fit. It ends with this gRPC status; the learner and the log get the message."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT):
        super().__init__(message)
        self.code = code


class VectorEnvGroup(EnvGroup):
    """A gymnasium vector env in the form that `EnvServer` serves: an EnvGroup that describes itself.

    Such a group has `reset(seed, row)`, `step(actions, row)` and `close()` of an EnvGroup, and
    - `num_envs`: environments of a stream, as the hello says; by default `env`'s own number
    - `observation_fields`: name -> (shape, dtype) of one environment
    - `structure`: a nest of these names
    - `action`: (shape, dtype) of one environment's action, or None where any will do
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


class Row:
    """One row as it lies on the wire: its fields side by side in one piece of memory, with a view of each."""

    def __init__(self, fields: dict[str, tuple[tuple[int, ...], str]], num_envs: int):
        """`fields` maps names to (shape, dtype) of one environment. `views` maps them to arrays [num_envs, *shape];
        `obs/<name>` is `views["obs"][name]`."""
        layout = np.dtype([(name, wire.little_endian(d), (num_envs, *shape)) for name, (shape, d) in fields.items()])
        self._memory = bytearray(layout.itemsize)
        record = np.ndarray((), layout, self._memory)
        self.views = nest_observations({name: record[name] for name in fields})
        message = wire.FromServer(row=bytes(layout.itemsize)).SerializeToString()
        self._prefix = message[: len(message) - layout.itemsize]

    def SerializeToString(self) -> bytes:
        """The message FromServer(row=…), as protobuf would serialize it, with a single copy."""
        return b"".join((self._prefix, self._memory))


class EnvServer:
    """Serves groups of environments, one to each stream, to learners that know the token."""

    def __init__(
        self, make_group: Callable, address: str, *,
        make_example: Callable | None = None, env_id: str = "", max_streams: int = 2, token: str = "",
        tls: tuple[bytes, bytes] | None = None, log: Callable = lambda line: None, replaceable: bool = False,
    ):  # fmt: skip
        """Bind the address; `start` serves. Raises InputError if the address is malformed, taken, or not one of this
        machine, or if the certificate is bad.

        Args:
            make_group: called in the thread of each stream, for environments of its own (see `VectorEnvGroup`).
            make_example: the same for a stream that ends with the hello; it may make fewer environments.
            address: `unix:/path` or `host:port`; port 0 takes a free one, which the attribute `address` then names.
            env_id: what the hello says; a learner that expects another one is refused.
            max_streams: streams at a time; another is refused if none ends within 5 seconds.
            token: what a learner must send; empty takes every learner.
            tls: private key and certificate chain in PEM; None speaks plain text.
            log: gets a line when a stream begins, ends, is refused or fails, and while its environments are made.
            replaceable: the server's parent replaces it when it ends, so it ends when an environment hangs.
        """
        self._make_group, self._make_example = make_group, make_example or make_group
        self._env_id, self._max_streams = env_id, max_streams
        self._token, self._log, self._replaceable = token, log, replaceable
        self._places = threading.BoundedSemaphore(max_streams)
        threads = max_streams + 8  # 8 for streams that say hello, wait for a place or are refused
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
            self._stream, wire.FromLearner.FromString, lambda reply: reply.SerializeToString()
        )
        _, service, method = wire.STREAM.split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.address = self._bind(address, tls)

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

    # The rest runs in the threads of the streams.

    def _stream(self, requests: Iterator, context: grpc.ServicerContext) -> Iterator:
        peer = urllib.parse.unquote(context.peer())  # ipv6:%5B::1%5D:53080
        stuck = threading.Timer(MAKING_SECONDS, self._end_stuck, [peer])
        stuck.daemon = True
        if self._replaceable:  # a thread that hangs in an environment keeps its place
            context.add_callback(stuck.start)
        try:
            hello = self._check_hello(requests, context)
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
            self._log(f"refused {peer}: {refusal}")
            context.abort(refusal.code, str(refusal))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, grpc.RpcError) and not context.is_active():
                return  # the learner has left
            failure = traceback.format_exc().strip()
            self._log(f"{peer}: its environment failed\n{failure}")
            yield wire.FromServer(error=failure)
            context.abort(grpc.StatusCode.ABORTED, f"the environment failed: {failure.splitlines()[-1]}")
        finally:
            stuck.cancel()

    def _end_stuck(self, peer: str) -> None:
        self._log(f"{peer} has left and its environment hangs: this env server ends, to be replaced")
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)  # with what the environment started
        os._exit(1)

    def _serve(self, requests: Iterator, hello, peer: str, stuck: threading.Timer) -> Iterator:
        began = time.monotonic()
        group = self._make_example() if hello.only_hello else self._make_group()
        try:
            fields = {**group.observation_fields, **{name: ((), dtype) for name, dtype in ENV_FIELDS.items()}}
            answer = wire.FromServer(hello=self._hello(group, fields))
            if hello.only_hello:
                yield answer
                return
            row, width = Row(fields, group.num_envs), group.num_envs
            # Before the hello: a learner gives making and the first reset more time together than it gives a step.
            self._log(f"made {width} environments for {peer} in {time.monotonic() - began:.1f} s, resetting them")
            try:
                group.reset(hello.seed % (2**31 - width), row.views)
            except BaseException:  # after the hello it is a failure that the learner may try again
                yield answer
                raise
            stuck.interval = STUCK_SECONDS
            self._log(f"{peer} is served {width} environments, the first with seed {hello.seed}")
            yield answer
            yield row
            for request in requests:
                group.step(_checked_actions(request, group), row.views)
                yield row
        finally:  # also when the learner has left: gRPC then closes this generator where it is
            try:
                group.close()
            except Exception:
                self._log(f"the environments of {peer} did not close\n{traceback.format_exc()}")
            self._log(f"closed the environments of {peer}")

    def _check_hello(self, requests: Iterator, context: grpc.ServicerContext):
        """The hello of a learner that fits; Refusal of one that does not."""
        timer = threading.Timer(HELLO_SECONDS, context.cancel)
        timer.start()
        try:
            request = next(requests, None)
        finally:
            timer.cancel()
        if request is None or request.WhichOneof("kind") != "hello":
            raise Refusal("a stream begins with the learner's hello")
        hello = request.hello
        if hello.protocol != wire.PROTOCOL:
            raise Refusal(
                f"the learner speaks version {hello.protocol} of the protocol, the env server version "
                f"{wire.PROTOCOL}: install the same version of Beast on both",
                grpc.StatusCode.FAILED_PRECONDITION,
            )
        if self._token and not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise Refusal(
                f"the learner sent {'a wrong' if hello.token else 'no'} token: give both the same --token_file",
                grpc.StatusCode.UNAUTHENTICATED,
            )
        if hello.env and hello.env != self._env_id:
            raise Refusal(
                f"the learner expects environment {hello.env!r}, the env server has {self._env_id!r}: "
                "start either with the other's --env",
                grpc.StatusCode.FAILED_PRECONDITION,
            )
        return hello

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


def _checked_actions(request, group) -> np.ndarray:
    """The actions [K, *shape] of a message, once they are what the hello said; else Refusal."""
    if request.WhichOneof("kind") != "actions":
        raise Refusal("after its hello a learner sends nothing but actions")
    actions = request.actions
    shape, dtype = group.action or (actions.shape[1:], actions.dtype)
    sent, expected = f"{actions.dtype} {list(actions.shape)}", f"{dtype} {[group.num_envs, *shape]}"
    if sent != expected:
        raise Refusal(f"the learner sent actions {sent}, the env server takes {expected}")
    try:
        return wire.array_from_message(actions)
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
    return token, (_read(tls_key, "--tls_key"), _read(tls_cert, "--tls_cert")) if tls_cert else None


def read_token(path: str) -> str:
    """The secret in a file, without white space around it. Raises InputError if the file cannot be read, is empty, or
    is open to other users."""
    token = _read(path, "--token_file").decode(errors="replace").strip()
    if not token:
        raise InputError(f"--token_file {path} is empty: write a secret into it (openssl rand -hex 32 > {path})")
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise InputError(f"--token_file {path} can be read by other users (mode {mode:o}): chmod 600 {path}")
    return token


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


def serve(server: EnvServer, what: str, parent_pid: int = 0) -> None:
    """Print `serving <what> on <address>` and serve until Ctrl-C, SIGTERM, or the parent's end; exit with code 0.

    The end of the parent, even by kill -9, is noticed within half a second. Where there is a parent and this process
    leads its process group, what environments started and did not end is killed too.
    """
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt, in forked environments too
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
    orphaned = bool(parent_pid) and os.getppid() != parent_pid  # nobody asks for the exit code, or else cleans up
    if server.address.startswith("unix:"):
        path = Path(server.address.removeprefix("unix:"))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # gRPC removes it in a thread of its own, which ends here
            if orphaned:
                path.parent.rmdir()  # with the last of its sockets
    if parent_pid and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL if orphaned else signal.SIGTERM)
    os._exit(0)  # the thread of a hanging environment would hold up an ordinary exit
