"""TorchBeast's `vtrace` module: V-trace from the logits of softmax policies, on beast.learn.vtrace."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from beast.learn import vtrace
from beast.learn.vtrace import VTraceReturns

__all__ = ["VTraceFromLogitsReturns", "VTraceReturns", "action_log_probs", "from_importance_weights", "from_logits"]


class ShapeError(ValueError, RuntimeError):
    """Shapes do not fit together. TorchBeast raises what torch does, here the one and there the other."""


class VTraceFromLogitsReturns(NamedTuple):
    """As `VTraceReturns`, and log-probabilities [T, B] of the actions taken, which keep their gradient."""

    vs: Tensor
    pg_advantages: Tensor
    log_rhos: Tensor
    behavior_action_log_probs: Tensor
    target_action_log_probs: Tensor


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability [...] in float32 of integer `actions` [...] under `policy_logits` [..., num_actions].

    Raises ShapeError unless `policy_logits` has the shape of `actions` and one more dimension.
    """
    if policy_logits.shape[:-1] != actions.shape:
        raise ShapeError(
            f"policy logits have shape {list(policy_logits.shape)}, expected {[*actions.shape, 'num_actions']}: "
            f"the shape of actions, {list(actions.shape)}, and the number of actions"
        )
    log_probs = torch.log_softmax(policy_logits.float(), dim=-1)
    return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """`beast.learn.vtrace.from_importance_weights`. Raises ShapeError where a rank or shape differs."""
    try:
        return vtrace.from_importance_weights(
            log_rhos,
            discounts,
            rewards,
            values,
            bootstrap_value,
            clip_rho_threshold,
            clip_pg_rho_threshold,
            lambda_,
        )
    except ValueError as error:
        text = str(error)
        if values.dim() != bootstrap_value.dim() + 1:  # torch's words, as it joins the two
            ranks = f"{values.dim()} and {bootstrap_value.dim() + 1}"
            text = f"Tensors must have same number of dimensions: got {ranks}: {text}"
        raise ShapeError(text) from error


def from_logits(
    behavior_policy_logits: Tensor,
    target_policy_logits: Tensor,
    actions: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTraceFromLogitsReturns:
    """V-trace for a softmax policy with logits [T, B, num_actions] and integer `actions` [T, B].

    The other arguments are those of `from_importance_weights`. Raises ShapeError where shapes do not fit together.
    """
    if behavior_policy_logits.shape != target_policy_logits.shape:
        raise ShapeError(
            f"behavior_policy_logits has shape {list(behavior_policy_logits.shape)}, expected that of "
            f"target_policy_logits, {list(target_policy_logits.shape)}"
        )
    behavior_action_log_probs = action_log_probs(behavior_policy_logits, actions)
    target_action_log_probs = action_log_probs(target_policy_logits, actions)
    log_rhos = target_action_log_probs - behavior_action_log_probs
    vs, pg_advantages = from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        bootstrap_value,
        clip_rho_threshold=clip_rho_threshold,
        clip_pg_rho_threshold=clip_pg_rho_threshold,
        lambda_=lambda_,
    )
    return VTraceFromLogitsReturns(vs, pg_advantages, log_rhos, behavior_action_log_probs, target_action_log_probs)
