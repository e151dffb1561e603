"""What an actor process runs: environments that read actions from shared memory and write observations into it.

An actor holds no model and does not import torch. It talks to its parent over one socket, in slot, group and row
numbers only. Either side learns of the other's death, whatever killed it, by the end of that socket.
"""

import contextlib
import json
import os
import socket
import struct
import sys
import time
import traceback

from beast.envs.groups import EnvGroup
from beast.envs.spaces import categories_by_part
from beast.errors import SHOW_TRACEBACKS, InputError, UserError
from beast.feeds.memory import RolloutMemory
from beast.feeds.processes import end_with_parent

GO = struct.Struct("<HHH")  # to an actor: group, slot, row to write, each below 2¹⁶; row 0 means reset
# From an actor: group whose row is written (the first time: whose environments are made), and seconds that the actor
# has waited and stepped since its last message.
READY = struct.Struct("<Hff")
ACTOR_ARGUMENT = "--beast-actor"


class Actor:
    """The groups of environments of one actor, stepped straight into the rollout memory."""

    def __init__(self, create_env, flags, memory: RolloutMemory, groups: dict[int, int], made=lambda group: None):
        """`groups` maps the number of each group to the seed of its environments; `made(group)` is called when they
        are made. Raises InputError if their observations and actions are not those that the memory is for."""
        self.memory, self.seeds = memory, groups
        self.groups = {}
        expected: dict = {**memory.fields, **memory.categories}
        for number in groups:
            group = self.groups[number] = EnvGroup(create_env(flags, memory.group_width))
            found = {**group.fields, **(memory.categories and categories_by_part(group.spaces))}
            if different := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
                here, first = ({name: each.get(name) for name in different} for each in (found, expected))
                raise InputError(f"create_env() gave {here}, its first call gave {first}: each has to give the same")
            made(number)

    def write_row(self, group: int, slot: int, row: int) -> None:
        """Step the group with the actions of this row and write what came of it there; row 0 begins new episodes."""
        rows = self.memory.row(slot, row)
        if row == 0:
            self.groups[group].reset(self.seeds[group], rows)
        else:
            self.groups[group].step(rows["action"], rows)

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


def run_if_actor(flags_class, create_env) -> None:
    """Return at once in an ordinary interpreter. In one that `ActorProcesses` started, be an actor until the end.

    A variant calls this right below its `Flags` and `create_env`, before it imports torch: an actor process reads the
    variant's file no further than that, which keeps it small and quick to start.
    """
    if len(sys.argv) != 3 or sys.argv[1] != ACTOR_ARGUMENT:
        return
    end_with_parent()  # even while an environment hangs and no socket is read
    try:
        _act(socket.socket(fileno=int(sys.argv[2])), flags_class, create_env)
    except BaseException as error:
        if isinstance(error, UserError) and not os.environ.get(SHOW_TRACEBACKS):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        os._exit(1)  # at once, whatever threads an environment has
    os._exit(0)


def _act(connection: socket.socket, flags_class, create_env) -> None:
    messages = connection.makefile("rb")
    task = json.loads(messages.readline())
    flags = flags_class(**task["flags"])
    os.nice(max(task["niceness"] - os.nice(0), 0))
    if task["cpu"] is not None:
        os.sched_setaffinity(0, {task["cpu"]})
    memory, groups = RolloutMemory(**task["memory"]), dict(task["groups"])
    actor = Actor(create_env, flags, memory, groups, lambda group: connection.sendall(READY.pack(group, 0.0, 0.0)))
    with contextlib.closing(actor):
        written = 0.0
        while len(message := messages.read(GO.size)) == GO.size:
            group, slot, row = GO.unpack(message)
            received = time.monotonic()
            waited = received - (written or received)  # the wait for the first one is the parent's start of this actor
            actor.write_row(group, slot, row)
            written = time.monotonic()
            connection.sendall(READY.pack(group, waited, written - received))
