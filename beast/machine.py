"""What this machine has: cores, processor, memory, and processes that belong together."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import platform
import re
import secrets
import signal
import threading
import time
from pathlib import Path

CLOSING_SECONDS = 10.0  # for environments to end what they have started, before it is killed or left
FAMILY = "BEAST_FAMILY"  # environment variable: the mark of a process that Beast has started, and of what that starts
_mark = ""  # of what `kill_family` ends


def usable_cores() -> int:
    """The number of cores that this process may run on, by its affinity and the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # a ValueError: "max 100000"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def cpu_model() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_memory() -> float:
    """Bytes that are free, or the limit of this container where that is less; infinite where Linux does not tell."""
    available = math.inf
    with contextlib.suppress(OSError):
        if found := re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text()):
            available = int(found[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # a ValueError: "max"
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


def family_of(pid: int | None, mark: str = "") -> list[int]:
    """Processes that `pid` has started, directly or through others, and those that `mark` (see FAMILY) says belong to
    it, in whichever session they are (Linux; elsewhere none). This process is left out."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
                if mark and f"{FAMILY}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.add(int(name))
    while more := {each for each, parent in parents.items() if parent == pid or parent in found} - found:
        found |= more
    return list(found - {os.getpid()})


def begin_family(mark: str) -> None:
    """Give what this process starts from now on a mark: also what leaves its session, as daemons do, is then found."""
    global _mark
    _mark = os.environ[FAMILY] = mark


def kill_family(pid: int | None = None, mark: str = "") -> None:
    """Kill the processes of `family_of`, by default this one's, and those that they start meanwhile."""
    if not (pid or mark):
        pid, mark = os.getpid(), _mark
    for _ in range(20):  # none can be killed that another user's privileges protect
        if not (found := family_of(pid, mark)):
            return
        for each in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.01)


@functools.cache
def end_with_family() -> list[int]:
    """Have this program end at its end, whatever the environments that it has tried leave behind: processes are killed,
    and threads are waited for, CLOSING_SECONDS at most. The exit status is then the first number of what it returns."""
    status = [1]
    begin_family(f"{os.environ.get(FAMILY, '')}/{secrets.token_hex(8)}")
    atexit.register(kill_family)

    def end() -> None:
        threading.main_thread().join()
        kill_family()  # before multiprocessing waits for its children
        time.sleep(CLOSING_SECONDS)
        os.write(2, b"threads of an environment still run: this program ends without them\n")
        os._exit(status[0])

    threading.Thread(target=end, daemon=True).start()
    return status
