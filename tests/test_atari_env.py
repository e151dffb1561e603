"""`beast.envs.emulator.AtariVectorEnv` beside ale-py's: the same seeds and actions have to give the same bytes."""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

libatari = pytest.importorskip("libatari", reason="the emulator is not built: make libatari")

import ale_py  # noqa: E402
import cv2  # noqa: E402
from ale_py import roms  # noqa: E402
from ale_py.vector_env import AtariVectorEnv as AleVectorEnv  # noqa: E402
from atari import programs  # noqa: E402
from atari.lockstep import load_ale  # noqa: E402
from lock_step import small_flags  # noqa: E402

import monobeast  # noqa: E402
from beast import envs  # noqa: E402
from beast.envs import emulator  # noqa: E402
from beast.envs.emulator import AtariVectorEnv  # noqa: E402
from beast.envs.groups import EnvGroup  # noqa: E402
from beast.errors import InputError  # noqa: E402
from beast.run import checkpoint  # noqa: E402

ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
ROOT = Path(__file__).parent.parent
DEEPMIND = {"noop_max": 30, "use_fire_reset": True, "repeat_action_probability": 0.0}
MACHADO = {"noop_max": 0, "use_fire_reset": False, "repeat_action_probability": 0.25}
PROTOCOLS = {"v4": DEEPMIND, "v5": MACHADO}
MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
ATARI_57 = """
    alien amidar assault asterix asteroids atlantis bank_heist battle_zone beam_rider berzerk bowling boxing breakout
    centipede chopper_command crazy_climber defender demon_attack double_dunk enduro fishing_derby freeway frostbite
    gopher gravitar hero ice_hockey jamesbond kangaroo krull kung_fu_master montezuma_revenge ms_pacman name_this_game
    phoenix pitfall pong private_eye qbert riverraid road_runner robotank seaquest skiing solaris space_invaders
    star_gunner surround tennis time_pilot tutankham up_n_down venture video_pinball wizard_of_wor yars_revenge zaxxon
""".split()
GAMES = ("pong", "breakout", "qbert", "seaquest", "space_invaders", "beam_rider", "freeway", "ms_pacman")


def play_both(game: str, num_envs: int, num_steps: int, seed: int = 1, **settings) -> dict:
    """Step both with the same actions and compare all that they return; how episodes ended, and what was rewarded."""
    settings = {"num_threads": 1, "reward_clipping": False, **settings}
    ours, theirs = (kind(game, num_envs, **settings) for kind in (AtariVectorEnv, AleVectorEnv))
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    assert ours.single_action_space == theirs.single_action_space and ours.action_space == theirs.action_space
    assert ours.autoreset_mode == theirs.autoreset_mode
    rng = np.random.default_rng(seed)
    expected = theirs.reset(seed=seed)
    compare("at the reset", *zip(ours.reset(seed=seed), expected))
    frames = expected[1]["episode_frame_number"]
    happened = {"terminated": 0, "truncated": 0, "rewards": 0, "lowest_reward": 0}
    for t in range(num_steps):
        actions = rng.integers(0, ours.single_action_space.n, num_envs)
        found, expected = ours.step(actions), theirs.step(actions)
        ended = expected[2] | expected[3]
        finals = [result[4].pop("final_obs", None) for result in (found, expected)]
        has_final = ended.any() and settings.get("autoreset_mode") == MODES[1]
        assert [final is not None for final in finals] == [has_final, has_final]
        compare(f"in step {t}", *zip(found, expected))
        frames, frames_before = expected[4]["episode_frame_number"], frames
        if has_final:
            last = finals[1]
            if settings.get("life_loss_info"):  # where the game goes on after a lost life ale-py writes no final_obs
                last = last.copy()
                last[frames > frames_before] = found[0][frames > frames_before]
            np.testing.assert_array_equal(finals[0][ended], last[ended], err_msg=f"final_obs in step {t}")
        happened["terminated"] += int(expected[2].sum())
        happened["truncated"] += int(expected[3].sum())
        happened["rewards"] += int((expected[1] != 0).sum())
        happened["lowest_reward"] = min(happened["lowest_reward"], int(expected[1].min()))
    if num_steps > 10:  # without a seed the generators go on
        compare("at a reset without a seed", *zip(ours.reset(), theirs.reset()))
    ours.close(), theirs.close()
    return happened


def compare(when: str, *pairs) -> None:
    of_step = ("observations", "reward", "terminated", "truncated", "info")
    names = of_step if len(pairs) == 5 else (of_step[0], of_step[-1])
    for name, (found, expected) in zip(names, pairs):
        if name == "info":
            assert found.keys() == expected.keys()
            for key in expected:
                assert found[key].dtype == expected[key].dtype
                np.testing.assert_array_equal(found[key], expected[key], err_msg=f"{key} {when}")
        else:
            assert found.dtype == expected.dtype and found.shape == expected.shape
            np.testing.assert_array_equal(found, expected, err_msg=f"{name} {when}")


# ---------------------------------------------------------------------------------- the same as ale-py's vector env


@pytest.mark.parametrize("mode", MODES)
def test_a_game_that_is_over_in_the_frame_of_the_limit_is_terminated_and_not_truncated(mode):
    settings = {"num_threads": 1, "noop_max": 0, "repeat_action_probability": 0.0, "autoreset_mode": mode}

    def play(kind, **limit) -> tuple[int, bool, bool]:
        env, steps, ended = kind("breakout", 1, **settings, **limit), 0, False
        env.reset(seed=1)
        while not ended:
            _, _, terminated, truncated, _ = env.step(np.array([1]))  # FIRE: the balls are lost
            steps, ended = steps + 1, terminated[0] or truncated[0]
        return steps, bool(terminated[0]), bool(truncated[0])

    steps, ends = play(AtariVectorEnv)[0], set()
    for limit in range(4 * steps - 4, 4 * steps + 1):  # the game is over in one of the last step's frames
        found, expected = (play(kind, max_num_frames_per_episode=limit) for kind in (AtariVectorEnv, AleVectorEnv))
        assert found == expected
        ends.add(found[1:])
    assert ends == {(True, False), (False, True)}


@pytest.mark.parametrize("game, protocol, mode", [
    ("breakout", "v4", MODES[0]), ("breakout", "v5", MODES[1]), ("pong", "v4", MODES[1]), ("qbert", "v5", MODES[0]),
    ("seaquest", "v4", MODES[0]),
])  # fmt: skip
def test_observations_rewards_flags_and_infos_are_those_of_ale_py(game, protocol, mode):
    limit = 108_000 if game == "breakout" else 150 * 4  # random games of Breakout are short
    happened = play_both(game, 2, 250, autoreset_mode=mode, max_num_frames_per_episode=limit, **PROTOCOLS[protocol])
    assert happened["terminated"] + happened["truncated"] > 0, "an episode has to end, or the test says little"


@pytest.mark.on_demand
@pytest.mark.parametrize("mode", MODES, ids=["next-step", "same-step"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("game", GAMES)
def test_2000_steps_of_8_games_in_both_protocols_and_both_modes_are_those_of_ale_py(game, protocol, mode):
    happened = play_both(game, 2, 2_000, seed=7, autoreset_mode=mode, **PROTOCOLS[protocol])
    assert happened["terminated"] > 0 or game in ("beam_rider", "freeway"), "an episode has to end"


@pytest.mark.long
@pytest.mark.parametrize("game", sorted(emulator.EXACT_GAMES))
def test_every_game_on_the_list_begins_as_it_does_in_ale_py(game):
    play_both(game, 1, 40, seed=3, **DEEPMIND)


@pytest.mark.on_demand
@pytest.mark.parametrize("game", sorted(emulator.EXACT_GAMES))
def test_every_game_on_the_list_plays_as_ale_py_does(game):
    """Games last longer than this, so that a limit ends most episodes."""
    for protocol in PROTOCOLS.values():
        play_both(game, 2, 500, seed=3, max_num_frames_per_episode=1_000, **protocol)


SETTINGS = [
    {"frameskip": 3, "maxpool": False, "max_num_frames_per_episode": 31},
    {"max_num_frames_per_episode": 4},
    {"max_num_frames_per_episode": 8, "repeat_action_probability": 0.25},
    {"grayscale": False, "stack_num": 2, "img_height": 64, "img_width": 60, "max_num_frames_per_episode": 40},
    {"repeat_action_probability": 0.25},
    {"reward_clipping": True},
    {"episodic_life": True, "autoreset_mode": MODES[1]},
    {"life_loss_info": True},
]
MORE_SETTINGS = [
    {"frameskip": 1, "max_num_frames_per_episode": 30},
    {"frameskip": 2, "max_num_frames_per_episode": 31},
    {"max_num_frames_per_episode": 2},
    {"max_num_frames_per_episode": 4, "noop_max": 0, "use_fire_reset": False},
    {"max_num_frames_per_episode": 4, "frameskip": 2, "autoreset_mode": MODES[1]},
    {"stack_num": 1, "img_height": 210, "img_width": 160},
    {"img_height": 105, "img_width": 80},
    {"img_height": 70, "img_width": 40},
    {"img_height": 96, "img_width": 100},
    {"img_height": 84, "img_width": 160},
    {"full_action_space": True},
    {"noop_max": 1},
    {"noop_max": 0},
    {"noop_max": 7, "use_fire_reset": False},
    {"repeat_action_probability": 1.0, "noop_max": 0},
    {"episodic_life": True},
    {"life_loss_info": True, "autoreset_mode": MODES[1]},
]


@pytest.mark.parametrize(
    "settings", SETTINGS + [pytest.param(settings, marks=pytest.mark.long) for settings in MORE_SETTINGS], ids=str
)
def test_every_setting_means_what_it_means_to_ale_py(settings):
    game = "qbert" if "reward_clipping" in settings else "breakout"
    num_steps = 300 if settings.keys() & {"episodic_life", "life_loss_info"} else 60  # until the last life is lost
    happened = play_both(game, 2, num_steps, **settings)
    assert happened["rewards"] or "reward_clipping" not in settings
    assert happened["terminated"] or not settings.keys() & {"episodic_life", "life_loss_info"}


def test_rewards_below_minus_1_are_clipped_as_ale_py_clips_them():
    assert play_both("skiing", 1, 5, reward_clipping=False)["lowest_reward"] < -1
    assert play_both("skiing", 1, 5, reward_clipping=True)["lowest_reward"] == -1


def test_an_episode_of_a_game_without_fire_begins_without_it_as_in_ale_py():
    assert emulator.Action.FIRE not in AtariVectorEnv("freeway", 1, num_threads=1).get_action_set()
    play_both("freeway", 1, 5, noop_max=0, use_fire_reset=True)


def test_a_reset_whose_length_depends_on_the_seed_is_that_of_ale_py():
    """Double Dunk's reset acts, and its actions stick."""
    happened = play_both("double_dunk", 3, 30, autoreset_mode=MODES[0], max_num_frames_per_episode=40, **MACHADO)
    assert happened["truncated"] > 3


def test_the_last_image_of_an_episode_is_that_of_ale_py_where_frames_end_early_in_play():
    happened = play_both("alien", 2, 150, max_num_frames_per_episode=8, **MACHADO)
    assert happened["truncated"] > 50


@pytest.mark.parametrize("game", ["carnival", "up_n_down", "pacman"])  # Pac-Man has the colors of PAL
def test_screens_of_other_heights_are_scaled_as_ale_py_scales_them(game):
    play_both(game, 1, 100, **DEEPMIND)


@pytest.mark.parametrize(
    "height, width", [(84, 84), (64, 64), (210, 84), (84, 160), (96, 96), (105, 80), (70, 80), (1, 1), (209, 159)]
)
def test_random_images_are_scaled_as_opencv_scales_them(height, width):
    rng = np.random.default_rng(0)
    for shape in ((210, 160), (214, 160), (250, 160), (210, 160, 3)):
        if height > shape[0]:
            continue
        image = (rng.integers(0, 256, shape) // rng.choice([1, 100, 128])).astype(np.uint8)
        for rows in (1, 3):  # equal rows, one below the other
            picture = image.repeat(rows, axis=0)[: shape[0]]
            expected = cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)
            np.testing.assert_array_equal(libatari.resize(picture, height, width), expected, err_msg=str(shape))


def test_images_whose_sums_floats_do_not_hold_are_refused():
    with pytest.raises(ValueError, match="not scaled exactly"):
        libatari.resize(np.zeros((300, 301), np.uint8), 299, 300)


def test_the_fast_way_to_84_by_84_gives_what_the_general_one_gives():
    """An image of three equal channels takes the general way; ties are frequent among few gray levels."""
    rng = np.random.default_rng(1)
    for levels in (2, 3, 5, 256):
        image = (rng.integers(0, levels, (210, 160)) * (255 // (levels - 1))).astype(np.uint8)
        general = libatari.resize(np.repeat(image[..., None], 3, axis=2), 84, 84)
        np.testing.assert_array_equal(libatari.resize(image, 84, 84), general[..., 0])
        np.testing.assert_array_equal(general[..., 0], general[..., 2])


# ----------------------------------------------------------------------------------------------------- seeds, masks


def test_an_array_of_seeds_has_one_for_each_environment_and_a_seed_begins_anew():
    env = AtariVectorEnv("breakout", 3, num_threads=1)
    together = env.reset(seed=5)[1]["frame_number"]
    for _ in range(20):
        env.step(np.array([1, 2, 3]))
    assert env.reset(seed=np.array([7, 5, 6]))[1]["frame_number"].tolist() == together[[2, 0, 1]].tolist()
    starts = [AtariVectorEnv("breakout", 8, num_threads=1).reset()[1]["frame_number"].tolist() for _ in range(2)]
    assert starts[0] != starts[1], "without any seed the system gives one"
    env.close()


@pytest.mark.parametrize("seed", [None, 9, np.array([9, 8])], ids=["none", "number", "array"])
def test_a_mask_resets_some_environments_as_ale_py_does(seed):
    ours, theirs = (kind("breakout", 3, num_threads=1) for kind in (AtariVectorEnv, AleVectorEnv))
    options = {"reset_mask": np.array([True, False, True])}
    for env in (ours, theirs):
        env.reset(seed=5)
        for _ in range(5):
            env.step(np.array([0, 1, 2]))
    compare("after a masked reset", *zip(*(env.reset(seed=seed, options=options) for env in (ours, theirs))))
    for _ in range(5):
        compare("later", *zip(*(env.step(np.array([0, 1, 2])) for env in (ours, theirs))))
    ours.close(), theirs.close()


# --------------------------------------------------------------------------------------------- memory, threads, async


def test_threads_change_nothing():
    envs_ = [AtariVectorEnv("breakout", 5, num_threads=threads, **MACHADO) for threads in (1, 2, 5, 0)]
    rng = np.random.default_rng(0)
    first = [env.reset(seed=3) for env in envs_]
    for other in first[1:]:
        compare("at the reset", *zip(other, first[0]))
    for t in range(150):
        actions = rng.integers(0, 4, 5)
        results = [env.step(actions) for env in envs_]
        for other in results[1:]:
            compare(f"in step {t}", *zip(other, results[0]))
    for env in envs_:
        env.close()


def test_observations_are_written_into_the_array_that_was_given():
    plain, into = AtariVectorEnv("pong", 2, num_threads=1), AtariVectorEnv("pong", 2, num_threads=2)
    rows = np.full((3, 2, 4, 84, 84), 77, np.uint8)
    for t in range(2):
        into.observe_into(rows[t])
        found = into.reset(seed=1)[0] if t == 0 else into.step(np.array([2, 3]))[0]
        expected = plain.reset(seed=1)[0] if t == 0 else plain.step(np.array([2, 3]))[0]
        assert found is not None and found.base is rows and np.shares_memory(found, rows[t])
        np.testing.assert_array_equal(rows[t], expected)
    assert (rows[2] == 77).all()
    interleaved = np.full((2, 3, 4, 84, 84), 77, np.uint8)[:, 1]  # each environment's in one piece, a gap between them
    into.observe_into(interleaved)
    into.step(np.array([0, 0]))
    np.testing.assert_array_equal(interleaved, plain.step(np.array([0, 0]))[0])
    into.observe_into(None)
    assert not np.shares_memory(into.step(np.array([0, 0]))[0], interleaved)
    plain.step(np.array([0, 0])), into.send(np.array([0, 0]))
    for wrong in (np.zeros((2, 4, 84, 83), np.uint8), np.zeros((2, 4, 84, 84), np.int8), [0]):
        with pytest.raises(InputError, match=r"was given .*: give a uint8 array of shape \(2, 4, 84, 84\)"):
            into.observe_into(wrong)
    read_only = np.frombuffer(bytes(2 * 4 * 84 * 84), np.uint8).reshape(2, 4, 84, 84)
    with pytest.raises(InputError, match="that is read-only"):
        into.observe_into(read_only)
    for wrong in (np.zeros((2, 4, 84, 168), np.uint8)[..., ::2], np.zeros((2, 4, 84, 84), np.uint8)[::-1]):
        with pytest.raises(InputError, match="of strides .* each in one piece"):
            into.observe_into(wrong)
    np.testing.assert_array_equal(into.recv()[0], plain.step(np.array([0, 0]))[0])
    plain.close(), into.close()


def test_a_group_has_its_rows_written_without_a_copy():
    group = EnvGroup(envs.make("BreakoutNoFrameskip-v4", 2, atari_backend="beast"))
    other = EnvGroup(envs.make("BreakoutNoFrameskip-v4", 2, atari_backend="ale"))
    rows = [
        {name: np.zeros((200, 2, *shape), dtype) for name, (shape, dtype) in one.fields.items()}
        for one in (group, other)
    ]

    def row(one, t):
        return {
            "obs": {"obs": one["obs/obs"][t]},
            **{name: array[t] for name, array in one.items() if name != "obs/obs"},
        }

    group.reset(1, row(rows[0], 0)), other.reset(1, row(rows[1], 0))
    rng = np.random.default_rng(0)
    for t in range(1, 200):
        actions = rng.integers(0, 4, 2)
        group.step(actions, row(rows[0], t)), other.step(actions, row(rows[1], t))
    for name in rows[0]:
        np.testing.assert_array_equal(rows[0][name], rows[1][name], err_msg=name)
    assert rows[0]["done"].any() and np.shares_memory(group.env.unwrapped._out, rows[0]["obs/obs"])
    group.close(), other.close()


def test_a_frame_that_ends_early_in_play_shows_rows_of_the_frame_before_the_last():
    """In Alien some have 21 lines less than the screen, here in step 119 of environment 1."""
    settings = {"num_threads": 1, "reward_clipping": False, **DEEPMIND}
    ours, theirs = (kind("alien", 8, **settings) for kind in (AtariVectorEnv, AleVectorEnv))
    ours.reset(seed=1), theirs.reset(seed=1)
    for step, actions in enumerate(np.random.default_rng(0).integers(0, 18, (61, 8)).repeat(2, axis=0)):
        np.testing.assert_array_equal(ours.step(actions)[0], theirs.step(actions)[0], err_msg=f"step {step}")
    ours.close(), theirs.close()


def test_a_second_thread_is_refused_while_the_first_one_waits():
    env = AtariVectorEnv("pong", 64, num_threads=2, frameskip=200)
    env.reset(seed=1)
    env.send(np.zeros(64, np.int64))
    refused = []

    def wait() -> None:
        try:
            env._pool.wait()
        except RuntimeError as error:
            refused.append(str(error))

    others = [threading.Thread(target=wait) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join(30)
        assert not other.is_alive()
    assert len(refused) == 2 and all("another thread" in text for text in refused)
    env.recv(), env.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_forked_child_is_told_that_the_threads_are_not_its_own(num_threads):
    env = AtariVectorEnv("pong", 4, num_threads=num_threads)
    env.reset(seed=1)
    env.send(np.zeros(4, np.int64)), env.recv()  # by a thread, also where there is one
    if not (child := os.fork()):
        status = 1
        try:
            with pytest.raises(RuntimeError, match="after the fork"):
                env.step(np.zeros(4, np.int64))
            del env
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    env.step(np.zeros(4, np.int64)), env.close()


def test_half_of_the_environments_at_a_time_play_as_all_together_do():
    halves = AtariVectorEnv("breakout", 4, batch_size=2, num_threads=2)
    whole = AtariVectorEnv("breakout", 4, num_threads=1)
    assert halves.observation_space.shape == (2, 4, 84, 84)
    expected, info = whole.reset(seed=1)
    found, info = halves.reset(seed=1)
    assert info["env_id"].tolist() == [0, 1]
    np.testing.assert_array_equal(found, expected[:2])
    halves.send(np.array([1, 2]))
    observations, *_, info = halves.recv()
    assert info["env_id"].tolist() == [2, 3]
    np.testing.assert_array_equal(observations, expected[2:])
    halves.send(np.array([3, 0]))
    expected, rewards, *_ = whole.step(np.array([1, 2, 3, 0]))
    for first in (0, 2):
        observations, reward, *_, info = halves.recv()
        assert info["env_id"].tolist() == [first, first + 1]
        np.testing.assert_array_equal(observations, expected[first : first + 2])
        np.testing.assert_array_equal(reward, rewards[first : first + 2])
        if first == 0:
            halves.send(np.array([0, 0]))
    with pytest.raises(InputError, match="there are no observations to act on"):
        halves.send(np.array([0, 0])), halves.send(np.array([0, 0]))
    for of_all in (lambda: halves.restore_state(whole.clone_state()), lambda: halves.observe_into(expected)):
        with pytest.raises(InputError, match="needs batch_size == num_envs: they are 2, 4"):
            of_all()
    halves.close(), whole.close()


def test_a_reset_and_a_restored_state_drop_what_was_not_received():
    env, actions = AtariVectorEnv("pong", 2, num_threads=2), np.array([2, 3])
    env.reset(seed=1)
    states = env.clone_state()
    for drop in (env.reset, lambda: env.restore_state(states)):
        env.send(actions)
        drop()
        with pytest.raises(InputError, match="without anything under way"):
            env.recv()
        env.step(actions)
    halves = AtariVectorEnv("pong", 4, batch_size=2, num_threads=2)
    halves.reset(seed=1)
    for results in (halves.reset(seed=5), halves.recv()):
        expected = env.reset(seed=5 + results[-1]["env_id"][0])[0]
        np.testing.assert_array_equal(results[0], expected)
    assert results[-1]["env_id"].tolist() == [2, 3]
    with pytest.raises(InputError, match="without anything under way"):
        halves.recv()
    env.close(), halves.close()


def test_the_ram_is_that_of_ale_py_for_every_environment():
    env = AtariVectorEnv("seaquest", 2, num_threads=1, noop_max=0, use_fire_reset=False)
    env.reset(seed=5)
    consoles = [load_ale(roms.get_rom_path("seaquest"), seed) for seed in (5, 6)]
    for console in consoles:
        console.reset_game()
    for actions in np.random.default_rng(0).integers(0, 18, (20, 2)):
        np.testing.assert_array_equal(env.ram(), [console.getRAM() for console in consoles])
        env.step(actions)
        for console, action in zip(consoles, actions):
            for _ in range(4):
                console.act(ale_py.Action(int(action)))
    env.close()


@pytest.mark.parametrize("game", ["pong", "pooyan", "adventure"])
def test_an_environment_takes_at_most_40_kb_beside_its_observations(game):
    assert emulator.known_games()[game]["height"] == {"pong": 210, "pooyan": 220, "adventure": 250}[game]
    assert AtariVectorEnv(game, 1, num_threads=1).bytes_per_env <= 40 * 1024
    script = (
        "import resource, sys; from beast.envs.emulator import AtariVectorEnv; import numpy as np\n"
        "def used(): return int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()\n"
        "def make(n, out):\n"
        "    env = AtariVectorEnv(sys.argv[1], n, num_threads=1)\n"
        "    env.observe_into(out), env.reset(seed=1), env.step(np.zeros(n, int))\n"
        "    return env\n"
        "first = make(8, np.ones((8, 4, 84, 84), np.uint8))\n"
        "out = np.ones((1024, 4, 84, 84), np.uint8); before = used()\n"
        "env = make(1024, out)\n"
        "print((used() - before) / 1024)"
    )
    command = [sys.executable, "-c", script, game]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 40 * 1024 + 200, "resident bytes; what the process needs for 1,024 of them is 200 each"


def test_512_environments_are_made_seeded_and_reset_in_2_seconds():
    before = time.process_time()
    env = AtariVectorEnv("pong", 512, num_threads=2)
    env.reset(seed=1)
    assert time.process_time() - before < 2, "of CPU time; ale-py takes 260"
    env.close()


# ------------------------------------------------------------------------------------------------------- states


def test_a_restored_state_goes_on_as_the_original_did_and_so_does_its_copy_elsewhere():
    env = AtariVectorEnv("breakout", 2, num_threads=1, **MACHADO)
    env.reset(seed=1)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 4, (300, 2))
    for t in range(50):
        shown, *_, info = env.step(actions[t])
    states = env.clone_state()
    first = [env.step(actions[t]) for t in range(50, 300)]
    assert any((result[2] | result[3]).any() for result in first), "across the end of a game"
    for ids in ([1], [1, 0], None):
        of_ids = [0, 1] if ids is None else ids
        found = env.restore_state([states[k] for k in of_ids], ids)
        compare(f"of {ids}", *zip(found, (shown[of_ids], {name: values[of_ids] for name, values in info.items()})))
    for t, expected in zip(range(50, 300), first):
        compare(f"in step {t}", *zip(env.step(actions[t]), expected))

    swapped = AtariVectorEnv("breakout", 3, num_threads=2, **MACHADO)  # never reset before
    swapped.restore_state([states[1], states[0], states[1]])
    for t, expected in zip(range(50, 100), first):
        found = swapped.step(actions[t][[1, 0, 1]])
        np.testing.assert_array_equal(found[0], expected[0][[1, 0, 1]])
        np.testing.assert_array_equal(found[1], expected[1][[1, 0, 1]])
    env.close(), swapped.close()


def test_a_state_has_what_the_last_image_of_an_episode_is_made_from():
    """An episode of 8 frames ends in the last frame of its second step: that shows a maximum with the image before."""
    settings = {"num_threads": 1, "max_num_frames_per_episode": 8, **MACHADO}
    env, actions = AtariVectorEnv("breakout", 2, **settings), np.array([1, 2])
    env.reset(seed=1)
    for _ in range(30):  # the ball moves across the ends of episodes
        states = env.clone_state()
        expected = [env.step(actions) for _ in range(3)]
        other = AtariVectorEnv("breakout", 2, **settings)
        other.reset(seed=2)
        other.step(actions[::-1])
        other.restore_state(states)
        for t in range(3):
            compare(f"{t} steps after a state", *zip(other.step(actions), expected[t]))
        env.restore_state(states), env.step(actions), other.close()
    env.close()


def test_states_travel_between_processes(tmp_path):
    env = AtariVectorEnv("seaquest", 2, num_threads=1, **MACHADO)
    env.reset(seed=4)
    for t in range(40):
        env.step(np.array([t % 18, 1]))
    (tmp_path / "states").write_bytes(pickle.dumps(env.clone_state()))
    script = (
        "import json, pickle, sys, zlib, numpy as np; from beast.envs.emulator import AtariVectorEnv\n"
        "settings = dict(noop_max=0, use_fire_reset=False, repeat_action_probability=0.25)\n"
        "env = AtariVectorEnv('seaquest', 2, num_threads=1, **settings)\n"
        "env.restore_state(pickle.load(open(sys.argv[1], 'rb')))\n"
        "print(json.dumps([zlib.crc32(env.step(np.array([t % 18, 1]))[0]) for t in range(40, 80)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "states")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [zlib.crc32(env.step(np.array([t % 18, 1]))[0]) for t in range(40, 80)]
    env.close()


def test_damaged_states_and_those_of_other_games_and_settings_are_refused_and_change_nothing():
    env = AtariVectorEnv("pong", 2, num_threads=1)
    env.reset(seed=1)
    before = env.clone_state()
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(before[0])
        for place in rng.integers(0, len(damaged), rng.integers(1, 4)):
            damaged[place] ^= int(rng.integers(1, 256))
        with pytest.raises(InputError, match="damaged|no state|another game"):
            env.restore_state([before[1], bytes(damaged)])
    other = AtariVectorEnv("breakout", 1, num_threads=1)
    other.reset(seed=1)
    for strange, message in [
        (b"", "bytes, not 0"), (before[0][:-1], "bytes, not"), (bytes(len(before[0])), "no state"),
        (other.clone_state()[0], "another game"),
        (AtariVectorEnv("pong", 1, num_threads=1).clone_state()[0], "of an environment that was never reset"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            env.restore_state([strange], [0])
    with pytest.raises(InputError, match="1 states for 2 environments"):
        env.restore_state(before[:1])
    for ids in ([0, 2], [0, -1], [0, 2**40], [0.0, 1.0], ["0", "1"], [[0, 1]], 0):
        with pytest.raises(InputError, match="ids are"):
            env.restore_state(before[::-1], ids)
        with pytest.raises(InputError, match="ids are"):
            env.clone_state(ids)
    assert env.clone_state([]) == []
    assert env.clone_state() == before
    env.close()


@pytest.mark.parametrize("setting", [
    {"max_num_frames_per_episode": 107_999}, {"frameskip": 3}, {"maxpool": False}, {"noop_max": 29},
    {"use_fire_reset": False}, {"episodic_life": True}, {"life_loss_info": True}, {"reward_clipping": False},
    {"autoreset_mode": MODES[1]}, {"full_action_space": True}, {"repeat_action_probability": 0.25},
    {"img_height": 63, "img_width": 112}, {"stack_num": 6, "img_width": 56},
], ids=str)  # fmt: skip
def test_a_state_is_refused_where_one_setting_is_another(setting):
    env, other = AtariVectorEnv("pong", 1, num_threads=1), AtariVectorEnv("pong", 1, num_threads=1, **setting)
    env.reset(seed=1)
    with pytest.raises(InputError, match="of another game or of other settings"):
        other.restore_state(env.clone_state())


STATE_FIELDS = {  # the last fields of EnvState in csrc/atari/env.h: offsets from its end, and their formats
    "system.position": (-2536, "I"), "user.position": (-36, "I"), "noop_draws": (-28, "I"), "frames": (-24, "i"),
    "oldest": (-16, "i"), "start_frames": (-12, "i"), "action": (-8, "i"), "has_ended": (-4, "B"),
    "was_reset": (-3, "B"),
}  # fmt: skip


@pytest.mark.parametrize("name, value", [
    ("system.position", 625), ("user.position", 625), ("noop_draws", 1 << 24), ("frames", -1), ("frames", 10**9 + 1),
    ("oldest", -1), ("oldest", 4), ("start_frames", -2), ("start_frames", 31), ("action", -1), ("action", 18),
    ("has_ended", 2), ("was_reset", 0), ("was_reset", 2),
])  # fmt: skip
def test_a_state_that_cannot_be_is_refused_though_its_checksum_is_right(name, value):
    env = AtariVectorEnv("pong", 1, num_threads=1)
    env.reset(seed=1)
    (genuine,) = env.clone_state()
    size = (env.bytes_per_env - 4 * 84 * 84) // 2  # of EnvState; a state has two, and the stack

    def with_checksum(state: bytes) -> bytes:
        checksum = 0xCBF29CE484222325
        for (word,) in struct.iter_unpack("<Q", state[24:]):
            checksum = ((checksum ^ word) * 0x100000001B3) % 2**64
            checksum ^= checksum >> 32
        return state[:16] + struct.pack("<Q", checksum) + state[24:]

    assert with_checksum(genuine[:16] + bytes(8) + genuine[24:]) == genuine
    offset, kind = STATE_FIELDS[name]
    for end in (24 + size, 24 + 2 * size):
        forged = bytearray(genuine)
        struct.pack_into("<" + kind, forged, end + offset, value)
        with pytest.raises(InputError, match="this state is damaged"):
            env.restore_state([with_checksum(bytes(forged))])
    assert env.clone_state() == [genuine]


# --------------------------------------------------------------------------------------------------------- films


@pytest.mark.parametrize("game, limit, num_steps", [
    ("breakout", {}, 200), ("breakout", {"max_num_frames_per_episode": 8}, 200), ("pacman", {}, 30),
], ids=["whole-games", "8-frames", "pal"])  # fmt: skip
def test_films_show_in_color_what_ale_py_shows(game, limit, num_steps):
    settings = {"num_threads": 1, **DEEPMIND, **limit}
    ours = AtariVectorEnv(game, 2, render_mode="rgb_array", **settings)
    gray = AtariVectorEnv(game, 2, **settings)
    height = emulator.known_games()[game]["height"]
    in_color = {"grayscale": False, "img_height": height, "img_width": 160, "stack_num": 1}
    theirs = AleVectorEnv(game, 2, **in_color, **settings)
    found, expected = ours.reset(seed=1)[0], theirs.reset(seed=1)[0]
    np.testing.assert_array_equal(found, gray.reset(seed=1)[0])
    np.testing.assert_array_equal(ours.render(), expected[:, 0])
    for t in range(num_steps):
        actions = np.array([t % 4, 1])
        found, expected = ours.step(actions)[0], theirs.step(actions)[0]
        np.testing.assert_array_equal(found, gray.step(actions)[0])
        np.testing.assert_array_equal(ours.render(), expected[:, 0])
    assert gray.render() is None
    states = ours.clone_state()
    ours.step(np.array([0, 1]))
    assert (ours.render() != expected[:, 0]).any()
    ours.restore_state(states)
    np.testing.assert_array_equal(ours.render(), expected[:, 0], err_msg="after restore_state()")
    ours.close(), theirs.close(), gray.close()


def test_a_film_without_a_seed_shows_the_game_that_is_played():
    settings = {"noops": 30, "atari_backend": "ale", "render_mode": "rgb_array"}
    env = envs.make("BreakoutNoFrameskip-v4", 2, **settings)
    found = set()
    for _ in range(3):
        observations, _ = env.reset()
        for t in range(10):  # the ball does not reach the bricks: gray of a maximum is the maximum of grays
            observations = env.step(np.array([t % 4, 1]))[0]
        gray = (env.render() @ np.array([0.299, 0.587, 0.114])).round().astype(np.uint8)
        for image, observation in zip(gray, observations):
            different = np.abs(libatari.resize(image, 84, 84).astype(int) - observation[-1]) > 3
            assert not different.any(), "the paddle and the ball are where the agent sees them"
        found.add(observations.tobytes())
    assert len(found) > 1, "games differ"
    env.close()


# ------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("settings, message", [
    ({"game": "chess"}, "knows no game 'chess'; its games are adventure"),
    ({"game": "ALE/Pong-v5"}, "knows no game 'ALE/Pong-v5'; give the name of a ROM: pong$"),
    ({"game": "MontezumaRevengeNoFrameskip-v4"}, "give the name of a ROM: montezuma_revenge$"),
    ({"game": "space_invader"}, "give the name of a ROM: space_invaders or"),
    ({"game": "tic_tac_toe_3d"}, "tic_tac_toe_3d is not on the list .*: unlisted=True plays it all the same"),
    ({"game": "video_chess"}, "video_chess is not on the list"),
    ({"game": ["pong"]}, r"knows no game \['pong'\]; its games are"),
    ({"game": None}, "knows no game None; its games are"),
    ({"mode": 1}, "mode: Atari games are played in their default mode, as in ale-py's vector env: leave it out"),
    ({"difficulty": 0}, "difficulty: Atari games are played in their default difficulty"),
    ({"frame_skip": 4}, "takes no 'frame_skip'; its arguments are game, num_envs, .*frameskip"),
    ({"unlisted": 1}, "unlisted is 1: give True or False"),
    ({"num_envs": 0}, "num_envs is 0: it must lie between 1 and"),
    ({"stack_num": 0}, "stack_num is 0"),
    ({"frameskip": 0}, "frameskip is 0"),
    ({"repeat_action_probability": 1.5}, "repeat_action_probability is 1.5: it must lie between 0 and 1"),
    ({"repeat_action_probability": float("nan")}, "repeat_action_probability is nan"),
    ({"num_envs": 2.0}, "num_envs is 2.0: give a whole number"),
    ({"frameskip": 4.0}, "frameskip is 4.0: give a whole number"),
    ({"frameskip": True}, "frameskip is True: give a whole number"),
    ({"repeat_action_probability": True}, "repeat_action_probability is True: give a number"),
    ({"img_height": 84.0}, "img_height is 84.0: give a whole number"),
    ({"img_width": 0}, "img_width is 0"),
    ({"repeat_action_probability": "often"}, "repeat_action_probability is 'often': give a number"),
    ({"game": "combat"}, "combat has no rules for one player"),
    ({"batch_size": 3}, "batch_size is 3"),
    ({"num_envs": 5, "batch_size": 2}, "batch_size 2 does not divide num_envs 5"),
    ({"img_height": 300}, "only scales down, to at most 210 and 160"),
    ({"continuous": True}, "continuous is not supported"),
    ({"grayscale": "no"}, "grayscale is 'no': give True or False"),
    ({"maxpool": None}, "maxpool is None: give True or False"),
    ({"autoreset_mode": AutoresetMode.DISABLED}, "it is AutoresetMode.NEXT_STEP or SAME_STEP"),
    ({"render_mode": "human"}, "render_mode is 'human': it is None or 'rgb_array'"),
], ids=str)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(settings, message):
    with pytest.raises(InputError, match=message):
        AtariVectorEnv(**{"game": "pong", "num_envs": 2, "num_threads": 1, **settings})


def test_wrong_actions_seeds_and_masks_are_refused_and_nothing_moves():
    env = AtariVectorEnv("pong", 2, num_threads=1)
    with pytest.raises(InputError, match="call reset"):
        env.step(np.array([0, 0]))
    with pytest.raises(InputError, match="without anything under way"):
        env.recv()
    with pytest.raises(InputError, match="reset_mask needs .* a reset of all environments before it"):
        env.reset(seed=1, options={"reset_mask": np.array([True, False])})
    first, _ = env.reset(seed=1, options={"reset_mask": np.array([True, True])})
    before = env.clone_state()
    assert (env.reset(seed=1)[0] == first).all() and env.clone_state() == before
    for actions, message in [
        ([0, 6], r"action 6 of environment 1 is none of 6: give an index from 0 to 5"), ([-1, 0], "action -1"),
        ([0], r"int64 of shape \(1,\): give integers of shape \(2,\)"), ([[0, 0]], "shape"), ([0.0, 0.0], "float64"),
        ([[0], [0, 0]], "actions are object of shape"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            env.step(actions)
    for states, message in [
        ([None, before[1]], "a state is None: give bytes"), ([before[0]], "1 states for 2"),
        (None, "the states are None: give a list"), (5, "the states are 5"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            env.restore_state(states)
    with pytest.raises(InputError, match=r"ids are \[\[0\], \[0, 1\]\]: give a list"):
        env.clone_state([[0], [0, 1]])
    with pytest.raises(TypeError, match="clone_state.* gives bytes"):
        pickle.dumps(env)
    for seed, message in [
        (-1, "seeds -1 to 0"), (2**31 - 1, "seeds"), ([1], r"shape \(1,\): give one number, or 2"),
        (1.7, "seed is 1.7: give whole numbers"), (2**70, "give whole numbers from 0"),
        (2**64 - 1, "seeds 18446744073709551615 to"), ("a", "seed is 'a'"), ([[1], [2, 3]], r"seed is \[\[1\], \[2, 3"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            env.reset(seed=seed)
    for mask in (np.array([1, 0]), np.array([True]), [True, False], None):
        with pytest.raises(InputError, match="bool array of shape"):
            env.reset(options={"reset_mask": mask})
    assert env.clone_state() == before
    env.send(np.array([0, 0]))
    for refused in (lambda: env.reset(seed=-1), lambda: env.restore_state([b"", b""])):
        with pytest.raises(InputError):
            refused()
    assert len(env.recv()) == 5, "what was under way is still there"
    env.close()
    for call in [
        lambda: env.step(np.array([0, 0])), lambda: env.reset(seed=1), lambda: env.send(np.array([0, 0])), env.recv,
        lambda: env.restore_state(before),
    ]:  # fmt: skip
        with pytest.raises(InputError, match="the environments are closed: make others"):
            call()


def test_a_second_thread_is_refused_while_the_first_one_steps_and_the_step_is_right():
    env, alone = (AtariVectorEnv("pong", 64, num_threads=2, frameskip=40) for _ in range(2))
    for each in (env, alone):
        each.reset(seed=1)
    actions, refused, is_over = np.zeros(64, np.int64), [], threading.Event()

    def disturb():
        calls = [env.ram]  # the others would disturb before the step has begun
        while not is_over.is_set():
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    refused.append(str(error))
                    calls = [env.ram, env.clone_state, lambda: env.reset(seed=2), lambda: env.step(actions)]

    results = env._new_results(env._all_ids, None)
    other = threading.Thread(target=disturb)
    other.start()
    env._call(env._pool.step, results, actions)
    is_over.set()
    other.join()
    assert refused and all("another thread" in text for text in refused)
    np.testing.assert_array_equal(results.observations, alone.step(actions)[0])


def test_a_rom_that_jams_at_its_start_is_told_by_the_reset(monkeypatch):
    monkeypatch.setattr(emulator, "read_rom", lambda game: b"\x02" * 2042 + b"\x00\xf8" * 3)  # JAM
    env = AtariVectorEnv("pong", 2, num_threads=1, unlisted=True)
    with pytest.raises(RuntimeError, match="environment 0 cannot go on: its ROM has an instruction that stops"):
        env.reset(seed=1)
    with pytest.raises(InputError, match="the ROM of pong is another one than ale-py 0.12.1 brings: unlisted=True"):
        AtariVectorEnv("pong", 2, num_threads=1)


def test_a_rom_that_jams_in_play_is_told_by_the_step_and_by_recv(monkeypatch):
    program = programs.Program().start().add(0xA2, 0x80, 0x95, 0, 0xE8, 0xD0, 0xFB)  # clear the RAM
    frame = program.here
    program.new_frame().add(0xE6, 0xA0, 0xA5, 0xA0, 0xC9, 100, 0xD0, 1, 0x02)  # INC A0; JAM in the 100th frame
    rom = program.lines(200).jump(frame).build()
    monkeypatch.setattr(emulator, "read_rom", lambda game: rom)
    settings = {"num_threads": 1, "noop_max": 0, "use_fire_reset": False, "unlisted": True}
    env, actions = AtariVectorEnv("pong", 2, **settings), np.zeros(2, int)
    env.reset(seed=1)  # 68 frames
    for step in range(7):
        env.step(actions)
        if step == 3:
            env.reset(options={"reset_mask": np.array([True, False])})  # so that environment 1 is the first
    message = "environment 1 cannot go on: its ROM has an instruction that stops"
    with pytest.raises(RuntimeError, match=message):
        env.step(actions)
    env.send(actions)
    with pytest.raises(RuntimeError, match=message):
        env.recv()
    env.reset()
    env.step(actions), env.close()


@pytest.mark.parametrize("game", ["breakout", "double_dunk"])
def test_a_start_script_that_never_ends_is_told_by_the_reset(monkeypatch, game):
    """Breakout's reset waits for 0 in RAM B2, and Double Dunk's for the next line of its menu."""
    rom = programs.still_program(len(emulator.read_rom(game)), b"\1" * 128)
    monkeypatch.setattr(emulator, "read_rom", lambda game: rom)
    with pytest.raises(RuntimeError, match="environment 0 cannot go on: its ROM has a start script that never ends"):
        AtariVectorEnv(game, 1, num_threads=1, unlisted=True).reset(seed=1)


@pytest.mark.parametrize(
    "name, value",
    [("num_envs", 0), ("num_threads", 0), ("stack", 0), ("frame_skip", 0), ("sticky", float("nan")), ("actions", [18])],
)
def test_a_pool_refuses_what_it_cannot_do_whoever_makes_it(monkeypatch, name, value):
    made, pool = [], libatari.Pool
    monkeypatch.setattr(libatari, "Pool", lambda *arguments: made.append(arguments) or pool(*arguments))
    AtariVectorEnv("pong", 1, num_threads=1)
    rom, game, num_envs, num_threads, palette, settings = made[-1]
    counts = {"num_envs": num_envs, "num_threads": num_threads}
    with pytest.raises(ValueError, match="an action" if name == "actions" else name):
        if name in counts:
            counts[name] = value
        else:
            settings = {**settings, name: value}
        pool(rom, game, counts["num_envs"], counts["num_threads"], palette, settings)


# -------------------------------------------------------------------------------------------------- --atari_backend


def test_the_backend_is_chosen_by_the_flag_and_said(monkeypatch):
    kinds = {}
    for backend in (None, "auto", "beast", "ale"):
        env = envs.make("ALE/Breakout-v5", 1, atari_backend=backend)
        kinds[backend] = type(env.unwrapped), env.metadata["atari_backend"]
        env.close()
    ours, theirs = (AtariVectorEnv, "beast"), (AleVectorEnv, "ale")
    assert kinds == {None: ours, "auto": ours, "beast": ours, "ale": theirs}
    env = envs.make("ALE/Breakout-v5", 1, resize=256, atari_backend="auto")
    assert env.metadata["atari_backend"] == "ale", "images that are larger than the screen"
    with pytest.raises(InputError, match="atari_backend beast: img_height 256 .*--atari_backend auto takes ale-py"):
        envs.make("ALE/Breakout-v5", 1, resize=256, atari_backend="beast")
    for backend in ("ale", "beast"):
        wrong = {"episodic_life": "no", "render_mode": "human", "batch_size": 4, "game": "pong", "num_envs": 2}
        for name, value in wrong.items():
            with pytest.raises(InputError, match=f"{name} is {value!r}"):
                envs.make("BreakoutNoFrameskip-v4", 4, atari_backend=backend, env_kwargs={name: value})
        for name in ("mode", "difficulty"):
            with pytest.raises(InputError, match=f"{name}: Atari games are played in their default {name}"):
                envs.make("ALE/Breakout-v5", 1, atari_backend=backend, env_kwargs={name: 1})
    with pytest.raises(InputError, match="atari_backend is 'stella'"):
        envs.make("ALE/Breakout-v5", 1, atari_backend="stella")
    with pytest.raises(InputError, match="atari_backend is for Atari ids"):
        envs.make("CartPole-v1", 1, atari_backend="beast")
    monkeypatch.setattr(emulator, "EXACT_GAMES", frozenset())
    assert envs.make("ALE/Breakout-v5", 1, atari_backend="auto").metadata["atari_backend"] == "ale"
    with pytest.raises(InputError, match="--atari_backend beast: breakout is not on the list of games"):
        envs.make("ALE/Breakout-v5", 1, atari_backend="beast")


@pytest.mark.parametrize("backend", ["beast", "ale"])
def test_a_step_before_the_reset_is_refused_where_lives_are_episodes(backend):
    env = envs.make("BreakoutNoFrameskip-v4", 2, atari_backend=backend)
    with pytest.raises(InputError, match=r"call reset\(\) first"):
        env.step(np.array([0, 0]))
    env.close()


def test_a_directory_for_temporary_files_that_is_missing_is_named(monkeypatch):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(InputError, match="No usable temporary directory found.*: set TMPDIR"):
        emulator.read_palette.__wrapped__()


def test_an_argument_that_only_ale_py_has_is_refused_by_beast_and_auto_takes_ale_py():
    env = envs.make("ALE/Breakout-v5", 3, atari_backend="auto", thread_affinity_offset=0)
    assert env.metadata["atari_backend"] == "ale"
    env.close()
    with pytest.raises(InputError, match="beast: thread_affinity_offset .*--atari_backend auto takes ale-py"):
        envs.make("ALE/Breakout-v5", 3, atari_backend="beast", thread_affinity_offset=0)


def test_the_list_has_the_57_games_of_the_benchmark_and_all_others_but_three_whose_frames_may_end_in_a_later_call():
    assert len(ATARI_57) == 57 and len(emulator.EXACT_GAMES) == 100
    assert set(ATARI_57) <= emulator.EXACT_GAMES
    have_rules = {name for name, game in emulator.known_games().items() if game["has_rules"]}
    assert have_rules - emulator.EXACT_GAMES == {"tic_tac_toe_3d", "video_checkers", "video_chess"}
    assert {game: why for game in emulator.EXACT_GAMES if (why := emulator.why_not(game))} == {}


def test_another_rom_of_the_same_name_runs_on_ale_py(monkeypatch):
    monkeypatch.setattr(emulator, "read_rom", lambda game: b"\0" * 4096)
    assert "another one than ale-py 0.12.1 brings" in emulator.why_not("breakout")


def test_without_the_module_games_run_on_ale_py(monkeypatch):
    monkeypatch.setattr(emulator, "libatari", None)
    monkeypatch.setattr(emulator, "WHY_NO_MODULE", "it is not built: make libbeast", raising=False)
    assert envs.make("ALE/Breakout-v5", 1, atari_backend="auto").metadata["atari_backend"] == "ale"
    with pytest.raises(emulator.MissingPackage, match="--atari_backend beast: .*make libbeast"):
        envs.make("ALE/Breakout-v5", 1, atari_backend="beast")


def test_a_training_on_either_emulator_has_the_same_episodes_and_ends_with_the_same_weights(tmp_path):
    states = {}
    for backend in ("beast", "ale"):
        place = {"root": str(tmp_path), "name": backend, "tensorboard": False, "amp": "off"}
        size = {"group_width": 4, "batch_width": 4, "hidden_size": 16, "core_size": 16, "total_steps": 700}
        size["env_kwargs"] = '{"max_num_frames_per_episode": 240}'
        monobeast.train(small_flags(env="BreakoutNoFrameskip-v4", atari_backend=backend, **size, **place))
        states[backend] = checkpoint.load(tmp_path / backend / "checkpoint.pt")
        emulator = {"beast": "Beast's", "ale": "ale-py's"}[backend]
        assert (
            f"{backend}: BreakoutNoFrameskip-v4 on {emulator} emulator, "
            in (tmp_path / backend / "out.log").read_text()
        )
    assert states["beast"]["config"]["atari_backend"] == "beast" and states["ale"]["config"]["atari_backend"] == "ale"
    assert len(states["beast"]["returns"]) > 4
    for name in ("returns", "lengths"):
        assert states["beast"][name] == states["ale"][name]
    for name, weights in states["beast"]["net"].items():
        assert torch.equal(weights, states["ale"]["net"][name]), name

    place["name"], size["total_steps"] = "beast", 750
    monobeast.train(small_flags(env="BreakoutNoFrameskip-v4", atari_backend="ale", **size, **place))
    resumed = checkpoint.load(tmp_path / "beast" / "checkpoint.pt")
    assert resumed["config"]["atari_backend"] == "ale" and resumed["counts"]["steps"] >= 750
    log = (tmp_path / "beast" / "out.log").read_text()
    assert re.findall("Breakout.* on (.*) emulator", log) == ["Beast's", "ale-py's"]


def test_the_code_of_the_page_on_environments_runs():
    page = (ROOT / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [block for block in blocks if "AtariVectorEnv" in block]  # HeavyPole: test_env_metrics.py
    names: dict = {}
    exec(block, names)
    assert names["observations"].any() and len(names["states"]) == 64


def test_actions_have_the_names_and_numbers_that_ale_py_gives_them():
    assert {action.name: int(action) for action in emulator.Action} == {
        action.name: int(action.value) for action in ale_py.Action.__members__.values()
    }
    env, theirs = AtariVectorEnv("beam_rider", 1, num_threads=1), AleVectorEnv("beam_rider", 1, num_threads=1)
    assert [int(action) for action in env.get_action_set()] == [int(a.value) for a in theirs.ale.get_action_set()]
    env.close(), theirs.close()


def test_cpu_seconds_are_not_spent_waiting():
    """A pool whose threads spin would take the cores from the learner."""
    env = AtariVectorEnv("pong", 2, num_threads=2)
    env.reset(seed=1)
    before, begin = time.process_time(), time.monotonic()
    time.sleep(0.3)
    assert time.process_time() - before < 0.5 * (time.monotonic() - begin)
    env.close()
