"""What two ranks cost on one machine: steps/s and CPU time of one learner and of two with half of the columns each.

    python benchmarks/ranks.py             # about 7 minutes; writes benchmarks/results/ranks.md

The two take turns. Both have 64 environments of Pong, and updates of 8 columns. The first third of a run is left out.
"""

from __future__ import annotations

import csv
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RUN = "--env PongNoFrameskip-v4 --name run --no_tensorboard --log_steps 4000"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2"
VARIANTS = {  # launcher, flags, ranks
    "one rank": ("", "--num_actors 2 --batch_width 8", 1),
    "two ranks": (TORCHRUN, "--num_actors 1 --batch_width 4", 2),
}
PARTS = "learner", "inference", "envs"
STAGES = "wait", "round", "records", "gather", "forward", "loss", "backward", "optimizer", "publish"


@dataclass
class Options:
    """What to measure."""

    steps: int = 36_000
    """Steps of a run."""
    repeats: int = 4
    """Repetitions; the table shows their median, lowest and highest."""
    name: str = "ranks"
    """Name of the result."""


def measure(variant: str, steps: int) -> dict[str, float]:
    """Steps/s, ms of CPU a step of each part of all ranks, and shares of the time of rank 0's learner."""
    launcher, flags, num_ranks = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as place:
        words = [*launcher.split(), str(ROOT / "monobeast.py"), *RUN.split(), *flags.split()]
        words += ["--total_steps", str(steps), "--root", place]
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rows = list(csv.DictReader((Path(place) / "run" / "metrics.csv").read_text().splitlines()))
    rows = [{name: float(x or 0) for name, x in row.items()} for row in rows]
    begin = next(row for row in rows if row["step"] >= steps / 3)
    kept = rows[rows.index(begin) + 1 :]
    found = {"steps/s": (kept[-1]["step"] - begin["step"]) / (kept[-1]["hours"] - begin["hours"]) / 3600}
    for part in PARTS:
        cores = statistics.mean(row[f"cores/{part}"] for row in kept)
        found[f"{part}, ms of CPU a step"] = 1e3 * num_ranks * cores / found["steps/s"]
    for stage in STAGES:
        found[f"learner: {stage}, %"] = 100 * statistics.mean(row.get(f"time/learner_{stage}", 0) for row in kept)
    found["policy lag"] = statistics.mean(row["stats/policy_lag_mean"] for row in kept)
    return found


def main(options: Options) -> None:
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import code_version

    commit = code_version(ROOT)[:10]  # before anybody edits it
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for repeat in range(options.repeats):
        for variant, runs in found.items():
            runs.append(measure(variant, options.steps))
            print(f"repetition {repeat + 1}, {variant}: {runs[-1]}", flush=True)
    one, two = found.values()
    ratios = [b["steps/s"] / a["steps/s"] for a, b in zip(one, two)]
    lines = [
        "# One learner, and two ranks with half of the columns each",
        "",
        f"`{shlex.join(['python', 'benchmarks/ranks.py', *sys.argv[1:]])}`, {cpu_model()}, {usable_cores()} cores, "
        f"commit {commit}. The two take turns. Both have 64 environments of Pong, and updates of 8 columns. Medians of "
        f"{options.repeats} runs (lowest to highest). Two ranks make {spread(ratios)} times the steps/s of one. Their "
        "CPU time is twice rank 0's.",
        "",
        f"| | {' | '.join(VARIANTS)} |",
        "|---" * (1 + len(VARIANTS)) + "|",
    ]
    for name in one[0]:
        values = ([run[name] for run in runs] for runs in found.values())
        lines.append(f"| {name} | {' | '.join(spread(x, 0 if name == 'steps/s' else 2) for x in values)} |")
    (ROOT / "benchmarks" / "results" / f"{options.name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
