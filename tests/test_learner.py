"""What the learner counts and saves, and how it tells of numbers that are not finite."""

import copy
import dataclasses
import math

import gymnasium
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers its environments
from gymnasium import spaces
from lock_step import LockStep, games, new_learner, small_flags, step

import monobeast
from beast.learn.learner import Counted, Learner
from beast.learn.nests import map_tensors
from beast.run import checkpoint
from monobeast import Flags, Net


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_resumed_learner_does_to_the_bit_what_it_would_have_done_without_the_stop(tmp_path, optimizer):
    flags = small_flags(core="lstm", optimizer=optimizer, total_steps=1000)
    lock_step = LockStep(flags)
    batches = []
    for _ in range(6):
        rollout, core_state = lock_step.next_rollout()
        batches.append((map_tensors(lambda x: x.clone(), rollout), core_state))

    def rate(learner: Learner, batch: dict, core_state: tuple) -> float:
        step(flags, learner, batch, core_state)
        return learner.optimizer.param_groups[0]["lr"]

    straight = new_learner(flags)
    for batch, core_state in batches[:3]:
        step(flags, straight, batch, core_state)
    straight.record_games(games((1.5, 10), (2.5, 20)))
    checkpoint.save(tmp_path / "checkpoint.pt", straight.state_dict())
    after_the_save = torch.rand(3)
    rates = [rate(straight, *batch) for batch in batches[3:]]

    resumed = new_learner(flags)
    resumed.load_state_dict(checkpoint.load(tmp_path / "checkpoint.pt"))
    assert torch.equal(torch.rand(3), after_the_save), "the random number generator goes on where it was"
    assert list(resumed.returns) == [1.5, 2.5] and list(resumed.lengths) == [10, 20] and resumed.episodes == 2
    assert [rate(resumed, *batch) for batch in batches[3:]] == rates
    assert (resumed.steps, resumed.updates) == (straight.steps, straight.updates)
    for a, b in zip(straight.net.state_dict().values(), resumed.net.state_dict().values()):
        assert torch.equal(a, b)


def test_moments_follow_their_weights_when_a_resume_changes_the_memory_format():
    observation_spaces, action_space = {"obs": spaces.Box(0, 255, (4, 84, 84), np.uint8)}, spaces.Discrete(6)
    generator = torch.Generator().manual_seed(1)
    batch = {
        "obs": {"obs": torch.randint(0, 256, (4, 2, 4, 84, 84), dtype=torch.uint8, generator=generator)},
        "reward": torch.randn(4, 2, generator=generator),
        "action": torch.randint(0, 6, (4, 2), generator=generator),
        "policy_logits": torch.zeros(4, 2, 6),
        "policy_version": torch.zeros(4, 2, dtype=torch.int32),
        **{name: torch.zeros(4, 2, dtype=torch.bool) for name in ("done", "terminated", "truncated")},
    }

    def flags_and_learner(channels_last: bool) -> tuple[Flags, Learner]:
        flags = monobeast.validate(Flags(channels_last=channels_last, learning_rate=1e-2, lr_decay="none"))
        torch.manual_seed(1)
        net = Net(observation_spaces, action_space, flags)
        return flags, Learner(net, monobeast.make_optimizer(flags, net), flags.max_bad_updates)

    flags, first = flags_and_learner(channels_last=True)
    for _ in range(3):
        step(flags, first, batch, ())
    state = copy.deepcopy(first.state_dict())
    weights = []
    for channels_last in (True, False):
        flags, resumed = flags_and_learner(channels_last)
        resumed.load_state_dict(copy.deepcopy(state))
        step(flags, resumed, batch, ())
        weights.append([parameter.detach().contiguous() for parameter in resumed.net.parameters()])
    for same, flipped in zip(*weights):
        torch.testing.assert_close(flipped, same, rtol=0, atol=2e-3)  # a step is 1e-2


def test_bad_updates_are_counted_and_a_good_one_ends_their_row(monkeypatch):
    flags = small_flags()
    batch = map_tensors(lambda x: x.clone(), LockStep(flags).next_rollout()[0])
    scale = [1.0]

    def compute_loss(*arguments, original=monobeast.compute_loss):
        loss, *others = original(*arguments)
        return loss * scale[0], *others

    monkeypatch.setattr(monobeast, "compute_loss", compute_loss)
    learner = new_learner(flags)
    for scale[0], counts in ((1.0, (0, 0)), (math.nan, (1, 1)), (math.inf, (2, 2)), (1.0, (2, 0))):
        step(flags, learner, batch, ())
        assert (learner.bad_updates, learner.bad_updates_in_a_row) == counts


class Arrived:
    """An event of a GPU that is over."""

    def synchronize(self):
        pass


def test_statistics_that_a_gpu_has_queued_are_counted_and_told_when_a_run_saves(tmp_path):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, tensorboard=False, max_bad_updates=1)
    learner = new_learner(flags)
    names = ["losses/grad_norm", "stats/policy_lag_max", "steps", "is_bad"]
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        learner._on_their_way = names, torch.tensor([2.5, 3.0, 32.0, 1.0]), Arrived(), {}
        training.save()  # and bad ones do not keep a run from saving
        assert training._gathered == [Counted(True, 3.0, {"losses/grad_norm": 2.5, "stats/policy_lag_max": 3.0})]
        assert (learner.steps, learner.bad_updates, learner.bad_updates_in_a_row) == (32, 1, 1)
        training.save()
        assert len(training._gathered) == 1 and learner.steps == 32
    assert checkpoint.load(training.run.checkpoint_path)["counts"]["steps"] == 32


def test_a_late_nan_of_a_gpu_is_blamed_on_its_own_rollout():
    learner = new_learner(small_flags(max_bad_updates=5))

    def columns(group: int, first_env: int) -> dict:
        origin = {"group": torch.full((3, 4), group), "env_number": torch.arange(first_env, first_env + 4).expand(3, 4)}
        return {"reward": torch.zeros(3, 4), **{name: x.int() for name, x in origin.items()}}

    healthy, spoiled = columns(group=7, first_env=8), columns(group=2, first_env=4)
    spoiled["reward"][1, 3] = math.nan
    names = ["stats/policy_lag_max", "steps", "is_bad"]
    learner._on_their_way = names, torch.tensor([0.0, 8.0, 1.0]), Arrived(), spoiled
    learner.settle(healthy)
    assert "reward of environment 7 in group 2 (in 1 of 4 environments" in learner.bad_inputs
    learner._on_their_way = names, torch.tensor([0.0, 8.0, 0.0]), Arrived(), healthy
    learner.settle()
    assert learner.bad_inputs == "" and learner.bad_updates == 1


@pytest.mark.parametrize("batch_width", [2, 4, 8])
@pytest.mark.parametrize("what, name", [("reward", "reward"), ("observation", "observation 'obs'")])
def test_nan_from_an_environment_is_told_with_its_number_and_group_and_not_blamed_on_the_learning_rate(
    tmp_path, monkeypatch, capfd, batch_width, what, name
):
    monkeypatch.setattr(monobeast.Training, "env_seed", lambda self, group, life: 100 * group)
    flags = small_flags(root=str(tmp_path), name="run", batch_width=batch_width, max_bad_updates=1)

    def create_env(flags, num_envs):
        return gymnasium.vector.SyncVectorEnv([lambda: toy_envs.NaNAtStep(102, what, 30)] * num_envs)

    monkeypatch.setattr(monobeast, "create_env", create_env)
    with pytest.raises(SystemExit):
        monobeast.train(dataclasses.replace(flags, total_steps=5000, tensorboard=False))
    told = capfd.readouterr().err
    message = f"NaN or Inf in {name} of environment 2 in group 1 (in 1 of {batch_width} environments of this update)"
    assert message in told.split("updates in a row")[1] and "--learning_rate" not in told, told
    flags = dataclasses.replace(flags, name="more", max_bad_updates=10_000)
    monobeast.train(dataclasses.replace(flags, total_steps=600, tensorboard=False))
    assert capfd.readouterr().err.count(f"an update was skipped: {message}") == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_return_that_is_no_number_does_not_stop_best_pt(tmp_path, bad):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, tensorboard=False)
    learner = new_learner(flags)
    with monobeast.Training("mono", flags, learner, set(), frames_per_step=1) as training:
        for returns in ([bad], 99 * [1.0]):
            learner.record_games(games(*((x, 10) for x in returns)))
            training.save()
        assert not training.run.best_path.exists()
        learner.record_games(games((2.0, 10)))  # the hundred games before it no longer hold the bad one
        training.save()
        assert checkpoint.load(training.run.best_path)["counts"]["best"] == pytest.approx(1.01)
    old = checkpoint.load(training.run.best_path)
    old["counts"]["best"] = math.inf  # as an earlier version saved it
    learner.load_state_dict(old)
    assert learner.best == -math.inf
