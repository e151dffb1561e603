"""Does anything grow? Train for half an hour, look at memory, queues and lag all the time, and fit a slope to each.

    python benchmarks/soak.py            # MonoBeast on Pong; writes benchmarks/results/soak-monobeast.{csv,md}
    python benchmarks/soak.py --variant polybeast
    python benchmarks/soak.py --variant r2d2 --minutes 11 --arguments="--replay_gb 0.1 --min_fill 2000"

Memory is what the kernel calls proportional: a page that n processes map counts 1/n in each, so that the sum over all
processes of the run is what the run costs the machine. A slope is that of a line through the means of ten equal parts
of the run, its first minutes left out; of R2D2 all until its replay is full. A quantity is flat if 0 lies within the
slope's 95 % interval and no more than a tenth of its mean an hour does; if more does, nothing is known of it.
"""

from __future__ import annotations

import contextlib
import csv
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PARTS = 10
T_95 = 2.306  # of Student's t with PARTS - 2 degrees of freedom
FLAT = 0.1  # of the mean, an hour
MEMORY = {"Pss_Anon": "memory of its own", "Pss_Shmem": "shared memory"}
METRICS = {  # columns of metrics.csv, and what they mean
    "charts/SPS": "agent steps/s",
    "stats/queue_full_slots": "slots that wait for the learner",
    "stats/queue_waiting_columns": "columns that wait for the learner",
    "stats/policy_lag_mean": "policy lag, updates",
    "stats/replay_rows": "steps in the replay",
}


@dataclass
class Options:
    """What to run, and for how long."""

    variant: Literal["monobeast", "polybeast", "r2d2"] = "monobeast"
    """Which of the three."""
    env: str = "PongNoFrameskip-v4"
    """Environment id."""
    minutes: float = 31.0
    """Length of the run."""
    warmup: float = 5.0
    """First minutes that no slope is fitted to: processes start, first games end, buffers fill."""
    interval: float = 5.0
    """Seconds between two looks at the memory."""
    arguments: str = ""
    """More arguments for the variant, as in `--arguments="--seed 2"`."""
    root: str = "runs"
    """Directory for the run, which must not exist yet."""
    out: str = str(ROOT / "benchmarks" / "results")
    """Directory for the CSV and Markdown files."""


def main(options: Options) -> None:
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import code_version

    commit = code_version(ROOT)  # before anybody edits it

    path = Path(options.root) / f"soak-{options.variant}"
    if path.exists():
        sys.exit(f"error: {path} exists already; give another --root")
    command = [sys.executable, str(ROOT / f"{options.variant}.py"), "--env", options.env, "--root", options.root]
    command += ["--name", path.name, "--total_minutes", str(options.minutes), *options.arguments.split()]
    samples: list[dict[str, float]] = []
    process = subprocess.Popen(command)
    try:
        began = time.monotonic()
        while process.poll() is None:
            samples.append({"minutes": (time.monotonic() - began) / 60, **memory_of_tree(process.pid)})
            time.sleep(options.interval)
    finally:
        process.terminate()
        if process.wait():
            sys.exit(f"error: the run ended with exit code {process.returncode}")
    samples = [sample for sample in samples if sample["processes"]]  # the last one may have seen its end
    with open(path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    warmup = max(options.warmup, minute_of_full_replay(rows))
    if warmup >= options.minutes:
        sys.exit("error: the replay was never full: lower its --replay_gb in --arguments, or give more --minutes")
    lines, flat = [], True
    for name, meaning in MEMORY.items():
        points = [(sample["minutes"], sample[name] / 1e6) for sample in samples]
        line, is_flat = describe(f"{meaning}, MB", points, warmup, options.minutes)
        lines.append(line)
        flat = flat and is_flat
    for name, meaning in METRICS.items():
        points = [(60 * float(row["hours"]), float(row[name])) for row in rows if row.get(name)]
        if points:
            lines.append(describe(meaning, points, warmup, options.minutes)[0])
    highest = max(float(row["stats/policy_lag_max"]) for row in rows)
    bounds = {row["stats/policy_lag_bound"] for row in rows if row.get("stats/policy_lag_bound")}
    bound = f", its bound is {float(bounds.pop()):.0f}" if bounds else " (no bound)"
    lines = [
        f"# {options.minutes:.0f} minutes of {options.variant}.py on {options.env}",
        "",
        f"{cpu_model()}, {usable_cores()} cores, commit {commit}; "
        f"{float(rows[-1]['step']):,.0f} steps, {max(sample['processes'] for sample in samples):.0f} processes, the "
        f"first {warmup:.1f} minutes left out.",
        "",
        "| | mean | lowest | highest | slope an hour (95 % interval) | |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
        f"Highest policy lag: {highest:.0f} updates{bound}. Environments restarted: {rows[-1]['stats/env_restarts']}.",
        "",
        f"`python benchmarks/soak.py --variant {options.variant} --env {options.env} --minutes {options.minutes:g} "
        f"--arguments={shlex.quote(options.arguments)}`",
    ]
    output = Path(options.out) / f"soak-{options.variant}"
    output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    with open(output.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, samples[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: round(value, 3) for name, value in sample.items()} for sample in samples)
    print("\n".join(lines))
    if not flat:
        sys.exit("memory grew")


def minute_of_full_replay(rows: list[dict[str, str]]) -> float:
    """When the replay was full for the first time: 0 of a variant without one, infinity if it never was."""
    if not any(row.get("stats/replay_fill") for row in rows):
        return 0.0
    return min(
        (60 * float(row["hours"]) for row in rows if float(row["stats/replay_fill"] or 0) >= 1), default=math.inf
    )


def memory_of_tree(pid: int) -> dict[str, float]:
    """Bytes of each kind in MEMORY of a process and all below it, and how many processes they are."""
    total = {**dict.fromkeys(MEMORY, 0.0), "processes": 0}
    for member in tree(pid):
        with contextlib.suppress(OSError):  # it has ended since
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
            sizes = dict(line.split(":", 1) for line in lines[1:])
            for name in MEMORY:
                total[name] += int(sizes[name].split()[0]) * 1024
            total["processes"] += 1
    return total


def tree(pid: int) -> Iterator[int]:
    """The process and all that it has started, and those have."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))


def describe(what: str, points: list[tuple[float, float]], warmup: float, minutes: float) -> tuple[str, bool]:
    """A line of the table for points (minute, value), and whether it does not rise."""
    points = [point for point in points if point[0] >= warmup]
    width = (minutes - warmup) / PARTS
    parts: list[list[tuple[float, float]]] = [[] for _ in range(PARTS)]
    for point in points:
        parts[min(int((point[0] - warmup) / width), PARTS - 1)].append(point)
    if not all(parts):
        return f"| {what} | | | | | not known: {len(points)} values, and parts of the run without any |", False
    x = np.array([statistics.fmean(minute for minute, _ in part) / 60 for part in parts])
    y = np.array([statistics.fmean(value for _, value in part) for part in parts])
    slope, start = np.polyfit(x, y, 1)
    residual = y - (start + slope * x)
    margin = T_95 * np.sqrt(residual @ residual / (PARTS - 2) / np.square(x - x.mean()).sum())
    values = [value for _, value in points]
    rounding = 1e-9 * max(map(abs, values))  # of what never changes
    verdict = "flat" if abs(slope) <= margin + rounding else ("rises" if slope > 0 else "falls")
    if verdict == "flat" and abs(slope) + margin > FLAT * abs(statistics.fmean(values)):
        verdict = "not known: it varies too much"
    return (
        f"| {what} | {statistics.fmean(values):,.2f} | {min(values):,.2f} | {max(values):,.2f} "
        f"| {slope:+,.3f} (± {margin:.3f}) | {verdict} |",
        verdict in ("flat", "falls"),
    )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
