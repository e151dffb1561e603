"""Run libatari and ale-py side by side and compare all that a game shows after every frame."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import ale_py
import libatari
import numpy as np
from ale_py import roms

from atari import programs

ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
GAMES = {game["name"]: game for game in libatari.games()}
CARTS = ["2K", "4K", "F8", "F8SC", "F6", "F6SC", "E0", "FE"]


def rom_bytes(game: str) -> bytes:
    return Path(roms.get_rom_path(game)).read_bytes()


def load_ale(rom: str | Path, seed: int, sticky: float = 0.0) -> ale_py.ALEInterface:
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", sticky)
    ale.loadROM(str(rom))
    return ale


@dataclass
class Difference:
    frame: int  # frames of `act` before it; 0: after the load
    what: str

    def __str__(self):
        return f"frame {self.frame}: {self.what}"


def compare(ale: ale_py.ALEInterface, console, rules: bool = True) -> str | None:
    """What differs between the two, or None."""
    expected, ram = ale.getRAM(), console.ram()
    if (expected != ram).any():
        where = [f"{i + 128:02X}: {ram[i]:02X} not {expected[i]:02X}" for i in np.flatnonzero(expected != ram)[:6]]
        return "RAM " + ", ".join(where)
    image, screen = ale.getScreen(), console.screen()
    if image.shape != screen.shape:
        return f"screen of {screen.shape}, not {image.shape}"
    if (image != screen).any():
        ys, xs = np.nonzero(image != screen)
        ours, right = screen[ys[0], xs[0]], image[ys[0], xs[0]]
        return f"{len(ys)} pixels, first row {ys[0]} column {xs[0]}: {ours:02X} not {right:02X}"
    pairs = [("frame number", ale.getFrameNumber(), console.frame_number)]
    pairs += [("episode frame number", ale.getEpisodeFrameNumber(), console.episode_frame_number)]
    if rules:
        pairs += [("game over", ale.game_over(), console.game_over), ("lives", ale.lives(), console.lives)]
    for name, right, ours in pairs:
        if right != ours:
            return f"{name} {ours}, not {right}"
    return None


def lockstep(game: str, frames: int, seed: int = 1, sticky: float = 0.0, hold: int = 6, minimal: bool = False):
    """Play `frames` frames at random, resetting after each game. Returns (frames that were equal, Difference or None).

    `hold`: a new action is drawn in one of so many frames on average. `minimal`: from the game's own actions only.
    """
    rules = GAMES[game]["has_rules"]
    ale = load_ale(roms.get_rom_path(game), seed, sticky)
    console = libatari.Console(rom_bytes(game), game, seed, sticky)
    difference = compare(ale, console, rules)
    if difference:
        return 0, Difference(0, difference)
    draw = random.Random(seed)
    actions = GAMES[game]["actions"] if minimal else list(range(18))
    action = 0
    for frame in range(1, frames + 1):
        if draw.randrange(hold) == 0:
            action = draw.choice(actions)
        expected, reward = ale.act(ale_py.Action(action)), console.act(action)
        if rules and expected != reward:
            return frame - 1, Difference(frame, f"reward {reward}, not {expected}")
        difference = compare(ale, console, rules)
        if difference:
            return frame - 1, Difference(frame, difference)
        if ale.game_over() or draw.randrange(3000) == 0:
            ale.reset_game()
            console.reset_game()
            difference = compare(ale, console, rules)
            if difference:
                return frame, Difference(frame, f"after the reset: {difference}")
    return frames, None


class Rules:
    """Runs a game's rules in both emulators on RAM that a test writes. The cartridge is a program that leaves it alone.

    Klax's rules read the RAM of the cartridge, into which the program copies the console's.
    """

    def __init__(self, game: str, ram: bytes, directory: Path):
        needed = GAMES[game]["mode"]  # bytes that the game's reset waits for
        counter = 0
        if game == "double_dunk":  # its reset walks a menu: it waits for the next line and for options that are off
            needed, counter = {0x80: 0}, 0xB0
        ram = bytes(needed.get(address, byte) for address, byte in enumerate(ram, 0x80))
        has_ram = CARTS[GAMES[game]["cart"]].endswith("SC")
        rom = programs.still_program(len(rom_bytes(game)), ram, has_ram, counter)
        path = directory / f"{game}.bin"  # ale-py goes by the name
        path.write_bytes(rom)
        self.ale, self.console = load_ale(path, 1), libatari.Console(rom, game, 1)
        self.ram = list(ram)

    def write(self, address: int, byte: int) -> None:
        self.ram[address - 0x80] = byte
        self.ale.setRAM(address - 0x80, byte)
        self.console.set_ram(address, byte)

    def write_all(self, ram) -> None:
        for address, byte in enumerate(ram, 0x80):
            self.write(address, byte)

    def step(self) -> tuple[tuple, tuple]:
        """(reward, lives, whether the game is over) of ours, and of ale-py."""
        ours, right = self.console.act(0), self.ale.act(ale_py.Action.NOOP)
        return (ours, self.console.lives, self.console.game_over), (right, self.ale.lives(), self.ale.game_over())

    def reset(self) -> None:
        self.ale.reset_game()
        self.console.reset_game()
        self.write_all(self.ram)


def rams_of_play(game: str, seed: int, frames: int = 3000) -> list[bytes]:
    """RAM from random play, the last two of every game among them. The first is one frame after the reset."""
    console, draw, action = libatari.Console(rom_bytes(game), game, seed), random.Random(seed), 0
    seen: list[bytes] = []
    for frame in range(frames):
        before = console.ram().tobytes()
        console.act(action)
        if frame % 300 == 0 or console.game_over:
            seen += [console.ram().tobytes()] if frame == 0 else [before, console.ram().tobytes()]
        if console.game_over:
            console.reset_game()
        if draw.randrange(8) == 0:
            action = draw.choice(GAMES[game]["actions"])
    return seen


EDGE_VALUES = [0, 1, 2, 3, 4, 5, 8, 9, 10, 16, 0x20, 0x40, 0x7F, 0x80, 0x90, 0x99, 0xA0, 0xAA, 0xC0, 0xF0, 0xFE, 0xFF]


def compare_rules(rules: Rules, seen: list[bytes], states: int, seed: int) -> tuple[str | None, int]:
    """Compare rewards, lives and ends in RAM from play, in RAM at random, and after changes of a few bytes of these.

    Returns (the first difference or None, how often a game was over).
    """
    draw, ends = random.Random(seed), 0
    for state in range(states):
        kind, changes = draw.randrange(40), []
        if kind < 4:
            rules.write_all(draw.choice(seen))
        elif kind == 4:
            rules.write_all([draw.choice([draw.randrange(256), draw.choice(EDGE_VALUES)]) for _ in range(128)])
        elif kind == 5:
            rules.write_all([draw.choice(EDGE_VALUES)] * 128)
        ram = rules.ram
        for _ in range(draw.choice([0, 1, 1, 1, 2, 3, 6, 12])):
            i = draw.randrange(128)
            near = draw.choice([ram[i] + 1, ram[i] - 1, ram[i] ^ 1 << draw.randrange(8)]) % 256
            digits = draw.randrange(10) << 4 | draw.randrange(10)
            others = [draw.choice(EDGE_VALUES), draw.choice(seen)[i], draw.choice(ram)]
            byte = draw.choice([draw.randrange(256), near, near, digits, *others])
            changes.append(f"{i + 0x80:02X}: {ram[i]:02X} to {byte:02X}")
            rules.write(i + 0x80, byte)
        ours, right = rules.step()
        if ours != right:
            return f"state {state}: {ours}, not {right}, after RAM of kind {kind} and {', '.join(changes)}", ends
        if ours[2]:
            ends += 1
            if draw.randrange(2):
                rules.ram = list(draw.choice(seen))
            rules.reset()
    return None, ends
