"""The feed of shared memory, without processes or a net: which slot, row and column holds what, and who may have it."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from beast.clock import Laps
from beast.envs.rows import ROW_FIELDS
from beast.feeds import shared_memory, slots
from beast.feeds.feed import Consumer
from beast.feeds.memory import RolloutMemory
from beast.feeds.shared_memory import SharedMemoryFeed
from beast.feeds.slots import NO_SLOT, SlotTensors

T, K = 3, 2
FIELDS = {
    "obs/obs": ((1,), "float32"), **{name: ((), field.dtype) for name, field in ROW_FIELDS.items() if field.dtype},
    "action": ((), "int64"), "policy_logits": ((2,), "float32"),
}  # fmt: skip


class Counting:
    """Actors whose environments show 100 · group + 10 · life + column in hundreds, and count their rows."""

    total_restarts, workers, processes = 0, {}, ()

    def __init__(self, memory: RolloutMemory, num_groups: int):
        self.memory, self.num_groups = memory, num_groups
        self.ready, self.lost = collections.deque(range(num_groups)), []
        self.lives, self.rows, self.acted = [0] * num_groups, [0] * num_groups, collections.defaultdict(list)
        self.at_once = 1
        self.told: list[bytes] = []

    def go(self, group: int, slot: int, row: int) -> None:
        fields = self.memory.row(slot, row)
        if row == 0:
            self.rows[group] = 0
        else:
            self.rows[group] += 1
            self.acted[group].append(fields["action"].tolist())
        for name in ("reward", "done", "terminated", "truncated", "episode_return", "episode_step"):
            fields[name][...] = 0
        fields["obs"]["obs"][:, 0] = shown(group, self.lives[group], np.arange(K), self.rows[group])
        self.ready.append(group)

    def wait(self, timeout: float) -> tuple[list[int], list[int]]:
        lost, self.lost = self.lost, []
        return [self.ready.popleft() for _ in range(min(self.at_once, len(self.ready)))], lost

    def lose(self, group: int) -> None:
        """Its environments break while the group waits for actions, or steps."""
        self.lives[group] += 1
        self.lost.append(group)
        if group in self.ready:
            self.ready.remove(group)
        self.ready.append(group)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def shown(group: int, life: int, column, row):
    """What an environment shows in a row of its life."""
    return 1000 * (100 * group + 10 * life + column) + row


class Run:
    """A feed of so many groups; each core state is the sum of what was shown, and each action is shown % 7."""

    def __init__(
        self, num_groups=2, num_slots=4, batch_width=K, is_twin=False, max_policy_lag=0, monkeypatch=None, steps=T,
        stagger=False,
    ):  # fmt: skip
        self.memory = RolloutMemory(FIELDS, num_slots, steps, K)
        self.actors = Counting(self.memory, num_groups)
        self.update, self.games = 0, []
        consumer = Consumer(
            torch.device("cpu"), (torch.zeros(1, 1, 1, dtype=torch.float64),), lambda: self.update, self.games.append,
            Laps(), max_policy_lag,
        )  # fmt: skip
        if monkeypatch:
            monkeypatch.setattr(shared_memory, "SlotTensors", lambda *args: SlotTensors(*args, is_twin=is_twin))
        self.feed = SharedMemoryFeed(
            consumer, self.memory, self.actors, batch_width, stagger=stagger, joins_groups=True
        )
        self.feed.slots._is_early = lambda: False  # tests/test_rollout.py has what is just in time

    def act(self, turns: int = 100) -> None:
        """Answer the rows of so many turns of the actors, or until no group gets any further."""
        for _ in range(turns):
            if groups := self.feed._ready_groups():
                self.answer(self.feed._rows(groups))
            elif not self.actors.ready:
                return

    def answer(self, rows) -> None:
        seen = rows.inputs["obs"]["obs"][..., 0]  # [1, N]
        logits = torch.stack([seen, -seen], dim=-1)
        rows.answer(seen.long() % 7, logits, seen, self.update, (rows.core_state[0] + seen.unsqueeze(-1),))

    def rollouts(self, count: int | None = None) -> list[tuple[dict, tuple]]:
        """Copies of all full rollouts, or of the first `count`."""
        found = []
        for rollout, state in self.feed.rollouts(limit=0.0):
            check(rollout, state)
            found.append((rollout["obs"]["obs"][..., 0].clone(), state[0].clone()))
            if len(found) == count:
                break
        return found


def check(rollout: dict, state: tuple) -> None:
    """Consecutive rows of one life each, the actions and outputs of the row before, and the state before row 0."""
    seen = rollout["obs"]["obs"][..., 0]  # [T+1, B]
    assert (seen.diff(dim=0) == 1).all(), "consecutive rows"
    torch.testing.assert_close(rollout["action"][1:], seen[:-1].long() % 7)
    torch.testing.assert_close(rollout["baseline"][1:], seen[:-1])
    torch.testing.assert_close(rollout["policy_logits"][1:, :, 1], -seen[:-1])
    who = shown(rollout["group"], rollout["life"], rollout["env_number"], 0)
    count = (seen[0] - who[0]).double()  # of rows before
    torch.testing.assert_close(state[0][0, :, 0], count * who[0] + count * (count - 1) / 2)
    assert (who == who[0]).all() and (seen // 1000 == who // 1000).all()
    begins = seen[0] == who[0]
    for name in ("action", "baseline", "policy_version"):
        assert (rollout[name][0][begins] == 0).all(), "no action led to the first row"
    torch.testing.assert_close(rollout["baseline"][0][~begins], seen[0][~begins] - 1)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("is_twin", [False, True])
@pytest.mark.parametrize("batch_width", [1, 2, 4])
def test_every_row_column_and_core_state_is_of_its_own_group(monkeypatch, batch_width, is_twin, at_once):
    run, found = Run(2, 4, batch_width, is_twin, monkeypatch=monkeypatch), []
    run.actors.at_once = at_once
    for _ in range(6):
        run.act()
        found += run.rollouts()
    seen = torch.cat([rows for rows, _ in found], dim=1)
    assert len(seen.unique()) >= 2 * K * 6 * T, "each row of each environment"
    for group, acted in run.actors.acted.items():
        rows = torch.arange(len(acted)).unsqueeze(1)
        assert acted == (shown(group, 0, torch.arange(K), rows) % 7).tolist(), "an actor reads its own actions"


def test_a_rollout_in_training_is_not_overwritten_and_its_edits_stay_in_it():
    run = Run(num_groups=1, num_slots=2)
    run.act()
    rollouts = run.feed.rollouts(limit=0.0)
    for _ in range(4):
        rollout, _ = next(rollouts)
        before = rollout["obs"]["obs"].clone()
        run.act()
        assert torch.equal(rollout["obs"]["obs"], before)
        rollout["reward"] += 1
        assert (run.memory.arrays["reward"] == 0).all(), "an update edits a copy of all else"


@pytest.mark.parametrize("is_full", [False, True])
def test_groups_that_are_lost_again_and_again_leave_no_slot_behind_and_none_to_two(is_full):
    run = Run(num_groups=2, num_slots=3)
    for _ in range(5):
        for group in (0, 1):
            # A group whose slot is full waits for a free one; the full one is the learner's.
            run.act(turns=100 if is_full else 3)
            run.actors.lose(group)
        run.act()
        assert run.rollouts()
        slots = run.feed.slots
        owned = [group.slot for group in run.feed.groups if group.row < T and group.slot != shared_memory.NO_SLOT]
        assert sorted([*slots.free, *slots._full, *owned]) == sorted({*slots.free, *slots._full, *owned})
    run.act()
    run.rollouts()
    run.act()
    assert run.feed.groups[0].life == run.feed.groups[1].life == 5
    found = torch.cat([rows for rows, _ in run.rollouts()], dim=1)
    assert set((found // 100_000).flatten().tolist()) == {0, 1}, "both still run"


def test_a_rollout_is_as_old_as_its_oldest_action_and_its_last_update():
    run = Run(num_groups=1, num_slots=2, batch_width=1, max_policy_lag=4)
    run.act(turns=3)  # row 0, and the first two actions
    run.update = 3  # with a second update on the same slot the lag is 4
    run.act()
    assert len(run.rollouts(2)) == 2 and run.feed.dropped_rollouts == 0
    run = Run(num_groups=1, num_slots=2, batch_width=1, max_policy_lag=4)
    run.act(turns=3)
    run.update = 4
    run.act()
    assert len(run.rollouts()) == 2 and run.feed.dropped_rollouts == 1, "the next one is of the new weights"
    for dropped in (3, 5, 7):
        run.act()
        run.update += 4
        assert not run.rollouts() and run.feed.dropped_rollouts == dropped, "and their slots are free again"
    assert len(run.games) == 8, "games are told all the same"


@pytest.mark.parametrize("is_twin", [False, True])
def test_shared_memory_says_whose_rows_a_slot_holds_with_and_without_a_twin(is_twin):
    memory = RolloutMemory(FIELDS, 2, T, K)
    tensors = SlotTensors(memory, torch.device("cpu"), is_twin=is_twin)
    tensors.begin(1, NO_SLOT, 5, 7)
    for rollout in (memory.rollout(1), tensors.rollout(1)):
        assert (rollout["env_number"] == np.arange(K)).all()
        assert (rollout["group"] == 5).all() and (rollout["life"] == 7).all()


class Ticks:
    """A `Run` of four groups, eight steps and five slots, of which one group is answered in each tick of the time. The
    learner, which trains each rollout for so many ticks, checks every one."""

    def __init__(self, monkeypatch, stagger=True, update=1, at_once=1, batch_width=K):
        self.now, self.update, self._free_at, self._rollouts = 0, update, 0, iter(())
        monkeypatch.setattr(slots, "time", self)
        self.run = Run(4, 4 + batch_width // K, batch_width, steps=8, stagger=stagger)
        del self.run.feed.slots._is_early  # slots are handed out just in time
        self.run.actors.at_once = at_once
        self.begun: list[tuple[int, int]] = []  # tick and group of each rollout
        self.trained: list[torch.Tensor] = []
        begin = self.run.feed.tensors.begin

        def record(slot, previous, group, life):
            self.begun.append((self.now, group))
            begin(slot, previous, group, life)

        self.run.feed.tensors.begin = record

    def monotonic(self) -> int:
        return self.now

    def go_on(self, ticks: int, learns=True) -> None:
        for _ in range(ticks):
            self.now += 1
            self.run.act(turns=1)
            if learns and self.now >= self._free_at:
                rollout = next(self._rollouts, None)  # releases the one before
                if rollout is None:
                    self._rollouts = self.run.feed.rollouts(limit=0.0)
                    continue
                check(*rollout)
                self.trained.append(rollout[0]["obs"]["obs"][..., 0].clone())
                self._free_at = self.now + self.update

    def between(self, since: int) -> list[int]:
        """Ticks between the rollouts that begin from then on."""
        return np.diff([tick for tick, _ in self.begun if tick >= since]).tolist()


@pytest.mark.parametrize(
    "update, at_once, batch_width",
    [(1, 1, K), (4, 1, K), (8, 1, K), (12, 1, K), (1, 4, K), (1, 1, 1), (3, 1, 2 * K)],
    ids=["fast", "half as slow", "as slow", "slower", "groups together", "two batches", "two groups in a batch"],
)
def test_rollouts_of_groups_begin_apart_and_each_row_is_trained_once(monkeypatch, update, at_once, batch_width):
    ticks = Ticks(monkeypatch, True, update, at_once, batch_width)
    ticks.go_on(1000)
    between = ticks.between(200)
    # Even are 8: in two of a rollout's eight steps. Groups come to a step one after the other.
    assert min(between) >= (6 if at_once == 1 else 2)
    groups = [group for _, group in ticks.begun[-8:]]
    assert groups[:4] == groups[4:] and sorted(groups[:4]) == [0, 1, 2, 3]
    if update < 8:
        cycles = {sum(between[first : first + 4]) for first in range(len(between) - 3)}
        assert cycles == {32 // at_once}, "nobody waits"
    firsts = torch.cat([rows[0] for rows in ticks.trained])
    for group in range(4):
        for column in range(K):
            who = shown(group, 0, column, 0)
            own = sorted((firsts[(firsts // 1000) == who // 1000] - who).tolist())
            assert own == list(range(0, 8 * len(own), 8)) and len(own) >= 15, "no row is lost, none is trained twice"


def test_rollouts_of_groups_that_are_not_staggered_begin_together_unless_they_wait_for_the_learner(monkeypatch):
    ticks = Ticks(monkeypatch, stagger=False)
    ticks.go_on(1000)
    assert set(ticks.between(200)) == {1, 2, 28}
    ticks = Ticks(monkeypatch, stagger=False, update=12)
    ticks.go_on(1000)
    assert min(ticks.between(200)) == 12


def test_groups_come_apart_again_when_all_have_waited_for_the_learner(monkeypatch):
    ticks = Ticks(monkeypatch)
    ticks.go_on(300)
    ticks.go_on(100, learns=False)  # a checkpoint is written, say
    assert not ticks.between(350), "all wait"
    before = set(ticks.between(200))
    ticks.go_on(300)
    assert ticks.between(400)[:3] == [2, 3, 5], "two steps of one group, then of two, then of three"
    assert set(ticks.between(420)) == before == {7, 11}


def test_groups_that_were_lost_together_come_apart_again(monkeypatch):
    ticks = Ticks(monkeypatch)
    ticks.go_on(300)
    for group in (0, 1):
        ticks.run.actors.lose(group)
    ticks.go_on(300)
    assert {0, 1} <= {group for tick, group in ticks.begun if 300 < tick <= 306}, "new environments begin at once"
    assert [group.life for group in ticks.run.feed.groups] == [1, 1, 0, 0] and min(ticks.between(400)) >= 6


def test_a_group_that_hangs_where_it_has_just_begun_holds_the_others_up_for_a_rollout_at_most(monkeypatch):
    ticks = Ticks(monkeypatch)
    ticks.go_on(300)
    ticks.go_on(100, learns=False)
    while ticks.begun[-1][0] < 400:
        ticks.go_on(1)
    ticks.run.actors.ready.clear()  # of the one that has begun
    ticks.go_on(200)
    (begun, hangs), (next_one, _), *others = [each for each in ticks.begun if each[0] >= 400]
    assert next_one - begun <= 33, "four groups make a rollout in 32 ticks"
    assert len(others) > 15 and hangs not in [group for _, group in others]
