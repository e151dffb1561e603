"""Action distributions of gymnasium's spaces, and how an action is stored and shown to a model.

A policy puts out one flat float32 vector of parameters per decision; it travels in the rollout as `policy_logits`.

| space                                  | parameters                          | one action in the rollout        |
|----------------------------------------|-------------------------------------|----------------------------------|
| Discrete(n)                            | n logits                            | int64 []                         |
| MultiDiscrete of any shape             | the logits of each part in order    | int64 [parts]                    |
| MultiBinary(n) of any shape            | the logits of 0 and 1, n times      | int64 [n]                        |
| Dict or Tuple of these, nested or not  | those of each part in order         | int64 [parts]                    |
| Box of floats of any shape, d numbers  | d means, then d log std. deviations | float32 [d]                      |

Categories count from 0; the environment adapter adds a space's `start`. Where a Box is bounded on both sides, [-1, 1]
spans its bounds: the adapter rescales and clips, so a log-probability is that of the action before clipping.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from beast.envs.spaces import action_shape_dtype, category_sizes, leaves, policy_width

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # in units of half a Box's range: 0.0067 to 7.4
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class Categoricals:
    """Independent categorical choices, one per entry of `sizes`; an action is [...] or, of a joint space, [..., parts].

    `logits` is [..., sum(sizes)]; `action_shape` is () for the one choice of a Discrete, else (len(sizes),). A logit of
    -inf forbids a choice: it is never sampled and adds nothing to the entropy. Leave one in each part.
    """

    def __init__(self, logits: Tensor, sizes: list[int], action_shape: tuple[int, ...]):
        self.logits, self.sizes, self.action_shape = logits.float(), sizes, action_shape

    @torch.no_grad()
    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw int64 actions, by the race of exponential clocks: argmax(logit - log E), E > 0 standard exponential."""
        log_clocks = torch.empty_like(self.logits).exponential_(generator=generator).log_()
        return self._best(self.logits - log_clocks)

    def mode(self) -> Tensor:
        """The most probable action, int64."""
        return self._best(self.logits)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability [...] of integer actions; ValueError for one of another shape."""
        _check_action(action, self.logits.shape[:-1] + self.action_shape)
        choices = action.long().reshape(self.logits.shape[:-1] + (len(self.sizes),))
        chosen = [part.gather(-1, choice) for part, choice in zip(self._log_probs, choices.split(1, dim=-1))]
        return chosen[0].squeeze(-1) if len(chosen) == 1 else torch.cat(chosen, dim=-1).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy [...] in nats, summed over the parts."""
        # The floor makes 0 * log 0 count as 0, in the gradient too.
        lowest = torch.finfo(torch.float32).min
        return -sum((part.exp() * part.clamp(min=lowest)).sum(-1) for part in self._log_probs)

    @cached_property
    def _log_probs(self) -> list[Tensor]:
        return [part.log_softmax(dim=-1) for part in self.logits.split(self.sizes, dim=-1)]

    def _best(self, scores: Tensor) -> Tensor:
        best = [part.argmax(dim=-1) for part in scores.split(self.sizes, dim=-1)]
        return torch.stack(best, dim=-1) if self.action_shape else best[0]


class Gaussian:
    """A normal distribution over [..., d] with diagonal covariance.

    `parameters` is [..., 2 d]: the means, then the log standard deviations, which `_ClampLogStd` clamps to [-5, 2].
    """

    def __init__(self, parameters: Tensor):
        self.mean, log_std = parameters.float().chunk(2, dim=-1)
        self.log_std = _ClampLogStd.apply(log_std)

    @torch.no_grad()
    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw float32 actions [..., d]."""
        return torch.empty_like(self.mean).normal_(generator=generator) * self.log_std.exp() + self.mean

    def mode(self) -> Tensor:
        """The mean, [..., d]."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density [...] of actions; ValueError for one of another shape."""
        _check_action(action, self.mean.shape)
        deviation = (action.float() - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * deviation.square() - self.log_std - HALF_LOG_2_PI).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy [...] in nats, summed over the d numbers; it can be negative."""
        return (self.log_std + (0.5 + HALF_LOG_2_PI)).sum(-1)


class _ClampLogStd(torch.autograd.Function):
    """Clamp to [-5, 2]; backward drops only gradients that a descent step would follow further out.

    torch's own clamp drops all gradients out there, so a deviation that a large step threw out never came back. A
    smooth squash would not have that problem, but it would change the deviations inside, and so existing checkpoints.
    """

    @staticmethod
    def forward(ctx, log_std: Tensor) -> Tensor:
        ctx.save_for_backward(log_std)
        return log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (log_std,) = ctx.saved_tensors
        is_outward = ((log_std > LOG_STD_MAX) & (gradient < 0)) | ((log_std < LOG_STD_MIN) & (gradient > 0))
        return gradient.masked_fill(is_outward, 0)


class ActionLayout(NamedTuple):
    """What a net's forward pass has to know of its action space, which torch.compile cannot read itself."""

    shape: tuple[int, ...]  # of one action in the rollout
    sizes: list[int]  # choices of each categorical part; none of a Box
    first: list[int]  # the first choice of each that a model is shown: of 0 and 1 only the 1


def action_layout(space: spaces.Space) -> ActionLayout:
    """Raises ValueError for a space that is not supported."""
    shape, sizes = action_shape_dtype(space)[0], [] if isinstance(space, spaces.Box) else category_sizes(space)
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete)):
        return ActionLayout(shape, sizes, [0] * len(sizes))
    first = [int(isinstance(part, spaces.MultiBinary)) for part in leaves(space) for _ in category_sizes(part)]
    return ActionLayout(shape, sizes, first)


def mask_logits(layout: ActionLayout, logits: Tensor, mask: Tensor | None, otherwise: float = 1.0) -> Tensor:
    """Logits [..., width], -inf where a `mask` [..., width] has a 0; None forbids nothing. Those of a part without a
    legal choice, as many last rows have, are multiplied by `otherwise`: 0 draws uniformly, and teaches nothing."""
    if mask is None:
        return logits
    parts = zip(logits.split(layout.sizes, dim=-1), mask.bool().split(layout.sizes, dim=-1))
    masked = [part.masked_fill(~x, -math.inf).where(x.any(-1, keepdim=True), part * otherwise) for part, x in parts]
    return torch.cat(masked, dim=-1)


def distribution(space: spaces.Space, parameters: Tensor) -> Categoricals | Gaussian:
    """The policy over `space` whose parameters are `parameters` [..., policy_width(space)].

    Raises ValueError if the space is not supported or the last dimension is not its `policy_width`.
    """
    shape, width = list(parameters.shape), policy_width(space)
    if not shape or shape[-1] != width:
        raise ValueError(f"parameters has shape {shape}, expected {width} numbers in the last dimension")
    if isinstance(space, spaces.Box):
        return Gaussian(parameters)
    return Categoricals(parameters, category_sizes(space), action_shape_dtype(space)[0])


def policy_of(net: torch.nn.Module, parameters: Tensor) -> Categoricals | Gaussian:
    """The policy that a net's first output [..., width] stands for: the distribution of its action space with these
    parameters, or what its own `acting_policy(parameters)` makes of them, such as of Q values."""
    own = getattr(net, "acting_policy", None)
    return own(parameters) if own else distribution(net.action_space, parameters)


def to_features(layout: ActionLayout, action: Tensor) -> Tensor:
    """An action [..., *action_shape] as input of a model, float32 [..., gymnasium.spaces.flatdim(space)].

    One-hot for each categorical part, but itself for 0 or 1 of a MultiBinary; the numbers of a Box clamped to [-1, 1],
    its bounds where it has them. Raises ValueError if the action has another shape.
    """
    shape, sizes, first = layout
    leading = action.shape[: action.dim() - len(shape)]
    _check_action(action, leading + shape)
    if not sizes:
        return action.float().clamp(-1.0, 1.0)
    choices = action.long().reshape(leading + (len(sizes),)).split(1, dim=-1)
    zeros = [torch.zeros(leading + (size,), device=action.device) for size in sizes]
    one_hot = [part.scatter_(-1, choice, 1.0) for part, choice in zip(zeros, choices)]
    return torch.cat([part[..., i:] if i else part for part, i in zip(one_hot, first)], dim=-1)


def _check_action(action: Tensor, expected: tuple[int, ...]) -> None:
    if action.shape != expected:
        raise ValueError(f"action has shape {list(action.shape)}, expected {list(expected)}")
