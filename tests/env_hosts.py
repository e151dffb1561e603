"""Env servers, in processes or here, and a learner's end of a stream in plain Python, for the tests of both."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
import zlib
from pathlib import Path

import grpc
import numpy as np
import pytest
from waiting import PATIENCE

from beast import envs
from beast.hosts import dialer, served_group, wire

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_READER = ["bash", "-c", 'exec "$@" 2> >(true)', "bash"]  # a prefix: nobody reads what a command says on stderr


class ServerProcess:
    """`polybeast_env.py` as a user starts it. A context that ends with the process; `errors()` is its stderr so far."""

    def __init__(
        self, directory: Path, env: str, *flags: str, address: str = "", script: list[str] | None = None, prefix=(),
        learners: tuple[str, ...] = (),
    ):  # fmt: skip
        """`directory` is for the socket and stderr; `script` replaces polybeast_env.py; `prefix` runs the command. With
        `learners` it dials these."""
        self.socket = directory / "envs"
        self._errors = directory / "errors"
        where = ["--learner", *learners] if learners else ["--address", address or f"unix:{self.socket}"]
        command = script or [str(ROOT / "polybeast_env.py"), "--env", env, *where]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "compat")]),
        }
        began = time.monotonic()
        with open(self._errors, "a") as errors:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *command, *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self.start_seconds = 2.0
        if learners:
            return
        line = self.process.stdout.readline()  # "serving … on <address>", once it does
        assert line.startswith("serving "), f"{line}{self.errors()}"
        self.address = line.split()[-1]
        self.start_seconds = time.monotonic() - began

    def errors(self) -> str:
        return self._errors.read_text()

    def exit_code(self) -> int:
        """Of a server that has a reason to end now, after a check that it does not take long for it."""
        return self.process.wait(max(5, 5 * self.start_seconds))  # an idle machine starts it in one second

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exception) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def toy_group(name: str = "Counting", width: int = 2):
    return served_group.VectorEnvGroup(envs.make(f"toy_envs:{name}-v0", width))


class Dialing:
    """A Dialer in this process, as a context; `lines` is its log."""

    def __init__(self, *addresses: str, make_group=toy_group, **options):
        self.lines: list[str] = []
        self.dialer = dialer.Dialer(
            make_group, list(addresses), **{"max_streams": 1, "env_id": "toy", "log": self.lines.append, **options}
        )

    def text(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Dialing:
        self.dialer.start()
        return self

    def __exit__(self, *exception) -> None:
        self.dialer.stop()


class Stream:
    """A learner's end of one stream: `hello` is the server's, `row()` the next row as arrays by name."""

    def __init__(
        self, address: str, *, channel: grpc.Channel | None = None, wait_for_hello: bool = True, token="", **hello
    ):
        """Says hello with the fields `hello`."""
        self._channel = channel or grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._out: queue.SimpleQueue = queue.SimpleQueue()
        self.call = self._channel.stream_stream(
            wire.STREAM,
            request_serializer=wire.Array.SerializeToString,
            response_deserializer=wire.FromServer.FromString,
        )(iter(self._out.get, None), timeout=PATIENCE, metadata=headers(token, **hello))
        self.hello = self.receive().hello if wait_for_hello else None
        self._last: dict[str, np.ndarray] = {}

    def send(self, message) -> None:
        self._out.put(message)

    def receive(self):
        """The server's next message. Raises grpc.RpcError where the stream has ended."""
        return next(self.call)

    def row(self) -> dict[str, np.ndarray]:
        return arrays_of(self.receive(), self.hello, self._last)

    def act(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """The row that these actions lead to."""
        self.send(array_message(actions))
        return self.row()

    def end(self) -> tuple[grpc.StatusCode, str]:
        """The stream's status and its message, once the server has ended it."""
        try:
            while True:
                self.receive()
        except (grpc.RpcError, StopIteration):
            return self.call.code(), self.call.details()

    def close(self) -> None:
        self._out.put(None)
        self.call.cancel()
        self._channel.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def arrays_of(message, hello, last: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays [K, *shape] of a message's row, by name. `last` has the message before's, then this one's."""
    assert message.deflated or message.WhichOneof("kind") == "row", message
    data, offset = zlib.decompress(message.deflated) if message.deflated else message.row, 0

    def take(shape, dtype) -> np.ndarray:
        nonlocal offset
        count, offset = int(np.prod(shape)), offset + int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(data[:offset], dtype, count, offset - count * np.dtype(dtype).itemsize).reshape(shape)

    arrays = {}
    for field in hello.fields:
        name, shape = field.name, tuple(field.shape)
        if not (message.deflated and field.dtype == "uint8" and len(shape) == 3 and 2 <= shape[0] <= 8):
            arrays[name] = take((hello.num_envs, *shape), field.dtype)
            continue
        stacks = []
        for env, is_shifted in enumerate(take((hello.num_envs,), "uint8")):
            if is_shifted:
                before = last[name][env]
                stacks.append(np.concatenate([before[1:], (before[-1] ^ take(shape[1:], "uint8"))[None]]))
            else:
                stacks.append(take(shape, "uint8"))
        arrays[name] = np.stack(stacks)
    assert offset == len(data)
    last.update(arrays)
    return arrays


def headers(token: str = "", **hello) -> list[tuple[str, str | bytes]]:
    """Those of a call that says hello with these fields."""
    message = wire.LearnerHello(**{"protocol": wire.PROTOCOL, "seed": 1, **hello})
    said = [(wire.HELLO_HEADER, message.SerializeToString())]
    return [*said, (wire.TOKEN_HEADER, f"Bearer {token}")] if token else said


def array_message(array: np.ndarray):
    """An Array message with a copy of `array`. Raises InputError for a dtype that the protocol does not have."""
    array = np.asarray(array)
    data = array.astype(wire.little_endian(array.dtype), copy=False).tobytes()
    return wire.Array(dtype=array.dtype.name, shape=array.shape, data=data)


def make_certificate(directory: Path, names: str, expired: bool = False) -> tuple[Path, Path]:
    """A self-signed certificate and its key, in PEM, for names such as `DNS:localhost,IP:127.0.0.1`."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=beast".split()
    )
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(cert), "-addext", f"subjectAltName={names}"],
            check=True,
            capture_output=True,
        )
        if expired:  # signed again, until yesterday
            again = [*"openssl x509 -days -1 -in".split(), str(cert), "-signkey", str(key), "-out", str(cert)]
            subprocess.run(again, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: no certificate to test TLS with")
    return cert, key
