"""The learner's arithmetic, on tensors by hand."""

import torch

from beast.learn.learner import Outcome


def outcome(is_bad: bool, number: float) -> Outcome:
    return Outcome(torch.tensor(is_bad), torch.tensor(number), {"losses/entropy": torch.tensor(number + 0.5)})


def test_of_two_steps_the_first_bad_one_is_told_and_else_the_later_one():
    for first, second, told in ((False, False, 2.0), (False, True, 2.0), (True, False, 1.0), (True, True, 1.0)):
        found = outcome(first, 1.0).then(outcome(second, 2.0))
        assert found.is_bad == (first or second)
        assert (found.grad_norm, found.metrics["losses/entropy"]) == (told, told + 0.5)
