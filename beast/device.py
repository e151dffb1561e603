"""The device where nets compute: its choice, its streams, memory that it reads, and threads of a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from beast.errors import InputError
from beast.machine import usable_cores


def choose_device(device: str, amp: str) -> tuple[torch.device, bool]:
    """The device (`auto`: a GPU where there is one), and whether to use bfloat16 (`auto`: where the hardware has it).

    Raises InputError for a device that torch does not find.
    """
    num_gpus = torch.cuda.device_count()
    try:
        chosen = torch.device(("cuda" if num_gpus else "cpu") if device == "auto" else device)
    except RuntimeError:
        raise InputError(f"--device {device}: no such device; give cpu, cuda, cuda:1 or auto") from None
    if chosen.type == "cpu":
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
    elif chosen.type != "cuda":
        raise InputError(f"--device {device}: give cpu, cuda, cuda:1 or auto; no other kind has been tried")
    elif (chosen.index or 0) >= num_gpus:
        raise InputError(f"--device {device}: torch {torch.__version__} finds {num_gpus} GPUs; use cpu or auto")
    else:
        with torch.cuda.device(chosen):  # of which the question is
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return chosen, amp == "on" or (amp == "auto" and has_bf16)


def stream(device: torch.device, urgent: bool) -> contextlib.AbstractContextManager:
    """A context with a CUDA stream of its own, after the main thread's work so far. `urgent` work goes first."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    own = torch.cuda.Stream(device, priority=-1 if urgent else 0)
    own.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(own)


class Fence:
    """Between two threads' streams: what one queues after `wait` runs after all that the other queued before `set`.

    The host does not wait, and on a CPU nobody does: there the order of the threads is the order of the work.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        if self._event:
            self._event.record(torch.cuda.current_stream(self._device))

    def is_reached(self) -> bool:
        """Whether all that was queued before the last `set` is done."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def wait_for(device: torch.device) -> None:
    """Have the host wait for all work queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pin_memory(buffer: np.ndarray, device: torch.device, log: Callable) -> Callable[[], None]:
    """Lock memory that other processes may share into RAM, so that copies to a GPU run while the program goes on.

    Returns a function that undoes it. If the driver refuses, this is logged, and copies are slower.
    """
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):
        try:
            torch.cuda.check_error(cudart.cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0))
        except RuntimeError as error:
            log(f"{buffer.nbytes / 1e6:.0f} MB of slots are not pinned, so copies to the GPU are slower: {error}")
            # The failed call is CUDA's last error in this thread now. torch 2.13 cannot reset it, but a kernel launch
            # reads, resets and raises it (C10_CUDA_KERNEL_LAUNCH_CHECK), so launch one here.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)
            return lambda: None
    return lambda: cudart.cudaHostUnregister(buffer.ctypes.data)


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
    """Let a learner that computes on the CPU have a core before this thread. Only on Linux do threads have niceness."""
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
