"""Child processes out of the reach of Ctrl-C: their restarts, their CPU time, and the end of what they started."""

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from beast.errors import WorkerFailure
from beast.machine import CLOSING_SECONDS, FAMILY, begin_family, kill_family

FORGIVEN_AFTER = 600.0  # seconds of work after which a child's earlier deaths no longer count
MAX_PRINTED = 16_000_000  # bytes on stderr, after which it is emptied


class Child:
    """A process and its successors, each in a session of its own: Ctrl-C reaches its parent alone, which ends it."""

    popen: Any = None  # subprocess.Popen, or None between two lives

    def __init__(self, name: str, max_restarts: int):
        self.name, self.max_restarts = name, max_restarts
        self.restarts = 0  # in a row, each soon after the last
        self._cpu_seconds: dict[int, float] = {}  # of each life, by its process id

    def start(self, command: list[str], **options) -> None:
        """`options` are those of subprocess.Popen. Python finds the modules that it finds here."""
        self.errors = tempfile.TemporaryFile()  # its stderr
        fcntl.fcntl(self.errors, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # after a truncation it goes on at the start
        self.started_at = time.monotonic()
        # Linux with autogroups shares the cores among sessions first. Niceness then counts only within a session, but a
        # run gets more of a busy machine than one session would (benchmarks/results/niceness.md).
        self.mark = f"{os.environ.get(FAMILY, '')}/{secrets.token_hex(8)}"
        own = {FAMILY: self.mark, "PYTHONPATH": _python_path()}
        options["env"] = {**options.get("env", os.environ), **own}
        self.popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=self.errors, start_new_session=True, **options
        )

    def bound_output(self) -> None:
        """Forget what it has printed so far if that is too much for a disk."""
        if self.popen and os.fstat(self.errors.fileno()).st_size > MAX_PRINTED:
            self.errors.truncate(0)

    def total_cpu_seconds(self) -> float:
        """CPU time of all its lives (Linux; elsewhere 0), of those that have ended until this was last called."""
        if popen := self.popen:
            pid = popen.pid
            self._cpu_seconds[pid] = max(self._cpu_seconds.get(pid, 0.0), cpu_seconds_of(pid))
        return sum(self._cpu_seconds.values())

    def end(self, patience: float, hangs: str = "") -> str:
        """Wait `patience` seconds for its end, then kill it, and what its environments started and did not end. Returns
        how it ended (or `hangs`) and the last that it printed."""
        popen, self.popen = self.popen, None
        try:
            code = popen.wait(patience)
        except subprocess.TimeoutExpired:
            kill_family(popen.pid, self.mark)  # while its children can be told by their parent
            popen.kill()
            code = popen.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(popen.pid, signal.SIGKILL)
        kill_family(None, self.mark)  # games in sessions of their own
        with self.errors as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8000))
            printed = file.read().decode(errors="replace").strip()
        how = f"exited with code {code}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
            how = f"was killed by signal {-code} ({names.get(-code, 'no name')}), exit code {code}"
        return f"{self.name} {hangs or how}; what it printed last:\n{printed or '(nothing)'}"

    def count_restart(self, why: str) -> str:
        """A line about a restart, for the log. Raises WorkerFailure after `max_restarts` of them in a row."""
        if time.monotonic() - self.started_at > FORGIVEN_AFTER:
            self.restarts = 0
        if self.restarts >= self.max_restarts:
            times = f"{self.restarts} times (--max_env_restarts {self.max_restarts})"
            raise WorkerFailure(f"{why}\nIt was restarted {times}.")
        self.restarts += 1
        return f"{why}\nRestarting it ({self.restarts} of --max_env_restarts {self.max_restarts})."


def end_all(children: Sequence[Child], log: Callable[[str], None], patience: float = CLOSING_SECONDS) -> None:
    """Wait `patience` seconds for their ends, together, then kill them. After a second `log` gets a line. Ctrl-C, which
    is raised, ends the wait."""
    running = {child.name: child.popen for child in children if child.popen}
    began, is_told = time.monotonic(), False
    try:
        while (seconds := time.monotonic() - began) < patience:
            running = {name: popen for name, popen in running.items() if popen.poll() is None}
            if not running:
                break
            if seconds > 1 and not is_told:
                is_told = True
                names = ", ".join([*running][:3]) + (f" and {len(running) - 3} more" if len(running) > 3 else "")
                log(f"waiting up to {patience:g} s for the environments of {names} to close; Ctrl-C ends them now")
            time.sleep(0.01)
    finally:
        for child in children:
            if child.popen:
                child.end(0)


def end_with_parent(grace: float = 0.0) -> None:
    """Have this process, which `Child.start` has started, end at most `grace` seconds after its parent, with all that
    it has started. An environment may hang meanwhile. On Linux this process ends even if the environment keeps the GIL.
    """
    parent = os.getppid()
    begin_family(os.environ.get(FAMILY, ""))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        signal.alarm(0 if not grace else int(grace) + 5)  # instead of the one below: the GIL was free
        time.sleep(grace)
        kill_family()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":
        # The kernel then sends SIGHUP, too. Its handler is libc's alarm, called with its number, 1: in a second comes
        # SIGALRM, which ends a process whose thread above never got the GIL.
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(1, signal.SIGHUP)  # PR_SET_PDEATHSIG


def _python_path() -> str:
    """Where this interpreter finds modules beside its own libraries, which another Python would stumble over."""
    libraries = re.compile(r"/lib(64)?/python3[\d.]*(/|\.zip$|$)")
    return os.pathsep.join(os.path.abspath(path) for path in sys.path if not libraries.search(path))


def cpu_seconds_of(pid: int) -> float:
    """CPU time of a running process (Linux; elsewhere, and of one that has ended, 0)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]  # the name before may hold anything
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
