"""Writes the corpus that csrc/fuzz/decoder_fuzz.cc starts from: streams as servers send them, and a few near misses.

python csrc/fuzz/make_corpus.py    # from the root of the repository
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from beast.envs.rows import written_by  # noqa: E402
from beast.hosts import wire  # noqa: E402

REST = sum(np.dtype(dtype).itemsize for dtype in written_by("env").values())  # bytes of a row beside the observation
ACTION = wire.Field(name="action", dtype="int64")


def hello(fields, structure, num_envs=1, action=ACTION, **changes):
    fields = {**fields, **{name: ((), dtype) for name, dtype in written_by("env").items()}}
    return wire.FromServer(
        hello=wire.ServerHello(
            **{
                "protocol": wire.PROTOCOL,
                "env": "Toy-v0",
                "num_envs": num_envs,
                "fields": [wire.Field(name=n, dtype=d, shape=s) for n, (s, d) in fields.items()],
                "observation": wire.structure_message(structure, {name: i for i, name in enumerate(fields)}),
                "action": action,
                **changes,
            }
        )
    )


def row(size):
    return wire.FromServer(row=bytes(i % 251 for i in range(size)))


def deflated(size):
    return wire.FromServer(deflated=zlib.compress(row(size).row))


def stacks(*flags):
    """A deflated row of two stacks [3, 2, 2], of which those with a flag have shifted."""
    frames = b"".join(bytes(range(4 if flag else 12)) for flag in flags)
    return wire.FromServer(deflated=zlib.compress(bytes(flags) + frames + bytes(2 * REST)))


def stream(*messages, piece=63) -> bytes:
    """The target's input: the size of the pieces, then each message after its length in two bytes."""
    parts = [m if isinstance(m, bytes) else m.SerializeToString() for m in messages]
    return bytes([piece]) + b"".join(struct.pack("<H", len(part)) + part for part in parts)


SCALAR = {"x": ((), "uint8")}
SEVERAL = {"image": ((2, 3), "uint8"), "speed": ((), "float64"), "empty": ((0, 4), "int16")}
NEST = {"camera": "image", "rest": ("speed", ["empty"])}
ERROR = wire.FromServer(error="Traceback (most recent call last):\n  …\nRuntimeError: Füße")
UNKNOWN = b"\xc2\x3e\x03abc"  # field 1000
ROW = row(1 + REST)
CORPUS = {
    "scalar": stream(hello(SCALAR, "x"), ROW, ROW, ROW),
    "nest": stream(hello(SEVERAL, NEST, num_envs=2, frames_per_step=4), *[row(2 * (14 + REST))] * 2, piece=0),
    "any_action": stream(hello(SCALAR, "x", action=None), ROW),
    "error_in_row": stream(hello(SCALAR, "x"), ROW, ERROR),
    "error_first": stream(ERROR),
    "unknown_fields": stream(UNKNOWN + hello(SCALAR, "x").SerializeToString(), UNKNOWN + ROW.SerializeToString()),
    "unknown_group": stream(hello(SCALAR, "x"), b"\xc3\x3e\x08\x01\xc4\x3e" + ROW.SerializeToString()),
    "deflated": stream(hello(SCALAR, "x"), deflated(1 + REST), deflated(REST), deflated(4000)),
    "stacks": stream(hello({"x": ((3, 2, 2), "uint8")}, "x", num_envs=2), stacks(0, 0), stacks(1, 0), stacks(1, 1)),
    "short_row": stream(hello(SCALAR, "x"), row(REST)),
    "long_row": stream(hello(SCALAR, "x"), row(2 + REST)),
    "cut_row": stream(hello(SCALAR, "x"), ROW.SerializeToString()[:-1]),
    "huge_row": stream(hello(SCALAR, "x"), b"\x12\xff\xff\xff\xff\x07"),
    "two_rows": stream(hello(SCALAR, "x"), ROW.SerializeToString() * 2),
    "two_hellos": stream(hello(SCALAR, "x"), hello(SCALAR, "x")),
    "wide": stream(hello(SCALAR, "x", num_envs=65536)),
    "large": stream(hello({"x": ((1 << 20, 1 << 10), "uint8")}, "x")),
    "overflow": stream(hello({"x": ((0, 1 << 62, 1 << 62), "uint8")}, "x")),
    "large_twice": stream(hello({"x": ((1 << 30,), "uint8"), "y": ((1 << 30,), "uint8")}, ["x", "y"])),
    "no_such_field": stream(hello(SCALAR, "x", observation=wire.Structure(field=7))),
    "other_protocol": stream(hello(SCALAR, "x", protocol=99)),
    "empty": stream(b""),
}

if __name__ == "__main__":
    for name, data in CORPUS.items():
        (HERE / "corpus" / name).write_bytes(data)
    print(f"{len(CORPUS)} files, {sum(map(len, CORPUS.values()))} bytes")
