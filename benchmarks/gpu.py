"""What a GPU shows of Beast, in one command and about 8 minutes: tests, throughput by stage, runs, Pong to 18.

    python benchmarks/gpu.py                  # writes benchmarks/results/gpu-<card>.md and .json
    python benchmarks/gpu.py --parts runs     # one part of it

Each part runs in a process of its own with a limit of time. What fails is named in the result, and the next one runs.
The files are written after every part, so that a run which is cut keeps what it has.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("tests", "throughput", "runs", "pong")
PONG = "--env PongNoFrameskip-v4"
WIDE = f"monobeast.py {PONG} --num_actors {{few}} --group_width 64 --batch_width 64"
RUNS = (  # each without learning curves: how many steps/s a user sees
    f"monobeast.py {PONG}",
    f"monobeast.py {PONG} --cuda_graphs",
    WIDE,
    f"{WIDE} --compile",
    f"{WIDE} --cuda_graphs",
    f"{WIDE} --cuda_graphs --compile",
    f"polybeast.py {PONG} --cuda_graphs",
    f"r2d2.py {PONG} --min_fill 5000 --replay_gb 2 --cuda_graphs",
    f"r2d2.py --preset paper {PONG} --cuda_graphs",
    "monobeast.py --preset discrete --env CartPole-v1 --cuda_graphs",
    "monobeast.py --preset continuous --env Pendulum-v1 --cuda_graphs",
    "monobeast.py --preset discrete --env examples.board_game:BoardGame-v0 --cuda_graphs",
)
TO_18 = f"monobeast.py {PONG} --cuda_graphs --num_actors {{most}} --group_width 32 --batch_width 32"
TO_18 += " --learning_rate 7e-4"
GOAL = 18.0


@dataclass
class Options:
    """What to measure."""

    parts: tuple[Literal["tests", "throughput", "runs", "pong"], ...] = PARTS
    """Parts to run."""
    seconds: float = 12.0
    """Seconds that each of the runs trains behind its first row of metrics."""
    only: str = ""
    """Of the runs, those whose commands match this regular expression."""
    seed: int = 1
    """Seed of the run of Pong."""
    out: str = str(ROOT / "benchmarks" / "results")
    """Directory for the files."""


def main(options: Options) -> None:
    import torch

    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import code_version

    if not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} sees no GPU: install a build with CUDA, and look at nvidia-smi")
    card = torch.cuda.get_device_name()
    head = [
        f"{card} beside {usable_cores()} cores of {cpu_model()}, torch {torch.__version__}, Python "
        f"{sys.version.split()[0]}, commit {(code_version(ROOT) or 'unknown')[:10]}.",
        f"`{shlex.join(['python', 'benchmarks/gpu.py', *sys.argv[1:]])}`",
    ]
    few, most = max(1, usable_cores() // 3), max(1, usable_cores() - 2)
    path = Path(options.out) / f"gpu-{re.sub('[^a-z0-9]+', '-', card.lower())}"
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict = {"head": head, "tests": None, "throughput": None, "runs": [], "pong": None}

    def keep() -> None:
        path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(found))

    if "tests" in options.parts:
        found["tests"] = output([*"-m pytest -q -rs --tb=line --durations=5 tests/test_gpu.py".split()], limit=240)
        keep()
    if "throughput" in options.parts:
        shape = ["--envs", str(4 * most), str(32 * most), "--actors", str(most), "--repeats", "1"]
        more = ["--arguments=--cuda_graphs", "--name", path.name, "--out", options.out]
        found["throughput"] = output(["benchmarks/throughput.py", *shape, *more], limit=240)
        keep()
    for command in RUNS if "runs" in options.parts else ():
        if re.search(options.only, command):
            command = command.format(few=few, most=most)
            found["runs"].append(watched(command, limit=120, seconds=options.seconds))
            keep()
    if "pong" in options.parts:
        found["pong"] = watched(f"{TO_18.format(most=most)} --seed {options.seed}", limit=300, goal=GOAL)
        keep()
    print(report(found))


def output(arguments: list[str], limit: float) -> str:
    """The end of what a program prints, and how it ended if not well."""
    print("+", *arguments, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, timeout=limit, capture_output=True, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired as late:
        return f"{(late.stdout or b'').decode(errors='replace')[-4000:]}\nended after its limit of {limit:g} s"
    failed = f"\nended with status {done.returncode}\n{done.stderr[-4000:]}" if done.returncode else ""
    text = done.stdout[-20000:] + failed
    print(text, flush=True)
    return text


def watched(command: str, limit: float, seconds: float = 1e9, goal: float = 1e9) -> dict:
    """Train until `seconds` behind the first row of metrics, a return of `goal` in the log, or `limit` seconds. Steps/s
    are those between the first and the last row."""
    print("+", command, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root, open(Path(root, "log"), "w+") as log:
        words = [*command.split(), "--root", root, "--name", "run", "--no_tensorboard", "--total_steps", "1000000000"]
        words += ["--log_steps", "20000"]
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log)
        rows: list[dict[str, float]] = []
        while process.poll() is None and time.monotonic() - began < limit:
            time.sleep(0.5)
            rows = read_rows(Path(root, "run", "metrics.csv"))
            returns = [row["charts/episodic_return"] for row in rows if "charts/episodic_return" in row]
            if rows and 3600 * (rows[-1]["hours"] - rows[0]["hours"]) > seconds or returns and returns[-1] >= goal:
                break
        status = process.poll()
        if status is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        log.seek(0)
        text = log.read()
    result: dict = {"command": command, "wall_seconds": time.monotonic() - began}
    if status is not None or len(rows) < 2:
        result["error"] = text[-2000:]
    else:
        between = 3600 * (rows[-1]["hours"] - rows[0]["hours"])
        result["steps_per_second"] = (rows[-1]["step"] - rows[0]["step"]) / between
        result["seconds"], result["steps"] = 3600 * rows[-1]["hours"], rows[-1]["step"]
        result["return"] = returns[-1] if returns else None
        for name in ("time/learner_wait", "time/inference_wait", "cores/envs", "cores/process"):
            result[name] = statistics.median(row[name] for row in rows[1:])
    print({name: x for name, x in result.items() if name != "command"}, flush=True)
    return result


def read_rows(path: Path) -> list[dict[str, float]]:
    """The whole rows of metrics so far."""
    if not path.exists():
        return []
    with open(path) as file:
        lines = [line for line in file if line.endswith("\n")]
    return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(lines)]


def report(found: dict) -> str:
    """The result, in Markdown."""
    lines = ["# Beast on a GPU, by benchmarks/gpu.py", "", *found["head"], ""]
    if found["tests"]:
        lines += ["## tests/test_gpu.py", "", "```", *found["tests"].strip().splitlines()[-30:], "```", ""]
    if found["throughput"]:
        lines += ["## benchmarks/throughput.py", "", found["throughput"].strip().replace("\n# ", "\n### "), ""]
    if found["runs"]:
        lines += [
            "## Runs",
            "",
            "Steps/s between the first and the last row of metrics, one run each; waits are shares of the time.",
            "",
            "| command | steps/s | learner waits | inference waits | cores of environments | of the process |",
            "|---|---|---|---|---|---|",
        ]
        for run in found["runs"]:
            if "error" in run:
                last = run["error"].strip().splitlines()[-1:] or ["no row of metrics in time"]
                lines.append(f"| `{run['command']}` | failed: {last[0][:200]} | | | | |")
                continue
            waits = f"{run['time/learner_wait']:.0%} | {run['time/inference_wait']:.0%}"
            cores = f"{run['cores/envs']:.1f} | {run['cores/process']:.1f}"
            lines.append(f"| `{run['command']}` | {run['steps_per_second']:,.0f} | {waits} | {cores} |")
        lines.append("")
    if pong := found["pong"]:
        lines += [f"## Pong to a return of {GOAL:g} (the log's latest 100 games)", "", f"`{pong['command']}`: "]
        if "error" in pong:
            lines[-1] += f"failed: {pong['error'].strip().splitlines()[-1:]}"
        else:
            lines[-1] += (
                f"{pong['return']:.1f} after {pong['seconds']:.0f} s of training and {pong['steps']:,.0f} steps, "
                f"{pong['steps_per_second']:,.0f} steps/s; {pong['wall_seconds']:.0f} s from start to end."
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    import tyro

    main(tyro.cli(Options, description=__doc__))
