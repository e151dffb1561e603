"""Play whole games with a trained agent on ale-py and on Beast's emulator at once, and compare every step.

    python benchmarks/atari_policy.py runs/atari-beamrider-seed1 --episodes 20

Random play sees little of a game; a trained agent shows what comes later. Observations, rewards, ends and infos of both
vector environments are compared. The first difference ends the program. A row of
results/atari-policy.csv tells what was equal.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
from gymnasium.vector import VectorWrapper

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "atari-policy.csv"
COLUMNS = ["game", "trained for steps", "seed", "games", "mean return", "highest return", "longest game in steps"]
COLUMNS += ["steps compared", "commit"]


class BothEmulators(VectorWrapper):
    """ale-py's environments, which raise RuntimeError at the first step that is another one on Beast's emulator."""

    def __init__(self, theirs, ours):
        super().__init__(theirs)
        self.ours, self.steps = ours, 0

    def reset(self, **options):
        return self.compare(super().reset(**options), self.ours.reset(**options))

    def step(self, actions):
        self.steps += self.num_envs
        return self.compare(super().step(actions), self.ours.step(actions))

    def close(self, **options):
        self.ours.close(**options)
        super().close(**options)

    def compare(self, expected, found):
        names = ("observations", "rewards", "terminations", "truncations")
        pairs = dict(zip(names, zip(expected[:-1], found[:-1])))
        pairs |= {name: (value, found[-1].get(name)) for name, value in expected[-1].items()}
        for name, (right, ours) in pairs.items():
            if not np.array_equal(right, ours):
                where = np.argwhere(np.asarray(right) != np.asarray(ours))[:1].tolist()
                raise RuntimeError(f"{name} differ after {self.steps} steps, first at {where}")
        return expected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the directory of a run of monobeast.py on an Atari game")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    import monobeast

    made = []

    def create_both(flags, num_envs, **overrides):
        both = [
            monobeast.create_env(replace(flags, atari_backend=name), num_envs, **overrides) for name in ("ale", "beast")
        ]
        made.append(BothEmulators(*both))
        return made[-1]

    flags = monobeast.Flags(checkpoint=str(arguments.run / "checkpoint.pt"), mode="test", episodes=arguments.episodes)
    result = monobeast.test(replace(flags, seed=arguments.seed), create_both)
    steps = sum(both.steps for both in made)
    git = ["git", "describe", "--always", "--dirty"]
    row = {
        "game": result["env"],
        "trained for steps": result["steps"],
        "seed": arguments.seed,
        "games": len(result["returns"]),
        "mean return": f"{result['mean']:.1f}",
        "highest return": f"{max(result['returns']):g}",
        "longest game in steps": max(result["lengths_in_steps"]),
        "steps compared": steps,
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
    }
    is_new = not arguments.out.exists()
    with arguments.out.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        if is_new:
            file.write(f"# python benchmarks/atari_policy.py RUN --episodes {arguments.episodes}; ale-py ")
            file.write(f"{metadata.version('ale-py')}; {os.cpu_count()} cores\n")
            table.writeheader()
        table.writerow(row)
    print(f"{steps:,} steps of {row['games']} games were equal on both emulators")


if __name__ == "__main__":
    main()
