"""What this machine has: cores, processor, memory."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from pathlib import Path


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
