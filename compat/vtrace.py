"""TorchBeast's `vtrace` module: V-trace from the logits of softmax policies, on beast.learn.vtrace."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from beast.learn.vtrace import VTraceReturns, from_importance_weights

__all__ = ["VTraceFromLogitsReturns", "VTraceReturns", "action_log_probs", "from_importance_weights", "from_logits"]


class VTraceFromLogitsReturns(NamedTuple):
    """As `VTraceReturns`, and log-probabilities [T, B] of the actions taken, which keep their gradient."""

    vs: Tensor
    pg_advantages: Tensor
    log_rhos: Tensor
    behavior_action_log_probs: Tensor
    target_action_log_probs: Tensor


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability [...] in float32 of integer `actions` [...] under `policy_logits` [..., num_actions].

    Raises ValueError unless `policy_logits` has the shape of `actions` and one more dimension.
    """
    if policy_logits.shape[:-1] != actions.shape:
        raise ValueError(
            f"policy logits have shape {list(policy_logits.shape)}, expected {[*actions.shape, 'num_actions']}: "
            f"the shape of actions, {list(actions.shape)}, and the number of actions"
        )
    log_probs = torch.log_softmax(policy_logits.float(), dim=-1)
    return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


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

    The other arguments are those of `from_importance_weights`. Raises ValueError where shapes do not fit together.
    """
    if behavior_policy_logits.shape != target_policy_logits.shape:
        raise ValueError(
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
