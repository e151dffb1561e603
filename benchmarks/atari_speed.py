"""Frames/s of one console on one core, beside ale-py in the same run: python benchmarks/atari_speed.py [GAME...]"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import ale_py  # noqa: E402
import libatari  # noqa: E402
from ale_py import roms  # noqa: E402
from atari.lockstep import load_ale, rom_bytes  # noqa: E402

OURS, THEIRS, ROUNDS = 6000, 1000, 3  # frames a round


def main():
    for game in sys.argv[1:] or ["pong", "breakout", "seaquest", "qbert"]:
        actions = random.Random(1).choices(range(6), k=1009)
        ale, console = load_ale(roms.get_rom_path(game), 1), libatari.Console(rom_bytes(game), game, 1)
        best = dict.fromkeys(("no output", "every frame drawn", "ale-py"), 0.0)
        for _ in range(ROUNDS):  # interleaved: other processes disturb all of them alike
            for name in best:
                began = time.process_time()
                if name == "ale-py":
                    for i in range(THEIRS):
                        ale.act(ale_py.Action(actions[i % 1009]))
                        if ale.game_over():
                            ale.reset_game()
                else:
                    console.run(OURS, name == "every frame drawn", bytes(actions))
                frames = THEIRS if name == "ale-py" else OURS
                best[name] = max(best[name], frames / (time.process_time() - began))
        ratios = ", ".join(f"{name} {rate:,.0f} ({rate / best['ale-py']:.1f}x)" for name, rate in best.items())
        print(f"{game}: frames/s of CPU time: {ratios}", flush=True)


if __name__ == "__main__":
    main()
