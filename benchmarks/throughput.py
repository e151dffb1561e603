"""How fast this machine simulates, acts and learns, and how much of its cores that uses.

    python benchmarks/throughput.py          # about 10 minutes; writes benchmarks/results/throughput-<env>.{json,md}

Measured in turn, `--repeats` times, so that a change in the machine's load falls on all alike:

- alone: CPU seconds per agent step of each stage by itself, with one thread and warm caches;
- simulation: the actor processes with random actions; + inference: actions from the net, rollouts thrown away;
  + learning: `monobeast.py` as a user runs it, its first seconds left out;
- PolyBeast: the same with `polybeast.py` and its own env servers on unix sockets, where libbeast is built.

The work-conservation ratio is steps/s x (CPU seconds per step of all stages alone) / cores: 1 means that nothing waits.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)


@dataclass
class Options:
    """What to measure."""

    env: str = "BreakoutNoFrameskip-v4"
    """Environment id."""
    seconds: float = 30.0
    """Measured seconds of each whole stage, after as many of warm-up as `warmup` says."""
    warmup: float = 20.0
    """Seconds before the measurement: imports, ROMs, first episodes."""
    batch_width: int = 0
    """Columns of one update; 0 takes monobeast.py's default."""
    repeats: int = 3
    """Repetitions; the table shows their median, lowest and highest."""
    out: str = os.path.join(ROOT, "benchmarks", "results")
    """Directory for the JSON and Markdown files."""


def main(options: Options) -> None:
    import monobeast

    flags = monobeast.Flags(env=options.env, total_steps=10**9, lr_decay="none")
    flags = monobeast.validate(replace(flags, batch_width=options.batch_width or flags.batch_width))
    monobeast.keep_freed_memory()
    print(
        f"{options.env}: {flags.num_actors} actors of 2 groups of {flags.group_width} environments, "
        f"T={flags.unroll_length}, B={flags.batch_width}"
    )
    frames = monobeast.envs.frames_per_step(options.env)
    runs: dict[str, list[float]] = {}
    memory: dict = {}
    for repeat in range(options.repeats):
        measured = {
            **alone(flags),
            "simulation": with_actors(flags, options, memory, infer=False),
            "+ inference": with_actors(flags, options, memory, infer=True),
            "+ learning": trained("monobeast.py", flags, options),
        }
        if importlib.util.find_spec("libbeast"):
            measured["PolyBeast"] = trained("polybeast.py", flags, options)
        for name, value in measured.items():
            runs.setdefault(name, []).append(value)
        print(
            f"repetition {repeat + 1}: " + ", ".join(f"{name} {value:.5g}" for name, value in measured.items()),
            flush=True,
        )
    median = {name: statistics.median(values) for name, values in runs.items()}
    cpu_seconds = sum(median[f"{stage} alone"] for stage in ("env", "inference", "learning"))
    result = {
        "command": "python benchmarks/throughput.py " + " ".join(sys.argv[1:]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip(),
        "hardware": f"{cpu_model()}, {os.cpu_count()} cores",
        "torch": monobeast.torch.__version__,
        "flags": asdict(flags),
        "runs": runs,
        "median": median,
        "work_conservation": median["+ learning"] * cpu_seconds / os.cpu_count(),
        **memory,
    }
    if "PolyBeast" in runs:  # pair by pair: the two ran one after the other
        pairs = zip(runs["PolyBeast"], runs["+ learning"])
        result["poly_share"] = statistics.median(poly / mono for poly, mono in pairs)
    lines = [
        f"# Throughput on {options.env}",
        "",
        f"{result['hardware']}, torch {result['torch']}, T={flags.unroll_length}, B={flags.batch_width}, "
        f"{flags.net} net, "
        f"{flags.num_actors} actors of 2 groups of {flags.group_width} environments, commit {result['commit'][:10]}.",
        "",
        f"| stage | agent steps/s: median (lowest to highest) | frames/s ({frames} a step) | share of simulation |",
        "|---|---|---|---|",
        *(
            f"| {name} | {median[name]:,.0f} ({min(runs[name]):,.0f} to {max(runs[name]):,.0f}) "
            f"| {median[name] * frames:,.0f} "
            f"| {median[name] / median['simulation']:.0%} |"
            for name in ("simulation", "+ inference", "+ learning", "PolyBeast")
            if name in runs
        ),
        "",
        "| stage alone, one thread | CPU ms per agent step |",
        "|---|---|",
        *(f"| {stage} | {1e3 * median[f'{stage} alone']:.3f} |" for stage in ("env", "inference", "learning")),
        f"| all | {1e3 * cpu_seconds:.3f} |",
        "",
        f"Work-conservation ratio: {result['work_conservation']:.2f}. Shared memory: "
        f"{memory['shared_mb_per_env']:.2f} MB per environment. Resident memory of an actor: "
        f"{memory['actor_mb']:.0f} MB.",
        *([f"PolyBeast's share of MonoBeast's speed: {result['poly_share']:.2f}."] if "PolyBeast" in runs else []),
        "",
        f"`{result['command']}`",
    ]
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, f"throughput-{options.env.replace('/', '-')}")
    with open(path + ".json", "w") as file:
        json.dump(result, file, indent=1)
    with open(path + ".md", "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))


def alone(flags) -> dict[str, float]:
    """CPU seconds per agent step of each stage by itself, on one thread."""
    import monobeast

    spaces = monobeast.probe_env(flags)
    learner = monobeast.make_learner(flags, *spaces)
    with contextlib.closing(monobeast.tuning.Stages(flags, monobeast.create_env, spaces)) as stages:
        costs = {
            "env": stages.env(4.0),
            "inference": stages.inference(learner.net, 4.0),
            "learning": stages.learning(learner, 4.0),
        }
    return {f"{stage} alone": cost.cpu for stage, cost in costs.items()}


def with_actors(flags, options: Options, memory_use: dict, infer: bool) -> float:
    """Agent steps/s of the actor processes, with random actions or with the net's, and no learner."""
    import torch

    import monobeast

    torch.set_num_threads(1)
    device, amp = monobeast.choose_device(flags.device, flags.amp)
    observation_spaces, action_space = monobeast.probe_env(flags)
    fields = monobeast.rollout_fields(observation_spaces, action_space)
    memory = monobeast.RolloutMemory(fields, flags.num_slots, flags.unroll_length, flags.group_width)
    slots = monobeast.Slots(flags.num_slots)
    net = monobeast.Net(observation_spaces, action_space, flags, amp).to(device)
    actors = monobeast.actors.ActorProcesses(
        os.path.abspath(monobeast.__file__),
        flags,
        memory,
        flags.num_actors,
        monobeast.GROUPS_PER_ACTOR,
        lambda group, life: 1000 * group + life,
        max_restarts=0,
        timeout=60,
        niceness=flags.actor_niceness,
    )
    try:
        inference = monobeast.Inference(
            net,
            memory,
            slots,
            actors,
            monobeast.PublishedWeights(net, 0),
            flags.num_actors * 2,
            torch.Generator().manual_seed(1),
        )
        if not infer:
            inference._act = lambda numbers: act_randomly(inference, numbers, action_space)

        def run(seconds: float) -> int:
            rollouts, deadline = 0, time.monotonic() + seconds
            while time.monotonic() < deadline:
                inference.step(timeout=0.2)
                while (taken := slots.take(1, block=False)) is not None:
                    slots.release(taken)
                    rollouts += 1
            return rollouts

        run(options.warmup)
        began = time.monotonic()
        rollouts = run(options.seconds)
        seconds = time.monotonic() - began
        num_envs = flags.num_actors * monobeast.GROUPS_PER_ACTOR * flags.group_width
        memory_use["shared_mb_per_env"] = memory.num_bytes / num_envs / 1e6
        memory_use["actor_mb"] = max(actors.resident_bytes()) / 1e6
        return rollouts * flags.unroll_length * flags.group_width / seconds
    finally:
        actors.close()


def act_randomly(inference, numbers: list[int], action_space) -> None:
    for number in numbers:
        group = inference.groups[number]
        row = inference.memory.row(group.slot, group.row + 1)
        row["action"][...] = [action_space.sample() for _ in row["action"]]
        inference._advance(number)


def trained(script: str, flags, options, *more: str) -> float:
    """Agent steps/s of a whole training run, read from its metrics after the warm-up."""
    with tempfile.TemporaryDirectory() as root:
        minutes = (options.warmup + options.seconds) / 60
        command = [sys.executable, os.path.join(ROOT, script), "--env", flags.env, "--root", root]
        command += f"--name bench --total_minutes {minutes} --batch_width {flags.batch_width} --log_steps 1000".split()
        command += ["--no_tensorboard", "--lr_decay", "none", "--total_steps", "1000000000", *more]
        subprocess.run(command, check=True)
        with open(os.path.join(root, "bench", "metrics.csv")) as file:
            rows = [(float(row["hours"]) * 3600, float(row["step"])) for row in csv.DictReader(file)]
    rows = [row for row in rows if row[0] >= options.warmup]
    (first_second, first_step), (last_second, last_step) = rows[0], rows[-1]
    return (last_step - first_step) / (last_second - first_second)


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
