"""Action distributions of gymnasium's spaces, and how an action is stored and shown to a model.

A policy puts out one flat float32 vector of parameters per decision; it travels in the rollout as `policy_logits`.

| space                                  | parameters                          | one action in the rollout        |
|----------------------------------------|-------------------------------------|----------------------------------|
| Discrete(n)                            | n logits                            | int64 []                         |
| MultiDiscrete of any shape, Tuple of   | the logits of each part in order    | int64 [parts]                    |
| Discrete, MultiDiscrete or such Tuples |                                     |                                  |
| Box of floats of any shape, d numbers  | d means, then d log std. deviations | float32 [d]                      |

Categories count from 0; the environment adapter adds a space's `start`. Where a Box is bounded on both sides, [-1, 1]
spans its bounds: the adapter rescales and clips, so a log-probability is that of the action before clipping.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from gymnasium import spaces
from torch import Tensor

from beast.envs import action_shape_dtype, box_size, category_sizes

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # in units of half a Box's range: 0.0067 to 7.4
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class Categoricals:
    """Independent categorical choices, one per entry of `sizes`; an action is [...] or, of a joint space, [..., parts].

    A logit of -inf forbids a choice: it is never sampled and adds nothing to the entropy. Leave one in each part.
    """

    def __init__(self, logits: Tensor, sizes: list[int], action_shape: tuple[int, ...]):
        """`logits` is [..., sum(sizes)]; `action_shape` is () for the one choice of a Discrete, else (len(sizes),)."""
        _check_last_dimension("logits", logits, sum(sizes))
        self.logits = logits.float()
        self.sizes = sizes
        self.action_shape = action_shape

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
        if self.action_shape == ():
            return scores.argmax(dim=-1)
        return torch.stack([part.argmax(dim=-1) for part in scores.split(self.sizes, dim=-1)], dim=-1)


class Gaussian:
    """A normal distribution over [..., d] with diagonal covariance; log standard deviations are clamped to [-5, 2]."""

    def __init__(self, parameters: Tensor, size: int):
        """`parameters` is [..., 2 * size]: the means, then the log standard deviations."""
        _check_last_dimension("parameters", parameters, 2 * size)
        self.mean, log_std = parameters.float().split(size, dim=-1)
        self.log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

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


def distribution(space: spaces.Space, parameters: Tensor) -> Categoricals | Gaussian:
    """The policy over `space` whose parameters are `parameters` [..., policy_width(space)].

    Raises:
        ValueError: the space is not supported or the last dimension is not its `policy_width`.
    """
    if isinstance(space, spaces.Box):
        return Gaussian(parameters, box_size(space))
    return Categoricals(parameters, category_sizes(space), action_shape_dtype(space)[0])


def policy_width(space: spaces.Space) -> int:
    """Length of the flat parameter vector; ValueError for a space that is not supported."""
    return 2 * box_size(space) if isinstance(space, spaces.Box) else sum(category_sizes(space))


def encoded_action_width(space: spaces.Space) -> int:
    """Length of what `encode_action` returns; ValueError for a space that is not supported."""
    return box_size(space) if isinstance(space, spaces.Box) else sum(category_sizes(space))


def encode_action(space: spaces.Space, action: Tensor) -> Tensor:
    """An action [..., *action_shape] as input of a model, float32 [..., encoded_action_width(space)].

    One-hot for each categorical part; the numbers of a Box clamped to [-1, 1], its bounds where it has them.

    Raises:
        ValueError: the space is not supported or the action has another shape.
    """
    shape, sizes = _action_layout(space)
    leading = action.shape[: action.dim() - len(shape)]
    _check_action(action, leading + shape)
    if not sizes:
        return action.float().clamp(-1.0, 1.0)
    places = action.long().reshape(leading + (len(sizes),))
    if len(sizes) > 1:
        starts = [sum(sizes[:part]) for part in range(len(sizes))]  # a tensor of them would make a GPU's host wait
        places = torch.stack([place + start for place, start in zip(places.unbind(-1), starts)], dim=-1)
    return torch.zeros(leading + (sum(sizes),), device=action.device).scatter_(-1, places, 1.0)


@torch.compiler.assume_constant_result  # numpy's integers would break the graph
def _action_layout(space: spaces.Space) -> tuple[tuple[int, ...], list[int]]:
    """The shape of an action, and the sizes of its categorical parts, none of a Box."""
    return action_shape_dtype(space)[0], [] if isinstance(space, spaces.Box) else category_sizes(space)


def _check_last_dimension(name: str, tensor: Tensor, expected: int) -> None:
    if tensor.dim() == 0 or tensor.shape[-1] != expected:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {expected} numbers in the last dimension")


def _check_action(action: Tensor, expected: tuple[int, ...]) -> None:
    if action.shape != expected:
        raise ValueError(f"action has shape {list(action.shape)}, expected {list(expected)}")
