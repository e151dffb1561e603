"""Running statistics: of observations, and of returns (PopArt). `forward` reads them, only `observe` changes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """Images [T, B, C, H, W], or vectors [T, B, size] clipped to ±10, in units of each number's own deviation.

    Most of a Pong image never changes, and after a convolution the ball is a few percent of a large constant. Without
    the constant the value loss was a quarter to a half at step 100,000 (benchmarks/results/pong-search.csv).
    """

    def __init__(self, shape: tuple[int, ...], unit: float):
        """`unit` multiplies the input first: 1/255 for bytes."""
        super().__init__()
        self.unit, self.is_image = unit, len(shape) == 3
        # Added to a deviation, so that pixels that hardly ever change are not blown up. Small grids hold codes, all of
        # which matter.
        self.floor = (0.2 if min(shape[1:]) >= 36 else 0.01) if self.is_image else 1e-4
        for name in ("count", "mean", "variance"):
            self.register_buffer(name, torch.zeros(() if name == "count" else shape))
        # (x · unit - mean) / (deviation + floor) is x · scale + offset.
        self.register_buffer("scale", torch.full(shape, unit))
        self.register_buffer("offset", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            return x * self.unit
        output = torch.addcmul(self.offset.to(x.dtype), x, self.scale.to(x.dtype))
        # NaN and Inf stay: they have to make the loss NaN or Inf, so that the update is skipped.
        return output if self.is_image else output.clamp(-10, 10).where(x.isfinite(), output)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Take images [B, C, H, W] or vectors [N, size] into the running mean and variance (Chan et al. 1979)."""
        if self.mean is None:
            return
        is_usable = x.abs() < 1e15  # not NaN or Inf, and its square is a float32
        x = (x.float() * self.unit).where(is_usable, self.mean)
        share = len(x) / (self.count + len(x))
        mean = x.mean(0)
        variance = (x - mean).square().mean(0)
        difference = mean - self.mean
        self.mean += difference * share
        self.variance += (variance - self.variance + difference.square() * (1 - share)) * share
        self.count += len(x)
        rounding = 1e-5 * self.mean.abs()  # rounding makes a large constant look noisy
        self.scale.copy_(self.unit / (self.variance.sqrt() + self.floor + rounding))
        self.offset.copy_(-self.mean * self.scale / self.unit)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments):
        """Statistics of another shape begin anew. A net that was trained without statistics stays without."""
        if f"{prefix}mean" not in state_dict:
            owner = prefix[: prefix.rstrip(".").rfind(".") + 1]
            had_statistics = state_dict.pop(f"{prefix}count", None) is not None
            if not had_statistics and any(name.startswith(owner) for name in state_dict):
                for name in ("count", "mean", "variance", "scale", "offset"):
                    self.register_buffer(name, None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class ReturnMoments(NamedTuple):
    """Mean and standard deviation of a batch's returns, scalar tensors."""

    mean: Tensor
    deviation: Tensor


class ValueHead(nn.Linear):
    """Values [T, B, 1] of features [T, B, size], learned in units of the returns' deviation: PopArt (arXiv 1602.07714).

    `observe` follows mean and deviation of the returns. It changes weight and bias with them, so that no value changes.
    """

    RATE = 1e-3  # share of an update in the running statistics
    LEAST_DEVIATION = 1e-2

    def __init__(self, size: int):
        super().__init__(size, 1)
        for name, start in (("mean", 0.0), ("variance", 1.0), ("deviation", 1.0)):
            self.register_buffer(name, torch.tensor(start))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *arguments):
        for name, buffer in self.named_buffers():  # older checkpoints have no statistics
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.deviation + self.mean

    @torch.no_grad()
    def observe(self, returns: ReturnMoments, is_bad: Tensor) -> None:
        """Take an update's returns into the running statistics, unless the update is bad."""
        rate = torch.where(is_bad, 0, self.RATE)
        mean, deviation = (torch.where(is_bad, 0, x) for x in returns)  # NaN times a rate of 0 is NaN
        old_mean, old_deviation = self.mean.clone(), self.deviation.clone()
        difference = mean - self.mean
        self.mean += rate * difference
        variance = deviation.square() + difference.square() * (1 - rate)
        self.variance += rate * (variance - self.variance)
        self.deviation.copy_(self.variance.sqrt().clamp(min=self.LEAST_DEVIATION))
        self.weight *= old_deviation / self.deviation
        self.bias.copy_((self.bias * old_deviation + old_mean - self.mean) / self.deviation)


def value_head(net: nn.Module) -> ValueHead | None:
    """The net's ValueHead, wherever a fork has put it."""
    return next((module for module in net.modules() if isinstance(module, ValueHead)), None)
