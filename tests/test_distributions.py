"""Action distributions against torch's own, against literal numbers and against frequencies."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from beast.envs.spaces import action_shape_dtype, policy_width
from beast.learn.distributions import action_layout, distribution, to_features

BOX = spaces.Box(-2.0, 2.0, (2, 3), dtype=np.float64)
GRID = spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))
NESTED = spaces.Tuple([spaces.Discrete(3), spaces.Tuple([spaces.MultiDiscrete([2, 4]), spaces.Discrete(2, start=7)])])
BUTTONS = spaces.Dict(keys=spaces.MultiBinary(2), aim=spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4, start=2))))
LAYOUTS = [  # space, action shape, dtype, parameters, encoded width
    (spaces.Discrete(6), (), np.int64, 6, 6),
    (spaces.Discrete(4, start=-1), (), np.int64, 4, 4),
    (spaces.MultiDiscrete([5]), (1,), np.int64, 5, 5),
    (GRID, (4,), np.int64, 2 + 3 + 4 + 5, 2 + 3 + 4 + 5),
    (NESTED, (4,), np.int64, 3 + 2 + 4 + 2, 3 + 2 + 4 + 2),
    (spaces.MultiBinary(3), (3,), np.int64, 6, 3),
    (spaces.MultiBinary([2, 3]), (6,), np.int64, 12, 6),
    (BUTTONS, (4,), np.int64, 3 + 4 + 4, 3 + 4 + 2),
    (BOX, (6,), np.float32, 2 * 6, 6),
    (spaces.Box(-1.0, 1.0, ()), (1,), np.float32, 2, 1),
]
SUPPORTED = [layout[0] for layout in LAYOUTS]


def parameters_for(space, leading=(7, 5), seed=0):
    return torch.randn(*leading, policy_width(space), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("space", "shape", "dtype", "width", "encoded"), LAYOUTS)
def test_a_space_tells_what_its_actions_and_parameters_are(space, shape, dtype, width, encoded):
    assert action_shape_dtype(space) == (shape, np.dtype(dtype))
    assert policy_width(space) == width
    assert to_features(action_layout(space), distribution(space, torch.zeros(width)).mode()).shape == (encoded,)


@pytest.mark.parametrize("space", SUPPORTED)
@pytest.mark.parametrize("leading", [(), (5,), (3, 4)])
def test_samples_modes_and_their_measures_have_the_shapes_of_the_rollout(space, leading):
    policy = distribution(space, parameters_for(space, leading))
    shape, dtype = action_shape_dtype(space)
    for action in (policy.sample(), policy.mode()):
        assert action.shape == leading + shape
        assert action.numpy().dtype == dtype
        assert policy.log_prob(action).shape == policy.entropy().shape == leading
        encoded = to_features(action_layout(space), action)
        assert encoded.shape == (*leading, spaces.flatdim(space)) and encoded.dtype == torch.float32


@pytest.mark.parametrize("space", SUPPORTED)
def test_a_generator_makes_samples_repeatable(space):
    policy = distribution(space, parameters_for(space, (64,)))

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return policy.sample(generator), policy.sample(generator)

    first, second = draw(1)
    again_first, again_second = draw(1)
    assert torch.equal(first, again_first) and torch.equal(second, again_second)
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(2)[0])


def test_discrete_measures_are_those_of_torch():
    logits = parameters_for(spaces.Discrete(6))
    policy, reference = distribution(spaces.Discrete(6), logits), torch.distributions.Categorical(logits=logits)
    action = policy.sample()
    torch.testing.assert_close(policy.log_prob(action), reference.log_prob(action))
    torch.testing.assert_close(policy.entropy(), reference.entropy())
    assert torch.equal(policy.mode(), logits.argmax(-1))


@pytest.mark.parametrize(("space", "sizes"), [(GRID, [2, 3, 4, 5]), (NESTED, [3, 2, 4, 2])])
def test_joint_measures_are_sums_over_the_parts_in_order(space, sizes):
    logits = parameters_for(space)
    policy = distribution(space, logits)
    parts = [torch.distributions.Categorical(logits=part) for part in logits.split(sizes, dim=-1)]
    action = policy.sample()
    assert (action >= 0).all() and (action < torch.tensor(sizes)).all()
    expected = sum(part.log_prob(choice) for part, choice in zip(parts, action.unbind(-1)))
    torch.testing.assert_close(policy.log_prob(action), expected)
    torch.testing.assert_close(policy.entropy(), sum(part.entropy() for part in parts))
    assert torch.equal(policy.mode(), torch.stack([part.logits.argmax(-1) for part in parts], dim=-1))


def test_discrete_measures_by_hand():
    policy = distribution(spaces.Discrete(3), torch.tensor([[1.0, 2.0, 5.0]]).log())
    assert policy.log_prob(torch.tensor([1])).item() == pytest.approx(math.log(2 / 8))
    entropy = -(1 / 8 * math.log(1 / 8) + 2 / 8 * math.log(2 / 8) + 5 / 8 * math.log(5 / 8))
    assert policy.entropy().item() == pytest.approx(entropy)


def test_choices_are_drawn_as_often_as_their_probabilities_say():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = 40_000
    policy = distribution(spaces.Discrete(4), probabilities.log().expand(draws, 4))
    counts = torch.bincount(policy.sample(torch.Generator().manual_seed(0)), minlength=4)
    deviation = (counts - draws * probabilities) / (draws * probabilities * (1 - probabilities)).sqrt()
    assert deviation.abs().max() < 4  # standard deviations


def test_joint_choices_are_drawn_independently():
    draws = 40_000
    policy = distribution(spaces.MultiDiscrete([2, 2]), torch.tensor([0.3, 0.7, 0.6, 0.4]).log().expand(draws, 4))
    pairs = policy.sample(torch.Generator().manual_seed(0))
    counts = torch.bincount(2 * pairs[:, 0] + pairs[:, 1], minlength=4)
    probabilities = torch.tensor([0.3 * 0.6, 0.3 * 0.4, 0.7 * 0.6, 0.7 * 0.4])
    deviation = (counts - draws * probabilities) / (draws * probabilities * (1 - probabilities)).sqrt()
    assert deviation.abs().max() < 4  # standard deviations


def test_a_forbidden_choice_is_never_drawn_and_leaves_entropy_and_gradient_finite():
    logits = torch.tensor([0.0, -math.inf, 0.0]).repeat(10_000, 1).requires_grad_()
    policy = distribution(spaces.Discrete(3), logits)
    action = policy.sample(torch.Generator().manual_seed(0))
    assert not (action == 1).any()
    assert policy.entropy()[0].item() == pytest.approx(math.log(2))
    (policy.entropy() + policy.log_prob(action)).sum().backward()
    assert logits.grad.isfinite().all() and (logits.grad[:, 1] == 0).all()


def test_gaussian_measures_are_those_of_torch():
    parameters = parameters_for(BOX).clamp(-1.9, 1.9)
    mean, log_std = parameters.chunk(2, dim=-1)
    policy, reference = distribution(BOX, parameters), torch.distributions.Normal(mean, log_std.exp())
    action = policy.sample()
    torch.testing.assert_close(policy.log_prob(action), reference.log_prob(action).sum(-1))
    torch.testing.assert_close(policy.entropy(), reference.entropy().sum(-1))
    assert torch.equal(policy.mode(), mean)


def test_gaussian_samples_have_the_mean_and_deviation_asked_for():
    space = spaces.Box(-1.0, 1.0, (2,))
    policy = distribution(space, torch.tensor([0.5, -3.0, math.log(0.1), math.log(2.0)]).expand(40_000, 4))
    action = policy.sample(torch.Generator().manual_seed(0))
    deviation = torch.tensor([0.1, 2.0])
    assert ((action.mean(0) - torch.tensor([0.5, -3.0])).abs() < 4 * deviation / 200).all()
    assert ((action.std(0) / deviation - 1).abs() < 0.02).all()


def test_the_log_standard_deviation_is_clamped_on_both_sides():
    space = spaces.Box(-1.0, 1.0, (2,))
    policy = distribution(space, torch.tensor([0.0, 0.0, -100.0, 100.0]))
    assert policy.log_std.tolist() == [-5.0, 2.0]
    assert policy.log_prob(torch.zeros(2)).item() == pytest.approx(5.0 - 2.0 - 2 * 0.5 * math.log(2 * math.pi))


@pytest.mark.parametrize("start, inside", [(6.0, 1.0), (-9.0, -4.0)])
def test_outside_its_bounds_a_log_standard_deviation_has_a_gradient_back_and_none_further_out(start, inside):
    space, action = spaces.Box(-1.0, 1.0, (1,)), torch.tensor([math.exp(inside)])  # most probable at that deviation
    parameters = torch.tensor([0.0, start], requires_grad=True)
    bound = max(min(start, 2.0), -5.0)
    for step in range(200):
        policy = distribution(space, parameters)
        assert step > 0 or policy.log_std.item() == bound
        (gradient,) = torch.autograd.grad(-policy.log_prob(action).sum(), parameters)
        if step == 0:
            assert gradient[1].item() == pytest.approx(1 - math.exp(2 * (inside - bound))), "that at the bound"
        parameters = (parameters - 0.1 * gradient * torch.tensor([0.0, 1.0])).detach().requires_grad_()
    assert parameters[1].item() == pytest.approx(inside, abs=0.01)

    parameters = torch.tensor([0.0, start], requires_grad=True)
    outward = distribution(space, parameters).log_std.sum() * (-1 if start > 0 else 1)  # as a loss
    assert torch.autograd.grad(outward, parameters)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("space", SUPPORTED)
def test_log_probabilities_have_gradients_and_samples_have_none(space):
    parameters = parameters_for(space).requires_grad_()
    policy = distribution(space, parameters)
    action = policy.sample()
    assert not action.requires_grad
    policy.log_prob(action).sum().backward()
    assert (parameters.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("space", SUPPORTED)
def test_bfloat16_parameters_are_measured_in_float32(space):
    parameters = parameters_for(space).bfloat16()
    low, full = distribution(space, parameters), distribution(space, parameters.float())
    action = full.sample()
    assert low.log_prob(action).dtype == low.entropy().dtype == torch.float32
    assert torch.equal(low.log_prob(action), full.log_prob(action)) and torch.equal(low.entropy(), full.entropy())


def test_an_action_is_encoded_one_hot_for_each_part():
    assert to_features(action_layout(spaces.Discrete(3)), torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    action = torch.tensor([[2, 0, 3, 1]])
    assert to_features(action_layout(NESTED), action).tolist() == [[0, 0, 1] + [1, 0] + [0, 0, 0, 1] + [0, 1]]


def test_a_box_action_is_encoded_clamped():
    action = torch.tensor([[-7.0, -0.5, 3.0]])
    assert to_features(action_layout(spaces.Box(-4.0, 4.0, (3,))), action).tolist() == [[-1.0, -0.5, 1.0]]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (2,), dtype=np.uint8),
        spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,))]),
        spaces.Dict({"a": spaces.Discrete(2), "power": spaces.Box(-1.0, 1.0, (2,))}),
        spaces.Tuple([]),
    ],
)
def test_an_unsupported_space_is_refused_by_name(space):
    calls = [action_shape_dtype, policy_width]
    calls += [
        lambda space: distribution(space, torch.zeros(4)),
        lambda space: to_features(action_layout(space), torch.zeros(4)),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call(space)
        assert str(space) in str(error.value) and "supported are Discrete, MultiDiscrete" in str(error.value)


@pytest.mark.parametrize("space", SUPPORTED)
def test_parameters_of_a_wrong_width_are_refused(space):
    width = policy_width(space)
    for wrong in (width + 1, width - 1):
        with pytest.raises(ValueError, match=rf"has shape \[5, {wrong}\], expected {width} numbers"):
            distribution(space, torch.zeros(5, wrong))
    with pytest.raises(ValueError, match=rf"expected {width} numbers"):
        distribution(space, torch.tensor(0.0))


@pytest.mark.parametrize("space", SUPPORTED)
def test_an_action_of_a_wrong_shape_is_refused(space):
    policy = distribution(space, parameters_for(space, (5,)))
    shape, _ = action_shape_dtype(space)
    for wrong in ((4, *shape), (5, 9, *shape), (1, *shape), (5, *shape, 2)):
        with pytest.raises(ValueError, match=r"action has shape .*, expected"):
            policy.log_prob(torch.zeros(wrong))
    if shape:
        with pytest.raises(ValueError, match=r"action has shape .*, expected"):
            to_features(action_layout(space), torch.zeros(5, shape[0] + 1))
