"""What a GPU shows of Beast, in one command and 10 minutes: tests, our emulator on it, Pong to 18, throughput by stage,
runs.

    python benchmarks/gpu.py                  # writes benchmarks/results/gpu-<card>.md, .json and .png
    python benchmarks/gpu.py --parts runs     # one part of it

Each piece runs in a process of its own with a limit of time. What fails is named in the result, and the next one runs.
What there was no time for is named, too. The files are written after every piece, so that a run which is cut keeps what
it has.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from beast.errors import MissingPackage  # noqa: E402
from beast.gpu import atari, kernels  # noqa: E402

PARTS = ("tests", "emulator", "stages", "runs", "pong")
PONG = "--env PongNoFrameskip-v4"
WIDE = f"monobeast.py {PONG} --num_actors {{few}} --group_width 64 --batch_width 64"
ON_GPU = f"{PONG} --atari_backend cuda --num_actors 1"
STAGED = (  # by actors and shared memory, and with the games on the GPU
    f"{PONG} --num_actors {{most}} --group_width 32 --batch_width 32",
    f"{ON_GPU} --group_width 2048 --batch_width 1024",
    f"{ON_GPU} --group_width 8192 --batch_width 1024",
)
RUNS = (  # each without learning curves: how many steps/s a user sees
    f"monobeast.py {PONG}",
    WIDE,
    f"{WIDE} --compile",
    f"{WIDE} --cuda_graphs",
    f"monobeast.py {ON_GPU} --group_width 8192 --batch_width 1024 --compile",
    f"r2d2.py --preset paper {PONG} --cuda_graphs",
)
TO_18 = (
    f"monobeast.py --preset gpu_atari {PONG}",
    f"monobeast.py {PONG} --cuda_graphs --num_actors {{most}} --group_width 32 --batch_width 32 --learning_rate 7e-4",
)
GOAL = 18.0


@dataclass
class Options:
    """What to measure."""

    parts: tuple[Literal["tests", "emulator", "stages", "runs", "pong"], ...] = PARTS
    """Parts to run."""
    minutes: float = 10.0
    """Minutes for all pieces together. A piece that has less than 20 seconds left is not begun."""
    seconds: float = 10.0
    """Seconds that each of the runs trains behind its first row of metrics, and half of which each stage lasts."""
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

    if missing := what_is_missing():
        sys.exit("error: " + "; ".join(missing))
    card = torch.cuda.get_device_name()
    head = [
        f"{card} beside {usable_cores()} cores of {cpu_model()}, torch {torch.__version__}, Python "
        f"{sys.version.split()[0]}, commit {(code_version(ROOT) or 'unknown')[:10]}.",
        f"`{shlex.join(['python', 'benchmarks/gpu.py', *sys.argv[1:]])}`",
    ]
    path = Path(options.out) / f"gpu-{re.sub('[^a-z0-9]+', '-', card.lower())}"
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict = {"head": head, **{part: [] for part in PARTS}, "left out": []}
    deadline = time.monotonic() + 60 * options.minutes
    for part, name, limit, run in pieces(options, max(1, usable_cores() // 3), max(1, usable_cores() - 2)):
        left = deadline - time.monotonic()
        if part not in options.parts or (part == "runs" and not re.search(options.only, name)):
            continue
        if left < 20:
            found["left out"].append(name)
        else:
            found[part].append(run(min(limit, left)))
        path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(found))
    draw(found, path.with_suffix(".png"))
    print(report(found))


def what_is_missing() -> list[str]:
    """What this machine lacks, with the remedy."""
    import torch

    if not torch.cuda.is_available():
        return [f"torch {torch.__version__} sees no GPU: install a build with CUDA, and look at nvidia-smi"]
    missing = []
    for name, remedy in {"libatari": "make libatari", "pytest": "make test", "matplotlib": "make test"}.items():
        if not importlib.util.find_spec(name):
            missing.append(f"{name} is missing: {remedy}")
    try:
        kernels.compiled(kernels.SOURCES / "batch.cu", atari.options("pong", False), kernels.architecture_of(None))
    except (MissingPackage, kernels.BuildError) as error:
        missing.append(str(error))
    return missing


def pieces(options: Options, few: int, most: int) -> Iterator[tuple[str, str, float, Callable[[float], Any]]]:
    """Of each piece its part, its name, its limit of seconds, and what runs it within such a limit. What nobody has run
    comes first."""
    pytest = "-m pytest -q -rs --tb=line --durations=5 tests/test_gpu.py -k".split()
    games = "benchmarks/atari_gpu.py --games pong qbert riverraid --envs 1024 4096 16384 --seconds 1".split()
    yield "tests", "tests of games", 200, lambda limit: output([*pytest, "games"], limit)
    yield "emulator", "the emulator", 150, lambda limit: output(games, limit)
    to_18 = [f"{command.format(most=most)} --seed {options.seed}" for command in TO_18]
    yield "pong", to_18[0], 150, lambda limit: watched(to_18[0], limit, goal=GOAL)
    for arguments in STAGED:
        shape = arguments.format(most=most)
        yield "stages", shape, 90, lambda limit, shape=shape: staged(shape, options.seconds / 2, limit)
    for run in RUNS:
        command, seconds = run.format(few=few, most=most), 60.0 if "r2d2" in run else options.seconds
        yield "runs", command, 100, lambda limit, command=command, seconds=seconds: watched(command, limit, seconds)
    yield "tests", "all other tests", 200, lambda limit: output([*pytest, "not games"], limit)
    yield "pong", to_18[1], 150, lambda limit: watched(to_18[1], limit, goal=GOAL)


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


def staged(arguments: str, seconds: float, limit: float) -> dict:
    """Steps/s of MonoBeast in each stage of benchmarks/staged.py."""
    print("+ staged.py monobeast", arguments, flush=True)
    stages: dict = {"simulation": None, "+ inference": None, "+ learning": None}
    result = {"command": f"staged.py monobeast {arguments}", "stages": stages}
    with tempfile.TemporaryDirectory() as root, open(Path(root, "log"), "w+") as log:
        words = ["benchmarks/staged.py", "monobeast", *arguments.split(), "--root", root, "--name", "run"]
        words += ["--no_tensorboard", "--total_steps", "1000000000", "--log_steps", "4000"]
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
        )
        assert process.stdin
        metrics, began = Path(root, "run", "metrics.csv"), time.monotonic()
        while process.poll() is None and time.monotonic() - began < limit - 3 * (seconds + 1):
            if any(row["stats/stage"] >= 0 for row in read_rows(metrics)):
                break
            time.sleep(0.5)
        try:
            for stage in stages:
                process.stdin.write(f"{stage}\n")
                process.stdin.flush()
                time.sleep(seconds + 1)
            process.stdin.close()
            process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        for number, stage in enumerate(stages, start=1):
            rows = [row for row in read_rows(metrics) if row["stats/stage"] == number][1:]  # the first has both
            if len(rows) > 1:
                stages[stage] = (rows[-1]["step"] - rows[0]["step"]) / (3600 * (rows[-1]["hours"] - rows[0]["hours"]))
        if None in stages.values():
            log.seek(0)
            result["error"] = log.read()[-2000:]
    print(result, flush=True)
    return result


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
            result[name] = statistics.median(row.get(name, math.nan) for row in rows[1:])
    print({name: x for name, x in result.items() if name != "command"}, flush=True)
    return result


def read_rows(path: Path) -> list[dict[str, float]]:
    """The whole rows of metrics so far."""
    if not path.exists():
        return []
    with open(path) as file:
        lines = [line for line in file if line.endswith("\n")]
    return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(lines)]


def last_line(result: dict) -> str:
    return (result["error"].strip().splitlines() or ["no row of metrics in time"])[-1][:200]


def report(found: dict) -> str:
    """The result, in Markdown."""
    lines = ["# Beast on a GPU, by benchmarks/gpu.py", "", *found["head"], ""]
    if found["tests"]:
        lines += ["## tests/test_gpu.py: games on the GPU, then all others", ""]
        lines += [line for text in found["tests"] for line in ("```", *text.strip().splitlines()[-30:], "```", "")]
    for text in found["emulator"]:
        lines += ["## The emulator alone, by benchmarks/atari_gpu.py", "", text.strip(), ""]
    if found["stages"]:
        lines += ["## Steps/s by stage", "", "| flags | simulation | + inference | + learning |", "|---|---|---|---|"]
        for each in found["stages"]:
            speeds = ("failed" if x is None else f"{x:,.0f}" for x in each["stages"].values())
            lines.append(f"| `{each['command']}` | {' | '.join(speeds)} |")
            if "error" in each:
                lines.append(f"| | {last_line(each)} | | |")
        lines.append("")
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
                lines.append(f"| `{run['command']}` | failed: {last_line(run)} | | | | |")
                continue
            waits = f"{run['time/learner_wait']:.0%} | {run['time/inference_wait']:.0%}"
            cores = f"{run['cores/envs']:.1f} | {run['cores/process']:.1f}"
            lines.append(f"| `{run['command']}` | {run['steps_per_second']:,.0f} | {waits} | {cores} |")
        lines.append("")
    for number, pong in enumerate(found["pong"]):
        lines += [f"## Pong to a return of {GOAL:g} (the log's latest 100 games)", ""] if not number else []
        if "error" in pong:
            lines += [f"`{pong['command']}`: failed: {last_line(pong)}", ""]
        else:
            lines += [
                f"`{pong['command']}`: {pong['return'] or math.nan:.1f} after {pong['seconds']:.0f} s of training and "
                f"{pong['steps']:,.0f} steps, {pong['steps_per_second']:,.0f} steps/s; "
                f"{pong['wall_seconds']:.0f} s from start to end.",
                "",
            ]
    if found["left out"]:
        lines += ["## No time was left for", "", *(f"- {name}" for name in found["left out"])]
    return "\n".join(lines).rstrip() + "\n"


def draw(found: dict, path: Path) -> None:
    """Frames/s of the emulator over the number of environments, and steps/s by stage."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    speeds: dict[str, list[tuple[int, float]]] = {}
    for text in found["emulator"]:
        for game, envs, lanes, speed in re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| ([\d,]+) \|", text, re.M):
            speeds.setdefault(f"{game}, {lanes} lanes", []).append((int(envs), float(speed.replace(",", ""))))
    for name, points in speeds.items():
        left.plot(*zip(*points), marker="o", label=name)
    left.set(title="Atari on the GPU", xlabel="environments", ylabel="frames/s", xscale="log", yscale="log")
    if speeds:
        left.legend(fontsize="small")
    for number, each in enumerate(found["stages"]):
        stages = [value or 0 for value in each["stages"].values()]
        label = "games on the GPU" if "cuda" in each["command"] else "shared memory"
        width = re.search(r"--group_width (\d+)", each["command"])
        right.bar(
            [k + 0.25 * number for k in range(3)], stages, 0.22, label=f"{label}, K = {width[1] if width else '?'}"
        )
    right.set(title="MonoBeast by stage", ylabel="steps/s")
    right.set_xticks([0.25, 1.25, 2.25], ["simulation", "+ inference", "+ learning"])
    if found["stages"]:
        right.legend(fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    import tyro

    main(tyro.cli(Options, description=__doc__))
