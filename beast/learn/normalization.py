"""Running statistics of observations, and of returns (PopArt). `forward` reads them, only `observe` changes them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from beast.envs.spaces import category_sizes, channels_first, image_shape
from beast.learn.distributions import action_layout, to_features
from beast.learn.ranks import size, total, totals

STATISTICS = ("count", "mean", "variance", "scale", "offset")


class Observations(nn.Module):
    """Observations [T, B, *space.shape] as numbers for a net's first layer, on request normalized: in units of each
    number's running deviation, from its running mean.

    Images become [T, B, C, H, W], all others vectors [T, B, size]: categories one-hot, arrays flat. Bytes, and images
    of numbers with bounds, are scaled to [0, 1] or [-1, 1]; vectors of normalized numbers are clipped to ±10.

    Most of a Pong image never changes, and after a convolution the ball is a few percent of a large constant. Without
    the constant the value loss was a quarter to a half at step 100,000 (benchmarks/results/pong-search.csv).
    """

    unit: float | Tensor

    def __init__(self, space: Space, is_image: bool, normalize: bool, amp: bool = False, channels: str = "auto"):
        """`normalize` is for Boxes, but not for bools, vectors of whole bytes, images without bounds, and small grids
        of 0 to 1. With `amp` images are bfloat16. `channels` is as for `channels_first`. The attribute `shape` is that
        of one observation."""
        super().__init__()
        self.is_image, self.dtype = is_image, torch.bfloat16 if is_image and amp else torch.float32
        self.categories = None
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            self.categories = action_layout(spaces.MultiDiscrete(category_sizes(space)))
            self.register_buffer("start", torch.as_tensor(space.start).flatten(), persistent=False)
        self.stored_shape = list(space.shape)
        self.shape: tuple[int, ...] = (spaces.flatdim(space) if self.categories else math.prod(space.shape),)
        if is_image:
            self.shape = image_shape(space.shape, channels)
            self.stack = (1, 1, *space.shape)[-4:]  # images of three dimensions
            self.channels_first = len(space.shape) == 2 or channels_first(self.stack[1:], channels)
        is_small = is_image and min(self.shape[1:]) < 36
        # Added to a deviation, so that pixels that hardly ever change are not blown up. Small grids hold codes, all of
        # which matter.
        self.floor = (0.01 if is_small else 0.2) if is_image else 1e-4
        largest = _largest_pixel(space) if is_image else 255.0 * (space.dtype == np.uint8)
        unit = 1 / largest if largest and not self.categories else 1.0
        if is_image and space.dtype != np.uint8 and unit != 1:  # older checkpoints do not have it: they took 1
            self.register_buffer("unit", torch.tensor(unit))
        else:
            self.unit = unit
        for name in STATISTICS:
            self.register_buffer(name, None)
        is_number = isinstance(space, spaces.Box) and space.dtype != bool
        if is_number and is_image:
            is_number = largest > (1 if is_small else 0)  # small grids of 0 to 1 have good numbers, others no bounds
        elif is_number:
            is_number = space.dtype != np.uint8 or space.high.max() < 255  # whole bytes are left in their own unit
        if normalize and is_number:
            self.count, self.mean, self.variance = torch.zeros(()), torch.zeros(self.shape), torch.zeros(self.shape)
            # (x · unit - mean) / (deviation + floor) is x · scale + offset.
            self.scale, self.offset = torch.full(self.shape, unit), torch.zeros(self.shape)

    @property
    def description(self) -> str:
        """What a net makes of it, for the log."""
        if self.is_image:
            channels, *sides = self.shape
            channels_of = f"{channels} channel{'s' * (channels > 1)} of {sides[0]} x {sides[1]}"
            return f"{self.stored_shape} by convolutions over {channels_of}"
        inputs = f"{self.shape[0]:,} one-hot numbers" if self.categories else str(self.stored_shape)
        advice = ", which makes the net slow: show it fewer numbers, or give it an embedding"
        return f"{inputs} by an MLP{advice if self.shape[0] >= 50_000 else ''}"

    def numbers(self, x: Tensor) -> Tensor:
        if self.is_image:
            x = x.reshape(*x.shape[: -len(self.stored_shape)], *self.stack)
            x = x if self.channels_first else x.movedim(-1, -3)
            return x.flatten(-4, -3).to(self.dtype)  # a byte is exact in bf16
        x = x.reshape(*x.shape[:2], -1)
        return to_features(self.categories, x - self.start) if self.categories else x.float()

    def forward(self, x: Tensor) -> Tensor:
        x = self.numbers(x)
        if self.mean is None:
            return x * self.unit
        output = torch.addcmul(self.offset.to(x.dtype), x, self.scale.to(x.dtype))
        # NaN and Inf stay: they have to make the loss NaN or Inf, so that the update is skipped.
        return output if self.is_image else output.clamp(-10, 10).where(x.isfinite(), output)

    @torch.no_grad()
    def observe(self, x: Tensor, counts: Tensor | None = None) -> None:
        """Take observations [T, B, …] into the running mean and variance (Chan et al. 1979); of images the last row.
        With `counts`, bool [T, B], only those that count."""
        if self.mean is None:
            return
        x = self.numbers(x[-1:])[0] if self.is_image else self.numbers(x).flatten(0, 1)
        if counts is not None:
            counts = counts[-1] if self.is_image else counts.flatten()
        elif size() > 1:
            counts = torch.ones(len(x), dtype=torch.bool, device=x.device)
        is_usable = x.abs() < 1e15  # not NaN or Inf, and its square is a float32
        x = (x.float() * self.unit).where(is_usable, self.mean)
        number: int | Tensor = len(x)
        if counts is not None:  # no index of what counts, which would make the CPU wait for a GPU
            weight = counts.float()
            weight = weight.view(-1, *[1] * len(self.shape))
            number, sums = totals(weight.sum(), (x * weight).sum(0))
            mean = sums / number.clamp(min=1)
            variance = total(((x - mean).square() * weight).sum(0)) / number.clamp(min=1)
        else:
            mean = x.mean(0)
            variance = (x - mean).square().mean(0)
        share = number / (self.count + number).clamp(min=1)
        difference = mean - self.mean
        self.mean += difference * share
        self.variance += (variance - self.variance + difference.square() * (1 - share)) * share
        self.count += number
        rounding = 1e-5 * self.mean.abs()  # rounding makes a large constant look noisy
        self.scale.copy_(self.unit / (self.variance.sqrt() + self.floor + rounding))
        self.offset.copy_(-self.mean * self.scale / self.unit)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments):
        """Statistics of another shape begin anew."""
        if f"{prefix}mean" not in state_dict:
            state_dict.pop(f"{prefix}count", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def without_statistics(encoder: nn.Module, weights: dict, prefix: str, *others) -> None:
    """An encoder's hook before it loads `weights`: if they were trained without statistics, its `center` has none."""
    if f"{prefix}head.0.weight" in weights and f"{prefix}center.count" not in weights:
        for name in STATISTICS:
            encoder.center.register_buffer(name, None)
        if isinstance(encoder.center.unit, Tensor):
            weights.setdefault(f"{prefix}center.unit", torch.ones(()))


def _largest_pixel(space: Space) -> float:
    """The largest absolute number of an image, by its bounds; 0 if it has none, or if they are no bounds of pixels."""
    if space.dtype == np.uint8:
        return 255.0
    largest = float(np.abs([space.low, space.high]).max()) if isinstance(space, spaces.Box) else 0.0
    return largest if largest < 2**16 and space.dtype != bool else 0.0


def describe_encoders(net: nn.Module) -> list[str]:
    """What the net makes of each part of the observations, for the log; empty if it has no `names` and Observations."""
    parts = (module for module in net.modules() if isinstance(module, Observations))
    return [f"{name} {part.description}" for name, part in zip(getattr(net, "names", ()), parts)]


class ReturnMoments(NamedTuple):
    """Mean and standard deviation of a batch's returns; NaN if all its transitions are void. Scalar tensors, or of
    several tasks one number for each."""

    mean: Tensor
    deviation: Tensor


class ValueHead(nn.Linear):
    """Values [T, B, num_tasks] of features [T, B, size], learned in units of the returns' deviation: PopArt (arXiv
    1602.07714), which has its own statistics for each task (arXiv 1809.04474).

    `observe` follows mean and deviation of the returns. It changes weight and bias with them, so that no value changes.
    """

    RATE = 1e-3  # share of a minibatch in the running statistics; no flag: nothing was tuned here
    LEAST_DEVIATION = 1e-2

    def __init__(self, size: int, num_tasks: int = 1):
        super().__init__(size, num_tasks)
        for name, start in (("mean", 0.0), ("variance", 1.0), ("deviation", 1.0)):
            self.register_buffer(name, torch.full((num_tasks,) if num_tasks > 1 else (), start))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments):
        for name, buffer in self.named_buffers():  # older checkpoints have no statistics
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.deviation + self.mean

    def unit(self, batch: dict) -> Tensor:
        """The deviation by which errors of the values of rows 0 to T-1 are measured: a scalar, or of tasks [T, B]."""
        return self.deviation if self.out_features == 1 else self.deviation[task_of(batch, self.out_features)[:-1]]

    def moments(self, returns: Tensor, mask: Tensor, batch: dict) -> ReturnMoments:
        """Those of the returns [T, B] that count by `mask`, and of several tasks those of each."""
        if self.out_features > 1:
            tasks = torch.arange(self.out_features, device=mask.device).view(-1, 1, 1)
            mask = mask & (task_of(batch, self.out_features)[:-1] == tasks)
        count, sums = totals(mask.sum((-2, -1)), returns.where(mask, 0).sum((-2, -1)))
        mean = sums / count  # NaN of none
        variance = total((returns - mean.view(-1, 1, 1)).square().where(mask, 0).sum((-2, -1))) / count
        return ReturnMoments(mean, variance.sqrt().view(mean.shape))

    @torch.no_grad()
    def observe(self, returns: ReturnMoments, is_bad: Tensor) -> None:
        """Take a minibatch's returns into the running statistics, unless the update is bad or there are none."""
        is_bad = is_bad | ~returns.mean.isfinite()
        rate = torch.where(is_bad, 0, self.RATE)
        mean, deviation = (torch.where(is_bad, 0, x) for x in returns)  # NaN times a rate of 0 is NaN
        old_mean, old_deviation = self.mean.clone(), self.deviation.clone()
        difference = mean - self.mean
        self.mean += rate * difference
        variance = deviation.square() + difference.square() * (1 - rate)
        self.variance += rate * (variance - self.variance)
        self.deviation.copy_(self.variance.sqrt().clamp(min=self.LEAST_DEVIATION))
        self.weight *= (old_deviation / self.deviation).view(-1, 1)
        self.bias.copy_((self.bias * old_deviation + old_mean - self.mean) / self.deviation)


def task_of(inputs: dict, num_tasks: int) -> Tensor:
    """The task of each row [R, B], int64. Rows may come from other hosts, and no number of theirs is no task's."""
    return inputs["task"].long().clamp(0, num_tasks - 1)


def own_values(values: Tensor, inputs: dict) -> Tensor:
    """Of the values [R, B, num_tasks] of a net's head, those of each row's own task, [R, B]."""
    if values.shape[-1] == 1:
        return values.squeeze(-1)
    return values.gather(-1, task_of(inputs, values.shape[-1]).unsqueeze(-1)).squeeze(-1)


def value_head(net: nn.Module) -> ValueHead | None:
    """The net's ValueHead, wherever a fork has put it."""
    return next((module for module in net.modules() if isinstance(module, ValueHead)), None)
