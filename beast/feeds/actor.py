"""What an actor process runs: environments that read actions from shared memory and write observations into it.

An actor holds no model and does not import torch. It talks to its parent over one socket, in slot, group and row
numbers only. Either side learns of the other's death, whatever killed it, by the end of that socket.
"""

import contextlib
import functools
import importlib
import json
import os
import pkgutil
import random
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable

import numpy as np
from gymnasium.vector import SyncVectorEnv

from beast.envs import env_metrics, progress
from beast.envs.groups import EnvGroup
from beast.envs.masks import MASK
from beast.envs.rows import ROW_FIELDS
from beast.envs.spaces import categories_by_part
from beast.envs.tasks import of_actor
from beast.errors import SHOW_TRACEBACKS, InputError, UserError
from beast.feeds.memory import RolloutMemory
from beast.feeds.processes import end_with_parent
from beast.machine import CLOSING_SECONDS, kill_family

GO = struct.Struct("<HHH")  # to an actor: group, slot, row to write, each below 2¹⁶; row 0 means reset
# From an actor: group whose row is written (the first time: whose environments are made), and seconds that the actor
# has waited, stepped and reset since its last message; and bytes that follow, of numbers of games that this row ends.
READY = struct.Struct("<HfffI")
ALIVE = 2**16 - 1  # instead of a group: one more environment is being made or reset
GROUPS_PER_ACTOR = 2  # double buffering: one group steps while the other's actions are chosen
ACTOR_ARGUMENT = "--beast-actor"
SCRIPT = "BEAST_ACTOR_SCRIPT"  # environment variable: the agent's file, for processes that an actor starts

agents: dict[str, Callable] = {}  # agent's file -> the `create_env` that it has defined in this process


class FileIsRead(BaseException):
    """An agent's file has been read as far as an actor reads it."""


class Actor:
    """The groups of environments of one actor, stepped straight into the rollout memory."""

    def __init__(self, create_env, flags, memory: RolloutMemory, groups: dict[int, int], made=lambda group: None):
        """`groups` maps the number of each group to the seed of its environments; `made(group)` is called when they
        are made. The first seed is that of `random` and `np.random`, too. Raises InputError if their observations and
        actions are not those that the memory is for."""
        self.memory, self.seeds = memory, groups
        seed = next(iter(groups.values()))
        random.seed(seed)
        np.random.seed(seed)
        self.groups = {}
        expected: dict = {**memory.fields, **memory.categories}
        answered = {name: field for name, field in memory.fields.items() if "/" not in name and name not in ROW_FIELDS}
        for number in groups:
            env = create_env(of_actor(flags, number // GROUPS_PER_ACTOR), memory.group_width)
            group = EnvGroup(env, f"obs/{MASK}" in expected, getattr(flags, "env_metrics", ""))
            self.groups[number] = group
            found = {**answered, **group.fields, **(memory.categories and categories_by_part(group.spaces))}
            if different := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
                here, first = ({name: each.get(name) for name in different} for each in (found, expected))
                raise InputError(f"create_env() gave {here}, its first call gave {first}: each has to give the same")
            made(number)

    def write_row(self, group: int, slot: int, row: int) -> bytes:
        """Step the group with the actions of this row and write what came of it there; row 0 begins new episodes.
        Returns the numbers of games that it ends, encoded."""
        rows = self.memory.row(slot, row)
        if row == 0:
            self.groups[group].reset(self.seeds[group], rows)
        else:
            self.groups[group].step(rows["action"], rows)
        ended = self.groups[group].ended
        return env_metrics.encode(ended) if ended else b""

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # the second group, too, if the first one raises
            for group in self.groups.values():
                stack.callback(group.close)


def run_if_actor(flags_class, create_env) -> None:
    """Return at once in an ordinary interpreter. In one that `ActorProcesses` started, be an actor until the end.

    A variant calls this right below its `Flags` and `create_env`, before it imports torch: an actor process reads the
    variant's file no further than that, which keeps it small and quick to start. So do processes that an environment
    starts by `multiprocessing` with spawn or forkserver, which read the main module again (see the end of this file).
    """
    caller = sys._getframe(1).f_globals
    if getattr(caller.get("__spec__"), "name", "") == __spec__.name:
        raise FileIsRead
    agents[os.path.abspath(caller["__file__"])] = create_env
    if len(sys.argv) != 3 or sys.argv[1] != ACTOR_ARGUMENT:
        return
    connection = socket.socket(fileno=int(sys.argv.pop()))
    sys.argv.pop()  # no process that this one starts takes itself for the actor, and no environment parses it
    sys.path.append(sys.path.pop(0))  # the agent's directory comes where the parent has it, in PYTHONPATH
    os.environ[SCRIPT] = caller["__file__"]
    sys.modules["__main__"].__spec__ = __spec__  # by which multiprocessing names the main module
    end_with_parent(CLOSING_SECONDS)  # even while an environment hangs and no socket is read
    code = 1
    try:
        _act(connection, flags_class, create_env)
        code = 0
    except BaseException as error:
        if isinstance(error, UserError) and not os.environ.get(SHOW_TRACEBACKS):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
    kill_family()
    os._exit(code)  # at once, whatever threads an environment has


def _act(connection: socket.socket, flags_class, create_env) -> None:
    messages = connection.makefile("rb")
    task = json.loads(messages.readline())
    if task["create_env"]:
        create_env = pkgutil.resolve_name(task["create_env"])
    flags = flags_class(**task["flags"])
    os.nice(max(task["niceness"] - os.nice(0), 0))
    if task["cpu"] is not None:
        os.sched_setaffinity(0, {task["cpu"]})
    send = _sender(connection)
    reset_seconds = _tell_of_each_environment(send, min(1.0, flags.env_timeout / 4))
    progress.follow(progress.Page(task["progress"]))
    memory, groups = RolloutMemory(**task["memory"]), dict(task["groups"])
    actor = Actor(create_env, flags, memory, groups, lambda group: send(READY.pack(group, 0.0, 0.0, 0.0, 0)))
    with contextlib.closing(actor):
        written = 0.0
        while len(message := messages.read(GO.size)) == GO.size:
            group, slot, row = GO.unpack(message)
            received = time.monotonic()
            waited = received - (written or received)  # the wait for the first one is the parent's start of this actor
            reset_before = reset_seconds()
            told = actor.write_row(group, slot, row)
            written, reset = time.monotonic(), reset_seconds() - reset_before
            send(READY.pack(group, waited, written - received - reset, reset, len(told)) + told)


def _sender(connection: socket.socket) -> Callable[[bytes], None]:
    """Sends messages whole. Threads of environments may send signs of life; a process that they fork sends nothing."""
    lock, owner = threading.Lock(), os.getpid()

    def send(message: bytes) -> None:
        if os.getpid() == owner:
            with lock:
                connection.sendall(message)

    return send


def _tell_of_each_environment(send: Callable[[bytes], None], pause: float) -> Callable[[], float]:
    """Send a sign of life before each environment that a SyncVectorEnv makes or resets, or `pause` seconds later.
    Returns what tells how many seconds the resets took so far."""
    told_at = seconds = 0.0

    def telling(call: Callable) -> Callable:
        @functools.wraps(call)
        def told(*args, **kwargs):
            nonlocal told_at
            if time.monotonic() - told_at > pause:
                told_at = time.monotonic()
                with contextlib.suppress(OSError):  # the parent has gone
                    send(READY.pack(ALIVE, 0.0, 0.0, 0.0, 0))
            return call(*args, **kwargs)

        return told

    def initialize(self, env_fns, *args, initialize=SyncVectorEnv.__init__, **kwargs) -> None:
        initialize(self, [telling(make) for make in env_fns], *args, **kwargs)
        for env in self.envs:
            env.reset = telling(timed(env.reset))

    def timed(reset: Callable) -> Callable:
        @functools.wraps(reset)
        def timed_reset(*args, **kwargs):
            nonlocal seconds
            began = time.monotonic()
            try:
                return reset(*args, **kwargs)
            finally:
                seconds += time.monotonic() - began

        return timed_reset

    SyncVectorEnv.__init__ = initialize
    return lambda: seconds


if __name__ == "__mp_main__":  # multiprocessing has started this process in an actor: it needs the file's definitions
    __file__ = os.environ[SCRIPT]
    with contextlib.suppress(importlib.import_module(__spec__.name).FileIsRead), open(__file__, "rb") as _file:
        exec(compile(_file.read(), __file__, "exec", dont_inherit=True))
