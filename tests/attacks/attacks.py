"""What others can do to an env server and to a learner, tried on this machine alone, within bounds.

    python tests/attacks/attacks.py          # twenty minutes; prints the tables of benchmarks/results/attacks.md
    python tests/attacks/attacks.py hello    # only those whose name has this in it

Each attack on a server goes on while a learner that knows the token connects; the table has the seconds until it has a
row, the memory that the server took meanwhile, and the bytes that it logged. Each attack on a learner is an env server
that lies to polybeast.py; the table has the learner's exit code, its highest memory and the first line that it prints.
Each attack on a learner that listens goes on while it trains with one env server and another one dials; the table has
the seconds until the other is served, the memory that the learner took, whether the first one kept its stream, and the
bytes that were logged. Two more tables have what bad headers write to the logs, one kind after the other, and what
becomes of an env server that dials a good learner and a bad one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before it is imported: it tells of each connection that is closed

import grpc  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]

from env_hosts import ServerProcess, Stream, headers, make_certificate  # noqa: E402

from beast import envs  # noqa: E402
from beast.envs.rows import written_by  # noqa: E402
from beast.hosts import served_group, wire  # noqa: E402

TOKEN = "sesame"
MEGABYTE = 2**20
LONGEST_RUN = 120.0  # seconds of an attacked learner
Attack = Callable[[str, contextlib.ExitStack], None]

# ------------------------------------------------------------------------------------------------- on a server


def call(stack: contextlib.ExitStack, address: str, sent: list, messages: Iterator):
    """One call on a connection of its own."""
    channel = stack.enter_context(grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]))
    made = channel.stream_stream(wire.STREAM)(messages, timeout=60, metadata=sent)
    stack.callback(made.cancel)  # a call that nobody holds is cancelled at once
    return made


def silence(stack: contextlib.ExitStack) -> Iterator:
    never: queue.SimpleQueue = queue.SimpleQueue()
    stack.callback(never.put, None)
    return iter(never.get, None)


def silent_streams(address: str, stack: contextlib.ExitStack) -> None:
    for _ in range(100):
        call(stack, address, [], silence(stack))


def streams_with_a_hello_and_no_token(address: str, stack: contextlib.ExitStack) -> None:
    for _ in range(100):
        call(stack, address, headers(), silence(stack))


def large_messages(address: str, stack: contextlib.ExitStack) -> None:
    for _ in range(10):
        call(stack, address, headers("wrong"), iter([b"x" * 63 * MEGABYTE]))


def large_headers(address: str, stack: contextlib.ExitStack) -> None:
    for _ in range(20):
        call(stack, address, [("hello-bin", b"x" * MEGABYTE)], silence(stack))


def mute_connections(address: str, stack: contextlib.ExitStack) -> None:
    host, port = address.rsplit(":", 1)
    for _ in range(400):
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=1))


def renewed_connections(address: str, stack: contextlib.ExitStack, seconds: float = 7) -> None:
    """200 mute ones of each of two source addresses, each dialed again as soon as it is closed."""
    host, port = address.rsplit(":", 1)
    stopping = threading.Event()
    stack.callback(stopping.set)

    def renew(source: str) -> None:
        selector, missing = selectors.DefaultSelector(), 200
        while not stopping.is_set():
            for _ in range(min(missing, 8)):  # not all at once, so that they are not closed at once
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, int(port)), 1, (source, 0))
                    selector.register(connection, selectors.EVENT_READ)
            for key, _ in selector.select(0.02):
                with contextlib.suppress(OSError):
                    if key.fileobj.recv(1000):  # of HTTP/2, which the other side begins at once
                        continue
                selector.unregister(key.fileobj)
                key.fileobj.close()
            missing = 200 - len(selector.get_map())
        for key in list(selector.get_map().values()):
            key.fileobj.close()

    for source in ("127.0.0.2", "127.0.0.3"):
        threading.Thread(target=renew, args=[source], daemon=True).start()
    time.sleep(seconds)  # silence is closed after 5 seconds, at first all of it at once


def idle_connections(address: str, stack: contextlib.ExitStack) -> None:
    for _ in range(300):
        channel = stack.enter_context(grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]))
        channel.subscribe(lambda state: None, try_to_connect=True)


def guesses(address: str, stack: contextlib.ExitStack) -> None:
    channel = stack.enter_context(grpc.insecure_channel(address))
    for number in range(2000):
        guess = channel.stream_stream(wire.STREAM)(
            iter([]), timeout=60, metadata=headers(f"guess-{number}" + "y" * 500)
        )
        with contextlib.suppress(grpc.RpcError):
            next(guess)


SERVER_ATTACKS = [
    ("100 silent streams", silent_streams),
    ("100 silent streams with a hello, without a token", streams_with_a_hello_and_no_token),
    ("10 messages of 63 MB without the token", large_messages),
    ("20 headers of 1 MB", large_headers),
    ("400 connections that say nothing, a server of 256 descriptors", mute_connections),
    ("two sources renew 200 connections each that say nothing, a server of 256 descriptors", renewed_connections),
    ("300 connections without a stream, a server of 256 descriptors", idle_connections),
    ("calls with bad headers that write to the terminal, for 5 s", lambda *args: bad_headers(*args)),
    ("2,000 tokens of 500 bytes guessed", guesses),
]


def attack_server(attack: Attack) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        token = Path(directory) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        limited = ["bash", "-c", 'ulimit -n 256; exec "$@"', "limited"]
        flags = ["--token_file", str(token), "--group_width", "2"]
        limited = ["env", "--unset=GRPC_VERBOSITY", *limited]  # which is that of this program
        server = ServerProcess(Path(directory), "CartPole-v1", *flags, address="127.0.0.1:0", prefix=limited)
        with server, contextlib.ExitStack() as stack:
            process = psutil.Process(server.process.pid)
            before = process.memory_info().rss
            highest, done = [before], threading.Event()

            def watch() -> None:
                while not done.wait(0.02):
                    highest.append(process.memory_info().rss)

            threading.Thread(target=watch, daemon=True).start()
            attack(server.address, stack)
            began = time.monotonic()
            served = "never within 60 s"
            while time.monotonic() - began < 60:
                try:
                    with Stream(server.address, token=TOKEN) as stream:
                        stream.row()
                        served = f"{time.monotonic() - began:.1f} s"
                        break
                except grpc.RpcError:
                    time.sleep(0.1)
            time.sleep(1)
            done.set()
            logged = len(server.errors())
    return [served, f"{(max(highest) - before) / MEGABYTE:.0f} MB", f"{logged:,} bytes"]


# ------------------------------------------------------------------------------------------------ on a learner

BOX = {"type": "Box", "shape": [2], "dtype": "float32", "low": 0, "high": 1}
DISCRETE = {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}


def said(shape=(2,), **changes) -> bytes:
    fields = [wire.Field(name="obs/obs", dtype="float32", shape=shape)]
    fields += [wire.Field(name=name, dtype=dtype) for name, dtype in written_by("env").items()]
    structure = wire.Structure(dict=wire.Structure.Dict(parts={"obs": wire.Structure(field=0)}))
    hello = {
        "protocol": wire.PROTOCOL, "env": "lies", "num_envs": 16, "fields": fields, "observation": structure,
        "action": wire.Field(name="action", dtype="int64"),
        "observation_space": json.dumps(BOX), "action_space": json.dumps(DISCRETE),
    }  # fmt: skip
    return wire.FromServer(hello=wire.ServerHello(**{**hello, **changes})).SerializeToString()


def row(reward: float = 0.0, done: bool = False) -> bytes:
    types = {"float32": np.float32, "bool": np.bool_, "int32": np.int32}
    values = {name: np.zeros(16, types[dtype]) for name, dtype in written_by("env").items()}
    values["reward"][:], values["done"][:] = reward, done
    return wire.FromServer(
        row=np.zeros((16, 2), np.float32).tobytes() + b"".join(values[name].tobytes() for name in written_by("env"))
    ).SerializeToString()


def forever(*first: bytes, then: bytes) -> Iterator[bytes]:
    yield from first
    while True:
        yield then


LARGE_SPACE = json.dumps({"type": "Tuple", "spaces": [{**BOX, "shape": [2**28]}] * 4})
LEARNER_ATTACKS = [
    ("none: an honest server", lambda: [said()], lambda: forever(said(), row(done=True), then=row())),
    ("spaces of four Boxes of 2^28 in 370 bytes", lambda: [said(observation_space=LARGE_SPACE)], None),
    ("a hello of 300 MB", lambda: [said(observation_space="x" * 300 * MEGABYTE)], None),
    ("spaces that are not those of the rows", lambda: [said(observation_space=json.dumps(DISCRETE))], None),
    ("an environment's id that writes to the terminal",
     lambda: [said(env="\x1b]0;owned\x07\x9b2J" + "x" * 5000)], None),
    ("a row of 300 MB for one announced with 480 bytes", lambda: [said()],
     lambda: [said(), wire.FromServer(row=bytes(300 * MEGABYTE)).SerializeToString()]),
    ("a traceback of 300 MB", lambda: [said()],
     lambda: [said(), wire.FromServer(error="x" * 300 * MEGABYTE).SerializeToString()]),
    ("rewards that are NaN", lambda: [said()], lambda: forever(said(), row(done=True), then=row(reward=np.nan))),
    ("streams with 7 actions where the greeting had 2", lambda: [said()],
     lambda: [said(action_space=json.dumps({**DISCRETE, "n": 7}))]),
    ("a first row in mid-episode", lambda: [said()], lambda: forever(said(), then=row())),
]  # fmt: skip


def attack_learner(greeting: Callable, streamed: Callable | None) -> list[str]:
    """What becomes of polybeast.py with a server that says `greeting()` first and `streamed()` in its streams."""

    def stream(requests, context):
        hello = wire.LearnerHello.FromString(dict(context.invocation_metadata())[wire.HELLO_HEADER])
        if hello.only_hello or streamed is None:
            yield from greeting()
            return
        for index, message in enumerate(streamed()):
            if index > 1:  # a row for each message with actions
                next(requests)
            yield message
        for _ in requests:
            pass

    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    _, service, method = wire.STREAM.split("/")
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        return run_learner(address)
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def server_of_bad_headers(names: tuple[str, ...] = (":status", "grpc-status", "grpc-encoding")) -> Iterator[str]:
    """The address of a server that answers with 180 MB of bad headers."""
    bad = b"".join(literal(name.encode(), ESCAPES) for name in names) * (120 // len(names))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                connection.sendall(frame(4, 0, 0, b"") + frame(4, 1, 0, b""))
                while data := connection.recv(65536):
                    for at in range(len(data) - 9):  # HEADERS of a call, as far as they are not cut
                        if data[at + 3 : at + 5] == b"\1\4" and data[at + 5 : at + 8] == bytes(3):
                            number = int.from_bytes(data[at + 5 : at + 9], "big")
                            connection.sendall(frame(1, 0, number, bad))
                            for _ in range(10_000):  # of one header block, which never ends
                                connection.sendall(frame(9, 0, number, bad))

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    threading.Thread(target=answer_one, args=[connection], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def run_learner(address: str) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "polybeast.py", "--addresses", address, "--root", directory, "--name", "run"]
        command += ["--env_timeout", "3", "--max_env_restarts", "1", "--total_steps", "3000", "--no_tensorboard"]
        began = time.monotonic()
        with open(Path(directory) / "printed", "w+", errors="replace") as printed:
            process, highest = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=printed), 0
            while process.poll() is None and time.monotonic() < began + LONGEST_RUN:
                with contextlib.suppress(psutil.Error):
                    highest = max(highest, psutil.Process(process.pid).memory_info().rss)
                time.sleep(0.02)
            process.kill()  # of one that hangs, so the table has -9; nothing of one that has ended
            process.wait()
            printed.seek(0)
            logged = printed.read()
            lines = logged.splitlines()
    told = next((line for line in lines if re.search("error:|environment server|received", line)), lines[-1])
    told = told.replace(address, "ADDRESS")
    longest = max(lines, key=len)
    assert longest.isprintable() and len(longest) < 3000, f"it writes to the terminal, or fills it: {longest[:200]!r}"
    seconds = time.monotonic() - began
    took = [f"{process.returncode} after {seconds:.0f} s", f"{highest / MEGABYTE:.0f} MB"]
    return [*took, f"{len(logged):,} bytes", told[:160]]


# ---------------------------------------------------------------------------------------- on a learner that listens

KNOWN = [(wire.TOKEN_HEADER, f"Bearer {TOKEN}")]
HONEST = ("CartPole-v1", 2)  # what the learner trains: environment and width of a group


def make_group() -> served_group.VectorEnvGroup:
    return served_group.VectorEnvGroup(envs.make(*HONEST))


class Liar:
    """Messages of an env server that has the honest ones' environments, or says so."""

    def __init__(self):
        group = make_group()
        self._served = served_group.ServedGroup(group, HONEST[0])
        self._served.reset(wire.LearnerHello(seed=1))
        served_group.close_group(group, "liar", lambda line: None)
        self.hello = self._served.hello.SerializeToString()
        self.row = self._served.row.SerializeToString()  # the first one: both are done

    def said(self, **changes) -> bytes:
        message = wire.FromServer.FromString(self.hello)
        for name, value in changes.items():
            setattr(message.hello, name, value)
        return message.SerializeToString()

    def not_done(self) -> bytes:
        return wire.FromServer(row=bytes(len(wire.FromServer.FromString(self.row).row))).SerializeToString()

    def infinite(self) -> bytes:
        row = wire.FromServer.FromString(self.row).row
        return wire.FromServer(row=b"\xff" * 32 + row[32:]).SerializeToString()


def dial(stack, address: str, sent: list, messages: Iterator, channel=None):
    channel = channel or stack.enter_context(_channel(address))
    made = channel.stream_stream(wire.DIAL)(messages, timeout=60, metadata=sent)
    stack.callback(made.cancel)  # a call that nobody holds is cancelled at once
    return made


def _channel(address: str):
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def silent_dials(count: int, sent: list, first: Callable | None = None) -> Callable:
    def attack(address: str, stack: contextlib.ExitStack) -> None:
        channels = [stack.enter_context(_channel(address)) for _ in range(count // 50 + 1)]
        for number in range(count):
            said = [first()] if first else []
            messages = itertools.chain(said, silence(stack))
            dial(stack, address, sent, messages, channels[number % len(channels)])

    return attack


def dials(count: int, sent: list, *messages: Callable) -> Callable:
    """One after the other, each ended by the learner."""

    def attack(address: str, stack: contextlib.ExitStack) -> None:
        channel = stack.enter_context(_channel(address))
        for _ in range(count):
            call = dial(stack, address, sent, itertools.chain((say() for say in messages), silence(stack)), channel)
            with contextlib.suppress(grpc.RpcError, StopIteration):
                while True:
                    next(call)

    return attack


def at_once(count: int, attack: Callable) -> Callable:
    def attacks(address: str, stack: contextlib.ExitStack) -> None:
        with futures.ThreadPoolExecutor(count) as executor:
            list(executor.map(lambda _: attack(address, stack), range(count)))

    return attacks


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header as HPACK writes it without its tables; lengths below 127."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(**changes: bytes) -> bytes:
    sent = {
        ":method": b"POST", ":scheme": b"http", ":path": wire.DIAL.encode(), ":authority": b"x",
        "te": b"trailers", "content-type": b"application/grpc",
    }  # fmt: skip
    return b"".join(literal(name.encode(), value) for name, value in (sent | changes).items())


CALL_HEADERS = call_headers()
ESCAPES = b"\x1b]0;owned\x07\x9b2J" + b"x" * 80
BAD_HEADERS = [":method", ":scheme", "te", "content-type", "grpc-encoding", "grpc-timeout", "grpc-status", ":status"]


def raw(address: str, stack: contextlib.ExitStack, receive_buffer: int = 0) -> socket.socket:
    host, port = address.rsplit(":", 1)
    connection = stack.enter_context(socket.socket())
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(5)
    connection.connect((host, int(port)))
    connection.sendall(PREFACE)
    return connection


def large_token(address: str, stack: contextlib.ExitStack) -> None:
    """10 connections at once, which go on while the other env server dials."""

    def send(connection: socket.socket) -> None:
        connection.settimeout(60)
        with contextlib.suppress(OSError):  # it closes the connection
            connection.sendall(frame(1, 0, 1, CALL_HEADERS + b"\0\x0dauthorization\x7f\x81\xff\xff\x1d"))
            for _ in range(63 * 64):
                connection.sendall(frame(9, 0, 1, b"x" * 16384))

    def end(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    for _ in range(10):
        connection = raw(address, stack)
        stack.callback(end, connection)
        threading.Thread(target=send, args=[connection], daemon=True).start()
    time.sleep(5)


def reset_streams(address: str, stack: contextlib.ExitStack) -> None:
    connection = raw(address, stack)
    until, number = time.monotonic() + 5, 1
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            number += 2
            connection.sendall(frame(1, 4, number, CALL_HEADERS) + frame(3, 0, number, b"\0\0\0\x08"))


def bad_headers(address: str, stack: contextlib.ExitStack, names: tuple[str, ...] = tuple(BAD_HEADERS)) -> None:
    """For 5 s, one connection after the other with calls of which one header each is not what it has to be."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with contextlib.suppress(OSError), contextlib.ExitStack() as own:
            connection = raw(address, own)
            for first in range(1, 10**6, 32):
                calls = enumerate((names * 16)[:16])
                sent = [frame(1, 5, first + 2 * i, call_headers(**{name: ESCAPES})) for i, name in calls]
                connection.sendall(b"".join(sent + [frame(3, 0, first + 2 * i, b"\0\0\0\x08") for i in range(16)]))
                if time.monotonic() > until:
                    break


HEADERS = [
    ":method", ":scheme", ":path", ":authority", ":status", "te", "content-type", "user-agent", "grpc-encoding",
    "grpc-accept-encoding", "grpc-timeout", "grpc-status", "grpc-message", "grpc-previous-rpc-attempts",
]  # fmt: skip
LISTENS = """
import sys, libbeast
listener = libbeast.EnvListener("127.0.0.1:0", token=(sys.argv[1:] or [""])[0])
print(listener.address, flush=True)
sys.stdin.read()
"""
DIALS = """
import sys, libbeast
try:
    libbeast.handshake(sys.argv[1], timeout=5.0)
except (ConnectionError, ValueError) as error:
    print(error)
"""


def logged_by(program: str, *arguments: str, attack: Callable | None = None, **environment: str) -> str:
    """How many bytes this program logs while it is attacked, where it prints an address, or until it ends."""
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        words = [sys.executable, "-c", program] if program else [sys.executable, str(ROOT / "polybeast_env.py")]
        process = subprocess.Popen(
            [*words, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE", **environment},
        )  # fmt: skip
        if attack:
            attack(process.stdout.readline().split()[-1], stack)
            time.sleep(0.2)
            process.kill()
        process.communicate()
        log.seek(0)
        text = log.read()
    escapes = " with control characters" if re.search(rb"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text) else ""
    return f"{len(text):,} bytes{escapes}"


def attack_logs() -> list[list[str]]:
    """What each kind of bad header writes to three logs in 5 s; the last row is without what Beast does about it."""
    serve = ["--env", "CartPole-v1", "--address", "127.0.0.1:0"]
    rows = []
    for names in [*((name,) for name in HEADERS), tuple(HEADERS), tuple(HEADERS)]:
        is_control = bool(rows) and rows[-1][0].startswith("all")
        unguarded = {"GRPC_TRACE": "-all", "GRPC_VERBOSITY": "ERROR"} if is_control else {}

        def attack(address: str, stack: contextlib.ExitStack, names=names) -> None:
            bad_headers(address, stack, names)

        listens = logged_by(LISTENS, attack=attack, **unguarded)
        with server_of_bad_headers(names) as address:
            dials = logged_by(DIALS, address, **unguarded)
        serves = logged_by("", *serve, attack=attack, **unguarded)
        name = "all of them, with GRPC_TRACE and GRPC_VERBOSITY set" if is_control else " ".join(names)
        rows.append([name if len(names) == 1 or is_control else "all of them", listens, dials, serves])
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def guess_for_5_seconds(address: str, method: str) -> str:
    """How many wrong tokens were sent, and how many of them were compared."""
    counts: dict[str, int] = {}
    until = time.monotonic() + 5

    def guess(number: int) -> None:
        with _channel(address) as channel:
            while time.monotonic() < until:
                call = channel.stream_stream(method)(iter([]), timeout=60, metadata=headers(f"guess-{number}"))
                with contextlib.suppress(grpc.RpcError):
                    next(call, None)
                name = call.code().name
                counts[name] = counts.get(name, 0) + 1

    with futures.ThreadPoolExecutor(8) as executor:
        list(executor.map(guess, range(8)))
    return f"{counts.get('UNAUTHENTICATED', 0)} of {sum(counts.values()):,}"


def attack_tokens() -> list[list[str]]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        (token := Path(directory) / "token").write_text(TOKEN)
        token.chmod(0o600)
        server = stack.enter_context(
            ServerProcess(Path(directory), "CartPole-v1", "--token_file", str(token), address="127.0.0.1:0")
        )
        learner = subprocess.Popen(
            [sys.executable, "-c", LISTENS, TOKEN],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        stack.callback(learner.communicate)
        listens = guess_for_5_seconds(learner.stdout.readline().strip(), wire.DIAL)
        return [
            ["an env server", guess_for_5_seconds(server.address, wire.STREAM)],
            ["a learner that listens", listens],
        ]


# --------------------------------------------------------------------------------- on an env server that dials


@contextlib.contextmanager
def proxy_of_404() -> Iterator[str]:
    """Answers each call over HTTP/2 as a proxy does that knows no such path."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                connection.sendall(frame(4, 0, 0, b"") + frame(4, 1, 0, b""))
                while data := connection.recv(65536):
                    for at in range(len(data) - 9):  # HEADERS of a call, as far as they are not cut
                        if data[at + 3 : at + 5] == b"\1\4" and data[at + 5 : at + 8] == bytes(3):
                            number = int.from_bytes(data[at + 5 : at + 9], "big")
                            connection.sendall(frame(1, 5, number, literal(b":status", b"404")))

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer_one, args=[listener.accept()[0]], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def attack_dialer(fault: str, *flags: str, seconds: float = 25.0) -> list[str]:
    """What an env server with two streams does that dials a good learner and one with this fault."""
    from test_dial import Learner

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory, tls, bad_tls = Path(name), None, None
        if "certificate" in fault:
            (directory / "bad").mkdir()
            paths = make_certificate(directory, "IP:127.0.0.1")
            other = "IP:10.0.0.1" if "another host" in fault else "IP:127.0.0.1"
            bad = make_certificate(directory / "bad", other, expired="expired" in fault)
            tls, bad_tls = ((key.read_bytes(), cert.read_bytes()) for cert, key in (paths, bad))
            (trusted := directory / "trusted").write_bytes(tls[1] + (b"" if "authority" in fault else bad_tls[1]))
            (token := directory / "token").write_text(TOKEN)
            token.chmod(0o600)
            flags = *flags, "--tls_ca", str(trusted), "--token_file", str(token)
        good = stack.enter_context(Learner("127.0.0.1:0", tls=tls))
        if "404" in fault:
            bad_address = stack.enter_context(proxy_of_404())
        else:
            refusal = None if bad_tls else (grpc.StatusCode.FAILED_PRECONDITION, "environment Pong instead of CartPole")
            bad_address = stack.enter_context(Learner("127.0.0.1:0", tls=bad_tls, refusal=refusal)).address
        begun, steps, stopping = [], [0], threading.Event()

        def train(call) -> None:
            with contextlib.suppress(Exception):
                call.accept(env="CartPole-v1").row()
                begun.append(time.monotonic())
                while not stopping.wait(0.01):
                    call.act()
                    steps[0] += 1

        def take() -> None:
            while not stopping.is_set():
                with contextlib.suppress(queue.Empty):
                    threading.Thread(target=train, args=[good.call(0.1)], daemon=True).start()

        threading.Thread(target=take, daemon=True).start()
        flags = "--group_width", "2", *flags
        server = stack.enter_context(
            ServerProcess(directory, "CartPole-v1", *flags, learners=(good.address, bad_address))
        )
        began = time.monotonic()
        told = None
        while time.monotonic() < began + seconds and server.process.poll() is None:
            lines = [line for line in server.errors().splitlines() if bad_address in line]
            told = told or (lines and time.monotonic() - began)
            time.sleep(0.05)
        code = server.process.poll()
        stopping.set()
        lines = [line for line in server.errors().splitlines() if bad_address in line]
        first = lines[0].replace(bad_address, "ADDRESS") if lines else "nothing"
        server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(15)
    lives = f"{len(begun)} of 2 streams, {steps[0]:,} steps"
    state = "runs" if code is None else f"ended with code {code}"
    return [lives, state, f"{len(lines)}, the first after {told:.1f} s" if told else "0", first[:400]]


DIALER_ATTACKS = [
    ("wants another environment", ()),
    ("wants another environment, `--keep`", ("--keep",)),
    ("is a proxy that answers 404", ()),
    ("is a proxy that answers 404, `--keep`", ("--keep",)),
    ("has a certificate that has expired", ()),
    ("has a certificate of another host", ()),
    ("has a certificate of another authority", ()),
]


def headers_without_reading(address: str, stack: contextlib.ExitStack) -> None:
    """30,000 calls that are refused, on a connection that takes no answer. It ends within 60 s."""
    connection = raw(address, stack, receive_buffer=2048)
    connection.settimeout(60)
    with contextlib.suppress(ConnectionError):
        for first in range(3, 60_003, 50):
            connection.sendall(b"".join(frame(1, 5, first + 2 * i, CALL_HEADERS) for i in range(25)))
            time.sleep(0.004)
        for _ in range(12):
            time.sleep(5)
            connection.sendall(frame(6, 0, 0, bytes(8)))  # a ping: who has closed the connection says so
        raise AssertionError("the connection stays")


def drip(message: Callable[[], bytes], count: int) -> Callable:
    """So many connections that send a byte a second of what `message` makes."""

    def attack(address: str, stack: contextlib.ExitStack) -> None:
        host, port = address.rsplit(":", 1)
        stopping = threading.Event()
        stack.callback(stopping.set)

        def send() -> None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as connection:
                for byte in message():
                    connection.sendall(bytes([byte]))
                    if stopping.wait(1):
                        return

        for _ in range(count):
            threading.Thread(target=send, daemon=True).start()

    return attack


def hello_by_bytes(address: str, stack: contextlib.ExitStack) -> None:
    """32 calls that know the token; the hello comes a byte a second."""
    said, stopping = Liar().hello, threading.Event()
    stack.callback(stopping.set)
    begun = PREFACE + frame(1, 4, 1, CALL_HEADERS + literal(b"authorization", KNOWN[0][1].encode()))

    def send() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as own:
            connection = raw(address, own)
            connection.sendall(begun[len(PREFACE) :] + frame(0, 0, 1, b"\0" + len(said).to_bytes(4, "big")))
            for byte in said:
                connection.sendall(frame(0, 0, 1, bytes([byte])))
                if stopping.wait(1):
                    return

    for _ in range(32):
        threading.Thread(target=send, daemon=True).start()


def named(name: str) -> list:
    return [*KNOWN, (wire.STREAM_HEADER, name)]


def listener_attacks() -> list[tuple[str, Callable]]:
    liar = Liar()
    hello, row = (lambda: liar.hello), (lambda: liar.row)
    huge = lambda size: lambda: wire.FromServer(row=bytes(size)).SerializeToString()  # noqa: E731
    escapes = "\x1b]0;owned\x07\x9b2J"
    boxes = lambda: liar.said(observation_space=LARGE_SPACE)  # noqa: E731
    return [
        ("none", lambda address, stack: None),
        ("10 silent streams without the token", silent_dials(10, [])),
        ("1,000 silent streams without the token", silent_dials(1000, [])),
        ("10 silent streams with the token", silent_dials(10, KNOWN)),
        ("1,000 silent streams with the token", silent_dials(1000, KNOWN)),
        ("10 headers with 63 MB of token", large_token),
        ("10 messages of 63 MB without the token", at_once(10, dials(1, [], huge(63 * MEGABYTE)))),
        ("2,000 tokens guessed", dials(2000, [(wire.TOKEN_HEADER, "Bearer guess")])),
        ("400 connections that say nothing, a learner of 256 descriptors", mute_connections),
        ("300 connections without a stream, a learner of 256 descriptors", idle_connections),
        ("two sources renew 200 connections each that say nothing, a learner of 256 descriptors", renewed_connections),
        ("calls with bad headers that write to the terminal, for 5 s", bad_headers),
        ("20 connections, a byte a second", drip(lambda: PREFACE, 20)),
        ("with the token: 32 hellos, a byte a second", hello_by_bytes),
        ("one connection that begins and resets streams for 5 s", reset_streams),
        ("one connection with 30,000 calls that reads nothing", headers_without_reading),
        ("with the token: a hello of 1.5 GB", dials(1, KNOWN, lambda: b"\x0a" + bytes(1536 * MEGABYTE))),
        ("with the token: 10 rows of 300 MB, one by one", dials(10, KNOWN, hello, huge(300 * MEGABYTE))),
        ("with the token: four Boxes of 2^28", dials(20, KNOWN, boxes)),
        ("with the token: other spaces, 2,000 times", dials(2000, KNOWN, lambda: liar.said(action_space="[7]"))),
        ("with the token: rows that are NaN, 2,000 times", dials(2000, KNOWN, hello, liar.infinite)),
        ("with the token: first rows in mid-episode, 2,000 times", dials(2000, KNOWN, hello, liar.not_done)),
        ("with the token: 64 streams that say hello and hang", silent_dials(64, KNOWN, hello)),
        ("with the token: an id that writes to the terminal", dials(50, KNOWN, lambda: liar.said(env=escapes))),
        ("with the token: 500 tracebacks of 60 kB that write to the terminal",
         dials(500, KNOWN, hello, lambda: wire.FromServer(error=escapes * 6000).SerializeToString())),
        ("without the token: 500 streams with another one's id", dials(500, named("honest/0")[1:], hello)),
        ("with the token, without the id: 60 streams", dials(60, named("guess/0"), hello, liar.not_done)),
        ("with the token and the id: one stream", dials(1, named("honest/0"), hello, row, liar.not_done)),
    ]  # fmt: skip


# An honest env server with one stream: it dials when it reads a line, and prints its log and "served".
HONEST_SERVER = """
import sys, attacks
from beast.hosts import dialer
address, name = sys.argv[1:]
log = lambda line: print(line, flush=True)
options = {"max_streams": 1, "env_id": attacks.HONEST[0], "token": attacks.TOKEN, "log": log}
served = lambda address: log("served")
server = dialer.Dialer(attacks.make_group, [address], **options, on_first_stream=served)
server.name = name
log("ready")
sys.stdin.readline()
server.start()
while not server.stopping.wait(1):
    pass
log(f"failed: {server.failure}")
"""


class HonestServer:
    """A process that dials from `start` on, and what it has logged."""

    def __init__(self, stack: contextlib.ExitStack, address: str, name: str):
        self._process = subprocess.Popen(
            [sys.executable, "-c", HONEST_SERVER, address, name],
            cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(self._process.communicate)
        stack.callback(self._process.kill)
        self.lines: list[str] = []
        assert self._process.stdout.readline() == "ready\n"

    def start(self) -> threading.Event:
        """What is set when the server is served first."""
        is_served = threading.Event()

        def read() -> None:
            for line in self._process.stdout:
                self.lines.append(line)
                if line == "served\n":
                    is_served.set()

        threading.Thread(target=read, daemon=True).start()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return is_served

    def failure(self) -> str:
        return next((line.strip() for line in self.lines if line.startswith("failed")), "")


class ListeningLearner:
    """polybeast.py --listen, which trains with one honest env server."""

    def __init__(self, stack: contextlib.ExitStack):
        directory = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        token, self.printed = Path(directory) / "token", Path(directory) / "printed"
        token.write_text(TOKEN)
        token.chmod(0o600)
        limited = ["bash", "-c", 'ulimit -n 256; exec "$@"', "limited"]
        command = [*limited, sys.executable, "polybeast.py", "--listen", "127.0.0.1:0", "--token_file", str(token)]
        command += ["--root", directory, "--name", "run", "--env_timeout", "5", "--no_tensorboard"]
        command += ["--total_steps", "1000000000", "--batch_width", "2", "--min_envs", "0"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.printed.open("w"), stderr=subprocess.STDOUT)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        deadline = time.monotonic() + 240
        while not (found := re.search("--learner ([0-9.:]+)", self.printed.read_text())):
            assert time.monotonic() < deadline and self.process.poll() is None, self.printed.read_text()
            time.sleep(0.1)
        self.address = found[1]
        self._process = psutil.Process(self.process.pid)
        self.first = HonestServer(stack, self.address, "honest")
        assert self.first.start().wait(240), self.printed.read_text()
        time.sleep(3)
        self._at_first = self.memory()

    def memory(self) -> int:
        return self._process.memory_info().rss

    def is_as_new(self) -> bool:
        is_alive = self.process.poll() is None and not self.first.failure()
        return is_alive and self.memory() < self._at_first + 20 * MEGABYTE


def attack_listener(attack: Attack, learner: ListeningLearner) -> list[str]:
    """What becomes of a learner that listens."""
    with contextlib.ExitStack() as stack:
        second = HonestServer(stack, learner.address, "second")
        before, logged, told = learner.memory(), len(learner.printed.read_bytes()), len(learner.first.lines)
        highest, done = [before], threading.Event()

        def watch() -> None:
            with contextlib.suppress(psutil.Error):
                while not done.wait(0.02):
                    highest.append(learner.memory())

        threading.Thread(target=watch, daemon=True).start()
        attack(learner.address, stack)
        began = time.monotonic()
        served = f"{time.monotonic() - began:.1f} s" if second.start().wait(60) else "never within 60 s"
        time.sleep(2)  # until what is logged has been written
        done.set()
        text = learner.printed.read_bytes()
        assert learner.process.poll() is None, f"the learner has ended: {text[-2000:]!r}"
        assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", text), "it writes to the terminal"
        kept = "lost" if any("no learner" in line for line in learner.first.lines[told:]) else "kept"
        kept = learner.first.failure() or second.failure() or kept
        return [served, f"{(max(highest) - before) / MEGABYTE:.0f} MB", kept, f"{len(text) - logged:,} bytes"]


def attack_listeners(chosen: str) -> list[list[str]]:
    """Each attack whose name matches; a learner that has taken memory for one makes room for a new one."""
    rows = []
    with contextlib.ExitStack() as stack:
        learner = None
        for name, attack in listener_attacks():
            if not re.search(chosen, name):
                continue
            if not learner or not learner.is_as_new():
                stack.close()
                learner = ListeningLearner(stack)
            try:
                rows.append([name, *attack_listener(attack, learner)])
            except AssertionError as error:
                rows.append([name, f"FAILED: {error}"])
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    columns = ["attack on a learner that listens", "another env server is served after", "memory taken"]
    columns += ["the first one's stream", "logged"]
    chosen = " ".join(sys.argv[1:])
    if re.search(chosen, "logs of bad headers"):
        logs = ["bad header", "a learner that listens logs", "a learner that dials logs", "an env server logs"]
        print(table(logs, attack_logs()), end="\n\n")
    if re.search(chosen, "tokens guessed for 5 s"):
        print(table(["8 connections guess tokens for 5 s", "compared"], attack_tokens()), end="\n\n")
    on_dialer = [[name, *attack_dialer(name, *flags)] for name, flags in DIALER_ATTACKS if re.search(chosen, name)]
    columns_of_dialer = ["the other learner", "the good one has", "the env server", "lines about it", "the first one"]
    print(table(columns_of_dialer, on_dialer), end="\n\n")
    print(table(columns, attack_listeners(chosen)), end="\n\n")
    on_server = [[name, *attack_server(attack)] for name, attack in SERVER_ATTACKS if re.search(chosen, name)]
    print(
        table(["attack on an env server", "a learner is served after", "memory taken", "logged"], on_server), end="\n\n"
    )
    on_learner = [[name, *attack_learner(*lies)] for name, *lies in LEARNER_ATTACKS if re.search(chosen, name)]
    if re.search(chosen, answers := "answers with bad headers that write to the terminal"):
        with server_of_bad_headers() as address:
            on_learner.append([answers, *run_learner(address)])
    print(table(["attack on a learner", "exit code", "highest memory", "logged", "what it says"], on_learner))


if __name__ == "__main__":
    main()
