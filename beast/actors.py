"""Actor processes: environments that read actions from shared memory and write observations into it.

An actor holds no model and does not import torch. It talks to its parent over one socket, in slot, group and row
numbers only; the end of that socket is how either side learns of the other's death, whatever killed it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from typing import NamedTuple

import numpy as np

from beast.envs import EnvGroup
from beast.rollout import RolloutMemory

GO = struct.Struct("<HHH")  # group, slot, row to write; row 0 means reset
# Group whose row is written (the first time: whose environments are made); seconds that its actor has waited and
# stepped since it last said so.
READY = struct.Struct("<Hff")
STAGES = ("start", "wait", "step")  # of an actor's time
ACTOR_ARGUMENT = "--beast-actor"
FORGIVEN_AFTER = 600.0  # seconds of work after which an actor's earlier deaths no longer count


class ActorError(RuntimeError):
    """An actor failed and may not be restarted again. The message holds its own traceback."""

    is_told = True  # by the message: the traceback of whoever raised it adds nothing


# ---------------------------------------------------------------------------------------------- the actor's side


class Actor:
    """The groups of environments of one actor, stepped straight into the rollout memory."""

    def __init__(self, create_env, flags, memory: RolloutMemory, groups: dict[int, int]):
        """`groups` maps the number of each group to the seed of its environments."""
        self.memory, self.seeds = memory, groups
        self.groups = {}
        for group in groups:
            self.groups[group] = EnvGroup(create_env(flags, memory.group_width))
            found = {
                f"obs/{k}": (tuple(s), str(np.dtype(d))) for k, (s, d) in self.groups[group].observation_fields.items()
            }
            expected = {name: field for name, field in memory.fields.items() if name.startswith("obs/")}
            if found != expected:
                raise ValueError(f"create_env() gave observations {found}, its first call gave {expected}")

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
    connection = socket.socket(fileno=int(sys.argv[2]))
    _die_with_parent()
    try:
        _actor_loop(connection, flags_class, create_env)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone, and nobody is left to be told
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an environment's own threads must not delay the news
    os._exit(0)


def _actor_loop(connection: socket.socket, flags_class, create_env) -> None:
    (length,) = struct.unpack("<I", _receive(connection, 4) or b"\0\0\0\0")
    if not length:
        return
    task = json.loads(_receive(connection, length))
    if task["cpu"] is not None:
        os.sched_setaffinity(0, {task["cpu"]})
    os.nice(task["niceness"])
    memory = RolloutMemory(**task["memory"], fd=task["memory_fd"])
    actor = Actor(
        create_env, flags_class(**task["flags"]), memory, {int(g): seed for g, seed in task["groups"].items()}
    )
    try:
        for group in actor.groups:
            connection.sendall(READY.pack(group, 0.0, 0.0))
        began = None
        while message := _receive(connection, GO.size):
            group, slot, row = GO.unpack(message)
            received = time.monotonic()
            began = began or received  # the wait for the first one is the parent's start of this actor
            actor.write_row(group, slot, row)
            written = time.monotonic()
            connection.sendall(READY.pack(group, received - began, written - received))
            began = written
    finally:
        actor.close()


def _receive(connection: socket.socket, size: int) -> bytes | None:
    """Exactly `size` bytes, or None when the other side is gone."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


def _die_with_parent() -> None:
    """Have Linux kill this process with its parent even while an environment hangs and no socket is read."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# ---------------------------------------------------------------------------------------------- the parent's side


class _Told(NamedTuple):
    """An actor's seconds by stage, all its lives together, as of `told_at`; it waited until `since`, and is in `stage`
    from there on. To the start belongs all until the first row is asked for. Replaced as a whole, as any thread may
    read it."""

    seconds: dict[str, float]
    stage: str
    since: float
    told_at: float

    @classmethod
    def now(cls, seconds: dict[str, float], stage: str) -> _Told:
        now = time.monotonic()
        return cls(seconds, stage, now, now)


@dataclasses.dataclass
class _Process:
    """One actor process, or the wait for its successor."""

    index: int
    popen: subprocess.Popen | None = None
    connection: socket.socket | None = None
    errors: object = None  # its stderr: a temporary file
    ever_ready: bool = False  # in any of its lives: environments that never worked are not tried again
    restart_at: float = 0.0  # time.monotonic(), where popen is None
    started_at: float = 0.0  # time.monotonic()
    restarts: int = 0  # in a row, each soon after the last
    waiting_since: dict = dataclasses.field(default_factory=dict)  # group -> time.monotonic() of the unanswered message
    told: _Told = dataclasses.field(default_factory=lambda: _Told.now(dict.fromkeys(STAGES, 0.0), "start"))

    def seconds_so_far(self) -> dict[str, float]:
        """What the actor has told, and what it must be doing since then: an environment may hang."""
        seconds, stage, since, told_at = self.told
        spent = {**seconds, "wait": seconds["wait"] + since - told_at}
        return {**spent, stage: spent[stage] + time.monotonic() - since}


class ActorProcesses:
    """Starts, watches, restarts and stops the actor processes. Used by one thread, but for `wake` and `close`."""

    def __init__(
        self,
        script: str,
        flags,
        memory: RolloutMemory,
        num_actors: int,
        groups_per_actor: int,
        seed,
        *,
        max_restarts: int,
        timeout: float,
        niceness: int = 0,
        pin: bool = False,
        log=print,
    ):
        """`seed(group, life)` gives the seed of a group's environments in its nth life (0 at first).

        An actor that does not answer for `timeout` seconds counts as dead. `log` is told of every restart.
        """
        self.script, self.flags, self.memory, self.seed = script, flags, memory, seed
        self.groups_per_actor, self.max_restarts, self.timeout = groups_per_actor, max_restarts, timeout
        self.niceness, self.pin, self.log = niceness, pin, log
        self.total_restarts = 0
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._processes = [_Process(index) for index in range(num_actors)]
        self._lives = [0] * num_actors
        try:
            for process in self._processes:
                self._start(process)
        except BaseException:
            self.close()
            raise

    def pids(self) -> list[int]:
        popens = [process.popen for process in self._processes]  # read once: another thread may bury one meanwhile
        return [popen.pid for popen in popens if popen is not None]

    def resident_bytes(self) -> list[int]:
        """Memory of each actor that it shares with nobody (Linux): the rollout slots are not counted."""
        private = []
        for pid in self.pids():
            with open(f"/proc/{pid}/statm") as file:
                _, resident, shared = (int(pages) for pages in file.read().split()[:3])
            private.append((resident - shared) * os.sysconf("SC_PAGE_SIZE"))
        return private

    def cpu_seconds(self) -> float:
        """CPU time of all actors, those that have ended included."""
        return cpu_seconds_of_children(self.pids())

    def workers(self) -> dict:
        """Each actor's name, and a function that gives its seconds by stage (see `profile.Profile`)."""
        return {f"actor {process.index}": process.seconds_so_far for process in self._processes}

    def go(self, group: int, slot: int, row: int) -> None:
        """Have the group write this row of this slot. To a dead actor it says nothing: `wait` will report that."""
        process = self._processes[group // self.groups_per_actor]
        if process.connection is not None:
            process.waiting_since[group] = time.monotonic()
            if process.told.stage == "start":
                process.told = _Told.now(process.seconds_so_far(), "step")
            elif process.told.stage == "wait":
                process.told = process.told._replace(stage="step", since=time.monotonic())
            try:
                process.connection.sendall(GO.pack(group, slot, row))
            except OSError:
                pass

    def wait(self, timeout: float) -> tuple[list[int], list[int]]:
        """Groups that are ready and groups that were lost since the last call; waits up to `timeout` seconds.

        A lost group is ready again, with new environments that were never reset, once its actor is restarted.
        Raises ActorError with the actor's traceback when it has been restarted too often, or never got to work.
        """
        ready, lost = [], []
        for key, _ in self._selector.select(timeout):
            process = key.data
            if process is None:
                self._wake_receiver.recv(4096)
                continue
            try:
                data = process.connection.recv(4096)
                if len(data) % READY.size:
                    data += _receive(process.connection, READY.size - len(data) % READY.size) or b""
            except OSError:
                data = b""
            if not data:
                lost += self._bury(process, "died")
                continue
            process.ever_ready = True
            spent = dict(process.told.seconds)
            for group, waited, stepped in READY.iter_unpack(data):
                process.waiting_since.pop(group, None)
                spent["wait"] += waited
                spent["step"] += stepped
                ready.append(group)
            if process.told.stage != "start":
                process.told = _Told.now(spent, "step" if process.waiting_since else "wait")
        now = time.monotonic()
        for process in self._processes:
            if process.popen is None and now >= process.restart_at:
                self._start(process)
            elif process.waiting_since and now - min(process.waiting_since.values()) > self.timeout:
                lost += self._bury(process, f"did not answer for {self.timeout:g} s (--env_timeout)")
        return [group for group in ready if group not in lost], lost

    def wake(self) -> None:
        """Make `wait` return now. May be called from any thread."""
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            pass  # a full socket wakes it all the same; a closed one has nobody to wake

    def close(self) -> None:
        """Stop all actors and wait for their end. Takes no longer than half a second, whatever an env does."""
        for process in self._processes:
            if process.connection is not None:
                process.connection.close()
        deadline = time.monotonic() + 0.3
        for process in self._processes:
            if process.popen is not None:
                try:
                    process.popen.wait(max(deadline - time.monotonic(), 0.01))
                except subprocess.TimeoutExpired:
                    process.popen.kill()
                    process.popen.wait()
                _kill_group(process.popen)
                process.errors.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _groups(self, process: _Process) -> list[int]:
        return list(range(process.index * self.groups_per_actor, (process.index + 1) * self.groups_per_actor))

    def _start(self, process: _Process) -> None:
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process.popen = subprocess.Popen(
            [sys.executable, self.script, ACTOR_ARGUMENT, str(theirs.fileno())],
            pass_fds=(theirs.fileno(), self.memory.fd),
            stdin=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which stops the actors itself
        )
        theirs.close()
        cpus = sorted(os.sched_getaffinity(0)) if self.pin and hasattr(os, "sched_getaffinity") else []
        task = {
            "flags": dataclasses.asdict(self.flags),
            "memory": self.memory.description(),
            "memory_fd": self.memory.fd,
            "groups": {group: self.seed(group, self._lives[process.index]) for group in self._groups(process)},
            "niceness": self.niceness,
            "cpu": cpus[process.index % len(cpus)] if cpus else None,
        }
        data = json.dumps(task).encode()
        ours.sendall(struct.pack("<I", len(data)) + data)
        self._lives[process.index] += 1
        process.connection, process.errors = ours, errors
        process.started_at = time.monotonic()
        process.waiting_since = {group: time.monotonic() + 60.0 for group in self._groups(process)}  # imports, ROMs
        self._selector.register(ours, selectors.EVENT_READ, process)

    def _bury(self, process: _Process, what: str) -> list[int]:
        """Reap a dead or hanging actor and plan its restart. Returns the groups that are lost with it."""
        self._selector.unregister(process.connection)
        process.connection.close()
        process.told = _Told.now(process.seconds_so_far(), "start")
        try:
            code = process.popen.wait(0.2 if what == "died" else 0)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            code = process.popen.wait()
        _kill_group(process.popen)
        process.errors.seek(max(0, process.errors.seek(0, os.SEEK_END) - 8000))
        errors = process.errors.read().decode(errors="replace").strip()
        process.errors.close()
        ended = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
        )
        message = (
            f"actor {process.index} {ended if what == 'died' else what}; what it printed last:\n{errors or '(nothing)'}"
        )
        if not process.ever_ready:
            process.popen = process.connection = None
            raise ActorError(f"{message}\nIts environments never worked, so it is not restarted.")
        if time.monotonic() - process.started_at > FORGIVEN_AFTER:
            process.restarts = 0
        if process.restarts >= self.max_restarts:
            process.popen = process.connection = None
            raise ActorError(
                f"{message}\nIt was restarted {process.restarts} times (--max_env_restarts {self.max_restarts})."
            )
        process.popen = process.connection = None
        process.waiting_since = {}
        process.restart_at = time.monotonic() + min(0.1 * 2**process.restarts, 10.0)
        process.restarts += 1
        self.total_restarts += 1
        self.log(f"{message}\nRestarting it ({process.restarts} of --max_env_restarts {self.max_restarts}).")
        return self._groups(process)


def cpu_seconds_of_children(pids: list[int]) -> float:
    """CPU time of child processes that run and of all that have ended (Linux; elsewhere of the latter only)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for pid in pids:
        with contextlib.suppress(OSError):  # it is ending
            with open(f"/proc/{pid}/stat") as file:
                user, system = file.read().rpartition(")")[2].split()[11:13]  # the name before may hold anything
            seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def _kill_group(popen: subprocess.Popen) -> None:
    """End what an actor's environments have started themselves and not ended with it."""
    try:
        os.killpg(popen.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        pass


class LocalActors:
    """The same calls as ActorProcesses, with all groups in this process and in one fixed order (`--deterministic`)."""

    total_restarts = 0

    def __init__(self, create_env, flags, memory: RolloutMemory, num_groups: int, seed):
        self._actor = Actor(create_env, flags, memory, {group: seed(group, 0) for group in range(num_groups)})
        self._ready = collections.deque(range(num_groups))

    def cpu_seconds(self) -> float:
        return 0.0  # all of it is of the thread that calls `go`

    def workers(self) -> dict:
        return {}  # their steps, too

    def go(self, group: int, slot: int, row: int) -> None:
        self._actor.write_row(group, slot, row)
        self._ready.append(group)

    def wait(self, timeout: float) -> tuple[list[int], list[int]]:
        return ([self._ready.popleft()] if self._ready else []), []

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self._actor.close()
