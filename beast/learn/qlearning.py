"""Arithmetic of Q-learning on sequences: value rescaling, n-step targets, priorities.

All arrays are time-major. Transition t leads from row t to row t+1: `rewards[t]` arrived with x_{t+1}. Masks and
discounts are those of `vtrace.transition_masks`, one rule for both autoreset conventions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-3  # of the rescaling, as in R2D2 and SEED RL


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + εx (Pohlen et al. 2018): large values grow as their square root.

    Written as |x| / (sqrt(|x| + 1) + 1), which is the same and loses no digits where x is small.
    """
    size = x.abs()
    return x.sign() * size / ((size + 1).sqrt() + 1) + EPSILON * x


def rescale_inverse(x: Tensor) -> Tensor:
    """The inverse of `rescale`. The textbook's form is off by 5e-4 in float32; this one loses no digits.

    h(y) = x is a quadratic equation in u = sqrt(|y| + 1) - 1, and |y| = u (u + 2).
    """
    size = x.abs()
    root = ((1 + 2 * EPSILON) ** 2 + 4 * EPSILON * size).sqrt()
    u = 2 * size / (root + 1 + 2 * EPSILON)
    return x.sign() * u * (u + 2)


def value_scaling(is_rescaled: bool) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """h and its inverse: networks put out h(return). Without rescaling both return a copy."""
    return (rescale, rescale_inverse) if is_rescaled else (torch.clone, torch.clone)


def n_step_targets(rewards: Tensor, discounts: Tensor, mask: Tensor, values: Tensor, n: int) -> Tensor:
    """The discounted sum of up to `n` rewards and the value that follows them, [T, B].

    `rewards`, `discounts` and `mask` are [T, B], `values` [T+1, B]. The sum stops at the value of a row whose
    transition is void (mask 0: the last row of an episode, NEXT_STEP) and at the last row. Where a discount is 0
    nothing follows.
    """
    returns = values
    for _ in range(n):
        stepped = rewards + discounts * returns[1:]
        returns = torch.cat([torch.where(mask, stepped, values[:-1]), values[-1:]])
    return returns[:-1]


def sequence_priorities(errors: Tensor, mask: Tensor, eta: float) -> Tensor:
    """η max |δ| + (1 - η) mean |δ| over the transitions that count, [B] of [T, B]; 0 for a sequence without any."""
    sizes = errors.abs().where(mask, 0)
    return eta * sizes.amax(0) + (1 - eta) * sizes.sum(0) / mask.sum(0).clamp(min=1)


def epsilon_ladder(num_groups: int, group_width: int, eval_columns: int, eval_epsilon: float) -> Tensor:
    """ε of each environment [groups, K]: 0.4^(1 + 7 i / (M - 1)), from 0.4 to 0.00066, for number i of M that train
    (Horgan et al. 2018); `eval_epsilon` in the last `eval_columns`.

    The numbers are dealt like cards: every group gets ε from the whole range, so a lost group takes no part of it away.
    """
    width = group_width - eval_columns
    number = torch.arange(num_groups * width).view(width, num_groups).t()
    share = number / (number.numel() - 1) if number.numel() > 1 else torch.full((1, 1), 0.5)  # alone: the middle
    return torch.cat([0.4 ** (1 + 7 * share), torch.full((num_groups, eval_columns), eval_epsilon)], dim=1)
