"""The device, its streams and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from beast.machine import usable_cores


def keep_freed_memory() -> None:
    """Have glibc keep the memory of freed tensors instead of returning it to the kernel.

    Call it before anything starts a thread: glibc counts its arenas then. Otherwise the kernel zeroes the pages of the
    same activations in every update, a fifth of the learner's time (benchmarks/LEDGER.md).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another libc
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD, bytes
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes
            mallopt(-8, 1)  # M_ARENA_MAX: heaps of other arenas end at 64 MB, less than an update needs


def num_learner_threads(flags) -> int:
    """`--learner_threads`, or half of the cores that this process may run on."""
    return flags.learner_threads or max(1, usable_cores() // 2)


def yield_cores(device: torch.device, niceness: int) -> None:
    """Add to this thread's niceness, so that the learner gets a core first where it computes on the CPU. On Linux only:
    elsewhere a process has one niceness."""
    if device.type == "cpu" and sys.platform == "linux":
        os.nice(niceness)


def use_threads(number: int) -> None:
    """Let torch compute what this thread asks for on so many threads."""
    torch.get_num_threads()  # a thread that has not asked takes the number that another one sets later
    torch.set_num_threads(number)


def helper_thread(flags) -> ThreadPoolExecutor:
    """A thread for work beside the learner's on a CPU: with half as many cores, and `--actor_niceness`."""

    def begin() -> None:
        use_threads(max(1, num_learner_threads(flags) // 2))
        yield_cores(torch.device("cpu"), flags.actor_niceness)

    return ThreadPoolExecutor(1, "helper", begin)
