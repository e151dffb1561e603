"""A group of environments as an env server serves it: its hello, its rows as they lie on the wire, its end."""

import ctypes
import math
import os
import signal
import threading
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from gymnasium import spaces

from beast.envs import env_metrics
from beast.envs import progress as training
from beast.envs.groups import EnvGroup
from beast.envs.masks import MASK
from beast.envs.rows import nest_observations, written_by
from beast.errors import InputError
from beast.hosts import wire
from beast.machine import kill_family

CLOSING_SECONDS = 240.0  # for environments to close, before they count as hanging
MAX_ACTION_BYTES = 2**20  # of one message, where it is not known what the actions are
DEFLATE_LEVEL = 1  # higher ones take longer and gain little
MAX_ERROR = 60_000  # bytes of a traceback that a learner gets: it takes 64 KB more than a row


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
    - `frames_per_step`: frames of the emulator; 1 where it is missing
    - `ended`, where it tells of games

    An observation `name` is the field `obs/<name>`. Under SAME_STEP autoreset the final observation has the field
    `final_obs/<name>` and this same name in `structure`. Errors are those of EnvGroup.
    """

    def __init__(self, env, num_envs: int | None = None, has_mask: bool = False, metrics: str = ""):
        super().__init__(env, has_mask, metrics)
        self.num_envs = num_envs or env.num_envs
        # `obs/` and `final_obs/` set an observation apart from `reward`, …
        self.observation_fields = {name: field for name, field in self.fields.items() if "obs/" in name}
        self.structure = {name.removeprefix("obs/"): name for name in self.observation_fields}
        self.action = self.fields["action"]
        named = self.spaces.observations
        whole = spaces.Dict(list(named.items())) if MASK in named else env.single_observation_space
        self.observation_space = wire.space_to_json(whole)
        self.action_space = wire.space_to_json(env.single_action_space)
        self.frames_per_step = (env.metadata or {}).get("frames_per_step", 1)


class Row:
    """One row as it lies on the wire: its fields side by side in the memory of its message, with a view of each. With
    `deflate` its message has them behind zlib, and of a stack of frames that has only shifted the newest one."""

    def __init__(self, fields: dict[str, tuple[tuple[int, ...], str]], num_envs: int, deflate: bool = False):
        """`fields` maps names to (shape, dtype) of one environment. `views` maps them to arrays [num_envs, *shape];
        `obs/<name>` is `views["obs"][name]`."""
        layout = np.dtype([(name, wire.little_endian(d), (num_envs, *shape)) for name, (shape, d) in fields.items()])
        # gRPC takes `bytes` and nothing else, and copies them before it asks for the next message. Environments write
        # into the memory of the very object that it gets, which nobody else has, so that its copy is the only one.
        self._message = wire.FromServer(row=bytes(layout.itemsize)).SerializeToString()
        size = len(self._message)
        memory: Any = (ctypes.c_ubyte * size).from_address(np.frombuffer(self._message, np.uint8).ctypes.data)
        memory.owner = self._message  # which the views keep alive, also after this row
        self._record = np.ndarray((), layout, memory, size - layout.itemsize)
        self._deflate, self.metrics = deflate, b""  # that go with it
        self._last: dict[str, np.ndarray] = {}  # stacks of the last message, by field
        self._stacks = {name for name, field in fields.items() if wire.is_stack(*field)}
        self.views = nest_observations({name: self._record[name] for name in fields})

    def begin(self) -> None:
        """The next message is the first of a stream."""
        self._last.clear()

    def _packed(self) -> bytes:
        """The row as csrc/rpcenv.proto has it behind zlib."""
        parts = []
        for name in self._record.dtype.names:
            field = self._record[name]
            if name not in self._stacks:
                parts.append(field.tobytes())
                continue
            last = self._last.get(name)
            if last is None:
                parts += bytes(len(field)), field.tobytes()
                self._last[name] = field.copy()
                continue
            is_shifted = (field[:, :-1] == last[:, 1:]).reshape(len(field), -1).all(1)
            newest = field[:, -1] ^ last[:, -1]
            parts.append(is_shifted.tobytes())
            parts += [(newest[env] if is_shifted[env] else field[env]).tobytes() for env in range(len(field))]
            last[...] = field
        return b"".join(parts)

    def SerializeToString(self) -> bytes:
        """The message as protobuf would serialize it, for one call: the next row overwrites it in place, and with
        `deflate` has only what has changed since."""
        if self._deflate:
            deflated = zlib.compress(self._packed(), DEFLATE_LEVEL)
            return wire.FromServer(deflated=deflated, metrics=self.metrics).SerializeToString()
        more = wire.FromServer(metrics=self.metrics).SerializeToString() if self.metrics else b""
        return self._message + more if more else self._message


class ServedGroup:
    """A group of environments (see `VectorEnvGroup`) with what is said of it: `hello` and, time after time, `row`."""

    def __init__(self, group, env_id: str, deflate: bool = False):
        """Raises InputError where its spaces cannot be sent."""
        self._group, self.num_envs = group, group.num_envs
        self.hello = describe(group, env_id)
        self.row = Row(_fields(group), group.num_envs, deflate)
        self._page = training.page_of_thread()

    def reset(self, hello) -> None:
        """Begin new episodes, with the seed of a learner's hello."""
        self._page.write(hello.progress[: training.MAX_BYTES])
        self._group.reset(hello.seed % (2**31 - self.num_envs), self.row.views)
        self.row.metrics = b""
        self.row.begin()

    def step(self, actions) -> None:
        """Step with an Array message. Raises Refusal where the actions are not what the hello said."""
        if actions.progress:
            self._page.write(actions.progress[: training.MAX_BYTES])
        self._group.step(_checked_actions(actions, self._group), self.row.views)
        self.row.metrics = env_metrics.encode(getattr(self._group, "ended", ()))


def describe(group, env_id: str):
    """The hello of a group's stream, a FromServer. Raises InputError where its spaces cannot be sent."""
    fields, (shape, dtype) = _fields(group), group.action or ((), "")
    hello = wire.ServerHello(
        protocol=wire.PROTOCOL, env=env_id, num_envs=group.num_envs,
        fields=[wire.Field(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in fields.items()],
        observation=wire.structure_message(group.structure, {name: index for index, name in enumerate(fields)}),
        observation_space=group.observation_space,
        action=wire.Field(name="action", shape=shape, dtype=dtype), action_space=group.action_space,
        frames_per_step=getattr(group, "frames_per_step", 1),
    )  # fmt: skip
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


def _fields(group) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of each field of a row."""
    return {**group.observation_fields, **{name: ((), dtype) for name, dtype in written_by("env").items()}}


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


def end_stuck(peer: str, log: Callable[[str], None]) -> None:
    """End this process, as nothing else ends a thread that hangs in an environment."""
    log(f"{peer} has left and its environment hangs: this env server ends; with --keep it starts again")
    kill_family()  # what the environment started
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
