"""Fuzzes what Python reads of another host's messages: `python csrc/fuzz/message_fuzz.py [SECONDS]`, by default 300.

An env server reads a learner's hello and its actions; a learner reads the spaces in an env server's hello. Valid
messages are changed at random, in their bytes and texts. Each must be read or be refused by the errors that the callers
expect. It ends with code 1 at the first that raises another one, or takes a second, and prints it.
"""

import json
import random
import sys
import time
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from gymnasium import spaces

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from beast.errors import InputError  # noqa: E402
from beast.hosts import env_server, served_group, wire  # noqa: E402


class Group:
    """What actions are compared with: eight of a Box of two floats, or any."""

    num_envs = 8

    def __init__(self, action):
        self.action = action


def array_message(array: np.ndarray):
    return wire.Array(dtype=array.dtype.name, shape=array.shape, data=array.tobytes())


LEARNER_HELLO = wire.LearnerHello(protocol=wire.PROTOCOL, seed=7, env="Toy-v0").SerializeToString()
ACTIONS = array_message(np.ones((8, 2), np.float32)).SerializeToString()
NEST = wire.Array(
    parts=[array_message(np.arange(8)), array_message(np.zeros((8, 3), np.uint8))],
    structure=wire.structure_message({"a": "x", "b": ("y",)}, {"x": 0, "y": 1}),
).SerializeToString()
SPACES = wire.space_to_json(
    spaces.Dict(
        image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
        vector=spaces.Box(-np.inf, np.array([1.0, 2.0], np.float32)),
        parts=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4))),
    )
).encode()


def read_hello(data: bytes) -> None:
    env_server.read_learner_hello({wire.HELLO_HEADER: data}, "Toy-v0")


def read_actions(data: bytes) -> None:
    message = wire.Array.FromString(data)
    for action in (((2,), "float32"), None):
        served_group._checked_actions(message, Group(action))


def read_spaces(data: bytes) -> None:
    wire.space_from_json(data.decode("utf-8", "replace"))


TARGETS = [(read_hello, LEARNER_HELLO), (read_actions, ACTIONS), (read_actions, NEST), (read_spaces, SPACES)]
REFUSALS = (served_group.Refusal, InputError, DecodeError)  # gRPC ends the call at a DecodeError
WORDS = [b"-1", b"1e999", b"4294967296", b"null", b"[]", b"{}", b'"', b"NaN", b"[" * 2000, b"\xff\xff\xff\xff\x0f"]
NUMBERS = [0, -1, 10**9, 2**63, 1e999, "x", None, [], {}, [10**5] * 4, True]


def changed(data: bytes, choose: random.Random) -> bytes:
    if data.startswith(b"{") and choose.random() < 0.5:
        return json.dumps(changed_value(json.loads(data), choose)).encode()
    for _ in range(choose.randint(1, 4)):
        at, count = choose.randrange(len(data) + 1), choose.choice((0, 1, 1, 2, 8, len(data)))
        piece = choose.choice((b"", choose.randbytes(choose.randint(1, 8)), choose.choice(WORDS), data[at:]))
        data = data[:at] + piece + data[at + count :]
    return data


def changed_value(value, choose: random.Random):
    """The value with one part, at any depth, replaced by another kind of thing."""
    if isinstance(value, (dict, list)) and value and choose.random() < 0.8:
        key = choose.choice(list(value)) if isinstance(value, dict) else choose.randrange(len(value))
        value[key] = changed_value(value[key], choose)
        return value
    return choose.choice(NUMBERS)


def main(seconds: float) -> None:
    choose, began, count = random.Random(1), time.monotonic(), 0
    accepted = {read.__name__: 0 for read, _ in TARGETS}
    while time.monotonic() - began < seconds:
        read, data = choose.choice(TARGETS)
        data = changed(data, choose)
        count += 1
        started = time.process_time()
        try:
            read(data)
            accepted[read.__name__] += 1
        except REFUSALS:
            pass
        except BaseException as error:
            sys.exit(f"{read.__name__}({data!r}) raised {type(error).__name__}: {error}")
        if time.process_time() - started > 1:
            sys.exit(f"{read.__name__}({data!r}) took {time.process_time() - started:.1f} s")
    print(f"{count} messages in {seconds:.0f} s, of which were read {accepted}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 300)
