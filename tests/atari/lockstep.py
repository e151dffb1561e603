"""Run libatari and ale-py side by side and compare all that a game shows after every frame."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import ale_py
import libatari
import numpy as np
from ale_py import roms

ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
GAMES = {game["name"]: game for game in libatari.games()}


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

    `hold`: how many frames an action is held at most. `minimal`: draw from the game's own actions only.
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
