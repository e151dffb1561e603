"""The GPU's kernels of the Atari emulator (csrc/atari/batch.h), run on a CPU: they equal libatari's pool to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from beast.envs.ale import read_rom

libatari = pytest.importorskip("libatari")

SETTINGS = {
    "frame_skip": 4, "max_pool": True, "stack": 4, "height": 84, "width": 84, "grayscale": True, "keeps_rgb": False,
    "noop_max": 30, "fire_reset": True, "episodic_life": False, "life_loss_info": False, "clip_rewards": True,
    "same_step": False, "max_frames": 108_000, "sticky": 0.0,
}  # fmt: skip
V5 = {"noop_max": 0, "fire_reset": False, "sticky": 0.25, "clip_rewards": False}
SMALL = {"height": 42, "width": 40}
LAST_ACTION = -4  # the place of its byte in a Vcs
CASES: list[tuple[str, int, dict[str, Any]]] = [  # game, lanes, settings
    ("pong", 8, {"fire_reset": False, "sticky": 0.25, "same_step": True, "max_frames": 300}),
    ("breakout", 4, {"episodic_life": True, "same_step": True}),
    ("seaquest", 32, V5),
    ("qbert", 16, {"life_loss_info": True, "same_step": True}),
    ("journey_escape", 4, {"max_frames": 203, "clip_rewards": False}),
    ("montezuma_revenge", 8, {**V5, "max_frames": 60, "frame_skip": 3, "same_step": True}),
    ("ms_pacman", 4, {"max_frames": 90, "height": 105, "width": 80, "episodic_life": True}),
    (
        "space_invaders",
        16,
        {"max_pool": False, "frame_skip": 1, "max_frames": 70, "stack": 1, "height": 70, "width": 160},
    ),
]


def settings_of(game: str, **changes) -> dict[str, Any]:
    (actions,) = (row["actions"] for row in libatari.games() if row["name"] == game)
    return {**SETTINGS, "actions": actions, **changes}


class Pool:
    """libatari's pool, with the methods and results of its simulated batch."""

    def __init__(self, game: str, count: int, settings: dict[str, Any]):
        self._pool = libatari.Pool(read_rom(game), game, count, 1, np.empty(0, np.uint8), settings)
        self._ids = np.arange(count, dtype=np.int32)
        shape = (count, settings["stack"], settings["height"], settings["width"])
        self.observations = np.zeros(shape, np.uint8)
        self.final_observations = np.zeros(shape, np.uint8) if settings["same_step"] else None
        self._numbers, self.flags = np.zeros((5, count), np.int32), np.zeros((2, count), bool)
        self._results = self.observations, self.final_observations, self._numbers, self.flags

    def reset(self, seeds: np.ndarray | None = None) -> None:
        if seeds is None:
            self._pool.reset(self._ids, np.empty(0, np.int64), *self._results)
        else:
            self._pool.seeded_reset(self._ids, seeds.astype(np.int64), *self._results)

    def step(self, actions: np.ndarray) -> None:
        self._pool.step(self._ids, actions, *self._results)

    @property
    def rewards(self) -> np.ndarray:
        return self._numbers[0].astype(np.float32)

    @property
    def numbers(self) -> np.ndarray:
        return self._numbers[1:]

    def vcs(self, size: int) -> np.ndarray:
        states = [np.frombuffer(self._pool.clone(id)[24 : 24 + size], np.uint8) for id in self._ids.tolist()]
        return np.stack(states)  # behind 24 bytes of a header


def assert_equal(batch, pool: Pool, when: str) -> None:
    np.testing.assert_array_equal(batch.flags, pool.flags, err_msg=when)
    np.testing.assert_array_equal(batch.rewards, pool.rewards, err_msg=when)
    np.testing.assert_array_equal(batch.numbers, pool.numbers, err_msg=when)
    np.testing.assert_array_equal(batch.observations, pool.observations, err_msg=when)


def compare(game: str, lanes: int, settings: dict[str, Any], steps: int, count: int = 5, **how):
    """Play random steps in both; returns the batch and the number of episodes that ended."""
    settings = settings_of(game, **settings)
    pool = Pool(game, count, settings)
    batch = libatari.SimulatedBatch(read_rom(game), game, count, lanes, settings, **how)
    seeds = np.arange(count, dtype=np.uint32) + 17
    random, ends = np.random.default_rng(1), 0
    for env in (batch, pool):
        env.reset(seeds)
    assert_equal(batch, pool, "reset")
    for step in range(steps):
        actions = random.integers(0, len(settings["actions"]), count)
        for env in (batch, pool):
            env.step(actions)
        assert_equal(batch, pool, f"step {step}")
        is_final = pool.flags.any(axis=0)
        ends += int(is_final.sum())
        if settings["same_step"] and is_final.any():
            finals = (env.final_observations[is_final] for env in (batch, pool))
            np.testing.assert_array_equal(*finals, err_msg=f"final observations of step {step}")
        if step % 50 == 49:
            np.testing.assert_array_equal(batch.vcs, pool.vcs(batch.vcs.shape[1]), err_msg=f"states at step {step}")
    return batch, ends


@pytest.mark.parametrize("game, lanes, settings", CASES, ids=[game for game, _, _ in CASES])
def test_kernels_play_what_the_pool_plays(game, lanes, settings):
    _, ends = compare(game, lanes, {"max_frames": 250, **settings}, steps=200)
    assert ends > 4, "the table of starts is compared, too"


@pytest.mark.on_demand  # minutes
@pytest.mark.parametrize("game, lanes, settings", CASES, ids=[game for game, _, _ in CASES])
def test_kernels_play_what_the_pool_plays_for_20000_frames(game, lanes, settings):
    _, ends = compare(game, lanes, settings, steps=20_000 // settings.get("frame_skip", 4), count=3)
    assert ends > 3


@pytest.mark.parametrize("lanes", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_lanes_of_a_warp_and_the_order_of_threads_change_nothing(lanes, is_reversed):
    settings = {"max_frames": 66, "same_step": True, "frame_skip": 3, **SMALL}
    _, ends = compare("breakout", lanes, settings, steps=60, count=11, reversed=is_reversed)
    assert ends > 20


def test_steps_whose_frames_end_early_are_drawn_again_with_the_same_draws():
    batch, _ = compare("journey_escape", 4, {**V5, "max_pool": False}, steps=60)
    assert batch.num_drawn_again > 250
    batch, _ = compare("pong", 4, V5, steps=60)
    assert batch.num_drawn_again == 0


@pytest.mark.parametrize("frame_skip", [1, 2, 4])
@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_an_episode_that_a_step_begins_and_ends_shows_the_image_of_its_start(frame_skip, same_step, frames):
    settings = {"frame_skip": frame_skip, "max_frames": frames, "same_step": same_step, "noop_max": 3, **SMALL}
    _, ends = compare("pong", 8, settings, steps=24, count=3)
    length = -(-frames // frame_skip)
    assert ends == 3 * (24 // length if same_step else 25 // (length + 1))


def test_a_reset_without_a_seed_goes_on_with_all_generators():
    settings = settings_of("seaquest")
    pool = Pool("seaquest", 3, settings)
    batch = libatari.SimulatedBatch(read_rom("seaquest"), "seaquest", 3, 4, settings)
    for seeds in (np.arange(3, dtype=np.uint32), None, None, np.arange(3, dtype=np.uint32) + 9, None):
        for env in (batch, pool):
            env.reset(seeds)
            env.step(np.zeros(3, np.int64))
        assert_equal(batch, pool, f"after a reset with seeds {seeds}")
        np.testing.assert_array_equal(batch.vcs, pool.vcs(batch.vcs.shape[1]))


def test_draws_of_a_reset_are_skipped_where_actions_are_sticky():
    _, ends = compare("berzerk", 8, {**V5, "max_frames": 100, "same_step": True, **SMALL}, steps=80)
    assert ends > 10


def test_small_generators_play_as_the_large_ones_without_sticky_actions():
    compare("qbert", 8, {"episodic_life": True}, steps=150, exact=False)


@pytest.mark.parametrize("sticky", [0, 0.25])
@pytest.mark.parametrize("exact", [False, True])
def test_actions_are_repeated_as_often_as_they_should(sticky, exact):
    settings = settings_of("pong", **V5 | {"frame_skip": 1, "sticky": sticky, "height": 9, "width": 9})
    batch = libatari.SimulatedBatch(read_rom("pong"), "pong", 64, 32, settings, exact=exact)
    batch.reset(np.arange(64, dtype=np.uint32))
    repeated = []
    for step in range(100):
        batch.step(np.full(64, step % 2, np.int64))
        repeated.append(batch.vcs[:, LAST_ACTION] != settings["actions"][step % 2])
    # Where the step before was repeated, its action is the one that is wanted now.
    assert np.mean(repeated) == pytest.approx(sticky / (1 + sticky), abs=0.02)


def test_an_action_that_there_is_not_is_told_and_does_nothing():
    settings = settings_of("pong")
    batches = [libatari.SimulatedBatch(read_rom("pong"), "pong", 2, 4, settings) for _ in range(2)]
    for batch, second in zip(batches, (0, 6)):
        batch.reset(np.arange(2, dtype=np.uint32))
        batch.step(np.array([1, second]))
    assert batches[0].numbers[3].tolist() == [0, 0] and batches[1].numbers[3].tolist() == [0, 3]
    np.testing.assert_array_equal(batches[0].vcs, batches[1].vcs)
    np.testing.assert_array_equal(batches[0].observations, batches[1].observations)


def test_an_invalid_action_is_told_where_the_episode_ends_with_it():
    settings = settings_of("pong", max_frames=4, same_step=True)
    batch = libatari.SimulatedBatch(read_rom("pong"), "pong", 1, 4, settings)
    batch.reset(np.zeros(1, np.uint32))
    batch.step(np.array([6]))
    assert batch.flags[1].all() and batch.numbers[3].tolist() == [3]


@pytest.mark.parametrize("actions", [[], [0] * 19, [18]])
def test_actions_that_no_game_has_are_refused(actions):
    with pytest.raises(ValueError, match="action"):
        libatari.SimulatedBatch(read_rom("pong"), "pong", 1, 4, settings_of("pong") | {"actions": actions})


@pytest.mark.parametrize(
    "game, changes",
    [
        ("air_raid", {}),
        ("pong", {"grayscale": False}),
        ("pong", {"noop_max": 300}),
        ("double_dunk", {"sticky": 0.25}),
    ],  # fmt: skip
)
def test_what_a_batch_cannot_do_is_refused(game, changes):
    with pytest.raises(ValueError, match="a batch"):
        libatari.SimulatedBatch(read_rom(game), game, 1, 4, settings_of(game, **changes))
