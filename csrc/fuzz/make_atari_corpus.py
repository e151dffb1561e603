"""Writes inputs that csrc/fuzz/atari_fuzz.cc may start from: every kind of cartridge with the programs of the tests.

python csrc/fuzz/make_atari_corpus.py DIRECTORY [--roms]    # from the root of the repository

`--roms` adds the ROMs that ale-py brings, which are not ours to commit.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from atari import programs  # noqa: E402
from atari.lockstep import GAMES, rom_bytes  # noqa: E402

FRAMES, WRONG_SIZE, STATE, LOAD, ENVIRONMENT = range(5)
NAMES = list(GAMES)
# 2K, 4K, F8, F8SC, F6, F6SC, E0 and FE.
CARTRIDGES = ["boxing", "pitfall", "asterix", "elevator_action", "solaris", "darkchambers", "tutankham", "robotank"]
UNDOCUMENTED = [opcode for opcode in range(256) if opcode & 3 == 3 or opcode & 0x1F in (0x02, 0x12, 0x1A)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--roms", action="store_true")
    flags = parser.parse_args()
    flags.directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)

    def add(name: str, game: str, kind: int, rom: bytes, *, frames: int = 0, start: int = 0, changes: bytes = b""):
        header = bytes([NAMES.index(game), kind, frames, start, draw.randrange(256), len(changes)])
        (flags.directory / name).write_bytes(header + changes + rom)

    for game in CARTRIDGES:
        for kind in (FRAMES, LOAD, ENVIRONMENT):
            add(f"{game}_{kind}_program", game, kind, programs.random_program(kind))
        add(f"{game}_state", game, STATE, programs.random_program(9), changes=draw.randbytes(30))
        add(f"{game}_undocumented", game, FRAMES, bytes(draw.choice(UNDOCUMENTED) for _ in range(512)), start=1)
        add(f"{game}_random", game, FRAMES, draw.randbytes(2048), start=1)
        for size in (0, 1, 2047, 2048, 2049, 4096, 8192, 16384, 16385):
            add(f"{game}_{size}_bytes", game, WRONG_SIZE, draw.randbytes(size))
    for name in NAMES if flags.roms else ():
        add(f"{name}_rom", name, FRAMES, rom_bytes(name), frames=2)


if __name__ == "__main__":
    main()
