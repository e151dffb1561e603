"""Feeds: slow groups, old rollouts, where rollouts come from, batches that an update edits, weights on their way."""

import collections
import dataclasses
import threading
import time
from unittest import mock

import lock_step
import numpy as np
import pytest
import torch
import toy_envs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lock_step import LockStep, new_learner, new_net, small_flags, step
from waiting import PATIENCE

import monobeast
from beast.clock import Laps
from beast.envs.rows import ROW_FIELDS, RowField, rollout_fields, written_by
from beast.envs.spaces import EnvSpaces
from beast.feeds.actors import LocalActors
from beast.feeds.feed import Consumer
from beast.feeds.memory import RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.learn import published
from beast.learn.learner import Learner
from beast.learn.nests import map_tensors
from beast.learn.replay import SequenceReplay
from beast.run import checkpoint, training
from beast.run.training import Training, consumer_of


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


@pytest.mark.parametrize("stagger", [True, False])
def test_staggered_groups_stay_a_fourth_of_a_rollout_apart_and_others_end_their_rollouts_together(stagger):
    lock_step = LockStep(small_flags(num_actors=2, stagger=stagger))
    last_rows: dict[int, torch.Tensor] = {}
    for number in range(120):
        rollout, _ = lock_step.next_rollout()  # acting stands still until the next one is asked for
        group = int(rollout["group"][0, 0])
        assert group == number % 4, "groups of one speed are trained equally often"
        if number >= 4:
            assert torch.equal(rollout["obs"]["obs"][0], last_rows[group]), "no row is lost, none is trained twice"
        last_rows[group] = rollout["obs"]["obs"][-1].clone()
        if number == 3:
            time.sleep(0.5)  # three groups wait for the first one: in lock step no time changes what comes next
        rows = [lock_step.feed.groups[(group + k) % 4].row % 8 for k in range(4)]
        if not stagger:
            assert set(rows) <= {0, 1}
        elif number >= 4:  # the first rollouts begin together
            # Who comes first in a turn is a step ahead.
            assert rows in ([1, 7, 5, 3], [1, 7, 5, 2], [1, 7, 4, 2], [1, 6, 4, 2])


@pytest.mark.parametrize("num_actors, batch_width, steps", [(5, 4, 5), (10, 2, 20)], ids=["5 batches", "20 batches"])
def test_with_as_many_batches_as_steps_there_is_an_update_every_step(num_actors, batch_width, steps):
    flags = small_flags(
        num_actors=num_actors, group_width=2, batch_width=batch_width, unroll_length=steps, stagger=True
    )
    lock_step, num_groups, num_rows, at = LockStep(flags), 2 * num_actors, 0, []
    go = lock_step.feed.actors.go

    def counted(*arguments):
        nonlocal num_rows
        num_rows += 1
        go(*arguments)

    lock_step.feed.actors.go = counted
    for _ in range(5 * steps):
        lock_step.next_rollout()
        at.append(num_rows / num_groups)
    between = np.diff(at[2 * steps :])
    assert between.min() > 0.9 and between.max() < 2 and abs(between.mean() - 1) < 0.02


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

    flags = small_flags(root=str(tmp_path), total_steps=1000, tensorboard=False)
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

    def acting(feed, original=SharedMemoryFeed.acting):
        for rows in original(feed):
            answered.append(rows.inputs["done"].shape[1] // 4)
            yield rows

    monkeypatch.setattr(lock_step, "LocalActors", Together)
    monkeypatch.setattr(SharedMemoryFeed, "acting", acting)
    test = LockStep(small_flags(core="lstm", num_slots=4), joins_groups=True)
    for _ in range(12):
        rollout, core_state = test.next_rollout()
        with torch.no_grad():
            values = test.net(rollout, core_state)[1]
        torch.testing.assert_close(values[:-1], rollout["baseline"][1:], rtol=1e-5, atol=1e-5)
    assert max(answered) == 2


def vector_of(env_class, autoreset_mode=AutoresetMode.NEXT_STEP):
    return lambda flags, num_envs: SyncVectorEnv([env_class] * num_envs, autoreset_mode=autoreset_mode)


def test_rows_have_all_that_environments_and_the_feed_write_and_the_last_action(monkeypatch):
    monkeypatch.setattr(monobeast, "create_env", vector_of(toy_envs.Counting, AutoresetMode.SAME_STEP))
    seen: dict[int, list[dict]] = {0: [], 1: []}

    def acting(feed, original=SharedMemoryFeed.acting):
        for rows in original(feed):
            seen[int(rows.inputs["group"][0, 0])].append(map_tensors(torch.clone, rows.inputs))
            yield rows

    monkeypatch.setattr(SharedMemoryFeed, "acting", acting)
    test = LockStep(small_flags(env="Counting"))
    T = test.flags.unroll_length
    for number in range(6):
        rollout, _ = test.next_rollout()
        group, before = int(rollout["group"][0, 0]), T * (number // 2)
        for t in range(T):
            found = seen[group][before + t]
            assert found.keys() == {"obs", "final_obs", "action", *written_by("env"), *written_by("feed")}
            expected = map_tensors(lambda x, t=t: x[t : t + 1], {name: rollout[name] for name in found})
            map_tensors(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), found, expected)


def numbers_told(observations) -> np.ndarray:
    """What `Telling` has in its infos with these observations [..., 3]."""
    number, episode, step = np.moveaxis(np.asarray(observations).astype(np.int32), -1, 0)
    return 1000 * episode + 10 * step + number % 10


class Telling(toy_envs.Counting):
    """Its infos tell `lives`, a number that follows from the observation."""

    def reset(self, **options):
        observation, _ = super().reset(**options)
        return observation, {"lives": int(numbers_told(observation))}

    def step(self, action):
        observation, *others, _ = super().step(action)
        return observation, *others, {"lives": int(numbers_told(observation))}


@pytest.fixture
def lives(monkeypatch):
    """One line: a new field of a row."""
    monkeypatch.setitem(ROW_FIELDS, "lives", RowField("int32", "env", is_replayed=True))


def check_lives(batch: dict) -> None:
    assert batch["lives"].dtype == torch.int32
    np.testing.assert_array_equal(batch["lives"], numbers_told(batch["obs"]["obs"]))
    assert len(batch["lives"].unique()) > 10


def test_a_new_line_in_the_table_of_fields_reaches_rows_rollouts_and_the_replay(monkeypatch, lives):
    monkeypatch.setattr(monobeast, "create_env", vector_of(Telling))
    test = LockStep(small_flags(env="Counting"))
    replay = SequenceReplay(
        rollout_fields(test.spaces), [], 2, 4, unroll_length=8, burn_in=8, trained=8, stride=8, capacity_gb=1e-3
    )
    for _ in range(8):
        rollout, core_state = test.next_rollout()
        check_lives(rollout)
        replay.add(rollout, core_state)
    check_lives(replay.sample(16, torch.device("cpu")).rows)


def test_a_new_line_in_the_table_of_fields_reaches_the_rollouts_of_env_servers(unix, lives):
    libbeast = pytest.importorskip("libbeast", reason="libbeast is not built: make libbeast", exc_type=ImportError)
    from pools import in_process_server

    from beast.feeds.remote import RemoteFeed
    from beast.hosts.served_group import VectorEnvGroup

    learner = new_learner(small_flags())
    with in_process_server(lambda: VectorEnvGroup(vector_of(Telling)(None, 4)), unix):
        hello = dict(libbeast.handshake(unix, timeout=PATIENCE))
        feed = RemoteFeed(
            consumer_of(learner, 0), spaces.Discrete(2), [unix], None, None, unroll_length=8, group_width=4,
            batch_width=4, queue_width=4, inference_width=0, log=print, min_streams=1, seed=7, expected=hello,
            env_timeout=PATIENCE, connect_timeout=PATIENCE, max_env_restarts=0,
        )  # fmt: skip
        acted_on, answered = [], []

        def act():
            for rows in feed.acting():
                acted_on.append(map_tensors(torch.clone, rows.inputs))
                answered.append(len(answered) + torch.tensor([[5, 7, 3, 9]], dtype=torch.int32))
                zeros = torch.zeros(1, 4)
                rows.answer(zeros.long(), torch.zeros(1, 4, 2), zeros, answered[-1], ())

        threads = [threading.Thread(target=target, daemon=True) for target in (feed.pool.run, act)]
        assert list(feed.rollouts(limit=0.01)) == [], "no environment steps yet"
        for thread in threads:
            thread.start()
        rollouts = feed.rollouts(limit=PATIENCE)
        try:
            for number in range(3):
                rollout, _ = next(rollouts)
                check_lives(rollout)
                versions = torch.cat(answered[8 * number : 8 * (number + 1)])
                assert torch.equal(rollout["policy_version"][1:], versions), "each column has its own"
                seen = torch.cat([inputs["lives"] for inputs in acted_on[8 * number : 8 * (number + 1)]])
                assert torch.equal(rollout["lives"][:-1], seen)
        finally:
            feed.close()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    assert list(feed.rollouts()) == []


@pytest.mark.parametrize("joins_groups", [False, True])
def test_each_column_is_answered_by_a_version_of_its_own_and_the_oldest_decides_about_the_lag(
    monkeypatch, joins_groups
):
    """The oldest action of group 0 is 4 updates old, and that of group 1 is 3."""
    answered: dict[int, list] = {0: [], 1: []}

    def act(training, feed, weights):
        for rows in feed.acting():
            groups, columns = rows.inputs["group"][0], rows.inputs["env_number"][0]
            versions = torch.where(columns == 2, 6 + groups, 10 - columns)  # 10, 9, 6 or 7, 7
            for group in groups.unique().tolist():
                answered[group].append(versions[groups == group])
            zeros = torch.zeros(1, len(groups))
            rows.answer(zeros.long(), zeros.unsqueeze(-1).repeat(1, 1, 2), zeros, versions[None].int(), ())
            if len(answered[1]) > 500:  # all rollouts are dropped
                feed.close()

    def make_learner(flags):
        learner = new_learner(flags)
        learner.updates = 10
        return learner

    monkeypatch.setattr(lock_step, "LocalActors", Together)
    for limit, expected in ((0, {0, 1}), (4, {0, 1}), (3, {1})):
        flags = small_flags(max_policy_lag=limit, num_slots=4)
        test = LockStep(flags, make_learner=make_learner, act=act, joins_groups=joins_groups)
        groups = set()
        for _ in range(6):
            rollout, _ = test.next_rollout()
            group = int(rollout["group"][0, 0])
            assert rollout["policy_version"].dtype == torch.int32
            assert (rollout["policy_version"][1:] == answered[group][0]).all() and len(answered[group][0]) == 4
            groups.add(group)
        assert groups == expected and (test.feed.dropped_rollouts > 0) == (limit == 3)


class Filled:
    """A feed whose slots a test fills, with 2 environments each; a batch joins two slots."""

    def __init__(self, max_policy_lag: int = 0, batch_width: int = 4):
        self.games: list[int] = []
        fields = rollout_fields(EnvSpaces({"obs": spaces.Box(-1, 1, (3,))}, spaces.Discrete(2)))
        self.memory = RolloutMemory(fields, num_slots=4, unroll_length=3, group_width=2)
        actors = mock.Mock(num_groups=2, workers={}, processes=[])
        consumer = Consumer(
            torch.device("cpu"), (), lambda: 5, lambda rows: self.games.append(int(rows["group"][0, 0])), Laps(),
            max_policy_lag,
        )  # fmt: skip
        self.feed = SharedMemoryFeed(consumer, self.memory, actors, batch_width)

    def fill(self, number: int, version: int = 5) -> None:
        """A slot is full, of a rollout that its `group` numbers."""
        slot = self.feed.slots.acquire(0, set())
        for array in self.memory.arrays.values():
            array[slot] = 0
        self.memory.arrays["group"][slot] = number
        self.feed._oldest_versions[slot] = version
        self.feed.slots.fill(slot)

    def take(self) -> list[list[int]]:
        """The groups in each batch that there is now."""
        return [rollout["group"][0].tolist() for rollout, _ in self.feed.rollouts(limit=0.01)]


def test_whoever_must_not_wait_for_rollouts_gets_control_back_and_loses_none():
    filled = Filled()
    assert filled.take() == []
    filled.fill(1)
    assert filled.take() == [], "half of a batch"
    filled.fill(2)
    filled.fill(3)
    assert filled.take() == [[1, 1, 2, 2]] and filled.take() == []
    filled.fill(4)
    assert filled.take() == [[3, 3, 4, 4]]
    assert filled.games == [1, 2, 3, 4] and len(filled.feed.slots.free) == 4
    filled.feed.close()
    assert list(filled.feed.rollouts()) == []


def test_a_rollout_that_came_with_one_that_is_too_old_waits_for_the_next_and_is_counted_once():
    filled = Filled(max_policy_lag=3)
    filled.fill(1)
    filled.fill(2, version=1)  # 4 updates ago
    for _ in range(2):
        assert filled.take() == []
        assert filled.games == [1, 2] and filled.feed.dropped_rollouts == 1
        assert len(filled.feed.slots.free) == 3, "that of the old one"
        assert filled.feed.slots._untrained == 2, "the columns of the new one"
    filled.fill(3)
    assert filled.take() == [[1, 1, 3, 3]] and filled.games == [1, 2, 3]


def test_a_thread_that_waits_for_rollouts_gets_them_whenever_they_come():
    filled, found = Filled(), []
    thread = threading.Thread(target=lambda: found.append(next(filled.feed.rollouts(limit=PATIENCE))), daemon=True)
    thread.start()
    filled.fill(1)
    filled.fill(2)
    thread.join(PATIENCE)
    assert len(found) == 1 and found[0][0]["group"].shape == (4, 4)


def test_a_group_that_waits_for_a_slot_is_looked_at_whenever_the_learner_has_come_nearer():
    filled = Filled(batch_width=1)
    filled.fill(1)
    rollouts, wake = filled.feed.rollouts(limit=0.01), filled.feed.actors.wake
    for _ in range(2):
        wake.reset_mock()
        assert next(rollouts) and wake.called
    assert filled.feed.slots._untrained == 0, "both columns of it are trained"
