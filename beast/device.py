"""The device where nets compute: its choice, its streams, and memory that it reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import torch

from beast.errors import InputError


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
            # reads, resets and raises it (C10_CUDA_KERNEL_LAUNCH_CHECK), so launch one here. No GPU has run this yet.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)
            return lambda: None
    return lambda: cudart.cudaHostUnregister(buffer.ctypes.data)
