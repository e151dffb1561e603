"""Play whole games with a trained agent on ale-py and on Beast's emulator at once, and compare every step.

    python benchmarks/atari_policy.py runs/atari-beamrider-seed1 --episodes 20

Random play sees little of a game; a trained agent shows what comes later. Observations, rewards, ends and infos of both
vector environments are compared, and the first difference ends the program. A row of results/atari-policy.csv is the
record of a comparison without one.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
from gymnasium.vector import VectorWrapper

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "atari-policy.csv"


class BothEmulators(VectorWrapper):
    """ale-py's environments, which raise RuntimeError at the first step that differs on Beast's emulator."""

    def __init__(self, theirs, ours):
        super().__init__(theirs)
        self.ours, self.steps = ours, 0

    def reset(self, **options):
        return self.compare(super().reset(**options), self.ours.reset(**options))

    def step(self, actions):
        self.steps += 1
        return self.compare(super().step(actions), self.ours.step(actions))

    def close(self, **options):
        self.ours.close(**options)
        super().close(**options)

    def compare(self, expected, found):
        names = ("observations", "rewards", "terminations", "truncations")
        pairs = dict(zip(names, zip(expected[:-1], found[:-1])))
        if expected[-1].keys() != found[-1].keys():
            raise RuntimeError(f"step {self.steps}: infos of {set(found[-1])}, not {set(expected[-1])}")
        pairs |= {name: (value, found[-1][name]) for name, value in expected[-1].items()}
        for name, (right, ours) in pairs.items():
            if (right.dtype, right.shape) != (ours.dtype, ours.shape):
                what = f"{ours.dtype} of shape {ours.shape}, not {right.dtype} of shape {right.shape}"
                raise RuntimeError(f"step {self.steps}: {name} are {what}")
            if (right != ours).any():
                where = np.argwhere(right != ours)[0].tolist()
                raise RuntimeError(f"step {self.steps}: {name} differ, first at {where}")
        return expected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the directory of a run of monobeast.py on an Atari game")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    checkpoint = arguments.run / "checkpoint.pt"
    if not checkpoint.exists():
        parser.error(f"{checkpoint} does not exist: give the directory of a run of monobeast.py")

    import monobeast
    from beast.errors import exit_with_message

    made = []

    def create_both(flags, num_envs, **overrides):
        theirs, ours = (
            monobeast.create_env(replace(flags, atari_backend=backend), num_envs, **overrides)
            for backend in ("ale", "beast")
        )
        made.append(BothEmulators(theirs, ours))
        return made[-1]

    with exit_with_message(), tempfile.TemporaryDirectory() as directory:
        copy = shutil.copy(checkpoint, directory)  # a test leaves its result beside the checkpoint
        flags = monobeast.Flags(checkpoint=copy, mode="test", episodes=arguments.episodes, seed=arguments.seed)
        result = monobeast.test(flags, create_both)
    both = made[-1]  # those before were probed only
    git = ["git", "describe", "--always", "--dirty"]
    row = {
        "env": result["env"],
        "trained for steps": result["steps"],
        "seed": arguments.seed,
        "games": len(result["returns"]),
        "mean return": f"{result['mean']:.1f}",
        "highest return": f"{max(result['returns']):g}",
        "longest game in steps": max(result["lengths_in_steps"]),
        "steps compared": both.steps * both.num_envs,
        "ale-py": metadata.version("ale-py"),
        "commit": subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
    }
    is_new = not arguments.out.exists()
    with arguments.out.open("a", newline="") as file:
        table = csv.DictWriter(file, row)
        if is_new:
            table.writeheader()
        table.writerow(row)
    print(f"all {row['steps compared']:,} steps were equal on both emulators")


if __name__ == "__main__":
    main()
