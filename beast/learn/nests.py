"""Nested dicts and tuples of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def map_tensors(function: Callable, *batches):
    """Apply a function to every leaf of nested dicts and (named) tuples, or to the leaves in one place of several."""
    if isinstance(batches[0], dict):
        return {key: map_tensors(function, *(batch[key] for batch in batches)) for key in batches[0]}
    if isinstance(batches[0], tuple):
        parts = [map_tensors(function, *parts) for parts in zip(*batches)]
        return batches[0]._make(parts) if hasattr(batches[0], "_make") else tuple(parts)
    return function(*batches)


def join(batches: list[dict], device: torch.device) -> dict:
    """Rollouts or rows [T, B_i, …] side by side as [T, B, …] on the device. A single one on a CPU is not copied."""
    if len(batches) == 1:
        return map_tensors(lambda x: x.to(device, non_blocking=True), batches[0])
    return map_tensors(lambda *parts: torch.cat([x.to(device, non_blocking=True) for x in parts], dim=1), *batches)


def minibatches(batch: dict, core_state: tuple, count: int) -> Iterator[tuple[dict, tuple]]:
    """Rollouts [T+1, B, …] and their core state [1, B, …] in `count` parts of whole columns, dealt at random.

    One part is what was given, not copied. torch's global generator on the CPU deals, on every device.
    """
    if count == 1:
        yield batch, core_state
        return
    is_done = batch["done"]
    for dealt in torch.randperm(is_done.shape[1]).to(is_done.device, non_blocking=True).tensor_split(count):
        yield map_tensors(lambda x: x[:, dealt], (batch, core_state))


def columns(batch: dict, first: int, count: int) -> dict:
    """Columns of a batch [T, B, …] as views [T, count, …]; leaves may be tensors or numpy arrays."""
    return map_tensors(lambda x: x[:, first : first + count], batch)
