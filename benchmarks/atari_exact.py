"""Compare libatari with ale-py frame by frame on every ROM that ale-py brings.

    python benchmarks/atari_exact.py        # 20,000 frames of each; writes benchmarks/results/atari-exact.csv
    python benchmarks/atari_exact.py --games pong qbert --frames 2000

Random play; RAM, all pixels, lives, game over, frame numbers and rewards are compared after every frame. `equal` is the
number of frames before the first difference. A game without rules is compared without rewards, lives and game over.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from atari.lockstep import GAMES, lockstep  # noqa: E402

CARTS = ["2K", "4K", "F8", "F8SC", "F6", "F6SC", "E0", "FE"]
# ale-py ends the process when one of these is loaded for one player.
TWO_PLAYERS = ("combat", "joust", "maze_craze", "warlords")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sticky", type=float, default=0.0, help="probability that a frame repeats the last action")
    parser.add_argument("--games", nargs="*", default=[game for game in GAMES if game not in TWO_PLAYERS])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "atari-exact.csv")
    flags = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    flags.out.parent.mkdir(exist_ok=True)
    exact = 0
    with flags.out.open("w", newline="") as file:
        file.write(f"# python benchmarks/atari_exact.py --frames {flags.frames} --seed {flags.seed} ")
        file.write(f"--sticky {flags.sticky}; commit {commit.stdout.strip()}; ale-py 0.12.1\n")
        rows = csv.writer(file)
        rows.writerow(["game", "cart", "rules", "frames", "equal", "first difference"])
        for game in flags.games:
            began = time.perf_counter()
            equal, difference = lockstep(game, flags.frames, flags.seed, flags.sticky)
            exact += difference is None
            rules = "yes" if GAMES[game]["has_rules"] else "no"
            rows.writerow([game, CARTS[GAMES[game]["cart"]], rules, flags.frames, equal, difference or ""])
            file.flush()
            print(f"{game}: {difference or 'exact'} ({time.perf_counter() - began:.1f} s)", flush=True)
    print(f"{exact} of {len(flags.games)} games exact over {flags.frames} frames")


if __name__ == "__main__":
    main()
