"""V-trace: off-policy targets for an actor-critic (IMPALA, Espeholt et al. 2018, arXiv 1802.01561, section 4.1).

All arrays are time-major. Step t is the transition from row t to row t+1 of a rollout: `rewards[t]` arrived with
x_{t+1}, `values[t]` is V(x_t), `discounts[t]` is 0 where V(x_{t+1}) and what follows may not count, and
`bootstrap_value` is V(x_T). All is computed in float32: a bfloat16 value near -2 moves in steps of 0.016.

A void transition (from an episode's final observation to the next episode's first) has weight 0, log_rhos -inf. There
vs equals V and the advantage is 0, so the step into a truncation bootstraps from V of its own final observation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from beast.envs.rows import is_final


class VTraceReturns(NamedTuple):
    """`vs` [T, B], the targets of the values, and `pg_advantages` [T, B]; float32, without a gradient."""

    vs: Tensor
    pg_advantages: Tensor


def transition_masks(
    done: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Which transitions count, bool [T, B], and their discounts, float32 [T, B]: one rule for both autoreset modes.

    A transition from a final observation is void. A discount is `gamma`, or 0 at a termination and where row t+1 is of
    another episode. Where several policies act, `counts` are the rows whose action the trained one chose, and the
    transition to any other row is void, too. Raises ValueError unless all are bool tensors of one shape [T+1, B] with
    T >= 1.
    """
    named = {"done": done, "terminated": terminated, "truncated": truncated}
    for name, flags in (named if counts is None else {**named, "counts": counts}).items():
        if flags.dtype != torch.bool:  # ~ on an integer tensor would flip bits rather than truth
            raise ValueError(f"{name} has dtype {flags.dtype}, expected torch.bool: convert it with .bool()")
        if flags.dim() != 2 or flags.shape[0] < 2 or flags.shape != done.shape:
            raise ValueError(
                f"{name} has shape {list(flags.shape)}, expected [T+1, B] with T >= 1 as all of these, "
                f"done has {list(done.shape)}"
            )
    mask = ~is_final(done, terminated, truncated)[:-1]
    return mask if counts is None else mask & counts[1:], gamma * (~(terminated | done)[1:]).float()


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor, bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0, clip_pg_rho_threshold: float | None = 1.0, lambda_: float = 1.0,
) -> VTraceReturns:  # fmt: skip
    """V-trace targets and policy gradient advantages, without a gradient.

    Args:
        log_rhos: [T, B] log of target over behaviour probability of the action; -inf (weight 0) where void.
        discounts, rewards, values, bootstrap_value: [T, B], the last one [B], see the module's head.
        clip_rho_threshold: rho-bar of equation 1, the clip of the weight on each temporal difference; None for no clip.
        clip_pg_rho_threshold: clip of the weight on the policy gradient (section 4.2); None for no clip.
        lambda_: c_t = lambda min(1, rho_t), remark 2: 1 looks to the end of the rollout, 0 one step ahead.

    All may have trailing dimensions after B, as many in each; a 1 there is stretched to the size that `values` has.
    Raises ValueError where a rank or shape differs.
    """
    _check_shapes(values, bootstrap_value, log_rhos=log_rhos, discounts=discounts, rewards=rewards)
    discounts, rewards, values = discounts.float(), rewards.float(), values.float()
    bootstrap_value = bootstrap_value.float().unsqueeze(0)

    rhos = log_rhos.float().exp()
    clipped_rhos = rhos if clip_rho_threshold is None else rhos.clamp(max=clip_rho_threshold)
    pg_rhos = rhos if clip_pg_rho_threshold is None else rhos.clamp(max=clip_pg_rho_threshold)

    # Equation 1 as the recursion of remark 1, a_t = vs_t - V_t = delta_t + gamma_t c_t a_{t+1}, written over delta.
    next_values = torch.cat([values[1:], bootstrap_value])
    corrections = clipped_rhos * (rewards + discounts * next_values - values)
    rows = corrections.unbind()
    decays = (discounts * rhos.clamp(max=1.0) * lambda_).unbind()
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(decays[t], rows[t + 1])

    vs = values + corrections
    next_vs = torch.cat([vs[1:], bootstrap_value])
    return VTraceReturns(vs, pg_rhos * (rewards + discounts * next_vs - values))


def _check_shapes(values: Tensor, bootstrap_value: Tensor, **others: Tensor) -> None:
    shape = values.shape
    if len(shape) < 2:
        raise ValueError(f"values has shape {list(shape)}, expected rank 2 or more: [T, B, ...]")
    for name, tensor in others.items():
        stretched = [full if size == 1 else size for size, full in zip(tensor.shape[2:], shape[2:])]
        if tensor.dim() != len(shape) or [*tensor.shape[:2], *stretched] != list(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected that of values, {list(shape)}")
    if bootstrap_value.shape != shape[1:]:
        raise ValueError(
            f"bootstrap_value has shape {list(bootstrap_value.shape)}, expected {list(shape[1:])}: "
            f"that of values, {list(shape)}, without time"
        )
