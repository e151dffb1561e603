"""Stacks, single frames and zlib for env hosts that are far away: bytes, CPU, and the links on which each pays.

    python benchmarks/far_rows.py        # a minute; prints Markdown

Rows are those of Atari games that are played at random. CPU is that of this process, so a busy machine matters little.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from plan import CONSTANTS  # noqa: E402

from beast import envs  # noqa: E402
from beast.hosts.served_group import Row  # noqa: E402
from beast.machine import cpu_model, usable_cores  # noqa: E402
from beast.run.directory import code_version  # noqa: E402

WIDTH = 16  # environments of a stream
REPEATS = 3


def observed(game: str, steps: int, num_envs: int = 16) -> np.ndarray:
    """Stacks [steps, num_envs, 4, 84, 84] of a game that is played at random, after its first 50 steps."""
    env = envs.make(f"{game}NoFrameskip-v4", num_envs)
    env.action_space.seed(1)
    env.reset(seed=1)
    stacks = [env.step(env.action_space.sample())[0].copy() for _ in range(50 + steps)]
    env.close()
    return np.stack(stacks[50:])


def cost_of_deflate(stacks: np.ndarray) -> tuple[float, float]:
    """Bytes of an environment's stack as `polybeast_env.py --deflate` sends it, and µs of its CPU for that: medians."""
    row = Row({"obs/obs": (stacks.shape[2:], "uint8")}, stacks.shape[1], deflate=True)
    sizes, took = [], []
    for group in stacks:
        row.views["obs"]["obs"][...] = group
        began = time.process_time()
        sizes.append(len(row.SerializeToString()) / len(group))
        took.append((time.process_time() - began) / len(group))
    return statistics.median(sizes[1:]), 1e6 * statistics.median(took[1:])


def cpu_us(work: Callable[[bytes], object], rows: list[bytes]) -> float:
    """The median over the rows of what one of them takes, the least of its repetitions."""
    took = np.full(len(rows), np.inf)
    for _ in range(REPEATS):
        for number, row in enumerate(rows):
            began = time.process_time()
            work(row)
            took[number] = min(took[number], time.process_time() - began)
    return 1e6 * float(np.median(took))


def measure(rows: list[bytes]) -> tuple[float, float, float, float]:
    """Bytes of a row, its bytes behind zlib level 1, and µs of CPU to deflate and to inflate it: medians."""
    packed = [zlib.compress(row, 1) for row in rows]
    sizes = statistics.median(map(len, rows)), statistics.median(map(len, packed))
    return *sizes, cpu_us(lambda row: zlib.compress(row, 1), rows), cpu_us(zlib.decompress, packed)


def table(*names: str) -> None:
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=["Pong", "Breakout", "Seaquest"])
    parser.add_argument("--steps", type=int, default=60, help="of 16 environments each")
    options = parser.parse_args()
    print("# Stacks, single frames and zlib for far env hosts\n")
    print(f"`{shlex.join(['python', 'benchmarks/far_rows.py', *sys.argv[1:]])}`, games played at random, medians.")
    print(f"{cpu_model()}, {usable_cores()} cores, beside other jobs, commit {code_version(ROOT)[:10]}.\n")
    table("game", "row", "bytes", "zlib level 1", "times smaller", "deflate, µs of CPU", "inflate, µs of CPU")
    found = {}
    for game in options.games:
        stacks = observed(game, options.steps)
        singles = stacks.reshape(-1, *stacks.shape[2:])
        changes = stacks[1:, :, -1] ^ stacks[:-1, :, -1]
        rows = {
            "stack of 4": [stack.tobytes() for stack in singles],
            "newest frame": [stack[-1].tobytes() for stack in singles],
            "its change": [change.tobytes() for row in changes for change in row],
            "16 stacks": [row.tobytes() for row in stacks],
            "16 frames": [np.ascontiguousarray(row[:, -1]).tobytes() for row in stacks],
            "16 changes": [row.tobytes() for row in changes],
        }
        for kind, each in rows.items():
            found[game, kind] = size, packed, deflate, inflate = measure(each)
            sizes = f"{size:,.0f} | {packed:,.0f} | {size / packed:.0f}"
            print(f"| {game} | {kind} | {sizes} | {deflate:,.0f} | {inflate:,.0f} |")
        packed, deflate = cost_of_deflate(stacks)
        size, inflate = found[game, "stack of 4"][0], found[game, "16 changes"][3] / WIDTH
        found[game, "--deflate"] = size, packed, deflate, inflate
        sizes = f"{size:,.0f} | {packed:,.0f} | {size / packed:.0f}"
        print(f"| {game} | `--deflate`, each of 16 | {sizes} | {deflate:,.0f} | |")
    print("\n*Its change* is the newest frame XOR the one before. `--deflate` sends the changes of stacks that have")
    print("only shifted; its CPU is that of the env host, which looks for them.")
    print("\n## What an env host's core and its uplink carry, steps/s\n")
    print(
        f"A step takes {CONSTANTS.env_step_us:g} µs of a core, a row of {WIDTH} environments {CONSTANTS.env_row_us:g},"
    )
    print(f"and each of its bytes {CONSTANTS.env_byte_ns:g} ns; deflating comes on top. *Full core*: the link that one")
    print("core's rows fill. *Learner*: cores that receive and inflate the rows of 100,000 steps/s.\n")
    table("game", "row", "a core", "full core, Mb/s", "over 10 Mb/s", "100 Mb/s", "1 Gb/s", "learner")
    for game, kind in itertools.product(options.games, ("stack of 4", "stack of 4, zlib", "--deflate")):
        size, packed, deflate, inflate = found[game, kind.removesuffix(", zlib")]
        is_packed = kind != "stack of 4"
        length = (packed if is_packed else size) + CONSTANTS.other_bytes
        row = CONSTANTS.env_row_us / WIDTH + CONSTANTS.env_byte_ns * length / 1e3
        core = 1e6 / (CONSTANTS.env_step_us + row + is_packed * deflate)
        # Whatever has come, a whole stack is joined to batches.
        joined = CONSTANTS.learner_byte_ns * (size + CONSTANTS.other_bytes) / 1e3
        received = CONSTANTS.learner_row_us / WIDTH + joined + is_packed * inflate
        speeds = [f"{min(core, 1e6 * megabits / 8 / length):,.0f}" for megabits in (10, 100, 1000)]
        shown = [f"{core:,.0f}", f"{8 * length * core / 1e6:,.1f}", *speeds, f"{0.1 * received:.1f}"]
        print(f"| {game} | {kind} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
