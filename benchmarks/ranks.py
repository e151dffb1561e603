"""What two ranks cost on one machine, or what slots just in time give: steps/s, CPU time and policy lag of two ways to
train Pong with 64 environments.

    python benchmarks/ranks.py             # about 7 minutes; writes benchmarks/results/ranks.md
    python benchmarks/ranks.py slots       # writes benchmarks/results/slots.md

The two take turns. The first third of a run is left out.
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
from typing import Annotated, Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from transport import spread  # noqa: E402

RUN = "--env PongNoFrameskip-v4 --name run --no_tensorboard --log_steps 4000"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2"
COMPARISONS = {  # launcher, program, flags, ranks
    "ranks": {
        "one rank": ("", "monobeast.py", "--num_actors 2 --batch_width 8", 1),
        "two ranks": (TORCHRUN, "monobeast.py", "--num_actors 1 --batch_width 4", 2),
    },
    "slots": {
        "slots at once": ("", "benchmarks/slots_at_once.py", "--num_actors 2 --batch_width 4", 1),
        "slots just in time": ("", "monobeast.py", "--num_actors 2 --batch_width 4", 1),
    },
}
TITLES = {
    "ranks": "One learner, and two ranks with half of the columns each",
    "slots": "Slots that are handed out at once and just in time",
}
PARTS = "learner", "inference", "envs"
STAGES = "wait", "round", "records", "gather", "forward", "loss", "backward", "optimizer", "publish"


@dataclass
class Options:
    """What to measure."""

    compare: Annotated[Literal["ranks", "slots"], tyro.conf.Positional] = "ranks"
    """Which two ways."""
    steps: int = 36_000
    """Steps of a run."""
    repeats: int = 4
    """Repetitions; the table shows their median, lowest and highest."""


def measure(variant: tuple[str, str, str, int], steps: int) -> dict[str, float]:
    """Steps/s, ms of CPU a step of each part of all ranks, and shares of the time of rank 0's learner."""
    launcher, program, flags, num_ranks = variant
    with tempfile.TemporaryDirectory() as place:
        words = [*launcher.split(), str(ROOT / program), *RUN.split(), *flags.split()]
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
    variants = COMPARISONS[options.compare]
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for repeat in range(options.repeats):
        for variant, runs in found.items():
            runs.append(measure(variants[variant], options.steps))
            print(f"repetition {repeat + 1}, {variant}: {runs[-1]}", flush=True)
    one, two = found.values()
    ratios = [b["steps/s"] / a["steps/s"] for a, b in zip(one, two)]
    lines = [
        f"# {TITLES[options.compare]}",
        "",
        f"`{shlex.join(['python', 'benchmarks/ranks.py', *sys.argv[1:]])}`, {cpu_model()}, {usable_cores()} cores, "
        f"commit {commit}. The two take turns. Both have 64 environments of Pong, and equally wide updates. Medians of "
        f"{options.repeats} runs (lowest to highest). The second makes {spread(ratios, '.2f')} times the steps/s of "
        "the first. The CPU time of two ranks is twice rank 0's.",
        "",
        f"| | {' | '.join(variants)} |",
        "|---" * (1 + len(variants)) + "|",
    ]
    for name in one[0]:
        values = ([run[name] for run in runs] for runs in found.values())
        lines.append(f"| {name} | {' | '.join(spread(x, ',.0f' if name == 'steps/s' else '.2f') for x in values)} |")
    (ROOT / "benchmarks" / "results" / f"{options.compare}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
