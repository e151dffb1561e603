"""What others can do to an env server and to a learner, tried on this machine alone, within bounds.

    python tests/attacks/attacks.py        # three minutes; prints the table of benchmarks/results/attacks.md

Each attack on a server goes on while a learner that knows the token connects; the table has the seconds until it has a
row, the memory that the server took meanwhile, and the bytes that it logged. Each attack on a learner is an env server
that lies to polybeast.py; the table has the learner's exit code, its highest memory and the first line that it prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from env_hosts import ServerProcess, Stream, headers  # noqa: E402

from beast.envs.rows import ENV_FIELDS  # noqa: E402
from beast.feeds import wire  # noqa: E402

TOKEN = "sesame"
MEGABYTE = 2**20
Attack = Callable[[str, contextlib.ExitStack], None]

# ------------------------------------------------------------------------------------------------- on a server


def call(stack: contextlib.ExitStack, address: str, sent: list, messages: Iterator):
    """One call on a connection of its own."""
    channel = stack.enter_context(grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]))
    return channel.stream_stream(wire.STREAM)(messages, timeout=60, metadata=sent)


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
    ("300 connections without a stream, a server of 256 descriptors", idle_connections),
    ("2,000 tokens of 500 bytes guessed", guesses),
]


def attack_server(attack: Attack) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        token = Path(directory) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        limited = ["bash", "-c", 'ulimit -n 256; exec "$@"', "limited"]
        flags = ["--token_file", str(token), "--group_width", "2"]
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
    fields += [wire.Field(name=name, dtype=dtype) for name, dtype in ENV_FIELDS.items()]
    structure = wire.Structure(dict=wire.Structure.Dict(parts={"obs": wire.Structure(field=0)}))
    hello = {
        "protocol": wire.PROTOCOL, "env": "lies", "num_envs": 16, "fields": fields, "observation": structure,
        "action": wire.Field(name="action", dtype="int64"),
        "observation_space": json.dumps(BOX), "action_space": json.dumps(DISCRETE),
    }  # fmt: skip
    return wire.FromServer(hello=wire.ServerHello(**{**hello, **changes})).SerializeToString()


def row(reward: float = 0.0, done: bool = False) -> bytes:
    types = {"float32": np.float32, "bool": np.bool_, "int32": np.int32}
    values = {name: np.zeros(16, types[dtype]) for name, dtype in ENV_FIELDS.items()}
    values["reward"][:], values["done"][:] = reward, done
    return wire.FromServer(
        row=np.zeros((16, 2), np.float32).tobytes() + b"".join(values[name].tobytes() for name in ENV_FIELDS)
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
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "polybeast.py", "--addresses", address, "--root", directory, "--name", "run"]
        command += ["--env_timeout", "3", "--max_env_restarts", "1", "--total_steps", "3000", "--no_tensorboard"]
        began = time.monotonic()
        with open(Path(directory) / "printed", "w+") as printed:
            process, highest = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=printed), 0
            while process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    highest = max(highest, psutil.Process(process.pid).memory_info().rss)
                time.sleep(0.02)
            printed.seek(0)
            lines = printed.read().splitlines()
    server.stop(0).wait()
    told = next((line for line in lines if re.search("error|environment server|received", line)), lines[-1])
    told = told.replace(address, "ADDRESS")
    longest = max(lines, key=len)
    assert told.isprintable() and len(longest) < 3000, f"it writes to the terminal, or fills it: {longest[:200]!r}"
    seconds = time.monotonic() - began
    return [f"{process.returncode} after {seconds:.0f} s", f"{highest / MEGABYTE:.0f} MB", told[:160]]


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    on_server = [[name, *attack_server(attack)] for name, attack in SERVER_ATTACKS]
    print(
        table(["attack on an env server", "a learner is served after", "memory taken", "logged"], on_server), end="\n\n"
    )
    on_learner = [[name, *attack_learner(greeting, streamed)] for name, greeting, streamed in LEARNER_ATTACKS]
    print(table(["attack on a learner", "exit code", "highest memory", "what it says"], on_learner))


if __name__ == "__main__":
    main()
