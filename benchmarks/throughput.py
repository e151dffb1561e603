"""How fast this machine simulates, acts and learns, what that costs, and how much of its cores it uses.

    python benchmarks/throughput.py          # about 12 minutes; writes benchmarks/results/throughput-<env>.{json,md}
    python benchmarks/throughput.py --agent r2d2 --env PongNoFrameskip-v4 --envs 64 --seconds 20

For each number of environments in `--envs`, `--repeats` times in turn, so that a change in the machine's load falls on
all alike:

- alone: CPU seconds per agent step of each stage by itself, with one thread, warm caches and groups of at most 32;
- each variant, libbeast permitting, in stages (staged.py): simulation with random actions; + inference; + learning.
  The first seconds of each stage are left out. One run a variant and number does all repetitions, as hundreds of
  environments are slow to make; it rests while the others are measured, and keeps its memory (6 GB, all together).

The work-conservation ratio is steps/s x (CPU seconds per step of all stages alone) / cores: 1 means that nothing waits.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Literal

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from soak import memory_of_tree  # noqa: E402
from staged import PAUSE, STAGES  # noqa: E402

VARIANTS = {"monobeast": "MonoBeast", "polybeast": "PolyBeast", "r2d2": "R2D2"}
ALONE_WIDTH = 32  # at most
NULL, NULL_WIDTH = "null_env:Null-v0", 64
Found = dict[str, dict[str, list[float]]]  # what was measured ("alone" or a variant) -> name -> a value a repetition


@dataclass
class Options:
    """What to measure."""

    agent: Literal["monobeast", "r2d2"] = "monobeast"
    """MonoBeast and, with libbeast, PolyBeast; or R2D2, whose measured seconds have to hold several rollouts."""
    env: str = "BreakoutNoFrameskip-v4"
    """Environment id."""
    envs: tuple[int, ...] = (16, 64, 512)
    """Numbers of environments; each a multiple of twice the actors, which have two groups each."""
    actors: int = 0
    """Actor processes, and env servers of PolyBeast; 0 takes the most, up to the cores, among which all `envs` can be
    divided."""
    seconds: float = 4.0
    """Measured seconds of a stage; more with over 256 environments, whose rollouts are full less often."""
    warmup: float = 1.5
    """First seconds of a stage that are left out."""
    repeats: int = 3
    """Repetitions; the tables show their median, lowest and highest."""
    null: bool = True
    """Measure environments that do no work, too: what the plumbing carries."""
    arguments: str = ""
    """More arguments for the variants, as in `--arguments="--batch_width 32"`."""
    name: str = ""
    """Name of the result; empty takes the environment's, of R2D2 with `r2d2-` before it."""
    out: str = str(ROOT / "benchmarks" / "results")
    """Directory for the JSON and Markdown files."""


def main(options: Options) -> None:
    import torch
    import tyro

    import monobeast
    from beast.device import choose_device, keep_freed_memory
    from beast.envs.probe import probe_env
    from beast.feeds.actors import GROUPS_PER_ACTOR
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import code_version

    commit = code_version(ROOT)  # before anybody edits it
    keep_freed_memory()
    arguments = ["--env", options.env, *options.arguments.split()]
    odd: list[int] = []
    for num_actors in [options.actors] if options.actors else range(usable_cores(), 0, -1):
        num_groups = GROUPS_PER_ACTOR * num_actors
        odd = [num_envs for num_envs in options.envs if num_envs < num_groups or num_envs % num_groups]
        if not odd:
            break
    else:
        sys.exit(
            f"error: --envs {odd[0]}: {num_actors} actors want a multiple of {num_groups}; or choose other --actors"
        )
    agent = importlib.import_module(options.agent)
    defaults = replace(tyro.cli(agent.Flags, args=arguments, use_underscores=True), num_actors=num_actors)
    variants = [options.agent]
    if options.agent == "monobeast" and importlib.util.find_spec("libbeast"):
        variants.append("polybeast")
    flags_of = {
        num_envs: agent.validate(replace(defaults, group_width=num_envs // num_groups, num_slots=0))
        for num_envs in options.envs
    }
    found: dict[int, Found] = {num_envs: {} for num_envs in options.envs}
    plumbing: list[float] = []
    is_on_gpu = choose_device(defaults.device, defaults.amp)[0].type == "cuda"
    gpus = [torch.cuda.get_device_name()] if is_on_gpu else []
    env_spaces = probe_env(monobeast.create_env, defaults)
    result = {
        "command": shlex.join(["python", "benchmarks/throughput.py", *sys.argv[1:]]),
        "commit": commit,
        "atari_backend": env_spaces.atari_backend,
        "hardware": ", ".join([cpu_model(), f"{usable_cores()} cores", *gpus]),
        "cores": usable_cores(),
        "torch": torch.__version__,
        "flags": asdict(defaults),
        "frames_per_step": env_spaces.frames_per_step,
        "found": found,
        "null_env_steps_per_second": plumbing,
    }
    name = options.name or ("r2d2-" if options.agent == "r2d2" else "") + options.env
    path = Path(options.out) / f"throughput-{name.replace('/', '-')}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as running:
        runs = {
            num_envs: {v: running.enter_context(StagedRun(v, arguments, flags)) for v in variants}
            for num_envs, flags in flags_of.items()
        }
        measures_null = options.null and options.agent == "monobeast"
        if measures_null:
            flags = replace(defaults, group_width=NULL_WIDTH)
            null_run = running.enter_context(StagedRun("monobeast", ["--env", NULL], flags))
        print("all runs have begun", flush=True)
        for repeat in range(options.repeats):
            for num_envs, flags in flags_of.items():
                measured = found[num_envs]
                # Environments are slow to make, and a wider group hardly costs less.
                width = min(flags.group_width, ALONE_WIDTH)
                narrow = agent.validate(replace(flags, group_width=width, num_slots=0))
                add(measured, "alone", alone(agent, narrow, options.seconds / 4))
                # When learning begins, environments run ahead until their rollouts wait for the learner.
                warmups = [options.warmup, options.warmup, options.warmup * max(1, num_envs / 64)]
                for variant, run in runs[num_envs].items():
                    add(measured, variant, run.measure(options.seconds * max(1, num_envs / 256), warmups))
                speeds = (f"{VARIANTS[variant]} {measured[variant]['+ learning'][-1]:,.0f}" for variant in variants)
                print(f"repetition {repeat + 1}, {num_envs} environments: {', '.join(speeds)} steps/s", flush=True)
            if measures_null:
                plumbing.append(null_run.measure(options.seconds, [options.warmup])["simulation"])
                print(f"repetition {repeat + 1}, environments without work: {plumbing[-1]:,.0f} steps/s", flush=True)
            text = report(result)  # a later repetition may fail
            Path(f"{path}.json").write_text(json.dumps(result, indent=1) + "\n")
            Path(f"{path}.md").write_text(text)
    print(text)


def add(found: Found, what: str, values: dict[str, float]) -> None:
    for name, value in values.items():
        found.setdefault(what, {}).setdefault(name, []).append(value)


def alone(agent: ModuleType, flags, seconds: float) -> dict[str, float]:
    """CPU seconds per agent step of each stage by itself, on one thread, and bytes of one row."""
    from beast.envs.probe import probe_env
    from beast.envs.rows import rollout_fields
    from beast.run.tuning import Stages

    spaces = probe_env(agent.create_env, flags)
    learner = agent.make_learner(flags, spaces)
    is_replay = hasattr(flags, "replay_ratio")
    stage_flags = replace(flags, batch_width=flags.group_width) if is_replay else flags  # the replay takes a group's
    with contextlib.closing(Stages(stage_flags, agent.create_env, spaces, seconds)) as stages:
        costs = {}
        if is_replay:  # first: when the environments step on, row 0 is no longer the one before row 1
            costs["learner"] = learning_from_replay(agent, flags, spaces, learner, stages.rollouts[0], 4 * seconds)
        else:
            costs["learner"] = stages.learning(learner, agent.update, num_threads=1).cpu
        costs |= {"env": stages.env().cpu, "inference": stages.inference(learner.net).cpu}
    fields = rollout_fields(spaces)
    return {
        **costs,
        "row bytes": sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in fields.values()),
    }


def learning_from_replay(agent: ModuleType, flags, spaces, learner, rollout: dict, seconds: float) -> float:
    """CPU seconds per agent step of `agent.learn`: storing this rollout again and again, and all updates on it."""
    import torch

    from beast.feeds.actors import GROUPS_PER_ACTOR as num_groups
    from beast.learn.published import PublishedWeights
    from beast.learn.replay import RatioLimiter, make_replay

    torch.set_num_threads(1)
    state = learner.net.initial_state(flags.group_width)
    sizes = [x.shape[-1] for x in state]
    replay = make_replay(replace(flags, replay_gb=0.1), spaces, sizes, num_groups, learner.random)
    limiter = RatioLimiter(flags.replay_ratio, flags.batch_width * flags.trained, 0)
    times: list[tuple[float, float, int]] = []  # wall, CPU, steps

    def rollouts():
        while len(times) < 6 * num_groups or times[-1][0] < times[4 * num_groups][0] + seconds:
            rollout["group"][...] = len(times) % num_groups
            yield rollout, state
            times.append((time.monotonic(), time.process_time(), limiter.steps))

    training = SimpleNamespace(
        flags=flags,
        device=next(learner.net.parameters()).device,
        rollouts=lambda feed: rollouts(),
        ends=lambda feed: False,
        finished=lambda: False,
        record=lambda *_: None,
    )
    agent.learn(training, learner, None, PublishedWeights(learner.net, 0), replay, limiter)
    (_, begin, steps_before), (_, end, steps) = times[4 * num_groups], times[-1]  # sequences are whole by then
    return (end - begin) / (steps - steps_before)


class StagedRun:
    """A run of a variant that goes through stages when it is told to, and rests in between. A context: its end ends
    the run, which begins at once and rests as soon as every environment has filled a rollout."""

    def __init__(self, variant: str, arguments: list[str], flags):
        self._root = tempfile.TemporaryDirectory()
        command = [sys.executable, str(ROOT / "benchmarks" / "staged.py"), variant]
        command += [*arguments, "--root", self._root.name, "--name", "run", "--no_tensorboard"]
        command += [] if variant == "r2d2" else ["--lr_decay", "none"]
        # One thread, as `alone` has: another's CPU time would not be counted.
        command += f"--learner_threads 1 --group_width {flags.group_width}".split()
        command += ["--log_steps", "5000" if NULL in arguments else "200", "--checkpoint_minutes", "1000"]
        command += ["--total_steps", str(10**12)]  # the end of the input ends it
        command += ["--num_servers" if variant == "polybeast" else "--num_actors", str(flags.num_actors)]
        paths = [str(ROOT / "benchmarks"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._command = " ".join(command)
        self._log = open(os.path.join(self._root.name, "log"), "w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, env=environment, text=True
        )
        self._num_orders = 0

    def __enter__(self) -> StagedRun:
        try:
            while not any(row["stats/stage"] == 0 for row in self.metrics()):
                self._sleep(0.5)
            self._order(PAUSE)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._root.cleanup()

    def measure(self, seconds: float, warmups: list[float]) -> dict[str, float]:
        """As many stages as there are warm-ups: agent steps/s of each, and of the last one cores, waits, lag and
        memory."""
        run: dict[str, float] = {}
        for stage, warmup in zip(STAGES, warmups):
            self._order(stage)
            self._sleep(warmup + seconds)
            # A row in which a stage began is partly of the one before.
            rows = self.metrics()
            whole = [pair for pair in pairwise(rows) if pair[0]["stats/stage"] == pair[1]["stats/stage"]]
            whole = [pair for pair in whole if pair[0]["stats/stage"] == self._num_orders]
            whole = [pair for pair in whole if pair[0]["hours"] >= whole[0][0]["hours"] + warmup / 3600]
            if len(whole) < 2:
                sys.exit(f"error: {len(whole)} updates fell into {seconds:g} seconds: give more --seconds")
            if rows[-1]["stats/env_restarts"]:
                self._fail("had to restart environments, which disturbs all others, too")
            durations = np.array([3600 * (row["hours"] - before["hours"]) for before, row in whole])
            # Rows come in bursts, when groups fill their rollouts together: a line through them, not first and last.
            points = [(3600 * row["hours"], row["step"]) for row in (whole[0][0], *(row for _, row in whole))]
            run[stage] = float(np.polyfit(*zip(*points), 1)[0])
            for name in set.intersection(*(set(row) for _, row in whole)):  # not all rows have those of environments
                if name.startswith(("cores/", "time/", "stats/")):
                    run[name] = float(durations @ [row[name] for _, row in whole] / durations.sum())
            run["stats/policy_lag_max"] = max(row["stats/policy_lag_max"] for _, row in whole)
        run |= memory_of_tree(self._process.pid)
        self._order(PAUSE)
        return run

    def _order(self, stage: str) -> None:
        try:
            self._process.stdin.write(f"{stage}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("has ended")
        self._num_orders += 1

    def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            self._fail("has ended")

    def _fail(self, what: str) -> None:
        self._log.seek(0)
        sys.exit(f"error: {self._command} {what}:\n{self._log.read()[-4000:]}")

    def metrics(self) -> list[dict[str, float]]:
        """The rows so far."""
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self._root.name, "run", "metrics.csv")) as file:
            lines = [line for line in file if line.endswith("\n")]  # the last one may be half written
            return [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(lines)]
        return []


def report(result: dict) -> str:
    """The tables, in Markdown."""
    found, flags, cores, frames = (result[name] for name in ("found", "flags", "cores", "frames_per_step"))
    speed = header(
        *("simulation: agent steps/s", "+ inference", "share of simulation", "+ learning", "share of simulation"),
        *("frames/s", "work conservation"),
    )
    costs = header(
        *("env: CPU ms a step, alone → in the run", "inference", "learner", "other threads"),
        *("waits: env process, inference, learner", "policy lag: mean, highest"),
    )
    memory = header(
        *("shared memory, MB", "memory of its own, MB", "copies of an observation", "bytes of its row"),
    )
    for num_envs, measured in found.items():
        single = {name: statistics.median(values) for name, values in measured["alone"].items()}
        sum_alone = sum(single[stage] for stage in ("env", "inference", "learner"))
        for variant in (variant for variant in VARIANTS if variant in measured):
            runs = measured[variant]
            run = {name: statistics.median(values) for name, values in runs.items()}
            learning, label = run["+ learning"], f"| {num_envs} | {VARIANTS[variant]} "
            in_run = {"env": "envs", "inference": "inference", "learner": "learner"}
            in_run = {stage: run[f"cores/{name}"] / learning for stage, name in in_run.items()}
            other = run["cores/process"] / learning - in_run["inference"] - in_run["learner"]
            waits = 1 - run["cores/envs"] / flags["num_actors"], run["time/inference_wait"], run["time/learner_wait"]
            speed.append(
                f"{label}| {spread(runs['simulation'])} | {spread(runs['+ inference'])} "
                f"| {run['+ inference'] / run['simulation']:.0%} | {spread(runs['+ learning'])} "
                f"| {learning / run['simulation']:.0%} | {learning * frames:,.0f} "
                f"| {learning * sum_alone / cores:.2f} |"
            )
            costs.append(
                label
                + "".join(f"| {1e3 * single[stage]:.3f} → {1e3 * cost:.3f} " for stage, cost in in_run.items())
                + f"| {1e3 * other:.3f} | {', '.join(f'{wait:.0%}' for wait in waits)} "
                + f"| {run['stats/policy_lag_mean']:.1f}, {run['stats/policy_lag_max']:.0f} |"
            )
            memory.append(
                f"{label}| {max(runs['Pss_Shmem']) / 1e6:,.0f} | {max(runs['Pss_Anon']) / 1e6:,.0f} "
                f"| {copies(variant, num_envs, flags):.2f} | {single['row bytes']:,.0f} |"
            )
    lines = [
        f"# Throughput on {flags['env']}",
        "",
        f"{result['hardware']}, torch {result['torch']}, {batch_of(flags)}, {flags['net']} net, "
        f"{flags['num_actors']} actors (or env servers) of 2 groups, commit "
        f"{(result['commit'] or 'unknown')[:10]}. Medians of {len(next(iter(found.values()))['alone']['env'])} "
        f"repetitions, lowest to highest in brackets; a step is {frames} frames.",
        "",
        *speed,
        "",
        "CPU time while it learns, and what waits: an env process whenever no core works for it, be it that it has no "
        "actions or no core.",
        "",
        *costs,
        "",
        "Memory while it learns, at its highest, pages that processes share counted once, and what happens to an "
        "observation.",
        "",
        *memory,
        "",
        "An observation is copied: MonoBeast: into its slot, where inference reads it (the last row of a rollout "
        "twice), and into its batch if B > K. PolyBeast: into its row, message and gRPC's buffer, into and out of the "
        "socket, into its rollout (the last row twice), and into its batch unless B = K. R2D2: into its slot like "
        "MonoBeast's, into the replay, and into each batch that it is drawn for.",
    ]
    few, many = min(found), max(found)
    for variant in VARIANTS if few != many else ():
        if variant in found[few]:
            own, shared = (
                (max(found[many][variant][kind]) - max(found[few][variant][kind])) / (many - few) / 1e6
                for kind in ("Pss_Anon", "Pss_Shmem")
            )
            lines += [
                "",
                f"From {few} to {many} environments, each costs {VARIANTS[variant]} {shared:.2f} MB of shared memory "
                f"and {own:.2f} MB of its own.",
            ]
    if plumbing := result["null_env_steps_per_second"]:
        lines += [
            "",
            f"Environments without work and with observations as large as Atari's, inference and learning left out: "
            f"MonoBeast's plumbing carries {spread(plumbing)} steps/s with groups of {NULL_WIDTH}.",
        ]
    if "polybeast" in found[next(iter(found))]:
        lines += ["", "PolyBeast against MonoBeast, pair by pair:"]
        for num_envs, measured in found.items():
            pairs = zip(measured["polybeast"]["+ learning"], measured["monobeast"]["+ learning"])
            lines[-1] += f" {statistics.median(poly / mono for poly, mono in pairs):.2f} with {num_envs} environments,"
        lines[-1] = lines[-1].rstrip(",") + "."
    return "\n".join([*lines, "", f"`{result['command']}`"]) + "\n"


def header(*columns: str) -> list[str]:
    names = ("environments", "", *columns)
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def copies(variant: str, num_envs: int, flags: dict) -> float:
    """How often an observation is copied until it is learned from, as the code has it; a CPU's inference adds none."""
    K, B, T = num_envs // (2 * flags["num_actors"]), flags["batch_width"], flags["unroll_length"]
    if variant == "r2d2":
        drawn = flags["replay_ratio"] * (flags["burn_in"] + flags["trained"]) / flags["trained"]
        return 2 + 1 / T + drawn
    return 1 + 1 / T + (B > K) if variant == "monobeast" else 6 + 1 / T + (B != K)


def batch_of(flags: dict) -> str:
    """The size of an update, in words."""
    if "replay_ratio" in flags:
        return (
            f"updates of {flags['batch_width']} sequences of {flags['burn_in']} + {flags['trained']} rows, replay "
            f"ratio {flags['replay_ratio']:g}"
        )
    return f"T={flags['unroll_length']}, B={flags['batch_width']}"


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def trained(script: str, flags, options, *more: str) -> float:
    """Agent steps/s of a whole training run, read from its metrics after the warm-up."""
    with tempfile.TemporaryDirectory() as root:
        minutes = (options.warmup + options.seconds) / 60
        command = [sys.executable, str(ROOT / script), "--env", flags.env, "--root", root]
        command += f"--name bench --total_minutes {minutes} --batch_width {flags.batch_width} --log_steps 1000".split()
        command += ["--no_tensorboard", "--lr_decay", "none", "--total_steps", "1000000000", *more]
        subprocess.run(command, check=True)
        with open(os.path.join(root, "bench", "metrics.csv")) as file:
            rows = [(float(row["hours"]) * 3600, float(row["step"])) for row in csv.DictReader(file)]
    rows = [row for row in rows if row[0] >= options.warmup]
    if len(rows) < 2:
        sys.exit(f"error: {' '.join(command)} had not begun to train after {60 * minutes:.0f} s: give more --warmup")
    (first_second, first_step), (last_second, last_step) = rows[0], rows[-1]
    return (last_step - first_step) / (last_second - first_second)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
