"""Are two checkouts the same agents? Weights of deterministic runs to the bit, old checkpoints, and steps/s in turn.

    git worktree add ../before 215e1b8 && make -C ../before libbeast
    python benchmarks/checkouts.py ../before            # prints Markdown

Both checkouts need libbeast built in place; this interpreter runs both. For the speed a round starts a run of each, and
stops and continues them in turn, two seconds each, so that both meet the same load of a shared machine. The last column
is the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from beast.machine import cpu_model, family_of, usable_cores  # noqa: E402
from beast.run.directory import code_version  # noqa: E402

PARTS = ("weights", "checkpoints", "speeds")
SLICE = 2.0  # seconds that a run works before the other one does
WEIGHTS = {  # at least 200 updates each, but for R2D2 on Pong
    "images": "monobeast.py --env BreakoutNoFrameskip-v4 --total_steps 16000 --group_width 8 --batch_width 4",
    "LSTM": "monobeast.py --env PongNoFrameskip-v4 --core lstm --total_steps 8000 --group_width 8 --batch_width 2",
    "PopArt": "monobeast.py --env CartPole-v1 --total_steps 32000 --group_width 8 --batch_width 8",
    "Dict": "monobeast.py --env examples.parcel:Parcel-v0 --total_steps 16000 --group_width 4 --hidden_size 64",
    "R2D2, vectors": "r2d2.py --preset vector --env CartPole-v1 --total_steps 4600",
    "R2D2, images": "r2d2.py --env PongNoFrameskip-v4 --total_steps 4000 --min_fill 1500 --group_width 8",
}
CHECKPOINTS = {  # command, and the steps of it that the old checkout trains; the new one resumes to twice as many
    "monobeast, LSTM": ("monobeast.py --env PongNoFrameskip-v4 --core lstm --num_actors 2", 6000),
    "monobeast, continuous": ("monobeast.py --preset continuous --env Pendulum-v1 --num_actors 2", 20_000),
    "polybeast": ("polybeast.py --env CartPole-v1", 20_000),
    "r2d2": ("r2d2.py --preset vector --env CartPole-v1 --save_replay", 5000),
}
SPEED = {
    "monobeast, vectors": "monobeast.py --env CartPole-v1",
    "monobeast, B=4": "monobeast.py --env PongNoFrameskip-v4 --num_actors 2",
    "monobeast, B=32": "monobeast.py --env PongNoFrameskip-v4 --num_actors 2 --group_width 32 --batch_width 32",
    "polybeast": "polybeast.py --env PongNoFrameskip-v4",
    "r2d2": "r2d2.py --env PongNoFrameskip-v4 --min_fill 2000 --replay_gb 0.5 --total_steps 20000000",
}


def run(checkout: Path, command: str, root: str, *more: str) -> Path:
    """The directory of a run of `command` with this checkout's code."""
    words = [sys.executable, *command.split(), "--no_tensorboard", "--root", root, "--name", "run", *more]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{checkout}: {command}\n{done.stderr}")
    return Path(root, "run")


def rows_of(path: Path) -> list[dict[str, str]]:
    """The whole rows of metrics so far."""
    try:
        with open(path / "metrics.csv") as file:
            return list(csv.DictReader(line for line in file if line.endswith("\n")))
    except FileNotFoundError:
        return []


def last_steps(path: Path) -> int:
    return int(rows_of(path)[-1]["step"])


def returns_of_games(path: Path) -> list[float]:
    return json.loads((path / "test.json").read_text())["returns"]


def num_different(old: Path, new: Path) -> tuple[int, int]:
    """How many tensors of two runs' nets there are, and how many are not equal to the bit."""
    nets = [torch.load(path / "checkpoint.pt", weights_only=True)["net"] for path in (old, new)]
    if nets[0].keys() != nets[1].keys():
        sys.exit(f"their nets have other tensors: {nets[0].keys() ^ nets[1].keys()}")
    return len(nets[0]), sum(not torch.equal(nets[0][name], nets[1][name]) for name in nets[0])


def speeds(commands: dict[str, tuple[Path, str]], seconds: float) -> dict[str, float]:
    """Steps/s of runs, each a checkout and its command. One works at a time, for SLICE seconds, until all have done
    `seconds`."""
    with contextlib.ExitStack() as to_undo:
        processes, paths = {}, {}
        for which, (checkout, command) in commands.items():
            paths[which] = Path(to_undo.enter_context(tempfile.TemporaryDirectory()), "run")
            words = [*command.split(), "--no_tensorboard", "--root", str(paths[which].parent), "--name", "run"]
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            processes[which] = subprocess.Popen(
                [sys.executable, *words, "--log_steps", "1000"],
                cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            to_undo.callback(end, processes[which])
            while len(rows_of(paths[which])) < 4:  # the first rows are slower
                if processes[which].poll() is not None:
                    sys.exit(f"{checkout}: {command} ended before it was measured: run it to see why")
                time.sleep(0.2)
            tell(processes[which], signal.SIGSTOP)
        before = {which: last_steps(path) for which, path in paths.items()}
        worked = dict.fromkeys(commands, 0.0)
        while min(worked.values()) < seconds:
            for which in [*commands, *reversed(commands)]:
                tell(processes[which], signal.SIGCONT)
                began = time.perf_counter()
                time.sleep(SLICE)
                tell(processes[which], signal.SIGSTOP)
                worked[which] += time.perf_counter() - began
        return {which: (last_steps(path) - before[which]) / worked[which] for which, path in paths.items()}


def tell(process: subprocess.Popen, number: signal.Signals) -> None:
    """Send a signal to a program and all that it has started."""
    for pid in [process.pid, *family_of(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(process: subprocess.Popen) -> None:
    tell(process, signal.SIGKILL)
    process.wait()


def compare_weights(checkouts: dict[str, Path]) -> None:
    print("\n| weights after a `--deterministic` run | command | tensors | not equal to the bit |\n|---|---|---|---|")
    for name, command in WEIGHTS.items():
        with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
            fixed = ("--deterministic", "--device", "cpu")
            old, new = (run(checkouts[which], command, root, *fixed) for which, root in (("old", a), ("new", b)))
            tensors, different = num_different(old, new)
        print(f"| {name} | `{command}` | {tensors} | {different} |", flush=True)


def compare_checkpoints(checkouts: dict[str, Path]) -> None:
    print("\n| checkpoint of old | command | steps | returns of three games | in new | steps after new resumed it |")
    print("|---|---|---|---|---|---|")
    for name, (command, steps) in CHECKPOINTS.items():
        with tempfile.TemporaryDirectory() as root:
            path = run(checkouts["old"], command, root, "--total_steps", str(steps))
            trained, played = last_steps(path), {}
            for which, checkout in checkouts.items():
                run(checkout, command, root, "--mode", "test", "--episodes", "3")
                played[which] = returns_of_games(path)
            run(checkouts["new"], command, root, "--total_steps", str(2 * steps))
            returns = ", ".join(f"{x:g}" for x in played["old"])
            is_same = "the same" if played["new"] == played["old"] else ", ".join(f"{x:g}" for x in played["new"])
            print(f"| {name} | `{command}` | {trained:,} | {returns} | {is_same} | {last_steps(path):,} |", flush=True)


def compare_speeds(checkouts: dict[str, Path], rounds: int, minutes: float) -> None:
    print("\n| steps/s | command | old | new | new / old of each round | median |\n|---|---|---|---|---|---|")
    for name, command in SPEED.items():
        found: dict[str, list[float]] = {"old": [], "new": []}
        for number in range(rounds):
            order = list(checkouts) if number % 2 == 0 else list(reversed(checkouts))
            commands = {which: (checkouts[which], command) for which in order}
            for which, speed in speeds(commands, 60 * minutes).items():
                found[which].append(speed)
        ratios = [new / old for old, new in zip(found["old"], found["new"])]
        shown = [f"{statistics.median(found[which]):,.0f}" for which in ("old", "new")]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"| {name} | `{command}` | {' | '.join(shown)} | {each} | {statistics.median(ratios):.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to compare")
    parser.add_argument("--rounds", type=int, default=3, help="of each speed")
    parser.add_argument("--minutes", type=float, default=1.0, help="that each run works whose speed is measured")
    options = parser.parse_args()
    checkouts = {"old": options.old.resolve(), "new": ROOT}
    print("# Two checkouts: the same weights, and steps/s in turn\n")
    print(f"`python benchmarks/checkouts.py {' '.join(['OLD', *sys.argv[2:]])}`  ")
    print(f"old {code_version(checkouts['old'])}, new {code_version(ROOT)}  ")
    print(f"{cpu_model()}, {usable_cores()} cores, torch {torch.__version__}")
    if "weights" in options.parts:
        compare_weights(checkouts)
    if "checkpoints" in options.parts:
        compare_checkpoints(checkouts)
    if "speeds" in options.parts:
        compare_speeds(checkouts, options.rounds, options.minutes)


if __name__ == "__main__":
    main()
