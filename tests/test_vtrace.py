"""V-trace against its definition and against literal numbers. The loss made of it: test_loss.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from beast.learn import vtrace

sys.path.insert(0, str(Path(__file__).parent.parent / "compat"))
import vtrace as torchbeast_vtrace  # noqa: E402

# --- the formula ---------------------------------------------------------------------------------------------------


def vtrace_by_definition(inputs, rho_clip, pg_rho_clip, lambda_):
    """Equation 1 as it stands, in numpy float64: for each s the sum over t of the products of discounts and c's."""
    log_rhos, discounts, rewards, values, bootstrap = (tensor.double().numpy() for tensor in inputs.values())
    steps = len(values)
    rhos = np.exp(log_rhos)
    clipped_rhos = rhos if rho_clip is None else np.minimum(rho_clip, rhos)
    pg_rhos = rhos if pg_rho_clip is None else np.minimum(pg_rho_clip, rhos)
    traces = lambda_ * np.minimum(1.0, rhos)
    all_values = np.concatenate([values, bootstrap[None]])
    deltas = clipped_rhos * (rewards + discounts * all_values[1:] - values)
    targets = all_values.copy()
    for s in range(steps):
        for t in range(s, steps):
            targets[s] += np.prod(discounts[s:t] * traces[s:t], axis=0) * deltas[t]
    return targets[:-1], pg_rhos * (rewards + discounts * targets[1:] - values)


def random_inputs(seed, steps=9, trailing=(4,)):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    done = torch.rand((steps, *trailing), generator=generator) < 0.2
    return {
        "log_rhos": 1.5 * normal(steps, *trailing),
        "discounts": 0.97 * (~done).float(),
        "rewards": normal(steps, *trailing),
        "values": 3 * normal(steps, *trailing),
        "bootstrap_value": 3 * normal(*trailing),
    }


def assert_close(seen, expected, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(seen), np.asarray(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lambda_", [1.0, 0.9, 0.0])
@pytest.mark.parametrize(("rho_clip", "pg_rho_clip"), [(1.0, 1.0), (3.7, 2.2), (0.5, 1.0), (None, None), (1.0, None)])
def test_vtrace_is_the_double_sum_of_its_definition(rho_clip, pg_rho_clip, lambda_):
    for seed in range(5):
        inputs = random_inputs(seed)
        seen = vtrace.from_importance_weights(
            **inputs, clip_rho_threshold=rho_clip, clip_pg_rho_threshold=pg_rho_clip, lambda_=lambda_
        )
        targets, advantages = vtrace_by_definition(inputs, rho_clip, pg_rho_clip, lambda_)
        assert_close(seen.vs, targets)
        assert_close(seen.pg_advantages, advantages)


def test_on_policy_vtrace_is_the_n_step_return():
    inputs = random_inputs(3)
    inputs["log_rhos"].zero_()
    seen = vtrace.from_importance_weights(**inputs)
    expected = inputs["bootstrap_value"]
    for t in reversed(range(len(inputs["values"]))):
        expected = inputs["rewards"][t] + inputs["discounts"][t] * expected
        assert_close(seen.vs[t], expected)
        assert_close(seen.pg_advantages[t], expected - inputs["values"][t])


def test_three_steps_by_hand():
    inputs = {
        "log_rhos": torch.tensor([[math.log(0.5)], [math.log(4.0)], [math.log(1.5)]]),
        "discounts": torch.tensor([[0.9], [0.8], [0.5]]),
        "rewards": torch.tensor([[1.0], [2.0], [3.0]]),
        "values": torch.tensor([[10.0], [20.0], [30.0]]),
        "bootstrap_value": torch.tensor([40.0]),
    }
    seen = vtrace.from_importance_weights(**inputs, clip_rho_threshold=2.0, clip_pg_rho_threshold=3.0, lambda_=0.5)

    vs_2 = 30 + 1.5 * (3 + 0.5 * 40 - 30)
    vs_1 = 20 + 2.0 * (2 + 0.8 * 30 - 20) + 0.8 * (0.5 * 1.0) * (vs_2 - 30)
    vs_0 = 10 + 0.5 * (1 + 0.9 * 20 - 10) + 0.9 * (0.5 * 0.5) * (vs_1 - 20)
    assert_close(seen.vs[:, 0], [vs_0, vs_1, vs_2])
    assert_close(
        seen.pg_advantages[:, 0],
        [0.5 * (1 + 0.9 * vs_1 - 10), 3.0 * (2 + 0.8 * vs_2 - 20), 1.5 * (3 + 0.5 * 40 - 30)],
    )


def test_one_step_by_hand():
    seen = vtrace.from_importance_weights(
        torch.zeros(1, 1), torch.full((1, 1), 0.99), torch.ones(1, 1), torch.full((1, 1), 2.0), torch.full((1,), 3.0)
    )
    assert_close(seen.vs, [[1 + 0.99 * 3]])
    assert_close(seen.pg_advantages, [[1 + 0.99 * 3 - 2]])


def test_a_weight_of_zero_leaves_the_value_and_stops_the_trace_without_nan():
    inputs = random_inputs(5)
    inputs["discounts"].fill_(0.97)
    inputs["log_rhos"][4] = -math.inf
    seen = vtrace.from_importance_weights(**inputs, clip_rho_threshold=None, clip_pg_rho_threshold=None)
    assert seen.vs.isfinite().all() and seen.pg_advantages.isfinite().all()
    assert torch.equal(seen.vs[4], inputs["values"][4])
    assert (seen.pg_advantages[4] == 0).all()

    inputs["rewards"][4:] += 1000
    after = vtrace.from_importance_weights(**inputs, clip_rho_threshold=None, clip_pg_rho_threshold=None)
    assert torch.equal(seen.vs[:5], after.vs[:5])
    assert not torch.equal(seen.vs[5:], after.vs[5:])


def test_bfloat16_inputs_are_computed_in_float32():
    rounded = {name: tensor.bfloat16() for name, tensor in random_inputs(1, steps=20).items()}
    seen = vtrace.from_importance_weights(**rounded)
    expected = vtrace.from_importance_weights(**{name: tensor.float() for name, tensor in rounded.items()})
    assert seen.vs.dtype == seen.pg_advantages.dtype == torch.float32
    assert torch.equal(seen.vs, expected.vs) and torch.equal(seen.pg_advantages, expected.pg_advantages)
    doubles = vtrace.from_importance_weights(**{name: tensor.double() for name, tensor in rounded.items()})
    assert doubles.vs.dtype == doubles.pg_advantages.dtype == torch.float32

    logits = torch.randn(20, 4, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    actions = torch.zeros(20, 4, dtype=torch.int64)
    assert torch.equal(torchbeast_vtrace.action_log_probs(logits, actions), logits.float().log_softmax(-1)[..., 0])


def test_inputs_are_not_changed():
    inputs = random_inputs(2)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    vtrace.from_importance_weights(**inputs, clip_rho_threshold=None, clip_pg_rho_threshold=None)
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)


def test_targets_carry_no_gradient():
    inputs = {name: tensor.requires_grad_() for name, tensor in random_inputs(0).items()}
    seen = vtrace.from_importance_weights(**inputs)
    assert not seen.vs.requires_grad and not seen.pg_advantages.requires_grad


def test_trailing_dimensions_are_computed_one_by_one():
    inputs = random_inputs(7, trailing=(4, 3))
    inputs["log_rhos"] = inputs["log_rhos"][..., :1]
    inputs["discounts"] = inputs["discounts"][..., :1]
    seen = vtrace.from_importance_weights(**inputs)
    assert seen.vs.shape == seen.pg_advantages.shape == (9, 4, 3)
    for index in range(3):
        one = {name: tensor[..., min(index, tensor.shape[-1] - 1)] for name, tensor in inputs.items()}
        targets, advantages = vtrace_by_definition(one, 1.0, 1.0, 1.0)
        assert_close(seen.vs[..., index], targets)
        assert_close(seen.pg_advantages[..., index], advantages)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("log_rhos", (9, 4, 1)),
        ("log_rhos", (9,)),
        ("log_rhos", (9, 1)),
        ("discounts", (9, 3)),
        ("discounts", (1, 4)),
        ("rewards", (8, 4)),
        ("rewards", (10, 4)),
        ("bootstrap_value", (1, 4)),
        ("bootstrap_value", (3,)),
        ("bootstrap_value", ()),
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(name, shape):
    inputs = random_inputs(0)
    inputs[name] = torch.zeros(shape)
    with pytest.raises(ValueError) as error:
        vtrace.from_importance_weights(**inputs)
    expected = [4] if name == "bootstrap_value" else [9, 4]
    assert f"{name} has shape {list(shape)}" in str(error.value) and f"{expected}" in str(error.value)


def test_arrays_without_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"values has shape \[9\], expected rank 2"):
        vtrace.from_importance_weights(**random_inputs(0, trailing=()))


def test_from_logits_weighs_by_the_ratio_of_both_softmaxes():
    generator = torch.Generator().manual_seed(4)
    behavior, target = torch.randn(2, 9, 4, 5, generator=generator)
    target.requires_grad_()
    actions = torch.randint(5, (9, 4), generator=generator)
    inputs = random_inputs(4)
    del inputs["log_rhos"]
    seen = torchbeast_vtrace.from_logits(
        behavior, target, actions, **inputs, clip_rho_threshold=2.0, clip_pg_rho_threshold=1.5, lambda_=0.8
    )

    def taken(logits):
        probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
        return (probabilities * (torch.arange(5) == actions[..., None])).sum(-1).log()

    assert_close(seen.behavior_action_log_probs, taken(behavior))
    assert_close(seen.target_action_log_probs.detach(), taken(target.detach()))
    assert_close(seen.log_rhos.detach(), taken(target.detach()) - taken(behavior))
    targets, advantages = vtrace_by_definition({"log_rhos": seen.log_rhos.detach(), **inputs}, 2.0, 1.5, 0.8)
    assert_close(seen.vs, targets)
    assert_close(seen.pg_advantages, advantages)
    assert not seen.vs.requires_grad and not seen.pg_advantages.requires_grad
    assert seen.target_action_log_probs.requires_grad


def test_from_logits_refuses_logits_that_do_not_fit():
    inputs = random_inputs(0)
    del inputs["log_rhos"]
    logits, actions = torch.zeros(9, 4, 5), torch.zeros(9, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"behavior_policy_logits has shape \[9, 4, 6\].*\[9, 4, 5\]"):
        torchbeast_vtrace.from_logits(torch.zeros(9, 4, 6), logits, actions, **inputs)
    with pytest.raises(ValueError, match=r"\[9, 4, 5\].*num_actions.*\[9, 4, 1\]"):
        torchbeast_vtrace.from_logits(logits, logits, actions[..., None], **inputs)


# --- the rows of a rollout -----------------------------------------------------------------------------------------


def test_masks_and_discounts_of_the_four_rows_by_hand():
    def flags(*rows):
        return torch.tensor(rows, dtype=torch.bool).unsqueeze(1)

    # first, ordinary, terminated, first, truncated, first, last row of the unroll
    mask, discounts = vtrace.transition_masks(
        done=flags(1, 0, 0, 1, 0, 1, 0),
        terminated=flags(0, 0, 1, 0, 0, 0, 0),
        truncated=flags(0, 0, 0, 0, 1, 0, 0),
        gamma=0.5,
    )
    assert mask[:, 0].tolist() == [True, True, False, True, False, True]
    assert discounts[:, 0].tolist() == [0.5, 0.0, 0.0, 0.5, 0.0, 0.5]
    assert discounts.dtype == torch.float32

    own, _ = vtrace.transition_masks(
        done=flags(1, 0, 0, 1, 0, 1, 0),
        terminated=flags(0, 0, 1, 0, 0, 0, 0),
        truncated=flags(0, 0, 0, 0, 1, 0, 0),
        gamma=0.5,
        counts=flags(0, 1, 1, 1, 0, 0, 1),  # another policy played the second episode
    )
    assert own[:, 0].tolist() == [True, True, False, False, False, True]

    # the same episodes when an environment resets in the step that ends an episode
    mask, discounts = vtrace.transition_masks(
        done=flags(1, 0, 1, 1, 0),
        terminated=flags(0, 0, 1, 0, 0),
        truncated=flags(0, 0, 0, 1, 0),
        gamma=0.5,
    )
    assert mask[:, 0].tolist() == [True, True, True, True]
    assert discounts[:, 0].tolist() == [0.5, 0.0, 0.0, 0.5]


def test_flags_that_are_not_bool_or_not_of_one_shape_are_refused():
    flags = torch.zeros(5, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="truncated has dtype torch.uint8"):
        vtrace.transition_masks(flags, flags, flags.byte(), 0.99)
    with pytest.raises(ValueError, match=r"terminated has shape \[4, 2\].*\[5, 2\]"):
        vtrace.transition_masks(flags, flags[1:], flags, 0.99)
    with pytest.raises(ValueError, match=r"done has shape \[1, 2\], expected \[T\+1, B\]"):
        vtrace.transition_masks(flags[:1], flags[:1], flags[:1], 0.99)
    with pytest.raises(ValueError, match=r"counts has shape \[4, 2\].*\[5, 2\]"):
        vtrace.transition_masks(flags, flags, flags, 0.99, flags[1:])
    with pytest.raises(ValueError, match=r"done has shape \[5\]"):
        vtrace.transition_masks(flags[:, 0], flags[:, 0], flags[:, 0], 0.99)
