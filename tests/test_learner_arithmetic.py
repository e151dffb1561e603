"""The learner's arithmetic, on tensors by hand."""

import types

import torch

from beast.learn.learner import Learner, Outcome, describe_non_finite


def outcome(is_bad: bool, number: float) -> Outcome:
    return Outcome(torch.tensor(is_bad), torch.tensor(number), {"losses/entropy": torch.tensor(number + 0.5)})


def test_of_two_steps_the_first_bad_one_is_told_and_else_the_later_one():
    for first, second, told in ((False, False, 2.0), (False, True, 2.0), (True, False, 1.0), (True, True, 1.0)):
        found = outcome(first, 1.0).then(outcome(second, 2.0))
        assert found.is_bad == (first or second)
        assert (found.grad_norm, found.metrics["losses/entropy"]) == (told, told + 0.5)


def new_learner() -> Learner:
    net = torch.nn.Linear(1, 1)
    return Learner(net, torch.optim.SGD(net.parameters(), 0.1), max_bad_updates=9)


def spoiled(*where: tuple[int, int], group: int = 3) -> dict:
    """A batch [3, 4] of this group with a NaN reward in each of these rows and columns."""
    batch = {"reward": torch.zeros(3, 4), "group": torch.full((3, 4), group)}
    batch["env_number"] = torch.arange(4).expand(3, 4)
    for row, column in where:
        batch["reward"][row, column] = torch.nan
    return batch


def test_of_several_spoiled_environments_the_first_in_time_is_named():
    found = describe_non_finite(spoiled((2, 0), (1, 3), (1, 2)))
    assert found.startswith("NaN or Inf in reward of environment 2 in group 3 (in 3 of 4 environments")


def test_a_late_bad_update_is_blamed_on_its_own_batch_and_only_else_on_the_next_one():
    for own, following, group in ((((0, 1),), ((0, 2),), 3), ((), ((0, 2),), 4)):
        learner, arrived = new_learner(), types.SimpleNamespace(synchronize=lambda: None)
        names = ["steps", "is_bad", "stats/policy_lag_max"]
        learner._on_their_way = names, torch.tensor([12.0, 1.0, 0.0]), arrived, spoiled(*own)
        counted = learner.settle(spoiled(*following, group=4))
        assert counted.is_bad and learner.steps == 12 and f"in group {group} " in learner.bad_inputs


def test_a_batch_is_measured_by_the_steps_that_count_and_the_versions_that_chose_its_actions():
    learner = new_learner()
    learner.updates = 9
    batch = {name: torch.zeros(4, 2, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    batch["truncated"][1, 0] = batch["done"][2, 0] = True  # nobody acts from row 1
    batch["terminated"][3, 1] = True  # the last row begins no step of this rollout
    batch["policy_version"] = torch.tensor([[0, 0], [4, 9], [6, 9], [9, 8]], dtype=torch.int32)
    measured = learner.measure(batch)
    assert measured.batch is batch and measured.steps == 5
    assert measured.lag_max == 5 and measured.lag_mean == (5 + 3 + 0 + 0 + 0 + 1) / 6
