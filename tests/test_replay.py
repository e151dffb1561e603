"""The replay of sequences: its tree, its rings of rows, and who may overwrite what."""

from __future__ import annotations

import contextlib
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from beast.envs import make
from beast.envs.groups import EnvGroup
from beast.errors import InputError, OutOfMemory
from beast.feeds.memory import RolloutMemory
from beast.learn.replay import RatioLimiter, SequenceReplay, SumTree, resume_replay, stack_images

CPU = torch.device("cpu")
FIELDS = {
    "obs/obs": ((2,), "float32"), "reward": ((), "float32"), "action": ((), "int64"),
    "policy_logits": ((3,), "float32"),
    **{name: ((), "bool") for name in ("done", "terminated", "truncated")},
    **{name: ((), "int32") for name in ("policy_version", "episode_step", "group", "life")},
}  # fmt: skip


def new_replay(num_groups=2, width=3, U=4, B=4, T=8, stride=4, num_sequences=1000, **options) -> SequenceReplay:
    return SequenceReplay(
        FIELDS, [5], num_groups, width, unroll_length=U, burn_in=B, trained=T, stride=stride, capacity_gb=1e-2,
        max_sequences=num_sequences, random=np.random.default_rng(1), **options,
    )  # fmt: skip


class Writer:
    """Writes rollouts that name their rows: observations by group and life, rewards by row of this life and column."""

    def __init__(self, replay: SequenceReplay):
        self.replay, self.rows, self.lives = replay, {}, {}

    def lose(self, group: int) -> None:
        self.lives[group] = self.lives.get(group, 0) + 1
        self.rows[group] = 0

    def write(self, group: int) -> np.ndarray:
        """The ids of the sequences that this rollout completed; they get priority 1."""
        U, K = self.replay.unroll_length, self.replay.width
        first, life = self.rows.get(group, 0), self.lives.get(group, 0)
        rollout = {name: torch.zeros(U + 1, K, *shape) for name, (shape, _) in FIELDS.items()}
        del rollout["obs/obs"]
        rollout["obs"] = {"obs": torch.tensor([group, life]).float().expand(U + 1, K, 2)}
        rows = torch.arange(first, first + U + 1).unsqueeze(1)
        rollout["reward"] = (10 * rows + torch.arange(K)).float()
        rollout |= {"group": torch.full((U + 1, K), group), "life": torch.full((U + 1, K), life)}
        self.rows[group] = first + U
        ids = self.replay.add(rollout, (torch.full((1, K, 5), float(first)),))
        self.replay.update(ids, self.replay.generation_of(ids), np.ones(len(ids)))
        return ids


def available(replay: SequenceReplay) -> np.ndarray:
    return np.flatnonzero(replay.tree.leaves)


def check_sequences(replay: SequenceReplay, ids: np.ndarray) -> None:
    """Each holds consecutive rows of one environment and one life, and the state before the first of them."""
    batch, (states,) = replay.gather(ids, CPU)
    rewards = batch["reward"].numpy().astype(int)
    assert (np.diff(rewards, axis=0) == 10).all(), "consecutive rows"
    first_rows, obs = rewards[0] // 10, batch["obs"]["obs"]
    assert (first_rows % (replay.stride * replay.unroll_length) == 0).all()
    np.testing.assert_array_equal(states[0, :, 0].numpy(), first_rows)
    assert (obs == obs[0]).all() and (obs[0, :, 0] == batch["group"][0]).all(), "one group, one life"
    np.testing.assert_array_equal(rewards[0] % 10, ids % replay.width)
    assert (batch["env_number"] == torch.from_numpy(ids % replay.width)).all()


@pytest.mark.parametrize("num_sequences, stride", [(1, 4), (24, 4), (25, 8), (60, 12)])
def test_a_replay_of_so_many_sequences_has_them_at_any_time_and_one_more_of_each_environment_at_most(
    num_sequences, stride
):
    replay, found = new_replay(num_sequences=num_sequences, stride=stride), []
    writer = Writer(replay)
    for group in (0, 1) * (4 * replay.num_blocks):
        writer.write(group)
        found.append(replay.num_sequences())
    of_each, found = -(-num_sequences // 6), found[2 * replay.num_blocks :]
    assert 6 * of_each <= min(found) and max(found) <= 6 * (of_each + 1), found


def test_what_a_group_left_that_comes_no_more_is_forgotten():
    replay = new_replay(num_sequences=24)
    writer = Writer(replay)
    for _ in range(2 * replay.num_blocks):
        writer.write(0)
        writer.write(1)
    both = replay.num_sequences()
    for _ in range(2 * replay.num_blocks):
        writer.write(0)
    assert replay.num_sequences() == both, "one that is slower keeps its own"
    for _ in range(4 * replay.num_blocks):
        writer.write(0)
    assert replay.num_sequences() == both / 2 and (available(replay) < replay.num_blocks * replay.width).all()


def test_rows_that_are_stored_are_counted_however_many_each_group_has_written():
    replay = new_replay(num_sequences=24)
    writer = Writer(replay)
    for _ in range(5 * replay.num_blocks):
        writer.write(0)
    assert replay.stats()["stats/replay_rows"] == replay.capacity / 2 and replay.stats()["stats/replay_fill"] == 0.5


@pytest.mark.parametrize("stride", [4, 8, 20])
def test_the_smallest_replay_has_a_whole_sequence_at_any_time(stride):
    options = {"unroll_length": 4, "burn_in": 4, "trained": 8, "stride": stride}
    large = SequenceReplay(FIELDS, [5], 1, 3, **options, capacity_gb=1e-3)
    bytes_of_block = large.num_bytes / large.num_blocks
    for num_blocks in range(1, 20):
        with contextlib.suppress(InputError):
            replay = SequenceReplay(FIELDS, [5], 1, 3, **options, capacity_gb=(num_blocks + 0.5) * bytes_of_block / 1e9)
            break
    writer, found = Writer(replay), []
    for _ in range(60):
        writer.write(0)
        found.append(replay.num_sequences())
    assert min(found[found.index(3) :]) == 3, found


def test_small_priorities_differ_and_many_actions_need_more_than_a_byte():
    replay = new_replay(priority_exponent=1.0)
    writer = Writer(replay)
    ids = np.concatenate([writer.write(0) for _ in range(4)])[:2]
    replay.update(ids, replay.generation_of(ids), np.array([1e-4, 1e-3]))
    assert replay.tree.leaves[ids[1]] == pytest.approx(10 * replay.tree.leaves[ids[0]])
    for num_actions, dtype in ((256, np.uint8), (257, np.int64)):
        fields = FIELDS | {"policy_logits": ((num_actions,), "float32")}
        replay = SequenceReplay(
            fields, [5], 2, 3, unroll_length=4, burn_in=4, trained=8, stride=4, capacity_gb=1e-2, max_sequences=10
        )
        assert replay.arrays["action"].dtype == dtype


def test_a_start_that_changed_nothing_leaves_the_saved_replay_alone(tmp_path):
    path, limiter = tmp_path / "replay.npz", RatioLimiter(1.0, 8, 0)
    learner = SimpleNamespace(updates=0, net=torch.nn.Linear(1, 1))
    replay = new_replay(num_sequences=24)
    resume_replay(replay, limiter, path, learner, print)()
    assert not path.exists(), "zeros"
    save = resume_replay(replay, limiter, path, learner, print)
    Writer(replay).write(0)
    learner.updates = 3
    save()
    before = path.stat().st_mtime_ns
    again = new_replay(num_sequences=24)
    save = resume_replay(again, limiter, path, learner, print)
    save()
    assert again.rows == replay.rows and path.stat().st_mtime_ns == before
    learner.updates = 4
    save()
    assert path.stat().st_mtime_ns != before


def test_the_sum_tree_does_what_a_plain_array_does():
    random, tree, naive = np.random.default_rng(1), SumTree(37), np.zeros(37)
    for _ in range(10_000):
        if random.random() < 0.5:
            ids = random.integers(37, size=random.integers(1, 9))
            values = np.where(random.random(len(ids)) < 0.3, 0, 10 ** random.uniform(-3, 3, len(ids)))
            tree.set(ids, values)
            naive[ids] = values
        elif naive.sum() > 0:
            targets = random.random(5) * tree.total
            found, expected = tree.find(targets), np.searchsorted(np.cumsum(naive), targets, side="right")
            assert (naive[found] > 0).all()
            is_close = np.abs(np.cumsum(naive)[np.minimum(expected, 36)] - targets) < 1e-9 * naive.sum()
            assert ((found == expected) | is_close).all()
        sums = tree.nodes[2::2] + tree.nodes[3::2]
        assert (tree.nodes[1 : tree.capacity] == sums).all() and (tree.leaves[:37] == naive).all()


def test_a_leaf_begins_at_the_sum_of_those_before_it_and_rounding_leads_to_no_empty_one():
    tree = SumTree(4)
    tree.set(np.arange(3), np.array([1.0, 2.0, 0.0]))
    assert tree.find(np.array([0.0, 1.0, 2.9, 3.0])).tolist() == [0, 1, 1, 1]  # the total: a rounded draw


def test_a_sequence_with_tiny_errors_can_still_be_drawn_and_one_without_any_cannot():
    replay = new_replay(num_groups=1, width=3, T=4, B=0)
    ids = Writer(replay).write(0)
    replay.update(ids, replay.generation_of(ids), np.array([1e-30, 1e-6, 0.0]))
    tiny, least, none = replay.tree.leaves[ids]
    assert tiny == least > 0 and none == 0


def test_draws_are_in_proportion_to_the_priorities_to_their_power_and_the_weights_take_that_back():
    replay = new_replay(num_groups=1, width=8, T=4, B=0)
    writer = Writer(replay)
    ids = writer.write(0)
    priorities = np.array([1, 2, 0, 4, 8, 0.5, 1, 3], float)
    replay.update(ids, replay.generation_of(ids), priorities)
    counts, draws = np.zeros(8), 100_000
    sample = replay.sample(draws, CPU)
    np.add.at(counts, np.searchsorted(ids, sample.ids), 1)
    expected = draws * priorities**0.9 / (priorities**0.9).sum()
    assert counts[2] == 0, "a sequence without a priority is never drawn"
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 24.3, "6 degrees of freedom: 99.95 %"
    p = priorities[np.searchsorted(ids, sample.ids)]
    torch.testing.assert_close(
        sample.weights.double(), torch.from_numpy((p**0.9 / 0.5**0.9) ** -0.6), rtol=1e-5, atol=0
    )


def test_all_complete_sequences_are_equally_likely_if_none_has_a_priority():
    replay = new_replay(num_groups=2, width=3)
    writer = Writer(replay)
    complete = [*itertools.chain(*(writer.write(group) for group in (0, 0, 0, 0, 1, 1, 1)))]
    replay.update(np.array(complete), replay.generation_of(np.array(complete)), np.zeros(len(complete)))
    sample = replay.sample(2000, CPU)
    assert set(sample.ids) == set(complete) and len(complete) == 9 and (sample.weights == 1).all()


def test_every_sequence_is_whole_whatever_is_overwritten_lost_and_begun_anew():
    random = np.random.default_rng(3)
    for U, B, T, stride in ((4, 4, 8, 4), (4, 3, 7, 8), (5, 0, 5, 5), (2, 4, 10, 6)):
        replay = new_replay(U=U, B=B, T=T, stride=stride, num_sequences=24)
        writer, most = Writer(replay), 0
        for _ in range(400):
            group = int(random.integers(2))
            if random.random() < 0.05:
                writer.lose(group)
            writer.write(group)
            found = available(replay)
            most = max(most, len(found))
            if len(found):
                check_sequences(replay, found)
        assert most >= 12, "the ring is used"


def test_a_lost_group_loses_its_unfinished_sequence_only():
    replay = new_replay()
    writer = Writer(replay)
    for group in (0, 0, 0, 0, 1, 1, 1):
        writer.write(group)
    before = set(available(replay))
    assert len(before) == (2 + 1) * replay.width
    writer.lose(0)
    assert [len(writer.write(0)) for _ in range(3)] == [0, 0, replay.width], "the new life has to fill a whole one"
    assert before < set(available(replay)), "what was complete stays"
    check_sequences(replay, available(replay))


def test_priorities_of_sequences_that_were_overwritten_meanwhile_are_dropped_and_counted():
    replay = new_replay(num_groups=1, num_sequences=6)
    writer = Writer(replay)
    for _ in range(4):
        writer.write(0)
    sample = replay.sample(4, CPU)
    for _ in range(2 * replay.num_blocks):
        writer.write(0)
    before = replay.tree.nodes.copy()
    replay.update(sample.ids, sample.generations, np.full(4, 1e6))
    assert replay.late_priorities == 4
    replay.update(sample.ids, sample.generations, np.full(4, np.nan))
    assert replay.late_priorities == 8 and replay.bad_priorities == 0
    np.testing.assert_array_equal(replay.tree.nodes, before)
    newest = replay.sample(1, CPU)
    replay.update(newest.ids, newest.generations, np.array([np.nan]))
    assert replay.bad_priorities == 1
    np.testing.assert_array_equal(replay.tree.nodes, before)


def test_a_replay_that_is_too_small_or_too_large_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(InputError, match="--replay_gb 1e-07: one sequence of each environment needs"):
        SequenceReplay(
            FIELDS, [5], 2, 3, unroll_length=4, burn_in=4, trained=8, stride=4, capacity_gb=1e-7, max_sequences=0
        )
    options = {"unroll_length": 4, "burn_in": 4, "trained": 8, "stride": 4}
    with pytest.raises(InputError) as refused:
        SequenceReplay(FIELDS, [500_000], 2, 3, **options, capacity_gb=1e-7)
    needed = float(re.search(r"needs (\S+) GB; give that", str(refused.value))[1])
    assert SequenceReplay(FIELDS, [500_000], 2, 3, **options, capacity_gb=needed).num_bytes > 0.9 * needed * 1e9
    with pytest.raises(OutOfMemory, match="lower --replay_gb"):
        SequenceReplay(FIELDS, [5], 2, 3, unroll_length=4, burn_in=4, trained=8, stride=4, capacity_gb=1e5)


def test_it_takes_the_memory_that_it_says():
    replay = new_replay(num_sequences=3000)
    arrays = [*replay.arrays.values(), *replay.states, replay.tree.nodes]
    assert replay.num_bytes == pytest.approx(sum(array.nbytes for array in arrays), rel=0.1)
    assert replay.capacity >= 3000 * 4


def test_a_saved_replay_comes_back_to_the_bit_and_begins_new_lives(tmp_path):
    replay, other = new_replay(num_sequences=24), new_replay(num_sequences=24)
    writer = Writer(replay)
    for _ in range(20):
        writer.write(0)
    replay.save(tmp_path / "replay.npz", 7)
    assert not other.load(tmp_path / "replay.npz", 8), "of another update"
    assert not new_replay(num_sequences=48).load(tmp_path / "replay.npz", 7), "of another capacity"
    assert other.load(tmp_path / "replay.npz", 7)
    np.testing.assert_array_equal(other.written_at, replay.written_at)
    mine, theirs = replay.sample(5, CPU), other.sample(5, CPU)
    np.testing.assert_array_equal(mine.ids, theirs.ids)
    assert all(torch.equal(mine.rows[name], theirs.rows[name]) for name in ("reward", "done", "action"))
    assert torch.equal(mine.weights, theirs.weights) and torch.equal(mine.core_state[0], theirs.core_state[0])
    assert len(Writer(other).write(0)) == 0, "the environments are new ones"
    check_sequences(other, available(other))
    before = other.generations.max()
    Writer(other).write(1)
    assert other.generations.max() > before, "no number comes twice"
    data = (tmp_path / "replay.npz").read_bytes()
    (tmp_path / "replay.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="delete it"):
        other.load(tmp_path / "replay.npz", 7)


def test_a_replay_of_other_weights_is_told_and_not_taken(tmp_path):
    logs, path = [], tmp_path / "replay.npz"
    for learner in (SimpleNamespace(updates=3, net=torch.nn.Linear(1, 1)) for _ in range(2)):
        replay, limiter = new_replay(num_sequences=24), RatioLimiter(1.0, 8, 0)
        save = resume_replay(replay, limiter, path, learner, logs.append)
        Writer(replay).write(0)
        save()
    assert logs == [f"replay: filled anew, not from {path}, which is of another run, update or capacity"]
    resume_replay(new_replay(num_sequences=24), limiter, path, learner, logs.append)
    assert "sequences are those of" in logs[-1]


def test_a_replay_file_in_fortran_order_is_read_right_and_a_strange_one_told_in_one_line(tmp_path):
    replay, other, path = new_replay(num_sequences=24), new_replay(num_sequences=24), tmp_path / "replay.npz"
    writer = Writer(replay)
    for _ in range(20):
        writer.write(0)
    replay.save(path, 7)
    with np.load(path) as file:
        arrays = {name: np.array(file[name], order="F") for name in file.files}
    np.savez(path, **arrays)
    assert other.load(path, 7)
    for name, array in replay._stored().items():
        np.testing.assert_array_equal(other._stored()[name], array)
    np.savez(path, **arrays | {"next_block": np.array(["1.5", "x"])})
    assert not other.load(path, 7)
    path.write_text("a text\nof two lines")
    with pytest.raises(InputError, match="no replay can be read from it .*; delete it") as refused:
        other.load(path, 7)
    assert "pickle" not in str(refused.value) and "\n" not in str(refused.value)


def play_atari(env_id: str, U: int, num_rollouts: int, **options):
    """Rollouts [U+1, 2, …] of random actions, with whole stacks."""
    group = EnvGroup(make(env_id, 2, **options))
    memory, random = RolloutMemory(group.fields, 1, U, 2), np.random.default_rng(5)
    for array in memory.arrays.values():
        array[...] = 0
    group.reset(3, memory.row(0, 0))
    for index in range(num_rollouts):
        if index:
            memory.repeat_last_row(0, 0)
        for row in range(1, U + 1):
            rows = memory.row(0, row)
            rows["action"][...] = random.integers(group.spaces.action.n, size=2)
            group.step(rows["action"], rows)
        yield (
            group.fields,
            {
                name: {"obs": torch.from_numpy(x["obs"].copy())} if name == "obs" else torch.from_numpy(x.copy())
                for name, x in memory.rollout(0).items()
            },
        )
    group.close()


def test_observations_that_are_no_stacks_of_the_last_images_are_refused_with_the_remedy():
    fields, rollout = next(play_atari("BreakoutNoFrameskip-v4", 10, 1))
    options = {"unroll_length": 10, "burn_in": 10, "trained": 20, "stride": 10, "capacity_gb": 1, "max_sequences": 10}

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1, :, -1:].expand_as(x[:1]), x[1:]])  # the first image in place of zeros

    later = [rollout for _, rollout in play_atari("BreakoutNoFrameskip-v4", 10, 2)][1]  # it began before its row 0
    SequenceReplay(fields, [], 1, 2, is_stack=True, **options).add(later, ())
    for change in (lambda x: x.flip(2), lambda x: x - x[:, :, -1:], pad):
        replay = SequenceReplay(fields, [], 1, 2, is_stack=True, **options)
        with pytest.raises(InputError, match="is_stack=False in make_replay"):
            replay.add(rollout | {"obs": {"obs": change(rollout["obs"]["obs"])}}, ())


@pytest.mark.parametrize("backend", ["ale", "beast"])
@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_stacks_of_images_that_are_stored_once_are_those_of_the_environment(env_id, backend):
    if backend == "beast":
        pytest.importorskip("libatari", reason="libatari is not built: make libatari")
    U, B, T, replay, games, checked = 10, 10, 20, None, 0, 0
    history: list[torch.Tensor] = []
    completed: dict[int, int] = {}  # generation of a sequence -> the number of its last rollout
    for fields, rollout in play_atari(env_id, U, 45, atari_backend=backend, frame_skip=8):
        if replay is None:
            replay = SequenceReplay(
                fields, [], 1, 2, unroll_length=U, burn_in=B, trained=T, stride=U, capacity_gb=1, max_sequences=10,
                is_stack=True,
            )  # fmt: skip
            assert replay.bytes_of_step < 84 * 84 + 100
        history.append(rollout["obs"]["obs"])
        games += int((rollout["episode_step"][1:] == 0).sum())
        ids = replay.add(rollout, ())
        replay.update(ids, replay.generation_of(ids), np.ones(len(ids)))
        if len(ids):
            completed[int(replay.generation_of(ids)[0])] = len(history) - 1
            # The newest one, and the oldest, for which the rows before it are needed, too.
            found = available(replay)
            for generation in {min(replay.generation_of(found)), max(replay.generation_of(found))}:
                last = completed[int(generation)]
                true = torch.cat([history[last - 2][:-1], history[last - 1][:-1], history[last]])
                of_it = found[replay.generation_of(found) == generation]
                assert torch.equal(replay.gather(of_it, CPU)[0]["obs"]["obs"], true)
                checked += 1
    assert replay.rows > 2 * replay.capacity, "the ring wraps"
    assert games >= 2 and checked > 40, (games, checked)


def test_a_stack_shows_nothing_of_the_game_before():
    images = torch.arange(1, 9).view(8, 1, 1, 1).to(torch.uint8)
    stacks = stack_images(images, torch.tensor([[7], [0], [1], [2], [3]]), 4)
    assert stacks[:, 0, :, 0, 0].tolist() == [[1, 2, 3, 4], [0, 0, 0, 5], [0, 0, 5, 6], [0, 5, 6, 7], [5, 6, 7, 8]]


@pytest.mark.parametrize("ratio, transitions, steps", [(0.01, 640, 320), (2, 640, 320), (16, 64, 8), (0.75, 100, 7)])
def test_the_replay_ratio_holds_within_a_percent_and_neither_side_waits_for_ever(ratio, transitions, steps):
    limiter = RatioLimiter(ratio, transitions, min_fill=1000)
    while limiter.updates < 500:
        assert not limiter.may_update()
        limiter.add(steps)
        while limiter.may_update():
            limiter.add_update()
    assert limiter.measured() == pytest.approx(ratio, rel=0.01)
    assert 1000 <= limiter.filled < 1000 + steps
    limiter = RatioLimiter(ratio, transitions, min_fill=10**6)
    limiter.add(10**6)
    assert limiter.steps == 0 and not limiter.may_update(), "what fills the replay does not count"
    limiter.add(1)
    assert "/s" not in limiter.describe(), "without an update there is no speed"


def test_last_observations_that_lie_beside_their_rows_are_stored_with_them():
    fields = FIELDS | {"final_obs/obs": ((2,), "float32")}
    replay = SequenceReplay(
        fields, [5], 1, 1, unroll_length=4, burn_in=0, trained=4, stride=4, capacity_gb=1e-2, max_sequences=10
    )
    rollout = {name: torch.zeros(5, 1, *shape) for name, (shape, _) in FIELDS.items() if name != "obs/obs"}
    rollout |= {name: {"obs": torch.randn(5, 1, 2)} for name in ("obs", "final_obs")}
    found = replay.gather(replay.add(rollout, (torch.zeros(1, 1, 5),)), CPU)[0]
    assert torch.equal(found["final_obs"]["obs"], rollout["final_obs"]["obs"])


def test_a_long_episode_counts_as_255_steps_and_never_as_a_new_one():
    replay = new_replay(num_groups=1, width=1, B=0, T=4)
    rollout = {name: torch.zeros(5, 1, *shape) for name, (shape, _) in FIELDS.items() if name != "obs/obs"}
    rollout |= {"obs": {"obs": torch.zeros(5, 1, 2)}, "episode_step": torch.arange(254, 259).view(5, 1)}
    ids = replay.add(rollout, (torch.zeros(1, 1, 5),))
    assert replay.gather(ids, CPU)[0]["episode_step"].flatten().tolist() == [254, 255, 255, 255, 255]
