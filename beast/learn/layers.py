"""Layers that the agents' nets are made of."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def orthogonal(layer: nn.Module, gain: float) -> nn.Module:
    """The layer, initialized: orthogonal weights times `gain`, no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    """Two convolutions added to their input, as in IMPALA's ResNet (Espeholt et al. 2018, figure 3 right)."""

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1), math.sqrt(2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1), 1.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class MixedPrecision(nn.Sequential):
    """Layers that compute in bfloat16 with `amp`."""

    def __init__(self, *layers: nn.Module, amp: bool):
        super().__init__(*layers)
        self.amp = amp

    def cast_weights(self) -> None:
        """For a copy that only acts (`acting_copy`): cast once what every pass would cast."""
        if self.amp:
            self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return super().forward(x)
