"""Environments and the rows they write."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
import types
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import toy_envs
from ale_py import Action
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces, wrappers
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import create_empty_array

from beast import envs
from beast.envs.atari import ATARI_FRAMES_PER_EPISODE, LifeEpisodes
from beast.envs.films import Film
from beast.envs.groups import EnvGroup, finished_episodes
from beast.envs.probe import probe_env
from beast.envs.spaces import env_actions, observation_field, parts_by_name
from beast.envs.texts import leave_out_texts
from beast.errors import InputError, MissingFile, MissingPackage
from beast.run.flags import EnvFlags

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
SCALARS = {
    "reward": np.float32,
    "done": bool,
    "terminated": bool,
    "truncated": bool,
    "episode_return": np.float32,
    "episode_step": np.int32,
    "task": np.int32,
}


def new_rows(group: EnvGroup, num_rows: int) -> dict:
    """Arrays [num_rows, K, …] filled with values that a row which nobody wrote would show."""
    observations = {
        name.removeprefix("obs/"): np.full((num_rows, group.num_envs, *shape), 99, dtype)
        for name, (shape, dtype) in group.fields.items()
        if name.startswith("obs/")
    }
    return {"obs": observations, **{n: np.full((num_rows, group.num_envs), 77, d) for n, d in SCALARS.items()}}


def row(rows: dict, t: int) -> dict:
    kinds = [kind for kind in ("obs", "final_obs") if kind in rows]
    return {**{n: rows[n][t] for n in SCALARS}, **{kind: {n: a[t] for n, a in rows[kind].items()} for kind in kinds}}


def play(group: EnvGroup, num_steps: int, seed: int = 0, actions=None) -> dict:
    """Rows 0 to num_steps of a group; `actions(t)` gives those that lead to row t (all 0 by default)."""
    rows = new_rows(group, num_steps + 1)
    group.reset(seed, row(rows, 0))
    for t in range(1, num_steps + 1):
        group.step(np.zeros(group.num_envs, np.int64) if actions is None else actions(t), row(rows, t))
    return rows


class Scripted(toy_envs.Counting):
    """Episodes of lengths 2, 1 and 3, over and over: terminated, truncated, terminated."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        self.length, self.terminates = [(2, True), (1, False), (3, True)][self.episode % 3]
        return observation, info


def scripted_rows(mode: AutoresetMode) -> dict:
    rows = play(EnvGroup(SyncVectorEnv([Scripted, Scripted], autoreset_mode=mode)), 9, seed=5)
    assert rows["obs"]["obs"][:, :, 0].tolist() == [[5, 6]] * 10, "each env has its own seed"
    return {name: (rows["obs"]["obs"][:, 0, 2] if name == "obs" else rows[name][:, 0]).tolist() for name in rows}


def test_under_next_step_autoreset_a_final_row_comes_before_the_reset_row():
    rows = scripted_rows(AutoresetMode.NEXT_STEP)
    assert rows["obs"] == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
    assert rows["done"] == [1, 0, 0, 1, 0, 1, 0, 0, 0, 1]
    assert rows["terminated"] == [0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    assert rows["truncated"] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert rows["reward"] == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
    assert rows["episode_return"] == [0, 1, 3, 0, 1, 0, 1, 3, 6, 0]
    assert rows["episode_step"] == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]


def test_under_same_step_autoreset_one_row_ends_an_episode_and_begins_the_next():
    rows = scripted_rows(AutoresetMode.SAME_STEP)
    assert rows["obs"] == [0, 1, 0, 0, 1, 2, 0, 1, 0, 0]
    assert rows["done"] == [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert rows["terminated"] == [0, 0, 1, 0, 0, 0, 1, 0, 1, 0]
    assert rows["truncated"] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert rows["reward"] == [0, 1, 2, 1, 1, 2, 3, 1, 2, 1], "the reward is the ended episode's last"
    assert rows["episode_return"] == [0, 1, 0, 0, 1, 3, 0, 1, 0, 0]
    assert rows["episode_step"] == [0, 1, 0, 0, 1, 2, 0, 1, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_random_episodes_are_those_of_environments_played_one_by_one(mode):
    num_steps, seed = 200, 3
    group = EnvGroup(SyncVectorEnv([lambda: toy_envs.Counting(max_length=5)] * 4, autoreset_mode=mode))
    rows = play(group, num_steps, seed)
    for k in range(4):
        env = toy_envs.Counting(max_length=5)
        observation, _ = env.reset(seed=seed + k)
        expected = [(observation, 0.0, True, False, False, 0.0, 0)]
        total, length = 0.0, 0
        while len(expected) <= num_steps:
            observation, reward, terminated, truncated, _ = env.step(0)
            total, length = total + reward, length + 1
            ended = terminated or truncated
            if not ended or mode == AutoresetMode.NEXT_STEP:
                expected.append((observation, reward, False, terminated, truncated, total, length))
            if ended:
                observation, _ = env.reset()
                same_step = mode == AutoresetMode.SAME_STEP
                ends = (reward, True, terminated, truncated) if same_step else (0.0, True, False, False)
                expected.append((observation, *ends, 0.0, 0))
                total, length = 0.0, 0
        for t in range(num_steps + 1):
            np.testing.assert_array_equal(rows["obs"]["obs"][t, k], expected[t][0])
            assert tuple(rows[name][t, k] for name in SCALARS) == (*expected[t][1:], 0), (t, k)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unroll_length", [1, 2, 7])
def test_every_finished_episode_is_told_once_over_consecutive_rollouts(mode, unroll_length):
    group = EnvGroup(SyncVectorEnv([lambda: toy_envs.Counting(max_length=4)] * 3, autoreset_mode=mode))
    rows = play(group, 20 * unroll_length)
    told = []
    for first in range(0, 20 * unroll_length, unroll_length):
        told += finished_episodes({name: rows[name][first : first + unroll_length + 1] for name in SCALARS})
    assert told == finished_episodes(rows), "and in the same order"
    numbers = rows["obs"]["obs"][-1, :, 1]  # number of the episode that each env is in
    still_final = (rows["terminated"] | rows["truncated"])[-1] & ~rows["done"][-1]
    assert len(told) == numbers.sum(), "a last row that is final is told by the rollout after it"
    assert len(told) > 0 and still_final.sum() <= 3
    assert all(total == length * (length + 1) / 2 for total, length in told)
    assert all(type(total) is float and type(length) is int for total, length in told)


def rows_with_final_observations(group: EnvGroup, num_rows: int) -> dict:
    rows = new_rows(group, num_rows)
    return {**rows, "final_obs": {name: np.full_like(array, 55) for name, array in rows["obs"].items()}}


class Cut(gymnasium.Env):
    """Observes what its space samples; keeps all observations in `shown`. Every third step truncates, and every
    second of these terminates too."""

    def __init__(self, observation_space):
        self.observation_space, self.action_space = copy.deepcopy(observation_space), spaces.Discrete(2)
        self.shown, self.count = [], 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.shown.append(self.observation_space.sample())
        return self.shown[-1], {}

    def step(self, action):
        self.count += 1
        self.shown.append(self.observation_space.sample())
        return self.shown[-1], 0.0, self.count % 6 == 0, self.count % 3 == 0, {}


BOX = spaces.Box(0, 1, (3,), np.float32)
NESTED = spaces.Dict({"place": spaces.Dict({"x": BOX, "room": spaces.Discrete(9)}), "image": spaces.MultiBinary(4)})


@pytest.mark.parametrize("vector_env", [SyncVectorEnv, partial(AsyncVectorEnv, shared_memory=False)])
@pytest.mark.parametrize("space", [BOX, NESTED, spaces.Tuple((BOX, NESTED))])
def test_a_same_step_row_holds_the_last_observation_of_an_episode_that_it_truncates(vector_env, space):
    group = EnvGroup(vector_env([partial(Cut, space)] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    assert group.spaces.final_observations
    rows = rows_with_final_observations(group, 8)
    group.reset(4, row(rows, 0))
    for t in range(1, 8):
        group.step(np.zeros(2, np.int64), row(rows, t))
    group.close()
    for k in range(2):
        env = Cut(space)
        env.reset(seed=4 + k)
        for _ in range(7):
            if env.step(0)[3]:
                env.reset()
        for name, final in rows["final_obs"].items():
            keys = [int(key) if key.isdigit() else key for key in name.split(".")] if space is not BOX else []
            for t, last in ((3, 3), (6, 7)):  # observation 4 of the list begins the second episode
                np.testing.assert_array_equal(
                    final[t, k], reduce(getitem, keys, env.shown[last]), err_msg=f"{name} {t}"
                )
                np.testing.assert_array_equal(rows["obs"][name][t, k], reduce(getitem, keys, env.shown[last + 1]))
            assert (final[0] == 0).all(), "a reset leaves zeros"
            assert (final[[1, 2, 4, 5, 7]] == 55).all(), "other rows are left alone"
    assert rows["truncated"][:, 0].tolist() == [0, 0, 0, 1, 0, 0, 1, 0]
    assert rows["terminated"][:, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 0], "what has a final observation may bootstrap"


class TruncatesAsTold(VectorEnv):
    """Two envs under SAME_STEP; `info` is what a step gives beside the truncation of both."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    num_envs = 2
    single_action_space = spaces.Discrete(2)

    def __init__(self, observation_space, info: dict):
        self.single_observation_space, self.info = observation_space, info

    def reset(self, *, seed=None, options=None):
        return create_empty_array(self.single_observation_space, 2), {}

    def step(self, actions):
        observations = create_empty_array(self.single_observation_space, 2)
        return observations, np.zeros(2), np.zeros(2, bool), np.ones(2, bool), self.info


@pytest.mark.parametrize(
    ("space", "info", "terminated"),
    [
        (BOX, {}, [1, 1]),
        (BOX, {"final_obs": np.full((2, 3), 0.5)}, [0, 0]),  # as ale-py gives it
        (BOX, {"final_obs": None}, [1, 1]),
        (BOX, {"final_observation": np.full((2, 3), 0.5), "_final_observation": np.array([True, False])}, [0, 1]),
        (BOX, {"final_obs": np.full((2, 3), 0.5), "_final_obs": np.array([True, False])}, [0, 1]),
        (spaces.Dict({"a": BOX}), {"final_obs": {"a": np.full((2, 3), 0.5)}}, [0, 0]),
    ],
)
def test_a_truncation_without_a_final_observation_terminates_so_that_nothing_bootstraps(space, info, terminated):
    group = EnvGroup(TruncatesAsTold(space, info))
    rows = rows_with_final_observations(group, 2)
    group.reset(0, row(rows, 0))
    group.step(np.zeros(2, np.int64), row(rows, 1))
    assert rows["terminated"][1].tolist() == terminated
    assert rows["truncated"][1].tolist() == [1, 1] and rows["done"][1].tolist() == [1, 1]
    (final,) = rows["final_obs"].values()
    assert final[1, :, 0].tolist() == [0.5 if not ended else 55 for ended in terminated]


def test_final_observations_in_a_dict_of_arrays_go_to_their_own_environments():
    last = np.arange(6, dtype=np.float32).reshape(2, 3)
    group = EnvGroup(TruncatesAsTold(spaces.Dict({"a": BOX}), {"final_obs": {"a": last}}))
    rows = rows_with_final_observations(group, 2)
    group.reset(0, row(rows, 0))
    group.step(np.zeros(2, np.int64), row(rows, 1))
    np.testing.assert_array_equal(rows["final_obs"]["a"][1], last)


def test_rows_without_final_observations_and_next_step_environments_are_as_they_were():
    group = EnvGroup(TruncatesAsTold(BOX, {}))
    rows = play(group, 1)
    assert not rows["terminated"].any() and rows["truncated"][1].all()
    assert not EnvGroup(SyncVectorEnv([Scripted])).spaces.final_observations


def test_an_atari_vector_env_under_same_step_gives_its_final_observations():
    group = EnvGroup(envs.make("ALE/Pong-v5", 2, max_num_frames_per_episode=40, autoreset_mode=AutoresetMode.SAME_STEP))
    plain = EnvGroup(envs.make("ALE/Pong-v5", 2, max_num_frames_per_episode=40))
    rows, expected = rows_with_final_observations(group, 11), play(plain, 10, seed=3)
    group.reset(3, row(rows, 0))
    for t in range(1, 11):
        group.step(np.zeros(2, np.int64), row(rows, t))
    assert rows["truncated"][10].all() and not rows["terminated"].any()
    np.testing.assert_array_equal(rows["final_obs"]["obs"][10], expected["obs"]["obs"][10])
    assert (rows["obs"]["obs"][10] != expected["obs"]["obs"][10]).any(), "that is the next episode's first"
    group.close(), plain.close()


def test_a_reset_forgets_what_came_before_it():
    group = EnvGroup(SyncVectorEnv([Scripted, Scripted]))
    rows = new_rows(group, 5)
    group.reset(1, row(rows, 0))
    for t in (1, 2):
        group.step(np.zeros(2, np.int64), row(rows, t))
    assert rows["terminated"][2].all(), "the first episode lasts two steps"
    group.reset(1, row(rows, 3))
    group.step(np.zeros(2, np.int64), row(rows, 4))
    assert rows["done"][:, 0].tolist() == [1, 0, 0, 1, 0], "the step after a reset is an ordinary one"
    assert rows["episode_return"][:, 0].tolist() == [0, 1, 3, 0, 1]
    assert rows["terminated"][:, 0].tolist() == [0, 0, 1, 0, 0]


# ------------------------------------------------------------------------------------------------ Atari


def test_whole_games_of_breakout_are_told_with_all_their_lives():
    """Held against ale-py's env without life episodes, fed with the actions that were really executed."""
    num_steps, seed, fire = 500, 3, 1
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 4, (num_steps + 1, 2))
    group = EnvGroup(envs.make("BreakoutNoFrameskip-v4", 2))
    rows = play(group, num_steps, seed, lambda t: chosen[t])
    group.close()

    plain = AtariVectorEnv("breakout", 2, num_threads=1, reward_clipping=False, noop_max=30)
    observations, info = plain.reset(seed=seed)
    np.testing.assert_array_equal(rows["obs"]["obs"][0], observations)
    lives, was_over, was_life_over = info["lives"], np.zeros(2, bool), np.zeros(2, bool)
    total, length, games, lost_lives = np.zeros(2), np.zeros(2, int), [], 0
    for t in range(1, num_steps + 1):
        observations, reward, terminated, truncated, info = plain.step(np.where(was_life_over, fire, chosen[t]))
        for k in np.flatnonzero(was_over):
            games.append((total[k], length[k]))
        total, length = np.where(was_over, 0, total + reward), np.where(was_over, 0, length + 1)
        life_over = (info["lives"] < lives) & (info["lives"] > 0)
        lost_lives += life_over.sum()
        np.testing.assert_array_equal(rows["obs"]["obs"][t], observations)
        np.testing.assert_array_equal(rows["terminated"][t], terminated | life_over)
        np.testing.assert_array_equal(rows["done"][t], was_over | was_life_over)
        np.testing.assert_array_equal(rows["reward"][t], reward)
        np.testing.assert_array_equal(rows["episode_return"][t], total)
        np.testing.assert_array_equal(rows["episode_step"][t], length)
        lives, was_over, was_life_over = info["lives"], terminated | truncated, life_over
    plain.close()
    assert len(games) >= 2 and lost_lives >= 4 * len(games), "a game of Breakout has five lives"
    assert finished_episodes(rows) == games
    assert sum(total for total, _ in games) > 0


def test_the_frame_limit_of_an_atari_game_truncates_and_does_not_terminate():
    group = EnvGroup(envs.make("ALE/Pong-v5", 1, max_num_frames_per_episode=40))
    rows = play(group, 23)
    truncated = np.flatnonzero(rows["truncated"][:, 0]).tolist()
    assert truncated == [10, 21], "40 frames are 10 steps; a row for the reset lies between"
    assert not rows["terminated"].any()
    assert np.flatnonzero(rows["done"][:, 0]).tolist() == [0, 11, 22]
    assert [length for _, length in finished_episodes(rows)] == [10, 10]
    assert ATARI_FRAMES_PER_EPISODE == 108_000


class LivesAsTold(VectorEnv):
    """One env under NEXT_STEP whose lives and ends are a list; it notes the actions that reach it."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 1
    single_observation_space, single_action_space = spaces.Box(0, 99, (), np.float32), spaces.Discrete(4)

    class ale:  # noqa: N801
        get_action_set = staticmethod(lambda: [Action.NOOP, Action.FIRE, Action.RIGHT, Action.LEFT])

    def __init__(self, *told):
        self.told, self.count, self.actions = told, 0, []

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {"lives": np.array([self.told[0][0]])}

    def step(self, actions):
        self.actions.append(int(actions[0]))
        self.count += 1
        lives, terminated, truncated = self.told[self.count]
        info = {"lives": np.array([lives])}
        return np.full(1, self.count, np.float32), np.ones(1), np.array([terminated]), np.array([truncated]), info


def test_a_life_terminates_the_next_begins_with_fire_and_returns_carry_on_until_the_game_ends():
    go, end = (False, False), (True, False)
    env = LivesAsTold((2, *go), (2, *go), (1, *go), (1, *go), (0, *go), (0, *end), (2, *go), (2, *go))
    rows = play(EnvGroup(LifeEpisodes(env)), 7, actions=lambda t: np.array([3]))
    assert env.actions == [3, 3, 1, 3, 3, 3, 3], "FIRE takes the place of the void action after a lost life"
    assert rows["terminated"][:, 0].tolist() == [0, 0, 1, 0, 0, 1, 0, 0], "no lives left is not yet the end"
    assert rows["done"][:, 0].tolist() == [1, 0, 0, 1, 0, 0, 1, 0]
    assert rows["episode_return"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert rows["episode_step"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert rows["reward"][:, 0].tolist() == [0, 1, 1, 1, 1, 1, 0, 1]
    assert finished_episodes(rows) == [(5.0, 5)]


def test_a_game_cut_off_in_the_step_that_costs_a_life_is_over():
    go, cut = (False, False), (False, True)
    env = LivesAsTold((2, *go), (1, *cut), (2, *go), (2, *go))
    rows = play(EnvGroup(LifeEpisodes(env)), 3, actions=lambda t: np.array([3]))
    assert env.actions == [3, 3, 3], "the next game begins by the reset, not by FIRE"
    assert not rows["terminated"].any() and rows["truncated"][:, 0].tolist() == [0, 1, 0, 0]
    assert finished_episodes(rows) == [(1.0, 1)]


def test_a_game_cut_off_in_the_step_that_begins_a_life_leaves_two_final_rows_and_is_told_once():
    go, cut = (False, False), (False, True)
    env = LivesAsTold((2, *go), (1, *go), (1, *cut), (2, *go), (2, *go))
    rows = play(EnvGroup(LifeEpisodes(env)), 4)
    assert rows["terminated"][:, 0].tolist() == [0, 1, 0, 0, 0]
    assert rows["truncated"][:, 0].tolist() == [0, 0, 1, 0, 0]
    assert rows["done"][:, 0].tolist() == [1, 0, 0, 1, 0]
    assert finished_episodes(rows) == [(2.0, 2)]


def test_a_game_cut_off_with_more_lives_than_the_next_begins_with_has_lost_none():
    go, cut = (False, False), (False, True)
    env = LivesAsTold((3, *go), (4, *cut), (3, *go), (2, *go), (2, *go))
    rows = play(EnvGroup(LifeEpisodes(env)), 4, actions=lambda t: np.array([3]))
    assert env.actions == [3, 3, 3, 1]
    assert rows["terminated"][:, 0].tolist() == [0, 0, 0, 1, 0] and rows["truncated"][:, 0].tolist() == [0, 1, 0, 0, 0]
    assert rows["done"][:, 0].tolist() == [1, 0, 1, 0, 1]


def note_actions(env: LifeEpisodes) -> list[np.ndarray]:
    """The actions that reach the environment below it from now on."""
    sent, step = [], env.env.step
    env.env.step = lambda actions: (sent.append(actions), step(actions))[1]
    return sent


def test_a_reset_of_some_games_leaves_the_lost_lives_of_the_others():
    env = envs.make("BreakoutNoFrameskip-v4", 2)
    env.reset(seed=1)
    sent = note_actions(env)
    env._life_over[:] = True
    env.reset(options={"reset_mask": np.array([True, False])})
    env.step(np.array([2, 3]))
    assert sent[0].tolist() == [2, 1], "FIRE where a life was lost and the game goes on"
    env.close()


@pytest.mark.parametrize("backend", ["beast", "ale"])
def test_what_would_count_lives_wrongly_is_refused(backend):
    if backend == "beast":
        pytest.importorskip("libatari")
    make = partial(envs.make, "BreakoutNoFrameskip-v4", 2, atari_backend=backend)
    with pytest.raises(InputError, match="under NEXT_STEP only: leave autoreset_mode out, or add --episodic_life off"):
        make(env_kwargs={"autoreset_mode": "SameStep"})
    make(env_kwargs={"autoreset_mode": "SameStep"}, episodic_life=False).close()
    with pytest.raises(InputError, match="life_loss_info would count each life as a game"):
        make(env_kwargs={"life_loss_info": True})


def test_continuous_actions_of_atari_press_fire_after_a_lost_life():
    env = envs.make("BreakoutNoFrameskip-v4", 3, env_kwargs={"continuous": True})
    env.reset(seed=1)
    sent = note_actions(env)
    env._life_over[:] = [True, False, False]
    env.step(np.full((3, 3), 0.25, np.float32))
    np.testing.assert_array_equal(sent[0], [[0, 0, 1], [0.25] * 3, [0.25] * 3])
    env.close()


def test_a_noframeskip_v4_id_means_no_ops_and_fire_at_the_start_lives_as_episodes_and_no_sticky_actions():
    env = envs.make("BreakoutNoFrameskip-v4", 3)
    assert isinstance(env, LifeEpisodes)
    assert env.single_observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert env.single_action_space == spaces.Discrete(4)
    starts = env.reset(seed=1)[1]["episode_frame_number"]
    assert len(set(starts.tolist())) > 1 and starts.max() <= 31, "different numbers of no-ops"
    for _ in range(40):
        _, _, _, _, info = env.step(np.zeros(3, np.int64))
    assert (info["frame_number"] > 100).all() and (info["lives"] < 5).all(), "the ball was served"
    env.close()

    env = envs.make("BreakoutNoFrameskip-v4", 2, noop_max=0)
    env.reset(seed=1)
    for t in range(40):
        observations = env.step(np.full(2, t % 4))[0]
    np.testing.assert_array_equal(observations[0], observations[1], err_msg="without no-ops nothing is left to chance")
    env.close()


def test_an_ale_v5_id_means_sticky_actions_and_nothing_else_at_the_start_or_at_a_lost_life():
    env = envs.make("ALE/Breakout-v5", 2)
    assert type(env).__name__ == "AtariVectorEnv", "Beast's or ale-py's, and no wrapper"
    observations, info = env.reset(seed=1)
    assert info["episode_frame_number"].tolist() == [0, 0]
    np.testing.assert_array_equal(observations[0], observations[1])
    differs, lives, actions = False, info["lives"], [1, 2, 2, 3, 3]
    for t in range(120):
        observations, _, terminated, _, info = env.step(np.full(2, actions[t % 5]))
        differs = differs or (observations[0] != observations[1]).any()
        assert not terminated.any()
        if (info["lives"] < lives).all():
            break
    assert differs, "the same actions stick differently"
    assert (info["lives"] < lives).any(), "a life was lost and no episode ended"
    env.close()


def test_rewards_of_atari_are_not_clipped():
    group = EnvGroup(envs.make("QbertNoFrameskip-v4", 1))
    rng = np.random.default_rng(0)
    rows = play(group, 60, 3, lambda t: rng.integers(0, 6, 1))
    assert rows["reward"].max() == 25, "a cube of Q*bert"


def test_one_step_of_atari_is_four_frames():
    ids = ["PongNoFrameskip-v4", "ALE/Pong-v5", "CartPole-v1", "MinAtar/Breakout-v0"]
    probed = [probe_env(lambda flags, n: envs.make(flags.env, n), env_flags(env=i)) for i in ids]
    assert [spaces.frames_per_step for spaces in probed] == [4, 4, 1, 1]


# ---------------------------------------------------------------------------------------------- MinAtar


def test_minatar_has_all_six_actions_and_plays_as_the_original_does():
    pytest.importorskip("minatar")
    group = EnvGroup(envs.make("MinAtar/Breakout-v0", 1))
    assert group.spaces.action == spaces.Discrete(6)
    assert group.fields["obs/obs"] == ((10, 10, 4), "bool")
    assert envs.make("MinAtar/Breakout-v1", 1).single_action_space == spaces.Discrete(3)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 6, 200)
    rows = play(group, 199, 4, lambda t: actions[t : t + 1])

    from minatar import Environment

    original = Environment("breakout", sticky_action_prob=0.1)
    original.seed(4)
    original.reset()
    over = False
    for t in range(1, 200):
        reward = 0
        if over:
            original.reset()
            over = False
        else:
            reward, over = original.act(actions[t])
        np.testing.assert_array_equal(rows["obs"]["obs"][t, 0], original.state())
        assert (rows["reward"][t, 0], rows["terminated"][t, 0]) == (reward, over)
    assert len(finished_episodes(rows)) > 5


# ------------------------------------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("env_id", "near"),
    [
        ("PongNoFramskip-v4", "PongNoFrameskip-v4"),
        ("Pong-v4", "ALE/Pong-v5"),
        ("ALE/Braekout-v5", "ALE/Breakout-v5"),
        ("cartpole", "CartPole-v1"),
        ("MinAtar/Breakuot-v0", "MinAtar/Breakout-v0"),
        ("toy_envs:Countin-v0", "Counting-v0"),
    ],
)
def test_an_unknown_id_is_named_with_the_nearest_that_exist(env_id, near):
    with pytest.raises(InputError, match=f"no environment is called '{env_id}'") as error:
        envs.make(env_id, 1)
    assert near in str(error.value)


def test_impossible_requests_are_refused_with_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="num_envs is 0"):
        envs.make("CartPole-v1", 0)
    with pytest.raises(InputError, match="episodic_life is for Atari ids"):
        envs.make("CartPole-v1", 1, episodic_life=True)
    with pytest.raises(MissingPackage, match="no_such_module"):
        envs.make("no_such_module:Env-v0", 1)
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(MissingFile, match="put pong.bin into ALE_ROMS_DIR=.*or unset"):
        envs.make("ALE/Pong-v5", 1)


def env_flags(**changes):
    return types.SimpleNamespace(**{**dataclasses.asdict(EnvFlags()), "group_width": 4, **changes})


def from_flags(num_envs: int = 1, **changes):
    flags = env_flags(**changes)
    return envs.make(flags.env, num_envs, **envs.options(flags))


def test_flags_choose_the_atari_protocol_and_what_they_leave_open_the_id_implies(monkeypatch):
    made: list[dict] = []
    original = AtariVectorEnv.__init__

    def record(self, game, num_envs, **settings):
        made.append(settings)
        original(self, game, num_envs, **settings)

    monkeypatch.setattr(AtariVectorEnv, "__init__", record)
    env = from_flags(
        env="ALE/Breakout-v5", frame_stack=2, frame_skip=3, resize=64, sticky_actions=0.5, noops=7, episodic_life="on",
        full_action_space="on", env_kwargs='{"maxpool": false}', atari_backend="ale",
    )  # fmt: skip
    assert env.single_observation_space.shape == (2, 64, 64) and env.single_action_space == spaces.Discrete(18)
    assert isinstance(env, LifeEpisodes) and env.metadata["frames_per_step"] == 3
    protocol = {"repeat_action_probability": 0.5, "noop_max": 7, "use_fire_reset": False, "maxpool": False}
    assert protocol.items() <= made[-1].items()
    choices = {"episodic_life": "off", "grayscale": "off", "resize": 40, "noops": 0}
    env = from_flags(env="BreakoutNoFrameskip-v4", atari_backend="ale", **choices)
    assert env.single_observation_space.shape == (40, 40, 12) and not isinstance(env, LifeEpisodes)
    assert made[-1]["noop_max"] == 0 and env.metadata["frames_per_step"] == 4
    env.reset(seed=1)
    observations = env.step(np.array([0]))[0]
    assert observations.shape == (1, 40, 40, 12) and observations in env.observation_space


class ColorImages(gymnasium.Env):
    """Red images [12, 16, 3] as bright as the step's number, or [3, 12, 16]; pays the number."""

    metadata = {"render_modes": [], "render_fps": 30}

    def __init__(self, channels_first: bool = False, last: int = 200):
        self.last, self.shape = last, (3, 12, 16) if channels_first else (12, 16, 3)
        self.observation_space, self.action_space = spaces.Box(0, 255, self.shape, np.uint8), spaces.Discrete(2)

    def _image(self):
        image = np.zeros(self.shape, np.uint8)
        image[(0,) if self.shape[0] == 3 else (..., 0)] = self.count
        return image

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._image(), {}

    def step(self, action):
        self.count += 1
        return self._image(), float(self.count), self.count == self.last, False, {}


gymnasium.register("ColorImages-v0", ColorImages)


@pytest.mark.parametrize("channels_first", [False, True])
def test_images_are_skipped_and_stacked_in_their_channels_with_the_newest_last(channels_first):
    kwargs = json.dumps({"channels_first": channels_first})
    env = from_flags(2, env="ColorImages-v0", frame_stack=2, frame_skip=3, env_kwargs=kwargs)
    assert env.single_observation_space.shape == ((6, 12, 16) if channels_first else (12, 16, 6))
    assert env.metadata["frames_per_step"] == 3 and env.metadata["render_fps"] == 10
    env.reset(seed=1)
    for count in (3, 6):
        observations, rewards, *_ = env.step(np.zeros(2, int))
        assert rewards.tolist() == [3 * count - 3] * 2, "the sum over three frames"
    channels = observations[1, :, 0, 0] if channels_first else observations[1, 0, 0]
    assert channels.tolist() == [3, 0, 0, 6, 0, 0] and observations in env.observation_space
    assert EnvGroup(env).fields["obs/obs"][1] == "uint8"


def test_the_last_observation_of_an_episode_that_ends_within_a_skip_is_its_last_frame():
    kwargs = {"env": "ColorImages-v0", "frame_skip": 3, "env_kwargs": '{"last": 4}'}
    env = from_flags(1, **kwargs)
    env.reset(seed=1)
    observed = [env.step(np.zeros(1, int))[0][0, 0, 0, 0] for _ in range(2)]
    assert observed == [3, 4], "the episode ends in the first frame of its second step"


def test_images_become_gray_and_small(monkeypatch):
    env = from_flags(env="ColorImages-v0", grayscale="on", frame_stack=3)
    assert env.single_observation_space.shape == (12, 16, 3)
    with monkeypatch.context() as missing, pytest.raises(MissingPackage, match="pip install opencv-python-headless"):
        missing.setitem(sys.modules, "cv2", None)
        from_flags(env="ColorImages-v0", resize=4)
    for grayscale, pixel in (("on", [21]), ("off", [100, 0, 0])):  # gymnasium weighs red by 0.2125
        env = from_flags(env="ColorImages-v0", grayscale=grayscale, resize=4)
        assert env.single_observation_space.shape == (4, 4, len(pixel))
        env.reset(seed=1)
        for _ in range(100):
            image = env.step(np.zeros(1, int))[0]
        assert image in env.observation_space and (image == pixel).all(), image
    with pytest.raises(InputError, match="channels first"):
        from_flags(env="ColorImages-v0", resize=4, env_kwargs='{"channels_first": true}')


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"env_kwargs": "{map_name: 8x8}"}, r"--env_kwargs '\{map_name: 8x8\}' is no JSON \(Expecting"),
        ({"env_kwargs": "[1]"}, r"--env_kwargs '\[1\]' is JSON, but no object: \[1\]"),
        ({"frame_stack": 4}, r"frame_stack is for images, and CartPole-v1 observes Box"),
        ({"frame_skip": 2}, r"frame_skip is for images, and CartPole-v1 observes Box"),
        ({"noops": 3}, r"noops is for Atari ids, and CartPole-v1 is none"),
        ({"full_action_space": "on"}, r"full_action_space is for Atari ids"),
    ],
)
def test_flags_that_an_environment_cannot_follow_are_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        from_flags(**{"env": "CartPole-v1", **changes})


def test_an_environment_is_called_what_the_flag_says_unless_create_env_does_not_look_at_it():
    flags = env_flags(env="BreakoutNoFrameskip-v4", frame_skip=2)

    def probe(make_envs):
        spaces = probe_env(make_envs, flags)
        return spaces.env_id, spaces.frames_per_step

    assert probe(lambda flags, n: envs.make(flags.env, n, **envs.options(flags))) == ("BreakoutNoFrameskip-v4", 2)
    assert probe(lambda flags, n: SyncVectorEnv([toy_envs.Counting] * n)) == ("Counting", 1)
    assert probe(lambda flags, n: gymnasium.make_vec("CartPole-v1", n)) == ("CartPole-v1", 1)
    assert probe(lambda flags, n: envs.make("ALE/Pong-v5", n, frame_skip=5)) == ("ALE/Pong-v5", 5)
    assert probe(lambda flags, n: SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * n)) == ("Pendulum-v1", 1)
    own = "mine"
    flags.env = own
    assert probe(lambda flags, n: SyncVectorEnv([toy_envs.Counting] * n * bool(flags.env))) == (own, 1)


def test_gymnasium_ids_run_at_full_speed_and_user_ids_name_their_module():
    env = envs.make("Pendulum-v1", 2)
    assert isinstance(env, SyncVectorEnv) and not env.copy, "a copy of every observation less"
    assert "PassiveEnvChecker" not in str(env.envs[0])
    assert type(envs.make("CartPole-v1", 2).unwrapped).__name__ == "CartPoleVectorEnv", "its own vector env"
    env = envs.make("toy_envs:Counting-v0", 2, max_length=3)
    assert env.envs[0].unwrapped.max_length == 3


def test_cartpole_ends_after_500_steps_by_truncation():
    """Its own vector env: a policy that balances."""
    group = EnvGroup(envs.make("CartPole-v1", 1))
    rows = new_rows(group, 503)
    group.reset(0, row(rows, 0))
    for t in range(1, 503):
        x, x_dot, theta, theta_dot = rows["obs"]["obs"][t - 1, 0]
        group.step(np.array([int(0.1 * x + 0.2 * x_dot + theta + 0.5 * theta_dot > 0)]), row(rows, t))
    assert np.flatnonzero(rows["truncated"][:, 0]).tolist() == [500] and not rows["terminated"].any()
    assert rows["done"][501, 0] and rows["episode_step"][502, 0] == 1
    assert finished_episodes(rows) == [(500.0, 500)]


def test_the_module_stays_small_and_imports_no_torch():
    """Actors import it; Linux tells how much memory it then takes."""
    code = """
import sys
from beast import envs
from beast.envs.groups import EnvGroup
for env_id in ("PongNoFrameskip-v4", "CartPole-v1"):
    EnvGroup(envs.make(env_id, 1))
try:
    envs.make("MinAtar/Breakout-v0", 1)
except ImportError:
    pass
heavy = {"torch", "matplotlib", "pandas", "seaborn", "cv2", "scipy"} & set(sys.modules)
assert not heavy, heavy
if sys.platform == "linux":
    pages = int(open("/proc/self/statm").read().split()[1])
    assert pages * 4096 < 200e6, pages
"""
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------------------------- spaces and autoreset


class Echo(gymnasium.Env):
    """Keeps the actions it was given, as they came, in `told`."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.told = []

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.told.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def told_actions(space: spaces.Space, actions: np.ndarray) -> list:
    env = SyncVectorEnv([lambda: Echo(space)] * len(actions))
    play(EnvGroup(env), 1, actions=lambda t: actions)
    return [sub_env.told[0] for sub_env in env.envs]


def test_minus_one_to_one_spans_the_bounds_of_a_box_and_what_lies_outside_is_clipped():
    space = spaces.Box(np.array([0, -4], np.float32), np.array([10, 4], np.float32))
    actions = np.array([[-1, -1], [0, 0.5], [1, 1], [-7, 7]], np.float32)
    np.testing.assert_allclose(told_actions(space, actions), [[0, -4], [5, 2], [10, 4], [0, 4]])


def test_numbers_of_a_box_without_two_bounds_pass_unscaled():
    space = spaces.Box(np.array([-np.inf, 0, 2], np.float32), np.array([np.inf, np.inf, 4], np.float32))
    actions = np.array([[30, 5, 0], [-30, -5, -1]], np.float32)
    np.testing.assert_allclose(told_actions(space, actions), [[30, 5, 3], [-30, 0, 2]])


def test_a_box_of_any_shape_gets_its_shape_and_dtype_back():
    space = spaces.Box(-2, 2, (2, 3), np.float64)
    (action,) = told_actions(space, np.linspace(-1, 1, 6, dtype=np.float32)[None])
    np.testing.assert_allclose(action, np.linspace(-2, 2, 6).reshape(2, 3), rtol=1e-6)
    assert action.dtype == np.float64


def test_categories_start_where_the_space_says():
    assert [int(a) for a in told_actions(spaces.Discrete(3, start=-1), np.array([0, 1, 2]))] == [-1, 0, 1]
    space = spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 10], [20, 30]])
    (action,) = told_actions(space, np.array([[1, 2, 3, 4]]))
    assert action.tolist() == [[1, 12], [23, 34]]


def test_the_parts_of_a_tuple_are_nested_again():
    inner = spaces.Tuple((spaces.Discrete(4, start=10), spaces.MultiDiscrete([2, 5])))
    space = spaces.Tuple((spaces.Discrete(3), inner, spaces.Discrete(7)))
    first, second = told_actions(space, np.array([[2, 3, 1, 4, 6], [0, 1, 0, 2, 5]]))
    assert (first[0], first[1][0], first[1][1].tolist(), first[2]) == (2, 13, [1, 4], 6)
    assert (second[0], second[1][0], second[1][1].tolist(), second[2]) == (0, 11, [0, 2], 5)


@pytest.mark.parametrize("action", [-1, 4, np.iinfo(np.int64).max])
def test_an_action_that_the_space_does_not_have_is_refused_before_the_env_hangs_on_it(action):
    with pytest.raises(ValueError, match=r"not all in Discrete\(4\)"):
        env_actions(spaces.Discrete(4), np.array([0, action]))


def test_parts_of_dict_observations_get_their_own_names_nested_ones_joined_by_dots():
    class Nested(Echo):
        def __init__(self):
            super().__init__(spaces.Discrete(2))
            place = spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32), "room": spaces.Discrete(9)})
            bits = spaces.MultiBinary(3)
            self.observation_space = spaces.Dict({"place": place, "bits": bits, "dice": spaces.MultiDiscrete([6, 6])})

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            place = {"x": np.array([0.5, -0.5], np.float32), "room": 7}
            observation = {"place": place, "bits": np.array([1, 0, 1], np.int8), "dice": np.array([2, 5])}
            return observation, 0.0, False, False, {}

    group = EnvGroup(SyncVectorEnv([Nested] * 2))
    assert {name: field for name, field in group.fields.items() if name.startswith("obs/")} == {
        "obs/bits": ((3,), "int8"),
        "obs/dice": ((2,), "int64"),
        "obs/place.room": ((), "int64"),
        "obs/place.x": ((2,), "float32"),
    }
    observations = play(group, 1)["obs"]
    assert observations["bits"][1].tolist() == [[1, 0, 1]] * 2
    assert observations["dice"][1].tolist() == [[2, 5]] * 2
    assert observations["place.room"][1].tolist() == [7, 7]
    assert observations["place.x"][1].tolist() == [[0.5, -0.5]] * 2


def test_parts_of_tuples_are_named_by_their_index_and_texts_are_left_out():
    group = EnvGroup(envs.make("toy_envs:Nested-v0", 3))
    assert {name: field for name, field in group.fields.items() if name.startswith("obs/")} == {
        "obs/inner.flags": ((3,), "int8"),
        "obs/inner.pair.0": ((), "int64"),
        "obs/inner.pair.1": ((2,), "float32"),
        "obs/sizes": ((2,), "int64"),
    }
    rows = play(group, 20, actions=lambda t: np.full(3, t % 3))
    shown = rows["obs"]["inner.pair.0"] - 5 + rows["obs"]["sizes"][..., 0]
    actions = (np.arange(1, 21) % 3)[:, None]
    counts = ~rows["done"][1:]
    np.testing.assert_array_equal(rows["reward"][1:][counts], (shown[:-1] == actions)[counts])
    assert 0 < rows["reward"].sum() and set(rows["obs"]["inner.flags"].flat) == {1}
    space = spaces.Tuple((spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))), spaces.Dict(a=spaces.Discrete(4))))
    assert parts_by_name(space, ((1, 2), {"a": 3})) == {"0.0": 1, "0.1": 2, "1.a": 3}


def test_a_mission_of_numbers_stays_and_a_text_elsewhere_is_refused_with_the_wrapper_that_leaves_it_out():
    space = spaces.Dict(text=spaces.Text(5), mission=spaces.Box(0, 1, (2,)))
    env = toy_envs.Counting()
    env.observation_space = space
    assert list(leave_out_texts(env).observation_space) == ["mission"], "one of numbers can be learned from"
    with pytest.raises(InputError, match="beast.envs.texts.leave_out_texts"):
        observation_field(spaces.Text(5))


def test_observation_spaces_that_have_no_array_are_refused_and_so_are_two_of_one_name():
    with pytest.raises(ValueError, match="Text.*is not supported; supported are Box"):
        EnvGroup(TruncatesAsTold(spaces.Dict({"text": spaces.Text(5)}), {}))
    box = spaces.Box(0, 1, (1,))
    with pytest.raises(ValueError, match="'a.b'"):
        EnvGroup(TruncatesAsTold(spaces.Dict({"a": spaces.Dict({"b": box}), "a.b": box}), {}))


def test_an_env_that_does_not_reset_itself_is_refused():
    with pytest.raises(ValueError, match="is AutoresetMode.DISABLED, expected AutoresetMode.NEXT_STEP or SAME_STEP"):
        EnvGroup(SyncVectorEnv([Scripted], autoreset_mode=AutoresetMode.DISABLED))
    env = LivesAsTold((0, False, False))
    env.metadata = {}
    with pytest.raises(ValueError, match="is None, expected"):
        EnvGroup(env)


# ------------------------------------------------------------------------------------------------- toys


# ------------------------------------------------------------------------------------ what create_env gives


class TwoAgents:
    """PettingZoo's parallel interface."""

    possible_agents = ["a", "b"]
    metadata: dict = {}
    render_mode = None

    def observation_space(self, agent):
        return spaces.Discrete(2)

    action_space = observation_space


class WrongShape(toy_envs.Counting):
    def _observation(self):
        return np.zeros(2, np.float32)


class WrongNest(toy_envs.Dict):
    def _show(self):
        return {"image": super()._show()["image"]}


class OldInterface(toy_envs.Counting):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class FourValues(toy_envs.Counting):
    def step(self, action):
        return super().step(action)[:4]


class RaisesInReset(toy_envs.Counting):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no license\nand much more")


class RaisesInStep(toy_envs.Counting):
    def step(self, action):
        return self.no_such_thing


class NeedsPackage(toy_envs.Counting):
    def __init__(self):
        raise DependencyNotInstalled(
            'Box2D is not installed, you can install it by run `pip install "gymnasium[box2d]"`'
        )


class ImportsNothing(toy_envs.Counting):
    def __init__(self):
        import no_such_simulator  # noqa: F401


class Exits(toy_envs.Counting):
    def __init__(self):
        sys.exit("no display")


class OnlyResets(VectorEnv):
    """A vector env that its author has not finished."""

    num_envs = 2
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space = spaces.Box(0, 1, (3,), np.float32)
    single_action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((3, 2), np.float32), {}


class WrongRows(OnlyResets):
    def step(self, actions):
        raise AssertionError("the reset is refused before")


def sync(env_class):
    return lambda flags, num_envs: SyncVectorEnv([env_class] * num_envs)


@pytest.mark.parametrize(
    "create_env, message",
    [
        (lambda flags, num_envs: None, r"create_env\(\) returned None: return a vector env, as in gymnasium"),
        (lambda flags, num_envs: toy_envs.Counting(), "returned Counting, which is no vector env: return a vector env"),
        (lambda flags, num_envs: [toy_envs.Counting()], "returned list, which is no vector env"),
        (lambda flags, num_envs: SyncVectorEnv([toy_envs.Counting]), r"num_envs=2\) returned 1 environments"),
        (lambda flags, num_envs: TwoAgents(), "TwoAgents has several agents: give --env pettingzoo:<its module>"),
        (sync(TwoAgents), "TwoAgents has several agents: give --env pettingzoo:<its module>"),
        (sync(WrongShape), r"WrongShape: reset\(\) gave observations float32 of shape \(2,\), the obs.* \(3,\)"),
        (sync(WrongNest), r"WrongNest: reset\(\) gave an observation that is not nested as its space .*'number'"),
        (lambda flags, num_envs: WrongRows(), r"WrongRows: reset\(\) gave observations .*\(3, 2\).*\(2, 3\)"),
        (sync(OldInterface), r"OldInterface: reset\(\) returned a ndarray instead of \(observation, info\)"),
        (sync(FourValues), r"FourValues: step\(\) returned 4 values instead of \(observation, reward, terminated"),
        (
            sync(RaisesInReset),
            r"RaisesInReset: reset\(\) raised RuntimeError: no license \(.*test_envs.py:\d+, in reset\)$",
        ),
        (
            sync(RaisesInStep),
            r"RaisesInStep: step\(\) raised AttributeError: .*no_such_thing' \(.*test_envs.py:\d+, in st",
        ),
        (sync(NeedsPackage), r"Box2D is not installed, .*pip install \"gymnasium\[box2d\]\"`$"),
        (sync(ImportsNothing), r"No module named 'no_such_simulator' \(.*test_envs.py:\d+, in __init__\)$"),
        (sync(Exits), r"making it raised SystemExit: no display \(.*test_envs.py:\d+, in __init__\)$"),
        (lambda flags, num_envs: OnlyResets(), r"OnlyResets, which has no step\(\) of its own"),
        (lambda flags, num_envs: SyncVectorEnv([toy_envs.Counting] * num_envs, autoreset_mode="Disabled"), "autoreset"),
    ],
)
def test_what_create_env_gives_is_checked_and_refused_in_one_line(create_env, message):
    with pytest.raises((InputError, MissingPackage), match=message) as refused:
        probe_env(create_env, env_flags())
    assert "\n" not in str(refused.value)


def test_wrappers_with_statistics_of_their_own_are_warned_of_with_the_flag_that_does_it_in_the_net(capfd):
    def create_env(flags, num_envs):
        def make():
            env = wrappers.NormalizeReward(wrappers.NormalizeObservation(toy_envs.Counting()))
            return wrappers.TransformReward(env, lambda reward: 2 * reward)

        env = wrappers.vector.NormalizeReward(wrappers.vector.NormalizeObservation(SyncVectorEnv([make] * num_envs)))
        return wrappers.vector.RecordEpisodeStatistics(env)

    probe_env(create_env, env_flags())
    told = capfd.readouterr().err.splitlines()
    flags = [re.fullmatch(r"warning: Counting: Normalize(\w+) normalizes by .* and give (--.*)", line) for line in told]
    assert [match and match.groups() for match in flags] == [
        ("Reward", "--normalize_returns on"),
        ("Reward", "--normalize_returns on"),
        ("Observation", "--normalize_observations"),
        ("Observation", "--normalize_observations"),
    ]
    probe_env(sync(toy_envs.Counting), env_flags())
    probe_env(lambda flags, num_envs: envs.make(flags.env, num_envs), env_flags())
    assert not capfd.readouterr().err


def test_a_module_that_imports_what_is_not_there_is_told_apart_from_one_that_is_not_there_itself(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_envs_a.py").write_text("import numpy\nimport no_such_simulator\n")
    (tmp_path / "my_envs_b.py").write_text("import numpy\n\n1 / 0\n")
    for env_id, message in (
        (
            "no_such_module:X-v0",
            "No module named 'no_such_module'; what stands before ':' is a module that is installed or on",
        ),
        (
            "my_envs_a:X-v0",
            r"my_envs_a imports what is not installed: .*'no_such_simulator' \(.*my_envs_a.py:2, in <mod",
        ),
        ("my_envs_b:X-v0", r"my_envs_b cannot be imported: ZeroDivisionError: .* \(.*my_envs_b.py:3, in <module>\)$"),
    ):
        with pytest.raises((InputError, MissingPackage), match=message):
            envs.make(env_id, 1)


class Renders(toy_envs.Counting):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None, frame=None):
        super().__init__()
        self.render_mode, self.frame = render_mode, frame

    def render(self):
        if isinstance(self.frame, Exception):
            raise self.frame
        return self.frame


@pytest.mark.parametrize(
    "create_env, message",
    [
        (
            lambda flags, n: SyncVectorEnv([Renders] * n),
            "create_env.* takes no render_mode: TypeError.*Take .*overrides",
        ),
        (
            lambda flags, n, **_: SyncVectorEnv([Renders] * n),
            "--video: Renders has the render_mode None. Take .*overrides",
        ),
        (
            RuntimeError("an OpenGL platform library has not been loaded"),
            r"--video: Renders: render\(\) raised .*MUJOCO_GL=egl",
        ),
        (
            ValueError("no camera"),
            r"--video: Renders: render\(\) raised ValueError: no camera \(.*test_envs.py:\d+, in render\)$",
        ),
        (DependencyNotInstalled("pygame is not installed"), "--video: Renders: pygame is not installed$"),
        (None, "gave a NoneType for a frame instead of an image"),
        (np.zeros((4, 4)), r"gave an array of shape \(4, 4\) for a frame"),
    ],
)
def test_an_environment_that_cannot_be_filmed_is_refused_before_a_game_is_played(create_env, message):
    def creates(flags, num_envs, **overrides):
        return SyncVectorEnv([lambda: Renders(frame=create_env, **overrides)] * num_envs)

    with pytest.raises((InputError, MissingPackage), match=message):
        probe_env(create_env if callable(create_env) else creates, env_flags(), render_mode="rgb_array")


def test_an_id_without_render_mode_cannot_be_filmed():
    def create_env(flags, num_envs, **overrides):
        return envs.make(flags.env, num_envs, **envs.options(flags) | overrides)

    with pytest.raises(InputError, match="--video: toy_envs:Counting-v0 takes no render_mode"):
        probe_env(create_env, env_flags(env="toy_envs:Counting-v0"), render_mode="rgb_array")


@pytest.mark.parametrize(
    ("toy", "best", "play_well"),
    [
        ("MultiDiscrete", 8.0, lambda obs: np.stack([obs["obs"][:, :3].argmax(1), obs["obs"][:, 3:].argmax(1)], 1)),
        ("Buttons", 8.0, lambda obs: np.stack([*obs["obs"].T[:2].astype(int), obs["obs"][:, 2:].argmax(1)], 1)),
        ("Tuple", 8.0, lambda obs: np.stack([obs["obs"][:, :3].argmax(1), obs["obs"][:, 3:].argmax(1)], 1)),
        ("Dict", 8.0, lambda obs: 2 * (obs["image"][:, 7, 0, 0] > 0) + (obs["number"][:, 0] > 0)),
    ],
)
def test_the_matching_toys_can_be_solved(toy, best, play_well):
    group = EnvGroup(envs.make(f"toy_envs:{toy}-v0", 3))
    rows = new_rows(group, 20)
    group.reset(0, row(rows, 0))
    for t in range(1, 20):
        group.step(play_well(row(rows, t - 1)["obs"]), row(rows, t))
    assert finished_episodes(rows) == [(best, 8)] * 6


def test_the_memory_toy_pays_for_remembering_and_shows_the_cue_once():
    group = EnvGroup(envs.make("toy_envs:MemoryCue-v0", 8, delay=3))
    rows = new_rows(group, 7)
    group.reset(0, row(rows, 0))
    cues = rows["obs"]["obs"][0, :, :2].argmax(1)
    assert set(cues) == {0, 1}
    for t in range(1, 7):
        group.step(cues if t != 2 else 0 * cues, row(rows, t))
    assert not rows["obs"]["obs"][1:6, :, :2].any()
    assert rows["obs"]["obs"][:6, :, 2].tolist() == [[0] * 8, [1] * 8] + [[0] * 8] * 4
    assert rows["obs"]["obs"][:6, :, 3].tolist() == [[0] * 8] * 4 + [[1] * 8, [0] * 8]
    assert finished_episodes(rows) == [(1.0, 5)] * 8


def test_the_crashing_toys_crash_and_the_pixel_toy_is_atari_sized():
    with pytest.raises(RuntimeError, match="this toy breaks here"):
        play(EnvGroup(envs.make("toy_envs:CrashAtStep-v0", 2, n=5)), 20)
    with pytest.raises(RuntimeError, match="cannot be reset"):
        play(EnvGroup(envs.make("toy_envs:CrashInReset-v0", 2)), 1, seed=5)
    group = EnvGroup(envs.make("toy_envs:Pixel-v0", 2))
    assert group.fields["obs/obs"] == ((4, 84, 84), "uint8")
    assert finished_episodes(play(group, 51)) == [(0.0, 50)] * 2


def test_a_film_of_atari_is_in_color_and_ends_with_the_first_game(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    import imageio.v2 as imageio

    env = envs.make("ALE/Breakout-v5", 1, render_mode="rgb_array")
    group, path = EnvGroup(env), tmp_path / "game.mp4"
    rows = new_rows(group, 2)
    group.reset(5, row(rows, 0))
    film = Film(env, str(path))
    for t in range(10):
        action = np.array([t % 4])
        group.step(action, row(rows, 1))
        film.add({**row(rows, 1), "action": action})
    rows["episode_step"][1] = 0
    film.add({**row(rows, 1), "action": action})
    film.close()
    frames = imageio.mimread(path, memtest=False)
    assert len(frames) == 10 and frames[0].shape == (420, 320, 3)
    assert np.ptp(frames[0].astype(int), axis=2).max() > 50, "Breakout's bricks are red"


def test_an_environment_that_names_no_frame_rate_is_filmed(tmp_path):
    pytest.importorskip("PIL")
    env = envs.make("CartPole-v1", 1, render_mode="rgb_array")
    env.metadata = {**env.metadata, "render_fps": None}
    group = EnvGroup(env)
    rows = new_rows(group, 2)
    group.reset(5, row(rows, 0))
    film = Film(env, str(tmp_path / "game.gif"))
    group.step(np.array([0]), row(rows, 1))
    film.add({**row(rows, 1), "action": np.array([0])})
    film.close()
    assert (tmp_path / "game.gif").stat().st_size > 100


def test_the_protocols_are_those_of_the_papers(monkeypatch):
    made, original = [], AtariVectorEnv.__init__

    def note(self, game, num_envs, **settings):
        made.append(settings)
        original(self, game, num_envs, **settings)

    monkeypatch.setattr(AtariVectorEnv, "__init__", note)
    for env_id, sticky, noops in (("PongNoFrameskip-v4", 0.0, 30), ("ALE/Pong-v5", 0.25, 0)):
        envs.make(env_id, 1, atari_backend="ale").close()
        expected = {"repeat_action_probability": sticky, "noop_max": noops, "max_num_frames_per_episode": 108_000}
        assert expected.items() <= made[-1].items() and made[-1]["frameskip"] == 4
    pytest.importorskip("minatar")
    assert envs.make("MinAtar/SpaceInvaders-v0", 1).envs[0].unwrapped._game.ramping
