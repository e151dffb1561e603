"""What several policies in one run cost: steps/s of monobeast.py and of multibeast.py with more and more policies.

    python benchmarks/policies.py            # prints Markdown; about 12 minutes
    python benchmarks/policies.py --memory   # the memory of each instead; three minutes

All have the same actors, environments and net. They work in turn, two seconds each (see checkouts.py), so that all meet
the same load of a shared machine. A round gives each one ratio to one policy; the last column is their median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from checkouts import speeds  # noqa: E402

from beast.machine import cpu_model, usable_cores  # noqa: E402
from beast.run.directory import code_version  # noqa: E402

RUN = "--env PongNoFrameskip-v4 --num_actors 2"
COMMANDS = {
    "monobeast.py": f"monobeast.py {RUN}",
    **{f"{n} policies" if n > 1 else "1 policy": f"multibeast.py {RUN} --num_policies {n}" for n in (1, 4, 8)},
}

MEMORY_SECONDS = 40.0  # every policy has been trained by then


def memory(command: str) -> float:
    """MB of a run's main process, its part of memory that processes share."""
    with tempfile.TemporaryDirectory() as root:
        words = [sys.executable, *command.split(), "--root", root, "--name", "run", "--no_tensorboard"]
        run = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
        time.sleep(MEMORY_SECONDS)
        used = psutil.Process(run.pid).memory_full_info().pss
        run.terminate()
        run.wait()
    return used / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of all commands")
    parser.add_argument("--minutes", type=float, default=0.75, help="that each run works in a round")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("# What several policies in one run cost\n")
    print(f"`python benchmarks/policies.py {' '.join(sys.argv[1:])}`  ")
    print(f"{cpu_model()}, {usable_cores()} cores, torch {torch.__version__}, commit {code_version(ROOT)}\n")
    if options.memory:
        used = {name: memory(command) for name, command in COMMANDS.items()}
        print("| | MB | above one policy, for each more |\n|---|---|---|")
        for name, x in used.items():
            more = int(name[0]) - 1 if name[0].isdigit() else 0
            each = f"{(x - used['1 policy']) / more:,.0f}" if more else ""
            print(f"| {name} | {x:,.0f} | {each} |")
        return
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(options.rounds):
        order = list(COMMANDS) if number % 2 == 0 else list(reversed(COMMANDS))
        for name, speed in speeds({each: (ROOT, COMMANDS[each]) for each in order}, 60 * options.minutes).items():
            found[name].append(speed)
    print("| | command | steps/s | to one policy, each round | median |\n|---|---|---|---|---|")
    for name, command in COMMANDS.items():
        ratios = [x / one for x, one in zip(found[name], found["1 policy"])]
        shown = statistics.median(found[name]), ", ".join(f"{ratio:.3f}" for ratio in ratios), statistics.median(ratios)
        print("| {} | `{}` | {:,.0f} | {} | {:.3f} |".format(name, command, *shown))


if __name__ == "__main__":
    main()
