"""The learner's arithmetic, on tensors by hand."""

import torch

from beast.learn.learner import Learner, Outcome


def outcome(is_bad: bool, number: float) -> Outcome:
    return Outcome(torch.tensor(is_bad), torch.tensor(number), {"losses/entropy": torch.tensor(number + 0.5)})


def test_of_two_steps_the_first_bad_one_is_told_and_else_the_later_one():
    for first, second, told in ((False, False, 2.0), (False, True, 2.0), (True, False, 1.0), (True, True, 1.0)):
        found = outcome(first, 1.0).then(outcome(second, 2.0))
        assert found.is_bad == (first or second)
        assert (found.grad_norm, found.metrics["losses/entropy"]) == (told, told + 0.5)


def test_a_batch_is_measured_by_the_steps_that_count_and_the_versions_that_chose_its_actions():
    net = torch.nn.Linear(1, 1)
    learner = Learner(net, torch.optim.SGD(net.parameters(), 0.1), max_bad_updates=1)
    learner.updates = 9
    batch = {name: torch.zeros(4, 2, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    batch["truncated"][1, 0] = batch["done"][2, 0] = True  # nobody acts from row 1
    batch["terminated"][3, 1] = True  # the last row begins no step of this rollout
    batch["policy_version"] = torch.tensor([[0, 0], [4, 9], [6, 9], [9, 8]], dtype=torch.int32)
    measured = learner.measure(batch)
    assert measured.batch is batch and measured.steps == 5
    assert measured.lag_max == 5 and measured.lag_mean == (5 + 3 + 0 + 0 + 0 + 1) / 6
