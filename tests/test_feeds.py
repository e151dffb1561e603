"""Feeds: slow groups, old rollouts, where rollouts come from, batches that an update edits, weights on their way."""

import collections
import dataclasses

import lock_step
import numpy as np
import pytest
import torch
import toy_envs
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lock_step import LockStep, new_learner, new_net, small_flags, step

import monobeast
from beast.feeds.actors import LocalActors
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.learn import published
from beast.learn.learner import Learner
from beast.learn.nests import map_tensors
from beast.run import checkpoint, training
from beast.run.training import Training


def trained_batches(monkeypatch, flags) -> list[dict]:
    """Copies of all batches that a run with these flags trains on."""
    batches = []

    def update(flags, learner, batch, core_state, original=monobeast.update):
        batches.append(map_tensors(torch.clone, batch))
        return original(flags, learner, batch, core_state)

    monkeypatch.setattr(monobeast, "update", update)
    monobeast.train(dataclasses.replace(flags, tensorboard=False))
    return batches


class SlowGroup(LocalActors):
    """Group 0 is ready once in 20 times."""

    turn = 0

    def wait(self, timeout):
        self.turn += 1
        if self._ready and self._ready[0] == 0 and self.turn % 20:
            self._ready.rotate(-1)
        return super().wait(timeout)


def test_a_slow_group_holds_nobody_up_and_its_rollouts_are_trained_when_they_come(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "LocalActors", SlowGroup)
    flags = small_flags(root=str(tmp_path), name="run", total_steps=8000)
    groups = [int(batch["group"][0, 0]) for batch in trained_batches(monkeypatch, flags)]
    assert 5 < groups.count(0) < len(groups) / 8, "hand-out order would train both equally often"


def test_a_rollout_that_would_be_older_than_max_policy_lag_is_dropped_and_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "LocalActors", SlowGroup)
    flags = small_flags(root=str(tmp_path), name="run", total_steps=4000, max_policy_lag=3, batch_width=1)
    lags, feeds = [], []

    def measure(self, batch, original=Learner.measure):
        lags.append(int((self.updates - batch["policy_version"][1:]).max()))
        return original(self, batch)

    monkeypatch.setattr(Learner, "measure", measure)
    monkeypatch.setattr(Training, "run_threads", lambda self, feed, original=Training.run_threads, **others: (
        feeds.append(feed), original(self, feed, **others)))  # fmt: skip
    groups = [int(batch["group"][0, 0]) for batch in trained_batches(monkeypatch, flags)]
    assert max(lags) == 3, "the limit is used, and never passed"
    assert 0 not in groups and feeds[0].dropped_rollouts > 5


def test_every_row_of_a_rollout_names_its_group_and_the_life_of_its_environments(monkeypatch, tmp_path):
    flags = small_flags(
        env="toy_envs:CrashAtStep-v0", root=str(tmp_path), name="run", total_steps=1000, deterministic=False,
        max_env_restarts=1000,
    )  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", "tests")
    origins = set()
    for batch in trained_batches(monkeypatch, flags):
        assert (batch["group"] == batch["group"][0, 0]).all() and (batch["life"] == batch["life"][0, 0]).all()
        origins.add((int(batch["group"][0, 0]), int(batch["life"][0, 0])))
    assert {group for group, _ in origins} == {0, 1}
    assert {life for _, life in origins} >= {0, 1}, "a crash begins another life"


def test_an_update_may_edit_its_batch_in_place_and_an_edit_of_observations_raises(monkeypatch, tmp_path):
    original = monobeast.update

    def careless(flags, learner, batch, core_state):
        outcome = original(flags, learner, batch, core_state)
        for name in ("reward", "done", "terminated", "truncated", "action", "baseline", "policy_logits"):
            batch[name].fill_(1)
        return outcome

    flags = small_flags(root=str(tmp_path), total_steps=3000, tensorboard=False)
    monobeast.train(dataclasses.replace(flags, name="careful"))
    monkeypatch.setattr(monobeast, "update", careless)
    monobeast.train(dataclasses.replace(flags, name="careless"))
    nets = [checkpoint.load(tmp_path / name / "checkpoint.pt")["net"] for name in ("careful", "careless")]
    assert all(torch.equal(a, b) for a, b in zip(nets[0].values(), nets[1].values()))

    def reckless(flags, learner, batch, core_state):
        batch["obs"]["obs"].mul_(2)
        return original(flags, learner, batch, core_state)

    monkeypatch.setattr(monobeast, "update", reckless)
    with pytest.raises(SystemExit):
        monobeast.train(dataclasses.replace(flags, name="reckless"))
    assert "wrote into the observations 'obs'" in (tmp_path / "reckless" / "out.log").read_text()


def test_a_truncation_in_a_same_step_rollout_bootstraps_from_its_own_last_observation(monkeypatch):
    """The counting environment tells its step in each observation: the net values an observation by it."""

    def create_env(flags, num_envs):
        envs = [toy_envs.Counting for _ in range(num_envs)]
        return SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)

    monkeypatch.setattr(monobeast, "create_env", create_env)
    lock_step = LockStep(small_flags(env="Counting"))
    with torch.no_grad():
        for parameter in lock_step.net.parameters():
            parameter.zero_()
    forward = lock_step.net.forward
    lock_step.net.forward = lambda inputs, state: (
        forward(inputs, state)[0], 10 * inputs["obs"]["obs"][..., 2] + 1, state
    )  # fmt: skip
    seen = 0
    for _ in range(20):
        rollout, core_state = lock_step.next_rollout()
        values = monobeast.final_values(lock_step.net, rollout, core_state)
        cut = (rollout["truncated"] & ~rollout["terminated"])[1:]
        length = rollout["episode_step"][:-1] + 1  # of an episode that ends with the next row
        expected = torch.where(cut, 10.0 * length + 1, 0.0)
        torch.testing.assert_close(values, expected)
        seen += int(cut.sum())
    assert seen > 50


def test_a_run_resumes_on_another_kind_of_device(tmp_path):
    """A GPU's generator has a state of 16 bytes."""
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, tensorboard=False)
    monobeast.train(flags)
    path = tmp_path / "run" / "checkpoint.pt"
    state = checkpoint.load(path)
    checkpoint.save(path, {**state, "action_rng": torch.zeros(16, dtype=torch.uint8)})
    monobeast.train(dataclasses.replace(flags, total_steps=2000))
    assert checkpoint.load(path)["counts"]["steps"] >= 2000
    assert "action noise begins anew" in (tmp_path / "run" / "out.log").read_text()


def test_a_run_that_bad_updates_stopped_resumes_with_another_learning_rate(tmp_path, monkeypatch):
    flags = small_flags(root=str(tmp_path), name="run", total_steps=1000, tensorboard=False, max_bad_updates=3)
    original = monobeast.compute_loss
    monkeypatch.setattr(monobeast, "compute_loss", lambda *batch: (original(*batch)[0] * np.nan, *original(*batch)[1:]))
    with pytest.raises(SystemExit):
        monobeast.train(flags)
    monkeypatch.setattr(monobeast, "compute_loss", original)
    monobeast.train(dataclasses.replace(flags, learning_rate=1e-5, grad_clip=0.1))
    assert checkpoint.load(tmp_path / "run" / "checkpoint.pt")["counts"]["steps"] >= 1000


def test_bad_updates_in_a_row_are_looked_at_when_their_statistics_arrive(monkeypatch):
    """A GPU's come one update late: one without numbers must not end the run again."""
    flags = small_flags(max_bad_updates=2)
    lock_step, learner = LockStep(flags), new_learner(flags)
    rollout, core_state = lock_step.next_rollout()
    learner.load_state_dict({**learner.state_dict(), "counts": {"bad_updates_in_a_row": 2, "steps": 7}})
    assert learner.steps == 7 and step(flags, learner, rollout, core_state)


class Written:
    """The fence of a copy that a GPU may still be writing."""

    is_done = True

    def __init__(self, device):
        self.waits = 0

    def set(self):
        self.is_done = False

    def is_reached(self):
        return self.is_done

    def wait(self):
        self.waits += 1


def test_inference_acts_with_the_other_weights_while_a_gpu_writes_the_newest(monkeypatch):
    monkeypatch.setattr(published, "Fence", Written)
    net = new_net(small_flags())
    both = published.PublishedWeights(net, 0)
    for fence in both._read:
        fence.set = lambda: None
    both.publish(net, 1)
    with both.newest() as (_, version):
        assert version == 0, "update 1 is not done"
    both._written[both._current].is_done = True
    with both.newest() as (_, version):
        assert version == 1
    both.publish(net, 2)
    with both.newest() as (_, version):
        assert version == 1


def test_rows_say_of_which_group_they_are_before_they_are_answered(monkeypatch):
    origins = set()

    def acting(feed, original=SharedMemoryFeed.acting):
        for rows in original(feed):
            origins.add((int(rows.inputs["group"][0, 0]), int(rows.inputs["life"][0, 0])))
            yield rows

    monkeypatch.setattr(SharedMemoryFeed, "acting", acting)
    lock_step = LockStep(small_flags())
    for _ in range(4):
        lock_step.next_rollout()
    assert origins == {(0, 0), (1, 0)}


class Together(LocalActors):
    """All groups that are ready, as a GPU answers them."""

    def wait(self, timeout):
        ready, self._ready = list(self._ready), collections.deque()
        return ready, []


def test_groups_that_are_answered_together_get_their_own_columns(monkeypatch):
    answered = []

    def acting(feed):
        while feed.slots.may_act():
            if ready := feed._ready_groups():
                answered.append(len(ready))
                yield feed._rows(ready)

    monkeypatch.setattr(lock_step, "LocalActors", Together)
    monkeypatch.setattr(SharedMemoryFeed, "acting", acting)
    test = LockStep(small_flags(core="lstm", num_slots=4))
    for _ in range(12):
        rollout, core_state = test.next_rollout()
        with torch.no_grad():
            values = test.net(rollout, core_state)[1]
        torch.testing.assert_close(values[:-1], rollout["baseline"][1:], rtol=1e-5, atol=1e-5)
    assert max(answered) == 2
