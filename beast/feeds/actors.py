"""The actors of this machine: processes that are started, watched and restarted here, or all of them in this one."""

import collections
import contextlib
import dataclasses
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from beast.envs.handover import importable
from beast.envs.progress import Page
from beast.errors import InputError, WorkerFailure
from beast.feeds.actor import ACTOR_ARGUMENT, ALIVE, GO, READY, Actor, agents
from beast.feeds.actor import GROUPS_PER_ACTOR as GROUPS_PER_ACTOR
from beast.feeds.memory import RolloutMemory
from beast.feeds.processes import Child, cpu_seconds_of, end_all
from beast.machine import family_of

IMPORT_SECONDS = 60.0  # more than the timeout, for an actor's imports
PROGRESS_SECONDS = 5.0  # between two log lines while environments are made
# While an actor makes and first resets environments, CPU time counts as a sign of life: on a busy machine it takes
# long, and neither ale-py's constructor nor its reset reports how far it is. But so many timeouts are the limit.
MAX_SILENT_TIMEOUTS = 10
MIN_CPU_SHARE = 0.01  # of a core: less is no sign of life


class ActorProcess(Child):
    """One actor process, or the wait for its successor. Times are of time.monotonic()."""

    connection: socket.socket
    ever_ready = False  # in any of its lives: environments that never worked are not tried again
    lives = 0
    restart_at = 0.0  # between two lives
    alive_at = 0.0  # its last sign of life: a message, or CPU time while it makes environments
    heard_at = 0.0  # its last message
    cpu_seconds = 0.0  # of this life, when last looked at
    received = b""  # the beginning of a message

    def __init__(self, index: int, num_groups: int, max_restarts: int):
        super().__init__(f"actor {index}", max_restarts)
        self.groups = list(range(index * num_groups, (index + 1) * num_groups))
        self.answers: collections.Counter = collections.Counter()  # of each group, in this life
        self.waiting_since: dict[int, float] = {}  # group -> its unanswered message
        # Seconds by stage, of all its lives together.
        self.reported = dict.fromkeys(("start", "wait", "step", "reset"), 0.0)
        self.enter("start", self.reported)

    def enter(self, stage: str, seconds: dict[str, float]) -> None:
        """Begin a stage after so many seconds by stage. The start lasts until the first row is asked for."""
        self.stage, self._times = stage, (seconds, stage, time.monotonic())  # which other threads read as a whole

    def seconds_so_far(self) -> dict[str, float]:
        """What the actor has reported, and what it must be doing since then: an environment may hang."""
        seconds, stage, since = self._times
        return {**seconds, stage: seconds[stage] + time.monotonic() - since}

    def messages(self, data: bytes) -> Iterator[tuple[int, float, float, float, bytes]]:
        """Group, seconds waited, stepped and reset, and numbers of games, of each message that `data` completes."""
        data, at = self.received + data, 0
        while len(data) - at >= READY.size:
            *message, length = READY.unpack_from(data, at)
            if len(data) - at - READY.size < length:
                break
            at += READY.size + length
            yield *message, data[at - length : at]
        self.received = data[at:]


class Actors(Protocol):
    """What steps the groups of environments of a feed. One thread uses it, but for `wake` and `close`."""

    num_groups: int
    total_restarts: int  # of lost environments, so far
    told: list[bytes]  # numbers of games, encoded, since whoever reads them last took them out
    workers: dict[str, Callable[[], dict[str, float]]]  # a name, and a function that gives the seconds by stage so far

    @property
    def processes(self) -> Sequence[Child]:
        """Whose CPU time counts."""

    def go(self, group: int, slot: int, row: int) -> None:
        """Have the group write this row of this slot, by the actions in it; row 0 begins new episodes."""

    def wait(self, timeout: float) -> tuple[list[int], list[int]]:
        """Groups that are ready and groups that were lost since the last call; waits up to `timeout` seconds. A lost
        group is ready again with new environments, which were never reset."""

    def wake(self) -> None:
        """Make `wait` return now."""

    def close(self) -> None:
        """Stop all, and wait for their end."""


class ActorProcesses:
    """Starts, watches, restarts and stops the actor processes, which step the groups of environments of a feed. Used by
    one thread, but for `wake` and `close`."""

    def __init__(
        self, script: str, flags, memory: RolloutMemory, num_groups: int, seed: Callable, log: Callable,
        maker: str = "", progress: Page | None = None,
    ):  # fmt: skip
        """`seed(group, life)` gives the seed of a group's environments in its nth life (0 at first). `maker` is
        what `name_of_maker` returns. Environments read `progress`.

        An actor that is silent for `env_timeout` seconds counts as dead. `log` gets a line at every restart, and every
        few seconds while environments are made.
        """
        self.script, self.flags, self.memory, self.seed, self.log = script, flags, memory, seed, log
        self._maker = maker
        self.progress = progress or Page()
        self.told: list[bytes] = []
        # A thread that starts an actor again may have more niceness of its own, which the actor would inherit.
        self.niceness = os.getpriority(os.PRIO_PROCESS, 0) + flags.actor_niceness
        self.timeout, self.num_groups = flags.env_timeout, num_groups
        self.groups_per_actor = num_groups // flags.num_actors
        self.total_restarts = 0  # of lost environments, so far
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self.processes = [
            ActorProcess(index, self.groups_per_actor, flags.max_env_restarts) for index in range(flags.num_actors)
        ]
        self.workers = {process.name: process.seconds_so_far for process in self.processes}
        self._looked_at = self._next_progress = time.monotonic()
        try:
            self.wait(0)  # starts all
        except BaseException:
            self.close()
            raise

    def go(self, group: int, slot: int, row: int) -> None:
        """Ignores an actor that has died: `wait` reports it."""
        process = self.processes[group // self.groups_per_actor]
        if process.popen is None:
            return
        process.waiting_since[group] = time.monotonic()
        if process.stage != "step":
            seconds = process.seconds_so_far()
            process.reported = process.reported | {"start": seconds["start"]}  # which the actor does not report
            process.enter("step", seconds)
        with contextlib.suppress(OSError):
            process.connection.sendall(GO.pack(group, slot, row))

    def wait(self, timeout: float) -> tuple[list[int], list[int]]:
        """Raises WorkerFailure, with its traceback, for an actor that was restarted too often or never worked."""
        ready, lost = [], []
        for key, _ in self._selector.select(timeout):
            process = key.data
            if process is None:
                self._wake_receiver.recv(4096)
                continue
            try:
                data = process.connection.recv(2**16)
            except OSError:
                data = b""
            if not data:
                lost += self._handle_death(process)
                continue
            process.heard_at = process.alive_at = time.monotonic()
            spent = dict(process.reported)
            for group, waited, stepped, reset, told in process.messages(data):
                if group == ALIVE:
                    continue
                self.told += [told] if told else []
                process.waiting_since.pop(group, None)
                process.answers[group] += 1
                spent["wait"] += waited
                spent["step"] += stepped
                spent["reset"] += reset
                if process.answers[group] > 1:
                    ready.append(group)
                elif len(process.answers) == self.groups_per_actor:  # the last of its groups is made
                    process.ever_ready = True
                    ready += process.groups
            process.reported = spent
            if process.stage != "start":
                process.enter("step" if process.waiting_since else "wait", spent)
        now = time.monotonic()
        lost += self._watch(now)
        for process in self.processes:
            if process.popen is None:
                if now >= process.restart_at:
                    self._start(process)
            elif process.waiting_since:
                asked_at = min(process.waiting_since.values())
                limits = (process.alive_at, self.timeout), (process.heard_at, MAX_SILENT_TIMEOUTS * self.timeout)
                passed = [limit for seen_at, limit in limits if now - max(seen_at, asked_at) > limit]
                if passed:
                    lost += self._handle_death(process, f"did not answer for {passed[0]:g} s (--env_timeout)")
        return [group for group in ready if group not in lost], lost

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # a full socket wakes it too, and a closed one needs no waking
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        """Stop all actors, which close their environments, for 10 seconds at most."""
        for process in self.processes:
            if process.popen:
                process.connection.close()
        end_all(self.processes, self.log)
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _watch(self, now: float) -> list[int]:
        """Groups lost with actors that ended while a process that their environments forked holds their sockets open.

        Also looks for signs of life of actors that make or first reset environments, logs how far they are, and forgets
        what actors have printed if it is too much.
        """
        since_last = now - self._looked_at
        if since_last < min(1.0, self.timeout / 4):
            return []
        self._looked_at = now
        made = reset = 0
        lost = []
        for process in self.processes:
            if process.popen and process.popen.poll() is not None:
                lost += self._handle_death(process)
            process.bound_output()
            num_reset = sum(count > 1 for count in process.answers.values())
            if process.popen and num_reset < self.groups_per_actor:
                pids = [
                    process.popen.pid,
                    *family_of(process.popen.pid),
                ]  # environments may have processes of their own
                seconds = sum(map(cpu_seconds_of, pids))
                if seconds - process.cpu_seconds > MIN_CPU_SHARE * since_last:
                    process.alive_at = max(process.alive_at, now)
                process.cpu_seconds = seconds
            made, reset = made + len(process.answers), reset + num_reset
        if reset < self.num_groups and now >= self._next_progress:
            self._next_progress = now + PROGRESS_SECONDS
            stage, count = ("making", made) if made < self.num_groups else ("resetting", reset)
            width = self.memory.group_width
            self.log(f"{stage} environments: {count * width} of {self.num_groups * width}")
        return lost

    def _start(self, process: ActorProcess) -> None:
        process.connection, theirs = socket.socketpair()
        environment = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            process.start(
                [sys.executable, self.script, ACTOR_ARGUMENT, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), self.memory.fd, self.progress.fd),
                env=os.environ | environment,
            )
        cpus = sorted(os.sched_getaffinity(0)) if self.flags.pin_actors and hasattr(os, "sched_getaffinity") else []
        task = {
            "create_env": self._maker,
            "flags": dataclasses.asdict(self.flags),
            "memory": self.memory.description(),
            "progress": self.progress.fd,
            "groups": [(group, self.seed(group, process.lives)) for group in process.groups],
            "niceness": self.niceness,
            "cpu": cpus[self.processes.index(process) % len(cpus)] if cpus else None,
        }
        process.connection.sendall(json.dumps(task).encode() + b"\n")
        process.lives += 1
        process.alive_at = process.heard_at = process.started_at + IMPORT_SECONDS
        process.cpu_seconds = 0.0
        process.answers.clear()
        process.received = b""
        process.waiting_since = dict.fromkeys(process.groups, process.started_at)
        self._next_progress = process.started_at + PROGRESS_SECONDS  # a quick start needs no line
        self._selector.register(process.connection, selectors.EVENT_READ, process)

    def _handle_death(self, process: ActorProcess, hangs: str = "") -> list[int]:
        """Reap a dead or hanging actor and plan its restart. Returns the groups that are lost with it."""
        self._selector.unregister(process.connection)
        process.connection.close()
        process.reported = process.seconds_so_far()
        process.enter("start", process.reported)
        end = process.end(0 if hangs else 0.2, hangs)
        if not process.ever_ready:
            raise WorkerFailure(f"{end}\nIts environments never worked, so it is not restarted.")
        self.log(process.count_restart(end))
        process.restart_at = time.monotonic() + min(0.05 * 2**process.restarts, 10.0)
        self.total_restarts += 1
        return process.groups


def name_of_maker(script: str, create_env: Callable) -> str:
    """How actors that run the agent's file `script` find `create_env`: `module:name`, or empty where it is the file's
    own. Raises InputError where they do not find it."""
    if create_env is agents.get(script, create_env):
        return ""
    if name := importable(create_env):
        return name
    raise InputError(
        f"create_env: {getattr(create_env, '__qualname__', create_env)} is not that of {script}, which actors run, and "
        "processes of their own cannot import it. Put it into a module, a file beside your script, or edit a copy of "
        "the agent's file"
    )


class LocalActors(Actor):
    """All groups in this process and in one fixed order (`--deterministic`); see `Actors`."""

    processes: list = []
    workers: dict = {}
    total_restarts = 0

    def __init__(self, create_env, flags, memory: RolloutMemory, num_groups: int, seed: Callable):
        self._directory = os.getcwd()
        super().__init__(create_env, flags, memory, {group: seed(group, 0) for group in range(num_groups)})
        self.num_groups = num_groups
        self.told: list[bytes] = []
        self._ready = collections.deque(range(num_groups))

    def go(self, group: int, slot: int, row: int) -> None:
        told = self.write_row(group, slot, row)
        self.told += [told] if told else []
        self._ready.append(group)

    def wait(self, timeout: float) -> tuple[list[int], list[int]]:
        return ([self._ready.popleft()] if self._ready else []), []

    def wake(self) -> None:
        pass

    def close(self) -> None:
        try:
            super().close()
        finally:
            os.chdir(self._directory)  # environments may have gone elsewhere
