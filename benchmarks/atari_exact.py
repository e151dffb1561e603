"""Compare libatari with ale-py frame by frame on every ROM that ale-py brings.

    python benchmarks/atari_exact.py --seeds 1 2 3         # all ROMs; writes results/atari-exact.csv
    python benchmarks/atari_exact.py --games pong qbert    # measures these anew; the other rows stay
    python benchmarks/atari_exact.py --todo                # only the rows that this commit's emulator has not measured

Random play; RAM, all pixels, lives, game over, frame numbers and rewards are compared after every frame, and a game
stops at its first difference. `equal` is the number of frames before it, in the worst of the seeds. A game without
rules is compared without rewards, lives and game over. Each game runs in a process of its own, because ale-py ends the
process with some.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
RESULTS = ROOT / "benchmarks" / "results" / "atari-exact.csv"
STICKY = [0.0, 0.25]
COLUMNS = ["game", "cart", "rules", "seeds", "sticky", "frames", "equal", "first difference", "ale-py", "commit"]


def read_rows(path: Path) -> dict[tuple[str, float], dict[str, str]]:
    """Game and probability of sticky actions -> its row of the table."""
    with path.open(newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {(row["game"], float(row["sticky"])): row for row in rows}


def exact_games(path: Path = RESULTS, frames: int = 20_000, sticky: float = 0.0) -> set[str]:
    """The games with rules that were equal to ale-py over at least `frames` frames with these sticky actions."""
    rows = {game: row for (game, probability), row in read_rows(path).items() if probability == sticky}
    is_equal = {game: frames <= int(row["frames"]) == int(row["equal"]) for game, row in rows.items()}
    return {game for game, row in rows.items() if row["rules"] == "yes" and is_equal[game]}


def run_apart(game: str, seed: int, sticky: float, flags: argparse.Namespace) -> tuple[int, str]:
    """One game in a process of its own: the number of equal frames, and the first difference or nothing."""
    command = [sys.executable, __file__, "--one", game, "--frames", str(flags.frames), "--seeds", str(seed)]
    command += ["--sticky", str(sticky)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=flags.timeout)
    except subprocess.TimeoutExpired:
        return 0, f"not done after {flags.timeout} s"
    if done.returncode:
        return 0, f"the process ended with status {done.returncode}"
    equal, _, difference = done.stdout.strip().partition(" ")
    return int(equal), difference


def measure(game: str, sticky: float, cart: str, rules: bool, flags: argparse.Namespace) -> dict[str, str | int]:
    """Run one game with each seed and return its row."""
    equal, difference = min(
        (run_apart(game, seed, sticky, flags) for seed in flags.seeds), key=lambda result: result[0]
    )
    return {
        "game": game,
        "cart": cart,
        "rules": "yes" if rules else "no",
        "seeds": " ".join(map(str, flags.seeds)),
        "sticky": sticky,
        "frames": flags.frames,
        "equal": equal,
        "first difference": difference,
        "ale-py": metadata.version("ale-py"),
        "commit": flags.commit,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="play each game once with each of these")
    parser.add_argument(
        "--sticky", type=float, nargs="+", default=STICKY, help="probabilities that a frame repeats the last action"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one game")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="games at a time")
    parser.add_argument("--games", nargs="*", default=[], help="these only")
    parser.add_argument("--todo", action="store_true", help="leave out what has a row of this commit")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args()

    from atari.lockstep import CARTS, GAMES, lockstep

    from beast.machine import cpu_model

    if flags.one:
        equal, difference = lockstep(flags.one, flags.frames, flags.seeds[0], flags.sticky[0])
        print(equal, difference or "")
        return
    if unknown := [game for game in flags.games if game not in GAMES]:
        parser.error(f"libatari does not know {' '.join(unknown)}")
    git = ["git", "describe", "--always", "--dirty"]
    flags.commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    rows = read_rows(flags.out) if flags.out.exists() else {}  # they stay until they are measured anew
    # Games with rules are what one waits for.
    games = sorted(flags.games or GAMES, key=lambda game: (not GAMES[game]["has_rules"], game))
    wanted = [(game, sticky) for sticky in flags.sticky for game in games]
    if flags.todo:
        wanted = [each for each in wanted if each not in rows or rows[each]["commit"] != flags.commit]
    flags.out.parent.mkdir(exist_ok=True)
    with ThreadPoolExecutor(flags.jobs) as pool:
        tasks = [pool.submit(measure, *w, CARTS[GAMES[w[0]]["cart"]], GAMES[w[0]]["has_rules"], flags) for w in wanted]
        for each, task in zip(wanted, tasks, strict=True):
            rows[each] = task.result()
            print(f"{each[0]}, sticky {each[1]}: {rows[each]['first difference'] or 'exact'}", flush=True)
            with flags.out.open("w", newline="") as file:
                file.write(f"# python benchmarks/atari_exact.py; {cpu_model()}, {os.cpu_count()} cores\n")
                table = csv.DictWriter(file, COLUMNS)
                table.writeheader()
                table.writerows(rows[name] for name in sorted(rows))
    exact = sum(not row["first difference"] for row in rows.values())
    print(f"{exact} of {len(rows)} rows exact over {flags.frames} frames")


if __name__ == "__main__":
    main()
