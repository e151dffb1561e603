"""MonoBeast beside Sample Factory 2.1.1 and Stable-Baselines3 on the same task and cores, one after the other, again
and again.

    python benchmarks/peers/compare.py            # about 40 minutes; writes benchmarks/results/peers.{json,md}
    python benchmarks/peers/compare.py --lstm     # a core of 512 units in MonoBeast and Sample Factory

Breakout 84x84x4, Nature CNN with 512 features, rollouts of 20 steps, updates of 640 steps, one epoch, each sample used
once. Each of them runs in every setting of its sweep below first, then in the fastest of them in turn with the others.
The peers run their own Atari code in virtual environments of their own. All are measured by the steps that their
learners have taken in, the warm-up left out. Sample Factory uses GAE: V-trace crashes in this release (its issue 278).
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import throughput  # noqa: E402

HERE = Path(__file__).resolve().parent
FRAMES_PER_STEP = 4
STARTUP = 120.0  # seconds that a peer's processes may take to start
# With 64 to 256 environments; Stable-Baselines3 with the 32 that make its update 640 steps.
MONOBEAST = ["--num_actors 2 --group_width 16", "--num_actors 1 --group_width 64", "--num_actors 2 --group_width 64"]
SAMPLE_FACTORY = [  # two workers, one for each core, with two groups of environments each; 32 to 128 environments
    "--num_workers 2 --num_envs_per_worker 16 --worker_num_splits 2",
    "--num_workers 2 --num_envs_per_worker 32 --worker_num_splits 2",
    "--num_workers 2 --num_envs_per_worker 64 --worker_num_splits 2",
]
STABLE_BASELINES3 = ["dummy 2", "subproc 1"]  # see train_stable_baselines3.py
TASK = (
    "--env atari_breakout --device cpu --async_rl True --serial_mode False --rollout 20 --batch_size 640"
    " --num_batches_per_epoch 1 --num_epochs 1 --normalize_input False --normalize_returns False"
    " --train_for_env_steps 1000000000 --save_every_sec 100000 --save_best_every_sec 100000"
)
EMULATORS = {"beast": "Beast's emulator", "ale": "ale-py"}
LSTM = "--use_rnn True --rnn_type lstm --rnn_size 512 --recurrence 20"


@dataclass
class Options:
    """What to compare."""

    seconds: float = 120.0
    """Measured seconds of each run."""
    sweep_seconds: float = 30.0
    """Measured seconds of each setting of a sweep."""
    warmup: float = 20.0
    """Seconds before the measurement."""
    repeats: int = 3
    """Rounds of runs; the table shows their median, lowest and highest."""
    lstm: bool = False
    """Compare with an LSTM of 512 units in MonoBeast and Sample Factory; Stable-Baselines3 has none."""
    fp32: bool = True
    """Measure MonoBeast without bf16, too."""
    sample_factory: str = str(ROOT / ".venv-sample-factory")
    """Its virtual environment, made where there is none."""
    stable_baselines3: str = str(ROOT / ".venv-stable-baselines3")
    """Its virtual environment, made where there is none."""
    out: str = str(ROOT / "benchmarks" / "results")
    """Directory for the JSON and Markdown files."""


def main(options: Options) -> None:
    import monobeast
    from beast.envs.probe import probe_env
    from beast.machine import cpu_model, usable_cores
    from beast.run.directory import code_version

    commit = code_version(ROOT)  # before anybody edits it
    flags = monobeast.Flags(env="BreakoutNoFrameskip-v4", batch_width=32)
    if options.lstm:
        flags = replace(flags, core="lstm", core_size=512)
    core = ["--core", flags.core, "--core_size", str(flags.core_size)]

    def mono(setting: str, seconds: float) -> float:
        options_of_run = replace(options, seconds=seconds)
        return throughput.trained("monobeast.py", flags, options_of_run, *core, *setting.split())

    factory_python = install(options.sample_factory, "requirements-sample-factory.txt")
    measures: dict[str, tuple[Callable[[str, float], float], list[str]]] = {
        "MonoBeast": (mono, MONOBEAST),
        "Sample Factory": (
            lambda setting, seconds: sample_factory(
                factory_python,
                f"{TASK} {LSTM if options.lstm else '--use_rnn False'} {setting}",
                options.warmup,
                seconds,
            ),
            SAMPLE_FACTORY,
        ),
    }
    pythons = [factory_python]
    if not options.lstm:
        baselines_python = install(options.stable_baselines3, "requirements-stable-baselines3.txt")
        pythons.append(baselines_python)
        measures["Stable-Baselines3"] = (
            lambda setting, seconds: stable_baselines3(baselines_python, setting, options.warmup, seconds),
            STABLE_BASELINES3,
        )
    sweeps: dict[str, dict[str, float]] = {}
    for name, (measure, settings) in measures.items():
        sweeps[name] = {}
        for setting in settings:
            sweeps[name][setting] = measure(setting, options.sweep_seconds)
            print(f"{sweeps[name][setting]:7,.0f} steps/s  {name} {setting}", flush=True)
    best = {name: max(sweep, key=sweep.get) for name, sweep in sweeps.items()}
    turns = {name: (measure, best[name]) for name, (measure, _) in measures.items()}
    if options.fp32:
        turns["MonoBeast, --amp off"] = (mono, f"{best['MonoBeast']} --amp off")
    runs: dict[str, list[float]] = {name: [] for name in turns}
    result = {
        "command": "python benchmarks/peers/compare.py " + " ".join(map(shlex.quote, sys.argv[1:])),
        "commit": commit,
        "hardware": f"{cpu_model()}, {usable_cores()} cores",
        "atari_backend": probe_env(monobeast.create_env, flags).atari_backend,
        "versions": [versions(python) for python in pythons],
        "best": best,
        "sweeps": sweeps,
        "runs": runs,
        "flags": asdict(flags),
        "lstm": options.lstm,
    }
    path = Path(options.out) / ("peers-lstm" if options.lstm else "peers")
    path.parent.mkdir(parents=True, exist_ok=True)
    for repeat in range(options.repeats):
        turn = {name: measure(setting, options.seconds) for name, (measure, setting) in turns.items()}
        for name, value in turn.items():
            runs[name].append(value)
        print(f"repetition {repeat + 1}: " + ", ".join(f"{k} {v:,.0f}" for k, v in turn.items()), flush=True)
        # Written after each: the next one may fail.
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(result))
    print(report(result))


def report(result: dict) -> str:
    runs, best = result["runs"], result["best"]
    peers = [name for name in runs if not name.startswith("MonoBeast")]
    model = "Nature CNN and an LSTM of 512 units" if result["lstm"] else "Nature CNN"
    lines = [
        f"# MonoBeast beside {' and '.join(peers)} on Breakout, {model}",
        "",
        f"{result['hardware']}; T=20, 640 steps an update, one epoch; commit {(result['commit'] or 'unknown')[:10]}. "
        f"The peers ran with {'; '.join(result['versions'])}.",
        "",
        "| | agent steps/s: median (lowest to highest) | frames/s | setting |",
        "|---|---|---|---|",
        *(
            f"| {name} | {throughput.spread(values)} | {FRAMES_PER_STEP * statistics.median(values):,.0f} "
            f"| `{best.get(name, 'the same')}` |"
            for name, values in runs.items()
        ),
        "",
    ]
    for name in runs:
        for peer in peers if name.startswith("MonoBeast") else ():
            ratios = [mine / theirs for mine, theirs in zip(runs[name], runs[peer])]
            lines.append(
                f"{name} against {peer}, pair by pair: {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})."
            )
    lines += [
        "",
        f"MonoBeast plays on {EMULATORS[result['atari_backend']]}, the peers on ale-py.",
        "",
        "MonoBeast computes in bf16 where the CPU has it (`--amp auto`; heads, loss and optimizer in fp32), the peers "
        "in fp32.",
        "",
        "| | settings that were tried | agent steps/s |",
        "|---|---|---|",
        *(
            f"| {name} | `{setting}` | {speed:,.0f} |"
            for name, sweep in result["sweeps"].items()
            for setting, speed in sweep.items()
        ),
        "",
        f"`{result['command']}`",
    ]
    return "\n".join(lines) + "\n"


def install(venv: str, requirements: str) -> str:
    """The Python of a peer's virtual environment."""
    python, installed = Path(venv) / "bin" / "python", Path(venv) / ".installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-r", str(HERE / requirements)], check=True)
        installed.touch()
    return str(python)


def versions(python: str) -> str:
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    wanted = r"^(?:sample-factory|stable[_-]baselines3|torch|numpy|gymnasium|ale-py|opencv-python(?:-headless)?)==.*$"
    return ", ".join(re.findall(wanted, frozen, re.MULTILINE))


def measure_peer(command: list[str], log: str, parse: Callable[[str], list], warmup: float, seconds: float) -> float:
    """Agent steps/s of a command that goes on for ever (Sample Factory did not heed its own limit of time): it is ended
    when it has trained for so long.

    `parse` finds points (time, agent steps) in its `log`, or in what it prints while there is none. `{root}` in
    `command` and `log` stands for a new directory.
    """
    with tempfile.TemporaryDirectory() as root, open(os.path.join(root, "output"), "w") as output:
        command = [part.replace("{root}", root) for part in command]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline, points, text = time.monotonic() + STARTUP + warmup + seconds, [], ""
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(1)
                path = Path(log.replace("{root}", root))
                text = (path if path.exists() else Path(output.name)).read_text()
                points = [point for point in parse(text) if point[1] > 0]
                if points and points[-1][0] - points[0][0] >= warmup + seconds:
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):  # it failed at its start, which `rate` will tell
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return rate(points, warmup, seconds, text)


def rate(points: list[tuple[float, float]], warmup: float, seconds: float, output: str) -> float:
    """Agent steps/s over the last `seconds` of points (time, agent steps). Raises RuntimeError if they are too few, or
    if the steps stood still for a third of that time: Sample Factory goes on to report when its learner has died."""
    if not points or points[-1][0] - points[0][0] < warmup + seconds:
        raise RuntimeError(f"no {warmup + seconds:.0f} seconds of training were reported:\n{output[-4000:]}")
    measured = [point for point in points if point[0] >= points[-1][0] - seconds]
    last_move = max((at for (at, step), (_, before) in zip(points[1:], points) if step > before), default=points[0][0])
    if points[-1][0] - last_move > seconds / 3:
        raise RuntimeError(f"training stood still for {points[-1][0] - last_move:.0f} seconds:\n{output[-4000:]}")
    (first_second, first_step), (last_second, last_step) = measured[0], measured[-1]
    return (last_step - first_step) / (last_second - first_second)


def stable_baselines3(python: str, arguments: str, warmup: float, seconds: float) -> float:
    """Agent steps/s."""

    def parse(text: str) -> list[tuple[float, float]]:
        return [(float(at), float(step)) for at, step in re.findall(r"^([\d.]+) (\d+)$", text, re.MULTILINE)]

    command = [python, str(HERE / "train_stable_baselines3.py"), *arguments.split()]
    return measure_peer(command, "{root}/output", parse, warmup, seconds)


def sample_factory(python: str, arguments: str, warmup: float, seconds: float) -> float:
    """Agent steps/s that its learner has taken in. Its own figure is an average over coarse intervals."""

    def parse(text: str) -> list[tuple[float, float]]:
        reports = re.findall(r"\[([\d-]+ [\d:]+),(\d+)\].*Total num frames: (\d+)", text)
        return [
            (time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1000, int(frames) / FRAMES_PER_STEP)
            for at, ms, frames in reports
        ]

    command = [python, str(HERE / "train_sample_factory.py"), *arguments.split(), "--train_dir", "{root}"]
    command += ["--experiment", "run"]
    return measure_peer(command, "{root}/run/sf_log.txt", parse, warmup, seconds)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
