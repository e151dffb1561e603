"""Several tasks in one run: their columns, value heads, records and tests."""

import csv
import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import toy_envs
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from lock_step import games
from programs import Program
from waiting import PATIENCE, wait_until

import beast
import monobeast
import multibeast
import r2d2
from beast import envs
from beast.envs import handover
from beast.envs.groups import EnvGroup
from beast.envs.reference_scores import Reference, reference_of
from beast.envs.rows import nest_observations
from beast.envs.tasks import Task, TaskColumns, _spread, tasks_of, with_tasks
from beast.errors import InputError
from beast.feeds.actor import Actor
from beast.feeds.memory import RolloutMemory
from beast.learn.normalization import ReturnMoments, ValueHead, own_values
from beast.learn.records import TaskRecords
from beast.run.console import Console
from beast.run.flags import check_flags

ROOT = Path(__file__).resolve().parent.parent
GAMES = "MinAtar/Breakout-v0,MinAtar/Seaquest-v0,MinAtar/Freeway-v0"
COUNTING = "toy_envs:Counting-v0"
SMALL = {
    "group_width": 4, "batch_width": 4, "unroll_length": 5, "hidden_size": 32, "device": "cpu", "tensorboard": False,
    "log_steps": 500, "total_steps": 2000,
}  # fmt: skip


def flags_of(tmp_path, **changes) -> monobeast.Flags:
    return monobeast.Flags(**{**SMALL, "root": str(tmp_path), "name": "run", **changes})


def rows_of(path: Path) -> list[dict]:
    with open(path / "metrics.csv") as file:
        return list(csv.DictReader(file))


class ThreeActions(toy_envs.Counting):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Discrete(3)


def counting(**kwargs):
    return lambda n: SyncVectorEnv([lambda: toy_envs.Counting(**kwargs)] * n)


def blank_row(group: EnvGroup) -> dict:
    """A row of what nobody wrote."""
    arrays = {name: np.full((group.num_envs, *shape), 99, dtype) for name, (shape, dtype) in group.fields.items()}
    return nest_observations(arrays)


# --- columns ---------------------------------------------------------------------------------------------------------


def test_columns_of_tasks_are_what_each_task_gives_alone_neighbours_of_different_tasks():
    names = GAMES.split(",")
    group, random = EnvGroup(envs.make(GAMES, 6)), np.random.default_rng(1)
    alone = [EnvGroup(envs.make(name, 2)) for name in names]
    row, rows = blank_row(group), [blank_row(each) for each in alone]
    group.reset(7, row)
    for number, each in enumerate(alone):
        each.reset(7 + 2 * number, rows[number])
    channels = {each.spaces.observations["obs"].shape[-1] for each in alone}
    assert row["obs"]["obs"].shape == (6, 10, 10, max(channels)) and len(channels) == 3
    ends = 0
    for _ in range(400):
        for number, own in enumerate(rows):
            columns = slice(number, None, 3)
            assert (row["task"][columns] == number).all()
            used = own["obs"]["obs"].shape[-1]
            np.testing.assert_array_equal(row["obs"]["obs"][columns, ..., :used], own["obs"]["obs"])
            assert not row["obs"]["obs"][columns, ..., used:].any(), "what fills up is 0, whatever was there"
            for name in ("reward", "done", "terminated", "truncated", "episode_return", "episode_step"):
                np.testing.assert_array_equal(row[name][columns], own[name])
        ends += row["terminated"].sum()
        row["obs"]["obs"][...] = 1
        actions = random.integers(6, size=6)
        group.step(actions, row)
        for number, each in enumerate(alone):
            each.step(actions[number::3], rows[number])
    assert ends > 20
    group.close()


def test_atari_games_have_all_actions_their_lives_and_infos_of_their_own():
    ids = "PongNoFrameskip-v4,BreakoutNoFrameskip-v4"
    env = envs.make(ids, 4, atari_backend="ale")
    assert env.single_action_space == spaces.Discrete(18) and env.metadata["frames_per_step"] == 4
    alone = envs.make("BreakoutNoFrameskip-v4", 2, atari_backend="ale", full_action_space=True)
    env.reset(seed=3)
    alone.reset(seed=5)
    lives = 0
    for step in range(300):
        actions = np.full(4, step % 18)
        _, _, terminated, _, infos = env.step(actions)
        _, _, expected, _, own = alone.step(actions[1::2])
        np.testing.assert_array_equal(terminated[1::2], expected)
        np.testing.assert_array_equal(infos["life_over"][1::2], own["life_over"])
        np.testing.assert_array_equal(infos["lives"][1::2], own["lives"])
        lives += infos["life_over"].sum()
    assert lives and infos["life_over"].dtype == bool and env.render_mode is None
    with pytest.raises(InputError, match=r"Breakout.* has the action space Discrete\(4\), Pong.* Discrete\(6\)"):
        envs.make(ids, 2, full_action_space=False)


def test_infos_masks_and_nested_observations_are_those_of_their_own_tasks():
    env = TaskColumns(
        {
            "telling": lambda n: SyncVectorEnv([toy_envs.Telling] * n),
            "other": lambda n: SyncVectorEnv([lambda: toy_envs.Telling()] * n),
        },
        4,
    )
    group = EnvGroup(env)
    row = blank_row(group)
    group.reset(1, row)
    told = []
    for _ in range(12):
        group.step(np.zeros(4, np.int64), row)
        told += group.ended
    alone = EnvGroup(SyncVectorEnv([toy_envs.Telling] * 2))
    own = blank_row(alone)
    alone.reset(1, own)
    expected = []
    for _ in range(12):
        alone.step(np.zeros(2, np.int64), own)
        expected += alone.ended
    for column in range(4):
        assert [x for k, x in told if k == column] == [x for k, x in expected if k == column // 2]
    nested = TaskColumns({name: lambda n: SyncVectorEnv([toy_envs.Dict] * n) for name in "ab"}, 4)
    first, _ = nested.reset(seed=0)
    again = SyncVectorEnv([toy_envs.Dict] * 2)
    for number, seed in enumerate((0, 2)):
        expected, _ = again.reset(seed=seed)
        for part in first:
            np.testing.assert_array_equal(first[part][number::2], expected[part])


def test_one_task_alone_has_all_columns_and_the_spaces_of_all():
    made, open_ones = [], []

    def maker(name):
        def make(n):
            assert sum(not env.closed for env, given in open_ones if given == 1) == 0, "one at a time"
            made.append([name, n])
            open_ones.append((envs.make(name, n), n))
            return open_ones[-1][0]

        return make

    env = TaskColumns({name: maker(name) for name in GAMES.split(",")}, 5, only="MinAtar/Freeway-v0")
    assert made == [["MinAtar/Breakout-v0", 1], ["MinAtar/Seaquest-v0", 1], ["MinAtar/Freeway-v0", 5]]
    assert env.task_numbers.tolist() == [2] * 5 and env.num_envs == 5
    assert env.single_observation_space == envs.make(GAMES, 3).single_observation_space
    observations, _ = env.reset(seed=0)
    assert observations.shape == (5, 10, 10, 10) and not observations[..., 7:].any()
    assert env.step(np.zeros(5, int))[0].shape == (5, 10, 10, 10)


def test_spaces_that_differ_in_the_last_axis_have_room_for_both():
    def make(low, high, size):
        class Shown(toy_envs.Counting):
            observation_space = spaces.Box(np.full(size, low, np.float32), np.full(size, high, np.float32))

            def __init__(self):
                super().__init__()
                self.observation_space = type(self).observation_space

        return lambda n: SyncVectorEnv([Shown] * n)

    space = TaskColumns({"a": make(1, 2, 3), "b": make(-5, -4, 2)}, 2).single_observation_space
    np.testing.assert_array_equal(space.low, [-5, -5, 0])
    np.testing.assert_array_equal(space.high, [2, 2, 2])


@pytest.mark.parametrize(
    "make, message",
    [
        ({"a": counting(), "b": lambda n: SyncVectorEnv([toy_envs.Dict] * n)}, "b observes Dict.*, a Box.*tasks share"),
        ({"a": counting(), "b": lambda n: SyncVectorEnv([ThreeActions] * n)}, r"b has the action space Discrete\(3\)"),
        (
            {"a": lambda n: SyncVectorEnv([toy_envs.Pixel] * n), "b": counting()},
            "b observes Box.*--resize, --grayscale",
        ),
        (
            {
                "a": counting(),
                "b": lambda n: SyncVectorEnv([toy_envs.Counting] * n, autoreset_mode=AutoresetMode.SAME_STEP),
            },
            "autoreset modes .*SAME_STEP",
        ),
        (
            {
                name: lambda n, name=name: SyncVectorEnv(
                    [lambda: envs.make(name, 1).envs[0]] * n, autoreset_mode=AutoresetMode.SAME_STEP
                )
                for name in ("MinAtar/Breakout-v0", "MinAtar/Freeway-v0")
            },
            "SAME_STEP need equal observation spaces",
        ),
        ({name: lambda n: envs.make("pettingzoo:toy_games", 2 * n) for name in "ab"}, "a has several agents"),
    ],
)
def test_tasks_that_cannot_share_a_net_are_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        TaskColumns(make, 2)


def test_a_same_step_task_shows_the_last_observations_of_its_own():
    def make(n):
        kwargs = {"lasts": 3, "terminates": False}
        return SyncVectorEnv([lambda: toy_envs.Counting(**kwargs)] * n, autoreset_mode=AutoresetMode.SAME_STEP)

    group = EnvGroup(TaskColumns({"a": make, "b": make}, 4))
    row = blank_row(group)
    group.reset(5, row)
    for _ in range(3):
        group.step(np.zeros(4, np.int64), row)
    assert row["truncated"].all() and not row["terminated"].any()
    np.testing.assert_array_equal(row["final_obs"]["obs"][:, 2], [3] * 4)
    assert row["final_obs"]["obs"][:, 0].tolist() == [5, 7, 6, 8], "the seeds"


# --- what users name -------------------------------------------------------------------------------------------------


def test_names_of_tasks_and_their_reference_scores():
    found = tasks_of("PongNoFrameskip-v4,ALE/MsPacman-v5,CartPole-v1,CartPole-v1")
    assert [task.name for task in found] == ["PongNoFrameskip-v4", "ALE/MsPacman-v5", "CartPole-v1", "CartPole-v1#2"]
    assert [task.reference for task in found] == [Reference(-20.7, 14.6), Reference(307.3, 6951.6), None, None]
    assert found[0].reference.score(14.6) == 1 and found[0].reference.score(-20.7) == 0
    levels = tasks_of("dmlab:dmlab30")
    assert len({task.env for task in levels}) == 30 and levels[0].env == "dmlab:rooms_collect_good_objects_train"
    assert tasks_of("dmlab:dmlab30_test")[0].env == "dmlab:rooms_collect_good_objects_test"
    assert levels[0].reference == Reference(0.073, 10) and all(task.reference for task in levels)
    assert reference_of("dmlab:contributed/dmlab30/rooms_watermaze") == Reference(4.065, 54)
    assert reference_of("dmlab:nav_maze") is None


def test_a_file_of_tasks_stays_with_the_run(tmp_path):
    told = {
        "short": {"env": COUNTING, "env_kwargs": {"lasts": 2}, "random": 1, "human": 5},
        "long": {"env": COUNTING, "env_kwargs": {"lasts": 4}},
    }
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(told))
    flags = check_flags(flags_of(tmp_path, tasks=str(path), group_width=2), {})
    path.unlink()
    assert flags.env == f"{COUNTING},{COUNTING}" and check_flags(flags, {}) == flags
    short, long = tasks_of(flags.env, flags.tasks)
    assert short == Task("short", COUNTING, {"lasts": 2}, Reference(1, 5)) and long.reference is None
    env = monobeast.create_env(flags, 2)
    env.reset(seed=0)
    ends = [env.step(np.zeros(2, int))[2].tolist() for _ in range(4)]
    assert ends[1] == [True, False] and ends[3][1]
    cut = monobeast.create_env(replace(flags, env_kwargs='{"terminates": false}'), 2)
    cut.reset()
    assert [cut.step(np.zeros(2, int))[3].tolist() for _ in range(2)] == [[False, False], [True, False]]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "No such file.*write it as a JSON object"),
        ("{", "tasks.json: Expecting"),
        ("[]", r"it has \[\]; write it as"),
        ("{}", r"it has \{\}"),
        ('{"a": {"env": "A", "seed": 1}}', "it has .*seed"),
        ('{"a": {"env": "A,B"}}', "it has .*A,B"),
        ('{"a": {"env": "dmlab:dmlab30"}}', "a has the env dmlab:dmlab30, which stands for 30 tasks: give --env"),
        ('{"a": {"env": "A", "human": 1}}', "it has .*human"),
        ('{"a": {"env": "A", "random": 1, "human": 1}}', "it has .*human"),
        ('{"a": {"env": "A", "random": 1, "human": "x"}}', "it has .*human"),
        ('{"a": {"env_kwargs": {}}}', "it has"),
        ('{"a": {"env": "A", "env_kwargs": 1}}', "it has"),
    ],
)
def test_a_file_that_has_no_tasks_is_refused_with_what_one_looks_like(tmp_path, text, message):
    path = tmp_path / "tasks.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        with_tasks(flags_of(tmp_path, tasks=str(path)))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"env": "A,,B"}, "--env A,,B: between two commas"),
        ({"env": "A,B", "task": "C"}, "--task C: there is no such task; there are A, B"),
        ({"env": "A,B", "balance": "compute", "num_actors": 3}, "--num_actors 3: .*2 tasks.*a multiple of 2"),
    ],
)
def test_flags_of_tasks_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        check_flags(flags_of(tmp_path, **changes), {})


def test_widths_that_do_not_hold_all_tasks_are_refused_with_one_that_does(tmp_path):
    with pytest.raises(InputError, match="--group_width 4: .* 3 tasks: give a multiple of 3, such as 12"):
        monobeast.train(flags_of(tmp_path, env=GAMES))
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="4 environments for 3 tasks: give a multiple of 3"):
        envs.make(GAMES, 4)


def test_with_equal_compute_each_actor_plays_one_task(tmp_path):
    flags = flags_of(tmp_path, env=GAMES, num_actors=6, balance="compute", group_width=2, batch_width=2)
    group = EnvGroup(monobeast.create_env(flags, 3))
    memory = RolloutMemory(group.fields, 8, 1, 2)
    actor = Actor(monobeast.create_env, flags, memory, dict.fromkeys(range(8), 1))
    for number in range(8):
        actor.write_row(number, number, 0)
    assert [memory.row(number, 0)["task"].tolist() for number in range(8)] == [[x, x] for x in (0, 0, 1, 1, 2, 2, 0, 0)]
    actor.close()


# --- what is learned and counted -------------------------------------------------------------------------------------


def test_each_task_has_its_own_statistics_and_no_value_changes_with_them():
    torch.manual_seed(1)
    head, features = ValueHead(5, 3), torch.randn(2, 4, 5)
    values = head(features)
    assert values.shape == (2, 4, 3)
    for _ in range(8000):
        means, deviations = torch.tensor([100.0, -5.0, math.nan]), torch.tensor([50.0, 0.5, math.nan])
        head.observe(ReturnMoments(means, deviations), torch.tensor(False))
        head.observe(ReturnMoments(means, means.abs()), torch.tensor(True))
    torch.testing.assert_close(head.mean, torch.tensor([100, -5, 0.0]), rtol=0.01, atol=0)
    torch.testing.assert_close(head.deviation, torch.tensor([50, 0.5, 1.0]), rtol=0.1, atol=0)
    torch.testing.assert_close(head(features), values, rtol=0, atol=2e-3)


def test_moments_and_units_of_returns_are_those_of_each_task():
    torch.manual_seed(1)
    returns, mask = torch.randn(6, 9), torch.rand(6, 9) < 0.7
    task = torch.tensor([0, 2, 5, 0, 2, -3, 0, 2, 0]).int().expand(7, 9)  # 5 and -3 are no task's: a hostile host's
    head = ValueHead(4, 4)
    found = head.moments(returns, mask, {"task": task})
    for number, columns in ((0, [0, 3, 5, 6, 8]), (2, [1, 4, 7]), (3, [2])):
        own = returns[:, columns][mask[:, columns]]
        torch.testing.assert_close(found.mean[number], own.mean())
        torch.testing.assert_close(found.deviation[number], own.std(correction=0))
    assert found.mean[1].isnan()
    head.deviation.copy_(torch.tensor([1.0, 2, 3, 4]))
    assert head.unit({"task": task}).tolist() == [[1, 3, 4, 1, 3, 1, 1, 3, 1]] * 6
    values = torch.arange(4.0).expand(7, 9, 4)
    assert own_values(values, {"task": task})[0].tolist() == [0, 2, 3, 0, 2, 0, 0, 2, 0]
    one = ValueHead(4)
    torch.testing.assert_close(one.moments(returns, mask, {}).mean, returns[mask].mean())
    assert one.moments(returns, mask, {}).mean.shape == one.moments(returns, ~mask & mask, {}).deviation.shape == ()
    assert one.moments(returns, mask & ~mask, {}).mean.isnan()


def batch_of(flags, net, tasks) -> dict:
    width, rows = len(tasks), flags.unroll_length + 1
    zeros = torch.zeros(rows, width)
    logits = torch.zeros(rows, width, net.action_space.n)
    return {
        "obs": {"obs": torch.randn(rows, 1, 3).expand(-1, width, -1)}, "reward": zeros + 1, "done": zeros.bool(),
        "terminated": zeros.bool(), "truncated": zeros.bool(), "action": zeros.long(), "policy_logits": logits,
        "policy_version": zeros.int(), "task": torch.tensor(tasks).int().expand(rows, width),
    }  # fmt: skip


def test_errors_of_values_count_in_the_unit_of_their_own_task(tmp_path):
    flags = monobeast.validate(flags_of(tmp_path, env=f"{COUNTING},{COUNTING}", normalize_advantages=False))
    torch.manual_seed(1)
    space = toy_envs.Counting().observation_space
    net = monobeast.Net({"obs": space}, spaces.Discrete(2), flags)
    assert net.baseline.out_features == 2
    batch = batch_of(flags, net, [0, 1])

    def value_loss(columns, deviations):
        net.baseline.deviation.copy_(torch.tensor(deviations))
        net.baseline.mean.zero_()
        net.baseline.weight.data.zero_()
        net.baseline.bias.data.zero_()
        part = {name: x[:, columns] if name != "obs" else {"obs": x["obs"][:, columns]} for name, x in batch.items()}
        return monobeast.compute_loss(flags, net, part, ())[2]["losses/value_loss"].item()

    plain = value_loss([0], [1.0, 1.0])
    assert value_loss([1], [1.0, 1.0]) == pytest.approx(plain)
    assert value_loss([0], [10.0, 1.0]) == pytest.approx(plain / 100)
    assert value_loss([0], [1.0, 10.0]) == pytest.approx(plain)
    assert value_loss([0, 1], [10.0, 1.0]) == pytest.approx((plain + plain / 100) / 2)
    learner = monobeast.make_learner(flags, envs_spaces(space))
    monobeast.update(flags, learner, batch_of(flags, net, [1, 1]), ())
    assert learner.net.baseline.mean[0] == 0 != learner.net.baseline.mean[1], "only what was there is followed"


def test_the_policy_of_a_task_with_small_rewards_learns_from_them_beside_one_with_large_ones(tmp_path):
    flags = monobeast.validate(flags_of(tmp_path, env=f"{COUNTING},{COUNTING}"))
    torch.manual_seed(1)
    net = monobeast.Net({"obs": toy_envs.Counting().observation_space}, spaces.Discrete(2), flags)
    net.baseline.deviation.copy_(torch.tensor([1.0, 1000.0]))
    net.baseline.mean.zero_()
    batch = batch_of(flags, net, [0, 0, 1, 1])
    batch["action"] = torch.randint(0, 2, batch["action"].shape)
    noise = torch.randn(batch["reward"].shape)

    def gradient(sign: float) -> torch.Tensor:
        given = {**batch, "reward": noise * torch.tensor([sign, sign, 1000.0, 1000.0])}
        net.zero_grad()
        monobeast.compute_loss(flags, net, given, ())[0].backward()
        return torch.cat([x.grad.flatten() for x in net.policy.parameters()]).clone()

    one, other = gradient(1.0), gradient(-1.0)
    assert torch.cosine_similarity(one, other, 0) < 0.9, "in units of rewards it is 1"


def test_infos_that_differ_in_kind_between_tasks_lose_nothing_and_end_nothing():
    whole: dict = {}
    first = {
        "score": np.array([3, 4]),
        "ok": np.array([True, False]),
        "level": np.array([1, 2]),
        "more": np.array([1, 2]),
    }
    second = {"score": np.array([0.7, 0.2]), "ok": np.array([0.25, 1]), "level": np.array(["a", "b"]), "more": {"x": 1}}
    _spread(first, slice(0, 4, 2), 4, whole)
    _spread(second, slice(1, 4, 2), 4, whole)
    assert whole["score"].tolist() == [3, 0.7, 4, 0.2] and whole["ok"].tolist() == [1, 0.25, 0, 1]
    assert whole["level"].tolist() == [1, "a", 2, "b"] and whole["more"].tolist() == [1, 0, 2, 0]
    assert whole["_more"].tolist() == [True, False, True, False]


def envs_spaces(space):
    from beast.envs.spaces import EnvSpaces

    return EnvSpaces({"obs": space}, spaces.Discrete(2), env_id=f"{COUNTING},{COUNTING}")


def test_steps_games_and_scores_are_counted_by_task():
    tasks = [Task("a", "a", {}, Reference(0, 10)), Task("b", "b", {}, Reference(100, 200)), Task("c", "c", {}, None)]
    records = TaskRecords(tasks[:2])
    batch = {"task": torch.tensor([[0, 1, 1, 7]]).expand(3, 4)}
    steps = torch.tensor([[True, True, False, True], [True, True, True, True]])
    numbers = {name: x.item() for name, x in records.named(records.steps_in(batch, steps)).items()} | {"loss": 1.0}
    assert numbers == {"task/0": 2, "task/1": 5, "loss": 1.0}
    records.count_steps(numbers)
    assert records.steps == [2, 5] and numbers == {"loss": 1.0}
    for _ in range(49):
        records.record_games(records.games_in({**games((5.0, 10), (150.0, 4)), "task": np.array([[0, 1]] * 2)}))
    assert records.score() == -math.inf, "100 games have to be over"
    records.record_games(records.games_in({**games((5.0, 10), (200.0, 4)), "task": np.array([[0, 1]] * 2)}))
    assert records.score() == pytest.approx((0.5 + 0.51) / 2)
    found = records.numbers()
    assert found["task/a/episodic_return"] == 5 and found["task/b/episodic_return"] == 151
    assert found["task/a/episodic_length"] == 10 and found["task/b/episodes"] == 50 and found["task/b/steps"] == 5
    assert found["task/b/score"] == pytest.approx(0.51) and found["charts/score"] == records.score()
    again = TaskRecords(tasks[:2])
    again.load_state_dict(records.state_dict())
    assert again.numbers() == found and "151.00" in again.table() and "0.510" in again.table()
    again.record_games(again.games_in({**games((1.0, 2)), "task": np.array([[7]] * 2)}))  # what a hostile host says
    assert again.episodes == [50, 51]
    mixed = TaskRecords(tasks)
    for number in range(3):
        mixed.record_games(mixed.games_in({**games((5.0, 10)), "task": np.array([[number]] * 2)}))
    assert "charts/score" not in mixed.numbers() and "score" not in mixed.table().replace("task", "")
    assert TaskRecords(tasks[:1]).numbers() == {} and TaskRecords(tasks[:1]).state_dict() == {}


def test_levels_of_dmlab_count_as_a_human_at_most_in_the_mean():
    envs_of_tasks = ("dmlab:rooms_watermaze", "dmlab:rooms_keys_doors_puzzle")
    for ids, mean in ((envs_of_tasks, (1 + 0.5) / 2), (("a", "b"), (3 + 0.5) / 2)):
        records = TaskRecords([Task(name, name, {}, Reference(0, 10)) for name in ids])
        for _ in range(50):
            records.record_games(records.games_in({**games((30.0, 10), (5.0, 4)), "task": np.array([[0, 1]] * 2)}))
        found = records.numbers()
        assert found["charts/score"] == records.score() == mean and found[f"task/{ids[0]}/score"] == 3


def test_the_best_checkpoint_is_that_of_the_best_score():
    learner = beast.learn.learner.Learner(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], 0.1), 1)
    learner.keep_tasks([Task("a", "a", {}, Reference(0, 10)), Task("b", "b", {}, Reference(0, 1000))])
    for _ in range(50):
        learner.record_games({**games((5.0, 10), (100.0, 4)), "task": np.array([[0, 1]] * 2)})
    assert learner.best_policy()[0] == pytest.approx(0.3)


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_of_several_tasks_tells_of_each_is_resumed_tested_and_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = {
        "short": {"env": COUNTING, "env_kwargs": {"lasts": 2}, "random": 0, "human": 6},
        "long": {"env": COUNTING, "env_kwargs": {"lasts": 7}, "random": 0, "human": 28},
    }
    Path("tasks.json").write_text(json.dumps(told))
    result = monobeast.train(flags_of(tmp_path, tasks="tasks.json", deterministic=True))
    last = rows_of(tmp_path / "run")[-1]
    assert float(last["task/short/episodic_return"]) == 1 + 2 and float(last["task/long/episodic_return"]) == 28
    assert float(last["task/short/episodic_length"]) == 2 and float(last["task/long/episodic_length"]) == 7
    assert float(last["task/short/score"]) == 0.5 and float(last["charts/score"]) == 0.75 == result.best
    steps = [int(float(last[f"task/{name}/steps"])) for name in told]
    assert sum(steps) == result.steps and min(steps) > 500
    assert "task " in capsys.readouterr().err
    more = monobeast.train(flags_of(tmp_path, tasks="tasks.json", deterministic=True, total_steps=3000))
    last = rows_of(tmp_path / "run")[-1]
    assert sum(int(float(last[f"task/{name}/steps"])) for name in told) == more.steps > result.steps
    Path("tasks.json").write_text(json.dumps({"short": told["short"]}))
    with pytest.raises(InputError, match="--tasks|--env"):
        monobeast.train(flags_of(tmp_path, tasks="tasks.json", deterministic=True, total_steps=4000))
    Path("tasks.json").unlink()
    found = monobeast.test(monobeast.validate(monobeast.Flags(root=str(tmp_path), name="run", mode="test", episodes=3)))
    assert found["tasks"]["short"]["returns"] == [3, 3, 3] and found["tasks"]["long"]["returns"] == [28, 28, 28]
    assert found["tasks"]["short"]["score"] == 0.5
    assert found["score"] == 0.75 and found["mean"] == 15.5 and len(found["returns"]) == 6
    assert found["tasks"]["long"]["env"] == COUNTING
    assert "2 tasks: mean of their mean returns 15.50, score 0.750" in capsys.readouterr().out
    flags = monobeast.Flags(root=str(tmp_path), name="run", mode="test", episodes=2, env=f"{COUNTING},{COUNTING}")
    alone = replace(flags, env="PongNoFrameskip-v4", task="long")
    alone = monobeast.validate(replace(alone, checkpoint=str(tmp_path / "run/checkpoint.pt")))  # as main() does
    assert monobeast.test(alone)["returns"] == [28, 28]
    with pytest.raises(InputError, match="--task far: there is no such task; there are short, long"):
        monobeast.test(replace(alone, task="far"))
    others = replace(alone, env_kwargs='{"lasts": 3}', eval_env_kwargs=('{"lasts": 4}', 'run={"terminates": true}'))
    found = monobeast.test(others)
    assert found["returns"] == [10, 10], "before the task's own, which go before the run's"
    assert found["others"]["run"]["returns"] == [28, 28]
    assert found["differs_from_training"]["env_kwargs"]["played"] == '{"lasts": 4}'
    policy = beast.load(str(tmp_path / "run/checkpoint.pt"))
    assert policy.net.baseline.out_features == 2
    assert policy.act(np.zeros((3, 3), np.float32))[0].shape == (3,)


@pytest.mark.parametrize("agent", [r2d2, multibeast])
def test_other_agents_take_tasks_too(tmp_path, agent):
    own = {**SMALL, "env": "CartPole-v1,CartPole-v1", "group_width": 8, "deterministic": True, "root": str(tmp_path)}
    own |= {"name": "run", "total_steps": 600, "log_steps": 100}
    if agent is r2d2:
        own |= {"burn_in": 2, "trained": 4, "stride": 4, "unroll_length": 4, "min_fill": 100, "core_size": 16}
        own |= {"head_size": 16, "n_steps": 2}
        result = r2d2.train(r2d2.Flags(**own))
    else:
        result = multibeast.train(multibeast.flags_of(monobeast)(**own, num_policies=2))
    last = rows_of(tmp_path / "run")[-1]
    steps = [int(float(last[f"task/{name}/steps"])) for name in ("CartPole-v1", "CartPole-v1#2")]
    assert sum(steps) == result.steps and min(steps) > 250
    if agent is multibeast:
        own_steps = [float(last[f"policy{policy}/task/CartPole-v1#2/steps"]) for policy in range(2)]
        assert sum(own_steps) == steps[1] and min(own_steps) > 0


def test_ids_that_a_script_has_registered_are_handed_over_one_by_one(monkeypatch):
    for name in ("One-v0", "Two-v0"):
        gymnasium.register(name, toy_envs.Counting)
    monkeypatch.setitem(os.environ, handover.SPEC, "")
    handover.hand_over("One-v0,CartPole-v1,Two-v0", monobeast.__file__)
    monkeypatch.setattr(handover, "_handed", os.environ[handover.SPEC])
    assert [getattr(handover.handed_over(name), "id", None) for name in ("Two-v0", "One-v0", "CartPole-v1")] == [
        "Two-v0", "One-v0", None,
    ]  # fmt: skip
    handover.hand_over("CartPole-v1", monobeast.__file__)
    assert handover.SPEC not in os.environ


def test_the_console_tells_tasks_apart_by_what_differs():
    tasks = ["MinAtar/Breakout-v0", "dmlab:explore_goal_locations_small", "dmlab:explore_goal_locations_large"]

    def shown(names):
        values = {f"task/{name}/episodic_return": float(number) for number, name in enumerate(names)}
        return Console(100, 0, 1)._fields(1, values, 1.0)["tasks"]

    assert shown(tasks[:2]) == "Breakout-v0 0 dmlab:explore_goal_l 1"
    assert shown(tasks) == "Breakout-v0 0 goal_locations_small 1 goal_locations_large 2"
    both = [f"{'a' * 20}{middle}{'b' * 20}" for middle in "12"]
    assert shown(both) == f"0:{'a' * 17} 0 1:{'a' * 17} 1"


def test_a_run_of_many_tasks_has_a_short_name(tmp_path):
    flags = flags_of(tmp_path, env=",".join(f"{COUNTING}" for _ in range(50)), name="", group_width=50, batch_width=50)
    assert re.fullmatch(r"mono-50-tasks-\d+-\d+-seed1", monobeast.validate(flags).name)


def test_actors_train_by_equal_compute_and_evaluations_play_each_task(tmp_path):
    words = [monobeast.__file__, "--env", "CartPole-v1,Acrobot-v1", "--root", str(tmp_path), "--name", "run"]
    words[2] = "CartPole-v1,CartPole-v1"
    words += ["--num_actors", "2", "--balance", "compute", "--group_width", "4", "--no_tensorboard", "--device", "cpu"]
    words += ["--log_steps", "500", "--eval_minutes", "0.01", "--eval_episodes", "2", "--total_minutes", "5"]
    program = Program(words, cwd=ROOT, env=dict(os.environ), output=tmp_path / "output")
    run, name = tmp_path / "run", "eval/task/CartPole-v1#2/episodic_return"
    try:
        wait_until(lambda: (run / "metrics.csv").exists() and any(row.get(name) for row in rows_of(run)), program.text)
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE) == 0, program.text()
    finally:
        program.kill()
    last = rows_of(run)[-1]
    assert all(float(last[f"task/{task}/steps"]) > 0 for task in ("CartPole-v1", "CartPole-v1#2"))
    assert "CartPole-v1#2" in program.text()
