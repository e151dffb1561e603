"""What a slow environment costs the others: steps/s of MonoBeast with one of two actors many times slower.

    python benchmarks/uneven.py                        # writes benchmarks/results/uneven.{json,md}
    python benchmarks/uneven.py --against ../old       # beside another checkout, in turn

Each repetition runs the fast actor alone, then both. Steps/s are those of the last seconds of a run, after its warm-up.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclass
class Options:
    """What to measure."""

    factor: float = 20.0
    """How many times slower the slow actor steps."""
    seconds: float = 30.0
    """Measured seconds of a run."""
    warmup: float = 15.0
    """First seconds of a run that are left out."""
    repeats: int = 3
    """Repetitions; the table shows their median, lowest and highest."""
    against: str = ""
    """Another checkout, measured in turn with this one."""
    arguments: str = ""
    """More arguments for monobeast.py."""
    name: str = "uneven"
    """Name of the result."""


def main(options: Options) -> None:
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import code_version

    checkouts = {"this": ROOT, **({"other": Path(options.against).resolve()} if options.against else {})}
    commits = {name: code_version(checkout) for name, checkout in checkouts.items()}  # before anybody edits them
    found: dict[str, dict[str, list[float]]] = {name: {"alone": [], "uneven": []} for name in checkouts}
    for repeat in range(options.repeats):
        for name, checkout in checkouts.items():
            found[name]["alone"].append(steps_per_second(checkout, options, num_actors=1, factor=1))
            found[name]["uneven"].append(steps_per_second(checkout, options, num_actors=2, factor=options.factor))
            print(f"repetition {repeat + 1}, {name}: {found[name]}", flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/uneven.py", *sys.argv[1:]]),
        "commits": commits,
        "hardware": f"{cpu_model()}, {usable_cores()} cores",
        "found": found,
    }
    path = ROOT / "benchmarks" / "results" / options.name
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(result, options))
    print(report(result, options))


def steps_per_second(checkout: Path, options: Options, num_actors: int, factor: float) -> float:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(checkout / "monobeast.py"), "--env", "uneven_env:Uneven-v0", "--root", directory]
        command += f"--name run --num_actors {num_actors} --no_tensorboard --log_steps 500".split()
        command += ["--total_minutes", str((options.warmup + options.seconds) / 60), *options.arguments.split()]
        paths = [str(ROOT / "benchmarks"), str(checkout)]
        variables = {"UNEVEN_LOCK": os.path.join(directory, "lock"), "UNEVEN_FACTOR": str(factor)}
        environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        with open(os.path.join(directory, "run", "metrics.csv")) as file:
            rows = [(3600 * float(row["hours"]), int(row["step"])) for row in csv.DictReader(file)]
    rows = [row for row in rows if row[0] >= options.warmup]
    if len(rows) < 2:
        sys.exit(f"error: {len(rows)} rows of metrics in {options.seconds:g} s after the warm-up: give more --seconds")
    return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])


def report(result: dict, options: Options) -> str:
    lines = [
        "# A slow environment beside a fast one",
        "",
        f"`{result['command']}`, {result['hardware']}. Breakout, two actors, one {options.factor:g} times slower.",
        "Agent steps/s, median (lowest to highest); the ratio is of medians.",
        "",
        "| checkout | commit | the fast actor alone | both | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, speeds in result["found"].items():
        cells = [f"{statistics.median(s):,.0f} ({min(s):,.0f} to {max(s):,.0f})" for s in speeds.values()]
        ratio = statistics.median(speeds["uneven"]) / statistics.median(speeds["alone"])
        lines.append(f"| {name} | {(result['commits'][name] or '')[:7]} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
