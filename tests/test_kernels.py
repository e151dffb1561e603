"""The GPU's Atari emulator (beast/gpu/atari.py, csrc/atari/batch.h), run on a CPU: it equals the pool to the bit."""

from __future__ import annotations

import re
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import monobeast
import r2d2
from beast import envs
from beast.envs.emulator import AtariVectorEnv, known_games
from beast.errors import InputError, MissingPackage
from beast.gpu import kernels
from beast.gpu.atari import INEXACT_STARTS, AtariTensorEnv, HostKernels, options

pytest.importorskip("libatari")

V4 = {"noop_max": 30}
V5 = {"noop_max": 0, "use_fire_reset": False, "repeat_action_probability": 0.25, "reward_clipping": False}
SAME_STEP = {"autoreset_mode": "SameStep"}
SMALL = {"img_height": 42, "img_width": 40}
PAGE = Path(__file__).resolve().parents[1] / "docs/gpu.md"
LAST_ACTION, FRAME_NUMBER = -4, -12  # their places in a Vcs
CASES: list[tuple[str, int, dict[str, Any]]] = [  # game, lanes, arguments
    (
        "pong",
        8,
        {"use_fire_reset": False, "repeat_action_probability": 0.25, **SAME_STEP, "max_num_frames_per_episode": 300},
    ),
    ("breakout", 4, {"episodic_life": True, **SAME_STEP}),
    ("seaquest", 32, V5),
    ("qbert", 16, {"life_loss_info": True, **SAME_STEP}),
    ("journey_escape", 4, {"max_num_frames_per_episode": 203, "reward_clipping": False, **SAME_STEP}),
    ("montezuma_revenge", 8, {**V5, "max_num_frames_per_episode": 60, "frameskip": 3, **SAME_STEP}),
    (
        "ms_pacman",
        4,
        {"max_num_frames_per_episode": 90, "img_height": 105, "img_width": 80, "episodic_life": True},
    ),
    (
        "space_invaders",
        16,
        {
            "maxpool": False, "frameskip": 1, "max_num_frames_per_episode": 70, "stack_num": 1, "img_height": 70,
            "img_width": 160,
        },
    ),
]  # fmt: skip


def make(game: str, count: int, lanes: int = 4, is_reversed: bool = False, **arguments) -> AtariTensorEnv:
    env = AtariTensorEnv(game, count, **{"device": "cpu", "lanes": lanes, **arguments})
    if is_reversed:
        env._kernels = HostKernels(env._host, reversed=True)
    return env


def make_both(game: str, count: int, lanes: int = 4, is_reversed: bool = False, device: str = "cpu", **arguments):
    pool = AtariVectorEnv(game, count, num_threads=1, **arguments)
    return make(game, count, lanes, is_reversed, device=device, **arguments), pool


def assert_equal(found: tuple, expected: tuple, when: str) -> None:
    """Results of a reset or step, infos last."""
    (*tensors, info), (*arrays, expected_info) = found, expected
    for x, y in zip(tensors, arrays):
        np.testing.assert_array_equal(x.cpu().numpy(), y, err_msg=when)
    for name in ("lives", "frame_number", "episode_frame_number"):
        np.testing.assert_array_equal(info[name].cpu().numpy(), expected_info[name], err_msg=f"{name}, {when}")
    if len(arrays) == 4 and "final_obs" in expected_info:
        is_final = arrays[2] | arrays[3]
        np.testing.assert_array_equal(info["_final_obs"].cpu().numpy(), is_final)
        np.testing.assert_array_equal(info["final_obs"].cpu().numpy()[is_final], expected_info["final_obs"][is_final])


def states(env) -> np.ndarray:
    """Each console's Vcs."""
    if isinstance(env, AtariTensorEnv):
        return env._arrays["vcs"].view(env.num_envs, -1).cpu().numpy()
    size = dict((name, size) for name, size, _ in make("pong", 1)._host.arrays())["vcs"]
    return np.stack([np.frombuffer(state[24 : 24 + size], np.uint8) for state in env.clone_state()])  # behind a header


def compare(game: str, lanes: int, steps: int, count: int = 5, **how):
    """Play random steps in both; returns those of the GPU and the number of episodes that ended."""
    env, pool = make_both(game, count, lanes, **how)
    random, ends = np.random.default_rng(1), 0
    assert_equal(env.reset(seed=17), pool.reset(seed=17), "reset")
    for step in range(steps):
        actions = random.integers(0, env.single_action_space.n, count)
        expected = pool.step(actions)
        assert_equal(env.step(torch.from_numpy(actions).to(env.device)), expected, f"step {step}")
        ends += int((expected[2] | expected[3]).sum())
        if step % 50 == 49:
            np.testing.assert_array_equal(states(env), states(pool), err_msg=f"states at step {step}")
    return env, ends


@pytest.mark.parametrize("game, lanes, arguments", CASES, ids=[game for game, _, _ in CASES])
def test_kernels_play_what_the_pool_plays(game, lanes, arguments):
    size = {} if game in ("pong", "qbert") else SMALL  # most of the time goes to pixels
    _, ends = compare(game, lanes, steps=200, **{"max_num_frames_per_episode": 250, **size, **arguments})
    assert ends > 4, "the table of starts is compared, too"


@pytest.mark.on_demand  # minutes
@pytest.mark.parametrize("game, lanes, arguments", CASES, ids=[game for game, _, _ in CASES])
def test_kernels_play_what_the_pool_plays_for_20000_frames(game, lanes, arguments):
    _, ends = compare(game, lanes, steps=20_000 // arguments.get("frameskip", 4), count=3, **arguments)
    assert ends > 3


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_lanes_of_a_warp_and_the_order_of_threads_change_nothing(lanes, is_reversed):
    arguments = {"max_num_frames_per_episode": 66, **SAME_STEP, "frameskip": 3, **SMALL}
    _, ends = compare("breakout", lanes, steps=60, count=11, is_reversed=is_reversed, **arguments)
    assert ends > 20


def test_steps_whose_frames_end_early_are_drawn_again_with_the_same_draws(monkeypatch):
    drawn_again = []
    run = HostKernels.run

    def watched(self, name: str) -> None:
        if name == "emulate_again":
            drawn_again.append(int(env._array("num_again", torch.int32)))
        run(self, name)

    monkeypatch.setattr(HostKernels, "run", watched)
    for game, arguments, least in (("journey_escape", {"maxpool": False}, 250), ("pong", {}, 0)):
        env, pool = make_both(game, 5, **{**V5, **SMALL, **arguments})
        drawn_again.clear()
        assert_equal(env.reset(seed=17), pool.reset(seed=17), "reset")
        for step in range(60):
            actions = np.full(5, step % 3)
            assert_equal(env.step(torch.from_numpy(actions)), pool.step(actions), f"step {step}")
        assert sum(drawn_again) >= least and bool(sum(drawn_again)) == bool(least)


def test_a_frame_that_ends_early_in_play_shows_rows_of_the_frame_before_the_last():
    """In Alien some have 21 lines less than the screen, here in step 119 of the second console."""
    env, pool = make_both("alien", 2, noop_max=30, use_fire_reset=True)
    env.reset(seed=1), pool.reset(seed=1)
    for step, actions in enumerate(np.random.default_rng(0).integers(0, 18, (61, 8)).repeat(2, axis=0)[:, :2]):
        assert_equal(env.step(torch.from_numpy(actions)), pool.step(actions), f"step {step}")


@pytest.mark.parametrize("frameskip", [1, 2, 4])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_an_episode_that_a_step_begins_and_ends_shows_the_image_of_its_start(frameskip, mode, frames):
    arguments = {"frameskip": frameskip, "max_num_frames_per_episode": frames, "autoreset_mode": mode, "noop_max": 3}
    _, ends = compare("pong", 8, steps=24, count=3, **arguments, **SMALL)
    length = -(-frames // frameskip)
    assert ends == 3 * (24 // length if mode == "SameStep" else 25 // (length + 1))


def test_a_reset_without_a_seed_goes_on_with_all_generators():
    env, pool = make_both("seaquest", 3, **SMALL)
    for seed in (0, None, None, [9, 4, 7], None):
        assert_equal(env.reset(seed=seed), pool.reset(seed=seed), f"reset with seed {seed}")
        assert_equal(env.step(torch.zeros(3, dtype=torch.int64)), pool.step(np.zeros(3, np.int64)), "step")
        np.testing.assert_array_equal(states(env), states(pool))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("frames", [None, 8, 3])
def test_a_reset_of_some_leaves_the_others_as_they_are(seed, frames):
    arguments = {"max_num_frames_per_episode": frames, "frameskip": 3, **SAME_STEP} if frames else {}
    env, pool = make_both("pong", 6, **V4 | SMALL | arguments)
    random = np.random.default_rng(3)
    assert_equal(env.reset(seed=17), pool.reset(seed=17), "reset")
    for step in range(60):
        actions = random.integers(0, 6, 6)
        assert_equal(env.step(torch.from_numpy(actions)), pool.step(actions), f"step {step}")
        if step % 4 == 3:
            mask = random.random(6) < 0.4
            given = {"seed": seed, "options": {"reset_mask": mask}}
            expected = pool.reset(**given)
            assert_equal(env.reset(**{**given, "options": {"reset_mask": torch.from_numpy(mask)}}), expected, "some")
    np.testing.assert_array_equal(states(env), states(pool))


def test_arrays_that_are_not_aligned_are_refused():
    host = make("pong", 1)._host
    with pytest.raises(ValueError, match="the array rom is not aligned"):
        host.place([256 * 10**6 + 128] * len(host.arrays()))


def test_draws_of_a_reset_are_skipped_where_actions_are_sticky():
    _, ends = compare("berzerk", 8, steps=80, **{**V5, "max_num_frames_per_episode": 100, **SAME_STEP, **SMALL})
    assert ends > 10


def test_small_generators_play_as_the_large_ones_without_sticky_actions():
    env, _ = compare("qbert", 8, steps=150, episodic_life=True, **SMALL)
    assert not env.is_exact, "nothing is drawn"


@pytest.mark.parametrize("sticky", [0, 0.25])
@pytest.mark.parametrize("exact", [False, True])
def test_actions_are_repeated_as_often_as_they_should(sticky, exact):
    arguments = V5 | {"frameskip": 1, "repeat_action_probability": sticky, "img_height": 9, "img_width": 9}
    env = make("pong", 64, 32, exact=exact, **arguments)
    assert env.is_exact == (exact and sticky > 0)
    env.reset(seed=0)
    repeated = []
    for step in range(100):
        env.step(torch.full((64,), step % 2))
        repeated.append(states(env)[:, LAST_ACTION] != env.get_action_set()[step % 2])
    # Where the step before was repeated, its action is the one that is wanted now.
    assert np.mean(repeated) == pytest.approx(sticky / (1 + sticky), abs=0.02)


def test_the_second_reset_comes_again_after_all_others():
    env = make("seaquest", 1, noop_max=1, img_height=9, img_width=9)
    env.reset(seed=0)
    seen = []
    for _ in range(env._shared.host.num_resets):
        env.reset()
        seen.append(states(env)[0, :FRAME_NUMBER].tobytes())
    assert len({*seen}) > 5 and seen[-1] == seen[0]


def test_an_action_that_there_is_not_is_told_and_does_nothing():
    envs_of = [make("pong", 2) for _ in range(2)]
    for env, second in zip(envs_of, (0, 6)):
        env.reset(seed=0)
        if second:
            with pytest.raises(
                RuntimeError,
                match="environment 1 of pong on cpu cannot go on: it was given an action that is none of 0 to 5",
            ):
                env.step(torch.tensor([1, second]))
        else:
            env.step(torch.tensor([1, second]))
    np.testing.assert_array_equal(states(envs_of[0]), states(envs_of[1]))
    assert torch.equal(envs_of[0]._observations, envs_of[1]._observations)


def test_an_invalid_action_is_told_until_a_reset():
    env = make("pong", 3)
    env.reset(seed=0)
    for actions in ([0, -1, 0], [0, 0, 0]):
        with pytest.raises(RuntimeError, match="environment 1 of pong"):
            env.step(torch.tensor(actions))
    mask = torch.tensor([False, True, False])
    env.reset(options={"reset_mask": mask})
    env.step(torch.tensor([0, 0, 0]))


def test_an_invalid_action_is_told_where_the_episode_ends_with_it():
    env = make("pong", 1, max_num_frames_per_episode=4, **SAME_STEP)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="was given an action"):
        env.step(torch.tensor([6]))
    assert env._array("truncated", torch.bool).all()


@pytest.mark.parametrize(
    "game, arguments, message",
    [
        ("air_raid", {}, "gray images of NTSC"),
        ("pong", {"grayscale": False}, "gray images of NTSC"),
        ("pong", {"noop_max": 300}, "up to 255 no-ops"),
        ("double_dunk", {"repeat_action_probability": 0.25}, "depends on the seed"),
    ],  # fmt: skip
)
def test_what_a_gpu_cannot_do_is_refused_with_the_remedy(game, arguments, message):
    with pytest.raises(InputError, match=f"{message}.*--atari_backend beast"):
        make(game, 1, **arguments)


@pytest.mark.parametrize(
    "num_envs, arguments, message",
    [
        (0, {}, "num_envs is 0"), (True, {}, "num_envs is True"), (1, {"lanes": 5}, "lanes is 5"),
        (1, {"render_mode": "rgb_array"}, "render_mode"), (1, {"frameskip": 0}, "frameskip is 0"),
        (1, {"gpu": 1}, "takes no 'gpu'"), (1, {"device": "gpu"}, "device gpu: it is cuda or cpu"),
        (1, {"device": "mps"}, "device mps"), (1, {"device": "cuda:31"}, "device cuda:31"),
    ],
)  # fmt: skip
def test_arguments_that_there_are_not_are_refused(num_envs, arguments, message):
    with pytest.raises(InputError, match=message):
        AtariTensorEnv("pong", num_envs, **{"device": "cpu", **arguments})


@pytest.mark.parametrize(
    "given, message",
    [
        ({"seed": [1, 2]}, "give one number, or 3"), ({"seed": 0.5}, "whole numbers"), ({"seed": -1}, "seeds -1"),
        ({"options": {"reset_mask": [True, False, True]}}, "reset_mask"),
        ({"options": {"reset_mask": np.ones(2, bool)}}, "reset_mask"),
    ],
)  # fmt: skip
def test_resets_that_there_are_not_are_refused(given, message):
    env = make("pong", 3)
    with pytest.raises(InputError, match=message):
        env.reset(**given)
    with pytest.raises(InputError, match="call reset"):
        env.step(torch.zeros(3, dtype=torch.int64))
    env.reset(seed=0)
    with pytest.raises(InputError, match=r"actions are torch.int64 \[2\]: give a tensor of 3 whole numbers"):
        env.step(torch.zeros(2, dtype=torch.int64))
    for actions in (torch.zeros(3), np.zeros(3, int), [0, 0, 0]):
        with pytest.raises(InputError, match="actions are .*: give a tensor of 3 whole numbers"):
            env.step(actions)
    env.close()
    with pytest.raises(InputError, match="call reset"):
        env.step(torch.zeros(3, dtype=torch.int64))


def test_environments_of_a_game_share_its_starts_and_leave_no_memory_behind():
    first, second = make("pong", 2), make("pong", 3, frameskip=4)
    other = make("pong", 2, frameskip=2)
    assert first._arrays["start_images"] is second._arrays["start_images"] is not other._arrays["start_images"]
    assert second.bytes_per_env < 200_000 < first._arrays["start_images"].numel()
    gone = weakref.ref(first), weakref.ref(first._shared)
    del first
    assert gone[0]() is None and gone[1]() is second._shared
    del second
    assert gone[1]() is None


def test_who_plays_a_game_whose_starts_differ_is_told():
    with pytest.warns(UserWarning, match="crossbow: its later episodes begin otherwise than on a CPU"):
        make("crossbow", 1)


@pytest.mark.parametrize("name", ["device", "exact", "lanes"])
def test_what_a_gpu_takes_is_refused_elsewhere_and_left_out_where_a_test_may_play_on_a_core(name):
    with pytest.raises(InputError, match=f"{name} is for --atari_backend cuda"):
        envs.make("PongNoFrameskip-v4", 1, atari_backend="beast", env_kwargs={name: 4})
    envs.make("PongNoFrameskip-v4", 1, atari_backend="auto", env_kwargs={name: 4})


@pytest.mark.parametrize(
    "mask", [[True, False, False], np.array([True, False, False]), torch.tensor([True, False, False])]
)
def test_a_mask_of_any_kind_begins_lives_anew(mask):
    env = envs.make("BreakoutNoFrameskip-v4", 3, atari_backend="cuda", env_kwargs={"device": "cpu"})
    env.reset(seed=1)
    env._life_over = torch.tensor([True, True, False])
    env.reset(options={"reset_mask": mask})
    assert env._life_over.tolist() == [False, True, False]


def starts_differ(game: str, steps: int = 160) -> bool:
    """Whether resets after some random play lead to another state in the pool than in the table."""
    env, pool = make_both(game, 4, **SMALL, **V4)
    random = np.random.default_rng(2)
    env.reset(seed=3), pool.reset(seed=3)
    for _ in range(6):
        for _ in range(steps // 6):
            actions = random.integers(0, env.single_action_space.n, 4)
            env.step(torch.from_numpy(actions)), pool.step(actions)
        found, expected = env.reset(), pool.reset()
        if (states(env) != states(pool)).any() or (found[0].numpy() != expected[0]).any():
            return True
    return False


@pytest.mark.parametrize("game", ["pong", "crossbow", "ice_hockey", "seaquest"])
def test_the_list_of_inexact_starts_is_right(game):
    assert starts_differ(game) == (game in INEXACT_STARTS)


def games_of_a_gpu() -> list[str]:
    return [
        name for name, game in known_games().items() if game["has_rules"] and game["is_exact"] and not game["is_pal"]
    ]


@pytest.mark.on_demand  # minutes
@pytest.mark.parametrize("game", games_of_a_gpu())
def test_the_list_of_inexact_starts_is_right_for_all_games(game):
    assert starts_differ(game, 600) == (game in INEXACT_STARTS)


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "ALE/Pong-v5"])
def test_the_protocol_of_an_id_is_that_of_the_host(env_id):
    given = {"resize": 42, "env_kwargs": {"max_num_frames_per_episode": 400}}
    on_cpu = envs.make(env_id, 4, atari_backend="beast", **given)
    given["env_kwargs"] |= {"device": "cpu"}
    env = envs.make(env_id, 4, atari_backend="cuda", **given)
    assert env.metadata["atari_backend"] == "cuda" and env.metadata["frames_per_step"] == 4
    random = np.random.default_rng(4)
    assert_equal(env.reset(seed=1), on_cpu.reset(seed=1), "reset")
    lost = 0
    for step in range(250):
        actions = random.integers(0, env.single_action_space.n, 4)
        *found, info = env.step(torch.from_numpy(actions))
        acted = actions.copy()
        *expected, expected_info = on_cpu.step(actions)
        np.testing.assert_array_equal(actions, acted, "they are the caller's")
        assert_equal((*found, info), (*expected, expected_info), f"step {step}")
        if "life_over" in expected_info:
            np.testing.assert_array_equal(info["life_over"].numpy(), expected_info["life_over"])
            lost += int(expected_info["life_over"].sum())
    assert bool(lost) == env_id.startswith("Breakout")


def test_several_games_are_the_columns_that_they_are_on_the_host():
    ids, given = "PongNoFrameskip-v4,BreakoutNoFrameskip-v4,QbertNoFrameskip-v4", {"resize": 42}
    on_cpu = envs.make(ids, 6, atari_backend="beast", **given)
    env = envs.make(ids, 6, atari_backend="cuda", env_kwargs={"device": "cpu"}, **given)
    assert env.task_numbers.tolist() == [0, 1, 2] * 2 and env.metadata == on_cpu.metadata | {"atari_backend": "cuda"}
    random = np.random.default_rng(5)
    assert_equal(env.reset(seed=1), on_cpu.reset(seed=1), "reset")
    for step in range(60):
        actions = random.integers(0, 18, 6)
        *found, info = env.step(torch.from_numpy(actions))
        *expected, expected_info = on_cpu.step(actions)
        assert_equal((*found, info), (*expected, expected_info), f"step {step}")
        np.testing.assert_array_equal(info["life_over"].numpy(), expected_info["life_over"])
    env.check()
    env.envs[1].unwrapped._array("errors", torch.int32)[1] = 3
    with pytest.raises(RuntimeError, match="environment 1 of breakout"):
        env.check()


def test_the_code_of_the_page_on_gpus_plays():
    assert PAGE.name == "gpu.md"
    (code,) = re.findall(r"```python\n(import torch\nfrom beast.gpu.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["observations"].shape == (8, 4, 84, 84) and names["infos"]["frame_number"].min() > 0


def test_the_page_names_the_games_whose_starts_differ():
    (names,) = re.findall(r"In twelve games some RAM outlives a reset: (.*?)\. There", PAGE.read_text(), re.DOTALL)
    named = re.split(r", | and ", names.replace("\n", " "))
    assert {re.sub("[-' ]+", "_", name).lower() for name in named} == INEXACT_STARTS


def test_each_game_is_compiled_for_its_cartridge_and_rounds_each_product():
    assert options("pong", False) == ["-DWIRING=kFlat", "-DGENERATOR=SplitMix64", "--fmad=false"]
    assert options("asteroids", True) == ["-DWIRING=kBanked", "-DGENERATOR=Mt19937", "--fmad=false"]
    assert options("tutankham", True)[0] == "-DWIRING=kSliced"


def test_ram_is_that_of_the_consoles():
    env, pool = make_both("pong", 3, **SMALL)
    env.reset(seed=4), pool.reset(seed=4)
    np.testing.assert_array_equal(env.ram().numpy(), pool.ram())


def needs_nvrtc() -> None:
    try:
        kernels._package("nvrtc")
    except MissingPackage as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "architecture, game, is_exact",
    [
        pytest.param("sm_90", "pong", False, marks=pytest.mark.long),  # 15 s
        *(
            pytest.param(*case, marks=pytest.mark.on_demand)
            for case in (("sm_80", "pong", False), ("sm_90", "seaquest", True), ("sm_90", "tutankham", False))
        ),
    ],
)
def test_the_kernels_compile_for_a_gpu_and_spill_no_registers(architecture, game, is_exact, tmp_path, monkeypatch):
    needs_nvrtc()
    monkeypatch.setattr(kernels, "CACHE", tmp_path)
    code, told = kernels.compiled(kernels.SOURCES / "batch.cu", options(game, is_exact), architecture)
    print(told[:800])
    entry = r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers"
    found = {name: (int(stack), int(registers)) for name, stack, registers in re.findall(entry, told, re.S)}
    assert found.keys() == {"begin", "describe", "emulate", "observe"} and code[:4] == b"\x7fELF"
    assert found["emulate"][0] < 2100 and found["emulate"][1] <= 255
    assert set(re.findall(r"(\d+) bytes spill", told)) == {"0"}
    monkeypatch.setattr(kernels, "_compile", None)  # the second time it is in the cache
    assert kernels.compiled(kernels.SOURCES / "batch.cu", options(game, is_exact), architecture) == (code, told)


def test_a_kernel_that_does_not_compile_is_refused_with_the_compilers_words(tmp_path, monkeypatch):
    needs_nvrtc()
    monkeypatch.setattr(kernels, "CACHE", tmp_path / "cache")
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void f() { g(); }')
    with pytest.raises(kernels.BuildError, match='bad.cu .NVRTC_ERROR_COMPILATION.*identifier "g" is undefined'):
        kernels.compiled(tmp_path / "bad.cu", [], "sm_90")


def test_the_cache_knows_headers_options_and_architectures_apart(tmp_path, monkeypatch):
    needs_nvrtc()
    monkeypatch.setattr(kernels, "CACHE", tmp_path / "cache")
    (tmp_path / "good.cu").write_text('#include "n.h"\nextern "C" __global__ void f(int* x) { *x = N; }')
    header, seen = tmp_path / "n.h", set()
    for n, given, architecture in ((1, [], "sm_80"), (2, [], "sm_80"), (2, ["-DM=1"], "sm_80"), (2, [], "sm_90")):
        header.write_text(f"#define N {n}\n")
        kernels.compiled(tmp_path / "good.cu", given, architecture)
        seen.add(len([*(tmp_path / "cache").glob("*.cubin")]))
    assert seen == {1, 2, 3, 4}
    monkeypatch.setattr(kernels, "_compile", None)
    assert kernels.compiled(tmp_path / "good.cu", [], "sm_90")[0][:4] == b"\x7fELF", "it is in the cache"


def train(tmp_path, **changes) -> dict:
    flags = monobeast.Flags(
        num_actors=1, group_width=4, batch_width=4, unroll_length=10, resize=42, hidden_size=32, total_steps=1500,
        device="cpu", deterministic=True, tensorboard=False, root=str(tmp_path), log_steps=500,
    )  # fmt: skip
    return torch.load(monobeast.train(replace(flags, **changes)).directory / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("env", ["BreakoutNoFrameskip-v4", "ALE/Pong-v5,ALE/Breakout-v5"])
def test_the_same_is_learned_from_the_gpus_games_as_from_the_hosts_to_the_bit(tmp_path, monkeypatch, env):
    expected = train(tmp_path, env=env, name="host", atari_backend="beast")
    state = train(tmp_path, env=env, name="gpu", atari_backend="cuda", env_kwargs='{"device": "cpu"}')
    counts, others = ({**each["counts"], "seconds": 0} for each in (state, expected))
    assert (
        counts == others
        and counts["steps"] >= 1500
        and "on the GPU's emulator" in (tmp_path / "gpu/out.log").read_text()
    )
    assert state["net"].keys() == expected["net"].keys()
    assert all(torch.equal(x, expected["net"][name]) for name, x in state["net"].items())
    # A test plays on the host, with what the run was given.
    arguments = ["--mode", "test", "--root", str(tmp_path), "--name", "gpu", "--episodes", "1"]
    monkeypatch.setattr(sys, "argv", ["monobeast.py", *arguments, "--max_game_steps", "300"])
    monobeast.main()
    assert (tmp_path / "gpu/test.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_games_on_a_gpu_are_refused_where_there_is_none():
    with pytest.raises(InputError, match="finds 0 GPUs: or give --atari_backend beast"):
        AtariTensorEnv("pong", 4)
    with pytest.raises(InputError, match="--atari_backend cuda needs a GPU, and --device cpu is the CPU"):
        monobeast.train(monobeast.Flags(env="PongNoFrameskip-v4", atari_backend="cuda", device="cpu"))


def test_env_servers_have_no_games_on_a_gpu():
    with pytest.raises(InputError, match="--atari_backend cuda: env servers step games on cores"):
        r2d2.validate(r2d2.Flags(env="PongNoFrameskip-v4", feed="remote", atari_backend="cuda"))
