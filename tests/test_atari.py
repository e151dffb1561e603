"""libatari against ale-py, and the rules of the machine that are easiest to break."""

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

libatari = pytest.importorskip("libatari", reason="needs a C++ compiler: python setup.py build_ext --inplace")
ale_py = pytest.importorskip("ale_py")

from ale_py import roms  # noqa: E402
from atari import programs  # noqa: E402
from atari.lockstep import GAMES, Rules, compare, compare_rules, load_ale, lockstep, rams_of_play, rom_bytes  # noqa: E402

from beast.envs.emulator import EXACT_GAMES  # noqa: E402
from benchmarks.atari_exact import exact_games  # noqa: E402

FAST = ["pong", "breakout", "seaquest", "qbert", "space_invaders", "beam_rider", "asteroids", "robotank"]
FAST += ["road_runner", "montezuma_revenge"]  # 2K, 4K, F8, FE, F6 and E0; paddles; other windows; game over
FAST += ["double_dunk", "elevator_action", "journey_escape"]  # a menu; RAM in the cartridge; a missile that shakes
FAST += ["air_raid"]  # PAL: no colors while the frames have an odd number of lines
FAST += ["backgammon", "pacman"]  # a paddle that was charged before the frame; a script that waits for two bytes
FAST += ["klax"]  # F6SC; rules that read the RAM in the cartridge
WITH_RULES = sorted(name for name, game in GAMES.items() if game["has_rules"])


@pytest.mark.parametrize("game", FAST)
def test_a_game_equals_ale_frame_by_frame(game):
    assert lockstep(game, 1000) == (1000, None)


@pytest.mark.long
@pytest.mark.parametrize("game", WITH_RULES)
def test_the_first_frames_of_every_game_with_rules_equal_those_of_ale(game):
    assert lockstep(game, 200, seed=5) == (200, None)


@pytest.mark.parametrize("game", ["pong", "yars_revenge"])
def test_sticky_actions_repeat_where_ale_repeats_them_with_the_same_seed(game):
    assert lockstep(game, 400, seed=7, sticky=0.25, hold=2) == (400, None)


def test_a_reset_that_acts_repeats_actions_where_that_of_ale_does():
    """Double Dunk's reset walks a menu with actions that may stick."""
    ale = load_ale(roms.get_rom_path("double_dunk"), 3, 0.25)
    console = libatari.Console(rom_bytes("double_dunk"), "double_dunk", 3, 0.25)
    draw, frames = random.Random(3), set()
    for number in range(12):
        assert compare(ale, console) is None, f"after reset {number}"
        frames.add(console.episode_frame_number)
        for _ in range(draw.randrange(1, 12)):
            action = draw.randrange(18)
            ale.act(ale_py.Action(action))
            console.act(action)
        ale.reset_game()
        console.reset_game()
    assert len(frames) > 3


@pytest.mark.on_demand
@pytest.mark.parametrize("game", WITH_RULES)
def test_a_long_random_game_equals_ale(game):
    assert lockstep(game, 5000, seed=3, minimal=True) == (5000, None)


def test_the_frame_that_ends_a_game_of_qbert_gives_no_reward():
    console = libatari.Console(rom_bytes("qbert"), "qbert", 1)
    for frame in range(400):
        console.act(frame // 20 % 6)
    console.set_ram(0x88, 0xFE)
    console.set_ram(0xDA, 0x50)
    assert (console.act(0), console.game_over) == (0, True)


@pytest.mark.parametrize("bits, reward", [(0x00, 10), (0x80, 0)])
def test_casino_repeats_the_last_frames_reward_while_it_shows_the_end_of_a_round(bits, reward):
    console = libatari.Console(rom_bytes("casino"), "casino", 1)
    for frame in range(600):
        console.act(frame // 20 % 3)
    console.set_ram(0xD3, int(console.ram()[0x53]) & 0x7F | bits)
    console.set_ram(0x95, 0x50)  # from 40
    assert (console.act(0), console.game_over) == (reward, bool(bits))


BACKGAMMON_START = [0, 2, 0, 0, 0, 0, -5, 0, 0, -3, 0, 0, 0, 5, 0, -2, 0, 0, 0, 0, 5, 0, 0, 3, 0, 0, 0, -5]


def backgammon_board(side: int, home: int, count: int) -> dict[int, int]:
    """`side` has `count` checkers, all in RAM[home]; the other side's are where a game starts."""
    board = {0x80 + i: (0 if n * side > 0 else n) & 0xFF for i, n in enumerate(BACKGAMMON_START)}
    return board | {home: side * count & 0xFF}


@pytest.mark.parametrize(
    "game, ram, reward, over",
    [
        ("adventure", {0xE0: 2}, 0, True),  # keeps its life
        ("backgammon", backgammon_board(-1, 0x80, 15), 1, True),
        ("backgammon", backgammon_board(1, 0x8E, 15), -1, True),
        ("backgammon", backgammon_board(1, 0x8E, 14), 0, False),
        ("backgammon", backgammon_board(-1, 0x80, 15) | {0x82: 1}, 0, False),
        ("blackjack", {0x86: 0x0B, 0x89: 0xBB}, -200, True),
        ("human_cannonball", {0xB6: 6}, 6, False),
        ("human_cannonball", {0xB6: 7}, 7, True),
        ("human_cannonball", {0xB7: 7}, 0, True),
        ("pacman", {0x98: 0, 0xE4: 0x3F}, 0, True),
        ("pacman", {0x98: 1, 0xCC: 0x21, 0xCE: 0x43, 0xD0: 0x65}, 654321, False),
        ("tetris", {0xF1: 0x21, 0xF2: 0x43}, 4321, False),
        ("tetris", {0xF3: 0x80}, 0, True),
    ],
)
def test_a_game_counts_and_ends_as_that_of_ale_does(game, ram, reward, over):
    ale, console = load_ale(roms.get_rom_path(game), 1), libatari.Console(rom_bytes(game), game, 1)
    for _ in range(60):
        ale.act(ale_py.Action.NOOP)
        console.act(0)
    for address, value in ram.items():
        ale.setRAM(address - 0x80, value)
        console.set_ram(address, value)
    rewards = ale.act(ale_py.Action.NOOP), console.act(0)
    assert (rewards, console.game_over) == ((reward, reward), over)
    assert compare(ale, console) is None


KLAX_WELL = dict.fromkeys(range(0xB3, 0xCC), 1) | {0xA8: 4}
GOLF_HOLE = [{0x88: 4, 0x87: 0}, {0x87: 0x12, 0x88: 0}]


@pytest.mark.parametrize(
    "game, writes, reward, over",
    [
        ("adventure", [{0xB9: 0x12}], 1, True),
        ("backgammon", [backgammon_board(1, 0x8E, 15) | {0x9A: 0x80, 0x99: 0x80}], -1, True),  # -256 more
        ("casino", [{0xD4: 3, 0x9E: 0xAA}], 0, True),
        ("casino", [{0xD4: 3, 0x9E: 0xA9}], 0, False),
        ("casino", [{0xD3: 0, 0xD4: 0, 0x9E: 1, 0x8C: 0x10, 0x95: 0}, {0x8C: 0x12}, {0xD3: 0xFF}], 200, True),
        ("et", [{0xE5: 0x7F}], 0, False),  # -128 lives
        ("haunted_house", [{0x82: 0x10}, {0x82: 0x0A}], 0, False),  # the same number
        ("journey_escape", [{0x90: 0}, {0x90: 5}], 0, False),  # 50,000 points at once
        ("klax", [{}], 0, False),
        ("klax", [{0xB4: 0x21, 0xB5: 0x43, 0xB6: 0x65}], 654321, False),
        ("klax", [{0x9D: 0x99}], 0, True),
        ("klax", [{0x9D: 0x98}], 0, False),
        ("klax", [{0xE9: 3, 0xEE: 3}], 0, True),
        ("klax", [{0xE9: 3, 0xEE: 2}], 0, False),
        ("klax", [KLAX_WELL], 10101, True),
        *[("klax", [KLAX_WELL | {0xB3: tile}], 10101, False) for tile in (0, 2, 6, 10, 14)],
        ("klax", [KLAX_WELL | {0xCB: 14}], 10101, False),
        ("miniature_golf", [*GOLF_HOLE, {0xAF: 2}], -8, False),
        ("miniature_golf", [*GOLF_HOLE, {0xAF: 2}, {0x87: 0x15}, {0xAF: 3}], 1, False),
        ("miniature_golf", [*GOLF_HOLE, {0xAF: 2}, {0x87: 3}, {0xAF: 0}], 1, True),
        ("miniature_golf", [{0xAF: 0x20}, *GOLF_HOLE, {0xAF: 0x1A}], 0, False),  # the same number
        ("othello", [{0xC0: 1}, *[{0xC0: 0}] * 50], 0, False),
        ("othello", [{0xC0: 1}, *[{0xC0: 0}] * 51], 0, True),
        ("qbert", [{0x88: 0x80}, {0x88: 0x7F}], 0, False),  # no death: the byte has a sign
        ("riverraid", [{0xC0: 0x59}, {0xC0: 0x58}], 0, True),
        ("riverraid", [{0xC0: 0x5A}, {0xC0: 0x58}], 0, False),
        ("tennis", [{0xC7: 8, 0xC8: 7}], 1, True),
        ("video_cube", [{0xDB: 0xFF}, {0xDB: 0}], -1, True),
        ("video_cube", [{0xDB: 0xFE}, {0xDB: 0}], 0, False),
        ("word_zapper", [{0xCF: 4, 0xDC: 0}, {0xDC: 0x85}, {0xCF: 0}], 123, False),
    ],
)
def test_rules_that_chance_seldom_meets_are_ales(game, writes, reward, over, tmp_path):
    rules = Rules(game, bytes(128) if game == "klax" else rams_of_play(game, 1, 1)[0], tmp_path)
    for ram in writes:
        for address, value in ram.items():
            rules.write(address, value)
        ours, right = rules.step()
        assert ours == right
    assert (ours[0], ours[2]) == (reward, over)


# How games end that are hardly ever over by chance. River Raid and Othello, which need several frames, are above.
ENDS = {
    "backgammon": backgammon_board(1, 0x8E, 15),
    "crazy_climber": {0xAA: 0},
    "demon_attack": {0xF2: 0, 0xF1: 0xBD},
    "donkey_kong": {0xA3: 0, 0x8B: 0x1F, 0x8F: 3},
    "double_dunk": {0xF6: 0x24, 0xFE: 0xE7},
    "et": {0xE5: 0xFF, 0x80: 8},
    "ice_hockey": {0x86: 0, 0x87: 0},
    "jamesbond": {0x86: 0, 0x8C: 0x68},
    "keystone_kapers": {0x96: 0, 0x88: 0},
    "krull": {0x9F: 0, 0xA2: 3, 0x80: 0x80},
    "lost_luggage": {0xCA: 0, 0xC8: 0x0A, 0xA5: 0, 0xA9: 0},
    "pooyan": {0x96: 0, 0x98: 5},
    "robotank": {0xA8: 0, 0xB4: 0xFF},
    "sir_lancelot": {0xA9: 0, 0xA7: 0xA0},
    "superman": {0x80: 0xAC, 0x81: 0xF2, 0x9F: 0x40, 0xE2: 0x12, 0xE3: 0x34},
    "pong": {0x8D: 21},
    "turmoil": {0xB9: 0, 0xC5: 1},
    "venture": {0xC6: 0, 0xCD: 0xFF, 0xBF: 0x80},
    "wizard_of_wor": {0x8D: 0, 0xF4: 0xF8},
}


def compare_rules_of(game, states, seed, tmp_path):
    seen = rams_of_play(game, seed)
    if game in ENDS:
        seen += [bytes(ENDS[game].get(address, byte) for address, byte in enumerate(ram, 0x80)) for ram in seen[-2:]]
    rules = Rules(game, seen[0], tmp_path)
    assert GAMES[game]["actions"] == sorted(action.value for action in rules.ale.getMinimalActionSet())
    difference, ends = compare_rules(rules, seen, states, seed)
    assert difference is None
    assert ends > 0 or game in ("othello", "riverraid")


@pytest.mark.parametrize("game", WITH_RULES)
def test_rewards_lives_and_ends_are_ales_in_ram_that_play_does_not_meet(game, tmp_path):
    compare_rules_of(game, 1000, 1, tmp_path)


@pytest.mark.on_demand
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("game", WITH_RULES)
def test_rewards_lives_and_ends_are_ales_in_a_hundred_thousand_states(game, seed, tmp_path):
    compare_rules_of(game, 100_000, seed, tmp_path)


def test_alien_is_exact_where_it_pulls_vsync_from_a_collision_register():
    assert lockstep("alien", 600) == (600, None)


def test_a_restored_state_goes_on_as_the_original_did():
    console = libatari.Console(rom_bytes("breakout"), "breakout", 1)
    draw = random.Random(1)
    actions = [draw.randrange(18) for _ in range(300)]
    for action in actions:
        console.act(action)
    state = console.save()
    expected = [(console.act(action), console.ram().tobytes(), console.screen().tobytes()) for action in actions]
    other = libatari.Console(rom_bytes("breakout"), "breakout", 2)
    other.restore(state)
    assert [(other.act(action), other.ram().tobytes(), other.screen().tobytes()) for action in actions] == expected
    with pytest.raises(ValueError, match="bytes"):
        other.restore(state[1:])
    with pytest.raises(ValueError, match="of another ROM"):
        libatari.Console(rom_bytes("pong"), "pong", 1).restore(state)


def test_a_state_with_bytes_changed_at_random_is_refused_or_runs():
    console = libatari.Console(rom_bytes("breakout"), "breakout", 1)
    state, draw, refused = console.save(), random.Random(1), 0
    for _ in range(300):
        changed = bytearray(state)
        for _ in range(8):
            changed[draw.randrange(1000)] = draw.randrange(256)
        try:
            console.restore(bytes(changed))
        except ValueError:
            refused += 1
            continue
        for action in range(2):
            console.act(action)
    assert 30 < refused < 300


def test_after_the_game_is_over_nothing_moves_until_the_reset():
    console = libatari.Console(rom_bytes("pong"), "pong", 1)
    console.set_ram(0x8D, 21)
    console.act(0)
    assert console.game_over
    ram, frames = console.ram(), console.frame_number
    assert console.act(3) == 0 and (console.ram() == ram).all() and console.frame_number == frames
    console.reset_game()
    assert not console.game_over


def test_wrong_roms_games_and_actions_are_refused():
    with pytest.raises(ValueError, match="2049 bytes"):
        libatari.Console(bytes(2049), "pong", 1)
    with pytest.raises(ValueError, match="no game"):
        libatari.Console(bytes(2048), "pongg", 1)
    for sticky in (float("nan"), -0.5, 1e300):
        with pytest.raises(ValueError, match="it must lie between 0 and 1"):
            libatari.Console(rom_bytes("pong"), "pong", 1, sticky)
    console = libatari.Console(rom_bytes("pong"), "pong", 1)
    with pytest.raises(IndexError, match="action 18"):
        console.act(18)


@pytest.mark.parametrize("game", ["boxing", "berzerk", "asterix", "robotank", "solaris", "tutankham"])
def test_random_bytes_run_without_harm_and_a_jam_is_reported(game):
    size = len(rom_bytes(game))
    errors = set()
    for seed in range(12):
        console = libatari.Console(random.Random(seed).randbytes(size), game, seed)
        for _ in range(20):
            console.act(seed)
        errors.add(console.error)
    assert errors <= {0, 1, 2} and 1 in errors


def run_both(rom, tmp_path, frames, game="boxing"):
    """Run a program as if it were Boxing: its rules need RAM that the programs here leave alone."""
    path = tmp_path / f"{game}.bin"
    path.write_bytes(rom)
    ale, console = load_ale(path, 1), libatari.Console(rom, game, 1)
    for frame in range(frames):
        difference = compare(ale, console, rules=False)
        if difference:
            return f"frame {frame}: {difference}"
        ale.act(ale_py.Action(frame % 18))
        console.act(frame % 18)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_a_generated_program_equals_ale(seed, tmp_path):
    for number in range(5 * seed, 5 * seed + 5):
        assert run_both(programs.random_program(number), tmp_path, 12) is None, f"program {number}"


@pytest.mark.on_demand
@pytest.mark.parametrize("seed", range(300))
def test_a_generated_program_equals_ale_for_60_frames(seed, tmp_path):
    assert run_both(programs.random_program(1000 + seed), tmp_path, 60) is None


CARTRIDGES = [("boxing", 0, False), ("beam_rider", 2, False), ("elevator_action", 2, True), ("solaris", 4, False)]


def run_instructions(game: str, banks: int, has_ram: bool, rounds: int, tmp_path) -> None:
    """Each opcode `rounds` times, with random operands, registers and RAM, in a cartridge of the game's type."""
    path, rom = tmp_path / f"{game}.bin", programs.instruction_program(banks, has_ram)
    path.write_bytes(rom)
    draw, ale, loads = random.Random(banks), None, 0
    for n in range(256 * rounds):
        opcode = n % 256
        if opcode in programs.JAMS | {0x40, 0x60}:  # RTI and RTS go anywhere
            continue
        if ale is None:
            ale, console, loads = load_ale(path, 1), libatari.Console(rom, game, 1), loads + 1
        code, registers = programs.random_instruction(draw, opcode)
        bytes_of = {0x80 + i: draw.randrange(256) for i in range(0x80)} if n % 16 == 0 else {}
        bytes_of |= {0xB8: programs.BACK & 0xFF, 0xB9: programs.BACK >> 8, 0xBA: 0}  # for JMP (), and the count
        bytes_of |= {programs.INSTRUCTION + i: byte for i, byte in enumerate(code)}
        bytes_of |= {programs.REGISTERS_BEFORE + i: byte for i, byte in enumerate(registers)}
        for address, byte in bytes_of.items():
            ale.setRAM(address - 0x80, byte)
            console.set_ram(address, byte)
        ale.act(ale_py.Action.NOOP)
        console.act(0)
        difference = compare(ale, console, rules=False)
        is_changed = any(console.ram()[0x20 + i] != byte for i, byte in enumerate(code))
        if console.error or (difference and is_changed):  # it has changed the jump behind it, and went anywhere
            ale = None
            continue
        what = f"{bytes(code[: programs.LENGTHS[opcode]]).hex(' ')} with {bytes(registers).hex(' ')}"
        assert difference is None, f"instruction {n}, {what}: {difference}"
        if ale.game_over() or console.ram()[0xBA - 0x80] != 1:
            ale = None
    assert loads < 256 * rounds / 20


@pytest.mark.parametrize("game, banks, has_ram", CARTRIDGES)
def test_every_instruction_does_what_it_does_in_ale(game, banks, has_ram, tmp_path):
    """2 KB, F8, F8 with RAM, and F6: operands and hotspots in all of the address space."""
    run_instructions(game, banks, has_ram, 10, tmp_path)


@pytest.mark.on_demand
@pytest.mark.parametrize("game, banks, has_ram", CARTRIDGES)
def test_every_instruction_does_what_it_does_in_ale_many_times(game, banks, has_ram, tmp_path):
    run_instructions(game, banks, has_ram, 200, tmp_path)


def test_loops_that_wait_end_when_those_of_ale_do(tmp_path):
    for number in range(30):
        assert run_both(programs.waiting_program(number), tmp_path, 12) is None, f"program {number}"


def test_code_in_ram_is_fetched_byte_by_byte(tmp_path):
    rom = programs.self_modifying_program()
    assert run_both(rom, tmp_path, 12) is None
    console = libatari.Console(rom, "boxing", 1)
    before = int(console.ram()[0x20])
    for _ in range(5):
        console.act(0)
    assert int(console.ram()[0x20]) - before == 5


def test_a_frame_without_an_end_has_as_many_instructions_as_that_of_ale(tmp_path):
    path, rom = tmp_path / "boxing.bin", programs.endless_program()
    path.write_bytes(rom)
    ale, console = load_ale(path, 1), libatari.Console(rom, "boxing", 1)
    for frame in range(20):
        assert (ale.getRAM() == console.ram()).all(), f"frame {frame}"
        ale.act(ale_py.Action.NOOP)
        console.act(0)


def test_a_frame_that_goes_on_in_the_next_call_stays_on_its_screen():
    """3-D Tic-Tac-Toe thinks for so long; what its frame shows behind the last write is drawn when it goes on."""
    assert lockstep("tic_tac_toe_3d", 60) == (60, None)


ACCESSES = {  # LDA #…; STA, or LDA; each changes nothing
    "color": [0x85, programs.COLUBK], "playfield": [0xA9, 0xAA, 0x85, programs.PF0 + 1], "WSYNC": [0x85, 0x02],
    "VBLANK": [0xA9, 0, 0x85, programs.VBLANK], "NUSIZ": [0xA9, 0, 0x85, programs.NUSIZ0], "sound": [0x85, 0x19],
    "GRP": [0xA9, 0, 0x85, programs.GRP0], "HMP": [0x85, programs.HMP0], "collisions": [0xA5, 0x30],
}  # fmt: skip


@pytest.mark.parametrize("access", ACCESSES)
def test_a_frame_that_goes_on_is_drawn_up_to_its_last_access_to_the_tia(access, tmp_path):
    draw = random.Random(access)
    for _ in range(4):
        rom = programs.unfinished_frame_program(ACCESSES[access], draw.randrange(60, 200), draw.randrange(2, 30))
        path = tmp_path / "boxing.bin"
        path.write_bytes(rom)
        ale, console = load_ale(path, 1), libatari.Console(rom, "boxing", 1)
        for frame in range(24):
            assert compare(ale, console, rules=False) is None, f"frame {frame}"
            for address, value in {3: {0xA0: 1}, 18: {0xA0: 0}}.get(frame, {}).items():
                ale.setRAM(address - 0x80, value)
                console.set_ram(address, value)
            ale.act(ale_py.Action.NOOP)
            console.act(0)


@pytest.mark.parametrize(
    "seed, at, address, value",
    [
        (2, 123, 0x89, 0x4D),  # frames that go on, with writes that change nothing; later without any
        (22, 278, 0x89, 0x4D),
        (10, 63, 0xB5, 0x25),  # runs the TIA's registers as code from here on
        (17, 454, 0xB5, 0x25),
        (20, 184, 0xB5, 0x25),  # BRK pushes VBLANK and VSYNC in one cycle
        (5, 291, 0xB5, 0x25),  # and REFP0, CTRLPF and COLUBK
        (35, 373, 0xB5, 0x25),
    ],
)
def test_galaxian_gone_wild_is_drawn_as_by_ale(seed, at, address, value):
    ale, console = (
        load_ale(roms.get_rom_path("galaxian"), seed),
        libatari.Console(rom_bytes("galaxian"), "galaxian", seed),
    )
    draw, action = random.Random(seed), 0
    for frame in range(1, at + 250):
        if frame == at:
            ale.setRAM(address - 0x80, value)
            console.set_ram(address, value)
        if draw.randrange(6) == 0:
            action = draw.randrange(18)
        ale.act(ale_py.Action(action))
        console.act(action)
        assert compare(ale, console) is None, f"frame {frame}"
        if console.game_over:
            break


@pytest.mark.parametrize("game", ["pong", "beam_rider", "boxing", "frostbite", "tutankham"])
def test_frames_that_are_not_drawn_leave_the_same_state(game):
    drawn, undrawn = (libatari.Console(rom_bytes(game), game, 1) for _ in range(2))
    actions = random.Random(1).randbytes(600)
    for frame in range(0, 600, 4):
        for console, is_drawn in ((drawn, True), (undrawn, False)):
            console.run(4, is_drawn, actions[frame : frame + 4])
        # Of a saved state the rest is the screens.
        assert drawn.save()[:5000] == undrawn.save()[:5000], f"frame {frame}"


@pytest.mark.parametrize("gap", [75, 76])
def test_a_frame_begins_where_vsync_ends_after_76_cycles_since_it_was_last_set(gap):
    rom = programs.vsync_program(gap)
    console = libatari.Console(rom, "boxing", 1)
    before = int(console.ram()[0x20])
    for _ in range(10):
        console.act(0)
    assert ((int(console.ram()[0x20]) - before) % 256 == 10) == (gap == 76)


@pytest.mark.parametrize("gap", [10, 75])
def test_a_vsync_that_was_cleared_too_early_ends_the_frame_when_it_is_cleared_again(gap, tmp_path):
    assert run_both(programs.early_vsync_program(gap), tmp_path, 8) is None


@pytest.mark.parametrize("pull", [0x68, 0x28])  # PLA, PLP
def test_a_pull_from_the_tia_shows_what_lies_below_it_on_the_stack(pull, tmp_path):
    program = programs.Program().start()
    frame = program.here
    program.new_frame().store(0xFF, 0x03).add(0xA2, 0xFF, 0x9A, pull)  # LDX #$FF; TXS
    program.add(0xD0, 2, 0xE6, 0xA0, 0x90, 2, 0xE6, 0xA1, 0x85, 0xA2)  # count Z at A0, no carry at A1; A to A2
    rom = program.lines(200).jump(frame).build()
    assert run_both(rom, tmp_path, 5) is None
    console = libatari.Console(rom, "boxing", 1)
    if pull == 0x68:
        assert console.ram()[0x22] == 0x03
    else:
        assert console.ram()[0x20] > 60


@pytest.mark.parametrize("cycle", [7, 75])
def test_an_hmove_above_the_window_blanks_the_first_row_only(cycle, tmp_path):
    rom = programs.hmove_program(cycle)
    assert run_both(rom, tmp_path, 5) is None
    console = libatari.Console(rom, "boxing", 1)
    assert np.flatnonzero((console.screen()[:, :8] == 0).all(axis=1)).tolist() == [0]
    assert (console.screen()[:, 8:] != 0).all()


@pytest.mark.parametrize("cycle", [75, 76, 77])
def test_a_player_placed_where_a_line_begins_shows_all_its_copies_in_it(cycle, tmp_path):
    rom = programs.resp_program(cycle)
    assert run_both(rom, tmp_path, 3) is None
    screen = libatari.Console(rom, "boxing", 1).screen()[30:]
    first, second = (np.flatnonzero(screen[:, column] == 0x1E)[0] for column in (5, 20))
    assert first - second == (cycle == 77)


@pytest.mark.parametrize("register", [programs.RESP0, programs.RESP1])
@pytest.mark.parametrize("lines", [140, 141, 142, 143])
def test_a_player_placed_in_the_last_row_misses_its_first_copy_in_the_next_frames_first_row(lines, register, tmp_path):
    for cycle in (10, 30, 75, 76, 77):
        assert run_both(programs.low_resp_program(register, lines, cycle), tmp_path, 4) is None, f"cycle {cycle}"


@pytest.mark.parametrize("game", ["breakout", "freeway"])
def test_actions_after_the_end_of_a_game_draw_from_the_generator_that_sticky_actions_go_on_with(game):
    ale, console = load_ale(roms.get_rom_path(game), 1, 0.25), libatari.Console(rom_bytes(game), game, 1, 0.25)
    actions, random_action = ale.getLegalActionSet(), random.Random(1)

    def act() -> None:
        action = random_action.choice((0, 1, 3, 4))
        ale.act(actions[action]), console.act(action)

    while not ale.game_over():
        act()
    for _ in range(3):
        act()
    ale.reset_game(), console.reset_game()
    for _ in range(300):
        act()
        assert compare(ale, console) is None


@pytest.mark.parametrize("cycle", [30, 48, 49, 60])
def test_a_reflection_that_waits_for_the_next_line_comes_with_a_second_write_of_the_same_value(cycle, tmp_path):
    rom = programs.mirror_program(cycle)
    assert run_both(rom, tmp_path, 4) is None
    row = libatari.Console(rom, "boxing", 1).screen()[0]
    assert (row[156:] == 0x1E).all() and (row[76:84] != 0x1E).any()


def test_a_reflection_that_waits_below_the_window_waits_for_the_next_frame(tmp_path):
    for lines in range(236, 246):
        assert run_both(programs.late_mirror_program(lines), tmp_path, 5) is None, f"{lines} lines"


def test_a_reset_clears_the_screens_as_that_of_ale_does(tmp_path):
    """The program's frames are short while A0 is not 0: what they do not reach is of an older frame, or black."""
    program = programs.short_frame_program()
    path = tmp_path / "boxing.bin"
    path.write_bytes(program)
    ale, console = load_ale(path, 1), libatari.Console(program, "boxing", 1)
    for a0, expects_old_rows in [(0, True), (1, True), (1, False)]:
        ale.setRAM(0x20, a0)
        console.set_ram(0xA0, a0)
        if expects_old_rows:
            for _ in range(4):
                ale.act(ale_py.Action.NOOP)
                console.act(0)
        else:
            ale.reset_game()
            console.reset_game()
        assert compare(ale, console, rules=False) is None
        assert console.screen()[100].any() == expects_old_rows


@pytest.mark.parametrize("first", [0x63, 0x66])
def test_code_that_is_fetched_from_the_timer_is_that_of_its_moment(first, tmp_path):
    rom = programs.timer_code_program(first)
    assert run_both(rom, tmp_path, 5) is None
    console = libatari.Console(rom, "boxing", 1)
    before = int(console.ram()[0x20])
    console.act(0)
    assert int(console.ram()[0x20]) == (before + 1) % 256


@pytest.mark.parametrize("lines", range(4))
@pytest.mark.parametrize("register", ["NUSIZ0", "RESM0", "ENAM0", "HMM0", "HMOVE"])
def test_a_missile_that_shakes_goes_on_until_the_next_hmove(register, lines, tmp_path):
    assert run_both(programs.shaking_program(getattr(programs, register), 4 + lines), tmp_path, 4) is None


SWEEPS = [("HMOVE", programs.hmove_bands(), 2)]
SWEEPS += [(f"strobes {seed}", programs.strobe_bands(seed), 9) for seed in range(5)]
SWEEPS += [(f"{strobe:02X} after HMOVE", programs.strobe_after_hmove_bands(strobe), 1) for strobe in programs.STROBES]
SWEEPS += [(f"registers {seed}", programs.register_bands(seed), 2) for seed in range(4)]
SWEEPS += [("timer, then status", programs.timer_bands(*2 * (programs.INTIM, programs.INTIM + 1)), 1)]
SWEEPS += [("status, then timer", programs.timer_bands(*2 * (programs.INTIM + 1, programs.INTIM)), 1)]
SWEEPS += [("short timer", programs.short_timer_bands(), 1)]


@pytest.mark.parametrize("bands, rounds", [sweep[1:] for sweep in SWEEPS], ids=[sweep[0] for sweep in SWEEPS])
def test_what_is_done_in_any_cycle_of_a_line_does_what_it_does_in_ale(bands, rounds, tmp_path):
    assert run_both(programs.sweep_program(bands), tmp_path, rounds * programs.SWEEP_FRAMES + 1) is None


ADC, SBC, ARR = [0x65, 0xA4], [0xE5, 0xA4], [0xA5, 0xA4, 0x6B, 0xFF]


@pytest.mark.parametrize("operation, frames", [(ADC, 512), (SBC, 512), (ARR, 2)])
def test_all_operands_and_carries_give_the_decimal_results_of_ale(operation, frames, tmp_path):
    assert run_both(programs.decimal_program(operation), tmp_path, frames + 1) is None


def test_a_return_from_an_interrupt_takes_the_cycles_and_flags_of_ale(tmp_path):
    assert run_both(programs.rti_program(), tmp_path, 256) is None


@pytest.mark.parametrize("lines", [341, 342, 343, 344, 500])
def test_a_pal_frame_ends_after_as_many_lines_as_that_of_ale(lines, tmp_path):
    rom = programs.tall_program(lines, GAMES["air_raid"]["mode"])
    assert run_both(rom, tmp_path, 8, "air_raid") is None


def test_the_paddles_of_blackjack_reach_as_far_as_those_of_ale():
    ale = load_ale(roms.get_rom_path("blackjack"), 1)
    console = libatari.Console(rom_bytes("blackjack"), "blackjack", 1)
    for frame in range(120):
        action = 4 if frame < 60 else 3
        ale.act(ale_py.Action(action))
        console.act(action)
        assert compare(ale, console) is None, f"frame {frame}"


def altered_console(**attributes):
    """A kind of console that has other attributes."""
    return type("Altered", (libatari.Console,), attributes)


def one_more(name):
    return property(lambda console: getattr(super(type(console), console), name) + 1)


def act_with_one_more_reward(console, action):
    return super(type(console), console).act(action) + 1


def screen_with_another_pixel(console):
    screen = super(type(console), console).screen()
    screen[3, 5] ^= 2
    return screen


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("ram", lambda console: libatari.Console.ram(console) ^ (np.arange(128) == 7), "RAM 87: "),
        ("screen", screen_with_another_pixel, "1 pixels, first row 3 column 5: "),
        ("screen", lambda console: libatari.Console.screen(console)[1:], "screen of (209, 160), not (210, 160)"),
        ("frame_number", one_more("frame_number"), "frame number 3, not 2"),
        ("episode_frame_number", one_more("episode_frame_number"), "episode frame number 3, not 2"),
        ("game_over", property(lambda console: True), "game over True, not False"),
        ("lives", one_more("lives"), "lives 6, not 5"),
    ],
)
def test_a_comparison_says_what_differs(name, value, text):
    ale = load_ale(roms.get_rom_path("breakout"), 1)
    right = libatari.Console(rom_bytes("breakout"), "breakout", 1)
    wrong = altered_console(**{name: value})(rom_bytes("breakout"), "breakout", 1)
    for _ in range(2):
        ale.act(ale_py.Action.NOOP), right.act(0), wrong.act(0)
    assert compare(ale, right) is None
    assert compare(ale, wrong).startswith(text)
    assert (compare(ale, wrong, rules=False) is None) == (name in ("game_over", "lives"))


@pytest.mark.parametrize(
    "method, seed, frame, equal_frames, text",
    [
        ("__init__", 1, 0, 0, "frame 0: RAM 87: "),
        ("act", 1, 3, 2, "frame 3: RAM 87: "),
        ("reset_game", 1467, 2, 2, "frame 2: after the reset: RAM 87: "),  # with this seed it resets after two frames
    ],
)
def test_a_lockstep_stops_where_something_differs(method, seed, frame, equal_frames, text, monkeypatch):
    def altered(console, *arguments):
        result = getattr(super(type(console), console), method)(*arguments)
        if console.frame_number == frame:
            console.set_ram(0x87, int(console.ram()[7]) ^ 1)
        return result

    monkeypatch.setattr(libatari, "Console", altered_console(**{method: altered}))
    equal, difference = lockstep("breakout", 10, seed)
    assert equal == equal_frames and str(difference).startswith(text)


def test_a_lockstep_stops_where_a_reward_differs(monkeypatch):
    monkeypatch.setattr(libatari, "Console", altered_console(act=act_with_one_more_reward))
    equal, difference = lockstep("breakout", 10)
    assert (equal, str(difference)) == (0, "frame 1: reward 1, not 0")


@pytest.mark.parametrize(
    "name, value, ours",
    [
        ("act", act_with_one_more_reward, (1, 5, False)),
        ("lives", one_more("lives"), (0, 6, False)),
        ("game_over", property(lambda console: True), (0, 5, True)),
    ],
)
def test_a_comparison_of_rules_says_what_differs(name, value, ours, tmp_path, monkeypatch):
    seen = rams_of_play("breakout", 1, 1)
    monkeypatch.setattr(libatari, "Console", altered_console(**{name: value}))
    difference, ends = compare_rules(Rules("breakout", seen[0], tmp_path), seen, 5, 1)
    assert ends == 0
    assert difference.startswith(f"state 0: {ours}, not (0, 5, False), after RAM of kind ")


@pytest.mark.parametrize("second", [76, 78])  # the line begins in 76
def test_a_player_placed_where_a_line_begins_misses_its_copy_if_the_other_was_drawn_into_that_line(second, tmp_path):
    assert run_both(programs.two_players_program(second), tmp_path, 3) is None


@pytest.mark.on_demand  # a minute each
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
@pytest.mark.parametrize(
    "architecture, generator, wiring",
    [
        ("sm_80", "SplitMix64", "kFlat"), ("sm_90", "SplitMix64", "kFlat"), ("sm_90", "Mt19937", "kBanked"),
        ("sm_90", "SplitMix64", "kSliced"),
    ],
)  # fmt: skip
def test_the_kernels_compile_for_a_gpu_and_spill_no_registers(architecture, generator, wiring, tmp_path):
    source = Path(__file__).parents[1] / "csrc" / "atari" / "batch.cu"
    options = ["-std=c++17", f"-arch={architecture}", "-fmad=false", f"-DWIRING={wiring}", f"-DGENERATOR={generator}"]
    command = ["nvcc", *options, "-Xptxas", "-v", "-cubin", str(source), "-o", str(tmp_path / "batch.cubin")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    entries = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", result.stderr, re.S
    )
    print(*entries, sep="\n")  # kernel, bytes of stack, registers
    assert sorted(name for name, _, _ in entries) == ["begin", "emulate", "observe"]
    assert set(re.findall(r"(\d+) bytes spill", result.stderr)) == {"0"}


CHECK_BUILD = """
#include <cstdio>
#include <exception>
#include "build_check.h"
int main() {
  try {
    beast::atari::check_build();
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 3;
  }
}
"""
REFUSED = r"nest calls: 1000 of them take \d{5,} bytes of stack, .*; compile with -O2 or -O3, .* which gcc's -O1 lacks"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="gcc is not installed")
@pytest.mark.parametrize(
    "flags, message",
    [
        pytest.param("-O1", REFUSED, marks=pytest.mark.on_demand),
        pytest.param("-O2", "", marks=pytest.mark.on_demand),
        pytest.param("-O0", "", marks=pytest.mark.on_demand),
        pytest.param("-O1 -fsanitize=address", "", marks=pytest.mark.on_demand),  # takes 38 s
    ],
)
def test_a_build_in_which_instructions_nest_calls_is_refused(flags, message, tmp_path):
    program, include = tmp_path / "check", Path(__file__).parents[1] / "csrc" / "atari"
    command = ["g++", "-std=c++17", *flags.split(), "-I", str(include), "-x", "c++", "-", "-o", str(program)]
    subprocess.run(command, input=CHECK_BUILD, text=True, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == (3 if message else 0), done.stderr
    assert re.search(message, done.stdout) and bool(done.stdout) == bool(message)


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_only_games_that_the_committed_table_shows_exact_are_offered(sticky):
    assert EXACT_GAMES <= exact_games(sticky=sticky)


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_the_committed_table_shows_every_game_with_rules_exact_over_20000_frames(sticky):
    assert exact_games(sticky=sticky) == {name for name, game in GAMES.items() if game["has_rules"]}
