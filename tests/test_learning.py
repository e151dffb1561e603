"""Small tasks that an untrained agent cannot do, learned by the program that users start."""

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from learning import TASKS  # noqa: E402


def train(tmp_path, task: str, total_steps: int, *flags: str) -> list[float]:
    """The returns that a benchmark task reached in fewer steps than it has there: one for each row of metrics."""
    command = [
        sys.executable,
        str(ROOT / "monobeast.py"),
        *TASKS[task].split(),
        "--root",
        str(tmp_path),
        "--name",
        "run",
    ]
    command += ["--total_steps", str(total_steps), "--log_steps", "5000", "--no_tensorboard", "--deterministic", *flags]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr
    with open(tmp_path / "run" / "metrics.csv") as file:
        return [float(row["charts/episodic_return"]) for row in csv.DictReader(file)]


def test_cartpole_is_learned(tmp_path):
    returns = train(tmp_path, "cartpole", 120_000)
    assert returns[0] < 40, "a random policy balances for 22 steps"
    assert returns[-1] > 150, returns  # means of 100 games; seeds 1 to 3: 284, 213, 362


def test_the_memory_task_is_learned_with_an_lstm(tmp_path):
    returns = train(tmp_path, "memory-lstm", 80_000)
    assert max(returns[:2]) < 0.6, "without a memory half of the answers are wrong: 0"
    assert returns[-1] > 0.8, returns
