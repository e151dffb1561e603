"""What Beast's Atari emulator takes from ale-py: the ROMs of games, and the colors of their screens."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np

from beast.errors import InputError, MissingPackage


def read_rom(game: str) -> bytes:
    """The ROM that ale-py would load. Raises OSError, or MissingPackage without ale-py."""
    try:
        from ale_py.roms import get_rom_path
    except ImportError as error:
        raise MissingPackage(f"Atari's ROMs come with ale-py ({error}): pip install ale-py") from error
    path = get_rom_path(game)
    if path is None:
        raise FileNotFoundError(f"ale-py has no ROM for {game}")
    return Path(path).read_bytes()


@functools.cache
def read_palette(is_pal: bool = False) -> np.ndarray:
    """Red, green, blue and gray of each index of ALE's palette, uint8 [256, 4], read off screens that show them all.

    No table of colors is kept here: ale-py is given programs of our own. Raises InputError where a temporary
    file cannot be written.
    """
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    palette = np.zeros((256, 4), np.uint8)
    # In PAL a frame with an odd number of lines shows the odd indices: colors get lost.
    for lines_below in (50, 51) if is_pal else (1,):
        program = bytes.fromhex(
            "78 D8 A2 FF 9A"  # SEI CLD LDX #FF TXS
            "A9 02 85 02 85 00 85 02 85 02 85 02"  # a frame: three lines of VSYNC
            "A9 00 85 00 85 01 A2 00 A0 00"  # VBLANK off, X = Y = 0
            "86 09 85 02 E8 E8 88 D0 F7"  # 256 times: COLUBK = X, WSYNC, X += 2
            f"A0 {lines_below:02X} 85 02 88 D0 FB"  # so many times: WSYNC
            "4C 05 F0"  # JMP to the next frame
        )
        rom = program.ljust(4096 - 6, b"\0") + bytes.fromhex("00F0 00F0 00F0")
        ale = ale_py.ALEInterface()
        try:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, "boxing.bin")  # ale-py goes by the name
                path.write_bytes(rom)
                ale.loadROM(path)
        except OSError as error:
            raise InputError(f"ale-py's colors are read with a temporary file ({error}): set TMPDIR") from error
        screen = ale.getScreen()
        palette[screen, :3] = ale.getScreenRGB()
        palette[screen, 3] = ale.getScreenGrayscale().reshape(screen.shape)
    return palette
