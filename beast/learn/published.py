"""The weights that the learner hands to inference."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from beast.device import Fence
from beast.errors import InputError
from beast.learn.graphs import Graphs, leaves

_compiling = threading.Lock()


def compiled(forward: Callable, **options: Any) -> Callable:
    """torch.compile for nets that several threads call. One thread at a time compiles. A call that another thread makes
    meanwhile runs as it is, for torch would take it for a part of its trace and raise."""
    function, seen = torch.compile(forward, **options), set()

    def call(*arguments):
        shapes = tuple(x.shape for x in leaves(arguments))
        with contextlib.nullcontext() if shapes in seen else _compiling:
            with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
                results = function(*arguments)
        seen.add(shapes)
        return results

    return call


def own_copy(net: nn.Module) -> nn.Module:
    """A copy of a net. Where the net's `forward` is compiled, it computes with that net's weights: the copy has the one
    of its class."""
    copied = copy.deepcopy(net)
    vars(copied).pop("forward", None)
    return copied


def acting_copy(net: nn.Module, is_compiled: bool = False, is_recorded: bool = False) -> nn.Module:
    """A copy of a net to act with. Modules that have `cast_weights()` cast once what every pass would cast."""
    acting = own_copy(net).eval().requires_grad_(False)
    for module in acting.modules():
        if hasattr(module, "cast_weights"):
            module.cast_weights()
    if is_compiled:
        acting.forward = compiled(acting.forward)
    if is_recorded:
        acting.forward = partial(Graphs().call, acting.forward)
    return acting


def start_weights(learner, flags) -> PublishedWeights:
    """What inference acts with. With --compile and --cuda_graphs the learner's net is treated alike from now on. Raises
    InputError where it cannot be."""
    if flags.cuda_graphs and next(learner.net.parameters()).device.type != "cuda":
        raise InputError(f"--cuda_graphs with --device {flags.device}: there is no GPU to record them; leave it out")
    weights = PublishedWeights(learner.net, learner.updates, flags.compile, flags.cuda_graphs)
    if flags.compile:
        learner.net.forward = compiled(learner.net.forward, dynamic=False)  # torch 2.11 fails on an LSTM else
    if flags.cuda_graphs:
        learner.graphs = Graphs(learner.net.parameters())
    return weights


class PublishedWeights:
    """Two copies of a net for inference: the learner writes the one that is not in use, then they swap roles."""

    def __init__(self, net: nn.Module, version: int, is_compiled: bool = False, is_recorded: bool = False):
        self._copies = [acting_copy(net, is_compiled, is_recorded) for _ in range(2)]
        self._locks = [threading.Lock() for _ in range(2)]
        device = next(net.parameters()).device
        self._written = [Fence(device) for _ in range(2)]
        self._read = [Fence(device) for _ in range(2)]
        self._versions = [version, version]
        self._current = 0

    @torch.no_grad()
    def publish(self, net: nn.Module, version: int) -> None:
        """Give inference the weights (and buffers) after learner update number `version`."""
        spare = 1 - self._current
        with self._locks[spare]:  # waits only for a forward pass that began two updates ago
            self._read[spare].wait()
            torch._foreach_copy_(list(self._copies[spare].state_dict().values()), list(net.state_dict().values()))
            self._written[spare].set()
            self._versions[spare] = version
        self._current = spare

    @contextlib.contextmanager
    def newest(self) -> Iterator[tuple[nn.Module, int]]:
        """The net to act with, and the learner update that its weights come from.

        A GPU writes the newest weights when it is done with the update before them; until then the others serve.
        """
        current = self._current
        if not self._written[current].is_reached():
            current = 1 - current
        with self._locks[current]:
            self._written[current].wait()
            yield self._copies[current], self._versions[current]
            self._read[current].set()
