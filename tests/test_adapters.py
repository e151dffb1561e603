"""DeepMind Lab and Google Research Football, against stand-ins that have their interfaces (tests/stand_ins.py)."""

import importlib
import multiprocessing
import os
import sys

import numpy as np
import pytest
import stand_ins
import toy_envs
from gymnasium import spaces
from lock_step import metrics_of

import monobeast
import multibeast
from beast import envs
from beast.envs import dmlab
from beast.envs.dmlab import LevelCache, numbers_of
from beast.envs.groups import EnvGroup
from beast.envs.probe import probe_env
from beast.envs.tasks import tasks_of
from beast.errors import InputError, MissingPackage

PACKAGES = ("deepmind_lab", "gfootball", "gfootball.env")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Both packages, as this process and all that it starts find them; yields the modules."""
    stand_ins.write(tmp_path / "packages")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield importlib.import_module("deepmind_lab"), importlib.import_module("gfootball.env")
    for name in PACKAGES:
        sys.modules.pop(name, None)


def test_without_the_packages_a_message_says_how_to_get_them():
    with pytest.raises(MissingPackage, match="dmlab:rooms_watermaze needs DeepMind Lab.*build it"):
        envs.make("dmlab:rooms_watermaze", 1)
    with pytest.raises(MissingPackage, match="football:academy_empty_goal needs .*pip install gfootball"):
        envs.make("football:academy_empty_goal", 1)


# --- DeepMind Lab ----------------------------------------------------------------------------------------------------


def test_a_level_is_stepped_by_four_frames_in_its_own_actions(packages):
    lab = packages[0]
    env = envs.make("dmlab:rooms_watermaze", 2)
    assert env.single_observation_space == spaces.Box(0, 255, (72, 96, 3), np.uint8)
    assert env.single_action_space == spaces.Discrete(9) and env.metadata["frames_per_step"] == 4
    assert [each.level for each in lab.MADE] == ["contributed/dmlab30/rooms_watermaze"] * 2
    assert lab.MADE[0].config == {"width": "96", "height": "72"}
    first = env.reset(seed=1)[0].copy()
    for step in range(1, 11):
        shown, rewards, terminated, truncated, _ = env.step(np.array([0, 1]))  # forward, backward
        assert rewards.tolist() == [4.0, -4.0] and not truncated.any()
        assert terminated.all() == (step == 10)
        np.testing.assert_array_equal(shown, first + min(step, 9))  # at its end the last one that there was
    after, *_ = env.step(np.array([0, 0]))
    seeds = [each.seed for each in lab.MADE]
    assert after[:, 0, 0, 0].tolist() == [seed % 200 for seed in seeds] and len(set(seeds)) == 2
    env.close()
    assert all(each.closed for each in lab.MADE)


def test_arguments_are_those_of_the_level(packages):
    lab = packages[0]
    kwargs = {
        "actions": "wide", "width": 80, "held_out": True, "dataset": "/data", "config": {"episodeLengthSeconds": 9},
        "renderer": "hardware", "cache_gb": 0,
    }  # fmt: skip
    env = envs.make("dmlab:nav_maze_static_01", 1, frame_skip=8, env_kwargs=kwargs)
    made = lab.MADE[-1]
    assert made.level == "nav_maze_static_01" and made.cache is None and env.single_action_space.n == 15
    assert made.config == {
        "width": "80", "height": "72", "datasetPath": "/data", "allowHoldOutLevels": "true", "mixerSeed": "1611489005",
        "episodeLengthSeconds": "9",
    }  # fmt: skip
    env.reset(seed=0)
    assert env.step(np.array([0]))[1] == 8.0 and env.metadata["frames_per_step"] == 8
    assert [len(each) for each in dmlab.ACTIONS.values()] == [9, 15]
    for number in range(15):
        made.step(np.array(dmlab.ACTIONS["wide"][number], np.intc), 0)
    with pytest.raises(InputError, match="actions is 'all': it is 'impala' or 'wide'"):
        envs.make("dmlab:rooms_watermaze", 1, actions="all")
    with pytest.raises(RuntimeError, match="nowhere not found"):
        envs.make("dmlab:nowhere", 1)


def test_instructions_are_numbers_of_words(packages):
    env = envs.make("dmlab:language_select_described_object", 1)
    shown, _ = env.reset(seed=1)
    words = shown["instruction"][0]
    assert words.tolist() == numbers_of("Pick up the red balloon").tolist() and (words[5:] == 0).all()
    assert (words[:5] > 0).all() and len(set(words[:5].tolist())) == 5 and (words < 1000).all()
    assert numbers_of(b"red up").tolist()[:2] == [words[3], words[1]]
    assert numbers_of("word " * 50).shape == (16,)
    plain = envs.make("dmlab:rooms_watermaze", 1, instruction=True)
    assert not plain.reset(seed=1)[0]["instruction"].any()
    assert plain.single_observation_space == env.single_observation_space
    for _ in range(10):
        shown, *_ = env.step(np.array([0]))
    assert shown["instruction"][0].any(), "at the end of an episode, too"


def test_dmlab30_is_thirty_tasks_whose_levels_have_instructions():
    tasks, held_out = tasks_of("dmlab:dmlab30"), tasks_of("dmlab:dmlab30_test")
    assert len(tasks) == len(held_out) == 30
    assert all(task.env_kwargs == {"instruction": True} for task in tasks)
    assert all(task.env_kwargs == {"instruction": True, "held_out": True} for task in held_out)
    assert sum(task.env != other.env for task, other in zip(tasks, held_out)) == 2


def test_generated_levels_are_kept_for_all_environments(packages, tmp_path):
    lab = packages[0]
    env = envs.make("dmlab:explore_goal_locations_small", 3)
    for _ in range(20):
        env.reset()
    assert sorted(lab.GENERATED) == sorted(set(lab.GENERATED)) and 3 <= len(lab.GENERATED) <= 5
    again = envs.make("dmlab:explore_goal_locations_small", 1)
    count = len(lab.GENERATED)
    for _ in range(20):
        again.reset()
    assert len(lab.GENERATED) - count <= 5 - count
    assert len(os.listdir(tmp_path / "cache/beast/dmlab")) == len(lab.GENERATED)


def write_levels(directory: str, source: str, rounds: int) -> None:
    cache = LevelCache(directory, 500_000)
    for number in range(rounds):
        cache.write(f"level {number % 7}", source)


def test_a_level_is_there_whole_or_not_at_all_whatever_other_processes_do(tmp_path):
    directory, source, target = str(tmp_path / "cache"), str(tmp_path / "a.pk3"), str(tmp_path / "b.pk3")
    content = os.urandom(200_000)
    (tmp_path / "a.pk3").write_bytes(content)
    writers = [multiprocessing.Process(target=write_levels, args=(directory, source, 150)) for _ in range(2)]
    for writer in writers:
        writer.start()
    cache, found = LevelCache(directory, 500_000), 0
    while any(writer.is_alive() for writer in writers):
        for number in range(7):
            if cache.fetch(f"level {number}", target):
                found += 1
                assert (tmp_path / "b.pk3").read_bytes() == content
    assert found > 10 and all(writer.exitcode == 0 for writer in writers)
    kept = list((tmp_path / "cache").iterdir())
    assert sum(path.stat().st_size for path in kept) <= 500_000 and not any(".part" in path.name for path in kept)


def test_what_was_unused_for_longest_makes_room_and_a_cache_that_cannot_be_written_harms_nobody(tmp_path):
    source, target = tmp_path / "a.pk3", str(tmp_path / "b.pk3")
    source.write_bytes(b"x" * 400)
    cache = LevelCache(str(tmp_path / "cache"), 1000)
    for key in ("a", "b"):
        cache.write(key, str(source))
    for age, path in enumerate((cache._path("a"), cache._path("b"))):
        os.utime(path, (1000 + age, 1000 + age))
    assert cache.fetch("a", target), "it is now the latest that was used"
    cache.write("c", str(source))
    assert [cache.fetch(key, target) for key in ("a", "b", "c")] == [True, False, True]
    LevelCache(str(source), 1000).write("d", str(source))
    assert not LevelCache(str(source), 1000).fetch("d", target)
    small = LevelCache(str(tmp_path / "small"), 10)
    small.write("e", str(source))
    assert small.fetch("e", target), "the newest stays, or nothing would ever be kept"
    assert not LevelCache(str(tmp_path / "cache"), 1000).fetch("../a.pk3", target)
    small.write("f", str(tmp_path / "missing"))
    assert not small.fetch("f", target) and not any(".part" in name for name in os.listdir(tmp_path / "small"))


def test_a_cache_lists_its_files_once_in_many_writes(tmp_path, monkeypatch):
    (tmp_path / "a.pk3").write_bytes(b"x" * 400)
    cache, looks, scandir = LevelCache(str(tmp_path / "cache"), 2_000_000), [], os.scandir
    monkeypatch.setattr(dmlab.os, "scandir", lambda path: looks.append(path) or scandir(path))
    for key in range(20):
        cache.write(str(key), str(tmp_path / "a.pk3"))
    assert len(looks) == 1 + 19 // 6


def test_levels_train_as_tasks_and_are_filmed_and_not_reset_ahead(packages, tmp_path):
    ids = "dmlab:rooms_watermaze,dmlab:rooms_collect_good_objects_train"
    flags = monobeast.Flags(
        env=ids, group_width=2, batch_width=2, unroll_length=5, hidden_size=32, total_steps=200, log_steps=100,
        root=str(tmp_path), name="run", tensorboard=False, device="cpu", deterministic=True,
    )  # fmt: skip
    monobeast.train(flags)
    last = metrics_of(tmp_path / "run")[-1]
    assert "charts/score" in last and float(last["frames"]) == 4 * float(last["step"])
    with pytest.raises(InputError, match="dmlab:rooms_watermaze: its resets keep Python's GIL.*leave --reset_ahead"):
        envs.make(ids, 2, reset_ahead=True)
    env = envs.make("dmlab:rooms_watermaze", 1, render_mode="rgb_array")
    env.reset(seed=3)
    assert env.render()[0].shape == (72, 96, 3)


def test_dmlab30_trains_and_is_tested_on_its_held_out_levels(packages, tmp_path):
    lab = packages[0]
    own = {"root": str(tmp_path), "name": "run", "tensorboard": False, "device": "cpu", "hidden_size": 8}
    flags = monobeast.Flags(
        env="dmlab:dmlab30", group_width=30, batch_width=30, unroll_length=5, total_steps=1200, log_steps=300,
        deterministic=True, **own,
    )  # fmt: skip
    monobeast.train(flags)
    last = metrics_of(tmp_path / "run")[-1]
    assert sum(name.startswith("task/dmlab:") and name.endswith("/score") for name in last) == 30
    lab.MADE.clear()
    test = monobeast.Flags(mode="test", env="dmlab:dmlab30_test", episodes=1, **own)
    found = monobeast.test(monobeast.validate(test))
    assert len(found["tasks"]) == 30 and found["score"] is not None
    assert all(each.config["allowHoldOutLevels"] == "true" for each in lab.MADE)
    assert not any(each.level.endswith("_train") for each in lab.MADE)


# --- Football --------------------------------------------------------------------------------------------------------


def test_one_player_sees_the_minimap_and_the_clock_truncates(packages):
    football = packages[1]
    env = envs.make("football:11_vs_11_stochastic", 1)
    assert env.single_observation_space == spaces.Box(0, 255, (72, 96, 16), np.uint8)
    assert env.single_action_space == spaces.Discrete(19)
    env.reset(seed=1)
    seed = football.MADE[-1].seed
    assert 0 <= seed < 2_000_000_000 and football.MADE[-1]._is_reversed == bool(seed % 2)
    for step in range(1, 13):
        shown, reward, terminated, truncated, info = env.step(np.array([12 if step < 3 else 0]))
        assert reward[0] == (step < 3) and not terminated[0] and truncated[0] == (step == 12)
    assert info["metrics"]["goal_difference"][0] == 2 and (shown == seed % 100 + 12).all()
    env.step(np.array([0]))
    assert football.MADE[-1].seed != seed, "another game"
    sides = set()
    for _ in range(20):
        env.reset()
        sides.add(football.MADE[-1]._is_reversed)
        assert football.MADE[-1]._is_reversed == bool(football.MADE[-1].seed % 2)
    assert sides == {False, True}
    env.close()
    assert football.MADE[-1].closed


def test_a_clock_that_ran_on_after_its_end_truncates_too_and_one_game_renders(packages, tmp_path, monkeypatch):
    football = packages[1]
    monkeypatch.setattr(football.FootballEnv, "observation", lambda game: [{"steps_left": 11 - game._step}])
    flags = monobeast.Flags(env="football:11_vs_11_stochastic", group_width=2, root=str(tmp_path))
    probe_env(monobeast.create_env, flags, render_mode="rgb_array")
    assert [game._render for game in football.MADE] == [True]
    env = envs.make("football:11_vs_11_stochastic", 1)
    env.reset(seed=1)
    ends = [env.step(np.array([0]))[2:4] for _ in range(12)]
    assert [truncated[0] for _, truncated in ends] == [False] * 11 + [True] and not ends[-1][0][0]


def test_a_goal_in_the_academy_terminates_and_arguments_reach_the_game(packages):
    kwargs = {"representation": "simple115v2", "stacked": False, "rewards": "scoring,checkpoints"}
    env = envs.make("football:academy_empty_goal", 1, env_kwargs=kwargs)
    assert env.single_observation_space.shape == (115,) and env.single_observation_space.dtype == np.float32
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(np.array([12]))
    assert reward[0] == pytest.approx(1.1) and terminated[0] and not truncated[0]
    filmed = envs.make("football:academy_empty_goal", 1, render_mode="rgb_array")
    filmed.reset(seed=1)
    assert filmed.render()[0].shape == (720, 1280, 3)
    right = envs.make("football:academy_empty_goal", 1, right_players=1, left_players=0)
    right.reset(seed=1)
    assert right.single_action_space == spaces.Discrete(19)


def test_eleven_players_are_agents(packages):
    group = EnvGroup(envs.make("football:11_vs_11_stochastic", 22, left_players=11))
    assert group.spaces.observations["obs"].shape == (72, 96, 16) and group.spaces.action == spaces.Discrete(19)
    env = envs.make("football:11_vs_11_stochastic", 4, left_players=1, right_players=1)
    assert env.metadata["agents"] == 2
    env.reset(seed=1)
    for _ in range(12):
        shown, rewards, terminated, truncated, info = env.step(np.array([12, 0, 0, 0]))
        assert rewards.tolist() == [1, -1, 0, 0]
    assert truncated.all() and not terminated.any()
    assert info["true_objective"].tolist() == [12, -12, 0, 0]
    assert (shown[1] == shown[0] + 1).all(), "each has an observation of its own"
    seeds = [game.seed for game in packages[1].MADE[-2:]]
    _, rewards, _, truncated, _ = env.step(np.array([12, 0, 12, 0]))
    assert not rewards.any() and not truncated.any(), "the next game begins"
    assert len({*seeds, *(game.seed for game in packages[1].MADE[-2:])}) == 4


def test_games_whose_environment_cannot_be_made_are_closed(packages, monkeypatch):
    lab, football = packages

    def closed_after(module, what, *make, **kwargs):
        module.MADE.clear()
        with pytest.raises((InputError, IndexError, AttributeError), match=what):
            envs.make(*make, **kwargs)
        return [each.closed for each in module.MADE]

    def make_first_two(self, *args, **kwargs):
        if len(lab.MADE) == 2:
            raise IndexError("no third")
        made(self, *args, **kwargs)

    assert closed_after(football, "images", "football:academy_empty_goal", 1, frame_stack=2,
                        representation="simple115v2", stacked=False) == [True]  # fmt: skip
    made = lab.Lab.__init__
    monkeypatch.setattr(lab.Lab, "__init__", make_first_two)
    assert closed_after(lab, "no third", "dmlab:rooms_watermaze", 3) == [True, True]
    monkeypatch.setattr(football, "Space", lambda **own: None)
    assert closed_after(football, "NoneType", "football:11_vs_11_stochastic", 2, left_players=2) == [True]


def test_one_that_cannot_be_made_closes_those_before(packages):
    made = []

    class Second(toy_envs.Counting):
        def __init__(self):
            if made:
                raise IndexError("no second")
            super().__init__()
            made.append(self)

        def close(self):
            self.closed = True

    with pytest.raises(IndexError):
        envs.ResetAhead(Second)
    assert made.pop().closed


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"left_players": 12}, "left_players 12 and right_players 0: each is from 0 to 11"),
        ({"left_players": 0}, "together they are one or more"),
        ({"left_players": 2, "right_players": -1}, "right_players -1: each is"),
    ],
)
def test_players_that_cannot_be_are_refused(packages, kwargs, message):
    with pytest.raises(InputError, match=message):
        envs.make("football:11_vs_11_stochastic", 12, **kwargs)


def test_scenarios_that_there_are_not_and_choices_of_one_agent_are_refused(packages):
    with pytest.raises(InputError, match="football:5_a_side: gfootball has no such scenario"):
        envs.make("football:5_a_side", 1)
    with pytest.raises(InputError, match="--frame_stack is for one agent"):
        envs.make("football:11_vs_11_stochastic", 2, left_players=2, frame_stack=2)
    with pytest.raises(InputError, match="--reset_ahead is for one agent"):
        envs.make("football:11_vs_11_stochastic", 2, left_players=2, reset_ahead=True)


def test_players_train_several_policies(packages, tmp_path):
    flags_class = multibeast.flags_of(monobeast)
    flags = flags_class(
        env="football:11_vs_11_stochastic", env_kwargs='{"left_players": 2, "right_players": 2}', num_policies=2,
        group_width=8, batch_width=4, unroll_length=5, hidden_size=32, total_steps=200, log_steps=100, num_actors=1,
        root=str(tmp_path), name="run", tensorboard=False, device="cpu", deterministic=True,
    )  # fmt: skip
    multibeast.train(flags)
    assert float(metrics_of(tmp_path / "run")[-1]["policy1/stats/steps"]) >= 200
