"""Work that a GPU records once as a CUDA graph and then repeats."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from beast.errors import InputError, first_line
from beast.learn.nests import map_tensors

WARM_UP = 3  # calls before the recording: libraries choose their algorithms in the first ones


class Recording(NamedTuple):
    """A graph, where it reads its arguments, where it leaves its results, and the gradients among them."""

    graph: torch.cuda.CUDAGraph
    arguments: list[Tensor]
    results: Any
    gradients: list[Tensor | None]


class Graphs:
    """Calls of functions of tensors, recorded once for every shape of them.

    A net of few layers is a hundred kernels, and to queue each costs the host more than to run it costs the GPU. A
    recording is queued at once. Its Python code has run when it was recorded, and does not run again.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()):
        """`parameters`: those whose gradients a function may compute anew."""
        self._parameters = list(parameters)
        self._calls: dict[tuple, int] = {}
        self._recordings: dict[tuple, Recording] = {}

    def call(self, function: Callable, *arguments: Any) -> Any:
        """`function(*arguments)`; arguments and results are nested dicts and tuples of tensors. What is no tensor among
        the arguments is None in a recording. A partial is known by its function, so what it binds must not change.
        Raises InputError for a function that cannot be recorded."""
        tensors = leaves(arguments)
        key = (getattr(function, "func", function), *((x.shape, x.dtype) for x in tensors))
        recording = self._recordings.get(key)
        if recording is None:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] <= WARM_UP:
                return function(*arguments)
            recording = self._recordings[key] = self._record(function, arguments)
        torch._foreach_copy_(recording.arguments, tensors)
        recording.graph.replay()
        for parameter, gradient in zip(self._parameters, recording.gradients):
            parameter.grad = gradient  # another shape's recording, or a warm-up, may have left its own
        return map_tensors(torch.clone, recording.results)  # the next call writes over these

    def _record(self, function: Callable, arguments: tuple) -> Recording:
        kept = map_tensors(lambda x: x.clone() if isinstance(x, Tensor) else None, arguments)
        before = [x.grad for x in self._parameters]
        graph = torch.cuda.CUDAGraph()
        try:
            # torch has 32 streams of each priority, and deals them in turn: one of high priority is no other thread's.
            # thread_local: another thread may allocate and wait meanwhile.
            mode = {"stream": torch.cuda.Stream(priority=-1), "capture_error_mode": "thread_local"}
            with _without_garbage_collection(), torch.cuda.graph(graph, **mode):
                results = function(*kept)
        except RuntimeError as error:
            name = getattr(getattr(function, "func", function), "__qualname__", type(function).__name__)
            raise InputError(
                f"--cuda_graphs: {name} cannot be recorded, for example because it "
                f"makes the CPU wait for a GPU (.item(), .nonzero(), an if on a tensor): {first_line(error)}. Change "
                "it, or leave --cuda_graphs out"
            ) from error
        gradients = [x.grad for x in self._parameters]
        is_changed = any(new is not old for new, old in zip(gradients, before))
        return Recording(graph, leaves(kept), results, gradients if is_changed else [])


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nobody destroys an old graph meanwhile, which would end a recording in the same thread."""
    with _one_at_a_time:
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def leaves(nest: Any) -> list[Tensor]:
    """The tensors of nested dicts and tuples."""
    found: list[Any] = []
    map_tensors(found.append, nest)
    return [x for x in found if isinstance(x, Tensor)]
