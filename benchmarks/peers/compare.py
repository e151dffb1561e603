"""MonoBeast and Sample Factory 2.1.1 on the same task and cores, one after the other, again and again.

    python benchmarks/peers/compare.py            # about 40 minutes; writes benchmarks/results/peers.{json,md}
    python benchmarks/peers/compare.py --lstm     # the same with a recurrent core of 512 units in both

Breakout 84x84x4, Nature CNN with 512 features, rollouts of 20 steps, updates of 640 steps, one epoch, each sample used
once. Sample Factory runs its own Atari example in a virtual environment of its own, first with every setting of the
sweep below, then with the fastest of them in turn with MonoBeast. Both are measured by the steps that their learners
have taken in, the warm-up left out. Sample Factory uses GAE: V-trace crashes in this release (its issue 278).
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import throughput  # noqa: E402

HERE = Path(__file__).resolve().parent
FRAMES_PER_STEP = 4
STARTUP = 15.0  # seconds that Sample Factory has for its processes to start
TASK = (
    "--env atari_breakout --device cpu --async_rl True --serial_mode False --rollout 20 --batch_size 640"
    " --num_batches_per_epoch 1 --num_epochs 1 --normalize_input False --normalize_returns False"
    " --train_for_env_steps 1000000000 --save_every_sec 100000 --save_best_every_sec 100000"
)
LSTM = "--use_rnn True --rnn_type lstm --rnn_size 512 --recurrence 20"
SWEEP = [  # two workers, one for each core; each with two groups of environments, as in MonoBeast
    "--num_workers 2 --num_envs_per_worker 16 --worker_num_splits 2",
    "--num_workers 2 --num_envs_per_worker 32 --worker_num_splits 2",
    "--num_workers 2 --num_envs_per_worker 32 --worker_num_splits 2 --batched_sampling True",
    "--num_workers 2 --num_envs_per_worker 32 --worker_num_splits 2 --set_workers_cpu_affinity False",
]


@dataclass
class Options:
    """What to compare."""

    seconds: float = 120.0
    """Measured seconds of each run."""
    sweep_seconds: float = 60.0
    """Measured seconds of each setting of Sample Factory's sweep."""
    warmup: float = 30.0
    """Seconds before the measurement."""
    repeats: int = 3
    """Pairs of runs; the table shows their median, lowest and highest."""
    lstm: bool = False
    """Compare with an LSTM of 512 units in both."""
    venv: str = str(ROOT / ".venv-sample-factory")
    """Sample Factory's virtual environment, made where there is none."""
    out: str = str(ROOT / "benchmarks" / "results")
    """Directory for the JSON and Markdown files."""


def main(options: Options) -> None:
    import monobeast

    python = install(Path(options.venv))
    flags = monobeast.Flags(env="BreakoutNoFrameskip-v4", batch_width=32)
    ours = []
    if options.lstm:
        flags, ours = replace(flags, core="lstm", core_size=512), ["--core", "lstm", "--core_size", "512"]
    flags = monobeast.validate(flags)
    core = LSTM if options.lstm else "--use_rnn False"
    sweep = {}
    for setting in SWEEP:
        sweep[setting] = sample_factory(python, f"{TASK} {core} {setting}", options.warmup, options.sweep_seconds)
        print(f"{sweep[setting]:7,.0f} steps/s  {setting}", flush=True)
    best = max(sweep, key=sweep.get)
    runs: dict[str, list[float]] = {"MonoBeast": [], "MonoBeast, --amp off": [], "Sample Factory": []}
    for repeat in range(options.repeats):
        for name, precision in (("MonoBeast", []), ("MonoBeast, --amp off", ["--amp", "off"])):
            runs[name].append(throughput.trained("monobeast.py", flags, options, *ours, *precision))
        runs["Sample Factory"].append(sample_factory(python, f"{TASK} {core} {best}", options.warmup, options.seconds))
        print(f"repetition {repeat + 1}: " + ", ".join(f"{k} {v[-1]:,.0f}" for k, v in runs.items()), flush=True)
    ratios = {name: [mono / peer for mono, peer in zip(runs[name], runs["Sample Factory"])] for name in list(runs)[:2]}
    versions = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    wanted = re.findall(r"^(?:sample-factory|torch|numpy|gymnasium|ale-py|opencv-python)==.*$", versions, re.MULTILINE)
    result = {
        "command": "python benchmarks/peers/compare.py " + " ".join(sys.argv[1:]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip(),
        "hardware": f"{throughput.cpu_model()}, {os.cpu_count()} cores",
        "versions": wanted,
        "sample_factory": f"{TASK} {core} {best}",
        "sweep": sweep,
        "runs": runs,
        "ratios": ratios,
        "flags": asdict(flags),
    }
    model = "Nature CNN and an LSTM of 512 units" if options.lstm else "Nature CNN"
    lines = [
        f"# MonoBeast and Sample Factory on Breakout, {model}",
        "",
        f"{result['hardware']}; T=20, 640 steps an update, one epoch; commit {result['commit'][:10]}; "
        f"Sample Factory with {', '.join(wanted)}.",
        "",
        "| | agent steps/s: median (lowest to highest) | frames/s |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f}) "
            f"| {FRAMES_PER_STEP * statistics.median(values):,.0f} |"
            for name, values in runs.items()
        ),
        "",
        *(
            f"{name} against Sample Factory, pair by pair: {statistics.median(values):.2f} "
            f"({min(values):.2f} to {max(values):.2f})."
            for name, values in ratios.items()
        ),
        "",
        "MonoBeast's image encoder computes in bf16 where the CPU has it (`--amp auto`), Sample Factory's in fp32.",
        "",
        "| Sample Factory's settings that were tried | agent steps/s |",
        "|---|---|",
        *(f"| `{setting}` | {speed:,.0f} |" for setting, speed in sweep.items()),
        "",
        f"`{result['command']}`",
    ]
    path = os.path.join(options.out, "peers-lstm" if options.lstm else "peers")
    with open(path + ".json", "w") as file:
        json.dump(result, file, indent=1)
    with open(path + ".md", "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))


def install(venv: Path) -> str:
    """The Python of Sample Factory's virtual environment."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        requirements = str(HERE / "requirements-sample-factory.txt")
        subprocess.run([str(python), "-m", "pip", "install", "-r", requirements], check=True)
    return str(python)


def sample_factory(python: str, arguments: str, warmup: float, seconds: float) -> float:
    """Agent steps/s that its learner has taken in. Its own figure is an average over coarse intervals."""
    with tempfile.TemporaryDirectory() as root:
        command = [python, str(HERE / "train_sample_factory.py"), *arguments.split(), "--train_dir", root]
        command += ["--experiment", "run"]
        log = Path(root) / "run" / "sf_log.txt"
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:  # it does not stop by itself: its --train_for_seconds went on
            process.wait(STARTUP + warmup + seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output = log.read_text() if log.exists() else ""
    reports = re.findall(r"\[([\d-]+ [\d:]+),(\d+)\].*Total num frames: (\d+)", output)
    points = [
        (time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S")) + int(ms) / 1000, int(frames) / FRAMES_PER_STEP)
        for at, ms, frames in reports
    ]
    if not points or points[-1][0] - points[0][0] < seconds:
        raise RuntimeError(f"Sample Factory reported no {seconds:.0f} seconds of training:\n{output[-4000:]}")
    measured = [point for point in points if point[0] >= points[-1][0] - seconds]
    (first_second, first_step), (last_second, last_step) = measured[0], measured[-1]
    return (last_step - first_step) / (last_second - first_second)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
